//! `lora:`: the adapter, with its modules named as in PEFT or in torchtune.

use engine::artifact::Facts;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{Json, KeyWriter, Mapping, OneOrMore, Parameter, Parameters, Reader};
use model::peft::targets::{self, ALL_LINEAR, TargetError, Torchtune};
use model::peft::{AdapterConfig, AdapterConfigError, Modules, TargetModules};
use serde::Deserialize;
use serde_json::json;

use super::Given;
use crate::compute::checkpoint::ADDED_TOKENS;

/// The adapter of `method: lora`.
#[derive(Parameters, Debug, Clone, PartialEq)]
#[parameters(default)]
pub struct LoraParams {
    /// Rank of the update.
    #[semantic(default = 8, range = 1..)]
    pub rank: usize,
    /// The update is scaled by `alpha / rank`.
    #[semantic(default = 16.0, above = 0.0)]
    pub alpha: f64,
    /// LoRA dropout probability: the share of the adapter's inputs that each step zeroes at random.
    #[semantic(default = 0.0, range = 0.0..1.0)]
    pub dropout: f64,
    /// The linear layers with an adapter: names, `all-linear` (all except the head), or a regular expression for the
    /// whole path, as in PEFT.
    #[semantic(default)]
    pub target_modules: Targets,
    /// torchtune's form of `target_modules`: any of `q_proj`, `k_proj`, `v_proj`, `output_proj`.
    #[semantic(default)]
    pub lora_attn_modules: Vec<String>,
    /// Adds the layers of the MLP; with `lora_attn_modules`.
    #[semantic(default = false)]
    pub apply_lora_to_mlp: bool,
    /// Adds the LM head; with `lora_attn_modules`.
    #[semantic(default = false)]
    pub apply_lora_to_output: bool,
    /// Scales by `alpha / sqrt(rank)` instead (Kalajdzievski, arXiv:2312.03732).
    #[semantic(default = false)]
    pub use_rslora: bool,
    /// DoRA: trains magnitude and direction separately (Liu et al., arXiv:2402.09353).
    #[semantic(default = false)]
    pub use_dora: bool,
    /// Modules that are fully trained and saved with the adapter.
    #[semantic(default)]
    pub modules_to_save: Vec<String>,
    /// Other ranks for modules whose paths end with a match of this regular expression; of several that match, the
    /// first in alphabetical order counts.
    #[semantic(default, range = 1..)]
    pub rank_pattern: Mapping<usize>,
    /// Other alphas for modules whose paths end with a match of this regular expression; of several that match, the
    /// first in alphabetical order counts.
    #[semantic(default, above = 0.0)]
    pub alpha_pattern: Mapping<f64>,
    /// The numbers of the layers with an adapter, from 0, as in PEFT; default: all. One that the model does not have
    /// is ignored, with a warning. Not with a string as `target_modules`.
    #[semantic(default, omit_default)]
    pub layers_to_transform: OneOrMore<u64>,
    /// The name of the list of layers in the paths of the modules, as in PEFT: `layers`. Needs `layers_to_transform`.
    #[semantic(default, omit_default)]
    pub layers_pattern: OneOrMore<String>,
    /// LoRA+ (Hayou et al., arXiv:2402.12354): the learning rate of B divided by that of A. Usual: 16, with a smaller
    /// `optimizer.learning_rate`. Native backend only.
    #[semantic(default = 1.0, above = 0.0, omit_default)]
    pub learning_rate_ratio: f64,
    /// Ids of the tokens whose rows of the embedding, and of an untied LM head, are trained, as in PEFT. Default: the
    /// tokens that [add_tokens](add_tokens.md) added to the model; `[]` for none.
    #[semantic(omit_default)]
    pub trainable_token_indices: Option<Vec<u32>>,
}

/// The modules that get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Targets(pub TargetModules);

impl Default for Targets {
    fn default() -> Self {
        Self(TargetModules::Names(vec!["q_proj".to_owned(), "v_proj".to_owned()]))
    }
}

impl Parameter for Targets {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::String(text) => Some(Self(TargetModules::Pattern(text.clone()))),
            _ => Vec::<String>::read(node, reader).map(|names| Self(TargetModules::Names(names))),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match &self.0 {
            TargetModules::Names(names) => names.write_key(key),
            TargetModules::Pattern(pattern) => pattern.write_key(key),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [{ "type": "array", "items": { "type": "string" } }, { "type": "string" }], "examples": [ALL_LINEAR] })
    }
}

