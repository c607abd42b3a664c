//! NF4 against bitsandbytes: matrices bit for bit, checkpoints that it stored, and training on a quantised base.
//!
//! The cases lie in `tests/golden/nf4` of the repository, or in the folder `nf4` of what `PIPELINE_GOLDEN_DIR` names,
//! beside the checkpoints of the families. Every case found there must be one that can be run;
//! `tests/golden/nf4/README.md` says what is in them and how near the figures have to be.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::checkpoint::{Checkpoint, Dtype, ValueRows, encode_float};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::merge::{MergeInto, MergeOptions, TrainedOn, WeightedAdapter, merge};
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig};
use model::trainer::{AdamW, Optimizer, TrainOptions, Trained, Trainer};
use model::weights::{Absmax, BaseFormat, Codebook, Nf4, Nf4Matrix, QuantizedBase};
use serde_json::Value;
use test_harness::test;

use crate::tensors::Tensors;

const LOGITS: f64 = 5e-4;
const LOSSES: f64 = 2e-4;
const NORMS: f64 = 1e-3;
const ADAPTERS: f64 = 1e-3;

/// What the folder may hold beside folders.
const FILES: [&str; 10] = [
    "README.md",
    "agreement.json",
    "codebook.json",
    "fp4.safetensors",
    "make_fp4.py",
    "matrices.json",
    "matrices.safetensors",
    "torchao.json",
    "torchao.safetensors",
    "versions.json",
];

/// The folder with the families, and that of the cases in it.
fn folders() -> (PathBuf, PathBuf) {
    let given = std::env::var_os("PIPELINE_GOLDEN_DIR").map(PathBuf::from);
    let families = given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden"));
    let cases = families.join("nf4");
    (families, cases)
}

fn json(file: &Path) -> Value {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_str(&text).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What was compared in a case.
struct Findings {
    case: String,
    compared: usize,
}

impl Findings {
    fn of(case: impl Into<String>) -> Self {
        Self { case: case.into(), compared: 0 }
    }

    fn print(&self) {
        println!("{}: {} comparisons", self.case, self.compared);
        assert!(self.compared > 0, "{}", self.case);
    }

    fn equal<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, found: &[T], expected: &[T]) {
        self.compared += 1;
        assert_eq!(found.len(), expected.len(), "{}: {what}", self.case);
        if let Some(at) = (0..found.len()).find(|at| found[*at] != expected[*at]) {
            panic!("{}: {what}: {:?}, not {:?}, at {at}", self.case, found[at], expected[at]);
        }
    }

    fn same_bits(&mut self, what: &str, found: &[f32], expected: &[f32]) {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        self.equal(what, &bits(found), &bits(expected));
    }

    fn near(&mut self, what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
        self.compared += 1;
        assert_eq!(found.len(), expected.len(), "{}: {what}", self.case);
        for (found, expected) in found.iter().zip(expected) {
            let off = (f64::from(*found) - f64::from(*expected)).abs();
            assert!(off <= tolerance, "{}: {what}: {found}, not {expected}", self.case);
        }
    }
}

fn dequantized(matrix: &Nf4Matrix) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.shape[0] * matrix.shape[1]];
    matrix.dequantize(0, &mut values);
    values
}

fn dtype_of(name: &Value) -> Dtype {
    match name.as_str().unwrap() {
        "float32" => Dtype::F32,
        "bfloat16" => Dtype::BF16,
        "float16" => Dtype::F16,
        other => panic!("{other}"),
    }
}

