//! Conditions: what `when:` of a stage may say, over variables and the environment.
//!
//! `${vars.size} == large and not ${env.CI}`: comparisons with `==` and `!=`, joined by `not`, `and`, `or` and
//! parentheses. There is nothing else, so that a reader of the file knows what a stage depends on.

use super::scalar;
use super::source::Span;
use super::tree::{Node, Value};

/// How deep parentheses and `not` may nest.
const MAX_NESTED: usize = 64;

/// Why a condition has no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConditionError {
    /// It does not read as a condition: what is wrong, and the part of it.
    Wrong(String, String),
    /// A reference in it leads nowhere, which has been said.
    Said,
}

/// The truth of a condition; `value_of` gives what `${…}` stands for, by the whole of it and the name in it, or has
/// said why not.
///
/// # Errors
/// Fails where the text is no condition, compares what cannot be compared, or refers to nothing.
pub fn evaluate(text: &str, value_of: &mut dyn FnMut(&str, &str) -> Option<Value>) -> Result<bool, ConditionError> {
    let tokens = tokens(text)?;
    let mut reader = Reader { tokens: &tokens, at: 0, nested: 0, value_of };
    let value = reader.any()?;
    match reader.next() {
        None => truth(&value),
        Some(token) => Err(wrong("expected `and`, `or`, `==` or `!=` before it", token.text)),
    }
}

/// A value in a condition, and the text that it is in.
struct Operand<'t> {
    value: Value,
    text: &'t str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Open,
    Close,
    Equal,
    NotEqual,
    /// A text in quotes.
    Quoted,
    /// `${…}`.
    Reference,
    /// A word: `and`, `or`, `not`, or a plain value.
    Word,
}

#[derive(Debug, Clone, Copy)]
struct Token<'t> {
    kind: Kind,
    text: &'t str,
}

fn tokens(text: &str) -> Result<Vec<Token<'_>>, ConditionError> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let (kind, len) = match first {
            '(' => (Kind::Open, 1),
            ')' => (Kind::Close, 1),
            '=' if rest.starts_with("==") => (Kind::Equal, 2),
            '!' if rest.starts_with("!=") => (Kind::NotEqual, 2),
            '\'' | '"' => match rest[1..].find(first) {
                Some(end) => (Kind::Quoted, end + 2),
                None => return Err(wrong("the quote is not closed", rest)),
            },
            '$' if rest.starts_with("${") => match rest.find('}') {
                Some(end) => (Kind::Reference, end + 1),
                None => return Err(wrong("`${` is not closed", rest)),
            },
            _ => match rest.find(|c: char| c.is_whitespace() || "()=!'\"$<>&|".contains(c)) {
                Some(0) => {
                    return Err(wrong(
                        "conditions have `==`, `!=`, `and`, `or`, `not` and parentheses",
                        first_of(rest),
                    ));
                }
                Some(end) => (Kind::Word, end),
                None => (Kind::Word, rest.len()),
            },
        };
        tokens.push(Token { kind, text: &rest[..len] });
        rest = rest[len..].trim_start();
    }
    Ok(tokens)
}

/// The signs that a wrong operator consists of.
fn first_of(rest: &str) -> &str {
    let end = rest.find(|c: char| c.is_alphanumeric() || c.is_whitespace() || "'\"$".contains(c));
    &rest[..end.filter(|end| *end > 0).unwrap_or(rest.chars().next().map_or(0, char::len_utf8))]
}

struct Reader<'t, 'v> {
    tokens: &'t [Token<'t>],
    at: usize,
    nested: usize,
    value_of: &'v mut dyn FnMut(&str, &str) -> Option<Value>,
}

