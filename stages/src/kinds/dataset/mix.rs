//! Several datasets as one: one after the other, or interleaved.

use std::ops::ControlFlow;

use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::parameter::Reference;
use engine::stage::InputFacts;
use model::random::{Address, Purpose, Stream};
use serde_json::{Map, Value};

use super::arrange::Arranger;
use super::expression::Expressions;
use super::flaw::Flaw;
use super::parameters::{Dataset, Mix, StoppingStrategy, WeightedRows};
use super::recipe::Made;
use super::take::Taker;
use crate::data::artifact::{Row, RowsFacts, RowsReader, Said};

/// A dataset that takes part.
struct Part {
    /// The stage that made it.
    stage: String,
    rows: RowsReader,
}

/// The rows of `datasets` in the order that `mix` makes.
pub(super) fn take<'a>(
    params: &'a Dataset,
    datasets: &[WeightedRows],
    context: &mut StageContext,
) -> Result<Taker<'a>, StageError> {
    let mut parts = open(datasets, context)?;
    let facts = RowsFacts { rows: 0, ..parts[0].rows.facts().clone() };
    let environment = super::expression::environment();
    let expressions = Expressions::compile(params, &environment)?;
    let mut taker = Taker::new(params, Arranger::new(params, facts, context)?, context)?;
    let lengths: Vec<u64> = parts.iter().map(|part| part.rows.len()).collect();
    check_repetition(params, datasets, &lengths)?;
    let may_repeat = params.mix == Mix::Interleave && params.stopping_strategy == StoppingStrategy::AllExhausted;
    if may_repeat && params.train_test_split.is_some() {
        context.warn(
            "`all_exhausted` repeats rows before `train_test_split` parts them: the same row may be in \
             `train` and in `test`. Split each dataset, then mix the training parts",
        );
    }
    for (source, index) in order(params, datasets, &lengths) {
        let part = &mut parts[source];
        let row = part.rows.row(index)?;
        let made = keep(&expressions, row);
        if taker.note(made, context, || format!("stage `{}`, row {}", part.stage, index + 1))?.is_break() {
            break;
        }
    }
    Ok(taker)
}

/// Datasets that are known already not to be alike.
pub(super) fn problems(datasets: &[WeightedRows], inputs: &InputFacts) -> Vec<Problem> {
    let facts = |dataset: &WeightedRows| dataset.rows.reference.facts_in(inputs).and_then(RowsFacts::from_facts);
    let mut known = datasets.iter().filter_map(|dataset| Some((&dataset.rows.reference, facts(dataset)?)));
    let Some((first, of_first)) = known.next() else { return Vec::new() };
    let unlike = |(reference, facts): (&Reference, RowsFacts)| {
        let difference = difference(&of_first, &facts)?;
        let (message, help) = not_alike(&first.stage, &reference.stage, &difference);
        Some(Problem::error("wrong-rows", reference.span, message, "other rows").with_help(help))
    };
    known.filter_map(unlike).collect()
}

fn not_alike(one: &str, other: &str, difference: &str) -> (String, &'static str) {
    let message = format!("the rows of `{one}` and `{other}` are different: {difference}");
    (message, "give both stages the same `template`, and rename their columns with `column_map`")
}

/// Opens the parts, which must be rows of one shape.
fn open(datasets: &[WeightedRows], context: &mut StageContext) -> Result<Vec<Part>, StageError> {
    let mut parts: Vec<Part> = Vec::new();
    for dataset in datasets {
        let rows = RowsReader::open(&context.open(&dataset.rows)?)?;
        let stage = dataset.rows.reference.stage.clone();
        if rows.is_empty() {
            return Err(StageError::bad_data(format!("stage `{stage}` has no rows")));
        }
        if let Some(first) = parts.first()
            && let Some(difference) = difference(first.rows.facts(), rows.facts())
        {
            let (message, help) = not_alike(&first.stage, &stage, &difference);
            return Err(StageError::bad_data(message).with_help(help));
        }
        parts.push(Part { stage, rows });
    }
    if parts.is_empty() {
        return Err(StageError::bad_data("`datasets` names no stage"));
    }
    Ok(parts)
}

/// How often `all_exhausted` may repeat a row, on average.
const REPEATED: f64 = 1000.0;

/// Whether drawing until a rarely drawn dataset is exhausted would repeat the others without end.
fn check_repetition(params: &Dataset, datasets: &[WeightedRows], lengths: &[u64]) -> Result<(), StageError> {
    let weights: Option<Vec<f64>> = datasets.iter().map(|dataset| dataset.weight).collect();
    let (Mix::Interleave, StoppingStrategy::AllExhausted, Some(weights)) =
        (params.mix, params.stopping_strategy, weights)
    else {
        return Ok(());
    };
    let sum: f64 = weights.iter().sum();
    let drawn = lengths.iter().zip(weights).map(|(rows, weight)| *rows as f64 * sum / weight).fold(0.0, f64::max);
    let rows: u64 = lengths.iter().sum();
    if drawn <= REPEATED * rows as f64 {
        return Ok(());
    }
    let message =
        format!("to exhaust all datasets at these weights needs about {drawn:.1e} rows, and there are {rows}");
    Err(StageError::bad_data(message)
        .with_help("give a larger `weight` to the one that is drawn rarely, or another `stopping_strategy`"))
}

