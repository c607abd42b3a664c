//! The index over runs: SQLite, made from the run folders, made again where it is missing or damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::Digest;
use rusqlite::{Connection, OptionalExtension, params};

use super::events::Words;
use super::folder::RunPlan;
use super::recorded::{LastRun, Recorded, RunState, RunSummary, StageSummary};
use super::tables::{RUNNING, conclusion, insert, is_damage, is_refused, open, stage_summary, summary};
use crate::home::Home;

/// How many runs are added before the others are let in: each is a few lines, and a commit costs more than they do.
const BATCH: usize = 1000;

/// The history of a home.
#[derive(Debug)]
pub struct History {
    connection: Connection,
    path: PathBuf,
    pub(super) runs: PathBuf,
}

/// Which runs are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Of this pipeline.
    pub pipeline: Option<String>,
    /// That stand so.
    pub state: Option<RunState>,
    /// No more than so many, the newest.
    pub limit: Option<usize>,
}

/// What a name of a run stands for.
#[derive(Debug, Clone, PartialEq)]
pub enum RunLookup {
    /// This run.
    Run(RunSummary),
    /// None.
    Nothing,
    /// The ids of several.
    Several(Vec<String>),
}

/// A result that a run made or took.
pub(super) struct ResultOfRun<'a> {
    pub run: &'a str,
    pub pipeline: &'a str,
    pub stage: &'a str,
    /// The stage's id in the file.
    pub declared: &'a str,
    /// The values that make the stage a child of a sweep, as JSON.
    pub axes: &'a str,
    pub key: Digest,
    /// How long making it took, where the run made it.
    pub seconds: Option<f64>,
}

