//! The stage kind `download`, from a folder and from a Hub.

use std::fs;
use std::path::{Path, PathBuf};

use engine::error::Cause;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::{InputFacts, Outside};
use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::kinds::download::Download;
use test_harness::{child, test};

use crate::support::{COMMIT, Fault, FaultyHub, content};

const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "torch_dtype": "bfloat16"}"#;

/// A file of weights with so many bytes behind its header.
fn weights(bytes: usize) -> Vec<u8> {
    let header = format!("{{\"a\":{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}");
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &content(bytes)].concat()
}

fn golden_tokenizer(name: &str) -> Vec<u8> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers/bytelevel");
    fs::read(Path::new(folder).join(name)).unwrap()
}

fn write_checkpoint(folder: &Path) {
    fs::write(folder.join("config.json"), CONFIG).unwrap();
    fs::write(folder.join("model.safetensors"), weights(10_000)).unwrap();
    fs::write(folder.join("pytorch_model.bin"), content(10_000)).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::write(folder.join(name), golden_tokenizer(name)).unwrap();
    }
}

fn bench_of_folder(root: &Path, folder: &Path) -> TestBench {
    bench_of_role(root, folder, "checkpoint")
}

fn bench_of_role(root: &Path, folder: &Path, role: &str) -> TestBench {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().fold(TestBench::new(root), |bench, path| bench.file(role, path).unwrap())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

/// The outputs with the files copied and with those left where they are, which must be the same.
#[track_caller]
fn copied_and_left(folder: &Path, role: &str, parameters: &Value) -> TestedOutputs {
    let [copied, left] = [true, false].map(|copy| {
        let root = tempfile::tempdir().unwrap();
        let mut parameters = parameters.clone();
        parameters["copy"] = copy.into();
        let outputs = bench_of_role(root.path(), folder, role).run::<Download>(parameters).unwrap();
        (root, outputs)
    });
    assert_eq!(copied.1.keys().collect::<Vec<_>>(), left.1.keys().collect::<Vec<_>>());
    for (one, other) in copied.1.values().zip(left.1.values()) {
        assert_eq!(one.description, other.description);
        assert_eq!(names(&one.folder), names(&other.folder));
        for name in names(&one.folder) {
            assert_eq!(
                fs::read(one.folder.join(&name)).unwrap(),
                fs::read(other.folder.join(&name)).unwrap(),
                "{name}"
            );
        }
    }
    left
}

/// Outputs, and the folder that they are in.
type TestedOutputs = (tempfile::TempDir, std::collections::BTreeMap<String, engine::context::Artifact>);

#[test]
fn files_that_stay_make_the_artefacts_of_a_copy() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let leads_to = |output: &engine::context::Artifact, name: &str, file: PathBuf| {
        assert_eq!(fs::read_link(output.folder.join(name)).unwrap(), file.canonicalize().unwrap());
    };

    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    fs::write(folder.path().join("model.safetensors"), weights(100_000)).unwrap();
    let (_root, outputs) = copied_and_left(folder.path(), "checkpoint", &json!({"path": "./checkpoint"}));
    leads_to(&outputs["model"], "model.safetensors", folder.path().join("model.safetensors"));
    let is_outside =
        |name: &str| fs::canonicalize(outputs["model"].folder.join(name)).unwrap().starts_with(folder.path());
    assert!(is_outside("model.safetensors") && !is_outside("config.json") && !is_outside("tokenizer.json"));

    let folder = tempfile::tempdir().unwrap();
    fs::copy(golden.join("gguf/mistral/mistral-q8_0.gguf"), folder.path().join("any.gguf")).unwrap();
    let (_root, outputs) = copied_and_left(folder.path(), "checkpoint", &json!({"path": "./any.gguf"}));
    leads_to(&outputs["model"], "model.gguf", folder.path().join("any.gguf"));

    let adapter = golden.join("gemma/lora/tied_embedding_saved/adapter");
    let (_root, outputs) = copied_and_left(&adapter, "adapter", &json!({"path": "./adapter", "as": "adapter"}));
    leads_to(&outputs["adapter"], "adapter_model.safetensors", adapter.join("adapter_model.safetensors"));
}

