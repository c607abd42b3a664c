//! `pipeline runs provenance`: from an artefact, a published folder or a file back to where it comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use cache::{Digest, OutputRecord, ResultRecord};
use clap::Args;
use engine::artifact::stored_files;
use engine::history::{Ancestor, Provenance, SourceFile, StageSummary, Tracer, Words};
use engine::publish::published_as;
use serde::Serialize;
use serde_json::Value;

use super::Past;
use super::stage::flattened;
use crate::render::Failure;
use crate::terminal::Look;
use crate::{Format, Global, locate, words};

/// Print the provenance of a result: every step that led to it, back to source files with their digests and pinned
/// versions.
#[derive(Args)]
pub(super) struct ProvenanceArgs {
    /// A stage, or a child of a sweep by its values, in any order, with its output where it has several; a published
    /// or exported folder, or a file of it; or the beginning of a key, of an identity or of another digest.
    #[arg(value_name = "STAGE[.OUTPUT] | PATH | DIGEST")]
    target: String,
    /// The run whose result of the stage is meant [default: the newest that has one].
    #[arg(long, value_name = "RUN")]
    run: Option<String>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What a name turned out to stand for.
#[derive(Serialize)]
struct Target {
    key: Digest,
    /// The output meant, where one is.
    output: Option<String>,
    /// What else is to be said: how it was found, and whether it is still as it was.
    notes: Vec<String>,
}

/// Where it comes from, as a program reads it.
#[derive(Serialize)]
struct ProvenanceView<'a> {
    #[serde(flatten)]
    target: &'a Target,
    results: &'a [Ancestor],
    /// The files that all of it was made from.
    files: Vec<&'a SourceFile>,
    /// The versions of what it was made from on hubs.
    pins: BTreeMap<&'a String, &'a String>,
}

/// Traces it.
pub(super) fn run(args: &ProvenanceArgs, global: &Global) -> Result<(), Failure> {
    let past = Past::open(global)?;
    let target = args.resolve(&past)?;
    let mut tracer = Tracer::new(&past.home, &past.history, &past.store);
    let provenance = tracer.trace(&target.key).map_err(Failure::machine)?;
    if provenance.results.is_empty() {
        return Err(Failure::wrong(format!("all trace of result {} is gone", target.key.short()))
            .with_help("its record was collected from the store and that of its run removed"));
    }
    match args.format {
        Format::Json => crate::print_json(&ProvenanceView::of(&target, &provenance)),
        Format::Text => Ok(Printer::new(&provenance).print(&mut crate::screen::stdout(), &target)?),
    }
}

impl<'a> ProvenanceView<'a> {
    fn of(target: &'a Target, Provenance { results }: &'a Provenance) -> Self {
        Self {
            target,
            results,
            files: results.iter().flat_map(|ancestor| &ancestor.files).collect(),
            pins: results.iter().flat_map(|ancestor| &ancestor.pins).collect(),
        }
    }
}

impl ProvenanceArgs {
    fn resolve(&self, past: &Past) -> Result<Target, Failure> {
        let path = Path::new(&self.target);
        if self.run.is_none() && (path.exists() || self.target.contains('/')) {
            return of_path(path, past);
        }
        if let Some(target) = self.of_stage(past)? {
            return Ok(target);
        }
        let is_digest = self.target.len() >= 6 && self.target.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_digest && self.run.is_none() {
            return of_digest(&self.target.to_ascii_lowercase(), past);
        }
        let run = self.run.as_deref().unwrap_or(super::LATEST);
        let recorded = past.recorded(&past.find(run)?.run, Words::Skip)?;
        locate::stage_of_run(&recorded, &self.target)?;
        Err(Failure::wrong(format!("stage `{}` has no result in run {}", self.target, recorded.summary.run)))
    }

    /// The newest result of a stage, or the one of the run that is named.
    fn of_stage(&self, past: &Past) -> Result<Option<Target>, Failure> {
        let run = self.run.as_ref().map(|run| past.find(run)).transpose()?;
        let names = [(self.target.as_str(), None)].into_iter();
        let split = self.target.rsplit_once('.').map(|(stage, output)| (stage, Some(output.to_owned())));
        for (stage, output) in names.chain(split) {
            let declared = stage.split_once('[').map_or(stage, |(declared, _)| declared);
            let mut results = past.history.results_of(declared, None).map_err(Failure::machine)?;
            results.retain(|(of, _)| run.as_ref().is_none_or(|run| run.run == *of));
            if let Some(key) = newest_key(stage, output.as_deref(), &results)? {
                return Ok(Some(Target { key, output, notes: Vec::new() }));
            }
        }
        Ok(None)
    }
}

