//! Which rows each optimizer step takes: a function of the seed, the epoch and the number of rows alone.

use std::ops::Range;

use super::parameters::Leftover;

/// How a run is divided into epochs and steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Division {
    /// Rows of the data.
    pub rows: usize,
    /// Rows of a full step.
    pub rows_per_step: usize,
    /// What becomes of the last rows of an epoch.
    pub leftover: Leftover,
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
        steps as u64
    }

    /// Optimizer steps of the whole run.
    pub fn total_steps(&self, epochs: u64, max_steps: Option<u64>) -> u64 {
        let all = self.steps_per_epoch().saturating_mul(epochs);
        max_steps.map_or(all, |most| most.min(all))
    }

    /// Rows that each epoch leaves out.
    pub fn dropped_rows(&self) -> usize {
        match self.leftover {
            Leftover::Step => 0,
            Leftover::Drop => self.rows % self.rows_per_step,
        }
    }

    /// Where the step of this number (from 0) stands.
    pub fn place(&self, step: u64) -> StepPlace {
        let within = (step % self.steps_per_epoch()) as usize;
        let first = within * self.rows_per_step;
        let end = first.saturating_add(self.rows_per_step).min(self.rows);
        StepPlace { epoch: step / self.steps_per_epoch(), rows: first..end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftover_rows_form_a_step_or_are_dropped() {
        let step = Division { rows: 2000, rows_per_step: 512, leftover: Leftover::Step };
        assert_eq!((step.steps_per_epoch(), step.total_steps(10, None), step.dropped_rows()), (4, 40, 0));
        assert_eq!(step.place(3), StepPlace { epoch: 0, rows: 1536..2000 });
        assert_eq!(step.place(4), StepPlace { epoch: 1, rows: 0..512 });
        let drop = Division { leftover: Leftover::Drop, ..step };
        assert_eq!((drop.steps_per_epoch(), drop.total_steps(10, Some(7)), drop.dropped_rows()), (3, 7, 464));
    }

    #[test]
    fn a_step_wider_than_the_data_takes_all_of_it() {
        let wide = Division { rows: 3, rows_per_step: usize::MAX, leftover: Leftover::Step };
        assert_eq!((wide.steps_per_epoch(), wide.total_steps(u64::MAX, None)), (1, u64::MAX));
        assert_eq!(wide.place(5), StepPlace { epoch: 5, rows: 0..3 });
        let drop = Division { leftover: Leftover::Drop, ..wide };
        assert_eq!((drop.total_steps(7, None), drop.dropped_rows()), (0, 3));
    }
}
