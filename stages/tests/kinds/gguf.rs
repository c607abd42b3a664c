//! The stage kind `gguf`, without an engine: the files that it makes, and what it refuses, before the run where it can.

use std::error::Error as _;
use std::fs;
use std::path::{Path, PathBuf};

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::error::StageError;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use model::gguf::{GgufFile, TensorType, Value};
use serde_json::{Value as Json, json};
use stages::data::prompt::ChatTemplateChoice;
use stages::kinds::gguf::Gguf;
use test_harness::test;

fn golden(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf").join(family)
}

fn export(model: &Path, more: Json) -> Result<Artifact, StageError> {
    let root = tempfile::tempdir().unwrap().keep();
    let facts = Facts::from_iter([("repo".to_owned(), json!("someone/Small-Model"))]);
    let bench = TestBench::new(&root).threads(2).input("base.model", "model", model, facts).unwrap();
    let mut parameters = json!({"model": "base"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ok(bench.run::<Gguf>(parameters)?.remove("files").unwrap())
}

fn problems(config: Json) -> Vec<String> {
    let mut reader = Reader::default();
    let parameters = Node::from_json(&json!({"model": "base"}));
    let bound = stages::registry().get("gguf").unwrap().read(&parameters, &mut reader).unwrap();
    let facts = InputFacts::from([("base.model".to_owned(), Facts::from_iter([("config".to_owned(), config)]))]);
    bound.check(&facts, Span::default()).into_iter().map(|problem| problem.message).collect()
}

#[test]
fn a_model_becomes_one_file_with_its_name_and_a_modelfile_if_asked() {
    let made = export(&golden("llama31"), json!({"modelfile": true})).unwrap();
    let file = GgufFile::open(&made.folder.join("model.gguf")).unwrap();
    assert_eq!(file.get("general.name"), Some(&Value::String("Small-Model".to_owned())));
    assert_eq!(file.get("general.file_type"), Some(&Value::U32(7)));
    assert!(modelfile(&made).starts_with("FROM ./model.gguf\n"));

    let made = export(&golden("qwen3"), json!({"type": "q4_k_m", "name": "mine"})).unwrap();
    let names: Vec<_> = fs::read_dir(&made.folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["model.gguf"]);
    let file = GgufFile::open(&made.folder.join("model.gguf")).unwrap();
    assert_eq!(file.get("general.name"), Some(&Value::String("mine".to_owned())));
    // Rows of 64: no whole blocks of 256.
    let query = file.tensors().iter().find(|tensor| tensor.name == "blk.0.attn_q.weight").unwrap();
    assert_eq!(query.tensor_type, TensorType::Q5_0);
}

fn modelfile(made: &Artifact) -> String {
    fs::read_to_string(made.folder.join("Modelfile")).unwrap()
}

/// ChatML has a template in Ollama's language, whether its end is a token of the model's or plain text; others a
/// remark.
#[test]
fn a_modelfile_has_every_end_of_turn_and_chatml_as_ollama_reads_it() {
    let chatml = "TEMPLATE \"\"\"{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}\
                  <|im_start|>assistant\n\"\"\"\n";
    let of = |model: &Path| modelfile(&export(model, json!({"modelfile": true})).unwrap());
    assert_eq!(of(&golden("qwen3")), format!("FROM ./model.gguf\n{chatml}PARAMETER stop \"<|im_end|>\"\n"));
    let copy = copy_of("llama31");
    let written = |template: &str| fs::write(copy.path().join("chat_template.jinja"), template).unwrap();
    written(ChatTemplateChoice::new("chatml").text());
    let stops = "PARAMETER stop \"<|eot_id|>\"\nPARAMETER stop \"<|im_end|>\"\n";
    assert_eq!(of(copy.path()), format!("FROM ./model.gguf\n{chatml}{stops}"));
    let remark = "# Ollama may not know the chat template in the file: compare `ollama show --template`, or add a \
                  TEMPLATE.\n";
    let stops = "PARAMETER stop \"<|endoftext|>\"\nPARAMETER stop \"<|end|>\"\n";
    assert_eq!(of(&golden("phi3")), format!("FROM ./model.gguf\n{remark}{stops}"));
    written("{% for");
    assert_eq!(of(copy.path()), format!("FROM ./model.gguf\n{remark}PARAMETER stop \"<|eot_id|>\"\n"));
}

/// The first gemma has the key from the converter, whatever its chat template is.
#[test]
fn the_token_that_ends_a_turn_is_named_where_it_is_not_the_end_of_text() {
    for (family, expected) in [
        ("phi3", vec![Value::U32(387)]),
        ("gemma2", vec![Value::U32(5)]),
        ("gemma", vec![Value::U32(5)]),
        ("llama31", vec![]),
        ("qwen3", vec![]),
        ("mistral", vec![]),
    ] {
        let made = export(&golden(family), json!({})).unwrap();
        let file = GgufFile::open(&made.folder.join("model.gguf")).unwrap();
        let named = file.metadata().iter().filter(|(key, _)| key == "tokenizer.ggml.eot_token_id");
        assert_eq!(named.map(|(_, value)| value.clone()).collect::<Vec<_>>(), expected, "{family}");
    }
}

/// A copy of a model, to be changed.
fn copy_of(family: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(family)).unwrap() {
        let path = entry.unwrap().path();
        fs::write(copy.path().join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
    }
    copy
}

/// It is a warning: the file is as good as before, but for that.
#[test]
fn a_chat_template_with_a_mistake_names_no_end_of_turn() {
    let copy = copy_of("phi3");
    fs::write(copy.path().join("chat_template.jinja"), "{% for").unwrap();
    let made = export(copy.path(), json!({})).unwrap();
    let file = GgufFile::open(&made.folder.join("model.gguf")).unwrap();
    assert_eq!(file.get("tokenizer.ggml.eot_token_id"), None);
    assert_eq!(file.get("tokenizer.chat_template"), Some(&Value::String("{% for".to_owned())));
}

#[test]
fn a_tokenizer_without_a_name_asks_for_one() {
    let copy = copy_of("qwen3");
    let path = copy.path().join("tokenizer.json");
    let mut tokenizer: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["pre_tokenizer"] = json!({"type": "Whitespace"});
    fs::write(&path, tokenizer.to_string()).unwrap();
    let error = export(copy.path(), json!({})).err().unwrap();
    let cause = error.source().unwrap().to_string();
    assert!(cause.contains("splits text as none of those that have a name in llama.cpp"), "{cause}");
    assert!(error.help.unwrap().contains("`pre_tokenizer`"));
    assert!(export(copy.path(), json!({"pre_tokenizer": "qwen2"})).is_ok());
}

#[test]
fn what_no_file_can_hold_is_a_problem_before_the_run() {
    let config: Json = serde_json::from_slice(&fs::read(golden("gemma2").join("config.json")).unwrap()).unwrap();
    assert!(problems(config.clone()).is_empty());
    let mut other = config;
    other["query_pre_attn_scalar"] = json!(16);
    let found = problems(other);
    assert!(found[0].contains("`query_pre_attn_scalar` is 16, where llama.cpp has 24"), "{found:?}");
}
