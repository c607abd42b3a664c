//! Where rows come from: local files or a dataset on the Hub, and what form a file has.

use std::path::{Path, PathBuf};

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{KeyWriter, Parameter, Reader};
use serde_json::json;

use crate::hub::{Repository, RepositoryKind};

/// The form of a file, known by its extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An array of objects, or objects one after the other.
    Json,
    /// An object per line.
    JsonLines,
    /// Values separated by commas, with a header.
    Csv,
    /// Values separated by tabs, with a header.
    Tsv,
    /// Parquet.
    Parquet,
    /// Arrow IPC, file or stream.
    Arrow,
    /// Plain text.
    Text,
}

/// The extensions of the forms that can be read.
pub const EXTENSIONS: &[(&str, Format)] = &[
    ("jsonl", Format::JsonLines),
    ("ndjson", Format::JsonLines),
    ("json", Format::Json),
    ("csv", Format::Csv),
    ("tsv", Format::Tsv),
    ("parquet", Format::Parquet),
    ("arrow", Format::Arrow),
    ("txt", Format::Text),
];

impl Format {
    /// The form of a file, by its extension.
    pub fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        EXTENSIONS.iter().find(|(known, _)| *known == extension).map(|(_, format)| *format)
    }
}

/// A file that rows are read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Where it lies.
    pub path: PathBuf,
    /// What to call it in messages.
    pub name: String,
    /// Its form.
    pub format: Format,
}

/// What `source:` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Local files: a path, a folder or a glob.
    Local {
        /// As written.
        pattern: String,
        /// Where it stands.
        span: Span,
    },
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
        let pattern = || Self::Local { pattern: text.to_owned(), span };
        let is_path = text.starts_with(['.', '/', '~']) || text.contains(['*', '?', '[', '\\']);
        if is_path || Format::of(Path::new(text)).is_some() {
            return Some(pattern());
        }
        let repository = Repository::parse(RepositoryKind::Dataset, text).ok().filter(|_| text.contains('/'))?;
        Some(Self::Hub { repository, span })
    }
}

impl Parameter for Source {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let Value::String(text) = &node.value else {
            reader.wrong_type(node, "a string");
            return None;
        };
        let source = Self::parse(text, node.span);
        if source.is_none() {
            let expected = "a path such as `./rows.jsonl`, or a Hub dataset `owner/name`";
            reader.bad_value(node, format!("`{text}` is neither a path nor a Hub dataset"), expected);
        }
        source
    }

    /// The files' contents and the dataset's commit enter the key by themselves; a path never does.
    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(match self {
            Self::Local { .. } => "files".to_owned(),
            Self::Hub { repository, .. } => format!("hub {}", repository.name()),
        });
    }

    fn schema() -> serde_json::Value {
        json!({
            "type": "string",
            "description": "A file, folder or glob (jsonl, json, csv, tsv, parquet, arrow, txt), or a Hub dataset `owner/name`.",
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_path_and_a_dataset_are_told_apart() {
        let is_local = |text| match Source::parse(text, Span::default()) {
            Some(Source::Local { .. }) => Some(true),
            Some(Source::Hub { .. }) => Some(false),
            None => None,
        };
        for text in
            ["./rows.jsonl", "../a/b.csv", "/data/x.parquet", "data/*.json", "data/rows.jsonl", "rows.txt", "./folder"]
        {
            assert_eq!(is_local(text), Some(true), "{text}");
        }
        assert_eq!(is_local("EdinburghNLP/xsum"), Some(false));
        assert_eq!(is_local("a b/c"), None);
        assert_eq!(is_local("rows"), None);
    }
}
