//! What is published, and where: each target is an output, each folder has one target.

use std::path::{Component, Path, PathBuf};

use super::Publish;
use super::entry::{Document, Text};
use super::resolve::{Bound, pick, places};
use crate::file::problem::Problem;
use crate::parameter::Reference;
use crate::suggest;

/// Resolves the entries of `publish:`.
pub(super) fn resolve(document: &Document, bound: &[Bound], problems: &mut Vec<Problem>) -> Vec<Publish> {
    let mut folders: Vec<(PathBuf, &Text)> = Vec::new();
    let mut publish = Vec::new();
    for (target, path) in &document.publish {
        let folder = folder(path, problems);
        if let Some(folder) = &folder {
            report_overlap(folder, path, &folders, problems);
            folders.push((folder.clone(), path));
        }
        let output = output(target, document, bound, problems);
        if let (Some((stage, output)), Some(_)) = (output, folder) {
            publish.push(Publish { stage, output, path: PathBuf::from(&path.text), span: target.span });
        }
    }
    publish
}

/// The stage and output that a target means.
fn output(
    target: &Text,
    document: &Document,
    bound: &[Bound],
    problems: &mut Vec<Problem>,
) -> Option<(String, String)> {
    let Some(reference) = Reference::parse(&target.text, target.span) else {
        let message = format!("`{}` is not a reference", target.text);
        problems.push(Problem::error("bad-value", target.span, message, "expected `stage` or `stage.output`"));
        return None;
    };
    let Some(place) = places(&document.stages).get(reference.stage.as_str()).copied() else {
        let ids = document.stages.iter().map(|stage| stage.id.text.as_str());
        problems.push(
            Problem::error(
                "unknown-stage",
                target.span,
                format!("`publish` names `{}`, which no stage produces", reference.stage),
                "not declared by any stage",
            )
            .with_help_if(suggest::help(&reference.stage, "declared stages", ids)),
        );
        return None;
    };
    let outputs = bound[place].outputs.as_deref()?;
    match pick(&reference, None, outputs) {
        Ok(output) => Some((reference.stage, output.name.clone())),
        Err(_) if outputs.is_empty() => {
            let message = format!("stage `{}` makes nothing to publish", reference.stage);
            problems.push(Problem::error("wrong-kind", target.span, message, "it has no outputs"));
            None
        }
        Err(misfit) => {
            problems.push(misfit.problem(&reference, outputs));
            None
        }
    }
}

/// The folder to write, without `.` and `..` where they can be resolved. It is replaced as a whole, so it cannot be one
/// that holds the pipeline file.
fn folder(path: &Text, problems: &mut Vec<Problem>) -> Option<PathBuf> {
    let mut folder = PathBuf::new();
    for component in Path::new(&path.text).components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir if matches!(folder.components().next_back(), Some(Component::Normal(_))) => {
                folder.pop();
            }
            other => folder.push(other),
        }
    }
    let has_name = matches!(folder.components().next_back(), Some(Component::Normal(_)));
    if !has_name {
        let message = format!("`{}` cannot be published to: the folder is replaced as a whole", path.text);
        problems.push(Problem::error(
            "bad-value",
            path.span,
            message,
            "expected a folder of its own, such as `./out/model`",
        ));
    }
    has_name.then_some(folder)
}

fn report_overlap(folder: &Path, path: &Text, others: &[(PathBuf, &Text)], problems: &mut Vec<Problem>) {
    let overlap = others.iter().find(|(other, _)| folder.starts_with(other) || other.starts_with(folder));
    let Some((other, first)) = overlap else { return };
    let message = if folder == other {
        format!("two targets are published to `{}`", path.text)
    } else {
        format!("`{}` and `{}` lie in each other", path.text, first.text)
    };
    problems.push(
        Problem::error("duplicate-path", path.span, message, "each target needs a folder of its own")
            .with_related(first.span, "the other one"),
    );
}
