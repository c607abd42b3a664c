//! The native backend: one rank, in this process.

use std::path::Path;
use std::sync::Arc;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use model::batch::{Batch, TargetScope};
use model::blocks::Blocks;
use model::loss::DocumentObjective;
use model::scoring::{Context, Scorer as Continuations};
use model::trainer::{DocumentBatch, DocumentReport, LossScalerState, Phase, StepReport, Trainer};

use super::{
    DocumentWork, Learner, Opened, PeakMemory, Ranks, Restored, Rounds, Scored, ScoredDocuments, Scorer, Scores,
    StepWork, Written, rows_of, score_not_finite,
};
use crate::compute::inference::{ContinuationScores, not_scored};
use crate::compute::resources::peak_resident_bytes;
use crate::kinds::train::inputs::Inputs;
use crate::kinds::train::parameters::Train;
use crate::kinds::train::workers::{ProcessGroup, Workers};
use crate::kinds::train::{failure, prepare, state};

/// Loads the model into this process, as one of the stage's workers.
pub(in crate::kinds::train) fn open<B: Blocks>(
    params: &Train,
    ops: Arc<B>,
    mut workers: Workers,
    inputs: &Inputs,
    context: &mut StageContext,
) -> Result<Opened, StageError> {
    context.record("kernel_set", ops.describe());
    context.record("threads", context.threads());
    let process_group = workers.process_group();
    let computed_by = computed_by(params, &*ops, process_group.ranks());
    let (trainer, adapter) = workers.load(|| prepare::trainer(params, ops, &inputs.model, context))?;
    let trainer = trainer.together(workers.into_collective());
    let learner = Native { trainer, process_group, rows: Vec::new(), continuations: Continuations::default() };
    Ok(Opened { learner: Box::new(learner), adapter, computed_by })
}

/// What the last digits depend on: another split of a step adds in another order.
fn computed_by<B: Blocks>(params: &Train, ops: &B, ranks: &Ranks) -> String {
    let by = format!("{}, micro-batches of {}", ops.describe(), ranks.rows_at_once(params.micro_batch_size));
    if ranks.size == 1 { by } else { format!("{by}, {} workers", ranks.size) }
}

struct Native<B: Blocks> {
    trainer: Trainer<B>,
    process_group: ProcessGroup,
    /// The rows of the step, for messages.
    rows: Vec<u64>,
    /// What scoring keeps from call to call, of the weights as they are.
    continuations: Continuations<B>,
}

impl<B: Blocks> Learner for Native<B> {
    fn ranks(&self) -> &Ranks {
        self.process_group.ranks()
    }

    fn barrier(&mut self) -> Result<(), StageError> {
        self.trainer.collective().barrier().map_err(failure::of_workers)
    }

    fn accumulate(&mut self, work: StepWork, context: &mut StageContext) -> Result<(), StageError> {
        self.rows = work.rows;
        for batch in work.micro_batches.into_iter().flatten() {
            context.stop_if_cancelled()?;
            self.trainer
                .accumulate(&batch)
                .map_err(|error| failure::of_micro_batch(error, &rows_of(&batch), &batch))?;
        }
        Ok(())
    }

    fn accumulate_documents(
        &mut self,
        work: DocumentWork,
        objective: &dyn DocumentObjective,
        context: &mut StageContext,
    ) -> Result<DocumentReport, StageError> {
        context.stop_if_cancelled()?;
        self.rows = work.rows;
        let batches: Vec<DocumentBatch> = work.micro_batches.into_iter().flatten().collect();
        let report = self.trainer.accumulate_documents(&batches, objective);
        report.map_err(|error| failure::of_rows(error, &self.rows))
    }

    fn step(
        &mut self,
        learning_rate: f64,
        _: Option<StepWork>,
        _: &mut StageContext,
    ) -> Result<StepReport, StageError> {
        self.continuations = Continuations::default();
        self.trainer.step(learning_rate).map_err(|error| failure::of_rows(error, &self.rows))
    }