/// The key of the stage that a name means among results, the newest run first: in the newest run that has one, of this
/// very id, else of the child of a sweep.
fn newest_key(name: &str, output: Option<&str>, results: &[(String, StageSummary)]) -> Result<Option<Digest>, Failure> {
    let meant = || results.iter().filter(|(_, stage)| stage.stage == name || locate::is_meant(stage, name));
    let newest = meant().next().map(|(run, _)| run);
    let stages: Vec<&StageSummary> = meant().filter(|(run, _)| Some(run) == newest).map(|(_, stage)| stage).collect();
    if let Some(exact) = stages.iter().find(|stage| stage.stage == name) {
        return Ok(exact.key);
    }
    match stages.as_slice() {
        [] => Ok(None),
        [one] => Ok(one.key),
        several => {
            let ids: Vec<&str> = several.iter().map(|stage| stage.stage.as_str()).collect();
            Err(locate::several_children(name, &ids, output))
        }
    }
}

/// A published or exported folder, or a file: of such a folder, or with the content of a stored one.
fn of_path(path: &Path, past: &Past) -> Result<Target, Failure> {
    let absolute = std::path::absolute(path)?;
    if !absolute.exists() {
        return Err(Failure::wrong(format!("there is no file or folder `{}`", path.display())));
    }
    for folder in absolute.ancestors().filter(|folder| folder.is_dir()) {
        let Some(published) = published_as(folder).map_err(Failure::machine)? else { continue };
        let (key, output) =
            find(past, |_, record| output_where(record, |output| output.identity == published.identity))?
                .ok_or_else(|| gone(path))?;
        let note = match published.changed {
            None => "is what was published".to_owned(),
            Some(how) => format!("is no longer what was published: {how}"),
        };
        return Ok(Target { key, output: Some(output), notes: vec![format!("{} {note}", words::path(folder))] });
    }
    let tree = if absolute.is_dir() { cache::Tree::of_folder(&absolute).ok() } else { None };
    let found = match &tree {
        // A copy made by `export` has all that the stored folder has.
        Some(tree) => {
            let digest = tree.digest();
            let same_files = |past: &Past, output: &OutputRecord| {
                stored_files(&past.store, &output.tree, &output.identity).is_ok_and(|files| files == *tree)
            };
            match find(past, |_, record| output_where(record, |output| output.tree == digest))? {
                // What was stored together with its description is copied out without that.
                None => find(past, |past, record| output_where(record, |output| same_files(past, output)))?,
                found => found,
            }
        }
        None => {
            let (digest, _) = Digest::of_file(&absolute).map_err(Failure::machine)?;
            of_object(past, &digest)?
        }
    };
    let (key, output) = found.ok_or_else(|| gone(path))?;
    Ok(Target {
        key,
        output: Some(output),
        notes: vec![format!("{} is equal to what it holds", words::path(&absolute))],
    })
}

fn gone(path: &Path) -> Failure {
    Failure::wrong(format!("no result in this home holds what `{}` is", path.display()))
        .with_help("it was made elsewhere, was changed since, or was collected; `--home` looks into another home")
}

/// The result that a digest belongs to: its key, the identity or folder of an output, or a file.
fn of_digest(beginning: &str, past: &Past) -> Result<Target, Failure> {
    let begins = |digest: &Digest| digest.to_string().starts_with(beginning);
    let results = past.store.results().map_err(Failure::machine)?;
    let keys: Vec<&Digest> = results.iter().map(|(key, _)| key).filter(|key| begins(key)).collect();
    if let [key] = keys.as_slice() {
        return Ok(Target { key: **key, output: None, notes: Vec::new() });
    }
    let found =
        find(past, |_, record| output_where(record, |output| begins(&output.identity) || begins(&output.tree)))?;
    if let Some((key, output)) = found {
        return Ok(Target { key, output: Some(output), notes: Vec::new() });
    }
    let found = match beginning.parse::<Digest>() {
        Ok(digest) => of_object(past, &digest)?,
        Err(_) => find(past, |past, record| output_with(past, record, &begins))?,
    };
    let (key, output) = found.ok_or_else(|| {
        Failure::wrong(format!("no key, output or file in this home begins with `{beginning}`"))
            .with_help("`pipeline cache ls` lists the results with their keys")
    })?;
    Ok(Target { key, output: Some(output), notes: vec!["a file of it has this digest".to_owned()] })
}