#[test]
fn matrices_have_the_bits_of_bitsandbytes() {
    let cases = folders().1;
    let tensors = Tensors::read(&cases.join("matrices.safetensors"));
    let mut findings = Findings::of("nf4/matrices");
    for (case, told) in json(&cases.join("matrices.json")).as_object().unwrap() {
        let shape = [0, 1].map(|at| told["shape"][at].as_u64().unwrap() as usize);
        let block_size = told["blocksize"].as_u64().unwrap() as usize;
        // Those in larger blocks have no source of their own.
        let source = tensors.floats(&format!("{}.source", case.trim_end_matches(".block128")));
        let rows = ValueRows::new(&source, shape[1]);
        let quantize = |double_quantization| {
            let nf4 = Nf4 { block_size, double_quantization, ..Nf4::default() };
            Nf4Matrix::quantize(&rows, shape, dtype_of(&told["dtype"]), nf4).unwrap()
        };
        let plain = quantize(false);
        findings.equal(&format!("{case} codes"), &plain.codes, tensors.bytes(&format!("{case}.packed")));
        let Absmax::Plain(absmax) = &plain.absmax else { panic!("{case}: not plain") };
        findings.same_bits(&format!("{case} absmax"), absmax, &tensors.floats(&format!("{case}.absmax")));
        let values = dequantized(&plain);
        findings.same_bits(&format!("{case} values"), &values, &tensors.floats(&format!("{case}.dequantised")));
        // Any part of it is the same, from an odd place on, too.
        for first in [1, 2, 31, values.len() / 2 + 1].into_iter().filter(|first| *first < values.len()) {
            let mut part = vec![f32::NAN; (values.len() - first).min(block_size + 5)];
            plain.dequantize(first, &mut part);
            findings.same_bits(&format!("{case} from {first}"), &part, &values[first..][..part.len()]);
        }
        let nested = |what: &str| format!("{case}.nested.{what}");
        if tensors.find(&nested("offset")).is_none() {
            assert!(told.get("nested").is_none(), "{case}");
            continue;
        }
        let offset = tensors.floats(&nested("offset"))[0];
        let doubly = quantize(true);
        let Absmax::Nested { offset: own, .. } = doubly.absmax else { panic!("{case}: not nested") };
        // Up to 3 units in the last place, by the order of a sum.
        findings.near(&format!("{case} offset"), &[own], &[offset], f64::from(offset) * 3.6e-7);
        // Of what follows, all bits, from the offset on that is stored.
        let absmax = Absmax::nested(absmax, offset);
        let blocks: Vec<f32> = (0..told["blocks"].as_u64().unwrap() as usize).map(|block| absmax.of(block)).collect();
        let Absmax::Nested { codes, absmax: largest, .. } = &absmax else { panic!("{case}: not nested") };
        findings.equal(&nested("codes"), codes, tensors.bytes(&nested("absmax")));
        findings.same_bits(&nested("largest"), largest, &tensors.floats(&nested("nested_absmax")));
        findings.same_bits(&nested("absmax"), &blocks, &tensors.floats(&nested("absmax_dequantised")));
        let doubly = Nf4Matrix { absmax, ..plain };
        let expected = tensors.floats(&nested("dequantised"));
        findings.same_bits(&nested("values"), &dequantized(&doubly), &expected);
    }
    findings.print();
}

