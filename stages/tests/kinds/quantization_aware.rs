//! Training for weights of few bits: what is written is what was computed with, and whoever reads it computes as
//! training did.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::error::{Cause, StageError};
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use model::checkpoint::{Checkpoint, Dtype};
use model::weights::SCALES_FILE;
use serde_json::{Value, json};
use stages::data::artifact::TokenRow;
use stages::kinds::add_tokens::AddTokens;
use stages::kinds::evaluate::Evaluate;
use stages::kinds::log_probs::LogProbabilities;
use stages::kinds::merge::Merge;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{self, learned, write_tokens};

/// Of more tokens each than products sum in the order of few rows: a bit that differs may move an activation by a whole
/// step of its grid.
fn rows() -> Vec<TokenRow> {
    (0..8).map(|row| learned((0..24).map(|at| 3 + (7 * row + 5 * at) % 200))).collect()
}

fn aware() -> Value {
    json!({"aware": "int8_dynamic_activations_int4_weights", "group_size": 16})
}

fn full(more: Value) -> Value {
    let mut parameters = json!({
        "method": "full", "quantize": aware(), "epochs": 3, "validation": "held_out", "eval_steps": 2,
        "optimizer": {"learning_rate": 3e-3},
    });
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    parameters
}

fn train(tiny: &Tiny, folder: &Path, more: Value) -> Result<BTreeMap<String, Artifact>, StageError> {
    training::train(&training::bench(tiny, folder, rows(), Some(rows())), more)
}

/// Copies the files of these names.
fn copied(model: &Path, to: &Path, is_wanted: impl Fn(&str) -> bool) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(model).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if is_wanted(&name) && entry.path().is_file() {
            fs::copy(entry.path(), to.join(name)).unwrap();
        }
    }
}

/// A bench with what was trained as `base`, and the rows as `tokens` and `rows`.
fn bench_of(tiny: &Tiny, model: &Path, adapter: Option<&Artifact>, folder: &Path) -> TestBench {
    let tokens = folder.join("rows of tokens");
    let facts = write_tokens(&tokens, rows());
    let copy = folder.join("copy");
    copied(model, &copy, |_| true);
    let bench = tiny.bench_in(folder).input("trained.model", "model", &copy, Facts::new()).unwrap();
    let bench = match adapter {
        Some(adapter) => bench.input_of("trained.adapter", &adapter.folder).unwrap(),
        None => bench,
    };
    bench.input("tokens.tokens", "tokens", &tokens, facts).unwrap()
}

/// The mean loss that `log_probs` finds of the rows.
fn loss(bench: &TestBench, model: &str, more: Value) -> f64 {
    let mut parameters = json!({"model": model, "data": "tokens"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let outputs = bench.run::<LogProbabilities>(parameters).unwrap();
    outputs["log_probs"].description.facts["perplexity"].as_f64().unwrap().ln()
}

fn last_validation_loss(outputs: &BTreeMap<String, Artifact>) -> f64 {
    training::records(outputs, "validation").last().unwrap()["loss"].as_f64().unwrap()
}

#[test]
fn what_is_written_computes_as_training_did() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    for (dtype, kernels, bound) in [("f32", "cpu", 1e-5), ("bf16", "cpu", 1e-4), ("f32", "candle", 1e-5)] {
        let name = format!("{dtype} {kernels}");
        let computed = json!({"dtype": dtype, "kernels": kernels});
        let outputs = train(&tiny, &root.path().join(&name), full(computed.clone())).unwrap();
        let model = &outputs["model"];
        assert_eq!(model.description.facts["quantize"]["group_size"], 16);
        let bench = bench_of(&tiny, &model.folder, None, &root.path().join(format!("{name} asked")));
        let (trained, found) = (last_validation_loss(&outputs), loss(&bench, "trained", computed.clone()));
        assert!((trained - found).abs() < bound, "{name}: {trained} in training, {found} after it");
        // The grids matter: the same weights without them are another model.
        let plain = root.path().join(format!("{name} plain"));
        copied(&model.folder, &plain, |name| name != SCALES_FILE);
        let plain = bench_of(&tiny, &plain, None, &root.path().join(format!("{name} plain asked")));
        assert!((loss(&plain, "trained", computed) - found).abs() > 1e-4, "{name}");
    }
}

#[test]
fn weights_are_stored_on_their_grids_and_their_scales_beside_them() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    let skipping = json!({"quantize": {
        "aware": "int8_dynamic_activations_int4_weights", "group_size": 16, "skip_modules": ["o_proj"],
    }});
    let outputs = train(&tiny, &root.path().join("train"), full(skipping)).unwrap();
    let folder = &outputs["model"].folder;
    let (weights, scales) =
        (Checkpoint::open(folder).unwrap(), Checkpoint::open_file(&folder.join(SCALES_FILE)).unwrap());
    let mut compared = 0;
    for (name, info) in scales.tensors() {
        assert!(!name.contains("o_proj") && !name.contains("embed") && info.dtype == Dtype::F32, "{name}");
        let (values, scales) = (weights.tensor_f32(name).unwrap(), scales.tensor_f32(name).unwrap());
        assert_eq!(scales.len() * 16, values.len(), "{name}");
        for (group, scale) in values.chunks(16).zip(&scales) {
            for value in group {
                let number = (value / scale).round();
                assert!((-8.0..=7.0).contains(&number), "{name}: {number}");
                assert!((value - number * scale).abs() <= 0.004 * value.abs(), "{name}: {value} of {scale}");
                compared += 1;
            }
        }
    }
    assert!(compared > 10_000, "{compared}");
    assert_eq!(scales.names().count(), weights.names().filter(|name| name.contains("_proj")).count() * 6 / 7);
}

