//! Notices a quote in a CSV file that is never closed.
//!
//! The CSV reader takes all that follows such a quote for one field and says nothing, so that rows vanish into a text.

use std::io::{self, BufRead, Read};

/// Where in a CSV file a byte stands (RFC 4180; a quote within an unquoted field is a letter like others).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    FieldStart,
    Unquoted,
    Quoted,
    /// Behind a quote within a quoted field: its end, or the first half of a quote that is meant.
    QuoteInQuoted,
}

/// Passes bytes on and fails at the end of the file where a quote is open.
pub(super) struct Quotes<R> {
    inner: R,
    delimiter: u8,
    place: Place,
    line: u64,
    opened_in: u64,
}

impl<R: BufRead> Quotes<R> {
    pub(super) fn new(inner: R, delimiter: u8) -> Self {
        Self { inner, delimiter, place: Place::FieldStart, line: 1, opened_in: 1 }
    }

    fn step(&mut self, byte: u8) {
        self.place = match (self.place, byte) {
            (Place::FieldStart, b'"') => {
                self.opened_in = self.line;
                Place::Quoted
            }
            (Place::Quoted, b'"') => Place::QuoteInQuoted,
            (Place::QuoteInQuoted, b'"') | (Place::Quoted, _) => Place::Quoted,
            (_, b'\n' | b'\r') => Place::FieldStart,
            (_, byte) if byte == self.delimiter => Place::FieldStart,
            _ => Place::Unquoted,
        };
        self.line += u64::from(byte == b'\n');
    }
}

impl<R: BufRead> BufRead for Quotes<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let (place, line) = (self.place, self.opened_in);
        let bytes = self.inner.fill_buf()?;
        if bytes.is_empty() && place == Place::Quoted {
            let message = format!("the quote that is opened in line {line} is never closed");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(bytes)
    }

    fn consume(&mut self, amount: usize) {
        // What was filled is still there: filling again returns it without reading.
        let Ok(bytes) = self.inner.fill_buf() else { return };
        let taken = bytes[..amount.min(bytes.len())].to_vec();
        taken.iter().for_each(|byte| self.step(*byte));
        self.inner.consume(amount);
    }
}

impl<R: BufRead> Read for Quotes<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let amount = self.fill_buf()?.read(target)?;
        self.consume(amount);
        Ok(amount)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn read(text: &str) -> io::Result<String> {
        // A small buffer, so that fields lie across its borders.
        let inner = io::BufReader::with_capacity(3, text.as_bytes());
        let mut whole = String::new();
        Quotes::new(inner, b',').read_to_string(&mut whole).map(|_| whole)
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
