//! Tagged choices: one declaration reads, keys and describes a mapping whose form a key decides.

use super::*;

/// How weights are updated.
#[derive(Debug, Clone, PartialEq, Parameters)]
#[parameters(default)]
enum Rule {
    /// With two moments.
    #[semantic(default)]
    Adam {
        /// Their decay.
        #[semantic(default = [0.9, 0.999], range = 0.0..1.0)]
        betas: [f64; 2],
        /// Decoupled.
        #[semantic(default = 0.01, range = 0.0..)]
        weight_decay: f64,
    },
    /// Plain.
    Sgd {
        /// Coupled.
        #[semantic(default = 0.0, range = 0.0..)]
        weight_decay: f64,
        #[semantic]
        momentum: Option<f64>,
        #[semantic(default = false, omit_default)]
        nesterov: bool,
    },
    /// Nothing happens.
    None,
}

/// With what is common to all.
#[derive(Debug, Clone, PartialEq, Parameters)]
#[parameters(default)]
struct Update {
    /// Step size.
    #[semantic(default = 3e-4, above = 0.0)]
    learning_rate: f64,
    #[semantic(flatten)]
    rule: Rule,
}

#[derive(Debug, Clone, PartialEq, Parameters)]
#[parameters(default)]
struct Preference {
    #[semantic(default = 0.1, above = 0.0)]
    beta: f64,
    #[semantic]
    reference: Option<u32>,
}

/// What is made small.
#[derive(Debug, Parameters)]
#[parameters(tag = "kind", default)]
enum Objective {
    #[semantic(default)]
    CrossEntropy,
    Dpo(Preference),
    Distillation {
        #[semantic]
        teacher: Input<Weights>,
    },
    #[semantic(rename = "feature-distillation")]
    FeatureDistillation {
        #[semantic]
        teacher: Input<Weights>,
        #[semantic(flatten)]
        preference: Preference,
    },
}

#[derive(Debug, Parameters)]
struct Run {
    #[semantic(default)]
    update: Update,
    #[semantic(default, omit_default)]
    loss: Objective,
    #[semantic(default = 1, omit_default)]
    scale: u32,
    #[semantic(omit_default)]
    limit: Option<u32>,
}

fn key_of<T: Parameter>(json: serde_json::Value) -> Vec<String> {
    lines(&key(&read::<T>(json).unwrap()))
}

#[test]
fn the_tag_decides_which_options_there_are() {
    let adam = Rule::Adam { betas: [0.9, 0.5], weight_decay: 0.01 };
    assert_eq!(read::<Rule>(json!({ "name": "adam", "betas": [0.9, 0.5] })).unwrap(), adam);
    let sgd = Rule::Sgd { weight_decay: 0.0, momentum: Some(0.9), nesterov: false };
    assert_eq!(read::<Rule>(json!({ "name": "sgd", "momentum": 0.9 })).unwrap(), sgd);
    assert_eq!(read::<Rule>(json!({ "name": "none" })).unwrap(), Rule::None);
    let Objective::Dpo(preference) = read(json!({ "kind": "dpo", "beta": 0.5 })).unwrap() else { panic!() };
    assert_eq!(preference, Preference { beta: 0.5, reference: None });
    let Objective::FeatureDistillation { preference, .. } =
        read(json!({ "kind": "feature-distillation", "teacher": "a", "reference": 3 })).unwrap()
    else {
        panic!()
    };
    assert_eq!(preference, Preference { beta: 0.1, reference: Some(3) });
}

