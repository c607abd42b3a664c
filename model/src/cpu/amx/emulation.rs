//! The bits of the tile registers in plain code, for machines without them and for tests.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::{SIDE, Square, Strip, Strips, TILE, Tiles};
use crate::cpu::simd::{Avx512Bf16, Multiplier, Routine, Vector};

/// Tiles in plain code, on a machine with AVX-512, which products in tiles are packed and finished with.
pub(in crate::cpu) struct Emulated;

/// Rows of words.
pub(super) type Words = [[u32; SIDE]; SIDE];

/// `sums += left · right` as `tdpbf16ps` computes it.
///
/// Of each element, the products of the first bf16 of each word are summed in one chain of fused multiply-adds from +0
/// on, those of the second ones in another; then the two sums are added, and what comes of it to the element. Each
/// operation rounds to nearest even, reads denormals as zeros and makes zeros of denormal results. Where two that are
/// not numbers meet, the payload is not that of the instruction.
#[inline(always)]
pub(super) fn multiply(sums: &mut [[f32; SIDE]; SIDE], left: &Words, right: &Words) {
    let halves = |word: u32| [word << 16, word & 0xffff_0000].map(|bits| flushed(f32::from_bits(bits)));
    for (sums, left) in sums.iter_mut().zip(left) {
        let mut chains = [[0.0f32; SIDE]; 2];
        for (left, right) in left.iter().zip(right) {
            let left = halves(*left);
            for (column, right) in right.iter().enumerate() {
                for (half, right) in halves(*right).into_iter().enumerate() {
                    chains[half][column] = fused(left[half], right, chains[half][column]);
                }
            }
        }
        for (column, sum) in sums.iter_mut().enumerate() {
            *sum = flushed(flushed(*sum) + flushed(chains[0][column] + chains[1][column]));
        }
    }
}

/// Zero of its sign instead of a denormal.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// `a · b + c`, rounded once; zero of its sign where that, rounded to 24 bits with an exponent of any size, is below
/// the normal numbers.
#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    /// Halfway from the largest number of 24 bits below the normal ones to the smallest normal one: 2⁻¹²⁶ − 2⁻¹⁵¹.
    const HALFWAY: f64 = f32::MIN_POSITIVE as f64 - f32::MIN_POSITIVE as f64 / (1u64 << 25) as f64;
    let rounded = flushed(a.mul_add(b, c));
    // Among the denormal numbers there are fewer bits to round to, so that more is rounded up to a normal one.
    if rounded.abs() == f32::MIN_POSITIVE && (f64::from(a) * f64::from(b) + f64::from(c)).abs() < HALFWAY {
        return 0.0f32.copysign(rounded);
    }
    rounded
}

impl Tiles for Emulated {
    unsafe fn begin() {}

    unsafe fn end() {}

    unsafe fn square(square: &Square) {
        // SAFETY: the caller vouches for tiles, sums and machine.
        unsafe { Avx512Bf16::compiled(OfSquare(square)) }
    }

    unsafe fn strip(strip: &Strip) {
        // SAFETY: as there.
        unsafe { Avx512Bf16::compiled(OfStrip(strip)) }
    }
}

/// A square with the instructions of the machine, which has a fused multiply-add.
struct OfSquare<'a>(&'a Square);

impl Routine for OfSquare<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Square { left, right, rests, steps, sums: to, sums_row, go_on } = *self.0;
        for (row, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let line = |line: usize| to.wrapping_byte_add((row * SIDE + line) * sums_row).wrapping_add(column * SIDE);
            let mut sums = [[0.0; SIDE]; SIDE];
            // SAFETY: the caller vouches for tiles and sums; of no place an alignment is asked.
            unsafe {
                if go_on {
                    for (number, sums) in sums.iter_mut().enumerate() {
                        *sums = line(number).cast::<[f32; SIDE]>().read_unaligned();
                    }
                }
                let tile = |strips: Strips, number: usize, step: usize| -> Words {
                    read(strips.from(step).first.wrapping_byte_add(number * strips.next), strips.row)
                };
                for step in 0..steps {
                    let [left_tile, right_tile] = [tile(left, row, step), tile(right, column, step)];
                    if let Some([first, _]) = rests {
                        multiply(&mut sums, &tile(Strips { first, ..left }, row, step), &right_tile);
                    }
                    multiply(&mut sums, &left_tile, &right_tile);
                    if let Some([_, first]) = rests {
                        multiply(&mut sums, &left_tile, &tile(Strips { first, ..right }, column, step));
                    }
                }
                for (number, sums) in sums.iter().enumerate() {
                    line(number).cast::<[f32; SIDE]>().write_unaligned(*sums);
                }
            }
        }
    }
}

/// A strip, likewise.
struct OfStrip<'a>(&'a Strip);

impl Routine for OfStrip<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Strip { left, left_row, left_step, right, steps, ahead: _, sums: to, go_on } = *self.0;
        let to = to.cast::<[[f32; SIDE]; SIDE]>();
        // SAFETY: as for squares.
        unsafe {
            let mut sums = if go_on { to.read_unaligned() } else { [[0.0; SIDE]; SIDE] };
            for step in 0..steps {
                let left = read(left.wrapping_byte_add(step * left_step), left_row);
                multiply(&mut sums, &left, &right.wrapping_add(step * TILE).cast::<Words>().read_unaligned());
            }
            to.write_unaligned(sums);
        }
    }
}

/// The words of a tile, from a row to the next so many bytes.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn read(first: *const u32, row: usize) -> Words {
    // SAFETY: the caller vouches for it.
    std::array::from_fn(|number| unsafe {
        first.wrapping_byte_add(number * row).cast::<[u32; SIDE]>().read_unaligned()
    })
}
