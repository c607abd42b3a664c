//! Products of one to four rows with the bits that tiles give, by vectors: where a weight comes from memory and there
//! is little to do with it, they wait less for it than tiles do.
//!
//! A tile sums, for each element, the products of the first values of 16 pairs and those of the second ones in two
//! chains of fused multiply-adds, and adds both to what was summed before. Here the lanes are 16 rows of the weight,
//! whose pairs are exchanged with them by shuffles.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_and_si512, _mm512_castsi512_ps, _mm512_maskz_loadu_epi16, _mm512_set1_epi32,
    _mm512_setzero_ps, _mm512_slli_epi32,
};

use half::bf16;

use super::super::blocks::{blocks_of, with_words};
use super::super::{Element, Finish, Target, View};
use super::in_tiles::VALUES;
use crate::cpu::amx::SIDE;
use crate::cpu::simd::{Avx512, Avx512Bf16, Multiplier, Routine, Vector, first, prefetch, prefetch_far, transposed};

/// Rows that it is worth for.
pub(super) const ROWS: usize = 4;
/// Rows of the weight whose sums are finished together.
const BLOCK: usize = 4 * SIDE;
/// How far ahead of its use a line is asked for in each row, in bytes: from the second-level cache into the first.
const AHEAD: usize = 128;
/// Bytes of a line.
const LINE: usize = 64;

/// `c (+)= scale · a · b (+ bias)` of up to [`ROWS`] rows, the rows of `a` and the columns of `b` lying contiguously.
///
/// # Safety
/// The machine has [`Avx512Bf16`]'s instructions, and nobody else may touch these elements of `c` meanwhile.
pub(super) unsafe fn product(a: View<'_, bf16>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
    assert!(a.columns() == b.rows() && b.row_stride() == 1, "columns that lie contiguously");
    let (weight, padded) = (b.transposed(), b.rows().next_multiple_of(VALUES));
    with_words(ROWS * padded, |widened| {
        // SAFETY: the buffer has as many words.
        let widened = unsafe { std::slice::from_raw_parts_mut(widened.cast::<f32>(), a.rows() * padded) };
        for (row, widened) in widened.chunks_exact_mut(padded.max(1)).enumerate() {
            let (values, padding) = widened.split_at_mut(a.columns());
            values.iter_mut().zip(a.row(row)).for_each(|(to, value)| *to = value.widen());
            padding.fill(0.0);
        }
        for columns in blocks_of(b.columns(), BLOCK) {
            let weight = weight.row_range(columns.clone());
            let mut sums = [[0.0; BLOCK]; ROWS];
            // SAFETY: the caller vouches for the machine, and the rows are those of the operands.
            without_denormals(|| unsafe {
                match a.rows() {
                    1 => Avx512Bf16::compiled(Sums::<1> { weight, widened, padded, sums: &mut sums }),
                    2 => Avx512Bf16::compiled(Sums::<2> { weight, widened, padded, sums: &mut sums }),
                    3 => Avx512Bf16::compiled(Sums::<3> { weight, widened, padded, sums: &mut sums }),
                    ROWS => Avx512Bf16::compiled(Sums::<ROWS> { weight, widened, padded, sums: &mut sums }),
                    rows => unreachable!("{rows} rows"),
                }
            });
            for (row, sums) in sums[..a.rows()].iter().enumerate() {
                // SAFETY: the caller vouches for these elements.
                let target = unsafe { c.row(row, columns.clone()) };
                finish.of_columns(columns.clone()).row(&sums[..columns.len()], target);
            }
        }
    });
}

