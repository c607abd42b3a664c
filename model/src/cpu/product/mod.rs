//! Matrix products of any orientation, over all or a part of the result, summed in f32.
//!
//! Each element is summed over the inner dimension in one order whatever the partition over threads, so that the result
//! does not depend on their number. The right operand may lie in a narrower type than f32: it is widened on the way,
//! or, where the machine multiplies pairs of bf16, packed as it is.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

mod blocks;
mod few_rows;
mod finish;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod operands;
mod pack;
mod partition;
mod portable;
mod right;
mod split;
#[cfg(target_arch = "aarch64")]
mod squares;
mod threads;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod trained;
mod view;
mod widened;

#[cfg(target_arch = "x86_64")]
use std::ops::Range;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::instructions::InstructionSet;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::simd::Floats;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512, Avx512Bf16};
#[cfg(target_arch = "aarch64")]
use super::simd::{Neon, NeonBf16};
use super::simd::{Vector, first_values};
use crate::ops::FEW_ROWS;
#[cfg(target_arch = "x86_64")]
pub(super) use blocks::with_words;
pub(super) use finish::Finish;
#[cfg(target_arch = "x86_64")]
use operands::{AcrossRows, One, Pairs, Split};
#[cfg(test)]
use partition::Grain;
pub(super) use right::{PairsRight, Right, Side};
pub(super) use split::SplitView;
pub(super) use trained::TrainedWeight;
pub(super) use view::{Target, View, ViewMut};
pub(super) use widened::{BlockWeight, Order, WeightBlock, Widened};

/// A number type of elements of a right operand.
pub(crate) trait Element: Copy + Send + Sync {
    /// The same number in f32.
    fn widen(self) -> f32;

    /// Numbers that lie side by side, widened.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// The first `count` of them, zero in the other lanes.
    ///
    /// # Safety
    /// As [`Vector::load_first`].
    unsafe fn load_first<V: Vector>(from: *const Self, count: usize) -> V;

    /// A product of few rows with contiguous columns of this type.
    ///
    /// # Safety
    /// As for [`product_along`].
    unsafe fn few_rows(set: InstructionSet, a: View<'_>, b: View<'_, Self>, finish: Finish<'_>, c: Target<'_>);

    /// Packs columns of this type for [`Avx512`].
    ///
    /// # Safety
    /// As for [`pack::Pack::pack`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn pack_512(b: View<'_, Self>, inner: Range<usize>, columns: Range<usize>, panel: *mut f32);

    /// The place as one of f32, if the elements are that.
    fn floats(_place: *const Self) -> Option<*const f32> {
        None
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn load_first<V: Vector>(from: *const f32, count: usize) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load_first(from, count) }
    }

    unsafe fn few_rows(set: InstructionSet, a: View<'_>, b: View<'_>, finish: Finish<'_>, c: Target<'_>) {
        // SAFETY: the caller vouches for `c`.
        unsafe { few_rows::of_floats(set, a, b, finish, c) }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn pack_512(b: View<'_>, inner: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: the caller vouches for it.
        unsafe { pack::avx512::pack_f32(b, inner, columns, panel) }
    }

    fn floats(place: *const f32) -> Option<*const f32> {
        Some(place)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const bf16) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn load_first<V: Vector>(from: *const bf16, count: usize) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load_bf16(first_values(from, count).as_ptr()) }
    }

    unsafe fn few_rows(set: InstructionSet, a: View<'_>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
        // SAFETY: the caller vouches for `c`.
        unsafe { few_rows::of_floats(set, a, b, finish, c) }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn pack_512(b: View<'_, bf16>, inner: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: the caller vouches for it.
        unsafe { pack::avx512::pack_bf16(b, inner, columns, panel) }
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32_const()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f16) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load_f16(from) }
    }

    #[inline(always)]
    unsafe fn load_first<V: Vector>(from: *const f16, count: usize) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load_f16(first_values(from, count).as_ptr()) }
    }

    unsafe fn few_rows(set: InstructionSet, a: View<'_>, b: View<'_, f16>, finish: Finish<'_>, c: Target<'_>) {
        // SAFETY: the caller vouches for `c`.
        unsafe { few_rows::of_floats(set, a, b, finish, c) }
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn pack_512(b: View<'_, f16>, inner: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: the caller vouches for it.
        unsafe { pack::avx512::pack_f16(b, inner, columns, panel) }
    }
}

/// How a product is computed. It is chosen for the whole product, so that no partition changes the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Row by row, the right operand read in place.
    FewRows,
    /// In blocks, the right operand packed.
    Blocks,
}

impl Path {
    /// The one for this left operand and a right one of these strides.
    pub(super) fn of<A: Copy>(a: View<'_, A>, (row_stride, _): (usize, usize)) -> Self {
        let in_place = a.rows() <= FEW_ROWS && row_stride == 1 && a.column_stride() == 1;
        if in_place { Self::FewRows } else { Self::Blocks }
    }
}

