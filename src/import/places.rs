//! Where files are: those that the tool's configuration names, as the pipeline file is to name them.
//!
//! Tools look from the folder that they are started in, a pipeline file from its own.

use std::env;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use stages::kinds::dataset::read::{Reading, Wanted};
use stages::kinds::dataset::{Form, SourceFile};

/// Rows of each file that are looked at for what only some of them have.
const ROWS_LOOKED_AT: u64 = 100_000;

#[derive(Debug, Clone)]
pub(crate) struct Places {
    /// The folder that the tool would be started in.
    here: PathBuf,
    /// The folder of the configuration, where something may be that is not here.
    configuration: PathBuf,
    /// The folder of the pipeline file.
    output: PathBuf,
}

impl Places {
    /// `configuration` is the tool's file, `output` the pipeline file.
    pub(crate) fn new(configuration: Option<&Path>, output: Option<&Path>) -> Self {
        let here = env::current_dir().unwrap_or_default();
        let folder =
            |file: Option<&Path>| file.and_then(Path::parent).map_or_else(|| here.clone(), |folder| here.join(folder));
        Self { configuration: folder(configuration), output: folder(output), here }
    }

    /// What a name stands for on this machine, if anything.
    pub(crate) fn find(&self, name: &str) -> Option<PathBuf> {
        let name = match (name.strip_prefix("~/"), env::var_os("HOME")) {
            (Some(rest), Some(home)) => Path::new(&home).join(rest),
            _ => PathBuf::from(name),
        };
        [self.here.join(&name), self.configuration.join(&name)].into_iter().find(|path| path.exists())
    }

    /// Whether a name is meant as a path, and not as one of a hub.
    pub(crate) fn is_path(&self, name: &str) -> bool {
        name.starts_with(['.', '/', '~']) || Form::of(Path::new(name)).is_some() || self.find(name).is_some()
    }

    /// A path as the pipeline file writes it.
    pub(crate) fn written(&self, name: &str) -> String {
        let path = self.find(name).unwrap_or_else(|| self.here.join(name));
        match path.strip_prefix(&self.output) {
            Ok(inside) if !name.starts_with('/') => {
                let inside = inside.strip_prefix(".").unwrap_or(inside);
                format!("./{}", inside.display())
            }
            _ => path.display().to_string(),
        }
    }

    /// The files of rows on this machine that a name stands for: a file, those of a folder or of a glob.
    pub(crate) fn files_of_rows(&self, name: &str) -> Vec<SourceFile> {
        let pattern = match self.find(name) {
            Some(path) if path.is_dir() => format!("{}/**/*", glob::Pattern::escape(&path.to_string_lossy())),
            Some(path) => glob::Pattern::escape(&path.to_string_lossy()),
            None => self.here.join(name).to_string_lossy().into_owned(),
        };
        let found = glob::glob(&pattern).into_iter().flatten().flatten().filter(|path| path.is_file());
        found.filter_map(|path| SourceFile::new(path, name.to_owned())).collect()
    }

    /// The columns of rows on this machine, by the first of them; `None` where they cannot be seen.
    pub(crate) fn columns(&self, name: &str) -> Option<Vec<String>> {
        let columns = self.files_of_rows(name).first()?.columns(&Reading::default()).ok()?;
        Some(columns).filter(|columns| !columns.is_empty())
    }

    /// How many rows on this machine a name stands for; `None` where they cannot be seen.
    pub(crate) fn count(&self, name: &str) -> Option<u64> {
        let files = self.files_of_rows(name);
        let counts: Option<Vec<u64>> = files.iter().map(|file| file.count(&Reading::default()).ok()).collect();
        counts.filter(|counts| !counts.is_empty()).map(|counts| counts.iter().sum())
    }

    /// Whether a turn of the conversations in a column of rows on this machine has a key.
    pub(crate) fn turns_have(&self, name: &str, column: &str, key: &str) -> bool {
        let mut is_there = false;
        for file in self.files_of_rows(name) {
            // What cannot be read is told of where it is read.
            let _ = file.read(
                0..ROWS_LOOKED_AT,
                &Wanted::Named(vec![column.to_owned()]),
                &Reading::default(),
                &mut |row| {
                    let turns = row.ok().and_then(|row| row.fields.get(column)?.as_array().cloned());
                    is_there |= turns.iter().flatten().any(|turn| turn.get(key).is_some());
                    Ok(if is_there { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
                },
            );
        }
        is_there
    }

    /// Whether one of these columns of rows on this machine holds lists.
    pub(crate) fn holds_lists(&self, name: &str, columns: &[&str]) -> bool {
        let files = self.files_of_rows(name);
        files.first().is_some_and(|file| file.holds_lists(columns, &Reading::default()).unwrap_or(false))
    }
}
