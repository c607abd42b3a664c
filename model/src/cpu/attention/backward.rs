//! The gradients of a block of rows.
//!
//! A block of rows has its own gradient of the queries, and adds to those of the keys and values it sees. Blocks of a
//! document add in the order of descending rows, each waiting for its turn at each block of keys: the sums have one
//! order, whatever the number of threads, without a copy of them per thread. Blocks that start in that order hardly
//! wait: each follows the one before it over the keys.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::forms::{Block as OfRows, in_each_form};
use super::kernel::Kernel;
use super::operands::{Extent, Left, Output, Product, Right};
use super::softmax::{Block, Known, weights_and_slopes};
use super::{AttentionMask, Columns, KEYS, Operands, Qkv, ROWS, Scale, lines, pack_columns, target_row};
use crate::cpu::instructions::InstructionSet;
use crate::cpu::product::Target;
use crate::cpu::scratch::with_buffers;
use crate::cpu::simd::{Vector, prefetch};
use crate::ops::AttentionShape;

/// One key head of one document: where its columns begin in each matrix.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Backward<'a> {
    /// Rules.
    pub shape: &'a AttentionShape,
    /// Which keys a row sees.
    pub mask: AttentionMask,
    /// Queries, from the first head of the group on; keys and values.
    pub qkv: Qkv<'a>,
    /// The output, as the queries.
    pub y: Columns<'a>,
    /// The log of the summed exponentials of each row and head.
    pub logsumexp: Columns<'a>,
    /// The gradient of the output, as the queries.
    pub dy: Columns<'a>,
    /// The gradient of the queries, as they are.
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

/// Computes the gradients of one block of rows. The first block to come to a block of keys replaces their gradients,
/// the others add.
///
/// # Safety
/// The machine has the instructions. Nobody but other blocks may touch these columns of the results meanwhile. Each
/// block of rows of the document is run once, and none before all with higher rows have been begun.
pub(in crate::cpu) unsafe fn backward(set: InstructionSet, head: &Backward<'_>, rows: Range<usize>) {
    let Backward { shape, mask, qkv, y, dy, logsumexp, .. } = head;
    let head_dim = shape.head_dim;
    qkv.check([mask.queries, mask.group * head_dim], [mask.queries, head_dim]);
    [y, dy].into_iter().for_each(|operand| operand.check(mask.queries, mask.group * head_dim));
    logsumexp.check(mask.queries, mask.group);
    let stride = head_dim.next_multiple_of(16);
    let (across, along, block) = (head_dim * ROWS, ROWS * stride, KEYS * ROWS);
    let lengths = [across, across, along, along, along, along, KEYS * stride, block, block, block, ROWS, ROWS];
    with_buffers(lengths, |buffers| {
        let [q_columns, dy_columns, q, dy, rounded, dq, keys, scores, slopes, words, logarithm, along] = buffers;
        let buffers = Buffers {
            q_columns,
            dy_columns,
            q,
            dy,
            rounded,
            dq,
            keys,
            scores,
            slopes,
            words,
            logarithm,
            along,
            stride,
        };
        // SAFETY: the buffers have these lengths, the matrices were checked, and the caller vouches for the rest.
        unsafe { in_each_form(set, *qkv, Rows { set, head, rows, buffers }) };
    });
}

/// A block of rows.
struct Rows<'a> {
    set: InstructionSet,
    head: &'a Backward<'a>,
    rows: Range<usize>,
    buffers: Buffers,
}

impl OfRows for Rows<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self, operands: Operands<'_, K::Word>) {
        // SAFETY: the caller vouches for buffers, operands and results.
        unsafe { backward_block::<K>(self.set, operands, self.head, self.rows, self.buffers) }
    }
}

/// Buffers of a block of rows.
#[derive(Clone, Copy)]
struct Buffers {
    /// Queries as columns, in words.
    q_columns: *mut f32,
    /// Gradients of the output as columns, likewise.
    dy_columns: *mut f32,
    /// Queries as the right operand of a sum over rows.
    q: *mut f32,
    /// Gradients of the output, likewise.
    dy: *mut f32,
    /// Gradients of the output, row by row as words.
    rounded: *mut f32,
    /// Gradients of the queries.
    dq: *mut f32,
    /// Keys as the right operand of a sum over keys, where they do not lie so.
    keys: *mut f32,
    scores: *mut f32,
    slopes: *mut f32,
    /// Weights or slopes as words, where they are not values.
    words: *mut f32,
    logarithm: *mut f32,
    along: *mut f32,
    /// Distance of two rows where they are not columns.
    stride: usize,
}

#[inline(always)]
unsafe fn backward_block<K: Kernel>(
    set: InstructionSet,
    operands: Operands<'_, K::Word>,
    head: &Backward<'_>,
    rows: Range<usize>,
    buffers: Buffers,
) {
    let Backward { shape, mask, .. } = head;
    // SAFETY: the caller vouches for buffers, operands and results.
    unsafe {
        let right = pack::<K>(operands.q, head, &rows, buffers);
        let seen = mask.keys(&rows);
        let first = seen.start / KEYS;
        for number in first..seen.end.div_ceil(KEYS) {
            let keys = number * KEYS..mask.queries.min((number + 1) * KEYS);
            let block = Block { mask, rows: rows.clone(), keys, scale: Scale::of(shape) };
            add_block::<K>(set, operands, head, &block, right, buffers, number > first);
        }
        for (index, row) in rows.enumerate() {
            let from = std::slice::from_raw_parts(buffers.dq.add(index * buffers.stride), shape.head_dim);
            target_row(head.dq, mask, row, shape.head_dim).copy_from_slice(from);
        }
    }
}

