//! What the machine gives and what this process took of it.

#![allow(dead_code, reason = "each bench uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::time::Duration;

/// Processor time of all threads that are alive, which the system counts in nanoseconds.
pub(crate) fn cpu_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let times = tasks.filter_map(|task| {
        let times = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        times.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

/// Processor time of the whole process, of threads that have ended too, which the system counts in hundredths of a
/// second.
pub(crate) fn process_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The program's name stands in parentheses and may hold anything.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok());
    Duration::from_millis(10 * ticks.sum::<u64>())
}

/// The most memory that was resident.
pub(crate) fn peak_rss_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// The most anonymous memory that this process has held since the sampler was started; the pages of files are not in
/// it.
pub(crate) struct MemorySampler {
    peak: Arc<AtomicU64>,
    _ends_with_it: Sender<()>,
}

impl MemorySampler {
    /// Looks a hundred times a second.
    pub(crate) fn start() -> Self {
        let peak = Arc::new(AtomicU64::new(0));
        let (_ends_with_it, end) = std::sync::mpsc::channel::<()>();
        let found = Arc::clone(&peak);
        std::thread::spawn(move || {
            while end.recv_timeout(Duration::from_millis(10)) == Err(RecvTimeoutError::Timeout) {
                found.fetch_max(anonymous_kib(), Ordering::Relaxed);
            }
        });
        Self { peak, _ends_with_it }
    }

    /// The peak so far.
    pub(crate) fn peak_mib(&self) -> f64 {
        self.peak.load(Ordering::Relaxed).max(anonymous_kib()) as f64 / 1024.0
    }
}

fn anonymous_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    anonymous.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}
