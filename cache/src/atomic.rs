//! Files and folders that appear under their name whole and flushed, or not at all.

use std::path::Path;

use crate::StoreError;

/// Writes a file so that a reader, and a machine that lost power, finds the old content or the new and nothing between.
///
/// # Errors
/// Fails where the disk refuses; the old content is then still there, and no temporary file.
pub fn write_atomically(_path: &Path, _bytes: &[u8]) -> Result<(), StoreError> {
    todo!()
}

/// Puts a finished, flushed folder in another's place, in one step where the file system can exchange names.
///
/// Both must lie on one file system. The old folder is removed afterwards; where there was none, the new one is renamed.
///
/// # Errors
/// Fails where the disk refuses; the target is then the old folder or the new, whole.
pub fn replace_folder(_new: &Path, _target: &Path) -> Result<(), StoreError> {
    todo!()
}

/// Flushes a folder's entries, so that names in it survive a loss of power.
///
/// # Errors
/// Fails where the folder cannot be opened or flushed.
pub fn flush_folder(_folder: &Path) -> Result<(), StoreError> {
    todo!()
}
