//! Weights in blocks of 8- or 4-bit numbers: [`BlockFormat::Int8`] and [`BlockFormat::Int4`].
//!
//! A product widens them into a panel, forward and backward; or, for inference, what is multiplied with them is rounded
//! to blocks of 8-bit numbers, too, so that a block's product is a sum of integers, which is exact; the products of
//! blocks are then added in f32 in the order of the input. So every instruction set gives the same bits, and so does
//! every number of rows.
//!
//! Sixteen rows of a weight lie interleaved, a *group*: a register holds four numbers of each of them, and the lanes of
//! a sum are the sixteen outputs.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod blocks;
mod kernel;
mod portable;
mod rows;
#[cfg(test)]
mod tests;

use half::{bf16, f16};

use super::memory::Memory;
use super::plain::Plain;
use std::ops::Range;

use super::instructions::multiversion;
use super::operand::Operand;
use super::product::{BlockWeight, Element, Finish, Order, Target, ViewMut, WeightBlock};
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512Bf16};
use super::simd::{Floats, Portable};
use super::{Cpu, InstructionSet};
use crate::fingerprint;
use crate::weights::{BLOCK, BlockFormat, TensorType};
use rows::QuantizedRows;

/// Rows of a weight that lie interleaved.
const GROUP: usize = 16;
/// Rows of the left operand that a kernel takes at a time.
const TILE: usize = 8;

/// The type of a block's scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleType {
    /// Of blocks that are quantised here.
    Bf16,
    /// Of ggml's blocks.
    F16,
}

/// The bits of the scales of a block, one to a row.
type Scales = [u16; GROUP];

/// Bits of a quantised number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bits {
    /// −127 to 127.
    Eight,
    /// −8 to 7.
    Four,
}

impl Bits {
    /// Those of ggml's blocks of a type that have products of integers, if they are no more than a format's.
    pub(super) fn stored(tensor_type: TensorType, format: BlockFormat) -> Option<Self> {
        match (tensor_type, format) {
            (TensorType::Q8_0, BlockFormat::Int8) => Some(Self::Eight),
            (TensorType::Q4_0, BlockFormat::Int8 | BlockFormat::Int4) => Some(Self::Four),
            _ => None,
        }
    }

    /// Those of a format.
    fn of(format: BlockFormat) -> Self {
        match format {
            BlockFormat::Int8 => Self::Eight,
            BlockFormat::Int4 => Self::Four,
            BlockFormat::Q8_0 | BlockFormat::Q4_0 => unreachable!("{} has no products of integers", format.name()),
        }
    }

    /// Lines of a block of a group.
    const fn lines(self) -> usize {
        match self {
            Self::Eight => 8,
            Self::Four => 4,
        }
    }

    /// A byte of zeros.
    const fn zero(self) -> u8 {
        match self {
            Self::Eight => 0x80,
            Self::Four => 0x88,
        }
    }

    /// What is added to a number, so that what is stored is not negative.
    const fn offset(self) -> i32 {
        match self {
            Self::Eight => 128,
            Self::Four => 8,
        }
    }
}

/// 64 bytes of a group: four numbers of each row in 8 bits, or eight in 4 bits, the first four in the lower halves.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Default for Line {
    fn default() -> Self {
        Self([0; 64])
    }
}

impl Plain for Line {}
impl Plain for Scales {}

/// A weight `[out, in]` in blocks.
pub(super) struct Quantized {
    bits: Bits,
    out_features: usize,
    in_features: usize,
    /// By group, block of the input, and line.
    lines: Memory<Line>,
    scale_type: ScaleType,
    /// By group, block, and row of the group.
    scales: Memory<Scales>,
}

/// A block of a group.
#[derive(Clone, Copy)]
struct GroupBlock<'a> {
    lines: &'a [Line],
    scale_type: ScaleType,
    scales: &'a Scales,
}

/// The sums of a kernel: for each of up to [`TILE`] rows those of a group.
type Sums = [[f32; GROUP]; TILE];

impl Quantized {
    /// Blocks along the input; the last may be filled up with zeros.
    fn blocks(&self) -> usize {
        self.in_features.div_ceil(BLOCK)
    }

    fn groups(&self) -> usize {
        self.out_features.div_ceil(GROUP)
    }

