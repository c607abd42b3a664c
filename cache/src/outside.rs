//! Objects that are outside: files of the user whose content a result needs, and which the store has no copy of.
//!
//! The store has a *note* of each by its digest (`outside/ab/cdef…`): where the file is, and the attributes that it had
//! when its content had that digest. As long as it still has them it is taken for what it was, as every source file is
//! ([`crate::StatCache`]); else it is read. Nothing here writes to such a file, gives it another name or removes it. A
//! note that is lost makes a result incomplete, so that its stage runs again and notes the file anew.

use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::atomic::parent;
use crate::digest::open_regular;
use crate::entry::{Entry, checked, ensure_own_folder, is_absent, open_entry, read_entry, with_check};
use crate::stat_cache::Attributes;
use crate::{Digest, Store, StoreError, TreeFile, Verify};

/// The folder of the notes.
pub(crate) const NOTES: &str = "outside";

/// Version of a note's form on disk.
const VERSION: u32 = 1;

/// Where the content of an object is.
#[derive(Debug, Clone)]
pub enum Place {
    /// In the store, under this path; nothing is there where the store has no note of the object either.
    Inside(PathBuf),
    /// In a file of the user.
    Outside(OutsideFile),
}

impl Place {
    pub fn path(&self) -> &Path {
        match self {
            Self::Inside(path) => path,
            Self::Outside(file) => &file.path,
        }
    }

    /// Opens the file to read it.
    pub(crate) fn open(&self, digest: &Digest) -> Result<fs::File, StoreError> {
        match self {
            Self::Inside(path) => {
                open_entry(path).map_err(StoreError::on("open", path))?.map_err(|_| self.differs(digest))
            }
            Self::Outside(file) => open(&file.path).map_err(|how| file.error(digest, how)),
        }
    }

    /// The error for a content that does not have the object's digest.
    pub(crate) fn differs(&self, digest: &Digest) -> StoreError {
        match self {
            Self::Inside(path) => StoreError::CorruptObject { digest: *digest, path: path.clone() },
            Self::Outside(file) => file.error(digest, Difference::Content),
        }
    }
}

/// Where the content of an object is, with what is there.
enum Found {
    Inside(PathBuf, Metadata),
    Outside(OutsideFile),
    /// Nowhere; where it would be in the store, and why nothing could be found there.
    Nothing(PathBuf, io::Error),
}

/// A file of the user that an object is in, as the store's note of it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutsideFile {
    version: u32,
    /// Absolute, and the file itself: a link that leads to another file later makes no other content of this one.
    pub(crate) path: PathBuf,
    attributes: Attributes,
    /// When its content was read, before the first byte; in nanoseconds since 1970.
    read: u64,
}

/// How a file outside is not what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// Nothing is there.
    Gone,
    /// A link is there that leads to nothing.
    LeadsNowhere(PathBuf),
    /// Something else is there, in words.
    NotAFile(&'static str),
    /// It has another content.
    Content,
    /// It cannot be read, for a reason of the operating system.
    Unreadable(String),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("is not there any more"),
            Self::LeadsNowhere(target) => write!(f, "is a link to `{}`, where nothing is", target.display()),
            Self::NotAFile(found) => write!(f, "is a {found} now"),
            Self::Content => f.write_str("has another content now"),
            Self::Unreadable(reason) => write!(f, "cannot be read: {reason}"),
        }
    }
}

impl OutsideFile {
    /// Reads a file and makes sure that its content has a digest and a length.
    pub(crate) fn read(path: &Path, expected: (Digest, u64)) -> Result<Self, Difference> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut opened = open(path)?;
        let unreadable = |error: io::Error| Difference::Unreadable(error.to_string());
        let file = Self {
            version: VERSION,
            path: path.canonicalize().map_err(unreadable)?,
            attributes: Attributes::of(&opened.metadata().map_err(unreadable)?),
            read: u64::try_from(now.as_nanos()).unwrap_or(0),
        };
        let found = Digest::of_open_file(&mut opened).map_err(unreadable)?;
        if found == expected && file.is_unchanged() { Ok(file) } else { Err(Difference::Content) }
    }

    fn error(&self, digest: &Digest, how: Difference) -> StoreError {
        StoreError::Outside { digest: *digest, path: self.path.clone(), how }
    }

    /// Whether a regular file is there that has the attributes which were noted.
    fn is_unchanged(&self) -> bool {
        fs::metadata(&self.path)
            .is_ok_and(|found| found.is_file() && Attributes::of(&found).agree_with(&self.attributes))
    }

    /// Whether its attributes can stand for its content.
    fn is_settled(&self) -> bool {
        self.attributes.settled(SystemTime::UNIX_EPOCH + Duration::from_nanos(self.read))
    }

    pub(crate) fn size(&self) -> u64 {
        self.attributes.size()
    }
}

