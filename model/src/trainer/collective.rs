//! Workers that train one model together: each computes a share of a step's rows, and all apply the same update.
//!
//! This module does not know how workers reach each other. Where their kernel sets add up on their own devices
//! ([`Ops::begin_sums`]), gradients stay there; else they go through host memory as plain f32, whatever device they
//! were computed on. All else does so always.

use std::error::Error;
use std::thread;
use std::time::Duration;

use super::{MicroReport, TrainError, Trainer};
use crate::blocks::Blocks;
use crate::fingerprint;
use crate::ops::{KernelError, Ops};

/// The workers that train one model, as one of them sees them. Every worker makes the same calls in the same order; a
/// call returns when all have made it.
pub trait Collective: Send {
    /// The number of this worker, from 0.
    fn rank(&self) -> usize;

    /// How many workers there are.
    fn size(&self) -> usize;

    /// Says what this worker is about to do, for whoever looks why it does not come.
    fn note(&mut self, _step: u64, _phase: Phase) {}

    /// Replaces values by their sums over all workers, added in the order of ranks: the same workers always get the
    /// same bits, and all of them get the same.
    ///
    /// # Errors
    /// Fails where a worker is gone or does not answer.
    fn sum(&mut self, values: &mut [f32]) -> Result<(), CollectiveError>;

    /// As [`Collective::sum`], for a few numbers: as many as twice the workers, and eight at the least.
    ///
    /// # Errors
    /// As there.
    fn sum_totals(&mut self, totals: &mut [f64]) -> Result<(), CollectiveError>;

    /// What each worker gives, by rank.
    ///
    /// # Errors
    /// As [`Collective::sum`].
    fn gather(&mut self, value: u64) -> Result<Vec<u64>, CollectiveError> {
        // Halves of 32 bits are exact in f64, and nothing is added to them.
        let mut halves = vec![0.0; 2 * self.size()];
        halves[2 * self.rank()] = (value >> 32) as f64;
        halves[2 * self.rank() + 1] = (value & u64::from(u32::MAX)) as f64;
        self.sum_totals(&mut halves)?;
        Ok(halves.chunks_exact(2).map(|half| (half[0] as u64) << 32 | half[1] as u64).collect())
    }

    /// Returns when all have called it.
    ///
    /// # Errors
    /// As [`Collective::sum`].
    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.sum_totals(&mut [])
    }

    /// Waits for something that this worker's device does with those of the others, once all workers have had theirs
    /// begin it. `over` tells whether it is done.
    ///
    /// # Errors
    /// As [`Collective::sum`]: a worker that is gone by then leaves the devices of the others waiting for ever.
    fn attend(&mut self, over: &mut dyn FnMut() -> bool) -> Result<(), CollectiveError> {
        self.barrier()?;
        while !over() {
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

/// What a worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Loading, up to the first step.
    Start,
    /// Forward and backward of its rows.
    Gradients,
    /// Adding up losses and targets over all workers.
    SumOfLosses,
    /// Adding up gradients over all workers.
    SumOfGradients,
    /// The optimizer.
    Update,
    /// Comparing what the workers hold.
    Audit,
    /// Scoring its share of the validation rows.
    Validation,
    /// Adding up the validation loss over all workers.
    SumOfValidation,
}

/// Workers that could not act together.
#[derive(Debug, thiserror::Error)]
#[error("the workers of this run could not go on together")]
pub struct CollectiveError(#[source] pub Box<dyn Error + Send + Sync>);

/// One worker that does everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn sum(&mut self, _: &mut [f32]) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn sum_totals(&mut self, _: &mut [f64]) -> Result<(), CollectiveError> {
        Ok(())
    }
}

/// Gradients are added up so many values at a time, or a tensor at a time where one has more: hundreds of small tensors
/// cost the workers no meeting each.
const BUCKET: usize = 1 << 20;

/// Updates since the start, or since a saved state was taken up, after which workers compare what they hold. Before the
/// first they do, too, and at the end of the run.
pub(super) const COMPARED: [u64; 2] = [1, 3];

impl<B: Blocks> Trainer<B> {
    /// Has it train together with other workers, of which each accumulates other rows of a step and calls
    /// [`Trainer::step`] once, also where it had none. Losses, gradients and the audit are then those of all rows.
    #[must_use]
    pub fn together(mut self, collective: Box<dyn Collective>) -> Self {
        self.collective = collective;
        self
    }

