//! How tables hold what is said in rows of preferences: text as it stands, and turns as JSON.
//!
//! Text that would be taken for turns is a JSON string. In tables of earlier versions, whose columns have no mark, all
//! text is.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use serde_json::Value;

use super::parts::CREATED_BY;
use super::rows::{RowsFacts, Said};
use crate::data::number;

/// The mark of a column, in the metadata of its field.
const MARK: (&str, &str) = ("pipeline.cells", "text_or_turns");

/// How canonical JSON of turns begins, where there are some.
const TURNS: &str = r#"[{"role":"#;

/// How a column holds what is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cells {
    /// Text as it stands, turns as JSON.
    TextOrTurns,
    /// All of it as JSON.
    Json,
}

impl Cells {
    /// What a cell says, as JSON has it: a string, or a list of turns.
    pub fn value(self, cell: String) -> Value {
        match self {
            Self::TextOrTurns if is_turns(&cell) => parsed(cell),
            Self::TextOrTurns => Value::String(text_of(cell)),
            Self::Json if cell.starts_with(['"', '[']) => parsed(cell),
            Self::Json => Value::String(cell),
        }
    }
}

/// How the columns of a table hold what is said, by name; none of a table that this program has not written.
pub fn columns(schema: &Schema, created_by: Option<&str>) -> HashMap<String, Cells> {
    let all = |cells| move |field: &Arc<Field>| (field.name().clone(), cells);
    let marked = schema.fields().iter().filter(|field| is_marked(field));
    let marked: HashMap<String, Cells> = marked.map(all(Cells::TextOrTurns)).collect();
    let names: Vec<&String> = schema.fields().iter().map(|field| field.name()).collect();
    let has_columns_of = |facts: &RowsFacts| facts.columns.iter().eq(names.iter().copied());
    let is_earlier =
        created_by == Some(CREATED_BY) && [RowsFacts::pairs(), RowsFacts::judged()].iter().any(has_columns_of);
    match marked.is_empty() && is_earlier {
        true => schema.fields().iter().map(all(Cells::Json)).collect(),
        false => marked,
    }
}

/// A column of cells that [`stored`] gives.
pub(super) fn marked(name: &str) -> Field {
    let (key, value) = MARK;
    Field::new(name, DataType::Utf8, false).with_metadata(HashMap::from([(key.to_owned(), value.to_owned())]))
}

/// Whether a column is one of [`marked`].
pub(super) fn is_marked(field: &Field) -> bool {
    let (key, value) = MARK;
    field.metadata().get(key).is_some_and(|found| found == value)
}

/// A cell as a marked column holds it, of one that is JSON.
pub(super) fn stored(json: String) -> String {
    match quoted(&json) {
        Some(text) if !is_ambiguous(&text) => text,
        _ => json,
    }
}

/// What a cell of a marked column says.
pub(super) fn said(cell: String) -> serde_json::Result<Said> {
    if is_turns(&cell) { serde_json::from_str(&cell).map(Said::Turns) } else { Ok(Said::Text(text_of(cell))) }
}

/// A cell of a marked column as JSON, the inverse of [`stored`].
pub(super) fn json(cell: &str) -> String {
    match is_turns(cell) {
        true => cell.to_owned(),
        false => serde_json::to_string(&text_of(cell.to_owned())).expect("text is JSON"),
    }
}

fn is_turns(cell: &str) -> bool {
    cell == "[]" || cell.starts_with(TURNS)
}

/// Whether a text as it stands would be read as something else.
fn is_ambiguous(text: &str) -> bool {
    is_turns(text) || quoted(text).is_some_and(|inner| is_ambiguous(&inner))
}

/// The text of a cell that holds no turns.
fn text_of(cell: String) -> String {
    quoted(&cell).filter(|text| is_ambiguous(text)).unwrap_or(cell)
}

/// The text of a JSON string.
fn quoted(cell: &str) -> Option<String> {
    if cell.starts_with('"') { serde_json::from_str(cell).ok() } else { None }
}

/// JSON with the digits of its great integers, or the text that it is where it is none.
fn parsed(cell: String) -> Value {
    match serde_json::from_str::<Value>(&cell) {
        Ok(value) if number::may_be_rounded(&value) => {
            serde_json::from_str(&number::with_digits_kept(&cell)).unwrap_or(value)
        }
        Ok(value) => value,
        Err(_) => Value::String(cell),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::artifact::Message;

    #[test]
    fn text_stands_as_it_is_unless_it_would_be_taken_for_turns() {
        let quoted = |text: &str| serde_json::to_string(text).unwrap();
        for text in ["", "Who?\n", "\"Paris\"", "[1, 2]", "[] ", "{\"role\":\"user\"}", "true", "\"", "größe"] {
            assert_eq!(stored(quoted(text)), text);
        }
        let turns = r#"[{"role":"user","content":"Who?"}]"#;
        for text in ["[]", turns, &quoted("[]"), &quoted(turns), &quoted(&quoted("[]"))] {
            assert_eq!(stored(quoted(text)), quoted(text));
        }
        for text in ["", "Who?\n", "\"Paris\"", "[]", turns, &quoted("[]"), &quoted(&quoted(turns)), &quoted("a")] {
            let cell = stored(quoted(text));
            assert_eq!(said(cell.clone()).unwrap(), Said::Text(text.to_owned()));
            assert_eq!((json(&cell), Cells::TextOrTurns.value(cell)), (quoted(text), text.into()));
            assert_eq!(Cells::Json.value(quoted(text)), Value::from(text));
        }
        let asked = Said::Turns(vec![Message::new("user", "Who?")]);
        assert_eq!((stored(turns.to_owned()), json(turns)), (turns.to_owned(), turns.to_owned()));
        assert_eq!(said(turns.to_owned()).unwrap(), asked);
        assert_eq!(said("[]".to_owned()).unwrap(), Said::Turns(Vec::new()));
        assert!(Cells::TextOrTurns.value(turns.to_owned()).is_array());
    }

    #[test]
    fn a_table_of_an_earlier_version_is_known_by_its_author_and_columns() {
        let schema = |names: [&str; 3]| Schema::new(names.map(|name| Field::new(name, DataType::Utf8, false)).to_vec());
        let pairs = schema(["chosen", "prompt", "rejected"]);
        assert_eq!(columns(&pairs, Some(CREATED_BY)).get("prompt"), Some(&Cells::Json));
        assert!(columns(&pairs, Some("parquet-cpp-arrow")).is_empty() && columns(&pairs, None).is_empty());
        assert!(columns(&schema(["input", "output", "prompt"]), Some(CREATED_BY)).is_empty());
        let now = Schema::new(["chosen", "prompt", "rejected"].map(marked).to_vec());
        assert_eq!(columns(&now, None).get("prompt"), Some(&Cells::TextOrTurns));
    }
}
