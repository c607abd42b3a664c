//! Weights that are read straight to where they are kept: on all threads, each of which reads some rows and converts
//! them while they are in its cache. A tensor read whole first would go through memory three times more, and take its
//! place twice.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::sync::{Mutex, PoisonError};

use half::bf16;

use super::Cpu;
use super::memory::Memory;
use super::plain::Plain;
use super::rounding::round;
use super::weight::{Values, Weight};
use crate::checkpoint::{CheckpointError, Rows};
use crate::ops::Compute;

/// Values that a thread reads at a time.
const PIECE: usize = 1 << 15;

impl Cpu {
    /// A weight of these rows, in the type that is computed in; in bf16 where they are stored so and f32 is computed
    /// in.
    pub(super) fn weight_of_rows(
        &self,
        [out_features, in_features]: [usize; 2],
        rows: &dyn Rows,
    ) -> Result<Weight, CheckpointError> {
        let (length, columns) = (out_features * in_features, in_features);
        // In f32 products widen them as they go, to the same results. Those that other processes see are all of one
        // type.
        let keeps_bf16 = self.compute == Compute::Bf16 || self.shared.is_none();
        let values = match (self.compute, rows.as_bf16().filter(|_| keeps_bf16)) {
            (_, Some(stored)) => {
                Values::Bf16(self.read_rows(self.weights.room(length), columns, |first, values| {
                    stored.read_bytes(first, bytes_of(values))?;
                    values.iter_mut().for_each(|value| *value = bf16::from_bits(u16::from_le(value.to_bits())));
                    Ok(())
                })?)
            }
            (Compute::Bf16, None) => {
                Values::Bf16(self.read_rows(self.weights.room(length), columns, |first, rounded| {
                    let mut values = vec![0.0; rounded.len()];
                    rows.read(first, &mut values)?;
                    round(self.set, &values, rounded);
                    Ok(())
                })?)
            }
            (Compute::F32, None) => {
                let room = self.weights.room(length);
                Values::F32(self.read_rows(room, columns, |first, values| rows.read(first, values))?)
            }
        };
        Ok(Weight { out_features, in_features, values })
    }

    /// Has `read` fill memory, some rows at a time.
    pub(super) fn read_rows<T: Plain + Send>(
        &self,
        mut values: Memory<T>,
        columns: usize,
        read: impl Fn(usize, &mut [T]) -> Result<(), CheckpointError> + Sync,
    ) -> Result<Memory<T>, CheckpointError> {
        let length = values.len();
        let rows = (PIECE / columns.max(1)).max(1);
        let pieces: Vec<_> = values.chunks_mut((rows * columns).max(1)).map(Mutex::new).collect();
        let failed = Mutex::new(None);
        self.each(pieces.len(), length, |piece| {
            let mut values = pieces[piece].lock().unwrap_or_else(PoisonError::into_inner);
            if let Err(error) = read(piece * rows, &mut values) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        drop(pieces);
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(values),
        }
    }
}

/// The memory of some values.
fn bytes_of(values: &mut [bf16]) -> &mut [u8] {
    // SAFETY: the same memory, of as many bytes; a byte needs no alignment, and any bits are a bf16.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::ValueRows;
    use crate::checkpoint::{Checkpoint, CheckpointWriter, Dtype, TensorSpec};
    use crate::cpu::{InstructionSet, Tensor};
    use crate::ops::{Ops, PrepareError, WeightRole, Write};
    use crate::weights::{Activations, BlockFormat, Quantization};

    /// Rows and columns of which the pieces are uneven.
    const SHAPE: [usize; 2] = [67, 1024];

    fn checkpoint(folder: &std::path::Path, dtype: Dtype) -> Checkpoint {
        let specs = vec![TensorSpec::new("weight", dtype, &SHAPE)];
        let mut writer = CheckpointWriter::create(folder, specs, 1 << 30).unwrap();
        let values: Vec<f32> = (0..SHAPE[0] * SHAPE[1]).map(|at| (at as f32).sin()).collect();
        writer.write_f32("weight", &values).unwrap();
        writer.finish().unwrap();
        Checkpoint::open(folder).unwrap()
    }

    #[test]
    fn a_weight_that_is_read_is_that_of_its_values() {
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let folder = tempfile::tempdir().unwrap();
            let stored = checkpoint(folder.path(), dtype);
            let rows = stored.stored_rows("weight", &SHAPE, 0).unwrap();
            let values = stored.tensor_f32("weight").unwrap();
            for compute in [Compute::F32, Compute::Bf16] {
                let cpu = Cpu::new(2, compute).unwrap();
                let read = cpu.weight_of_rows(SHAPE, &rows).unwrap();
                let made = cpu.weight_of_rows(SHAPE, &ValueRows::new(&values, SHAPE[1])).unwrap();
                if (compute, dtype) == (Compute::F32, Dtype::BF16) {
                    assert_eq!(2 * read.bytes(), made.bytes());
                    continue;
                }
                assert_eq!(read.bytes(), made.bytes());
                assert_eq!(cpu.fingerprint(&read).unwrap(), cpu.fingerprint(&made).unwrap(), "{dtype} in {compute:?}");
            }
            for format in BlockFormat::ALL {
                let cpu = quantizing(format);
                let read = cpu.frozen_weight(WeightRole::Matrix, SHAPE, &rows).unwrap();
                let made = cpu.frozen_weight(WeightRole::Matrix, SHAPE, &ValueRows::new(&values, SHAPE[1])).unwrap();
                let (read, made) = (cpu.fingerprint(&read).unwrap(), cpu.fingerprint(&made).unwrap());
                assert_eq!(read, made, "{dtype} in {}", format.name());
            }
        }
    }

