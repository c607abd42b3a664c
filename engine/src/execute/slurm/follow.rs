//! A job to its end: one thread that reads straight down. How it begins is `begin`'s.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::time::{Duration, Instant};

use super::begin::FollowStart;
use super::client::Refusal;
use super::follower::{End, Follower};
use super::judge::{forgotten, verdict};
use super::request::OUTPUT_FILE;
use super::state::{Details, JobPhase, Seen};
use crate::execute::submission::{EVENTS_FILE, Left, Stopped};
use crate::execute::{Ending, JobEvent, Message, ProcessExit, Stop};
use crate::protocol::WorkerEvent;

/// How often the files of a job are looked at.
const LOOK: Duration = Duration::from_millis(200);

/// How long the word of a job may take to reach this machine over a network file system, once Slurm reports that the
/// job is over.
const LAST_WORDS: Duration = Duration::from_secs(8);

/// Answers in a row without a job before it counts as forgotten.
const MISSING: u32 = 3;

/// How long a job is heard before its lock is looked for: network file systems remember for some seconds what was.
const LOCKS_AFTER: Duration = Duration::from_secs(10);

/// How long a job that is to be ended at once is waited for, where the controller does not answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A wait that is over sooner is not worth a word.
const PASSING: Duration = Duration::from_secs(3);

/// A controller that is silent for less is not worth a word.
const SILENCE: Duration = Duration::from_secs(20);

impl Follower {
    /// Follows the job to its end and tells it.
    pub(super) fn run(mut self) {
        let begun = if self.job.adopt.is_some() { self.adopt() } else { self.submit() };
        let end = match begun {
            FollowStart::Follow(id) => {
                self.queue.watch(&id, self.job.settings.poll());
                let end = self.follow(&id);
                self.queue.forget(&id);
                end
            }
            FollowStart::Ended(end) => end,
        };
        self.relay();
        let stage = self.stage;
        match end {
            End::Over(exit) => {
                self.take_over_files();
                self.records.remove(&self.record.key);
                self.tell(Message::Exited { stage, exit });
            }
            End::Gone(because) => {
                self.records.remove(&self.record.key);
                self.tell(Message::Gone { stage, because });
            }
            End::LetGo => {
                let name = self.record.job.as_deref().unwrap_or(&self.record.name);
                let message =
                    format!("Slurm job {name} could not be stopped and continues; the next run takes it over");
                self.tell(Message::Said { stage, event: WorkerEvent::Warning { message } });
                self.tell(Message::Exited { stage, exit: self.exit(Ending::Code(1), None) });
            }
            End::Unheard => {}
        }
    }

    /// Hears a job until it is over.
    fn follow(&mut self, id: &str) -> End {
        loop {
            self.relay();
            let over = self.left().and_then(|left| self.weigh(id, left)).or_else(|| self.look(id));
            if let Some(exit) = over {
                return End::Over(exit);
            }
            if !self.pause(LOOK) {
                return End::Unheard;
            }
            if self.stop.is_some() && !self.stopped {
                self.pass_on_stop(id);
            }
            if self.kill_since.is_some_and(|since| since.elapsed() > PATIENCE) && !self.stopped {
                return End::LetGo;
            }
        }
    }

    /// What the keeper's last word comes to; `None` where the job may go on.
    fn weigh(&mut self, id: &str, left: Left) -> Option<ProcessExit> {
        let final_word = match left.stopped {
            None | Some(Stopped::Timeout) => true,
            Some(Stopped::Signal) => self.stop.is_some(),
        };
        if final_word {
            return Some(exit_of(left));
        }
        if self.requeued_after == Some(left.restart) || self.ask_again_at.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        // Somebody else told it to stop: who, and whether it is started again, the cluster knows.
        self.ask_again_at = Some(Instant::now() + Duration::from_secs(1));
        let patience = *self.over_since.get_or_insert_with(Instant::now);
        let details = match self.client.details(id) {
            Err(_) => return None,
            Ok(details) => details.unwrap_or_default(),
        };
        match details.seen().standing() {
            JobPhase::Waits => {
                self.requeued_after = Some(left.restart);
                self.over_since = None;
                self.news(id, JobEvent::Requeued { reason: details.reason });
                return None;
            }
            JobPhase::Runs if patience.elapsed() < LAST_WORDS => return None,
            JobPhase::Runs | JobPhase::Ended => {}
        }
        let because = verdict(id, &details, true, &self.record.folder.join(OUTPUT_FILE));
        Some(ProcessExit { verdict: Some(because), ..exit_of(left) })
    }

    /// What the queue says; an end where the job is over and left no word.
    fn look(&mut self, id: &str) -> Option<ProcessExit> {
        let sighting = self.queue.sighting(id);
        if let Some((since, words)) = &sighting.silent {
            if since.elapsed() >= SILENCE {
                self.waits(Some(id.to_owned()), "the controller does not answer", words);
            }
            return None;
        }
        if sighting.missing >= MISSING {
            return self.missing(id);
        }
        let seen = sighting.seen?;
        match seen.standing() {
            JobPhase::Waits => self.look_at_waiting(id, &seen),
            JobPhase::Runs => {
                self.has_run = true;
                self.over_since = None;
                let nodes = seen.nodes.clone();
                self.news(id, JobEvent::Running { nodes });
                self.look_at_locks(&seen.nodes);
                None
            }
            JobPhase::Ended => self.ended(id, &seen),
        }
    }

