//! Watches a CSV file on its way to the reader: where its rows begin, and whether each quote is closed.
//!
//! A CSV reader takes all that follows an open quote for one field and says nothing, so that rows vanish into a text.
//! The lines that it tells are off by those that are blank and by the second halves of line ends.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::rc::Rc;

use super::open::LONGEST;

/// Where in a CSV file a byte stands (RFC 4180; a quote within an unquoted field is a letter like others).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    RowStart,
    FieldStart,
    Unquoted,
    Quoted,
    /// Behind a quote within a quoted field: its end, or the first half of a quote that is meant.
    QuoteInQuoted,
}

/// The lines in which rows begin that were seen and not yet asked for: as many as a buffer holds.
#[derive(Debug, Clone, Default)]
pub(super) struct RowStarts(Rc<RefCell<VecDeque<u64>>>);

impl RowStarts {
    /// The line in which the next row begins.
    pub(super) fn next(&self) -> Option<u64> {
        self.0.borrow_mut().pop_front()
    }
}

/// Passes bytes on and fails where a quote is open at the end of the file, or for longer than any row is.
pub(super) struct Quotes<R> {
    inner: R,
    delimiter: u8,
    place: Place,
    line: u64,
    /// Whether the byte before was a carriage return.
    after_return: bool,
    starts: RowStarts,
    opened_in: u64,
    /// Bytes behind the opening quote.
    length: u64,
}

impl<R: Read> Quotes<R> {
    pub(super) fn new(inner: R, delimiter: u8) -> (Self, RowStarts) {
        let starts = RowStarts::default();
        let watching = Self {
            inner,
            delimiter,
            place: Place::RowStart,
            line: 1,
            after_return: false,
            starts: starts.clone(),
            opened_in: 1,
            length: 0,
        };
        (watching, starts)
    }

    fn step(&mut self, byte: u8) {
        let ends_line = matches!(byte, b'\n' | b'\r');
        if self.place == Place::RowStart && !ends_line {
            self.starts.0.borrow_mut().push_back(self.line);
        }
        self.place = match (self.place, byte) {
            (Place::RowStart | Place::FieldStart, b'"') => {
                self.opened_in = self.line;
                self.length = 0;
                Place::Quoted
            }
            (Place::Quoted, b'"') => Place::QuoteInQuoted,
            (Place::QuoteInQuoted, b'"') | (Place::Quoted, _) => Place::Quoted,
            _ if ends_line => Place::RowStart,
            (_, byte) if byte == self.delimiter => Place::FieldStart,
            _ => Place::Unquoted,
        };
        self.length += 1;
        self.line += u64::from(ends_line && !(byte == b'\n' && self.after_return));
        self.after_return = byte == b'\r';
    }

    fn never_closed(&self) -> io::Error {
        let message = format!("the quote that is opened in line {} is never closed", self.opened_in);
        io::Error::new(io::ErrorKind::InvalidData, message)
    }
}

impl<R: Read> Read for Quotes<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let amount = self.inner.read(target)?;
        for byte in &target[..amount] {
            self.step(*byte);
        }
        let ended = amount == 0 && !target.is_empty();
        match self.place == Place::Quoted && (ended || self.length > LONGEST) {
            true => Err(self.never_closed()),
            false => Ok(amount),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> io::Result<String> {
        // A small buffer, so that fields lie across its borders.
        let inner = io::BufReader::with_capacity(3, text.as_bytes());
        let mut whole = String::new();
        Quotes::new(inner, b',').0.read_to_string(&mut whole).map(|_| whole)
    }

    #[test]
    fn rows_begin_in_the_lines_that_an_editor_shows() {
        for (text, expected) in [
            ("a,b\n1,2\n\n\n3,4", &[1, 2, 5][..]),
            ("a,b\r\n1,\"x\r\ny\"\r\n\r\n3,4\r\n", &[1, 2, 5]),
            ("a\rb\rc", &[1, 2, 3]),
            ("\n\"\"\n,\n", &[2, 3]),
        ] {
            let (mut reader, starts) = Quotes::new(text.as_bytes(), b',');
            reader.read_to_string(&mut String::new()).unwrap();
            let lines: Vec<u64> = std::iter::from_fn(|| starts.next()).collect();
            assert_eq!(lines, expected, "{text:?}");
        }
    }

    #[test]
    fn an_open_quote_is_an_error_that_names_its_line() {
        for text in ["a,b\n1,\"two\n3,4\n", "a,b\n1,\"two\"\"\n", "a,b\n1,\""] {
            assert!(read(text).unwrap_err().to_string().contains("opened in line 2"), "{text:?}");
        }
    }

    #[test]
    fn what_is_closed_or_no_quote_passes_unchanged() {
        for text in ["", "a,b\n", "a,b\n\"1\",\"two \"\"2\"\"\"\n", "a,b\n5\" pipe,\"x\ny\"\r\n", "a,b\n1,\"two\""] {
            assert_eq!(read(text).unwrap(), text);
        }
    }
}
