//! The two models that a merged checkpoint is compared with, as sources of weights: the base that the adapters go with, and the
//! merge before its rounding.

use std::ops::Range;

use rayon::prelude::*;

use super::delta::merge_rows;
use super::plan::TensorChange;
use super::{Merge, block_rows};
use crate::checkpoint::CheckpointError;
use crate::decoder::Weights;

/// The base without its adapters' deltas, under the names of the merged checkpoint: a head that is untied is there twice, and
/// modules that were trained as a whole are in their place.
pub(super) struct Base<'a>(pub(super) &'a Merge<'a>);

/// The merged weights in f32, as they were before they were rounded.
pub(super) struct Unrounded<'a>(pub(super) &'a Merge<'a>);

impl Weights for Base<'_> {
    fn rows(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let Some(target) = self.0.plan.targets.get(name) else { return self.0.checkpoint.rows(name, shape, rows) };
        match target.change {
            TensorChange::Saved(values) => {
                let columns = target.row_elements();
                Ok(values[rows.start * columns..rows.end * columns].to_vec())
            }
            TensorChange::None | TensorChange::Shares(_) => self.0.checkpoint.rows(&target.source, shape, rows),
        }
    }
}

impl Weights for Unrounded<'_> {
    fn rows(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let first = rows.start;
        let mut values = Base(self.0).rows(name, shape, rows)?;
        if let Some(target) = self.0.plan.targets.get(name)
            && let TensorChange::Shares(shares) = &target.change
        {
            let columns = target.row_elements();
            let block = block_rows(columns);
            let blocks = values.par_chunks_mut(block * columns).enumerate();
            blocks.for_each_init(Vec::new, |delta, (index, values)| {
                merge_rows(values, first + index * block, shares, delta);
            });
        }
        Ok(values)
    }
}
