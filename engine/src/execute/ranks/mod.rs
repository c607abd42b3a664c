//! Ranks: the processes that compute one stage together, started, heard and stopped as one.
//!
//! They are children of the stage's process and stay in its process group, which the engine ends whole; the read end of
//! the death pipe is theirs too. Each finds the variables that `torchrun` would set. Standard output is the worker
//! protocol, a line that is none of it goes to the stage's log with the rank's name, and so does standard error.
//!
//! Where the stage directs their work, rank 0 reads requests from its standard input and answers them between the
//! events on its standard output, as `{"answer": …}`, whose `bytes` says how many bytes of plain numbers follow the
//! line. Such ranks have nothing of their own to save: they go on where
//! the user wants to stop, for as long as the stage has requests, and end when their input does.
//!
//! It leaves to others: what is to be started, and what the words of the protocol mean for the stage.

mod judge;
mod nodes;
mod process;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, RawFd};
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::context::StageContext;
use crate::error::{Cause, OrFail, StageError};
use crate::memory::{Kills, Memory};
use crate::protocol::WorkerEvent;
use judge::RankFailures;
use nodes::{Nodes, without_death_pipe};
use process::{Rank, StreamItem};

/// How often it is looked whether a process has ended.
const TICK: Duration = Duration::from_millis(20);

/// After the first bad news: how long the others may take to end by themselves, so that the one that began it is told
/// from those that lost their partner.
const SETTLING: Duration = Duration::from_secs(1);

/// How long a rank that was asked to stop may take.
const GRACE: Duration = Duration::from_secs(10);

/// The same for one that has nothing to save.
const GRACE_WITH_REQUESTS: Duration = Duration::from_secs(2);

/// Processes to start, as many on each node.
#[derive(Debug, Clone, Default)]
pub struct Ranks {
    /// Machines that take part.
    pub nodes: usize,
    /// Processes on each: a rank for each device, or 1 for a launcher that starts them.
    pub per_node: usize,
    /// The program and its arguments, the same for all.
    pub command: Vec<OsString>,
    /// Variables beside those of the stage's process, the same for all.
    pub env: BTreeMap<String, OsString>,
    /// Descriptors that stay open in each of them.
    pub inherit: Vec<RawFd>,
    /// They are stopped where none has said anything for so long, on whatever stream.
    pub silence: Option<Duration>,
    /// Rank 0 reads requests from its standard input.
    pub take_requests: bool,
}

/// Gets what a rank, by its number, says of its work.
type Heard<'a, F> = dyn FnMut(usize, WorkerEvent, &mut F) -> Result<(), StageError> + 'a;

/// Something heard of the ranks.
#[derive(Debug)]
pub enum RankEvent {
    /// A rank said something.
    Said { rank: usize, event: WorkerEvent },
    /// Rank 0 answered a request.
    Answered(RankAnswer),
    /// A rank is gone, and nothing more will be heard of it.
    Ended {
        rank: usize,
        /// Whether it ended as a process does that has done its work.
        well: bool,
    },
}

/// What rank 0 answers a request.
#[derive(Debug)]
pub struct RankAnswer {
    pub value: Value,
    /// The numbers that belong to it.
    pub numbers: Vec<u8>,
}

/// Who has ranks compute: a stage, or a command.
pub trait Follower {
    /// Takes a line of theirs that is no word of the protocol.
    fn log(&self, line: &str);

    /// Whether the user asked to stop.
    fn cancelled(&self) -> bool;
}

impl Follower for StageContext {
    fn log(&self, line: &str) {
        StageContext::log(self, line);
    }

    fn cancelled(&self) -> bool {
        StageContext::cancelled(self)
    }
}

/// Ranks that were started. Dropping it kills those that are left.
#[derive(Debug)]
pub struct RunningRanks {
    ranks: Vec<Rank>,
    spoken: Receiver<(usize, StreamItem)>,
    silence: Option<Duration>,
    last_word: Instant,
    /// To the standard input of rank 0, where it reads requests.
    requests: Option<Sender<Vec<u8>>>,
    /// Whether they end where the user wants to stop, though the stage has requests.
    end_when_cancelled: bool,
    /// How long they may take to end that were asked to stop.
    grace: Duration,
    /// When they were asked to stop.
    asked: Option<Instant>,
    killed: bool,
    failures: RankFailures,
    /// Since when something is known against them.
    trouble: Option<Instant>,
    kills: Kills,
}

