//! Numbers that JSON, as it is held here, has no word for: NaN, the infinities, integers of more than 64 bits. They
//! stand in a record as an object with one key, which no data should have, and become numbers again where an expression
//! asks for them.

use minijinja::value::{Serde, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde_json::{Map, Number, Value as Json};

/// The key: a noncharacter, which no text should hold.
const KEY: &str = "\u{FDD0}number";

/// A number as Python writes it: `nan`, `inf`, `-inf`, or digits.
pub(crate) fn special(digits: impl Into<String>) -> Json {
    Json::Object(Map::from_iter([(KEY.to_owned(), Json::String(digits.into()))]))
}

/// A float, whether JSON has a word for it or not.
pub(crate) fn float(float: f64) -> Json {
    match Number::from_f64(float) {
        Some(number) => Json::Number(number),
        None if float.is_nan() => special("nan"),
        None => special(if float > 0.0 { "inf" } else { "-inf" }),
    }
}

/// A decimal number: an integer, a float where one prints the same digits, or else its digits.
pub(crate) fn decimal(digits: &str) -> Json {
    let Some((whole, fraction)) = digits.split_once('.') else {
        let integer = digits.parse::<i64>().map(Json::from).or_else(|_| digits.parse::<u64>().map(Json::from));
        return integer.unwrap_or_else(|_| special(digits));
    };
    let fraction = fraction.trim_end_matches('0');
    let significant = if fraction.is_empty() { whole.to_owned() } else { format!("{whole}.{fraction}") };
    match digits.parse::<f64>() {
        Ok(number) if number.to_string() == significant => float(number),
        _ => special(digits),
    }
}

/// The digits of such a number.
pub(crate) fn digits_of(value: &Json) -> Option<&str> {
    match value {
        Json::Object(map) if map.len() == 1 => map.get(KEY)?.as_str(),
        _ => None,
    }
}

/// Such a number in a value, at any depth.
pub(crate) fn find(value: &Json) -> Option<&str> {
    match value {
        Json::Object(map) => digits_of(value).or_else(|| map.values().find_map(find)),
        Json::Array(items) => items.iter().find_map(find),
        _ => None,
    }
}

/// A value of an expression; `too_large` is told of integers that are none there.
pub(crate) fn to_value(value: &Json, too_large: &mut dyn FnMut(&str)) -> Value {
    if let Json::String(text) = value {
        return Value::from(text.as_str());
    }
    if find(value).is_none() {
        return Value::from(Serde(value));
    }
    match (digits_of(value), value) {
        (Some(digits), _) => match (digits.parse::<i128>(), digits.parse::<u128>(), digits) {
            (Ok(number), ..) => Value::from(number),
            (_, Ok(number), _) => Value::from(number),
            (.., "nan") => Value::from(f64::NAN),
            (.., "inf") => Value::from(f64::INFINITY),
            (.., "-inf") => Value::from(f64::NEG_INFINITY),
            _ => {
                too_large(digits);
                Value::from(())
            }
        },
        (None, Json::Array(items)) => items.iter().map(|item| to_value(item, too_large)).collect(),
        (None, Json::Object(map)) => {
            Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), to_value(value, too_large))))
        }
        (None, other) => Value::from(Serde(other)),
    }
}

/// Deepest list that a new column may hold.
const DEEPEST: usize = 128;

/// A list or an object that an expression gives.
///
/// # Errors
/// Fails where a value is none that a column can hold.
pub(crate) fn to_json(value: &Value) -> Result<Json, Error> {
    to_json_at(value, DEEPEST)
}

fn to_json_at(value: &Value, depth: usize) -> Result<Json, Error> {
    let refused = |message: String| Error::new(ErrorKind::BadSerialization, message);
    let below = depth.checked_sub(1).ok_or_else(|| refused(format!("lists lie more than {DEEPEST} deep")))?;
    match value.kind() {
        ValueKind::Number if !value.is_integer() => Ok(float(f64::try_from(value.clone())?)),
        ValueKind::Number => match (i64::try_from(value.clone()), u64::try_from(value.clone())) {
            (Ok(number), _) => Ok(number.into()),
            (_, Ok(number)) => Ok(number.into()),
            _ => Ok(special(value.to_string())),
        },
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.map(|item| to_json_at(&item, below)).collect(),
        ValueKind::Map => {
            let mut map = Map::new();
            for key in value.try_iter()? {
                let item = to_json_at(&value.get_item(&key)?, below)?;
                map.insert(key.as_str().map_or_else(|| key.to_string(), str::to_owned), item);
            }
            Ok(Json::Object(map))
        }
        _ => serde_json::to_value(value).map_err(|error| refused(error.to_string())),
    }
}

