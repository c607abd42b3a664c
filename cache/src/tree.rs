//! Trees: folders as lists of files.

use std::collections::BTreeSet;
use std::fs::{self, DirEntry};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::digest::describe;
use crate::{Digest, FinishedFiles, Hasher, StoreError};

/// Version of a tree's form on disk.
pub const TREE_VERSION: u32 = 1;

/// A folder: its files, sorted by path. Folders without files are not kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Tree {
    version: u32,
    files: Vec<TreeFile>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeFile {
    /// Path below the folder, with `/` between names.
    pub path: String,
    /// Digest of the content.
    pub digest: Digest,
    /// Length in bytes.
    pub size: u64,
    /// Whether the owner may execute it.
    pub executable: bool,
}

impl Tree {
    /// Reads and hashes a folder, without storing anything.
    ///
    /// # Errors
    /// Fails where something in it is no regular file or folder, has a name that is not UTF-8, or cannot be read.
    pub fn of_folder(folder: &Path) -> Result<Self, StoreError> {
        Self::of_finished(folder, &FinishedFiles::default())
    }

    /// As [`Tree::of_folder`], where some of the files have been hashed.
    ///
    /// # Errors
    /// As [`Tree::of_folder`].
    pub fn of_finished(folder: &Path, finished: &FinishedFiles) -> Result<Self, StoreError> {
        let (mut found, mut bytes) = (Vec::new(), 0);
        collect(folder, "", finished, &mut found, &mut bytes)?;
        let is_small = is_small(found.len(), bytes);
        let hash = |(path, place): (String, PathBuf)| hash(path, &place, finished);
        let files: Result<Vec<_>, StoreError> =
            if is_small { found.into_iter().map(hash).collect() } else { found.into_par_iter().map(hash).collect() };
        let mut files = files?;
        files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(Self { version: TREE_VERSION, files })
    }

    /// Hashes one more file of the same folder (or one that changed since) into the tree; `path` is relative to it.
    ///
    /// # Errors
    /// As [`Tree::of_folder`].
    pub fn add_file(&mut self, folder: &Path, path: &str) -> Result<(), StoreError> {
        check_path(path).map_err(|reason| StoreError::BadName { name: path.to_owned(), reason })?;
        let place = folder.join(path);
        check_regular(&place, &fs::symlink_metadata(&place).map_err(StoreError::on("read", &place))?)?;
        let file = hash(path.to_owned(), &place, &FinishedFiles::default())?;
        match self.find(path) {
            Ok(index) => self.files[index] = file,
            Err(index) => self.files.insert(index, file),
        }
        Ok(())
    }

    /// The files, sorted by path.
    pub fn files(&self) -> &[TreeFile] {
        &self.files
    }

    pub fn get(&self, path: &str) -> Option<&TreeFile> {
        self.find(path).ok().map(|index| &self.files[index])
    }

    /// The tree without the file at a path.
    #[must_use]
    pub fn without(mut self, path: &str) -> Self {
        if let Ok(index) = self.find(path) {
            self.files.remove(index);
        }
        self
    }

    /// The tree with another content of the file at a path; as it is where there is no such file.
    #[must_use]
    pub fn with_content(mut self, path: &str, content: &[u8]) -> Self {
        if let Ok(index) = self.find(path) {
            let file = &mut self.files[index];
            (file.digest, file.size) = (Digest::of(content), content.len() as u64);
        }
        self
    }

    /// The length of all files together.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// The name under which the tree is stored: covers version, paths, contents, sizes and executable bits.
    pub fn digest(&self) -> Digest {
        let mut hasher = Hasher::new();
        hasher.value(b"tree").value(&self.version.to_le_bytes());
        for file in &self.files {
            hasher
                .value(file.path.as_bytes())
                .value(file.digest.as_bytes())
                .value(&file.size.to_le_bytes())
                .value(&[u8::from(file.executable)]);
        }
        hasher.finish()
    }

    /// The digest of paths, contents and executable bits: the identity of an artefact that is a folder of files.
    pub fn identity(&self) -> Digest {
        let mut hasher = Hasher::new();
        hasher.value(b"files");
        for file in &self.files {
            // No path is empty. Where nothing is executable, this is the digest of the (path, content) pairs.
            if file.executable {
                hasher.value(b"");
            }
            hasher.value(file.path.as_bytes()).value(file.digest.as_bytes());
        }
        hasher.finish()
    }

    /// The folders that hold files, as paths below the tree's own, each after the one that holds it.
    pub(crate) fn folders(&self) -> BTreeSet<&str> {
        self.files.iter().flat_map(|file| ancestors(&file.path)).collect()
    }

    /// The form on disk.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("a tree is made of strings and numbers")
    }

    fn find(&self, path: &str) -> Result<usize, usize> {
        self.files.binary_search_by(|file| file.path.as_str().cmp(path))
    }
}

