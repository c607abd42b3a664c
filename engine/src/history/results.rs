//! What the history knows of a stage's earlier results: the newest, those that a process made, and with what they were
//! made.

use cache::{Digest, ResultRecord, Store, StoreError};
use rusqlite::{OptionalExtension, Row, params};

use super::folder::{JOB_FILE, RESULT_FILE, RunPlan, read_json, stage_folder};
use super::index::{History, HistoryError};
use crate::home::Home;
use crate::protocol::Job;

/// The newest result of a stage of a pipeline, made or found.
#[derive(Debug, Clone, PartialEq)]
pub struct LastResult {
    pub run: String,
    pub key: Digest,
}

/// A result that a stage's process made.
#[derive(Debug, Clone, PartialEq)]
pub struct EarlierResult {
    /// How long the process ran.
    pub seconds: f64,
    /// The record that the run keeps of it, where its folder still has it.
    pub record: Option<ResultRecord>,
}

impl History {
    /// The newest result of a stage of a pipeline.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn last_result(&self, pipeline: &str, stage: &str) -> Result<Option<LastResult>, HistoryError> {
        let found: Option<(String, String)> = self.query(|connection| {
            let sql =
                "SELECT run, key FROM stages WHERE pipeline = ? AND stage = ? AND key IS NOT NULL ORDER BY run DESC LIMIT 1";
            connection.query_row(sql, [pipeline, stage], |row| Ok((row.get(0)?, row.get(1)?))).optional()
        })?;
        Ok(found.and_then(|(run, key)| Some(LastResult { run, key: key.parse().ok()? })))
    }

    /// The record of a result, kept by the run that made it; the store may have let go of it.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn kept_record(&self, key: &Digest) -> Result<Option<ResultRecord>, HistoryError> {
        let made = self.maker(key)?;
        Ok(made.and_then(|(run, stage)| self.record_of(&run, &stage)).filter(|record| record.key.result_key() == *key))
    }

    /// What a run was to do; `None` where its folder is gone.
    pub fn plan_of(&self, run: &str) -> Option<RunPlan> {
        RunPlan::read(&self.runs.join(run))
    }

    /// The results that processes of a stage of a pipeline made, the newest first.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn made_by_stage(&self, pipeline: &str, stage: &str, most: usize) -> Result<Vec<EarlierResult>, HistoryError> {
        let sql = "SELECT run, stage, seconds FROM stages
            WHERE pipeline = ? AND stage = ? AND status = 'done' AND seconds IS NOT NULL ORDER BY run DESC LIMIT ?";
        self.made(sql, params![pipeline, stage, most as i64])
    }

    /// The same of a kind of stage, whatever pipeline it was in.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn made_by_kind(&self, kind: &str, most: usize) -> Result<Vec<EarlierResult>, HistoryError> {
        let sql = "SELECT run, stage, seconds FROM stages
            WHERE kind = ? AND status = 'done' AND seconds IS NOT NULL ORDER BY run DESC LIMIT ?";
        self.made(sql, params![kind, most as i64])
    }

    fn made(&self, sql: &str, values: impl rusqlite::Params) -> Result<Vec<EarlierResult>, HistoryError> {
        let found: Vec<(String, String, f64)> = self.query(|connection| {
            let read = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
            connection.prepare(sql)?.query_map(values, read)?.collect()
        })?;
        let made = found.into_iter();
        Ok(made.map(|(run, stage, seconds)| EarlierResult { seconds, record: self.record_of(&run, &stage) }).collect())
    }

    fn record_of(&self, run: &str, stage: &str) -> Option<ResultRecord> {
        read_json(&self.runs.join(run).join(stage_folder(stage)).join(RESULT_FILE))
    }
}

// How a result was made: its record, the run that made it, and what its process was told.

/// A result and how it was made.
#[derive(Debug, Clone)]
pub struct Origin {
    /// The key of the result.
    pub key: Digest,
    /// The newest run that made it, and its id in it, where that run's record is still there.
    pub by: Option<(String, String)>,
    /// The result's record.
    pub record: ResultRecord,
    /// What its process was told, where that is still there.
    pub job: Option<Job>,
}

/// Why a result cannot be looked up.
#[derive(Debug, thiserror::Error)]
pub enum LookUpError {
    /// The history failed.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Origin {
    /// The result of a key: from the records of the run that made it, else from the store; `None` where all trace of it
    /// is gone.
    ///
    /// # Errors
    /// Fails where the index or the store does.
    pub fn find(home: &Home, history: &History, store: &Store, key: &Digest) -> Result<Option<Self>, LookUpError> {
        let by = history.maker(key)?;
        // Two files of that stage, and not the record of its whole run: commands look up thousands of results that one
        // run of a sweep has made.
        let folder = by.as_ref().map(|(run, stage)| home.run(run).join(stage_folder(stage)));
        let record: Option<ResultRecord> = folder.as_ref().and_then(|folder| read_json(&folder.join(RESULT_FILE)));
        let record = match record.filter(|record| record.key.result_key() == *key) {
            Some(record) => Some(record),
            None => store.result(key)?,
        };
        let job: Option<Job> = folder.as_ref().and_then(|folder| read_json(&folder.join(JOB_FILE)));
        Ok(record.map(|record| Self { key: *key, by, record, job }))
    }
}
