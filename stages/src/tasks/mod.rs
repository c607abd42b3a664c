//! Evaluation tasks as lm-evaluation-harness has them: the same file gives the same requests and the same figures.
//!
//! - [`mod@file`]: task files; [`group`]: those of groups; [`documents`]: their rows.
//! - [`template`]: what a key makes of a row; [`fewshot`]: which rows are shown ([`random`]: as CPython draws them);
//!   [`prompt`]: how rows become the text of a request.
//! - [`request`]: what the model is asked for a row; [`encode`]: as tokens; [`score`]: by a model.
//! - [`functions`]: functions that tasks name, run by Python; [`processor`]: those that are known here; [`shipped`]:
//!   tasks of the program.
//! - [`filter`], [`expression`], [`alike`], [`metric`], [`results`]: from answers to figures with their standard
//!   errors.
//!
//! All but [`score`] needs no model.

pub mod alike;
pub mod documents;
pub mod encode;
pub mod expression;
pub mod fewshot;
pub mod file;
pub mod filter;
pub mod functions;
#[cfg(test)]
mod golden;
pub mod group;
mod literal;
pub mod metric;
pub mod processor;
pub mod prompt;
pub mod random;
pub mod request;
pub mod results;
pub mod score;
pub mod shipped;
pub mod template;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use engine::error::{Cause, StageError};

/// What is wrong with a task or its rows, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskError {
    /// The task's file, or that of its rows.
    pub file: PathBuf,
    /// The line in a task's file.
    pub line: Option<usize>,
    /// The row, from 1.
    pub row: Option<usize>,
    /// The key of the task.
    pub key: Option<String>,
    pub message: String,
}

impl TaskError {
    /// What is wrong with a file as a whole.
    pub fn in_file(file: &Path, message: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: None, row: None, key: None, message: message.into() }
    }

    fn at(file: &Path, line: usize, key: Option<&str>, message: impl Into<String>) -> Self {
        Self { line: Some(line), key: key.map(str::to_owned), ..Self::in_file(file, message) }
    }

    pub(crate) fn key(file: &Path, key: &str, message: impl Into<String>) -> Self {
        Self { key: Some(key.to_owned()), ..Self::in_file(file, message) }
    }

    /// What is wrong with a key of a task.
    pub fn of(file: &Path, key: &str, message: impl Into<String>) -> Self {
        Self::key(file, key, message)
    }

    /// What is wrong with what a key makes of a row, given from 0.
    pub fn in_row_of(file: &Path, row: usize, key: &str, message: impl Into<String>) -> Self {
        Self::key(file, key, message).in_row(row)
    }

    /// The same at a row, given from 0.
    fn in_row(self, index: usize) -> Self {
        Self { row: Some(index + 1), ..self }
    }
}

impl std::fmt::Display for TaskError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(row) = self.row {
            write!(f, ", row {row}")?;
        }
        if let Some(key) = &self.key {
            write!(f, ", `{key}`")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for TaskError {}

impl From<TaskError> for StageError {
    fn from(error: TaskError) -> Self {
        Self::new(Cause::BadData, error.to_string())
    }
}
