//! `uses: quantize`: a model in the Hub's form with its linear layers quantised as bitsandbytes stores them, and how
//! far that is from what it was: each tensor, and the perplexity of given rows.

mod perplexity;

use std::fs;
use std::ops::ControlFlow;

use engine::artifact::{Facts, Output};
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind, Threads};
use model::bitsandbytes::{Layout, Options, Progress, QuantizeError, Report, TensorError};
use model::checkpoint::{DEFAULT_MAX_SHARD_BYTES, Flush};
use model::config::Architecture;
use model::weights::{BaseFormat, Codebook, Nf4, QuantizedBase};
use serde_json::{Value, json};

use crate::compute::checkpoint::{self, CONFIG, QUANTIZATION, SAVED_TEMPLATE};
use crate::compute::quantize::warn_of_idle_names;
use crate::data::artifact::{Model, OutputKind, TokensOrPacks};
use crate::data::prompt::PROMPT;
use crate::forecast::PROCESS_BYTES;

/// What the stage writes beside the weights.
const REPORT_FILE: &str = "quantize_report.json";

/// What a pipeline file may say under `with:` for `uses: quantize`.
#[derive(Parameters, Debug)]
pub struct Quantize {
    /// The model.
    #[semantic]
    pub model: Input<Model>,
    /// The format.
    #[semantic(default = Format::BnbNf4)]
    pub format: Format,
    /// Whether the scales of blocks are quantised, too (`bnb_nf4`, `bnb_fp4`).
    #[semantic(default = true)]
    pub double_quantization: bool,
    /// Number of weights in a block, which share a scale: a power of two (`bnb_nf4`, `bnb_fp4`).
    #[semantic(default = 64, range = 32..=4096)]
    pub block_size: usize,
    /// Linear layers that are not quantised, besides the head: their names, or parts of their paths (`o_proj`,
    /// `layers.0`).
    #[semantic(default = Vec::new())]
    pub skip_modules: Vec<String>,
    /// Maximum error of a tensor: the norm of the difference divided by the norm of the tensor. Above it the stage
    /// fails.
    #[semantic]
    pub max_relative_error: Option<f64>,
    /// Rows whose perplexity is computed before and after.
    #[semantic]
    pub data: Option<Input<TokensOrPacks>>,
    /// Maximum ratio of the perplexities of `data` after and before. Above it the stage fails.
    #[semantic]
    pub max_perplexity_ratio: Option<f64>,
}

/// A format of bitsandbytes.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// 4-bit quantiles of a normal distribution, as `load_in_4bit` with `nf4` stores them.
    #[semantic(rename = "bnb_nf4")]
    BnbNf4,
    /// 4-bit floats, as `load_in_4bit` with `fp4` stores them.
    #[semantic(rename = "bnb_fp4")]
    BnbFp4,
    /// 8 bits with one scale per row, as `load_in_8bit` (LLM.int8) stores them.
    #[semantic(rename = "bnb_int8")]
    BnbInt8,
}

impl Quantize {
    fn layout(&self) -> Layout {
        let (block_size, double_quantization) = (self.block_size, self.double_quantization);
        match self.format {
            Format::BnbNf4 => Layout::FourBits(Nf4 { codebook: Codebook::Nf4, block_size, double_quantization }),
            Format::BnbFp4 => Layout::FourBits(Nf4 { codebook: Codebook::Fp4, block_size, double_quantization }),
            Format::BnbInt8 => Layout::Int8,
        }
    }
}

impl StageKind for Quantize {
    const NAME: &'static str = "quantize";
    const VERSION: u32 = 2; // 2: as `merge` 3.
    const ABOUT: &'static str = "Stores a model's linear layers in 4 or 8 bits, for transformers with bitsandbytes.";
    const ALSO_CALLED: &'static [&'static str] = &["quantise", "bitsandbytes", "bnb"];
    const GOAL: bool = true;
}