    /// Block `index` of a group.
    fn block(&self, group: usize, index: usize) -> GroupBlock<'_> {
        let (at, lines) = (group * self.blocks() + index, self.bits.lines());
        let lines = &self.lines[at * lines..(at + 1) * lines];
        GroupBlock { lines, scale_type: self.scale_type, scales: &self.scales[at] }
    }

    /// The blocks of a group.
    fn group(&self, group: usize) -> impl Iterator<Item = GroupBlock<'_>> {
        let blocks = group * self.blocks()..(group + 1) * self.blocks();
        let (lines, scale_type) = (self.bits.lines(), self.scale_type);
        let lines = self.lines[blocks.start * lines..blocks.end * lines].chunks_exact(lines);
        lines.zip(&self.scales[blocks]).map(move |(lines, scales)| GroupBlock { lines, scale_type, scales })
    }

    /// Its format.
    pub(super) fn format(&self) -> BlockFormat {
        match (self.bits, self.scale_type) {
            (Bits::Eight, ScaleType::Bf16) => BlockFormat::Int8,
            (Bits::Four, ScaleType::Bf16) => BlockFormat::Int4,
            (Bits::Eight, ScaleType::F16) => BlockFormat::Q8_0,
            (Bits::Four, ScaleType::F16) => BlockFormat::Q4_0,
        }
    }
}

impl BlockWeight for Quantized {
    fn shape(&self) -> [usize; 2] {
        [self.out_features, self.in_features]
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.lines) + size_of_val(&*self.scales)
    }

    fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]) {
        let lane = row % GROUP;
        for (block, target) in self.group(row / GROUP).zip(target.chunks_mut(BLOCK)) {
            let scale = factor * block.scale(lane);
            for (index, target) in target.iter_mut().enumerate() {
                *target = scale * block.number(self.bits, lane, index) as f32;
            }
        }
    }

    fn fingerprint(&self) -> u64 {
        let of_lines = self.lines.iter().map(|line| fingerprint::of_bytes(&line.0));
        let parts: Vec<u64> = of_lines
            .chain(self.scales.iter().map(|scales| fingerprint::of_bf16(&scales.map(bf16::from_bits))))
            .collect();
        fingerprint::of_parts(&parts)
    }

    fn widen(&self, set: InstructionSet, part: WeightBlock, target: &mut [f32]) {
        let WeightBlock { rows, columns, order, stride } = part;
        for group in rows.start / GROUP..rows.end.div_ceil(GROUP) {
            let first_row = group * GROUP;
            let lanes = rows.start.max(first_row) - first_row..rows.end.min(first_row + GROUP) - first_row;
            for index in columns.start / BLOCK..columns.end.div_ceil(BLOCK) {
                let first_column = index * BLOCK;
                let within = columns.start.max(first_column) - first_column
                    ..columns.end.min(first_column + BLOCK) - first_column;
                let (row, column) = (first_row + lanes.start - rows.start, first_column + within.start - columns.start);
                let first = match order {
                    Order::Rows => row * stride + column,
                    Order::Columns => column * stride + row,
                };
                let part = (lanes.clone(), within, order);
                widen_block(set, self.bits, self.block(group, index), part, stride, &mut target[first..]);
            }
        }
    }
}

impl GroupBlock<'_> {
    /// The scale of a row.
    #[inline(always)]
    fn scale(self, lane: usize) -> f32 {
        match self.scale_type {
            ScaleType::Bf16 => bf16::from_bits(self.scales[lane]).widen(),
            ScaleType::F16 => f16::from_bits(self.scales[lane]).to_f32_const(),
        }
    }

    /// Its values: for each number of the block, those of the rows.
    #[inline(always)]
    fn widened(self, bits: Bits) -> [[f32; GROUP]; BLOCK] {
        let mut values = [[0.0; GROUP]; BLOCK];
        let scales: [f32; GROUP] = std::array::from_fn(|lane| self.scale(lane));
        for (line, values) in self.lines.iter().zip(values.chunks_exact_mut(BLOCK / bits.lines())) {
            let words: [u32; GROUP] = std::array::from_fn(|lane| {
                let bytes = &line.0[4 * lane..4 * lane + 4];
                u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
            });
            for (index, values) in values.iter_mut().enumerate() {
                let (shift, mask) = match bits {
                    Bits::Eight => (8 * index, 255),
                    Bits::Four => (8 * (index % 4) + 4 * (index / 4), 15),
                };
                for ((value, word), scale) in values.iter_mut().zip(words).zip(scales) {
                    let number = (word >> shift & mask).cast_signed() - bits.offset();
                    *value = scale * number as f32;
                }
            }
        }
        values
    }

    /// Number `index` of the block in one row of the group, without its scale.
    fn number(&self, bits: Bits, lane: usize, index: usize) -> i32 {
        let (line, shift) = match bits {
            Bits::Eight => (index / 4, 0),
            Bits::Four => (index / 8, 4 * (index / 4 % 2)),
        };
        let byte = self.lines[line].0[4 * lane + index % 4];
        let stored = match bits {
            Bits::Eight => byte,
            Bits::Four => byte >> shift & 15,
        };
        i32::from(stored) - bits.offset()
    }
}

