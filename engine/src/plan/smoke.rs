//! A smoke run's plan: the same stages and checks, each stage doing as little as its kind can.
//!
//! What "little" is every kind says itself ([`StageKind::smoke`](crate::stage::StageKind::smoke)); here its values take
//! the place of the file's, in the tree, so that what is wrong with the rest is still shown where it is.

use super::Plan;
use crate::file::source::Span;
use crate::file::tree::{Entry, Node, Value};
use crate::stage::{Registry, Smoke};

/// How much a plan's stages do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scale {
    /// What the file says.
    #[default]
    Full,
    /// As little as shows that the file works.
    Smoke,
}

impl Scale {
    /// How the names of smoke runs' plans end in the history.
    pub(crate) const SMOKE_ENDING: &str = " (smoke)";
}

/// Puts into every stage's parameters what its kind does in a smoke run.
pub(super) fn shrink(root: &mut Node, registry: &Registry) {
    let Value::Map(entries) = &mut root.value else { return };
    let Some(stages) = entries.iter_mut().find(|entry| entry.key == "stages") else { return };
    let Value::Map(stages) = &mut stages.value.value else { return };
    for stage in stages {
        shrink_stage(stage, registry);
    }
}

/// Does so to one stage.
pub(super) fn shrink_stage(stage: &mut Entry, registry: &Registry) {
    let Some(Value::String(uses)) = stage.value.get("uses").map(|uses| &uses.value) else { return };
    let Some(kind) = registry.get(uses) else { return };
    let with = stage.value.get("with").map_or(serde_json::Value::Null, Node::to_json);
    let Smoke::With(values) = (kind.smoke)(&with) else { return };
    for (path, value) in values {
        let names: Vec<&str> = std::iter::once("with").chain(path.split('.')).collect();
        set(&mut stage.value, &names, &value, stage.key_span);
    }
}

/// The plan as that of a smoke run: results with keys of their own, a name of its own in the history, and nothing
/// published.
pub(super) fn marked(mut plan: Plan, registry: &Registry) -> Plan {
    for stage in &mut plan.stages {
        stage.smoke = registry.get(stage.kind).is_some_and(|kind| (kind.smoke)(&stage.parameters) != Smoke::Same);
    }
    plan.name.push_str(Scale::SMOKE_ENDING);
    plan.publish.clear();
    plan.gates.clear();
    plan
}

/// Sets the value at a path below mappings. Where something else than a mapping is in the way the file is wrong, which
/// its check says.
fn set(node: &mut Node, path: &[&str], value: &serde_json::Value, otherwise: Span) {
    let [first, rest @ ..] = path else {
        node.value = Node::from_json(value).value;
        return;
    };
    if node.value == Value::Null {
        node.value = Value::Map(Vec::new());
    }
    let Value::Map(entries) = &mut node.value else { return };
    let at = entries.iter().position(|entry| entry.key == **first).unwrap_or_else(|| {
        let value = Node { span: otherwise, value: Value::Null };
        entries.push(Entry { key: (*first).to_owned(), key_span: otherwise, value });
        entries.len() - 1
    });
    set(&mut entries[at].value, rest, value, otherwise);
}
