//! How far a merge is from what its adapters were trained as: beside quantised weights.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::MergeInto;
use super::proof::{Sums, Top, note_tops, same_tops};

/// The two merges of adapters that were trained on quantised weights, each against the dequantised base with the
/// adapters beside it: what was trained. Both are rounded to what the merged checkpoint stores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AgainstTraining {
    /// The one that was written.
    pub into: MergeInto,
    /// The merge into the weights as they are stored.
    pub original: Deviation,
    /// The merge into the dequantised weights.
    pub dequantized: Deviation,
}

/// How far what a model computes is from what was trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Deviation {
    /// The greatest difference of two logits.
    pub max_abs_logit_difference: f32,
    /// The greatest logit of what was trained.
    pub max_abs_logit: f32,
    /// Share of the positions at which both find the same token the most likely.
    pub top_1_agreement: f64,
}

/// What is gathered while the models run: what was trained, the merge that was written, and the other one.
pub(super) struct Tally {
    into: MergeInto,
    positions: usize,
    written: Sums,
    other: Sums,
    tops: [Vec<Top>; 3],
}

impl Tally {
    pub(super) fn new(into: MergeInto) -> Self {
        Self { into, positions: 0, written: Sums::default(), other: Sums::default(), tops: Default::default() }
    }

    /// Takes in the logits of some ids: of what was trained, the merge that was written, and the other one.
    pub(super) fn add_logits(&mut self, ids: &Range<usize>, [trained, written, other]: [&[Vec<f32>]; 3]) {
        self.written.add_logits(trained, written);
        self.other.add_logits(trained, other);
        for (tops, logits) in self.tops.iter_mut().zip([trained, written, other]) {
            note_tops(tops, ids, logits);
        }
    }

    pub(super) fn end_logits(&mut self) {
        let [trained, written, other] = std::mem::take(&mut self.tops);
        self.positions += trained.len();
        self.written.same_top += same_tops(&trained, &written);
        self.other.same_top += same_tops(&trained, &other);
    }

    pub(super) fn end(self) -> AgainstTraining {
        let deviation = |sums: Sums| Deviation {
            max_abs_logit_difference: sums.logits.max_abs_difference,
            max_abs_logit: sums.logits.max_abs,
            top_1_agreement: sums.same_top as f64 / self.positions as f64,
        };
        let (written, other) = (deviation(self.written), deviation(self.other));
        let (original, dequantized) = match self.into {
            MergeInto::Original => (written, other),
            MergeInto::Dequantized => (other, written),
        };
        AgainstTraining { into: self.into, original, dequantized }
    }
}
