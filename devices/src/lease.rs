//! Leases: which physical device is in use, by locks that the kernel holds.
//!
//! There is one file for each device, in a folder of the machine that all its users share: runs with different homes,
//! of different users, see the same devices. A lease is the lock on that file. It belongs to the open file, which the
//! process that computes inherits; so the device is free when the last process that has it is gone, however it went,
//! and no file with a process id in it can lie.
//!
//! A file stays when its device is free. What is in it says, for messages alone, who took the device last.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::libc;

/// The variable that names another folder for leases, such as one that a container shares with its host.
pub const LEASES_VARIABLE: &str = "PIPELINE_LEASES";

/// The places for lock files, with what their names begin with there; the first that can be used is taken. Each is the
/// same for every user of the machine; a folder below `$XDG_RUNTIME_DIR` or `$TMPDIR` would be another for each of
/// them. None is made here: whoever made it could remove what others lock in it.
const PLACES: [(&str, &str); 3] = [("/run/lock/pipeline", ""), ("/run/lock", "pipeline-"), ("/tmp", "pipeline-lease-")];

/// Writable for all, and only who made a file may remove it: the permissions of `/tmp`.
const SHARED: u32 = 0o1777;

/// What of the permissions lets others make files, and keeps them from removing those of others.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// The longest text about a holder that is believed.
const LONGEST_NOTE: u64 = 200;

/// Where the locks of a machine lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseFolder {
    path: PathBuf,
    /// What the names of lock files begin with: the folder may be for other things too.
    prefix: &'static str,
}

/// Some devices, all of them leased, until the last copy of each descriptor is closed.
#[derive(Debug)]
pub struct Lease(Vec<File>);

/// Whether a device is leased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseState {
    /// It is not.
    Free,
    /// It is, by whoever says so here.
    Held(Option<String>),
}

/// A lock file that the machine refuses.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} `{}`", .path.display())]
pub struct LeaseError {
    /// What was tried.
    pub action: &'static str,
    /// What it was tried on.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

impl LeaseFolder {
    /// That of this machine.
    ///
    /// # Errors
    /// Fails where none of the places can be written to.
    pub fn of_this_machine() -> Result<Self, LeaseError> {
        if let Some(named) = std::env::var_os(LEASES_VARIABLE).filter(|named| !named.is_empty()) {
            return Self::at(Path::new(&named));
        }
        let mut found = PLACES.iter().map(|(place, prefix)| Self::shared(Path::new(place), prefix));
        let first = found.next().expect("there are places");
        found.fold(first, Result::or)
    }

    /// One that the machine's owner has made for all users.
    fn shared(path: &Path, prefix: &'static str) -> Result<Self, LeaseError> {
        let found = look(path)?;
        let is_for_all = found.mode() & SHARED == SHARED;
        // Where root cannot be told from others, only what nobody else can have made is taken for its.
        let is_roots = if prefix.is_empty() { found.uid() == 0 } else { is_roots(&found) };
        if !is_for_all || !is_roots {
            return Err(on("keep leases in", path)(refusal("it is not root's and open to all (mode 1777)")));
        }
        Ok(Self { path: path.to_owned(), prefix })
    }

