//! Keys of a plan's stages: what each reads from outside, and the document that says everything its result depends on.
//!
//! It leaves to others: how the parameters write themselves ([`crate::parameter`]), and what is done with a key
//! ([`crate::run`]).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use cache::{Class, Digest, KeyDocument, StatCache};

use crate::context::pick;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::home::CACHEDIR_SIGNATURE;
use crate::lock_file::{self, LockFile};
use crate::parameter::{KeyWriter, Reference};
use crate::pin::Pinned;
use crate::plan::{Plan, PlannedStage, ResolvedInput};
use crate::protocol::{FileGrant, Named};
use crate::stage::{Counted, Outside, PinRequest};

/// Folders below this depth are a loop of links.
const DEEPEST_FOLDER: usize = 64;

/// What makes a path a pattern.
const WILDCARDS: [char; 3] = ['*', '?', '['];

/// Begins the entries that say of which kind an input is.
pub(crate) const KIND_OF: &str = "@kind_of.";
/// The entries of a key document that hold pins begin so.
pub(crate) const PIN: &str = "@pins.";

/// What one stage reads from outside the pipeline.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StageOutside {
    /// Source files by role, in order.
    pub files: BTreeMap<String, Vec<FileGrant>>,
    /// What mutable references are, by `kind:name@revision`.
    pub pins: BTreeMap<String, Pinned>,
    /// What is not pinned yet.
    pub unpinned: Vec<PinRequest>,
}

/// A stage's key document, as far as it is known.
#[derive(Debug, Clone, PartialEq)]
pub struct StageKey {
    /// Everything the result depends on.
    pub document: KeyDocument,
    /// Inputs and pins that are not known yet; while there are any, the document has no meaning as a key.
    pub unknown: usize,
}

/// What a stage reads from outside, found and not read.
pub(crate) struct Reads {
    /// Its source files by role, each with its path below what was asked for.
    pub files: BTreeMap<String, Vec<(PathBuf, String)>>,
    /// What it wants to be pinned.
    pub pins: Vec<PinRequest>,
    /// What cannot be found.
    pub problems: Vec<Problem>,
    named: BTreeMap<String, Named>,
}

/// Finds what a stage reads from outside.
pub(crate) fn look_outside(stage: &PlannedStage, plan: &Plan) -> Reads {
    let (files, named) = (BTreeMap::new(), BTreeMap::new());
    let mut reads = Reads { files, pins: Vec::new(), problems: Vec::new(), named };
    for outside in stage.bound.outside() {
        match outside {
            Outside::Pin(request) => reads.pins.push(request),
            Outside::Files { role, pattern, span, count } => match find(folder_of(plan, span), &pattern, span, count) {
                Ok(found) => {
                    reads.named.insert(role.clone(), found.named);
                    reads.files.insert(role, found.files);
                }
                Err(problem) => reads.problems.push(*problem),
            },
        }
    }
    reads
}

impl Reads {
    /// The same with digests and commits, where all of them are known without a file being read.
    pub(crate) fn outside<'a>(
        &self,
        digest: &dyn Fn(&Path) -> Option<(Digest, u64)>,
        pinned: &dyn Fn(&PinRequest) -> Option<&'a Pinned>,
    ) -> Option<StageOutside> {
        if !self.problems.is_empty() {
            return None;
        }
        let mut outside = StageOutside::default();
        for request in &self.pins {
            outside.pins.insert(lock_file::name(request), pinned(request)?.clone());
        }
        for (role, found) in &self.files {
            let named = self.named.get(role).copied();
            let grant = |(path, relative): &(PathBuf, String)| {
                let (digest, size) = digest(path)?;
                Some(FileGrant { path: path.clone(), relative: relative.clone(), digest, size, named })
            };
            outside.files.insert(role.clone(), found.iter().map(grant).collect::<Option<_>>()?);
        }
        Some(outside)
    }
}

/// Finds and hashes the source files of each stage, in the order of the plan. Files whose attributes are unchanged are
/// not read.
///
/// # Errors
/// All problems: files that are missing or cannot be read.
pub fn read_outside(plan: &Plan, files: &mut StatCache, lock: &LockFile) -> Result<Vec<StageOutside>, Vec<Problem>> {
    read_rest(plan, plan.stages.iter().map(|_| None).collect(), files, lock)
}

