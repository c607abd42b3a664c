//! `filter` and `map`: minijinja expressions and templates over the columns of a row.

use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

use engine::error::StageError;
use engine::file::tree::{Node, Value as NodeValue};
use engine::parameter::{KeyWriter, Parameter, Reader};
use engine::suggest;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};
use serde_json::json;

use super::Dataset;
use super::comparison::{self, checked, checked_template};
use super::flaw::{Flaw, Reason};
use super::lookup::{Fields, Lookup, ROW};
use super::read::Wanted;
use crate::data::jinja::{self, Form, Program};
use crate::data::number;
use crate::data::prompt::python;

/// What `filter:` says: an expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition(Source);

/// What an entry of `map:` says: a text with `{{ expressions }}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewColumn(Source);

/// An expression or a text with some.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    written: String,
    /// As it is compiled: with comparisons that are checked.
    checked: String,
}

impl Parameter for Condition {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let text = text_of(node, reader)?;
        match Source::read(text, checked, |text| Code::expression(text)?.check_names()) {
            Ok(source) => Some(Self(source)),
            Err(error) => {
                let expected = "an expression such as `lang == \'en\' and text|length > 10`";
                reader.bad_value(node, what(&error), expected);
                None
            }
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(self.0.written.clone());
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "string", "examples": ["lang == 'en' and text|length > 10"] })
    }
}

impl Parameter for NewColumn {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let text = text_of(node, reader)?;
        match Source::read(text, checked_template, |text| Code::compile(text)?.check_names()) {
            Ok(source) => Some(Self(source)),
            Err(error) => {
                reader.bad_value(node, what(&error), "a string such as `{{ title }}: {{ body }}`");
                None
            }
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(self.0.written.clone());
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "string", "examples": ["{{ title }}: {{ body }}"] })
    }
}

impl Source {
    /// Reads what can be compiled as it is written (which bounds how deep brackets lie) and with its comparisons
    /// checked.
    fn read(
        written: &str,
        checked: fn(&str) -> String,
        compile: impl Fn(&str) -> Result<(), minijinja::Error>,
    ) -> Result<Self, minijinja::Error> {
        compile(written)?;
        let checked = checked(written);
        let unclear = "a comparison (`<`, `>`) cannot be checked here";
        compile(&checked).map_err(|_| minijinja::Error::new(ErrorKind::SyntaxError, unclear))?;
        Ok(Self { written: written.to_owned(), checked })
    }
}

fn text_of<'a>(node: &'a Node, reader: &mut Reader) -> Option<&'a str> {
    let NodeValue::String(text) = &node.value else {
        reader.wrong_type(node, "a string");
        return None;
    };
    Some(text)
}

/// What went wrong, without the place inside the expression that has no name.
fn what(error: &minijinja::Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), str::to_owned)
}

fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder().keep_trailing_newline(true).build().expect("the syntax is the usual one")
}

/// Where expressions are worked out: strict about what is not there, and with Python's methods on texts and lists.
pub(super) fn environment<'a>() -> Environment<'a> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_syntax(syntax());
    jinja::bound(&mut environment);
    python::define(&mut environment);
    comparison::define(&mut environment);
    environment
}

/// An expression alone, or a text around some.
struct Code<'a> {
    /// That of an expression keeps its type where it is a list, an object or null; that of a template is text.
    form: Form,
    source: &'a str,
    program: Program<'a>,
}

impl<'a> Code<'a> {
    fn expression(source: &'a str) -> Result<Self, minijinja::Error> {
        let form = Form::Expression;
        Ok(Self { program: Program::compile(source, &form)?, form, source })
    }

    fn compile(text: &'a str) -> Result<Self, minijinja::Error> {
        // A block of YAML ends with a line break; other white space is meant.
        let whole = text.strip_suffix('\n').unwrap_or(text);
        let inside = whole.strip_prefix("{{").and_then(|rest| rest.strip_suffix("}}"));
        if let Some(Ok(code)) = inside.map(Self::expression) {
            return Ok(code);
        }
        let form = Form::Template(syntax());
        Ok(Self { program: Program::compile(text, &form)?, form, source: text })
    }

    fn check_names(&self) -> Result<(), minijinja::Error> {
        static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(environment);
        self.program.check_names(&ENVIRONMENT)
    }

    /// What it looks for in the row as a whole, `row.name`.
    fn looked_for(&self, environment: &'a Environment<'a>) -> Vec<String> {
        let name = |path: &String| Some(path.strip_prefix(ROW)?.strip_prefix('.')?.split('.').next()?.to_owned());
        let mut names: Vec<String> =
            Program::names(self.source, &self.form, environment).iter().filter_map(name).collect();
        names.sort();
        names
    }
}

