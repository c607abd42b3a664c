//! The format that a model's frozen weights are in: as a file says it, and as an adapter notes what it was trained on.

use std::path::Path;
use std::sync::Arc;

use cache::Class;
use engine::artifact::Facts;
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{Json, KeyWriter, Parameter, Parameters, Reader, choice_schema, read_choice};
use model::blocks::Blocks;
use model::checkpoint::Checkpoint;
use model::config::{Architecture, Config, StoredQuantized};
use model::cpu::Cpu;
use model::decoder::{Decoder, LoadError};
use model::parameter::Trainability;
pub use model::weights::BlockFormat;
use model::weights::{Activations, BaseFormat as StoredFormat, Codebook, Nf4, Quantization, QuantizedBase, is_in_path};
use serde_json::json;

pub use super::aware::{AwareParams, Scheme};
use super::backend::Serves;
use super::torch::job;

/// The fact of an adapter that says in which format the frozen weights were that it was trained on, where that is not
/// the one that they are stored in.
pub const QUANTIZE: &str = "quantize";

/// How frozen weights are quantised while they are read.
#[derive(Parameters, Debug, Clone, PartialEq, Eq)]
pub struct QuantizeParams {
    /// The format.
    #[semantic]
    pub base: BaseFormat,
    /// Whether the scales of blocks are quantised, too: 4.13 bits per weight instead of 4.5.
    #[semantic(default = true)]
    pub double_quantization: bool,
    /// Number of weights in a block, which share a scale: a power of two.
    #[semantic(default = 64, range = 32..=4096)]
    pub block_size: usize,
    /// Linear layers that are not quantised: their names, or parts of their paths (`o_proj`, `layers.0`).
    #[semantic(default = vec!["lm_head".to_owned()])]
    pub skip_modules: Vec<String>,
}

/// A format of frozen weights.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaseFormat {
    /// 4-bit quantiles of a normal distribution (Dettmers et al., arXiv:2305.14314), to the bits of bitsandbytes.
    Nf4,
    /// 4-bit floats, to the bits of bitsandbytes.
    Fp4,
    /// torchao's NF4, which torchtune trains on.
    #[semantic(rename = "nf4_torchao")]
    Nf4Torchao,
    /// 8-bit integers with one scale for 32: ggml's `q8_0`.
    #[semantic(rename = "q8_0")]
    Q8_0,
}

impl BaseFormat {
    const ALL: [Self; 4] = [Self::Nf4, Self::Fp4, Self::Nf4Torchao, Self::Q8_0];

    /// Its name in a pipeline file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 => "nf4",
            Self::Fp4 => "fp4",
            Self::Nf4Torchao => "nf4_torchao",
            Self::Q8_0 => "q8_0",
        }
    }

    /// What asks for it, as in a pipeline file.
    pub fn as_written(self) -> &'static str {
        match self {
            Self::Nf4 => "`quantize: { base: nf4 }`",
            Self::Fp4 => "`quantize: { base: fp4 }`",
            Self::Nf4Torchao => "`quantize: { base: nf4_torchao }`",
            Self::Q8_0 => "`quantize: { base: q8_0 }`",
        }
    }
}

/// Warns of names in `skip_modules`, by the key that they have in the file, that no linear layer of a native model has.
///
/// # Errors
/// Fails if the model cannot be read.
pub(crate) fn warn_of_idle_names(
    quantize: &QuantizedBase,
    base: &Path,
    key: &str,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let all = QuantizedBase { skip_modules: Vec::new(), ..quantize.clone() };
    let files = open(base)?;
    let linear = files.names().filter(|tensor| all.covers(tensor)).collect::<Vec<_>>();
    for name in names_beside(&quantize.skip_modules, &linear) {
        context.warn(format!("`{key}` names `{name}`, which is no linear layer of the model"));
    }
    Ok(())
}

fn open(base: &Path) -> Result<Checkpoint, StageError> {
    Checkpoint::open(base).or_fail(Cause::BadData, || "cannot read the model".to_owned())
}

