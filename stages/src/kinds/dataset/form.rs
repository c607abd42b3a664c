//! What form a file has, known by its name: `rows.jsonl`, `rows.csv.gz`.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The form of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An array of objects, objects one after the other, or an object that holds an array of them.
    Json,
    /// An object per line.
    JsonLines,
    /// Values separated by commas, with a header.
    Csv,
    /// Values separated by tabs, with a header.
    Tsv,
    Parquet,
    /// Arrow IPC, file or stream.
    Arrow,
    /// Plain text.
    Text,
}

impl Format {
    /// Whether its rows are known by the line that they begin in.
    pub fn has_lines(self) -> bool {
        match self {
            Self::JsonLines | Self::Csv | Self::Tsv | Self::Text => true,
            Self::Json | Self::Parquet | Self::Arrow => false,
        }
    }

    /// Whether it may lie in a compressed file; the others compress what is in them.
    fn can_be_compressed(self) -> bool {
        !matches!(self, Self::Parquet | Self::Arrow)
    }
}

/// What a whole file is compressed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Nothing.
    None,
    /// gzip, one member or several.
    Gzip,
    /// Zstandard, one frame or several.
    Zstd,
}

/// The extensions of the forms that can be read.
pub(super) const EXTENSIONS: &[(&str, Format)] = &[
    ("jsonl", Format::JsonLines),
    ("ndjson", Format::JsonLines),
    ("json", Format::Json),
    ("csv", Format::Csv),
    ("tsv", Format::Tsv),
    ("parquet", Format::Parquet),
    ("arrow", Format::Arrow),
    ("txt", Format::Text),
];

/// The last extensions of files that rows may be read from.
pub(super) static COUNTED: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let compressed = COMPRESSED.iter().map(|(extension, _)| *extension);
    EXTENSIONS.iter().map(|(extension, _)| *extension).chain(compressed).collect()
});

const COMPRESSED: &[(&str, Compression)] =
    &[("gz", Compression::Gzip), ("zst", Compression::Zstd), ("zstd", Compression::Zstd)];

/// The form of a file and what it is compressed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    pub format: Format,
    /// What that is compressed with.
    pub compression: Compression,
}

impl Form {
    /// The form of a file, by its extensions.
    pub fn of(path: &Path) -> Option<Self> {
        let extension = |path: &Path| path.extension()?.to_str().map(str::to_ascii_lowercase);
        let last = extension(path)?;
        let format = |name: &str| EXTENSIONS.iter().find(|(known, _)| *known == name).map(|(_, format)| *format);
        let Some((_, compression)) = COMPRESSED.iter().find(|(known, _)| *known == last) else {
            return format(&last).map(|format| Self { format, compression: Compression::None });
        };
        let inner = format(&extension(&path.with_extension(""))?).filter(|format| format.can_be_compressed())?;
        Some(Self { format: inner, compression: *compression })
    }

    /// The extensions, for a message.
    pub fn known() -> String {
        let names: Vec<&str> = EXTENSIONS.iter().map(|(extension, _)| *extension).collect();
        format!("{}, and the text formats followed by .gz or .zst", names.join(", "))
    }
}

/// A file that rows are read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Where it lies.
    pub path: PathBuf,
    /// What to call it in messages.
    pub name: String,
    pub form: Form,
    /// The most that is read of a text form, in bytes; what lies behind is an error of the reader. All of it if left
    /// out.
    pub at_most: Option<u64>,
}

impl SourceFile {
    /// A file, where it has a form that can be read.
    pub fn new(path: PathBuf, name: String) -> Option<Self> {
        Form::of(&path).map(|form| Self { path, name, form, at_most: None })
    }

    /// Whether an error of reading may come from the bytes that are left out.
    pub fn is_cut(&self) -> bool {
        let longer = |most| std::fs::metadata(&self.path).is_ok_and(|found| found.len() > most);
        let whole = !self.form.format.can_be_compressed();
        self.at_most.is_some_and(|most| !whole && (self.form.compression != Compression::None || longer(most)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_known_by_the_name() {
        let of = |name: &str| Form::of(Path::new(name)).map(|form| (form.format, form.compression));
        assert_eq!(of("a/rows.JSONL"), Some((Format::JsonLines, Compression::None)));
        assert_eq!(of("rows.v2.csv.gz"), Some((Format::Csv, Compression::Gzip)));
        assert_eq!(of("rows.txt.zst"), Some((Format::Text, Compression::Zstd)));
        for name in ["rows", "rows.gz", "rows.parquet.gz", "rows.arrow.zst", "rows.tar.gz", "rows.py"] {
            assert_eq!(of(name), None, "{name}");
        }
    }
}
