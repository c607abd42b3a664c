//! Rebuilding: a stored file that is not what it was is removed, and the stage that made it runs again.
//!
//! The loop reads no file to find out what else is damaged: the stage that runs again replaces every file of its
//! result.

use cache::{Digest, StoreError};

use super::event::RunEvent;
use super::scheduler::Scheduler;
use super::stages::StageRun;
use crate::publish::PublishError;

/// A disk that damages more than this is not worked around.
const MAX_REBUILDS: u32 = 3;

impl Scheduler<'_> {
    /// Sends a running stage back to wait while what it could not read is made again; false where that is not possible.
    pub(super) fn rebuild(&mut self, stage: usize, object: Option<Digest>) -> bool {
        // Another reader may have met the damage first: then what this one waits for is on its way already.
        let has_result = |before: &usize| self.stages[*before].state.has_result();
        if self.stages[stage].upstream.iter().all(has_result) {
            let producers = self.producers(stage, object);
            if !self.make_again(stage, object, &producers) {
                return false;
            }
        }
        self.stages.send_back(stage);
        true
    }

    /// As [`Scheduler::rebuild`], where the damage was met while copying a result out of the store.
    pub(super) fn rebuild_published(&mut self, stage: usize, error: &PublishError) -> bool {
        let PublishError::Store(error) = error else { return false };
        let damaged = error.object().is_some()
            || matches!(error, StoreError::CorruptTree { .. } | StoreError::MissingTree { .. });
        // A reader may have met the damage first: the stage then runs again already, and publishes what it makes.
        damaged && (!self.stages[stage].state.is_settled() || self.make_again(stage, error.object(), &[stage]))
    }

    fn make_again(&mut self, met_by: usize, object: Option<Digest>, producers: &[usize]) -> bool {
        if producers.is_empty() || !self.stages.may_rebuild(met_by, MAX_REBUILDS) {
            return false;
        }
        let ids = producers.iter().map(|producer| self.id(*producer)).collect();
        self.recorder.tell(RunEvent::StageRebuilding { stage: self.id(met_by), object, producers: ids });
        let evicted = object.is_none_or(|object| self.store.evict(&object).is_ok());
        evicted && producers.iter().all(|producer| self.discard(*producer).is_ok())
    }

    /// Removes a stage's result, which it then makes again.
    fn discard(&mut self, producer: usize) -> Result<(), StoreError> {
        if let Some(key) = &self.stages[producer].key {
            self.store.forget(key)?;
        }
        self.stages.lose_result(producer);
        self.remote_cache.ask_again(producer);
        Ok(())
    }

    /// The stages that have to run again so that `stage` can read its inputs. Several may have made the same file: the
    /// first of them is enough, and is never behind one that is costlier for no gain.
    fn producers(&self, stage: usize, object: Option<Digest>) -> Vec<usize> {
        let Some(object) = object else {
            let before = &self.stages[stage].upstream;
            let damaged: Vec<usize> = before.iter().copied().filter(|before| !self.is_complete(*before)).collect();
            return if damaged.is_empty() { before.clone() } else { damaged };
        };
        let holds = |run: &StageRun| {
            run.outputs.values().any(|output| {
                let tree = self.store.tree(&output.tree);
                tree.is_ok_and(|tree| tree.files().iter().any(|file| file.digest == object))
            })
        };
        let found = (0..stage).find(|before| {
            let run = &self.stages[*before];
            run.state.has_result() && holds(run)
        });
        found.into_iter().collect()
    }

    fn is_complete(&self, stage: usize) -> bool {
        self.stages[stage].outputs.values().all(|output| self.store.complete(&output.tree))
    }
}
