//! Fields that take texts only: a number or a boolean in one is the text that the file has for it, so that `007` is not
//! `7`. What comes out of a variable has no such text.

use crate::file::scalar;
use crate::file::source::Sources;
use crate::file::tree::{Node, Value};
use crate::stage::Registry;

/// Makes numbers and booleans texts in the parameters of which a stage's kind says that they take texts
/// ([`StageKind::TEXTS`](crate::stage::StageKind::TEXTS)).
pub(super) fn keep(root: &mut Node, registry: &Registry, sources: &Sources) {
    for stage in values(field(root, "stages")) {
        let Some(Value::String(uses)) = stage.get("uses").map(|uses| &uses.value) else { continue };
        let texts: &[&str] = registry.get(uses).map_or(&[], |kind| kind.texts);
        let Some(with) = field(stage, "with") else { continue };
        for name in texts {
            values(field(with, name)).into_iter().for_each(|value| keep_one(value, sources));
        }
    }
}

fn keep_one(node: &mut Node, sources: &Sources) {
    if !matches!(node.value, Value::Bool(_) | Value::Integer(_) | Value::Float(_)) {
        return;
    }
    // In the place of an alias stands another text.
    if let Some(text) = sources.text(node.span).filter(|text| scalar::plain(text) == node.value) {
        node.value = Value::String(text.to_owned());
    }
}

fn field<'a>(node: &'a mut Node, key: &str) -> Option<&'a mut Node> {
    let Value::Map(entries) = &mut node.value else { return None };
    entries.iter_mut().find(|entry| entry.key == key).map(|entry| &mut entry.value)
}

fn values(node: Option<&mut Node>) -> Vec<&mut Node> {
    match node.map(|node| &mut node.value) {
        Some(Value::Map(entries)) => entries.iter_mut().map(|entry| &mut entry.value).collect(),
        _ => Vec::new(),
    }
}
