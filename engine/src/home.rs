//! The home: the folder that holds the store and the records of runs, and where it is.
//!
//! It leaves to others: what the store holds inside (`cache`), and the content of the run records ([`crate::history`]).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::disk::Disk;
use nix::sys::stat::{Mode, umask};

/// The folder's name beside a project.
pub const FOLDER: &str = ".pipeline";

/// How a tag begins that tells programs that everything here can be made again (<https://bford.info/cachedir/>).
pub(crate) const CACHEDIR_SIGNATURE: &str = "Signature: 8a477f597d28d172789f06886806bc55";

/// The tag's name.
const TAG: &str = "CACHEDIR.TAG";

/// What keeps the home out of git.
const IGNORE: &str = ".gitignore";

const STORE: &str = "store";
const RUNS: &str = "runs";
const JOBS: &str = "jobs";
const UNSENT: &str = "unsent";
const METADATA: &str = "metadata";
const INDEX: &str = "runs.sqlite";
const STAT_CACHE: &str = "files.json";
const PUBLISHED_FILES: &str = "published.json";

/// What may be in a home before its tag is: a start that was cut off has left it.
const PARTS: [&str; 10] = [STORE, RUNS, JOBS, UNSENT, METADATA, INDEX, STAT_CACHE, PUBLISHED_FILES, IGNORE, TAG];

/// What is in a folder that somebody made for a home: to keep it in git, as a disk of its own, by a file manager.
const OF_EMPTY_FOLDERS: [&str; 4] = [".gitkeep", ".keep", "lost+found", ".DS_Store"];

/// What the tag says to people.
const CACHEDIR_TAG: &str = "\n\
    # Results of `pipeline`, all of which it can make again. See https://bford.info/cachedir/\n";

/// An opened home.
#[derive(Debug, Clone)]
pub struct Home {
    root: PathBuf,
    project: PathBuf,
}

/// Why a home cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// The folder or a file in it could not be written.
    #[error("cannot prepare the home `{path}`")]
    Prepare {
        /// The path at fault.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Neither records nor jobs could hold its path.
    #[error("the path of the home `{path}` is not UTF-8")]
    NotUtf8 {
        /// The path at fault.
        path: PathBuf,
    },
    /// A folder of the user, which a home would hide from git and from backups.
    #[error("`{path}` is no home of results: it has files of its own, such as `{found}`")]
    NotAHome {
        /// The folder.
        path: PathBuf,
        /// One of them.
        found: String,
    },
}

impl Home {
    /// Finds the home of a pipeline file and prepares it. `explicit` (`--home`, else `$PIPELINE_HOME`) is taken as it
    /// is; else it is `.pipeline/` in the nearest folder above the file that has one, else in the nearest that has
    /// `.git`, else beside the file.
    ///
    /// # Errors
    /// Fails where the folder cannot be written, its path is not UTF-8, or it holds what is no part of a home.
    pub fn open(pipeline_file: &Path, explicit: Option<&Path>) -> Result<Self, HomeError> {
        let home = Self::at(pipeline_file, explicit);
        if home.root.to_str().is_none() {
            return Err(HomeError::NotUtf8 { path: home.root });
        }
        if let Some(found) = home.foreign() {
            return Err(HomeError::NotAHome { path: home.root, found });
        }
        home.prepare().map_err(|(path, source)| HomeError::Prepare { path, source })?;
        Ok(home)
    }

    /// The home that [`Home::open`] would open, where it is there already. To look at it makes none: a home made in
    /// passing, in `/` or a user's folder, would become that of every pipeline below.
    pub fn existing(pipeline_file: &Path, explicit: Option<&Path>) -> Option<Self> {
        let home = Self::at(pipeline_file, explicit);
        home.root.is_dir().then_some(home)
    }