/// Queries and gradients of the output as right operands of sums over rows.
#[derive(Clone, Copy)]
struct Rights<W> {
    q: Right<W>,
    dy: Right<W>,
}

/// Gathers what all blocks of keys need of the rows.
#[inline(always)]
unsafe fn pack<K: Kernel>(
    q: Columns<'_, K::Word>,
    head: &Backward<'_>,
    rows: &Range<usize>,
    buffers: Buffers,
) -> Rights<K::Word> {
    /// Rows ahead that memory is asked for.
    const AHEAD: usize = 4;
    /// Values of a cache line.
    const LINE: usize = 16;
    let Backward { shape, mask, .. } = head;
    let (head_dim, stride, count) = (shape.head_dim, buffers.stride, rows.len());
    let width = head_dim / K::VALUES;
    // SAFETY: the caller passes the buffers of a block.
    unsafe {
        for lane in 0..ROWS {
            // No weight for a lane without a row.
            *buffers.logarithm.add(lane) = f32::INFINITY;
            *buffers.along.add(lane) = 0.0;
        }
        let mut dy_lines = [std::ptr::null(); ROWS];
        for (index, row) in rows.clone().enumerate() {
            let [y, dy] = [head.y, head.dy].map(|operand| operand.of_row(mask, row, head_dim));
            // A row is too short for the machine to see that the next one will be read.
            if row + AHEAD < rows.end {
                for operand in [head.y, head.dy] {
                    let later = operand.of_row(mask, row + AHEAD, head_dim);
                    later.chunks(LINE).for_each(|line| prefetch(line.as_ptr()));
                }
            }
            *buffers.along.add(index) = dot::<K::Sums>(y, dy);
            *buffers.logarithm.add(index) = head.logsumexp.of_row(mask, row, 1)[0] * std::f32::consts::LOG2_E;
            let rounded = buffers.rounded.add(index * stride).cast();
            K::round_row(dy, rounded);
            dy_lines[index] = rounded.cast_const();
        }
        let q_lines = lines(q, mask, rows, width);
        let (q_lines, dy_lines) = (&q_lines[..count], &dy_lines[..count]);
        pack_columns::<K>(q_lines, width, buffers.q_columns.cast());
        pack_columns::<K>(dy_lines, width, buffers.dy_columns.cast());
        Rights {
            q: K::lay_rows(q_lines, head_dim, buffers.q.cast(), stride),
            dy: K::lay_rows(dy_lines, head_dim, buffers.dy.cast(), stride),
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
unsafe fn add_block<K: Kernel>(
    set: InstructionSet,
    operands: Operands<'_, K::Word>,
    head: &Backward<'_>,
    block: &Block<'_>,
    right: Rights<K::Word>,
    buffers: Buffers,
    add: bool,
) {
    let Backward { shape, mask, dk, dv, turns, .. } = head;
    let Operands { k, v, .. } = operands;
    let (head_dim, keys) = (shape.head_dim, block.keys.len());
    let number = block.keys.start / KEYS;
    // Blocks of rows above this one that see these keys go first.
    let turn = (mask.rows_seeing(&block.keys).end - 1) / ROWS - block.rows.start / ROWS;
    let Buffers { scores, slopes, words, stride, .. } = buffers;
    let by_key = |keys| Extent { inner: 0..head_dim, columns: block.columns::<K::Sums>(keys) };
    let scores_of = |left: Left<K::Word>, columns: *const f32, to: *mut f32| Product {
        left,
        right: Right { words: columns.cast(), stride: ROWS },
        output: Output { values: to, stride: ROWS, add: false },
        rows: keys,
        extent: &by_key,
    };
    // SAFETY: the caller passes the buffers of a block and matrices that were checked.
    unsafe {
        K::product(set, &scores_of(k.left(block.keys.start), buffers.q_columns, scores));
        K::product(set, &scores_of(v.left(block.keys.start), buffers.dy_columns, slopes));
        let known = Known { logarithm: buffers.logarithm, along: buffers.along, scale: shape.scale };
        weights_and_slopes::<K::Sums>(block, scores, slopes, known);
        // The weight of a row's only key is 1 whatever its score: no gradient, not even one of rounding.
        for (lane, row) in block.rows.clone().enumerate() {
            if let Some(key) = mask.only_key(row).filter(|key| block.keys.contains(key)) {
                *slopes.add((key - block.keys.start) * ROWS + lane) = 0.0;
            }
        }
        K::product(
            set,
            &Product {
                left: K::over_keys(slopes, keys, words.cast()),
                right: K::right(k, block.keys.clone(), head_dim, buffers.keys.cast(), stride),
                output: Output { values: buffers.dq, stride, add },
                rows: block.rows.len(),
                extent: &|rows| Extent { inner: block.seen(rows), columns: 0..head_dim },
            },
        );
        turns.wait(number, turn);
        for (left, right, gradient) in [(scores, right.dy, dv), (slopes, right.q, dk)] {
            let values = gradient.block(block.keys.start, 0, keys, head_dim);
            K::product(
                set,
                &Product {
                    left: K::over_rows(left, keys, words.cast()),
                    right,
                    output: Output { values, stride: gradient.row_stride(), add: turn > 0 },
                    rows: keys,
                    extent: &|keys| Extent { inner: block.seeing(keys), columns: 0..head_dim },
                },
            );
        }
        turns.pass(number, turn);
    }
}
