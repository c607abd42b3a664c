//! `pipeline cp`: a recipe as a file of the user's own, with what it reads.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Args;

use super::Recipe;
use super::edit::Draft;
use crate::import::places::Places;
use crate::render::Failure;
use crate::{new_file, terminal, words};

/// Copy a recipe to a file, for your own model and rows.
///
/// `pipeline cp lora job.yaml model=Qwen/Qwen3-0.6B data=./rows.jsonl` gives two of the recipe's variables values. A
/// model may be a folder on this machine.
#[derive(Args)]
pub(crate) struct CpArgs {
    /// The recipe, as `pipeline ls` lists it.
    #[arg(value_name = "NAME")]
    name: String,
    /// The pipeline file to write.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Values for the variables under the recipe's `vars`.
    #[arg(value_name = "VARIABLE=VALUE")]
    values: Vec<String>,
    /// Replace an existing file.
    #[arg(long)]
    overwrite: bool,
}

pub(crate) fn run(args: &CpArgs) -> Result<(), Failure> {
    let recipe = Recipe::find(&args.name)?;
    let places = Places::new(None, Some(&args.file));
    let mut draft = Draft::new(recipe);
    for value in &args.values {
        let Some((name, value)) = value.split_once('=') else {
            return Err(Failure::wrong(format!("`{value}` gives no variable a value"))
                .with_help("write `VARIABLE=VALUE`, such as `model=Qwen/Qwen3-0.6B`"));
        };
        draft.set(name, value, &places)?;
    }
    new_file::write(&args.file, &draft.write(&args.file), args.overwrite)?;
    let folder = args.file.parent().unwrap_or(Path::new(""));
    for (path, content) in recipe.files {
        bring(&folder.join(path), content)?;
    }
    let file = words::path(&args.file);
    let command = words::for_shell(&file);
    terminal::tell_line(format_args!("{file}: written; `pipeline run {command} --smoke` tries it"));
    Ok(())
}

/// Writes a file that a recipe reads. One that is there already may be the user's, and stays.
fn bring(file: &Path, content: &str) -> Result<(), Failure> {
    let brought = || -> io::Result<()> {
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        new_file::create(file, content)?;
        if content.starts_with("#!") {
            fs::set_permissions(file, Permissions::from_mode(0o755))?;
        }
        Ok(())
    };
    match brought() {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(Failure::machine(error)),
        Err(_) if !fs::read(file).is_ok_and(|there| there == content.as_bytes()) => {
            let file = words::path(file);
            terminal::tell_line(format_args!("{file}: exists with other content, and is kept"));
            Ok(())
        }
        _ => Ok(()),
    }
}
