//! What is built in, with its price: filters, tests and functions charge what they will make and look through before
//! they begin.

use minijinja::functions::Function;
use minijinja::value::{FunctionArgs, FunctionResult, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions, tests};

use super::checks::{Word, compare, in_words, look};
use super::measure::{ENTRY, Size, entries, measure, settled, text_size};
use super::meter;
use super::methods::{ends_line, is_space};
use super::space::Space;

/// Steps that any call takes: about as long as so many instructions.
pub(super) const CALL: u64 = 5;

/// What is charged for a call with these arguments, the value first.
type Price = fn(&[Value]) -> Result<(), Error>;

pub(super) fn install(environment: &mut Environment<'_>) {
    texts(environment);
    lists(environment);
    numbers(environment);
    tests_of_values(environment);
    // It prints everything that there is.
    environment.remove_global("debug");
    function(environment, "dict", list, functions::dict);
}

fn texts(environment: &mut Environment<'_>) {
    filter(environment, "safe", text, filters::safe);
    filter(environment, "escape", escaped, filters::escape);
    filter(environment, "e", escaped, filters::escape);
    filter(environment, "lower", cased, filters::lower);
    filter(environment, "upper", cased, filters::upper);
    filter(environment, "title", cased, filters::title);
    filter(environment, "capitalize", cased, filters::capitalize);
    filter(environment, "replace", replaced, filters::replace);
    filter(environment, "trim", trimmed, filters::trim);
    filter(environment, "string", text, filters::string);
    filter(environment, "split", split, filters::split);
    filter(environment, "lines", lines, filters::lines);
    filter(environment, "indent", indented, filters::indent);
    filter(environment, "join", joined, filters::join);
    filter(environment, "format", formatted, filters::format);
    filter(environment, "pprint", laid_out, filters::pprint);
    filter(environment, "tojson", priced_as_json, filters::tojson);
}

/// Has `string` and `join` write values in these words.
pub(super) fn write_by(environment: &mut Environment<'_>, word: Word) {
    filter(environment, "string", text, move |state: &mut State<'_, '_>, value: Value| {
        filters::string(state, &in_words(value, word)?)
    });
    let join = Value::from_function(filters::join);
    filter(environment, "join", joined, move |state: &mut State<'_, '_>, values: Rest<ValueOrKwargs>| {
        let mut values = values.into_values();
        // With an attribute of the items they are not what is written.
        let is_written = values.get(2).is_none() && !values.iter().any(Value::is_kwargs);
        if let Some(list) = values.first_mut().filter(|list| is_written && list.as_object().is_some()) {
            *list = list.try_iter()?.map(|item| in_words(item, word)).collect::<Result<Value, Error>>()?;
        }
        join.call(state, &values)
    });
}

fn lists(environment: &mut Environment<'_>) {
    filter(environment, "length", looked, filters::length);
    filter(environment, "count", looked, filters::length);
    filter(environment, "dictsort", sorted, filters::dictsort);
    filter(environment, "items", list, filters::items);
    filter(environment, "reverse", list, filters::reverse);
    filter(environment, "first", walked, filters::first);
    filter(environment, "last", walked, filters::last);
    filter(environment, "min", sorted, filters::min);
    filter(environment, "max", sorted, filters::max);
    filter(environment, "sort", sorted, filters::sort);
    filter(environment, "list", list, filters::list);
    filter(environment, "batch", batched, filters::batch);
    filter(environment, "slice", sliced, filters::slice);
    filter(environment, "sum", summed, filters::sum);
    filter(environment, "select", each, filters::select);
    filter(environment, "reject", each, filters::reject);
    filter(environment, "selectattr", each, filters::selectattr);
    filter(environment, "rejectattr", each, filters::rejectattr);
    filter(environment, "map", each, filters::map);
    filter(environment, "groupby", sorted, filters::groupby);
    filter(environment, "unique", sorted, filters::unique);
    filter(environment, "chain", list, filters::chain);
    filter(environment, "zip", list, filters::zip);
}

fn numbers(environment: &mut Environment<'_>) {
    filter(environment, "default", free, filters::default);
    filter(environment, "d", free, filters::default);
    filter(environment, "bool", free, filters::bool);
    filter(environment, "round", free, filters::round);
    filter(environment, "abs", free, filters::abs);
    filter(environment, "int", looked, filters::int);
    filter(environment, "float", looked, filters::float);
    filter(environment, "attr", looked, filters::attr);
}

