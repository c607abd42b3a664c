//! From a weight's values to interleaved blocks.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::super::instructions::multiversion;
use super::super::memory::Memory;
use super::{BLOCK, Bits, Cpu, GROUP, Line, Quantized, ScaleType, Scales};
use crate::checkpoint::{CheckpointError, RowBytes, Rows};
use crate::weights::{BlockFormat, int4, int8};

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
        let Ok(quantized) = Self::of_groups(cpu, out_features, in_features, Bits::of(format), of_rows);
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
        Self::of_groups(cpu, out_features, in_features, Bits::of(format), |group, quantize| {
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
        [out_features, in_features]: [usize; 2],
        rows: &dyn RowBytes,
        bits: Bits,
    ) -> Result<Self, CheckpointError> {
        let block_bytes = match bits {
            Bits::Eight => BlockFormat::Q8_0.block_bytes(),
            Bits::Four => BlockFormat::Q4_0.block_bytes(),
        } as usize;
        let row_bytes = in_features / BLOCK * block_bytes;
        let form = (bits, ScaleType::F16);
        Self::in_groups(cpu, [out_features, in_features], form, |group, lines, scales| {
            let mut bytes = vec![0; group.len() * row_bytes];
            rows.read_bytes(group.start, &mut bytes)?;
            for (lane, row) in bytes.chunks_exact(row_bytes).enumerate() {
                let blocks = row.chunks_exact(block_bytes).zip(lines.chunks_exact_mut(bits.lines())).zip(&mut *scales);
                for ((block, lines), scales) in blocks {
                    let (scale, block) = block.split_at(2);
                    scales[lane] = u16::from_le_bytes([scale[0], scale[1]]);
                    let numbers = std::array::from_fn(|at| match bits {
                        Bits::Eight => block[at].cast_signed(),
                        Bits::Four => (block[at % 16] >> (4 * (at / 16)) & 15).cast_signed() - 8,
                    });
                    store(bits, &numbers, lane, lines);
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
        bits: Bits,
        of_rows: impl Fn(Range<usize>, &mut dyn FnMut(&[f32])) -> Result<(), E> + Sync + Send,
    ) -> Result<Self, E> {
        Self::in_groups(cpu, [out_features, in_features], (bits, ScaleType::Bf16), |rows, lines, scales| {
            of_rows(rows, &mut |values| quantize_group(cpu.set, bits, in_features, values, lines, scales))
        })
    }

    /// Makes the blocks of each group of rows, over the threads.
    fn in_groups<E: Send>(
        cpu: &Cpu,
        [out_features, in_features]: [usize; 2],
        (bits, scale_type): (Bits, ScaleType),
        make: impl Fn(Range<usize>, &mut [Line], &mut [Scales]) -> Result<(), E> + Sync + Send,
    ) -> Result<Self, E> {
        let mut quantized =
            Self { bits, out_features, in_features, lines: Memory::default(), scale_type, scales: Memory::default() };
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
            lines.fill(Line([bits.zero(); 64]));
            if let Err(error) = make(rows, lines, scales) {
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
    fn quantize_group(bits: Bits, in_features: usize, values: &[f32], lines: &mut [Line], scales: &mut [Scales]) {
        for (lane, row) in values.chunks_exact(in_features).enumerate() {
            let blocks = row.chunks(BLOCK).zip(lines.chunks_exact_mut(bits.lines())).zip(&mut *scales);
            for ((x, lines), scales) in blocks {
                let mut block = [0.0; BLOCK];
                block[..x.len()].copy_from_slice(x);
                let mut numbers = [0; BLOCK];
                let scale = match bits {
                    Bits::Eight => int8::encode(&block, &mut numbers),
                    Bits::Four => int4::encode(&block, &mut numbers),
                };
                scales[lane] = scale.to_bits();
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
