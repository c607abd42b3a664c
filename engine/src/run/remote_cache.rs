//! The shared cache of a run, and what is known of each stage's result in it.

use cache::{ResultRecord, Store};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::transfers::{TransferEvent, TransferQueue};
use crate::plan::Plan;
use crate::remote::RemoteSettings;

/// The shared cache of a run.
pub(super) struct RemoteCache {
    pub settings: Option<RemoteSettings>,
    /// There once it is first needed: a run that finds everything here needs none.
    transfers: Option<TransferQueue>,
    event_sender: UnboundedSender<TransferEvent>,
    events: UnboundedReceiver<TransferEvent>,
    pub results: Vec<RemoteState>,
    /// It failed, and is asked no more.
    pub given_up: bool,
    /// Results that are on their way out.
    pub sending: usize,
}

/// What is known of a stage's result in the shared cache.
pub(super) enum RemoteState {
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

impl RemoteCache {
    pub(super) fn new(settings: Option<RemoteSettings>, plan: &Plan) -> Self {
        let (event_sender, events) = unbounded_channel();
        let results = plan.stages.iter().map(|_| RemoteState::Unknown).collect();
        Self { settings, transfers: None, event_sender, events, results, given_up: false, sending: 0 }
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

    /// Makes a stage's result count as unknown: what was here turned out to be damaged.
    pub(super) fn ask_again(&mut self, stage: usize) {
        self.results[stage] = RemoteState::Unknown;
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
        matches!(self.results[stage], RemoteState::Querying | RemoteState::Fetching)
    }

    /// Whoever runs transfers, unless there is no shared cache or it failed.
    pub(super) fn transfers(&mut self, store: &Store) -> Option<&TransferQueue> {
        let settings = self.settings.as_ref().filter(|_| !self.given_up)?;
        Some(self.transfers.get_or_insert_with(|| {
            TransferQueue::new(settings.place.clone(), store.clone(), self.event_sender.clone())
        }))
    }
}
