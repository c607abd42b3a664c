//! Training: gradients summed over micro-batches, one clipped update per step, and the checks that it is real.
//!
//! The learning rate of each step is the caller's ([`crate::schedule`]), as is the order of the rows.

mod audit;
mod collective;
mod documents;
mod error;
mod options;
mod scaler;
mod state;

pub use collective::{Alone, Collective, CollectiveError, Phase};
pub use documents::{DocumentBatch, DocumentReport};
pub use error::TrainError;
pub use options::{AdamW, EmbeddingNoise, LossScaling, Optimizer, Recompute, Sgd, TrainOptions, Trained};
pub use scaler::{LossScaler, LossScalerState};
pub use state::{RestoreError, TrainedTensor, TrainedView};

use std::sync::Arc;

use crate::batch::Batch;
use crate::blocks::Blocks;
use crate::decoder::{Activations, Decoder, GradientOptions, Scored, TrainingLoss};
use crate::loss::{CrossEntropy, TokenLoss};
use crate::ops::KernelError;
use crate::optimizer::{Step, TensorInfo, Updated};
use crate::parameter::{Parameter, Training};
use crate::random::StepSeed;
use crate::weights::FakeQuantizedLayers;
use audit::Audit;
use collective::COMPARED;

/// What one micro-batch gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MicroReport {
    /// The loss summed over its targets, each times its weight, in nats.
    pub loss_sum: f64,
    /// The sum of those weights; the number of targets where all are 1.
    pub weight: f64,
    /// Its targets.
    pub target_tokens: usize,
}

/// What one optimizer step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// The loss of the step: the sum over its targets, each times its weight, divided by the sum of the weights. With
    /// the default loss the mean negative log-likelihood, in nats.
    pub loss: f64,
    /// Targets of the step.
    pub target_tokens: usize,
    /// Norm of the gradient of that mean over all trained tensors, before clipping. Not finite in a skipped step.
    pub grad_norm: f64,
    /// The learning rate used.
    pub learning_rate: f64,
    /// The factor on the loss, with loss scaling.
    pub loss_scale: Option<f64>,
    /// Gradients overflowed under that factor: nothing moved, moments included, and the step does not count, so that
    /// the next one has the same number (and should have the same learning rate).
    pub skipped: bool,
}

/// A decoder in training.
pub struct Trainer<B: Blocks> {
    decoder: Decoder<B>,
    options: TrainOptions,
    loss: Arc<dyn TokenLoss>,
    teacher: Option<Decoder<B>>,
    activations: Activations<B>,
    scaler: Option<LossScaler>,
    /// Steps done.
    step: u64,
    /// Of the micro-batches since the last step.
    pending: MicroReport,
    /// The tensor with the largest gradient in the last step.
    largest_gradient: Option<String>,
    audit: Audit,
    collective: Box<dyn Collective>,
    /// Updates since the start, or since a saved state was taken up.
    updates: u64,
    /// The layers that compute on grids, after so many steps.
    fake_quantization: Option<(FakeQuantizedLayers, u64)>,
}

const NOTHING_YET: MicroReport = MicroReport { loss_sum: 0.0, weight: 0.0, target_tokens: 0 };

impl<B: Blocks> Trainer<B> {
    /// Prepares a decoder for training: gradients and optimizer state of zero for what is trained.
    ///
    /// # Errors
    /// Fails if there is nothing to train or the device fails.
    pub fn new(mut decoder: Decoder<B>, options: TrainOptions) -> Result<Self, TrainError> {
        decoder.set_embedding_noise(options.embedding_noise);
        decoder.start_training(options.trained, &options.optimizer)?;
        let audit = Audit::new(&decoder, &options.optimizer)?;
        Ok(Self {
            decoder,
            options,
            loss: Arc::new(CrossEntropy::default()),
            teacher: None,
            activations: Activations::default(),
            scaler: options.loss_scaling.map(LossScaler::new),
            step: 0,
            pending: NOTHING_YET,
            largest_gradient: None,
            audit,
            collective: Box::new(Alone),
            updates: 0,
            fake_quantization: None,
        })
    }

