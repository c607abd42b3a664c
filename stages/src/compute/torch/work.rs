//! A piece of work for the torch worker: its job file, its ranks, what they say, and the summary that they leave.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::execute::Ranks;
use engine::protocol::WorkerEvent;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::environment;
use super::job::{Common, Job};
use super::python::{PACKAGE, Python};

/// How many times longer than a collective may take the ranks may be silent: rank 0 speaks after each step.
const SILENT_COLLECTIVES: u32 = 4;

/// What loading libraries and a model may take, beside that.
const LOADING: Duration = Duration::from_secs(20 * 60);

/// What the worker leaves about its work.
const SUMMARY: &str = "summary.json";

/// The most memory that each rank has had, by its device's counter, in the summary.
const PEAK_MEMORY: &str = "peak_memory_bytes";

/// A piece of work in a folder of its own.
#[derive(Debug)]
pub(crate) struct Work {
    python: Python,
    /// Private to this work, for what its job names.
    pub folder: PathBuf,
    /// Where the worker leaves what it makes.
    pub output: PathBuf,
    /// Variables of the ranks that the stage gives.
    pub env: BTreeMap<String, String>,
    /// How long a collective may take.
    pub watchdog: Duration,
}

/// What the worker says of its work as a whole.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Summary(pub Map<String, Value>);

impl Summary {
    /// One of its values.
    ///
    /// # Errors
    /// Fails where it is not there, or not of this form.
    pub(crate) fn get<T: DeserializeOwned>(&self, name: &str) -> Result<T, StageError> {
        let value = self.0.get(name).cloned().unwrap_or_default();
        serde_json::from_value(value)
            .or_fail(Cause::Internal, || format!("the torch worker's `{SUMMARY}` has no `{name}`"))
    }

    /// Records what computed and the memory that it took: of no key, but of interest to who compares results.
    fn record(&self, context: &mut StageContext) {
        context.record("threads", context.threads());
        for (name, value) in self.0.iter().filter(|(name, _)| !["progress", "backend"].contains(&name.as_str())) {
            // The engine's own figure of that name is one of processes on this machine.
            let name = if name == PEAK_MEMORY { "peak_memory_bytes_of_ranks" } else { name };
            context.record(name, value.clone());
        }
    }

    /// The most memory of any rank, where they say.
    pub(crate) fn peak_memory_bytes(&self) -> Option<u64> {
        let ranks: Vec<Option<u64>> = self.get(PEAK_MEMORY).ok()?;
        ranks.into_iter().flatten().max()
    }
}

impl Work {
    /// Begins a piece of work: finds the worker, and makes its folders.
    ///
    /// # Errors
    /// Fails where the worker is not installed.
    pub(crate) fn begin(name: &str, context: &StageContext) -> Result<Self, StageError> {
        let python = Python::find();
        python.packages()?;
        let folder = context.scratch().join(name);
        let output = folder.join("output");
        fs::create_dir_all(&output).or_fail(Cause::Machine, || format!("cannot create `{}`", output.display()))?;
        Ok(Self { python, folder, output, env: BTreeMap::new(), watchdog: Duration::from_secs(600) })
    }

    /// What every job says.
    pub(crate) fn common(
        &self,
        dtype: &'static str,
        model: PathBuf,
        adapter: Option<PathBuf>,
        context: &StageContext,
    ) -> Common {
        Common {
            protocol: Common::PROTOCOL,
            device: context.devices().kind,
            dtype,
            threads: context.threads(),
            model,
            adapter,
            output: self.output.clone(),
        }
    }

    /// Does the work. `heard` gets what rank 0 says of it; warnings and reports go on to the user by themselves.
    ///
    /// # Errors
    /// The worker's failure, or that of `heard`.
    pub(crate) fn run(
        &self,
        job: &Job,
        context: &mut StageContext,
        heard: &mut dyn FnMut(WorkerEvent, &mut StageContext) -> Result<(), StageError>,
    ) -> Result<Summary, StageError> {
        let path = self.folder.join("job.json");
        let text = serde_json::to_vec_pretty(job).expect("a job is plain data");
        fs::write(&path, text).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))?;
        let devices = context.devices().clone();
        let is_set = |name: &str| std::env::var_os(name).is_some();
        let ranks = Ranks {
            nodes: devices.nodes,
            per_node: devices.count,
            command: vec![self.python.program().clone(), "-m".into(), PACKAGE.into(), path.into()],
            env: environment::variables(&devices, context.threads(), &self.env, &is_set),
            inherit: Vec::new(),
            silence: Some(LOADING + self.watchdog * SILENT_COLLECTIVES),
        };
        let profile = context.profile().clone();
        let _phase = profile.phase("torch worker");
        let running = context.launch(&ranks)?;
        running.attend(context, &mut |rank, event, context| match event {
            WorkerEvent::Started { .. } | WorkerEvent::Finished { .. } => Ok(()),
            WorkerEvent::Warning { .. } | WorkerEvent::Note { .. } | WorkerEvent::Report { .. } => {
                context.emit(event);
                Ok(())
            }
            event if rank == 0 => heard(event, context),
            _ => Ok(()),
        })?;
        let text = self.left(SUMMARY)?;
        let summary: Summary = serde_json::from_str(&text)
            .or_fail(Cause::Internal, || format!("the torch worker's `{SUMMARY}` is no object"))?;
        summary.record(context);
        Ok(summary)
    }

    /// The text of a file that the worker left.
    ///
    /// # Errors
    /// Fails where it left none.
    pub(crate) fn left(&self, name: &str) -> Result<String, StageError> {
        let path = self.output.join(name);
        fs::read_to_string(&path).or_fail(Cause::Internal, || format!("the torch worker left no `{name}`"))
    }
}
