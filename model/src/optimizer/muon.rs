//! Muon: momentum, orthogonalised. For matrices; AdamW updates everything else.

use serde::{Deserialize, Serialize};

use super::{AdamW, Element, Elementwise, Rule, StateFormat, StateSpec, Step, TensorInfo, Updated};
use crate::ops::{Form, Ops, Result, Write};

/// Coefficients of the quintic, which raise small singular values fast: after five iterations they are all about 1.
const COEFFICIENTS: (f64, f64, f64) = (3.4445, -4.7750, 2.0315);
const ITERATIONS: usize = 5;
/// The least norm that a matrix is divided by.
const EPS: f32 = 1e-7;

/// Muon of matrices. Tensors of one dimension, the embedding and the LM head, with what adapts them, are AdamW's.
///
/// With `g = gradient · gradient_scale`: `b ← momentum·b + (1 - momentum)·g`; `u = momentum·b + (1 - momentum)·g` if
/// nesterov, else `u = b`; `O` is `u` with its singular values made about 1, by five Newton–Schulz iterations in bf16;
/// `p ← p - lr·weight_decay·p`; `p ← p - lr · ratio · O`, with the ratio of [`AdjustLr`].
///
/// Source: Jordan, <https://kellerjordan.github.io/posts/muon/>, as in `torch.optim.Muon`; Liu et al., arXiv:2502.16982.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Muon {
    /// Decay rate of the momentum buffer.
    pub momentum: f64,
    /// Looks one step ahead along the buffer.
    pub nesterov: bool,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// How the learning rate depends on a matrix's shape.
    pub adjust_lr: AdjustLr,
    /// The optimizer of everything else.
    pub adamw: AdamW,
}

/// The factor on the learning rate of a matrix of `rows × columns`, by torch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// `sqrt(max(1, rows / columns))`.
    Original,
    /// `0.2 · sqrt(max(rows, columns))`: updates are as large as AdamW's, whose learning rates then fit.
    MatchRmsAdamw,
}

impl Default for Muon {
    /// As in PyTorch: 0.95, nesterov, a decay of 0.1, the original scaling.
    fn default() -> Self {
        let adamw = AdamW::default();
        Self { momentum: 0.95, nesterov: true, weight_decay: 0.1, adjust_lr: AdjustLr::Original, adamw }
    }
}