/// The names that are in the path of none of these tensors.
fn names_beside<'a>(names: &'a [String], tensors: &[&str]) -> Vec<&'a str> {
    // A tied head is no tensor, and is left as it is.
    let names = names.iter().map(String::as_str).filter(|name| *name != "lm_head");
    names.filter(|name| !tensors.iter().any(|tensor| is_in_path(name, tensor))).collect()
}

/// The few bits that a model's weights are stored in.
fn stored_format(model: &Config) -> Option<&'static str> {
    let elements: usize = model
        .tensors()
        .iter()
        .filter(|(_, shape)| shape.len() > 1)
        .map(|(_, shape)| shape.iter().product::<usize>())
        .sum();
    match model.stored_quantized? {
        StoredQuantized::Nf4(_) => Some("bitsandbytes"),
        StoredQuantized::Gguf { bytes } => (bytes < 2 * elements as u64).then_some("GGUF"),
    }
}

/// Whether a tensor can be stored so; what is no matrix is not.
fn fits(format: Nf4, shape: &[usize]) -> bool {
    <[usize; 2]>::try_from(shape).map_or(true, |shape| format.fits(shape))
}

impl QuantizeParams {
    /// As the decoder takes it.
    pub fn base(&self) -> QuantizedBase {
        let four_bits = |codebook| {
            let (block_size, double_quantization) = (self.block_size, self.double_quantization);
            StoredFormat::FourBits(Nf4 { codebook, block_size, double_quantization })
        };
        let format = match self.base {
            BaseFormat::Nf4 => four_bits(Codebook::Nf4),
            BaseFormat::Fp4 => four_bits(Codebook::Fp4),
            BaseFormat::Nf4Torchao => four_bits(Codebook::Torchao),
            BaseFormat::Q8_0 => StoredFormat::Q8_0,
        };
        QuantizedBase { format, skip_modules: self.skip_modules.clone(), layers: None }
    }

    /// As the torch worker takes it, which has the formats of bitsandbytes.
    pub(crate) fn of_worker(&self) -> Option<job::Quantize> {
        let Self { base, double_quantization, block_size, skip_modules } = self;
        matches!(base, BaseFormat::Nf4 | BaseFormat::Fp4).then(|| job::Quantize {
            base: base.name(),
            double_quantization: *double_quantization,
            block_size: *block_size,
            skip_modules: skip_modules.clone(),
        })
    }

    /// Warns of names in `skip_modules` that no linear layer of a model has. Of a model that is not native any tensor
    /// of its files may be of one, or of a module around one.
    ///
    /// # Errors
    /// Fails if the model cannot be read.
    pub(crate) fn warn_of_idle_names(
        &self,
        model: &Architecture,
        folder: &Path,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let key = "quantize.skip_modules";
        match model {
            Architecture::Native(_) => warn_of_idle_names(&self.base(), folder, key, context),
            Architecture::Transformers(_) => {
                let files = open(folder)?;
                for name in names_beside(&self.skip_modules, &files.names().collect::<Vec<_>>()) {
                    context.warn(format!("`{key}` names `{name}`, which is no module of the model"));
                }
                Ok(())
            }
        }
    }

    /// Which backend computes on such a base; `asked` is what asks for it.
    pub(crate) fn serves(&self, asked: &'static str) -> Serves {
        self.of_worker().map_or(Serves::Native(asked), |_| Serves::WithBitsandbytes(asked))
    }

    /// What is noted of an adapter that was trained on such a base: its fact [`QUANTIZE`].
    pub fn fact(&self) -> Json {
        json!({
            "base": self.base.name(),
            "double_quantization": self.double_quantization,
            "block_size": self.block_size,
            "skip_modules": self.skip_modules,
        })
    }