multiversion! {
    /// Dequantises a part of a block of a group, some lanes and some numbers: number by number or row by row, `stride`
    /// apart.
    fn widen_block(
        bits: Bits,
        block: GroupBlock<'_>,
        part: (Range<usize>, Range<usize>, Order),
        stride: usize,
        target: &mut [f32],
    ) {
        let values = block.widened(bits);
        let (lanes, within, order) = part;
        match order {
            Order::Columns => {
                for (target, values) in target.chunks_mut(stride).zip(&values[within]) {
                    target[..lanes.len()].copy_from_slice(&values[lanes.clone()]);
                }
            }
            Order::Rows => {
                for (target, lane) in target.chunks_mut(stride).zip(lanes) {
                    target.iter_mut().zip(&values[within.clone()]).for_each(|(target, values)| *target = values[lane]);
                }
            }
        }
    }
}

impl Cpu {
    /// `c (+)= x · weightᵀ (+ bias)`, over the threads.
    pub(super) fn quantized_product(&self, x: Operand<'_>, weight: &Quantized, finish: Finish<'_>, c: ViewMut<'_>) {
        assert_eq!(c.shape(), (x.rows(), weight.out_features), "shape of a product");
        assert!(x.is_of(weight.in_features), "inner dimensions");
        let x = QuantizedRows::new(self, x, weight.in_features, weight.bits);
        let c = c.into_target();
        // Each part reads some hundreds of kilobytes of the weight, or works on it for as long.
        let groups_per_part = ((1 << 18) / (x.rows() * weight.in_features * GROUP).max(1)).max(1);
        let parts = weight.groups().div_ceil(groups_per_part);
        self.each(parts, x.rows() * weight.in_features * weight.out_features, |part| {
            let groups = part * groups_per_part..weight.groups().min((part + 1) * groups_per_part);
            for group in groups {
                // SAFETY: each group has its own columns.
                unsafe { group_product(self.set, &x, weight, group, finish, c) };
            }
        });
    }
}

/// The columns of a product that belong to a group.
///
/// # Safety
/// Nobody else may touch these columns of `c` meanwhile.
unsafe fn group_product(
    set: InstructionSet,
    x: &QuantizedRows,
    weight: &Quantized,
    group: usize,
    finish: Finish<'_>,
    c: Target<'_>,
) {
    let first = group * GROUP;
    let columns = first..weight.out_features.min(first + GROUP);
    for first_row in (0..x.rows()).step_by(TILE) {
        let rows = first_row..x.rows().min(first_row + TILE);
        let sums = tile(set, x, rows.clone(), weight, group);
        for (row, sums) in rows.zip(&sums) {
            // SAFETY: the caller vouches for these elements.
            finish.of_columns(columns.clone()).row(sums, unsafe { c.row(row, columns.clone()) });
        }
    }
}

/// The products of up to [`TILE`] rows with a group.
fn tile(set: InstructionSet, x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
    unsafe {
        match set {
            InstructionSet::Portable => kernel::tile::<Floats<Portable>>(x, rows, weight, group),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 | InstructionSet::Avx512 => kernel::tile::<Floats<Avx2>>(x, rows, weight, group),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Bf16 | InstructionSet::Amx | InstructionSet::AmxEmulated => {
                kernel::tile::<Avx512Bf16>(x, rows, weight, group)
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => {
                unreachable!("an instruction set of another architecture")
            }
        }
    }
}