/// That the file and the adapter of a warm start have different values of a setting.
pub(in crate::kinds::train) fn contradicts(key: &str, file: &str, adapters: &str) -> String {
    format!("`lora.{key}` is {file}, and the adapter of the warm start has {adapters}")
}

/// What to do about that.
pub(in crate::kinds::train) const LEAVE_IT_OUT: &str = "leave it out: an existing adapter has settings of its own; \
    only `dropout` and `learning_rate_ratio` can differ (an adapter does not store the ratio: give it again)";

/// No layer is wider, and a rank beyond a layer's width says nothing more.
const MOST_RANK: usize = 1 << 16;

/// torchtune's keys.
const TORCHTUNE: [&str; 3] = ["lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output"];

/// An adapter that cannot be put onto a model.
#[derive(Debug, thiserror::Error)]
pub(in crate::kinds::train) enum LoraError {
    /// A name fits no module.
    #[error(transparent)]
    Targets(#[from] TargetError),
    /// A pattern is no regular expression.
    #[error(transparent)]
    Patterns(#[from] AdapterConfigError),
}

impl LoraParams {
    /// The settings of a fresh adapter on a model with these facts, and what a user should hear about them. Where the
    /// file names no tokens, the rows of those that were added to the model are trained.
    ///
    /// # Errors
    /// As [`LoraParams::settings`].
    pub(in crate::kinds::train) fn settings_on(
        &self,
        model: &Modules,
        facts: &Facts,
    ) -> Result<(AdapterConfig, Vec<String>), LoraError> {
        let (mut settings, notes) = self.settings(model)?;
        let added = facts.get(ADDED_TOKENS).filter(|_| self.trainable_token_indices.is_none());
        if let Some(added) = added.and_then(|added| Vec::<u32>::deserialize(added).ok()) {
            train_tokens(&mut settings, model, &added);
        }
        Ok((settings, notes))
    }

    /// The settings of the adapter on a model, as PEFT knows them, and what a user should hear about them.
    ///
    /// # Errors
    /// Fails if a target is no module of the model.
    pub(in crate::kinds::train) fn settings(&self, model: &Modules) -> Result<(AdapterConfig, Vec<String>), LoraError> {
        let mut settings = AdapterConfig::new(self.rank, self.alpha, Vec::new());
        let mut notes = Vec::new();
        settings.target_modules = if self.is_torchtune() {
            let words = Torchtune {
                lora_attn_modules: self.lora_attn_modules.clone(),
                apply_lora_to_mlp: self.apply_lora_to_mlp,
                apply_lora_to_output: self.apply_lora_to_output,
            };
            let targets = words.targets(model)?;
            notes = targets.notes;
            TargetModules::Names(targets.modules)
        } else {
            match &self.target_modules.0 {
                // The names that it means here, as PEFT saves them: it would put an adapter on experts, too.
                TargetModules::Pattern(word) if word.eq_ignore_ascii_case(ALL_LINEAR) => {
                    TargetModules::Names(targets::all_linear(model))
                }
                named => named.clone(),
            }
        };
        settings.dropout = self.dropout;
        settings.use_rslora = self.use_rslora;
        settings.use_dora = self.use_dora;
        settings.modules_to_save.clone_from(&self.modules_to_save);
        settings.rank_pattern.clone_from(&self.rank_pattern);
        settings.alpha_pattern.clone_from(&self.alpha_pattern);
        if !self.layers_to_transform.0.is_empty() {
            settings.other.insert("layers_to_transform".to_owned(), json!(self.layers_to_transform.0));
        }
        if !self.layers_pattern.0.is_empty() {
            settings.other.insert("layers_pattern".to_owned(), json!(self.layers_pattern.0));
        }
        if let Some(tokens) = &self.trainable_token_indices {
            train_tokens(&mut settings, model, tokens);
        }
        settings.check_patterns()?;
        targets::resolve_tokens(model, &settings)?;
        let adapted = targets::resolve(model, &settings)?;
        targets::resolve_saved(model, &settings)?;
        notes.extend(idle_patterns(&settings, &adapted));
        notes.extend(idle_layers(&settings, model, &self.layers_to_transform.0));
        Ok((settings, notes))
    }

    /// Name and shape of each tensor of the adapter on a model.
    ///
    /// # Errors
    /// As [`LoraParams::settings`].
    pub(in crate::kinds::train) fn trained_tensors(
        &self,
        model: &Modules,
    ) -> Result<Vec<(String, Vec<usize>)>, LoraError> {
        let (settings, _) = self.settings(model)?;
        let shape = |tensor: &str| model.shape(tensor).map(<[usize]>::to_vec);
        let mut trained = Vec::new();
        for module in targets::resolve(model, &settings)? {
            let rank = settings.rank_of(&module);
            let Some(&[out_features, in_features]) = shape(&format!("{module}.weight")).as_deref() else { continue };
            trained.push((format!("{module}.lora_A.weight"), vec![rank, in_features]));
            trained.push((format!("{module}.lora_B.weight"), vec![out_features, rank]));
            if settings.use_dora {
                trained.push((format!("{module}.lora_magnitude_vector"), vec![out_features]));
            }
        }
        for (table, tokens) in targets::resolve_tokens(model, &settings)? {
            let Some(&[_, columns]) = shape(&format!("{table}.weight")).as_deref() else { continue };
            trained.push((format!("{table}.token_adapter.trainable_tokens_delta"), vec![tokens.len(), columns]));
        }
        let saved = targets::resolve_saved(model, &settings)?.into_iter();
        trained.extend(saved.filter_map(|tensor| shape(&tensor).map(|shape| (tensor, shape))));
        Ok(trained)
    }

    /// Values that the adapter keeps of each token for its backward, over all layers of a model: what goes through the
    /// low ranks and, with DoRA, the direction of each output.
    ///
    /// # Errors
    /// As [`LoraParams::settings`].
    pub(in crate::kinds::train) fn kept_columns(&self, model: &Modules) -> Result<u64, LoraError> {
        let (settings, _) = self.settings(model)?;
        let of_module = |module: &String| {
            let direction = match model.shape(&format!("{module}.weight")) {
                Some(shape) if settings.use_dora => shape[0],
                _ => 0,
            };
            settings.rank_of(module) + direction
        };
        Ok(targets::resolve(model, &settings)?.iter().map(of_module).sum::<usize>() as u64)
    }

    fn is_torchtune(&self) -> bool {
        !self.lora_attn_modules.is_empty() || self.apply_lora_to_mlp || self.apply_lora_to_output
    }
}

/// Has an adapter train the rows of these tokens, of the embedding and of a head that is apart from it.
fn train_tokens(settings: &mut AdapterConfig, model: &Modules, tokens: &[u32]) {
    if tokens.is_empty() {
        return;
    }
    let head = "lm_head.weight";
    let tables = if model.place(head) == head { vec!["embed_tokens", "lm_head"] } else { vec!["embed_tokens"] };
    settings.trainable_token_indices = tables.into_iter().map(|table| (table.to_owned(), tokens.to_vec())).collect();
}

/// Patterns that fit none of the adapted modules: PEFT passes them over without a word.
fn idle_patterns(settings: &AdapterConfig, adapted: &[String]) -> Vec<String> {
    let plain = AdapterConfig { rank_pattern: Mapping::new(), alpha_pattern: Mapping::new(), ..settings.clone() };
    let fits = |with: AdapterConfig| adapted.iter().any(|module| with.scaling_of(module) != plain.scaling_of(module));
    let ranks = settings.rank_pattern.keys().filter(|pattern| {
        let other = Mapping::from([((*pattern).clone(), plain.rank + 1)]);
        !fits(AdapterConfig { rank_pattern: other, ..plain.clone() })
    });
    let alphas = settings.alpha_pattern.keys().filter(|pattern| {
        let other = Mapping::from([((*pattern).clone(), plain.alpha * 2.0)]);
        !fits(AdapterConfig { alpha_pattern: other, ..plain.clone() })
    });
    let named = ranks.map(|pattern| ("rank_pattern", pattern)).chain(alphas.map(|pattern| ("alpha_pattern", pattern)));
    let note = |(key, pattern)| format!("`lora.{key}` has `{pattern}`, which fits none of the adapted modules");
    named.map(note).collect()
}

/// Layers that have no module to adapt: PEFT passes them over without a word. One whose modules are trained as a whole
/// has some.
fn idle_layers(settings: &AdapterConfig, model: &Modules, layers: &[u64]) -> Vec<String> {
    let is_idle = |layer: &&u64| {
        let mut alone = settings.clone();
        alone.modules_to_save.clear();
        alone.other.insert("layers_to_transform".to_owned(), json!([layer]));
        targets::resolve(model, &alone).is_err()
    };
    let note =
        |layer: &u64| format!("`lora.layers_to_transform` has {layer}, and the model has no such layer to adapt");
    layers.iter().filter(is_idle).map(note).collect()
}

/// Where the adapter comes from that is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kinds::train) enum AdapterOrigin {
    /// It is made: the settings of the file and their defaults hold.
    Fresh,
    /// It is another stage's: its own settings hold, and those of the file must agree with them.
    Existing,
}

impl Given<LoraParams> {
    /// Whether the file says which modules get an adapter.
    fn names_targets(&self) -> bool {
        TORCHTUNE.into_iter().chain(["target_modules"]).any(|key| self.has(key))
    }

