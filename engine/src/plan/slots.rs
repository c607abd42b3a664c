//! Slots: things of which there are so many, such as licences, that stages take while they run.

use std::collections::HashMap;

use super::entry::Document;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::suggest;

/// Checks that what stages take is declared and that there is enough of it for each of them alone.
pub(super) fn check(document: &Document, problems: &mut Vec<Problem>) {
    let total = |name: &str| document.slots.get(name).copied();
    let known: Vec<&str> = document.slots.keys().map(String::as_str).collect();
    for stage in &document.stages {
        let spans: HashMap<&str, Span> = stage.slot_spans.iter().map(|(name, span)| (name.as_str(), *span)).collect();
        for (name, wanted) in &stage.resources.slots {
            let span = spans.get(name.as_str()).copied().unwrap_or(stage.id.span);
            let id = &stage.declared;
            match total(name) {
                None => problems.push(
                    Problem::error(
                        "unknown-slot",
                        span,
                        format!("stage `{id}` takes slots of `{name}`, which the file does not declare"),
                        "not declared under `slots:`",
                    )
                    .with_help(format!("say how many there are: `slots: {{ {name}: {wanted} }}`"))
                    .with_help_if(suggest::nearest(name, &known).map(|near| format!("did you mean `{near}`?"))),
                ),
                Some(total) if *wanted > total => problems.push(
                    Problem::error(
                        "never-fits",
                        span,
                        format!("stage `{id}` takes {wanted} of `{name}`, and there are {total}: it could never run"),
                        format!("more than {total}"),
                    )
                    .with_help(format!("lower it, or raise `slots.{name}` (for one run: `--slots {name}={wanted}`)")),
                ),
                Some(_) => {}
            }
        }
    }
}