#[test]
fn without_the_tag_the_default_variant_is_meant_and_a_word_is_the_tag_alone() {
    assert_eq!(read::<Rule>(json!({})).unwrap(), Rule::default());
    assert_eq!(
        read::<Rule>(json!({ "weight_decay": 0.5 })).unwrap(),
        Rule::Adam { betas: [0.9, 0.999], weight_decay: 0.5 }
    );
    for json in [json!("sgd"), json!({ "name": "sgd" })] {
        assert_eq!(read::<Rule>(json).unwrap(), Rule::Sgd { weight_decay: 0.0, momentum: None, nesterov: false });
    }
    let update = Update { learning_rate: 3e-4, rule: Rule::None };
    assert_eq!(read::<Update>(json!("none")).unwrap(), update);
    assert_eq!(messages::<Rule>(json!("adma")), ["unknown-value: `name`: unknown value `adma` (did you mean `adam`?)"]);
    assert_eq!(messages::<Objective>(json!("distillation")), ["missing-key: `teacher` is missing (-)"]);
    assert_eq!(messages::<Rule>(json!(3)), ["wrong-type: expected a mapping, found an integer (-)"]);
}

#[test]
fn an_option_of_another_variant_is_a_problem_of_its_own() {
    assert_eq!(
        messages::<Update>(json!({ "momentum": 0.9, "betas": [0.9, 0.9] })),
        ["wrong-option: `adam` has no option `momentum` \
             (an option of `sgd`; `adam` has `learning_rate`, `betas`, `weight_decay`)"]
    );
    assert_eq!(
        messages::<Rule>(json!({ "name": "none", "weight_decay": 0 })),
        ["wrong-option: `none` has no option `weight_decay` (an option of `adam`, `sgd`; `none` has no options)"]
    );
    assert_eq!(
        messages::<Update>(json!({ "momentun": 0.9 })),
        ["unknown-key: unknown key `momentun` (did you mean `momentum`?)"]
    );
    assert_eq!(
        messages::<Update>(json!({ "nothing_like_it": 0.9 })),
        ["unknown-key: unknown key `nothing_like_it` \
          (known keys: `name`, `learning_rate`, `betas`, `weight_decay`, `momentum`, `nesterov`)"]
    );
    // Of a default that is taken away, nothing is left to complain of.
    assert!(read::<Rule>(json!({ "name": "none", "weight_decay": null })).is_ok());
}

#[test]
fn where_the_name_is_unknown_the_options_are_checked_all_the_same() {
    assert_eq!(
        messages::<Update>(json!({ "name": "sdg", "momentum": "x", "learning_rate": 0, "weight_decay": -1, "lr": 1 })),
        [
            "unknown-key: unknown key `lr` (did you mean `learning_rate`?)",
            "out-of-range: `learning_rate` must be above 0 (-)",
            "unknown-value: `name`: unknown value `sdg` (did you mean `sgd`?)",
            "wrong-type: `momentum`: expected a number, found a string (-)",
            "out-of-range: `weight_decay` must be at least 0 (-)",
        ]
    );
    let mut reader = Reader::default();
    let json = json!({ "kind": "distilation", "teacher": "big" });
    assert!(Objective::read(&Node::from_json(&json), &mut reader).is_none());
    assert_eq!(reader.references[0].0.stage, "big");
}

#[test]
fn a_choice_without_a_default_needs_its_tag() {
    #[derive(Debug, Parameters)]
    #[parameters(tagged)]
    enum Format {
        Nf4,
        Int8,
    }
    assert!(matches!(read(json!({ "name": "nf4" })).unwrap(), Format::Nf4));
    assert!(matches!(read(json!("int8")).unwrap(), Format::Int8));
    assert_eq!(messages::<Format>(json!({})), ["missing-key: `name` is missing (one of `nf4`, `int8`)"]);
    assert_eq!(Format::schema()["anyOf"][1]["required"], json!(["name"]));
}

#[test]
fn the_key_has_the_name_and_the_options_of_that_variant() {
    let adam = ["name = adam", "learning_rate = 0.0003", "betas[0] = 0.9", "betas[1] = 0.999", "weight_decay = 0.01"];
    assert_eq!(key_of::<Update>(json!({})), adam);
    assert_eq!(key_of::<Update>(json!({ "name": "adam", "betas": [0.9, 0.999] })), adam);
    assert_eq!(key_of::<Update>(json!("none")), ["name = none", "learning_rate = 0.0003"]);
    let teacher = format!("teacher = {}", Digest::of(b"rows"));
    assert_eq!(
        key_of::<Objective>(json!({ "kind": "feature-distillation", "teacher": "a" })),
        ["kind = feature-distillation", &teacher, "beta = 0.1", "reference = none"]
    );
}

