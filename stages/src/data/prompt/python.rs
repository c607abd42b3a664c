//! What templates and figures expect of Python: how values print, `int`, `tojson`, and what is white space.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::LazyLock;

use fancy_regex::Regex;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};

use super::strftime;
use crate::data::jinja;

pub(crate) use crate::data::jinja::is_space;

/// Gives chat templates what they expect of Python.
pub(super) fn install(environment: &mut Environment<'_>) {
    define(environment);
    environment.add_filter("tojson", |value: &Value, kwargs: Kwargs| {
        let arguments: Value = kwargs.clone().into();
        jinja::priced_as_json(&[value.clone(), arguments])?;
        tojson(value, kwargs)
    });
    environment.add_filter("attr", jinja::attribute);
    environment.add_filter("wordcount", wordcount);
    environment.add_function("strftime_now", |pattern: &str| -> Result<String, Error> {
        // Two letters of a pattern become 24 at most.
        jinja::made(pattern.len() as u64 * 12)?;
        Ok(strftime::strftime(pattern))
    });
}

/// Makes values print and become integers as in Python.
pub(crate) fn define(environment: &mut Environment<'_>) {
    environment.set_formatter(format);
    jinja::write_by(environment, as_python);
    environment.add_filter("int", int);
    for name in ["escape", "e"] {
        environment.add_filter(name, escape);
    }
    environment.add_test("sequence", is_sequence);
}

/// Whether Python finds elements by number or key in a value, and a length: texts and objects have both.
fn is_sequence(value: &Value) -> bool {
    value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// A word of Python's `re`, `\w+`: to `\w` here marks and joiners are letters, too, and `½` is none.
static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"[\p{L}\p{N}_]+").expect("it is an expression"));

/// How many words the text of a value has.
fn wordcount(value: &Value) -> Result<usize, Error> {
    jinja::looked_at(value)?;
    if value.as_object().is_some() {
        jinja::printed(value)?;
    }
    let text = value.as_str().map_or_else(|| Cow::Owned(print(value)), Cow::Borrowed);
    Ok(WORD.find_iter(&text).count())
}

/// A text in which the five letters that HTML gives a meaning are written as Python's `markupsafe` writes them.
fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    jinja::escaped(std::slice::from_ref(value))?;
    let mut text = String::new();
    for letter in print(value).chars() {
        match letter {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            '\'' => text.push_str("&#39;"),
            '"' => text.push_str("&#34;"),
            letter => text.push(letter),
        }
    }
    Ok(Value::from_safe_string(text))
}

/// Prints a value as Python does: `None`, `True`, `1e-07`.
fn format(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if value.as_object().is_some() {
        jinja::printed(value)?;
    }
    jinja::print(out, state, value, as_python(value).as_deref())
}

/// Prints a value as Python does, lists and objects with what is in them: `['a', 'b']`.
pub(crate) fn format_lists(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => {
            jinja::printed(value)?;
            jinja::print(out, state, value, repr(value, DEEPEST).as_deref())
        }
        _ => format(out, state, value),
    }
}

/// The text of a value as Python has it.
pub(crate) fn print(value: &Value) -> String {
    as_python(value).unwrap_or_else(|| value.to_string())
}

/// Deepest list in which floats are looked for.
const DEEPEST: usize = 64;

/// The text of a value that the template engine prints otherwise than Python.
fn as_python(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None => Some("None".to_owned()),
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.to_owned()),
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).ok().map(float_repr),
        ValueKind::Seq | ValueKind::Map if holds_float(value, DEEPEST) => repr(value, DEEPEST),
        _ => None,
    }
}

fn holds_float(value: &Value, depth: usize) -> bool {
    let below = |mut items: minijinja::value::ValueIter| items.any(|item| holds_float(&item, depth - 1));
    match value.kind() {
        ValueKind::Number => !value.is_integer(),
        ValueKind::Seq if depth > 0 => value.try_iter().is_ok_and(below),
        ValueKind::Map if depth > 0 => value
            .try_iter()
            .is_ok_and(|mut keys| keys.any(|key| value.get_item(&key).is_ok_and(|it| holds_float(&it, depth - 1)))),
        _ => false,
    }
}