impl<'t> Reader<'t, '_> {
    fn any(&mut self) -> Result<Operand<'t>, ConditionError> {
        let mut left = self.all()?;
        while self.word("or") {
            // Both sides are read: a mistake on the right is one even where the left decides.
            let right = self.all()?;
            left = Operand { value: Value::Bool(truth(&left)? | truth(&right)?), text: left.text };
        }
        Ok(left)
    }

    fn all(&mut self) -> Result<Operand<'t>, ConditionError> {
        let mut left = self.negated()?;
        while self.word("and") {
            let right = self.negated()?;
            left = Operand { value: Value::Bool(truth(&left)? & truth(&right)?), text: left.text };
        }
        Ok(left)
    }

    fn negated(&mut self) -> Result<Operand<'t>, ConditionError> {
        if !self.word("not") {
            return self.compared();
        }
        let value = self.inside(Self::negated)?;
        Ok(Operand { value: Value::Bool(!truth(&value)?), text: value.text })
    }

    fn compared(&mut self) -> Result<Operand<'t>, ConditionError> {
        let left = self.single()?;
        let Some(Token { kind: kind @ (Kind::Equal | Kind::NotEqual), .. }) = self.peek() else { return Ok(left) };
        self.at += 1;
        let right = self.single()?;
        let equal = equal(&left, &right)?;
        Ok(Operand { value: Value::Bool(equal == (kind == Kind::Equal)), text: left.text })
    }

    fn single(&mut self) -> Result<Operand<'t>, ConditionError> {
        let Some(token) = self.next() else { return Err(wrong("a value is missing at its end", "")) };
        let text = token.text;
        let value = match token.kind {
            Kind::Open => {
                let value = self.inside(Self::any)?;
                return match self.next() {
                    Some(Token { kind: Kind::Close, .. }) => Ok(value),
                    _ => Err(wrong("a parenthesis is not closed", text)),
                };
            }
            Kind::Quoted => Value::String(text[1..text.len() - 1].to_owned()),
            Kind::Reference => {
                let name = text[2..text.len() - 1].trim();
                let value = (self.value_of)(text, name).ok_or(ConditionError::Said)?;
                match value {
                    // A variable of the environment is what it would be if it were written here.
                    Value::String(text) if name.starts_with("env.") => scalar::plain(&text),
                    value => value,
                }
            }
            Kind::Word if !["and", "or", "not"].contains(&text) => scalar::plain(text),
            Kind::Word | Kind::Close | Kind::Equal | Kind::NotEqual => {
                return Err(wrong("expected a value", text));
            }
        };
        Ok(Operand { value, text })
    }

    fn inside<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, ConditionError>) -> Result<T, ConditionError> {
        if self.nested == MAX_NESTED {
            return Err(wrong("it is nested too deep", ""));
        }
        self.nested += 1;
        let value = read(self);
        self.nested -= 1;
        value
    }

    fn peek(&self) -> Option<Token<'t>> {
        self.tokens.get(self.at).copied()
    }

    fn next(&mut self) -> Option<Token<'t>> {
        let token = self.peek()?;
        self.at += 1;
        Some(token)
    }

    fn word(&mut self, word: &str) -> bool {
        let found = self.peek().is_some_and(|token| token.kind == Kind::Word && token.text == word);
        self.at += usize::from(found);
        found
    }
}

/// Nothing is false, so that a variable of the environment may be absent; text and numbers are neither true nor false.
fn truth(operand: &Operand<'_>) -> Result<bool, ConditionError> {
    match &operand.value {
        Value::Bool(value) => Ok(*value),
        Value::Null => Ok(false),
        other => {
            let what = describe(other);
            Err(wrong(format!("expected true or false, found {what}; compare it by `==` or `!=`"), operand.text))
        }
    }
}

/// Whether two values are the same. Of two types they never are, and that would pass in silence for a slip of the pen.
fn equal(left: &Operand<'_>, right: &Operand<'_>) -> Result<bool, ConditionError> {
    match (&left.value, &right.value) {
        (Value::Null, other) | (other, Value::Null) => Ok(*other == Value::Null),
        (Value::Integer(a), Value::Float(b)) | (Value::Float(b), Value::Integer(a)) => Ok(*a as f64 == *b),
        (Value::Bool(_), Value::Bool(_))
        | (Value::Integer(_), Value::Integer(_))
        | (Value::Float(_), Value::Float(_))
        | (Value::String(_), Value::String(_)) => Ok(left.value == right.value),
        (a, b) => Err(wrong(format!("it compares {} with {}", describe(a), describe(b)), right.text)),
    }
}

