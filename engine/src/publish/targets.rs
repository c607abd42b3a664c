//! Where nothing may be published: what a run reads or keeps, and what others made; and where nothing can be. Found
//! before anything runs.
//!
//! A target is replaced as a whole. So one that is, holds or is in the pipeline file, the home or a source of the
//! same file would take it along, and is an error whatever the command line says. So is one in a folder that was
//! published, which another file may replace. Folders are compared by the places that they really are: `..`, links and
//! absolute paths are other spellings of the same.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

use cache::{StatCache, Store};
use nix::unistd::{AccessFlags, access};

use super::record::{Look, Record};
use super::{Alone, OnChanged, PublishError, inspect, lock_name, target, tidy};
use crate::error::{Cause, by_system_error};
use crate::file::problem::{Problem, Severity};
use crate::file::source::Span;
use crate::home::Home;
use crate::keys::folder_of;
use crate::plan::{Plan, Publish, Reads};

/// When the targets are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// By a command that only looks: what `--overwrite` would replace is a warning, as is what cannot be written;
    /// nothing is written, and no file is read.
    Ahead,
    /// When a run begins.
    Run(OnChanged),
}

/// What is wrong with the targets of a plan.
pub fn check_targets(plan: &Plan, home: &Home, moment: Moment) -> Vec<Problem> {
    if plan.publish.is_empty() {
        return Vec::new();
    }
    let mut problems = unsafe_targets(plan, home);
    if problems.is_empty() {
        problems.extend(unusable_targets(plan, home, moment));
    }
    problems
}

/// Whether a path is a folder or lies in it, as it is written or where links lead.
pub fn lies_in(path: &Path, folder: &Path) -> bool {
    let (path, folder) = (Places::of(path), Places::of(folder));
    path.written.starts_with(&folder.written) || path.real.starts_with(&folder.real)
}

/// Targets that take along what the run reads or keeps, or that others would take along.
fn unsafe_targets(plan: &Plan, home: &Home) -> Vec<Problem> {
    let (kept, globs) = Kept::of(plan, home);
    let project = Places::of(&plan.folder);
    let mut targets = Kept::default();
    let mut problems = Vec::new();
    for publish in &plan.publish {
        let places = Places::of(&target(plan, publish));
        let met = kept.meet(&places).or_else(|| globs.iter().find_map(|glob| glob.meet(&places)));
        let met = met.or_else(|| targets.meet(&places));
        if let Some((relation, thing)) = met {
            problems.push(problem(publish, relation, thing));
        } else if let Some(folder) = published_around(&places, &project) {
            problems.push(in_published(publish, &folder));
        }
        targets.add(
            places,
            Thing {
                what: format!("`{}`, which is published to as well", publish.path.display()),
                is_folder: true,
                span: Some(publish.path_span),
            },
        );
    }
    problems
}

fn problem(publish: &Publish, relation: Relation, thing: &Thing) -> Problem {
    let relation = match relation {
        Relation::Is => "is",
        Relation::Holds => "holds",
        Relation::LiesIn => "is in",
    };
    let message = format!("`{}` {relation} {}", publish.path.display(), thing.what);
    let problem =
        Problem::error("unsafe-target", publish.path_span, message, "publishing replaces the folder as a whole");
    let problem = problem.with_help("publish to a separate folder, such as `./out/model`");
    match thing.span {
        Some(span) => problem.with_related(span, "this"),
        None => problem,
    }
}

/// The nearest folder around a target that was published, by whatever pipeline file. One that holds the pipeline file
/// as well is no longer what was published.
fn published_around(target: &Places, project: &Places) -> Option<PathBuf> {
    [(&target.real, &project.real), (&target.written, &project.written)].into_iter().find_map(|(target, project)| {
        let mut around = target.ancestors().skip(1).take_while(|folder| !project.starts_with(folder));
        around.find(|folder| matches!(Record::read(folder), Ok(Some(_)))).map(Path::to_owned)
    })
}

