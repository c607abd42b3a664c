//! The history of runs: a folder per run, which is the truth, and an index over them, which can be made again from the
//! folders.

mod archive;
mod events;
mod folder;
mod host;
mod index;
mod provenance;
mod recorded;
mod references;
mod remove;
mod results;
mod tables;
mod verify;
mod view;

pub use archive::{ArchiveError, ArchiveList, ArchivedFile, write_archive};
pub use events::{EventTail, Events, TimedEvent, Words, events_file};
pub use folder::{
    JOB_FILE, LOG_FILE, PROFILE_FILE, RESULT_FILE, RunFolder, RunInput, RunPlan, RunStage, TRACE_FILE, own_traces,
    stage_folder,
};
pub(crate) use folder::{circumstances, new_run_id};
pub use host::Host;
pub use index::{History, HistoryError, RunLookup, Selection};
pub use provenance::{Ancestor, InputOrigin, Provenance, SourceFile, Tracer};
pub use recorded::{
    Attempt, LastRun, Recorded, RecordedCopy, RecordedGate, RecordedStage, RunState, RunSummary, StageSummary,
};
pub use references::{References, StageOf};
pub use results::{EarlierResult, LastResult};
pub use results::{LookUpError, Origin};
pub use verify::{DifferentFile, DifferentOutput, Verdict, Verification, Verified, VerifyError};
pub use view::{FailureView, RunView, StageView};