/// Values as they are in another dtype: a unit of it apart at most, by the order of a sum.
#[test]
fn torchaos_nf4_has_its_bits() {
    let cases = folders().1;
    let tensors = Tensors::read(&cases.join("torchao.safetensors"));
    let mut findings = Findings::of("nf4/torchao");
    for (case, told) in json(&cases.join("torchao.json")).as_object().unwrap() {
        let size = |key: &str| told[key].as_u64().unwrap() as usize;
        let shape = [0, 1].map(|at| told["shape"][at].as_u64().unwrap() as usize);
        let dtype = dtype_of(&told["dtype"]);
        let of = |what: &str| format!("{case}.{what}");
        let source = tensors.floats(&of("source"));
        let nf4 = Nf4 { codebook: Codebook::Torchao, block_size: size("block_size"), double_quantization: true };
        let absmaxes: Vec<f32> =
            source.chunks(nf4.block_size).map(|x| x.iter().fold(0.0f32, |most, x| most.max(x.abs()))).collect();
        let mean = tensors.floats(&of("scaler_mean"))[0];
        let absmax = Absmax::linear(&absmaxes, mean, size("scaler_block_size"), dtype);
        let Absmax::Linear { codes, factors, .. } = &absmax else { panic!("{case}: not linear") };
        let codes: Vec<u8> = codes.iter().map(|code| code.cast_unsigned()).collect();
        findings.equal(&of("scalers"), &codes, tensors.bytes(&of("quantized_scalers")));
        findings.same_bits(&of("factors"), factors, &tensors.floats(&of("quantization_factor")));
        if !nf4.fits(shape) {
            continue;
        }
        let matrix = Nf4Matrix::quantize(&ValueRows::new(&source, shape[1]), shape, dtype, nf4).unwrap();
        findings.same_bits(&of("levels"), &matrix.levels, &tensors.floats(&of("nf4")));
        findings.equal(&of("codes"), &matrix.codes, tensors.bytes(&of("quantized_data")));
        let Absmax::Linear { mean: own, .. } = matrix.absmax else { panic!("{case}: not linear") };
        findings.near(&of("mean"), &[own], &[mean], f64::from(mean) * 3.6e-7);
        let matrix = Nf4Matrix { absmax, ..matrix };
        findings.same_bits(&of("values"), &dequantized(&matrix), &tensors.floats(&of("dequantised")));
    }
    findings.print();
}

#[test]
fn fp4_has_the_bits_of_bitsandbytes() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/nf4");
    let tensors = Tensors::read(&cases.join("fp4.safetensors"));
    let mut findings = Findings::of("nf4/fp4");
    for (case, shape, dtype) in [("normal", [48, 80], Dtype::F32), ("bf16", [32, 64], Dtype::BF16)] {
        let source = tensors.floats(&format!("{case}.source"));
        let nf4 = Nf4 { codebook: Codebook::Fp4, double_quantization: false, ..Nf4::default() };
        let matrix = Nf4Matrix::quantize(&ValueRows::new(&source, shape[1]), shape, dtype, nf4).unwrap();
        findings.equal(&format!("{case} codes"), &matrix.codes, tensors.bytes(&format!("{case}.packed")));
        let Absmax::Plain(absmax) = &matrix.absmax else { panic!("{case}: not plain") };
        findings.same_bits(&format!("{case} absmax"), absmax, &tensors.floats(&format!("{case}.absmax")));
        let expected = tensors.floats(&format!("{case}.dequantised"));
        let values = dequantized(&matrix);
        assert!(values.iter().zip(&expected).all(|(one, other)| one == other), "{case} values");
    }
    findings.print();
}

#[test]
fn levels_are_those_of_the_codebook() {
    let codebook = json(&folders().1.join("codebook.json"));
    let floats = |name: &str| -> Vec<f32> {
        let hex = codebook[name].as_array().unwrap().iter().map(|hex| hex.as_str().unwrap());
        hex.map(|hex| f32::from_bits(u32::from_str_radix(hex, 16).unwrap())).collect()
    };
    let values = [1.0; 64];
    let matrix = Nf4Matrix::quantize(&ValueRows::new(&values, 64), [1, 64], Dtype::F32, Nf4::default()).unwrap();
    let Absmax::Nested { levels, .. } = &matrix.absmax else { panic!("not nested") };
    let mut findings = Findings::of("nf4/codebook.json");
    findings.same_bits("levels", &matrix.levels, &floats("nf4_f32_hex"));
    findings.same_bits("levels of absmaxes", levels, &floats("dynamic_8bit_f32_hex"));
    findings.print();
}

#[test]
fn cpu_agrees_with_the_reference() {
    for threads in [1, 3] {
        check_all(|| Arc::new(Cpu::new(threads, Compute::F32).unwrap()));
    }
}

