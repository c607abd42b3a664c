//! Reading `events.jsonl`: line by line, since the record of a long training is large, and forgiving, since the record
//! of a run that was killed may end anywhere.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use cache::regular;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::run::event::RunEvent;

/// What happened in a run.
pub(super) const EVENTS_FILE: &str = "events.jsonl";

/// The file in a run's folder that grows with what happens in it.
pub fn events_file(folder: &Path) -> PathBuf {
    folder.join(EVENTS_FILE)
}

/// A line of `events.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimedEvent {
    /// When, in UTC.
    pub time: String,
    #[serde(rename = "what")]
    pub event: RunEvent,
}

/// The events of a run, in their order.
///
/// Lines that this program cannot read are left out: those of a later version, and those that are no JSON, which it
/// counts.
#[derive(Debug)]
pub struct Events {
    lines: BufReader<File>,
    line: Vec<u8>,
    words: Words,
    damaged: usize,
}

/// Whether what stage processes say is read too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Words {
    /// It is: metrics, warnings, reports.
    Read,
    /// It is not, which is far quicker: nearly all of a long record are the figures of training steps.
    Skip,
}

impl Events {
    /// Begins to read the events in a run's folder.
    ///
    /// # Errors
    /// Fails where the file cannot be opened.
    pub fn open(folder: &Path, words: Words) -> io::Result<Self> {
        let lines = BufReader::with_capacity(64 << 10, regular::open(&folder.join(EVENTS_FILE))?);
        Ok(Self { lines, line: Vec::new(), words, damaged: 0 })
    }

    /// How many lines so far are no JSON: a last one that was cut off, or damage.
    pub fn damaged(&self) -> usize {
        self.damaged
    }
}

/// What a line turns out to be.
enum ParsedLine {
    Event(Box<TimedEvent>),
    /// The word of a process that is not wanted, or something of a later version.
    LeftOut,
    /// No JSON.
    Damaged,
}

impl ParsedLine {
    fn read(line: &[u8], words: Words) -> Self {
        if words == Words::Skip && says_a_process(line) {
            return Self::LeftOut;
        }
        match serde_json::from_slice(line) {
            Ok(event) => Self::Event(Box::new(event)),
            Err(_) if serde_json::from_slice::<IgnoredAny>(line).is_ok() => Self::LeftOut,
            Err(_) => Self::Damaged,
        }
    }
}

impl Iterator for Events {
    type Item = io::Result<TimedEvent>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.line.clear();
            match self.lines.read_until(b'\n', &mut self.line) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
            match ParsedLine::read(&self.line, self.words) {
                ParsedLine::Event(event) => return Some(Ok(*event)),
                ParsedLine::Damaged => self.damaged += 1,
                ParsedLine::LeftOut => {}
            }
        }
    }
}

/// Reads the events of a run that goes on as they come.
#[derive(Debug)]
pub struct EventTail {
    file: File,
    /// The beginning of a line whose end is still to be written.
    rest: Vec<u8>,
    words: Words,
}

impl EventTail {
    /// Begins at the first event.
    ///
    /// # Errors
    /// Fails where the file cannot be opened.
    pub fn open(folder: &Path, words: Words) -> io::Result<Self> {
        let file = regular::open(&folder.join(EVENTS_FILE))?;
        Ok(Self { file, rest: Vec::new(), words })
    }

    /// The events since the last time.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub fn poll(&mut self) -> io::Result<Vec<TimedEvent>> {
        let mut events = Vec::new();
        self.poll_each(&mut |event| events.push(event))?;
        Ok(events)
    }

    /// Gives each event since the last time: those of a long training are many.
    ///
    /// # Errors
    /// As [`EventTail::poll`].
    pub fn poll_each(&mut self, give: &mut dyn FnMut(TimedEvent)) -> io::Result<()> {
        self.file.read_to_end(&mut self.rest)?;
        let complete = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in self.rest[..complete].split(|byte| *byte == b'\n') {
            if let ParsedLine::Event(event) = ParsedLine::read(line, self.words) {
                give(*event);
            }
        }
        self.rest.drain(..complete);
        Ok(())
    }
}

/// Whether a line is the word of a stage's process, by the form in which this program writes them.
fn says_a_process(line: &[u8]) -> bool {
    const MARK: &[u8] = br#","what":{"event":"worker","#;
    let time = br#"{"time":"2026-01-01T00:00:00.000Z""#.len();
    line.get(time..).is_some_and(|rest| rest.starts_with(MARK))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::WorkerEvent;
    use crate::run::WaitsFor;
    use crate::run::clock::Moment;

    fn line(event: RunEvent) -> String {
        serde_json::to_string(&TimedEvent { time: Moment::now().rfc3339(), event }).unwrap() + "\n"
    }

    #[test]
    fn words_of_processes_are_known_by_how_a_line_begins() {
        let said = WorkerEvent::Checkpoint { step: 1 };
        assert!(says_a_process(line(RunEvent::Worker { stage: "a".into(), said }).as_bytes()));
        assert!(!says_a_process(
            line(RunEvent::StageWaiting { stage: r#""event":"worker""#.into(), waits_for: WaitsFor::default() })
                .as_bytes()
        ));
        assert!(!says_a_process(b"") && !says_a_process(br#"{"time":"#));
    }

    #[test]
    fn lines_of_later_versions_are_left_out_and_only_broken_ones_count_as_damage() {
        let folder = tempfile::tempdir().unwrap();
        let known = line(RunEvent::StageWaiting { stage: "a".into(), waits_for: WaitsFor::default() });
        let later = r#"{"time":"2030-01-01T00:00:00.000Z","what":{"event":"stage_dreamt","stage":"a"}}"#;
        let text = format!("{known}{later}\n{{\"ti\nme\": 3\n{known}{}", &known[..known.len() / 2]);
        std::fs::write(folder.path().join("events.jsonl"), text).unwrap();
        let mut events = Events::open(folder.path(), Words::Skip).unwrap();
        assert_eq!(events.by_ref().count(), 2);
        assert_eq!(events.damaged(), 3);
    }

    #[test]
    fn a_line_that_is_being_written_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let whole = line(RunEvent::StageWaiting { stage: "a".into(), waits_for: WaitsFor::default() });
        let (begun, rest) = whole.split_at(20);
        std::fs::write(&path, format!("{whole}{begun}")).unwrap();
        let mut tail = EventTail::open(folder.path(), Words::Skip).unwrap();
        assert_eq!((tail.poll().unwrap().len(), tail.poll().unwrap().len()), (1, 0));
        let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, rest.as_bytes()).unwrap();
        assert_eq!((tail.poll().unwrap().len(), tail.poll().unwrap().len()), (1, 0));
    }
}
