//! `pipeline plan`: what a run would do, and why.

use std::io::Write;
use std::path::PathBuf;

use cache::Store;
use clap::Args;
use engine::checks::{check, complete};
use engine::explain::{
    ExplainError, Reason, ResultMissing, StageForecast, Status, Total, explain, explain_with, missing_results, total,
};
use engine::file::problem::{Problem, Severity};
use engine::file::source::Sources;
use engine::forecast::Forecast;
use engine::home::Home;
use engine::memory::Memory;
use engine::plan::{LeftOut, Plan, Rejected};
use engine::publish::{Moment, check_targets};
use engine::remote::Asking;
use engine::run::missing_memory;
use engine::stage::WorkingState;
use serde::Serialize;

use crate::locate::Invocation;
use crate::remote::RemoteArgs;
use crate::render::{self, Exit, Failure, Message, ProblemView};
use crate::selection::SelectionArgs;
use crate::table::{Table, list};
use crate::terminal::Look;
use crate::{Format, Global, new_file, terminal, words};

/// Print what a run would do: which stages are cached, which would run, which field is the reason, and what they
/// would need.
///
/// Nothing runs, and nothing is fetched. Exits with 2 if a stage cannot use its inputs.
#[derive(Args)]
pub(crate) struct PlanArgs {
    /// The pipeline file.
    file: PathBuf,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`.
    #[arg(value_name = "OVERRIDE")]
    overrides: Vec<String>,
    #[command(flatten)]
    selection: SelectionArgs,
    /// Plan a smoke run (`run --smoke`): a few rows and steps, with separate keys.
    #[arg(long)]
    smoke: bool,
    /// Query the shared cache for results that the home lacks: the given one, else the one that a run would use.
    #[arg(long, value_name = "URL", num_args = 0..=1, require_equals = true)]
    remote: Option<Option<String>>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What a run would do, as a program reads it.
#[derive(Serialize)]
struct PlanView<'a> {
    pipeline: &'a str,
    stages: Vec<StageView<'a>>,
    left_out: Vec<LeftOutView<'a>>,
    /// How long all of it would take, where something is known of it.
    estimate: Option<Total>,
}

/// What would become of a stage, and what is wrong with it.
#[derive(Serialize)]
struct StageView<'a> {
    #[serde(flatten)]
    forecast: &'a StageForecast,
    problems: Vec<ProblemView<'a>>,
}

/// A stage of the file that is not in the plan, with the place of its `when:` or of the reference.
#[derive(Serialize)]
struct LeftOutView<'a> {
    stage: &'a str,
    /// The stage that it reads or waits for and that is left out itself.
    follows: Option<&'a str>,
    line: usize,
    column: usize,
}

impl<'a> LeftOutView<'a> {
    fn of(left_out: &'a LeftOut, sources: &Sources) -> Self {
        let (line, column) = sources.line_column(left_out.span);
        Self { stage: &left_out.stage, follows: left_out.follows.as_deref(), line, column }
    }
}

/// Prints the forecast.
pub(crate) fn run(args: &PlanArgs, global: &Global) -> Result<(), Failure> {
    let overrides = args.selection.overrides(&args.overrides);
    let home = global.home_to_look(&args.file);
    let plan = engine::plan::load_at(crate::scale(args.smoke), &args.file, &overrides, &stages::registry());
    let plan = plan.map_err(|rejected| new_file::or_recipe(complete(rejected, Some(&home)), &args.file))?;
    let plan = args.selection.of(plan)?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    render::left_out(&plan, global.verbosity());
    // The shared cache is asked first, where it is to be: what others have made needs no check.
    let forecasts = args.forecasts(&plan, &home)?;
    let findings = check(&plan, Some(&home), None);
    let found = findings.by_stage(&plan);
    let targets = check_targets(&plan, &home, Moment::Ahead);
    let (errors, warnings): (Vec<Problem>, Vec<Problem>) =
        findings.into_problems().into_iter().chain(targets).partition(|problem| problem.severity == Severity::Error);
    render::warnings(&plan.sources, &warnings, global.verbosity());
    let forecasts = match forecasts {
        Ok(forecasts) => forecasts,
        // Without its sources a plan has no keys, and the checks have found whatever else is wrong.
        Err(ExplainError::Sources(_)) if !errors.is_empty() => return Err(Rejected::new(plan.sources, errors).into()),
        Err(error) => return Err(Failure::explain(error, plan.sources)),
    };
    let printed = match args.format {
        Format::Json => {
            let sources = &plan.sources;
            let stages = forecasts.iter().zip(&found);
            let stages =
                stages.map(|(forecast, found)| StageView { forecast, problems: ProblemView::of_all(sources, found) });
            crate::print_json(&PlanView {
                pipeline: &plan.name,
                stages: stages.collect(),
                left_out: plan.left_out.iter().map(|left_out| LeftOutView::of(left_out, sources)).collect(),
                estimate: total(&plan, &forecasts),
            })
        }
        Format::Text => text(&plan, &forecasts, &home),
    };
    crate::terminal::tell(render::problems(&plan.sources, &errors, crate::terminal::Look::stderr()));
    let lacks = missing_results(&plan, &forecasts);
    let (file, scale) = (&args.file, crate::scale(args.smoke));
    let invocation = Invocation { file, overrides: &args.overrides, scale, global };
    lacks.iter().for_each(|missing| {
        let help = ResultMissing::help_by(&invocation.run_until(&missing.stage));
        render::message(&Message::chain(&[missing.to_string()], Some(help)));
    });
    let too_large = too_large(&plan, &forecasts);
    too_large.iter().for_each(render::message);
    let exit = match (errors.is_empty() && lacks.is_empty(), too_large.is_empty()) {
        (false, _) => Exit::Wrong,
        (true, false) => Exit::Machine,
        (true, true) => Exit::Done,
    };
    Failure::after(exit, printed)
}

/// Stages without a result for which this machine has too little memory.
fn too_large(plan: &Plan, forecasts: &[StageForecast]) -> Vec<Message> {
    let cached =
        |id: &str| forecasts.iter().any(|of| of.stage == id && matches!(of.status, Status::Cached | Status::Remote));
    let found = missing_memory(plan, &Memory::default()).into_iter().filter(|missing| !cached(&missing.stage));
    found.map(|missing| Message::chain(&[missing.to_string()], Some(missing.help()))).collect()
}

impl PlanArgs {
    /// The forecasts; with `--remote` the shared cache is asked for what is not here.
    fn forecasts(&self, plan: &Plan, home: &Home) -> Result<Result<Vec<StageForecast>, ExplainError>, Failure> {
        let Some(named) = &self.remote else { return Ok(explain(plan, home)) };
        let settings = RemoteArgs::named(named.as_deref()).required(Some(plan))?;
        let store = Store::open(home.store()).map_err(Failure::machine)?;
        let mut asking = Asking::new(&settings.place, &store);
        let forecasts = explain_with(plan, home, Some(&mut |key| asking.result(key)));
        match asking.failures() {
            (Some(failed), _) => Err(failed.into()),
            (None, refused) => {
                refused.values().for_each(|error| terminal::tell_line(format_args!("warning: {error}")));
                Ok(forecasts)
            }
        }
    }
}

fn text(plan: &Plan, forecasts: &[StageForecast], home: &Home) -> Result<(), Failure> {
    let mut table = Table::new(["stage", "kind", "forecast", "why"]);
    for forecast in forecasts {
        // Where a stage continues from is under what becomes of it.
        let said = |reason: &&Reason| !matches!(reason, Reason::WorkingState(WorkingState::GoesOn { .. }));
        let mut reasons = forecast.reasons.iter().filter(said).map(ToString::to_string);
        let first = reasons.next().unwrap_or_default();
        table.row([&forecast.stage, &forecast.kind, &word(forecast), &first]);
        for reason in reasons {
            table.row(["", "", "", &reason]);
        }
    }
    let mut out = crate::screen::stdout();
    let look = Look::stdout();
    writeln!(out, "{}", table.fitted(look))?;
    for forecast in forecasts {
        write!(out, "{}", expectations(forecast, look))?;
    }
    writeln!(out, "{}", look.wrap(&conclusion(forecasts), 2))?;
    if let Some(total) = total(plan, forecasts) {
        writeln!(out, "{}", look.wrap(&time(&total), 2))?;
    }
    if let Some(room) = room(forecasts, home) {
        writeln!(out, "{room}")?;
    }
    Ok(())
}

/// What a stage would do and cost, a line each; nothing where nothing is known.
fn expectations(forecast: &StageForecast, look: Look) -> String {
    let Forecast { figures, peak_memory_bytes, disk_bytes, .. } = &forecast.ahead;
    let mut lines: Vec<(String, String)> =
        figures.iter().map(|figure| (figure.name.replace('_', " "), figure.text.clone())).collect();
    let estimate = |bytes: &u64| format!("about {}", words::bytes(*bytes));
    lines.extend(peak_memory_bytes.as_ref().map(|bytes| ("peak memory".to_owned(), estimate(bytes))));
    lines.extend(disk_bytes.as_ref().map(|bytes| ("disk".to_owned(), estimate(bytes))));
    lines.extend(
        forecast.estimate.as_ref().map(|estimate| {
            ("time".to_owned(), format!("about {}, {}", words::about(estimate.seconds), estimate.basis))
        }),
    );
    lines.extend(forecast.last_run.map(|last| {
        let memory = last.peak_memory_bytes.map(|peak| format!(", peak memory {}", words::bytes(peak)));
        ("last time".to_owned(), format!("{}{}", words::seconds(last.seconds), memory.unwrap_or_default()))
    }));
    if lines.is_empty() {
        return String::new();
    }
    format!("{}\n{}\n", forecast.stage, list(&lines, look))
}

/// How long all stages together would take.
fn time(total: &Total) -> String {
    let Total { critical_path_seconds, all_stages_seconds, cpu_seconds, without } = total;
    let mut text = format!("about {}", words::about(*critical_path_seconds));
    // Where stages do not wait for each other the two differ.
    if words::about(*all_stages_seconds) != words::about(*critical_path_seconds) {
        text += &format!(" to {}", words::about(*all_stages_seconds));
    }
    if let Some(cpu) = cpu_seconds {
        text += &format!(", {} of CPU time", words::about(*cpu));
    }
    match without.as_slice() {
        [] => text,
        [one] => format!("time unknown: `{one}` never ran; {text} for the others"),
        several => format!("time unknown: {} stages never ran; {text} for the others", several.len()),
    }
}

/// What all stages together would write, and what there is room for.
fn room(forecasts: &[StageForecast], home: &Home) -> Option<String> {
    let needed: u64 = forecasts.iter().filter_map(|forecast| forecast.ahead.disk_bytes).sum();
    let free = home.free_bytes()?;
    let figures = format!("about {} to write, {} free", words::bytes(needed), words::bytes(free));
    match needed {
        0 => None,
        needed if needed > free => Some(format!("the disk is too small: {figures}")),
        _ => Some(figures),
    }
}

/// What becomes of a stage, in a few words.
fn word(forecast: &StageForecast) -> String {
    let goes_on = forecast.reasons.iter().find_map(|reason| match reason {
        Reason::WorkingState(state @ WorkingState::GoesOn { .. }) => Some(state.to_string()),
        _ => None,
    });
    let word = match forecast.status {
        Status::Cached => "cached",
        Status::Remote => "in the remote",
        Status::WillRun => return goes_on.unwrap_or_else(|| "will run".to_owned()),
        Status::Unknown => "depends",
        Status::Missing => "missing",
    };
    word.to_owned()
}

fn conclusion(forecasts: &[StageForecast]) -> String {
    let of = |status| forecasts.iter().filter(|forecast| forecast.status == status).count();
    let all = forecasts.len();
    match (of(Status::WillRun), of(Status::Unknown)) {
        _ if of(Status::Missing) == 1 => "nothing will run: a stage that is not selected has no result".to_owned(),
        _ if of(Status::Missing) > 0 => {
            format!("nothing will run: {} stages that are not selected have no result", of(Status::Missing))
        }
        (0, 0) if of(Status::Remote) == 0 => words::all_cached(all),
        (0, 0) => format!("nothing will run: {} in the remote", words::plural(of(Status::Remote), "result")),
        (run, 0) => format!("{run} of {} will run", words::plural(all, "stage")),
        (run, depend) => {
            format!("{run} of {all} stages will run, and {depend} more if their inputs are different")
        }
    }
}
