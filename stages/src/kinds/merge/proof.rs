//! The proof of a merge into a model that is not native: transformers computes the three models that are compared.

use std::path::PathBuf;

use engine::context::{Artifact, Draft, StageContext};
use engine::error::{Cause, StageError};
use model::batch::{Batch, TargetScope};
use model::config::Outline;
use model::merge::{Measured, Proof};
use serde_json::json;

use super::{Merge, unproved};
use crate::compute::torch::batches::encode;
use crate::compute::torch::job::{Infer, Job};
use crate::compute::torch::{Connection, Work};

/// The torch worker, found before anything is written.
pub(super) struct Worker {
    work: Work,
    adapter: PathBuf,
}

impl Worker {
    /// Finds the worker.
    ///
    /// # Errors
    /// Fails if it is not installed, or it cannot prove such a merge: of several adapters, or of a share of one.
    pub(super) fn begin(params: &Merge, outline: &Outline, context: &mut StageContext) -> Result<Self, StageError> {
        let weighted = params.weighted();
        let [(adapter, 1.0)] = weighted.as_slice() else {
            let message = format!(
                "`{}` is not computed natively: only one adapter with weight 1 can be merged into it",
                outline.model_type
            );
            return Err(StageError::new(Cause::BadParameters, message));
        };
        let adapter = context.open(adapter)?.folder;
        context.log(&format!("`{}`: proved by transformers; not native", outline.model_type));
        Ok(Self { work: Work::begin("torch", context)?, adapter })
    }

    /// Compares base with adapter and the merged checkpoint, on the documents of the batches.
    ///
    /// # Errors
    /// Fails if the worker does, or there is nothing to compare on.
    pub(super) fn prove(
        self,
        base: &Artifact,
        draft: &Draft,
        batches: &[Batch],
        context: &mut StageContext,
    ) -> Result<Proof, StageError> {
        let common = self.work.common("f32", base.folder.clone(), None);
        let job = Job::Infer(Infer { common, adapter: Some(self.adapter.clone()) });
        let (mut connection, _) = Connection::open(&self.work, &job, context)?;
        connection.end_when_cancelled();
        let (ranks, payload) = encode([batches], TargetScope::Response);
        connection.request(&json!({"request": "compare", "merged": draft.folder, "ranks": ranks}), &payload);
        let measured: Measured = connection.answer(context)?;
        connection.close(context)?;
        measured.proof(&draft.folder).map_err(unproved)
    }
}
