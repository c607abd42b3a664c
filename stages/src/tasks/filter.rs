//! Filters of generated text: pipelines whose steps run in order.

use serde_json::{Map, Value};

use super::alike::{Alike, Punctuation};
use super::documents::Document;
use super::expression::Expression;
use super::functions::Function;

/// What the harness has where an expression matches nothing.
const INVALID: &str = "[invalid]";

/// The expression of `regex` where none is given.
const DEFAULT_PATTERN: &str = r"#### (\-?[0-9\.\,]+)";

/// A step.
#[derive(Debug, Clone)]
enum Filter {
    Regex(Search),
    /// The same, or else the choice of the row that is said.
    MultiChoice(Search, Alike),
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
    /// A function, or with arguments a class of filters.
    Function(Function, Option<Map<String, Value>>),
}

/// What a pipeline makes of the responses to a row.
#[derive(Debug, Clone, Default)]
pub struct Filtered {
    /// Texts, or what they are mapped to.
    pub values: Vec<Value>,
    /// It is one, and no list with one in it.
    pub is_single: bool,
}

/// Looks up the function that a value names, if it names one.
pub(super) type Functions<'f> = &'f dyn Fn(&Value) -> Result<Option<Function>, String>;

/// What an expression finds in a text.
#[derive(Debug, Clone)]
struct Search {
    pattern: Expression,
    /// Which of all matches is meant; those below 0 count from the end.
    group_select: i64,
    /// What there is where nothing is found.
    fallback: String,
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
    pub(super) fn read(entry: &Map<String, Value>, functions: Functions<'_>) -> Result<Self, String> {
        let name = entry.get("name").and_then(Value::as_str).ok_or("an entry lacks `name`")?;
        let filters =
            entry.get("filter").and_then(Value::as_array).ok_or_else(|| format!("`{name}` lacks `filter`"))?;
        let filters = filters.iter().map(|entry| filter(entry, functions)).collect::<Result<_, _>>()?;
        Ok(Self { name: name.to_owned(), filters })
    }

    /// Responses that it needs to a row: those that `take_first_k` names.
    pub fn least_responses(&self) -> usize {
        let needed = |filter: &Filter| if let Filter::TakeFirstK(k) = filter { *k } else { 1 };
        self.filters.iter().map(needed).max().unwrap_or(1)
    }

    /// The functions that it runs.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.filters.iter().filter_map(|filter| if let Filter::Function(of, _) = filter { Some(of) } else { None })
    }

    /// What it makes of the responses to each row: functions are given all rows at once.
    ///
    /// # Errors
    /// Says what a filter cannot be used on, with the row if it is about one.
    pub fn apply(
        &self,
        responses: Vec<Vec<String>>,
        rows: &[&Document],
    ) -> Result<Vec<Filtered>, (Option<usize>, String)> {
        let as_given =
            |texts: Vec<String>| Filtered { values: texts.into_iter().map(Value::String).collect(), is_single: false };
        let mut all: Vec<Filtered> = responses.into_iter().map(as_given).collect();
        for filter in &self.filters {
            all = match filter {
                Filter::Function(function, arguments) => {
                    let given: Vec<Value> = all.iter().map(Filtered::json).collect();
                    let made =
                        function.filtered(&given, rows, arguments.as_ref()).map_err(|message| (None, message))?;
                    made.into_iter().map(Filtered::of_function).collect()
                }
                filter => {
                    let each = all.into_iter().zip(rows).enumerate();
                    let each = each
                        .map(|(at, (of_row, row))| filter.apply(of_row, row).map_err(|message| (Some(at), message)));
                    each.collect::<Result<_, _>>()?
                }
            };
        }
        Ok(all)
    }
}

impl Filter {
    fn apply(&self, responses: Filtered, row: &Document) -> Result<Filtered, String> {
        let Filtered { values, is_single } = responses;
        let each = |make: &dyn Fn(&str) -> Result<Value, String>| {
            let of_text = |value: &Value| value.as_str().map_or_else(|| Ok(value.clone()), make);
            values.iter().map(of_text).collect::<Result<Vec<Value>, String>>()
        };
        let values = match self {
            Self::Regex(search) => {
                each(&|text| Ok(search.found(text)?.unwrap_or_else(|| search.fallback.clone()).into()))?
            }
            Self::MultiChoice(search, alike) => {
                let choices = Choices::of(row, alike)?;
                each(&|text| Ok(search.choice(text, &choices, alike)?.into()))?
            }
            Self::RemoveWhitespace => each(&|text| Ok(text.trim().into()))?,
            Self::Lowercase => each(&|text| Ok(text.to_lowercase().into()))?,
            Self::Uppercase => each(&|text| Ok(text.to_uppercase().into()))?,
            Self::Map { values, default } => each(&|text| Ok(values.get(text).unwrap_or(default).clone()))?,
            Self::TakeFirst => {
                return Ok(Filtered { values: values.into_iter().take(1).collect(), is_single: true });
            }
            Self::TakeFirstK(k) => values.into_iter().take(*k).collect(),
            Self::MajorityVote => majority(values).into_iter().collect(),
            Self::Function(..) => unreachable!("functions are given all rows at once"),
        };
        Ok(Filtered { values, is_single })
    }
}

