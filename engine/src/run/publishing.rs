//! Publishing: copies of results out of the store while a run goes on, each on a thread of its own, whose end the loop
//! hears. They wait until all gates are judged, and hold.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::thread;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::event::RunEvent;
use super::gates::{Gates, Verdict};
use super::scheduler::Scheduler;
use crate::error::{Cause, Failure, chain};
use crate::plan::Plan;
use crate::publish::{PublishError, Published, publish, target};

/// What is published of a run, and what waits to be.
pub(super) struct Publisher {
    gates: Gates,
    /// The entries of `publish:` by the position of their stage.
    entries: HashMap<usize, Vec<usize>>,
    /// Stages with results that wait for the gates.
    waiting: Vec<usize>,
    /// Copies that are being made.
    copies: usize,
    failed: bool,
    sender: UnboundedSender<PublishEnd>,
    ended: UnboundedReceiver<PublishEnd>,
}

/// The end of a copy out of the store.
pub(super) struct PublishEnd {
    stage: usize,
    entry: usize,
    target: PathBuf,
    result: Result<Published, PublishError>,
}

impl Publisher {
    pub(super) fn new(plan: &Plan) -> Self {
        let mut of_stage: HashMap<&str, Vec<usize>> = HashMap::new();
        for (entry, publish) in plan.publish.iter().enumerate() {
            of_stage.entry(&publish.stage).or_default().push(entry);
        }
        let stages = plan.stages.iter().enumerate();
        let entries = stages.filter_map(|(at, stage)| Some((at, of_stage.remove(stage.id.as_str())?))).collect();
        let (sender, ended) = unbounded_channel();
        Self { gates: Gates::new(plan), entries, waiting: Vec::new(), copies: 0, failed: false, sender, ended }
    }

    /// Whether copies are being made.
    pub(super) fn is_busy(&self) -> bool {
        self.copies > 0
    }

    /// Whether something cannot be published.
    pub(super) fn has_failed(&self) -> bool {
        self.failed || self.gates.refuse()
    }

    /// The next copy that comes to its end.
    pub(super) async fn hear(&mut self) -> PublishEnd {
        self.ended.recv().await.expect("this holds a sender itself")
    }

    /// A stage has its result: those that may be published now.
    fn released_by(&mut self, stage: usize) -> Vec<usize> {
        self.waiting.push(stage);
        if self.gates.are_open() { std::mem::take(&mut self.waiting) } else { Vec::new() }
    }

    /// Makes a copy on a thread of its own; `copy` gets where to.
    fn begin(
        &mut self,
        (stage, entry): (usize, usize),
        target: PathBuf,
        copy: impl FnOnce(&Path) -> Result<Published, PublishError> + Send + 'static,
    ) {
        self.copies += 1;
        let sender = self.sender.clone();
        thread::spawn(move || {
            // The loop waits for this message; without it a defect would be a run that never ends.
            let result = catch_unwind(AssertUnwindSafe(|| copy(&target))).unwrap_or(Err(PublishError::Panicked));
            let _ = sender.send(PublishEnd { stage, entry, target, result });
        });
    }
}

impl Scheduler<'_> {
    /// A stage has its result: judges the gates that waited for it and, once all hold, publishes what may be.
    pub(super) fn has_result(&mut self, stage: usize) {
        let outputs = |stage: usize| Some(&self.stages[stage]).filter(|it| it.state.has_result()).map(|it| &it.outputs);
        for (gate, verdict) in self.publisher.gates.judge(&self.plan.gates, stage, outputs) {
            let Verdict { holds, value, bound, because } = verdict;
            self.recorder.tell(RunEvent::GateJudged {
                gate: self.plan.gates[gate].to_string(),
                holds,
                value,
                bound,
                because,
            });
        }
        for stage in self.publisher.released_by(stage) {
            self.publish(stage);
        }
    }

    /// Copies what a stage's result publishes.
    fn publish(&mut self, stage: usize) {
        for entry in self.publisher.entries.get(&stage).cloned().unwrap_or_default() {
            let wanted = &self.plan.publish[entry];
            let Some(output) = self.stages[stage].outputs.get(&wanted.output).cloned() else { continue };
            let (seen, link) = (self.home.published_files(), wanted.link);
            let (store, on_changed) = (self.store.clone(), self.options.on_changed_target);
            self.recorder.publishing(&wanted.stage);
            self.publisher.begin((stage, entry), target(self.plan, wanted), move |target| {
                publish(&store, &output, (target, link), on_changed, &seen)
            });
        }
    }

    /// Hears the end of a copy.
    pub(super) fn end_publish(&mut self, end: PublishEnd) {
        self.publisher.copies -= 1;
        let PublishEnd { stage, entry, target: path, result } = end;
        let (id, output) = (self.id(stage), self.plan.publish[entry].output.clone());
        let event = match result {
            Ok(published) => RunEvent::Published { stage: id, output, path, written: published == Published::Written },
            Err(error) => {
                if self.rebuild_published(stage, &error) {
                    return;
                }
                self.publisher.failed = true;
                let (cause, messages) = (error.cause(), chain(&error));
                let help = match cause {
                    Cause::DiskFull => Some(self.home.advice_when_full(error.path().unwrap_or(&path), &messages)),
                    _ => error.help().map(str::to_owned),
                };
                let failure = Failure { cause, messages, help, object: None };
                RunEvent::PublishFailed { stage: id, output, path, failure }
            }
        };
        self.recorder.tell(event);
    }
}
