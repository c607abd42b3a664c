//! Products of bytes in plain loops.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::kernel::Bytes;
use super::{BLOCK, GROUP, GroupBlock, Line, REGISTERS, WORD};
use crate::cpu::simd::{Portable, Routine, Vector};

/// The numbers of a block: where they lie, which are two to a byte if they are of four bits, or a byte each.
#[expect(clippy::large_enum_variant, reason = "it lies on the stack, for as long as a block is multiplied")]
pub(super) enum Numbers<'a> {
    Stored(&'a [Line]),
    Widened([Line; REGISTERS]),
}

impl<'a> Numbers<'a> {
    /// Of a block whose numbers have so many bits.
    #[inline(always)]
    pub(super) fn of<const BITS: usize>(block: GroupBlock<'a>) -> Self {
        match BITS {
            4 | 8 => Self::Stored(block.lines),
            _ => Self::Widened(std::array::from_fn(|register| {
                let mut line = Line::default();
                let bytes = line.0.as_chunks_mut().0.iter_mut().zip(block.words(BITS, register));
                bytes.for_each(|(bytes, word)| *bytes = word.to_le_bytes());
                line
            })),
        }
    }

    /// The lines of one of so many parts of the block.
    #[inline(always)]
    pub(super) fn part(&self, part: usize, parts: usize) -> &[Line] {
        let lines = match self {
            Self::Stored(lines) => lines,
            Self::Widened(lines) => &lines[..],
        };
        let size = lines.len() / parts;
        &lines[part * size..(part + 1) * size]
    }
}

impl Bytes for Portable {
    type Sums = Portable;
    type Numbers<'a> = Numbers<'a>;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for it.
        unsafe { <Self as Vector>::compiled(routine) }
    }

    #[inline(always)]
    unsafe fn numbers<const BITS: usize>(block: GroupBlock<'_>) -> Numbers<'_> {
        Numbers::of::<BITS>(block)
    }

    #[inline(always)]
    unsafe fn products<const BITS: usize, const PARTS: usize, const VECTORS: usize>(
        numbers: &Numbers<'_>,
        x: &[i8; BLOCK],
        starts: [i32; PARTS],
    ) -> [[Portable; VECTORS]; PARTS] {
        std::array::from_fn(|part| {
            let mut sums = [starts[part]; GROUP];
            let x = &x[part * BLOCK / PARTS..(part + 1) * BLOCK / PARTS];
            let x = x.chunks_exact(if BITS == 4 { 2 * WORD } else { WORD });
            for (line, x) in numbers.part(part, PARTS).iter().zip(x) {
                for (sum, bytes) in sums.iter_mut().zip(line.0.chunks_exact(WORD)) {
                    for (place, byte) in bytes.iter().enumerate() {
                        *sum += if BITS == 4 {
                            i32::from(byte & 15) * i32::from(x[place])
                                + i32::from(byte >> 4) * i32::from(x[WORD + place])
                        } else {
                            i32::from(*byte) * i32::from(x[place])
                        };
                    }
                }
            }
            let sums = sums.map(|sum| sum as f32);
            // SAFETY: as many vectors as are a group.
            std::array::from_fn(|vector| unsafe { Portable::load(sums.as_ptr().add(vector * Portable::LANES)) })
        })
    }

    #[inline(always)]
    unsafe fn integers(from: *const i8) -> Portable {
        // SAFETY: the caller vouches for as many as there are lanes.
        let integers: [f32; Portable::LANES] = std::array::from_fn(|lane| f32::from(unsafe { *from.add(lane) }));
        // SAFETY: as above.
        unsafe { Portable::load(integers.as_ptr()) }
    }
}
