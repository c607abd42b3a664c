//! `include:`: the stages of other pipeline files, under a prefix, before anything else is done with the tree.
//!
//! Of an included file its `stages`, its `vars` and its own `include` are taken, and nothing else. Its stages keep
//! their places in its text, so that what is wrong with them is shown there. A stage `articles` of the file included as
//! `data` is `data/articles`: the slash can be in no id of a file, so that the two never collide.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use super::entry::{self, FILE_KEYS, SEPARATOR};
use super::load::{folder_of, read_included};
use crate::file::interpolate::Scope;
use crate::file::parse::parse;
use crate::file::problem::Problem;
use crate::file::source::{Sources, Span};
use crate::file::tree::{Entry, Node, Value};
use crate::parameter::{COLLECT, Fields, Reader, Reference, dotted};
use crate::stage::Registry;
use crate::suggest;

/// How deep files may include each other.
const DEEPEST: usize = 8;

/// How many files may be included in all.
const MOST_FILES: usize = 64;

/// What a file gives to one that includes it, or says of itself.
const TAKEN: [&str; 5] = ["version", "name", "vars", "stages", "include"];

/// Puts the short form of an include, a path alone, into the long one, so that overrides can set its variables.
pub(super) fn lengthen(root: &mut Node) {
    let Some(includes) = entries_of(root, "include") else { return };
    for include in includes {
        if let Value::String(_) = include.value.value {
            let span = include.value.span;
            let path = std::mem::replace(&mut include.value.value, Value::Null);
            let file = Entry { key: "file".to_owned(), key_span: span, value: Node { span, value: path } };
            include.value.value = Value::Map(vec![file]);
        }
    }
}

/// Adds the stages of every included file to those of the tree, and gives the variables that hold in each.
pub(super) fn expand(root: &mut Node, path: &Path, sources: &mut Sources, problems: &mut Vec<Problem>) -> Vec<Scope> {
    let folder = real(path).parent().unwrap_or(Path::new("")).to_owned();
    let mut expander = Expander { sources, problems, folder, scopes: Vec::new(), stages: Vec::new(), files: 0 };
    expander.refuse_prefixes(root);
    expander.file(root, &File { path, prefix: String::new(), scope: None }, &mut vec![real(path)]);
    let Expander { scopes, stages, .. } = expander;
    if stages.is_empty() {
        return scopes;
    }
    match entries_of(root, "stages") {
        Some(own) => own.extend(stages),
        None => {
            if let Value::Map(entries) = &mut root.value
                && let Some(include) = entries.iter().find(|entry| entry.key == "include")
                && !entries.iter().any(|entry| entry.key == "stages")
            {
                let span = include.key_span;
                let value = Node { span, value: Value::Map(stages) };
                entries.push(Entry { key: "stages".to_owned(), key_span: span, value });
            }
        }
    }
    scopes
}

/// A file whose includes are followed.
struct File<'a> {
    path: &'a Path,
    prefix: String,
    /// Its own scope; the pipeline file has none.
    scope: Option<usize>,
}

struct Expander<'a> {
    sources: &'a mut Sources,
    problems: &'a mut Vec<Problem>,
    /// That of the pipeline file.
    folder: PathBuf,
    scopes: Vec<Scope>,
    /// The stages of all included files, under their full ids.
    stages: Vec<Entry>,
    files: usize,
}

