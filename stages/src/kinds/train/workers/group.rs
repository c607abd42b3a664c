//! The workers of one machine as a [`Collective`].

#![allow(unsafe_code, reason = "memory that processes share")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use engine::error::{Cause, StageError};
use model::trainer::{Collective, CollectiveError, Phase};
use nix::unistd::{Pid, getppid};

use super::collective_error;
use super::shared_memory::{PART, SharedMemory};
use super::watch::Watch;
use crate::compute::resources::peak_private_bytes;

/// How often a worker that waits looks whether the others are alive.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The first and the longest pause between two looks at a device that others wait for, too.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// Values that are summed over all workers while they are in the nearest cache.
const BLOCK: usize = 2048;

/// The workers, as one of them sees them.
pub(super) struct Group {
    memory: Arc<SharedMemory>,
    rank: usize,
    /// Sets of totals given so far.
    totals: usize,
    others: Others,
}

/// How a worker notices that others are gone.
enum Others {
    /// Rank 0 has started them.
    Watched(Watch),
    /// The others end with rank 0, which has started this one.
    EndWith(Pid),
}

impl Others {
    /// Fails where one of those that have not come to a meeting is gone, as far as this worker can tell.
    fn look(&mut self, meeting: u64) -> Result<(), StageError> {
        match self {
            Self::Watched(watch) => watch.look(meeting),
            Self::EndWith(parent) if getppid() != *parent => Err(StageError::new(Cause::Crashed, "rank 0 is gone")),
            Self::EndWith(_) => Ok(()),
        }
    }

    /// As [`Others::look`], while this worker's device has waited so long for those of the others.
    fn look_at_devices(&mut self, next_meeting: u64, waited: Duration) -> Result<(), StageError> {
        self.look(next_meeting)?;
        match self {
            Self::Watched(watch) => watch.look_at_devices(waited),
            Self::EndWith(_) => Ok(()),
        }
    }
}

impl Group {
    /// The workers, as rank 0 sees them, which watches the others.
    pub(super) fn leading(memory: Arc<SharedMemory>, watch: Watch) -> Self {
        Self { memory, rank: 0, totals: 0, others: Others::Watched(watch) }
    }

    /// The workers, as one sees them that this process's parent has started.
    pub(super) fn following(rank: usize, memory: Arc<SharedMemory>) -> Self {
        Self { memory, rank, totals: 0, others: Others::EndWith(getppid()) }
    }

    /// Waits until all workers have come as far as this one; gives the number of the meeting.
    fn meet_all(&mut self) -> Result<u64, CollectiveError> {
        let meeting = self.memory.arrive(self.rank);
        while !self.memory.wait(meeting, LOOK_EVERY) {
            self.others.look(meeting).map_err(collective_error)?;
        }
        Ok(meeting)
    }

    /// Adds up a part of the gradients of all workers.
    fn sum_part(&mut self, values: &mut [f32]) -> Result<(), CollectiveError> {
        let (size, length) = (self.memory.size(), values.len());
        // SAFETY: up to the next meeting nobody else touches this worker's part.
        unsafe { self.memory.part(self.rank).copy_from_nonoverlapping(values.as_ptr(), length) };
        self.meet_all()?;
        // Each worker adds up its own piece of the sum.
        let each = length.div_ceil(size);
        let own = (self.rank * each).min(length)..((self.rank + 1) * each).min(length);
        for first in own.clone().step_by(BLOCK) {
            self.sum_block(first..(first + BLOCK).min(own.end));
        }
        self.meet_all()?;
        // SAFETY: the sum is written to between other meetings.
        unsafe { values.as_mut_ptr().copy_from_nonoverlapping(self.memory.part(size), length) };
        Ok(())
    }

    fn sum_block(&self, block: Range<usize>) {
        let size = self.memory.size();
        // SAFETY: between these meetings all parts are read, and this piece of the sum is written to by this worker
        // alone.
        let part =
            |rank: usize| unsafe { std::slice::from_raw_parts(self.memory.part(rank).add(block.start), block.len()) };
        // SAFETY: as above; pieces do not overlap.
        let sum = unsafe { std::slice::from_raw_parts_mut(self.memory.part(size).add(block.start), block.len()) };
        sum.copy_from_slice(part(0));
        for rank in 1..size {
            sum.iter_mut().zip(part(rank)).for_each(|(sum, value)| *sum += value);
        }
    }
}

