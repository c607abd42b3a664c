//! Results that are in a shared cache: found by their keys, fetched when somebody has to read them, sent when they are
//! made.
//!
//! A record comes first, and is small. It says what a result is, which is all that the keys of the stages behind it
//! need. The files come only when a stage that has to run reads them, when they are published, or when nothing in the
//! plan reads them, since then they are what the run is for. So a machine that finds a trained adapter does not fetch
//! the model it was trained from.

use std::time::Duration;

use cache::remote::{Pulled, Pushed, RemoteError, TransferProgress};
use cache::{Digest, ResultRecord};

use super::event::RunEvent;
use super::outcome::Sharing;
use super::remote_cache::RemoteState;
use super::scheduler::Scheduler;
use super::stage_run::{State, Stopping};
use super::transfers::TransferEvent;
use crate::protocol::WorkerEvent;

/// What a stage without a result of its own here does next.
pub(super) enum Look {
    /// It runs.
    Nothing,
    /// It waits for an answer, or for files.
    Wait,
    /// It has a result, whose files nobody has to read.
    Known(ResultRecord),
}

impl Scheduler<'_> {
    /// Looks for the result of a stage that has none here.
    pub(super) fn look_elsewhere(&mut self, stage: usize, key: Digest) -> Look {
        match &self.remote_cache.results[stage] {
            RemoteState::Absent | RemoteState::Local => Look::Nothing,
            RemoteState::Querying | RemoteState::Fetching => Look::Wait,
            RemoteState::Found(record) if !self.is_wanted(stage) => Look::Known((**record).clone()),
            RemoteState::Found(_) => {
                if self.fetch(stage) {
                    Look::Wait
                } else {
                    Look::Nothing
                }
            }
            RemoteState::Unknown => {
                if let Some(record) = self.store.remembered(&key) {
                    self.remote_cache.results[stage] = RemoteState::Found(Box::new(record));
                    return self.look_elsewhere(stage, key);
                }
                let Some(transfers) = self.remote_cache.transfers(self.store) else { return Look::Nothing };
                transfers.ask(stage, key);
                self.remote_cache.results[stage] = RemoteState::Querying;
                Look::Wait
            }
        }
    }

    /// Whether the files of everything that a stage reads are here. Those that are not are sent for.
    pub(super) fn inputs_are_here(&mut self, stage: usize) -> bool {
        let read: Vec<usize> = self.plan.stages[stage]
            .inputs
            .iter()
            .filter_map(|input| self.positions.get(input.stage.as_str()).copied())
            .collect();
        let mut all = true;
        for before in read {
            match &self.remote_cache.results[before] {
                RemoteState::Fetching => all = false,
                RemoteState::Found(_) => {
                    all = false;
                    if !self.fetch(before) {
                        self.make_here(before);
                    }
                }
                RemoteState::Unknown | RemoteState::Querying | RemoteState::Absent | RemoteState::Local => {}
            }
        }
        all
    }

    /// Notes that a result is to be sent, if the pipeline's results are to be shared. Before the result is recorded: it
    /// is never here, found by every later run, and not on its way.
    pub(super) fn note_to_send(&self, stage: usize) {
        let Some(settings) = self.remote_cache.settings.as_ref().filter(|settings| settings.push) else { return };
        let key = self.stages[stage].key.as_ref().expect("a stage that ran has a key").key;
        // Without the note a push that is cut off is not taken up; the push itself needs none.
        let _ = self.store.to_send(&key, &settings.place.to_string());
    }

    /// Sends what a stage has made, if the pipeline's results are to be shared.
    pub(super) fn send(&mut self, stage: usize) {
        if self.remote_cache.settings.as_ref().is_some_and(|settings| settings.push) {
            let key = self.stages[stage].key.as_ref().expect("a stage that ran has a key").key;
            self.send_key(key);
        }
    }

    /// Sends what earlier runs could not.
    pub(super) fn send_what_is_left(&mut self) {
        let Some(settings) = self.remote_cache.settings.as_ref().filter(|settings| settings.push) else { return };
        for key in self.store.outbox(&settings.place.to_string()).unwrap_or_default() {
            // A run was killed between its note and its result, or is there just now and will send it.
            if self.store.last_use(&key).is_some() {
                self.send_key(key);
            }
        }
    }

    /// Hears how an transfer went.
    pub(super) fn hear_delivery(&mut self, delivery: TransferEvent) {
        match delivery {
            TransferEvent::Answer { stage, key, found } => self.hear_answer(stage, key, found),
            TransferEvent::Underway { stage, progress } => self.hear_progress(stage, progress),
            TransferEvent::Fetched { stage, key, fetched, took } => self.hear_fetched(stage, key, fetched, took),
            TransferEvent::Sent { key, sent, took } => self.hear_sent(key, sent, took),
        }
    }

    /// Whether the run has to have the files of a stage's result: they are published, or nothing in the plan reads them
    /// and it is not for the runs of other machines.
    fn is_wanted(&self, stage: usize) -> bool {
        let id = &self.stages[stage].id;
        let is_read = self.plan.stages.iter().flat_map(|other| &other.inputs).any(|input| input.stage == *id);
        let is_the_aim = !is_read && self.options.sharing == Sharing::SparesWork;
        is_the_aim || self.plan.publish.iter().any(|publish| publish.stage == *id)
    }

    /// Sends for the files of a result; false where that is not possible.
    fn fetch(&mut self, stage: usize) -> bool {
        let before = std::mem::replace(&mut self.remote_cache.results[stage], RemoteState::Absent);
        let RemoteState::Found(record) = before else { return false };
        let Some(transfers) = self.remote_cache.transfers(self.store) else { return false };
        transfers.fetch(stage, *record);
        self.remote_cache.results[stage] = RemoteState::Fetching;
        let (stage, remote) = (self.stages[stage].id.clone(), self.remote_cache.name());
        self.tell(RunEvent::ResultFetching { stage, remote });
        true
    }

    /// Lets a stage run whose result was counted on and cannot be had.
    fn make_here(&mut self, stage: usize) {
        if self.stages[stage].state != State::Cached {
            return;
        }
        self.transition(stage, State::Waiting);
        self.stages[stage].outputs.clear();
        // It may come out as another one, and then what reads it has another key.
        for reader in 0..self.stages.len() {
            let run = &mut self.stages[reader];
            if run.upstream.contains(&stage) && matches!(run.state, State::Waiting | State::Ready) {
                run.key = None;
                run.looked_up = false;
                self.remote_cache.ask_again(reader);
            }
        }
    }

    fn send_key(&mut self, key: Digest) {
        if let Some(transfers) = self.remote_cache.transfers(self.store) {
            transfers.send(key);
            self.remote_cache.sending += 1;
        }
    }

    fn hear_answer(&mut self, stage: usize, key: Digest, found: Result<Option<ResultRecord>, RemoteError>) {
        // What was asked for a key that is another one by now is of no use.
        let is_asked = self.stages[stage].key.as_ref().is_some_and(|keyed| keyed.key == key);
        if !is_asked || !matches!(self.remote_cache.results[stage], RemoteState::Querying) {
            return;
        }
        self.remote_cache.results[stage] = match found {
            Ok(Some(record)) if self.fits(stage, &record) => {
                // A convenience for the next run; this one goes on without it.
                let _ = self.store.remember(&record);
                RemoteState::Found(Box::new(record))
            }
            Ok(Some(_)) => {
                let messages = vec![format!("the outputs in record {} are not those of this stage", key.short())];
                self.tell_refused(stage, messages, None);
                RemoteState::Absent
            }
            Ok(None) => RemoteState::Absent,
            Err(error) => {
                self.tell_failure(Some(stage), &error);
                RemoteState::Absent
            }
        };
    }

    /// Whether a record has the outputs that the stage would make. One with others was written by who knows whom.
    fn fits(&self, stage: usize, record: &ResultRecord) -> bool {
        let planned = &self.plan.stages[stage];
        let kind_of = |name: &str| record.outputs.get(name).map(|output| output.kind.as_str());
        record.outputs.len() == planned.outputs.len()
            && planned.outputs.iter().all(|output| kind_of(&output.name) == Some(output.kind.as_str()))
    }

    fn hear_progress(&mut self, stage: usize, progress: TransferProgress) {
        let TransferProgress { done, total } = progress;
        let said = WorkerEvent::Progress { unit: "bytes".to_owned(), done, total: Some(total), note: None };
        self.tell(RunEvent::Worker { stage: self.stages[stage].id.clone(), said });
    }

    fn hear_fetched(&mut self, stage: usize, key: Digest, fetched: Result<Pulled, RemoteError>, took: Duration) {
        match fetched {
            Ok(Pulled { files, bytes }) => {
                self.remote_cache.results[stage] = RemoteState::Local;
                let (id, remote) = (self.stages[stage].id.clone(), self.remote_cache.name());
                self.tell(RunEvent::ResultFetched {
                    stage: id,
                    key,
                    remote,
                    files,
                    bytes,
                    seconds: took.as_secs_f64(),
                });
            }
            Err(error) => {
                self.remote_cache.results[stage] = RemoteState::Absent;
                if error.is_of_one_result() {
                    // What cannot be had is not to be counted on by the next run.
                    let _ = self.store.unremember(&key);
                }
                self.tell_failure(Some(stage), &error);
                self.make_here(stage);
            }
        }
    }

    fn hear_sent(&mut self, key: Digest, sent: Result<Pushed, RemoteError>, took: Duration) {
        self.remote_cache.sending -= 1;
        match sent {
            Ok(Pushed { files, bytes, .. }) => {
                let _ = self.store.sent(&key);
                let stage = self.stage_of(&key);
                let remote = self.remote_cache.name();
                self.tell(RunEvent::ResultSent { stage, key, remote, files, bytes, seconds: took.as_secs_f64() });
            }
            Err(error) => {
                if !error.is_of_one_result() {
                    return self.tell_failure(None, &error);
                }
                // It is gone, or damaged: whoever rebuilds it sends it.
                let _ = self.store.sent(&key);
                let (stage, messages) = (self.stage_of(&key), crate::error::chain(&error));
                self.tell(RunEvent::ResultNotSent { stage, key, messages });
            }
        }
    }

    fn stage_of(&self, key: &Digest) -> Option<String> {
        let of_key = |run: &&super::stage_run::StageRun| run.key.as_ref().is_some_and(|keyed| keyed.key == *key);
        self.stages.iter().find(of_key).map(|run| run.id.clone())
    }

    /// Says what failed: of one result, or of the shared cache, which is then asked no more.
    fn tell_failure(&mut self, stage: Option<usize>, error: &RemoteError) {
        let messages = crate::error::chain(error);
        let help = error.help().map(str::to_owned);
        match (error, stage) {
            (RemoteError::Stopped, _) => {}
            (error, Some(stage)) if error.is_of_one_result() => self.tell_refused(stage, messages, help),
            _ if self.remote_cache.given_up => {}
            _ => {
                self.remote_cache.given_up = true;
                self.remote_cache.stop();
                let remote = self.remote_cache.name();
                self.tell(RunEvent::RemoteFailed { remote, messages, help });
            }
        }
    }

    fn tell_refused(&mut self, stage: usize, messages: Vec<String>, help: Option<String>) {
        if self.stopping == Stopping::No {
            let (stage, remote) = (self.stages[stage].id.clone(), self.remote_cache.name());
            self.tell(RunEvent::ResultRefused { stage, remote, messages, help });
        }
    }
}
