//! Training on several worker processes of one machine: data parallel.
//!
//! The stage's process is rank 0 and starts the others ([`engine::execute::member`]), which run the same stage code on
//! the same job. Each computes its share of a step's rows ([`share`]); losses and gradients are added up through shared
//! memory ([`group`], [`shared_memory`]), in the order of ranks, and every worker makes the same update of its own copy
//! of what is trained. On the processor frozen weights lie once in memory: rank 0 prepares them, the others map them.
//! Of several GPUs each holds its own, and gradients are added up on them where NCCL is there ([`devices`]). Rank 0
//! watches the others ([`watch`]) and alone writes anything.

#![allow(unsafe_code, reason = "memory that processes share")]

mod devices;
mod group;
mod share;
mod shared_memory;
mod watch;

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::execute::Membership;
use model::checkpoint::Dtype;
use model::config::Config;
use model::cpu::{InstructionSet, SharedWeights};
use model::memory::{FrozenFormat, weight_bytes};
use model::ops::Compute;
use model::trainer::{Alone, Collective, CollectiveError, Trained};

use self::group::Group;
pub(super) use self::share::shares;
use self::shared_memory::SharedMemory;
use self::watch::Watch;
use super::failure;
use super::learner::Ranks;
use super::parameters::Train;
use crate::compute::kernels::{self, Kernels};

/// More workers than any machine has cores for are a slip of the pen.
const MOST: usize = 256;

/// What this process is among the workers of its stage.
pub(super) struct Workers {
    collective: Box<dyn Collective>,
    process_group: ProcessGroup,
    /// Threads of this worker.
    pub(super) threads: usize,
    /// What all of them compute with on the CPU: rank 0 has chosen, as another choice has other bits.
    pub(super) instructions: Option<InstructionSet>,
    /// Where frozen weights lie, if the workers share them: to be given to the kernels.
    pub(super) weights: Option<SharedWeights>,
    /// The memory behind them, in the process that prepares them.
    unsealed: Option<OwnedFd>,
    shares_weights: bool,
}

/// A set as the word by which workers name it; none is zero.
fn number_of(set: Option<InstructionSet>) -> u32 {
    let place = |set| InstructionSet::ALL.iter().position(|known| *known == set);
    set.and_then(place).map_or(0, |place| place as u32 + 1)
}

/// The set of such a word.
fn instructions_of(number: u32) -> Option<InstructionSet> {
    InstructionSet::ALL.get((number as usize).checked_sub(1)?).copied()
}

/// What is known of the workers while the run goes on.
#[derive(Clone)]
pub(super) struct ProcessGroup {
    ranks: Ranks,
    memory: Option<Arc<SharedMemory>>,
}

impl ProcessGroup {
    fn new(rank: usize, size: usize, memory: Option<Arc<SharedMemory>>) -> Self {
        Self { ranks: Ranks { size, fed: rank..rank + 1 }, memory }
    }

    /// The workers, of which each is fed by its own process.
    pub(super) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The number of this worker.
    fn rank(&self) -> usize {
        self.ranks.fed.start
    }

    /// How many workers there are.
    fn size(&self) -> usize {
        self.ranks.size
    }

    /// The most memory that the other workers have had for themselves: what all share counts once, as this process's.
    pub(super) fn peak_bytes_of_others(&self) -> u64 {
        let Some(memory) = &self.memory else { return 0 };
        (0..self.size()).filter(|rank| *rank != self.rank()).map(|rank| memory.state(rank).peak_bytes()).sum()
    }
}

impl Workers {
    /// Starts the workers that the stage was granted, or takes this process's place among them.
    ///
    /// # Errors
    /// Fails where memory or processes cannot be had.
    pub(super) fn form(params: &Train, context: &mut StageContext) -> Result<Self, StageError> {
        if let Some(membership) = context.membership() {
            return Self::join(&membership.clone(), context);
        }
        let size = context.devices().workers();
        if context.devices().nodes > 1 || size > MOST {
            let message = format!("{size} workers on {} machines", context.devices().nodes);
            return Err(StageError::new(Cause::BadParameters, message).with_help(format!(
                "the native backend trains on one machine, with up to {MOST} workers: lower `resources.count`"
            )));
        }
        if size <= 1 {
            let process_group = ProcessGroup::new(0, 1, None);
            let threads = context.threads();
            let collective = Box::new(Alone);
            return Ok(Self {
                collective,
                process_group,
                threads,
                instructions: None,
                weights: None,
                unsealed: None,
                shares_weights: false,
            });
        }
        Self::lead(size, params, context)
    }

