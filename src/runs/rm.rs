//! `pipeline runs rm`: removes the records of runs; what they made stays in the store.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use engine::history::{RunState, RunSummary};
use engine::run::clock::Moment;
use serde::Serialize;

use super::Past;
use crate::render::{Exit, Failure};
use crate::{Format, Global, words};

/// Remove the records of runs, with their logs. Their results stay in the store, and an active run is never
/// removed.
#[derive(Args)]
pub(super) struct RmArgs {
    /// Runs to remove; without any, `--older-than` or `--keep` choose among all.
    #[arg(value_name = "RUN")]
    runs: Vec<String>,
    /// Only runs that began longer ago than this, such as `30d` or `12h`.
    #[arg(long, value_name = "TIME", value_parser = age)]
    older_than: Option<Duration>,
    /// Keep the newest COUNT runs of each pipeline.
    #[arg(long, value_name = "COUNT")]
    keep: Option<usize>,
    /// Only print what would be removed.
    #[arg(long)]
    dry_run: bool,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What became of the runs.
#[derive(Serialize)]
struct Outcome<'a> {
    removed: Vec<&'a str>,
    /// Those that are active and stay.
    running: Vec<&'a str>,
    dry_run: bool,
}

/// Removes them.
pub(super) fn run(args: &RmArgs, global: &Global) -> Result<(), Failure> {
    if args.runs.is_empty() && args.older_than.is_none() && args.keep.is_none() {
        return Err(Failure::wrong("no run to remove is named")
            .with_help("name runs, or choose among all with `--older-than 30d` or `--keep 20`"));
    }
    let past = Past::open(global)?;
    let chosen = args.chosen(&past)?;
    let mut outcome = Outcome { removed: Vec::new(), running: Vec::new(), dry_run: args.dry_run };
    for run in &chosen {
        let gone = args.dry_run && run.state != RunState::Running
            || !args.dry_run && past.history.remove(&past.home, &run.run).map_err(Failure::machine)?;
        if gone { &mut outcome.removed } else { &mut outcome.running }.push(run.run.as_str());
    }
    let printed = match args.format {
        Format::Json => crate::print_json(&outcome),
        Format::Text => tell(&outcome).map_err(Failure::from),
    };
    // Who names a run wants that one gone.
    let refused = !args.runs.is_empty() && !outcome.running.is_empty();
    Failure::after(if refused { Exit::Wrong } else { Exit::Done }, printed)
}

fn tell(Outcome { removed, running, dry_run }: &Outcome<'_>) -> io::Result<()> {
    let mut out = crate::screen::stdout();
    for run in removed {
        writeln!(out, "{run}")?;
    }
    for run in running {
        crate::terminal::tell_line(format_args!("run {run} is active and is kept"));
    }
    let would = if *dry_run { "would be removed" } else { "removed; their results stay in the store" };
    crate::terminal::tell_line(format_args!("{} {would}", words::plural(removed.len(), "run")));
    Ok(())
}

impl RmArgs {
    fn chosen(&self, past: &Past) -> Result<Vec<RunSummary>, Failure> {
        let all = past.history.runs().map_err(Failure::machine)?;
        let mut chosen = match self.runs.is_empty() {
            true => all.clone(),
            false => self.runs.iter().map(|run| past.find(run)).collect::<Result<_, _>>()?,
        };
        let mut seen = std::collections::BTreeSet::new();
        chosen.retain(|run| seen.insert(run.run.clone()));
        if let Some(age) = self.older_than {
            let limit = Moment::now().before(age);
            chosen.retain(|run| Moment::parse(&run.started).is_some_and(|started| started < limit));
        }
        if let Some(keep) = self.keep {
            // The newest come first.
            let newest = |run: &RunSummary| {
                let of_pipeline = all.iter().filter(|other| other.pipeline == run.pipeline);
                of_pipeline.take(keep).any(|other| other.run == run.run)
            };
            chosen.retain(|run| !newest(run));
        }
        Ok(chosen)
    }
}

/// `30d`, `12h`, `90m`, `2w`.
fn age(text: &str) -> Result<Duration, String> {
    let expected = || format!("`{text}` is no time: write `30d`, `12h`, `90m` or `2w`");
    let unit = text.chars().last().ok_or_else(expected)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        'w' => 604_800,
        _ => return Err(expected()),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| expected())?;
    count.checked_mul(seconds).map(Duration::from_secs).ok_or_else(expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units() {
        assert_eq!(age("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(age("2w"), age("14d"));
        for wrong in ["", "30", "d", "-1d", "1.5h", "3 d", "99999999999999999999d", "30日"] {
            assert!(age(wrong).is_err(), "{wrong}");
        }
    }
}
