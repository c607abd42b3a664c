//! What a run is told, and what comes out of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use cache::{Digest, OutputRecord};

use super::event::{Conclusion, Counts};
use super::stages::State;
use crate::error::Failure;
use crate::executor::ExecutorKind;
use crate::lock_file::Pinning;
use crate::memory::Memory;
use crate::protocol::Network;
use crate::publish::OnChanged;
use crate::remote::RemoteSettings;

/// How a plan is to be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOptions {
    /// What happens to the other stages when one fails.
    pub on_failure: OnFailure,
    /// Threads for all stages together; `None` is one for each core.
    pub threads: Option<usize>,
    /// Most stages that run at once; `None` is as many as there are threads for.
    pub jobs: Option<usize>,
    /// Where the machine's memory is read.
    pub memory: Memory,
    /// Where stages run, whatever the file says; those that are to stay on this machine stay.
    pub executor: Option<ExecutorKind>,
    /// What may be done about things that are not pinned yet.
    pub pinning: Pinning,
    /// Whether stages may go out for what they read.
    pub network: Network,
    /// What to do with a published folder that somebody has changed.
    pub on_changed_target: OnChanged,
    /// Where results are shared.
    pub remote: Option<RemoteSettings>,
    /// What the shared cache is to this run.
    pub sharing: Sharing,
    /// Of which stages it is recorded where their time goes.
    pub profile: Profiling,
    /// How long a stage that was asked to stop has to save its working state.
    pub grace: Duration,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            on_failure: OnFailure::default(),
            threads: None,
            jobs: None,
            memory: Memory::default(),
            executor: None,
            pinning: Pinning::default(),
            network: Network::default(),
            on_changed_target: OnChanged::default(),
            remote: None,
            sharing: Sharing::default(),
            profile: Profiling::default(),
            grace: Duration::from_secs(10),
        }
    }
}

/// What happens to the other stages when one fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFailure {
    /// Those that run go on to their end; nothing else is started.
    #[default]
    Stop,
    /// Everything that does not depend on the failed stage goes on.
    KeepGoing,
}

/// What the shared cache is to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// It spares work: results that nothing here reads are fetched, since they are what the run is for, and without it
    /// all is made.
    #[default]
    SparesWork,
    /// It takes what is made to the runs of other machines: what is there stays there, unless a stage that runs here
    /// reads it.
    HandsOver,
}

/// Of which stages it is recorded where their time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profiling {
    /// Of those whose entry in the file says `profile: true`.
    #[default]
    AsFiled,
    /// Of all that run.
    All,
}

/// What came out of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunOutcome {
    /// The run's id.
    pub run: String,
    pub folder: PathBuf,
    /// How it ended.
    pub conclusion: Conclusion,
    /// How many stages ended in which way.
    pub counts: Counts,
    /// The stages, in the order of the plan.
    pub stages: Vec<StageOutcome>,
    /// How long it took.
    pub took: Duration,
}

/// What became of one stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageOutcome {
    pub stage: String,
    /// How it is at the end.
    pub state: State,
    /// The key of its result, where all its inputs became known.
    pub key: Option<Digest>,
    /// What it made, or had made before.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// Why it failed, where it did.
    pub failure: Option<Failure>,
}
