//! Removing a run's record, whole and never while the run goes on.

use std::fs::{self, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use cache::regular;

use super::events::EVENTS_FILE;
use super::index::{History, HistoryError};
use crate::execute::slurm::record::Records;
use crate::execute::submission::EXIT_FILE;
use crate::home::Home;

/// What is being removed has a name that no run has, so that nobody reads half of it.
const REMOVED: &str = ".removed-";

impl History {
    /// Removes the record of a run; false, and nothing is done, where the run goes on. Results that it made stay in the
    /// store.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn remove(&self, home: &Home, run: &str) -> Result<bool, HistoryError> {
        let folder = home.run(run);
        if has_job(home, &folder) {
            return Ok(false);
        }
        let events = folder.join(EVENTS_FILE);
        // Held until the folder has its other name: whoever looks meanwhile takes the run for one that goes on, and
        // waits for nothing.
        let _lock = match regular::open(&events) {
            Ok(events) => match events.try_lock() {
                Ok(()) => Some(events),
                Err(TryLockError::WouldBlock) => return Ok(false),
                Err(TryLockError::Error(source)) => return Err(failed(&folder)(source)),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(HistoryError::Read { path: events, source }),
        };
        let removed = home.runs().join(format!("{REMOVED}{run}"));
        match fs::rename(&folder, &removed) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&folder)(error)),
            _ => {}
        }
        self.forget(run)?;
        sweep(&home.runs()).map_err(failed(&removed))?;
        Ok(true)
    }
}

/// Whether a job of a cluster, which outlives the run that submitted it, works in a run's folder.
fn has_job(home: &Home, folder: &Path) -> bool {
    let records = Records::at(home.jobs()).all().into_iter();
    records.filter(|record| record.folder.starts_with(folder)).any(|record| !record.folder.join(EXIT_FILE).exists())
}

/// Removes what has been marked, also by a process that was killed before it was done.
fn sweep(runs: &Path) -> io::Result<()> {
    for entry in fs::read_dir(runs)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(REMOVED) {
            match fs::remove_dir_all(entry.path()) {
                // Another process sweeps as well.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> HistoryError {
    let path: PathBuf = path.to_owned();
    move |source| HistoryError::Remove { path, source }
}
