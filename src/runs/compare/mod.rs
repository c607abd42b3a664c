//! `pipeline runs compare`: runs, or the children of a sweep, side by side: what differs in them, and what came out.

mod candidate;
mod comparison;
mod curves;
mod scaling;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use engine::history::{Recorded, RunLookup, Selection, StageSummary, Words};
use engine::suggest;

use self::candidate::{Candidate, Gatherer};
pub(crate) use self::comparison::{Comparison, ParameterForm};
use super::Past;
use super::ls::shortest;
use crate::plot;
use crate::progress::Verbosity;
use crate::render::Failure;
use crate::terminal::{self, Look};
use crate::{Global, words};

/// Compare runs, or the children of a sweep: the parameters that differ, the metrics, the best of each marked.
///
/// Two runs or more are compared as a whole. A stage stands for the children of its sweep in the newest run that has
/// them, or else for every different result of it in all runs of that pipeline. Smoke runs count only where there is no
/// other.
#[derive(Args)]
pub(super) struct CompareArgs {
    /// Runs, or one stage.
    #[arg(required = true, value_name = "RUN… | STAGE")]
    targets: Vec<String>,
    /// Compare the children that the stage has in this run.
    #[arg(long, value_name = "RUN")]
    run: Option<String>,
    /// Compare the stage's results in all runs of the pipeline of this name [default: that of the newest run which has
    /// the stage].
    #[arg(long, value_name = "NAME", conflicts_with = "run")]
    pipeline: Option<String>,
    /// Order by this metric, the best first, or by this parameter.
    #[arg(long, value_name = "COLUMN")]
    sort: Option<String>,
    /// Draw the losses over the steps, and the speed-up over devices or threads, into this file, as SVG, or as HTML
    /// with the table below.
    #[arg(long, value_name = "FILE.svg|FILE.html")]
    plot: Option<PathBuf>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum Format {
    /// For a person.
    #[default]
    Text,
    /// For a program.
    Json,
    /// For a spreadsheet.
    Csv,
    /// For a README or a pull request.
    Markdown,
}

pub(super) fn run(args: &CompareArgs, global: &Global) -> Result<(), Failure> {
    let drawing = args.plot.as_deref().map(drawing).transpose()?;
    let past = Past::open(global)?;
    let candidates = args.candidates(&past)?;
    let mut comparison = Comparison::of(candidates);
    if let Some(column) = &args.sort {
        let names = comparison.names();
        if !comparison.sort(column) {
            let failure = Failure::wrong(format!("there is no column `{column}` to sort by"));
            return Err(failure.with_help_if(suggest::help(column, "the columns", &names)));
        }
    }
    if let (Some(path), Some(drawing)) = (&args.plot, drawing) {
        draw(&comparison, path, drawing, global.verbosity())?;
    }
    match args.format {
        Format::Text => Ok(write!(crate::screen::stdout(), "{}", comparison.text(Look::stdout()))?),
        Format::Json => crate::print_json(&comparison.view(ParameterForm::Values)),
        Format::Csv => Ok(write!(crate::screen::stdout_of_others(), "{}", comparison.csv())?),
        Format::Markdown => Ok(write!(crate::screen::stdout_of_others(), "{}", comparison.markdown())?),
    }
}

impl CompareArgs {
    fn candidates(&self, past: &Past) -> Result<Vec<Candidate>, Failure> {
        let mut gatherer = Gatherer::new(past, self.plot.is_some());
        match self.targets.as_slice() {
            [stage] if !self.is_run(stage, past)? => self.of_stage(stage, past, &mut gatherer),
            [run] => {
                let recorded = past.recorded(&past.find(run)?.run, Words::Skip)?;
                Err(Failure::wrong(format!("`{run}` is one run, and there is nothing to compare it with"))
                    .with_help(alone(&recorded)))
            }
            runs => runs.iter().map(|run| gatherer.run(&past.find(run)?.run)).collect(),
        }
    }

    fn is_run(&self, name: &str, past: &Past) -> Result<bool, Failure> {
        let asks_for_stage = self.run.is_some() || self.pipeline.is_some();
        Ok(!asks_for_stage && past.history.find(name).map_err(Failure::machine)? != RunLookup::Nothing)
    }