/// A compiled expression.
struct Compiled<'a> {
    /// Where the file says it: `filter`, `map.text`.
    field: String,
    text: &'a str,
    code: Code<'a>,
    environment: &'a Environment<'a>,
}

impl Compiled<'_> {
    /// Whether a name stands in it, for certain where it is used: more names than are used may be found.
    fn mentions(&self, name: &str) -> bool {
        let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
        self.text.split(|letter| !is_letter(letter)).any(|word| word == name)
    }

    /// Whether it holds for a row.
    fn holds(&self, fields: &Arc<Fields>) -> Result<bool, Flaw> {
        let holds = self.worked_out(fields, |value| Ok(serde_json::Value::Bool(value.is_true())))?;
        Ok(holds == serde_json::Value::Bool(true))
    }

    /// What it makes of a row, as a column holds it.
    fn column(&self, fields: &Arc<Fields>) -> Result<serde_json::Value, Flaw> {
        self.worked_out(fields, |value| as_json(&value))
    }

    /// What is made of its value. `finish` is within the limits too.
    fn worked_out<T: From<String>>(
        &self,
        fields: &Arc<Fields>,
        finish: impl FnOnce(Value) -> Result<T, minijinja::Error>,
    ) -> Result<T, Flaw> {
        let lookup = Lookup::new(Arc::clone(fields));
        let context = || Value::from_dyn_object(Arc::clone(&lookup));
        let result = match &self.code.form {
            Form::Expression => self.code.program.value(self.environment, context, |value| {
                if value.is_undefined() { Ok(None) } else { finish(value).map(Some) }
            }),
            Form::Template(_) => self.code.program.render(self.environment, context).map(|text| Some(T::from(text))),
        };
        // A comparison with nothing is no error of the language, and a slip of the pen in a name would filter out all
        // rows.
        let is_global = |name: &String| self.environment.globals().any(|(global, _)| global == name);
        if let Some(name) = lookup.missed().into_iter().find(|name| !is_global(name)) {
            return Err(self.missing(&name, fields));
        }
        if let Some(number) = lookup.too_large() {
            let room = if number.contains('.') { "digits than a float keeps" } else { "than 128 bits" };
            return Err(self.flaw(&format!("{number} has more {room}")));
        }
        result.map_err(|error| self.flaw(&what(&error)))?.ok_or_else(|| self.flaw("gives nothing"))
    }

    fn missing(&self, name: &str, fields: &Fields) -> Flaw {
        let nearest = suggest::nearest(name, fields.keys());
        let mean = match (filter_for(name), nearest) {
            (Some(filter), _) => format!(" (a function of Python is a filter here: `column|{filter}`)"),
            (None, Some(name)) => format!(" (did you mean `{name}`?)"),
            (None, None) => String::new(),
        };
        Flaw::new(Reason::Missing, format!("`{}` uses column `{name}`, which is missing{mean}", self.field))
            .of_field(&self.field)
    }

    fn flaw(&self, problem: &str) -> Flaw {
        Flaw::new(Reason::Expression, format!("`{}`: {problem}", self.field)).of_field(&self.field)
    }
}

/// The filter that does what a function of Python does.
fn filter_for(function: &str) -> Option<&'static str> {
    Some(match function {
        "len" => "length",
        "str" => "string",
        "int" => "int",
        "float" => "float",
        "abs" => "abs",
        "round" => "round",
        "sum" => "sum",
        "min" => "min",
        "max" => "max",
        "sorted" => "sort",
        _ => return None,
    })
}

/// The filter and the new columns of a stage, compiled.
pub(super) struct Expressions<'a> {
    filter: Option<Compiled<'a>>,
    map: Vec<(&'a str, Compiled<'a>)>,
}

impl<'a> Expressions<'a> {
    /// Compiles those of a stage. That their texts can be compiled was seen when they were read.
    pub(super) fn compile(params: &'a Dataset, environment: &'a Environment<'a>) -> Result<Self, StageError> {
        Self::try_compile(params, environment)
            .map_err(|error| StageError::internal("an expression that was read does not compile").with_source(error))
    }

    fn try_compile(params: &'a Dataset, environment: &'a Environment<'a>) -> Result<Self, minijinja::Error> {
        let compiled = |field: String, text: &'a str, code: Code<'a>| Compiled { field, text, code, environment };
        let filter = match &params.filter {
            Some(Condition(source)) => {
                let code = Code::expression(&source.checked)?;
                Some(compiled("filter".to_owned(), &source.written, code))
            }
            None => None,
        };
        let mut map = Vec::new();
        for (column, NewColumn(source)) in &params.map {
            let code = Code::compile(&source.checked)?;
            map.push((column.as_str(), compiled(format!("map.{column}"), &source.written, code)));
        }
        Ok(Self { filter, map })
    }

