//! How many rows a dataset will have, as far as its parameters bound them and its sources let expect.

use engine::parameter::Reference;
use engine::stage::InputFacts;

use super::arrange::{ROWS, TEST, TRAIN};
use super::parameters::{Dataset, Mix};
use super::split::RowRange;

/// The rows of each output, where they follow from the split, a limit, the datasets that are joined or the number of
/// rows that the sources have. Where the parameters bound it as well, the smaller holds.
pub(super) fn expected(params: &Dataset, inputs: &InputFacts, of_sources: Option<u64>) -> Vec<(&'static str, u64)> {
    let counted = of_sources.and_then(|rows| of_source(params, rows));
    let rows = match (bounded(params, inputs), counted) {
        (Some(bounded), Some(counted)) => Some(bounded.min(counted)),
        (bounded, counted) => bounded.or(counted),
    };
    rows.map(|rows| divided(params, rows)).unwrap_or_default()
}

/// The rows that are taken of so many, where a filter does not decide.
fn of_source(params: &Dataset, rows: u64) -> Option<u64> {
    let ranges = params.split.ranges(|_| Some(rows)).ok().filter(|_| params.filter.is_none())?;
    let taken = |range: &RowRange| range.rows.end.min(rows).saturating_sub(range.rows.start);
    let taken = ranges.iter().map(taken).sum::<u64>();
    Some(params.limit.map_or(taken, |limit| taken.min(limit)))
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

/// The most rows that there can be, by the parameters; as many are expected.
fn bounded(params: &Dataset, inputs: &InputFacts) -> Option<u64> {
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
