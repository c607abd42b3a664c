//! `pipeline cache rm`: removes results by name.

use std::collections::BTreeSet;

use cache::gc::Removal;
use cache::{Digest, Store};
use clap::Args;
use engine::suggest;

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

/// The results that a name stands for: those of a stage and of its children in sweeps, or the one whose key begins so.
fn named(name: &str, present: &BTreeSet<Digest>, opened: &Opened) -> Result<BTreeSet<Digest>, Failure> {
    let of_stage = opened.references.results_of(name);
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

fn unknown(name: &str, opened: Option<&Opened>) -> Failure {
    let known: Vec<String> = opened
        .iter()
        .flat_map(|opened| opened.references.stages())
        .flat_map(|stage| [stage.stage.clone(), format!("{}/{}", stage.pipeline, stage.stage)])
        .collect();
    Failure::wrong(format!("no result is of a stage `{name}`, and none has a key that begins so"))
        .with_help_if(suggest::help(name, "the stages", &known))
}
