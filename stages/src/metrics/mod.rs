//! Metrics of `evaluate`: a file each, and their list.
//!
//! A metric says what it reads of a row, makes a figure of all rows, and which of its numbers are compared with those
//! of other evaluations. Who asks the model, and what becomes of the figures, is `kinds/evaluate`. Of BLEU, chrF, TER
//! and ROUGE the scores themselves are here, too, each as its reference implementation computes it.

pub mod bleu;
pub mod chrf;
pub mod exact_match;
mod perplexity;
mod preference_accuracy;
pub mod rouge;
mod standard_error;
pub mod ter;
mod token_accuracy;

use engine::error::StageError;
use engine::figure::{Foreseen, Unit, name_of_standard_error};
use engine::parameter::Parameters;
use serde_json::Value;

use crate::compute::inference::RowScore;
use crate::tasks::metric::Kind;
use exact_match::Normalization;

/// Declares the metrics, each with its name in pipeline files and in `metrics.json`, and its module.
macro_rules! metrics {
    ($($(#[$doc:meta])+ $metric:ident = $name:literal: $module:ident,)+) => {
        /// Something to measure.
        #[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Metric {
            $($(#[$doc])+ #[parameters(rename = $name)] $metric,)+
        }

        impl Metric {
            /// All of them, in the order in which their figures are shown.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$metric),+];

            /// Its name in pipeline files and in `metrics.json`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$metric => $name,)+
                }
            }

            pub(crate) fn definition(self) -> &'static Definition {
                match self {
                    $(Self::$metric => &$module::DEFINITION,)+
                }
            }
        }
    };
}

metrics! {
    /// How surprised the model is by the responses that the rows give.
    Perplexity = "perplexity": perplexity,
    /// How many of their tokens it would have chosen itself, each with the response before it given.
    TokenAccuracy = "token_accuracy": token_accuracy,
    /// How many words and word sequences its own answers share with them.
    Rouge = "rouge": rouge,
    /// How many word sequences its own answers share with them, over all rows together.
    Bleu = "bleu": bleu,
    /// How many of its own answers equal them.
    ExactMatch = "exact_match": exact_match,
    /// Of how many pairs the model finds the better response likelier than the worse one; for rows of pairs.
    PreferenceAccuracy = "preference_accuracy": preference_accuracy,
}

/// How some metrics compare.
#[derive(Parameters, Debug)]
pub struct MetricOptions {
    /// Whether ROUGE compares words by their stems (Porter).
    #[semantic(default = true)]
    pub use_stemmer: bool,
    /// How `exact_match` normalises prediction and reference before it compares them.
    #[semantic(default = Normalization::Strip)]
    pub normalization: Normalization,
}

/// What a metric is.
pub(crate) struct Definition {
    pub reads: Reads,
    /// The numbers that are shown, compared and can be a gate's.
    pub headlines: &'static [Headline],
    /// Its columns in `examples.parquet`.
    pub columns: &'static [Column],
    /// Begins to measure.
    pub start: fn(&MetricOptions) -> Box<dyn Measurement>,
}

/// What a metric reads of each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    /// How likely the model finds the row's response.
    Likelihood,
    /// The model's own answer, beside the row's response.
    Answer,
    /// How likely it finds both responses of a pair.
    Pair,
}

/// What was found out of a row.
pub(crate) enum Observed<'a> {
    Likelihood {
        score: RowScore,
        /// Whether only the beginning of the row was read.
        is_cut: bool,
    },
    Answer {
        prediction: &'a str,
        reference: &'a str,
    },
    Pair {
        chosen: RowScore,
        rejected: RowScore,
    },
}

impl Headline {
    /// The name of its standard error among facts.
    pub(crate) fn error_name(&self) -> Option<String> {
        self.error_at.map(|_| name_of_standard_error(self.name))
    }
}

impl Observed<'_> {
    pub(crate) fn reads(&self) -> Reads {
        match self {
            Self::Likelihood { .. } => Reads::Likelihood,
            Self::Answer { .. } => Reads::Answer,
            Self::Pair { .. } => Reads::Pair,
        }
    }
}

/// A number of a metric that stands for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Headline {
    pub name: &'static str,
    /// Where it is in the metric's figure, as a JSON pointer.
    pub at: &'static str,
    /// Where its standard error is, for metrics that have one.
    pub error_at: Option<&'static str>,
    pub unit: Unit,
    pub better: Better,
}

/// Which way a figure is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
}

/// A column of `examples.parquet`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Column {
    Numbers(&'static str),
    /// What holds (1) or does not (0).
    Flags(&'static str),
}

/// A metric while it measures.
pub(crate) trait Measurement {
    /// Takes in a row. Returns what its columns have for it, in their order.
    fn add(&mut self, row: &Observed<'_>) -> Vec<f64>;

    /// The figure of all rows that were taken in; so many others could not be read.
    ///
    /// # Errors
    /// Fails where it is no number.
    fn figure(&self, skipped_rows: u64) -> Result<Found, StageError>;
}

/// A figure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    /// As it is written to `metrics.json`, its convention in words among it.
    pub figure: Value,
    /// What it means, in a line.
    pub meaning: String,
}

/// Which way a figure is better, by its name: one of `evaluate`, or one of an evaluation task with its filter
/// (`acc,none`). None where neither makes it, or it is a count.
pub fn better(name: &str) -> Option<Better> {
    headline(name).map(|headline| headline.better).or_else(|| of_task(name).map(Kind::better))
}

/// What is known of a figure of evaluation tasks before they are asked: `arc_easy.acc,none`.
pub(crate) fn foreseen_of_task(name: &str) -> Foreseen {
    let kind = name.rsplit('.').next().and_then(of_task);
    kind.map_or(Foreseen::Nothing, |kind| Foreseen::In(kind.unit()))
}

fn headline(name: &str) -> Option<&'static Headline> {
    Metric::ALL.iter().flat_map(|metric| metric.definition().headlines).find(|headline| headline.name == name)
}

/// Of a figure of an evaluation task, what is measured.
fn of_task(name: &str) -> Option<Kind> {
    Kind::of_name(name.split(',').next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_direction_of_every_headline_is_known() {
        assert_eq!(better("rougeL"), Some(Better::Higher));
        assert_eq!(better("perplexity"), Some(Better::Lower));
        assert_eq!(better("acc,none"), Some(Better::Higher));
        assert_eq!(better("bits_per_byte,none"), Some(Better::Lower));
        assert_eq!(better("acc_stderr,none"), None);
        assert_eq!(better("rows"), None);
    }
}
