//! Metrics: what a row's answer is worth, and how rows become a figure with its standard error.

use std::collections::BTreeMap;

use engine::figure::Unit;
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::alike::{Alike, Punctuation};
use super::file::OutputType;
use super::filter::Functions;
use super::functions::{Function, Kept};
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
    /// Its name in results.
    pub name: String,
    pub source: MetricSource,
    pub aggregation: Aggregation,
    pub higher_is_better: bool,
}

/// Where what a row is worth comes from.
#[derive(Debug, Clone)]
pub enum MetricSource {
    Known(Kind, Alike),
    /// It is given the right answer, the response and these arguments.
    Function(Function, Map<String, Value>),
    /// The function of `process_results` returns it.
    Results,
}

/// How rows become a figure.
#[derive(Debug, Clone)]
pub enum Aggregation {
    Mean,
    /// Of those that are numbers.
    NanMean,
    /// As this metric's.
    Of(Kind),
    Function(Function),
}

/// How an entry of `metric_list` is read.
pub(super) struct Reading<'r> {
    pub output_type: OutputType,
    /// A function of `process_results` gives the metrics.
    pub are_processed: bool,
    pub function: Functions<'r>,
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
    /// The right answer and the response, for a function.
    Pair(Value, Value),
    /// What a function returned.
    Kept(Kept),
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

    /// Whether its figure is the mean of what rows are worth.
    fn is_mean(self) -> bool {
        self.usual_aggregation() == "mean"
    }

    /// What the harness calls its aggregation.
    fn usual_aggregation(self) -> &'static str {
        match self {
            Self::F1 | Self::Brier | Self::Perplexity | Self::BitsPerByte => self.name(),
            kind if kind.is_of_texts() => kind.name(),
            Self::Mcc => "matthews_corrcoef",
            Self::WordPerplexity | Self::BytePerplexity => "weighted_perplexity",
            _ => "mean",
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

/// What an entry of `metric_list` says beside the arguments of its metric.
const OF_AN_ENTRY: [&str; 4] = ["metric", "aggregation", "higher_is_better", "hf_evaluate"];

impl Metric {
    /// Those of a task without `metric_list`: `DEFAULT_METRIC_REGISTRY` of the harness.
    pub(super) fn defaults(output_type: OutputType, are_processed: bool) -> Vec<Self> {
        let kinds: &[Kind] = match output_type {
            OutputType::MultipleChoice => &[Kind::Acc, Kind::AccNorm],
            OutputType::Loglikelihood => &[Kind::Perplexity, Kind::Acc],
            OutputType::LoglikelihoodRolling => &[Kind::WordPerplexity, Kind::BytePerplexity, Kind::BitsPerByte],
            OutputType::GenerateUntil => &[Kind::ExactMatch],
        };
        let metric = |kind: &Kind| Self {
            name: kind.name().to_owned(),
            source: match are_processed {
                true => MetricSource::Results,
                false => MetricSource::Known(*kind, Alike::default()),
            },
            aggregation: Aggregation::Of(*kind),
            higher_is_better: kind.better() == Better::Higher,
        };
        kinds.iter().map(metric).collect()
    }

    /// Reads an entry of `metric_list`.
    ///
    /// # Errors
    /// Says which metric or argument is not known, or does not fit what is asked.
    pub(super) fn read(entry: &Map<String, Value>, reading: &Reading<'_>) -> Result<Self, String> {
        let metric = entry.get("metric").ok_or("an entry lacks the name of its `metric`")?;
        let function = (reading.function)(metric)?;
        let name =
            function.as_ref().map(Function::name).or(metric.as_str()).ok_or("`metric` is to be a name")?.to_owned();
        let higher_is_better = match entry.get("higher_is_better") {
            None => Kind::of_name(&name).is_none_or(|kind| kind.better() == Better::Higher),
            Some(flag) => flag.as_bool().ok_or("`higher_is_better` is to be true or false")?,
        };
        let (source, aggregation) = match function {
            _ if reading.are_processed => (MetricSource::Results, Self::aggregation(&name, entry, reading)?),
            Some(function) => {
                let mut arguments = entry.clone();
                arguments.retain(|key, _| !OF_AN_ENTRY.contains(&key.as_str()));
                (MetricSource::Function(function, arguments), Self::aggregation(&name, entry, reading)?)
            }
            None => Self::known(&name, entry, reading)?,
        };
        Ok(Self { name, source, aggregation, higher_is_better })
    }

    /// How the values that a function gives under a name become a figure.
    fn aggregation(name: &str, entry: &Map<String, Value>, reading: &Reading<'_>) -> Result<Aggregation, String> {
        let written = entry.get("aggregation");
        if let Some(function) = written.map_or(Ok(None), reading.function)? {
            return Ok(Aggregation::Function(function));
        }
        let of_units = |kind: &Kind| matches!(kind, Kind::WordPerplexity | Kind::BytePerplexity | Kind::BitsPerByte);
        match (written.and_then(Value::as_str), Kind::of_name(name)) {
            (Some("mean"), _) => Ok(Aggregation::Mean),
            (Some("nanmean"), _) => Ok(Aggregation::NanMean),
            (Some("perplexity"), _) => Ok(Aggregation::Of(Kind::Perplexity)),
            (Some("weighted_perplexity"), _) => Ok(Aggregation::Of(Kind::WordPerplexity)),
            (Some("bits_per_byte"), _) => Ok(Aggregation::Of(Kind::BitsPerByte)),
            (None, Some(kind)) if of_units(&kind) => Ok(Aggregation::Of(kind)),
            (None, Some(kind)) if kind.is_mean() => Ok(Aggregation::Mean),
            (None, _) => Err(format!("`{name}` lacks `aggregation`: `mean`, or a `!function`")),
            (Some(other), _) => {
                Err(format!("`{name}` with `aggregation: {other}`: of what functions return, `mean` is known"))
            }
        }
    }

    /// A metric that is known here.
    fn known(
        name: &str,
        entry: &Map<String, Value>,
        reading: &Reading<'_>,
    ) -> Result<(MetricSource, Aggregation), String> {
        let kind = Kind::of_name(name).ok_or_else(|| format!("the metric `{name}` is not known here"))?;
        if !kind.fits(reading.output_type) {
            return Err(format!("the metric `{name}` does not belong to this `output_type`"));
        }
        let (mut alike, mut aggregation) = (Alike::default(), Aggregation::Of(kind));
        // Choices are compared as they are, whatever a function then makes of them.
        let are_choices = reading.output_type == OutputType::MultipleChoice;
        for (argument, value) in entry {
            let flag = || value.as_bool().ok_or_else(|| format!("`{argument}` is to be true or false"));
            match argument.as_str() {
                "metric" | "higher_is_better" => {}
                "aggregation" => match (reading.function)(value)? {
                    Some(function) => aggregation = Aggregation::Function(function),
                    None if value == kind.usual_aggregation() => {}
                    None => {
                        let usual = kind.usual_aggregation();
                        return Err(format!(
                            "`{name}` with `aggregation: {value}`; `{usual}` is the one that is known"
                        ));
                    }
                },
                // It is of groups; here the harness passes it over as well.
                "weight_by_size" => {}
                "ignore_case" => alike.case = flag()?,
                "ignore_punctuation" => alike.punctuation = flag()?.then_some(Punctuation::Ascii),
                "ignore_numbers" => alike.digits = flag()?,
                "regexes_to_ignore" => alike.regexes = Alike::regexes(value)?,
                _ if are_choices && entry.get("aggregation").is_some_and(Value::is_object) => {}
                other => return Err(format!("`{name}` has no argument `{other}`")),
            }
        }
        Ok((MetricSource::Known(kind, alike), aggregation))
    }

    /// The functions that it has.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        let of_source = if let MetricSource::Function(function, _) = &self.source { Some(function) } else { None };
        let of_rows = if let Aggregation::Function(function) = &self.aggregation { Some(function) } else { None };
        of_source.into_iter().chain(of_rows)
    }

    /// Whether it divides by the length of a choice.
    pub fn divides_by_length(&self) -> bool {
        matches!(self.source, MetricSource::Known(Kind::AccNorm | Kind::AccBytes, _))
    }

    /// Whether it needs the choices without their context.
    pub fn needs_unconditional(&self) -> bool {
        self.name == Kind::AccMutualInfo.name()
    }
}

