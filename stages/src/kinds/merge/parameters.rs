//! What a pipeline file says of a merge, and what can be known of it before it runs.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{ByteSize, Input, Parameters};
use engine::preflight::{Preflight, Work};
use engine::stage::InputFacts;
use model::checkpoint::DEFAULT_MAX_SHARD_BYTES;

use super::rows;
use crate::compute::adapter;
use crate::data::artifact::{Adapter, Model, TokensOrPacks};
use crate::preflight::PROCESS_BYTES;

/// What a pipeline file may say under `with:` for `uses: merge`.
#[derive(Parameters, Debug)]
pub struct MergeParams {
    /// The model that the adapters were trained on.
    #[semantic]
    pub model: Input<Model>,
    /// The adapter. Give this or `adapters`.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// Several adapters, each with a weight; the sum of their weighted deltas is merged. `{ collect: stage }`
    /// stands for all children of a sweep.
    #[semantic(default)]
    pub adapters: Vec<Weighted>,
    /// What adapters from elsewhere call the model that they were trained on (`base_model_name_or_path`); the name on
    /// the Hub that the model was downloaded by, if left out.
    #[cosmetic]
    pub base_name: Option<String>,
    /// Dtype of the merged weights; that of the base if left out.
    #[semantic]
    pub dtype: Option<Dtype>,
    /// Size at which a file of weights is closed and the next one begun.
    #[semantic(default = ByteSize(DEFAULT_MAX_SHARD_BYTES))]
    pub max_shard_size: ByteSize,
    /// Rows to compare the two on; without them, a few rows of random tokens.
    #[semantic]
    pub data: Option<Input<TokensOrPacks>>,
    /// Rows that are compared: of each its first document, 128 tokens at most.
    #[semantic(default = 4, range = 1..)]
    pub proof_rows: usize,
}

/// An adapter and how much of it enters.
#[derive(Parameters, Debug)]
pub struct Weighted {
    /// The adapter.
    #[semantic]
    pub adapter: Input<Adapter>,
    /// Factor on its delta; negative takes it away.
    #[semantic(default = 1.0)]
    pub weight: f64,
}

/// The number type of stored weights.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16: the range of f32, 8 significant bits.
    Bf16,
    /// IEEE half precision: values up to 65504, 11 significant bits.
    F16,
}

impl Dtype {
    pub(super) fn stored(self) -> model::checkpoint::Dtype {
        match self {
            Self::F32 => model::checkpoint::Dtype::F32,
            Self::Bf16 => model::checkpoint::Dtype::BF16,
            Self::F16 => model::checkpoint::Dtype::F16,
        }
    }
}

impl MergeParams {
    /// The adapters with their weights, however the file gives them.
    pub(super) fn weighted(&self) -> Vec<(&Input<Adapter>, f64)> {
        let one = self.adapter.iter().map(|adapter| (adapter, 1.0));
        one.chain(self.adapters.iter().map(|weighted| (&weighted.adapter, weighted.weight))).collect()
    }
}

/// What is wrong, as far as the file and the facts of the inputs tell.
pub(super) fn check(params: &MergeParams, inputs: &InputFacts, span: Span) -> Vec<Problem> {
    let mut problems = Vec::new();
    match (&params.adapter, params.adapters.is_empty()) {
        (Some(_), false) => {
            let message = "`adapter` and `adapters` are both given";
            problems.push(Problem::error("bad-value", span, message, "give one of them"));
        }
        (None, true) => {
            let problem = Problem::error("missing-key", span, "there is no adapter to merge", "which adapter?");
            problems.push(problem.with_help("say `adapter: stage`, or list several under `adapters`"));
        }
        _ => {}
    }
    let model = &params.model.reference;
    let of_others = |it: &&Input<Adapter>| adapter::is_of_others(it.reference.facts_in(inputs), model.facts_in(inputs));
    let others = params.weighted().into_iter().map(|(adapter, _)| adapter).filter(of_others);
    problems.extend(others.map(|it| adapter::problem(&it.reference, model, span)));
    problems
}

/// What it will make and cost: the peak is that of the proof, adapters apart.
pub(super) fn preflight(params: &MergeParams, inputs: &InputFacts) -> Preflight {
    let mut ahead = Preflight::default();
    let model = &params.model.reference;
    crate::preflight::expect_same_model(&mut ahead, "model", model, inputs);
    ahead.work = crate::preflight::checkpoint_bytes(model, inputs).map(|bytes| Work::new("bytes", bytes as f64));
    crate::preflight::say_not_native(model, inputs, &mut ahead);
    let Some(config) = crate::preflight::model_config(model, inputs) else { return ahead };
    let layer: u64 = config.layer_modules().iter().map(|module| 4 * module.weights()).sum();
    ahead.peak_memory_bytes = Some(PROCESS_BYTES + layer + rows::proof_bytes(params.proof_rows, &config));
    ahead.disk_bytes = match params.dtype {
        Some(Dtype::F32) => Some(4 * config.matrix_weights()),
        Some(Dtype::Bf16 | Dtype::F16) => Some(2 * config.matrix_weights()),
        None => crate::preflight::checkpoint_bytes(model, inputs),
    };
    ahead
}
