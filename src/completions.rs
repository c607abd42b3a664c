//! `pipeline completions` and `pipeline man`: what a shell and `man` know of the commands, from their own declaration.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Command, CommandFactory};
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
    /// The folder, which is created if it does not exist.
    folder: PathBuf,
}

/// Prints the script.
pub(crate) fn run(args: &CompletionsArgs) -> Result<(), Failure> {
    // The generator panics where it cannot write, so it writes into memory.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "pipeline", &mut script);
    Ok(std::io::stdout().lock().write_all(&script)?)
}

/// The command line without what the program starts itself, which the generators would offer.
fn command() -> Command {
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let command = Command::new("pipeline").args(all.get_arguments().cloned()).subcommands(shown);
    match all.get_about() {
        Some(about) => command.about(about.clone()),
        None => command,
    }
}

/// Writes the pages.
pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    let failed = |error: std::io::Error| {
        Failure::machine(error).with_help(format!("the pages go to {}", words::path(&args.folder)))
    };
    std::fs::create_dir_all(&args.folder).map_err(failed)?;
    clap_mangen::generate_to(command(), &args.folder).map_err(failed)
}
