//! The keeper of a cluster's job: what `pipeline __job FOLDER` does on the node.
//!
//! For the stage's process it is what the engine is on a single machine: it takes the locks and the private folder,
//! starts the process by the local executor, and is its parent. What it hears it writes into files, which an engine
//! reads that may come and go. It knows no plan and no cluster: only that SIGTERM means to stop.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cache::{Lock, OutputRecord, ResultRecord, Staging, Store};
use devices::CpuList;
use serde_json::{Map, Value};
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{interval, sleep, sleep_until};

use super::crash::{Evidence, crash};
use super::executor::{Ending, Executor, Launch, Message, Process, ProcessExit, Stop};
use super::local::Local;
use super::submission::{
    EVENTS_FILE, EXIT_FILE, JOB_FILE, Left, SUBMISSION_FILE, Stopped, Submission, job_lock, write_json,
};
use crate::error::{Cause, Failure};
use crate::history::circumstances;
use crate::limits;
use crate::memory::Memory;
use crate::protocol::{Job, WorkerEvent};

/// The argument that makes this program a keeper; the folder of the submission follows it.
pub const KEEPER_ARGUMENT: &str = "__job";

/// How often a lock that another holds is tried.
const LOCK_POLL: Duration = Duration::from_millis(500);

/// A lock that is held for longer is worth a word.
const SOON: Duration = Duration::from_secs(5);

/// How often what was said is flushed, so that other machines see it.
const FLUSH: Duration = Duration::from_secs(1);

