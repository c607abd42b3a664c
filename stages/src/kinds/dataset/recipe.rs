//! From a record to a row: filter, new columns, template columns, and the limits that a row has to keep.

use std::ops::ControlFlow;

use engine::error::StageError;
use minijinja::Environment;

use super::Dataset;
use super::expression::Expressions;
use super::flaw::{Flaw, Reason};
use super::form::SourceFile;
use super::mapping::{ColumnMisfit, RowMapping};
use super::parameters::OnEmpty;
use super::read::{Reading, Record, Wanted};
use crate::data::artifact::{Row, RowsFacts};

/// How records become rows.
pub(super) struct Recipe<'a> {
    expressions: Expressions<'a>,
    mapping: RowMapping,
    /// Those of the data.
    columns: Vec<String>,
    max_row_bytes: u64,
    on_empty: OnEmpty,
}

/// A row, and what is remarkable about it.
pub(super) struct Made {
    pub row: Row,
    /// Whether a text in it is empty.
    pub empty: bool,
}

/// Why there is no recipe.
#[derive(Debug)]
pub(super) enum Misfit {
    /// The data has not the columns that are asked for.
    Columns(ColumnMisfit),
    /// Something else.
    Stage(StageError),
}

impl From<ColumnMisfit> for Misfit {
    fn from(misfit: ColumnMisfit) -> Self {
        Self::Columns(misfit)
    }
}

impl From<StageError> for Misfit {
    fn from(error: StageError) -> Self {
        Self::Stage(error)
    }
}

impl From<Misfit> for StageError {
    fn from(misfit: Misfit) -> Self {
        match misfit {
            Misfit::Columns(misfit) => misfit.into(),
            Misfit::Stage(error) => error,
        }
    }
}

impl<'a> Recipe<'a> {
    /// Plans for data that begins with this file.
    ///
    /// # Errors
    /// Fails where a column that is asked for is not there.
    pub(super) fn plan(
        params: &'a Dataset,
        environment: &'a Environment<'a>,
        columns: &[String],
        first: &SourceFile,
        reading: &Reading,
    ) -> Result<Self, Misfit> {
        let expressions = Expressions::compile(params, environment)?;
        let mut known = columns.to_vec();
        known.extend(expressions.new_columns().map(str::to_owned));
        let mut mapping = RowMapping::plan(params, &known, &first.name)?;
        let of_data =
            mapping.may_hold_turns().filter(|names| !expressions.new_columns().any(|new| names.contains(&new)));
        if let Some(names) = of_data
            && first.holds_lists(&names, reading)?
        {
            mapping = mapping.of_turns(params);
        }
        let columns = columns.to_vec();
        Ok(Self { expressions, mapping, columns, max_row_bytes: params.max_row_bytes(), on_empty: params.on_empty })
    }

    pub(super) fn facts(&self) -> &RowsFacts {
        &self.mapping.facts
    }

    /// The columns that have to be read.
    pub(super) fn wanted(&self) -> Wanted {
        self.expressions.wanted(&self.mapping.sources(), &self.columns)
    }

    /// What is odd about it, given the columns of the data.
    pub(super) fn oddities(&self, file: &str) -> Vec<String> {
        self.expressions.oddities(&self.columns, file)
    }

    /// The row of a record, or a break where the filter leaves it out.
    pub(super) fn row(&self, record: Record) -> Result<ControlFlow<(), Made>, Flaw> {
        let fields = match self.expressions.is_empty() {
            true => record.fields,
            false => match self.expressions.apply(record.fields)? {
                ControlFlow::Continue(fields) => fields,
                ControlFlow::Break(()) => return Ok(ControlFlow::Break(())),
            },
        };
        let row = self.mapping.row(fields)?;
        let bytes = row.text_bytes() as u64;
        if bytes > self.max_row_bytes {
            let problem = format!("it has {bytes} bytes of text, and `max_row_size` is {}", self.max_row_bytes);
            return Err(Flaw::new(Reason::TooLong, problem));
        }
        match (self.mapping.emptiness(&row), self.on_empty) {
            (Some(problem), OnEmpty::Drop | OnEmpty::Error) => Err(Flaw::new(Reason::Empty, problem)),
            (emptiness, _) => Ok(ControlFlow::Continue(Made { row, empty: emptiness.is_some() })),
        }
    }
}