    fn all(&self) -> impl Iterator<Item = &Compiled<'a>> {
        self.filter.iter().chain(self.map.iter().map(|(_, compiled)| compiled))
    }

    /// The columns that rows have beside those of the data.
    pub(super) fn new_columns(&self) -> impl Iterator<Item = &str> {
        self.map.iter().map(|(column, _)| *column)
    }

    /// Whether there is nothing to work out.
    pub(super) fn is_empty(&self) -> bool {
        self.filter.is_none() && self.map.is_empty()
    }

    /// What has to be read of data with these columns, so that rows can be made of the columns `used`.
    pub(super) fn wanted(&self, used: &[String], columns: &[String]) -> Wanted {
        let mentioned = |name: &str| self.all().any(|compiled| compiled.mentions(name));
        if mentioned(ROW) && !columns.iter().any(|column| column == ROW) {
            return Wanted::All;
        }
        let made = |column: &&String| self.new_columns().any(|new| new == column.as_str());
        let used = used.iter().filter(|column| !made(column));
        let mut names: Vec<String> = used.chain(columns.iter().filter(|column| mentioned(column))).cloned().collect();
        names.sort();
        names.dedup();
        Wanted::Named(names)
    }

    /// What is odd about them, given the columns of the data: columns looked for in `row` that are not there.
    pub(super) fn oddities(&self, columns: &[String], file: &str) -> Vec<String> {
        let mut oddities = Vec::new();
        for compiled in self.all() {
            let is_column = |name: &String| columns.contains(name) || columns.iter().any(|column| column == ROW);
            for name in compiled.code.looked_for(compiled.environment).iter().filter(|name| !is_column(name)) {
                let nearest = suggest::nearest(name, columns);
                let mean = nearest.map_or_else(String::new, |name| format!(" (did you mean `{name}`?)"));
                oddities
                    .push(format!("`{}` looks for `row.{name}`, and `{file}` begins without it{mean}", compiled.field));
            }
        }
        oddities
    }

    /// A row as the expressions leave it, or a break where the filter leaves it out. Every expression sees the row as
    /// the data has it.
    pub(super) fn apply(&self, fields: Fields) -> Result<ControlFlow<(), Fields>, Flaw> {
        let fields = Arc::new(fields);
        if let Some(filter) = &self.filter
            && !filter.holds(&fields)?
        {
            return Ok(ControlFlow::Break(()));
        }
        let mut made = Fields::new();
        for (column, compiled) in &self.map {
            made.insert((*column).to_owned(), compiled.column(&fields)?);
        }
        let mut fields = Arc::try_unwrap(fields).unwrap_or_else(|shared| (*shared).clone());
        fields.extend(made);
        Ok(ControlFlow::Continue(fields))
    }
}

