//! Vectors of f32 behind one trait, for kernels that are written once and compiled for each instruction set.
//!
//! Making a vector is unsafe: only where the machine has its instructions may one be made. With one at hand the rest of
//! arithmetic is safe. A kernel is a [`Routine`]: always inlined, into a function with the `#[target_feature]`s of its
//! vectors ([`Vector::compiled`]), so that each operation becomes its one instruction. The features of an instruction
//! set stand there and nowhere else.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_bf16;
mod portable;
mod products;

use std::ops::Range;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512, transposed};
#[cfg(target_arch = "x86_64")]
pub(super) use avx512_bf16::{Avx512Bf16, as_words, first};
#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
#[cfg(target_arch = "aarch64")]
pub(super) use neon_bf16::NeonBf16;
#[cfg(all(test, target_arch = "aarch64"))]
pub(super) use neon_bf16::tests::pair as neon_pair;
pub(super) use portable::Portable;
pub(super) use products::{Floats, Loads, Multiplier};

/// Code that is written once and compiled with the instructions of each set.
pub(crate) trait Routine {
    /// What it computes.
    type Output;

    /// Runs it with vectors of some type. Implementations are `#[inline(always)]`: what is not inlined into
    /// [`Vector::compiled`] is compiled without the instructions.
    ///
    /// # Safety
    /// The machine has the instructions of the vectors; and what the routine itself asks for.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}

/// Asks for the cache line at a place, which need not be ours, to lie in the second cache: of more lines at once than
/// the first keeps track of.
#[inline(always)]
pub(super) fn prefetch_far<T>(place: *const T) {
    // SAFETY: a prefetch of any address does no harm, and every machine of the architecture has it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Asks for the cache line at a place, which need not be ours.
#[inline(always)]
pub(super) fn prefetch<T>(place: *const T) {
    // SAFETY: a prefetch of any address does no harm, and every machine of the architecture has it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(place.cast());
    }
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) place, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = place;
}

/// Asks for the cache line at a place, which need not be ours, to write it.
#[inline(always)]
pub(super) fn prefetch_to_write<T>(place: *const T) {
    // SAFETY: as above.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(place.cast());
    }
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) place, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = place;
}

/// Some f32 side by side.
pub(crate) trait Vector: Copy {
    /// How many.
    const LANES: usize;
    /// Rows of a tile of sums that its registers hold.
    const TILE_ROWS: usize;
    /// Vectors in a row of such a tile.
    const TILE_VECTORS: usize;

    /// Runs a routine with vectors of this type, compiled with their instructions.
    ///
    /// # Safety
    /// As [`Vector::splat`] and [`Routine::run`].
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output;

    /// The same value in each lane.
    ///
    /// # Safety
    /// The machine has the instructions of this type.
    unsafe fn splat(value: f32) -> Self;

    /// Values that lie side by side.
    ///
    /// # Safety
    /// As [`Vector::splat`], and all of them can be read.
    unsafe fn load(from: *const f32) -> Self;

    /// The first `count` of them, zero in the other lanes.
    ///
    /// # Safety
    /// As [`Vector::splat`], and so many can be read.
    unsafe fn load_first(from: *const f32, count: usize) -> Self;

    /// Values of bf16 that lie side by side, widened.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load_bf16(from: *const bf16) -> Self;

    /// Values of f16 that lie side by side, widened.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load_f16(from: *const f16) -> Self;

    /// Writes all lanes.
    ///
    /// # Safety
    /// All of them can be written.
    unsafe fn store(self, to: *mut f32);

    /// Writes the first `count` lanes.
    ///
    /// # Safety
    /// So many can be written.
    unsafe fn store_first(self, to: *mut f32, count: usize);

    /// `self + other`
    fn add(self, other: Self) -> Self;
    /// `self - other`
    fn sub(self, other: Self) -> Self;
    /// `self · other`
    fn mul(self, other: Self) -> Self;
    /// `self / other`
    fn div(self, other: Self) -> Self;
    /// `self · factor + addend`, rounded once where the machine can.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The sum of all lanes: halves of the vector added, and halves of that.
    fn sum(self) -> f32;
    /// The larger of the two in each lane; `other` where one is not a number.
    fn max(self, other: Self) -> Self;
    /// `self` in some lanes, `other` in the rest.
    fn keep(self, lanes: Range<usize>, other: Self) -> Self;
    /// Whether some lane is not the same number as in `other`.
    fn differs(self, other: Self) -> bool;
    /// `2` to the power of each lane, to about one unit in the last place; zero where the result would be below 2⁻¹²⁶.
    fn exp2(self) -> Self;

    /// Of sixteen values those that codes name, which lie two to a byte, the first in its high half.
    ///
    /// # Safety
    /// As [`Vector::splat`]; there are codes for all lanes.
    #[inline(always)]
    unsafe fn look_up(values: &[f32; 16], codes: *const u8) -> Self {
        let mut found = [0.0; 16];
        // SAFETY: the caller vouches for the codes; no vector has more lanes.
        unsafe {
            for (at, pair) in found.as_chunks_mut::<2>().0[..Self::LANES / 2].iter_mut().enumerate() {
                let byte = codes.add(at).read();
                *pair = [values[usize::from(byte >> 4)], values[usize::from(byte & 15)]];
            }
            Self::load(found.as_ptr())
        }
    }

