//! The texts that a plan is read from: the pipeline file and each override given on the command line.

use std::path::PathBuf;
use std::sync::OnceLock;

/// Which text a span is in: an index into [`Sources`].
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
    /// The folder that paths in it are relative to, absolute, where it is not that of the pipeline file.
    pub folder: Option<PathBuf>,
    /// Where its lines begin, once somebody asks.
    lines: OnceLock<Vec<usize>>,
    /// What is counted before every n-th byte: a line may be as long as the file.
    counts: OnceLock<Vec<Count>>,
}

/// What lies before a place of a text.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    bytes: usize,
    characters: usize,
    utf16: usize,
}

/// Bytes between two places that are counted once for all.
const STRIDE: usize = 1024;

/// What columns are counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnUnit {
    /// Characters, as a person counts.
    Characters,
    /// Code units of UTF-16, as editors and SARIF count.
    Utf16,
}

impl Source {
    /// Where the lines begin.
    fn lines(&self) -> &[usize] {
        self.lines.get_or_init(|| {
            let behind = self.text.match_indices('\n').map(|(at, _)| at + 1);
            std::iter::once(0).chain(behind).collect()
        })
    }

    /// What lies before an offset, which is the end of a character.
    fn before(&self, offset: usize) -> Count {
        let counts = self.counts.get_or_init(|| {
            let (mut counts, mut count) = (vec![Count::default()], Count::default());
            for letter in self.text.chars() {
                count = count.with(letter);
                if count.bytes >= counts.len() * STRIDE {
                    counts.push(count);
                }
            }
            counts
        });
        let known = counts[counts.partition_point(|count| count.bytes <= offset) - 1];
        self.text.get(known.bytes..offset).unwrap_or_default().chars().fold(known, Count::with)
    }
}

impl Count {
    fn with(self, letter: char) -> Self {
        Self {
            bytes: self.bytes + letter.len_utf8(),
            characters: self.characters + 1,
            utf16: self.utf16 + letter.len_utf16(),
        }
    }
}

/// All texts of a plan.
#[derive(Debug, Clone, Default)]
pub struct Sources(Vec<Source>);

impl Sources {
    pub fn add(&mut self, name: impl Into<String>, text: impl Into<String>) -> SourceId {
        self.push(Source {
            name: name.into(),
            text: text.into(),
            folder: None,
            lines: OnceLock::new(),
            counts: OnceLock::new(),
        })
    }

    /// Adds the text of an included file, with the absolute folder it is in.
    pub fn add_file(&mut self, name: impl Into<String>, text: impl Into<String>, folder: PathBuf) -> SourceId {
        self.push(Source {
            name: name.into(),
            text: text.into(),
            folder: Some(folder),
            lines: OnceLock::new(),
            counts: OnceLock::new(),
        })
    }

    fn push(&mut self, source: Source) -> SourceId {
        self.0.push(source);
        SourceId((self.0.len() - 1) as u32)
    }

    /// All of them: the pipeline file, then what is included, and the overrides.
    pub fn all(&self) -> impl Iterator<Item = &Source> {
        self.0.iter()
    }

    /// The text that a span is in, if it is in any.
    pub fn get(&self, id: SourceId) -> Option<&Source> {
        self.0.get(id.0 as usize)
    }

    /// What a span covers; `None` where it is no range of its text, or cuts a character.
    pub fn text(&self, span: Span) -> Option<&str> {
        self.get(span.source)?.text.get(span.offset..span.end())
    }

    /// Line and column of a span's first byte, from 1; the column counts characters.
    pub fn line_column(&self, span: Span) -> (usize, usize) {
        self.place(span, ColumnUnit::Characters)
    }

    /// Line and column of a span's first byte, from 1.
    pub fn place(&self, span: Span, columns: ColumnUnit) -> (usize, usize) {
        let Some(source) = self.get(span.source) else { return (1, 1) };
        let offset = span.offset.min(source.text.len());
        let line = source.lines().partition_point(|begin| *begin <= offset);
        let (begin, end) = (source.before(source.lines()[line - 1]), source.before(offset));
        let column = match columns {
            ColumnUnit::Characters => end.characters - begin.characters,
            ColumnUnit::Utf16 => end.utf16 - begin.utf16,
        };
        (line, column + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_from_one_in_the_unit_asked_for() {
        let mut sources = Sources::default();
        let source = sources.add("a", "ab\nä😀c\n");
        let place = |offset, columns| sources.place(Span { source, offset, len: 0 }, columns);
        assert_eq!(place(0, ColumnUnit::Characters), (1, 1));
        assert_eq!(place(2, ColumnUnit::Characters), (1, 3));
        assert_eq!(place(3, ColumnUnit::Characters), (2, 1));
        assert_eq!(place(9, ColumnUnit::Characters), (2, 3));
        assert_eq!(place(9, ColumnUnit::Utf16), (2, 4));
        assert_eq!(place(11, ColumnUnit::Utf16), (3, 1));
        assert_eq!(place(99, ColumnUnit::Utf16), (3, 1));
        assert_eq!(Sources::default().line_column(Span::default()), (1, 1));
    }

    #[test]
    fn places_are_right_on_a_line_of_any_length() {
        let mut sources = Sources::default();
        let text = format!("x\n{}\n", "a😀é".repeat(1000));
        let source = sources.add("a", text.as_str());
        for (at, (offset, _)) in text.char_indices().enumerate().filter(|(at, _)| (2..3002).contains(at)) {
            let before = &text[2..offset];
            let span = Span { source, offset, len: 0 };
            assert_eq!(sources.place(span, ColumnUnit::Characters), (2, at - 1));
            assert_eq!(sources.place(span, ColumnUnit::Utf16), (2, before.encode_utf16().count() + 1));
        }
    }
}
