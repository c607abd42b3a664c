//! Optimizers: how a gradient becomes an update. Each is an update rule in a file of its own, with its options and
//! their defaults, the state tensors that it keeps, its formula and its source.
//!
//! To add one, write its file and name it in `optimizers!`. A rule that changes each element by itself is an
//! [`Elementwise`] formula, which every kernel set computes by [`Ops::update`]; one that looks at whole matrices
//! composes other operations of [`Ops`]. Trainer, saved state, memory estimate and audit ask the rule.

mod adamw;
mod adamw_8bit;
mod elementwise;
mod lion;
mod muon;
mod sgd;
mod state;

pub use adamw::{AdamW, MomentDtype};
pub use adamw_8bit::{AdamW8bit, EmbeddingState};
pub(crate) use elementwise::{BLOCK, update_block, update_in_main_memory};
pub use elementwise::{Element, Elementwise};
pub use lion::Lion;
pub use muon::{AdjustLr, Muon};
pub use sgd::Sgd;
pub(crate) use state::StateElements;
pub use state::{SavedSet, Sign, StateDtype, StateFormat, StateSpec, StateTensor, StateValues};

use serde::{Deserialize, Serialize};

use crate::ops::{Ops, Result};

/// Declares [`Optimizer`], with a case for each rule.
macro_rules! optimizers {
    ($($(#[$meta:meta])* $rule:ident),* $(,)?) => {
        /// An optimizer with its options. The learning rate is given with each step.
        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "name", rename_all = "lowercase")]
        pub enum Optimizer {
            $($(#[$meta])* $rule($rule),)*
        }

        $(impl From<$rule> for Optimizer {
            fn from(rule: $rule) -> Self {
                Self::$rule(rule)
            }
        })*

        impl Optimizer {
            /// The state tensors of a trained tensor, see [`Rule::state`].
            pub fn state(&self, tensor: TensorInfo<'_>) -> Vec<StateSpec> {
                match self {
                    $(Self::$rule(rule) => rule.state(tensor),)*
                }
            }

            /// See [`Rule::rate_moves`].
            pub fn rate_moves(&self) -> bool {
                match self {
                    $(Self::$rule(rule) => rule.rate_moves(),)*
                }
            }

            /// One update of a trained tensor, see [`Rule::update`].
            ///
            /// # Errors
            /// Fails if the device does.
            pub fn update<O: Ops>(
                &self,
                ops: &O,
                step: &Step,
                tensor: TensorInfo<'_>,
                updated: Updated<'_, O::Tensor>,
            ) -> Result {
                match self {
                    $(Self::$rule(rule) => rule.update(ops, step, tensor, updated),)*
                }
            }
        }
    };
}

optimizers! {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Gradient descent with momentum.
    Sgd,
    /// The sign of an interpolated momentum.
    Lion,
    /// Momentum, orthogonalised, for matrices, and AdamW for everything else.
    Muon,
    /// AdamW with moments of 8 bits.
    #[serde(rename = "adamw_8bit")]
    AdamW8bit,
}

impl Optimizer {
    /// Bytes of the state of a trained tensor.
    pub fn state_bytes(&self, tensor: TensorInfo<'_>) -> u64 {
        let elements = tensor.elements();
        self.state(tensor).iter().map(|spec| spec.format.bytes(elements)).sum()
    }
}

/// A trained tensor, as a rule may tell it from others.
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    /// Its name in the file: the Hub's for a weight, PEFT's for an adapter's.
    pub name: &'a str,
    /// Its shape in the file.
    pub shape: &'a [usize],
}

impl TensorInfo<'_> {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What an optimizer step has besides the rule's options.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// Number of this step, from 1.
    pub number: u64,
    /// Factor on the gradient: one over the targets of the step, times the clipping factor.
    pub gradient_scale: f64,
}

/// The operands of an update.
pub struct Updated<'a, T> {
    /// The parameters, overwritten.
    pub value: &'a mut T,
    /// The gradient of the summed loss, in the shape of `value`.
    pub gradient: &'a T,
    /// The state tensors, as [`Rule::state`] lists them, overwritten.
    pub state: &'a mut [StateTensor<T>],
}

/// An update rule with its options.
pub trait Rule: Copy {
    /// The state tensors of a trained tensor, all zero at first; the same in every step.
    fn state(&self, tensor: TensorInfo<'_>) -> Vec<StateSpec>;

    /// Whether an update is about as large as the learning rate, however small the gradient: then each tensor that a
    /// gradient reaches has to move, while an update in proportion to the gradient may round to nothing.
    fn rate_moves(&self) -> bool;

    /// One update of a trained tensor.
    ///
    /// # Errors
    /// Fails if the device does.
    fn update<O: Ops>(&self, ops: &O, step: &Step, tensor: TensorInfo<'_>, updated: Updated<'_, O::Tensor>) -> Result;
}
