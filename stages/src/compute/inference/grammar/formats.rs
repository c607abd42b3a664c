//! What `format` asks for beyond llguidance's expressions of it.

use serde_json::{Map, Value, json};

use super::subschemas::Holds;

/// Adds to the formats in a schema what their expressions lack.
pub(super) fn narrow_formats(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            for (keyword, value) in fields.iter_mut() {
                match (Holds::of(keyword), value) {
                    (Holds::Data, _) => {}
                    (Holds::Named, Value::Object(schemas)) => schemas.values_mut().for_each(narrow_formats),
                    (Holds::Named | Holds::Schemas, value) => narrow_formats(value),
                }
            }
            let format = fields.get("format").and_then(Value::as_str).unwrap_or_default();
            if is_too_much(format, fields) {
                return;
            }
            let more = beyond_expression(format);
            if !more.is_empty()
                && let Value::Array(all) = fields.entry("allOf").or_insert_with(|| json!([]))
            {
                all.extend(more);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(narrow_formats),
        _ => {}
    }
}

/// A day of the Gregorian calendar from year 1 on, where llguidance has 29 days of each February, and year 0.
const DAY: &str = "^(?:(?:[^0]...|0[^0]..|00[^0].|000[^0])-(?:0[^2]|1|02-(?:[01]|2[0-8]))\
    |(?:..(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02)";

/// The lengths of RFC 5321, of the part before the `@` and of the labels behind it.
const EMAIL: &str = r"^[^@]{1,64}@(?:\[|[^.]{1,63}(?:\.[^.]{1,63})*$)";

/// What a format asks for that llguidance's expression of it does not, as schemas. Seconds end at 59: few readers take
/// a leap second, and few midnights have one.
fn beyond_expression(format: &str) -> Vec<Value> {
    match format {
        "date" => vec![json!({ "pattern": DAY })],
        "time" => vec![json!({ "pattern": "^.{6}[0-5]" })],
        "date-time" => vec![json!({ "pattern": DAY }), json!({ "pattern": "^.{17}[0-5]" })],
        "hostname" => vec![json!({ "maxLength": 253 })],
        "email" => vec![json!({ "pattern": EMAIL })],
        _ => Vec::new(),
    }
}

/// Whether llguidance may not find out in its bounds that the pattern and the lengths of a schema leave a text, too: it
/// would refuse a schema that it takes without [`beyond_expression`].
fn is_too_much(format: &str, fields: &Map<String, Value>) -> bool {
    let has = |keyword: &str| fields.contains_key(keyword);
    match format {
        "email" => has("pattern") || has("minLength"),
        "hostname" => has("pattern"),
        "time" | "date-time" => has("pattern") && (has("minLength") || has("maxLength")),
        _ => false,
    }
}
