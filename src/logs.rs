//! `pipeline logs`: what a stage's process printed, while it runs or afterwards.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use clap::Args;
use engine::history::{Attempt, EventTail, LOG_FILE, Recorded, RecordedStage, RunState, RunSummary, Words};
use engine::run::RunEvent;
use serde::Serialize;

use crate::render::Failure;
use crate::runs::Past;
use crate::terminal::{self, Look};
use crate::{Format, Global, locate};

/// Print the standard error of a stage's process.
#[derive(Args)]
#[command(allow_missing_positional = true)]
pub(crate) struct LogsArgs {
    /// The run: an id or its beginning, `latest`, `latest~1` [default: the newest run in which the stage's process was
    /// started].
    run: Option<String>,
    /// The stage, or a child of a sweep by its values, in any order.
    #[arg(required = true)]
    stage: String,
    /// Follow the log until the stage ends, also of a run in another terminal.
    #[arg(short, long, conflicts_with = "format")]
    follow: bool,
    /// Begin with the last COUNT lines.
    #[arg(long, value_name = "COUNT")]
    tail: Option<usize>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// How often a log that grows is looked at.
const POLL: Duration = Duration::from_millis(150);

/// Prints the log.
pub(crate) fn run(args: &LogsArgs, global: &Global) -> Result<(), Failure> {
    let past = Past::open(global)?;
    let recorded = args.recorded(&past)?;
    let stage = locate::stage_of_run(&recorded, &args.stage)?;
    let id = &stage.summary.stage;
    let log = recorded.stage_folder(id).join(LOG_FILE);
    if args.follow && recorded.summary.state == RunState::Running && !is_over(&stage.summary.status) {
        return follow(&recorded, id, &log, args.tail);
    }
    if !log.is_file() {
        return Err(no_log(id));
    }
    if args.format == Format::Json {
        return print_json(&recorded, stage, &log, args.tail);
    }
    let mut out = Lines::new(crate::screen::stdout_of_others());
    let mut printer = Printer::new(&stage.attempts, Look::stdout());
    let mut file = File::open(&log)?;
    printer.begin(&mut file, args.tail)?;
    printer.copy(&mut file, &mut out)?;
    Ok(())
}

impl LogsArgs {
    /// The run that is meant.
    fn recorded(&self, past: &Past) -> Result<Recorded, Failure> {
        if let Some(name) = &self.run {
            return past.recorded(&past.find(name)?.run, Words::Skip);
        }
        let runs = past.history.runs().map_err(Failure::machine)?;
        // Who follows means the run that goes on, even if the stage's turn is still to come.
        for run in runs.iter().filter(|run| self.follow && run.state == RunState::Running) {
            let recorded = past.recorded(&run.run, Words::Skip)?;
            if locate::stage_of_run(&recorded, &self.stage).is_ok_and(|stage| !is_over(&stage.summary.status)) {
                return Ok(recorded);
            }
        }
        match self.newest_with_log(past, &runs)? {
            Some(run) => past.recorded(&run.run, Words::Skip),
            None => {
                // A name that no run knows is a slip; one that a run knows has no log.
                let newest = past.recorded(&past.find(crate::runs::LATEST)?.run, Words::Skip)?;
                locate::stage_of_run(&newest, &self.stage)?;
                Err(no_log(&self.stage))
            }
        }
    }

    /// The newest run with a log of the stage of this id, or of a child of a sweep that the name means.
    fn newest_with_log<'a>(&self, past: &Past, runs: &'a [RunSummary]) -> Result<Option<&'a RunSummary>, Failure> {
        let has_log = |run: &RunSummary, stage: &str| {
            past.home.run(&run.run).join(engine::history::stage_folder(stage)).join(LOG_FILE).is_file()
        };
        for run in runs {
            if has_log(run, &self.stage) {
                return Ok(Some(run));
            }
            let stages = past.history.stages(&run.run).map_err(Failure::machine)?;
            if stages.iter().any(|stage| locate::is_meant(stage, &self.stage) && has_log(run, &stage.stage)) {
                return Ok(Some(run));
            }
        }
        Ok(None)
    }
}

fn no_log(stage: &str) -> Failure {
    Failure::wrong(format!("there is no log of stage `{stage}`: its process was not started")).with_help(
        "a cached stage has its log in the run that made the result: `pipeline runs show RUN STAGE` names it",
    )
}

