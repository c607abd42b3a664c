//! `pipeline export FILE STAGE FOLDER`: copies an output out of the store.

use std::fs;
use std::path::{Path, PathBuf};

use cache::StoreError;
use clap::Args;
use engine::artifact::stored_files;
use engine::home::Home;
use engine::publish::lies_in;

use crate::progress::Verbosity;
use crate::render::Failure;
use crate::{Global, full_disk, locate, terminal, words};

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
    // With a slash behind it the name of a link is what the link leads to.
    let folder: PathBuf = args.folder.components().collect();
    let located = locate::output(&args.file, &args.overrides, &args.output, global)?;
    make_way(&folder, &global.home(&args.file)?)?;
    let files = stored_files(&located.store, &located.record.tree, &located.record.identity);
    let copied = files.and_then(|files| located.store.copy_files_out(&files, &folder).map(|()| files));
    let tree = copied.map_err(|error| {
        let help = full_disk::help_beside(&error, located.store.root());
        locate::unreadable(error, &located.store, &args.file).with_help_if(help)
    })?;
    if global.verbosity() > Verbosity::Quiet {
        let files = words::plural(tree.files().len(), "file");
        let bytes = words::bytes(tree.bytes());
        terminal::tell_line(format_args!("`{}` copied to {}: {files}, {bytes}", located.name, folder.display()));
    }
    Ok(())
}

/// Sees to it that a folder can be made: removes an empty one in its place, and makes those above it.
fn make_way(folder: &Path, home: &Home) -> Result<(), Failure> {
    // The store may be elsewhere, behind a link.
    if lies_in(folder, home.root()) || lies_in(folder, &home.store()) {
        return Err(Failure::wrong(format!("`{}` is in the home, in which results are stored", folder.display()))
            .with_help("export to a separate folder, such as `./my_model`"));
    }
    if folder.is_symlink() {
        return Err(Failure::wrong(format!("`{}` is a link, and a new or empty folder is needed", folder.display()))
            .with_help("name the folder that it leads to, or remove the link first"));
    }
    // An empty folder is nobody's: only such a one can be removed so.
    if folder.exists() && fs::remove_dir(folder).is_err() {
        return Err(Failure::wrong(format!("`{}` exists already and is not an empty folder", folder.display()))
            .with_help("name a new or empty folder, or remove this one first"));
    }
    let Some(parent) = folder.parent() else { return Ok(()) };
    let nearest = parent.ancestors().find(|above| fs::symlink_metadata(above).is_ok());
    if let Some(file) = nearest.filter(|nearest| !nearest.is_dir()) {
        let (folder, file) = (folder.display(), file.display());
        return Err(Failure::wrong(format!("`{folder}` cannot be made: `{file}` is not a folder")));
    }
    fs::create_dir_all(parent)
        .map_err(|source| Failure::machine(StoreError::Io { action: "create folder", path: parent.to_owned(), source }))
}