/// The problem of a target in a folder that was published: publishing that one again would find it changed, or take the
/// target along.
fn in_published(publish: &Publish, folder: &Path) -> Problem {
    let message = format!("`{}` is in `{}`, a folder that was published", publish.path.display(), folder.display());
    let label = "publishing replaces that folder as a whole";
    let problem = Problem::error("unsafe-target", publish.path_span, message, label);
    problem.with_help("publish to a folder outside of it, or move it away if nothing is published to it any more")
}

/// Targets that hold what this program did not put there, or no longer what it put there, and those that it cannot
/// write.
fn unusable_targets(plan: &Plan, home: &Home, moment: Moment) -> Vec<Problem> {
    let severity = if moment == Moment::Ahead { Severity::Warning } else { Severity::Error };
    let store = Store::look(home.store()).ok().flatten().filter(|_| moment != Moment::Ahead);
    let mut seen = StatCache::load(&home.published_files());
    let mut problems = Vec::new();
    for publish in &plan.publish {
        let target = target(plan, publish);
        let lock = store.as_ref().map(|store| store.try_lock(&lock_name(&target)));
        let alone = Alone::at_once_beside(&target);
        match &lock {
            // Another run publishes to it at this moment; this one looks when it does.
            Some(Ok(None)) => continue,
            // What cannot be tidied now is told when it is published to.
            Some(Ok(Some(_))) if alone.is_some() => {
                let _ = tidy(&target);
            }
            Some(Ok(Some(_)) | Err(_)) | None => {}
        }
        let look = match moment {
            Moment::Ahead | Moment::Run(OnChanged::Overwrite) => Look::Names,
            Moment::Run(OnChanged::Refuse) => Look::Attributes(&mut seen),
        };
        let outputs = plan.stage(&publish.stage).map_or(&[][..], |stage| &stage.outputs);
        let kind = outputs.iter().find(|output| output.name == publish.output).map(|output| output.kind.as_str());
        let found = inspect(&target, kind, look);
        let is_kept = moment != Moment::Run(OnChanged::Overwrite);
        let taken = found.as_ref().err().filter(|_| is_kept).and_then(|error| taken(publish, error, severity));
        problems.extend(taken.or_else(|| match found {
            // It may be current, and then nothing is written.
            Ok(Some(_)) => unwritable(publish, &target, Severity::Warning),
            // What cannot be looked at now may be made by then; publishing tells it.
            Ok(None) | Err(_) => unwritable(publish, &target, severity),
        }));
    }
    if moment != Moment::Ahead {
        // What could not be written down is read again.
        let _ = seen.save(&home.published_files());
    }
    problems
}

/// The problem of a target that holds something else than what was published there.
fn taken(publish: &Publish, error: &PublishError, severity: Severity) -> Option<Problem> {
    let path = publish.path.display();
    let (message, label) = match error {
        PublishError::Foreign { .. } => (format!("`{path}` exists and was not written by this program"), "is taken"),
        PublishError::Changed { file, how, .. } => {
            (format!("`{path}` was changed since it was published: `{file}` {how}"), "was changed")
        }
        PublishError::OtherKind { .. } => (error.to_string(), "is taken"),
        PublishError::NameTaken | PublishError::Io { .. } | PublishError::Store(_) | PublishError::Panicked => {
            return None;
        }
    };
    let problem = Problem::error("target-taken", publish.path_span, message, label);
    let problem = problem.with_help("move it away, or replace it with `pipeline run --overwrite`");
    Some(Problem { severity, ..problem })
}

