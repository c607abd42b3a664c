//! Keys: what a result depends on, as a readable document and as a digest of it.
//!
//! The traversal that fills a [`KeyDocument`] is the one that explains it: two documents are compared entry by entry to
//! say why a stage runs again, so the explanation cannot disagree with the key.

use serde::{Deserialize, Serialize};

use crate::{Digest, Hasher};

/// How a parameter takes part in keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Decides the result: part of the result's key and of the working state's key.
    Semantic,
    /// Decides the result, but working state made under another value can be continued (epochs): in the result's key only.
    Resumable,
    /// Changes how the work is done and never its result (log level): in no key.
    Cosmetic,
}

/// One line of a key: a field's path and its canonical value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyEntry {
    /// Dotted path, such as `optimizer.learning_rate` or `inputs.dataset`.
    pub path: String,
    /// Canonical text of the value.
    pub value: String,
    /// The field's class; cosmetic fields never get here.
    pub class: Class,
}

/// Everything a result depends on, in a fixed order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyDocument {
    /// The entries, in the order in which the parameters declare them.
    pub entries: Vec<KeyEntry>,
}

impl KeyDocument {
    /// Adds an entry; cosmetic ones are left out.
    pub fn push(&mut self, path: impl Into<String>, value: impl Into<String>, class: Class) {
        if class != Class::Cosmetic {
            self.entries.push(KeyEntry { path: path.into(), value: value.into(), class });
        }
    }

    /// The key of the result: all entries.
    pub fn result_key(&self) -> Digest {
        self.digest(|_| true)
    }

    /// The key of the resumable working state: the semantic entries alone.
    pub fn working_key(&self) -> Digest {
        self.digest(|class| class == Class::Semantic)
    }

    /// The value of one entry.
    pub fn get(&self, path: &str) -> Option<&str> {
        self.entries.iter().find(|entry| entry.path == path).map(|entry| entry.value.as_str())
    }

    fn digest(&self, keep: impl Fn(Class) -> bool) -> Digest {
        let mut hasher = Hasher::new();
        for entry in self.entries.iter().filter(|entry| keep(entry.class)) {
            hasher.value(entry.path.as_bytes()).value(entry.value.as_bytes());
        }
        hasher.finish()
    }
}

/// An entry in which two key documents differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyDifference {
    /// The entry's path.
    pub path: String,
    /// The value before; `None` where the entry is new.
    pub old: Option<String>,
    /// The value now; `None` where the entry is gone.
    pub new: Option<String>,
}

/// Where two documents differ: empty exactly when their result keys are equal.
pub fn differences(_old: &KeyDocument, _new: &KeyDocument) -> Vec<KeyDifference> {
    todo!()
}
