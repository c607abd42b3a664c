//! What a training session has done by a backend: gradients, updates, scores, and values written and read.
//!
//! A session decides everything else (rows, learning rates, validation, what is saved and when), and is the same for
//! all backends. A learner is one rank, of which each runs the session in a process of its own ([`native`]), or stands
//! for all ranks ([`torch`]): [`Ranks::fed`] says whose micro-batches the session hands it.

#[cfg(test)]
mod conformance;
mod documents;
mod native;
mod stopped;
mod torch;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use model::batch::{Batch, TargetScope};
use model::loss::{DocumentObjective, DocumentScore};
use model::peft::AdapterConfig;
use model::scoring::Context;
use model::trainer::{DocumentBatch, DocumentReport, LossScalerState, StepReport};
use serde::Serialize;

use super::rows::listed;
use crate::compute::inference::ContinuationScores;
pub(super) use native::open as open_native;
pub(super) use torch::open as open_torch;

/// The ranks that train together, as this process sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ranks {
    /// How many there are.
    pub size: usize,
    /// Those whose micro-batches this process hands over.
    pub fed: Range<usize>,
}

impl Ranks {
    /// Whether this is the stage's own process, which alone writes and speaks.
    pub(super) fn is_rank_zero(&self) -> bool {
        self.fed.start == 0
    }

    /// Rows that each rank computes at once, of so many over all of them together.
    pub(super) fn rows_at_once(&self, micro_batch_size: usize) -> usize {
        micro_batch_size.div_ceil(self.size)
    }
}

/// What the ranks compute in one optimizer step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct StepWork {
    /// The rows of the step, those of other ranks among them.
    pub rows: Vec<u64>,
    /// The micro-batches of each rank that is fed, in their order.
    pub micro_batches: Vec<Vec<Batch>>,
    /// Targets of the step over all ranks.
    pub target_tokens: usize,
    /// The sum of their weights; their number where all weights are 1.
    pub weight: f64,
}

/// The documents of one optimizer step, for a loss of whole documents: the micro-batches of each rank that is fed. A
/// group of documents is in one of them.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct DocumentWork {
    /// The rows of the step, those of other ranks among them.
    pub rows: Vec<u64>,
    pub micro_batches: Vec<Vec<DocumentBatch>>,
}

/// Which model scores documents, without any dropout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Scorer {
    /// The one that is trained, as it is now.
    Policy,
    /// The one that an adapter is trained on, without it.
    Base,
}

/// The scores of the documents of a batch that have a target, each with its place in the batch.
pub(super) type ScoredDocuments = Vec<(usize, DocumentScore)>;

/// Micro-batches to score, one for each rank that is fed at a time.
pub(super) type Rounds<'a> = dyn FnMut(&StageContext) -> Result<Option<Vec<Batch>>, StageError> + 'a;

/// The score of all rounds over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Scores {
    /// Summed negative log-likelihood of the targets, in nats.
    pub nll: f64,
    pub target_tokens: u64,
}

/// What scoring came to.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scored {
    Finite(Scores),
    /// The loss of a micro-batch of these rows is infinite or not a number.
    NotFinite {
        loss: f64,
        rows: Vec<u64>,
    },
}

/// Which values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    /// Those of what is trained, by the names that the base's files give them: for a result.
    Values,
    /// These and the optimizer's state, as the learner takes them up again: [`Learner::state_has_names_of_files`].
    State,
}

/// Files of saved tensors: by the name of the set of values that they hold, in the order of their shards.
pub(super) type TensorFiles = BTreeMap<String, Vec<PathBuf>>;

/// A saved state as a learner takes it up.
#[derive(Debug, Clone)]
pub(super) struct Restored {
    pub files: TensorFiles,
    /// Updates so far.
    pub optimizer_steps: u64,
    pub loss_scaler: Option<LossScalerState>,
}

/// The most memory used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PeakMemory {
    pub bytes: u64,
    /// The rank that used it, where it is that of a single one of several.
    pub rank: Option<usize>,
}

/// A model in training.
///
/// With several processes all make the same calls in the same order.
pub(super) trait Learner {
    /// The ranks that train it.
    fn ranks(&self) -> &Ranks;

    /// Returns when every process of the stage has come here.
    ///
    /// # Errors
    /// Fails where one of them is gone.
    fn barrier(&mut self) -> Result<(), StageError>;

    /// Whether it begins with the work of the next step while the session still waits for the report of this one.
    fn works_ahead(&self) -> bool {
        false
    }

    /// Adds the gradients of a step's micro-batches to those of the step.
    ///
    /// # Errors
    /// Fails where a loss is not finite, the device fails, or the user wants to stop, which is looked for between
    /// micro-batches: a step can take longer than the time that is left then.
    fn accumulate(&mut self, work: StepWork, context: &mut StageContext) -> Result<(), StageError>;