    fn of_stage(&self, stage: &str, past: &Past, gatherer: &mut Gatherer<'_>) -> Result<Vec<Candidate>, Failure> {
        let results = past.history.results_of(stage, self.pipeline.as_deref()).map_err(Failure::machine)?;
        let newest = match &self.run {
            Some(run) => Some(past.find(run)?.run),
            None if self.pipeline.is_some() => None,
            None => newest_real(&results, past)?,
        };
        if let Some(run) = &newest {
            let recorded = past.recorded(run, Words::Skip)?;
            let children = recorded.stages.iter().filter(|child| child.summary.declared == stage);
            let children: Vec<String> = children.map(|child| child.summary.stage.clone()).collect();
            if children.len() > 1 {
                return children.iter().map(|child| gatherer.child(run, child, None)).collect();
            }
            if self.run.is_some() && children.is_empty() {
                return Err(crate::locate::unknown_stage(stage, &declared(&recorded)));
            }
        }
        if results.is_empty()
            && let Some(pipeline) = &self.pipeline
        {
            let runs = past.history.select(&Selection { pipeline: None, state: None, limit: None });
            let runs = runs.map_err(Failure::machine)?;
            let names: BTreeSet<String> = runs.into_iter().map(|run| run.pipeline).collect();
            if !names.contains(pipeline) {
                let failure = Failure::wrong(format!("there is no run of a pipeline `{pipeline}`"));
                return Err(failure.with_help_if(suggest::help(pipeline, "pipelines", &names)));
            }
        }
        // A stage of the same name in another pipeline is another stage.
        let results = match (&self.pipeline, &newest) {
            (None, Some(run)) => {
                let pipeline = past.find(run)?.pipeline;
                past.history.results_of(stage, Some(&pipeline)).map_err(Failure::machine)?
            }
            _ => results,
        };
        if results.is_empty() {
            return Err(self.without_result(stage, newest.as_deref().filter(|_| self.run.is_some()), past)?);
        }
        // The same result, taken from the store again and again, is one result.
        let ids = past.history.ids().map_err(Failure::machine)?;
        let mut seen = BTreeSet::new();
        let different = results.iter().filter(|(_, summary)| seen.insert(summary.key));
        different.map(|(run, summary)| gatherer.child(run, &summary.stage, Some(shortest(run, &ids)))).collect()
    }

