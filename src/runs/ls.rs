//! `pipeline runs ls`: the runs of this home, the newest first.

use std::io::Write;

use clap::Args;
use engine::history::{History, RunState, RunSummary, Selection};
use engine::run::clock::Moment;

use super::state;
use crate::render::Failure;
use crate::run::counts;
use crate::table::Table;
use crate::terminal::Look;
use crate::{Format, Global, words};

/// List the runs, the newest first.
#[derive(Args)]
pub(super) struct LsArgs {
    /// Only runs of the pipeline of this name.
    #[arg(long, value_name = "NAME")]
    pipeline: Option<String>,
    /// Only runs in this state.
    #[arg(long, value_enum)]
    status: Option<Status>,
    /// Only the newest COUNT runs.
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// A state, as the command line names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Status {
    /// Its program is at work.
    Running,
    /// Its program was killed, or lost power.
    CutOff,
    /// Every stage has its result.
    Succeeded,
    /// A stage failed.
    Failed,
    /// The user stopped it.
    Interrupted,
}

impl From<Status> for RunState {
    fn from(status: Status) -> Self {
        match status {
            Status::Running => Self::Running,
            Status::CutOff => Self::CutOff,
            Status::Succeeded => Self::Succeeded,
            Status::Failed => Self::Failed,
            Status::Interrupted => Self::Interrupted,
        }
    }
}

/// Lists the runs.
pub(super) fn run(args: &LsArgs, global: &Global) -> Result<(), Failure> {
    let (runs, ids) = match global.home_here() {
        Some(home) => {
            let history = History::open(&home).map_err(Failure::machine)?;
            let (pipeline, state) = (args.pipeline.clone(), args.status.map(Into::into));
            let runs = history.select(&Selection { pipeline, state, limit: args.limit }).map_err(Failure::machine)?;
            (runs, history.ids().map_err(Failure::machine)?)
        }
        None => (Vec::new(), Vec::new()),
    };
    match args.format {
        Format::Json => crate::print_json(&runs),
        Format::Text if runs.is_empty() => {
            Ok(writeln!(std::io::stdout(), "{}", if ids.is_empty() { "no runs yet" } else { "no such runs" })?)
        }
        Format::Text => Ok(write!(crate::screen::stdout(), "{}", table(&runs, &ids).fitted(Look::stdout()))?),
    }
}

fn table(runs: &[RunSummary], ids: &[String]) -> Table {
    let now = Moment::now();
    let mut table = Table::new(["run", "pipeline", "started", "state", "took", "stages"])
        .shortening(["pipeline"])
        .sparing(["took", "started"]);
    for run in runs {
        let started = Moment::parse(&run.started).map(|started| words::ago(now.since(started)));
        let took = run.seconds.map(words::seconds).unwrap_or_default();
        let id = shortest(&run.run, ids);
        let cells = [id.to_owned(), run.pipeline.clone(), started.unwrap_or_default()];
        table.row(cells.into_iter().chain([state(run.state).to_owned(), took, counts(run.counts)]));
    }
    table
}

/// The beginning of an id that no other of the sorted `ids` has; to the second at least, which is what a person reads.
pub(super) fn shortest<'a>(id: &'a str, ids: &[String]) -> &'a str {
    const TO_THE_SECOND: usize = "20260301-090507".len();
    let common = |other: &String| id.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    let at = ids.partition_point(|other| other.as_str() < id);
    let before = at.checked_sub(1).and_then(|before| ids.get(before));
    let after = ids[at..].iter().find(|other| *other != id);
    let alike = before.into_iter().chain(after).map(common).max().unwrap_or(0);
    id.get(..TO_THE_SECOND.max(alike + 1)).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_as_long_as_it_takes_to_tell_them_apart() {
        let ids = ["20260301-090507-041-aaaa", "20260301-090507-042-5f3a", "20260301-090508-001-5f3a", "odd"];
        let ids = ids.map(str::to_owned);
        let shortened = ids.each_ref().map(|id| shortest(id, &ids));
        assert_eq!(shortened, ["20260301-090507-041", "20260301-090507-042", "20260301-090508", "odd"]);
    }
}
