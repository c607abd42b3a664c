//! A stage of the file and its kind: the kind reads the parameters.

use super::elsewhere;
use super::entry::StageEntry;
use super::not_served;
use super::resolve::Bound;
use crate::file::problem::Problem;
use crate::parameter::Reader;
use crate::stage::Registry;
use crate::suggest;

/// Finds a stage's kind and lets it read its parameters.
pub(super) fn bind(stage: &StageEntry, registry: &Registry) -> Bound {
    let Some(uses) = &stage.uses else { return Bound::default() };
    let Some(kind) = registry.get(&uses.text) else {
        let names: Vec<&str> = registry.kinds().map(|kind| kind.name()).collect();
        let problem = Problem::error(
            "unknown-kind",
            uses.span,
            format!("unknown stage kind `{}`", uses.text),
            "no kind of this name",
        );
        let problem = problem.with_help_if(suggest::help(&uses.text, "known kinds", names.iter().copied()));
        return Bound { problems: vec![problem], ..Bound::default() };
    };
    let mut reader = Reader::default();
    let read = kind.read(&stage.with, &mut reader);
    if reader.problems.iter().any(|problem| problem.code == "unknown-key") {
        elsewhere::point_to(kind, &stage.with, registry, &mut reader.problems);
    }
    let references = read.as_ref().map_or(reader.references, |read| read.inputs());
    let outputs = read.as_ref().map(|read| read.outputs());
    let (named, problems) = (reader.named, reader.problems);
    let (name, version) = (kind.name(), kind.version());
    let mut bound = Bound { name, version, kind: read, outputs, references, named, problems, ..Bound::default() };
    bound.problems.extend(not_served::warnings(stage, &bound));
    bound
}
