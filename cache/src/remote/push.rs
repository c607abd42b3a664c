//! From the local store into a shared one: objects, then trees, then the record, so that a record never names what is
//! not there.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use object_store::path::Path as Name;
use object_store::{MultipartUpload, ObjectStoreExt as _, PutMode};
use tokio::task::{JoinSet, block_in_place};

use super::error::RemoteError;
use super::pull::{join_one, several};
use super::shared::{Remote, Shared, TransferProgress};
use crate::record::{self, Stored};
use crate::{Digest, Place, ResultRecord, Store, StoreError, Tree, TreeFile};

/// Files up to this length are sent in one request, longer ones in parts of it.
const PART: u64 = 8 << 20;

/// The most parts that every service takes is 10 000.
const MOST_PARTS: u64 = 9_000;

/// How many parts of one file are under way at a time.
const PARALLEL_PARTS: usize = 2;

/// How it is found out whether what the remote has is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// By its length.
    Length,
    /// By its content, all of which is read.
    Content,
}

/// Whether anything is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushing {
    Send,
    /// It is only found out what would be.
    DryRun,
}

/// What was sent, or would be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// What became of the result itself.
    pub result: PushedAs,
    /// Files that the remote lacked.
    pub files: u64,
    /// Their length together.
    pub bytes: u64,
}

/// What became of a result that was pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushedAs {
    /// The remote had none under its key.
    New,
    /// The remote had the same already.
    Same,
    /// The remote had a record of it that was damaged, or could not be checked: it was replaced.
    Repaired,
    /// The remote has another one under this key, whole, made elsewhere: it stays.
    OtherKept,
}

/// What is believed of what the remote has of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Believed {
    /// What has the right length.
    ByLength,
    /// What has the right content, all of which is read.
    ByContent,
    /// Nothing: something of it was refused, and a fetch, which ends with the first, says nothing of the rest.
    Nothing,
}

/// What the remote has under a key.
enum RemoteRecord {
    Nothing,
    Same,
    /// A record of another version of this program, or a whole result with other outputs.
    Other,
    /// The record of a result that is not whole there: it is replaced.
    Broken,
    /// What is no record of this key, or one without a check where contents are checked: it is replaced.
    Damaged,
}

impl RemoteRecord {
    /// What becomes of the result, and how its record is written if it is.
    fn answer(&self) -> (PushedAs, Option<PutMode>) {
        match self {
            Self::Nothing => (PushedAs::New, Some(PutMode::Create)),
            Self::Same => (PushedAs::Same, None),
            Self::Other => (PushedAs::OtherKept, None),
            Self::Broken => (PushedAs::New, Some(PutMode::Overwrite)),
            Self::Damaged => (PushedAs::Repaired, Some(PutMode::Overwrite)),
        }
    }
}

impl Remote {
    /// Sends a result: its objects, its trees, then its record. What is there and right, by `check`, is not sent again.
    ///
    /// `observe` is called from several threads.
    ///
    /// # Errors
    /// Fails where the remote cannot be reached or refuses, or the local store lacks something of the result or holds
    /// something damaged, which is then not sent.
    pub fn push(
        &self,
        store: &Store,
        record: &ResultRecord,
        how: Pushing,
        check: Check,
        observe: impl Fn(TransferProgress) + Send + Sync + 'static,
    ) -> Result<Pushed, RemoteError> {
        let shared = self.shared();
        let key = record.key.result_key();
        let trees = record.outputs.values().map(|output| store.tree(&output.tree)).collect::<Result<Vec<_>, _>>()?;
        self.wait(async {
            match how {
                Pushing::Send => shared.mark().await?,
                Pushing::DryRun => shared.check_marker().await?,
            }
            let name = shared.record(&key);
            let believed = match check {
                _ if shared.has_refused(&name, &trees) => Believed::Nothing,
                Check::Length => Believed::ByLength,
                Check::Content => Believed::ByContent,
            };
            let (result, mode) = shared.found(&key, record, store, check).await?.answer();
            if result == PushedAs::OtherKept {
                return Ok(Pushed { result, files: 0, bytes: 0 });
            }
            let files: BTreeMap<Digest, TreeFile> =
                trees.iter().flat_map(|tree| tree.files()).map(|file| (file.digest, file.clone())).collect();
            let lacking = shared.lacking(files.into_values(), believed).await?;
            let (files, bytes) = (lacking.len() as u64, lacking.iter().map(|(file, _)| file.size).sum());
            if how == Pushing::Send {
                shared.send_objects(store, lacking, bytes, Arc::new(observe)).await?;
                shared.send_trees(&trees, believed).await?;
                if let Some(mode) = mode {
                    shared.write(&name, record::to_bytes(record), mode).await?;
                }
                shared.accept(&name);
            }
            Ok(Pushed { result, files, bytes })
        })
    }
}

