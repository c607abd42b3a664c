//! What of a file with mistakes can still be checked further: stages with none in their own parameters.

use std::collections::{BTreeMap, HashSet};

use super::entry::StageEntry;
use crate::file::interpolate::Interpolated;
use crate::file::problem::{Problem, Severity};
use crate::file::source::Span;
use crate::file::tree::{Node, Value};

/// Where a file is wrong.
pub(super) struct Mistakes<'a> {
    interpolated: &'a Interpolated,
    /// Where errors begin, by text, in order.
    begin: BTreeMap<u32, Vec<usize>>,
    spans: HashSet<Span>,
}

impl<'a> Mistakes<'a> {
    pub(super) fn of(problems: &[Problem], interpolated: &'a Interpolated) -> Self {
        let errors = problems.iter().filter(|problem| problem.severity == Severity::Error);
        let spans: HashSet<Span> = errors.map(|problem| problem.span).collect();
        let mut begin: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        spans.iter().for_each(|span| begin.entry(span.source.0).or_default().push(span.offset));
        begin.values_mut().for_each(|offsets| offsets.sort_unstable());
        Self { interpolated, begin, spans }
    }

    /// Whether one of them is in the parameters of a stage: what follows from it needs no saying.
    pub(super) fn touch(&self, stage: &StageEntry) -> bool {
        let whole = stage.with.span;
        let is_within = self.begin.get(&whole.source.0).is_some_and(|offsets| {
            let next = offsets.partition_point(|offset| *offset < whole.offset);
            offsets.get(next).is_some_and(|offset| *offset < whole.end())
        });
        // A key may come from the command line, and a value from there or from a variable.
        is_within || any(&stage.with, &|span| self.spans.contains(&span) || self.interpolated.is_unknown(&span))
    }
}

/// Whether something holds of the place of a value, or of a key or value in it.
fn any(node: &Node, holds: &dyn Fn(Span) -> bool) -> bool {
    let within = match &node.value {
        Value::Map(entries) => entries.iter().any(|entry| holds(entry.key_span) || any(&entry.value, holds)),
        Value::List(items) => items.iter().any(|item| any(item, holds)),
        _ => false,
    };
    within || holds(node.span)
}
