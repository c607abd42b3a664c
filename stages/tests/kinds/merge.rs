//! The stage kind `merge`, without an engine: what it makes of weighted adapters, and which adapters it refuses by
//! name.

use std::collections::BTreeMap;
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
use model::checkpoint::{Checkpoint, Dtype};
use model::init::{Fill, fresh_tensor};
use model::peft::{Adapter, AdapterConfig, AdapterModule, SavedTensor};
use serde_json::{Value, json};
use stages::kinds::add_tokens::AddTokens;
use stages::kinds::merge::Merge;
use test_harness::test;

use crate::tiny::Tiny;

const Q: &str = "model.layers.0.self_attn.q_proj";
const DOWN: &str = "model.layers.1.mlp.down_proj";

fn vocab_size(tiny: &Tiny) -> usize {
    usize::try_from(tiny.model.description.facts["vocab_size"].as_u64().unwrap()).unwrap()
}

/// An adapter of this rank without a zero in it.
fn lora(seed: u64, rank: usize, modules: &[(&str, usize, usize)]) -> Adapter {
    let values = |name: String, count| fresh_tensor(seed, &name, count, Fill::Normal(0.2));
    let targets = modules.iter().map(|(name, ..)| (*name).to_owned()).collect();
    let modules = modules.iter().map(|(name, out_features, in_features)| {
        let (out_features, in_features) = (*out_features, *in_features);
        let lora_a = values(format!("{name}.a"), rank * in_features);
        let lora_b = values(format!("{name}.b"), out_features * rank);
        ((*name).to_owned(), AdapterModule { rank, in_features, out_features, lora_a, lora_b, magnitude: None })
    });
    let config = AdapterConfig::new(rank, 8.0, targets);
    Adapter { config, modules: modules.collect(), saved_tensors: BTreeMap::new(), token_rows: BTreeMap::new() }
}

fn saved(folder: &Path, name: &str, adapter: &Adapter) -> PathBuf {
    let folder = folder.join(name);
    fs::create_dir(&folder).unwrap();
    adapter.save(&folder).unwrap();
    folder
}

/// A bench in a folder of its own with the tiny model as `base`, and PEFT folders as adapters.
fn bench(tiny: &Tiny, folder: &Path, adapters: &[(&str, &Path)]) -> TestBench {
    let bench = TestBench::new(folder).threads(2).input_of("base.model", &tiny.model.folder).unwrap();
    adapters.iter().fold(bench, |bench, (name, adapter)| {
        bench.input(&format!("{name}.adapter"), "adapter", adapter, Facts::new()).unwrap()
    })
}