/// The problem of a target in whose folder, or the nearest above it that is there, nothing can be made. For a warning
/// the system is asked and nothing is written; an error takes an attempt, which alone shows it for root and for file
/// systems that take no folder.
fn unwritable(publish: &Publish, target: &Path, severity: Severity) -> Option<Problem> {
    let folder = target.ancestors().skip(1).find(|folder| fs::symlink_metadata(folder).is_ok())?;
    let written = match severity {
        Severity::Warning => ask_to_write(folder),
        Severity::Error => try_to_write(folder),
    };
    // A disk that is full now may have room by then.
    let error = written.err().filter(|error| by_system_error(error) != Some(Cause::DiskFull))?;
    let folder: PathBuf = folder.components().collect();
    let (path, folder) = (publish.path.display(), folder.display());
    let message = format!("`{path}` cannot be written: no folder can be created in `{folder}`: {error}");
    let problem = Problem::error("target-unwritable", publish.path_span, message, "cannot be written");
    let problem = problem.with_help("publish to another folder, or let this user write to that one");
    Some(Problem { severity, ..problem })
}

/// What is made to see whether a folder can be written to, and removed.
const PROBE: &str = ".pipeline-probe";

/// Makes an empty folder in another one, as publishing does, and leaves nothing.
fn try_to_write(folder: &Path) -> io::Result<()> {
    let probe = folder.join(PROBE);
    // What a process left that was killed in between.
    let _ = fs::remove_dir(&probe);
    match fs::create_dir(&probe) {
        // Another run tries it at this moment, or it was left and cannot be removed: that it exists is reported before
        // that nothing can be created.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => ask_to_write(folder),
        made => made.map(|()| drop(fs::remove_dir(&probe))),
    }
}

/// Asks the system whether a folder can be written to, and creates nothing.
fn ask_to_write(folder: &Path) -> io::Result<()> {
    access(&folder.join("."), AccessFlags::W_OK | AccessFlags::X_OK).map_err(io::Error::from)
}

/// How a target lies to something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    Is,
    Holds,
    LiesIn,
}

/// Something that no target may take along.
#[derive(Debug, Clone)]
struct Thing {
    what: String,
    /// Whether a target may not be in it either.
    is_folder: bool,
    span: Option<Span>,
}

/// The places of a path: as it is written, and where links lead.
struct Places {
    written: PathBuf,
    real: PathBuf,
}

impl Places {
    fn of(path: &Path) -> Self {
        Self { written: normal(path), real: real(path) }
    }
}

/// Things by their places. In the order of paths a folder stands right before what is in it.
#[derive(Default)]
struct Kept {
    things: BTreeMap<PathBuf, Thing>,
}

impl Kept {
    /// What a run of the plan reads and keeps, and the patterns that it reads by.
    fn of(plan: &Plan, home: &Home) -> (Self, Vec<Glob>) {
        let (mut kept, mut globs) = (Self::default(), Vec::new());
        let mut add = |path: &Path, what: String, is_folder: bool, span: Option<Span>| {
            kept.add(Places::of(path), Thing { what, is_folder, span });
        };
        add(&plan.file, "the pipeline file".to_owned(), false, None);
        for source in plan.sources.all() {
            let Some(folder) = &source.folder else { continue };
            let Some(name) = Path::new(&source.name).file_name() else { continue };
            add(&folder.join(name), format!("`{}`, which the pipeline file includes", source.name), false, None);
        }
        add(home.root(), "the home, in which results are stored".to_owned(), true, None);
        add(&home.lock_file(), "`pipeline.lock`".to_owned(), false, None);
        if let Some(folder) = plan.remote.as_ref().and_then(|remote| remote.place.folder()) {
            add(folder, "the shared cache".to_owned(), true, None);
        }
        // Also of stages that are not to run this time: what they read is not to go either.
        for Reads { stage, pattern, span } in &plan.reads {
            let what = format!("`{pattern}`, which stage `{stage}` reads");
            let folder = folder_of(plan, *span);
            let path = folder.join(pattern);
            if fs::metadata(&path).is_err() && pattern.contains(['*', '?', '[']) {
                globs.push(Glob::new(folder, pattern, Thing { what, is_folder: true, span: Some(*span) }));
            } else {
                add(&path, what, path.is_dir(), Some(*span));
            }
        }
        (kept, globs)
    }

    fn add(&mut self, Places { written, real }: Places, thing: Thing) {
        // The first that is told of a place is enough.
        self.things.entry(real).or_insert_with(|| thing.clone());
        self.things.entry(written).or_insert(thing);
    }

