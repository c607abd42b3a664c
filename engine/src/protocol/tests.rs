//! The protocol and its JSON Schema say the same: every message fits the schema, and whatever the schema requires is
//! read.

use serde_json::{Map, Value, json};

use super::*;
use crate::error::{Cause, Failure};
use crate::pin::Pinned;

const SCHEMA: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/protocol.schema.json"));

/// As much of JSON Schema as the protocol's uses; any other keyword fails, so that none is passed over.
struct Schema(Value);

impl Schema {
    fn read() -> Self {
        Self(serde_json::from_str(SCHEMA).unwrap())
    }

    fn definition(&self, name: &str) -> &Value {
        self.0["$defs"].get(name).unwrap_or_else(|| panic!("the schema has no `{name}`"))
    }

    /// What is wrong with a value, if anything is.
    fn fault(&self, schema: &Value, value: &Value) -> Option<String> {
        let mut faults = schema.as_object().unwrap().iter().filter_map(|(keyword, said)| {
            let fits = match keyword.as_str() {
                "description" | "title" | "$schema" | "$defs" | "additionalProperties" => true,
                "$ref" => return self.fault(self.definition(name_of(said)), value),
                "const" => said == value,
                "enum" => said.as_array()?.contains(value),
                "type" => said.as_array().map_or(vec![said], |types| types.iter().collect()).contains(&&type_of(value)),
                "minimum" => value.is_null() || value.as_f64() >= said.as_f64(),
                "pattern" => {
                    assert_eq!(said, "^[0-9a-f]{64}$");
                    value.as_str()?.len() == 64
                        && value.as_str()?.bytes().all(|byte| b"0123456789abcdef".contains(&byte))
                }
                "required" => said.as_array()?.iter().all(|name| value.get(name.as_str().unwrap()).is_some()),
                "properties" => {
                    let allowed = schema.get("additionalProperties") != Some(&Value::Bool(false));
                    return value.as_object()?.iter().find_map(|(name, value)| match said.get(name) {
                        Some(of_name) => self.fault(of_name, value).map(|fault| format!("{name}: {fault}")),
                        None => (!allowed).then(|| format!("`{name}` is not in the schema")),
                    });
                }
                "items" => return value.as_array()?.iter().find_map(|item| self.fault(said, item)),
                "anyOf" | "oneOf" => {
                    let fitting = said.as_array()?.iter().filter(|schema| self.fault(schema, value).is_none()).count();
                    fitting == 1
                }
                other => panic!("this test does not know the keyword `{other}`"),
            };
            (!fits).then(|| format!("{value} is not {keyword} {said}"))
        });
        let own = faults.next();
        own.or_else(|| match (schema.get("additionalProperties"), schema.get("properties")) {
            (Some(of_each @ Value::Object(_)), None) => {
                value.as_object()?.values().find_map(|value| self.fault(of_each, value))
            }
            _ => None,
        })
    }
}

/// The definition that a `$ref` names.
fn name_of(reference: &Value) -> &str {
    reference.as_str().and_then(|text| text.strip_prefix("#/$defs/")).expect("a reference to a definition")
}

fn type_of(value: &Value) -> Value {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
    .into()
}

fn digest() -> Digest {
    Digest::of(b"content")
}

fn map(value: Value) -> Map<String, Value> {
    serde_json::from_value(value).unwrap()
}

/// Every event, with and without what may be left out. The match fails to compile for an event that is not here.
fn events() -> Vec<WorkerEvent> {
    let stored =
        OutputRecord { kind: "rows".into(), tree: digest(), identity: digest(), facts: map(json!({ "rows": 3 })) };
    let failed =
        |cause, help, object| WorkerEvent::Failed(Failure { cause, messages: vec!["no".into()], help, object });
    let events = vec![
        WorkerEvent::Started { protocol: PROTOCOL },
        WorkerEvent::Progress { unit: "rows".into(), done: 1, total: Some(2), note: Some("loss 2.31".into()) },
        WorkerEvent::Progress { unit: "rows".into(), done: 1, total: None, note: None },
        WorkerEvent::Metrics { values: map(json!({ "kind": "train", "step": 1, "loss": 0.5, "grad_norm": null })) },
        WorkerEvent::Metrics { values: map(json!({ "kind": "validation", "step": 0, "loss": 2.5, "best": true })) },
        WorkerEvent::Checkpoint { step: 1 },
        WorkerEvent::Warning { message: "few rows".into() },
        WorkerEvent::Text { text: " next".into() },
        WorkerEvent::Note { message: "resuming from step 3".into() },
        WorkerEvent::Report { text: "a\nb".into(), level: ReportLevel::Result },
        WorkerEvent::Report { text: "3 rows".into(), level: ReportLevel::Detail },
        WorkerEvent::Finished { outputs: [("rows".into(), stored)].into(), how: map(json!({ "threads": 2 })) },
        failed(Cause::BadData, None, None),
        failed(Cause::CorruptInput, Some("run again".into()), Some(digest())),
    ];
    for event in &events {
        match event {
            WorkerEvent::Started { .. }
            | WorkerEvent::Progress { .. }
            | WorkerEvent::Metrics { .. }
            | WorkerEvent::Checkpoint { .. }
            | WorkerEvent::Warning { .. }
            | WorkerEvent::Note { .. }
            | WorkerEvent::Text { .. }
            | WorkerEvent::Report { .. }
            | WorkerEvent::Finished { .. }
            | WorkerEvent::Failed(_) => {}
        }
    }
    events
}

