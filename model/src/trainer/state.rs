//! The state of a training run, out and in: what an exact resume needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{LossScalerState, NOTHING_YET, Trainer, trained};
use crate::blocks::Blocks;
use crate::ops::KernelError;
use crate::parameter::{Moments, Parameter, Training};

/// A trained tensor with its moments, in f32, under its name in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedTensor {
    /// PEFT's name for an adapter's, the Hub's for a weight.
    pub name: String,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// Its value.
    pub value: Vec<f32>,
    /// First moment of AdamW, or SGD's momentum buffer; empty where the optimizer keeps none.
    pub exp_avg: Vec<f32>,
    /// Second moment of AdamW; empty where the optimizer keeps none.
    pub exp_avg_sq: Vec<f32>,
}

/// A set of values of a trained tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainedPart {
    /// Its value.
    Value,
    /// Its first moment or momentum buffer.
    ExpAvg,
    /// Its second moment.
    ExpAvgSq,
}

impl TrainedTensor {
    /// One of its sets of values; empty where the optimizer keeps none.
    pub fn part(&self, part: TrainedPart) -> &[f32] {
        match part {
            TrainedPart::Value => &self.value,
            TrainedPart::ExpAvg => &self.exp_avg,
            TrainedPart::ExpAvgSq => &self.exp_avg_sq,
        }
    }
}

/// A trained tensor where it lies. Its values are read when they are asked for, so that a state larger than what is
/// left of the memory can be saved.
pub struct TrainedView<'a, B: Blocks> {
    ops: &'a B,
    parameter: &'a Parameter<B>,
    training: &'a Training<B>,
}

impl<B: Blocks> TrainedView<'_, B> {
    /// PEFT's name for an adapter's, the Hub's for a weight.
    pub fn name(&self) -> &str {
        &self.parameter.name
    }

    /// Its shape in the file.
    pub fn shape(&self) -> &[usize] {
        &self.parameter.shape
    }

    /// Number of values of a set: as many as the shape has, or none where the optimizer keeps none.
    pub fn values(&self, part: TrainedPart) -> usize {
        let (rows, columns) = self.ops.shape(self.tensor(part));
        rows * columns
    }

    /// A copy of a set of values.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn read(&self, part: TrainedPart) -> Result<Vec<f32>, KernelError> {
        self.ops.read(self.tensor(part))
    }

    fn tensor(&self, part: TrainedPart) -> &B::Tensor {
        match part {
            TrainedPart::Value => &self.parameter.value,
            TrainedPart::ExpAvg => &self.training.exp_avg,
            TrainedPart::ExpAvgSq => &self.training.exp_avg_sq,
        }
    }
}

/// Why a saved state cannot be taken up.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// A trained tensor is not in it.
    #[error("the saved state has no `{0}`")]
    Missing(String),
    /// It has a tensor that is not trained.
    #[error("the saved state has `{0}`, which is not trained")]
    Unexpected(String),
    /// A tensor is of another shape.
    #[error("the saved `{name}` has shape {found:?}, not {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape in the model.
        expected: Vec<usize>,
        /// Its shape in the state.
        found: Vec<usize>,
    },
    /// The moments are not those that the optimizer keeps.
    #[error("the saved `{name}` has {found} moments, and this optimizer keeps {expected}")]
    Moments {
        /// The tensor.
        name: String,
        /// Moments that the optimizer keeps of each value.
        expected: usize,
        /// Whole moments in the state.
        found: usize,
    },
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl<B: Blocks> Trainer<B> {
    /// All trained tensors where they lie, in the order of the layers. Read between a step and the next micro-batch,
    /// they are all that a resume needs besides [`Trainer::steps`] and, with loss scaling,
    /// [`Trainer::loss_scaler`].
    pub fn trained_tensors(&self) -> Vec<TrainedView<'_, B>> {
        let ops = &**self.decoder.ops();
        trained(&self.decoder).map(|(parameter, training)| TrainedView { ops, parameter, training }).collect()
    }

    /// A copy of all trained tensors with their moments.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn state(&self) -> Result<Vec<TrainedTensor>, KernelError> {
        let copy = |view: TrainedView<'_, B>| {
            Ok(TrainedTensor {
                name: view.name().to_owned(),
                shape: view.shape().to_vec(),
                value: view.read(TrainedPart::Value)?,
                exp_avg: view.read(TrainedPart::ExpAvg)?,
                exp_avg_sq: view.read(TrainedPart::ExpAvgSq)?,
            })
        };
        self.trained_tensors().into_iter().map(copy).collect()
    }

    /// Takes up a saved state, `steps` done; gradients since the last step are forgotten.
    ///
    /// # Errors
    /// Fails if the state is not one of this model's trained tensors; the trainer is then not to be used.
    pub fn restore(&mut self, steps: u64, state: Vec<TrainedTensor>) -> Result<(), RestoreError> {
        let ops = Arc::clone(self.decoder.ops());
        let moments = self.options.optimizer.moments();
        let mut saved: BTreeMap<String, TrainedTensor> =
            state.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        self.decoder.release();
        for parameter in self.decoder.parameters_mut() {
            let Some(training) = &mut parameter.training else { continue };
            let tensor = saved.remove(&parameter.name).ok_or_else(|| RestoreError::Missing(parameter.name.clone()))?;
            tensor.check(&parameter.shape, moments)?;
            ops.write(&mut parameter.value, &tensor.value)?;
            for (moment, saved) in
                [(&mut training.exp_avg, &tensor.exp_avg), (&mut training.exp_avg_sq, &tensor.exp_avg_sq)]
            {
                if !saved.is_empty() {
                    ops.write(moment, saved)?;
                }
            }
            ops.clear(&mut training.gradient)?;
        }
        if let Some(name) = saved.into_keys().next() {
            return Err(RestoreError::Unexpected(name));
        }
        self.decoder.refresh()?;
        (self.step, self.pending, self.largest_gradient) = (steps, NOTHING_YET, None);
        self.updates = 0;
        self.audit.restart(&self.decoder)?;
        Ok(())
    }
}

impl<B: Blocks> Trainer<B> {
    /// The state of the factor on the loss; none without loss scaling.
    pub fn loss_scaler(&self) -> Option<LossScalerState> {
        self.scaler.map(|scaler| scaler.state())
    }

    /// Takes up a saved state of the factor on the loss; of no effect without loss scaling.
    pub fn restore_loss_scaler(&mut self, state: LossScalerState) {
        if let Some(scaler) = &mut self.scaler {
            scaler.restore(state);
        }
    }
}

impl TrainedTensor {
    fn check(&self, shape: &[usize], moments: Moments) -> Result<(), RestoreError> {
        let elements: usize = shape.iter().product();
        if self.shape != shape || self.value.len() != elements {
            let name = self.name.clone();
            return Err(RestoreError::Shape { name, expected: shape.to_vec(), found: self.shape.clone() });
        }
        let expected = moments.count();
        let lengths = [self.exp_avg.len(), self.exp_avg_sq.len()];
        let whole = |index: usize| if index < expected { elements } else { 0 };
        if lengths == [whole(0), whole(1)] {
            return Ok(());
        }
        let found = lengths.into_iter().filter(|&length| length == elements).count();
        Err(RestoreError::Moments { name: self.name.clone(), expected, found })
    }
}