/// A value as Python writes it inside of others; `None` where it lies too deep.
fn repr(value: &Value, depth: usize) -> Option<String> {
    let below = depth.checked_sub(1)?;
    match value.kind() {
        ValueKind::String => Some(string_repr(value.as_str()?)),
        ValueKind::Seq => {
            let items: Option<Vec<String>> = value.try_iter().ok()?.map(|item| repr(&item, below)).collect();
            let items = items?;
            Some(match (value.is_tuple(), items.as_slice()) {
                (true, [only]) => format!("({only},)"),
                (true, items) => format!("({})", items.join(", ")),
                (false, items) => format!("[{}]", items.join(", ")),
            })
        }
        ValueKind::Map => {
            let entry =
                |key: Value| Some(format!("{}: {}", repr(&key, below)?, repr(&value.get_item(&key).ok()?, below)?));
            let entries: Option<Vec<String>> = value.try_iter().ok()?.map(entry).collect();
            Some(format!("{{{}}}", entries?.join(", ")))
        }
        _ => Some(print(value)),
    }
}

/// A text in quotes: double ones where it holds single ones alone.
fn string_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut written = String::from(quote);
    for letter in text.chars() {
        match letter {
            '\n' => written.push_str("\\n"),
            '\r' => written.push_str("\\r"),
            '\t' => written.push_str("\\t"),
            '\\' => written.push_str("\\\\"),
            _ if letter == quote => written.extend(['\\', quote]),
            _ if is_printable(letter) => written.push(letter),
            // Writing to a text cannot fail.
            _ => drop(match u32::from(letter) {
                code @ ..=0xff => write!(written, "\\x{code:02x}"),
                code @ ..=0xffff => write!(written, "\\u{code:04x}"),
                code => write!(written, "\\U{code:08x}"),
            }),
        }
    }
    written.push(quote);
    written
}

/// Whether a letter is written as it is. Rust escapes what is no letter by itself only at the beginning of a text.
fn is_printable(letter: char) -> bool {
    letter == ' '
        || !(letter.is_whitespace() || format!("a{letter}").escape_debug().any(|letter| letter == '{') && letter != '{')
}

/// `int` as the template engine has it, but for numbers that it would cut to the greatest that it knows.
fn int(
    state: &State,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    jinja::looked_at(value)?;
    /// From here on a float is no integer of 128 bits.
    const BEYOND: f64 = 1.701_411_834_604_692_3e38;
    let float = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.is_integer() => None,
        None => f64::try_from(value.clone()).ok(),
    };
    if let Some(float) = float.filter(|float: &f64| float.is_nan() || float.abs() >= BEYOND) {
        let message = format!("`int` of {} is no integer of 128 bits", float_repr(float));
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    minijinja::filters::int(state, value, default, base, kwargs)
}

/// `json.dumps` as transformers calls it: no HTML escapes, a space after `,` and `:`, keys in their order, unless
/// `ensure_ascii`, `indent`, `separators` or `sort_keys` say otherwise.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Value> = kwargs.get("separators")?;
    let separator = |index: usize| {
        let given = separators.as_ref()?.get_item_by_index(index).ok()?;
        given.as_str().map(str::to_owned)
    };
    let between_items = separator(0).unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.to_owned());
    let after_key = separator(1).unwrap_or_else(|| ": ".to_owned());
    let style = Style {
        indent,
        between_items,
        after_key,
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let mut text = String::new();
    style.write(&mut text, &to_json(value)?, 0);
    Ok(text)
}

/// What `json.dumps` reads a value as.
fn to_json(value: &Value) -> Result<serde_json::Value, Error> {
    let failed = |problem: String| Error::new(ErrorKind::BadSerialization, problem);
    if holds_undefined(value) {
        return Err(failed("an undefined value is not JSON serializable".to_owned()));
    }
    serde_json::to_value(value).map_err(|error| failed(error.to_string()))
}

fn holds_undefined(value: &Value) -> bool {
    match (value.kind(), value.as_object()) {
        (ValueKind::Undefined, _) => true,
        (ValueKind::Map, Some(object)) => {
            object.try_iter_pairs().into_iter().flatten().any(|(_, value)| holds_undefined(&value))
        }
        (ValueKind::Seq | ValueKind::Iterable, Some(object)) => {
            object.try_iter().into_iter().flatten().any(|item| holds_undefined(&item))
        }
        _ => false,
    }
}