fn tests_of_values(environment: &mut Environment<'_>) {
    for name in ["eq", "equalto", "=="] {
        test(environment, name, tests::is_eq);
    }
    for name in ["ne", "!="] {
        test(environment, name, tests::is_ne);
    }
    for name in ["lt", "lessthan", "<"] {
        test(environment, name, tests::is_lt);
    }
    for name in ["le", "<="] {
        test(environment, name, tests::is_le);
    }
    for name in ["gt", "greaterthan", ">"] {
        test(environment, name, tests::is_gt);
    }
    for name in ["ge", ">="] {
        test(environment, name, tests::is_ge);
    }
    test(environment, "in", tests::is_in);
    test(environment, "lower", tests::is_lower);
    test(environment, "upper", tests::is_upper);
    test(environment, "sameas", tests::is_sameas);
    test(environment, "startingwith", tests::is_startingwith);
    test(environment, "endingwith", tests::is_endingwith);
}

fn filter<F, Rv, Args>(environment: &mut Environment<'_>, name: &'static str, price: Price, filter: F)
where
    F: Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    let filter = Value::from_function(filter);
    environment.add_filter(name, move |state: &mut State<'_, '_>, values: Rest<ValueOrKwargs>| {
        call(&filter, price, state, values.into_values())
    });
}

fn function<F, Rv, Args>(environment: &mut Environment<'_>, name: &'static str, price: Price, function: F)
where
    F: Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    let function = Value::from_function(function);
    environment.add_function(name, move |state: &mut State<'_, '_>, values: Rest<ValueOrKwargs>| {
        call(&function, price, state, values.into_values())
    });
}

/// A test looks through what it is given.
fn test<F, Rv, Args>(environment: &mut Environment<'_>, name: &'static str, test: F)
where
    F: Function<Rv, Args>,
    Rv: FunctionResult,
    Args: for<'a> FunctionArgs<'a>,
{
    let test = Value::from_function(test);
    environment.add_test(name, move |state: &mut State<'_, '_>, values: Rest<ValueOrKwargs>| {
        call(&test, compared, state, values.into_values()).map(|value| value.is_true())
    });
}

fn call(function: &Value, price: Price, state: &mut State<'_, '_>, values: Vec<Value>) -> Result<Value, Error> {
    meter::steps(CALL)?;
    let values = values.into_iter().map(settled).collect::<Result<Vec<Value>, Error>>()?;
    price(&values)?;
    materialized(function.call(state, &values)?)
}

/// What is worked out anew each time it is looked at, worked out once: a list, or an object that is several chained.
pub(super) fn materialized(value: Value) -> Result<Value, Error> {
    match (value.as_object(), value.kind()) {
        (Some(object), ValueKind::Map) if !value.is_kwargs() && is_chained(object) => {
            let pairs = object.try_iter_pairs().into_iter().flatten();
            let mut all = Vec::new();
            for pair in pairs {
                meter::made(2 * ENTRY)?;
                all.push(pair);
            }
            Ok(Value::from_pairs(all))
        }
        _ => settled(value),
    }
}

/// Whether an object looks its keys up in others.
fn is_chained(object: &minijinja::value::DynObject) -> bool {
    object.type_name().ends_with("MergeDict")
}

/// Jinja's `attr`: the keys of an object are none of its attributes. Namespaces, loops and macros have some.
pub(crate) fn attribute(value: &Value, name: &Value) -> Result<Value, Error> {
    let Some(text) = name.as_str() else {
        return Err(Error::new(ErrorKind::InvalidOperation, "the name of an attribute is a string"));
    };
    meter::looked_at(text.len() as u64)?;
    let has_attributes = value.as_object().is_none_or(|object| {
        let is_of = |kind: &str| object.type_name().ends_with(kind);
        object.downcast_ref::<Space>().is_some() || is_of("::Loop") || is_of("::Macro")
    });
    if has_attributes { filters::attr(value, name) } else { Ok(Value::UNDEFINED) }
}

fn free(_: &[Value]) -> Result<(), Error> {
    Ok(())
}

fn looked(values: &[Value]) -> Result<(), Error> {
    values.iter().try_for_each(|value| meter::looked_at(entries(value)))
}