#[test]
fn candle_agrees_with_the_reference() {
    check_all(|| Arc::new(Candle::on_processor()));
}

fn check_all<B: Blocks>(ops: impl Fn() -> Arc<B>) {
    let (families, cases) = folders();
    for name in names(&cases) {
        let folder = cases.join(&name);
        if !folder.is_dir() {
            assert!(FILES.contains(&name.as_str()), "{} is no case that is known here", folder.display());
            continue;
        }
        let mut findings = Findings::of(format!("nf4/{name}, {}", ops().describe()));
        if folder.join("config.json").exists() {
            check_stored(&ops, &folder, &mut findings);
        } else {
            let base = json(&folder.join("base.json"));
            let family = base["base"].as_str().unwrap().rsplit('/').next().unwrap();
            check_family(&ops, &families.join(family), &folder, &base, &mut findings);
        }
        findings.print();
    }
}

/// The logits of the rows of a file.
fn logits<B: Blocks>(decoder: &mut Decoder<B>, expected: &Tensors, ids: &str, rows: usize) -> Vec<f32> {
    let ids: Vec<u32> = expected.integers(ids).into_iter().map(|id| id as u32).collect();
    let of_row = |ids: &[u32]| decoder.logits(&Batch::text(ids.to_vec())).unwrap();
    ids.chunks(ids.len() / rows).flat_map(of_row).collect()
}

/// A checkpoint that bitsandbytes stored.
fn check_stored<B: Blocks>(ops: &impl Fn() -> Arc<B>, folder: &Path, findings: &mut Findings) {
    let expected = Tensors::read(&folder.join("expected.safetensors"));
    let mut decoder = Decoder::load(ops(), folder, Trainability::Frozen).unwrap();
    let found = logits(&mut decoder, &expected, "input_ids", 2);
    findings.near("logits", &found, &expected.floats("logits"), LOGITS);
    let checkpoint = Checkpoint::open(folder).unwrap();
    let told = json(&folder.join("tensors.json"));
    for name in expected.names().filter(|name| name.ends_with(".weight")) {
        let values = expected.floats(name);
        findings.same_bits(name, &checkpoint.tensor_f32(name).unwrap(), &values);
        let state = &told[format!("{name}.quant_state.bitsandbytes__nf4")]["json"];
        let dtype = dtype_of(&state["dtype"]);
        assert_eq!(checkpoint.dtype(name).unwrap(), dtype);
        // As bytes, from within a value on.
        let mut bytes = vec![0; values.len() * dtype.bitsize() / 8];
        assert!(encode_float(dtype, &values, &mut bytes));
        let mut found = vec![0; 41];
        checkpoint.read_bytes(name, 13, &mut found).unwrap();
        findings.equal(&format!("bytes of {name}"), &found, &bytes[13..13 + 41]);
    }
    let parts = checkpoint.names().filter(|name| name.contains(".quant") || name.contains("absmax")).count();
    assert_eq!(parts, 0, "what tensors are stored as are no tensors");
    // The same base, quantised here, was trained on: its merge is that into what is stored.
    let family = folder.with_file_name(folder.file_name().unwrap().to_str().unwrap().trim_end_matches("-bnb4"));
    let variant = family.join("lora/attention");
    if family != folder && variant.exists() {
        let doubly = json(&folder.join("config.json"))["quantization_config"]["bnb_4bit_use_double_quant"].clone();
        assert_eq!(json(&variant.join("steps.json"))["nf4"]["double_quantisation"], doubly);
        let adapter = Adapter::load(&variant.join("adapter")).unwrap();
        let merged = tempfile::tempdir().unwrap();
        let adapters = [WeightedAdapter { adapter: &adapter, weight: 1.0 }];
        merge(folder, &adapters, merged.path(), MergeOptions::default()).unwrap();
        let expected = Tensors::read(&variant.join("merged.safetensors"));
        let found = Checkpoint::open(merged.path()).unwrap();
        for name in expected.names().filter(|name| name.ends_with(".weight")) {
            findings.near(&format!("merged {name}"), &found.tensor_f32(name).unwrap(), &expected.floats(name), 1e-5);
        }
        let mut merged = Decoder::load(ops(), merged.path(), Trainability::Frozen).unwrap();
        let found = logits(&mut merged, &expected, "check.input_ids", 1);
        findings.near("merged logits", &found, &expected.floats("check.merged_logits"), LOGITS);
    }
}

