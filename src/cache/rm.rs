//! `pipeline cache rm`: removes results by name.

use std::collections::BTreeSet;

use cache::gc::Removal;
use cache::{Digest, Store};
use clap::Args;
use engine::history::StageOf;
use engine::suggest;
use serde_json::Value;

use super::{Opened, gc};
use crate::Format;
use crate::render::Failure;

/// Remove results, and the files that no other result needs.
///
/// A result that an active run uses is kept.
#[derive(Args)]
pub(super) struct RmArgs {
    /// The stages whose results are removed, as `STAGE` or `PIPELINE/STAGE`, or keys of results, as `cache ls` prints
    /// them. The name of a swept stage is that of all its children, `STAGE[AXIS=VALUE]` of those with this value.
    #[arg(value_name = "STAGE|KEY", required = true)]
    names: Vec<String>,
    /// Only print what would be removed.
    #[arg(long)]
    dry_run: bool,
}

/// The shortest beginning of a key that is taken for one.
const SHORTEST_KEY: usize = 6;

/// Removes them.
pub(super) fn run(args: &RmArgs, opened: Option<&Opened>, format: Format) -> Result<(), Failure> {
    let Some(opened) = opened else { return Err(unknown(&args.names[0], None)) };
    let present = keys(&opened.store)?;
    let mut chosen = BTreeSet::new();
    for name in &args.names {
        chosen.extend(named(name, &present, opened)?);
    }
    let removal = if args.dry_run { Removal::DryRun } else { Removal::Real };
    let collected = opened.store.remove_results(&chosen, removal).map_err(Failure::machine)?;
    gc::tell(&collected, Some(opened), removal, format)
}

fn keys(store: &Store) -> Result<BTreeSet<Digest>, Failure> {
    let results = store.results().map_err(Failure::machine)?;
    Ok(results.into_iter().map(|(key, _)| key).collect())
}

/// The results that a name stands for: those of a stage, or the one whose key begins so.
fn named(name: &str, present: &BTreeSet<Digest>, opened: &Opened) -> Result<BTreeSet<Digest>, Failure> {
    let mut of_stage = opened.references.results_of(name);
    if of_stage.is_empty() {
        of_stage = of_children(name, opened);
    }
    if !of_stage.is_empty() {
        return Ok(of_stage.intersection(present).copied().collect());
    }
    let begins = |key: &&Digest| name.len() >= SHORTEST_KEY && key.to_string().starts_with(&name.to_ascii_lowercase());
    if name.len() < SHORTEST_KEY && present.iter().any(|key| key.to_string().starts_with(&name.to_ascii_lowercase())) {
        let message = format!("no result is of a stage `{name}`, and the beginning of a key is too short");
        return Err(Failure::wrong(message).with_help(format!("give at least {SHORTEST_KEY} letters of the key")));
    }
    let found: BTreeSet<Digest> = present.iter().filter(begins).copied().collect();
    match found.len() {
        0 => Err(unknown(name, Some(opened))),
        1 => Ok(found),
        several => Err(Failure::wrong(format!("{several} results have a key that begins with `{name}`"))
            .with_help("give more of the key")),
    }
}

/// The results of the children of sweeps that a name means.
fn of_children(name: &str, opened: &Opened) -> BTreeSet<Digest> {
    let stages = opened.references.stages().into_iter().filter(|stage| is_meant(stage, name));
    stages.flat_map(|of| opened.references.results_of(&format!("{}/{}", of.pipeline, of.stage))).collect()
}

/// Whether a name means a child of a sweep. What runs record of it here is its id alone: one that has lists among its
/// values is meant by that, or by the name of the swept stage.
fn is_meant(stage: &StageOf, name: &str) -> bool {
    let name = name.strip_prefix(&stage.pipeline).and_then(|rest| rest.strip_prefix('/')).unwrap_or(name);
    let Some((declared, values)) = stage.stage.strip_suffix(']').and_then(|id| id.split_once('[')) else {
        return false;
    };
    let value = |label: &str| serde_json::from_str(label).unwrap_or_else(|_| Value::from(label));
    let axis = |text: &str| text.split_once('=').map(|(axis, label)| (axis.to_owned(), value(label)));
    let axes: Vec<(String, Value)> = values.split(',').map(axis).collect::<Option<_>>().unwrap_or_default();
    engine::plan::is_meant_by(declared, axes.iter().map(|(axis, value)| (axis.as_str(), value)), name)
}

fn unknown(name: &str, opened: Option<&Opened>) -> Failure {
    let known: Vec<String> = opened
        .iter()
        .flat_map(|opened| opened.references.stages())
        .flat_map(|stage| [stage.stage.clone(), format!("{}/{}", stage.pipeline, stage.stage)])
        .collect();
    Failure::wrong(format!("no result is of a stage `{name}`, and none has a key that begins so"))
        .with_help_if(suggest::help(name, "the stages", &known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_meant_by_its_values_in_any_order_and_spelling() {
        let child = |id: &str| StageOf { pipeline: "qs".to_owned(), stage: id.to_owned() };
        let one = child("adapter[optimizer.learning_rate=0.001,seed=1]");
        for name in [
            "adapter",
            "qs/adapter",
            "adapter[seed=1]",
            "adapter[seed=1,optimizer.learning_rate=1e-3]",
            "qs/adapter[optimizer.learning_rate=0.0010]",
        ] {
            assert!(is_meant(&one, name), "{name}");
        }
        for name in ["adapter[seed=2]", "adapter[rank=1]", "other/adapter", "adapt", "adapter[seed=\"1\"]"] {
            assert!(!is_meant(&one, name), "{name}");
        }
        assert!(is_meant(&child("a[x=\"1\"]"), "a[x=\"1\"]") && !is_meant(&child("a[x=\"1\"]"), "a[x=1]"));
        assert!(!is_meant(&child("adapter"), "adapter[seed=1]"));
        assert!(is_meant(&child("a[m=[q,v]]"), "a") && !is_meant(&child("a[m=[q,v]]"), "a[m=[q]]"));
    }
}
