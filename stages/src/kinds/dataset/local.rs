//! Which of the files that a folder or a pattern gave rows are read from, and in which order.
//!
//! A folder of `Dataset.save_to_disk` of Hugging Face datasets has its rows in Arrow files. `state.json` there lists
//! them, and nothing else that ends in `.arrow` is part of it, such as what `map` has cached since.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use engine::error::{Cause, StageError};
use engine::local_files::MOST_READ;
use serde_json::Value;

use super::form::{Format, SourceFile};
use crate::compute::checkpoint;

/// Lists the Arrow files of a saved dataset.
const STATE: &str = "state.json";

/// Describes the dataset of the Arrow files beside it.
const INFO: &str = "dataset_info.json";

/// Describes the folders beside it, each with a split.
const SPLITS: &str = "dataset_dict.json";

/// The files of rows among those of one source.
///
/// # Errors
/// Fails where they are several splits of a saved dataset, where one of a saved dataset is missing, and where one is no
/// more than a git-LFS pointer.
pub(super) fn files_of_rows(found: Vec<SourceFile>) -> Result<Vec<SourceFile>, StageError> {
    refuse_splits(&found)?;
    let files = without_descriptions(found)?;
    for file in &files {
        // What cannot be read is reported by who reads it.
        checkpoint::check_file(&file.path, &file.name)
            .or_else(|error| if error.cause == Cause::BadData { Err(error) } else { Ok(()) })?;
    }
    Ok(files)
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

fn is_called(file: &SourceFile, name: &str) -> bool {
    file.path.file_name().is_some_and(|found| found == name)
}

fn is_arrow(file: &SourceFile) -> bool {
    file.form.format == Format::Arrow
}

/// Refuses a saved `DatasetDict`: local files are one split.
fn refuse_splits(found: &[SourceFile]) -> Result<(), StageError> {
    let Some(described) = found.iter().find(|file| is_called(file, SPLITS)) else { return Ok(()) };
    let below = |file: &SourceFile| {
        let split = folder(&file.path);
        let name = split.file_name()?.to_str()?;
        (is_arrow(file) && folder(split) == folder(&described.path)).then(|| name.to_owned())
    };
    let splits: BTreeSet<String> = found.iter().filter_map(below).collect();
    let Some(first) = splits.first() else { return Ok(()) };
    let place = described.name.strip_suffix(SPLITS).unwrap_or_default();
    // Else it would be a dataset of the Hub.
    let place = if place.starts_with(['.', '/']) { place.to_owned() } else { format!("./{place}") };
    let names: Vec<String> = splits.iter().map(|name| format!("`{name}`")).collect();
    let message = format!("`{}` describes several splits, each in its folder: {}", described.name, names.join(", "));
    let named = splits.iter().find(|name| *name == super::LOCAL_SPLIT).unwrap_or(first);
    Err(StageError::bad_data(message).with_help(format!("name the folder of one of them: `source: {place}{named}`")))
}

/// Leaves out what describes the Arrow files beside it, and of a saved dataset all but those that it lists, in its
/// order.
fn without_descriptions(found: Vec<SourceFile>) -> Result<Vec<SourceFile>, StageError> {
    let of_arrow: BTreeSet<PathBuf> =
        found.iter().filter(|file| is_arrow(file)).map(|file| folder(&file.path).to_owned()).collect();
    let mut saved = BTreeMap::new();
    for state in found.iter().filter(|file| is_called(file, STATE)) {
        let place = folder(&state.path);
        if let Some(listed) = listed(&state.path).filter(|_| of_arrow.contains(place)) {
            saved.insert(place.to_owned(), (&state.name, listed));
        }
    }
    let describes =
        |file: &SourceFile| (is_called(file, STATE) || is_called(file, INFO)) && of_arrow.contains(folder(&file.path));
    let by_path: BTreeMap<&Path, &SourceFile> = found.iter().map(|file| (file.path.as_path(), file)).collect();
    let mut files = Vec::new();
    for file in &found {
        let place = folder(&file.path);
        match saved.get_mut(place) {
            // With the first file of the folder all that are listed come, and with the others none.
            Some((state, listed)) => {
                for name in std::mem::take(listed) {
                    let path = place.join(&name);
                    let missing = || StageError::bad_data(format!("`{state}` lists `{name}`, which is not there"));
                    files.push((*by_path.get(path.as_path()).ok_or_else(missing)?).clone());
                }
            }
            None if describes(file) => {}
            None => files.push(file.clone()),
        }
    }
    Ok(files)
}

/// The Arrow files that the state of a saved dataset lists, where it does.
fn listed(state: &Path) -> Option<Vec<String>> {
    let mut text = Vec::new();
    cache::regular::open(state).ok()?.take(MOST_READ).read_to_end(&mut text).ok()?;
    let state: Value = serde_json::from_slice(&text).ok()?;
    let files = state.get("_data_files")?.as_array()?;
    files.iter().map(|file| Some(file.get("filename")?.as_str()?.to_owned())).collect()
}
