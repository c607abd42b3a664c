//! Which modules of a model an adapter is put onto: names, `all-linear`, regular expressions, and torchtune's words.
//!
//! Names and expressions are matched as PEFT 0.21 matches them, so that a configuration means the same modules here and
//! there.

use std::collections::BTreeSet;

use regex::Regex;
use serde_json::Value;

use super::config::is_within;
use super::modules::last;
use super::{AdapterConfig, Modules, TargetModules};

/// The word for every projection but the head.
pub const ALL_LINEAR: &str = "all-linear";
/// The module of the output projection; of a tied model its weight is the embedding's.
pub(crate) const HEAD: &str = "lm_head";
/// The module of the embedding.
pub(crate) const EMBEDDING: &str = "model.embed_tokens";

/// Why targets do not fit a model.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// A name fits no projection.
    #[error("`{target}` is no projection of the model; there are: {}{}", known.join(", "), did_you_mean(nearest.as_deref()))]
    NoSuchModule {
        /// The name.
        target: String,
        /// The names that there are.
        known: Vec<String>,
        /// The one that it may have been meant for.
        nearest: Option<String>,
    },
    /// A name of [`AdapterConfig::modules_to_save`] fits no module.
    #[error("`modules_to_save` has `{target}`, which is no module of the model; there are: {}{}", known.join(", "), did_you_mean(nearest.as_deref()))]
    NothingToSave {
        /// The name.
        target: String,
        /// The names that there are.
        known: Vec<String>,
        /// The one that it may have been meant for.
        nearest: Option<String>,
    },
    /// A word is none of torchtune's.
    #[error("`{word}` is none of torchtune's attention modules: q_proj, k_proj, v_proj, output_proj")]
    NotTorchtune {
        /// The word.
        word: String,
    },
    /// The matrices of experts are one tensor in transformers, and their routers no linear layers.
    #[error(
        "`{0}` names experts or their router, which LoRA is not supported on; the projections of the attention are"
    )]
    Experts(String),
    /// PEFT adapts such matrices with `fan_in_fan_out`, which is not computed here.
    #[error("LoRA on `{0}` is not supported: its weights are transposed; `method: full` trains it")]
    Transposed(String),
    /// The embedding is a table, not a projection.
    #[error("LoRA on `embed_tokens` is not supported; `modules_to_save` can train it as a whole")]
    Embedding,
    /// A name of [`AdapterConfig::trainable_token_indices`] is neither the embedding nor the head.
    #[error("`trainable_token_indices` has `{0}`, and rows are of `embed_tokens` or `lm_head`")]
    NoTable(String),
    /// A token has no row.
    #[error("`trainable_token_indices` has {id}, and the model has {rows} tokens; an `add_tokens` stage adds some")]
    NoRow {
        /// The token.
        id: u32,
        /// The rows of the table.
        rows: usize,
    },
    /// A token stands there twice.
    #[error("`trainable_token_indices` has {0} twice")]
    RowTwice(u32),
    /// The rows of a tied model are those of its embedding.
    #[error(
        "the head of the model is its embedding: `trainable_token_indices` is a list, or has \
         `embed_tokens`, and `lm_head` has no other tokens"
    )]
    TiedRows,
    /// The rest of the table is not frozen.
    #[error("rows of `{0}` are trained (`trainable_token_indices`), and it has an adapter or is trained as a whole")]
    RowsAndMore(String),
    /// The expression matches no projection.
    #[error("the target expression `{0}` matches no projection of the model{hint}", hint = did_you_mean(nearest(.0, &[]).as_deref()))]
    NothingMatches(String),
    /// The expression is not one that we can match.
    #[error(
        "`{pattern}` is not a regular expression that can be matched (look-around and back-references are not supported)"
    )]
    Pattern {
        /// The expression.
        pattern: String,
        /// What is wrong with it.
        #[source]
        source: Box<regex::Error>,
    },
    /// A setting that narrows the targets has a value of another type than it has to.
    #[error("`{key}` = {value} cannot be read: it is {expected}")]
    Setting {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: Value,
        /// What it should be.
        expected: &'static str,
    },
    /// Targets were found, and all of them are left out again.
    #[error("no projection is left to adapt after `{0}`")]
    NothingLeft(&'static str),
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map(|nearest| format!("; did you mean `{nearest}`?")).unwrap_or_default()
}