impl Store {
    /// Notes that a file of the user has the content of an object, which the store then needs no copy of. The file is
    /// read. Gives its own path, behind all links.
    ///
    /// # Errors
    /// Fails with [`StoreError::Outside`] where it has another content, and where the disk refuses.
    pub fn leave_outside(&self, path: &Path, object: (Digest, u64)) -> Result<PathBuf, StoreError> {
        let differs = |how| StoreError::Outside { digest: object.0, path: path.to_owned(), how };
        let file = OutsideFile::read(path, object).map_err(differs)?;
        self.note_outside(&object.0, &file)?;
        Ok(file.path)
    }

    pub(crate) fn note_outside(&self, digest: &Digest, file: &OutsideFile) -> Result<(), StoreError> {
        let reason = "it is not UTF-8";
        let note = serde_json::to_vec(file)
            .map_err(|_| StoreError::BadName { name: file.path.to_string_lossy().into_owned(), reason })?;
        let path = self.note_path(digest);
        ensure_own_folder(&self.folder(NOTES))?;
        ensure_own_folder(parent(&path))?;
        self.publish(&path, &with_check(&note))
    }

    /// Where the content of an object is: the one answer for all who read it.
    pub fn place(&self, digest: &Digest) -> Place {
        match self.find(digest) {
            Found::Inside(path, _) | Found::Nothing(path, _) => Place::Inside(path),
            Found::Outside(file) => Place::Outside(file),
        }
    }

    /// As [`Store::place`], with what is there.
    fn find(&self, digest: &Digest) -> Found {
        let inside = self.object_path(digest);
        match fs::symlink_metadata(&inside) {
            Ok(metadata) => Found::Inside(inside, metadata),
            Err(error) => {
                read_note(&self.note_path(digest)).map_or_else(|| Found::Nothing(inside, error), Found::Outside)
            }
        }
    }

    /// Whether a file of a tree is outside.
    pub fn is_outside(&self, file: &TreeFile) -> bool {
        matches!(self.place(&file.digest), Place::Outside(_))
    }

    /// Whether an object is there: in the store with its length, or outside with the attributes that were noted. Reads
    /// no content.
    pub fn has(&self, file: &TreeFile) -> bool {
        match self.find(&file.digest) {
            Found::Inside(_, found) => found.is_file() && found.len() == file.size,
            Found::Outside(outside) => outside.size() == file.size && outside.is_unchanged(),
            Found::Nothing(..) => false,
        }
    }

    /// Fails where an object is not what its digest and length say.
    ///
    /// # Errors
    /// [`StoreError::MissingObject`], [`StoreError::CorruptObject`], and of one that is outside
    /// [`StoreError::Outside`].
    pub fn check(&self, file: &TreeFile, verify: Verify) -> Result<(), StoreError> {
        let expected = (file.digest, file.size);
        let (path, found) = match self.find(&file.digest) {
            Found::Inside(path, found) => (path, found),
            Found::Outside(outside) => return self.check_outside(&outside, expected),
            Found::Nothing(path, error) if is_absent(&error) => {
                return Err(StoreError::MissingObject { digest: file.digest, path });
            }
            Found::Nothing(path, error) => return Err(StoreError::io("read", &path, error)),
        };
        let whole = found.is_file()
            && found.len() == file.size
            && match verify {
                Verify::Contents => Digest::of_file(&path)? == expected,
                Verify::None => true,
            };
        if whole { Ok(()) } else { Err(StoreError::CorruptObject { digest: file.digest, path }) }
    }

