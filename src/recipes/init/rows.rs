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

/// The column of the tools that an assistant may call.
const TOOLS: &str = "tools";

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
    /// The columns that nothing is made of.
    pub(super) unread: Vec<String>,
    /// How many there are in files on this machine; `MOST_COUNTED` stands for that and more.
    pub(super) count: Option<u64>,
}

impl Rows {
    /// Looks at the first rows of the files, and counts.
    pub(super) fn of(data: &str, places: &Places) -> Self {
        let columns = places.columns(data).unwrap_or_default();
        let found = Found::of(&columns, &|names| places.holds_lists(data, names));
        let is_read = |column: &String| found.form == Form::Unknown || found.read.contains(column);
        let unread = columns.iter().filter(|column| !is_read(column)).cloned().collect();
        Self { form: found.form, parameters: found.written(), unread, count: count(data, places) }
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

/// What columns are made into.
#[derive(Debug)]
struct Found {
    form: Form,
    /// What `dataset` is told.
    parameters: Parameters,
    /// The columns that are read.
    read: Vec<String>,
}

impl Found {
    /// Finds out by the names of the columns; `lists` tells whether one of several holds lists.
    fn of(columns: &[String], lists: &dyn Fn(&[&str]) -> bool) -> Self {
        let has = |name: &str| columns.iter().any(|column| column == name);
        if let Some((shape, read)) = dataset::preferences(columns) {
            let form = if shape == RowShape::Judged { Form::Judged } else { Form::Pairs };
            let turns: Vec<&str> = read.iter().map(String::as_str).collect();
            let may_call = has(TOOLS) && lists(&turns);
            return Self { form, parameters: Parameters::default(), read }.with_tools(may_call);
        }
        match Shape::of(columns) {
            None | Some(Shape::Preference) => Self::nothing(Form::Unknown),
            Some(Shape::Text(column)) => {
                let mut found = Self::nothing(Form::Text);
                if column != "text" {
                    rows::text(&mut found.parameters, &column);
                }
                found.reading(column)
            }
            Some(Shape::Messages(column)) => {
                let mut found = Self::nothing(Form::Conversations);
                if has("system") && lists(&[&column]) {
                    rows::messages_after(&mut found.parameters, &column, "system");
                    found = found.reading("system".to_owned());
                } else if has(TOOLS) || !["messages", "conversations"].contains(&column.as_str()) {
                    rows::messages(&mut found.parameters, &column);
                    found.parameters.remove("turn_order");
                }
                found.reading(column).with_tools(has(TOOLS))
            }
            Some(Shape::Alpaca) => {
                let (instruction, input) = (required("instruction"), rows::column("input"));
                // `+` is of texts alone, and fails over an instruction that is null.
                let user = format!("{instruction} + ('\\n' ~ {input} if {input} else '')");
                let found = Self::answered(columns, lists, &user, "output");
                found.reading("instruction".to_owned()).reading("input".to_owned()).with_tools(has(TOOLS))
            }
            Some(Shape::Pair(prompt, completion)) => {
                let of_turns = lists(&[&prompt, &completion]);
                // TRL's columns, which `dataset` reads as a conversation.
                if of_turns && prompt == "prompt" && completion == "completion" {
                    let found = Self::nothing(Form::Conversations).reading(prompt).reading(completion);
                    return found.with_tools(has(TOOLS));
                }
                if of_turns {
                    return Self::nothing(Form::Unknown);
                }
                let prompt = if has("instruction") && prompt == "input" { "instruction".to_owned() } else { prompt };
                let mut user = required(&prompt);
                let context = ["context", "input"].into_iter().find(|name| has(name) && *name != prompt);
                if let Some(context) = context.map(rows::column) {
                    user = format!("{user} + ('\\n' ~ {context} if {context} else '')");
                }
                let found = Self::answered(columns, lists, &user, &completion).reading(prompt);
                context.into_iter().fold(found, |found, name| found.reading(name.to_owned())).with_tools(has(TOOLS))
            }
        }
    }

    fn nothing(form: Form) -> Self {
        Self { form, parameters: Parameters::default(), read: Vec::new() }
    }

    /// A prompt and its answer as the turns of a user and an assistant, for the model's chat template, behind the
    /// system message and the earlier turns that there are.
    fn answered(columns: &[String], lists: &dyn Fn(&[&str]) -> bool, user: &str, completion: &str) -> Self {
        let mut found = Self::nothing(Form::Conversations);
        let assistant = required(completion);
        let named = |names: &[&str]| columns.iter().find(|column| names.contains(&column.as_str()));
        let (system, history) = (named(&["system", "system_prompt"]), named(&["history"]));
        let message = system.map(|system| rows::column(system));
        match history.filter(|history| lists(&[history])) {
            Some(history) => {
                let earlier = rows::column(history);
                rows::conversation_after(&mut found.parameters, &earlier, message.as_deref(), user, &assistant);
                found.read.push(history.clone());
            }
            None => rows::conversation(&mut found.parameters, message.as_deref(), user, &assistant),
        }
        found.read.extend(system.cloned());
        found.reading(completion.to_owned())
    }

    fn reading(mut self, column: String) -> Self {
        self.read.push(column);
        self
    }

    /// Gives the conversations the tools of their column.
    fn with_tools(mut self, has_tools: bool) -> Self {
        if has_tools {
            rows::tools(&mut self.parameters, TOOLS);
            self.read.push(TOOLS.to_owned());
        }
        self
    }

    /// The parameters as a part of a mapping.
    fn written(&self) -> Option<String> {
        let one = |name: &&str| Some(format!("{name}: {}", write::flow(self.parameters.get(name)?)));
        let written: Vec<String> = ["map", "column_map"].iter().filter_map(one).collect();
        (!written.is_empty()).then(|| written.join(", "))
    }
}

/// The value of a column that every row must have.
fn required(name: &str) -> String {
    format!("row[{}]", json!(name))
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

    fn found(columns: &[&str], lists: &[&str]) -> Found {
        let columns: Vec<String> = columns.iter().map(|&column| column.to_owned()).collect();
        Found::of(&columns, &|names| names.iter().any(|name| lists.contains(name)))
    }

    #[test]
    fn columns_say_what_rows_hold() {
        let form = |columns: &[&str]| {
            let found = found(columns, &[]);
            (found.form, found.written())
        };
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

    /// Each with the columns that are read, and a part of what `dataset` is told.
    #[test]
    fn what_is_a_part_of_the_prompt_is_read() {
        for (columns, lists, read, told) in [
            (&["messages", "tools", "id"][..], &["messages", "tools"][..], &["messages", "tools"][..], "tools: tools"),
            (&["conversations", "system"], &["conversations"], &["conversations", "system"], "'role': 'system'"),
            (&["conversations", "system"], &[], &["conversations"], ""),
            (
                &["instruction", "input", "output", "system", "history"],
                &["history"],
                &["instruction", "input", "output", "system", "history"],
                "for pair in",
            ),
            (
                &["instruction", "context", "response", "category"],
                &[],
                &["instruction", "context", "response"],
                "context",
            ),
            (&["instruction", "input", "response"], &[], &["instruction", "input", "response"], "input"),
            (&["question", "context", "answer"], &[], &["question", "context", "answer"], "context"),
            (&["prompt", "completion", "id"], &["prompt", "completion"], &["prompt", "completion"], ""),
            (&["prompt", "completion", "tools"], &["prompt"], &["prompt", "completion", "tools"], "tools: tools"),
            (
                &["chosen", "rejected", "tools"],
                &["chosen", "rejected"],
                &["chosen", "rejected", "tools"],
                "tools: tools",
            ),
            (&["prompt", "chosen", "rejected", "tools"], &[], &["prompt", "chosen", "rejected"], ""),
            (&["title", "text"], &[], &["text"], ""),
        ] {
            let found = found(columns, lists);
            let written = found.written().unwrap_or_default();
            let in_order: Vec<&&str> =
                columns.iter().filter(|column| found.read.iter().any(|read| read == *column)).collect();
            assert_eq!(in_order, read.iter().collect::<Vec<_>>(), "{columns:?}");
            assert!(written.contains(told) && (!told.is_empty() || written.is_empty()), "{columns:?}: {written}");
        }
        assert_eq!(found(&["question", "answer"], &["answer"]).form, Form::Unknown);
    }
}
