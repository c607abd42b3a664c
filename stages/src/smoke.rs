//! What stages do in a smoke run: how few rows, steps and tokens, and how a parameter of the file is lowered to that.

use engine::stage::Smoke;
use serde_json::Value;

/// Rows of a dataset.
pub(crate) const ROWS: u64 = 8;

/// Optimizer steps of a training.
pub(crate) const STEPS: u64 = 2;

/// Tokens of an answer.
pub(crate) const NEW_TOKENS: u64 = 8;

/// Prompts that are answered.
pub(crate) const PROMPTS: u64 = 2;

/// The parameters that a smoke run replaces.
pub struct Lowered<'a> {
    given: &'a Value,
    values: Vec<(String, Value)>,
}

impl<'a> Lowered<'a> {
    /// Begins with what the file says, and nothing replaced.
    pub fn from(given: &'a Value) -> Self {
        Self { given, values: Vec::new() }
    }

    /// Gives a parameter a value, whatever the file says.
    #[must_use]
    pub fn set(mut self, path: &str, value: impl Into<Value>) -> Self {
        self.values.push((path.to_owned(), value.into()));
        self
    }

    /// Gives a parameter a value where the file sets it.
    #[must_use]
    pub fn replace(self, path: &str, value: impl Into<Value>) -> Self {
        if self.file_says(path).is_some() { self.set(path, value) } else { self }
    }

    /// Gives a parameter a value, unless the file's is lower.
    #[must_use]
    pub fn at_most(self, path: &str, most: u64) -> Self {
        match self.file_says(path).and_then(Value::as_u64) {
            Some(lower) if lower <= most => self,
            _ => self.set(path, most),
        }
    }

    /// Gives a parameter a value where the file's is higher.
    #[must_use]
    pub fn cut(self, path: &str, most: u64) -> Self {
        if self.file_says(path).is_some() { self.at_most(path, most) } else { self }
    }

    /// What the file says of a parameter.
    pub fn file_says(&self, path: &str) -> Option<&'a Value> {
        path.split('.').try_fold(self.given, |value, name| value.get(name)).filter(|value| !value.is_null())
    }

    /// The hook's answer.
    pub fn done(self) -> Smoke {
        Smoke::With(self.values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_lower_value_of_the_file_stays() {
        let given = json!({ "limit": 3, "scheduler": { "warmup_steps": 10 }, "empty": null });
        let lowered = Lowered::from(&given)
            .at_most("limit", 8)
            .cut("scheduler.warmup_steps", 1)
            .cut("scheduler.other", 1)
            .replace("empty", 5)
            .at_most("new", 2);
        let expected = [("scheduler.warmup_steps".to_owned(), json!(1)), ("new".to_owned(), json!(2))];
        assert_eq!(lowered.done(), Smoke::With(expected.to_vec()));
    }
}
