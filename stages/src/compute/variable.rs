//! The value of an environment variable that a pipeline file sets for the processes of a stage.

use std::collections::BTreeMap;

use engine::file::tree::{Node, Value};
use engine::parameter::{KeyWriter, Mapping, Parameter, Reader};
use serde_json::json;

/// The value of an environment variable. In the file a number or a boolean is its text, which a kind that has such
/// values asks for with [`TEXTS`](engine::stage::StageKind::TEXTS).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VariableText(pub String);

impl Parameter for VariableText {
    /// A number or a boolean still is one where it comes out of a variable or an axis: its text is the same as inside a
    /// longer one. Of a float that is not certain.
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::Integer(number) => Some(Self(number.to_string())),
            Value::Bool(truth) => Some(Self(truth.to_string())),
            _ => String::read(node, reader).map(Self),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.0.write_key(key);
    }

    fn schema() -> serde_json::Value {
        json!({ "anyOf": [{ "type": "string" }, { "type": "number" }, { "type": "boolean" }] })
    }
}

/// Variables as a process is given them.
pub(crate) fn texts(variables: &Mapping<VariableText>) -> BTreeMap<String, String> {
    variables.iter().map(|(name, value)| (name.clone(), value.0.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_with_variables_takes_the_texts_of_the_file() {
        let registry = crate::registry();
        for kind in ["command", "evaluate", "generate", "train"] {
            assert_eq!(registry.get(kind).unwrap().texts, ["env"], "{kind}");
        }
    }

    #[test]
    fn whole_numbers_and_booleans_are_their_texts() {
        let mut reader = Reader::default();
        let node = Node::from_json(&json!({ "LEVEL": 1, "ON": true, "DEBUG": "INFO" }));
        let variables = Mapping::<VariableText>::read(&node, &mut reader).unwrap();
        assert!(reader.problems.is_empty(), "{:?}", reader.problems);
        let expected = [("DEBUG", "INFO"), ("LEVEL", "1"), ("ON", "true")];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(texts(&variables), BTreeMap::from(expected));
    }
}
