//! The state of a training run, out and in: what an exact resume needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{LossScalerState, NOTHING_YET, Trainer, trained};
use crate::blocks::Blocks;
use crate::ops::KernelError;
use crate::parameter::Moments;

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
    /// All trained tensors with their moments. Taken between a step and the next micro-batch, it is all that a resume needs
    /// besides [`Trainer::steps`] and, with loss scaling, [`Trainer::loss_scaler`].
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn state(&self) -> Result<Vec<TrainedTensor>, KernelError> {
        let ops = self.decoder.ops();
        trained(&self.decoder)
            .map(|(parameter, training)| {
                Ok(TrainedTensor {
                    name: parameter.name.clone(),
                    shape: parameter.shape.clone(),
                    value: ops.read(&parameter.value)?,
                    exp_avg: ops.read(&training.exp_avg)?,
                    exp_avg_sq: ops.read(&training.exp_avg_sq)?,
                })
            })
            .collect()
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
        let expected = match moments {
            Moments::None => 0,
            Moments::One => 1,
            Moments::Two => 2,
        };
        let lengths = [self.exp_avg.len(), self.exp_avg_sq.len()];
        let whole = |index: usize| if index < expected { elements } else { 0 };
        if lengths == [whole(0), whole(1)] {
            return Ok(());
        }
        let found = lengths.into_iter().filter(|&length| length == elements).count();
        Err(RestoreError::Moments { name: self.name.clone(), expected, found })
    }
}