#[test]
fn a_folder_becomes_a_model_and_a_tokenizer() {
    let root = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    let outputs = bench_of_folder(root.path(), folder.path()).run::<Download>(json!({"path": "./checkpoint"})).unwrap();
    let (model, tokenizer) = (&outputs["model"], &outputs["tokenizer"]);
    assert_eq!(names(&model.folder), ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
    assert_eq!(names(&tokenizer.folder), ["tokenizer.json", "tokenizer_config.json"]);
    assert_eq!(fs::read(model.folder.join("model.safetensors")).unwrap(), weights(10_000));
    let facts = &model.description.facts;
    assert_eq!(facts["architecture"], "LlamaForCausalLM");
    assert_eq!(facts["vocab_size"], 512);
    assert_eq!(facts["dtype"], "bfloat16");
    assert!(tokenizer.description.facts["vocab_size"].as_u64().unwrap() > 256);
}

#[test]
fn files_that_are_not_what_their_names_say_are_refused_before_a_copy() {
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n", "a".repeat(64));
    let cut = &weights(10_000)[..5000];
    for (name, content, said) in [
        ("model.safetensors", cut, "is cut off: it has 5000 bytes"),
        ("model.safetensors", pointer.as_bytes(), "is a git-LFS pointer"),
        ("tokenizer.json", pointer.as_bytes(), "is a git-LFS pointer"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path());
        fs::write(folder.path().join(name), content).unwrap();
        let bench = || bench_of_folder(root.path(), folder.path());
        let error = bench().run::<Download>(json!({"path": "./checkpoint"})).unwrap_err();
        assert!(error.cause == Cause::BadData && error.message.contains(said), "{error}");
        assert!(error.help.is_some());
        bench().run::<Download>(json!({"path": "./checkpoint", "as": "files"})).unwrap();
    }
}

#[test]
fn an_adapter_is_the_same_whatever_its_base_is_called() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama31/lora/attention/adapter");
    let taken = |edit: &dyn Fn(&Path)| {
        let (root, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["adapter_config.json", "adapter_model.safetensors"] {
            fs::copy(golden.join(name), folder.path().join(name)).unwrap();
        }
        edit(folder.path());
        let bench = bench_of_role(root.path(), folder.path(), "adapter");
        let outputs = bench.run::<Download>(json!({"path": "./checkpoint", "as": "adapter"})).unwrap();
        outputs["adapter"].description.identity
    };
    let configured = |folder: &Path, from: &str, to: &str| {
        let path = folder.join("adapter_config.json");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(path, text.replace(from, to)).unwrap();
    };
    let plain = taken(&|_| ());
    let named = taken(&|folder| {
        configured(folder, "\"base_model_name_or_path\": null", "\"base_model_name_or_path\": \"a/b\"");
        configured(folder, "\"revision\": null", "\"revision\": \"main\"");
    });
    assert_eq!(named, plain);
    assert_ne!(taken(&|folder| configured(folder, "\"lora_alpha\": 8", "\"lora_alpha\": 9")), plain);
}

#[test]
fn a_folder_can_be_taken_as_it_is() {
    let root = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    let parameters = json!({"path": "./checkpoint", "as": "files", "exclude": ["*.json"]});
    let outputs = bench_of_folder(root.path(), folder.path()).run::<Download>(parameters).unwrap();
    assert_eq!(names(&outputs["files"].folder), ["model.safetensors", "pytorch_model.bin"]);
}

#[test]
fn a_folder_of_peft_becomes_an_adapter() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama31/lora/attention/adapter");
    let folder = tempfile::tempdir().unwrap();
    let files = ["adapter_config.json", "adapter_model.safetensors"];
    for name in files {
        fs::copy(golden.join(name), folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("optimizer.pt"), "state").unwrap();
    let parameters = json!({"path": "./checkpoint", "as": "adapter"});
    let root = tempfile::tempdir().unwrap();
    let bench = |root: &Path| bench_of_role(root, folder.path(), "adapter");
    let outputs = bench(root.path()).run::<Download>(parameters.clone()).unwrap();
    assert_eq!(names(&outputs["adapter"].folder), files);
    assert_eq!(outputs["adapter"].description.facts["rank"], 4);
    assert_eq!(outputs["adapter"].description.facts.get("weights"), None);
    // One that was made here says which weights it belongs to, also where all files are asked for.
    fs::write(folder.path().join("artifact.json"), record()).unwrap();
    for include in [Value::Null, json!(["*"])] {
        let root = tempfile::tempdir().unwrap();
        let parameters = json!({"path": "./checkpoint", "as": "adapter", "include": include});
        let outputs = bench(root.path()).run::<Download>(parameters).unwrap();
        assert_eq!(outputs["adapter"].description.facts["weights"], "base");
    }
    // What we do not compute is found here and not after a training or a merge.
    let config = fs::read_to_string(golden.join(files[0])).unwrap();
    fs::write(folder.path().join(files[0]), config.replace("\"LORA\"", "\"IA3\"")).unwrap();
    let root = tempfile::tempdir().unwrap();
    let error = bench(root.path()).run::<Download>(parameters).unwrap_err();
    assert_eq!(error.message, "the adapter cannot be used here");
}

/// What lies with an adapter that was made here.
fn record() -> String {
    json!({"format": 1, "kind": "adapter", "identity": "ab".repeat(32), "facts": {"rank": 4, "weights": "base"}})
        .to_string()
}

#[test]
fn an_adapter_on_a_hub_brings_its_record_too() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama31/lora/attention/adapter");
    let [config, weights] =
        ["adapter_config.json", "adapter_model.safetensors"].map(|name| fs::read(golden.join(name)).unwrap());
    let server = FaultyHub::serve(&[
        ("adapter_config.json", &config),
        ("adapter_model.safetensors", &weights),
        ("artifact.json", record().as_bytes()),
    ]);
    let root = tempfile::tempdir().unwrap();
    in_another_process("takes_an_adapter_in_a_process_of_its_own", &server, root.path());
}

