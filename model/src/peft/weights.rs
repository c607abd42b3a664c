//! `adapter_model.safetensors`: the matrices of an adapter under the names that PEFT gives them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::config::is_within;
use super::{AdapterConfig, AdapterConfigError, CONFIG_FILE, WEIGHTS_FILE};
use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriteError, CheckpointWriter, Dtype, TensorSpec, write_atomically,
};

/// What PEFT puts before every name.
pub const PREFIX: &str = "base_model.model.";

/// What PEFT calls trained rows, which are no differences in spite of their name.
const TOKEN_ROWS: &str = ".token_adapter.trainable_tokens_delta";

/// What is wrong with an adapter.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// Its settings cannot be read.
    #[error("cannot read the adapter in `{}`", folder.display())]
    Config {
        /// The adapter's folder.
        folder: PathBuf,
        /// The cause.
        #[source]
        source: Box<AdapterConfigError>,
    },
    /// Its weights cannot be read.
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    /// Its files cannot be written.
    #[error(transparent)]
    Write(#[from] CheckpointWriteError),
    /// A tensor belongs to no LoRA module and to none of `modules_to_save`.
    #[error("tensor `{0}` is not part of a LoRA adapter on linear modules, nor of its `modules_to_save`")]
    UnexpectedTensor(String),
    /// The adapter adapts a table.
    #[error("tensor `{0}` belongs to LoRA on an embedding, which is not supported")]
    Embedding(String),
    /// A module that was trained as a whole is not there.
    #[error("`modules_to_save` has `{0}`, of which the adapter has no tensor")]
    MissingModule(String),
    /// One of a module's tensors is not there.
    #[error("the adapter on `{module}` has no {}", part.suffix())]
    MissingPart {
        /// The module.
        module: String,
        /// What is missing.
        part: AdapterPart,
    },
    /// Shapes do not fit each other or the rank.
    #[error("tensor `{name}` has shape {found:?}, which does not fit rank {rank} or the module's other tensors")]
    WrongShape {
        /// The tensor.
        name: String,
        /// The rank according to the settings.
        rank: usize,
        /// The shape stored.
        found: Vec<usize>,
    },
    /// Rows of tokens are missing.
    #[error("`trainable_token_indices` has `{0}`, of which the adapter has no rows")]
    MissingRows(String),
    /// There are not as many rows as tokens.
    #[error("tensor `{name}` has shape {found:?}, and its settings name {tokens} tokens")]
    WrongRows {
        /// The tensor.
        name: String,
        /// The tokens.
        tokens: usize,
        /// The shape stored.
        found: Vec<usize>,
    },
}

/// One of the tensors of an adapted module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdapterPart {
    /// `A`, `[rank, in]`.
    A,
    /// `B`, `[out, rank]`.
    B,
    /// The magnitudes of DoRA, `[out]`.
    Magnitude,
}

impl AdapterPart {
    /// The end of the tensor's name.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::A => "lora_A.weight",
            Self::B => "lora_B.weight",
            Self::Magnitude => "lora_magnitude_vector",
        }
    }
}

/// The name in `adapter_model.safetensors` of a part of the adapter on `module`, such as
/// `model.layers.0.self_attn.q_proj` (the name of the base tensor without `.weight`).
pub fn adapter_tensor_name(module: &str, part: AdapterPart) -> String {
    format!("{PREFIX}{module}.{}", part.suffix())
}

/// The name in `adapter_model.safetensors` of the tensor that stands in for one of the base model, such as
/// `lm_head.weight`.
pub fn saved_tensor_name(tensor: &str) -> String {
    format!("{PREFIX}{tensor}")
}

/// The name in `adapter_model.safetensors` of the trained rows of an embedding or a head, such as `model.embed_tokens`.
pub fn token_rows_name(module: &str) -> String {
    format!("{PREFIX}{module}{TOKEN_ROWS}")
}

/// The embedding or the head whose trained rows have this name in `adapter_model.safetensors`.
pub fn parse_token_rows_name(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)?.strip_suffix(TOKEN_ROWS)
}

