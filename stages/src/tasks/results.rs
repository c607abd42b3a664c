//! From the answers of a model to the figures of a task, and of groups.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::TaskError;
use super::file::{OutputType, Processor, Task};
use super::filter::Pipeline;
use super::group::Group;
use super::metric::{Kind, Metric, Worth, mean};
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

/// What each row is worth by a metric and filter: `acc,none`.
pub type Column = (String, Vec<Option<f64>>);

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

impl Task {
    /// What the answers to a row are worth by a metric; of a generation, by what a filter makes of the responses.
    ///
    /// # Errors
    /// Fails where a processor's columns are missing, or a metric of classes is given something else.
    pub fn worth(
        &self,
        metric: &Metric,
        sample: &Sample,
        answers: &[Answer],
        filtered: &[Value],
    ) -> Result<Worth, TaskError> {
        if self.process_results == Some(Processor::TruthfulQaMc2) {
            return self.truthful(sample, answers).map(Worth::Number);
        }
        let number = |flag: bool| Worth::Number(f64::from(u8::from(flag)));
        Ok(match (self.output_type, metric.kind) {
            (OutputType::MultipleChoice, kind) => match self.choice(kind, sample, answers) {
                Worth::Classes(right, made) if kind == Kind::F1 && right.max(made) > 1 => {
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
            (OutputType::GenerateUntil, kind) if kind.is_of_texts() => {
                let (right, said) = self.one_right_response(kind, sample, filtered)?;
                kind.counts(&printed(said), right)
            }
            (OutputType::GenerateUntil, Kind::F1 | Kind::Mcc) => self.class(metric.kind, sample, filtered)?,
            (OutputType::GenerateUntil, _) => {
                let Gold::Texts(right) = &sample.gold else { return Ok(Worth::Number(0.0)) };
                let mut right_ones = 0.0;
                for said in filtered {
                    let said = printed(said);
                    let same = right.iter().map(|text| metric.alike.same(&said, text));
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

    /// What a filter makes of the responses to a row; where none was drawn they are all the same.
    fn filtered(&self, pipeline: &Pipeline, sample: &Sample, answers: &[Answer]) -> Result<Vec<Value>, TaskError> {
        let texts = answers.iter().filter_map(|answer| match answer {
            Answer::Text(text) => Some(text.clone()),
            Answer::Loglikelihood { .. } => None,
        });
        let texts: Vec<String> = texts.collect();
        if texts.is_empty() {
            return Ok(Vec::new());
        }
        let texts = texts.into_iter().cycle().take(self.repeats.max(answers.len())).collect();
        pipeline.apply(texts, &sample.document).map_err(|message| self.wrong("filter_list", message))
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

    /// What each row is worth, by metric and filter: `acc,none`; what a metric takes over several rows alone is left
    /// out.
    ///
    /// # Errors
    /// As for [`Task::worth`], with the row.
    pub fn worths(&self, samples: &[Sample], answers: &[Vec<Answer>]) -> Result<Vec<Column>, TaskError> {
        let mut columns = Vec::new();
        for pipeline in &self.filters {
            for metric in &self.metrics {
                let row = |at: usize| {
                    // Of a row alone they have no figure, and take long to count.
                    if metric.kind.is_of_texts() {
                        return Ok(None);
                    }
                    let filtered = self.filtered(pipeline, &samples[at], &answers[at]);
                    let worth = filtered.and_then(|filtered| self.worth(metric, &samples[at], &answers[at], &filtered));
                    Ok(match worth.map_err(|error| error.in_row(at))? {
                        Worth::Number(number) | Worth::Weighted(number, _) => Some(number),
                        Worth::Probabilities(..) | Worth::Classes(..) | Worth::Labels(..) | Worth::Counts(_) => None,
                    })
                };
                let column = (0..samples.len()).map(row).collect::<Result<_, TaskError>>()?;
                columns.push((format!("{},{}", metric.kind.name(), pipeline.name), column));
            }
        }
        Ok(columns)
    }

    /// The figures of all rows.
    ///
    /// # Errors
    /// As for [`Task::worth`], with the row.
    pub fn results(
        &self,
        samples: &[Sample],
        answers: &[Vec<Answer>],
        bootstrap_iterations: usize,
    ) -> Result<Results, TaskError> {
        let mut results = Results { sample_len: samples.len(), ..Results::default() };
        for pipeline in &self.filters {
            let filtered =
                |at: usize| self.filtered(pipeline, &samples[at], &answers[at]).map_err(|error| error.in_row(at));
            let filtered: Vec<Vec<Value>> = (0..samples.len()).map(filtered).collect::<Result<_, _>>()?;
            for metric in &self.metrics {
                let row = |at: usize| {
                    let worth = self.worth(metric, &samples[at], &answers[at], &filtered[at]);
                    worth.map_err(|error| error.in_row(at))
                };
                let rows: Vec<Worth> = (0..samples.len()).map(row).collect::<Result<_, _>>()?;
                let (value, stderr) = metric.aggregate(&rows, bootstrap_iterations);
                results.figures.insert(format!("{},{}", metric.kind.name(), pipeline.name), Figure { value, stderr });
            }
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