fn merge(bench: &TestBench, more: Value) -> Result<Artifact, StageError> {
    let mut parameters = json!({"model": "base"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ok(bench.run::<Merge>(parameters)?.remove("model").unwrap())
}

fn report(merged: &Artifact) -> Value {
    serde_json::from_slice(&fs::read(merged.folder.join("merge_report.json")).unwrap()).unwrap()
}

/// An error with its causes, in a line.
fn said(error: &StageError) -> String {
    let mut said = error.message.clone();
    let mut cause = error.source();
    while let Some(next) = cause {
        said = format!("{said}: {next}");
        cause = next.source();
    }
    said
}

fn problems(parameters: Value, inputs: &InputFacts) -> Vec<String> {
    let mut reader = Reader::default();
    let bound = stages::registry().get("merge").unwrap().read(&Node::from_json(&parameters), &mut reader);
    let found = bound.map_or_else(Vec::new, |bound| bound.check(inputs, Span::default()));
    reader.problems.into_iter().chain(found).map(|problem| problem.message).collect()
}

#[test]
fn adapters_are_given_in_one_way_and_belong_to_the_model() {
    let none: [&str; 0] = [];
    let with = |more: Value| {
        let mut parameters = json!({"model": "base"});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parameters
    };
    let facts = InputFacts::new();
    assert_eq!(problems(with(json!({"adapter": "one"})), &facts), none);
    let two = json!({"adapters": [{"adapter": "one"}, {"adapter": "two", "weight": -0.5}]});
    assert_eq!(problems(with(two.clone()), &facts), none);
    assert_eq!(problems(with(json!({})), &facts), ["there is no adapter to merge"]);
    let both = json!({"adapter": "one", "adapters": [{"adapter": "two"}]});
    assert_eq!(problems(with(both), &facts), ["`adapter` and `adapters` are both given"]);
    assert_eq!(problems(with(json!({"adapter": "one", "dtype": "f8"})), &facts).len(), 1);

    let weights = |digest: &str| Facts::from_iter([("weights".to_owned(), json!(digest))]);
    let facts = InputFacts::from([
        ("base.model".to_owned(), weights("a")),
        ("one.adapter".to_owned(), weights("a")),
        ("two.adapter".to_owned(), weights("b")),
    ]);
    assert_eq!(problems(with(two), &facts), ["the adapter `two` was trained on another model than `base`"]);
}

#[test]
fn weighted_adapters_are_merged_proved_and_written_as_asked() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    let one = saved(folder.path(), "one", &lora(1, 4, &[(Q, 32, 32), (DOWN, 32, 48)]));
    let two = saved(folder.path(), "two", &lora(2, 3, &[(Q, 32, 32), ("lm_head", vocab_size(&tiny), 32)]));
    let bench = bench(&tiny, folder.path(), &[("one", &one), ("two", &two)]);
    let both = json!([{"adapter": "one", "weight": 0.5}, {"adapter": "two", "weight": -0.25}]);
    let before = Checkpoint::open(&tiny.model.folder).unwrap();
    for (dtype, stored) in [("f32", Dtype::F32), ("bf16", Dtype::BF16), ("f16", Dtype::F16)] {
        let asked = json!({"adapters": both, "dtype": dtype, "max_shard_size": "20kB", "proof_rows": 2});
        let merged = merge(&bench, asked).unwrap();
        let report = report(&merged);
        assert_eq!(report["weights"], json!([0.5, -0.25]));
        assert_eq!((&report["merged_tensors"], &report["untied_head"]), (&json!(3), &json!(true)));
        let proof = &report["proof"];
        assert_eq!(
            (&proof["rows"], &proof["positions"], &proof["dtype"]),
            (&json!(2), &json!(64), &json!(format!("{stored:?}")))
        );
        assert!(proof["max_abs_logit_difference"].as_f64() <= proof["bound"].as_f64());
        assert!(proof["before_rounding"]["max_abs_logit_difference"].as_f64().unwrap() < 1e-4);
        assert_eq!(proof["layers"].as_array().unwrap().len(), 2);

        let after = Checkpoint::open(&merged.folder).unwrap();
        assert!(after.files().count() > 1, "in shards");
        assert!(after.tensors().all(|(_, info)| info.dtype == stored));
        let config: Value = serde_json::from_slice(&fs::read(merged.folder.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["tie_word_embeddings"], false);
        assert_eq!(merged.description.facts["tie_word_embeddings"], false);
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            assert_eq!(merged.folder.join(name).exists(), tiny.model.folder.join(name).exists(), "{name}");
        }
        assert!(merged.folder.join("tokenizer.json").exists());
        if stored == Dtype::F32 {
            for name in after.names().filter(|name| before.contains(name) && !name.contains("_proj")) {
                assert_eq!(after.bytes(name).unwrap(), before.bytes(name).unwrap(), "{name}");
            }
        }
    }
}

#[test]
fn the_figures_of_the_proof_are_no_part_of_the_model() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    let one = saved(folder.path(), "one", &lora(1, 4, &[(Q, 32, 32)]));
    let bench = bench(&tiny, folder.path(), &[("one", &one)]);
    let identity = |more: Value| merge(&bench, more).unwrap().description.identity;
    let first = identity(json!({"adapter": "one"}));
    assert_eq!(first, identity(json!({"adapter": "one", "proof_rows": 2})));
    assert_eq!(first, identity(json!({"adapters": [{"adapter": "one"}]})));
    assert_ne!(first, identity(json!({"adapters": [{"adapter": "one", "weight": 0.5}]})));
    assert_ne!(first, identity(json!({"adapter": "one", "max_shard_size": "20kB"})));
}

