//! The fused MLP block: a part of gate and up is gated while it is in cache, and so is a part of the gradient of what
//! was gated, which never lies in memory as a whole; nor do gate and up before they are rounded. What the next products
//! read is written as they read it.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

mod backward;

use std::ops::Range;

use super::super::operand::Operand;
use super::super::pointwise::{self, GatedRow};
use super::super::product::{Finish, Path, Right, Side, Target, View};
use super::super::scratch::with_buffers;
use super::super::simd::prefetch_to_write;
use super::super::weight::{Sense, WeightPart};
use super::super::{Cpu, Tensor};
use super::prepared::{Input, Prepared, Wanted};
use super::projection::{is_covered, reads_values};
use crate::adapter::{Lora, Projection};
use crate::blocks::composed::PostNormSaved;
use crate::blocks::{GateUpProjections, MlpBlock};
use crate::ops::{Compute, Result, Write};
use crate::random::Draws;

/// Values that are computed and used before the next: they stay in a cache of the second level.
const PART: usize = 1 << 17;

/// Rows of a part, which are short, that are gated in one call. Memory is asked for those after them meanwhile: what
/// lies there of a part is too short for a machine to foresee.
const BLOCK: usize = 8;

/// Asks for the cache lines of some elements.
#[inline(always)]
fn ask_for<T>(elements: &[T], prefetch: impl Fn(*const T)) {
    elements.chunks(LINE / size_of::<T>()).for_each(|line| prefetch(line.as_ptr()));
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// What the fused MLP block keeps for its backward; the normed input and the gated activation are computed again.
#[derive(Default)]
pub(super) struct FusedMlpSaved {
    x: Tensor,
    inverse_rms: Tensor,
    /// Gate and up: side by side in f32 or, where that is computed in, in bf16, both of an element in a word. In f32
    /// the backward writes their gradients in their place.
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

/// Whether this computes the block.
pub(super) fn covers(block: &MlpBlock<Cpu>) -> bool {
    let covers = |projection: &Projection<Cpu>| is_covered(projection) && projection.matrix.weight.has_parts();
    // Rounded side by side, a column of gate and one of up would share a word.
    let share_no_word =
        matches!(block.gate_up, GateUpProjections::Split { .. }) || block.gate_up.width().is_multiple_of(2);
    block.gate_up.all(covers) && covers(&block.down_proj) && share_no_word
}

/// A projection of which some columns are computed together with others, or in whose place a gradient is.
#[derive(Clone, Copy)]
struct Columns<'a> {
    projection: &'a Projection<Cpu>,
    /// The first column.
    first: usize,
    /// What went through its adapter's low rank, forward or backward.
    low_rank: &'a Tensor,
    /// How the product with the weight is computed.
    path: Path,
    /// And that with the adapter.
    adapter_path: Path,
}

impl<'a> Columns<'a> {
    fn new(projection: &'a Projection<Cpu>, first: usize, low_rank: &'a Tensor, x: Operand<'_>, sense: Sense) -> Self {
        let path = projection.matrix.weight.path(x, sense);
        let of_adapter = projection.lora.as_ref().map(|lora| Path::of(low_rank.view(), adapter(lora, sense).strides()));
        Self { projection, first, low_rank, path, adapter_path: of_adapter.unwrap_or(path) }
    }
}

/// What an adapter multiplies with what went through its low rank.
fn adapter(lora: &Lora<Cpu>, sense: Sense) -> View<'_> {
    match sense {
        Sense::Forward => lora.b.value.view().transposed(),
        Sense::Backward => lora.down().view(),
    }
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

    /// Each projection, with what belongs to it: to the gate, and to up; one to both, with what belongs to the gate.
    fn each<T>(&self, gate: T, up: T) -> Vec<(&Projection<Cpu>, T)> {
        match self {
            Self::Split { gate_proj, up_proj } => vec![(gate_proj, gate), (up_proj, up)],
            Self::Fused { gate_up_proj } => vec![(gate_up_proj, gate)],
        }
    }

    /// Gate and up as columns of their projections.
    fn halves<'a>(&'a self, low_rank: &'a LowRank, x: Operand<'_>) -> [Columns<'a>; 2] {
        match self {
            Self::Split { gate_proj, up_proj } => [
                Columns::new(gate_proj, 0, &low_rank.gate, x, Sense::Forward),
                Columns::new(up_proj, 0, &low_rank.up, x, Sense::Forward),
            ],
            Self::Fused { gate_up_proj } => {
                [0, self.width()].map(|first| Columns::new(gate_up_proj, first, &low_rank.gate, x, Sense::Forward))
            }
        }
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
        for (projection, low_rank) in block.gate_up.each(&mut low_rank.gate, &mut low_rank.up) {
            if let Some(lora) = &projection.lora {
                self.project_low(lora, normed.input(), draws, low_rank);
            }
        }
        let hidden = self.gated_and_kept(block, normed.input(), low_rank, gate_up);
        drop(normed);
        let (down_proj, down_norm) = (&block.down_proj, block.post_norm.as_ref());
        self.add_projected(down_proj, down_norm, hidden.input(), draws, x, &mut low_rank.down, post_norm)
    }

    /// The gated activation, as the projection down reads it. Gate and up go to where they are kept.
    fn gated_and_kept(
        &self,
        block: &MlpBlock<Self>,
        normed: Input<'_>,
        low_rank: &LowRank,
        kept: &mut Tensor,
    ) -> Prepared {
        let (x, width) = (normed.operand, block.gate_up.width());
        let rows = x.rows();
        let halves = block.gate_up.halves(low_rank, x);
        let work = || halves[0].projection.matrix.weight.work(x, Sense::Forward, 2 * width);
        let _kernel = self.profile.kernel("linear and gated", work);
        let is_rounded = self.compute == Compute::Bf16;
        kept.reshape(&self.buffers, rows, if is_rounded { width } else { 2 * width });
        let kept = kept.target();
        let mut hidden = Prepared::default();
        let wanted = Wanted::with_values(reads_values(&block.down_proj));
        let target = self.prepared_target(rows, width, wanted, &mut hidden);
        let products = rows * 2 * width * block.norm.weight.value.columns();
        let mut buffer = Tensor::default();
        let x = self.operand_of_parts(x, halves[0].path, &mut buffer);
        let grain = self.grain(halves[0].path, x.is_in_bf16());
        self.each_small_part(grain, (rows, width), PART / 2, products, |rows, columns| {
            let count = columns.len();
            let lengths = [if is_rounded { rows.len() * 2 * count } else { 0 }, count];
            with_buffers(lengths, |[products, hidden]| {
                // SAFETY: the buffers have these lengths, and each part of what is kept and of what is made is one
                // thread's.
                unsafe {
                    let halves_of_part = if is_rounded {
                        let products = std::slice::from_raw_parts_mut(products, rows.len() * 2 * count);
                        let products = Target::new(products, 2 * count);
                        [0, count].map(|first| products.offset(0, first))
                    } else {
                        [0, width].map(|first| kept.offset(rows.start, first + columns.start))
                    };
                    self.columns_along(x, &halves, Sense::Forward, true, (&rows, &columns), &halves_of_part);
                    let hidden = std::slice::from_raw_parts_mut(hidden, count);
                    let gate_up = |row: usize| halves_of_part.map(|half| &*half.row(row - rows.start, 0..count));
                    let words = |row: usize| kept.row(row, columns.clone());
                    let rounded = |row: usize| target.halves(row, columns.clone()).filter(|_| is_rounded);
                    let mut short_rows = Vec::with_capacity(BLOCK);
                    for first in rows.clone().step_by(BLOCK) {
                        let in_turn = first..rows.end.min(first + BLOCK);
                        for row in in_turn.end..rows.end.min(in_turn.end + BLOCK) {
                            if let Some(rounded) = rounded(row) {
                                ask_for(words(row), prefetch_to_write);
                                ask_for(rounded, prefetch_to_write);
                            }
                        }
                        for row in in_turn {
                            let [gate, up] = gate_up(row);
                            if let Some(y) = rounded(row) {
                                short_rows.push(GatedRow { gate, up, words: words(row), y });
                                continue;
                            }
                            pointwise::gated(self.set, block.activation, gate, up, hidden);
                            target.write(row, columns.start, hidden);
                            if is_rounded {
                                pointwise::round_pairs(self.set, gate, up, words(row));
                            }
                        }
                        pointwise::gated_and_rounded(self.set, block.activation, &mut short_rows);
                        short_rows.clear();
                    }
                }
            });
        });
        hidden
    }

    /// Rows and columns of products with weights and, where that is wanted, what adapters add, by the calling thread.
    ///
    /// # Safety
    /// Nobody else may read or write the elements of the results meanwhile.
    unsafe fn columns_along(
        &self,
        x: Operand<'_>,
        products: &[Columns<'_>],
        sense: Sense,
        with_adapters: bool,
        (rows, columns): (&Range<usize>, &Range<usize>),
        targets: &[Target<'_>],
    ) {
        let of = |product: &Columns<'_>| product.first + columns.start..product.first + columns.end;
        let results = || products.iter().zip(targets);
        let parts: Vec<_> = results()
            .map(|(product, &c)| {
                let bias = product.projection.bias.as_ref().filter(|_| sense == Sense::Forward);
                WeightPart {
                    weight: &product.projection.matrix.weight,
                    columns: of(product),
                    bias: bias.map(|bias| &bias.value.values()[of(product)]),
                    c,
                }
            })
            .collect();
        // SAFETY: the caller vouches for the results.
        unsafe { self.products_along(products[0].path, x.row_range(rows.clone()), sense, &parts) };
        for (product, &c) in results().filter(|_| with_adapters) {
            let Some(lora) = &product.projection.lora else { continue };
            let scale = if sense == Sense::Forward { lora.scaling } else { 1.0 };
            let finish = Finish { scale, bias: None, write: Write::Add };
            let side = Side { b: adapter(lora, sense).column_range(of(product)), finish, c };
            let low_rank = product.low_rank.view().row_range(rows.clone());
            // SAFETY: as above.
            unsafe { self.product_along(product.adapter_path, low_rank, &[side]) };
        }
    }

    /// Columns of gate and up of a row, from what was kept; what is rounded is widened into `scratch`, of twice as
    /// many.
    fn kept_gate_up<'a>(
        &self,
        kept: View<'a>,
        row: usize,
        columns: &Range<usize>,
        scratch: &'a mut [f32],
    ) -> (&'a [f32], &'a [f32]) {
        let row = kept.row(row);
        if self.compute != Compute::Bf16 {
            let (gate, up) = row.split_at(row.len() / 2);
            return (&gate[columns.clone()], &up[columns.clone()]);
        }
        let (gate, up) = scratch.split_at_mut(columns.len());
        pointwise::widen_pairs(self.set, &row[columns.clone()], gate, up);
        (gate, up)
    }
}
