//! Adapters that change nothing yet, made from a configuration and the files of a checkpoint, without a decoder in
//! memory.

use std::collections::BTreeMap;

use super::targets::{self, TargetError};
use super::{Adapter, AdapterConfig, AdapterConfigError, AdapterModule, Modules, SavedTensor, TargetModules};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::init::fresh_lora_a;

/// Why no adapter can be made for a model.
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

impl Adapter {
    /// The first values of an adapter on the model of these files: those of [`crate::decoder::Decoder::fresh_adapter`],
    /// with DoRA's magnitudes to their last digits. One tensor of the base is in memory at a time.
    ///
    /// # Errors
    /// Fails if a target fits no projection, or a tensor that is to be copied or measured cannot be read.
    pub fn fresh(model: &Modules, base: &Checkpoint, settings: &AdapterConfig, seed: u64) -> Result<Self, FreshError> {
        settings.check_patterns()?;
        let base = Base { model, files: base };
        let mut modules = BTreeMap::new();
        for path in targets::resolve(model, settings)? {
            let tensor = format!("{path}.weight");
            let (out_features, in_features) = base.matrix(&tensor)?;
            let rank = settings.rank_of(&path);
            let module = AdapterModule {
                rank,
                in_features,
                out_features,
                lora_a: fresh_lora_a(seed, &path, rank, in_features),
                lora_b: vec![0.0; out_features * rank],
                magnitude: settings.use_dora.then(|| base.row_norms(&tensor)).transpose()?,
            };
            modules.insert(path, module);
        }
        let mut saved_tensors = BTreeMap::new();
        for tensor in targets::resolve_saved(model, settings)? {
            let (shape, values) = base.read(&tensor)?;
            saved_tensors.insert(tensor, SavedTensor { shape, values });
        }
        let mut settings = settings.clone();
        let is_all = |word: &str| word.eq_ignore_ascii_case(targets::ALL_LINEAR);
        if matches!(&settings.target_modules, TargetModules::Pattern(word) if is_all(word)) {
            settings.target_modules = TargetModules::Names(targets::all_linear(model));
        }
        Ok(Self { config: settings, modules, saved_tensors })
    }
}

/// The tensors of a base model.
struct Base<'a> {
    model: &'a Modules,
    files: &'a Checkpoint,
}

impl Base<'_> {
    fn read(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), CheckpointError> {
        let name = self.model.place(name);
        let values = self.files.tensor_f32(&name)?;
        Ok((self.files.shape(&name)?.to_vec(), values))
    }

    /// Rows and columns of a matrix.
    fn matrix(&self, name: &str) -> Result<(usize, usize), CheckpointError> {
        let expected = self.model.shape(name).unwrap_or_default();
        self.files.expect_shape(&self.model.place(name), expected)?;
        let [rows, columns] = expected else { unreachable!("a target is a projection, which is a matrix") };
        Ok((*rows, *columns))
    }

    /// The length of each row of a matrix.
    fn row_norms(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let (shape, values) = self.read(name)?;
        let square = |value: &f32| f64::from(*value).powi(2);
        let rows = values.chunks(shape.last().copied().unwrap_or(1).max(1));
        Ok(rows.map(|row| row.iter().map(square).sum::<f64>().sqrt() as f32).collect())
    }
}
