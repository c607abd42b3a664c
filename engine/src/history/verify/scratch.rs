//! A store of its own to do stages again in; it is on the home's file system and goes when the check ends, or with
//! the next sweep of the store where the check was killed.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use cache::{Digest, OutputRecord, Staging, Store, StoreError, Verify};
use devices::CpuList;
use serde_json::{Map, Value};
use tokio::sync::mpsc::unbounded_channel;

use crate::context::stored;
use crate::error::{Cause, OrFail, StageError};
use crate::execute::{Ending, Executor, Launch, Local, Message};
use crate::protocol::{Job, WorkerEvent};

/// A store, and a way to run stages in it.
pub(super) struct Scratch {
    folder: Staging,
    store: Store,
    executor: Local,
    jobs: usize,
}

/// Why a stored folder could not be taken over.
pub(super) enum NotTaken {
    /// It is not there.
    Missing,
    /// A file of it is not what it was.
    Damaged(String),
    /// A file of it that was left outside the store is not what it was.
    Outside(String),
    /// The disk refused.
    Refused(StageError),
}

/// What a stage made.
pub(super) struct Made {
    pub outputs: BTreeMap<String, OutputRecord>,
    /// How it came about.
    pub how: Map<String, Value>,
    pub seconds: f64,
}

/// What a stage made, or why it failed.
type Ended = Result<Made, Vec<String>>;

impl Scratch {
    /// An empty store within the private part of another.
    pub(super) fn new(beside: &Store) -> Result<Self, StageError> {
        let folder = beside.staging().map_err(stored)?;
        let store = Store::open(folder.path().join("store")).map_err(stored)?;
        let executor = Local::new().or_fail(Cause::Machine, || "cannot open a pipe".to_owned())?;
        Ok(Self { folder, store, executor, jobs: 0 })
    }

    /// The store, which has what the stages made.
    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Takes a folder over from the real store, each file compared with its digest. One that a stage has made here
    /// again already need not be there any more.
    pub(super) fn take_in(&self, from: &Store, tree: &Digest) -> Result<(), NotTaken> {
        if self.store.complete(tree) {
            return Ok(());
        }
        let list = match from.tree(tree) {
            Ok(list) => list,
            Err(StoreError::MissingTree { .. }) => return Err(NotTaken::Missing),
            Err(error @ StoreError::CorruptTree { .. }) => return Err(NotTaken::Damaged(error.to_string())),
            Err(error) => return Err(NotTaken::Refused(stored(error))),
        };
        for file in list.files() {
            match from.check(file, Verify::Contents) {
                Ok(()) => {}
                Err(StoreError::MissingObject { .. }) => return Err(NotTaken::Missing),
                Err(error @ StoreError::Outside { .. }) => return Err(NotTaken::Outside(error.to_string())),
                Err(_) => {
                    let (path, short) = (&file.path, file.digest.short());
                    return Err(NotTaken::Damaged(format!("`{path}` (object {short}) is damaged in the store")));
                }
            }
        }
        self.store.take_tree(from, &list).map_err(|error| NotTaken::Refused(stored(error)))
    }

    /// Runs a job in this store.
    pub(super) fn execute(&mut self, job: &Job, threads: Option<usize>) -> Result<Ended, StageError> {
        self.jobs += 1;
        let staging = self.store.staging().map_err(stored)?;
        let own = self.own_folder()?;
        let job = Job {
            store: self.store.root().to_owned(),
            inputs_folder: staging.path().join("inputs"),
            staging: staging.path().to_owned(),
            working: own.join("working"),
            run_folder: own.join("run"),
            profile: None,
            threads: threads.unwrap_or(job.threads),
            ..job.clone()
        };
        let (job_file, log) = (own.join("job.json"), own.join("log"));
        let text = serde_json::to_vec(&job).expect("a job is plain data");
        fs::write(&job_file, text).or_fail(Cause::Machine, || format!("cannot write `{}`", job_file.display()))?;
        let inherit = [self.store.descriptors(&staging), vec![self.folder.lock().as_raw_fd()]].concat();
        let launch = Launch {
            stage: 0,
            job: job_file,
            log,
            store: self.store.root().to_owned(),
            inherit,
            cluster: None,
            env: Vec::new(),
            cores: CpuList::default(),
        };
        let (messages, mut heard) = unbounded_channel();
        let process = self
            .executor
            .start(&launch, messages)
            .or_fail(Cause::Machine, || "cannot start the stage's process".to_owned())?;
        let (mut finished, mut failed) = (None, None);
        while let Some(message) = heard.blocking_recv() {
            match message {
                Message::Said { event: WorkerEvent::Finished { outputs, how }, .. } => finished = Some((outputs, how)),
                Message::Said { event: WorkerEvent::Failed(failure), .. } => failed = Some(failure.messages),
                Message::Said { .. } | Message::Queued { .. } | Message::Gone { .. } => {}
                Message::Exited { exit, .. } => {
                    drop(process);
                    return Ok(match (finished, &exit.ending) {
                        (Some((outputs, how)), Ending::Code(0)) => {
                            Ok(Made { outputs, how, seconds: exit.ran.as_secs_f64() })
                        }
                        (_, ending) => {
                            Err(failed.unwrap_or_else(|| vec![format!("its process ended with {ending:?}")]))
                        }
                    });
                }
            }
        }
        Err(StageError::internal("the executor went silent before the process had ended"))
    }

    fn own_folder(&self) -> Result<PathBuf, StageError> {
        let own = self.folder.path().join(format!("job-{}", self.jobs));
        let run = own.join("run");
        fs::create_dir_all(&run).or_fail(Cause::Machine, || format!("cannot create folder `{}`", run.display()))?;
        Ok(own)
    }
}
