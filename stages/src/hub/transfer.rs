//! One file: from the Hub cache or the network, continued after a cut, and checked before it counts.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reqwest::{Response, StatusCode};

use super::cache::{self, Cached};
use super::checksum::ContentHasher;
use super::connection::{Connection, Subject, content_range};
use super::error::HubError;
use super::listing::RemoteFile;
use super::repository::Snapshot;

/// How often a file may arrive with the wrong content before that is an error.
const TRIES_PER_CONTENT: u32 = 2;

/// Where the files of one download come from.
pub(super) struct Source {
    pub(super) connection: Connection,
    pub(super) cache: Option<hf_hub::Cache>,
    pub(super) snapshot: Snapshot,
    /// Bytes there, over all files.
    pub(super) done: Arc<AtomicU64>,
}

/// One file on its way.
pub(super) struct Transfer {
    pub(super) source: Arc<Source>,
    pub(super) file: RemoteFile,
    /// Where it lies once it is checked.
    pub(super) finished: PathBuf,
    /// Where it grows.
    pub(super) unfinished: PathBuf,
}

/// What is there of a file: the bytes on disk, and the checksum over them.
struct Partial {
    file: File,
    hasher: ContentHasher,
    length: u64,
    /// How long the file is on the server, as its last answer says.
    length_there: Option<u64>,
}

impl Partial {
    /// Whether the server has nothing beyond what is here.
    fn is_all_there_is(&self) -> bool {
        self.length_there == Some(self.length)
    }
}

impl Transfer {
    pub(super) async fn run(self) -> Result<(), HubError> {
        let cached = match tokio::task::block_in_place(|| self.is_finished())? {
            true => Cached::Same,
            false => tokio::task::block_in_place(|| self.take_from_cache())?,
        };
        let other = match cached {
            Cached::Same => {
                self.source.done.fetch_add(self.file.size, Ordering::Relaxed);
                return Ok(());
            }
            Cached::Other(path) => Some(path),
            Cached::Nothing => None,
        };
        let (mut length, mut found) = (0, String::new());
        for _ in 0..TRIES_PER_CONTENT {
            let mut partial = tokio::task::block_in_place(|| self.open_partial())?;
            self.fill(&mut partial).await.map_err(|error| match (error, &other) {
                (HubError::Offline { .. }, Some(path)) => {
                    HubError::OtherInCache { name: self.file.path.clone(), path: path.clone() }
                }
                (error, _) => error,
            })?;
            (length, found) = (partial.length, partial.hasher.clone().finish());
            if length == self.file.size && found == self.file.checksum.hex() {
                return tokio::task::block_in_place(|| self.finish(&partial.file));
            }
            self.source.done.fetch_sub(length, Ordering::Relaxed);
            self.remove(&self.unfinished)?;
            tracing::debug!(path = self.file.path, "arrived damaged");
        }
        if length < self.file.size {
            return Err(self.shorter(length));
        }
        Err(HubError::Corrupt { path: self.file.path.clone(), expected: self.file.checksum.hex().to_owned(), found })
    }