    fn quantizing(format: BlockFormat) -> Cpu {
        Cpu::new(2, Compute::F32).unwrap().quantizing(Quantization { format, activations: Activations::Int8 })
    }

    #[test]
    fn a_weight_in_its_stored_type_computes_the_same_bits_in_f32() {
        let folder = tempfile::tempdir().unwrap();
        let stored = checkpoint(folder.path(), Dtype::BF16);
        let rows = stored.stored_rows("weight", &SHAPE, 0).unwrap();
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let cpu = Cpu::with_instructions(2, Compute::F32, set).unwrap();
            let narrow = cpu.weight_of_rows(SHAPE, &rows).unwrap();
            let values = stored.tensor_f32("weight").unwrap();
            let wide = cpu.weight_of_rows(SHAPE, &ValueRows::new(&values, SHAPE[1])).unwrap();
            assert_eq!(2 * narrow.bytes(), wide.bytes());
            for tokens in [1, 7, 40] {
                let tensor = |width: usize| {
                    let values: Vec<f32> = (0..tokens * width).map(|at| (0.7 * at as f32).cos()).collect();
                    cpu.tensor(tokens, width, &values).unwrap()
                };
                let products = |weight: &Weight| {
                    let [mut y, mut dx] = <[Tensor; 2]>::default();
                    cpu.linear(&tensor(SHAPE[1]), weight, None, Write::Replace, &mut y).unwrap();
                    cpu.linear_backward(&tensor(SHAPE[0]), weight, Write::Replace, &mut dx).unwrap();
                    [y, dx].map(|tensor| tensor.values().iter().map(|value| value.to_bits()).collect::<Vec<_>>())
                };
                assert_eq!(products(&narrow), products(&wide), "{tokens} tokens, {}", set.name());
            }
        }
    }

    #[test]
    fn a_read_that_fails_is_told() {
        struct Broken;
        impl Rows for Broken {
            fn read(&self, first: usize, _: &mut [f32]) -> Result<(), CheckpointError> {
                let (path, source) = ("file".into(), std::io::Error::other("a bad sector"));
                if first < 32 { Ok(()) } else { Err(CheckpointError::Io { path, source }) }
            }
        }
        let sets = [Compute::F32, Compute::Bf16].map(|compute| Cpu::new(2, compute).unwrap());
        for cpu in sets.into_iter().chain([quantizing(BlockFormat::Int8)]) {
            let found = cpu.frozen_weight(WeightRole::Matrix, SHAPE, &Broken);
            assert!(matches!(found, Err(PrepareError::Read(CheckpointError::Io { .. }))), "{}", cpu.describe());
        }
    }
}