impl Aggregation {
    /// The figure of some rows, and its standard error where it has one.
    ///
    /// # Errors
    /// Says what a function fails over, or of what there is no such figure.
    pub fn figure(&self, rows: &[&Worth], bootstrap_iterations: usize) -> Result<(f64, Option<f64>), String> {
        if let Self::Function(function) = self {
            let values: Vec<Value> = rows.iter().map(|row| row.json()).collect();
            return Ok((function.aggregate(&values)?, None));
        }
        let number =
            |row: &&Worth| row.number().ok_or("is of numbers, and a row has none; `aggregation` can be a `!function`");
        let numbers = || rows.iter().map(number).collect::<Result<Vec<f64>, _>>();
        let kind = match self {
            Self::Of(kind) if !kind.is_mean() => *kind,
            Self::NanMean => {
                let numbers: Vec<f64> = numbers()?.into_iter().filter(|number| !number.is_nan()).collect();
                let error = bootstrapped(rows, &nanmean, bootstrap_iterations);
                return Ok((mean(&numbers), error));
            }
            _ => {
                let numbers = numbers()?;
                return Ok((mean(&numbers), standard_error(&numbers)));
            }
        };
        let bootstrap_iterations = match kind.is_of_texts() {
            true => bootstrap_iterations.min(ITERATIONS_OF_TEXTS),
            false => bootstrap_iterations,
        };
        let over = |figure: &(dyn Fn(&[&Worth]) -> f64 + Sync)| {
            (figure(rows), bootstrapped(rows, figure, bootstrap_iterations))
        };
        Ok(match kind {
            Kind::Mcc => {
                let numbered = numbered(rows);
                let all: Vec<&Worth> = numbered.iter().collect();
                (mcc(&all), bootstrapped(&all, &mcc, bootstrap_iterations))
            }
            Kind::Perplexity => {
                numbers()?;
                over(&|rows: &[&Worth]| (-mean(&rows.iter().filter_map(|row| row.number()).collect::<Vec<_>>())).exp())
            }
            Kind::F1 => over(&f1),
            kind if kind.is_of_texts() => over(&|rows: &[&Worth]| kind.of_counts(rows)),
            Kind::Brier => (brier(rows), None),
            Kind::BitsPerByte => (-per_unit(rows)? / std::f64::consts::LN_2, None),
            _ => ((-per_unit(rows)?).exp(), None),
        })
    }
}

