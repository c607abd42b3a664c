//! The recorder: a log per thread, and spans that write into the one of their thread.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::log::{Kind, ThreadLog};
use crate::summary::{self, Summary};
use crate::trace::{self, Process};
use crate::work::{Limits, Work};

/// Events that are kept; the totals go on when there is no more room. An event takes 40 bytes here and about 130 in a
/// trace.
const MOST_EVENTS: usize = 1 << 18;

/// Of these, what is left for phases when the kernels have filled the rest: they are few, and say the most.
const RESERVED_FOR_PHASES: usize = 1 << 15;

/// Records spans, or nothing. Cheap to clone and to pass along.
#[derive(Clone, Default)]
pub struct Profile(Option<Arc<Recorder>>);

struct Recorder {
    began: Instant,
    /// The same by the clock on the wall, in microseconds since 1970.
    began_unix_micros: u64,
    logs: Mutex<Vec<Arc<Mutex<ThreadLog>>>>,
    events: AtomicUsize,
    limits: OnceLock<Limits>,
}

thread_local! {
    /// The logs of this thread, by the address of their recorder. There is one, but in tests.
    static LOGS: RefCell<Vec<(usize, Arc<Mutex<ThreadLog>>)>> = const { RefCell::new(Vec::new()) };
}

impl Profile {
    /// Records nothing.
    pub const OFF: Self = Self(None);

    /// Begins to record. The thread that calls this is the main one: shares of the time are of its time.
    pub fn recording() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let recorder = Arc::new(Recorder {
            began: Instant::now(),
            began_unix_micros: unix.as_micros() as u64,
            logs: Mutex::default(),
            events: AtomicUsize::new(0),
            limits: OnceLock::new(),
        });
        // Its log is the first one.
        recorder.with_log(|_| ());
        Self(Some(recorder))
    }

    /// Whether anything is recorded.
    pub fn is_recording(&self) -> bool {
        self.0.is_some()
    }

    /// A part of the work, until the span is dropped.
    #[inline]
    pub fn phase(&self, name: &'static str) -> Span<'_> {
        self.span(Kind::Phase, name, Work::default)
    }

    /// An operation of known size, until the span is dropped. `work` is called only where something is recorded.
    #[inline]
    pub fn kernel(&self, name: &'static str, work: impl FnOnce() -> Work) -> Span<'_> {
        self.span(Kind::Kernel, name, work)
    }

    #[inline]
    fn span(&self, kind: Kind, name: &'static str, work: impl FnOnce() -> Work) -> Span<'_> {
        let Some(recorder) = &self.0 else { return Span { open: None, stays: PhantomData } };
        let depth = recorder.with_log(|log| log.open(kind, name, work(), recorder.now()));
        Span { open: Some((recorder, depth)), stays: PhantomData }
    }

    /// Says what the machine can do. The first word counts.
    pub fn set_limits(&self, limits: impl FnOnce() -> Limits) {
        if let Some(recorder) = &self.0 {
            recorder.limits.get_or_init(limits);
        }
    }

    /// What was recorded up to now.
    pub fn finish(&self) -> Option<Recording> {
        let recorder = self.0.as_ref()?;
        Some(Recording { recorder: Arc::clone(recorder), nanoseconds: recorder.now() })
    }
}

impl Recorder {
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Calls a function with this thread's log.
    fn with_log<T>(self: &Arc<Self>, run: impl FnOnce(&mut ThreadLog) -> T) -> T {
        let id = Arc::as_ptr(self) as usize;
        LOGS.with_borrow_mut(|logs| {
            let known = logs.iter().position(|(recorder, _)| *recorder == id);
            let at = known.unwrap_or_else(|| {
                // An address can be that of a recorder that is gone. Its logs are held by this list alone.
                logs.retain(|(_, log)| Arc::strong_count(log) > 1);
                logs.push((id, self.new_log()));
                logs.len() - 1
            });
            // Nobody else takes it before the recording ends.
            run(&mut logs[at].1.lock().unwrap_or_else(PoisonError::into_inner))
        })
    }

    fn new_log(&self) -> Arc<Mutex<ThreadLog>> {
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let name = std::thread::current().name().map(str::to_owned);
        let name = name.unwrap_or_else(|| format!("thread {}", logs.len()));
        let log = Arc::new(Mutex::new(ThreadLog::new(name)));
        logs.push(Arc::clone(&log));
        log
    }

    fn has_room(&self, kind: Kind) -> bool {
        let most = match kind {
            Kind::Phase => MOST_EVENTS,
            Kind::Kernel => MOST_EVENTS - RESERVED_FOR_PHASES,
        };
        if self.events.load(Ordering::Relaxed) >= most {
            return false;
        }
        self.events.fetch_add(1, Ordering::Relaxed) < most
    }
}

/// What is done until this is dropped, on the thread that made it.
#[must_use = "a span ends when it is dropped"]
pub struct Span<'a> {
    open: Option<(&'a Arc<Recorder>, usize)>,
    /// A span belongs to its thread.
    stays: PhantomData<*const ()>,
}

impl Drop for Span<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some((recorder, depth)) = self.open {
            let now = recorder.now();
            recorder.with_log(|log| log.close(depth, now, |kind| recorder.has_room(kind)));
        }
    }
}

