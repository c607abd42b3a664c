//! The conversation with ranks that stay: requests go to rank 0, which passes them on to the others, and its answers
//! come back in the order of the requests.
//!
//! A request is a line of JSON, whose `bytes` says how many bytes of plain numbers follow it
//! (`workers/torch/src/pipeline_torch_worker/requests.py`). Not every request has an answer, and several may be on
//! their way at a time: whoever sends them knows which are answered.

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::execute::{Follower, RankAnswer, RunningRanks};
use engine::protocol::WorkerEvent;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::job::Job;
use super::work::Work;

/// Whether trained values have the names that the base's files give them: of no interest in a result. transformers may
/// hold several of a file's tensors as one.
pub(crate) const NAMED_AS_IN_FILES: &str = "named_as_in_files";

/// Ranks that wait for requests.
pub(crate) struct Connection {
    running: RunningRanks,
}

/// The line of a request.
#[derive(Serialize)]
struct Header<'a, R> {
    #[serde(flatten)]
    request: &'a R,
    bytes: usize,
}

impl Connection {
    /// Starts the ranks, which open what the job names, and returns what they say of themselves, which is recorded with
    /// the result.
    ///
    /// # Errors
    /// The worker's failure.
    pub(crate) fn open(
        work: &Work,
        job: &Job,
        context: &mut StageContext,
    ) -> Result<(Self, Map<String, Value>), StageError> {
        let mut connection = Self::start(work, job)?;
        let described: Map<String, Value> = connection.answer(context)?;
        context.record("threads", context.threads());
        for (name, value) in described.iter().filter(|(name, _)| *name != NAMED_AS_IN_FILES) {
            context.record(name, value.clone());
        }
        Ok((connection, described))
    }

    /// Starts the ranks, whose first answer is what they say of themselves.
    ///
    /// # Errors
    /// Fails where one cannot be started.
    pub(crate) fn start(work: &Work, job: &Job) -> Result<Self, StageError> {
        Ok(Self { running: work.start(job)? })
    }

    /// Has the ranks end where the user wants to stop, also while an answer is waited for.
    pub(crate) fn end_when_cancelled(&mut self) {
        self.running.end_when_cancelled();
    }

    /// Sends a request with the numbers that belong to it; returns before it was read.
    pub(crate) fn request(&mut self, request: &impl Serialize, payload: &[u8]) {
        let header = Header { request, bytes: payload.len() };
        let mut message = serde_json::to_vec(&header).expect("a request is plain data");
        message.push(b'\n');
        message.extend_from_slice(payload);
        self.running.request(message);
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// The failure of the rank that began it.
    pub(crate) fn answer<T: DeserializeOwned>(&mut self, context: &mut StageContext) -> Result<T, StageError> {
        let profile = context.profile().clone();
        let _phase = profile.phase("torch worker");
        read(self.running.answer(context, &mut hear)?).map(|(answer, _)| answer)
    }

    /// Waits for the next answer, which belongs to no stage, and the numbers with it.
    ///
    /// # Errors
    /// As [`Connection::answer`].
    pub(crate) fn numbers<T: DeserializeOwned>(
        &mut self,
        follower: &mut impl Follower,
    ) -> Result<(T, Vec<u8>), StageError> {
        read(self.running.answer(follower, &mut log)?)
    }

    /// Looks whether the ranks are still there, while no answer is due.
    ///
    /// # Errors
    /// As [`Connection::answer`].
    pub(crate) fn check(&mut self, follower: &mut impl Follower) -> Result<(), StageError> {
        self.running.check(follower, &mut log)
    }

    /// Ends the ranks, all of whose answers were read, and waits for their end.
    ///
    /// # Errors
    /// The failure of the rank that began it.
    pub(crate) fn close(mut self, context: &mut StageContext) -> Result<(), StageError> {
        self.request(&serde_json::json!({ "request": "close" }), &[]);
        self.running.end_requests();
        self.running.attend(context, &mut hear)
    }
}

fn read<T: DeserializeOwned>(RankAnswer { value, numbers }: RankAnswer) -> Result<(T, Vec<u8>), StageError> {
    let answer = serde_json::from_value(value);
    let answer = answer.or_fail(Cause::Internal, || {
        "the torch worker's response does not have the expected \
        format"
            .to_owned()
    });
    Ok((answer?, numbers))
}

/// Passes a warning on where there is no stage.
fn log<F: Follower>(_: usize, event: WorkerEvent, follower: &mut F) -> Result<(), StageError> {
    if let WorkerEvent::Warning { message } = event {
        follower.log(&format!("warning: {message}"));
    }
    Ok(())
}

/// Passes on what is for the user.
fn hear(_: usize, event: WorkerEvent, context: &mut StageContext) -> Result<(), StageError> {
    match event {
        WorkerEvent::Warning { .. } | WorkerEvent::Report { .. } | WorkerEvent::Progress { .. } => context.emit(event),
        _ => {}
    }
    Ok(())
}