impl Filtered {
    fn of_function(made: Value) -> Self {
        match made {
            Value::Array(values) => Self { values, is_single: false },
            value => Self { values: vec![value], is_single: true },
        }
    }

    /// As functions are given it.
    pub fn json(&self) -> Value {
        match self.values.as_slice() {
            [value] if self.is_single => value.clone(),
            values => values.iter().cloned().collect(),
        }
    }
}

impl Search {
    /// The selected one of all matches, as `re.findall` gives them: of several groups the first that is not empty;
    /// nothing where there is none.
    fn found(&self, text: &str) -> Result<Option<String>, String> {
        let matches = self.pattern.find_all(text)?;
        let at = match usize::try_from(self.group_select) {
            Ok(at) => Some(at),
            Err(_) => matches.len().checked_sub(self.group_select.unsigned_abs() as usize),
        };
        let Some(groups) = at.and_then(|at| matches.get(at)) else { return Ok(None) };
        let found = match groups.as_slice() {
            [whole] => *whole,
            [_, group] => Some(group.unwrap_or("")),
            [_, groups @ ..] => groups.iter().flatten().find(|group| !group.is_empty()).copied(),
            [] => None,
        };
        Ok(found.map(|text| text.trim().to_owned()))
    }

    /// What the expression finds; else the letter of the first choice whose text is said, else that of a letter behind
    /// a colon: `(B)`.
    fn choice(&self, text: &str, choices: &Choices, alike: &Alike) -> Result<String, String> {
        if let Some(found) = self.found(text)?.filter(|found| !found.is_empty()) {
            return Ok(found);
        }
        let select = |pattern: &Expression| Self { pattern: pattern.clone(), ..self.clone() };
        let by_text = select(&choices.by_text).found(&alike.bared(text)?)?;
        if let Some(said) = by_text.filter(|said| !said.is_empty()) {
            return Ok(choices.letter(&said).unwrap_or(said));
        }
        let by_letter = select(&choices.by_letter).found(text)?;
        Ok(by_letter.map_or_else(|| self.fallback.clone(), |letter| format!("({letter})")))
    }
}

/// The choices of a row, and how they are found in a response.
struct Choices {
    /// Their texts, made alike, in the order of their letters.
    texts: Vec<String>,
    by_text: Expression,
    by_letter: Expression,
}

impl Choices {
    fn of(row: &Document, alike: &Alike) -> Result<Self, String> {
        let list = row.get("choices").and_then(Value::as_array);
        let texts: Option<Vec<&str>> = list.and_then(|list| list.iter().map(Value::as_str).collect());
        let texts = texts.ok_or("`multi_choice_regex` reads the choices of the column `choices`, a list of texts")?;
        let texts: Vec<String> = texts.iter().map(|text| alike.bared(text.trim())).collect::<Result<_, _>>()?;
        // The longest first: one choice may begin another one.
        let mut escaped: Vec<String> = texts.iter().map(|text| fancy_regex::escape(text).into_owned()).collect();
        escaped.sort_by_key(|text| std::cmp::Reverse(text.chars().count()));
        let letters: Vec<String> = (0..texts.len()).map(|at| letter(at).to_string()).collect();
        Ok(Self {
            by_text: Expression::new(&escaped.join("|"))?,
            by_letter: Expression::new(&format!(r":[\s]*({})", letters.join("|")))?,
            texts,
        })
    }

    /// The letter of a text; of two choices with one text that of the last.
    fn letter(&self, text: &str) -> Option<String> {
        self.texts.iter().rposition(|choice| choice == text).map(|at| format!("({})", letter(at)))
    }
}

/// `A`, `B`, …
fn letter(at: usize) -> char {
    u32::try_from(at).ok().and_then(|at| char::from_u32('A' as u32 + at)).unwrap_or('?')
}