/// Targets as torchtune's recipes name them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Torchtune {
    /// `lora_attn_modules`: any of `q_proj`, `k_proj`, `v_proj`, `output_proj`.
    pub lora_attn_modules: Vec<String>,
    /// `apply_lora_to_mlp`: the MLP's projections, too.
    pub apply_lora_to_mlp: bool,
    /// `apply_lora_to_output`: the output projection, too.
    pub apply_lora_to_output: bool,
}

/// Module names for [`AdapterConfig::target_modules`], and what to tell the user about them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Targets {
    /// The names, each once, in the order of a layer.
    pub modules: Vec<String>,
    /// Where the names mean more than the words did, in sentences.
    pub notes: Vec<String>,
}

/// The last parts of the paths, each once: `q_proj`, `k_proj` …
fn names(paths: &[String]) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for path in paths {
        let name = last(path);
        if !found.iter().any(|other| other == name) {
            found.push(name.to_owned());
        }
    }
    found
}

/// The names of every projection but the head: what PEFT makes of `all-linear`.
pub fn all_linear(modules: &Modules) -> Vec<String> {
    names(&modules.projections).into_iter().filter(|name| name != HEAD).collect()
}

impl Torchtune {
    /// The module names that these words mean on a model.
    ///
    /// Where a family has one matrix for queries, keys and values, or for gate and up, a word for one of them means the
    /// whole matrix.
    ///
    /// # Errors
    /// Fails if a word is none of torchtune's.
    pub fn targets(&self, model: &Modules) -> Result<Targets, TargetError> {
        let mut words = BTreeSet::new();
        for word in &self.lora_attn_modules {
            match word.as_str() {
                "q_proj" | "k_proj" | "v_proj" => words.insert(word.as_str()),
                "output_proj" => words.insert("o_proj"),
                _ => return Err(TargetError::NotTorchtune { word: word.clone() }),
            };
        }
        let mut notes = Vec::new();
        if model.has("qkv_proj") {
            let asked = [("q_proj"), ("k_proj"), ("v_proj")].into_iter().filter(|word| words.remove(word)).count();
            if asked > 0 {
                words.insert("qkv_proj");
            }
            if (1..3).contains(&asked) {
                notes.push(
                    "this model has one `qkv_proj` for queries, keys and values: the adapter is on all three"
                        .to_owned(),
                );
            }
        }
        if self.apply_lora_to_mlp {
            words.extend(match model.has("gate_up_proj") {
                false => ["gate_proj", "up_proj", "down_proj"].as_slice(),
                true => &["gate_up_proj", "down_proj"],
            });
        }
        if self.apply_lora_to_output {
            words.insert(HEAD);
        }
        let modules = names(&model.projections).into_iter().filter(|name| words.contains(name.as_str()));
        let modules: Vec<String> = modules.collect();
        if let (true, Some(word)) = (modules.is_empty(), words.first()) {
            return Err(TargetError::NothingMatches((*word).to_owned()));
        }
        Ok(Targets { modules, notes })
    }
}

