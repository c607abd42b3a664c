//! Shows a run as it goes, on standard error: bars on a terminal, one line per event in a pipe.
//!
//! It leaves to others: what the events mean for the run (`engine`), and the words for failures (`render`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use devices::DeviceKind;
use engine::executor::ExecutorKind;
use engine::explain::Reason;
use engine::protocol::WorkerEvent;
use engine::run::event::{Compared, RunEvent, WaitsFor};
use engine::visible::{on_one_line, visible};

use crate::bars::{Bars, StageBar};
use crate::stream::Stream;
use crate::terminal::{self, Look};
use crate::words;

/// How much to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verbosity {
    /// Errors and results alone.
    Quiet,
    /// Each stage's states and how far it is.
    Normal,
    /// Also every metric and checkpoint.
    Verbose,
}

/// How many cached stages are named one by one.
const CACHED_NAMED: usize = 20;

/// How long a stage in a pipe stays silent about how far it is.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Shows the stages of one run.
pub(crate) struct Progress {
    look: Look,
    verbosity: Verbosity,
    bars: Option<Bars>,
    /// Where answers are shown as they grow, if a person watches.
    stream: Option<Stream>,
    running: BTreeMap<String, Running>,
    /// How many stages were cached so far.
    cached: usize,
}

struct Running {
    pace: Option<Pace>,
    line_at: Instant,
    bar: Option<StageBar>,
}

/// Whether a stage's report is on the screen already, since it was shown as it grew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Screen {
    HasIt,
    /// It is not, or nothing was reported.
    LacksIt,
}

/// The states in which a stage is announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Good,
    Bad,
    Note,
    Begin,
}

/// What a stage that waits for devices waits for.
fn devices_awaited(device: DeviceKind, wanted: usize, free: usize, held_by: &[String], memory: Option<u64>) -> String {
    let wanted = format!("{} ({device})", words::plural(wanted, "device"));
    match (memory, held_by) {
        (Some(0), _) => format!("waiting for {wanted}: the memory of others is in use"),
        (Some(bytes), _) => format!("waiting for {wanted} with {} of free memory: {free} have it", words::bytes(bytes)),
        (None, []) => format!("waiting for {wanted}: {free} are free"),
        (None, held_by) => format!("waiting for {wanted}: {free} are free, {} has the others", held_by.join(", ")),
    }
}

/// Why a stage runs again; nothing of one that never ran.
fn cause(why: &[String]) -> Option<&str> {
    why.first().map(String::as_str).filter(|first| *first != Reason::NeverRan.to_string())
}

