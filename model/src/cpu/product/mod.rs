//! Matrix products of any orientation, over all or a part of the result, summed in f32.
//!
//! Each element is summed over the inner dimension in one order whatever the partition over threads, so that the result
//! does not depend on their number. The right operand may lie in a narrower type than f32: it is widened on the way,
//! or, where the machine multiplies pairs of bf16, packed as it is.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
mod blocks;
mod few_rows;
mod finish;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod pack;
mod portable;
mod threads;
mod view;

use half::bf16;

use super::instructions::InstructionSet;
use crate::ops::FEW_ROWS;
pub(super) use finish::Finish;
pub(super) use view::{Target, View, ViewMut};

/// A number type of a right operand.
pub(super) trait Element: Copy + Send + Sync {
    /// The same number in f32.
    fn widen(self) -> f32;

    /// A product of few rows with contiguous columns of this type.
    ///
    /// # Safety
    /// As for [`product_along`].
    unsafe fn few_rows(set: InstructionSet, a: View<'_>, b: View<'_, Self>, finish: Finish<'_>, c: Target<'_>);

    /// A product of f32 with a right operand of this type, by [`blocks`].
    ///
    /// # Safety
    /// As for [`product_along`], and the machine has the instructions.
    #[cfg(target_arch = "x86_64")]
    unsafe fn blocks(set: InstructionSet, a: View<'_>, sides: &[Side<'_, Self>]);
}

/// A right operand and what becomes of the product with it.
#[derive(Clone, Copy)]
pub(super) struct Side<'a, T> {
    /// The operand.
    pub b: View<'a, T>,
    /// What becomes of the sums.
    pub finish: Finish<'a>,
    /// Where they go.
    pub c: Target<'a>,
}

impl<T: Copy> Side<'_, T> {
    /// Finishes sums of nothing, of so many rows.
    ///
    /// # Safety
    /// Nobody else may read or write these elements of the result meanwhile.
    unsafe fn nothing(&self, rows: usize) {
        // SAFETY: the caller vouches for them.
        unsafe { self.finish.nothing(rows, self.b.columns(), self.c) }
    }
}

/// Implements [`Element`] for a type, which the f32 kernels can pack.
macro_rules! element {
    ($type:ty, $widen:expr, $few_rows:path) => {
        impl Element for $type {
            #[inline(always)]
            fn widen(self) -> f32 {
                ($widen)(self)
            }

            unsafe fn few_rows(set: InstructionSet, a: View<'_>, b: View<'_, Self>, finish: Finish<'_>, c: Target<'_>) {
                // SAFETY: the caller vouches for `c`.
                unsafe { $few_rows(set, a, b, finish, c) }
            }

            #[cfg(target_arch = "x86_64")]
            unsafe fn blocks(set: InstructionSet, a: View<'_>, sides: &[Side<'_, Self>]) {
                // SAFETY: the caller vouches for it.
                unsafe {
                    match set {
                        InstructionSet::Avx512 | InstructionSet::Avx512Bf16 => {
                            blocks::product::<kernel::Avx512, $type>(a, sides);
                        }
                        InstructionSet::Avx2 => blocks::product::<kernel::Avx2, $type>(a, sides),
                        InstructionSet::Portable => unreachable!("a set without vectors"),
                    }
                }
            }
        }
    };
}

element!(f32, |value| value, few_rows::of_f32);
element!(bf16, |value: bf16| f32::from_bits(u32::from(value.to_bits()) << 16), few_rows::of_bf16);

/// How a product is computed. It is chosen for the whole product, so that no partition changes the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// Row by row, the right operand read in place.
    FewRows,
    /// In blocks, the right operand packed.
    Blocks,
}

impl Path {
    /// The one for these operands.
    pub(super) fn of<A: Copy, B: Copy>(a: View<'_, A>, b: View<'_, B>) -> Self {
        let in_place = a.rows() <= FEW_ROWS && b.row_stride() == 1 && a.column_stride() == 1;
        if in_place { Self::FewRows } else { Self::Blocks }
    }
}

/// `c (+)= scale · a · b (+ bias)` of each side by the calling thread; all sides are of one shape.
///
/// # Safety
/// Nobody else may read or write the `a.rows × b.columns` elements of each `c` meanwhile.
unsafe fn product_along<T: Element>(path: Path, set: InstructionSet, a: View<'_>, sides: &[Side<'_, T>]) {
    assert!(sides.iter().all(|side| a.columns() == side.b.rows()), "inner dimensions");
    if a.columns() == 0 {
        // SAFETY: the caller vouches for all of each result.
        return sides.iter().for_each(|side| unsafe { side.nothing(a.rows()) });
    }
    match (path, set) {
        // SAFETY: the caller vouches for all of each result, and a set other than the portable one is only ever chosen
        // where the machine has it.
        #[cfg(target_arch = "x86_64")]
        (Path::Blocks, InstructionSet::Avx2 | InstructionSet::Avx512 | InstructionSet::Avx512Bf16) => unsafe {
            T::blocks(set, a, sides);
        },
        _ => sides.iter().for_each(|&Side { b, finish, c }| match path {
            // SAFETY: the caller vouches for all of `c`.
            Path::FewRows => unsafe { T::few_rows(set, a, b, finish, c) },
            // SAFETY: as above.
            Path::Blocks => unsafe { portable::product(a, b, finish, c) },
        }),
    }
}

/// As [`product_along`], `a` being pairs of bf16, the last of a row padded with zero where their number is odd.
///
/// # Safety
/// As there, and the machine has [`InstructionSet::Avx512Bf16`].
#[cfg(target_arch = "x86_64")]
unsafe fn product_of_pairs(path: Path, a: View<'_, u32>, sides: &[Side<'_, bf16>]) {
    assert!(sides.iter().all(|side| a.columns() == side.b.rows().div_ceil(2)), "inner dimensions");
    if a.columns() == 0 {
        // SAFETY: the caller vouches for all of each result.
        return sides.iter().for_each(|side| unsafe { side.nothing(a.rows()) });
    }
    // SAFETY: the caller vouches for it.
    unsafe {
        match path {
            Path::FewRows => sides.iter().for_each(|&Side { b, finish, c }| {
                few_rows::of_pairs(a.of_halves(b.rows()), b, finish, c);
            }),
            Path::Blocks => blocks::product::<kernel::Avx512Bf16, bf16>(a, sides),
        }
    }
}

#[cfg(test)]
mod tests;
