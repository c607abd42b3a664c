//! Compares the decoder with its reference implementation (transformers, PEFT) on tiny models, on every kernel set.
//!
//! The cases lie in `tests/golden` of the repository, or in the folder that `PIPELINE_GOLDEN_DIR` names. Every family
//! and adapter found there is run; those that are not supported are printed. Each tensor must agree to `max|a-b| ≤ 1e-4
//! · max|b|`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::checkpoint::Checkpoint;
use model::config::{Config, ConfigError};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::merge::{MergeOptions, WeightedAdapter, merge};
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig};
use model::sampling::argmax;
use model::session::{Append, Session};
use model::trainer::{self, AdamW, EmbeddingNoise, TrainOptions, Trained, Trainer};
use serde::Deserialize;
use test_harness::{Unmet, test};

use crate::in_process;
use crate::support::on_cuda;
use crate::tensors::Tensors;

const TOLERANCE: f64 = 1e-4;

/// The cases of the repository: none of them may be missing, left out as unsupported, or run without standing here.
const CASES: [&str; 25] = [
    "code_llama",
    "gemma",
    "gemma2",
    "gemma2_untied",
    "llama2",
    "llama31",
    "llama32",
    "llama_bf16_shards",
    "llama_biases",
    "llama_dynamic",
    "llama_f16",
    "llama_linear",
    "llama_yarn",
    "mistral",
    "mistral_no_window",
    "phi3",
    "phi3_longrope",
    "phi3_longrope_partial",
    "phi3_partial_rotary",
    "qwen2",
    "qwen2_windows",
    "qwen2_yarn",
    "qwen3",
    "qwen3_biases",
    "qwen3_tied_windows",
];

/// The adapters of those cases, likewise.
const ADAPTERS: [&str; 30] = [
    "gemma/attention",
    "gemma/tied_embedding_saved",
    "gemma2/attention",
    "gemma2/dora_lm_head",
    "gemma2/neftune",
    "gemma2/tied_trainable_tokens",
    "llama2/attention",
    "llama2/dropout",
    "llama2/norms",
    "llama31/all_linear",
    "llama31/attention",
    "llama31/dora",
    "llama31/lm_head",
    "llama31/lora_plus",
    "llama31/modules_to_save",
    "llama31/patterns",
    "llama31/rslora",
    "llama31/trainable_tokens",
    "llama31/warm_start",
    "mistral/attention",
    "mistral/layers",
    "phi3/attention",
    "phi3/dora",
    "phi3_longrope/attention",
    "qwen2/attention",
    "qwen2/dora_dropout",
    "qwen2/tied_lm_head",
    "qwen2/tied_lm_head_saved",
    "qwen3/attention",
    "qwen3/tied_both_saved",
];

#[test]
fn cpu_agrees_with_the_reference() {
    for threads in [1, 3] {
        check_all(&Arc::new(Cpu::new(threads, Compute::F32).unwrap()));
    }
}

#[test]
fn candle_agrees_with_the_reference() {
    check_all(&Arc::new(Candle::on_processor()));
}

/// Each worker accumulates every second micro-batch.
#[test]
fn two_workers_agree_with_the_reference() {
    let mut findings = Findings::default();
    for name in ADAPTERS {
        let (family, variant) = name.split_once('/').unwrap();
        let family = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(family);
        check_workers(&family, &family.join("lora").join(variant), &mut findings);
    }
    assert!(findings.problems.is_empty(), "{}", findings.problems.join("\n"));
}

#[test]
fn candle_on_cuda_agrees_with_the_reference() -> Result<(), Unmet> {
    check_all(&Arc::new(on_cuda()?));
    Ok(())
}

/// Runs every case found and fails with all that disagree.
fn check_all<B: Blocks>(ops: &Arc<B>) {
    let given = std::env::var_os("PIPELINE_GOLDEN_DIR").map(PathBuf::from);
    let own = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden"));
    let folder = given.clone().unwrap_or_else(own);
    let mut findings = Findings::default();
    let mut run = Vec::new();
    for family in subfolders(&folder).into_iter().filter(|family| family.join("config.json").exists()) {
        match Config::read(&family) {
            Ok(_) => {
                check_family(ops, &family, &mut findings);
                run.push(family.file_name().unwrap().to_string_lossy().into_owned());
            }
            Err(error @ (ConfigError::Family { .. } | ConfigError::Unsupported { .. })) if given.is_some() => {
                println!("not supported: {}: {error}", family.display());
            }
            Err(error) => findings.problems.push(format!("{}: {error}", family.display())),
        }
    }
    println!(
        "{}: {} comparisons, worst {:.1e} of the largest element",
        ops.describe(),
        findings.compared,
        findings.worst
    );
    assert!(findings.compared > 0, "no golden case in {}", folder.display());
    assert!(findings.problems.is_empty(), "{}:\n{}", ops.describe(), findings.problems.join("\n"));
    if given.is_none() {
        assert_eq!(run, CASES);
        assert_eq!(findings.adapters, ADAPTERS);
    }
}

