//! What a stage would do and cost, as far as its parameters and the facts of its inputs say, before anything runs.
//!
//! Facts come from results that are in the store; where an input is still to be made, its stage may say what it
//! expects.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::artifact::{Facts, InputFacts};
use crate::file::problem::Problem;
use crate::memory::size;

/// The fact that marks other facts as expected: what they say is not known until their stage has run.
pub const EXPECTED: &str = "expected";

/// What a stage would do.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Preflight {
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
    /// What a user should hear before it runs.
    #[serde(serialize_with = "messages")]
    pub warnings: Vec<Problem>,
    /// Facts that its outputs will have, by output, as far as they are known; marked by [`EXPECTED`] when they reach a
    /// reader.
    #[serde(skip)]
    pub outputs: BTreeMap<String, Facts>,
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

impl Preflight {
    /// Adds a figure.
    pub fn figure(&mut self, name: &'static str, value: impl Into<Value>, text: impl Into<String>) {
        self.figures.push(Figure { name, value: value.into(), text: text.into() });
    }

    /// The memory that a start may be judged by.
    pub fn estimate(&self) -> Option<Estimate> {
        Some(Estimate { bytes: self.peak_memory_bytes?, margin: self.memory_margin? })
    }

    /// Says what one fact of an output will be.
    pub fn expect(&mut self, output: &str, fact: &str, value: impl Into<Value>) {
        self.outputs.entry(output.to_owned()).or_default().insert(fact.to_owned(), value.into());
    }
}

impl Preflight {
    /// Takes in what a survey of the sources expects. Where the parameters bound a number as well, the smaller holds.
    pub(crate) fn take_expected(&mut self, expected: BTreeMap<String, Facts>) {
        for (output, facts) in expected {
            let known = self.outputs.entry(output).or_default();
            for (name, value) in facts {
                let bound = known.get(&name).and_then(Value::as_u64);
                if bound.zip(value.as_u64()).is_none_or(|(bound, value)| value < bound) {
                    known.insert(name, value);
                }
            }
        }
    }
}

/// Whether facts are those of a result, and not expected ones.
pub fn is_known(facts: &Facts) -> bool {
    !facts.contains_key(EXPECTED)
}

/// The facts that are those of results, for checks that must not be wrong.
pub fn known(facts: &InputFacts) -> InputFacts {
    facts.iter().filter(|(_, facts)| is_known(facts)).map(|(name, facts)| (name.clone(), facts.clone())).collect()
}

fn messages<S: Serializer>(problems: &[Problem], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(problems.iter().map(|problem| &problem.message))
}