    /// The values with these targets in the place of those that the file does not give.
    fn with_targets(&self, targets: &TargetModules) -> LoraParams {
        let mut lora = self.value.clone();
        if !self.names_targets() {
            lora.target_modules = Targets(targets.clone());
        }
        lora
    }

    /// What is wrong with the values taken together.
    pub(super) fn problems(&self, span: Span) -> Vec<Problem> {
        let lora = &self.value;
        let torchtune: Vec<&str> = TORCHTUNE.into_iter().filter(|key| self.has(key)).collect();
        let problem = |code, key: &str, message: String, label: &str| {
            vec![Problem::error(code, span, message, label).at(format!("lora.{key}"))]
        };
        if let Some(word) = torchtune.first().filter(|_| self.has("target_modules")) {
            let message = format!("`lora.target_modules` and `lora.{word}` both select the layers with an adapter");
            return problem("bad-value", "target_modules", message, "give one of them");
        }
        if let Some(word) = torchtune.first().filter(|_| !self.has("lora_attn_modules")) {
            let message = format!("`lora.{word}` needs `lora.lora_attn_modules`, which is missing");
            let help = "`lora_attn_modules: []` if no attention layer should have an adapter";
            let missing = problem("missing-key", word, message, "a parameter of torchtune");
            return missing.into_iter().map(|problem| problem.with_help(help)).collect();
        }
        let ranks = [("rank", lora.rank)].into_iter();
        let mut ranks = ranks.chain(lora.rank_pattern.values().map(|rank| ("rank_pattern", *rank)));
        if let Some((key, rank)) = ranks.find(|(_, rank)| *rank > MOST_RANK) {
            let message = format!("`lora.{key}` is {rank}, more than any layer is wide");
            let too_great = problem("out-of-range", key, message, "too great");
            return too_great.into_iter().map(|problem| problem.with_help("4 to 256 are usual")).collect();
        }
        if !lora.layers_pattern.0.is_empty() && lora.layers_to_transform.0.is_empty() {
            let message = "`lora.layers_pattern` is about `lora.layers_to_transform`, which is missing".to_owned();
            return problem("missing-key", "layers_pattern", message, "of which layers?");
        }
        let is_expression = torchtune.is_empty() && matches!(lora.target_modules.0, TargetModules::Pattern(_));
        if is_expression && !lora.layers_to_transform.0.is_empty() {
            let message = "`lora.layers_to_transform` goes with a list of names as `lora.target_modules`".to_owned();
            let problem = problem("bad-value", "layers_to_transform", message, "not with a string, as in PEFT");
            let help = "list the names, or name the layers in the regular expression: `.*\\.layers\\.[01]\\..*_proj`";
            return problem.into_iter().map(|problem| problem.with_help(help)).collect();
        }
        let none = match torchtune.is_empty() {
            true => lora.target_modules.0 == TargetModules::Names(Vec::new()),
            false => !lora.is_torchtune(),
        };
        if none && lora.modules_to_save.is_empty() {
            let key = if torchtune.is_empty() { "target_modules" } else { "lora_attn_modules" };
            let message = format!("`lora.{key}` is empty: nothing would be trained");
            return problem("out-of-range", key, message, "names no module");
        }
        Vec::new()
    }

