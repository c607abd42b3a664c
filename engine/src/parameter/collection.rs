//! Optional values, lists and mappings with keys of the user's choice.

use serde_json::json;

use super::fields::unknown_key;
use super::scalar::read_text;
use super::{Collected, Json, KeyWriter, Mapping, Named, Parameter, Reader, Reference, dotted};
use crate::file::tree::{Entry, Node, Value};

/// The key of a mapping that stands for all children of a swept stage, in a list or in its place.
pub(crate) const COLLECT: &str = "collect";

/// What a key holds for a value that is not there.
pub(super) const ABSENT: &str = "none";

impl<T: Parameter> Parameter for Option<T> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match node.value {
            Value::Null => Some(None),
            _ => T::read(node, reader).map(Some),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Some(value) => value.write_key(key),
            None => key.value(ABSENT),
        }
    }

    fn schema() -> Json {
        T::schema()
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        if let Some(value) = self {
            value.visit_inputs(visit);
        }
    }

    fn when_absent() -> Option<Self> {
        Some(None)
    }
}

impl<T: Parameter> Parameter for Vec<T> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        if let Some(place) = T::collected().filter(|_| node.get(COLLECT).is_some()) {
            collect(node, place, reader);
            return None;
        }
        let Value::List(items) = &node.value else {
            reader.wrong_type(node, "a list");
            return None;
        };
        // Every item is read before the first one that failed ends the list.
        let of_item = |(index, item): (usize, &Node)| {
            reader.under(format!("{}[{index}]", reader.path), |reader| match T::collected() {
                Some(place) if item.get(COLLECT).is_some() => {
                    collect(item, place, reader);
                    None
                }
                _ => T::read(item, reader),
            })
        };
        let values: Vec<Option<T>> = items.iter().enumerate().map(of_item).collect();
        values.into_iter().collect()
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        if self.is_empty() {
            key.value("[]");
        }
        for (index, value) in self.iter().enumerate() {
            key.item(index, |key| value.write_key(key));
        }
    }

    fn schema() -> Json {
        let Some(place) = T::collected() else { return json!({ "type": "array", "items": T::schema() }) };
        let all = all_children(place, T::schema());
        json!({ "anyOf": [{ "type": "array", "items": { "anyOf": [T::schema(), all] } }, all] })
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        for value in self {
            value.visit_inputs(visit);
        }
    }
}

/// One value, or a list of them; `{ collect: stage }` is a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OneOrMore<T>(pub Vec<T>);

impl<T> Default for OneOrMore<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Parameter> Parameter for OneOrMore<T> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let is_list = matches!(node.value, Value::List(_)) || node.get(COLLECT).is_some();
        if is_list { Vec::read(node, reader).map(Self) } else { T::read(node, reader).map(|one| Self(vec![one])) }
    }

    /// A list of one is that one.
    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self.0.as_slice() {
            [one] => one.write_key(key),
            _ => self.0.write_key(key),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [T::schema(), Vec::<T>::schema()] })
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        self.0.visit_inputs(visit);
    }
}

/// Where the name of a stage goes in a mapping with these fields: into the only one that is such a name.
pub fn only_reference(fields: &[(&'static str, Option<Collected>)]) -> Option<Collected> {
    // Variants of a choice may have an option in common.
    let mut names: Vec<_> =
        fields.iter().filter(|(_, collected)| *collected == Some(Collected::Itself)).map(|(name, _)| *name).collect();
    names.dedup();
    match names[..] {
        [name] => Some(Collected::Field(name)),
        _ => None,
    }
}

/// Notes a `{ collect: stage }`: who knows the children writes them out, and the list is read again. What else stands
/// in the mapping goes into each item.
fn collect(node: &Node, place: Collected, reader: &mut Reader) {
    let Value::Map(entries) = &node.value else { return };
    for entry in entries {
        match (entry.key.as_str(), place) {
            (COLLECT, _) => collect_stage(&entry.value, place, reader),
            (key, Collected::Field(field)) if key != field => {}
            _ => reader.problems.push(unknown_key(&entry.key, entry.key_span, &[COLLECT])),
        }
    }
}

fn collect_stage(node: &Node, place: Collected, reader: &mut Reader) {
    let Some(text) = read_text(node, reader, "the id of a stage") else { return };
    match Reference::parse(text, node.span) {
        Some(reference) => {
            reader.named.push(Named { path: reader.path.clone(), reference, collected: Some(place) });
        }
        None => reader.bad_value(node, format!("`{text}` is not a reference"), "`stage` or `stage.output`"),
    }
}

/// The schema of `{ collect: stage }`. It is under `allOf`, since its fields are those of the items, declared
/// there.
fn all_children(place: Collected, mut item: Json) -> Json {
    let stage = json!({ "type": "string", "description": "Every child of this stage, which has a `matrix:`." });
    let mut properties = serde_json::Map::new();
    if let Collected::Field(field) = place {
        properties = item["properties"].as_object_mut().map(std::mem::take).unwrap_or_default();
        properties.remove(field);
    }
    properties.insert(COLLECT.to_owned(), stage);
    let all = json!({
        "type": "object", "properties": properties, "required": [COLLECT], "additionalProperties": false,
    });
    json!({ "allOf": [all] })
}

impl<T: Parameter> Parameter for Mapping<T> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let Value::Map(entries) = &node.value else {
            reader.wrong_type(node, "a mapping");
            return None;
        };
        let of_entry = |entry: &Entry| {
            let value = reader.under(dotted(&reader.path, &entry.key), |reader| T::read(&entry.value, reader));
            value.map(|value| (entry.key.clone(), value))
        };
        // What is null counts as left out.
        let given = entries.iter().filter(|entry| entry.value.value != Value::Null);
        let values: Vec<Option<(String, T)>> = given.map(of_entry).collect();
        values.into_iter().collect()
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        if self.is_empty() {
            key.value("{}");
        }
        for (name, value) in self {
            key.entry(name, |key| value.write_key(key));
        }
    }

    fn schema() -> Json {
        json!({ "type": "object", "additionalProperties": T::schema() })
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        for value in self.values() {
            value.visit_inputs(visit);
        }
    }
}

impl<T: Parameter, const N: usize> Parameter for [T; N] {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let values = Vec::<T>::read(node, reader)?;
        let found = values.len();
        let exact = values.try_into().ok();
        if exact.is_none() {
            reader.out_of_range(node, &format!("a list of {N}, and it has {found}"));
        }
        exact
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        for (index, value) in self.iter().enumerate() {
            key.item(index, |key| value.write_key(key));
        }
    }

    fn schema() -> Json {
        json!({ "type": "array", "items": T::schema(), "minItems": N, "maxItems": N })
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        for value in self {
            value.visit_inputs(visit);
        }
    }
}
