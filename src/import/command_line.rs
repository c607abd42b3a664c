//! Command lines and shell scripts: words with their places.
//!
//! No crate that splits words keeps where each was, and a mistake in a command line is shown at its word. What a shell
//! would work out (`$(…)` but `$(expr A / B)`, globs) is not worked out; variables that the script sets itself are.

use std::collections::BTreeMap;

use engine::file::problem::Problem;
use engine::file::source::{SourceId, Span};

/// A word of a command, without its quotes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) text: String,
    pub(super) span: Span,
}

/// A command: variables set for it alone, and its words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Command {
    pub(super) environment: Vec<(String, Word)>,
    pub(super) words: Vec<Word>,
}

/// The commands of a text, with the variables replaced that it sets.
pub(super) fn commands(source: SourceId, text: &str, problems: &mut Vec<Problem>) -> Vec<Command> {
    let mut lexer = Lexer { source, text, at: 0, variables: BTreeMap::new(), problems };
    let mut commands = Vec::new();
    while lexer.at < text.len() {
        let command = lexer.command();
        if command.words.is_empty() {
            lexer.variables.extend(command.environment.into_iter().map(|(name, word)| (name, word.text)));
        } else {
            commands.push(command);
        }
    }
    commands
}

struct Lexer<'a> {
    source: SourceId,
    text: &'a str,
    at: usize,
    /// Those that commands before this one have set.
    variables: BTreeMap<String, String>,
    problems: &'a mut Vec<Problem>,
}

impl Lexer<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let letter = self.peek()?;
        self.at += letter.len_utf8();
        Some(letter)
    }

    /// The words up to the end of a line or `;`, `&` and `|`.
    fn command(&mut self) -> Command {
        let mut command = Command::default();
        loop {
            match self.peek() {
                None => break,
                Some('\n' | ';' | '&' | '|') => {
                    self.next();
                    break;
                }
                Some('\\') if self.rest().starts_with("\\\n") || self.rest().starts_with("\\\r\n") => {
                    self.at += self.rest().find('\n').unwrap_or(0) + 1;
                }
                Some('#') => self.at += self.rest().find('\n').unwrap_or(self.rest().len()),
                Some(letter) if letter.is_whitespace() => drop(self.next()),
                Some(_) => {
                    let word = self.word();
                    match assignment(&word) {
                        Some(set) if command.words.is_empty() => command.environment.push(set),
                        _ if command.words.is_empty() && is_no_command(&word.text) => {}
                        _ => command.words.push(word),
                    }
                }
            }
        }
        command
    }

    fn word(&mut self) -> Word {
        let start = self.at;
        let mut text = String::new();
        let mut quote = None;
        while let Some(letter) = self.peek() {
            match (quote, letter) {
                (None, '\n' | ';' | '&' | '|') => break,
                (None, letter) if letter.is_whitespace() => break,
                (None, '\'' | '"') => {
                    quote = Some(letter);
                    self.next();
                }
                (Some(open), letter) if open == letter => {
                    quote = None;
                    self.next();
                }
                (None, '\\') => {
                    self.next();
                    if let Some(escaped) = self.next() {
                        text.extend((escaped != '\n').then_some(escaped));
                    }
                }
                (Some('"'), '\\') => {
                    self.next();
                    match self.next() {
                        Some(escaped @ ('"' | '\\' | '$' | '`')) => text.push(escaped),
                        Some('\n') | None => {}
                        Some(other) => text.extend(['\\', other]),
                    }
                }
                (None | Some('"'), '$') => self.variable(&mut text),
                (_, letter) => {
                    text.push(letter);
                    self.next();
                }
            }
        }
        let span = Span { source: self.source, offset: start, len: self.at - start };
        if quote.is_some() {
            self.problems.push(Problem::error(
                "syntax",
                span,
                "a quote that is never closed",
                "it begins in this word",
            ));
        }
        Word { text, span }
    }

    /// `$(expr A op B)` of whole numbers: how scripts divide a batch by their processes.
    fn arithmetic(&mut self) -> Option<i64> {
        let behind = self.rest().strip_prefix("$(")?;
        let (inner, _) = behind.split_once(')')?;
        let words: Vec<String> = inner.split_whitespace().map(|word| self.filled(word)).collect();
        let [program, one, operator, other] = words.as_slice() else { return None };
        let (one, other) = (one.parse::<i64>().ok()?, other.parse::<i64>().ok()?);
        let value = match (program.as_str(), operator.trim_matches(['\\', '\'', '"'])) {
            ("expr", "+") => one.checked_add(other),
            ("expr", "-") => one.checked_sub(other),
            ("expr", "*") => one.checked_mul(other),
            ("expr", "/") => one.checked_div(other),
            _ => None,
        };
        self.at += if value.is_some() { inner.len() + 3 } else { 0 };
        value
    }

    /// A word, or the value of the variable that it is.
    fn filled(&self, word: &str) -> String {
        let name = word.strip_prefix('$').map(|name| name.trim_matches(['{', '}']));
        name.and_then(|name| self.variables.get(name)).cloned().unwrap_or_else(|| word.to_owned())
    }

    /// `$NAME`, `${NAME}`, and what [`Self::arithmetic`] works out.
    fn variable(&mut self, text: &mut String) {
        if let Some(value) = self.arithmetic() {
            return text.push_str(&value.to_string());
        }
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let behind = &self.rest()[1..];
        let (name, len) = match behind.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some((name, _)) if name.chars().all(is_name) => (name.to_owned(), name.len() + 3),
            _ => {
                let name: String = behind.chars().take_while(|letter| is_name(*letter)).collect();
                let len = name.len() + 1;
                (name, len)
            }
        };
        let span = Span { source: self.source, offset: self.at, len };
        self.at += len;
        match self.variables.get(&name) {
            Some(value) => text.push_str(value),
            None => {
                let message = format!("`{}` is worked out by a shell", &self.text[span.offset..span.end()]);
                let problem = Problem::error("unknown-variable", span, message, "its value is not in the text");
                self.problems.push(problem.with_help("write the value in its place"));
            }
        }
    }
}