#[child]
fn takes_an_adapter_in_a_process_of_its_own() {
    let root = PathBuf::from(std::env::var("TEST_FOLDER").unwrap());
    let bench = TestBench::new(&root).pin("hub-model:owner/name@main", COMMIT);
    let outputs = bench.run::<Download>(json!({"repo": "owner/name", "as": "adapter"})).unwrap();
    let adapter = &outputs["adapter"];
    assert_eq!(names(&adapter.folder), ["adapter_config.json", "adapter_model.safetensors"]);
    assert_eq!(adapter.description.facts["weights"], "base");
}

#[test]
fn a_file_that_changed_since_the_plan_is_an_error() {
    let root = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    let bench = bench_of_folder(root.path(), folder.path());
    let mut changed = weights(10_000);
    changed[777] ^= 1;
    fs::write(folder.path().join("model.safetensors"), changed).unwrap();
    let error = bench.run::<Download>(json!({"path": "./checkpoint"})).unwrap_err();
    assert_eq!(error.cause, Cause::ChangedWhileRunning);
    let expected = format!("`{}` changed while it was copied", folder.path().join("model.safetensors").display());
    assert_eq!(error.message, expected);
}

#[test]
fn a_folder_without_weights_is_no_model() {
    let root = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path());
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let error =
        bench_of_folder(root.path(), folder.path()).run::<Download>(json!({"path": "./checkpoint"})).unwrap_err();
    assert_eq!(error.cause, Cause::BadData);
    assert!(error.help.unwrap().contains("convert them to safetensors"));
}

/// What the file's mistakes are, without running.
fn problems(parameters: &Value) -> Vec<String> {
    let registry = stages::registry();
    let mut reader = Reader::default();
    let bound = registry.get("download").unwrap().read(&Node::from_json(parameters), &mut reader).unwrap();
    assert!(reader.problems.is_empty(), "{:?}", reader.problems);
    bound.check(&InputFacts::new(), Span::default()).into_iter().map(|problem| problem.message).collect()
}

#[test]
fn mistakes_are_found_without_running() {
    assert!(problems(&json!({"repo": "meta-llama/Llama-3.1-8B-Instruct", "exclude": ["original/*"]})).is_empty());
    assert!(problems(&json!({"path": "./folder"})).is_empty());
    assert_eq!(problems(&json!({})), ["neither `repo` nor `path` is given"]);
    assert_eq!(problems(&json!({"repo": "a/b", "path": "./x"})), ["`repo` and `path` are both given"]);
    assert_eq!(problems(&json!({"path": "./x", "revision": "main"})), ["`revision` belongs to `repo`"]);
    assert_eq!(problems(&json!({"repo": "./folder/x/y"})), ["`./folder/x/y` is not the name of a Hub repository"]);
    // Every text is a pattern to the Hub's own tools.
    assert!(problems(&json!({"repo": "a/b", "include": ["*.json", "a[b"], "exclude": ["***", "a**h"]})).is_empty());
}

