//! Losses of preferences in a run: what the reference makes of each document, computed once and kept, and validation.
//!
//! The reference is scored in the micro-batches of the run's first epoch, so that a policy that still is the reference
//! has exactly no margin in the first step.

use std::fs;
use std::path::{Path, PathBuf};

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use model::batch::{Batch, TargetScope};
use model::loss::{Compared, DocumentObjective, DocumentScore, StepTotals};
use serde::Serialize;

use super::learner::{Learner, Rounds, ScoredDocuments, Scorer, rows_of};
use super::parameters::{BestBy, Train};
use crate::compute::quantize::TrainQuantize;
use crate::data::artifact::TokensReader;
use crate::kinds::log_probs::{Record, Scored, identity};

/// What is logged of the documents of a step, or of the validation rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Mean implicit reward of chosen (desirable) responses.
    #[serde(rename = "rewards/chosen")]
    chosen_reward: Option<f64>,
    #[serde(rename = "rewards/rejected")]
    rejected_reward: Option<f64>,
    /// The difference of the two.
    #[serde(rename = "rewards/margins")]
    pub(super) margin: Option<f64>,
    /// Share of pairs whose chosen response has the larger reward; a tie is none.
    #[serde(rename = "rewards/accuracies", skip_serializing_if = "Option::is_none")]
    pub(super) accuracy: Option<f64>,
    /// Mean summed log-probability of chosen responses.
    #[serde(rename = "log_probs/chosen")]
    chosen_log_prob: Option<f64>,
    #[serde(rename = "log_probs/rejected")]
    rejected_log_prob: Option<f64>,
    /// The estimate of the divergence from the reference, for KTO.
    #[serde(rename = "kl", skip_serializing_if = "Option::is_none")]
    divergence: Option<f64>,
}

impl Figures {
    pub(super) fn of(compared: &Compared) -> Self {
        let Compared { chosen, rejected, pairs, mismatched, .. } = *compared;
        let mean = |sum: f64, count: f64| (count > 0.0).then(|| sum / count);
        let chosen_reward = mean(compared.chosen_reward, chosen);
        let rejected_reward = mean(compared.rejected_reward, rejected);
        Self {
            chosen_reward,
            rejected_reward,
            margin: chosen_reward.zip(rejected_reward).map(|(chosen, rejected)| chosen - rejected),
            accuracy: mean(compared.accurate, pairs),
            chosen_log_prob: mean(compared.chosen_log_prob, chosen),
            rejected_log_prob: mean(compared.rejected_log_prob, rejected),
            divergence: mean(compared.mismatched_gain, mismatched).map(|mean| mean.max(0.0)),
        }
    }

    /// One of them; `None` for the loss, which is none of these.
    pub(super) fn of_name(&self, by: BestBy) -> Option<f64> {
        match by {
            BestBy::Loss => None,
            BestBy::RewardsChosen => self.chosen_reward,
            BestBy::RewardsRejected => self.rejected_reward,
            BestBy::RewardsMargins => self.margin,
            BestBy::RewardsAccuracies => self.accuracy,
            BestBy::LogProbsChosen => self.chosen_log_prob,
            BestBy::LogProbsRejected => self.rejected_log_prob,
        }
    }

    /// For the line that a person reads.
    pub(super) fn line(&self) -> String {
        let margin = self.margin.map(|margin| format!(" margin: {margin:.4}"));
        let accuracy = self.accuracy.map(|accuracy| format!(" accuracy: {accuracy:.3}"));
        [margin, accuracy].into_iter().flatten().collect()
    }
}

/// Log-probabilities of the documents of a table of tokens, in its order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct LogProbs {
    /// The place of each row's first document, and behind the last row the number of all.
    first: Vec<usize>,
    response: Vec<f64>,
    /// Of all targets of the scope.
    all: Vec<f64>,
    /// What is known of the documents without a model; their log-probabilities are 0.
    documents: Vec<DocumentScore>,
    totals: StepTotals,
}

