//! What a home knows before anything runs: results, found without a long file being read, and pins.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cache::{Digest, OutputRecord, StatCache, Store};

use crate::home::Home;
use crate::keys::{Reads, stage_key};
use crate::lock_file::LockFile;
use crate::metadata::MetadataCache;
use crate::pin::Pinned;
use crate::plan::{PlannedStage, ResolvedInput};
use crate::stage::PinRequest;
use crate::survey::MOST_READ;

/// A home that is looked into. What of it cannot be read is taken to be absent: whoever needs it says so.
pub(super) struct Known {
    store: Option<Store>,
    lock: Option<LockFile>,
    files: StatCache,
    pub metadata: MetadataCache,
    /// By `stage.output`.
    identities: BTreeMap<String, Digest>,
}

impl Known {
    pub(super) fn open(home: &Home) -> Self {
        Self {
            store: Store::look(home.store()).ok().flatten(),
            lock: LockFile::read(&home.lock_file()).ok(),
            files: StatCache::load(&home.stat_cache()),
            metadata: MetadataCache::of(home),
            identities: BTreeMap::new(),
        }
    }

    /// What something is pinned to.
    pub(super) fn pinned(&self, request: &PinRequest) -> Option<&Pinned> {
        self.lock.as_ref()?.get(request)
    }

    /// The result of a stage, here or remembered to be in the shared cache, and its key; each where it is known. The
    /// digest of a long source file is known as long as the file's attributes are those that it was read with.
    pub(super) fn look_up(
        &mut self,
        stage: &PlannedStage,
        reads: &Reads,
    ) -> (Option<BTreeMap<String, OutputRecord>>, Option<Digest>) {
        if self.store.is_none() && !reads.files.is_empty() {
            return (None, None);
        }
        let digest = |path: &Path| self.files.known(path).or_else(|| of_small_file(path));
        let Some(outside) = reads.outside(&digest, &|request| self.pinned(request)) else { return (None, None) };
        let known = |input: &ResolvedInput| self.identities.get(&format!("{}.{}", input.stage, input.output)).copied();
        let key = stage_key(stage, &outside, known);
        if key.unknown > 0 {
            return (None, None);
        }
        let digest = key.document.result_key();
        let Some(store) = &self.store else { return (None, Some(digest)) };
        let record = store.result(&digest).ok().flatten().or_else(|| store.remembered(&digest));
        let Some(record) = record else { return (None, Some(digest)) };
        for (output, made) in &record.outputs {
            self.identities.insert(format!("{}.{output}", stage.id), made.identity);
        }
        (Some(record.outputs), Some(digest))
    }
}

/// To read a small file takes no longer than to ask whether it has changed.
fn of_small_file(path: &Path) -> Option<(Digest, u64)> {
    let found = fs::metadata(path).ok()?;
    (found.is_file() && found.len() <= MOST_READ).then(|| Digest::of_file(path).ok())?
}
