//! The innermost loop of a product: a tile of the result, its sums kept in registers.
//!
//! The right operand comes in a panel: some of its columns, and for each step along the inner dimension as many words
//! side by side as the tile is wide. A word is an f32 or a pair of bf16. The left operand is read where it lies, a word
//! of each row at each step.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;

use super::Finish;
use crate::cpu::simd::{Multiplier, Routine, Vector, prefetch_to_write};
use crate::ops::Write;

/// A tile of a product and its operands.
pub(super) struct Tile<'a, W> {
    /// The first word of the first row of the left operand.
    pub a: *const W,
    /// How far apart its rows are.
    pub row_stride: usize,
    /// How far apart its words are along the inner dimension.
    pub step: usize,
    /// Number of steps along the inner dimension.
    pub inner: usize,
    /// The panel.
    pub panel: *const W,
    /// How far apart its steps are.
    pub panel_step: usize,
    /// The first element of the result.
    pub c: *mut f32,
    /// How far apart its rows are.
    pub c_stride: usize,
    /// Columns of the result: no more than the panel has, less than a vector fewer.
    pub columns: usize,
    /// What becomes of the sums.
    pub finish: Finish<'a>,
}

/// Finishes the first `lanes` of some sums, the bias at a place or none at null.
///
/// # Safety
/// The machine has the instructions, and so many elements may be read and, of the result, written.
#[inline(always)]
pub(super) unsafe fn store<V: Vector>(sums: V, lanes: usize, finish: &Finish<'_>, bias: *const f32, c: *mut f32) {
    // SAFETY: the caller vouches for it.
    unsafe {
        let scale = V::splat(finish.scale);
        let mut result = match finish.write {
            Write::Replace => scale.mul(sums),
            Write::Add => scale.mul_add(sums, V::load_first(c, lanes)),
        };
        if finish.bias.is_some() {
            result = result.add(V::load_first(bias, lanes));
        }
        result.store_first(c, lanes);
    }
}

/// A tile of `R` rows and `V` vectors.
///
/// # Safety
/// The machine has the instructions, and all that the tile names may be read and, of the result, written.
#[inline(always)]
unsafe fn fixed<M: Multiplier, const R: usize, const V: usize>(tile: &Tile<'_, M::Word>) {
    // SAFETY: the caller vouches for the instructions and the operands.
    unsafe {
        let mut sums = [[M::Sums::splat(0.0); V]; R];
        for row in 0..R {
            for vector in 0..V {
                prefetch_to_write(tile.c.wrapping_add(row * tile.c_stride + vector * M::LANES));
            }
        }
        let (mut a, mut panel) = (tile.a, tile.panel);
        for _ in 0..tile.inner {
            let mut words = [M::load(panel); V];
            for (vector, words) in words.iter_mut().enumerate().skip(1) {
                *words = M::load(panel.add(vector * M::LANES));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let word = M::splat(a.add(row * tile.row_stride));
                for (sums, words) in sums.iter_mut().zip(words) {
                    *sums = M::multiply_add(word, words, *sums);
                }
            }
            a = a.wrapping_add(tile.step);
            panel = panel.wrapping_add(tile.panel_step);
        }
        let bias = tile.finish.bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
        for (row, sums) in sums.into_iter().enumerate() {
            let c = tile.c.add(row * tile.c_stride);
            for (vector, sums) in sums.into_iter().enumerate() {
                let first = vector * M::LANES;
                let lanes = (tile.columns - first).min(M::LANES);
                store(sums, lanes, &tile.finish, bias.wrapping_add(first), c.add(first));
            }
        }
    }
}

/// A tile of `R` rows and `V` vectors.
struct Fixed<'a, 't, M: Multiplier, const R: usize, const V: usize>(&'a Tile<'t, M::Word>, PhantomData<M>);

impl<M: Multiplier, const R: usize, const V: usize> Routine for Fixed<'_, '_, M, R, V> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Vector>(self) {
        // SAFETY: the caller vouches for it.
        unsafe { fixed::<M, R, V>(self.0) }
    }
}

/// A tile of so many rows and vectors, no more than the registers hold.
///
/// # Safety
/// As for [`fixed`].
pub(super) unsafe fn tile<M: Multiplier>(rows: usize, vectors: usize, tile: &Tile<'_, M::Word>) {
    assert!(rows <= M::Sums::TILE_ROWS && vectors <= M::Sums::TILE_VECTORS, "a tile of {rows} rows");
    // SAFETY: the caller vouches for it.
    unsafe {
        match vectors {
            1 => of_vectors::<M, 1>(rows, tile),
            2 => of_vectors::<M, 2>(rows, tile),
            3 if M::Sums::TILE_VECTORS >= 3 => of_vectors::<M, 3>(rows, tile),
            _ => unreachable!("a tile of {vectors} vectors"),
        }
    }
}

/// # Safety
/// As for [`fixed`].
unsafe fn of_vectors<M: Multiplier, const V: usize>(rows: usize, tile: &Tile<'_, M::Word>) {
    // SAFETY: the caller vouches for it.
    unsafe {
        match rows {
            1 => M::compiled(Fixed::<M, 1, V>(tile, PhantomData)),
            2 => M::compiled(Fixed::<M, 2, V>(tile, PhantomData)),
            3 => M::compiled(Fixed::<M, 3, V>(tile, PhantomData)),
            4 => M::compiled(Fixed::<M, 4, V>(tile, PhantomData)),
            5 => M::compiled(Fixed::<M, 5, V>(tile, PhantomData)),
            6 => M::compiled(Fixed::<M, 6, V>(tile, PhantomData)),
            7 if M::Sums::TILE_ROWS >= 7 => M::compiled(Fixed::<M, 7, V>(tile, PhantomData)),
            8 if M::Sums::TILE_ROWS >= 8 => M::compiled(Fixed::<M, 8, V>(tile, PhantomData)),
            _ => unreachable!("a tile of {rows} rows"),
        }
    }
}