    /// One at a path, made if need be.
    ///
    /// # Errors
    /// Fails where it cannot be made, is none that this user can write to, or is one in which others could remove what
    /// is locked: another user's, or one without the sticky bit that others can write to.
    pub fn at(path: &Path) -> Result<Self, LeaseError> {
        match DirBuilder::new().mode(SHARED).create(path) {
            // The mask of this process has taken away what other users need.
            Ok(()) => fs::set_permissions(path, Permissions::from_mode(SHARED)).map_err(on("share", path))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(on("create", path)(error)),
        }
        let found = look(path)?;
        let own = nix::unistd::geteuid().as_raw();
        if found.uid() != own && !is_roots(&found) {
            let why = format!("it belongs to another user ({}), who could remove what is locked there", found.uid());
            return Err(on("keep leases in", path)(refusal(&why)));
        }
        if found.mode() & OTHERS_WRITE != 0 && found.mode() & STICKY == 0 {
            let why = "others could remove what is locked there: `chmod +t` it";
            return Err(on("keep leases in", path)(refusal(why)));
        }
        let writable = nix::unistd::access(path, nix::unistd::AccessFlags::W_OK | nix::unistd::AccessFlags::X_OK);
        writable.map_err(|error| on("keep leases in", path)(error.into()))?;
        Ok(Self { path: path.to_owned(), prefix: "" })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How a device is at this moment, by [`identity`](crate::Device::identity).
    ///
    /// # Errors
    /// Fails where its file cannot be opened.
    pub fn standing(&self, identity: &str) -> Result<LeaseState, LeaseError> {
        let path = self.file(identity);
        let file = match open_existing(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(LeaseState::Free),
            opened => opened.map_err(on("open", &path))?,
        };
        // Several may ask at the same time; one that takes it at this very moment tries again later.
        match file.try_lock_shared() {
            Ok(()) => Ok(LeaseState::Free),
            Err(TryLockError::WouldBlock) => Ok(LeaseState::Held(note(file))),
            Err(TryLockError::Error(error)) => Err(on("lock", &path)(error)),
        }
    }

    /// Takes all of these devices, or none: `None` where one is taken. `holder` says for whom.
    ///
    /// They are tried in ascending order, so that of two who want some of the same devices one gets them.
    ///
    /// # Errors
    /// Fails where a file cannot be made, opened or locked.
    pub fn try_take(&self, identities: &[String], holder: &str) -> Result<Option<Lease>, LeaseError> {
        let mut ascending: Vec<&String> = identities.iter().collect();
        ascending.sort();
        let mut taken = Vec::with_capacity(ascending.len());
        for identity in ascending {
            let path = self.file(identity);
            let mut file = open(&path)?;
            match file.try_lock() {
                // It was removed meanwhile, and another may have been made: that one counts.
                Ok(()) if !is_at(&file, &path) => return Ok(None),
                Ok(()) => {
                    // Where the file is somebody else's the note may be refused; the lock is what counts.
                    let _ = sign(&mut file, holder);
                    taken.push(file);
                }
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(on("lock", &path)(error)),
            }
        }
        Ok(Some(Lease(taken)))
    }

    fn file(&self, identity: &str) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        self.path.join(format!("{}{}.lock", self.prefix, identity.chars().map(plain).collect::<String>()))
    }
}

impl Lease {
    /// The descriptors that hold it. They are close-on-exec: whoever wants a child to hold it too clears that flag
    /// there.
    pub fn descriptors(&self) -> Vec<RawFd> {
        self.0.iter().map(AsRawFd::as_raw_fd).collect()
    }
}

/// What a folder is. A link could lead into somebody's own.
fn look(path: &Path) -> Result<Metadata, LeaseError> {
    let found = fs::symlink_metadata(path).map_err(on("look at", path))?;
    if found.is_dir() { Ok(found) } else { Err(on("keep leases in", path)(io::ErrorKind::NotADirectory.into())) }
}

/// Whether something belongs to root, also where this process cannot see that: in a user namespace without root, as
/// containers of users have it, what is root's outside belongs to the overflow user.
fn is_roots(found: &Metadata) -> bool {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u32>().ok();
    let maps_root = || {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let ranges = map.lines().map(|line| line.split_whitespace().filter_map(|word| word.parse::<u64>().ok()));
        // `inside outside length`: all users, or those of a container that has a root of its own outside.
        ranges.map(Iterator::collect::<Vec<_>>).any(|range| matches!(range.as_slice(), [_, 0, _]))
    };
    found.uid() == 0 || (!maps_root() && Some(found.uid()) == number("/proc/sys/kernel/overflowuid"))
}

/// Whether an open file is still the one with that name.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(ours), Ok(named)) => (ours.dev(), ours.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

fn refusal(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Opens the file of a device, and makes it where it is missing.
fn open(path: &Path) -> Result<File, LeaseError> {
    const TRIES: u32 = 20;
    let mut tries = 0;
    loop {
        tries += 1;
        let error = match open_existing(path) {
            Ok(file) => return Ok(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => match create(path) {
                Ok(file) => return Ok(file),
                Err(error) => error,
            },
            Err(error) => error,
        };
        // Somebody else made it at the same moment, and may not have shared it yet.
        let may_pass = matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::PermissionDenied);
        if !may_pass || tries == TRIES {
            return Err(on("open", path)(error));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Opens without `O_CREAT`: with it, a kernel that protects files in shared folders refuses those of other users.
fn open_existing(path: &Path) -> io::Result<File> {
    let open =
        |write| OpenOptions::new().read(true).write(write).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    // To lock it, to read it is enough.
    let file = open(true).or_else(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => open(false),
        _ => Err(error),
    })?;
    let found = file.metadata()?;
    // Anybody can put something here, such as another name for a file of ours that would be overwritten.
    if !found.is_file() || found.nlink() != 1 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no lock file; remove it"));
    }
    Ok(file)
}

fn create(path: &Path) -> io::Result<File> {
    const FOR_ALL: u32 = 0o666;
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(FOR_ALL).open(path)?;
    file.set_permissions(Permissions::from_mode(FOR_ALL))?;
    Ok(file)
}

fn sign(file: &mut File, holder: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(holder.as_bytes())
}

/// What the holder of a lease wrote, as one printable line: anybody may write anything there.
fn note(file: File) -> Option<String> {
    let mut text = Vec::new();
    file.take(LONGEST_NOTE).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line: String = text.lines().next()?.chars().filter(|c| !c.is_control()).collect();
    Some(line.trim().to_owned()).filter(|line| !line.is_empty())
}

fn on(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LeaseError {
    move |source| LeaseError { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn folder() -> (tempfile::TempDir, LeaseFolder) {
        let root = tempfile::tempdir().unwrap();
        let leases = LeaseFolder::at(&root.path().join("leases")).unwrap();
        (root, leases)
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn devices_are_leased_all_or_none() {
        let (_root, leases) = folder();
        let first = leases.try_take(&names(&["cuda-1"]), "stage `a`").unwrap().unwrap();
        assert!(leases.try_take(&names(&["cuda-2", "cuda-1"]), "stage `b`").unwrap().is_none());
        assert_eq!(leases.standing("cuda-1").unwrap(), LeaseState::Held(Some("stage `a`".to_owned())));
        assert_eq!(leases.standing("cuda-2").unwrap(), LeaseState::Free);
        drop(first);
        assert_eq!(leases.standing("cuda-1").unwrap(), LeaseState::Free);
        let both = leases.try_take(&names(&["cuda-2", "cuda-1"]), "stage `b`").unwrap().unwrap();
        assert_eq!(both.descriptors().len(), 2);
        assert_eq!(leases.standing("cuda-2").unwrap(), LeaseState::Held(Some("stage `b`".to_owned())));
        assert_eq!(leases.standing("cuda-9").unwrap(), LeaseState::Free);
    }

    #[test]
    fn other_users_can_lock_the_same_files() {
        let (_root, leases) = folder();
        drop(leases.try_take(&names(&["npu-0000:c1:00.0"]), "x").unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(leases.path()), 0o1777);
        assert_eq!(mode(&leases.path().join("npu-0000_c1_00.0.lock")), 0o666);
    }

    #[test]
    fn what_is_no_lock_file_is_left_alone() {
        let (root, leases) = folder();
        let precious = root.path().join("precious");
        fs::write(&precious, "text").unwrap();
        std::os::unix::fs::symlink(&precious, leases.path().join("cuda-0.lock")).unwrap();
        fs::hard_link(&precious, leases.path().join("cuda-1.lock")).unwrap();
        for device in ["cuda-0", "cuda-1"] {
            assert!(leases.try_take(&names(&[device]), "x").is_err(), "{device}");
        }
        assert_eq!(fs::read_to_string(precious).unwrap(), "text");
        assert!(LeaseFolder::at(&root.path().join("precious")).is_err());
    }

    #[test]
    fn a_folder_in_which_others_could_remove_what_is_locked_is_none() {
        let root = tempfile::tempdir().unwrap();
        let at = |mode: u32| {
            let path = root.path().join(format!("{mode:o}"));
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        };
        for sound in [0o700, 0o755, 0o1777, 0o1770] {
            assert!(LeaseFolder::at(&at(sound)).is_ok(), "{sound:o}");
        }
        for open in [0o777, 0o775, 0o2775] {
            let error = LeaseFolder::at(&at(open)).unwrap_err();
            assert!(error.source.to_string().contains("chmod +t"), "{open:o}: {error:?}");
        }
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path().join("700"), &link).unwrap();
        assert!(LeaseFolder::at(&link).is_err());
        // Of those for all none is another's: here they are root's, or none at all.
        if nix::unistd::geteuid().is_root() {
            let shared = |path: &Path| LeaseFolder::shared(path, "pipeline-");
            assert!(shared(&root.path().join("1777")).is_ok());
            assert!(shared(&root.path().join("755")).is_err() && shared(&root.path().join("1770")).is_err());
            let theirs = root.path().join("1777");
            std::os::unix::fs::chown(&theirs, Some(65_533), None).unwrap();
            assert!(shared(&theirs).is_err());
            let error = LeaseFolder::at(&theirs).unwrap_err();
            assert!(error.source.to_string().contains("another user (65533)"), "{error:?}");
        }
    }

    #[test]
    fn a_lock_on_a_file_that_was_removed_is_none() {
        let (_root, leases) = folder();
        let path = leases.file("cuda-0");
        let file = open(&path).unwrap();
        assert!(is_at(&file, &path));
        fs::remove_file(&path).unwrap();
        assert!(!is_at(&file, &path));
        drop(create(&path).unwrap());
        assert!(!is_at(&file, &path));
    }

    #[test]
    fn a_note_is_one_printable_line() {
        let (_root, leases) = folder();
        let _held = leases.try_take(&names(&["cuda-0"]), "\u{1b}[31mme\u{7}\nmore").unwrap().unwrap();
        assert_eq!(leases.standing("cuda-0").unwrap(), LeaseState::Held(Some("[31mme".to_owned())));
    }

    /// A lock belongs to the open file: a child that was started with it holds the device after its parent has let go.
    #[test]
    fn a_lease_outlives_whoever_took_it() {
        let (_root, leases) = folder();
        let lease = leases.try_take(&names(&["cuda-0"]), "parent").unwrap().unwrap();
        let held = lease.0[0].try_clone().unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::from(held)).spawn().unwrap();
        drop(lease);
        assert!(matches!(leases.standing("cuda-0").unwrap(), LeaseState::Held(_)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(leases.standing("cuda-0").unwrap(), LeaseState::Free);
    }

    #[test]
    fn of_many_who_want_two_of_three_somebody_always_gets_them() {
        let (_root, leases) = folder();
        let in_use = [const { AtomicUsize::new(0) }; 3];
        let served = AtomicUsize::new(0);
        thread::scope(|scope| {
            for (worker, wanted) in [[0, 1], [1, 2], [2, 0], [1, 0]].into_iter().enumerate() {
                let (leases, in_use, served) = (&leases, &in_use, &served);
                scope.spawn(move || {
                    let devices = wanted.map(|device: usize| format!("cuda-{device}"));
                    for _ in 0..50 {
                        let lease = loop {
                            if let Some(lease) = leases.try_take(&devices, &worker.to_string()).unwrap() {
                                break lease;
                            }
                            thread::yield_now();
                        };
                        for device in wanted {
                            assert_eq!(in_use[device].fetch_add(1, Ordering::SeqCst), 0, "two have device {device}");
                        }
                        for device in wanted {
                            in_use[device].fetch_sub(1, Ordering::SeqCst);
                        }
                        drop(lease);
                        served.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(served.into_inner(), 200);
    }
}