impl Stage for Quantize {
    fn outputs(&self) -> Vec<Output> {
        vec![Model::output("model")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let bad = |field: &str, message: String, label: &str| {
            Problem::error("bad-value", span, message, label).at(field.to_owned())
        };
        let mut problems = Vec::new();
        if !self.block_size.is_power_of_two() {
            let message = format!("`block_size` is {}, and it has to be a power of two", self.block_size);
            problems.push(bad("block_size", message, "not a power of two"));
        }
        if self.format == Format::BnbInt8 && (self.block_size, self.double_quantization) != (64, true) {
            let message = "`bnb_int8` has a scale to a row, and neither blocks nor double quantisation".to_owned();
            problems.push(bad("format", message, "without `block_size` and `double_quantization`"));
        }
        if self.max_relative_error.is_some_and(|most| !most.is_finite() || most <= 0.0) {
            let message = "`max_relative_error` has to be above 0".to_owned();
            problems.push(bad("max_relative_error", message, "not above 0"));
        }
        if self.max_perplexity_ratio.is_some() && self.data.is_none() {
            let message = "`max_perplexity_ratio` needs rows to compute the perplexity of".to_owned();
            problems.push(bad("max_perplexity_ratio", message, "without `data`").with_help("say `data: tokens`"));
        }
        let config = self.model.reference.facts_in(inputs).and_then(|facts| facts.get(CONFIG));
        if let Some(method) = config.and_then(|config| config.get(QUANTIZATION)?.get("quant_method")) {
            let message = format!("the model's weights are stored quantised (`{}`)", method.as_str().unwrap_or("?"));
            let problem = bad("model", message, "quantised already");
            problems.push(problem.with_help("start from the model before it was quantised"));
        } else if let Some(Ok(Architecture::Transformers(_))) =
            config.map(|config| Architecture::from_json(&config.to_string()))
        {
            let message = "`quantize` is for models that are computed natively".to_owned();
            problems.push(bad("model", message, "of another family"));
        }
        problems
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast { peak_memory_bytes: Some(PROCESS_BYTES), ..Forecast::default() };
        let base = &self.model.reference;
        forecast.pass("model", ahead, base, checkpoint::config_facts().chain([PROMPT, SAVED_TEMPLATE]));
        if let Some((Value::Object(config), grade)) = ahead.fact(base, CONFIG) {
            let mut config = config.clone();
            config.insert(QUANTIZATION.to_owned(), model::bitsandbytes::settings(&config, self.layout(), &[]));
            forecast.put("model", CONFIG, config, grade);
        }
        forecast
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let base = context.open(&self.model)?;
        let covered = QuantizedBase {
            format: BaseFormat::FourBits(Nf4::default()),
            skip_modules: self.skip_modules.clone(),
            layers: None,
        };
        warn_of_idle_names(&covered, &base.folder, "skip_modules", context)?;
        let options = Options {
            layout: self.layout(),
            skip_modules: self.skip_modules.clone(),
            max_shard_bytes: DEFAULT_MAX_SHARD_BYTES,
            flush: Flush::Later,
        };
        let before = match &self.data {
            Some(data) => Some(perplexity::of(&base.folder, data, context)?),
            None => None,
        };
        let mut draft = context.create("model")?;
        let profile = context.profile().clone();
        let writing = profile.phase("quantise and write");
        let mut observe = |Progress { done, total }| {
            context.progress("bytes", done, Some(total), Some("quantising".to_owned()));
            if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let report = model::bitsandbytes::write(&base.folder, &draft.folder, &options, &mut observe);
        let report = report.map_err(failure)?;
        drop(writing);
        draft.begin_flush()?;
        checkpoint::carry_along(&base.folder, &draft.folder)?;
        let after = match &self.data {
            Some(data) => Some(perplexity::of(&draft.folder, data, context)?),
            None => None,
        };
        let perplexities = before.zip(after);
        check_bounds(self, &report, perplexities)?;
        let mut facts: Facts = checkpoint::facts(&mut draft)?;
        let of_base = |name: &str| Some((name.to_owned(), base.description.facts.get(name)?.clone()));
        facts.extend([PROMPT, SAVED_TEMPLATE].into_iter().filter_map(of_base));
        let written = format!("{:#}\n", described(&report, perplexities));
        fs::write(draft.folder.join(REPORT_FILE), written)
            .or_fail(Cause::Machine, || format!("cannot write `{REPORT_FILE}`"))?;
        context.report(text(&report, perplexities));
        context.seal(draft, facts, None)
    }
}

/// The tensor with the largest error.
fn worst(report: &Report) -> Option<&TensorError> {
    report.quantized.iter().max_by(|one, other| one.relative.total_cmp(&other.relative))
}

fn check_bounds(params: &Quantize, report: &Report, perplexities: Option<(f64, f64)>) -> Result<(), StageError> {
    let help = "raise the bound, leave layers as they are with `skip_modules`, or take a format of more bits";
    if let (Some(most), Some(worst)) = (params.max_relative_error, worst(report))
        && worst.relative > most
    {
        let (name, found) = (&worst.name, worst.relative);
        let message = format!("`{name}` is quantised with an error of {found:.4}, and `max_relative_error` is {most}");
        return Err(StageError::new(Cause::Numeric, message).with_help(help));
    }
    match (params.max_perplexity_ratio, perplexities) {
        (Some(most), Some((before, after))) if after / before > most => {
            let message = format!(
                "the perplexity went from {before:.4} to {after:.4}, {:.4} times as much, and `max_perplexity_ratio` is {most}",
                after / before
            );
            Err(StageError::new(Cause::Numeric, message).with_help(help))
        }
        _ => Ok(()),
    }
}

fn described(report: &Report, perplexities: Option<(f64, f64)>) -> Value {
    let tensors = report
        .quantized
        .iter()
        .map(|tensor| json!({"name": tensor.name, "relative_error": tensor.relative, "cosine": tensor.cosine}));
    let mut described = json!({
        "quantized": tensors.collect::<Vec<_>>(), "copied": report.copied,
        "bytes_before": report.bytes[0], "bytes_after": report.bytes[1],
    });
    if let Some((before, after)) = perplexities {
        described["perplexity"] = json!({"before": before, "after": after});
    }
    described
}

fn text(report: &Report, perplexities: Option<(f64, f64)>) -> String {
    let [before, after] = report.bytes.map(|bytes| bytes as f64 / 1e6);
    let (count, copied) = (report.quantized.len(), report.copied);
    let mut text = format!("{count} tensors quantised, {copied} as they were: {before:.1} MB to {after:.1} MB");
    if let Some(worst) = worst(report) {
        text += &format!(", largest error {:.4} (`{}`)", worst.relative, worst.name);
    }
    if let Some((before, after)) = perplexities {
        text += &format!(", perplexity {before:.4} to {after:.4}");
    }
    text
}

fn failure(error: QuantizeError) -> StageError {
    let cause = match &error {
        QuantizeError::Write(_) => Cause::Machine,
        QuantizeError::Stopped => Cause::Cancelled,
        QuantizeError::Nothing => Cause::BadParameters,
        _ => Cause::BadData,
    };
    StageError::new(cause, "the model cannot be quantised").with_source(error)
}
