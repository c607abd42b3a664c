//! Training gives the same numbers however it is cut up, stops at numbers that are none, and goes on from an adapter.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use engine::context::Artifact;
use engine::error::{Cause, StageError};
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use model::batch::Batch;
use model::checkpoint::{Checkpoint, CheckpointWriter, TensorSpec};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft;
use model::weights::{BaseFormat, Nf4, Nf4Matrix, QuantizedBase};
use serde_json::{Value, json};
use stages::data::artifact::{TokenRow, TokensWriter};
use stages::kinds::train::Train;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{self, adapter, bench, facts, learned, merged, problems, rows, steps, train, with};

fn tensors(outputs: &BTreeMap<String, Artifact>) -> BTreeMap<String, Vec<f32>> {
    let adapter = peft::Adapter::load(&outputs["adapter"].folder).unwrap();
    adapter.tensors().into_iter().map(|(name, _, values)| (name, values.to_vec())).collect()
}

fn figure(outputs: &BTreeMap<String, Artifact>, name: &str) -> Vec<f64> {
    steps(outputs).iter().map(|step| step[name].as_f64().unwrap()).collect()
}

/// Rows of some length: AdamW divides a gradient by its own size, so that an element of almost none is all rounding.
fn long_rows() -> Vec<TokenRow> {
    (0..19).map(|row| learned((0..31 + row % 7).map(|at| 3 + (7 * row + 5 * at + at * at % 11) % 200))).collect()
}

/// Losses to 1e-6 relative, tensors to 1e-5 of their largest value.
fn assert_same_numbers(one: &BTreeMap<String, Artifact>, other: &BTreeMap<String, Artifact>) {
    for (one, other) in figure(one, "loss").into_iter().zip(figure(other, "loss")) {
        assert!((one - other).abs() <= 1e-6 * one.abs(), "{one} and {other}");
    }
    let (one, other) = (tensors(one), tensors(other));
    assert!(one.keys().eq(other.keys()));
    for (name, values) in &one {
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        for (value, other) in values.iter().zip(&other[name]) {
            assert!((value - other).abs() <= 1e-5 * largest, "{name}: {value} and {other} of {largest}");
        }
    }
}

#[test]
fn how_a_step_is_split_changes_nothing_with_dropout_too() {
    let tiny = Tiny::new();
    let lora = |dropout: f64| json!({"target_modules": "all-linear", "dropout": dropout});
    let run = |dropout: f64, micro: usize, accumulated: usize| {
        let folder = tempfile::tempdir().unwrap();
        let split = json!({"micro_batch_size": micro, "gradient_accumulation_steps": accumulated});
        let more = merged(
            split,
            json!({"optimizer": {"learning_rate": 1e-3}, "epochs": 4, "lora": lora(dropout), "clip_grad_norm": 0.5}),
        );
        let outputs = train(&bench(&tiny, folder.path(), long_rows(), None), more).unwrap();
        (folder, outputs)
    };
    for dropout in [0.0, 0.3] {
        let (_kept, whole) = run(dropout, 8, 1);
        for (micro, accumulated) in [(1, 8), (2, 4), (4, 2)] {
            let (_kept, split) = run(dropout, micro, accumulated);
            assert_same_numbers(&whole, &split);
        }
    }
    let ((_kept, without), (_kept_too, with)) = (run(0.0, 8, 1), run(0.3, 8, 1));
    // B begins with zeros, so that the very first loss is that of the base alone.
    let (without, with) = (figure(&without, "loss"), figure(&with, "loss"));
    assert!(without[0] == with[0] && without[1] != with[1], "{without:?} {with:?}");
}

/// The documents of rows as packs of several each.
fn packed(folder: &Path, rows: &[TokenRow]) -> engine::artifact::Facts {
    fs::create_dir_all(folder).unwrap();
    let mut writer = TokensWriter::packs(folder, facts());
    for rows in rows.chunks(3) {
        let mut pack = TokenRow::default();
        for row in rows {
            pack.input_ids.extend(&row.input_ids);
            pack.labels.extend(&row.labels);
            pack.document_lengths.push(row.input_ids.len());
        }
        pack.input_ids.resize(128, 0);
        pack.labels.resize(128, stages::data::artifact::IGNORE_INDEX);
        writer.write(pack).unwrap();
    }
    writer.finish(|_| ()).unwrap().0.to_facts()
}

/// A bench of the long rows in packs.
fn bench_of_packs(tiny: &Tiny, folder: &Path) -> TestBench {
    let packs = folder.join("packs");
    let facts = packed(&packs, &long_rows());
    let bench = TestBench::new(&folder.join("one")).input_of("base.model", &tiny.model.folder).unwrap();
    bench.input("tokens.packs", "packs", &packs, facts).unwrap()
}

