//! A mapping with the names of the keys that the file gives: for settings that must agree with others where they are
//! given, and follow from them where they are left out.

use engine::file::tree::{Node, Value};
use engine::parameter::{Json, KeyWriter, Parameter, Reader, Reference};

/// A value, and which keys of its mapping the file gives: none of a default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Given<T> {
    pub value: T,
    /// The keys of the mapping that have a value.
    pub keys: Vec<String>,
}

impl<T> Given<T> {
    /// Whether the file gives this key.
    pub fn has(&self, name: &str) -> bool {
        self.keys.iter().any(|key| key == name)
    }
}

impl<T: Parameter> Parameter for Given<T> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let value = T::read(node, reader)?;
        let Value::Map(entries) = &node.value else { return Some(Self { value, keys: Vec::new() }) };
        let given = entries.iter().filter(|entry| entry.value.value != Value::Null);
        Some(Self { value, keys: given.map(|entry| entry.key.clone()).collect() })
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.value.write_key(key);
    }

    fn schema() -> Json {
        T::schema()
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        self.value.visit_inputs(visit);
    }
}
