//! Named figures as tables: metrics, the report of a merge, the steps of a training.

use std::collections::BTreeSet;

use engine::history::RecordedGate;
use engine::visible::on_one_line;
use serde_json::{Map, Value};
use stages::view::show::shortened;

use crate::table::{self, Table};
use crate::terminal::Look;
use crate::words;

/// Named figures, a nested one under its dotted name.
pub(crate) fn table(figures: &Value) -> Table {
    let mut table = Table::new(["metric", "value"]);
    in_words(figures, String::new(), &mut |name, value| table.row([name, in_a_cell(value)]));
    table
}

/// Named facts as indented lines, a nested one under its dotted name; those without a value are left out.
pub(crate) fn facts(facts: &Map<String, Value>, look: Look) -> String {
    let mut lines = Vec::new();
    in_words(&Value::Object(facts.clone()), String::new(), &mut |name, value| {
        if !value.is_null() {
            lines.push((on_one_line(&name).into_owned(), on_one_line(&in_a_cell(value)).into_owned()));
        }
    });
    table::list(&lines, look)
}

/// Named figures as indented lines, a nested one under its dotted name; those without a value are left out.
pub(crate) fn lines(figures: &Value) -> String {
    let mut lines = Vec::new();
    flatten(figures, String::new(), &mut |name, value| {
        if !value.is_null() {
            lines.push((name, words::figure(value)));
        }
    });
    let lines: Vec<_> = lines.into_iter().map(|(name, value)| (name, words::visible(&value))).collect();
    table::list(&lines, Look::stdout())
}

