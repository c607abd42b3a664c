//! Whether the filters and tests that a text names exist: minijinja looks for them when they are called.

use engine::suggest;
use minijinja::machinery::{Instruction, Instructions};
use minijinja::{Environment, Error, ErrorKind, context};

/// Those that are built in, for a suggestion.
const FILTERS: &str = "abs attr batch bool capitalize chain count d default dictsort e escape first float format groupby \
    indent int items join last length lines list lower map max min reject rejectattr replace reverse \
    round safe select selectattr slice sort split string sum title tojson trim unique upper";
const TESTS: &str = "boolean defined divisibleby endingwith even false float integer iterable lower mapping none number \
    odd sequence startingwith string true undefined";

/// The names of what the checks add begin so.
const CHECK: char = '=';

/// Refuses a filter or a test that does not exist. A text that asks whether one exists knows what to do without it.
pub(super) fn check(program: &Instructions<'_>, environment: &Environment<'_>) -> Result<(), Error> {
    let instructions = || (0..).map_while(move |at| program.get(at));
    if instructions().any(|instruction| matches!(instruction, Instruction::PerformTest("filter" | "test", ..))) {
        return Ok(());
    }
    instructions().try_for_each(|instruction| match instruction {
        Instruction::ApplyFilter(name, ..) if !name.starts_with(CHECK) => {
            let exists = is(environment, "name is filter", name)?;
            if exists { Ok(()) } else { Err(unknown(ErrorKind::UnknownFilter, "filter", name, FILTERS)) }
        }
        Instruction::PerformTest(name, ..) => {
            let exists = is(environment, "name is test", name)?;
            if exists { Ok(()) } else { Err(unknown(ErrorKind::UnknownTest, "test", name, TESTS)) }
        }
        _ => Ok(()),
    })
}

fn is(environment: &Environment<'_>, question: &'static str, name: &str) -> Result<bool, Error> {
    Ok(environment.compile_expression(question)?.eval(context! { name })?.is_true())
}

fn unknown(kind: ErrorKind, what: &str, name: &str, known: &str) -> Error {
    let nearest = suggest::nearest(name, known.split(' '));
    let mean = nearest.map_or_else(String::new, |name| format!(" (did you mean `{name}`?)"));
    Error::new(kind, format!("there is no {what} `{name}`{mean}"))
}
