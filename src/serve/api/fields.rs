//! Reads the fields of a request, one by one. What nobody has read at the end is not supported, and is an error.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of a request that have not been read. One that is null is as one that is not there.
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// The fields of a body.
    pub(super) fn of(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(mut fields)) => {
                fields.retain(|_, value| !value.is_null());
                Ok(Self(fields))
            }
            Ok(_) => Err(ApiError::bad("the body is not a JSON object")),
            Err(error) => Err(ApiError::bad(format!("the body is not JSON: {error}"))),
        }
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name)
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::field(name, format!("`{name}` is not a string"))),
        }
    }

    pub(super) fn boolean(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(value),
            Some(_) => Err(ApiError::field(name, format!("`{name}` is not a boolean"))),
        }
    }

    pub(super) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                // Of bounds that only say what a float holds nobody wants to read the digits.
                let expected = match (*range.start(), *range.end()) {
                    (least, most) if least == f64::MIN_POSITIVE && most >= f64::from(f32::MAX) => {
                        "a number above 0".to_owned()
                    }
                    (least, most) if most >= f64::from(f32::MAX) => format!("a number of at least {least}"),
                    (least, most) => format!("a number from {least} to {most}"),
                };
                Err(ApiError::field(name, format!("`{name}` is {value}, and {expected} is expected")))
            }
        }
    }

    pub(super) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_i64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let (least, most) = range.into_inner();
                let expected = match (least, most) {
                    (i64::MIN, i64::MAX) => "an integer".to_owned(),
                    (_, i64::MAX) => format!("an integer of at least {least}"),
                    _ => format!("an integer from {least} to {most}"),
                };
                Err(ApiError::field(name, format!("`{name}` is {value}, and {expected} is expected")))
            }
        }
    }

    /// Takes a field that may only say what holds anyway.
    pub(super) fn only(&mut self, name: &str, is_neutral: impl Fn(&Value) -> bool) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !is_neutral(&value) => Err(unsupported(name)),
            _ => Ok(()),
        }
    }

    /// Fails where a field is left.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        self.0.keys().next().map_or(Ok(()), |name| Err(unsupported(name)))
    }
}

fn unsupported(name: &str) -> ApiError {
    ApiError::unsupported(name, format!("`{name}` is not supported by this server"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_reads_is_an_error_that_names_it() {
        let mut fields = Fields::of(br#"{"n": 2, "temperature": 0.5, "user": null, "logit_bais": {}}"#).ok().unwrap();
        assert_eq!(fields.integer("n", 1..=8).ok(), Some(Some(2)));
        assert_eq!(fields.number("temperature", 0.0..=2.0).ok(), Some(Some(0.5)));
        assert_eq!(fields.string("user").ok(), Some(None));
        let left = fields.finish().unwrap_err().json();
        assert_eq!(left["error"]["param"], "logit_bais");
        assert_eq!(left["error"]["code"], "unsupported_parameter");
    }

    #[test]
    fn values_out_of_range_or_of_another_type_are_errors_that_say_what_is_expected() {
        let fields = || Fields::of(br#"{"n": 0, "seed": 1.5, "stop": 3, "tools": [1]}"#).ok().unwrap();
        let message = |error: ApiError| error.json()["error"]["message"].as_str().unwrap().to_owned();
        let error = fields().integer("n", 1..=i64::MAX).unwrap_err();
        assert_eq!(message(error), "`n` is 0, and an integer of at least 1 is expected");
        let error = fields().integer("seed", i64::MIN..=i64::MAX).unwrap_err();
        assert_eq!(message(error), "`seed` is 1.5, and an integer is expected");
        let error = fields().number("n", 1.0..=2.0).unwrap_err();
        assert_eq!(message(error), "`n` is 0, and a number from 1 to 2 is expected");
        assert_eq!(message(fields().string("stop").unwrap_err()), "`stop` is not a string");
        let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        assert_eq!(message(fields().only("tools", is_empty).unwrap_err()), "`tools` is not supported by this server");
        for body in [&b"[1]"[..], b"{\"a\": ", b"", b"\xff"] {
            assert!(Fields::of(body).is_err());
        }
    }
}
