//! Where files are: those that the tool's configuration names, as the pipeline file is to name them.
//!
//! Tools look from the folder that they are started in, a pipeline file from its own.

use std::env;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Endings of files of rows.
const ROWS: &[&str] = &["jsonl", "ndjson", "json", "csv", "tsv", "txt", "parquet", "arrow", "gz", "zst"];

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
        let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
        name.starts_with(['.', '/', '~']) || ROWS.contains(&ending) || self.find(name).is_some()
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

    /// The columns of a file of rows on this machine, by its first row; `None` where they cannot be seen.
    pub(crate) fn columns(&self, name: &str) -> Option<Vec<String>> {
        let path = self.find(name)?;
        let file = BufReader::new(File::open(&path).ok()?);
        let row: serde_json::Value = match path.extension()?.to_str()? {
            "jsonl" | "ndjson" => serde_json::from_str(&file.lines().next()?.ok()?).ok()?,
            "json" => {
                // An array of rows, or a row on each line.
                let mut rows = serde_json::Deserializer::from_reader(file).into_iter::<serde_json::Value>();
                match rows.next()?.ok()? {
                    serde_json::Value::Array(rows) => rows.into_iter().next()?,
                    row => row,
                }
            }
            "csv" => return Some(file.lines().next()?.ok()?.split(',').map(|name| name.trim().to_owned()).collect()),
            _ => return None,
        };
        Some(row.as_object()?.keys().cloned().collect())
    }
}
