//! The JSON Schema of pipeline files, for editors: what `pipeline schema` prints.
//!
//! It is put together from what the readers themselves say of their fields, so it cannot disagree with them about
//! names, types, limits or defaults. What a schema cannot say (references, cycles, what a kind checks) `pipeline
//! validate` does.

use serde_json::{Map, Value, json};

use crate::executor::ExecutorSettings;
use crate::file::overrides::STAGE_KEYS;
use crate::parameter::{CLASS, Parameter, Period};
use crate::plan::Retries;
use crate::plan::entry::{FILE_KEYS, FORMAT_VERSION, PublishTarget};
use crate::plan::gate::GateKeys;
use crate::plan::resources::ResourceKeys;
use crate::remote::RemoteKey;
use crate::stage::{Kind, Registry};
use crate::track::TrackKey;

/// The JSON Schema (draft 2020-12) of a whole pipeline file, for the kinds of a registry.
pub fn json_schema(registry: &Registry) -> Value {
    let mut definitions = Map::new();
    definitions.insert("stage".to_owned(), stage(registry));
    definitions.insert("reference".to_owned(), reference());
    definitions.insert("resources".to_owned(), or_reference(ResourceKeys::schema()));
    definitions.insert("retries".to_owned(), or_reference(Retries::schema()));
    definitions.insert("executor".to_owned(), or_reference(ExecutorSettings::schema()));
    definitions.insert("timeout".to_owned(), or_reference(Period::schema()));
    for kind in registry.kinds() {
        definitions.insert(parameters_name(kind), or_reference((kind.schema)()));
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pipeline file",
        "type": "object",
        "properties": closed(&FILE_KEYS, file_key),
        "required": ["version", "stages"],
        "additionalProperties": false,
        "$defs": definitions,
    })
}

fn file_key(key: &str) -> Value {
    match key {
        "version" => json!({ "const": FORMAT_VERSION, "description": "The version of the file format." }),
        "name" => json!({ "type": "string", "description": "The pipeline's name; without one, the file's." }),
        "include" => json!({
            "type": "object",
            "description": "Other pipeline files, by the prefix that their stages get: `data: ./data.yaml` gives `data/articles`.",
            "propertyNames": { "pattern": "^[A-Za-z0-9_-]+$" },
            "additionalProperties": {
                "anyOf": [
                    { "type": "string" },
                    {
                        "type": "object",
                        "properties": {
                            "file": { "type": "string", "description": "The file, relative to this one." },
                            "vars": { "type": "object", "description": "Values for its variables." },
                        },
                        "required": ["file"],
                        "additionalProperties": false,
                    },
                ],
            },
        }),
        "vars" => json!({ "type": "object", "description": "The variables: `${vars.name}` is replaced by the value of \
                                                            `name`." }),
        "slots" => json!({
            "type": "object",
            "description": "How many there are of each thing that stages take with `resources.slots` while they run.",
            "additionalProperties": { "anyOf": [{ "type": "integer", "minimum": 0 }, { "$ref": "#/$defs/reference" }] },
        }),
        "executor" => json!({
            "$ref": "#/$defs/executor",
            "description": "Where stages run that do not say it themselves: on this machine, or as jobs of a Slurm cluster.",
        }),
        "stages" => json!({
            "type": "object",
            "description": "The stages, by id.",
            "propertyNames": { "pattern": "^[A-Za-z0-9_-]+$" },
            "minProperties": 1,
            "additionalProperties": { "$ref": "#/$defs/stage" },
        }),
        "gates" => json!({
            "type": "object",
            "description": "What figures of stages must be like before anything is published: `stage.figure`, and a bound.",
            "additionalProperties": GateKeys::schema(),
        }),
        "publish" => json!({
            "type": "object",
            "description": "Outputs copied out of the store when their stage is done: `stage` or `stage.output`, and a folder.",
            "additionalProperties": PublishTarget::schema(),
        }),
        "remote" => {
            let mut schema = RemoteKey::schema();
            schema["description"] = "Where results are shared: a place, or a place and its settings.".into();
            or_reference(schema)
        }
        "track" => {
            let mut schema = TrackKey::schema();
            schema["description"] =
                "The trackers that its runs are logged to: MLflow, W&B, SwanLab. TensorBoard files are always written."
                    .into();
            or_reference(schema)
        }
        other => unreachable!("every key of a file has a schema, and `{other}` has none"),
    }
}