/// A parameter that is added to a kind leaves the keys of those who do not use it as they are.
#[test]
fn a_default_that_is_omitted_is_in_no_key_and_another_value_is() {
    let plain = key_of::<Run>(json!({}));
    assert!(plain.iter().all(|line| line.starts_with("update.")), "{plain:?}");
    for same in [
        json!({ "loss": "cross_entropy" }),
        json!({ "loss": {}, "scale": 1, "limit": null }),
        json!({ "update": "adam" }),
    ] {
        assert_eq!(key_of::<Run>(same.clone()), plain, "{same}");
    }
    let added = |json| key_of::<Run>(json)[plain.len()..].to_vec();
    assert_eq!(added(json!({ "loss": "dpo" })), ["loss.kind = dpo", "loss.beta = 0.1", "loss.reference = none"]);
    assert_eq!(added(json!({ "scale": 2 })), ["scale = 2"]);
    assert_eq!(added(json!({ "limit": 2 })), ["limit = 2"]);
    let sgd = |nesterov| key_of::<Rule>(json!({ "name": "sgd", "nesterov": nesterov }));
    assert_eq!(sgd(false), ["name = sgd", "weight_decay = 0.0", "momentum = none"]);
    assert_eq!(sgd(true).last().unwrap(), "nesterov = true");
}

#[test]
fn an_input_of_a_variant_is_found() {
    let run: Run = read(json!({ "loss": { "kind": "distillation", "teacher": "big" } })).unwrap();
    let mut found = Vec::new();
    run.visit_inputs(&mut |reference, kinds| found.push((reference.stage.clone(), kinds.len())));
    assert_eq!(found, [("big".to_owned(), 2)]);
    assert_eq!(Objective::collected(), Some(Collected::Field("teacher")), "two variants have the one name");
    assert_eq!(Rule::collected(), None);
}

#[test]
fn the_schema_has_every_option_and_says_which_variant_has_it() {
    let schema = Update::schema();
    assert_eq!(schema["description"], "With what is common to all.");
    assert_eq!(schema["anyOf"][0], json!({ "enum": ["adam", "sgd", "none"] }));
    let mapping = &schema["anyOf"][1];
    let names: Vec<_> = mapping["properties"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["name", "learning_rate", "betas", "weight_decay", "momentum", "nesterov"]);
    assert_eq!(mapping["properties"]["name"]["default"], "adam");
    let described =
        "How weights are updated.\n\n`adam`: With two moments.\n\n`sgd`: Plain.\n\n`none`: Nothing happens.";
    assert_eq!(mapping["properties"]["name"]["description"], described);
    assert_eq!(mapping["properties"]["betas"]["default"], json!([0.9, 0.999]));
    let decay = &mapping["properties"]["weight_decay"];
    assert_eq!((&decay["type"], &decay["minimum"], decay.get("default")), (&json!("number"), &json!(0), None));
    assert_eq!(decay["description"], "`adam`: Decoupled.\n\n`sgd`: Coupled.");
    assert_eq!(mapping.get("required"), None);
    let [adam, sgd, none] = mapping["allOf"].as_array().unwrap().as_slice() else { panic!() };
    assert_eq!(adam["if"], json!({ "properties": { "name": { "const": "adam" } } }), "also where it is left out");
    assert_eq!(sgd["if"], json!({ "properties": { "name": { "const": "sgd" } }, "required": ["name"] }));
    assert_eq!(sgd["then"]["properties"]["betas"], false);
    assert_eq!(sgd["then"]["properties"]["weight_decay"]["default"], 0.0);
    assert_eq!(adam["then"]["properties"]["weight_decay"]["default"], 0.01);
    assert_eq!(none["then"]["properties"]["momentum"], false);
    assert_eq!(mapping["additionalProperties"], false);
    let of_objective = &Objective::schema()["anyOf"][1]["allOf"][3]["then"];
    assert_eq!(of_objective["required"], json!(["teacher"]));
    assert_eq!(of_objective["properties"]["beta"]["default"], 0.1);
}

