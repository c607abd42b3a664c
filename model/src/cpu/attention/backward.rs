//! The gradients of a block of rows.
//!
//! A block of rows has its own gradient of the queries, and adds to those of the keys and values it sees. Blocks of a document
//! add in the order of descending rows, each waiting for its turn at each block of keys: the sums have one order, whatever the
//! number of threads, without a copy of them per thread. Blocks that start in that order hardly wait: each follows the one before
//! it over the keys.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::scratch::with_buffers;
use super::softmax::{Block, Known, weights_and_slopes};
use super::tile::{Extent, Kernel, Left, Output, Product, Right};
use super::{Columns, KEYS, ROWS, Scale, Sight, pack_columns, target_row};
use crate::cpu::instructions::InstructionSet;
use crate::cpu::product::Target;
use crate::cpu::simd::{Vector, vectorised};
use crate::ops::AttentionShape;

/// One key head of one document: where its columns begin in each matrix.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Backward<'a> {
    /// Rules.
    pub shape: &'a AttentionShape,
    /// Which keys a row sees.
    pub sight: Sight,
    /// Queries, from the first head of the group on.
    pub q: Columns<'a>,
    /// Keys.
    pub k: Columns<'a>,
    /// Values.
    pub v: Columns<'a>,
    /// The output, as `q`.
    pub y: Columns<'a>,
    /// The log of the summed exponentials of each row and head.
    pub logsumexp: Columns<'a>,
    /// The gradient of the output, as `q`.
    pub dy: Columns<'a>,
    /// The gradient of the queries, as `q`.
    pub dq: Target<'a>,
    /// The gradient of the keys.
    pub dk: Target<'a>,
    /// The gradient of the values.
    pub dv: Target<'a>,
    /// Whose turn it is at each block of keys.
    pub turns: Turns<'a>,
}

/// How many blocks of rows have added to each block of keys.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Turns<'a> {
    /// One for each block of keys, zero at first.
    pub taken: &'a [AtomicUsize],
    /// Set when a block will never come to its turn, because it panicked.
    pub broken: &'a AtomicBool,
}

