//! Filters of generated text: pipelines whose steps run in order.

use regex::{Captures, Regex};
use serde_json::{Map, Value};

/// What the harness has where an expression matches nothing.
const INVALID: &str = "[invalid]";

/// The expression of `regex` where none is given.
const DEFAULT_PATTERN: &str = r"#### (\-?[0-9\.\,]+)";

/// A step.
#[derive(Debug, Clone)]
enum Filter {
    Regex {
        pattern: Regex,
        group_select: i64,
        fallback: String,
    },
    RemoveWhitespace,
    Lowercase,
    Uppercase,
    /// What a text stands for; of others `default`.
    Map {
        values: Map<String, Value>,
        default: Value,
    },
    TakeFirst,
    TakeFirstK(usize),
    /// The most frequent of the responses; of equally frequent ones the first.
    MajorityVote,
}

/// A named pipeline.
#[derive(Debug, Clone)]
pub struct Pipeline {
    pub name: String,
    filters: Vec<Filter>,
}

impl Pipeline {
    /// The one of a task that names none.
    pub fn take_first() -> Self {
        Self { name: "none".to_owned(), filters: vec![Filter::TakeFirst] }
    }

    /// Reads an entry of `filter_list`.
    ///
    /// # Errors
    /// Says which filter or argument is not known.
    pub fn read(entry: &Map<String, Value>) -> Result<Self, String> {
        let name = entry.get("name").and_then(Value::as_str).ok_or("an entry lacks `name`")?;
        let filters =
            entry.get("filter").and_then(Value::as_array).ok_or_else(|| format!("`{name}` lacks `filter`"))?;
        let filters = filters.iter().map(filter).collect::<Result<_, _>>()?;
        Ok(Self { name: name.to_owned(), filters })
    }

    /// Responses that it needs to a row: those that `take_first_k` names.
    pub fn least_responses(&self) -> usize {
        let needed = |filter: &Filter| if let Filter::TakeFirstK(k) = filter { *k } else { 1 };
        self.filters.iter().map(needed).max().unwrap_or(1)
    }

    /// What it makes of the responses to a row: texts, or what they are mapped to.
    pub fn apply(&self, responses: Vec<String>) -> Vec<Value> {
        let mut values: Vec<Value> = responses.into_iter().map(Value::String).collect();
        for filter in &self.filters {
            let of_texts = |value: Value, make: &dyn Fn(&str) -> Value| value.as_str().map(make).unwrap_or(value);
            let made: Option<&dyn Fn(&str) -> Value> = match filter {
                Filter::Regex { pattern, group_select, fallback } => {
                    Some(&|text: &str| found(pattern, *group_select, fallback, text).into())
                }
                Filter::RemoveWhitespace => Some(&|text: &str| text.trim().into()),
                Filter::Lowercase => Some(&|text: &str| text.to_lowercase().into()),
                Filter::Uppercase => Some(&|text: &str| text.to_uppercase().into()),
                Filter::Map { values, default } => Some(&|text: &str| values.get(text).unwrap_or(default).clone()),
                Filter::TakeFirst | Filter::TakeFirstK(_) | Filter::MajorityVote => None,
            };
            values = match (filter, made) {
                (_, Some(make)) => values.into_iter().map(|value| of_texts(value, make)).collect(),
                (Filter::TakeFirstK(k), None) => values.into_iter().take(*k).collect(),
                (Filter::MajorityVote, None) => majority(values).into_iter().collect(),
                (_, None) => values.into_iter().take(1).collect(),
            };
        }
        values
    }
}