#[test]
fn packed_documents_are_trained_on_as_unpacked_ones() {
    let tiny = Tiny::new();
    let root = tempfile::tempdir().unwrap();
    let with_packs = bench_of_packs(&tiny, root.path());
    // One step takes all rows, so that both train on the same documents in each.
    let all = json!({
        "micro_batch_size": 2, "gradient_accumulation_steps": 50, "epochs": 6,
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    });
    let packed = train(&with_packs, all.clone()).unwrap();
    let unpacked = train(&bench(&tiny, &root.path().join("other"), long_rows(), None), all).unwrap();
    assert_eq!(figure(&packed, "target_tokens"), figure(&unpacked, "target_tokens"));
    assert_eq!(figure(&packed, "tokens"), figure(&unpacked, "tokens"));
    assert_same_numbers(&packed, &unpacked);
}

/// NEFTune draws by a document's tokens, so that its noise is not that of the pack.
#[test]
fn noise_and_a_learning_rate_of_b_act_alike_on_packs_and_rows() {
    let tiny = Tiny::new();
    let root = tempfile::tempdir().unwrap();
    let with_packs = bench_of_packs(&tiny, root.path());
    let all = |more: Value| {
        let sgd = json!({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9});
        merged(json!({"micro_batch_size": 2, "gradient_accumulation_steps": 50, "epochs": 4, "optimizer": sgd}), more)
    };
    let tricks = all(json!({"neftune_noise_alpha": 5, "lora": {"learning_rate_ratio": 4}}));
    let of_rows =
        |name: &str, more: Value| train(&bench(&tiny, &root.path().join(name), long_rows(), None), more).unwrap();
    let unpacked = of_rows("both", tricks.clone());
    assert_same_numbers(&train(&with_packs, tricks).unwrap(), &unpacked);
    let losses = |outputs: &BTreeMap<String, Artifact>| figure(outputs, "loss");
    let plain = losses(&of_rows("plain", all(json!({}))));
    let noisy = losses(&of_rows("noisy", all(json!({"neftune_noise_alpha": 5}))));
    let faster = losses(&of_rows("faster", all(json!({"lora": {"learning_rate_ratio": 4}}))));
    // The noise acts from the first step on, another learning rate from the second.
    assert!(noisy[0] != plain[0] && faster[0] == plain[0] && faster[1] < plain[1], "{plain:?} {noisy:?} {faster:?}");
    assert!(losses(&unpacked)[0] == noisy[0]);
}

#[test]
fn a_document_has_the_same_loss_in_a_pack_as_alone() {
    let tiny = Tiny::new();
    let ops = std::sync::Arc::new(Cpu::new(1, Compute::F32).unwrap());
    let mut decoder = Decoder::load(ops, &tiny.model.folder, Trainability::Frozen).unwrap();
    let rows: Vec<TokenRow> = rows();
    let mut pack = Batch::default();
    for (number, row) in rows.iter().enumerate() {
        pack.push_row(number as u64, &row.input_ids, &row.labels, &[row.input_ids.len()]);
    }
    let mut scores = decoder.score(&pack).unwrap().into_iter();
    for row in &rows {
        let alone = decoder.score(&Batch::document(row.input_ids.clone(), row.labels.clone())).unwrap();
        let alone: f64 = alone.iter().map(|score| f64::from(score.nll)).sum();
        let in_pack: f64 = scores.by_ref().take(row.target_tokens()).map(|score| f64::from(score.nll)).sum();
        assert!((alone - in_pack).abs() <= 1e-5 * alone, "{alone} {in_pack}");
    }
    assert!(scores.next().is_none());
}

#[test]
fn recomputing_layers_changes_no_bit() {
    let tiny = Tiny::new();
    let run = |recompute: bool| {
        let folder = tempfile::tempdir().unwrap();
        let more = json!({"epochs": 3, "activation_checkpointing": recompute, "lora": {"dropout": 0.2}});
        adapter(&train(&bench(&tiny, folder.path(), rows(), None), more).unwrap())
    };
    assert_eq!(run(false), run(true));
}