/// Whether nothing more comes from a stage that stands so.
fn is_over(status: &str) -> bool {
    matches!(status, "done" | "cached" | "failed" | "skipped")
}

/// A log as a program reads it.
#[derive(Serialize)]
struct LogView<'a> {
    run: &'a str,
    stage: &'a str,
    log: &'a Path,
    attempts: &'a [Attempt],
    text: Cow<'a, str>,
}

fn print_json(recorded: &Recorded, stage: &RecordedStage, log: &Path, tail: Option<usize>) -> Result<(), Failure> {
    let mut text = Vec::new();
    let mut file = File::open(log)?;
    let mut printer = Printer::new(&[], Look::stdout());
    printer.begin(&mut file, tail)?;
    printer.copy(&mut file, &mut text)?;
    crate::print_json(&LogView {
        run: &recorded.summary.run,
        stage: &stage.summary.stage,
        log,
        attempts: &stage.attempts,
        text: String::from_utf8_lossy(&text),
    })
}

/// Prints a log that grows, until the stage or its run has ended.
fn follow(recorded: &Recorded, id: &str, log: &Path, tail: Option<usize>) -> Result<(), Failure> {
    let mut events = EventTail::open(recorded.folder(), Words::Skip)?;
    let mut following = Following { log: log.to_owned(), file: None, printer: Printer::new(&[], Look::stdout()) };
    let mut out = Lines::new(crate::screen::stdout_of_others());
    let mut told = false;
    loop {
        // Looked at before the log: what was printed before the end is then in the log.
        let alive = Recorded::is_alive(recorded.folder());
        let mut over = false;
        for timed in events.poll()? {
            match timed.event {
                RunEvent::StageStarted { stage, attempt, log_from, .. } if stage == id => {
                    let begun = Attempt::begun(attempt, timed.time, log_from);
                    following.printer.attempts.push(begun);
                }
                RunEvent::StageFailed { stage, retry_in_seconds: None, .. }
                | RunEvent::StageDone { stage, .. }
                | RunEvent::StageCached { stage, .. }
                | RunEvent::StageSkipped { stage, .. } => over |= stage == id,
                _ => {}
            }
        }
        following.copy(tail, &mut out)?;
        if over || !alive {
            return Ok(());
        }
        if following.file.is_none() && !std::mem::replace(&mut told, true) {
            terminal::tell_line(format_args!("waiting for `{id}` to start"));
        }
        thread::sleep(POLL);
    }
}

/// A log that may not be there yet.
struct Following {
    log: PathBuf,
    file: Option<File>,
    printer: Printer,
}

impl Following {
    fn copy(&mut self, tail: Option<usize>, out: &mut dyn Write) -> io::Result<()> {
        if self.file.is_none() && self.log.is_file() {
            let mut file = File::open(&self.log)?;
            self.printer.begin(&mut file, tail)?;
            self.file = Some(file);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        self.printer.copy(file, out)?;
        out.flush()
    }
}

/// Gives each state of a bar that drew itself anew a line of its own: on the way back to the begin of its line it would
/// hide what is there.
struct Lines<W> {
    out: W,
    /// The last byte began a line by itself.
    returned: bool,
}

impl<W: Write> Lines<W> {
    fn new(out: W) -> Self {
        Self { out, returned: false }
    }
}

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut lines = Vec::with_capacity(bytes.len());
        for byte in bytes {
            match byte {
                b'\n' if self.returned => {}
                b'\r' => lines.push(b'\n'),
                byte => lines.push(*byte),
            }
            self.returned = *byte == b'\r';
        }
        self.out.write_all(&lines)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Copies a log with a line between what different attempts printed.
struct Printer {
    look: Look,
    attempts: Vec<Attempt>,
    /// How many of the attempts have been announced.
    announced: usize,
    /// Where in the log the next byte comes from.
    at: u64,
    ends_line: bool,
}

impl Printer {
    fn new(attempts: &[Attempt], look: Look) -> Self {
        Self { look, attempts: attempts.to_vec(), announced: 0, at: 0, ends_line: true }
    }

    /// Goes to where printing begins.
    fn begin(&mut self, file: &mut File, tail: Option<usize>) -> io::Result<()> {
        self.at = match tail {
            Some(lines) => last_lines(file, lines)?,
            None => 0,
        };
        // The attempt whose output begins in the middle is announced all the same.
        let begun = self.attempts.iter().filter(|attempt| attempt.log_from <= self.at).count();
        self.announced = begun.saturating_sub(1);
        file.seek(SeekFrom::Start(self.at)).map(drop)
    }

