//! The step of a loss of whole documents: totals first, then scores, then gradients weighted by document.

use std::ops::Range;
use std::sync::Arc;

use super::{MicroReport, NOTHING_YET, Phase, TrainError, Trainer, gradient_options};
use crate::batch::{Batch, Role, TargetScope};
use crate::blocks::Blocks;
use crate::decoder::{Scored, TargetWeights};
use crate::loss::{
    Compared, DocumentLoss, DocumentObjective, DocumentScore, Gathering, StepTotals, score_documents, target_weights,
};

/// A micro-batch for a loss of whole documents.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DocumentBatch {
    /// The documents, with their groups and roles.
    pub batch: Batch,
    /// Log-probability of the response of each under the reference model, in nats. Empty: there is none.
    pub reference_log_probs: Vec<f64>,
}

/// What the documents of a step gave.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DocumentReport {
    /// The loss of this worker's documents.
    pub loss: f64,
    /// What is logged of the documents of all workers.
    pub compared: Compared,
}

/// How many totals are summed at once.
const FEW: usize = 8;

/// Values that a score takes on its way between workers.
const VALUES_PER_SCORE: usize = 14;

impl<B: Blocks> Trainer<B> {
    /// Adds the gradients of an objective over all the documents that this worker has in the step. It is called once in
    /// a step, by every worker, also by one that has no documents.
    ///
    /// The split into micro-batches changes nothing, as long as each group is in one of them.
    ///
    /// # Errors
    /// Fails if a batch does not fit the model, the documents do not fit the objective, the loss is not finite, or the
    /// device fails.
    ///
    /// # Panics
    /// If something was accumulated in this step already: the loss of a step is not a sum of two kinds.
    pub fn accumulate_documents(
        &mut self,
        batches: &[DocumentBatch],
        objective: &dyn DocumentObjective,
    ) -> Result<DocumentReport, TrainError> {
        assert_eq!(self.pending, NOTHING_YET, "the documents of a step are accumulated once");
        let totals = self.totals_of_step(batches, objective.scope())?;
        let mut report = match objective.gathering() {
            Gathering::Groups => self.accumulate_groups(batches, objective, &totals)?,
            Gathering::Step => self.accumulate_step(batches, objective, &totals)?,
        };
        let loss = report.loss;
        if !loss.is_finite() {
            let scored = Scored::default();
            return Err(self.loss_not_finite(&scored, loss));
        }
        if self.collective.size() > 1 {
            let mut values = report.compared.values();
            for few in values.chunks_mut(FEW) {
                self.collective.sum_totals(few)?;
            }
            report.compared = Compared::of_values(values);
        }
        // The objective has divided by its totals already: one worker alone adds the divisor of the step, 1.
        let weight = if self.collective.rank() == 0 { 1.0 } else { 0.0 };
        let target_tokens = batches.iter().map(|batch| batch.batch.target_tokens()).sum();
        self.add(MicroReport { loss_sum: loss, weight, target_tokens });
        Ok(report)
    }

    /// Gives every worker values of which one worker each has, the others 0, to the bit.
    ///
    /// # Errors
    /// Fails where a worker is gone or does not answer.
    pub fn share(&mut self, values: &mut [f64]) -> Result<(), TrainError> {
        if self.collective.size() == 1 {
            return Ok(());
        }
        self.collective.note(self.step, Phase::SumOfValidation);
        let mut parts: Vec<f32> = values.iter().flat_map(|value| thirds(*value)).collect();
        self.collective.sum(&mut parts)?;
        for (value, parts) in values.iter_mut().zip(parts.as_chunks::<3>().0) {
            *value = parts.iter().rev().map(|part| f64::from(*part)).sum();
        }
        Ok(())
    }

    /// The totals of the step over all workers.
    fn totals_of_step(&mut self, batches: &[DocumentBatch], scope: TargetScope) -> Result<StepTotals, TrainError> {
        let mut totals = StepTotals::default();
        batches.iter().for_each(|batch| totals.add(StepTotals::of(&batch.batch, scope)));
        if self.collective.size() == 1 {
            return Ok(totals);
        }
        self.collective.note(self.step + 1, Phase::SumOfLosses);
        let StepTotals { documents, groups, response_targets, targets, chosen_targets } = totals;
        let mut sums = [documents, groups, response_targets, targets, chosen_targets].map(|total| total as f64);
        self.collective.sum_totals(&mut sums)?;
        let [documents, groups, response_targets, targets, chosen_targets] = sums.map(|total| total as u64);
        Ok(StepTotals { documents, groups, response_targets, targets, chosen_targets })
    }

