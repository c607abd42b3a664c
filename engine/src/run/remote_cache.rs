//! The shared cache of a run, and what is known of each stage's result in it.
//!
//! A record comes first, and is small. It says what a result is, which is all that the keys of the stages behind it
//! need. The files come only when a stage that has to run reads them, when they are published, or when nothing in the
//! plan reads them, since then they are what the run is for. So a machine that finds a trained adapter does not fetch
//! the model it was trained from.

use std::collections::HashSet;

use cache::remote::RemoteError;
use cache::{Digest, ResultRecord, Store};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::outcome::{RunOptions, Sharing};
use super::transfers::{TransferEvent, TransferQueue};
use crate::plan::Plan;
use crate::remote::RemoteSettings;

/// The shared cache of a run.
pub(super) struct RemoteCache {
    settings: Option<RemoteSettings>,
    store: Store,
    /// There once it is first needed: a run that finds everything here needs none.
    transfers: Option<TransferQueue>,
    event_sender: UnboundedSender<TransferEvent>,
    events: UnboundedReceiver<TransferEvent>,
    results: Vec<RemoteState>,
    /// The stages of whose results the run has to have the files: they are published, or nothing in the plan reads
    /// them and it is not for the runs of other machines.
    wanted: Vec<bool>,
    /// It failed, and is asked no more.
    given_up: bool,
    /// Whether what is made here is for the runs of other machines.
    hands_over: bool,
    /// Results that are on their way out.
    sending: usize,
}

/// What is known of a stage's result in the shared cache.
enum RemoteState {
    Unknown,
    Querying,
    /// It has none, or one that cannot be used.
    Absent,
    /// It has one, whose files are not here.
    Found(Box<ResultRecord>),
    /// Its files are on their way.
    Fetching,
    /// Its files are here.
    Local,
}

/// What a stage without a result of its own here does next.
pub(super) enum Look {
    /// It runs.
    Nothing,
    /// It waits for an answer, or for files.
    Wait,
    /// It waits for files that have just been sent for.
    Fetching,
    /// It has a result, whose files nobody has to read.
    Known(ResultRecord),
}

/// Whether the files of a result that a stage reads are here.
pub(super) enum Files {
    Here,
    Coming,
    /// They have just been sent for.
    Fetching,
    /// They were counted on, and cannot be had.
    Lost,
}

impl RemoteCache {
    pub(super) fn new(plan: &Plan, options: &RunOptions, store: &Store) -> Self {
        let (event_sender, events) = unbounded_channel();
        let mut wanted = vec![options.sharing == Sharing::SparesWork; plan.stages.len()];
        plan.stages.iter().flat_map(|stage| &stage.inputs).for_each(|input| wanted[input.position] = false);
        let published: HashSet<&str> = plan.publish.iter().map(|publish| publish.stage.as_str()).collect();
        let stages = plan.stages.iter().zip(&mut wanted);
        stages.for_each(|(stage, wanted)| *wanted |= published.contains(stage.id.as_str()));
        let results = plan.stages.iter().map(|_| RemoteState::Unknown).collect();
        Self {
            settings: options.remote.clone(),
            store: store.clone(),
            transfers: None,
            event_sender,
            events,
            results,
            wanted,
            given_up: false,
            hands_over: options.sharing == Sharing::HandsOver,
            sending: 0,
        }
    }

    /// The next that is heard of it.
    pub(super) async fn hear(&mut self) -> TransferEvent {
        self.events.recv().await.expect("this holds a sender itself")
    }

    /// Whether results are still on their way out.
    pub(super) fn is_sending(&self) -> bool {
        self.sending > 0
    }

    /// Ends all transfers: what was to be sent is noted, and sent by the next run.
    pub(super) fn stop(&self) {
        self.transfers.iter().for_each(TransferQueue::stop);
    }

    /// It failed, and is asked no more; false where that is known.
    pub(super) fn give_up(&mut self) -> bool {
        self.stop();
        !std::mem::replace(&mut self.given_up, true)
    }

    /// What messages call it.
    pub(super) fn name(&self) -> String {
        let named = self.settings.as_ref().map(|settings| settings.place.to_string());
        // Noted by a run that had one.
        named.unwrap_or_else(|| "a shared cache".to_owned())
    }

    /// The shared cache, where a stage's result is there and not here.
    pub(super) fn holds(&self, stage: usize) -> Option<String> {
        matches!(self.results[stage], RemoteState::Found(_)).then(|| self.name())
    }

    /// Whether an answer, or files, are on their way for a stage.
    pub(super) fn is_awaited(&self, stage: usize) -> bool {
        self.is_asked(stage) || matches!(self.results[stage], RemoteState::Fetching)
    }

    /// Whether an answer is on its way for a stage.
    pub(super) fn is_asked(&self, stage: usize) -> bool {
        matches!(self.results[stage], RemoteState::Querying)
    }

