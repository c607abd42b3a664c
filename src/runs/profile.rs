//! `pipeline runs profile`: where the time of a past run's stages went.

use std::path::PathBuf;

use clap::Args;
use engine::history::Words;
use serde::Serialize;

use super::{LATEST, Past};
use crate::profiles::StageProfile;
use crate::render::Failure;
use crate::{Format, Global, locate, words};

/// Show where the time of a run's stages went, of those that were run with `--profile` or `profile: true`.
#[derive(Args)]
pub(super) struct ProfileArgs {
    /// The run.
    #[arg(default_value = LATEST)]
    run: String,
    /// A stage of it, or a child of a sweep by its values, in any order.
    stage: Option<String>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Where the time of a run's stages went, as a program reads it.
#[derive(Serialize)]
struct RunProfile {
    run: String,
    traces: Vec<PathBuf>,
    stages: Vec<StageProfile>,
}

/// Prints the tables.
pub(super) fn run(args: &ProfileArgs, global: &Global) -> Result<(), Failure> {
    let past = Past::open(global)?;
    let summary = past.find(&args.run)?;
    let recorded = past.recorded(&summary.run, Words::Skip)?;
    let stages = match &args.stage {
        Some(name) => vec![locate::stage_of_run(&recorded, name)?],
        None => recorded.stages.iter().collect(),
    };
    let ids = stages.iter().map(|stage| stage.summary.stage.clone());
    let profiles: Vec<StageProfile> =
        ids.filter_map(|stage| recorded.profile(&stage).map(|profile| StageProfile { stage, profile })).collect();
    if profiles.is_empty() {
        let message = match &args.stage {
            Some(stage) => format!("stage `{stage}` was not profiled in run {}", summary.run),
            None => format!("no stage was profiled in run {}", summary.run),
        };
        let again = words::path(&summary.file);
        return Err(Failure::wrong(message).with_help(format!(
            "`pipeline run {again} --profile --force` runs it again and records where its time goes"
        )));
    }
    if args.format == Format::Json {
        return crate::print_json(&RunProfile { run: summary.run, traces: recorded.traces(), stages: profiles });
    }
    let out = &mut crate::screen::stdout();
    profiles.iter().try_for_each(|profile| profile.print(out))?;
    for trace in recorded.traces() {
        crate::terminal::tell_line(format_args!("trace: {}", words::path(&trace)));
    }
    Ok(())
}
