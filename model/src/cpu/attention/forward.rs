//! The output of a block of rows.

use std::ops::Range;

use super::scratch::with_buffers;
use super::softmax::{Block, LOWEST, Running, exponentials};
use super::tile::{Extent, Kernel, Left, Output, Product, Right};
use super::{Columns, KEYS, ROWS, Scale, Sight, pack_columns, target_row};
use crate::cpu::instructions::InstructionSet;
use crate::cpu::product::Target;
use crate::cpu::simd::vectorised;
use crate::ops::AttentionShape;

/// One key head of one document: where its columns begin in each matrix.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Forward<'a> {
    /// Rules.
    pub shape: &'a AttentionShape,
    /// Which keys a row sees.
    pub sight: Sight,
    /// Queries, from the first head of the group and the document's first new row on.
    pub q: Columns<'a>,
    /// Keys, from position 0 on.
    pub k: Columns<'a>,
    /// Values, from position 0 on.
    pub v: Columns<'a>,
    /// The output, as `q`.
    pub y: Target<'a>,
    /// The log of the summed exponentials of each row and head, where wanted.
    pub logsumexp: Option<Target<'a>>,
}

/// Computes the output of one block of rows.
///
/// # Safety
/// The machine has the instructions, and nobody else may touch these rows of the results meanwhile.
pub(in crate::cpu) unsafe fn forward(set: InstructionSet, head: &Forward<'_>, rows: Range<usize>) {
    let Forward { shape, sight, q, k, v, .. } = head;
    let (head_dim, keys) = (shape.head_dim, sight.start + sight.queries);
    q.check(sight.queries, sight.group * head_dim);
    k.check(keys, head_dim);
    v.check(keys, head_dim);
    let stride = head_dim.next_multiple_of(16);
    let lengths = [head_dim * ROWS, KEYS * ROWS, ROWS * stride, ROWS, ROWS, ROWS];
    with_buffers(lengths, |[columns, scores, sums, largest, total, correction]| {
        let running = Running { largest, total, correction };
        let buffers = Buffers { columns, scores, sums, running, stride };
        // SAFETY: the buffers have these lengths, the matrices were checked, and the caller vouches for the rest.
        unsafe { forward_with(set, head, rows, buffers) };
    });
}

vectorised! {
    unsafe fn forward_with(head: &Forward<'_>, rows: Range<usize>, buffers: Buffers) = forward_block
}

/// Buffers of a block of rows.
#[derive(Clone, Copy)]
struct Buffers {
    /// Queries as columns, scaled.
    columns: *mut f32,
    scores: *mut f32,
    /// Sums of the weighted values.
    sums: *mut f32,
    running: Running,
    /// Distance of two rows of sums.
    stride: usize,
}

#[inline(always)]
unsafe fn forward_block<V: Kernel>(head: &Forward<'_>, rows: Range<usize>, buffers: Buffers) {
    let Forward { shape, sight, q, .. } = head;
    let Scale { query, cap } = Scale::of(shape);
    // SAFETY: the caller vouches for buffers and operands.
    unsafe {
        pack_columns::<V>(*q, sight, &rows, shape.head_dim, query, buffers.columns);
        for row in (0..ROWS).step_by(V::LANES) {
            V::splat(LOWEST).store(buffers.running.largest.add(row));
            V::splat(0.0).store(buffers.running.total.add(row));
        }
        let seen = sight.keys(&rows);
        let first = seen.start / KEYS * KEYS;
        for key in (first..seen.end).step_by(KEYS) {
            let keys = key..(sight.start + sight.queries).min(key + KEYS);
            let block = Block { sight, rows: rows.clone(), keys, cap };
            add_block::<V>(head, &block, buffers, key > first);
        }
        finish::<V>(head, rows, buffers);
    }
}

/// Adds what one block of keys contributes.
#[inline(always)]
unsafe fn add_block<V: Kernel>(head: &Forward<'_>, block: &Block<'_>, buffers: Buffers, add: bool) {
    let head_dim = head.shape.head_dim;
    let Buffers { columns, scores, sums, running, stride } = buffers;
    // SAFETY: the caller vouches for buffers and operands.
    unsafe {
        V::product(&Product {
            left: head.k.left(block.keys.start),
            right: Right { values: columns, stride: ROWS },
            output: Output { values: scores, stride: ROWS, add: false },
            rows: block.keys.len(),
            extent: &|keys| Extent { inner: 0..head_dim, columns: block.columns::<V>(keys) },
        });
        let changed = exponentials::<V>(block, scores, running);
        if changed && add {
            correct::<V>(sums, stride, running.correction, block.rows.len());
        }
        V::product(&Product {
            left: Left { values: scores, row_stride: 1, inner_stride: ROWS },
            right: head.v.right(block.keys.start),
            output: Output { values: sums, stride, add },
            rows: block.rows.len(),
            extent: &|rows| Extent { inner: block.seen(rows), columns: 0..head_dim },
        });
    }
}

/// Multiplies each row of the sums by its correction.
#[inline(always)]
unsafe fn correct<V: Kernel>(sums: *mut f32, stride: usize, correction: *const f32, rows: usize) {
    for row in 0..rows {
        // SAFETY: the caller passes the buffers of a block.
        unsafe {
            let factor = *correction.add(row);
            if factor == 1.0 {
                continue;
            }
            let factor = V::splat(factor);
            for column in (0..stride).step_by(V::LANES) {
                let place = sums.add(row * stride + column);
                V::load(place).mul(factor).store(place);
            }
        }
    }
}

/// Writes the results of a block.
#[inline(always)]
unsafe fn finish<V: Kernel>(head: &Forward<'_>, rows: Range<usize>, buffers: Buffers) {
    let Forward { shape, sight, y, logsumexp, .. } = head;
    let Buffers { sums, running, stride, .. } = buffers;
    for (index, row) in rows.enumerate() {
        // SAFETY: the caller passes the buffers of a block and vouches for the results.
        unsafe {
            let (largest, total) = (*running.largest.add(index), *running.total.add(index));
            let inverse = 1.0 / total;
            let to = target_row(*y, sight, row, shape.head_dim);
            let from = std::slice::from_raw_parts(sums.add(index * stride), shape.head_dim);
            for (to, sum) in to.iter_mut().zip(from) {
                *to = sum * inverse;
            }
            if let Some(logsumexp) = logsumexp {
                target_row(*logsumexp, sight, row, 1)[0] = (largest + total.log2()) * std::f32::consts::LN_2;
            }
        }
    }
}
