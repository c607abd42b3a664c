//! Serves newer results of an adapter as runs make them.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use engine::error::StageError;
use tokio::sync::oneshot;

use super::worker::Order;
use crate::inference::{Newer, Vocabulary, Watched};
use crate::render::{self, Failure};
use crate::terminal;

/// How long it waits before it looks again.
const PERIOD: Duration = Duration::from_secs(2);

/// Looks for newer results until `stop` is closed. What goes wrong is said once, and changes nothing of what is served.
pub(super) fn watch(mut watched: Watched, vocabulary: &Vocabulary, orders: &Sender<Order>, stop: &Receiver<()>) {
    let mut has_failed = false;
    while stop.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
        let found = watched
            .newer(vocabulary.facts())
            .and_then(|newer| newer.map_or(Ok(()), |newer| serve(newer, vocabulary, orders)));
        if let Err(failure) = &found
            && !has_failed
        {
            render::failure(failure);
        }
        has_failed = found.is_err();
    }
}

/// Has requests choose the newer result; those in progress are completed with the one that they began with.
fn serve(newer: Newer, vocabulary: &Vocabulary, orders: &Sender<Order>) -> Result<(), Failure> {
    let Newer { name, weights, facts } = newer;
    let (reply, loaded) = oneshot::channel();
    let is_ending = || Failure::from(StageError::internal("the model's thread has ended"));
    let sent = orders.send(Order::Load { adapter: Box::new(weights), reply });
    sent.map_err(|_| is_ending())?;
    let number = loaded.blocking_recv().map_err(|_| is_ending())??;
    let named = vocabulary.named(&name, number, &facts);
    let named = named.map_err(|error| StageError::bad_data(format!("`{name}` cannot be used")).with_source(error))?;
    if let Some(former) = vocabulary.put(named) {
        let sent = orders.send(Order::Unload { number: former.number });
        sent.map_err(|_| is_ending())?;
    }
    terminal::tell_line(format_args!("serving `{name}` as a run has just made it"));
    Ok(())
}
