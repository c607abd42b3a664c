//! The stage kind `add_tokens`: what its tokenizer makes of texts, what its model computes, and what is refused.

use std::error::Error as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use engine::context::Artifact;
use engine::error::{Cause, StageError};
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use model::batch::Batch;
use model::checkpoint::Checkpoint;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::gguf::GgufFile;
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::Adapter;
use serde_json::{Value, json};
use stages::data::tokenizer::Tokenizer;
use stages::kinds::add_tokens::AddTokens;
use stages::kinds::generate::Generate;
use stages::kinds::gguf::Gguf;
use stages::kinds::merge::Merge;
use stages::kinds::new_model::NewModel;
use stages::kinds::train::Train;
use test_harness::{Requirement, test};

use crate::tiny::{self, Tiny};
use crate::training::{learned, rows, with, write_tokens};

/// The model and the tokenizer with further tokens.
fn added(tiny: &Tiny, more: Value) -> Result<[Artifact; 2], StageError> {
    let root = tempfile::tempdir().unwrap().keep();
    let mut parameters = json!({"model": "base"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut outputs = tiny.bench_in(&root).run::<AddTokens>(parameters)?;
    Ok(["model", "tokenizer"].map(|name| outputs.remove(name).unwrap()))
}

fn tokens() -> Value {
    json!({"added_tokens": ["<think>", "</think>"], "added_special_tokens": ["<|call|>"]})
}

#[test]
fn each_text_is_one_token_and_other_texts_are_what_they_were() {
    let tiny = Tiny::new();
    let before = tiny.open_tokenizer();
    let [model, tokenizer] = added(&tiny, tokens()).unwrap();
    for folder in [&model.folder, &tokenizer.folder] {
        let after = Tokenizer::from_folder(folder).unwrap();
        let first = before.vocab_size() as u32;
        assert_eq!(after.vocab_size() as u32, first + 3);
        let ids: Vec<u32> = ["<think>", "</think>", "<|call|>"].map(|text| after.token_id(text).unwrap()).to_vec();
        assert_eq!(ids, [first, first + 1, first + 2]);
        let encoded = after.encode("<think>Why?</think>I am<|call|>").unwrap();
        let [why, answer] = ["Why?", "I am"].map(|text| before.encode(text).unwrap());
        assert_eq!(encoded, [vec![ids[0]], why, vec![ids[1]], answer, vec![ids[2]]].concat());
        assert_eq!(after.decode(&encoded).unwrap(), "<think>Why?</think>I am", "special tokens are left out");
        assert!(after.is_special(ids[2]) && !after.is_special(ids[0]));
        for (question, _) in tiny::PAIRS {
            assert_eq!(after.encode(question).unwrap(), before.encode(question).unwrap());
        }
    }
    let size = before.vocab_size();
    assert_eq!(model.description.facts["added_tokens"], json!([size, size + 1, size + 2]));
    assert_eq!(model.description.facts["vocab_size"], json!(size + 3));
    assert_eq!(tokenizer.description.facts["vocab_size"], json!(size + 3));
}

#[test]
fn the_model_computes_what_it_did_and_new_tokens_are_average() {
    let tiny = Tiny::new();
    let [model, _] = added(&tiny, tokens()).unwrap();
    let ids = tiny.open_tokenizer().encode("Who are you? I am a small model.").unwrap();
    let size = tiny.open_tokenizer().vocab_size();
    let logits = |mut decoder: Decoder<Cpu>| decoder.logits(&Batch::text(ids.clone())).unwrap();
    let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
    let before = logits(tiny.decoder());
    let after = logits(Decoder::load(ops, &model.folder, Trainability::Frozen).unwrap());
    for (before, after) in before.chunks(size).zip(after.chunks(size + 3)) {
        let near = |one: f32, other: f32| (one - other).abs() < 1e-4;
        assert!(before.iter().zip(after).all(|(one, other)| near(*one, *other)));
        let mean = before.iter().sum::<f32>() / size as f32;
        assert!(after[size..].iter().all(|logit| near(*logit, mean)), "{:?} {mean}", &after[size..]);
    }
}

#[test]
fn transformers_loads_them() {
    let python = std::env::var_os("PIPELINE_PYTHON").filter(|set| !set.is_empty()).unwrap_or_else(|| "python3".into());
    let can = Command::new(&python).args(["-c", "import torch, transformers"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        println!("not run: no Python with transformers (PIPELINE_PYTHON)");
        Requirement::Torch.may_be_lacking("no Python with transformers (PIPELINE_PYTHON)");
        return;
    }
    let tiny = Tiny::new();
    let [model, _] = added(&tiny, tokens()).unwrap();
    let text = "<think>Why?</think>I am<|call|>";
    let script = "import sys, torch, json\n\
        from transformers import AutoModelForCausalLM, AutoTokenizer\n\
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n\
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n\
        ids = tokenizer(sys.argv[2], add_special_tokens=False)['input_ids']\n\
        assert len(tokenizer) == model.get_input_embeddings().num_embeddings, len(tokenizer)\n\
        logits = model(torch.tensor([ids])).logits[0].flatten().tolist()\n\
        print(json.dumps({'ids': ids, 'logits': logits}))\n";
    let output = Command::new(&python).args(["-c", script]).arg(&model.folder).arg(text).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ids = Tokenizer::from_folder(&model.folder).unwrap().encode(text).unwrap();
    assert_eq!(said["ids"], json!(ids));
    let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
    let mut decoder = Decoder::load(ops, &model.folder, Trainability::Frozen).unwrap();
    let logits = decoder.logits(&Batch::text(ids)).unwrap();
    let theirs: Vec<f64> = serde_json::from_value(said["logits"].clone()).unwrap();
    assert_eq!(theirs.len(), logits.len());
    assert!(theirs.iter().zip(&logits).all(|(theirs, own)| (theirs - f64::from(*own)).abs() < 2e-4));
}

/// A bench with a wider model as `base`, tied or not, and rows in which the new tokens stand.
fn bench(tiny: &Tiny, folder: &Path, tied: bool) -> (TestBench, Artifact, Vec<u32>) {
    let mut parameters = tiny::model_parameters();
    parameters["tie_word_embeddings"] = tied.into();
    let narrow = tiny.bench_in(&folder.join("narrow")).run::<NewModel>(parameters).unwrap().remove("model").unwrap();
    let bench = TestBench::new(&folder.join("wide")).input_of("base.model", &narrow.folder).unwrap();
    let mut parameters = tokens();
    parameters["model"] = "base".into();
    let wide = bench.run::<AddTokens>(parameters).unwrap().remove("model").unwrap();
    let ids: Vec<u32> = serde_json::from_value(wide.description.facts["added_tokens"].clone()).unwrap();
    let told = rows()
        .into_iter()
        .zip((0..3).cycle())
        .map(|(row, at)| learned(row.input_ids.into_iter().flat_map(|id| [id, ids[at]])));
    let table = folder.join("tokens");
    let facts = write_tokens(&table, told.collect());
    let bench = TestBench::new(&folder.join("train")).input_of("base.model", &wide.folder).unwrap();
    (bench.input("tokens.tokens", "tokens", &table, facts).unwrap(), wide, ids)
}

#[test]
fn an_adapter_trains_the_new_rows_alone_and_is_merged_into_a_model_and_a_gguf_file() {
    let tiny = Tiny::new();
    for tied in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let (bench, wide, ids) = bench(&tiny, folder.path(), tied);
        let trained = bench.run::<Train>(with(json!({}))).unwrap().remove("adapter").unwrap();
        let adapter = Adapter::load(&trained.folder).unwrap();
        let tables = if tied { vec!["model.embed_tokens"] } else { vec!["lm_head", "model.embed_tokens"] };
        assert!(adapter.token_rows.keys().eq(&tables));
        let settings: Value =
            serde_json::from_slice(&std::fs::read(trained.folder.join("adapter_config.json")).unwrap()).unwrap();
        let expected = if tied { json!(ids) } else { json!({"embed_tokens": ids, "lm_head": ids}) };
        assert_eq!(settings["trainable_token_indices"], expected);

        let bench = bench.input_of("adapter.adapter", &trained.folder).unwrap();
        let merged = bench.run::<Merge>(json!({"model": "base", "adapter": "adapter"})).unwrap();
        let merged = merged["model"].clone();
        let [before, after] = [&wide, &merged].map(|model| Checkpoint::open(&model.folder).unwrap());
        for table in tables {
            let name = format!("{table}.weight");
            let [before, after] = [&before, &after].map(|files| files.tensor_f32(&name).unwrap());
            let columns = 32;
            let first = ids[0] as usize * columns;
            assert_eq!(before[..first], after[..first], "{name}");
            assert_eq!(after[first..], adapter.token_rows[table].values, "{name}");
            let moved =
                |row: usize| before[first + row * columns..][..columns] != after[first + row * columns..][..columns];
            assert!((0..3).all(moved), "{name}");
        }

        let bench = TestBench::new(&folder.path().join("gguf")).input_of("base.model", &merged.folder).unwrap();
        let made = bench.run::<Gguf>(json!({"model": "base", "type": "f32", "pre_tokenizer": "llama-bpe"})).unwrap();
        let file = GgufFile::open(&made["files"].folder.join("model.gguf")).unwrap();
        let listed = format!("{:?}", file.get("tokenizer.ggml.tokens").unwrap());
        assert!(listed.contains("<think>") && listed.contains("<|call|>"));
        let embedding = file.tensors().iter().find(|tensor| tensor.name == "token_embd.weight").unwrap();
        assert_eq!(file.tensor_f32(embedding).unwrap(), after.tensor_f32("model.embed_tokens.weight").unwrap());

        // Asked not to, it leaves them as they are.
        let none = bench_without_rows(folder.path(), &wide);
        assert!(Adapter::load(&none.folder).unwrap().token_rows.is_empty());
    }
}

/// The adapter of a run that leaves the new rows frozen.
fn bench_without_rows(folder: &Path, wide: &Artifact) -> Artifact {
    let bench = TestBench::new(&folder.join("none")).input_of("base.model", &wide.folder).unwrap();
    let table = folder.join("none rows");
    let facts = write_tokens(&table, rows());
    let bench = bench.input("tokens.tokens", "tokens", &table, facts).unwrap();
    bench.run::<Train>(with(json!({"lora": {"trainable_token_indices": []}}))).unwrap().remove("adapter").unwrap()
}

#[test]
fn all_weights_are_trained_and_an_adapter_with_rows_answers_as_its_merge_does() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let (bench, wide, ids) = bench(&tiny, folder.path(), false);
    let [_, tokenizer] = added(&tiny, tokens()).unwrap();
    let bench = bench.input_of("base.tokenizer", &tokenizer.folder).unwrap();
    let full = bench.run::<Train>(with(json!({"method": "full"}))).unwrap();
    let [before, after] = [&wide, &full["model"]].map(|model| Checkpoint::open(&model.folder).unwrap());
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let [before, after] = [&before, &after].map(|files| files.tensor_f32(name).unwrap());
        let columns = 32;
        assert_eq!(before.len(), after.len());
        let moved = |id: u32| before[id as usize * columns..][..columns] != after[id as usize * columns..][..columns];
        assert!(ids.iter().copied().all(moved), "{name}");
    }

    // Another run than that which is saved there.
    std::fs::remove_dir_all(bench.working::<Train>()).unwrap();
    let trained = bench.run::<Train>(with(json!({}))).unwrap().remove("adapter").unwrap();
    let bench = bench.input_of("trained.adapter", &trained.folder).unwrap();
    let merged = bench.run::<Merge>(json!({"model": "base", "adapter": "trained"})).unwrap();
    let bench = bench.input_of("merged.model", &merged["model"].folder).unwrap();
    let bench = bench.input_of("merged.tokenizer", &tokenizer.folder).unwrap();
    let asked = |model: &str, more: Value| {
        let mut parameters = json!({"model": model, "prompts": ["a <think> b", "<|call|>"], "max_new_tokens": 8});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let output = bench.run::<Generate>(parameters).unwrap().remove("samples").unwrap();
        tiny::texts(&output.folder.join("samples.parquet"), "completion")
    };
    assert_eq!(asked("base", json!({"adapter": "trained"})), asked("merged", json!({})));
}

