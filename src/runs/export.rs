//! `pipeline runs export`: a run as one file that can be sent and kept.

use std::path::PathBuf;

use clap::Args;
use engine::history::{Words, write_archive};

use super::Past;
use crate::progress::Verbosity;
use crate::render::Failure;
use crate::{Global, terminal, words};

/// Write a run into one archive: its plan, events, logs, metrics and the records of its results, without the results
/// themselves.
#[derive(Args)]
pub(super) struct ExportArgs {
    /// The run.
    run: String,
    /// The archive to make.
    #[arg(value_name = "FILE.tar.gz")]
    file: PathBuf,
}

/// Writes the archive.
pub(super) fn run(args: &ExportArgs, global: &Global) -> Result<(), Failure> {
    let name = args.file.to_string_lossy();
    if !name.ends_with(".tar.gz") && !name.ends_with(".tgz") {
        return Err(Failure::wrong(format!("`{name}` is no name of an archive")).with_help("end it in `.tar.gz`"));
    }
    let past = Past::open(global)?;
    let summary = past.find(&args.run)?;
    let recorded = past.recorded(&summary.run, Words::Skip)?;
    let written = write_archive(&args.file, &recorded, &past.home, &past.history, &past.store);
    let (files, bytes) = written.map_err(Failure::machine)?;
    if global.verbosity() > Verbosity::Quiet {
        let (files, bytes) = (words::plural(files, "file"), words::bytes(bytes));
        terminal::tell_line(format_args!(
            "run {} written to {}: {files}, {bytes}",
            summary.run,
            words::path(&args.file)
        ));
    }
    Ok(())
}
