//! What the keys of a task make of a row: a column, a value as it stands, or a Jinja template.

use std::sync::LazyLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, Value as Object};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::Value;

use super::documents::Document;
use super::expression::Expression;
use super::file::FieldValue;
use super::functions::Function;
use super::literal;
use crate::data::jinja::{self, Form, Program};
use crate::data::prompt::python;

/// Strict about what is not there; lists print as Python's.
static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_syntax(syntax());
    jinja::bound(&mut environment);
    python::define(&mut environment);
    environment.set_formatter(python::format_lists);
    environment.add_filter("tojson", python::tojson_of_jinja);
    environment.add_filter("regex_replace", regex_replace);
    environment
});

/// The harness's own filter: `re.sub`, of the first `count` matches or all.
fn regex_replace(
    text: &str,
    pattern: &str,
    replacement: &str,
    rest: Rest<Object>,
    named: Kwargs,
) -> Result<String, Error> {
    let count: Option<usize> = match rest.first() {
        None => named.get("count")?,
        Some(count) => Some(usize::try_from(count.clone())?),
    };
    named.assert_all_used()?;
    let wrong = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    let pattern = Expression::new(pattern).map_err(wrong)?;
    let mut written = String::new();
    let mut letters = replacement.chars();
    while let Some(letter) = letters.next() {
        match (letter, letters.clone().next()) {
            ('\\', Some(digit)) if digit.is_ascii_digit() => {
                letters.next();
                written += &format!("${{{digit}}}");
            }
            ('$', _) => written.push_str("$$"),
            _ => written.push(letter),
        }
    }
    pattern.replace(text, count.unwrap_or(0), &written).map_err(wrong)
}

fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder().keep_trailing_newline(true).build().expect("the syntax is the usual one")
}

/// A key's value, ready to be used on rows.
pub struct Field<'t>(Made<'t>);

/// What makes something of a row.
enum Made<'t> {
    Value(&'t Value),
    /// A column's name, or a template.
    Text(&'t str, Program<'t>),
    Function(&'t Function),
}

impl<'t> Field<'t> {
    /// Compiles what is a template.
    ///
    /// # Errors
    /// Says what is wrong with the template.
    pub fn new(value: &'t FieldValue) -> Result<Self, String> {
        Ok(Self(match value {
            FieldValue::Function(function) => Made::Function(function),
            FieldValue::Value(Value::String(text)) => {
                let program = Program::compile(text, &Form::Template(syntax())).map_err(|error| what(&error))?;
                program.check_names(&ENVIRONMENT).map_err(|error| what(&error))?;
                Made::Text(text, program)
            }
            FieldValue::Value(value) => Made::Value(value),
        }))
    }

    /// What it makes of a row: the column of this name, the text of a template, the value itself, or what the function
    /// returns.
    ///
    /// # Errors
    /// Says what the template or function fails over.
    pub fn of(&self, row: &Document) -> Result<Value, String> {
        match &self.0 {
            Made::Value(value) => Ok((*value).clone()),
            Made::Function(function) => function.call(&[Value::Object(row.clone())]),
            Made::Text(text, program) => match row.get(*text) {
                Some(column) => Ok(column.clone()),
                None => {
                    let context = || Object::from(Serde(row));
                    program.render(&ENVIRONMENT, context).map(Value::String).map_err(|error| what(&error))
                }
            },
        }
    }

    /// The same where `doc_to_choice` exists: digits are an index.
    ///
    /// # Errors
    /// As for [`Field::of`].
    pub fn index_or_text(&self, row: &Document, has_choices: bool) -> Result<Value, String> {
        let value = self.of(row)?;
        let index = value.as_str().filter(|_| has_choices && self.is_template(row)).and_then(digits);
        Ok(index.map_or(value, Value::from))
    }

    /// A target: an index, a text, or a list of either.
    ///
    /// # Errors
    /// As for [`Field::of`].
    pub fn target(&self, row: &Document, has_choices: bool) -> Result<Value, String> {
        let value = self.index_or_text(row, has_choices)?;
        match value.as_str().filter(|text| text.starts_with('[') && text.ends_with(']')).and_then(literal::list) {
            Some(list) if self.is_template(row) => Ok(Value::Array(list)),
            _ => Ok(value),
        }
    }

    /// The choices of a row.
    ///
    /// # Errors
    /// As for [`Field::of`]; what is no list of texts is named.
    pub fn choices(&self, row: &Document) -> Result<Vec<String>, String> {
        let list = match self.of(row)? {
            Value::Array(list) => list,
            Value::Object(named) => named.into_iter().map(|(_, value)| value).collect(),
            Value::String(text) => literal::list(&text).ok_or_else(|| format!("`{text}` is not a list of choices"))?,
            other => return Err(format!("`{other}` is no list of choices")),
        };
        Ok(list.iter().map(printed).collect())
    }

    fn is_template(&self, row: &Document) -> bool {
        matches!(&self.0, Made::Text(text, _) if !row.contains_key(*text))
    }
}

/// A value as Python prints it into a text.
pub fn printed(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => python::print(&Object::from(Serde(value))),
    }
}

/// The number that a text of digits alone is.
fn digits(text: &str) -> Option<i64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { text.parse().ok() } else { None }
}

fn what(error: &minijinja::Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_does_not_exist_is_told_before_any_row() {
        let error = Field::new(&FieldValue::from("{{ question|uper }}")).err().unwrap();
        assert!(error.contains("there is no filter `uper` (did you mean `upper`?)"), "{error}");
        for known in
            ["{{ q|regex_replace('a', 'b')|tojson }}", "question", "{% if q is defined %}{{ q|int }}{% endif %}"]
        {
            assert!(Field::new(&FieldValue::from(known)).is_ok(), "{known}");
        }
    }
}
