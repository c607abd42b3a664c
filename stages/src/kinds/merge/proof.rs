//! The proof of a merge into a model that is not native: transformers computes the three models that are compared.

use std::fs;
use std::path::PathBuf;

use engine::context::{Artifact, Draft, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::protocol::WorkerEvent;
use model::batch::Batch;
use model::config::Outline;
use model::merge::{Measured, Proof};
use serde_json::json;

use super::{MergeParams, unproved};
use crate::compute::torch::Work;
use crate::compute::torch::job::{Compare, Job};

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
    pub(super) fn begin(
        params: &MergeParams,
        outline: &Outline,
        context: &mut StageContext,
    ) -> Result<Self, StageError> {
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
        let rows = self.work.folder.join("rows.jsonl");
        let lines: String = documents(batches).map(|ids| format!("{}\n", json!({ "input_ids": ids }))).collect();
        fs::write(&rows, lines).or_fail(Cause::Machine, || format!("cannot write `{}`", rows.display()))?;
        let common = self.work.common("f32", base.folder.clone(), Some(self.adapter.clone()), context);
        let job = Job::Compare(Compare { common, merged: draft.folder.clone(), rows });
        self.work.run(&job, context, &mut |event, context| {
            if let WorkerEvent::Progress { .. } = event {
                context.emit(event);
            }
            Ok(())
        })?;
        let measured = self.work.left("comparison.json")?;
        let measured: Measured = serde_json::from_str(&measured)
            .or_fail(Cause::Internal, || "cannot read what the torch worker has compared".to_owned())?;
        measured.proof(&draft.folder).map_err(unproved)
    }
}

/// The ids of each document.
fn documents(batches: &[Batch]) -> impl Iterator<Item = &[u32]> {
    batches.iter().flat_map(|batch| {
        let mut rest = batch.input_ids.as_slice();
        batch.document_lengths.iter().map(move |length| {
            let (document, behind) = rest.split_at(*length);
            rest = behind;
            document
        })
    })
}
