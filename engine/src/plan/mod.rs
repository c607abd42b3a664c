//! The plan: a pipeline file after every check, as a graph of stages ready to be keyed and run.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use devices::DeviceKind;
use serde::{Deserialize, Serialize};

use crate::artifact::Output;
use crate::executor::{ExecutorKind, ExecutorSettings, SlurmSettings};
use crate::file::problem::Problem;
use crate::file::source::{Sources, Span};
use crate::forecast::{Ahead, Forecast};
use crate::parameter::Parameters;
use crate::remote::RemoteSettings;
use crate::stage::Stage;
use crate::track::Tracker;

mod as_written;
mod child;
mod command;
mod declared;
pub(crate) mod entry;
mod expand;
mod fields;
pub(crate) mod gate;
mod graph_text;
mod include;
mod join;
mod load;
mod matrix;
mod order;
mod publish;
mod resolve;
pub(crate) mod resources;
mod retries;
mod selection;
mod smoke;
#[cfg(test)]
mod tests;

pub use child::is_meant_by;
pub use command::for_shell;
pub use gate::{Bound, Figure, Gate, Margin, Side};
pub use graph_text::{GraphFormat, graph_text};
pub use load::{load, load_at, load_text};
pub use retries::Retries;
pub use selection::{Force, Selection, SelectionError, Wanted};
pub use smoke::Scale;

/// A pipeline file that has passed every check.
pub struct Plan {
    /// The pipeline's name.
    pub name: String,
    /// The pipeline file.
    pub file: PathBuf,
    /// The folder of the file, absolute: what paths in it are relative to. Stage processes have the same working
    /// folder, but only by luck.
    pub folder: PathBuf,
    /// The texts it was read from.
    pub sources: Sources,
    /// The stages, each after those it depends on. They are the graph: each has the positions of those before it.
    pub stages: Vec<PlannedStage>,
    /// What figures must be like before anything is published.
    pub gates: Vec<Gate>,
    /// What is copied out of the store when its stage is done.
    pub publish: Vec<Publish>,
    /// Gates of stages that are not in the plan, for which nothing is published that would be.
    pub withheld: Vec<Gate>,
    /// The files outside the pipeline that stages of the file read, also those that are not in the plan.
    pub reads: Vec<Reads>,
    /// How many there are of each slot that stages take.
    pub slots: BTreeMap<String, u32>,
    /// Where stages run that do not say it themselves.
    pub executor: ExecutorSettings,
    /// Stages of the file that are not in the plan, since a `when:` is false.
    pub left_out: Vec<LeftOut>,
    /// Where results are shared.
    pub remote: Option<RemoteSettings>,
    /// Who is told of its runs.
    pub track: Vec<Tracker>,
    /// The environment variables that the file refers to (`${env.NAME}`), and what they were: on another machine it is
    /// this plan only where they are the same.
    pub variables: BTreeMap<String, Option<String>>,
    /// Problems that do not stop a run.
    pub warnings: Vec<Problem>,
}

/// A stage of a plan.
pub struct PlannedStage {
    /// Its id: that of the file, or of a child of a sweep, such as `adapter[lora.rank=4]`.
    pub id: String,
    /// The id under which the file declares it, that of all children of a sweep.
    pub declared: String,
    /// The values that make it this child of a sweep, by axis; none for a stage that is not swept.
    pub axes: Vec<(String, serde_json::Value)>,
    /// Those of its axes that change no result, and make it a measurement: their values are part of its key.
    pub measured: Vec<String>,
    /// The name of its kind.
    pub kind: &'static str,
    /// The kind's version.
    pub version: u32,
    /// Its kind with its parameters.
    pub bound: Box<dyn Stage>,
    /// The parameters as the file gives them, after variables and overrides, for the stage process.
    pub parameters: serde_json::Value,
    /// What it makes.
    pub outputs: Vec<Output>,
    pub inputs: Vec<ResolvedInput>,
    /// Positions of the stages that it waits for without reading them.
    pub needs: Vec<usize>,
    /// The devices, memory and threads that it requests.
    pub resources: Resources,
    /// When it is tried again after a failure.
    pub retries: Retries,
    /// How long it may take.
    pub timeout: Option<Duration>,
    /// What it says itself of where it runs.
    pub executor: ExecutorSettings,
    /// Whether the file asks where its time goes.
    pub profile: bool,
    /// Whether it does less than the file says, so that its result must not serve a real run.
    pub smoke: bool,
    /// What a run is to do about it.
    pub wanted: Wanted,
    /// Where its `with:` (or itself, without one) stands.
    pub span: Span,
    /// Where a field of `with:` stands, by dotted path, for explanations.
    pub field_spans: Vec<(String, Span)>,
}

impl PlannedStage {
    /// Positions of the stages that it reads or waits for, some perhaps twice.
    pub fn upstream(&self) -> impl Iterator<Item = usize> {
        self.inputs.iter().map(|input| input.position).chain(self.needs.iter().copied())
    }

    /// What it would do and cost, with the workers that it asks for.
    pub fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let mut forecast = self.bound.forecast(ahead);
        let workers = crate::device::processor(self).workers();
        if workers > 1 {
            let peak = self.bound.peak_memory(ahead.expected, workers);
            forecast.peak_memory_bytes = peak.or(forecast.peak_memory_bytes);
        }
        forecast
    }
}

