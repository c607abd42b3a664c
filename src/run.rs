//! `pipeline run`: does what is missing and shows it as it goes.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cache::{Digest, OutputRecord, Store, Verify};
use clap::Args;
use engine::checks::complete;
use engine::error::Cause;
use engine::executor::ExecutorKind;
use engine::explain::ResultMissing;
use engine::file::source::Sources;
use engine::history::RecordedGate;
use engine::home::Home;
use engine::lock_file::Pinning;
use engine::parameter::Period;
use engine::plan::{Plan, PlannedStage, Scale};
use engine::protocol::{Network, ReportLevel, WorkerEvent};
use engine::publish::OnChanged;
use engine::remote::RemoteSettings;
use engine::run::{
    Compared, Conclusion, Counts, ExitOnInterrupt, OnFailure, Profiling, RunError, RunEvent, RunOptions, RunOutcome,
    Sharing, StageOutcome, State,
};
use engine::stage::{Registry, StageKind as _};
use serde::Serialize;
use serde_json::Value;
use stages::data::artifact::{Metrics, OutputKind};
use stages::kinds::command::Command;
use stages::kinds::evaluate::Evaluate;
use stages::kinds::generate::{self, Generate};
use stages::kinds::train::Train;

use crate::locate::Invocation;
use crate::profiles::Profiles;
use crate::progress::{Progress, Screen, Verbosity};
use crate::remote::{RemoteArgs, SHARED_CACHE};
use crate::render::{self, Exit, Failure, Message};
use crate::runs::{Past, compare};
use crate::selection::{STAGES, SelectionArgs};
use crate::stream::Stream;
use crate::table::Table;
use crate::terminal::{self, Look};
use crate::track::{Sender, TrackerArgs};
use crate::{Format, Global, figures, locate, new_file, words};

/// How long a stage may take to save its state, unless the command line says.
const GRACE: Duration = Duration::from_secs(10);

/// What options of `run` are listed under in its help.
const EXECUTION: &str = "Execution";
const OUTPUT: &str = "Output";

