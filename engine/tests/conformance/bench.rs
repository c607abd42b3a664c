//! An executor, a store, and what was heard of a process.

use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cache::{Digest, Lock, Store};
use devices::CpuList;
use engine::device::DeviceGrant;
use engine::execute::slurm::record::{JobRecord, Records};
use engine::execute::submission::ClusterJob;
use engine::execute::{Executor, Launch, Local, Message, Process, ProcessExit, Slurm, Stop};
use engine::executor::SlurmSettings;
use engine::parameter::Period;
use engine::protocol::{Job, Network, PROTOCOL, WorkerEvent};
use serde_json::Value;
use std::os::fd::AsRawFd;
use test_harness::{Requirement, Unmet};
use tokio::sync::mpsc::{UnboundedReceiver, error::TryRecvError, unbounded_channel};

use crate::ON_A_CLUSTER;
use crate::slurm::INSTALL;

/// Nothing takes longer, on a machine however busy.
const AT_MOST: Duration = Duration::from_secs(120);

/// Which executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Local,
    Slurm,
}

impl Kind {
    pub(crate) const ALL: [Self; 2] = [Self::Local, Self::Slurm];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Slurm => "slurm",
        }
    }

    pub(crate) fn parse(name: &str) -> Self {
        if name == "slurm" { Self::Slurm } else { Self::Local }
    }
}

impl Display for Kind {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        to.write_str(self.name())
    }
}

/// An executor with a home of its own.
pub(crate) struct Bench {
    pub kind: Kind,
    pub executor: Box<dyn Executor>,
    pub store: Store,
    root: PathBuf,
    /// Gone with the bench, where it is the bench's own.
    _folder: Option<tempfile::TempDir>,
}

/// A process that was started.
pub(crate) struct Started {
    process: Box<dyn Process>,
    heard: UnboundedReceiver<Message>,
    events: Vec<WorkerEvent>,
    pub folder: PathBuf,
    /// As long as this lives, or the process does, its locks are held.
    locks: Vec<Lock>,
}

/// What became of it.
pub(crate) struct Ended {
    pub events: Vec<WorkerEvent>,
    pub exit: ProcessExit,
    pub log: String,
}

