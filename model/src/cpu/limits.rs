//! What the machine can do at most: arithmetic that stays in registers, and memory that is read once.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m512, __m512bh, _mm256_fmadd_ps, _mm256_set1_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_ps,
    _mm512_setzero_ps,
};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use profile::Limits;

use super::instructions::multiversion;
use super::memory::Memory;
use super::{Cpu, InstructionSet};

/// Accumulators that are on their way at a time: more than two units of four cycles need.
const CHAINS: usize = 12;
/// Rounds of all accumulators between two looks at the clock: under a millisecond.
const ROUNDS: usize = 1 << 16;
/// Looks at the clock. The best counts: others may want the processor too.
const SAMPLES: usize = 32;
/// What is read from memory at a time, far more than the caches hold.
const BYTES: usize = 256 << 20;

impl Cpu {
    /// Measures what as many threads can do as these kernels have, with their instructions. Takes about a quarter of a
    /// second.
    pub fn limits(&self) -> Limits {
        let (threads, set) = (self.threads(), self.set);
        let f32_flops = side_by_side(threads, || match set {
            // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 | InstructionSet::Avx512Bf16 => flops(32, || unsafe { avx512() }),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => flops(16, || unsafe { avx2() }),
            _ => flops(2 * LANES, portable),
        });
        let bf16_flops = match set {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            InstructionSet::Avx512Bf16 => side_by_side(threads, || flops(64, || unsafe { avx512_bf16() })),
            _ => f32_flops,
        };
        Limits { threads, f32_flops, bf16_flops, read_bytes: self.read_bandwidth() }
    }
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

/// Operations per second of a loop that does so many in each accumulator and round.
fn flops<T>(operations: usize, run: impl Fn() -> T) -> f64 {
    let sample = |_| {
        let began = Instant::now();
        black_box(run());
        began.elapsed().as_secs_f64()
    };
    (operations * CHAINS * ROUNDS) as f64 / (0..SAMPLES).map(sample).fold(f64::INFINITY, f64::min)
}

/// As many operations of one kind as fit, none of which waits for the one before.
macro_rules! rounds {
    ($operation:expr) => {{
        let mut sums = [(); CHAINS].map(|()| black_box($operation(None)));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = $operation(Some(*sum));
            }
        }
        sums
    }};
}

/// Multiply-adds of 16 lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512() -> [__m512; CHAINS] {
    let (factor, term) = (black_box(_mm512_set1_ps(0.999)), black_box(_mm512_set1_ps(1e-3)));
    rounds!(|sum: Option<__m512>| sum.map_or(term, |sum| _mm512_fmadd_ps(sum, factor, term)))
}

/// Multiply-adds of 8 lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2() -> [__m256; CHAINS] {
    let (factor, term) = (black_box(_mm256_set1_ps(0.999)), black_box(_mm256_set1_ps(1e-3)));
    rounds!(|sum: Option<__m256>| sum.map_or(term, |sum| _mm256_fmadd_ps(sum, factor, term)))
}

/// Dot products of 16 pairs of bf16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn avx512_bf16() -> [__m512; CHAINS] {
    // SAFETY: every bit pattern is a vector of bf16.
    let ones = unsafe { std::mem::transmute::<__m512, __m512bh>(_mm512_set1_ps(f32::from_bits(0x3f80_3f80))) };
    let (a, b) = (black_box(ones), black_box(ones));
    rounds!(|sum: Option<__m512>| sum.map_or(_mm512_setzero_ps(), |sum| _mm512_dpbf16_ps(sum, a, b)))
}

/// Lanes that any machine has instructions for.
const LANES: usize = 4;

/// Products and sums of whatever vectors the compiler may count on.
fn portable() -> [[f32; LANES]; CHAINS] {
    let (factor, term) = (black_box([0.999_f32; LANES]), black_box([1e-3_f32; LANES]));
    let next = |sum: [f32; LANES]| std::array::from_fn(|lane| sum[lane] * factor[lane] + term[lane]);
    rounds!(|sum: Option<[f32; LANES]>| sum.map_or(term, next))
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
}
