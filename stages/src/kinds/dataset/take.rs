//! Taking rows one by one: what cannot be used is an error that names its place, or is left out and counted.

use std::ops::{ControlFlow, Range};

use engine::context::StageContext;
use engine::error::StageError;

use super::Dataset;
use super::arrange::Arranger;
use super::flaw::{Flaw, Reason, TO_UTF8, Tally};
use super::form::SourceFile;
use super::parameters::{OnBadRow, OnEmpty};
use super::read::Reading;
use super::recipe::{Made, Recipe};
use crate::data::artifact::{Row, RowCounts};
use crate::data::overlap::Sought;

/// How many of the rows that are left out are named in the warning about them.
const NAMED: usize = 3;

/// Takes rows and hands them on to be arranged.
pub(super) struct Taker<'a> {
    arranger: Arranger<'a>,
    on_bad_row: OnBadRow,
    on_empty: OnEmpty,
    dropped: Tally,
    /// The first few that were left out.
    examples: Vec<String>,
    filtered: u64,
    empty: u64,
    looked_at: u64,
    /// What no row may hold.
    held_out: Option<Sought>,
}

impl<'a> Taker<'a> {
    pub(super) fn new(
        params: &Dataset,
        arranger: Arranger<'a>,
        context: &mut StageContext,
    ) -> Result<Self, StageError> {
        Ok(Self {
            held_out: params.held_out.0.sought(context)?,
            arranger,
            on_bad_row: params.on_bad_row,
            on_empty: params.on_empty,
            dropped: Tally::default(),
            examples: Vec::new(),
            filtered: 0,
            empty: 0,
            looked_at: 0,
        })
    }

    /// Takes the rows of a range out of files that follow each other, and returns how many rows there are up to its
    /// end.
    pub(super) fn take_files(
        &mut self,
        files: &[SourceFile],
        range: Range<u64>,
        recipe: &Recipe<'_>,
        reading: &Reading,
        context: &mut StageContext,
    ) -> Result<u64, StageError> {
        let wanted = recipe.wanted();
        let mut before = 0;
        for file in files {
            if before >= range.end || range.is_empty() || self.arranger.is_full() {
                break;
            }
            let here = range.start.saturating_sub(before)..range.end - before;
            before += file.read(here, &wanted, reading, &mut |record| {
                let (number, made) = match record {
                    Ok(record) => (record.number, recipe.row(record)),
                    Err(bad) => (bad.number, Err(bad.flaw)),
                };
                self.note(made, context, || file.place(number))
            })?;
        }
        Ok(before)
    }

    /// Takes a row that is one already; `made` is a break where the filter leaves it out.
    pub(super) fn note(
        &mut self,
        made: Result<ControlFlow<(), Made>, Flaw>,
        context: &mut StageContext,
        place: impl FnOnce() -> String,
    ) -> Result<ControlFlow<()>, StageError> {
        self.looked_at += 1;
        if self.looked_at.is_multiple_of(1024) {
            context.stop_if_cancelled()?;
            context.progress("rows", self.looked_at, None, None);
        }
        match made {
            Ok(ControlFlow::Continue(Made { row, .. })) if self.holds_one_held_out(&row) => {
                self.dropped.add(Reason::HeldOut);
            }
            Ok(ControlFlow::Continue(Made { row, empty })) => {
                self.empty += u64::from(empty);
                self.put(row)?;
            }
            Ok(ControlFlow::Break(())) => self.filtered += 1,
            Err(flaw) => self.leave_out(&flaw, place())?,
        }
        Ok(if self.arranger.is_full() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn holds_one_held_out(&self, row: &Row) -> bool {
        self.held_out.as_ref().is_some_and(|held_out| !held_out.found_in(&row.text(self.arranger.facts())).is_empty())
    }

    fn put(&mut self, row: Row) -> Result<(), StageError> {
        self.arranger.push(row)
    }

    fn leave_out(&mut self, flaw: &Flaw, place: String) -> Result<(), StageError> {
        let message = format!("{place}: {}", flaw.problem);
        let (policy, fails) = policy(flaw, self.on_empty, self.on_bad_row);
        if fails {
            return Err(StageError::bad_data(message).with_help(help(flaw.reason, policy)));
        }
        self.dropped.add(flaw.reason);
        if self.examples.len() < NAMED {
            self.examples.push(message);
        }
        Ok(())
    }

    /// Whether no further row would stay.
    pub(super) fn is_full(&self) -> bool {
        self.arranger.is_full()
    }

    /// What was found, the first few rows that were left out, and the rows that were taken.
    pub(super) fn finish(self, context: &mut StageContext) -> (Arranger<'a>, RowCounts, Vec<String>) {
        let counts = RowCounts {
            dropped: self.dropped.total(),
            dropped_by: self.dropped.by_name(),
            filtered: self.filtered,
            empty: self.empty,
        };
        let held_out = self.dropped.of(Reason::HeldOut);
        if held_out > 0 {
            context.warn(format!("{held_out} rows contain one of `decontaminate` and are left out"));
        }
        if counts.dropped > held_out {
            let examples = self.examples.join("; ");
            context.warn(format!(
                "{} unusable rows are left out ({}), such as {examples}",
                counts.dropped - held_out,
                self.dropped
            ));
        }
        if counts.empty > 0 {
            let rows = if counts.empty == 1 { "1 row has" } else { &format!("{} rows have", counts.empty) };
            context.warn(format!("{rows} an empty string; `on_empty: drop` leaves such rows out"));
        }
        (self.arranger, counts, self.examples)
    }
}

/// The parameter that decides over a row that cannot be used, and whether the stage fails over it.
pub(super) fn policy(flaw: &Flaw, on_empty: OnEmpty, on_bad_row: OnBadRow) -> (&'static str, bool) {
    match flaw.reason == Reason::Empty && on_empty != OnEmpty::Keep {
        true => ("on_empty", on_empty == OnEmpty::Error),
        false => ("on_bad_row", on_bad_row == OnBadRow::Error),
    }
}

fn help(reason: Reason, policy: &str) -> String {
    let mend = match reason {
        Reason::TooLong => "cut the row, or raise `max_row_size`",
        Reason::NotText => "make it a string with `map:`, such as `map: { column: \"{{ column }}\" }`",
        Reason::Turns => {
            "correct the row, or, if only the order of the turns is wrong, accept any order with `turn_order: any`"
        }
        Reason::NotUtf8 => TO_UTF8,
        Reason::Expression | Reason::Missing => "correct the row or the expression",
        _ => "correct the row",
    };
    format!("{mend}, or set `{policy}: drop` to leave such rows out")
}
