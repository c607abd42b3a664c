//! Changes to the text of a recipe: values are replaced where they are, and everything else stays, comments too.

use std::path::Path;

use engine::file::parse::parse;
use engine::file::scalar;
use engine::file::source::{SourceId, Span};
use engine::file::tree::{Node, Value};
use engine::suggest;

use super::Recipe;
use crate::import::places::Places;
use crate::import::write;
use crate::render::Failure;
use crate::words;

/// A recipe's text, its tree, and what is to be changed.
#[derive(Clone)]
pub(super) struct Draft {
    recipe: &'static Recipe,
    root: Node,
    /// Texts in the place of spans, which are not the same twice.
    changes: Vec<(Span, String)>,
    /// Lines in front of the recipe's own comment.
    head: Vec<String>,
}

impl Draft {
    pub(super) fn new(recipe: &'static Recipe) -> Self {
        let mut problems = Vec::new();
        let root = parse(SourceId(0), recipe.text, &mut problems).expect("a test reads every recipe");
        Self { recipe, root, changes: Vec::new(), head: Vec::new() }
    }

    /// Gives a variable of the recipe a value. A path is meant from here, and written from where the file will be.
    pub(super) fn set(&mut self, name: &str, value: &str, places: &Places) -> Result<(), Failure> {
        let Some(span) = self.root.get("vars").and_then(|vars| vars.get(name)).map(|value| value.span) else {
            return Err(self.unknown(name));
        };
        let is_folder = places.is_path(value);
        let written = if is_folder { places.written(value) } else { value.to_owned() };
        let text = match scalar::plain(&written) {
            Value::String(_) => write::text(&written),
            _ => written,
        };
        self.changes.retain(|(changed, _)| *changed != span);
        self.changes.push((span, text));
        if is_folder {
            self.read_from_folders(name);
        }
        Ok(())
    }

    fn unknown(&self, name: &str) -> Failure {
        let recipe = self.recipe.name;
        let names = self.variables();
        let failure = Failure::wrong(format!("the recipe `{recipe}` has no variable `{name}`"));
        match suggest::help(name, "variables", &names) {
            Some(help) => failure.with_help(help),
            None => failure,
        }
    }

    fn variables(&self) -> Vec<String> {
        match self.root.get("vars").map(|vars| &vars.value) {
            Some(Value::Map(entries)) => entries.iter().map(|entry| entry.key.clone()).collect(),
            _ => Vec::new(),
        }
    }

    pub(super) fn has_variable(&self, name: &str) -> bool {
        self.variables().iter().any(|variable| variable == name)
    }

    /// Downloads of what a variable names are copies of a folder.
    fn read_from_folders(&mut self, variable: &str) {
        let reference = format!("${{vars.{variable}}}");
        let downloads: Vec<Span> = entries(self.root.get("stages"))
            .iter()
            .flat_map(|stage| entries(stage.value.get("with")))
            .filter(|entry| entry.key == "repo" && entry.value.to_json() == reference)
            .map(|entry| entry.key_span)
            .collect();
        self.changes.extend(downloads.into_iter().map(|span| (span, "path".to_owned())));
    }

    /// Adds parameters to each stage of a kind, all of which a recipe writes as `with: { … }`.
    pub(super) fn add(&mut self, kind: &str, parameters: &str) {
        let begins: Vec<Span> = entries(self.root.get("stages"))
            .iter()
            .filter(|stage| stage.value.get("uses").is_some_and(|uses| uses.to_json() == kind))
            .filter_map(|stage| entries(stage.value.get("with")).first().map(|first| first.key_span))
            .map(|first| Span { len: 0, ..first })
            .collect();
        self.changes.extend(begins.into_iter().map(|span| (span, format!("{parameters}, "))));
    }

    /// Puts a stage behind the one of the name `before`, which it reads, and gives the others its result in place of
    /// that one's.
    pub(super) fn put_between(&mut self, before: &str, name: &str, kind: &str, parameters: &str) {
        let stages = entries(self.root.get("stages"));
        let Some(end) = stages.iter().find(|stage| stage.key == before).map(|stage| stage.value.span) else { return };
        let readers: Vec<Span> = stages
            .iter()
            .flat_map(|stage| entries(stage.value.get("with")))
            .filter(|entry| ["model", "tokenizer"].contains(&entry.key.as_str()) && entry.value.to_json() == before)
            .map(|entry| entry.value.span)
            .collect();
        self.changes.extend(readers.into_iter().map(|span| (span, name.to_owned())));
        let at = Span { offset: end.end(), len: 0, ..end };
        let stage = format!("\n  {name}:\n    uses: {kind}\n    with: {{ model: {before}, {parameters} }}");
        self.changes.push((at, stage));
    }

    /// Replaces a parameter of every stage that sets it.
    pub(super) fn replace(&mut self, parameter: &str, value: &str) {
        let values: Vec<Span> = entries(self.root.get("stages"))
            .iter()
            .filter_map(|stage| stage.value.get("with")?.get(parameter).map(|value| value.span))
            .collect();
        self.changes.extend(values.into_iter().map(|span| (span, value.to_owned())));
    }