    /// What such a fact says; `None` where it says something else.
    fn of_fact(fact: &Json) -> Option<Self> {
        let modules = fact["skip_modules"].as_array()?.iter().map(|module| Some(module.as_str()?.to_owned()));
        Some(Self {
            base: BaseFormat::ALL.into_iter().find(|format| fact["base"] == format.name())?,
            double_quantization: fact["double_quantization"].as_bool()?,
            block_size: usize::try_from(fact["block_size"].as_u64()?).ok()?,
            skip_modules: modules.collect::<Option<_>>()?,
        })
    }

    /// What is wrong with it on a model: weights that are quantised keep their format, and torchao's NF4 is of whole
    /// blocks.
    pub fn problem_on(&self, model: &Config, span: Span) -> Option<Problem> {
        if let Some(format) = stored_format(model) {
            let message = format!("the model's weights are stored quantised already ({format}), and stay as they are");
            let problem = Problem::error("bad-value", span, message, "of a model in 16 or 32 bits").at("quantize");
            return Some(
                problem.with_help("leave `quantize` out: adapters are trained and asked on the weights as stored"),
            );
        }
        let base = self.base();
        let StoredFormat::FourBits(nf4) = base.format else { return None };
        let tensors = model.tensors().into_iter();
        let unfit = tensors.filter(|(name, shape)| base.covers(name) && !fits(nf4, shape));
        let unfit: Vec<String> = unfit.map(|(name, shape)| format!("`{name}` {shape:?}")).collect();
        let first = unfit.first()?;
        let more = if unfit.len() > 1 { format!(" and {} more", unfit.len() - 1) } else { String::new() };
        let name = self.base.name();
        let message =
            format!("`{name}` needs matrices whose size is a multiple of 16384, and that of {first}{more} is not");
        let problem = Problem::error("bad-value", span, message, "does not fit the model").at("quantize.base");
        Some(problem.with_help("leave them out with `skip_modules`, or use `base: nf4`"))
    }

    /// What is wrong with it.
    pub fn problem(&self, span: Span) -> Option<Problem> {
        if matches!(self.base, BaseFormat::Nf4Torchao | BaseFormat::Q8_0) {
            let name = self.base.name();
            let (key, fixed) = match (self.block_size, self.double_quantization) {
                (64, true) => return None,
                (64, false) => ("quantize.double_quantization", "how its scales are stored"),
                _ => ("quantize.block_size", "the size of its blocks"),
            };
            let message = format!("`{key}` is for `nf4` and `fp4`: `{name}` has {fixed} fixed");
            let problem = Problem::error("bad-value", span, message, "leave it out").at(key);
            return Some(problem.with_help(format!("leave it out with `base: {name}`")));
        }
        let message = format!("`quantize.block_size` is {}, and it has to be a power of two", self.block_size);
        let problem = Problem::error("bad-value", span, message, "not a power of two").at("quantize.block_size");
        (!self.block_size.is_power_of_two()).then(|| problem.with_help("64 is the default of bitsandbytes"))
    }
}

/// What `train.quantize` says: what frozen weights are stored in, or what weights are trained for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrainQuantize {
    /// The frozen weights are quantised while they are read (QLoRA).
    Base(QuantizeParams),
    /// The weights are trained for few bits (QAT).
    Aware(AwareParams),
}

impl TrainQuantize {
    /// The format of the frozen weights, where that is not the stored one.
    pub fn base(&self) -> Option<&QuantizeParams> {
        match self {
            Self::Base(params) => Some(params),
            Self::Aware(_) => None,
        }
    }

    /// What the weights are trained for.
    pub fn aware(&self) -> Option<&AwareParams> {
        match self {
            Self::Base(_) => None,
            Self::Aware(params) => Some(params),
        }
    }

    /// As the torch worker takes it, where it does.
    pub(crate) fn of_worker(&self) -> Option<job::Quantize> {
        self.base()?.of_worker()
    }

    /// What is noted of what is trained so: its fact [`QUANTIZE`].
    pub fn fact(&self) -> Json {
        match self {
            Self::Base(params) => params.fact(),
            Self::Aware(params) => params.fact(),
        }
    }

    /// What is wrong with it.
    pub fn problem(&self, span: Span) -> Option<Problem> {
        self.base()?.problem(span)
    }

