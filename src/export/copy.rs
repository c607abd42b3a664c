//! `pipeline export FILE STAGE FOLDER`: copies an output out of the store.

use std::path::PathBuf;

use clap::Args;
use engine::artifact::stored_files;

use crate::progress::Verbosity;
use crate::render::Failure;
use crate::{Global, locate, terminal, words};

/// What is copied, and where to.
#[derive(Args)]
pub(super) struct CopyArgs {
    /// The pipeline file.
    file: PathBuf,
    /// The stage, with its output if it has several.
    #[arg(value_name = "STAGE[.OUTPUT]")]
    output: String,
    /// A new or empty folder.
    folder: PathBuf,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`.
    #[arg(value_name = "OVERRIDE")]
    overrides: Vec<String>,
}

/// Copies the output.
pub(super) fn run(args: &CopyArgs, global: &Global) -> Result<(), Failure> {
    let folder = &args.folder;
    let located = locate::output(&args.file, &args.overrides, &args.output, global)?;
    // An empty folder is nobody's: only such a one can be removed so.
    if folder.exists() && (folder.is_symlink() || std::fs::remove_dir(folder).is_err()) {
        return Err(Failure::wrong(format!("`{}` exists already and is not an empty folder", folder.display()))
            .with_help("name a new or empty folder, or remove this one first"));
    }
    if let Some(parent) = folder.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let files = stored_files(&located.store, &located.record.tree, &located.record.identity);
    let copied = files.and_then(|files| located.store.copy_files_out(&files, folder).map(|()| files));
    let tree = copied.map_err(|error| locate::unreadable(error, &located.store, &args.file))?;
    if global.verbosity() > Verbosity::Quiet {
        let files = words::plural(tree.files().len(), "file");
        let bytes = words::bytes(tree.bytes());
        terminal::tell_line(format_args!("`{}` copied to {}: {files}, {bytes}", located.name, folder.display()));
    }
    Ok(())
}
