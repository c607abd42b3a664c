//! The tile registers of the machine, by inline assembly: their intrinsics are not stable.

#![allow(unsafe_code, reason = "kernels: instructions without an intrinsic")]

use std::arch::asm;

use super::{SIDE, Square, Tiles};

/// The tile registers.
pub(in crate::cpu) struct Registers;

/// What `ldtilecfg` reads: which palette, and of each tile register the bytes of a row and the rows.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight registers whole.
static WHOLE: Configuration = {
    let (mut row_bytes, mut rows, mut tile) = ([0; 16], [0; 16], 0);
    while tile < 8 {
        (row_bytes[tile], rows[tile]) = (64, SIDE as u8);
        tile += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

impl Tiles for Registers {
    unsafe fn begin() {
        // SAFETY: the caller vouches for the permission; the instruction reads 64 bytes, which this is, and makes the
        // registers zero, which are named, though nothing that the compiler generates uses them.
        unsafe {
            asm!(
                "ldtilecfg [{}]", in(reg) &raw const WHOLE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    unsafe fn end() {
        // SAFETY: the caller vouches for the permission.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }

    /// One block of assembly from the first sum to the last: nothing keeps the contents of tile registers from one
    /// block to the next. The sums are tmm0 to 3, by rows; the left tiles 4 and 5, the right ones 6 and 7.
    #[inline]
    unsafe fn square(square: &Square) {
        /// Bytes from one row of the sums to the next.
        const SUMS: usize = 2 * SIDE * size_of::<f32>();
        let Square { left, left_stride, right, right_stride, steps, sums, go_on } = *square;
        // SAFETY: the caller vouches for tiles and sums, and that the thread is ready.
        unsafe {
            asm!(
                "test {go_on:e}, {go_on:e}",
                "jnz 2f",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "jmp 3f",
                "2:",
                "tileloadd tmm0, [{upper} + {sums_stride}]", "tileloadd tmm1, [{upper} + {sums_stride} + 64]",
                "tileloadd tmm2, [{lower} + {sums_stride}]", "tileloadd tmm3, [{lower} + {sums_stride} + 64]",
                "3:",
                "test {steps}, {steps}",
                "jz 5f",
                ".p2align 4",
                "4:",
                // The second register of the address is the distance of rows: 64, a tile being stored row behind row.
                // The left tiles are read again for the next square, the right ones are not for a while: the hint keeps
                // them out of the first-level cache, where they would displace the left ones.
                "tileloadd tmm4, [{left} + {row}]",
                "tileloaddt1 tmm6, [{right} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloaddt1 tmm7, [{next_right} + {row}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{next_left} + {row}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, 1024", "add {next_left}, 1024", "add {right}, 1024", "add {next_right}, 1024",
                "dec {steps}",
                "jnz 4b",
                "5:",
                "tilestored [{upper} + {sums_stride}], tmm0", "tilestored [{upper} + {sums_stride} + 64], tmm1",
                "tilestored [{lower} + {sums_stride}], tmm2", "tilestored [{lower} + {sums_stride} + 64], tmm3",
                left = inout(reg) left => _,
                next_left = inout(reg) left.wrapping_add(left_stride) => _,
                right = inout(reg) right => _,
                next_right = inout(reg) right.wrapping_add(right_stride) => _,
                steps = inout(reg) steps => _,
                upper = in(reg) sums,
                lower = in(reg) sums.wrapping_add(SIDE * 2 * SIDE),
                sums_stride = in(reg) SUMS,
                row = in(reg) 64usize,
                go_on = in(reg) u32::from(go_on),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                // Memory is read and written and the flags change, which is what is assumed without an option.
                options(nostack),
            );
        }
    }
}
