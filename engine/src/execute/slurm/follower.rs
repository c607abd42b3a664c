//! What following a job holds, hears and tells. How it begins is `begin`'s, how it goes on is `follow`'s.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use cache::Store;
use tokio::sync::mpsc::UnboundedSender;

use super::client::Client;
use super::queue::Queue;
use super::record::{JobRecord, Records};
use super::state::{Details, JobPhase};
use super::tail::Tail;
use crate::error::Failure;
use crate::execute::submission::{ClusterJob, EXIT_FILE, Left, job_lock};
use crate::execute::{Ending, JobEvent, Message, ProcessExit, Stop};

/// Follows one job.
pub(super) struct Follower {
    pub(super) stage: usize,
    pub(super) client: Arc<Client>,
    pub(super) queue: Arc<Queue>,
    pub(super) records: Records,
    pub(super) job: ClusterJob,
    pub(super) record: JobRecord,
    pub(super) store: PathBuf,
    /// The engine's own log of the stage, where the job writes another one.
    pub(super) log: Option<(Tail, PathBuf)>,
    pub(super) events: Tail,
    pub(super) messages: UnboundedSender<Message>,
    pub(super) orders: Receiver<Stop>,
    pub(super) began: Instant,
    /// How it was told to stop.
    pub(super) stop: Option<Stop>,
    /// That the cluster was told so.
    pub(super) stopped: bool,
    /// Since when it is to be ended at once.
    pub(super) kill_since: Option<Instant>,
    pub(super) last_news: Option<JobEvent>,
    pub(super) has_run: bool,
    /// Since when the stage's process is heard.
    pub(super) heard_since: Option<Instant>,
    pub(super) locks_were_looked_at: bool,
    pub(super) over_since: Option<Instant>,
    /// Set while the cluster is asked why it told the job to stop.
    pub(super) ask_again_at: Option<Instant>,
    /// The restart whose end is none, since the cluster starts it again.
    pub(super) requeued_after: Option<u32>,
}

/// How following ends.
pub(super) enum End {
    /// The job is over.
    Over(ProcessExit),
    /// The job of an earlier run was over before.
    Gone(String),
    /// The job may live: the cluster could not be told to end it. Its record stays.
    LetGo,
    /// Nobody listens any more.
    Unheard,
}

impl Follower {
    pub(super) fn lives(&self) -> bool {
        Store::look(&self.store).ok().flatten().is_some_and(|store| lives(&store, &self.record))
    }

    pub(super) fn left(&self) -> Option<Left> {
        serde_json::from_slice(&fs::read(self.record.folder.join(EXIT_FILE)).ok()?).ok()
    }

    /// Waits, and takes orders; false where nobody listens any more.
    pub(super) fn pause(&mut self, wait: Duration) -> bool {
        match self.orders.recv_timeout(wait) {
            Ok(order) => {
                self.stopped &= self.stop == Some(order);
                self.stop = Some(order);
                if order == Stop::Kill {
                    self.kill_since.get_or_insert_with(Instant::now);
                }
                true
            }
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    pub(super) fn waits(&mut self, job: Option<String>, reason: &str, meaning: &str) {
        let news = JobEvent::Waiting { reason: reason.to_owned(), meaning: meaning.to_owned() };
        if self.last_news.as_ref() != Some(&news) {
            self.last_news = Some(news.clone());
            self.tell(Message::Queued { stage: self.stage, job, news });
        }
    }

    pub(super) fn news(&mut self, id: &str, news: JobEvent) {
        if self.last_news.as_ref() != Some(&news) {
            self.last_news = Some(news.clone());
            self.tell(Message::Queued { stage: self.stage, job: Some(id.to_owned()), news });
        }
    }

    pub(super) fn tell(&self, message: Message) {
        // An engine that is ending does not listen.
        let _ = self.messages.send(message);
    }

    pub(super) fn exit_with(&self, verdict: Failure) -> ProcessExit {
        self.exit(Ending::Signal("SIGKILL".to_owned()), Some(verdict))
    }

    pub(super) fn exit(&self, ending: Ending, verdict: Option<Failure>) -> ProcessExit {
        let ran = if self.has_run { self.began.elapsed() } else { Duration::ZERO };
        ProcessExit { ending, ran, peak_memory_bytes: 0, cpu: Duration::ZERO, verdict, host: None }
    }
}

/// Whether a process holds the lock of a job: it lives then, whatever the cluster has forgotten.
pub(super) fn lives(store: &Store, record: &JobRecord) -> bool {
    matches!(store.try_lock(&job_lock(&record.key)), Ok(None))
}

/// Whether a job has come to its end, by its own word or that of the cluster.
pub(super) fn is_over(record: &JobRecord, details: Option<&Details>) -> bool {
    let ended = details.is_none_or(|details| details.seen().standing() == JobPhase::Ended);
    ended || record.folder.join(EXIT_FILE).exists()
}
