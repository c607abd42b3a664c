//! What stage kinds say ahead about the models they read and make.

use engine::artifact::Facts;
use engine::forecast::Forecast;
use engine::parameter::Reference;
use engine::stage::InputFacts;
use model::checkpoint::Dtype;
use model::config::{Architecture, Config, Outline};
use model::memory::FrozenFormat;
use serde_json::Value;

use crate::compute::checkpoint::CONFIG;
use crate::compute::kernels;
use crate::compute::quantize::WeightFormat;

/// What a process of ours takes before it loads anything, in bytes; the pages of the program itself are those of a
/// file.
pub(crate) const PROCESS_BYTES: u64 = 8 << 20;

/// The configuration of a model that a stage reads, where its facts have it.
pub(crate) fn model_config(reference: &Reference, inputs: &InputFacts) -> Option<Config> {
    config_of(reference.facts_in(inputs)?)
}

fn config_of(facts: &Facts) -> Option<Config> {
    Config::from_json(&facts.get(CONFIG)?.to_string()).ok()
}

/// What is known of a model that a stage reads, where its facts tell that it is not native.
pub(crate) fn not_native(reference: &Reference, inputs: &InputFacts) -> Option<Outline> {
    match Architecture::from_json(&reference.facts_in(inputs)?.get(CONFIG)?.to_string()).ok()? {
        Architecture::Native(_) => None,
        Architecture::Transformers(outline) => Some(outline),
    }
}

/// Says of a model that is not native who computes it, and that nothing is estimated of its memory.
pub(crate) fn say_not_native(model: &Reference, inputs: &InputFacts, forecast: &mut Forecast) {
    if let Some(outline) = not_native(model, inputs) {
        let text = format!("{outline}: memory is not estimated");
        forecast.figure("model", outline.model_type, text);
    }
}

/// The number type of a model's weights on disk, as its configuration names it; f32 where it names none.
pub(crate) fn stored_dtype(model: &Reference, inputs: &InputFacts) -> Dtype {
    let config = model.facts_in(inputs).and_then(|facts| facts.get(CONFIG));
    let named = config.and_then(|config| config.get("torch_dtype").or_else(|| config.get("dtype")));
    match named.and_then(Value::as_str) {
        Some("bfloat16") => Dtype::BF16,
        Some("float16") => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// The size of a model's weights on disk.
pub(crate) fn checkpoint_bytes(model: &Reference, inputs: &InputFacts) -> Option<u64> {
    let per_weight = stored_dtype(model, inputs).bitsize() as u64 / 8;
    Some(config_of(model.facts_in(inputs)?)?.matrix_weights() * per_weight)
}

/// The memory of a process that runs a model without training it, with weights of a format, over so many tokens at
/// once.
pub(crate) fn inference_bytes(
    config: &Config,
    dtype: kernels::Dtype,
    stored: Dtype,
    format: &WeightFormat,
    tokens: u64,
) -> u64 {
    let format = match format {
        WeightFormat::AsStored | WeightFormat::Aware(_) => FrozenFormat::stored(config),
        WeightFormat::Blocks(format) => FrozenFormat::Blocks(*format),
        WeightFormat::Base(params) => FrozenFormat::Layers(params.base().format),
    };
    PROCESS_BYTES + model::memory::inference_bytes(config, dtype.compute(), stored, format, tokens)
}
