//! The stage kind `train`, without an engine: what it refuses, how it goes on, and what it writes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use model::checkpoint::{Checkpoint, CheckpointWriter, Dtype, TensorSpec};
use serde_json::{Value, json};
use stages::data::artifact::{IGNORE_INDEX, TokenRow};
use stages::kinds::add_tokens::AddTokens;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{adapter, bench, learned, problems, rows, steps, train, with, write_tokens};

#[test]
fn values_that_would_train_nothing_are_refused() {
    let none: [&str; 0] = [];
    assert_eq!(problems(with(json!({})), &InputFacts::new()), none);
    for wrong in [
        json!({"clip_grad_norm": 0}),
        json!({"optimizer": {"learning_rate": 0}}),
        json!({"optimizer": {"learning_rate": 1e-60}}),
        json!({"optimizer": {"eps": 0}}),
        json!({"optimizer": {"betas": [0.9]}}),
        json!({"optimizer": {"betas": [0.9, 1.0]}}),
        json!({"lora": {"alpha": 0}}),
        json!({"lora": {"target_modules": none}}),
        json!({"method": "full", "lora": {"rank": 4}}),
        json!({"method": "full", "adapter": "other"}),
        json!({"loss_scale": {"init_scale": 1024}}),
        json!({"scheduler": {"name": "linear", "power": 2}}),
        json!({"scheduler": {"name": "polynomial", "lr_end": 1e-2}}),
        json!({"optimizer": {"name": "sgd", "eps": 1e-8}}),
        json!({"method": "full", "quantize": {"base": "nf4"}}),
        json!({"quantize": {"base": "nf4", "block_size": 96}}),
        json!({"quantize": {"base": "nf4", "block_size": 16}}),
        json!({"quantize": {"base": "nf3"}}),
    ] {
        assert_eq!(problems(with(wrong.clone()), &InputFacts::new()).len(), 1, "{wrong}");
    }
}

#[test]
fn tokens_that_do_not_fit_the_model_are_found_before_the_first_step() {
    let tiny = Tiny::new();
    let model = &tiny.model.description.facts;
    let vocab_size = model["vocab_size"].as_u64().unwrap();
    for (row, says) in [
        (
            learned([3, vocab_size as u32]),
            format!("go up to id {vocab_size} (their tokenizer has 300 ids), and the model has {vocab_size}"),
        ),
        (
            learned((0..129).map(|at| at % 7)),
            "longest document has 129 tokens, and the model has 128 positions".to_owned(),
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let error =
            train(&bench(&tiny, folder.path(), vec![learned([3, 4]), row.clone()], None), json!({})).unwrap_err();
        assert!(error.message.contains(&says) && error.help.is_some(), "{error:?}");
        let tokens = write_tokens(&folder.path().join("again"), vec![row]);
        let inputs = InputFacts::from([("base.model".to_owned(), model.clone()), ("tokens.tokens".to_owned(), tokens)]);
        let found = problems(with(json!({})), &inputs);
        assert!(found.len() == 1 && found[0].contains(&says), "{found:?}");
    }
}

#[test]
fn the_last_rows_of_an_epoch_are_a_step_or_left_out() {
    let tiny = Tiny::new();
    let rows_of = |more: Value| -> Vec<u64> {
        let folder = tempfile::tempdir().unwrap();
        let outputs = train(&bench(&tiny, folder.path(), rows(), None), more).unwrap();
        steps(&outputs).iter().map(|step| step["rows"].as_u64().unwrap()).collect()
    };
    assert_eq!(rows_of(json!({"epochs": 2})), [4, 4, 3, 4, 4, 3]);
    assert_eq!(rows_of(json!({"epochs": 2, "leftover": "drop"})), [4, 4, 4, 4]);
    assert_eq!(rows_of(json!({"epochs": 2, "max_steps": 4})), [4, 4, 3, 4]);
    assert_eq!(rows_of(json!({"gradient_accumulation_steps": 50, "epochs": 2})), [11, 11]);
    let folder = tempfile::tempdir().unwrap();
    let too_few = json!({"gradient_accumulation_steps": 50, "leftover": "drop"});
    let error = train(&bench(&tiny, folder.path(), rows(), None), too_few).unwrap_err();
    assert_eq!(error.message, "11 rows make no optimizer step of 100 rows");
}

#[test]
fn a_shorter_run_after_a_longer_one_is_as_if_there_had_been_none() {
    let tiny = Tiny::new();
    for scheduler in ["constant", "cosine"] {
        let run = |max_steps: u64| json!({"epochs": 9, "max_steps": max_steps, "scheduler": {"name": scheduler}});
        let (used, fresh) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let used = bench(&tiny, used.path(), rows(), None);
        train(&used, run(7)).unwrap();
        let after = train(&used, run(3)).unwrap();
        let alone = train(&bench(&tiny, fresh.path(), rows(), None), run(3)).unwrap();
        assert_eq!(adapter(&after), adapter(&alone), "{scheduler}");
        assert_eq!(steps(&after), steps(&alone), "{scheduler}");
    }
}

#[test]
fn rows_without_a_target_cost_no_step() {
    let tiny = Tiny::new();
    let masked = TokenRow::document(vec![3, 4, 5], vec![IGNORE_INDEX; 3]);
    let nothing = TokenRow::document(Vec::new(), Vec::new());
    let plain = json!({"micro_batch_size": 1, "gradient_accumulation_steps": 1, "shuffle": false});
    let folder = tempfile::tempdir().unwrap();
    let mixed = vec![learned([3, 4, 5, 6]), masked.clone(), nothing.clone(), learned([9, 8, 7])];
    let outputs = train(&bench(&tiny, folder.path(), mixed, None), plain.clone()).unwrap();
    let targets: Vec<u64> = steps(&outputs).iter().map(|step| step["target_tokens"].as_u64().unwrap()).collect();
    assert_eq!(targets, [3, 2]);
    let folder = tempfile::tempdir().unwrap();
    let error = train(&bench(&tiny, folder.path(), vec![masked, nothing], None), plain).unwrap_err();
    assert_eq!(error.message, "no row has a target token: nothing was trained");
}

/// The tiny model as published checkpoints often are: bf16, in shards, its tied head stored once more.
fn published(tiny: &Tiny, folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let original = Checkpoint::open(&tiny.model.folder).unwrap();
    let mut specs: Vec<TensorSpec> =
        original.tensors().map(|(name, info)| TensorSpec::new(name, Dtype::BF16, &info.shape)).collect();
    let embedding = "model.embed_tokens.weight";
    specs.push(TensorSpec::new("lm_head.weight", Dtype::BF16, original.shape(embedding).unwrap()));
    let mut writer = CheckpointWriter::create(folder, specs, 8000).unwrap();
    for name in original.names() {
        writer.write_f32(name, &original.tensor_f32(name).unwrap()).unwrap();
    }
    writer.write_f32("lm_head.weight", &original.tensor_f32(embedding).unwrap()).unwrap();
    assert!(writer.finish().unwrap().len() > 3, "several shards and an index");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::write(folder.join(name), fs::read(tiny.model.folder.join(name)).unwrap()).unwrap();
    }
}