#[test]
fn bf16_learns_as_f32_does_and_goes_on_to_the_bit() {
    let tiny = Tiny::new();
    let run = |dtype: &str, epochs: u64| json!({"dtype": dtype, "epochs": epochs, "scheduler": {"name": "constant"}, "optimizer": {"learning_rate": 1e-3}});
    let at_once = |dtype: &str, folder: &Path| train(&bench(&tiny, folder, long_rows(), None), run(dtype, 4)).unwrap();
    let root = tempfile::tempdir().unwrap();
    let (f32s, bf16s) = (at_once("f32", &root.path().join("f32")), at_once("bf16", &root.path().join("bf16")));
    let (exact, rounded) = (figure(&f32s, "loss"), figure(&bf16s, "loss"));
    assert_ne!(exact, rounded);
    for (exact, rounded) in exact.iter().zip(&rounded) {
        assert!((exact - rounded).abs() <= 1e-2 * exact, "{exact} {rounded}");
    }
    let used = bench(&tiny, &root.path().join("used"), long_rows(), None);
    train(&used, run("bf16", 2)).unwrap();
    assert_eq!(adapter(&train(&used, run("bf16", 4)).unwrap()), adapter(&bf16s));
}

#[test]
fn a_longer_run_goes_on_with_every_optimizer() {
    let tiny = Tiny::new();
    for optimizer in [
        json!({"name": "sgd", "learning_rate": 0.5}),
        json!({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "nesterov": true}),
        json!({"name": "sgd", "learning_rate": 0.1, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.1}),
        json!({"name": "adamw", "learning_rate": 1e-2}),
        json!({"name": "adamw", "learning_rate": 1e-2, "state_dtype": "bf16"}),
        json!({"name": "adamw_8bit", "learning_rate": 1e-2}),
        json!({"name": "lion", "learning_rate": 2e-3, "weight_decay": 0.1}),
        json!({"name": "muon", "learning_rate": 2e-2}),
        json!({"name": "muon", "learning_rate": 2e-2, "adjust_lr": "match_rms_adamw", "nesterov": false}),
    ] {
        let run =
            |epochs: u64| json!({"optimizer": optimizer, "epochs": epochs, "scheduler": {"name": "inverse_sqrt"}});
        let (used, fresh) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let used = bench(&tiny, used.path(), rows(), None);
        train(&used, run(2)).unwrap();
        let continued = train(&used, run(5)).unwrap();
        let at_once = train(&bench(&tiny, fresh.path(), rows(), None), run(5)).unwrap();
        assert_eq!(adapter(&continued), adapter(&at_once), "{optimizer}");
        let losses = figure(&at_once, "loss");
        assert!(losses[12..].iter().sum::<f64>() < losses[..3].iter().sum::<f64>(), "{optimizer}: {losses:?}");
    }
}

/// An error with its sources.
fn said(error: &StageError) -> String {
    let mut said = error.to_string();
    let mut next: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(source) = next {
        said += &format!(": {source}");
        next = source.source();
    }
    said
}

#[test]
fn a_loss_that_is_no_number_stops_training_with_the_step_the_rows_and_the_largest_gradient() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let bench = bench(&tiny, folder.path(), rows(), None);
    let more = json!({
        "epochs": 9, "shuffle": false, "optimizer": {"name": "sgd", "learning_rate": 1e60}, "scheduler": {"name": "constant"},
    });
    let error = train(&bench, more).unwrap_err();
    assert_eq!(error.cause, Cause::Numeric);
    let (said, help) = (said(&error), error.help.clone().unwrap());
    assert!(said.contains("in step 2") || said.contains("in step 3"), "{said}");
    assert!(said.contains("the largest gradient before it was that of `base_model."), "{said}");
    assert!(help.contains("its rows of the data: 4") || help.contains("its rows of the data: 8"), "{help}");
    // The steps before it are still there to be looked at.
    assert!(bench.working::<Train>().join("step-1/trainable.safetensors").exists());
}

#[test]
fn an_adapter_can_be_gone_on_from() {
    let tiny = Tiny::new();
    let root = tempfile::tempdir().unwrap();
    let lora = json!({"rank": 4, "target_modules": ["q_proj", "down_proj"]});
    let first =
        train(&bench(&tiny, &root.path().join("first"), rows(), None), json!({"epochs": 6, "lora": lora})).unwrap();
    let warm = |name: &str, more: Value| {
        let bench = bench(&tiny, &root.path().join(name), rows(), None);
        let bench = bench.input_of("first.adapter", &first["adapter"].folder).unwrap();
        train(&bench, merged(json!({"adapter": "first"}), more))
    };
    let second = warm("second", json!({})).unwrap();
    let (before, after) = (figure(&first, "loss"), figure(&second, "loss"));
    assert!(after[0] < before[0] && after[0] < before[3], "{before:?} {after:?}");
    let config = peft::Adapter::load(&second["adapter"].folder).unwrap().config;
    assert_eq!((config.rank, config.dropout), (4, 0.0));
    let agreeing =
        warm("agreeing", json!({"lora": {"rank": 4, "dropout": 0.1, "target_modules": ["down_proj", "q_proj"]}}))
            .unwrap();
    assert_eq!(peft::Adapter::load(&agreeing["adapter"].folder).unwrap().config.dropout, 0.1);
    let error = warm("contradicting", json!({"lora": {"rank": 8}})).unwrap_err();
    assert_eq!(error.message, "`lora.rank` is 8, and the adapter of the warm start has 4");

    // Another model of the same shape would take it without a word.
    let base = &tiny.model.description.facts;
    let mut other = first["adapter"].description.facts.clone();
    other.insert("weights".to_owned(), "other".into());
    let facts = InputFacts::from([("base.model".to_owned(), base.clone()), ("first.adapter".to_owned(), other)]);
    let found = problems(with(json!({"adapter": "first"})), &facts);
    assert_eq!(found, ["the adapter `first` was trained on another model than `base`"]);
}