#[test]
fn peft_computes_what_the_adapter_does() {
    let python = std::env::var_os("PIPELINE_PYTHON").filter(|set| !set.is_empty()).unwrap_or_else(|| "python3".into());
    let can = Command::new(&python).args(["-c", "import torch, transformers, peft"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        println!("not run: no Python with transformers and peft (PIPELINE_PYTHON)");
        Requirement::Torch.may_be_lacking("no Python with transformers and peft (PIPELINE_PYTHON)");
        return;
    }
    let tiny = Tiny::new();
    for tied in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let (bench, wide, new) = bench(&tiny, folder.path(), tied);
        let trained = bench.run::<Train>(with(json!({}))).unwrap().remove("adapter").unwrap();
        let ids = vec![5, new[0], 17, 40, new[2], 9, new[1], 11];
        let script = "import sys, torch, json\n\
            from transformers import AutoModelForCausalLM\n\
            from peft import PeftModel\n\
            model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n\
            model = PeftModel.from_pretrained(model, sys.argv[2])\n\
            print(json.dumps(model(torch.tensor([json.loads(sys.argv[3])])).logits[0].flatten().tolist()))\n";
        let mut command = Command::new(&python);
        command.args(["-c", script]).arg(&wide.folder).arg(&trained.folder).arg(json!(ids).to_string());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let theirs: Vec<f64> = serde_json::from_slice(&output.stdout).unwrap();
        let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
        let mut decoder = Decoder::load(ops, &wide.folder, Trainability::Frozen).unwrap();
        decoder.attach(&Adapter::load(&trained.folder).unwrap()).unwrap();
        let own = decoder.logits(&Batch::text(ids)).unwrap();
        assert_eq!(theirs.len(), own.len());
        let worst = theirs.iter().zip(&own).map(|(theirs, own)| (theirs - f64::from(*own)).abs()).fold(0.0, f64::max);
        assert!(worst < 2e-4, "tied {tied}: {worst}");
    }
}

