//! What to do about a disk that is full, wherever in an error that is said.

use std::error::Error;
use std::io;
use std::path::Path;

use cache::StoreError;
use engine::home::{HomeError, advice_when_full};
use engine::run::RunError;

/// Help for an error beneath which lies a full disk.
pub(crate) fn help(error: &(dyn Error + 'static)) -> Option<String> {
    let mut path = None;
    let mut next = Some(error);
    while let Some(error) = next {
        path = path.or_else(|| path_of(error));
        if error.downcast_ref::<io::Error>().is_some_and(is_full) {
            return Some(advice_when_full(path.unwrap_or(Path::new("."))));
        }
        next = error.source();
    }
    None
}

/// The path that an error is about.
fn path_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Path> {
    if let Some(HomeError::Prepare { path, .. }) = error.downcast_ref() {
        return Some(path);
    }
    if let Some(RunError::Machine { path, .. }) = error.downcast_ref() {
        return Some(path);
    }
    match error.downcast_ref::<StoreError>() {
        Some(StoreError::DiskFull { path, .. }) => Some(path),
        _ => None,
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
