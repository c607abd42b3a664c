//! The memory through which workers add up what they compute: a mapping that all of them have, and how they wait for
//! each other there.
//!
//! It begins with a word that workers sleep on and one for the instructions of their kernels, then has a line for each worker's state, then two sets of totals for
//! each, then room for a part of each one's gradients, and for the sum of those. Everything that a worker may read
//! while another writes is atomic; the rest is kept apart by meetings. All `unsafe` of this way of training is here,
//! but for taking over inherited descriptors.

#![allow(unsafe_code, reason = "memory that processes share")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use engine::error::{Cause, OrFail, StageError};
use memmap2::{MmapOptions, MmapRaw};
use model::trainer::Phase;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Values of a part of the gradients: so few that they stay in cache, so many that a meeting costs little beside them.
pub(super) const PART: usize = 1 << 20;

/// How long a worker looks before it sleeps: about what being woken costs.
const LOOKING: Duration = Duration::from_micros(50);

/// A page, and more than a line of any cache.
const LINE: usize = 128;
const HEAD: usize = 4096;

/// Memory without a name that the processes started from here inherit.
///
/// # Errors
/// Fails where the system has none.
pub(super) fn create(name: &str, bytes: u64) -> Result<OwnedFd, StageError> {
    // Not close-on-exec: the workers inherit it. Pages are taken as they are written to.
    let memory = memfd_create(name, MFdFlags::MFD_ALLOW_SEALING).or_fail(Cause::Machine, super::cannot_share)?;
    nix::unistd::ftruncate(&memory, bytes.cast_signed()).or_fail(Cause::Machine, super::cannot_share)?;
    Ok(memory)
}

/// Ends writing to memory: who maps it from now on can only read.
///
/// # Errors
/// Fails where the system refuses.
pub(super) fn seal(memory: &impl AsFd) -> Result<(), StageError> {
    let seals = SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    fcntl(memory, FcntlArg::F_ADD_SEALS(seals)).map(drop).or_fail(Cause::Machine, super::cannot_share)
}

/// The mapping.
pub(super) struct SharedMemory {
    mapping: MmapRaw,
    size: usize,
}

/// What a worker tells of itself.
#[repr(C)]
pub(super) struct State {
    /// Meetings that it has come to.
    arrived: AtomicU64,
    step: AtomicU64,
    phase: AtomicU32,
    /// Counts everything that it begins.
    beats: AtomicU32,
    peak_bytes: AtomicU64,
}

impl State {
    /// Meetings that it has come to.
    pub(super) fn arrived(&self) -> u64 {
        self.arrived.load(SeqCst)
    }

    /// The step that it is in, from 1; 0 before the first.
    pub(super) fn step(&self) -> u64 {
        self.step.load(SeqCst)
    }

    /// What it does.
    pub(super) fn phase(&self) -> Phase {
        let phase = self.phase.load(SeqCst);
        PHASES.into_iter().find(|known| *known as u32 == phase).unwrap_or(Phase::Start)
    }

    /// Counts everything that it begins.
    pub(super) fn beats(&self) -> u32 {
        self.beats.load(SeqCst)
    }

    /// The most memory that it has had for itself.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(SeqCst)
    }

    pub(super) fn tell(&self, step: u64, phase: Phase) {
        self.step.store(step, SeqCst);
        self.phase.store(phase as u32, SeqCst);
        self.beats.fetch_add(1, SeqCst);
    }

    pub(super) fn tell_peak(&self, bytes: u64) {
        self.peak_bytes.store(bytes, SeqCst);
    }
}

const PHASES: [Phase; 8] = [
    Phase::Start,
    Phase::Gradients,
    Phase::SumOfLosses,
    Phase::SumOfGradients,
    Phase::Update,
    Phase::Audit,
    Phase::Validation,
    Phase::SumOfValidation,
];

/// Room for the totals of a worker.
fn totals(size: usize) -> usize {
    (2 * size).max(8)
}

impl SharedMemory {
    /// The memory of so many workers.
    ///
    /// # Errors
    /// Fails where it cannot be mapped.
    pub(super) fn map(memory: &File, size: usize) -> Result<Self, StageError> {
        let mapping = MmapOptions::new().map_raw(memory).or_fail(Cause::Machine, super::cannot_share)?;
        if (mapping.len() as u64) < Self::bytes(size) {
            return Err(StageError::internal(format!("{} bytes are too few for {size} workers", mapping.len())));
        }
        Ok(Self { mapping, size })
    }

