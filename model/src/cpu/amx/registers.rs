//! The tile registers of the machine, by inline assembly: their intrinsics are not stable.

#![allow(unsafe_code, reason = "kernels: instructions without an intrinsic")]

use std::arch::asm;

use super::{SIDE, Square, Strip, TILE, Tiles};

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

/// The sums that are gone on with, or zeros, into the first four registers; `lower` becomes the place of the lower
/// half.
macro_rules! load_sums {
    () => {
        concat!(
            "test {lower:e}, {lower:e}\n",
            // Sixteen rows further down; the flags stay.
            "lea {lower}, [{sums} + {sums_row} * 8]\n",
            "lea {lower}, [{lower} + {sums_row} * 8]\n",
            "jnz 2f\n",
            "tilezero tmm0\n",
            "tilezero tmm1\n",
            "tilezero tmm2\n",
            "tilezero tmm3\n",
            "jmp 3f\n",
            "2:\n",
            "tileloadd tmm0, [{sums} + {sums_row}]\n",
            "tileloadd tmm1, [{sums} + {sums_row} + 64]\n",
            "tileloadd tmm2, [{lower} + {sums_row}]\n",
            "tileloadd tmm3, [{lower} + {sums_row} + 64]\n",
            "3:\n",
        )
    };
}

/// The sums out of them.
macro_rules! store_sums {
    () => {
        concat!(
            "tilestored [{sums} + {sums_row}], tmm0\n",
            "tilestored [{sums} + {sums_row} + 64], tmm1\n",
            "tilestored [{lower} + {sums_row}], tmm2\n",
            "tilestored [{lower} + {sums_row} + 64], tmm3\n",
        )
    };
}

/// One block of assembly from the first sum to the last: nothing keeps the contents of tile registers from one block to
/// the next. The sums are tmm0 to 3, by rows; the left tiles 4 and 5, the right ones 6 and 7. `tileloaddt1` keeps what
/// it loads out of the first-level cache.
macro_rules! square_of {
    ($square:ident) => {{
        let Square { left, right, rests: _, steps, sums, sums_row, go_on } = *$square;
        asm!(
            load_sums!(),
            "test {steps}, {steps}",
            "jz 5f",
            ".p2align 4",
            "4:",
            // The second register of an address is the distance of rows.
            "tileloadd tmm4, [{left} + {left_row}]",
            "tileloaddt1 tmm6, [{right} + {right_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloaddt1 tmm7, [{next_right} + {right_row}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{next_left} + {left_row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {left}, {left_step}", "add {next_left}, {left_step}",
            "add {right}, {right_step}", "add {next_right}, {right_step}",
            "dec {steps}",
            "jnz 4b",
            "5:",
            store_sums!(),
            left = inout(reg) left.first => _,
            next_left = inout(reg) left.first.wrapping_byte_add(left.next) => _,
            left_row = in(reg) left.row,
            left_step = in(reg) left.step,
            right = inout(reg) right.first => _,
            next_right = inout(reg) right.first.wrapping_byte_add(right.next) => _,
            right_row = in(reg) right.row,
            right_step = in(reg) right.step,
            steps = inout(reg) steps => _,
            sums = in(reg) sums,
            sums_row = in(reg) sums_row,
            lower = inout(reg) u64::from(go_on) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            // Memory is read and written and the flags change, which is what is assumed without an option.
            options(nostack),
        );
    }};
}

/// Distances that the loop of a square with rests reads from memory: there are not as many registers.
#[repr(C)]
struct Distances {
    left_rest: usize,
    right_rest: usize,
    left_step: usize,
    right_step: usize,
}