/// [`read_outside`] for the stages of which that is not known.
///
/// # Errors
/// As there.
pub(crate) fn read_rest(
    plan: &Plan,
    known: Vec<Option<StageOutside>>,
    files: &mut StatCache,
    lock: &LockFile,
) -> Result<Vec<StageOutside>, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut read = |stage| read_stage(stage, plan, files, lock, &mut problems);
    let stages = plan.stages.iter().zip(known);
    let read = stages.map(|(stage, known)| known.unwrap_or_else(|| read(stage))).collect();
    if problems.is_empty() { Ok(read) } else { Err(problems) }
}

/// The key of a stage; `identity` gives the identity of an input that exists already.
///
/// Entries that are no parameters begin with `@`, which no parameter's name can hold.
pub fn stage_key(
    stage: &PlannedStage,
    outside: &StageOutside,
    identity: impl Fn(&ResolvedInput) -> Option<Digest>,
) -> StageKey {
    let mut document = KeyDocument::default();
    document.push("@kind", stage.kind, Class::Semantic);
    document.push("@version", stage.version.to_string(), Class::Semantic);
    if stage.smoke {
        document.push("@smoke", "true", Class::Semantic);
    }
    let known = |reference: &Reference, kinds: &'static [&'static str]| identity(input_of(stage, reference, kinds)?);
    let mut writer = KeyWriter::new(&mut document, &known);
    stage.bound.write_whole_key(&mut writer);
    let unknown = writer.unresolved.len() + outside.unpinned.len();
    let of_any_kind = std::mem::take(&mut writer.of_any_kind);
    push_kinds(&mut document, of_any_kind, |reference| Some(input_of(stage, reference, &[])?.kind.as_str()));
    for (role, grants) in &outside.files {
        for (order, grant) in grants.iter().enumerate() {
            let value = format!("{} {}", keyed_name(grant, grants.len()), grant.digest);
            document.push(format!("@files.{role}[{order}]"), value, Class::Semantic);
        }
    }
    // The commit says what the files are.
    for (name, pinned) in &outside.pins {
        document.push(format!("{PIN}{name}"), pinned.commit.as_str(), Class::Semantic);
    }
    for (axis, value) in stage.axes.iter().filter(|(axis, _)| stage.measured.contains(axis)) {
        document.push(format!("@measured.{axis}"), value.to_string(), Class::Semantic);
    }
    StageKey { document, unknown }
}

/// Writes of which kind those inputs are that may be of any: equal files of two kinds are two things to who is told of
/// the kind.
pub(crate) fn push_kinds<'a>(
    document: &mut KeyDocument,
    of_any_kind: Vec<(String, Reference)>,
    kind: impl Fn(&Reference) -> Option<&'a str>,
) {
    for (path, reference) in of_any_kind {
        if let Some(kind) = kind(&reference) {
            document.push(format!("{KIND_OF}{path}"), kind, Class::Semantic);
        }
    }
}

/// The planned input that a reference in a stage's parameters stands for.
pub fn input_of<'a>(stage: &'a PlannedStage, reference: &Reference, kinds: &[&str]) -> Option<&'a ResolvedInput> {
    let same_stage = stage.inputs.iter().filter(|input| input.stage == reference.stage);
    pick(reference, kinds, same_stage.map(|input| (input, input.output.as_str(), input.kind.as_str())))
}

/// As much of a file's name as a reader may act upon, of so many files of a role. Its folder never counts: a data set
/// that moved is the same data set.
fn keyed_name(grant: &FileGrant, files: usize) -> String {
    let name = Path::new(&grant.relative);
    let is_like_extension = || {
        let rest = grant.relative.strip_prefix('.');
        rest.is_some_and(|rest| !rest.contains(['.', '/']))
    };
    match grant.named {
        // The one file of a folder may be called `.txt`, and is not a file with that extension.
        Some(Named::Below) if files == 1 && is_like_extension() => format!("./{}", grant.relative),
        Some(Named::Below) => grant.relative.clone(),
        Some(Named::Single) | None => format!(".{}", name.extension().unwrap_or_default().to_string_lossy()),
    }
}

