//! Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306): single responses, desirable or not.

use super::{Sft, problem, response, sigmoid};
use crate::batch::{Role, TargetScope};
use crate::loss::{Compared, DocumentLoss, DocumentObjective, DocumentScore, Gathering, ObjectiveError, StepTotals};

/// For a desirable response `w₊ · (1 - sigmoid(β · (a - z)))`, for an undesirable one
/// `w₋ · (1 - sigmoid(β · (z - a)))`, where `a` is its log-ratio and `z` estimates how far the policy is from the
/// reference: `max(0, mean of the log-ratios of prompts with responses that belong to others)`. The mean is over the
/// examples, and `z` has no gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kto {
    /// How strongly the policy is held to the reference; more than 0.
    pub beta: f64,
    /// `w₊`.
    pub desirable_weight: f64,
    /// `w₋`.
    pub undesirable_weight: f64,
    /// Which mismatched documents `z` is estimated from: those of the step, or those of the micro-batch alone, as TRL
    /// does, whose losses then depend on how a step is split.
    pub estimate: Gathering,
    /// The likelihood of desirable responses that is learned beside it.
    pub sft: Option<Sft>,
}

impl DocumentObjective for Kto {
    fn gathering(&self) -> Gathering {
        self.estimate
    }

    fn scope(&self) -> TargetScope {
        self.sft.map_or(TargetScope::Response, |sft| sft.scope)
    }

    fn losses(&self, documents: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError> {
        let examples = documents.iter().filter(|document| document.role != Role::Mismatched).count();
        let share = 1.0 / totals.groups as f64;
        let baseline = estimate(documents)?;
        let of_document = |document: &DocumentScore| {
            let gain = response(document, true)?.gain();
            let (weight, sign) = match document.role {
                Role::Chosen => (self.desirable_weight, 1.0),
                Role::Rejected => (self.undesirable_weight, -1.0),
                Role::Mismatched => return Ok(DocumentLoss::default()),
            };
            let baseline = baseline.ok_or_else(|| problem(document.group, "it has no mismatched document"))?;
            let x = sign * self.beta * (gain - baseline);
            let slope = share * weight * self.beta * sigmoid(x) * sigmoid(-x);
            let response_weight = sign * slope;
            let mut loss =
                DocumentLoss { loss: share * weight * sigmoid(-x), response_weight, ..DocumentLoss::default() };
            if let (Some(sft), Role::Chosen) = (&self.sft, document.role) {
                sft.add(document, totals, &mut loss);
            }
            Ok(loss)
        };
        if examples == 0 {
            Ok(vec![DocumentLoss::default(); documents.len()])
        } else {
            documents.iter().map(of_document).collect()
        }
    }

    fn compared(&self, documents: &[DocumentScore]) -> Compared {
        let mut compared = Compared::default();
        for document in documents {
            let Ok(response) = response(document, true) else { continue };
            let reward = self.beta * response.gain();
            match document.role {
                Role::Chosen => compared.chosen(document, reward),
                Role::Rejected => compared.rejected(document, reward),
                Role::Mismatched => {
                    compared.mismatched += 1.0;
                    compared.mismatched_gain += response.gain();
                }
            }
        }
        compared
    }

    fn needs_reference(&self) -> bool {
        true
    }
}

/// `z`, where there is a mismatched document.
fn estimate(documents: &[DocumentScore]) -> Result<Option<f64>, ObjectiveError> {
    let (mut sum, mut count) = (0.0, 0);
    for document in documents.iter().filter(|document| document.role == Role::Mismatched) {
        sum += response(document, true)?.gain();
        count += 1;
    }
    Ok((count > 0).then(|| (sum / f64::from(count)).max(0.0)))
}