impl Turns<'_> {
    /// Waits until so many blocks of rows have added to a block of keys.
    fn wait(self, keys: usize, turn: usize) {
        let mut tries = 0;
        while self.taken[keys].load(Ordering::Acquire) != turn {
            assert!(!self.broken.load(Ordering::Relaxed), "another block of this attention panicked");
            tries += 1;
            if tries < 200 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    fn pass(self, keys: usize, turn: usize) {
        self.taken[keys].store(turn + 1, Ordering::Release);
    }
}

/// Computes the gradients of one block of rows. The first block to come to a block of keys replaces their gradients, the others
/// add.
///
/// # Safety
/// The machine has the instructions. Nobody but other blocks may touch these columns of the results meanwhile. Each block of rows
/// of the document is run once, and none before all with higher rows have been begun.
pub(in crate::cpu) unsafe fn backward(set: InstructionSet, head: &Backward<'_>, rows: Range<usize>) {
    let Backward { shape, sight, q, k, v, y, dy, logsumexp, .. } = head;
    let head_dim = shape.head_dim;
    [q, y, dy].into_iter().for_each(|operand| operand.check(sight.queries, sight.group * head_dim));
    [k, v].into_iter().for_each(|operand| operand.check(sight.queries, head_dim));
    logsumexp.check(sight.queries, sight.group);
    let stride = head_dim.next_multiple_of(16);
    let (across, along) = (head_dim * ROWS, ROWS * stride);
    let lengths = [across, across, along, along, along, KEYS * ROWS, KEYS * ROWS, ROWS, ROWS];
    with_buffers(lengths, |[q_columns, dy_columns, q, dy, dq, scores, slopes, logarithm, along]| {
        let buffers = Buffers { q_columns, dy_columns, q, dy, dq, scores, slopes, logarithm, along, stride };
        // SAFETY: the buffers have these lengths, the matrices were checked, and the caller vouches for the rest.
        unsafe { backward_with(set, head, rows, buffers) };
    });
}

vectorised! {
    unsafe fn backward_with(head: &Backward<'_>, rows: Range<usize>, buffers: Buffers) = backward_block
}

/// Buffers of a block of rows.
#[derive(Clone, Copy)]
struct Buffers {
    /// Queries as columns, scaled for the scores.
    q_columns: *mut f32,
    /// Gradients of the output as columns.
    dy_columns: *mut f32,
    /// Queries times the scale of the scores' gradient.
    q: *mut f32,
    /// Gradients of the output.
    dy: *mut f32,
    /// Gradients of the queries.
    dq: *mut f32,
    scores: *mut f32,
    slopes: *mut f32,
    logarithm: *mut f32,
    along: *mut f32,
    /// Distance of two rows where they are not columns.
    stride: usize,
}

#[inline(always)]
unsafe fn backward_block<V: Kernel>(head: &Backward<'_>, rows: Range<usize>, buffers: Buffers) {
    let Backward { shape, sight, .. } = head;
    // SAFETY: the caller vouches for buffers, operands and results.
    unsafe {
        pack::<V>(head, &rows, buffers);
        let seen = sight.keys(&rows);
        let first = seen.start / KEYS;
        for number in first..seen.end.div_ceil(KEYS) {
            let keys = number * KEYS..sight.queries.min((number + 1) * KEYS);
            let block = Block { sight, rows: rows.clone(), keys, cap: Scale::of(shape).cap };
            add_block::<V>(head, &block, buffers, number > first);
        }
        for (index, row) in rows.enumerate() {
            let from = std::slice::from_raw_parts(buffers.dq.add(index * buffers.stride), shape.head_dim);
            for (to, sum) in target_row(head.dq, sight, row, shape.head_dim).iter_mut().zip(from) {
                *to = shape.scale * sum;
            }
        }
    }
}

/// Gathers what all blocks of keys need of the rows.
#[inline(always)]
unsafe fn pack<V: Kernel>(head: &Backward<'_>, rows: &Range<usize>, buffers: Buffers) {
    let Backward { shape, sight, .. } = head;
    let head_dim = shape.head_dim;
    // SAFETY: the caller passes the buffers of a block.
    unsafe {
        pack_columns::<V>(head.q, sight, rows, head_dim, Scale::of(shape).query, buffers.q_columns);
        pack_columns::<V>(head.dy, sight, rows, head_dim, 1.0, buffers.dy_columns);
        for lane in 0..ROWS {
            // No weight for a lane without a row.
            *buffers.logarithm.add(lane) = f32::INFINITY;
            *buffers.along.add(lane) = 0.0;
        }
        for (index, row) in rows.clone().enumerate() {
            let [q, y, dy] = [head.q, head.y, head.dy].map(|operand| operand.of_row(sight, row, head_dim));
            let [to_q, to_dy] = [buffers.q, buffers.dy]
                .map(|buffer| std::slice::from_raw_parts_mut(buffer.add(index * buffers.stride), head_dim));
            to_dy.copy_from_slice(dy);
            for (to, q) in to_q.iter_mut().zip(q) {
                *to = shape.scale * q;
            }
            *buffers.along.add(index) = dot::<V>(y, dy);
            *buffers.logarithm.add(index) = head.logsumexp.of_row(sight, row, 1)[0] * std::f32::consts::LOG2_E;
        }
    }
}

/// The product of two rows of equal length.
#[inline(always)]
unsafe fn dot<V: Vector>(a: &[f32], b: &[f32]) -> f32 {
    let whole = a.len() / V::LANES * V::LANES;
    let mut lanes = [0.0; 16];
    // SAFETY: the caller vouches for the instructions; both rows have the elements, and no vector more than 16 lanes.
    unsafe {
        let (a, b, rest) = (a.as_ptr(), b.as_ptr(), a.len() - whole);
        let mut sum = V::load_first(a.add(whole), rest).mul(V::load_first(b.add(whole), rest));
        for first in (0..whole).step_by(V::LANES) {
            sum = V::load(a.add(first)).mul_add(V::load(b.add(first)), sum);
        }
        sum.store(lanes.as_mut_ptr());
    }
    lanes.iter().sum()
}

/// Adds what one block of keys contributes.
#[inline(always)]
unsafe fn add_block<V: Kernel>(head: &Backward<'_>, block: &Block<'_>, buffers: Buffers, add: bool) {
    let Backward { shape, sight, k, v, dk, dv, turns, .. } = head;
    let head_dim = shape.head_dim;
    let number = block.keys.start / KEYS;
    // Blocks of rows above this one that see these keys go first.
    let turn = (sight.rows_seeing(&block.keys).end - 1) / ROWS - block.rows.start / ROWS;
    let (scores, slopes) = (buffers.scores, buffers.slopes);
    let by_key = |keys| Extent { inner: 0..head_dim, columns: block.columns::<V>(keys) };
    let scores_of = |left: Left, columns: *const f32, to: *mut f32| Product {
        left,
        right: Right { values: columns, stride: ROWS },
        output: Output { values: to, stride: ROWS, add: false },
        rows: block.keys.len(),
        extent: &by_key,
    };
    // SAFETY: the caller passes the buffers of a block and matrices that were checked.
    unsafe {
        V::product(&scores_of(k.left(block.keys.start), buffers.q_columns, scores));
        V::product(&scores_of(v.left(block.keys.start), buffers.dy_columns, slopes));
        let known = Known { logarithm: buffers.logarithm, along: buffers.along };
        weights_and_slopes::<V>(block, scores, slopes, known);
        // The weight of a row's only key is 1 whatever its score: no gradient, not even one of rounding.
        for (lane, row) in block.rows.clone().enumerate() {
            if let Some(key) = sight.only_key(row).filter(|key| block.keys.contains(key)) {
                *slopes.add((key - block.keys.start) * ROWS + lane) = 0.0;
            }
        }
        V::product(&Product {
            left: Left { values: slopes, row_stride: 1, inner_stride: ROWS },
            right: k.right(block.keys.start),
            output: Output { values: buffers.dq, stride: buffers.stride, add },
            rows: block.rows.len(),
            extent: &|rows| Extent { inner: block.seen(rows), columns: 0..head_dim },
        });
        turns.wait(number, turn);
        for (left, right, gradient) in [(scores, buffers.dy, dv), (slopes, buffers.q, dk)] {
            let values = gradient.block(block.keys.start, 0, block.keys.len(), head_dim);
            V::product(&Product {
                left: Left { values: left, row_stride: ROWS, inner_stride: 1 },
                right: Right { values: right, stride: buffers.stride },
                output: Output { values, stride: gradient.row_stride(), add: turn > 0 },
                rows: block.keys.len(),
                extent: &|keys| Extent { inner: block.seeing(keys), columns: 0..head_dim },
            });
        }
        turns.pass(number, turn);
    }
}