fn difference(one: &RowsFacts, other: &RowsFacts) -> Option<String> {
    if one.shape != other.shape {
        return Some(format!("{} and {}", one.shape.describe(), other.shape.describe()));
    }
    let name = |facts: &RowsFacts| facts.template.as_ref().map_or("none".to_owned(), |template| template.name.clone());
    if one.template != other.template {
        return Some(format!("the templates {} and {}", name(one), name(other)));
    }
    let differ = one.columns != other.columns || one.response != other.response;
    differ.then(|| format!("the columns {} and {}", one.columns.join(", "), other.columns.join(", ")))
}

/// The row, where the filter keeps it.
fn keep(expressions: &Expressions<'_>, row: Row) -> Result<ControlFlow<(), Made>, Flaw> {
    if expressions.is_empty() {
        return Ok(ControlFlow::Continue(Made { row, empty: false }));
    }
    Ok(match expressions.apply(fields(&row))? {
        ControlFlow::Continue(_) => ControlFlow::Continue(Made { row, empty: false }),
        ControlFlow::Break(()) => ControlFlow::Break(()),
    })
}

/// A row as an expression sees it.
fn fields(row: &Row) -> Map<String, Value> {
    match row {
        Row::Columns(columns) => {
            columns.iter().map(|(name, text)| (name.clone(), Value::from(text.as_str()))).collect()
        }
        Row::Text(text) => Map::from_iter([("text".to_owned(), Value::from(text.as_str()))]),
        Row::Messages(messages) => {
            let messages = serde_json::to_value(messages).expect("messages are JSON");
            Map::from_iter([("messages".to_owned(), messages)])
        }
        Row::Judged(judged) => {
            let value = |said: &Said| serde_json::to_value(said).expect("what is said is JSON");
            let mut fields = Map::from_iter([("prompt".to_owned(), value(&judged.prompt))]);
            match (&judged.chosen, &judged.rejected) {
                (Some(chosen), Some(rejected)) => {
                    fields.extend(
                        [("chosen", chosen), ("rejected", rejected)].map(|(name, said)| (name.to_owned(), value(said))),
                    );
                }
                (chosen, rejected) => {
                    fields.extend(chosen.iter().chain(rejected).map(|said| ("completion".to_owned(), value(said))));
                    fields.insert("label".to_owned(), chosen.is_some().into());
                }
            }
            fields
        }
    }
}

/// Which row of which dataset comes next.
type Choice = (usize, u64);

fn order(params: &Dataset, datasets: &[WeightedRows], lengths: &[u64]) -> Box<dyn Iterator<Item = Choice>> {
    let weights: Option<Vec<f64>> = datasets.iter().map(|dataset| dataset.weight).collect();
    match (params.mix, weights) {
        (Mix::Concat, _) => {
            let lengths = lengths.to_vec();
            Box::new(lengths.into_iter().enumerate().flat_map(|(source, rows)| (0..rows).map(move |row| (source, row))))
        }
        (Mix::Interleave, None) => Box::new(in_turns(lengths.to_vec(), params.stopping_strategy)),
        (Mix::Interleave, Some(weights)) => {
            let draws = draws(params.seed, &weights);
            Box::new(Drawn::new(lengths.to_vec(), params.stopping_strategy, draws))
        }
    }
}

/// A row of each dataset, then another of each.
fn in_turns(lengths: Vec<u64>, strategy: StoppingStrategy) -> impl Iterator<Item = Choice> {
    let rounds = match strategy {
        StoppingStrategy::FirstExhausted => lengths.iter().min(),
        StoppingStrategy::AllExhausted | StoppingStrategy::AllExhaustedWithoutReplacement => lengths.iter().max(),
    };
    (0..rounds.copied().unwrap_or(0)).flat_map(move |round| {
        let of_round = |(source, rows): (usize, &u64)| match strategy {
            StoppingStrategy::AllExhaustedWithoutReplacement if round >= *rows => None,
            _ => Some((source, round % rows)),
        };
        lengths.iter().enumerate().filter_map(of_round).collect::<Vec<_>>()
    })
}

/// Endless draws of datasets by their weights: draw `i` is the first dataset whose weights up to it exceed uniform
/// number `i`.
fn draws(seed: u64, weights: &[f64]) -> impl Iterator<Item = usize> + use<> {
    let sum: f64 = weights.iter().sum();
    let mut up_to = 0.0;
    let borders: Vec<f64> = weights
        .iter()
        .map(|weight| {
            up_to += weight / sum;
            up_to
        })
        .collect();
    let mut stream = Stream::new(seed, Address::new(Purpose::DatasetMix));
    std::iter::repeat_with(move || {
        let number = stream.uniform();
        borders.iter().position(|border| number < *border).unwrap_or(borders.len() - 1)
    })
}

