//! Losses of whole documents: what they get, what they return, and how scores are added up.

use std::fmt::Debug;

use crate::batch::{Batch, Role, TargetScope, Targets};
use crate::ops::TokenScore;

/// A loss of whole documents, from their log-probabilities.
///
/// It sees scores and never logits: [`DocumentObjective::losses`] returns the loss of each document and its derivatives
/// with respect to the summed negative log-likelihoods of the document, by which the trainer weights the gradients of
/// the targets. So a new loss of documents is one file: this trait for a struct of its options.
///
/// The step of a trainer ([`crate::trainer::Trainer::accumulate_documents`]) knows the totals of the whole step before
/// the first micro-batch; what the objective returns is summed over the step and divided by nothing, so an objective
/// divides by the totals that it means (pairs, documents, targets).
///
/// [`super::Preference`] is the objective of all losses of pairs, which need the chosen and the rejected document of a
/// pair and nothing else of the step; [`super::Kto`] needs the whole step.
pub trait DocumentObjective: Debug + Send + Sync {
    /// Which documents must be known for the loss of one.
    fn gathering(&self) -> Gathering;

    /// Which tokens are scored.
    fn scope(&self) -> TargetScope {
        TargetScope::Response
    }

    /// The loss of each document, in the order given. The documents are those of one micro-batch, or with
    /// [`Gathering::Step`] all of the step, those of other workers among them.
    ///
    /// # Errors
    /// Fails where the documents are not what the objective compares: a pair without its rejected document, say.
    fn losses(&self, documents: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError>;

    /// What is logged of documents that [`DocumentObjective::losses`] has no objection to.
    fn compared(&self, _documents: &[DocumentScore]) -> Compared {
        Compared::default()
    }

    /// Whether each document needs its log-probability under a reference model.
    fn needs_reference(&self) -> bool {
        false
    }
}

/// What is logged of documents that are compared: sums, which add up over micro-batches and workers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Compared {
    /// Chosen documents.
    pub chosen: f64,
    /// Rejected documents.
    pub rejected: f64,
    /// Pairs of the two; none where responses are judged alone.
    pub pairs: f64,
    /// Pairs whose chosen document has the larger reward.
    pub accurate: f64,
    /// Of the chosen documents' rewards.
    pub chosen_reward: f64,
    /// Of the rejected documents' rewards.
    pub rejected_reward: f64,
    /// Of the chosen responses' log-probabilities.
    pub chosen_log_prob: f64,
    /// Of the rejected responses' log-probabilities.
    pub rejected_log_prob: f64,
    /// Of the log-probabilities of all targets of chosen documents, those of prompts too where they are targets.
    pub likelihood: f64,
    /// Those targets.
    pub likelihood_targets: f64,
    /// Documents of a prompt with another's response.
    pub mismatched: f64,
    /// Of their log-probabilities less the reference's.
    pub mismatched_gain: f64,
}

impl Compared {
    /// How many numbers it is.
    pub const VALUES: usize = 12;

    pub(super) fn chosen(&mut self, document: &DocumentScore, reward: f64) {
        self.chosen += 1.0;
        self.chosen_reward += reward;
        self.chosen_log_prob += document.response_log_prob;
        self.likelihood += document.log_prob;
        self.likelihood_targets += document.targets as f64;
    }

    pub(super) fn rejected(&mut self, document: &DocumentScore, reward: f64) {
        self.rejected += 1.0;
        self.rejected_reward += reward;
        self.rejected_log_prob += document.response_log_prob;
    }

    /// Its numbers, in the order of the fields.
    pub fn values(&self) -> [f64; Self::VALUES] {
        let Self { chosen, rejected, pairs, accurate, chosen_reward, rejected_reward, .. } = *self;
        let Self { chosen_log_prob, rejected_log_prob, likelihood, likelihood_targets, .. } = *self;
        [
            chosen,
            rejected,
            pairs,
            accurate,
            chosen_reward,
            rejected_reward,
            chosen_log_prob,
            rejected_log_prob,
            likelihood,
            likelihood_targets,
            self.mismatched,
            self.mismatched_gain,
        ]
    }

    /// From [`Compared::values`].
    pub fn of_values(values: [f64; Self::VALUES]) -> Self {
        let [chosen, rejected, pairs, accurate, chosen_reward, rejected_reward, rest @ ..] = values;
        let [chosen_log_prob, rejected_log_prob, likelihood, likelihood_targets, mismatched, mismatched_gain] = rest;
        Self {
            chosen,
            rejected,
            pairs,
            accurate,
            chosen_reward,
            rejected_reward,
            chosen_log_prob,
            rejected_log_prob,
            likelihood,
            likelihood_targets,
            mismatched,
            mismatched_gain,
        }
    }

    /// Adds those of other documents.
    pub fn add(&mut self, other: &Self) {
        let mut values = self.values();
        values.iter_mut().zip(other.values()).for_each(|(sum, value)| *sum += value);
        *self = Self::of_values(values);
    }
}

