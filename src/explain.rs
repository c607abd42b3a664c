//! `pipeline explain`: what the code of a problem means, with an example.

use std::fmt::Write as _;
use std::io::Write;

use clap::Args;
use engine::file::codes::{self, ProblemCode};
use engine::suggest;

use crate::Format;
use crate::render::Failure;
use crate::table::Table;
use crate::terminal::{Look, wrapped};

/// Explain the code of a problem, with an example with and without the problem; without a code, list all codes.
///
/// `pipeline validate` names the code of each problem.
#[derive(Args)]
pub(crate) struct ExplainArgs {
    /// A code, such as `unknown-key`.
    code: Option<String>,
    /// How to print it.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Prints one code, or all of them.
pub(crate) fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let Some(name) = &args.code else { return list(args.format) };
    let code = codes::find(name).ok_or_else(|| unknown(name))?;
    match args.format {
        Format::Json => crate::print_json(code),
        Format::Text => Ok(crate::screen::stdout().write_all(in_words(code, Look::stdout().width).as_bytes())?),
    }
}

fn unknown(name: &str) -> Failure {
    let names: Vec<&str> = codes::all().map(|code| code.code).collect();
    let help = match suggest::nearest(name, &names) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => about(name).unwrap_or_else(|| "`pipeline explain` lists the codes".to_owned()),
    };
    Failure::wrong(format!("there is no code `{name}`")).with_help(help)
}

/// The codes that say something of a word, where they are few.
fn about(word: &str) -> Option<String> {
    const MOST: usize = 8;
    let word = word.to_lowercase();
    let says = |text: &str| text.split(|letter: char| !letter.is_alphanumeric()).any(|one| one.to_lowercase() == word);
    let says_so = |code: &&ProblemCode| says(code.code) || says(code.title);
    let found: Vec<String> = codes::all().filter(says_so).map(|code| format!("`{}`", code.code)).collect();
    (1..=MOST).contains(&found.len()).then(|| format!("codes about `{word}`: {}", found.join(", ")))
}

fn list(format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return crate::print_json(&codes::all().collect::<Vec<_>>());
    }
    let mut table = Table::new(["code", "", "problem"]);
    for code in codes::all() {
        table.row([code.code, code.severity.name(), code.title]);
    }
    write!(crate::screen::stdout(), "{}", table.fitted(Look::stdout()))?;
    Ok(())
}

fn in_words(code: &ProblemCode, columns: usize) -> String {
    let title = format!("{}: {} ({})", code.code, code.title, code.severity.name());
    let mut text = wrapped(&title, columns, 2) + "\n\n";
    let paragraph = |text: &str| wrapped(&text.split_whitespace().collect::<Vec<_>>().join(" "), columns, 0) + "\n";
    text += &paragraph(&code.meaning);
    text += &paragraph(&format!("What to do: {}", code.advice));
    for (name, example) in [("Wrong", code.wrong), ("Right", code.right)] {
        write!(text, "\n{name}:\n\n").expect("writing to a string cannot fail");
        for line in example.lines() {
            text += format!("    {line}").trim_end();
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::width;

    #[test]
    fn a_word_that_is_no_code_finds_those_that_are_about_it() {
        assert!(about("cycle").is_some_and(|help| help.contains("`cycle`")));
        assert!(about("template").is_some_and(|help| help.contains("`no-chat-template`")), "{:?}", about("template"));
        assert_eq!(about("nonsense"), None);
    }

    #[test]
    fn every_code_is_printed_with_both_examples() {
        for code in codes::all() {
            let text = in_words(code, 80);
            assert!(text.contains("\nWrong:\n\n    ") && text.contains("\nRight:\n\n    "), "{text}");
            assert!(text.lines().all(|line| line.starts_with("    ") || width(line) <= 80), "{text}");
        }
    }
}
