//! What a stream can show: colour, Unicode, how wide it is, whether a person is watching.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

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

impl Look {
    /// How to write to standard output.
    pub(crate) fn stdout() -> Self {
        Self::of(std::io::stdout().is_terminal(), &|name| std::env::var(name).ok())
    }

    /// How to write to standard error.
    pub(crate) fn stderr() -> Self {
        Self::of(std::io::stderr().is_terminal(), &|name| std::env::var(name).ok())
    }

    fn of(terminal: bool, variable: &dyn Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let dumb = set("TERM").is_some_and(|term| term == "dumb");
        let forced = set("CLICOLOR_FORCE").is_some_and(|value| value != "0");
        Self {
            colour: set("NO_COLOR").is_none() && (forced || (terminal && !dumb)),
            unicode: unicode(&set),
            width: set("COLUMNS")
                .and_then(|text| text.parse().ok())
                .filter(|width| *width >= 40)
                .unwrap_or(DEFAULT_WIDTH),
            live: terminal && !dumb,
        }
    }

    /// Wraps text in an SGR code, such as `32` for green, where colour may be used.
    pub(crate) fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// The first text where Unicode may be used, else the second.
    pub(crate) fn either(self, unicode: &'static str, ascii: &'static str) -> &'static str {
        if self.unicode { unicode } else { ascii }
    }
}

/// Writes to standard error. Where its reader has gone away or its disk is full there is nobody left to tell, which is
/// no reason to end a run half-way, as the panic of `eprintln!` would. Nothing in it is obeyed but colours, where they
/// are used.
pub(crate) fn tell(text: impl Display) {
    let shown = crate::screen::shown(&text.to_string(), Look::stderr().colour);
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
        Look::of(terminal, &|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
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
    fn a_locale_of_another_character_set_means_ascii() {
        assert!(look(true, &[]).unicode);
        assert!(look(true, &[("LANG", "en_GB.utf8")]).unicode);
        assert!(!look(true, &[("LANG", "C")]).unicode);
        assert!(!look(true, &[("LC_ALL", "POSIX"), ("LANG", "C.UTF-8")]).unicode);
        assert!(!look(true, &[("LANG", "C.UTF-8"), ("TERM", "linux")]).unicode);
    }
}