fn filter(entry: &Value) -> Result<Filter, String> {
    let function = entry.get("function").and_then(Value::as_str).ok_or("a filter lacks `function`")?;
    let known: &[&str] = match function {
        "regex" => &["regex_pattern", "group_select", "fallback"],
        "map" => &["mapping_dict", "default_value"],
        "take_first_k" => &["k"],
        _ => &[],
    };
    let arguments = entry.as_object().into_iter().flat_map(Map::keys);
    if let Some(other) = arguments.map(String::as_str).find(|name| *name != "function" && !known.contains(name)) {
        return Err(format!("the filter `{function}` has no `{other}`"));
    }
    let text = |name: &str, default: &str| entry.get(name).and_then(Value::as_str).unwrap_or(default).to_owned();
    match function {
        "regex" => {
            let pattern = text("regex_pattern", DEFAULT_PATTERN);
            Ok(Filter::Regex {
                pattern: expression(&pattern)?,
                group_select: match entry.get("group_select") {
                    None => 0,
                    Some(select) => select.as_i64().ok_or("`group_select` is to be an integer")?,
                },
                fallback: text("fallback", INVALID),
            })
        }
        "remove_whitespace" => Ok(Filter::RemoveWhitespace),
        "lowercase" => Ok(Filter::Lowercase),
        "uppercase" => Ok(Filter::Uppercase),
        "map" => {
            let values = entry.get("mapping_dict").and_then(Value::as_object).cloned();
            let values = values.ok_or("`map` lacks `mapping_dict`, the value of each text")?;
            Ok(Filter::Map { values, default: entry.get("default_value").cloned().unwrap_or_default() })
        }
        "take_first" => Ok(Filter::TakeFirst),
        "take_first_k" => {
            let k = entry.get("k").and_then(Value::as_u64).filter(|k| *k > 0);
            Ok(Filter::TakeFirstK(k.ok_or("`take_first_k` lacks `k`, a number of responses")? as usize))
        }
        "majority_vote" => Ok(Filter::MajorityVote),
        other => Err(format!("the filter `{other}` is not known here")),
    }
}

/// Compiles an expression of Python's, of what both have.
pub(super) fn expression(pattern: &str) -> Result<Regex, String> {
    Regex::new(&of_python(pattern)).map_err(|error| format!("the expression `{pattern}` cannot be used: {error}"))
}

/// An expression of Python's `re`, written so that it means the same here: `$` is also before a last line feed, `\<` is
/// a letter, and a class has neither classes in it nor operators.
fn of_python(pattern: &str) -> String {
    let flags = pattern.strip_prefix("(?").and_then(|rest| rest.split_once(')'));
    let by_lines = flags.is_some_and(|(flags, _)| flags.bytes().all(|f| f.is_ascii_lowercase()) && flags.contains('m'));
    let mut written = String::with_capacity(pattern.len() + 8);
    let mut letters = pattern.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some(angle @ ('<' | '>')) => written.push(angle),
                Some('Z') => written.push_str("\\z"),
                Some(escaped) => written.extend(['\\', escaped]),
                None => written.push('\\'),
            },
            '$' if !by_lines => written.push_str(r"(?:\n?\z)"),
            '{' if letters.peek() == Some(&',') => written.push_str("{0"),
            '[' => class(&mut letters, &mut written),
            letter => written.push(letter),
        }
    }
    written
}

/// A class behind its bracket, to the one that closes it.
fn class(letters: &mut std::iter::Peekable<std::str::Chars<'_>>, written: &mut String) {
    written.push('[');
    if letters.peek() == Some(&'^') {
        written.extend(letters.next());
    }
    // The first may be the bracket that else closes it.
    let mut is_first = true;
    // Whether a `-` that follows makes a range of what stands before it.
    let mut may_begin_range = false;
    while let Some(letter) = letters.next() {
        match letter {
            ']' if !is_first => {
                written.push(']');
                return;
            }
            '-' if may_begin_range && letters.peek().is_some_and(|next| *next != ']') => {
                written.push('-');
                // Its end, which begins no other.
                match letters.next() {
                    Some('\\') => written.extend(std::iter::once('\\').chain(letters.next())),
                    Some(end) => member(end, written),
                    None => {}
                }
                may_begin_range = false;
                continue;
            }
            '\\' => match letters.next() {
                Some(angle @ ('<' | '>')) => written.push(angle),
                escaped => written.extend(std::iter::once('\\').chain(escaped)),
            },
            letter => member(letter, written),
        }
        (is_first, may_begin_range) = (false, true);
    }
}