#[test]
fn steps_before_are_ordinary_ones() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    let with =
        |after: u64| json!({"aware": "int8_dynamic_activations_int4_weights", "group_size": 16, "after_steps": after});
    let ordinary = train(&tiny, &root.path().join("ordinary"), full(json!({"quantize": null}))).unwrap();
    let after = train(&tiny, &root.path().join("after"), full(json!({"quantize": with(3)}))).unwrap();
    let at_once = train(&tiny, &root.path().join("at once"), full(json!({}))).unwrap();
    let losses = |outputs: &BTreeMap<String, Artifact>| -> Vec<f64> {
        training::steps(outputs).iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    let [ordinary, after, at_once] = [&ordinary, &after, &at_once].map(losses);
    assert_eq!(ordinary[..3], after[..3]);
    assert_ne!(ordinary[3], after[3]);
    assert_ne!(ordinary[0], at_once[0]);
    assert!(at_once.last().unwrap() < &at_once[0], "{at_once:?}");
}

#[test]
fn a_run_goes_on_to_the_bit() {
    let tiny = Tiny::new();
    for method in ["full", "lora"] {
        let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut quantize = aware();
        if method == "full" {
            quantize["after_steps"] = 1.into();
        }
        let run = |max_steps: u64| json!({"method": method, "quantize": quantize, "epochs": 9, "max_steps": max_steps, "scheduler": {"name": "constant"}});
        let output = if method == "full" { "model" } else { "adapter" };
        let files = |outputs: &BTreeMap<String, Artifact>| -> BTreeMap<String, Vec<u8>> {
            let entries = fs::read_dir(&outputs[output].folder).unwrap().map(Result::unwrap);
            let files = entries.filter(|entry| entry.path().is_file());
            files.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
        };
        let whole = training::train(&training::bench(&tiny, whole.path(), rows(), None), run(5)).unwrap();
        for steps in [2, 3] {
            let bench = training::bench(&tiny, &cut.path().join(steps.to_string()), rows(), None);
            training::train(&bench, run(steps)).unwrap();
            let resumed = training::train(&bench, run(5)).unwrap();
            assert_eq!(training::steps(&resumed), training::steps(&whole), "{method} from {steps}");
            assert!(files(&resumed) == files(&whole), "{method} from {steps}");
        }
    }
}

#[test]
fn an_adapter_is_trained_on_the_grids_and_used_on_them() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    for dtype in ["f32", "bf16"] {
        let more = json!({
            "quantize": aware(), "epochs": 3, "validation": "held_out", "eval_steps": 2, "dtype": dtype,
            "lora": {"target_modules": "all-linear"},
        });
        let outputs = train(&tiny, &root.path().join(dtype), more).unwrap();
        let adapter = &outputs["adapter"];
        assert_eq!(adapter.description.facts["quantize"]["group_size"], 16);
        let folder = root.path().join(format!("{dtype} asked"));
        let bench = bench_of(&tiny, &tiny.model.folder, Some(adapter), &folder);
        let asked = json!({"adapter": "trained", "dtype": dtype});
        let (trained, found) = (last_validation_loss(&outputs), loss(&bench, "base", asked));
        assert!((trained - found).abs() < 1e-4, "{dtype}: {trained} in training, {found} after it");
        let stored = loss(&bench, "base", json!({"adapter": "trained", "dtype": dtype, "quantize": "none"}));
        assert!((stored - found).abs() > 1e-4, "{dtype}");
        // Merged as torchtune does it: the weights as they are stored, which are quantised later.
        let merge = |into: Value| bench.run::<Merge>(json!({"model": "base", "adapter": "trained", "into": into}));
        assert!(merge(json!("original")).unwrap().contains_key("model"));
        for into in [json!("dequantized"), Value::Null] {
            let error = merge(into).unwrap_err();
            assert!(error.message.starts_with("the adapter was trained for 4-bit weights"), "{error:?}");
        }
    }
}

