//! Plain text: lines, paragraphs, or the whole file as one text.

use std::io::Read as _;
use std::ops::{ControlFlow, Range};

use serde_json::{Map, Value};

use super::super::SampleBy;
use super::super::flaw::Reason;
use super::super::form::SourceFile;
use super::open::{LONGEST, Line, next_line, open};
use super::{BadRecord, ReadError, Record, Visit};

/// Calls `visit` with each line and its number from 1; line ends (LF or CRLF) are taken off. A line that is too long to
/// be held is `None`.
pub(super) fn for_each_line(
    file: &SourceFile,
    mut visit: impl FnMut(u64, Option<&[u8]>) -> ControlFlow<()>,
) -> Result<(), ReadError> {
    let mut reader = open(file)?;
    let mut line = Vec::new();
    for number in 1.. {
        let flow = match next_line(&mut reader, &mut line, LONGEST)? {
            Line::End => break,
            Line::Whole => visit(number, Some(&line)),
            Line::TooLong => visit(number, None),
        };
        if flow.is_break() {
            break;
        }
    }
    Ok(())
}

/// A text in the making.
struct Sample {
    /// Its first line.
    number: u64,
    /// Nothing where it is too long to be held.
    bytes: Option<Vec<u8>>,
}

impl Sample {
    fn begin(number: u64, line: Option<&[u8]>) -> Self {
        Self { number, bytes: line.map(<[u8]>::to_vec) }
    }

    fn add(&mut self, line: Option<&[u8]>) {
        let held = self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
        match (&mut self.bytes, line) {
            (Some(bytes), Some(line)) if held + (line.len() as u64) < LONGEST => {
                bytes.push(b'\n');
                bytes.extend_from_slice(line);
            }
            _ => self.bytes = None,
        }
    }
}

/// What is called with each text, `None` where it is too long to be held, and the number of its first line.
type VisitText<'a> = dyn FnMut(u64, Option<&[u8]>) -> ControlFlow<()> + 'a;

/// Calls `visit` with each text of the file and the number of its first line; blank ones are none.
fn for_each_sample(file: &SourceFile, sample_by: SampleBy, visit: &mut VisitText<'_>) -> Result<(), ReadError> {
    if sample_by == SampleBy::Document {
        return whole(file, visit);
    }
    let mut open: Option<Sample> = None;
    let mut flow = ControlFlow::Continue(());
    for_each_line(file, |number, line| {
        let blank = line.is_some_and(|line| line.trim_ascii().is_empty());
        let ends = match sample_by {
            SampleBy::Line => {
                flow = if blank { ControlFlow::Continue(()) } else { visit(number, line) };
                return flow;
            }
            SampleBy::Paragraph | SampleBy::Document => blank,
        };
        match &mut open {
            Some(sample) if !ends => sample.add(line),
            None if !blank => open = Some(Sample::begin(number, line)),
            _ => {}
        }
        if ends && let Some(sample) = open.take() {
            flow = visit(sample.number, sample.bytes.as_deref());
        }
        flow
    })?;
    if flow.is_continue()
        && let Some(sample) = open
    {
        let _ = visit(sample.number, sample.bytes.as_deref());
    }
    Ok(())
}

/// Calls `visit` with the text of the whole file as it stands, but for line ends, which are `\n`, as Python reads it.
fn whole(file: &SourceFile, visit: &mut VisitText<'_>) -> Result<(), ReadError> {
    let mut bytes = Vec::new();
    open(file)?.take(LONGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LONGEST {
        let _ = visit(1, None);
        return Ok(());
    }
    if bytes.contains(&b'\r') {
        bytes = in_lines(&bytes);
    }
    if !bytes.trim_ascii().is_empty() {
        let _ = visit(1, Some(&bytes));
    }
    Ok(())
}

/// A text whose line ends (CRLF, CR) are `\n`.
fn in_lines(bytes: &[u8]) -> Vec<u8> {
    let mut lines = Vec::with_capacity(bytes.len());
    let mut before = 0;
    for &byte in bytes {
        match byte {
            b'\r' => lines.push(b'\n'),
            b'\n' if before == b'\r' => {}
            byte => lines.push(byte),
        }
        before = byte;
    }
    lines
}

/// Reads texts as rows with one column, `text`.
pub(super) fn read(
    file: &SourceFile,
    range: Range<u64>,
    sample_by: SampleBy,
    visit: &mut Visit<'_>,
) -> Result<u64, ReadError> {
    let mut seen = 0;
    for_each_sample(file, sample_by, &mut |number, text| {
        if seen >= range.end {
            return ControlFlow::Break(());
        }
        seen += 1;
        if seen <= range.start {
            return ControlFlow::Continue(());
        }
        visit(text.ok_or_else(|| BadRecord::too_long(number)).and_then(|text| record(number, text)))
    })?;
    Ok(seen)
}

fn record(number: u64, text: &[u8]) -> Result<Record, BadRecord> {
    let text = std::str::from_utf8(text).map_err(|error| {
        let lines = text[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count() as u64;
        BadRecord::new(number + lines, Reason::NotUtf8, "it is not UTF-8")
    })?;
    Ok(Record { fields: Map::from_iter([("text".to_owned(), Value::from(text))]), number })
}

/// Counts the texts.
pub(super) fn count(file: &SourceFile, sample_by: SampleBy) -> Result<u64, ReadError> {
    let mut seen = 0;
    for_each_sample(file, sample_by, &mut |_, _| {
        seen += 1;
        ControlFlow::Continue(())
    })?;
    Ok(seen)
}