#[test]
fn a_merged_model_has_the_other_chat_templates_of_its_base() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    let one = saved(folder.path(), "one", &lora(1, 4, &[(Q, 32, 32)]));
    let base = folder.path().join("base");
    fs::create_dir_all(base.join("additional_chat_templates")).unwrap();
    for entry in fs::read_dir(&tiny.model.folder).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), base.join(entry.file_name())).unwrap();
    }
    let name = "additional_chat_templates/tool_use.jinja";
    let [first, other] = ["first", "other"].map(|text| {
        fs::write(base.join(name), text).unwrap();
        let facts = tiny.model.description.facts.clone();
        let bench = TestBench::new(folder.path()).threads(2).input("base.model", "model", &base, facts).unwrap();
        let bench = bench.input("one.adapter", "adapter", &one, Facts::new()).unwrap();
        let merged = merge(&bench, json!({"adapter": "one"})).unwrap();
        assert_eq!(fs::read_to_string(merged.folder.join(name)).unwrap(), text);
        merged.description.identity
    });
    assert_ne!(first, other);
}

/// transformers ends generation at the tokens of that file, and does not look at the chat template.
#[test]
fn a_merged_model_ends_generation_where_its_chat_template_ends_a_turn() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    let tokens = json!({"model": "base", "added_special_tokens": ["<|im_start|>", "<|im_end|>"]});
    let wide = tiny.bench_in(&folder.path().join("wide")).run::<AddTokens>(tokens).unwrap().remove("model").unwrap();
    let end = &wide.description.facts["added_tokens"][1];
    let one = saved(folder.path(), "one", &lora(1, 4, &[(Q, 32, 32)]));
    let merged = |name: &str, settings: Option<&str>, prompt: Value| {
        let base = folder.path().join(name);
        fs::create_dir(&base).unwrap();
        for entry in fs::read_dir(&wide.folder).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), base.join(entry.file_name())).unwrap();
        }
        settings.iter().for_each(|text| fs::write(base.join("generation_config.json"), text).unwrap());
        let prompt = Facts::from_iter([("prompt".to_owned(), prompt)]);
        let bench = TestBench::new(&folder.path().join("benches").join(name)).threads(2);
        let bench = bench.input("base.model", "model", &base, wide.description.facts.clone()).unwrap();
        let bench = bench.input("one.adapter", "adapter", &one, prompt).unwrap();
        let merged = merge(&bench, json!({"adapter": "one"})).unwrap();
        let written = fs::read_to_string(merged.folder.join("generation_config.json")).ok();
        (written, merged.description.identity)
    };
    let chatml = || json!({"chat_template": "chatml"});
    let object = |text: Option<String>| serde_json::from_str::<Value>(&text.unwrap()).unwrap();
    let made = object(merged("none", None, chatml()).0);
    assert_eq!((&made["bos_token_id"], &made["eos_token_id"]), (&json!(0), &json!([1, end])));
    let settings = r#"{ "top_p": 0.9, "eos_token_id": 2, "top_k": 20 }"#;
    let (written, identity) = merged("settings", Some(settings), chatml());
    let expected = format!(r#"{{"top_p":0.9,"eos_token_id":[2,{end}],"top_k":20}}"#);
    assert_eq!(object(written).to_string(), expected);
    let settings = format!(r#"{{ "top_p": 0.9, "eos_token_id": [{end}, 2], "top_k": 20 }}"#);
    let (written, other) = merged("known", Some(&settings), chatml());
    assert_eq!(written, Some(settings));
    assert_ne!(identity, other);
    // Without a chat template nothing ends a turn.
    assert_eq!(merged("plain", None, Value::Null).0, None);
    let settings = r#"{ "eos_token_id": 2 }"#;
    assert_eq!(merged("text", Some(settings), Value::Null).0.as_deref(), Some(settings));
}

#[test]
fn a_wrong_adapter_is_refused_by_name() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    let good = || lora(1, 4, &[(Q, 32, 32)]);
    let mut cases: Vec<(&str, PathBuf, &str)> = Vec::new();
    let mut case = |name: &'static str, adapter: &Adapter, says: &'static str| {
        let path = saved(folder.path(), name, adapter);
        cases.push((name, path.clone(), says));
        path
    };
    case(
        "wide",
        &lora(1, 4, &[(Q, 32, 40)]),
        "adapter `wide` does not fit the model: `model.layers.0.self_attn.q_proj` of the base is [32, 32], that of the adapter [32, 40]",
    );
    case(
        "absent",
        &lora(1, 4, &[("model.layers.7.self_attn.q_proj", 32, 32)]),
        "the base has no module `model.layers.7.self_attn.q_proj`, which the adapter adapts; the nearest is `model.layers.0.self_attn.q_proj`",
    );
    let mut broken = good();
    broken.modules.get_mut(Q).unwrap().lora_a[7] = f32::NAN;
    case("broken", &broken, "the adapter has a value that is not finite in `model.layers.0.self_attn.q_proj`");
    let mut misfit = good();
    misfit.config.modules_to_save = vec!["lm_head".to_owned()];
    let rows = vocab_size(&tiny) - 1;
    let tensor = SavedTensor { shape: vec![rows, 32], values: vec![0.5; rows * 32] };
    misfit.saved_tensors.insert("lm_head.weight".to_owned(), tensor);
    case("misfit", &misfit, "adapter `misfit` does not fit the model: `lm_head` of the base is [");

    // Files that PEFT would not write like this.
    let edit = |path: &Path, from: &str, to: &str| {
        let file = path.join("adapter_config.json");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(file, text.replace(from, to)).unwrap();
    };
    edit(
        &case(
            "rank",
            &good(),
            "adapter `rank`: cannot read the adapter: tensor `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`",
        ),
        "\"r\": 4",
        "\"r\": 8",
    );
    edit(&case("kind", &good(), "`peft_type` = \"IA3\" in the adapter config is not supported"), "\"LORA\"", "\"IA3\"");
    let cut = case("cut", &good(), "adapter `cut`: cannot read the adapter: `").join("adapter_model.safetensors");
    let bytes = fs::read(&cut).unwrap();
    fs::write(&cut, &bytes[..bytes.len() - 5]).unwrap();
    fs::remove_file(case("gone", &good(), "adapter `gone`: cannot read the adapter").join("adapter_model.safetensors"))
        .unwrap();

    for (name, path, says) in cases {
        let bench = bench(&tiny, &folder.path().join("benches").join(name), &[(name, &path)]);
        let error = merge(&bench, json!({"adapter": name})).unwrap_err();
        let said = said(&error).replace(&folder.path().display().to_string(), "");
        assert!(said.contains(says), "{name}: {said}");
    }
}

