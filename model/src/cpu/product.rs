//! Matrix products of any orientation, over all or a part of the result, summed in f32.
//!
//! Each element is summed over the inner dimension in one order whatever the partition over threads, so that the result does
//! not depend on their number. The right operand may lie in a narrower type than f32: it is widened on the way, or, where the
//! machine multiplies pairs of bf16, packed as it is.

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
pub(super) use finish::{Finish, Into};
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
    unsafe fn blocks(set: InstructionSet, a: View<'_>, b: View<'_, Self>, finish: Finish<'_>, c: Target<'_>);
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
            unsafe fn blocks(set: InstructionSet, a: View<'_>, b: View<'_, Self>, finish: Finish<'_>, c: Target<'_>) {
                // SAFETY: the caller vouches for it.
                unsafe {
                    match set {
                        InstructionSet::Avx512 | InstructionSet::Avx512Bf16 => {
                            blocks::product::<kernel::Avx512, $type>(a, b, finish, c);
                        }
                        InstructionSet::Avx2 => blocks::product::<kernel::Avx2, $type>(a, b, finish, c),
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
enum Path {
    /// Row by row, the right operand read in place.
    FewRows,
    /// In blocks, the right operand packed.
    Blocks,
}

impl Path {
    /// The one for these operands.
    fn of<A: Copy, B: Copy>(a: View<'_, A>, b: View<'_, B>) -> Self {
        let in_place = a.rows() <= FEW_ROWS && b.row_stride() == 1 && a.column_stride() == 1;
        if in_place { Self::FewRows } else { Self::Blocks }
    }
}

/// `c (+)= scale · a · b (+ bias)` by the calling thread.
///
/// # Safety
/// Nobody else may read or write the `a.rows × b.columns` elements of `c` meanwhile.
unsafe fn product_along<T: Element>(
    path: Path,
    set: InstructionSet,
    a: View<'_>,
    b: View<'_, T>,
    finish: Finish<'_>,
    c: Target<'_>,
) {
    assert_eq!(a.columns(), b.rows(), "inner dimensions");
    if a.columns() == 0 {
        // SAFETY: the caller vouches for all of `c`.
        return unsafe { finish.nothing(a.rows(), b.columns(), c) };
    }
    match (path, set) {
        // SAFETY: the caller vouches for all of `c`.
        (Path::FewRows, _) => unsafe { T::few_rows(set, a, b, finish, c) },
        // SAFETY: the caller vouches for all of `c`.
        (Path::Blocks, InstructionSet::Portable) => unsafe { portable::product(a, b, finish, c) },
        // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
        #[cfg(target_arch = "x86_64")]
        (Path::Blocks, _) => unsafe { T::blocks(set, a, b, finish, c) },
        #[cfg(not(target_arch = "x86_64"))]
        (Path::Blocks, _) => unreachable!("an instruction set of another architecture"),
    }
}

/// `c (+)= a · b (+ bias)` by the calling thread, `a` being pairs of bf16, the last of a row padded with zero where their number is odd.
///
/// # Safety
/// The machine has [`InstructionSet::Avx512Bf16`], and nobody else may read or write the `a.rows × b.columns` elements of `c`.
#[cfg(target_arch = "x86_64")]
unsafe fn product_of_pairs(path: Path, a: View<'_, u32>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
    assert_eq!(a.columns(), b.rows().div_ceil(2), "inner dimensions");
    if a.columns() == 0 {
        // SAFETY: the caller vouches for all of `c`.
        return unsafe { finish.nothing(a.rows(), b.columns(), c) };
    }
    // SAFETY: the caller vouches for it.
    unsafe {
        match path {
            Path::FewRows => few_rows::of_pairs(a.of_halves(b.rows()), b, finish, c),
            Path::Blocks => blocks::product::<kernel::Avx512Bf16, bf16>(a, b, finish, c),
        }
    }
}

#[cfg(test)]
mod tests;