    fn lead(size: usize, params: &Train, context: &mut StageContext) -> Result<Self, StageError> {
        let threads = context.threads();
        if size > threads {
            context.warn(format!("{size} workers have {threads} threads: some wait while others compute"));
        }
        open_inputs(params, context)?;
        let group = shared_memory::create("pipeline workers", SharedMemory::bytes(size))?;
        let weights = match (params.kernels.on(context.devices().kind), params.trained()) {
            (Kernels::Cpu, Trained::Adapter) => Some(memory_of_weights(params, context)?),
            (Kernels::Cpu, Trained::Weights) | (Kernels::Candle, _) => None,
        };
        let memory =
            Arc::new(SharedMemory::map(&File::from(group.try_clone().or_fail(Cause::Machine, cannot_share)?), size)?);
        let instructions = match params.kernels.on(context.devices().kind) {
            Kernels::Cpu => {
                let of = params.matmul_precision.instructions_of(params.dtype.compute());
                Some(kernels::instructions(of)?)
            }
            Kernels::Candle => None,
        };
        memory.instructions().store(number_of(instructions), SeqCst);
        let descriptors: Vec<_> =
            [Some(&group), weights.as_ref()].into_iter().flatten().map(AsRawFd::as_raw_fd).collect();
        let mut watch = Watch::new(Arc::clone(&memory), Duration::from_secs(params.watchdog_seconds));
        for rank in 1..size {
            let membership = Membership { rank, size, descriptors: descriptors.clone() };
            watch.add(context.start_member(&membership)?);
        }
        context.record("workers", size);
        let mapped = weights.as_ref().map(|weights| {
            let file = File::from(weights.try_clone().or_fail(Cause::Machine, cannot_share)?);
            SharedWeights::made_here(&file).or_fail(Cause::Machine, cannot_share)
        });
        Ok(Self {
            collective: Box::new(Group::leading(Arc::clone(&memory), watch)),
            process_group: ProcessGroup::new(0, size, Some(memory)),
            threads: threads_of(0, size, threads),
            instructions,
            weights: mapped.transpose()?,
            shares_weights: weights.is_some(),
            unsealed: weights,
        })
    }

    fn join(membership: &Membership, context: &StageContext) -> Result<Self, StageError> {
        let Membership { rank, size, .. } = *membership;
        let mut files = membership.descriptors.iter().map(|descriptor| {
            // SAFETY: rank 0 has opened these descriptors for this process, where nothing else owns them.
            unsafe { File::from_raw_fd(*descriptor) }
        });
        let group = files.next().ok_or_else(|| StageError::internal("a worker without shared memory"))?;
        let memory = Arc::new(SharedMemory::map(&group, size)?);
        let weights = files.next().map(|file| SharedWeights::made_elsewhere(&file));
        let weights = weights.transpose().or_fail(Cause::Machine, cannot_share)?;
        Ok(Self {
            collective: Box::new(Group::following(rank, Arc::clone(&memory))),
            threads: threads_of(rank, size, context.threads()),
            instructions: instructions_of(memory.instructions().load(SeqCst)),
            process_group: ProcessGroup::new(rank, size, Some(memory)),
            shares_weights: weights.is_some(),
            weights,
            unsealed: None,
        })
    }

    /// What is known of the workers.
    pub(super) fn process_group(&self) -> ProcessGroup {
        self.process_group.clone()
    }

    /// Makes what every worker has of the model. Where they share weights, rank 0 prepares these before the others look
    /// for them, and nobody can write to them afterwards who has not mapped them by then.
    pub(super) fn load<T>(&mut self, load: impl FnOnce() -> Result<T, StageError>) -> Result<T, StageError> {
        if !self.shares_weights {
            return load();
        }
        let unsealed = self.unsealed.take();
        self.rank_zero_first(|| {
            let loaded = load()?;
            if let Some(memory) = unsealed {
                shared_memory::seal(&memory)?;
            }
            Ok(loaded)
        })
    }

    /// Does something on rank 0, and then on all others.
    fn rank_zero_first<T>(&mut self, act: impl FnOnce() -> Result<T, StageError>) -> Result<T, StageError> {
        if self.process_group.ranks().is_rank_zero() {
            let done = act()?;
            self.barrier()?;
            return Ok(done);
        }
        self.barrier()?;
        act()
    }

