//! The fused MLP block: gate and up side by side, the gated activation and its gradients written as the products read them.

use profile::Work;

use super::super::operand::{Operand, OperandBuffer};
use super::super::product::{Into, View};
use super::super::{Cpu, Tensor, pointwise};
use super::prepared::{Input, Prepared, Wanted};
use super::projection::{is_covered, reads_values};
use crate::adapter::Projection;
use crate::blocks::composed::{PostNormSaved, branch_gradient};
use crate::blocks::{GateUpProjections, InputGradient, MlpBlock};
use crate::ops::{Compute, Result, Write};
use crate::random::Draws;

/// What the fused MLP block keeps for its backward; the normed input and the gated activation are computed again.
#[derive(Default)]
pub(super) struct FusedMlpSaved {
    x: Tensor,
    inverse_rms: Tensor,
    /// Gate and up: side by side in f32 or, where that is computed in, in bf16, both of an element in a word. In f32 the backward writes
    /// their gradients in their place.
    gate_up: Tensor,
    low_rank: LowRank,
    post_norm: PostNormSaved<Tensor>,
}

/// What went through the low rank of the adapters; that of a projection to both gate and up is in `gate`.
#[derive(Default)]
struct LowRank {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

/// The gradients of gate and up.
enum Gradients {
    /// In f32, side by side where gate and up were kept.
    InPlace,
    /// Rounded.
    Prepared(Box<[Prepared; 2]>),
}

impl Gradients {
    /// As the projections to gate and up read them; for one projection to both, both times those of both.
    fn inputs<'a>(&'a self, block: &MlpBlock<Cpu>, in_place: &'a Tensor) -> [Input<'a>; 2] {
        let of_f32 = |values: View<'a>| Input { operand: Operand::F32(values), values: Some(values) };
        match (self, &block.gate_up) {
            (Self::InPlace, GateUpProjections::Split { .. }) => {
                let width = block.gate_up.width();
                [0..width, width..2 * width].map(|columns| of_f32(in_place.view().column_range(columns)))
            }
            (Self::InPlace, GateUpProjections::Fused { .. }) => [of_f32(in_place.view()); 2],
            (Self::Prepared(prepared), GateUpProjections::Split { .. }) => prepared.each_ref().map(Prepared::input),
            (Self::Prepared(prepared), GateUpProjections::Fused { .. }) => [prepared[0].input(); 2],
        }
    }
}

/// Whether this computes the block.
pub(super) fn covers(block: &MlpBlock<Cpu>) -> bool {
    block.gate_up.all(is_covered) && is_covered(&block.down_proj)
}

impl GateUpProjections<Cpu> {
    fn all(&self, is: impl Fn(&Projection<Cpu>) -> bool) -> bool {
        match self {
            Self::Split { gate_proj, up_proj } => is(gate_proj) && is(up_proj),
            Self::Fused { gate_up_proj } => is(gate_up_proj),
        }
    }

    fn any(&self, is: impl Fn(&Projection<Cpu>) -> bool) -> bool {
        !self.all(|projection| !is(projection))
    }

    /// Columns of the gate, and of what is gated.
    fn width(&self) -> usize {
        match self {
            Self::Split { gate_proj, .. } => gate_proj.matrix.out_features,
            Self::Fused { gate_up_proj } => gate_up_proj.matrix.out_features / 2,
        }
    }
}

impl Cpu {
    /// The forward; see [`crate::blocks::Blocks::mlp_block`].
    pub(super) fn fused_mlp(
        &self,
        block: &MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        x: &mut Tensor,
        saved: &mut FusedMlpSaved,
    ) -> Result {
        let FusedMlpSaved { x: input, inverse_rms, gate_up, low_rank, post_norm } = saved;
        let wanted = Wanted::with_values(block.gate_up.any(reads_values));
        let normed = self.normed(&block.norm, x, wanted, Some(input), inverse_rms);
        // What was kept for the backward before is not needed any more.
        let products = if self.compute == Compute::Bf16 { Tensor::default() } else { std::mem::take(gate_up) };
        let products = self.gate_and_up(block, normed.input(), draws, products, low_rank)?;
        drop(normed);
        let hidden = self.gated_and_kept(block, products, gate_up);
        let (down_proj, down_norm) = (&block.down_proj, block.post_norm.as_ref());
        self.add_projected(down_proj, down_norm, hidden.input(), draws, x, &mut low_rank.down, post_norm)
    }