    /// What is wrong with it on a model.
    pub fn problem_on(&self, model: &Config, span: Span) -> Option<Problem> {
        match self {
            Self::Base(params) => params.problem_on(model, span),
            Self::Aware(params) => params.problem_on(model, span),
        }
    }
}

impl Parameter for TrainQuantize {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match node.get("aware") {
            Some(_) => AwareParams::read(node, reader).map(Self::Aware),
            None => QuantizeParams::read(node, reader).map(Self::Base),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Self::Base(params) => params.write_key(key),
            Self::Aware(params) => params.write_key(key),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [QuantizeParams::schema(), AwareParams::schema()] })
    }
}

/// How the weights of a model are held that generates or is evaluated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightFormat {
    /// As they are stored.
    AsStored,
    /// All of them in blocks, for products of 8-bit integers.
    Blocks(BlockFormat),
    /// The linear layers in the format of a base that adapters are trained on.
    Base(QuantizeParams),
    /// The linear layers on the grids that an adapter was trained on.
    Aware(AwareParams),
}

/// The names that a file may say in the place of a mapping, each with what it is.
const NAMES: [(&str, &str); 3] = [
    ("int8", "8-bit integers in blocks of 32 with one scale; activations are rounded to such blocks, too."),
    ("int4", "As `int8`, with weights of 4 bits but for token embeddings and LM head."),
    ("none", "As they are stored, also with an adapter that was trained on a quantised base."),
];

impl WeightFormat {
    /// What asks for it, as in the file, where it quantises.
    pub fn as_written(&self) -> Option<&'static str> {
        Some(match self {
            Self::AsStored => return None,
            Self::Blocks(BlockFormat::Int8) => "`quantize: int8`",
            Self::Blocks(BlockFormat::Int4) => "`quantize: int4`",
            Self::Blocks(BlockFormat::Q8_0 | BlockFormat::Q4_0) => unreachable!("a format that no file can ask for"),
            Self::Base(params) => params.base.as_written(),
            Self::Aware(_) => unreachable!("a format that no file can ask for"),
        })
    }

    /// Which backend computes with it; `asked` is what asks for it.
    pub(crate) fn serves(&self, asked: &'static str) -> Serves {
        match self {
            Self::AsStored => Serves::Both,
            Self::Blocks(_) | Self::Aware(_) => Serves::Native(asked),
            Self::Base(params) => params.serves(asked),
        }
    }

    /// As the torch worker takes it.
    ///
    /// # Errors
    /// Fails where it has no such format, which who asks for it is told before.
    pub(crate) fn of_worker(&self) -> Result<Option<job::Quantize>, StageError> {
        let quantize = match self {
            Self::AsStored => return Ok(None),
            Self::Base(params) => params.of_worker(),
            Self::Blocks(_) | Self::Aware(_) => None,
        };
        let no_such = || StageError::internal(format!("{} is for the native backend", self.name()));
        quantize.ok_or_else(no_such).map(Some)
    }

    /// What is wrong with it.
    pub fn problem(&self, span: Span) -> Option<Problem> {
        match self {
            Self::AsStored | Self::Blocks(_) | Self::Aware(_) => None,
            Self::Base(params) => params.problem(span),
        }
    }

    /// Kernels that hold frozen weights in it, where that is theirs to do.
    pub fn applied_to(&self, kernels: Cpu) -> Cpu {
        match self {
            Self::Blocks(format) => {
                kernels.quantizing(Quantization { format: *format, activations: Activations::Int8 })
            }
            Self::AsStored | Self::Base(_) | Self::Aware(_) => kernels,
        }
    }

    /// Loads a frozen model with its weights in it.
    ///
    /// # Errors
    /// Fails as [`Decoder::load`] does.
    pub fn load<B: Blocks>(&self, kernels: Arc<B>, folder: &Path) -> Result<Decoder<B>, LoadError> {
        match self {
            Self::AsStored => Decoder::load(kernels, folder, Trainability::Frozen),
            Self::Blocks(_) => Decoder::load_values(kernels, folder),
            Self::Base(params) => Decoder::load_quantized(kernels, folder, &params.base()),
            Self::Aware(params) => Decoder::load_fake_quantized(kernels, folder, &params.layers()),
        }
    }

    /// What is noted of what is computed with it; none of weights as they are stored.
    pub fn fact(&self) -> Option<Json> {
        match self {
            Self::AsStored => None,
            Self::Blocks(format) => Some(json!(format.name())),
            Self::Base(params) => Some(params.fact()),
            Self::Aware(params) => Some(params.fact()),
        }
    }

    /// Adds to the key of `quantize` which stored integers are multiplied as they are: those of Q4_K, Q5_K and Q6_K,
    /// too, which were dequantised and quantised again before. A higher `VERSION` would make all other results anew.
    pub(super) fn write_products_key(&self, key: &mut KeyWriter<'_>) {
        if matches!(self, Self::Blocks(_)) {
            key.field("integer_products", Class::Semantic, |key| key.value("k_quants"));
        }
    }

    /// Its name, in words.
    fn name(&self) -> String {
        match self {
            Self::AsStored => "the format that it is stored in".to_owned(),
            Self::Blocks(format) => format!("`{}`", format.name()),
            Self::Base(params) => format!("`{}`", params.base.name()),
            Self::Aware(params) => format!("4-bit numbers in groups of {}", params.group_size),
        }
    }

    /// That of the base that an adapter with these facts was trained on.
    ///
    /// # Errors
    /// Fails if this program does not know it.
    pub fn of_adapter(facts: &Facts) -> Result<Self, StageError> {
        let Some(fact) = facts.get(QUANTIZE) else { return Ok(Self::AsStored) };
        let known = QuantizeParams::of_fact(fact).map(Self::Base);
        known.or_else(|| AwareParams::of_fact(fact).map(Self::Aware)).ok_or_else(|| {
            StageError::bad_data(format!(
                "the adapter was trained on a base in a format that is not known here: {fact}"
            ))
            .with_help("use the version of this program that trained it, or a newer one")
        })
    }
}

