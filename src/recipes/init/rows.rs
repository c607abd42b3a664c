//! What the user's data is: the form of its rows, and how many there are.

use std::ops::ControlFlow;

use serde_json::{Value as Json, json};
use stages::data::artifact::Shape as RowShape;
use stages::kinds::dataset::read::{Reading, Wanted};
use stages::kinds::dataset::{self, Format};

use super::columns::{self, Chosen, Columns, listed};
use crate::import::parameters::Parameters;
use crate::import::places::Places;
use crate::import::rows::{self, Shape};
use crate::import::write;
use crate::render::Failure;

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
    /// All columns; none where they cannot be seen.
    pub(super) columns: Vec<String>,
    /// The key of the one object in a `.json` file that seems to hold the rows.
    pub(super) field: Option<String>,
}

impl Rows {
    /// Looks at the first rows of the files, and counts. `chosen` are the columns that the user names.
    ///
    /// # Errors
    /// Fails where a column that is named is not there or named twice, and where those that are named make no rows.
    pub(super) fn of(data: &str, places: &Places, chosen: &[Chosen]) -> Result<Self, Failure> {
        let columns = places.columns(data).unwrap_or_default();
        let named = if chosen.is_empty() { Columns::of(&columns) } else { Columns::chosen(chosen, &columns)? };
        let found = Found::of(&named, &|names| places.holds_lists(data, names));
        if found.form == Form::Unknown && !chosen.is_empty() {
            let failure = Failure::wrong("the columns of `--columns` make no rows");
            let others = "`messages=…`, `text=…` or `prompt=…,chosen=…,rejected=…`";
            return Err(failure.with_help(format!("such as `{}`, {others}", columns::EXAMPLE)));
        }
        if let Some(failure) = found.contradicted(&named) {
            return Err(failure);
        }
        let unread = found.unread(&named, &columns);
        let count = count(data, places);
        let field = if count == Some(1) { field(data, places, &columns) } else { None };
        Ok(Self { form: found.form, parameters: found.written(), unread, count, columns, field })
    }

    /// What a person may tell `dataset` whose columns do not say what a row is, as an example.
    pub(super) fn example(&self) -> String {
        match (&self.field, self.columns.as_slice()) {
            (Some(field), _) => format!("field: {}", write::text(field)),
            (None, [only]) => format!("column_map: {}", write::flow(&json!({ "text": only }))),
            (None, [first, second, ..]) => {
                format!("template: none, column_map: {}", write::flow(&json!({ "input": first, "output": second })))
            }
            (None, []) => "template: none, column_map: { input: …, output: … }".to_owned(),
        }
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
    /// What `map` is told where `parameters` say nothing of it.
    map: Option<Json>,
    /// What `column_map` is told besides: a name, and the column of the data.
    renamed: Vec<(String, String)>,
    /// The columns that are read, by the names that are known here.
    read: Vec<String>,
}

impl Found {
    /// Finds out by the names of the columns; `lists` tells whether one of several columns of the data holds lists.
    fn of(columns: &Columns, lists: &dyn Fn(&[&str]) -> bool) -> Self {
        let lists = &|names: &[&str]| lists(&names.iter().map(|name| columns.source(name)).collect::<Vec<_>>());
        let names = columns.names();
        if let Some((shape, read)) = dataset::preferences(&names) {
            return Self::preferences(columns, shape, read, lists);
        }
        match Shape::of(&names) {
            None | Some(Shape::Preference) => Self::nothing(Form::Unknown),
            Some(Shape::Text(name)) => {
                let mut found = Self::nothing(Form::Text);
                if columns.are_chosen() || !columns.have(&["text"]) {
                    rows::text(&mut found.parameters, columns.source(&name));
                }
                found.reading(&name)
            }
            Some(Shape::Messages(name)) => Self::messages(columns, &name, lists),
            Some(Shape::Alpaca) => {
                let instruction = required(columns.source("instruction"));
                let input = rows::column(columns.source("input"));
                // `+` is of texts alone, and fails over an instruction that is null.
                let user = format!("{instruction} + ('\\n' ~ {input} if {input} else '')");
                let found = Self::answered(columns, lists, &user, "output");
                found.reading("instruction").reading("input").with_tools(columns.get(TOOLS))
            }
            Some(Shape::Pair(prompt, completion)) => Self::pair(columns, &prompt, &completion, lists),
        }
    }

