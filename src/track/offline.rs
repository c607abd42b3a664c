//! Runs as files, which a tracker's own client sends: what the logs of W&B and of SwanLab have in common.
//!
//! Both are logs in the form of LevelDB (`doc/log_format.md` there) behind a header of seven bytes: blocks of 32 KiB of
//! chunks, each with a checksum (CRC-32 of the chunk's type and its bytes), a length and a type. A record is a protocol
//! buffer.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::Digest;
use engine::history::stage_folder;
use flate2::Crc;
use stages::data::protobuf::Message;

use super::story::{Millis, Story};

const BLOCK: usize = 32 << 10;
const CHUNK_HEADER: usize = 7;

/// Types of chunks.
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// A log, in memory until it is whole.
pub(super) struct Log(Vec<u8>);

impl Log {
    /// Begins with a header: the name and the number of the form, and its version.
    pub(super) fn new(name: [u8; 4], magic: u16, version: u8) -> Self {
        Self([&name[..], &magic.to_le_bytes(), &[version]].concat())
    }

    /// Adds a record.
    pub(super) fn add(&mut self, record: Message) {
        let bytes = record.into_bytes();
        let (mut rest, mut begun) = (&bytes[..], false);
        loop {
            let room = BLOCK - self.0.len() % BLOCK;
            if room < CHUNK_HEADER {
                self.0.extend(&[0; CHUNK_HEADER][..room]);
                continue;
            }
            let (chunk, after) = rest.split_at(rest.len().min(room - CHUNK_HEADER));
            rest = after;
            let kind = match (begun, rest.is_empty()) {
                (false, true) => FULL,
                (false, false) => FIRST,
                (true, false) => MIDDLE,
                (true, true) => LAST,
            };
            let mut checksum = Crc::new();
            checksum.update(&[kind]);
            checksum.update(chunk);
            self.0.extend(checksum.sum().to_le_bytes());
            self.0.extend((chunk.len() as u16).to_le_bytes());
            self.0.push(kind);
            self.0.extend(chunk);
            begun = true;
            if rest.is_empty() {
                return;
            }
        }
    }

    /// Writes it in one step.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        super::replace(path, &self.0)
    }
}

/// A `google.protobuf.Timestamp`.
pub(super) fn timestamp(time: Millis) -> Message {
    let nanos = (time % 1000) * 1_000_000;
    Message::new().int(1, (time / 1000).cast_signed()).int(2, nanos.cast_signed())
}

/// A run's id there: the same each time that it is written, so that it is never there twice.
pub(super) fn id(story: &Story, stage: &str) -> String {
    let whole = Digest::of(format!("{}/{}", story.plan.run, stage_folder(stage)).as_bytes()).to_string();
    let hex = whole.rsplit(':').next().unwrap_or(&whole);
    hex.chars().take(16).collect()
}

/// The folder of a run, made: `offline-run-20260301_090507-ID` below `folder`, by when it began.
///
/// # Errors
/// Fails where the disk refuses.
pub(super) fn run_folder(folder: &Path, prefix: &str, started: Millis, id: &str) -> io::Result<PathBuf> {
    let time = engine::run::clock::Moment::at(std::time::UNIX_EPOCH + std::time::Duration::from_millis(started));
    // `2026-03-01T09:05:07.042Z`
    let text: String = time.rfc3339().chars().filter(char::is_ascii_digit).take(14).collect();
    let (day, clock) = text.split_at(text.len().min(8));
    let path = folder.join(format!("{prefix}-{day}_{clock}-{id}"));
    fs::create_dir_all(&path)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The records of a log, its checksums and padding checked: a reader after `doc/log_format.md`.
    fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
        let (mut at, mut records, mut parts) = (CHUNK_HEADER, Vec::new(), Vec::new());
        while at < bytes.len() {
            let room = BLOCK - at % BLOCK;
            if room < CHUNK_HEADER {
                assert!(bytes[at..at + room].iter().all(|byte| *byte == 0));
                at += room;
                continue;
            }
            let length = usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
            let kind = bytes[at + 6];
            let chunk = &bytes[at + CHUNK_HEADER..at + CHUNK_HEADER + length];
            let mut checksum = Crc::new();
            checksum.update(&[&[kind], chunk].concat());
            assert_eq!(bytes[at..at + 4], checksum.sum().to_le_bytes());
            assert_eq!(matches!(kind, FULL | FIRST), parts.is_empty());
            parts.push(chunk.to_vec());
            if matches!(kind, FULL | LAST) {
                records.push(std::mem::take(&mut parts).concat());
            }
            at += CHUNK_HEADER + length;
        }
        records
    }

    #[test]
    fn records_of_any_length_come_back() {
        let lengths = [1, 0, BLOCK - 60, 20, 3, 2, 3 * BLOCK, BLOCK - 14, 7];
        let mut log = Log::new(*b":W&B", 0xbee1, 0);
        for (at, length) in lengths.iter().enumerate() {
            log.add(Message::new().text(1, &at.to_string().repeat(*length)));
        }
        let found = records(&log.0);
        assert_eq!(found.len(), lengths.len());
        for (at, (record, length)) in found.iter().zip(lengths).enumerate() {
            assert_eq!(*record, Message::new().text(1, &at.to_string().repeat(length)).into_bytes());
        }
    }
}
