//! Runs as their folders tell them.

use std::fs;
use std::path::{Path, PathBuf};

use cache::Digest;
use serde::Serialize;

use super::folder::{RunPlan, TimedEvent, is_alive, read_events};
use crate::run::event::{Conclusion, Counts, RunEvent};

/// A run, in a line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunSummary {
    /// Its id.
    pub run: String,
    /// The pipeline's name.
    pub pipeline: String,
    /// The pipeline file.
    pub file: PathBuf,
    /// When it began, in UTC.
    pub started: String,
    /// How it stands.
    pub state: RunState,
    /// How long it took, once it ended.
    pub seconds: Option<f64>,
    /// How many stages ended in which way.
    pub counts: Counts,
}

/// How a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// Its engine is at work.
    Running,
    /// Its engine was killed, or lost power.
    CutOff,
    /// Every stage has its result.
    Succeeded,
    /// A stage failed.
    Failed,
    /// The user stopped it.
    Interrupted,
}

/// A stage of a run, in a line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageSummary {
    /// Its id.
    pub stage: String,
    /// Its kind.
    pub kind: String,
    /// `done`, `cached`, `failed`, `skipped`, `started` or `waiting`.
    pub status: String,
    /// The key of its result.
    pub key: Option<Digest>,
    /// How long its process ran.
    pub seconds: Option<f64>,
    /// The most memory that its process held at once.
    pub peak_memory_bytes: Option<u64>,
}

/// What a stage cost when its process last came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LastRun {
    /// How long its process ran.
    pub seconds: f64,
    /// The most memory that its process held at once.
    pub peak_memory_bytes: Option<u64>,
}

/// A run as its folder tells it.
pub(super) struct Recorded {
    pub summary: RunSummary,
    pub stages: Vec<StageSummary>,
}

/// Reads a run's folder; `None` where it has no readable plan.
pub(super) fn read_run(folder: &Path) -> Option<Recorded> {
    let plan: RunPlan = serde_json::from_slice(&fs::read(folder.join("run.json")).ok()?).ok()?;
    let stages = plan.stages.into_iter().map(|stage| StageSummary {
        stage: stage.id,
        kind: stage.kind,
        status: "waiting".to_owned(),
        key: None,
        seconds: None,
        peak_memory_bytes: None,
    });
    let mut recorded = Recorded {
        summary: RunSummary {
            run: plan.run,
            pipeline: plan.pipeline,
            file: plan.file,
            started: plan.started,
            // Looked at before the events: a run that ends in between has its end among them.
            state: if is_alive(folder) { RunState::Running } else { RunState::CutOff },
            seconds: None,
            counts: Counts::default(),
        },
        stages: stages.collect(),
    };
    for TimedEvent { event, .. } in read_events(folder).ok()? {
        recorded.apply(event);
    }
    Some(recorded)
}

impl Recorded {
    fn apply(&mut self, event: RunEvent) {
        match event {
            RunEvent::StageCached { stage, key } => self.stage(&stage, "cached", |summary| summary.key = Some(key)),
            RunEvent::StageStarted { stage, .. } => self.stage(&stage, "started", |_| {}),
            RunEvent::StageDone { stage, key, seconds, peak_memory_bytes, .. } => {
                self.stage(&stage, "done", |summary| {
                    summary.key = Some(key);
                    summary.seconds = Some(seconds);
                    summary.peak_memory_bytes = Some(peak_memory_bytes);
                })
            }
            RunEvent::StageFailed { stage, seconds, .. } => {
                self.stage(&stage, "failed", |summary| summary.seconds = Some(seconds));
            }
            RunEvent::StageSkipped { stage, .. } => self.stage(&stage, "skipped", |_| {}),
            RunEvent::RunFinished { conclusion, counts, seconds } => {
                self.summary.state = match conclusion {
                    Conclusion::Succeeded => RunState::Succeeded,
                    Conclusion::Failed => RunState::Failed,
                    Conclusion::Interrupted => RunState::Interrupted,
                };
                self.summary.counts = counts;
                self.summary.seconds = Some(seconds);
            }
            RunEvent::RunStarted { .. }
            | RunEvent::StageWaiting { .. }
            | RunEvent::Worker { .. }
            | RunEvent::StageHealing { .. }
            | RunEvent::Published { .. }
            | RunEvent::PublishFailed { .. } => {}
        }
    }

    fn stage(&mut self, id: &str, status: &str, change: impl FnOnce(&mut StageSummary)) {
        if let Some(summary) = self.stages.iter_mut().find(|summary| summary.stage == id) {
            status.clone_into(&mut summary.status);
            change(summary);
        }
    }
}