impl Progress {
    /// Begins to show a run of these stages.
    pub(crate) fn new<'a>(stages: impl Iterator<Item = &'a str>, verbosity: Verbosity, look: Look) -> Self {
        let ids: Vec<&str> = stages.collect();
        let width = ids.iter().map(|id| crate::table::width(id)).max().unwrap_or(0);
        let bars = (look.live && verbosity > Verbosity::Quiet).then(|| Bars::new(ids.len() as u64, width, look));
        Self { look, verbosity, bars, stream: None, running: BTreeMap::new(), cached: 0 }
    }

    /// Shows answers as they grow, beside or in place of the bars.
    #[must_use]
    pub(crate) fn with_stream(self, stream: Stream) -> Self {
        Self { stream: Some(stream), ..self }
    }

    /// Shows one thing that happened. Of a report it says whether the screen has it already.
    pub(crate) fn event(&mut self, event: &RunEvent) -> Screen {
        if let RunEvent::Worker { stage, said } = event {
            return self.worker(stage, said);
        }
        self.run_event(event);
        Screen::LacksIt
    }

    fn run_event(&mut self, event: &RunEvent) {
        match event {
            RunEvent::RunStarted { run, .. } => self.detail("run", run),
            // The command tells them in the file's text.
            RunEvent::Checked { .. } => {}
            RunEvent::Pinning { pins } => {
                self.say(Mark::Note, "pipeline.lock", &format!("still asking for {} as of now", pins.join(", ")));
            }
            RunEvent::StageCached { stage, remote: None, .. } => self.cached(stage),
            RunEvent::StageCached { stage, remote: Some(remote), .. } => {
                self.ended(Mark::Good, stage, &format!("in {remote}, and nothing here has to read it"));
            }
            RunEvent::ResultFetching { stage, remote } => self.started(stage, &format!("fetching from {remote}"), None),
            RunEvent::ResultFetched { stage, remote, bytes, .. } => {
                self.leave(stage);
                self.say(Mark::Good, stage, &format!("fetched {} from {remote}", words::bytes(*bytes)));
            }
            RunEvent::ResultRefused { stage, failure, .. } => {
                self.leave(stage);
                self.say(Mark::Bad, stage, &format!("{}; the stage runs instead", failure.messages.join(": ")));
            }
            RunEvent::ResultSent { stage, key, remote, files, bytes, .. } => {
                let name = stage.clone().unwrap_or_else(|| key.short());
                if *files > 0 {
                    self.say(Mark::Good, &name, &format!("sent {} to {remote}", words::bytes(*bytes)));
                } else {
                    self.detail(&name, &format!("in {remote} already"));
                }
            }
            RunEvent::ResultNotSent { stage, key, failure } => {
                let name = stage.clone().unwrap_or_else(|| key.short());
                self.say(Mark::Bad, &name, &format!("not sent: {}", failure.messages.join(": ")));
            }
            RunEvent::RemoteFailed { failure, .. } => {
                let help = failure.help.as_ref().map(|help| format!(" ({help})")).unwrap_or_default();
                let text = format!("{}; the run continues without it{help}", failure.messages.join(": "));
                self.say(Mark::Bad, "warning", &text);
            }
            RunEvent::StageStarted { stage, why, attempt, executor, devices, .. } => {
                let text = match executor {
                    ExecutorKind::Local => "running",
                    ExecutorKind::Slurm => "to be run by Slurm",
                };
                let text = format!("{text}{}", devices.as_ref().map(words::on_devices).unwrap_or_default());
                let text = if *attempt > 1 { format!("{text}, try {attempt}") } else { text };
                let cause = cause(why).filter(|_| *attempt == 1);
                self.started(stage, &text, cause);
                let others = why.iter().filter(|reason| Some(reason.as_str()) != cause);
                others.for_each(|reason| self.detail(stage, &format!("because {reason}")));
            }
            RunEvent::StageWaiting { stage, waits_for } => self.waiting(stage, waits_for),
            RunEvent::StageJob { stage, job, news } => self.say(Mark::Note, stage, &words::job(job.as_deref(), news)),
            RunEvent::Worker { .. } => {}
            RunEvent::StageDone { stage, seconds, peak_memory_bytes, compared, .. } => {
                let compared = match compared {
                    None => String::new(),
                    Some(Compared::Equal) => ", equal to the result before".to_owned(),
                    Some(Compared::Differs { outputs }) => {
                        format!(", differs from the result before: {}", outputs.join(", "))
                    }
                };
                self.ended(Mark::Good, stage, &format!("done in {}{compared}", words::seconds(*seconds)));
                self.detail(stage, &format!("peak memory of the process {}", words::bytes(*peak_memory_bytes)));
            }
            RunEvent::StageFailed { stage, seconds, retry_in_seconds: None, .. } => {
                // Why it failed is told in full at the end of the run.
                self.ended(Mark::Bad, stage, &format!("failed after {}", words::seconds(*seconds)));
            }
            RunEvent::StageFailed { stage, failure, seconds, retry_in_seconds: Some(wait), retry_with, .. } => {
                self.leave(stage);
                let next = match retry_with {
                    Some(change) => format!("next try with less memory: {change}"),
                    None => format!("next try in {}", words::seconds(*wait)),
                };
                let text =
                    format!("failed after {}: {}; {next}", words::seconds(*seconds), failure.messages.join(": "));
                self.say(Mark::Bad, stage, &text);
            }
            RunEvent::StageRebuilding { stage, producers, .. } => {
                self.leave(stage);
                let text = format!("met a damaged object in the store, so {} runs again", producers.join(", "));
                self.say(Mark::Note, stage, &text);
            }
            RunEvent::StageSkipped { stage, because, .. } => {
                self.ended(Mark::Note, stage, &format!("skipped: {because}"))
            }
            RunEvent::Published { stage, path, written, .. } => {
                let text = format!("{} {}", if *written { "published to" } else { "is current in" }, words::path(path));
                if *written { self.say(Mark::Good, stage, &text) } else { self.detail(stage, &text) }
            }
            RunEvent::PublishFailed { stage, path, .. } => {
                self.say(Mark::Bad, stage, &format!("cannot be published to {}", words::path(path)));
            }
            // The end of the run lists them.
            RunEvent::GateJudged { .. } => {}
            RunEvent::RunFinished { .. } => self.finish(),
        }
    }

    /// Says what a stage waits for, where that is more than its turn.
    fn waiting(&mut self, stage: &str, waits_for: &WaitsFor) {
        match waits_for {
            WaitsFor::AnotherRun { held_by } => {
                let by = if held_by.is_empty() { String::new() } else { format!(": {}", held_by.join(", ")) };
                self.say(Mark::Note, stage, &format!("waiting: another run is making this result{by}"));
            }
            WaitsFor::AnotherStage { other } => {
                self.say(Mark::Note, stage, &format!("waiting for `{other}` of this run, which does the same work"));
            }
            WaitsFor::Memory { wanted_bytes, free_bytes, estimated } => {
                let (wanted, free) = (words::bytes(*wanted_bytes), words::bytes(*free_bytes));
                let by = if *estimated { " that it is estimated to take" } else { "" };
                let hint = match estimated {
                    true => format!(" (`{stage}.resources.memory=…` says what it needs)"),
                    false => String::new(),
                };
                self.say(Mark::Note, stage, &format!("waiting for {wanted} of memory{by}: {free} are free{hint}"));
            }
            WaitsFor::Queue { job, reason, meaning } => {
                self.say(Mark::Note, stage, &words::in_queue(job.as_deref(), reason, meaning));
            }
            WaitsFor::Slots { name, wanted, free } => {
                self.say(Mark::Note, stage, &format!("waiting for {wanted} of `{name}`: {free} are free"));
            }
            WaitsFor::Devices { device, wanted, free, held_by, wanted_bytes } => {
                self.say(Mark::Note, stage, &devices_awaited(*device, *wanted, *free, held_by, *wanted_bytes));
            }
            WaitsFor::Threads { wanted, free } => {
                self.detail(stage, &format!("waiting for {}: {free} are free", words::plural(*wanted, "thread")));
            }
            WaitsFor::Jobs { most } => {
                self.detail(stage, &format!("waiting: {} may run at once", words::plural(*most, "stage")));
            }
        }
    }

    /// Takes everything that moves off the screen.
    pub(crate) fn finish(&mut self) {
        self.running.clear();
        if let Some(bars) = self.bars.take() {
            bars.finish();
        }
    }

    fn started(&mut self, stage: &str, text: &str, cause: Option<&str>) {
        let now = Instant::now();
        let bar = self.bars.as_ref().map(|bars| bars.stage(stage, text));
        match (&bar, cause) {
            (None, Some(cause)) => self.say(Mark::Begin, stage, &format!("{text}: {cause}")),
            (None, None) => self.say(Mark::Begin, stage, text),
            (Some(_), Some(cause)) => self.say(Mark::Note, stage, cause),
            (Some(_), None) => {}
        }
        self.running.insert(stage.to_owned(), Running { pace: None, line_at: now, bar });
    }

    fn worker(&mut self, stage: &str, said: &WorkerEvent) -> Screen {
        match said {
            WorkerEvent::Text { text } => self.piece(stage, text),
            WorkerEvent::Report { .. } => return self.close_stream(stage),
            WorkerEvent::Progress { unit, done, total, note } => {
                self.progress(stage, unit, *done, *total, note.as_deref());
            }
            WorkerEvent::Warning { message } => self.say(Mark::Note, stage, &format!("warning: {message}")),
            WorkerEvent::Note { message } => self.say(Mark::Note, stage, message),
            WorkerEvent::Metrics { values } => match words::validation(values) {
                Some(text) => self.say(Mark::Note, stage, &text),
                None => self.detail(stage, &words::figures(values)),
            },
            WorkerEvent::Checkpoint { step } => self.detail(stage, &format!("working state saved at step {step}")),
            WorkerEvent::Started { .. } | WorkerEvent::Finished { .. } | WorkerEvent::Failed(_) => {}
        }
        Screen::LacksIt
    }

    /// Shows the next piece of an answer; the bars make room for it.
    fn piece(&mut self, stage: &str, text: &str) {
        let Some(stream) = &mut self.stream else { return };
        if let (Some(bars), false, true) = (&self.bars, stream.is_open(), stream.takes(stage)) {
            bars.hide();
        }
        stream.piece(stage, text);
    }

    /// Ends a stage's answer.
    fn close_stream(&mut self, stage: &str) -> Screen {
        let Some(stream) = &mut self.stream else { return Screen::LacksIt };
        if !stream.close(stage) {
            return Screen::LacksIt;
        }
        self.bars.iter().for_each(Bars::show);
        Screen::HasIt
    }

    fn progress(&mut self, stage: &str, unit: &str, done: u64, total: Option<u64>, note: Option<&str>) {
        let now = Instant::now();
        let Some(running) = self.running.get_mut(stage) else { return };
        let pace = match running.pace.take() {
            Some(pace) if pace.unit == unit && pace.done <= done => Pace { done, total, ..pace },
            _ => Pace { unit: unit.to_owned(), first: done, since: now, done, total },
        };
        let (count, note) = (pace.count(now, self.look), pace.note(now, note));
        let (count, note) = (on_one_line(&count).into_owned(), on_one_line(&note).into_owned());
        running.pace = Some(pace);
        if let Some(bar) = &mut running.bar {
            bar.show(done, total, count, note);
        } else if now.duration_since(running.line_at) >= LINE_EVERY {
            running.line_at = now;
            let dot = if note.is_empty() { "" } else { self.look.either(" · ", ", ") };
            self.say(Mark::Note, stage, &format!("{count}{dot}{note}"));
        }
    }

    fn detail(&mut self, stage: &str, text: &str) {
        if self.verbosity == Verbosity::Verbose {
            self.say(Mark::Note, stage, text);
        }
    }

    /// Takes a stage's bar away, and ends an answer that was not finished.
    fn leave(&mut self, stage: &str) {
        self.close_stream(stage);
        if let Some(bar) = self.running.remove(stage).and_then(|running| running.bar) {
            bar.finish();
        }
    }

    /// Says how a stage ended; nothing more is to come from it.
    fn ended(&mut self, mark: Mark, stage: &str, text: &str) {
        self.leave(stage);
        self.say(mark, stage, text);
        if let Some(bars) = &self.bars {
            bars.ended();
        }
    }

    /// Names a cached stage, if there are few; the end of the run has their number.
    fn cached(&mut self, stage: &str) {
        self.cached += 1;
        let named = self.verbosity == Verbosity::Verbose || self.cached <= CACHED_NAMED;
        if named {
            return self.ended(Mark::Good, stage, "cached");
        }
        if self.cached == CACHED_NAMED + 1 {
            self.say(Mark::Good, self.look.either("…", "..."), "more stages are cached; `-v` names all");
        }
        if let Some(bars) = &self.bars {
            bars.ended();
        }
    }

    fn say(&mut self, mark: Mark, stage: &str, text: &str) {
        if self.verbosity == Verbosity::Quiet {
            return;
        }
        // Words of stages, and what they quote.
        let text = &*visible(text);
        let stream = self.stream.as_mut().filter(|stream| stream.is_open());
        match (&self.bars, stream) {
            (Some(_), Some(stream)) => {
                stream.interrupt();
                terminal::tell_line(self.look.wrap(&format!("{} {stage}  {text}", mark.sign(self.look)), 4));
            }
            (Some(bars), None) => bars.say(&mark.sign(self.look), stage, text),
            (None, _) => terminal::tell_line(format_args!("{stage}: {text}")),
        }
    }
}

