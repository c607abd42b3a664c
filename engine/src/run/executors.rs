//! The ways to run stages that a run has: as processes here, and as jobs of a cluster.

use std::cell::Cell;
use std::io;
use std::path::Path;
use std::time::Instant;

use cache::{Store, StoreError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::error::RunError;
use super::outcome::RunOptions;
use crate::execute::slurm::record::Records;
use crate::execute::{Executor, Launch, Local, Message, Process, Slurm, StartError};
use crate::executor::ExecutorKind;
use crate::home::Home;
use crate::plan::Plan;

/// The ways to run stages that a run has.
pub(super) struct Executors {
    local: Local,
    /// Where some stage runs there, or a job of an earlier run may have to be heard to its end.
    pub slurm: Option<Slurm>,
    pub records: Records,
    /// When the cluster was last asked about a job that nobody follows.
    pub asked_at: Cell<Option<Instant>>,
    /// Which stages run there.
    on_cluster: Vec<bool>,
    messages: UnboundedSender<Message>,
    heard: UnboundedReceiver<Message>,
}

impl Executors {
    /// Those that a plan needs.
    pub(super) fn new(plan: &Plan, home: &Home, store: &Store, options: &RunOptions) -> Result<Self, RunError> {
        let records = Records::at(home.jobs());
        let local = Local::new().map_err(|source| machine("open a pipe for", home.root(), source))?;
        let on_cluster: Vec<bool> = (0..plan.stages.len()).map(|stage| is_on_cluster(plan, options, stage)).collect();
        let submits = on_cluster.contains(&true);
        if submits {
            probe_locks(store)?;
        }
        let slurm = (submits || !records.all().is_empty()).then(|| Slurm::new(records.clone())).transpose();
        let slurm = slurm.map_err(|StartError { action, path, source }| machine(action, &path, source))?;
        let (messages, heard) = unbounded_channel();
        Ok(Self { local, slurm, records, asked_at: Cell::new(None), on_cluster, messages, heard })
    }

    /// Whether a stage's process is a job of a cluster.
    pub(super) fn is_on_cluster(&self, stage: usize) -> bool {
        self.on_cluster[stage]
    }

    /// The next that is heard of a process.
    pub(super) async fn hear(&mut self) -> Message {
        self.heard.recv().await.expect("this holds a sender itself")
    }

    /// Starts a process where its launch says.
    pub(super) fn start(&self, launch: &Launch) -> Result<Box<dyn Process>, StartError> {
        let messages = self.messages.clone();
        match (&launch.cluster, &self.slurm) {
            (Some(_), Some(slurm)) => slurm.start(launch, messages),
            (Some(_), None) => Slurm::new(self.records.clone())?.start(launch, messages),
            (None, _) => self.local.start(launch, messages),
        }
    }
}

fn machine(action: &'static str, path: &Path, source: io::Error) -> RunError {
    RunError::Machine { action, path: path.to_owned(), source }
}

/// Whether a stage's process is a job of a cluster.
pub(super) fn is_on_cluster(plan: &Plan, options: &RunOptions, stage: usize) -> bool {
    plan.executor_of(stage, options.executor).0 == ExecutorKind::Slurm
}

/// What keeps two machines from making the same result at once is the kernel's lock on a file that both see. A file
/// system that lends the same lock twice, or none, is found here and not by a damaged result.
fn probe_locks(store: &Store) -> Result<(), RunError> {
    let probe = || store.try_lock("probe");
    let useless = |error: Option<StoreError>| RunError::NoLocks {
        path: store.root().to_owned(),
        words: error.map(|error| error.to_string()),
    };
    let held = probe().map_err(|error| useless(Some(error)))?;
    // Where another engine probes at this moment, the lock works.
    if held.is_some() && probe().map_err(|error| useless(Some(error)))?.is_some() {
        return Err(useless(None));
    }
    Ok(())
}
