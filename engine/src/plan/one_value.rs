//! Which parameters take one value, and none that holds a comma: several values with commas between them are then
//! several settings.

use serde_json::Value as Json;

use super::resources::ResourceKeys;
use crate::parameter::Parameter;
use crate::stage::Registry;

/// Whether the parameter at a path below a stage's own keys is a number, a truth value, a name out of a few, a time or
/// a size.
pub(super) fn takes_one_value(registry: &Registry, uses: &str, path: &[&str]) -> bool {
    match path {
        ["resources", below @ ..] => find(&ResourceKeys::schema(), below).is_some_and(|field| is_one_value(&field)),
        ["with", below @ ..] => {
            let field = registry.get(uses).and_then(|kind| find(&kind.schema(), below));
            field.is_some_and(|field| is_one_value(&field))
        }
        _ => false,
    }
}

fn find(schema: &Json, path: &[&str]) -> Option<Json> {
    let [first, rest @ ..] = path else { return Some(schema.clone()) };
    let of_property = schema["properties"].get(first).or_else(|| schema.get("additionalProperties"));
    if let Some(found) = of_property.and_then(|field| find(field, rest)) {
        return Some(found);
    }
    let alternatives = schema["anyOf"].as_array()?;
    alternatives.iter().find_map(|alternative| find(alternative, path))
}

fn is_one_value(schema: &Json) -> bool {
    if let Some(alternatives) = schema["anyOf"].as_array() {
        return alternatives.iter().all(is_one_value);
    }
    match schema["type"].as_str() {
        _ if schema.get("enum").is_some() => true,
        Some("integer" | "number" | "boolean") => true,
        // Free text may hold commas; what has to look like something does not.
        Some("string") => schema.get("pattern").is_some(),
        _ => false,
    }
}
