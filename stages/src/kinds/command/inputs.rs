//! The inputs of a program, which it may read and no more: they are links into the store, where the permissions of a
//! file keep out everybody but root. What it is told of them is in its key, as they are.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use engine::artifact::Description;
use engine::error::{Cause, OrFail, StageError};

use crate::data::artifact::{Metrics, OutputKind as _, Packs, Rows, Tokens};

/// Facts that the identity of a table covers: what its readers go by, and what can be counted in it. Others, such as
/// how many rows were left out, may change while it stays.
const OF_TABLES: [&str; 14] = [
    "shape",
    "columns",
    "template",
    "response",
    "rows",
    "documents",
    "tokens",
    "target_tokens",
    "longest_row",
    "longest_document",
    "largest_id",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
];

/// The description of an input with the facts that its identity covers: a program that reads others would be cached
/// though they changed. What is known of other files is in them.
pub(super) fn covered(description: Description) -> Description {
    let is_covered = |name: &str| match description.kind.as_str() {
        Metrics::NAME => true,
        Rows::NAME | Tokens::NAME | Packs::NAME => OF_TABLES.contains(&name),
        _ => false,
    };
    let facts = description.facts.into_iter().filter(|(name, _)| is_covered(name)).collect();
    Description { facts, ..description }
}

/// The files of inputs, as they were before the program began.
#[derive(Default)]
pub(super) struct Watched(Vec<(PathBuf, State)>);

/// By what a file that was written to is known.
#[derive(Debug, PartialEq, Eq)]
struct State {
    file: (u64, u64),
    length: u64,
    modified: (i64, i64),
}

impl State {
    fn of(path: &Path) -> Option<Self> {
        Some(Self::from(&fs::metadata(path).ok()?))
    }

    /// Whether the file has been written to since. Another one in its place was put there whole by the engine, which
    /// has found it damaged.
    fn was_written_to(&self, path: &Path) -> bool {
        Self::of(path).is_some_and(|now| now.file == self.file && now != *self)
    }
}

impl From<&Metadata> for State {
    fn from(found: &Metadata) -> Self {
        Self { file: (found.dev(), found.ino()), length: found.len(), modified: (found.mtime(), found.mtime_nsec()) }
    }
}

impl Watched {
    /// Watches the files of an input's folder.
    ///
    /// # Errors
    /// Fails if the folder cannot be listed.
    pub(super) fn add(&mut self, folder: &Path) -> Result<(), StageError> {
        let unreadable = || format!("cannot list `{}`", folder.display());
        for entry in fs::read_dir(folder).or_fail(Cause::Machine, unreadable)? {
            let entry = entry.or_fail(Cause::Machine, unreadable)?;
            let path = entry.path();
            if entry.file_type().or_fail(Cause::Machine, unreadable)?.is_dir() {
                self.add(&path)?;
            } else if let Ok(found) = fs::metadata(&path)
                && found.permissions().readonly()
            {
                // What is not in the store, and may be written to, is compared with its digest in the end.
                let state = State::from(&found);
                self.0.push((path, state));
            }
        }
        Ok(())
    }

    /// Makes sure that nobody has written to them since: neither this program, nor another that runs beside it and has
    /// an input in common.
    ///
    /// # Errors
    /// Fails with the first file that was written to.
    pub(super) fn check(&self) -> Result<(), StageError> {
        match self.0.iter().find(|(path, state)| state.was_written_to(path)) {
            None => Ok(()),
            Some((path, _)) => {
                let message = format!("`{}`, a file of an input, was written to while the program ran", path.display());
                let help = "inputs are read-only, also for root: let the program copy what it changes, such as into \
                            `$TMPDIR`; `pipeline cache verify --repair` finds what is damaged, and the next run makes it again";
                Err(StageError::new(Cause::ChangedWhileRunning, message).with_help(help))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_is_written_to_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let (store, input) = (folder.path().join("object"), folder.path().join("input"));
        fs::write(&store, "good").unwrap();
        let may_write = |mode| fs::set_permissions(&store, fs::Permissions::from_mode(mode)).unwrap();
        may_write(0o444);
        fs::create_dir_all(input.join("deep")).unwrap();
        std::os::unix::fs::symlink(&store, input.join("deep/a")).unwrap();
        let mut watched = Watched::default();
        watched.add(&input).unwrap();
        assert!(watched.check().is_ok());
        // Another name of the file is no change.
        fs::hard_link(&store, folder.path().join("other")).unwrap();
        assert!(watched.check().is_ok());
        may_write(0o644);
        fs::write(input.join("deep/a"), "evil").unwrap();
        assert_eq!(watched.check().unwrap_err().cause, Cause::ChangedWhileRunning);
        // Another file in its place is the engine's.
        fs::write(folder.path().join("sound"), "good").unwrap();
        fs::rename(folder.path().join("sound"), &store).unwrap();
        assert!(watched.check().is_ok());
    }
}
