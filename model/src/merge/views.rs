//! The two models that a merged checkpoint is compared with, as sources of weights: the base that the adapters go with,
//! and the merge before its rounding.

use super::delta::{Share, merge_rows};
use super::plan::TensorChange;
use super::{Merge, block_rows};
use crate::checkpoint::{CheckpointError, Rows};
use crate::decoder::Weights;

/// The base without its adapters' deltas, under the names of the merged checkpoint: a head that is untied is there
/// twice, and modules that were trained as a whole are in their place.
pub(super) struct Base<'a>(pub(super) &'a Merge<'a>);

/// The merged weights in f32, as they were before they were rounded.
pub(super) struct Unrounded<'a>(pub(super) &'a Merge<'a>);

impl Weights for Base<'_> {
    fn rows<'a>(&'a self, name: &str, shape: &[usize], first: usize) -> Result<Box<dyn Rows + 'a>, CheckpointError> {
        base_rows(self.0, name, shape, first)
    }
}

impl Weights for Unrounded<'_> {
    fn rows<'a>(&'a self, name: &str, shape: &[usize], first: usize) -> Result<Box<dyn Rows + 'a>, CheckpointError> {
        let base = base_rows(self.0, name, shape, first)?;
        match self.0.plan.targets.get(name).map(|target| (&target.change, target.row_elements())) {
            Some((TensorChange::Shares(shares), columns)) => Ok(Box::new(Merged { base, first, columns, shares })),
            Some((TensorChange::None | TensorChange::Saved(_), _)) | None => Ok(base),
        }
    }
}

fn base_rows<'a>(
    merge: &'a Merge<'_>,
    name: &str,
    shape: &[usize],
    first: usize,
) -> Result<Box<dyn Rows + 'a>, CheckpointError> {
    let Some(target) = merge.plan.targets.get(name) else { return merge.checkpoint.rows(name, shape, first) };
    match target.change {
        TensorChange::Saved(values) => {
            let columns = target.row_elements();
            Ok(Box::new(Held { values: &values[first * columns..], columns }))
        }
        TensorChange::None | TensorChange::Shares(_) => merge.checkpoint.rows(&target.source, shape, first),
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