#[test]
fn what_does_not_go_with_it_is_refused() {
    let tiny = Tiny::new();
    let facts = InputFacts::from([("base.model".to_owned(), tiny.model.description.facts.clone())]);
    let problems = |more: Value| training::problems(training::with(more), &facts);
    let with = |key: &str, value: Value| {
        let mut quantize = aware();
        quantize[key] = value;
        quantize
    };
    assert!(problems(json!({"quantize": aware()})).is_empty());
    assert!(problems(json!({"quantize": aware(), "method": "full"})).is_empty());
    let found = problems(json!({"method": "full", "quantize": with("group_size", 32.into())}));
    let said = "`quantize.group_size` is 32, which does not divide the 48 inputs of `model.layers.0.mlp.down_proj.weight` and of 1 more";
    assert_eq!(found, [said]);
    assert!(
        problems(json!({"method": "full", "quantize": {
            "aware": "int8_dynamic_activations_int4_weights", "group_size": 32, "skip_modules": ["down_proj"],
        }}))
        .is_empty()
    );
    let found = problems(json!({"quantize": with("after_steps", 2.into())}));
    assert!(found[0].starts_with("`quantize.after_steps` is for `method: full`"), "{found:?}");
    let found = problems(json!({"quantize": aware(), "lora": {"use_dora": true}}));
    assert_eq!(found, ["`quantize: { aware }` is not computed with DoRA"]);
    let found = problems(json!({"quantize": aware(), "method": "full", "backend": "torch"}));
    assert_eq!(found, ["`quantize` needs `backend: native`, and the stage has `backend: torch`"]);
    assert_eq!(problems(json!({"quantize": with("base", "nf4".into())})).len(), 1);
    assert_eq!(problems(json!({"quantize": with("aware", "int3".into())})).len(), 1);

    let root = tempfile::tempdir().unwrap();
    let late = full(json!({"quantize": with("after_steps", 6.into())}));
    let error = train(&tiny, &root.path().join("late"), late).unwrap_err();
    assert_eq!(error.message, "`quantize.after_steps` is 6, and there are 6 steps in all");

    // On what was trained so: not merged into, and not for the torch worker.
    let outputs = train(&tiny, &root.path().join("train"), full(json!({}))).unwrap();
    let adapter = train(&tiny, &root.path().join("adapter"), json!({})).unwrap().remove("adapter").unwrap();
    let bench = bench_of(&tiny, &outputs["model"].folder, Some(&adapter), &root.path().join("asked"));
    let error = bench.run::<Merge>(json!({"model": "trained", "adapter": "trained"})).unwrap_err();
    assert!(error.message.starts_with("the model was trained for 4-bit weights"), "{error:?}");
    let error = bench.run::<AddTokens>(json!({"model": "trained", "added_tokens": ["<x>"]})).unwrap_err();
    assert!(error.message.starts_with("the model was trained for 4-bit weights"), "{error:?}");
    let torch = json!({"model": "trained", "data": "rows", "metrics": ["perplexity"], "backend": "torch"});
    let error = bench.run::<Evaluate>(torch.clone()).unwrap_err();
    let said = "a model that was trained for 4-bit weights needs `backend: native`, and the stage has `backend: torch`";
    assert_eq!((error.message.as_str(), error.cause), (said, Cause::BadParameters));
    let known = InputFacts::from([("trained.model".to_owned(), outputs["model"].description.facts.clone())]);
    let mut reader = Reader::default();
    let bound = stages::registry().get("evaluate").unwrap().read(&Node::from_json(&torch), &mut reader).unwrap();
    let found = bound.check(&known, Span::default());
    assert!(found.iter().any(|problem| problem.message.contains("trained for 4-bit weights")), "{found:?}");
}