impl Ranks {
    /// Starts them.
    ///
    /// # Errors
    /// Fails where one cannot be started; those that were are ended.
    pub fn start(&self) -> Result<RunningRanks, StageError> {
        let nodes = if self.nodes > 1 { Some(Nodes::of_allocation(self.nodes)?) } else { None };
        let (sender, spoken) = channel();
        let mut running = RunningRanks {
            ranks: Vec::new(),
            spoken,
            silence: self.silence,
            last_word: Instant::now(),
            requests: None,
            end_when_cancelled: false,
            grace: if self.take_requests { GRACE_WITH_REQUESTS } else { GRACE },
            asked: None,
            killed: false,
            failures: RankFailures::default(),
            trouble: None,
            kills: Memory::default().kills(),
        };
        let mut rendezvous = Rendezvous::of(nodes.as_ref())?;
        if !self.take_requests || self.nodes.max(1) * self.per_node == 1 {
            rendezvous.listener = None;
        }
        for node in 0..self.nodes.max(1) {
            for local in 0..self.per_node {
                let rank = node * self.per_node + local;
                let take_requests = self.take_requests && rank == 0;
                let prefix = nodes.as_ref().map(|nodes| nodes.prefix(node, self.per_node, take_requests));
                let command = prefix.into_iter().flatten().chain(self.command.iter().cloned()).collect();
                let mut there = Ranks { command, take_requests, ..self.clone() };
                let mut env = rendezvous.variables(self, node, local);
                if let Some(listener) = rendezvous.listener.as_ref().filter(|_| rank == 0) {
                    there.inherit.push(listener.as_raw_fd());
                    env.insert(LISTENER.to_owned(), listener.as_raw_fd().to_string().into());
                }
                env.extend(nodes.as_ref().map(|_| without_death_pipe()));
                let mut rank = spawn(&there, rank, env, &sender)?;
                if let Some(stdin) = rank.take_stdin() {
                    running.requests = Some(written_to(stdin));
                }
                running.ranks.push(rank);
            }
        }
        Ok(running)
    }
}

fn spawn(
    ranks: &Ranks,
    rank: usize,
    env: BTreeMap<String, OsString>,
    sender: &Sender<(usize, StreamItem)>,
) -> Result<Rank, StageError> {
    let (started, streams) = Rank::spawn(ranks, env).map_err(|error| {
        let program = ranks.command.first().map(|program| program.display().to_string()).unwrap_or_default();
        StageError::new(Cause::Machine, format!("cannot start `{program}`")).with_source(error)
    })?;
    for stream in streams {
        let sender = sender.clone();
        thread::spawn(move || stream.listen(&mut |spoken| sender.send((rank, spoken)).is_ok()));
    }
    Ok(started)
}

/// A way to write to a rank without waiting for it to read. What is queued is written before the input ends.
fn written_to(mut stdin: ChildStdin) -> Sender<Vec<u8>> {
    let (sender, requests) = channel::<Vec<u8>>();
    // Where it is gone, that is known by its end.
    thread::spawn(move || requests.iter().try_for_each(|request| stdin.write_all(&request)));
    sender
}

/// The variable of rank 0 that names the inherited descriptor of the socket at `MASTER_PORT`.
const LISTENER: &str = "PIPELINE_LISTENER";

/// Where the ranks meet.
struct Rendezvous {
    address: String,
    port: u16,
    /// The socket at this port, for ranks on this machine: rank 0, which takes seconds to begin, takes it over.
    listener: Option<TcpListener>,
}

impl Rendezvous {
    /// On this machine, the first of those that take part. Of ranks on several machines, or that take no socket over,
    /// the port is one that is free now. Somebody else may take it before rank 0 does: the ranks say so then.
    fn of(nodes: Option<&Nodes>) -> Result<Self, StageError> {
        let (address, interface) = match nodes {
            Some(nodes) => (nodes.address.clone(), Ipv4Addr::UNSPECIFIED),
            None => (Ipv4Addr::LOCALHOST.to_string(), Ipv4Addr::LOCALHOST),
        };
        let bound =
            TcpListener::bind((interface, 0)).and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        let (port, listener) = bound.or_fail(Cause::Machine, || "no free port for the ranks to meet at".to_owned())?;
        Ok(Self { address, port, listener: nodes.is_none().then_some(listener) })
    }

