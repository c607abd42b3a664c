//! Adapters on a decoder: made fresh, attached, read back.

use std::collections::BTreeMap;

use super::Decoder;
use crate::adapter::{Dora, Dropout, Lora, Projection, row_norms};
use crate::blocks::Blocks;
use crate::init::fresh_lora_a;
use crate::ops::KernelError;
use crate::parameter::Parameter;
use crate::peft::{Adapter, AdapterConfig, AdapterModule, AdapterPart, TargetModules, adapter_tensor_name};

/// Why an adapter does not go with a model.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// A name among the targets fits no projection.
    #[error("`{target}` is no projection that can be adapted; there are: {}", known.join(", "))]
    NoSuchTarget {
        /// The name.
        target: String,
        /// Those that there are.
        known: Vec<String>,
    },
    /// The targets are a pattern, which is for PEFT to resolve.
    #[error("target modules as a pattern (`{0}`) are not supported; list their names")]
    Pattern(String),
    /// The adapter has a module that the model has not.
    #[error("the adapter has `{0}`, which the model has not")]
    NoSuchModule(String),
    /// A module is of another size.
    #[error("the adapter's `{module}` is for {adapter:?} (out, in), the model's is {model:?}")]
    Shape {
        /// The module.
        module: String,
        /// Rows and columns of the adapter's.
        adapter: (usize, usize),
        /// Rows and columns of the model's.
        model: (usize, usize),
    },
    /// The adapter is of a kind that is not computed.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// Dropout would drop everything, or is no probability.
    #[error("a dropout of {0} is not in [0, 1)")]
    Dropout(f64),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl<B: Blocks> Decoder<B> {
    /// A fresh adapter for this model: A uniform by seed and name, B zero, so that it changes nothing yet.
    ///
    /// # Errors
    /// Fails if a target fits no projection or the adapter is of a kind that is not computed.
    pub fn fresh_adapter(&self, config: &AdapterConfig, seed: u64) -> Result<Adapter, AttachError> {
        check_kind(config)?;
        let targets = match &config.target_modules {
            TargetModules::Names(targets) => targets,
            TargetModules::Pattern(pattern) => return Err(AttachError::Pattern(pattern.clone())),
        };
        let projections = self.projections();
        for target in targets {
            if !projections.iter().any(|projection| is_target(projection.path(), target)) {
                let mut known: Vec<_> = projections.iter().map(|projection| projection.module().to_owned()).collect();
                known.sort();
                known.dedup();
                return Err(AttachError::NoSuchTarget { target: target.clone(), known });
            }
        }
        let adapted = projections
            .into_iter()
            .filter(|projection| targets.iter().any(|target| is_target(projection.path(), target)));
        let fresh = |projection: &Projection<B>| {
            let (out_features, in_features) = (projection.matrix.out_features, projection.matrix.in_features);
            let rank = config.rank_of(projection.path());
            let magnitude = match config.use_dora {
                true => Some(row_norms(&*self.ops, &projection.matrix)?),
                false => None,
            };
            let module = AdapterModule {
                rank,
                in_features,
                out_features,
                lora_a: fresh_lora_a(seed, projection.path(), rank, in_features),
                lora_b: vec![0.0; out_features * rank],
                magnitude,
            };
            Ok((projection.path().to_owned(), module))
        };
        let modules = adapted.map(fresh).collect::<Result<_, KernelError>>()?;
        Ok(Adapter { config: config.clone(), modules, saved_tensors: BTreeMap::new() })
    }

    /// Puts an adapter onto the model, in place of any it had.
    ///
    /// # Errors
    /// Fails if the adapter does not fit the model.
    pub fn attach(&mut self, adapter: &Adapter) -> Result<(), AttachError> {
        check_kind(&adapter.config)?;
        let ops = std::sync::Arc::clone(&self.ops);
        let mut missing: BTreeMap<&str, &AdapterModule> =
            adapter.modules.iter().map(|(name, module)| (name.as_str(), module)).collect();
        for projection in self.projections_mut() {
            projection.lora = match missing.remove(projection.path()) {
                Some(module) => Some(Lora::new(&*ops, projection, module, &adapter.config)?),
                None => None,
            };
        }
        match missing.into_keys().next() {
            Some(name) => Err(AttachError::NoSuchModule(name.to_owned())),
            None => Ok(()),
        }
    }

    /// Whether dropout acts on the input of any adapter in training.
    pub(crate) fn has_dropout(&self) -> bool {
        self.projections().iter().any(|projection| projection.lora.as_ref().is_some_and(|lora| lora.dropout.is_some()))
    }

    /// The attached adapter's present values, under the given settings.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn adapter(&self, config: &AdapterConfig) -> Result<Adapter, KernelError> {
        let mut modules = BTreeMap::new();
        for projection in self.projections() {
            let Some(lora) = &projection.lora else { continue };
            let module = AdapterModule {
                rank: lora.a.shape[0],
                in_features: projection.matrix.in_features,
                out_features: projection.matrix.out_features,
                lora_a: self.ops.read(&lora.a.value)?,
                lora_b: self.ops.read(&lora.b.value)?,
                magnitude: lora.dora.as_ref().map(|dora| self.ops.read(&dora.magnitude.value)).transpose()?,
            };
            modules.insert(projection.path().to_owned(), module);
        }
        Ok(Adapter { config: config.clone(), modules, saved_tensors: BTreeMap::new() })
    }
}

fn check_kind(config: &AdapterConfig) -> Result<(), AttachError> {
    if !config.modules_to_save.is_empty() {
        return Err(AttachError::Unsupported("modules_to_save"));
    }
    if !(0.0..1.0).contains(&config.dropout) {
        return Err(AttachError::Dropout(config.dropout));
    }
    Ok(())
}

/// Whether a module's path is, or ends with a dot and, the target.
fn is_target(path: &str, target: &str) -> bool {
    path.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

impl<B: Blocks> Lora<B> {
    pub(super) fn new(
        ops: &B,
        projection: &Projection<B>,
        module: &AdapterModule,
        config: &AdapterConfig,
    ) -> Result<Self, AttachError> {
        let path = projection.path();
        let adapter = (module.out_features, module.in_features);
        let model = (projection.matrix.out_features, projection.matrix.in_features);
        if adapter != model {
            return Err(AttachError::Shape { module: path.to_owned(), adapter, model });
        }
        let parameter = |part, shape: &[usize], values: &[f32]| {
            Parameter::new(ops, adapter_tensor_name(path, part), shape, values)
        };
        let a = parameter(AdapterPart::A, &[module.rank, module.in_features], &module.lora_a)?;
        let b = parameter(AdapterPart::B, &[module.out_features, module.rank], &module.lora_b)?;
        let scaling = config.scaling_of(path) as f32;
        let dora = match &module.magnitude {
            Some(magnitude) => {
                let magnitude = parameter(AdapterPart::Magnitude, &[module.out_features], magnitude)?;
                Some(Dora::new(ops, magnitude, &projection.matrix, (&a, &b, scaling))?)
            }
            None => None,
        };
        Ok(Self { a, b, scaling, dropout: Dropout::new(path, config.dropout), dora })
    }
}