/// Which documents must be known for the loss of one of them, and what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gathering {
    /// Those of its group, which is in one micro-batch: one forward and one backward. Where the head is frozen it runs
    /// once, and the hidden gradients it leaves are scaled row by row once the losses are known. Where something of it
    /// is trained it runs twice, first for the scores.
    Groups,
    /// All of the step: each micro-batch runs forward once more without gradient, before the first that has one.
    Step,
}

/// What is known of a document when its loss is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DocumentScore {
    /// Sum of the log-probabilities of its response targets, in nats.
    pub response_log_prob: f64,
    /// Number of its response targets.
    pub response_targets: usize,
    /// The same sum over all its targets; with [`TargetScope::Response`] those of the response.
    pub log_prob: f64,
    /// Number of all its targets.
    pub targets: usize,
    /// [`DocumentScore::response_log_prob`] under the reference model, where one was given.
    pub reference_log_prob: Option<f64>,
    /// Its group.
    pub group: u64,
    /// What it is within its group.
    pub role: Role,
}

/// The loss of a document, and its derivatives.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DocumentLoss {
    /// Its part of the loss of the step.
    pub loss: f64,
    /// Derivative of the loss of the step with respect to the negative log-likelihood of the document's response,
    /// `-response_log_prob`. Negative where the document is to become less likely.
    pub response_weight: f64,
    /// The same with respect to the negative log-likelihood of all its targets, `-log_prob`.
    pub document_weight: f64,
}

/// What is known of a step before its first micro-batch, over all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTotals {
    /// Documents that have a target.
    pub documents: u64,
    /// Groups, each counted in every micro-batch that has a document of it.
    pub groups: u64,
    /// Response targets.
    pub response_targets: u64,
    /// Targets of the objective's scope.
    pub targets: u64,
    /// Those of them in documents whose role is [`Role::Chosen`].
    pub chosen_targets: u64,
}

/// Documents that an objective cannot compare.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("group {group}: {problem}")]
pub struct ObjectiveError {
    /// The group.
    pub group: u64,
    /// What is wrong with it.
    pub problem: String,
}

impl StepTotals {
    /// Those of a micro-batch.
    pub fn of(batch: &Batch, scope: TargetScope) -> Self {
        let targets = batch.targets_in(scope);
        let mut documents = targets.documents.clone();
        documents.dedup();
        let mut groups: Vec<u64> = documents.iter().map(|document| batch.group(*document as usize)).collect();
        groups.sort_unstable();
        groups.dedup();
        let is_chosen = |document: u32| batch.role(document as usize) == Role::Chosen;
        Self {
            documents: documents.len() as u64,
            groups: groups.len() as u64,
            response_targets: targets.response.iter().filter(|response| **response).count() as u64,
            targets: targets.len() as u64,
            chosen_targets: targets.documents.iter().filter(|document| is_chosen(**document)).count() as u64,
        }
    }

    /// Adds those of another micro-batch.
    pub fn add(&mut self, other: Self) {
        self.documents += other.documents;
        self.groups += other.groups;
        self.response_targets += other.response_targets;
        self.targets += other.targets;
        self.chosen_targets += other.chosen_targets;
    }
}

/// Adds up the scores of a batch's targets by document: those of its documents that have a target, with their indices.
/// `references` has a log-probability for each document of the batch, or is empty.
///
/// # Panics
/// If the scores are not those of the targets.
pub fn score_documents(
    batch: &Batch,
    targets: &Targets,
    scores: &[TokenScore],
    references: &[f64],
) -> Vec<(usize, DocumentScore)> {
    assert_eq!(scores.len(), targets.len(), "a score for each target");
    let mut documents: Vec<(usize, DocumentScore)> = Vec::new();
    for ((&document, &response), score) in targets.documents.iter().zip(&targets.response).zip(scores) {
        let document = document as usize;
        if documents.last().is_none_or(|(last, _)| *last != document) {
            let reference_log_prob = references.get(document).copied();
            let (group, role) = (batch.group(document), batch.role(document));
            documents.push((document, DocumentScore { reference_log_prob, group, role, ..Default::default() }));
        }
        let (_, found) = documents.last_mut().expect("it was just added");
        let log_prob = -f64::from(score.nll);
        found.log_prob += log_prob;
        found.targets += 1;
        if response {
            found.response_log_prob += log_prob;
            found.response_targets += 1;
        }
    }
    documents
}

/// The weight of each target, from the losses of the documents that have targets, in the order of
/// [`score_documents`].
pub(crate) fn target_weights(targets: &Targets, losses: &[DocumentLoss]) -> Vec<f32> {
    let (mut index, mut last) = (0, targets.documents.first().copied());
    let targets = targets.documents.iter().zip(&targets.response);
    let weights = targets.map(|(&document, &response)| {
        if last != Some(document) {
            (index, last) = (index + 1, Some(document));
        }
        let DocumentLoss { response_weight, document_weight, .. } = losses[index];
        (document_weight + if response { response_weight } else { 0.0 }) as f32
    });
    weights.collect()
}
