//! Rows that no other row may hold: those that a model is evaluated on later.

use engine::context::StageContext;
use engine::error::StageError;
use engine::parameter::{Given, Input, Parameters};

use crate::data::artifact::{Rows, RowsReader};
use crate::data::overlap::{FEWEST_WORDS, Sought};

/// Rows that are held out.
#[derive(Parameters, Debug)]
pub struct HeldOut {
    /// Evaluation rows of another stage: a row that contains one of them (13 consecutive words, or nearly all of it)
    /// is left out, and counted. Evaluation rows of fewer than 5 words are not looked for.
    #[semantic]
    pub decontaminate: Option<Input<Rows>>,
}

impl HeldOut {
    /// What is looked for in each row, if anything is.
    pub(super) fn sought(&self, context: &mut StageContext) -> Result<Option<Sought>, StageError> {
        let Some(input) = &self.decontaminate else { return Ok(None) };
        let mut sought = Sought::default();
        let (mut rows, mut short) = (0, 0);
        let mut held_out = RowsReader::open(&context.open(input)?)?;
        let facts = held_out.facts().clone();
        for row in held_out.iter() {
            rows += 1;
            short += usize::from(!sought.add(&row?.text(&facts)));
        }
        if short > 0 {
            context.warn(format!(
                "{short} of {rows} rows of `decontaminate` have fewer than {FEWEST_WORDS} words and are not looked for"
            ));
        }
        Ok(Some(sought))
    }
}

impl Given for HeldOut {
    fn is_given(&self) -> bool {
        self.decontaminate.is_some()
    }
}
