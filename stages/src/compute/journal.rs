//! What an attempt at a stage has computed, piece by piece, so that the next one continues from there.
//!
//! A line for each piece, appended as it is known: `checksum {"of": address, "found": …}`. The address is a digest of
//! everything that decides the piece and may differ within the stage; what decides the whole stage is in its key, to
//! which the folder of working state belongs. The first line says what computed the others: another version or another
//! kernel set may compute other bits, and begins anew. A line that was cut off by a kill ends what is read. The journal
//! is an aid: one that cannot be written costs work after an interruption and never fails the stage.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use cache::Digest;
use engine::context::StageContext;
use engine::stage::WorkingState;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Its name in the folder of working state.
const FILE: &str = "journal.jsonl";

/// Hex digits of a line's checksum.
const CHECKSUM: usize = 12;

/// What computed the pieces.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    program: String,
    computed_by: String,
}

#[derive(Serialize, Deserialize)]
struct Entry<T> {
    of: Digest,
    found: T,
}

/// The pieces of an interrupted attempt, and a file for those of this one.
pub struct Journal<T> {
    path: PathBuf,
    known: HashMap<Digest, T>,
    /// `None` once it could not be written.
    file: Option<File>,
}

impl<T: Serialize + DeserializeOwned> Journal<T> {
    /// Reads what an interrupted attempt left in a folder of working state, and continues the file.
    pub fn open(folder: &Path, computed_by: impl Into<String>) -> Self {
        let path = folder.join(FILE);
        let header = Header { program: env!("CARGO_PKG_VERSION").to_owned(), computed_by: computed_by.into() };
        let mut journal = Self { known: HashMap::new(), file: None, path };
        match journal.read(&header).and_then(|end| journal.append_from(end, &header)) {
            Ok(file) => journal.file = Some(file),
            Err(error) => tracing::warn!("`{}` cannot be written: {error}", journal.path.display()),
        }
        journal
    }

    /// Pieces that an interrupted attempt computed.
    pub fn known(&self) -> usize {
        self.known.len()
    }

    /// A piece of an interrupted attempt.
    pub fn get(&self, address: &Digest) -> Option<&T> {
        self.known.get(address)
    }

    /// Adds a piece; one that an interrupted attempt computed is there already.
    pub fn add(&mut self, address: Digest, found: T) {
        if self.known.contains_key(&address) {
            return;
        }
        let Some(file) = &mut self.file else { return };
        if let Err(error) = file.write_all(&line(&Entry { of: address, found })) {
            tracing::warn!("`{}` cannot be written: {error}", self.path.display());
            self.file = None;
        }
    }

    /// Reads the pieces of an earlier attempt by the same means; where they end in the file.
    fn read(&mut self, header: &Header) -> io::Result<u64> {
        let mut lines = match Lines::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            lines => lines?,
        };
        if lines.next::<Header>()?.as_ref() != Some(header) {
            return Ok(0);
        }
        while let Some(Entry { of, found }) = lines.next::<Entry<T>>()? {
            self.known.insert(of, found);
        }
        Ok(lines.end)
    }

    /// Opens the file for further lines behind what was read.
    fn append_from(&self, end: u64, header: &Header) -> io::Result<File> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(&self.path)?;
        file.set_len(end)?;
        file.seek(SeekFrom::End(0))?;
        if end == 0 {
            file.write_all(&line(header))?;
        }
        Ok(file)
    }
}

/// How far the attempt came whose working state is in a folder.
pub fn progress(folder: &Path) -> Option<WorkingState> {
    let lines = BufReader::new(File::open(folder.join(FILE)).ok()?).split(b'\n').count() as u64;
    // The first one is the header.
    let done = lines.checked_sub(1).filter(|done| *done > 0)?;
    Some(WorkingState::GoesOn { unit: "request".to_owned(), done, of: None })
}

