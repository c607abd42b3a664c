//! Training: gradients summed over micro-batches, one clipped AdamW update per step, and the checks that it is real.
//!
//! The learning rate of each step is the caller's ([`crate::schedule`]), as is the order of the rows.

mod audit;
mod state;

pub use state::{RestoreError, TrainedTensor};

use std::sync::Arc;

use crate::batch::Batch;
use crate::blocks::Blocks;
use crate::decoder::{Activations, Decoder, RunError};
use crate::ops::{AdamWStep, KernelError};
use crate::parameter::{Parameter, Training};
use audit::Audit;

/// AdamW without its learning rate, which changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay rates of the moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, on every trained tensor.
    pub weight_decay: f64,
}

impl Default for AdamW {
    /// As in PyTorch: 0.9, 0.999, 1e-8 and a decay of 0.01.
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 }
    }
}

/// What a trainer does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainOptions {
    /// What is trained.
    pub trained: Trained,
    /// The optimizer.
    pub optimizer: AdamW,
    /// The gradient's norm over all trained tensors is cut to this.
    pub max_grad_norm: Option<f64>,
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trained {
    /// The attached adapter; everything else is frozen.
    Adapter,
    /// All weights; the decoder was loaded with [`crate::parameter::Keep::Trainable`].
    Weights,
}

/// What one micro-batch gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroReport {
    /// Negative log-likelihood summed over its targets, in nats.
    pub loss_sum: f64,
    /// Its targets.
    pub target_tokens: usize,
}

/// What one optimizer step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean negative log-likelihood over the targets of the step, in nats.
    pub loss: f64,
    /// Targets of the step.
    pub target_tokens: usize,
    /// Norm of the gradient of that mean over all trained tensors, before clipping.
    pub grad_norm: f64,
    /// The learning rate used.
    pub learning_rate: f64,
}

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Nothing would be trained.
    #[error("nothing to train: {0}")]
    NothingToTrain(&'static str),
    /// A step has no target.
    #[error("step {step} has no target token: every label is ignored")]
    NoTargets {
        /// Number of the step, from 1.
        step: u64,
    },
    /// The loss is infinite or not a number.
    #[error("the loss is {loss} in step {step}")]
    LossNotFinite {
        /// Number of the step, from 1.
        step: u64,
        /// The summed loss of the micro-batch.
        loss: f64,
    },
    /// A gradient is infinite or not a number.
    #[error("the gradient of `{tensor}` is not finite in step {step}")]
    GradientNotFinite {
        /// Number of the step, from 1.
        step: u64,
        /// The tensor.
        tensor: String,
    },
    /// A trained tensor is where it was.
    #[error(
        "`{tensor}` has not changed in {steps} steps with a learning rate: no gradient reaches it, or too small a one"
    )]
    NotMoved {
        /// The tensor.
        tensor: String,
        /// Steps so far whose learning rate was high enough to move it.
        steps: u64,
    },
    /// A batch does not fit, or the device failed.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl From<KernelError> for TrainError {
    fn from(error: KernelError) -> Self {
        Self::Run(RunError::Kernel(error))
    }
}

/// A decoder in training.
pub struct Trainer<B: Blocks> {
    decoder: Decoder<B>,
    options: TrainOptions,
    activations: Activations<B>,
    /// Steps done.
    step: u64,
    /// Of the micro-batches since the last step.
    pending: MicroReport,
    audit: Audit,
}

const NOTHING_YET: MicroReport = MicroReport { loss_sum: 0.0, target_tokens: 0 };

