//! The left operand of a quantised product: rows in blocks of 8-bit numbers.

use std::sync::Mutex;

use super::super::instructions::multiversion;
use super::super::operand::Operand;
use super::{BLOCK, Cpu, Layout};

/// Rows in blocks; the last block of a row may be filled up with zeros.
pub(super) struct QuantizedRows {
    rows: usize,
    /// Blocks of a row.
    blocks: usize,
    /// By row and block.
    values: Vec<RowBlock>,
}

/// A block of a row: all that a kernel reads of it side by side.
#[derive(Clone, Copy, Default)]
pub(super) struct RowBlock {
    /// Numbers.
    pub(super) numbers: [i8; BLOCK],
    pub(super) scale: f32,
    /// The sum of the values, by which the offsets of a weight are multiplied.
    pub(super) sum: f32,
    /// Of each part of the block that has a scale of its own in the weight, its numbers' sum times what the weight's
    /// numbers have too much: where a sum of products begins.
    pub(super) starts: [i32; 2],
}

impl QuantizedRows {
    /// Quantises rows of so many columns for weights of a layout.
    pub(super) fn new(cpu: &Cpu, x: Operand<'_>, columns: usize, layout: Layout) -> Self {
        /// Rows of a part, which one thread quantises.
        const PART: usize = 16;
        let (rows, blocks) = (x.rows(), columns.div_ceil(BLOCK));
        let mut values = vec![RowBlock::default(); rows * blocks];
        let parts: Vec<_> = values.chunks_mut((PART * blocks).max(1)).map(Mutex::new).collect();
        cpu.each(parts.len(), rows * columns, |part| {
            let mut values = parts[part].lock().expect("each part is taken once");
            let mut widened = Vec::new();
            for (row, values) in (part * PART..).zip(values.chunks_mut(blocks)) {
                quantize(cpu.set, x.row_in_f32(row, columns, &mut widened), layout, values);
            }
        });
        Self { rows, blocks, values }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn row(&self, row: usize) -> &[RowBlock] {
        &self.values[row * self.blocks..(row + 1) * self.blocks]
    }
}

multiversion! {
    /// Quantises one row.
    fn quantize(x: &[f32], layout: Layout, blocks: &mut [RowBlock]) {
        for (target, x) in blocks.iter_mut().zip(x.chunks(BLOCK)) {
            let mut block = [0.0; BLOCK];
            block[..x.len()].copy_from_slice(x);
            target.scale = quantize_block(&block, &mut target.numbers);
            let halves = [0, 1].map(|half| {
                let numbers = &target.numbers[half * (BLOCK / 2)..][..BLOCK / 2];
                numbers.iter().map(|number| i32::from(*number)).sum::<i32>()
            });
            let whole = halves[0] + halves[1];
            target.sum = target.scale * whole as f32;
            let of_parts = if layout.parts() == 2 { halves } else { [whole, 0] };
            target.starts = of_parts.map(|sum| -layout.excess() * sum);
        }
    }
}

/// The nearest of −127 to 127 times the scale, which is returned. A block that is not finite has a scale that is not.
#[inline(always)]
fn quantize_block(x: &[f32; BLOCK], values: &mut [i8; BLOCK]) -> f32 {
    /// Adding it rounds to an integer, which is then found in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// Values that are looked at together: as many as lie in a vector.
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [0.0f32; LANES];
    for x in x.as_chunks::<LANES>().0 {
        lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane = larger(*lane, x.abs()));
    }
    let largest = lanes.into_iter().fold(0.0, larger);
    // Not a number if one of them is not finite, else zero.
    let are_finite = x.iter().fold(true, |are_finite, x| are_finite & x.is_finite());
    let flaw = if are_finite { 0.0 } else { x.iter().fold(0.0f32, |sum, x| sum + 0.0 * x) };
    // Of smaller ones the inverse is not finite, and nothing is lost.
    let inverse = if largest > 1e-30 { 127.0 / largest } else { 0.0 };
    for (value, x) in values.iter_mut().zip(x) {
        *value = (x * inverse + ROUND).to_bits() as i8;
    }
    largest / 127.0 + flaw
}
