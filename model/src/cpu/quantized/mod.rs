//! Weights in blocks of numbers of 4 to 8 bits: [`BlockFormat::Int8`] and [`BlockFormat::Int4`], and what GGUF files
//! store in blocks that have products of integers ([`Layout`]).
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
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod rows;
mod scaling;
#[cfg(test)]
mod tests;

use half::{bf16, f16};

use super::memory::Memory;
use super::plain::Plain;
use std::ops::Range;

use super::instructions::multiversion;
use super::operand::Operand;
use super::product::{BlockWeight, Element, Finish, Order, Target, ViewMut, WeightBlock};
#[cfg(target_arch = "aarch64")]
use super::simd::Neon;
use super::simd::Portable;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512Bf16};
use super::{Cpu, InstructionSet};
use crate::fingerprint;
use crate::weights::{BLOCK, BlockFormat, TensorType};
use rows::QuantizedRows;

/// Rows of a weight that lie interleaved.
const GROUP: usize = 16;
/// Rows of the left operand that a kernel takes at a time.
const TILE: usize = 8;

/// Blocks that share their [`Quantized::wholes`].
const SHARING: usize = 8;
/// Numbers of a register, each in 8 bits, for a row; a block has as many as there are registers.
const WORD: usize = 4;
/// Registers of a block of a group, a byte for a number.
const REGISTERS: usize = BLOCK / WORD;

/// How the numbers of a weight and their scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// [`BlockFormat::Int8`].
    Int8,
    /// [`BlockFormat::Int4`].
    Int4,
    /// ggml's blocks of these names.
    Q8_0,
    Q4_0,
    Q4K,
    Q5K,
    Q6K,
}

/// What the numbers of a block are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scaling {
    /// A scale, in bf16.
    Bf16,
    /// A scale, in f16.
    F16,
    /// A scale, and then an offset is taken away: both are small integers, times the two wholes.
    WithOffset,
    /// A scale for each half of the block: a small integer, times the whole.
    OfHalves,
}

impl Layout {
    /// That of ggml's blocks of a type that have products of integers, if they have no more bits than a format.
    pub(super) fn stored(tensor_type: TensorType, format: BlockFormat) -> Option<Self> {
        let layout = match tensor_type {
            TensorType::Q8_0 => Self::Q8_0,
            TensorType::Q4_0 => Self::Q4_0,
            TensorType::Q4K => Self::Q4K,
            TensorType::Q5K => Self::Q5K,
            TensorType::Q6K => Self::Q6K,
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 | TensorType::Q5_0 | TensorType::Q5_1 => return None,
        };
        (layout.bits() <= Self::of(format)?.bits()).then_some(layout)
    }

    /// That of a format that weights are quantised to, if it has products of integers.
    fn of(format: BlockFormat) -> Option<Self> {
        match format {
            BlockFormat::Int8 => Some(Self::Int8),
            BlockFormat::Int4 => Some(Self::Int4),
            BlockFormat::Q8_0 | BlockFormat::Q4_0 => None,
        }
    }

    /// Bits of a number, which are as many as lines of a block of a group.
    const fn bits(self) -> usize {
        match self {
            Self::Int8 | Self::Q8_0 => 8,
            Self::Q6K => 6,
            Self::Q5K => 5,
            Self::Int4 | Self::Q4_0 | Self::Q4K => 4,
        }
    }

    const fn scaling(self) -> Scaling {
        match self {
            Self::Int8 | Self::Int4 => Scaling::Bf16,
            Self::Q8_0 | Self::Q4_0 => Scaling::F16,
            Self::Q4K | Self::Q5K => Scaling::WithOffset,
            Self::Q6K => Scaling::OfHalves,
        }
    }

    /// What is added to a number, so that what is stored is not negative.
    const fn excess(self) -> i32 {
        match self {
            Self::Int8 | Self::Q8_0 => 128,
            Self::Q6K => 32,
            Self::Int4 | Self::Q4_0 => 8,
            Self::Q4K | Self::Q5K => 0,
        }
    }

    /// A byte of numbers that are zero, in a line of the lower bits.
    const fn zero(self) -> u8 {
        match self {
            Self::Int8 | Self::Q8_0 => 0x80,
            Self::Int4 | Self::Q4_0 => 0x88,
            // Rows that are not there have scales of zero.
            Self::Q4K | Self::Q5K | Self::Q6K => 0,
        }
    }

