//! `adapter_model.safetensors`: the matrices of an adapter under the names that PEFT gives them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::config::is_within;
use super::targets::{EMBEDDING, HEAD, left_out};
use super::{AdapterConfig, AdapterConfigError, CONFIG_FILE, PICKLED, PICKLED_FILE, WEIGHTS_FILE};
use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriteError, CheckpointWriter, Dtype, TensorSpec, write_atomically,
};

/// What PEFT puts before every name.
pub const PREFIX: &str = "base_model.model.";

/// What PEFT calls trained rows, which are no differences in spite of their name.
const TOKEN_ROWS: &str = ".token_adapter.trainable_tokens_delta";
/// The end of the path of a table in which rows are trained.
const OF_TOKENS: &str = ".token_adapter";
/// What PEFT writes of a module that is saved as a whole besides the module, if it saves the embeddings, too: the
/// base's own, and the module again.
const BESIDE_SAVED: [&str; 2] = [".original_module.", ".modules_to_save."];

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
    /// Its weights are in a file that is not read.
    #[error("`{}` has `{}` and no `{}`; {}", .0.display(), PICKLED_FILE, WEIGHTS_FILE, PICKLED)]
    Pickled(PathBuf),
    /// Its settings leave out a module that it has tensors of.
    #[error(
        "tensor `{tensor}` belongs to a module that `{key}` in the adapter config leaves out: PEFT ignores it, so that \
         the adapter would compute something else here; correct `{key}`, or save the adapter without the tensor"
    )]
    LeftOut {
        /// The tensor.
        tensor: String,
        /// The setting.
        key: &'static str,
    },
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
    /// and the other way round. An embedding or a head that PEFT saved with the adapter (`save_embedding_layers`) is
    /// one of them and of the settings' `modules_to_save`, as it takes the place of the base's, too.
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
    /// Fails if a file cannot be read, a setting is not supported, or tensors are missing, unexpected, misshapen or of
    /// modules that the settings leave out.
    pub fn load(folder: &Path) -> Result<Self, AdapterError> {
        let config = AdapterConfig::read(&folder.join(CONFIG_FILE))
            .map_err(|source| AdapterError::Config { folder: folder.to_path_buf(), source: Box::new(source) })?;
        let path = folder.join(WEIGHTS_FILE);
        if !path.exists() && folder.join(PICKLED_FILE).exists() {
            return Err(AdapterError::Pickled(folder.to_path_buf()));
        }
        let weights = Checkpoint::open_file(&path)?;
        let tensors = weights
            .tensors()
            .map(|(name, info)| Ok((name.to_owned(), info.shape.clone(), weights.tensor_f32(name)?)))
            .collect::<Result<Vec<NamedTensor>, CheckpointError>>()?;
        let adapter = Self::from_tensors(config, tensors)?;
        let modules: Vec<String> = adapter.modules.keys().cloned().collect();
        match left_out(&modules, &adapter.config) {
            Some((module, key)) => {
                Err(AdapterError::LeftOut { tensor: adapter_tensor_name(&module, AdapterPart::A), key })
            }
            None => Ok(adapter),
        }
    }

    /// Puts an adapter together from its settings and its tensors under PEFT's names.
    ///
    /// # Errors
    /// Fails if tensors are missing, unexpected or misshapen.
    pub fn from_tensors(
        mut config: AdapterConfig,
        tensors: impl IntoIterator<Item = NamedTensor>,
    ) -> Result<Self, AdapterError> {
        let mut parts: BTreeMap<String, BTreeMap<AdapterPart, NamedTensor>> = BTreeMap::new();
        let [mut saved_tensors, mut token_rows] = [BTreeMap::new(), BTreeMap::new()];
        let mut copies_of_base = Vec::new();
        let mut rows_of_tied_head = None;
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
            if parse_token_rows_name(&name) == Some(HEAD) {
                rows_of_tied_head = Some((name, values));
                continue;
            }
            match name.strip_prefix(PREFIX) {
                _ if name.contains(".lora_embedding_") => return Err(AdapterError::Embedding(name)),
                Some(base) if config.is_saved(base) && BESIDE_SAVED.iter().any(|part| base.contains(part)) => {}
                Some(base) if config.is_saved(base) => {
                    saved_tensors.insert(base.to_owned(), SavedTensor { shape, values });
                }
                Some(base) if base.ends_with(".base_layer.weight") || base.ends_with(".base_layer.bias") => {
                    copies_of_base.push((name, shape));
                }
                Some(base) if table_of(base).is_some() => {
                    config.modules_to_save.extend(table_of(base).map(str::to_owned));
                    saved_tensors.insert(base.to_owned(), SavedTensor { shape, values });
                }
                _ => return Err(AdapterError::UnexpectedTensor(name)),
            }
        }
        // PEFT writes the rows of a tied embedding once more, as those of the head.
        if let Some((name, values)) = rows_of_tied_head
            && token_rows.get(EMBEDDING).is_none_or(|rows| rows.values != values)
        {
            return Err(AdapterError::UnexpectedTensor(name));
        }
        let modules: BTreeMap<_, _> = parts
            .into_iter()
            .map(|(module, parts)| {
                let adapted = AdapterModule::from_parts(&config, &module, parts)?;
                Ok((module, adapted))
            })
            .collect::<Result<_, AdapterError>>()?;
        check_copies_of_base(&modules, &token_rows, copies_of_base)?;
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

