//! From a weight's values to interleaved blocks.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::super::instructions::multiversion;
use super::super::memory::Memory;
use super::{BLOCK, Cpu, GROUP, Layout, Line, Quantized, SHARING, Scales, WORD, small_mut};
use crate::checkpoint::{BlockRows, CheckpointError, Rows};
use crate::weights::{BlockDecoder, BlockFormat, Q4K, Q5K, Q6K, QuantisedScales, int4, int8};

/// Where the blocks of a group go.
struct Place<'a> {
    lines: &'a mut [Line],
    scales: &'a mut [Scales],
    wholes: &'a mut [Scales],
}

impl Quantized {
    /// Quantises a weight, `[out, in]` row by row.
    pub(in crate::cpu) fn new(
        cpu: &Cpu,
        out_features: usize,
        in_features: usize,
        values: &[f32],
        format: BlockFormat,
    ) -> Self {
        let of_rows = |rows: Range<usize>, quantize: &mut dyn FnMut(&[f32])| {
            quantize(&values[rows.start * in_features..rows.end * in_features]);
            Ok::<_, Infallible>(())
        };
        let Ok(quantized) = Self::of_groups(cpu, out_features, in_features, format, of_rows);
        quantized
    }

    /// Quantises a weight of these rows: each thread reads those of a group and quantises them while they are in its
    /// cache.
    pub(in crate::cpu) fn read(
        cpu: &Cpu,
        out_features: usize,
        in_features: usize,
        rows: &dyn Rows,
        format: BlockFormat,
    ) -> Result<Self, CheckpointError> {
        let rooms = Mutex::new(Vec::<Vec<f32>>::new());
        Self::of_groups(cpu, out_features, in_features, format, |group, quantize| {
            let mut values = rooms.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
            values.resize(group.len() * in_features, 0.0);
            rows.read(group.start, &mut values)?;
            quantize(&values);
            rooms.lock().unwrap_or_else(PoisonError::into_inner).push(values);
            Ok(())
        })
    }

    /// A weight of ggml's blocks, whose numbers and scales are kept.
    pub(in crate::cpu) fn of_blocks(
        cpu: &Cpu,
        shape: [usize; 2],
        rows: BlockRows<'_>,
        layout: Layout,
    ) -> Result<Self, CheckpointError> {
        let row_bytes = rows.tensor_type.bytes(shape[1]);
        let block_bytes = rows.tensor_type.bytes(rows.tensor_type.block_values());
        Self::in_groups(cpu, shape, layout, |group, place| {
            let mut bytes = vec![0; group.len() * row_bytes];
            rows.bytes.read_bytes(group.start, &mut bytes)?;
            for (lane, row) in bytes.chunks_exact(row_bytes).enumerate() {
                match layout {
                    Layout::Q8_0 | Layout::Q4_0 => place.put_row(layout, row.chunks_exact(block_bytes), lane),
                    Layout::Q4K => place.put_row_of::<Q4K>(layout, row, lane),
                    Layout::Q5K => place.put_row_of::<Q5K>(layout, row, lane),
                    Layout::Q6K => place.put_row_of::<Q6K>(layout, row, lane),
                    Layout::Int8 | Layout::Int4 => unreachable!("no blocks of ggml"),
                }
            }
            Ok(())
        })
    }

    /// Quantises groups of rows over the threads: `of_rows` hands on the values of some rows.
    fn of_groups<E: Send>(
        cpu: &Cpu,
        out_features: usize,
        in_features: usize,
        format: BlockFormat,
        of_rows: impl Fn(Range<usize>, &mut dyn FnMut(&[f32])) -> Result<(), E> + Sync + Send,
    ) -> Result<Self, E> {
        let layout = Layout::of(format).expect("a format that has products of integers");
        Self::in_groups(cpu, [out_features, in_features], layout, |rows, place| {
            of_rows(rows, &mut |values| {
                quantize_group(cpu.set, layout, in_features, values, place.lines, place.scales);
            })
        })
    }

