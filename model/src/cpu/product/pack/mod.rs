//! Panels: columns of a right operand, laid out as kernels read them.
//!
//! An operand is a weight or a tensor as it lies in memory, seen in either direction: its rows lie contiguously, which
//! are then copied, or its columns do, which are then transposed. Packing reads nothing outside of the operand.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;

use std::ops::Range;

use super::kernel::{self, Tile};
use super::{InstructionSet, PairsRight, Right};
use crate::cpu::simd::Multiplier;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Floats};

/// A kernel that can pack operands of a type.
pub(super) trait Pack<R>: Multiplier {
    /// Steps along the inner dimension that tiles take at once: a panel has them whole.
    const STEPS: usize = 1;

    /// A tile of so many rows and vectors.
    ///
    /// # Safety
    /// As for [`kernel::tile`]; the panel is one of this kernel.
    unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, Self::Word>) {
        // SAFETY: the caller vouches for it.
        unsafe { kernel::tile::<Self>(rows, vectors, tile) }
    }

    /// Copies words `inner` of some columns to `[inner][vectors · LANES]`, in as many vectors as they need; columns
    /// beyond the last are zero.
    ///
    /// # Safety
    /// The machine has the instructions, and the panel may be written.
    unsafe fn pack(b: R, inner: Range<usize>, columns: Range<usize>, panel: *mut Self::Word);

    /// Where words of some columns begin that lie as a panel does but for the distance of their steps, and that
    /// distance.
    fn in_place(_b: R, _inner: &Range<usize>, _columns: &Range<usize>) -> Option<(*const Self::Word, usize)> {
        None
    }
}

#[cfg(target_arch = "x86_64")]
impl<R: Right> Pack<R> for Floats<Avx2> {
    unsafe fn pack(b: R, inner: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: the caller vouches for it.
        unsafe { pack_floats::<Self, R>(InstructionSet::Avx2, b, inner, columns, panel) }
    }
}

/// [`Pack::pack`] of a kernel whose words are f32.
///
/// # Safety
/// As there.
unsafe fn pack_floats<K: Multiplier, R: Right>(
    set: InstructionSet,
    b: R,
    inner: Range<usize>,
    columns: Range<usize>,
    panel: *mut f32,
) {
    let width = columns.len().next_multiple_of(K::LANES);
    // SAFETY: the caller vouches for the panel and the instructions.
    unsafe { b.pack(set, inner.clone(), columns, width, std::slice::from_raw_parts_mut(panel, inner.len() * width)) }
}

/// [`Pack::pack`] of a kernel whose words are pairs of bf16.
///
/// # Safety
/// As there.
unsafe fn pack_words<K: Multiplier, R: PairsRight>(
    set: InstructionSet,
    b: R,
    inner: Range<usize>,
    columns: Range<usize>,
    panel: *mut u32,
) {
    let width = columns.len().next_multiple_of(K::LANES);
    // SAFETY: the caller vouches for the panel and the instructions.
    unsafe {
        b.pack_pairs(set, inner.clone(), columns, width, std::slice::from_raw_parts_mut(panel, inner.len() * width));
    }
}
