//! What a stage would do, cost and make, before it runs ([`crate::stage::Stage::forecast`]).
//!
//! One pass goes through a plan: the facts of results that are there, then what each stage without a
//! result says of its outputs from those. Every fact has a grade: what is certain decides checks, which must not be
//! wrong; what is expected serves figures and estimates.

use std::collections::BTreeMap;
use std::fmt;

use cache::OutputRecord;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::artifact::{Facts, InputFacts};
use crate::file::problem::{Problem, Severity};
use crate::file::source::Span;
use crate::local_files::LocalFiles;
use crate::memory::size;
use crate::parameter::Reference;
use crate::plan::PlannedStage;

/// How well a fact is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grade {
    /// It holds whatever happens.
    Certain,
    /// It is likely: a count of lines, a bound.
    Expected,
}

/// What a stage is told before it runs.
#[derive(Debug, Clone, Copy)]
pub struct Ahead<'a> {
    /// The facts of its inputs that are certain; there may be others.
    pub certain: &'a InputFacts,
    /// Those, and the ones that are expected.
    pub expected: &'a InputFacts,
    /// The files that it reads, as far as they are here. Of each no more than [`crate::local_files::MOST_READ`] bytes
    /// are read: a header, the first rows, a configuration.
    pub files: &'a LocalFiles,
    /// Where its `with:` stands.
    pub span: Span,
}

impl<'a> Ahead<'a> {
    /// Where all inputs are there, and its files are not looked at.
    pub fn of_results(inputs: &'a InputFacts, span: Span) -> Self {
        Self { certain: inputs, expected: inputs, files: LocalFiles::NONE, span }
    }

    /// A fact of an input.
    pub fn fact(&self, input: &Reference, name: &str) -> Option<(&'a Value, Grade)> {
        let of = |inputs: &'a InputFacts| input.facts_in(inputs)?.get(name);
        let certain = of(self.certain).map(|value| (value, Grade::Certain));
        certain.or_else(|| Some((of(self.expected)?, Grade::Expected)))
    }
}

/// What is known of an output before it is made.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OutputFacts {
    pub certain: Facts,
    /// The expected ones alone.
    pub expected: Facts,
}

/// What a stage would do, cost and make.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Forecast {
    /// Its figures, in the order to print.
    pub figures: Vec<Figure>,
    /// Peak of the memory that its process would need, in bytes, files in the page cache apart.
    pub peak_memory_bytes: Option<u64>,
    /// Within which share of `peak_memory_bytes` processes were measured to stay, where they were; without it the
    /// figure is for people, and no start is judged by it.
    #[serde(skip)]
    pub memory_margin: Option<f64>,
    /// What it would write to disk, results and working state together, in bytes.
    pub disk_bytes: Option<u64>,
    /// How much there is to do, to compare it with earlier runs; `None` where that is not known.
    pub work: Option<Work>,
    /// What its sources show to be wrong, and what a user should hear before it runs.
    #[serde(rename = "warnings", serialize_with = "warnings")]
    pub problems: Vec<Problem>,
    /// What is known of its outputs, by output; there may be other facts.
    #[serde(skip)]
    pub outputs: BTreeMap<String, OutputFacts>,
}

/// Memory that a process is expected to take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The expected peak.
    pub bytes: u64,
    /// The share of it by which the peak may differ.
    pub margin: f64,
}

impl Estimate {
    /// The least that is to be expected.
    pub fn least(&self) -> u64 {
        (self.bytes as f64 * (1.0 - self.margin)) as u64
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ± {:.0} %", size(self.bytes), 100.0 * self.margin)
    }
}

/// An amount of work that a stage's time grows with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// What is counted: `rows`, `tokens`, `bytes`.
    pub unit: String,
    pub amount: f64,
}

impl Work {
    /// So much of something.
    pub fn new(unit: &str, amount: f64) -> Self {
        Self { unit: unit.to_owned(), amount }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// Its name, such as `optimizer_steps`.
    pub name: &'static str,
    pub value: Value,
    /// The value in words, with what it is made of.
    pub text: String,
}

impl Forecast {
    /// Adds a figure.
    pub fn figure(&mut self, name: &'static str, value: impl Into<Value>, text: impl Into<String>) {
        self.figures.push(Figure { name, value: value.into(), text: text.into() });
    }

