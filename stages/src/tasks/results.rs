//! From the answers of a model to the figures of a task, and of groups.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::TaskError;
use super::alike::Alike;
use super::documents::Document;
use super::file::{OutputType, Processor, Task};
use super::filter::{Filtered, Pipeline};
use super::functions::{Function, Kept};
use super::group::Group;
use super::metric::{Aggregation, Kind, Metric, MetricSource, Worth, mean};
use super::request::{Gold, Request, Sample};
use super::template::printed;
use crate::data::prompt::python::is_space;

/// What a model makes of a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// The sum of log-probabilities of a continuation or text, and whether each of its tokens is the most likely.
    Loglikelihood { sum: f64, is_greedy: bool },
    /// A continuation.
    Text(String),
}

impl Answer {
    /// As samples hold it: a log-likelihood as the pair that it is, a continuation as a text.
    pub fn json(&self) -> Value {
        match self {
            Self::Loglikelihood { sum, is_greedy } => json!([sum, is_greedy]),
            Self::Text(text) => json!(text),
        }
    }

    /// What [`Answer::json`] makes of it, read again; `None` of a log-likelihood that is not finite, which JSON has
    /// not.
    pub fn of_json(value: &Value) -> Option<Self> {
        match value {
            Value::String(text) => Some(Self::Text(text.clone())),
            Value::Array(pair) => match &pair[..] {
                [sum, is_greedy] => Some(Self::Loglikelihood { sum: sum.as_f64()?, is_greedy: is_greedy.as_bool()? }),
                _ => None,
            },
            _ => None,
        }
    }

    fn sum(&self) -> f64 {
        if let Self::Loglikelihood { sum, .. } = self { *sum } else { f64::NAN }
    }

    fn is_greedy(&self) -> bool {
        matches!(self, Self::Loglikelihood { is_greedy: true, .. })
    }
}

/// What rows are worth by a metric and filter.
#[derive(Debug)]
pub struct Measured<'t> {
    /// `acc,none`.
    pub key: String,
    aggregation: &'t Aggregation,
    /// Of each row; nothing where a function gave none.
    rows: Vec<Option<Worth>>,
}

/// A figure of a task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure {
    pub value: f64,
    pub stderr: Option<f64>,
}

/// The figures of a task or group, by metric and filter: `acc,none`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Results {
    /// Rows that they are of.
    pub sample_len: usize,
    pub figures: BTreeMap<String, Figure>,
}

impl Measured<'_> {
    /// What each row is worth, where it is a number.
    pub fn numbers(&self) -> Vec<Option<f64>> {
        let number = |worth: &Worth| if let Worth::Weighted(sum, _) = worth { Some(*sum) } else { worth.number() };
        self.rows.iter().map(|row| row.as_ref().and_then(number)).collect()
    }
}

impl Task {
    /// What the answers to a row are worth by a metric that is known here; of a generation, by what a filter makes of
    /// the responses.
    ///
    /// # Errors
    /// Fails where a processor's columns are missing, or a metric of classes is given something else.
    fn worth(
        &self,
        (kind, alike): (Kind, &Alike),
        sample: &Sample,
        answers: &[Answer],
        filtered: &[Value],
        is_for_function: bool,
    ) -> Result<Worth, TaskError> {
        if self.process_results == Some(Processor::TruthfulQaMc2) {
            return self.truthful(sample, answers).map(Worth::Number);
        }
        let number = |flag: bool| Worth::Number(f64::from(u8::from(flag)));
        Ok(match (self.output_type, kind) {
            (OutputType::MultipleChoice, kind) => match self.choice(kind, sample, answers) {
                Worth::Classes(right, made) if kind == Kind::F1 && right.max(made) > 1 && !is_for_function => {
                    let message = format!("`f1` is for two choices, and there is choice {}", right.max(made) + 1);
                    return Err(self.wrong("metric_list", message));
                }
                worth => worth,
            },
            (OutputType::Loglikelihood, Kind::Acc) => number(answers[0].is_greedy()),
            (OutputType::Loglikelihood, _) => Worth::Number(answers[0].sum()),
            (OutputType::LoglikelihoodRolling, kind) => {
                let page = || sample.document.get("page").and_then(serde_json::Value::as_str);
                let text = match &sample.requests[0] {
                    Request::Rolling { .. } if self.process_results == Some(Processor::OfPage) => page().unwrap_or(""),
                    Request::Rolling { text } => text.as_str(),
                    _ => "",
                };
                let units = if kind == Kind::WordPerplexity { words(text) } else { text.len() };
                Worth::Weighted(answers[0].sum(), units as f64)
            }
            (OutputType::GenerateUntil, kind) if kind != Kind::ExactMatch && is_for_function => {
                let (right, said) = self.one_right_response(kind, sample, filtered)?;
                Worth::Pair(right.into(), said.clone())
            }
            (OutputType::GenerateUntil, kind) if kind.is_of_texts() => {
                let (right, said) = self.one_right_response(kind, sample, filtered)?;
                kind.counts(&printed(said), right)
            }
            (OutputType::GenerateUntil, Kind::F1 | Kind::Mcc) => self.class(kind, sample, filtered)?,
            (OutputType::GenerateUntil, _) => {
                let Gold::Texts(right) = &sample.gold else { return Ok(Worth::Number(0.0)) };
                let mut right_ones = 0.0;
                for said in filtered {
                    let said = printed(said);
                    let same = right.iter().map(|text| alike.same(&said, text));
                    let same: Vec<bool> =
                        same.collect::<Result<_, _>>().map_err(|message| self.wrong("metric_list", message))?;
                    right_ones += f64::from(u8::from(same.contains(&true)));
                }
                // Of several responses their share.
                Worth::Number(right_ones / filtered.len().max(1) as f64)
            }
        })
    }

