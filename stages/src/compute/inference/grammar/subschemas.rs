//! The schemas in a schema, apart from the values in it.

use serde_json::{Map, Value};

/// What is in the value of a keyword.
pub(super) enum Holds {
    /// A value that a document may have, whatever it looks like.
    Data,
    /// Schemas by name: no name is a keyword.
    Named,
    /// A schema, a list of them, or none.
    Schemas,
}

impl Holds {
    pub(super) fn of(keyword: &str) -> Self {
        match keyword {
            "const" | "enum" | "default" | "examples" => Self::Data,
            "properties" | "patternProperties" | "$defs" | "definitions" => Self::Named,
            _ => Self::Schemas,
        }
    }
}

/// Visits a schema and those in it.
pub(super) fn each_schema(schema: &Value, visit: &mut impl FnMut(&Map<String, Value>)) {
    match schema {
        Value::Object(fields) => {
            visit(fields);
            for (keyword, value) in fields {
                match (Holds::of(keyword), value) {
                    (Holds::Data, _) => {}
                    (Holds::Named, Value::Object(schemas)) => {
                        schemas.values().for_each(|schema| each_schema(schema, visit));
                    }
                    (Holds::Named | Holds::Schemas, value) => each_schema(value, visit),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| each_schema(item, visit)),
        _ => {}
    }
}

/// The first thing that is found in a schema or in those in it.
pub(super) fn find_in<T>(schema: &Value, find: impl Fn(&Map<String, Value>) -> Option<T>) -> Option<T> {
    let mut found = None;
    each_schema(schema, &mut |fields: &Map<String, Value>| {
        if found.is_none() {
            found = find(fields);
        }
    });
    found
}