#[test]
fn full_training_writes_a_tied_bf16_base_back_in_its_own_form() {
    let tiny = Tiny::new();
    let root = tempfile::tempdir().unwrap();
    let base = root.path().join("published");
    published(&tiny, &base);
    let tokens = root.path().join("tokens");
    let facts = write_tokens(&tokens, rows());
    let bench = TestBench::new(root.path())
        .input("base.model", "model", &base, Facts::new())
        .unwrap()
        .input("tokens.tokens", "tokens", &tokens, facts)
        .unwrap();
    let outputs = train(&bench, json!({"method": "full", "epochs": 3})).unwrap();
    let (before, after) = (Checkpoint::open(&base).unwrap(), Checkpoint::open(&outputs["model"].folder).unwrap());
    assert!(!after.contains("lm_head.weight"), "a stale copy of the head was carried along");
    assert_eq!(after.names().count() + 1, before.names().count());
    for (name, info) in after.tensors() {
        assert_eq!((info.dtype, &info.shape[..]), (Dtype::BF16, before.shape(name).unwrap()), "{name}");
        assert_ne!(after.bytes(name).unwrap(), before.bytes(name).unwrap(), "{name} was not trained");
    }
    assert!(outputs["model"].folder.join("tokenizer.json").exists());
    // The result is a model to go on from.
    let chained = TestBench::new(&root.path().join("chained"))
        .input_of("base.model", &outputs["model"].folder)
        .unwrap()
        .input("tokens.tokens", "tokens", &tokens, write_tokens(&root.path().join("again"), rows()))
        .unwrap();
    let further = train(&chained, json!({"method": "full", "epochs": 3})).unwrap();
    let loss = |outputs: &BTreeMap<String, Artifact>, step: usize| steps(outputs)[step]["loss"].as_f64().unwrap();
    assert!(loss(&further, 0) < loss(&outputs, 0) && loss(&further, 8) < loss(&further, 0));
}

/// transformers ends generation at the tokens of that file, and does not look at the chat template.
#[test]
fn full_training_ends_generation_where_the_chat_template_of_its_rows_ends_a_turn() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    let added = json!({"model": "base", "added_special_tokens": ["<|im_start|>", "<|im_end|>"]});
    let base = tiny.bench_in(&root.path().join("wide")).run::<AddTokens>(added).unwrap().remove("model").unwrap();
    let end = &base.description.facts["added_tokens"][1];
    let trained = |name: &str, prompt: Value| {
        let tokens = root.path().join("tokens").join(name);
        let mut facts = write_tokens(&tokens, rows());
        facts.insert("prompt".to_owned(), prompt);
        let bench = TestBench::new(&root.path().join(name)).input_of("base.model", &base.folder).unwrap();
        let bench = bench.input("tokens.tokens", "tokens", &tokens, facts).unwrap();
        let model = train(&bench, json!({"method": "full", "epochs": 1})).unwrap().remove("model").unwrap();
        fs::read(model.folder.join("generation_config.json")).ok()
    };
    let written = trained("chat", json!({"chat_template": "chatml"})).unwrap();
    let settings: Value = serde_json::from_slice(&written).unwrap();
    assert_eq!((&settings["bos_token_id"], &settings["eos_token_id"]), (&json!(0), &json!([1, end])));
    assert_eq!(trained("text", Value::Null), None);
}

#[test]
fn both_kernel_sets_learn_the_same() {
    let tiny = Tiny::new();
    let losses = |kernels: &str| -> Vec<f64> {
        let folder = tempfile::tempdir().unwrap();
        let more = json!({"kernels": kernels, "epochs": 4, "clip_grad_norm": 0.5, "lora": {"target_modules": ["q_proj", "down_proj"]}});
        let outputs = train(&bench(&tiny, folder.path(), rows(), None), more).unwrap();
        steps(&outputs).iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    let (ours, candles) = (losses("cpu"), losses("candle"));
    // Each epoch has an order of its own, so whole epochs are compared.
    let epoch = |number: usize| ours[3 * number..][..3].iter().sum::<f64>();
    assert!(ours.len() == 12 && epoch(3) < epoch(0), "{ours:?}");
    for (one, other) in ours.iter().zip(&candles) {
        assert!((one - other).abs() <= 1e-5 * one.abs(), "{ours:?} {candles:?}");
    }
}
