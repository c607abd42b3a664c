//! Pieces of files that describe the whole: headers, footers, first bytes. By range requests, so that the rest stays
//! where it is.
//!
//! A piece is put at its place in a file of the true length, so that readers of headers read it as they read any file.
//! It cannot be compared with the file's checksum, and counts for checks alone: what a stage computes from is fetched
//! whole.

use std::fs::{self, File};
use std::future::pending;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::local_files::MOST_READ;
use engine::protocol::Network;
use reqwest::StatusCode;

use super::cache;
use super::client::Hub;
use super::connection::{Connection, Subject, content_range};
use super::error::HubError;
use super::listing::RemoteFile;
use super::parallel::in_tasks;
use super::repository::Snapshot;

/// A file of no more bytes is fetched whole: it may be a pointer that stands for another.
const SMALL: u64 = 1024;

/// A longer header or footer is left alone: nobody reads it ahead.
const LONGEST: u64 = MOST_READ;

/// What of a file is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// The header of a safetensors file.
    SafetensorsHeader,
    /// The footer of a Parquet file.
    ParquetFooter,
    /// The first bytes.
    Beginning(u64),
}

impl Hub {
    /// Puts pieces of a snapshot's files into `folder`, under the files' own paths.
    ///
    /// # Errors
    /// Fails with the first that cannot be had.
    pub fn fetch_pieces(
        &self,
        snapshot: &Snapshot,
        pieces: &[(&RemoteFile, Piece)],
        folder: &Path,
    ) -> Result<(), HubError> {
        let wanted: Vec<(RemoteFile, Piece)> = pieces.iter().map(|(file, piece)| ((*file).clone(), *piece)).collect();
        self.block_on(async {
            let cache = self.cache.clone().filter(|_| self.network == Network::Offline);
            let source = Arc::new((self.connect()?, cache, snapshot.clone()));
            let fetch = |(file, piece): (RemoteFile, Piece)| {
                let (source, to) = (Arc::clone(&source), folder.join(&file.path));
                async move {
                    let (connection, cache, snapshot) = &*source;
                    // What lies there is not compared with its checksum: where the Hub can be asked, it is.
                    let here = cache.as_ref().and_then(|cache| cache::find(cache, snapshot, &file));
                    Origin { connection, snapshot, file: &file, here }.write(piece, &to).await
                }
            };
            in_tasks(wanted, fetch, pending()).await
        })
    }
}

/// Where the bytes of a file come from.
struct Origin<'a> {
    connection: &'a Connection,
    snapshot: &'a Snapshot,
    file: &'a RemoteFile,
    /// The file in the Hub cache of other tools, if it is there.
    here: Option<PathBuf>,
}

impl Origin<'_> {
    async fn write(&self, piece: Piece, to: &Path) -> Result<(), HubError> {
        let disk = |source| HubError::Disk { path: to.to_owned(), source };
        fs::create_dir_all(to.parent().expect("a file has a folder")).map_err(disk)?;
        let target = File::create(to).map_err(disk)?;
        let size = self.file.size;
        target.set_len(size).map_err(disk)?;
        let first = match piece {
            _ if size <= SMALL => 0..size,
            Piece::SafetensorsHeader => 0..8,
            Piece::ParquetFooter => size - 8..size,
            Piece::Beginning(most) => 0..most.min(size),
        };
        let bytes = self.read(first.clone()).await?;
        target.write_all_at(&bytes, first.start).map_err(disk)?;
        if size <= SMALL {
            return Ok(());
        }
        if let Some(rest) = rest(piece, &bytes, size) {
            target.write_all_at(&self.read(rest.clone()).await?, rest.start).map_err(disk)?;
        }
        Ok(())
    }

    async fn read(&self, range: Range<u64>) -> Result<Vec<u8>, HubError> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(path) = &self.here {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            let read = File::open(path).and_then(|file| file.read_exact_at(&mut bytes, range.start));
            return read.map(|()| bytes).map_err(|source| HubError::Disk { path: path.clone(), source });
        }
        let mut failures = 0;
        loop {
            match self.ask(&range).await {
                Ok(bytes) => return Ok(bytes),
                Err(error) => self.connection.pause_or_give_up(error, &mut failures).await?,
            }
        }
    }

    async fn ask(&self, range: &Range<u64>) -> Result<Vec<u8>, HubError> {
        let Self { connection, snapshot, file, .. } = self;
        let url = snapshot.repository.service().api().file_url(connection, snapshot, &file.path);
        let subject = Subject::File { commit: &snapshot.commit, path: &file.path };
        let mut response = connection.get_part(url, range, &snapshot.repository, subject).await?;
        let from = match response.status() {
            StatusCode::PARTIAL_CONTENT => content_range(response.headers()).map(|(from, _)| from),
            // The whole file comes, whatever was asked for.
            _ => Some(0),
        };
        let bad = |problem: &str| HubError::BadAnswer { what: file.path.clone(), problem: problem.to_owned() };
        if from != Some(range.start) {
            return Err(bad("another part than was asked for"));
        }
        let wanted = (range.end - range.start) as usize;
        let mut bytes = Vec::with_capacity(wanted);
        while bytes.len() < wanted {
            let cut = |source: Option<reqwest::Error>| HubError::Cut {
                path: file.path.clone(),
                at: range.start + bytes.len() as u64,
                size: file.size,
                source: source.map(reqwest::Error::without_url),
            };
            let Some(more) = response.chunk().await.map_err(|error| cut(Some(error)))? else { return Err(cut(None)) };
            bytes.extend_from_slice(&more[..more.len().min(wanted - bytes.len())]);
        }
        Ok(bytes)
    }
}

/// What the first bytes say is to be read, too; nothing where they make no sense, which whoever reads the file will
/// say.
fn rest(piece: Piece, first: &[u8], size: u64) -> Option<Range<u64>> {
    let range = match piece {
        Piece::SafetensorsHeader => {
            let length = u64::from_le_bytes(*first.first_chunk::<8>()?);
            8..length.checked_add(8)?
        }
        Piece::ParquetFooter => {
            let length = u64::from(u32::from_le_bytes(*first.first_chunk::<4>()?));
            (size - 8).checked_sub(length)?..size - 8
        }
        Piece::Beginning(_) => return None,
    };
    (range.end <= size && range.end - range.start <= LONGEST).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_say_where_the_rest_is() {
        let header = |length: u64| rest(Piece::SafetensorsHeader, &length.to_le_bytes(), 1000);
        assert_eq!(header(100), Some(8..108));
        assert_eq!(header(992), Some(8..1000));
        for nonsense in [993, u64::MAX] {
            assert_eq!(header(nonsense), None);
        }
        let footer = |length: u32| rest(Piece::ParquetFooter, &[&length.to_le_bytes()[..], b"PAR1"].concat(), 1000);
        assert_eq!(footer(100), Some(892..992));
        assert_eq!(footer(993), None);
        assert_eq!(rest(Piece::Beginning(10), b"0123456789", 1000), None);
    }
}
