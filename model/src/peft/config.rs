//! `adapter_config.json`: the settings of a LoRA adapter, as PEFT writes them.
//!
//! What we compute with is read into typed fields. Everything else is kept as it stands, so that a file passes
//! through us unchanged; what would change the results and is not supported is refused by name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde_json::{Map, Value, json};

use super::targets;

/// The version of PEFT whose files we write.
const PEFT_VERSION: &str = "0.21.2";

/// What is wrong with an `adapter_config.json`.
#[derive(Debug, thiserror::Error)]
pub enum AdapterConfigError {
    /// The file cannot be read.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    #[error("`{}` is not a JSON object", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// A required key is absent.
    #[error("adapter config has no `{0}`")]
    Missing(&'static str),
    /// A value is not of the type it has to be.
    #[error("`{key}` in the adapter config is {found}, where {expected} is expected")]
    WrongType {
        /// The key.
        key: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: Value,
    },
    /// A name in a pattern is no regular expression that we can match.
    #[error(
        "`{pattern}` in `{key}` of the adapter config is not a regular expression that can be matched (look-around and back-references are not supported)"
    )]
    Pattern {
        /// The key.
        key: &'static str,
        /// The expression.
        pattern: String,
        /// What is wrong with it.
        #[source]
        source: Box<regex::Error>,
    },
    /// It was initialised in a way that changes the base, so that its matrices belong to another base than the model.
    #[error(
        "`init_lora_weights` = {0} in the adapter config: its matrices belong to a base that PEFT changes when it loads \
         them; PEFT's `save_pretrained(…, path_initial_model_for_weight_conversion=…)` makes an ordinary adapter of it"
    )]
    ChangedBase(Value),
    /// The adapter adapts a table.
    #[error("`target_modules` in the adapter config has `{0}`: LoRA on an embedding is not supported")]
    Embedding(String),
    /// The adapter uses something that changes its results and that we do not compute.
    #[error("`{key}` = {value} in the adapter config is not supported")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        value: Value,
    },
}

/// Which modules have an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetModules {
    /// Modules whose name is, or ends with a dot and, one of these.
    Names(Vec<String>),
    /// A regular expression, or `all-linear`, for PEFT to resolve.
    Pattern(String),
}

/// The settings of a LoRA adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// Name or path of the base model, `base_model_name_or_path`.
    pub base_model: Option<String>,
    /// Rank of the modules that `rank_pattern` does not name, `r`.
    pub rank: usize,
    /// Numerator of the scaling of the modules that `alpha_pattern` does not name, `lora_alpha`.
    pub alpha: f64,
    /// Dropout on the adapter's input while training, `lora_dropout`.
    pub dropout: f64,
    /// Which modules have an adapter.
    pub target_modules: TargetModules,
    /// Scaling is `alpha / sqrt(rank)` instead of `alpha / rank` (Kalajdzievski, arXiv:2312.03732).
    pub use_rslora: bool,
    /// Magnitude and direction are apart (Liu et al., arXiv:2402.09353).
    pub use_dora: bool,
    /// Modules that are trained as a whole and saved with the adapter: names, matched as those of the target modules
    /// are.
    pub modules_to_save: Vec<String>,
    /// Tokens whose rows are trained, by the name of the embedding or the head, matched as those of the target modules
    /// are. Of a tied model those of the embedding are the head's, too. A list in the file is of the embedding.
    pub trainable_token_indices: BTreeMap<String, Vec<u32>>,
    /// Ranks of single modules, by regular expressions for the end of their names; of several that match, the first in
    /// the order of the alphabet counts, which is PEFT's own order once it has written a file.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas of single modules, by expressions as in `rank_pattern`.
    pub alpha_pattern: BTreeMap<String, f64>,
    /// Every key of the file that has no field above.
    pub other: BTreeMap<String, Value>,
}

impl AdapterConfig {
    /// The settings PEFT would write for an adapter of this rank and alpha on the modules of these names.
    pub fn new(rank: usize, alpha: f64, target_modules: Vec<String>) -> Self {
        Self {
            base_model: None,
            rank,
            alpha,
            dropout: 0.0,
            target_modules: TargetModules::Names(target_modules),
            use_rslora: false,
            use_dora: false,
            modules_to_save: Vec::new(),
            trainable_token_indices: BTreeMap::new(),
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            other: defaults(),
        }
    }

