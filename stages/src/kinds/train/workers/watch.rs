//! The watch over the other workers: rank 0 looks, while it waits for them, whether they are alive and do something.
//!
//! A worker that waits for others may wait for long. One that does not must begin something new or use a processor; one
//! that does neither for the time allowed is stopped, or waits for something that does not come.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::error::{Cause, StageError};
use engine::execute::{Member, MemberEnd};
use engine::memory::{Kills, Memory};
use model::trainer::Phase;
use nix::sys::signal::Signal;

use super::shared_memory::SharedMemory;

/// The longest time between two looks that counts: where this process itself stood still, the others need not have.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The watch of rank 0. Dropping it kills the others.
pub(super) struct Watch {
    shared: Arc<SharedMemory>,
    watched: Vec<Watched>,
    limit: Duration,
    last_look: Option<Instant>,
    machine: Memory,
    kills: Kills,
}

struct Watched {
    member: Member,
    /// What it had begun, and its time of processors, when it last did something.
    last_sign: (u32, Option<u64>),
    silent: Duration,
}

impl Watch {
    /// A watch over nobody yet; who does nothing for longer than `limit` hangs.
    pub(super) fn new(shared: Arc<SharedMemory>, limit: Duration) -> Self {
        let machine = Memory::default();
        let kills = machine.kills();
        Self { shared, watched: Vec::new(), limit, last_look: None, machine, kills }
    }

    /// Watches one more.
    pub(super) fn add(&mut self, member: Member) {
        self.watched.push(Watched { member, last_sign: (0, None), silent: Duration::ZERO });
    }

    /// Looks at those that have not come to a meeting, for which rank 0 waits.
    ///
    /// # Errors
    /// Fails where one of them has ended or hangs.
    pub(super) fn look(&mut self, meeting: u64) -> Result<(), StageError> {
        let now = Instant::now();
        let passed = self.last_look.replace(now).map_or(Duration::ZERO, |last| (now - last).min(LONGEST_PAUSE));
        for watched in &mut self.watched {
            let state = self.shared.state(watched.member.rank);
            if state.arrived() >= meeting {
                watched.silent = Duration::ZERO;
                continue;
            }
            let place = Place { shared: &self.shared, rank: watched.member.rank };
            match watched.member.ended() {
                Ok(Some(end)) => return Err(place.ended(end, self.kills.rose_until(self.machine.kills()))),
                Ok(None) => {}
                Err(error) => return Err(StageError::internal("cannot look at a worker").with_source(error)),
            }
            let sign = (state.beats(), processor_time(watched.member.id()));
            if sign != watched.last_sign {
                (watched.last_sign, watched.silent) = (sign, Duration::ZERO);
                continue;
            }
            watched.silent += passed;
            if watched.silent > self.limit {
                return Err(place.hangs(watched.member.id(), self.limit));
            }
        }
        Ok(())
    }

    /// Looks whether the workers' devices, which rank 0's has waited for so long, may still come to an end.
    ///
    /// # Errors
    /// Fails where that has taken too long, though every worker is there: each waits for the others.
    pub(super) fn look_at_devices(&self, waited: Duration) -> Result<(), StageError> {
        if waited <= self.limit {
            return Ok(());
        }
        let state = self.shared.state(0);
        let message = format!(
            "the devices of {} workers have been at {} of step {} for {:.0} s and do not come to an end",
            self.shared.size(),
            meeting(state.phase()),
            state.step(),
            waited.as_secs_f64()
        );
        Err(StageError::new(Cause::Crashed, message)
            .with_help("run again, or set `retries`: it resumes from the last saved step. NCCL_DEBUG=INFO tells what they wait for"))
    }
}

/// Where a worker was, in words.
struct Place<'a> {
    shared: &'a SharedMemory,
    rank: usize,
}

impl Place<'_> {
    fn ended(&self, end: MemberEnd, memory_ran_out: bool) -> StageError {
        let place = self.in_words();
        if let Some(failure) = end.failure {
            let StageError { cause, message, help, .. } = failure;
            return StageError { help, ..StageError::new(cause, format!("{place}: {message}")) };
        }
        let signal = end.status.signal().map(|number| Signal::try_from(number).map_or("a signal", Signal::as_str));
        let (cause, ended) = match (signal, end.status.code()) {
            (Some("SIGKILL"), _) if memory_ran_out => {
                (Cause::OutOfMemory, "was killed since memory ran out".to_owned())
            }
            (Some(signal), _) => (Cause::Crashed, format!("was killed ({signal})")),
            (None, code) => (Cause::Crashed, format!("exited with {}", code.unwrap_or_default())),
        };
        let error = StageError::new(cause, format!("{place}: it {ended}"));
        match cause.advice() {
            Some(advice) => error.with_help(advice),
            None => error.with_help("run again, or set `retries`: it resumes from the last saved step"),
        }
    }

    fn hangs(&self, process: u32, limit: Duration) -> StageError {
        let stands = match state_of_process(process) {
            Some('T' | 't') => "is stopped (SIGSTOP)",
            Some('D') => "waits for a disk",
            _ => "hangs",
        };
        let message = format!(
            "{}: its process {process} {stands}, and has done nothing for {:.0} s",
            self.in_words(),
            limit.as_secs_f64()
        );
        StageError::new(Cause::Crashed, message).with_help(
            "run again, or set `retries`: it resumes from the last saved step; `watchdog_seconds` is how \
                long a worker may do nothing",
        )
    }

    /// `rank 1 of 2 is lost in step 7, computing gradients, while rank 0 waits for it in the sum of losses`
    fn in_words(&self) -> String {
        let (state, leader) = (self.shared.state(self.rank), self.shared.state(0));
        let step = match state.step().max(leader.step()) {
            0 => "before the first step".to_owned(),
            step => format!("in step {step}"),
        };
        format!(
            "rank {} of {} is lost {step}, {}, while rank 0 waits for it in {}",
            self.rank,
            self.shared.size(),
            doing(state.phase()),
            meeting(leader.phase())
        )
    }
}

fn doing(phase: Phase) -> &'static str {
    match phase {
        Phase::Start => "loading the model",
        Phase::Gradients => "computing gradients",
        Phase::SumOfLosses | Phase::SumOfGradients | Phase::SumOfValidation => "adding up with the others",
        Phase::Update => "updating the trainable parameters",
        Phase::Audit => "comparing weights",
        Phase::Validation => "validating",
    }
}

fn meeting(phase: Phase) -> &'static str {
    match phase {
        Phase::Start => "the start",
        Phase::Gradients | Phase::SumOfLosses => "the sum of losses",
        Phase::SumOfGradients | Phase::Update => "the sum of gradients",
        Phase::Audit => "the comparison of weights",
        Phase::Validation | Phase::SumOfValidation => "the sum of the validation loss",
    }
}

/// The state of a process and its time of processors, in ticks.
fn stat(process: u32) -> Option<(char, u64)> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before it is in brackets, and may hold any.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let ticks = fields.skip(10).take(2).map_while(|ticks| ticks.parse::<u64>().ok());
    Some((state, ticks.sum()))
}

fn processor_time(process: u32) -> Option<u64> {
    stat(process).map(|(_, ticks)| ticks)
}

fn state_of_process(process: u32) -> Option<char> {
    stat(process).map(|(state, _)| state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_tells_of_a_process() {
        let (_, before) = stat(std::process::id()).expect("this process is there");
        let began = Instant::now();
        while processor_time(std::process::id()) == Some(before) {
            assert!(began.elapsed() < Duration::from_secs(60), "time of processors stands still");
        }
        assert_eq!(stat(u32::MAX), None);
    }
}