/// An input whose stage and output are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedInput {
    /// The stage that makes it.
    pub stage: String,
    /// That stage's position in the plan.
    pub position: usize,
    pub output: String,
    /// The artefact's kind.
    pub kind: String,
    /// Where the reference stands.
    pub span: Span,
}

/// What a stage asks of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    /// The kind of device; `None` leaves it to the machine: the first of those that the stage prefers and there are.
    pub device: Option<DeviceKind>,
    /// How many devices on each node; on the CPU, workers that share its cores.
    pub count: DeviceCount,
    /// Machines that take part.
    pub nodes: u32,
    /// Bytes of memory it needs: the machine's, or those of each device.
    pub memory: Option<u64>,
    /// Threads it may use; `None` leaves it to the machine.
    pub threads: Option<usize>,
    /// Slots that it takes while it runs, by name.
    pub slots: BTreeMap<String, u32>,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            device: None,
            count: DeviceCount::default(),
            nodes: 1,
            memory: None,
            threads: None,
            slots: BTreeMap::new(),
        }
    }
}

/// How many devices are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceCount {
    /// So many.
    Exactly(u32),
    /// All of the kind that the machine has. The CPU is one.
    All,
}

impl Default for DeviceCount {
    fn default() -> Self {
        Self::Exactly(1)
    }
}

/// Files outside the pipeline that a stage of the file reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reads {
    pub stage: String,
    /// A path, a folder or a glob, as it is written.
    pub pattern: String,
    /// Where it stands.
    pub span: Span,
}

/// What the files of a published folder are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Parameters)]
#[serde(rename_all = "snake_case")]
pub enum Link {
    /// Copies, which are the user's.
    Copy,
    /// Links into the store, which take no room and are for reading.
    Symlink,
}

/// An artefact outside the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    pub stage: String,
    pub output: String,
    /// The folder to write, relative to the pipeline file.
    pub path: PathBuf,
    /// What its files are.
    pub link: Link,
    /// Where the entry stands.
    pub span: Span,
    /// Where the folder stands.
    pub path_span: Span,
}

/// A stage of the file that is not in the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its id in the file.
    pub stage: String,
    /// The stage that it reads or waits for and that is left out itself; `None` for one whose own `when:` is false.
    pub follows: Option<String>,
    /// Where the `when:` stands, or the reference.
    pub span: Span,
    /// What would have been published of it.
    pub publish: Vec<PathBuf>,
}

/// A pipeline file that was rejected: all its problems, and the texts they are in.
#[derive(Debug)]
pub struct Rejected {
    /// The texts.
    pub sources: Sources,
    /// What is wrong; at least one is an error.
    pub problems: Vec<Problem>,
    /// What could be read, for checks that tell more of it at once ([`crate::checks::complete`]): stages with nothing
    /// wrong in their own parameters, some of whose inputs may be missing. Its warnings are all that was said
    /// already.
    pub readable: Option<Box<Plan>>,
}

impl Rejected {
    /// A file of which nothing more can be told.
    pub fn new(sources: Sources, problems: Vec<Problem>) -> Self {
        Self { sources, problems, readable: None }
    }
}

impl Plan {
    /// The plan without what it would publish, where a gate cannot be judged since its stages are not in the plan.
    fn withholding(mut self) -> Self {
        let ids: HashSet<&str> = self.stages.iter().map(|stage| stage.id.as_str()).collect();
        let is_judged = |gate: &Gate| gate.stages().all(|stage| ids.contains(stage));
        let (judged, withheld): (_, Vec<Gate>) = std::mem::take(&mut self.gates).into_iter().partition(is_judged);
        self.gates = judged;
        if !withheld.is_empty() && !self.publish.is_empty() {
            self.publish.clear();
            self.withheld = withheld;
        }
        self
    }

    pub fn stage(&self, id: &str) -> Option<&PlannedStage> {
        self.stages.iter().find(|stage| stage.id == id)
    }

    /// Where a stage runs, and with which settings; `forced` is what the command line says.
    pub fn executor_of(&self, stage: usize, forced: Option<ExecutorKind>) -> (ExecutorKind, SlurmSettings) {
        self.stages[stage].executor.resolve(&self.executor, forced)
    }

    /// The ids of the stages that a name given by a user means: one stage, all children of a stage that is swept, or
    /// those of them with some values (`adapter[lora.rank=4]`). Empty where there is none of that name.
    pub fn ids_of(&self, name: &str) -> Vec<&str> {
        if let Some(stage) = self.stage(name) {
            return vec![&stage.id];
        }
        let meant = |stage: &&PlannedStage| {
            let axes = stage.axes.iter().map(|(axis, value)| (axis.as_str(), value));
            child::is_meant_by(&stage.declared, axes, name)
        };
        self.stages.iter().filter(meant).map(|stage| stage.id.as_str()).collect()
    }

    /// Every name that [`Plan::ids_of`] knows a user to write: the stages of the file, then the children of those that
    /// are swept.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::with_capacity(self.stages.len());
        let mut seen = HashSet::with_capacity(self.stages.len());
        names.extend(self.stages.iter().map(|stage| stage.declared.as_str()).filter(|name| seen.insert(*name)));
        let children = self.stages.iter().filter(|stage| stage.id != stage.declared);
        names.extend(children.map(|stage| stage.id.as_str()));
        names
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages: Vec<&str> = self.stages.iter().map(|stage| stage.id.as_str()).collect();
        f.debug_struct("Plan").field("name", &self.name).field("stages", &stages).finish_non_exhaustive()
    }
}