/// The paths of the modules that an adapter of these settings is put onto, layer by layer.
///
/// `exclude_modules`, `layers_to_transform` and `layers_pattern` narrow them, and modules that are trained as a whole
/// have no adapter beside that.
///
/// # Errors
/// Fails if a name fits no projection, or none is left.
pub fn resolve(model: &Modules, settings: &AdapterConfig) -> Result<Vec<String>, TargetError> {
    if let Some(model_type) = &model.transposed {
        return Err(TargetError::Transposed(model_type.clone()));
    }
    let targets = targeted(model.projections.clone(), settings);
    let found = match &settings.target_modules {
        TargetModules::Names(names) => {
            names.iter().try_for_each(|name| check_name(name, model))?;
            in_layers(targets?, settings)?
        }
        TargetModules::Pattern(word) if word.eq_ignore_ascii_case(ALL_LINEAR) => in_layers(targets?, settings)?,
        TargetModules::Pattern(pattern) => {
            let found = targets?;
            if whole(pattern)?.is_match(&model.embedding) {
                return Err(TargetError::Embedding);
            }
            if found.is_empty() {
                return Err(TargetError::NothingMatches(pattern.clone()));
            }
            found
        }
    };
    let found = not_excluded(found, settings)?;
    let adapted: Vec<_> = found.into_iter().filter(|path| !settings.is_saved(&format!("{path}.weight"))).collect();
    match adapted.is_empty() && settings.target_modules != TargetModules::Names(Vec::new()) {
        true => Err(TargetError::NothingLeft("modules_to_save")),
        false => Ok(adapted),
    }
}

/// The first of the modules of an adapter that its settings leave out, and the setting that does.
///
/// A setting that cannot be read here, such as an expression with look-around, leaves nothing out.
pub(super) fn left_out(modules: &[String], settings: &AdapterConfig) -> Option<(String, &'static str)> {
    // As in PEFT, layers narrow the ends of names, and neither whole paths nor expressions.
    let has_layers = |path: &&String| match &settings.target_modules {
        TargetModules::Names(names) => !names.contains(path),
        TargetModules::Pattern(word) => word.eq_ignore_ascii_case(ALL_LINEAR),
    };
    let layered: Vec<String> = modules.iter().filter(has_layers).cloned().collect();
    first_gone(modules, "target_modules", targeted(modules.to_vec(), settings))
        .or_else(|| first_gone(&layered, "layers_to_transform", in_layers(layered.clone(), settings)))
        .or_else(|| first_gone(modules, "exclude_modules", not_excluded(modules.to_vec(), settings)))
}

/// The first of the paths that is not among those left, which are in the same order; and the setting that left it out.
fn first_gone(
    paths: &[String],
    key: &'static str,
    left: Result<Vec<String>, TargetError>,
) -> Option<(String, &'static str)> {
    let left = match left {
        Err(TargetError::NothingLeft(_)) => Vec::new(),
        left => left.ok()?,
    };
    let (_, path) = paths.iter().enumerate().find(|(at, path)| left.get(*at) != Some(*path))?;
    Some((path.clone(), key))
}

/// What to say, after their shapes, of an embedding or a head that has more rows in an adapter than in the model; empty
/// where that is not what differs.
pub fn vocabulary_hint(tensor: &str, adapter: &[usize], model: &[usize]) -> String {
    let is_table = [EMBEDDING, HEAD].contains(&tensor.strip_suffix(".weight").unwrap_or(tensor));
    match (adapter, model) {
        (&[tokens, columns], &[rows, same]) if is_table && columns == same && tokens > rows => format!(
            "; the adapter is of a vocabulary of {tokens} tokens and the model has {rows}: resize the model first, with \
             an `add_tokens` stage"
        ),
        _ => String::new(),
    }
}

/// The tensors of the base that an adapter of these settings trains as a whole.
///
/// # Errors
/// Fails if a name fits no module.
pub fn resolve_saved(model: &Modules, settings: &AdapterConfig) -> Result<Vec<String>, TargetError> {
    let mut tensors: Vec<String> = model.tensors.iter().map(|(name, _)| name.clone()).collect();
    let head = format!("{HEAD}.weight");
    if !tensors.contains(&head) {
        tensors.push(head);
    }
    for target in &settings.modules_to_save {
        if !tensors.iter().any(|tensor| is_within(tensor, target)) {
            let modules: Vec<String> =
                tensors.iter().filter_map(|name| Some(name.rsplit_once('.')?.0.to_owned())).collect();
            let known = names(&modules);
            let nearest = nearest(target, &known);
            return Err(TargetError::NothingToSave { target: target.clone(), known, nearest });
        }
    }
    Ok(tensors.into_iter().filter(|tensor| settings.is_saved(tensor)).collect())
}

