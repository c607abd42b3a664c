//! How two versions of something differ, in words: the files of a folder, the rows of a table.
//!
//! It leaves to others: which versions are compared ([`crate::explain`]), and how a kind of artefact is on disk (the
//! stage kinds).

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::artifact::Facts;

/// A stored artefact as a comparison reads it.
#[derive(Debug, Clone)]
pub struct StoredArtifact {
    pub facts: Facts,
    /// Where each of its files lies, by its name in the artefact. They are not verified: an explanation may fail, and
    /// nothing is made of it.
    pub files: BTreeMap<String, PathBuf>,
}

/// How two versions of an artefact differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ArtifactChange {
    Rows(TableChange),
    Files(Vec<FileChange>),
}

/// How two versions of a table differ.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TableChange {
    pub rows_before: u64,
    pub rows_now: u64,
    /// Rows in the place of which there are others now.
    pub changed: u64,
    /// Rows that came on top of those.
    pub added: u64,
    /// Rows that went without others in their place.
    pub removed: u64,
    /// Whether the figures are bounds, since comparing so many rows would take too long.
    pub at_most: bool,
    /// Whether the same rows are in another order.
    pub reordered: bool,
    /// What else a reader goes by that differs: `template`, `columns`.
    pub attributes: Vec<String>,
}

/// How a file differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileChange {
    /// Its name.
    pub file: String,
    pub change: Change,
}

/// What became of something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It has another content.
    Changed,
    /// It was not there before.
    Added,
    /// It is no longer there.
    Removed,
}

/// The files in which two folders differ, each given by name and content; in the order of their names.
pub fn file_changes<V: PartialEq>(old: &BTreeMap<String, V>, new: &BTreeMap<String, V>) -> Vec<FileChange> {
    let change = |file: &String, change| FileChange { file: file.clone(), change };
    let mut changes: Vec<FileChange> = new
        .iter()
        .filter_map(|(name, content)| match old.get(name) {
            None => Some(change(name, Change::Added)),
            Some(before) if before != content => Some(change(name, Change::Changed)),
            Some(_) => None,
        })
        .collect();
    changes.extend(old.keys().filter(|name| !new.contains_key(*name)).map(|name| change(name, Change::Removed)));
    changes.sort_by(|one, other| one.file.cmp(&other.file));
    changes
}

impl fmt::Display for ArtifactChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows(change) => change.fmt(f),
            Self::Files(changes) => f.write_str(&files_in_words(changes)),
        }
    }
}

/// `3 of 2000 rows`, `100 rows added to 2000`, `3 of 2000 rows changed, 100 added; its template`.
impl fmt::Display for TableChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows_before, changed, added, removed, .. } = self;
        let bound = if self.at_most { "up to " } else { "" };
        let rows = match (changed, added, removed) {
            (0, 0, 0) => String::new(),
            (changed, 0, 0) => format!("{bound}{changed} of {rows_before} rows"),
            (0, 1, 0) => format!("{bound}1 row added to {rows_before}"),
            (0, added, 0) => format!("{bound}{added} rows added to {rows_before}"),
            (0, 0, removed) => format!("{bound}{removed} of {rows_before} rows removed"),
            _ => {
                let counts = [(changed, "changed"), (added, "added"), (removed, "removed")];
                let counts = counts.iter().filter(|(count, _)| **count > 0);
                let mut words = counts.map(|(count, what)| format!("{count} {what}"));
                let first = words.next().unwrap_or_default().replacen(' ', &format!(" of {rows_before} rows "), 1);
                format!("{bound}{}", [first].into_iter().chain(words).collect::<Vec<_>>().join(", "))
            }
        };
        let order = if self.reordered { "its rows are in another order".to_owned() } else { String::new() };
        let attributes = match self.attributes.as_slice() {
            [] => String::new(),
            names => format!("its {}", names.join(", ")),
        };
        let parts: Vec<String> = [rows, order, attributes].into_iter().filter(|part| !part.is_empty()).collect();
        f.write_str(&parts.join("; "))
    }
}

/// The changes of files in a few words: `tokenizer.json, chat_template.jinja added and 3 more`.
pub fn files_in_words(changes: &[FileChange]) -> String {
    const MOST: usize = 3;
    let word = |FileChange { file, change }: &FileChange| match change {
        Change::Changed => file.clone(),
        Change::Added => format!("{file} added"),
        Change::Removed => format!("{file} removed"),
    };
    let mut words: Vec<String> = changes.iter().take(MOST).map(word).collect();
    if changes.len() > MOST {
        let last = words.pop().unwrap_or_default();
        words.push(format!("{last} and {} more", changes.len() - MOST));
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_rows_is_said_in_few_words() {
        let change =
            |changed, added, removed| TableChange { rows_before: 2000, changed, added, removed, ..Default::default() };
        assert_eq!(change(3, 0, 0).to_string(), "3 of 2000 rows");
        assert_eq!(change(0, 50, 0).to_string(), "50 rows added to 2000");
        assert_eq!(change(0, 0, 7).to_string(), "7 of 2000 rows removed");
        assert_eq!(change(3, 50, 0).to_string(), "3 of 2000 rows changed, 50 added");
        let bound = TableChange { at_most: true, ..change(8192, 0, 0) };
        assert_eq!(bound.to_string(), "up to 8192 of 2000 rows");
        let order = TableChange { reordered: true, attributes: vec!["template".to_owned()], ..change(0, 0, 0) };
        assert_eq!(order.to_string(), "its rows are in another order; its template");
    }

    #[test]
    fn files_are_told_by_name_and_not_all_of_many() {
        let files = |entries: &[(&str, u8)]| {
            entries.iter().map(|(name, content)| ((*name).to_owned(), *content)).collect::<BTreeMap<_, _>>()
        };
        let (old, new) = (files(&[("a", 1), ("b", 1), ("c", 1)]), files(&[("b", 2), ("c", 1), ("d", 1)]));
        let changes = file_changes(&old, &new);
        assert_eq!(files_in_words(&changes), "a removed, b, d added");
        let many = file_changes(&files(&[]), &files(&[("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]));
        assert_eq!(files_in_words(&many), "a added, b added, c added and 2 more");
    }
}
