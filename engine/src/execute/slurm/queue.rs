//! The queue as it was seen last: asked once for all jobs of this engine, by one thread, seldom.
//!
//! A controller that does not answer leaves what was seen before; only an answer in which a job is missing says that it
//! is missing.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::client::Client;
use super::state::Seen;

/// How soon a job that is new, or was told to stop, is looked for.
const SOON: Duration = Duration::from_secs(1);

/// What is known of the jobs that somebody follows.
#[derive(Debug)]
pub(super) struct Queue {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    client: Arc<Client>,
    watched: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Watched {
    jobs: BTreeMap<String, Sighting>,
    /// How often each job's settings allow the queue to be asked.
    polls: BTreeMap<String, Duration>,
    /// When the next look is to be soon after this one.
    hurry: bool,
    /// Since when the controller has not answered, and its words.
    silent: Option<(Instant, String)>,
    asking: bool,
    closed: bool,
}

/// A job as it was seen last.
#[derive(Debug, Clone, Default)]
pub(super) struct Sighting {
    /// How it stood in the last answer that had it.
    pub seen: Option<Seen>,
    /// Answers in a row without it.
    pub missing: u32,
    /// Since when the controller has not answered, and its words.
    pub silent: Option<(Instant, String)>,
}

impl Queue {
    /// A queue in which nobody follows a job.
    pub(super) fn new(client: Arc<Client>) -> Self {
        Self { shared: Arc::new(Shared { client, watched: Mutex::default(), changed: Condvar::new() }) }
    }

    /// Begins to follow a job.
    pub(super) fn watch(&self, id: &str, poll: Duration) {
        let mut watched = self.shared.watched();
        watched.jobs.insert(id.to_owned(), Sighting::default());
        watched.polls.insert(id.to_owned(), poll);
        watched.hurry = true;
        if !watched.asking {
            watched.asking = true;
            let shared = Arc::clone(&self.shared);
            thread::spawn(move || shared.ask_again_and_again());
        }
        self.shared.changed.notify_all();
    }

    /// Ends it.
    pub(super) fn forget(&self, id: &str) {
        let mut watched = self.shared.watched();
        watched.jobs.remove(id);
        watched.polls.remove(id);
    }

    /// How a job was seen last.
    pub(super) fn sighting(&self, id: &str) -> Sighting {
        let watched = self.shared.watched();
        let mut sighting = watched.jobs.get(id).cloned().unwrap_or_default();
        sighting.silent = watched.silent.clone();
        sighting
    }

    /// Something is about to change: the next look is to be soon.
    pub(super) fn hurry(&self) {
        self.shared.watched().hurry = true;
        self.shared.changed.notify_all();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.watched().closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask_again_and_again(&self) {
        let mut wait = SOON;
        loop {
            let Some(hurried) = self.pause(wait) else { return };
            let ids: Vec<String> = self.watched().jobs.keys().cloned().collect();
            if ids.is_empty() {
                continue;
            }
            // Not under the lock: a controller that is down lets its callers wait.
            let answer = self.client.states(&ids);
            let mut watched = self.watched();
            let news = watched.take(&ids, answer);
            let longest = watched.polls.values().min().copied().unwrap_or(SOON);
            wait = if hurried || news { SOON } else { wait * 2 }.min(longest);
        }
    }

    /// Waits until the next look is due; whether somebody is in a hurry. `None` when the queue is closed.
    fn pause(&self, wait: Duration) -> Option<bool> {
        let until = Instant::now() + wait;
        let mut watched = self.watched();
        loop {
            if watched.closed {
                return None;
            }
            let now = Instant::now();
            // Those who hurry still leave the controller a moment.
            let due = if watched.hurry { until.min(now + SOON / 4) } else { until };
            if watched.hurry || now >= until {
                let hurried = std::mem::take(&mut watched.hurry);
                drop(watched);
                thread::sleep(due.saturating_duration_since(now));
                return Some(hurried);
            }
            let waited = self.changed.wait_timeout(watched, until - now);
            watched = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Watched {
    /// Takes in an answer; whether a job is in another way than before.
    fn take(&mut self, ids: &[String], answer: Result<Vec<(String, Seen)>, super::client::Refusal>) -> bool {
        let states: BTreeMap<String, Seen> = match answer {
            Ok(states) => states.into_iter().collect(),
            Err(refusal) => {
                let since = self.silent.take().map_or_else(Instant::now, |(since, _)| since);
                self.silent = Some((since, refusal.words()));
                return false;
            }
        };
        self.silent = None;
        let mut news = false;
        for id in ids {
            let Some(sighting) = self.jobs.get_mut(id) else { continue };
            match states.get(id) {
                Some(seen) => {
                    news |= sighting.seen.as_ref() != Some(seen);
                    sighting.seen = Some(seen.clone());
                    sighting.missing = 0;
                }
                None => sighting.missing += 1,
            }
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::super::client::Refusal;
    use super::*;

    fn seen(state: &str) -> Seen {
        Seen { state: state.into(), nodes: "n1".into(), reason: "None".into() }
    }

    #[test]
    fn a_controller_that_is_down_says_nothing_about_jobs() {
        let ids = ["7".to_owned()];
        let mut watched = Watched::default();
        watched.jobs.insert("7".into(), Sighting::default());
        assert!(watched.take(&ids, Ok(vec![("7".into(), seen("RUNNING"))])));
        assert!(!watched.take(&ids, Err(Refusal::NotNow("down".into()))));
        assert_eq!(watched.jobs["7"].seen, Some(seen("RUNNING")));
        assert_eq!((watched.jobs["7"].missing, watched.silent.is_some()), (0, true));
        assert!(!watched.take(&ids, Ok(Vec::new())));
        assert_eq!((watched.jobs["7"].missing, watched.silent.is_some()), (1, false));
        watched.take(&ids, Ok(vec![("7".into(), seen("RUNNING"))]));
        assert_eq!(watched.jobs["7"].missing, 0);
    }
}