fn describe(value: &Value) -> &'static str {
    Node { span: Span::default(), value: value.clone() }.describe()
}

fn wrong(what: impl Into<String>, part: &str) -> ConditionError {
    ConditionError::Wrong(what.into(), part.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<bool, ConditionError> {
        evaluate(text, &mut |_, name| match name {
            "vars.yes" => Some(Value::Bool(true)),
            "vars.no" => Some(Value::Bool(false)),
            "vars.size" => Some(Value::String("small".to_owned())),
            "vars.digit" => Some(Value::String("1".to_owned())),
            "vars.rank" => Some(Value::Integer(8)),
            "vars.list" => Some(Value::List(Vec::new())),
            "env.CI" => Some(Value::String("true".to_owned())),
            "env.N" => Some(Value::String("1".to_owned())),
            "env.NOT_SET" => Some(Value::Null),
            _ => None,
        })
    }

    #[test]
    fn conditions_are_true_or_false() {
        for text in [
            "${vars.yes}",
            "${ vars.yes }",
            "true",
            "not ${vars.no}",
            "not not ${vars.yes}",
            "${vars.size} == small",
            "${vars.size}=='small'",
            "${vars.size} != \"large\" and ${vars.rank} == 8",
            "${vars.rank} == 8.0",
            "${vars.no} or ${vars.yes} and ${vars.yes}",
            "(${vars.yes} or ${vars.no}) and not (${vars.no})",
            "not ${vars.size} == large",
            "${env.CI}",
            "${env.N} == 1",
            "not ${env.NOT_SET}",
            "${env.NOT_SET} == null",
            "${env.NOT_SET} != 3",
        ] {
            assert_eq!(of(text), Ok(true), "{text}");
            assert_eq!(of(&format!("not ({text})")), Ok(false), "{text}");
        }
        // `and` binds before `or`, `not` before `and`.
        assert_eq!(of("${vars.yes} or ${vars.yes} and ${vars.no}"), Ok(true));
        assert_eq!(of("not ${vars.no} and ${vars.no}"), Ok(false));
    }

    #[test]
    fn what_is_no_condition_is_explained() {
        for (text, part) in [
            ("", ""),
            ("${vars.size}", "${vars.size}"),
            ("${vars.rank}", "${vars.rank}"),
            ("${vars.yes} == ", ""),
            ("${vars.yes} && ${vars.no}", "&&"),
            ("${vars.rank} > 4", ">"),
            ("${vars.rank} = 4", "="),
            ("(${vars.yes}", "("),
            ("${vars.yes})", ")"),
            ("${vars.yes} ${vars.no}", "${vars.no}"),
            ("and ${vars.yes}", "and"),
            ("${vars.size} == 'small", "'small"),
            ("${vars.size", "${vars.size"),
            ("${vars.digit} == 1", "1"),
            ("${vars.list} == 1", "1"),
            ("${vars.yes} or ${vars.size}", "${vars.size}"),
            ("é(", "("),
        ] {
            match of(text) {
                Err(ConditionError::Wrong(what, found)) => {
                    assert_eq!(found, part, "{text}: {what}");
                    assert!(!what.is_empty());
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        assert_eq!(of("${vars.nope} or true"), Err(ConditionError::Said));
    }

    #[test]
    fn deep_nesting_ends_in_an_error_and_not_in_the_stack() {
        for text in ["not ".repeat(100_000) + "true", "(".repeat(100_000)] {
            assert!(matches!(of(&text), Err(ConditionError::Wrong(what, _)) if what.contains("too deep")));
        }
    }
}
