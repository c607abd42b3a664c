//! How a result was made: its record, the run that made it, and what its process was told.

use cache::{Digest, ResultRecord, Store, StoreError};

use super::Words;
use super::index::{History, HistoryError};
use super::recorded::Recorded;
use crate::home::Home;
use crate::protocol::Job;

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
        let maker = by.as_ref().and_then(|(run, _)| Recorded::read(&home.run(run), Words::Skip));
        let of_maker = || Some((maker.as_ref()?, by.as_ref()?.1.as_str()));
        let record = match of_maker().and_then(|(run, stage)| run.result(stage)) {
            Some(record) => Some(record),
            None => store.result(key)?,
        };
        let job = of_maker().and_then(|(run, stage)| run.job(stage));
        Ok(record.map(|record| Self { key: *key, by, record, job }))
    }
}
