//! Which rows each optimizer step takes: a function of the seed, the epoch and the number of rows alone.

use std::ops::Range;

use engine::parameter::Parameters;
use model::random::permutation;

/// What happens to the last rows of an epoch if they do not fill a step.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// They form a smaller step.
    Step,
    /// They are left out of this epoch, and counted.
    Drop,
}

/// What to do where the rows make no step.
pub(super) const WITHOUT_A_STEP: &str =
    "lower micro_batch_size or gradient_accumulation_steps, or keep the last rows with `leftover: step`";

/// How a run is divided into epochs and steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Rows of the data.
    pub rows: usize,
    /// Rows of a full step.
    pub rows_per_step: usize,
    /// What becomes of the last rows of an epoch.
    pub leftover: Leftover,
    /// Steps after which an epoch ends, whatever rows are left.
    pub max_steps_per_epoch: Option<u64>,
}

/// The place of a step in the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPlace {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The step's rows, as positions in the epoch's order.
    pub rows: Range<usize>,
}

impl Division {
    /// Optimizer steps of one epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        let steps = match self.leftover {
            Leftover::Step => self.rows.div_ceil(self.rows_per_step),
            Leftover::Drop => self.rows / self.rows_per_step,
        };
        self.max_steps_per_epoch.map_or(steps as u64, |most| most.min(steps as u64))
    }

    /// Optimizer steps of the whole run: so many if they are given, else those of the epochs. None where an epoch has
    /// none.
    pub fn total_steps(&self, epochs: u64, max_steps: Option<u64>) -> u64 {
        match (self.steps_per_epoch(), max_steps) {
            (0, _) => 0,
            (_, Some(steps)) => steps,
            (per_epoch, None) => per_epoch.saturating_mul(epochs),
        }
    }

    /// The last rows of an epoch that do not fill a step, whether or not they form one.
    pub fn leftover_rows(&self) -> usize {
        self.rows % self.rows_per_step
    }

    /// Rows that each epoch leaves out: dropped ones, and those beyond its last step.
    pub fn rows_left_out(&self) -> usize {
        let taken = usize::try_from(self.steps_per_epoch()).unwrap_or(usize::MAX).saturating_mul(self.rows_per_step);
        self.rows.saturating_sub(taken)
    }

    /// Whether an epoch is over once so many steps are done.
    pub fn ends_epoch(&self, steps: u64) -> bool {
        steps > 0 && steps.is_multiple_of(self.steps_per_epoch())
    }

    /// Where the step of this number (from 0) stands.
    pub fn place(&self, step: u64) -> StepPlace {
        let within = (step % self.steps_per_epoch()) as usize;
        let first = within * self.rows_per_step;
        let end = first.saturating_add(self.rows_per_step).min(self.rows);
        StepPlace { epoch: step / self.steps_per_epoch(), rows: first..end }
    }
}

/// Whether each epoch shuffles the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shuffle {
    /// The order of the data, in every epoch.
    No,
    /// [`permutation`] of this seed and the epoch.
    Seeded(u64),
}

/// The order in which epochs visit the rows; that of one epoch is kept at a time.
#[derive(Debug)]
pub(super) struct RowOrder {
    shuffle: Shuffle,
    rows: usize,
    made: Option<(u64, Vec<usize>)>,
}

impl RowOrder {
    /// The orders of so many rows.
    pub(super) fn new(shuffle: Shuffle, rows: usize) -> Self {
        Self { shuffle, rows, made: None }
    }

    /// The rows of a step, as indices into the data.
    pub(super) fn rows(&mut self, place: &StepPlace) -> &[usize] {
        let made = self.made.take().filter(|(epoch, _)| *epoch == place.epoch);
        let order = made.map_or_else(|| self.of_epoch(place.epoch), |(_, order)| order);
        let (_, order) = self.made.insert((place.epoch, order));
        &order[place.rows.clone()]
    }

    fn of_epoch(&self, epoch: u64) -> Vec<usize> {
        match self.shuffle {
            Shuffle::No => (0..self.rows).collect(),
            Shuffle::Seeded(seed) => permutation(seed, epoch, self.rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_epoch_visits_all_rows_in_an_order_that_the_seed_decides() {
        let whole = |epoch| StepPlace { epoch, rows: 0..7 };
        let mut order = RowOrder::new(Shuffle::Seeded(3), 7);
        let first = order.rows(&whole(0)).to_vec();
        assert_ne!(order.rows(&whole(1)), first);
        // A resumed run comes to an epoch without the ones before it, and to the middle of it.
        assert_eq!(RowOrder::new(Shuffle::Seeded(3), 7).rows(&StepPlace { epoch: 0, rows: 2..5 }), &first[2..5]);
        assert_eq!(order.rows(&whole(0)), first);
        assert_eq!(RowOrder::new(Shuffle::No, 3).rows(&StepPlace { epoch: 4, rows: 1..3 }), [1, 2]);
    }

    #[test]
    fn leftover_rows_form_a_step_or_are_dropped() {
        let step = Division { rows: 2000, rows_per_step: 512, leftover: Leftover::Step, max_steps_per_epoch: None };
        assert_eq!((step.steps_per_epoch(), step.total_steps(10, None), step.rows_left_out()), (4, 40, 0));
        assert_eq!(step.place(3), StepPlace { epoch: 0, rows: 1536..2000 });
        assert_eq!(step.place(4), StepPlace { epoch: 1, rows: 0..512 });
        let drop = Division { leftover: Leftover::Drop, ..step };
        assert_eq!((drop.steps_per_epoch(), drop.total_steps(10, Some(7)), drop.rows_left_out()), (3, 7, 464));
        // More steps than the epochs have go on with further epochs, as in transformers.
        assert_eq!((drop.total_steps(1, Some(7)), drop.total_steps(1, Some(2))), (7, 2));
        assert_eq!((step.leftover_rows(), drop.leftover_rows()), (464, 464));
        assert_eq!([0, 3, 4, 7, 8].map(|steps| step.ends_epoch(steps)), [false, false, true, false, true]);
    }

    #[test]
    fn an_epoch_may_end_before_its_rows_do() {
        let short = Division { rows: 2000, rows_per_step: 512, leftover: Leftover::Step, max_steps_per_epoch: Some(2) };
        assert_eq!((short.steps_per_epoch(), short.total_steps(10, None), short.rows_left_out()), (2, 20, 976));
        assert_eq!(short.place(2), StepPlace { epoch: 1, rows: 0..512 });
        let long = Division { max_steps_per_epoch: Some(9), ..short };
        assert_eq!((long.steps_per_epoch(), long.rows_left_out()), (4, 0));
    }

    #[test]
    fn a_step_wider_than_the_data_takes_all_of_it() {
        let wide = Division { rows: 3, rows_per_step: usize::MAX, leftover: Leftover::Step, max_steps_per_epoch: None };
        assert_eq!((wide.steps_per_epoch(), wide.total_steps(u64::MAX, None)), (1, u64::MAX));
        assert_eq!(wide.place(5), StepPlace { epoch: 5, rows: 0..3 });
        let drop = Division { leftover: Leftover::Drop, ..wide };
        assert_eq!((drop.total_steps(7, None), drop.rows_left_out()), (0, 3));
    }
}
