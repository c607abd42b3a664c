//! Digests: BLAKE3 of bytes, of files and of structured values.

use std::borrow::Cow;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::str::FromStr;

use nix::fcntl::OFlag;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::StoreError;

/// A BLAKE3 digest, printed as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The digest and the length of a file's content.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub fn of_file(path: &Path) -> Result<(Self, u64), StoreError> {
        Self::of_open_file(&mut open_regular(path)?).map_err(StoreError::on("read", path))
    }

    /// The digest and the length of what is left to read of a file.
    ///
    /// Blocks are read and then hashed on all threads. A memory map would be half as fast again on files that are in
    /// memory already, but turns a bad sector, or a file that another process cuts short, into a signal that kills
    /// this one.
    pub(crate) fn of_open_file(file: &mut File) -> io::Result<(Self, u64)> {
        let expected = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        // One byte more than expected, so that the first read of a small file also meets its end.
        let mut block = vec![0; expected.saturating_add(1).min(LARGE_BLOCK)];
        let mut hasher = blake3::Hasher::new();
        let mut size = 0;
        loop {
            let filled = read_block(file, &mut block)?;
            if filled < PARALLEL_FROM {
                hasher.update(&block[..filled]);
            } else {
                hasher.update_rayon(&block[..filled]);
            }
            size += filled as u64;
            if filled < block.len() {
                return Ok((Self(*hasher.finalize().as_bytes()), size));
            }
        }
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first 12 hexadecimal digits, for people.
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({})", self.short())
    }
}

/// How much of a large file is read before it is hashed.
const LARGE_BLOCK: usize = 4 << 20;

/// From here on, handing the work to several threads pays.
const PARALLEL_FROM: usize = 128 << 10;

/// Opens a file to read it. A named pipe would block and a device might never end, so they are refused.
///
/// # Errors
/// Fails with [`StoreError::NotAFile`] where there is something else, and where the file cannot be opened.
pub fn open_regular(path: &Path) -> Result<File, StoreError> {
    let metadata = fs::metadata(path).map_err(StoreError::on("read", path))?;
    if !metadata.is_file() {
        return Err(StoreError::NotAFile { path: path.to_owned(), found: describe(metadata.file_type()) });
    }
    // Should a pipe have taken the file's place since, it is not waited for.
    let opened = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
    opened.map_err(StoreError::on("open", path))
}

/// A type of file, in words.
pub(crate) fn describe(file_type: fs::FileType) -> &'static str {
    match () {
        () if file_type.is_file() => "regular file",
        () if file_type.is_dir() => "folder",
        () if file_type.is_symlink() => "symbolic link",
        () if file_type.is_socket() => "socket",
        () if file_type.is_fifo() => "named pipe",
        () => "device",
    }
}

