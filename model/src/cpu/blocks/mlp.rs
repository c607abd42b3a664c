//! The fused MLP block: a part of gate and up is gated while it is in cache, and so is a part of the gradient of what was gated; neither
//! ever lies in memory as a whole, and what the next products read is written as they read it.

use std::ops::Range;

use profile::Work;

use super::super::operand::{Operand, OperandBuffer};
use super::super::product::{Finish, Into, Path, Side, Target, View};
use super::super::scratch::with_buffers;
use super::super::weight::{Sense, WeightPart};
use super::super::{Cpu, Tensor, pointwise};
use super::prepared::{Input, Prepared, PreparedTarget, Wanted};
use super::projection::{is_covered, reads_values};
use crate::adapter::{Lora, Projection};
use crate::blocks::composed::{PostNormSaved, branch_gradient};
use crate::blocks::{GateUpProjections, InputGradient, MlpBlock};
use crate::ops::{Activation, Compute, Result, Write};
use crate::random::Draws;

/// Values that are computed and used before the next: they stay in a cache of the second level.
const PART: usize = 1 << 17;

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

/// Where gate and up were kept, and where their gradients go.
#[derive(Clone, Copy)]
enum Places<'a> {
    /// In f32 side by side, both.
    InPlace(Target<'a>),
    /// The gradients of each, from a column on; both rounded, an element of each in a word.
    Prepared([(PreparedTarget<'a>, usize); 2], View<'a>),
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
        let of_adapter = projection.lora.as_ref().map(|lora| Path::of(low_rank.view(), adapter(lora, sense)));
        Self { projection, first, low_rank, path, adapter_path: of_adapter.unwrap_or(path) }
    }
}

/// What an adapter multiplies with what went through its low rank.
fn adapter(lora: &Lora<Cpu>, sense: Sense) -> View<'_> {
    match sense {
        Sense::Forward => lora.b.value.view().transposed(),
        Sense::Backward => lora.a.value.view(),
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
        self.each_small_part((rows, width), PART / 2, products, |rows, columns| {
            let count = columns.len();
            let lengths = [if is_rounded { rows.len() * 2 * count } else { 0 }, count];
            with_buffers(lengths, |[products, hidden]| {
                // SAFETY: the buffers have these lengths, and each part of what is kept and of what is made is one thread's.
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
                    for (index, row) in rows.enumerate() {
                        let [gate, up] = halves_of_part.map(|half| &*half.row(index, 0..count));
                        let kept = is_rounded.then(|| kept.row(row, columns.clone()));
                        match (target.halves(row, columns.clone()), kept) {
                            (Some(rounded), Some(kept)) => {
                                pointwise::gated_and_rounded(self.set, block.activation, gate, up, kept, rounded);
                            }
                            (_, kept) => {
                                pointwise::gated(self.set, block.activation, gate, up, hidden);
                                target.write(row, columns.start, hidden);
                                kept.into_iter().for_each(|kept| pointwise::round_pairs(self.set, gate, up, kept));
                            }
                        }
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
            let finish = Finish { scale, bias: None, write: Into::Add };
            let side = Side { b: adapter(lora, sense).column_range(of(product)), finish, c };
            let low_rank = product.low_rank.view().row_range(rows.clone());
            // SAFETY: as above.
            unsafe { self.product_along(product.adapter_path, low_rank, &[side]) };
        }
    }

    /// Columns of gate and up of a row, from what was kept; what is rounded is widened into `scratch`, of twice as many.
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

    /// The backward; see [`crate::blocks::Blocks::mlp_block_backward`].
    pub(super) fn fused_mlp_backward(
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

    /// Where the rounded gradients of gate and up go, and to which column on: of one projection to both, side by side in the first.
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
        self.each_small_part(
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
                        for (index, row) in rows.enumerate() {
                            let dhidden = dhidden.row(index, 0..count);
                            if let Some(dropped) = &dropped {
                                pointwise::add(self.set, &dropped.view().row(row)[columns.clone()], dhidden);
                            }
                            self.gated_backward(block.activation, places, row, &columns, dhidden, [gate_up, gradients]);
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
        let a = &lora.a.value;
        let [mut of_dropped, mut of_input] = [(); 2].map(|()| self.shaped(of_low_rank.rows(), a.columns()));
        self.product(1.0, of_low_rank.view(), a.view(), Into::Replace, of_dropped.view_mut());
        self.drop_elements(of_dropped.view(), &mask, 1.0, Into::Replace, &mut of_input);
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
                    let rounded = targets.map(|(target, first)| {
                        let columns = first + columns.start..first + columns.end;
                        target.halves(row, columns)
                    });
                    if let [Some(dgate), Some(dup)] = rounded {
                        let kept = &kept.row(row)[columns.clone()];
                        return pointwise::gated_backward_rounded(self.set, activation, kept, dhidden, dgate, dup);
                    }
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
