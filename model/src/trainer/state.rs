//! The state of a training run, out and in: what an exact resume needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{LossScalerState, NOTHING_YET, Trainer, trained};
use crate::blocks::Blocks;
use crate::ops::KernelError;
use crate::optimizer::{SavedSet, StateValues};
use crate::parameter::{Parameter, Training};

/// A trained tensor with its optimizer state, under its name in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedTensor {
    /// PEFT's name for an adapter's, the Hub's for a weight.
    pub name: String,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// Its value.
    pub value: Vec<f32>,
    /// What the optimizer keeps, by the names of [`SavedSet`].
    pub state: BTreeMap<String, StateValues>,
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

    /// A copy of its value.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn value(&self) -> Result<Vec<f32>, KernelError> {
        self.ops.read(&self.parameter.value)
    }

    /// The sets of values that the optimizer keeps of it.
    pub fn state_sets(&self) -> Vec<SavedSet> {
        self.training.state.iter().flat_map(|tensor| tensor.saved_sets(self.ops)).collect()
    }

    /// A copy of the set of this name; none where the optimizer keeps none.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn state(&self, name: &str) -> Result<Option<StateValues>, KernelError> {
        for tensor in &self.training.state {
            if let Some(set) = tensor.saved_sets(self.ops).iter().position(|set| set.name == name) {
                return tensor.read(self.ops, set).map(Some);
            }
        }
        Ok(None)
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
    /// The optimizer state is not what the optimizer keeps.
    #[error("the saved optimizer state of `{name}` is {found:?}, and this optimizer keeps {expected:?}")]
    OptimizerState {
        /// The tensor.
        name: String,
        /// The sets of values that the optimizer keeps.
        expected: Vec<SavedSet>,
        /// Those in the state.
        found: Vec<SavedSet>,
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

    /// A copy of all trained tensors with their optimizer state.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn state(&self) -> Result<Vec<TrainedTensor>, KernelError> {
        let copy = |view: TrainedView<'_, B>| {
            let mut state = BTreeMap::new();
            for SavedSet { name, .. } in view.state_sets() {
                state.extend(view.state(&name)?.map(|values| (name, values)));
            }
            Ok(TrainedTensor {
                name: view.name().to_owned(),
                shape: view.shape().to_vec(),
                value: view.value()?,
                state,
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
        let mut saved: BTreeMap<String, TrainedTensor> =
            state.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        self.decoder.release();
        for parameter in self.decoder.parameters_mut() {
            let Some(training) = &mut parameter.training else { continue };
            let tensor = saved.remove(&parameter.name).ok_or_else(|| RestoreError::Missing(parameter.name.clone()))?;
            tensor.check(&parameter.shape)?;
            tensor.check_state(training.state.iter().flat_map(|state| state.saved_sets(&*ops)).collect())?;
            ops.write(&mut parameter.value, &tensor.value)?;
            for state in &mut training.state {
                for (index, set) in state.saved_sets(&*ops).iter().enumerate() {
                    state.write(&*ops, index, &tensor.state[&set.name])?;
                }
            }
            ops.clear(&mut training.gradient)?;
        }
        if let Some(name) = saved.into_keys().next() {
            return Err(RestoreError::Unexpected(name));
        }
        self.decoder.refresh()?;
        (self.step, self.pending, self.largest_gradient) = (steps, NOTHING_YET, None);
        self.fake_quantize_when_due()?;
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
    fn check(&self, shape: &[usize]) -> Result<(), RestoreError> {
        let elements: usize = shape.iter().product();
        if self.shape == shape && self.value.len() == elements {
            return Ok(());
        }
        let name = self.name.clone();
        Err(RestoreError::Shape { name, expected: shape.to_vec(), found: self.shape.clone() })
    }

    fn check_state(&self, mut expected: Vec<SavedSet>) -> Result<(), RestoreError> {
        let set = |(name, values): (&String, &StateValues)| SavedSet {
            name: name.clone(),
            dtype: values.dtype(),
            values: values.count(),
        };
        let found: Vec<SavedSet> = self.state.iter().map(set).collect();
        expected.sort_by(|one, other| one.name.cmp(&other.name));
        if found == expected {
            return Ok(());
        }
        Err(RestoreError::OptimizerState { name: self.name.clone(), expected, found })
    }
}
