//! What a run does with results that are in a shared cache: found by their keys, fetched when somebody has to read
//! them, sent when they are made.

use std::time::Duration;

use cache::remote::{Pulled, Pushed, RemoteError, TransferProgress};
use cache::{Digest, ResultRecord};

use super::event::RunEvent;
use super::remote_cache::Files;
use super::scheduler::Scheduler;
use super::stages::State;
use super::stopping::Stopping;
use super::transfers::TransferEvent;
use crate::error::{Cause, Failure};
use crate::protocol::WorkerEvent;

impl Scheduler<'_> {
    /// Whether the files of everything that a stage reads are here. Those that are not are sent for.
    pub(super) fn inputs_are_here(&mut self, stage: usize) -> bool {
        let mut all = true;
        for input in &self.plan.stages[stage].inputs {
            let files = self.remote_cache.require(input.position);
            all &= matches!(files, Files::Here);
            match files {
                Files::Here | Files::Coming => {}
                Files::Fetching => self.tell_fetching(input.position),
                Files::Lost => self.make_here(input.position),
            }
        }
        all
    }

    pub(super) fn tell_fetching(&mut self, stage: usize) {
        let (stage, remote) = (self.id(stage), self.remote_cache.name());
        self.recorder.tell(RunEvent::ResultFetching { stage, remote });
    }

    /// Hears how a transfer went.
    pub(super) fn hear_transfer(&mut self, event: TransferEvent) {
        match event {
            TransferEvent::Answer { stage, key, found } => self.hear_answer(stage, key, found),
            TransferEvent::Underway { stage, progress } => self.hear_progress(stage, progress),
            TransferEvent::Fetched { stage, key, fetched, took } => self.hear_fetched(stage, key, fetched, took),
            TransferEvent::Sent { key, sent, took } => self.hear_sent(key, sent, took),
        }
    }

    /// Lets a stage run whose result was counted on and cannot be had.
    fn make_here(&mut self, stage: usize) {
        if self.stages[stage].state != State::Cached {
            return;
        }
        self.stages.lose_result(stage);
        for reader in self.stages.forget_keys_behind(stage) {
            self.remote_cache.ask_again(reader);
        }
    }

    fn hear_answer(&mut self, stage: usize, key: Digest, found: Result<Option<ResultRecord>, RemoteError>) {
        // What was asked for a key that is another one by now is of no use.
        if self.stages[stage].key != Some(key) || !self.remote_cache.is_asked(stage) {
            return;
        }
        let found = match found {
            Ok(Some(record)) if !self.fits(stage, &record) => {
                let message = format!("the outputs in record {} are not those of this stage", key.short());
                self.tell_refused(stage, Failure::new(Cause::BadData, vec![message]));
                None
            }
            Ok(found) => found,
            Err(error) => {
                self.tell_failure(Some(stage), &error);
                None
            }
        };
        self.remote_cache.answered(stage, found);
        self.stages.look_again(stage);
    }

    /// Whether a record has the outputs that the stage would make. One with others was written by who knows whom.
    fn fits(&self, stage: usize, record: &ResultRecord) -> bool {
        let planned = &self.plan.stages[stage];
        let kind_of = |name: &str| record.outputs.get(name).map(|output| output.kind.as_str());
        record.outputs.len() == planned.outputs.len()
            && planned.outputs.iter().all(|output| kind_of(&output.name) == Some(output.kind.as_str()))
    }

    fn hear_progress(&mut self, stage: usize, TransferProgress { done, total }: TransferProgress) {
        let said = WorkerEvent::Progress { unit: "bytes".to_owned(), done, total: Some(total), note: None };
        self.recorder.tell(RunEvent::Worker { stage: self.id(stage), said });
    }

    fn hear_fetched(&mut self, stage: usize, key: Digest, fetched: Result<Pulled, RemoteError>, took: Duration) {
        self.remote_cache.fetched(stage, &key, fetched.as_ref().err());
        self.stages.look_again(stage);
        match fetched {
            Ok(Pulled { files, bytes }) => {
                let (stage, remote, seconds) = (self.id(stage), self.remote_cache.name(), took.as_secs_f64());
                self.recorder.tell(RunEvent::ResultFetched { stage, key, remote, files, bytes, seconds });
            }
            Err(error) => {
                self.tell_failure(Some(stage), &error);
                self.make_here(stage);
            }
        }
    }

    fn hear_sent(&mut self, key: Digest, sent: Result<Pushed, RemoteError>, took: Duration) {
        self.remote_cache.sent(&key, sent.as_ref().err());
        let stage = self.stages.of_key(&key).map(|stage| self.id(stage));
        match sent {
            Ok(Pushed { files, bytes, .. }) => {
                let (remote, seconds) = (self.remote_cache.name(), took.as_secs_f64());
                self.recorder.tell(RunEvent::ResultSent { stage, key, remote, files, bytes, seconds });
            }
            Err(error) if error.is_of_one_result() => {
                self.recorder.tell(RunEvent::ResultNotSent { stage, key, failure: (&error).into() });
            }
            Err(error) => self.tell_failure(None, &error),
        }
    }

    /// Says what failed: of one result, or of the shared cache, which is then asked no more.
    fn tell_failure(&mut self, stage: Option<usize>, error: &RemoteError) {
        match (error, stage) {
            (RemoteError::Stopped, _) => {}
            (error, Some(stage)) if error.is_of_one_result() => self.tell_refused(stage, error.into()),
            _ => {
                if self.remote_cache.give_up() {
                    let remote = self.remote_cache.name();
                    self.recorder.tell(RunEvent::RemoteFailed { remote, failure: error.into() });
                }
            }
        }
    }

    fn tell_refused(&mut self, stage: usize, failure: Failure) {
        if self.stopping == Stopping::No {
            let (stage, remote) = (self.id(stage), self.remote_cache.name());
            self.recorder.tell(RunEvent::ResultRefused { stage, remote, failure });
        }
    }
}
