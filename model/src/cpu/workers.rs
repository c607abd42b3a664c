//! The threads of a `cpu` kernel set: they run the parts of one region of work after another.
//!
//! A training step has thousands of regions, many of a few microseconds, one right after the other. So a thread that
//! has run out of parts watches for the next region for a moment and only then goes to sleep, whence waking it takes a
//! system call and about as long as a small region. The calling thread is one of the threads; nothing is allocated for
//! a region.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread without work watches before it sleeps: about what waking it costs.
const WATCH: Duration = Duration::from_micros(50);

/// Threads that run regions of work together with the thread that calls them.
pub(super) struct Workers {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    /// Held by the thread whose region runs.
    region: Mutex<()>,
}

/// What the threads see of each other.
struct Shared {
    gate: Gate,
    /// The next part to be run; beyond the last one there are none left.
    next: AtomicUsize,
    /// Written by the caller while the gate is closed and nobody is inside, read by who is inside.
    job: UnsafeCell<Job>,
    /// What the first part that panicked said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Whether a helper sleeps, or is about to.
    asleep: Vec<AtomicBool>,
}

// SAFETY: all but `job` is for threads to share, and the gate keeps its only writer and its readers apart.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is to what threads may share, and is read only while its owner waits.
unsafe impl Send for Shared {}

/// A region of work.
struct Job {
    run: *const (dyn Fn(usize) + Sync),
    parts: usize,
    caller: Option<Thread>,
}

/// Lets helpers into a region, and tells when all have left: the number of the region, how many are inside, and three
/// flags.
struct Gate(AtomicU64);

/// Whether helpers may enter.
const OPEN: u64 = 1;
/// Whether the caller sleeps until the last one has left.
const AWAITED: u64 = 2;
/// Whether helpers are to end.
const ENDED: u64 = 4;
/// One helper inside.
const INSIDE: u64 = 8;
const ALL_INSIDE: u64 = (1 << 32) - INSIDE;
/// One region.
const REGION: u64 = 1 << 32;

impl Gate {
    fn region(state: u64) -> u64 {
        state / REGION
    }

    /// Lets helpers into the next region. The gate is closed and nobody inside.
    fn open(&self) {
        let state = self.0.load(Ordering::Relaxed);
        // `SeqCst`, here and where a helper falls asleep: either it sees the new region or the caller sees that it
        // sleeps.
        self.0.store((Self::region(state) + 1).wrapping_mul(REGION) | OPEN, Ordering::SeqCst);
    }

    /// Enters a region, unless it is closed.
    fn enter(&self, region: u64) -> bool {
        let entered = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, |state| {
            (Self::region(state) == region && state & OPEN != 0).then_some(state + INSIDE)
        });
        entered.is_ok()
    }

    /// Leaves the region.
    ///
    /// # Safety
    /// The thread is inside, and touches the job no more.
    unsafe fn leave(&self, job: *const Job) {
        let mut state = self.0.load(Ordering::Relaxed);
        loop {
            let wakes = state & AWAITED != 0 && state & ALL_INSIDE == INSIDE;
            // SAFETY: this thread is inside still; once it has left, the job may be another.
            let caller = if wakes { unsafe { (*job).caller.clone() } } else { None };
            match self.0.compare_exchange_weak(state, state - INSIDE, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => {
                    caller.as_ref().inspect(|caller| caller.unpark());
                    return;
                }
                Err(found) => state = found,
            }
        }
    }

    /// Lets nobody in any more and waits until all have left.
    fn close(&self) {
        let state = self.0.fetch_and(!OPEN, Ordering::Acquire);
        if state & ALL_INSIDE == 0 {
            return;
        }
        let is_empty = || self.0.load(Ordering::Acquire) & ALL_INSIDE == 0;
        if watch(is_empty) {
            return;
        }
        self.0.fetch_or(AWAITED, Ordering::Relaxed);
        while !is_empty() {
            std::thread::park();
        }
    }
}

