//! The audit of a training run: each trained tensor must have moved once the learning rate has had its chance.
//!
//! A tensor that stays where it was is the mark of a graph cut somewhere, which no loss curve shows.

use std::hash::{DefaultHasher, Hasher};

use crate::ops::{KernelError, Ops};
use crate::parameter::Parameter;
use crate::trainer::TrainError;

/// Steps with a learning rate that counts after which every tensor must have moved.
const STEPS: u64 = 3;
/// A lower learning rate, as at the start of a long warm-up, may round away in each step, and rightly moves nothing.
const LEAST_RATE: f64 = 1e-6;

/// Where the trained tensors were at first.
pub(super) struct Audit {
    fingerprints: Vec<u64>,
    steps: u64,
}

impl Audit {
    pub(super) fn new<B: Ops>(ops: &B, parameters: &[&Parameter<B>]) -> Result<Self, KernelError> {
        Ok(Self { fingerprints: fingerprints(ops, parameters)?, steps: 0 })
    }

    /// Looks at the parameters once enough steps are done.
    pub(super) fn after_step<B: Ops>(
        &mut self,
        ops: &B,
        parameters: &[&Parameter<B>],
        learning_rate: f64,
    ) -> Result<(), TrainError> {
        if learning_rate >= LEAST_RATE {
            self.steps += 1;
        }
        if self.fingerprints.is_empty() || self.steps < STEPS {
            return Ok(());
        }
        let now = fingerprints(ops, parameters)?;
        let before = std::mem::take(&mut self.fingerprints);
        let trained = parameters.iter().filter(|parameter| parameter.is_trained());
        match trained.zip(before.iter().zip(&now)).find(|(_, (before, now))| before == now) {
            Some((parameter, _)) => Err(TrainError::NotMoved { tensor: parameter.name.clone(), steps: self.steps }),
            None => Ok(()),
        }
    }
}

/// A hash of each trained tensor's bits.
fn fingerprints<B: Ops>(ops: &B, parameters: &[&Parameter<B>]) -> Result<Vec<u64>, KernelError> {
    let trained = parameters.iter().filter(|parameter| parameter.is_trained());
    trained
        .map(|parameter| {
            let mut hasher = DefaultHasher::new();
            for value in ops.read(&parameter.value)? {
                hasher.write_u32(value.to_bits());
            }
            Ok(hasher.finish())
        })
        .collect()
}