    fn check_outside(&self, file: &OutsideFile, expected: (Digest, u64)) -> Result<(), StoreError> {
        if file.size() == expected.1 && file.is_unchanged() && file.is_settled() {
            return Ok(());
        }
        let found = OutsideFile::read(&file.path, expected).map_err(|how| file.error(&expected.0, how))?;
        // A store that cannot be written to leaves the file to be read again.
        let _ = self.note_outside(&expected.0, &found);
        Ok(())
    }

    /// The files outside that objects are in which the store lacks, with the digests of those.
    pub(crate) fn outside_files(&self) -> Result<Vec<(Digest, OutsideFile)>, StoreError> {
        let notes = self.digest_files(NOTES)?.into_iter().filter_map(|note| note.digest);
        let outside = notes.filter_map(|digest| match self.place(&digest) {
            Place::Outside(file) => Some((digest, file)),
            Place::Inside(_) => None,
        });
        Ok(outside.collect())
    }

    pub(crate) fn note_path(&self, digest: &Digest) -> PathBuf {
        self.sharded(NOTES, digest)
    }
}

fn open(path: &Path) -> Result<fs::File, Difference> {
    open_regular(path).map_err(|error| match (error, fs::read_link(path)) {
        (StoreError::NotAFile { found, .. }, _) => Difference::NotAFile(found),
        (StoreError::Io { source, .. }, Ok(target)) if is_absent(&source) => Difference::LeadsNowhere(target),
        (StoreError::Io { source, .. }, Err(_)) if is_absent(&source) => Difference::Gone,
        (error, _) => Difference::Unreadable(error.into_io().to_string()),
    })
}

/// Reads a note; a damaged one, or one of another version, counts as none.
pub(crate) fn read_note(path: &Path) -> Option<OutsideFile> {
    let Ok(Entry::File(bytes)) = read_entry(path) else { return None };
    let file: OutsideFile = serde_json::from_slice(checked(&bytes)?).ok()?;
    (file.version == VERSION).then_some(file)
}

