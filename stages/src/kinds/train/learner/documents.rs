//! A loss of whole documents on the torch worker: scores come back, weights go out.
//!
//! The worker knows no objective. It runs forward, says what each document scored, and holds what the backward needs
//! until it is told how much each document counts for; with that the next micro-batch is sent.

use engine::context::StageContext;
use engine::error::StageError;
use model::batch::{Batch, TargetScope};
use model::loss::{DocumentLoss, DocumentObjective, DocumentScore, Gathering, StepTotals, score_documents};
use model::ops::TokenScore;
use model::trainer::{DocumentBatch, DocumentReport, TrainError};
use serde::Deserialize;

use super::torch::Request;
use super::{DocumentWork, ScoredDocuments, rows_of};
use crate::compute::torch::Connection;
use crate::compute::torch::batches::encode;
use crate::kinds::train::failure;

/// The documents of a step, and who computes them.
pub(super) struct Documents<'a> {
    connection: &'a mut Connection,
    work: &'a DocumentWork,
    objective: &'a dyn DocumentObjective,
    scope: TargetScope,
    /// The number of the step, from 1.
    step: u64,
}

/// A document whose score is no number.
pub(super) struct NotFinite {
    document: usize,
}

/// What the worker says of a document that has a target.
#[derive(Clone, Copy, Deserialize)]
pub(super) struct Scored {
    /// Summed negative log-likelihood of its response targets, in nats; null where it is not finite.
    response_nll: Option<f64>,
    /// The same of all its targets.
    nll: Option<f64>,
}

impl<'a> Documents<'a> {
    pub(super) fn new(
        connection: &'a mut Connection,
        work: &'a DocumentWork,
        objective: &'a dyn DocumentObjective,
        step: u64,
    ) -> Self {
        Self { connection, work, objective, scope: objective.scope(), step }
    }

    /// Adds the gradients; returns what the documents gave, and the targets of the step.
    pub(super) fn accumulate(mut self, context: &mut StageContext) -> Result<(DocumentReport, usize), StageError> {
        let mut totals = StepTotals::default();
        let batches = || self.work.micro_batches.iter().flatten().map(|documents| &documents.batch);
        batches().for_each(|batch| totals.add(StepTotals::of(batch, self.scope)));
        let target_tokens = batches().map(Batch::target_tokens).sum();
        let report = match self.objective.gathering() {
            Gathering::Groups => self.accumulate_groups(&totals, context)?,
            Gathering::Step => self.accumulate_step(&totals, context)?,
        };
        if !report.loss.is_finite() {
            return Err(self.failure(self.not_finite(report.loss, Vec::new())));
        }
        Ok((report, target_tokens))
    }

    /// One forward and one backward for each micro-batch.
    fn accumulate_groups(
        &mut self,
        totals: &StepTotals,
        context: &mut StageContext,
    ) -> Result<DocumentReport, StageError> {
        let mut report = DocumentReport::default();
        self.score(0, true);
        for round in 0..self.rounds() {
            let scores = self.scores(round, context)?;
            let losses: Vec<Vec<DocumentLoss>> =
                scores.iter().map(|scores| self.losses(scores, totals)).collect::<Result<_, _>>()?;
            report.loss += losses.iter().flatten().map(|document| document.loss).sum::<f64>();
            scores.iter().for_each(|scores| report.compared.add(&self.objective.compared(scores)));
            self.weigh(&losses);
            if round + 1 < self.rounds() {
                self.score(round + 1, true);
            }
        }
        Ok(report)
    }

    /// A forward of all micro-batches for the scores, then one with a backward for each.
    fn accumulate_step(
        &mut self,
        totals: &StepTotals,
        context: &mut StageContext,
    ) -> Result<DocumentReport, StageError> {
        (0..self.rounds()).for_each(|round| self.score(round, false));
        let mut all = Vec::new();
        let mut counts = Vec::new();
        for round in 0..self.rounds() {
            for scores in self.scores(round, context)? {
                counts.push(scores.len());
                all.extend(scores);
            }
        }
        // Documents without groups are groups of their own over the whole step.
        if self.work.micro_batches.iter().flatten().all(|documents| documents.batch.groups.is_empty()) {
            all.iter_mut().enumerate().for_each(|(index, score)| score.group = index as u64);
        }
        let losses = self.losses(&all, totals)?;
        let (mut rest, mut counts) = (&losses[..], counts.into_iter());
        for round in 0..self.rounds() {
            let of_rank = |count| {
                let (own, others) = rest.split_at(count);
                rest = others;
                own.to_vec()
            };
            let of_round: Vec<_> = counts.by_ref().take(self.work.micro_batches.len()).map(of_rank).collect();
            self.score(round, true);
            self.weigh(&of_round);
        }
        for round in 0..self.rounds() {
            self.scores(round, context)?;
        }
        let loss = losses.iter().map(|document| document.loss).sum();
        Ok(DocumentReport { loss, compared: self.objective.compared(&all) })
    }

