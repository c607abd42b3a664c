//! Adapters on a decoder: made fresh, attached, read back.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Decoder;
use super::embeddings::{Copies, copy_of_matrix};
use crate::adapter::{Dora, Dropout, EmbeddingRows, Lora, Projection, TokenRows, row_norms};
use crate::blocks::Blocks;
use crate::ops::KernelError;
use crate::parameter::{Matrix, Parameter};
use crate::peft::targets::{EMBEDDING, HEAD, TargetError, vocabulary_hint};
use crate::peft::{
    Adapter, AdapterConfig, AdapterConfigError, AdapterModule, AdapterPart, BaseTensors, Modules, SavedTensor,
    adapter_tensor_name, parse_saved_tensor_name, parse_token_rows_name, saved_tensor_name, targets, token_rows_name,
};

/// Why an adapter does not go with a model.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Its targets do not fit the model.
    #[error(transparent)]
    Targets(#[from] TargetError),
    /// Its settings are at fault.
    #[error(transparent)]
    Settings(#[from] AdapterConfigError),
    /// The adapter has a module that the model has not.
    #[error("the adapter has `{0}`, which the model has not")]
    NoSuchModule(String),
    /// A module is of another size.
    #[error(
        "the adapter's `{module}` is for {adapter:?} (out, in), the model's is {model:?}{}",
        vocabulary_hint(module, &[adapter.0, adapter.1], &[model.0, model.1])
    )]
    Shape {
        /// The module.
        module: String,
        /// Rows and columns of the adapter's.
        adapter: (usize, usize),
        /// Rows and columns of the model's.
        model: (usize, usize),
    },
    /// A tensor that was trained as a whole is of another shape.
    #[error(
        "the adapter's `{tensor}` has shape {adapter:?}, the model's {model:?}{}",
        vocabulary_hint(tensor, adapter, model)
    )]
    SavedShape {
        /// The tensor, by its name in the base.
        tensor: String,
        /// The adapter's shape.
        adapter: Vec<usize>,
        /// The model's.
        model: Vec<usize>,
    },
    /// Dropout would drop everything, or is no probability.
    #[error("a dropout of {0} is not in [0, 1)")]
    Dropout(f64),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl<B: Blocks> Decoder<B> {
    /// A fresh adapter for this model: see [`Adapter::fresh`].
    ///
    /// # Errors
    /// Fails if a target fits no projection, or the device fails.
    pub fn fresh_adapter(&self, config: &AdapterConfig, seed: u64) -> Result<Adapter, AttachError> {
        check_settings(config)?;
        Adapter::fresh(&Modules::from(&self.config), self, config, seed)
    }

    /// Puts an adapter onto the model, in place of any it had: one that is fresh, or one to train on, ours or PEFT's.
    ///
    /// # Errors
    /// Fails if the adapter does not fit the model; the model may then have a part of it.
    pub fn attach(&mut self, adapter: &Adapter) -> Result<(), AttachError> {
        check_settings(&adapter.config)?;
        self.detach();
        for (name, tensor) in &adapter.saved_tensors {
            self.replace(name, tensor)?;
        }
        self.attach_token_rows(adapter)?;
        let ops = Arc::clone(&self.ops);
        let mut missing: BTreeMap<&str, &AdapterModule> =
            adapter.modules.iter().map(|(name, module)| (name.as_str(), module)).collect();
        for projection in self.projections_mut() {
            if let Some(module) = missing.remove(projection.path()) {
                projection.lora = Some(Lora::new(&*ops, projection, module, &adapter.config)?);
            }
        }
        match missing.into_keys().next() {
            Some(name) => Err(AttachError::NoSuchModule(name.to_owned())),
            None => Ok(()),
        }
    }

    /// Gives rows of the embedding and the head values of their own.
    fn attach_token_rows(&mut self, adapter: &Adapter) -> Result<(), AttachError> {
        let tables: Vec<(String, Vec<u32>)> = targets::resolve_tokens(&Modules::from(&self.config), &adapter.config)?
            .into_iter()
            .map(|(path, tokens)| (path, tokens.to_vec()))
            .collect();
        if let Some(stray) = adapter.token_rows.keys().find(|path| tables.iter().all(|(table, _)| table != *path)) {
            return Err(AttachError::NoSuchModule(stray.clone()));
        }
        let ops = Arc::clone(&self.ops);
        for (path, tokens) in tables {
            let tensor = token_rows_name(&path);
            let rows = adapter.token_rows.get(&path).ok_or_else(|| AttachError::NoSuchModule(tensor.clone()))?;
            let model = vec![tokens.len(), self.config.hidden_size];
            if rows.shape != model {
                return Err(AttachError::SavedShape { tensor, adapter: rows.shape.clone(), model });
            }
            let values = Parameter::new(&*ops, tensor, &rows.shape, &rows.values)?;
            let is_tied = self.embeddings.is_shared();
            if path == EMBEDDING && !is_tied {
                let rows = TokenRows::new(&*ops, self.embeddings.embed_tokens(), &tokens, &values.value)?;
                self.embeddings.put_rows(EmbeddingRows { values, rows });
                continue;
            }
            let output = self.embeddings.output_mut();
            output.lora = Some(Lora::of_rows(&*ops, &output.matrix, &tokens, values)?);
        }
        Ok(())
    }

    /// Takes the adapter off: the model is the base again.
    pub fn detach(&mut self) {
        self.embeddings.give_back();
        for projection in self.projections_mut() {
            projection.lora = None;
            projection.matrix.give_back();
            projection.bias.iter_mut().for_each(Parameter::give_back);
        }
        self.norms_mut().into_iter().for_each(|norm| norm.weight.give_back());
    }

    /// Has something done by the base alone, as if there were no adapter; it is on the model again afterwards.
    pub fn without_adapter<T>(&mut self, done: impl FnOnce(&mut Self) -> T) -> T {
        let mut copies = Copies::NONE;
        let lora: Vec<Option<Lora<B>>> = self.projections_mut().into_iter().map(|it| it.lora.take()).collect();
        self.exchange(&mut copies);
        let found = done(self);
        self.exchange(&mut copies);
        self.projections_mut().into_iter().zip(lora).for_each(|(projection, lora)| projection.lora = lora);
        found
    }

    /// Exchanges an adapter's copies of tensors and the base's own; `copies` are those that have no place meanwhile.
    fn exchange(&mut self, copies: &mut Copies<B>) {
        for projection in self.projections_mut() {
            projection.matrix.exchange();
            projection.bias.iter_mut().for_each(Parameter::exchange);
        }
        self.norms_mut().into_iter().for_each(|norm| norm.weight.exchange());
        self.embeddings.exchange(copies);
    }

    /// Puts an adapter's copy in the place of a tensor of the base.
    fn replace(&mut self, name: &str, copy: &SavedTensor) -> Result<(), AttachError> {
        let ops = Arc::clone(&self.ops);
        let base = self.base_tensor(name).ok_or_else(|| AttachError::NoSuchModule(name.to_owned()))?;
        let model = base.shape();
        if copy.shape != model {
            let adapter = copy.shape.clone();
            return Err(AttachError::SavedShape { tensor: name.to_owned(), adapter, model });
        }
        if let BaseTensor::Matrix(matrix) = base {
            let copy = copy_of_matrix(&*ops, matrix, name, copy)?;
            if is_weight_of(name, EMBEDDING) {
                self.embeddings.replace_embedding(copy);
            } else if is_weight_of(name, HEAD) {
                self.embeddings.replace_output(copy);
            } else if let Some(projection) =
                self.projections_mut().into_iter().find(|projection| projection.matrix.name == name)
            {
                projection.matrix.replace_by(copy);
            }
            return Ok(());
        }
        let copy = Parameter::new(&*ops, saved_tensor_name(name), &copy.shape, &copy.values)?;
        if let Some(parameter) = self.parameters_mut().into_iter().find(|parameter| parameter.name == name) {
            parameter.replace_by(copy);
        }
        Ok(())
    }

    /// A tensor of the base, by its name in the checkpoint; `lm_head.weight` of a tied model is the embedding.
    fn base_tensor(&self, name: &str) -> Option<BaseTensor<'_, B>> {
        let (embed_tokens, output) = self.embeddings.base();
        if is_weight_of(name, EMBEDDING) {
            return Some(BaseTensor::Matrix(embed_tokens));
        }
        if is_weight_of(name, HEAD) {
            return Some(BaseTensor::Matrix(output));
        }
        let projections = self.projections();
        if let Some(projection) = projections.iter().find(|projection| projection.matrix.name == name) {
            return Some(BaseTensor::Matrix(&projection.matrix));
        }
        let parameters = self.parameters().into_iter().map(Parameter::base);
        parameters.into_iter().find(|parameter| parameter.name == name).map(BaseTensor::Parameter)
    }

    /// Whether training passes draw: dropout on the input of an adapter, or noise on the embeddings.
    pub(crate) fn draws_in_training(&self) -> bool {
        let mut projections = self.projections().into_iter();
        self.embedding_noise.is_some()
            || projections.any(|projection| projection.lora.as_ref().is_some_and(|lora| lora.dropout.is_some()))
    }

    /// The attached adapter's present values, under the given settings.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn adapter(&self, config: &AdapterConfig) -> Result<Adapter, KernelError> {
        let read = |parameter: &Parameter<B>| self.ops.read(&parameter.value);
        let mut modules = BTreeMap::new();
        for projection in self.projections() {
            let Some(lora) = projection.lora.as_ref().filter(|lora| lora.rows.is_none()) else { continue };
            let module = AdapterModule {
                rank: lora.a.shape[0],
                in_features: projection.matrix.in_features,
                out_features: projection.matrix.out_features,
                lora_a: read(&lora.a)?,
                lora_b: read(&lora.b)?,
                magnitude: lora.dora.as_ref().map(|dora| read(&dora.magnitude)).transpose()?,
            };
            modules.insert(projection.path().to_owned(), module);
        }
        let [mut saved_tensors, mut token_rows] = [BTreeMap::new(), BTreeMap::new()];
        for parameter in self.parameters() {
            if let Some(table) = parse_token_rows_name(&parameter.name) {
                let rows = SavedTensor { shape: parameter.shape.clone(), values: read(parameter)? };
                token_rows.insert(table.to_owned(), rows);
            }
            if let Some(tensor) = parse_saved_tensor_name(&parameter.name) {
                let saved = SavedTensor { shape: parameter.shape.clone(), values: read(parameter)? };
                saved_tensors.insert(tensor.to_owned(), saved);
            }
        }
        Ok(Adapter { config: config.clone(), modules, saved_tensors, token_rows })
    }
}

