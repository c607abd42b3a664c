//! References of included stages: `articles`, written in the file that is included as `data`, is the stage
//! `data/articles`.
//!
//! Which texts are references only the stage kinds know: each reads its parameters once, and the places of its
//! references are noted. A name is looked up in the file that it stands in, then in the one that includes that; so a
//! file can be given a stage of the other by a variable.

use std::collections::HashSet;

use super::entry::SEPARATOR;
use crate::file::tree::{Node, Value};
use crate::parameter::{COLLECT, Reader, Reference, dotted};
use crate::stage::Registry;

/// Gives every reference of an included stage its full id.
pub(super) fn qualify(root: &mut Node, registry: &Registry) {
    let Value::Map(entries) = &mut root.value else { return };
    let Some(stages) = entries.iter_mut().find(|entry| entry.key == "stages") else { return };
    let Value::Map(stages) = &mut stages.value.value else { return };
    let ids: HashSet<String> = stages.iter().map(|stage| stage.key.clone()).collect();
    for stage in stages.iter_mut() {
        let Some((prefix, _)) = stage.key.rsplit_once(SEPARATOR) else { continue };
        let names = Names { prefix, ids: &ids };
        let kind = match stage.value.get("uses").map(|uses| &uses.value) {
            Some(Value::String(uses)) => registry.get(uses),
            _ => None,
        };
        let Value::Map(keys) = &mut stage.value.value else { continue };
        for key in keys {
            match (key.key.as_str(), kind) {
                ("with", Some(kind)) => {
                    let mut reader = Reader::default();
                    // What is wrong is said when the stage is bound.
                    let _ = kind.read(&key.value, &mut reader);
                    let places = reader.named.into_iter().map(|named| named.path).collect();
                    names.within(&mut key.value, "", &places);
                }
                ("needs", _) => names.all(&mut key.value),
                _ => {}
            }
        }
    }
}

struct Names<'a> {
    /// Of the stage that refers, without the last separator.
    prefix: &'a str,
    ids: &'a HashSet<String>,
}

impl Names<'_> {
    /// Replaces the references at these places.
    fn within(&self, node: &mut Node, path: &str, places: &HashSet<String>) {
        match &mut node.value {
            Value::String(text) if places.contains(path) => self.replace(text),
            Value::Map(entries) if places.contains(path) => {
                let collected = entries.iter_mut().find(|entry| entry.key == COLLECT);
                if let Some(Value::String(text)) = collected.map(|entry| &mut entry.value.value) {
                    self.replace(text);
                }
            }
            Value::List(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.within(item, &format!("{path}[{index}]"), places);
                }
            }
            Value::Map(entries) => {
                for entry in entries {
                    self.within(&mut entry.value, &dotted(path, &entry.key), places);
                }
            }
            _ => {}
        }
    }

    /// Replaces every text of a list.
    fn all(&self, node: &mut Node) {
        let Value::List(items) = &mut node.value else { return };
        for item in items {
            if let Value::String(text) = &mut item.value {
                self.replace(text);
            }
        }
    }

    fn replace(&self, text: &mut String) {
        let Some(Reference { stage, .. }) = Reference::parse(text, crate::file::source::Span::default()) else {
            return;
        };
        let mut scope = Some(self.prefix);
        while let Some(prefix) = scope {
            if self.ids.contains(&format!("{prefix}{SEPARATOR}{stage}")) {
                *text = format!("{prefix}{SEPARATOR}{text}");
                return;
            }
            scope = prefix.rsplit_once(SEPARATOR).map(|(outer, _)| outer);
        }
    }
}
