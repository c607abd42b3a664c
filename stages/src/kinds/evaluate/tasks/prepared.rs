//! Tasks with their rows as requests.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::context::StageContext;
use engine::error::{Cause, StageError};

use super::parameters::TaskChoice;
use super::rows::{Granted, fetched};
use crate::data::prompt::ChatTemplate;
use crate::tasks::TaskError;
use crate::tasks::file::{Task, TaskFile};
use crate::tasks::functions::Python;
use crate::tasks::group::{Group, Member, Overrides};
use crate::tasks::processor::RowProcessor;
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
/// they belong to; `chat_template` is what they, which have no tools, are rendered by where that is asked for. Rows
/// that were fetched from the Hub stay in the working folder until [`crate::hub::forget_working_files`].
///
/// # Errors
/// Fails with the file, the row and the key at fault.
pub(in crate::kinds) fn prepare(
    params: &TaskChoice,
    limit: Option<u64>,
    chat_template: Option<&ChatTemplate>,
    context: &mut StageContext,
) -> Result<(Vec<Prepared>, Vec<Group>), StageError> {
    let python = params.python();
    let nothing = BTreeMap::new();
    let Chosen { tasks, groups } = chosen(params, &Granted::of(params, &nothing, context), python.as_ref())?;
    let mut has_functions = false;
    for task in &tasks {
        for function in task.functions() {
            function.load().map_err(|message| TaskError::in_file(&task.file, message))?;
            has_functions = true;
        }
    }
    let on_hub = fetched(params, &tasks, context)?;
    let granted = Granted::of(params, &on_hub, context);
    let prepared = tasks.into_iter().map(|task| with_requests(params, limit, task, &granted, chat_template));
    let prepared: Vec<Prepared> = prepared.collect::<Result<_, _>>()?;
    if let Some(python) = python.filter(|_| has_functions) {
        let versions = python.versions().map_err(|message| StageError::new(Cause::Machine, message))?;
        context.record("task_functions", versions);
    }
    Ok((prepared, groups))
}

/// Tasks, and the groups that they belong to.
#[derive(Default)]
struct Chosen {
    tasks: Vec<Task>,
    groups: Vec<Group>,
}

/// What a group names.
enum Found {
    File(TaskFile),
    /// The tasks that have a tag.
    Tag(BTreeSet<String>),
}

type Find<'f> = &'f dyn Fn(&str, &Overrides) -> Result<Found, StageError>;

impl Chosen {
    /// Adds a task, or a group with what it consists of; what a group around it sets holds within.
    fn add(&mut self, file: TaskFile, overrides: &Overrides, find: Find<'_>) -> Result<(), StageError> {
        match file {
            TaskFile::Task(task) => match self.tasks.iter().find(|known| known.name == task.name) {
                Some(known) if known.file != task.file || known.overrides.values != task.overrides.values => {
                    return Err(same_name(known, &task));
                }
                // It is named twice, by itself and by a group.
                Some(_) => {}
                None => self.tasks.push(*task),
            },
            TaskFile::Group(group) if self.groups.iter().any(|known| known.name == group.name) => {
                let message = format!("the group `{}` is part of itself, or named twice", group.name);
                return Err(StageError::new(Cause::BadParameters, message));
            }
            TaskFile::Group(group) => {
                let members = group.members.clone();
                let place = self.groups.len();
                self.groups.push(group);
                self.groups[place].members = self.members(members, overrides, find)?;
            }
        }
        Ok(())
    }

    /// Adds what a group consists of, and gives it with its names alone: for a tag those of its tasks.
    fn members(&mut self, members: Vec<Member>, outer: &Overrides, find: Find<'_>) -> Result<Vec<Member>, StageError> {
        let mut resolved = Vec::with_capacity(members.len());
        for member in members {
            let named = |name: &str| Member::Named { name: name.to_owned(), overrides: Overrides::default() };
            let (name, overrides) = match member {
                Member::Group(group) => {
                    resolved.push(named(&group.name));
                    self.add(TaskFile::Group(group), outer, find)?;
                    continue;
                }
                Member::Named { name, overrides } => (name, overrides.within(outer)),
            };
            match find(&name, &overrides)? {
                Found::File(file) => {
                    resolved.push(named(file.name()));
                    self.add(file, &overrides, find)?;
                }
                Found::Tag(tasks) => {
                    let tasks = tasks.into_iter().map(|name| Member::Named { name, overrides: overrides.clone() });
                    resolved.extend(self.members(tasks.collect(), outer, find)?);
                }
            }
        }
        Ok(resolved)
    }
}

