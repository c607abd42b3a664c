//! Products of few rows with a weight that is read once, where it lies: what decoding does.
//!
//! Reading the weight is nearly all of the work, so it is streamed: [`TILE`] of its rows side by side, each load of
//! them serving up to [`TILE`] rows of the left operand. For one row the processor is ahead of these streams by itself,
//! and asking for memory cost a tenth; with more rows there is too much arithmetic between two loads, and it pays. A
//! dot product runs in the lanes of a register, in an order that depends on its length alone: a row's result does not
//! depend on how many rows it is computed with.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
mod pairs;

use std::marker::PhantomData;

use half::bf16;

use super::{Element, Finish, Target, View};
use crate::cpu::simd::{Vector, prefetch, vectorised};
use crate::ops::FEW_ROWS;

/// Rows and columns of a tile, of which each pair has a sum of its own.
const TILE: usize = 4;
/// How far ahead of its use memory is asked for, in bytes, where several rows are computed with what is read.
const AHEAD: usize = 4096;
/// Columns whose sums are finished together.
const BLOCK: usize = 64;

/// Sums in the lanes of a register.
trait Lanes: Copy {
    /// A number of the left operand.
    type Left: Copy;
    /// A number of the weight.
    type Right: Copy;
    /// Several numbers of either, loaded.
    type Loaded: Copy;
    /// How many.
    const WIDTH: usize;

    /// No sum yet.
    ///
    /// # Safety
    /// The machine must have the instructions.
    unsafe fn zero() -> Self;

    /// Loads [`Lanes::WIDTH`] numbers of the left operand.
    ///
    /// # Safety
    /// So many must lie there, and the machine must have the instructions.
    unsafe fn left(from: *const Self::Left) -> Self::Loaded;

    /// Loads fewer, with zeros after them.
    ///
    /// # Safety
    /// As for [`Lanes::left`], of `count` numbers.
    unsafe fn left_part(from: *const Self::Left, count: usize) -> Self::Loaded;

    /// As [`Lanes::left`] of the weight.
    ///
    /// # Safety
    /// As for [`Lanes::left`].
    unsafe fn right(from: *const Self::Right) -> Self::Loaded;

    /// As [`Lanes::left_part`] of the weight.
    ///
    /// # Safety
    /// As for [`Lanes::left_part`].
    unsafe fn right_part(from: *const Self::Right, count: usize) -> Self::Loaded;

    /// Adds the products, lane by lane.
    ///
    /// # Safety
    /// The machine must have the instructions.
    unsafe fn add_products(self, left: Self::Loaded, right: Self::Loaded) -> Self;

    /// The sum of all lanes.
    ///
    /// # Safety
    /// The machine must have the instructions.
    unsafe fn total(self) -> f32;
}

/// Sums of products of f32 with numbers of type `T`, widened.
#[derive(Clone, Copy)]
struct Floats<V, T>(V, PhantomData<T>);

impl<V: Vector, T: Element> Lanes for Floats<V, T> {
    type Left = f32;
    type Right = T;
    type Loaded = V;
    const WIDTH: usize = V::LANES;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller vouches for the machine.
        Self(unsafe { V::splat(0.0) }, PhantomData)
    }

    #[inline(always)]
    unsafe fn left(from: *const f32) -> V {
        // SAFETY: the caller vouches for the numbers and the machine.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn left_part(from: *const f32, count: usize) -> V {
        // SAFETY: as above.
        unsafe { V::load_first(from, count) }
    }

    #[inline(always)]
    unsafe fn right(from: *const T) -> V {
        // SAFETY: as above.
        unsafe { T::load(from) }
    }

    #[inline(always)]
    unsafe fn right_part(from: *const T, count: usize) -> V {
        // SAFETY: as above.
        unsafe { T::load_first(from, count) }
    }

    #[inline(always)]
    unsafe fn add_products(self, left: V, right: V) -> Self {
        Self(left.mul_add(right, self.0), PhantomData)
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        self.0.sum()
    }
}

vectorised! {
    /// `c (+)= scale · a · b (+ bias)`, the rows of `a` and the columns of `b` lying contiguously.
    ///
    /// # Safety
    /// Nobody else may touch these elements of `c` meanwhile.
    pub(super) unsafe fn of_f32(a: View<'_>, b: View<'_>, finish: Finish<'_>, c: Target<'_>) = rows_of_f32
}

vectorised! {
    /// As [`of_f32`], of bf16.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn of_bf16(a: View<'_>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) = rows_of_bf16
}

