//! Questions to the user, where there is one: on a terminal. Elsewhere what is not given is an error.

use std::io::{self, BufRead, IsTerminal, Write};

use crate::render::Failure;

/// The answer to a question: what was given, what the user types, or with an empty line the default.
pub(super) fn answer(
    given: Option<&str>,
    option: &str,
    question: &str,
    default: Option<&str>,
) -> Result<String, Failure> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let missing = || {
            Failure::wrong(format!("`{option}` is not given")).with_help("on a terminal `pipeline init` asks for it")
        };
        return default.map(str::to_owned).ok_or_else(missing);
    }
    loop {
        let mut screen = io::stderr().lock();
        match default {
            Some(default) => write!(screen, "{question} [{default}]: ")?,
            None => write!(screen, "{question}: ")?,
        }
        screen.flush()?;
        let mut line = String::new();
        if io::stdin().lock().read_line(&mut line)? == 0 {
            return Err(Failure::wrong(format!("no answer for `{option}`")));
        }
        match (line.trim(), default) {
            ("", Some(default)) => return Ok(default.to_owned()),
            ("", None) => {}
            (typed, _) => return Ok(typed.to_owned()),
        }
    }
}