impl Workers {
    /// So many threads, the caller of [`Workers::each`] being one of them.
    ///
    /// # Errors
    /// Fails if the system gives no threads.
    pub(super) fn new(threads: usize) -> io::Result<Self> {
        let helpers = threads.saturating_sub(1);
        let nothing: &'static (dyn Fn(usize) + Sync) = &|_| ();
        let shared = Shared {
            gate: Gate(AtomicU64::new(0)),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(Job { run: nothing, parts: 0, caller: None }),
            panic: Mutex::new(None),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
        };
        let mut workers =
            Self { shared: Arc::new(shared), helpers: Vec::with_capacity(helpers), region: Mutex::new(()) };
        for index in 0..helpers {
            let shared = Arc::clone(&workers.shared);
            let helper = std::thread::Builder::new().name(format!("cpu-{}", index + 1));
            // Those that were started before end when `workers` is dropped.
            workers.helpers.push(helper.spawn(move || shared.help(index))?);
        }
        Ok(workers)
    }

    /// Number of threads, the caller's being one of them.
    pub(super) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs a function for each of `0 .. parts` and returns when all have run. Parts begin in their order, on whatever
    /// thread is free.
    ///
    /// A part that calls this in turn runs all of that on its own thread, and so does a second thread that calls it
    /// meanwhile.
    ///
    /// # Panics
    /// With what a part panics with; parts that no thread had begun are left out.
    pub(super) fn each(&self, parts: usize, run: impl Fn(usize) + Sync) {
        let region = match self.region.try_lock() {
            Ok(region) => Some(region),
            // A region leaves everything in order whatever it ends with.
            Err(TryLockError::Poisoned(region)) => Some(region.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let Some(region) = region.filter(|_| parts > 1 && !self.helpers.is_empty()) else {
            return (0..parts).for_each(run);
        };
        let panic = self.run_region(parts, &run);
        drop(region);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Runs a region and returns what one of its parts panicked with.
    fn run_region<'a>(&self, parts: usize, run: &'a (dyn Fn(usize) + Sync + 'a)) -> Option<Box<dyn Any + Send>> {
        let run: *const (dyn Fn(usize) + Sync + 'a) = run;
        // SAFETY: only the lifetime changes. It is called by who is inside the gate, and that is nobody when this
        // returns.
        let run =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + 'a), *const (dyn Fn(usize) + Sync)>(run) };
        let Shared { gate, next, job, .. } = &*self.shared;
        // SAFETY: the gate is closed, nobody is inside, and this thread has the lock on regions.
        unsafe { *job.get() = Job { run, parts, caller: Some(std::thread::current()) } };
        next.store(0, Ordering::Relaxed);
        gate.open();
        self.wake(parts - 1);
        // SAFETY: the job was written by this thread and lives until the gate is closed.
        unsafe { self.shared.run_parts(job.get()) };
        gate.close();
        self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Wakes as many helpers as are wanted beside those that are awake.
    fn wake(&self, wanted: usize) {
        let awake = self.shared.asleep.iter().filter(|asleep| !asleep.load(Ordering::SeqCst)).count();
        let helpers = self.helpers.iter().zip(&self.shared.asleep);
        let woken = helpers.filter(|(_, asleep)| asleep.swap(false, Ordering::SeqCst));
        woken.take(wanted.saturating_sub(awake)).for_each(|(helper, _)| helper.thread().unpark());
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shared.gate.0.fetch_or(ENDED, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            helper.join().expect("a helper catches what its parts panic with");
        }
    }
}

impl Shared {
    /// What a helper does all its life.
    fn help(&self, index: usize) {
        let mut served = 0;
        loop {
            let Some(region) = self.next_region(index, served) else { return };
            if self.gate.enter(region) {
                // SAFETY: this thread is inside from here on, and until it leaves the job stays.
                unsafe {
                    self.run_parts(self.job.get());
                    self.gate.leave(self.job.get());
                }
            }
            served = region;
        }
    }

    /// Waits for another region than the one that was served last; none when there will be no more.
    fn next_region(&self, index: usize, served: u64) -> Option<u64> {
        let state = || self.gate.0.load(Ordering::SeqCst);
        let has_changed = || Gate::region(state()) != served || state() & ENDED != 0;
        if !watch(has_changed) {
            let asleep = &self.asleep[index];
            asleep.store(true, Ordering::SeqCst);
            while !has_changed() {
                std::thread::park();
            }
            asleep.store(false, Ordering::SeqCst);
        }
        let state = state();
        (state & ENDED == 0).then_some(Gate::region(state))
    }

    /// Runs parts until none is left.
    ///
    /// # Safety
    /// The job stays what it is until this returns.
    unsafe fn run_parts(&self, job: *const Job) {
        // SAFETY: the caller vouches for the job, and its owner waits for the region to end.
        let (run, parts) = unsafe { (&*(*job).run, (*job).parts) };
        let ran = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let part = self.next.fetch_add(1, Ordering::Relaxed);
                if part >= parts {
                    return;
                }
                run(part);
            }
        }));
        if let Err(panic) = ran {
            self.next.store(parts, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }
}

/// Watches for a moment whether something has become true.
fn watch(is_true: impl Fn() -> bool) -> bool {
    /// Looks between two at the clock.
    const LOOKS: usize = 16;
    let start = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if is_true() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > WATCH {
            return is_true();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each part of a region ran.
    fn counts(workers: &Workers, parts: usize, work: impl Fn(usize) + Sync) -> Vec<usize> {
        let counts: Vec<_> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
        workers.each(parts, |part| {
            work(part);
            counts[part].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_part_of_many_regions_runs_once() {
        for threads in 1..=8 {
            let workers = Workers::new(threads).unwrap();
            assert_eq!(workers.threads(), threads);
            for region in 0..500 {
                let parts = region % 23;
                assert_eq!(counts(&workers, parts, |_| ()), vec![1; parts], "{threads} threads, region {region}");
            }
        }
    }

    #[test]
    fn what_parts_wrote_is_seen_after_the_region() {
        let workers = Workers::new(4).unwrap();
        let mut values = vec![0u64; 64];
        for round in 1..=2000u64 {
            let places: Vec<_> = values.iter_mut().map(Mutex::new).collect();
            workers.each(64, |part| **places[part].lock().unwrap() += round * part as u64);
            drop(places);
            assert!(values.iter().enumerate().all(|(part, value)| *value == round * (round + 1) / 2 * part as u64));
        }
    }

    #[test]
    fn unequal_parts_and_pauses_lose_nothing() {
        let workers = Workers::new(3).unwrap();
        for region in 0..40 {
            // Longer than a thread watches, in a part, and between two regions.
            let long = |part| part == region % 7;
            let work = |part| {
                if long(part) {
                    std::thread::sleep(4 * WATCH)
                }
            };
            assert_eq!(counts(&workers, 7, work), vec![1; 7]);
            if region % 3 == 0 {
                std::thread::sleep(4 * WATCH);
            }
        }
    }

    #[test]
    fn a_region_within_a_part_and_one_of_another_thread_run_where_they_are() {
        let workers = Workers::new(3).unwrap();
        let inner = AtomicUsize::new(0);
        let outer = counts(&workers, 8, |_| {
            let thread = std::thread::current().id();
            workers.each(5, |_| {
                assert_eq!(std::thread::current().id(), thread);
                inner.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!((outer, inner.into_inner()), (vec![1; 8], 40));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|_| assert_eq!(counts(&workers, 9, |_| ()), [1; 9])));
            }
        });
    }

    #[test]
    fn a_panic_of_a_part_reaches_the_caller_and_ends_the_region_only() {
        for threads in [1, 2, 5] {
            let workers = Workers::new(threads).unwrap();
            for bad in [0, 3, 19] {
                let region = || workers.each(20, |part| assert!(part != bad, "part {part} is bad"));
                let panic = catch_unwind(AssertUnwindSafe(region)).unwrap_err();
                assert_eq!(*panic.downcast::<String>().unwrap(), format!("part {bad} is bad"));
                assert_eq!(counts(&workers, 20, |_| ()), [1; 20]);
            }
        }
    }

    #[test]
    fn threads_end_with_the_set_whether_they_watch_or_sleep() {
        for pause in [Duration::ZERO, 10 * WATCH] {
            let workers = Workers::new(4).unwrap();
            assert_eq!(counts(&workers, 6, |_| ()), [1; 6]);
            std::thread::sleep(pause);
            let shared = Arc::downgrade(&workers.shared);
            drop(workers);
            assert_eq!(shared.strong_count(), 0, "a thread has it still");
        }
        drop(Workers::new(3).unwrap());
    }

    #[test]
    fn several_sets_at_once_do_not_meet() {
        let (first, second) = (Workers::new(3).unwrap(), Workers::new(2).unwrap());
        let inner = AtomicUsize::new(0);
        first.each(6, |_| {
            second.each(4, |_| {
                inner.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(inner.into_inner(), 24);
    }
}
