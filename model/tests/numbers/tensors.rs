//! A safetensors file of a reference implementation.

use std::collections::BTreeMap;
use std::path::Path;

use model::batch::Batch;
use safetensors::{Dtype, SafeTensors};

/// The dtype, shape and little-endian bytes of each tensor.
pub(crate) struct Tensors(BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Tensors {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let read = tensors
            .iter()
            .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())));
        Self(read.collect())
    }

    pub(crate) fn find(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(|(_, _, data)| data.as_slice())
    }

    pub(crate) fn bytes(&self, name: &str) -> &[u8] {
        self.find(name).unwrap_or_else(|| panic!("no `{name}`"))
    }

    pub(crate) fn shape(&self, name: &str) -> &[usize] {
        self.0.get(name).map(|(_, shape, _)| shape.as_slice()).unwrap_or_else(|| panic!("no `{name}`"))
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The values of a tensor of floats, widened.
    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        let data = self.bytes(name);
        match self.0[name].0 {
            Dtype::F32 => data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            Dtype::BF16 => data.as_chunks().0.iter().map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect(),
            Dtype::F16 => data.as_chunks().0.iter().map(|x| half::f16::from_le_bytes(*x).to_f32()).collect(),
            other => panic!("`{name}` in {other:?}"),
        }
    }

    pub(crate) fn integers(&self, name: &str) -> Vec<i64> {
        assert_eq!(self.shape(name).iter().product::<usize>() * 8, self.bytes(name).len(), "`{name}` is no i64");
        self.bytes(name).as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
    }

    /// The rows of a matrix of token ids.
    pub(crate) fn rows(&self, name: &str) -> Vec<Vec<u32>> {
        let ids: Vec<u32> = self.integers(name).into_iter().map(|id| id as u32).collect();
        ids.chunks(self.shape(name)[1]).map(<[u32]>::to_vec).collect()
    }

    /// The batch of this name, without groups, as row `row` of the data.
    pub(crate) fn batch(&self, row: u64, prefix: &str) -> Batch {
        let integers = |name: &str| self.integers(&format!("{prefix}.{name}"));
        let ids: Vec<u32> = integers("input_ids").into_iter().map(|id| id as u32).collect();
        let labels: Vec<i32> = integers("labels").into_iter().map(|label| label as i32).collect();
        let lengths: Vec<usize> = integers("document_lengths").into_iter().map(|length| length as usize).collect();
        let mut batch = Batch::default();
        batch.push_row(row, &ids, &labels, &lengths);
        batch
    }
}
