//! Which of the ranks that failed began it, and how that is told.
//!
//! Where one dies, the others lose their partner and fail as well, some of them sooner than its end is known. A death
//! from outside comes first, then what the ranks say themselves, then an end without reporting an error.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::process::{Ending, Rank};
use crate::error::{Cause, Failure, StageError, of_words};

/// What is known against the ranks.
#[derive(Debug, Default)]
pub(super) struct RankFailures {
    /// The stage itself would not go on.
    refused: Option<StageError>,
    /// Nothing was heard for too long.
    silent: Option<StageError>,
    /// Died of a signal that nobody here sent.
    died: Option<(Signal, StageError)>,
    /// Failed in its own words.
    failed: Option<StageError>,
    /// Stopped in its own words, as it was asked to.
    cancelled: Option<StageError>,
    /// Ended without reporting an error.
    ended: Option<StageError>,
}

impl RankFailures {
    /// The stage would not go on.
    pub(super) fn refused(&mut self, error: StageError) {
        self.refused.get_or_insert(error);
    }

    /// A rank says that it failed.
    pub(super) fn failed(&mut self, rank: usize, failure: Failure) {
        let Failure { cause, messages, help, .. } = failure;
        let place = if cause == Cause::Cancelled { &mut self.cancelled } else { &mut self.failed };
        if place.is_some() {
            return;
        }
        let chained = messages.iter().rev().fold(None, |beneath: Option<StageError>, message| {
            let error = StageError::new(cause, message);
            Some(match beneath {
                Some(beneath) => error.with_source(beneath),
                None => error,
            })
        });
        let mut error = chained.unwrap_or_else(|| StageError::new(cause, format!("rank {rank} failed")));
        error.help = help;
        *place = Some(error);
    }

    /// No rank has sent a message for this long.
    pub(super) fn silent(&mut self, ranks: usize, silence: Duration) {
        let who = if ranks == 1 { "the worker has not".to_owned() } else { format!("none of {ranks} ranks has") };
        let message = format!("{who} sent a message for {} s: stopped", silence.as_secs());
        self.silent.get_or_insert(StageError::new(Cause::Crashed, message));
    }

    /// A rank ended badly; `was_asked`: after it was asked to stop.
    pub(super) fn ended(&mut self, number: usize, of: usize, rank: &Rank, was_asked: bool) {
        let who = if of == 1 { "the worker".to_owned() } else { format!("rank {number} of {of}") };
        match rank.ending {
            Some(Ending::Signal(signal)) if !was_asked => {
                let signal = Signal::try_from(signal).unwrap_or(Signal::SIGKILL);
                let how = if signal == Signal::SIGKILL { "was killed" } else { "died" };
                let message = format!("{who} (process {}) {how} ({signal})", rank.id());
                if self.died.is_none() {
                    self.died = Some((signal, with_last_words(message, rank)));
                }
            }
            Some(Ending::Code(code)) => {
                let message = format!("{who} ended with exit code {code}");
                self.ended.get_or_insert_with(|| with_last_words(message, rank));
            }
            Some(Ending::Signal(_)) | None => {
                let message = format!("{who} had to be killed");
                self.ended.get_or_insert_with(|| with_last_words(message, rank));
            }
        }
    }

    /// The failure of the whole, if there is one; `ran_out`: the kernel has killed a process because memory ran out
    /// meanwhile; `asked_to_stop`: by the user.
    pub(super) fn conclude(self, ran_out: bool, asked_to_stop: bool) -> Result<(), StageError> {
        let Self { refused, silent, died, failed, cancelled, ended } = self;
        if let Some(error) = refused {
            return Err(error);
        }
        if asked_to_stop {
            let stopped = failed.is_some() || died.is_some() || ended.is_some();
            let in_general = stopped.then(|| StageError::new(Cause::Cancelled, "the ranks were stopped"));
            return cancelled.or(in_general).map_or(Ok(()), Err);
        }
        // A library aborts itself where a partner is gone; that is no death from outside.
        let (outside, aborted) = match died {
            Some((Signal::SIGABRT, error)) => (None, Some(error)),
            Some((Signal::SIGKILL, error)) if ran_out => {
                let message = format!("{}, since memory ran out", error.message);
                (Some(StageError { cause: Cause::OutOfMemory, message, ..error }), None)
            }
            Some((_, error)) => (Some(error), None),
            None => (None, None),
        };
        let first = [outside, failed, aborted, silent, ended, cancelled].into_iter().flatten().next();
        first.map_or(Ok(()), Err)
    }
}

/// A failure without reporting an error of the protocol, with what the rank printed last and the cause that gives away.
fn with_last_words(message: String, rank: &Rank) -> StageError {
    let cause = rank.last_lines().rev().find_map(of_words).unwrap_or(Cause::Crashed);
    let lines: Vec<&str> = rank.last_lines().collect();
    let error = StageError::new(cause, message);
    match lines.is_empty() {
        true => error,
        false => error.with_source(format!("its last output:\n{}", lines.join("\n"))),
    }
}
