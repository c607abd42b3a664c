//! A GGUF file as a model: brought in by `download`, asked, trained on, merged, and written again.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::error::{Cause, StageError};
use engine::test_bench::TestBench;
use model::batch::Batch;
use model::checkpoint::{Checkpoint, CheckpointWriter, Dtype, Flush, TensorSpec};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::gguf::{GgufFile, TensorType};
use model::ops::Compute;
use model::parameter::Trainability;
use model::resize::{self, ResizeOptions};
use serde_json::{Value, json};
use stages::data::tokenizer::Tokenizer;
use stages::kinds::download::Download;
use stages::kinds::generate::Generate;
use stages::kinds::gguf::Gguf;
use stages::kinds::log_probs::LogProbabilities;
use stages::kinds::merge::Merge;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{self, learned, steps, write_tokens};

fn golden(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf").join(family)
}

/// A bench with a model as `base`: an output of a stage, or any folder.
fn bench_with(root: &Path, model: &Path) -> TestBench {
    let is_output = fs::symlink_metadata(model.join("config.json")).unwrap().is_symlink();
    let bench = TestBench::new(root).threads(2);
    match is_output {
        true => bench.input_of("base.model", model).unwrap(),
        false => bench.input("base.model", "model", model, Facts::new()).unwrap(),
    }
}

fn export(model: &Path, root: &Path, kind: &str) -> PathBuf {
    let bench = bench_with(&root.join(kind), model);
    bench.run::<Gguf>(json!({"model": "base", "type": kind})).unwrap()["files"].folder.join("model.gguf")
}

fn download(file: &Path, root: &Path, more: Value) -> Result<BTreeMap<String, Artifact>, StageError> {
    let mut parameters = json!({"path": format!("./{}", file.file_name().unwrap().to_str().unwrap())});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    TestBench::new(root).file("checkpoint", file).unwrap().run::<Download>(parameters)
}

/// A model with its tensors in f32, as they are read.
fn dequantise(model: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let checkpoint = Checkpoint::open(model).unwrap();
    let specs = checkpoint.tensors().map(|(name, info)| TensorSpec::new(name, Dtype::F32, &info.shape)).collect();
    let mut writer = CheckpointWriter::create(to, specs, 1 << 30).unwrap();
    checkpoint.names().for_each(|name| writer.write_f32(name, &checkpoint.tensor_f32(name).unwrap()).unwrap());
    writer.finish().unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(model.join(name), to.join(name)).unwrap();
    }
}

const TEXTS: [&str; 14] = [
    "Hello world",
    " leading space",
    "trailing space ",
    "two  spaces and\ttabs\n\n\nnew lines \n",
    "It's we'll they'd I'M",
    "1 12 123 1234 12345",
    "naïve café Ünïcödé ﬁ",
    "你是谁? 我是一个小模型。",
    "emoji 👩‍👩‍👧 🇫🇷 ❤️",
    "fn main() { println!(\"{}\", 1 + 2); }",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<s>[INST] a [/INST]</s><bos><start_of_turn>b<end_of_turn>\n",
    "",
];

#[test]
fn the_tokenizer_of_a_file_is_the_one_that_was_written() {
    for family in ["llama31", "qwen3", "mistral", "gemma2", "phi3"] {
        let root = tempfile::tempdir().unwrap();
        let file = export(&golden(family), root.path(), "q8_0");
        let outputs = download(&file, &root.path().join("download"), json!({})).unwrap();
        let (own, back) = (golden(family), &outputs["tokenizer"].folder);
        let (own, back) = (Tokenizer::from_folder(&own).unwrap(), Tokenizer::from_folder(back).unwrap());
        for text in TEXTS {
            let ids = own.encode(text).unwrap();
            assert_eq!(back.encode(text).unwrap(), ids, "{family}: {text:?}");
            assert_eq!(back.decode(&ids).unwrap(), own.decode(&ids).unwrap(), "{family}: {text:?}");
        }
        assert_eq!(back.bos_token_id(), own.bos_token_id(), "{family}");
        assert_eq!(back.eos_token_id(), own.eos_token_id(), "{family}");
        assert_eq!(back.wants_bos(), own.wants_bos(), "{family}");
        assert_eq!(back.stop_token_ids(), own.stop_token_ids(), "{family}");
        assert_eq!(back.chat_templates().is_some(), own.chat_templates().is_some(), "{family}");
        let facts = &outputs["model"].description.facts;
        assert_eq!(facts["config"]["quantization_config"]["quant_method"], "gguf");
        assert_eq!(facts["chat_template"], true, "{family}");
    }
}