#[test]
fn an_adapter_from_elsewhere_names_its_base() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    let mut adapter = lora(1, 4, &[(Q, 32, 32)]);
    adapter.config.base_model = Some("meta-llama/Llama-3.1-8B".to_owned());
    let one = saved(folder.path(), "one", &adapter);
    // Without the links into the store that an output is made of.
    let base = folder.path().join("base");
    fs::create_dir(&base).unwrap();
    for entry in fs::read_dir(&tiny.model.folder).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), base.join(entry.file_name())).unwrap();
    }
    let repo = |name: &str| {
        let mut facts = tiny.model.description.facts.clone();
        facts.insert("repo".to_owned(), json!(name));
        let bench = TestBench::new(&folder.path().join(name.replace('/', "-")));
        let bench = bench.input("base.model", "model", &base, facts).unwrap();
        bench.input("one.adapter", "adapter", &one, Facts::new()).unwrap()
    };
    merge(&repo("meta-llama/Llama-3.1-8B"), json!({"adapter": "one"})).unwrap();
    let error = merge(&repo("someone/a-copy"), json!({"adapter": "one"})).unwrap_err();
    assert!(
        said(&error).ends_with("the adapter was trained on `meta-llama/Llama-3.1-8B`, not on `someone/a-copy`")
            && error.help.as_ref().unwrap().contains("`base_name`"),
        "{error:?}"
    );
    merge(&repo("someone/a-copy"), json!({"adapter": "one", "base_name": "meta-llama/Llama-3.1-8B"})).unwrap();
}