/// The embedding or the head, each with the tokens whose rows an adapter of these settings trains, by their paths. Of a
/// tied model that is the embedding.
///
/// # Errors
/// Fails if there is no such table or row, or more of the table is trained.
pub fn resolve_tokens<'a>(
    model: &Modules,
    settings: &'a AdapterConfig,
) -> Result<Vec<(String, &'a [u32])>, TargetError> {
    let known = |name: &&String| is_named(&model.embedding, name) || is_named(HEAD, name);
    if let Some(name) = settings.trainable_token_indices.keys().find(|name| !known(name)) {
        return Err(TargetError::NoTable(name.clone()));
    }
    let head = format!("{HEAD}.weight");
    let is_tied = model.place(&head) != head;
    let [of_embedding, of_head] = [model.embedding.as_str(), HEAD].map(|path| settings.token_indices(path));
    let of_head = match (is_tied, of_embedding, of_head) {
        (true, embedding, Some(head)) if embedding != Some(head) => return Err(TargetError::TiedRows),
        (true, ..) => None,
        (false, _, head) => head,
    };
    let tables = [(model.embedding.as_str(), of_embedding), (HEAD, of_head)];
    let found: Vec<_> = tables.into_iter().filter_map(|(path, tokens)| Some((path.to_owned(), tokens?))).collect();
    let adapted = if found.is_empty() { Vec::new() } else { resolve(model, settings)? };
    for (path, tokens) in &found {
        let rows = model.shape(&format!("{path}.weight")).map_or(0, |shape| shape[0]);
        let mut seen = BTreeSet::new();
        for &id in *tokens {
            if id as usize >= rows {
                return Err(TargetError::NoRow { id, rows });
            }
            if !seen.insert(id) {
                return Err(TargetError::RowTwice(id));
            }
        }
        let more =
            |path: &str| adapted.iter().any(|other| other == path) || settings.is_saved(&format!("{path}.weight"));
        if more(path) || (is_tied && more(HEAD)) {
            return Err(TargetError::RowsAndMore(path.clone()));
        }
    }
    Ok(found)
}

fn check_name(target: &str, model: &Modules) -> Result<(), TargetError> {
    if model.projections.iter().any(|path| is_named(path, target)) {
        return Ok(());
    }
    if is_named(&model.embedding, target) {
        return Err(TargetError::Embedding);
    }
    if model.experts.contains(last(target)) {
        return Err(TargetError::Experts(target.to_owned()));
    }
    let known = names(&model.projections);
    let nearest = nearest(target, &known);
    Err(TargetError::NoSuchModule { target: target.to_owned(), known, nearest })
}