    /// Reads `adapter_config.json`.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is damaged, or describes an adapter that we cannot compute.
    pub fn read(path: &Path) -> Result<Self, AdapterConfigError> {
        let text = std::fs::read(path).map_err(|source| AdapterConfigError::Io { path: path.to_path_buf(), source })?;
        let fields = serde_json::from_slice(&text)
            .map_err(|source| AdapterConfigError::Json { path: path.to_path_buf(), source })?;
        Self::from_fields(fields)
    }

    /// Reads the settings from the keys and values of the file.
    ///
    /// # Errors
    /// Fails if one is missing, of another type, or not supported.
    pub fn from_fields(fields: Map<String, Value>) -> Result<Self, AdapterConfigError> {
        let mut fields = Fields(fields.into_iter().collect());
        match fields.0.get("peft_type") {
            Some(Value::String(kind)) if kind == "LORA" => {}
            Some(value) => {
                return Err(AdapterConfigError::Unsupported { key: "peft_type".to_owned(), value: value.clone() });
            }
            None => return Err(AdapterConfigError::Missing("peft_type")),
        }
        let config = Self {
            base_model: fields.take("base_model_name_or_path", "a string", string)?,
            rank: fields.take("r", "a whole number above 0", rank)?.ok_or(AdapterConfigError::Missing("r"))?,
            alpha: fields
                .take("lora_alpha", "a number", Value::as_f64)?
                .ok_or(AdapterConfigError::Missing("lora_alpha"))?,
            dropout: fields.take("lora_dropout", "a number", Value::as_f64)?.unwrap_or(0.0),
            target_modules: fields
                .take("target_modules", "a list of names or a string", target_modules)?
                .ok_or(AdapterConfigError::Missing("target_modules"))?,
            use_rslora: fields.take("use_rslora", "true or false", Value::as_bool)?.unwrap_or(false),
            use_dora: fields.take("use_dora", "true or false", Value::as_bool)?.unwrap_or(false),
            modules_to_save: fields.take("modules_to_save", "a list of names", names)?.unwrap_or_default(),
            trainable_token_indices: fields
                .take("trainable_token_indices", "a list of token ids, or names with such lists", token_indices)?
                .unwrap_or_default(),
            rank_pattern: fields
                .take("rank_pattern", "names with ranks", |value| pattern(value, rank))?
                .unwrap_or_default(),
            alpha_pattern: fields
                .take("alpha_pattern", "names with numbers", |value| pattern(value, Value::as_f64))?
                .unwrap_or_default(),
            other: fields.0,
        };
        config.refuse_unsupported()?;
        Ok(config)
    }

    /// Fails if a setting changes what the adapter computes in a way that we do not follow.
    fn refuse_unsupported(&self) -> Result<(), AdapterConfigError> {
        let unsupported = |key: &str, value: &Value| {
            Err(AdapterConfigError::Unsupported { key: key.to_owned(), value: value.clone() })
        };
        if let Some(bias) = self.other.get("bias").filter(|bias| !bias.is_null() && *bias != "none") {
            return unsupported("bias", bias);
        }
        if let Some(init) = self.other.get("init_lora_weights").filter(|init| changes_base(init)) {
            return Err(AdapterConfigError::ChangedBase(init.clone()));
        }
        for key in CHANGES_RESULTS {
            if let Some(value) = self.other.get(*key).filter(|value| is_set(value)) {
                return unsupported(key, value);
            }
        }
        if let Some(name) = self.target_embedding() {
            return Err(AdapterConfigError::Embedding(name.to_owned()));
        }
        self.check_patterns()
    }

    /// The target that names or matches the embedding, unless other settings may leave it out again.
    fn target_embedding(&self) -> Option<&str> {
        let narrows = |key: &&str| self.other.get(*key).is_some_and(is_set);
        if ["exclude_modules", "layers_to_transform"].iter().any(narrows) {
            return None;
        }
        match &self.target_modules {
            TargetModules::Names(names) => {
                names.iter().map(String::as_str).find(|name| name.rsplit('.').next() == Some(EMBEDDING))
            }
            TargetModules::Pattern(pattern) => targets::reaches_embedding(pattern).then_some(pattern.as_str()),
        }
    }

    /// Checks the expressions of `rank_pattern` and `alpha_pattern`. Those of a file were checked when it was read.
    ///
    /// # Errors
    /// Fails if one is no regular expression that we can match.
    pub fn check_patterns(&self) -> Result<(), AdapterConfigError> {
        let patterns = self.rank_pattern.keys().map(|key| ("rank_pattern", key));
        for (key, pattern) in patterns.chain(self.alpha_pattern.keys().map(|key| ("alpha_pattern", key))) {
            expression(pattern).map_err(|source| AdapterConfigError::Pattern {
                key,
                pattern: pattern.clone(),
                source: Box::new(source),
            })?;
        }
        Ok(())
    }