/// `NAME=value`.
fn assignment(word: &Word) -> Option<(String, Word)> {
    let (name, value) = word.text.split_once('=')?;
    let is_name = name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_')
        && name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    is_name.then(|| (name.to_owned(), Word { text: value.to_owned(), span: word.span }))
}

/// Prompts, magics of notebooks, and what only says that variables follow.
fn is_no_command(word: &str) -> bool {
    matches!(word, "!" | "$" | "export" | "env" | "sudo" | "nohup" | "set") || word.starts_with("%%")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The variables of a command, and its words.
    type Plain = (Vec<(String, String)>, Vec<String>);

    fn read(text: &str) -> (Vec<Plain>, Vec<Problem>) {
        let mut problems = Vec::new();
        let commands = commands(SourceId(0), text, &mut problems);
        let texts = |words: Vec<Word>| words.into_iter().map(|word| word.text).collect();
        let plain = |command: Command| {
            let environment = command.environment.into_iter().map(|(name, word)| (name, word.text)).collect();
            (environment, texts(command.words))
        };
        (commands.into_iter().map(plain).collect(), problems)
    }

    #[test]
    fn words_are_a_shells() {
        let text = "# a comment\nA=1 B='x y' \\\nswift sft --model \"a b\" --x=it\\'s # rest\n! tune run x\n";
        let (commands, problems) = read(text);
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(commands.len(), 2);
        assert_eq!(commands[0].0, [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "x y".to_owned())]);
        assert_eq!(commands[0].1, ["swift", "sft", "--model", "a b", "--x=it's"]);
        assert_eq!(commands[1].1, ["tune", "run", "x"]);
    }

    #[test]
    fn a_quotient_is_worked_out() {
        let (commands, problems) = read("nproc_per_node=4\nswift sft --x $(expr 16 / $nproc_per_node) --y 1");
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(commands[0].1, ["swift", "sft", "--x", "4", "--y", "1"]);
        let (_, problems) = read("swift sft --x $(nproc) --y $(expr 1 / 0)");
        assert_eq!(problems.len(), 2, "{problems:?}");
    }

    #[test]
    fn variables_of_the_script_are_replaced_and_others_are_a_problem_at_their_place() {
        let (commands, problems) = read("export MODEL=a/b\nswift sft --model $MODEL --x '$MODEL' --y ${HOME}/x");
        assert_eq!(commands[0].1, ["swift", "sft", "--model", "a/b", "--x", "$MODEL", "--y", "/x"]);
        assert_eq!(problems.len(), 1);
        assert_eq!((problems[0].span.offset, problems[0].span.len), (59, 7));
    }
}
