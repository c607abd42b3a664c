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
    Regex { pattern: Regex, group_select: i64, fallback: String },
    RemoveWhitespace,
    Lowercase,
    Uppercase,
    TakeFirst,
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

    /// What it makes of a response.
    pub fn apply(&self, response: &str) -> String {
        self.filters.iter().fold(response.to_owned(), |text, filter| match filter {
            Filter::Regex { pattern, group_select, fallback } => {
                found(pattern, *group_select, &text).unwrap_or_else(|| fallback.clone())
            }
            Filter::RemoveWhitespace => text.trim().to_owned(),
            Filter::Lowercase => text.to_lowercase(),
            Filter::Uppercase => text.to_uppercase(),
            Filter::TakeFirst => text,
        })
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
        "take_first" => Ok(Filter::TakeFirst),
        other => Err(format!("the filter `{other}` is not known here")),
    }
}

/// Compiles an expression of Python's, of what both have.
pub(super) fn expression(pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|error| format!("the expression `{pattern}` cannot be used: {error}"))
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
