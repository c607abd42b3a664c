//! Pipeline files that a command writes, and never over another one without being told.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use engine::plan::Rejected;

use crate::render::Failure;
use crate::{recipes, words};

/// Writes a pipeline file.
pub(crate) fn write(file: &Path, text: &str, overwrite: bool) -> Result<(), Failure> {
    let written = if overwrite { fs::write(file, text) } else { create(file, text) };
    written.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => taken(file),
        _ => Failure::machine(error).with_help(format!("the pipeline file is {}", words::path(file))),
    })
}

/// Writes a file that is not there yet.
pub(crate) fn create(file: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).open(file)?.write_all(text.as_bytes())
}

/// A file of this name is there, and would be lost.
pub(crate) fn taken(file: &Path) -> Failure {
    Failure::wrong(format!("`{}` exists already", words::path(file))).with_help("`--overwrite` replaces it")
}

/// Adds to a pipeline file that is not there how it is written, where its name may be that of a recipe.
pub(crate) fn or_recipe(mut rejected: Rejected, file: &Path) -> Rejected {
    let Some(name) = file.to_str().filter(|name| recipes::is_recipe(name)) else { return rejected };
    let copy = format!("{name}.yaml");
    if file.exists() || Path::new(&copy).exists() {
        return rejected;
    }
    let recipe = format!("`pipeline cp {name} {copy}` writes the recipe `{name}`");
    for problem in &mut rejected.problems {
        let help = problem.help.take().map(|help| format!("{help}; or "));
        problem.help = Some(help.unwrap_or_default() + &recipe);
    }
    rejected
}
