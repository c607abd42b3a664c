//! What a kernel computes and moves, and the machine's limits that this is compared with.

use serde::{Deserialize, Serialize};

/// The arithmetic that bounds a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    /// Fused multiply-adds of f32.
    #[default]
    F32,
    /// Dot products of bf16 pairs, summed in f32.
    Bf16,
}

/// What one call of a kernel computes and moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Floating-point operations; a multiply-add is two.
    pub flops: u64,
    /// Bytes that must be read and written at least: each operand and each result once.
    pub bytes: u64,
    /// Which of the machine's rates bounds `flops`.
    pub rate: Rate,
    /// Inner and outer extent of a product, which tell its rows of a table apart; zeros where there is none.
    pub shape: [u32; 2],
}

impl Work {
    /// `[rows, inner] · [inner, outer]` in f32, every operand read once and the result written once.
    pub fn product(rows: usize, inner: usize, outer: usize) -> Self {
        let (rows, inner, outer) = (rows as u64, inner as u64, outer as u64);
        Self {
            flops: 2 * rows * inner * outer,
            bytes: 4 * (rows * inner + inner * outer + rows * outer),
            rate: Rate::F32,
            shape: [inner as u32, outer as u32],
        }
    }

    /// As [`Work::product`], with a frozen weight of this many bytes.
    #[must_use]
    pub fn of_weight(rows: usize, inner: usize, outer: usize, weight_bytes: usize, rate: Rate) -> Self {
        let activations = 4 * (rows * inner + rows * outer);
        Self { bytes: (activations + weight_bytes) as u64, rate, ..Self::product(rows, inner, outer) }
    }

    /// Reads and writes so many f32 values.
    pub fn values(values: usize) -> Self {
        Self::bytes(4 * values)
    }

    /// Reads and writes so many bytes.
    pub fn bytes(bytes: usize) -> Self {
        Self { bytes: bytes as u64, ..Self::default() }
    }

    /// With so many floating-point operations.
    #[must_use]
    pub fn computing(self, flops: usize) -> Self {
        Self { flops: flops as u64, ..self }
    }
}

/// What the machine can do at most with the threads that the kernels have, measured in the process that is profiled.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// The threads.
    pub threads: usize,
    /// Operations per second in f32.
    pub f32_flops: f64,
    /// Operations per second with products of bf16.
    pub bf16_flops: f64,
    /// Bytes per second read from memory.
    pub read_bytes: f64,
}

impl Limits {
    /// The shortest time in which work can be done: that of its arithmetic, or that of its memory.
    pub fn seconds(&self, flops: u64, bytes: u64, rate: Rate) -> f64 {
        let peak = match rate {
            Rate::F32 => self.f32_flops,
            Rate::Bf16 => self.bf16_flops,
        };
        (flops as f64 / peak).max(bytes as f64 / self.read_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_arithmetic_and_memory_is_the_limit() {
        let limits = Limits { threads: 2, f32_flops: 100.0, bf16_flops: 200.0, read_bytes: 10.0 };
        assert_eq!(limits.seconds(1000, 10, Rate::F32), 10.0);
        assert_eq!(limits.seconds(1000, 10, Rate::Bf16), 5.0);
        assert_eq!(limits.seconds(1000, 1000, Rate::Bf16), 100.0);
    }

    #[test]
    fn a_product_counts_each_operand_once() {
        let work = Work::product(2, 3, 5);
        assert_eq!((work.flops, work.bytes, work.shape), (60, 4 * (6 + 15 + 10), [3, 5]));
        let frozen = Work::of_weight(2, 3, 5, 30, Rate::Bf16);
        assert_eq!((frozen.flops, frozen.bytes, frozen.rate), (60, 4 * 16 + 30, Rate::Bf16));
    }
}
