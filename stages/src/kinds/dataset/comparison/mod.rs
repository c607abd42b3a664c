//! `<`, `<=`, `>` and `>=` as Python has them.
//!
//! The expression language puts all values in one order: null before numbers, numbers before texts, texts before lists.
//! So `score < 5` would keep a row without a score, and `score > 3` every row of a CSV, which knows no numbers; Python
//! refuses both. Its operators cannot be replaced, so an expression is compiled with a function in their place: `score
//! < 5` as `__ordered('score < 5', score, '<', 5)`.

mod rewriting;

use std::cmp::Ordering;

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
pub(super) use rewriting::{checked, checked_template};

use crate::data::jinja;

/// The function. No column is likely to have its name.
const FUNCTION: &str = "__ordered";

/// An operator that puts values in order, or a test that does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Operator {
    fn of(text: &str) -> Option<Self> {
        match text {
            "<" => Some(Self::Less),
            "<=" => Some(Self::LessOrEqual),
            ">" => Some(Self::Greater),
            ">=" => Some(Self::GreaterOrEqual),
            _ => None,
        }
    }

    fn holds(self, order: Ordering) -> bool {
        match self {
            Self::Less => order.is_lt(),
            Self::LessOrEqual => order.is_le(),
            Self::Greater => order.is_gt(),
            Self::GreaterOrEqual => order.is_ge(),
        }
    }
}

/// Gives an environment what [`checked`] and [`checked_template`] need, and the tests that compare.
pub(super) fn define(environment: &mut Environment<'_>) {
    environment.add_function(FUNCTION, |written: &str, chain: Rest<Value>| holds(&chain, written));
    for (operator, names) in [
        (Operator::Less, ["lt", "lessthan", "<"].as_slice()),
        (Operator::LessOrEqual, &["le", "<="]),
        (Operator::Greater, &["gt", "greaterthan", ">"]),
        (Operator::GreaterOrEqual, &["ge", ">="]),
    ] {
        for name in names {
            let test = move |left: Value, right: Value| compare(&left, operator, &right, &format!("is {name}"));
            environment.add_test(*name, test);
        }
    }
}

/// Whether values hold that stand in one comparison with operators between them: `a < b == c`.
fn holds(chain: &[Value], written: &str) -> Result<bool, Error> {
    for at in (1..chain.len()).step_by(2) {
        let [left, operator, right] = [at - 1, at, at + 1].map(|at| chain.get(at).unwrap_or(&Value::UNDEFINED));
        let holds = match operator.as_str().unwrap_or_default() {
            "==" | "!=" | "in" | "not in" => {
                jinja::looked_at(left)?;
                jinja::looked_at(right)?;
                match operator.as_str().unwrap_or_default() {
                    "==" => left == right,
                    "!=" => left != right,
                    "in" => contains(right, left),
                    _ => !contains(right, left),
                }
            }
            ordered => {
                let operator = Operator::of(ordered).ok_or_else(|| Error::from(ErrorKind::InvalidOperation))?;
                compare(left, operator, right, written)?
            }
        };
        if !holds {
            return Ok(false);
        }
    }
    Ok(true)
}

fn contains(container: &Value, value: &Value) -> bool {
    match (container.as_str(), container.kind()) {
        (Some(text), _) => value.as_str().is_some_and(|part| text.contains(part)),
        (None, ValueKind::Map) => container.get_item(value).is_ok_and(|found| !found.is_undefined()),
        _ => container.try_iter().is_ok_and(|mut items| items.any(|item| item == *value)),
    }
}

fn compare(left: &Value, operator: Operator, right: &Value, written: &str) -> Result<bool, Error> {
    if left.is_undefined() || right.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, format!("`{written}` compares a missing value")));
    }
    jinja::compared(left, right)?;
    let numbers = number(left).zip(number(right));
    let order = match (numbers, left.kind(), right.kind()) {
        // Nothing is smaller or greater than NaN, or equal to it.
        (Some((left, right)), ..) if is_nan(&left) || is_nan(&right) => return Ok(false),
        (Some((left, right)), ..) => left.cmp(&right),
        (None, ValueKind::String, ValueKind::String) | (None, ValueKind::Bytes, ValueKind::Bytes) => left.cmp(right),
        (None, ValueKind::Seq | ValueKind::Iterable, ValueKind::Seq | ValueKind::Iterable) => {
            return compare_lists(left, operator, right, written);
        }
        _ => return Err(Error::new(ErrorKind::InvalidOperation, unordered(left, right, written))),
    };
    Ok(operator.holds(order))
}