    /// Gate and up side by side, in the memory of `products`.
    fn gate_and_up(
        &self,
        block: &MlpBlock<Self>,
        normed: Input<'_>,
        draws: Option<Draws<'_>>,
        mut products: Tensor,
        low_rank: &mut LowRank,
    ) -> Result<Tensor> {
        let width = block.gate_up.width();
        products.reshape(&self.buffers, normed.operand.rows(), 2 * width);
        match &block.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => {
                let gate = products.view_mut().column_range(0..width);
                self.project(gate_proj, normed, draws, Into::Replace, gate, &mut low_rank.gate)?;
                let up = products.view_mut().column_range(width..2 * width);
                self.project(up_proj, normed, draws, Into::Replace, up, &mut low_rank.up)?;
            }
            GateUpProjections::Fused { gate_up_proj } => {
                let both = products.view_mut();
                self.project(gate_up_proj, normed, draws, Into::Replace, both, &mut low_rank.gate)?;
            }
        }
        Ok(products)
    }

    /// The gated activation, as the projection down reads it. Gate and up go to where they are kept.
    fn gated_and_kept(&self, block: &MlpBlock<Self>, products: Tensor, kept: &mut Tensor) -> Prepared {
        let _kernel = self.profile.kernel("gated", || Work::values(5 * products.rows() * products.columns() / 2));
        let (rows, width) = (products.rows(), block.gate_up.width());
        let wanted = Wanted::with_values(reads_values(&block.down_proj));
        if self.compute != Compute::Bf16 {
            *kept = products;
            return self.prepare(rows, width, wanted, |row, hidden| {
                let (gate, up) = kept.view().row(row).split_at(width);
                pointwise::gated(self.set, block.activation, gate, up, hidden);
            });
        }
        kept.reshape(&self.buffers, rows, width);
        let kept = kept.target();
        self.prepare(rows, width, wanted, |row, hidden| {
            let (gate, up) = products.view().row(row).split_at(width);
            pointwise::gated(self.set, block.activation, gate, up, hidden);
            // SAFETY: each row is written once.
            pointwise::round_pairs(self.set, gate, up, unsafe { kept.row(row, 0..width) });
        })
    }

    /// Gate and up of a row, from what was kept; what is rounded is widened into `scratch`, of two widths.
    fn kept_gate_up<'a>(&self, kept: &'a Tensor, row: usize, scratch: &'a mut [f32]) -> (&'a [f32], &'a [f32]) {
        let row = kept.view().row(row);
        if self.compute != Compute::Bf16 {
            return row.split_at(row.len() / 2);
        }
        let (gate, up) = scratch.split_at_mut(row.len());
        pointwise::widen_pairs(self.set, row, gate, up);
        (gate, up)
    }

    /// The backward; see [`crate::blocks::Blocks::mlp_block_backward`].
    pub(super) fn fused_mlp_backward(
        &self,
        block: &mut MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        saved: &mut FusedMlpSaved,
        gradient: &mut Tensor,
        input_gradient: InputGradient,
    ) -> Result {
        let dhidden = self.down_backward(block, draws, saved, gradient)?;
        let of_products = self.gated_gradients(block, &mut saved.gate_up, &dhidden);
        drop(dhidden);
        let FusedMlpSaved { x, inverse_rms, gate_up, low_rank, .. } = saved;
        let [of_first, of_second] = of_products.inputs(block, gate_up);
        let needed = input_gradient == InputGradient::Needed || block.norm.weight.is_trained();
        let mut dnormed = needed.then(|| self.shaped(x.rows(), x.columns()));
        let is_trained = block.gate_up.any(Projection::is_trained);
        let normed = is_trained.then(|| self.normed_again(&block.norm, x)).transpose()?;
        let normed = normed.as_ref().map(Tensor::view);
        match &mut block.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => {
                let into = dnormed.as_mut().map(|dx| (Into::Replace, dx));
                self.project_backward(gate_proj, &low_rank.gate, normed, draws, of_first, into)?;
                let into = dnormed.as_mut().map(|dx| (Into::Add, dx));
                self.project_backward(up_proj, &low_rank.up, normed, draws, of_second, into)?;
            }
            GateUpProjections::Fused { gate_up_proj } => {
                let into = dnormed.as_mut().map(|dx| (Into::Replace, dx));
                self.project_backward(gate_up_proj, &low_rank.gate, normed, draws, of_first, into)?;
            }
        }
        match dnormed {
            Some(dnormed) => block.norm.backward(self, x, inverse_rms, &dnormed, Write::Add, gradient),
            None => Ok(()),
        }
    }

    /// The gradient of the gated activation.
    fn down_backward(
        &self,
        block: &mut MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        saved: &FusedMlpSaved,
        gradient: &Tensor,
    ) -> Result<Tensor> {
        let width = block.gate_up.width();
        let branch = branch_gradient(self, block.post_norm.as_mut(), &saved.post_norm, gradient)?;
        let branch = branch.as_ref().unwrap_or(gradient);
        let hidden = block.down_proj.is_trained().then(|| self.gated_again(block, &saved.gate_up));
        let hidden = hidden.as_ref().map(Tensor::view);
        let mut dhidden = self.shaped(branch.rows(), width);
        let mut buffer = OperandBuffer::default();
        let (dy, into) = (self.input_of(branch, &mut buffer), Some((Into::Replace, &mut dhidden)));
        self.project_backward(&mut block.down_proj, &saved.low_rank.down, hidden, draws, dy, into)?;
        Ok(dhidden)
    }

    /// The gated activation in f32, from what was kept.
    fn gated_again(&self, block: &MlpBlock<Self>, kept: &Tensor) -> Tensor {
        let _kernel = self.profile.kernel("gated again", || Work::values(3 * kept.rows() * block.gate_up.width()));
        let width = block.gate_up.width();
        let mut hidden = self.shaped(kept.rows(), width);
        let target = hidden.target();
        self.each_block(kept.rows(), width, |rows| {
            let mut scratch = vec![0.0; 2 * width];
            for row in rows {
                let (gate, up) = self.kept_gate_up(kept, row, &mut scratch);
                // SAFETY: each row is written once.
                pointwise::gated(self.set, block.activation, gate, up, unsafe { target.row(row, 0..width) });
            }
        });
        hidden
    }

    /// The gradients of gate and up, in f32 in the place of what was kept of these.
    fn gated_gradients(&self, block: &MlpBlock<Self>, kept: &mut Tensor, dhidden: &Tensor) -> Gradients {
        let _kernel = self.profile.kernel("gated backward", || Work::values(5 * dhidden.rows() * dhidden.columns()));
        if self.compute == Compute::Bf16 {
            return Gradients::Prepared(Box::new(self.prepared_gradients(block, kept, dhidden)));
        }
        let (rows, width) = (dhidden.rows(), dhidden.columns());
        let target = kept.target();
        self.each_block(rows, 4 * width, |rows| {
            let mut gate_up = vec![0.0; 2 * width];
            for row in rows {
                // SAFETY: each row is read and written by one thread.
                let in_place = unsafe { target.row(row, 0..2 * width) };
                gate_up.copy_from_slice(in_place);
                let (gate, up) = gate_up.split_at(width);
                let (dgate, dup) = in_place.split_at_mut(width);
                pointwise::gated_backward(self.set, block.activation, gate, up, dhidden.view().row(row), dgate, dup);
            }
        });
        Gradients::InPlace
    }

    /// The gradients of gate and up, rounded; of one projection to both, side by side in the first.
    fn prepared_gradients(&self, block: &MlpBlock<Self>, kept: &Tensor, dhidden: &Tensor) -> [Prepared; 2] {
        let (rows, width) = (dhidden.rows(), dhidden.columns());
        let [mut first, mut second] = <[Prepared; 2]>::default();
        let wanted = |projection: &Projection<Self>| Wanted::with_values(projection.is_trained());
        // Where the gradients of gate and up go, and to which columns.
        let [(dgate, _), (dup, up_column)] = match &block.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => [
                (self.prepared_target(rows, width, wanted(gate_proj), &mut first), 0),
                (self.prepared_target(rows, width, wanted(up_proj), &mut second), 0),
            ],
            GateUpProjections::Fused { gate_up_proj } => {
                let both = self.prepared_target(rows, 2 * width, wanted(gate_up_proj), &mut first);
                [(both, 0), (both, width)]
            }
        };
        self.each_block(rows, 4 * width, |rows| {
            let mut scratch = vec![0.0; 2 * width];
            let mut gradients = vec![0.0; 2 * width];
            let (of_gate, of_up) = gradients.split_at_mut(width);
            for row in rows {
                let (gate, up) = self.kept_gate_up(kept, row, &mut scratch);
                pointwise::gated_backward(
                    self.set,
                    block.activation,
                    gate,
                    up,
                    dhidden.view().row(row),
                    of_gate,
                    of_up,
                );
                // SAFETY: each row is written by one thread.
                unsafe {
                    dgate.write(row, 0, of_gate);
                    dup.write(row, up_column, of_up);
                }
            }
        });
        [first, second]
    }
}