/// The schema is for editors, the reader decides: both take the same mappings.
#[test]
fn the_fields_of_a_choice_are_declared_once_each() {
    let paths: Vec<String> = declared_fields(&Run::schema()).into_iter().map(|field| field.path).collect();
    assert_eq!(
        paths,
        [
            "update.name",
            "update.learning_rate",
            "update.betas",
            "update.weight_decay",
            "update.momentum",
            "update.nesterov",
            "loss.kind",
            "loss.beta",
            "loss.reference",
            "loss.teacher",
            "scale",
            "limit",
        ]
    );
}

/// How long.
#[derive(Debug, Clone, PartialEq, Parameters)]
#[parameters(one_of, default)]
enum Warmup {
    /// In steps.
    #[semantic(rename = "warmup_steps", default = 0)]
    Steps(u64),
    /// As a share.
    #[semantic(rename = "warmup_ratio", range = 0.0..=1.0)]
    Ratio(f64),
}

#[derive(Debug, Clone, PartialEq, Parameters)]
#[parameters(one_of)]
enum Lowest {
    #[semantic(range = 0.0..)]
    MinLr(f64),
    #[semantic(range = 0.0..=1.0)]
    MinLrRate(f64),
}

#[derive(Debug, Clone, PartialEq, Parameters)]
enum Schedule {
    #[semantic(default)]
    Level {
        #[semantic(flatten)]
        warmup: Warmup,
    },
    Falling {
        #[semantic(flatten)]
        warmup: Warmup,
        #[semantic(flatten)]
        lowest: Lowest,
    },
}

#[test]
fn of_keys_that_exclude_each_other_one_is_read() {
    assert_eq!(read::<Warmup>(json!({})).unwrap(), Warmup::Steps(0));
    assert_eq!(read::<Warmup>(json!({ "warmup_ratio": 0.5 })).unwrap(), Warmup::Ratio(0.5));
    let falling = Schedule::Falling { warmup: Warmup::default(), lowest: Lowest::MinLrRate(0.1) };
    assert_eq!(read::<Schedule>(json!({ "name": "falling", "min_lr_rate": 0.1 })).unwrap(), falling);
    assert_eq!(key_of::<Schedule>(json!({})), ["name = level", "warmup_steps = 0"]);
    let shares = json!({ "name": "falling", "min_lr_rate": 0.1, "warmup_ratio": 0.5 });
    assert_eq!(key_of::<Schedule>(shares), ["name = falling", "warmup_ratio = 0.5", "min_lr_rate = 0.1"]);
    for (wrong, says) in [
        (
            json!({ "warmup_steps": 1, "warmup_ratio": 0.1 }),
            "bad-value: `warmup_steps` and `warmup_ratio` exclude each other (-)",
        ),
        (json!({ "warmup_ratio": 2 }), "out-of-range: `warmup_ratio` must be at least 0 and at most 1 (-)"),
        (json!("falling"), "missing-key: one of `min_lr`, `min_lr_rate` is required (-)"),
        (
            json!({ "min_lr": 0 }),
            "wrong-option: `level` has no option `min_lr` (an option of `falling`; `level` has `warmup_steps`, \
             `warmup_ratio`)",
        ),
    ] {
        assert_eq!(messages::<Schedule>(wrong.clone()), [says], "{wrong}");
    }
    let schema = &Schedule::schema()["anyOf"][1];
    assert_eq!(schema["allOf"][0]["then"]["allOf"][0]["not"]["required"], json!(["warmup_steps", "warmup_ratio"]));
    assert_eq!(schema["allOf"][1]["then"]["allOf"][1]["oneOf"][1]["required"], json!(["min_lr_rate"]));
    assert_eq!(schema["properties"]["warmup_steps"]["default"], 0);
    assert_eq!(schema["properties"]["warmup_steps"]["description"], "In steps.");
    assert_eq!(schema.get("required"), None);
}