    /// Whether an earlier call finished the file, and it is still what the Hub lists.
    fn is_finished(&self) -> Result<bool, HubError> {
        match fs::metadata(&self.finished) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(disk(&self.finished)(error)),
            Ok(found) if found.len() == self.file.size => {
                let checksum = self.file.checksum.of_file(&self.finished).map_err(disk(&self.finished))?;
                if checksum == self.file.checksum.hex() {
                    return Ok(true);
                }
            }
            Ok(_) => {}
        }
        self.remove(&self.finished)?;
        Ok(false)
    }

    fn take_from_cache(&self) -> Result<Cached, HubError> {
        let Some(hub_cache) = &self.source.cache else { return Ok(Cached::Nothing) };
        // A partial file of an earlier run stays: the copy grows beside it.
        let copy = self.unfinished.with_added_extension("copy");
        create_parent(&copy)?;
        let cached = cache::take(hub_cache, &self.source.snapshot, &self.file, &copy).map_err(disk(&copy))?;
        if !matches!(cached, Cached::Same) {
            return Ok(cached);
        }
        let file = File::open(&copy).map_err(disk(&copy))?;
        fs::rename(&copy, &self.unfinished).map_err(disk(&self.unfinished))?;
        self.finish(&file)?;
        Ok(cached)
    }

    /// What an earlier try left, or an empty file. The checksum is taken over what lies on disk.
    fn open_partial(&self) -> Result<Partial, HubError> {
        create_parent(&self.unfinished)?;
        let on_disk = disk(&self.unfinished);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.unfinished)
            .map_err(&on_disk)?;
        if file.metadata().map_err(&on_disk)?.len() > self.file.size {
            file.set_len(0).map_err(&on_disk)?;
        }
        let mut hasher = self.file.checksum.hasher(self.file.size);
        hasher.update_from(&mut file).map_err(&on_disk)?;
        let length = file.seek(SeekFrom::End(0)).map_err(&on_disk)?;
        self.source.done.fetch_add(length, Ordering::Relaxed);
        Ok(Partial { file, hasher, length, length_there: None })
    }

    /// Fetches what is missing, or what the server has of it; tries again as long as more comes in than ever before.
    async fn fill(&self, partial: &mut Partial) -> Result<(), HubError> {
        let mut failures = 0;
        let mut longest = partial.length;
        while partial.length < self.file.size {
            let Err(error) = self.stream(partial).await else { break };
            // What comes again after a start from the first byte is no progress.
            if partial.length > longest {
                (failures, longest) = (0, partial.length);
            }
            self.source.connection.pause_or_give_up(error, &mut failures).await?;
        }
        Ok(())
    }

    /// One request, from the first byte that is missing to the end. Succeeds with fewer bytes than are listed where the
    /// server, asked for those behind its last one, has none.
    async fn stream(&self, partial: &mut Partial) -> Result<(), HubError> {
        let Source { connection, snapshot, .. } = &*self.source;
        let url = snapshot.repository.service().api().file_url(connection, snapshot, &self.file.path);
        let from = (partial.length > 0).then_some(partial.length);
        let subject = Subject::File { commit: &snapshot.commit, path: &self.file.path };
        let mut response = match connection.get(url, from, &snapshot.repository, subject).await {
            Err(HubError::Status { status: 416, .. }) if from.is_some() && partial.is_all_there_is() => return Ok(()),
            // The server does not know the range: what is here is not a prefix of what it has.
            Err(HubError::Status { status: 416, .. }) if from.is_some() => {
                let cut = self.cut(partial.length, None);
                return self.start_over(partial).and(Err(cut));
            }
            other => other?,
        };
        let is_whole = response.status() == StatusCode::OK;
        if is_whole && from.is_some() && partial.is_all_there_is() && response.content_length() == from {
            return Ok(());
        }
        self.check_range(&response, partial)?;
        // A server may announce more than there is and keep the connection: what is listed is all that is waited for.
        // Whether it is the file its checksum tells.
        while partial.length < self.file.size {
            let chunk = response.chunk().await.map_err(|error| self.cut(partial.length, Some(error)))?;
            let Some(bytes) = chunk else { break };
            let room = self.file.size - partial.length;
            if bytes.len() as u64 > room {
                return Err(self.bad_answer(format!("more than the {} listed bytes arrive", self.file.size)));
            }
            partial.file.write_all(&bytes).map_err(disk(&self.unfinished))?;
            partial.hasher.update(&bytes);
            partial.length += bytes.len() as u64;
            self.source.done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        match partial.length < self.file.size {
            true if partial.is_all_there_is() => Err(self.shorter(partial.length)),
            true => Err(self.cut(partial.length, None)),
            false => Ok(()),
        }
    }

    /// Makes sure that the bytes to come belong where they will be put.
    fn check_range(&self, response: &Response, partial: &mut Partial) -> Result<(), HubError> {
        if response.status() == StatusCode::PARTIAL_CONTENT {
            let Some((from, total)) = content_range(response.headers()) else {
                return Err(self.bad_answer("a part without its range".to_owned()));
            };
            if from != partial.length {
                return Err(self.bad_answer(format!("a part from byte {from} where {} was asked for", partial.length)));
            }
            if let Some(total) = total.filter(|total| *total != self.file.size) {
                let problem = format!("a part of a file of {total} bytes where {} are listed", self.file.size);
                return Err(self.bad_answer(problem));
            }
            partial.length_there = total;
            return Ok(());
        }
        if response.status() != StatusCode::OK {
            return Err(self.bad_answer(format!("status {} for a file", response.status().as_u16())));
        }
        // The server sends the whole file, whatever was asked for.
        partial.length_there = response.content_length();
        self.start_over(partial)
    }

    fn start_over(&self, partial: &mut Partial) -> Result<(), HubError> {
        partial.file.set_len(0).and_then(|()| partial.file.rewind()).map_err(disk(&self.unfinished))?;
        partial.hasher = self.file.checksum.hasher(self.file.size);
        self.source.done.fetch_sub(partial.length, Ordering::Relaxed);
        partial.length = 0;
        Ok(())
    }

    /// Moves a checked file to where it counts.
    fn finish(&self, file: &File) -> Result<(), HubError> {
        file.sync_all().map_err(disk(&self.unfinished))?;
        create_parent(&self.finished)?;
        fs::rename(&self.unfinished, &self.finished).map_err(disk(&self.finished))?;
        let folder = self.finished.parent().expect("a file has a folder");
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(disk(folder))
    }

    fn remove(&self, path: &Path) -> Result<(), HubError> {
        fs::remove_file(path).map_err(disk(path))
    }

    fn cut(&self, at: u64, source: Option<reqwest::Error>) -> HubError {
        let source = source.map(reqwest::Error::without_url);
        HubError::Cut { path: self.file.path.clone(), at, size: self.file.size, source }
    }

    fn shorter(&self, found: u64) -> HubError {
        HubError::Shorter { path: self.file.path.clone(), found, listed: self.file.size }
    }

    fn bad_answer(&self, problem: String) -> HubError {
        HubError::BadAnswer { what: self.file.path.clone(), problem }
    }
}

fn create_parent(path: &Path) -> Result<(), HubError> {
    let folder = path.parent().expect("a file has a folder");
    fs::create_dir_all(folder).map_err(disk(folder))
}

fn disk(path: &Path) -> impl Fn(io::Error) -> HubError + use<'_> {
    move |source| HubError::Disk { path: path.to_owned(), source }
}