    fn score(&mut self, step: u64, rounds: &mut Rounds<'_>, context: &mut StageContext) -> Result<Scored, StageError> {
        let (mut nll, mut target_tokens) = (0.0, 0.0);
        loop {
            self.trainer.collective().note(step, Phase::Validation);
            let Some(round) = rounds(context)? else { break };
            for batch in round.into_iter().filter(|batch| batch.tokens() > 0) {
                let scores = self.trainer.decoder_mut().score(&batch).map_err(|error| {
                    StageError::new(Cause::Machine, "cannot score the validation rows").with_source(error)
                })?;
                let of_batch: f64 = scores.iter().map(|score| f64::from(score.nll)).sum();
                if !of_batch.is_finite() {
                    return Ok(Scored::NotFinite { loss: of_batch, rows: rows_of(&batch) });
                }
                nll += of_batch;
                target_tokens += scores.len() as f64;
            }
        }
        let mut totals = [nll, target_tokens];
        self.trainer.collective().note(step, Phase::SumOfValidation);
        self.trainer.collective().sum_totals(&mut totals).map_err(failure::of_workers)?;
        let [nll, target_tokens] = totals;
        Ok(Scored::Finite(Scores { nll, target_tokens: target_tokens as u64 }))
    }

    fn score_documents(
        &mut self,
        round: &[Batch],
        scorer: Scorer,
        scope: TargetScope,
        _: &mut StageContext,
    ) -> Result<Vec<ScoredDocuments>, StageError> {
        let decoder = self.trainer.decoder_mut();
        let mut scored = |batch: &Batch| {
            let scores = match scorer {
                Scorer::Policy => decoder.score_documents(batch, scope),
                Scorer::Base => decoder.without_adapter(|base| base.score_documents(batch, scope)),
            };
            let scores = scores.or_fail(Cause::Machine, || "cannot score rows of preferences".to_owned())?;
            match scores.iter().all(|(_, score)| score.log_prob.is_finite()) {
                true => Ok(scores),
                false => Err(score_not_finite(batch)),
            }
        };
        // A decoder has no batch of nothing.
        let of_batch = |batch: &Batch| if batch.tokens() == 0 { Ok(Vec::new()) } else { scored(batch) };
        round.iter().map(of_batch).collect()
    }

    fn score_continuations(&mut self, contexts: &[Context<'_>]) -> Result<ContinuationScores, StageError> {
        self.continuations.score(self.trainer.decoder(), contexts).map_err(not_scored)
    }

    fn share(&mut self, values: &mut [f64]) -> Result<(), StageError> {
        self.trainer.share(values).map_err(|error| failure::of_rows(error, &[]))
    }

    fn save(&mut self, folder: &Path, written: Written, _: &mut StageContext) -> Result<Vec<String>, StageError> {
        let tensors = self.trainer.trained_tensors();
        let sets = match written {
            Written::Values => vec![state::VALUES.to_owned()],
            Written::State => state::sets(&tensors),
        };
        let write = |set: String| {
            let file = format!("{set}{}", state::TENSORS);
            state::write_tensors(&folder.join(&file), &tensors, &set).map_err(state::failure)?;
            Ok(file)
        };
        sets.into_iter().map(write).collect()
    }

    fn restore(&mut self, saved: Restored, _: &mut StageContext) -> Result<(), StageError> {
        let Restored { files, optimizer_steps, loss_scaler } = saved;
        self.continuations = Continuations::default();
        let tensors = state::read_tensors(&files).map_err(state::failure)?;
        let restored = self.trainer.restore(optimizer_steps, tensors);
        restored.or_fail(Cause::Internal, || "cannot take up the saved state".to_owned())?;
        if let Some(scaler) = loss_scaler {
            self.trainer.restore_loss_scaler(scaler);
        }
        Ok(())
    }

    fn check_frozen(&mut self, _: &mut StageContext) -> Result<(), StageError> {
        self.trainer.check_frozen().map_err(|error| failure::of_rows(error, &[]))
    }

    fn optimizer_steps(&self) -> u64 {
        self.trainer.steps()
    }

    fn loss_scaler(&self) -> Option<LossScalerState> {
        self.trainer.loss_scaler()
    }

    fn peak_memory(&self) -> Option<PeakMemory> {
        let bytes = peak_resident_bytes()? + self.process_group.peak_bytes_of_others();
        Some(PeakMemory { bytes, rank: None })
    }

    fn close(self: Box<Self>, _: &mut StageContext) -> Result<(), StageError> {
        Ok(())
    }
}
