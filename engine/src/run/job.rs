//! The job file of a stage's process: what it is to do, what it may read, and where it may write.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cache::OutputRecord;

use super::outcome::Profiling;
use super::scheduler::Scheduler;
use crate::context::stored;
use crate::device::DeviceGrant;
use crate::error::StageError;
use crate::protocol::{InputGrant, Job, PROTOCOL, ProfileRequest};

impl Scheduler<'_> {
    /// The job of a stage whose key is known.
    pub(super) fn job(
        &self,
        stage: usize,
        threads: usize,
        devices: DeviceGrant,
        staging: &Path,
        run_folder: PathBuf,
    ) -> Result<Job, StageError> {
        let planned = &self.plan.stages[stage];
        let run = &self.stages[stage];
        let (&key, document) = run.keyed();
        let working = self.store.partial(&document.working_key()).map_err(stored)?;
        let mut inputs = BTreeMap::new();
        for input in &planned.inputs {
            let name = format!("{}.{}", input.stage, input.output);
            let output = self
                .output(input)
                .ok_or_else(|| StageError::internal(format!("stage `{}` made no `{name}`", input.stage)))?;
            let OutputRecord { kind, tree, identity, facts } = output.clone();
            inputs.insert(name, InputGrant { kind, tree, identity, facts: Some(facts) });
        }
        Ok(Job {
            protocol: PROTOCOL,
            stage: planned.id.clone(),
            kind: planned.kind.to_owned(),
            parameters: run.parameters.as_ref().unwrap_or(&planned.parameters).clone(),
            inputs,
            files: self.outside[stage].files.clone(),
            pins: self.outside[stage].pins.clone(),
            network: self.options.network,
            outputs: planned.outputs.clone(),
            store: self.store.root().to_owned(),
            inputs_folder: staging.join("inputs"),
            staging: staging.to_owned(),
            working,
            run_folder,
            key,
            threads,
            devices,
            profile: self.profile_request(stage),
        })
    }

    /// What is to be recorded of a stage's time.
    fn profile_request(&self, stage: usize) -> Option<ProfileRequest> {
        let planned = &self.plan.stages[stage];
        let asked = planned.profile || self.options.profile == Profiling::All;
        if asked { self.recorder.profile_request(&planned.id) } else { None }
    }
}