#[test]
fn an_adapter_names_its_base_and_its_modules_as_peft_does() {
    let tiny = Tiny::new();
    let root = tempfile::tempdir().unwrap();
    let trained = |name: &str, found_at: Value| {
        let folder = root.path().join(name);
        let mut base = tiny.model.description.facts.clone();
        base.extend(found_at.as_object().unwrap().clone());
        let (tokens, files) = (folder.join("rows of tokens"), folder.join("files of the model"));
        let facts = training::write_tokens(&tokens, rows());
        fs::create_dir_all(&files).unwrap();
        for file in fs::read_dir(&tiny.model.folder).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), files.join(file.file_name())).unwrap();
        }
        let bench = TestBench::new(&folder).input("base.model", "model", &files, base).unwrap();
        let bench = bench.input("tokens.tokens", "tokens", &tokens, facts).unwrap();
        train(&bench, json!({"lora": {"rank": 4, "target_modules": "all-linear"}})).unwrap()["adapter"].clone()
    };
    let config = |adapter: &Artifact| -> Value {
        serde_json::from_slice(&fs::read(adapter.folder.join("adapter_config.json")).unwrap()).unwrap()
    };
    let card = |adapter: &Artifact| fs::read_to_string(adapter.folder.join("README.md")).unwrap();
    let of_hub = trained("hub", json!({"repo": "modelscope:owner/name", "revision": "0123"}));
    let found = config(&of_hub);
    assert_eq!((&found["base_model_name_or_path"], &found["revision"]), (&json!("owner/name"), &json!("0123")));
    let linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    assert_eq!(found["target_modules"], json!(linear));
    assert!(card(&of_hub).contains("\nbase_model: \"owner/name\"\n"), "{}", card(&of_hub));
    let of_folder = trained("folder", json!({"folder": "./base"}));
    let found = config(&of_folder);
    assert_eq!((&found["base_model_name_or_path"], &found["revision"]), (&json!("./base"), &Value::Null));
    let of_stage = trained("stage", json!({}));
    assert_eq!(config(&of_stage)["base_model_name_or_path"], Value::Null);
    // A copy of the base by another name gives the same adapter.
    assert_eq!(of_hub.description.identity, of_folder.description.identity);
    assert_eq!(of_hub.description.identity, of_stage.description.identity);
}

#[test]
fn targets_are_checked_as_soon_as_the_model_is_known() {
    let tiny = Tiny::new();
    let facts = InputFacts::from([("base.model".to_owned(), tiny.model.description.facts.clone())]);
    let found = problems(with(json!({"lora": {"target_modules": ["q_prj"]}})), &facts);
    assert!(found.len() == 1 && found[0].contains("did you mean `q_proj`?"), "{found:?}");
    let folder = tempfile::tempdir().unwrap();
    let words = json!({"lora": {"lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": true}});
    let outputs = train(&bench(&tiny, folder.path(), rows(), None), words).unwrap();
    let modules: Vec<String> = peft::Adapter::load(&outputs["adapter"].folder).unwrap().modules.into_keys().collect();
    assert_eq!(modules.len(), 2 * 5, "{modules:?}");
}

#[test]
fn rows_without_a_place_in_a_step_are_counted() {
    let tiny = Tiny::new();
    for (more, left_out, last_step) in [
        (json!({}), 0, 3),
        (json!({"leftover": "drop"}), 3, 4),
        (json!({"max_steps_per_epoch": 2}), 3, 4),
        (json!({"max_steps_per_epoch": 1}), 7, 4),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let outputs = train(&bench(&tiny, folder.path(), rows(), None), more).unwrap();
        let facts = &outputs["metrics"].description.facts;
        assert_eq!((&facts["leftover_rows"], &facts["rows_left_out"]), (&json!(3), &json!(left_out)));
        assert_eq!(steps(&outputs).last().unwrap()["rows"], last_step);
    }
}