#[inline(always)]
unsafe fn rows_of_f32<V: Vector>(a: View<'_>, b: View<'_>, finish: Finish<'_>, c: Target<'_>) {
    // SAFETY: the caller vouches for `c` and the machine.
    unsafe { rows::<Floats<V, f32>>(a, b, finish, c) }
}

#[inline(always)]
unsafe fn rows_of_bf16<V: Vector>(a: View<'_>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
    // SAFETY: as above.
    unsafe { rows::<Floats<V, bf16>>(a, b, finish, c) }
}

/// `c (+)= scale · a · b (+ bias)` with a left operand of bf16, too, by the instruction for pairs.
///
/// # Safety
/// The machine must have [`InstructionSet::Avx512Bf16`], and nobody else may touch these elements of `c` meanwhile.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512bf16,avx2,fma")]
pub(super) unsafe fn of_pairs(a: View<'_, bf16>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
    // SAFETY: the caller vouches for `c` and the machine.
    unsafe { rows::<pairs::PairSums>(a, b, finish, c) }
}

/// A block of columns at a time, and of it a tile after the other, each for all rows of `a`.
///
/// # Safety
/// The machine must have the instructions of `L`, and nobody else may touch these elements of `c` meanwhile.
#[inline(always)]
unsafe fn rows<L: Lanes>(a: View<'_, L::Left>, b: View<'_, L::Right>, finish: Finish<'_>, c: Target<'_>) {
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
                tiles::<L, TILE>(&lefts[..a.rows()], right, column, &mut sums);
            }
            for column in whole..columns.len() {
                tiles::<L, 1>(&lefts[..a.rows()], right, column, &mut sums);
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
/// The machine must have the instructions of `L`, each left operand hold `inner` values, and there be so many columns.
#[inline(always)]
unsafe fn tiles<L: Lanes, const N: usize>(
    lefts: &[*const L::Left],
    right: Columns<L::Right>,
    column: usize,
    sums: &mut [[f32; BLOCK]; FEW_ROWS],
) {
    for (lefts, sums) in lefts.chunks(TILE).zip(sums.chunks_exact_mut(TILE)) {
        // SAFETY: the caller vouches for it.
        unsafe {
            match *lefts {
                [a] => tile::<L, 1, N>([a], right, column, sums),
                [a, b] => tile::<L, 2, N>([a, b], right, column, sums),
                [a, b, c] => tile::<L, 3, N>([a, b, c], right, column, sums),
                [a, b, c, d] => tile::<L, TILE, N>([a, b, c, d], right, column, sums),
                _ => unreachable!("chunks of up to {TILE}"),
            }
        }
    }
}

/// `M` rows and `N` columns of a block.
///
/// # Safety
/// As for [`tiles`].
#[inline(always)]
unsafe fn tile<L: Lanes, const M: usize, const N: usize>(
    lefts: [*const L::Left; M],
    right: Columns<L::Right>,
    column: usize,
    found: &mut [[f32; BLOCK]],
) {
    // SAFETY: the caller vouches for the columns, the values of each operand, and the machine.
    unsafe {
        let rights: [_; N] = std::array::from_fn(|n| right.first.add((column + n) * right.stride));
        let mut sums = [[L::zero(); N]; M];
        let whole = right.inner / L::WIDTH * L::WIDTH;
        for index in (0..whole).step_by(L::WIDTH) {
            if M > 1 {
                rights.iter().for_each(|right| prefetch(right.wrapping_add(index).wrapping_byte_add(AHEAD)));
            }
            let left = lefts.map(|left| L::left(left.add(index)));
            let right = rights.map(|right| L::right(right.add(index)));
            add(&mut sums, left, right);
        }
        let count = right.inner - whole;
        if count > 0 {
            let left = lefts.map(|left| L::left_part(left.add(whole), count));
            let right = rights.map(|right| L::right_part(right.add(whole), count));
            add(&mut sums, left, right);
        }
        for (found, sums) in found.iter_mut().zip(sums) {
            for (found, sum) in found[column..column + N].iter_mut().zip(sums) {
                *found = sum.total();
            }
        }
    }
}

/// Adds the products of each row with each column.
///
/// # Safety
/// The machine must have the instructions of `L`.
#[inline(always)]
unsafe fn add<L: Lanes, const M: usize, const N: usize>(
    sums: &mut [[L; N]; M],
    left: [L::Loaded; M],
    right: [L::Loaded; N],
) {
    for (sums, left) in sums.iter_mut().zip(left) {
        for (sum, right) in sums.iter_mut().zip(right) {
            // SAFETY: the caller vouches for the machine.
            *sum = unsafe { sum.add_products(left, right) };
        }
    }
}

#[cfg(test)]
mod tests;