    /// What is wrong with the values on this model.
    pub(in crate::kinds::train) fn problem_on(
        &self,
        model: &Modules,
        origin: AdapterOrigin,
        span: Span,
    ) -> Option<Problem> {
        let settings = match origin {
            AdapterOrigin::Fresh => self.value.settings(model),
            // Its own targets are known when it is read; every model has linear layers.
            AdapterOrigin::Existing => {
                self.with_targets(&TargetModules::Pattern(ALL_LINEAR.to_owned())).settings(model)
            }
        };
        let error = settings.err()?;
        let key = match &error {
            LoraError::Targets(TargetError::NothingToSave { .. }) => "modules_to_save",
            LoraError::Targets(
                TargetError::NoTable(_)
                | TargetError::NoRow { .. }
                | TargetError::RowTwice(_)
                | TargetError::TiedRows
                | TargetError::RowsAndMore(_),
            ) => "trainable_token_indices",
            LoraError::Targets(TargetError::NotTorchtune { .. }) => "lora_attn_modules",
            LoraError::Targets(TargetError::NothingLeft("layers_to_transform")) => "layers_to_transform",
            LoraError::Targets(TargetError::Pattern { .. }) if self.has("layers_pattern") => "layers_pattern",
            LoraError::Targets(_) => "target_modules",
            LoraError::Patterns(AdapterConfigError::Pattern { key, .. }) => key,
            LoraError::Patterns(_) => "rank_pattern",
        };
        let problem = Problem::error("wrong-input", span, format!("`lora.{key}`: {error}"), "does not fit the model")
            .at(format!("lora.{key}"));
        let is_name = |text: &String| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        Some(match (&error, &self.value.target_modules.0) {
            (LoraError::Targets(_), TargetModules::Pattern(text)) if key == "target_modules" && text == "all" => {
                problem.with_help(format!("every linear layer but the head is `target_modules: {ALL_LINEAR}`"))
            }
            (LoraError::Targets(_), TargetModules::Pattern(text)) if key == "target_modules" && is_name(text) => {
                problem.with_help(format!(
                    "a string is a regular expression for the whole path; a list has names: `target_modules: [{text}]`"
                ))
            }
            _ => problem,
        })
    }

