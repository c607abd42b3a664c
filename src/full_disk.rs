//! What to do about a disk that is full, wherever in an error that is said.

use std::error::Error;
use std::io;
use std::iter;
use std::path::Path;

use cache::StoreError;
use cache::disk::Disk;
use cache::remote::RemoteError;
use engine::explain::ExplainError;
use engine::history::ArchiveError;
use engine::home::{FullDisk, HomeError, advice_when_full, is_in_a_home};
use engine::run::RunError;

/// Help for an error beneath which lies a full disk.
pub(crate) fn help(error: &(dyn Error + 'static)) -> Option<String> {
    advice(error, is_in_a_home)
}

/// The same where it is known which store is worked with.
pub(crate) fn help_beside(error: &(dyn Error + 'static), store: &Path) -> Option<String> {
    advice(error, |path| Disk::holds_both(path, store))
}

/// Help for an error of printing.
pub(crate) fn help_to_print(error: &io::Error) -> Option<String> {
    is_full(error).then(|| "standard output could not be written: its disk is full".to_owned())
}

fn advice(error: &(dyn Error + 'static), is_of_store: impl Fn(&Path) -> bool) -> Option<String> {
    let chain = || iter::successors(Some(error), |error| (*error).source());
    if !chain().any(|error| error.downcast_ref::<io::Error>().is_some_and(is_full)) {
        return None;
    }
    let told: Vec<String> = chain().map(|error| error.to_string()).collect();
    let Some(path) = chain().find_map(path_of) else {
        return Some(advice_when_full(Path::new("."), FullDisk::Unknown, &told));
    };
    // One that is just being made is not known as a home yet.
    let full = if chain().any(is_about_a_home) || is_of_store(path) { FullDisk::OfStore } else { FullDisk::Another };
    Some(advice_when_full(path, full, &told))
}

/// The path that an error is about.
fn path_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Path> {
    if let Some(HomeError::Prepare { path, .. }) = error.downcast_ref() {
        return Some(path);
    }
    if let Some(RunError::Machine { path, .. }) = error.downcast_ref() {
        return Some(path);
    }
    if let Some(ArchiveError::Write { path, .. }) = error.downcast_ref() {
        return Some(path);
    }
    match of_store(error)? {
        StoreError::DiskFull { path, .. } | StoreError::Io { path, .. } => Some(path),
        StoreError::Rename { to, .. } => Some(to),
        StoreError::NotAFile { .. }
        | StoreError::BadName { .. }
        | StoreError::ChangedWhileStoring { .. }
        | StoreError::CorruptObject { .. }
        | StoreError::MissingObject { .. }
        | StoreError::Outside { .. }
        | StoreError::CorruptTree { .. }
        | StoreError::MissingTree { .. } => None,
    }
}

/// The failure of the store that an error is. One that passes it on as its own has the source of that, so the chain
/// goes past it.
fn of_store<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a StoreError> {
    if let Some(RunError::Store(passed_on)) = error.downcast_ref() {
        return Some(passed_on);
    }
    if let Some(ExplainError::Store(passed_on)) = error.downcast_ref() {
        return Some(passed_on);
    }
    if let Some(RemoteError::Store(passed_on)) = error.downcast_ref() {
        return Some(passed_on);
    }
    error.downcast_ref()
}

fn is_about_a_home(error: &(dyn Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(HomeError::Prepare { .. }))
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use engine::lock_file::LockError;

    use super::*;

    #[test]
    fn garbage_collection_is_advised_for_the_disk_of_a_store_alone() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let folder = tempfile::tempdir().unwrap();
        let home = engine::home::Home::open(&folder.path().join("p.yaml"), None).unwrap();
        let of = |path: PathBuf| StoreError::DiskFull { action: "write", disk: Disk::of(&path), path, source: full() };
        let inside = help(&of(home.store().join("objects/ab"))).unwrap();
        assert!(inside.contains("`pipeline cache gc` frees space; "), "the error has the room: {inside}");
        let outside = of(folder.path().join("out"));
        assert!(!help(&outside).unwrap().contains("cache gc"), "{outside}");
        assert!(help_beside(&outside, &home.store()).unwrap().contains("cache gc"), "{outside}");
        let prepare = HomeError::Prepare { path: folder.path().join("new"), source: full() };
        let of_home = help(&prepare).unwrap();
        assert!(of_home.contains("cache gc") && of_home.contains(" KiB free)"), "{of_home}");
        assert_eq!(help(&io::Error::from(io::ErrorKind::NotFound)), None);
    }
    #[test]
    fn a_failure_of_the_store_that_another_error_passes_on_keeps_its_path() {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let folder = tempfile::tempdir().unwrap();
        let home = engine::home::Home::open(&folder.path().join("p.yaml"), None).unwrap();
        let to_write = |path: PathBuf| {
            let disk = Disk::of(&path);
            StoreError::DiskFull { action: "write", path, disk, source: full() }
        };
        let to_rename = |to: PathBuf| StoreError::Rename { from: folder.path().join("new"), to, source: full() };
        let makes: [&dyn Fn(PathBuf) -> StoreError; 2] = [&to_write, &to_rename];
        for make in makes {
            let passed_on = |path: &Path| -> [Box<dyn Error>; 5] {
                let make = || make(path.to_owned());
                [
                    Box::new(make()),
                    Box::new(RunError::Store(make())),
                    Box::new(ExplainError::Store(make())),
                    Box::new(RemoteError::Store(make())),
                    Box::new(LockError::Write(make())),
                ]
            };
            for error in passed_on(&home.store().join("objects/ab")) {
                let advice = help(&*error).unwrap();
                assert!(advice.contains("`pipeline cache gc` frees space") && !advice.contains(" if "), "{advice}");
            }
            for error in passed_on(&folder.path().join("out")) {
                let advice = help(&*error).unwrap();
                assert!(advice.starts_with("make room on the disk at `"), "{advice}");
            }
        }
    }

    #[test]
    fn an_error_without_a_path_is_one_of_standard_output_only_where_something_was_printed() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let advice = help(&full).unwrap();
        assert!(advice.contains("`pipeline cache gc` frees space if the disk of the store is full"), "{advice}");
        assert!(!advice.contains("standard output"), "{advice}");
        assert!(help_to_print(&full).unwrap().starts_with("standard output could not be written"));
        assert_eq!(help_to_print(&io::ErrorKind::NotFound.into()), None);
    }
}