/// What a [`Profile`] has recorded.
pub struct Recording {
    recorder: Arc<Recorder>,
    nanoseconds: u64,
}

impl Recording {
    /// The totals.
    pub fn summary(&self) -> Summary {
        let limits = self.recorder.limits.get().copied();
        self.with_logs(|logs| summary::of(logs, self.nanoseconds, limits))
    }

    /// The events as lines of a trace, below a process of this number and name; times count from `origin_unix_micros`.
    pub fn trace(&self, process: &Process, origin_unix_micros: u64) -> Vec<String> {
        let offset = self.recorder.began_unix_micros.saturating_sub(origin_unix_micros);
        self.with_logs(|logs| trace::lines(logs, process, offset))
    }

    fn with_logs<T>(&self, run: impl FnOnce(&[&ThreadLog]) -> T) -> T {
        let logs = self.recorder.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let held: Vec<_> = logs.iter().map(|log| log.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        run(&held.iter().map(|log| &**log).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_asked_for_where_nothing_is_recorded() {
        let _span = Profile::OFF.kernel("k", || panic!("not asked"));
        assert!(Profile::OFF.finish().is_none());
    }

    #[test]
    fn threads_have_logs_of_their_own_and_recorders_do_not_mix() {
        let (one, other) = (Profile::recording(), Profile::recording());
        let _outer = one.phase("outer");
        drop(other.phase("elsewhere"));
        std::thread::scope(|scope| {
            scope.spawn(|| drop(one.phase("beside")));
        });
        let names = |profile: &Profile| {
            let recording = profile.finish().map(|recording| recording.summary());
            recording.map(|summary| summary.phases.iter().map(|row| row.name.clone()).collect::<Vec<_>>())
        };
        // The outer one is open still.
        assert_eq!(names(&one), Some(vec!["beside".to_owned()]));
        assert_eq!(names(&other), Some(vec!["elsewhere".to_owned()]));
    }

    #[test]
    fn events_are_bounded_and_totals_are_not() {
        let profile = Profile::recording();
        let calls = MOST_EVENTS + 10;
        for _ in 0..calls {
            drop(profile.kernel("k", || Work::values(1)));
        }
        drop(profile.phase("after"));
        let recording = profile.finish().expect("it records");
        let summary = recording.summary();
        assert_eq!(summary.kernels[0].calls, calls as u64);
        assert_eq!(summary.kernels[0].bytes, 4 * calls as u64);
        assert_eq!(summary.events_left_out, 10 + RESERVED_FOR_PHASES as u64);
        let trace = recording.trace(&Process { number: 1, name: "p".to_owned() }, 0);
        assert!(trace.iter().any(|line| line.contains("\"after\"")), "a phase has its place");
    }
}
