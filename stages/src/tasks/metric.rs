//! Metrics: what a row's answer is worth, and how rows become a figure with its standard error.

use std::collections::BTreeMap;

use engine::figure::Unit;
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::alike::{Alike, Punctuation};
use super::file::OutputType;
use super::random::PythonRandom;
use crate::metrics::{Better, bleu, chrf, ter};

/// Draws of a bootstrap, unless told otherwise.
pub const BOOTSTRAP_ITERATIONS: usize = 100_000;

/// Draws at most where a figure is of words that texts share.
const ITERATIONS_OF_TEXTS: usize = 100;

/// Draws of one generator.
const CHUNK: usize = 1000;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Acc,
    AccNorm,
    AccBytes,
    AccMutualInfo,
    ExactMatch,
    F1,
    Mcc,
    Bleu,
    Chrf,
    ChrfPlusPlus,
    Ter,
    Brier,
    Perplexity,
    WordPerplexity,
    BytePerplexity,
    BitsPerByte,
}

/// A metric of a task.
#[derive(Debug, Clone)]
pub struct Metric {
    pub kind: Kind,
    pub alike: Alike,
    pub higher_is_better: bool,
}

/// What a row is worth.
#[derive(Debug, Clone, PartialEq)]
pub enum Worth {
    Number(f64),
    /// A sum and the words or bytes that it is of.
    Weighted(f64, f64),
    /// The right choice, and how likely each is.
    Probabilities(usize, Vec<f64>),
    /// The right choice, and the one made.
    Classes(usize, usize),
    /// The right class of a text, and the one that it is given.
    Labels(String, String),
    /// What a text shares with the right one: counts that are added up over rows.
    Counts(Vec<u64>),
}

impl Kind {
    const ALL: [(Self, &'static str, Unit, Better); 16] = [
        (Self::Acc, "acc", Unit::Share, Better::Higher),
        (Self::AccNorm, "acc_norm", Unit::Share, Better::Higher),
        (Self::AccBytes, "acc_bytes", Unit::Share, Better::Higher),
        (Self::AccMutualInfo, "acc_mutual_info", Unit::Share, Better::Higher),
        (Self::ExactMatch, "exact_match", Unit::Share, Better::Higher),
        (Self::F1, "f1", Unit::Share, Better::Higher),
        (Self::Mcc, "mcc", Unit::Correlation, Better::Higher),
        (Self::Bleu, "bleu", Unit::Points, Better::Higher),
        (Self::Chrf, "chrf", Unit::Points, Better::Higher),
        (Self::ChrfPlusPlus, "chrf++", Unit::Points, Better::Higher),
        // More edits than words are more than a hundred.
        (Self::Ter, "ter", Unit::Number, Better::Lower),
        (Self::Brier, "brier_score", Unit::Number, Better::Lower),
        (Self::Perplexity, "perplexity", Unit::Number, Better::Lower),
        (Self::WordPerplexity, "word_perplexity", Unit::Number, Better::Lower),
        (Self::BytePerplexity, "byte_perplexity", Unit::Number, Better::Lower),
        (Self::BitsPerByte, "bits_per_byte", Unit::Bits, Better::Lower),
    ];

    fn row(self) -> &'static (Self, &'static str, Unit, Better) {
        Self::ALL.iter().find(|(kind, ..)| *kind == self).expect("every kind is listed")
    }

    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Which way its figures are better, unless a task says otherwise.
    pub fn better(self) -> Better {
        self.row().3
    }

