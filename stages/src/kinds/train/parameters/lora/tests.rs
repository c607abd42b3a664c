//! Modules by PEFT's names and by torchtune's words, and what does not go together.

use model::config::Config;

use super::*;

const LLAMA: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama31/config.json"));
const PHI3: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/phi3/config.json"));

fn model(text: &str) -> Modules {
    Modules::from(&Config::from_json(text).unwrap())
}

fn read(json: Json) -> Given<LoraParams> {
    let mut reader = Reader::default();
    let read = Given::<LoraParams>::read(&Node::from_json(&json), &mut reader);
    assert!(reader.problems.is_empty(), "{:?}", reader.problems);
    read.unwrap()
}

fn modules(json: Json, text: &str) -> Vec<String> {
    let model = model(text);
    let (settings, _) = read(json).value.settings(&model).unwrap();
    let paths = targets::resolve(&model, &settings).unwrap();
    let first_layer = paths.iter().filter(|path| path.contains("layers.0.") || !path.contains("layers."));
    first_layer.map(|path| path.rsplit('.').next().unwrap().to_owned()).collect()
}

#[test]
fn modules_are_named_as_in_peft_or_in_torchtune() {
    assert_eq!(modules(json!({}), LLAMA), ["q_proj", "v_proj"]);
    let all = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    assert_eq!(modules(json!({"target_modules": "all-linear"}), LLAMA), all);
    assert_eq!(modules(json!({"target_modules": r".*\.(q|k)_proj"}), LLAMA), ["q_proj", "k_proj"]);
    let words = json!({"lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": true, "apply_lora_to_output": true});
    assert_eq!(modules(words.clone(), LLAMA), ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]);
    assert_eq!(modules(words.clone(), PHI3), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]);
    let (_, notes) = read(words).value.settings(&model(PHI3)).unwrap();
    assert!(notes.len() == 1 && notes[0].contains("on all three"), "{notes:?}");
}