/// Whether a name is one of `adapter_model.safetensors`, and not of a base model.
pub fn is_adapter_tensor_name(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// The tensor of the base model that one of this name in `adapter_model.safetensors` stands in for, if it is no part of
/// a LoRA module.
pub fn parse_saved_tensor_name(name: &str) -> Option<&str> {
    match parse_adapter_tensor_name(name).is_some() || parse_token_rows_name(name).is_some() {
        true => None,
        false => name.strip_prefix(PREFIX),
    }
}

/// Module and part of a name in `adapter_model.safetensors`, if it is one of a LoRA adapter.
pub fn parse_adapter_tensor_name(name: &str) -> Option<(&str, AdapterPart)> {
    let name = name.strip_prefix(PREFIX)?;
    [AdapterPart::A, AdapterPart::B, AdapterPart::Magnitude].into_iter().find_map(|part| {
        let module = name.strip_suffix(part.suffix())?.strip_suffix('.')?;
        Some((module, part))
    })
}

/// The adapter on one linear module: `y += scaling · B(Ax)`.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterModule {
    /// Rows of `A` and columns of `B`.
    pub rank: usize,
    /// Columns of `A`, the module's input.
    pub in_features: usize,
    /// Rows of `B`, the module's output.
    pub out_features: usize,
    /// `A`, `[rank, in_features]`, row-major.
    pub lora_a: Vec<f32>,
    /// `B`, `[out_features, rank]`, row-major.
    pub lora_b: Vec<f32>,
    /// DoRA's magnitudes, `[out_features]`.
    pub magnitude: Option<Vec<f32>>,
}

/// An adapter: its settings, and its matrices by the name of the module they adapt.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// The settings.
    pub config: AdapterConfig,
    /// The matrices, by module: the name of the base tensor without `.weight`.
    pub modules: BTreeMap<String, AdapterModule>,
    /// The tensors of the modules that were trained as a whole (`modules_to_save`), by the name of the base tensor
    /// that each stands in for, such as `lm_head.weight`. Of a tied model a head here is apart from the embedding,
    /// and the other way round.
    pub saved_tensors: BTreeMap<String, SavedTensor>,
    /// The rows that were trained of the embedding or the head, by its path, in the order of
    /// [`AdapterConfig::token_indices`].
    pub token_rows: BTreeMap<String, SavedTensor>,
}

/// A tensor that stands in for one of the base model.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedTensor {
    /// Its shape, that of the base's.
    pub shape: Vec<usize>,
    /// Its values, row-major.
    pub values: Vec<f32>,
}

/// A named tensor of f32 values: name, shape, values.
type NamedTensor = (String, Vec<usize>, Vec<f32>);

impl Adapter {
    /// Reads the adapter in a PEFT folder.
    ///
    /// # Errors
    /// Fails if a file cannot be read, a setting is not supported, or tensors are missing, unexpected or misshapen.
    pub fn load(folder: &Path) -> Result<Self, AdapterError> {
        let config = AdapterConfig::read(&folder.join(CONFIG_FILE))
            .map_err(|source| AdapterError::Config { folder: folder.to_path_buf(), source: Box::new(source) })?;
        let weights = Checkpoint::open_file(&folder.join(WEIGHTS_FILE))?;
        let tensors = weights
            .tensors()
            .map(|(name, info)| Ok((name.to_owned(), info.shape.clone(), weights.tensor_f32(name)?)))
            .collect::<Result<Vec<NamedTensor>, CheckpointError>>()?;
        Self::from_tensors(config, tensors)
    }

    /// Puts an adapter together from its settings and its tensors under PEFT's names.
    ///
    /// # Errors
    /// Fails if tensors are missing, unexpected or misshapen.
    pub fn from_tensors(
        config: AdapterConfig,
        tensors: impl IntoIterator<Item = NamedTensor>,
    ) -> Result<Self, AdapterError> {
        let mut parts: BTreeMap<String, BTreeMap<AdapterPart, NamedTensor>> = BTreeMap::new();
        let [mut saved_tensors, mut token_rows] = [BTreeMap::new(), BTreeMap::new()];
        let mut copies_of_base = Vec::new();
        for tensor in tensors {
            if let Some((module, part)) = parse_adapter_tensor_name(&tensor.0) {
                parts.entry(module.to_owned()).or_default().insert(part, tensor);
                continue;
            }
            let (name, shape, values) = tensor;
            if let Some(tokens) = parse_token_rows_name(&name).and_then(|module| config.token_indices(module)) {
                if shape.first() != Some(&tokens.len()) || shape.len() != 2 {
                    return Err(AdapterError::WrongRows { name, tokens: tokens.len(), found: shape });
                }
                let module = parse_token_rows_name(&name).unwrap_or_default().to_owned();
                token_rows.insert(module, SavedTensor { shape, values });
                continue;
            }
            match name.strip_prefix(PREFIX) {
                Some(base) if config.is_saved(base) => {
                    saved_tensors.insert(base.to_owned(), SavedTensor { shape, values });
                }
                Some(base) if base.ends_with(".base_layer.weight") || base.ends_with(".base_layer.bias") => {
                    copies_of_base.push((name, shape));
                }
                _ if name.contains(".lora_embedding_") => return Err(AdapterError::Embedding(name)),
                _ => return Err(AdapterError::UnexpectedTensor(name)),
            }
        }
        let modules: BTreeMap<_, _> = parts
            .into_iter()
            .map(|(module, parts)| {
                let adapted = AdapterModule::from_parts(&config, &module, parts)?;
                Ok((module, adapted))
            })
            .collect::<Result<_, AdapterError>>()?;
        check_copies_of_base(&modules, copies_of_base)?;
        if token_rows.is_empty()
            && let Some(name) = config.trainable_token_indices.keys().next()
        {
            return Err(AdapterError::MissingRows(name.clone()));
        }
        let is_there = |name: &&String| saved_tensors.keys().any(|tensor| is_within(tensor, name));
        match config.modules_to_save.iter().find(|name| !is_there(name)) {
            Some(name) => Err(AdapterError::MissingModule(name.clone())),
            None => Ok(Self { config, modules, saved_tensors, token_rows }),
        }
    }

