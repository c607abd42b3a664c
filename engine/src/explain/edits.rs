//! What somebody edited: the values in which a stage's parameters differ from those of an earlier run, by the paths
//! that keys spell.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::parameter::dotted;

/// Edited values by path, each as a text before and now.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Edits(BTreeMap<String, (Option<String>, Option<String>)>);

impl Edits {
    /// The edits between two values of `with:`.
    pub(super) fn between(old: &Value, new: &Value) -> Self {
        let (old, mut new) = (leaves(old), leaves(new));
        let mut edits = BTreeMap::new();
        for (path, before) in old {
            let now = new.remove(&path);
            if now.as_ref() != Some(&before) {
                edits.insert(path, (Some(before), now));
            }
        }
        edits.extend(new.into_iter().map(|(path, now)| (path, (None, Some(now)))));
        Self(edits)
    }

    /// The edit of a value, by its own path.
    pub(super) fn at(&self, path: &str) -> Option<&(Option<String>, Option<String>)> {
        self.0.get(path)
    }

    /// Whether something at, in or around a path was edited.
    pub(super) fn touch(&self, path: &str) -> bool {
        self.0.keys().any(|edited| is_in(edited, path) || is_in(path, edited))
    }

    /// The edits at or in a path.
    pub(super) fn inside<'a>(
        &'a self,
        path: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a (Option<String>, Option<String>))> {
        self.0.iter().filter(move |(edited, _)| is_in(edited, path)).map(|(edited, edit)| (edited.as_str(), edit))
    }
}

/// Whether `path` is `outer` or is in it.
fn is_in(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// The first part of a path: the field of the kind that it is in.
pub(super) fn top(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or(path)
}

/// Every value that holds no others, by its path. What is null counts as left out.
fn leaves(value: &Value) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    visit(value, "", &mut found);
    found
}

fn visit(value: &Value, path: &str, found: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            map.iter().for_each(|(key, value)| visit(value, &dotted(path, key), found));
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().enumerate().for_each(|(index, item)| visit(item, &format!("{path}[{index}]"), found));
        }
        Value::Null => {}
        Value::String(text) => drop(found.insert(path.to_owned(), text.clone())),
        other => drop(found.insert(path.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn edits_are_the_values_that_differ() {
        let old = json!({ "data": "a", "lora": { "rank": 4, "alpha": null }, "metrics": ["x", "y"], "gone": true });
        let new = json!({ "data": "b", "lora": { "rank": 4, "alpha": 8 }, "metrics": ["x", "z"] });
        let edits = Edits::between(&old, &new);
        let paths: Vec<&str> = edits.0.keys().map(String::as_str).collect();
        assert_eq!(paths, ["data", "gone", "lora.alpha", "metrics[1]"]);
        assert_eq!(edits.at("data"), Some(&(Some("a".to_owned()), Some("b".to_owned()))));
        assert!(edits.touch("lora") && edits.touch("metrics[1]") && edits.touch("metrics"));
        assert!(!edits.touch("lora.rank") && !edits.touch("dat"));
        assert_eq!(edits.inside("lora").count(), 1);
    }
}