    /// Writes down which model the adapter is of: a name on the Hub with its commit, or a folder.
    pub fn name_base(&mut self, base_model: String, revision: Option<String>) {
        self.base_model = Some(base_model);
        self.other.insert("revision".to_owned(), json!(revision));
    }

    /// The settings without the name of the base: those of the same adapter on a copy of its base are equal.
    #[must_use]
    pub fn without_base_name(mut self) -> Self {
        self.base_model = None;
        self.other.insert("revision".to_owned(), Value::Null);
        self
    }

    /// The rank of a module, such as `model.layers.0.self_attn.q_proj`.
    pub fn rank_of(&self, module: &str) -> usize {
        find_pattern(&self.rank_pattern, module).unwrap_or(self.rank)
    }

    /// The factor on the adapter's output in a module: `alpha / rank`, or `alpha / sqrt(rank)` for rsLoRA.
    pub fn scaling_of(&self, module: &str) -> f64 {
        let alpha = find_pattern(&self.alpha_pattern, module).unwrap_or(self.alpha);
        let rank = self.rank_of(module) as f64;
        if self.use_rslora { alpha / rank.sqrt() } else { alpha / rank }
    }

    /// Whether a tensor of the base, such as `lm_head.weight`, belongs to one of [`AdapterConfig::modules_to_save`].
    pub fn is_saved(&self, tensor: &str) -> bool {
        self.modules_to_save.iter().any(|name| is_within(tensor, name))
    }

    /// The tokens of an embedding or a head, such as `model.embed_tokens`, whose rows are trained.
    pub fn token_indices(&self, module: &str) -> Option<&[u32]> {
        let is_it = |name: &str| module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        let found = self.trainable_token_indices.iter().find(|(name, _)| is_it(name));
        found.map(|(_, tokens)| tokens.as_slice())
    }

    /// The text of `adapter_config.json`, as PEFT formats it: sorted keys, two spaces, no newline at the end.
    pub fn to_json(&self) -> String {
        let mut fields = self.other.clone();
        let mut set = |key: &str, value: Value| fields.insert(key.to_owned(), value);
        set("base_model_name_or_path", json!(self.base_model));
        set("r", json!(self.rank));
        set("lora_alpha", number(self.alpha));
        set("lora_dropout", json!(self.dropout));
        set(
            "target_modules",
            match &self.target_modules {
                TargetModules::Names(names) => json!(names),
                TargetModules::Pattern(pattern) => json!(pattern),
            },
        );
        set("use_rslora", json!(self.use_rslora));
        set("use_dora", json!(self.use_dora));
        set(
            "modules_to_save",
            match self.modules_to_save.is_empty() {
                true => Value::Null,
                false => json!(self.modules_to_save),
            },
        );
        set(
            "trainable_token_indices",
            match self.trainable_token_indices.iter().next() {
                None => Value::Null,
                Some((name, tokens)) if self.trainable_token_indices.len() == 1 && name == OF_A_LIST => json!(tokens),
                Some(_) => json!(self.trainable_token_indices),
            },
        );
        set("rank_pattern", json!(self.rank_pattern));
        set("alpha_pattern", self.alpha_pattern.iter().map(|(key, alpha)| (key.clone(), number(*alpha))).collect());
        let fields: Map<String, Value> = fields.into_iter().collect();
        format!("{:#}", Value::Object(fields))
    }
}

/// Whether a tensor belongs to a module whose path ends with `name`. As in PEFT, the end may begin within a word:
/// `norm` is `model.norm` and each `input_layernorm`.
pub(super) fn is_within(tensor: &str, name: &str) -> bool {
    let mut path = tensor;
    while let Some((module, _)) = path.rsplit_once('.') {
        if module.ends_with(name) {
            return true;
        }
        path = module;
    }
    false
}

/// Keys that change what an adapter computes, refused unless they are null, false or empty.
///
/// `fan_in_fan_out` is GPT-2's transposed weights. `inference_mode`, `task_type` and the like say how the adapter came
/// about and are harmless. So are `exclude_modules` and `layers_to_transform`: the tensors say which modules it has,
/// and one that these leave out is refused.
const CHANGES_RESULTS: &[&str] = &[
    "alora_invocation_tokens",
    "arrow_config",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
    "velora_config",
];

