//! The two streams as people read them: whatever goes through here shows every control character of others instead of
//! obeying it.
//!
//! Line breaks and tabs stay, and so do the codes for colours where colour is used, which are this program's own. What
//! is printed for another program (JSON, manifests) goes past this.

use std::io::{self, StdoutLock, Write};

use engine::visible::{escape_into, is_hidden};

use crate::terminal::Look;

/// The longest code for a colour: `ESC [ 1 ; 4 ; 36 m`.
const LONGEST_CODE: usize = 20;

/// Standard output for a person.
pub(crate) fn stdout() -> Screen<StdoutLock<'static>> {
    Screen::new(io::stdout().lock(), Look::stdout())
}

/// Standard output for texts of others: what they wrote stays as it is, be it in letters that the locale lacks.
pub(crate) fn stdout_of_others() -> Screen<StdoutLock<'static>> {
    Screen::new(io::stdout().lock(), Look { unicode: true, ..Look::stdout() })
}

/// A stream in which nothing is hidden.
pub(crate) struct Screen<W: Write> {
    out: W,
    look: Look,
    /// The end of what came so far that may be the beginning of a character or of a code.
    held: Vec<u8>,
}

impl<W: Write> Screen<W> {
    /// One in which the codes of colours pass where colour is used.
    pub(crate) fn new(out: W, look: Look) -> Self {
        Self { out, look, held: Vec::new() }
    }

    fn show(&mut self, at_end: bool) -> io::Result<()> {
        let whole = if at_end { self.held.len() } else { self.held.len() - unfinished(&self.held, self.look.colour) };
        if whole == 0 {
            return Ok(());
        }
        let rest = self.held.split_off(whole);
        let text = std::mem::replace(&mut self.held, rest);
        self.out.write_all(shown(&String::from_utf8_lossy(&text), self.look).as_bytes())
    }
}

impl<W: Write> Write for Screen<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.held.extend_from_slice(bytes);
        self.show(false)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl<W: Write> Drop for Screen<W> {
    fn drop(&mut self) {
        // Who wants to know of a failure has asked for it before.
        let _ = self.show(true);
    }
}

/// Marks of this program's sentences, and what stands for them where Unicode is not used.
const IN_ASCII: [(char, &str); 6] = [('→', "->"), ('…', "..."), ('×', "x"), ('·', "-"), ('±', "+-"), ('°', "")];

/// A text with nothing hidden in it, in which this program's own marks are of ASCII where Unicode is not used.
pub(crate) fn shown(text: &str, look: Look) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let code = if look.colour { code_length(rest) } else { 0 };
        if code > 0 {
            shown.push_str(&rest[..code]);
            rest = &rest[code..];
            continue;
        }
        let in_ascii = IN_ASCII.iter().find(|(mark, _)| !look.unicode && *mark == letter);
        match in_ascii {
            Some((_, ascii)) => shown.push_str(ascii),
            None if is_hidden(letter) && !matches!(letter, '\n' | '\t') => escape_into(&mut shown, letter),
            None => shown.push(letter),
        }
        rest = &rest[letter.len_utf8()..];
    }
    shown
}

/// The length of the code for a colour that a text begins with; 0 where it begins with none.
fn code_length(text: &str) -> usize {
    let Some(code) = text.strip_prefix("\x1b[") else { return 0 };
    let digits = code.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b';').count();
    match code.as_bytes().get(digits) {
        Some(b'm') if digits + 3 <= LONGEST_CODE => digits + 3,
        _ => 0,
    }
}

/// How many bytes at the end may be the beginning of a character or of a code.
fn unfinished(bytes: &[u8], colour: bool) -> usize {
    match unfinished_character(bytes) {
        0 if colour => unfinished_code(bytes),
        bytes => bytes,
    }
}

fn unfinished_character(bytes: &[u8]) -> usize {
    let is_within = |byte: &u8| byte & 0b1100_0000 == 0b1000_0000;
    let back = bytes.iter().rev().take(3).take_while(|byte| is_within(byte)).count() + 1;
    let whole = match bytes.iter().rev().nth(back - 1) {
        Some(0xc2..=0xdf) => 2,
        Some(0xe0..=0xef) => 3,
        Some(0xf0..=0xf4) => 4,
        _ => 1,
    };
    if whole > back { back } else { 0 }
}

fn unfinished_code(bytes: &[u8]) -> usize {
    let last = &bytes[bytes.len().saturating_sub(LONGEST_CODE)..];
    let Some(at) = last.iter().rposition(|byte| *byte == 0x1b) else { return 0 };
    let begun = &last[at + 1..];
    let is_begun = begun.first().is_none_or(|first| *first == b'[')
        && begun.iter().skip(1).all(|byte| byte.is_ascii_digit() || *byte == b';');
    if is_begun { last.len() - at } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(bytes: &[u8], pieces: usize, colour: bool) -> String {
        let mut out = Vec::new();
        let look = Look { colour, unicode: true, width: 80, live: false };
        let mut screen = Screen::new(&mut out, look);
        bytes.chunks(pieces).for_each(|piece| screen.write_all(piece).unwrap());
        drop(screen);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_others_wrote_is_shown_and_not_obeyed_however_it_is_cut() {
        let text = "\x1b[1mtitle\x1b[0m \x1b]0;P\x07 你好\u{9b}31m\u{202e}x\x1b[2Jé\x1b";
        let plain = "\\x1b[1mtitle\\x1b[0m \\x1b]0;P\\x07 你好\\x9b31m\\u{202e}x\\x1b[2Jé\\x1b";
        let coloured = "\x1b[1mtitle\x1b[0m \\x1b]0;P\\x07 你好\\x9b31m\\u{202e}x\\x1b[2Jé\\x1b";
        for pieces in 1..text.len() {
            assert_eq!(printed(text.as_bytes(), pieces, false), plain);
            assert_eq!(printed(text.as_bytes(), pieces, true), coloured);
        }
    }

    #[test]
    fn marks_of_sentences_are_ascii_where_unicode_is_not_used() {
        let look = Look { colour: false, unicode: false, width: 80, live: false };
        assert_eq!(shown("rate 1 → 2, … and 3 more, é", look), "rate 1 -> 2, ... and 3 more, é");
        assert_eq!(shown("1 → 2", Look { unicode: true, ..look }), "1 → 2");
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced() {
        for pieces in 1..6 {
            assert_eq!(printed(b"a\x9b31m\xff\xe4\xbd", pieces, true), "a\u{fffd}31m\u{fffd}\u{fffd}");
        }
    }
}
