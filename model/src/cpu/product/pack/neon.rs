//! Packing for NEON.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::super::kernel::Tile;
use super::super::{InstructionSet, PairsRight, Right, squares};
use super::{Pack, pack_floats, pack_words};
use crate::cpu::simd::{Floats, Neon, NeonBf16, Vector};

impl<R: Right> Pack<R> for Floats<Neon> {
    unsafe fn pack(b: R, inner: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: the caller vouches for it.
        unsafe { pack_floats::<Self, R>(InstructionSet::Neon, b, inner, columns, panel) }
    }

    fn in_place(b: R, inner: &Range<usize>, columns: &Range<usize>) -> Option<(*const f32, usize)> {
        if columns.len().is_multiple_of(Neon::LANES) { b.in_place(inner, columns) } else { None }
    }
}

impl<R: PairsRight> Pack<R> for NeonBf16 {
    const STEPS: usize = squares::STEPS;

    unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, u32>) {
        // SAFETY: the caller vouches for it.
        unsafe { squares::tile(rows, vectors, tile) }
    }

    unsafe fn pack(b: R, inner: Range<usize>, columns: Range<usize>, panel: *mut u32) {
        // SAFETY: the caller vouches for it.
        unsafe {
            let (steps, width) = (inner.len(), columns.len().next_multiple_of(Neon::LANES));
            pack_words::<Self, R>(InstructionSet::NeonBf16, b, inner, columns, panel);
            squares::interleave(panel, steps, width);
        }
    }
}