fn check_family<B: Blocks>(ops: &Arc<B>, family: &Path, findings: &mut Findings) {
    let mut decoder = Decoder::load(Arc::clone(ops), family, Trainability::Frozen).unwrap();
    let expected = Tensors::read(&family.join("expected.safetensors"));
    check_logits(&mut decoder, &expected, family, findings);
    check_generation(&mut decoder, &expected, family, findings);
    let variants = Some(family.join("lora")).filter(|folder| folder.exists());
    for variant in variants.iter().flat_map(|folder| subfolders(folder)) {
        check_adapter(ops, family, &variant, findings);
        let name = |folder: &Path| folder.file_name().unwrap().to_string_lossy().into_owned();
        findings.adapters.push(format!("{}/{}", name(family), name(&variant)));
    }
}

fn check_logits<B: Blocks>(decoder: &mut Decoder<B>, expected: &Tensors, family: &Path, findings: &mut Findings) {
    let name = |what: &str| format!("{} {what}", family.display());
    let rows = expected.rows("input_ids");
    let batch = documents(&rows.concat(), &rows.iter().map(Vec::len).collect::<Vec<_>>());
    findings.compare(name("logits"), &decoder.logits(&batch).unwrap(), &expected.floats("logits"));

    let packed = &expected.rows("packed_input_ids")[0];
    let lengths: Vec<usize> = expected.integers("packed_document_lengths").into_iter().map(|x| x as usize).collect();
    let together = decoder.logits(&documents(packed, &lengths)).unwrap();
    findings.compare(name("packed_logits"), &together, &expected.floats("packed_logits"));
    let mut alone = Vec::new();
    let mut first = 0;
    for length in lengths {
        alone.extend(decoder.logits(&documents(&packed[first..first + length], &[length])).unwrap());
        first += length;
    }
    findings.compare(name("packed documents alone"), &alone, &together);
}

fn check_generation<B: Blocks>(decoder: &mut Decoder<B>, expected: &Tensors, family: &Path, findings: &mut Findings) {
    let name = |what: &str| format!("{} {what}", family.display());
    let ids = expected.rows("greedy_ids").remove(0);
    let prompt = expected.rows("greedy_prompt").remove(0);
    let vocab_size = decoder.config().vocab_size;
    let mut session = Session::new(decoder, 2, ids.len()).unwrap();
    // A second, shorter sequence beside the first must not change it.
    let other = &prompt[..5];
    let both = [Append::new(0, &prompt), Append::new(1, other)];
    let mut last = session.append(decoder, &both).unwrap().remove(0);
    let (mut found, mut logits) = (prompt.clone(), Vec::new());
    while found.len() < ids.len() {
        let next = argmax(&last).unwrap();
        found.push(next);
        logits.extend_from_slice(&last);
        if found.len() < ids.len() {
            let next = [next];
            let both = [Append::new(1, &next), Append::new(0, &next)];
            last = session.append(decoder, &both).unwrap().remove(1);
        }
    }
    findings.equal(name("greedy_ids"), &found, &ids);
    findings.compare(name("greedy_logits"), &logits, &expected.floats("greedy_logits"));
    // Each beginning alone: where long documents turn by other frequencies, more tokens change the first logits too.
    let mut without_cache = Vec::new();
    for length in prompt.len()..ids.len() {
        let whole = decoder.logits(&documents(&ids[..length], &[length])).unwrap();
        without_cache.extend_from_slice(&whole[(length - 1) * vocab_size..]);
    }
    findings.compare(name("greedy logits without the cache"), &without_cache, &logits);
    let greedy: Vec<u32> = without_cache.chunks(vocab_size).map(|logits| argmax(logits).unwrap()).collect();
    findings.equal(name("greedy ids without the cache"), greedy.as_slice(), &ids[prompt.len()..]);
}

