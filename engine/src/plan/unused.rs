//! Stages whose results nobody uses.

use std::collections::HashSet;

use super::Publish;
use super::entry::StageEntry;
use super::left_out::LeftOuts;
use super::resolve::Bound;
use crate::file::problem::{Problem, Severity};
use crate::stage::Registry;

/// Warns of each stage that nothing reads, waits for or publishes, where the file has goals and the stage is none of
/// them. A file without any goal is one that prepares something to be looked at; and where something is wrong, the
/// missing reader may be that.
pub(super) fn warn(
    stages: &[StageEntry],
    bound: &[Bound],
    publish: &[Publish],
    left_out: &LeftOuts,
    registry: &Registry,
    problems: &mut Vec<Problem>,
) {
    let wrong = |bound: &Bound| bound.kind.is_none();
    if bound.iter().any(wrong) || problems.iter().any(|problem| problem.severity == Severity::Error) {
        return;
    }
    let goals =
        bound.iter().enumerate().filter(|(_, bound)| registry.get(bound.name).is_some_and(|kind| kind.is_goal()));
    let goals: Vec<usize> = goals.map(|(place, _)| place).collect();
    if publish.is_empty() && goals.is_empty() {
        return;
    }
    // One child of a sweep that is used is enough.
    let waited_for = bound.iter().flat_map(|bound| &bound.waits_for).map(|wait| wait.stage);
    let mut used: HashSet<&str> = waited_for.chain(goals).map(|place| stages[place].declared.as_str()).collect();
    let published: HashSet<&str> = publish.iter().map(|publish| publish.stage.as_str()).collect();
    used.extend(
        stages.iter().filter(|stage| published.contains(stage.id.text.as_str())).map(|stage| stage.declared.as_str()),
    );
    for (place, (stage, bound)) in stages.iter().zip(bound).enumerate() {
        let id = stage.declared.as_str();
        if left_out.has(place) || !used.insert(id) {
            continue;
        }
        let message = format!("nothing uses what stage `{id}` makes");
        let help = format!("let a stage read it, publish it, or remove it; a `{}` is no end in itself", bound.name);
        problems.push(
            Problem::warning("unused-stage", stage.id.span, message, "read by no stage, and not published")
                .with_help(help),
        );
    }
}