    /// Adds the gradients of an objective over all documents of a step, once in the step. The loss that is returned is
    /// that of the ranks that are fed; what is logged is of all of them.
    ///
    /// # Errors
    /// As [`Learner::accumulate`], and where the documents do not fit the objective.
    fn accumulate_documents(
        &mut self,
        work: DocumentWork,
        objective: &dyn DocumentObjective,
        context: &mut StageContext,
    ) -> Result<DocumentReport, StageError>;

    /// Updates what is trained by the gradients since the last step, those of all ranks. `ahead` is the work of the
    /// next step, given to a learner that works ahead instead of [`Learner::accumulate`]ing it later.
    ///
    /// # Errors
    /// Fails where a gradient is not finite, a tensor does not move, or the device fails.
    fn step(
        &mut self,
        learning_rate: f64,
        ahead: Option<StepWork>,
        context: &mut StageContext,
    ) -> Result<StepReport, StageError>;

    /// Scores the micro-batches of all rounds without learning from them; `step`: the last whole one.
    ///
    /// # Errors
    /// Fails as `rounds` does, or where the device does.
    fn score(&mut self, step: u64, rounds: &mut Rounds<'_>, context: &mut StageContext) -> Result<Scored, StageError>;

    /// The scores of the documents that have a target, each with its place in its batch, of a batch for each rank that
    /// is fed.
    ///
    /// # Errors
    /// Fails where a score is not finite, or the device fails.
    fn score_documents(
        &mut self,
        round: &[Batch],
        scorer: Scorer,
        scope: TargetScope,
        context: &mut StageContext,
    ) -> Result<Vec<ScoredDocuments>, StageError>;

    /// The scores of the tokens of continuations by the model as it is, without any dropout: `[context][continuation]
    /// [token]`. One process may do so alone.
    ///
    /// # Errors
    /// Fails where a context does not fit the model, or the device fails.
    fn score_continuations(&mut self, contexts: &[Context<'_>]) -> Result<ContinuationScores, StageError>;

    /// Gives every process values of which one process each has, the others 0.
    ///
    /// # Errors
    /// Fails where a process is gone.
    fn share(&mut self, values: &mut [f64]) -> Result<(), StageError>;

    /// Writes values into an empty folder, flushed, and returns the names of the files: `SET.safetensors`, or
    /// `SET-00001-of-00002.safetensors` and so on, with each tensor whole and in one of them. The set of the trained
    /// values is [`super::state::VALUES`]; those of the optimizer's state have names of their own.
    ///
    /// # Errors
    /// Fails where the disk or the device does.
    fn save(&mut self, folder: &Path, written: Written, context: &mut StageContext) -> Result<Vec<String>, StageError>;

    /// Takes up a saved state.
    ///
    /// # Errors
    /// Fails where it is not one of this model's trained tensors; the learner is then not to be used.
    fn restore(&mut self, saved: Restored, context: &mut StageContext) -> Result<(), StageError>;

    /// Checks that everything frozen has the bits that it had when training began.
    ///
    /// # Errors
    /// Fails with the first tensor that has changed.
    fn check_frozen(&mut self, context: &mut StageContext) -> Result<(), StageError>;

    /// Whether the values of a saved state have the names that the base's files give them, so that they can be the
    /// result.
    fn state_has_names_of_files(&self) -> bool {
        true
    }

    /// Updates so far, skipped steps not among them.
    fn optimizer_steps(&self) -> u64;

    /// The loss scale and how it came about, where there is one.
    fn loss_scaler(&self) -> Option<LossScalerState>;

    /// The most memory that the ranks have used so far.
    fn peak_memory(&self) -> Option<PeakMemory>;

    /// Ends it; nothing is asked of it any more.
    ///
    /// # Errors
    /// Fails where the ranks do not end well.
    fn close(self: Box<Self>, context: &mut StageContext) -> Result<(), StageError>;
}

/// A learner with what is known of it.
pub(super) struct Opened {
    pub learner: Box<dyn Learner>,
    /// The settings of the adapter, where one is trained.
    pub adapter: Option<AdapterConfig>,
    /// What the last digits depend on: another split of a step adds in another order.
    pub computed_by: String,
}

/// A score of documents that is no number, in a batch.
fn score_not_finite(batch: &Batch) -> StageError {
    let help = format!("rows of its micro-batch: {}", listed(&rows_of(batch)));
    StageError::new(Cause::Numeric, "the log-probability of a response is not finite").with_help(help)
}

/// The rows of a batch, each once.
pub(super) fn rows_of(batch: &Batch) -> Vec<u64> {
    let mut rows = batch.rows.clone();
    rows.dedup();
    rows
}
