//! The rows of a weight as something to read from, so that who keeps them can have them read straight to their place.

use std::sync::Arc;

use super::{Checkpoint, CheckpointError, Dtype};
use crate::weights::{Nf4Matrix, TensorType};

/// Rows of a weight, which are read when they are needed: some at a time, and on any thread.
pub trait Rows: Sync {
    /// Reads the rows from `first` on, as many as `values` holds.
    ///
    /// # Errors
    /// Fails if they cannot be read.
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError>;

    /// The same rows as they are stored, where that is in 16 bits.
    fn as_halves(&self) -> Option<Halves<'_>> {
        None
    }

    /// The blocks of the rows, where they are stored in a format whose blocks lie within rows: what is read is
    /// dequantised.
    fn as_blocks(&self) -> Option<BlockRows<'_>> {
        None
    }

    /// The matrix of all rows, where it is in NF4: what is read is dequantised.
    fn as_nf4(&self) -> Option<Arc<Nf4Matrix>> {
        None
    }
}

/// Rows of a weight that are stored in 16 bits, by their type.
#[derive(Clone, Copy)]
pub enum Halves<'a> {
    /// bfloat16.
    Bf16(&'a dyn RowBytes),
    /// Half precision.
    F16(&'a dyn RowBytes),
}

/// Rows of a weight that are stored in blocks.
#[derive(Clone, Copy)]
pub struct BlockRows<'a> {
    /// How.
    pub tensor_type: TensorType,
    /// The bytes of the blocks.
    pub bytes: &'a dyn RowBytes,
}

/// Rows of a weight as they are stored.
pub trait RowBytes: Sync {
    /// Reads the rows from `first` on, as many as `bytes` holds: little-endian numbers, or blocks.
    ///
    /// # Errors
    /// Fails if they cannot be read.
    fn read_bytes(&self, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError>;
}

/// Rows of values in memory.
pub struct ValueRows<'a> {
    values: &'a [f32],
    columns: usize,
}

impl<'a> ValueRows<'a> {
    /// The rows of these values, of so many columns.
    pub fn new(values: &'a [f32], columns: usize) -> Self {
        Self { values, columns }
    }
}

impl Rows for ValueRows<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        values.copy_from_slice(&self.values[first * self.columns..][..values.len()]);
        Ok(())
    }
}

/// Rows of a tensor in a checkpoint.
pub struct StoredRows<'a> {
    checkpoint: &'a Checkpoint,
    name: String,
    /// The row of the tensor that is the first here.
    first: usize,
    /// Values in a row.
    columns: usize,
    dtype: Dtype,
    /// The tensor, where it is in NF4.
    nf4: Option<Arc<Nf4Matrix>>,
    /// How it is stored, where that is in blocks within rows.
    blocks: Option<TensorType>,
}

impl Checkpoint {
    /// The steps of a tensor's first dimension, from `first` on. The tensor must have this shape and hold floats.
    ///
    /// # Errors
    /// Fails if there is no such tensor, or it is of another shape, or of no type that is read as f32.
    pub fn stored_rows(&self, name: &str, shape: &[usize], first: usize) -> Result<StoredRows<'_>, CheckpointError> {
        self.expect_shape(name, shape)?;
        self.expect_float(name)?;
        let (columns, dtype) = (shape.iter().skip(1).product(), self.dtype(name)?);
        let (nf4, blocks) = (self.nf4(name)?, self.blocks(name)?);
        Ok(StoredRows { checkpoint: self, name: name.to_owned(), first, columns, dtype, nf4, blocks })
    }
}

impl Rows for StoredRows<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        let first = (self.first + first) * self.columns;
        match &self.nf4 {
            Some(matrix) => matrix.dequantize(first, values),
            None => self.checkpoint.read_f32(&self.name, first, values)?,
        }
        Ok(())
    }

    fn as_halves(&self) -> Option<Halves<'_>> {
        if self.nf4.is_some() || self.blocks.is_some() {
            return None;
        }
        match self.dtype {
            Dtype::BF16 => Some(Halves::Bf16(self)),
            Dtype::F16 => Some(Halves::F16(self)),
            _ => None,
        }
    }

    fn as_blocks(&self) -> Option<BlockRows<'_>> {
        self.blocks.map(|tensor_type| BlockRows { tensor_type, bytes: self })
    }

    fn as_nf4(&self) -> Option<Arc<Nf4Matrix>> {
        self.nf4.clone().filter(|_| self.first == 0)
    }
}

impl RowBytes for StoredRows<'_> {
    fn read_bytes(&self, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        match self.blocks {
            Some(tensor_type) => {
                let row_bytes = tensor_type.bytes(self.columns);
                self.checkpoint.read_blocks(&self.name, (self.first + first) * row_bytes, bytes)
            }
            None => self.checkpoint.read_bytes(&self.name, 2 * (self.first + first) * self.columns, bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{CheckpointWriter, TensorSpec};

    #[test]
    fn rows_are_those_of_the_tensor_from_any_on() {
        let folder = tempfile::tempdir().unwrap();
        let types = [("half", Dtype::BF16), ("full", Dtype::F32), ("count", Dtype::I64)];
        let specs = types.iter().map(|(name, dtype)| TensorSpec::new(*name, *dtype, &[4, 3])).collect();
        let mut writer = CheckpointWriter::create(folder.path(), specs, 1 << 20).unwrap();
        let values: Vec<f32> = (0..12u8).map(f32::from).collect();
        writer.write_f32("half", &values).unwrap();
        writer.write_f32("full", &values).unwrap();
        writer.write_bytes("count", &[0; 96]).unwrap();
        writer.finish().unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        for (name, is_bf16) in [("half", true), ("full", false)] {
            let rows = checkpoint.stored_rows(name, &[4, 3], 1).unwrap();
            let mut found = [0.0; 6];
            rows.read(1, &mut found).unwrap();
            assert_eq!(found, values[6..], "{name}");
            assert_eq!(matches!(rows.as_halves(), Some(Halves::Bf16(_))), is_bf16);
            if let Some(Halves::Bf16(rows)) = rows.as_halves() {
                let mut bytes = [0; 6];
                rows.read_bytes(2, &mut bytes).unwrap();
                assert_eq!(bytes, checkpoint.bytes(name).unwrap()[18..]);
            }
        }
        assert!(matches!(checkpoint.stored_rows("half", &[3, 4], 0), Err(CheckpointError::WrongShape { .. })));
        assert!(matches!(checkpoint.stored_rows("count", &[4, 3], 0), Err(CheckpointError::WrongDtype { .. })));
    }
}