fn compared(values: &[Value]) -> Result<(), Error> {
    match values {
        [left, right] => compare(left, right),
        values => values.iter().try_for_each(look),
    }
}

/// Bytes of all arguments as text.
fn texts_of(values: &[Value]) -> Result<u64, Error> {
    values.iter().try_fold(0u64, |sum, value| Ok(sum.saturating_add(text_size(value)?)))
}

fn text(values: &[Value]) -> Result<(), Error> {
    meter::made(texts_of(values)?)
}

/// Each letter may become six.
pub(crate) fn escaped(values: &[Value]) -> Result<(), Error> {
    meter::made(texts_of(values)?.saturating_mul(6))
}

/// Each letter is looked for among those to be taken off.
pub(super) fn trimmed(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let bytes = text_size(value)?;
    let letters = values.get(1).map_or(Ok(0), text_size)?;
    meter::looked_at(bytes.saturating_mul(letters))?;
    meter::made(bytes.saturating_add(letters.saturating_mul(4)))
}

/// A letter may become three in the other case.
pub(super) fn cased(values: &[Value]) -> Result<(), Error> {
    let bytes = texts_of(values)?;
    meter::steps(bytes / 16)?;
    meter::made(bytes.saturating_mul(3))
}

pub(super) fn replaced(values: &[Value]) -> Result<(), Error> {
    let [value, from, to, ..] = values else { return Ok(()) };
    let bytes = text_size(value)?;
    meter::looked_at(bytes)?;
    let places = match (value.as_str(), from.as_str()) {
        (Some(value), Some(from)) => value.matches(from).count() as u64,
        _ => bytes,
    };
    meter::made(places.saturating_mul(text_size(to)?).saturating_add(bytes))
}

/// Pieces of a text, each a value of its own.
fn pieces(bytes: u64, count: usize) -> Result<(), Error> {
    meter::made((count as u64).saturating_mul(2 * ENTRY).saturating_add(bytes))
}

pub(super) fn split(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let bytes = text_size(value)?;
    meter::looked_at(bytes)?;
    let count = match (value.as_str(), values.get(1).and_then(Value::as_str)) {
        (Some(text), Some(between)) => text.matches(between).count() + 1,
        (Some(text), None) => text.split(is_space).filter(|piece| !piece.is_empty()).count(),
        (None, _) => usize::try_from(bytes).unwrap_or(usize::MAX),
    };
    pieces(bytes, count)
}

pub(super) fn lines(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let bytes = text_size(value)?;
    meter::looked_at(bytes)?;
    pieces(bytes, value.as_str().map_or(bytes as usize, |text| text.matches(ends_line).count() + 1))
}

/// The number that stands at a place, or under a name.
fn number(values: &[Value], at: usize, name: &str) -> u64 {
    let named = values.last().filter(|last| last.is_kwargs()).and_then(|named| named.get_attr(name).ok());
    let number = values.get(at).and_then(Value::as_usize).or_else(|| named.and_then(|value| value.as_usize()));
    number.unwrap_or(0) as u64
}

fn indented(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let bytes = text_size(value)?;
    let lines = value.as_str().map_or(bytes, |text| text.matches('\n').count() as u64 + 2);
    let width = number(values, 1, "width").max(4);
    meter::made(lines.saturating_mul(width).saturating_add(bytes.saturating_mul(2)))
}

fn joined(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let between = texts_of(&values[1..])?;
    meter::made(entries(value).saturating_mul(between).saturating_add(listed_text(value)?))
}

/// Bytes of the entries of a list behind one another.
pub(super) fn listed_text(value: &Value) -> Result<u64, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.len() as u64);
    }
    let Some(object) = value.as_object() else { return Ok(0) };
    let mut bytes = 0u64;
    for item in object.try_iter().into_iter().flatten() {
        meter::steps(1)?;
        bytes = bytes.saturating_add(text_size(&item)?);
    }
    Ok(bytes)
}

