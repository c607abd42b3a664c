//! A shared store as others see it: blocking calls, each of which does its work in parallel within.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use object_store::path::Path as Name;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt, PutMode};
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::connect::connect;
use super::error::{Asked, RemoteError};
use super::place::RemotePlace;
use crate::record::Stored;
use crate::{Digest, ResultRecord};

/// Version of the layout.
const VERSION: u32 = 1;

/// The name of the marker.
const MARKER: &str = "pipeline-cache.json";

/// How many small requests are under way at a time.
const PARALLEL_REQUESTS: usize = 16;

/// How many files are moved at a time.
pub(super) const PARALLEL_FILES: usize = 6;

/// Records and trees are read into memory; nothing that this program writes comes near to this.
const LARGEST_RECORD: u64 = 64 << 20;

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferProgress {
    /// Bytes moved, or found to be there.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// A shared store. Calls block, and may come from several threads, though not from within an event loop.
#[derive(Debug)]
pub struct Remote {
    shared: Arc<Shared>,
    /// Its threads are a private matter: this crate and its callers are synchronous. Taken in `drop` alone.
    runtime: Option<Runtime>,
    stop: watch::Sender<bool>,
}

/// What the tasks of a call share.
#[derive(Debug)]
pub(super) struct Shared {
    store: Arc<dyn ObjectStore>,
    prefix: Name,
    remote: String,
    requests: Semaphore,
    /// The marker was found, or written.
    marked: OnceLock<()>,
    /// What turned out not to be what its name says: sent again, though it is there. And the records of results whose
    /// fetch ended with such a thing, which other results may have, too, and put right: what is behind it was not
    /// seen.
    refused: Mutex<BTreeSet<Name>>,
}

#[derive(Serialize, Deserialize)]
struct Marker {
    version: u32,
    digest: String,
}

impl Remote {
    /// A client of a shared store, with the credentials in the environment. Nothing is sent yet.
    ///
    /// # Errors
    /// Fails where the environment's settings cannot be used, or a folder is not there.
    pub fn open(place: &RemotePlace) -> Result<Self, RemoteError> {
        let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        Self::open_with(place, std::env::vars_os().filter_map(text))
    }

    /// [`Remote::open`] with the environment given.
    ///
    /// # Errors
    /// As there.
    pub fn open_with(
        place: &RemotePlace,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, RemoteError> {
        let remote = place.to_string();
        let (store, prefix) = connect(place, &variables.into_iter().collect())?;
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("remote").enable_all().build();
        let runtime = runtime.map_err(|source| RemoteError::Machine { remote: remote.clone(), source })?;
        let shared = Shared {
            store,
            prefix,
            remote,
            requests: Semaphore::new(PARALLEL_REQUESTS),
            marked: OnceLock::new(),
            refused: Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared), runtime: Some(runtime), stop: watch::Sender::new(false) })
    }

    /// Its address.
    pub fn name(&self) -> &str {
        &self.shared.remote
    }

    /// The results of keys, in their order; `None` where there is none, or only one of another version of this program.
    ///
    /// # Errors
    /// Fails where the remote cannot be asked. A record that is not what its name says is an error of its own.
    pub fn look_up(&self, keys: &[Digest]) -> Result<Vec<Result<Option<ResultRecord>, RemoteError>>, RemoteError> {
        self.wait(async {
            self.shared.check_marker().await?;
            let mut tasks = JoinSet::new();
            for (order, key) in keys.iter().copied().enumerate() {
                let shared = Arc::clone(&self.shared);
                tasks.spawn(async move { (order, shared.result(&key).await) });
            }
            let mut found = tasks.join_all().await;
            found.sort_by_key(|(order, _)| *order);
            Ok(found.into_iter().map(|(_, result)| result).collect())
        })
    }

    /// Ends every call that is under way, now and from now on, with [`RemoteError::Stopped`].
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Does the work of one call.
    pub(super) fn wait<T>(&self, work: impl Future<Output = Result<T, RemoteError>>) -> Result<T, RemoteError> {
        let mut stopped = self.stop.subscribe();
        self.runtime.as_ref().expect("it is there until the drop").block_on(async {
            tokio::select! {
                biased;
                _ = stopped.wait_for(|stopped| *stopped) => Err(RemoteError::Stopped),
                result = work => result,
            }
        })
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // The last owner may be an event loop, in which nothing may wait for threads.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    pub(super) fn object(&self, digest: &Digest) -> Name {
        self.sharded("objects", digest)
    }

    pub(super) fn tree(&self, digest: &Digest) -> Name {
        self.sharded("trees", digest)
    }

    pub(super) fn record(&self, key: &Digest) -> Name {
        self.prefix.clone().join("results").join(format!("{key}.json"))
    }

    /// The service's client.
    pub(super) fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// The failure of a request to write.
    pub(super) fn unwritten(&self, error: &object_store::Error) -> RemoteError {
        RemoteError::of(&self.remote, Asked::Write, error)
    }

    /// The failure of a request to read what has a name.
    pub(super) fn unread(&self, name: &Name, error: &object_store::Error) -> RemoteError {
        RemoteError::of(&self.remote, Asked::Read(name), error)
    }

    /// Remembers and tells what is not what its name says.
    pub(super) fn refuse(&self, name: &Name, reason: impl Into<String>) -> RemoteError {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        RemoteError::Refused { remote: self.remote.clone(), name: name.to_string(), reason: reason.into() }
    }

    /// Remembers of a result that its fetch ended with something that was refused.
    pub(super) fn refuse_result_after(&self, error: &RemoteError, key: &Digest) {
        if matches!(error, RemoteError::Refused { .. }) {
            self.refused.lock().unwrap_or_else(PoisonError::into_inner).insert(self.record(key));
        }
    }

    /// Whether something was refused under this name, or it is the record of a result of which something was.
    pub(super) fn is_refused(&self, name: &Name) -> bool {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).contains(name)
    }

    /// What is there has been replaced by what should be.
    pub(super) fn accept(&self, name: &Name) {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }

    /// Something that another thing names is gone.
    pub(super) fn missing(&self, name: &Name) -> RemoteError {
        RemoteError::Missing { remote: self.remote.clone(), name: name.to_string() }
    }

    /// The length of what has a name, if there is something.
    pub(super) async fn size(&self, name: &Name) -> Result<Option<u64>, RemoteError> {
        let _request = self.request().await;
        match self.store.head(name).await {
            Ok(found) => Ok(Some(found.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.unread(name, &error)),
        }
    }

    /// The whole of a small thing.
    pub(super) async fn read(&self, name: &Name) -> Result<Option<Vec<u8>>, RemoteError> {
        let _request = self.request().await;
        let found = match self.store.get_opts(name, GetOptions::default()).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            found => found.map_err(|error| self.unread(name, &error))?,
        };
        if found.meta.size > LARGEST_RECORD {
            return Err(self.refuse(name, format!("it has {} bytes, far too many", found.meta.size)));
        }
        Ok(Some(found.bytes().await.map_err(|error| self.unread(name, &error))?.into()))
    }

    /// Writes a small thing; what is there already stays, unless `mode` says otherwise.
    pub(super) async fn write(&self, name: &Name, bytes: Vec<u8>, mode: PutMode) -> Result<(), RemoteError> {
        let _request = self.request().await;
        match self.store.put_opts(name, bytes.into(), mode.into()).await {
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => Ok(()),
            Err(error) => Err(self.unwritten(&error)),
        }
    }

    pub(super) async fn result(&self, key: &Digest) -> Result<Option<ResultRecord>, RemoteError> {
        let name = self.record(key);
        let Some(bytes) = self.read(&name).await? else { return Ok(None) };
        match Stored::read(&bytes, key) {
            Stored::Sound(record) => Ok(Some(record)),
            Stored::Foreign => Ok(None),
            Stored::Damaged => Err(self.refuse(&name, "it is damaged, or not the record of the key in its name")),
        }
    }

    /// Makes sure that what is there is ours to read; nothing at all is, too.
    pub(super) async fn check_marker(&self) -> Result<(), RemoteError> {
        if self.marked.get().is_some() {
            return Ok(());
        }
        let marker = match self.read(&self.marker()).await {
            // Without it nothing is known of the rest.
            Err(RemoteError::Unreadable { remote, reason, .. }) => {
                return Err(RemoteError::NotReadable { remote, reason });
            }
            read => read?,
        };
        let Some(bytes) = marker else { return self.check_bucket().await };
        let marker: Result<Marker, _> = serde_json::from_slice(&bytes);
        match marker {
            Ok(Marker { version: VERSION, .. }) => {
                let _ = self.marked.set(());
                Ok(())
            }
            Ok(Marker { version, .. }) => Err(self.version(format!("version {version}, where {VERSION} is known"))),
            Err(_) => Err(self.version(format!("`{}` is not the marker of a cache", self.marker()))),
        }
    }

    /// Marks an empty place as ours.
    pub(super) async fn mark(&self) -> Result<(), RemoteError> {
        self.check_marker().await?;
        if self.marked.get().is_none() {
            let marker = Marker { version: VERSION, digest: "blake3".to_owned() };
            let json = serde_json::to_vec_pretty(&marker).expect("it is made of a number and a text");
            self.write(&self.marker(), json, PutMode::Create).await?;
            let _ = self.marked.set(());
        }
        Ok(())
    }

    /// An answer that something is not there may mean that nothing is, not even the bucket.
    async fn check_bucket(&self) -> Result<(), RemoteError> {
        let _request = self.request().await;
        match self.store.list_with_delimiter(Some(&self.prefix)).await {
            Ok(_) => Ok(()),
            Err(error) => Err(RemoteError::of(&self.remote, Asked::List, &error)),
        }
    }

    fn version(&self, found: String) -> RemoteError {
        RemoteError::Version { remote: self.remote.clone(), found }
    }

    fn marker(&self) -> Name {
        self.prefix.clone().join(MARKER)
    }

    fn sharded(&self, folder: &'static str, digest: &Digest) -> Name {
        let digest = digest.to_string();
        let (shard, rest) = digest.split_at(2);
        self.prefix.clone().join(folder).join(shard).join(rest)
    }

    async fn request(&self) -> tokio::sync::SemaphorePermit<'_> {
        self.requests.acquire().await.expect("it is never closed")
    }
}