/// A checkpoint that is quantised while it is read.
fn check_family<B: Blocks>(
    ops: &impl Fn() -> Arc<B>,
    family: &Path,
    folder: &Path,
    base: &Value,
    findings: &mut Findings,
) {
    let quantize = |double_quantization| QuantizedBase {
        format: BaseFormat::FourBits(Nf4 { double_quantization, ..Nf4::default() }),
        skip_modules: vec!["lm_head".to_owned()],
        layers: None,
    };
    let checkpoint = Checkpoint::open(family).unwrap();
    let weights = checkpoint.names().filter_map(|name| name.strip_suffix(".weight").map(|module| (name, module)));
    let quantised: Vec<&str> =
        weights.filter(|(name, _)| quantize(true).covers(name)).map(|(_, module)| module).collect();
    let expected: Vec<&str> =
        base["quantised"].as_array().unwrap().iter().map(|module| module.as_str().unwrap()).collect();
    findings.equal("quantised layers", &quantised, &expected);

    let expected = Tensors::read(&folder.join("expected.safetensors"));
    for (name, double) in [("logits_nested", true), ("logits_single", false)] {
        let mut decoder = Decoder::load_quantized(ops(), family, &quantize(double)).unwrap();
        let found = logits(&mut decoder, &expected, "input_ids", 2);
        findings.near(name, &found, &expected.floats(name), LOGITS);
    }
    let state = Tensors::read(&folder.join("layer0_nested.safetensors"));
    for name in state.names().filter(|name| name.ends_with(".weight")) {
        let shape = checkpoint.shape(name).unwrap();
        let rows = checkpoint.stored_rows(name, shape, 0).unwrap();
        let dtype = checkpoint.dtype(name).unwrap();
        let found = Nf4Matrix::quantize(&rows, [shape[0], shape[1]], dtype, Nf4::default()).unwrap();
        findings.equal(name, &found.codes, state.bytes(name));
        let Absmax::Nested { codes, .. } = &found.absmax else { panic!("not nested") };
        findings.equal(&format!("{name}.absmax"), codes, state.bytes(&format!("{name}.absmax")));
    }
    for variant in names(&folder.join("lora")) {
        let folder = folder.join("lora").join(&variant);
        let double = json(&folder.join("steps.json"))["nf4"]["double_quantisation"].as_bool().unwrap();
        let decoder = Decoder::load_quantized(ops(), family, &quantize(double)).unwrap();
        check_training(decoder, &folder, &variant, findings);
        if folder.join("merged.safetensors").exists() {
            check_merge(family, &folder, &quantize(double), findings);
        }
    }
}

/// The merge into the dequantised weights, which is PEFT's without its last step, that quantises them again.
fn check_merge(family: &Path, folder: &Path, base: &QuantizedBase, findings: &mut Findings) {
    let adapter = Adapter::load(&folder.join("adapter")).unwrap();
    let output = tempfile::tempdir().unwrap();
    let trained_on = Some(TrainedOn { base, into: MergeInto::Dequantized });
    let options = MergeOptions { trained_on, ..MergeOptions::default() };
    merge(family, &[WeightedAdapter { adapter: &adapter, weight: 1.0 }], output.path(), options).unwrap();
    let (found, expected) =
        (Checkpoint::open(output.path()).unwrap(), Tensors::read(&folder.join("merged.safetensors")));
    for name in expected.names().filter(|name| name.ends_with(".weight")) {
        findings.near(&format!("merged {name}"), &found.tensor_f32(name).unwrap(), &expected.floats(name), 1e-5);
    }
}

