//! A dataset on the Hub: which of its files are which split, and fetching them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::stage::PinRequest;
use engine::suggest;

use super::source::{Format, SourceFile};
use super::{DatasetParams, LOCAL_SPLIT};
use crate::hub::{Hub, Progress, RemoteFile, Repository, RepositoryKind};

/// Where the Hub keeps its own conversion of a dataset to Parquet.
const CONVERTED: &str = "refs/convert/parquet";

/// The commit of a dataset. Datasets that are made by a script have no data files on `main`; the Hub's conversion of them is
/// taken instead.
pub(super) fn pin(request: &PinRequest) -> Result<String, StageError> {
    let repository = Repository::parse(RepositoryKind::Dataset, &request.name)
        .map_err(|error| StageError::new(Cause::BadParameters, error.to_string()))?;
    let hub = Hub::from_environment()?;
    let commit = hub.resolve_revision(&repository, &request.revision)?;
    if request.revision != "main" || hub.list_files(&repository.at(&commit))?.iter().any(is_data) {
        return Ok(commit);
    }
    // Where there is no conversion either, the run says what is missing.
    Ok(hub.resolve_revision(&repository, CONVERTED).unwrap_or(commit))
}

fn is_data(file: &RemoteFile) -> bool {
    let name = file.path.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    let describes = ["readme.md", "license.txt", "license.md", "dataset_infos.json", "requirements.txt"];
    !name.starts_with('.') && !describes.contains(&name.as_str()) && Format::of(Path::new(&name)).is_some()
}

