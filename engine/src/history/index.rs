//! The index over runs: SQLite, made from the run folders, made again where it is missing or damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::Digest;
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use super::recorded::{LastRun, Recorded, RunState, RunSummary, StageSummary, read_run};
use crate::home::Home;
use crate::run::event::Counts;

/// Raised when the tables change; an index of another version is made again.
const VERSION: i64 = 2;

const TABLES: &str = "
    CREATE TABLE runs (
        run TEXT PRIMARY KEY, pipeline TEXT NOT NULL, file TEXT NOT NULL, started TEXT NOT NULL,
        conclusion TEXT, seconds REAL,
        done INTEGER NOT NULL, cached INTEGER NOT NULL, failed INTEGER NOT NULL, skipped INTEGER NOT NULL
    );
    CREATE TABLE stages (
        run TEXT NOT NULL, position INTEGER NOT NULL, pipeline TEXT NOT NULL, stage TEXT NOT NULL, kind TEXT NOT NULL,
        status TEXT NOT NULL, key TEXT, seconds REAL, peak_memory_bytes INTEGER,
        PRIMARY KEY (run, position)
    ) WITHOUT ROWID;
    CREATE INDEX results ON stages (pipeline, stage, run) WHERE key IS NOT NULL;
";

/// The history of a home.
#[derive(Debug)]
pub struct History {
    connection: Connection,
    runs: PathBuf,
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
                let _ = fs::remove_file(home.index());
                history = Self::open_index(home)?;
                history.catch_up()?;
            }
            caught_up => caught_up?,
        }
        Ok(history)
    }

    /// Records a run that has ended. Cheap: the index is not brought up to date otherwise.
    ///
    /// # Errors
    /// As [`History::open`].
    pub fn record_run(home: &Home, run: &str) -> Result<(), HistoryError> {
        let mut history = Self::open_index(home)?;
        history.add(run)
    }

    /// All runs, the newest first.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn runs(&self) -> Result<Vec<RunSummary>, HistoryError> {
        self.query(|connection| {
            let mut statement = connection.prepare("SELECT * FROM runs ORDER BY run DESC")?;
            statement.query_map([], summary)?.collect()
        })
    }

    /// One run and its stages; an id may be shortened as long as one run alone begins with it.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn run(&self, id: &str) -> Result<Option<(RunSummary, Vec<StageSummary>)>, HistoryError> {
        let found: Vec<_> = self.runs()?.into_iter().filter(|run| run.run.starts_with(id)).collect();
        let exact = found.iter().position(|run| run.run == id);
        let Some(summary) = (match (exact, found.len()) {
            (Some(at), _) => found.into_iter().nth(at),
            (None, 1) => found.into_iter().next(),
            (None, _) => None,
        }) else {
            return Ok(None);
        };
        let stages = self.query(|connection| {
            let mut statement = connection.prepare(
                "SELECT stage, kind, status, key, seconds, peak_memory_bytes FROM stages WHERE run = ? ORDER BY position",
            )?;
            statement.query_map([&summary.run], stage_summary)?.collect()
        })?;
        Ok(Some((summary, stages)))
    }

    /// The key of the newest result of a stage of a pipeline.
    ///
    /// # Errors
    /// Fails where the index does.
    pub fn last_key(&self, pipeline: &str, stage: &str) -> Result<Option<Digest>, HistoryError> {
        let text: Option<String> = self.query(|connection| {
            let sql =
                "SELECT key FROM stages WHERE pipeline = ? AND stage = ? AND key IS NOT NULL ORDER BY run DESC LIMIT 1";
            connection.query_row(sql, [pipeline, stage], |row| row.get(0)).optional()
        })?;
        Ok(text.and_then(|text| text.parse().ok()))
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

    fn open_index(home: &Home) -> Result<Self, HistoryError> {
        let path = home.index();
        let failed = |source| HistoryError::Index { path: path.clone(), source };
        let connection = match open(&path) {
            Ok(connection) => connection,
            // Everything in it is in the run folders too, so a damaged index is no reason to bother anyone.
            Err(error) if is_damage(&error) => {
                let _ = fs::remove_file(&path);
                open(&path).map_err(failed)?
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(Self { connection, runs: home.runs() })
    }

    /// Adds the runs that the index does not have, and those that had not ended when it last looked.
    fn catch_up(&mut self) -> Result<(), HistoryError> {
        let known: BTreeMap<String, bool> = self.query(|connection| {
            let mut statement = connection.prepare("SELECT run, conclusion IS NOT NULL FROM runs")?;
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        })?;
        let mut present = BTreeSet::new();
        let entries = match fs::read_dir(&self.runs) {
            // Somebody has made room.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            read => Some(read.map_err(read_failed(&self.runs))?),
        };
        for entry in entries.into_iter().flatten() {
            let entry = entry.map_err(read_failed(&self.runs))?;
            let run = entry.file_name().to_string_lossy().into_owned();
            if known.get(&run) != Some(&true) {
                self.add(&run)?;
            }
            present.insert(run);
        }
        for gone in known.keys().filter(|run| !present.contains(*run)) {
            self.query(|connection| {
                connection.execute("DELETE FROM runs WHERE run = ?", [gone])?;
                connection.execute("DELETE FROM stages WHERE run = ?", [gone])
            })?;
        }
        Ok(())
    }

    fn add(&mut self, run: &str) -> Result<(), HistoryError> {
        // A folder without a readable plan is a run that was killed before it began.
        let Some(recorded) = read_run(&self.runs.join(run)) else { return Ok(()) };
        let path = self.path();
        self.insert(&recorded).map_err(|source| HistoryError::Index { path, source })
    }

    fn insert(&mut self, recorded: &Recorded) -> rusqlite::Result<()> {
        let RunSummary { run, pipeline, file, started, state, seconds, counts } = &recorded.summary;
        let conclusion = match state {
            // A run that goes on is read again each time; one that was cut off can never change.
            RunState::Running => None,
            RunState::CutOff => Some("cut_off"),
            RunState::Succeeded => Some("succeeded"),
            RunState::Failed => Some("failed"),
            RunState::Interrupted => Some("interrupted"),
        };
        let transaction = self.connection.transaction()?;
        transaction.execute("DELETE FROM stages WHERE run = ?", [run])?;
        transaction.execute(
            "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                run,
                pipeline,
                file.to_string_lossy(),
                started,
                conclusion,
                seconds,
                counts.done as i64,
                counts.cached as i64,
                counts.failed as i64,
                counts.skipped as i64
            ],
        )?;
        {
            let mut insert = transaction.prepare("INSERT INTO stages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)")?;
            for (position, stage) in recorded.stages.iter().enumerate() {
                let key = stage.key.map(|key| key.to_string());
                let peak = stage.peak_memory_bytes.map(u64::cast_signed);
                let position = position as i64;
                insert.execute(params![
                    run,
                    position,
                    pipeline,
                    stage.stage,
                    stage.kind,
                    stage.status,
                    key,
                    stage.seconds,
                    peak
                ])?;
            }
        }
        transaction.commit()
    }

    fn query<T>(&self, ask: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, HistoryError> {
        ask(&self.connection).map_err(|source| HistoryError::Index { path: self.path(), source })
    }

    fn path(&self) -> PathBuf {
        self.connection.path().map(PathBuf::from).unwrap_or_default()
    }
}

fn open(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(std::time::Duration::from_secs(10))?;
    // A rollback journal works on shared file systems. Nothing is flushed, since everything can be made again.
    connection.execute_batch("PRAGMA journal_mode = DELETE; PRAGMA synchronous = OFF; PRAGMA temp_store = MEMORY;")?;
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if version != VERSION {
        // Two programs may come here at once: the second finds the tables made and the version set.
        connection.execute_batch("BEGIN IMMEDIATE")?;
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        if version != VERSION {
            connection.execute_batch("DROP TABLE IF EXISTS runs; DROP TABLE IF EXISTS stages;")?;
            connection.execute_batch(TABLES)?;
            connection.execute_batch(&format!("PRAGMA user_version = {VERSION}"))?;
        }
        connection.execute_batch("COMMIT")?;
    }
    Ok(connection)
}

/// Whether the file is at fault, and not another process that is busy with it, or the disk.
fn is_damage(error: &rusqlite::Error) -> bool {
    let damage = [ErrorCode::DatabaseCorrupt, ErrorCode::NotADatabase, ErrorCode::Unknown];
    error.sqlite_error_code().is_some_and(|code| damage.contains(&code))
}

fn summary(row: &rusqlite::Row<'_>) -> rusqlite::Result<RunSummary> {
    let run: String = row.get("run")?;
    let conclusion: Option<String> = row.get("conclusion")?;
    let state = match conclusion.as_deref() {
        Some("succeeded") => RunState::Succeeded,
        Some("failed") => RunState::Failed,
        Some("interrupted") => RunState::Interrupted,
        Some(_) => RunState::CutOff,
        None => RunState::Running,
    };
    let count = |name: &str| row.get::<_, i64>(name).map(|count| usize::try_from(count).unwrap_or_default());
    Ok(RunSummary {
        pipeline: row.get("pipeline")?,
        file: PathBuf::from(row.get::<_, String>("file")?),
        started: row.get("started")?,
        state,
        seconds: row.get("seconds")?,
        counts: Counts {
            done: count("done")?,
            cached: count("cached")?,
            failed: count("failed")?,
            skipped: count("skipped")?,
        },
        run,
    })
}

fn stage_summary(row: &rusqlite::Row<'_>) -> rusqlite::Result<StageSummary> {
    let key: Option<String> = row.get(3)?;
    let peak: Option<i64> = row.get(5)?;
    Ok(StageSummary {
        stage: row.get(0)?,
        kind: row.get(1)?,
        status: row.get(2)?,
        key: key.and_then(|key| key.parse().ok()),
        seconds: row.get(4)?,
        peak_memory_bytes: peak.map(i64::cast_unsigned),
    })
}

fn read_failed(path: &Path) -> impl FnOnce(io::Error) -> HistoryError {
    let path = path.to_owned();
    move |source| HistoryError::Read { path, source }
}
