//! The modules of a model that an adapter can be on: those of a configuration that is computed natively, or of any
//! checkpoint, by the names and shapes of its tensors.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

use super::targets::{EMBEDDING, HEAD};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, Outline};

/// What an adapter's settings are resolved against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Modules {
    /// Name and shape of each tensor.
    pub tensors: Vec<(String, Vec<usize>)>,
    /// The paths of every module that can be adapted, layer by layer: `model.layers.0.self_attn.q_proj` … `lm_head`.
    pub projections: Vec<String>,
    /// The module of the token embedding.
    pub embedding: String,
    /// The last parts of the paths that experts and their routers have. transformers holds experts as one tensor, and
    /// routers as modules of their own kind: neither is a linear layer there.
    pub experts: BTreeSet<String>,
    /// The `model_type` of a model whose files have every matrix transposed (inputs by outputs).
    pub transposed: Option<String>,
}

/// Architectures whose linear layers are `Conv1D` of transformers, whose weights are inputs by outputs.
const TRANSPOSED: [&str; 4] = ["gpt2", "openai-gpt", "imagegpt", "decision_transformer"];

/// A tensor of a decoder layer: `model.layers.0.self_attn.q_proj.weight`. The first number of a path is its layer.
static OF_LAYER: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^([^.]+(?:\.[^.0-9][^.]*)*)\.\d+\.(.+)$").expect("a fixed expression"));

impl From<&Config> for Modules {
    fn from(config: &Config) -> Self {
        let tensors = config.tensors();
        let matrices = tensors.iter().filter(|(_, shape)| shape.len() == 2);
        let modules = matrices.filter_map(|(name, _)| name.strip_suffix(".weight"));
        let mut projections: Vec<String> =
            modules.filter(|path| ![EMBEDDING, HEAD].contains(path)).map(str::to_owned).collect();
        // Of a tied model, too: its weight is the embedding's.
        projections.push(HEAD.to_owned());
        Self { tensors, projections, embedding: EMBEDDING.to_owned(), experts: BTreeSet::new(), transposed: None }
    }
}

impl Modules {
    /// The modules of a model that is not computed natively, as the names in its files tell: matrices of the layers,
    /// experts and their routers apart, and a head of its own.
    pub fn of_checkpoint(files: &Checkpoint, outline: &Outline) -> Self {
        let tensors: Vec<(String, Vec<usize>)> =
            files.tensors().map(|(name, info)| (name.to_owned(), info.shape.clone())).collect();
        let transposed = TRANSPOSED.contains(&outline.model_type.as_str()).then(|| outline.model_type.clone());
        Self::of_tensors(tensors, transposed)
    }

    fn of_tensors(mut tensors: Vec<(String, Vec<usize>)>, transposed: Option<String>) -> Self {
        tensors.sort_by(|(one, _), (other, _)| natural(one).cmp(&natural(other)));
        let experts = expert_names(tensors.iter().map(|(name, _)| name.as_str()));
        let matrices = tensors.iter().filter(|(_, shape)| shape.len() == 2);
        let modules: Vec<&str> = matrices.filter_map(|(name, _)| name.strip_suffix(".weight")).collect();
        let is_adapted = |path: &&str| OF_LAYER.is_match(path) && !experts.contains(last(path));
        let mut projections: Vec<String> = modules.iter().copied().filter(is_adapted).map(str::to_owned).collect();
        projections.extend(modules.iter().filter(|path| **path == HEAD).map(|path| (*path).to_owned()));
        let is_embedding = |path: &&&str| {
            ["embed_tokens", "wte", "embed_in", "word_embeddings"].contains(&last(path)) && !OF_LAYER.is_match(path)
        };
        let embedding = modules.iter().find(is_embedding).map_or(EMBEDDING, |path| path).to_owned();
        Self { projections, embedding, experts, transposed, tensors }
    }

