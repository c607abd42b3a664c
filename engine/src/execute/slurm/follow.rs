//! A job to its end: one thread that reads straight down. How it begins is `begin`'s.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use cache::Store;
use tokio::sync::mpsc::UnboundedSender;

use super::Slurm;
use super::begin::{Begun, prepare};
use super::client::{Client, Refusal};
use super::judge::{forgotten, verdict};
use super::queue::Queue;
use super::record::{JobRecord, Records};
use super::state::{Details, Seen, Standing};
use super::tail::Tail;
use crate::execute::submission::{ClusterJob, EVENTS_FILE, EXIT_FILE, Left, Stopped, job_lock};
use crate::execute::{Ending, Exit, JobNews, Launch, Message, StartError, Stop, Verdict};
use crate::protocol::WorkerEvent;

/// What the job itself prints: what its batch script could not do.
pub(super) const OUTPUT_FILE: &str = "output";

/// How often the files of a job are looked at.
const LOOK: Duration = Duration::from_millis(200);

/// How long the word of a job may take to reach this machine over a network file system, once Slurm says that the job is over.
const LAST_WORDS: Duration = Duration::from_secs(8);

/// Answers in a row without a job before it counts as forgotten.
const MISSING: u32 = 3;

/// How long a job is heard before its lock is looked for: network file systems remember for some seconds what was.
const LOCKS_AFTER: Duration = Duration::from_secs(10);

/// How long a job that is to be ended at once is waited for, where the controller does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A wait that is over sooner is not worth a word.
const PASSING: Duration = Duration::from_secs(3);

/// A controller that is silent for less is not worth a word.
const SILENCE: Duration = Duration::from_secs(20);

/// Follows one job.
pub(super) struct Follower {
    stage: usize,
    pub(super) client: Arc<Client>,
    queue: Arc<Queue>,
    pub(super) records: Records,
    pub(super) job: ClusterJob,
    pub(super) record: JobRecord,
    store: PathBuf,
    /// The engine's own log of the stage, where the job writes another one.
    log: Option<(Tail, PathBuf)>,
    events: Tail,
    messages: UnboundedSender<Message>,
    orders: Receiver<Stop>,
    began: Instant,
    /// How it was told to stop.
    pub(super) stop: Option<Stop>,
    /// That the cluster was told so.
    stopped: bool,
    /// Since when it is to be ended at once.
    kill_since: Option<Instant>,
    last_news: Option<JobNews>,
    has_run: bool,
    /// Since when the stage's process is heard.
    heard_since: Option<Instant>,
    locks_were_looked_at: bool,
    over_since: Option<Instant>,
    /// Set while the cluster is asked why it told the job to stop.
    ask_again_at: Option<Instant>,
    /// The restart whose end is none, since the cluster starts it again.
    requeued_after: Option<u32>,
}

/// How following ends.
pub(super) enum End {
    /// The job is over.
    Over(Exit),
    /// The job of an earlier run was over before.
    Gone(String),
    /// The job may live: the cluster could not be told to end it. Its record stays.
    LetGo,
    /// Nobody listens any more.
    Unheard,
}