    /// Makes the blocks of each group of rows, over the threads.
    fn in_groups<E: Send>(
        cpu: &Cpu,
        [out_features, in_features]: [usize; 2],
        layout: Layout,
        make: impl Fn(Range<usize>, &mut Place<'_>) -> Result<(), E> + Sync + Send,
    ) -> Result<Self, E> {
        let (lines, scales, wholes) = (Memory::default(), Memory::default(), Memory::default());
        let mut quantized = Self { layout, out_features, in_features, lines, scales, wholes };
        let (blocks, groups) = (quantized.blocks(), quantized.groups());
        let wholes = blocks / SHARING * layout.wholes();
        quantized.lines = cpu.weights.zeros(groups * blocks * layout.bits());
        quantized.scales = cpu.weights.zeros(groups * blocks);
        quantized.wholes = cpu.weights.zeros(groups * wholes);
        let lines = quantized.lines.chunks_mut((blocks * layout.bits()).max(1));
        let mut all_wholes = &mut *quantized.wholes;
        let places = lines.zip(quantized.scales.chunks_mut(blocks.max(1))).map(|(lines, scales)| {
            let (wholes, others) = std::mem::take(&mut all_wholes).split_at_mut(wholes);
            all_wholes = others;
            Mutex::new(Place { lines, scales, wholes })
        });
        let places: Vec<_> = places.collect();
        let failed = Mutex::new(None);
        cpu.each(places.len(), out_features * in_features, |group| {
            let mut place = places[group].lock().expect("each group is taken once");
            let rows = group * GROUP..out_features.min((group + 1) * GROUP);
            place.lines.fill(Line([layout.zero(); 64]));
            if let Err(error) = make(rows, &mut place) {
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

impl Place<'_> {
    /// Puts the blocks of a row that begin with their scale.
    fn put_row<'a>(&mut self, layout: Layout, row: impl Iterator<Item = &'a [u8]>, lane: usize) {
        let places = self.lines.chunks_exact_mut(layout.bits()).zip(&mut *self.scales);
        for (block, (lines, scales)) in row.zip(places) {
            let (scale, block) = block.split_at(2);
            scales[lane] = u16::from_le_bytes([scale[0], scale[1]]);
            let numbers = std::array::from_fn(|at| match layout.bits() {
                // Those of 8 bits are signed.
                8 => block[at] ^ 0x80,
                _ => block[at % 16] >> (4 * (at / 16)) & 15,
            });
            store(layout.bits(), &numbers, lane, lines);
        }
    }

    /// Puts the blocks of a row whose scales are quantised.
    fn put_row_of<D: QuantisedScales>(&mut self, layout: Layout, row: &[u8], lane: usize) {
        const { assert!(<D as BlockDecoder>::PARTS == SHARING, "a block shares its wholes") };
        let places = self.lines.chunks_exact_mut(SHARING * layout.bits()).zip(self.scales.chunks_exact_mut(SHARING));
        let places = places.zip(self.wholes.chunks_exact_mut(layout.wholes()));
        for (block, ((lines, scales), wholes)) in row.chunks_exact(D::BLOCK_BYTES).zip(places) {
            wholes.iter_mut().zip(D::wholes(block)).for_each(|(wholes, whole)| wholes[lane] = whole);
            let parts = lines.chunks_exact_mut(layout.bits()).zip(scales).enumerate();
            for (part, (lines, scales)) in parts {
                let [first, second] = small_mut(scales);
                [first[lane], second[lane]] = D::scales(block, part);
                store(layout.bits(), &D::numbers(block, part), lane, lines);
            }
        }
    }
}

multiversion! {
    /// Quantises up to sixteen rows of a weight. Of rows beyond the last all numbers are zero.
    fn quantize_group(layout: Layout, in_features: usize, values: &[f32], lines: &mut [Line], scales: &mut [Scales]) {
        for (lane, row) in values.chunks_exact(in_features).enumerate() {
            let blocks = row.chunks(BLOCK).zip(lines.chunks_exact_mut(layout.bits())).zip(&mut *scales);
            for ((x, lines), scales) in blocks {
                let mut block = [0.0; BLOCK];
                block[..x.len()].copy_from_slice(x);
                let mut numbers = [0; BLOCK];
                let scale = match layout.bits() {
                    8 => int8::encode(&block, &mut numbers),
                    _ => int4::encode(&block, &mut numbers),
                };
                scales[lane] = scale.to_bits();
                let stored = numbers.map(|number| (i32::from(number) + layout.excess()) as u8);
                store(layout.bits(), &stored, lane, lines);
            }
        }
    }
}

/// Puts the numbers of one row, as they are stored, where kernels expect them. Lines of what numbers have beyond four
/// bits must be zero there.
#[inline(always)]
fn store(bits: usize, numbers: &[u8; BLOCK], lane: usize, lines: &mut [Line]) {
    let place = WORD * lane..WORD * (lane + 1);
    if bits == 8 {
        for (line, numbers) in lines.iter_mut().zip(numbers.as_chunks::<WORD>().0) {
            line.0[place.clone()].copy_from_slice(numbers);
        }
        return;
    }
    let (low, high) = lines.split_at_mut(4);
    for (line, numbers) in low.iter_mut().zip(numbers.as_chunks::<{ 2 * WORD }>().0) {
        let (first, second) = numbers.split_at(WORD);
        for ((byte, first), second) in line.0[place.clone()].iter_mut().zip(first).zip(second) {
            *byte = first & 15 | second << 4;
        }
    }
    if high.is_empty() {
        return;
    }
    for (register, numbers) in numbers.as_chunks::<WORD>().0.iter().enumerate() {
        let bit = register * high.len();
        for (byte, number) in high[bit / 8].0[place.clone()].iter_mut().zip(numbers) {
            *byte |= (number >> 4) << (bit % 8);
        }
    }
}
