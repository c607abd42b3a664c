//! Expressions with a function in place of the operators that put values in order.
//!
//! This reads as much of the language as that takes: words, brackets, and where a comparison begins and ends.

use super::{FUNCTION, Operator};

/// An expression with the function in place of its operators.
pub(in crate::kinds::dataset) fn checked(expression: &str) -> String {
    let (tokens, _) = tokens(expression, None);
    Rewriting { source: expression, tokens: &tokens, at: 0, written: 0 }.whole(false)
}

/// The same of every expression of a template.
pub(in crate::kinds::dataset) fn checked_template(template: &str) -> String {
    let mut result = String::with_capacity(template.len());
    let mut rest = template;
    let begins = |(at, _): &(usize, &str), rest: &str| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
    while let Some((at, _)) = rest.match_indices('{').find(|found| begins(found, rest)) {
        result.push_str(&rest[..at]);
        let (tag, behind) = rest[at..].split_at(2);
        result.push_str(tag);
        let length = match tag {
            "{#" => behind.find("#}").unwrap_or(behind.len()),
            _ => {
                let (tokens, length) = tokens(behind, Some(if tag == "{{" { "}}" } else { "%}" }));
                let inside = &behind[..length];
                result += &Rewriting { source: inside, tokens: &tokens, at: 0, written: 0 }.whole(tag == "{%");
                rest = &behind[length..];
                if tag == "{%" && matches!(tokens.as_slice(), [only] if only.text(inside) == "raw") {
                    let raw = end_of_raw(rest);
                    result.push_str(&rest[..raw]);
                    rest = &rest[raw..];
                }
                continue;
            }
        };
        result.push_str(&behind[..length]);
        rest = &behind[length..];
    }
    result + rest
}

/// Where the tag stands that ends what is taken as it stands.
fn end_of_raw(text: &str) -> usize {
    let ends =
        |(at, _): &(usize, &str)| text[at + 2..].trim_start_matches(['-', '+']).trim_start().starts_with("endraw");
    text.match_indices("{%").find(ends).map_or(text.len(), |(at, _)| at)
}

/// A word of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Token {
    kind: TokenKind,
    start: usize,
    end: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Name,
    /// `<`, `==` and their kin.
    Comparison,
    Open,
    Close,
    /// What stands between expressions: `,`, `:`, `=`.
    Border,
    /// What is part of one.
    Other,
}

impl Token {
    fn text<'a>(&self, source: &'a str) -> &'a str {
        &source[self.start..self.end]
    }
}

/// The words of an expression up to the `end` of its tag, and where that begins.
fn tokens(source: &str, end: Option<&str>) -> (Vec<Token>, usize) {
    let (mut tokens, mut at, mut depth) = (Vec::new(), 0, 0_usize);
    loop {
        at += source[at..].len() - source[at..].trim_start().len();
        let rest = &source[at..];
        let ends = |end: &str| rest.strip_prefix(['-', '+']).unwrap_or(rest).starts_with(end) || rest.starts_with(end);
        let Some(letter) = rest.chars().next().filter(|_| depth > 0 || !end.is_some_and(ends)) else {
            return (tokens, at);
        };
        let is_of_name = |letter: char| letter.is_alphanumeric() || letter == '_';
        let two = rest.get(..2).unwrap_or_default();
        let (kind, length) = match letter {
            '"' | '\'' => (TokenKind::Other, end_of_text(rest, letter)),
            '0'..='9' => (TokenKind::Other, rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len())),
            _ if is_of_name(letter) => (TokenKind::Name, rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len())),
            _ if ["==", "!=", "<=", ">="].contains(&two) => (TokenKind::Comparison, 2),
            '<' | '>' => (TokenKind::Comparison, 1),
            '(' | '[' | '{' => (TokenKind::Open, 1),
            ')' | ']' | '}' => (TokenKind::Close, 1),
            ',' | ':' | '=' => (TokenKind::Border, 1),
            _ => (TokenKind::Other, letter.len_utf8()),
        };
        match kind {
            TokenKind::Open => depth += 1,
            TokenKind::Close => depth = depth.saturating_sub(1),
            _ => {}
        }
        tokens.push(Token { kind, start: at, end: at + length });
        at += length;
    }
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