impl From<Option<&TrainQuantize>> for WeightFormat {
    fn from(quantize: Option<&TrainQuantize>) -> Self {
        match quantize {
            None => Self::AsStored,
            Some(TrainQuantize::Base(params)) => Self::Base(params.clone()),
            Some(TrainQuantize::Aware(params)) => Self::Aware(AwareParams { after_steps: 0, ..params.clone() }),
        }
    }
}

/// The format that a model is computed in: the one that the file asks for, else the one that the adapter on it was
/// trained on. Warns where the two differ.
///
/// # Errors
/// Fails if the adapter was trained on a format that is not known here.
pub fn weight_format(
    asked: Option<&WeightFormat>,
    adapter: Option<&Artifact>,
    context: &mut StageContext,
) -> Result<WeightFormat, StageError> {
    let Some(adapter) = adapter else { return Ok(asked.cloned().unwrap_or(WeightFormat::AsStored)) };
    let trained_on = WeightFormat::of_adapter(&adapter.description.facts)?;
    let Some(asked) = asked else { return Ok(trained_on) };
    // To quantise the base of any adapter for inference is a choice of its own.
    if !matches!((&trained_on, asked), (WeightFormat::AsStored, WeightFormat::Blocks(_))) {
        warn_of_other_base(&trained_on, asked, context);
    }
    Ok(asked.clone())
}

/// Warns where an adapter is used with its base in another format than it was trained on.
pub fn warn_of_other_base(trained_on: &WeightFormat, used_with: &WeightFormat, context: &mut StageContext) {
    if let Some(warning) = difference(trained_on, used_with) {
        context.warn(warning);
    }
}

