//! The JSON Schema of derived parameters.

use cache::{Class, KeyDocument, KeyEntry};
use serde_json::{Map, json};

use super::{Json, KeyWriter, Limits, Parameter, Reader, Record, have_equal_keys};
use crate::file::tree::Node;

/// The keyword that says how a field takes part in keys: an annotation, which validators pass over.
pub const CLASS: &str = "x-class";

/// Builds the schema of a closed mapping, field by field.
#[derive(Default)]
pub struct ObjectSchema {
    description: &'static str,
    properties: Map<String, Json>,
    required: Vec<Json>,
    /// What holds for each variant of the choices in it.
    conditions: Vec<Json>,
    /// For each choice in it the names of its variants.
    choices: Vec<Vec<&'static str>>,
}

impl ObjectSchema {
    /// Sets the doc comment of the whole, unless it has one: what is flattened describes only itself.
    #[must_use]
    pub fn described(mut self, description: &'static str) -> Self {
        if self.description.is_empty() {
            self.description = description;
        }
        self
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
        if let Some(default) = default_of(default).or_else(|| empty_mapping(default)) {
            property.insert("default".to_owned(), default);
        }
        self.properties.insert(name.to_owned(), property.into());
        self
    }

    /// Adds the fields of a flattened struct or choice.
    #[must_use]
    pub fn with_fields_of<T: Record>(self) -> Self {
        T::add_to(self)
    }

    /// Adds a choice: the tag, the options of all variants, and for each variant a condition with those that it has.
    ///
    /// Each variant comes with its doc comment and a schema of its options. Where variants have an option in common,
    /// the property has what they agree on, and the conditions have the rest.
    #[must_use]
    pub fn with_choice(
        mut self,
        tag: &str,
        description: &'static str,
        default: Option<&'static str>,
        variants: Vec<(&'static str, &'static str, Self)>,
    ) -> Self {
        let names: Vec<_> = variants.iter().map(|(name, doc, _)| (*name, *doc)).collect();
        // The doc comment is of the whole mapping, or of the tag where the mapping has one of its own.
        let of_tag = if self.description.is_empty() { "" } else { description };
        self = self.described(description);
        let mut property = choice_schema(of_tag, &names);
        if let Some(default) = default {
            property["default"] = default.into();
        }
        property[CLASS] = json!(Class::Semantic);
        // The tag stands first: it says how to read the rest.
        self.properties.shift_insert(0, tag.to_owned(), property);
        if default.is_none() {
            self.required.push(tag.into());
        }
        let mut options: Map<String, Json> = Map::new();
        for name in variants.iter().flat_map(|(_, _, schema)| schema.properties.keys()) {
            options.entry(name.clone()).or_insert_with(|| option_of_all(name, &variants));
        }
        for (name, _, schema) in variants {
            self.conditions.push(condition(tag, name, default == Some(name), schema, &options));
        }
        self.properties.append(&mut options);
        self.choices.push(names.into_iter().map(|(name, _)| name).collect());
        self
    }

    /// Adds the fields of `keys`, of which one alone is given; at least one where none has a default.
    #[must_use]
    pub fn with_one_of(mut self, mut keys: Self, default: Option<&'static str>) -> Self {
        let names: Vec<&String> = keys.properties.keys().collect();
        self.conditions.push(match default {
            Some(_) => json!({ "not": { "required": names } }),
            None => json!({ "oneOf": names.iter().map(|name| json!({ "required": [name] })).collect::<Vec<_>>() }),
        });
        self.properties.append(&mut keys.properties);
        self
    }

    /// The schema.
    pub fn finish(self) -> Json {
        let mut schema = Map::new();
        schema.insert("type".to_owned(), "object".into());
        schema.insert("properties".to_owned(), self.properties.into());
        if !self.required.is_empty() {
            schema.insert("required".to_owned(), self.required.into());
        }
        schema.insert("additionalProperties".to_owned(), false.into());
        if !self.conditions.is_empty() {
            schema.insert("allOf".to_owned(), self.conditions.into());
        }
        let mut described = Map::new();
        describe(&mut described, self.description);
        match &self.choices[..] {
            // The bare name stands for the mapping with it.
            [names] => described.insert("anyOf".to_owned(), json!([{ "enum": names }, schema])),
            _ => {
                described.append(&mut schema);
                None
            }
        };
        described.into()
    }
}

