//! The history of runs: a folder per run, which is the truth, and an index over them, which can be made again from the folders.

mod folder;
mod host;
mod index;
mod recorded;

pub use folder::{RESULT_FILE, RunFolder, RunInput, RunPlan, RunStage, TimedEvent, read_events, stage_folder};
pub use host::Host;
pub use index::{History, HistoryError};
pub use recorded::{LastRun, RunState, RunSummary, StageSummary};