#[test]
fn a_repository_asks_to_be_pinned_and_a_folder_to_be_read() {
    let outside = |parameters: &Value| {
        let mut reader = Reader::default();
        let registry = stages::registry();
        registry.get("download").unwrap().read(&Node::from_json(parameters), &mut reader).unwrap().outside()
    };
    match outside(&json!({"repo": "a/b", "revision": "v1"})).as_slice() {
        [Outside::Pin(pin)] => {
            assert_eq!((pin.kind.as_str(), pin.name.as_str(), pin.revision.as_str()), ("hub-model", "a/b", "v1"));
        }
        other => panic!("{other:?}"),
    }
    match outside(&json!({"path": "./x"})).as_slice() {
        [Outside::Files { role, pattern, .. }] => assert_eq!((role.as_str(), pattern.as_str()), ("checkpoint", "./x")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_model_that_cannot_be_computed_is_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    for (config, said) in [
        (CONFIG.replace(r#""LlamaForCausalLM""#, r#""LlamaForTokenClassification""#), "LlamaForTokenClassification"),
        (
            CONFIG.replace("LlamaForCausalLM", "BertForMaskedLM").replace("llama", "bert"),
            "`BertForMaskedLM` is no causal language model",
        ),
        (CONFIG.replacen('{', r#"{"quantization_config": {"quant_method": "awq"}, "#, 1), "`quantization_config: awq`"),
        (
            CONFIG.replacen('{', r#"{"quantization_config": {"quant_method": "gptq"}, "#, 1),
            "`quantization_config: gptq`",
        ),
        (CONFIG.replacen('{', r#"{"quantization_config": {"quant_method": "fp8"}, "#, 1), "`quantization_config: fp8`"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_checkpoint(folder.path());
        fs::write(folder.path().join("config.json"), config).unwrap();
        let bench = || bench_of_folder(root.path(), folder.path());
        let error = bench().run::<Download>(json!({"path": "./checkpoint"})).unwrap_err();
        let source = error.source.as_ref().unwrap().to_string();
        assert!(error.cause == Cause::BadData && source.contains(said), "{error}: {source}");
        let help = error.help.unwrap();
        assert_eq!(help.contains("use the original model in 16 bits"), said.contains("quantization_config"), "{help}");
        // Taken as it is, it needs no meaning.
        bench().run::<Download>(json!({"path": "./checkpoint", "as": "files"})).unwrap();
    }
}

#[test]
fn of_a_model_that_cannot_be_computed_no_weights_are_fetched() {
    let config = CONFIG.replace("LlamaForCausalLM", "BertForMaskedLM").replace("llama", "bert");
    let (tokenizer, weights) = (golden_tokenizer("tokenizer.json"), content(200_000));
    let files = [
        ("config.json", config.as_bytes()),
        ("model.safetensors", weights.as_slice()),
        ("tokenizer.json", tokenizer.as_slice()),
    ];
    let server = FaultyHub::serve(&files);
    let root = tempfile::tempdir().unwrap();
    in_another_process("refused_in_a_process_of_its_own", &server, root.path());
    assert_eq!(server.requests_for("config.json").len(), 1);
    assert!(server.requests_for("model.safetensors").is_empty());
}

#[child]
fn refused_in_a_process_of_its_own() {
    let root = PathBuf::from(std::env::var("TEST_FOLDER").unwrap());
    let bench = TestBench::new(&root).pin("hub-model:owner/name@main", COMMIT);
    let error = bench.run::<Download>(json!({"repo": "owner/name"})).unwrap_err();
    assert!(error.source.as_ref().unwrap().to_string().contains("`BertForMaskedLM`"), "{error}");
}

#[test]
fn a_pointer_that_a_repository_has_is_not_to_be_pulled() {
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n", "a".repeat(64));
    let tokenizer = golden_tokenizer("tokenizer.json");
    let server = FaultyHub::serve(&[
        ("config.json", CONFIG.as_bytes()),
        ("model.safetensors", pointer.as_bytes()),
        ("tokenizer.json", &tokenizer),
    ]);
    let root = tempfile::tempdir().unwrap();
    in_another_process("meets_a_pointer_in_a_process_of_its_own", &server, root.path());
}

#[child]
fn meets_a_pointer_in_a_process_of_its_own() {
    let root = PathBuf::from(std::env::var("TEST_FOLDER").unwrap());
    let bench = || TestBench::new(&root).pin("hub-model:owner/name@main", COMMIT);
    let error = bench().run::<Download>(json!({"repo": "owner/name"})).unwrap_err();
    assert!(error.message.contains("`model.safetensors` is a git-LFS pointer"), "{error}");
    let help = error.help.unwrap();
    assert!(help.contains("another `revision`") && !help.contains("git lfs pull"), "{help}");
    let taken = bench().run::<Download>(json!({"repo": "owner/name", "as": "files", "include": ["model*"]})).unwrap();
    assert_eq!(names(&taken["files"].folder), ["model.safetensors"]);
}

/// Runs a child of this file in a process whose Hub is the server.
fn in_another_process(name: &str, server: &FaultyHub, folder: &Path) {
    let status = child(name)
        .env("HF_ENDPOINT", &server.endpoint)
        .env("HF_TOKEN", "secret")
        .env("HF_HOME", folder.join("home"))
        .env_remove("HF_HUB_CACHE")
        .env("TEST_FOLDER", folder)
        .status()
        .unwrap();
    assert!(status.success());
}

/// Which Hub is used is a matter of the environment, so the stage runs in a process with another one.
#[test]
fn a_repository_becomes_a_model_and_a_tokenizer() {
    let (tokenizer, tokenizer_config) = (golden_tokenizer("tokenizer.json"), golden_tokenizer("tokenizer_config.json"));
    let weights = weights(200_000);
    let server = FaultyHub::serve(&[
        ("additional_chat_templates/tool_use.jinja", b"{{ tools }}"),
        ("config.json", CONFIG.as_bytes()),
        ("model.safetensors", &weights),
        ("original/consolidated.00.pth", b"not wanted"),
        ("tokenizer.json", &tokenizer),
        ("tokenizer_config.json", &tokenizer_config),
    ]);
    server.fail("model.safetensors", &[Fault::CutAfter(90_000)]);
    let root = tempfile::tempdir().unwrap();
    in_another_process("downloads_in_a_process_of_its_own", &server, root.path());
    assert!(server.requests_for("original/consolidated.00.pth").is_empty());
    let last = server.requests_for("model.safetensors").pop().unwrap();
    assert_eq!(last.range.as_deref(), Some("bytes=90000-"));
    assert!(server.requests().iter().all(|request| request.authorization.as_deref() == Some("Bearer secret")));
    assert!(!root.path().join("home").exists(), "something was written to the user's Hub folder");
}

#[child]
fn downloads_in_a_process_of_its_own() {
    use engine::stage::{PinRequest, StageKind as _};
    let (kind, name, revision) = ("hub-model".to_owned(), "owner/name".to_owned(), "main".to_owned());
    let pinned = Download::pin(&PinRequest { kind, name, revision, token_env: None, span: Span::default() }).unwrap();
    assert_eq!(pinned.commit, COMMIT);
    let root = PathBuf::from(std::env::var("TEST_FOLDER").unwrap());
    let bench = TestBench::new(&root).pinned("hub-model:owner/name@main", pinned);
    let outputs = bench.run::<Download>(json!({"repo": "owner/name"})).unwrap();
    let model = &outputs["model"];
    let of_tokenizer = ["additional_chat_templates", "tokenizer.json", "tokenizer_config.json"];
    let [templates, json, settings] = of_tokenizer;
    assert_eq!(names(&model.folder), [templates, "config.json", "model.safetensors", json, settings]);
    assert_eq!(fs::read(model.folder.join("model.safetensors")).unwrap(), weights(200_000));
    assert_eq!(names(&outputs["tokenizer"].folder), of_tokenizer);
    for output in outputs.values() {
        assert_eq!(names(&output.folder.join(templates)), ["tool_use.jinja"]);
    }
    assert_eq!(names(&bench.working::<Download>()), Vec::<String>::new());
}
