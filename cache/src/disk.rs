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
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let Some((place, device)) = path.ancestors().find_map(|place| Some((place, fs::metadata(place).ok()?.dev())))
        else {
            return Self::default();
        };
        let place = place.canonicalize().unwrap_or_else(|_| place.to_owned());
        let same = |place: &&Path| fs::metadata(place).is_ok_and(|metadata| metadata.dev() == device);
        let mounted_on = place.ancestors().take_while(same).last().map(Path::to_owned);
        let status = statvfs(&place).ok();
        Self { mounted_on, free_bytes: status.map(|status| status.blocks_available() * status.fragment_size()) }
    }
}

impl fmt::Display for Disk {
    /// As the end of a message: ` (the disk at `/data` has 12 KiB free)`; nothing where nothing is known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(mounted_on), Some(free)) = (&self.mounted_on, self.free_bytes) else { return Ok(()) };
        write!(f, " (the disk at `{}` has {} KiB free)", mounted_on.display(), free / 1024)
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
    }
}
