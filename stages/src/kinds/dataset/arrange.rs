//! The order of the rows and what becomes of them: shuffle, limit, train and test.
//!
//! Every choice is a function of a seed and of a row's number among the rows that were taken, so that nothing depends
//! on threads or on how rows lie in files. A shuffle puts rows in the order of their draws; `test` are the rows with
//! the smallest draws under the split's own seed, so that another shuffle leaves the two parts as they are. With a
//! limit, a shuffle's first rows stay.

use engine::context::{Draft, StageContext};
use engine::error::{Cause, OrFail, StageError};
use model::random::{Address, Purpose, Stream};

use super::parameters::{Dataset, TrainTestSplit};
use super::spool::{Order, Spool};
use crate::data::artifact::{Row, RowCounts, RowsFacts, RowsWriter};

/// The name of the one output.
pub(super) const ROWS: &str = "rows";
/// The names of the two outputs of a split.
pub(super) const TRAIN: &str = "train";
pub(super) const TEST: &str = "test";

/// Draws of 64 bits, one per row.
struct Draws(Stream);

impl Draws {
    fn new(seed: u64, purpose: Purpose) -> Self {
        Self(Stream::new(seed, Address::new(purpose)))
    }

    /// The draw of a row: the first two words of its block.
    fn at(&self, number: u64) -> u64 {
        let [low, high, _, _] = self.0.block(number);
        u64::from(low) | u64::from(high) << 32
    }
}

/// The rows with the smallest draws among candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Smallest {
    /// The draw and the number of the last of them.
    last: (u64, u64),
}

impl Smallest {
    /// The `take` rows with the smallest draws, of which there are so many at least. Memory does not grow with their
    /// number: the draws are made twice.
    fn choose<I: Iterator<Item = (u64, u64)>>(take: u64, candidates: impl Fn() -> I) -> Self {
        let bucket = |draw: u64| (draw >> 48) as usize;
        let mut counts = vec![0_u64; 1 << 16];
        candidates().for_each(|(draw, _)| counts[bucket(draw)] += 1);
        let (mut border, mut before) = (0, 0);
        while before + counts[border] < take {
            before += counts[border];
            border += 1;
        }
        let mut at_border: Vec<(u64, u64)> = candidates().filter(|(draw, _)| bucket(*draw) == border).collect();
        at_border.sort_unstable();
        Self { last: at_border[(take - before - 1) as usize] }
    }

    fn has(self, draw: u64, number: u64) -> bool {
        (draw, number) <= self.last
    }
}

/// Which rows a limit leaves.
enum Kept<'a> {
    /// The first so many.
    First(u64),
    /// Those with the smallest draws.
    Drawn(&'a Draws, Smallest),
}

impl<'a> Kept<'a> {
    fn new(shuffle: Option<&'a Draws>, count: u64, kept: u64) -> Self {
        match shuffle {
            Some(draws) if kept < count => {
                Self::Drawn(draws, Smallest::choose(kept, || (0..count).map(|number| (draws.at(number), number))))
            }
            _ => Self::First(kept),
        }
    }

    fn has(&self, number: u64) -> bool {
        match self {
            Self::First(kept) => number < *kept,
            Self::Drawn(draws, smallest) => smallest.has(draws.at(number), number),
        }
    }
}

/// Where rows go: straight into the output, or aside until their order is known.
enum Place {
    Output(Box<Output>),
    Aside(Spool),
}

/// Puts rows into their order and writes the outputs.
pub(super) struct Arranger<'a> {
    params: &'a Dataset,
    facts: RowsFacts,
    shuffle: Option<Draws>,
    place: Place,
    /// Rows taken so far.
    count: u64,
}