#[test]
fn both_ends_of_a_file_end_generation_with_the_model() {
    let root = tempfile::tempdir().unwrap();
    let file = export(&golden("phi3"), root.path(), "q8_0");
    let model = download(&file, &root.path().join("download"), json!({})).unwrap().remove("model").unwrap();
    assert_eq!(model.description.facts["config"]["eos_token_id"], json!([384, 387]));
    // Written again, it names them again.
    let again = GgufFile::open(&export(&model.folder, &root.path().join("again"), "q8_0")).unwrap();
    let named = ["eos", "eot"].map(|name| again.get(&format!("tokenizer.ggml.{name}_token_id")).cloned());
    assert_eq!(named, [384, 387].map(|id| Some(model::gguf::Value::U32(id))));
}

#[test]
fn the_chat_template_of_conversations_with_tools_is_kept() {
    let root = tempfile::tempdir().unwrap();
    let model = root.path().join("model");
    fs::create_dir_all(model.join("additional_chat_templates")).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden("llama31").join(name), model.join(name)).unwrap();
    }
    fs::write(model.join("additional_chat_templates/tool_use.jinja"), "{{ tools }}").unwrap();
    let file = export(&model, root.path(), "q8_0");
    let outputs = download(&file, &root.path().join("download"), json!({})).unwrap();
    let template = |folder: &Path| {
        let text = fs::read(folder.join("tokenizer_config.json")).unwrap();
        serde_json::from_slice::<Value>(&text).unwrap()["chat_template"].clone()
    };
    let (default, back) = (template(&model), template(&outputs["tokenizer"].folder));
    let tools = json!({"name": "tool_use", "template": "{{ tools }}"});
    assert_eq!(back, json!([{"name": "default", "template": default}, tools]));
    assert!(Tokenizer::from_folder(&outputs["tokenizer"].folder).unwrap().chat_templates().is_some());
}