impl AdjustLr {
    fn ratio(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            Self::Original => (rows / columns).max(1.0).sqrt(),
            Self::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

/// Whether a tensor is one whose rows and columns are features of a hidden layer.
fn is_hidden_matrix(tensor: TensorInfo<'_>) -> bool {
    tensor.shape.len() == 2 && !["embed_tokens", "lm_head"].iter().any(|table| tensor.name.contains(table))
}

impl Rule for Muon {
    fn state(&self, tensor: TensorInfo<'_>) -> Vec<StateSpec> {
        if is_hidden_matrix(tensor) {
            vec![StateSpec { name: "momentum_buffer", format: StateFormat::F32 }]
        } else {
            self.adamw.state(tensor)
        }
    }

    /// A gradient whose norm is below `EPS` is not brought to norm 1, and its update may round to nothing.
    fn rate_moves(&self) -> bool {
        false
    }

    fn update<O: Ops>(
        &self,
        ops: &O,
        step: &Step,
        tensor: TensorInfo<'_>,
        Updated { value, gradient, state }: Updated<'_, O::Tensor>,
    ) -> Result {
        if !is_hidden_matrix(tensor) {
            return self.adamw.update(ops, step, tensor, Updated { value, gradient, state });
        }
        let (rows, columns) = ops.shape(value);
        let momentum = Momentum {
            scale: step.gradient_scale as f32,
            momentum: self.momentum as f32,
            new: (1.0 - self.momentum) as f32,
            nesterov: self.nesterov,
        };
        let mut update = ops.zeros(rows, columns)?;
        ops.update(&momentum, Updated { value: &mut update, gradient, state })?;
        orthogonalise(ops, Precision::Bf16, &mut update)?;
        let rate = step.learning_rate * self.adjust_lr.ratio(rows, columns);
        let descent = Descent { keep: (1.0 - step.learning_rate * self.weight_decay) as f32, rate: rate as f32 };
        ops.update(&descent, Updated { value, gradient: &update, state: &mut [] })
    }
}

/// The dtype that intermediate results are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Precision {
    Bf16,
    /// Of sums that are rounded later, and in tests, which bf16 would hide errors of the iteration from.
    F32,
}

impl Precision {
    #[inline(always)]
    fn round<E: Element>(self, value: E) -> E {
        match self {
            Self::Bf16 => value.round_to_bf16(),
            Self::F32 => value,
        }
    }
}

/// Makes the singular values of a matrix about 1, by Newton–Schulz iterations on `X = u / ‖u‖`:
/// `X ← a·X + (b·G + c·G²)·X` with `G = X·Xᵀ`, from the side on which `G` is smaller.
///
/// In bf16 each result is rounded to it and sums are f32, as torch does.
fn orthogonalise<O: Ops>(ops: &O, precision: Precision, x: &mut O::Tensor) -> Result {
    let (rows, columns) = ops.shape(x);
    let (is_tall, side) = (rows > columns, rows.min(columns));
    // Its results are written to another tensor than its operand.
    let scale = |factor: f64, precision, operand: &O::Tensor, result: &mut O::Tensor| {
        let scale = Scale { factor: factor as f32, precision };
        ops.update(&scale, Updated { value: result, gradient: operand, state: &mut [] })
    };
    let mut next = ops.zeros(rows, columns)?;
    scale(1.0, precision, x, &mut next)?;
    let norm = precision.round(ops.sum_of_squares(&next)?.sqrt() as f32).max(EPS);
    scale(1.0 / f64::from(norm), precision, &next, x)?;
    let mut squares = [(); 3].map(|()| ops.zeros(side, side)).into_iter();
    let mut square = || squares.next().expect("three squares");
    let (mut product, mut gram, mut polynomial) = (square()?, square()?, square()?);
    let (a, b, c) = COEFFICIENTS;
    for _ in 0..ITERATIONS {
        let form = if is_tall { Form::Tn } else { Form::Nt };
        ops.matmul(form, 1.0, x, x, Write::Replace, &mut product)?;
        scale(1.0, precision, &product, &mut gram)?;
        scale(b, Precision::F32, &gram, &mut polynomial)?;
        ops.matmul(Form::Nn, c as f32, &gram, &gram, Write::Add, &mut polynomial)?;
        scale(1.0, precision, &polynomial, &mut product)?;
        scale(a, Precision::F32, x, &mut next)?;
        let (left, right) = if is_tall { (&*x, &product) } else { (&product, &*x) };
        ops.matmul(Form::Nn, 1.0, left, right, Write::Add, &mut next)?;
        scale(1.0, precision, &next, x)?;
    }
    Ok(())
}

/// The momentum buffer, and as the value what is orthogonalised.
#[derive(Clone, Copy)]
struct Momentum {
    scale: f32,
    momentum: f32,
    /// One minus it.
    new: f32,
    nesterov: bool,
}

impl Elementwise<1> for Momentum {
    const NAME: &'static str = "muon momentum";

    #[inline(always)]
    fn element<E: Element>(&self, _: E, g: E, [b]: [E; 1]) -> (E, [E; 1]) {
        let g = g * self.scale;
        let b = b * self.momentum + g.clone() * self.new;
        let ahead = if self.nesterov { b.clone() * self.momentum + g * self.new } else { b.clone() };
        (ahead, [b])
    }
}

/// `factor · operand`, rounded.
#[derive(Clone, Copy)]
struct Scale {
    factor: f32,
    precision: Precision,
}

impl Elementwise<0> for Scale {
    const NAME: &'static str = "muon scale";

    #[inline(always)]
    fn element<E: Element>(&self, _: E, operand: E, _: [E; 0]) -> (E, [E; 0]) {
        (self.precision.round(operand * self.factor), [])
    }
}

/// The update of the parameters, by the orthogonalised momentum.
#[derive(Clone, Copy)]
struct Descent {
    keep: f32,
    rate: f32,
}

impl Elementwise<0> for Descent {
    const NAME: &'static str = "muon descent";