    /// The home that [`Home::open`] would open, there or not, for one who only looks: nothing is made.
    pub fn at(pipeline_file: &Path, explicit: Option<&Path>) -> Self {
        let project = project(pipeline_file);
        let root = explicit.map_or_else(|| project.join(FOLDER), absolute);
        Self { root, project }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder, where it is not the one that the pipeline file has by itself.
    pub(crate) fn elsewhere(&self) -> Option<&Path> {
        (self.root != self.project.join(FOLDER)).then_some(self.root.as_path())
    }

    /// What to do when the disk is full that a path is on. `told` is what has been said about it.
    pub fn advice_when_full(&self, path: &Path, told: &[String]) -> String {
        let full = if Disk::holds_both(path, &self.store()) { FullDisk::OfStore } else { FullDisk::Another };
        advice_when_full(path, full, told)
    }

    /// What to do when a disk was full for a stage. The messages of its failure, `told`, say which it was, unless that
    /// is known to its own program alone.
    pub fn advice_when_full_for_a_stage(&self, told: &[String]) -> String {
        match told.iter().find_map(|message| Disk::told_in(message)) {
            Some(mounted_on) => self.advice_when_full(mounted_on, told),
            None => advice_when_full(&self.store(), FullDisk::Unknown, told),
        }
    }

    /// Bytes that its file system has left for this user; `None` where the system does not say.
    pub fn free_bytes(&self) -> Option<u64> {
        // One that is not there yet will be on the file system of what is above it.
        let there = self.root.ancestors().find(|folder| folder.exists())?;
        let status = nix::sys::statvfs::statvfs(there).ok()?;
        Some(status.blocks_available() * status.fragment_size())
    }

    /// The store's folder.
    pub fn store(&self) -> PathBuf {
        self.root.join(STORE)
    }

    /// Where each run has a folder of its own.
    pub fn runs(&self) -> PathBuf {
        self.root.join(RUNS)
    }

    /// The folder of one run.
    pub fn run(&self, id: &str) -> PathBuf {
        self.runs().join(id)
    }

    /// Which jobs of a cluster make which results.
    pub fn jobs(&self) -> PathBuf {
        self.root.join(JOBS)
    }

    /// A file for each run of which something is still to be sent to a tracker, under the run's id.
    pub fn unsent(&self) -> PathBuf {
        self.root.join(UNSENT)
    }

    /// The index over runs.
    pub fn index(&self) -> PathBuf {
        self.root.join(INDEX)
    }

    /// What servers said about what is pinned, before it was fetched.
    pub fn metadata(&self) -> PathBuf {
        self.root.join(METADATA)
    }

    /// What is known about source files by their times.
    pub fn stat_cache(&self) -> PathBuf {
        self.root.join(STAT_CACHE)
    }

    /// What is known about published files by their times.
    pub fn published_files(&self) -> PathBuf {
        self.root.join(PUBLISHED_FILES)
    }

    /// The pins of mutable references: a file of the project, to be kept in git, so it is next to the default home even
    /// when the home itself is elsewhere.
    pub fn lock_file(&self) -> PathBuf {
        self.project.join("pipeline.lock")
    }

    /// Something in the folder that no home holds, where the folder has not been made a home.
    fn foreign(&self) -> Option<String> {
        if self.is_made() {
            return None;
        }
        // A folder that cannot be listed cannot be prepared either, which says why.
        let entries = fs::read_dir(&self.root).ok()?.filter_map(Result::ok);
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let foreign = names.filter(|name| !is_of_a_home(name)).min()?;
        // Another process may have made it one since, and put more into it.
        (!self.is_made()).then_some(foreign)
    }

    /// Whether the folder has been made a home. One that has not is not written to by who only looks.
    pub(crate) fn is_made(&self) -> bool {
        self.root.join(TAG).is_file()
    }

    fn prepare(&self) -> Result<(), (PathBuf, io::Error)> {
        if self.is_made() {
            return Ok(());
        }
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| (path, source)
        };
        for folder in [self.store(), self.runs()] {
            fs::create_dir_all(&folder).map_err(at(&folder))?;
        }
        let ignore = self.root.join(IGNORE);
        if !fs::symlink_metadata(&ignore).is_ok_and(|found| found.is_file() && found.len() > 0) {
            put(&ignore, "*\n").map_err(at(&ignore))?;
        }
        // The tag goes last: where it is, the rest is.
        let tag = self.root.join(TAG);
        put(&tag, &format!("{CACHEDIR_SIGNATURE}{CACHEDIR_TAG}")).map_err(at(&tag))
    }
}

