//! The output of a block of rows.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::forms::{Block as OfRows, in_each_form};
use super::kernel::Kernel;
use super::operands::{Extent, Left, Output, Product, Right};
use super::softmax::{Block, Running, exponentials};
use super::{AttentionMask, Columns, KEYS, Operands, Qkv, ROWS, Scale, lines, pack_columns, target_row};
use crate::cpu::instructions::InstructionSet;
use crate::cpu::product::Target;
use crate::cpu::scratch::with_buffers;
use crate::cpu::simd::Vector;
use crate::ops::AttentionShape;

/// One key head of one document: where its columns begin in each matrix.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Forward<'a> {
    /// Rules.
    pub shape: &'a AttentionShape,
    /// Which keys a row sees.
    pub mask: AttentionMask,
    /// The output, from the first head of the group and the document's first new row on.
    pub y: Target<'a>,
    /// The log of the summed exponentials of each row and head, where wanted.
    pub logsumexp: Option<Target<'a>>,
}

/// Where the keys and values of one head come from, a block of keys at a time.
pub(super) trait KeyBlocks<K: Kernel>: Copy {
    /// The keys of the block that begins with this one, as a left operand.
    fn keys(self, first: usize) -> Left<K::Word>;

    /// The values of the keys of a block as a right operand, laid out at `to`, rows `stride` apart, where they do not
    /// lie so.
    ///
    /// # Safety
    /// The machine has the instructions, and `to` the room.
    unsafe fn values(self, keys: Range<usize>, head_dim: usize, to: *mut K::Word, stride: usize) -> Right<K::Word>;
}

/// Matrices of keys and values.
impl<K: Kernel> KeyBlocks<K> for [Columns<'_, K::Word>; 2] {
    #[inline(always)]
    fn keys(self, first: usize) -> Left<K::Word> {
        self[0].left(first)
    }

    #[inline(always)]
    unsafe fn values(self, keys: Range<usize>, head_dim: usize, to: *mut K::Word, stride: usize) -> Right<K::Word> {
        // SAFETY: the caller vouches for it.
        unsafe { K::right(self[1], keys, head_dim, to, stride) }
    }
}

/// Computes the output of one block of rows. The queries are those of the first head of the group and the document's
/// first new row on; keys and values begin at position 0.
///
/// # Safety
/// The machine has the instructions, and nobody else may touch these rows of the results meanwhile.
pub(in crate::cpu) unsafe fn forward(set: InstructionSet, head: &Forward<'_>, qkv: Qkv<'_>, rows: Range<usize>) {
    let Forward { shape, mask, .. } = head;
    let head_dim = shape.head_dim;
    qkv.check([mask.queries, mask.group * head_dim], [mask.start + mask.queries, head_dim]);
    Buffers::with(head_dim, |buffers| {
        // SAFETY: the buffers have their lengths, the matrices were checked, and the caller vouches for the rest.
        unsafe { in_each_form(set, qkv, Rows { set, head, rows, buffers }) };
    });
}

/// A block of rows.
struct Rows<'a> {
    set: InstructionSet,
    head: &'a Forward<'a>,
    rows: Range<usize>,
    buffers: Buffers,
}

impl OfRows for Rows<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self, operands: Operands<'_, K::Word>) {
        // SAFETY: the caller vouches for buffers, operands and results.
        unsafe {
            let Operands { q, k, v } = operands;
            forward_block::<K, _>(self.set, q, [k, v], self.head, self.rows, self.buffers);
        }
    }
}

/// Buffers of a block of rows.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    /// Queries as columns, in words.
    pub columns: *mut f32,
    pub scores: *mut f32,
    /// Sums of the weighted values.
    pub sums: *mut f32,
    pub running: Running,
    /// Weights as words, where they are not values.
    weights: *mut f32,
    /// Values likewise.
    values: *mut f32,
    /// Distance of two rows of sums.
    pub stride: usize,
}

impl Buffers {
    /// Runs a function with some for heads of so many dimensions.
    pub(super) fn with(head_dim: usize, run: impl FnOnce(Self)) {
        let stride = head_dim.next_multiple_of(16);
        let (block, rows_along) = (KEYS * ROWS, ROWS * stride);
        let lengths = [head_dim * ROWS, block, rows_along, ROWS, ROWS, ROWS, block, KEYS * stride];
        with_buffers(lengths, |[columns, scores, sums, largest, total, correction, weights, values]| {
            let running = Running { largest, total, correction };
            run(Self { columns, scores, sums, running, weights, values, stride });
        });
    }
}