/// Says, and records, that so many requests are there from an interrupted attempt.
pub fn note(known: usize, context: &mut StageContext) {
    if known > 0 {
        context.note(format!("continuing: an interrupted attempt has answered {known} requests"));
        context.record("continued_from_requests", known);
    }
}

/// Removes the journal of a folder of working state: the stage has its result.
pub fn forget(folder: &Path) {
    // What stays is collected with the folder.
    let _ = std::fs::remove_file(folder.join(FILE));
}

fn line(entry: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_string(entry).expect("an entry is plain data");
    format!("{} {json}\n", checksum(json.as_bytes())).into_bytes()
}

fn checksum(json: &[u8]) -> String {
    let mut digits = Digest::of(json).to_string();
    digits.truncate(CHECKSUM);
    digits
}

/// Lines whose checksum is right; the first other one ends them.
struct Lines {
    reader: BufReader<File>,
    /// The end of the last one.
    end: u64,
}

impl Lines {
    fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { reader: BufReader::new(File::open(path)?), end: 0 })
    }

    fn next<E: DeserializeOwned>(&mut self) -> io::Result<Option<E>> {
        let mut line = Vec::new();
        self.reader.read_until(b'\n', &mut line)?;
        let Some(json) = line.strip_suffix(b"\n").and_then(|line| line.get(CHECKSUM + 1..)) else { return Ok(None) };
        if checksum(json).as_bytes() != &line[..CHECKSUM] {
            return Ok(None);
        }
        let entry = serde_json::from_slice(json).ok();
        if entry.is_some() {
            self.end += line.len() as u64;
        }
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u64) -> Digest {
        Digest::of(&number.to_le_bytes())
    }

    fn written(folder: &Path, numbers: std::ops::Range<u64>) {
        let mut journal = Journal::open(folder, "cpu");
        numbers.for_each(|number| journal.add(address(number), number as f64 / 3.0));
    }

    #[test]
    fn what_was_added_is_known_to_the_next_attempt_to_the_bit() {
        let folder = tempfile::tempdir().unwrap();
        written(folder.path(), 0..5);
        written(folder.path(), 3..8);
        let journal = Journal::<f64>::open(folder.path(), "cpu");
        assert_eq!(journal.known(), 8);
        assert!((0..8).all(|number| journal.get(&address(number)) == Some(&(number as f64 / 3.0))));
        let Some(WorkingState::GoesOn { unit, done, of }) = progress(folder.path()) else { panic!() };
        assert_eq!((unit.as_str(), done, of), ("request", 8, None));
        forget(folder.path());
        assert_eq!(progress(folder.path()), None);
    }

    #[test]
    fn a_line_that_was_cut_off_or_damaged_ends_what_is_known_and_is_written_over() {
        let folder = tempfile::tempdir().unwrap();
        written(folder.path(), 0..4);
        let path = folder.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        for cut in 1..=whole.len() {
            std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            let known = Journal::<f64>::open(folder.path(), "cpu").known();
            assert_eq!(
                known,
                whole[..whole.len() - cut].iter().filter(|byte| **byte == b'\n').count().saturating_sub(1)
            );
            written(folder.path(), 0..4);
            assert_eq!(std::fs::read(&path).unwrap(), whole);
        }
        let mut damaged = whole.clone();
        let middle = whole.len() / 2;
        damaged[middle] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        assert!(Journal::<f64>::open(folder.path(), "cpu").known() < 4);
    }

    #[test]
    fn what_something_else_computed_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        written(folder.path(), 0..4);
        assert_eq!(Journal::<f64>::open(folder.path(), "cpu (avx2)").known(), 0);
        assert_eq!(Journal::<f64>::open(folder.path(), "cpu").known(), 0);
    }

    #[test]
    fn one_that_cannot_be_written_is_empty() {
        let mut journal = Journal::open(Path::new("/nowhere/at/all"), "cpu");
        journal.add(address(1), 1.0);
        assert_eq!((journal.known(), journal.get(&address(1))), (0, None));
    }
}
