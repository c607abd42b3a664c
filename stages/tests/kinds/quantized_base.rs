//! An adapter that was trained on a quantised base: whoever computes with it takes that base, and merges say what they
//! merge into.

use std::fs;
use std::path::{Path, PathBuf};

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::error::{Cause, StageError};
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use model::checkpoint::{Checkpoint, CheckpointWriter, Dtype, TensorSpec};
use model::weights::{BaseFormat, Codebook, Nf4, QuantizedBase};
use serde_json::{Value, json};
use stages::kinds::evaluate::Evaluate;
use stages::kinds::log_probs::LogProbabilities;
use stages::kinds::merge::Merge;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{self, learned, write_tokens};

/// As in a pipeline file.
fn format() -> Value {
    json!({"base": "nf4", "block_size": 32, "double_quantization": false})
}

/// The tiny model, an adapter that was trained on it in [`format`], and the dequantised model.
struct Trained {
    tiny: Tiny,
    root: tempfile::TempDir,
    adapter: Artifact,
    dequantised: PathBuf,
}

impl Trained {
    fn new() -> Self {
        let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
        let dequantised = root.path().join("dequantised");
        dequantise(&tiny.model.folder, &dequantised, four_bits(Codebook::Nf4));
        let bench = training::bench(&tiny, &root.path().join("train"), rows(), None);
        let more = json!({"quantize": format(), "epochs": 4, "lora": {"target_modules": "all-linear"}});
        let adapter = training::train(&bench, more).unwrap().remove("adapter").unwrap();
        Self { tiny, root, adapter, dequantised }
    }

    /// A bench with the model as `base`, the dequantised one as `dequantised`, the adapter as `adapter`, the same
    /// without what it notes of its base as `silent`, and its rows as `tokens` and `rows`.
    fn bench(&self, name: &str) -> TestBench {
        let folder = self.root.path().join(name);
        let tokens = folder.join("tokens of rows");
        let facts = write_tokens(&tokens, rows());
        let adapter = &self.adapter;
        let bench = self.tiny.bench_in(&folder);
        let bench = bench.input("dequantised.model", "model", &self.dequantised, Facts::new()).unwrap();
        let silent = folder.join("silent");
        fs::create_dir(&silent).unwrap();
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(adapter.folder.join(name), silent.join(name)).unwrap();
        }
        let bench = bench.input_of("trained.adapter", &adapter.folder).unwrap();
        let bench = bench.input("silent.adapter", "adapter", &silent, Facts::new()).unwrap();
        bench.input("tokens.tokens", "tokens", &tokens, facts).unwrap()
    }
}

fn rows() -> Vec<stages::data::artifact::TokenRow> {
    (0..8).map(|row| learned((0..16).map(|at| 3 + (7 * row + 5 * at) % 200))).collect()
}

fn four_bits(codebook: Codebook) -> BaseFormat {
    BaseFormat::FourBits(Nf4 { codebook, block_size: 32, double_quantization: false })
}

fn dequantise(model: &Path, to: &Path, format: BaseFormat) {
    fs::create_dir(to).unwrap();
    let base = QuantizedBase { format, skip_modules: vec!["lm_head".to_owned()], layers: None };
    let checkpoint = Checkpoint::open(model).unwrap().quantizing(base);
    let specs = checkpoint.tensors().map(|(name, info)| TensorSpec::new(name, info.dtype, &info.shape)).collect();
    let mut writer = CheckpointWriter::create(to, specs, 1 << 30).unwrap();
    let names: Vec<String> = checkpoint.names().map(str::to_owned).collect();
    names.iter().for_each(|name| writer.write_f32(name, &checkpoint.tensor_f32(name).unwrap()).unwrap());
    writer.finish().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(model.join(name), to.join(name)).unwrap();
    }
}

