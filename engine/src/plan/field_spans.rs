//! Where the fields of a stage's `with:` stand, under the paths that its key spells.

use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::dotted;

/// Every value below a node, by its path.
pub(super) fn field_spans(node: &Node) -> Vec<(String, Span)> {
    let mut spans = Vec::new();
    visit(node, "", &mut |path, node| {
        spans.push((path.to_owned(), node.span));
    });
    spans
}

/// The path of the value at a place.
pub(super) fn field_at(node: &Node, span: Span) -> Option<String> {
    let mut found = None;
    visit(node, "", &mut |path, node| {
        if node.span == span && found.is_none() {
            found = Some(path.to_owned());
        }
    });
    found
}

fn visit(node: &Node, path: &str, see: &mut dyn FnMut(&str, &Node)) {
    if !path.is_empty() {
        see(path, node);
    }
    match &node.value {
        Value::Map(entries) => {
            for entry in entries {
                visit(&entry.value, &dotted(path, &entry.key), see);
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                visit(item, &format!("{path}[{index}]"), see);
            }
        }
        _ => {}
    }
}