    /// One forward and one backward for each micro-batch: losses follow from its own documents.
    fn accumulate_groups(
        &mut self,
        batches: &[DocumentBatch],
        objective: &dyn DocumentObjective,
        totals: &StepTotals,
    ) -> Result<DocumentReport, TrainError> {
        let mut report = DocumentReport::default();
        for DocumentBatch { batch, reference_log_probs } in batches {
            let step = self.step + 1;
            let mut weights = |targets: &crate::batch::Targets, scores: &[crate::ops::TokenScore]| {
                let documents = score_documents(batch, targets, scores, reference_log_probs);
                let documents: Vec<DocumentScore> = documents.into_iter().map(|(_, score)| score).collect();
                let losses = losses(objective, &documents, totals, step)?;
                report.loss += losses.iter().map(|document| document.loss).sum::<f64>();
                report.compared.add(&objective.compared(&documents));
                Ok(target_weights(targets, &losses))
            };
            self.add_gradients(batch, objective.scope(), TargetWeights::OfScores(&mut weights))?;
        }
        Ok(report)
    }

    /// Scores every micro-batch without gradients, then adds the gradients of each: losses follow from all documents of
    /// the step.
    fn accumulate_step(
        &mut self,
        batches: &[DocumentBatch],
        objective: &dyn DocumentObjective,
        totals: &StepTotals,
    ) -> Result<DocumentReport, TrainError> {
        let seed = gradient_options(&self.options, None, self.step).step;
        let (mut own, mut of_batches) = (Vec::new(), Vec::new());
        for DocumentBatch { batch, reference_log_probs } in batches {
            self.collective.note(self.step + 1, Phase::Gradients);
            let scored = self.decoder.score_targets(batch, objective.scope(), Some(seed))?;
            if scored.scores.iter().any(|score| !score.nll.is_finite()) {
                let loss = scored.scores.iter().map(|score| f64::from(score.nll)).sum();
                return Err(self.loss_not_finite(&scored, loss));
            }
            let documents = score_documents(batch, &scored.targets, &scored.scores, reference_log_probs);
            of_batches.push((scored.targets, own.len()..own.len() + documents.len()));
            own.extend(documents.into_iter().map(|(_, score)| (batch.groups.is_empty(), score)));
        }
        let (all, mine) = self.gather_scores(own)?;
        let losses = losses(objective, &all, totals, self.step + 1)?;
        let compared = objective.compared(&all[mine.clone()]);
        let losses = &losses[mine];
        for (DocumentBatch { batch, .. }, (targets, documents)) in batches.iter().zip(of_batches) {
            let weights = target_weights(&targets, &losses[documents]);
            self.add_gradients(batch, objective.scope(), TargetWeights::Known(&weights))?;
        }
        Ok(DocumentReport { loss: losses.iter().map(|document| document.loss).sum(), compared })
    }

    fn add_gradients(
        &mut self,
        batch: &Batch,
        scope: TargetScope,
        weights: TargetWeights<'_, TrainError>,
    ) -> Result<(), TrainError> {
        self.collective.note(self.step + 1, Phase::Gradients);
        let ops = Arc::clone(self.decoder.ops());
        let _phase = ops.profile().phase("micro-batch");
        let options = gradient_options(&self.options, self.scaler.as_ref(), self.step);
        let scored = self.decoder.weighted_gradients(batch, scope, weights, options, &mut self.activations)?;
        match scored.scores.iter().map(|score| f64::from(score.nll)).sum::<f64>() {
            sum if sum.is_finite() => Ok(()),
            sum => Err(self.loss_not_finite(&scored, sum)),
        }
    }