/// # Safety
/// The machine has the instructions, operands and results are of this head, and nobody else may touch these rows of the
/// results meanwhile.
#[inline(always)]
pub(super) unsafe fn forward_block<K: Kernel, B: KeyBlocks<K>>(
    set: InstructionSet,
    queries: Columns<'_, K::Word>,
    blocks: B,
    head: &Forward<'_>,
    rows: Range<usize>,
    buffers: Buffers,
) {
    let Forward { shape, mask, .. } = head;
    // SAFETY: the caller vouches for buffers and operands.
    unsafe {
        let width = shape.head_dim / K::VALUES;
        let lines = lines(queries, mask, &rows, width);
        pack_columns::<K>(&lines[..rows.len()], width, buffers.columns.cast());
        buffers.running.begin::<K::Sums>();
        let seen = mask.keys(&rows);
        let first = seen.start / KEYS * KEYS;
        for key in (first..seen.end).step_by(KEYS) {
            let keys = key..(mask.start + mask.queries).min(key + KEYS);
            let block = Block { mask, rows: rows.clone(), keys, scale: Scale::of(shape) };
            add_block::<K, B>(set, blocks, shape.head_dim, &block, buffers, key > first);
        }
        finish(head, rows, buffers);
    }
}

/// Adds what one block of keys contributes.
#[inline(always)]
unsafe fn add_block<K: Kernel, B: KeyBlocks<K>>(
    set: InstructionSet,
    blocks: B,
    head_dim: usize,
    block: &Block<'_>,
    buffers: Buffers,
    add: bool,
) {
    let Buffers { columns, scores, sums, running, weights, values, stride } = buffers;
    // SAFETY: the caller vouches for buffers and operands.
    unsafe {
        K::product(
            set,
            &Product {
                left: blocks.keys(block.keys.start),
                right: Right { words: columns.cast(), stride: ROWS },
                output: Output { values: scores, stride: ROWS, add: false },
                rows: block.keys.len(),
                extent: &|keys| Extent { inner: 0..head_dim, columns: block.columns::<K::Sums>(keys) },
            },
        );
        let changed = exponentials::<K::Sums>(block, scores, running);
        if changed && add {
            correct::<K>(sums, stride, running.correction, block.rows.len());
        }
        K::product(
            set,
            &Product {
                left: K::over_keys(scores, block.keys.len(), weights.cast()),
                right: blocks.values(block.keys.clone(), head_dim, values.cast(), stride),
                output: Output { values: sums, stride, add },
                rows: block.rows.len(),
                extent: &|rows| Extent { inner: block.seen(rows), columns: 0..head_dim },
            },
        );
    }
}

/// Multiplies each row of the sums by its correction.
///
/// # Safety
/// The machine has the instructions, and the pointers are those of buffers for a block.
#[inline(always)]
pub(super) unsafe fn correct<K: Kernel>(sums: *mut f32, stride: usize, correction: *const f32, rows: usize) {
    for row in 0..rows {
        // SAFETY: the caller passes the buffers of a block.
        unsafe {
            let factor = *correction.add(row);
            if factor == 1.0 {
                continue;
            }
            let factor = K::Sums::splat(factor);
            for column in (0..stride).step_by(K::Sums::LANES) {
                let place = sums.add(row * stride + column);
                K::Sums::load(place).mul(factor).store(place);
            }
        }
    }
}

/// Writes the results of a block.
///
/// # Safety
/// The buffers are those of the block, and nobody else may touch its rows of the results meanwhile.
#[inline(always)]
pub(super) unsafe fn finish(head: &Forward<'_>, rows: Range<usize>, buffers: Buffers) {
    let Forward { shape, mask, y, logsumexp, .. } = head;
    let Buffers { sums, running, stride, .. } = buffers;
    for (index, row) in rows.enumerate() {
        // SAFETY: the caller passes the buffers of a block and vouches for the results.
        unsafe {
            let (largest, total) = (*running.largest.add(index), *running.total.add(index));
            let inverse = 1.0 / total;
            let to = target_row(*y, mask, row, shape.head_dim);
            let from = std::slice::from_raw_parts(sums.add(index * stride), shape.head_dim);
            for (to, sum) in to.iter_mut().zip(from) {
                *to = sum * inverse;
            }
            if let Some(logsumexp) = logsumexp {
                target_row(*logsumexp, mask, row, 1)[0] = (largest + total.log2()) * std::f32::consts::LN_2;
            }
        }
    }
}
