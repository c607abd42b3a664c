//! How many rows a dataset will have, as far as its parameters bound them.

use engine::parameter::Reference;
use engine::preflight::Preflight;
use engine::stage::InputFacts;

use super::arrange::{ROWS, TEST, TRAIN};
use super::mapping;
use super::parameters::{DatasetParams, Mix};

/// The rows of each output, where they follow from the split, a limit or the datasets that are joined, and what a row
/// is, where that follows from a template or `column_map`.
pub(super) fn preflight(params: &DatasetParams, inputs: &InputFacts) -> Preflight {
    let mut ahead = Preflight::default();
    if let Some(shape) = mapping::shape_asked_for(params) {
        let outputs: &[&str] = if params.train_test_split.is_some() { &[TRAIN, TEST] } else { &[ROWS] };
        let shape = serde_json::to_value(shape).expect("a shape is JSON");
        outputs.iter().for_each(|output| ahead.expect(output, "shape", shape.clone()));
    }
    let Some(rows) = rows(params, inputs) else { return ahead };
    match &params.train_test_split {
        None => ahead.expect(ROWS, "rows", rows),
        Some(split) => {
            let test = split.test_rows(rows).min(rows);
            ahead.expect(TRAIN, "rows", rows - test);
            ahead.expect(TEST, "rows", test);
        }
    }
    ahead
}

fn rows(params: &DatasetParams, inputs: &InputFacts) -> Option<u64> {
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
fn of_the_split(params: &DatasetParams) -> Option<u64> {
    if params.split.needs_count() {
        return None;
    }
    let ranges = params.split.ranges(|_| Some(u64::MAX)).ok()?;
    let bounded =
        |range: &super::split::RowRange| (range.rows.end != u64::MAX).then(|| range.rows.end - range.rows.start);
    ranges.iter().map(bounded).sum()
}