impl Expander<'_> {
    /// Follows the includes of a file; `open` holds the files on the way to it.
    fn file(&mut self, root: &Node, file: &File<'_>, open: &mut Vec<PathBuf>) {
        let Some(include) = root.get("include") else { return };
        let Value::Map(includes) = &include.value else {
            if include.value != Value::Null {
                let message = format!("`include`: expected a mapping, found {}", include.describe());
                self.problems.push(
                    Problem::error("wrong-type", include.span, message, "expected a mapping")
                        .with_help("give each file a name: `include: { data: ./common/data.yaml }`"),
                );
            }
            return;
        };
        for include in includes {
            self.include(include, file, open);
        }
    }

    fn include(&mut self, include: &Entry, by: &File<'_>, open: &mut Vec<PathBuf>) {
        if !entry::is_id(&include.key) {
            let message = format!("`{}` cannot be the prefix of stages", include.key);
            self.problems.push(
                Problem::error("bad-stage-id", include.key_span, message, "not an id")
                    .with_help("a prefix has letters, digits, `_` and `-`"),
            );
            return;
        }
        let Some(IncludeRequest { file, given }) = self.wanted(include) else { return };
        let Value::String(written) = &file.value else { return };
        let path = beside(by.path, written);
        let at = real(&path);
        if let Some(problem) = self.refusal(&at, file.span, open) {
            self.problems.push(problem);
            return;
        }
        self.files += 1;
        let Some(root) = self.read(&path, file.span) else { return };
        self.check_frame(&root, file.span);
        self.refuse_prefixes(&root);

        let prefix = format!("{}{}{SEPARATOR}", by.prefix, include.key);
        let vars = match root.get("vars").map(|vars| &vars.value) {
            Some(Value::Map(vars)) => vars.clone(),
            _ => Vec::new(),
        };
        self.refuse_unknown(&given, &vars, written);
        let scope = self.scopes.len();
        self.scopes.push(Scope { prefix: prefix.clone(), parent: by.scope, vars, given });
        if let Some(Value::Map(stages)) = root.get("stages").map(|stages| &stages.value) {
            let full = |stage: &Entry| Entry { key: format!("{prefix}{}", stage.key), ..stage.clone() };
            self.stages.extend(stages.iter().map(full));
        }
        open.push(at);
        self.file(&root, &File { path: &path, prefix, scope: Some(scope) }, open);
        open.pop();
    }

    /// The file and the variables of an include.
    fn wanted(&mut self, include: &Entry) -> Option<IncludeRequest> {
        let none = |file: Node| IncludeRequest { file, given: Vec::new() };
        if let Value::String(_) = include.value.value {
            return Some(none(include.value.clone()));
        }
        let mut reader = Reader::default();
        let fields = Fields::of(&include.value, &mut reader, &["file", "vars"]).map(drop);
        self.problems.append(&mut reader.problems);
        fields?;
        let Some(file) = include.value.get("file") else {
            let message = format!("`include.{}.file` is missing", include.key);
            self.problems.push(Problem::error("missing-key", include.key_span, message, "which file?"));
            return None;
        };
        match &file.value {
            Value::String(text) if text.contains("${") => {
                let message = "the path of an included file is read before variables are";
                self.problems.push(
                    Problem::error("bad-reference", file.span, message, "a plain path")
                        .with_help("set it on the command line: `include.NAME.file=./other.yaml`"),
                );
                None
            }
            Value::String(_) => match include.value.get("vars").map(|vars| &vars.value) {
                Some(Value::Map(given)) => Some(IncludeRequest { file: file.clone(), given: given.clone() }),
                None | Some(Value::Null) => Some(none(file.clone())),
                Some(_) => {
                    let message = format!("`include.{}.vars`: expected a mapping", include.key);
                    self.problems.push(Problem::error("wrong-type", include.value.span, message, "expected a mapping"));
                    None
                }
            },
            _ => {
                let message = format!("`include.{}.file`: expected a path, found {}", include.key, file.describe());
                self.problems.push(Problem::error("wrong-type", file.span, message, "expected a path"));
                None
            }
        }
    }

    /// Why a file is not followed: it is on the way to itself, or there are too many.
    fn refusal(&self, at: &Path, span: Span, open: &[PathBuf]) -> Option<Problem> {
        if let Some(first) = open.iter().position(|path| path == at) {
            let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut way: Vec<String> = open[first..].iter().map(name).collect();
            way.push(name(&at.to_owned()));
            let message = format!("files include each other: {}", way.join(" -> "));
            return Some(Problem::error("cycle", span, message, "this closes the circle"));
        }
        if open.len() > DEEPEST {
            let message = format!("files include each other more than {DEEPEST} levels deep");
            return Some(Problem::error("too-deep", span, message, "too deep"));
        }
        (self.files == MOST_FILES).then(|| {
            let message = format!("more than {MOST_FILES} files are included");
            Problem::error("too-large", span, message, "one too many")
        })
    }

    /// The tree of an included file. That it cannot be read is shown where it is asked for, what is no YAML in it in
    /// its own text.
    fn read(&mut self, path: &Path, asked: Span) -> Option<Node> {
        let text = match read_included(path) {
            Ok(text) => text,
            Err(rejected) => {
                let of = |problem: Problem| Problem { span: asked, label: "included here".to_owned(), ..problem };
                self.problems.extend(rejected.problems.into_iter().map(of));
                return None;
            }
        };
        let source = self.sources.add_file(path.display().to_string(), &text, folder_of(path));
        let mut found = Vec::new();
        let parsed = parse(source, &text, &mut found);
        // Whose file it is, and whether its lines are for everybody who sees what is wrong, nobody knows.
        if !real(path).starts_with(&self.folder) && !parsed.as_ref().is_ok_and(is_pipeline) {
            let message = format!("`{}` is not a pipeline file", path.display());
            let help = "one begins with `version: 1`; of a file elsewhere that does not, nothing is shown";
            let problem = Problem::error("not-a-mapping", asked, message, "included here");
            self.problems.push(problem.with_help(help));
            return None;
        }
        self.problems.append(&mut found);
        let root = match parsed {
            Ok(root) => root,
            Err(problem) => {
                self.problems.push(*problem);
                return None;
            }
        };
        if let Value::Map(_) = root.value {
            return Some(root);
        }
        let message = format!("`{}` is not a pipeline file: it contains {}", path.display(), root.describe());
        self.problems.push(Problem::error("not-a-mapping", asked, message, "included here"));
        None
    }

    /// What is wrong with an included file itself, and what of it is not taken.
    fn check_frame(&mut self, root: &Node, asked: Span) {
        let mut reader = Reader::default();
        let _ = Fields::of(root, &mut reader, &FILE_KEYS);
        self.problems.append(&mut reader.problems);
        match root.get("version").map(|version| &version.value) {
            Some(Value::Integer(version)) if *version == i64::from(entry::FORMAT_VERSION) => {}
            _ => self.problems.push(entry::unknown_version(root)),
        }
        if !matches!(root.get("stages").map(|stages| &stages.value), Some(Value::Map(_)))
            && root.get("include").is_none()
        {
            let message = "the included file has no stages";
            self.problems.push(Problem::error("no-stages", asked, message, "included here"));
        }
        let Value::Map(entries) = &root.value else { return };
        for entry in entries.iter().filter(|entry| FILE_KEYS.contains(&entry.key.as_str())) {
            if !TAKEN.contains(&entry.key.as_str()) {
                let message = format!("`{}` of an included file is ignored", entry.key);
                let help = "say it in the file that includes this one";
                self.problems.push(
                    Problem::warning("no-effect", entry.key_span, message, "without effect where it is included")
                        .with_related(asked, "included here")
                        .with_help(help),
                );
            }
        }
    }

    /// A stage that a file declares itself has no prefix.
    fn refuse_prefixes(&mut self, root: &Node) {
        let Some(Value::Map(stages)) = root.get("stages").map(|stages| &stages.value) else { return };
        for stage in stages.iter().filter(|stage| stage.key.contains(SEPARATOR)) {
            let message = format!("`{}` cannot be the id of a stage", stage.key);
            self.problems.push(
                Problem::error("bad-stage-id", stage.key_span, message, "not an id")
                    .with_help("only ids of included stages contain `/`"),
            );
        }
    }

    /// A variable that the file does not declare is read by nothing.
    fn refuse_unknown(&mut self, given: &[Entry], vars: &[Entry], file: &str) {
        let names: Vec<&str> = vars.iter().map(|var| var.key.as_str()).collect();
        let known: HashSet<&str> = names.iter().copied().collect();
        for entry in given.iter().filter(|given| !known.contains(given.key.as_str())) {
            let message = format!("`{file}` declares no variable `{}`", entry.key);
            self.problems.push(
                Problem::error("unknown-variable", entry.key_span, message, "not declared under its `vars:`")
                    .with_help_if(suggest::help(&entry.key, "its variables", names.iter().copied())),
            );
        }
    }
}