    /// Copies what there is.
    fn copy(&mut self, file: &mut File, out: &mut dyn Write) -> io::Result<()> {
        let mut block = vec![0; 64 << 10];
        loop {
            let begins = self.attempts.get(self.announced).map(|attempt| attempt.log_from);
            if begins.is_some_and(|begins| begins <= self.at) {
                self.announce(out)?;
                continue;
            }
            let most = begins.map_or(u64::MAX, |begins| begins - self.at).min(block.len() as u64);
            let read = file.read(&mut block[..usize::try_from(most).unwrap_or(usize::MAX)])?;
            if read == 0 {
                return Ok(());
            }
            out.write_all(&block[..read])?;
            self.ends_line = block[read - 1] == b'\n';
            self.at += read as u64;
        }
    }

    /// A line above what an attempt printed, where there are several.
    fn announce(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let attempt = &self.attempts[self.announced];
        self.announced += 1;
        if self.attempts.len() == 1 && attempt.number <= 1 {
            return Ok(());
        }
        let (look, number, started) = (self.look, attempt.number, &attempt.started);
        let line = look.either("──", "--");
        let end = if self.ends_line { "" } else { "\n" };
        self.ends_line = true;
        writeln!(out, "{end}{}", look.paint("2", &format!("{line} attempt {number}, {started} {line}")))
    }
}

/// Where the last lines of a file begin.
fn last_lines(file: &mut File, lines: usize) -> io::Result<u64> {
    const BLOCK: u64 = 64 << 10;
    let length = file.metadata()?.len();
    let mut end = length;
    let mut found = 0;
    let mut block = Vec::new();
    while end > 0 {
        let begin = end.saturating_sub(BLOCK);
        file.seek(SeekFrom::Start(begin))?;
        block.clear();
        Read::by_ref(file).take(end - begin).read_to_end(&mut block)?;
        for (at, _) in block.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            let after = begin + at as u64 + 1;
            // The end of the last line begins no line.
            if after < length {
                found += 1;
            }
            if found == lines {
                return Ok(after);
            }
        }
        end = begin;
    }
    Ok(if lines == 0 { length } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        file
    }

    fn printed(text: &str, attempts: &[Attempt], tail: Option<usize>) -> String {
        let (mut file, mut out) = (file(text), Vec::new());
        let mut printer = Printer::new(attempts, Look { colour: false, unicode: true, width: 80, live: false });
        printer.begin(&mut file, tail).unwrap();
        printer.copy(&mut file, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_last_lines_are_counted_with_or_without_an_end_of_line() {
        let long = "line\n".repeat(40_000);
        for (text, lines, last) in [
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc", 2, "b\nc"),
            ("a\nb\n", 9, "a\nb\n"),
            ("a\nb\n", 0, ""),
            ("", 3, ""),
            ("\n\n\n", 1, "\n"),
            (long.as_str(), 30_000, &long[..150_000]),
        ] {
            assert_eq!(printed(text, &[], Some(lines)), last, "{lines} of {text:.20?}");
        }
    }

    #[test]
    fn each_state_of_a_bar_is_a_line() {
        for pieces in 1..9 {
            let mut out = Vec::new();
            let mut lines = Lines::new(&mut out);
            b"10%\r20%\r\nend\n\n\r".chunks(pieces).for_each(|piece| lines.write_all(piece).unwrap());
            assert_eq!(String::from_utf8(out).unwrap(), "10%\n20%\nend\n\n\n");
        }
    }

    #[test]
    fn attempts_are_told_apart() {
        let attempts = [Attempt::begun(1, "T1".into(), 0), Attempt::begun(2, "T2".into(), 6)];
        let text = printed("first\nsecond\n", &attempts, None);
        assert_eq!(text, "── attempt 1, T1 ──\nfirst\n── attempt 2, T2 ──\nsecond\n");
        let text = printed("first\nsecond\n", &attempts[..1], None);
        assert_eq!(text, "first\nsecond\n");
        assert_eq!(printed("first\nsecond\n", &attempts, Some(1)), "── attempt 2, T2 ──\nsecond\n");
    }
}
