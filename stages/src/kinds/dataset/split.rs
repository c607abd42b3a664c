//! The split grammar of Hugging Face datasets: `train[:10%]`, `train[10:20]+train[-5:]`.

use std::ops::Range;

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{KeyWriter, Parameter, Reader};
use serde_json::json;

/// A text outside the grammar, or rows that it cannot be applied to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// Not of the form `name[from:to]`.
    #[error("`{0}` is not a split")]
    Form(String),
    /// A bound beyond 100 %.
    #[error("`{0}` reaches beyond 100%")]
    Percent(String),
    /// A word in round brackets that is no rounding.
    #[error("`{0}` is not a rounding")]
    Rounding(String),
    /// A rounding of whole numbers.
    #[error("`{0}` rounds, and has no percentage")]
    RoundingWithoutPercent(String),
    /// No such split in the data.
    #[error("there is no split `{name}`")]
    NoSuchSplit {
        /// The name asked for.
        name: String,
    },
    /// `pct1_dropremainder` of few rows.
    #[error("`pct1_dropremainder` needs 100 rows at least, and `{name}` has {rows}")]
    TooFewRows {
        /// The split.
        name: String,
        rows: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Rows,
    /// Percent, rounded to the nearest row, and half a row to the even one.
    Percent,
    /// Percent of the rows that make whole percents.
    WholePercent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Slice {
    name: String,
    from: Option<i64>,
    to: Option<i64>,
    unit: Unit,
}

/// Consecutive rows of a named split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowRange {
    /// The split.
    pub name: String,
    pub rows: Range<u64>,
    /// The last row asked for, where it was named and lies beyond the rows there are.
    pub asked: Option<u64>,
}

/// Which rows of the data are taken, in which order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    pub text: String,
    /// Where it stands; nowhere if it is the default.
    pub span: Option<Span>,
    slices: Vec<Slice>,
}

impl Split {
    /// Reads the grammar.
    ///
    /// # Errors
    /// Fails where the text is outside it.
    pub fn parse(text: &str) -> Result<Self, SplitError> {
        let slices = text.split('+').map(|part| slice(part, text)).collect::<Result<_, _>>()?;
        Ok(Self { text: text.to_owned(), span: None, slices })
    }

    /// The names of the splits it takes from.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.slices.iter().map(|slice| slice.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whether its bounds depend on how many rows a split has.
    pub fn needs_count(&self) -> bool {
        self.slices.iter().any(|slice| {
            let negative = |bound: Option<i64>| bound.is_some_and(|bound| bound < 0);
            slice.unit != Unit::Rows || negative(slice.from) || negative(slice.to)
        })
    }

    /// Whether it takes no row of any data, as `train[0:0]` does.
    pub fn is_empty(&self) -> bool {
        let takes_nothing = |slice: &Slice| match (slice.from.unwrap_or(0), slice.to) {
            (from, Some(to)) if (from < 0) == (to < 0) => to <= from,
            (_, to) => to == Some(0),
        };
        self.slices.iter().all(takes_nothing)
    }

    /// The rows it takes; `rows` gives the length of a split, or `None` where there is no such split. Where
    /// [`Split::needs_count`] says no, any length will do that is not too short, such as `u64::MAX`.
    ///
    /// # Errors
    /// Fails where a split is missing or too short for its rounding.
    pub fn ranges(&self, rows: impl Fn(&str) -> Option<u64>) -> Result<Vec<RowRange>, SplitError> {
        let range = |slice: &Slice| {
            let name = slice.name.clone();
            let rows = rows(&name).ok_or(SplitError::NoSuchSplit { name: name.clone() })?;
            if slice.unit == Unit::WholePercent && rows < 100 {
                return Err(SplitError::TooFewRows { name, rows });
            }
            let from = slice.bound(slice.from, rows).unwrap_or(0);
            let to = slice.bound(slice.to, rows).unwrap_or(rows);
            let asked = (slice.unit == Unit::Rows).then_some(slice.to).flatten().and_then(|to| u64::try_from(to).ok());
            Ok(RowRange { name, rows: from..to.max(from), asked })
        };
        self.slices.iter().map(range).collect()
    }
}

impl Slice {
    /// A bound in rows, counted from the start and clamped to the rows.
    fn bound(&self, bound: Option<i64>, rows: u64) -> Option<u64> {
        let (bound, all) = (i128::from(bound?), i128::from(rows));
        let absolute = match self.unit {
            Unit::Rows => bound,
            Unit::Percent => percent_half_to_even(bound, all),
            Unit::WholePercent => bound * (all / 100),
        };
        let from_start = if absolute < 0 { all + absolute } else { absolute };
        Some(from_start.clamp(0, all) as u64)
    }
}

/// `percent·rows/100` as Python's `round` rounds it.
fn percent_half_to_even(percent: i128, rows: i128) -> i128 {
    let hundredths = percent * rows;
    let (whole, rest) = (hundredths.div_euclid(100), hundredths.rem_euclid(100));
    let up = rest > 50 || (rest == 50 && whole % 2 != 0);
    whole + i128::from(up)
}

