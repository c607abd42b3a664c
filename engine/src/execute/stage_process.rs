//! The stage process: what `pipeline __stage JOB` does.
//!
//! It reads a job file, runs one stage kind, and speaks the worker protocol on standard output. It knows no plan and no
//! other stage.

#![allow(unsafe_code, reason = "between fork and exec, descriptors, and signals")]

use std::any::Any;
use std::fs::{self, File};
use std::io::{self, BufWriter};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use nix::libc::c_int;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use profile::{Process, Profile, TraceWriter};

use super::private_paths::PrivatePaths;
use super::{death_pipe, inherited, stragglers};
use crate::context::{CANCELLED, Outcome, StageContext, Voice, damaged_object, say};
use crate::error::{Cause, Failure, OrFail, StageError};
use crate::file::tree::Node;
use crate::history::{PROFILE_FILE, TRACE_FILE};
use crate::limits;
use crate::parameter::Reader;
use crate::protocol::{Job, PROTOCOL, ProfileRequest, WorkerEvent};
use crate::stage::{Registry, Stage};

/// Runs the job of a file and says how it ended, on standard output and by the exit code.
pub fn main(registry: &Registry, job: &Path) -> ExitCode {
    stragglers::is_a_stages();
    inherited::seal();
    death_pipe::obey();
    heed_signals();
    say(&WorkerEvent::Started { protocol: PROTOCOL });
    let mut private = PrivatePaths::default();
    let ended = catch_unwind(AssertUnwindSafe(|| run(registry, job, &mut private)))
        .unwrap_or_else(|panic| Err(panicked(&*panic)));
    match ended {
        Ok(Outcome { outputs, how }) => {
            say(&WorkerEvent::Finished { outputs, how });
            ExitCode::SUCCESS
        }
        Err(error) => {
            say(&private.hide_in(failure(&error)));
            ExitCode::FAILURE
        }
    }
}

fn run(registry: &Registry, path: &Path, private: &mut PrivatePaths) -> Result<Outcome, StageError> {
    let job = read_job(path)?;
    *private = PrivatePaths::of(&job);
    let bound = bind(registry, &job)?;
    let mut context = StageContext::new(job, Voice::Protocol)?;
    let recording = Recorder::of(&context);
    let ended = bound.run(&mut context).and_then(|()| context.finish());
    // Also that of a stage that failed; and a profile that cannot be written is no reason to fail.
    if let Some(Err(error)) = recording.map(Recorder::write) {
        say(&WorkerEvent::Warning { message: format!("cannot write the profile: {error}") });
    }
    ended
}

pub(super) fn read_job(path: &Path) -> Result<Job, StageError> {
    let text = fs::read(path).or_fail(Cause::Internal, || format!("cannot read job `{}`", path.display()))?;
    let job: Job =
        serde_json::from_slice(&text).or_fail(Cause::Internal, || format!("`{}` is no job", path.display()))?;
    if job.protocol != PROTOCOL {
        let message = format!("the job speaks protocol {}, this program {PROTOCOL}", job.protocol);
        return Err(StageError::internal(message));
    }
    Ok(job)
}

pub(super) fn bind(registry: &Registry, job: &Job) -> Result<Box<dyn Stage>, StageError> {
    let unknown = || StageError::internal(format!("this program has no stage kind `{}`", job.kind));
    let kind = registry.get(&job.kind).ok_or_else(unknown)?;
    let mut reader = Reader::default();
    let bound = kind.read(&Node::from_json(&job.parameters), &mut reader);
    bound.filter(|_| reader.problems.is_empty()).ok_or_else(|| {
        let problems: Vec<_> = reader.problems.into_iter().map(|problem| problem.message).collect();
        StageError::internal(format!("the plan let wrong parameters through: {}", problems.join("; ")))
    })
}

/// A request to stop sets a flag that the stage looks at between steps; the engine kills the process if it takes too
/// long.
fn heed_signals() {
    extern "C" fn cancel(_: c_int) {
        CANCELLED.store(true, Ordering::Relaxed);
    }
    let action = SigAction::new(SigHandler::Handler(cancel), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler only stores to an atomic.
        let _ = unsafe { sigaction(signal, &action) };
    }
}

pub(super) fn failure(error: &StageError) -> WorkerEvent {
    WorkerEvent::Failed(Failure { object: damaged_object(error), ..error.into() })
}

pub(super) fn panicked(panic: &(dyn Any + Send)) -> StageError {
    let words = limits::words(panic);
    if let Some(refused) = words.and_then(limits::refused) {
        return refused;
    }
    StageError::internal(format!("the stage panicked: {}", words.unwrap_or("without a message")))
        .with_help("this is a defect of the program; the log has the place")
}

// What a stage process leaves behind where its time is recorded: `profile.json` and `trace.json` in its run folder.

/// A recording that goes on, and where it is to be written.
pub(super) struct Recorder {
    profile: Profile,
    request: ProfileRequest,
    stage: String,
    folder: PathBuf,
}

impl Recorder {
    /// That of a stage, where there is one.
    pub(super) fn of(context: &StageContext) -> Option<Self> {
        let request = context.profile_request()?;
        let (stage, folder) = (context.stage().to_owned(), context.run_folder().to_owned());
        Some(Self { profile: context.profile().clone(), request, stage, folder })
    }

    /// Ends the recording and writes it.
    pub(super) fn write(self) -> io::Result<()> {
        let Some(recording) = self.profile.finish() else { return Ok(()) };
        fs::create_dir_all(&self.folder)?;
        let summary = serde_json::to_vec_pretty(&recording.summary())?;
        fs::write(self.folder.join(PROFILE_FILE), summary)?;
        let process = Process { number: self.request.process, name: self.stage };
        let mut writer = TraceWriter::new(BufWriter::new(File::create(self.folder.join(TRACE_FILE))?))?;
        for line in recording.trace(&process, self.request.origin_unix_micros) {
            writer.line(&line)?;
        }
        writer.finish()
    }
}