fn of_object(past: &Past, digest: &Digest) -> Result<Option<(Digest, String)>, Failure> {
    find(past, |past, record| output_with(past, record, &|file| file == digest))
}

/// The first result, in the order of their keys, of which an output fits.
fn find(
    past: &Past,
    fits: impl Fn(&Past, &ResultRecord) -> Option<String>,
) -> Result<Option<(Digest, String)>, Failure> {
    let results = past.store.results().map_err(Failure::machine)?;
    Ok(results.iter().find_map(|(key, record)| Some((*key, fits(past, record)?))))
}

fn output_where(record: &ResultRecord, fits: impl Fn(&OutputRecord) -> bool) -> Option<String> {
    record.outputs.iter().find(|(_, output)| fits(output)).map(|(name, _)| name.clone())
}

/// The output that holds a file of such a digest.
fn output_with(past: &Past, record: &ResultRecord, fits: &dyn Fn(&Digest) -> bool) -> Option<String> {
    output_where(record, |output| {
        let tree = past.store.tree(&output.tree);
        tree.is_ok_and(|tree| tree.files().iter().any(|file| fits(&file.digest)))
    })
}

/// Prints the way back as a tree; what several came from is told once.
struct Printer<'a> {
    provenance: &'a Provenance,
    told: BTreeSet<Digest>,
    look: Look,
}

impl<'a> Printer<'a> {
    fn new(provenance: &'a Provenance) -> Self {
        Self { provenance, told: BTreeSet::new(), look: Look::stdout() }
    }

    fn print(&mut self, out: &mut dyn Write, target: &Target) -> io::Result<()> {
        target.notes.iter().try_for_each(|note| self.line(out, note))?;
        self.result(out, &target.key, target.output.as_deref(), 0)?;
        self.sources(out)
    }

    fn result(&mut self, out: &mut dyn Write, key: &Digest, output: Option<&str>, depth: usize) -> io::Result<()> {
        let indent = "  ".repeat(depth);
        let Some(ancestor) = self.provenance.get(key) else {
            return self.line(out, &format!("{indent}result {}, of which all trace is gone", key.short()));
        };
        let name = ancestor.stage.clone().unwrap_or_else(|| format!("a `{}`", ancestor.kind));
        let output = output.map(|output| format!(".{output}")).unwrap_or_default();
        let title = self.look.paint("1", &format!("{name}{output}"));
        if !self.told.insert(*key) {
            return self.line(out, &format!("{indent}{title}, as above"));
        }
        self.line(out, &format!("{indent}{title}, key {}", key.short()))?;
        let indent = format!("{indent}  ");
        for line in [made_by(ancestor), made_with(ancestor)].into_iter().filter(|line| !line.is_empty()) {
            self.line(out, &format!("{indent}{line}"))?;
        }
        self.wrapped(out, &indent, &parameters(ancestor))?;
        for (name, made) in &ancestor.outputs {
            let (identity, tree) = (made.identity.short(), made.tree.short());
            self.line(out, &format!("{indent}{name} is {identity} (files {tree})"))?;
        }
        for file in &ancestor.files {
            self.line(out, &format!("{indent}read {}", in_words(file)))?;
        }
        for (pin, version) in &ancestor.pins {
            self.line(out, &format!("{indent}read {pin}, pinned to {version}"))?;
        }
        for input in &ancestor.inputs {
            self.line(out, &format!("{indent}{} is {}, from", input.field, input.identity.short()))?;
            let output = input.name.as_deref().and_then(|name| name.rsplit_once('.')).map(|(_, output)| output);
            match &input.key {
                Some(key) => self.result(out, key, output, depth + 2)?,
                None => self.line(out, &format!("{indent}  a result of which all trace is gone"))?,
            }
        }
        Ok(())
    }

    /// Words one after the other, as many as a line has room for.
    fn wrapped(&self, out: &mut dyn Write, indent: &str, words: &[String]) -> io::Result<()> {
        let most = self.look.width.saturating_sub(indent.len()).max(30);
        let mut line = String::new();
        for word in words {
            if !line.is_empty() && line.len() + 2 + word.len() > most {
                self.line(out, &format!("{indent}{line}"))?;
                line.clear();
            }
            line += &(if line.is_empty() { String::new() } else { ", ".to_owned() } + word);
        }
        if line.is_empty() { Ok(()) } else { self.line(out, &format!("{indent}{line}")) }
    }