/// What the variants that have an option agree on: all of it, where they say the same.
fn option_of_all(name: &str, variants: &[(&'static str, &'static str, ObjectSchema)]) -> Json {
    let having = variants.iter().filter_map(|(variant, _, schema)| Some((*variant, schema.properties.get(name)?)));
    let having: Vec<(&str, &Json)> = having.collect();
    let (_, first) = having[0];
    let Json::Object(mut common) = first.clone() else { return first.clone() };
    common.retain(|keyword, value| having.iter().all(|(_, other)| other.get(keyword) == Some(value)));
    if !common.contains_key("description") {
        let mut text = String::new();
        for (variant, description) in having.iter().filter_map(|(at, it)| Some((at, it["description"].as_str()?))) {
            text.push_str(&format!("\n\n`{variant}`: {description}"));
        }
        describe(&mut common, text.trim());
    }
    let differ = |keyword: &str| having.iter().any(|(_, other)| other.get(keyword) != first.get(keyword));
    if ["type", "enum", "anyOf", "items"].into_iter().any(differ) {
        let mut alternatives: Vec<Json> = Vec::new();
        for (_, other) in &having {
            let mut other = (*other).clone();
            for annotation in ["description", "default", CLASS] {
                other.as_object_mut().and_then(|other| other.remove(annotation));
            }
            if !alternatives.contains(&other) {
                alternatives.push(other);
            }
        }
        common.retain(|keyword, _| ["description", "default", CLASS].contains(&keyword.as_str()));
        common.insert("anyOf".to_owned(), alternatives.into());
    }
    common.into()
}

/// What holds where the tag names this variant, or where it is left out and this is the default.
fn condition(tag: &str, name: &str, is_default: bool, schema: ObjectSchema, options: &Map<String, Json>) -> Json {
    let mut is_this = json!({ "properties": { tag: { "const": name } } });
    if !is_default {
        is_this["required"] = json!([tag]);
    }
    let foreign = options.keys().filter(|option| !schema.properties.contains_key(*option));
    let foreign: Map<String, Json> = foreign.map(|option| (option.clone(), Json::Bool(false))).collect();
    let mut properties = schema.properties;
    properties.extend(foreign);
    let mut then = json!({ "properties": properties });
    if !schema.required.is_empty() {
        then["required"] = schema.required.into();
    }
    if !schema.conditions.is_empty() {
        then["allOf"] = schema.conditions.into();
    }
    json!({ "if": is_this, "then": then })
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

/// A default as JSON, where it is one value or a list of them: the texts that a key would hold say what it is.
fn default_of<T: Parameter>(default: &T) -> Option<Json> {
    let mut document = KeyDocument::default();
    default.write_key(&mut KeyWriter::new(&mut document, &|_, _| None));
    let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| text.into());
    match document.entries.as_slice() {
        [entry] if entry.path.is_empty() => (entry.value != super::collection::ABSENT).then(|| value(&entry.value)),
        entries => {
            let is_item = |(index, entry): (usize, &KeyEntry)| entry.path == format!("[{index}]");
            let is_list = !entries.is_empty() && entries.iter().enumerate().all(is_item);
            is_list.then(|| entries.iter().map(|entry| value(&entry.value)).collect())
        }
    }
}

/// `{}` where that is how a file would say this default: a mapping of which every field has its own.
fn empty_mapping<T: Parameter>(default: &T) -> Option<Json> {
    let empty = json!({});
    let mut reader = Reader::default();
    let read = T::read(&Node::from_json(&empty), &mut reader)?;
    (reader.problems.is_empty() && have_equal_keys(&read, default)).then_some(empty)
}
