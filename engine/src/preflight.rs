//! What a stage would do and cost, as far as its parameters and the facts of its inputs say, before anything runs.
//!
//! Facts come from results that are in the store; where an input is still to be made, its stage may say what it expects.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::artifact::{Facts, InputFacts};
use crate::file::problem::Problem;

/// The fact that marks other facts as expected: what they say is not known until their stage has run.
pub const EXPECTED: &str = "expected";

/// What a stage would do.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Preflight {
    /// Its figures, in the order to print.
    pub figures: Vec<Figure>,
    /// Peak of the memory that its process would need, in bytes, files in the page cache apart.
    pub peak_memory_bytes: Option<u64>,
    /// What it would write to disk, results and working state together, in bytes.
    pub disk_bytes: Option<u64>,
    /// How much there is to do, to compare it with earlier runs; `None` where that is not known.
    pub work: Option<Work>,
    /// What a user should hear before it runs.
    #[serde(serialize_with = "messages")]
    pub warnings: Vec<Problem>,
    /// Facts that its outputs will have, by output, as far as they are known; marked by [`EXPECTED`] when they reach a reader.
    #[serde(skip)]
    pub outputs: BTreeMap<String, Facts>,
}

/// An amount of work that a stage's time grows with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// What is counted: `rows`, `tokens`, `bytes`.
    pub unit: String,
    /// How much.
    pub amount: f64,
}

impl Work {
    /// So much of something.
    pub fn new(unit: &str, amount: f64) -> Self {
        Self { unit: unit.to_owned(), amount }
    }
}

/// One figure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// Its name, such as `optimizer_steps`.
    pub name: &'static str,
    /// Its value.
    pub value: Value,
    /// The value in words, with what it is made of.
    pub text: String,
}

impl Preflight {
    /// Adds a figure.
    pub fn figure(&mut self, name: &'static str, value: impl Into<Value>, text: impl Into<String>) {
        self.figures.push(Figure { name, value: value.into(), text: text.into() });
    }

    /// Says what one fact of an output will be.
    pub fn expect(&mut self, output: &str, fact: &str, value: impl Into<Value>) {
        self.outputs.entry(output.to_owned()).or_default().insert(fact.to_owned(), value.into());
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