    #[inline(always)]
    fn element<E: Element>(&self, p: E, direction: E, _: [E; 0]) -> (E, [E; 0]) {
        (p * self.keep - direction * self.rate, [])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candle::Candle;
    use crate::cpu::{Cpu, InstructionSet};
    use crate::ops::Compute;

    /// `a · b`, `[rows, inner]` by `[inner, columns]`, in f64.
    fn product(a: &[f64], b: &[f64], [rows, inner, columns]: [usize; 3]) -> Vec<f64> {
        let element = |at: usize| (0..inner).map(|k| a[at / columns * inner + k] * b[k * columns + at % columns]).sum();
        (0..rows * columns).map(element).collect()
    }

    fn transposed(a: &[f64], rows: usize, columns: usize) -> Vec<f64> {
        (0..rows * columns).map(|at| a[at % rows * columns + at / rows]).collect()
    }

    /// The iteration in f64, from the left, as it is written down.
    fn reference(u: &[f64], rows: usize, columns: usize) -> Vec<f64> {
        let norm = u.iter().map(|value| value * value).sum::<f64>().sqrt();
        let mut x: Vec<f64> = u.iter().map(|value| value / norm).collect();
        let (a, b, c) = COEFFICIENTS;
        for _ in 0..ITERATIONS {
            let gram = product(&x, &transposed(&x, rows, columns), [rows, columns, rows]);
            let square = product(&gram, &gram, [rows, rows, rows]);
            let polynomial: Vec<f64> = gram.iter().zip(square).map(|(gram, square)| b * gram + c * square).collect();
            let change = product(&polynomial, &x, [rows, rows, columns]);
            x = x.iter().zip(change).map(|(x, change)| a * x + change).collect();
        }
        x
    }

    /// The largest difference to the reference, over its largest element.
    fn error<O: Ops>(ops: &O, precision: Precision, rows: usize, columns: usize) -> f64 {
        let values: Vec<f32> = (0..rows * columns).map(|at| (0.7 * at as f32 + 0.1 * (at * at) as f32).sin()).collect();
        let mut x = ops.tensor(rows, columns, &values).unwrap();
        orthogonalise(ops, precision, &mut x).unwrap();
        let expected = reference(&values.into_iter().map(f64::from).collect::<Vec<_>>(), rows, columns);
        let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
        let found = ops.read(&x).unwrap();
        let apart = found.iter().zip(&expected).map(|(found, expected)| (f64::from(*found) - expected).abs());
        apart.fold(0.0, f64::max) / largest
    }

    fn is_close<O: Ops>(ops: &O) {
        for (rows, columns) in [(8, 8), (5, 24), (24, 5), (1, 7), (33, 16), (64, 8)] {
            let (exact, rounded) =
                (error(ops, Precision::F32, rows, columns), error(ops, Precision::Bf16, rows, columns));
            assert!(exact <= 2e-6, "{}: {exact:e} of {rows} × {columns} in f32", ops.describe());
            assert!(rounded <= 5e-2, "{}: {rounded:e} of {rows} × {columns} in bf16", ops.describe());
        }
    }

    #[test]
    fn the_iteration_is_that_of_the_formula_on_every_kernel_set() {
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            is_close(&Cpu::with_instructions(1, Compute::F32, set).unwrap());
        }
        is_close(&Candle::on_processor());
    }

    #[test]
    fn embedding_head_and_vectors_are_left_to_adamw() {
        let states = |name, shape: &[usize]| {
            Muon::default().state(TensorInfo { name, shape }).iter().map(|spec| spec.name).collect::<Vec<_>>()
        };
        assert_eq!(states("model.layers.0.mlp.up_proj.weight", &[8, 4]), ["momentum_buffer"]);
        assert_eq!(states("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", &[8, 4]), ["momentum_buffer"]);
        for (name, shape) in
            [("model.norm.weight", &[8][..]), ("lm_head.weight", &[8, 4]), ("model.embed_tokens.weight", &[8, 4])]
        {
            assert_eq!(states(name, shape), ["exp_avg", "exp_avg_sq"], "{name}");
        }
    }
}
