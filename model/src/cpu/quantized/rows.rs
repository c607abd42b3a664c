//! The left operand of a quantised product: rows in blocks of 8-bit numbers.

use std::sync::Mutex;

use super::super::instructions::multiversion;
use super::super::operand::Operand;
use super::{BLOCK, Cpu, Layout};

/// Rows in blocks; the last block of a row may be filled up with zeros.
pub(super) struct QuantizedRows {
    rows: usize,
    blocks: usize,
    /// By row and block.
    values: Vec<[i8; BLOCK]>,
    /// Of each block.
    scales: Vec<f32>,
    /// Of each part of a block that has a scale of its own in the weight, its numbers' sum times what the weight's
    /// numbers have too much: where a sum of products begins.
    starts: Vec<i32>,
    /// Of each block the sum of its values, by which the offsets of a weight are multiplied.
    sums: Vec<f32>,
}

/// Blocks of one row.
#[derive(Clone, Copy)]
pub(super) struct RowBlocks<'a> {
    /// Numbers.
    pub(super) values: &'a [[i8; BLOCK]],
    /// Scales.
    pub(super) scales: &'a [f32],
    /// Where the sums of products begin.
    pub(super) starts: &'a [i32],
    /// Sums of values.
    pub(super) sums: &'a [f32],
}

impl QuantizedRows {
    /// Quantises rows of so many columns for weights of a layout.
    pub(super) fn new(cpu: &Cpu, x: Operand<'_>, columns: usize, layout: Layout) -> Self {
        /// Rows of a part, which one thread quantises.
        const PART: usize = 16;
        let (rows, blocks) = (x.rows(), columns.div_ceil(BLOCK));
        let mut values = vec![[0; BLOCK]; rows * blocks];
        let (mut scales, mut sums) = (vec![0.0; rows * blocks], vec![0.0; rows * blocks]);
        let mut starts = vec![0; rows * blocks * layout.parts()];
        let size = (PART * blocks).max(1);
        let numbers = values.chunks_mut(size).zip(scales.chunks_mut(size));
        let parts = numbers.zip(sums.chunks_mut(size)).zip(starts.chunks_mut(size * layout.parts()));
        let parts: Vec<_> = parts.map(Mutex::new).collect();
        cpu.each(parts.len(), rows * columns, |part| {
            let mut place = parts[part].lock().expect("each part is taken once");
            let (((values, scales), sums), starts) = &mut *place;
            let numbers = values.chunks_mut(blocks).zip(scales.chunks_mut(blocks));
            let of_rows = numbers.zip(sums.chunks_mut(blocks)).zip(starts.chunks_mut(blocks * layout.parts()));
            let mut widened = Vec::new();
            for (row, (((values, scales), sums), starts)) in (part * PART..).zip(of_rows) {
                let x = x.row_in_f32(row, columns, &mut widened);
                quantize(cpu.set, x, layout, (values, scales), sums, starts);
            }
        });
        Self { rows, blocks, values, scales, starts, sums }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn row(&self, row: usize) -> RowBlocks<'_> {
        let range = row * self.blocks..(row + 1) * self.blocks;
        let parts = self.starts.len() / self.values.len().max(1);
        RowBlocks {
            values: &self.values[range.clone()],
            scales: &self.scales[range.clone()],
            starts: &self.starts[range.start * parts..range.end * parts],
            sums: &self.sums[range],
        }
    }
}

multiversion! {
    /// Quantises one row.
    fn quantize(
        x: &[f32],
        layout: Layout,
        numbers: (&mut [[i8; BLOCK]], &mut [f32]),
        sums: &mut [f32],
        starts: &mut [i32],
    ) {
        let (values, scales) = numbers;
        let blocks = values.iter_mut().zip(scales).zip(sums).zip(starts.chunks_mut(layout.parts())).zip(x.chunks(BLOCK));
        for ((((values, scale), sum), starts), x) in blocks {
            let mut block = [0.0; BLOCK];
            block[..x.len()].copy_from_slice(x);
            *scale = quantize_block(&block, values);
            let of_halves = [0, 1].map(|half| {
                values[half * BLOCK / 2..][..BLOCK / 2].iter().map(|value| i32::from(*value)).sum::<i32>()
            });
            let whole = of_halves[0] + of_halves[1];
            *sum = *scale * whole as f32;
            match starts {
                [start] => *start = -layout.excess() * whole,
                starts => starts.iter_mut().zip(of_halves).for_each(|(start, sum)| *start = -layout.excess() * sum),
            }
        }
    }
}

/// The nearest of −127 to 127 times the scale, which is returned. A block that is not finite has a scale that is not.
#[inline(always)]
fn quantize_block(x: &[f32; BLOCK], values: &mut [i8; BLOCK]) -> f32 {
    /// Adding it rounds to an integer, which is then found in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let largest = x.iter().fold(0.0f32, |largest, x| if x.abs() > largest { x.abs() } else { largest });
    // Not a number if one of them is not finite, else zero.
    let flaw = x.iter().fold(0.0f32, |sum, x| sum + 0.0 * x);
    // Of smaller ones the inverse is not finite, and nothing is lost.
    let inverse = if largest > 1e-30 { 127.0 / largest } else { 0.0 };
    for (value, x) in values.iter_mut().zip(x) {
        *value = (x * inverse + ROUND).to_bits() as i8;
    }
    largest / 127.0 + flaw
}
