//! Preference losses: a response that is to become likelier against one that is to become less likely.
//!
//! A [`PairLoss`] is a formula over one pair; [`Preference`] is the objective that takes its mean over the pairs of a
//! step. [`Kto`] compares no pairs. What each loss is, and where it is from, stands in its own file.

mod apo;
mod cpo;
mod dpo;
mod hinge;
mod ipo;
mod kto;
mod nca;
mod orpo;
mod robust;
mod simpo;
mod sppo;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

pub use apo::{ApoDown, ApoZero};
pub use cpo::Cpo;
pub use dpo::{Dpo, DpoDivergence};
pub use hinge::Hinge;
pub use ipo::Ipo;
pub use kto::Kto;
pub use nca::Nca;
pub use orpo::Orpo;
pub use robust::Robust;
pub use simpo::SimPo;
pub use sppo::Sppo;

use super::{Compared, DocumentLoss, DocumentObjective, DocumentScore, Gathering, ObjectiveError, StepTotals};
use crate::batch::{Role, TargetScope};

/// A formula over one pair of responses.
pub trait PairLoss: Debug + Send + Sync {
    /// Its value and derivatives.
    fn value(&self, pair: &Pair) -> PairValue;

    /// The implicit rewards of the chosen and the rejected response, which are logged.
    fn rewards(&self, pair: &Pair) -> [f64; 2];

    /// Whether it compares with a reference model.
    fn needs_reference(&self) -> bool {
        true
    }
}

/// A response of a pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Response {
    /// The summed log-probability of its tokens, in nats.
    pub log_prob: f64,
    /// The same under the reference model; 0 where there is none.
    pub reference: f64,
    /// How many tokens those are.
    pub targets: usize,
}

impl Response {
    /// The log-probability less that of the reference: `log π(y|x) - log π_ref(y|x)`.
    pub fn gain(&self) -> f64 {
        self.log_prob - self.reference
    }

    /// The number of its tokens, by which means are taken; 1 where there is none.
    pub fn length(&self) -> f64 {
        self.targets.max(1) as f64
    }

    /// The mean log-probability of its tokens.
    pub fn mean(&self) -> f64 {
        self.log_prob / self.length()
    }
}

/// Two responses to one prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The better one.
    pub chosen: Response,
    /// The worse one.
    pub rejected: Response,
}

impl Pair {
    /// By how much more the chosen response gained than the rejected one: what DPO multiplies with `beta`.
    pub fn margin(&self) -> f64 {
        self.chosen.gain() - self.rejected.gain()
    }

    /// The same with gains divided by lengths.
    pub fn mean_margin(&self) -> f64 {
        self.chosen.gain() / self.chosen.length() - self.rejected.gain() / self.rejected.length()
    }

    /// The gains times `beta`: the implicit rewards of DPO and of what is derived from it.
    pub fn rewards(&self, beta: f64) -> [f64; 2] {
        [beta * self.chosen.gain(), beta * self.rejected.gain()]
    }
}

/// A loss of a pair, with its derivatives with respect to the log-probabilities of the responses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairValue {
    /// The loss.
    pub loss: f64,
    /// With respect to the chosen response's.
    pub chosen: f64,
    /// With respect to the rejected response's.
    pub rejected: f64,
}

impl PairValue {
    /// A loss that depends on [`Pair::margin`] alone, with its derivative with respect to that.
    fn of_margin(loss: f64, slope: f64) -> Self {
        Self { loss, chosen: slope, rejected: -slope }
    }

    /// A loss that depends on a difference of terms divided by the lengths of the responses.
    fn of_mean_margin(pair: &Pair, loss: f64, slope: f64) -> Self {
        Self { loss, chosen: slope / pair.chosen.length(), rejected: -slope / pair.rejected.length() }
    }
}

/// The mean of a pair loss over the pairs of the step, and a share of the chosen responses' own likelihood.
#[derive(Clone, Debug)]
pub struct Preference {
    /// The formula.
    pub loss: Arc<dyn PairLoss>,
    /// The likelihood that is learned beside it.
    pub sft: Option<Sft>,
}

/// The negative log-likelihood of the chosen responses, added to a loss: the mean over their tokens in the whole step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sft {
    /// Its factor, `alpha` in RPO (Pang et al., arXiv:2404.19733).
    pub weight: f64,
    /// The tokens of the response, or those of the prompt too.
    pub scope: TargetScope,
}