    fn line(&self, out: &mut dyn Write, line: &str) -> io::Result<()> {
        writeln!(out, "{}", self.look.wrap(line, 2))
    }

    /// What it all began with.
    fn sources(&self, out: &mut dyn Write) -> io::Result<()> {
        let results = || self.provenance.results.iter();
        let files: BTreeSet<String> = results().flat_map(|ancestor| &ancestor.files).map(in_words).collect();
        let pins: BTreeSet<String> = results()
            .flat_map(|ancestor| &ancestor.pins)
            .map(|(pin, version)| format!("{pin}, pinned to {version}"))
            .collect();
        if files.is_empty() && pins.is_empty() {
            return Ok(());
        }
        writeln!(out, "\nall of it from")?;
        files.iter().chain(&pins).try_for_each(|line| self.line(out, &format!("  {line}")))
    }
}

/// `data/rows.jsonl, 1.6 KiB, digest ab12…`.
fn in_words(file: &SourceFile) -> String {
    let path = file.path.as_ref().map_or_else(|| file.role.clone(), |path: &PathBuf| words::path(path));
    let size = file.size.map(|size| format!(", {}", words::bytes(size))).unwrap_or_default();
    format!("{path}{size}, digest {}", file.digest.get(..12).unwrap_or(&file.digest))
}

/// `made by train (version 2) in run … on host, finished …`.
fn made_by(ancestor: &Ancestor) -> String {
    let text = |name: &str| ancestor.how.get(name).and_then(Value::as_str);
    let run = ancestor.run.as_ref().map(|run| format!(" in run {run}")).unwrap_or_default();
    let host = text("host").filter(|host| !host.is_empty()).map(|host| format!(" on {host}")).unwrap_or_default();
    let program = text("program").map(|program| format!(" by pipeline {program}")).unwrap_or_default();
    format!("{} (version {}){run}{host}{program}", ancestor.kind, ancestor.version)
}

/// What is known of how it came about, beside who and where.
fn made_with(ancestor: &Ancestor) -> String {
    const TOLD: [&str; 8] =
        ["program", "run", "host", "finished", "seconds", "peak_memory_bytes", "cpu_seconds", "work"];
    let how = ancestor.how.iter().filter(|(name, _)| !TOLD.contains(&name.as_str()));
    how.map(|(name, value)| format!("{name} {}", words::figure(value))).collect::<Vec<_>>().join(", ")
}

fn parameters(ancestor: &Ancestor) -> Vec<String> {
    // What it reads is told below, with where that comes from.
    let reads = |name: &str| ancestor.inputs.iter().any(|input| input.field == name);
    let given = flattened(&ancestor.parameters).into_iter().filter(|(name, _)| !reads(name));
    given.map(|(name, value)| format!("{name} {}", words::visible(&value).replace('\n', " "))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(run: &str, stage: &str, axes: &[(&str, i64)]) -> (String, StageSummary) {
        let summary = StageSummary {
            stage: stage.to_owned(),
            kind: "train".to_owned(),
            status: "done".to_owned(),
            key: Some(key(run, stage)),
            seconds: None,
            peak_memory_bytes: None,
            declared: "adapter".to_owned(),
            axes: axes.iter().map(|(axis, value)| ((*axis).to_owned(), Value::from(*value))).collect(),
        };
        (run.to_owned(), summary)
    }

    fn key(run: &str, stage: &str) -> Digest {
        Digest::of(format!("{run} {stage}").as_bytes())
    }

    #[test]
    fn the_newest_run_comes_before_the_exact_id() {
        let four = "adapter[rank=4]";
        let two = "adapter[rank=2,seed=1]";
        let swept = [result("b", four, &[("rank", 4)]), result("a", "adapter", &[])];
        assert_eq!(newest_key("adapter", None, &swept).unwrap(), Some(key("b", four)), "the only child");
        let [child, single] = swept;
        let exact = [result("c", "adapter", &[]), child, single];
        assert_eq!(newest_key("adapter", None, &exact).unwrap(), Some(key("c", "adapter")));
        assert_eq!(newest_key(four, None, &exact).unwrap(), Some(key("b", four)));
        let [_, child, single] = exact;
        let several = [result("b", two, &[("rank", 2), ("seed", 1)]), child, single];
        assert!(newest_key("adapter", None, &several).is_err());
        assert_eq!(newest_key("adapter[seed=1]", None, &several).unwrap(), Some(key("b", two)));
        assert_eq!(newest_key("other", None, &several).unwrap(), None);
    }
}
