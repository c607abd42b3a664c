//! How following a job begins: it is submitted, or found where an earlier run submitted it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::Slurm;
use super::client::Refusal;
use super::follower::{End, Follower, is_over};
use super::judge::verdict;
use super::record::JobRecord;
use super::request::{OUTPUT_FILE, arguments, script};
use super::state::Details;
use super::tail::Tail;
use crate::error::{Cause, Failure};
use crate::execute::submission::{ClusterJob, EVENTS_FILE, SUBMISSION_FILE, Submission, write_json};
use crate::execute::{Ending, JobEvent, Launch, Message, StartError, Stop};

/// The longest wait between two tries to submit.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// How following begins.
pub(super) enum FollowStart {
    Follow(String),
    Ended(End),
}

impl Follower {
    /// Writes down all that a job needs, so that from now on whoever asks finds it.
    pub(super) fn new(
        slurm: &Slurm,
        launch: &Launch,
        messages: UnboundedSender<Message>,
        orders: Receiver<Stop>,
    ) -> Result<Self, StartError> {
        let job = *launch.cluster.clone().expect("who chooses a cluster says what it is to be told");
        let stage_folder = launch.job.parent().unwrap_or(Path::new("/")).to_owned();
        let record = match job.adopt.clone() {
            Some(record) => record,
            None => prepare(slurm, launch, &job, &stage_folder)?,
        };
        let log = (record.stage_folder != stage_folder)
            .then(|| (Tail::new(record.stage_folder.join("log")), launch.log.clone()));
        Ok(Self {
            stage: launch.stage,
            client: Arc::clone(&slurm.client),
            queue: Arc::clone(&slurm.queue),
            records: slurm.records.clone(),
            store: launch.store.clone(),
            events: Tail::new(record.folder.join(EVENTS_FILE)),
            job,
            record,
            log,
            messages,
            orders,
            began: Instant::now(),
            stop: None,
            stopped: false,
            kill_since: None,
            last_news: None,
            has_run: false,
            heard_since: None,
            locks_were_looked_at: false,
            over_since: None,
            ask_again_at: None,
            requeued_after: None,
        })
    }

    /// Submits the job, as often as it takes.
    pub(super) fn submit(&mut self) -> FollowStart {
        let folder = self.record.folder.clone();
        let arguments = arguments(&self.job, &folder);
        let mut wait = Duration::from_secs(1);
        loop {
            match self.client.submit(&arguments, &folder.join("script")) {
                Ok(id) => return self.submitted(id),
                Err(Refusal::Never(words)) => {
                    return FollowStart::Ended(End::Over(self.exit_with(self.refused(words))));
                }
                Err(Refusal::NoSlurm(words)) => return FollowStart::Ended(End::Over(self.exit_with(no_slurm(words)))),
                Err(Refusal::NotNow(words)) => self.waits(None, "not submitted yet", &words),
            }
            if !self.pause(wait) {
                return FollowStart::Ended(End::Unheard);
            }
            // The answer may have been lost, and not the request.
            if let Ok(Some(id)) = self.client.named(&self.record.name).map(|mut ids| ids.pop()) {
                return self.submitted(id);
            }
            if self.stop.is_some() {
                return FollowStart::Ended(End::Over(self.exit(Ending::Code(1), None)));
            }
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    fn submitted(&mut self, id: String) -> FollowStart {
        self.record.job = Some(id.clone());
        // Without it the job is found by its name.
        let _ = self.records.write(&self.record);
        self.news(&id, JobEvent::Submitted);
        FollowStart::Follow(id)
    }

    /// Finds the job of an earlier run.
    pub(super) fn adopt(&mut self) -> FollowStart {
        loop {
            let found = match self.record.job.clone() {
                Some(id) => Ok(Some(id)),
                None => self.client.named(&self.record.name).map(|mut ids| ids.pop()),
            };
            let found = found.and_then(|id| match id {
                Some(id) => self.client.details(&id).map(|details| Some((id, details))),
                None => Ok(None),
            });
            match found {
                Ok(Some((id, details))) => return self.adopted(id, details),
                Ok(None) => {
                    return FollowStart::Ended(End::Gone("the job of an earlier run was never submitted".to_owned()));
                }
                Err(refusal) => self.waits(self.record.job.clone(), "of an earlier run", &refusal.words()),
            }
            if !self.pause(Duration::from_secs(2)) {
                return FollowStart::Ended(End::Unheard);
            }
            if self.stop.is_some() {
                return FollowStart::Ended(End::LetGo);
            }
        }
    }

    fn adopted(&mut self, id: String, details: Option<Details>) -> FollowStart {
        if is_over(&self.record, details.as_ref()) && !self.lives() {
            let left = self.left().and_then(|left| left.verdict).map(|verdict| verdict.messages.join(": "));
            let why = left.or_else(|| {
                let verdict = verdict(&id, &details?, false, &self.record.folder.join(OUTPUT_FILE));
                Some(verdict.messages.join(": "))
            });
            let why = why.map(|why| format!(": {why}")).unwrap_or_default();
            let because = format!("Slurm job {id} of run {} ended without a result{why}", self.record.run);
            return FollowStart::Ended(End::Gone(because));
        }
        self.news(&id, JobEvent::Adopted);
        FollowStart::Follow(id)
    }

    /// The cluster takes no such job.
    fn refused(&self, words: String) -> Failure {
        let mut help = "look at `executor.slurm` and the stage's `resources`".to_owned();
        if words.contains("partition") {
            let partitions = self.client.partitions();
            if !partitions.is_empty() {
                help = format!("set `executor.slurm.partition`: this cluster has {}", partitions.join(", "));
            }
        }
        let messages = vec!["Slurm does not take the job".to_owned(), words];
        Failure::new(Cause::BadParameters, messages).with_help(help)
    }
}

fn no_slurm(words: String) -> Failure {
    Failure::new(Cause::Machine, vec![words]).with_help("run it where `sbatch` is, or here with `--executor local`")
}

/// Makes the folder of a submission and the record that leads to it.
fn prepare(slurm: &Slurm, launch: &Launch, job: &ClusterJob, stage_folder: &Path) -> Result<JobRecord, StartError> {
    let folder = stage_folder.join(format!("slurm-{}", job.submission));
    fs::create_dir_all(&folder).map_err(failed("create folder", &folder))?;
    let submission = Submission {
        run: job.run.clone(),
        key: job.key,
        working: job.working,
        result: job.result.clone(),
        again: job.again,
        threads_of_cluster: job.threads.is_none(),
        log: launch.log.clone(),
        timeout_seconds: job.timeout.map(|timeout| timeout.as_secs_f64()),
        grace_seconds: job.grace.as_secs_f64(),
    };
    let path = folder.join(SUBMISSION_FILE);
    write_json(&path, &submission).map_err(failed("write", &path))?;
    let path = folder.join("script");
    fs::write(&path, script(&slurm.program, &folder, job)).map_err(failed("write", &path))?;
    let record = JobRecord {
        key: job.key,
        working: job.working,
        name: job.name.clone(),
        job: None,
        stage_folder: stage_folder.to_owned(),
        folder,
        run: job.run.clone(),
    };
    slurm.records.write(&record).map_err(failed("write the record of a job in", &launch.store))?;
    Ok(record)
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StartError {
    move |source| StartError { action, path: path.to_owned(), source }
}