impl Sft {
    /// Adds its part of the loss of a chosen document.
    fn add(&self, score: &DocumentScore, totals: &StepTotals, to: &mut DocumentLoss) {
        let per_token = self.weight / totals.chosen_targets.max(1) as f64;
        to.loss -= per_token * score.log_prob;
        to.document_weight += per_token;
    }
}

impl DocumentObjective for Preference {
    fn gathering(&self) -> Gathering {
        Gathering::Groups
    }

    fn scope(&self) -> TargetScope {
        self.sft.map_or(TargetScope::Response, |sft| sft.scope)
    }

    fn losses(&self, documents: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError> {
        let mut losses = vec![DocumentLoss::default(); documents.len()];
        let share = 1.0 / totals.groups as f64;
        for [chosen, rejected] in pairs(documents)? {
            let pair = self.pair(&documents[chosen], &documents[rejected])?;
            let value = self.loss.value(&pair);
            losses[chosen].loss = share * value.loss;
            // Weights are of negative log-likelihoods.
            losses[chosen].response_weight = -share * value.chosen;
            losses[rejected].response_weight = -share * value.rejected;
            if let Some(sft) = &self.sft {
                sft.add(&documents[chosen], totals, &mut losses[chosen]);
            }
        }
        Ok(losses)
    }

    fn compared(&self, documents: &[DocumentScore]) -> Compared {
        let mut compared = Compared::default();
        for [chosen, rejected] in pairs(documents).unwrap_or_default() {
            let Ok(pair) = self.pair(&documents[chosen], &documents[rejected]) else { continue };
            let [better, worse] = self.loss.rewards(&pair);
            compared.chosen(&documents[chosen], better);
            compared.rejected(&documents[rejected], worse);
            compared.pairs += 1.0;
            compared.accurate += f64::from(u8::from(better > worse));
        }
        compared
    }

    fn needs_reference(&self) -> bool {
        self.loss.needs_reference()
    }
}

impl Preference {
    fn pair(&self, chosen: &DocumentScore, rejected: &DocumentScore) -> Result<Pair, ObjectiveError> {
        let needed = self.loss.needs_reference();
        Ok(Pair { chosen: response(chosen, needed)?, rejected: response(rejected, needed)? })
    }
}

/// A document's response beside its reference, which must be there where it is needed.
fn response(score: &DocumentScore, needs_reference: bool) -> Result<Response, ObjectiveError> {
    let reference = match score.reference_log_prob {
        _ if !needs_reference => 0.0,
        Some(reference) => reference,
        None => return Err(problem(score.group, "it has no log-probabilities of the reference model")),
    };
    Ok(Response { log_prob: score.response_log_prob, reference, targets: score.response_targets })
}

/// The places of the chosen and the rejected document of each group.
fn pairs(documents: &[DocumentScore]) -> Result<Vec<[usize; 2]>, ObjectiveError> {
    let mut waiting: HashMap<u64, usize> = HashMap::new();
    let mut pairs = Vec::with_capacity(documents.len() / 2);
    for (index, document) in documents.iter().enumerate() {
        let Some(other) = waiting.remove(&document.group) else {
            waiting.insert(document.group, index);
            continue;
        };
        pairs.push(match (documents[other].role, document.role) {
            (Role::Chosen, Role::Rejected) => [other, index],
            (Role::Rejected, Role::Chosen) => [index, other],
            (Role::Chosen, _) => return Err(problem(document.group, "it has no rejected document")),
            _ => return Err(problem(document.group, "it has no chosen document")),
        });
    }
    match waiting.into_iter().min() {
        None => Ok(pairs),
        Some((group, index)) if documents[index].role == Role::Chosen => {
            Err(problem(group, "it has no rejected document"))
        }
        Some((group, _)) => Err(problem(group, "it has no chosen document")),
    }
}

fn problem(group: u64, problem: &str) -> ObjectiveError {
    ObjectiveError { group, problem: problem.to_owned() }
}

/// `1 / (1 + e^-x)`, in all of its range.
fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let exp = x.exp();
        exp / (1.0 + exp)
    }
}

/// `log sigmoid(x)`, in all of its range.
fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

/// `-(1 - ε) · log sigmoid(x) - ε · log sigmoid(-x)` and its derivative: a label that is wrong with probability `ε`.
fn smoothed(x: f64, label_smoothing: f64) -> (f64, f64) {
    let loss = -(1.0 - label_smoothing) * log_sigmoid(x) - label_smoothing * log_sigmoid(-x);
    (loss, -(1.0 - label_smoothing) * sigmoid(-x) + label_smoothing * sigmoid(x))
}
