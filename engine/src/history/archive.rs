//! A run as one file: the folder of the run, the records of results that it took from the store, its metrics, and a
//! list of it all.
//!
//! The layout is in docs/runs.md, so that other programs can read it. Results themselves are not in it, and no secret
//! can be: the value of one enters no record.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use cache::{Digest, Store};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use super::folder::{RESULT_FILE, stage_folder};
use super::index::History;
use super::recorded::Recorded;
use super::results::{LookUpError, Origin};
use crate::home::Home;
use crate::run::clock::Moment;

/// Version of the layout.
const VERSION: u32 = 1;

/// The list of an archive's files, which is the last of them.
const LIST_FILE: &str = "archive.json";

/// Outputs of this kind are small and what people look at.
const METRICS: &str = "metrics";

/// The content of `archive.json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct ArchiveList {
    /// Always `VERSION` of the program that wrote it.
    pub version: u32,
    pub run: String,
    /// The version of the program that wrote the archive.
    pub program: String,
    /// When the archive was written, in UTC.
    pub written: String,
    /// The files, by path below the archive's one folder.
    pub files: BTreeMap<String, ArchivedFile>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct ArchivedFile {
    /// BLAKE3 of its content.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
}

/// Why an archive could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The record of a result could not be looked up.
    #[error(transparent)]
    LookUp(#[from] LookUpError),
    /// A file could not be read or written.
    #[error("cannot write the archive `{path}`")]
    Write {
        /// The archive.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Writes a run into an archive, under another name first, so that what has the name is whole. Gives the number of
/// files in it and its length.
///
/// # Errors
/// Fails where something cannot be read, or the archive not be written.
pub fn write_archive(
    path: &Path,
    run: &Recorded,
    home: &Home,
    history: &History,
    store: &Store,
) -> Result<(usize, u64), ArchiveError> {
    let failed = |source| ArchiveError::Write { path: path.to_owned(), source };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.new", std::process::id()));
    let file = File::create(&temporary).map_err(failed)?;
    let written = write(file, run, home, history, store).and_then(|files| {
        let length = fs::metadata(&temporary)?.len();
        fs::rename(&temporary, path)?;
        Ok((files, length))
    });
    written.map_err(|error| {
        let _ = fs::remove_file(&temporary);
        failed(error)
    })
}

fn write(file: File, run: &Recorded, home: &Home, history: &History, store: &Store) -> io::Result<usize> {
    let compressed = GzEncoder::new(BufWriter::new(file), Compression::default());
    let mut archive =
        Archive { tar: tar::Builder::new(compressed), top: format!("run-{}", run.summary.run), files: BTreeMap::new() };
    archive.add_folder(run.folder(), "")?;
    for stage in &run.stages {
        let (id, Some(key)) = (&stage.summary.stage, stage.summary.key) else { continue };
        let origin = Origin::find(home, history, store, &key).map_err(io::Error::other)?;
        let Some(origin) = origin else { continue };
        let folder = stage_folder(id);
        let record = format!("{folder}/{RESULT_FILE}");
        if !archive.files.contains_key(&record) {
            archive.add_bytes(&record, &serde_json::to_vec_pretty(&origin.record)?)?;
        }
        for (name, output) in origin.record.outputs.iter().filter(|(_, output)| output.kind == METRICS) {
            archive.add_metrics(store, &output.tree, &format!("{folder}/{name}"))?;
        }
    }
    archive.finish(&run.summary.run)
}

/// An archive in the making.
struct Archive {
    tar: tar::Builder<GzEncoder<BufWriter<File>>>,
    top: String,
    files: BTreeMap<String, ArchivedFile>,
}

impl Archive {
    fn add_folder(&mut self, folder: &Path, prefix: &str) -> io::Result<()> {
        let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.add_folder(&entry.path(), &format!("{name}/"))?;
            } else if kind.is_file() {
                self.add_file(&name, &entry.path())?;
            }
        }
        Ok(())
    }

    /// The figures of a Metrics artefact, without the tables of single examples.
    fn add_metrics(&mut self, store: &Store, tree: &Digest, prefix: &str) -> io::Result<()> {
        // What the store has no more is in the record with its digest.
        let Ok(tree) = store.tree(tree) else { return Ok(()) };
        let figures = tree.files().iter().filter(|file| file.path.ends_with(".json") || file.path.ends_with(".jsonl"));
        for file in figures {
            let place = store.place(&file.digest);
            if place.path().is_file() {
                self.add_file(&format!("{prefix}/{}", file.path), place.path())?;
            }
        }
        Ok(())
    }

    fn add_file(&mut self, name: &str, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        // A run that goes on adds to its files; what is written here is as long as the header says.
        let size = metadata.len();
        self.add(name, size, modified.map_or(0, |time| time.as_secs()), file.take(size))
    }

    fn add_bytes(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.add(name, bytes.len() as u64, 0, bytes)
    }

    fn add(&mut self, name: &str, size: u64, modified: u64, content: impl Read) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(size);
        header.set_mode(0o644);
        header.set_mtime(modified);
        let mut content = Hashing { content, hasher: blake3::Hasher::new() };
        self.tar.append_data(&mut header, format!("{}/{name}", self.top), &mut content)?;
        let digest = content.hasher.finalize().to_hex().parse().expect("both are BLAKE3 in hexadecimal digits");
        self.files.insert(name.to_owned(), ArchivedFile { digest, size });
        Ok(())
    }

    fn finish(mut self, run: &str) -> io::Result<usize> {
        let list = ArchiveList {
            version: VERSION,
            run: run.to_owned(),
            program: env!("CARGO_PKG_VERSION").to_owned(),
            written: Moment::now().rfc3339(),
            files: std::mem::take(&mut self.files),
        };
        self.add_bytes(LIST_FILE, &serde_json::to_vec_pretty(&list)?)?;
        let mut file = self.tar.into_inner()?.finish()?;
        file.flush()?;
        file.get_ref().sync_all()?;
        Ok(list.files.len() + 1)
    }
}

/// Passes bytes on and hashes them.
struct Hashing<R> {
    content: R,
    hasher: blake3::Hasher,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.content.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}