/// Whether PEFT takes something out of the base with this initialisation, each time that it loads the adapter.
fn changes_base(init: &Value) -> bool {
    let name = init.as_str().unwrap_or_default().to_ascii_lowercase();
    ["pissa", "corda", "olora", "loftq"].iter().any(|known| name.starts_with(known))
}

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => true,
    }
}

/// What PEFT writes for the keys that we have no field for.
fn defaults() -> BTreeMap<String, Value> {
    let fields = json!({
        "alora_invocation_tokens": null, "arrow_config": null, "auto_mapping": null, "bias": "none", "corda_config": null,
        "ensure_weight_tying": false, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "kasa_config": null, "layer_replication": null,
        "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_bias": false,
        "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core",
        "monteclora_config": null, "peft_type": "LORA", "peft_version": PEFT_VERSION, "qalora_group_size": 16,
        "revision": null, "target_parameters": null, "task_type": "CAUSAL_LM",
        "use_bdlora": null, "use_qalora": false, "velora_config": null,
    });
    let Value::Object(fields) = fields else { unreachable!("written as an object above") };
    fields.into_iter().collect()
}

/// The fields of the file that have not been read yet.
struct Fields(BTreeMap<String, Value>);

impl Fields {
    /// Takes a field out; null and absent are the same.
    fn take<T>(
        &mut self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, AdapterConfigError> {
        match self.0.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(read) => Ok(Some(read)),
                None => Err(AdapterConfigError::WrongType { key: key.to_owned(), expected, found: value }),
            },
        }
    }
}

/// The module of the token embedding, in the families that are computed natively.
const EMBEDDING: &str = "embed_tokens";

/// What a list of `trainable_token_indices` is of.
const OF_A_LIST: &str = EMBEDDING;

fn token_indices(value: &Value) -> Option<BTreeMap<String, Vec<u32>>> {
    let tokens = |value: &Value| -> Option<Vec<u32>> {
        value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    };
    match value {
        Value::Object(fields) => fields.iter().map(|(name, ids)| Some((name.clone(), tokens(ids)?))).collect(),
        list => {
            let tokens = tokens(list)?;
            Some((!tokens.is_empty()).then(|| (OF_A_LIST.to_owned(), tokens)).into_iter().collect())
        }
    }
}