impl<B: Blocks> BaseTensors for Decoder<B> {
    type Error = AttachError;

    fn expect_shape(&self, tensor: &str, shape: &[usize]) -> Result<(), AttachError> {
        match self.base_tensor(tensor) {
            Some(base) if base.shape() == shape => Ok(()),
            _ => Err(AttachError::NoSuchModule(tensor.to_owned())),
        }
    }

    fn values(&self, tensor: &str) -> Result<Vec<f32>, AttachError> {
        match self.base_tensor(tensor) {
            Some(BaseTensor::Matrix(matrix)) => Ok(matrix.base_values(&*self.ops)?),
            Some(BaseTensor::Parameter(parameter)) => Ok(self.ops.read(&parameter.value)?),
            None => Err(AttachError::NoSuchModule(tensor.to_owned())),
        }
    }

    fn rows(&self, tensor: &str, rows: &[u32]) -> Result<Vec<f32>, AttachError> {
        match self.base_tensor(tensor) {
            Some(BaseTensor::Matrix(matrix)) => Ok(matrix.base_rows(&*self.ops, rows)?),
            _ => Err(AttachError::NoSuchModule(tensor.to_owned())),
        }
    }

    fn row_norms(&self, tensor: &str) -> Result<Vec<f32>, AttachError> {
        match self.base_tensor(tensor) {
            Some(BaseTensor::Matrix(matrix)) => Ok(row_norms(&*self.ops, matrix)?),
            _ => Err(AttachError::NoSuchModule(tensor.to_owned())),
        }
    }
}

