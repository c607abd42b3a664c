//! The backward of the fused MLP block.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use profile::Work;

use super::super::super::operand::{Operand, OperandBuffer};
use super::super::super::pointwise::{self, GatedGradientRow};
use super::super::super::product::{Target, View};
use super::super::super::scratch::with_buffers;
use super::super::super::simd::{prefetch, prefetch_to_write};
use super::super::super::weight::Sense;
use super::super::super::{Cpu, Tensor};
use super::super::prepared::{Input, Prepared, PreparedTarget, Wanted};
use super::{BLOCK, Columns, FusedMlpSaved, PART, ask_for};
use crate::adapter::Projection;
use crate::blocks::composed::branch_gradient;
use crate::blocks::{GateUpProjections, InputGradient, MlpBlock};
use crate::ops::{Activation, Compute, Result, Write};
use crate::random::Draws;

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

/// Where gate and up were kept, and where their gradients go.
#[derive(Clone, Copy)]
enum Places<'a> {
    /// In f32 side by side, both.
    InPlace(Target<'a>),
    /// The gradients of each, from a column on; both rounded, an element of each in a word.
    Prepared([(PreparedTarget<'a>, usize); 2], View<'a>),
}

impl<'a> Places<'a> {
    /// Columns of a row, where their gradients are written in bf16 alone.
    ///
    /// # Safety
    /// As for [`Cpu::gated_backward`], while the slices live.
    unsafe fn rounded(self, row: usize, columns: &Range<usize>, dy: &'a [f32]) -> Option<GatedGradientRow<'a>> {
        let Self::Prepared(targets, kept) = self else { return None };
        let [dgate, dup] = targets.map(|(target, first)| {
            // SAFETY: the caller vouches for these columns.
            unsafe { target.halves(row, first + columns.start..first + columns.end) }
        });
        Some(GatedGradientRow { words: &kept.row(row)[columns.clone()], dy, dgate: dgate?, dup: dup? })
    }

    /// Asks for what [`Cpu::gated_backward`] reads and writes of some columns of a row.
    ///
    /// # Safety
    /// As there.
    unsafe fn ask_for(self, row: usize, columns: &Range<usize>) {
        let Self::Prepared(targets, kept) = self else { return };
        ask_for(&kept.row(row)[columns.clone()], prefetch);
        for (target, first) in targets {
            // SAFETY: the caller vouches for these elements, which are not touched.
            if let Some(gradients) = unsafe { target.halves(row, first + columns.start..first + columns.end) } {
                ask_for(gradients, prefetch_to_write);
            }
        }
    }
}

impl Cpu {
    /// The backward; see [`crate::blocks::Blocks::mlp_block_backward`].
    pub(in crate::cpu::blocks) fn fused_mlp_backward(
        &self,
        block: &mut MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        saved: &mut FusedMlpSaved,
        gradient: &mut Tensor,
        input_gradient: InputGradient,
    ) -> Result {
        let of_products = self.gated_gradients(block, draws, saved, gradient)?;
        let FusedMlpSaved { x, inverse_rms, gate_up, low_rank, .. } = saved;
        let [of_first, of_second] = of_products.inputs(block, gate_up);
        let needed = input_gradient == InputGradient::Needed || block.norm.weight.is_trained();
        let mut dnormed = needed.then(|| self.shaped(x.rows(), x.columns()));
        let is_trained = block.gate_up.any(Projection::is_trained);
        let normed = is_trained.then(|| self.normed_again(&block.norm, x)).transpose()?;
        let normed = normed.as_ref().map(Tensor::view);
        match &mut block.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => {
                let into = dnormed.as_mut().map(|dx| (Write::Replace, dx));
                self.project_backward(gate_proj, &low_rank.gate, normed, draws, of_first, into)?;
                let into = dnormed.as_mut().map(|dx| (Write::Add, dx));
                self.project_backward(up_proj, &low_rank.up, normed, draws, of_second, into)?;
            }
            GateUpProjections::Fused { gate_up_proj } => {
                let into = dnormed.as_mut().map(|dx| (Write::Replace, dx));
                self.project_backward(gate_up_proj, &low_rank.gate, normed, draws, of_first, into)?;
            }
        }
        match dnormed {
            Some(dnormed) => block.norm.backward(self, x, inverse_rms, &dnormed, Write::Add, gradient),
            None => Ok(()),
        }
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
                let (gate, up) = self.kept_gate_up(kept.view(), row, &(0..width), &mut scratch);
                // SAFETY: each row is written once.
                pointwise::gated(self.set, block.activation, gate, up, unsafe { target.row(row, 0..width) });
            }
        });
        hidden
    }

    /// The gradients of gate and up, in f32 in the place of what was kept of these.
    fn gated_gradients(
        &self,
        block: &mut MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        saved: &mut FusedMlpSaved,
        gradient: &Tensor,
    ) -> Result<Gradients> {
        let FusedMlpSaved { gate_up: kept, low_rank, post_norm, .. } = saved;
        let branch = branch_gradient(self, block.post_norm.as_mut(), post_norm, gradient)?;
        let branch = branch.as_ref().unwrap_or(gradient);
        let mut buffer = OperandBuffer::default();
        let dy = self.input_of(branch, &mut buffer);
        let of_low_rank = {
            let hidden = block.down_proj.is_trained().then(|| self.gated_again(block, kept));
            let hidden = hidden.as_ref().map(Tensor::view);
            self.project_gradients(&mut block.down_proj, &low_rank.down, hidden, draws, dy, true).unwrap_or_default()
        };
        let mut prepared = <[Prepared; 2]>::default();
        let places = match self.compute {
            Compute::Bf16 => Places::Prepared(self.gradient_targets(block, branch.rows(), &mut prepared), kept.view()),
            _ => Places::InPlace(kept.target()),
        };
        self.down_and_gated_backward(block, draws, dy, &of_low_rank, places);
        Ok(match self.compute {
            Compute::Bf16 => Gradients::Prepared(Box::new(prepared)),
            _ => Gradients::InPlace,
        })
    }

    /// Where the rounded gradients of gate and up go, and to which column on: of one projection to both, side by side
    /// in the first.
    fn gradient_targets<'a>(
        &self,
        block: &MlpBlock<Self>,
        rows: usize,
        [first, second]: &'a mut [Prepared; 2],
    ) -> [(PreparedTarget<'a>, usize); 2] {
        let width = block.gate_up.width();
        let wanted = |projection: &Projection<Self>| Wanted::with_values(projection.is_trained());
        match &block.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => [
                (self.prepared_target(rows, width, wanted(gate_proj), first), 0),
                (self.prepared_target(rows, width, wanted(up_proj), second), 0),
            ],
            GateUpProjections::Fused { gate_up_proj } => {
                let both = self.prepared_target(rows, 2 * width, wanted(gate_up_proj), first);
                [(both, 0), (both, width)]
            }
        }
    }

    /// The gradient of the gated activation, a part at a time, and those of gate and up.
    fn down_and_gated_backward(
        &self,
        block: &MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        dy: Input<'_>,
        of_low_rank: &Tensor,
        places: Places<'_>,
    ) {
        let (dy, rows, width) = (dy.operand, dy.operand.rows(), block.gate_up.width());
        let down = [Columns::new(&block.down_proj, 0, of_low_rank, dy, Sense::Backward)];
        let dropped = self.dropped_gradient(&block.down_proj, of_low_rank, draws);
        let work = || block.down_proj.matrix.weight.work(dy, Sense::Backward, width);
        let _kernel = self.profile.kernel("linear backward and gated", work);
        let mut buffer = Tensor::default();
        let dy = self.operand_of_parts(dy, down[0].path, &mut buffer);
        let grain = self.grain(down[0].path, dy.is_in_bf16());
        self.each_small_part(
            grain,
            (rows, width),
            PART,
            rows * width * block.down_proj.matrix.out_features,
            |rows, columns| {
                let count = columns.len();
                with_buffers([rows.len() * count, 2 * count, 2 * count], |[dhidden, gate_up, gradients]| {
                    // SAFETY: the buffers have these lengths, and each part of the gradients is one thread's.
                    unsafe {
                        let dhidden = Target::new(std::slice::from_raw_parts_mut(dhidden, rows.len() * count), count);
                        let gate_up = std::slice::from_raw_parts_mut(gate_up, 2 * count);
                        let gradients = std::slice::from_raw_parts_mut(gradients, 2 * count);
                        self.columns_along(
                            dy,
                            &down,
                            Sense::Backward,
                            dropped.is_none(),
                            (&rows, &columns),
                            &[dhidden],
                        );
                        let mut short_rows = Vec::with_capacity(BLOCK);
                        for first in rows.clone().step_by(BLOCK) {
                            let in_turn = first..rows.end.min(first + BLOCK);
                            for row in in_turn.end..rows.end.min(in_turn.end + BLOCK) {
                                places.ask_for(row, &columns);
                            }
                            for row in in_turn {
                                let dhidden = dhidden.row(row - rows.start, 0..count);
                                if let Some(dropped) = &dropped {
                                    pointwise::add(self.set, &dropped.view().row(row)[columns.clone()], dhidden);
                                }
                                match places.rounded(row, &columns, dhidden) {
                                    Some(rounded) => short_rows.push(rounded),
                                    None => {
                                        let scratch = [&mut *gate_up, &mut *gradients];
                                        self.gated_backward(block.activation, places, row, &columns, dhidden, scratch);
                                    }
                                }
                            }
                            pointwise::gated_backward_rounded(self.set, block.activation, &mut short_rows);
                            short_rows.clear();
                        }
                    }
                });
            },
        );
    }

    /// What the adapter of a projection adds to the gradient of its input, where dropout acts on that.
    fn dropped_gradient(
        &self,
        projection: &Projection<Self>,
        of_low_rank: &Tensor,
        draws: Option<Draws<'_>>,
    ) -> Option<Tensor> {
        let lora = projection.lora.as_ref()?;
        let mask = lora.mask(draws)?;
        let a = lora.down();
        let [mut of_dropped, mut of_input] = [(); 2].map(|()| self.shaped(of_low_rank.rows(), a.columns()));
        self.product(1.0, of_low_rank.view(), a.view(), Write::Replace, of_dropped.view_mut());
        self.drop_elements(of_dropped.view(), &mask, 1.0, Write::Replace, &mut of_input);
        Some(of_input)
    }

    /// The gradients of gate and up of some columns of a row; the scratch has room for both, twice.
    ///
    /// # Safety
    /// Nobody else may read or write these columns of the row meanwhile.
    unsafe fn gated_backward(
        &self,
        activation: Activation,
        places: Places<'_>,
        row: usize,
        columns: &Range<usize>,
        dhidden: &[f32],
        [gate_up, gradients]: [&mut [f32]; 2],
    ) {
        let count = columns.len();
        // SAFETY: the caller vouches for these columns.
        unsafe {
            match places {
                Places::InPlace(kept) => {
                    let width = kept.row_stride() / 2;
                    let [dgate, dup] =
                        [0, width].map(|first| kept.row(row, first + columns.start..first + columns.end));
                    let (gate, up) = gate_up.split_at_mut(count);
                    gate.copy_from_slice(dgate);
                    up.copy_from_slice(dup);
                    pointwise::gated_backward(self.set, activation, gate, up, dhidden, dgate, dup);
                }
                Places::Prepared(targets, kept) => {
                    let (gate, up) = self.kept_gate_up(kept, row, columns, gate_up);
                    let (dgate, dup) = gradients.split_at_mut(count);
                    pointwise::gated_backward(self.set, activation, gate, up, dhidden, dgate, dup);
                    for ((target, first), gradient) in targets.into_iter().zip([&*dgate, dup]) {
                        target.write(row, first + columns.start, gradient);
                    }
                }
            }
        }
    }
}
