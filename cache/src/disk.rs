//! Which file system a path is on, and what room it has.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;

/// A file system, as far as it could be asked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Disk {
    /// Where it is mounted.
    pub mounted_on: Option<PathBuf>,
    /// The bytes that it has left for this user.
    pub free_bytes: Option<u64>,
}

impl Disk {
    /// The one that a path is on, or will when it is made.
    pub fn of(path: &Path) -> Self {
        let Some((place, device)) = place_of(path) else { return Self::default() };
        let place = place.canonicalize().unwrap_or(place);
        let same = |place: &&Path| fs::metadata(place).is_ok_and(|metadata| metadata.dev() == device);
        let mounted_on = place.ancestors().take_while(same).last().map(Path::to_owned);
        let status = statvfs(&place).ok();
        Self { mounted_on, free_bytes: status.map(|status| status.blocks_available() * status.fragment_size()) }
    }

    /// Whether two paths are on one file system, or will be when they are made.
    pub fn holds_both(one: &Path, other: &Path) -> bool {
        match (place_of(one), place_of(other)) {
            (Some((_, one)), Some((_, other))) => one == other,
            (None, _) | (_, None) => false,
        }
    }

    /// Where the file system is mounted with whose room a message ends, which may have come from another process.
    pub fn told_in(message: &str) -> Option<&Path> {
        let (message, _) = message.strip_suffix(END)?.rsplit_once(MIDDLE)?;
        let (_, mounted_on) = message.rsplit_once(BEGINNING)?;
        Some(Path::new(mounted_on))
    }
}

/// What a text about a file system is made of, around its place and its room.
const BEGINNING: &str = " (the disk at `";
const MIDDLE: &str = "` has ";
const END: &str = " KiB free)";

/// The nearest folder above a path that is there, or what is at the path itself, and the device that it is on.
fn place_of(path: &Path) -> Option<(PathBuf, u64)> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.ancestors().find_map(|place| Some((place.to_owned(), fs::metadata(place).ok()?.dev())))
}

impl fmt::Display for Disk {
    /// As the end of a message: ` (the disk at `/data` has 12 KiB free)`; nothing where nothing is known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(mounted_on), Some(free)) = (&self.mounted_on, self.free_bytes) else { return Ok(()) };
        write!(f, "{BEGINNING}{}{MIDDLE}{}{END}", mounted_on.display(), free / 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_not_there_yet_lies_where_its_folder_does() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::of(&folder.path().join("a/b/c"));
        assert_eq!(disk.mounted_on, Disk::of(folder.path()).mounted_on);
        assert!(folder.path().canonicalize().unwrap().starts_with(disk.mounted_on.as_ref().unwrap()));
        assert!(disk.free_bytes.is_some() && disk.to_string().ends_with(" KiB free)"), "{disk}");
        assert_eq!(Disk::told_in(&format!("no space left{disk}")), disk.mounted_on.as_deref());
        let disk = Disk { mounted_on: Some("/a b".into()), free_bytes: Some(4096) };
        assert_eq!(disk.to_string(), " (the disk at `/a b` has 4 KiB free)");
        assert_eq!(Disk::told_in(&format!("`x` has no room{disk}")), Some(Path::new("/a b")));
        assert_eq!((Disk::told_in("no space left"), Disk::told_in("has 4 KiB free)")), (None, None));
        assert!(Disk::holds_both(&folder.path().join("a/b/c"), folder.path()));
    }
}