    /// All tensors under PEFT's names, with their shapes, sorted by name.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, &[f32])> {
        let mut tensors = Vec::new();
        for (module, adapted) in &self.modules {
            let AdapterModule { rank, in_features, out_features, .. } = *adapted;
            let name = |part| adapter_tensor_name(module, part);
            tensors.push((name(AdapterPart::A), vec![rank, in_features], adapted.lora_a.as_slice()));
            tensors.push((name(AdapterPart::B), vec![out_features, rank], adapted.lora_b.as_slice()));
            if let Some(magnitude) = &adapted.magnitude {
                tensors.push((name(AdapterPart::Magnitude), vec![out_features], magnitude.as_slice()));
            }
        }
        for (tensor, SavedTensor { shape, values }) in &self.saved_tensors {
            tensors.push((saved_tensor_name(tensor), shape.clone(), values.as_slice()));
        }
        for (module, SavedTensor { shape, values }) in &self.token_rows {
            tensors.push((token_rows_name(module), shape.clone(), values.as_slice()));
        }
        tensors.sort_by(|(one, ..), (other, ..)| one.cmp(other));
        tensors
    }

    /// Writes the adapter into `folder` as PEFT does: its weights in f32, then its settings.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub fn save(&self, folder: &Path) -> Result<(), AdapterError> {
        let tensors = self.tensors();
        let specs = tensors.iter().map(|(name, shape, _)| TensorSpec::new(name.as_str(), Dtype::F32, shape)).collect();
        let mut writer = CheckpointWriter::create_file(&folder.join(WEIGHTS_FILE), specs)?;
        for (name, _, values) in tensors {
            writer.write_f32(&name, values)?;
        }
        writer.finish()?;
        write_atomically(&folder.join(CONFIG_FILE), self.config.to_json().as_bytes())?;
        Ok(())
    }
}

/// PEFT adds the base's own weight to an adapter on an embedding or a head, as it stands. That it was of this shape is
/// all that can be said of it here; it is not kept.
fn check_copies_of_base(
    modules: &BTreeMap<String, AdapterModule>,
    copies: Vec<(String, Vec<usize>)>,
) -> Result<(), AdapterError> {
    for (name, shape) in copies {
        let module = name.strip_prefix(PREFIX).and_then(|name| name.split_once(".base_layer."));
        let Some(module) = module.and_then(|(path, _)| modules.get(path)) else {
            return Err(AdapterError::UnexpectedTensor(name));
        };
        let AdapterModule { rank, in_features, out_features, .. } = *module;
        if shape != [out_features, in_features] && shape != [out_features] {
            return Err(AdapterError::WrongShape { name, rank, found: shape });
        }
    }
    Ok(())
}