fn check_adapter<B: Blocks>(ops: &Arc<B>, family: &Path, variant: &Path, findings: &mut Findings) {
    let name = |what: &str| format!("{} {what}", variant.display());
    let config = AdapterConfig::read(&variant.join("adapter/adapter_config.json")).unwrap();
    let start = adapter(&config, &variant.join("adapter_init.safetensors"));
    let mut decoder = Decoder::load(Arc::clone(ops), family, Trainability::Frozen).unwrap();
    check_fresh(&decoder, &start, &name("fresh"), findings);
    decoder.attach(&start).unwrap_or_else(|error| panic!("{}: {error}", variant.display()));
    let steps: Steps = serde_json::from_str(&std::fs::read_to_string(variant.join("steps.json")).unwrap()).unwrap();
    let mut trainer = Trainer::new(decoder, steps.options()).unwrap();
    let batches = Tensors::read(&variant.join("batches.safetensors"));
    let first_gradients = Tensors::read(&variant.join("grads_step0.safetensors"));
    for expected in &steps.steps {
        for micro in 0..steps.gradient_accumulation_steps {
            let row = expected.step * steps.gradient_accumulation_steps + micro;
            trainer.accumulate(&batches.batch(row as u64, &format!("step{}.micro{micro}", expected.step))).unwrap();
        }
        if expected.step == 0 {
            let gradients = trainer.gradients().unwrap();
            findings.equal(name("trained tensors"), &gradients.len(), &first_gradients.names().count());
            for (tensor, gradient) in gradients {
                findings.compare(name(&format!("gradient of {tensor}")), &gradient, &first_gradients.floats(&tensor));
            }
        }
        let found = trainer.step(expected.lr).unwrap();
        let step = |what: &str| name(&format!("step {} {what}", expected.step));
        findings.equal(step("target_tokens"), &found.target_tokens, &expected.target_tokens);
        findings.compare(step("loss"), &[found.loss as f32], &[expected.loss as f32]);
        findings.compare(step("grad_norm"), &[found.grad_norm as f32], &[expected.grad_norm as f32]);
    }
    let decoder = trainer.decoder_mut();
    let found = decoder.adapter(&config).unwrap();
    let expected = Tensors::read(&variant.join("adapter/adapter_model.safetensors"));
    // PEFT adds the base's own weight to an adapter on the head.
    let count = expected.names().filter(|tensor| !tensor.contains(".base_layer.")).count();
    findings.equal(name("final tensors"), &found.tensors().len(), &count);
    for (tensor, _, values) in found.tensors() {
        findings.compare(name(&format!("final {tensor}")), values, &expected.floats(&tensor));
    }
    check_merge(ops, decoder, family, variant, findings);
}

fn check_workers(family: &Path, variant: &Path, findings: &mut Findings) {
    let name = |what: &str| format!("{} {what}", variant.display());
    let config = AdapterConfig::read(&variant.join("adapter/adapter_config.json")).unwrap();
    let start = adapter(&config, &variant.join("adapter_init.safetensors"));
    let steps: Steps = serde_json::from_str(&std::fs::read_to_string(variant.join("steps.json")).unwrap()).unwrap();
    let batches = Tensors::read(&variant.join("batches.safetensors"));
    let mut workers = in_process::workers(2, |rank, collective| {
        let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
        let mut decoder = Decoder::load(ops, family, Trainability::Frozen).unwrap();
        decoder.attach(&start).unwrap();
        let mut trainer = Trainer::new(decoder, steps.options()).unwrap().together(collective);
        let reports = steps.steps.iter().map(|expected| {
            for micro in (0..steps.gradient_accumulation_steps).skip(rank).step_by(2) {
                let row = expected.step * steps.gradient_accumulation_steps + micro;
                trainer.accumulate(&batches.batch(row as u64, &format!("step{}.micro{micro}", expected.step))).unwrap();
            }
            trainer.step(expected.lr).unwrap()
        });
        let reports: Vec<_> = reports.collect();
        (reports, trainer.decoder().adapter(&config).unwrap())
    });
    let (reports, found) = workers.remove(0);
    assert_eq!(reports, workers[0].0, "{}", variant.display());
    for (found, expected) in reports.iter().zip(&steps.steps) {
        let step = |what: &str| name(&format!("step {} {what}", expected.step));
        findings.equal(step("target_tokens"), &found.target_tokens, &expected.target_tokens);
        findings.compare(step("loss"), &[found.loss as f32], &[expected.loss as f32]);
        findings.compare(step("grad_norm"), &[found.grad_norm as f32], &[expected.grad_norm as f32]);
    }
    let expected = Tensors::read(&variant.join("adapter/adapter_model.safetensors"));
    for (tensor, _, values) in found.tensors() {
        findings.compare(name(&format!("final {tensor}")), values, &expected.floats(&tensor));
    }
}

/// A fresh adapter of these settings has the modules and ranks of PEFT's, and the base's values where it has whole
/// tensors.
fn check_fresh<B: Blocks>(decoder: &Decoder<B>, expected: &Adapter, name: &str, findings: &mut Findings) {
    let fresh = decoder.fresh_adapter(&expected.config, 1).unwrap();
    let shapes = |adapter: &Adapter| -> Vec<_> {
        adapter.tensors().into_iter().map(|(tensor, shape, _)| (tensor, shape)).collect()
    };
    findings.equal(format!("{name} shapes"), &shapes(&fresh), &shapes(expected));
    for (table, rows) in &fresh.token_rows {
        findings.compare(format!("{name} rows of {table}"), &rows.values, &expected.token_rows[table].values);
    }
    for (tensor, saved) in &fresh.saved_tensors {
        findings.compare(format!("{name} {tensor}"), &saved.values, &expected.saved_tensors[tensor].values);
    }
}

