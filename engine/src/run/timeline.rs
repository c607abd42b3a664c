//! The trace of a run: when each stage's process ran and what was copied, and within it what the stages recorded
//! themselves.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use profile::{Process, TraceEvent, TraceWriter, trace_lines};

use super::event::RunEvent;
use crate::execute::JobEvent;
use crate::history::{TRACE_FILE, stage_folder};
use crate::plan::Plan;
use crate::protocol::ProfileRequest;

/// The run loop's own number among the processes of the trace; the stages follow in the order of the plan.
const RUN: u32 = 1;

/// When the stages of a run began and ended.
pub(super) struct Timeline {
    began: Instant,
    origin_unix_micros: u64,
    /// The row of each stage in the run's part of the trace.
    rows: BTreeMap<String, u32>,
    open: BTreeMap<(String, &'static str), f64>,
    events: Vec<TraceEvent>,
}

impl Timeline {
    /// Begins one.
    pub(super) fn new(plan: &Plan) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let rows = plan.stages.iter().zip(1..).map(|(stage, row)| (stage.id.clone(), row)).collect();
        Self {
            began: Instant::now(),
            origin_unix_micros: unix.as_micros() as u64,
            rows,
            open: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// What a stage's process has to know to fit in.
    pub(super) fn request(&self, stage: &str) -> ProfileRequest {
        ProfileRequest { origin_unix_micros: self.origin_unix_micros, process: RUN + self.rows[stage] }
    }

    /// Takes in what happened.
    pub(super) fn hear(&mut self, event: &RunEvent) {
        match event {
            RunEvent::StageWaiting { stage, .. } => self.begin(stage, "wait"),
            RunEvent::StageStarted { stage, .. } => {
                self.end(stage, "wait");
                self.begin(stage, "process");
            }
            RunEvent::ResultFetching { stage, .. } => self.begin(stage, "fetch"),
            RunEvent::ResultFetched { stage, .. } | RunEvent::ResultRefused { stage, .. } => self.end(stage, "fetch"),
            RunEvent::StageJob { stage, news: JobEvent::Running { .. }, .. } => self.end(stage, "wait"),
            RunEvent::StageDone { stage, .. }
            | RunEvent::StageFailed { stage, .. }
            | RunEvent::StageSkipped { stage, .. }
            | RunEvent::StageCached { stage, .. } => {
                self.end(stage, "wait");
                self.end(stage, "process");
            }
            RunEvent::Published { stage, .. } | RunEvent::PublishFailed { stage, .. } => self.end(stage, "publish"),
            RunEvent::RunStarted { .. }
            | RunEvent::GateJudged { .. }
            | RunEvent::Pinning { .. }
            | RunEvent::Checked { .. }
            | RunEvent::StageJob { .. }
            | RunEvent::Worker { .. }
            | RunEvent::StageRebuilding { .. }
            | RunEvent::ResultSent { .. }
            | RunEvent::ResultNotSent { .. }
            | RunEvent::RemoteFailed { .. }
            | RunEvent::RunFinished { .. } => {}
        }
    }

    /// A span of a stage begins. One that goes on already goes on.
    pub(super) fn begin(&mut self, stage: &str, what: &'static str) {
        let now = self.now();
        self.open.entry((stage.to_owned(), what)).or_insert(now);
    }

    fn end(&mut self, stage: &str, what: &'static str) {
        let Some(began) = self.open.remove(&(stage.to_owned(), what)) else { return };
        let span = TraceEvent::span(RUN, self.rows[stage], "run", what, began, self.now() - began);
        self.events.push(span);
    }

    fn now(&self) -> f64 {
        self.began.elapsed().as_nanos() as f64 / 1e3
    }

    /// Writes the trace of the whole run into its folder, and removes those of the stages, which are in it.
    pub(super) fn write(&self, name: &str, folder: &Path) -> io::Result<()> {
        let mut writer = TraceWriter::new(BufWriter::new(File::create(folder.join(TRACE_FILE))?))?;
        let named = self.rows.iter().flat_map(|(stage, row)| TraceEvent::thread_name(RUN, *row, stage));
        let run = Process { number: RUN, name: format!("run of {name}") };
        let own = TraceEvent::process_name(&run).into_iter().chain(named).chain(self.events.iter().cloned());
        for event in own {
            writer.line(&event.line())?;
        }
        let of_stages: Vec<_> =
            self.rows.keys().map(|stage| folder.join(stage_folder(stage)).join(TRACE_FILE)).collect();
        for path in of_stages.iter().filter(|path| path.exists()) {
            for line in trace_lines(&fs::read_to_string(path)?) {
                writer.line(line)?;
            }
        }
        writer.finish()?;
        of_stages.iter().filter(|path| path.exists()).try_for_each(fs::remove_file)
    }
}
