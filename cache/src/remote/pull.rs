//! From a shared store into the local one: each object verified, then moved in; a tree after its objects.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::task::{JoinSet, block_in_place};

use super::error::RemoteError;
use super::shared::{PARALLEL_FILES, Remote, Shared, TransferProgress};
use crate::{Digest, ResultRecord, Store, StoreError, Tree, TreeFile};

/// What was fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pulled {
    /// Files that the local store lacked.
    pub files: u64,
    /// Their length together.
    pub bytes: u64,
}

impl Remote {
    /// Brings a result into the local store: its objects, its trees, then its record. What is there already is not
    /// fetched.
    ///
    /// `observe` is called from several threads. What was brought before a failure stays, and is not fetched again.
    ///
    /// # Errors
    /// Fails where the remote cannot be reached, lacks something, holds something else than it should, or the disk
    /// refuses.
    pub fn pull(
        &self,
        store: &Store,
        record: &ResultRecord,
        observe: impl Fn(TransferProgress) + Send + Sync + 'static,
    ) -> Result<Pulled, RemoteError> {
        let shared = self.shared();
        let key = record.key.result_key();
        let pulled = self.wait(async {
            shared.check_marker().await?;
            let mut trees = Vec::new();
            let mut wanted = BTreeMap::new();
            for output in record.outputs.values() {
                let tree = shared.fetch_tree(store, &output.tree).await?;
                for file in tree.files() {
                    if !block_in_place(|| store.hold_object(file))? {
                        wanted.insert(file.digest, file.clone());
                    }
                }
                trees.push(tree);
            }
            let pulled = Pulled { files: wanted.len() as u64, bytes: wanted.values().map(|file| file.size).sum() };
            fetch_objects(shared, store, wanted.into_values(), pulled.bytes, Arc::new(observe)).await?;
            block_in_place(|| trees.iter().try_for_each(|tree| store.adopt_tree(tree)))?;
            Ok(pulled)
        });
        let pulled = pulled.inspect_err(|error| shared.refuse_result_after(error, &key))?;
        store.record(&key, record)?;
        Ok(pulled)
    }

    /// What [`Remote::pull`] of a result would fetch.
    ///
    /// # Errors
    /// As there, except for what is in the objects themselves.
    pub fn missing_here(&self, store: &Store, record: &ResultRecord) -> Result<Pulled, RemoteError> {
        let missing = self.wait(async {
            let mut wanted = BTreeMap::new();
            for output in record.outputs.values() {
                let tree = self.shared().fetch_tree(store, &output.tree).await?;
                wanted.extend(tree.files().iter().filter(|file| !store.has(file)).map(|file| (file.digest, file.size)));
            }
            Ok(Pulled { files: wanted.len() as u64, bytes: wanted.values().sum() })
        });
        missing.inspect_err(|error| self.shared().refuse_result_after(error, &record.key.result_key()))
    }
}

impl Shared {
    /// A tree, from the local store or from the shared one, compared with its digest.
    pub(super) async fn fetch_tree(&self, store: &Store, digest: &Digest) -> Result<Tree, RemoteError> {
        match block_in_place(|| store.tree(digest)) {
            Err(StoreError::MissingTree { .. } | StoreError::CorruptTree { .. }) => {}
            found => return Ok(found?),
        }
        let name = self.tree(digest);
        let Some(bytes) = self.read(&name).await? else { return Err(self.missing(&name)) };
        // A tree that is read checks its own paths: none of them leads out of its folder.
        let tree: Tree = serde_json::from_slice(&bytes).map_err(|error| self.refuse(&name, error.to_string()))?;
        if tree.digest() != *digest {
            return Err(self.refuse(&name, "it does not have the digest in its name"));
        }
        Ok(tree)
    }
}

/// Fetches objects, several at a time; the first failure ends the others.
async fn fetch_objects(
    shared: &Arc<Shared>,
    store: &Store,
    files: impl Iterator<Item = TreeFile>,
    total: u64,
    observe: Arc<dyn Fn(TransferProgress) + Send + Sync>,
) -> Result<(), RemoteError> {
    let done = Arc::new(AtomicU64::new(0));
    let moved = Arc::new(move |bytes: u64| {
        let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        observe(TransferProgress { done, total });
    });
    let fetch = |file: TreeFile| {
        let (shared, store, moved) = (Arc::clone(shared), store.clone(), Arc::clone(&moved));
        async move {
            let staging = block_in_place(|| store.staging())?;
            let place = staging.path().join("object");
            shared.download(&file, &place, &*moved).await?;
            block_in_place(|| store.adopt_object(&place, &file))?;
            Ok(())
        }
    };
    several(files.map(fetch)).await
}

/// Does several things, a few at a time. The first failure ends the others, and is told when they have ended.
pub(super) async fn several<F>(work: impl Iterator<Item = F>) -> Result<(), RemoteError>
where
    F: Future<Output = Result<(), RemoteError>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    let mut ended = Ok(());
    for one in work {
        if tasks.len() == PARALLEL_FILES {
            ended = join_one(&mut tasks).await.map(drop);
        }
        if ended.is_err() {
            break;
        }
        tasks.spawn(one);
    }
    while ended.is_ok() && !tasks.is_empty() {
        ended = join_one(&mut tasks).await.map(drop);
    }
    tasks.shutdown().await;
    ended
}

/// Waits for one of several tasks.
pub(super) async fn join_one<T: 'static>(
    tasks: &mut JoinSet<Result<T, RemoteError>>,
) -> Result<Option<T>, RemoteError> {
    match tasks.join_next().await {
        None => Ok(None),
        Some(Ok(result)) => result.map(Some),
        Some(Err(failure)) if failure.is_panic() => std::panic::resume_unwind(failure.into_panic()),
        Some(Err(_)) => Err(RemoteError::Stopped),
    }
}
