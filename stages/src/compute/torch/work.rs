//! A piece of work for the torch worker: its job file, and its ranks.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use engine::context::StageContext;
use engine::device::DeviceGrant;
use engine::error::{Cause, OrFail, StageError};
use engine::execute::{Ranks, RunningRanks};

use super::environment;
use super::job::{Common, Job, Quantize};
use super::python::{PACKAGE, Python};

/// How many times longer than a collective may take the ranks may be silent: rank 0 speaks after each step.
const SILENT_COLLECTIVES: u32 = 4;

/// What loading libraries and a model may take, beside that.
const LOADING: Duration = Duration::from_secs(20 * 60);

/// The most memory of each rank, by its device's counter, where it is recorded with a result. The engine's own figure
/// is one of processes on this machine.
pub(crate) const PEAK_MEMORY_OF_RANKS: &str = "peak_memory_bytes_of_ranks";

/// A piece of work in a folder of its own.
#[derive(Debug)]
pub(crate) struct Work {
    python: Python,
    /// Private to this work, for what its job names.
    pub folder: PathBuf,
    /// Variables of the ranks that the stage gives.
    pub env: BTreeMap<String, String>,
    /// Descriptors that stay open in each of them.
    pub inherit: Vec<RawFd>,
    /// How long a collective may take.
    pub watchdog: Duration,
    devices: DeviceGrant,
    /// Of all ranks together.
    threads: usize,
}

impl Work {
    /// Begins a piece of work of a stage: finds the worker, and makes its folder.
    ///
    /// # Errors
    /// Fails where the worker is not installed.
    pub(crate) fn begin(name: &str, context: &StageContext) -> Result<Self, StageError> {
        let folder = context.scratch().join(name);
        fs::create_dir_all(&folder).or_fail(Cause::Machine, || format!("cannot create `{}`", folder.display()))?;
        Self::on(folder, context.devices().clone(), context.threads())
    }

    /// Begins a piece of work on some devices, in a folder that is there.
    ///
    /// # Errors
    /// Fails where the worker is not installed.
    pub(crate) fn on(folder: PathBuf, devices: DeviceGrant, threads: usize) -> Result<Self, StageError> {
        let python = Python::find();
        python.packages()?;
        let watchdog = Duration::from_secs(600);
        Ok(Self { python, folder, env: BTreeMap::new(), inherit: Vec::new(), watchdog, devices, threads })
    }

    /// What every job says.
    pub(crate) fn common(&self, dtype: &'static str, model: PathBuf, quantize: Option<Quantize>) -> Common {
        let (device, threads) = (self.devices.kind, self.threads);
        Common { protocol: Common::PROTOCOL, device, dtype, threads, model, quantize }
    }

    /// Starts the ranks.
    pub(super) fn start(&self, job: &Job) -> Result<RunningRanks, StageError> {
        let path = self.folder.join("job.json");
        let text = serde_json::to_vec_pretty(job).expect("a job is plain data");
        fs::write(&path, text).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))?;
        let is_set = |name: &str| std::env::var_os(name).is_some();
        let ranks = Ranks {
            nodes: self.devices.nodes,
            per_node: self.devices.count,
            command: vec![self.python.program().clone(), "-m".into(), PACKAGE.into(), path.into()],
            env: environment::variables(&self.devices, self.threads, &self.env, &is_set),
            inherit: self.inherit.clone(),
            silence: Some(LOADING + self.watchdog * SILENT_COLLECTIVES),
            take_requests: true,
        };
        ranks.start()
    }
}