    /// Bytes for so many workers.
    pub(super) fn bytes(size: usize) -> u64 {
        (Self::part_offset(size, size + 1)) as u64
    }

    /// How many workers there are.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// The state of a worker.
    pub(super) fn state(&self, rank: usize) -> &State {
        assert!(rank < self.size, "rank {rank} of {}", self.size);
        // SAFETY: it lies within the mapping, after the first line, and is aligned; any bits are a value of it, and all
        // of it is atomic.
        unsafe { &*self.mapping.as_ptr().add(LINE * (1 + rank)).cast() }
    }

    /// One of the two sets of totals of a worker, as bits of f64.
    pub(super) fn totals(&self, set: usize, rank: usize) -> &[AtomicU64] {
        assert!(set < 2 && rank < self.size, "totals of rank {rank} of {}", self.size);
        let count = totals(self.size);
        let offset = Self::totals_offset(self.size) + (set * self.size + rank) * count * size_of::<u64>();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(offset).cast(), count) }
    }

    /// The part of the gradients of a worker, or with the number of workers as its rank that of their sum.
    ///
    /// # Safety
    /// Between two meetings a part is either written to, by one worker alone, or read.
    pub(super) unsafe fn part(&self, rank: usize) -> *mut f32 {
        assert!(rank <= self.size, "the part of rank {rank} of {}", self.size);
        // SAFETY: it lies within the mapping.
        unsafe { self.mapping.as_mut_ptr().add(Self::part_offset(self.size, rank)).cast() }
    }

    fn totals_offset(size: usize) -> usize {
        LINE * (1 + size)
    }

    fn part_offset(size: usize, rank: usize) -> usize {
        let totals = Self::totals_offset(size) + 2 * size * totals(size) * size_of::<u64>();
        totals.next_multiple_of(HEAD) + rank * PART * size_of::<f32>()
    }

    /// The word that counts all arrivals, on which workers sleep.
    fn arrivals(&self) -> &AtomicU32 {
        // SAFETY: it is the first of the mapping.
        unsafe { &*self.mapping.as_ptr().cast() }
    }

    /// The word behind it, in which rank 0 says what the kernels of all compute with, before it starts the others.
    pub(super) fn instructions(&self) -> &AtomicU32 {
        // SAFETY: it is the second of the mapping.
        unsafe { &*self.mapping.as_ptr().cast::<AtomicU32>().add(1) }
    }

    /// Says that a worker has come to its next meeting.
    pub(super) fn arrive(&self, rank: usize) -> u64 {
        let meeting = self.state(rank).arrived.fetch_add(1, SeqCst) + 1;
        self.arrivals().fetch_add(1, SeqCst);
        wake_all(self.arrivals());
        meeting
    }

    /// Whether all workers have come to a meeting.
    pub(super) fn all_at(&self, meeting: u64) -> bool {
        (0..self.size).all(|rank| self.state(rank).arrived() >= meeting)
    }

    /// Waits until all have come to a meeting, and not much longer than `at_most`; whether they have.
    pub(super) fn wait(&self, meeting: u64, at_most: Duration) -> bool {
        let began = Instant::now();
        while began.elapsed() < LOOKING {
            if self.all_at(meeting) {
                return true;
            }
            std::hint::spin_loop();
        }
        loop {
            // Whoever arrives after this look changes the word, so that the sleep ends at once.
            let arrivals = self.arrivals().load(SeqCst);
            if self.all_at(meeting) {
                return true;
            }
            let Some(left) = at_most.checked_sub(began.elapsed()) else { return false };
            sleep_on(self.arrivals(), arrivals, left);
        }
    }
}

/// Sleeps while a word has a value, until it is woken or the time is over.
fn sleep_on(word: &AtomicU32, value: u32, at_most: Duration) {
    let time = libc::timespec { tv_sec: at_most.as_secs().cast_signed(), tv_nsec: at_most.subsec_nanos().into() };
    // SAFETY: word and time live throughout the call. Without the private flag the word is the same in every process.
    // Whatever it returns, the caller looks again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const time) };
}

fn wake_all(word: &AtomicU32) {
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}
