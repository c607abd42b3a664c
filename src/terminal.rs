//! What a stream can show: colour, Unicode, how wide it is, whether a person is watching.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;

use nix::sys::termios::{self, LocalFlags, SetArg, Termios};

/// How to write to one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    /// Colours may be used; they never carry meaning alone.
    pub colour: bool,
    /// Characters beyond ASCII may be used for drawing.
    pub unicode: bool,
    /// Columns to wrap at.
    pub width: usize,
    /// A person watches: lines may be redrawn.
    pub live: bool,
}

/// Columns to wrap at where no terminal says otherwise.
const DEFAULT_WIDTH: usize = 120;

/// Columns below which a terminal's own wrapping reads better than ours.
const NARROWEST: usize = 30;

impl Look {
    /// How to write to standard output.
    pub(crate) fn stdout() -> Self {
        let stream = std::io::stdout();
        Self::of(stream.is_terminal(), terminal_size::terminal_size_of(&stream), &|name| std::env::var(name).ok())
    }

    /// How to write to standard error.
    pub(crate) fn stderr() -> Self {
        let stream = std::io::stderr();
        Self::of(stream.is_terminal(), terminal_size::terminal_size_of(&stream), &|name| std::env::var(name).ok())
    }

    fn of(
        terminal: bool,
        size: Option<(terminal_size::Width, terminal_size::Height)>,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let dumb = set("TERM").is_some_and(|term| term == "dumb");
        let forced = set("CLICOLOR_FORCE").is_some_and(|value| value != "0");
        Self {
            colour: set("NO_COLOR").is_none() && (forced || (terminal && !dumb)),
            unicode: unicode(&set),
            width: set("COLUMNS")
                .and_then(|text| text.parse().ok())
                .or_else(|| size.map(|(width, _)| usize::from(width.0)))
                .filter(|width| *width >= NARROWEST)
                .unwrap_or(DEFAULT_WIDTH),
            live: terminal && !dumb,
        }
    }

    /// Wraps text in an SGR code, such as `32` for green, where colour may be used.
    pub(crate) fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A text for a person who watches, wrapped between words; in a pipe a line stays one, for `grep`. Further lines
    /// are set in as far as the first is, and by `hanging` more.
    pub(crate) fn wrap(self, text: &str, hanging: usize) -> String {
        if self.live { wrapped(text, self.width, hanging) } else { text.to_owned() }
    }

    /// The first text where Unicode may be used, else the second.
    pub(crate) fn either(self, unicode: &'static str, ascii: &'static str) -> &'static str {
        if self.unicode { unicode } else { ascii }
    }
}

/// While this lives, a key such as `^C` is not written where the cursor stands: behind the last of the lines that are
/// redrawn, where it would begin another one that nobody counts.
pub(crate) struct SilentKeys(Option<Termios>);

impl SilentKeys {
    /// Silences the keys of standard error's terminal, where this program is the one in front of it.
    pub(crate) fn new() -> Self {
        let stream = std::io::stderr();
        let Some(before) = is_in_front(&stream).then(|| termios::tcgetattr(&stream).ok()).flatten() else {
            return Self(None);
        };
        let mut silent = before.clone();
        silent.local_flags.remove(LocalFlags::ECHOCTL);
        let silenced = termios::tcsetattr(&stream, SetArg::TCSADRAIN, &silent);
        Self(silenced.is_ok().then_some(before))
    }
}

impl Drop for SilentKeys {
    fn drop(&mut self) {
        let stream = std::io::stderr();
        if let Some(before) = self.0.take().filter(|_| is_in_front(&stream)) {
            // A terminal that is gone needs no settings.
            let _ = termios::tcsetattr(&stream, SetArg::TCSADRAIN, &before);
        }
    }
}

/// Whether a stream is the terminal that this program is in front of: one behind it is stopped where it changes
/// settings.
fn is_in_front(stream: &impl AsFd) -> bool {
    nix::unistd::tcgetpgrp(stream).is_ok_and(|group| group == nix::unistd::getpgrp())
}

/// The lines of a text in at most `width` columns each, longer words excepted: a path that is cut cannot be copied.
/// Further lines of one are set in as far as it is, and by `hanging` more.
pub(crate) fn wrapped(text: &str, width: usize, hanging: usize) -> String {
    let line = |line| wrapped_line(line, width, hanging, LongWords::Whole);
    let lines: Vec<String> = text.split('\n').map(line).collect();
    lines.join("\n")
}

/// As [`wrapped`], of a line in a column of a table: longer words are cut, too, since beside a wider one the other
/// columns would not stay what they are.
pub(crate) fn wrapped_in_column(line: &str, width: usize) -> String {
    wrapped_line(line, width, 0, LongWords::Cut)
}