/// A model of one folder with the tokenizer of another, and rows for all of its tokens.
fn with_tokenizer(model: &Path, tokenizer: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    let read = |folder: &Path| serde_json::from_slice::<Value>(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let [rows, tokens] = [model, tokenizer].map(|folder| read(folder)["vocab_size"].as_u64().unwrap() as usize);
    let options = ResizeOptions { max_shard_bytes: 1 << 30, flush: Flush::Now };
    let size = [rows, tokens - rows];
    let all = resize::add_tokens(model, to, size, options, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(all, tokens);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(tokenizer.join(name), to.join(name)).unwrap();
    }
}

/// What a file cannot say in words it says by numbers: the scaling of RoPE, the order of q and k, the gemmas' norms.
#[test]
fn models_of_every_shape_compute_what_they_did() {
    for (family, tokenizer) in [
        ("qwen2", "qwen3"),
        ("qwen2_yarn", "qwen3"),
        ("gemma", "gemma2"),
        ("llama_linear", "llama31"),
        ("phi3_longrope", "phi3"),
        ("phi3_longrope_partial", "phi3"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("model");
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(family);
        with_tokenizer(&folder, &golden(tokenizer), &model);
        let file = export(&model, root.path(), "f32");
        let back = download(&file, &root.path().join("download"), json!({})).unwrap().remove("model").unwrap();
        let logits = |folder: &Path, tokens: usize| {
            let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
            let mut decoder = Decoder::load(ops, folder, Trainability::Frozen).unwrap();
            let tokens = tokens.min(decoder.config().max_position_embeddings);
            decoder.logits(&Batch::text((0..tokens as u32).map(|at| 3 + (7 * at) % 90).collect())).unwrap()
        };
        // Short enough for the unscaled frequencies of longrope, and too long for them.
        for tokens in [6, 200] {
            let [before, after] = [&model, &back.folder].map(|folder| logits(folder, tokens));
            let largest = before.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
            assert_eq!(before.len(), after.len(), "{family}");
            let worst = before.iter().zip(&after).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
            assert!(worst <= 2e-5 * largest, "{family}, {tokens} tokens: {worst} of {largest}");
        }
    }
}

fn rows() -> Vec<stages::data::artifact::TokenRow> {
    (0..8).map(|row| learned((0..16).map(|at| 3 + (7 * row + 5 * at) % 200))).collect()
}

/// The tiny model as a GGUF file of a type that was brought in, and the same with its weights dequantised.
struct Imported {
    tiny: Tiny,
    root: tempfile::TempDir,
    model: Artifact,
    dequantised: PathBuf,
}

impl Imported {
    fn new(kind: &str) -> Self {
        let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
        let file = export(&tiny.model.folder, root.path(), kind);
        let model = download(&file, &root.path().join("download"), json!({})).unwrap().remove("model").unwrap();
        let dequantised = root.path().join("dequantised");
        dequantise(&model.folder, &dequantised);
        Self { tiny, root, model, dequantised }
    }

    fn bench(&self, name: &str, model: &Path) -> TestBench {
        let folder = self.root.path().join(name);
        let tokens = folder.join("tokens of rows");
        let facts = write_tokens(&tokens, rows());
        bench_with(&folder, model).input("tokens.tokens", "tokens", &tokens, facts).unwrap()
    }

    fn perplexity(&self, name: &str, model: &Path, more: Value) -> f64 {
        let mut parameters = json!({"model": "base", "data": "tokens"});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let outputs = self.bench(name, model).run::<LogProbabilities>(parameters).unwrap();
        outputs["log_probs"].description.facts["perplexity"].as_f64().unwrap()
    }
}

#[test]
fn blocks_give_what_the_dequantised_values_give() {
    for kind in ["f32", "q8_0", "q4_0", "q5_0"] {
        let imported = Imported::new(kind);
        let own = imported.perplexity("own", &imported.tiny.model.folder, json!({}));
        for (name, more) in
            [("f32", json!({})), ("bf16", json!({"dtype": "bf16"})), ("candle", json!({"kernels": "candle"}))]
        {
            let found = imported.perplexity(&format!("{name} of blocks"), &imported.model.folder, more.clone());
            let expected = imported.perplexity(&format!("{name} of floats"), &imported.dequantised, more);
            // In bf16 embeddings of floats are rounded, and those of blocks are not.
            let most = if name == "bf16" { 1e-2 } else { 0.0 };
            assert!((found / expected - 1.0).abs() <= most, "{kind} in {name}: {found} {expected}");
        }
        let found = imported.perplexity("again", &imported.model.folder, json!({}));
        match kind {
            "f32" => assert_eq!(found, own),
            _ => assert!(found != own && (found / own - 1.0).abs() < 0.2, "{kind}: {found} of {own}"),
        }
    }
}

/// Rows of 256 values, as K types need them.
#[test]
fn k_types_are_read_as_they_are_stored() {
    let root = tempfile::tempdir().unwrap();
    let tiny = Tiny::new();
    let parameters = json!({
        "text": "rows", "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "seed": 5,
    });
    let bench = tiny.bench_in(&root.path().join("new"));
    let model = bench.run::<stages::kinds::new_model::NewModel>(parameters).unwrap().remove("model").unwrap();
    let file = export(&model.folder, root.path(), "q4_k_m");
    let types = |wanted: TensorType| {
        let file = GgufFile::open(&file).unwrap();
        file.tensors().iter().filter(|tensor| tensor.tensor_type == wanted).count()
    };
    assert!(types(TensorType::Q4K) > 30 && types(TensorType::Q6K) > 4);
    let model = download(&file, &root.path().join("download"), json!({})).unwrap().remove("model").unwrap();
    let dequantised = root.path().join("dequantised");
    dequantise(&model.folder, &dequantised);
    let imported = Imported { tiny, root, model, dequantised };
    for dtype in ["f32", "bf16"] {
        let more = json!({"dtype": dtype});
        let found = imported.perplexity(&format!("{dtype} of blocks"), &imported.model.folder, more.clone());
        let expected = imported.perplexity(&format!("{dtype} of floats"), &imported.dequantised, more);
        let most = if dtype == "bf16" { 1e-2 } else { 0.0 };
        assert!((found / expected - 1.0).abs() <= most, "{dtype}: {found} {expected}");
    }
}

#[test]
fn an_adapter_trains_on_blocks_and_is_merged_into_what_they_stand_for() {
    for kind in ["q8_0", "q4_0"] {
        let imported = Imported::new(kind);
        let more = json!({"epochs": 2, "lora": {"target_modules": "all-linear"}});
        let trained = |name: &str, model: &Path| training::train(&imported.bench(name, model), more.clone()).unwrap();
        let on_blocks = trained("blocks", &imported.model.folder);
        let on_floats = trained("floats", &imported.dequantised);
        assert!(training::adapter(&on_blocks) == training::adapter(&on_floats), "{kind}");
        let losses: Vec<f64> = steps(&on_blocks).iter().map(|step| step["loss"].as_f64().unwrap()).collect();
        assert!(losses.last().unwrap() < losses.first().unwrap(), "{kind}: {losses:?}");

        let merged = |name: &str, model: &Path, adapter: &Artifact| {
            let bench = imported.bench(name, model).input_of("adapter.adapter", &adapter.folder).unwrap();
            bench
                .run::<Merge>(json!({"model": "base", "adapter": "adapter", "dtype": "f32"}))
                .unwrap()
                .remove("model")
                .unwrap()
        };
        let one = merged("merge of blocks", &imported.model.folder, &on_blocks["adapter"]);
        let other = merged("merge of floats", &imported.dequantised, &on_floats["adapter"]);
        let weights = |model: &Artifact| fs::read(model.folder.join("model.safetensors")).unwrap();
        assert!(weights(&one) == weights(&other), "{kind}");
        let config = fs::read_to_string(one.folder.join("config.json")).unwrap();
        assert!(!config.contains("quantization_config"), "{config}");
        let again = export(&one.folder, &imported.root.path().join("again"), kind);
        assert!(GgufFile::open(&again).is_ok());
    }
}

#[test]
fn a_file_can_be_asked() {
    let imported = Imported::new("q8_0");
    let completions = |folder: &str, more: Value| {
        let bench = imported.tiny.bench_in(&imported.root.path().join(folder));
        let bench = bench.input_of("file.model", &imported.model.folder).unwrap();
        let mut parameters = json!({"model": "file", "prompts": "rows", "max_new_tokens": 8});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let samples = bench.run::<Generate>(parameters).unwrap().remove("samples").unwrap();
        samples.description.identity
    };
    let stored = completions("stored", json!({}));
    assert_eq!(completions("again", json!({})), stored);
    completions("rounded", json!({"quantize": "int8"}));
}

#[test]
fn what_is_no_model_is_told() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    let file = export(&tiny.model.folder, root.path(), "q8_0");
    let whole = fs::read(&file).unwrap();
    let told = |content: &[u8], more: Value| {
        let path = root.path().join("changed.gguf");
        fs::write(&path, content).unwrap();
        let error = download(&path, &tempfile::tempdir().unwrap().keep(), more).err()?;
        assert_eq!(error.cause, Cause::BadData);
        let cause = error.source().map(ToString::to_string).unwrap_or_default();
        Some(format!("{}: {cause}; {}", error.message, error.help.unwrap_or_default()))
    };
    assert_eq!(told(&whole, json!({})), None);
    let cut = told(&whole[..whole.len() / 2], json!({})).unwrap();
    assert!(cut.contains("changed.gguf` is no GGUF file that can be read") && cut.contains("beyond the end"), "{cut}");
    assert!(told(b"<!DOCTYPE html>", json!({})).unwrap().contains("does not begin with `GGUF`"));
    let with = |from: &[u8], to: &[u8]| {
        let at = whole.windows(from.len()).position(|window| window == from).unwrap();
        [&whole[..at], to, &whole[at + from.len()..]].concat()
    };
    let split = with(b"gpt-2", b"gpt-9");
    let said = told(&split, json!({})).unwrap();
    assert!(said.contains("splits text as `gpt-9`") && said.contains("`pre_tokenizer`: llama-bpe, qwen2"), "{said}");
    assert_eq!(told(&split, json!({"pre_tokenizer": "gpt-2"})), None);
    let said = told(&with(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), json!({})).unwrap();
    assert!(said.contains("its architecture is `mamba`; those that are computed are llama, qwen2"), "{said}");
    // Two layers are said to be one, as bytes of the same length.
    let layers = |count: u8| [&b"llama.block_count"[..], &[4, 0, 0, 0, count, 0, 0, 0]].concat();
    let said = told(&with(&layers(2), &layers(1)), json!({})).unwrap();
    assert!(said.contains("it has a tensor `blk.1.") && said.contains("that the model has no place for"), "{said}");
    // The type of the last tensor, which is followed by its place.
    let read = GgufFile::open(&file).unwrap();
    let last = read.tensors().last().unwrap();
    let at = whole.windows(last.name.len()).rposition(|window| window == last.name.as_bytes()).unwrap();
    let at = at + last.name.len() + 4 + 8 * last.shape.len();
    let mut other = whole.clone();
    other[at] = 10;
    let said = told(&other, json!({})).unwrap();
    assert!(said.contains("is of type 10 (Q2_K), which is not read"), "{said}");
}
