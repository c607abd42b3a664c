//! Jinja templates and expressions of strangers, within limits: a row of a data set, or a checkpoint of the Hub, brings
//! text that is worked out here, and must take neither the memory nor the time of the machine, nor end the process.
//!
//! minijinja counts the instructions of a template (its fuel), and not what one of them does: `text * 1000` is one
//! instruction, and so is a filter that fills a gigabyte. So a template is compiled to minijinja's own instructions,
//! and before each that can make something large, or look through something large, another is inserted that charges it
//! to an [account](meter) first. Filters, tests, functions and methods are wrapped in the same way. What cannot be
//! charged is refused when the template is compiled.
//!
//! - [`compile`]: from text to instructions, in bounded depth; [`fold`]: constants that the compiler would work out.
//! - [`instrument`]: which instruction is preceded by which check; [`checks`]: the checks.
//! - [`filters`], [`methods`], [`strings`]: what is built in, with its price; [`names`]: whether what is named exists.
//! - [`measure`]: how large and deep a value is; [`meter`]: the account.
//!
//! The limits are those of one rendering: [`meter::MOST_STEPS`] and [`meter::MOST_BYTES`], the bytes of everything that
//! is made on the way taken together, so that what is alive at once is within them whatever is kept.

mod checks;
mod compile;
mod filters;
mod fold;
mod instrument;
mod measure;
mod meter;
mod methods;
mod names;
mod space;
mod strings;
#[cfg(test)]
mod tests;

pub(crate) use checks::{compare as compared, look as looked_at, print, printed};
pub(crate) use compile::{Form, Program};
pub(crate) use filters::{attribute, escaped, priced_as_json};
pub(crate) use meter::made;
pub(crate) use methods::is_space;

use minijinja::Environment;

/// Puts everything that is built in under the limits.
pub(crate) fn bound(environment: &mut Environment<'_>) {
    environment.set_fuel(Some(meter::MOST_STEPS));
    environment.set_recursion_limit(DEEPEST_CALLS);
    environment.set_formatter(|out, state, value| print(out, state, value, None));
    environment.set_unknown_method_callback(methods::call);
    checks::install(environment);
    filters::install(environment);
    space::install(environment);
}

/// Has `~`, `string` and `join` write values in these words, as `{{ … }}` does with a formatter of its own.
pub(crate) fn write_by(environment: &mut Environment<'_>, word: checks::Word) {
    checks::write_by(environment, word);
    filters::write_by(environment, word);
}

/// How deep frames may lie, in minijinja's counting: a call of a macro takes five of them, a loop one.
const DEEPEST_CALLS: usize = 250;