fn read_stage(
    stage: &PlannedStage,
    plan: &Plan,
    files: &mut StatCache,
    lock: &LockFile,
    problems: &mut Vec<Problem>,
) -> StageOutside {
    let mut read = StageOutside::default();
    for outside in stage.bound.outside() {
        match outside {
            Outside::Pin(request) => match lock.get(&request) {
                Some(pinned) => drop(read.pins.insert(lock_file::name(&request), pinned.clone())),
                None => read.unpinned.push(request),
            },
            Outside::Files { role, pattern, span, count } => {
                let found = find(folder_of(plan, span), &pattern, span, count).and_then(|found| {
                    let grant = |file| grant(file, found.named, files, span);
                    found.files.into_iter().map(grant).collect::<Result<_, _>>()
                });
                match found {
                    Ok(grants) => drop(read.files.insert(role, grants)),
                    Err(problem) => problems.push(*problem),
                }
            }
        }
    }
    read
}

/// Files found, each with its path below what was asked for.
struct FoundFiles {
    files: Vec<(PathBuf, String)>,
    named: Named,
}

/// Finds the files of a pattern: a file, a folder (every file in it), or a glob.
fn find(base: &Path, pattern: &str, span: Span, count: Counted) -> Result<FoundFiles, Box<Problem>> {
    let path = base.join(pattern);
    let missing = |message: String| {
        let problem = Problem::error("file-missing", span, message, "not there");
        let relative = format!("paths are relative to the pipeline file, which is in `{}`", base.display());
        Box::new(problem.with_help(hint(pattern).unwrap_or(relative)))
    };
    // A name that exists is taken literally, even if it holds a bracket.
    let Ok(metadata) = fs::metadata(&path) else {
        if !pattern.contains(['*', '?', '[']) {
            return Err(missing(format!("there is no file `{pattern}`")));
        }
        let mut files = matches(base, pattern, span)?;
        let lacked = leave_out(&mut files, count);
        refuse_unreadable_names(&files, span)?;
        refuse_dangling(&files, pattern, span)?;
        refuse_twice(&files, pattern, span)?;
        if let Some(lacked) = lacked {
            return Err(missing(format!("no file that matches `{pattern}` has {lacked}")));
        }
        return match files.is_empty() {
            true => Err(missing(format!("no file matches `{pattern}`"))),
            false => Ok(FoundFiles { files, named: Named::Below }),
        };
    };
    if !metadata.is_dir() {
        refuse_irregular(metadata.file_type(), pattern, span)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let files = vec![(path, name)];
        refuse_unreadable_names(&files, span)?;
        return Ok(FoundFiles { files, named: Named::Single });
    }
    let mut files = Vec::new();
    walk(&path, "", &mut Vec::new(), &mut files)
        .map_err(|why| unreadable(span, format!("cannot list folder `{pattern}`: {why}")))?;
    files.sort_by(|a, b| a.1.cmp(&b.1));
    if let Some(lacked) = leave_out(&mut files, count) {
        return Err(missing(format!("no file in folder `{pattern}` has {lacked}")));
    }
    refuse_unreadable_names(&files, span)?;
    if count != Counted::All {
        refuse_twice(&files, pattern, span)?;
    }
    match files.is_empty() {
        true => Err(missing(format!("folder `{pattern}` has no files"))),
        false => Ok(FoundFiles { files, named: Named::Below }),
    }
}

/// Leaves out the files that do not count; says what they all lack where none is left.
fn leave_out(files: &mut Vec<(PathBuf, String)>, count: Counted) -> Option<String> {
    let Counted::WithExtension(known) = count else { return None };
    let any = !files.is_empty();
    files.retain(|(_, relative)| count.has(relative));
    (any && files.is_empty()).then(|| format!("one of the extensions {}", known.join(", ")))
}

/// The path that a shell makes of one that begins with `~/`.
pub(crate) fn without_tilde(path: &str) -> Option<String> {
    let rest = path.strip_prefix("~/")?;
    let home = std::env::var("HOME").unwrap_or_else(|_| "/home/you".to_owned());
    Some(format!("{}/{rest}", home.trim_end_matches('/')))
}

