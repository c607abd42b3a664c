//! Rows put aside until their order is known: in memory while they are few, else on disk, in order of their keys.
//!
//! Sorting is by distribution: the top bits of a key choose a file, and a file that is still too large is distributed
//! again. So memory holds a fixed amount, whatever the number of rows, and every pass is sequential.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// How much text is held in memory.
const HELD_BYTES: usize = 64 << 20;

/// Bits of a key that choose a file, at each level.
const BITS: u32 = 6;

/// How rows come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// As they were given.
    AsGiven,
    /// By their keys; equal keys by their numbers. The keys should be spread evenly.
    ByKey,
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    key: u64,
    number: u64,
    values: Vec<String>,
}

/// Takes a row back: its number and values. It returns whether to go on.
pub(super) type Take<'a> = dyn FnMut(u64, Vec<String>) -> bool + 'a;

/// Rows put aside.
pub(super) struct Spool {
    order: Order,
    columns: usize,
    folder: PathBuf,
    held_bytes: usize,
    level: u32,
    held: Vec<Entry>,
    held_now: usize,
    files: Vec<Option<Bucket>>,
}

struct Bucket {
    path: PathBuf,
    writer: BufWriter<File>,
}

impl Spool {
    /// An empty one for rows of so many values, with a folder of its own to be made where memory does not do.
    pub(super) fn new(order: Order, columns: usize, folder: &Path) -> Self {
        Self::at_level(order, columns, folder, HELD_BYTES, 0)
    }

    fn at_level(order: Order, columns: usize, folder: &Path, held_bytes: usize, level: u32) -> Self {
        let files = Vec::new();
        Self { order, columns, folder: folder.to_owned(), held_bytes, level, held: Vec::new(), held_now: 0, files }
    }

    /// Puts a row aside.
    pub(super) fn push(&mut self, key: u64, number: u64, values: Vec<String>) -> io::Result<()> {
        debug_assert_eq!(values.len(), self.columns, "a row has the declared columns");
        self.add(Entry { key, number, values })
    }

    fn add(&mut self, entry: Entry) -> io::Result<()> {
        if !self.files.is_empty() {
            return self.store(&entry);
        }
        self.held_now += entry.size();
        self.held.push(entry);
        if self.held_now > self.held_bytes {
            self.spill()?;
        }
        Ok(())
    }

    /// Moves what is held to the disk, where everything else will go too.
    fn spill(&mut self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let files = if self.order == Order::AsGiven { 1 } else { 1 << BITS };
        self.files = (0..files).map(|_| None).collect();
        for entry in std::mem::take(&mut self.held) {
            self.store(&entry)?;
        }
        Ok(())
    }

    fn store(&mut self, entry: &Entry) -> io::Result<()> {
        let index = match self.order {
            Order::AsGiven => 0,
            Order::ByKey => (entry.key << (BITS * self.level) >> (64 - BITS)) as usize,
        };
        let slot = &mut self.files[index];
        let bucket = match slot {
            Some(bucket) => bucket,
            None => {
                let path = self.folder.join(format!("{:02}-{index:02}", self.level));
                let writer = BufWriter::with_capacity(1 << 16, File::create(&path)?);
                slot.insert(Bucket { path, writer })
            }
        };
        entry.write(&mut bucket.writer)
    }