/// What becomes of a word that is wider than its line may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LongWords {
    Whole,
    Cut,
}

fn wrapped_line(line: &str, width: usize, hanging: usize, long_words: LongWords) -> String {
    let words = line.trim_start_matches(' ');
    let own = line.len() - words.len();
    // A line that is set in by half of what there is has no room left to wrap in.
    let (own, hanging) = (own.min(width / 2), if own + hanging > width / 2 { 2 } else { hanging });
    let (first, further) = (" ".repeat(own), " ".repeat(own + hanging));
    let options = textwrap::Options::new(width)
        .initial_indent(&first)
        .subsequent_indent(&further)
        .break_words(long_words == LongWords::Cut)
        .word_separator(textwrap::WordSeparator::AsciiSpace)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .wrap_algorithm(textwrap::WrapAlgorithm::FirstFit);
    if words.is_empty() { String::new() } else { textwrap::fill(words, options) }
}

/// Writes to standard error. Where its reader has gone away or its disk is full there is nobody left to tell, which is
/// no reason to end a run half-way, as the panic of `eprintln!` would. Nothing in it is obeyed but colours, where they
/// are used.
pub(crate) fn tell(text: impl Display) {
    let shown = crate::screen::shown(&text.to_string(), Look::stderr());
    let _ = std::io::stderr().lock().write_all(shown.as_bytes());
}

/// As [`tell`], of a line.
pub(crate) fn tell_line(text: impl Display) {
    tell(format_args!("{text}\n"));
}

/// A locale that names another character set rules Unicode out. No locale at all does not: containers and CI runners
/// set none, and what reads their output understands UTF-8.
fn unicode(set: &dyn Fn(&str) -> Option<String>) -> bool {
    if set("TERM").is_some_and(|term| term == "linux") {
        return false; // The kernel's console has few glyphs.
    }
    ["LC_ALL", "LC_CTYPE", "LANG"].iter().find_map(|name| set(name)).is_none_or(|locale| {
        let locale = locale.to_ascii_uppercase();
        locale.contains("UTF-8") || locale.contains("UTF8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(terminal: bool, variables: &[(&str, &str)]) -> Look {
        Look::of(terminal, None, &|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn colour_needs_a_terminal_that_is_not_dumb() {
        assert!(look(true, &[]).colour);
        assert!(!look(false, &[]).colour);
        assert!(!look(true, &[("TERM", "dumb")]).colour);
        assert!(look(false, &[("CLICOLOR_FORCE", "1")]).colour);
    }

    #[test]
    fn no_color_wins_over_everything_and_an_empty_one_counts_as_unset() {
        assert!(!look(true, &[("NO_COLOR", "1"), ("CLICOLOR_FORCE", "1")]).colour);
        assert!(look(true, &[("NO_COLOR", "")]).colour);
    }

    #[test]
    fn the_width_is_the_terminals_unless_it_is_told() {
        let size = Some((terminal_size::Width(60), terminal_size::Height(20)));
        let told = |name: &str| (name == "COLUMNS").then(|| "50".to_owned());
        assert_eq!(Look::of(true, size, &|_| None).width, 60);
        assert_eq!(Look::of(true, size, &told).width, 50);
        assert_eq!(Look::of(false, None, &|_| None).width, DEFAULT_WIDTH);
    }

    #[test]
    fn lines_are_wrapped_between_words_and_paths_stay_whole() {
        assert_eq!(wrapped("one two  three", 8, 0), "one two\nthree");
        assert_eq!(wrapped("  as of /a/long-path/that stays", 16, 2), "  as of\n    /a/long-path/that\n    stays");
        assert_eq!(wrapped("a\n\nb", 8, 0), "a\n\nb");
        assert_eq!(wrapped("run 20260301-123410-041 ends", 20, 0), "run\n20260301-123410-041\nends");
        assert_eq!(wrapped_in_column("run 20260301-123410-041 ends", 10), "run\n20260301-1\n23410-041\nends");
    }

    #[test]
    fn a_locale_of_another_character_set_means_ascii() {
        assert!(look(true, &[]).unicode);
        assert!(look(true, &[("LANG", "en_GB.utf8")]).unicode);
        assert!(!look(true, &[("LANG", "C")]).unicode);
        assert!(!look(true, &[("LC_ALL", "POSIX"), ("LANG", "C.UTF-8")]).unicode);
        assert!(!look(true, &[("LANG", "C.UTF-8"), ("TERM", "linux")]).unicode);
    }
}
