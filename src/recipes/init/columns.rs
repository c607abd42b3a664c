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

impl Chosen {
    /// The name that is known here: rows with a response that is judged have it in `completion`.
    fn known(&self) -> &'static str {
        if self.name == "response" { "completion" } else { self.name }
    }

    fn collides(&self, other: &Self) -> Failure {
        let names = match self.name == other.name {
            true => format!("`{}` twice", self.name),
            false => format!("`{}` and `{}`, which are the same", self.name, other.name),
        };
        let columns = [self, other].map(|one| one.column.clone());
        Failure::wrong(format!("`--columns` names {names}")).with_help(format!("one of {}", listed(&columns)))
    }
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

/// The columns that `dataset` takes for the prompt of preferences before `instruction`.
const PROMPTS: &[&str] = &["prompt", "messages", "conversations"];

/// The columns that `dataset` reads beside `instruction`, if no other name is given to it.
pub(super) const BESIDE_INSTRUCTION: &[&str] = &["input", "system", "history"];

/// The columns of the data, each with the name that is known here.
#[derive(Debug)]
pub(super) struct Columns {
    named: Vec<(String, String)>,
    /// All columns of the data, where the user names some: `dataset` sees the others, too.
    all: Option<Vec<String>>,
}

impl Columns {
    /// All columns; one that differs from a known name by the case of its letters alone has that name.
    pub(super) fn of(columns: &[String]) -> Self {
        let name = |column: &String| {
            let lower = column.to_ascii_lowercase();
            let is_alone = columns.iter().filter(|other| other.eq_ignore_ascii_case(column)).count() == 1;
            if is_alone && NAMES.contains(&lower.as_str()) { lower } else { column.clone() }
        };
        Self { named: columns.iter().map(|column| (name(column), column.clone())).collect(), all: None }
    }

    /// Those that the user names. `columns` are those of the data; none where they cannot be seen.
    ///
    /// # Errors
    /// Fails where the data lacks one, and where two have one name.
    pub(super) fn chosen(chosen: &[Chosen], columns: &[String]) -> Result<Self, Failure> {
        if let Some(missing) = chosen.iter().find(|one| !columns.is_empty() && !columns.contains(&one.column)) {
            let failure = Failure::wrong(format!("the data has no column `{}`", words::visible(&missing.column)));
            return Err(failure.with_help(format!("its columns are {}", listed(columns))));
        }
        for (at, one) in chosen.iter().enumerate() {
            if let Some(other) = chosen[..at].iter().find(|other| other.known() == one.known()) {
                return Err(other.collides(one));
            }
        }
        let named = chosen.iter().map(|one| (one.known().to_owned(), one.column.clone())).collect();
        Ok(Self { named, all: Some(columns.to_vec()) })
    }

    /// Whether the user names them.
    pub(super) fn are_chosen(&self) -> bool {
        self.all.is_some()
    }

    /// The names, with all columns of the data where the user chooses among these: what `dataset` sees.
    pub(super) fn seen(&self) -> Vec<String> {
        let others = self.all.iter().flatten().cloned();
        self.names().into_iter().chain(others).collect()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.named.iter().map(|(name, _)| name.clone()).collect()
    }

    /// The column of the data that has this name.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(known, _)| known == name).map(|(_, column)| column.as_str())
    }

    /// The same, or the name itself where no column has it.
    pub(super) fn source<'a>(&'a self, name: &'a str) -> &'a str {
        self.get(name).unwrap_or(name)
    }

    /// Whether the data has these names itself.
    pub(super) fn have(&self, names: &[&str]) -> bool {
        names.iter().all(|name| self.get(name) == Some(*name))
    }

    /// Whether `dataset` finds an instruction by itself, with what belongs to it: it is called so, and the data has no
    /// other prompt.
    pub(super) fn have_instruction(&self) -> bool {
        let seen = self.seen();
        let are_own = BESIDE_INSTRUCTION.iter().all(|name| self.source(name) == *name);
        self.have(&["instruction"]) && are_own && !seen.iter().any(|name| PROMPTS.contains(&name.as_str()))
    }

    /// What `column_map` has to say of these names, for `dataset` to find them in the data, and to take no others where
    /// the user names them.
    pub(super) fn renamed(&self, names: &[String]) -> Vec<(String, String)> {
        let is_said = |(name, column): &&(String, String)| {
            let is_found = name == column && (!self.are_chosen() || (name == "instruction" && self.have_instruction()));
            names.contains(name) && !is_found
        };
        let entry = |(name, column): &(String, String)| {
            let name = if name == "instruction" { "prompt" } else { name.as_str() };
            MAPPED.contains(&name).then(|| (name.to_owned(), column.clone()))
        };
        self.named.iter().filter(is_said).filter_map(entry).collect()
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
        for twice in [["prompt=a", "prompt=b"], ["response=a", "completion=b"], ["text=a", "text=a"]] {
            let chosen = twice.map(|text| text.parse::<Chosen>().unwrap());
            assert!(Columns::chosen(&chosen, &[]).is_err(), "{twice:?}");
        }
        assert!("promt=a".parse::<Chosen>().is_err() && "prompt".parse::<Chosen>().is_err());
    }
}
