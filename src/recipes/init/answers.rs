//! Whether there is what an answer names: on this machine, or on a hub, as far as its name tells.

use std::fs;
use std::path::Path;

use stages::hub::{Repository, RepositoryKind};

use crate::import::places::Places;
use crate::render::Failure;
use crate::{terminal, words};

/// Rows that are here, or that may be on a hub. `tells` says where a name is taken for one of a hub.
///
/// # Errors
/// Fails where they are not here, and the name is none of a hub.
pub(super) fn data(name: &str, places: &Places, tells: bool) -> Result<String, Failure> {
    if name.contains(['*', '?', '[']) || places.find(name).is_some() {
        return Ok(name.to_owned());
    }
    let is_of_hub = name.contains('/') && Repository::parse(RepositoryKind::Dataset, name).is_ok();
    let shown = words::visible(name);
    if places.is_path(name) || !is_of_hub {
        let failure = Failure::wrong(format!("there is no file `{shown}`"));
        return Err(failure.with_help("a data set of the Hub is named `owner/name`"));
    }
    if tells {
        terminal::tell_line(format_args!("`{shown}` is no file here, and is taken for a data set of the Hub"));
    }
    Ok(name.to_owned())
}

/// A checkpoint that is here, or a model that may be on a hub. `tells` says where a name without an owner is taken for
/// one of a hub.
///
/// # Errors
/// Fails where it is not here, and the name is none of a hub, and where a folder has no checkpoint.
pub(super) fn model(name: &str, places: &Places, tells: bool) -> Result<String, Failure> {
    let shown = words::visible(name);
    match places.find(name) {
        Some(folder) if folder.is_dir() && !has_checkpoint(&folder) => {
            let failure = Failure::wrong(format!("the folder `{shown}` has no checkpoint"));
            return Err(failure.with_help("one has a `config.json`, or is a `.gguf` file"));
        }
        Some(_) => {}
        None if places.is_path(name) || Repository::parse(RepositoryKind::Model, name).is_err() => {
            let failure = Failure::wrong(format!("there is no folder `{shown}`"));
            return Err(failure.with_help("a model of the Hub is named `owner/name`"));
        }
        None if tells && !name.contains('/') => {
            terminal::tell_line(format_args!("`{shown}` is no folder here, and is taken for a model of the Hub"));
        }
        None => {}
    }
    Ok(name.to_owned())
}

fn has_checkpoint(folder: &Path) -> bool {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.map(|file| file.path()).any(|path| {
        path.file_name().is_some_and(|name| name == "config.json") || path.extension().is_some_and(|ext| ext == "gguf")
    })
}