/// Gates as indented lines: what is asked, whether it holds, and what was found.
pub(crate) fn gates(gates: &[RecordedGate], look: Look) -> String {
    let line = |gate: &RecordedGate| {
        let mark = if gate.holds { look.paint("32", "holds") } else { look.paint("31", "does not hold") };
        look.wrap(&format!("  {}: {mark}: {}", gate.gate, gate.because), 4)
    };
    gates.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Records with the same fields, as many of them as asked for, evenly spread: the first and the last are among them.
pub(crate) fn spread(records: &[Map<String, Value>], count: usize) -> Table {
    let has_value =
        |name: &&String| records.iter().any(|record| record.get(*name).is_some_and(|value| !value.is_null()));
    let names: Vec<&String> =
        records.first().map(|record| record.keys().filter(has_value).collect()).unwrap_or_default();
    let cell = |value: &Value| if value.is_null() { String::new() } else { words::figure(value) };
    let mut table = Table::new(names.iter().map(|name| name.as_str()));
    for at in spread_over(records.len(), count) {
        table.row(names.iter().map(|name| records[at].get(name.as_str()).map(cell).unwrap_or_default()));
    }
    table
}

/// Records by their `kind` (the steps of a training, its validations), each in its order; those without one are of one
/// kind.
pub(crate) fn by_kind(records: &[Map<String, Value>]) -> Vec<Vec<Map<String, Value>>> {
    let mut kinds: Vec<Vec<Map<String, Value>>> = Vec::new();
    for record in records {
        match kinds.iter_mut().find(|of_kind| of_kind[0].get("kind") == record.get("kind")) {
            Some(of_kind) => of_kind.push(record.clone()),
            None => kinds.push(vec![record.clone()]),
        }
    }
    kinds
}

fn spread_over(length: usize, count: usize) -> Vec<usize> {
    match (length, count.min(length)) {
        (_, 0) => Vec::new(),
        (_, 1) => vec![length - 1],
        (_, count) => (0..count).map(|at| at * (length - 1) / (count - 1)).collect(),
    }
}

/// A value on one line: of a list its first few values, of a long text its ends.
fn in_a_cell(value: &Value) -> String {
    const MOST_VALUES: usize = 8;
    const MOST_OF_A_TEXT: usize = 200;
    match value {
        Value::Null => "none".to_owned(),
        Value::Array(values) if values.is_empty() => "none".to_owned(),
        Value::Array(values) => {
            let first: Vec<String> = values.iter().take(MOST_VALUES).map(in_a_cell).collect();
            let more = values.len().saturating_sub(MOST_VALUES);
            let more = if more > 0 { format!(", … and {more} more") } else { String::new() };
            first.join(", ") + &more
        }
        other => shortened(&words::figure(other), MOST_OF_A_TEXT).replace('\n', " "),
    }
}

/// As [`flatten`], for a person: records of a list as a list for each of their fields.
fn in_words(value: &Value, name: String, add: &mut dyn FnMut(String, &Value)) {
    flatten(value, name, &mut |name, value| {
        let records = value.as_array().filter(|records| !records.is_empty() && records.iter().all(Value::is_object));
        let Some(records) = records else { return add(name, value) };
        let mut fields: Vec<&String> = records.iter().filter_map(Value::as_object).flat_map(Map::keys).collect();
        let mut seen = BTreeSet::new();
        fields.retain(|field| seen.insert(*field));
        for field in fields {
            let of_field = records.iter().map(|record| record.get(field).cloned().unwrap_or(Value::Null));
            add(format!("{name}.{field}"), &Value::Array(of_field.collect()));
        }
    });
}

/// Gives each figure, a nested one under its dotted name.
pub(crate) fn flatten(value: &Value, name: String, add: &mut dyn FnMut(String, &Value)) {
    let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| flatten(value, below(key), add)),
        other => add(name, other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nested_figures_have_dotted_names() {
        let table = table(&json!({ "perplexity": 1.5, "rouge1": { "f": 0.25 } }));
        assert_eq!(table.to_string(), "metric      value\nperplexity    1.5\nrouge1.f     0.25\n");
    }

    #[test]
    fn lists_are_values_and_not_json() {
        let report = json!({ "replaced": [], "weights": [1.0, 0.25], "many": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            "layers": [{ "most": 0.5, "by": "a" }, { "most": 2.0, "by": "b" }] });
        let text = table(&report).to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.splitn(2, ' ').map(str::trim).collect()).collect();
        let expected = [
            ["metric", "value"],
            ["layers.by", "a, b"],
            ["layers.most", "0.5, 2"],
            ["many", "1, 2, 3, 4, 5, 6, 7, 8, … and 2 more"],
            ["replaced", "none"],
            ["weights", "1, 0.25"],
        ];
        let found: std::collections::BTreeSet<Vec<&str>> = lines.into_iter().collect();
        assert_eq!(found, expected.into_iter().map(|line| line.to_vec()).collect(), "{text}");
        let of_model = json!({ "config": { "architectures": ["A"], "rope": null }, "dtype": "f32" });
        let look = Look { colour: false, unicode: true, width: 80, live: false };
        let text = facts(of_model.as_object().unwrap(), look);
        assert_eq!(text, "  config.architectures  A\n  dtype                 f32\n");
    }

    #[test]
    fn records_are_spread_from_the_first_to_the_last() {
        assert_eq!(spread_over(150, 4), [0, 49, 99, 149]);
        assert_eq!(spread_over(2, 10), [0, 1]);
        assert_eq!(spread_over(5, 1), [4]);
        assert_eq!(spread_over(0, 3), [0; 0]);
        let records: Vec<Map<String, Value>> = (1..=3)
            .map(|step| Map::from_iter([("step".to_owned(), json!(step)), ("loss".to_owned(), json!(0.5))]))
            .collect();
        assert_eq!(spread(&records, 2).to_string(), "step  loss\n   1   0.5\n   3   0.5\n");
        assert_eq!(by_kind(&records), [records]);
    }

    #[test]
    fn records_of_two_kinds_are_two_tables() {
        let record = |kind: &str, step: u64| {
            Map::from_iter([("kind".to_owned(), json!(kind)), ("step".to_owned(), json!(step))])
        };
        let mixed = [record("validation", 0), record("train", 1), record("train", 2), record("validation", 2)];
        let apart = by_kind(&mixed);
        assert_eq!(apart, [[mixed[0].clone(), mixed[3].clone()], [mixed[1].clone(), mixed[2].clone()]]);
    }
}