impl Worth {
    /// The number that it is.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Kept(kept) => kept.number,
            _ => None,
        }
    }

    /// As functions are given it.
    fn json(&self) -> Value {
        match self {
            Self::Number(number) => json!(number),
            Self::Weighted(sum, count) => json!([sum, count]),
            Self::Probabilities(right, probabilities) => json!([right, probabilities]),
            Self::Classes(right, made) => json!([right, made]),
            Self::Labels(right, made) => json!([right, made]),
            Self::Counts(counts) => json!(counts),
            Self::Pair(right, said) => json!([right, said]),
            Self::Kept(kept) => kept.json(),
        }
    }
}

fn nanmean(rows: &[&Worth]) -> f64 {
    let numbers = rows.iter().filter_map(|row| row.number()).filter(|number| !number.is_nan());
    mean(&numbers.collect::<Vec<f64>>())
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
fn bootstrapped(rows: &[&Worth], figure: &(dyn Fn(&[&Worth]) -> f64 + Sync), iterations: usize) -> Option<f64> {
    if rows.is_empty() || iterations == 0 {
        return None;
    }
    let chunk = CHUNK.min(iterations);
    let of_chunk = |seed: usize| -> Vec<f64> {
        let mut random = PythonRandom::new(seed as u64);
        let mut draw = || {
            let drawn: Vec<&Worth> = rows.iter().map(|_| rows[random.choice(rows.len())]).collect();
            figure(&drawn)
        };
        (0..chunk).map(|_| draw()).collect()
    };
    let figures: Vec<Vec<f64>> = (0..iterations / chunk).into_par_iter().map(of_chunk).collect();
    deviation(&figures.concat())
}

fn per_unit(rows: &[&Worth]) -> Result<f64, String> {
    let (mut sum, mut units) = (0.0, 0.0);
    for row in rows {
        let (loglikelihood, count) = match row {
            Worth::Weighted(loglikelihood, count) => (*loglikelihood, *count),
            Worth::Kept(Kept { pair: Some((loglikelihood, count)), .. }) => (*loglikelihood, *count),
            _ => return Err("is of log-likelihoods, each with a number of words or bytes".to_owned()),
        };
        sum += loglikelihood;
        units += count;
    }
    Ok(sum / units)
}

fn brier(rows: &[&Worth]) -> f64 {
    let of_row = |row: &&Worth| {
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
fn numbered<'w>(rows: &[&'w Worth]) -> Vec<Worth> {
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    let mut number = |label: &'w str| {
        let next = known.len();
        *known.entry(label).or_insert(next)
    };
    let mut of_row = |row: &'w Worth| match row {
        Worth::Labels(right, made) => Worth::Classes(number(right), number(made)),
        other => other.clone(),
    };
    rows.iter().map(|row| of_row(row)).collect()
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
