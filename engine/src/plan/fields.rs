//! Unknown keys of a stage that are known elsewhere: a level deeper (`learning_rate` is `optimizer.learning_rate`), or
//! in another kind (`max_seq_len` belongs to `tokenize`). Both are common with files that were written for other
//! programs.

use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{Json, dotted};
use crate::stage::{Kind, Registry};
use crate::suggest;

/// What it costs to gather the keys of a kind, in names that could be looked at meanwhile.
const COST_OF_KEYS: usize = 100;

/// Says of unknown keys below a stage's `with:` where they are known.
pub(super) fn point_to(kind: &Kind, with: &Node, registry: &Registry, problems: &mut [Problem]) {
    if !suggest::spend(COST_OF_KEYS) {
        return;
    }
    let paths = paths_of(kind);
    for problem in problems.iter_mut().filter(|problem| problem.code == "unknown-key") {
        if !suggest::spend(COST_OF_KEYS) {
            return;
        }
        let Some((inside, key)) = key_at(with, problem.span, "") else { continue };
        if let Some((_, instead)) = kind.keys_elsewhere.iter().find(|(name, _)| *name == key) {
            problem.help = Some((*instead).to_owned());
            continue;
        }
        let near = problem.help.as_deref().is_some_and(|said| said.starts_with("did you mean"));
        let better = spelled_out(&paths, key).or_else(|| if near { None } else { nearest(&paths, key) });
        if let Some(path) = better {
            let here = path.strip_prefix(inside.as_str()).and_then(|rest| rest.strip_prefix('.'));
            problem.help = Some(format!("did you mean `{}`?", here.unwrap_or(path)));
        } else if !near && let Some(help) = of_other_kinds(kind, key, registry) {
            problem.help = Some(help);
        }
    }
}

/// The one nested key that is called so, alone or with the key around it: `learning_rate`, `lora_alpha`, `lora_r`.
fn spelled_out<'a>(paths: &'a [String], key: &str) -> Option<&'a str> {
    let is = |path: &&String| path.contains('.') && (last(path) == key || path.replace('.', "_") == key);
    let mut exact = paths.iter().filter(is);
    if let (Some(path), None) = (exact.next(), exact.next()) {
        return Some(path);
    }
    // `lora_r` stands for `lora.rank`: the rest begins a key of the mapping that the first word names.
    let begins = |path: &&String| {
        let (Some((outer, rest)), Some((group, name))) = (key.split_once('_'), path.split_once('.')) else {
            return false;
        };
        outer == group && name.starts_with(rest)
    };
    paths.iter().filter(begins).min_by_key(|path| path.len()).map(String::as_str)
}

/// The nested key whose spelling with all the keys around it is near.
fn nearest<'a>(paths: &'a [String], key: &str) -> Option<&'a str> {
    let joined: Vec<String> = paths.iter().map(|path| path.replace('.', "_")).collect();
    let near = suggest::nearest(key, &joined)?;
    joined.iter().position(|path| path == near).map(|at| paths[at].as_str())
}

/// The other kinds that have such a key.
fn of_other_kinds(kind: &Kind, key: &str, registry: &Registry) -> Option<String> {
    if !suggest::spend(registry.kinds().count() * COST_OF_KEYS) {
        return None;
    }
    let has = |other: &&Kind| paths_of(other).iter().any(|path| path == key);
    let having: Vec<String> = registry.kinds().filter(has).map(|other| format!("`{}`", other.name)).collect();
    (!having.is_empty()).then(|| format!("`{}` has no such key; {} has one", kind.name, having.join(", ")))
}

/// The keys of a kind, nested ones with dots.
fn paths_of(kind: &Kind) -> Vec<String> {
    let mut paths = Vec::new();
    collect(&(kind.schema)(), "", &mut paths);
    paths.sort();
    paths.dedup();
    paths
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// The paths of a schema's properties.
fn collect(schema: &Json, prefix: &str, paths: &mut Vec<String>) {
    for alternative in schema["anyOf"].as_array().into_iter().flatten() {
        collect(alternative, prefix, paths);
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        collect(property, &path, paths);
        paths.push(path);
    }
}

/// The key that is at a place, and the path of the mapping that holds it.
fn key_at<'n>(node: &'n Node, span: Span, path: &str) -> Option<(String, &'n str)> {
    match &node.value {
        Value::Map(entries) => entries.iter().find_map(|entry| match entry.key_span == span {
            true => Some((path.to_owned(), entry.key.as_str())),
            false => key_at(&entry.value, span, &dotted(path, &entry.key)),
        }),
        Value::List(items) => items.iter().find_map(|item| key_at(item, span, path)),
        _ => None,
    }
}

// Where the fields of a stage's `with:` stand, under the paths that its key spells.

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
