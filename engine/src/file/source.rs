//! The texts that a plan is read from: the pipeline file and each override given on the command line.

use std::path::PathBuf;

/// Which text a span lies in: an index into [`Sources`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SourceId(pub u32);

/// A range of bytes in one of the texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Span {
    /// The text.
    pub source: SourceId,
    /// Offset of the first byte.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Span {
    /// Offset behind the last byte.
    pub fn end(self) -> usize {
        self.offset + self.len
    }
}

/// One text and the name to show for it.
#[derive(Debug, Clone)]
pub struct Source {
    /// A path as the user wrote it, or `command line`.
    pub name: String,
    /// The whole text.
    pub text: String,
    /// The folder that paths in it are relative to, where it is not that of the pipeline file.
    pub folder: Option<PathBuf>,
}

/// All texts of a plan.
#[derive(Debug, Clone, Default)]
pub struct Sources(Vec<Source>);

impl Sources {
    /// Adds a text.
    pub fn add(&mut self, name: impl Into<String>, text: impl Into<String>) -> SourceId {
        self.push(Source { name: name.into(), text: text.into(), folder: None })
    }

    /// Adds the text of an included file, with the folder it lies in.
    pub fn add_file(&mut self, name: impl Into<String>, text: impl Into<String>, folder: PathBuf) -> SourceId {
        self.push(Source { name: name.into(), text: text.into(), folder: Some(folder) })
    }

    fn push(&mut self, source: Source) -> SourceId {
        self.0.push(source);
        SourceId((self.0.len() - 1) as u32)
    }

    /// The text that a span lies in, if it lies in any.
    pub fn get(&self, id: SourceId) -> Option<&Source> {
        self.0.get(id.0 as usize)
    }

    /// Line and column of a span's first byte, from 1; the column counts characters.
    pub fn line_column(&self, span: Span) -> (usize, usize) {
        let text = self.get(span.source).map_or("", |source| source.text.as_str());
        let before = text.get(..span.offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
    }
}