/// Whether a module's path is, or ends with a dot and, the name.
fn is_named(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The known name that a wrong one is most like, if it is like one at all.
fn nearest(target: &str, known: &[String]) -> Option<String> {
    // What other programs call every projection.
    if ["all", "all_linear", "linear", "all-modules"].contains(&target) {
        return Some(ALL_LINEAR.to_owned());
    }
    let like = |name: &&String| strsim::jaro_winkler(last(target), name);
    let best = known.iter().max_by(|one, other| like(one).total_cmp(&like(other)))?;
    (like(&best) > 0.75).then(|| best.clone())
}

/// An expression that has to match all of a text, as Python's `re.fullmatch`.
fn whole(pattern: &str) -> Result<Regex, TargetError> {
    compile(pattern, &format!("^(?:{pattern})$"))
}

/// Whether an expression as `target_modules` matches the embedding of a model that is computed natively. One that
/// cannot be matched is told where targets are resolved.
pub(super) fn reaches_embedding(pattern: &str) -> bool {
    whole(pattern).is_ok_and(|expression| expression.is_match(EMBEDDING))
}

/// An expression from the start of a text, as Python's `re.match`.
fn compile(pattern: &str, expression: &str) -> Result<Regex, TargetError> {
    let failed = |source| TargetError::Pattern { pattern: pattern.to_owned(), source: Box::new(source) };
    Regex::new(expression).map_err(failed)
}

/// Keeps what `target_modules` names.
fn targeted(paths: Vec<String>, settings: &AdapterConfig) -> Result<Vec<String>, TargetError> {
    let paths = paths.into_iter();
    Ok(match &settings.target_modules {
        TargetModules::Names(names) => paths.filter(|path| names.iter().any(|name| is_named(path, name))).collect(),
        TargetModules::Pattern(word) if word.eq_ignore_ascii_case(ALL_LINEAR) => {
            paths.filter(|path| path != HEAD).collect()
        }
        TargetModules::Pattern(pattern) => {
            let expression = whole(pattern)?;
            paths.filter(|path| expression.is_match(path)).collect()
        }
    })
}

/// Leaves out what `exclude_modules` names.
fn not_excluded(paths: Vec<String>, settings: &AdapterConfig) -> Result<Vec<String>, TargetError> {
    let key = "exclude_modules";
    let left: Vec<String> = match settings.other.get(key) {
        None | Some(Value::Null) => return Ok(paths),
        Some(Value::String(pattern)) => {
            let expression = whole(pattern)?;
            paths.into_iter().filter(|path| !expression.is_match(path)).collect()
        }
        Some(value) => {
            let expected = "a list of names or a regular expression";
            let names = strings(value).ok_or_else(|| TargetError::Setting { key, value: value.clone(), expected })?;
            paths.into_iter().filter(|path| !names.iter().any(|name| is_named(path, name))).collect()
        }
    };
    if left.is_empty() { Err(TargetError::NothingLeft(key)) } else { Ok(left) }
}

/// Keeps those in the layers that `layers_to_transform` names, where it names some.
fn in_layers(paths: Vec<String>, settings: &AdapterConfig) -> Result<Vec<String>, TargetError> {
    let key = "layers_to_transform";
    let layers: Vec<u64> = match settings.other.get(key) {
        None | Some(Value::Null) => return Ok(paths),
        Some(Value::Array(layers)) if layers.is_empty() => return Ok(paths),
        Some(value) => {
            let one = value.as_u64().map(|layer| vec![layer]);
            let many = || value.as_array()?.iter().map(Value::as_u64).collect();
            let wrong = || TargetError::Setting { key, value: value.clone(), expected: "a layer or a list of layers" };
            one.or_else(many).ok_or_else(wrong)?
        }
    };
    let expressions = layer_expressions(settings)?;
    let layer_of = |path: &str| {
        let found = expressions.iter().find_map(|expression| expression.captures(path))?;
        found.get(1)?.as_str().parse::<u64>().ok()
    };
    let left: Vec<String> =
        paths.into_iter().filter(|path| layer_of(path).is_some_and(|layer| layers.contains(&layer))).collect();
    if left.is_empty() { Err(TargetError::NothingLeft(key)) } else { Ok(left) }
}

/// Expressions whose first group is a path's layer.
fn layer_expressions(settings: &AdapterConfig) -> Result<Vec<Regex>, TargetError> {
    let key = "layers_pattern";
    let patterns = match settings.other.get(key) {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::String(pattern)) if pattern.is_empty() => Vec::new(),
        Some(Value::String(pattern)) => vec![pattern.clone()],
        Some(value) => {
            let expected = "a name or a list of names";
            strings(value).ok_or_else(|| TargetError::Setting { key, value: value.clone(), expected })?
        }
    };
    if patterns.is_empty() {
        return Ok(vec![compile("", r"^.*?\.[^.]*\.(\d+)\.")?]);
    }
    patterns.iter().map(|pattern| compile(pattern, &format!(r"^(?:|.*?\.)(?:{pattern})\.(\d+)\."))).collect()
}