fn check_training<B: Blocks>(mut decoder: Decoder<B>, folder: &Path, variant: &str, findings: &mut Findings) {
    let settings = json(&folder.join("steps.json"));
    let number = |value: &Value| value.as_f64().unwrap();
    assert_eq!(settings["optimizer"]["name"], "adamw", "{}", folder.display());
    assert_eq!(settings["nf4"]["blocksize"], 64, "{}", folder.display());
    let optimizer = &settings["optimizer"];
    let optimizer = Optimizer::AdamW(AdamW {
        betas: (number(&optimizer["betas"][0]), number(&optimizer["betas"][1])),
        eps: number(&optimizer["eps"]),
        weight_decay: number(&optimizer["weight_decay"]),
        ..AdamW::default()
    });
    let options = TrainOptions {
        max_grad_norm: Some(number(&settings["clip_grad_norm"])),
        ..TrainOptions::new(Trained::Adapter, optimizer)
    };
    let config = AdapterConfig::read(&folder.join("adapter/adapter_config.json")).unwrap();
    let start = Checkpoint::open_file(&folder.join("adapter_init.safetensors")).unwrap();
    let tensors = start.tensors();
    let tensors = tensors.map(|(name, info)| (name.to_owned(), info.shape.clone(), start.tensor_f32(name).unwrap()));
    decoder.attach(&Adapter::from_tensors(config.clone(), tensors).unwrap()).unwrap();
    let mut trainer = Trainer::new(decoder, options).unwrap();
    let batches = Tensors::read(&folder.join("batches.safetensors"));
    let gradients = Tensors::read(&folder.join("grads_step0.safetensors"));
    let micro_batches = settings["gradient_accumulation_steps"].as_u64().unwrap();
    for step in settings["steps"].as_array().unwrap() {
        let number_of_step = step["step"].as_u64().unwrap();
        let what = |what: &str| format!("{variant} step {number_of_step} {what}");
        for micro in 0..micro_batches {
            let batch =
                batches.batch(number_of_step * micro_batches + micro, &format!("step{number_of_step}.micro{micro}"));
            trainer.accumulate(&batch).unwrap();
        }
        if number_of_step == 0 {
            let found = trainer.gradients().unwrap();
            assert_eq!(found.len(), gradients.names().count());
            for (tensor, found) in found {
                findings.near(&what(&tensor), &found, &gradients.floats(&tensor), NORMS);
            }
        }
        let report = trainer.step(number(&step["lr"])).unwrap();
        findings.equal(&what("targets"), &[report.target_tokens as u64], &[step["target_tokens"].as_u64().unwrap()]);
        findings.near(&what("loss"), &[report.loss as f32], &[number(&step["loss"]) as f32], LOSSES);
        findings.near(&what("grad_norm"), &[report.grad_norm as f32], &[number(&step["grad_norm"]) as f32], NORMS);
    }
    let expected = Tensors::read(&folder.join("adapter/adapter_model.safetensors"));
    let decoder = trainer.decoder_mut();
    let found = decoder.adapter(&config).unwrap();
    assert_eq!(found.tensors().len(), expected.names().count(), "{variant}");
    for (tensor, _, values) in found.tensors() {
        findings.near(&format!("{variant} {tensor}"), values, &expected.floats(&tensor), ADAPTERS);
    }
    if folder.join("merged.safetensors").exists() {
        decoder.attach(&Adapter::load(&folder.join("adapter")).unwrap()).unwrap();
        let expected = Tensors::read(&folder.join("merged.safetensors"));
        let found = logits(decoder, &expected, "check.input_ids", 1);
        findings.near(&format!("{variant} logits"), &found, &expected.floats("check.adapted_logits"), LOGITS);
    }
}