    /// What its figures are in.
    pub fn unit(self) -> Unit {
        self.row().2
    }

    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known, ..)| *known == name).map(|(kind, ..)| *kind)
    }

    fn fits(self, output_type: OutputType) -> bool {
        match output_type {
            OutputType::MultipleChoice => {
                use Kind::{Acc, AccBytes, AccMutualInfo, AccNorm, Brier, ExactMatch, F1, Mcc};
                matches!(self, Acc | AccNorm | AccBytes | AccMutualInfo | ExactMatch | F1 | Mcc | Brier)
            }
            OutputType::Loglikelihood => matches!(self, Self::Acc | Self::Perplexity),
            OutputType::LoglikelihoodRolling => {
                matches!(self, Self::WordPerplexity | Self::BytePerplexity | Self::BitsPerByte)
            }
            OutputType::GenerateUntil => self.is_of_texts() || matches!(self, Self::ExactMatch | Self::F1 | Self::Mcc),
        }
    }

    /// Whether it compares the words or letters of texts.
    pub fn is_of_texts(self) -> bool {
        matches!(self, Self::Bleu | Self::Chrf | Self::ChrfPlusPlus | Self::Ter)
    }

    /// What a text shares with the right one, by a metric of texts.
    pub fn counts(self, said: &str, right: &str) -> Worth {
        Worth::Counts(match self {
            Self::Ter => {
                let (edits, words) = ter::edits(said, right);
                vec![edits, words]
            }
            Self::Chrf | Self::ChrfPlusPlus => chrf::counts(said, right, self == Self::ChrfPlusPlus).concat(),
            _ => {
                let counts = bleu::Counts::of(said, right);
                let lengths = [counts.hypothesis_length, counts.reference_length];
                [&counts.matches[..], &counts.totals[..], &lengths[..]].concat()
            }
        })
    }

    /// The score of the counts of some rows.
    fn of_counts(self, rows: &[&Worth]) -> f64 {
        let mut sums: Vec<u64> = Vec::new();
        for row in rows {
            if let Worth::Counts(counts) = row {
                sums.resize(counts.len(), 0);
                sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            }
        }
        match (self, sums.as_slice()) {
            (Self::Ter, [edits, words]) => ter::score(*edits, *words),
            (Self::Bleu, [sums @ .., hypothesis_length, reference_length]) => {
                let (matches, totals) = sums.split_at(bleu::MAX_ORDER);
                let orders = |counts: &[u64]| std::array::from_fn(|n| counts[n]);
                let (hypothesis_length, reference_length) = (*hypothesis_length, *reference_length);
                let (matches, totals) = (orders(matches), orders(totals));
                bleu::Counts { matches, totals, hypothesis_length, reference_length }.corpus().score
            }
            (_, sums) => chrf::score(sums.as_chunks().0),
        }
    }
}

impl Metric {
    /// Reads an entry of `metric_list`.
    ///
    /// # Errors
    /// Says which metric or argument is not known, or does not fit what is asked.
    pub fn read(entry: &Map<String, Value>, output_type: OutputType) -> Result<Self, String> {
        let name = entry.get("metric").and_then(Value::as_str).ok_or("an entry lacks the name of its `metric`")?;
        let kind = Kind::of_name(name).ok_or_else(|| format!("the metric `{name}` is not known here"))?;
        if !kind.fits(output_type) {
            return Err(format!("the metric `{name}` does not belong to this `output_type`"));
        }
        let mut metric = Self { kind, alike: Alike::default(), higher_is_better: true };
        for (argument, value) in entry {
            let flag = || value.as_bool().ok_or_else(|| format!("`{argument}` is to be true or false"));
            match argument.as_str() {
                "metric" => {}
                "aggregation" => {
                    let usual = match kind {
                        Kind::F1 | Kind::Brier | Kind::Perplexity | Kind::BitsPerByte => kind.name(),
                        kind if kind.is_of_texts() => kind.name(),
                        Kind::Mcc => "matthews_corrcoef",
                        Kind::WordPerplexity | Kind::BytePerplexity => "weighted_perplexity",
                        _ => "mean",
                    };
                    if value != usual {
                        return Err(format!(
                            "`{name}` with `aggregation: {value}`; `{usual}` is the one that is known"
                        ));
                    }
                }
                "higher_is_better" => metric.higher_is_better = flag()?,
                // It is of groups; here the harness passes it over as well.
                "weight_by_size" => {}
                "ignore_case" => metric.alike.case = flag()?,
                "ignore_punctuation" => metric.alike.punctuation = flag()?.then_some(Punctuation::Ascii),
                "ignore_numbers" => metric.alike.digits = flag()?,
                "regexes_to_ignore" => metric.alike.regexes = Alike::regexes(value)?,
                other => return Err(format!("`{name}` has no argument `{other}`")),
            }
        }
        Ok(metric)
    }

    /// Whether it needs the choices without their context.
    pub fn needs_unconditional(&self) -> bool {
        self.kind == Kind::AccMutualInfo
    }

    /// The figure of all rows, and its standard error where it has one.
    pub fn aggregate(&self, rows: &[Worth], bootstrap_iterations: usize) -> (f64, Option<f64>) {
        let numbers = || -> Vec<f64> {
            let number = |row: &Worth| if let Worth::Number(number) = row { Some(*number) } else { None };
            rows.iter().filter_map(number).collect()
        };
        let bootstrap_iterations = match self.kind.is_of_texts() {
            true => bootstrap_iterations.min(ITERATIONS_OF_TEXTS),
            false => bootstrap_iterations,
        };
        let over = |figure: &(dyn Fn(&[&Worth]) -> f64 + Sync)| {
            let all: Vec<&Worth> = rows.iter().collect();
            (figure(&all), bootstrapped(rows, figure, bootstrap_iterations))
        };
        match self.kind {
            Kind::Mcc => {
                let numbered = numbered(rows);
                let all: Vec<&Worth> = numbered.iter().collect();
                (mcc(&all), bootstrapped(&numbered, &mcc, bootstrap_iterations))
            }
            Kind::Perplexity => {
                over(&|rows: &[&Worth]| (-mean(&rows.iter().map(|row| row.number()).collect::<Vec<_>>())).exp())
            }
            Kind::F1 => over(&f1),
            kind if kind.is_of_texts() => over(&|rows: &[&Worth]| kind.of_counts(rows)),
            Kind::Brier => (brier(rows), None),
            Kind::WordPerplexity | Kind::BytePerplexity => ((-per_unit(rows)).exp(), None),
            Kind::BitsPerByte => (-per_unit(rows) / std::f64::consts::LN_2, None),
            _ => (mean(&numbers()), standard_error(&numbers())),
        }
    }
}

