//! Traces in the Trace Event Format: a JSON array of complete events (`"ph": "X"`) and of names, one to a line.
//!
//! A line stands for itself, so that the traces of several processes are one when their lines follow each other.
//!
//! Source: "Trace Event Format", which Perfetto and `chrome://tracing` read.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::log::{Kind, ThreadLog};

/// A process of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its number, by which events belong to it. Need not be the system's.
    pub number: u32,
    /// Its name.
    pub name: String,
}

/// One event of a trace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceEvent {
    /// Its name.
    pub name: String,
    /// What it is: `X` is a span, `M` says a name.
    pub ph: String,
    /// The category of a span: `phase`, `kernel`, `run`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cat: String,
    /// When it begins, in microseconds.
    #[serde(default)]
    pub ts: f64,
    /// How long it takes, in microseconds.
    #[serde(default)]
    pub dur: f64,
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// More about it.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub args: Map<String, Value>,
}

impl TraceEvent {
    /// A span of a thread.
    pub fn span(process: u32, thread: u32, category: &str, name: &str, ts: f64, dur: f64) -> Self {
        let (ph, cat, name) = ("X".to_owned(), category.to_owned(), name.to_owned());
        Self { name, ph, cat, ts, dur, pid: process, tid: thread, args: Map::new() }
    }

    /// The name of a process, and its place among the others.
    pub fn process_name(process: &Process) -> [Self; 2] {
        let event = |name: &str, key: &str, value: Value| Self::about(name, process.number, 0, key, value);
        [
            event("process_name", "name", json!(process.name)),
            event("process_sort_index", "sort_index", json!(process.number)),
        ]
    }

    /// The name of a thread, and its place among the others.
    pub fn thread_name(process: u32, thread: u32, name: &str) -> [Self; 2] {
        [
            Self::about("thread_name", process, thread, "name", json!(name)),
            Self::about("thread_sort_index", process, thread, "sort_index", json!(thread)),
        ]
    }

    fn about(what: &str, process: u32, thread: u32, key: &str, value: Value) -> Self {
        let args = Map::from_iter([(key.to_owned(), value)]);
        Self {
            name: what.to_owned(),
            ph: "M".to_owned(),
            cat: String::new(),
            ts: 0.0,
            dur: 0.0,
            pid: process,
            tid: thread,
            args,
        }
    }

    /// As a line of a trace.
    pub fn line(&self) -> String {
        serde_json::to_string(self).expect("an event is plain data")
    }
}

/// The events of a process's threads.
pub(crate) fn lines(logs: &[&ThreadLog], process: &Process, offset_micros: u64) -> Vec<String> {
    let mut lines: Vec<String> = TraceEvent::process_name(process).iter().map(TraceEvent::line).collect();
    for (thread, log) in logs.iter().enumerate() {
        let thread = thread as u32;
        lines.extend(TraceEvent::thread_name(process.number, thread, &log.thread).iter().map(TraceEvent::line));
        let mut events = log.events.clone();
        // They are in the order of their ends; one that holds another has to come before it.
        events.sort_by_key(|event| (event.began, std::cmp::Reverse(event.nanoseconds)));
        for event in events {
            let node = &log.nodes[event.node as usize];
            let category = match node.kind {
                Kind::Phase => "phase",
                Kind::Kernel => "kernel",
            };
            let ts = offset_micros as f64 + micros(event.began);
            let mut span = TraceEvent::span(process.number, thread, category, node.name, ts, micros(event.nanoseconds));
            if node.work.shape != [0, 0] {
                let [inner, outer] = node.work.shape;
                span.args.insert("shape".to_owned(), json!(format!("{inner}→{outer}")));
            }
            let seconds = event.nanoseconds as f64 / 1e9;
            let mut rate = |name: &str, amount: u64| {
                if amount > 0 && seconds > 0.0 {
                    // Two digits after the point say enough, and a trace has many of them.
                    let rate = (amount as f64 / seconds / 1e7).round() / 100.0;
                    span.args.insert(name.to_owned(), json!(rate));
                }
            };
            rate("GFLOP/s", event.flops);
            rate("GB/s", event.bytes);
            lines.push(span.line());
        }
    }
    lines
}

fn micros(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e3
}

/// Writes a trace, line by line.
pub struct TraceWriter<W> {
    out: W,
    is_empty: bool,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// Fails where the output does.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(b"[\n")?;
        Ok(Self { out, is_empty: true })
    }

    /// Writes an event.
    ///
    /// # Errors
    /// Fails where the output does.
    pub fn line(&mut self, event: &str) -> io::Result<()> {
        if !self.is_empty {
            self.out.write_all(b",\n")?;
        }
        self.is_empty = false;
        self.out.write_all(event.as_bytes())
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// Fails where the output does.
    pub fn finish(mut self) -> io::Result<()> {
        self.out.write_all(b"\n]\n")?;
        self.out.flush()
    }
}

/// The events of a trace that a [`TraceWriter`] wrote, as lines for another one.
pub fn trace_lines(trace: &str) -> impl Iterator<Item = &str> {
    trace.lines().map(|line| line.trim_end_matches(',')).filter(|line| line.starts_with('{'))
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;
    use crate::{Profile, Work};

    #[test]
    fn a_trace_is_an_array_whose_spans_nest() {
        // From 1970 on, a quarter of a microsecond is all that a number in JSON can tell apart.
        let origin =
            SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later than 1970").as_micros() as u64 - 1;
        let profile = Profile::recording();
        {
            let _step = profile.phase("step");
            for _ in 0..3 {
                let _block = profile.kernel("block", || Work::values(10));
                drop(profile.kernel("linear", || Work::product(4, 5, 6)));
            }
        }
        let recording = profile.finish().expect("it records");
        let mut text = Vec::new();
        let mut writer = TraceWriter::new(&mut text).expect("memory takes all");
        for line in recording.trace(&Process { number: 7, name: "a \"name\"".to_owned() }, origin) {
            writer.line(&line).expect("memory takes all");
        }
        writer.finish().expect("memory takes all");
        let text = String::from_utf8(text).expect("JSON is UTF-8");
        let events: Vec<TraceEvent> = serde_json::from_str(&text).expect("a trace is a JSON array of events");
        let spans: Vec<&TraceEvent> = events.iter().filter(|event| event.ph == "X").collect();
        assert_eq!(spans.len(), 7);
        assert_eq!(spans[0].name, "step");
        assert!(spans.iter().all(|span| span.pid == 7 && span.ts > 0.0));
        for pair in spans[1..].chunks(2) {
            let [block, linear] = pair else { panic!("pairs") };
            assert!(block.ts <= linear.ts && linear.ts + linear.dur <= block.ts + block.dur + 1e-3);
            assert_eq!(linear.args["shape"], "5→6");
        }
        assert_eq!(events[0].args["name"], "a \"name\"");
        let again: Vec<TraceEvent> =
            trace_lines(&text).map(|line| serde_json::from_str(line).expect("a line is an event")).collect();
        assert_eq!(again, events);
    }
}
