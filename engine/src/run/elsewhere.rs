//! The shared cache of a run, and what is known of each stage's result in it.

use cache::{ResultRecord, Store};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::courier::{Courier, Delivery};
use crate::plan::Plan;
use crate::remote::RemoteSettings;

/// The shared cache of a run.
pub(super) struct Elsewhere {
    pub settings: Option<RemoteSettings>,
    /// There once it is first needed: a run that finds everything here needs none.
    courier: Option<Courier>,
    deliverer: UnboundedSender<Delivery>,
    deliveries: UnboundedReceiver<Delivery>,
    pub results: Vec<Abroad>,
    /// It failed, and is asked no more.
    pub given_up: bool,
    /// Results that are on their way out.
    pub sending: usize,
}

/// What is known of a stage's result in the shared cache.
pub(super) enum Abroad {
    NotAsked,
    Asked,
    /// It has none, or one that cannot be used.
    Nothing,
    /// It has one, whose files are not here.
    Has(Box<ResultRecord>),
    /// Its files are on their way.
    Coming,
    /// Its files are here.
    Here,
}

impl Elsewhere {
    pub(super) fn new(settings: Option<RemoteSettings>, plan: &Plan) -> Self {
        let (deliverer, deliveries) = unbounded_channel();
        let results = plan.stages.iter().map(|_| Abroad::NotAsked).collect();
        Self { settings, courier: None, deliverer, deliveries, results, given_up: false, sending: 0 }
    }

    /// The next that is heard of it.
    pub(super) async fn hear(&mut self) -> Delivery {
        self.deliveries.recv().await.expect("this holds a sender itself")
    }

    /// Whether results are still on their way out.
    pub(super) fn is_sending(&self) -> bool {
        self.sending > 0
    }

    /// Ends all errands: what was to be sent is noted, and sent by the next run.
    pub(super) fn stop(&self) {
        self.courier.iter().for_each(Courier::stop);
    }

    /// Makes a stage's result count as unknown: what was here turned out to be damaged.
    pub(super) fn ask_again(&mut self, stage: usize) {
        self.results[stage] = Abroad::NotAsked;
    }

    /// What messages call it.
    pub(super) fn name(&self) -> String {
        let named = self.settings.as_ref().map(|settings| settings.place.to_string());
        // Noted by a run that had one.
        named.unwrap_or_else(|| "a shared cache".to_owned())
    }

    /// The shared cache, where a stage's result lies there and not here.
    pub(super) fn holds(&self, stage: usize) -> Option<String> {
        matches!(self.results[stage], Abroad::Has(_)).then(|| self.name())
    }

    /// Whether an answer, or files, are on their way for a stage.
    pub(super) fn is_awaited(&self, stage: usize) -> bool {
        matches!(self.results[stage], Abroad::Asked | Abroad::Coming)
    }

    /// Whoever runs errands, unless there is no shared cache or it failed.
    pub(super) fn courier(&mut self, store: &Store) -> Option<&Courier> {
        let settings = self.settings.as_ref().filter(|_| !self.given_up)?;
        Some(
            self.courier
                .get_or_insert_with(|| Courier::new(settings.place.clone(), store.clone(), self.deliverer.clone())),
        )
    }
}
