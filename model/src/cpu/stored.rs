//! Weights in blocks that lie behind one another, row by row, as a file of the format has them.

use std::marker::PhantomData;
use std::ops::Range;

use super::memory::Memory;
use super::plain::Plain;
use super::product::{BlockWeight, Order, WeightBlock};
use super::simd::{Routine, Vector};
use super::{Cpu, InstructionSet};
use crate::checkpoint::{CheckpointError, RowBytes, Rows};
use crate::fingerprint;
use crate::weights::{BLOCK, BlockCodec, BlockDecoder};

/// Rows that are dequantised together where columns are to lie contiguously.
const ROWS: usize = 16;

impl Plain for u8 {}

/// A weight `[out, in]`; the last block of a row may be filled up with zeros.
pub(super) struct StoredBlocks<C> {
    out_features: usize,
    in_features: usize,
    bytes: Memory<u8>,
    codec: PhantomData<C>,
}

impl<C: BlockCodec> StoredBlocks<C> {
    /// Quantises a weight of these rows, over the threads.
    pub(super) fn read(
        cpu: &Cpu,
        [out_features, in_features]: [usize; 2],
        rows: &dyn Rows,
    ) -> Result<Self, CheckpointError> {
        let row_bytes = Self::row_bytes(in_features);
        let bytes = cpu.read_rows(cpu.weights.zeros(out_features * row_bytes), row_bytes, |first, bytes| {
            let mut values = vec![0.0; bytes.len() / row_bytes * in_features];
            rows.read(first, &mut values)?;
            let rows = values.chunks_exact(in_features).zip(bytes.chunks_exact_mut(row_bytes));
            rows.for_each(|(values, bytes)| run(cpu.set, Encode::<C> { values, bytes, codec: PhantomData }));
            Ok(())
        })?;
        Ok(Self { out_features, in_features, bytes, codec: PhantomData })
    }
}

impl<C: BlockDecoder> StoredBlocks<C> {
    /// A weight of blocks that are read as they are.
    pub(super) fn copied(
        cpu: &Cpu,
        [out_features, in_features]: [usize; 2],
        rows: &dyn RowBytes,
    ) -> Result<Self, CheckpointError> {
        let row_bytes = Self::row_bytes(in_features);
        let bytes = cpu.weights.zeros(out_features * row_bytes);
        let bytes = cpu.read_rows(bytes, row_bytes, |first, bytes| rows.read_bytes(first, bytes))?;
        Ok(Self { out_features, in_features, bytes, codec: PhantomData })
    }

    fn row_bytes(in_features: usize) -> usize {
        in_features.div_ceil(C::PARTS * BLOCK) * C::BLOCK_BYTES
    }

    /// The blocks of a row.
    fn row(&self, row: usize) -> &[u8] {
        let row_bytes = Self::row_bytes(self.in_features);
        &self.bytes[row * row_bytes..(row + 1) * row_bytes]
    }
}

impl<C: BlockDecoder> BlockWeight for StoredBlocks<C> {
    fn shape(&self) -> [usize; 2] {
        [self.out_features, self.in_features]
    }

    fn bytes(&self) -> usize {
        self.bytes.len()
    }

    fn fingerprint(&self) -> u64 {
        fingerprint::of_bytes(&self.bytes)
    }

    fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]) {
        let blocks = self.row(row).chunks_exact(C::BLOCK_BYTES);
        for (block, target) in blocks.zip(target.chunks_mut(C::PARTS * BLOCK)) {
            let header = C::header(block);
            for (part, target) in target.chunks_mut(BLOCK).enumerate() {
                let mut values = [0.0; BLOCK];
                C::decode_part(block, &header, part, &mut values);
                target.iter_mut().zip(values).for_each(|(target, value)| *target = factor * value);
            }
        }
    }

    fn widen(&self, set: InstructionSet, part: WeightBlock, target: &mut [f32]) {
        run(set, Widen { weight: self, part, target });
    }
}