/// A tensor of the base model.
enum BaseTensor<'a, B: Blocks> {
    Matrix(&'a Matrix<B>),
    Parameter(&'a Parameter<B>),
}

impl<B: Blocks> BaseTensor<'_, B> {
    fn shape(&self) -> Vec<usize> {
        match self {
            Self::Matrix(matrix) => vec![matrix.out_features, matrix.in_features],
            Self::Parameter(parameter) => parameter.shape.clone(),
        }
    }
}

fn check_settings(config: &AdapterConfig) -> Result<(), AttachError> {
    config.check_patterns()?;
    match (0.0..1.0).contains(&config.dropout) {
        true => Ok(()),
        false => Err(AttachError::Dropout(config.dropout)),
    }
}

/// Whether a tensor is the weight of this module.
fn is_weight_of(tensor: &str, module: &str) -> bool {
    tensor.strip_suffix(".weight") == Some(module)
}

impl<B: Blocks> Lora<B> {
    /// Rows of a head, or of a matrix that is both embedding and head, with values of their own.
    fn of_rows(ops: &B, matrix: &Matrix<B>, tokens: &[u32], values: Parameter<B>) -> Result<Self, KernelError> {
        let rows = TokenRows::new(ops, matrix, tokens, &values.value)?;
        let mut places = vec![0.0; matrix.out_features * tokens.len()];
        tokens.iter().enumerate().for_each(|(number, id)| places[*id as usize * tokens.len() + number] = 1.0);
        let b = Parameter::new(ops, "rows of tokens", &[matrix.out_features, tokens.len()], &places)?;
        Ok(Self { a: values, b, scaling: 1.0, dropout: None, dora: None, rows: Some(rows) })
    }

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
        let parameter =
            |part, shape: &[usize], values: &[f32]| Parameter::new(ops, adapter_tensor_name(path, part), shape, values);
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
        Ok(Self { a, b, scaling, dropout: Dropout::new(path, config.dropout), dora, rows: None })
    }
}