    /// Gives each stage of a kind `resources`, which no recipe of [`init`](super::init) sets.
    pub(super) fn request(&mut self, kind: &str, resources: &str) {
        let uses: Vec<Span> = entries(self.root.get("stages"))
            .iter()
            .filter_map(|stage| stage.value.get("uses"))
            .filter(|uses| uses.to_json() == kind)
            .map(|uses| Span { offset: uses.span.end(), len: 0, ..uses.span })
            .collect();
        self.changes.extend(uses.into_iter().map(|span| (span, format!("\n    resources: {resources}"))));
    }

    /// Puts comments in front of the parameters of each stage of a kind.
    pub(super) fn remark(&mut self, kind: &str, lines: &[String]) {
        let begins = entries(self.root.get("stages"))
            .iter()
            .filter(|stage| stage.value.get("uses").is_some_and(|uses| uses.to_json() == kind))
            .flat_map(|stage| entries(Some(&stage.value)))
            .filter(|entry| entry.key == "with")
            .map(|entry| entry.key_span);
        let comments: Vec<(Span, String)> = begins.map(|begin| in_front(begin, "    ", lines)).collect();
        self.changes.extend(comments);
    }

    /// Puts comments in front of what is published of outputs of this name; returns whether there are any.
    pub(super) fn remark_published(&mut self, output: &str, lines: &[String]) -> bool {
        let comments: Vec<(Span, String)> = entries(self.root.get("publish"))
            .iter()
            .filter(|target| target.key.rsplit('.').next() == Some(output) && !self.is_replaced(target.key_span))
            .map(|target| in_front(target.key_span, "  ", lines))
            .collect();
        let has_some = !comments.is_empty();
        self.changes.extend(comments);
        has_some
    }

    /// Publishes nothing; in the place of that a comment says how a result is had otherwise.
    pub(super) fn publish_nothing(&mut self) {
        let Some(publish) = entries(Some(&self.root)).iter().find(|entry| entry.key == "publish") else { return };
        let targets = entries(Some(&publish.value));
        let Some(last) = targets.last() else { return };
        let (begin, name) = (publish.key_span, self.recipe.name);
        let export = |target: &str| format!("\n#   pipeline export {name}.yaml {} FOLDER", words::for_shell(target));
        let exports = targets.iter().map(|target| export(&target.key));
        let comment = "# Nothing is published: the folder would lie in one that this file reads. A result is copied by";
        let text = comment.to_owned() + &exports.collect::<String>();
        self.changes.push((Span { len: last.value.span.end() - begin.offset, ..begin }, text));
    }

    /// Whether a place is a part of one that has another text.
    fn is_replaced(&self, place: Span) -> bool {
        self.changes.iter().any(|(span, _)| span.offset <= place.offset && place.end() <= span.end())
    }

    pub(super) fn explain(&mut self, line: String) {
        self.head.push(line);
    }

    /// The text as a file of this name, which names the job and the folders that it publishes to.
    pub(super) fn write(&self, file: &Path) -> String {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let mut changes = self.changes.clone();
        changes.extend(self.root.get("name").map(|name| (name.span, write::text(&stem))));
        let own = format!("./out/{}", self.recipe.name);
        for target in entries(self.root.get("publish")) {
            if let Value::String(path) = &target.value.value
                && let Some(rest) = path.strip_prefix(&own)
                && !self.is_replaced(target.value.span)
            {
                changes.push((target.value.span, write::text(&format!("./out/{stem}{rest}"))));
            }
        }
        changes.sort_by_key(|(span, _)| span.offset);
        let mut text = self.recipe.text.to_owned();
        for (span, new) in changes.iter().rev() {
            text.replace_range(span.offset..span.end(), new);
        }
        let called = format!("{}.yaml", self.recipe.name);
        // The comments of a recipe name its file in commands.
        let name = words::for_shell(&file.file_name().unwrap_or_default().to_string_lossy());
        let head = self.head.iter().map(|line| format!("# {line}\n"));
        let lines = text.lines().map(|line| match line.starts_with('#') {
            true => line.replace("pipelines/", "").replace(&called, &name) + "\n",
            false => format!("{line}\n"),
        });
        let gap = (!self.head.is_empty()).then(|| "#\n".to_owned());
        head.chain(gap).chain(lines).collect()
    }
}

/// A change that puts comments into lines of their own in front of a key.
fn in_front(key: Span, indentation: &str, lines: &[String]) -> (Span, String) {
    let text = lines.iter().map(|line| format!("# {line}\n{indentation}")).collect();
    (Span { len: 0, ..key }, text)
}

/// The entries of a mapping.
fn entries(node: Option<&Node>) -> &[engine::file::tree::Entry] {
    match node.map(|node| &node.value) {
        Some(Value::Map(entries)) => entries,
        _ => &[],
    }
}
