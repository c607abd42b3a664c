//! What `#[derive(Parameters)]` and the readers of values promise to a stage kind.

use std::time::Duration;

use cache::{Class, Digest, KeyDocument};
use serde_json::json;

use super::*;

mod choices;

struct Rows;

impl ArtifactKind for Rows {
    const KINDS: &'static [&'static str] = &["rows"];
}

struct Weights;

impl ArtifactKind for Weights {
    const KINDS: &'static [&'static str] = &["adapter", "model"];
}

/// What happens to a row that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Parameters)]
enum OnTooLong {
    /// It is cut.
    Truncate,
    Drop,
    #[semantic(rename = "fail!")]
    Error,
    KeepAsItIs,
}

/// How weights are updated.
#[derive(Debug, Clone, PartialEq, Parameters)]
struct Optimizer {
    /// Step size.
    #[semantic(above = 0.0, default = 3e-4)]
    learning_rate: f64,
    #[semantic(range = 0.0..1.0, default = vec![0.9, 0.999])]
    betas: Vec<f64>,
    #[cosmetic(default)]
    fused: bool,
}

#[derive(Debug, Parameters)]
struct Weighted {
    #[semantic]
    adapter: Input<Weights>,
    #[semantic(default = 1.0)]
    weight: f32,
}

/// Everything at once.
#[derive(Debug, Parameters)]
struct Everything {
    #[semantic]
    dataset: Input<Rows>,
    #[semantic]
    validation: Option<Input<Rows>>,
    #[semantic(default)]
    adapters: Vec<Weighted>,
    /// Longest row kept,
    /// in tokens.
    ///
    /// More is slower.
    #[semantic(range = 1..)]
    max_seq_len: usize,
    #[semantic(default = OnTooLong::Truncate)]
    on_too_long: OnTooLong,
    #[resumable(range = 1..=100, default = 1)]
    epochs: u32,
    #[semantic]
    optimizer: Optimizer,
    #[cosmetic(default = Period(Duration::from_secs(60)))]
    save_every: Period,
    #[semantic]
    memory: Option<ByteSize>,
    #[semantic(default)]
    column_map: Mapping<String>,
    #[semantic]
    prompts: Option<OneOf<Vec<String>, Input<Rows>>>,
    #[semantic]
    source: Option<LocalPath>,
    #[semantic(rename = "type", default = 0)]
    kind: i32,
    #[semantic]
    r#where: Option<String>,
}

fn read<T: Parameter>(json: serde_json::Value) -> Result<T, Vec<Problem>> {
    let mut reader = Reader::default();
    let value = T::read(&Node::from_json(&json), &mut reader);
    match value {
        Some(value) if reader.problems.is_empty() => Ok(value),
        value => {
            assert!(!reader.problems.is_empty(), "nothing read, and no problem");
            assert!(value.is_none() || !reader.problems.is_empty());
            Err(reader.problems)
        }
    }
}

fn messages<T: Parameter + std::fmt::Debug>(json: serde_json::Value) -> Vec<String> {
    let problems = read::<T>(json).unwrap_err();
    problems.iter().map(|p| format!("{}: {} ({})", p.code, p.message, p.help.as_deref().unwrap_or("-"))).collect()
}

fn key<T: Parameter>(value: &T) -> KeyDocument {
    let mut document = KeyDocument::default();
    value.write_key(&mut KeyWriter::new(&mut document, &|_, _| Some(Digest::of(b"rows"))));
    document
}

fn lines(document: &KeyDocument) -> Vec<String> {
    document.entries.iter().map(|entry| format!("{} = {}", entry.path, entry.value)).collect()
}

fn minimal() -> serde_json::Value {
    json!({ "dataset": "articles", "max_seq_len": 8, "optimizer": {} })
}