/// Datasets as they are drawn, each from its first row on.
struct Drawn<D> {
    lengths: Vec<u64>,
    strategy: StoppingStrategy,
    draws: D,
    /// How often each was drawn.
    taken: Vec<u64>,
    /// How many have given all their rows.
    exhausted: usize,
}

impl<D: Iterator<Item = usize>> Drawn<D> {
    fn new(lengths: Vec<u64>, strategy: StoppingStrategy, draws: D) -> Self {
        let taken = vec![0; lengths.len()];
        Self { lengths, strategy, draws, taken, exhausted: 0 }
    }
}

impl<D: Iterator<Item = usize>> Iterator for Drawn<D> {
    type Item = Choice;

    fn next(&mut self) -> Option<Choice> {
        let enough = match self.strategy {
            StoppingStrategy::FirstExhausted => 1,
            StoppingStrategy::AllExhausted | StoppingStrategy::AllExhaustedWithoutReplacement => self.lengths.len(),
        };
        if self.exhausted >= enough {
            return None;
        }
        // Where one is left, the draws of the others need not be waited for.
        let without_replacement = self.strategy == StoppingStrategy::AllExhaustedWithoutReplacement;
        let left = || (0..self.lengths.len()).find(|source| self.taken[*source] < self.lengths[*source]);
        let only = if without_replacement && self.exhausted + 1 == enough { left() } else { None };
        loop {
            let source = match only {
                Some(only) => only,
                None => self.draws.next()?,
            };
            let (rows, taken) = (self.lengths[source], self.taken[source]);
            if taken >= rows && self.strategy == StoppingStrategy::AllExhaustedWithoutReplacement {
                continue;
            }
            self.taken[source] += 1;
            self.exhausted += usize::from(taken + 1 == rows);
            return Some((source, taken % rows));
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::file::tree::Node;
    use engine::parameter::{Parameter, Reader};

    use super::*;

    /// `tests/golden/data/interleave.json`, made by `tests/reference/make_golden_interleave.py`.
    #[test]
    fn interleaving_equals_that_of_datasets() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/interleave.json");
        let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert!(cases.len() >= 12);
        for case in cases {
            let lengths: Vec<u64> = serde_json::from_value(case["lengths"].clone()).unwrap();
            let name = case["stopping_strategy"].clone();
            let strategy = StoppingStrategy::read(&Node::from_json(&name), &mut Reader::default()).unwrap();
            let expected: Vec<Choice> = serde_json::from_value(case["rows"].clone()).unwrap();
            let made: Vec<Choice> = match case["draws"].as_array() {
                None => in_turns(lengths, strategy).collect(),
                Some(draws) => {
                    let draws = draws.clone().into_iter().map(|draw| draw.as_u64().unwrap() as usize);
                    // There are further draws: that none of them is used is the strategy's doing.
                    let draws = draws.chain(std::iter::repeat(0));
                    Drawn::new(lengths, strategy, draws).collect()
                }
            };
            assert_eq!(made, expected, "{case}");
        }
    }

    #[test]
    fn a_dataset_that_is_hardly_drawn_is_not_waited_for_without_end() {
        let mut stream = draws(1, &[1.0, 1e-300]);
        let strategy = StoppingStrategy::AllExhaustedWithoutReplacement;
        let made: Vec<Choice> = Drawn::new(vec![2, 3], strategy, &mut stream).collect();
        assert_eq!(made, [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]);
        let with = |weight: f64| {
            serde_json::json!({"datasets": [{"rows": "a", "weight": 1.0}, {"rows": "b", "weight": weight}],
                "mix": "interleave", "stopping_strategy": "all_exhausted"})
        };
        let checked = |weight| {
            let params = Dataset::read(&Node::from_json(&with(weight)), &mut Reader::default()).unwrap();
            check_repetition(&params, params.datasets.as_deref().unwrap(), &[10, 1000])
        };
        assert!(checked(0.1).is_ok());
        assert!(checked(1e-5).unwrap_err().message.contains("1.0e8 rows"));
    }

    #[test]
    fn datasets_are_drawn_by_their_weights() {
        let drawn: Vec<usize> = draws(3, &[7.0, 1.0, 2.0]).take(100_000).collect();
        let share = |source| drawn.iter().filter(|drawn| **drawn == source).count() as f64 / 1e5;
        for (source, expected) in [(0, 0.7), (1, 0.1), (2, 0.2)] {
            assert!((share(source) - expected).abs() < 0.005, "{source}: {}", share(source));
        }
        assert_eq!(drawn, draws(3, &[0.7, 0.1, 0.2]).take(100_000).collect::<Vec<_>>());
        assert_ne!(drawn, draws(4, &[7.0, 1.0, 2.0]).take(100_000).collect::<Vec<_>>());
    }
}
