//! Writes a checkpoint whose linear layers are quantised, in the files that transformers and bitsandbytes load: NF4 and
//! FP4 with their statistics, or the 8 bits of LLM.int8 (Dettmers et al., arXiv:2208.07339).
//!
//! Every linear layer but the head is quantised, as there; all else is copied byte for byte. How far each tensor is
//! from what it was comes with it.

use std::fmt::Write as _;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriteError, CheckpointWriter, Flush, Rows, TensorInfo, TensorSpec,
    torch_name, write_atomically,
};
use crate::config::{Config, ConfigError};
use crate::weights::{Absmax, BaseFormat, Codebook, Nf4, Nf4Matrix, QuantizedBase};

/// The head, which is never quantised.
const HEAD: &str = "lm_head";

/// The longest that a number is in the state of a tensor, which is filled up with blanks: its size is known before its
/// numbers are.
const LONGEST_NUMBER: usize = 24;

/// What weights are quantised to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// 4 bits: [`Codebook::Nf4`] or [`Codebook::Fp4`].
    FourBits(Nf4),
    /// 8 bits, a scale to a row of the weight in half precision.
    Int8,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// The format.
    pub layout: Layout,
    /// Linear layers that are left as they are, beside the head.
    pub skip_modules: Vec<String>,
    /// The largest file.
    pub max_shard_bytes: u64,
    /// When the files are flushed.
    pub flush: Flush,
}

/// How far a quantised tensor is from what it was.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorError {
    /// Its name.
    pub name: String,
    /// The norm of the difference over that of the tensor.
    pub relative: f64,
    /// The cosine of the angle between the two.
    pub cosine: f64,
}

/// What was written.
#[derive(Clone, Debug)]
pub struct Report {
    /// The quantised tensors.
    pub quantized: Vec<TensorError>,
    /// How many were copied.
    pub copied: usize,
    /// Size of all of them before and after.
    pub bytes: [u64; 2],
    /// The files.
    pub files: Vec<PathBuf>,
}

