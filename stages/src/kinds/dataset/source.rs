//! What `source:` names: local files, or a dataset on the Hub.

use std::path::Path;

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{KeyWriter, Parameter, Reader};
use engine::stage::{Counted, Outside};
use serde_json::json;

use super::form::{COUNTED, Compression, Form};
use crate::hub::{Repository, RepositoryKind};

/// The role of local files; that of the second of several sources is `source[1]`.
const ROLE: &str = "source";

/// A path, a folder or a glob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalSource {
    pub pattern: String,
    /// Where it stands.
    pub span: Span,
    /// What the stage calls its files.
    pub role: String,
}

/// What `source:` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Local files, from one place or several.
    Local(Vec<LocalSource>),
    /// A dataset on the Hub.
    Hub {
        /// `owner/name`.
        repository: Repository,
        /// Where it stands.
        span: Span,
    },
}

impl Source {
    /// A path begins with `./`, `../`, `/` or `~`, has a glob or an extension that can be read; a Hub dataset is
    /// `owner/name`.
    fn parse(text: &str, span: Span) -> Option<Self> {
        let local = || Self::Local(vec![LocalSource { pattern: text.to_owned(), span, role: ROLE.to_owned() }]);
        let is_path = text.starts_with(['.', '/', '~']) || text.contains(['*', '?', '[', '\\']);
        if is_path || Form::of(Path::new(text)).is_some() {
            return Some(local());
        }
        let repository = Repository::parse(RepositoryKind::Dataset, text).ok().filter(|_| text.contains('/'))?;
        Some(Self::Hub { repository, span })
    }

    fn read_one(node: &Node, reader: &mut Reader) -> Option<Self> {
        let Value::String(text) = &node.value else {
            reader.wrong_type(node, "a string");
            return None;
        };
        let source = Self::parse(text, node.span);
        if source.is_none() {
            let expected = "a path such as `./rows.jsonl`, or a Hub dataset `owner/name` or `modelscope:owner/name`";
            reader.bad_value(node, format!("`{text}` is neither a path nor a Hub dataset"), expected);
        }
        source
    }

    fn read_list(node: &Node, items: &[Node], reader: &mut Reader) -> Option<Self> {
        if items.is_empty() {
            reader.bad_value(node, "there is no source", "a path at least");
            return None;
        }
        let mut sources = Vec::new();
        let mut failed = false;
        for (index, item) in items.iter().enumerate() {
            match Self::read_one(item, reader) {
                Some(Self::Local(local)) => {
                    let role = format!("{ROLE}[{index}]");
                    sources.extend(local.into_iter().map(|source| LocalSource { role: role.clone(), ..source }));
                }
                Some(Self::Hub { repository, .. }) => {
                    let message = format!(
                        "`{}` is a Hub dataset, and a list must contain local \
                        files",
                        repository.name()
                    );
                    reader.bad_value(
                        item,
                        message,
                        "a path; put it into a separate stage and mix the two with `datasets:`",
                    );
                    failed = true;
                }
                None => failed = true,
            }
        }
        (!failed).then_some(Self::Local(sources))
    }

    /// What it is, for messages.
    pub fn describe(&self) -> String {
        match self {
            Self::Local(sources) => sources.iter().map(|source| source.pattern.as_str()).collect::<Vec<_>>().join(", "),
            Self::Hub { repository, .. } => repository.written(),
        }
    }

    /// Where it stands.
    pub fn span(&self) -> Span {
        match self {
            Self::Local(sources) => sources.first().map_or_else(Span::default, |source| source.span),
            Self::Hub { span, .. } => *span,
        }
    }

    /// The local files, each place under a role of its own.
    pub fn outside(&self) -> Vec<Outside> {
        let Self::Local(sources) = self else { return Vec::new() };
        let files = |source: &LocalSource| Outside::Files {
            role: source.role.clone(),
            pattern: source.pattern.clone(),
            span: source.span,
            count: Counted::WithExtension(&COUNTED),
        };
        sources.iter().map(files).collect()
    }
}

impl Parameter for Source {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::List(items) => Self::read_list(node, items, reader),
            _ => Self::read_one(node, reader),
        }
    }

    /// The files' contents and the dataset's commit enter the key by themselves; a path never does. Of a compressed
    /// file the name says what is in it, which its last extension alone does not.
    fn write_key(&self, key: &mut KeyWriter<'_>) {
        let form = |source: &LocalSource| match Form::of(Path::new(&source.pattern)) {
            Some(form) if form.compression != Compression::None => format!("files, {:?} compressed", form.format),
            _ => "files".to_owned(),
        };
        match self {
            Self::Local(sources) => match sources.as_slice() {
                [only] if only.role == ROLE => key.value(form(only)),
                several => {
                    for (index, source) in several.iter().enumerate() {
                        key.item(index, |key| key.value(form(source)));
                    }
                }
            },
            Self::Hub { repository, .. } => key.value(format!("hub {}", repository.written())),
        }
    }

    fn schema() -> serde_json::Value {
        let path = json!({ "type": "string" });
        json!({
            "description": "A file, folder or glob (jsonl, json, csv, tsv, txt, these with .gz or .zst, parquet, arrow), a list of \
                those, or a Hub dataset `owner/name`, or `modelscope:owner/name`.",
            "anyOf": [path, { "type": "array", "items": path, "minItems": 1 }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_and_a_dataset_are_told_apart() {
        let is_local = |text| match Source::parse(text, Span::default()) {
            Some(Source::Local(_)) => Some(true),
            Some(Source::Hub { .. }) => Some(false),
            None => None,
        };
        for text in [
            "./rows.jsonl",
            "../a/b.csv",
            "/data/x.parquet",
            "data/*.json",
            "data/rows.jsonl",
            "rows.txt",
            "./folder",
            "data/rows.jsonl.gz",
        ] {
            assert_eq!(is_local(text), Some(true), "{text}");
        }
        assert_eq!(is_local("EdinburghNLP/xsum"), Some(false));
        assert_eq!(is_local("modelscope:AI-ModelScope/alpaca-gpt4-data-zh"), Some(false));
        assert_eq!(is_local("modelscope:name"), None);
        assert_eq!(is_local("a b/c"), None);
        assert_eq!(is_local("rows"), None);
    }

    #[test]
    fn a_list_holds_paths() {
        let read = |value: serde_json::Value| {
            let mut reader = Reader::default();
            let source = Source::read(&Node::from_json(&value), &mut reader);
            (source, reader.problems.len())
        };
        let (source, problems) = read(json!(["./a.jsonl", "b/*.csv"]));
        let roles: Vec<String> = match source.unwrap() {
            Source::Local(sources) => sources.into_iter().map(|source| source.role).collect(),
            Source::Hub { .. } => panic!("no local files"),
        };
        assert_eq!((roles, problems), (vec!["source[0]".to_owned(), "source[1]".to_owned()], 0));
        assert_eq!(read(json!([])).1, 1);
        assert_eq!(read(json!(["./a.jsonl", "owner/name", 7])).1, 2);
    }
}