/// What a word is among comparisons.
enum Role<'a> {
    /// Part of a value that is compared.
    Value,
    /// It compares, and more words belong to it (`not in`).
    Compares(&'a str, usize),
    /// A comparison ends before it and may begin behind it.
    Border,
}

/// Writes an expression anew, from one word to the next.
struct Rewriting<'a> {
    source: &'a str,
    tokens: &'a [Token],
    /// The next word.
    at: usize,
    /// How much of the source is written, blanks between words included.
    written: usize,
}

/// Values that are compared with each other: `a < b == c`.
#[derive(Default)]
struct Chain<'a> {
    /// The values before the last, each with the operator behind it.
    before: Vec<(String, &'a str)>,
    last: String,
    /// Where the first begins in the source.
    start: Option<usize>,
}

impl<'a> Rewriting<'a> {
    /// All of it; the first word of a statement (`if`, `for`) is none of an expression.
    fn whole(mut self, is_statement: bool) -> String {
        let mut text = String::new();
        if is_statement && !self.tokens.is_empty() {
            text += self.take(1);
        }
        while self.at < self.tokens.len() {
            text += &self.group();
            // A bracket that closes nothing is for the language to say.
            if self.at < self.tokens.len() {
                text += self.take(1);
            }
        }
        text + &self.source[self.written..]
    }

    /// Up to the bracket that closes what it is called in.
    fn group(&mut self) -> String {
        let (mut text, mut chain) = (String::new(), Chain::default());
        while let Some(token) = self.tokens.get(self.at).filter(|token| token.kind != TokenKind::Close) {
            match self.role(*token) {
                Role::Value => {
                    chain.start.get_or_insert(token.start);
                    let is_open = token.kind == TokenKind::Open;
                    chain.last += self.take(1);
                    if is_open {
                        chain.last += &self.group();
                        chain.last += self.take(1);
                    }
                }
                Role::Compares(operator, words) => {
                    self.take(words);
                    chain.before.push((std::mem::take(&mut chain.last), operator));
                }
                Role::Border => {
                    text += &self.end(std::mem::take(&mut chain));
                    text += self.take(1);
                }
            }
        }
        text + &self.end(chain)
    }

    /// The next words as they stand, with the blanks before them.
    fn take(&mut self, words: usize) -> &'a str {
        self.at = (self.at + words).min(self.tokens.len());
        let end = self.at.checked_sub(1).map_or(0, |last| self.tokens[last].end);
        let taken = &self.source[self.written.min(end)..end];
        self.written = end;
        taken
    }

    fn role(&self, token: Token) -> Role<'a> {
        let word = |at: usize| self.tokens.get(at).map_or("", |token| token.text(self.source));
        let before = |back: usize| self.at.checked_sub(back).map_or("", word);
        let text = token.text(self.source);
        match token.kind {
            TokenKind::Comparison => Role::Compares(text, 1),
            TokenKind::Border => Role::Border,
            TokenKind::Open | TokenKind::Close | TokenKind::Other => Role::Value,
            // An attribute, a filter, a test.
            TokenKind::Name if matches!(before(1), "." | "|" | "is") || (before(1), before(2)) == ("not", "is") => {
                Role::Value
            }
            TokenKind::Name => match text {
                "in" => Role::Compares(text, 1),
                "not" if word(self.at + 1) == "in" => Role::Compares("not in", 2),
                "and" | "or" | "not" | "if" | "else" | "recursive" => Role::Border,
                _ => Role::Value,
            },
        }
    }

    /// Values that were compared with each other.
    fn end(&self, chain: Chain<'_>) -> String {
        let Chain { before, last, start } = chain;
        let written = self.source[start.unwrap_or(self.written)..self.written].trim();
        let values: Vec<&str> = before.iter().map(|(value, _)| value.as_str()).chain([last.as_str()]).collect();
        let is_ordered = before.iter().any(|(_, operator)| Operator::of(operator).is_some());
        if !is_ordered || values.iter().any(|value| value.trim().is_empty()) {
            return before.iter().map(|(value, operator)| format!("{value} {operator}")).collect::<String>() + &last;
        }
        let blanks = &values[0][..values[0].len() - values[0].trim_start().len()];
        // Each value once: a comparison in a comparison would else be written twice as often on each level.
        let others = values[1..].iter().zip(&before);
        let others: String = others.map(|(value, (_, operator))| format!(", '{operator}', {}", value.trim())).collect();
        format!("{blanks}{FUNCTION}({}, {}{others})", quoted(written), values[0].trim())
    }
}

