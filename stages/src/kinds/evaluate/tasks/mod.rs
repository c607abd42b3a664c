//! Evaluation tasks: which ones ([`parameters`]), their rows as requests ([`prepared`], [`rows`], [`row_requests`]),
//! the answers ([`answers`], [`earlier`]), and what they come to ([`outcome`], [`beside`], [`contamination`]).
//!
//! All that can be wrong with a task, its rows and its prompts is found before the model is loaded.

mod answers;
mod beside;
mod contamination;
mod earlier;
mod outcome;
mod parameters;
mod prepared;
mod row_requests;
mod rows;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use model::sampling::Sampling;

use super::Evaluate;
use crate::compute::inference::{self, InferenceSession};
use crate::compute::journal;
use crate::data::artifact::RowsReader;
use crate::data::prompt::{ChatTemplates, Prompter};
use crate::data::tokenizer::Tokenizer;
use crate::hub::forget_working_files;
use crate::tasks::results::Answer;
pub(in crate::kinds) use answers::loglikelihoods;
use beside::Other;
use earlier::Earlier;
pub(in crate::kinds) use outcome::of_groups;
pub(in crate::kinds) use parameters::{TaskChoice, TaskParams};
pub(in crate::kinds) use prepared::{Prepared, prepare};
pub(in crate::kinds) use row_requests::{RowRequests, rows as requests_of_rows};

/// Evaluates the tasks.
pub(super) fn run(params: &Evaluate, context: &mut StageContext) -> Result<(), StageError> {
    let mut others = Vec::new();
    for input in params.compare_with.iter().flat_map(|others| &others.0) {
        others.push(Other::read(&input.reference.stage, &context.open(input)?.folder)?);
    }
    let model = context.open(&params.inference.model)?.folder;
    let folder = match &params.inference.tokenizer {
        Some(tokenizer) => context.open(tokenizer)?.folder,
        None => model.clone(),
    };
    let tokenizer = Tokenizer::from_folder(&folder)?;
    let prompter = Prompter::new(&params.prompt, &tokenizer)
        .or_fail(Cause::BadParameters, || "the chat template cannot be used".to_owned())?;
    let template = prompter.chat_templates().map(ChatTemplates::without_tools);
    let (prepared, groups) = prepare(&params.task.0.choice, params.limit, template, context)?;
    let contamination = match &params.task.0.train_data {
        None => Vec::new(),
        Some(input) => contamination::look(&prepared, &mut RowsReader::open(&context.open(input)?)?, context)?,
    };
    let positions = inference::positions(&model)?;
    let max_length = params.max_seq_len.unwrap_or(positions).min(positions);
    let rows = requests_of_rows(&prepared, &tokenizer, max_length)?;
    let family = context.family_of::<Evaluate>(&params.inference)?;
    let earlier = Earlier::new(context, &family);
    let mut answers: Vec<Option<Vec<Answer>>> = rows.iter().map(|row| earlier.take(context, row)).collect();
    let unanswered: Vec<usize> = (0..rows.len()).filter(|at| answers[*at].is_none()).collect();
    let taken_over = rows.len() - unanswered.len();
    context.record("rows_taken_over", taken_over);
    if taken_over > 0 {
        let all = rows.len();
        context.note(format!("the responses to {taken_over} of {all} rows are reused from an earlier evaluation"));
    }
    if !unanswered.is_empty() {
        let mut session = InferenceSession::open(&params.inference, Sampling::GREEDY, context)?;
        let asked: Vec<&RowRequests> = unanswered.iter().map(|at| &rows[*at]).collect();
        let found = answers::ask(&asked, max_length, &mut session, context)?;
        unanswered.iter().zip(found).for_each(|(at, of_row)| answers[*at] = Some(of_row));
    }
    let mut answers = answers.into_iter().flatten();
    let of_tasks = prepared.iter().map(|of| answers.by_ref().take(of.samples.len()).collect()).collect();
    outcome::finish(&prepared, &groups, of_tasks, &others, &contamination, context)?;
    context.offer(&family, "metrics", earlier::pieces(&rows))?;
    journal::forget(context.working());
    forget_working_files(context.working())
}