impl LogProbs {
    /// Those of no model yet.
    ///
    /// # Errors
    /// Fails where a row cannot be read.
    pub(super) fn unknown(rows: &mut TokensReader, scope: TargetScope) -> Result<Self, StageError> {
        let mut known = Self { first: vec![0], ..Self::default() };
        for row in rows.iter() {
            let row = row?;
            let mut batch = Batch::default();
            batch.push(0, &row);
            let from = known.documents.len();
            let of_document = |document: usize| {
                let (group, role) = (batch.group(document), batch.role(document));
                DocumentScore { group, role, ..DocumentScore::default() }
            };
            known.documents.extend((0..batch.document_lengths.len()).map(of_document));
            let targets = batch.targets_in(scope);
            for (&document, &response) in targets.documents.iter().zip(&targets.response) {
                let document = &mut known.documents[from + document as usize];
                document.targets += 1;
                document.response_targets += usize::from(response);
            }
            known.totals.add(StepTotals::of(&batch, scope));
            known.first.push(known.documents.len());
        }
        known.response = vec![0.0; known.documents.len()];
        known.all = vec![0.0; known.documents.len()];
        Ok(known)
    }

    /// Those that a stage of its own has made of these rows.
    ///
    /// # Errors
    /// Fails where it has other documents.
    pub(super) fn of_records(rows: &mut TokensReader, records: &[Record]) -> Result<Self, StageError> {
        let mut known = Self::unknown(rows, TargetScope::Response)?;
        let fits = |(document, record): (&DocumentScore, &Record)| document.response_targets as u64 == record.targets;
        if records.len() != known.documents.len() || !known.documents.iter().zip(records).all(fits) {
            return Err(StageError::bad_data("`reference.log_probs` has other documents than the rows"));
        }
        known.response = records.iter().map(|record| record.log_prob).collect();
        Ok(known)
    }

    /// Of the responses of a row's documents.
    pub(super) fn of_row(&self, row: u64) -> &[f64] {
        let row = row as usize;
        &self.response[self.first[row]..self.first[row + 1]]
    }

    /// Of the documents of a batch of these rows.
    pub(super) fn of_batch(&self, batch: &Batch) -> Vec<f64> {
        rows_of(batch).into_iter().flat_map(|row| self.of_row(row)).copied().collect()
    }

    /// Takes in what a learner makes of a round of batches of these rows.
    fn score(
        &mut self,
        round: &[Batch],
        scorer: Scorer,
        scope: TargetScope,
        learner: &mut dyn Learner,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let scores = learner.score_documents(round, scorer, scope, context)?;
        round.iter().zip(scores).for_each(|(batch, scores)| self.take_in(batch, scores));
        Ok(())
    }

    fn take_in(&mut self, batch: &Batch, scores: ScoredDocuments) {
        let (mut places, mut last) = (Vec::with_capacity(batch.rows.len()), None);
        for &row in &batch.rows {
            if last != Some(row) {
                places.extend(self.first[row as usize]..self.first[row as usize + 1]);
                last = Some(row);
            }
        }
        for (document, score) in scores {
            self.response[places[document]] = score.response_log_prob;
            self.all[places[document]] = score.log_prob;
        }
    }

    /// Gives each process what the others have computed.
    fn share(&mut self, learner: &mut dyn Learner) -> Result<(), StageError> {
        learner.share(&mut self.response)?;
        learner.share(&mut self.all)
    }

    /// The scores of all documents that have a target, beside those of a reference.
    fn scores(&self, reference: Option<&Self>) -> Vec<DocumentScore> {
        let of_document = |(index, known): (usize, &DocumentScore)| DocumentScore {
            response_log_prob: self.response[index],
            log_prob: self.all[index],
            reference_log_prob: reference.map(|reference| reference.response[index]),
            ..*known
        };
        self.documents.iter().enumerate().filter(|(_, known)| known.targets > 0).map(of_document).collect()
    }

    fn write(&self, path: &Path) -> Result<(), StageError> {
        let bytes: Vec<u8> = self.response.iter().flat_map(|value| value.to_le_bytes()).collect();
        let part = path.with_extension("part");
        let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, path));
        written.or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
    }

    /// Reads what [`LogProbs::write`] wrote; `false` where there is nothing of these documents.
    fn read(&mut self, path: &Path) -> bool {
        let Ok(bytes) = fs::read(path) else { return false };
        let values: Vec<f64> = bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
        let is_whole = values.len() == self.response.len() && bytes.len() == 8 * values.len();
        if is_whole && values.iter().all(|value| value.is_finite()) {
            self.response = values;
            return true;
        }
        false
    }
}

