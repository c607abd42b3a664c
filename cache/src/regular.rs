//! Regular files, read without waiting for what is none: a named pipe in a file's place would be waited for without
//! end.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;

use crate::digest::describe;

/// Opens a file to read it.
///
/// # Errors
/// Fails where it is no regular file, or cannot be opened.
pub fn open(path: &Path) -> io::Result<File> {
    let found = fs::metadata(path)?;
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is a {}", describe(found.file_type()))));
    }
    // Should a pipe have taken the file's place since, it is not waited for.
    OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)
}

/// Reads a file.
///
/// # Errors
/// As [`open`], and where it cannot be read.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::instead;

    #[test]
    fn a_file_is_read_and_anything_else_is_an_error_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(read(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        for make in instead() {
            make(&path);
            assert!(read(&path).is_err());
            crate::entry::remove_entry(&path).unwrap();
        }
        fs::write(&path, "content").unwrap();
        assert_eq!(read(&path).unwrap(), b"content");
    }
}