impl Shared {
    /// Whether something of a result was refused: its record, a tree, an object; or a fetch of it ended so, whatever
    /// has become of that thing since.
    fn has_refused(&self, record: &Name, trees: &[Tree]) -> bool {
        let is_refused = |tree: &Tree| {
            self.is_refused(&self.tree(&tree.digest()))
                || tree.files().iter().any(|file| self.is_refused(&self.object(&file.digest)))
        };
        self.is_refused(record) || trees.iter().any(is_refused)
    }

    async fn found(
        &self,
        key: &Digest,
        ours: &ResultRecord,
        store: &Store,
        check: Check,
    ) -> Result<RemoteRecord, RemoteError> {
        let Some(bytes) = self.read(&self.record(key)).await? else { return Ok(RemoteRecord::Nothing) };
        let theirs = match Stored::read(&bytes, key) {
            Stored::Damaged => return Ok(RemoteRecord::Damaged),
            Stored::Foreign => return Ok(RemoteRecord::Other),
            Stored::Sound(theirs) => theirs,
        };
        // Without a check, nothing but this machine's record of the same files tells what it said.
        if check == Check::Content && !Stored::has_check(&bytes) && has_files_of(&theirs, ours) {
            return Ok(RemoteRecord::Damaged);
        }
        if theirs.outputs == ours.outputs {
            return Ok(RemoteRecord::Same);
        }
        Ok(if self.is_whole(&theirs, store).await? { RemoteRecord::Other } else { RemoteRecord::Broken })
    }

