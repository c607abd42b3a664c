//! `pipeline completions` and `pipeline man`: what a shell and `man` know of the commands, from their own declaration.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::Cli;
use crate::render::Failure;
use crate::words;

/// Print a script that completes commands and options in a shell.
///
/// For bash: `pipeline completions bash > ~/.local/share/bash-completion/completions/pipeline`.
#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Write a man page for each command into a folder, such as `~/.local/share/man/man1`.
#[derive(Args)]
pub(crate) struct ManArgs {
    /// The folder; it is made where it is not there.
    folder: PathBuf,
}

/// Prints the script.
pub(crate) fn run(args: &CompletionsArgs) -> Result<(), Failure> {
    // The generator panics where it cannot write, so it writes into memory.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pipeline", &mut script);
    Ok(std::io::stdout().lock().write_all(&script)?)
}

/// Writes the pages.
pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::machine(error).with_help(format!("the pages go to {}", words::path(&args.folder)))
    };
    std::fs::create_dir_all(&args.folder).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.folder).map_err(failed)
}
