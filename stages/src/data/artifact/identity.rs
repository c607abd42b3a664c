//! The logical identity of a table: what it says, whatever the form of its files.

use cache::{Digest, Hasher};
use serde_json::Value;

/// Takes in a table's values in order and gives its identity.
///
/// Covered are the kind, the schema, the declared attributes and every value. Codecs, row groups and part borders are
/// not, so that rewriting a table's files retrains nothing.
#[derive(Clone)]
pub struct IdentityHasher(Hasher);

impl IdentityHasher {
    /// Begins with the kind, the schema (`name: type`) and the attributes that readers use.
    pub fn new(kind: &str, schema: &[&str], attributes: &Value) -> Self {
        let mut hasher = Hasher::new();
        hasher.value(b"table 1").value(kind.as_bytes()).value(&(schema.len() as u64).to_le_bytes());
        for column in schema {
            hasher.value(column.as_bytes());
        }
        hasher.value(canonical(attributes).as_bytes());
        Self(hasher)
    }

    /// Takes in a text.
    pub fn text(&mut self, text: &str) {
        self.0.value(text.as_bytes());
    }

    /// Takes in a list of ids.
    pub fn ids(&mut self, ids: &[u32]) {
        self.0.words(ids, u32::to_le_bytes);
    }

    /// Takes in a list of labels.
    pub fn labels(&mut self, labels: &[i32]) {
        self.0.words(labels, i32::to_le_bytes);
    }

    /// Takes in a list of weights.
    pub fn weights(&mut self, weights: &[f32]) {
        self.0.words(weights, f32::to_le_bytes);
    }

    /// Takes in a list of groups.
    pub fn groups(&mut self, groups: &[u64]) {
        let halves: Vec<u32> = groups.iter().flat_map(|group| [*group as u32, (*group >> 32) as u32]).collect();
        self.ids(&halves);
    }

    /// Takes in a list of bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.value(bytes);
    }

    /// The identity of what was taken in.
    pub fn finish(&self) -> Digest {
        self.0.finish()
    }
}

/// Takes in the values of a table and gives its identity and those of its parts.
pub(super) struct TableHasher {
    /// That of no values.
    none: IdentityHasher,
    /// That of all, once the first part has ended: until then it is that of the part, and hashed once.
    whole: Option<IdentityHasher>,
    part: IdentityHasher,
}

impl TableHasher {
    /// Begins with the identity of no values.
    pub(super) fn new(none: IdentityHasher) -> Self {
        Self { part: none.clone(), whole: None, none }
    }

    pub(super) fn take(&mut self, values: impl Fn(&mut IdentityHasher)) {
        self.whole.iter_mut().for_each(&values);
        values(&mut self.part);
    }

    /// The identity of the present part, which ends.
    pub(super) fn end_part(&mut self) -> Digest {
        let part = std::mem::replace(&mut self.part, self.none.clone());
        self.whole.get_or_insert(part.clone());
        part.finish()
    }

    /// The identity of the whole.
    pub(super) fn finish(&self) -> Digest {
        self.whole.as_ref().unwrap_or(&self.part).finish()
    }
}

/// JSON with the keys of every object in order, so that equal values have equal texts.
pub fn canonical(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            let entries: Vec<_> = entries
                .iter()
                .map(|(key, value)| format!("{}:{}", Value::from(key.as_str()), canonical(value)))
                .collect();
            format!("{{{}}}", entries.join(","))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(canonical).collect::<Vec<_>>().join(",")),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn canonical_text_ignores_the_order_of_keys() {
        let one = json!({"b": [1, {"y": null, "x": "é"}], "a": 0.5});
        let two = json!({"a": 0.5, "b": [1, {"x": "é", "y": null}]});
        assert_eq!(canonical(&one), canonical(&two));
        assert_eq!(canonical(&one), r#"{"a":0.5,"b":[1,{"x":"é","y":null}]}"#);
    }

    #[test]
    fn the_whole_and_its_parts_are_what_they_are_by_themselves() {
        let none = IdentityHasher::new("rows", &["text: string"], &Value::Null);
        let of = |values: &[&str]| {
            let mut hasher = none.clone();
            values.iter().for_each(|value| hasher.text(value));
            hasher.finish()
        };
        let mut table = TableHasher::new(none.clone());
        assert_eq!(table.finish(), of(&[]));
        table.take(|hasher| hasher.text("one"));
        assert_eq!(table.finish(), of(&["one"]));
        assert_eq!(table.end_part(), of(&["one"]));
        table.take(|hasher| hasher.text("two"));
        table.take(|hasher| hasher.text("three"));
        assert_eq!(table.end_part(), of(&["two", "three"]));
        assert_eq!(table.end_part(), of(&[]));
        assert_eq!(table.finish(), of(&["one", "two", "three"]));
    }

    #[test]
    fn where_one_value_ends_and_the_next_begins_counts() {
        let hash = |values: &[&str]| {
            let mut hasher = IdentityHasher::new("rows", &["text: string"], &Value::Null);
            values.iter().for_each(|value| hasher.text(value));
            hasher.finish()
        };
        assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
        assert_ne!(hash(&["ab"]), hash(&["ab", ""]));
        assert_eq!(hash(&["ab", "c"]), hash(&["ab", "c"]));
    }
}