/// Runs safe code with the instructions of a set.
#[allow(unsafe_code, reason = "the machine has the set that was chosen")]
fn run<R: Routine<Output = ()>>(set: InstructionSet, routine: R) {
    // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
    unsafe { set.run(routine) }
}

/// Quantises a row.
struct Encode<'a, C> {
    values: &'a [f32],
    bytes: &'a mut [u8],
    codec: PhantomData<C>,
}

#[allow(unsafe_code, reason = "the machine has the set that was chosen")]
impl<C: BlockCodec> Routine for Encode<'_, C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let blocks = self.bytes.chunks_exact_mut(<C as BlockDecoder>::BLOCK_BYTES);
        for (values, bytes) in self.values.chunks(BLOCK).zip(blocks) {
            let mut block = [0.0; BLOCK];
            block[..values.len()].copy_from_slice(values);
            C::encode(&block, bytes);
        }
    }
}

/// Dequantises a part of a weight; see [`BlockWeight::widen`].
struct Widen<'a, C> {
    weight: &'a StoredBlocks<C>,
    part: WeightBlock,
    target: &'a mut [f32],
}

#[allow(unsafe_code, reason = "the machine has the set that was chosen")]
impl<C: BlockDecoder> Routine for Widen<'_, C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { weight, part: WeightBlock { rows, columns, order, stride }, target } = self;
        let of_block = C::PARTS * BLOCK;
        if let Order::Rows = order
            && columns.start % of_block == 0
            && columns.end % BLOCK == 0
        {
            // Whole blocks, or parts of the last one, as a product of one row reads them: each row from its beginning
            // to its end.
            for (row, target) in rows.zip(target.chunks_mut(stride)) {
                let blocks = weight.row(row).chunks_exact(C::BLOCK_BYTES).skip(columns.start / of_block);
                for (block, target) in blocks.zip(target[..columns.len()].chunks_mut(of_block)) {
                    let header = C::header(block);
                    for (part, values) in target.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                        let mut decoded = [0.0; BLOCK];
                        C::decode_part(block, &header, part, &mut decoded);
                        *values = decoded;
                    }
                }
            }
            return;
        }
        let parts = columns.start / BLOCK..columns.end.div_ceil(BLOCK);
        for index in parts.start / C::PARTS..parts.end.div_ceil(C::PARTS) {
            for row in rows.clone().step_by(ROWS) {
                let count = ROWS.min(rows.end - row);
                let mut blocks = [(&[][..], C::Header::default()); ROWS];
                for (row, (block, header)) in (row..row + count).zip(&mut blocks) {
                    *block = &weight.row(row)[index * C::BLOCK_BYTES..][..C::BLOCK_BYTES];
                    *header = C::header(block);
                }
                let row = row - rows.start;
                let first = index * C::PARTS;
                for part in parts.start.max(first)..parts.end.min(first + C::PARTS) {
                    let mut values = [[0.0; BLOCK]; ROWS];
                    for ((block, header), values) in blocks[..count].iter().zip(&mut values) {
                        C::decode_part(block, header, part - first, values);
                    }
                    let first = part * BLOCK;
                    let within = columns.start.max(first) - first..columns.end.min(first + BLOCK) - first;
                    let column = first + within.start - columns.start;
                    put(&values[..count], within, (row, column), order, stride, target);
                }
            }
        }
    }
}

/// Puts some of the values of a part of a few rows where the first of them is to lie.
#[inline(always)]
fn put(
    values: &[[f32; BLOCK]],
    within: Range<usize>,
    (row, column): (usize, usize),
    order: Order,
    stride: usize,
    target: &mut [f32],
) {
    match order {
        Order::Rows => {
            for (row, values) in (row..).zip(values) {
                target[row * stride + column..][..within.len()].copy_from_slice(&values[within.clone()]);
            }
        }
        Order::Columns => {
            for (column, at) in (column..).zip(within) {
                let target = &mut target[column * stride + row..][..values.len()];
                target.iter_mut().zip(values).for_each(|(target, values)| *target = values[at]);
            }
        }
    }
}
