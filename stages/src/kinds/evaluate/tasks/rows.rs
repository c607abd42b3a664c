//! Where the rows of tasks are: beside task files, in the folder of `task_data`, or on the Hub.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::protocol::FileGrant;

use super::parameters::{DATA, TaskChoice, TaskName};
use crate::kinds::dataset::fetch_from_hub;
use crate::tasks::documents::{self, Document};
use crate::tasks::file::Task;

/// A split of a dataset on the Hub: dataset, configuration, split.
type HubSplit = (String, Option<String>, String);

/// Fetches the rows of those tasks that are on the Hub.
///
/// # Errors
/// Fails where a dataset that is named is of no task, or its rows cannot be had.
pub(super) fn fetched(
    params: &TaskChoice,
    tasks: &[Task],
    context: &mut StageContext,
) -> Result<BTreeMap<HubSplit, Vec<PathBuf>>, StageError> {
    let datasets = params.datasets();
    let mut wanted: BTreeMap<(String, Option<String>), BTreeSet<String>> = BTreeMap::new();
    for task in tasks.iter().filter(|task| task.data_files.is_empty()) {
        let Some(dataset) = task.dataset_path.clone().filter(|name| datasets.contains(name)) else { continue };
        let shows = task.shots(params.num_fewshot) > 0;
        let splits = task.evaluated_split().into_iter().chain(task.shown_split().filter(|_| shows));
        wanted.entry((dataset, task.dataset_name.clone())).or_default().extend(splits.map(str::to_owned));
    }
    if let Some(unread) = params.named_datasets().find(|name| wanted.keys().all(|(dataset, _)| dataset != *name)) {
        let message = format!("`task_datasets` names `{unread}`, which no task reads");
        let help = "it is what a task file has as `dataset_path`";
        return Err(StageError::new(Cause::BadParameters, message).with_help(help));
    }
    let mut found = BTreeMap::new();
    for ((dataset, config), splits) in wanted {
        let splits: Vec<&str> = splits.iter().map(String::as_str).collect();
        let fetched = fetch_from_hub(&params.pin(&dataset), config.as_deref(), &splits, context).map_err(|error| {
            let help = error.help.clone().unwrap_or_default();
            let rows = "rows that are here already are named by `task_data`";
            error.with_help(if help.is_empty() { rows.to_owned() } else { format!("{help}; {rows}") })
        })?;
        for (split, files) in fetched.splits {
            let files = files.into_iter().map(|file| file.path).collect();
            found.insert((dataset.clone(), config.clone(), split), files);
        }
    }
    Ok(found)
}

/// Files that the stage may read: what is not among them is in no key.
pub(super) struct Granted<'c> {
    pub(super) context: &'c StageContext,
    pub(super) files: Vec<FileGrant>,
    on_hub: &'c BTreeMap<HubSplit, Vec<PathBuf>>,
}

impl<'c> Granted<'c> {
    pub(super) fn of(
        params: &TaskChoice,
        on_hub: &'c BTreeMap<HubSplit, Vec<PathBuf>>,
        context: &'c StageContext,
    ) -> Self {
        let roles = params.chosen().map(TaskName::role).chain([DATA.to_owned()]);
        let files = roles.flat_map(|role| context.files(&role).to_vec()).collect();
        Self { context, files, on_hub }
    }

    /// Checks that a file which a task names is one of them, and as it was planned with.
    pub(super) fn check(&self, task: &Path, file: &Path) -> Result<(), StageError> {
        let same = |grant: &&FileGrant| match (grant.path.canonicalize(), file.canonicalize()) {
            (Ok(one), Ok(other)) => one == other,
            _ => grant.path == file,
        };
        let grant = self.files.iter().find(same).ok_or_else(|| {
            let message = format!("`{}` names `{}`, which this stage does not read", task.display(), file.display());
            StageError::new(Cause::BadParameters, message).with_help(
                "`task_data` names the folder with the files of tasks: their content is then part of the key",
            )
        })?;
        self.context.verify(grant)
    }