impl Bench {
    /// Fails for an executor of clusters where the environment names none.
    pub(crate) fn new(kind: Kind) -> Result<Self, Unmet> {
        if kind == Kind::Slurm && std::env::var_os(ON_A_CLUSTER).is_none() {
            return Err(Requirement::Slurm.unmet(INSTALL));
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        Ok(Self { _folder: Some(folder), ..Self::at(kind, &root) })
    }

    /// In a folder that is somebody else's.
    pub(crate) fn at(kind: Kind, root: &Path) -> Self {
        let store = Store::open(root.join("store")).unwrap();
        let executor: Box<dyn Executor> = match kind {
            Kind::Local => Box::new(Local::new().unwrap()),
            Kind::Slurm => Box::new(Slurm::new(Records::at(root.join("jobs"))).unwrap()),
        };
        Self { kind, executor, store, root: root.to_owned(), _folder: None }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The locks of a process.
    pub(crate) fn working(name: &str) -> String {
        format!("working-{}", Digest::of(name.as_bytes()))
    }

    /// Starts a stage that does what its parameters say.
    pub(crate) fn start(&self, name: &str, parameters: Value) -> Started {
        self.start_as(name, parameters, |_| {})
    }

    /// As [`Bench::start`], with a change to what a cluster is told.
    pub(crate) fn start_as(&self, name: &str, parameters: Value, change: impl FnOnce(&mut ClusterJob)) -> Started {
        let folder = self.root.join(name);
        fs::create_dir_all(&folder).unwrap();
        let key = Digest::of(name.as_bytes());
        let staging = folder.join("staging");
        // As the engine has one beside each private folder.
        fs::write(staging.with_extension("lock"), "").unwrap();
        let job = Job {
            protocol: PROTOCOL,
            stage: name.to_owned(),
            kind: "act".to_owned(),
            parameters,
            inputs: Default::default(),
            files: Default::default(),
            pins: Default::default(),
            network: Network::Offline,
            outputs: Vec::new(),
            store: self.store.root().to_owned(),
            inputs_folder: staging.join("inputs"),
            staging,
            working: folder.join("working"),
            run_folder: folder.clone(),
            key,
            threads: 1,
            devices: DeviceGrant::PROCESSOR,
            profile: None,
        };
        let job_file = folder.join("job.json");
        fs::write(&job_file, serde_json::to_vec(&job).unwrap()).unwrap();
        let mut locks = vec![self.store.lock(&Self::working(name)).unwrap()];
        let mut cluster = ClusterJob::new(format!("conformance-{name}-{}", std::process::id()), key, key);
        cluster.settings = SlurmSettings { poll: Some(Period(Duration::from_secs(1))), ..SlurmSettings::default() };
        change(&mut cluster);
        let launch = Launch {
            env: Vec::new(),
            cores: CpuList::default(),
            stage: 3,
            job: job_file,
            log: folder.join("log"),
            store: self.store.root().to_owned(),
            inherit: locks.iter().map(AsRawFd::as_raw_fd).collect(),
            cluster: (self.kind == Kind::Slurm).then(|| Box::new(cluster)),
        };
        let (sender, heard) = unbounded_channel();
        if self.kind == Kind::Slurm {
            // The job takes it on its node.
            locks.clear();
        }
        let process = self.executor.start(&launch, sender).unwrap();
        Started { process, heard, events: Vec::new(), folder, locks }
    }

    /// The record of a job that an engine has left behind.
    pub(crate) fn record_of(&self, name: &str) -> JobRecord {
        Records::at(self.root.join("jobs")).find(&Digest::of(name.as_bytes())).unwrap()
    }
}

impl Started {
    /// Waits until something was said.
    pub(crate) fn wait_for(&mut self, is_it: impl Fn(&WorkerEvent) -> bool) -> &mut Self {
        let began = Instant::now();
        while !self.events.iter().any(&is_it) {
            match self.next(began) {
                Message::Said { event, .. } => self.events.push(event),
                Message::Queued { .. } => {}
                other => panic!("{other:?} after {:?}", self.events),
            }
        }
        self
    }

    pub(crate) fn wait_until_it_runs(&mut self) -> &mut Self {
        self.wait_for(|event| matches!(event, WorkerEvent::Started { .. }))
    }

    pub(crate) fn stop(&mut self, how: Stop) -> &mut Self {
        self.process.stop(how);
        self
    }

    /// What the engine holds of it is let go of, as when an engine dies.
    pub(crate) fn let_go_of_locks(&mut self) {
        self.locks.clear();
    }

    /// Hears it to its end.
    pub(crate) fn end(mut self) -> Ended {
        let began = Instant::now();
        loop {
            match self.next(began) {
                Message::Said { stage, event } => {
                    assert_eq!(stage, 3);
                    self.events.push(event);
                }
                Message::Exited { exit, .. } => {
                    let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
                    assert!(matches!(self.heard.try_recv(), Err(TryRecvError::Disconnected | TryRecvError::Empty)));
                    return Ended { events: self.events, exit, log };
                }
                Message::Queued { .. } => {}
                Message::Gone { because, .. } => panic!("{because}"),
            }
        }
    }

    fn next(&mut self, began: Instant) -> Message {
        loop {
            match self.heard.try_recv() {
                Ok(message) => return message,
                Err(TryRecvError::Empty) => {
                    assert!(began.elapsed() < AT_MOST, "nothing more was heard after {:?}", self.events.last());
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryRecvError::Disconnected) => panic!("it fell silent after {:?}", self.events.last()),
            }
        }
    }
}
