//! Pipeline files that a command writes, and never over another one without being told.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use crate::render::Failure;
use crate::words;

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
