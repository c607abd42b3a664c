//! Weights in blocks that lie behind one another, row by row, as a file of the format has them.

use std::marker::PhantomData;

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
        let parts = blocks.flat_map(|block| (0..C::PARTS).map(move |part| (block, part)));
        for ((block, part), target) in parts.zip(target.chunks_mut(BLOCK)) {
            let mut values = [0.0; BLOCK];
            C::decode_part(block, part, &mut values);
            target.iter_mut().zip(values).for_each(|(target, value)| *target = factor * value);
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
        if let Order::Rows = order
            && columns.start % BLOCK == 0
            && columns.end % BLOCK == 0
        {
            // Whole parts of blocks, as a product of one row reads them: each row from its beginning to its end.
            for (row, target) in rows.zip(target.chunks_mut(stride)) {
                let blocks = weight.row(row);
                let parts = target[..columns.len()].as_chunks_mut::<BLOCK>().0;
                for (index, values) in (columns.start / BLOCK..).zip(parts) {
                    let block = &blocks[index / C::PARTS * C::BLOCK_BYTES..][..C::BLOCK_BYTES];
                    let mut decoded = [0.0; BLOCK];
                    C::decode_part(block, index % C::PARTS, &mut decoded);
                    *values = decoded;
                }
            }
            return;
        }
        for index in columns.start / BLOCK..columns.end.div_ceil(BLOCK) {
            let first = index * BLOCK;
            let within = columns.start.max(first) - first..columns.end.min(first + BLOCK) - first;
            let column = first + within.start - columns.start;
            for row in rows.clone().step_by(ROWS) {
                let mut values = [[0.0; BLOCK]; ROWS];
                let count = ROWS.min(rows.end - row);
                for (row, values) in (row..row + count).zip(&mut values) {
                    let block = &weight.row(row)[index / C::PARTS * C::BLOCK_BYTES..][..C::BLOCK_BYTES];
                    C::decode_part(block, index % C::PARTS, values);
                }
                let row = row - rows.start;
                match order {
                    Order::Rows => {
                        for (row, values) in (row..).zip(&values[..count]) {
                            target[row * stride + column..][..within.len()].copy_from_slice(&values[within.clone()]);
                        }
                    }
                    Order::Columns => {
                        for (column, at) in (column..).zip(within.clone()) {
                            let target = &mut target[column * stride + row..][..count];
                            target.iter_mut().zip(&values).for_each(|(target, values)| *target = values[at]);
                        }
                    }
                }
            }
        }
    }
}
