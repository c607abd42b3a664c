//! The proof of a merge into a model that is not native: transformers computes the three models that are compared.

use std::collections::BTreeSet;
use std::path::PathBuf;

use engine::context::{Artifact, Draft, StageContext};
use engine::error::{Cause, StageError};
use model::batch::{Batch, TargetScope};
use model::config::Outline;
use model::merge::{Measured, MergeInto, Proof};
use serde::Deserialize;
use serde_json::json;

use super::{Merge, unproved};
use crate::compute::quantize::QuantizeParams;
use crate::compute::torch::batches::encode;
use crate::compute::torch::job::{Infer, Job, Quantize};
use crate::compute::torch::{Connection, Work};

/// The torch worker, found before anything is written.
pub(super) struct Worker {
    work: Work,
    adapter: PathBuf,
    /// The quantised base that the adapter was trained on, and what it is merged into.
    trained_on: Option<(Quantize, MergeInto)>,
}

impl Worker {
    /// Finds the worker.
    ///
    /// # Errors
    /// Fails if it is not installed, or it cannot prove such a merge: of several adapters, or of a share of one.
    pub(super) fn begin(
        params: &Merge,
        outline: &Outline,
        trained_on: Option<&(QuantizeParams, MergeInto)>,
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
        let of_worker = |(base, into): &(QuantizeParams, MergeInto)| match base.of_worker() {
            Some(quantize) => Ok((quantize, *into)),
            None => {
                let (format, model_type) = (base.base.name(), &outline.model_type);
                let message = format!(
                    "an adapter on a base in `{format}` can be merged into native models, and not `{model_type}`"
                );
                Err(StageError::new(Cause::BadParameters, message))
            }
        };
        let trained_on = trained_on.map(of_worker).transpose()?;
        context.log(&format!("`{}`: proved by transformers; not native", outline.model_type));
        Ok(Self { work: Work::begin("torch", context)?, adapter, trained_on })
    }

    /// The base as the worker takes it, with the adapter on it if asked.
    fn job(&self, base: &Artifact, adapter: Option<PathBuf>) -> Job {
        let quantize = match &self.trained_on {
            Some((quantize, MergeInto::Dequantized)) => Some(quantize.clone()),
            Some((_, MergeInto::Original)) | None => None,
        };
        let widen = quantize.is_some();
        Job::Infer(Infer { common: self.work.common("f32", base.folder.clone(), quantize), widen, adapter })
    }

    /// The paths of the layers that training had quantised: what these are is known to transformers alone.
    ///
    /// # Errors
    /// Fails if the worker does.
    pub(super) fn quantized_layers(
        &self,
        base: &Artifact,
        context: &mut StageContext,
    ) -> Result<BTreeSet<String>, StageError> {
        #[derive(Deserialize)]
        struct Answer {
            layers: BTreeSet<String>,
        }
        let (mut connection, _) = Connection::open(&self.work, &self.job(base, None), context)?;
        connection.end_when_cancelled();
        connection.request(&json!({"request": "widened_layers"}), &[]);
        let Answer { layers } = connection.answer(context)?;
        connection.close(context)?;
        Ok(layers)
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
        let job = self.job(base, Some(self.adapter.clone()));
        let (mut connection, _) = Connection::open(&self.work, &job, context)?;
        connection.end_when_cancelled();
        let (ranks, payload) = encode([batches], TargetScope::Response);
        let trained_on = self.trained_on.as_ref().map(|(quantize, _)| quantize);
        let request = json!({"request": "compare", "merged": draft.folder, "trained_on": trained_on, "ranks": ranks});
        connection.request(&request, &payload);
        let measured: Measured = connection.answer(context)?;
        connection.close(context)?;
        measured.proof(&draft.folder).map_err(unproved)
    }
}
