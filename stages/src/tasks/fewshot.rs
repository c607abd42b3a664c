//! Which rows are shown before a question.

use std::borrow::Cow;

use super::documents::Document;
use super::file::{Sampler, Samples, Task};
use super::random::PythonRandom;

/// The harness's seed of few shots.
pub const SEED: u64 = 1234;

impl Task {
    /// The split whose rows are evaluated.
    pub fn evaluated_split(&self) -> Option<&str> {
        self.test_split.as_deref().or(self.validation_split.as_deref())
    }

    /// The split that few shots come from; none if the file has them itself.
    pub fn shown_split(&self) -> Option<&str> {
        if self.fewshot.samples.is_some() && self.fewshot_split.is_none() {
            return None;
        }
        let splits = [&self.fewshot_split, &self.training_split, &self.validation_split, &self.test_split];
        splits.into_iter().find_map(Option::as_deref)
    }

    /// The few shots that the file has, unless it names a split of them as well.
    ///
    /// # Errors
    /// Says what the function that returns them fails over.
    pub fn shown_samples(&self) -> Result<Option<Cow<'_, [Document]>>, String> {
        match self.fewshot.samples.as_ref().filter(|_| self.fewshot_split.is_none()) {
            None => Ok(None),
            Some(Samples::Rows(rows)) => Ok(Some(Cow::Borrowed(rows))),
            Some(Samples::Function(function)) => {
                let rows = serde_json::from_value(function.call(&[])?);
                rows.map(|rows| Some(Cow::Owned(rows)))
                    .map_err(|error| format!("`samples` is no list of rows: {error}"))
            }
        }
    }

    /// Whether the evaluated row is kept from being shown: where the file names the same split for both, or none. A
    /// `fewshot_split` that is the `validation_split` by name is another one to the harness, and so here.
    fn shows_others(&self) -> bool {
        self.fewshot_split == self.test_split
    }
}

/// Draws few shots for one row after the other.
pub struct FewShots<'t> {
    task: &'t Task,
    count: usize,
    rows: &'t [Document],
    random: PythonRandom,
}

impl<'t> FewShots<'t> {
    /// Takes `count` of `rows`, with one generator for the whole task.
    pub fn new(task: &'t Task, count: usize, rows: &'t [Document], seed: u64) -> Self {
        Self { task, count, rows, random: PythonRandom::new(seed) }
    }

    /// The rows to show before `row`, to be asked for in the order of the rows.
    ///
    /// # Errors
    /// Fails where there are fewer rows than asked for.
    pub fn next(&mut self, row: &Document) -> Result<Vec<&'t Document>, String> {
        if self.count == 0 {
            return Ok(Vec::new());
        }
        let (rows, count, apart) = (self.rows, self.count, self.task.shows_others());
        let too_few =
            || format!("{count} rows are to be shown before each, and there are {} to choose from", rows.len());
        let is_other = |shown: &&Document| !apart || *shown != row;
        let others = || rows.iter().filter(is_other).collect::<Vec<_>>();
        if self.task.fewshot.sampler == Sampler::FirstN {
            return others().get(..count).map(<[_]>::to_vec).ok_or_else(too_few);
        }
        let order = self.random.sample(rows.len(), count + usize::from(apart)).ok_or_else(too_few)?;
        let drawn: Vec<&Document> = order.into_iter().map(|at| &rows[at]).filter(is_other).take(count).collect();
        if drawn.len() == count {
            return Ok(drawn);
        }
        // Several rows like this one were drawn: the harness draws again from the others.
        let others = others();
        let order = self.random.sample(others.len(), count).ok_or_else(too_few)?;
        Ok(order.into_iter().map(|at| others[at]).collect())
    }
}
