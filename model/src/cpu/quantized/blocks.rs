//! From a weight's values to blocks.
//!
//! A scale is rounded to bf16 before the numbers are chosen, so that rounding it costs nothing. In 8 bits the largest
//! number takes the scale up to the end of the range. In 4 bits that is seldom the best: of several scales around it
//! that with the least sum of squared errors is taken, which on normally distributed weights takes away a twentieth of
//! the error of GGUF's `q4_0`.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::bf16;

use super::super::instructions::multiversion;
use super::super::memory::Memory;
use super::super::product::Element;
use super::super::vector::sum;
use super::{BLOCK, Bits, Cpu, GROUP, Line, Quantized};
use crate::checkpoint::{CheckpointError, Rows};

/// What the largest number of a block of 4 bits may become: the end of the range, and less or more than it.
const LARGEST_OF_FOUR: [f32; 8] = [-8.0, -9.0, -8.5, -7.5, -7.0, 8.0, 7.5, 7.0];

impl Quantized {
    /// Quantises a weight, `[out, in]` row by row.
    pub(in crate::cpu) fn new(cpu: &Cpu, out_features: usize, in_features: usize, values: &[f32], bits: Bits) -> Self {
        let of_rows = |rows: Range<usize>, quantize: &mut dyn FnMut(&[f32])| {
            quantize(&values[rows.start * in_features..rows.end * in_features]);
            Ok::<_, Infallible>(())
        };
        let Ok(quantized) = Self::of_groups(cpu, out_features, in_features, bits, of_rows);
        quantized
    }

    /// Quantises a weight of these rows: each thread reads those of a group and quantises them while they are in its
    /// cache.
    pub(in crate::cpu) fn read(
        cpu: &Cpu,
        out_features: usize,
        in_features: usize,
        rows: &dyn Rows,
        bits: Bits,
    ) -> Result<Self, CheckpointError> {
        let rooms = Mutex::new(Vec::<Vec<f32>>::new());
        Self::of_groups(cpu, out_features, in_features, bits, |group, quantize| {
            let mut values = rooms.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
            values.resize(group.len() * in_features, 0.0);
            rows.read(group.start, &mut values)?;
            quantize(&values);
            rooms.lock().unwrap_or_else(PoisonError::into_inner).push(values);
            Ok(())
        })
    }