/// What a format says may be as wide as the numbers in it and as the arguments, and print an argument at each of its
/// marks.
pub(super) fn formatted(values: &[Value]) -> Result<(), Error> {
    let Some(format) = values.first().and_then(Value::as_str) else { return Ok(()) };
    meter::looked_at(format.len() as u64)?;
    let marks = format.matches(['%', '{', '*']).count() as u64;
    let widths = format.split(|letter: char| !letter.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widths = widths.fold(0u64, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(u64::MAX)));
    let takes_widths = takes_widths(format);
    let mut widest = 0u64;
    for value in &values[1..] {
        let named = value.as_object().filter(|_| value.is_kwargs());
        let parts: Vec<Value> = match named {
            Some(named) => named.try_iter_pairs().into_iter().flatten().map(|(_, value)| value).collect(),
            None => vec![value.clone()],
        };
        for part in parts {
            let width = part.as_i64().filter(|_| takes_widths).map_or(0, i64::unsigned_abs);
            // A float is written out to its end: 309 digits.
            widest = widest.max(width).max(text_size(&part)?.saturating_mul(6)).max(400);
        }
    }
    let wide = widths.saturating_add(marks.saturating_mul(widest));
    // A width is counted in characters, of four bytes at most.
    meter::made(wide.saturating_mul(4).saturating_add(format.len() as u64))
}

/// Whether a format takes widths from its arguments: `%*d`, `{:{}}`.
fn takes_widths(format: &str) -> bool {
    let mut depth = 0;
    let nested = format.replace("{{", "").chars().any(|letter| {
        depth = match letter {
            '{' => depth + 1,
            '}' => 0,
            _ => depth,
        };
        depth > 1
    });
    nested || format.contains('*')
}

fn laid_out(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let size = measure(value)?;
    meter::made(indentation(size, 4).saturating_add(size.printed()))
}

/// Bytes of the spaces before each value of a printed one.
fn indentation(size: Size, width: u64) -> u64 {
    size.values.saturating_mul(width.saturating_mul(size.depth as u64 + 1))
}

/// The price of a value as JSON, with the spaces and separators that are asked for.
pub(crate) fn priced_as_json(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let size = measure(value)?;
    let named = values.last().filter(|last| last.is_kwargs());
    let separators = named.and_then(|named| named.get_attr("separators").ok());
    let separators = separators.map_or(Ok(0), |separators| listed_text(&separators))?;
    let spaces = indentation(size, number(values, 1, "indent").max(4)).saturating_add(separators * size.values);
    meter::steps(size.text / 16)?;
    meter::made(spaces.saturating_add(size.printed()))
}

/// A list of what is walked, or several. Filters can be chained, each a level deeper: so what they are given is
/// measured.
fn list(values: &[Value]) -> Result<(), Error> {
    let mut sum = 0u64;
    for value in values {
        if value.as_object().is_some() {
            measure(value)?;
        }
        sum = sum.saturating_add(entries(value));
    }
    meter::made(sum.saturating_mul(2 * ENTRY))
}

fn walked(values: &[Value]) -> Result<(), Error> {
    let entries = values.first().map_or(0, entries);
    meter::looked_at(entries.saturating_mul(ENTRY))
}

fn sorted(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let size = measure(value)?;
    let names = texts_of(&values[1..])?;
    let rounds = u64::from(u64::BITS - entries(value).leading_zeros());
    meter::looked_at(size.compared().saturating_mul(rounds + 1))?;
    meter::looked_at(entries(value).saturating_mul(names))?;
    // What letters are compared without their case is copied.
    meter::made(size.text.saturating_mul(3).saturating_add(entries(value).saturating_mul(4 * ENTRY)))
}

fn batched(values: &[Value]) -> Result<(), Error> {
    list(values)?;
    // The last batch is filled up.
    meter::made(if values.len() > 2 { number(values, 1, "count").saturating_mul(ENTRY) } else { 0 })
}

fn sliced(values: &[Value]) -> Result<(), Error> {
    list(values)?;
    meter::made(number(values, 1, "count").saturating_mul(4 * ENTRY))
}

fn summed(values: &[Value]) -> Result<(), Error> {
    let Some(value) = values.first() else { return Ok(()) };
    let count = entries(value);
    let size = measure(value)?;
    meter::looked_at(size.compared())?;
    // Texts and lists are copied each time one more is added.
    let numbers_alone = size.text == 0 && size.depth <= 1;
    meter::made(if numbers_alone { 0 } else { size.compared().saturating_mul(count) })
}

/// What is done with each entry charges itself.
fn each(values: &[Value]) -> Result<(), Error> {
    list(&values[..values.len().min(1)])?;
    let names = texts_of(values.get(1..).unwrap_or_default())?;
    let count = values.first().map_or(0, entries);
    meter::steps(count)?;
    meter::looked_at(count.saturating_mul(names))
}
