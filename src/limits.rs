//! Limits of the shell, for the whole program: what they refuse is told, and ends with the code for what the machine
//! lacks.

use std::panic;
use std::process;

use engine::limits;

use crate::render::{self, Failure};

/// Begins to heed them. `ends` says whether a refusal ends the program: a stage's process tells its engine instead.
pub(crate) fn heed(ends: Ends) {
    limits::heed_file_size();
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| match (limits::words(info.payload()).and_then(limits::refused), ends) {
        (Some(error), Ends::Program) => process::exit(render::failure(&Failure::from(error)).code().into()),
        (Some(_), Ends::Stage) => {}
        (None, _) => before(info),
    }));
}

/// What a refusal ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// This program. What it has started ends with it.
    Program,
    /// The stage, whose failure is told by its process.
    Stage,
}