    /// Quantises groups of rows over the threads: `of_rows` hands on the values of some rows.
    fn of_groups<E: Send>(
        cpu: &Cpu,
        out_features: usize,
        in_features: usize,
        bits: Bits,
        of_rows: impl Fn(Range<usize>, &mut dyn FnMut(&[f32])) -> Result<(), E> + Sync + Send,
    ) -> Result<Self, E> {
        let mut quantized =
            Self { bits, out_features, in_features, lines: Memory::default(), scales: Memory::default() };
        let (blocks, groups) = (quantized.blocks(), quantized.groups());
        quantized.lines = cpu.weights.zeros(groups * blocks * bits.lines());
        quantized.scales = cpu.weights.zeros(groups * blocks);
        let lines = quantized.lines.chunks_mut((blocks * bits.lines()).max(1));
        let places: Vec<_> = lines.zip(quantized.scales.chunks_mut(blocks.max(1))).map(Mutex::new).collect();
        let failed = Mutex::new(None);
        cpu.each(places.len(), out_features * in_features, |group| {
            let mut place = places[group].lock().expect("each group is taken once");
            let (lines, scales) = &mut *place;
            let rows = group * GROUP..out_features.min((group + 1) * GROUP);
            let mut quantize = |values: &[f32]| quantize_group(cpu.set, bits, in_features, values, lines, scales);
            if let Err(error) = of_rows(rows, &mut quantize) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        drop(places);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(quantized),
        }
    }
}

multiversion! {
    /// Quantises up to sixteen rows of a weight. Of rows beyond the last all numbers are zero.
    fn quantize_group(bits: Bits, in_features: usize, values: &[f32], lines: &mut [Line], scales: &mut [[bf16; GROUP]]) {
        let zero = match bits {
            Bits::Eight => 0x80,
            Bits::Four => 0x88,
        };
        lines.fill(Line([zero; 64]));
        for (lane, row) in values.chunks_exact(in_features).enumerate() {
            let blocks = row.chunks(BLOCK).zip(lines.chunks_exact_mut(bits.lines())).zip(&mut *scales);
            for ((x, lines), scales) in blocks {
                let mut block = [0.0; BLOCK];
                block[..x.len()].copy_from_slice(x);
                let mut numbers = [0; BLOCK];
                scales[lane] = match bits {
                    Bits::Eight => eight_bits(&block, &mut numbers),
                    Bits::Four => four_bits(&block, &mut numbers),
                };
                store(bits, &numbers, lane, lines);
            }
        }
    }
}

/// Puts the numbers of one row where kernels expect them.
#[inline(always)]
fn store(bits: Bits, numbers: &[i8; BLOCK], lane: usize, lines: &mut [Line]) {
    let stored = |index: usize| (i32::from(numbers[index]) + bits.offset()) as u8;
    for (line, target) in lines.iter_mut().enumerate() {
        for (place, byte) in target.0[4 * lane..][..4].iter_mut().enumerate() {
            *byte = match bits {
                Bits::Eight => stored(4 * line + place),
                Bits::Four => stored(8 * line + place) | stored(8 * line + 4 + place) << 4,
            };
        }
    }
}

/// The number with the largest magnitude.
#[inline(always)]
fn largest(x: &[f32; BLOCK]) -> f32 {
    x.iter().fold(0.0f32, |largest, &x| if x.abs() > largest.abs() { x } else { largest })
}

/// The largest magnitude, as the bits of a float that is not negative: these are in the order of the floats, and
/// integers are compared side by side. That of a block with a number that is not finite is not.
#[inline(always)]
fn largest_magnitude(x: &[f32; BLOCK]) -> f32 {
    f32::from_bits(x.iter().fold(0, |largest, x| largest.max(x.abs().to_bits())))
}

/// The scale of a block that is so small that it is zero, or has a number that is not finite.
#[inline(always)]
fn degenerate(magnitude: f32) -> Option<bf16> {
    match magnitude {
        magnitude if !magnitude.is_finite() => Some(bf16::NAN),
        magnitude if magnitude < 1e-30 => Some(bf16::ZERO),
        _ => None,
    }
}

#[inline(always)]
fn eight_bits(x: &[f32; BLOCK], numbers: &mut [i8; BLOCK]) -> bf16 {
    let largest = largest_magnitude(x);
    if let Some(scale) = degenerate(largest) {
        return scale;
    }
    // Rounded up, or the largest number would lie beyond the range.
    let exact = largest / 127.0;
    let below = bf16::from_bits((exact.to_bits() >> 16) as u16);
    let scale = if below.widen() < exact { bf16::from_bits(below.to_bits() + 1) } else { below };
    numbers_of(x, scale, -127.0, 127.0, numbers);
    scale
}

#[inline(always)]
fn four_bits(x: &[f32; BLOCK], numbers: &mut [i8; BLOCK]) -> bf16 {
    if let Some(scale) = degenerate(largest_magnitude(x)) {
        return scale;
    }
    let largest = largest(x);
    let mut best = (f32::INFINITY, bf16::ZERO);
    for end in LARGEST_OF_FOUR {
        let mut candidate = [0; BLOCK];
        numbers_of(x, bf16::from_f32(largest / end), -8.0, 7.0, &mut candidate);
        let scale = bf16::from_f32(fitting_scale(x, &candidate));
        let error = |(x, number): (&f32, &i8)| x - f32::from(*number) * scale.widen();
        let sum = sum(BLOCK, |index| error((&x[index], &candidate[index])).powi(2));
        if sum < best.0 {
            best = (sum, scale);
            *numbers = candidate;
        }
    }
    best.1
}

/// The scale that leaves these numbers the least sum of squared errors.
#[inline(always)]
fn fitting_scale(x: &[f32; BLOCK], numbers: &[i8; BLOCK]) -> f32 {
    let number = |index: usize| f32::from(numbers[index]);
    sum(BLOCK, |index| x[index] * number(index)) / sum(BLOCK, |index| number(index) * number(index))
}

/// The nearest numbers in a range.
#[inline(always)]
fn numbers_of(x: &[f32; BLOCK], scale: bf16, least: f32, most: f32, numbers: &mut [i8; BLOCK]) {
    /// Adding it rounds to an integer, which is then found in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let inverse = 1.0 / scale.widen();
    for (number, x) in numbers.iter_mut().zip(x) {
        *number = ((x * inverse).clamp(least, most) + ROUND).to_bits() as i8;
    }
}
