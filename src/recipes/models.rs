//! Models that recipes are for: some of each family that is computed natively. Any other checkpoint is set the same
//! way.

/// A model on the Hub.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) repo: &'static str,
    /// `model_type` in its `config.json`.
    pub(super) family: &'static str,
    /// In millions.
    pub(super) parameters: u64,
}

impl Model {
    pub(super) fn find(repo: &str) -> Option<&'static Self> {
        ALL.iter().find(|model| model.repo == repo)
    }
}

const fn model(family: &'static str, repo: &'static str, parameters: u64) -> Model {
    Model { repo, family, parameters }
}

pub(super) const ALL: &[Model] = &[
    model("llama", "HuggingFaceTB/SmolLM2-135M-Instruct", 135),
    model("llama", "meta-llama/Llama-3.2-1B-Instruct", 1236),
    model("llama", "meta-llama/Llama-3.2-3B-Instruct", 3213),
    model("llama", "meta-llama/Llama-3.1-8B-Instruct", 8030),
    model("mistral", "mistralai/Mistral-7B-Instruct-v0.3", 7248),
    model("qwen2", "Qwen/Qwen2.5-0.5B-Instruct", 494),
    model("qwen2", "Qwen/Qwen2.5-1.5B-Instruct", 1544),
    model("qwen2", "Qwen/Qwen2.5-3B-Instruct", 3086),
    model("qwen2", "Qwen/Qwen2.5-7B-Instruct", 7616),
    model("qwen3", "Qwen/Qwen3-0.6B", 596),
    model("qwen3", "Qwen/Qwen3-1.7B", 1721),
    model("qwen3", "Qwen/Qwen3-4B", 4022),
    model("qwen3", "Qwen/Qwen3-8B", 8191),
    model("gemma", "google/gemma-2b-it", 2506),
    model("gemma", "google/gemma-7b-it", 8538),
    model("gemma2", "google/gemma-2-2b-it", 2614),
    model("gemma2", "google/gemma-2-9b-it", 9242),
    model("phi3", "microsoft/Phi-3.5-mini-instruct", 3821),
    model("phi3", "microsoft/Phi-4-mini-instruct", 3836),
];
