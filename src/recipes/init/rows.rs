//! What the user's data is: the form of its rows, and how many there are.

use std::ops::ControlFlow;

use serde_json::json;
use stages::data::artifact::Shape as RowShape;
use stages::kinds::dataset;
use stages::kinds::dataset::read::{Reading, Wanted};

use crate::import::parameters::Parameters;
use crate::import::places::Places;
use crate::import::rows::{self, Shape};
use crate::import::write;

/// Rows are counted up to here.
const MOST_COUNTED: u64 = 100_000;

/// What rows hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Something that is answered.
    Conversations,
    Text,
    /// A prompt with a chosen and a rejected answer.
    Pairs,
    /// A prompt with an answer that is good or bad.
    Judged,
    /// A data set on a hub, or a file whose columns `dataset` finds out.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Rows {
    pub(super) form: Form,
    /// What `dataset` needs to be told to read them so.
    pub(super) parameters: Option<String>,
    /// How many there are in files on this machine; `MOST_COUNTED` stands for that and more.
    pub(super) count: Option<u64>,
}

impl Rows {
    /// Looks at the first rows of the files, and counts.
    pub(super) fn of(data: &str, places: &Places) -> Self {
        let columns = places.columns(data).unwrap_or_default();
        let (form, parameters) = read(&columns);
        Self { form, parameters, count: count(data, places) }
    }

    /// In words, for the head of the file.
    pub(super) fn describe(&self) -> String {
        let form = match self.form {
            Form::Conversations => "conversations",
            Form::Text => "plain text",
            Form::Pairs => "pairs of a chosen and a rejected response",
            Form::Judged => "responses that are good or bad",
            Form::Unknown => "rows whose columns are not known before they are read",
        };
        match self.count {
            Some(MOST_COUNTED) => format!("more than {MOST_COUNTED} rows, {form}"),
            Some(count) => format!("{count} rows, {form}"),
            None => form.to_owned(),
        }
    }
}

fn read(columns: &[String]) -> (Form, Option<String>) {
    match dataset::preferences(columns) {
        Some(RowShape::Judged) => return (Form::Judged, None),
        Some(_) => return (Form::Pairs, None),
        None => {}
    }
    match Shape::of(columns) {
        None => (Form::Unknown, None),
        Some(Shape::Preference) => (Form::Pairs, None),
        Some(Shape::Text(column)) if column == "text" => (Form::Text, None),
        Some(Shape::Text(column)) => (Form::Text, Some(columns_of(&json!({ "text": column })))),
        Some(Shape::Messages(column)) if ["messages", "conversations"].contains(&column.as_str()) => {
            (Form::Conversations, None)
        }
        Some(Shape::Messages(column)) => (Form::Conversations, Some(columns_of(&json!({ "messages": column })))),
        Some(Shape::Alpaca) => {
            let (instruction, input) = (required("instruction"), rows::column("input"));
            // `+` is of texts alone, and fails over an instruction that is null.
            let user = format!("{instruction} + ('\\n' ~ {input} if {input} else '')");
            (Form::Conversations, Some(turns(&user, "output")))
        }
        Some(Shape::Pair(prompt, completion)) => (Form::Conversations, Some(turns(&required(&prompt), &completion))),
    }
}

fn columns_of(map: &serde_json::Value) -> String {
    format!("column_map: {}", write::flow(map))
}

/// The value of a column that every row must have.
fn required(name: &str) -> String {
    format!("row[{}]", json!(name))
}

/// A prompt and its answer as the turns of a user and an assistant, for the model's chat template.
fn turns(user: &str, assistant: &str) -> String {
    let mut parameters = Parameters::default();
    rows::conversation(&mut parameters, None, user, &required(assistant));
    let map = parameters.get("map").map(write::flow).unwrap_or_default();
    format!("map: {map}, column_map: {{ messages: messages }}")
}

fn count(data: &str, places: &Places) -> Option<u64> {
    let files = places.files_of_rows(data);
    let mut counted = None;
    for file in &files {
        let left = MOST_COUNTED - counted.unwrap_or(0);
        let nothing = &mut |_| Ok(ControlFlow::Continue(()));
        *counted.get_or_insert(0) += file.read(left..left, &Wanted::All, &Reading::default(), nothing).ok()?;
    }
    counted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_say_what_rows_hold() {
        let form = |columns: &[&str]| read(&columns.iter().map(|&column| column.to_owned()).collect::<Vec<_>>());
        assert_eq!(form(&["messages", "id"]), (Form::Conversations, None));
        assert_eq!(form(&["prompt", "chosen", "rejected"]), (Form::Pairs, None));
        assert_eq!(form(&["prompt", "completion", "label"]), (Form::Judged, None));
        assert_eq!(form(&["messages", "rejected_response"]), (Form::Pairs, None));
        assert_eq!(form(&["chosen_conversations", "rejected_conversations"]), (Form::Pairs, None));
        assert_eq!(form(&["messages", "kto_tag"]), (Form::Judged, None));
        assert_eq!(form(&["text"]), (Form::Text, None));
        assert_eq!(form(&["a", "b"]), (Form::Unknown, None));
        let (alpaca, parameters) = form(&["instruction", "input", "output"]);
        assert_eq!(alpaca, Form::Conversations);
        assert!(parameters.is_some_and(|parameters| parameters.contains("'assistant'")));
    }
}