/// The reference's final adapter: attached, and merged by us into a checkpoint that is loaded again.
fn check_merge<B: Blocks>(
    ops: &Arc<B>,
    decoder: &mut Decoder<B>,
    family: &Path,
    variant: &Path,
    findings: &mut Findings,
) {
    let name = |what: &str| format!("{} {what}", variant.display());
    let adapter = Adapter::load(&variant.join("adapter")).unwrap();
    let expected = Tensors::read(&variant.join("merged.safetensors"));
    let ids = expected.rows("check.input_ids").remove(0);
    let batch = documents(&ids, &[ids.len()]);
    decoder.attach(&adapter).unwrap();
    findings.compare(
        name("adapted_logits"),
        &decoder.logits(&batch).unwrap(),
        &expected.floats("check.adapted_logits"),
    );

    let folder = tempfile::tempdir().unwrap();
    let adapters = [WeightedAdapter { adapter: &adapter, weight: 1.0 }];
    merge(family, &adapters, folder.path(), MergeOptions::default()).unwrap();
    let merged = Checkpoint::open(folder.path()).unwrap();
    for tensor in expected.names().filter(|tensor| tensor.ends_with(".weight")) {
        findings.compare(name(tensor), &merged.tensor_f32(tensor).unwrap(), &expected.floats(tensor));
    }
    let mut merged = Decoder::load(Arc::clone(ops), folder.path(), Trainability::Frozen).unwrap();
    findings.compare(name("merged_logits"), &merged.logits(&batch).unwrap(), &expected.floats("check.merged_logits"));
}

fn adapter(config: &AdapterConfig, file: &Path) -> Adapter {
    let checkpoint = Checkpoint::open_file(file).unwrap();
    let tensors = checkpoint
        .tensors()
        .map(|(name, info)| (name.to_owned(), info.shape.clone(), checkpoint.tensor_f32(name).unwrap()));
    Adapter::from_tensors(config.clone(), tensors).unwrap()
}

fn documents(ids: &[u32], lengths: &[usize]) -> Batch {
    Batch { document_lengths: lengths.to_vec(), ..Batch::text(ids.to_vec()) }
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut found: Vec<_> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

/// What was compared, and what did not agree.
#[derive(Default)]
struct Findings {
    compared: usize,
    adapters: Vec<String>,
    worst: f64,
    problems: Vec<String>,
}

impl Findings {
    fn compare(&mut self, name: String, found: &[f32], expected: &[f32]) {
        self.compared += 1;
        if found.len() != expected.len() {
            return self.problems.push(format!("{name}: {} values, not {}", found.len(), expected.len()));
        }
        let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(f64::from(x.abs())));
        let difference = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs();
        // A value that is not a number is further away than any other.
        let distance = |pair| Some(difference(pair)).filter(|distance| !distance.is_nan()).unwrap_or(f64::INFINITY);
        let furthest = found.iter().zip(expected).map(distance).fold(0.0, f64::max);
        self.worst = self.worst.max(furthest / largest.max(f64::MIN_POSITIVE));
        if furthest > TOLERANCE * largest {
            self.problems.push(format!("{name}: off by {furthest:.3e} where the largest is {largest:.3e}"));
        }
    }

    fn equal<T: PartialEq + std::fmt::Debug + ?Sized>(&mut self, name: String, found: &T, expected: &T) {
        self.compared += 1;
        if found != expected {
            self.problems.push(format!("{name}: {found:?}, not {expected:?}"));
        }
    }
}

#[derive(Deserialize)]
struct Steps {
    optimizer: Optimizer,
    clip_grad_norm: f64,
    gradient_accumulation_steps: usize,
    neftune_noise_alpha: Option<f64>,
    learning_rate_ratio: Option<f64>,
    steps: Vec<Step>,
}

impl Steps {
    fn options(&self) -> TrainOptions {
        let Optimizer { betas, eps, weight_decay } = self.optimizer;
        let optimizer = trainer::Optimizer::AdamW(AdamW { betas, eps, weight_decay, ..AdamW::default() });
        TrainOptions {
            max_grad_norm: Some(self.clip_grad_norm),
            embedding_noise: self.neftune_noise_alpha.map(|alpha| EmbeddingNoise { alpha }),
            lora_learning_rate_ratio: self.learning_rate_ratio.unwrap_or(1.0),
            ..TrainOptions::new(Trained::Adapter, optimizer)
        }
    }
}

#[derive(Deserialize)]
struct Optimizer {
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
}

#[derive(Deserialize)]
struct Step {
    step: usize,
    loss: f64,
    target_tokens: usize,
    grad_norm: f64,
    lr: f64,
}