/// A value as a column holds it: numbers and booleans are text, as a template would write them.
fn as_json(value: &Value) -> Result<serde_json::Value, minijinja::Error> {
    match value.kind() {
        ValueKind::None => Ok(serde_json::Value::Null),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => number::to_json(value),
        _ => Ok(python::print(value).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(with: serde_json::Value) -> Result<Dataset, Vec<String>> {
        let mut whole = json!({"source": "./a.jsonl"});
        whole.as_object_mut().unwrap().extend(with.as_object().unwrap().clone());
        let mut reader = Reader::default();
        let params = Dataset::read(&Node::from_json(&whole), &mut reader);
        let problems: Vec<String> = reader.problems.into_iter().map(|problem| problem.message).collect();
        params.filter(|_| problems.is_empty()).ok_or(problems)
    }

    /// The row that is left of one, `None` where it is filtered out.
    fn apply(with: serde_json::Value, row: serde_json::Value) -> Result<Option<serde_json::Value>, Flaw> {
        let params = params(with).unwrap();
        let environment = environment();
        let fields = row.as_object().unwrap().clone();
        let expressions = Expressions::compile(&params, &environment).unwrap();
        Ok(match expressions.apply(fields)? {
            ControlFlow::Continue(fields) => Some(fields.into()),
            ControlFlow::Break(()) => None,
        })
    }

    #[test]
    fn a_filter_keeps_or_leaves_out() {
        let row = json!({"text": "Hello there", "lang": "en", "n": 3});
        for (filter, kept) in [
            ("lang == 'en' and text|length > 10", true),
            ("lang == 'de'", false),
            ("n > 2", true),
            ("text.lower().startswith('hello')", true),
            ("row.missing is defined", false),
            ("row['lang'] == 'en'", true),
            ("'there' in text", true),
            ("text[:5] == 'Hello'", true),
            ("row.get('lang', 'de') == 'en' and row|length == 3", true),
            ("range(n)|length == 3", true),
            ("n", true),
        ] {
            assert_eq!(apply(json!({"filter": filter}), row.clone()).unwrap().is_some(), kept, "{filter}");
        }
    }

    #[test]
    fn a_name_that_is_no_column_is_told_with_the_nearest() {
        for filter in
            ["lnag == 'en'", "not lnag", "lnag", "lnag[:2] == 'en'", "lnag is defined", "lang == 'en' and lnag"]
        {
            let flaw = apply(json!({"filter": filter}), json!({"lang": "en"})).unwrap_err();
            assert_eq!(flaw.reason, Reason::Missing);
            assert!(
                flaw.problem.contains("`lnag`") && flaw.problem.contains("did you mean `lang`?"),
                "{}",
                flaw.problem
            );
        }
    }

    #[test]
    fn new_columns_see_the_row_as_it_was() {
        let with = json!({"map": {"title": "{{ body }}", "body": "{{ title }}: {{ body }}\n", "n": "{{ n + 1 }}", "tag": "fixed", "all": "{% for x in row %}{{ x }},{% endfor %}"}});
        let made = apply(with, json!({"title": "T", "body": "B", "n": 1})).unwrap().unwrap();
        assert_eq!(made, json!({"title": "B", "body": "T: B\n", "n": "2", "tag": "fixed", "all": "title,body,n,"}));
    }

    #[test]
    fn an_expression_alone_can_make_a_list_or_null() {
        let turns = "{{ [{'role': 'user', 'content': q}, {'role': 'assistant', 'content': a}] }}";
        let with = json!({"map": {"messages": turns, "nothing": "{{ none }}", "kept": "{{ list }}"}});
        let made = apply(with, json!({"q": "Q", "a": "A", "list": [1, {"x": null}]})).unwrap().unwrap();
        assert_eq!(made["messages"], json!([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]));
        assert_eq!((&made["nothing"], &made["kept"]), (&json!(null), &json!([1, {"x": null}])));
    }

    #[test]
    fn what_cannot_be_worked_out_is_a_flaw_of_the_row() {
        for (filter, problem) in [
            ("text + 1 > 2", "`filter`: "),
            ("(range(100000)|list|length) + (range(100000)|map('abs')|list|length) > n and row.x", "`filter`: "),
        ] {
            let flaw = apply(json!({"filter": filter}), json!({"text": "a", "n": 1})).unwrap_err();
            assert!(flaw.problem.starts_with(problem), "{}", flaw.problem);
        }
        let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}";
        let flaw = apply(json!({"map": {"x": endless}}), json!({"a": 1})).unwrap_err();
        assert!(flaw.problem.contains("more than 10000000 steps"), "{}", flaw.problem);
        let growing = "{% set x = 'a' * 100000 %}{% for a in range(100000) %}{{ x }}{% endfor %}";
        let flaw = apply(json!({"map": {"x": growing}}), json!({"a": 1})).unwrap_err();
        assert!(flaw.problem.contains("a string of more than 256 MiB"), "{}", flaw.problem);
    }

    #[test]
    fn mistakes_in_the_text_are_found_when_it_is_read() {
        for with in [
            json!({"filter": "a =="}),
            json!({"filter": 7}),
            json!({"map": {"x": "{{ a"}}),
            json!({"map": {"x": "{% if %}"}}),
        ] {
            let problems = params(with.clone()).unwrap_err();
            assert_eq!(problems.len(), 1, "{with}");
        }
        for (with, problem) in [
            (json!({"filter": "text|nosuch"}), "there is no filter `nosuch`"),
            (json!({"map": {"x": "{{ answer|uper }}"}}), "there is no filter `uper` (did you mean `upper`?)"),
            (json!({"map": {"x": "a: {% filter uper %}b{% endfilter %}"}}), "there is no filter `uper`"),
            (json!({"filter": "a is not definde"}), "there is no test `definde` (did you mean `defined`?)"),
        ] {
            let problems = params(with.clone()).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(problem), "{with}: {problems:?}");
        }
        let asks = "{{ (a|uper) if 'uper' is filter else a|tojson }}";
        assert!(params(json!({"map": {"x": asks}, "filter": "a < 3 and b is gt(2) and c is not none"})).is_ok());
    }

    #[test]
    fn only_the_columns_that_are_needed_are_read() {
        let wanted = |with: serde_json::Value| {
            let params = params(with).unwrap();
            let environment = environment();
            let expressions = Expressions::compile(&params, &environment).unwrap();
            expressions.wanted(&["a".to_owned(), "x".to_owned()], &["a", "b", "c", "d"].map(str::to_owned))
        };
        let named = |names: &[&str]| Wanted::Named(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(wanted(json!({"filter": "b > 1", "map": {"x": "{{ c }}"}})), named(&["a", "b", "c"]));
        assert_eq!(wanted(json!({"filter": "range(3)|length > 1"})), named(&["a", "x"]));
        assert_eq!(wanted(json!({"filter": "row.b is defined"})), Wanted::All);
    }
}
