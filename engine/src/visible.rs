//! Text of others (names, data, answers of servers), as it may be shown: a terminal obeys control characters, and a
//! reader believes what stands before them.
//!
//! What is hidden is escaped as in a Rust text, so that it is seen and told apart: `\x1b`, `\u{202e}`.

use std::borrow::Cow;
use std::fmt::Write as _;

/// A text with its line breaks and tabs, and nothing else that a terminal would obey.
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, |letter| is_hidden(letter) && !matches!(letter, '\n' | '\t'))
}

/// As [`visible`], on one line: a name, a cell of a table.
pub fn on_one_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_hidden)
}

/// Whether a character does something to what is shown around it: control characters, and those that turn the direction
/// of writing.
pub fn is_hidden(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Adds a character in its escaped form.
pub fn escape_into(shown: &mut String, letter: char) {
    match letter {
        '\n' => shown.push_str("\\n"),
        '\r' => shown.push_str("\\r"),
        '\t' => shown.push_str("\\t"),
        letter if u32::from(letter) < 0x100 => {
            let _ = write!(shown, "\\x{:02x}", u32::from(letter));
        }
        letter => {
            let _ = write!(shown, "\\u{{{:x}}}", u32::from(letter));
        }
    }
}

fn escaped(text: &str, is_hidden: fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for letter in text.chars() {
        match is_hidden(letter) {
            true => escape_into(&mut shown, letter),
            false => shown.push(letter),
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        let cases = [
            ("plain, 你好, é", "plain, 你好, é"),
            ("\u{1b}]0;title\u{7}", "\\x1b]0;title\\x07"),
            ("a\u{9b}31mb\u{7f}", "a\\x9b31mb\\x7f"),
            ("safe\u{202e}txt.exe\u{2066}", "safe\\u{202e}txt.exe\\u{2066}"),
            ("one\r\ntwo\tthree\0", "one\\r\ntwo\tthree\\x00"),
        ];
        for (text, shown) in cases {
            assert_eq!(visible(text), shown);
        }
        assert_eq!(on_one_line("a\nb\tc"), "a\\nb\\tc");
        assert!(matches!(visible("plain"), Cow::Borrowed(_)));
    }
}