/// One stage: its kind decides what may stand under `with:`.
fn stage(registry: &Registry) -> Value {
    let names: Vec<&str> = registry.kinds().map(|kind| kind.name).collect();
    let by_kind: Vec<Value> = registry.kinds().map(with_of).collect();
    let mut properties = closed(&STAGE_KEYS, stage_key);
    properties["uses"] = json!({ "enum": names, "description": about(registry) });
    let mut stage = json!({
        "type": "object",
        "properties": properties,
        "required": ["uses"],
        "additionalProperties": false,
    });
    if !by_kind.is_empty() {
        stage["allOf"] = by_kind.into();
    }
    stage
}

fn stage_key(key: &str) -> Value {
    match key {
        "uses" => json!({ "type": "string" }),
        "with" => json!({ "description": "The parameters of its kind." }),
        "needs" => json!({
            "type": "array",
            "description": "Stages to wait for without reading them.",
            "items": { "type": "string" },
        }),
        "resources" => json!({ "$ref": "#/$defs/resources", "description": "The devices, memory and threads that it \
                                                                            requests." }),
        "retries" => json!({
            "$ref": "#/$defs/retries",
            "description": "How often it is tried again after a failure that may pass, or when and how often.",
        }),
        "executor" => {
            json!({ "$ref": "#/$defs/executor", "description": "Where it runs; keys that it does not set have the file's values." })
        }
        "timeout" => json!({ "$ref": "#/$defs/timeout", "description": "How long it may take, such as `12h`." }),
        "profile" => or_reference(json!({
            "type": "boolean",
            "default": false,
            "description": "Record where its time goes: a table per kernel, and a trace.",
        })),
        "matrix" => json!({
            "type": "object",
            "description": "One child of this stage for each combination of these values, by the path of a parameter: `lora.rank: [4, 8]`.",
            "properties": {
                "exclude": { "type": "array", "items": { "type": "object" }, "description": "Combinations that are left out." },
                "include": { "type": "array", "items": { "type": "object" }, "description": "Further combinations." },
            },
            "additionalProperties": or_reference(json!({ "type": "array", "minItems": 1 })),
        }),
        "when" => json!({
            "anyOf": [{ "type": "boolean" }, { "type": "string" }],
            "description": "A condition: where it is false, this stage and those that need it are left out.",
        }),
        other => unreachable!("every key of a stage has a schema, and `{other}` has none"),
    }
}

/// The parameters of a kind apply to the stages that use it; a kind with a required field needs a `with:`.
fn with_of(kind: &Kind) -> Value {
    let name = parameters_name(kind);
    let mut then = json!({ "properties": { "with": { "$ref": format!("#/$defs/{name}") } } });
    if (kind.schema)().get("required").is_some() {
        then["required"] = json!(["with"]);
    }
    json!({ "if": { "properties": { "uses": { "const": kind.name } }, "required": ["uses"] }, "then": then })
}

fn about(registry: &Registry) -> String {
    let lines: Vec<String> = registry.kinds().map(|kind| format!("`{}`: {}", kind.name, kind.about)).collect();
    lines.join("\n\n")
}

fn parameters_name(kind: &Kind) -> String {
    format!("{}_parameters", kind.name)
}

fn reference() -> Value {
    json!({ "type": "string", "pattern": r"^\$\{\s*(vars|env|matrix)\.[^}]+\}$", "description": "A variable: `${vars.name}`." })
}

/// A schema, with every value in it that is not text replaceable by one whole reference.
fn or_reference(mut schema: Value) -> Value {
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for property in properties.values_mut() {
            *property = or_reference(property.take());
        }
    }
    for inner in ["items", "additionalProperties"] {
        if let Some(inner) = schema.get_mut(inner).filter(|inner| inner.is_object()) {
            *inner = or_reference(inner.take());
        }
    }
    for alternative in schema.get_mut("anyOf").and_then(Value::as_array_mut).into_iter().flatten() {
        *alternative = or_reference(alternative.take());
    }
    // What holds for each variant of a choice; the condition itself and options that a variant lacks stay as they are.
    for condition in schema.get_mut("allOf").and_then(Value::as_array_mut).into_iter().flatten() {
        let options = condition.pointer_mut("/then/properties").and_then(Value::as_object_mut);
        for option in options.into_iter().flat_map(|options| options.values_mut()).filter(|option| option.is_object()) {
            *option = or_reference(option.take());
        }
    }
    if takes_any_text(&schema) {
        return schema;
    }
    let mut outer = Map::new();
    for annotation in ["description", "default", CLASS] {
        if let Some(value) = schema.as_object_mut().and_then(|schema| schema.remove(annotation)) {
            outer.insert(annotation.to_owned(), value);
        }
    }
    outer.insert("anyOf".to_owned(), json!([schema, { "$ref": "#/$defs/reference" }]));
    outer.into()
}

