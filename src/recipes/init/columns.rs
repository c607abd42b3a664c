//! The columns of the user's rows, by the names that are known here: their own, or those that `--columns` gives them.

use std::str::FromStr;

use crate::render::Failure;
use crate::words;

/// The names that say what a column holds, whatever the case of its letters.
const NAMES: &[&str] = &[
    "messages",
    "conversations",
    "conversation",
    "text",
    "prompt",
    "completion",
    "response",
    "instruction",
    "input",
    "output",
    "query",
    "question",
    "answer",
    "problem",
    "solution",
    "target",
    "system",
    "context",
    "history",
    "tools",
    "chosen",
    "rejected",
    "label",
];

/// The names that `column_map` has where `dataset` itself finds out what rows are.
const MAPPED: &[&str] = &["messages", "conversations", "prompt", "completion", "chosen", "rejected", "label"];

/// What makes rows, as an example.
pub(super) const EXAMPLE: &str = "prompt=…,response=…";

/// A column that the user names, as `NAME=COLUMN`.
#[derive(Debug, Clone)]
pub(super) struct Chosen {
    name: &'static str,
    column: String,
}

impl FromStr for Chosen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, column) = text.split_once('=').ok_or_else(|| format!("it is `NAME=COLUMN`, as in `{EXAMPLE}`"))?;
        let known = NAMES.iter().find(|known| **known == name);
        let name = known.ok_or_else(|| format!("`{name}` is none of the names {}", NAMES.join(", ")))?;
        Ok(Self { name, column: column.to_owned() })
    }
}

/// The columns of the data, each with the name that is known here.
#[derive(Debug)]
pub(super) struct Columns(Vec<(String, String)>);

impl Columns {
    /// All columns; one that differs from a known name by the case of its letters alone has that name.
    pub(super) fn of(columns: &[String]) -> Self {
        let name = |column: &String| {
            let lower = column.to_ascii_lowercase();
            let is_alone = columns.iter().filter(|other| other.eq_ignore_ascii_case(column)).count() == 1;
            if is_alone && NAMES.contains(&lower.as_str()) { lower } else { column.clone() }
        };
        Self(columns.iter().map(|column| (name(column), column.clone())).collect())
    }

    /// Those that the user names. `columns` are those of the data; none where they cannot be seen.
    pub(super) fn chosen(chosen: &[Chosen], columns: &[String]) -> Result<Self, Failure> {
        if let Some(missing) = chosen.iter().find(|one| !columns.is_empty() && !columns.contains(&one.column)) {
            let failure = Failure::wrong(format!("the data has no column `{}`", words::visible(&missing.column)));
            return Err(failure.with_help(format!("its columns are {}", listed(columns))));
        }
        // Rows with a response that is judged have it in `completion`.
        let name = |name: &str| if name == "response" { "completion".to_owned() } else { name.to_owned() };
        Ok(Self(chosen.iter().map(|one| (name(one.name), one.column.clone())).collect()))
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The column of the data that has this name.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, column)| column.as_str())
    }

    /// The same, or the name itself where no column has it.
    pub(super) fn source<'a>(&'a self, name: &'a str) -> &'a str {
        self.get(name).unwrap_or(name)
    }

    /// Whether the data has these names itself.
    pub(super) fn have(&self, names: &[&str]) -> bool {
        names.iter().all(|name| self.get(name) == Some(*name))
    }

    /// What `column_map` has to say of these names, for `dataset` to find them in the data.
    pub(super) fn renamed(&self, names: &[String]) -> Vec<(String, String)> {
        let differs = |(name, column): &&(String, String)| name != column && names.contains(name);
        let entry = |(name, column): &(String, String)| {
            let name = if name == "instruction" { "prompt" } else { name.as_str() };
            MAPPED.contains(&name).then(|| (name.to_owned(), column.clone()))
        };
        self.0.iter().filter(differs).filter_map(entry).collect()
    }
}

/// Columns by name, for people.
pub(super) fn listed(columns: &[String]) -> String {
    columns.iter().map(|column| format!("`{}`", words::visible(column))).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn letters_of_another_case_make_no_other_name() {
        let columns = Columns::of(&strings(&["Prompt", "RESPONSE", "Id"]));
        assert_eq!(columns.names(), ["prompt", "response", "Id"]);
        assert_eq!((columns.source("prompt"), columns.source("id")), ("Prompt", "id"));
        // Of two that would have one name, neither has it but by being so called.
        assert_eq!(Columns::of(&strings(&["Text", "text"])).names(), ["Text", "text"]);
    }

    #[test]
    fn chosen_columns_have_to_be_there() {
        let chosen = ["prompt=Review Text", "response=Star-Rating "].map(|text| text.parse::<Chosen>().unwrap());
        let columns = Columns::chosen(&chosen, &strings(&["Review Text", "Star-Rating "])).unwrap();
        assert_eq!((columns.source("prompt"), columns.source("completion")), ("Review Text", "Star-Rating "));
        // Nothing is known of the columns of a hub.
        assert!(Columns::chosen(&chosen, &[]).is_ok());
        assert!(Columns::chosen(&chosen, &strings(&["Review Text"])).is_err());
        assert!("promt=a".parse::<Chosen>().is_err() && "prompt".parse::<Chosen>().is_err());
    }
}
