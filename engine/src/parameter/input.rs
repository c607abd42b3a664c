//! References to other stages' outputs, and to local files.

use serde_json::json;

use super::scalar::read_text;
use super::{ArtifactKind, Collected, Input, Json, KeyWriter, LocalPath, OneOf, Parameter, Reader, Reference};
use crate::file::tree::{Node, Value};

/// What the schema says of a path, by which a page knows one.
const PATH: &str = "A path relative to the pipeline file; its content is in the key";

impl Reference {
    /// Reads `stage` or `stage.output`. The dots inside the brackets of `adapter[lora.rank=4]` are part of the id.
    pub fn parse(text: &str, span: crate::file::source::Span) -> Option<Self> {
        let after_brackets = text.rfind(']').map_or(0, |at| at + 1);
        let (stage, output) = match text[after_brackets..].find('.') {
            Some(dot) => {
                let dot = after_brackets + dot;
                (&text[..dot], Some(&text[dot + 1..]))
            }
            None => (text, None),
        };
        let fine = !stage.is_empty() && output.is_none_or(|output| !output.is_empty() && !output.contains('.'));
        fine.then(|| Self { stage: stage.to_owned(), output: output.map(str::to_owned), span })
    }
}

impl<K: ArtifactKind> Parameter for Input<K> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let text = read_text(node, reader, "the id of a stage")?;
        let Some(reference) = Reference::parse(text, node.span) else {
            reader.bad_value(node, format!("`{text}` is not a reference"), "`stage` or `stage.output`");
            return None;
        };
        reader.refer(reference.clone(), K::KINDS);
        Some(Self::new(reference))
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.input(&self.reference, K::KINDS);
    }

    fn schema() -> Json {
        let what = match K::KINDS {
            [] => "Any stage".to_owned(),
            kinds => format!("A stage that makes {}", kinds.join(" or ")),
        };
        json!({ "type": "string", "description": format!("{what}: `stage` or `stage.output`.") })
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        visit(&self.reference, K::KINDS);
    }

    fn collected() -> Option<Collected> {
        Some(Collected::Itself)
    }
}

impl<L: Parameter, I: Parameter> Parameter for OneOf<L, I> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match node.value {
            Value::String(_) => I::read(node, reader).map(Self::Stage),
            _ => L::read(node, reader).map(Self::Literal),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Self::Literal(literal) => literal.write_key(key),
            Self::Stage(input) => input.write_key(key),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [L::schema(), I::schema()] })
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        match self {
            Self::Literal(literal) => literal.visit_inputs(visit),
            Self::Stage(input) => input.visit_inputs(visit),
        }
    }
}

impl Parameter for LocalPath {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let text = read_text(node, reader, "a string with a path")?;
        if text.is_empty() {
            reader.bad_value(node, "the path is empty", "a path");
            return None;
        }
        Some(Self { text: text.to_owned(), span: node.span })
    }

    /// Writes nothing: what the path leads to enters the key, as [`crate::stage::Outside::Files`].
    fn write_key(&self, _key: &mut KeyWriter<'_>) {}

    fn schema() -> Json {
        json!({ "type": "string", "description": format!("{PATH}.") })
    }
}