#[test]
fn curves_lie_in_the_run_and_not_in_the_result() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let bench = bench(&tiny, folder.path(), vec![learned([3, 4, 5])], None);
    let outputs = train(&bench, json!({"epochs": 2})).unwrap();
    let files: Vec<_> = fs::read_dir(bench.run_folder::<Train>().join("tensorboard")).unwrap().collect();
    assert_eq!(files.len(), 1);
    let mut names: Vec<String> = fs::read_dir(&outputs["metrics"].folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["metrics.json", "metrics.jsonl"]);
    let record = &steps(&outputs)[0];
    let keys: Vec<&str> = record.as_object().unwrap().keys().map(String::as_str).collect();
    let documented = [
        "kind",
        "step",
        "epoch",
        "loss",
        "learning_rate",
        "grad_norm",
        "rows",
        "tokens",
        "target_tokens",
        "loss_scale",
        "skipped",
    ];
    assert_eq!(keys, documented);
}

/// Training on a base in NF4 is training on its dequantised weights, to the bit.
#[test]
fn a_quantised_base_is_trained_on_as_its_dequantised_weights_are() {
    let tiny = Tiny::new();
    let root = tempfile::tempdir().unwrap();
    let original = Checkpoint::open(&tiny.model.folder).unwrap();
    let nf4 = Nf4 { block_size: 32, double_quantization: false, ..Nf4::default() };
    let quantize = QuantizedBase {
        format: BaseFormat::FourBits(nf4),
        skip_modules: vec!["lm_head".to_owned(), "layers.1.mlp".to_owned()],
        layers: None,
    };
    let specs = original.tensors().map(|(name, info)| TensorSpec::new(name, info.dtype, &info.shape)).collect();
    let base = root.path().join("dequantised");
    fs::create_dir_all(&base).unwrap();
    let mut writer = CheckpointWriter::create(&base, specs, 1 << 30).unwrap();
    let mut quantised = 0;
    for (name, info) in original.tensors() {
        let mut values = original.tensor_f32(name).unwrap();
        if let (true, &[rows, columns]) = (quantize.covers(name), &info.shape[..]) {
            let source = original.stored_rows(name, &info.shape, 0).unwrap();
            let matrix = Nf4Matrix::quantize(&source, [rows, columns], info.dtype, nf4).unwrap();
            matrix.dequantize(0, &mut values);
            quantised += 1;
        }
        writer.write_f32(name, &values).unwrap();
    }
    assert!(quantised > 7, "{quantised} of two layers, but for one MLP");
    writer.finish().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tiny.model.folder.join(name), base.join(name)).unwrap();
    }
    let of = |folder: &str, base: Option<&Path>| {
        let tokens = root.path().join(folder).join("rows");
        let facts = training::write_tokens(&tokens, rows());
        let bench = TestBench::new(&root.path().join(folder));
        let bench = match base {
            Some(base) => bench.input("base.model", "model", base, engine::artifact::Facts::new()),
            None => bench.input_of("base.model", &tiny.model.folder),
        };
        bench.unwrap().input("tokens.tokens", "tokens", &tokens, facts).unwrap()
    };
    let format = json!({
        "base": "nf4", "block_size": 32, "double_quantization": false, "skip_modules": ["lm_head", "layers.1.mlp"],
    });
    for (dtype, use_dora) in [("f32", false), ("bf16", false), ("f32", true)] {
        let of_dtype = |name: &str| format!("{name} in {dtype}, DoRA {use_dora}");
        let more = json!({"dtype": dtype, "lora": {"target_modules": "all-linear", "use_dora": use_dora}});
        let plain = train(&of(&of_dtype("plain"), None), more.clone()).unwrap();
        let expected = train(&of(&of_dtype("expected"), Some(&base)), more.clone()).unwrap();
        let with = merged(more, json!({"quantize": format}));
        let found = train(&of(&of_dtype("quantised"), None), with).unwrap();
        assert_eq!(adapter(&found), adapter(&expected), "{dtype}");
        assert_eq!(figure(&found, "loss"), figure(&expected, "loss"), "{dtype}");
        assert_ne!(figure(&found, "loss"), figure(&plain, "loss"), "{dtype}");
        assert_eq!(found["adapter"].description.facts.get("quantize"), Some(&format));
        assert_eq!(plain["adapter"].description.facts.get("quantize"), None);
    }
}