#[test]
fn every_event_fits_the_schema_and_is_read_back() {
    let schema = Schema::read();
    for event in events() {
        let line = serde_json::to_value(&event).unwrap();
        assert_eq!(schema.fault(&schema.0, &line), None, "{line}");
        assert_eq!(serde_json::from_value::<WorkerEvent>(line).unwrap(), event);
    }
}

#[test]
fn the_schema_knows_no_event_or_cause_that_is_not_read() {
    let schema = Schema::read();
    for event in schema.definition("event")["oneOf"].as_array().unwrap() {
        let name = name_of(&event["$ref"]);
        let of_name = |event: &&WorkerEvent| serde_json::to_value(event).unwrap()["event"] == name;
        assert!(events().iter().any(|event| of_name(&event)), "{name}");
    }
    for cause in schema.definition("cause")["enum"].as_array().unwrap() {
        serde_json::from_value::<Cause>(cause.clone()).unwrap();
    }
}

#[test]
fn every_cause_is_in_the_schema() {
    let schema = Schema::read();
    let causes = [
        Cause::BadData,
        Cause::BadParameters,
        Cause::ChangedWhileRunning,
        Cause::CorruptInput,
        Cause::Machine,
        Cause::Network,
        Cause::Numeric,
        Cause::Cancelled,
        Cause::Timeout,
        Cause::Crashed,
        Cause::Internal,
    ];
    for cause in causes {
        assert_eq!(schema.fault(schema.definition("cause"), &json!(cause)), None);
    }
}

/// A worker in another language may leave out what the schema does not require.
#[test]
fn what_the_schema_does_not_require_may_be_left_out() {
    let schema = Schema::read();
    for event in events() {
        let whole = serde_json::to_value(&event).unwrap();
        let required = schema.definition(whole["event"].as_str().unwrap())["required"].as_array().unwrap();
        let least: Map<String, Value> = whole
            .as_object()
            .unwrap()
            .clone()
            .into_iter()
            .filter(|(name, _)| required.contains(&json!(name)))
            .collect();
        assert!(serde_json::from_value::<WorkerEvent>(least.clone().into()).is_ok(), "{least:?}");
        for name in least.keys() {
            let mut less = least.clone();
            less.remove(name);
            assert!(schema.fault(&schema.0, &less.clone().into()).is_some(), "{less:?}");
            assert!(serde_json::from_value::<WorkerEvent>(less.into()).is_err(), "`{name}` is required by one alone");
        }
    }
}

#[test]
fn a_job_fits_the_schema() {
    let schema = Schema::read();
    let grant = InputGrant { kind: "rows".into(), tree: digest(), identity: digest(), facts: Some(Facts::new()) };
    let file = FileGrant {
        path: "/data/a.jsonl".into(),
        relative: "a.jsonl".into(),
        digest: digest(),
        size: 7,
        named: Some(Named::Below),
    };
    let job = Job {
        protocol: PROTOCOL,
        stage: "tokens".into(),
        kind: "tokenize".into(),
        parameters: json!({ "max_seq_len": 64 }),
        inputs: [("articles.rows".to_owned(), grant)].into(),
        files: [("source".to_owned(), vec![file])].into(),
        pins: [("hub-model:a/b@main".to_owned(), Pinned::commit("1"))].into(),
        network: Network::Offline,
        outputs: vec![Output::new("tokens", "tokens")],
        store: "/home/store".into(),
        inputs_folder: "/home/store/staging/1/inputs".into(),
        staging: "/home/store/staging/1".into(),
        working: "/home/store/partial/1".into(),
        run_folder: "/home/runs/1/tokens".into(),
        profile: Some(ProfileRequest { origin_unix_micros: 1_700_000_000_000_000, process: 2 }),
        key: digest(),
        threads: 2,
        devices: DeviceGrant::PROCESSOR,
    };
    let mut job = serde_json::to_value(job).unwrap();
    assert_eq!(schema.fault(schema.definition("job"), &job), None);
    assert!(serde_json::from_value::<Job>(job.clone()).is_ok());
    job["inputs"]["articles.rows"]["tree"] = "short".into();
    assert!(schema.fault(schema.definition("job"), &job).is_some());
}