    /// The first setting of the file that an existing adapter contradicts, by its name, with both values. What happens
    /// only while training (dropout, LoRA+) is the file's to say.
    pub(in crate::kinds::train) fn contradiction(
        &self,
        adapter: &AdapterConfig,
        model: &Modules,
    ) -> Result<Option<(String, String, String)>, LoraError> {
        let (asked, _) = self.with_targets(&adapter.target_modules).settings(model)?;
        let resolved = |settings: &AdapterConfig| -> Result<String, LoraError> {
            Ok(targets::resolve(model, settings)?.join(", "))
        };
        let targets = TORCHTUNE.into_iter().chain(["target_modules", "layers_to_transform"]).find(|key| self.has(key));
        let json = |settings: &AdapterConfig, key: &str| match key {
            "rank" => json!(settings.rank),
            "alpha" => json!(settings.alpha),
            "use_rslora" => json!(settings.use_rslora),
            "use_dora" => json!(settings.use_dora),
            "modules_to_save" => json!(settings.modules_to_save),
            "rank_pattern" => json!(settings.rank_pattern),
            "trainable_token_indices" => json!(settings.trainable_token_indices),
            _ => json!(settings.alpha_pattern),
        };
        let plain = [
            "rank",
            "alpha",
            "use_rslora",
            "use_dora",
            "modules_to_save",
            "rank_pattern",
            "alpha_pattern",
            "trainable_token_indices",
        ];
        for key in plain.into_iter().filter(|key| self.has(key)) {
            let (file, adapters) = (json(&asked, key), json(adapter, key));
            if file != adapters {
                return Ok(Some((key.to_owned(), file.to_string(), adapters.to_string())));
            }
        }
        if let Some(key) = targets {
            let (file, adapters) = (resolved(&asked)?, resolved(adapter)?);
            if file != adapters {
                return Ok(Some((key.to_owned(), file, adapters)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
