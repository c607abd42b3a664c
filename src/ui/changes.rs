//! Tells a page when what it shows is no longer all there is.

use std::path::PathBuf;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use http_server::EventSource;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// How often it is looked.
const LOOK: Duration = Duration::from_millis(400);

/// Looks without news after which something is sent all the same, so that a connection that died is noticed.
const QUIET_LOOKS: u32 = 38;

/// The size and time of a file or folder, which change whenever something is added.
type Stamp = Option<(u64, SystemTime)>;

/// An event with the count of changes so far whenever a file or a folder has changed.
pub(super) struct Changes {
    path: PathBuf,
    last: Stamp,
    ticks: Interval,
    quiet: u32,
    changes: u64,
}

impl Changes {
    /// Changes of a path from now on. The first event comes at once.
    pub(super) fn of(path: PathBuf) -> Self {
        let mut ticks = interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { path, last: None, ticks, quiet: QUIET_LOOKS, changes: 0 }
    }

    fn stamp(&self) -> Stamp {
        let metadata = std::fs::metadata(&self.path).ok()?;
        Some((metadata.len(), metadata.modified().ok()?))
    }
}

impl EventSource for Changes {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<String>> {
        loop {
            ready!(self.ticks.poll_tick(context));
            let stamp = self.stamp();
            self.changes += u64::from(stamp != self.last);
            self.quiet += 1;
            if stamp != self.last || self.quiet > QUIET_LOOKS {
                (self.last, self.quiet) = (stamp, 0);
                return Poll::Ready(Some(self.changes.to_string()));
            }
        }
    }
}