    fn nothing(form: Form) -> Self {
        Self { form, parameters: Parameters::default(), map: None, renamed: Vec::new(), read: Vec::new() }
    }

    /// Preferences, whose columns `dataset` finds by itself where they have their own names and the user chooses none.
    fn preferences(columns: &Columns, shape: RowShape, mut read: Vec<String>, lists: &dyn Fn(&[&str]) -> bool) -> Self {
        let form = if shape == RowShape::Judged { Form::Judged } else { Form::Pairs };
        let renamed = columns.renamed(&read);
        let turns: Vec<&str> = read.iter().map(String::as_str).collect();
        let tools = columns.get(TOOLS).filter(|_| lists(&turns));
        if columns.are_chosen() {
            read = Self::with_prompt_of_data(columns, read);
        }
        Self { renamed, read, ..Self::nothing(form) }.with_tools(tools)
    }

    /// The columns of preferences that are chosen, with those of the data that `dataset` takes for a prompt where none
    /// is chosen. An instruction that `column_map` names is the whole prompt.
    fn with_prompt_of_data(columns: &Columns, mut read: Vec<String>) -> Vec<String> {
        let has_instruction = read.iter().any(|name| name == "instruction");
        if has_instruction && !columns.have_instruction() {
            read.retain(|name| !columns::BESIDE_INSTRUCTION.contains(&name.as_str()));
        } else if has_instruction || read.len() == 2 {
            let seen = dataset::preferences(&columns.seen()).map(|(_, seen)| seen).unwrap_or_default();
            let more: Vec<String> = seen.into_iter().filter(|name| name != "kto_tag" && !read.contains(name)).collect();
            read.extend(more);
        }
        read
    }

    /// Why `dataset` does not make what is chosen: columns of the data say something else, whatever others are named.
    fn contradicted(&self, columns: &Columns) -> Option<Failure> {
        let is_judged = self.form == Form::Judged && columns.are_chosen();
        let (_, read) = dataset::preferences(&columns.seen()).filter(|(shape, _)| *shape != RowShape::Judged)?;
        is_judged.then(|| {
            let message = "`--columns` names a response that is judged, and the data has pairs of responses";
            let help = format!("`dataset` makes pairs of {}, whatever else is named", listed(&read));
            Failure::wrong(message).with_help(help)
        })
    }

    /// The columns that nothing is made of: of the data, or of those that are named where it cannot be seen.
    fn unread(&self, named: &Columns, columns: &[String]) -> Vec<String> {
        let read: Vec<&str> = self.read.iter().map(|name| named.source(name)).collect();
        let chosen: Vec<String> = named.names().iter().map(|name| named.source(name).to_owned()).collect();
        let all = if columns.is_empty() { chosen } else { columns.to_vec() };
        all.into_iter().filter(|column| self.form != Form::Unknown && !read.contains(&column.as_str())).collect()
    }

    /// Turns in a column, behind the system message of another.
    fn messages(columns: &Columns, name: &str, lists: &dyn Fn(&[&str]) -> bool) -> Self {
        let mut found = Self::nothing(Form::Conversations);
        let (column, tools) = (columns.source(name), columns.get(TOOLS));
        if let Some(system) = columns.get("system").filter(|_| lists(&[name])) {
            rows::messages_after(&mut found.parameters, column, system);
            found = found.reading("system");
        } else if columns.are_chosen() || tools.is_some() || !["messages", "conversations"].contains(&column) {
            rows::messages(&mut found.parameters, column);
            found.parameters.remove("turn_order");
        }
        found.reading(name).with_tools(tools)
    }

