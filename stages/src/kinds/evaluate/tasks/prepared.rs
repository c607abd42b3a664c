//! Tasks with their rows as requests.

use std::path::Path;
use std::sync::Arc;

use engine::context::StageContext;
use engine::error::{Cause, StageError};

use super::parameters::TaskChoice;
use super::rows::{Granted, fetched};
use crate::data::prompt::ChatTemplate;
use crate::tasks::file::{Group, Task, TaskFile};
use crate::tasks::request::{Asking, Sample};
use crate::tasks::shipped;

/// A task with its rows as requests.
pub(in crate::kinds) struct Prepared {
    pub task: Arc<Task>,
    pub num_fewshot: usize,
    pub samples: Vec<Sample>,
    /// Rows that it has.
    pub original: usize,
}

/// Reads the tasks that a stage names and makes requests of their rows, of the first `limit` each; with the groups that
/// they belong to; `chat_template` is what they are rendered by where that is asked for. Rows that were fetched from
/// the Hub stay in the working folder until [`crate::hub::forget_working_files`].
///
/// # Errors
/// Fails with the file, the row and the key at fault.
pub(in crate::kinds) fn prepare(
    params: &TaskChoice,
    limit: Option<u64>,
    chat_template: Option<&ChatTemplate>,
    context: &mut StageContext,
) -> Result<(Vec<Prepared>, Vec<Group>), StageError> {
    let on_hub = fetched(params, context)?;
    let granted = Granted::of(params, &on_hub, context);
    let Chosen { tasks, groups } = chosen(params, &granted)?;
    let prepared = tasks.into_iter().map(|task| with_requests(params, limit, task, &granted, chat_template));
    Ok((prepared.collect::<Result<_, _>>()?, groups))
}

/// Tasks, and the groups that they belong to.
#[derive(Default)]
struct Chosen {
    tasks: Vec<Task>,
    groups: Vec<Group>,
}

impl Chosen {
    fn add(
        &mut self,
        name: &str,
        file: TaskFile,
        find: &dyn Fn(&str) -> Result<TaskFile, StageError>,
    ) -> Result<(), StageError> {
        match file {
            TaskFile::Task(task) => match self.tasks.iter().find(|known| known.name == task.name) {
                Some(known) if known.file != task.file => return Err(same_name(&known.file, &task)),
                // It is named twice, by itself and by a group.
                Some(_) => {}
                None => self.tasks.push(*task),
            },
            TaskFile::Group(group) if self.groups.iter().any(|known| known.name == group.name) => {
                let message = format!("the group `{}` is part of itself, or named twice, by `{name}`", group.name);
                return Err(StageError::new(Cause::BadParameters, message));
            }
            TaskFile::Group(group) => {
                let members = group.tasks.clone();
                self.groups.push(group);
                for member in members {
                    self.add(&member, find(&member)?, find)?;
                }
            }
        }
        Ok(())
    }
}

fn same_name(file: &Path, task: &Task) -> StageError {
    let (one, other) = (file.display(), task.file.display());
    let message = format!("two tasks are called `{}`: of `{one}` and of `{other}`", task.name);
    StageError::new(Cause::BadParameters, message).with_help("give one of them another name under `task`")
}

fn chosen(params: &TaskChoice, granted: &Granted<'_>) -> Result<Chosen, StageError> {
    let read = |path: &Path| -> Result<TaskFile, StageError> {
        let (file, read) = TaskFile::read_with_includes(path)?;
        read.iter().try_for_each(|included| granted.check(path, included))?;
        Ok(file)
    };
    // What a group names: a task of the program, or a file of that name beside the others.
    let find = |name: &str| -> Result<TaskFile, StageError> {
        if let Some(definition) = shipped::definition(name) {
            return Ok(TaskFile::shipped(name, &definition)?);
        }
        let is_meant = |path: &Path| {
            let extension = path.extension().and_then(|extension| extension.to_str());
            path.file_stem().is_some_and(|stem| stem == name) && matches!(extension, Some("yaml" | "yml"))
        };
        let file = granted.files.iter().find(|grant| is_meant(&grant.path));
        let file = file.ok_or_else(|| {
            StageError::new(Cause::BadParameters, format!("there is no task `{name}`, which a group names"))
                .with_help("name its file in `tasks`, or have it in the folder of `task_data`")
        })?;
        read(&file.path)
    };
    let mut chosen = Chosen::default();
    for name in params.chosen() {
        let file = match name.is_file() {
            false => find(name.text())?,
            true => match granted.context.files(&name.role()) {
                [file] => read(&file.path.clone())?,
                _ => return Err(StageError::new(Cause::BadParameters, format!("`{}` is no file", name.text()))),
            },
        };
        chosen.add(name.text(), file, &find)?;
    }
    Ok(chosen)
}

/// Makes requests of the rows of a task.
fn with_requests(
    params: &TaskChoice,
    limit: Option<u64>,
    task: Task,
    granted: &Granted<'_>,
    chat_template: Option<&ChatTemplate>,
) -> Result<Prepared, StageError> {
    let split = task.evaluated_split().unwrap_or_default().to_owned();
    let mut rows = granted.rows(&task, &split)?;
    let original = rows.len();
    if original == 0 {
        return Err(StageError::bad_data(format!("the split `{split}` of the task `{}` has no rows", task.name)));
    }
    rows.truncate(limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)));
    let num_fewshot = task.shots(params.num_fewshot);
    let shown = match task.shown_split().filter(|_| num_fewshot > 0) {
        Some(split) => granted.rows(&task, split)?,
        None => Vec::new(),
    };
    let asking = Asking { task: &task, options: params.options(), chat_template, num_fewshot: Some(num_fewshot) };
    let samples = asking.samples(&rows, &shown)?;
    Ok(Prepared { task: Arc::new(task), num_fewshot, samples, original })
}