    /// The most micro-batches of a rank.
    fn rounds(&self) -> usize {
        self.work.micro_batches.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The micro-batch of each rank, if it has as many.
    fn round(&self, round: usize) -> impl Iterator<Item = Option<&DocumentBatch>> {
        self.work.micro_batches.iter().map(move |batches| batches.get(round))
    }

    /// Has a round scored.
    fn score(&mut self, round: usize, held: bool) {
        let of_rank = |documents: Option<&'a DocumentBatch>| {
            documents.map_or(&[][..], |documents| std::slice::from_ref(&documents.batch))
        };
        let work = self.work;
        let of_round = work.micro_batches.iter().map(|batches| of_rank(batches.get(round)));
        let (ranks, payload) = encode(of_round, self.scope);
        self.connection.request(&Request::ScoreDocuments { ranks: &ranks, held, scorer: None }, &payload);
    }

    /// The scores of a round by rank.
    fn scores(&mut self, round: usize, context: &mut StageContext) -> Result<Vec<Vec<DocumentScore>>, StageError> {
        let found: Vec<Vec<Scored>> = self.connection.answer(context)?;
        let of_rank = |(documents, scored): (Option<&DocumentBatch>, Vec<Scored>)| {
            let Some(DocumentBatch { batch, reference_log_probs }) = documents else { return Ok(Vec::new()) };
            let with_reference = |(document, score): (usize, DocumentScore)| {
                let reference_log_prob = reference_log_probs.get(document).copied();
                DocumentScore { reference_log_prob, ..score }
            };
            match scores(batch, self.scope, &scored) {
                Ok(scores) => Ok(scores.into_iter().map(with_reference).collect()),
                Err(NotFinite { document }) => {
                    Err(failure::of_micro_batch(self.not_finite(f64::NAN, vec![document]), &rows_of(batch), batch))
                }
            }
        };
        self.round(round).zip(found).map(of_rank).collect()
    }

    fn losses(&self, scores: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, StageError> {
        let losses = self.objective.losses(scores, totals);
        losses.map_err(|source| self.failure(TrainError::Objective { step: self.step, source }))
    }

    /// Has the gradients added of the round that is held.
    fn weigh(&mut self, losses: &[Vec<DocumentLoss>]) {
        let weights = |losses: &Vec<DocumentLoss>| -> Vec<[f64; 2]> {
            losses.iter().map(|loss| [loss.response_weight, loss.document_weight]).collect()
        };
        let ranks: Vec<_> = losses.iter().map(weights).collect();
        self.connection.request(&Request::Weigh { ranks: &ranks }, &[]);
    }

    fn not_finite(&self, loss: f64, documents: Vec<usize>) -> TrainError {
        TrainError::LossNotFinite { step: self.step, loss, documents, largest_gradient: None }
    }

    fn failure(&self, error: TrainError) -> StageError {
        failure::of_rows(error, &self.work.rows)
    }
}

/// The documents of a batch that have a target, with what the worker says of them.
pub(super) fn scores(batch: &Batch, scope: TargetScope, scored: &[Scored]) -> Result<ScoredDocuments, NotFinite> {
    let targets = batch.targets_in(scope);
    // What is known of them without a model, in the order of the answer.
    let mut found = score_documents(batch, &targets, &vec![TokenScore::default(); targets.len()], &[]);
    for ((document, score), scored) in found.iter_mut().zip(scored) {
        let (Some(response_nll), Some(nll)) = (scored.response_nll, scored.nll) else {
            return Err(NotFinite { document: *document });
        };
        (score.response_log_prob, score.log_prob) = (-response_nll, -nll);
    }
    Ok(found)
}