/// Run a pipeline: compute what is missing, take the rest from the store, continue an interrupted run.
///
/// Completions and metrics are printed on standard output at the end (with `--verbose` also counts, conventions and
/// speed), everything else on standard error.
#[derive(Args)]
pub(crate) struct RunArgs {
    /// The pipeline file.
    file: PathBuf,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`.
    #[arg(value_name = "OVERRIDE")]
    overrides: Vec<String>,
    #[command(flatten)]
    selection: SelectionArgs,
    /// Use this prompt in place of the prompts of the file's `generate` stages; may be given several times.
    #[arg(long = "prompt", value_name = "TEXT", help_heading = STAGES)]
    prompts: Vec<String>,
    /// Test in a minute whether the whole file works: 8 rows, 2 optimizer steps, short completions, results with keys
    /// of their own, nothing published.
    #[arg(long, help_heading = STAGES)]
    smoke: bool,
    /// Maximum number of stages that run at once [default: as many as there are threads for].
    #[arg(short, long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..), help_heading = EXECUTION)]
    jobs: Option<u16>,
    /// Threads for all stages together [default: what the machine has].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..), help_heading = EXECUTION)]
    threads: Option<u16>,
    /// Where stages run, whatever the file sets; those that it keeps on this machine stay. The file's settings of the
    /// cluster hold.
    #[arg(long, value_enum, help_heading = EXECUTION)]
    executor: Option<ExecutorArg>,
    /// Continue with the stages that do not depend on a failed one.
    #[arg(long, help_heading = EXECUTION)]
    keep_going: bool,
    /// How long a stage may take to save its state after a request to stop.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration, help_heading = EXECUTION)]
    grace: Duration,
    /// Use no hub: what is neither on this machine nor in the shared cache is an error that names it.
    #[arg(long, help_heading = EXECUTION)]
    offline: bool,
    /// Fail if `pipeline.lock` would change.
    #[arg(long, help_heading = EXECUTION)]
    locked: bool,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Send the results of this run to the shared cache, whatever the file sets.
    #[arg(long, conflicts_with_all = ["no_remote", "smoke"], help_heading = SHARED_CACHE)]
    push: bool,
    /// Be one task of another scheduler's graph: as `--push`, and what was made but did not arrive there fails the run
    /// (3); a result that is there stays there, unless a stage that runs here reads it.
    #[arg(long, conflicts_with_all = ["no_remote", "smoke"], help_heading = SHARED_CACHE)]
    hand_over: bool,
    /// Replace published folders that were changed by hand, and what else has the name of a target.
    #[arg(long, help_heading = OUTPUT)]
    overwrite: bool,
    #[command(flatten, next_help_heading = OUTPUT)]
    trackers: TrackerArgs,
    /// Profile each stage that runs: a table per kernel, and a trace.
    #[arg(long, help_heading = OUTPUT)]
    profile: bool,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t, help_heading = OUTPUT)]
    format: Format,
    /// Whether standard output is the run's, or that of another command which needs its results.
    #[arg(skip)]
    results: Results,
}

/// Whether a run prints its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Results {
    #[default]
    Printed,
    NotPrinted,
}

/// Makes what some stages are to have made for another command, which standard output belongs to.
///
/// # Errors
/// Fails as the run does.
pub(crate) fn make(file: &Path, overrides: &[String], stages: Vec<String>, global: &Global) -> Result<(), Failure> {
    let args = RunArgs {
        file: file.to_owned(),
        overrides: overrides.to_vec(),
        selection: SelectionArgs::until(stages),
        prompts: Vec::new(),
        smoke: false,
        jobs: None,
        threads: None,
        executor: None,
        keep_going: false,
        grace: GRACE,
        offline: false,
        locked: false,
        remote: RemoteArgs::named(None),
        push: false,
        hand_over: false,
        overwrite: false,
        trackers: TrackerArgs::default(),
        profile: false,
        format: Format::Text,
        results: Results::NotPrinted,
    };
    run(&args, global)
}

/// What `--executor` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ExecutorArg {
    /// This machine.
    Local,
    /// Jobs of a Slurm cluster.
    Slurm,
}

impl From<ExecutorArg> for ExecutorKind {
    fn from(arg: ExecutorArg) -> Self {
        match arg {
            ExecutorArg::Local => Self::Local,
            ExecutorArg::Slurm => Self::Slurm,
        }
    }
}

/// What a run reported, as far as it is printed at its end.
#[derive(Default)]
struct RunReport {
    /// What stages report.
    reports: Vec<StageReport>,
    failures: Vec<Failed>,
    gates: Vec<RecordedGate>,
    published: Vec<PathBuf>,
    publish_failures: Vec<PublishFailure>,
    /// By stage.
    costs: BTreeMap<String, Cost>,
    /// Whether the run is for the runs of other machines.
    hands_over: bool,
    /// Whether they cannot have what it made.
    not_handed_over: bool,
}

struct Failed {
    exit: Exit,
    message: Message,
}

/// What a stage reported.
#[derive(Serialize)]
struct StageReport {
    stage: String,
    level: ReportLevel,
    text: String,
}

/// An output that could not be copied out of the store.
#[derive(Serialize)]
struct PublishFailure {
    stage: String,
    output: String,
    /// Where it should be.
    path: PathBuf,
    cause: Cause,
    /// The message and its sources, outermost first.
    messages: Vec<String>,
    help: Option<String>,
}

/// What a stage's process took, where one made the result, and how that compares with the result before.
#[derive(Clone, Default, Serialize)]
struct Cost {
    seconds: Option<f64>,
    peak_memory_bytes: Option<u64>,
    compared: Option<Compared>,
}

/// What came out of a run, as a program reads it.
#[derive(Serialize)]
struct OutcomeView<'a> {
    run: &'a str,
    folder: &'a Path,
    conclusion: Conclusion,
    counts: Counts,
    /// How long the command took.
    seconds: f64,
    stages: Vec<StageView<'a>>,
    reports: &'a [StageReport],
    gates: &'a [RecordedGate],
    published: &'a [PathBuf],
    publish_failures: &'a [PublishFailure],
    profiles: &'a Profiles,
}

#[derive(Serialize)]
struct StageView<'a> {
    stage: &'a str,
    state: State,
    key: Option<Digest>,
    outputs: &'a BTreeMap<String, OutputRecord>,
    failure: Option<&'a engine::error::Failure>,
    #[serde(flatten)]
    cost: Cost,
}

/// Runs the pipeline.
pub(crate) fn run(args: &RunArgs, global: &Global) -> Result<(), Failure> {
    let began = Instant::now();
    let preparing = ExitOnInterrupt::new();
    let registry = stages::registry();
    let plan = args.plan(&registry, global)?;
    let invocation = args.invocation(global);
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    render::left_out(&plan, global.verbosity());
    let home = global.home(&args.file)?;
    let options = args.options(&plan)?;
    let ids = plan.stages.iter().map(|stage| stage.id.as_str());
    let mut progress = Progress::new(ids, global.verbosity(), Look::stderr());
    if args.shows_answers(global.verbosity()) {
        progress = progress.with_stream(Stream::new(Box::new(std::io::stdout()), Look::stdout()));
    }
    let mut report = RunReport { hands_over: args.hand_over, ..RunReport::default() };
    drop(preparing);
    let mut sender = None;
    let ended = engine::run::run(&plan, &home, &registry, &options, |event| {
        if let RunEvent::RunStarted { run, .. } = event {
            sender = Sender::begin(&home, run, &plan.track);
        }
        let screen = progress.event(event);
        if let RunEvent::Checked { warnings } = event {
            render::warnings(&plan.sources, warnings, global.verbosity());
        }
        report.event(event, screen, &plan);
    });
    let unsent = sender.map(Sender::end).unwrap_or_default();
    progress.finish();
    let outcome = match ended {
        Ok(outcome) => outcome,
        Err(error) => return Err(not_begun(error, plan.sources, &invocation)),
    };
    if !args.prompts.is_empty() {
        report.reports.extend(answers_before(&outcome, &plan, &home, &invocation)?);
    }
    let positions: HashMap<&str, usize> =
        plan.stages.iter().enumerate().map(|(position, stage)| (stage.id.as_str(), position)).collect();
    report.reports.sort_by_key(|report| positions.get(report.stage.as_str()).copied());
    let profiles = Profiles::of(&outcome, &plan, args.profiling());
    // Results first, then what failed, then how to go on: what is last is seen first.
    let printed = match args.format {
        _ if args.results == Results::NotPrinted => Ok(()),
        Format::Json => crate::print_json(&OutcomeView::of(&outcome, &report, &profiles, began)),
        Format::Text => Conclusions { plan: &plan, outcome: &outcome, home: &home, verbosity: global.verbosity() }
            .print(&report.reports, &report.gates)
            .and_then(|()| Ok(profiles.print()?)),
    };
    for failure in &report.failures {
        render::message(&failure.message);
    }
    let exit = exit(&outcome, &report);
    if global.verbosity() > Verbosity::Quiet {
        profiles.tell();
        terminal::tell_line(Look::stderr().wrap(&summary(&outcome, exit, began), 2));
        for missed in unsent {
            let later = "the next run sends the rest, or `pipeline track`";
            terminal::tell_line(Look::stderr().wrap(&format!("{missed}; {later}"), 2));
        }
        let published: Vec<String> = report.published.iter().map(|path| words::path(path)).collect();
        if !published.is_empty() {
            terminal::tell_line(Look::stderr().wrap(&format!("published: {}", published.join(", ")), 2));
        }
        if let Some(next) = args.next(&plan, &outcome, exit, &invocation).filter(|_| args.results == Results::Printed) {
            terminal::tell_line(format_args!("next: {next}"));
        }
    }
    Failure::after(exit, printed)
}

/// The failure of a run that did not begin.
fn not_begun(error: RunError, sources: Sources, invocation: &Invocation<'_>) -> Failure {
    let help = if let RunError::Results(missing) = &error {
        let help = missing.iter().map(|missing| ResultMissing::help_by(&invocation.run_until(&missing.stage)));
        Some(help.collect::<Vec<_>>().join("\n"))
    } else {
        None
    };
    Failure::run(error, sources).with_help_if(help)
}

/// The answers that the store had already to the prompts of the command line: nothing ran that would have reported
/// them.
fn answers_before(
    outcome: &RunOutcome,
    plan: &Plan,
    home: &Home,
    invocation: &Invocation<'_>,
) -> Result<Vec<StageReport>, Failure> {
    let store = Store::open(home.store()).map_err(Failure::machine)?;
    let mut reports = Vec::new();
    let asked = |(planned, stage): &(&PlannedStage, &StageOutcome)| {
        planned.kind == Generate::NAME && stage.state == State::Cached
    };
    for (_, stage) in plan.stages.iter().zip(&outcome.stages).filter(asked) {
        let Some(record) = stage.outputs.values().next() else { continue };
        let staging = store.staging().map_err(Failure::machine)?;
        let folder = staging.path().join("samples");
        let linked = store.link_folder(&record.tree, &folder, Verify::Contents);
        linked.map_err(|error| locate::unreadable_by(error, &store, &invocation.run()))?;
        let text = generate::answers(&folder)?;
        reports.push(StageReport { stage: stage.stage.clone(), level: ReportLevel::Result, text });
    }
    Ok(reports)
}

impl RunArgs {
    /// The plan of the stages asked for, with the prompts of the command line in it.
    fn plan(&self, registry: &Registry, global: &Global) -> Result<Plan, Failure> {
        let load = |overrides: &[String]| {
            let plan = engine::plan::load_at(crate::scale(self.smoke), &self.file, overrides, registry);
            plan.map_err(|rejected| {
                let rejected = complete(rejected, Some(&global.home_to_look(&self.file)));
                new_file::or_recipe(rejected, &self.file)
            })
        };
        let overrides = self.selection.overrides(&self.overrides);
        let mut plan = load(&overrides)?;
        if !self.prompts.is_empty() {
            let asked = prompt_overrides(&plan, &self.prompts);
            if asked.is_empty() {
                let failure = Failure::wrong("`--prompt` asks a `generate` stage, and the file has none".to_owned());
                return Err(failure.with_help("add a stage with `uses: generate` and a `model`"));
            }
            let overrides: Vec<String> = overrides.into_iter().chain(asked).collect();
            plan = load(&overrides)?;
        }
        plan.track = self.trackers.or(std::mem::take(&mut plan.track));
        self.selection.of(plan)
    }

    fn invocation<'a>(&'a self, global: &'a Global) -> Invocation<'a> {
        Invocation { file: &self.file, overrides: &self.overrides, scale: crate::scale(self.smoke), global }
    }

    /// A command that shows more of what was made.
    fn next(&self, plan: &Plan, outcome: &RunOutcome, exit: Exit, invocation: &Invocation<'_>) -> Option<String> {
        if exit != Exit::Done || outcome.counts.done == 0 {
            return None;
        }
        if self.smoke {
            return Some(Invocation { scale: Scale::Full, ..*invocation }.run());
        }
        let kind = |kind: &str| plan.stages.iter().rev().find(|stage| stage.kind == kind);
        if let Some(asked) = kind(Generate::NAME).filter(|_| self.prompts.is_empty()) {
            return Some(format!("{} --prompt \"Your question\"", invocation.run_until(&asked.declared)));
        }
        // `show` knows no prompts of the command line.
        let last = || plan.stages.last().filter(|_| self.prompts.is_empty());
        let shown = kind(Evaluate::NAME).or_else(|| kind(Train::NAME)).or_else(last)?;
        Some(invocation.show(&shown.id))
    }

    /// Whether answers are shown as they grow: where a person watches, and the output is not for a program.
    fn shows_answers(&self, verbosity: Verbosity) -> bool {
        let watched = Look::stdout().live && Look::stderr().live;
        let is_printed = self.results == Results::Printed && self.format == Format::Text;
        watched && is_printed && verbosity > Verbosity::Quiet
    }

    /// The shared cache. What a smoke run makes is of no use to others.
    fn shared_cache(&self, plan: &Plan) -> Result<Option<RemoteSettings>, Failure> {
        let settings =
            if self.sends() { Some(self.remote.required(Some(plan))?) } else { self.remote.settings(Some(plan))? };
        Ok(settings.map(|settings| RemoteSettings { push: (settings.push || self.sends()) && !self.smoke, ..settings }))
    }

    /// Whether the command line asks for what is made to be sent to the shared cache.
    fn sends(&self) -> bool {
        self.push || self.hand_over
    }

    /// Of which stages it is recorded where their time goes.
    fn profiling(&self) -> Profiling {
        if self.profile { Profiling::All } else { Profiling::AsFiled }
    }

    fn options(&self, plan: &Plan) -> Result<RunOptions, Failure> {
        Ok(RunOptions {
            on_failure: if self.keep_going { OnFailure::KeepGoing } else { OnFailure::Stop },
            threads: self.threads.map(usize::from),
            jobs: self.jobs.map(usize::from),
            executor: self.executor.map(ExecutorKind::from),
            grace: self.grace,
            network: if self.offline { Network::Offline } else { Network::Online },
            pinning: match (self.locked, self.offline) {
                (true, _) => Pinning::Locked,
                (false, true) => Pinning::Offline,
                (false, false) => Pinning::Resolve,
            },
            on_changed_target: if self.overwrite { OnChanged::Overwrite } else { OnChanged::Refuse },
            remote: self.shared_cache(plan)?,
            sharing: if self.hand_over { Sharing::HandsOver } else { Sharing::SparesWork },
            profile: self.profiling(),
            ..RunOptions::default()
        })
    }
}

/// A length of time on the command line, written as in the file.
fn duration(text: &str) -> Result<Duration, String> {
    text.parse::<Period>().map(|period| period.0)
}

/// What puts prompts into each `generate` stage, in place of its own.
fn prompt_overrides(plan: &Plan, prompts: &[String]) -> Vec<String> {
    // A prompt is a text, whatever looks like a reference in it.
    let texts: Vec<String> = prompts.iter().map(|prompt| prompt.replace("${", "$${")).collect();
    let texts = Value::from(texts);
    let stages = plan.stages.iter().filter(|stage| stage.kind == Generate::NAME);
    let overrides = stages.flat_map(|stage| {
        // `limit` is for prompts that come from a stage.
        let limit = stage.parameters.get("limit").is_some().then(|| format!("{}.limit=null", stage.declared));
        [Some(format!("{}.prompts={texts}", stage.declared)), limit]
    });
    // The children of a sweep stand for one stage of the file.
    let mut overrides: Vec<String> = overrides.flatten().collect();
    overrides.sort();
    overrides.dedup();
    overrides
}

impl RunReport {
    fn event(&mut self, event: &RunEvent, screen: Screen, plan: &Plan) {
        match event {
            RunEvent::Worker { said: WorkerEvent::Report { .. }, .. } if screen == Screen::HasIt => {}
            RunEvent::Worker { stage, said: WorkerEvent::Report { text, level } } => {
                self.reports.push(StageReport { stage: stage.clone(), level: *level, text: text.clone() });
            }
            RunEvent::StageDone { stage, seconds, peak_memory_bytes, compared, .. } => {
                let (seconds, peak_memory_bytes) = (Some(*seconds), Some(*peak_memory_bytes));
                self.costs.insert(stage.clone(), Cost { seconds, peak_memory_bytes, compared: compared.clone() });
            }
            RunEvent::StageFailed { stage, failure, log, retry_in_seconds: None, .. } => {
                let printed = std::fs::metadata(log).is_ok_and(|log| log.len() > 0);
                let log = printed.then(|| format!("what its process printed is in {}", words::path(log)));
                let help: Vec<String> = failure.help.clone().into_iter().chain(log).collect();
                let text = format!("stage `{stage}` failed{}", place(plan, stage));
                let help = (!help.is_empty()).then(|| help.join("\n"));
                self.fail(failure.cause.into(), text, &failure.messages, help);
            }
            RunEvent::ResultNotSent { stage, key, failure } if self.hands_over => {
                let name = stage.clone().unwrap_or_else(|| key.short());
                self.lost(format!("the result of `{name}` did not arrive in the shared cache"), failure);
            }
            RunEvent::RemoteFailed { failure, .. } if self.hands_over => {
                self.lost("nothing can be handed over through the shared cache".to_owned(), failure);
            }
            RunEvent::GateJudged { gate, holds, because, .. } => {
                if !holds {
                    let text = format!("the gate `{gate}` does not hold, so nothing is published");
                    self.fail(Exit::StageFailed, text, std::slice::from_ref(because), None);
                }
                self.gates.push(RecordedGate { gate: gate.clone(), holds: *holds, because: because.clone() });
            }
            // What was made again is published again.
            RunEvent::Published { path, .. } if self.published.contains(path) => {}
            RunEvent::Published { path, .. } => self.published.push(path.clone()),
            RunEvent::PublishFailed { stage, output, path, failure } => {
                let engine::error::Failure { cause, messages, help, .. } = failure;
                self.publish_failures.push(PublishFailure {
                    stage: stage.clone(),
                    output: output.clone(),
                    path: path.clone(),
                    cause: *cause,
                    messages: messages.clone(),
                    help: help.clone(),
                });
                let text = format!("`{stage}.{output}` cannot be published to {}", words::path(path));
                self.fail((*cause).into(), text, messages, help.clone());
            }
            RunEvent::RunStarted { .. }
            | RunEvent::Pinning { .. }
            | RunEvent::Checked { .. }
            | RunEvent::StageCached { .. }
            | RunEvent::StageStarted { .. }
            | RunEvent::StageWaiting { .. }
            | RunEvent::StageJob { .. }
            | RunEvent::Worker { .. }
            | RunEvent::StageFailed { .. }
            | RunEvent::StageRebuilding { .. }
            | RunEvent::ResultFetching { .. }
            | RunEvent::ResultFetched { .. }
            | RunEvent::ResultRefused { .. }
            | RunEvent::ResultSent { .. }
            | RunEvent::ResultNotSent { .. }
            | RunEvent::RemoteFailed { .. }
            | RunEvent::StageSkipped { .. }
            | RunEvent::RunFinished { .. } => {}
        }
    }

    fn lost(&mut self, text: String, failure: &engine::error::Failure) {
        self.not_handed_over = true;
        self.fail(Exit::Machine, text, &failure.messages, failure.help.clone());
    }

    fn fail(&mut self, exit: Exit, text: String, messages: &[String], help: Option<String>) {
        let chain: Vec<String> = std::iter::once(text).chain(messages.iter().cloned()).collect();
        self.failures.push(Failed { exit, message: Message::chain(&chain, help) });
    }
}

/// Where several stages failed: a stage's own failure outweighs a mistake of the file, and both what the machine lacks,
/// since that alone may be mended by trying elsewhere.
///
/// A run that could not hand over what it made has done nothing for those who wait for it, and what it could not find
/// may be there.
fn exit(outcome: &RunOutcome, report: &RunReport) -> Exit {
    let failed = |exit| report.failures.iter().any(|failure| failure.exit == exit);
    match outcome.conclusion {
        Conclusion::Interrupted => Exit::Interrupted,
        Conclusion::Succeeded | Conclusion::Failed if report.not_handed_over => Exit::Machine,
        Conclusion::Succeeded => Exit::Done,
        Conclusion::Failed => {
            let outweighs = [Exit::StageFailed, Exit::Wrong, Exit::Machine, Exit::Interrupted];
            outweighs.into_iter().find(|exit| failed(*exit)).unwrap_or(Exit::StageFailed)
        }
    }
}

/// ` (xsum.yaml:12:5)`: where a stage's parameters stand.
pub(crate) fn place(plan: &Plan, stage: &str) -> String {
    let Some(stage) = plan.stages.iter().find(|planned| planned.id == stage) else { return String::new() };
    let Some(source) = plan.sources.get(stage.span.source) else { return String::new() };
    let (line, column) = plan.sources.line_column(stage.span);
    format!(" ({}:{line}:{column})", source.name)
}

/// The last words of a run: what was done, how long it took, under which id it is kept.
fn summary(outcome: &RunOutcome, exit: Exit, began: Instant) -> String {
    let took = words::duration(began.elapsed());
    if exit == Exit::Done && outcome.counts.done == 0 {
        return format!("{} ({took})", words::all_cached(outcome.stages.len()));
    }
    let word = match exit {
        Exit::Done => "done",
        Exit::Interrupted => "interrupted",
        Exit::StageFailed | Exit::Wrong | Exit::Machine => "failed",
    };
    let next = if exit == Exit::Interrupted { "; the same command continues from here" } else { "" };
    format!("{word}: {} in {took} (run {}){next}", counts(outcome.counts), outcome.run)
}

/// `3 ran, 5 cached`: the counts that are not zero.
pub(crate) fn counts(counts: Counts) -> String {
    let Counts { done, cached, failed, skipped } = counts;
    let counts = [(done, "ran"), (cached, "cached"), (failed, "failed"), (skipped, "skipped")];
    let counts = counts.iter().filter(|(count, _)| *count > 0).map(|(count, word)| format!("{count} {word}"));
    counts.collect::<Vec<_>>().join(", ")
}

impl<'a> OutcomeView<'a> {
    fn of(outcome: &'a RunOutcome, report: &'a RunReport, profiles: &'a Profiles, began: Instant) -> Self {
        let stage = |StageOutcome { stage, state, key, outputs, failure }: &'a StageOutcome| StageView {
            stage,
            state: *state,
            key: *key,
            outputs,
            failure: failure.as_ref(),
            cost: report.costs.get(stage).cloned().unwrap_or_default(),
        };
        Self {
            run: &outcome.run,
            folder: &outcome.folder,
            conclusion: outcome.conclusion,
            counts: outcome.counts,
            seconds: began.elapsed().as_secs_f64(),
            stages: outcome.stages.iter().map(stage).collect(),
            reports: &report.reports,
            gates: &report.gates,
            published: &report.published,
            publish_failures: &report.publish_failures,
            profiles,
        }
    }
}

/// Children of a sweep that have a line each; `runs compare` gives all.
const MOST_CHILDREN: usize = 24;

/// What a run found out, as it is printed at its end.
struct Conclusions<'a> {
    plan: &'a Plan,
    outcome: &'a RunOutcome,
    home: &'a Home,
    verbosity: Verbosity,
}

impl Conclusions<'_> {
    /// What stages report, each under its stage's name; one table for each sweep; the losses of trainings.
    fn print(&self, reports: &[StageReport], gates: &[RecordedGate]) -> Result<(), Failure> {
        let look = Look::stdout();
        let mut blocks = Vec::new();
        let mut last = None;
        for report in reports.iter().filter(|report| self.shows(report)) {
            if last != Some(&report.stage) {
                blocks.push(look.paint("1", &format!("[{}]", report.stage)));
                last = Some(&report.stage);
            }
            let block = blocks.last_mut().expect("the stage's name is the first line of its block");
            *block += &format!("\n{}", look.wrap(report.text.trim_end(), 2));
        }
        blocks.extend(self.metrics_of_commands(look));
        if self.outcome.counts.done > 0 {
            blocks.extend(self.trainings(look));
            for (declared, children) in self.sweeps() {
                blocks.push(self.sweep(declared, &children, look)?);
            }
        }
        if !gates.is_empty() {
            blocks.push(format!("{}\n{}", look.paint("1", "[gates]"), figures::gates(gates, look)));
        }
        let mut out = crate::screen::stdout();
        for (at, block) in blocks.iter().enumerate() {
            writeln!(out, "{}{}", if at > 0 { "\n" } else { "" }, block.trim_end())?;
        }
        Ok(out.flush()?)
    }

    /// What a sweep's children measured is in one table; the rest is for who asks for more.
    fn shows(&self, report: &StageReport) -> bool {
        let planned = self.plan.stage(&report.stage);
        let in_table = planned.is_some_and(|stage| !stage.axes.is_empty() && stage.kind == Evaluate::NAME);
        self.verbosity == Verbosity::Verbose || (report.level == ReportLevel::Result && !in_table)
    }

    /// The stages of a kind that are not swept, with what became of each.
    fn unswept(&self, kind: &str) -> impl Iterator<Item = (&PlannedStage, &StageOutcome)> {
        let stages = self.plan.stages.iter().zip(&self.outcome.stages);
        stages.filter(move |(stage, _)| stage.kind == kind && stage.axes.is_empty())
    }

    fn metrics_of_commands(&self, look: Look) -> Vec<String> {
        let of_stage = |(stage, outcome): (&PlannedStage, &StageOutcome)| {
            let outputs = all_metrics(outcome);
            let is_alone = outputs.len() == 1;
            let block = |(name, output): (&String, &OutputRecord)| {
                let title = if is_alone { format!("[{}]", stage.id) } else { format!("[{}.{name}]", stage.id) };
                format!("{}\n{}", look.paint("1", &title), figures::lines(&Value::Object(output.facts.clone())))
            };
            outputs.into_iter().map(block).collect::<Vec<_>>()
        };
        self.unswept(Command::NAME).flat_map(of_stage).collect()
    }

    /// The last losses of what was trained outside of sweeps.
    fn trainings(&self, look: Look) -> Option<String> {
        let trained = self.unswept(Train::NAME).filter(|(_, outcome)| outcome.state == State::Done);
        let trained: Vec<(&str, &OutputRecord)> =
            trained.filter_map(|(stage, outcome)| Some((stage.id.as_str(), metrics(outcome)?))).collect();
        let columns = ["steps", "last_loss", "last_validation_loss", "best_validation_loss"];
        let known = |name: &&&str| trained.iter().any(|(_, output)| output.facts.contains_key(**name));
        let columns: Vec<&str> = columns.iter().filter(known).copied().collect();
        if columns.is_empty() {
            return None;
        }
        let titles = columns.iter().map(|name| name.trim_start_matches("last_").replace('_', " "));
        let mut table = Table::new(std::iter::once("trained".to_owned()).chain(titles));
        for (stage, output) in &trained {
            let cells = columns.iter().map(|name| output.facts.get(*name).map(words::figure).unwrap_or_default());
            table.row(std::iter::once((*stage).to_owned()).chain(cells));
        }
        Some(look.wrap(&table.to_string(), 2))
    }

    /// The stages that begin a sweep, with their children.
    fn sweeps(&self) -> Vec<(&str, Vec<&str>)> {
        let mut sweeps: Vec<(&str, Vec<&str>)> = Vec::new();
        for stage in self.plan.stages.iter().filter(|stage| !stage.axes.is_empty()) {
            if stage.inputs.iter().any(|input| !self.plan.stages[input.position].axes.is_empty()) {
                continue;
            }
            match sweeps.iter_mut().find(|(declared, _)| *declared == stage.declared) {
                Some((_, children)) => children.push(&stage.id),
                None => sweeps.push((&stage.declared, vec![&stage.id])),
            }
        }
        sweeps
    }

    fn sweep(&self, declared: &str, children: &[&str], look: Look) -> Result<String, Failure> {
        let past = Past::of(self.home.clone())?;
        let table = compare::of_sweep(&past, &self.outcome.run, children, MOST_CHILDREN, look)?;
        let title = look.paint("1", &format!("[{declared}] sweep of {}", children.len()));
        let more = children.len().saturating_sub(MOST_CHILDREN);
        let more =
            if more > 0 { format!("… and {more} more: `pipeline runs compare {declared}`\n") } else { String::new() };
        Ok(format!("{title}\n{table}{more}"))
    }
}

/// The output of metrics that a stage has made or had, as recorded.
fn metrics(outcome: &StageOutcome) -> Option<&OutputRecord> {
    all_metrics(outcome).first().map(|(_, output)| *output)
}

/// All of them, each with its name.
fn all_metrics(outcome: &StageOutcome) -> Vec<(&String, &OutputRecord)> {
    outcome.outputs.iter().filter(|(_, output)| output.kind == Metrics::NAME && !output.facts.is_empty()).collect()
}