#[test]
fn defaults_fill_what_the_file_leaves_out() {
    let everything: Everything = read(minimal()).unwrap();
    assert_eq!(everything.dataset.reference.stage, "articles");
    assert!(everything.validation.is_none() && everything.memory.is_none() && everything.r#where.is_none());
    assert_eq!((everything.epochs, everything.max_seq_len, everything.kind), (1, 8, 0));
    assert_eq!(everything.on_too_long, OnTooLong::Truncate);
    assert_eq!(everything.optimizer, Optimizer { learning_rate: 3e-4, betas: vec![0.9, 0.999], fused: false });
    assert_eq!(everything.save_every, Period(Duration::from_secs(60)));
}

#[test]
fn every_type_reads_its_value() {
    let everything: Everything = read(json!({
        "dataset": "articles.rows", "validation": null, "max_seq_len": 8, "on_too_long": "fail!", "epochs": 3,
        "adapters": [{ "adapter": "a" }, { "adapter": "b.adapter", "weight": 2 }],
        "optimizer": { "learning_rate": 1, "betas": [0, 0.5], "fused": true }, "save_every": "1.5h", "memory": "40GiB",
        "column_map": { "output": "summary", "dialogue": "document" }, "prompts": ["hello"], "source": "./a.jsonl",
        "type": -3, "where": "here",
    }))
    .unwrap();
    assert_eq!(everything.dataset.reference.output.as_deref(), Some("rows"));
    assert_eq!(everything.on_too_long, OnTooLong::Error);
    assert_eq!(everything.adapters[1].weight, 2.0);
    assert_eq!(everything.save_every.0, Duration::from_secs(5400));
    assert_eq!(everything.memory, Some(ByteSize(40 << 30)));
    assert_eq!(everything.column_map["output"], "summary");
    assert!(matches!(everything.prompts, Some(OneOf::Literal(list)) if list == ["hello"]));
    assert_eq!(everything.source.unwrap().text, "./a.jsonl");
    assert_eq!(everything.kind, -3);
}

#[test]
fn a_missing_key_is_reported_with_its_path() {
    let problems = read::<Everything>(json!({ "dataset": null, "optimizer": {}, "adapters": [{ "weight": 1 }] }));
    let found: Vec<_> = problems.unwrap_err().into_iter().map(|problem| (problem.code, problem.field)).collect();
    let path = |path: &str| Some(path.to_owned());
    // The key of a value that was taken away is there.
    let expected = [None, path("adapters[0].adapter"), path("max_seq_len")];
    assert_eq!(found, expected.map(|field| ("missing-key", field)));
}

#[test]
fn all_problems_of_all_depths_are_reported_at_once() {
    let found = messages::<Everything>(json!({
        "max_seq_len": 0, "epochs": 101, "optimizer": { "learning_rate": 0, "betas": [0.9, 1.0], "fused": "yes", "lr": 1 },
        "adapters": [{ "adaptor": "a" }, { "adapter": 3 }], "on_too_long": "trunkate", "memory": 5, "save_every": "1y",
        "column_map": { "a": 1 }, "source": "", "datasets": "x", "prompts": "a.b.c",
    }));
    assert_eq!(
        found,
        [
            "unknown-key: unknown key `datasets` (did you mean `dataset`?)",
            "missing-key: `dataset` is missing (-)",
            "unknown-key: unknown key `adaptor` (did you mean `adapter`?)",
            "missing-key: `adapters[0].adapter` is missing (-)",
            "wrong-type: `adapters[1].adapter`: expected the id of a stage, found an integer (-)",
            "out-of-range: `max_seq_len` must be at least 1 (-)",
            "unknown-value: `on_too_long`: unknown value `trunkate` (did you mean `truncate`?)",
            "out-of-range: `epochs` must be at least 1 and at most 100 (-)",
            "unknown-key: unknown key `lr` (did you mean `learning_rate`?)",
            "out-of-range: `optimizer.learning_rate` must be above 0 (-)",
            "out-of-range: `optimizer.betas[1]` must be at least 0 and below 1 (-)",
            "wrong-type: `optimizer.fused`: expected true or false, found a string (write true: in YAML 1.2 `yes` is a string)",
            "bad-value: `save_every`: cannot read `1y` (-)",
            "wrong-type: `memory`: expected a size such as `40GiB` or `500MB`, found an integer (add the unit, such as `5KB`)",
            "wrong-type: `column_map.a`: expected a string, found an integer (put it in quotes)",
            "bad-value: `prompts`: `a.b.c` is not a reference (-)",
            "bad-value: `source`: the path is empty (-)",
        ]
    );
}

#[test]
fn a_number_says_what_would_be_right() {
    assert_eq!(messages::<u32>(json!(-1)), ["out-of-range: the value must be at least 0 (-)"]);
    assert_eq!(messages::<u32>(json!(5_000_000_000_i64)), ["out-of-range: the value must be at most 4294967295 (-)"]);
    assert_eq!(messages::<i64>(json!(1e3)), ["wrong-type: expected an integer, found a number (write 1000)"]);
    assert_eq!(
        messages::<u64>(json!("7")),
        ["wrong-type: expected an integer, found a string (write it without quotes)"]
    );
    assert_eq!(
        messages::<f64>(json!("1e-4")),
        ["wrong-type: expected a number, found a string (write it without quotes)"]
    );
    assert_eq!(messages::<f32>(json!(1e300)), ["bad-value: not a finite number (-)"]);
}

#[test]
fn a_struct_is_a_mapping_and_a_key_without_value_is_absent() {
    assert_eq!(messages::<Optimizer>(json!([])), ["wrong-type: expected a mapping, found a list (-)"]);
    assert_eq!(read::<Optimizer>(json!(null)).unwrap().learning_rate, 3e-4);
    assert_eq!(read::<Optimizer>(json!({ "learning_rate": null })).unwrap().learning_rate, 3e-4);
    assert_eq!(messages::<Weighted>(json!({ "adapter": null })), ["missing-key: `adapter` has no value (-)"]);
}

#[test]
fn the_key_has_defaults_filled_in_and_no_cosmetic_field() {
    let everything: Everything = read(json!({
        "dataset": "articles", "max_seq_len": 8, "optimizer": { "fused": true }, "source": "./a", "where": "none",
        "adapters": [{ "adapter": "a" }], "column_map": { "a.b": "c", "d": "e" }, "save_every": "5m",
    }))
    .unwrap();
    let rows = Digest::of(b"rows");
    assert_eq!(
        lines(&key(&everything)),
        [
            format!("dataset = {rows}"),
            "validation = none".to_owned(),
            format!("adapters[0].adapter = {rows}"),
            "adapters[0].weight = 1.0".to_owned(),
            "max_seq_len = 8".to_owned(),
            "on_too_long = truncate".to_owned(),
            "epochs = 1".to_owned(),
            "optimizer.learning_rate = 0.0003".to_owned(),
            "optimizer.betas[0] = 0.9".to_owned(),
            "optimizer.betas[1] = 0.999".to_owned(),
            "memory = none".to_owned(),
            "column_map.\"a.b\" = \"c\"".to_owned(),
            "column_map.d = \"e\"".to_owned(),
            "prompts = none".to_owned(),
            "type = 0".to_owned(),
            "where = \"none\"".to_owned(),
        ]
    );
}

#[test]
fn equal_meaning_gives_an_equal_key_and_unequal_meaning_another() {
    let key_of = |json| key(&read::<Optimizer>(json).unwrap()).result_key();
    assert_eq!(key_of(json!({})), key_of(json!({ "learning_rate": 0.0003, "betas": [0.9, 0.999], "fused": true })));
    assert_eq!(key_of(json!({ "betas": [0, 0.5] })), key_of(json!({ "betas": [-0.0, 0.5] })));
    assert_ne!(key_of(json!({})), key_of(json!({ "learning_rate": 0.00030000000000000003 })));
    assert_ne!(key_of(json!({ "betas": [] })), key_of(json!({ "betas": [0.0] })));
    assert_ne!(key(&None::<String>).result_key(), key(&Some("none".to_owned())).result_key());
}

#[test]
fn a_resumable_field_is_in_the_result_key_alone() {
    let with = |epochs: u32| {
        let mut json = minimal();
        json["epochs"] = epochs.into();
        key(&read::<Everything>(json).unwrap())
    };
    assert_ne!(with(1).result_key(), with(2).result_key());
    assert_eq!(with(1).working_key(), with(2).working_key());
    assert_eq!(with(1).entries.iter().find(|entry| entry.path == "epochs").unwrap().class, Class::Resumable);
}

#[test]
fn inputs_are_visited_at_every_depth_with_their_kinds() {
    let everything: Everything = read(json!({
        "dataset": "a", "validation": "b.rows", "adapters": [{ "adapter": "c" }], "prompts": "d", "max_seq_len": 1,
        "optimizer": {},
    }))
    .unwrap();
    let mut found = Vec::new();
    everything.visit_inputs(&mut |reference, kinds| found.push((reference.stage.clone(), kinds.join("|"))));
    assert_eq!(
        found,
        [("a", "rows"), ("b", "rows"), ("c", "adapter|model"), ("d", "rows")].map(|(s, k)| (s.into(), k.into()))
    );
}

#[test]
fn an_input_that_has_not_run_is_left_open_in_the_key() {
    let weighted: Weighted = read(json!({ "adapter": "a" })).unwrap();
    let mut document = KeyDocument::default();
    let mut writer = KeyWriter::new(&mut document, &|_, _| None);
    weighted.write_key(&mut writer);
    assert_eq!(writer.unresolved.len(), 1);
    assert_eq!(document.get("adapter"), Some("not known yet"));
}

#[test]
fn a_reference_names_a_stage_and_perhaps_its_output() {
    let parse = |text| Reference::parse(text, Span::default()).map(|r| (r.stage, r.output));
    assert_eq!(parse("a"), Some(("a".into(), None)));
    assert_eq!(parse("a.model"), Some(("a".into(), Some("model".into()))));
    assert_eq!(parse("a[lora.rank=4].model"), Some(("a[lora.rank=4]".into(), Some("model".into()))));
    assert_eq!([parse(""), parse("a."), parse(".b"), parse("a.b.c")], [None, None, None, None]);
}

#[test]
fn the_schema_says_what_the_reader_checks() {
    let schema = Everything::schema();
    assert_eq!(schema["description"], "Everything at once.");
    assert_eq!(schema["required"], json!(["dataset", "max_seq_len", "optimizer"]));
    assert_eq!(schema["additionalProperties"], false);
    let of = |name: &str| schema["properties"][name].clone();
    assert_eq!(
        of("max_seq_len"),
        json!({
            "type": "integer",
            "minimum": 1,
            "description": "Longest row kept, in tokens.\n\nMore is slower.",
            "x-class": "semantic",
        })
    );
    assert_eq!(
        of("epochs"),
        json!({ "type": "integer", "minimum": 1, "maximum": 100, "default": 1, "x-class": "resumable" })
    );
    assert_eq!(of("on_too_long")["enum"], json!(["truncate", "drop", "fail!", "keep_as_it_is"]));
    assert_eq!(of("on_too_long")["default"], "truncate");
    assert_eq!(of("optimizer")["properties"]["learning_rate"]["exclusiveMinimum"], 0);
    assert_eq!(of("optimizer")["properties"]["betas"]["items"]["exclusiveMaximum"], 1);
    assert_eq!(of("column_map")["additionalProperties"]["type"], "string");
}

#[derive(Debug, Parameters)]
struct Flattened {
    #[semantic]
    dataset: Input<Rows>,
    #[semantic(flatten)]
    optimizer: Optimizer,
}

#[test]
fn a_flattened_structs_fields_are_keys_of_the_mapping_around_it() {
    let flattened: Flattened = read(json!({ "dataset": "articles", "learning_rate": 0.5 })).unwrap();
    assert_eq!(flattened.optimizer, Optimizer { learning_rate: 0.5, betas: vec![0.9, 0.999], fused: false });
    let document = key(&flattened);
    assert!(lines(&document).contains(&"learning_rate = 0.5".to_owned()), "{:?}", lines(&document));
    assert!(document.entries.iter().all(|entry| entry.path != "fused"), "a cosmetic field stays one");
    let found = messages::<Flattened>(json!({ "learning_rate": 0, "betes": [], "optimizer": {} }));
    assert_eq!(
        found,
        [
            "unknown-key: unknown key `betes` (did you mean `betas`?)",
            "unknown-key: unknown key `optimizer` (known keys: `dataset`, `learning_rate`, `betas`, `fused`)",
            "missing-key: `dataset` is missing (-)",
            "out-of-range: `learning_rate` must be above 0 (-)",
        ]
    );
    let schema = Flattened::schema();
    assert_eq!(schema["properties"]["learning_rate"]["default"], 3e-4);
    assert_eq!(schema["required"], json!(["dataset"]));
}
