//! Which job makes which result: a file per key in the home, so that an engine finds the jobs of one that is gone.
//!
//! A record is written before its job is submitted, while the locks of the stage are held, and removed when the job's
//! end is known. So who holds the lock of a result and finds no record knows that no job makes it, and who finds one
//! adopts the job. A record says what was so when it was written; whether the job lives is for Slurm to say, and for
//! the lock that its keeper holds.

use std::fs;
use std::io;
use std::path::PathBuf;

use cache::{Digest, regular};
use serde::{Deserialize, Serialize};

use crate::execute::submission::write_json;

/// A job that makes a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The key of the result.
    pub key: Digest,
    /// The key of the working state that it continues from and leaves.
    pub working: Digest,
    /// The job's name, by which it is found where its number is not known: an engine may die while it submits.
    pub name: String,
    pub job: Option<String>,
    /// The stage's folder in the run that submitted it.
    pub stage_folder: PathBuf,
    /// The folder of the submission below it, which the job reads and writes.
    pub folder: PathBuf,
    /// The run that submitted it.
    pub run: String,
}

/// The records of a home.
#[derive(Debug, Clone)]
pub struct Records {
    folder: PathBuf,
}

impl Records {
    /// Those in a folder, which need not be there.
    pub fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The job that makes a result, if one was submitted. A record that cannot be read is none: it was never whole.
    pub fn find(&self, key: &Digest) -> Option<JobRecord> {
        serde_json::from_slice(&regular::read(&self.path(key)).ok()?).ok()
    }

    /// A job other than that of `key` that works on the same working state.
    pub fn with_working(&self, working: &Digest, key: &Digest) -> Option<JobRecord> {
        let mut others = self.all().into_iter();
        others.find(|record| record.working == *working && record.key != *key)
    }

    pub fn all(&self) -> Vec<JobRecord> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        let texts = entries.filter_map(|entry| regular::read(&entry.ok()?.path()).ok());
        texts.filter_map(|text| serde_json::from_slice(&text).ok()).collect()
    }

    /// Writes a record down, over the one of the same key.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn write(&self, record: &JobRecord) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        write_json(&self.path(&record.key), record)
    }

    /// Removes the record of a key; one that is not there is removed.
    pub fn remove(&self, key: &Digest) {
        // One that stays is found to speak of a job that has ended, and removed then.
        let _ = fs::remove_file(self.path(key));
    }

    fn path(&self, key: &Digest) -> PathBuf {
        self.folder.join(format!("{key}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_found_by_its_key_and_by_its_working_state() {
        let folder = tempfile::tempdir().unwrap();
        let records = Records::at(folder.path().join("jobs"));
        let (key, other, working) = (Digest::of(b"key"), Digest::of(b"other"), Digest::of(b"working"));
        assert_eq!(records.find(&key), None);
        let record = JobRecord {
            key,
            working,
            name: "pipeline-run-stage".into(),
            job: None,
            stage_folder: "/runs/1/stage".into(),
            folder: "/runs/1/stage/slurm-1".into(),
            run: "run".into(),
        };
        records.write(&record).unwrap();
        records.write(&JobRecord { job: Some("17".into()), ..record.clone() }).unwrap();
        assert_eq!(records.find(&key).unwrap().job.as_deref(), Some("17"));
        assert_eq!(records.with_working(&working, &key), None);
        assert_eq!(records.with_working(&working, &other).unwrap().key, key);
        records.remove(&key);
        records.remove(&key);
        assert_eq!(records.all(), []);
    }
}
