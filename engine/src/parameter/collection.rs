//! Optional values, lists and mappings with keys of the user's choice.

use serde_json::json;

use super::{Json, KeyWriter, Mapping, Parameter, Reader, Reference, dotted};
use crate::file::tree::{Entry, Node, Value};

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
        let Value::List(items) = &node.value else {
            reader.wrong_type(node, "a list");
            return None;
        };
        // Every item is read before the first one that failed ends the list.
        let of_item = |(index, item): (usize, &Node)| {
            reader.under(format!("{}[{index}]", reader.path), |reader| T::read(item, reader))
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
        json!({ "type": "array", "items": T::schema() })
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        for value in self {
            value.visit_inputs(visit);
        }
    }
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
        let values: Vec<Option<(String, T)>> = entries.iter().map(of_entry).collect();
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
