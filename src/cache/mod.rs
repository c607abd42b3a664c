//! `pipeline cache`: what the store holds, whether it is intact, and how to make room. One file per command, in
//! `cache/`.

mod du;
mod gc;
mod ls;
mod rm;
mod share;
mod verify;

use std::time::SystemTime;

use cache::{Digest, Store};
use clap::{Args, Subcommand};
use engine::history::{History, References, StageOf};
use engine::home::Home;
use engine::run::clock::Moment;
use serde::Serialize;

use crate::render::Failure;
use crate::terminal::Look;
use crate::{Format, Global, words};

/// List, check and clean up the store of results.
#[derive(Args)]
pub(crate) struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t, global = true)]
    format: Format,
}

#[derive(Subcommand)]
enum CacheCommand {
    /// List the results and their sizes.
    Ls,
    Du(du::DuArgs),
    Verify(verify::VerifyArgs),
    Gc(gc::GcArgs),
    Rm(rm::RmArgs),
    Push(share::PushArgs),
    Pull(share::PullArgs),
}

/// A store, and what past runs say about what is in it.
struct Opened {
    store: Store,
    references: References,
}

/// Does what was asked.
pub(crate) fn run(args: &CacheArgs, global: &Global) -> Result<(), Failure> {
    let opened = match (&args.command, global.home_here()) {
        // They open the home of their pipeline file themselves, to write to it.
        (CacheCommand::Push(_) | CacheCommand::Pull(_), _) | (_, None) => None,
        (_, Some(home)) => Opened::look(&home)?,
    };
    match &args.command {
        CacheCommand::Push(push) => share::push(push, global, args.format),
        CacheCommand::Pull(pull) => share::pull(pull, global, args.format),
        CacheCommand::Ls => ls::run(opened.as_ref(), args.format),
        CacheCommand::Du(du) => du::run(du, opened.as_ref(), args.format),
        CacheCommand::Verify(verify) => verify::run(verify, opened.as_ref(), args.format, global.verbosity()),
        CacheCommand::Gc(gc) => gc::run(gc, opened.as_ref(), args.format),
        CacheCommand::Rm(rm) => rm::run(rm, opened.as_ref(), args.format),
    }
}

/// What takes how much room in a home, by pipeline and stage.
///
/// # Errors
/// Fails where the store or the history does.
pub(crate) fn usage(home: Option<&Home>) -> Result<impl Serialize, Failure> {
    du::usage(home.map(Opened::look).transpose()?.flatten().as_ref())
}

impl Opened {
    /// Opens a home's store without writing to it, so that a read-only or full one can be looked at; `None` where there
    /// is none.
    fn look(home: &Home) -> Result<Option<Self>, Failure> {
        let Some(store) = Store::look(home.store()).map_err(Failure::machine)? else { return Ok(None) };
        let history = History::look(home).map_err(Failure::machine)?;
        let references = References::read(&history).map_err(Failure::machine)?;
        Ok(Some(Self { store, references }))
    }

    /// `pipeline/stage`, for each stage that has this result, or the first and how many more for a person who watches;
    /// empty where no run is recorded that knew it.
    fn stages(&self, key: &Digest, look: Look) -> String {
        let stages = self.references.stages_of(key).map(|stage| format!("{}/{}", stage.pipeline, stage.stage));
        words::first_of(&stages.collect::<Vec<_>>(), look)
    }

    /// The same for a program.
    fn stages_of(&self, key: &Digest) -> Vec<&StageOf> {
        self.references.stages_of(key).collect()
    }
}

/// How long ago a file's time is.
fn ago(time: SystemTime) -> String {
    words::ago(time.elapsed().unwrap_or_default())
}

/// A file's time, for a program.
fn timestamp(time: SystemTime) -> String {
    Moment::at(time).rfc3339()
}