    /// Sums of integers that the product with a block has: parts of it with a scale of their own.
    const fn parts(self) -> usize {
        match self.scaling() {
            Scaling::Bf16 | Scaling::F16 | Scaling::WithOffset => 1,
            Scaling::OfHalves => 2,
        }
    }

    /// What small scales and offsets are multiplied with, for each row and [`SHARING`] blocks.
    const fn wholes(self) -> usize {
        match self.scaling() {
            Scaling::Bf16 | Scaling::F16 => 0,
            Scaling::OfHalves => 1,
            Scaling::WithOffset => 2,
        }
    }
}

/// 64 bytes of a group: four numbers of each row in 8 bits, or the lower four bits of eight, those of the first four in
/// the lower halves. What numbers have beyond four bits lies in lines behind these, one or two bits of each number in
/// the order of the numbers, lowest first.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Default for Line {
    fn default() -> Self {
        Self([0; 64])
    }
}

impl Plain for Line {}

/// The scales of a block of a group, for each row 16 bits of a float; or two small integers for each row, those that
/// come first before the others.
type Scales = [u16; GROUP];

impl Plain for Scales {}

/// As two small integers for each row.
#[inline(always)]
fn small(scales: &Scales) -> &[[i8; GROUP]; 2] {
    // SAFETY: both are as long, and any bytes are integers, of which no alignment is asked.
    unsafe { &*std::ptr::from_ref(scales).cast() }
}

/// As [`small`], to be written.
fn small_mut(scales: &mut Scales) -> &mut [[i8; GROUP]; 2] {
    // SAFETY: as there.
    unsafe { &mut *std::ptr::from_mut(scales).cast() }
}

/// A weight `[out, in]` in blocks.
pub(super) struct Quantized {
    layout: Layout,
    out_features: usize,
    in_features: usize,
    /// By group, block of the input, and line.
    lines: Memory<Line>,
    /// By group and block.
    scales: Memory<Scales>,
    /// What small scales and offsets are multiplied with, in f16: by group, [`SHARING`] blocks, and which of both.
    wholes: Memory<Scales>,
}

/// A block of a group.
#[derive(Clone, Copy)]
struct GroupBlock<'a> {
    layout: Layout,
    lines: &'a [Line],
    scales: &'a Scales,
    wholes: &'a [Scales],
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
        let (layout, at) = (self.layout, group * self.blocks() + index);
        let (lines, wholes) = (layout.bits(), layout.wholes());
        // Where there are wholes, all blocks that share them are there.
        let shared = at / SHARING * wholes;
        GroupBlock {
            layout,
            lines: &self.lines[at * lines..(at + 1) * lines],
            scales: &self.scales[at],
            wholes: &self.wholes[shared..shared + wholes],
        }
    }

    /// The blocks of a group.
    #[inline(always)]
    fn group(&self, group: usize) -> impl Iterator<Item = GroupBlock<'_>> {
        let (layout, blocks) = (self.layout, self.blocks());
        let blocks = group * blocks..(group + 1) * blocks;
        let lines = self.lines[blocks.start * layout.bits()..blocks.end * layout.bits()].chunks_exact(layout.bits());
        let wholes = &self.wholes[blocks.start / SHARING * layout.wholes()..];
        lines.zip(&self.scales[blocks]).enumerate().map(move |(index, (lines, scales))| {
            let first = index / SHARING * layout.wholes();
            // No panic here: what does not read them does not look for them either.
            let wholes = wholes.get(first..first + layout.wholes()).unwrap_or_default();
            GroupBlock { layout, lines, scales, wholes }
        })
    }

    /// How it is stored.
    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// The format that it was quantised to.
    pub(super) fn format(&self) -> BlockFormat {
        match self.layout {
            Layout::Int8 => BlockFormat::Int8,
            Layout::Int4 => BlockFormat::Int4,
            Layout::Q8_0 | Layout::Q4_0 | Layout::Q4K | Layout::Q5K | Layout::Q6K => {
                unreachable!("blocks of a file stand for no values that change")
            }
        }
    }
}