/// The perplexity that `log_probs` finds of the rows.
fn perplexity(bench: &TestBench, model: &str, more: Value) -> Result<f64, StageError> {
    let mut parameters = json!({"model": model, "data": "tokens"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let outputs = bench.run::<LogProbabilities>(parameters)?;
    Ok(outputs["log_probs"].description.facts["perplexity"].as_f64().unwrap())
}

/// The figure of `evaluate` on the rows.
fn evaluated(bench: &TestBench, model: &str, more: Value) -> Result<f64, StageError> {
    let mut parameters = json!({"model": model, "data": "rows", "metrics": ["perplexity"]});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let outputs = bench.run::<Evaluate>(parameters)?;
    let figures: Value =
        serde_json::from_slice(&fs::read(outputs["metrics"].folder.join("metrics.json")).unwrap()).unwrap();
    Ok(figures["perplexity"]["value"].as_f64().unwrap())
}

#[test]
fn other_formats_compute_what_they_dequantise_to_as_well() {
    let tiny = Tiny::new();
    for (name, quantize, format) in [
        ("fp4", json!({"base": "fp4", "block_size": 32, "double_quantization": false}), four_bits(Codebook::Fp4)),
        ("q8_0", json!({"base": "q8_0"}), BaseFormat::Q8_0),
    ] {
        let root = tempfile::tempdir().unwrap();
        let dequantised = root.path().join("dequantised");
        dequantise(&tiny.model.folder, &dequantised, format);
        let tokens = root.path().join("tokens");
        let facts = write_tokens(&tokens, rows());
        let bench = |folder: &str| {
            let bench = tiny.bench_in(&root.path().join(folder));
            let bench = bench.input("dequantised.model", "model", &dequantised, Facts::new()).unwrap();
            bench.input("tokens.tokens", "tokens", &tokens, facts.clone()).unwrap()
        };
        let figures = bench("figures");
        let found = perplexity(&figures, "base", json!({"quantize": quantize.clone()})).unwrap();
        assert_eq!(found, perplexity(&figures, "dequantised", json!({})).unwrap(), "{name}");
        assert_ne!(found, perplexity(&figures, "base", json!({})).unwrap(), "{name}");
        let candle = json!({"quantize": quantize.clone(), "kernels": "candle"});
        assert!((perplexity(&figures, "base", candle).unwrap() / found - 1.0).abs() < 1e-4, "{name}");
        let more = json!({"lora": {"target_modules": "all-linear"}});
        let with = |more: &Value, model: &str, quantize: Option<&Value>| {
            let mut more = more.clone();
            more["model"] = model.into();
            quantize.into_iter().for_each(|quantize| more["quantize"] = quantize.clone());
            more
        };
        let one = training::train(&bench("one"), with(&more, "base", Some(&quantize))).unwrap();
        let other = training::train(&bench("other"), with(&more, "dequantised", None)).unwrap();
        assert!(training::adapter(&one) == training::adapter(&other), "{name}");
        assert_eq!(one["adapter"].description.facts["quantize"]["base"], name);
        let problems = training::problems(
            training::with(json!({"quantize": {"base": name, "block_size": 128}})),
            &InputFacts::new(),
        );
        assert_eq!(problems.is_empty(), name == "fp4", "{problems:?}");
    }
    // torchao takes matrices of whole blocks of 256 scales: found before the run, where the model is known.
    let facts = InputFacts::from([("base.model".to_owned(), tiny.model.description.facts.clone())]);
    let problems = |quantize: Value| training::problems(training::with(json!({"quantize": quantize})), &facts);
    let found = problems(json!({"base": "nf4_torchao"}));
    let said = "`nf4_torchao` needs matrices whose size is a multiple of 16384, and that of \
        `model.layers.0.self_attn.q_proj.weight` [32, 32] and 13 more";
    assert!(found.len() == 1 && found[0].starts_with(said), "{found:?}");
    assert!(problems(json!({"base": "nf4"})).is_empty());
    let skipped = json!({"base": "nf4_torchao", "skip_modules": ["lm_head", "self_attn", "mlp"]});
    assert!(problems(skipped).is_empty());
    let bench = training::bench(&tiny, &tempfile::tempdir().unwrap().keep(), rows(), None);
    let error = training::train(&bench, json!({"quantize": {"base": "nf4_torchao"}})).unwrap_err();
    let mut causes = std::iter::successors(std::error::Error::source(&error), |error| error.source());
    assert!(causes.any(|cause| cause.to_string().contains("torchao's NF4 takes multiples of 16384")), "{error:?}");
}

#[test]
fn the_base_is_the_one_that_the_adapter_was_trained_on() {
    let trained = Trained::new();
    let bench = trained.bench("inference");
    for figure in [perplexity, evaluated] {
        let expected = figure(&bench, "dequantised", json!({"adapter": "silent"})).unwrap();
        assert_eq!(figure(&bench, "base", json!({"adapter": "trained"})).unwrap(), expected);
        assert_eq!(figure(&bench, "base", json!({"adapter": "silent", "quantize": format()})).unwrap(), expected);
        let candle = json!({"adapter": "trained", "kernels": "candle"});
        assert!((figure(&bench, "base", candle).unwrap() - expected).abs() < 1e-4 * expected);
        // What the file says holds.
        let stored = figure(&bench, "base", json!({"adapter": "silent"})).unwrap();
        assert_eq!(figure(&bench, "base", json!({"adapter": "trained", "quantize": "none"})).unwrap(), stored);
        assert_ne!(stored, expected);
        let base = figure(&bench, "base", json!({"quantize": format()})).unwrap();
        assert_eq!(base, figure(&bench, "dequantised", json!({})).unwrap());
        for format in ["int8", "int4"] {
            let blocks = figure(&bench, "base", json!({"adapter": "trained", "quantize": format})).unwrap();
            assert!(![stored, expected].contains(&blocks), "{format}");
        }
    }
}

/// The torch worker has the formats of bitsandbytes alone (`tests/torch/quantized.rs`).
#[test]
fn a_base_that_the_worker_has_not_is_asked_here_alone() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    let bench = training::bench(&tiny, &root.path().join("train"), rows(), None);
    let trained = training::train(&bench, json!({"quantize": {"base": "q8_0"}})).unwrap().remove("adapter").unwrap();
    let bench = tiny.bench_in(&root.path().join("asked")).input_of("trained.adapter", &trained.folder).unwrap();
    let native = "an adapter that was trained on a quantised base needs `backend: native`, and the stage has \
                  `backend: torch`";
    let half = "an adapter that was trained on a quantised base is not computed with `dtype: f16`";
    let inputs = InputFacts::from([("trained.adapter".to_owned(), trained.description.facts.clone())]);
    for (more, message) in [(json!({"backend": "torch"}), native), (json!({"dtype": "f16"}), half)] {
        let mut parameters = json!({"model": "base", "adapter": "trained", "prompts": ["a"]});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(problems("generate", parameters, &inputs), [message]);
        let mut parameters = json!({"adapter": "trained"});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let error = evaluated(&bench, "base", parameters).unwrap_err();
        assert_eq!((error.message.as_str(), error.cause), (message, Cause::BadParameters));
    }
}

fn problems(kind: &str, parameters: Value, inputs: &InputFacts) -> Vec<String> {
    let mut reader = Reader::default();
    let bound = stages::registry().get(kind).unwrap().read(&Node::from_json(&parameters), &mut reader);
    let found = bound.map_or_else(Vec::new, |bound| bound.check(inputs, Span::default()));
    reader.problems.into_iter().chain(found).map(|problem| problem.message).collect()
}

#[test]
fn what_cannot_be_is_found_before_a_run() {
    let noted = json!({"weights": "a", "quantize": {
        "base": "nf4", "block_size": 64, "double_quantization": true, "skip_modules": ["lm_head"],
    }});
    let facts = |json: &Value| json.as_object().unwrap().clone();
    let inputs = InputFacts::from([
        ("base.model".to_owned(), facts(&json!({"weights": "a"}))),
        ("trained.adapter".to_owned(), facts(&noted)),
        ("plain.adapter".to_owned(), facts(&json!({"weights": "a"}))),
    ]);
    let merge = |more: Value| {
        let mut parameters = json!({"model": "base"});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        problems("merge", parameters, &inputs)
    };
    let missing = "the adapter was trained on its base in `nf4`, and `into` is not given";
    assert_eq!(merge(json!({"adapter": "trained"})), [missing]);
    let idle = "`into` is for an adapter that was trained on a quantised base, and this one was not";
    assert_eq!(merge(json!({"adapter": "plain", "into": "original"})), [idle]);
    let both = json!([{"adapter": "trained"}, {"adapter": "plain"}]);
    let apart = "the adapters were trained on their base in different formats";
    assert_eq!(merge(json!({"adapters": both, "into": "dequantized"})), [apart]);
    for into in ["original", "dequantized"] {
        assert!(merge(json!({"adapter": "trained", "into": into})).is_empty());
    }
    assert!(merge(json!({"adapter": "unknown"})).is_empty());

    let generate = |more: Value| {
        let mut parameters = json!({"model": "base", "adapter": "trained", "prompts": ["a"]});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        problems("generate", parameters, &inputs)
    };
    assert!(generate(json!({})).is_empty());
    assert!(generate(json!({"backend": "torch"})).is_empty());
    assert!(generate(json!({"backend": "torch", "quantize": "none"})).is_empty());
    assert_eq!(generate(json!({"quantize": {"base": "nf4", "block_size": 96}})).len(), 1);

    // Of weights that have few bits nothing is quantised again.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf/llama31/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(folder).unwrap()).unwrap();
    let mut with = |bytes: u64| {
        config["quantization_config"] = json!({"quant_method": "gguf", "weight_bytes": bytes});
        let inputs = InputFacts::from([("base.model".to_owned(), facts(&json!({"config": config})))]);
        let base = json!({"quantize": {"base": "nf4"}});
        let parameters = [
            ("generate", json!({"model": "base", "prompts": ["a"]})),
            ("train", json!({"model": "base", "data": "rows"})),
        ];
        parameters.map(|(kind, mut parameters)| {
            parameters.as_object_mut().unwrap().extend(base.as_object().unwrap().clone());
            problems(kind, parameters, &inputs)
        })
    };
    assert_eq!(with(1 << 40), [Vec::<String>::new(), Vec::new()]);
    for found in with(1 << 10) {
        assert_eq!(found, ["the model's weights are stored quantised already (GGUF), and stay as they are"]);
    }
}

#[test]
fn a_merge_is_into_what_was_trained_on_or_into_what_is_stored() {
    let trained = Trained::new();
    let bench = trained.bench("merge");
    let merge = |into: &str| {
        let asked = json!({"model": "base", "adapter": "trained", "into": into, "data": "tokens", "dtype": "f32"});
        bench.run::<Merge>(asked).unwrap().remove("model").unwrap()
    };
    let error = bench.run::<Merge>(json!({"model": "base", "adapter": "trained"})).unwrap_err();
    assert!(error.message.ends_with("and `into` is not given") && error.help.is_some(), "{error:?}");
    let adapted = perplexity(&bench, "base", json!({"adapter": "trained"})).unwrap();
    let (mut reports, mut checkpoints) = (Vec::new(), Vec::new());
    for (into, model) in [("dequantized", "dequantised"), ("original", "base")] {
        let merged = merge(into);
        let report: Value =
            serde_json::from_slice(&fs::read(merged.folder.join("merge_report.json")).unwrap()).unwrap();
        // The weights are those of a merge into such a checkpoint.
        let expected = bench.run::<Merge>(json!({"model": model, "adapter": "silent", "dtype": "f32"})).unwrap();
        let (found, expected) =
            (Checkpoint::open(&merged.folder).unwrap(), Checkpoint::open(&expected["model"].folder).unwrap());
        assert!(found.names().eq(expected.names()));
        found
            .names()
            .for_each(|name| assert_eq!(found.bytes(name).unwrap(), expected.bytes(name).unwrap(), "{into} {name}"));
        assert!(found.tensors().all(|(_, info)| info.dtype == Dtype::F32));
        assert_eq!(report["proof"]["against_training"]["into"], into);
        reports.push(report["proof"]["against_training"].clone());
        let again = TestBench::new(&trained.root.path().join(into));
        let tokens = trained.root.path().join(into).join("tokens of rows");
        let facts = write_tokens(&tokens, rows());
        let again = again.input_of("merged.model", &merged.folder).unwrap();
        let again = again.input("tokens.tokens", "tokens", &tokens, facts).unwrap();
        checkpoints.push(perplexity(&again, "merged", json!({})).unwrap());
    }
    // Either report has both errors, and those of the same merges.
    for which in ["dequantized", "original"] {
        assert_eq!(reports[0][which], reports[1][which]);
    }
    let error = |which: &str| reports[0][which]["max_abs_logit_difference"].as_f64().unwrap();
    assert!(error("dequantized") < 1e-4 && error("original") > 100.0 * error("dequantized"), "{:?}", reports[0]);
    assert!((checkpoints[0] - adapted).abs() < 1e-4 * adapted, "{checkpoints:?} of {adapted}");
    assert!((checkpoints[1] - adapted).abs() > 1e-3 * adapted, "{checkpoints:?} of {adapted}");
}

/// Models that bitsandbytes stored in 4 bits.
#[test]
fn what_does_not_go_with_weights_in_4_bits_is_refused_when_it_runs() {
    let root = tempfile::tempdir().unwrap();
    let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/nf4/llama31-bnb4");
    let tokens = root.path().join("rows");
    let facts = write_tokens(&tokens, vec![learned(3..20), learned(5..22)]);
    let bench = TestBench::new(&root.path().join("bench")).input("base.model", "model", &stored, Facts::new()).unwrap();
    let bench = bench.input("tokens.tokens", "tokens", &tokens, facts).unwrap();
    let error = training::train(&bench, json!({"method": "full"})).unwrap_err();
    let message = "the model's weights are stored quantised, and `method: full` trains every weight";
    assert_eq!((error.message.as_str(), error.cause), (message, Cause::BadParameters));
    assert!(error.help.is_some());
    // An adapter on it is trained on what is stored.
    let adapter = training::train(&bench, json!({})).unwrap().remove("adapter").unwrap();
    assert!(!adapter.description.facts.contains_key("quantize"));
}