    /// Gives all rows back in order, until `take` says no.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub(super) fn drain(self, take: &mut Take<'_>) -> io::Result<()> {
        self.drain_while(take).map(drop)
    }

    fn drain_while(mut self, take: &mut Take<'_>) -> io::Result<bool> {
        if self.files.is_empty() {
            if self.order == Order::ByKey {
                self.held.sort_unstable_by_key(|entry| (entry.key, entry.number));
            }
            return Ok(self.held.into_iter().all(|entry| take(entry.number, entry.values)));
        }
        let (order, columns, folder, level) = (self.order, self.columns, self.folder, self.level + 1);
        // Every file is closed before the first is read: fewer are open, and no buffer is held.
        let flush = |bucket: Bucket| {
            bucket.writer.into_inner().map_err(io::IntoInnerError::into_error)?;
            Ok::<_, io::Error>(bucket.path)
        };
        let files: Vec<PathBuf> = self.files.into_iter().flatten().map(flush).collect::<Result<_, _>>()?;
        for path in files {
            let mut reader = BufReader::with_capacity(1 << 16, File::open(&path)?);
            let goes_on = match order {
                Order::AsGiven => replay(&mut reader, columns, take)?,
                Order::ByKey => {
                    // Equal keys cannot be distributed; there are never many.
                    let held_bytes = if BITS * (level + 1) > 64 { usize::MAX } else { self.held_bytes };
                    let below = folder.join(format!("below-{level:02}"));
                    let mut within = Self::at_level(order, columns, &below, held_bytes, level);
                    while let Some(entry) = Entry::read(&mut reader, columns)? {
                        within.add(entry)?;
                    }
                    within.drain_while(take)?
                }
            };
            drop(reader);
            fs::remove_file(&path)?;
            if !goes_on {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn replay(reader: &mut impl Read, columns: usize, take: &mut Take<'_>) -> io::Result<bool> {
    while let Some(entry) = Entry::read(reader, columns)? {
        if !take(entry.number, entry.values) {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Entry {
    /// What it takes in memory, about.
    fn size(&self) -> usize {
        self.values.iter().map(|value| value.len() + 24).sum::<usize>() + 48
    }

    fn write(&self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.key.to_le_bytes())?;
        to.write_all(&self.number.to_le_bytes())?;
        for value in &self.values {
            to.write_all(&(value.len() as u64).to_le_bytes())?;
            to.write_all(value.as_bytes())?;
        }
        Ok(())
    }

    /// The next entry; `None` at the end of the file.
    fn read(from: &mut impl Read, columns: usize) -> io::Result<Option<Self>> {
        let mut key = [0; 8];
        let mut filled = 0;
        while filled < key.len() {
            match from.read(&mut key[filled..])? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                amount => filled += amount,
            }
        }
        let number = read_u64(from)?;
        let values = (0..columns).map(|_| read_text(from)).collect::<io::Result<_>>()?;
        Ok(Some(Self { key: u64::from_le_bytes(key), number, values }))
    }
}

fn read_u64(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn read_text(from: &mut impl Read) -> io::Result<String> {
    let length = read_u64(from)?;
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    from.read_exact(&mut bytes)?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that are spread as draws are.
    fn key(number: u64) -> u64 {
        (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }

    fn through(order: Order, held_bytes: usize, rows: u64) -> (Vec<u64>, usize) {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("aside");
        let mut spool = Spool::at_level(order, 2, &below, held_bytes, 0);
        for number in 0..rows {
            spool.push(key(number), number, vec![format!("text {number}"), "ä".repeat(number as usize % 5)]).unwrap();
        }
        let mut numbers = Vec::new();
        let mut deepest = 0;
        spool
            .drain(&mut |number, values| {
                assert_eq!(values, [format!("text {number}"), "ä".repeat(number as usize % 5)]);
                numbers.push(number);
                if below.join("below-01").join("below-02").exists() {
                    deepest = 2;
                }
                true
            })
            .unwrap();
        (numbers, deepest)
    }

    #[test]
    fn rows_come_back_in_order_from_memory_and_from_any_depth_of_files() {
        let mut sorted: Vec<u64> = (0..5000).collect();
        sorted.sort_by_key(|number| key(*number));
        for (held_bytes, deepest) in [(usize::MAX, 0), (100_000, 0), (200, 2)] {
            assert_eq!(through(Order::ByKey, held_bytes, 5000), (sorted.clone(), deepest), "{held_bytes}");
        }
        for held_bytes in [usize::MAX, 100_000, 0] {
            assert_eq!(through(Order::AsGiven, held_bytes, 5000).0, (0..5000).collect::<Vec<_>>());
        }
    }

    #[test]
    fn taking_can_stop() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::at_level(Order::ByKey, 1, folder.path(), 10, 0);
        (0..100).for_each(|number| spool.push(key(number), number, vec!["x".to_owned()]).unwrap());
        let mut left = 3;
        spool
            .drain(&mut |_, _| {
                left -= 1;
                left > 0
            })
            .unwrap();
        assert_eq!(left, 0);
    }

    #[test]
    fn equal_keys_come_back_by_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::at_level(Order::ByKey, 1, folder.path(), 10, 0);
        [2, 0, 1].into_iter().for_each(|number| spool.push(7, number, vec!["x".to_owned()]).unwrap());
        let mut numbers = Vec::new();
        spool
            .drain(&mut |number, _| {
                numbers.push(number);
                true
            })
            .unwrap();
        assert_eq!(numbers, [0, 1, 2]);
    }
}