/// The embedding or the head, if this is its weight. PEFT saves them with an adapter whose model had a vocabulary of
/// another size than its base, and puts them into the base when it loads it.
fn table_of(tensor: &str) -> Option<&str> {
    tensor.strip_suffix(".weight").filter(|module| [EMBEDDING, HEAD].contains(module))
}

/// PEFT adds the base's own weight to an adapter on an embedding or a head, or on rows of them, as it stands. That it
/// was of this shape is all that can be said of it here; it is not kept.
fn check_copies_of_base(
    modules: &BTreeMap<String, AdapterModule>,
    token_rows: &BTreeMap<String, SavedTensor>,
    copies: Vec<(String, Vec<usize>)>,
) -> Result<(), AdapterError> {
    for (name, shape) in copies {
        let path = name.strip_prefix(PREFIX).and_then(|name| Some(name.split_once(".base_layer.")?.0));
        if let Some(table) = path.and_then(|path| path.strip_suffix(OF_TOKENS)) {
            // Of a tied head the rows are those of the embedding.
            let rows = token_rows.get(table).or_else(|| token_rows.get(EMBEDDING).filter(|_| table == HEAD));
            if rows.is_none_or(|rows| shape.len() != 2 || shape.last() != rows.shape.last()) {
                return Err(AdapterError::UnexpectedTensor(name));
            }
            continue;
        }
        let Some(module) = path.and_then(|path| modules.get(path)) else {
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
    use crate::peft::TargetModules;

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
        assert!(matches!(with(named("score.weight", &[9, 8])), Err(AdapterError::UnexpectedTensor(_))));
        let saving = AdapterConfig { modules_to_save: vec!["lm_head".to_owned()], ..config.clone() };
        let missing = Adapter::from_tensors(saving.clone(), vec![a.clone(), b.clone()]);
        assert!(matches!(missing, Err(AdapterError::MissingModule(name)) if name == "lm_head"));
        let there = Adapter::from_tensors(saving, vec![a, b, named("lm_head.weight", &[9, 8])]).unwrap();
        assert_eq!(there.saved_tensors["lm_head.weight"].shape, [9, 8]);
    }

    /// A tensor of these values under PEFT's name for that of the base.
    fn of(name: &str, shape: &[usize], value: f32) -> NamedTensor {
        (saved_tensor_name(name), shape.to_vec(), vec![value; shape.iter().product()])
    }

    #[test]
    fn embeddings_that_peft_saves_with_an_adapter_take_the_place_of_the_bases() {
        let lora = || vec![of("q_proj.lora_A.weight", &[2, 8], 0.5), of("q_proj.lora_B.weight", &[6, 2], 0.5)];
        let plain = AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned()]);
        let build = |config: &AdapterConfig, more: Vec<NamedTensor>| {
            Adapter::from_tensors(config.clone(), lora().into_iter().chain(more))
        };
        let [embedding, head] = [EMBEDDING, HEAD].map(|module| format!("{module}.weight"));
        let both = || vec![of(&embedding, &[9, 8], 1.0), of(&head, &[9, 8], 2.0)];
        let adapter = build(&plain, both()).unwrap();
        assert!(adapter.saved_tensors.keys().eq([&head, &embedding]));
        assert_eq!(adapter.config.modules_to_save, [EMBEDDING, HEAD]);
        let copy = tempfile::tempdir().unwrap();
        adapter.save(copy.path()).unwrap();
        assert_eq!(Adapter::load(copy.path()).unwrap(), adapter);

        // Of modules that are saved as a whole it writes the base's and the module once more.
        let modules_to_save = ["embed_tokens", "lm_head"].map(str::to_owned).to_vec();
        let saving = AdapterConfig { modules_to_save, ..plain.clone() };
        let beside = [EMBEDDING, HEAD].into_iter().flat_map(|module| {
            [("original_module", 3.0), ("modules_to_save", 4.0)]
                .map(|(part, value)| of(&format!("{module}.{part}.weight"), &[9, 8], value))
        });
        let twice = build(&saving, both().into_iter().chain(beside.clone()).collect()).unwrap();
        assert_eq!(twice, build(&saving, both()).unwrap());
        let without = build(&saving, beside.collect());
        assert!(matches!(without, Err(AdapterError::MissingModule(name)) if name == "embed_tokens"));

        // Of rows it writes the table, and those of a tied head are the embedding's.
        let trainable_token_indices = BTreeMap::from([("embed_tokens".to_owned(), vec![7])]);
        let rows = AdapterConfig { trainable_token_indices, ..plain };
        let of_rows = |module: &str, value| of(&format!("{module}{TOKEN_ROWS}"), &[1, 8], value);
        let table =
            |module: &str, columns| of(&format!("{module}.token_adapter.base_layer.weight"), &[9, columns], 1.0);
        let expected = build(&rows, vec![of_rows(EMBEDDING, 0.25)]).unwrap();
        let tied = vec![of_rows(EMBEDDING, 0.25), of_rows(HEAD, 0.25), table(EMBEDDING, 8), table(HEAD, 8)];
        assert_eq!(build(&rows, tied).unwrap(), expected);
        for stray in [of_rows(HEAD, 0.5), table(EMBEDDING, 7), table("model.norm", 8)] {
            let name = stray.0.clone();
            let error = build(&rows, vec![of_rows(EMBEDDING, 0.25), stray]).unwrap_err();
            assert!(matches!(error, AdapterError::UnexpectedTensor(found) if found == name));
        }
    }

    #[test]
    fn tensors_that_the_settings_leave_out_are_refused_with_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let config = golden("llama31/lora/attention/adapter").join(CONFIG_FILE);
        let weights = golden("llama31/lora/attention/adapter").join(WEIGHTS_FILE);
        std::fs::copy(weights, folder.path().join(WEIGHTS_FILE)).unwrap();
        let load = |edit: &dyn Fn(&mut AdapterConfig)| {
            let mut config = AdapterConfig::read(&config).unwrap();
            edit(&mut config);
            std::fs::write(folder.path().join(CONFIG_FILE), config.to_json()).unwrap();
            Adapter::load(folder.path())
        };
        assert!(load(&|_| ()).is_ok());
        let of_layer = |config: &mut AdapterConfig, layer: usize| {
            config.other.insert("layers_to_transform".to_owned(), serde_json::json!([layer]));
        };
        let error = load(&|config| of_layer(config, 0)).unwrap_err();
        assert!(matches!(&error, AdapterError::LeftOut { key: "layers_to_transform", .. }), "{error}");
        let names = |names: &[&str]| TargetModules::Names(names.iter().map(|name| (*name).to_owned()).collect());
        let error = load(&|config| config.target_modules = names(&["k_proj"])).unwrap_err().to_string();
        assert!(error.starts_with("tensor `base_model.model.model.layers.0.self_attn."), "{error}");
        assert!(error.contains("`target_modules` in the adapter config leaves out"), "{error}");
    }

    #[test]
    fn pickled_weights_are_named_as_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let config = AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned()]);
        std::fs::write(folder.path().join(CONFIG_FILE), config.to_json()).unwrap();
        assert!(matches!(Adapter::load(folder.path()), Err(AdapterError::Weights(_))));
        std::fs::write(folder.path().join(PICKLED_FILE), "").unwrap();
        let error = Adapter::load(folder.path()).unwrap_err();
        assert!(matches!(&error, AdapterError::Pickled(_)) && error.to_string().ends_with(PICKLED), "{error}");
    }
}