#[test]
fn the_values_of_an_adapter_are_counted_with_magnitudes_and_whole_modules() {
    let config = model(LLAMA);
    let shape = |name: &str| {
        let shape = config.shape(name).unwrap();
        (shape[0] as u64, shape[1] as u64)
    };
    let (out_features, in_features) = shape("model.layers.0.self_attn.q_proj.weight");
    let (vocab_size, hidden_size) = shape("model.embed_tokens.weight");
    let layers = 2;
    let count = |json: Json| {
        let trained = read(json).value.trained_tensors(&config).unwrap();
        trained.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum::<u64>()
    };
    let plain = layers * 4 * (out_features + in_features);
    assert_eq!(count(json!({"rank": 4, "target_modules": ["q_proj"]})), plain);
    assert_eq!(
        count(json!({"rank": 4, "target_modules": ["q_proj"], "use_dora": true})),
        plain + layers * out_features
    );
    assert_eq!(count(json!({"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}})), plain);
    let saved = json!({"rank": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]});
    assert_eq!(count(saved), plain + vocab_size * hidden_size);
}

#[test]
fn layers_are_chosen_as_in_peft() {
    let config = model(LLAMA);
    let adapted = |json: Json| {
        let (settings, _) = read(json).value.settings(&config).unwrap();
        targets::resolve(&config, &settings).unwrap()
    };
    let second = ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"];
    for json in [
        json!({"layers_to_transform": 1}),
        json!({"layers_to_transform": [1], "layers_pattern": "layers"}),
        json!({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}),
    ] {
        assert_eq!(adapted(json), second);
    }
    assert_eq!(adapted(json!({"layers_to_transform": [0, 1]})), adapted(json!({})));
    let (settings, _) = read(json!({"layers_to_transform": 1})).value.settings(&config).unwrap();
    assert_eq!(settings.other["layers_to_transform"], json!([1]), "it is in the adapter's own file");
    let problem = |json: Json| read(json).problem_on(&config, AdapterOrigin::Fresh, Span::default()).unwrap();
    let none = problem(json!({"layers_to_transform": [7]}));
    assert!(none.message.contains("no projection is left") && none.field.unwrap() == "lora.layers_to_transform");
    let existing = AdapterConfig::new(8, 16.0, vec!["q_proj".to_owned(), "v_proj".to_owned()]);
    let contradicted = |json: Json| read(json).contradiction(&existing, &config).unwrap().map(|(key, ..)| key);
    assert_eq!(contradicted(json!({"layers_to_transform": 1})).unwrap(), "layers_to_transform");
    assert_eq!(contradicted(json!({"layers_to_transform": [0, 1], "learning_rate_ratio": 4})), None);
}

#[test]
fn what_says_the_same_twice_or_names_nothing_is_a_problem() {
    let of = |json: Json| -> Vec<String> {
        read(json).problems(Span::default()).into_iter().map(|problem| problem.message).collect()
    };
    let none: [&str; 0] = [];
    assert_eq!(of(json!({"rank": 4})), none);
    assert_eq!(of(json!({"lora_attn_modules": [], "apply_lora_to_mlp": true})), none);
    assert_eq!(of(json!({"target_modules": [], "modules_to_save": ["lm_head"]})), none);
    for (wrong, says) in [
        (json!({"target_modules": []}), "`lora.target_modules` is empty"),
        (json!({"lora_attn_modules": []}), "`lora.lora_attn_modules` is empty"),
        (json!({"apply_lora_to_mlp": true}), "`lora.lora_attn_modules`, which is missing"),
        (json!({"target_modules": ["q_proj"], "lora_attn_modules": ["q_proj"]}), "both select the layers"),
        (json!({"layers_pattern": "h"}), "`lora.layers_to_transform`, which is missing"),
        (json!({"target_modules": "all-linear", "layers_to_transform": 1}), "goes with a list of names"),
    ] {
        let found = of(wrong.clone());
        assert!(found.len() == 1 && found[0].contains(says), "{wrong}: {found:?}");
    }
}

#[test]
fn a_module_that_the_model_does_not_have_is_named_with_the_nearest_one() {
    for (wrong, says) in [
        (json!({"target_modules": ["q_prj"]}), "`lora.target_modules`: `q_prj` is no projection of the model"),
        (json!({"target_modules": ["q_prj"]}), "did you mean `q_proj`?"),
        (json!({"target_modules": r".*\.embed_tokens"}), "`lora.target_modules`: LoRA on `embed_tokens` is not"),
        (json!({"lora_attn_modules": ["o_proj"]}), "`lora.lora_attn_modules`: `o_proj` is none of torchtune's"),
        (json!({"modules_to_save": ["lm_haed"]}), "`lora.modules_to_save`: `modules_to_save` has `lm_haed`"),
        (json!({"rank_pattern": {"(": 4}}), "`lora.rank_pattern`: "),
    ] {
        let problem = read(wrong.clone()).problem_on(&model(LLAMA), AdapterOrigin::Fresh, Span::default()).unwrap();
        assert!(problem.message.contains(says), "{wrong}: {}", problem.message);
    }
}

#[test]
fn an_existing_adapter_may_be_contradicted_in_dropout_and_the_ratio_of_learning_rates_alone() {
    let config = model(LLAMA);
    let existing = AdapterConfig::new(4, 16.0, vec!["q_proj".to_owned(), "v_proj".to_owned()]);
    let contradicted = |json: Json| {
        read(json)
            .contradiction(&existing, &config)
            .unwrap()
            .map(|(key, file, adapters)| format!("{key}: {file}, {adapters}"))
    };
    let ratio = json!({"learning_rate_ratio": 16});
    for fine in
        [json!({}), json!({"dropout": 0.1}), ratio, json!({"rank": 4, "lora_attn_modules": ["v_proj", "q_proj"]})]
    {
        assert_eq!(contradicted(fine), None);
    }
    assert_eq!(contradicted(json!({"rank": 8})).unwrap(), "rank: 8, 4");
    assert_eq!(contradicted(json!({"use_dora": true})).unwrap(), "use_dora: true, false");
    assert!(contradicted(json!({"target_modules": ["q_proj"]})).unwrap().starts_with("target_modules: model.layers.0"));
}

#[test]
fn a_pattern_that_fits_no_adapted_module_is_said() {
    let json = json!({
        "rank_pattern": {"q_proj": 2, "k_proj": 2, "layers.1.self_attn.v_proj": 8},
        "alpha_pattern": {"v_proj": 16.0, "down_proj": 3.0},
    });
    let (_, notes) = read(json).value.settings(&model(LLAMA)).unwrap();
    let expected = [("rank_pattern", "k_proj"), ("alpha_pattern", "down_proj")]
        .map(|(key, pattern)| format!("`lora.{key}` has `{pattern}`, which fits none of the adapted modules"));
    assert_eq!(notes, expected);
}

#[test]
fn a_layer_that_the_model_does_not_have_is_reported() {
    let notes = |layers: Json| read(json!({ "layers_to_transform": layers })).value.settings(&model(LLAMA)).unwrap().1;
    assert_eq!(notes(json!([0, 1])), [""; 0]);
    let expected = "`lora.layers_to_transform` has 7, and the model has no such layer to adapt";
    assert_eq!(notes(json!([0, 7])), [expected]);
    let whole = ["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"];
    let lora = read(json!({ "layers_to_transform": [0, 1], "modules_to_save": whole }));
    assert_eq!(lora.value.settings(&model(LLAMA)).unwrap().1, [""; 0]);
}

#[test]
fn a_name_where_an_expression_is_expected_is_explained() {
    let help = |targets: &str| {
        let lora = read(json!({ "target_modules": targets }));
        lora.problem_on(&model(LLAMA), AdapterOrigin::Fresh, Span::default()).unwrap().help
    };
    assert!(help("q_proj").unwrap().contains("`target_modules: [q_proj]`"));
    assert!(help("all").unwrap().contains("`target_modules: all-linear`"));
    assert_eq!(help(r".*\.nothing"), None);
}

#[test]
fn a_rank_wider_than_any_layer_is_refused() {
    let problems = |json: Json| read(json).problems(Span::default());
    for json in [json!({"rank": 1_000_000_000_000_u64}), json!({"rank_pattern": {"q_proj": 65_537}})] {
        let found = problems(json);
        assert!(found.len() == 1 && found[0].message.contains("more than any layer is wide"), "{found:?}");
    }
    assert!(problems(json!({"rank": 65_536})).is_empty());
}

/// What a fresh adapter would have by default is no module of every model; an adapter that is there has modules of its
/// own.
#[test]
fn the_defaults_of_the_file_do_not_hold_for_an_adapter_that_is_there() {
    let phi3 = model(PHI3);
    let problem = |lora: &Given<LoraParams>, origin| lora.problem_on(&phi3, origin, Span::default());
    let mut existing = AdapterConfig::new(4, 8.0, Vec::new());
    existing.target_modules = TargetModules::Names(vec!["qkv_proj".to_owned(), "o_proj".to_owned()]);
    for silent in [Given::<LoraParams>::default(), read(json!({"dropout": 0.1})), read(json!({"rank": 4}))] {
        assert!(problem(&silent, AdapterOrigin::Fresh).is_some());
        assert_eq!(problem(&silent, AdapterOrigin::Existing), None);
        assert_eq!(silent.contradiction(&existing, &phi3).unwrap(), None);
    }
    let wrong = read(json!({"target_modules": ["q_proj"]}));
    assert!(problem(&wrong, AdapterOrigin::Existing).unwrap().message.contains("`q_proj`"));
    assert!(problem(&read(json!({"modules_to_save": ["nothing"]})), AdapterOrigin::Existing).is_some());
    let other = read(json!({"target_modules": ["o_proj"]})).contradiction(&existing, &phi3).unwrap();
    assert_eq!(other.unwrap().0, "target_modules");
}
