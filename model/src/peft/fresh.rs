//! Adapters that change nothing yet.

use std::collections::BTreeMap;

use super::targets::{self, TargetError};
use super::{Adapter, AdapterConfig, AdapterConfigError, AdapterModule, Modules, SavedTensor, TargetModules};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::init::fresh_lora_a;

/// The tensors of a base model, by their names in its checkpoint: those of files, or of a decoder in memory.
pub trait BaseTensors {
    /// Why there is no fresh adapter.
    type Error: From<TargetError> + From<AdapterConfigError>;

    /// Fails if a tensor is missing or of another shape.
    fn expect_shape(&self, tensor: &str, shape: &[usize]) -> Result<(), Self::Error>;

    /// The values of a tensor, row after row.
    fn values(&self, tensor: &str) -> Result<Vec<f32>, Self::Error>;

    /// The values of some rows of a matrix, row after row.
    fn rows(&self, tensor: &str, rows: &[u32]) -> Result<Vec<f32>, Self::Error>;

    /// The length of each row of a matrix.
    fn row_norms(&self, tensor: &str) -> Result<Vec<f32>, Self::Error>;
}

impl Adapter {
    /// A fresh adapter for a model: A uniform by seed and name, B zero, magnitudes and modules to save as in the base,
    /// so that it changes nothing yet. `all-linear` becomes the names that it means. One tensor of the base is read at
    /// a time.
    ///
    /// # Errors
    /// Fails if a target fits no projection, or a tensor that is to be copied or measured cannot be read.
    pub fn fresh<T: BaseTensors>(
        model: &Modules,
        base: &T,
        settings: &AdapterConfig,
        seed: u64,
    ) -> Result<Self, T::Error> {
        settings.check_patterns()?;
        // Where a tensor is, and its shape.
        let find = |tensor: &str| {
            let (place, shape) = (model.place(tensor), model.shape(tensor).unwrap_or_default());
            base.expect_shape(&place, shape).map(|()| (place, shape))
        };
        let mut modules = BTreeMap::new();
        for path in targets::resolve(model, settings)? {
            let (place, shape) = find(&format!("{path}.weight"))?;
            let &[out_features, in_features] = shape else {
                unreachable!("a target is a projection, which is a matrix")
            };
            let rank = settings.rank_of(&path);
            let module = AdapterModule {
                rank,
                in_features,
                out_features,
                lora_a: fresh_lora_a(seed, &path, rank, in_features),
                lora_b: vec![0.0; out_features * rank],
                magnitude: settings.use_dora.then(|| base.row_norms(&place)).transpose()?,
            };
            modules.insert(path, module);
        }
        let mut saved_tensors = BTreeMap::new();
        for tensor in targets::resolve_saved(model, settings)? {
            let (place, shape) = find(&tensor)?;
            let saved = SavedTensor { shape: shape.to_vec(), values: base.values(&place)? };
            saved_tensors.insert(tensor, saved);
        }
        let mut token_rows = BTreeMap::new();
        for (path, tokens) in targets::resolve_tokens(model, settings)? {
            let (place, shape) = find(&format!("{path}.weight"))?;
            let shape = vec![tokens.len(), shape.last().copied().unwrap_or_default()];
            token_rows.insert(path, SavedTensor { shape, values: base.rows(&place, tokens)? });
        }
        let mut config = settings.clone();
        let is_all = |word: &str| word.eq_ignore_ascii_case(targets::ALL_LINEAR);
        if matches!(&config.target_modules, TargetModules::Pattern(word) if is_all(word)) {
            config.target_modules = TargetModules::Names(targets::all_linear(model));
        }
        Ok(Self { config, modules, saved_tensors, token_rows })
    }
}

/// Why no adapter can be made for the model of a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum FreshError {
    /// Its targets do not fit the model.
    #[error(transparent)]
    Targets(#[from] TargetError),
    /// Its settings are at fault.
    #[error(transparent)]
    Settings(#[from] AdapterConfigError),
    /// A tensor of the base cannot be read.
    #[error(transparent)]
    Base(#[from] CheckpointError),
}

/// Files, without a decoder in memory. Rows are measured to their last digits, where a decoder sums as its kernels do.
impl BaseTensors for Checkpoint {
    type Error = FreshError;

    fn expect_shape(&self, tensor: &str, shape: &[usize]) -> Result<(), FreshError> {
        Ok(self.expect_shape(tensor, shape)?)
    }

    fn values(&self, tensor: &str) -> Result<Vec<f32>, FreshError> {
        Ok(self.tensor_f32(tensor)?)
    }

    fn rows(&self, tensor: &str, rows: &[u32]) -> Result<Vec<f32>, FreshError> {
        let columns = self.shape(tensor)?.last().copied().unwrap_or(1).max(1);
        let mut values = vec![0.0; rows.len() * columns];
        for (row, values) in rows.iter().zip(values.chunks_mut(columns)) {
            self.read_f32(tensor, *row as usize * columns, values)?;
        }
        Ok(values)
    }

    fn row_norms(&self, tensor: &str) -> Result<Vec<f32>, FreshError> {
        let columns = self.shape(tensor)?.last().copied().unwrap_or(1).max(1);
        let square = |value: &f32| f64::from(*value).powi(2);
        let values = self.tensor_f32(tensor)?;
        let rows = values.chunks(columns);
        Ok(rows.map(|row| row.iter().map(square).sum::<f64>().sqrt() as f32).collect())
    }
}