fn strings(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|value| value.as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::config::Config;

    fn modules(family: &str) -> Modules {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(family);
        Modules::from(&Config::read(&folder).unwrap())
    }

    fn settings(target_modules: TargetModules) -> AdapterConfig {
        AdapterConfig { target_modules, ..AdapterConfig::new(4, 8.0, Vec::new()) }
    }

    fn names_of(words: &[&str]) -> TargetModules {
        TargetModules::Names(words.iter().map(|word| (*word).to_owned()).collect())
    }

    fn resolved(family: &str, settings: &AdapterConfig) -> Vec<String> {
        resolve(&modules(family), settings).unwrap()
    }

    #[test]
    fn names_end_at_a_dot_and_all_linear_is_all_but_the_head() {
        assert_eq!(
            resolved("qwen2", &settings(names_of(&["q_proj", "0.mlp.up_proj", "lm_head"]))),
            [
                "model.layers.0.self_attn.q_proj",
                "model.layers.0.mlp.up_proj",
                "model.layers.1.self_attn.q_proj",
                "lm_head"
            ]
        );
        let every = resolved("phi3", &settings(TargetModules::Pattern("all-linear".to_owned())));
        assert_eq!(every.len(), 8);
        assert!(!every.contains(&HEAD.to_owned()));
        assert_eq!(all_linear(&modules("phi3")), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]);
    }

    #[test]
    fn expressions_match_the_whole_path() {
        let pattern = |pattern: &str| settings(TargetModules::Pattern(pattern.to_owned()));
        assert_eq!(resolved("llama31", &pattern(r"model\.layers\.1\..*(k|up)_proj")).len(), 2);
        let partly = resolve(&modules("llama31"), &pattern("k_proj")).unwrap_err();
        assert!(matches!(partly, TargetError::NothingMatches(_)), "{partly}");
        let behind = resolve(&modules("llama31"), &pattern(".*(?<!k)_proj")).unwrap_err();
        assert!(matches!(behind, TargetError::Pattern { .. }), "{behind}");
        assert!(matches!(resolve(&modules("llama31"), &pattern(".*")), Err(TargetError::Embedding)));
    }

    #[test]
    fn targets_can_be_narrowed() {
        let mut narrowed = settings(names_of(&["q_proj", "k_proj", "lm_head"]));
        narrowed.other.insert("layers_to_transform".to_owned(), json!([1]));
        narrowed.other.insert("exclude_modules".to_owned(), json!(".*k_proj"));
        assert_eq!(resolved("llama31", &narrowed), ["model.layers.1.self_attn.q_proj"]);
        narrowed.other.insert("layers_pattern".to_owned(), json!("blocks"));
        assert!(matches!(
            resolve(&modules("llama31"), &narrowed),
            Err(TargetError::NothingLeft("layers_to_transform"))
        ));
        narrowed.other.insert("layers_to_transform".to_owned(), json!("1"));
        assert!(matches!(resolve(&modules("llama31"), &narrowed), Err(TargetError::Setting { .. })));
        let mut saved = settings(names_of(&["q_proj", "k_proj"]));
        saved.modules_to_save = vec!["k_proj".to_owned()];
        assert_eq!(resolved("qwen2", &saved).len(), 2);
        let tensors = resolve_saved(&modules("qwen2"), &saved).unwrap();
        assert_eq!(tensors[..2], ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_proj.bias"]);
    }

    #[test]
    fn what_settings_leave_out_of_an_adapter_is_found_as_peft_does() {
        let [q, k, other] = ["0.self_attn.q_proj", "0.self_attn.k_proj", "1.self_attn.q_proj"]
            .map(|path| format!("model.layers.{path}"));
        let modules = [q.clone(), k.clone(), other.clone()];
        let left_out = |settings: &AdapterConfig| left_out(&modules, settings);
        let every = settings(names_of(&["q_proj", "k_proj"]));
        assert_eq!(left_out(&every), None);
        assert_eq!(left_out(&settings(names_of(&["q_proj"]))), Some((k.clone(), "target_modules")));
        assert_eq!(left_out(&settings(names_of(&["proj"]))), Some((q.clone(), "target_modules")));
        let pattern = |pattern: &str| settings(TargetModules::Pattern(pattern.to_owned()));
        assert_eq!(left_out(&pattern("all-linear")), None);
        assert_eq!(left_out(&pattern(r".*\.0\..*_proj")), Some((other.clone(), "target_modules")));
        assert_eq!(left_out(&pattern(".*(?<!v)_proj")), None, "it cannot be matched here");
        let with = |mut settings: AdapterConfig, key: &str, value: Value| {
            settings.other.insert(key.to_owned(), value);
            settings
        };
        let first_layer = |settings| with(settings, "layers_to_transform", json!([0]));
        assert_eq!(left_out(&first_layer(every.clone())), Some((other.clone(), "layers_to_transform")));
        assert_eq!(left_out(&with(every.clone(), "layers_to_transform", json!(7))).unwrap().0, q);
        assert_eq!(
            left_out(&first_layer(settings(names_of(&["q_proj", "k_proj", other.as_str()])))),
            None,
            "a whole path"
        );
        assert_eq!(left_out(&first_layer(pattern(".*_proj"))), None, "an expression");
        for excluded in [json!(["k_proj"]), json!(".*k_proj")] {
            let excluding = with(every.clone(), "exclude_modules", excluded);
            assert_eq!(left_out(&excluding), Some((k.clone(), "exclude_modules")));
        }
        assert_eq!(super::left_out(&[], &first_layer(every)), None);
    }

    #[test]
    fn a_larger_vocabulary_is_reported() {
        let hint = vocabulary_hint("lm_head.weight", &[324, 64], &[320, 64]);
        assert!(hint.contains("324 tokens and the model has 320"), "{hint}");
        assert!(hint.contains("`add_tokens`"), "{hint}");
        assert_eq!(vocabulary_hint("model.embed_tokens", &[324, 64], &[320, 64]), hint);
        for (tensor, adapter) in [("lm_head", [320, 32]), ("lm_head", [319, 64]), ("model.norm", [324, 64])] {
            assert_eq!(vocabulary_hint(tensor, &adapter, &[320, 64]), "", "{tensor} {adapter:?}");
        }
    }

    #[test]
    fn torchtunes_words_are_mapped_to_the_family() {
        let words = Torchtune {
            lora_attn_modules: ["v_proj", "q_proj", "output_proj"].map(str::to_owned).to_vec(),
            apply_lora_to_mlp: true,
            apply_lora_to_output: true,
        };
        let split = words.targets(&modules("llama31")).unwrap();
        assert_eq!(split.modules, ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]);
        assert!(split.notes.is_empty());
        let fused = words.targets(&modules("phi3")).unwrap();
        assert_eq!(fused.modules, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]);
        assert_eq!(fused.notes.len(), 1, "k_proj was not asked for");
        let wrong = Torchtune { lora_attn_modules: vec!["o_proj".to_owned()], ..Torchtune::default() };
        assert!(matches!(wrong.targets(&modules("llama31")), Err(TargetError::NotTorchtune { .. })));
    }

    #[test]
    fn a_wrong_name_is_answered_with_the_names_that_there_are() {
        let wrong =
            |family: &str, name: &str| resolve(&modules(family), &settings(names_of(&[name]))).unwrap_err().to_string();
        assert_eq!(
            wrong("phi3", "q_proj"),
            "`q_proj` is no projection of the model; there are: qkv_proj, o_proj, gate_up_proj, down_proj, lm_head; \
             did you mean `qkv_proj`?"
        );
        assert!(wrong("llama31", "w1").ends_with("gate_proj, up_proj, down_proj, lm_head"));
        assert!(wrong("llama31", "embed_tokens").contains("modules_to_save"));
        let mut saved = settings(names_of(&["q_proj"]));
        saved.modules_to_save = vec!["lm_haed".to_owned()];
        let error = resolve_saved(&modules("qwen2"), &saved).unwrap_err().to_string();
        assert!(error.ends_with("did you mean `lm_head`?"), "{error}");
    }
}