    /// The variables of a process, as `torchrun` names them.
    fn variables(&self, ranks: &Ranks, node: usize, local: usize) -> BTreeMap<String, OsString> {
        let numbers = [
            ("RANK", node * ranks.per_node + local),
            ("LOCAL_RANK", local),
            ("GROUP_RANK", node),
            ("WORLD_SIZE", ranks.nodes * ranks.per_node),
            ("LOCAL_WORLD_SIZE", ranks.per_node),
            ("GROUP_WORLD_SIZE", ranks.nodes),
            ("MASTER_PORT", usize::from(self.port)),
        ];
        let numbers = numbers.into_iter().map(|(name, number)| (name.to_owned(), number.to_string().into()));
        numbers.chain([("MASTER_ADDR".to_owned(), self.address.clone().into())]).collect()
    }
}

impl RunningRanks {
    /// Waits until something is heard of a rank, and not longer than `at_most`. What is no word of the protocol is
    /// written to the log.
    pub fn hear(&mut self, at_most: Duration, follower: &impl Follower) -> Option<RankEvent> {
        let until = Instant::now() + at_most;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.spoken.recv_timeout(left.min(TICK)) {
                Ok((rank, spoken)) => {
                    if let Some(event) = self.take(rank, spoken, follower) {
                        return Some(event);
                    }
                }
                // No stream is open any more: nothing waits for the ends that are still to come.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(left.min(TICK)),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some((rank, well)) = self.ended() {
                return Some(RankEvent::Ended { rank, well });
            }
            if left.is_zero() {
                return None;
            }
        }
    }

    /// Whether all of them are gone.
    pub fn are_gone(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ending.is_some())
    }

    /// Asks them to stop; [`RunningRanks::attend`] kills what has not ended some seconds later.
    pub fn stop(&mut self) {
        if self.asked.is_none() {
            self.asked = Some(Instant::now());
            self.end_requests();
            self.signal(Signal::SIGTERM);
        }
    }

    /// Sends a request to rank 0; returns before it was read.
    pub fn request(&mut self, request: Vec<u8>) {
        if let Some(requests) = &self.requests {
            // Where it is gone, that is known by its end.
            let _ = requests.send(request);
        }
    }

    /// Has them end where the user wants to stop, since the stage has nothing to save.
    pub fn end_when_cancelled(&mut self) {
        self.end_when_cancelled = true;
    }

    /// Sends no more requests.
    pub fn end_requests(&mut self) {
        self.requests = None;
    }

    /// Waits for the next answer of rank 0. `heard` gets what they say meanwhile.
    ///
    /// # Errors
    /// As [`RunningRanks::attend`], and where they end without an answer. They are gone then.
    pub fn answer<F: Follower>(
        &mut self,
        follower: &mut F,
        heard: &mut Heard<'_, F>,
    ) -> Result<RankAnswer, StageError> {
        self.last_word = Instant::now();
        let answer = self.follow(follower, heard)?;
        answer.ok_or_else(|| StageError::new(Cause::Crashed, "the ranks ended before their work was done"))
    }

    /// Looks whether they are still there, while no answer is due.
    ///
    /// # Errors
    /// As [`RunningRanks::answer`].
    pub fn check<F: Follower>(&mut self, follower: &mut F, heard: &mut Heard<'_, F>) -> Result<(), StageError> {
        self.last_word = Instant::now();
        self.turn(Duration::ZERO, follower, heard);
        match self.trouble.is_none() && !self.are_gone() {
            true => Ok(()),
            false => self.answer(follower, heard).map(drop),
        }
    }

    /// Follows them to their end. `heard` gets what they say of their work; where one fails or dies, or the user wants
    /// to stop, all are stopped.
    ///
    /// # Errors
    /// Says which rank ended how, in its own words where it had some, or fails as `heard` did.
    pub fn attend<F: Follower>(mut self, follower: &mut F, heard: &mut Heard<'_, F>) -> Result<(), StageError> {
        while self.follow(follower, heard)?.is_some() {}
        Ok(())
    }

    /// Follows them to the next answer, or to their end.
    fn follow<F: Follower>(
        &mut self,
        follower: &mut F,
        heard: &mut Heard<'_, F>,
    ) -> Result<Option<RankAnswer>, StageError> {
        while !self.are_gone() {
            if let Some(answer) = self.turn(TICK, follower, heard) {
                return Ok(Some(answer));
            }
        }
        let ran_out = self.kills.rose_until(Memory::default().kills());
        std::mem::take(&mut self.failures).conclude(ran_out, follower.cancelled()).map(|()| None)
    }

    /// Takes the next thing that is heard of them, an answer if it is one.
    fn turn<F: Follower>(
        &mut self,
        at_most: Duration,
        follower: &mut F,
        heard: &mut Heard<'_, F>,
    ) -> Option<RankAnswer> {
        let was_asked = self.asked.is_some();
        match self.hear(at_most, follower) {
            Some(RankEvent::Said { rank, event: WorkerEvent::Failed(failure) }) => {
                self.failures.failed(rank, failure);
                self.trouble.get_or_insert_with(Instant::now);
            }
            Some(RankEvent::Said { rank, event }) => {
                if let Err(error) = heard(rank, event, follower) {
                    self.failures.refused(error);
                    self.stop();
                }
            }
            Some(RankEvent::Answered(answer)) => return Some(answer),
            Some(RankEvent::Ended { well: true, .. }) => {}
            Some(RankEvent::Ended { rank, well: false }) => {
                self.failures.ended(rank, self.ranks.len(), &self.ranks[rank], was_asked);
                self.trouble.get_or_insert_with(Instant::now);
            }
            None => {}
        }
        self.keep_order(follower.cancelled());
        None
    }

    /// Stops them where that is due.
    fn keep_order(&mut self, cancelled: bool) {
        let over = |since: Option<Instant>, limit: Duration| since.is_some_and(|since| since.elapsed() >= limit);
        if self.asked.is_none() && over(Some(self.last_word), self.silence.unwrap_or(Duration::MAX)) {
            self.failures.silent(self.ranks.len(), self.last_word.elapsed());
            self.stop();
        }
        // With requests it is the stage that looks whether the user wants to stop, unless it leaves that to the ranks.
        let ends_by_itself = self.requests.is_none() || self.end_when_cancelled;
        if over(self.trouble, SETTLING) || (cancelled && ends_by_itself) {
            self.stop();
        }
        // Where the user wants to stop, the engine decides how long that may take, and ends this process with the
        // ranks.
        if !self.killed && !cancelled && over(self.asked, self.grace) {
            self.killed = true;
            self.signal(Signal::SIGKILL);
        }
    }

    fn take(&mut self, rank: usize, spoken: StreamItem, follower: &impl Follower) -> Option<RankEvent> {
        self.last_word = Instant::now();
        match spoken {
            StreamItem::Event(event) => return Some(RankEvent::Said { rank, event }),
            StreamItem::Answer(answer) => return Some(RankEvent::Answered(answer)),
            StreamItem::Line(line) => {
                match self.ranks.len() {
                    1 => follower.log(&line),
                    _ => follower.log(&format!("rank {rank}: {line}")),
                }
                self.ranks[rank].remember(line);
            }
            StreamItem::End => self.ranks[rank].open_streams -= 1,
        }
        None
    }

    /// A rank that was not known to be gone, and whether it ended well.
    fn ended(&mut self) -> Option<(usize, bool)> {
        let ended = self.ranks.iter_mut().enumerate().filter(|(_, rank)| rank.ending.is_none());
        let mut ended = ended.filter_map(|(number, rank)| Some((number, rank.look()?)));
        ended.next().map(|(number, ending)| (number, ending.is_well()))
    }

    fn signal(&self, signal: Signal) {
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }
}

impl Drop for RunningRanks {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ranks.iter_mut().for_each(Rank::reap);
    }
}

#[cfg(test)]
mod tests;