impl AdapterModule {
    fn from_parts(
        config: &AdapterConfig,
        module: &str,
        mut parts: BTreeMap<AdapterPart, NamedTensor>,
    ) -> Result<Self, AdapterError> {
        let rank = config.rank_of(module);
        let mut take = |part| {
            let missing = || AdapterError::MissingPart { module: module.to_owned(), part };
            parts.remove(&part).ok_or_else(missing)
        };
        let wrong_shape = |name, found| Err(AdapterError::WrongShape { name, rank, found });
        let (a_name, a_shape, lora_a) = take(AdapterPart::A)?;
        let (b_name, b_shape, lora_b) = take(AdapterPart::B)?;
        let [a_rank, in_features] = a_shape[..] else { return wrong_shape(a_name, a_shape) };
        let [out_features, b_rank] = b_shape[..] else { return wrong_shape(b_name, b_shape) };
        if a_rank != rank {
            return wrong_shape(a_name, a_shape);
        }
        if b_rank != rank {
            return wrong_shape(b_name, b_shape);
        }
        let magnitude = if config.use_dora { Some(take(AdapterPart::Magnitude)?) } else { None };
        let magnitude = match magnitude {
            Some((name, shape, _)) if shape != [out_features] => return wrong_shape(name, shape),
            Some((_, _, values)) => Some(values),
            None => None,
        };
        if let Some((name, ..)) = parts.into_values().next() {
            return Err(AdapterError::UnexpectedTensor(name));
        }
        Ok(Self { rank, in_features, out_features, lora_a, lora_b, magnitude })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path)
    }

    #[test]
    fn adapters_of_peft_come_back_as_they_were() {
        for variant in [
            "llama31/lora/all_linear",
            "llama31/lora/modules_to_save",
            "llama31/lora/trainable_tokens",
            "gemma2/lora/tied_trainable_tokens",
            "llama2/lora/norms",
            "phi3/lora/dora",
        ] {
            let folder = golden(variant).join("adapter");
            let adapter = Adapter::load(&folder).unwrap();
            let copy = tempfile::tempdir().unwrap();
            adapter.save(copy.path()).unwrap();
            assert_eq!(Adapter::load(copy.path()).unwrap(), adapter);
            let (before, after) = (folder.join(WEIGHTS_FILE), copy.path().join(WEIGHTS_FILE));
            let (before, after) = (Checkpoint::open_file(&before).unwrap(), Checkpoint::open_file(&after).unwrap());
            assert!(before.names().eq(after.names()));
            for name in before.names() {
                assert_eq!(before.shape(name).unwrap(), after.shape(name).unwrap(), "{name}");
                assert_eq!(before.bytes(name).unwrap(), after.bytes(name).unwrap(), "{name}");
            }
        }
    }

    #[test]
    fn names_go_both_ways() {
        let name = "base_model.model.model.layers.3.mlp.down_proj.lora_A.weight";
        let (module, part) = parse_adapter_tensor_name(name).unwrap();
        assert_eq!((module, part), ("model.layers.3.mlp.down_proj", AdapterPart::A));
        assert_eq!(adapter_tensor_name(module, part), name);
        assert_eq!(parse_adapter_tensor_name("base_model.model.model.embed_tokens.lora_embedding_A"), None);
        assert_eq!(parse_adapter_tensor_name("model.layers.3.mlp.down_proj.lora_A.weight"), None);
    }

    #[test]
    fn tensors_that_do_not_fit_are_named() {
        let config = AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned()]);
        let tensor = |part, shape: &[usize]| {
            (adapter_tensor_name("q_proj", part), shape.to_vec(), vec![0.0; shape.iter().product()])
        };
        let build = |tensors: Vec<NamedTensor>| Adapter::from_tensors(config.clone(), tensors);
        let (a, b) = (tensor(AdapterPart::A, &[2, 8]), tensor(AdapterPart::B, &[6, 2]));
        let adapter = build(vec![a.clone(), b.clone()]).unwrap();
        assert_eq!((adapter.modules["q_proj"].in_features, adapter.modules["q_proj"].out_features), (8, 6));
        assert!(matches!(build(vec![a.clone()]), Err(AdapterError::MissingPart { part: AdapterPart::B, .. })));
        let wide = tensor(AdapterPart::B, &[6, 3]);
        assert!(matches!(build(vec![a.clone(), wide]), Err(AdapterError::WrongShape { .. })));
        let magnitude = tensor(AdapterPart::Magnitude, &[6]);
        let undeclared = build(vec![a.clone(), b.clone(), magnitude]);
        assert!(matches!(undeclared, Err(AdapterError::UnexpectedTensor(_))), "no DoRA was declared");

        let named =
            |name: &str, shape: &[usize]| (saved_tensor_name(name), shape.to_vec(), vec![0.5; shape.iter().product()]);
        let with = |tensor: NamedTensor| build(vec![a.clone(), b.clone(), tensor]);
        assert!(with(named("q_proj.base_layer.weight", &[6, 8])).unwrap().saved_tensors.is_empty(), "the base's own");
        let resized = with(named("q_proj.base_layer.weight", &[7, 8]));
        assert!(matches!(resized, Err(AdapterError::WrongShape { found, .. }) if found == [7, 8]));
        let stray = with(named("k_proj.base_layer.weight", &[6, 8]));
        assert!(matches!(stray, Err(AdapterError::UnexpectedTensor(_))));
        let table = with(named("model.embed_tokens.lora_embedding_A", &[2, 8]));
        assert!(matches!(table, Err(AdapterError::Embedding(_))));
        assert!(matches!(with(named("lm_head.weight", &[9, 8])), Err(AdapterError::UnexpectedTensor(_))));
        let saving = AdapterConfig { modules_to_save: vec!["lm_head".to_owned()], ..config.clone() };
        let missing = Adapter::from_tensors(saving.clone(), vec![a.clone(), b.clone()]);
        assert!(matches!(missing, Err(AdapterError::MissingModule(name)) if name == "lm_head"));
        let there = Adapter::from_tensors(saving, vec![a, b, named("lm_head.weight", &[9, 8])]).unwrap();
        assert_eq!(there.saved_tensors["lm_head.weight"].shape, [9, 8]);
    }
}
