//! Plain text: lines, paragraphs, or the whole file as one text.

use std::io::BufRead;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use serde_json::{Map, Value};

use super::super::SampleBy;
use super::{BadRecord, ReadError, Record, Visit, open};

/// Calls `visit` with each line and its number from 1; line ends (LF or CRLF) are taken off.
pub(super) fn for_each_line(
    path: &Path,
    mut visit: impl FnMut(u64, &[u8]) -> ControlFlow<()>,
) -> Result<(), ReadError> {
    let mut reader = open(path)?;
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if reader.read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        if visit(number, text).is_break() {
            break;
        }
    }
    Ok(())
}

/// Calls `visit` with each text of the file and the number of its first line; blank ones are none.
fn for_each_sample(
    path: &Path,
    sample_by: SampleBy,
    visit: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
) -> Result<(), ReadError> {
    let mut open: Option<(u64, Vec<u8>)> = None;
    let mut flow = ControlFlow::Continue(());
    for_each_line(path, |number, line| {
        let blank = line.trim_ascii().is_empty();
        let ends = match sample_by {
            SampleBy::Line => true,
            SampleBy::Paragraph => blank,
            SampleBy::Document => false,
        };
        match &mut open {
            Some((_, text)) if !(blank && ends) => {
                text.push(b'\n');
                text.extend_from_slice(line);
            }
            None if !blank => open = Some((number, line.to_vec())),
            _ => {}
        }
        if ends && let Some((first, text)) = open.take() {
            flow = visit(first, &text);
        }
        flow
    })?;
    if flow.is_continue()
        && let Some((first, text)) = open
    {
        let _ = visit(first, text.trim_ascii_end());
    }
    Ok(())
}

/// Reads texts as rows with one column, `text`.
pub(super) fn read(
    path: &Path,
    range: Range<u64>,
    sample_by: SampleBy,
    visit: &mut Visit<'_>,
) -> Result<u64, ReadError> {
    let mut seen = 0;
    for_each_sample(path, sample_by, &mut |number, text| {
        if seen >= range.end {
            return ControlFlow::Break(());
        }
        seen += 1;
        if seen <= range.start {
            return ControlFlow::Continue(());
        }
        visit(match std::str::from_utf8(text) {
            Ok(text) => {
                let fields = Map::from_iter([("text".to_owned(), Value::from(text))]);
                Ok(Record { fields, number })
            }
            Err(error) => {
                let lines = text[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count() as u64;
                Err(BadRecord { number: number + lines, problem: "it is not UTF-8".to_owned() })
            }
        })
    })?;
    Ok(seen)
}

/// Counts the texts.
pub(super) fn count(path: &Path, sample_by: SampleBy) -> Result<u64, ReadError> {
    let mut seen = 0;
    for_each_sample(path, sample_by, &mut |_, _| {
        seen += 1;
        ControlFlow::Continue(())
    })?;
    Ok(seen)
}