    /// The workers that train this model.
    pub fn collective(&mut self) -> &mut dyn Collective {
        &mut *self.collective
    }

    /// Adds up over all workers what the micro-batches since the last step gave.
    pub(super) fn sum_losses(&mut self, step: u64, pending: MicroReport) -> Result<MicroReport, TrainError> {
        if self.collective.size() == 1 {
            return Ok(pending);
        }
        self.collective.note(step, Phase::SumOfLosses);
        let MicroReport { loss_sum, weight, target_tokens } = pending;
        let mut totals = [loss_sum, weight, target_tokens as f64];
        self.collective.sum_totals(&mut totals)?;
        let [loss_sum, weight, target_tokens] = totals;
        Ok(MicroReport { loss_sum, weight, target_tokens: target_tokens as usize })
    }

    /// Adds up the gradients of all that is trained over all workers.
    pub(super) fn sum_gradients(&mut self, step: u64) -> Result<(), TrainError> {
        let Self { decoder, collective, .. } = self;
        if collective.size() == 1 {
            return Ok(());
        }
        collective.note(step, Phase::SumOfGradients);
        let ops = decoder.ops().clone();
        let _phase = ops.profile().phase("sum gradients");
        let trained = decoder.parameters_mut().into_iter().filter_map(|parameter| parameter.training.as_mut());
        let mut gradients: Vec<_> = trained.map(|training| &mut training.gradient).collect();
        let mut rest = &mut gradients[..];
        let mut on_devices = false;
        while !rest.is_empty() {
            let (bucket, others) = rest.split_at_mut(bucket(&*ops, rest));
            on_devices = ops.begin_sums(bucket)?;
            if !on_devices {
                sum_in_host_memory(&*ops, bucket, &mut **collective)?;
            }
            rest = others;
        }
        if on_devices {
            finish_sums(&*ops, &mut **collective)?;
        }
        collective.note(step, Phase::Update);
        Ok(())
    }

    /// Compares what all workers hold, trained and frozen, by fingerprints.
    pub(super) fn compare_workers(&mut self, step: u64) -> Result<(), TrainError> {
        if self.collective.size() == 1 {
            return Ok(());
        }
        self.collective.note(step, Phase::Audit);
        let mut parts = self.audit.frozen_fingerprints().to_vec();
        parts.extend(super::audit::fingerprints(&self.decoder)?);
        parts.push(self.step);
        let found = self.collective.gather(fingerprint::of_parts(&parts))?;
        match found.iter().position(|fingerprint| *fingerprint != found[0]) {
            Some(rank) => Err(TrainError::WorkersDiffer { rank, step }),
            None => Ok(()),
        }
    }
}

/// How many of the first of these tensors make a bucket.
fn bucket<O: Ops>(ops: &O, tensors: &[&mut O::Tensor]) -> usize {
    let mut values = 0;
    let full = tensors.iter().position(|tensor| {
        let (rows, columns) = ops.shape(tensor);
        values += rows * columns;
        values >= BUCKET
    });
    full.map_or(tensors.len(), |last| last + 1)
}

fn sum_in_host_memory<O: Ops>(
    ops: &O,
    tensors: &mut [&mut O::Tensor],
    collective: &mut dyn Collective,
) -> Result<(), TrainError> {
    let (mut values, mut lengths) = (Vec::new(), Vec::new());
    for tensor in &*tensors {
        let own = ops.read(tensor)?;
        lengths.push(own.len());
        values.extend(own);
    }
    collective.sum(&mut values)?;
    let mut summed = &values[..];
    for (tensor, length) in tensors.iter_mut().zip(lengths) {
        let (own, others) = summed.split_at(length);
        ops.write(tensor, own)?;
        summed = others;
    }
    Ok(())
}

/// Waits until the devices have added up what they have begun to.
fn finish_sums<O: Ops>(ops: &O, collective: &mut dyn Collective) -> Result<(), TrainError> {
    let mut failed: Option<KernelError> = None;
    collective.attend(&mut || {
        ops.sums_are_over().unwrap_or_else(|error| {
            failed = Some(error);
            true
        })
    })?;
    failed.map_or(Ok(()), |error| Err(error.into()))
}