/// Longest comparison that a message has whole, in letters.
const LONGEST: usize = 80;

/// A text of the expression language.
fn quoted(text: &str) -> String {
    let text: String = match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    };
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_become_calls_and_everything_else_stays() {
        for (expression, expected) in [
            ("n > 5", "__ordered('n > 5', n, '>', 5)"),
            ("not n<=-0.5 and 'a' in x", "not __ordered('n<=-0.5', n, '<=', -0.5) and 'a' in x"),
            ("a < b <= c", "__ordered('a < b <= c', a, '<', b, '<=', c)"),
            ("a == b < c", "__ordered('a == b < c', a, '==', b, '<', c)"),
            (
                "f(x=a < 1)[b > 2]|sort(reverse=true) > 3",
                "__ordered('f(x=a < 1)[b > 2]|sort(reverse=true) > 3', f(x=__ordered('a < 1', a, '<', 1))[__ordered('b > 2', b, '>', 2)]|sort(reverse=true), '>', 3)",
            ),
            (
                "(a < 1) or x is not in [1] and y is lt 3",
                "(__ordered('a < 1', a, '<', 1)) or x is not in [1] and y is lt 3",
            ),
            (
                "1 if a > 'x\\'<' else {'k': b >= 2}",
                "1 if __ordered('a > \\'x\\\\\\'<\\'', a, '>', 'x\\'<') else {'k': __ordered('b >= 2', b, '>=', 2)}",
            ),
            ("a not in b and c.in > 1", "a not in b and __ordered('c.in > 1', c.in, '>', 1)"),
            ("'n > 5' in text", "'n > 5' in text"),
            ("a == 1 and b != c", "a == 1 and b != c"),
            ("a <", "a <"),
            ("größe>3", "__ordered('größe>3', größe, '>', 3)"),
            ("", ""),
        ] {
            let squeezed = |text: &str| text.split_whitespace().collect::<String>();
            assert_eq!(squeezed(&checked(expression)), squeezed(expected), "{expression}");
        }
    }

    #[test]
    fn comparisons_in_comparisons_grow_as_what_is_written_does() {
        let deep = (0..100).fold("x".to_owned(), |inner, _| format!("x < ({inner}) < x"));
        assert!(checked(&deep).len() < 25_000, "{}", checked(&deep).len());
        let long = format!("x{}", " < x".repeat(10_000));
        assert!(checked(&long).len() < 10 * long.len());
    }

    #[test]
    fn only_the_expressions_of_a_template_change() {
        for (template, expected) in [
            ("a < b {{ n < 1 }} c", "a < b {{ __ordered('n < 1', n, '<', 1) }} c"),
            (
                "{%- if n > 1 -%}<b>{% elif m < 2 %}{% endif %}",
                "{%- if __ordered('n > 1', n, '>', 1) -%}<b>{% elif __ordered('m < 2', m, '<', 2) %}{% endif %}",
            ),
            (
                "{% for x in xs if x < 3 %}{{ {'a': {'b': x}} }}{% endfor %}",
                "{% for x in xs if __ordered('x < 3', x, '<', 3) %}{{ {'a': {'b': x}} }}{% endfor %}",
            ),
            (
                "{# a < b #}{% raw %}{{ a < b }}{% endraw %}{{ '}}' }}",
                "{# a < b #}{% raw %}{{ a < b }}{% endraw %}{{ '}}' }}",
            ),
            ("{{ a", "{{ a"),
        ] {
            assert_eq!(checked_template(template), expected, "{template}");
        }
    }
}
