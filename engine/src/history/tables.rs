//! The tables of the index, and how a run is in them.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, ErrorCode, params};

use super::recorded::{Recorded, RunState, RunSummary, StageSummary};
use crate::run::event::Counts;

/// Raised when the tables change; an index of another version is made again.
const VERSION: i64 = 3;

const TABLES: &str = "
    CREATE TABLE runs (
        run TEXT PRIMARY KEY, pipeline TEXT NOT NULL, file TEXT NOT NULL, started TEXT NOT NULL,
        conclusion TEXT, seconds REAL,
        done INTEGER NOT NULL, cached INTEGER NOT NULL, failed INTEGER NOT NULL, skipped INTEGER NOT NULL,
        damaged_lines INTEGER NOT NULL
    );
    CREATE TABLE stages (
        run TEXT NOT NULL, position INTEGER NOT NULL, pipeline TEXT NOT NULL, stage TEXT NOT NULL, kind TEXT NOT NULL,
        status TEXT NOT NULL, key TEXT, seconds REAL, peak_memory_bytes INTEGER, declared TEXT NOT NULL, axes TEXT NOT NULL,
        PRIMARY KEY (run, position)
    ) WITHOUT ROWID;
    CREATE INDEX results ON stages (pipeline, stage, run) WHERE key IS NOT NULL;
    CREATE INDEX makers ON stages (key) WHERE status = 'done';
";

/// How a run of a state is written in the index. One that goes on is read again each time; one that was cut off can
/// never change.
pub(super) fn conclusion(state: RunState) -> Option<&'static str> {
    match state {
        RunState::Running => None,
        RunState::CutOff => Some("cut_off"),
        RunState::Succeeded => Some("succeeded"),
        RunState::Failed => Some("failed"),
        RunState::Interrupted => Some("interrupted"),
    }
}

/// What stands for a run that has no conclusion yet, in a selection.
pub(super) const RUNNING: &str = "running";

/// Writes a run, in place of what was known of it.
pub(super) fn insert(connection: &Connection, recorded: &Recorded) -> rusqlite::Result<()> {
    let RunSummary { run, pipeline, file, started, state, seconds, counts, damaged_lines } = &recorded.summary;
    connection.prepare_cached("DELETE FROM stages WHERE run = ?")?.execute([run])?;
    let values = params![
        run,
        pipeline,
        file.to_string_lossy(),
        started,
        conclusion(*state),
        seconds,
        counts.done as i64,
        counts.cached as i64,
        counts.failed as i64,
        counts.skipped as i64,
        *damaged_lines as i64
    ];
    let sql = "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
    connection.prepare_cached(sql)?.execute(values)?;
    let mut insert = connection.prepare_cached("INSERT INTO stages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")?;
    for (position, stage) in recorded.stages.iter().enumerate() {
        let StageSummary { stage, kind, status, key, seconds, peak_memory_bytes, declared, axes } = &stage.summary;
        let axes = serde_json::to_string(axes).expect("names and JSON values have a JSON form");
        let (key, peak) = (key.map(|key| key.to_string()), peak_memory_bytes.map(u64::cast_signed));
        let position = position as i64;
        insert.execute(params![run, position, pipeline, stage, kind, status, key, seconds, peak, declared, axes])?;
    }
    Ok(())
}

/// Opens an index, with its tables made where they are not there or of another version.
pub(super) fn open(path: &Path) -> rusqlite::Result<Connection> {
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
pub(super) fn is_damage(error: &rusqlite::Error) -> bool {
    let damage = [ErrorCode::DatabaseCorrupt, ErrorCode::NotADatabase, ErrorCode::Unknown];
    error.sqlite_error_code().is_some_and(|code| damage.contains(&code))
}

/// Whether the place cannot be written to.
pub(super) fn is_refused(error: &rusqlite::Error) -> bool {
    let refused = [ErrorCode::ReadOnly, ErrorCode::CannotOpen, ErrorCode::PermissionDenied];
    error.sqlite_error_code().is_some_and(|code| refused.contains(&code))
}

/// A row of `runs`.
pub(super) fn summary(row: &rusqlite::Row<'_>) -> rusqlite::Result<RunSummary> {
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
        damaged_lines: count("damaged_lines")?,
        run,
    })
}

/// A row of `stages`.
pub(super) fn stage_summary(row: &rusqlite::Row<'_>) -> rusqlite::Result<StageSummary> {
    let key: Option<String> = row.get("key")?;
    let peak: Option<i64> = row.get("peak_memory_bytes")?;
    let axes: String = row.get("axes")?;
    Ok(StageSummary {
        stage: row.get("stage")?,
        kind: row.get("kind")?,
        status: row.get("status")?,
        key: key.and_then(|key| key.parse().ok()),
        seconds: row.get("seconds")?,
        peak_memory_bytes: peak.map(i64::cast_unsigned),
        declared: row.get("declared")?,
        axes: serde_json::from_str(&axes).unwrap_or_default(),
    })
}
