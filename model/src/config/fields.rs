//! The keys of a `config.json`, read with their types.

use serde_json::{Map, Value};

use super::ConfigError;

/// What no model comes near: the largest that are published have 126 layers, a width of 16 384 and a vocabulary of 262
/// 144. Within these, products of sizes fit 64 bits, and what has an entry per layer fits memory.
const LARGEST: [(&str, usize); 7] = [
    ("vocab_size", 1 << 24),
    ("hidden_size", 1 << 18),
    ("intermediate_size", 1 << 20),
    ("num_hidden_layers", 1 << 12),
    ("num_attention_heads", 1 << 12),
    ("num_key_value_heads", 1 << 12),
    ("head_dim", 1 << 12),
];

/// What no other size comes near, such as a number of positions.
const LARGEST_OF_ALL: usize = 1 << 32;

/// An object of a `config.json`.
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A value that is there and not null.
    pub(crate) fn find(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, be its value null.
    pub(crate) fn says(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let wrong = || ConfigError::Type { key: key.to_owned(), expected, found: value.clone() };
        read(value).map(Some).ok_or_else(wrong)
    }

    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let size = self.read(key, "a whole number", |value| usize::try_from(value.as_u64()?).ok())?;
        let most = LARGEST.iter().find(|(name, _)| *name == key).map_or(LARGEST_OF_ALL, |(_, most)| *most);
        match size {
            Some(value) if value > most => Err(ConfigError::TooLarge { key: key.to_owned(), value, most }),
            size => Ok(size),
        }
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.optional_size(key)?.ok_or_else(|| ConfigError::Missing(key.to_owned()))
    }

    pub(crate) fn optional_number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, ConfigError> {
        self.optional_number(key)?.ok_or_else(|| ConfigError::Missing(key.to_owned()))
    }

    pub(crate) fn numbers(&self, key: &str) -> Result<Vec<f64>, ConfigError> {
        let read = |value: &Value| value.as_array()?.iter().map(Value::as_f64).collect();
        self.read(key, "a list of numbers", read)?.ok_or_else(|| ConfigError::Missing(key.to_owned()))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.read(key, "a text", Value::as_str)
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        self.read(key, "a list of texts", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        Ok(self.read(key, "an object", Value::as_object)?.map(Fields))
    }

    /// The refusal of a key's value, naming what is supported.
    pub(crate) fn unsupported(&self, key: &str, supported: &'static str) -> ConfigError {
        let value = match self.find(key) {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => "null".to_owned(),
        };
        ConfigError::Unsupported { key: key.to_owned(), value, supported }
    }
}