    /// A prompt and its response, and what belongs to the prompt.
    fn pair(columns: &Columns, prompt: &str, completion: &str, lists: &dyn Fn(&[&str]) -> bool) -> Self {
        let has = |name: &str| columns.get(name).is_some();
        let tools = columns.get(TOOLS);
        if lists(&[prompt, completion]) {
            if columns.are_chosen() {
                return Self::turns(columns, prompt, completion).with_tools(tools);
            }
            // TRL's columns, which `dataset` reads as a conversation.
            let are_of_trl = (prompt, completion) == ("prompt", "completion") && columns.have(&[prompt, completion]);
            return match are_of_trl {
                true => Self::nothing(Form::Conversations).reading(prompt).reading(completion).with_tools(tools),
                false => Self::nothing(Form::Unknown),
            };
        }
        let prompt = if has("instruction") && prompt == "input" { "instruction" } else { prompt };
        let mut user = required(columns.source(prompt));
        let context = ["context", "input"].into_iter().find(|name| has(name) && *name != prompt);
        if let Some(context) = context.map(|name| rows::column(columns.source(name))) {
            user = format!("{user} + ('\\n' ~ {context} if {context} else '')");
        }
        let found = Self::answered(columns, lists, &user, completion).reading(prompt);
        context.into_iter().fold(found, Self::reading).with_tools(tools)
    }

    /// A prompt and its response, both lists of turns, of which those of the prompt are not trained: as `dataset` reads
    /// TRL's columns.
    fn turns(columns: &Columns, prompt: &str, completion: &str) -> Self {
        let mut found = Self::nothing(Form::Conversations);
        let (before, after) = (required(columns.source(prompt)), required(columns.source(completion)));
        let is_one = |key: &str| format!("(turn['{key}']|default('')) in ['assistant', 'gpt', 'model']");
        let is_answer = [is_one("role"), is_one("from")].join(" or ");
        let text = format!(
            "{{% set kept = namespace(turns=[]) %}}{{% for turn in {before} %}}{{% set kept.turns = kept.turns + \
             [dict(turn, weight=0) if {is_answer} else turn] %}}{{% endfor %}}{{{{ (kept.turns + {after})|tojson }}}}"
        );
        found.map = Some(json!({ "messages": text }));
        rows::messages(&mut found.parameters, "messages");
        found.parameters.remove("turn_order");
        found.reading(prompt).reading(completion)
    }

    /// A prompt and its answer as the turns of a user and an assistant, for the model's chat template, behind the
    /// system message and the earlier turns that there are.
    fn answered(columns: &Columns, lists: &dyn Fn(&[&str]) -> bool, user: &str, completion: &str) -> Self {
        let mut found = Self::nothing(Form::Conversations);
        let assistant = required(columns.source(completion));
        let named = |names: &[&'static str]| names.iter().copied().find(|name| columns.get(name).is_some());
        let (system, history) = (named(&["system", "system_prompt"]), named(&["history"]));
        let message = system.map(|system| rows::column(columns.source(system)));
        match history.filter(|history| lists(&[history])) {
            Some(history) => {
                let earlier = rows::column(columns.source(history));
                rows::conversation_after(&mut found.parameters, &earlier, message.as_deref(), user, &assistant);
                found = found.reading(history);
            }
            None => rows::conversation(&mut found.parameters, message.as_deref(), user, &assistant),
        }
        system.into_iter().fold(found, Self::reading).reading(completion)
    }

    fn reading(mut self, name: &str) -> Self {
        self.read.push(name.to_owned());
        self
    }

    /// Gives the conversations the tools of their column, where they have one.
    fn with_tools(mut self, column: Option<&str>) -> Self {
        let Some(column) = column else { return self };
        rows::tools(&mut self.parameters, column);
        self.reading(TOOLS)
    }

    /// The parameters as a part of a mapping.
    fn written(&self) -> Option<String> {
        let mut columns = self.parameters.get("column_map").cloned();
        for (name, column) in &self.renamed {
            columns.get_or_insert_with(|| json!({}))[name] = json!(column);
        }
        let one = |(name, value): (&str, Option<&Json>)| Some(format!("{name}: {}", write::flow(value?)));
        let all = [("map", self.parameters.get("map").or(self.map.as_ref())), ("column_map", columns.as_ref())];
        let written: Vec<String> = all.into_iter().filter_map(one).collect();
        (!written.is_empty()).then(|| written.join(", "))
    }
}

/// The value of a column that every row must have.
fn required(name: &str) -> String {
    format!("row[{}]", json!(name))
}

/// The first column that holds a list, of one object in a `.json` file.
fn field(data: &str, places: &Places, columns: &[String]) -> Option<String> {
    let files = places.files_of_rows(data);
    let is_json = matches!(files.as_slice(), [file] if file.form.format == Format::Json);
    columns.iter().find(|column| is_json && places.holds_lists(data, &[column])).cloned()
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
        Found::of(&Columns::of(&columns), &|names| names.iter().any(|name| lists.contains(name)))
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
        let judged = "column_map: { completion: Completion, label: Label }";
        assert_eq!(form(&["prompt", "Completion", "Label"]), (Form::Judged, Some(judged.to_owned())));
        let text = Some("column_map: { text: TEXT }".to_owned());
        assert_eq!(form(&["TEXT"]), (Form::Text, text));
        let (alpaca, parameters) = form(&["Instruction", "Input", "Output"]);
        assert_eq!(alpaca, Form::Conversations);
        assert!(parameters.is_some_and(|parameters| parameters.contains("row[\\\"Instruction\\\"]")));
        let (alpaca, parameters) = form(&["instruction", "input", "output"]);
        assert_eq!(alpaca, Form::Conversations);
        assert!(parameters.is_some_and(|parameters| parameters.contains("'assistant'")));
    }