/// `c (+)= scale · a · b (+ bias)` of each side by the calling thread; all sides are of one shape.
///
/// # Safety
/// Nobody else may read or write the `a.rows × b.columns` elements of each `c` meanwhile.
unsafe fn product_along<R: Right>(path: Path, set: InstructionSet, a: View<'_>, sides: &[Side<'_, R>]) {
    assert!(sides.iter().all(|side| a.columns() == side.b.rows()), "inner dimensions");
    if a.columns() == 0 {
        // SAFETY: the caller vouches for all of each result.
        return sides.iter().for_each(|side| unsafe { side.nothing(a.rows()) });
    }
    // SAFETY: the caller vouches for all of each result, and a set other than the portable one is only ever chosen
    // where the machine has it.
    unsafe {
        match (path, set) {
            (Path::FewRows, _) => sides.iter().for_each(|&Side { b, finish, c }| b.few_rows(set, a, finish, c)),
            #[cfg(target_arch = "x86_64")]
            (
                Path::Blocks,
                InstructionSet::Avx512 | InstructionSet::Avx512Bf16 | InstructionSet::Amx | InstructionSet::AmxEmulated,
            ) => {
                blocks::product::<Floats<Avx512>, R>(a, sides);
            }
            #[cfg(target_arch = "x86_64")]
            (Path::Blocks, InstructionSet::Avx2) => blocks::product::<Floats<Avx2>, R>(a, sides),
            #[cfg(target_arch = "aarch64")]
            (Path::Blocks, InstructionSet::Neon | InstructionSet::NeonDot | InstructionSet::NeonBf16) => {
                blocks::product::<Floats<Neon>, R>(a, sides);
            }
            (Path::Blocks, _) => sides.iter().for_each(|&Side { b, finish, c }| portable::product(a, b, finish, c)),
        }
    }
}

/// As [`product_along`], `a` being pairs of bf16, the last of a row padded with zero where their number is odd.
///
/// # Safety
/// As there, and the set [multiplies pairs](InstructionSet::multiplies_pairs).
unsafe fn product_of_pairs<R: PairsRight>(path: Path, set: InstructionSet, a: View<'_, u32>, sides: &[Side<'_, R>]) {
    assert!(sides.iter().all(|side| a.columns() == side.b.rows().div_ceil(2)), "inner dimensions");
    if a.columns() == 0 {
        // SAFETY: the caller vouches for all of each result.
        return sides.iter().for_each(|side| unsafe { side.nothing(a.rows()) });
    }
    // SAFETY: the caller vouches for it.
    unsafe {
        match (path, set) {
            (Path::FewRows, _) => sides.iter().for_each(|&Side { b, finish, c }| {
                b.few_rows_of_pairs(set, a.of_halves(b.rows()), finish, c);
            }),
            #[cfg(target_arch = "x86_64")]
            (Path::Blocks, InstructionSet::Amx | InstructionSet::AmxEmulated) => {
                product_in_tiles(set, &One([Pairs(a)]), sides);
            }
            #[cfg(target_arch = "x86_64")]
            (Path::Blocks, InstructionSet::Avx512Bf16) => blocks::product::<Avx512Bf16, R>(a, sides),
            #[cfg(target_arch = "aarch64")]
            (Path::Blocks, InstructionSet::NeonBf16) => blocks::product::<NeonBf16, R>(a, sides),
            (Path::Blocks, _) => unreachable!("pairs of {set}"),
        }
    }
}

/// As [`product_along`], of values that are split, in tiles.
///
/// # Safety
/// As there, and the set has tiles.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables, reason = "no set of another architecture has tiles"))]
unsafe fn product_of_split<R: Right>(set: InstructionSet, a: SplitView<'_>, sides: &[Side<'_, R>]) {
    assert!(sides.iter().all(|side| a.columns() == side.b.rows()), "inner dimensions");
    // SAFETY: the caller vouches for it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        if a.halves[0].column_stride() == 1 {
            product_in_tiles(set, &Split { left: a.halves.map(|half| Pairs(half.of_pairs())), set }, sides);
        } else {
            product_in_tiles(set, &Split { left: a.halves.map(|half| AcrossRows(half.transposed())), set }, sides);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("tiles of {set}");
}

/// A product in the tiles of a set.
///
/// # Safety
/// As for [`tiles::product`], and the set has tiles.
#[cfg(target_arch = "x86_64")]
unsafe fn product_in_tiles<R: Right>(set: InstructionSet, a: &impl operands::Operands<R>, sides: &[Side<'_, R>]) {
    // SAFETY: the caller vouches for it.
    unsafe {
        match set {
            InstructionSet::Amx => tiles::product::<amx::Registers, _, R>(a, sides),
            InstructionSet::AmxEmulated => tiles::product::<amx::Emulated, _, R>(a, sides),
            _ => unreachable!("tiles of {set}"),
        }
    }
}

/// `side.c += aᵀ · b`, what is summed over being the rows of both.
///
/// # Safety
/// As for [`product_along`], and the set has tiles.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables, reason = "no set of another architecture has tiles"))]
unsafe fn product_across_rows(set: InstructionSet, a: View<'_, bf16>, side: Side<'_, View<'_, bf16>>) {
    // SAFETY: the caller vouches for it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        product_in_tiles(set, &One([AcrossRows(a)]), &[side]);
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("tiles of {set}");
}

#[cfg(test)]
mod tests;
