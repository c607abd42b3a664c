//! Named figures as tables: metrics, the report of a merge, the steps of a training.

use serde_json::{Map, Value};

use crate::table::Table;
use crate::words;

/// Named figures, a nested one under its dotted name.
pub(crate) fn table(figures: &Value) -> Table {
    let mut table = Table::new(["metric", "value"]);
    flatten(figures, String::new(), &mut |name, value| table.row([name, words::figure(value)]));
    table
}

/// Named figures as indented lines, a nested one under its dotted name; those without a value are left out.
pub(crate) fn lines(figures: &Value) -> String {
    let mut lines = Vec::new();
    flatten(figures, String::new(), &mut |name, value| {
        if !value.is_null() {
            lines.push((name, words::figure(value)));
        }
    });
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    lines.iter().map(|(name, value)| format!("  {name:width$}  {}\n", words::visible(value))).collect()
}

/// Records with the same fields, as many of them as asked for, evenly spread: the first and the last are among them.
pub(crate) fn spread(records: &[Map<String, Value>], count: usize) -> Table {
    let names: Vec<&String> = records.first().map(|record| record.keys().collect()).unwrap_or_default();
    let mut table = Table::new(names.iter().map(|name| name.as_str()));
    for at in spread_over(records.len(), count) {
        table.row(names.iter().map(|name| records[at].get(name.as_str()).map(words::figure).unwrap_or_default()));
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