/// Whether a regular file of a length is there.
pub(crate) fn is_whole(path: &Path, size: u64) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == size)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;
    use crate::gc::{Policy, Removal};
    use crate::testing::{fill, instead, read_all, record_of, store};
    use crate::{FinishedFiles, OutputRecord, Tree};

    /// A file of a user's that was left alone for a while.
    fn write(path: &Path, content: &str) {
        fs::write(path, content).unwrap();
        let before = SystemTime::now() - Duration::from_secs(600);
        File::options().write(true).open(path).unwrap().set_times(FileTimes::new().set_modified(before)).unwrap();
    }

    fn object(content: &str) -> (Digest, u64) {
        (Digest::of(content.as_bytes()), content.len() as u64)
    }

    /// Stores a folder of one small file, and a large one that stays at a path.
    fn leave(store: &Store, path: &Path) -> Result<Tree, StoreError> {
        let content = fs::read(path).unwrap();
        let large = (Digest::of(&content), content.len() as u64);
        let staging = store.staging()?;
        fill(staging.path(), &[("small", "small"), ("sub/other", "other")]);
        let (link, mut finished) = (staging.path().join("sub/large"), FinishedFiles::default());
        symlink(store.leave_outside(path, large)?, &link).unwrap();
        finished.leave(&link, large)?;
        let tree = Tree::of_finished(staging.path(), &finished)?;
        assert_eq!(store.add_finished(staging.path(), &tree, &finished)?, tree.digest());
        Ok(tree)
    }

    fn output(tree: &Tree) -> OutputRecord {
        let (tree, identity) = (tree.digest(), tree.identity());
        OutputRecord { kind: "model".to_owned(), tree, identity, facts: serde_json::Map::new() }
    }

    #[test]
    fn a_file_that_stays_is_read_where_it_is() {
        let (home, store) = store();
        let path = home.path().join("large");
        write(&path, "large");
        // A mode that a copy would not have.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let tree = leave(&store, &path).unwrap();

        let copied = store.staging().unwrap();
        fill(copied.path(), &[("small", "small"), ("sub/large", "large"), ("sub/other", "other")]);
        assert_eq!(tree, Tree::of_folder(copied.path()).unwrap());
        assert!(store.complete(&tree.digest()));
        assert_eq!(store.list().unwrap().objects, 2);
        assert_eq!((store.list().unwrap().outside, store.list().unwrap().outside_bytes), (1, 5));

        let [links, copy, out] = ["links", "copy", "out"].map(|name| home.path().join(name));
        store.link_files(&tree, &links, Verify::Contents).unwrap();
        assert_eq!(fs::read_link(links.join("sub/large")).unwrap(), path.canonicalize().unwrap());
        store.copy_files_out(&tree, &copy).unwrap();
        store.link_files_out(&tree, &out).unwrap();
        assert!(fs::symlink_metadata(out.join("sub/large")).unwrap().is_file());
        assert!(fs::symlink_metadata(out.join("small")).unwrap().is_symlink());
        for folder in [links, copy.clone(), out] {
            assert_eq!(read_all(&folder), read_all(copied.path()));
        }
        fs::write(copy.join("sub/large"), "other").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "large");
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
    }

    #[test]
    fn attributes_stand_for_the_content_until_they_change() {
        let (home, store) = store();
        let path = home.path().join("large");
        write(&path, "large");
        std::thread::sleep(Duration::from_millis(2100));
        let tree = leave(&store, &path).unwrap();
        let file = tree.get("sub/large").unwrap();
        store.check(file, Verify::Contents).unwrap();
        // Nobody reads it as long as its attributes are those noted: here they are those of another content.
        let mut note = read_note(&store.note_path(&file.digest)).unwrap();
        write(&path, "LARGE");
        note.attributes = Attributes::of(&fs::metadata(&path).unwrap());
        note.read = u64::MAX / 2;
        store.note_outside(&file.digest, &note).unwrap();
        store.check(file, Verify::Contents).unwrap();

        // The same content with another time: incomplete at a glance, sound when read, and noted as it is now.
        write(&path, "large");
        assert!(!store.complete(&tree.digest()));
        store.check(file, Verify::None).unwrap();
        assert!(store.complete(&tree.digest()));
    }

    #[test]
    fn a_file_noted_just_after_it_was_written_is_read_again() {
        let (home, store) = store();
        let path = home.path().join("large");
        fs::write(&path, "large").unwrap();
        let tree = leave(&store, &path).unwrap();
        let file = tree.get("sub/large").unwrap();
        assert!(store.has(file));
        let attributes = read_note(&store.note_path(&file.digest)).unwrap().attributes;
        // Another content within one tick of the clock.
        fs::write(&path, "LARGE").unwrap();
        let mut note = read_note(&store.note_path(&file.digest)).unwrap();
        note.attributes = Attributes::of(&fs::metadata(&path).unwrap());
        assert_ne!(note.attributes, attributes);
        store.note_outside(&file.digest, &note).unwrap();
        assert!(matches!(
            store.check(file, Verify::Contents),
            Err(StoreError::Outside { how: Difference::Content, .. })
        ));
    }

    #[test]
    fn whatever_has_become_of_a_file_is_told_and_is_no_damage_of_the_store() {
        let (home, store) = store();
        let [path, aside] = ["large", "aside"].map(|name| home.path().join(name));
        write(&path, "large");
        let tree = leave(&store, &path).unwrap();
        let record = record_of("model", [("model".to_owned(), output(&tree))].into());
        let key = record.key.result_key();
        store.record(&key, &record).unwrap();
        let told = || {
            let target = home.path().join("target");
            let errors = [
                store.link_files(&tree, &target, Verify::Contents).unwrap_err(),
                store.copy_files_out(&tree, &target).unwrap_err(),
                store.link_files_out(&tree, &target).unwrap_err(),
            ];
            let _ = fs::remove_dir_all(&target);
            assert!(errors.iter().all(|error| error.object().is_none()));
            let [how, ..] = errors.map(|error| error.to_string());
            let faults = store.verify(&|_| {}).unwrap().faults;
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(!faults[0].is_damage() && faults[0].to_string().starts_with(&how), "{} {how}", faults[0]);
            assert_eq!(faults[0].results(), [key].into());
            store.repair(&faults).unwrap();
            assert!(store.take(&key).unwrap().is_none() && store.result(&key).unwrap().is_some());
            how
        };
        fs::rename(&path, &aside).unwrap();
        assert!(told().ends_with("which was left outside the store, is not there any more"));
        for make in instead() {
            make(&path);
            assert!(told().contains("which was left outside the store,"));
            crate::entry::remove_entry(&path).unwrap();
        }
        symlink("nowhere", &path).unwrap();
        assert!(told().ends_with("is a link to `nowhere`, where nothing is"));
        fs::remove_file(&path).unwrap();
        write(&path, "other");
        assert!(told().ends_with("has another content now"));
        assert!(matches!(store.leave_outside(&path, object("large")), Err(StoreError::Outside { .. })));

        // A folder that was moved, with a link in its old place.
        fs::remove_file(&path).unwrap();
        symlink(&aside, &path).unwrap();
        store.link_files(&tree, &home.path().join("links"), Verify::Contents).unwrap();
        assert!(store.take(&key).unwrap().is_some());
    }

    #[test]
    fn garbage_is_notes_and_never_files() {
        let (home, store) = store();
        let [needed, unneeded] = ["needed", "unneeded"].map(|name| home.path().join(name));
        write(&needed, "needed");
        write(&unneeded, "unneeded");
        let tree = leave(&store, &needed).unwrap();
        let record = record_of("model", [("model".to_owned(), output(&tree))].into());
        store.record(&record.key.result_key(), &record).unwrap();
        // What a process leaves that is killed between its note and its record.
        store.leave_outside(&unneeded, object("unneeded")).unwrap();
        let census = store.census().unwrap();
        assert_eq!((census.outside(), census.object_bytes()), ((1, 6), 10));
        drop(store);

        let store = Store::open(home.path().join("store")).unwrap();
        let policy = Policy { grace: Duration::ZERO, ..Policy::default() };
        let planned = store.collect_garbage(&policy, Removal::DryRun).unwrap();
        let removed = store.collect_garbage(&policy, Removal::Real).unwrap();
        assert_eq!((removed.objects, removed.freed_bytes), (1, 0));
        assert_eq!(planned, removed);
        assert!(read_note(&store.note_path(&object("unneeded").0)).is_none());
        assert!(store.take(&record.key.result_key()).unwrap().is_some());
        let all = store.remove_results(&[record.key.result_key()].into(), Removal::Real).unwrap();
        assert_eq!((all.objects, all.freed_bytes), (3, 10));
        assert_eq!(fs::read_to_string(&needed).unwrap(), "needed");
        assert_eq!(fs::read_to_string(&unneeded).unwrap(), "unneeded");
    }

    #[test]
    fn an_object_in_the_store_is_the_one_that_is_read() {
        let (home, store) = store();
        let path = home.path().join("large");
        write(&path, "large");
        let tree = leave(&store, &path).unwrap();
        crate::testing::add(&store, &[("large", "large")]);
        fs::remove_file(&path).unwrap();
        assert!(store.complete(&tree.digest()));
        assert!(!store.is_outside(tree.get("sub/large").unwrap()));
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
        assert_eq!(store.list().unwrap().outside, 0);
    }

    #[test]
    fn another_store_takes_the_note_over() {
        let (home, store) = store();
        let path = home.path().join("large");
        write(&path, "large");
        let tree = leave(&store, &path).unwrap();
        let other = Store::open(home.path().join("other")).unwrap();
        other.take_tree(&store, &tree).unwrap();
        assert!(other.complete(&tree.digest()) && other.is_outside(tree.get("sub/large").unwrap()));
        assert_eq!(fs::metadata(&path).unwrap().nlink(), 1);
    }

    #[test]
    fn every_flipped_bit_of_a_note_makes_it_none() {
        let (home, store) = store();
        let path = home.path().join("large");
        write(&path, "large");
        let tree = leave(&store, &path).unwrap();
        let file = tree.get("sub/large").unwrap();
        let note = store.note_path(&file.digest);
        let sound = fs::read(&note).unwrap();
        for position in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[position] ^= 1;
            fs::write(&note, bytes).unwrap();
            assert!(!store.has(file), "byte {position}");
        }
        assert!(matches!(store.check(file, Verify::Contents), Err(StoreError::MissingObject { .. })));
        store.leave_outside(&path, object("large")).unwrap();
        assert!(store.has(file));
    }
}
