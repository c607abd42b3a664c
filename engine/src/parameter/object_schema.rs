//! The JSON Schema of derived parameters.

use cache::{Class, KeyDocument};
use serde_json::{Map, json};

use super::{Json, KeyWriter, Limits, Parameter, Record};

/// The keyword that says how a field takes part in keys: an annotation, which validators pass over.
pub const CLASS: &str = "x-class";

/// Builds the schema of a closed mapping, field by field.
pub struct ObjectSchema {
    description: &'static str,
    properties: Map<String, Json>,
    required: Vec<Json>,
}

impl ObjectSchema {
    /// The schema of a struct with this doc comment.
    pub fn new(description: &'static str) -> Self {
        Self { description, properties: Map::new(), required: Vec::new() }
    }

    /// Adds a field without a default.
    #[must_use]
    pub fn with<T: Parameter>(mut self, name: &str, description: &str, class: Class, limits: &Limits) -> Self {
        self.properties.insert(name.to_owned(), property::<T>(description, class, limits).into());
        if T::when_absent().is_none() {
            self.required.push(name.into());
        }
        self
    }

    /// Adds a field with a default.
    #[must_use]
    pub fn with_default<T: Parameter>(
        mut self,
        name: &str,
        description: &str,
        class: Class,
        limits: &Limits,
        default: &T,
    ) -> Self {
        let mut property = property::<T>(description, class, limits);
        if let Some(default) = default_of(default) {
            property.insert("default".to_owned(), default);
        }
        self.properties.insert(name.to_owned(), property.into());
        self
    }

    /// Adds the fields of a flattened struct.
    #[must_use]
    pub fn with_fields_of<T: Record>(mut self) -> Self {
        let mut schema = T::schema();
        if let Some(properties) = schema["properties"].as_object_mut() {
            self.properties.append(properties);
        }
        if let Some(required) = schema["required"].as_array_mut() {
            self.required.append(required);
        }
        self
    }

    /// The schema.
    pub fn finish(self) -> Json {
        let mut schema = Map::new();
        describe(&mut schema, self.description);
        schema.insert("type".to_owned(), "object".into());
        schema.insert("properties".to_owned(), self.properties.into());
        if !self.required.is_empty() {
            schema.insert("required".to_owned(), self.required.into());
        }
        schema.insert("additionalProperties".to_owned(), false.into());
        schema.into()
    }
}

/// The schema of a choice of names, each with its doc comment.
pub fn choice_schema(description: &str, names: &[(&'static str, &'static str)]) -> Json {
    let mut schema = Map::new();
    let mut text = description.to_owned();
    for (name, doc) in names.iter().filter(|(_, doc)| !doc.is_empty()) {
        text.push_str(&format!("\n\n`{name}`: {doc}"));
    }
    describe(&mut schema, text.trim());
    schema.insert("enum".to_owned(), names.iter().map(|(name, _)| *name).collect());
    schema.into()
}

/// The schema of a value, with what the field that holds it adds.
fn property<T: Parameter>(description: &str, class: Class, limits: &Limits) -> Map<String, Json> {
    let Json::Object(mut schema) = T::schema() else { return Map::new() };
    if let Some(of_type) = schema.get("description").and_then(Json::as_str)
        && !description.is_empty()
    {
        let both = json!(format!("{description}\n\n{of_type}"));
        schema.insert("description".to_owned(), both);
    } else {
        describe(&mut schema, description);
    }
    limits.into_schema(&mut schema);
    schema.insert(CLASS.to_owned(), json!(class));
    schema
}

fn describe(schema: &mut Map<String, Json>, description: &str) {
    if !description.is_empty() {
        schema.insert("description".to_owned(), description.into());
    }
}

/// A default as JSON, where it is one value: the text that a key would hold says what it is.
fn default_of<T: Parameter>(default: &T) -> Option<Json> {
    let mut document = KeyDocument::default();
    default.write_key(&mut KeyWriter::new(&mut document, &|_, _| None));
    let [entry] = document.entries.as_slice() else { return None };
    if !entry.path.is_empty() || entry.value == super::collection::ABSENT {
        return None;
    }
    Some(serde_json::from_str(&entry.value).unwrap_or_else(|_| entry.value.as_str().into()))
}
