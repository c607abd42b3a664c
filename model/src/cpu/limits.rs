//! What the machine can do at most: arithmetic that stays in registers, and memory that is read once.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::Barrier;
use std::time::Instant;

use profile::Limits;

#[cfg(target_arch = "x86_64")]
use super::amx::{self, SIDE, SUMS_ROW, Square, Strips, TILE, Tiles};
use super::instructions::multiversion;
use super::memory::Memory;
#[cfg(target_arch = "x86_64")]
use super::product::with_words;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512, Avx512Bf16};
use super::simd::{Floats, Multiplier, Portable, Routine, Vector};
#[cfg(target_arch = "aarch64")]
use super::simd::{Neon, NeonBf16};
use super::{Cpu, InstructionSet, Rates};

/// Accumulators that are on their way at a time: more than two units of four cycles need.
const CHAINS: usize = 12;
/// Rounds of all accumulators between two looks at the clock: some tens of microseconds, in which others seldom want
/// the processor too.
const ROUNDS: usize = 1 << 12;
/// Looks at the clock, of which the best counts.
const SAMPLES: usize = 512;
/// A value, and twice in a pair, that sums of so many products of stay finite.
const WORD: u32 = 0x3c00_3c00;
/// What is read from memory at a time, far more than the caches hold.
const BYTES: usize = 256 << 20;

impl Cpu {
    /// Measures what as many threads can do as these kernels have, with their instructions. Takes about a quarter of a
    /// second.
    pub fn limits(&self) -> Limits {
        let (threads, set) = (self.threads(), self.set);
        // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
        let f32_flops = side_by_side(threads, || unsafe {
            match set {
                #[cfg(target_arch = "x86_64")]
                set if set == InstructionSet::Avx512 || set.multiplies_pairs() => flops::<Floats<Avx512>>(),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => flops::<Floats<Avx2>>(),
                #[cfg(target_arch = "aarch64")]
                InstructionSet::Neon | InstructionSet::NeonDot | InstructionSet::NeonBf16 => flops::<Floats<Neon>>(),
                _ => flops::<Floats<Portable>>(),
            }
        });
        let bf16_flops = match set {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above, and the set is chosen where the process may use tiles.
            InstructionSet::Amx => side_by_side(threads, || unsafe { tile_flops::<amx::Registers>() }),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            set if set.multiplies_pairs() => side_by_side(threads, || unsafe { flops::<Avx512Bf16>() }),
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            InstructionSet::NeonBf16 => side_by_side(threads, || unsafe { square_flops() }),
            _ => f32_flops,
        };
        Limits { threads, f32_flops, bf16_flops, read_bytes: self.read_bandwidth() }
    }
}

impl Rates {
    /// Measures what one thread of this machine reaches, in some ten milliseconds.
    pub(super) fn measure() -> Self {
        #[cfg(target_arch = "x86_64")]
        if InstructionSet::Avx512Bf16.is_available() {
            let tiles = match amx::permission() {
                // SAFETY: the process has the permission.
                Ok(()) => unsafe { tile_flops::<amx::Registers>() },
                Err(_) => 0.0,
            };
            // SAFETY: the machine has both sets.
            let [pairs, widened] = unsafe { [flops::<Avx512Bf16>(), flops::<Floats<Avx512>>()] };
            let [pairs, tiles, widened] = [pairs, tiles, widened].map(|rate| rate / 1e9);
            return Self { pairs, tiles, widened };
        }
        #[cfg(target_arch = "aarch64")]
        if InstructionSet::NeonBf16.is_available() {
            // SAFETY: the machine has both sets.
            let [pairs, widened] = unsafe { [square_flops(), flops::<Floats<Neon>>()] };
            return Self { pairs: pairs / 1e9, tiles: 0.0, widened: widened / 1e9 };
        }
        Self::default()
    }
}

