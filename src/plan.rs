//! `pipeline plan`: what a run would do, and why.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use engine::explain::{Forecast, StageForecast, explain};
use serde_json::json;

use crate::render::{self, Failure};
use crate::table::Table;
use crate::{Format, Global, words};

/// Print what a run would do: which stages are cached, which would run, and which field is the reason.
///
/// Nothing runs, and nothing is fetched.
#[derive(Args)]
pub struct PlanArgs {
    /// The pipeline file.
    file: PathBuf,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`.
    #[arg(value_name = "OVERRIDE")]
    overrides: Vec<String>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Prints the forecast.
pub fn run(args: &PlanArgs, global: &Global) -> Result<(), Failure> {
    let plan = engine::plan::load(&args.file, &args.overrides, &stages::registry())?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    let home = global.home(&args.file)?;
    let forecasts = explain(&plan, &home).map_err(|error| Failure::explain(error, plan.sources))?;
    match args.format {
        Format::Json => crate::print_json(&json!({ "pipeline": plan.name, "stages": forecasts })),
        Format::Text => text(&forecasts),
    }
}

fn text(forecasts: &[StageForecast]) -> Result<(), Failure> {
    let mut table = Table::new(["stage", "kind", "forecast", "why"]);
    for forecast in forecasts {
        let mut reasons = forecast.reasons.iter().map(ToString::to_string);
        let first = reasons.next().unwrap_or_default();
        table.row([&forecast.stage, &forecast.kind, word(forecast.status), &first]);
        for reason in reasons {
            table.row(["", "", "", &reason]);
        }
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{table}\n{}\n", conclusion(forecasts))?;
    Ok(())
}

fn word(forecast: Forecast) -> &'static str {
    match forecast {
        Forecast::Cached => "cached",
        Forecast::WillRun => "will run",
        Forecast::Unknown => "depends",
    }
}

fn conclusion(forecasts: &[StageForecast]) -> String {
    let of = |status| forecasts.iter().filter(|forecast| forecast.status == status).count();
    let all = forecasts.len();
    match (of(Forecast::WillRun), of(Forecast::Unknown)) {
        (0, 0) => words::all_cached(all),
        (run, 0) => format!("{run} of {} will run", words::plural(all, "stage")),
        (run, depend) => {
            format!("{run} of {all} stages will run, and {depend} more if what they read comes out different")
        }
    }
}