impl Worth {
    fn number(&self) -> f64 {
        if let Self::Number(number) = self { *number } else { f64::NAN }
    }
}

pub(super) fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

/// Deviation of a sample; `None` of one number.
fn deviation(numbers: &[f64]) -> Option<f64> {
    let mean = mean(numbers);
    let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
    (numbers.len() > 1).then(|| (squares / (numbers.len() - 1) as f64).sqrt())
}

/// Standard error of a mean.
pub fn standard_error(numbers: &[f64]) -> Option<f64> {
    Some(deviation(numbers)? / (numbers.len() as f64).sqrt())
}

/// Standard error by bootstrap: the deviation of the figure over rows drawn with replacement.
fn bootstrapped(rows: &[Worth], figure: &(dyn Fn(&[&Worth]) -> f64 + Sync), iterations: usize) -> Option<f64> {
    if rows.is_empty() || iterations == 0 {
        return None;
    }
    let chunk = CHUNK.min(iterations);
    let of_chunk = |seed: usize| -> Vec<f64> {
        let mut random = PythonRandom::new(seed as u64);
        let mut draw = || {
            let drawn: Vec<&Worth> = rows.iter().map(|_| &rows[random.choice(rows.len())]).collect();
            figure(&drawn)
        };
        (0..chunk).map(|_| draw()).collect()
    };
    let figures: Vec<Vec<f64>> = (0..iterations / chunk).into_par_iter().map(of_chunk).collect();
    deviation(&figures.concat())
}

fn per_unit(rows: &[Worth]) -> f64 {
    let (mut sum, mut units) = (0.0, 0.0);
    for row in rows {
        if let Worth::Weighted(loglikelihood, count) = row {
            sum += loglikelihood;
            units += count;
        }
    }
    sum / units
}

fn brier(rows: &[Worth]) -> f64 {
    let of_row = |row: &Worth| {
        let Worth::Probabilities(right, probabilities) = row else { return f64::NAN };
        let off = |(at, p): (usize, &f64)| (p - f64::from(u8::from(at == *right))).powi(2);
        probabilities.iter().enumerate().map(off).sum()
    };
    mean(&rows.iter().map(of_row).collect::<Vec<f64>>())
}

/// True and false positives and negatives, class 1 being positive.
fn confusion(rows: &[&Worth]) -> [f64; 4] {
    let mut counts = [0.0; 4];
    for row in rows {
        if let Worth::Classes(right, made) = row {
            counts[usize::from(*right != 1) * 2 + usize::from(*made != 1)] += 1.0;
        }
    }
    counts
}

/// F1 of class 1; 0 where nothing is positive.
fn f1(rows: &[&Worth]) -> f64 {
    let [true_positive, false_negative, false_positive, _] = confusion(rows);
    let all = 2.0 * true_positive + false_negative + false_positive;
    if all == 0.0 { 0.0 } else { 2.0 * true_positive / all }
}

/// Labels as classes, numbered.
fn numbered<'w>(rows: &'w [Worth]) -> Vec<Worth> {
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    let mut number = |label: &'w str| {
        let next = known.len();
        *known.entry(label).or_insert(next)
    };
    let mut of_row = |row: &'w Worth| match row {
        Worth::Labels(right, made) => Worth::Classes(number(right), number(made)),
        other => other.clone(),
    };
    rows.iter().map(&mut of_row).collect()
}

/// Matthews' correlation of any number of classes; 0 where it is not defined. `sklearn.metrics.matthews_corrcoef`.
fn mcc(rows: &[&Worth]) -> f64 {
    let (mut of_right, mut of_made): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
    let (mut same, mut all) = (0.0, 0.0);
    for row in rows {
        let Worth::Classes(right, made) = row else { continue };
        let classes = of_right.len().max(right + 1).max(made + 1);
        of_right.resize(classes, 0.0);
        of_made.resize(classes, 0.0);
        of_right[*right] += 1.0;
        of_made[*made] += 1.0;
        same += f64::from(u8::from(right == made));
        all += 1.0;
    }
    let dot = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(one, other)| one * other).sum::<f64>();
    let variances = (all * all - dot(&of_made, &of_made)) * (all * all - dot(&of_right, &of_right));
    if variances == 0.0 { 0.0 } else { (same * all - dot(&of_right, &of_made)) / variances.sqrt() }
}