fn string(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn rank(value: &Value) -> Option<usize> {
    value.as_u64().filter(|rank| *rank > 0).map(|rank| rank as usize)
}

fn target_modules(value: &Value) -> Option<TargetModules> {
    match value {
        Value::String(pattern) => Some(TargetModules::Pattern(pattern.clone())),
        names => self::names(names).map(TargetModules::Names),
    }
}

fn names(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(string).collect()
}

fn pattern<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<BTreeMap<String, T>> {
    value.as_object()?.iter().map(|(key, value)| Some((key.clone(), read(value)?))).collect()
}

/// A whole number without a decimal point, as Python writes an `int`.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

/// The end of a module's path, from a dot or the beginning on, as PEFT matches it.
fn expression(pattern: &str) -> Result<Regex, regex::Error> {
    Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"))
}

/// The value of the first pattern that matches. One that is no expression, in settings that nobody checked, matches
/// nothing.
fn find_pattern<T: Copy>(patterns: &BTreeMap<String, T>, module: &str) -> Option<T> {
    let matches = |pattern: &str| expression(pattern).is_ok_and(|expression| expression.is_match(module));
    patterns.iter().find(|(pattern, _)| matches(pattern)).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: Value) -> Result<AdapterConfig, AdapterConfigError> {
        AdapterConfig::from_fields(fields.as_object().unwrap().clone())
    }

    #[test]
    fn a_file_of_peft_passes_through_byte_for_byte() {
        for variant in ["attention", "all_linear", "rslora", "dora", "modules_to_save", "patterns"] {
            let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama31/lora");
            let path = Path::new(golden).join(variant).join("adapter/adapter_config.json");
            let config = AdapterConfig::read(&path).unwrap();
            assert_eq!(config.to_json(), std::fs::read_to_string(path).unwrap());
            assert_eq!(config.use_dora, variant == "dora");
            assert_eq!(config.use_rslora, ["rslora", "patterns"].contains(&variant));
        }
    }

    #[test]
    fn a_new_config_is_the_one_peft_writes() {
        let golden =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama31/lora/attention/adapter/adapter_config.json");
        let golden = AdapterConfig::read(Path::new(golden)).unwrap();
        let TargetModules::Names(names) = golden.target_modules.clone() else { panic!("golden names its modules") };
        assert_eq!(AdapterConfig::new(4, 8.0, names), golden);
    }

    #[test]
    fn unknown_keys_are_kept() {
        let fields = json!({ "peft_type": "LORA", "r": 8, "lora_alpha": 16.5, "target_modules": "all-linear", "from_the_future": [1] });
        let config = parse(fields).unwrap();
        assert_eq!(config.target_modules, TargetModules::Pattern("all-linear".to_owned()));
        let written: Value = serde_json::from_str(&config.to_json()).unwrap();
        assert_eq!(written["from_the_future"], json!([1]));
        assert_eq!(written["lora_alpha"], json!(16.5));
    }

    #[test]
    fn scaling_follows_patterns_and_rslora() {
        let fields = json!({
            "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": true,
            "rank_pattern": { "q_proj": 16, r"layers\.[23]\.self_attn\.(k|v)_proj": 2 },
            "alpha_pattern": { "^model\\.layers\\.1\\.self_attn.q_proj": 2 },
        });
        let config = parse(fields).unwrap();
        assert_eq!(config.scaling_of("model.layers.0.self_attn.v_proj"), 4.0);
        assert_eq!(config.rank_of("model.layers.0.self_attn.q_proj"), 16);
        assert_eq!(config.rank_of("model.layers.0.self_attn.xq_proj"), 4);
        assert_eq!(config.scaling_of("model.layers.0.self_attn.q_proj"), 2.0);
        assert_eq!(config.scaling_of("model.layers.1.self_attn.q_proj"), 0.5);
        // As Python's `re.match(r"(.*\.)?(pattern)$", path)`.
        for (module, rank) in [("2.self_attn.k_proj", 2), ("3.self_attn.v_proj", 2), ("4.self_attn.v_proj", 4)] {
            assert_eq!(config.rank_of(&format!("model.layers.{module}")), rank);
        }
        assert_eq!(config.rank_of("model.xlayers.2.self_attn.k_proj"), 4);
    }

    #[test]
    fn what_we_cannot_compute_is_refused_by_name() {
        for (key, value) in [
            ("peft_type", json!("IA3")),
            ("bias", json!("all")),
            ("fan_in_fan_out", json!(true)),
            ("ensure_weight_tying", json!(true)),
        ] {
            let mut fields = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [] });
            fields[key] = value;
            let error = parse(fields).unwrap_err();
            assert!(matches!(&error, AdapterConfigError::Unsupported { key: found, .. } if found == key), "{error}");
        }
        for init in ["pissa", "pissa_niter_4", "olora", "corda", "loftq"] {
            let fields = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], "init_lora_weights": init });
            assert!(matches!(parse(fields).unwrap_err(), AdapterConfigError::ChangedBase(_)), "{init}");
        }
        for init in [json!(true), json!("gaussian"), json!("orthogonal"), json!("eva")] {
            let fields = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], "init_lora_weights": init });
            assert!(parse(fields).is_ok(), "{init}");
        }
        let behind = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], "rank_pattern": { "(?<!k_)proj": 2 } });
        assert!(matches!(parse(behind).unwrap_err(), AdapterConfigError::Pattern { key: "rank_pattern", .. }));
        let targets = |names: Value| json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": names });
        for name in ["embed_tokens", "model.embed_tokens"] {
            let error = parse(targets(json!(["q_proj", name]))).unwrap_err();
            assert!(matches!(&error, AdapterConfigError::Embedding(found) if found == name), "{error}");
        }
        for pattern in [r".*\.(q_proj|embed_tokens)", r"model\..*"] {
            let error = parse(targets(json!(pattern))).unwrap_err();
            assert!(matches!(&error, AdapterConfigError::Embedding(found) if found == pattern), "{error}");
        }
        for fine in ["all-linear", r".*_proj", "embed_tokens", r"(?!lm_head).*"] {
            assert!(parse(targets(json!(fine))).is_ok(), "{fine}");
        }
        let mut excluded = targets(json!(["q_proj", "embed_tokens"]));
        excluded["exclude_modules"] = json!(["embed_tokens"]);
        assert!(parse(excluded).is_ok(), "the tensors tell");
        let wrong = parse(json!({ "peft_type": "LORA", "r": 0, "lora_alpha": 8, "target_modules": [] })).unwrap_err();
        assert_eq!(wrong.to_string(), "`r` in the adapter config is 0, where a whole number above 0 is expected");
    }
}