#[test]
fn an_embedding_that_peft_saved_with_an_adapter_takes_the_place_of_the_models() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    // As PEFT writes them with `save_embedding_layers`: `modules_to_save` does not name them.
    let with_tables = |name: &str, values: &[f32]| {
        let mut adapter = lora(1, 4, &[(Q, 32, 32)]);
        for module in ["model.embed_tokens", "lm_head"] {
            let tensor = SavedTensor { shape: vec![values.len() / 32, 32], values: values.to_vec() };
            adapter.saved_tensors.insert(format!("{module}.weight"), tensor);
        }
        saved(folder.path(), name, &adapter)
    };
    let table = Checkpoint::open(&tiny.model.folder).unwrap().tensor_f32("model.embed_tokens.weight").unwrap();
    let same = with_tables("same", &table);
    let other: Vec<f32> = table.iter().map(|value| value + 0.25).collect();
    let other = with_tables("other", &other);
    let larger = with_tables("larger", &vec![0.5; table.len() + 4 * 32]);
    let plain = saved(folder.path(), "plain", &lora(1, 4, &[(Q, 32, 32)]));
    let adapters: [(&str, &Path); 4] = [("plain", &plain), ("same", &same), ("other", &other), ("larger", &larger)];
    let bench = bench(&tiny, &folder.path().join("bench"), &adapters);
    let merged = |name: &str| merge(&bench, json!({"adapter": name}));

    let (plain, same) = (merged("plain").unwrap(), merged("same").unwrap());
    assert_eq!(same.description.identity, plain.description.identity, "there is nothing to do");
    let other = merged("other").unwrap();
    assert_eq!(report(&other)["replaced_tensors"], json!(["lm_head.weight", "model.embed_tokens.weight"]));
    let error = said(&merged("larger").unwrap_err());
    let rows = vocab_size(&tiny);
    let expected = format!("of {} tokens and the model has {rows}: resize the model first", rows + 4);
    assert!(error.contains(&expected) && error.contains("`add_tokens`"), "{error}");
}

#[test]
fn adapters_that_do_not_go_together_are_refused() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    let good = saved(folder.path(), "good", &lora(1, 4, &[(Q, 32, 32)]));
    let mut dora = lora(2, 4, &[(Q, 32, 32)]);
    dora.config.use_dora = true;
    dora.modules.get_mut(Q).unwrap().magnitude = Some(vec![1.0; 32]);
    let dora = saved(folder.path(), "dora", &dora);
    let mut head = lora(3, 4, &[(DOWN, 32, 48)]);
    head.config.modules_to_save = vec!["lm_head".to_owned()];
    let rows = vocab_size(&tiny);
    let tensor = SavedTensor { shape: vec![rows, 32], values: fresh_tensor(1, "head", rows * 32, Fill::Normal(0.3)) };
    head.saved_tensors.insert("lm_head.weight".to_owned(), tensor);
    let head = saved(folder.path(), "head", &head);
    let bench = bench(&tiny, &folder.path().join("bench"), &[("good", &good), ("dora", &dora), ("head", &head)]);
    let refused = |adapters: Value| said(&merge(&bench, json!({"adapters": adapters})).unwrap_err());
    let both = refused(json!([{"adapter": "good"}, {"adapter": "dora"}]));
    assert!(
        both.contains("`model.layers.0.self_attn.q_proj` has a DoRA adapter, which can only be merged alone"),
        "{both}"
    );
    let half = refused(json!([{"adapter": "dora", "weight": 0.5}]));
    assert!(half.starts_with("adapter `dora` does not fit the model: "), "{half}");
    let share = refused(json!([{"adapter": "head", "weight": 0.5}]));
    assert!(share.contains("`lm_head` was trained as a whole (`modules_to_save`)"), "{share}");
    let twice = refused(json!([{"adapter": "head"}, {"adapter": "head"}]));
    assert!(twice.contains("`lm_head` was trained as a whole"), "{twice}");
    // On different modules they do.
    let merged = merge(&bench, json!({"adapters": [{"adapter": "dora"}, {"adapter": "head"}]})).unwrap();
    assert_eq!(report(&merged)["replaced_tensors"], json!(["lm_head.weight"]));
}

#[test]
fn a_weight_under_which_the_model_overflows_is_named() {
    let (tiny, folder) = (Tiny::new(), tempfile::tempdir().unwrap());
    // Gate and projection are multiplied: each of them is finite.
    let modules = [("model.layers.0.mlp.gate_proj", 48, 32), ("model.layers.0.mlp.up_proj", 48, 32)];
    let mlp = saved(folder.path(), "mlp", &lora(1, 4, &modules));
    let bench = bench(&tiny, &folder.path().join("bench"), &[("mlp", &mlp)]);
    let error = merge(&bench, json!({"adapters": [{"adapter": "mlp", "weight": 1e30}]})).unwrap_err();
    let expected = "the merge is not proved: the outputs of layer 0 have a value that is not finite";
    assert_eq!(said(&error), expected);
    assert!(error.help.as_ref().unwrap().ends_with("and the greatest is 1e30"), "{error:?}");
}
