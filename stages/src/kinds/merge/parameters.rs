//! What a pipeline file says of a merge, and what can be known of it before it runs.

use engine::artifact::Facts;
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{ByteSize, Input, Parameters};
use engine::stage::InputFacts;
use model::checkpoint::DEFAULT_MAX_SHARD_BYTES;
use model::merge::MergeInto;

use super::rows;
use crate::compute::adapter;
use crate::compute::checkpoint::{self, WEIGHTS};
use crate::compute::quantize::{QUANTIZE, QuantizeParams, WeightFormat};
use crate::data::artifact::{Adapter, Model, TokensOrPacks};
use crate::data::prompt::PROMPT;
use crate::forecast::PROCESS_BYTES;

/// What a pipeline file may say under `with:` for `uses: merge`.
#[derive(Parameters, Debug)]
pub struct Merge {
    /// The model that the adapters were trained on.
    #[semantic]
    pub model: Input<Model>,
    /// The adapter. Give this or `adapters`.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// The base for adapters that were trained on a quantised base (`train` with `quantize`); required for those, an
    /// error for others.
    #[semantic(omit_default)]
    pub into: Option<IntoWeights>,
    /// Several adapters, each with a weight; the sum of their weighted deltas is merged. `{ collect: stage }` means
    /// all children of a sweep.
    #[semantic(default)]
    pub adapters: Vec<Weighted>,
    /// The name of the base in adapters of other programs (`base_model_name_or_path`); default: the name on the Hub
    /// that the model was downloaded by.
    #[cosmetic]
    pub base_name: Option<String>,
    /// Dtype of the merged weights; default: that of the base.
    #[semantic]
    pub dtype: Option<Dtype>,
    /// Maximum size of a weights file.
    #[semantic(default = ByteSize(DEFAULT_MAX_SHARD_BYTES))]
    pub max_shard_size: ByteSize,
    /// Rows for the comparison with base and adapter; default: a few rows of random tokens.
    #[semantic]
    pub data: Option<Input<TokensOrPacks>>,
    /// Number of rows that are compared: the first document of each, at most 128 tokens.
    #[semantic(default = 4, range = 1..)]
    pub proof_rows: usize,
}

/// What adapters are merged into that were trained on a quantised base.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntoWeights {
    /// The stored weights of the model: without the quantisation error, so the merged model differs from the trained
    /// one.
    Original,
    /// The dequantised weights, which the adapters were trained on: the merged model equals the trained one.
    Dequantized,
}

impl IntoWeights {
    pub(super) fn merge_into(self) -> MergeInto {
        match self {
            Self::Original => MergeInto::Original,
            Self::Dequantized => MergeInto::Dequantized,
        }
    }
}

