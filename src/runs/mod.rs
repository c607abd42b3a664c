//! `pipeline runs`: past runs and those that go on. One file per subcommand; this one finds the runs that they name.

pub(crate) mod compare;
mod diff;
mod export;
mod ls;
mod profile;
mod provenance;
mod rm;
mod show;
mod stage;
pub(crate) mod steps;
mod verify;

pub(crate) use show::stage_of;
pub(crate) use stage::StageStory;

use cache::{Digest, OutputRecord, Store};
use clap::{Args, Subcommand};
use engine::history::{History, Origin, Recorded, RunLookup, RunState, RunSummary, Words};
use engine::home::Home;

use crate::Global;
use crate::render::Failure;

/// Inspect past and active runs.
///
/// RUN is a run's id, a beginning of it that no other has, `latest`, or `latest~1` for the one before the latest.
#[derive(Args)]
pub(crate) struct RunsArgs {
    #[command(subcommand)]
    command: RunsCommand,
}

#[derive(Subcommand)]
enum RunsCommand {
    Ls(ls::LsArgs),
    Show(show::ShowArgs),
    Profile(profile::ProfileArgs),
    Compare(compare::CompareArgs),
    Diff(diff::DiffArgs),
    Rm(rm::RmArgs),
    Export(export::ExportArgs),
    Verify(verify::VerifyArgs),
    Provenance(provenance::ProvenanceArgs),
}

/// Does what the subcommand says.
pub(crate) fn run(args: &RunsArgs, global: &Global) -> Result<(), Failure> {
    match &args.command {
        RunsCommand::Ls(args) => ls::run(args, global),
        RunsCommand::Show(args) => show::run(args, global),
        RunsCommand::Profile(args) => profile::run(args, global),
        RunsCommand::Compare(args) => compare::run(args, global),
        RunsCommand::Diff(args) => diff::run(args, global),
        RunsCommand::Rm(args) => rm::run(args, global),
        RunsCommand::Export(args) => export::run(args, global),
        RunsCommand::Verify(args) => verify::run(args, global),
        RunsCommand::Provenance(args) => provenance::run(args, global),
    }
}

/// The runs of a home.
pub(crate) struct Past {
    pub home: Home,
    /// Its runs.
    pub history: History,
    pub store: Store,
}

impl Past {
    /// The runs of the present home.
    ///
    /// # Errors
    /// Fails where there is none, or its history cannot be read.
    pub(crate) fn open(global: &Global) -> Result<Self, Failure> {
        Self::of(global.home_here().ok_or_else(nothing_yet)?)
    }

    /// The runs of a home.
    ///
    /// # Errors
    /// Fails where its history cannot be read.
    pub(crate) fn of(home: Home) -> Result<Self, Failure> {
        let history = History::open(&home).map_err(Failure::machine)?;
        // Looking works on a home that cannot be written to as well.
        let store = match Store::look(home.store()).map_err(Failure::machine)? {
            Some(store) => store,
            None => Store::open(home.store()).map_err(Failure::machine)?,
        };
        Ok(Self { home, history, store })
    }

    /// The result of a key and how it was made; `None` where all trace of it is gone.
    ///
    /// # Errors
    /// Fails where the index or the store does.
    pub(crate) fn made(&self, key: &Digest) -> Result<Option<Origin>, Failure> {
        Origin::find(&self.home, &self.history, &self.store, key).map_err(Failure::machine)
    }

    /// An output of a stage of a run; `None` where there is none, or all trace of it is gone.
    ///
    /// # Errors
    /// Fails where the stage is unknown, or the index or the store fails.
    pub(crate) fn output(
        &self,
        recorded: &Recorded,
        stage: &str,
        output: &str,
    ) -> Result<Option<OutputRecord>, Failure> {
        let Some(key) = stage_of(recorded, stage)?.summary.key else { return Ok(None) };
        Ok(self.made(&key)?.and_then(|made| made.record.outputs.get(output).cloned()))
    }

    /// The run that a name stands for.
    ///
    /// # Errors
    /// Fails where it is none, or several.
    pub(crate) fn find(&self, name: &str) -> Result<RunSummary, Failure> {
        match self.history.find(name).map_err(Failure::machine)? {
            RunLookup::Run(run) => Ok(run),
            RunLookup::Several(ids) => Err(several(name, &ids)),
            RunLookup::Nothing if name == LATEST => Err(nothing_yet()),
            RunLookup::Nothing => Err(Failure::wrong(format!("there is no run `{name}`"))
                .with_help("`pipeline runs ls` lists the runs; the beginning of an id is enough")),
        }
    }

    /// All that the folder of a run tells.
    ///
    /// # Errors
    /// Fails where the folder went away meanwhile.
    pub(crate) fn recorded(&self, run: &str, words: Words) -> Result<Recorded, Failure> {
        Recorded::read(&self.home.run(run), words)
            .ok_or_else(|| Failure::wrong(format!("the record of run `{run}` cannot be read")))
    }
}

/// The name of the newest run.
pub(crate) const LATEST: &str = "latest";

/// The failure where there is no run to name.
pub(crate) fn nothing_yet() -> Failure {
    Failure::wrong("nothing has been run yet").with_help(
        "`pipeline run FILE` starts a run; those of a pipeline elsewhere are seen from its folder, or with `--home`",
    )
}

fn several(name: &str, ids: &[String]) -> Failure {
    const MOST: usize = 5;
    let more = if ids.len() > MOST { ", …" } else { "" };
    let shown: Vec<&str> = ids.iter().take(MOST).map(String::as_str).collect();
    Failure::wrong(format!("`{name}` is the beginning of {} runs", ids.len()))
        .with_help(format!("name one of them: {}{more}", shown.join(", ")))
}

/// A state in words.
pub(crate) fn state(state: RunState) -> &'static str {
    match state {
        RunState::Running => "running",
        RunState::CutOff => "cut off",
        RunState::Succeeded => "succeeded",
        RunState::Failed => "failed",
        RunState::Interrupted => "interrupted",
    }
}
