//! `pipeline cache push` and `cache pull`: results between this machine and the shared cache.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use cache::remote::{Check, Pulled, Pushed, PushedAs, Pushing, Remote, RemoteError, TransferProgress};
use cache::{Digest, ResultRecord, Store};
use clap::Args;
use engine::explain::{StageForecast, Status, explain, explain_with};
use engine::home::Home;
use engine::plan::Plan;
use engine::remote::Asking;
use indicatif::ProgressBar;
use serde::{Serialize, Serializer};

use super::verify::bar;
use crate::remote::RemoteArgs;
use crate::render::{self, Exit, Failure, Message};
use crate::{Format, Global, full_disk, locate, words};

/// Upload results to the shared cache; existing ones are not uploaded again.
#[derive(Args)]
pub(super) struct PushArgs {
    /// The pipeline file whose results are uploaded; without one, all results of the home.
    file: Option<PathBuf>,
    /// Only these stages.
    #[arg(value_name = "STAGE", requires = "file")]
    stages: Vec<String>,
    /// Only print what would be uploaded.
    #[arg(long)]
    dry_run: bool,
    /// Read what is there, and upload again what is damaged: else only lengths are compared.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Fetch the results of a pipeline from the shared cache, each file compared with its digest.
#[derive(Args)]
pub(super) struct PullArgs {
    /// The pipeline file whose results are fetched.
    file: PathBuf,
    /// Only these stages, without the results that they read.
    #[arg(value_name = "STAGE")]
    stages: Vec<String>,
    /// Only print what would be fetched.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// What became of one result.
#[derive(Serialize)]
struct Outcome {
    name: String,
    key: Option<Digest>,
    what: &'static str,
    files: u64,
    bytes: u64,
    #[serde(serialize_with = "in_words")]
    error: Option<RemoteError>,
}

/// What became of all of them.
#[derive(Serialize)]
struct Outcomes<'a> {
    dry_run: bool,
    results: &'a [Outcome],
}

fn in_words<S: Serializer>(error: &Option<RemoteError>, to: S) -> Result<S::Ok, S::Error> {
    error.as_ref().map(ToString::to_string).serialize(to)
}

/// Sends results.
pub(super) fn push(args: &PushArgs, global: &Global, format: Format) -> Result<(), Failure> {
    let plan = args.file.as_deref().map(|file| load(file, global)).transpose()?;
    let settings = args.remote.required(plan.as_ref())?;
    let home = match &args.file {
        Some(file) => Some(global.home(file)?),
        None => global.home_here(),
    };
    let Some(home) = home else { return tell(&[], format, args.dry_run, "sent") };
    let store = Store::open(home.store()).map_err(Failure::machine)?;
    let results = match plan {
        Some(plan) => made(plan, &home, &store, &args.stages)?,
        None => {
            let all = store.results().map_err(Failure::machine)?;
            all.into_iter().map(|(key, record)| (key.short(), Some(record))).collect()
        }
    };
    let remote = Remote::open(&settings.place)?;
    let how = if args.dry_run { Pushing::DryRun } else { Pushing::Send };
    let check = if args.verify { Check::Content } else { Check::Length };
    let mut lines = Vec::new();
    for (name, record) in results {
        let Some(record) = record else {
            lines.push(Outcome { name, key: None, what: "not made here", files: 0, bytes: 0, error: None });
            continue;
        };
        let key = record.key.result_key();
        // What garbage collection might take away meanwhile is taken into use; what is not whole here is left out.
        if store.take(&key).map_err(Failure::machine)?.is_none() {
            lines.push(Outcome { name, key: Some(key), what: "not whole here", files: 0, bytes: 0, error: None });
            continue;
        }
        let bar = bar(global.verbosity());
        let pushed = remote.push(&store, &record, how, check, show(&bar));
        bar.finish_and_clear();
        let stays = pushed.as_ref().is_err_and(RemoteError::stays_to_be_sent);
        lines.push(line(
            name,
            key,
            pushed.map(|Pushed { result, files, bytes }| (word(result, how, files), files, bytes)),
        )?);
        if how == Pushing::Send && !stays {
            store.sent(&key).map_err(Failure::machine)?;
        }
    }
    tell(&lines, format, args.dry_run, "sent")
}

/// Fetches results.
pub(super) fn pull(args: &PullArgs, global: &Global, format: Format) -> Result<(), Failure> {
    let plan = load(&args.file, global)?;
    let settings = args.remote.required(Some(&plan))?;
    let home = global.home(&args.file)?;
    let store = Store::open(home.store()).map_err(Failure::machine)?;
    let mut found = BTreeMap::new();
    let mut asking = Asking::new(&settings.place, &store);
    let mut ask = |key: &Digest| {
        let record = asking.result(key)?;
        found.insert(*key, record.clone());
        Some(record)
    };
    let forecasts = explain_with(&plan, &home, Some(&mut ask));
    let (failed, mut refused) = asking.failures();
    let chosen = choose(&plan, &args.stages).map(|chosen| (read_by(&plan, &chosen), chosen));
    let forecasts = forecasts.map_err(|error| Failure::explain(error, plan.sources))?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    let (read, chosen) = chosen?;
    let remote = Remote::open(&settings.place)?;
    let mut lines = Vec::new();
    // A record that is damaged hides whatever depends on it.
    let is_refused = |one: &StageForecast| one.key.is_some_and(|key| refused.contains_key(&key));
    let told =
        forecasts.into_iter().filter(|one| chosen.contains(&one.stage) || read.contains(&one.stage) && is_refused(one));
    let told: Vec<StageForecast> = told.collect();
    for StageForecast { stage: name, status, key, .. } in told {
        if let Some((key, error)) = key.and_then(|key| refused.remove_entry(&key)) {
            lines.push(line(name, key, Err(error))?);
            continue;
        }
        let record = key.and_then(|key| found.remove(&key).or_else(|| store.remembered(&key)));
        let (Some(key), Some(record), Status::Remote) = (key, record, status) else {
            let what = if status == Status::Cached { "here already" } else { "not in the remote" };
            lines.push(Outcome { name, key, what, files: 0, bytes: 0, error: None });
            continue;
        };
        let bar = bar(global.verbosity());
        let pulled = match args.dry_run {
            true => remote.missing_here(&store, &record),
            false => remote.pull(&store, &record, show(&bar)),
        };
        bar.finish_and_clear();
        if pulled.as_ref().is_err_and(RemoteError::is_of_one_result) {
            // What cannot be had is not to be counted on by the next run.
            store.unremember(&key).map_err(Failure::machine)?;
        }
        let what = if args.dry_run { "would be fetched" } else { "fetched" };
        lines.push(line(name, key, pulled.map(|Pulled { files, bytes }| (what, files, bytes)))?);
    }
    tell(&lines, format, args.dry_run, "fetched")
}

fn load(file: &Path, global: &Global) -> Result<Plan, Failure> {
    let plan = engine::plan::load(file, &[], &stages::registry())?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    Ok(plan)
}

/// The ids that are meant.
fn choose(plan: &Plan, named: &[String]) -> Result<Vec<String>, Failure> {
    let ids: Vec<&str> = plan.stages.iter().map(|stage| stage.id.as_str()).collect();
    if let Some(unknown) = named.iter().find(|id| !ids.contains(&id.as_str())) {
        return Err(locate::unknown_stage(unknown, &ids));
    }
    Ok(if named.is_empty() { ids.into_iter().map(str::to_owned).collect() } else { named.to_vec() })
}

/// The stages, and whatever they read.
fn read_by(plan: &Plan, chosen: &[String]) -> BTreeSet<String> {
    let mut read: BTreeSet<String> = chosen.iter().cloned().collect();
    // Each stands behind what it reads.
    for stage in plan.stages.iter().rev() {
        if read.contains(&stage.id) {
            read.extend(stage.inputs.iter().map(|input| input.stage.clone()));
        }
    }
    read
}

/// The results of a pipeline that are here, by stage.
fn made(
    plan: Plan,
    home: &Home,
    store: &Store,
    named: &[String],
) -> Result<Vec<(String, Option<ResultRecord>)>, Failure> {
    let chosen = choose(&plan, named)?;
    let forecasts = explain(&plan, home).map_err(|error| Failure::explain(error, plan.sources))?;
    let of_chosen = forecasts.into_iter().filter(|forecast| chosen.contains(&forecast.stage));
    let results = of_chosen.map(|forecast| {
        let key = forecast.key.filter(|_| forecast.status == Status::Cached);
        let record = key.map(|key| store.result(&key).map_err(Failure::machine)).transpose()?.flatten();
        Ok((forecast.stage, record))
    });
    results.collect()
}

fn word(result: PushedAs, how: Pushing, files: u64) -> &'static str {
    match (result, how) {
        (PushedAs::Same, Pushing::Send) if files > 0 => "repaired",
        (PushedAs::Same, Pushing::DryRun) if files > 0 => "would be repaired",
        (PushedAs::Repaired, Pushing::Send) => "repaired",
        (PushedAs::Repaired, Pushing::DryRun) => "would be repaired",
        (PushedAs::New, Pushing::Send) => "sent",
        (PushedAs::New, Pushing::DryRun) => "would be sent",
        (PushedAs::Same, _) => "there already",
        (PushedAs::OtherKept, _) => "another result of this key exists, and is kept",
    }
}