impl Follower {
    /// Writes down all that a job needs, so that from now on whoever asks finds it.
    pub fn new(
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

    /// Follows the job to its end and tells it.
    pub fn run(mut self) {
        let begun = if self.job.adopt.is_some() { self.adopt() } else { self.submit() };
        let end = match begun {
            Begun::Follow(id) => {
                self.queue.watch(&id, self.job.settings.poll());
                let end = self.follow(&id);
                self.queue.forget(&id);
                end
            }
            Begun::Ended(end) => end,
        };
        self.relay();
        let stage = self.stage;
        match end {
            End::Over(exit) => {
                self.take_over_files();
                self.records.remove(&self.record.key);
                self.tell(Message::Exited { stage, exit });
            }
            End::Gone(because) => {
                self.records.remove(&self.record.key);
                self.tell(Message::Gone { stage, because });
            }
            End::LetGo => {
                let name = self.record.job.as_deref().unwrap_or(&self.record.name);
                let message =
                    format!("Slurm job {name} could not be told to stop and goes on; the next run takes it over");
                self.tell(Message::Said { stage, event: WorkerEvent::Warning { message } });
                self.tell(Message::Exited { stage, exit: self.exit(Ending::Code(1), None) });
            }
            End::Unheard => {}
        }
    }

    /// Hears a job until it is over.
    fn follow(&mut self, id: &str) -> End {
        loop {
            self.relay();
            let over = self.left().and_then(|left| self.weigh(id, left)).or_else(|| self.look(id));
            if let Some(exit) = over {
                return End::Over(exit);
            }
            if !self.pause(LOOK) {
                return End::Unheard;
            }
            if self.stop.is_some() && !self.stopped {
                self.pass_on_stop(id);
            }
            if self.kill_since.is_some_and(|since| since.elapsed() > PATIENCE) && !self.stopped {
                return End::LetGo;
            }
        }
    }

    /// What the keeper's last word comes to; `None` where the job may go on.
    fn weigh(&mut self, id: &str, left: Left) -> Option<Exit> {
        let final_word = match left.stopped {
            None | Some(Stopped::Timeout) => true,
            Some(Stopped::Signal) => self.stop.is_some(),
        };
        if final_word {
            return Some(exit_of(left));
        }
        if self.requeued_after == Some(left.restart) || self.ask_again_at.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        // Somebody else told it to stop: who, and whether it is started again, the cluster knows.
        self.ask_again_at = Some(Instant::now() + Duration::from_secs(1));
        let patience = *self.over_since.get_or_insert_with(Instant::now);
        let details = match self.client.details(id) {
            Err(_) => return None,
            Ok(details) => details.unwrap_or_default(),
        };
        match details.seen().standing() {
            Standing::Waits => {
                self.requeued_after = Some(left.restart);
                self.over_since = None;
                self.news(id, JobNews::Requeued { reason: details.reason });
                return None;
            }
            Standing::Runs if patience.elapsed() < LAST_WORDS => return None,
            Standing::Runs | Standing::Ended => {}
        }
        let because = verdict(id, &details, true, &self.record.folder.join(OUTPUT_FILE));
        Some(Exit { verdict: Some(because), ..exit_of(left) })
    }

    /// What the queue says; an end where the job is over and left no word.
    fn look(&mut self, id: &str) -> Option<Exit> {
        let sighting = self.queue.sighting(id);
        if let Some((since, words)) = &sighting.silent {
            if since.elapsed() >= SILENCE {
                self.waits(Some(id.to_owned()), "the controller does not answer", words);
            }
            return None;
        }
        if sighting.missing >= MISSING {
            return self.missing(id);
        }
        let seen = sighting.seen?;
        match seen.standing() {
            Standing::Waits => self.look_at_waiting(id, &seen),
            Standing::Runs => {
                self.has_run = true;
                self.over_since = None;
                let nodes = seen.nodes.clone();
                self.news(id, JobNews::Running { nodes });
                self.look_at_locks(&seen.nodes);
                None
            }
            Standing::Ended => self.ended(id, &seen),
        }
    }

    fn look_at_waiting(&mut self, id: &str, seen: &Seen) -> Option<Exit> {
        if let Some(verdict) = seen.never_begins(id) {
            let _ = self.client.cancel(id);
            return Some(self.exit_with(verdict));
        }
        if self.has_run {
            self.has_run = false;
            self.news(id, JobNews::Requeued { reason: seen.reason.clone() });
        }
        // Every job waits for a moment, and most for no more.
        if self.began.elapsed() >= PASSING {
            let reason = seen.reason.split(',').next().unwrap_or_default().to_owned();
            self.news(id, JobNews::Waiting { reason, meaning: seen.meaning().to_owned() });
        }
        None
    }

    /// Slurm says that the job is over: its own word may be on its way.
    fn ended(&mut self, id: &str, seen: &Seen) -> Option<Exit> {
        let since = *self.over_since.get_or_insert_with(Instant::now);
        let killed = self.stop == Some(Stop::Kill) || (self.stop.is_some() && !self.has_run);
        if since.elapsed() < LAST_WORDS && !killed {
            return None;
        }
        let details = self.client.details(id).ok().flatten();
        let details = details.unwrap_or_else(|| Details {
            state: seen.state.clone(),
            nodes: seen.nodes.clone(),
            reason: seen.reason.clone(),
            ..Details::default()
        });
        Some(self.exit_with(verdict(id, &details, false, &self.record.folder.join(OUTPUT_FILE))))
    }

    /// Slurm does not know the job any more.
    fn missing(&mut self, id: &str) -> Option<Exit> {
        let since = *self.over_since.get_or_insert_with(Instant::now);
        if since.elapsed() < LAST_WORDS || self.lives() {
            return None;
        }
        let accounted = self.client.accounted(id).filter(|seen| seen.standing() == Standing::Ended);
        let verdict = accounted.map_or_else(
            || forgotten(id),
            |seen| {
                let details =
                    Details { state: seen.state, nodes: seen.nodes, reason: seen.reason, ..Details::default() };
                verdict(id, &details, false, &self.record.folder.join(OUTPUT_FILE))
            },
        );
        Some(self.exit_with(verdict))
    }

    /// Tells the cluster to stop the job.
    fn pass_on_stop(&mut self, id: &str) {
        let told = match self.stop {
            None => return,
            Some(Stop::Ask) if self.has_begun() => self.client.ask(id),
            Some(Stop::Ask) => self.client.cancel(id),
            Some(Stop::Kill) => self.client.kill(id),
        };
        match told {
            // What it refuses for good is a job that is over.
            Ok(()) | Err(Refusal::Never(_)) => self.stopped = true,
            Err(Refusal::NotNow(words) | Refusal::NoSlurm(words)) => {
                self.waits(Some(id.to_owned()), "it cannot be told to stop", &words);
            }
        }
        self.queue.hurry();
    }

    /// Whether its keeper has spoken.
    fn has_begun(&self) -> bool {
        self.has_run || self.record.folder.join(EVENTS_FILE).exists()
    }

    pub(super) fn lives(&self) -> bool {
        Store::look(&self.store).ok().flatten().is_some_and(|store| lives(&store, &self.record))
    }

    /// Passes on what the job said since the last look.
    fn relay(&mut self) {
        for line in self.events.lines() {
            if let Ok(event) = serde_json::from_slice(&line) {
                self.heard_since.get_or_insert_with(Instant::now);
                self.tell(Message::Said { stage: self.stage, event });
            }
        }
        if let Some((tail, log)) = &mut self.log {
            let bytes = tail.bytes();
            let mut options = OpenOptions::new();
            if let (false, Ok(mut log)) = (bytes.is_empty(), options.create(true).append(true).open(log)) {
                let _ = log.write_all(&bytes);
            }
        }
    }

    /// The keeper of a job that speaks holds its lock. Where that is free here, the file system's locks end at the machine.
    fn look_at_locks(&mut self, nodes: &str) {
        let due = self.heard_since.is_some_and(|since| since.elapsed() >= LOCKS_AFTER);
        if self.locks_were_looked_at || !due {
            return;
        }
        self.locks_were_looked_at = true;
        if !self.lives() && self.left().is_none() {
            let message = format!(
                "the lock that the job holds on {nodes} is not seen here: the file system of the home does not share locks between machines, \
                 so that nothing but the record of the job keeps another run from its working state"
            );
            self.tell(Message::Said { stage: self.stage, event: WorkerEvent::Warning { message } });
        }
    }

    /// What the stage left in the folder of the run that submitted it belongs into this run's too: profiles, curves.
    fn take_over_files(&self) {
        let Some((_, log)) = &self.log else { return };
        let Some(own) = log.parent() else { return };
        for entry in fs::read_dir(&self.record.stage_folder).into_iter().flatten().flatten() {
            let (from, to) = (entry.path(), own.join(entry.file_name()));
            if from.is_file() && !to.exists() {
                // They are for people; a result is none the worse without.
                let _ = fs::copy(from, to);
            }
        }
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
        let news = JobNews::Waiting { reason: reason.to_owned(), meaning: meaning.to_owned() };
        if self.last_news.as_ref() != Some(&news) {
            self.last_news = Some(news.clone());
            self.tell(Message::Queued { stage: self.stage, job, news });
        }
    }

    pub(super) fn news(&mut self, id: &str, news: JobNews) {
        if self.last_news.as_ref() != Some(&news) {
            self.last_news = Some(news.clone());
            self.tell(Message::Queued { stage: self.stage, job: Some(id.to_owned()), news });
        }
    }

    fn tell(&self, message: Message) {
        // An engine that is ending does not listen.
        let _ = self.messages.send(message);
    }

    pub(super) fn exit_with(&self, verdict: Verdict) -> Exit {
        self.exit(Ending::Signal("SIGKILL".to_owned()), Some(verdict))
    }

    pub(super) fn exit(&self, ending: Ending, verdict: Option<Verdict>) -> Exit {
        let ran = if self.has_run { self.began.elapsed() } else { Duration::ZERO };
        Exit { ending, ran, peak_memory_bytes: 0, cpu: Duration::ZERO, verdict, host: None }
    }
}

/// Whether a process holds the lock of a job: it lives then, whatever the cluster has forgotten.
pub(super) fn lives(store: &Store, record: &JobRecord) -> bool {
    matches!(store.try_lock(&job_lock(&record.key)), Ok(None))
}

/// Whether a job has come to its end, by its own word or that of the cluster.
pub(super) fn is_over(record: &JobRecord, details: Option<&Details>) -> bool {
    let ended = details.is_none_or(|details| details.seen().standing() == Standing::Ended);
    ended || record.folder.join(EXIT_FILE).exists()
}

fn exit_of(left: Left) -> Exit {
    let Left { ending, seconds, peak_memory_bytes, cpu_seconds, verdict, host, .. } = left;
    let duration = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
    Exit { ending, ran: duration(seconds), peak_memory_bytes, cpu: duration(cpu_seconds), verdict, host: Some(host) }
}
