//! The thread by which a run tells its trackers while it goes on. It reads what is recorded, as any other program
//! could, and the run never waits for it but a moment at its end.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender as Channel, channel};
use std::time::{Duration, Instant};

use engine::home::Home;
use engine::track::Tracker;

use super::story::Story;
use super::{Link, Sent, TrackError, all_sent, causes, lock, not_all_sent, send_run, trackers_of, tracking, unsent};

/// How often what is new is sent.
const INTERVAL: Duration = Duration::from_secs(1);

/// The longest pause after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How long a run waits at its end for what is being sent.
const AT_THE_END: Duration = Duration::from_secs(2);

/// Sends a run while it goes on, and what earlier ones have left.
pub(crate) struct Sender {
    end: Channel<()>,
    ended: Receiver<News>,
}

/// What the thread has to say once the run has ended.
enum News {
    /// What of this run could not be sent, in words.
    Missed(Vec<String>),
    /// What earlier runs had left is sent, or cannot be.
    RestIsDone,
}

impl Sender {
    /// Begins, where there is anybody to tell.
    pub(crate) fn begin(home: &Home, run: &str, trackers: &[Tracker]) -> Option<Self> {
        if trackers.is_empty() && unsent(home).is_empty() {
            return None;
        }
        let (end, ends) = channel();
        let (tells, ended) = channel();
        let (home, run, trackers) = (home.clone(), run.to_owned(), trackers.to_vec());
        std::thread::spawn(move || {
            let missed = match send(&home, &run, &trackers, &ends) {
                Ok(missed) => missed,
                Err(error) => vec![format!("the run was not sent to its trackers: {error}")],
            };
            // The run is over where nobody hears it.
            let _ = tells.send(News::Missed(missed));
            send_rest(&home, &run);
            let _ = tells.send(News::RestIsDone);
        });
        Some(Self { end, ended })
    }

    /// Ends with the run: gives, in words, what could not be sent. What is still on its way when the program ends is
    /// sent later.
    pub(crate) fn end(self) -> Vec<String> {
        let _ = self.end.send(());
        let until = Instant::now() + AT_THE_END;
        let next = || self.ended.recv_timeout(until.saturating_duration_since(Instant::now()));
        let Ok(News::Missed(missed)) = next() else { return vec!["a tracker has not responded yet".to_owned()] };
        if missed.is_empty() {
            // The trackers are there. What does not go out now is sent another time.
            let _ = next();
        }
        missed
    }
}

/// A tracker of this run, and how it went so far.
struct Told {
    tracker: Tracker,
    link: Option<(Link, Story)>,
    /// What went wrong last, and how long nothing is tried after it.
    failed: Option<(TrackError, Instant)>,
    pause: Duration,
    all: bool,
}

fn send(home: &Home, run: &str, trackers: &[Tracker], ends: &Receiver<()>) -> io::Result<Vec<String>> {
    let folder = home.run(run);
    let mut told: Vec<Told> = trackers.iter().cloned().map(Told::new).collect();
    let mut lock_of_run = None;
    if !told.is_empty() {
        // Until all is sent: this process may be killed at any moment.
        not_all_sent(home, run, trackers)?;
        std::fs::create_dir_all(tracking(&folder))?;
        lock_of_run = lock(&folder)?;
    }
    let mut rest = unsent(home).into_iter().filter(|other| other != run);
    loop {
        let is_last = ends.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout);
        for told in &mut told {
            told.go_on(&folder, is_last);
        }
        if is_last {
            break;
        }
        if let Some(other) = rest.next() {
            // Its trackers' failures are told by the command that sends it.
            let _ = send_run(home, &other, &trackers_of(home, &other));
        }
    }
    if lock_of_run.is_some() && told.iter().all(|told| told.all) {
        all_sent(home, run)?;
    }
    Ok(told.iter().filter_map(Told::missed).collect())
}

/// What earlier runs have left, for as long as this process is there.
fn send_rest(home: &Home, run: &str) {
    for other in unsent(home).into_iter().filter(|other| other != run) {
        let _ = send_run(home, &other, &trackers_of(home, &other));
    }
}

impl Told {
    fn new(tracker: Tracker) -> Self {
        Self { tracker, link: None, failed: None, pause: INTERVAL, all: false }
    }

    /// Sends what is new. At the end of the run nobody waits for a tracker that was down a moment ago.
    fn go_on(&mut self, folder: &std::path::Path, is_last: bool) {
        if self.all || self.failed.as_ref().is_some_and(|(_, until)| is_last || Instant::now() < *until) {
            return;
        }
        match self.send(folder) {
            Ok(sent) => {
                self.all = matches!(sent, Sent::All(_));
                (self.failed, self.pause) = (None, INTERVAL);
            }
            Err(error) => {
                self.failed = Some((error, Instant::now() + self.pause));
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    fn send(&mut self, folder: &std::path::Path) -> Result<Sent, TrackError> {
        if self.link.is_none() {
            let pipeline = Story::open(folder, 0).map_err(TrackError::Disk)?.plan.pipeline;
            let link = Link::open(&self.tracker, &pipeline, folder)?;
            let story = Story::open(folder, link.skips()).map_err(TrackError::Disk)?;
            self.link = Some((link, story));
        }
        let Some((link, story)) = &mut self.link else { return Ok(Sent::SoFar) };
        story.read_on().map_err(TrackError::Disk)?;
        link.send(story)
    }

    /// What the run has to say of it at its end.
    fn missed(&self) -> Option<String> {
        let name = self.tracker.name();
        match &self.failed {
            Some((error, _)) => {
                Some(format!("{name} does not have all of this run: {}", causes(error).collect::<Vec<_>>().join(": ")))
            }
            None if self.all => None,
            None => Some(format!("{name} does not have all of this run yet")),
        }
    }
}
