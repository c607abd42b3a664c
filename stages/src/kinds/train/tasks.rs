//! Evaluation tasks while a model trains: when it is asked them, and their figures.
//!
//! Nothing follows from them: rank 0 asks alone, the others wait for it at the next exchange, and what is trained is
//! the same bits as without.

use std::collections::BTreeMap;
use std::path::Path;

use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::local_files::LocalFiles;
use engine::parameter::{Input, Parameters};

use super::learner::Learner;
use super::order::Division;
use super::validation::is_due;
use crate::compute::inference::{positions, score_continuations};
use crate::data::artifact::Tokenizer as TokenizerArtifact;
use crate::data::tokenizer::Tokenizer;
use crate::kinds::evaluate::tasks::{
    Prepared, RowRequests, TaskChoice, loglikelihoods, of_groups, prepare, requests_of_rows,
};
use crate::tasks::TaskError;
use crate::tasks::file::{OutputType, Task, TaskFile};
use crate::tasks::group::Group;
use crate::tasks::results::{Answer, Results};

/// Evaluation tasks that the model is asked while it trains.
#[derive(Parameters, Debug)]
pub struct ValidationTasks {
    /// Which ones.
    #[semantic(flatten)]
    pub choice: TaskChoice,
    /// Only the first rows of each task, up to this number.
    #[semantic(range = 1..)]
    pub limit: Option<u64>,
    /// Optimizer steps between two evaluations; default: at the end of each epoch.
    #[semantic(range = 1..)]
    pub every_steps: Option<u64>,
    /// The tokenizer of `data`; default: the model's own.
    #[semantic]
    pub tokenizer: Option<Input<TokenizerArtifact>>,
}

/// A task for which text is generated, which takes a model that does nothing else.
const GENERATES: &str = "generates text, and a model in training only scores what it is given";

impl ValidationTasks {
    /// What is wrong with the values taken together.
    pub(super) fn problems(&self, span: Span) -> Vec<Problem> {
        let mut problems = self.choice.problems("validation_tasks.", span);
        if self.choice.tasks.is_none() {
            let message = "`validation_tasks` names no `tasks`";
            let problem = Problem::error("missing-key", span, message, "in this stage").at("validation_tasks");
            problems.push(problem.with_help("name some, as in `validation_tasks: { tasks: [arc_easy], limit: 100 }`"));
        }
        let shipped = self.choice.shipped();
        let found = shipped.iter().find_map(|task| cannot_be_asked(task, span));
        problems.extend(found.map(|problem| problem.at("validation_tasks.tasks")));
        problems
    }

    /// What is wrong with the task files that are here.
    pub(super) fn problems_of_files(&self, files: &LocalFiles) -> Vec<Problem> {
        let (found, mut problems) = self.choice.local(files);
        problems.extend(found.iter().filter_map(|(span, file)| match file {
            TaskFile::Task(task) => cannot_be_asked(task, *span),
            TaskFile::Group(_) => None,
        }));
        problems
    }
}

fn cannot_be_asked(task: &Task, span: Span) -> Option<Problem> {
    (task.output_type == OutputType::GenerateUntil).then(|| {
        let message = format!("the task `{}` {GENERATES}", task.name);
        Problem::error("bad-value", span, message, "in this stage")
            .with_help("name it in a stage with `uses: evaluate` that follows")
    })
}

/// The tasks, ready to be asked.
pub(super) struct TaskValidator {
    prepared: Vec<Prepared>,
    groups: Vec<Group>,
    rows: Vec<RowRequests>,
    /// Tokens that the model reads.
    max_length: usize,
    every: Option<u64>,
}

impl TaskValidator {
    /// Reads them, for the model at `model`.
    ///
    /// # Errors
    /// Fails with the file, the row and the key at fault, and where a task generates text.
    pub(super) fn open(params: &ValidationTasks, model: &Path, context: &mut StageContext) -> Result<Self, StageError> {
        let tokenizer = match &params.tokenizer {
            Some(tokenizer) => Tokenizer::from_folder(&context.open(tokenizer)?.folder)?,
            None => Tokenizer::from_folder(model)?,
        };
        let template = tokenizer.chat_templates().map(|templates| templates.without_tools());
        let (prepared, groups) = prepare(&params.choice, params.limit, template, context)?;
        if let Some(of) = prepared.iter().find(|of| of.task.output_type == OutputType::GenerateUntil) {
            let message = format!("`{}` {GENERATES}", of.task.name);
            return Err(StageError::from(TaskError::of(&of.task.file, "output_type", message))
                .with_help("name it in a stage with `uses: evaluate` that follows"));
        }
        let max_length = positions(model)?;
        let rows = requests_of_rows(&prepared, &tokenizer, max_length)?;
        Ok(Self { prepared, groups, rows, max_length, every: params.every_steps })
    }

    /// Whether they are due once so many steps are done: before the first one, too.
    pub(super) fn is_due(&self, steps: u64, division: &Division) -> bool {
        is_due(self.every, steps, division)
    }

    /// The figures of tasks and groups, as `evaluate` has them among its facts: `arc_easy.acc,none`.
    ///
    /// # Errors
    /// Fails where a log-likelihood is no number, or the device does, and as cancelled where the user wants to stop.
    pub(super) fn measure(
        &self,
        learner: &mut dyn Learner,
        context: &mut StageContext,
    ) -> Result<BTreeMap<String, f64>, StageError> {
        let rows: Vec<&RowRequests> = self.rows.iter().collect();
        let answers = loglikelihoods(&rows, self.max_length, |contexts| {
            score_continuations(&mut |some| learner.score_continuations(some), contexts, &mut |_, _| {}, context)
        })?;
        let mut answers = answers.into_iter();
        let mut results: BTreeMap<&str, Results> = BTreeMap::new();
        for Prepared { task, samples, .. } in &self.prepared {
            let of_task: Vec<Vec<Answer>> = answers.by_ref().take(samples.len()).collect();
            // Without draws of a bootstrap: a curve shows no standard errors.
            results.insert(&task.name, task.results(samples, &of_task, 0)?);
        }
        let of_groups = of_groups(&self.groups, &results);
        let all = results
            .iter()
            .map(|(name, found)| (*name, found))
            .chain(of_groups.iter().map(|(group, found)| (group.name.as_str(), found)));
        let figures = |(name, found): (&str, &Results)| -> Vec<(String, f64)> {
            found.figures.iter().map(|(key, figure)| (format!("{name}.{key}"), figure.value)).collect()
        };
        Ok(all.flat_map(figures).collect())
    }
}
