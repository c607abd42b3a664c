//! The store: objects, trees, results and working state below one folder.
//!
//! ```text
//! objects/ab/cdef…     file contents by digest, read-only
//! outside/ab/cdef…     where the content of an object is that is not in the store
//! trees/ab/cdef…       folders: sorted (path, digest, size, executable)
//! results/<key>.json   key → outputs, and how they came about
//! partial/<key>/       a stage's resumable working state
//! reuse/<family>.json  which pieces the newest results of a stage were made of
//! staging/             outputs in the making
//! users/               one locked file per process that works with the store by itself
//! locks/               one file per lock
//! ```
//!
//! Whatever has a final name was complete and flushed before it got it, so a process that is killed, or a machine that
//! loses power, leaves nothing half-written. Any number of processes may use one store at a time.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use crate::atomic::{ensure_folder, flush_folder, flush_together, parent, unique_name, write_flushed};
use crate::entry::{Entry, ensure_own_folder, make_own_folder, put_entry, read_entry, remove_entry};
use crate::in_use::{self, Closed, Gate, Passage, User};
use crate::outside::is_whole;
use crate::{Digest, FinishedFiles, Lock, Place, Staging, StoreError, Tree, TreeFile, lock};

/// The store's own folders.
const FOLDERS: [&str; 7] = ["objects", "trees", "results", "partial", "staging", "users", "locks"];

/// How far a stored folder is checked before it is handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// Every file is read and compared with its digest.
    Contents,
    /// Every file is there and has its length; what is in it is taken as it is.
    None,
}

/// A store, in use by this process until the last clone is dropped (see [`crate::in_use`]). Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store {
    opened: Arc<Opened>,
}

#[derive(Debug)]
struct Opened {
    root: PathBuf,
    gate: Gate,
    /// Where files are written that have no name yet, made with the first of them.
    private: Mutex<Option<Staging>>,
    access: Access,
}

/// What a process is to the store that it has opened.
#[derive(Debug)]
enum Access {
    User(User),
    /// It works for a user, whose lock it has inherited, and writes into a private folder of that one.
    Helper {
        private: PathBuf,
        /// As [`User::mode`].
        mode: u32,
    },
    /// It may not write: it can only look.
    Onlooker,
}

impl Access {
    fn user(&self) -> Option<&User> {
        match self {
            Self::User(user) => Some(user),
            Self::Helper { .. } | Self::Onlooker => None,
        }
    }
}

/// A file that has no name in the store yet; it is gone when this is dropped.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // Most often it has been renamed.
        let _ = fs::remove_file(&self.0);
    }
}

