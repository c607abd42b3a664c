//! Filters of generated text: pipelines whose steps run in order.

use regex::Regex;
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
                    Some(&|text: &str| found(pattern, *group_select, text).unwrap_or_else(|| fallback.clone()).into())
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
    let text = |name: &str, default: &str| entry.get(name).and_then(Value::as_str).unwrap_or(default).to_owned();
    match function {
        "regex" => {
            let pattern = text("regex_pattern", DEFAULT_PATTERN);
            Ok(Filter::Regex {
                pattern: expression(&pattern)?,
                group_select: entry.get("group_select").and_then(Value::as_i64).unwrap_or(0),
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
    Regex::new(pattern).map_err(|error| format!("the expression `{pattern}` cannot be used: {error}"))
}

/// The most frequent of some values; of equally frequent ones the first.
fn majority(values: Vec<Value>) -> Option<Value> {
    let votes = |value: &Value| values.iter().filter(|other| *other == value).count();
    let most = values.iter().map(votes).max()?;
    values.iter().find(|value| votes(value) == most).cloned()
}

/// The selected one of all matches, as `re.findall` gives them: of several groups the first that is not empty.
fn found(pattern: &Regex, select: i64, text: &str) -> Option<String> {
    let matches: Vec<String> = pattern
        .captures_iter(text)
        .map(|captures| {
            let groups = || captures.iter().skip(1).flatten().map(|group| group.as_str());
            match captures.len() {
                1 => captures[0].to_owned(),
                2 => groups().next().unwrap_or("").to_owned(),
                _ => groups().find(|group| !group.is_empty()).unwrap_or("").to_owned(),
            }
        })
        .collect();
    let at = if select < 0 { matches.len().checked_sub(select.unsigned_abs() as usize)? } else { select as usize };
    matches.get(at).map(|text| text.trim().to_owned())
}