/// What a path that is not there may have been meant for.
fn hint(pattern: &str) -> Option<String> {
    if let Some(whole) = without_tilde(pattern) {
        return Some(format!("`~` is not expanded: write `{whole}`"));
    }
    let (owner, name) = pattern.split_once('/')?;
    let is_name = |part: &str| {
        !part.starts_with('.') && !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c))
    };
    // `data/rows.jsonl` is a file, `meta-llama/Llama-3.2-1B` is not.
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    let is_file = ending.is_some_and(|ending| ending.len() > 1 && ending.chars().all(|c| c.is_ascii_lowercase()));
    (is_name(owner) && is_name(name) && !is_file).then(|| {
        format!("a repository of a hub is `repo: {pattern}`; a folder is `./{pattern}`, from the pipeline file")
    })
}

fn matches(base: &Path, pattern: &str, span: Span) -> Result<Vec<(PathBuf, String)>, Box<Problem>> {
    let fixed: PathBuf = Path::new(pattern)
        .components()
        .take_while(|part| !part.as_os_str().to_string_lossy().contains(['*', '?', '[']))
        .collect();
    let fixed = base.join(fixed);
    // Only the pattern may hold wildcards: a bracket in the name of the folder around it is that folder's name.
    let escaped = glob::Pattern::escape(&base.to_string_lossy());
    let whole = if Path::new(pattern).is_absolute() { pattern.to_owned() } else { format!("{escaped}/{pattern}") };
    let found = glob::glob(&whole).map_err(|error| {
        let message = format!("`{pattern}` is no pattern: {error}");
        Box::new(Problem::error("bad-glob", span, message, "cannot be matched"))
    })?;
    let mut files = Vec::new();
    for path in found {
        let path = path.map_err(|error| {
            let why = endless(&fixed, error.path()).unwrap_or_else(|| error.to_string());
            unreadable(span, format!("cannot look through `{pattern}`: {why}"))
        })?;
        // A link to nowhere is kept: whether it counts its name says.
        let is_other = fs::metadata(&path).is_ok_and(|found| !found.is_file());
        if !is_other && !path.ancestors().take_while(|folder| *folder != fixed).any(is_cache) {
            let relative = path.strip_prefix(&fixed).unwrap_or(&path).to_string_lossy().into_owned();
            files.push((path, relative));
        }
    }
    let mut passed_over = Vec::new();
    unreadable_matches(&fixed, &relative_parts(pattern), 0, &mut passed_over);
    for path in passed_over {
        let relative = path.strip_prefix(&fixed).unwrap_or(&path).to_string_lossy().into_owned();
        files.push((path, relative));
    }
    files.sort_by(|a, b| a.1.cmp(&b.1));
    Ok(files)
}

/// The parts of a pattern from the first one with a wildcard on.
fn relative_parts(pattern: &str) -> Vec<&str> {
    let parts = Path::new(pattern).components().filter_map(|part| part.as_os_str().to_str());
    parts.skip_while(|part| !part.contains(WILDCARDS)).collect()
}

/// Finds the files that a pattern matches and whose paths are not UTF-8, which `glob` passes over.
fn unreadable_matches(folder: &Path, parts: &[&str], depth: usize, found: &mut Vec<PathBuf>) {
    let Some((part, rest)) = parts.split_first() else {
        if folder.to_str().is_none() && folder.is_file() {
            found.push(folder.to_owned());
        }
        return;
    };
    if !part.contains(WILDCARDS) {
        return unreadable_matches(&folder.join(part), rest, depth + 1, found);
    }
    let Ok(pattern) = glob::Pattern::new(part) else { return };
    if depth > DEEPEST_FOLDER || is_cache(folder) {
        return;
    }
    if *part == "**" {
        unreadable_matches(folder, rest, depth, found);
    }
    // What cannot be listed `glob` has told of.
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let path = entry.path();
        if *part == "**" {
            if entry.file_type().is_ok_and(|found| found.is_dir()) {
                unreadable_matches(&path, parts, depth + 1, found);
            }
        } else if pattern.matches(&name.to_string_lossy()) && (!rest.is_empty() || path.to_str().is_none()) {
            unreadable_matches(&path, rest, depth + 1, found);
        }
    }
}

/// Refuses what is no file: a named pipe would be waited for without end.
fn refuse_irregular(found: fs::FileType, pattern: &str, span: Span) -> Result<(), Box<Problem>> {
    let what = match () {
        () if found.is_file() => return Ok(()),
        () if found.is_fifo() => "named pipe",
        () if found.is_socket() => "socket",
        () => "device",
    };
    Err(unreadable(span, format!("`{pattern}` is a {what}, where a regular file is needed")))
}