/// A failure of one result is told with it; one of the remote ends the command.
fn line(name: String, key: Digest, ended: Result<(&'static str, u64, u64), RemoteError>) -> Result<Outcome, Failure> {
    match ended {
        Ok((what, files, bytes)) => Ok(Outcome { name, key: Some(key), what, files, bytes, error: None }),
        Err(error) if error.is_of_one_result() => {
            Ok(Outcome { name, key: Some(key), what: "failed", files: 0, bytes: 0, error: Some(error) })
        }
        Err(error) => Err(error.into()),
    }
}

fn show(bar: &ProgressBar) -> impl Fn(TransferProgress) + Send + Sync + 'static {
    let bar = bar.clone();
    move |TransferProgress { done, total }| {
        bar.set_length(total);
        bar.set_position(done);
    }
}

fn tell(lines: &[Outcome], format: Format, dry_run: bool, verb: &str) -> Result<(), Failure> {
    let failed = lines.iter().any(|line| line.error.is_some());
    let printed = match format {
        Format::Json => crate::print_json(&Outcomes { dry_run, results: lines }),
        Format::Text => print(lines, dry_run, verb),
    };
    for error in lines.iter().filter_map(|line| line.error.as_ref()) {
        render::message(&Message::of(error).with_help_if(full_disk::help(error)));
    }
    Failure::after(if failed { Exit::StageFailed } else { Exit::Done }, printed)
}

fn print(lines: &[Outcome], dry_run: bool, verb: &str) -> Result<(), Failure> {
    let mut out = crate::screen::stdout();
    for Outcome { name, what, files, bytes, .. } in lines {
        match files {
            0 => writeln!(out, "{name}: {what}")?,
            _ => {
                writeln!(out, "{name}: {what}, {} ({})", words::plural(*files as usize, "file"), words::bytes(*bytes))?
            }
        }
    }
    let (files, bytes) = lines.iter().fold((0, 0), |(files, bytes), line| (files + line.files, bytes + line.bytes));
    let would = if dry_run { "to be " } else { "" };
    writeln!(out, "{} {would}{verb}, {}", words::plural(files as usize, "file"), words::bytes(bytes))?;
    Ok(())
}