    /// Whether it has a projection of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.projections.iter().any(|path| last(path) == name)
    }

    /// The shape of a tensor; that of the embedding for a head that has none of its own.
    pub fn shape(&self, tensor: &str) -> Option<&[usize]> {
        let find = |name: &str| self.tensors.iter().find(|(other, _)| other == name).map(|(_, shape)| shape.as_slice());
        find(tensor).or_else(|| find(&self.place(tensor)))
    }

    /// Where a tensor's values are: the head of a tied model is its embedding.
    pub fn place(&self, tensor: &str) -> String {
        let is_head = tensor.strip_suffix(".weight") == Some(HEAD);
        let has_own = || self.tensors.iter().any(|(name, _)| name == tensor);
        if is_head && !has_own() { format!("{}.weight", self.embedding) } else { tensor.to_owned() }
    }
}

/// The names that experts and, in layers that have some, routers have.
fn expert_names<'a>(tensors: impl Iterator<Item = &'a str> + Clone) -> BTreeSet<String> {
    let of_experts = tensors.clone().filter_map(|name| name.split_once(".experts.").map(|(_, rest)| rest));
    let mut names: BTreeSet<String> =
        of_experts.map(|rest| last(rest.trim_end_matches(".weight").trim_end_matches(".bias")).to_owned()).collect();
    if !names.is_empty() {
        let routers = ["gate", "router", "wg"].into_iter();
        names.extend(routers.map(str::to_owned));
    }
    names
}

/// The last part of a path.
pub(super) fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Numbers by value, so that layer 10 comes after layer 9.
fn natural(path: &str) -> Vec<(u64, &str)> {
    path.split('.').map(|part| (part.parse().unwrap_or(u64::MAX), part)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tensors: &[(&str, &[usize])]) -> Modules {
        let tensors = tensors.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect();
        Modules::of_tensors(tensors, None)
    }

    #[test]
    fn matrices_of_layers_are_adapted_in_order_and_experts_are_not() {
        let modules = of(&[
            ("model.embed_tokens.weight", &[96, 32]),
            ("model.layers.10.self_attn.q_proj.weight", &[32, 32]),
            ("model.layers.2.self_attn.q_proj.weight", &[32, 32]),
            ("model.layers.2.self_attn.q_norm.weight", &[8]),
            ("model.layers.2.block_sparse_moe.gate.weight", &[4, 32]),
            ("model.layers.2.block_sparse_moe.experts.0.w1.weight", &[48, 32]),
            ("model.norm.weight", &[32]),
            ("lm_head.weight", &[96, 32]),
        ]);
        let expected = ["model.layers.2.self_attn.q_proj", "model.layers.10.self_attn.q_proj", "lm_head"];
        assert_eq!(modules.projections, expected);
        assert!(modules.experts.contains("w1") && modules.experts.contains("gate"));
    }

    #[test]
    fn a_tied_head_is_no_module_of_its_own_and_has_the_place_of_the_embedding() {
        let modules = of(&[
            ("gpt_neox.embed_in.weight", &[96, 32]),
            ("gpt_neox.layers.0.attention.query_key_value.weight", &[96, 32]),
        ]);
        assert_eq!(modules.projections, ["gpt_neox.layers.0.attention.query_key_value"]);
        assert_eq!(modules.embedding, "gpt_neox.embed_in");
        assert_eq!(modules.place("lm_head.weight"), "gpt_neox.embed_in.weight");
        assert_eq!(modules.shape("lm_head.weight"), Some(&[96, 32][..]));
    }

    #[test]
    fn experts_in_one_tensor_are_known_by_name() {
        let modules = of(&[
            ("model.layers.0.mlp.experts.gate_up_proj", &[4, 96, 32]),
            ("model.layers.0.mlp.shared_expert.up_proj.weight", &[48, 32]),
        ]);
        assert_eq!(modules.projections, ["model.layers.0.mlp.shared_expert.up_proj"]);
        assert!(modules.experts.contains("gate_up_proj"));
    }
}