/// A tree as it is read, before anything in it is believed: a path in it must not lead out of a folder.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    version: u32,
    files: Vec<TreeFile>,
}

impl TryFrom<Unchecked> for Tree {
    type Error = String;

    fn try_from(Unchecked { version, files }: Unchecked) -> Result<Self, String> {
        if version != TREE_VERSION {
            return Err(format!("version {version}, where {TREE_VERSION} is known"));
        }
        if let Some(pair) = files.windows(2).find(|pair| pair[0].path >= pair[1].path) {
            return Err(format!("`{}` and `{}` are not in order", pair[0].path, pair[1].path));
        }
        let tree = Self { version, files };
        for file in &tree.files {
            check_path(&file.path).map_err(|reason| format!("path `{}`: {reason}", file.path))?;
            if let Some(folder) = ancestors(&file.path).find(|folder| tree.get(folder).is_some()) {
                return Err(format!("`{folder}` is both a file and a folder"));
            }
        }
        Ok(tree)
    }
}

/// The folders on the way to a path: `a`, `a/b` for `a/b/c`.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(end, _)| &path[..end])
}

fn check_path(path: &str) -> Result<(), &'static str> {
    match () {
        () if path.contains('\0') => Err("it has a zero byte"),
        () if path.starts_with('/') => Err("it is absolute"),
        () if path.split('/').any(|name| matches!(name, "" | "." | "..")) => Err("it has an empty part, `.` or `..`"),
        () => Ok(()),
    }
}

/// Whether files are read sooner than threads are started for it: a process that stores little starts none.
pub(crate) fn is_small(files: usize, bytes: u64) -> bool {
    files <= 16 && bytes <= 1 << 20
}

/// Adds the regular files below a folder, and their lengths; `prefix` is the folder's own path, empty or ending in `/`.
fn collect(
    folder: &Path,
    prefix: &str,
    finished: &FinishedFiles,
    found: &mut Vec<(String, PathBuf)>,
    bytes: &mut u64,
) -> Result<(), StoreError> {
    for entry in fs::read_dir(folder).map_err(StoreError::on("list", folder))? {
        let entry = entry.map_err(StoreError::on("list", folder))?;
        let (path, place) = (format!("{prefix}{}", utf8_name(&entry)?), entry.path());
        let metadata = entry.metadata().map_err(StoreError::on("read", &place))?;
        if metadata.is_dir() {
            collect(&place, &format!("{path}/"), finished, found, bytes)?;
        } else {
            if !finished.is_outside(&place) {
                check_regular(&place, &metadata)?;
            }
            *bytes += metadata.len();
            found.push((path, place));
        }
    }
    Ok(())
}

fn utf8_name(entry: &DirEntry) -> Result<String, StoreError> {
    entry.file_name().into_string().map_err(|name| StoreError::BadName {
        name: entry.path().with_file_name(name).to_string_lossy().into_owned(),
        reason: "it is not UTF-8",
    })
}

/// A link would lead out of the store, and a second name of the file would let others write to it afterwards.
fn check_regular(place: &Path, metadata: &fs::Metadata) -> Result<(), StoreError> {
    let found = match () {
        () if !metadata.is_file() => describe(metadata.file_type()),
        () if metadata.nlink() > 1 => "file with several names (hard links)",
        () => return Ok(()),
    };
    Err(StoreError::NotAFile { path: place.to_owned(), found })
}

