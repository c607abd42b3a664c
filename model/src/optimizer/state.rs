//! What an optimizer keeps of a trained tensor: in memory, in a kernel, and in saved states.

use super::BLOCK;
use crate::ops::{Ops, Result};

/// A state tensor, as a rule declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Its name in saved states.
    pub name: &'static str,
    /// How its elements are kept.
    pub format: StateFormat,
}

/// How the elements of a state tensor are kept. A formula gets them, and returns them, as f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFormat {
    /// As f32, where the kernel set keeps its tensors.
    F32,
}

impl StateFormat {
    /// Bytes of a tensor of so many elements.
    pub fn bytes(self, elements: usize) -> u64 {
        match self {
            Self::F32 => 4 * elements as u64,
        }
    }
}

/// The state tensor of a trained tensor. Formats other than f32 are kept in main memory.
pub struct StateTensor<T> {
    name: &'static str,
    data: Data<T>,
}

enum Data<T> {
    F32(T),
}

/// One of the sets of values that a state tensor is saved as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedSet {
    /// Its name: that of the state tensor, with an ending where that has several sets.
    pub name: String,
    /// The dtype of its values.
    pub dtype: StateDtype,
    /// Number of its values.
    pub values: usize,
}

/// The dtype of saved values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateDtype {
    /// 32-bit floats.
    F32,
}

/// Saved values.
#[derive(Clone, Debug, PartialEq)]
pub enum StateValues {
    /// 32-bit floats.
    F32(Vec<f32>),
}

impl StateValues {
    /// Their dtype.
    pub fn dtype(&self) -> StateDtype {
        match self {
            Self::F32(_) => StateDtype::F32,
        }
    }

    /// Number of values.
    pub fn count(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
        }
    }

    /// Their bytes, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    /// The values in these bytes.
    pub fn from_bytes(dtype: StateDtype, bytes: &[u8]) -> Self {
        match dtype {
            StateDtype::F32 => Self::F32(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()),
        }
    }
}

impl StateDtype {
    /// All of them.
    pub const ALL: [Self; 1] = [Self::F32];

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
        }
    }
}

impl<T> StateTensor<T> {
    /// The state tensor of a matrix before the first step: zero.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn new<O: Ops<Tensor = T>>(ops: &O, spec: StateSpec, rows: usize, columns: usize) -> Result<Self> {
        let data = match spec.format {
            StateFormat::F32 => Data::F32(ops.zeros(rows, columns)?),
        };
        Ok(Self { name: spec.name, data })
    }

    /// The sets of values that it is saved as.
    pub fn saved_sets<O: Ops<Tensor = T>>(&self, ops: &O) -> Vec<SavedSet> {
        let set = |ending: &str, dtype, values| SavedSet { name: format!("{}{ending}", self.name), dtype, values };
        match &self.data {
            Data::F32(tensor) => {
                let (rows, columns) = ops.shape(tensor);
                vec![set("", StateDtype::F32, rows * columns)]
            }
        }
    }

    /// A copy of the set of values at this index of [`StateTensor::saved_sets`].
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn read<O: Ops<Tensor = T>>(&self, ops: &O, set: usize) -> Result<StateValues> {
        match (&self.data, set) {
            (Data::F32(tensor), _) => Ok(StateValues::F32(ops.read(tensor)?)),
        }
    }

    /// Overwrites a set with saved values, of its dtype and number.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn write<O: Ops<Tensor = T>>(&mut self, ops: &O, set: usize, values: &StateValues) -> Result {
        match (&mut self.data, set, values) {
            (Data::F32(tensor), _, StateValues::F32(values)) => ops.write(tensor, values),
        }
    }

    /// The tensor, where it is kept in f32.
    pub(crate) fn as_f32(&mut self) -> Option<&mut T> {
        match &mut self.data {
            Data::F32(tensor) => Some(tensor),
        }
    }

    /// Its elements for a kernel in main memory; `values` gives those of a tensor in f32.
    pub(crate) fn elements<'a>(&'a mut self, values: impl FnOnce(&'a mut T) -> &'a mut [f32]) -> StateElements<'a> {
        match &mut self.data {
            Data::F32(tensor) => StateElements::F32(values(tensor)),
        }
    }
}

/// Elements of a state tensor in main memory.
pub(crate) enum StateElements<'a> {
    F32(&'a mut [f32]),
}

impl<'a> StateElements<'a> {
    /// Splits them into runs of so many elements, a multiple of [`BLOCK`].
    pub(crate) fn runs(self, elements: usize) -> Vec<Self> {
        match self {
            Self::F32(values) => values.chunks_mut(elements).map(Self::F32).collect(),
        }
    }

    /// Decodes the elements of a range that begins at a multiple of [`BLOCK`].
    #[inline(always)]
    pub(crate) fn load(&self, first: usize, block: &mut [f32; BLOCK]) {
        match self {
            Self::F32(values) => {
                let values = &values[first..];
                let count = values.len().min(BLOCK);
                block[..count].copy_from_slice(&values[..count]);
            }
        }
    }

    /// Encodes elements again that were loaded.
    #[inline(always)]
    pub(crate) fn store(&mut self, first: usize, block: &[f32; BLOCK]) {
        match self {
            Self::F32(values) => {
                let values = &mut values[first..];
                let count = values.len().min(BLOCK);
                values[..count].copy_from_slice(&block[..count]);
            }
        }
    }
}
