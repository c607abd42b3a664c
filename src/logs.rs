//! `pipeline logs`: what a stage's process printed.

use std::fs::File;
use std::io;

use clap::Args;
use engine::history::{History, stage_folder};

use crate::Global;
use crate::render::Failure;

/// Print what a stage's process wrote on standard error.
#[derive(Args)]
#[command(allow_missing_positional = true)]
pub struct LogsArgs {
    /// The run's id or its beginning [default: the newest run in which the stage's process was started].
    run: Option<String>,
    /// The stage.
    #[arg(required = true)]
    stage: String,
}

/// Prints the log.
pub fn run(args: &LogsArgs, global: &Global) -> Result<(), Failure> {
    let home = global.home_here().ok_or_else(crate::runs::nothing_yet)?;
    let history = History::open(&home).map_err(Failure::machine)?;
    let log_of = |run: &str| home.run(run).join(stage_folder(&args.stage)).join("log");
    let log = match &args.run {
        Some(id) => {
            let (summary, stages) = crate::runs::find(&history, Some(id))?;
            if !stages.iter().any(|stage| stage.stage == args.stage) {
                let ids: Vec<&str> = stages.iter().map(|stage| stage.stage.as_str()).collect();
                return Err(crate::locate::unknown_stage(&args.stage, &ids));
            }
            Some(log_of(&summary.run)).filter(|log| log.is_file())
        }
        None => {
            let runs = history.runs().map_err(Failure::machine)?;
            runs.iter().map(|run| log_of(&run.run)).find(|log| log.is_file())
        }
    };
    let Some(log) = log else {
        let stage = &args.stage;
        return Err(Failure::wrong(format!("there is no log of stage `{stage}`: its process was not started"))
            .with_help("a cached stage has its log in the run that made the result: `pipeline runs ls`"));
    };
    let mut file = File::open(&log)?;
    io::copy(&mut file, &mut io::stdout().lock())?;
    Ok(())
}