/// What the processor says of itself: its name, family, model and stepping, and the instructions that are chosen among.
pub(super) fn processor() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        let leaf = |leaf: u32| if __cpuid(leaf & 0x8000_0000).eax >= leaf { Some(__cpuid(leaf)) } else { None };
        let brand = (0x8000_0002..=0x8000_0004).filter_map(leaf).flat_map(|l| [l.eax, l.ebx, l.ecx, l.edx]);
        let brand: Vec<u8> = brand.flat_map(u32::to_le_bytes).take_while(|byte| *byte != 0).collect();
        let signature = leaf(1).map_or(0, |l| l.eax);
        let features = [0, 1].map(|of| {
            leaf(7).map_or([0; 4], |_| {
                let l = __cpuid_count(7, of);
                [l.eax, l.ebx, l.ecx, l.edx]
            })
        });
        let tiles = amx::permission().is_ok();
        format!("{} {signature:x} {features:x?} tiles: {tiles}", String::from_utf8_lossy(&brand).trim())
    }
    #[cfg(target_arch = "aarch64")]
    {
        // What identifies it is read by the system, whose first processor stands for all.
        let register = "/sys/devices/system/cpu/cpu0/regs/identification/midr_el1";
        let register = std::fs::read_to_string(register).unwrap_or_default();
        format!("aarch64 {} {}", register.trim(), InstructionSet::detect())
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::env::consts::ARCH.to_owned()
}

/// The sum of what the threads reach when they all run.
fn side_by_side(threads: usize, measure: impl Fn() -> f64 + Sync) -> f64 {
    let begin = Barrier::new(threads);
    std::thread::scope(|scope| {
        let measured = || {
            begin.wait();
            measure()
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(measured)).collect();
        running.into_iter().map(|thread| thread.join().expect("a loop of arithmetic does not panic")).sum()
    })
}

/// Operations per second of one thread that multiplies and adds in registers.
///
/// # Safety
/// The machine has the instructions.
unsafe fn flops<M: Multiplier>() -> f64 {
    let sample = |_| {
        let began = Instant::now();
        // SAFETY: the caller vouches for the instructions.
        black_box(unsafe { M::compiled(Rounds::<M>(PhantomData)) });
        began.elapsed().as_secs_f64()
    };
    let operations = 2 * M::VALUES * M::LANES * CHAINS * ROUNDS;
    operations as f64 / (0..SAMPLES).map(sample).fold(f64::INFINITY, f64::min)
}

/// Operations per second of one thread that multiplies bf16 in registers, in squares as large products are.
///
/// # Safety
/// The machine has the instructions.
#[cfg(target_arch = "aarch64")]
unsafe fn square_flops() -> f64 {
    /// Products of a square: four values of two rows and two columns.
    const PRODUCTS: usize = 16;
    let sample = |_| {
        let began = Instant::now();
        // SAFETY: the caller vouches for the instructions.
        black_box(unsafe { NeonBf16::compiled(Squares) });
        began.elapsed().as_secs_f64()
    };
    (2 * PRODUCTS * CHAINS * ROUNDS) as f64 / (0..SAMPLES).map(sample).fold(f64::INFINITY, f64::min)
}

/// As [`Rounds`], of squares.
#[cfg(target_arch = "aarch64")]
struct Squares;

#[cfg(target_arch = "aarch64")]
impl Routine for Squares {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f32 {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let (a, b) = (black_box(WORD), black_box(WORD));
            let [a, b] = [&a, &b].map(|word| NeonBf16::splat(word));
            let mut sums = [(); CHAINS].map(|()| black_box(Neon::splat(1e-3)));
            for _ in 0..ROUNDS {
                for sums in &mut sums {
                    *sums = NeonBf16::multiply_add_square(a, b, *sums);
                }
            }
            sums.into_iter().map(Vector::sum).sum()
        }
    }
}

