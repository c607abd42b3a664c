//! torchtune's model builders: what is trained, and which repository has the weights.

use engine::file::tree::Node;

use super::component;
use crate::import::job::{Job, Method};
use crate::import::key::Keys;
use crate::import::reading::Reading;

/// Models by the names of their builders, with the repositories that torchtune's own configs fetch.
const REPOSITORIES: &[(&str, &str)] = &[
    ("llama2_7b", "meta-llama/Llama-2-7b-hf"),
    ("llama2_13b", "meta-llama/Llama-2-13b-hf"),
    ("llama2_70b", "meta-llama/Llama-2-70b-hf"),
    ("code_llama2_7b", "meta-llama/CodeLlama-7b-hf"),
    ("llama3_8b", "meta-llama/Meta-Llama-3-8B-Instruct"),
    ("llama3_70b", "meta-llama/Meta-Llama-3-70B-Instruct"),
    ("llama3_1_8b", "meta-llama/Llama-3.1-8B-Instruct"),
    ("llama3_1_70b", "meta-llama/Llama-3.1-70B-Instruct"),
    ("llama3_2_1b", "meta-llama/Llama-3.2-1B-Instruct"),
    ("llama3_2_3b", "meta-llama/Llama-3.2-3B-Instruct"),
    ("llama3_3_70b", "meta-llama/Llama-3.3-70B-Instruct"),
    ("mistral_7b", "mistralai/Mistral-7B-v0.1"),
    ("phi3_mini", "microsoft/Phi-3-mini-4k-instruct"),
    ("phi4_14b", "microsoft/phi-4"),
    ("gemma_2b", "google/gemma-2b"),
    ("gemma_7b", "google/gemma-7b"),
    ("gemma2_2b", "google/gemma-2-2b"),
    ("gemma2_9b", "google/gemma-2-9b"),
    ("gemma2_27b", "google/gemma-2-27b"),
    ("qwen2_0_5b", "Qwen/Qwen2-0.5B-Instruct"),
    ("qwen2_1_5b", "Qwen/Qwen2-1.5B-Instruct"),
    ("qwen2_7b", "Qwen/Qwen2-7B-Instruct"),
    ("qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B-Instruct"),
    ("qwen2_5_1_5b_base", "Qwen/Qwen2.5-1.5B"),
    ("qwen2_5_1_5b_instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    ("qwen2_5_3b", "Qwen/Qwen2.5-3B-Instruct"),
    ("qwen2_5_7b_base", "Qwen/Qwen2.5-7B"),
    ("qwen2_5_7b_instruct", "Qwen/Qwen2.5-7B-Instruct"),
    ("qwen2_5_14b_base", "Qwen/Qwen2.5-14B"),
    ("qwen2_5_14b_instruct", "Qwen/Qwen2.5-14B-Instruct"),
    ("qwen2_5_32b_base", "Qwen/Qwen2.5-32B"),
    ("qwen2_5_32b_instruct", "Qwen/Qwen2.5-32B-Instruct"),
    ("qwen2_5_72b_base", "Qwen/Qwen2.5-72B"),
    ("qwen2_5_72b_instruct", "Qwen/Qwen2.5-72B-Instruct"),
];

/// Builders of a family with every size as an argument; the folder of the checkpoint says what it is.
const FAMILIES: &[&str] = &[
    "llama2",
    "code_llama2",
    "llama3",
    "llama3_1",
    "llama3_2",
    "mistral",
    "phi3",
    "phi4",
    "gemma",
    "gemma2",
    "qwen2",
    "qwen2_5",
];

/// The arguments of the builders.
fn keys() -> Keys {
    Keys::default()
        .read("_component_", "train.method")
        .same("lora_attn_modules", "train.lora.lora_attn_modules")
        .same("apply_lora_to_mlp=false", "train.lora.apply_lora_to_mlp")
        .same("apply_lora_to_output=false", "train.lora.apply_lora_to_output")
        .whole("lora_rank=8", "train.lora.rank")
        .same("lora_alpha=16", "train.lora.alpha")
        .same("lora_dropout=0.0", "train.lora.dropout")
        .same("use_dora=false", "train.lora.use_dora")
        .read("quantize_base=false", "train.quantize.base")
        .nothing(
            "the shape is that of `config.json`",
            &[
                "vocab_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "embed_dim",
                "head_dim",
                "max_seq_len",
                "intermediate_dim",
                "norm_eps",
                "rope_base",
                "scale_factor",
                "tie_word_embeddings",
                "q_proj_bias",
                "k_proj_bias",
                "v_proj_bias",
                "q_norm",
                "k_norm",
                "hidden_capping_value",
                "final_capping_value",
                "sliding_window_size",
                "query_pre_attn_scalar",
                "norm_embeddings",
            ],
        )
        .missing("no dropout but the adapter's", &["attn_dropout=0.0"])
}

/// What is trained; returns the repository of the weights, where the builder's name says it.
pub(super) fn model(reading: &mut Reading<'_>, job: &mut Job, root: &Node) -> Option<&'static str> {
    let node = root.get("model")?;
    let mut below = reading.below(keys(), node);
    let (name, _) = component(Some(node)).unwrap_or_default();
    let (plain, method, quantised) = match (name.strip_prefix("lora_"), name.strip_prefix("qlora_")) {
        (Some(plain), _) => (plain, Method::Lora, false),
        (_, Some(plain)) => (plain, Method::Lora, true),
        _ => (name.as_str(), Method::Full, false),
    };
    job.method = method;
    let repository = REPOSITORIES.iter().find(|(known, _)| *known == plain).map(|(_, repository)| *repository);
    if repository.is_none() && !FAMILIES.contains(&plain) {
        let near = engine::suggest::nearest(plain, REPOSITORIES.iter().map(|(known, _)| *known));
        let near = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
        below.missing("_component_", format!("`{name}` is no model of a family that is computed here{near}"));
    } else if quantised {
        below.put("_component_", "train.quantize.base", "nf4_torchao");
    } else {
        below.nothing("_component_", "families are known by `config.json`");
    }
    if method == Method::Lora && !quantised && below.flag("quantize_base") {
        below.put("quantize_base", "train.quantize.base", "nf4_torchao");
    }
    if method == Method::Full {
        below.leave_out("train.lora", "nothing without an adapter");
    }
    below.finish();
    let found = reading.take(below);
    reading.parameters.extend(&found);
    reading.nothing("model", "the stages `base` and `adapter`");
    repository
}