impl<B: Blocks> Trainer<B> {
    /// Prepares a decoder for training: gradients and moments of zero for what is trained.
    ///
    /// # Errors
    /// Fails if there is nothing to train or the device fails.
    pub fn new(mut decoder: Decoder<B>, options: TrainOptions) -> Result<Self, TrainError> {
        let ops = Arc::clone(decoder.ops());
        decoder.start_training(options.trained)?;
        let audit = Audit::new(&*ops, &decoder.parameters())?;
        Ok(Self { decoder, options, activations: Activations::default(), step: 0, pending: NOTHING_YET, audit })
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// The decoder, to score with between steps.
    pub fn decoder_mut(&mut self) -> &mut Decoder<B> {
        &mut self.decoder
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Adds the gradients of one micro-batch to those of the step.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model, its loss is not finite, or the device fails.
    pub fn accumulate(&mut self, batch: &Batch) -> Result<MicroReport, TrainError> {
        let scores = self.decoder.loss_and_gradients(batch, &mut self.activations)?;
        let loss_sum = scores.iter().map(|score| f64::from(score.nll)).sum::<f64>();
        if !loss_sum.is_finite() {
            return Err(TrainError::LossNotFinite { step: self.step + 1, loss: loss_sum });
        }
        self.pending.loss_sum += loss_sum;
        self.pending.target_tokens += scores.len();
        Ok(MicroReport { loss_sum, target_tokens: scores.len() })
    }

    /// Updates what is trained by the gradients since the last step, and forgets them.
    ///
    /// # Errors
    /// Fails if there was no target, a gradient is not finite, a tensor does not move, or the device fails.
    pub fn step(&mut self, learning_rate: f64) -> Result<StepReport, TrainError> {
        let MicroReport { loss_sum, target_tokens } = std::mem::replace(&mut self.pending, NOTHING_YET);
        let step = self.step + 1;
        if target_tokens == 0 {
            return Err(TrainError::NoTargets { step });
        }
        let targets = target_tokens as f64;
        let grad_norm = self.gradient_norm(step)? / targets;
        let clipping = match self.options.max_grad_norm {
            Some(max) => (max / (grad_norm + 1e-6)).min(1.0),
            None => 1.0,
        };
        self.update(step, learning_rate, clipping / targets)?;
        self.step = step;
        let parameters = self.decoder.parameters();
        self.audit.after_step(&**self.decoder.ops(), &parameters, learning_rate)?;
        Ok(StepReport { step, loss: loss_sum / targets, target_tokens, grad_norm, learning_rate })
    }

    /// The gradients of the mean loss since the last step, by tensor name, before clipping.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn gradients(&self) -> Result<Vec<(String, Vec<f32>)>, TrainError> {
        let targets = self.pending.target_tokens.max(1) as f32;
        let ops = self.decoder.ops();
        let mut gradients = Vec::new();
        for (parameter, training) in trained(&self.decoder) {
            let mut values = ops.read(&training.gradient)?;
            values.iter_mut().for_each(|value| *value /= targets);
            gradients.push((parameter.name.clone(), values));
        }
        Ok(gradients)
    }

    /// The norm of the summed gradients over all trained tensors.
    fn gradient_norm(&self, step: u64) -> Result<f64, TrainError> {
        let mut total = 0.0;
        for (parameter, training) in trained(&self.decoder) {
            let squares = self.decoder.ops().sum_of_squares(&training.gradient)?;
            if !squares.is_finite() {
                return Err(TrainError::GradientNotFinite { step, tensor: parameter.name.clone() });
            }
            total += squares;
        }
        Ok(total.sqrt())
    }

    fn update(&mut self, step: u64, learning_rate: f64, gradient_scale: f64) -> Result<(), TrainError> {
        let ops = Arc::clone(self.decoder.ops());
        let AdamW { betas, eps, weight_decay } = self.options.optimizer;
        let adamw = AdamWStep { learning_rate, betas, eps, weight_decay, step, gradient_scale };
        for parameter in self.decoder.parameters_mut() {
            let Some(Training { gradient, exp_avg, exp_avg_sq }) = &mut parameter.training else { continue };
            ops.adamw(&adamw, &mut parameter.value, gradient, exp_avg, exp_avg_sq)?;
            ops.clear(gradient)?;
        }
        Ok(self.decoder.refresh()?)
    }
}

/// What is trained, with what training keeps.
fn trained<B: Blocks>(decoder: &Decoder<B>) -> impl Iterator<Item = (&Parameter<B>, &Training<B>)> {
    decoder.parameters().into_iter().filter_map(|parameter| Some((parameter, parameter.training.as_ref()?)))
}

impl<B: Blocks> Decoder<B> {
    /// Gives what is to be trained its gradients and moments.
    fn start_training(&mut self, what: Trained) -> Result<(), TrainError> {
        let ops = Arc::clone(self.ops());
        let is_adapter = |parameter: &Parameter<B>| crate::peft::parse_adapter_tensor_name(&parameter.name).is_some();
        let has_matrices =
            self.parameters().iter().any(|parameter| parameter.shape.len() == 2 && !is_adapter(parameter));
        if what == Trained::Weights && !has_matrices {
            return Err(TrainError::NothingToTrain("the weights were loaded to stay frozen"));
        }
        let mut found = false;
        for parameter in self.parameters_mut() {
            if is_adapter(parameter) == (what == Trained::Adapter) {
                parameter.train(&ops)?;
                found = true;
            }
        }
        if found { Ok(()) } else { Err(TrainError::NothingToTrain("the model has no adapter")) }
    }
}