impl Collective for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.memory.size()
    }

    fn note(&mut self, step: u64, phase: Phase) {
        self.memory.state(self.rank).tell(step, phase);
    }

    fn sum(&mut self, values: &mut [f32]) -> Result<(), CollectiveError> {
        // The sum of one part is read before the first meeting of the next, and not written to before it is over.
        values.chunks_mut(PART).try_for_each(|part| self.sum_part(part))
    }

    fn attend(&mut self, over: &mut dyn FnMut() -> bool) -> Result<(), CollectiveError> {
        // Nobody's device waits for one that was given nothing to do.
        let met = self.meet_all()?;
        let (began, mut looked) = (Instant::now(), Instant::now());
        let [mut pause, longest] = PAUSES;
        while !over() {
            thread::sleep(pause);
            pause = (2 * pause).min(longest);
            if looked.elapsed() >= LOOK_EVERY {
                // Who has come to the next meeting is through with this.
                self.others.look_at_devices(met + 1, began.elapsed()).map_err(collective_error)?;
                looked = Instant::now();
            }
        }
        Ok(())
    }

    fn sum_totals(&mut self, totals: &mut [f64]) -> Result<(), CollectiveError> {
        self.memory.state(self.rank).tell_peak(peak_private_bytes().unwrap_or(0));
        // Two sets in turn: who gives the next one has read the last, but others may not have, until all have come to
        // the next meeting.
        let set = self.totals % 2;
        self.totals += 1;
        let own = self.memory.totals(set, self.rank);
        assert!(totals.len() <= own.len(), "{} totals", totals.len());
        own.iter().zip(&*totals).for_each(|(place, total)| place.store(total.to_bits(), Relaxed));
        self.meet_all()?;
        for (index, total) in totals.iter_mut().enumerate() {
            let given = |rank| f64::from_bits(self.memory.totals(set, rank)[index].load(Relaxed));
            *total = (0..self.memory.size()).map(given).fold(0.0, |sum, given| sum + given);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use super::super::shared_memory;
    use super::*;

    /// Runs a function on so many workers, each a thread with its own mapping of the memory, and gives what each made.
    fn workers<T: Send>(size: usize, run: impl Fn(&mut Group) -> T + Sync) -> Vec<T> {
        let file = File::from(shared_memory::create("test", SharedMemory::bytes(size)).unwrap());
        thread::scope(|scope| {
            let start = |rank| {
                let memory = Arc::new(SharedMemory::map(&file, size).unwrap());
                let run = &run;
                scope.spawn(move || run(&mut Group::following(rank, memory)))
            };
            let started: Vec<_> = (0..size).map(start).collect();
            started.into_iter().map(|worker| worker.join().unwrap()).collect()
        })
    }

    /// Values that differ from worker to worker and whose sum depends on the order.
    fn values(rank: usize, length: usize) -> Vec<f32> {
        (0..length)
            .map(|index| ((index * 7919 + rank * 104_729) % 10_007) as f32 * 1.1e-3_f32.powi(rank as i32))
            .collect()
    }

    #[test]
    fn all_workers_get_the_sum_in_the_order_of_ranks() {
        for (size, length) in [(2, 1), (2, PART), (3, PART + 5), (4, 2 * PART + 3), (5, 0), (4, 3)] {
            let mut expected = values(0, length);
            for rank in 1..size {
                expected.iter_mut().zip(values(rank, length)).for_each(|(sum, value)| *sum += value);
            }
            let sums = workers(size, |group| {
                let mut sum = values(group.rank(), length);
                group.sum(&mut sum).unwrap();
                sum
            });
            assert!(sums.iter().all(|sum| *sum == expected), "{size} workers, {length} values");
        }
    }

    #[test]
    fn devices_are_attended_once_all_workers_have_begun() {
        let begun = AtomicUsize::new(0);
        let seen = workers(3, |group| {
            begun.fetch_add(1, SeqCst);
            let mut looks = 0;
            let mut seen = Vec::new();
            let mut over = || {
                looks += 1;
                seen.push(begun.load(SeqCst));
                looks == 5
            };
            group.attend(&mut over).unwrap();
            group.barrier().unwrap();
            seen
        });
        assert_eq!(seen, vec![vec![3; 5]; 3]);
    }

    #[test]
    fn devices_that_wait_for_each_other_for_ever_end_the_stage() {
        let file = File::from(shared_memory::create("test", SharedMemory::bytes(1)).unwrap());
        let memory = Arc::new(SharedMemory::map(&file, 1).unwrap());
        let watch = Watch::new(Arc::clone(&memory), Duration::from_millis(1));
        let mut group = Group::leading(memory, watch);
        group.note(7, Phase::SumOfGradients);
        let CollectiveError(error) = group.attend(&mut || false).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("the sum of gradients of step 7"), "{message}");
    }

    #[test]
    fn sums_and_totals_follow_each_other_in_any_order() {
        let size = 3;
        let made = workers(size, |group| {
            let mut made = Vec::new();
            for round in 0..200u64 {
                let mut totals = [round as f64, group.rank() as f64];
                group.sum_totals(&mut totals).unwrap();
                made.extend(totals);
                if round % 3 == 0 {
                    let mut values = vec![round as f32; 100];
                    group.sum(&mut values).unwrap();
                    made.push(values.iter().sum::<f32>().into());
                }
                made.extend(
                    group.gather(round << 40 | group.rank() as u64).unwrap().into_iter().map(|value| value as f64),
                );
            }
            made
        });
        let mut expected = Vec::new();
        for round in 0..200u64 {
            expected.extend([3.0 * round as f64, 3.0]);
            if round % 3 == 0 {
                expected.push(300.0 * round as f64);
            }
            expected.extend((0..3).map(|rank| (round << 40 | rank) as f64));
        }
        assert!(made.iter().all(|made| *made == expected));
    }
}
