//! Products of bytes in plain loops.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::kernel::Bytes;
use super::{BLOCK, GROUP, GroupBlock};
use crate::cpu::simd::{Floats, Portable, Vector};

impl Bytes for Floats<Portable> {
    type Numbers<'a> = GroupBlock<'a>;

    #[inline(always)]
    unsafe fn numbers<const EIGHT: bool>(block: GroupBlock<'_>) -> GroupBlock<'_> {
        block
    }

    #[inline(always)]
    unsafe fn products<const EIGHT: bool, const VECTORS: usize>(
        block: &GroupBlock<'_>,
        x: &[i8; BLOCK],
        start: i32,
    ) -> [Portable; VECTORS] {
        let mut sums = [start; GROUP];
        for (line, x) in block.lines.iter().zip(x.chunks_exact(if EIGHT { 4 } else { 8 })) {
            for (sum, bytes) in sums.iter_mut().zip(line.0.chunks_exact(4)) {
                for (place, byte) in bytes.iter().enumerate() {
                    *sum += if EIGHT {
                        i32::from(*byte) * i32::from(x[place])
                    } else {
                        i32::from(byte & 15) * i32::from(x[place]) + i32::from(byte >> 4) * i32::from(x[4 + place])
                    };
                }
            }
        }
        let sums = sums.map(|sum| sum as f32);
        // SAFETY: as many vectors as are a group.
        std::array::from_fn(|vector| unsafe { Portable::load(sums.as_ptr().add(vector * Portable::LANES)) })
    }
}
