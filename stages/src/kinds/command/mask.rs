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
    /// A masker of these values, also as JSON and addresses have them; of one with several lines each line counts.
    pub(super) fn new<'v>(values: impl IntoIterator<Item = &'v str>) -> Self {
        let texts = values.into_iter().flat_map(|value| std::iter::once(value).chain(value.lines()));
        let mut secrets: Vec<Vec<u8>> = texts.map(str::trim).flat_map(forms).map(String::into_bytes).collect();
        secrets.sort();
        secrets.dedup();
        secrets.retain(|secret| secret.len() >= SHORTEST);
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self { secrets, held: Vec::new() }
    }

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

/// The ways in which programs write a text down: as it is, inside a JSON text, and inside an address.
fn forms(text: &str) -> Vec<String> {
    let quoted = serde_json::Value::from(text).to_string();
    let json = quoted[1..quoted.len() - 1].to_owned();
    // Python writes ASCII alone, PHP and JavaScript for a page mind the slash.
    let ascii = |hex: fn(u16) -> String| -> String { json.chars().map(|letter| in_ascii(letter, hex)).collect() };
    let (lower, upper) = (ascii(|unit| format!("\\u{unit:04x}")), ascii(|unit| format!("\\u{unit:04X}")));
    let slashes = json.replace('/', "\\/");
    let address: String = text.bytes().map(in_address).collect();
    let spaces = address.replace("%20", "+");
    let low = lower_hex(&address);
    vec![text.to_owned(), json, lower, upper, slashes, address, spaces, low]
}

fn in_ascii(letter: char, hex: fn(u16) -> String) -> String {
    if letter.is_ascii() {
        return letter.to_string();
    }
    letter.encode_utf16(&mut [0; 2]).iter().map(|unit| hex(*unit)).collect()
}

fn in_address(byte: u8) -> String {
    match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    }
}

/// An address with `%2f` for `%2F`.
fn lower_hex(address: &str) -> String {
    let mut parts = address.split('%');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| {
        let (digits, rest) = part.split_at(2.min(part.len()));
        text + "%" + &digits.to_ascii_lowercase() + rest
    })
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
    fn a_secret_is_masked_as_json_and_addresses_have_it_too() {
        let secret = "a\"b/c é d\\";
        let json = serde_json::to_string(secret).unwrap();
        assert_eq!(masked(&[secret], &[&json]), "\"***\"");
        for written in [
            r#"a\"b/c \u00e9 d\\"#,
            r#"a\"b/c \u00E9 d\\"#,
            r#"a\"b\/c é d\\"#,
            "a%22b%2Fc%20%C3%A9%20d%5C",
            "a%22b%2fc%20%c3%a9%20d%5c",
            "a%22b%2Fc+%C3%A9+d%5C",
        ] {
            assert_eq!(masked(&[secret], &["x=", written, "&"]), "x=***&", "{written}");
        }
        let plain = Masker::new(["hunter22-long"]);
        assert_eq!(plain.secrets().len(), 1, "a plain one has one form");
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
