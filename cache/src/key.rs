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
    /// Decides the result, but working state made under another value can be continued (epochs): in the result's key
    /// only.
    Resumable,
    /// Changes how the work is done and never its result (log level): in no key.
    Cosmetic,
}

impl Class {
    /// The class of something declared as `inner` inside something of this class: the outermost that is not semantic
    /// holds.
    #[must_use]
    pub fn within(self, inner: Self) -> Self {
        match (self, inner) {
            (Self::Cosmetic, _) | (_, Self::Cosmetic) => Self::Cosmetic,
            (Self::Resumable, _) | (_, Self::Resumable) => Self::Resumable,
            (Self::Semantic, Self::Semantic) => Self::Semantic,
        }
    }
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

/// Where two documents differ, in the order of the new one and then what is gone: empty exactly when their result keys
/// are equal.
pub fn differences(old: &KeyDocument, new: &KeyDocument) -> Vec<KeyDifference> {
    if old.result_key() == new.result_key() {
        return Vec::new();
    }
    let difference = |path: &str| KeyDifference {
        path: path.to_owned(),
        old: old.get(path).map(str::to_owned),
        new: new.get(path).map(str::to_owned),
    };
    let changed = new.entries.iter().filter(|entry| old.get(&entry.path) != Some(&entry.value));
    let gone = old.entries.iter().filter(|entry| new.get(&entry.path).is_none());
    let found: Vec<_> = changed.chain(gone).map(|entry| difference(&entry.path)).collect();
    if found.is_empty() { vec![different_order(old, new)] } else { found }
}

/// The difference of two documents with the same entries in another order, which a new version of a stage may bring.
fn different_order(old: &KeyDocument, new: &KeyDocument) -> KeyDifference {
    let paths = |document: &KeyDocument| {
        document.entries.iter().map(|entry| entry.path.as_str()).collect::<Vec<_>>().join(", ")
    };
    KeyDifference { path: "(order of entries)".to_owned(), old: Some(paths(old)), new: Some(paths(new)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(entries: &[(&str, &str)]) -> KeyDocument {
        let mut document = KeyDocument::default();
        entries.iter().for_each(|(path, value)| document.push(*path, *value, Class::Semantic));
        document
    }

    fn difference(path: &str, old: Option<&str>, new: Option<&str>) -> KeyDifference {
        KeyDifference { path: path.to_owned(), old: old.map(str::to_owned), new: new.map(str::to_owned) }
    }

    /// Stores on people's disks depend on this encoding.
    #[test]
    fn a_key_is_the_digest_of_length_prefixed_paths_and_values() {
        let key = document(&[("stage", "train"), ("rank", "8")]).result_key();
        let encoding = b"\x05\0\0\0\0\0\0\0stage\x05\0\0\0\0\0\0\0train\x04\0\0\0\0\0\0\0rank\x01\0\0\0\0\0\0\x008";
        assert_eq!(key, Digest::of(encoding));
    }

    #[test]
    fn borders_between_paths_and_values_count() {
        let key = |entries| document(entries).result_key();
        assert_ne!(key(&[("a", "bc")]), key(&[("ab", "c")]));
        assert_ne!(key(&[("a", "b"), ("c", "d")]), key(&[("a", "bcd")]));
        assert_ne!(key(&[("a", "")]), key(&[]));
    }

    #[test]
    fn each_class_enters_its_keys() {
        let with = |class| {
            let mut document = document(&[("stage", "train")]);
            document.push("field", "1", class);
            (document.result_key(), document.working_key())
        };
        let (result, working) = with(Class::Cosmetic);
        assert_eq!(result, working);
        assert_eq!(result, document(&[("stage", "train")]).result_key());
        assert_ne!(with(Class::Resumable).0, result);
        assert_eq!(with(Class::Resumable).1, working);
        assert_ne!(with(Class::Semantic).0, result);
        assert_ne!(with(Class::Semantic).1, working);
    }

    #[test]
    fn differences_name_what_changed_came_and_went() {
        let old = document(&[("rank", "4"), ("alpha", "16"), ("bias", "none")]);
        let new = document(&[("dropout", "0"), ("rank", "8"), ("alpha", "16")]);
        assert_eq!(
            differences(&old, &new),
            [
                difference("dropout", None, Some("0")),
                difference("rank", Some("4"), Some("8")),
                difference("bias", Some("none"), None),
            ]
        );
    }

    #[test]
    fn documents_differ_exactly_when_their_keys_do() {
        let documents = [
            document(&[]),
            document(&[("a", "1")]),
            document(&[("a", "2")]),
            document(&[("a", "1"), ("b", "1")]),
            document(&[("b", "1"), ("a", "1")]),
            document(&[("a", "1"), ("a", "1")]),
            document(&[("a", "1"), ("a", "2")]),
        ];
        for old in &documents {
            for new in &documents {
                let equal = old.result_key() == new.result_key();
                assert_eq!(differences(old, new).is_empty(), equal, "{old:?} against {new:?}");
            }
        }
    }
}