#[test]
fn what_cannot_be_added_is_named() {
    let tiny = Tiny::new();
    let error = added(&tiny, json!({"added_tokens": ["<new>", "a"]})).unwrap_err();
    assert_eq!(error.cause, Cause::BadParameters);
    let source = error.source().unwrap().to_string();
    assert!(source.starts_with("`a` is in the vocabulary already"), "{source}");

    let problems = |with: Value| {
        let mut parameters = json!({"model": "base"});
        parameters.as_object_mut().unwrap().extend(with.as_object().unwrap().clone());
        let mut reader = Reader::default();
        let bound = stages::registry().get("add_tokens").unwrap().read(&Node::from_json(&parameters), &mut reader);
        let found = bound.map_or_else(Vec::new, |bound| bound.check(&InputFacts::default(), Span::default()));
        reader.problems.into_iter().chain(found).map(|problem| problem.message).collect::<Vec<_>>()
    };
    assert_eq!(problems(tokens()), Vec::<String>::new());
    assert_eq!(problems(json!({})), ["`added_tokens` and `added_special_tokens` are both empty"]);
    let twice = json!({"added_tokens": ["<a>"], "added_special_tokens": ["<a>", " "]});
    let expected = ["`<a>` is added twice", "`added_special_tokens` has a token without text"];
    assert_eq!(problems(twice), expected);
}
