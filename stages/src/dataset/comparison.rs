//! Comparisons of a column with a number: of a text they are all true or all false, which is never meant.
//!
//! CSV knows no numbers. `score > 3` keeps every row of it without a word, since a text comes behind all numbers in the order of
//! the expression language; Python refuses the comparison.

/// A word of an expression, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word<'a> {
    Name(&'a str),
    Number,
    /// `<`, `<=`, `>` or `>=`.
    Order,
    Minus,
    /// Anything else.
    Other(char),
}

/// The names that an expression puts in order with a number written out. None where it asks for types (`n is number`): then it
/// knows what it does.
pub(super) fn names_beside_numbers(expression: &str) -> Vec<String> {
    let words = words(expression);
    let asks_for_types = words
        .windows(2)
        .any(|pair| matches!(pair, [Word::Name("is"), Word::Name("number" | "integer" | "float" | "string" | "not")]));
    if asks_for_types {
        return Vec::new();
    }
    let mut names = Vec::new();
    for at in (0..words.len()).filter(|at| words[*at] == Word::Order) {
        let (before, after) = (&words[..at], &words[at + 1..]);
        let number_before = before.last() == Some(&Word::Number);
        let number_after = matches!(after, [Word::Number, ..] | [Word::Minus, Word::Number, ..]);
        names.extend(name_at_end(before).filter(|_| number_after));
        names.extend(name_at_start(after).filter(|_| number_before));
    }
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(str::to_owned).collect()
}

/// The name that words end with, if it is no filter, attribute or test.
fn name_at_end<'a>(words: &[Word<'a>]) -> Option<&'a str> {
    match words {
        [.., Word::Other('|' | '.') | Word::Name("is"), Word::Name(_)] => None,
        [.., Word::Name(name)] => Some(name),
        _ => None,
    }
}

/// The name that words begin with, if nothing is done to it.
fn name_at_start<'a>(words: &[Word<'a>]) -> Option<&'a str> {
    match words {
        [Word::Name(_), Word::Other('|' | '.' | '[' | '('), ..] => None,
        [Word::Name(name), ..] => Some(name),
        _ => None,
    }
}

fn words(expression: &str) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let mut rest = expression.trim_start();
    while let Some(letter) = rest.chars().next() {
        let is_of_name = |letter: char| letter.is_alphanumeric() || letter == '_';
        let length = match letter {
            '"' | '\'' => end_of_text(rest, letter),
            _ if is_of_name(letter) => rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len()),
            '<' | '>' => 1 + usize::from(rest[1..].starts_with('=')),
            _ => letter.len_utf8(),
        };
        words.push(match letter {
            '0'..='9' => Word::Number,
            '<' | '>' => Word::Order,
            '-' => Word::Minus,
            _ if is_of_name(letter) => Word::Name(&rest[..length]),
            other => Word::Other(other),
        });
        rest = rest[length..].trim_start();
    }
    words
}

/// Where a text in quotes ends, behind its closing quote.
fn end_of_text(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, letter) in rest.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if letter == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beside_numbers_are_found_and_nothing_else() {
        for (expression, names) in [
            ("n > 5", &["n"][..]),
            ("n>=-0.5 and lang == 'en'", &["n"]),
            ("0 < n < 5 or 3 <= größe", &["größe", "n"]),
            ("not n < 5", &["n"]),
            ("n|int > 5", &[]),
            ("text|length > 5 and 3 < text|length", &[]),
            ("row.n > 5 or 5 > n[0]", &[]),
            ("'n > 5' in text", &[]),
            ("\"a \\\" n > 5\" == n", &[]),
            ("n is number and n > 5", &[]),
            ("n == 5", &[]),
            ("n > m", &[]),
            ("", &[]),
        ] {
            assert_eq!(names_beside_numbers(expression), names, "{expression}");
        }
    }
}