    /// Has it train these layers for 4-bit weights and 8-bit activations, after so many steps without. The gradient
    /// passes as if nothing had been rounded. Of an adapter's frozen base only the inputs are rounded here: the
    /// decoder is to be loaded with [`Decoder::load_fake_quantized`].
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn with_fake_quantization(mut self, layers: FakeQuantizedLayers, after_steps: u64) -> Result<Self, TrainError> {
        self.fake_quantization = Some((layers, after_steps));
        self.fake_quantize_when_due()?;
        Ok(self)
    }

    fn fake_quantize_when_due(&mut self) -> Result<(), KernelError> {
        let Some((layers, after_steps)) = &self.fake_quantization else { return Ok(()) };
        self.decoder.fake_quantize((self.step >= *after_steps).then_some(layers))
    }

    /// Has it minimise this loss instead of cross-entropy; with a teacher, where the loss needs one.
    ///
    /// # Errors
    /// Fails if there is no teacher where one is needed, or its vocabulary is another.
    pub fn with_loss(mut self, loss: Arc<dyn TokenLoss>, teacher: Option<Decoder<B>>) -> Result<Self, TrainError> {
        if loss.needs_teacher() && teacher.is_none() {
            return Err(TrainError::NoTeacher);
        }
        let student = self.decoder.config().vocab_size;
        if let Some(teacher) =
            teacher.as_ref().map(|teacher| teacher.config().vocab_size).filter(|size| *size != student)
        {
            return Err(TrainError::TeacherVocabulary { student, teacher });
        }
        (self.loss, self.teacher) = (loss, teacher);
        Ok(self)
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// The decoder, to score with between steps.
    pub fn decoder_mut(&mut self) -> &mut Decoder<B> {
        &mut self.decoder
    }

    /// Steps done; skipped ones do not count.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Adds the gradients of one micro-batch to those of the step.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model, its loss is not finite, or the device fails.
    pub fn accumulate(&mut self, batch: &Batch) -> Result<MicroReport, TrainError> {
        self.collective.note(self.step + 1, Phase::Gradients);
        let ops = Arc::clone(self.decoder.ops());
        let _phase = ops.profile().phase("micro-batch");
        let loss = TrainingLoss { token: &*self.loss, teacher: self.teacher.as_mut() };
        let options = gradient_options(&self.options, self.scaler.as_ref(), self.step);
        let scored = self.decoder.loss_and_gradients(batch, loss, options, &mut self.activations)?;
        let Scored { targets, scores } = &scored;
        let loss_sum = match targets.weights() {
            None => scores.iter().map(|score| f64::from(score.loss)).sum::<f64>(),
            Some(weights) => {
                scores.iter().zip(weights).map(|(score, &weight)| f64::from(weight) * f64::from(score.loss)).sum()
            }
        };
        if !loss_sum.is_finite() {
            return Err(self.loss_not_finite(&scored, loss_sum));
        }
        let report = MicroReport { loss_sum, weight: targets.total_weight(), target_tokens: targets.len() };
        self.add(report);
        Ok(report)
    }

    fn add(&mut self, micro: MicroReport) {
        self.pending.loss_sum += micro.loss_sum;
        self.pending.weight += micro.weight;
        self.pending.target_tokens += micro.target_tokens;
    }

    /// Updates what is trained by the gradients since the last step, those of all workers, and forgets them. With loss
    /// scaling, gradients that overflowed are forgotten without an update, and the report says so.
    ///
    /// # Errors
    /// Fails if there was no target, a gradient is not finite, a tensor does not move, or the device fails.
    pub fn step(&mut self, learning_rate: f64) -> Result<StepReport, TrainError> {
        let ops = Arc::clone(self.decoder.ops());
        let _phase = ops.profile().phase("update");
        let pending = std::mem::replace(&mut self.pending, NOTHING_YET);
        let step = self.step + 1;
        if self.updates == 0 {
            self.compare_workers(step)?;
        }
        let MicroReport { loss_sum, weight, target_tokens } = self.sum_losses(step, pending)?;
        if target_tokens == 0 || weight == 0.0 {
            return Err(TrainError::NoTargets { step });
        }
        self.decoder.hold_back_gradients()?;
        self.sum_gradients(step)?;
        let loss_scale = self.scaler.map(|scaler| f64::from(scaler.scale()));
        let mut report = StepReport {
            step,
            loss: loss_sum / weight,
            target_tokens,
            grad_norm: f64::INFINITY,
            learning_rate,
            loss_scale,
            skipped: true,
        };
        let summed = weight * loss_scale.unwrap_or(1.0);
        match self.gradient_norm()? {
            GradientNorm::Finite(norm) => report.grad_norm = norm / summed,
            GradientNorm::NotFinite(tensor) => return self.skip(report, tensor),
        }
        let clipping = match self.options.max_grad_norm {
            Some(max) => (max / (report.grad_norm + 1e-6)).min(1.0),
            None => 1.0,
        };
        self.update(Step { learning_rate, number: step, gradient_scale: clipping / summed })?;
        (self.step, self.updates) = (step, self.updates + 1);
        self.fake_quantize_when_due()?;
        if let Some(scaler) = &mut self.scaler {
            scaler.after_step();
        }
        let audit = ops.profile().phase("audit");
        self.audit.after_step(&self.decoder, &report)?;
        if COMPARED.contains(&self.updates) {
            self.compare_workers(step)?;
        }
        drop(audit);
        report.skipped = false;
        Ok(report)
    }

    /// Compares the bits of everything frozen with what they were when training began. It is done after the first step
    /// by itself; at the end of a run it proves that the adapter was trained on the base model as it was loaded.
    /// Reads every weight once. Several workers compare what they hold, too.
    ///
    /// # Errors
    /// Fails with the first tensor that has changed, or if the device fails.
    pub fn check_frozen(&mut self) -> Result<(), TrainError> {
        self.audit.check_frozen(&self.decoder, self.step)?;
        self.compare_workers(self.step)
    }

    /// The gradients of the mean loss since the last step, by tensor name, before clipping: those of this worker's
    /// rows.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn gradients(&mut self) -> Result<Vec<(String, Vec<f32>)>, TrainError> {
        self.decoder.hold_back_gradients()?;
        let weight = if self.pending.weight > 0.0 { self.pending.weight } else { 1.0 };
        let summed = weight as f32 * self.scaler.map_or(1.0, |scaler| scaler.scale());
        let ops = self.decoder.ops();
        let mut gradients = Vec::new();
        for (parameter, training) in trained(&self.decoder) {
            let mut values = ops.read(&training.gradient)?;
            values.iter_mut().for_each(|value| *value /= summed);
            gradients.push((parameter.name.clone(), values));
        }
        Ok(gradients)
    }