/// As Python compares lists: by the first values that differ, else by length.
fn compare_lists(left: &Value, operator: Operator, right: &Value, written: &str) -> Result<bool, Error> {
    let (mut left, mut right) = (left.try_iter()?, right.try_iter()?);
    loop {
        match (left.next(), right.next()) {
            (Some(left), Some(right)) if left == right => {}
            (Some(left), Some(right)) => return compare(&left, operator, &right, written),
            (left, right) => return Ok(operator.holds(left.is_some().cmp(&right.is_some()))),
        }
    }
}

/// A number; `true` is 1.
fn number(value: &Value) -> Option<Value> {
    match value.kind() {
        ValueKind::Number => Some(value.clone()),
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        _ => None,
    }
}

fn is_nan(value: &Value) -> bool {
    !value.is_integer() && f64::try_from(value.clone()).is_ok_and(f64::is_nan)
}

fn unordered(left: &Value, right: &Value, written: &str) -> String {
    let kinds = [left.kind(), right.kind()];
    let hint = if kinds.contains(&ValueKind::None) {
        "; test `is not none` first to leave such rows out"
    } else if kinds.contains(&ValueKind::String) && kinds.contains(&ValueKind::Number) {
        "; `|int` or `|float` converts a string to a number"
    } else {
        ""
    };
    format!("`{written}` compares {} with {}{hint}", describe(left), describe(right))
}

fn describe(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "nothing",
        ValueKind::None => "null",
        ValueKind::Bool => "true or false",
        ValueKind::Number => "a number",
        ValueKind::String => "text",
        ValueKind::Bytes => "bytes",
        ValueKind::Seq | ValueKind::Iterable => "a list",
        ValueKind::Map | ValueKind::Plain | ValueKind::Invalid => "an object",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use minijinja::context;

    use super::*;
    use crate::data::jinja::{Form, Program};

    fn truth(expression: &str, context: Value) -> Result<bool, String> {
        let mut environment = Environment::new();
        jinja::bound(&mut environment);
        define(&mut environment);
        let expression = checked(expression);
        let program = Program::compile(&expression, &Form::Expression).unwrap();
        let truth = program.value(&environment, || context, |value| Ok(value.is_true()));
        truth.map_err(|error| error.detail().unwrap_or_default().to_owned())
    }

    #[test]
    fn numbers_are_ordered_as_in_python() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let row = || context! { nan, inf, n => 3, half => 0.5, yes => true, big => u64::MAX };
        for (expression, expected) in [
            ("nan < 5", false),
            ("nan > 5", false),
            ("nan >= nan", false),
            ("not nan < 5", true),
            ("nan is lt 5", false),
            ("inf > 5", true),
            ("inf < 5", false),
            ("-inf < n", true),
            ("inf >= inf", true),
            ("inf > big", true),
            ("half < n < 4", true),
            ("yes < n", true),
            ("yes >= 1", true),
            ("big > n", true),
            ("n is gt 2", true),
            ("'a' < 'b'", true),
            ("[1, 2] < [1, 3]", true),
            ("[1] < [1, 2]", true),
            ("[2] < [1, 'a']", false),
            ("n > 5 or n < 4", true),
            ("0 < n == 3", true),
            ("0 < n != 3", false),
            ("0 < n in [3]", true),
            ("0 < n not in [3]", false),
            ("'a' < 'b' in 'abc'", true),
            ("n < 2 < none", false),
        ] {
            assert_eq!(truth(expression, row()), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn what_has_no_order_is_refused() {
        let row = || context! { none => (), n => 3, text => "7", list => [1], object => context! { a => 1 } };
        for (expression, problem) in [
            ("none < 5", "`none < 5` compares null with a number; test `is not none` first to leave such rows out"),
            ("not n > none", "`n > none` compares a number with null; test"),
            ("text > 3", "`text > 3` compares text with a number; `|int` or `|float` converts a string to a number"),
            ("list > 5", "compares a list with a number"),
            ("object < text", "compares an object with text"),
            ("[1, none] < [1, 2]", "compares null with a number"),
            ("none is lt 5", "`is lt` compares null with a number"),
        ] {
            let error = truth(expression, row()).unwrap_err();
            assert!(error.contains(problem), "{expression}: {error}");
        }
        for (expression, expected) in
            [("none is not none and none < 5", false), ("text|int > 3", true), ("none == 5", false)]
        {
            assert_eq!(truth(expression, row()), Ok(expected), "{expression}");
        }
    }
}