/// Whether a text says that it is a pipeline file.
fn is_pipeline(root: &Node) -> bool {
    matches!(root.get("version").map(|version| &version.value), Some(Value::Integer(_)))
}

/// What an include asks for.
struct IncludeRequest {
    file: Node,
    given: Vec<Entry>,
}

fn entries_of<'a>(root: &'a mut Node, key: &str) -> Option<&'a mut Vec<Entry>> {
    let Value::Map(entries) = &mut root.value else { return None };
    match &mut entries.iter_mut().find(|entry| entry.key == key)?.value.value {
        Value::Map(entries) => Some(entries),
        _ => None,
    }
}

/// A path that one file writes, from where the program stands.
fn beside(file: &Path, written: &str) -> PathBuf {
    let written = Path::new(written).components().filter(|part| *part != Component::CurDir).collect::<PathBuf>();
    file.parent().unwrap_or(Path::new("")).join(written)
}

/// What tells a file from another, however it is written.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

// References of included stages: `articles`, written in the file that is included as `data`, is the stage
// `data/articles`.
//
// Which texts are references only the stage kinds know: each reads its parameters once, and the places of its
// references are noted. A name is looked up in the file that it is in, then in the one that includes that; so a
// file can be given a stage of the other by a variable.

/// Gives every reference of an included stage its full id.
pub(super) fn qualify(root: &mut Node, registry: &Registry) {
    let Value::Map(entries) = &mut root.value else { return };
    let Some(stages) = entries.iter_mut().find(|entry| entry.key == "stages") else { return };
    let Value::Map(stages) = &mut stages.value.value else { return };
    let ids: HashSet<String> = stages.iter().map(|stage| stage.key.clone()).collect();
    for stage in stages.iter_mut() {
        let Some((prefix, _)) = stage.key.rsplit_once(SEPARATOR) else { continue };
        let names = Names { prefix, ids: &ids };
        let kind = match stage.value.get("uses").map(|uses| &uses.value) {
            Some(Value::String(uses)) => registry.get(uses),
            _ => None,
        };
        let Value::Map(keys) = &mut stage.value.value else { continue };
        for key in keys {
            match (key.key.as_str(), kind) {
                ("with", Some(kind)) => {
                    let mut reader = Reader::default();
                    // What is wrong is said when the stage is bound.
                    let _ = kind.read(&key.value, &mut reader);
                    let places = reader.named.into_iter().map(|named| named.path).collect();
                    names.within(&mut key.value, "", &places);
                }
                ("needs", _) => names.all(&mut key.value),
                _ => {}
            }
        }
    }
}

