//! What the loop knows of clusters: what the job of a stage is to ask for, and what is heard of it.

use std::time::{Duration, Instant};

use cache::Digest;
use devices::DeviceKind;

use super::event::{RunEvent, WaitsFor};
use super::scheduler::Scheduler;
use crate::device::{DeviceGrant, processor};
use crate::error::{Cause, StageError};
use crate::execute::JobEvent;
use crate::execute::slurm::gres_devices;
use crate::execute::slurm::record::JobRecord;
use crate::execute::submission::{ClusterJob, ResultOf};
use crate::executor::SlurmSettings;
use crate::plan::{DeviceCount, PlannedStage};
use crate::protocol::WorkerEvent;
use crate::stage::Threads;

/// How often the cluster is asked about a job that nobody follows.
const ASK_EVERY: Duration = Duration::from_secs(5);

impl Scheduler<'_> {
    /// The threads that the job of a stage asks for; `None` leaves it to the cluster.
    pub(super) fn threads_of_job(&self, stage: usize) -> Option<usize> {
        let planned = &self.plan.stages[stage];
        let own = planned.executor.slurm.cpus_per_task.or(planned.resources.threads);
        let of_kind = matches!(planned.bound.threads(), Threads::One).then_some(1);
        own.or(self.plan.executor.slurm.cpus_per_task).or(of_kind)
    }

    /// What a stage's job has to compute on.
    pub(super) fn devices_of_job(&self, stage: usize) -> Result<DeviceGrant, StageError> {
        let (_, settings) = self.plan.executor_of(stage, self.options.executor);
        let planned = &self.plan.stages[stage];
        let nodes = nodes(planned, &settings) as usize;
        let asked = devices_asked(planned)?;
        let granted = asked.or_else(|| gres_devices(settings.gres.as_deref()?, &planned.bound.devices()));
        Ok(match granted {
            Some((kind, count)) => DeviceGrant { kind, count: count as usize, indices: Vec::new(), nodes },
            None => DeviceGrant { nodes, ..processor(planned) },
        })
    }

    /// What the cluster is told of a stage whose key is known.
    pub(super) fn cluster_job(&self, stage: usize, adopt: Option<JobRecord>) -> Result<ClusterJob, StageError> {
        let planned = &self.plan.stages[stage];
        let run = &self.stages[stage];
        let (key, document) = run.keyed();
        let (_, settings) = self.plan.executor_of(stage, self.options.executor);
        let id = self.recorder.run();
        let submission = run.submissions;
        let file = &self.plan.executor.slurm;
        let own = &planned.executor.slurm;
        let devices = devices_asked(planned)?;
        // Of a stage that computes on devices `resources.memory` is theirs.
        let of_resources = planned.resources.memory.filter(|_| devices.is_none());
        let memory = own.mem.map(|mem| mem.0).or(of_resources).or(file.mem.map(|mem| mem.0));
        Ok(ClusterJob {
            submission,
            run: id.clone(),
            result: Some(ResultOf { document: document.clone(), kind: planned.kind.to_owned() }),
            again: run.again,
            threads: self.threads_of_job(stage),
            memory,
            devices,
            nodes: nodes(planned, &settings),
            timeout: planned.timeout,
            grace: self.options.grace,
            settings,
            adopt,
            ..ClusterJob::new(job_name(&id, &planned.id, submission), *key, document.working_key())
        })
    }

    /// The job that makes a result already, and whether one works on the same state.
    pub(super) fn job_of(&self, key: &Digest, working: &Digest) -> JobOf {
        match self.executors.records.find(key) {
            Some(record) => JobOf::Makes(Box::new(record)),
            None => match self.executors.records.with_working(working, key) {
                Some(other) if !self.is_left_over(&other) => JobOf::SharesState,
                Some(_) | None => JobOf::None,
            },
        }
    }

    /// Whether the record of another result's job speaks of one that ended while nobody looked; it is removed then.
    fn is_left_over(&self, record: &JobRecord) -> bool {
        let Some(slurm) = &self.executors.slurm else { return false };
        // Asking takes a moment, in which the loop hears nobody.
        let asked = self.executors.asked_at.replace(Some(Instant::now()));
        if asked.is_some_and(|asked| asked.elapsed() < ASK_EVERY) {
            self.executors.asked_at.set(asked);
            return false;
        }
        // Whoever holds this lock follows that job, or is about to submit another.
        let Ok(Some(_lock)) = self.store.try_lock(&format!("result-{}", record.key)) else { return false };
        let is_over = slurm.is_over(record, self.store);
        if is_over {
            self.executors.records.remove(&record.key);
        }
        is_over
    }

    /// How a stage's job stands.
    pub(super) fn hear_job(&mut self, stage: usize, job: Option<String>, news: JobEvent) {
        let id = self.id(stage);
        let event = match news {
            JobEvent::Waiting { reason, meaning } => {
                RunEvent::StageWaiting { stage: id, waits_for: WaitsFor::Queue { job, reason, meaning } }
            }
            news => RunEvent::StageJob { stage: id, job, news },
        };
        self.recorder.tell(event);
    }

    /// The job of an earlier run gave no result after all: the stage begins as if there had been none.
    pub(super) fn hear_gone(&mut self, stage: usize, because: String) {
        self.admission.release(stage);
        if self.stages.end_process(stage).is_some() {
            self.stages.put_back(stage);
            let said = WorkerEvent::Warning { message: because };
            self.recorder.tell(RunEvent::Worker { stage: self.id(stage), said });
        }
    }
}

/// What is known of jobs beside a key.
pub(super) enum JobOf {
    None,
    Makes(Box<JobRecord>),
    /// One makes another result of the same working state.
    SharesState,
}

fn nodes(planned: &PlannedStage, settings: &SlurmSettings) -> u32 {
    let of_resources = Some(planned.resources.nodes).filter(|nodes| *nodes > 1);
    planned.executor.slurm.nodes.or(of_resources).or(settings.nodes).unwrap_or(1)
}

/// The devices that a stage names; `None` where it leaves them to the machine.
fn devices_asked(planned: &PlannedStage) -> Result<Option<(DeviceKind, u32)>, StageError> {
    let kind = planned.resources.device.filter(|kind| *kind != DeviceKind::Cpu);
    let Some(kind) = kind else { return Ok(None) };
    match planned.resources.count {
        DeviceCount::Exactly(count) => Ok(Some((kind, count))),
        DeviceCount::All => {
            let message = format!("stage `{}` requests all devices, and a cluster wants a number", planned.id);
            Err(StageError::new(Cause::BadParameters, message)
                .with_help(format!("say how many: `{}.resources.count=8`", planned.declared)))
        }
    }
}

/// The name of a job: letters that no shell and no list of Slurm's splits.
fn job_name(run: &str, stage: &str, submission: u32) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || "._-=".contains(letter) { letter } else { '.' };
    let stage: String = stage.chars().map(plain).collect();
    let again = if submission > 1 { format!("-{submission}") } else { String::new() };
    format!("pipeline-{run}-{stage}{again}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jobs_name_is_one_word() {
        assert_eq!(
            job_name("20260301-090507-042", "adapter[lora.rank=4,x=a b]", 1),
            "pipeline-20260301-090507-042-adapter.lora.rank=4.x=a.b."
        );
        assert_eq!(job_name("r", "data/rows", 2), "pipeline-r-data.rows-2");
    }
}
