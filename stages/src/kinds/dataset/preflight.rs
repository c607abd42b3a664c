//! How many rows a dataset will have, as far as its parameters bound them.

use std::collections::BTreeMap;

use engine::artifact::Facts;
use engine::parameter::Reference;
use engine::preflight::Preflight;
use engine::stage::InputFacts;

use super::arrange::{ROWS, TEST, TRAIN};
use super::mapping;
use super::parameters::{Dataset, Mix};
use super::split::RowRange;

/// The rows of each output, where they follow from the split, a limit or the datasets that are joined, and what a row
/// is, where that follows from a template or `column_map`.
pub(super) fn preflight(params: &Dataset, inputs: &InputFacts) -> Preflight {
    let mut ahead = Preflight::default();
    if let Some(shape) = mapping::shape_asked_for(params) {
        let outputs: &[&str] = if params.train_test_split.is_some() { &[TRAIN, TEST] } else { &[ROWS] };
        let shape = serde_json::to_value(shape).expect("a shape is JSON");
        outputs.iter().for_each(|output| ahead.expect(output, "shape", shape.clone()));
    }
    for (output, rows) in rows(params, inputs).map(|rows| divided(params, rows)).unwrap_or_default() {
        ahead.expect(output, "rows", rows);
    }
    ahead
}

/// The rows of each output, where the sources have so many and a filter does not decide.
pub(super) fn of_source(params: &Dataset, rows: u64) -> BTreeMap<String, Facts> {
    let ranges = params.split.ranges(|_| Some(rows)).ok().filter(|_| params.filter.is_none());
    let taken = |range: &RowRange| range.rows.end.min(rows).saturating_sub(range.rows.start);
    let Some(taken) = ranges.map(|ranges| ranges.iter().map(taken).sum::<u64>()) else { return BTreeMap::new() };
    let divided = divided(params, params.limit.map_or(taken, |limit| taken.min(limit)));
    let facts = |rows: u64| Facts::from_iter([("rows".to_owned(), rows.into())]);
    divided.into_iter().map(|(output, rows)| (output.to_owned(), facts(rows))).collect()
}

/// The rows of each output, of so many in all.
fn divided(params: &Dataset, rows: u64) -> Vec<(&'static str, u64)> {
    match &params.train_test_split {
        None => vec![(ROWS, rows)],
        Some(split) => {
            let test = split.test_rows(rows).min(rows);
            vec![(TRAIN, rows - test), (TEST, test)]
        }
    }
}

fn rows(params: &Dataset, inputs: &InputFacts) -> Option<u64> {
    let bounded = match &params.datasets {
        None => of_the_split(params),
        Some(datasets) if params.mix == Mix::Concat => {
            let of = |input: &Reference| input.facts_in(inputs)?.get("rows")?.as_u64();
            datasets.iter().map(|dataset| of(&dataset.rows.reference)).sum()
        }
        Some(_) => None,
    };
    // How many a filter leaves is not known.
    let bounded = bounded.filter(|_| params.filter.is_none());
    match (bounded, params.limit) {
        (Some(bounded), Some(limit)) => Some(bounded.min(limit)),
        (bounded, limit) => bounded.or(limit),
    }
}

/// The rows that a split names, where it does not depend on how many there are.
fn of_the_split(params: &Dataset) -> Option<u64> {
    if params.split.needs_count() {
        return None;
    }
    let ranges = params.split.ranges(|_| Some(u64::MAX)).ok()?;
    let bounded = |range: &RowRange| (range.rows.end != u64::MAX).then(|| range.rows.end - range.rows.start);
    ranges.iter().map(bounded).sum()
}