fn slice(part: &str, all: &str) -> Result<Slice, SplitError> {
    // White space is allowed around `+` only.
    let part = match (part.trim(), all.contains('+')) {
        (trimmed, true) => trimmed,
        (_, false) => part,
    };
    let form = || SplitError::Form(part.to_owned());
    let name_end = part.find(['[', '(']).unwrap_or(part.len());
    let (name, rest) = part.split_at(name_end);
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    if !name.split('.').all(is_name) {
        return Err(form());
    }
    let (bounds, rest) = match rest.strip_prefix('[') {
        Some(inside) => inside.split_once(']').map(|(bounds, rest)| (Some(bounds), rest)).ok_or_else(form)?,
        None => (None, rest),
    };
    let rounding = match rest.strip_prefix('(') {
        Some(inside) => Some(inside.strip_suffix(')').filter(|word| !word.contains(')')).ok_or_else(form)?),
        None if rest.is_empty() => None,
        None => return Err(form()),
    };
    let (from, to) = match bounds {
        Some(bounds) => bounds.split_once(':').ok_or_else(form)?,
        None => ("", ""),
    };
    let ((from, from_percent), (to, to_percent)) = (bound(from).ok_or_else(form)?, bound(to).ok_or_else(form)?);
    let unit = unit(part, from_percent || to_percent, rounding)?;
    if unit != Unit::Rows && [from, to].into_iter().flatten().any(|percent| percent.unsigned_abs() > 100) {
        return Err(SplitError::Percent(part.to_owned()));
    }
    Ok(Slice { name: name.to_owned(), from, to, unit })
}

/// `12`, `-5`, `1_000`, `10%`, or nothing; whether it is a percentage.
fn bound(text: &str) -> Option<(Option<i64>, bool)> {
    let (number, percent) = text.strip_suffix('%').map_or((text, false), |number| (number, true));
    if number.is_empty() {
        return (!percent).then_some((None, false));
    }
    let digits = number.strip_prefix('-').unwrap_or(number);
    let well_placed = digits.split('_').all(|group| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit()));
    let value = number.replace('_', "").parse().ok().filter(|_| well_placed)?;
    Some((Some(value), percent))
}

fn unit(part: &str, percent: bool, rounding: Option<&str>) -> Result<Unit, SplitError> {
    match (percent, rounding) {
        (false, None) => Ok(Unit::Rows),
        (true, None | Some("closest")) => Ok(Unit::Percent),
        (true, Some("pct1_dropremainder")) => Ok(Unit::WholePercent),
        (true, Some(other)) => Err(SplitError::Rounding(other.to_owned())),
        (false, Some(_)) => Err(SplitError::RoundingWithoutPercent(part.to_owned())),
    }
}

impl Parameter for Split {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let Value::String(text) = &node.value else {
            // A mapping is no text without its quotes: other programs divide rows so.
            let is_mapping = matches!(node.value, Value::Map(_));
            reader.wrong_type(node, if is_mapping { "a split such as `train`" } else { "a string" });
            return None;
        };
        Self::parse(text)
            .map(|split| Self { span: Some(node.span), ..split })
            .map_err(|error| {
                reader.bad_value(node, error.to_string(), "a split such as `train`, `train[:2000]`, `test[10%:20%]`")
            })
            .ok()
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(self.text.clone());
    }

    fn schema() -> serde_json::Value {
        json!({ "type": "string", "examples": ["train", "train[:2000]", "test[10%:20%]", "train[:10]+train[-5:]"] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_no_row_of_any_data_is_known_without_data() {
        for spec in ["train[0:0]", "train[5:5]", "train[:0]", "train[-2:-5]", "train[10%:10%]", "a[:0]+b[3:1]"] {
            let split = Split::parse(spec).unwrap();
            assert!(split.is_empty(), "{spec}");
            let rows = split.ranges(|_| Some(1000)).unwrap();
            assert!(rows.iter().all(|range| range.rows.is_empty()), "{spec}: {rows:?}");
        }
        for spec in ["train", "train[:1]", "train[5:]", "train[-2:]", "train[-5:-2]", "train[5:-5]", "a[:0]+b"] {
            let split = Split::parse(spec).unwrap();
            assert!(!split.is_empty(), "{spec}");
            let rows = split.ranges(|_| Some(1000)).unwrap();
            assert!(rows.iter().any(|range| !range.rows.is_empty()), "{spec}: {rows:?}");
        }
    }

    #[test]
    fn ranges_equal_those_of_datasets() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/splits.json");
        let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for case in cases.as_array().unwrap() {
            let spec = case["spec"].as_str().unwrap();
            let rows = case["rows"].as_u64().unwrap();
            let made = Split::parse(spec).and_then(|split| split.ranges(|name| (name == "train").then_some(rows)));
            if case.get("error").is_some() {
                assert!(made.is_err(), "{spec} of {rows}: {made:?}");
                continue;
            }
            let made = made.unwrap_or_else(|error| panic!("{spec} of {rows}: {error}"));
            let made: Vec<[u64; 2]> = made.iter().map(|range| [range.rows.start, range.rows.end]).collect();
            assert_eq!(serde_json::to_value(made).unwrap(), case["ranges"], "{spec} of {rows}");
        }
    }

    #[test]
    fn only_percentages_and_negative_bounds_need_a_count() {
        let needs = |text: &str| Split::parse(text).unwrap().needs_count();
        assert!(!needs("train") && !needs("train[:2_000]") && !needs("train[5:]+test[1:2]"));
        assert!(needs("train[:1%]") && needs("train[-5:]") && needs("train[:-1]"));
    }

    #[test]
    fn a_range_that_ends_before_it_begins_is_empty() {
        let ranges = Split::parse("train[5:3]").unwrap().ranges(|_| Some(10)).unwrap();
        assert!(ranges[0].rows.is_empty());
    }

    #[test]
    fn large_splits_round_exactly() {
        let ranges = |spec: &str, rows| Split::parse(spec).unwrap().ranges(|_| Some(rows)).unwrap()[0].rows.clone();
        assert_eq!(ranges("train[:1%]", 204_045), 0..2040);
        assert_eq!(ranges("train[:1%]", 250), 0..2, "half to even");
        assert_eq!(ranges("train[15%:25%]", 10), 2..2);
        assert_eq!(ranges("train[99%:]", u64::MAX).end, u64::MAX);
    }
}