    fn look_at_waiting(&mut self, id: &str, seen: &Seen) -> Option<ProcessExit> {
        if let Some(verdict) = seen.never_begins(id) {
            let _ = self.client.cancel(id);
            return Some(self.exit_with(verdict));
        }
        if self.has_run {
            self.has_run = false;
            self.news(id, JobEvent::Requeued { reason: seen.reason.clone() });
        }
        // Every job waits for a moment, and most for no more.
        if self.began.elapsed() >= PASSING {
            let reason = seen.reason.split(',').next().unwrap_or_default().to_owned();
            self.news(id, JobEvent::Waiting { reason, meaning: seen.meaning().to_owned() });
        }
        None
    }

    /// Slurm reports that the job is over: its own word may be on its way.
    fn ended(&mut self, id: &str, seen: &Seen) -> Option<ProcessExit> {
        let since = *self.over_since.get_or_insert_with(Instant::now);
        let killed = self.stop == Some(Stop::Kill) || (self.stop.is_some() && !self.has_run);
        if since.elapsed() < LAST_WORDS && !killed {
            return None;
        }
        let details = self.client.details(id).ok().flatten();
        let details = details.unwrap_or_else(|| Details {
            state: seen.state.clone(),
            nodes: seen.nodes.clone(),
            reason: seen.reason.clone(),
            ..Details::default()
        });
        Some(self.exit_with(verdict(id, &details, false, &self.record.folder.join(OUTPUT_FILE))))
    }

    /// Slurm does not know the job any more.
    fn missing(&mut self, id: &str) -> Option<ProcessExit> {
        let since = *self.over_since.get_or_insert_with(Instant::now);
        if since.elapsed() < LAST_WORDS || self.lives() {
            return None;
        }
        let accounted = self.client.accounted(id).filter(|seen| seen.standing() == JobPhase::Ended);
        let verdict = accounted.map_or_else(
            || forgotten(id),
            |seen| {
                let details =
                    Details { state: seen.state, nodes: seen.nodes, reason: seen.reason, ..Details::default() };
                verdict(id, &details, false, &self.record.folder.join(OUTPUT_FILE))
            },
        );
        Some(self.exit_with(verdict))
    }

    /// Tells the cluster to stop the job.
    fn pass_on_stop(&mut self, id: &str) {
        let told = match self.stop {
            None => return,
            Some(Stop::Ask) if self.has_begun() => self.client.ask(id),
            Some(Stop::Ask) => self.client.cancel(id),
            Some(Stop::Kill) => self.client.kill(id),
        };
        match told {
            // What it refuses for good is a job that is over.
            Ok(()) | Err(Refusal::Never(_)) => self.stopped = true,
            Err(Refusal::NotNow(words) | Refusal::NoSlurm(words)) => {
                self.waits(Some(id.to_owned()), "it cannot be stopped", &words);
            }
        }
        self.queue.hurry();
    }

    /// Whether its keeper has spoken.
    fn has_begun(&self) -> bool {
        self.has_run || self.record.folder.join(EVENTS_FILE).exists()
    }

    /// Passes on what the job said since the last look.
    fn relay(&mut self) {
        for line in self.events.lines() {
            if let Ok(event) = serde_json::from_slice(&line) {
                self.heard_since.get_or_insert_with(Instant::now);
                self.tell(Message::Said { stage: self.stage, event });
            }
        }
        if let Some((tail, log)) = &mut self.log {
            let bytes = tail.bytes();
            let mut options = OpenOptions::new();
            if let (false, Ok(mut log)) = (bytes.is_empty(), options.create(true).append(true).open(log)) {
                let _ = log.write_all(&bytes);
            }
        }
    }

    /// The keeper of a job that speaks holds its lock. Where that is free here, the file system's locks end at the
    /// machine.
    fn look_at_locks(&mut self, nodes: &str) {
        let due = self.heard_since.is_some_and(|since| since.elapsed() >= LOCKS_AFTER);
        if self.locks_were_looked_at || !due {
            return;
        }
        self.locks_were_looked_at = true;
        if !self.lives() && self.left().is_none() {
            let message = format!(
                "the lock that the job holds on {nodes} is not seen here: the file system of the home does not share locks between machines, \
                 so that nothing but the record of the job keeps another run from its working state"
            );
            self.tell(Message::Said { stage: self.stage, event: WorkerEvent::Warning { message } });
        }
    }

    /// What the stage left in the folder of the run that submitted it belongs into this run's too: profiles, curves.
    fn take_over_files(&self) {
        let Some((_, log)) = &self.log else { return };
        let Some(own) = log.parent() else { return };
        for entry in fs::read_dir(&self.record.stage_folder).into_iter().flatten().flatten() {
            let (from, to) = (entry.path(), own.join(entry.file_name()));
            if from.is_file() && !to.exists() {
                // They are for people; a result is none the worse without.
                let _ = fs::copy(from, to);
            }
        }
    }
}

fn exit_of(left: Left) -> ProcessExit {
    let Left { ending, seconds, peak_memory_bytes, cpu_seconds, verdict, host, .. } = left;
    let duration = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
    ProcessExit {
        ending,
        ran: duration(seconds),
        peak_memory_bytes,
        cpu: duration(cpu_seconds),
        verdict,
        host: Some(host),
    }
}
