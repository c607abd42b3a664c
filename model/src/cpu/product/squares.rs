//! The innermost loop of a product of bf16 on ARM: a tile of the result in squares of two rows and two columns, each a
//! register, to which an instruction adds the products of four values along the inner dimension.
//!
//! Its bits are those of [`super::kernel`] with the instruction for pairs: to an element the first pair is added, then
//! the second.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::aarch64::*;

use super::kernel::{Tile, store};
use crate::cpu::simd::{Multiplier, Neon, NeonBf16, Routine, Vector, prefetch_to_write};

/// Words of the inner dimension that are multiplied at once; those of a column lie side by side in a panel.
pub(super) const STEPS: usize = 2;

/// Lays a panel's steps, of so many words each, two by two: of each column its two words. A last one without a second
/// gets zeros.
///
/// # Safety
/// So many steps can be read and, rounded up to two, written.
pub(super) unsafe fn interleave(panel: *mut u32, steps: usize, width: usize) {
    for first in (0..steps).step_by(STEPS) {
        let mut of_columns = [[0; STEPS]; Neon::LANES * Neon::TILE_VECTORS];
        let of_columns = &mut of_columns[..width];
        // SAFETY: the caller vouches for it.
        unsafe {
            let place = panel.add(first * width);
            for step in 0..STEPS.min(steps - first) {
                let words = std::slice::from_raw_parts(place.add(step * width), width);
                of_columns.iter_mut().zip(words).for_each(|(column, word)| column[step] = *word);
            }
            std::ptr::copy_nonoverlapping(of_columns.as_ptr(), place.cast(), width);
        }
    }
}

/// A tile of so many rows and vectors, no more than the registers hold.
///
/// # Safety
/// As for [`super::kernel::tile`]; the panel's steps are interleaved.
pub(super) unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, u32>) {
    assert!(rows <= Neon::TILE_ROWS && tile.step == 1, "a tile of {rows} rows that lie contiguously");
    // SAFETY: the caller vouches for it.
    unsafe {
        match vectors {
            1 => of_vectors::<1>(rows, tile),
            2 => of_vectors::<2>(rows, tile),
            3 => of_vectors::<3>(rows, tile),
            _ => unreachable!("a tile of {vectors} vectors"),
        }
    }
}

/// # Safety
/// As for [`tile`].
unsafe fn of_vectors<const V: usize>(rows: usize, tile: &Tile<'_, u32>) {
    // SAFETY: the caller vouches for it.
    unsafe {
        match rows.div_ceil(2) {
            1 => NeonBf16::compiled(Fixed::<1, V>(rows, tile)),
            2 => NeonBf16::compiled(Fixed::<2, V>(rows, tile)),
            3 => NeonBf16::compiled(Fixed::<3, V>(rows, tile)),
            4 => NeonBf16::compiled(Fixed::<4, V>(rows, tile)),
            _ => unreachable!("a tile of {rows} rows"),
        }
    }
}

/// A tile of `P` pairs of rows, the last of which may be one row, and `V` vectors.
struct Fixed<'a, 't, const P: usize, const V: usize>(usize, &'a Tile<'t, u32>);

impl<const P: usize, const V: usize> Routine for Fixed<'_, '_, P, V> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Vector>(self) {
        let Self(rows, tile) = self;
        // SAFETY: the caller vouches for the instructions and the operands.
        unsafe {
            for row in 0..rows {
                prefetch_to_write(tile.c.wrapping_add(row * tile.c_stride));
            }
            let mut sums = [[[Neon::splat(0.0); 2]; V]; P];
            // Beyond the last row that one is multiplied again.
            let mut lines: [[*const u32; 2]; P] = std::array::from_fn(|pair| {
                [2 * pair, 2 * pair + 1].map(|row| tile.a.add(row.min(rows - 1) * tile.row_stride))
            });
            let mut panel = tile.panel;
            for _ in 0..tile.inner / STEPS {
                let mut words = [[vdupq_n_u32(0); 2]; V];
                for (vector, words) in words.iter_mut().enumerate() {
                    *words = [vld1q_u32(panel.add(8 * vector)), vld1q_u32(panel.add(8 * vector + 4))];
                }
                for (sums, line) in sums.iter_mut().zip(&mut lines) {
                    add(sums, vcombine_u32(vld1_u32(line[0]), vld1_u32(line[1])), &words);
                    *line = [line[0].add(STEPS), line[1].add(STEPS)];
                }
                panel = panel.add(STEPS * tile.panel_step);
            }
            if tile.inner % STEPS == 1 {
                let mut words = [[vdupq_n_u32(0); 2]; V];
                for (vector, words) in words.iter_mut().enumerate() {
                    *words = [vld1q_u32(panel.add(8 * vector)), vld1q_u32(panel.add(8 * vector + 4))];
                }
                for (sums, line) in sums.iter_mut().zip(lines) {
                    let halves = [vcreate_u32(u64::from(*line[0])), vcreate_u32(u64::from(*line[1]))];
                    add(sums, vcombine_u32(halves[0], halves[1]), &words);
                }
            }
            let bias = tile.finish.bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
            for (pair, sums) in sums.iter().enumerate() {
                for (vector, squares) in sums.iter().enumerate() {
                    let first = vector * Neon::LANES;
                    let lanes = (tile.columns - first).min(Neon::LANES);
                    let of_rows = rows_of(*squares);
                    for (row, sums) in (2 * pair..rows).zip(of_rows) {
                        let c = tile.c.add(row * tile.c_stride + first);
                        store(sums, lanes, &tile.finish, bias.wrapping_add(first), c);
                    }
                }
            }
        }
    }
}