impl<'a> Arranger<'a> {
    /// Begins with no rows.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub(super) fn new(params: &'a Dataset, facts: RowsFacts, context: &mut StageContext) -> Result<Self, StageError> {
        let shuffle = params.shuffle.then(|| Draws::new(params.seed, Purpose::DatasetShuffle));
        let place = if shuffle.is_none() && params.train_test_split.is_none() {
            Place::Output(Box::new(Output::create(ROWS, &facts, context)?))
        } else {
            let order = if shuffle.is_some() { Order::ByKey } else { Order::AsGiven };
            Place::Aside(Spool::new(order, facts.columns.len(), &context.scratch().join("aside")))
        };
        Ok(Self { params, facts, shuffle, place, count: 0 })
    }

    pub(super) fn facts(&self) -> &RowsFacts {
        &self.facts
    }

    /// Whether no further row would stay.
    pub(super) fn is_full(&self) -> bool {
        self.shuffle.is_none() && self.params.limit.is_some_and(|limit| self.count >= limit)
    }

    /// Takes a row.
    pub(super) fn push(&mut self, row: Row) -> Result<(), StageError> {
        let number = self.count;
        self.count += 1;
        match &mut self.place {
            Place::Output(output) => output.write(self.facts.values(row)),
            Place::Aside(spool) => {
                let key = self.shuffle.as_ref().map_or(number, |draws| draws.at(number));
                spool.push(key, number, self.facts.values(row)).or_fail(Cause::Machine, set_aside)
            }
        }
    }

    /// How many rows were taken.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Writes and seals the outputs; returns how many rows each has, by name.
    ///
    /// # Errors
    /// Fails where the disk refuses, and where a part of a split has no rows.
    pub(super) fn finish(
        self,
        counts: &RowCounts,
        context: &mut StageContext,
    ) -> Result<Vec<(&'static str, u64)>, StageError> {
        let Self { params, facts, shuffle, place, count } = self;
        let spool = match place {
            Place::Output(output) => return Ok(vec![output.seal(counts, context)?]),
            Place::Aside(spool) => spool,
        };
        let kept = params.limit.map_or(count, |limit| limit.min(count));
        let stays = Kept::new(shuffle.as_ref(), count, kept);
        let Some(split) = &params.train_test_split else {
            let mut output = Output::create(ROWS, &facts, context)?;
            deal(spool, |number, values| if stays.has(number) { output.write(values) } else { Ok(()) })?;
            return Ok(vec![output.seal(counts, context)?]);
        };
        let draws = Draws::new(split.seed, Purpose::DatasetSplit);
        let numbers = || (0..count).filter(|number| stays.has(*number));
        let is_test = Smallest::choose(test_rows(split, kept)?, || numbers().map(|number| (draws.at(number), number)));
        let mut train = Output::create(TRAIN, &facts, context)?;
        let mut test = Output::create(TEST, &facts, context)?;
        deal(spool, |number, values| match stays.has(number) {
            true if is_test.has(draws.at(number), number) => test.write(values),
            true => train.write(values),
            false => Ok(()),
        })?;
        Ok(vec![train.seal(counts, context)?, test.seal(counts, context)?])
    }
}

/// How many rows are `test`: some, and not all.
fn test_rows(split: &TrainTestSplit, rows: u64) -> Result<u64, StageError> {
    let test = split.test_rows(rows);
    if test == 0 || test >= rows {
        let message =
            format!("`train_test_split` of {rows} rows makes {test} of them `test`, which leaves one part empty");
        return Err(StageError::bad_data(message).with_help("give it another `test_size`, or more rows"));
    }
    Ok(test)
}

fn set_aside() -> String {
    "cannot put rows aside on the disk".to_owned()
}

fn deal(spool: Spool, mut each: impl FnMut(u64, Vec<String>) -> Result<(), StageError>) -> Result<(), StageError> {
    let mut failed = None;
    let dealt = spool.drain(&mut |number, values| match each(number, values) {
        Ok(()) => true,
        Err(error) => {
            failed = Some(error);
            false
        }
    });
    match failed {
        Some(error) => Err(error),
        None => dealt.or_fail(Cause::Machine, set_aside),
    }
}

/// An output in the making.
struct Output {
    name: &'static str,
    writer: RowsWriter,
    draft: Draft,
    rows: u64,
}

impl Output {
    fn create(name: &'static str, facts: &RowsFacts, context: &mut StageContext) -> Result<Self, StageError> {
        let draft = context.create(name)?;
        Ok(Self { name, writer: RowsWriter::create(&draft.folder, facts.clone()), draft, rows: 0 })
    }

    fn write(&mut self, values: Vec<String>) -> Result<(), StageError> {
        self.rows += 1;
        Ok(self.writer.write_values(values)?)
    }

    fn seal(self, counts: &RowCounts, context: &mut StageContext) -> Result<(&'static str, u64), StageError> {
        let (facts, identity) = self.writer.finish_counted(counts)?;
        context.seal(self.draft, facts, Some(identity))?;
        Ok((self.name, self.rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_draws_are_those_that_sorting_finds() {
        let draws = Draws::new(7, Purpose::DatasetShuffle);
        let all = || (0..3000).map(|number| (draws.at(number), number));
        let mut sorted: Vec<(u64, u64)> = all().collect();
        sorted.sort_unstable();
        for take in [1, 2, 1499, 3000] {
            let smallest = Smallest::choose(take, all);
            assert_eq!(smallest.last, sorted[take as usize - 1]);
            assert_eq!(all().filter(|(draw, number)| smallest.has(*draw, *number)).count() as u64, take);
        }
    }

    #[test]
    fn equal_draws_are_told_apart_by_their_rows() {
        let all = || (0..10).map(|number| (5_u64, number));
        let smallest = Smallest::choose(4, all);
        assert_eq!(all().filter(|(draw, number)| smallest.has(*draw, *number)).count(), 4);
    }

    #[test]
    fn a_share_is_rounded_up_and_a_number_is_taken_as_it_is() {
        let rows = |test_size: f64, rows| TrainTestSplit { test_size, seed: 0 }.test_rows(rows);
        // As `Dataset.train_test_split` of datasets 5.2 has it.
        assert_eq!((rows(0.1, 50), rows(0.1, 55), rows(0.25, 7), rows(50.0, 60), rows(1.0, 10)), (5, 6, 2, 50, 1));
    }
}