    fn wrong(&self, key: &str, message: impl Into<String>) -> TaskError {
        TaskError::key(&self.file, key, message)
    }

    /// What a filter makes of the responses to each row; where none was drawn they are all the same.
    fn filtered(
        &self,
        pipeline: &Pipeline,
        samples: &[Sample],
        answers: &[Vec<Answer>],
    ) -> Result<Vec<Filtered>, TaskError> {
        let of_row = |answers: &Vec<Answer>| -> Vec<String> {
            let texts = answers.iter().filter_map(|answer| match answer {
                Answer::Text(text) => Some(text.clone()),
                Answer::Loglikelihood { .. } => None,
            });
            let texts: Vec<String> = texts.collect();
            texts.into_iter().cycle().take(self.repeats.max(answers.len())).collect()
        };
        let texts: Vec<Vec<String>> = answers.iter().map(of_row).collect();
        if texts.iter().all(Vec::is_empty) {
            return Ok(vec![Filtered::default(); samples.len()]);
        }
        let rows: Vec<&Document> = samples.iter().map(|sample| &sample.document).collect();
        pipeline.apply(texts, &rows).map_err(|(row, message)| {
            let error = self.wrong("filter_list", message);
            match row {
                Some(row) => error.in_row(row),
                None => error,
            }
        })
    }