/// Fills a block, or as much of it as the file has.
fn read_block(file: &mut File, block: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < block.len() {
        match file.read(&mut block[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// A text that is not 64 hexadecimal digits.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a digest: 64 hexadecimal digits are expected")]
pub struct NotADigest(String);

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        blake3::Hash::from_hex(text).map(|hash| Self(*hash.as_bytes())).map_err(|_| NotADigest(text.to_owned()))
    }
}

impl JsonSchema for Digest {
    fn schema_name() -> Cow<'static, str> {
        "Digest".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "description": "BLAKE3, in hexadecimal digits.", "type": "string", "pattern": "^[0-9a-f]{64}$" })
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Builds a digest from a sequence of values; each is length-prefixed, so that no two sequences collide.
#[derive(Clone, Default)]
pub struct Hasher {
    inner: blake3::Hasher,
    /// Bytes not handed on yet: BLAKE3 takes many chunks at once where it is given many, and several times as long
    /// where each comes by itself.
    waiting: Vec<u8>,
}

/// How many bytes wait at most.
const WAITING: usize = 64 << 10;

impl Hasher {
    /// An empty hasher.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one value.
    pub fn value(&mut self, bytes: &[u8]) -> &mut Self {
        self.add(&(bytes.len() as u64).to_le_bytes());
        self.add(bytes);
        self
    }

    /// Adds one value: the bytes of words that follow each other.
    pub fn words<T: Copy>(&mut self, words: &[T], bytes: impl Fn(T) -> [u8; 4]) -> &mut Self {
        self.add(&(4 * words.len() as u64).to_le_bytes());
        for block in words.chunks(WAITING / 4) {
            let start = self.waiting.len();
            self.waiting.resize(start + 4 * block.len(), 0);
            let (slots, _) = self.waiting[start..].as_chunks_mut();
            slots.iter_mut().zip(block).for_each(|(slot, word)| *slot = bytes(*word));
            self.hand_on_if_many();
        }
        self
    }

    fn add(&mut self, bytes: &[u8]) {
        if bytes.len() >= WAITING {
            self.hand_on();
            self.inner.update(bytes);
        } else {
            self.waiting.extend_from_slice(bytes);
            self.hand_on_if_many();
        }
    }

    fn hand_on_if_many(&mut self) {
        if self.waiting.len() >= WAITING {
            self.hand_on();
        }
    }

    fn hand_on(&mut self) {
        self.inner.update(&self.waiting);
        self.waiting.clear();
    }

    /// The digest of what was added.
    pub fn finish(&self) -> Digest {
        let mut inner = self.inner.clone();
        Digest(*inner.update(&self.waiting).finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_the_digest_of_its_bytes_at_every_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for size in [0, 1, 4095, PARALLEL_FROM, LARGE_BLOCK - 1, LARGE_BLOCK, LARGE_BLOCK + 1, 3 * LARGE_BLOCK + 7] {
            let bytes: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
            fs::write(&path, &bytes).unwrap();
            assert_eq!(Digest::of_file(&path).unwrap(), (Digest::of(&bytes), size as u64), "{size} bytes");
        }
    }

    #[test]
    fn digest_is_blake3() {
        // The first test vector of the BLAKE3 specification.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(Digest::of(b"").to_string(), empty);
        assert_eq!(empty.parse::<Digest>().unwrap(), Digest::of(b""));
    }

    #[test]
    fn texts_that_are_no_digest_are_refused() {
        for text in ["", "af13", &"g".repeat(64), &"a".repeat(65)] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_regular_files_have_digests() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let message = |path: &Path| Digest::of_file(path).unwrap_err().to_string();
        assert!(message(folder.path()).contains("is a folder, where a regular file is needed"));
        assert!(message(&pipe).contains("is a named pipe"));
        assert!(message(Path::new("/dev/zero")).contains("is a device"));
    }

    #[test]
    fn values_are_length_prefixed() {
        let digest = |values: &[&str]| {
            let mut hasher = Hasher::new();
            values.iter().for_each(|value| {
                hasher.value(value.as_bytes());
            });
            hasher.finish()
        };
        assert_ne!(digest(&["ab", "c"]), digest(&["a", "bc"]));
        assert_ne!(digest(&["a", ""]), digest(&["a"]));
        assert_ne!(digest(&["", "a"]), digest(&["a", ""]));
    }

    #[test]
    fn values_have_the_digest_of_their_bytes_in_whatever_pieces_they_come() {
        let long = vec![7; 2 * WAITING + 3];
        let words: Vec<u32> = (0..long.len() as u32).collect();
        let mut hasher = Hasher::new();
        let mut plain = blake3::Hasher::new();
        for bytes in [&b"short"[..], &long, b"", &long[..WAITING], b"end"] {
            hasher.value(bytes).words(&words[..bytes.len()], u32::to_le_bytes);
            plain.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
            plain.update(&(4 * bytes.len() as u64).to_le_bytes());
            words[..bytes.len()].iter().for_each(|word| {
                plain.update(&word.to_le_bytes());
            });
            assert_eq!(hasher.finish(), Digest::from(plain.finalize()), "after {} bytes", bytes.len());
        }
    }
}