    /// The scores of the documents of all workers, by rank, and which of them are this worker's own. Sums go to the
    /// others in 48 bits, and every worker computes with these. Documents without groups become groups of their own.
    fn gather_scores(
        &mut self,
        own: Vec<(bool, DocumentScore)>,
    ) -> Result<(Vec<DocumentScore>, Range<usize>), TrainError> {
        let (rank, size) = (self.collective.rank(), self.collective.size());
        let counts = if size == 1 { vec![own.len() as u64] } else { self.collective.gather(own.len() as u64)? };
        let count = |counts: &[u64]| counts.iter().sum::<u64>() as usize;
        let first = count(&counts[..rank]);
        let numbered = own.into_iter().enumerate().map(|(index, (alone, score))| match alone {
            true => DocumentScore { group: (first + index) as u64, ..score },
            false => score,
        });
        let own: Vec<DocumentScore> = numbered.collect();
        let mine = first..first + own.len();
        if size == 1 {
            return Ok((own, mine));
        }
        let mut values = vec![0.0; VALUES_PER_SCORE * count(&counts)];
        for (score, values) in own.iter().zip(values[VALUES_PER_SCORE * first..].chunks_exact_mut(VALUES_PER_SCORE)) {
            values.copy_from_slice(&to_values(score));
        }
        self.collective.note(self.step + 1, Phase::SumOfLosses);
        self.collective.sum(&mut values)?;
        Ok((values.as_chunks().0.iter().map(of_values).collect(), mine))
    }
}

fn losses(
    objective: &dyn DocumentObjective,
    documents: &[DocumentScore],
    totals: &StepTotals,
    step: u64,
) -> Result<Vec<DocumentLoss>, TrainError> {
    let losses = objective.losses(documents, totals).map_err(|source| TrainError::Objective { step, source })?;
    assert_eq!(losses.len(), documents.len(), "an objective returns a loss for each document");
    Ok(losses)
}

/// A score as values that are sent exactly: sums in two parts, a group in four of 16 bits.
fn to_values(score: &DocumentScore) -> [f32; VALUES_PER_SCORE] {
    let parts = |value: f64| [value as f32, (value - f64::from(value as f32)) as f32];
    let reference = score.reference_log_prob;
    let mut values = [0.0; VALUES_PER_SCORE];
    values[0..2].copy_from_slice(&parts(score.response_log_prob));
    values[2..4].copy_from_slice(&parts(score.log_prob));
    values[4..6].copy_from_slice(&parts(reference.unwrap_or(0.0)));
    values[6] = if reference.is_some() { 1.0 } else { 0.0 };
    values[7] = score.response_targets as f32;
    values[8] = score.targets as f32;
    values[9] = f32::from(score.role as u8);
    for (part, value) in values[10..14].iter_mut().enumerate() {
        *value = (score.group >> (16 * part) & 0xffff) as f32;
    }
    values
}

fn of_values(values: &[f32; VALUES_PER_SCORE]) -> DocumentScore {
    let sum = |first: usize| f64::from(values[first]) + f64::from(values[first + 1]);
    DocumentScore {
        response_log_prob: sum(0),
        log_prob: sum(2),
        reference_log_prob: (values[6] == 1.0).then(|| sum(4)),
        response_targets: values[7] as usize,
        targets: values[8] as usize,
        role: Role::of_number(values[9] as u8).unwrap_or_default(),
        group: (0..4).map(|part| (values[10 + part] as u64) << (16 * part)).sum(),
    }
}

/// A value as a sum of three that together have all of its bits.
fn thirds(value: f64) -> [f32; 3] {
    let first = value as f32;
    let rest = value - f64::from(first);
    let second = rest as f32;
    [first, second, (rest - f64::from(second)) as f32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_shared_to_the_bit() {
        for value in [0.0, -1_234.567_890_123_456, 1.0 / 3.0, -98_765.432_109_876_54] {
            assert_eq!(thirds(value).iter().rev().map(|part| f64::from(*part)).sum::<f64>(), value);
        }
    }

    #[test]
    fn a_score_is_the_same_on_the_other_side() {
        let score = DocumentScore {
            response_log_prob: -1_234.567_890_123,
            response_targets: 70_001,
            log_prob: -2345.5,
            targets: 80_000,
            reference_log_prob: Some(-1e-3),
            group: 0xfedc_ba98_7654_3210,
            role: Role::Rejected,
        };
        let found = of_values(&to_values(&score));
        assert!((found.response_log_prob - score.response_log_prob).abs() < 1e-10);
        assert!((found.reference_log_prob.unwrap() + 1e-3).abs() < 1e-16);
        let exact = |score: &DocumentScore| (score.response_targets, score.targets, score.group, score.role);
        assert_eq!((exact(&found), found.log_prob), (exact(&score), -2345.5));
        assert_eq!(of_values(&to_values(&DocumentScore::default())), DocumentScore::default());
    }
}