    /// The files of `task_data` with the rows of a split of a task that comes from a hub.
    fn of_split(&self, task: &Task, split: &str) -> Result<Vec<PathBuf>, StageError> {
        let dataset = task.dataset_path.as_deref().unwrap_or_default();
        if let Some(files) = self.on_hub.get(&(dataset.to_owned(), task.dataset_name.clone(), split.to_owned())) {
            return Ok(files.clone());
        }
        let own = dataset.rsplit('/').next().unwrap_or(dataset);
        let config = task.dataset_name.as_deref();
        let fits = |grant: &&FileGrant| {
            let parts: Vec<&str> = grant.relative.split('/').collect();
            let (name, folders) = parts.split_last().expect("a path has a name");
            let is_of_task = folders.contains(&task.name.as_str())
                || folders.contains(&own) && config.is_none_or(|config| folders.contains(&config));
            part_of_split(name, split).is_some() && is_of_task
        };
        let mut found: Vec<&FileGrant> = self.context.files(DATA).iter().filter(fits).collect();
        found.sort_by(|one, other| one.relative.cmp(&other.relative));
        if found.is_empty() {
            let below = config.map_or_else(|| own.to_owned(), |config| format!("{own}/{config}"));
            let message = format!("there are no rows of the split `{split}` of the task `{}`", task.name);
            let help = format!(
                "its rows are those of the dataset `{dataset}`: have them as `{below}/{split}.jsonl` or `.parquet` in the folder that \
                 `task_data` names, or name the dataset in `task_datasets`, if it is on the Hub"
            );
            return Err(StageError::new(Cause::BadData, message).with_help(help));
        }
        // Several files are one split where they are numbered parts of it; else nobody knows which is meant.
        let is_part = |grant: &&FileGrant| {
            let name = grant.relative.rsplit('/').next().unwrap_or_default();
            part_of_split(name, split) == Some(Part::Numbered)
        };
        if found.len() > 1 && !found.iter().all(is_part) {
            let names: Vec<String> = found.iter().map(|grant| format!("`{}`", grant.relative)).collect();
            let message =
                format!("the split `{split}` of the task `{}` has several files: {}", task.name, names.join(", "));
            return Err(
                StageError::new(Cause::BadData, message).with_help("keep one of them in the folder of `task_data`")
            );
        }
        found.iter().try_for_each(|grant| self.context.verify(grant))?;
        Ok(found.into_iter().map(|grant| grant.path.clone()).collect())
    }

    /// The rows of a split.
    pub(super) fn rows(&self, task: &Task, split: &str) -> Result<Vec<Document>, StageError> {
        if task.data_files.is_empty() {
            return Ok(documents::processed(task, documents::read_files(&self.of_split(task, split)?)?)?);
        }
        let Some(files) = task.data_files.get(split) else {
            return Err(documents::without_split(task, split).into());
        };
        let files: Vec<PathBuf> =
            files.iter().map(|file| self.named_by(task, file)).collect::<Result<_, StageError>>()?;
        Ok(documents::processed(task, documents::read_files(&files)?)?)
    }

    /// A file that a task names: beside the task's, or in the folder of `task_data`.
    fn named_by(&self, task: &Task, file: &Path) -> Result<PathBuf, StageError> {
        let beside = task.file.parent().unwrap_or_else(|| Path::new(".")).join(file);
        let below = || self.context.files(DATA).iter().find(|grant| Path::new(&grant.relative) == file);
        let path = match (beside.is_file(), below()) {
            (false, Some(grant)) => grant.path.clone(),
            _ => beside,
        };
        self.check(&task.file, &path)?;
        Ok(path)
    }
}

/// How a file belongs to a split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// `test.jsonl`: all of it.
    Whole,
    /// `test-00000-of-00002.parquet`: one of its parts, as hubs number them.
    Numbered,
}

/// Whether a file's name says that it holds a split, or a part of one.
fn part_of_split(name: &str, split: &str) -> Option<Part> {
    let rest = name.strip_prefix(split)?;
    let rest = [".jsonl", ".json", ".parquet"].iter().find_map(|extension| rest.strip_suffix(extension))?;
    if rest.is_empty() {
        return Some(Part::Whole);
    }
    let (number, of) = rest.strip_prefix('-')?.split_once("-of-")?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    (is_number(number) && is_number(of)).then_some(Part::Numbered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_is_a_file_or_its_numbered_parts() {
        assert_eq!(part_of_split("test.jsonl", "test"), Some(Part::Whole));
        assert_eq!(part_of_split("test-00000-of-00002.parquet", "test"), Some(Part::Numbered));
        for name in ["test-extra.jsonl", "test2.jsonl", "test.txt", "train.jsonl", "test-1-of-.json", "test-.json"] {
            assert_eq!(part_of_split(name, "test"), None, "{name}");
        }
    }
}
