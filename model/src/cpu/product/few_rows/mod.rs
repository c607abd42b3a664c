//! Products of few rows with a weight that is read once, where it lies: what decoding does.
//!
//! Reading the weight is nearly all of the work, so it is streamed: [`TILE`] of its rows side by side, each load of
//! them serving up to [`TILE`] rows of the left operand. For one row the processor is ahead of these streams by itself,
//! and asking for memory cost a tenth; with more rows there is too much arithmetic between two loads, and it pays. A
//! dot product runs in the lanes of a register, in an order that depends on its length alone: a row's result does not
//! depend on how many rows it is computed with.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
mod in_tiles;

use std::marker::PhantomData;

use half::bf16;

use super::{Element, Finish, InstructionSet, Target, View};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::Avx512Bf16;
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::NeonBf16;
use crate::cpu::simd::{Floats, Loads, Multiplier, Routine, Vector, prefetch};
use crate::ops::FEW_ROWS;

/// Rows and columns of a tile, of which each pair has a sum of its own.
const TILE: usize = 4;
/// How far ahead of its use memory is asked for, in bytes, where several rows are computed with what is read.
const AHEAD: usize = 4096;
/// Columns whose sums are finished together.
const BLOCK: usize = 64;

/// `c (+)= scale · a · b (+ bias)`, the rows of `a` and the columns of `b` lying contiguously.
///
/// # Safety
/// The machine has the set, and nobody else may touch these elements of `c` meanwhile.
pub(super) unsafe fn of_floats<T: Element>(
    set: InstructionSet,
    a: View<'_>,
    b: View<'_, T>,
    finish: Finish<'_>,
    c: Target<'_>,
) {
    // SAFETY: the caller vouches for both.
    unsafe { set.run(Rows { a, b, finish, c }) }
}

/// As [`of_floats`] with a left operand of bf16, too: by the instruction for pairs, or in tiles.
///
/// # Safety
/// As there, of a set that [multiplies pairs](InstructionSet::multiplies_pairs).
pub(super) unsafe fn of_pairs(
    set: InstructionSet,
    a: View<'_, bf16>,
    b: View<'_, bf16>,
    finish: Finish<'_>,
    c: Target<'_>,
) {
    // SAFETY: the caller vouches for both.
    unsafe {
        match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Amx => in_tiles::product::<amx::Registers>(a, b, finish, c),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::AmxEmulated => in_tiles::product::<amx::Emulated>(a, b, finish, c),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Bf16 => {
                Avx512Bf16::compiled(OfPairs::<Avx512Bf16>(Rows { a, b, finish, c }, PhantomData));
            }
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonBf16 => {
                NeonBf16::compiled(OfPairs::<NeonBf16>(Rows { a, b, finish, c }, PhantomData));
            }
            _ => unreachable!("pairs of {set}"),
        }
    }
}

/// A product of few rows.
struct Rows<'a, A, B> {
    a: View<'a, A>,
    b: View<'a, B>,
    finish: Finish<'a>,
    c: Target<'a>,
}

impl<T: Element> Routine for Rows<'_, f32, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller vouches for it.
        unsafe { rows::<Floats<V>, _, _>(self.a, self.b, self.finish, self.c) }
    }
}

/// A product of few rows of pairs.
struct OfPairs<'a, M>(Rows<'a, bf16, bf16>, PhantomData<M>);

impl<M: Loads<bf16>> Routine for OfPairs<'_, M> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Rows { a, b, finish, c } = self.0;
        // SAFETY: the caller vouches for it.
        unsafe { rows::<M, _, _>(a, b, finish, c) }
    }
}