impl Mark {
    fn sign(self, look: Look) -> String {
        match self {
            Self::Good => look.paint("32", look.either("✓", "+")),
            Self::Bad => look.paint("31", look.either("✗", "x")),
            Self::Note => look.paint("33", look.either("·", "-")),
            Self::Begin => look.either("▸", ">").to_owned(),
        }
    }
}

/// How fast something is counted, since the first count: what an earlier process had done is not this one's speed.
struct Pace {
    unit: String,
    first: u64,
    since: Instant,
    done: u64,
    total: Option<u64>,
}

impl Pace {
    /// `120/500 steps · 1 min 20 s left`.
    fn count(&self, now: Instant, look: Look) -> String {
        let of = self.total.map(|total| format!("/{}", words::amount(total, &self.unit))).unwrap_or_default();
        let unit = if self.unit == "bytes" { String::new() } else { format!(" {}", self.unit) };
        let count = format!("{}{of}{unit}", words::amount(self.done, &self.unit));
        let left = self.left(self.rate(now)).map(|left| format!("{} left", words::duration(left)));
        std::iter::once(count).chain(left).collect::<Vec<_>>().join(look.either(" · ", ", "))
    }

    /// What the stage notes, else the rate.
    fn note(&self, now: Instant, said: Option<&str>) -> String {
        let rate = || self.rate(now).map(|rate| words::rate(rate, &self.unit)).unwrap_or_default();
        said.map_or_else(rate, str::to_owned)
    }

