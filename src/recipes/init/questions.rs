//! Questions to the user, where there is one: on a terminal. Elsewhere what is not given is an error.

use std::io::{self, BufRead, IsTerminal, Write};

use crate::render::{self, Failure};

/// A question is asked until there were so many wrong answers.
const WRONG_ANSWERS: usize = 3;

/// What is asked for.
pub(super) struct Question<'a> {
    /// The option that answers it.
    pub(super) option: &'a str,
    pub(super) text: &'a str,
    /// What an empty line stands for.
    pub(super) default: Option<&'a str>,
}

/// What `accept` makes of the answer to a question: of what was given, of what the user types, or of the default. After
/// a wrong answer the user is asked again.
pub(super) fn answer<T>(
    given: Option<&str>,
    question: &Question<'_>,
    accept: &dyn Fn(&str) -> Result<T, Failure>,
) -> Result<T, Failure> {
    if let Some(given) = given {
        return accept(given);
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let missing = Failure::wrong(format!("`{}` is not given", question.option));
        let default = question.default.ok_or_else(|| missing.with_help("on a terminal `pipeline init` asks for it"));
        return accept(default?);
    }
    for _ in 1..WRONG_ANSWERS {
        match accept(&ask(question)?) {
            Ok(accepted) => return Ok(accepted),
            // It is shown, and does not end the program.
            Err(failure) => _ = render::failure(&failure),
        }
    }
    accept(&ask(question)?)
}

/// What the user types in a line that is not empty, or the default.
fn ask(question: &Question<'_>) -> Result<String, Failure> {
    let Question { option, text, default } = question;
    loop {
        let mut screen = io::stderr().lock();
        match default {
            Some(default) => write!(screen, "{text} [{default}]: ")?,
            None => write!(screen, "{text}: ")?,
        }
        screen.flush()?;
        let mut line = String::new();
        if io::stdin().lock().read_line(&mut line)? == 0 {
            return Err(Failure::wrong(format!("no answer for `{option}`")));
        }
        match (line.trim(), default) {
            ("", Some(default)) => return Ok((*default).to_owned()),
            ("", None) => {}
            (typed, _) => return Ok(typed.to_owned()),
        }
    }
}
