//! Training for weights of few bits: what a file says of it, and what is noted of its results.

use std::path::Path;

use engine::artifact::Facts;
use engine::context::Draft;
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Json, Parameters};
use model::checkpoint::{CheckpointWriter, TensorSpec};
use model::config::Config;
use model::weights::{FakeQuantizedLayers, SCALES_FILE};
use safetensors::Dtype;
use serde_json::json;

/// Quantisation-aware training: in the forward pass linear layers compute as they will once they are quantised, and
/// gradients pass as if nothing had been rounded.
#[derive(Parameters, Debug, Clone, PartialEq, Eq)]
pub struct AwareParams {
    /// The format to train for.
    #[semantic]
    pub aware: Scheme,
    /// Number of weights along the input that share a scale; the inputs of each layer must be a multiple of it.
    #[semantic(default = 256, range = 2..=65536)]
    pub group_size: usize,
    /// Number of ordinary steps at the start, without quantisation.
    #[semantic(default = 0)]
    pub after_steps: u64,
    /// Linear layers that are not quantised: their names, or parts of their paths (`o_proj`, `layers.0`).
    #[semantic(default = Vec::new())]
    pub skip_modules: Vec<String>,
}

/// What a model is trained for.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// 4-bit weights, symmetric, with a scale per group; 8-bit activations, asymmetric, with a scale per token:
    /// torchao's `Int8DynActInt4WeightQATQuantizer`, to its bits. Token embeddings are not quantised, nor is an LM head
    /// that is tied to them.
    Int8DynamicActivationsInt4Weights,
}

impl AwareParams {
    /// As a trainer takes it.
    pub fn layers(&self) -> FakeQuantizedLayers {
        FakeQuantizedLayers { group_size: self.group_size, skip_modules: self.skip_modules.clone() }
    }

    /// What is noted of what was trained so.
    pub fn fact(&self) -> Json {
        json!({
            "aware": "int8_dynamic_activations_int4_weights",
            "group_size": self.group_size,
            "skip_modules": self.skip_modules,
        })
    }

    /// What such a fact says; `None` where it says something else.
    pub(super) fn of_fact(fact: &Json) -> Option<Self> {
        let modules = fact["skip_modules"].as_array()?.iter().map(|module| Some(module.as_str()?.to_owned()));
        (fact["aware"] == "int8_dynamic_activations_int4_weights").then_some(())?;
        Some(Self {
            aware: Scheme::Int8DynamicActivationsInt4Weights,
            group_size: usize::try_from(fact["group_size"].as_u64()?).ok().filter(|size| *size > 0)?,
            after_steps: 0,
            skip_modules: modules.collect::<Option<_>>()?,
        })
    }

    /// What is wrong with it on a model: a group must not reach beyond a row.
    pub fn problem_on(&self, model: &Config, span: Span) -> Option<Problem> {
        let layers = self.layers();
        let matrices = model.tensors().into_iter().filter(|(name, shape)| shape.len() == 2 && layers.covers(name));
        let inputs: Vec<(String, usize)> = matrices.map(|(name, shape)| (name, shape[1])).collect();
        let unfit: Vec<&(String, usize)> =
            inputs.iter().filter(|(_, inputs)| !inputs.is_multiple_of(self.group_size)).collect();
        let (first, wide) = unfit.first()?;
        let more = if unfit.len() > 1 { format!(" and of {} more", unfit.len() - 1) } else { String::new() };
        let message = format!(
            "`quantize.group_size` is {}, which does not divide the {wide} inputs of `{first}`{more}",
            self.group_size
        );
        let problem = Problem::error("bad-value", span, message, "does not fit the model").at("quantize.group_size");
        let largest = (2..=256).rev().find(|size| inputs.iter().all(|(_, inputs)| inputs.is_multiple_of(*size)));
        let help = match largest {
            Some(size) => format!("set `group_size: {size}`, or leave the layers out with `skip_modules`"),
            None => "leave the layers out with `skip_modules`".to_owned(),
        };
        Some(problem.with_help(help))
    }
}

/// What such a model is called where only the native backend computes it.
pub const WHAT: &str = "a model that was trained for 4-bit weights";

/// The scales of weights, by the tensor's name: `[out, in / group_size]` of each.
pub type Scales = Vec<(String, [usize; 2], Vec<f32>)>;

/// Writes the scales beside the weights of a model.
///
/// # Errors
/// Fails if they cannot be written.
pub fn write_scales(scales: &Scales, draft: &Draft) -> Result<(), StageError> {
    let written = (|| {
        let specs = scales.iter().map(|(name, shape, _)| TensorSpec::new(name, Dtype::F32, shape)).collect();
        let mut writer = CheckpointWriter::create_file(&draft.folder.join(SCALES_FILE), specs)?;
        scales.iter().try_for_each(|(name, _, scales)| writer.write_f32(name, scales))?;
        writer.finish()
    })();
    written.map(drop).or_fail(Cause::Machine, || format!("cannot write `{SCALES_FILE}`"))
}

/// Whether the weights in a folder are those of a model that was trained so, as far as its files tell.
pub fn is_aware(folder: &Path) -> bool {
    folder.join(SCALES_FILE).exists()
}

/// Whether a model was trained so, as far as its facts tell.
pub fn is_noted(model: &Facts) -> bool {
    model.get(super::quantize::QUANTIZE).is_some_and(|fact| fact.get("aware").is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A size that divides the widths of some layers alone would be refused on the others.
    #[test]
    fn a_size_that_divides_every_width_is_advised() {
        const LLAMA: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama31/config.json"));
        let mut config: Json = serde_json::from_str(LLAMA).unwrap();
        config["hidden_size"] = 64.into();
        config["intermediate_size"] = 112.into();
        let config = Config::from_json(&config.to_string()).unwrap();
        let mut aware = AwareParams {
            aware: Scheme::Int8DynamicActivationsInt4Weights,
            group_size: 32,
            after_steps: 0,
            skip_modules: Vec::new(),
        };
        let problem = aware.problem_on(&config, Span::default()).unwrap();
        assert!(problem.message.contains("the 112 inputs"), "{}", problem.message);
        assert_eq!(problem.help.as_deref(), Some("set `group_size: 16`, or leave the layers out with `skip_modules`"));
        aware.group_size = 16;
        assert!(aware.problem_on(&config, Span::default()).is_none());
    }
}