    /// Each with the columns of the data, those that are chosen, the form, and what `dataset` is told.
    #[test]
    fn dataset_is_told_of_chosen_columns_whatever_they_are_called() {
        for (data, chosen, form, told) in [
            (&["messages", "text"][..], &["text=text"][..], Form::Text, "column_map: { text: text }"),
            (
                &["chosen", "rejected", "messages"],
                &["messages=messages"],
                Form::Conversations,
                "column_map: { messages: messages }",
            ),
            (
                &["messages", "chosen", "rejected"],
                &["chosen=chosen", "rejected=rejected"],
                Form::Pairs,
                "column_map: { chosen: chosen, rejected: rejected }",
            ),
            (
                &["prompt", "completion", "label", "messages"],
                &["response=completion", "label=label", "prompt=prompt"],
                Form::Judged,
                "column_map: { completion: completion, label: label, prompt: prompt }",
            ),
        ] {
            let (columns, found) = choice(data, chosen, &[]);
            assert_eq!((found.form, found.written().as_deref()), (form, Some(told)), "{chosen:?}");
            assert!(found.contradicted(&columns).is_none(), "{chosen:?}");
        }
        // A prompt of the data is read, too.
        let (columns, found) = choice(&["prompt", "chosen", "rejected"], &["chosen=chosen", "rejected=rejected"], &[]);
        assert!(found.unread(&columns, &columns.seen()).is_empty(), "{found:?}");
        let (columns, found) = choice(&["chosen", "rejected", "c", "l"], &["completion=c", "label=l"], &[]);
        assert!(found.contradicted(&columns).is_some(), "{found:?}");
        let (_, found) = choice(&["messages", "prompt", "b"], &["prompt=prompt", "response=b"], &["prompt", "b"]);
        assert!(found.written().is_some_and(|told| told.contains("weight=0") && told.contains("messages: messages")));
    }

    fn choice(data: &[&str], chosen: &[&str], lists: &[&str]) -> (Columns, Found) {
        let data: Vec<String> = data.iter().map(|&column| column.to_owned()).collect();
        let chosen: Vec<Chosen> = chosen.iter().map(|text| text.parse().unwrap()).collect();
        let columns = Columns::chosen(&chosen, &data).unwrap();
        let found = Found::of(&columns, &|names| names.iter().any(|name| lists.contains(name)));
        (columns, found)
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
