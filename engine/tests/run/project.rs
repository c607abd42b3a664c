//! A project in a temporary folder: a pipeline file, a home, and ways to run it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use engine::explain::{StageForecast, explain};
use engine::file::problem::Problem;
use engine::home::Home;
use engine::plan::{Plan, Selection, load};
use engine::protocol::WorkerEvent;
use engine::run::{Conclusion, RunError, RunEvent, RunOptions, RunOutcome, State, run};
use tempfile::TempDir;

use crate::kinds::registry;

/// Makes this program an engine; the pipeline file and the grace in seconds follow.
pub(crate) const ENGINE_ARGUMENT: &str = "__engine";

/// How long a stage that was asked to stop has, where a test does not say.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

pub(crate) struct Project {
    pub folder: TempDir,
    pub options: RunOptions,
    pub selection: Selection,
}

/// What a run said and how it ended.
pub(crate) struct Ran {
    pub outcome: RunOutcome,
    pub events: Vec<RunEvent>,
}

impl Project {
    pub(crate) fn new(stages: &str) -> Self {
        let options = RunOptions { grace: GRACE, ..RunOptions::default() };
        let project = Self { folder: tempfile::tempdir().unwrap(), options, selection: Selection::default() };
        project.write(stages);
        project
    }

    /// Replaces the pipeline file.
    pub(crate) fn write(&self, stages: &str) {
        fs::write(self.file(), format!("version: 1\nname: test\n{stages}")).unwrap();
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.path("pipeline.yaml")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn home(&self) -> Home {
        Home::open(&self.file(), None).unwrap()
    }

    pub(crate) fn store(&self) -> cache::Store {
        cache::Store::open(self.home().store()).unwrap()
    }

    pub(crate) fn plan(&self) -> Plan {
        let plan = load(&self.file(), &[], &registry());
        let plan = plan.unwrap_or_else(|rejected| panic!("{:#?}", rejected.problems));
        plan.select(&self.selection).unwrap()
    }

    pub(crate) fn try_run(&self) -> Result<Ran, RunError> {
        let mut events = Vec::new();
        let outcome = run(&self.plan(), &self.home(), &registry(), &self.options, |event| events.push(event.clone()))?;
        Ok(Ran { outcome, events })
    }

    pub(crate) fn run(&self) -> Ran {
        self.try_run().unwrap()
    }

    pub(crate) fn explain(&self) -> Vec<StageForecast> {
        explain(&self.plan(), &self.home()).unwrap()
    }

    /// What the checks say before anything runs.
    pub(crate) fn check(&self) -> Vec<Problem> {
        engine::checks::check(&self.plan(), Some(&self.home()), None).into_problems()
    }

    /// The reasons of one stage's forecast, as a person reads them.
    pub(crate) fn reasons(&self, stage: &str) -> Vec<String> {
        let forecast = self.explain().into_iter().find(|forecast| forecast.stage == stage).unwrap();
        forecast.reasons.iter().map(ToString::to_string).collect()
    }

    /// Starts an engine as a process of its own, in its own group, so that a signal reaches it alone.
    pub(crate) fn spawn_engine(&self, grace: Duration) -> Child {
        use std::os::unix::process::CommandExt;
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        command.arg(ENGINE_ARGUMENT).arg(self.file()).arg(grace.as_secs().to_string());
        command.stdout(Stdio::null()).process_group(0);
        command.spawn().unwrap()
    }

    /// The stage processes of this project.
    pub(crate) fn stage_processes(&self) -> Vec<i32> {
        let folder = self.folder.path().to_str().unwrap().to_owned();
        let ours = |process: &Alive| {
            let arguments = fs::read_to_string(format!("/proc/{}/cmdline", process.id)).unwrap_or_default();
            arguments.contains("__stage") && arguments.contains(&folder)
        };
        alive().filter(ours).map(|process| process.id).collect()
    }

    /// How many processes are alive in the groups of some stage processes.
    pub(crate) fn alive_in_groups(groups: &[i32]) -> usize {
        alive().filter(|process| groups.contains(&process.group)).count()
    }
}

struct Alive {
    id: i32,
    group: i32,
}

/// The machine's processes without those that have ended and not been waited for.
fn alive() -> impl Iterator<Item = Alive> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    ids.filter_map(|id| {
        // `id (name) state parent group …`, where the name may hold anything.
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?;
        let group = fields.nth(1)?.parse().ok()?;
        (state != "Z" && state != "X").then_some(Alive { id, group })
    })
}

impl Ran {
    /// The states of the stages, by id in the plan's order: `a done, b cached`.
    pub(crate) fn states(&self) -> String {
        let word = |state| match state {
            State::Waiting => "waiting",
            State::Ready => "ready",
            State::Running => "running",
            State::Cached => "cached",
            State::Done => "done",
            State::Failed => "failed",
            State::Skipped => "skipped",
        };
        let stages: Vec<_> =
            self.outcome.stages.iter().map(|stage| format!("{} {}", stage.stage, word(stage.state))).collect();
        stages.join(", ")
    }

    pub(crate) fn number(&self, stage: &str) -> i64 {
        let stage = self.outcome.stages.iter().find(|outcome| outcome.stage == stage).unwrap();
        stage.outputs["number"].facts["number"].as_i64().unwrap()
    }

    pub(crate) fn failure(&self, stage: &str) -> &engine::error::Failure {
        let stage = self.outcome.stages.iter().find(|outcome| outcome.stage == stage).unwrap();
        stage.failure.as_ref().unwrap()
    }

    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.outcome.conclusion, Conclusion::Succeeded, "{:#?}", self.events);
        self
    }

    pub(crate) fn why(&self, stage: &str) -> Vec<String> {
        let why = self.events.iter().find_map(|event| match event {
            RunEvent::StageStarted { stage: started, why, .. } if started == stage => Some(why.clone()),
            _ => None,
        });
        why.unwrap()
    }

    pub(crate) fn checkpoints(&self) -> usize {
        let is_checkpoint =
            |event: &&RunEvent| matches!(event, RunEvent::Worker { said: WorkerEvent::Checkpoint { .. }, .. });
        self.events.iter().filter(is_checkpoint).count()
    }
}

/// Waits until something holds.
pub(crate) fn wait_for(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < limit, "waited {limit:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The engine that `spawn_engine` starts. It exits as the command line does: 0, 1, or 130.
pub(crate) fn engine_process(file: &Path, grace: Duration) -> ExitCode {
    let plan = load(file, &[], &registry()).unwrap_or_else(|rejected| panic!("{:#?}", rejected.problems));
    let home = Home::open(file, None).unwrap();
    let options = RunOptions { grace, ..RunOptions::default() };
    let outcome = run(&plan, &home, &registry(), &options, |_| {}).unwrap();
    match outcome.conclusion {
        Conclusion::Succeeded => ExitCode::SUCCESS,
        Conclusion::Failed => ExitCode::FAILURE,
        Conclusion::Interrupted => ExitCode::from(130),
    }
}