    fn rate(&self, now: Instant) -> Option<f64> {
        let seconds = now.duration_since(self.since).as_secs_f64();
        (self.done > self.first && seconds > 0.0).then(|| (self.done - self.first) as f64 / seconds)
    }

    fn left(&self, rate: Option<f64>) -> Option<Duration> {
        let left = self.total?.checked_sub(self.done).filter(|left| *left > 0)?;
        Duration::try_from_secs_f64(left as f64 / rate?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIPE: Look = Look { colour: false, unicode: true, width: 100, live: false };

    fn pace(unit: &str, first: u64, done: u64, total: Option<u64>, since: Instant) -> Pace {
        Pace { unit: unit.to_owned(), first, since, done, total }
    }

    #[test]
    fn time_left_counts_from_where_this_process_began() {
        let since = Instant::now();
        let resumed = pace("steps", 100, 110, Some(200), since);
        let now = since + Duration::from_secs(10);
        assert_eq!(resumed.count(now, PIPE), "110/200 steps · 1 min 30 s left");
        assert_eq!(resumed.note(now, Some("loss 2.31")), "loss 2.31");
    }

    #[test]
    fn a_rate_stands_where_there_is_no_note_and_bytes_have_units_of_their_own() {
        let since = Instant::now();
        let bytes = pace("bytes", 0, 3 << 20, Some(4 << 20), since);
        let now = since + Duration::from_secs(1);
        assert_eq!(
            (bytes.count(now, PIPE), bytes.note(now, None)),
            ("3.0 MiB/4.0 MiB · 333 ms left".to_owned(), "3.0 MiB/s".to_owned())
        );
        assert_eq!(pace("rows", 0, 50, None, since).note(since + Duration::from_secs(2), None), "25 rows/s");
    }

    #[test]
    fn the_first_count_has_no_rate() {
        let since = Instant::now();
        let first = pace("rows", 7, 7, Some(9), since);
        assert_eq!((first.count(since, PIPE), first.note(since, None)), ("7/9 rows".to_owned(), String::new()));
    }
}
