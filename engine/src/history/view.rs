//! A run as a program reads it: the one form of it that commands print and the page shows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cache::OutputRecord;
use schemars::JsonSchema;
use serde::Serialize;

use super::folder::RunInput;
use super::host::Host;
use super::recorded::{Attempt, Recorded, RecordedCopy, RecordedGate, RecordedStage, RunSummary, StageSummary};
use crate::error::Cause;

/// A run, whether it goes on, has ended or was cut off, in this process, in another one or on a cluster.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RunView<'a> {
    pub run: &'a RunSummary,
    /// The version of the program that ran it.
    pub program: &'a str,
    pub host: &'a Host,
    /// The run's folder.
    pub folder: &'a Path,
    /// Its stages, in the order of the plan.
    pub stages: Vec<StageView<'a>>,
    /// What those that failed failed with.
    pub failures: Vec<FailureView<'a>>,
    pub gates: &'a [RecordedGate],
    pub published: &'a [RecordedCopy],
    /// Traces, of the run and of its stages.
    pub traces: Vec<PathBuf>,
    /// The stages of which it was recorded where their time went.
    pub profiled: Vec<&'a str>,
}

/// A stage of a run.
#[derive(Debug, Serialize, JsonSchema)]
pub struct StageView<'a> {
    #[serde(flatten)]
    pub summary: &'a StageSummary,
    /// Why it ran, or was skipped.
    pub why: &'a [String],
    /// The threads that it might use.
    pub threads: Option<usize>,
    /// Each start of its process.
    pub attempts: &'a [Attempt],
    pub warnings: &'a [String],
    /// What it reads.
    pub inputs: &'a [RunInput],
    /// Stages that it waits for without reading them.
    pub needs: &'a [String],
    /// What it made in this run; empty where it was cached.
    pub outputs: &'a BTreeMap<String, OutputRecord>,
}

/// What a stage failed with.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FailureView<'a> {
    pub stage: &'a str,
    pub cause: &'a Cause,
    /// The message and its sources, outermost first.
    pub messages: &'a [String],
    /// What to do about it.
    pub help: Option<&'a str>,
}

impl Recorded {
    /// The run as a program reads it.
    pub fn view(&self) -> RunView<'_> {
        RunView {
            run: &self.summary,
            program: &self.program,
            host: &self.host,
            folder: self.folder(),
            stages: self.stages.iter().map(RecordedStage::view).collect(),
            failures: self.stages.iter().filter_map(RecordedStage::failure_view).collect(),
            gates: &self.gates,
            published: &self.published,
            traces: self.traces(),
            profiled: self.profiled(),
        }
    }

    /// The stages of which it was recorded where their time went.
    pub fn profiled(&self) -> Vec<&str> {
        let ids = self.stages.iter().map(|stage| stage.summary.stage.as_str());
        ids.filter(|id| self.profile(id).is_some()).collect()
    }
}

impl RecordedStage {
    fn view(&self) -> StageView<'_> {
        StageView {
            summary: &self.summary,
            why: &self.why,
            threads: self.threads,
            attempts: &self.attempts,
            warnings: &self.warnings,
            inputs: &self.plan.inputs,
            needs: &self.plan.needs,
            outputs: &self.outputs,
        }
    }

    fn failure_view(&self) -> Option<FailureView<'_>> {
        let failure = self.failure()?;
        Some(FailureView {
            stage: &self.summary.stage,
            cause: &failure.cause,
            messages: &failure.messages,
            help: failure.help.as_deref(),
        })
    }
}