fn hash(path: String, place: &Path, finished: &FinishedFiles) -> Result<TreeFile, StoreError> {
    let mode = fs::metadata(place).map_err(StoreError::on("read", place))?.permissions().mode();
    let (digest, size) = finished.known_or_read(place)?;
    // The tree is the one of a copy, whose mode would be that of a new file.
    let executable = mode & 0o100 != 0 && !finished.is_outside(place);
    Ok(TreeFile { path, digest, size, executable })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let place = folder.path().join(path);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, content).unwrap();
        }
        folder
    }

    fn tree(files: &[(&str, &str)]) -> Tree {
        Tree::of_folder(folder(files).path()).unwrap()
    }

    fn read(json: serde_json::Value) -> Result<Tree, String> {
        serde_json::from_value(json).map_err(|error| error.to_string())
    }

    fn file(path: &str) -> serde_json::Value {
        serde_json::json!({ "path": path, "digest": Digest::of(b""), "size": 0, "executable": false })
    }

    #[test]
    fn a_tree_lists_files_sorted_and_survives_its_form_on_disk() {
        let tree = tree(&[("b", "2"), ("a/c", "3"), ("a-b", "1"), ("a/b/d", "4")]);
        let paths: Vec<_> = tree.files().iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["a-b", "a/b/d", "a/c", "b"]);
        assert_eq!(tree.folders().into_iter().collect::<Vec<_>>(), ["a", "a/b"]);
        assert_eq!(tree.get("a/c").unwrap().digest, Digest::of(b"3"));
        assert_eq!(tree.get("a"), None);
        assert_eq!(tree.clone().without("a"), tree);
        assert_eq!(tree.clone().without("a/c").bytes(), 3);
        assert_eq!(tree.bytes(), 4);
        assert_eq!(serde_json::from_slice::<Tree>(&tree.to_json()).unwrap(), tree);
    }

    #[test]
    fn the_digest_covers_paths_contents_and_executable_bits() {
        let base = folder(&[("a", "1"), ("b", "2")]);
        let tree_of = |folder: &tempfile::TempDir| Tree::of_folder(folder.path()).unwrap();
        let before = tree_of(&base);
        assert_eq!(before.digest(), tree(&[("b", "2"), ("a", "1")]).digest());
        assert_ne!(before.digest(), tree(&[("a", "2"), ("b", "1")]).digest());
        assert_ne!(before.digest(), tree(&[("a", "1"), ("c", "2")]).digest());
        fs::set_permissions(base.path().join("a"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_ne!(before.digest(), tree_of(&base).digest());
        assert_ne!(before.identity(), tree_of(&base).identity());
        fs::set_permissions(base.path().join("a"), fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(before.identity(), tree_of(&base).identity());
    }

    #[test]
    fn the_identity_of_files_that_nobody_executes_is_that_of_paths_and_contents() {
        let mut pairs = Hasher::new();
        pairs.value(b"files");
        for (path, content) in [("a", "1"), ("b", "2")] {
            pairs.value(path.as_bytes()).value(Digest::of(content.as_bytes()).as_bytes());
        }
        assert_eq!(tree(&[("a", "1"), ("b", "2")]).identity(), pairs.finish());
    }

    #[test]
    fn a_file_added_later_gives_the_tree_of_the_whole_folder() {
        let folder = folder(&[("b", "2"), ("c", "3")]);
        let mut tree = Tree::of_folder(folder.path()).unwrap();
        for (path, content) in [("a", "1"), ("c", "changed"), ("d", "4")] {
            fs::write(folder.path().join(path), content).unwrap();
            tree.add_file(folder.path(), path).unwrap();
        }
        assert_eq!(tree, Tree::of_folder(folder.path()).unwrap());
        assert!(matches!(tree.add_file(folder.path(), "../a"), Err(StoreError::BadName { .. })));
        assert!(matches!(tree.add_file(folder.path(), "absent"), Err(StoreError::Io { .. })));
    }

    #[test]
    fn only_regular_files_with_one_name_and_utf8_names_are_taken() {
        let refused = |make: &dyn Fn(&Path)| {
            let folder = folder(&[("sub/file", "")]);
            make(&folder.path().join("sub"));
            Tree::of_folder(folder.path()).unwrap_err().to_string()
        };
        let message = refused(&|sub| symlink("/etc/passwd", sub.join("link")).unwrap());
        assert!(message.contains("sub/link` is a symbolic link"), "{message}");
        let message = refused(&|sub| nix::unistd::mkfifo(&sub.join("p"), nix::sys::stat::Mode::S_IRWXU).unwrap());
        assert!(message.contains("sub/p` is a named pipe"), "{message}");
        let message = refused(&|sub| drop(std::os::unix::net::UnixListener::bind(sub.join("s")).unwrap()));
        assert!(message.contains("sub/s` is a socket"), "{message}");
        let message = refused(&|sub| fs::hard_link(sub.join("file"), sub.join("other")).unwrap());
        assert!(message.contains("is a file with several names"), "{message}");
        let message = refused(&|sub| fs::write(sub.join(OsStr::from_bytes(b"\xff")), "").unwrap());
        assert!(message.contains("it is not UTF-8"), "{message}");
    }

    #[test]
    fn a_list_that_leads_out_of_its_folder_or_contradicts_itself_is_refused() {
        let with = |files: &[&str]| {
            let files: Vec<_> = files.iter().map(|path| file(path)).collect();
            read(serde_json::json!({ "version": 1, "files": files }))
        };
        assert!(with(&["a", "a-b", "b/c"]).is_ok());
        for path in ["", "/etc/passwd", "..", "../a", "a/../b", "a//b", "a/", "./a", "a\0b"] {
            assert!(with(&[path]).is_err(), "{path:?}");
        }
        assert!(with(&["b", "a"]).unwrap_err().contains("not in order"));
        assert!(with(&["a", "a"]).unwrap_err().contains("not in order"));
        assert!(with(&["a", "a-b", "a/b"]).unwrap_err().contains("both a file and a folder"));
        assert!(read(serde_json::json!({ "version": 2, "files": [] })).unwrap_err().contains("version 2"));
    }
}
