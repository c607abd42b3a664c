//! What of a dataset on the Hub is fetched ahead: its README, which says what its splits are, and of the first file
//! that will be read as much as names its columns.

use std::fs;
use std::path::Path;

use engine::error::StageError;
use engine::local_files::{Extent, MOST_READ};
use engine::metadata::FetchedFile;
use engine::pin::Pinned;
use engine::protocol::Network;

use super::form::{Compression, Form, Format};
use super::hub_card::{self, Configuration};
use super::hub_splits::{self, Splits, is_data};
use super::parameters::Dataset;
use super::source::Source;
use crate::hub::{Hub, HubError, Piece, RemoteFile};

/// What says which files are which split.
pub(super) const README: &str = "README.md";

/// The first bytes of a text file, which hold its first rows unless those are long.
pub(super) const FIRST_BYTES: u64 = 256 << 10;

pub(super) fn fetch(
    params: &Dataset,
    pinned: &Pinned,
    folder: &Path,
    network: Network,
) -> Result<Option<Vec<FetchedFile>>, StageError> {
    let Some(Source::Hub { repository, .. }) = &params.source else { return Ok(None) };
    let service = repository.service();
    let failed = |error: HubError| error.of(service);
    let hub = Hub::from_environment(service, params.token_env.as_deref()).map_err(failed)?;
    let hub = hub.with_network(network).impatient();
    let listed = hub.pinned_files(repository, pinned).map_err(failed)?;
    let snapshot = repository.at(&pinned.commit);
    let mut fetched: Vec<FetchedFile> =
        listed.iter().map(|file| FetchedFile { path: file.path.clone(), extent: Extent::Name }).collect();
    let mut has = |path: &str, extent: Extent| {
        fetched.iter_mut().filter(|file| file.path == path).for_each(|file| file.extent = extent);
    };
    let mut readme = None;
    if let Some(file) = listed.iter().find(|file| file.path == README && file.size <= MOST_READ) {
        hub.download_into(&snapshot, std::slice::from_ref(file), folder).map_err(failed)?;
        has(README, Extent::Whole);
        readme = fs::read(folder.join(README)).ok();
    }
    let paths: Vec<&str> = listed.iter().map(|file| file.path.as_str()).collect();
    // Where there is no such split, the checks say so.
    let first = splits(params, readme.as_deref(), &paths).ok().and_then(|(_, splits)| first_file(params, &splits));
    let first = first.and_then(|path| listed.iter().find(|file| file.path == path));
    if let Some((file, piece)) = first.and_then(|file| Some((file, piece(file)?))) {
        match piece {
            Piece::Beginning(most) if file.size <= most => {
                hub.download_into(&snapshot, std::slice::from_ref(file), folder).map_err(failed)?;
                has(&file.path, Extent::Whole);
            }
            piece => {
                hub.fetch_pieces(&snapshot, &[(file, piece)], folder).map_err(failed)?;
                has(&file.path, Extent::Pieces);
            }
        }
    }
    Ok(Some(fetched))
}

/// The configuration that is meant, and the files of the splits that are asked for.
pub(super) fn splits(
    params: &Dataset,
    readme: Option<&[u8]>,
    paths: &[&str],
) -> Result<(Option<Configuration>, Splits), StageError> {
    let declared = match readme {
        Some(text) => hub_card::configurations(&String::from_utf8_lossy(text))?,
        None => Vec::new(),
    };
    let configuration = hub_splits::configuration(&declared, params.config.as_deref())?;
    let data: Vec<&str> = paths.iter().copied().filter(|path| is_data(path)).collect();
    let splits = hub_splits::choose(&data, configuration, params.config.as_deref(), &params.split.names())?;
    Ok((configuration.cloned(), splits))
}

/// The file whose rows come first.
pub(super) fn first_file(params: &Dataset, splits: &Splits) -> Option<String> {
    splits.get(*params.split.names().first()?)?.first().cloned()
}

/// What of a file names its columns; nothing of a form whose beginning cannot be read alone.
fn piece(file: &RemoteFile) -> Option<Piece> {
    let Form { format, compression } = Form::of(Path::new(&file.path))?;
    match (format, compression) {
        (Format::Parquet, _) => (file.size > 8).then_some(Piece::ParquetFooter),
        (Format::Arrow, _) => None,
        (_, Compression::None) => Some(Piece::Beginning(FIRST_BYTES)),
        (_, Compression::Gzip | Compression::Zstd) => None,
    }
}
