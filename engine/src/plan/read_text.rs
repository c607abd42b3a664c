//! Reading the file itself: that it is there, small enough, and UTF-8.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::libc;

use super::Rejected;
use crate::file::parse::MAX_BYTES;
use crate::file::problem::Problem;
use crate::file::source::{Sources, Span};

/// The text of a pipeline file, which the command line names and which may be a pipe.
pub(super) fn read_text(path: &Path) -> Result<String, Rejected> {
    text(path, File::open(path))
}

/// The text of a file that another one names: a pipe there has nobody who writes into it, and would be waited for.
pub(super) fn read_included(path: &Path) -> Result<String, Rejected> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).and_then(|file| {
        let kind = file.metadata()?.file_type();
        if kind.is_file() || kind.is_dir() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
    });
    text(path, opened)
}

fn text(path: &Path, opened: io::Result<File>) -> Result<String, Rejected> {
    let name = path.display();
    let bytes = opened.and_then(read_bytes).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => unread(path, "file-missing", format!("there is no file `{name}`")),
        io::ErrorKind::IsADirectory => unread(path, "file-unreadable", format!("`{name}` is a folder")),
        _ => unread(path, "file-unreadable", format!("cannot read `{name}`: {error}")),
    })?;
    if bytes.len() > MAX_BYTES {
        return Err(unread(path, "too-large", format!("`{name}` is too large: at most {MAX_BYTES} bytes are read")));
    }
    String::from_utf8(bytes).map_err(|error| not_utf8(path, &error))
}

/// A pipe has no length beforehand, and some never end: one byte more than allowed tells.
fn read_bytes(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file of which there is no text to show.
fn unread(path: &Path, code: &'static str, message: String) -> Rejected {
    rejected(path, String::new(), |span| Problem::error(code, span, message, ""))
}

fn not_utf8(path: &Path, error: &std::string::FromUtf8Error) -> Rejected {
    let offset = error.utf8_error().valid_up_to();
    // The text is shown with a replacement character where the byte stood.
    let text = String::from_utf8_lossy(error.as_bytes()).into_owned();
    rejected(path, text, |start| {
        let span = Span { offset, len: char::REPLACEMENT_CHARACTER.len_utf8(), ..start };
        Problem::error("not-utf8", span, "the file is not UTF-8", "this byte").with_help("save it as UTF-8")
    })
}

fn rejected(path: &Path, text: String, problem: impl FnOnce(Span) -> Problem) -> Rejected {
    let mut sources = Sources::default();
    let source = sources.add(path.display().to_string(), text);
    let problem = problem(Span { source, offset: 0, len: 0 });
    Rejected::new(sources, vec![problem])
}