    /// The norm of the summed gradients over all trained tensors.
    fn gradient_norm(&mut self) -> Result<GradientNorm, TrainError> {
        let (mut total, mut largest) = (0.0, (0.0, None));
        for (index, (parameter, training)) in trained(&self.decoder).enumerate() {
            let squares = self.decoder.ops().sum_of_squares(&training.gradient)?;
            if !squares.is_finite() {
                return Ok(GradientNorm::NotFinite(parameter.name.clone()));
            }
            total += squares;
            if squares > 0.0 {
                self.audit.reached(index);
            }
            if squares > largest.0 {
                largest = (squares, Some(&parameter.name));
            }
        }
        self.largest_gradient = largest.1.cloned();
        Ok(GradientNorm::Finite(total.sqrt()))
    }

    /// Forgets gradients that overflowed under the factor on the loss; without such a factor they are an error.
    fn skip(&mut self, report: StepReport, tensor: String) -> Result<StepReport, TrainError> {
        let StepReport { step, .. } = report;
        let Some(scaler) = &mut self.scaler else {
            let largest_gradient = self.largest_gradient.take();
            return Err(TrainError::GradientNotFinite { step, tensor, largest_gradient });
        };
        let loss_scale = f64::from(scaler.scale());
        scaler.after_overflow();
        if scaler.is_hopeless() {
            let skipped = scaler.state().skipped;
            return Err(TrainError::OverflowPersists { step, tensor, skipped, loss_scale });
        }
        let ops = Arc::clone(self.decoder.ops());
        for parameter in self.decoder.parameters_mut() {
            if let Some(training) = &mut parameter.training {
                ops.clear(&mut training.gradient)?;
            }
        }
        Ok(report)
    }