    /// Whether everything that a record names is there, by its length.
    async fn is_whole(self: &Shared, record: &ResultRecord, store: &Store) -> Result<bool, RemoteError> {
        for output in record.outputs.values() {
            let tree = match self.fetch_tree(store, &output.tree).await {
                Err(RemoteError::Refused { .. } | RemoteError::Missing { .. }) => return Ok(false),
                tree => tree?,
            };
            for file in tree.files() {
                let name = self.object(&file.digest);
                if self.is_refused(&name) || self.size(&name).await? != Some(file.size) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The files that are not there, or not as they should be, and how each is to be written.
    async fn lacking(
        self: &Arc<Self>,
        files: impl Iterator<Item = TreeFile>,
        believed: Believed,
    ) -> Result<Vec<(TreeFile, PutMode)>, RemoteError> {
        let mut tasks = JoinSet::new();
        for file in files {
            let shared = Arc::clone(self);
            tasks.spawn(async move {
                let mode = match shared.size(&shared.object(&file.digest)).await? {
                    None => Some(PutMode::Create),
                    Some(size) if size != file.size || believed == Believed::Nothing => Some(PutMode::Overwrite),
                    Some(_) => None,
                };
                Ok((file, mode))
            });
        }
        let (mut lacking, mut there) = (Vec::new(), Vec::new());
        while let Some((file, mode)) = join_one(&mut tasks).await? {
            match mode {
                Some(mode) => lacking.push((file, mode)),
                None => there.push(file),
            }
        }
        if believed == Believed::ByContent {
            lacking.extend(self.damaged(there).await?.into_iter().map(|file| (file, PutMode::Overwrite)));
        }
        lacking.sort_by_key(|(file, _)| file.digest);
        Ok(lacking)
    }

    /// Those of some files whose content is not what their names say.
    async fn damaged(self: &Arc<Self>, files: Vec<TreeFile>) -> Result<Vec<TreeFile>, RemoteError> {
        let damaged = Arc::new(Mutex::new(Vec::new()));
        let read = |file: TreeFile| {
            let (shared, damaged) = (Arc::clone(self), Arc::clone(&damaged));
            async move {
                if !shared.is_sound(&file).await? {
                    damaged.lock().expect("nobody fails while they add a file").push(file);
                }
                Ok(())
            }
        };
        several(files.into_iter().map(read)).await?;
        let mut damaged = damaged.lock().expect("nobody fails while they add a file");
        Ok(std::mem::take(&mut *damaged))
    }

    async fn send_objects(
        self: &Arc<Self>,
        store: &Store,
        files: Vec<(TreeFile, PutMode)>,
        total: u64,
        observe: Arc<dyn Fn(TransferProgress) + Send + Sync>,
    ) -> Result<(), RemoteError> {
        let done = Arc::new(AtomicU64::new(0));
        let send = |(file, mode): (TreeFile, PutMode)| {
            let (shared, store) = (Arc::clone(self), store.clone());
            let (done, observe) = (Arc::clone(&done), Arc::clone(&observe));
            async move {
                let moved = |bytes: u64| {
                    let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                    observe(TransferProgress { done, total });
                };
                shared.send_object(&store.place(&file.digest), &file, mode, &moved).await
            }
        };
        several(files.into_iter().map(send)).await
    }

    async fn send_object(
        &self,
        place: &Place,
        file: &TreeFile,
        mode: PutMode,
        moved: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), RemoteError> {
        let name = self.object(&file.digest);
        let mut source = block_in_place(|| place.open(&file.digest))?;
        if file.size <= PART {
            let content = block_in_place(|| read_part(&mut source, file.size)).map_err(cannot_read(place, file))?;
            if Digest::of(&content) != file.digest {
                return Err(place.differs(&file.digest).into());
            }
            self.write(&name, content, mode).await?;
            moved(file.size);
        } else {
            // Parts cannot be written on condition. Two that send the same bytes under the name of those bytes do no
            // harm.
            let upload = self.store().put_multipart(&name).await.map_err(|error| self.unwritten(&error))?;
            self.send_parts(upload, &mut source, place, file, moved).await?;
        }
        self.accept(&name);
        Ok(())
    }

    /// Sends a file in parts. It gets its name when all are there, and only if they are what its digest says.
    async fn send_parts(
        &self,
        mut upload: Box<dyn MultipartUpload>,
        source: &mut File,
        place: &Place,
        file: &TreeFile,
        moved: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), RemoteError> {
        let sent = self.send_each_part(&mut *upload, source, place, file, moved).await;
        if let Err(error) = sent {
            // What stays behind if this fails, or we are killed, is for the bucket's own rule about unfinished uploads.
            let _ = upload.abort().await;
            return Err(error);
        }
        upload.complete().await.map(drop).map_err(|error| self.unwritten(&error))
    }

    async fn send_each_part(
        &self,
        upload: &mut dyn MultipartUpload,
        source: &mut File,
        place: &Place,
        file: &TreeFile,
        moved: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), RemoteError> {
        let part_size = PART.max(file.size.div_ceil(MOST_PARTS));
        let mut hasher = blake3::Hasher::new();
        let mut parts: JoinSet<Result<u64, object_store::Error>> = JoinSet::new();
        let arrived = |joined: Result<Result<u64, object_store::Error>, tokio::task::JoinError>| {
            let bytes = joined.map_err(object_store::Error::from).flatten().map_err(|error| self.unwritten(&error))?;
            moved(bytes);
            Ok::<_, RemoteError>(())
        };
        let mut left = file.size;
        while left > 0 {
            let size = left.min(part_size);
            let content = block_in_place(|| {
                let content = read_part(source, size)?;
                hasher.update_rayon(&content);
                Ok(content)
            });
            let content: Vec<u8> = content.map_err(cannot_read(place, file))?;
            if parts.len() == PARALLEL_PARTS
                && let Some(joined) = parts.join_next().await
            {
                arrived(joined)?;
            }
            let part = upload.put_part(content.into());
            parts.spawn(async move { part.await.map(|()| size) });
            left -= size;
        }
        while let Some(joined) = parts.join_next().await {
            arrived(joined)?;
        }
        if Digest::from(hasher.finalize()) == file.digest { Ok(()) } else { Err(place.differs(&file.digest).into()) }
    }

    async fn send_trees(self: &Arc<Self>, trees: &[Tree], believed: Believed) -> Result<(), RemoteError> {
        for tree in trees {
            let (name, json) = (self.tree(&tree.digest()), tree.to_json());
            let is_right = match believed {
                Believed::ByLength => self.size(&name).await?.map(|size| size == json.len() as u64),
                Believed::ByContent => match self.read(&name).await {
                    Err(RemoteError::Refused { .. }) => Some(false),
                    found => found?.map(|found| found == json),
                },
                Believed::Nothing => self.size(&name).await?.map(|_| false),
            };
            let mode = match is_right {
                Some(true) => continue,
                Some(false) => PutMode::Overwrite,
                None => PutMode::Create,
            };
            self.write(&name, json, mode).await?;
            self.accept(&name);
        }
        Ok(())
    }
}

/// Whether two results of one key hold the same files.
fn has_files_of(one: &ResultRecord, other: &ResultRecord) -> bool {
    let trees =
        |record: &ResultRecord| record.outputs.iter().map(|(name, output)| (name.clone(), output.tree)).collect();
    let (one, other): (Vec<_>, Vec<_>) = (trees(one), trees(other));
    one == other
}

/// The error for a file that ends early, or cannot be read.
fn cannot_read(place: &Place, file: &TreeFile) -> impl FnOnce(io::Error) -> StoreError {
    move |error| match error.kind() {
        io::ErrorKind::UnexpectedEof => place.differs(&file.digest),
        _ => StoreError::io("read", place.path(), error),
    }
}

/// The next `size` bytes of a file.
fn read_part(source: &mut File, size: u64) -> io::Result<Vec<u8>> {
    let size = usize::try_from(size).map_err(io::Error::other)?;
    let mut part = vec![0; size];
    source.read_exact(&mut part)?;
    Ok(part)
}
