//! Rows that no other row may hold: those that a model is evaluated on later.

use engine::context::StageContext;
use engine::error::StageError;
use engine::parameter::{Given, Input, Parameters};

use crate::data::artifact::{Rows, RowsReader};
use crate::data::overlap::Sought;

/// Rows that are held out.
#[derive(Parameters, Debug)]
pub struct HeldOut {
    /// Evaluation rows of another stage: a row that contains one of them (13 consecutive words, or nearly all of it)
    /// is left out, and counted.
    #[semantic]
    pub decontaminate: Option<Input<Rows>>,
}

impl HeldOut {
    /// What is looked for in each row, if anything is.
    pub(super) fn sought(&self, context: &mut StageContext) -> Result<Option<Sought>, StageError> {
        let Some(input) = &self.decontaminate else { return Ok(None) };
        let mut sought = Sought::default();
        for row in RowsReader::open(&context.open(input)?)?.iter() {
            sought.add(&row?.text());
        }
        Ok(Some(sought))
    }
}

impl Given for HeldOut {
    fn is_given(&self) -> bool {
        self.decontaminate.is_some()
    }
}
