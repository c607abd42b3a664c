//! What a home knows before anything runs: results, found without a long file being read, and pins.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cache::{Digest, OutputRecord, SeenResult, StatCache, Store};

use crate::home::Home;
use crate::keys::{Reads, StageOutside, stage_key};
use crate::local_files::MOST_READ;
use crate::lock_file::LockFile;
use crate::metadata::MetadataCache;
use crate::pin::Pinned;
use crate::plan::{PlannedStage, ResolvedInput};
use crate::stage::PinRequest;

/// What a home knows of a stage, each where it is known.
#[derive(Default)]
pub(super) struct KnownStage {
    /// Its result, where that is in the store.
    pub result: Option<SeenResult>,
    /// The outputs of its result, where that is remembered to be in the shared cache alone.
    pub remembered: Option<BTreeMap<String, OutputRecord>>,
    pub key: Option<Digest>,
    /// What it reads from outside, where every file of that is as it was when it was last read.
    pub outside: Option<StageOutside>,
}

impl KnownStage {
    /// The outputs of its result.
    pub(super) fn outputs(&self) -> Option<&BTreeMap<String, OutputRecord>> {
        self.result.as_ref().map(|result| &result.outputs).or(self.remembered.as_ref())
    }
}

/// A home that is looked into. What of it cannot be read is taken to be absent: whoever needs it says so.
pub(super) struct Known {
    store: Option<Store>,
    lock: Option<LockFile>,
    pub files: StatCache,
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

    /// What is known of a stage. The digest of a long source file is known as long as the file's attributes are those
    /// that it was read with.
    pub(super) fn look_up(&mut self, stage: &PlannedStage, reads: &Reads) -> KnownStage {
        if self.store.is_none() && !reads.files.is_empty() {
            return KnownStage::default();
        }
        let is_remembered = Cell::new(true);
        let digest = |path: &Path| {
            self.files.known(path).or_else(|| {
                is_remembered.set(false);
                of_small_file(path)
            })
        };
        let outside = reads.outside(&digest, &|request| self.pinned(request));
        let Some(outside) = outside else { return KnownStage::default() };
        let known = |input: &ResolvedInput| self.identities.get(&format!("{}.{}", input.stage, input.output)).copied();
        let key = stage_key(stage, &outside, known);
        let outside = is_remembered.get().then_some(outside);
        if key.unknown > 0 {
            return KnownStage { outside, ..KnownStage::default() };
        }
        let digest = key.document.result_key();
        let store = self.store.as_ref();
        let result = store.and_then(|store| store.see(&digest));
        let remembered = store.filter(|_| result.is_none()).and_then(|store| store.remembered(&digest));
        let known =
            KnownStage { result, remembered: remembered.map(|record| record.outputs), key: Some(digest), outside };
        for (output, made) in known.outputs().into_iter().flatten() {
            self.identities.insert(format!("{}.{output}", stage.id), made.identity);
        }
        known
    }
}

/// To read a small file takes no longer than to ask whether it has changed.
fn of_small_file(path: &Path) -> Option<(Digest, u64)> {
    let found = fs::metadata(path).ok()?;
    (found.is_file() && found.len() <= MOST_READ).then(|| Digest::of_file(path).ok())?
}