/// Fails where log-probabilities are not those that this run would compute itself; `adapter` is the one that the
/// reference has.
pub(super) fn check_scored(
    params: &Train,
    scored: &Artifact,
    rows: &Artifact,
    model: &Artifact,
    adapter: Option<&Artifact>,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let found = Scored::from_facts(&scored.description.facts)
        .ok_or_else(|| StageError::bad_data("`reference.log_probs` does not say what it was computed of"))?;
    let differs = [
        ("other tokens", found.data != identity(rows)),
        ("another model", found.model != identity(model)),
        ("another adapter", found.adapter != adapter.map(identity)),
        ("a base in another format", found.quantize != params.quantize.as_ref().map(TrainQuantize::fact)),
    ];
    if let Some((what, _)) = differs.into_iter().find(|(_, differs)| *differs) {
        let message = format!("`reference.log_probs` was computed of {what} than this stage's");
        let help = "give the `log_probs` stage the same `data`, `model`, `adapter` and `quantize`; with \
                    `reference: disabled` no adapter";
        return Err(StageError::bad_data(message).with_help(help));
    }
    let dtype = params.dtype.in_job();
    if found.dtype != dtype {
        context.warn(format!(
            "the reference was computed in {} by {}, and this run computes in {dtype}: margins do not begin at 0",
            found.dtype, found.computed_by
        ));
    }
    Ok(())
}

/// The micro-batches of a table of tokens to score, one for each rank that is fed at a time.
type Batches<'a> = dyn FnMut(&mut TokensReader) -> Result<Option<Vec<Batch>>, StageError> + 'a;

/// What a reference makes of the rows of a table: computed in these batches, or read where an earlier attempt kept it.
///
/// # Errors
/// Fails where a row cannot be read or scored, the disk refuses, or the user wants to stop.
pub(super) fn reference(
    rows: &mut TokensReader,
    name: &str,
    scorer: Scorer,
    batches: &mut Batches<'_>,
    learner: &mut dyn Learner,
    context: &mut StageContext,
) -> Result<LogProbs, StageError> {
    let scope = TargetScope::Response;
    let mut found = LogProbs::unknown(rows, scope)?;
    let path: PathBuf = context.working().join(format!("reference-{name}.f64"));
    // Every process reads the same file, before the leader may write it.
    let is_kept = found.read(&path);
    learner.barrier()?;
    if is_kept {
        return Ok(found);
    }
    let (mut done, total) = (0, rows.len());
    while let Some(round) = batches(rows)? {
        context.stop_if_cancelled()?;
        found.score(&round, scorer, scope, learner, context)?;
        done += round.iter().map(|batch| rows_of(batch).len() as u64).sum::<u64>();
        context.progress("reference rows", done, Some(total), None);
    }
    found.share(learner)?;
    if learner.ranks().is_rank_zero() {
        found.write(&path)?;
    }
    Ok(found)
}

/// The loss of an objective over all rows of a table, and what is logged of them.
///
/// # Errors
/// Fails where a row cannot be read or scored, or the documents do not fit the objective.
pub(super) fn validate(
    known: &LogProbs,
    reference: Option<&LogProbs>,
    objective: &dyn DocumentObjective,
    rounds: &mut Rounds<'_>,
    learner: &mut dyn Learner,
    context: &mut StageContext,
) -> Result<(f64, Figures), StageError> {
    let mut found = known.clone();
    while let Some(round) = rounds(context)? {
        found.score(&round, Scorer::Policy, objective.scope(), learner, context)?;
    }
    found.share(learner)?;
    let scores = found.scores(reference);
    let losses = objective.losses(&scores, &known.totals);
    let losses = losses.or_fail(Cause::BadData, || "the validation rows cannot be compared".to_owned())?;
    let loss = losses.iter().map(|document| document.loss).sum();
    Ok((loss, Figures::of(&objective.compared(&scores))))
}