/// Operations per second of one thread in tiles that stay in the first-level cache.
///
/// # Safety
/// The process has the permission to use tiles.
#[cfg(target_arch = "x86_64")]
unsafe fn tile_flops<T: Tiles>() -> f64 {
    /// Tiles along the inner dimension, and squares between two looks at the clock.
    const STEPS: usize = 8;
    const SQUARES: usize = 100;
    // Zeros would be faster: what is multiplied takes power.
    let word = |word: usize| 0x3f9a_bf63 ^ (word as u32 & 0x7f) << 9;
    with_words(4 * STEPS * TILE + 4 * TILE, |words| {
        // SAFETY: the buffer has room for the tiles, and for the sums behind them.
        let (right, sums) = unsafe {
            (0..4 * STEPS * TILE).for_each(|at| words.add(at).write(word(at)));
            (words.add(2 * STEPS * TILE), words.add(4 * STEPS * TILE))
        };
        let square = Square {
            left: Strips::packed(words, STEPS * TILE),
            right: Strips::packed(right, STEPS * TILE),
            rests: None,
            steps: STEPS,
            sums: sums.cast(),
            sums_row: SUMS_ROW,
            go_on: false,
        };
        let sample = |_| {
            let began = Instant::now();
            // SAFETY: there are so many tiles and sums, and the caller vouches for the permission.
            unsafe {
                T::begin();
                (0..SQUARES).for_each(|_| T::square(&square));
                T::end();
            }
            began.elapsed().as_secs_f64()
        };
        let operations = 2 * SQUARES * 4 * STEPS * TILE * 2 * SIDE;
        operations as f64 / (0..SAMPLES).map(sample).fold(f64::INFINITY, f64::min)
    })
}

/// As many multiply-adds as fit, none of which waits for the one before.
struct Rounds<M>(PhantomData<M>);

impl<M: Multiplier> Routine for Rounds<M> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f32 {
        // SAFETY: the caller vouches for the instructions; a word is of 32 bits.
        unsafe {
            let (a, b) = (black_box(WORD), black_box(WORD));
            let [a, b] = [&a, &b].map(|word| M::splat(std::ptr::from_ref(word).cast()));
            let mut sums = [(); CHAINS].map(|()| black_box(M::Sums::splat(1e-3)));
            for _ in 0..ROUNDS {
                for sums in &mut sums {
                    *sums = M::multiply_add(a, b, *sums);
                }
            }
            sums.into_iter().map(Vector::sum).sum()
        }
    }
}

impl Cpu {
    /// Bytes a second that as many threads as these kernels have read together from memory that lies as weights do, far
    /// more of it than the caches hold: the best of a few passes.
    pub fn read_bandwidth(&self) -> f64 {
        let mut memory = Memory::<f32>::zeros(BYTES / size_of::<f32>());
        memory.fill(1.0);
        let part = memory.len().div_ceil(self.threads());
        let pass = |_| {
            let began = Instant::now();
            std::thread::scope(|scope| {
                for part in memory.chunks(part) {
                    scope.spawn(move || black_box(sum(self.set, part)));
                }
            });
            BYTES as f64 / began.elapsed().as_secs_f64()
        };
        (0..5).map(pass).fold(0.0, f64::max)
    }
}

multiversion! {
    /// A sum in as many lanes as keep several loads on their way.
    fn sum(values: &[f32]) -> f32 {
        let mut lanes = [0.0; 64];
        for chunk in values.chunks_exact(lanes.len()) {
            lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += *value);
        }
        lanes.into_iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Compute;

    #[test]
    fn every_set_has_limits() {
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let Limits { f32_flops, bf16_flops, read_bytes, .. } =
                Cpu::with_instructions(1, Compute::Bf16, set).unwrap().limits();
            for rate in [f32_flops, bf16_flops, read_bytes] {
                assert!(rate.is_finite() && rate > 1e6, "{} {rate}", set.name());
            }
        }
    }

    #[test]
    fn rates_are_of_what_the_machine_has() {
        let Rates { pairs, tiles, widened } = Rates::measure();
        let has = InstructionSet::detect().multiplies_pairs();
        assert_eq!((pairs > 0.1, widened > 0.1), (has, has), "{pairs} {widened}");
        assert_eq!(tiles > 0.1, InstructionSet::Amx.is_available(), "{tiles}");
        assert!(!processor().is_empty() && processor() == processor());
    }
}