impl Store {
    /// Opens a store, made if it is not there yet, and sweeps up after processes that died.
    ///
    /// # Errors
    /// Fails where a folder cannot be made.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(StoreError::on("create folder", &root))?;
        // Links into the store must hold wherever they are.
        let root = root.canonicalize().map_err(StoreError::on("open", &root))?;
        make_folders(&root)?;
        lock::sweep(&root.join("staging"))?;
        in_use::sweep(&root.join("users"))?;
        let user = User::register(&root.join("users"))?;
        Ok(Self::opened(root, Access::User(user)))
    }

    /// Opens a store for a process that works for one that has it open, in a private folder of that one, and has
    /// inherited its [`Store::descriptors`]: nothing is made or swept up once more.
    ///
    /// # Errors
    /// Fails where the store or the folder is not there.
    pub fn join(root: &Path, private: &Path) -> Result<Self, StoreError> {
        let root = root.canonicalize().map_err(StoreError::on("open", root))?;
        let lock = private.with_extension("lock");
        let mode = fs::metadata(&lock).map_err(StoreError::on("read", &lock))?.permissions().mode();
        Ok(Self::opened(root, Access::Helper { private: private.to_owned(), mode }))
    }

    /// Opens a store to look at it, if it is there. Nothing is made or swept up, so this works on a read-only file
    /// system and on a full one. Where it can, this process becomes a user all the same, so that what it looks at
    /// is not removed meanwhile.
    ///
    /// # Errors
    /// Fails where the folder is there and cannot be looked at.
    pub fn look(root: impl AsRef<Path>) -> Result<Option<Self>, StoreError> {
        let root = match root.as_ref().canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found.map_err(StoreError::on("open", root.as_ref()))?,
        };
        // Made last: a store without it is one that a full disk kept from being made.
        if !root.join("locks").is_dir() {
            return Ok(None);
        }
        let user = User::register(&root.join("users"));
        Ok(Some(Self::opened(root, user.map_or(Access::Onlooker, Access::User))))
    }

    /// As [`Store::look`]; a store that is not there yet is made.
    ///
    /// # Errors
    /// As [`Store::look`] and [`Store::open`].
    pub fn look_or_open(root: impl AsRef<Path>) -> Result<Self, StoreError> {
        match Self::look(&root)? {
            Some(store) => Ok(store),
            None => Self::open(root.as_ref()),
        }
    }

    /// Makes what is missing of the store's own folders.
    pub(crate) fn ensure_folders(&self) -> Result<(), StoreError> {
        make_folders(self.root())
    }

    fn opened(root: PathBuf, access: Access) -> Self {
        let gate = Gate::new(root.join("locks").join("gate"));
        Self { opened: Arc::new(Opened { root, gate, private: Mutex::default(), access }) }
    }

    /// What a process inherits that works in a private folder of this one ([`Store::join`]): the locks that say that
    /// the folder, and what it stores, are somebody's, also when this process is gone.
    pub fn descriptors(&self, folder: &Staging) -> Vec<RawFd> {
        let user = self.opened.access.user().map(|user| user.lock().as_raw_fd());
        user.into_iter().chain([folder.lock().as_raw_fd()]).collect()
    }

    /// The store's folder, absolute.
    pub fn root(&self) -> &Path {
        &self.opened.root
    }

    /// A new private folder on the store's file system.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn staging(&self) -> Result<Staging, StoreError> {
        Staging::create(&self.folder("staging"))
    }

    /// A new private folder for links to what is looked at: in the store, or among the temporary files where the store
    /// cannot be written to.
    ///
    /// # Errors
    /// Fails where neither can be.
    pub fn staging_to_look(&self) -> Result<Staging, StoreError> {
        self.staging().or_else(|_| Staging::create(&std::env::temp_dir()))
    }

    /// Moves every file of a folder into the store and gives the digest of the tree; the files are gone from `folder`.
    ///
    /// `folder` must be on the store's file system, as [`Store::staging`] does, and nobody may write to it any more.
    ///
    /// # Errors
    /// As [`Tree::of_folder`] and [`Store::add_tree`].
    pub fn add_folder(&self, folder: &Path) -> Result<Digest, StoreError> {
        self.add_tree(folder, &Tree::of_folder(folder)?)
    }

    /// As [`Store::add_folder`], for a folder that has been hashed already and not been touched since.
    ///
    /// # Errors
    /// Fails where a file is no longer what was hashed or the disk refuses. Files stored by then stay, unused.
    pub fn add_tree(&self, folder: &Path, tree: &Tree) -> Result<Digest, StoreError> {
        self.add_finished(folder, tree, &FinishedFiles::default())
    }

    /// As [`Store::add_tree`], where some of the files stay outside, which the store has notes of.
    ///
    /// # Errors
    /// As there.
    pub fn add_finished(&self, folder: &Path, tree: &Tree, finished: &FinishedFiles) -> Result<Digest, StoreError> {
        let moved = tree.files().iter().map(|file| (file, folder.join(&file.path)));
        let moved: Vec<_> = moved.filter(|(_, source)| !finished.is_outside(source)).collect();
        let places: Vec<_> = moved.iter().map(|(file, _)| self.object_path(&file.digest)).collect();
        let list = self.tree_path(&tree.digest());
        let shards: BTreeSet<_> = places.iter().chain([&list]).map(|place| parent(place)).collect();
        let mut changed = Vec::new();
        for shard in shards {
            if make_own_folder(shard)? {
                changed.push(parent(shard));
            }
            changed.push(shard);
        }
        changed.sort_unstable();
        changed.dedup();
        let temporary = self.temporary()?;
        let mut contents = vec![temporary.0.clone()];
        fs::write(&contents[0], tree.to_json()).map_err(StoreError::on("write", &contents[0]))?;
        let mode = self.mode();
        for (file, source) in &moved {
            protect(source, file, mode)?;
            contents.push(source.clone());
        }
        // Contents, then names: without the first, a loss of power leaves zeros under a valid digest. The result is
        // recorded by the caller, when both are on the disk.
        flush_together(&contents)?;
        self.move_in(&moved, &places)?;
        let passage = self.pass()?;
        put_entry(&contents[0], &list)?;
        drop(passage);
        flush_together(&changed)?;
        Ok(tree.digest())
    }

    /// Moves one file that has been compared with its digest into the store.
    ///
    /// # Errors
    /// As [`Store::add_tree`].
    pub fn adopt_object(&self, source: &Path, file: &TreeFile) -> Result<(), StoreError> {
        make_ready(source, file, self.mode())?;
        self.name_object(source, file)
    }

    /// Gives a file that is what an object is its name.
    pub(crate) fn name_object(&self, source: &Path, file: &TreeFile) -> Result<(), StoreError> {
        let place = self.object_path(&file.digest);
        ensure_own_folder(parent(&place))?;
        let passage = self.pass()?;
        put_entry(source, &place)?;
        drop(passage);
        flush_folder(parent(&place))
    }

    /// Whether an object is there, read and compared with its digest; from then on it is in use (see
    /// [`crate::in_use`]), so that who finds it need not bring it once more.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn hold_object(&self, file: &TreeFile) -> Result<bool, StoreError> {
        if self.check(file, Verify::Contents).is_ok() { self.touch_object(file) } else { Ok(false) }
    }

    /// Sets the change time of an object, which is what says that it is in use; whether it is there.
    fn touch_object(&self, file: &TreeFile) -> Result<bool, StoreError> {
        let _passage = self.pass()?;
        if !self.has(file) {
            return Ok(false);
        }
        let place = match self.place(&file.digest) {
            Place::Inside(object) => object,
            Place::Outside(_) => self.note_path(&file.digest),
        };
        // The mode that it has, so that nothing but the time changes.
        let touched = fs::symlink_metadata(&place).and_then(|found| fs::set_permissions(&place, found.permissions()));
        touched.map_err(StoreError::on("protect", &place))?;
        Ok(true)
    }

    /// Whether a tree is there with all its objects, by their lengths; from then on these are in use, whatever becomes
    /// of the result that they belong to.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn hold_tree(&self, tree: &Digest) -> Result<bool, StoreError> {
        let Ok(tree) = self.tree(tree) else { return Ok(false) };
        for file in tree.files() {
            if !self.touch_object(file)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Stores the list of a tree whose objects are all there, and in use since: stored by this process, or held by it.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn adopt_tree(&self, tree: &Tree) -> Result<(), StoreError> {
        self.publish(&self.tree_path(&tree.digest()), &tree.to_json())
    }

    /// A stored tree, checked against its digest.
    ///
    /// # Errors
    /// Fails with [`StoreError::MissingTree`] or [`StoreError::CorruptTree`].
    pub fn tree(&self, digest: &Digest) -> Result<Tree, StoreError> {
        let path = self.tree_path(digest);
        let corrupt = |reason| StoreError::CorruptTree { digest: *digest, path: path.clone(), reason };
        let bytes = match read_entry(&path)? {
            Entry::None => return Err(StoreError::MissingTree { digest: *digest, path }),
            Entry::Other(found) => return Err(corrupt(format!("it is a {found}"))),
            Entry::File(bytes) => bytes,
        };
        let tree: Tree = serde_json::from_slice(&bytes).map_err(|error| corrupt(error.to_string()))?;
        if tree.digest() != *digest {
            return Err(corrupt(format!("it has digest {}", tree.digest().short())));
        }
        Ok(tree)
    }

    /// Where an object lies that is in the store, or would lie: who reads it asks [`Store::place`].
    pub(crate) fn object_path(&self, digest: &Digest) -> PathBuf {
        self.sharded("objects", digest)
    }

    /// Where an object lies below a store's folder.
    pub fn place_of_object(digest: &Digest) -> PathBuf {
        sharded("objects", digest)
    }

    /// Whether a tree and each of its objects are there, with the right sizes. Reads no content.
    pub fn complete(&self, tree: &Digest) -> bool {
        self.tree(tree).is_ok_and(|tree| tree.files().iter().all(|file| self.has(file)))
    }

    /// Removes an object that turned out to be damaged, so that its producer runs again.
    ///
    /// # Errors
    /// Fails where it cannot be removed; one that is gone already is no error.
    pub fn evict(&self, object: &Digest) -> Result<(), StoreError> {
        remove_entry(&self.object_path(object)).map(drop)
    }

    /// The folder for the resumable working state of a key, made if it is not there. Who saves a state in it flushes
    /// the way to it.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn partial(&self, working_key: &Digest) -> Result<PathBuf, StoreError> {
        let folder = self.folder("partial").join(working_key.to_string());
        // By a link, what is done with working state would be done with files outside the store.
        if folder.is_symlink() {
            remove_entry(&folder)?;
        }
        make_own_folder(&folder)?;
        Ok(folder)
    }

    /// Removes the folder for the working state of a key if nothing was left there. The caller holds the key's lock.
    pub fn remove_partial_if_empty(&self, working_key: &Digest) {
        // One with something in it stays, and an empty one is in nobody's way.
        let _ = fs::remove_dir(self.folder("partial").join(working_key.to_string()));
    }

    /// Takes a lock, waiting for as long as another holds it. A wait that must end early polls [`Store::try_lock`].
    ///
    /// # Errors
    /// Fails where the name is not made of letters, digits, `.`, `_` and `-`, or the file system has no locks.
    pub fn lock(&self, name: &str) -> Result<Lock, StoreError> {
        Lock::take(&self.lock_path(name)?)
    }

    /// Takes a lock if nobody holds it.
    ///
    /// # Errors
    /// As [`Store::lock`].
    pub fn try_lock(&self, name: &str) -> Result<Option<Lock>, StoreError> {
        Lock::try_take(&self.lock_path(name)?)
    }

    /// Keeps garbage from being collected until the passage is dropped. To be held for a moment only: by who takes many
    /// results, of which each would be a passage of its own.
    ///
    /// # Errors
    /// Fails where the lock does.
    pub fn pass(&self) -> Result<Passage<'_>, StoreError> {
        self.opened.gate.pass()
    }

    /// Keeps others from passing until the result is dropped.
    pub(crate) fn close_gate(&self) -> Result<Closed, StoreError> {
        self.opened.gate.close()
    }

    /// Since when other processes use the store; `None` where none does.
    pub(crate) fn in_use_since(&self) -> Result<Option<SystemTime>, StoreError> {
        in_use::in_use_since(&self.folder("users"), self.opened.access.user())
    }

    /// When this process became a user, by the clock of the store's file system; `None` where it can only look.
    pub(crate) fn user_since(&self) -> Option<SystemTime> {
        self.opened.access.user().map(User::since)
    }

    /// The mode of an object that this process stores: nobody writes to it, and those read it whom the process lets
    /// read what it makes.
    fn mode(&self) -> u32 {
        let mode = match &self.opened.access {
            Access::User(user) => user.mode(),
            Access::Helper { mode, .. } => *mode,
            Access::Onlooker => 0,
        };
        0o400 | 0o444 & mode
    }

    /// One of the store's own folders.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// A name in staging for a file that is to have another: what a killed process leaves there is swept up. One folder
    /// for all of them, since to make and remove one costs more than the file.
    fn temporary(&self) -> Result<Temporary, StoreError> {
        if let Access::Helper { private, .. } = &self.opened.access {
            return Ok(Temporary(private.join(unique_name())));
        }
        let mut private = self.opened.private.lock().unwrap_or_else(PoisonError::into_inner);
        // Somebody may have tidied up.
        let folder = match private.take().filter(|folder| folder.path().is_dir()) {
            Some(folder) => folder,
            None => self.staging()?,
        };
        let temporary = Temporary(folder.path().join(unique_name()));
        *private = Some(folder);
        Ok(temporary)
    }

    /// Writes a file of the store under its final name. Its temporary one is in staging, so that what a killed
    /// process leaves is swept up.
    pub(crate) fn publish(&self, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        ensure_own_folder(parent(path))?;
        let temporary = self.temporary()?;
        write_flushed(&temporary.0, bytes)?;
        let passage = self.pass()?;
        put_entry(&temporary.0, path)?;
        drop(passage);
        flush_folder(parent(path))
    }

    /// Gives files, each with where it is, their places, over whatever is there: what was just hashed is known to be
    /// sound, and the new file's time says that it is in use. Who has the old file open keeps reading that.
    fn move_in(&self, files: &[(&TreeFile, PathBuf)], places: &[PathBuf]) -> Result<(), StoreError> {
        let _passage = self.pass()?;
        let mut moved = BTreeSet::new();
        for ((file, source), place) in files.iter().zip(places) {
            if moved.insert(file.digest) {
                put_entry(source, place)?;
            } else {
                fs::remove_file(source).map_err(StoreError::on("remove", source))?;
            }
        }
        Ok(())
    }

    pub(crate) fn tree_path(&self, digest: &Digest) -> PathBuf {
        self.sharded("trees", digest)
    }

    pub(crate) fn sharded(&self, name: &str, digest: &Digest) -> PathBuf {
        self.root().join(sharded(name, digest))
    }

    pub(crate) fn lock_path(&self, name: &str) -> Result<PathBuf, StoreError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || name.starts_with('.') || !name.chars().all(allowed) {
            let reason = "a lock's name is made of letters, digits, `.`, `_` and `-`";
            return Err(StoreError::BadName { name: name.to_owned(), reason });
        }
        Ok(self.folder("locks").join(name))
    }
}