/// Fetches the files of the splits asked for.
pub(super) fn fetch(
    repository: &Repository,
    params: &DatasetParams,
    context: &mut StageContext,
) -> Result<BTreeMap<String, Vec<SourceFile>>, StageError> {
    let request = params.pin_request().expect("a Hub dataset has a pin");
    let pin = format!("{}:{}@{}", request.kind, request.name, request.revision);
    let commit = context.pin(&pin).map(str::to_owned);
    let commit = commit.ok_or_else(|| StageError::internal(format!("the job does not say which commit `{pin}` is")))?;
    let snapshot = repository.at(&commit);
    let hub = Hub::from_environment()?;
    let listed: Vec<RemoteFile> = hub.list_files(&snapshot)?.into_iter().filter(is_data).collect();
    let paths: Vec<&str> = listed.iter().map(|file| file.path.as_str()).collect();
    let splits = choose(&paths, params.config.as_deref(), &params.split.names())?;

    let wanted: Vec<RemoteFile> =
        listed.iter().filter(|file| splits.values().any(|paths| paths.contains(&file.path))).cloned().collect();
    let working = context.working().to_owned();
    let note = format!("{} files of {}", wanted.len(), repository.name());
    let mut observe = |progress: Progress| {
        context.progress("bytes", progress.done, Some(progress.total), Some(note.clone()));
        if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let folder = hub.download(&snapshot, &wanted, &working, &mut observe)?;
    let source_file = |path: &String| {
        let format = Format::of(Path::new(path)).expect("a data file has a form that can be read");
        SourceFile { path: folder.join(path), name: path.clone(), format }
    };
    Ok(splits.into_iter().map(|(name, paths)| (name, paths.iter().map(source_file).collect())).collect())
}

/// The files of each split. A file belongs to a split that its path names (`xsum/train/0000.parquet`,
/// `data/train-00000-of-00002.parquet`); where no path names any, all files are `train`.
fn choose(paths: &[&str], config: Option<&str>, names: &[&str]) -> Result<BTreeMap<String, Vec<String>>, StageError> {
    let mut paths = paths.to_vec();
    // Parquet is the Hub's own form; where it is there, other files are sources of it.
    if paths.iter().any(|path| path.ends_with(".parquet")) {
        paths.retain(|path| path.ends_with(".parquet"));
    }
    paths.sort_unstable();
    let paths = of_config(&paths, config)?;
    let known: BTreeSet<&str> = paths
        .iter()
        .flat_map(|path| words(path))
        .filter(|word| SPLITS.contains(word) || names.contains(word))
        .collect();
    let mut splits = BTreeMap::new();
    for name in names {
        let mut files: Vec<String> =
            paths.iter().filter(|path| words(path).any(|word| word == *name)).map(|path| (*path).to_owned()).collect();
        if known.is_empty() && *name == LOCAL_SPLIT {
            files = paths.iter().map(|path| (*path).to_owned()).collect();
        }
        if files.is_empty() {
            let help = suggest::help(name, "split", &known);
            return Err(StageError {
                help,
                ..StageError::bad_data(format!("the dataset has no files of a split `{name}`"))
            });
        }
        splits.insert((*name).to_owned(), files);
    }
    Ok(splits)
}

const SPLITS: &[&str] = &["train", "test", "validation", "valid", "dev", "eval"];

/// The words of a path that can name a split.
fn words(path: &str) -> impl Iterator<Item = &str> {
    path.split(['/', '-', '.', '_']).filter(|word| !word.is_empty())
}

/// The files of a configuration: those in its folder. Without one, the only folder, or `default`.
fn of_config<'a>(paths: &[&'a str], config: Option<&str>) -> Result<Vec<&'a str>, StageError> {
    let folder = |path: &'a str| path.split_once('/').map_or("", |(folder, _)| folder);
    let folders: BTreeSet<&str> = paths.iter().map(|path| folder(path)).filter(|name| !SPLITS.contains(name)).collect();
    let config = match config {
        Some(config) => config,
        None if folders.len() <= 1 => return Ok(paths.to_vec()),
        None if folders.contains("default") => "default",
        None => {
            let names: Vec<_> = folders.iter().map(|name| format!("`{name}`")).collect();
            return Err(StageError::bad_data(format!("the dataset has several configurations: {}", names.join(", ")))
                .with_help("choose one with `config:`"));
        }
    };
    let chosen: Vec<&str> = paths.iter().copied().filter(|path| path.split('/').any(|part| part == config)).collect();
    if chosen.is_empty() {
        let help = suggest::help(config, "configuration", &folders);
        return Err(StageError {
            help,
            ..StageError::bad_data(format!("the dataset has no configuration `{config}`"))
        });
    }
    Ok(chosen)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_hubs_conversion_is_understood() {
        let paths = ["default/train/0000.parquet", "default/train/0001.parquet", "default/test/0000.parquet"];
        let splits = choose(&paths, None, &["train"]).unwrap();
        assert_eq!(splits["train"], ["default/train/0000.parquet", "default/train/0001.parquet"]);
        assert!(choose(&paths, None, &["validation"]).unwrap_err().message.contains("validation"));
    }

    #[test]
    fn numbered_files_are_understood() {
        let paths = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "data.csv"];
        let splits = choose(&paths, None, &["test", "train"]).unwrap();
        assert_eq!(splits["test"], ["data/test-00000-of-00001.parquet"]);
        assert_eq!(splits["train"], ["data/train-00000-of-00001.parquet"]);
    }

    #[test]
    fn files_without_a_split_in_their_names_are_all_train() {
        let splits = choose(&["b.jsonl", "a.jsonl"], None, &["train"]).unwrap();
        assert_eq!(splits["train"], ["a.jsonl", "b.jsonl"]);
    }

    #[test]
    fn one_of_several_configurations_must_be_chosen() {
        let paths = ["main/train-0.parquet", "socratic/train-0.parquet"];
        let error = choose(&paths, None, &["train"]).unwrap_err();
        assert!(error.message.contains("`main`, `socratic`"), "{}", error.message);
        assert_eq!(choose(&paths, Some("main"), &["train"]).unwrap()["train"], ["main/train-0.parquet"]);
        assert!(choose(&paths, Some("mian"), &["train"]).is_err());
    }
}