    /// The failure where no run has a result of a stage: how it ended in the run that is named, else in the newest that
    /// has it, if any has.
    fn without_result(&self, stage: &str, named: Option<&str>, past: &Past) -> Result<Failure, Failure> {
        let found = match named {
            Some(run) => {
                let mut stages = past.history.stages(run).map_err(Failure::machine)?;
                stages.retain(|one| one.declared == stage);
                Some((run.to_owned(), stages))
            }
            None => past.history.newest_with(stage, self.pipeline.as_deref()).map_err(Failure::machine)?,
        };
        let Some((run, stages)) = found else {
            let newest = past.recorded(&past.find(super::LATEST)?.run, Words::Skip)?;
            return Ok(crate::locate::unknown_stage(stage, &declared(&newest)));
        };
        let ids = past.history.ids().map_err(Failure::machine)?;
        let run = shortest(&run, &ids);
        let failed = stages.iter().find(|stage| stage.status == "failed");
        let id = words::for_shell(failed.or(stages.first()).map_or(stage, |stage| stage.stage.as_str()));
        let help = match failed {
            Some(_) => {
                format!(
                    "`pipeline logs {run} {id}` prints what its process said; `pipeline runs show {run} {id}` tells why it failed"
                )
            }
            None => format!("`pipeline runs show {run} {id}` tells what became of it"),
        };
        let pipeline = match named {
            Some(run) => Some(past.find(run)?.pipeline),
            None => self.pipeline.clone(),
        };
        let any = pipeline.map_or_else(|| "any run".to_owned(), |pipeline| format!("any run of `{pipeline}`"));
        let which = if named.is_some() { "" } else { ", the newest that has it" };
        let message = format!("`{stage}` has no result in {any}: {} run {run}{which}", ended(&stages));
        Ok(Failure::wrong(message).with_help(help))
    }
}

/// The newest run with one of these results, and a smoke run only where there is no other.
fn newest_real(results: &[(String, StageSummary)], past: &Past) -> Result<Option<String>, Failure> {
    let runs = past.history.runs().map_err(Failure::machine)?;
    let smoke: BTreeSet<&str> = runs.iter().filter(|run| run.is_smoke()).map(|run| run.run.as_str()).collect();
    let real = results.iter().find(|(run, _)| !smoke.contains(run.as_str()));
    Ok(real.or(results.first()).map(|(run, _)| run.clone()))
}

/// The children of a sweep in a run side by side, as many as `most`: what differs in them, and what came out.
///
/// # Errors
/// Fails where the record of the run or the store cannot be read.
pub(crate) fn of_sweep(past: &Past, run: &str, children: &[&str], most: usize, look: Look) -> Result<String, Failure> {
    let mut gatherer = Gatherer::new(past, false);
    let shown = children.iter().take(most).map(|child| gatherer.child(run, child, None));
    Ok(Comparison::of(shown.collect::<Result<_, _>>()?).text(look))
}

/// Whole runs side by side, with their curves where there is a use for them.
///
/// # Errors
/// Fails where there is no such run, or its record or the store cannot be read.
pub(crate) fn of_runs(past: &Past, runs: &[String], curves: bool) -> Result<Comparison, Failure> {
    let mut gatherer = Gatherer::new(past, curves);
    let candidates = runs.iter().map(|run| gatherer.run(&past.find(run)?.run));
    Ok(Comparison::of(candidates.collect::<Result<_, _>>()?))
}

/// The children of a sweep in a run side by side.
///
/// # Errors
/// As [`of_runs`].
pub(crate) fn of_children(past: &Past, run: &str, sweep: &str) -> Result<Comparison, Failure> {
    let run = past.find(run)?.run;
    let recorded = past.recorded(&run, Words::Skip)?;
    let mut gatherer = Gatherer::new(past, false);
    let children = recorded.stages.iter().filter(|child| child.summary.declared == sweep);
    let candidates = children.map(|child| gatherer.child(&run, &child.summary.stage, None));
    Ok(Comparison::of(candidates.collect::<Result<_, _>>()?))
}

/// How stages of one id in the file, none of which has a result, ended: the beginning of `… run 20260301-090507`.
fn ended(stages: &[StageSummary]) -> String {
    if let [one] = stages {
        return match one.status.as_str() {
            "failed" => "it failed in".to_owned(),
            "skipped" => "it was skipped in".to_owned(),
            "started" => "it has not come to its end in".to_owned(),
            "waiting" if one.seconds.is_some() => "it was waiting for another attempt in".to_owned(),
            _ => "it has not begun in".to_owned(),
        };
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    stages.iter().for_each(|stage| *counts.entry(&stage.status).or_default() += 1);
    let counts: Vec<String> = counts.into_iter().map(|(status, count)| format!("{count} {status}")).collect();
    format!("none of its {} children ({}) has one in", stages.len(), counts.join(", "))
}

fn declared(recorded: &Recorded) -> Vec<&str> {
    let names: BTreeSet<&str> = recorded.stages.iter().map(|stage| stage.summary.declared.as_str()).collect();
    names.into_iter().collect()
}

/// What can be done with one run.
fn alone(recorded: &Recorded) -> String {
    let sweeps: BTreeSet<&str> = recorded
        .stages
        .iter()
        .filter(|stage| !stage.summary.axes.is_empty())
        .map(|stage| stage.summary.declared.as_str())
        .collect();
    match sweeps.first() {
        Some(sweep) => format!("`pipeline runs compare {sweep}` compares the children of that sweep"),
        None => "name a second run, such as `latest~1`, or a stage to compare its results in all runs".to_owned(),
    }
}

/// What a plot file holds.
#[derive(Debug, Clone, Copy)]
enum Drawing {
    Svg,
    Html,
}

fn drawing(path: &Path) -> Result<Drawing, Failure> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg") => Ok(Drawing::Svg),
        Some("html" | "htm") => Ok(Drawing::Html),
        _ => Err(Failure::wrong(format!("`{}` is neither an `.svg` nor an `.html` file", path.display()))
            .with_help("the file extension selects the format")),
    }
}

fn draw(comparison: &Comparison, path: &Path, drawing: Drawing, verbosity: Verbosity) -> Result<(), Failure> {
    let panels = comparison.panels();
    if panels.is_empty() {
        return Err(Failure::wrong(
            "there is nothing to draw: none of these results is of a training, or of a sweep over devices or threads",
        )
        .with_help("name the training's stage, as in `pipeline runs compare adapter`"));
    }
    let svg = plot::svg(&panels);
    let text = match drawing {
        Drawing::Svg => svg,
        Drawing::Html => plot::html("pipeline runs compare", &svg, &comparison.html_table()),
    };
    std::fs::write(path, text)
        .map_err(|error| Failure::machine(error).with_help(format!("`{}` could not be written", path.display())))?;
    if verbosity > Verbosity::Quiet {
        terminal::tell_line(format_args!("drawn in {}", words::path(path)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_that_waits_for_another_attempt_has_begun() {
        let waiting = |seconds: Option<f64>| StageSummary {
            stage: "tr".to_owned(),
            kind: "command".to_owned(),
            status: "waiting".to_owned(),
            key: None,
            seconds,
            peak_memory_bytes: None,
            declared: "tr".to_owned(),
            axes: Vec::new(),
        };
        assert_eq!(ended(&[waiting(None)]), "it has not begun in");
        assert_eq!(ended(&[waiting(Some(1.5))]), "it was waiting for another attempt in");
    }
}