/// Whether a reference fits a schema already.
fn takes_any_text(schema: &Value) -> bool {
    let any = |schemas: &Value| schemas.as_array().is_some_and(|schemas| schemas.iter().any(takes_any_text));
    let is_text = schema.get("type").is_some_and(|kind| kind == "string") && schema.get("pattern").is_none();
    is_text || schema.get("anyOf").is_some_and(any)
}

fn closed(keys: &[&str], schema: impl Fn(&str) -> Value) -> Value {
    keys.iter().map(|key| ((*key).to_owned(), schema(key))).collect::<Map<_, _>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::Output;
    use crate::context::StageContext;
    use crate::error::StageError;
    use crate::parameter::{ArtifactKind, Input, OneOf, Parameters};
    use crate::stage::{Stage, StageKind};

    struct Rows;

    impl ArtifactKind for Rows {
        const KINDS: &'static [&'static str] = &["rows"];
    }

    /// How.
    #[derive(Parameters)]
    enum Method {
        /// Low rank.
        Lora,
        Full,
    }

    #[derive(Parameters)]
    struct Train {
        /// The rows.
        #[semantic]
        data: Input<Rows>,
        #[semantic(default = Method::Lora)]
        method: Method,
        /// How many.
        #[semantic(range = 1.., default = 3)]
        count: u32,
        #[semantic]
        names: Option<OneOf<Vec<f64>, Input<Rows>>>,
    }

    impl StageKind for Train {
        const NAME: &'static str = "train";
        const VERSION: u32 = 1;
        const ABOUT: &'static str = "Trains.";
    }

    impl Stage for Train {
        fn outputs(&self) -> Vec<Output> {
            Vec::new()
        }

        fn run(&self, _: &mut StageContext) -> Result<(), StageError> {
            Ok(())
        }
    }

    #[test]
    fn the_schema_covers_the_file_its_stages_and_their_parameters() {
        let schema = json_schema(&Registry::new().with::<Train>());
        let keys = |value: &Value| value.as_object().map(|map| map.keys().cloned().collect::<Vec<_>>());
        assert_eq!(keys(&schema["properties"]), Some(FILE_KEYS.map(str::to_owned).to_vec()));
        let stage = &schema["$defs"]["stage"];
        assert_eq!(keys(&stage["properties"]), Some(STAGE_KEYS.map(str::to_owned).to_vec()));
        assert_eq!(stage["properties"]["uses"], json!({ "enum": ["train"], "description": "`train`: Trains." }));
        assert_eq!(
            stage["allOf"][0]["then"],
            json!({ "properties": { "with": { "$ref": "#/$defs/train_parameters" } }, "required": ["with"] })
        );
    }

    #[test]
    fn a_value_that_is_not_text_may_be_a_reference() {
        let schema = json_schema(&Registry::new().with::<Train>());
        let reference = json!({ "$ref": "#/$defs/reference" });
        let parameters = &schema["$defs"]["train_parameters"]["anyOf"][0];
        assert_eq!(parameters["required"], json!(["data"]));
        assert_eq!(
            parameters["properties"],
            json!({
                "data": { "x-class": "semantic", "type": "string", "description": "The rows.\n\nA stage that makes rows: `stage` or `stage.output`." },
                "method": {
                    "x-class": "semantic",
                    "description": "How.\n\n`lora`: Low rank.",
                    "default": "lora",
                    "anyOf": [{ "enum": ["lora", "full"] }, reference],
                },
                "count": { "x-class": "semantic", "description": "How many.", "default": 3, "anyOf": [{ "type": "integer", "minimum": 1 }, reference] },
                "names": {
                    "x-class": "semantic",
                    "anyOf": [
                        { "anyOf": [{ "type": "array", "items": { "anyOf": [{ "type": "number" }, reference] } }, reference] },
                        { "type": "string", "description": "A stage that makes rows: `stage` or `stage.output`." },
                    ],
                },
            })
        );
    }

    #[test]
    fn every_reference_of_the_schema_leads_somewhere() {
        let schema = json_schema(&Registry::new().with::<Train>());
        let text = schema.to_string();
        let targets: Vec<&str> =
            text.split("\"$ref\":\"#/$defs/").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        assert!(targets.len() > 8, "{targets:?}");
        for target in targets {
            assert!(schema["$defs"].get(target).is_some(), "{target}");
        }
    }
}
