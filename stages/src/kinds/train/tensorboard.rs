//! TensorBoard event files: the curves of a run, with wall times. They lie beside the run's log and are no part of a
//! result.
//!
//! A file is a sequence of records: length (u64), its checksum, the bytes of an `Event` protocol buffer, their
//! checksum. All numbers are little-endian, the checksums CRC-32C, masked. Of the protocol buffers only four messages
//! are needed, so they are written by hand. Source: `tensorflow/core/lib/io/record_writer.h`,
//! `tensorflow/core/util/event.proto`, `summary.proto`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::data::protobuf::Message;

/// Writes one event file.
#[derive(Debug)]
pub(super) struct EventFile {
    file: File,
}

impl EventFile {
    /// Begins a file in a folder, which is made. Where an earlier attempt left a file, what that one says of steps
    /// after `done` no longer holds.
    pub(super) fn create(folder: &Path, done: u64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let now = now();
        // Files are read in the order of their names.
        let name = format!("events.out.tfevents.{:010}.{:09}.pipeline", now.as_secs(), now.subsec_nanos());
        let file = OpenOptions::new().write(true).create_new(true).open(folder.join(name))?;
        let mut events = Self { file };
        events.append(event(now, 0).text(FILE_VERSION, "brain.Event:2"))?;
        if done > 0 {
            let starts = Message::new().int(SESSION_STATUS, SESSION_START);
            events.append(event(now, done + 1).message(SESSION_LOG, &starts))?;
        }
        Ok(events)
    }

    /// Adds named values of a step; whoever reads the file sees all of them or none.
    pub(super) fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> io::Result<()> {
        let of_tag =
            |(tag, value): &(&str, f64)| Message::new().text(VALUE_TAG, tag).float(VALUE_SIMPLE, *value as f32);
        let summary =
            values.iter().map(of_tag).fold(Message::new(), |summary, of_tag| summary.message(SUMMARY_VALUE, &of_tag));
        self.append(event(now(), step).message(SUMMARY, &summary))
    }

    fn append(&mut self, event: Message) -> io::Result<()> {
        let event = event.into_bytes();
        let length = (event.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&event);
        record.extend(masked_crc(&event).to_le_bytes());
        self.file.write_all(&record)
    }
}

// Field numbers of the messages.
const WALL_TIME: u32 = 1;
const STEP: u32 = 2;
const FILE_VERSION: u32 = 3;
const SUMMARY: u32 = 5;
const SESSION_LOG: u32 = 7;
const SUMMARY_VALUE: u32 = 1;
const VALUE_TAG: u32 = 1;
const VALUE_SIMPLE: u32 = 2;
const SESSION_STATUS: u32 = 1;
/// The value of `SessionLog.SessionStatus.START`.
const SESSION_START: i64 = 1;

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// An `Event`, of which what it tells is still to be added.
fn event(time: Duration, step: u64) -> Message {
    Message::new().double(WALL_TIME, time.as_secs_f64()).int(STEP, step.cast_signed())
}

/// CRC-32C, turned and moved, since a checksum of bytes that hold a checksum is a poor one.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The records of a file, their checksums checked.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let mut take = |count: usize| {
            let (taken, rest) = bytes.split_at(count);
            bytes = rest;
            (taken.to_vec(), rest.is_empty())
        };
        loop {
            let (length, _) = take(8);
            assert_eq!(take(4).0, masked_crc(&length).to_le_bytes());
            let (event, _) = take(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            let (checksum, end) = take(4);
            assert_eq!(checksum, masked_crc(&event).to_le_bytes());
            found.push(event);
            if end {
                return found;
            }
        }
    }

    /// The first record that TensorFlow writes to any file, but for its time: 24 bytes of which the length's checksum
    /// is known.
    #[test]
    fn checksums_are_those_of_tensorflow() {
        // RFC 3720, B.4: 32 bytes of zeros.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc(&24u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
    }

    #[test]
    fn a_file_holds_its_version_and_each_step_once_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::create(&folder.path().join("tensorboard"), 300).unwrap();
        events.scalars(301, &[("train/loss", 0.5)]).unwrap();
        let path = fs::read_dir(folder.path().join("tensorboard")).unwrap().next().unwrap().unwrap().path();
        let records = records(&fs::read(path).unwrap());
        let after_time: Vec<&[u8]> = records.iter().map(|record| &record[9..]).collect();
        assert_eq!(after_time[0], [&[0x10, 0, 0x1a, 13], &b"brain.Event:2"[..]].concat());
        // Step 301 in two groups of seven bits, then a session that starts.
        assert_eq!(after_time[1], [0x10, 0xad, 0x02, 0x3a, 2, 0x08, 1]);
        let value = [&[0x0a, 10], &b"train/loss"[..], &[0x15], &0.5f32.to_le_bytes()].concat();
        let summary = [&[0x0a, value.len() as u8], &value[..]].concat();
        assert_eq!(after_time[2], [&[0x10, 0xad, 0x02, 0x2a, summary.len() as u8], &summary[..]].concat());
    }
}