/// Runs a function for which denormal numbers are zeros, read and written, as they are for tiles whatever the control
/// register of vectors says.
fn without_denormals(run: impl FnOnce()) {
    /// Bits of the register: results become zeros, and operands are read as zeros.
    const FLUSH: u32 = 1 << 15 | 1 << 6;
    struct Restore(u32);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: what the register was.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const self.0, options(nostack, preserves_flags)) };
        }
    }
    let mut before = 0u32;
    // SAFETY: only arithmetic that the function calls runs before the register is restored: kernels, which are compiled
    // apart, as this is without their instructions. To a compiler memory may change in both blocks, so that no operand
    // of theirs, all of which are loaded, is computed with outside of them.
    unsafe {
        asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack, preserves_flags));
        let _restore = Restore(before);
        let flushing = before | FLUSH;
        asm!("ldmxcsr [{}]", in(reg) &raw const flushing, options(nostack, preserves_flags));
        run();
    }
}

/// The sums of some rows of the weight with `R` others, which are widened and filled up with zeros.
struct Sums<'a, const R: usize> {
    weight: View<'a, bf16>,
    widened: &'a [f32],
    padded: usize,
    sums: &'a mut [[f32; BLOCK]; ROWS],
}

impl<const R: usize> Routine for Sums<'_, R> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let inner = self.weight.columns();
        for rows in blocks_of(self.weight.rows(), SIDE) {
            let lines: [*const bf16; SIDE] = std::array::from_fn(|lane| {
                // Lanes beyond the last row repeat it, and nobody reads them.
                self.weight.row((rows.start + lane).min(rows.end - 1)).as_ptr()
            });
            // SAFETY: the caller vouches for the machine; lines have `inner` values, rows that are widened as many as
            // fill tiles, and blocks of sums whole vectors.
            unsafe {
                let next = lines[0].wrapping_add(SIDE * self.weight.row_stride());
                let mut sums = [Avx512::splat(0.0); R];
                for tile in (0..inner).step_by(VALUES) {
                    let count = inner - tile;
                    // In a loop of this function: what a function of the library calls is compiled without the
                    // instructions.
                    let mut words = [_mm512_setzero_ps(); SIDE];
                    // From memory the next rows are asked for, all bytes in the order in which they lie: the machine
                    // does not follow sixteen rows at once by itself.
                    let asked = tile / VALUES * SIDE * LINE;
                    for line in 0..SIDE {
                        prefetch_far(next.wrapping_byte_add(asked + line * LINE));
                    }
                    for (words, line) in words.iter_mut().zip(lines) {
                        prefetch(line.wrapping_add(tile).wrapping_byte_add(AHEAD));
                        *words = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first(count), line.add(tile).cast()));
                    }
                    add_tile(&mut sums, transposed(words), self.widened.as_ptr().add(tile), self.padded);
                }
                for (to, sums) in self.sums.iter_mut().zip(sums) {
                    sums.store(to.as_mut_ptr().add(rows.start));
                }
            }
        }
    }
}

/// Adds the products of a tile: words with the row of each lane, and `R` rows of as many values, `stride` apart.
///
/// # Safety
/// The machine has the instructions, and so many values can be read.
#[inline(always)]
unsafe fn add_tile<const R: usize>(sums: &mut [Avx512; R], words: [__m512; SIDE], x: *const f32, stride: usize) {
    // SAFETY: the caller vouches for it; vectors of as many bits are the same bits.
    unsafe {
        let second_half = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
        let mut chains = [[Avx512::of(_mm512_setzero_ps()); 2]; R];
        for (pair, words) in words.into_iter().enumerate() {
            let bits = std::mem::transmute::<__m512, __m512i>(words);
            let first_half = Avx512::of(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)));
            let halves = [first_half, Avx512::of(_mm512_castsi512_ps(_mm512_and_si512(bits, second_half)))];
            for (row, chains) in chains.iter_mut().enumerate() {
                for (half, chain) in chains.iter_mut().enumerate() {
                    let x = Avx512::splat(*x.add(row * stride + 2 * pair + half));
                    *chain = x.mul_add(halves[half], *chain);
                }
            }
        }
        for (sum, [first, second]) in sums.iter_mut().zip(chains) {
            *sum = sum.add(first.add(second));
        }
    }
}