    /// The memory that a start may be judged by.
    pub fn estimate(&self) -> Option<Estimate> {
        Some(Estimate { bytes: self.peak_memory_bytes?, margin: self.memory_margin? })
    }

    /// Says what one fact of an output will be, and how well that is known.
    pub fn put(&mut self, output: &str, fact: &str, value: impl Into<Value>, grade: Grade) {
        let known = self.outputs.entry(output.to_owned()).or_default();
        let facts = match grade {
            Grade::Certain => &mut known.certain,
            Grade::Expected => &mut known.expected,
        };
        facts.insert(fact.to_owned(), value.into());
    }

    /// Says what one fact of an output will be, whatever happens.
    pub fn fact(&mut self, output: &str, fact: &str, value: impl Into<Value>) {
        self.put(output, fact, value, Grade::Certain);
    }

    /// Says what several of them will be.
    pub fn facts(&mut self, output: &str, facts: Facts) {
        self.outputs.entry(output.to_owned()).or_default().certain.extend(facts);
    }

    /// Says what one fact of an output is expected to be.
    pub fn expect(&mut self, output: &str, fact: &str, value: impl Into<Value>) {
        self.put(output, fact, value, Grade::Expected);
    }

    /// Takes over facts of an input that the output will have too, as well as they are known there.
    pub fn pass<'n>(
        &mut self,
        output: &str,
        ahead: &Ahead<'_>,
        from: &Reference,
        names: impl IntoIterator<Item = &'n str>,
    ) {
        for name in names {
            if let Some((value, grade)) = ahead.fact(from, name) {
                self.put(output, name, value.clone(), grade);
            }
        }
    }
}

/// What is known of all outputs before everything has run, by `stage.output`: found in results, or foretold.
#[derive(Debug, Default)]
pub(crate) struct KnownFacts {
    pub certain: InputFacts,
    /// Those, and the ones that are expected.
    pub expected: InputFacts,
}

impl KnownFacts {
    /// Adds those of a result.
    pub(crate) fn made(&mut self, stage: &str, outputs: &BTreeMap<String, OutputRecord>) {
        for (output, record) in outputs {
            self.certain.insert(format!("{stage}.{output}"), record.facts.clone());
            self.expected.insert(format!("{stage}.{output}"), record.facts.clone());
        }
    }

    /// Adds what a stage says of its outputs.
    pub(crate) fn foretold(&mut self, stage: &str, outputs: &BTreeMap<String, OutputFacts>) {
        for (output, OutputFacts { certain, expected }) in outputs {
            let name = format!("{stage}.{output}");
            let mut all = expected.clone();
            all.extend(certain.clone());
            self.expected.insert(name.clone(), all);
            if !certain.is_empty() {
                self.certain.insert(name, certain.clone());
            }
        }
    }

    /// Those of what a stage reads.
    pub(crate) fn of_inputs(&self, stage: &PlannedStage) -> Self {
        let of = |facts: &InputFacts| {
            let names = stage.inputs.iter().map(|input| format!("{}.{}", input.stage, input.output));
            names.filter_map(|name| Some((name.clone(), facts.get(&name)?.clone()))).collect()
        };
        Self { certain: of(&self.certain), expected: of(&self.expected) }
    }

    /// What a stage is told that reads all of these.
    pub(crate) fn ahead<'a>(&'a self, files: &'a LocalFiles, span: Span) -> Ahead<'a> {
        Ahead { certain: &self.certain, expected: &self.expected, files, span }
    }
}

fn warnings<S: Serializer>(problems: &[Problem], serializer: S) -> Result<S::Ok, S::Error> {
    let warnings = problems.iter().filter(|problem| problem.severity == Severity::Warning);
    serializer.collect_seq(warnings.map(|problem| &problem.message))
}