struct Names<'a> {
    /// Of the stage that refers, without the last separator.
    prefix: &'a str,
    ids: &'a HashSet<String>,
}

impl Names<'_> {
    /// Replaces the references at these places.
    fn within(&self, node: &mut Node, path: &str, places: &HashSet<String>) {
        match &mut node.value {
            Value::String(text) if places.contains(path) => self.replace(text),
            Value::Map(entries) if places.contains(path) => {
                let collected = entries.iter_mut().find(|entry| entry.key == COLLECT);
                if let Some(Value::String(text)) = collected.map(|entry| &mut entry.value.value) {
                    self.replace(text);
                }
            }
            Value::List(items) => {
                for (index, item) in items.iter_mut().enumerate() {
                    self.within(item, &format!("{path}[{index}]"), places);
                }
            }
            Value::Map(entries) => {
                for entry in entries {
                    self.within(&mut entry.value, &dotted(path, &entry.key), places);
                }
            }
            _ => {}
        }
    }

    /// Replaces every text of a list.
    fn all(&self, node: &mut Node) {
        let Value::List(items) = &mut node.value else { return };
        for item in items {
            if let Value::String(text) = &mut item.value {
                self.replace(text);
            }
        }
    }

    fn replace(&self, text: &mut String) {
        let Some(Reference { stage, .. }) = Reference::parse(text, crate::file::source::Span::default()) else {
            return;
        };
        let mut scope = Some(self.prefix);
        while let Some(prefix) = scope {
            if self.ids.contains(&format!("{prefix}{SEPARATOR}{stage}")) {
                *text = format!("{prefix}{SEPARATOR}{text}");
                return;
            }
            scope = prefix.rsplit_once(SEPARATOR).map(|(outer, _)| outer);
        }
    }
}