impl BlockWeight for Quantized {
    fn shape(&self) -> [usize; 2] {
        [self.out_features, self.in_features]
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.lines) + size_of_val(&*self.scales) + size_of_val(&*self.wholes)
    }

    fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]) {
        let lane = row % GROUP;
        for (block, target) in self.group(row / GROUP).zip(target.chunks_mut(BLOCK)) {
            block.copy_row(lane, factor, target);
        }
    }

    fn fingerprint(&self) -> u64 {
        let of_lines = self.lines.iter().map(|line| fingerprint::of_bytes(&line.0));
        let scales = self.scales.iter().chain(self.wholes.iter());
        let parts: Vec<u64> =
            of_lines.chain(scales.map(|scales| fingerprint::of_bf16(&scales.map(bf16::from_bits)))).collect();
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
                widen_block(set, self.block(group, index), part, stride, &mut target[first..]);
            }
        }
    }
}

impl GroupBlock<'_> {
    /// What the numbers of each row are multiplied with, in the first half of the block and in the second, and what is
    /// then taken away.
    #[inline(always)]
    fn factors(self, lane: usize) -> ([f32; 2], f32) {
        let of_f16 = |bits: u16| f16::from_bits(bits).to_f32_const();
        let integers = small(self.scales);
        let product = |which: usize, whole: &Scales| of_f16(whole[lane]) * f32::from(integers[which][lane]);
        match self.layout.scaling() {
            Scaling::Bf16 => ([bf16::from_bits(self.scales[lane]).widen(); 2], 0.0),
            Scaling::F16 => ([of_f16(self.scales[lane]); 2], 0.0),
            Scaling::WithOffset => ([product(0, &self.wholes[0]); 2], product(1, &self.wholes[1])),
            Scaling::OfHalves => ([0, 1].map(|half| product(half, &self.wholes[0])), 0.0),
        }
    }

    /// Numbers of so many bits as they are stored, a byte each: the four of each row that begin at `WORD · register`.
    #[inline(always)]
    fn words(self, bits: usize, register: usize) -> [u32; GROUP] {
        let words = |line: usize| self.lines[line].0.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        let mut numbers = [0; GROUP];
        if bits == 8 {
            numbers.iter_mut().zip(words(register)).for_each(|(number, word)| *number = word);
            return numbers;
        }
        let shift = 4 * (register % 2);
        numbers.iter_mut().zip(words(register / 2)).for_each(|(number, word)| *number = word >> shift & 0x0f0f_0f0f);
        let high_bits = bits - 4;
        if high_bits > 0 {
            let (line, place) = (4 + register * high_bits / 8, register * high_bits % 8);
            let mask = 0x0101_0101 * ((1 << high_bits) - 1);
            let high = words(line).map(|word| (word >> place & mask) << 4);
            numbers.iter_mut().zip(high).for_each(|(number, high)| *number |= high);
        }
        numbers
    }

    /// Its values: for each number of the block, those of the rows.
    #[inline(always)]
    fn widened(self) -> [[f32; GROUP]; BLOCK] {
        let mut values = [[0.0; GROUP]; BLOCK];
        let mut scales = [[0.0; GROUP]; 2];
        let mut offsets = [0.0; GROUP];
        for lane in 0..GROUP {
            let (factors, offset) = self.factors(lane);
            (scales[0][lane], scales[1][lane], offsets[lane]) = (factors[0], factors[1], offset);
        }
        for (register, values) in values.as_chunks_mut::<WORD>().0.iter_mut().enumerate() {
            let (words, scales) = (self.words(self.layout.bits(), register), &scales[register * WORD / (BLOCK / 2)]);
            for (place, values) in values.iter_mut().enumerate() {
                for (lane, value) in values.iter_mut().enumerate() {
                    let number = (words[lane] >> (8 * place) & 255).cast_signed() - self.layout.excess();
                    *value = scales[lane] * number as f32 - offsets[lane];
                }
            }
        }
        values
    }

    /// The values of a row, times a factor.
    fn copy_row(self, lane: usize, factor: f32, target: &mut [f32]) {
        let (scales, offset) = self.factors(lane);
        for (register, target) in target.chunks_mut(WORD).enumerate() {
            let (word, scale) = (self.words(self.layout.bits(), register)[lane], scales[register * WORD / (BLOCK / 2)]);
            for (place, target) in target.iter_mut().enumerate() {
                let number = ((word >> (8 * place) & 255).cast_signed() - self.layout.excess()) as f32;
                *target = match self.layout.scaling() {
                    Scaling::Bf16 | Scaling::F16 => factor * scale * number,
                    Scaling::WithOffset | Scaling::OfHalves => factor * (scale * number - offset),
                };
            }
        }
    }
}