/// As [`square_of`], of operands with rests: eight tiles are loaded for twelve products.
macro_rules! split_square_of {
    ($square:ident, $rests:ident) => {{
        let Square { left, right, rests: _, steps, sums, sums_row, go_on } = *$square;
        let [left_rest, right_rest] = $rests;
        let distances = Distances {
            left_rest: left_rest.addr().wrapping_sub(left.first.addr()),
            right_rest: right_rest.addr().wrapping_sub(right.first.addr()),
            left_step: left.step,
            right_step: right.step,
        };
        asm!(
            load_sums!(),
            "test {steps}, {steps}",
            "jz 5f",
            ".p2align 4",
            "4:",
            // Left rests.
            "mov {rest}, [{distances}]", "add {rest}, {left}",
            "tileloadd tmm4, [{rest} + {left_row}]",
            "tileloaddt1 tmm6, [{right} + {right_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloaddt1 tmm7, [{next_right} + {right_row}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "mov {rest}, [{distances}]", "add {rest}, {next_left}",
            "tileloadd tmm5, [{rest} + {left_row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // Both values.
            "tileloadd tmm4, [{left} + {left_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{next_left} + {left_row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // Right rests.
            "mov {rest}, [{distances} + 8]", "add {rest}, {right}",
            "tileloaddt1 tmm6, [{rest} + {right_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "mov {rest}, [{distances} + 8]", "add {rest}, {next_right}",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloaddt1 tmm7, [{rest} + {right_row}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {left}, [{distances} + 16]", "add {next_left}, [{distances} + 16]",
            "add {right}, [{distances} + 24]", "add {next_right}, [{distances} + 24]",
            "dec {steps}",
            "jnz 4b",
            "5:",
            store_sums!(),
            left = inout(reg) left.first => _,
            next_left = inout(reg) left.first.wrapping_byte_add(left.next) => _,
            left_row = in(reg) left.row,
            right = inout(reg) right.first => _,
            next_right = inout(reg) right.first.wrapping_byte_add(right.next) => _,
            right_row = in(reg) right.row,
            distances = in(reg) &raw const distances,
            rest = out(reg) _,
            steps = inout(reg) steps => _,
            sums = in(reg) sums,
            sums_row = in(reg) sums_row,
            lower = inout(reg) u64::from(go_on) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            // As above.
            options(nostack),
        );
    }};
}

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

    #[inline]
    unsafe fn square(square: &Square) {
        // SAFETY: the caller vouches for tiles and sums, and that the thread is ready.
        unsafe {
            match square.rests {
                None => square_of!(square),
                Some(rests) => split_square_of!(square, rests),
            }
        }
    }

    #[inline]
    unsafe fn strip(strip: &Strip) {
        let Strip { left, left_row, left_step, right, steps, ahead, sums, go_on } = *strip;
        // SAFETY: the caller vouches for tiles and sums, and that the thread is ready; asking for memory reads none.
        unsafe {
            asm!(
                "tilezero tmm0",
                "test {go_on:e}, {go_on:e}",
                "jz 2f",
                "tileloadd tmm0, [{sums} + {packed_row}]",
                "2:",
                "test {steps}, {steps}",
                "jz 5f",
                ".p2align 4",
                "4:",
                "tileloadd tmm1, [{left} + {left_row}]",
                // Into the second-level cache.
                ".rept {lines}", "prefetcht1 [{ahead}]", "add {ahead}, {line}", ".endr",
                "tileloadd tmm2, [{right} + {packed_row}]",
                "tdpbf16ps tmm0, tmm1, tmm2",
                "add {left}, {left_step}",
                "add {right}, {packed_step}",
                "dec {steps}",
                "jnz 4b",
                "5:",
                "tilestored [{sums} + {packed_row}], tmm0",
                lines = const SIDE,
                line = const SIDE * size_of::<u32>(),
                packed_step = const TILE * size_of::<u32>(),
                packed_row = in(reg) SIDE * size_of::<u32>(),
                left = inout(reg) left => _,
                left_row = in(reg) left_row,
                left_step = in(reg) left_step,
                right = inout(reg) right => _,
                steps = inout(reg) steps => _,
                ahead = inout(reg) ahead => _,
                sums = in(reg) sums,
                go_on = in(reg) u64::from(go_on),
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                // As above.
                options(nostack),
            );
        }
    }
}