    fn barrier(&mut self) -> Result<(), StageError> {
        self.collective.barrier().map_err(failure::of_workers)
    }

    /// The way to add up what the workers compute, for the trainer.
    pub(super) fn into_collective(self) -> Box<dyn Collective> {
        self.collective
    }
}

/// Workers that are threads of a test: they share memory as processes do, and nobody watches them.
#[cfg(test)]
#[derive(Clone)]
pub(super) struct Threads(Arc<SharedMemory>);

#[cfg(test)]
impl Threads {
    pub(super) fn new(size: usize) -> Self {
        let memory = shared_memory::create("pipeline test", SharedMemory::bytes(size)).unwrap();
        Self(Arc::new(SharedMemory::map(&File::from(memory), size).unwrap()))
    }

    /// One of them, for the thread that calls this.
    pub(super) fn worker(&self, rank: usize) -> Workers {
        let memory = Arc::clone(&self.0);
        let watch = || Watch::new(Arc::clone(&self.0), Duration::MAX);
        let group = if rank == 0 { Group::leading(memory, watch()) } else { Group::following(rank, memory) };
        Workers {
            collective: Box::new(group),
            process_group: ProcessGroup::new(rank, self.0.size(), Some(Arc::clone(&self.0))),
            threads: 1,
            instructions: None,
            weights: None,
            unsealed: None,
            shares_weights: false,
        }
    }
}

/// Makes the folders of all inputs, which the others read.
fn open_inputs(params: &Train, context: &mut StageContext) -> Result<(), StageError> {
    context.open(&params.model)?;
    context.open(&params.data)?;
    params.loss.teacher().map(|teacher| context.open(teacher)).transpose()?;
    params.validation.as_ref().map(|validation| context.open(validation)).transpose()?;
    params.adapter.as_ref().map(|adapter| context.open(adapter)).transpose()?;
    Ok(())
}

/// Memory for the frozen weights of the model, and of the teacher if there is one, in the order in which they load.
fn memory_of_weights(params: &Train, context: &mut StageContext) -> Result<OwnedFd, StageError> {
    let compute: Compute = params.dtype.compute();
    let mut bytes = 0;
    for input in std::iter::once(&params.model).chain(params.loss.teacher()) {
        let model = context.open(input)?;
        let config = Config::read(&model.folder).or_fail(Cause::BadData, || "cannot load the model".to_owned())?;
        let matrices = config.layer_modules().len() * config.num_hidden_layers + 2;
        bytes += SharedWeights::bytes_for(matrices, weight_bytes(&config, compute, Dtype::F32, FrozenFormat::AsStored));
    }
    shared_memory::create("pipeline weights", bytes)
}

/// What so many workers take to add up the gradients of so many trained values: each a part of them, and their sum;
/// beside it a copy of each worker's.
pub(super) fn meeting_bytes(workers: usize, trained: u64) -> u64 {
    if workers == 1 {
        return 0;
    }
    let part = trained.min(shared_memory::PART as u64) * size_of::<f32>() as u64;
    (2 * workers as u64 + 1) * part
}

/// The threads of a worker: its share of all, and at least one.
fn threads_of(rank: usize, size: usize, threads: usize) -> usize {
    (threads / size + usize::from(rank < threads % size)).max(1)
}

fn cannot_share() -> String {
    "cannot share memory with the workers".to_owned()
}

/// A failure of this stage on its way through the trainer, which hands it back as it is.
fn collective_error(error: StageError) -> CollectiveError {
    CollectiveError(Box::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_has_a_thread_and_all_threads_are_given() {
        let of = |size, threads| (0..size).map(|rank| threads_of(rank, size, threads)).collect::<Vec<_>>();
        assert_eq!(of(1, 5), [5]);
        assert_eq!(of(2, 5), [3, 2]);
        assert_eq!(of(4, 4), [1, 1, 1, 1]);
        assert_eq!(of(4, 2), [1, 1, 1, 1]);
    }

    #[test]
    fn a_micro_batch_is_over_all_workers_together() {
        let rows = |size, micro_batch_size| ProcessGroup::new(0, size, None).ranks().rows_at_once(micro_batch_size);
        assert_eq!([rows(1, 8), rows(2, 8), rows(4, 8), rows(3, 8), rows(4, 1)], [8, 4, 2, 3, 1]);
    }
}