/// Runs the job of a submission and leaves how it ended.
pub fn main(folder: &Path) -> ExitCode {
    let ended = Keeper::open(folder).and_then(|keeper| {
        let runtime = limits::event_loop(&mut Builder::new_current_thread())?;
        let left = runtime.block_on(keeper.keep())?;
        write_json(&folder.join(EXIT_FILE), &left)?;
        Ok(left)
    });
    match ended {
        Ok(Left { ending: Ending::Code(code), .. }) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            // The folder takes no word, so that this is all that is left: it goes to the job's own output.
            eprintln!("cannot keep the job of `{}`: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}

struct Keeper {
    folder: PathBuf,
    submission: Submission,
    job: Job,
    events: File,
    began: Instant,
}

/// What the stage's process said and how it ended.
struct ProcessReport {
    exit: ProcessExit,
    finished: Option<(BTreeMap<String, OutputRecord>, Map<String, Value>)>,
    failed: bool,
    stopped: Option<Stopped>,
}

impl Keeper {
    fn open(folder: &Path) -> io::Result<Self> {
        let read = |path: &Path| fs::read(path).map_err(|error| named(path, &error));
        let submission = serde_json::from_slice(&read(&folder.join(SUBMISSION_FILE))?)?;
        let stage_folder = folder.parent().unwrap_or(folder);
        let job = serde_json::from_slice(&read(&stage_folder.join(JOB_FILE))?)?;
        // What a job left that was put back into the queue.
        match fs::remove_file(folder.join(EXIT_FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let events = OpenOptions::new().create(true).append(true).open(folder.join(EVENTS_FILE))?;
        Ok(Self { folder: folder.to_owned(), submission, job, events, began: Instant::now() })
    }

    async fn keep(mut self) -> io::Result<Left> {
        let mut terminate = signal(SignalKind::terminate())?;
        let store = match Store::open(&self.job.store) {
            Ok(store) => store,
            Err(error) => return Ok(self.left_early(machine("the store cannot be opened on this node", &error), None)),
        };
        let locks = match self.lock(&store, &mut terminate).await {
            Ok(locks) => locks,
            Err(left) => return Ok(*left),
        };
        if let Some(record) = self.result(&store) {
            let outputs = record.outputs;
            self.write(&WorkerEvent::Finished { outputs, how: record.how })?;
            return Ok(self.left(&self.exit(Ending::Code(0)), None));
        }
        let staging = match store.staging() {
            Ok(staging) => staging,
            Err(error) => return Ok(self.left_early(machine("no private folder can be made", &error), None)),
        };
        let kills = Memory::default().kills();
        let log_from = fs::metadata(&self.submission.log).map_or(0, |log| log.len());
        let (process, messages) = self.start(&store, &locks, &staging)?;
        let mut heard = self.hear(process.as_ref(), messages, &mut terminate).await?;
        heard.exit.verdict = match (&heard.exit.ending, heard.stopped) {
            _ if heard.is_success() => None,
            (_, Some(Stopped::Timeout)) => Some(self.timed_out()),
            (_, None) if !heard.failed => {
                let memory = Memory::default();
                let evidence = Evidence { memory: &memory, kills, log: &self.submission.log, log_from };
                Some(crash(&heard.exit, &evidence))
            }
            _ => None,
        };
        self.record(&store, &heard);
        Ok(self.left(&heard.exit, heard.stopped))
    }

    /// Takes the locks that say that this job lives and that its working state is its own.
    async fn lock(&mut self, store: &Store, terminate: &mut Signal) -> Result<Vec<Lock>, Box<Left>> {
        let names = [job_lock(&self.submission.key), format!("working-{}", self.submission.working)];
        let mut told = false;
        loop {
            let mut locks = Vec::new();
            for name in &names {
                match store.try_lock(name) {
                    Ok(lock) => locks.extend(lock),
                    Err(error) => {
                        let verdict = machine("the file system of the home gives no locks on this node", &error);
                        return Err(Box::new(self.left_early(verdict, None)));
                    }
                }
            }
            if locks.len() == names.len() {
                return Ok(locks);
            }
            drop(locks);
            if !told && self.began.elapsed() > SOON {
                told = true;
                let message = "another process works on the same state: this job waits for it to end".to_owned();
                let _ = self.write(&WorkerEvent::Warning { message });
            }
            tokio::select! {
                () = sleep(LOCK_POLL) => {}
                _ = terminate.recv() => {
                    let left = self.left(&self.exit(Ending::Code(1)), Some(Stopped::Signal));
                    return Err(Box::new(left));
                }
            }
        }
    }

    /// The result, where somebody has made it while the job waited.
    fn result(&self, store: &Store) -> Option<ResultRecord> {
        if self.submission.again { None } else { store.take(&self.submission.key).ok().flatten() }
    }

    fn start(
        &mut self,
        store: &Store,
        locks: &[Lock],
        staging: &Staging,
    ) -> io::Result<(Box<dyn Process>, UnboundedReceiver<Message>)> {
        self.job.staging = staging.path().to_owned();
        self.job.inputs_folder = staging.path().join("inputs");
        let cores = number("SLURM_CPUS_ON_NODE").filter(|_| self.submission.threads_of_cluster);
        self.job.threads = cores.unwrap_or(self.job.threads);
        let path = self.folder.join(JOB_FILE);
        fs::write(&path, serde_json::to_vec_pretty(&self.job)?)?;
        let launch = Launch {
            env: Vec::new(),
            cores: CpuList::default(),
            stage: 0,
            job: path,
            log: self.submission.log.clone(),
            store: self.job.store.clone(),
            inherit: locks.iter().map(AsRawFd::as_raw_fd).chain(store.descriptors(staging)).collect(),
            cluster: None,
        };
        let (sender, messages) = unbounded_channel();
        // The executor's end of the death pipe lives as long as this process.
        let local: &'static Local = Box::leak(Box::new(Local::new()?));
        let process = local.start(&launch, sender).map_err(io::Error::other)?;
        Ok((process, messages))
    }

    /// Writes down what the process says until it is over.
    async fn hear(
        &mut self,
        process: &dyn Process,
        mut messages: UnboundedReceiver<Message>,
        terminate: &mut Signal,
    ) -> io::Result<ProcessReport> {
        let (mut finished, mut failed, mut stopped) = (None, false, None);
        let mut over_at =
            self.submission.timeout_seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
        let mut flush = interval(FLUSH);
        let mut unflushed = false;
        loop {
            let alarm = over_at.unwrap_or_else(Instant::now).into();
            tokio::select! {
                message = messages.recv() => match message {
                    Some(Message::Said { event, .. }) => {
                        self.write(&event)?;
                        unflushed = true;
                        match event {
                            WorkerEvent::Finished { outputs, how } => finished = Some((outputs, how)),
                            WorkerEvent::Failed(_) => failed = true,
                            _ => {}
                        }
                    }
                    Some(Message::Exited { exit, .. }) => return Ok(ProcessReport { exit, finished, failed, stopped }),
                    Some(Message::Queued { .. } | Message::Gone { .. }) => {}
                    None => return Err(io::Error::other("the executor fell silent")),
                },
                _ = terminate.recv() => {
                    stopped.get_or_insert(Stopped::Signal);
                    process.stop(Stop::Ask);
                }
                () = sleep_until(alarm), if over_at.is_some() => {
                    let second = stopped.replace(Stopped::Timeout) == Some(Stopped::Timeout);
                    process.stop(if second { Stop::Kill } else { Stop::Ask });
                    over_at = (!second).then(|| Instant::now() + Duration::from_secs_f64(self.submission.grace_seconds));
                }
                _ = flush.tick(), if unflushed => {
                    self.events.sync_data()?;
                    unflushed = false;
                }
            }
        }
    }

    /// Records the result, so that it is there also where no engine comes back.
    fn record(&self, store: &Store, heard: &ProcessReport) {
        let (Some((outputs, how)), Some(of)) = (&heard.finished, &self.submission.result) else { return };
        if !heard.is_success() {
            return;
        }
        let mut how = how.clone();
        how.extend(circumstances(&self.submission.run, &host(), &heard.exit));
        let outputs = outputs.clone();
        let record = ResultRecord::new(of.document.clone(), of.kind.clone(), outputs, how);
        // An engine that follows records it too, and says so where that fails.
        let _ = store.record(&self.submission.key, &record);
    }

    fn write(&mut self, event: &WorkerEvent) -> io::Result<()> {
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        self.events.write_all(&line)
    }

    fn timed_out(&self) -> Failure {
        let limit = Duration::from_secs_f64(self.submission.timeout_seconds.unwrap_or_default());
        Failure::timeout(limit)
    }

    fn left_early(&self, verdict: Failure, stopped: Option<Stopped>) -> Left {
        self.left(&ProcessExit { verdict: Some(verdict), ..self.exit(Ending::Code(1)) }, stopped)
    }

    fn exit(&self, ending: Ending) -> ProcessExit {
        let ran = self.began.elapsed();
        ProcessExit { ending, ran, peak_memory_bytes: 0, cpu: Duration::ZERO, verdict: None, host: None }
    }

    fn left(&self, exit: &ProcessExit, stopped: Option<Stopped>) -> Left {
        Left {
            job: env::var("SLURM_JOB_ID").unwrap_or_default(),
            host: host(),
            restart: number("SLURM_RESTART_COUNT").unwrap_or_default(),
            ending: exit.ending.clone(),
            seconds: exit.ran.as_secs_f64(),
            peak_memory_bytes: exit.peak_memory_bytes,
            cpu_seconds: exit.cpu.as_secs_f64(),
            stopped: stopped.filter(|_| exit.ending != Ending::Code(0)),
            verdict: exit.verdict.clone(),
        }
    }
}

impl ProcessReport {
    fn is_success(&self) -> bool {
        self.finished.is_some() && self.exit.ending == Ending::Code(0)
    }
}

fn host() -> String {
    crate::history::Host::this().name
}

fn number<T: std::str::FromStr>(variable: &str) -> Option<T> {
    env::var(variable).ok()?.parse().ok()
}

fn machine(message: &str, error: &dyn std::error::Error) -> Failure {
    let causes = std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string);
    let messages = std::iter::once(message.to_owned()).chain(causes).collect();
    let help = "the home must be on a file system that the nodes share, with working locks (flock)";
    Failure::new(Cause::Machine, messages).with_help(help)
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
}