    /// What a target meets, if anything.
    fn meet(&self, target: &Places) -> Option<(Relation, &Thing)> {
        [&target.real, &target.written].into_iter().find_map(|target| self.meet_at(target))
    }

    fn meet_at(&self, target: &Path) -> Option<(Relation, &Thing)> {
        if let Some(thing) = self.things.get(target) {
            return Some((Relation::Is, thing));
        }
        let mut around = target.ancestors().skip(1).filter_map(|around| self.things.get(around));
        if let Some(thing) = around.find(|thing| thing.is_folder) {
            return Some((Relation::LiesIn, thing));
        }
        let next = self.things.range::<Path, _>((Bound::Excluded(target), Bound::Unbounded)).next();
        next.filter(|(path, _)| path.starts_with(target)).map(|(_, thing)| (Relation::Holds, thing))
    }
}

/// A pattern that source files are found by: the folder that it begins in, and what stands behind it, name by name.
struct Glob {
    fixed: Places,
    rest: Vec<String>,
    thing: Thing,
}

impl Glob {
    fn new(folder: &Path, pattern: &str, thing: Thing) -> Self {
        let is_plain = |name: &&Component<'_>| !name.as_os_str().to_string_lossy().contains(['*', '?', '[']);
        let names: Vec<_> = Path::new(pattern).components().collect();
        let plain = names.iter().take_while(is_plain).count();
        let fixed: PathBuf = names[..plain].iter().collect();
        let rest = names[plain..].iter().map(|name| name.as_os_str().to_string_lossy().into_owned()).collect();
        Self { fixed: Places::of(&folder.join(fixed)), rest, thing }
    }

    /// Whether a target holds what the pattern finds, or files published to it could be found by it.
    fn meet(&self, target: &Places) -> Option<(Relation, &Thing)> {
        let places = [(&target.real, &self.fixed.real), (&target.written, &self.fixed.written)];
        places.into_iter().find_map(|(target, fixed)| {
            if fixed.starts_with(target) {
                return Some((Relation::Holds, &self.thing));
            }
            let below = target.strip_prefix(fixed).ok()?;
            let names: Vec<_> = below.iter().map(|name| name.to_string_lossy()).collect();
            self.reaches(&names, target.is_file()).then_some((Relation::LiesIn, &self.thing))
        })
    }

    /// Whether the pattern finds something at or below a path of these names.
    fn reaches(&self, names: &[std::borrow::Cow<'_, str>], is_file: bool) -> bool {
        for (depth, name) in names.iter().enumerate() {
            match self.rest.get(depth) {
                Some(pattern) if pattern == "**" => return true,
                Some(pattern) if glob::Pattern::new(pattern).is_ok_and(|pattern| pattern.matches(name)) => {}
                _ => return false,
            }
        }
        self.rest.len() > names.len() || is_file
    }
}

/// A path without `.` and `..`, as it is written.
fn normal(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut normal = PathBuf::new();
    for component in absolute.components() {
        match component {
            Component::ParentDir => drop(normal.pop()),
            other => normal.push(other),
        }
    }
    normal
}

/// A path as it is without links, as far as it is there.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut real = PathBuf::new();
    for component in absolute.components() {
        match component {
            // What stands before it has no links any more.
            Component::ParentDir => drop(real.pop()),
            other => {
                real.push(other);
                if fs::symlink_metadata(&real).is_ok_and(|found| found.is_symlink()) {
                    real = fs::canonicalize(&real).unwrap_or(real);
                }
            }
        }
    }
    real
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn thing(what: &str, is_folder: bool) -> Thing {
        Thing { what: what.to_owned(), is_folder, span: None }
    }

    #[test]
    fn places_are_compared_by_what_they_are_and_by_how_they_are_written() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("project/data/deep")).unwrap();
        fs::write(at("project/file.yaml"), "").unwrap();
        symlink("project", at("link")).unwrap();
        symlink("data", at("project/alias")).unwrap();
        let mut kept = Kept::default();
        kept.add(Places::of(&at("project/file.yaml")), thing("file", false));
        kept.add(Places::of(&at("project/alias")), thing("data", true));
        let meet = |path: &str| {
            let met = kept.meet(&Places::of(&at(path)));
            met.map(|(relation, thing)| (relation, thing.what.clone()))
        };
        let (file, data) = ("file".to_owned(), "data".to_owned());
        for holds in ["project", "link", "project/.", "project/data/../../link", "link/data/..", "."] {
            assert_eq!(meet(holds).map(|(relation, _)| relation), Some(Relation::Holds), "{holds}");
        }
        assert_eq!(meet("project/data/deep/../../file.yaml"), Some((Relation::Is, file)));
        for is in ["project/data", "link/data", "link/alias", "project/alias", "project/absent/../data"] {
            assert_eq!(meet(is), Some((Relation::Is, data.clone())), "{is}");
        }
        for lies_in in ["project/data/out", "link/alias/deep/out/more"] {
            assert_eq!(meet(lies_in), Some((Relation::LiesIn, data.clone())), "{lies_in}");
        }
        for apart in ["project/out", "link/out/model", "project/data-2", "project/file.yaml.d", "elsewhere"] {
            assert_eq!(meet(apart), None, "{apart}");
        }
    }

    #[test]
    fn an_attempt_to_write_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        try_to_write(root.path()).unwrap();
        // A process that was killed has left it.
        fs::create_dir(root.path().join(PROBE)).unwrap();
        try_to_write(root.path()).unwrap();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(try_to_write(&file).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        if Path::new("/proc/self").exists() {
            assert!(try_to_write(Path::new("/proc")).is_err(), "no folder can be made there, by nobody");
        }
    }

    #[test]
    fn a_left_over_attempt_does_not_hide_a_folder_without_permission() {
        let root = tempfile::tempdir().unwrap();
        // It cannot be removed, as of another run that tries it at this moment.
        let busy = root.path().join("busy");
        fs::create_dir_all(busy.join(PROBE).join("deep")).unwrap();
        try_to_write(&busy).unwrap();
        let locked = root.path().join("locked");
        fs::create_dir_all(locked.join(PROBE)).unwrap();
        let may = |mode: u32| fs::set_permissions(&locked, fs::Permissions::from_mode(mode)).unwrap();
        may(0o555);
        // Root may write all the same.
        let is_locked = fs::create_dir(locked.join("tried")).is_err();
        let tried = try_to_write(&locked);
        may(0o755);
        match is_locked {
            true => assert_eq!(tried.unwrap_err().kind(), io::ErrorKind::PermissionDenied),
            false => tried.unwrap(),
        }
    }

    #[test]
    fn a_pattern_is_met_where_it_would_find_what_is_published() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("data")).unwrap();
        fs::write(root.path().join("data/a.jsonl"), "").unwrap();
        let meets = |pattern: &str, target: &str| {
            let glob = Glob::new(root.path(), pattern, thing("rows", true));
            glob.meet(&Places::of(&root.path().join(target))).map(|(relation, _)| relation)
        };
        assert_eq!(meets("data/*.jsonl", "data"), Some(Relation::Holds));
        assert_eq!(meets("./data/*.jsonl", "."), Some(Relation::Holds));
        assert_eq!(meets("data/*.jsonl", "data/a.jsonl"), Some(Relation::LiesIn));
        assert_eq!(meets("data/*.jsonl", "data/out"), None);
        assert_eq!(meets("data/*/rows.jsonl", "data/out"), Some(Relation::LiesIn));
        assert_eq!(meets("data/*/rows.jsonl", "data/out/deeper"), None);
        assert_eq!(meets("data/**/*.jsonl", "data/out/deeper"), Some(Relation::LiesIn));
        assert_eq!(meets("data/part-*/x/*.jsonl", "data/other"), None);
        assert_eq!(meets("*.jsonl", "out"), None);
    }
}