/// Whether something that is called so may be in a home that is being made. A file is written under a name of its own
/// first (`.files.json.x.tmp`), and the index has files beside it (`runs.sqlite-wal`).
fn is_of_a_home(name: &str) -> bool {
    let unfinished = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
    PARTS.contains(&name)
        || OF_EMPTY_FOLDERS.contains(&name)
        || name.strip_prefix(INDEX).is_some_and(|rest| rest.starts_with('-'))
        || unfinished.is_some_and(|name| PARTS.iter().any(|part| name.starts_with(part)))
}

/// Writes a file of the home, in the place of a link or a pipe that somebody put there.
fn put(path: &Path, text: &str) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        fs::remove_file(path)?;
    }
    fs::write(path, text)
}

/// Under a mask that lets everybody write (`umask 000`), which nobody chooses, lets only the owner write to what this
/// process makes: who could write to a record or a folder of the store could make results up. Any other mask holds as
/// it is. To be called before any thread is started; what this process starts has the mask too.
pub fn keep_from_others() {
    let before = umask(Mode::S_IWGRP | Mode::S_IWOTH);
    if before.contains(Mode::S_IWOTH) {
        umask(before);
    } else {
        umask(before | Mode::S_IWGRP | Mode::S_IWOTH);
    }
}

/// Which disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FullDisk {
    /// That of the store, on which garbage collection makes room.
    OfStore,
    /// One on which that helps nobody.
    Another,
    /// One of these two.
    Unknown,
}

/// What to do when the disk is full that a path is on. The room that it has left is said once, so not where one of the
/// messages that were `told` has it.
pub fn advice_when_full(path: &Path, full: FullDisk, told: &[String]) -> String {
    let disk = Disk::of(path);
    let is_told = told.iter().any(|message| Disk::told_in(message).is_some());
    let room = if is_told { String::new() } else { disk.to_string() };
    let remedy = match full {
        FullDisk::OfStore => {
            "`pipeline cache du` shows what the store uses, and `pipeline cache gc` frees space".to_owned()
        }
        FullDisk::Another => {
            format!("make room on the disk at `{}`", disk.mounted_on.as_deref().unwrap_or(path).display())
        }
        FullDisk::Unknown => {
            "`pipeline cache du` shows what the store uses, and `pipeline cache gc` frees space if the disk of the store is full"
                .to_owned()
        }
    };
    format!("{remedy}{room}; then run again, what was saved is kept")
}

/// Whether a path is in a home, whosever it is.
pub fn is_in_a_home(path: &Path) -> bool {
    path.ancestors().any(|folder| folder.join(STORE).is_dir() && folder.join(TAG).is_file())
}