/// Adds the products of two rows with each two columns.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn add<const V: usize>(sums: &mut [[Neon; 2]; V], left: uint32x4_t, words: &[[uint32x4_t; 2]; V]) {
    for (sums, words) in sums.iter_mut().zip(words) {
        for (sum, words) in sums.iter_mut().zip(words) {
            // SAFETY: the caller vouches for the instructions.
            *sum = unsafe { NeonBf16::multiply_add_square(left, *words, *sum) };
        }
    }
}

/// Two squares side by side as two rows.
#[inline(always)]
fn rows_of([first, second]: [Neon; 2]) -> [Neon; 2] {
    // SAFETY: every processor of the architecture has the instructions.
    unsafe {
        let (first, second) = (vreinterpretq_f64_f32(first.lanes()), vreinterpretq_f64_f32(second.lanes()));
        let (upper, lower) = (vtrn1q_f64(first, second), vtrn2q_f64(first, second));
        [Neon::of(vreinterpretq_f32_f64(upper)), Neon::of(vreinterpretq_f32_f64(lower))]
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::{Finish, Path, Side, Target, View, product_of_pairs};
    use crate::cpu::InstructionSet;
    use crate::cpu::simd::neon_pair;
    use crate::ops::Write;

    /// Each element is the sum of its pairs in the order of the inner dimension, rounded as the instruction for pairs
    /// does: at any place of a tile, at the ends of rows, columns and words, and beyond a block of a panel's steps.
    #[test]
    fn squares_have_the_bits_of_pairs() {
        if !InstructionSet::NeonBf16.is_available() {
            return eprintln!("skipped: this machine has no products of bf16");
        }
        let value = |at: usize| bf16::from_f32(((at * 7919) % 1009) as f32 / 1009.0 - 0.5);
        for (rows, columns, inner) in [(1, 1, 1), (2, 3, 5), (7, 12, 30), (9, 13, 34), (17, 50, 331), (8, 29, 1535)] {
            let left: Vec<bf16> = (0..rows * inner).map(value).collect();
            let right: Vec<bf16> = (0..columns * inner).map(|at| value(at + 5)).collect();
            let words = inner.div_ceil(2);
            let half = |values: &[bf16], row: usize, at: usize| {
                if at < inner { values[row * inner + at] } else { bf16::ZERO }
            };
            let pair = |values: &[bf16], row: usize, word: usize| [0, 1].map(|at| half(values, row, 2 * word + at));
            let pairs: Vec<u32> = (0..rows * words)
                .map(|at| pair(&left, at / words, at % words).map(|half| u32::from(half.to_bits())))
                .map(|[low, high]| low | high << 16)
                .collect();
            let mut found = vec![f32::NAN; rows * columns];
            let b = View::new(&right, columns, inner, inner).transposed();
            let finish = Finish { scale: 1.0, bias: None, write: Write::Replace };
            let sides = [Side { b, finish, c: Target::new(&mut found, columns) }];
            let a = View::new(&pairs, rows, words, words);
            // SAFETY: one thread, and the machine has the set.
            unsafe { product_of_pairs(Path::Blocks, InstructionSet::NeonBf16, a, &sides) };
            for (at, found) in found.iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                let add = |sum, word| neon_pair(sum, pair(&left, row, word), pair(&right, column, word));
                let expected = (0..words).fold(0.0, add);
                assert_eq!(found.to_bits(), expected.to_bits(), "{rows}x{columns}x{inner} at {row}, {column}");
            }
        }
    }
}
