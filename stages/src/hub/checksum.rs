//! The checksums that the Hub lists, and the check of a file's content against them.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// What the Hub says a file's content is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// SHA-256 of the content, listed for files in large file storage; lower-case hexadecimal.
    Sha256(String),
    /// The git object id of a small file: SHA-1 over `blob <size>\0` and the content; lower-case hexadecimal.
    GitBlob(String),
}

impl Checksum {
    /// The hexadecimal digits, which are also the name of the file's content in a Hub cache.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    /// A hasher of this checksum's kind, for a content of `size` bytes.
    pub(super) fn hasher(&self, size: u64) -> ContentHasher {
        match self {
            Self::Sha256(_) => ContentHasher::Sha256(Sha256::new()),
            Self::GitBlob(_) => ContentHasher::GitBlob(Sha1::new().chain_update(format!("blob {size}\0").as_bytes())),
        }
    }

    /// The checksum of a file, of this checksum's kind.
    pub(super) fn of_file(&self, path: &Path) -> io::Result<String> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut hasher = self.hasher(size);
        hasher.update_from(file)?;
        Ok(hasher.finish())
    }
}

/// A running checksum.
#[derive(Clone)]
pub(super) enum ContentHasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl ContentHasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitBlob(hasher) => hasher.update(bytes),
        }
    }

    /// Adds everything that a reader gives.
    pub(super) fn update_from(&mut self, mut from: impl Read) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 18];
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(()),
                length => self.update(&buffer[..length]),
            }
        }
    }

    pub(super) fn finish(self) -> String {
        match self {
            Self::Sha256(hasher) => hex(&hasher.finalize()),
            Self::GitBlob(hasher) => hex(&hasher.finalize()),
        }
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_git_blob_is_hashed_as_git_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hello");
        std::fs::write(&path, "hello\n").unwrap();
        // `echo hello | git hash-object --stdin`
        let listed = Checksum::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".to_owned());
        assert_eq!(listed.of_file(&path).unwrap(), listed.hex());
        // `echo hello | sha256sum`
        let listed = Checksum::Sha256("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".to_owned());
        assert_eq!(listed.of_file(&path).unwrap(), listed.hex());
    }
}
