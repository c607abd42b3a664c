//! The fields that a kind declares, flat: what `pipeline schema --keys` prints and the tests of keys go through.
//!
//! They are read off the JSON Schema, which comes from the declarations themselves, so none can be left out.

use cache::Class;
use serde::Serialize;

use super::{CLASS, Json};

/// A field of a kind's parameters.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeclaredField {
    /// Its dotted path: `lora.rank`; an item of a list is `datasets[].rows`, an entry of a mapping `rank_pattern.*`.
    pub path: String,
    /// How it takes part in keys: the outermost class around it that is not semantic.
    pub class: Class,
}

/// Every field of a schema that holds no named fields itself, in the order of their declaration. A mapping with keys of
/// the user's choice, or a list of plain values, is one field.
///
/// # Panics
/// If a field has no class: the derive macro gives every field one, so its schema was written by hand and lacks it.
pub fn declared_fields(schema: &Json) -> Vec<DeclaredField> {
    let mut fields = Vec::new();
    visit(schema, "", Class::Semantic, &mut fields);
    fields
}

fn visit(schema: &Json, path: &str, around: Class, fields: &mut Vec<DeclaredField>) {
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let declared = serde_json::from_value(property[CLASS].clone());
        let class = around.within(declared.unwrap_or_else(|_| panic!("`{path}` has no class")));
        let before = fields.len();
        visit(property, &path, class, fields);
        if fields.len() == before {
            fields.push(DeclaredField { path, class });
        }
    }
    for alternative in schema["anyOf"].as_array().into_iter().flatten() {
        visit(alternative, path, around, fields);
    }
    visit_inner(&schema["items"], &format!("{path}[]"), around, fields);
    visit_inner(&schema["additionalProperties"], &format!("{path}.*"), around, fields);
}

fn visit_inner(schema: &Json, path: &str, around: Class, fields: &mut Vec<DeclaredField>) {
    if schema.is_object() {
        visit(schema, path, around, fields);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_flat_and_the_outermost_class_holds() {
        let schema = json!({ "properties": {
            "rank": { "type": "integer", "x-class": "semantic" },
            "names": { "type": "array", "items": { "type": "string" }, "x-class": "resumable" },
            "display": { "x-class": "cosmetic", "properties": { "colour": { "x-class": "semantic" } } },
            "parts": { "x-class": "semantic", "items": { "properties": { "weight": { "x-class": "resumable" } } } },
            "either": { "x-class": "semantic", "anyOf": [{ "properties": { "a": { "x-class": "semantic" } } }, {}] },
        }});
        let fields: Vec<_> = declared_fields(&schema).into_iter().map(|field| (field.path, field.class)).collect();
        let expected = [
            ("rank", Class::Semantic),
            ("names", Class::Resumable),
            ("display.colour", Class::Cosmetic),
            ("parts[].weight", Class::Resumable),
            ("either.a", Class::Semantic),
        ];
        assert_eq!(fields, expected.map(|(path, class)| (path.to_owned(), class)));
    }
}
