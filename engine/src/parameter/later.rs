//! Parameters that a kind got after its first results were stored.

use serde_json::Value;

use super::{Fields, KeyWriter, Node, ObjectSchema, Parameter, Reader, Record, Reference};

/// Parameters of which a key has nothing where none is given: it is what it was before there were any.
#[derive(Debug)]
pub struct Later<R>(pub R);

/// Whether any of some parameters is given.
pub trait Given {
    /// Whether the file gives what the others go with.
    fn is_given(&self) -> bool;
}

impl<R: Record + Given> Record for Later<R> {
    fn names() -> Vec<&'static str> {
        R::names()
    }

    fn read_fields(fields: &mut Fields<'_>) -> Option<Self> {
        R::read_fields(fields).map(Self)
    }

    fn write_fields(&self, key: &mut KeyWriter<'_>) {
        if self.0.is_given() {
            self.0.write_fields(key);
        }
    }

    fn add_to(schema: ObjectSchema) -> ObjectSchema {
        R::add_to(schema)
    }
}

impl<R: Record + Given> Parameter for Later<R> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        R::read(node, reader).map(Self)
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.write_fields(key);
    }

    fn schema() -> Value {
        R::schema()
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        self.0.visit_inputs(visit);
    }
}