/// Why the history cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The index failed and could not be made again.
    #[error("the index of runs `{path}` failed")]
    Index {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rusqlite::Error,
    },
    /// The record of a run could not be removed.
    #[error("cannot remove `{path}`")]
    Remove {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder of runs could not be read.
    #[error("cannot read `{path}`")]
    Read {
        /// The folder or file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl History {
    /// Opens the index and brings it up to date with the run folders.
    ///
    /// # Errors
    /// Fails where the index cannot be made or the folders cannot be read.
    pub fn open(home: &Home) -> Result<Self, HistoryError> {
        let mut history = Self::open_index(home)?;
        match history.catch_up() {
            Err(HistoryError::Index { source, .. }) if is_damage(&source) => {
                drop(history);
                history = match remove_index(&home.index()) {
                    Ok(()) => Self::open_index(home)?,
                    Err(_) => Self::in_memory(home)?,
                };
                history.catch_up()?;
            }
            caught_up => caught_up?,
        }
        Ok(history)
    }

    /// The history for one who only looks: where the index cannot be kept (the home is not there yet, or nothing can be
    /// written) it is made in memory, from the run folders.
    ///
    /// # Errors
    /// Fails where the folders cannot be read.
    pub fn look(home: &Home) -> Result<Self, HistoryError> {
        if home.is_made()
            && let Ok(history) = Self::open(home)
        {
            return Ok(history);
        }
        let mut history = Self::in_memory(home)?;
        history.catch_up()?;
        Ok(history)
    }

    /// An index that is kept nowhere, empty.
    fn in_memory(home: &Home) -> Result<Self, HistoryError> {
        let path = PathBuf::from(":memory:");
        let connection = open(&path).map_err(|source| HistoryError::Index { path: path.clone(), source })?;
        Ok(Self { connection, path, runs: home.runs() })
    }

    /// Records a run that has ended, by its plan. Cheap: the index is not brought up to date otherwise.
    ///
    /// # Errors
    /// As [`History::open`].
    pub fn record_run(home: &Home, plan: RunPlan) -> Result<(), HistoryError> {
        let mut history = Self::open_index(home)?;
        let folder = history.runs.join(&plan.run);
        let recorded: Vec<Recorded> = Recorded::of_plan(plan, &folder, Words::Skip).into_iter().collect();
        history.insert_all(&recorded)
    }

    /// All runs, the newest first.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn runs(&self) -> Result<Vec<RunSummary>, HistoryError> {
        self.select(&Selection::default())
    }

    /// The runs that are wanted, the newest first.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn select(&self, selection: &Selection) -> Result<Vec<RunSummary>, HistoryError> {
        let limit = selection.limit.and_then(|limit| i64::try_from(limit).ok()).unwrap_or(-1);
        let conclusion = selection.state.map(|state| conclusion(state).unwrap_or(RUNNING));
        self.query(|connection| {
            let sql = "SELECT * FROM runs WHERE (?1 IS NULL OR pipeline = ?1)
                AND (?2 IS NULL OR coalesce(conclusion, 'running') = ?2) ORDER BY run DESC LIMIT ?3";
            let mut statement = connection.prepare(sql)?;
            statement.query_map(params![selection.pipeline, conclusion, limit], summary)?.collect()
        })
    }

    /// The ids of all runs, the oldest first.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn ids(&self) -> Result<Vec<String>, HistoryError> {
        self.query(|connection| {
            connection.prepare("SELECT run FROM runs ORDER BY run")?.query_map([], |row| row.get(0))?.collect()
        })
    }

    /// The run that a name stands for: its id, a beginning of it that no other has, `latest`, or `latest~2` for the
    /// second before the latest.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn find(&self, name: &str) -> Result<RunLookup, HistoryError> {
        let (sql, value) = match back_from_latest(name) {
            Some(back) => ("SELECT * FROM runs ORDER BY run DESC LIMIT 1 OFFSET ?", back.to_string()),
            // `GLOB` would take brackets and stars in the name for more than themselves.
            None => ("SELECT * FROM runs WHERE substr(run, 1, length(?1)) = ?1 ORDER BY run DESC", name.to_owned()),
        };
        let mut found: Vec<RunSummary> = self.query(|connection| {
            let mut statement = connection.prepare(sql)?;
            statement.query_map([value], summary)?.collect()
        })?;
        if let Some(exact) = found.iter().position(|run| run.run == name) {
            return Ok(RunLookup::Run(found.swap_remove(exact)));
        }
        Ok(match found.len() {
            0 => RunLookup::Nothing,
            1 => RunLookup::Run(found.swap_remove(0)),
            _ => RunLookup::Several(found.into_iter().map(|run| run.run).collect()),
        })
    }

    /// The stages of a run, in the order of its plan.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn stages(&self, run: &str) -> Result<Vec<StageSummary>, HistoryError> {
        self.query(|connection| {
            let sql = "SELECT * FROM stages WHERE run = ? ORDER BY position";
            connection.prepare(sql)?.query_map([run], stage_summary)?.collect()
        })
    }

    /// The runs that have a stage with this id in the file, and a result of it, the newest first: each with its stages
    /// of that id, which are several in a sweep.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn results_of(
        &self,
        declared: &str,
        pipeline: Option<&str>,
    ) -> Result<Vec<(String, StageSummary)>, HistoryError> {
        self.query(|connection| {
            let sql = "SELECT * FROM stages WHERE (declared = ?1 OR stage = ?1) AND (?2 IS NULL OR pipeline = ?2)
                AND key IS NOT NULL ORDER BY run DESC, position";
            let mut statement = connection.prepare(sql)?;
            let read = |row: &rusqlite::Row<'_>| Ok((row.get("run")?, stage_summary(row)?));
            statement.query_map(params![declared, pipeline], read)?.collect()
        })
    }

    /// The newest run that has a stage with this id in the file, whatever became of it, and its stages of that id.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn newest_with(
        &self,
        declared: &str,
        pipeline: Option<&str>,
    ) -> Result<Option<(String, Vec<StageSummary>)>, HistoryError> {
        let newest: Option<String> = self.query(|connection| {
            let sql =
                "SELECT max(run) FROM stages WHERE (declared = ?1 OR stage = ?1) AND (?2 IS NULL OR pipeline = ?2)";
            connection.query_row(sql, params![declared, pipeline], |row| row.get(0))
        })?;
        let Some(run) = newest else { return Ok(None) };
        let mut stages = self.stages(&run)?;
        stages.retain(|stage| stage.declared == declared || stage.stage == declared);
        Ok(Some((run, stages)))
    }

    /// The newest run that made the result of a key, with the stage of it that did.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn maker(&self, key: &Digest) -> Result<Option<(String, String)>, HistoryError> {
        self.query(|connection| {
            let sql = "SELECT run, stage FROM stages WHERE key = ? AND status = 'done' ORDER BY run DESC LIMIT 1";
            connection.query_row(sql, [key.to_string()], |row| Ok((row.get(0)?, row.get(1)?))).optional()
        })
    }

    /// Gives each result that a run made or took, the newest run first.
    ///
    /// # Errors
    /// Fails where the index does.
    pub(super) fn each_result(&self, mut each: impl FnMut(&ResultOfRun<'_>)) -> Result<(), HistoryError> {
        self.query(|connection| {
            let sql = "SELECT run, pipeline, stage, key, status, seconds, declared, axes FROM stages
                WHERE key IS NOT NULL ORDER BY run DESC, position";
            let mut statement = connection.prepare(sql)?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let text = |column| row.get_ref(column)?.as_str().map_err(rusqlite::Error::from);
                let Ok(key) = text(3)?.parse() else { continue };
                let seconds = if text(4)? == "done" { row.get(5)? } else { None };
                let (run, pipeline, stage, declared, axes) = (text(0)?, text(1)?, text(2)?, text(6)?, text(7)?);
                each(&ResultOfRun { run, pipeline, stage, declared, axes, key, seconds });
            }
            Ok(())
        })
    }

    /// What a stage of a pipeline cost when its process last came to its end.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn last_run(&self, pipeline: &str, stage: &str) -> Result<Option<LastRun>, HistoryError> {
        self.query(|connection| {
            let sql = "SELECT seconds, peak_memory_bytes FROM stages
                WHERE pipeline = ? AND stage = ? AND status = 'done' AND seconds IS NOT NULL ORDER BY run DESC LIMIT 1";
            let read = |row: &rusqlite::Row<'_>| {
                let peak: Option<i64> = row.get(1)?;
                Ok(LastRun { seconds: row.get(0)?, peak_memory_bytes: peak.map(i64::cast_unsigned) })
            };
            connection.query_row(sql, [pipeline, stage], read).optional()
        })
    }

    /// How long each stage of a pipeline ran when it last came to its end, in seconds.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn durations(&self, pipeline: &str) -> Result<BTreeMap<String, f64>, HistoryError> {
        self.query(|connection| {
            let sql = "SELECT stage, seconds FROM stages
                WHERE pipeline = ? AND status = 'done' AND seconds IS NOT NULL ORDER BY run";
            let mut statement = connection.prepare_cached(sql)?;
            // Of several the last one stays.
            statement.query_map([pipeline], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        })
    }

    fn open_index(home: &Home) -> Result<Self, HistoryError> {
        let path = home.index();
        // A pipe would be waited for.
        if fs::metadata(&path).is_ok_and(|found| !found.is_file()) && remove_index(&path).is_err() {
            return Self::in_memory(home);
        }
        let opened = match open(&path) {
            // Everything in it is in the run folders too, so a damaged index is no reason to bother anyone.
            Err(error) if is_damage(&error) => match remove_index(&path) {
                Ok(()) => open(&path),
                Err(_) => return Self::in_memory(home),
            },
            opened => opened,
        };
        match opened {
            // Somebody else's home, or an archive: the index is made for this once, and kept nowhere.
            Err(error) if is_refused(&error) => Self::in_memory(home),
            Err(source) => Err(HistoryError::Index { path, source }),
            Ok(connection) => Ok(Self { connection, path, runs: home.runs() }),
        }
    }

    /// Adds the runs that the index does not have, and those that had not ended when it last looked.
    fn catch_up(&mut self) -> Result<(), HistoryError> {
        let known: BTreeMap<String, bool> = self.query(|connection| {
            let mut statement = connection.prepare("SELECT run, conclusion IS NOT NULL FROM runs")?;
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        })?;
        let present = self.present()?;
        let new: Vec<&String> = present.iter().filter(|run| known.get(*run) != Some(&true)).collect();
        for batch in new.chunks(BATCH) {
            let recorded = batch.iter().filter_map(|run| self.read(run));
            let recorded: Vec<Recorded> = recorded.collect();
            self.insert_all(&recorded)?;
        }
        for gone in known.keys().filter(|run| !present.contains(*run)) {
            self.forget(gone)?;
        }
        Ok(())
    }

    /// The runs that have a folder.
    fn present(&self) -> Result<BTreeSet<String>, HistoryError> {
        let entries = match fs::read_dir(&self.runs) {
            // Somebody has made room.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            read => read.map_err(read_failed(&self.runs))?,
        };
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: io::Result<BTreeSet<String>> = names.collect();
        let mut names = names.map_err(read_failed(&self.runs))?;
        // What is being removed has such a name.
        names.retain(|name| !name.starts_with('.'));
        Ok(names)
    }

    /// Takes a run out of the index.
    pub(super) fn forget(&self, run: &str) -> Result<(), HistoryError> {
        self.query(|connection| {
            connection.execute("DELETE FROM runs WHERE run = ?", [run])?;
            connection.execute("DELETE FROM stages WHERE run = ?", [run])
        })?;
        Ok(())
    }

    /// A folder without a readable plan is a run that was killed before it began.
    fn read(&self, run: &str) -> Option<Recorded> {
        Recorded::read(&self.runs.join(run), Words::Skip)
    }

    fn insert_all(&mut self, recorded: &[Recorded]) -> Result<(), HistoryError> {
        let mut insert = || -> rusqlite::Result<()> {
            let transaction = self.connection.transaction()?;
            recorded.iter().try_for_each(|recorded| insert(&transaction, recorded))?;
            transaction.commit()
        };
        insert().map_err(|source| HistoryError::Index { path: self.path.clone(), source })
    }

    pub(super) fn query<T>(&self, ask: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, HistoryError> {
        ask(&self.connection).map_err(|source| HistoryError::Index { path: self.path.clone(), source })
    }
}

/// Removes an index that is no good, whatever it is by now.
fn remove_index(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// `latest` is 0, `latest~2` is 2.
fn back_from_latest(name: &str) -> Option<u32> {
    match name.strip_prefix("latest")? {
        "" => Some(0),
        back => back.strip_prefix('~')?.parse().ok(),
    }
}

fn read_failed(path: &Path) -> impl FnOnce(io::Error) -> HistoryError {
    let path = path.to_owned();
    move |source| HistoryError::Read { path, source }
}
