//! Where nothing may be published: what a run reads or keeps, and what others made. Found before anything runs.
//!
//! A target is replaced as a whole. So one that is, holds or is in the pipeline file, the home or a source of the
//! same file would take it along, and is an error whatever the command line says. Folders are compared by the places
//! that they really are: `..`, links and absolute paths are other spellings of the same.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Bound;
use std::path::{Component, Path, PathBuf};

use cache::{StatCache, Store};

use super::record::Look;
use super::{Alone, OnChanged, PublishError, inspect, lock_name, target, tidy};
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::home::Home;
use crate::keys::folder_of;
use crate::plan::{Plan, Publish, Reads};

/// When the targets are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// By a command that only looks: what `--overwrite` would replace is a warning, nothing is written, and no file is
    /// read.
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
    if problems.is_empty() && moment != Moment::Run(OnChanged::Overwrite) {
        problems.extend(taken_targets(plan, home, moment));
    }
    problems
}

/// Whether a path is a folder or lies in it, as it is written or where links lead.
pub fn lies_in(path: &Path, folder: &Path) -> bool {
    let (path, folder) = (Places::of(path), Places::of(folder));
    path.written.starts_with(&folder.written) || path.real.starts_with(&folder.real)
}

/// Targets that take along what the run reads or keeps.
fn unsafe_targets(plan: &Plan, home: &Home) -> Vec<Problem> {
    let (kept, globs) = Kept::of(plan, home);
    let mut targets = Kept::default();
    let mut problems = Vec::new();
    for publish in &plan.publish {
        let places = Places::of(&target(plan, publish));
        let met = kept.meet(&places).or_else(|| globs.iter().find_map(|glob| glob.meet(&places)));
        let met = met.or_else(|| targets.meet(&places));
        if let Some((relation, thing)) = met {
            problems.push(problem(publish, relation, thing));
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

/// Targets that hold what this program did not put there, or no longer what it put there.
fn taken_targets(plan: &Plan, home: &Home, moment: Moment) -> Vec<Problem> {
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
            Moment::Ahead => Look::Names,
            Moment::Run(_) => Look::Attributes(&mut seen),
        };
        let outputs = plan.stage(&publish.stage).map_or(&[][..], |stage| &stage.outputs);
        let kind = outputs.iter().find(|output| output.name == publish.output).map(|output| output.kind.as_str());
        let (message, label) = match inspect(&target, kind, look) {
            Err(PublishError::Foreign { .. }) => {
                (format!("`{}` exists and was not written by this program", publish.path.display()), "is taken")
            }
            Err(PublishError::Changed { file, how, .. }) => {
                let path = publish.path.display();
                (format!("`{path}` was changed since it was published: `{file}` {how}"), "was changed")
            }
            Err(error @ PublishError::OtherKind { .. }) => (error.to_string(), "is taken"),
            // What cannot be looked at now may be made by then; publishing tells it.
            Ok(_) | Err(_) => continue,
        };
        let of = if moment == Moment::Ahead { Problem::warning } else { Problem::error };
        let problem = of("target-taken", publish.path_span, message, label);
        problems.push(problem.with_help("move it away, or replace it with `pipeline run --overwrite`"));
    }
    if moment != Moment::Ahead {
        // What could not be written down is read again.
        let _ = seen.save(&home.published_files());
    }
    problems
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
    use std::os::unix::fs::symlink;

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