    /// Turns up to [`Vector::LANES`] rows into columns: element `j` of row `i` goes to `to[j · stride + i]`, bit by
    /// bit. Lanes without a row become zero.
    ///
    /// # Safety
    /// As [`Vector::splat`]; each row has `columns` values, and `to` room for as many rows of `LANES`.
    #[inline(always)]
    unsafe fn transpose(rows: &[*const f32], columns: usize, to: *mut f32, stride: usize) {
        for column in 0..columns {
            for lane in 0..Self::LANES {
                // SAFETY: the caller vouches for both.
                unsafe {
                    let value = rows.get(lane).map_or(0.0, |row| *row.add(column));
                    *to.add(column * stride + lane) = value;
                }
            }
        }
    }
}

/// As many values as the widest vector has lanes: the first `count` at a place, then zeros.
///
/// # Safety
/// So many can be read, and are no more than that.
#[inline(always)]
pub(super) unsafe fn first_values<T: Copy + Default>(from: *const T, count: usize) -> [T; 16] {
    let mut values = [T::default(); 16];
    // SAFETY: the caller vouches for so many values.
    unsafe { std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count) };
    values
}

/// Coefficients of `(2ʳ - 1) / r` for `|r| ≤ ½`, from that of `r⁴` down: minimax, with a relative error of 2ʳ below
/// 10⁻⁷.
#[expect(clippy::approx_constant, reason = "the last one is near ln 2, not equal to it")]
const EXP2: [f32; 5] = [1.326_472_7e-3, 9.671_513e-3, 5.550_733_6e-2, 2.402_224_2e-1, 6.931_47e-1];

/// `2ʳ` for `|r| ≤ ½`, given the coefficients in all lanes.
#[inline(always)]
fn exp2_of_fraction<V: Vector>(r: V, one: V, [c5, c4, c3, c2, c1]: [V; 5]) -> V {
    let p = c5.mul_add(r, c4).mul_add(r, c3).mul_add(r, c2).mul_add(r, c1);
    p.mul_add(r, one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::InstructionSet;

    /// Runs a test with the vectors of each set that the machine has.
    fn with_each_vector<T: Routine<Output = ()> + Copy>(test: T) {
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            // SAFETY: the machine has the set, and a test asks for nothing else.
            unsafe { set.run(test) };
        }
    }

    unsafe fn lanes_of<V: Vector>(vector: V) -> Vec<f32> {
        let mut lanes = vec![0.0; V::LANES];
        // SAFETY: there is room for all lanes.
        unsafe { vector.store(lanes.as_mut_ptr()) };
        lanes
    }

    #[derive(Clone, Copy)]
    struct Powers;

    impl Routine for Powers {
        type Output = ();

        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            // SAFETY: the caller vouches for the instructions.
            let power = |x: f32| unsafe { lanes_of(V::splat(x).exp2())[0] };
            for step in -12_599..12_749 {
                let x = step as f32 * 0.01;
                let (found, exact) = (f64::from(power(x)), f64::from(x).exp2());
                assert!((found - exact).abs() <= 2e-7 * exact, "2^{x} = {found}, not {exact}");
            }
            assert_eq!((power(-1e30), power(-200.0), power(0.0)), (0.0, 0.0, 1.0));
            assert!(power(f32::NAN).is_nan() && power(200.0).is_infinite());
        }
    }

    #[test]
    fn powers_are_right_to_about_a_unit_in_the_last_place() {
        with_each_vector(Powers);
    }

    #[derive(Clone, Copy)]
    struct Transposes;

    impl Routine for Transposes {
        type Output = ();

        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            for (rows, columns) in [(1, 1), (V::LANES, V::LANES), (V::LANES - 1, 2 * V::LANES + 3), (3, 17)] {
                let values: Vec<f32> = (0..rows * columns).map(|index| index as f32).collect();
                let lines: Vec<_> = values.chunks_exact(columns).map(<[f32]>::as_ptr).collect();
                let stride = V::LANES + 2;
                let mut found = vec![-1.0; columns * stride];
                // SAFETY: the caller vouches for the instructions, and there is room.
                unsafe { V::transpose(&lines, columns, found.as_mut_ptr(), stride) };
                for (column, line) in found.chunks_exact(stride).enumerate() {
                    for (lane, &value) in line.iter().enumerate() {
                        let expected = match lane {
                            _ if lane < rows => values[lane * columns + column],
                            _ if lane < V::LANES => 0.0,
                            _ => -1.0,
                        };
                        assert_eq!(value, expected, "{rows}x{columns}: row {lane}, column {column}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_become_columns() {
        with_each_vector(Transposes);
    }

    #[derive(Clone, Copy)]
    struct Parts;

    impl Routine for Parts {
        type Output = ();

        #[inline(always)]
        unsafe fn run<V: Vector>(self) {
            let values: Vec<f32> = (1..=V::LANES).map(|value| value as f32).collect();
            for count in 0..=V::LANES {
                // SAFETY: the caller vouches for the instructions; exactly so many values are there to read and to
                // write.
                unsafe {
                    let some = V::load_first(values[V::LANES - count..].as_ptr(), count);
                    let mut expected = values[V::LANES - count..].to_vec();
                    expected.resize(V::LANES, 0.0);
                    assert_eq!(lanes_of(some), expected);
                    let mut written = vec![-1.0; V::LANES];
                    V::load(values.as_ptr()).store_first(written.as_mut_ptr(), count);
                    assert!(written[..count] == values[..count] && written[count..].iter().all(|&value| value == -1.0));
                    let kept = lanes_of(V::load(values.as_ptr()).keep(count / 2..count, V::splat(-2.0)));
                    let inside = |lane: usize| (count / 2..count).contains(&lane);
                    assert!(
                        kept.iter().enumerate().all(|(lane, &x)| x == if inside(lane) { values[lane] } else { -2.0 })
                    );
                }
            }
        }
    }

    #[test]
    fn parts_of_a_vector_are_those_asked_for() {
        with_each_vector(Parts);
    }
}