/// Whether a number of a JSON text may have been an integer that was rounded.
pub(crate) fn may_be_rounded(value: &Json) -> bool {
    /// From here on an integer has more than 63 bits.
    const LARGE: f64 = 9.2e18;
    match value {
        Json::Number(number) => number.is_f64() && number.as_f64().is_some_and(|float| float.abs() >= LARGE),
        Json::Array(items) => items.iter().any(may_be_rounded),
        Json::Object(map) => map.values().any(may_be_rounded),
        Json::Null | Json::Bool(_) | Json::String(_) => false,
    }
}

/// Words that Python writes for numbers that JSON has none for, and what they are as text.
const WORDS: &[(&str, &str)] = &[("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf")];

/// A JSON text in which integers of more than 64 bits are objects that keep their digits, and so are the words that
/// Python writes for floats that are not finite.
pub(crate) fn with_digits_kept(json: &str) -> String {
    let mut result = String::with_capacity(json.len() + 32);
    let mut rest = json;
    let begins = |letter: char| matches!(letter, '"' | '-' | 'N' | 'I') || letter.is_ascii_digit();
    while let Some(at) = rest.find(begins) {
        result.push_str(&rest[..at]);
        let token = &rest[at..];
        if let Some((word, text)) = WORDS.iter().find(|(word, _)| token.starts_with(word)) {
            result += &special(*text).to_string();
            rest = &token[word.len()..];
            continue;
        }
        if token.starts_with(['N', 'I']) {
            result.push_str(&token[..1]);
            rest = &token[1..];
            continue;
        }
        let length = if token.starts_with('"') {
            end_of_text(token)
        } else {
            token.find(|letter: char| !matches!(letter, '0'..='9' | '-' | '+' | '.' | 'e' | 'E')).unwrap_or(token.len())
        };
        let (token, behind) = token.split_at(length);
        let is_integer = token.trim_start_matches('-').bytes().all(|byte| byte.is_ascii_digit());
        if is_integer && token.parse::<i64>().is_err() && token.parse::<u64>().is_err() {
            result += &special(token).to_string();
        } else {
            result.push_str(token);
        }
        rest = behind;
    }
    result + rest
}

/// Where a text in quotes ends, behind its closing quote.
fn end_of_text(token: &str) -> usize {
    let bytes = token.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    token.len()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn digits_are_kept_and_nothing_else_changes() {
        let json = r#"{"a": 158456325028528675187087900672, "b": [-9223372036854775809, 18446744073709551615, 1e30, 12.5], "c\\\"1": "99999999999999999999"}"#;
        let value: Json = serde_json::from_str(json).unwrap();
        assert!(may_be_rounded(&value) && !may_be_rounded(&json!([1, 2.5, "99999999999999999999"])));
        let kept: Json = serde_json::from_str(&with_digits_kept(json)).unwrap();
        let expected = json!({"a": special("158456325028528675187087900672"),
            "b": [special("-9223372036854775809"), 18_446_744_073_709_551_615_u64, 1e30, 12.5], "c\\\"1": "99999999999999999999"});
        assert_eq!(kept, expected);
        assert_eq!(find(&kept), Some("158456325028528675187087900672"));
    }

    #[test]
    fn words_of_python_are_numbers() {
        let json = r#"{"a": NaN, "b": [-Infinity, Infinity, -1], "NaN": "Infinity", "c": null}"#;
        let kept: Json = serde_json::from_str(&with_digits_kept(json)).unwrap();
        let expected =
            json!({"a": special("nan"), "b": [special("-inf"), special("inf"), -1], "NaN": "Infinity", "c": null});
        assert_eq!(kept, expected);
        assert!(serde_json::from_str::<Json>(&with_digits_kept("{\"a\": NULL, \"b\": Inf}")).is_err());
    }

    #[test]
    fn decimals_keep_their_digits() {
        for (digits, expected) in [
            ("123", json!(123)),
            ("-7.50", json!(-7.5)),
            ("1.00", json!(1.0)),
            ("0.1", json!(0.1)),
            ("12345678901234567.89", special("12345678901234567.89")),
            ("123456789012345678901234567890", special("123456789012345678901234567890")),
            ("-0.00", json!(-0.0)),
        ] {
            assert_eq!(decimal(digits), expected, "{digits}");
        }
    }

    #[test]
    fn they_are_numbers_in_an_expression_and_back() {
        let mut large = Vec::new();
        let value = json!({"a": [special("158456325028528675187087900672"), special("inf"), 1], "b": special("nan")});
        let made = to_value(&value, &mut |digits| large.push(digits.to_owned()));
        assert!(large.is_empty());
        assert_eq!(
            made.get_attr("a").unwrap().get_item_by_index(0).unwrap().to_string(),
            "158456325028528675187087900672"
        );
        assert_eq!(to_json(&made).unwrap(), value);
        let beyond = "9".repeat(60);
        to_value(&special(beyond.clone()), &mut |digits| large.push(digits.to_owned()));
        assert_eq!(large, [beyond]);
    }
}