    /// The one right text of a row and the one response to it, for metrics that are of no more.
    fn one_right_response<'s>(
        &self,
        kind: Kind,
        sample: &'s Sample,
        filtered: &'s [Value],
    ) -> Result<(&'s str, &'s Value), TaskError> {
        let name = kind.name();
        let [made] = filtered else {
            let message = format!("`{name}` needs one response per row: end the filter with `take_first`");
            return Err(self.wrong("filter_list", message));
        };
        match &sample.gold {
            Gold::Texts(right) if right.len() == 1 => Ok((&right[0], made)),
            _ => Err(self.wrong("doc_to_target", format!("`{name}` is of one right answer, and there are several"))),
        }
    }

    /// The class that a row has, and the one that its answer is.
    fn class(&self, kind: Kind, sample: &Sample, filtered: &[Value]) -> Result<Worth, TaskError> {
        let (right, made) = self.one_right_response(kind, sample, filtered)?;
        if made.is_null() {
            return Err(self.wrong("filter_list", "`map` has neither a value for a response nor a `default_value`"));
        }
        if kind == Kind::Mcc {
            return Ok(Worth::Labels(right.to_owned(), printed(made)));
        }
        let class = |text: &str| ["0", "1"].iter().position(|class| *class == text);
        match (class(right), class(&printed(made)), made) {
            (Some(right), Some(made), Value::Number(_)) => Ok(Worth::Classes(right, made)),
            _ => {
                let message = format!(
                    "`f1` is of the classes 0 and 1, and there are `{right}` and `{}`: the filter `map` converts \
                     responses to numbers",
                    printed(made)
                );
                Err(self.wrong("metric_list", message))
            }
        }
    }

    fn choice(&self, kind: Kind, sample: &Sample, answers: &[Answer]) -> Worth {
        let Gold::Choices(right) = &sample.gold else { return Worth::Number(f64::NAN) };
        let choices = sample.choices.len();
        let sums: Vec<f64> = answers[..choices].iter().map(Answer::sum).collect();
        let weighed = |weight: &dyn Fn(usize, f64) -> f64| -> usize {
            largest(&sums.iter().enumerate().map(|(at, sum)| weight(at, *sum)).collect::<Vec<f64>>())
        };
        let number = |flag: bool| Worth::Number(f64::from(u8::from(flag)));
        let made = weighed(&|_, sum| sum);
        match kind {
            Kind::AccNorm => {
                number(right.contains(&weighed(&|at, sum| sum / sample.choices[at].chars().count() as f64)))
            }
            Kind::AccBytes => number(right.contains(&weighed(&|at, sum| sum / sample.choices[at].len() as f64))),
            Kind::AccMutualInfo => number(right.contains(&weighed(&|at, sum| sum - answers[choices + at].sum()))),
            Kind::ExactMatch => number(right.iter().any(|at| answers[*at].is_greedy())),
            Kind::Brier => Worth::Probabilities(right[0], softmax(&sums)),
            Kind::F1 | Kind::Mcc => Worth::Classes(right[0], made),
            _ => number(right.contains(&made)),
        }
    }

    /// TruthfulQA's share of probability on true answers.
    fn truthful(&self, sample: &Sample, answers: &[Answer]) -> Result<f64, TaskError> {
        let labels = sample.document.get("mc2_targets").and_then(|targets| targets.get("labels"));
        let labels = labels
            .and_then(|labels| labels.as_array())
            .ok_or_else(|| TaskError::key(&self.file, "process_results", "a row has no list `mc2_targets.labels`"))?;
        let p: Vec<f64> = answers.iter().map(|answer| answer.sum().exp()).collect();
        let of_true: f64 = p.iter().zip(labels).filter(|(_, label)| **label == 1).map(|(p, _)| p).sum();
        Ok(of_true / p.iter().sum::<f64>())
    }

    /// What rows are worth, by filter and metric.
    ///
    /// # Errors
    /// Fails where a processor's columns are missing, a metric is given what it is not of, or a function fails, with
    /// the row.
    pub fn measured(&self, samples: &[Sample], answers: &[Vec<Answer>]) -> Result<Vec<Measured<'_>>, TaskError> {
        let mut all: Vec<Measured<'_>> = Vec::new();
        for pipeline in &self.filters {
            let first = all.len();
            let filtered = self.filtered(pipeline, samples, answers)?;
            for (at, ((sample, answers), filtered)) in samples.iter().zip(answers).zip(&filtered).enumerate() {
                let found = self.worths(sample, answers, filtered);
                for (name, aggregation, worth) in found.map_err(|error| error.in_row(at))? {
                    let key = format!("{name},{}", pipeline.name);
                    let place = all[first..].iter().position(|measured| measured.key == key);
                    let place = place.map_or(all.len(), |place| first + place);
                    if place == all.len() {
                        all.push(Measured { key, aggregation, rows: vec![None; samples.len()] });
                    }
                    all[place].rows[at] = Some(worth);
                }
            }
        }
        Ok(all)
    }

    /// What a row is worth, by the names of metrics.
    fn worths(
        &self,
        sample: &Sample,
        answers: &[Answer],
        filtered: &Filtered,
    ) -> Result<Vec<(String, &Aggregation, Worth)>, TaskError> {
        if let Some(Processor::Function(function)) = &self.process_results {
            return self.results_by(function, sample, answers, filtered);
        }
        let mut all = Vec::new();
        for metric in &self.metrics {
            let Metric { name, source, aggregation, .. } = metric;
            match source {
                MetricSource::Known(kind, alike) => {
                    let is_for_function = matches!(aggregation, Aggregation::Function(_));
                    let worth = self.worth((*kind, alike), sample, answers, &filtered.values, is_for_function)?;
                    all.push((name.clone(), aggregation, worth));
                }
                MetricSource::Function(function, arguments) => {
                    let Gold::Texts(right) = &sample.gold else {
                        return Err(self.wrong("metric_list", "a `!function` is for `output_type: generate_until`"));
                    };
                    let found = function.metric(name, right, filtered.json(), arguments);
                    let found = found.map_err(|message| self.wrong("metric_list", message))?;
                    all.extend(found.into_iter().map(|(name, kept)| (name, aggregation, Worth::Kept(kept))));
                }
                MetricSource::Results => {}
            }
        }
        Ok(all)
    }

    /// What the function of `process_results` returns; what `metric_list` does not have is a mean.
    fn results_by(
        &self,
        function: &Function,
        sample: &Sample,
        answers: &[Answer],
        filtered: &Filtered,
    ) -> Result<Vec<(String, &Aggregation, Worth)>, TaskError> {
        let given = match self.output_type {
            OutputType::GenerateUntil => vec![filtered.json()],
            OutputType::LoglikelihoodRolling => answers.iter().map(|answer| json!(answer.sum())).collect(),
            OutputType::MultipleChoice | OutputType::Loglikelihood => answers.iter().map(Answer::json).collect(),
        };
        let are_pairs = matches!(self.output_type, OutputType::MultipleChoice | OutputType::Loglikelihood);
        let found = function.results(&sample.document, given, are_pairs);
        let found = found.map_err(|message| self.wrong("process_results", message))?;
        let of = |(name, kept): (String, Kept)| {
            let metric = self.metrics.iter().find(|metric| metric.name == name);
            (name, metric.map_or(&Aggregation::Mean, |metric| &metric.aggregation), Worth::Kept(kept))
        };
        Ok(found.into_iter().map(of).collect())
    }

    /// The figures of all rows.
    ///
    /// # Errors
    /// As for [`Task::measured`].
    pub fn results(
        &self,
        samples: &[Sample],
        answers: &[Vec<Answer>],
        bootstrap_iterations: usize,
    ) -> Result<Results, TaskError> {
        self.figures(&self.measured(samples, answers)?, bootstrap_iterations)
    }

    /// The figures of what rows are worth.
    ///
    /// # Errors
    /// Fails where there is no such figure of them, or a function fails.
    pub fn figures(&self, measured: &[Measured<'_>], bootstrap_iterations: usize) -> Result<Results, TaskError> {
        let mut results = Results::default();
        for Measured { key, aggregation, rows } in measured {
            let rows: Vec<&Worth> = rows.iter().flatten().collect();
            let figure = aggregation.figure(&rows, bootstrap_iterations);
            let (value, stderr) = figure.map_err(|message| self.wrong("metric_list", format!("`{key}` {message}")))?;
            results.sample_len = results.sample_len.max(rows.len());
            results.figures.insert(key.clone(), Figure { value, stderr });
        }
        Ok(results)
    }
}

