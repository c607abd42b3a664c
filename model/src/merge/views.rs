//! The models that a merged checkpoint is compared with, as sources of weights: the base that the adapters go with, the
//! merge before its rounding, and a merge into other weights.

use half::f16;

use super::delta::{Share, merge_rows};
use super::plan::{RowValues, TensorChange};
use super::{Merge, block_rows};
use crate::checkpoint::{Checkpoint, CheckpointError, Dtype, Rows};
use crate::cpu::nearest;
use crate::decoder::Weights;

/// A base without the adapters' deltas, under the names of the merged checkpoint: a head that is untied is there twice,
/// and modules that were trained as a whole are in their place.
pub(super) struct Base<'a> {
    merge: &'a Merge<'a>,
    checkpoint: &'a Checkpoint,
}

/// A base with the adapters' deltas.
pub(super) struct WithDeltas<'a> {
    base: Base<'a>,
    rounding: Rounding,
}

/// Whether weights are rounded to what the merged checkpoint stores them as.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounding {
    None,
    AsStored,
}

impl<'a> Base<'a> {
    /// That of a merge, of these weights: what is merged into, or could be.
    pub(super) fn new(merge: &'a Merge<'a>, checkpoint: &'a Checkpoint) -> Self {
        Self { merge, checkpoint }
    }

    /// With the adapters' deltas.
    pub(super) fn merged(self, rounding: Rounding) -> WithDeltas<'a> {
        WithDeltas { base: self, rounding }
    }
}

impl Weights for Base<'_> {
    fn rows<'a>(&'a self, name: &str, shape: &[usize], first: usize) -> Result<Box<dyn Rows + 'a>, CheckpointError> {
        let Some(target) = self.merge.plan.targets.get(name) else { return self.checkpoint.rows(name, shape, first) };
        match target.change {
            TensorChange::Saved(values) => {
                let columns = target.row_elements();
                Ok(Box::new(Held { values: &values[first * columns..], columns }))
            }
            TensorChange::Rows(rows) => {
                let base = self.checkpoint.rows(&target.source, shape, first)?;
                Ok(Box::new(Replaced { base, first, columns: target.row_elements(), rows }))
            }
            TensorChange::None | TensorChange::Shares(_) => self.checkpoint.rows(&target.source, shape, first),
        }
    }
}

impl Weights for WithDeltas<'_> {
    fn rows<'a>(&'a self, name: &str, shape: &[usize], first: usize) -> Result<Box<dyn Rows + 'a>, CheckpointError> {
        let rows = self.base.rows(name, shape, first)?;
        let Some(target) = self.base.merge.plan.targets.get(name) else { return Ok(rows) };
        let rows: Box<dyn Rows + 'a> = match &target.change {
            TensorChange::Shares(shares) => {
                Box::new(Merged { base: rows, first, columns: target.row_elements(), shares })
            }
            TensorChange::None | TensorChange::Saved(_) | TensorChange::Rows(_) => rows,
        };
        Ok(match self.rounding {
            Rounding::None => rows,
            Rounding::AsStored => Box::new(Rounded { rows, dtype: target.dtype }),
        })
    }
}

/// Rows that an adapter holds.
struct Held<'a> {
    values: &'a [f32],
    columns: usize,
}

impl Rows for Held<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        values.copy_from_slice(&self.values[first * self.columns..][..values.len()]);
        Ok(())
    }
}

/// Rows of the base, some of which were trained by themselves.
struct Replaced<'a> {
    base: Box<dyn Rows + 'a>,
    /// The row of the weight that is the first here.
    first: usize,
    columns: usize,
    rows: RowValues<'a>,
}

impl Rows for Replaced<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        self.base.read(first, values)?;
        self.rows.put_into(values, self.first + first, self.columns);
        Ok(())
    }
}

/// Rows of the base with the adapters' deltas.
struct Merged<'a> {
    base: Box<dyn Rows + 'a>,
    /// The row of the weight that is the first here.
    first: usize,
    columns: usize,
    shares: &'a [Share<'a>],
}

impl Rows for Merged<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        self.base.read(first, values)?;
        let (block, mut delta) = (block_rows(self.columns), Vec::new());
        for (index, values) in values.chunks_mut(block * self.columns).enumerate() {
            merge_rows(values, self.first + first + index * block, self.shares, &mut delta);
        }
        Ok(())
    }
}

/// Rows that are rounded to a type.
struct Rounded<'a> {
    rows: Box<dyn Rows + 'a>,
    dtype: Dtype,
}

impl Rows for Rounded<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        self.rows.read(first, values)?;
        match self.dtype {
            Dtype::BF16 => values.iter_mut().for_each(|value| *value = nearest(*value).to_f32()),
            Dtype::F16 => values.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32()),
            _ => {}
        }
        Ok(())
    }
}
