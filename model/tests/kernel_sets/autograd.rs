//! The blocks once more, written plainly with candle's differentiable operations and differentiated by its autograd.
//!
//! Attention is one dense matrix of scores over all rows with a mask between documents; nothing is shared with the
//! sets.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{D, Device, Result, Tensor, Var};
use candle_nn::ops::{log_softmax, softmax};
use model::ops::{Activation, NormWeight};

use crate::case::{Case, Extras, RANK, Results, SCALING, values};

/// The trained values of a block, made when they are first asked for.
struct Graph<'a> {
    case: &'a Case,
    variables: RefCell<BTreeMap<String, Var>>,
}

/// Forward and gradients of the three blocks, under the names of [`Case::run_blocks`].
pub(crate) fn run_blocks(case: &Case) -> Result<Results> {
    let mut results = Results::new();
    let output = differentiate(case, "attention", &mut results, |graph, x| graph.attention(x))?;
    results.insert("attention_cached".to_owned(), output.clone());
    results.insert("attention".to_owned(), output);
    let output = differentiate(case, "mlp", &mut results, |graph, x| graph.mlp(x))?;
    results.insert("mlp".to_owned(), output);
    run_head(case, &mut results)?;
    Ok(results)
}

/// Runs a block, differentiates its product with `g`, and records the gradients. Returns the output.
fn differentiate(
    case: &Case,
    block: &str,
    results: &mut Results,
    forward: impl Fn(&Graph<'_>, &Tensor) -> Result<Tensor>,
) -> Result<Vec<f32>> {
    let graph = Graph { case, variables: RefCell::default() };
    let x = graph.variable("x", (case.rows(), case.hidden_size))?;
    let y = forward(&graph, &x)?;
    let g = Tensor::from_vec(values("g", y.elem_count()), y.shape(), &Device::Cpu)?;
    graph.record(block, &(&y * g)?.sum_all()?, results)?;
    flat(&y)
}

fn run_head(case: &Case, results: &mut Results) -> Result<()> {
    let graph = Graph { case, variables: RefCell::default() };
    let x = graph.variable("x", (case.rows(), case.hidden_size))?;
    let normed = graph.norm("norm", &x, case.hidden_size)?;
    let logits = graph.linear("head", &normed, case.vocab_size)?;
    let logits = match case.head_soft_cap {
        Some(cap) => ((logits / f64::from(cap))?.tanh()? * f64::from(cap))?,
        None => logits,
    };
    let targets = Tensor::from_vec(case.targets(), (case.rows(), 1), &Device::Cpu)?;
    let nll = log_softmax(&logits, D::Minus1)?.gather(&targets, 1)?.neg()?;
    graph.record("head", &nll.sum_all()?, results)?;
    let rows = logits.to_vec2::<f32>()?;
    let correct = rows.iter().zip(case.targets()).map(|(row, target)| {
        let likelier = row.iter().enumerate().any(|(id, logit)| {
            let target_logit = row[target as usize];
            *logit > target_logit || (*logit == target_logit && id < target as usize)
        });
        f32::from(!likelier)
    });
    results.insert("head.correct".to_owned(), correct.collect());
    results.insert("head.nll".to_owned(), flat(&nll)?);
    results.insert("head".to_owned(), flat(&logits)?);
    Ok(())
}

fn flat(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

impl Graph<'_> {
    fn variable(&self, name: &str, shape: (usize, usize)) -> Result<Tensor> {
        let variable = Var::from_vec(values(name, shape.0 * shape.1), shape, &Device::Cpu)?;
        let tensor = variable.as_tensor().clone();
        self.variables.borrow_mut().insert(name.to_owned(), variable);
        Ok(tensor)
    }

    fn record(&self, block: &str, loss: &Tensor, results: &mut Results) -> Result<()> {
        let gradients = loss.backward()?;
        for (name, variable) in self.variables.borrow().iter() {
            let gradient = match gradients.get(variable) {
                Some(gradient) => flat(gradient)?,
                None => vec![0.0; variable.elem_count()],
            };
            results.insert(format!("{block}.{name}"), gradient);
        }
        Ok(())
    }

    /// Norms the last dimension.
    fn norm(&self, name: &str, x: &Tensor, columns: usize) -> Result<Tensor> {
        let weight = self.variable(name, (1, columns))?.squeeze(0)?;
        let weight = match self.case.norm.weight {
            NormWeight::Plain => weight,
            NormWeight::PlusOne => (weight + 1.0)?,
        };
        let mean = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(self.case.norm.eps))?;
        x.broadcast_div(&mean.sqrt()?)?.broadcast_mul(&weight)
    }

    fn linear(&self, name: &str, x: &Tensor, out_features: usize) -> Result<Tensor> {
        let in_features = x.dim(1)?;
        let weight = self.variable(name, (out_features, in_features))?;
        let a = self.variable(&format!("{name}.a"), (RANK, in_features))?;
        let b = self.variable(&format!("{name}.b"), (out_features, RANK))?;
        let adapted = (x.matmul(&a.t()?)?.matmul(&b.t()?)? * f64::from(SCALING))?;
        let y = (x.matmul(&weight.t()?)? + adapted)?;
        match self.case.extras {
            Extras::All => y.broadcast_add(&self.variable(&format!("{name}.bias"), (1, out_features))?),
            Extras::None => Ok(y),
        }
    }

    fn add_branch(&self, x: &Tensor, branch: Tensor) -> Result<Tensor> {
        match self.case.extras {
            Extras::All => x + self.norm("post_norm", &branch, self.case.hidden_size)?,
            Extras::None => x + branch,
        }
    }

    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (q_width, kv_width) = (self.case.q_width(), self.case.kv_width());
        let normed = self.norm("norm", x, self.case.hidden_size)?;
        let (q, k, v) = match self.case.extras {
            Extras::None => (
                self.linear("q", &normed, q_width)?,
                self.linear("k", &normed, kv_width)?,
                self.linear("v", &normed, kv_width)?,
            ),
            Extras::All => {
                let all = self.linear("qkv", &normed, q_width + 2 * kv_width)?;
                let part = |from, width| all.narrow(1, from, width)?.contiguous();
                (part(0, q_width)?, part(q_width, kv_width)?, part(q_width + kv_width, kv_width)?)
            }
        };
        let (q, k) = (self.prepare_heads("q_norm", &q)?, self.prepare_heads("k_norm", &k)?);
        let shape = self.case.shape;
        let v = v.reshape((self.case.rows(), shape.num_key_value_heads, shape.head_dim))?;
        let group = shape.num_attention_heads / shape.num_key_value_heads;
        let mask = self.mask()?;
        let mut outputs = Vec::new();
        for head in 0..shape.num_attention_heads {
            let of_head = |x: &Tensor, head| x.narrow(1, head, 1)?.squeeze(1)?.contiguous();
            let (q, k, v) = (of_head(&q, head)?, of_head(&k, head / group)?, of_head(&v, head / group)?);
            let scores = (q.matmul(&k.t()?)? * f64::from(shape.scale))?;
            let scores = match shape.soft_cap {
                Some(cap) => ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?,
                None => scores,
            };
            outputs.push(softmax(&(scores + &mask)?, 1)?.matmul(&v)?);
        }
        let branch = self.linear("o", &Tensor::cat(&outputs, 1)?, self.case.hidden_size)?;
        self.add_branch(x, branch)
    }

    /// Norm and rotary embedding of each head: `(rows, heads, head_dim)`.
    fn prepare_heads(&self, norm: &str, x: &Tensor) -> Result<Tensor> {
        let head_dim = self.case.shape.head_dim;
        let rows = self.case.rows();
        let heads = x.reshape((rows, x.dim(1)? / head_dim, head_dim))?;
        let heads = match self.case.extras {
            Extras::All => self.norm(norm, &heads, head_dim)?,
            Extras::None => heads,
        };
        let half = self.case.rotary_dims / 2;
        let angles = self.case.angles();
        let of_rows = self.case.documents.iter().flat_map(|length| angles[..length * half].to_vec());
        let angles = Tensor::from_vec(of_rows.collect::<Vec<f32>>(), (rows, 1, half), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let (a, b) = (heads.narrow(2, 0, half)?, heads.narrow(2, half, half)?);
        let turned_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let turned_b = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
        let rest = heads.narrow(2, 2 * half, head_dim - 2 * half)?;
        if 2 * half == head_dim {
            Tensor::cat(&[turned_a, turned_b], 2)
        } else {
            Tensor::cat(&[turned_a, turned_b, rest], 2)
        }
    }

    /// 0 where a row sees another, very negative elsewhere.
    fn mask(&self) -> Result<Tensor> {
        let owners: Vec<usize> =
            self.case.documents.iter().enumerate().flat_map(|(index, length)| vec![index; *length]).collect();
        let rows = owners.len();
        let window = self.case.shape.window.unwrap_or(rows);
        let sees = |i: usize, j: usize| owners[i] == owners[j] && j <= i && i - j < window;
        let mask = (0..rows * rows).map(|at| if sees(at / rows, at % rows) { 0.0 } else { -1e30 });
        Tensor::from_vec(mask.collect::<Vec<f32>>(), (rows, rows), &Device::Cpu)
    }

    fn mlp(&self, x: &Tensor) -> Result<Tensor> {
        let inner = self.case.inner;
        let normed = self.norm("norm", x, self.case.hidden_size)?;
        let (gate, up) = match self.case.extras {
            Extras::None => (self.linear("gate", &normed, inner)?, self.linear("up", &normed, inner)?),
            Extras::All => {
                let both = self.linear("gate_up", &normed, 2 * inner)?;
                (both.narrow(1, 0, inner)?.contiguous()?, both.narrow(1, inner, inner)?.contiguous()?)
            }
        };
        let active = match self.case.activation {
            Activation::Silu => gate.silu()?,
            Activation::GeluTanh => gate.gelu()?,
        };
        let branch = self.linear("down", &(active * up)?, self.case.hidden_size)?;
        self.add_branch(x, branch)
    }
}
