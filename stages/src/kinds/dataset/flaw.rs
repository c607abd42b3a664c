//! What can be wrong with a row, and how often it was.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::data::number;

/// What to do about bytes that are not UTF-8: mostly they are of Latin-1.
pub(super) const TO_UTF8: &str = "convert the file, such as from Latin-1: `iconv -f LATIN1 -t UTF-8 FILE > NEW_FILE`";

/// Why a row cannot be used, or is remarkable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// It is not what its file's form asks for.
    Malformed,
    /// Its bytes are not UTF-8.
    NotUtf8,
    /// It has another number of values than the header.
    Ragged,
    /// A column that it needs is not there.
    Missing,
    /// A column that it needs is null.
    Null,
    /// A column holds something else than text.
    NotText,
    /// A text is empty, or nothing but white space.
    Empty,
    /// It is longer than rows may be.
    TooLong,
    /// Its turns are not those of a conversation, or in no order that one has.
    Turns,
    /// `filter` or `map` cannot be worked out on it.
    Expression,
    /// It holds a row of those that are held out.
    HeldOut,
}

impl Reason {
    /// Its name in facts and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::NotUtf8 => "not_utf8",
            Self::Ragged => "ragged",
            Self::Missing => "missing",
            Self::Null => "null",
            Self::NotText => "not_text",
            Self::Empty => "empty",
            Self::TooLong => "too_long",
            Self::Turns => "turns",
            Self::Expression => "expression",
            Self::HeldOut => "held_out",
        }
    }
}

/// What is wrong with a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// Of what sort it is.
    pub reason: Reason,
    /// What it is, as the end of a sentence about the row.
    pub problem: String,
    /// The parameter that it comes from, where that is one of `filter` and `map`.
    pub field: Option<String>,
}

impl Flaw {
    /// A flaw.
    pub fn new(reason: Reason, problem: impl Into<String>) -> Self {
        Self { reason, problem: problem.into(), field: None }
    }

    /// Says which column of the data it is about.
    pub(super) fn of_column(self, column: &str) -> Self {
        Self { problem: format!("column `{column}` {}", self.problem), ..self }
    }

    /// Says which parameter it comes from.
    #[must_use]
    pub fn of_field(mut self, field: &str) -> Self {
        self.field = Some(field.to_owned());
        self
    }
}

/// How many rows had which flaw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tally(BTreeMap<Reason, u64>);

impl Tally {
    /// Counts one more.
    pub(super) fn add(&mut self, reason: Reason) {
        *self.0.entry(reason).or_default() += 1;
    }

    pub(super) fn of(&self, reason: Reason) -> u64 {
        self.0.get(&reason).copied().unwrap_or(0)
    }

    pub(super) fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// The counts by name.
    pub(super) fn by_name(&self) -> BTreeMap<String, u64> {
        self.0.iter().map(|(reason, count)| (reason.name().to_owned(), *count)).collect()
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts: Vec<String> = self.0.iter().map(|(reason, count)| format!("{count} {}", reason.name())).collect();
        f.write_str(&counts.join(", "))
    }
}

/// What a value is, for messages.
pub(super) fn describe(value: &Value) -> &'static str {
    match value {
        _ if number::digits_of(value).is_some() => "a number",
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
