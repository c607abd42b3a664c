//! Metadata of what is pinned on servers: small files, headers and first rows, fetched before anything runs, so that
//! the checks have facts of a model or a data set before its gigabytes are moved.
//!
//! It is kept in the home, by the key of the stage that will fetch the rest, until the stage's result is there. It
//! leaves to the stage kinds what is fetched and how ([`crate::stage::Stage::fetch_metadata`]), and to
//! [`crate::checks`] what follows from it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use cache::Digest;
use serde::{Deserialize, Serialize};

use crate::checks::Unseen;
use crate::home::Home;
use crate::local_files::{Extent, LocalFile};
use crate::plan::Plan;
use crate::protocol::Network;
use crate::stage::PinRequest;

/// What nobody has used for so long is removed: its stage has its result, or is no more.
const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The list of what is there, beside the folder [`FILES`].
const LIST: &str = "files.json";
const FILES: &str = "files";

/// The metadata in a home.
#[derive(Debug)]
pub(crate) struct MetadataCache {
    folder: PathBuf,
}

/// A file of a repository, and how much of it was fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchedFile {
    /// Its path in the repository.
    pub path: String,
    /// How much of it there is.
    pub extent: Extent,
}

impl MetadataCache {
    pub(crate) fn of(home: &Home) -> Self {
        Self { folder: home.metadata() }
    }

    /// The files of what a stage of this key has pinned, if their metadata is here.
    pub(crate) fn look(&self, key: &Digest, request: &PinRequest) -> Option<Vec<LocalFile>> {
        let folder = self.folder.join(key.to_string());
        let list: Vec<FetchedFile> = serde_json::from_slice(&fs::read(folder.join(LIST)).ok()?).ok()?;
        let file = |FetchedFile { path, extent }| LocalFile {
            path: folder.join(FILES).join(&path),
            extent,
            name: format!("{}/{path}", request.name),
            relative: path,
        };
        Some(list.into_iter().map(file).collect())
    }

    /// Fetches the metadata of stages that have none; whether there is more than before. A server that does not answer
    /// is no failure here: the stage itself will say so, and try again where it is told to.
    pub(crate) fn fetch(&self, plan: &Plan, unseen: &[Unseen], network: Network) -> bool {
        let fetched = unseen.iter().filter(|unseen| match self.fetch_one(plan, unseen, network) {
            Ok(fetched) => fetched,
            Err(error) => {
                tracing::debug!(%error, stage = plan.stages[unseen.stage].id, "its metadata cannot be fetched");
                false
            }
        });
        fetched.count() > 0
    }

    fn fetch_one(&self, plan: &Plan, unseen: &Unseen, network: Network) -> Result<bool, Box<dyn std::error::Error>> {
        // Another run may fetch the same: whoever is ready first puts it in place.
        let making = Unfinished::below(&self.folder)?;
        let files = making.0.join(FILES);
        fs::create_dir(&files)?;
        let stage = &plan.stages[unseen.stage];
        let Some(list) = stage.bound.fetch_metadata(&unseen.pinned, &files, network)? else { return Ok(false) };
        fs::write(making.0.join(LIST), serde_json::to_vec(&list)?)?;
        let place = self.folder.join(unseen.key.to_string());
        match fs::rename(&making.0, &place) {
            Err(error) if !place.join(LIST).is_file() => Err(error.into()),
            _ => Ok(true),
        }
    }

    /// Removes what has not been fetched anew for long. What cannot be removed stays: it takes little room.
    pub(crate) fn tidy(&self) {
        let _ = self.remove_older_than(SystemTime::now() - KEPT);
    }

    fn remove_older_than(&self, limit: SystemTime) -> io::Result<()> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.metadata()?.modified()? < limit {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

/// A folder of this run alone, which goes unless it is renamed.
struct Unfinished(PathBuf);

impl Unfinished {
    fn below(folder: &Path) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = folder.join(format!(".unfinished-{}-{now}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn remove(path: &Path) -> io::Result<()> {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::source::Span;

    #[test]
    fn what_was_fetched_is_found_by_the_key_until_it_is_old() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::open(&folder.path().join("p.yaml"), None).unwrap();
        let cache = MetadataCache::of(&home);
        let key = Digest::of(b"key");
        let request = PinRequest {
            kind: "hub-model".into(),
            name: "owner/name".into(),
            revision: "main".into(),
            token_env: None,
            span: Span::default(),
        };
        assert_eq!(cache.look(&key, &request), None);
        cache.tidy();
        let place = home.metadata().join(key.to_string());
        fs::create_dir_all(place.join(FILES)).unwrap();
        let list = [FetchedFile { path: "config.json".into(), extent: Extent::Whole }];
        fs::write(place.join(LIST), serde_json::to_vec(&list).unwrap()).unwrap();
        let found = cache.look(&key, &request).unwrap();
        assert_eq!((found[0].name.as_str(), found[0].extent), ("owner/name/config.json", Extent::Whole));
        assert_eq!(found[0].path, place.join("files/config.json"));
        cache.tidy();
        assert!(cache.look(&key, &request).is_some());
        cache.remove_older_than(SystemTime::now() + KEPT).unwrap();
        assert_eq!(cache.look(&key, &request), None);
    }
}