multiversion! {
    /// Dequantises a part of a block of a group, some lanes and some numbers: number by number or row by row, `stride`
    /// apart.
    fn widen_block(
        block: GroupBlock<'_>,
        part: (Range<usize>, Range<usize>, Order),
        stride: usize,
        target: &mut [f32],
    ) {
        let values = block.widened();
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

/// One of the products of an operand.
pub(super) struct QuantizedSide<'a> {
    pub weight: &'a Quantized,
    pub finish: Finish<'a>,
    pub c: ViewMut<'a>,
}

impl Cpu {
    /// `c (+)= x · weightᵀ (+ bias)` of each side, over the threads, which go from one to the next without a pause. All
    /// weights have one layout.
    pub(super) fn quantized_products(&self, x: Operand<'_>, sides: Vec<QuantizedSide<'_>>) {
        let Some(first) = sides.first() else { return };
        let Quantized { layout, in_features, .. } = *first.weight;
        assert!(x.is_of(in_features), "inner dimensions");
        let x = QuantizedRows::new(self, x, in_features, layout);
        let mut groups = 0;
        let sides = sides.into_iter().map(|QuantizedSide { weight, finish, c }| {
            assert_eq!(c.shape(), (x.rows(), weight.out_features), "shape of a product");
            assert_eq!((weight.in_features, weight.layout), (in_features, layout), "weights alike");
            let first_group = groups;
            groups += weight.groups();
            (first_group, weight, finish, c.into_target())
        });
        let sides: Vec<_> = sides.collect();
        let least = LEAST_PART.div_ceil((x.rows() * in_features * GROUP).max(1));
        let parts = shares(groups, self.threads(), least);
        self.each(parts.len(), x.rows() * in_features * groups * GROUP, |part| {
            for &(first, weight, finish, c) in &sides {
                let own = |group: usize| group.clamp(first, first + weight.groups()) - first;
                for group in own(parts[part].start)..own(parts[part].end) {
                    // SAFETY: each group has its own columns.
                    unsafe { group_product(self.set, &x, weight, group, finish, c) };
                }
            }
        });
    }
}

/// Products of numbers that a part of a region has at least: about a microsecond's work.
const LEAST_PART: usize = 1 << 15;

/// Cuts so many groups into parts, each a share of what those before have left: threads read long stretches of a
/// weight, and the last parts, which some wait for, are short.
fn shares(groups: usize, threads: usize, least: usize) -> Vec<Range<usize>> {
    let (mut parts, mut first) = (Vec::new(), 0);
    while first < groups {
        let left = groups - first;
        let share = if threads == 1 { left } else { (left / (2 * threads)).max(least).min(left) };
        parts.push(first..first + share);
        first += share;
    }
    parts
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
    let finish = finish.of_columns(columns.clone());
    for first_row in (0..x.rows()).step_by(TILE) {
        let rows = first_row..x.rows().min(first_row + TILE);
        let sums = tile(set, x, rows.clone(), weight, group);
        for (row, sums) in rows.zip(&sums) {
            // SAFETY: the caller vouches for these elements.
            finish.row(sums, unsafe { c.row(row, columns.clone()) });
        }
    }
}

/// The products of up to [`TILE`] rows with a group.
fn tile(set: InstructionSet, x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
    unsafe {
        match set {
            InstructionSet::Portable => kernel::tile::<Portable>(x, rows, weight, group),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 | InstructionSet::Avx512 => kernel::tile::<Avx2>(x, rows, weight, group),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Bf16 | InstructionSet::Amx | InstructionSet::AmxEmulated => {
                kernel::tile::<Avx512Bf16>(x, rows, weight, group)
            }
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => kernel::tile::<neon::Bytewise<Neon>>(x, rows, weight, group),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonDot => kernel::tile::<neon::Bytewise<neon::Dot>>(x, rows, weight, group),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonBf16 => kernel::tile::<neon::Bytewise<neon::MixedDot>>(x, rows, weight, group),
            _ => unreachable!("{set}, which is of another architecture"),
        }
    }
}