fn same_name(known: &Task, task: &Task) -> StageError {
    let (one, other) = (known.file.display(), task.file.display());
    if known.file == task.file {
        let message = format!("the task `{}` of `{one}` is named twice, with other keys", task.name);
        return StageError::new(Cause::BadParameters, message)
            .with_help("name it once, or evaluate it in another stage");
    }
    let message = format!("two tasks are called `{}`: of `{one}` and of `{other}`", task.name);
    StageError::new(Cause::BadParameters, message).with_help("give one of them another name under `task`")
}

/// The files of tasks and groups by their names, and the names of tasks by their tags.
#[derive(Default)]
struct Registry {
    files: BTreeMap<String, PathBuf>,
    tags: BTreeMap<String, BTreeSet<String>>,
}

impl Registry {
    fn of(granted: &Granted<'_>) -> Self {
        let mut registry = Self::default();
        for path in granted.files.iter().map(|grant| &grant.path).filter(|path| is_yaml(path)) {
            let Some((name, tags)) = TaskFile::name_and_tags(path) else { continue };
            for tag in tags {
                registry.tags.entry(tag).or_default().insert(name.clone());
            }
            registry.files.entry(name).or_insert_with(|| path.clone());
        }
        registry
    }
}

fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

fn chosen(params: &TaskChoice, granted: &Granted<'_>, python: Option<&Arc<Python>>) -> Result<Chosen, StageError> {
    let read = |path: &Path, overrides: &Overrides| -> Result<TaskFile, StageError> {
        let (file, read) = TaskFile::read_with_includes(path, overrides, python)?;
        read.iter().try_for_each(|included| granted.check(path, included))?;
        Ok(file)
    };
    let registry = OnceCell::new();
    // What a group names: a task of the program; a task or group of the files beside, or a file of that name; a tag.
    let find = |name: &str, overrides: &Overrides| -> Result<Found, StageError> {
        if let Some(definition) = shipped::definition(name) {
            return Ok(Found::File(TaskFile::shipped(name, &definition, overrides)?));
        }
        let registry = registry.get_or_init(|| Registry::of(granted));
        let of_stem = |path: &&PathBuf| is_yaml(path) && path.file_stem().is_some_and(|stem| stem == name);
        let by_stem = || granted.files.iter().map(|grant| &grant.path).find(of_stem);
        match (registry.files.get(name).or_else(by_stem), registry.tags.get(name)) {
            (Some(path), _) => Ok(Found::File(read(path, overrides)?)),
            (None, Some(tasks)) => Ok(Found::Tag(tasks.clone())),
            (None, None) => {
                let message = format!("there is no task, group or tag `{name}`, which a group names");
                let help = "name its file in `tasks`, or have it in the folder of `task_data`";
                Err(StageError::new(Cause::BadParameters, message).with_help(help))
            }
        }
    };
    let (mut chosen, none) = (Chosen::default(), Overrides::default());
    for name in params.chosen() {
        let file = match (name.is_file(), shipped::definition(name.text())) {
            (false, Some(definition)) => TaskFile::shipped(name.text(), &definition, &none)?,
            _ => match granted.context.files(&name.role()) {
                [file] => read(&file.path.clone(), &none)?,
                _ => return Err(StageError::new(Cause::BadParameters, format!("`{}` is no file", name.text()))),
            },
        };
        chosen.add(file, &none, &find)?;
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
    let num_fewshot = task.shots(params.num_fewshot);
    let shown_split = task.shown_split().filter(|_| num_fewshot > 0);
    // A function of rows may draw random numbers: the harness has it make those that are shown first, and the rows of a
    // split once.
    if let Some(function) = task.process_docs.as_ref().and_then(RowProcessor::function) {
        function.seed().map_err(|message| TaskError::key(&task.file, "process_docs", message))?;
    }
    let shown = match shown_split.filter(|shown| *shown != split) {
        Some(shown) => granted.rows(&task, shown)?,
        None => Vec::new(),
    };
    let mut rows = granted.rows(&task, &split)?;
    let shown = if shown_split == Some(&*split) { rows.clone() } else { shown };
    let original = rows.len();
    if original == 0 {
        return Err(StageError::bad_data(format!("the split `{split}` of the task `{}` has no rows", task.name)));
    }
    rows.truncate(limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)));
    let asking = Asking { task: &task, options: params.options(), chat_template, num_fewshot: Some(num_fewshot) };
    let samples = asking.samples(&rows, &shown)?;
    Ok(Prepared { task: Arc::new(task), num_fewshot, samples, original })
}