    /// Looks for the result of a stage that has none here.
    pub(super) fn look(&mut self, stage: usize, key: Digest) -> Look {
        match &self.results[stage] {
            RemoteState::Absent | RemoteState::Local => Look::Nothing,
            RemoteState::Querying | RemoteState::Fetching => Look::Wait,
            RemoteState::Found(record) if !self.wanted[stage] => Look::Known((**record).clone()),
            RemoteState::Found(_) => {
                if self.fetch(stage) {
                    Look::Fetching
                } else {
                    Look::Nothing
                }
            }
            RemoteState::Unknown => {
                if let Some(record) = self.store.remembered(&key) {
                    self.results[stage] = RemoteState::Found(Box::new(record));
                    return self.look(stage, key);
                }
                let Some(transfers) = self.transfers() else { return Look::Nothing };
                transfers.ask(stage, key);
                self.results[stage] = RemoteState::Querying;
                Look::Wait
            }
        }
    }

    /// Sends for the files of a result that is read, unless they are here.
    pub(super) fn require(&mut self, stage: usize) -> Files {
        match &self.results[stage] {
            RemoteState::Fetching => Files::Coming,
            RemoteState::Found(_) => {
                if self.fetch(stage) {
                    Files::Fetching
                } else {
                    Files::Lost
                }
            }
            RemoteState::Unknown | RemoteState::Querying | RemoteState::Absent | RemoteState::Local => Files::Here,
        }
    }

    /// Takes in whether there is a result that can be used.
    pub(super) fn answered(&mut self, stage: usize, found: Option<ResultRecord>) {
        self.results[stage] = match found {
            Some(record) => {
                // A convenience for the next run; this one goes on without it.
                let _ = self.store.remember(&record);
                RemoteState::Found(Box::new(record))
            }
            None => RemoteState::Absent,
        };
    }

    /// Takes in whether the files of a result could be had.
    pub(super) fn fetched(&mut self, stage: usize, key: &Digest, failed: Option<&RemoteError>) {
        self.results[stage] = if failed.is_some() { RemoteState::Absent } else { RemoteState::Local };
        if failed.is_some_and(RemoteError::is_of_one_result) {
            // What cannot be had is not to be counted on by the next run.
            let _ = self.store.unremember(key);
        }
    }

    /// Makes a stage's result count as unknown: what was here turned out to be damaged.
    pub(super) fn ask_again(&mut self, stage: usize) {
        self.results[stage] = RemoteState::Unknown;
    }

    /// Notes that a result is to be sent, if the pipeline's results are to be shared. Before the result is recorded: it
    /// is never here, found by every later run, and not on its way.
    pub(super) fn note_to_send(&self, key: &Digest) {
        if let Some(settings) = self.pushed_to() {
            // Without the note a push that is cut off is not taken up; the push itself needs none.
            let _ = self.store.to_send(key, &settings.place.to_string());
        }
    }

    /// Sends a result that was here already, if other machines count on having it from this run.
    pub(super) fn hand_over(&mut self, stage: usize, key: Digest) {
        if self.hands_over && matches!(self.results[stage], RemoteState::Unknown | RemoteState::Absent) {
            self.note_to_send(&key);
            self.send(key);
        }
    }

    /// Sends a result, if the pipeline's results are to be shared.
    pub(super) fn send(&mut self, key: Digest) {
        if self.pushed_to().is_some()
            && let Some(transfers) = self.transfers()
        {
            transfers.send(key);
            self.sending += 1;
        }
    }

    /// Sends what earlier runs could not.
    pub(super) fn send_what_is_left(&mut self) {
        let Some(place) = self.pushed_to().map(|settings| settings.place.to_string()) else { return };
        for key in self.store.outbox(&place).unwrap_or_default() {
            // A run was killed between its note and its result, or is there just now and will send it.
            if self.store.last_use(&key).is_some() {
                self.send(key);
            }
        }
    }

    /// Takes in that a result is on its way no more: it is there, or it failed.
    pub(super) fn sent(&mut self, key: &Digest, failed: Option<&RemoteError>) {
        self.sending -= 1;
        if failed.is_none_or(|error| !error.stays_to_be_sent()) {
            let _ = self.store.sent(key);
        }
    }

    /// Where results are sent to, if they are.
    fn pushed_to(&self) -> Option<&RemoteSettings> {
        self.settings.as_ref().filter(|settings| settings.push)
    }

    /// Sends for the files of a result; false where that is not possible.
    fn fetch(&mut self, stage: usize) -> bool {
        let before = std::mem::replace(&mut self.results[stage], RemoteState::Absent);
        let RemoteState::Found(record) = before else { return false };
        let Some(transfers) = self.transfers() else { return false };
        transfers.fetch(stage, *record);
        self.results[stage] = RemoteState::Fetching;
        true
    }

    /// Whoever runs transfers, unless there is no shared cache or it failed.
    fn transfers(&mut self) -> Option<&TransferQueue> {
        let settings = self.settings.as_ref().filter(|_| !self.given_up)?;
        Some(self.transfers.get_or_insert_with(|| {
            TransferQueue::new(settings.place.clone(), self.store.clone(), self.event_sender.clone())
        }))
    }
}
