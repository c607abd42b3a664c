//! Rows of tasks that stand in the data that a model was trained on.

use engine::context::StageContext;
use engine::error::StageError;
use serde_json::{Value, json};

use super::prepared::Prepared;
use crate::data::artifact::RowsReader;
use crate::data::overlap::Sought;
use crate::tasks::TaskError;
use crate::tasks::documents::Document;
use crate::tasks::file::Task;
use crate::tasks::prompt::PromptOptions;
use crate::tasks::request::{Asking, Gold, Request, Sample};

/// What of a task stands in the training data.
#[derive(Debug, Clone, Default)]
pub(super) struct Contamination {
    /// Of each row of the task, whether it does.
    pub rows: Vec<bool>,
    /// How many rows of the training data hold one.
    pub training_rows: u64,
}

impl Contamination {
    /// How many of its rows do.
    pub(super) fn count(&self) -> usize {
        self.rows.iter().filter(|held| **held).count()
    }

    pub(super) fn json(&self) -> Value {
        json!({ "rows": self.count(), "of": self.rows.len(), "training_rows": self.training_rows })
    }

    /// In a line, where there is something.
    pub(super) fn words(&self, task: &str) -> Option<String> {
        let (count, all) = (self.count(), self.rows.len());
        (count > 0).then(|| {
            format!("{task}: {count} of {all} rows stand in the training data, in {} of its rows", self.training_rows)
        })
    }
}

/// Looks for the rows of tasks in training data.
///
/// # Errors
/// Fails if a row of a task makes no text, or the training data cannot be read.
pub(super) fn look(
    prepared: &[Prepared],
    training: &mut RowsReader,
    context: &mut StageContext,
) -> Result<Vec<Contamination>, StageError> {
    let mut sought = Sought::default();
    // Task and row of each text.
    let mut places = Vec::new();
    for (at, of) in prepared.iter().enumerate() {
        for (row, text) in texts(of)?.into_iter().enumerate() {
            sought.add(&text);
            places.push((at, row));
        }
    }
    let empty = |of: &Prepared| Contamination { rows: vec![false; of.samples.len()], training_rows: 0 };
    let mut found: Vec<Contamination> = prepared.iter().map(empty).collect();
    let facts = training.facts().clone();
    for (done, row) in training.iter().enumerate() {
        if done.is_multiple_of(1024) {
            context.stop_if_cancelled()?;
            context.progress("training rows", done as u64, None, None);
        }
        let mut held: Vec<usize> = Vec::new();
        for number in sought.found_in(&row?.text(&facts)) {
            let (task, row) = places[number];
            found[task].rows[row] = true;
            held.push(task);
        }
        held.dedup();
        held.into_iter().for_each(|task| found[task].training_rows += 1);
    }
    Ok(found)
}

/// The question of each row with its right answer, and nothing before it.
fn texts(of: &Prepared) -> Result<Vec<String>, TaskError> {
    let documents: Vec<Document> = of.samples.iter().map(|sample| sample.document.clone()).collect();
    let task = &Task { description: "".into(), ..(*of.task).clone() };
    let asking = Asking { task, options: PromptOptions::default(), chat_template: None, num_fewshot: Some(0) };
    let samples = asking.samples(&documents, &[])?;
    let text = |request: &Request, gold: &Gold| match (request, gold) {
        (Request::Continuation { context, continuation }, _) => format!("{context}{continuation}"),
        (Request::Generation { context }, Gold::Texts(texts)) => {
            format!("{context} {}", texts.first().map_or("", String::as_str))
        }
        (Request::Generation { context }, Gold::Choices(_)) => context.clone(),
        (Request::Rolling { text }, _) => text.clone(),
    };
    let of_sample = |sample: &Sample| {
        let right = match &sample.gold {
            Gold::Choices(right) => right.first().copied().unwrap_or(0),
            Gold::Texts(_) => 0,
        };
        sample.requests.get(right).map_or_else(String::new, |request| text(request, &sample.gold))
    };
    Ok(samples.iter().map(of_sample).collect())
}