/// A letter of a class.
fn member(letter: char, written: &mut String) {
    if matches!(letter, '[' | ']' | '&' | '~' | '-' | '^') {
        written.push('\\');
    }
    written.push(letter);
}

/// The most frequent of some values; of equally frequent ones the first.
fn majority(values: Vec<Value>) -> Option<Value> {
    let votes = |value: &Value| values.iter().filter(|other| *other == value).count();
    let most = values.iter().map(votes).max()?;
    values.iter().find(|value| votes(value) == most).cloned()
}

/// The selected one of all matches, as `re.findall` gives them: of several groups the first that is not empty.
fn found(pattern: &Regex, select: i64, fallback: &str, text: &str) -> String {
    let matches = all_matches(pattern, text);
    let at = match usize::try_from(select) {
        Ok(at) => Some(at),
        Err(_) => matches.len().checked_sub(select.unsigned_abs() as usize),
    };
    let Some(captures) = at.and_then(|at| matches.get(at)) else { return fallback.to_owned() };
    let mut groups = captures.iter().skip(1).flatten().map(|group| group.as_str());
    let text = match captures.len() {
        1 => &captures[0],
        2 => groups.next().unwrap_or(""),
        _ => groups.find(|group| !group.is_empty()).unwrap_or(fallback),
    };
    text.trim().to_owned()
}

/// All matches; one of nothing may stand right behind another one, as in Python.
fn all_matches<'t>(pattern: &Regex, text: &'t str) -> Vec<Captures<'t>> {
    let (mut matches, mut from) = (Vec::new(), 0);
    while let Some(captures) = (from <= text.len()).then(|| pattern.captures_at(text, from)).flatten() {
        let whole = captures.get_match();
        from = match whole.is_empty() {
            true => text[whole.end()..].chars().next().map_or(text.len() + 1, |letter| whole.end() + letter.len_utf8()),
            false => whole.end(),
        };
        matches.push(captures);
    }
    matches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_mean_what_they_mean_in_python() {
        // What `re.findall(pattern, text)` gives, its strings and the first groups of its tuples.
        for (pattern, text, all) in [
            (r"make ([0-9,]+)\.$", "A: make 73.\n", &["73"][..]),
            (r"(\d+)$", "1\n2", &["2"]),
            (r"(?m)^(\d+)$", "1\n2", &["1", "2"]),
            (r"\<answer\>(.*?)\</answer\>", "<answer>7</answer>", &["7"]),
            (r"([0-9&&5-9]+)", "a 3& b", &["3&"]),
            (r"([0-9~~5]+)", "4~", &["4~"]),
            (r"([+--])", "a,b", &[","]),
            (r"([[a]+)", "x[a", &["[a"]),
            (r"[]x]", "]", &["]"]),
            (r"[^]x]", "]a", &["a"]),
            (r"a{,2}b", "aab", &["aab"]),
            (r"\d*", "17", &["17", ""]),
            (r"\d*", "a1", &["", "1", ""]),
            (r"[a\-z]+", "a-z", &["a-z"]),
            (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "it is $18.", &["$18."]),
        ] {
            let pattern = expression(pattern).unwrap_or_else(|error| panic!("{error}"));
            let found: Vec<String> = all_matches(&pattern, text)
                .iter()
                .map(|captures| captures.get(captures.len().min(2) - 1).map_or("", |group| group.as_str()).to_owned())
                .collect();
            assert_eq!(found, all, "{pattern}");
        }
        let none = expression("(QQ)?(ZZ)?1").unwrap();
        assert_eq!(found(&none, 0, "17", "1"), "17");
        assert_eq!(found(&none, 0, "17", "x"), "17");
    }

    #[test]
    fn arguments_of_filters_are_known_ones() {
        let read = |filter: &str| super::filter(&serde_json::from_str(filter).unwrap()).map(|_| ());
        assert!(read(r#"{"function": "regex", "group_select": -1}"#).is_ok());
        assert!(read(r#"{"function": "regex", "group_selct": -1}"#).unwrap_err().contains("`group_selct`"));
        assert!(read(r#"{"function": "regex", "group_select": "-1"}"#).is_err());
    }
}