impl Group {
    /// The figures of the group from those of its tasks, those of groups in it among them, in any order.
    pub fn results(&self, tasks: &[&Results]) -> Results {
        let rows = |results: &&Results| results.sample_len as f64;
        let total: f64 = tasks.iter().map(rows).sum();
        let mut group = Results { sample_len: total as usize, ..Results::default() };
        for metric in &self.metrics {
            let prefix = format!("{},", metric.metric);
            let is_meant = |key: &&String| {
                let filter = key.strip_prefix(&prefix);
                filter.is_some_and(|filter| {
                    metric.filters.as_ref().is_none_or(|names| names.iter().any(|name| name == filter))
                })
            };
            let keys: std::collections::BTreeSet<&String> =
                tasks.iter().flat_map(|task| task.figures.keys()).filter(is_meant).collect();
            for key in keys {
                let of_tasks: Vec<(f64, Figure)> =
                    tasks.iter().filter_map(|task| Some((task.sample_len as f64, *task.figures.get(key)?))).collect();
                group.figures.insert(key.clone(), together(&of_tasks, metric.weight_by_size));
            }
        }
        group
    }
}

/// The mean of some figures, each of so many rows.
fn together(figures: &[(f64, Figure)], weight_by_size: bool) -> Figure {
    let (count, total) = (figures.len() as f64, figures.iter().map(|(rows, _)| rows).sum::<f64>());
    let errors: Option<Vec<(f64, f64)>> = figures.iter().map(|(rows, figure)| Some((*rows, figure.stderr?))).collect();
    if weight_by_size {
        let value = figures.iter().map(|(rows, figure)| rows * figure.value).sum::<f64>() / total;
        let pooled = |errors: Vec<(f64, f64)>| {
            let squares: f64 = errors.iter().map(|(rows, error)| (rows - 1.0) * error * error * rows).sum();
            (squares / (total - count) / total).sqrt()
        };
        return Figure { value, stderr: errors.map(pooled) };
    }
    let value = mean(&figures.iter().map(|(_, figure)| figure.value).collect::<Vec<f64>>());
    let squares = |errors: Vec<(f64, f64)>| errors.iter().map(|(_, error)| error * error).sum::<f64>().sqrt() / count;
    Figure { value, stderr: errors.map(squares) }
}

/// Where the largest number is first.
fn largest(numbers: &[f64]) -> usize {
    (0..numbers.len()).fold(0, |best, at| if numbers[at] > numbers[best] { at } else { best })
}

fn softmax(sums: &[f64]) -> Vec<f64> {
    let most = sums.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = sums.iter().map(|sum| (sum - most).exp()).collect();
    let total: f64 = exp.iter().sum();
    exp.iter().map(|p| p / total).collect()
}

/// `len(re.split(r"\s+", text))`: white space at an end counts an empty word there.
fn words(text: &str) -> usize {
    let mut words = 1;
    let mut in_space = false;
    for letter in text.chars() {
        let begins_space = is_space(letter) && !in_space;
        words += usize::from(begins_space);
        in_space = is_space(letter);
    }
    words
}