/// A block of columns at a time, and of it a tile after the other, each for all rows of `a`.
///
/// # Safety
/// The machine must have the instructions of `M`, and nobody else may touch these elements of `c` meanwhile.
#[inline(always)]
unsafe fn rows<M: Loads<A> + Loads<B>, A: Copy, B: Copy>(
    a: View<'_, A>,
    b: View<'_, B>,
    finish: Finish<'_>,
    c: Target<'_>,
) {
    assert!(a.columns() == b.rows() && a.column_stride() == 1 && b.row_stride() == 1, "operands that lie contiguously");
    assert!(a.rows() <= FEW_ROWS, "{} rows are not few", a.rows());
    let mut lefts = [std::ptr::null(); FEW_ROWS];
    lefts.iter_mut().zip(0..a.rows()).for_each(|(left, row)| *left = a.row(row).as_ptr());
    let (weight, mut sums) = (b.transposed(), [[0.0; BLOCK]; FEW_ROWS]);
    for first in (0..b.columns()).step_by(BLOCK) {
        let columns = first..b.columns().min(first + BLOCK);
        let right = Columns { first: weight.row(first).as_ptr(), stride: b.column_stride(), inner: b.rows() };
        let whole = columns.len() / TILE * TILE;
        // SAFETY: each row of `a` was seen to hold `inner` values, as do these columns of the view `b`; the caller
        // vouches for the machine.
        unsafe {
            for column in (0..whole).step_by(TILE) {
                tiles::<M, A, B, TILE>(&lefts[..a.rows()], right, column, &mut sums);
            }
            for column in whole..columns.len() {
                tiles::<M, A, B, 1>(&lefts[..a.rows()], right, column, &mut sums);
            }
        }
        let finish = finish.of_columns(columns.clone());
        for (row, sums) in sums[..a.rows()].iter().enumerate() {
            // SAFETY: the caller vouches for these elements.
            finish.row(&sums[..columns.len()], unsafe { c.row(row, columns.clone()) });
        }
    }
}

/// Columns of the weight as plain addresses: looking a place up in a view would take longer than a tile waits for its
/// memory.
#[derive(Clone, Copy)]
struct Columns<T> {
    first: *const T,
    stride: usize,
    inner: usize,
}

/// `N` columns of a block from `column` on, for every row.
///
/// # Safety
/// The machine must have the instructions of `M`, each left operand hold `inner` values, and there be so many columns.
#[inline(always)]
unsafe fn tiles<M: Loads<A> + Loads<B>, A, B: Copy, const N: usize>(
    lefts: &[*const A],
    right: Columns<B>,
    column: usize,
    sums: &mut [[f32; BLOCK]; FEW_ROWS],
) {
    for (lefts, sums) in lefts.chunks(TILE).zip(sums.chunks_exact_mut(TILE)) {
        // SAFETY: the caller vouches for it.
        unsafe {
            match *lefts {
                [a] => tile::<M, A, B, 1, N>([a], right, column, sums),
                [a, b] => tile::<M, A, B, 2, N>([a, b], right, column, sums),
                [a, b, c] => tile::<M, A, B, 3, N>([a, b, c], right, column, sums),
                [a, b, c, d] => tile::<M, A, B, TILE, N>([a, b, c, d], right, column, sums),
                _ => unreachable!("chunks of up to {TILE}"),
            }
        }
    }
}

/// `R` rows and `N` columns of a block.
///
/// # Safety
/// As for [`tiles`].
#[inline(always)]
unsafe fn tile<M: Loads<A> + Loads<B>, A, B: Copy, const R: usize, const N: usize>(
    lefts: [*const A; R],
    right: Columns<B>,
    column: usize,
    found: &mut [[f32; BLOCK]],
) {
    // SAFETY: the caller vouches for the columns, the values of each operand, and the machine.
    unsafe {
        let rights: [_; N] = std::array::from_fn(|n| right.first.add((column + n) * right.stride));
        let values = M::LANES * M::VALUES;
        let mut sums = [[M::Sums::splat(0.0); N]; R];
        let whole = right.inner / values * values;
        for index in (0..whole).step_by(values) {
            if R > 1 {
                rights.iter().for_each(|right| prefetch(right.wrapping_add(index).wrapping_byte_add(AHEAD)));
            }
            let left = lefts.map(|left| M::load_values(left.add(index)));
            let right = rights.map(|right| M::load_values(right.add(index)));
            add::<M, R, N>(&mut sums, left, right);
        }
        let count = right.inner - whole;
        if count > 0 {
            let left = lefts.map(|left| M::load_first_values(left.add(whole), count));
            let right = rights.map(|right| M::load_first_values(right.add(whole), count));
            add::<M, R, N>(&mut sums, left, right);
        }
        for (found, sums) in found.iter_mut().zip(sums) {
            for (found, sum) in found[column..column + N].iter_mut().zip(sums) {
                *found = sum.sum();
            }
        }
    }
}

/// Adds the products of each row with each column.
///
/// # Safety
/// The machine must have the instructions of `M`.
#[inline(always)]
unsafe fn add<M: Multiplier, const R: usize, const N: usize>(
    sums: &mut [[M::Sums; N]; R],
    left: [M::Words; R],
    right: [M::Words; N],
) {
    for (sums, left) in sums.iter_mut().zip(left) {
        for (sum, right) in sums.iter_mut().zip(right) {
            // SAFETY: the caller vouches for the machine.
            *sum = unsafe { M::multiply_add(left, right, *sum) };
        }
    }
}

#[cfg(test)]
mod tests;