/// A value as `tojson` of transformers writes it.
pub(super) fn json(value: &serde_json::Value) -> String {
    let (between_items, after_key) = (", ".to_owned(), ": ".to_owned());
    let style = Style { indent: None, between_items, after_key, ensure_ascii: false, sort_keys: false };
    let mut text = String::new();
    style.write(&mut text, value, 0);
    text
}

/// `tojson` of Jinja itself: keys in order, letters of ASCII, and none that HTML reads.
pub(crate) fn tojson_of_jinja(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    kwargs.assert_all_used()?;
    let between_items = if indent.is_some() { "," } else { ", " }.to_owned();
    let style = Style { indent, between_items, after_key: ": ".to_owned(), ensure_ascii: true, sort_keys: true };
    let mut text = String::new();
    style.write(&mut text, &to_json(value)?, 0);
    Ok(text.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026").replace('\'', "\\u0027"))
}

/// How JSON is laid out.
struct Style {
    indent: Option<usize>,
    between_items: String,
    after_key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Style {
    fn write(&self, text: &mut String, value: &serde_json::Value, depth: usize) {
        use serde_json::Value as Json;
        match value {
            Json::Array(items) => self.write_all(text, ['[', ']'], items.iter().map(|item| (None, item)), depth),
            Json::Object(map) => {
                let mut entries: Vec<_> = map.iter().map(|(key, value)| (Some(key.as_str()), value)).collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.write_all(text, ['{', '}'], entries.into_iter(), depth);
            }
            Json::String(string) => self.write_string(text, string),
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => text.push_str(&float_repr(float)),
                None => text.push_str(&number.to_string()),
            },
            Json::Null | Json::Bool(_) => text.push_str(&value.to_string()),
        }
    }

    fn write_all<'a>(
        &self,
        text: &mut String,
        brackets: [char; 2],
        entries: impl ExactSizeIterator<Item = (Option<&'a str>, &'a serde_json::Value)>,
        depth: usize,
    ) {
        let empty = entries.len() == 0;
        text.push(brackets[0]);
        for (number, (key, value)) in entries.enumerate() {
            if number > 0 {
                text.push_str(&self.between_items);
            }
            self.new_line(text, depth + 1);
            if let Some(key) = key {
                self.write_string(text, key);
                text.push_str(&self.after_key);
            }
            self.write(text, value, depth + 1);
        }
        if !empty {
            self.new_line(text, depth);
        }
        text.push(brackets[1]);
    }

    fn new_line(&self, text: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn write_string(&self, text: &mut String, string: &str) {
        let quoted = serde_json::Value::from(string).to_string();
        if !self.ensure_ascii {
            return text.push_str(&quoted);
        }
        for letter in quoted.chars() {
            if letter.is_ascii() {
                text.push(letter);
            } else {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    // Writing to a text cannot fail.
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
        }
    }
}

/// A float as Python writes it: the shortest digits that read back as it, with an exponent of two digits below 1e-4 and
/// from 1e16.
fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    let shortest = format!("{float:e}");
    let Some((digits, exponent)) = shortest.split_once('e') else { return shortest };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{float}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use minijinja::syntax::SyntaxConfig;
    use serde_json::json;

    use super::*;
    use crate::data::jinja::{Form, Program};

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = json!({"name": "größe <b>", "list": [1, 2.5, null], "empty": {}});
        let dumped = |indent: Option<usize>| {
            let kwargs: Kwargs = indent.map(|indent| ("indent", Value::from(indent))).into_iter().collect();
            tojson(&Value::from(minijinja::value::Serde(&value)), kwargs).unwrap()
        };
        assert_eq!(dumped(None), r#"{"name": "größe <b>", "list": [1, 2.5, null], "empty": {}}"#);
        assert_eq!(
            dumped(Some(2)),
            "{\n  \"name\": \"größe <b>\",\n  \"list\": [\n    1,\n    2.5,\n    null\n  ],\n  \"empty\": {}\n}"
        );
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let written = [1.0, 2.5, 1e15, 1e16, 0.0001, 1.5e-5, -1e-7, 1e300, -0.0].map(float_repr);
        let expected = ["1.0", "2.5", "1000000000000000.0", "1e+16", "0.0001", "1.5e-05", "-1e-07", "1e+300", "-0.0"];
        assert_eq!(written, expected);
        assert_eq!([f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(float_repr), ["nan", "inf", "-inf"]);
    }

    /// Counts are those of jinja2.
    #[test]
    fn words_are_counted_as_python_counts_them() {
        let mut environment = Environment::new();
        jinja::bound(&mut environment);
        install(&mut environment);
        let count = |x: Value| {
            let form = Form::Template(SyntaxConfig::default());
            let program = Program::compile("{{ x|wordcount }}", &form).unwrap();
            program.render(&environment, || minijinja::context! { x }).unwrap()
        };
        for (x, words) in [
            (Value::from("It's 3 o'clock; x_y ½"), "7"),
            (Value::from("नमस्ते 你好"), "3"),
            (Value::from(""), "0"),
            (Value::from(()), "1"),
            (Value::from(1.5), "2"),
            (Value::from(vec![Value::from(1), Value::from("ab c")]), "3"),
        ] {
            assert_eq!(count(x.clone()), words, "{x}");
        }
    }

    /// What a template makes of `x`.
    fn rendered(template: &str, x: Value) -> Result<String, String> {
        let mut environment = Environment::new();
        jinja::bound(&mut environment);
        define(&mut environment);
        let program = Program::compile(template, &Form::Template(SyntaxConfig::default())).unwrap();
        let rendered = program.render(&environment, || minijinja::context! { x });
        rendered.map_err(|error| error.detail().unwrap_or_default().to_owned())
    }

    #[test]
    fn values_print_as_in_python_also_in_lists() {
        let value = json!({"a": [1e-7, 1e22, 1, null, true], "it's": "\"q\" it's\u{2028}\n", "b": "it's", "é": 0.5});
        let text = rendered(
            "{{ x }} {{ 1e-7 }} {{ [1e22] }} {{ (0.1,) }} {{ none }}",
            Value::from(minijinja::value::Serde(&value)),
        );
        let expected = r#"{'a': [1e-07, 1e+22, 1, None, True], "it's": '"q" it\'s\u2028\n', 'b': "it's", 'é': 0.5} 1e-07 [1e+22] (0.1,) None"#;
        assert_eq!(text.unwrap(), expected);
    }

    #[test]
    fn a_number_is_not_cut_to_the_greatest() {
        assert_eq!(
            rendered("{{ x|int }} {{ '12'|int }} {{ 'x'|int(3) }} {{ '7.9'|int }}", 1e15.into()).unwrap(),
            "1000000000000000 12 3 7"
        );
        for (template, x) in [
            ("{{ x|int }}", f64::INFINITY),
            ("{{ x|int }}", 1e39),
            ("{{ '1e300'|int }}", 0.0),
            ("{{ x|int }}", f64::NAN),
        ] {
            let error = rendered(template, x.into()).unwrap_err();
            assert!(error.contains("no integer of 128 bits"), "{template}: {error}");
        }
    }

    #[test]
    fn letters_of_html_and_sequences_are_pythons() {
        let written = |template: &str, x: Value| rendered(template, x).unwrap();
        assert_eq!(
            written("{{ x|e }}", "<a href='b/c'>\"&</a>".into()),
            "&lt;a href=&#39;b/c&#39;&gt;&#34;&amp;&lt;/a&gt;"
        );
        assert_eq!(written("{{ x|e|escape }}{{ 1.0|e }}{{ none|e }}", "&".into()), "&amp;1.0None");
        let of = |x: Value| written("{{ x is sequence }}{{ x is not sequence }}", x);
        assert_eq!([of("a".into()), of(vec![1].into()), of(1.into())], ["TrueFalse", "TrueFalse", "FalseTrue"]);
        assert_eq!(
            written("{{ {} is sequence }}{{ (1,) is sequence }}{{ none is sequence }}", 0.into()),
            "TrueTrueFalse"
        );
    }
}