fn sharded(name: &str, digest: &Digest) -> PathBuf {
    let digest = digest.to_string();
    let (shard, rest) = digest.split_at(2);
    [name, shard, rest].iter().collect()
}

fn make_folders(root: &Path) -> Result<(), StoreError> {
    FOLDERS.iter().try_for_each(|name| ensure_folder(&root.join(name)))
}

/// Makes a hashed file what an object is: read-only and flushed.
fn make_ready(source: &Path, file: &TreeFile, mode: u32) -> Result<(), StoreError> {
    protect(source, file, mode)?;
    // Without this, a loss of power after the rename leaves zeros under a valid digest.
    File::open(source).and_then(|file| file.sync_all()).map_err(StoreError::on("flush", source))
}

/// Makes a hashed file read-only.
fn protect(source: &Path, file: &TreeFile, mode: u32) -> Result<(), StoreError> {
    if !is_whole(source, file.size) {
        return Err(StoreError::ChangedWhileStoring { path: source.to_owned() });
    }
    fs::set_permissions(source, Permissions::from_mode(mode)).map_err(StoreError::on("protect", source))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::thread;

    use super::*;
    use crate::KeyDocument;
    use crate::testing::{add, damage, fill, read_all, store};

    #[test]
    fn a_folder_is_stored_once_whatever_its_files_share() {
        let (_home, store) = store();
        let staging = store.staging().unwrap();
        fill(staging.path(), &[("a", "same"), ("sub/b", "same"), ("sub/c", "other"), ("empty", "")]);
        let digest = store.add_folder(staging.path()).unwrap();
        assert!(store.complete(&digest));
        let tree = store.tree(&digest).unwrap();
        assert_eq!(tree.files().len(), 4);
        assert_eq!(fs::read_to_string(store.object_path(&Digest::of(b"same"))).unwrap(), "same");
        let mode = fs::metadata(store.object_path(&Digest::of(b"other"))).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o444);
        assert_eq!(store.list().unwrap().objects, 3);

        let again = store.staging().unwrap();
        fill(again.path(), &[("a", "same"), ("sub/b", "same"), ("sub/c", "other"), ("empty", "")]);
        assert_eq!(store.add_folder(again.path()).unwrap(), digest);
        assert_eq!(store.list().unwrap().objects, 3);
    }

    #[test]
    fn an_empty_folder_can_be_stored() {
        let (_home, store) = store();
        let digest = store.add_folder(store.staging().unwrap().path()).unwrap();
        assert!(store.complete(&digest));
        assert_eq!(store.tree(&digest).unwrap().files(), []);
    }

    #[test]
    fn eight_writers_of_the_same_content_all_succeed() {
        let (home, store) = store();
        let files: Vec<_> = (0..40).map(|i| (format!("file-{i}"), format!("content {}", i / 2))).collect();
        let files: Vec<_> = files.iter().map(|(path, content)| (path.as_str(), content.as_str())).collect();
        let digests: Vec<_> = thread::scope(|scope| {
            let write = || {
                let store = Store::open(home.path().join("store")).unwrap();
                let staging = store.staging().unwrap();
                fill(staging.path(), &files);
                store.add_folder(staging.path()).unwrap()
            };
            let writers: Vec<_> = (0..8).map(|_| scope.spawn(write)).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        assert!(digests.iter().all(|digest| *digest == digests[0]));
        assert!(store.complete(&digests[0]));
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
        assert_eq!(fs::read_dir(store.folder("staging")).unwrap().count(), 0);
    }

    #[test]
    fn what_is_missing_or_cut_short_is_incomplete_and_healed_by_storing_it_again() {
        let (_home, store) = store();
        let add = || {
            let staging = store.staging().unwrap();
            fill(staging.path(), &[("a", "first"), ("b", "second")]);
            store.add_folder(staging.path()).unwrap()
        };
        let digest = add();
        let object = store.object_path(&Digest::of(b"first"));
        let damages: [&dyn Fn(); 4] = [
            &|| store.evict(&Digest::of(b"first")).unwrap(),
            &|| {
                fs::remove_file(&object).unwrap();
                fs::write(&object, "fir").unwrap();
            },
            &|| fs::remove_file(store.tree_path(&digest)).unwrap(),
            &|| fs::write(store.tree_path(&digest), "{").unwrap(),
        ];
        for (number, damage) in damages.into_iter().enumerate() {
            damage();
            assert!(!store.complete(&digest), "damage {number}");
            assert_eq!(add(), digest);
            assert!(store.complete(&digest), "damage {number}");
            assert_eq!(fs::read_to_string(&object).unwrap(), "first");
        }
        store.evict(&Digest::of(b"never stored")).unwrap();
    }

    #[test]
    fn damage_that_no_length_shows_does_not_survive_the_producer() {
        let (_home, store) = store();
        let files = [("a", "first"), ("b", "second"), ("again", "second")];
        let digest = add(&store, &files);
        damage(&store, b"second", b"sfcond");
        assert!(store.complete(&digest));
        assert_eq!(add(&store, &files), digest);
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
    }

    #[test]
    fn objects_can_be_brought_one_by_one() {
        let (_home, store) = store();
        let staging = store.staging().unwrap();
        fill(staging.path(), &[("a", "first"), ("b", "second")]);
        let tree = Tree::of_folder(staging.path()).unwrap();
        for file in tree.files() {
            assert!(!store.hold_object(file).unwrap());
            store.adopt_object(&staging.path().join(&file.path), file).unwrap();
            let changed = |metadata: fs::Metadata| (metadata.ctime(), metadata.ctime_nsec());
            let before = changed(fs::metadata(store.object_path(&file.digest)).unwrap());
            thread::sleep(std::time::Duration::from_millis(20));
            assert!(store.hold_object(file).unwrap());
            assert!(changed(fs::metadata(store.object_path(&file.digest)).unwrap()) > before);
        }
        store.adopt_tree(&tree).unwrap();
        assert!(store.complete(&tree.digest()));
    }

    #[test]
    fn looking_makes_nothing() {
        let home = tempfile::tempdir().unwrap();
        assert!(Store::look(home.path().join("store")).unwrap().is_none());
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
        let digest = add(&Store::open(home.path().join("store")).unwrap(), &[("a", "first")]);
        let store = Store::look(home.path().join("store")).unwrap().unwrap();
        assert!(store.complete(&digest) && store.user_since().is_some());
    }

    #[test]
    fn every_flipped_bit_of_a_tree_is_noticed() {
        let (_home, store) = store();
        let staging = store.staging().unwrap();
        fill(staging.path(), &[("a", "first")]);
        let digest = store.add_folder(staging.path()).unwrap();
        let path = store.tree_path(&digest);
        let sound = fs::read(&path).unwrap();
        let expected = store.tree(&digest).unwrap();
        for position in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[position] ^= 1;
            fs::write(&path, bytes).unwrap();
            match store.tree(&digest) {
                Err(StoreError::CorruptTree { .. }) => {}
                // A line break that became another white space, which says the same.
                other => assert_eq!(other.unwrap(), expected, "byte {position}"),
            }
        }
        for length in 0..sound.len() {
            fs::write(&path, &sound[..length]).unwrap();
            assert!(matches!(store.tree(&digest), Err(StoreError::CorruptTree { .. })), "length {length}");
        }
        fs::remove_file(&path).unwrap();
        assert!(matches!(store.tree(&digest), Err(StoreError::MissingTree { .. })));
    }

    #[test]
    fn a_file_that_changed_since_it_was_hashed_is_refused() {
        let (_home, store) = store();
        let staging = store.staging().unwrap();
        fill(staging.path(), &[("a", "first")]);
        let tree = Tree::of_folder(staging.path()).unwrap();
        fs::write(staging.path().join("a"), "longer than before").unwrap();
        let error = store.add_tree(staging.path(), &tree).unwrap_err();
        assert!(matches!(error, StoreError::ChangedWhileStoring { .. }), "{error}");
        assert!(!store.complete(&tree.digest()));
    }

    #[test]
    fn opening_sweeps_up_after_the_dead_and_spares_the_living() {
        let (home, store) = store();
        let alive = store.staging().unwrap();
        fill(&store.folder("staging").join("1-dead-0"), &[("half/written", "con")]);
        fs::write(store.folder("staging").join("1-dead-0.lock"), "").unwrap();
        let reopened = Store::open(home.path().join("store")).unwrap();
        assert!(alive.path().exists());
        assert!(!reopened.folder("staging").join("1-dead-0").exists());
        drop(alive);
        assert_eq!(fs::read_dir(store.folder("staging")).unwrap().count(), 0);
    }

    #[test]
    fn locks_have_names_and_one_holder() {
        let (_home, store) = store();
        let held = store.lock("result-ab12").unwrap();
        assert!(store.try_lock("result-ab12").unwrap().is_none());
        assert!(store.try_lock("result-ab13").unwrap().is_some());
        drop(held);
        for name in ["", ".", "..", "../lock", "a/b", "a b"] {
            assert!(matches!(store.lock(name), Err(StoreError::BadName { .. })), "{name}");
        }
    }

    #[test]
    fn working_state_stays_where_it_was_left() {
        let (_home, store) = store();
        let key = KeyDocument::default().working_key();
        store.partial(&key).unwrap();
        store.remove_partial_if_empty(&key);
        assert_eq!(store.list().unwrap().partials, 0);
        fs::write(store.partial(&key).unwrap().join("state.json"), "{}").unwrap();
        store.remove_partial_if_empty(&key);
        // A link that was put in its place is not followed.
        let (elsewhere, linked) = (tempfile::tempdir().unwrap(), Digest::of(b"linked"));
        symlink(elsewhere.path(), store.folder("partial").join(linked.to_string())).unwrap();
        assert!(!store.partial(&linked).unwrap().is_symlink());
        assert!(elsewhere.path().is_dir());
        assert_eq!(read_all(&store.partial(&key).unwrap()), [("state.json".to_owned(), "{}".to_owned())]);
    }
}