/// Refuses a file whose path is not UTF-8: neither keys nor records could hold its name.
fn refuse_unreadable_names(files: &[(PathBuf, String)], span: Span) -> Result<(), Box<Problem>> {
    let Some((path, _)) = files.iter().find(|(path, _)| path.to_str().is_none()) else { return Ok(()) };
    let message = format!("the path `{}` is not UTF-8", path.display());
    Err(Box::new(unreadable(span, message).with_help("rename the file, or the folder that it is in")))
}

/// Refuses a match that leads to no file, such as a link to nowhere: its content would be missing, and nothing would
/// show it.
fn refuse_dangling(files: &[(PathBuf, String)], pattern: &str, span: Span) -> Result<(), Box<Problem>> {
    let broken = |(path, relative): &(PathBuf, String)| fs::metadata(path).err().map(|error| (relative.clone(), error));
    match files.iter().find_map(broken) {
        Some((relative, error)) => Err(unreadable(span, format!("`{pattern}` finds `{relative}`: {error}"))),
        None => Ok(()),
    }
}

/// Refuses a file that is found under two names, through a link: its rows would count twice, and nothing would show it.
fn refuse_twice(files: &[(PathBuf, String)], pattern: &str, span: Span) -> Result<(), Box<Problem>> {
    let mut seen = BTreeMap::new();
    for (path, relative) in files {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        if let Some(first) = seen.insert(real, relative) {
            let message = format!("`{pattern}` finds one file twice, through a link: as `{first}` and as `{relative}`");
            let problem = Problem::error("file-twice", span, message, "its content would count twice");
            return Err(Box::new(problem.with_help("narrow the pattern, or list the files one by one")));
        }
    }
    Ok(())
}

/// Lists a folder with all that is below it, also behind links. `open` holds the real paths of the folders on the
/// way.
fn walk(
    folder: &Path,
    prefix: &str,
    open: &mut Vec<PathBuf>,
    files: &mut Vec<(PathBuf, String)>,
) -> Result<(), String> {
    if open.len() > DEEPEST_FOLDER {
        return Err(format!("`{prefix}` is more than {DEEPEST_FOLDER} folders deep"));
    }
    let refused = |name: &str, error: io::Error| match name {
        "" => error.to_string(),
        name => format!("`{name}`: {error}"),
    };
    let real = fs::canonicalize(folder).map_err(|error| refused(prefix, error))?;
    open.push(real);
    for entry in fs::read_dir(folder).map_err(|error| refused(prefix, error))? {
        let entry = entry.map_err(|error| refused(prefix, error))?;
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        // What `publish:` notes about a folder is no part of it; a user's own file of that name is.
        if name == crate::publish::RECORD && crate::publish::is_record(&path) {
            continue;
        }
        let relative = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        let metadata = fs::metadata(&path).map_err(|error| refused(&relative, error))?;
        if metadata.is_dir() {
            if is_cache(&path) {
                continue;
            }
            refuse_endless(&path, &relative, open)?;
            walk(&path, &relative, open, files)?;
        } else if metadata.is_file() {
            files.push((path, relative));
        }
    }
    open.pop();
    Ok(())
}

/// Whether a folder says that what is in it is made by a program and can be made again (bford.info/cachedir), as the
/// home of pipelines does: it is no part of a folder around it.
fn is_cache(folder: &Path) -> bool {
    let mut first = [0; CACHEDIR_SIGNATURE.len()];
    let tag = cache::regular::open(&folder.join("CACHEDIR.TAG"));
    tag.is_ok_and(|mut tag| io::Read::read_exact(&mut tag, &mut first).is_ok())
        && first == *CACHEDIR_SIGNATURE.as_bytes()
}

/// Refuses a link that leads back to a folder around it: what is below it has no end.
fn refuse_endless(path: &Path, relative: &str, open: &[PathBuf]) -> Result<(), String> {
    if !path.is_symlink() {
        return Ok(());
    }
    let target = fs::canonicalize(path).map_err(|error| format!("`{relative}`: {error}"))?;
    match open.iter().any(|folder| folder.starts_with(&target)) {
        true => Err(format!(
            "`{relative}` is a link to `{}`, a folder that it is in: what is below it has no end",
            target.display()
        )),
        false => Ok(()),
    }
}