    /// The error of a micro-batch without a finite loss. Its layers had no backward, so that the gradients are those of
    /// the micro-batches before it, but for the head's.
    fn loss_not_finite(&self, scored: &Scored, loss: f64) -> TrainError {
        let mut largest = (0.0, None);
        if self.pending.target_tokens > 0 {
            for (parameter, training) in trained(&self.decoder) {
                let squares = self.decoder.ops().sum_of_squares(&training.gradient).unwrap_or(f64::NAN);
                if squares.is_finite() && squares > largest.0 {
                    largest = (squares, Some(parameter.name.clone()));
                }
            }
        }
        let scores = scored.targets.documents.iter().zip(&scored.scores);
        let not_finite = scores.filter(|(_, score)| !score.loss.is_finite());
        let mut documents: Vec<usize> = not_finite.map(|(&document, _)| document as usize).collect();
        documents.dedup();
        let largest_gradient = largest.1.or_else(|| self.largest_gradient.clone());
        TrainError::LossNotFinite { step: self.step + 1, loss, documents, largest_gradient }
    }

    fn update(&mut self, step: Step) -> Result<(), TrainError> {
        let ops = Arc::clone(self.decoder.ops());
        self.decoder.release();
        for parameter in self.decoder.parameters_mut() {
            let Some(Training { gradient, state }) = &mut parameter.training else { continue };
            let tensor = TensorInfo { name: &parameter.name, shape: &parameter.shape };
            let factor = self.options.learning_rate_factor(tensor);
            let step = Step { learning_rate: step.learning_rate * factor, ..step };
            let updated = Updated { value: &mut parameter.value, gradient, state };
            self.options.optimizer.update(&*ops, &step, tensor, updated)?;
            ops.clear(gradient)?;
        }
        Ok(self.decoder.refresh()?)
    }
}

/// How the gradients of the step after so many are computed.
fn gradient_options(options: &TrainOptions, scaler: Option<&LossScaler>, steps: u64) -> GradientOptions {
    GradientOptions {
        loss_scale: scaler.map_or(1.0, LossScaler::scale),
        recompute: options.recompute,
        step: StepSeed { seed: options.seed, step: steps + 1 },
    }
}

/// The norm of all gradients.
enum GradientNorm {
    Finite(f64),
    /// With the first tensor whose gradient is not.
    NotFinite(String),
}

/// What is trained, with what training keeps.
fn trained<B: Blocks>(decoder: &Decoder<B>) -> impl Iterator<Item = (&Parameter<B>, &Training<B>)> {
    decoder.parameters().into_iter().filter_map(|parameter| Some((parameter, parameter.training.as_ref()?)))
}

impl<B: Blocks> Decoder<B> {
    /// Gives what is to be trained its gradients and the state of the optimizer.
    fn start_training(&mut self, what: Trained, optimizer: &Optimizer) -> Result<(), TrainError> {
        let ops = Arc::clone(self.ops());
        let is_adapter = |parameter: &Parameter<B>| crate::peft::is_adapter_tensor_name(&parameter.name);
        let has_matrices =
            self.parameters().iter().any(|parameter| parameter.shape.len() == 2 && !is_adapter(parameter));
        if what == Trained::Weights && !has_matrices {
            return Err(TrainError::NothingToTrain("the weights were loaded to stay frozen"));
        }
        let mut found = false;
        for parameter in self.parameters_mut() {
            if is_adapter(parameter) == (what == Trained::Adapter) {
                let tensor = TensorInfo { name: &parameter.name, shape: &parameter.shape };
                let state = optimizer.state(tensor);
                parameter.train(&ops, &state)?;
                found = true;
            }
        }
        if found { Ok(()) } else { Err(TrainError::NothingToTrain("the model has no adapter")) }
    }
}