/// Why a checkpoint is not quantised.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// It cannot be read.
    #[error("cannot read the model")]
    Checkpoint(#[from] CheckpointError),
    /// Its configuration cannot.
    #[error("cannot use the model's configuration")]
    Config(#[from] ConfigError),
    /// The result cannot be written.
    #[error("cannot write the quantised model")]
    Write(#[from] CheckpointWriteError),
    /// Its weights are quantised already.
    #[error("the model's weights are stored quantised (`{0}`): start from the model before it was quantised")]
    Quantized(String),
    /// A value is beyond what the format holds.
    #[error("`{0}` has values that are NaN or infinite: the model was damaged, or its training diverged")]
    NotFinite(String),
    /// A value is too great.
    #[error("`{0}` has values above 65504: 8 bits are made from half precision, where they are infinite")]
    TooGreat(String),
    /// Nothing would be quantised.
    #[error("no linear layer is left to quantise: `skip_modules` names all of them")]
    Nothing,
    /// Whoever watches the progress has stopped it.
    #[error("stopped")]
    Stopped,
}

/// How far writing is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes written.
    pub done: u64,
    /// Of so many.
    pub total: u64,
}

/// Quantises the checkpoint of a folder into another: the weights, `config.json` and `generation_config.json`.
/// `observe` is told of the progress, and may stop it.
///
/// # Errors
/// Fails if the model is none that is computed natively or is quantised already, or a file cannot be read or written.
pub fn write(
    base: &Path,
    output: &Path,
    options: &Options,
    observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Report, QuantizeError> {
    let config = Config::read(base)?;
    let mut fields = read_fields(base)?;
    if let Some(stored) = fields.get("quantization_config").filter(|stored| !stored.is_null()) {
        return Err(QuantizeError::Quantized(stored["quant_method"].as_str().unwrap_or("unknown").to_owned()));
    }
    let checkpoint = Checkpoint::open(base)?;
    config.check_weights(&checkpoint)?;
    let quantizer = Quantizer { checkpoint: &checkpoint, options, covered: covered(options) };
    let tensors: Vec<(&str, &TensorInfo)> = checkpoint.tensors().collect();
    let specs: Vec<TensorSpec> = tensors.iter().flat_map(|(name, info)| quantizer.specs(name, info)).collect();
    let total = specs.iter().map(|spec| spec.size_bytes() as u64).sum();
    let before = tensors.iter().map(|(_, info)| info.size_bytes() as u64).sum();
    let mut report = Report { quantized: Vec::new(), copied: 0, bytes: [before, total], files: Vec::new() };
    if !tensors.iter().any(|(name, info)| quantizer.covers(name, info)) {
        return Err(QuantizeError::Nothing);
    }
    let mut writer = CheckpointWriter::create(output, specs, options.max_shard_bytes)?;
    let mut done = 0;
    for (name, info) in tensors {
        match (quantizer.covers(name, info), options.layout) {
            (true, Layout::FourBits(nf4)) => {
                report.quantized.push(quantizer.four_bits(name, info, nf4, &mut writer)?)
            }
            (true, Layout::Int8) => report.quantized.push(quantizer.int8(name, info, &mut writer)?),
            (false, _) => {
                check_finite(&checkpoint, name, info)?;
                let copy = |(): &mut (), first: usize, piece: &mut [u8]| -> Result<(), QuantizeError> {
                    Ok(checkpoint.read_bytes(name, first, piece)?)
                };
                writer.write_pieces(name, 1, copy)?;
                report.copied += 1;
            }
        }
        checkpoint.release(name);
        done += quantizer.specs(name, info).iter().map(|spec| spec.size_bytes() as u64).sum::<u64>();
        if observe(Progress { done, total }).is_break() {
            return Err(QuantizeError::Stopped);
        }
    }
    report.files = writer.finish_with(options.flush)?;
    fields.insert("quantization_config".to_owned(), quantizer.settings(&fields));
    let path = output.join("config.json");
    write_atomically(&path, format!("{:#}\n", Value::Object(fields)).as_bytes())?;
    report.files.push(path);
    Ok(report)
}

/// Makes sure that a tensor which is copied holds numbers.
fn check_finite(checkpoint: &Checkpoint, name: &str, info: &TensorInfo) -> Result<(), QuantizeError> {
    /// Values that are looked at at a time.
    const PIECE: usize = 1 << 18;
    if checkpoint.expect_float(name).is_err() {
        return Ok(());
    }
    let mut values = vec![0.0; PIECE.min(info.elements())];
    for first in (0..info.elements()).step_by(PIECE) {
        let count = PIECE.min(info.elements() - first);
        checkpoint.read_f32(name, first, &mut values[..count])?;
        if values[..count].iter().any(|value| !value.is_finite()) {
            return Err(QuantizeError::NotFinite(name.to_owned()));
        }
    }
    Ok(())
}

/// `quantization_config` of a checkpoint that would be written with these options.
pub fn settings(fields: &Map<String, Value>, layout: Layout, skipped: &[String]) -> Value {
    let mut settings = json!({
        "quant_method": "bitsandbytes", "load_in_4bit": false, "load_in_8bit": false,
        "llm_int8_skip_modules": if skipped.is_empty() { Value::Null } else { json!(skipped) },
        "llm_int8_threshold": 6.0,
    });
    match layout {
        Layout::FourBits(nf4) => {
            let dtype = fields.get("dtype").or_else(|| fields.get("torch_dtype")).and_then(Value::as_str);
            settings["load_in_4bit"] = json!(true);
            settings["bnb_4bit_quant_type"] = json!(name_of(nf4.codebook));
            settings["bnb_4bit_use_double_quant"] = json!(nf4.double_quantization);
            settings["bnb_4bit_compute_dtype"] = json!(dtype.unwrap_or("float32"));
            settings["bnb_4bit_quant_storage"] = json!("uint8");
        }
        Layout::Int8 => settings["load_in_8bit"] = json!(true),
    }
    settings
}

fn read_fields(folder: &Path) -> Result<Map<String, Value>, QuantizeError> {
    let path = folder.join("config.json");
    let text = fs::read(&path).map_err(|source| ConfigError::Read { path, source })?;
    Ok(serde_json::from_slice(&text).map_err(|error| ConfigError::NotAnObject(Some(error)))?)
}

/// What covers the linear layers that are quantised.
fn covered(options: &Options) -> QuantizedBase {
    let skip_modules = options.skip_modules.iter().cloned().chain([HEAD.to_owned()]).collect();
    QuantizedBase { format: BaseFormat::FourBits(Nf4::default()), skip_modules, layers: None }
}

fn name_of(codebook: Codebook) -> &'static str {
    match codebook {
        Codebook::Nf4 => "nf4",
        Codebook::Fp4 => "fp4",
        Codebook::Torchao => unreachable!("bitsandbytes has no such format"),
    }
}

struct Quantizer<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a Options,
    covered: QuantizedBase,
}