/// The folder in which `.pipeline/` belongs.
fn project(pipeline_file: &Path) -> PathBuf {
    let file = absolute(pipeline_file);
    let beside = file.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
    let above = |name: &str| beside.ancestors().find(|folder| folder.join(name).exists()).map(Path::to_owned);
    above(FOLDER).or_else(|| above(".git")).unwrap_or(beside)
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lies_beside_the_file_then_at_the_repository_then_where_one_is() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b");
        fs::create_dir_all(&deep).unwrap();
        let file = deep.join("p.yaml");
        assert_eq!(project(&file), deep);
        fs::create_dir(folder.path().join(".git")).unwrap();
        assert_eq!(project(&file), folder.path());
        fs::create_dir(folder.path().join("a/.pipeline")).unwrap();
        assert_eq!(project(&file), folder.path().join("a"));
    }

    #[test]
    fn looking_for_a_home_makes_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("p.yaml");
        assert!(Home::existing(&file, None).is_none());
        assert!(Home::existing(&file, Some(&folder.path().join("elsewhere"))).is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let opened = Home::open(&file, None).unwrap();
        assert_eq!(Home::existing(&file, None).unwrap().root(), opened.root());
    }

    #[test]
    fn is_marked_as_a_cache_and_ignored_by_git() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::open(&folder.path().join("p.yaml"), None).unwrap();
        assert_eq!(home.root(), folder.path().join(".pipeline"));
        assert!(fs::read_to_string(home.root().join("CACHEDIR.TAG")).unwrap().starts_with("Signature: 8a477f"));
        assert_eq!(fs::read_to_string(home.root().join(".gitignore")).unwrap(), "*\n");
    }

    #[test]
    fn a_folder_of_the_user_is_no_home_and_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("p.yaml");
        let open = |home: &Path| Home::open(&file, Some(home));
        fs::write(folder.path().join(".gitignore"), "/target\n").unwrap();
        fs::write(&file, "").unwrap();
        let error = open(folder.path()).unwrap_err();
        assert!(matches!(&error, HomeError::NotAHome { found, .. } if found == "p.yaml"), "{error}");
        fs::remove_file(&file).unwrap();
        open(folder.path()).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join(".gitignore")).unwrap(), "/target\n");
        // What a start that was cut off has left is taken up, and a home may hold more than it was made with.
        let begun = folder.path().join("begun");
        fs::create_dir_all(begun.join("store")).unwrap();
        for left in [".gitkeep", ".DS_Store", "runs.sqlite-wal", ".files.json.1.tmp"] {
            fs::write(begun.join(left), "").unwrap();
        }
        open(&begun).unwrap();
        fs::write(begun.join("notes.txt"), "").unwrap();
        open(&begun).unwrap();
    }

    #[test]
    fn garbage_is_collected_where_the_disk_of_the_store_is_full_and_its_room_is_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::open(&folder.path().join("p.yaml"), None).unwrap();
        let advice = home.advice_when_full(&home.store().join("staging/x"), &[]);
        assert!(advice.contains("`pipeline cache gc`") && advice.contains(" KiB free)"), "{advice}");
        let told = ["no space left to write `x` (the disk at `/x` has 0 KiB free)".to_owned()];
        let advice = home.advice_when_full(home.root(), &told);
        assert!(advice.contains("`pipeline cache gc`") && !advice.contains("KiB free"), "{advice}");
        // A file system of its own.
        let advice = home.advice_when_full(Path::new("/proc/out"), &told);
        assert!(advice.starts_with("make room on the disk at `/proc`; ") && !advice.contains("gc"), "{advice}");
        assert!(is_in_a_home(&home.store().join("objects/ab")) && !is_in_a_home(&folder.path().join("out")));
    }

    #[test]
    fn garbage_is_not_collected_for_a_stage_that_tells_of_another_disk() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::open(&folder.path().join("p.yaml"), None).unwrap();
        let advice = |disk: &str| {
            let told = ["the stage failed".to_owned(), format!("no space left to write `x`{disk}")];
            home.advice_when_full_for_a_stage(&told)
        };
        let another = advice(" (the disk at `/proc` has 0 KiB free)");
        assert!(another.starts_with("make room on the disk at `/proc`; ") && !another.contains("gc"), "{another}");
        let of_store = advice(&Disk::of(home.root()).to_string());
        assert!(of_store.contains("`pipeline cache gc` frees space; "), "{of_store}");
        // What a program has written to `/tmp` is known to nobody here.
        let unknown = advice("");
        assert!(unknown.contains("frees space if the disk of the store is full (the disk at `"), "{unknown}");
    }

    #[test]
    fn pins_stay_with_the_project_when_the_home_is_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let home = Home::open(&folder.path().join("p.yaml"), Some(elsewhere.path())).unwrap();
        assert_eq!(home.root(), elsewhere.path());
        assert_eq!(home.lock_file(), folder.path().join("pipeline.lock"));
    }
}