/// What is to be said of an adapter that is used with its base in another format than it was trained on.
pub fn difference(trained_on: &WeightFormat, used_with: &WeightFormat) -> Option<String> {
    if trained_on == used_with {
        return None;
    }
    let with = match (trained_on, used_with) {
        (WeightFormat::Base(one), WeightFormat::Base(other)) if one.base == other.base => {
            "that with other settings".to_owned()
        }
        _ => used_with.name(),
    };
    Some(format!(
        "the adapter was trained on its base in {}, and is used with {with}: what it computes differs a little",
        trained_on.name()
    ))
}

impl Parameter for WeightFormat {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        if matches!(node.value, Value::Map(_)) {
            return QuantizeParams::read(node, reader).map(Self::Base);
        }
        let name = read_choice(node, reader, &NAMES.map(|(name, _)| name))?;
        let blocks = [BlockFormat::Int8, BlockFormat::Int4].into_iter().find(|format| format.name() == name);
        Some(blocks.map_or(Self::AsStored, Self::Blocks))
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Self::AsStored => key.value("none"),
            Self::Blocks(format) => key.value(format.name()),
            Self::Base(params) => params.write_key(key),
            Self::Aware(params) => params.write_key(key),
        }
        self.write_products_key(key);
    }

    fn schema() -> Json {
        json!({ "anyOf": [choice_schema("", &NAMES), QuantizeParams::schema()] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nf4(block_size: usize) -> QuantizeParams {
        let skip_modules = vec!["lm_head".to_owned()];
        QuantizeParams { base: BaseFormat::Nf4, double_quantization: true, block_size, skip_modules }
    }

    #[test]
    fn a_warning_names_both_formats() {
        let stored = "the format that it is stored in";
        let (one, other) = (WeightFormat::Base(nf4(64)), WeightFormat::Base(nf4(128)));
        for (trained_on, used_with, expected) in [
            (&one, &one, None),
            (&WeightFormat::AsStored, &WeightFormat::AsStored, None),
            (&one, &WeightFormat::AsStored, Some(["`nf4`", stored])),
            (&WeightFormat::AsStored, &one, Some([stored, "`nf4`"])),
            (&one, &WeightFormat::Blocks(BlockFormat::Int8), Some(["`nf4`", "`int8`"])),
            (&one, &other, Some(["`nf4`", "that with other settings"])),
        ] {
            let expected = expected.map(|[on, with]| {
                format!(
                    "the adapter was trained on its base in {on}, and is used with {with}: what it computes differs a little"
                )
            });
            assert_eq!(difference(trained_on, used_with), expected);
        }
    }

    #[test]
    fn a_name_is_a_part_of_a_path_or_several() {
        let tensors = ["model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"];
        let beside = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            names_beside(&names, &tensors).into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let in_paths = ["o_proj", "layers.1", "self_attn", "model.layers.1.self_attn.o_proj", "lm_head"];
        assert_eq!(beside(&in_paths), [""; 0]);
        // What is fused has no `.weight`.
        assert_eq!(beside(&["experts", "experts.gate_up_proj"]), [""; 0]);
        let in_none = ["o_porj", "proj", "layers.0", "layers.1.mlp.o_proj"];
        assert_eq!(beside(&in_none), in_none);
    }

    #[test]
    fn what_an_adapter_notes_is_read_back() {
        let facts = |fact: Json| Facts::from_iter([(QUANTIZE.to_owned(), fact)]);
        assert_eq!(WeightFormat::of_adapter(&Facts::new()).unwrap(), WeightFormat::AsStored);
        let aware = AwareParams {
            aware: Scheme::Int8DynamicActivationsInt4Weights,
            group_size: 32,
            after_steps: 0,
            skip_modules: vec!["o_proj".to_owned()],
        };
        for format in [WeightFormat::Base(nf4(32)), WeightFormat::Aware(aware)] {
            assert_eq!(WeightFormat::of_adapter(&facts(format.fact().unwrap())).unwrap(), format);
        }
        let error = WeightFormat::of_adapter(&facts(json!({"base": "nf3"}))).expect_err("no such format");
        assert!(error.message.contains("nf3") && error.help.is_some(), "{error:?}");
    }
}
