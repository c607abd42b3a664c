//! The end of a file that another machine writes: what came since the last look, by whole lines or as it is.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

/// More than this is left for the next look.
const MOST: u64 = 8 << 20;

/// A file, and how far it was read.
#[derive(Debug)]
pub(super) struct Tail {
    path: PathBuf,
    read: u64,
    /// The beginning of a line that was not whole yet.
    open: Vec<u8>,
}

impl Tail {
    /// A file from its beginning; it need not be there yet.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, read: 0, open: Vec::new() }
    }

    /// The bytes that came since the last look. The file is opened each time: a network file system shows a file as it
    /// is to who opens it, and to others what they have seen before.
    pub(super) fn bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let read = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.read))?;
            file.take(MOST).read_to_end(&mut bytes)
        });
        if read.is_err() {
            bytes.clear();
        }
        self.read += bytes.len() as u64;
        bytes
    }

    /// The lines that have become whole since the last look.
    pub(super) fn lines(&mut self) -> Vec<Vec<u8>> {
        let bytes = self.bytes();
        self.open.extend(bytes);
        let Some(end) = self.open.iter().rposition(|byte| *byte == b'\n') else { return Vec::new() };
        let rest = self.open.split_off(end + 1);
        let whole = std::mem::replace(&mut self.open, rest);
        whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_given_once_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let mut tail = Tail::new(path.clone());
        assert!(tail.lines().is_empty(), "it is not there yet");
        let mut file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        file.write_all(b"one\ntw").unwrap();
        assert_eq!(tail.lines(), [b"one"]);
        assert!(tail.lines().is_empty());
        file.write_all(b"o\nthree\n").unwrap();
        assert_eq!(tail.lines(), [b"two".to_vec(), b"three".to_vec()]);
        assert!(tail.lines().is_empty());
    }
}