fn filter(entry: &Value, functions: Functions<'_>) -> Result<Filter, String> {
    let own = |key: &str| entry.get(key).map_or(Ok(None), functions);
    if let Some(class) = own("function")? {
        let mut arguments = entry.as_object().cloned().unwrap_or_default();
        arguments.remove("function");
        return Ok(Filter::Function(class, Some(arguments)));
    }
    let function = entry.get("function").and_then(Value::as_str).ok_or("a filter lacks `function`")?;
    let known: &[&str] = match function {
        "regex" => &["regex_pattern", "group_select", "fallback"],
        "multi_choice_regex" => {
            &["regex_pattern", "group_select", "fallback", "ignore_case", "ignore_punctuation", "regexes_to_ignore"]
        }
        "map" => &["mapping_dict", "default_value"],
        "take_first_k" => &["k"],
        "custom" => &["filter_fn"],
        _ => &[],
    };
    let text = |name: &str, default: &str| entry.get(name).and_then(Value::as_str).unwrap_or(default).to_owned();
    let search = || {
        Ok::<_, String>(Search {
            pattern: Expression::new(&text("regex_pattern", DEFAULT_PATTERN))?,
            group_select: match entry.get("group_select") {
                None => 0,
                Some(select) => select.as_i64().ok_or("`group_select` is to be an integer")?,
            },
            fallback: text("fallback", INVALID),
        })
    };
    let flag = |name: &str| match entry.get(name) {
        None => Ok(false),
        Some(flag) => flag.as_bool().ok_or_else(|| format!("`{name}` is to be true or false")),
    };
    let filter = match function {
        "regex" => Filter::Regex(search()?),
        "multi_choice_regex" => {
            let alike = Alike {
                regexes: entry.get("regexes_to_ignore").map_or_else(|| Ok(Vec::new()), Alike::regexes)?,
                case: flag("ignore_case")?,
                punctuation: flag("ignore_punctuation")?.then_some(Punctuation::Unicode),
                digits: false,
            };
            Filter::MultiChoice(search()?, alike)
        }
        "remove_whitespace" => Filter::RemoveWhitespace,
        "lowercase" => Filter::Lowercase,
        "uppercase" => Filter::Uppercase,
        "map" => {
            let values = entry.get("mapping_dict").and_then(Value::as_object).cloned();
            let values = values.ok_or("`map` lacks `mapping_dict`, the value of each text")?;
            Filter::Map { values, default: entry.get("default_value").cloned().unwrap_or_default() }
        }
        "take_first" => Filter::TakeFirst,
        "take_first_k" => {
            let k = entry.get("k").and_then(Value::as_u64).filter(|k| *k > 0);
            Filter::TakeFirstK(k.ok_or("`take_first_k` lacks `k`, a number of responses")? as usize)
        }
        "majority_vote" => Filter::MajorityVote,
        "custom" => {
            Filter::Function(own("filter_fn")?.ok_or("`custom` lacks `filter_fn`, a `!function` that filters")?, None)
        }
        other => return Err(format!("the filter `{other}` is not known here")),
    };
    let arguments = entry.as_object().into_iter().flat_map(Map::keys);
    match arguments.map(String::as_str).find(|name| *name != "function" && !known.contains(name)) {
        Some(other) => Err(format!("the filter `{function}` has no `{other}`")),
        None => Ok(filter),
    }
}

/// The most frequent of some values; of equally frequent ones the first.
fn majority(values: Vec<Value>) -> Option<Value> {
    let votes = |value: &Value| values.iter().filter(|other| *other == value).count();
    let most = values.iter().map(votes).max()?;
    values.iter().find(|value| votes(value) == most).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(filter: &str) -> Result<Filter, String> {
        super::filter(&serde_json::from_str(filter).unwrap(), &|_| Ok(None))
    }

    fn applied(filter: &str, text: &str, row: &str) -> Value {
        let row: Document = serde_json::from_str(row).unwrap();
        let given = Filtered { values: vec![text.into()], is_single: true };
        read(filter).unwrap().apply(given, &row).unwrap().json()
    }

    #[test]
    fn of_several_groups_the_first_that_is_not_empty_is_taken() {
        let filter = r#"{"function": "regex", "regex_pattern": "(QQ)?(ZZ)?1", "fallback": "17"}"#;
        assert_eq!(applied(filter, "1", "{}"), "17");
        assert_eq!(applied(filter, "x", "{}"), "17");
        assert_eq!(applied(filter, "ZZ1", "{}"), "ZZ");
    }

    #[test]
    fn a_choice_is_found_by_the_expression_by_its_text_or_by_its_letter() {
        let filter = |more: &str| {
            format!(
                r#"{{"function": "multi_choice_regex", "regex_pattern": "(\\([A-Z]\\))", "group_select": 0{more}}}"#
            )
        };
        let row = r#"{"choices": ["Guilty", "Guilty of Romance", "no: never"]}"#;
        for (more, text, made) in [
            ("", "It is (C), not (A).", "(C)"),
            ("", "It is Guilty of Romance.", "(B)"),
            ("", "It is Guilty.", "(A)"),
            ("", "The answer: C", "(C)"),
            ("", "The answer: D", "[invalid]"),
            ("", "guilty", "[invalid]"),
            (r#", "ignore_case": true"#, "guilty", "(A)"),
            (r#", "ignore_punctuation": true"#, "it is no never!", "(C)"),
            (r#", "regexes_to_ignore": ["ty"]"#, "Guil", "(A)"),
            (r#", "group_select": -1"#, "(A) or (B)", "(B)"),
        ] {
            assert_eq!(applied(&filter(more), text, row), made, "{more} {text}");
        }
        let error = read(&filter("")).unwrap().apply(Filtered::default(), &Document::new()).unwrap_err();
        assert!(error.contains("`choices`"), "{error}");
    }

    #[test]
    fn arguments_of_filters_are_known_ones() {
        assert!(read(r#"{"function": "regex", "group_select": -1}"#).is_ok());
        assert!(read(r#"{"function": "regex", "group_selct": -1}"#).unwrap_err().contains("`group_selct`"));
        assert!(read(r#"{"function": "regex", "group_select": "-1"}"#).is_err());
    }
}
