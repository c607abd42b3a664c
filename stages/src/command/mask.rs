//! Secrets in what a program prints: each of them becomes `***` before anything of it is written down.

use std::collections::VecDeque;

/// What stands in the place of a secret.
const MASK: &[u8] = b"***";

/// A shorter value is no secret, and masking it would garble the log.
const SHORTEST: usize = 4;

/// Replaces secrets in a stream, also where one arrives in pieces.
#[derive(Debug)]
pub(super) struct Masker {
    /// Longest first, so that of two that begin alike the whole of the longer one goes.
    secrets: Vec<Vec<u8>>,
    /// The end of what came so far that may be the beginning of a secret.
    held: Vec<u8>,
}

impl Masker {
    /// A masker of these values; of one with several lines each line counts.
    pub(super) fn new<'v>(values: impl IntoIterator<Item = &'v str>) -> Self {
        let mut secrets = Vec::new();
        for value in values {
            secrets.push(value.trim().as_bytes().to_vec());
            secrets.extend(value.lines().map(|line| line.trim().as_bytes().to_vec()));
        }
        secrets.retain(|secret| secret.len() >= SHORTEST);
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.dedup();
        Self { secrets, held: Vec::new() }
    }

    /// The secrets.
    pub(super) fn secrets(&self) -> &[Vec<u8>] {
        &self.secrets
    }

    /// Takes more of the stream and gives what can be shown of it.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(bytes);
        self.take(false)
    }

    /// Gives what was held back.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        self.take(true)
    }

    fn take(&mut self, at_end: bool) -> Vec<u8> {
        if self.secrets.is_empty() {
            return std::mem::take(&mut self.held);
        }
        let mut shown = Vec::with_capacity(self.held.len());
        let mut at = 0;
        while at < self.held.len() {
            let rest = &self.held[at..];
            let may_grow = |secret: &&Vec<u8>| secret.len() > rest.len() && secret.starts_with(rest);
            if !at_end && self.secrets.iter().any(|secret| may_grow(&secret)) {
                break;
            }
            match self.secrets.iter().find(|secret| rest.starts_with(secret)) {
                Some(secret) => {
                    shown.extend_from_slice(MASK);
                    at += secret.len();
                }
                None => {
                    shown.push(rest[0]);
                    at += 1;
                }
            }
        }
        self.held.drain(..at);
        shown
    }
}

/// Lines that are kept of the end of a log.
const LINES: usize = 10;

/// Bytes that are kept of each.
const LINE_BYTES: usize = 400;

/// The last lines of a stream.
#[derive(Debug, Default)]
pub(super) struct Tail {
    lines: VecDeque<Vec<u8>>,
    open: Vec<u8>,
}

impl Tail {
    /// Takes more of the stream.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' => self.end_line(),
                // A bar that draws itself anew on the same line: only its last state is a line.
                b'\r' => self.open.clear(),
                byte if self.open.len() < LINE_BYTES => self.open.push(*byte),
                _ => {}
            }
        }
    }

    /// The last lines, those without anything left out.
    pub(super) fn finish(mut self) -> Vec<String> {
        self.end_line();
        self.lines.iter().map(|line| String::from_utf8_lossy(line).trim_end().to_owned()).collect()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.open);
        if line.iter().all(u8::is_ascii_whitespace) {
            return;
        }
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn masked(secrets: &[&str], pieces: &[&str]) -> String {
        let mut masker = Masker::new(secrets.iter().copied());
        let mut shown: Vec<u8> = pieces.iter().flat_map(|piece| masker.feed(piece.as_bytes())).collect();
        shown.extend(masker.finish());
        String::from_utf8(shown).unwrap()
    }

    #[test]
    fn a_secret_is_masked_wherever_it_is_cut() {
        let text = "token=hunter22-long; again hunter22-long.";
        for cut in 0..text.len() {
            let (one, two) = text.split_at(cut);
            assert_eq!(masked(&["hunter22-long"], &[one, two]), "token=***; again ***.");
        }
        let bytes: Vec<String> = text.chars().map(String::from).collect();
        let bytes: Vec<&str> = bytes.iter().map(String::as_str).collect();
        assert_eq!(masked(&["hunter22-long"], &bytes), "token=***; again ***.");
    }

    #[test]
    fn of_two_that_begin_alike_the_longer_one_goes_whole() {
        assert_eq!(masked(&["abcd", "abcdefgh"], &["xabcd", "efghy abcde"]), "x***y ***e");
        assert_eq!(masked(&["abcd", "abcdefgh"], &["abcdef"]), "***ef");
    }

    #[test]
    fn each_line_of_a_long_one_counts_and_short_values_do_not() {
        assert_eq!(masked(&["first line\nsecond line\n", "1", ""], &["1 second line, first line"]), "1 ***, ***");
    }

    #[test]
    fn the_tail_is_the_last_lines() {
        let mut tail = Tail::default();
        for line in 0..30 {
            tail.feed(format!("line {line}\n\n").as_bytes());
        }
        tail.feed(b" 10%\r 20%\r100%");
        let lines = tail.finish();
        assert_eq!((lines.len(), lines[0].as_str(), lines[9].as_str()), (10, "line 21", "100%"));
    }
}
