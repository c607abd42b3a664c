//! The audit of a training run: gradients must have moved all that is trained, and nothing may have moved what is frozen.
//!
//! A tensor that stays where it was is the mark of a graph cut somewhere, which no loss curve shows; a frozen weight that moves
//! makes an adapter that fits no base model but the one in memory.

use crate::blocks::Blocks;
use crate::decoder::Decoder;
use crate::fingerprint;
use crate::ops::KernelError;
use crate::trainer::TrainError;

/// Steps with a learning rate that counts after which every tensor must have moved.
const STEPS: u64 = 3;
/// A lower learning rate, as at the start of a long warm-up, may round away in each step, and rightly moves nothing.
const LEAST_RATE: f64 = 1e-6;

/// Where everything was at first, and what gradients did since.
pub(super) struct Audit {
    /// Of the trained tensors, until they have been looked at.
    trained: Option<Vec<TrainedAudit>>,
    /// Fingerprints of what is frozen.
    frozen: Vec<u64>,
    /// Steps with a learning rate that counts.
    steps: u64,
    /// Whether the frozen tensors have been looked at after a step.
    looked_at_frozen: bool,
}

/// What is known of a trained tensor.
struct TrainedAudit {
    /// Its values at first.
    fingerprint: u64,
    /// Whether a gradient other than zero has reached it: weight decay moves a tensor without any.
    reached: bool,
}

impl Audit {
    pub(super) fn new<B: Blocks>(decoder: &Decoder<B>) -> Result<Self, KernelError> {
        let mut audit = Self { trained: None, frozen: Vec::new(), steps: 0, looked_at_frozen: false };
        for (_, fingerprint) in frozen(decoder) {
            audit.frozen.push(fingerprint?);
        }
        audit.restart(decoder)?;
        Ok(audit)
    }

    /// Starts over for what is trained, whose values have been exchanged.
    pub(super) fn restart<B: Blocks>(&mut self, decoder: &Decoder<B>) -> Result<(), KernelError> {
        let fingerprints = fingerprints(decoder)?.into_iter();
        self.trained = Some(fingerprints.map(|fingerprint| TrainedAudit { fingerprint, reached: false }).collect());
        self.steps = 0;
        Ok(())
    }

    /// Notes that the gradient of a trained tensor, by its number, is not zero.
    pub(super) fn reached(&mut self, index: usize) {
        if let Some(trained) = &mut self.trained {
            trained[index].reached = true;
        }
    }

    /// Looks at what is frozen after the first step, and at what is trained once enough steps are done.
    pub(super) fn after_step<B: Blocks>(
        &mut self,
        decoder: &Decoder<B>,
        step: u64,
        learning_rate: f64,
    ) -> Result<(), TrainError> {
        if !self.looked_at_frozen {
            self.check_frozen(decoder, step)?;
            self.looked_at_frozen = true;
        }
        if learning_rate >= LEAST_RATE {
            self.steps += 1;
        }
        if self.steps < STEPS {
            return Ok(());
        }
        let Some(before) = self.trained.take() else { return Ok(()) };
        let now = fingerprints(decoder)?;
        let parameters = decoder.parameters().into_iter().filter(|parameter| parameter.is_trained());
        for (parameter, (before, now)) in parameters.zip(before.iter().zip(now)) {
            if !before.reached || before.fingerprint == now {
                return Err(TrainError::NotMoved { tensor: parameter.name.clone(), steps: self.steps });
            }
        }
        Ok(())
    }

    /// Compares what is frozen with what it was at first.
    pub(super) fn check_frozen<B: Blocks>(&self, decoder: &Decoder<B>, step: u64) -> Result<(), TrainError> {
        for ((name, now), before) in frozen(decoder).zip(&self.frozen) {
            if now? != *before {
                return Err(TrainError::FrozenMoved { tensor: name.to_owned(), step });
            }
        }
        Ok(())
    }
}

/// A fingerprint of each trained tensor.
fn fingerprints<B: Blocks>(decoder: &Decoder<B>) -> Result<Vec<u64>, KernelError> {
    let trained = decoder.parameters().into_iter().filter(|parameter| parameter.is_trained());
    trained.map(|parameter| Ok(fingerprint::of_f32(&decoder.ops().read(&parameter.value)?))).collect()
}

/// Name and fingerprint of each frozen tensor: norms and biases as they are kept, matrices in the form that products read.
fn frozen<B: Blocks>(decoder: &Decoder<B>) -> impl Iterator<Item = (&str, Result<u64, KernelError>)> {
    let ops = decoder.ops();
    let parameters = decoder.parameters().into_iter().filter(|parameter| !parameter.is_trained()).map(|parameter| {
        let values = ops.read(&parameter.value);
        (parameter.name.as_str(), values.map(|values| fingerprint::of_f32(&values)))
    });
    let matrices = decoder.matrices().into_iter().filter(|matrix| !matrix.is_trained());
    parameters.chain(matrices.map(|matrix| (matrix.name.as_str(), ops.fingerprint(&matrix.weight))))
}