/// An adapter and how much of it enters.
#[derive(Parameters, Debug)]
pub struct Weighted {
    /// The adapter.
    #[semantic]
    pub adapter: Input<Adapter>,
    /// Factor of its delta; a negative one subtracts it.
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

impl Merge {
    /// The adapters with their weights, however the file gives them.
    pub(super) fn weighted(&self) -> Vec<(&Input<Adapter>, f64)> {
        let one = self.adapter.iter().map(|adapter| (adapter, 1.0));
        one.chain(self.adapters.iter().map(|weighted| (&weighted.adapter, weighted.weight))).collect()
    }
}

/// What is wrong, as far as the file and the facts of the inputs tell.
pub(super) fn check(params: &Merge, inputs: &InputFacts, span: Span) -> Vec<Problem> {
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
    let facts: Option<Vec<&Facts>> =
        params.weighted().into_iter().map(|(adapter, _)| adapter.reference.facts_in(inputs)).collect();
    // What an adapter is not known to have been trained on is seen when it is there.
    let known =
        facts.filter(|facts| facts.iter().all(|facts| facts.contains_key(WEIGHTS) || facts.contains_key(QUANTIZE)));
    if let Some(Err(error)) = known.map(|facts| trained_on(params.into, &facts)) {
        let problem = Problem::error("bad-value", span, error.message.clone(), "in this stage").at("into");
        problems.push(problem.with_help_if(error.help));
    }
    problems
}

/// The quantised base that all adapters with these facts were trained on, and what they are merged into; none where
/// they were trained on weights as they are stored.
///
/// # Errors
/// Fails where `into` is missing, is given for nothing, or the adapters do not agree.
pub(super) fn trained_on(
    into: Option<IntoWeights>,
    adapters: &[&Facts],
) -> Result<Option<(QuantizeParams, MergeInto)>, StageError> {
    let wrong = |message: &str| StageError::new(Cause::BadParameters, message);
    let formats: Vec<WeightFormat> =
        adapters.iter().map(|facts| WeightFormat::of_adapter(facts)).collect::<Result<_, _>>()?;
    if formats.iter().any(|format| matches!(format, WeightFormat::Aware(_))) {
        return match into {
            Some(IntoWeights::Original) => Ok(None),
            Some(IntoWeights::Dequantized) | None => Err(wrong(
                "the adapter was trained for 4-bit weights: a merged model would have to be quantised again, which is \
                 not supported",
            )
            .with_help("`into: original` merges into the stored weights, as torchtune does; then quantise the result")),
        };
    }
    let bases: Vec<Option<QuantizeParams>> = formats
        .into_iter()
        .map(|format| match format {
            WeightFormat::Base(params) => Some(params),
            WeightFormat::AsStored | WeightFormat::Blocks(_) | WeightFormat::Aware(_) => None,
        })
        .collect();
    match (into, bases.iter().flatten().next()) {
        (None, None) => Ok(None),
        (Some(_), None) => {
            Err(wrong("`into` is for an adapter that was trained on a quantised base, and this one was not")
                .with_help("leave it out"))
        }
        (None, Some(base)) => {
            let message =
                format!("the adapter was trained on its base in `{}`, and `into` is not given", base.base.name());
            Err(wrong(&message).with_help(
                "`into: dequantized` merges into the weights that it was trained on, `into: original` into those that \
                 are stored; `merge_report.json` has the distance of both from the trained model",
            ))
        }
        (Some(into), Some(base)) if bases.iter().all(|other| other.as_ref() == Some(base)) => {
            Ok(Some((base.clone(), into.merge_into())))
        }
        (Some(_), Some(_)) => Err(wrong("the adapters were trained on their base in different formats")
            .with_help("merge them one by one, or train them on the same base")),
    }
}

/// What it will make and cost: the peak is that of the proof, adapters apart.
pub(super) fn forecast(params: &Merge, ahead: &Ahead<'_>) -> Forecast {
    let mut forecast = Forecast::default();
    let (model, inputs) = (&params.model.reference, ahead.expected);
    forecast.pass("model", ahead, model, checkpoint::config_facts().chain([PROMPT]));
    if let Some((adapter, _)) = params.weighted().first() {
        forecast.pass("model", ahead, &adapter.reference, [PROMPT]);
        checkpoint::forecast_template("model", ahead, &adapter.reference, &mut forecast);
    }
    forecast.work = crate::forecast::checkpoint_bytes(model, inputs).map(|bytes| Work::new("bytes", bytes as f64));
    crate::forecast::say_not_native(model, inputs, &mut forecast);
    let Some(config) = crate::forecast::model_config(model, inputs) else { return forecast };
    let layer: u64 = config.layer_modules().iter().map(|module| 4 * module.weights()).sum();
    forecast.peak_memory_bytes = Some(PROCESS_BYTES + layer + rows::proof_bytes(params.proof_rows, &config));
    forecast.disk_bytes = match params.dtype {
        Some(Dtype::F32) => Some(4 * config.matrix_weights()),
        Some(Dtype::Bf16 | Dtype::F16) => Some(2 * config.matrix_weights()),
        None => crate::forecast::checkpoint_bytes(model, inputs),
    };
    forecast
}