impl Quantizer<'_> {
    fn covers(&self, name: &str, info: &TensorInfo) -> bool {
        name.ends_with(".weight") && info.shape.len() == 2 && self.covered.covers(name)
    }

    /// What a tensor is written as.
    fn specs(&self, name: &str, info: &TensorInfo) -> Vec<TensorSpec> {
        if !self.covers(name, info) {
            return vec![TensorSpec::new(name, info.dtype, &info.shape)];
        }
        let module = name.trim_end_matches(".weight");
        match self.options.layout {
            Layout::Int8 => vec![
                TensorSpec::new(name, Dtype::I8, &info.shape),
                TensorSpec::new(format!("{module}.SCB"), Dtype::F32, &info.shape[..1]),
                TensorSpec::new(format!("{module}.weight_format"), Dtype::U8, &[]),
            ],
            Layout::FourBits(nf4) => {
                let values = info.elements();
                let blocks = values.div_ceil(nf4.block_size);
                let part = |end: &str, dtype, count: usize| TensorSpec::new(format!("{name}.{end}"), dtype, &[count]);
                let mut specs = vec![
                    TensorSpec::new(name, Dtype::U8, &[values.div_ceil(2), 1]),
                    part("quant_map", Dtype::F32, 16),
                    part(&state_name(nf4), Dtype::U8, state(info, nf4, None).len()),
                ];
                if nf4.double_quantization {
                    specs.push(part("absmax", Dtype::U8, blocks));
                    specs.push(part("nested_absmax", Dtype::F32, blocks.div_ceil(256)));
                    specs.push(part("nested_quant_map", Dtype::F32, 256));
                } else {
                    specs.push(part("absmax", Dtype::F32, blocks));
                }
                specs
            }
        }
    }

    fn four_bits(
        &self,
        name: &str,
        info: &TensorInfo,
        nf4: Nf4,
        writer: &mut CheckpointWriter,
    ) -> Result<TensorError, QuantizeError> {
        let shape = [info.shape[0], info.shape[1]];
        let rows = self.checkpoint.stored_rows(name, &shape, 0)?;
        let matrix = Nf4Matrix::quantize(&rows, shape, info.dtype, nf4)?;
        let part = |end: &str| format!("{name}.{end}");
        writer.write_bytes(name, &matrix.codes)?;
        writer.write_f32(&part("quant_map"), &matrix.levels)?;
        let offset = match &matrix.absmax {
            Absmax::Nested { codes, absmax, levels, offset, .. } => {
                writer.write_bytes(&part("absmax"), codes)?;
                writer.write_f32(&part("nested_absmax"), absmax)?;
                writer.write_f32(&part("nested_quant_map"), levels)?;
                Some(*offset)
            }
            Absmax::Plain(absmax) => {
                writer.write_f32(&part("absmax"), absmax)?;
                None
            }
            Absmax::Linear { .. } => unreachable!("bitsandbytes has no such format"),
        };
        writer.write_bytes(&part(&state_name(nf4)), &state(info, nf4, offset))?;
        self.error(name, shape, &rows, |first, values| matrix.dequantize(first, values))
    }

    fn int8(&self, name: &str, info: &TensorInfo, writer: &mut CheckpointWriter) -> Result<TensorError, QuantizeError> {
        let shape = [info.shape[0], info.shape[1]];
        let rows = self.checkpoint.stored_rows(name, &shape, 0)?;
        let (mut codes, mut scales) = (Vec::with_capacity(info.elements()), Vec::with_capacity(shape[0]));
        let mut row = vec![0.0; shape[1]];
        for index in 0..shape[0] {
            rows.read(index, &mut row)?;
            if row.iter().any(|value| !value.is_finite()) {
                return Err(QuantizeError::NotFinite(name.to_owned()));
            }
            row.iter_mut().for_each(|value| *value = f16::from_f32(*value).to_f32());
            let absmax = row.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            if row.iter().any(|value| !value.is_finite()) {
                return Err(QuantizeError::TooGreat(name.to_owned()));
            }
            // In this order, as PyTorch divides a number by a tensor.
            let inverse = if absmax == 0.0 { 0.0 } else { 1.0 / absmax * 127.0 };
            codes.extend(row.iter().map(|value| ((value * inverse).round_ties_even() as i8).cast_unsigned()));
            scales.push(absmax);
        }
        let module = name.trim_end_matches(".weight");
        writer.write_bytes(name, &codes)?;
        writer.write_f32(&format!("{module}.SCB"), &scales)?;
        writer.write_bytes(&format!("{module}.weight_format"), &[0])?;
        self.error(name, shape, &rows, |first, values| {
            for (at, value) in (first..).zip(values) {
                *value = f32::from(codes[at].cast_signed()) * scales[at / shape[1]] / 127.0;
            }
        })
    }

    /// How far values are from those of the tensor.
    fn error(
        &self,
        name: &str,
        [rows, columns]: [usize; 2],
        source: &dyn Rows,
        dequantize: impl Fn(usize, &mut [f32]),
    ) -> Result<TensorError, QuantizeError> {
        /// Values that are compared at a time, about.
        const PIECE: usize = 1 << 18;
        let piece = (PIECE / columns.max(1)).max(1);
        let (mut own, mut found) = (vec![0.0; piece * columns], vec![0.0; piece * columns]);
        let (mut difference, mut of_own, mut of_found, mut product) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
        for first in (0..rows).step_by(piece) {
            let count = piece.min(rows - first) * columns;
            source.read(first, &mut own[..count])?;
            dequantize(first * columns, &mut found[..count]);
            for (one, other) in own[..count].iter().zip(&found[..count]) {
                let (one, other) = (f64::from(*one), f64::from(*other));
                difference += (one - other) * (one - other);
                of_own += one * one;
                of_found += other * other;
                product += one * other;
            }
        }
        if !difference.is_finite() {
            return Err(QuantizeError::NotFinite(name.to_owned()));
        }
        let nothing = of_own == 0.0;
        let relative = if nothing { 0.0 } else { (difference / of_own).sqrt() };
        let cosine = if nothing || of_found == 0.0 { 1.0 } else { product / (of_own * of_found).sqrt() };
        Ok(TensorError { name: name.to_owned(), relative, cosine })
    }

    /// What `config.json` says of it. Modules are named in full: transformers matches the ends of names.
    fn settings(&self, fields: &Map<String, Value>) -> Value {
        let whole = QuantizedBase { skip_modules: vec![HEAD.to_owned()], ..self.covered.clone() };
        let left = self.checkpoint.tensors().filter(|(name, info)| {
            name.ends_with(".weight") && info.shape.len() == 2 && whole.covers(name) && !self.covers(name, info)
        });
        let mut left: Vec<String> = left.map(|(name, _)| name.trim_end_matches(".weight").to_owned()).collect();
        if !left.is_empty() {
            left.push(HEAD.to_owned());
        }
        settings(fields, self.options.layout, &left)
    }
}

fn state_name(nf4: Nf4) -> String {
    format!("quant_state.bitsandbytes__{}", name_of(nf4.codebook))
}

/// What bitsandbytes writes down of a tensor, as long whatever the offset is.
fn state(info: &TensorInfo, nf4: Nf4, offset: Option<f32>) -> Vec<u8> {
    let mut text = format!(
        r#"{{"quant_type": "{}", "blocksize": {}, "dtype": "{}", "shape": [{}, {}]"#,
        name_of(nf4.codebook),
        nf4.block_size,
        torch_name(info.dtype).unwrap_or("float32"),
        info.shape[0],
        info.shape[1]
    );
    if nf4.double_quantization {
        text.push_str(r#", "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": "#);
    }
    let length = text.len() + LONGEST_NUMBER + 1;
    if nf4.double_quantization {
        write!(text, "{:?}", f64::from(offset.unwrap_or(0.0))).expect("a text takes all");
    }
    text.push('}');
    let mut bytes = text.into_bytes();
    bytes.resize(length.max(bytes.len()), b' ');
    bytes
}
