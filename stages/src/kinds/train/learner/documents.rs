//! A loss of whole documents on the torch worker: scores come back, weights go out.
//!
//! The worker knows no objective. It runs forward, says what each document scored, and holds what the backward needs
//! until it is told how much each document counts for; with that the next micro-batch is sent.

use engine::context::StageContext;
use engine::error::StageError;
use model::batch::{Batch, TargetScope};
use model::loss::{DocumentLoss, DocumentObjective, DocumentScore, Gathering, StepTotals};
use model::trainer::{DocumentBatch, DocumentReport, TrainError};
use serde::Deserialize;

use super::DocumentWork;
use super::torch::Request;
use crate::compute::torch::Connection;
use crate::compute::torch::batches::encode;
use crate::kinds::train::failure;

/// The documents of a step, and who computes them.
pub(super) struct Documents<'a> {
    connection: &'a mut Connection,
    work: &'a DocumentWork,
    objective: &'a dyn DocumentObjective,
    scope: TargetScope,
}

/// What the worker says of a document that has a target.
#[derive(Clone, Copy, Deserialize)]
struct Scored {
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
    ) -> Self {
        Self { connection, work, objective, scope: objective.scope() }
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
        self.connection.request(&Request::ScoreDocuments { ranks: &ranks, held }, &payload);
    }

    /// The scores of a round by rank.
    fn scores(&mut self, round: usize, context: &mut StageContext) -> Result<Vec<Vec<DocumentScore>>, StageError> {
        let found: Vec<Vec<Scored>> = self.connection.answer(context)?;
        let of_rank = |(documents, scored): (Option<&DocumentBatch>, Vec<Scored>)| match documents {
            Some(documents) => scores(documents, self.scope, &scored).map_err(|error| self.failure(error)),
            None => Ok(Vec::new()),
        };
        self.round(round).zip(found).map(of_rank).collect()
    }

    fn losses(&self, scores: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, StageError> {
        let losses = self.objective.losses(scores, totals);
        losses.map_err(|source| self.failure(TrainError::Objective { step: 0, source }))
    }

    /// Has the gradients added of the round that is held.
    fn weigh(&mut self, losses: &[Vec<DocumentLoss>]) {
        let weights = |losses: &Vec<DocumentLoss>| -> Vec<[f64; 2]> {
            losses.iter().map(|loss| [loss.response_weight, loss.document_weight]).collect()
        };
        let ranks: Vec<_> = losses.iter().map(weights).collect();
        self.connection.request(&Request::Weigh { ranks: &ranks }, &[]);
    }

    fn failure(&self, error: TrainError) -> StageError {
        failure::of_rows(error, &self.work.rows)
    }
}

/// The documents of a micro-batch that have a target, with their scores.
fn scores(documents: &DocumentBatch, scope: TargetScope, scored: &[Scored]) -> Result<Vec<DocumentScore>, TrainError> {
    let DocumentBatch { batch, reference_log_probs } = documents;
    let targets = batch.targets_in(scope);
    let mut found: Vec<(usize, DocumentScore)> = Vec::new();
    for (&document, &response) in targets.documents.iter().zip(&targets.response) {
        let document = document as usize;
        if found.last().is_none_or(|(last, _)| *last != document) {
            let reference_log_prob = reference_log_probs.get(document).copied();
            let (group, role) = (batch.group(document), batch.role(document));
            found.push((document, DocumentScore { reference_log_prob, group, role, ..Default::default() }));
        }
        if let Some((_, score)) = found.last_mut() {
            score.targets += 1;
            score.response_targets += usize::from(response);
        }
    }
    let with_score = |((document, score), scored): ((usize, DocumentScore), &Scored)| {
        let (Some(response_nll), Some(nll)) = (scored.response_nll, scored.nll) else {
            let documents = vec![document];
            return Err(TrainError::LossNotFinite { step: 0, loss: f64::NAN, documents, largest_gradient: None });
        };
        Ok(DocumentScore { response_log_prob: -response_nll, log_prob: -nll, ..score })
    };
    found.into_iter().zip(scored).map(with_score).collect()
}