/// The link on the way to a path that leads back to a folder around it, in words, if there is one.
fn endless(base: &Path, path: &Path) -> Option<String> {
    let below: Vec<&Path> = path.ancestors().take_while(|folder| *folder != base).collect();
    below.into_iter().rev().find_map(|link| {
        let around = fs::canonicalize(link.parent()?).ok()?;
        refuse_endless(link, &link.strip_prefix(base).ok()?.to_string_lossy(), &[around]).err()
    })
}

fn grant(
    (path, relative): (PathBuf, String),
    named: Named,
    files: &mut StatCache,
    span: Span,
) -> Result<FileGrant, Box<Problem>> {
    let unreadable = |error: cache::StoreError| {
        let causes = crate::error::chain(&error).join(": ");
        unreadable(span, causes)
    };
    let (digest, size) = files.digest(&path).map_err(unreadable)?;
    Ok(FileGrant { path, relative, digest, size, named: Some(named) })
}

fn unreadable(span: Span, message: String) -> Box<Problem> {
    Box::new(Problem::error("file-unreadable", span, message, "cannot be read"))
}

/// The folder that a path is relative to: that of the file it is written in, and of the pipeline file where that is the
/// command line.
pub(crate) fn folder_of(plan: &Plan, written: Span) -> &Path {
    let folder = plan.sources.get(written.source).and_then(|source| source.folder.as_ref());
    folder.unwrap_or(&plan.folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_mean_something_else_are_known() {
        assert!(hint("meta-llama/Llama-3.2-1B").unwrap().contains("`repo: meta-llama/Llama-3.2-1B`"));
        assert!(hint("~/rows.jsonl").unwrap().starts_with("`~` is not expanded"));
        for path in ["data/rows.jsonl", "rows.jsonl", "./a/b", "a/b/c", "../a", "a/*"] {
            assert_eq!(hint(path), None, "{path}");
        }
    }

    fn names(base: &Path, pattern: &str) -> Vec<String> {
        find(base, pattern, Span::default(), Counted::All)
            .unwrap()
            .files
            .into_iter()
            .map(|(_, relative)| relative)
            .collect()
    }

    fn code(base: &Path, pattern: &str) -> &'static str {
        find(base, pattern, Span::default(), Counted::All).err().unwrap().code
    }

    #[test]
    fn finds_files_folders_and_globs_in_order() {
        let folder = tempfile::tempdir().unwrap();
        // The folder around a pipeline may itself have a name that looks like a pattern.
        let base = folder.path().join("odd [x] name");
        fs::create_dir_all(base.join("data/deep")).unwrap();
        for file in ["data/b.jsonl", "data/a.jsonl", "data/deep/c.jsonl", "data/notes.txt", "data/[0].jsonl"] {
            fs::write(base.join(file), file).unwrap();
        }
        // A published folder is found without the note that publishing leaves in it; a user's file of that name is
        // found.
        let note = format!(r#"{{"version":1,"tree":"{0}","identity":"{0}","files":{{}}}}"#, Digest::of(b"tree"));
        fs::write(base.join("data").join(crate::publish::RECORD), note).unwrap();
        fs::create_dir(base.join("own")).unwrap();
        fs::write(base.join("own").join(crate::publish::RECORD), "mine").unwrap();
        assert_eq!(names(&base, "own"), [crate::publish::RECORD]);
        assert_eq!(names(&base, "data/a.jsonl"), ["a.jsonl"]);
        assert_eq!(names(&base, "./data/[0].jsonl"), ["[0].jsonl"], "a name that exists is taken literally");
        assert_eq!(names(&base, "data/[ab].jsonl"), ["a.jsonl", "b.jsonl"]);
        assert_eq!(names(&base, "./data/**/*.jsonl"), ["[0].jsonl", "a.jsonl", "b.jsonl", "deep/c.jsonl"]);
        let all = ["[0].jsonl", "a.jsonl", "b.jsonl", "deep/c.jsonl", "notes.txt"];
        assert_eq!(names(&base, "data"), all);
        assert_eq!(names(&base, "data/"), all);
        let absolute = base.join("data").to_string_lossy().into_owned();
        assert_eq!(names(Path::new("/"), &absolute), all);
    }

    #[test]
    fn caches_are_no_part_of_the_folder_around_them() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        fs::create_dir_all(base.join("home/store")).unwrap();
        for file in ["a", "home/store/b"] {
            fs::write(base.join(file), file).unwrap();
        }
        assert_eq!(names(base, "."), ["a", "home/store/b"]);
        fs::write(base.join("home/CACHEDIR.TAG"), CACHEDIR_SIGNATURE).unwrap();
        assert_eq!((names(base, "."), names(base, "**/*")), (vec!["a".to_owned()], vec!["a".to_owned()]));
        assert_eq!(names(base, "home").len(), 2);
    }

    #[test]
    fn of_a_folder_of_rows_only_files_of_rows_count() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        fs::create_dir_all(base.join("data/.ipynb_checkpoints")).unwrap();
        for file in ["a.jsonl", "B.JSONL", "README.md", "._a.jsonl", ".ipynb_checkpoints/a.jsonl", "jsonl"] {
            fs::write(base.join("data").join(file), file).unwrap();
        }
        let count = Counted::WithExtension(&["jsonl"]);
        let found = |pattern: &str| find(base, pattern, Span::default(), count).map(|found| found.files.len());
        assert_eq!((found("data"), found("data/*"), found("data/**/*")), (Ok(2), Ok(2), Ok(2)));
        assert_eq!((found("data/README.md"), found("data/.ipynb_checkpoints")), (Ok(1), Ok(1)));
        let problem = found("data/*.md").unwrap_err();
        assert!(problem.message.contains("has one of the extensions jsonl"), "{}", problem.message);
        std::os::unix::fs::symlink("a.jsonl", base.join("data/link.jsonl")).unwrap();
        assert_eq!(found("data").unwrap_err().code, "file-twice");
    }

    #[test]
    fn a_match_that_is_a_link_to_nowhere_is_refused_where_it_counts() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path();
        fs::create_dir_all(base.join("snap/train-deep.jsonl")).unwrap();
        fs::create_dir(base.join("blobs")).unwrap();
        fs::write(base.join("blobs/0"), "a").unwrap();
        let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, base.join(at)).unwrap();
        link("../blobs/0", "snap/train-0.jsonl");
        assert_eq!(names(base, "snap/train-*.jsonl"), ["train-0.jsonl"], "a folder that matches is left out");
        link("../blobs/1", "snap/train-1.jsonl");
        for pattern in ["snap/train-*.jsonl", "*/train-1.jsonl", "**/*.jsonl"] {
            let problem = find(base, pattern, Span::default(), Counted::All).err().unwrap();
            assert_eq!(problem.code, "file-unreadable", "{pattern}");
            assert!(problem.message.contains("train-1.jsonl`: No such file"), "{}", problem.message);
        }
        fs::remove_file(base.join("snap/train-1.jsonl")).unwrap();
        // Emacs locks a file by a link that leads nowhere.
        link("me@here.1", "snap/.#train-0.jsonl");
        let count = Counted::WithExtension(&["jsonl"]);
        assert_eq!(find(base, "snap/*", Span::default(), count).unwrap().files.len(), 1);
    }

    #[test]
    fn one_file_under_two_names_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        fs::write(folder.path().join("data/a.jsonl"), "a").unwrap();
        std::os::unix::fs::symlink(".", folder.path().join("data/loop")).unwrap();
        assert_eq!(code(folder.path(), "data/**/*.jsonl"), "file-twice");
        assert_eq!(names(folder.path(), "data/*.jsonl"), ["a.jsonl"]);
    }

    #[test]
    fn a_link_to_a_folder_around_it_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for below in ["data/deep", "other", "linked"] {
            fs::create_dir_all(folder.path().join(below)).unwrap();
        }
        fs::write(folder.path().join("data/deep/a.jsonl"), "a").unwrap();
        fs::write(folder.path().join("other/b.jsonl"), "b").unwrap();
        let link = |to: &Path, at: &str| std::os::unix::fs::symlink(to, folder.path().join(at)).unwrap();
        link(&folder.path().join("other"), "data/elsewhere");
        assert_eq!(names(folder.path(), "data"), ["deep/a.jsonl", "elsewhere/b.jsonl"]);
        let refused = |to: &Path, at: &str| {
            link(to, at);
            let problem = find(folder.path(), "data", Span::default(), Counted::All).err().unwrap();
            fs::remove_file(folder.path().join(at)).unwrap();
            problem.message
        };
        let root = refused(Path::new("/"), "data/deep/root");
        assert!(root.contains("`deep/root` is a link to `/`, a folder that it is in"), "{root}");
        // The other folder is not around the link, but on the way to it.
        let back = refused(&folder.path().join("data"), "other/back");
        assert!(back.contains("`elsewhere/back` is a link to") && back.contains("has no end"), "{back}");
        link(Path::new("/"), "data/deep/root");
        let data = folder.path().join("data");
        let why = endless(&data, &data.join("deep/root/dev/fd/4")).unwrap();
        assert!(why.contains("`deep/root` is a link to `/`"), "{why}");
        assert_eq!(endless(&data, &data.join("elsewhere/b.jsonl")), None);
        fs::remove_file(folder.path().join("data/deep/root")).unwrap();
        let dangling = refused(Path::new("/no/such/place"), "data/deep/gone");
        assert!(dangling.contains("`deep/gone`: No such file"), "{dangling}");
    }

    #[test]
    fn says_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("empty")).unwrap();
        assert_eq!(code(folder.path(), "none.jsonl"), "file-missing");
        assert_eq!(code(folder.path(), "*.jsonl"), "file-missing");
        assert_eq!(code(folder.path(), "empty"), "file-missing");
        assert_eq!(code(folder.path(), "a***b"), "bad-glob");
    }

    #[test]
    fn keys_a_single_file_by_its_extension_and_others_by_their_path() {
        let grant = |named, relative: &str| FileGrant {
            path: PathBuf::from("/anywhere").join(relative),
            relative: relative.to_owned(),
            digest: Digest::of(b"content"),
            size: 7,
            named: Some(named),
        };
        let (one, below) = (
            |name| keyed_name(&grant(Named::Single, name), 1),
            |name, files| keyed_name(&grant(Named::Below, name), files),
        );
        assert_eq!((one("rows.jsonl").as_str(), one("rows").as_str(), one(".txt").as_str()), (".jsonl", ".", "."));
        assert_eq!((below("deep/rows.jsonl", 1).as_str(), below(".a.txt", 1).as_str()), ("deep/rows.jsonl", ".a.txt"));
        // A folder that holds `.jsonl` alone is not a file `rows.jsonl`.
        assert_eq!((below(".jsonl", 1).as_str(), below(".jsonl", 2).as_str()), ("./.jsonl", ".jsonl"));
    }

    #[test]
    fn names_that_are_not_utf8_are_refused_where_they_count() {
        use std::os::unix::ffi::OsStrExt;
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        for name in [&b"a.jsonl"[..], b"b\xff.txt"] {
            fs::write(folder.path().join("data").join(std::ffi::OsStr::from_bytes(name)), "").unwrap();
        }
        assert_eq!(code(folder.path(), "data"), "file-unreadable");
        let rows = find(folder.path(), "data", Span::default(), Counted::WithExtension(&["jsonl"]));
        assert_eq!(rows.unwrap().files.len(), 1);
        for pattern in ["data/*", "*/b*.txt", "**/*.txt", "./**/b?.txt"] {
            assert_eq!(code(folder.path(), pattern), "file-unreadable", "{pattern}");
        }
        assert_eq!(names(folder.path(), "data/*.jsonl"), ["a.jsonl"]);
        let odd = folder.path().join(std::ffi::OsStr::from_bytes(b"odd\xfe"));
        fs::create_dir(&odd).unwrap();
        fs::write(odd.join("a.jsonl"), "").unwrap();
        assert_eq!((code(&odd, "a.jsonl"), code(&odd, "*.jsonl")), ("file-unreadable", "file-unreadable"));
        assert_eq!(code(folder.path(), "odd*/a.jsonl"), "file-unreadable");
    }

    #[test]
    fn what_is_no_regular_file_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&folder.path().join("pipe.jsonl"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
        for (path, what) in [("pipe.jsonl", "named pipe"), ("socket", "socket"), ("/dev/null", "device")] {
            let problem = find(folder.path(), path, Span::default(), Counted::All).err().unwrap();
            let message = format!("`{path}` is a {what}, where a regular file is needed");
            assert_eq!((problem.code, problem.message), ("file-unreadable", message));
        }
        assert_eq!((code(folder.path(), "*.jsonl"), code(folder.path(), ".")), ("file-missing", "file-missing"));
    }
}
