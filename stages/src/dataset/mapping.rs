//! From the columns of the data to rows: which column is what, and whether a value can be used.

use std::collections::BTreeMap;

use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::suggest;
use serde_json::{Map, Value};

use super::DatasetParams;
use crate::artifact::{Message, Row, RowsFacts, Shape};
use crate::prompt::Template;

/// The key of `column_map` for the response, and for the only placeholder of a template that has one.
const OUTPUT: &str = "output";
const INPUT: &str = "input";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Required,
    /// A row without it has an empty text there.
    Optional,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Column {
    /// What rows call it.
    name: String,
    /// What the data calls it.
    source: String,
    need: Need,
}

/// How records become rows.
#[derive(Debug)]
pub(super) struct RowMapping {
    pub facts: RowsFacts,
    /// The columns to read.
    pub wanted: Vec<String>,
    columns: Vec<Column>,
}

/// The template that was asked for; `none` is the same as no word about it.
fn template(params: &DatasetParams) -> Option<&Template> {
    params.template.as_ref().map(|choice| &choice.0).filter(|template| template.name != "none")
}

/// The only placeholder of a template, which `input` stands for too, as in newer torchtune.
fn only_placeholder(template: &Template) -> Option<String> {
    let mut names = template.placeholders();
    (names.len() == 1).then(|| names.remove(0))
}

/// Problems with `column_map` that need no data to be seen.
pub(super) fn check_names(params: &DatasetParams, span: Span) -> Vec<Problem> {
    let known: Vec<String> = match template(params) {
        Some(template) => {
            let also = only_placeholder(template).map(|_| INPUT.to_owned());
            template.placeholders().into_iter().chain(also).chain([OUTPUT.to_owned()]).collect()
        }
        None => ["messages", "text", INPUT, OUTPUT].map(str::to_owned).into(),
    };
    let unknown = params.column_map.keys().filter(|key| !known.contains(key));
    unknown
        .map(|key| {
            let message = format!("`column_map` has `{key}`, which the template does not use");
            Problem::error("unknown-key", span, message, "of this stage")
                .with_help_if(suggest::help(key, "name", &known))
        })
        .collect()
}

impl RowMapping {
    /// Finds out what rows of these columns are.
    pub(super) fn plan(params: &DatasetParams, columns: &[String], file: &str) -> Result<Self, StageError> {
        if columns.is_empty() {
            return Err(StageError::bad_data(format!("`{file}` is empty: it has neither columns nor rows")));
        }
        let has = |column: &str| columns.iter().any(|known| known == column);
        let mapped = |name: &str| params.column_map.get(name).cloned();
        let names_key = |name: &str| params.column_map.contains_key(name);
        let mapping = if let Some(template) = template(params) {
            Self::prompt(params, template.clone(), columns)
        } else if names_key("messages") || (!names_key(INPUT) && !names_key("text") && has("messages")) {
            Self::single(RowsFacts::messages(), mapped("messages").unwrap_or_else(|| "messages".to_owned()))
        } else if params.column_map.is_empty() && has("conversations") {
            Self::single(RowsFacts::messages(), "conversations".to_owned())
        } else if names_key("text") || (params.column_map.is_empty() && has("text") && !has(OUTPUT)) {
            Self::single(RowsFacts::text(), mapped("text").unwrap_or_else(|| "text".to_owned()))
        } else if names_key(INPUT) || names_key(OUTPUT) || (has(INPUT) && has(OUTPUT) && !has("instruction")) {
            let template = Template::named("none").expect("`none` is a template");
            Self::prompt(params, template, columns)
        } else {
            return Err(unclear(columns, file));
        };
        mapping.check_columns(columns, file)?;
        Ok(mapping)
    }

    fn single(facts: RowsFacts, source: String) -> Self {
        let column = Column { name: facts.columns[0].clone(), source: source.clone(), need: Need::Required };
        Self { facts, wanted: vec![source], columns: vec![column] }
    }

    fn prompt(params: &DatasetParams, template: Template, columns: &[String]) -> Self {
        let mapped = |name: &str| params.column_map.get(name).cloned();
        let only = only_placeholder(&template);
        let source = |name: &str| {
            let is_only = only.as_deref() == Some(name);
            let input_in_data = is_only && !columns.iter().any(|column| column == name);
            let by_default = if input_in_data && columns.iter().any(|column| column == INPUT) { INPUT } else { name };
            mapped(name).or_else(|| mapped(INPUT).filter(|_| is_only)).unwrap_or_else(|| by_default.to_owned())
        };
        let required = template.required();
        let need = |name: &String| if required.contains(name) { Need::Required } else { Need::Optional };
        let mut all: Vec<Column> = template
            .placeholders()
            .into_iter()
            .map(|name| Column { source: source(&name), need: need(&name), name })
            .collect();
        // A template that uses `{output}` itself needs no second column of that name.
        if !all.iter().any(|column| column.name == OUTPUT) {
            let source = mapped(OUTPUT).unwrap_or_else(|| OUTPUT.to_owned());
            all.push(Column { name: OUTPUT.to_owned(), source, need: Need::Required });
        }
        let names = all.iter().map(|column| column.name.clone());
        let facts = RowsFacts::prompt(template, OUTPUT, names);
        let mut wanted: Vec<String> = all.iter().map(|column| column.source.clone()).collect();
        wanted.sort();
        wanted.dedup();
        Self { facts, wanted, columns: all }
    }

    fn check_columns(&self, columns: &[String], file: &str) -> Result<(), StageError> {
        let missing = |column: &&Column| column.need == Need::Required && !columns.contains(&column.source);
        let Some(column) = self.columns.iter().find(missing) else { return Ok(()) };
        let nearest = suggest::nearest(&column.source, columns);
        let mean = nearest.map_or_else(String::new, |name| format!(" (did you mean `{name}`?)"));
        let message =
            format!("`{file}` has no column `{}`, which `{}` is to come from{mean}", column.source, column.name);
        let help = format!("its columns are {}; name them in `column_map: {{{}: ...}}`", list(columns), column.name);
        Err(StageError::new(Cause::BadData, message).with_help(help))
    }

    /// A row, or what is wrong with the record.
    pub(super) fn row(&self, mut fields: Map<String, Value>) -> Result<Row, String> {
        match self.facts.shape {
            Shape::Prompt => {
                let columns: Result<BTreeMap<_, _>, String> =
                    self.columns.iter().map(|column| Ok((column.name.clone(), text_of(column, &fields)?))).collect();
                columns.map(Row::Columns)
            }
            Shape::Text => text_of(&self.columns[0], &fields).map(Row::Text),
            Shape::Messages => {
                let source = &self.columns[0].source;
                let value = fields.remove(source).ok_or_else(|| format!("column `{source}` is missing"))?;
                conversation(value).map(Row::Messages).map_err(|problem| format!("column `{source}` {problem}"))
            }
        }
    }
}

fn list(columns: &[String]) -> String {
    columns.iter().map(|column| format!("`{column}`")).collect::<Vec<_>>().join(", ")
}

fn unclear(columns: &[String], file: &str) -> StageError {
    let help = if columns.iter().any(|column| column == "instruction") {
        "set `template: alpaca` for instruction, input and output".to_owned()
    } else {
        "set `template:` and `column_map:`, or have `messages`, `text`, or `input` and `output`".to_owned()
    };
    StageError::bad_data(format!("what a row of `{file}` is cannot be told from its columns {}", list(columns)))
        .with_help(help)
}

fn text_of(column: &Column, fields: &Map<String, Value>) -> Result<String, String> {
    let source = &column.source;
    match (fields.get(source), column.need) {
        (Some(Value::String(text)), _) => Ok(text.clone()),
        (None | Some(Value::Null), Need::Optional) => Ok(String::new()),
        (None, Need::Required) => Err(format!("column `{source}` is missing")),
        (Some(Value::Null), Need::Required) => Err(format!("column `{source}` is null")),
        (Some(other), _) => Err(format!("column `{source}` holds {}, not text", describe(other))),
    }
}

fn describe(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A list of turns: `role` and `content`, or ShareGPT's `from` and `value`. A text may hold the list as JSON.
fn conversation(value: Value) -> Result<Vec<Message>, String> {
    let turns = match value {
        Value::Array(turns) => turns,
        Value::String(text) => {
            serde_json::from_str(&text).map_err(|_| "holds text that is no list of turns".to_owned())?
        }
        other => return Err(format!("holds {}, not a list of turns", describe(&other))),
    };
    if turns.is_empty() {
        return Err("holds a conversation without turns".to_owned());
    }
    turns
        .into_iter()
        .enumerate()
        .map(|(index, turn)| message(turn).map_err(|problem| format!("turn {}: {problem}", index + 1)))
        .collect()
}

fn message(turn: Value) -> Result<Message, String> {
    let Value::Object(mut turn) = turn else { return Err(format!("holds {}", describe(&turn))) };
    // Tables have every field in every row; those that are null say nothing.
    turn.retain(|_, value| !value.is_null());
    let role = match (turn.remove("role"), turn.remove("from")) {
        (Some(Value::String(role)), _) => role,
        (None, Some(Value::String(from))) => {
            if let Some(value) = turn.remove("value") {
                turn.insert("content".to_owned(), value);
            }
            sharegpt_role(from)
        }
        _ => return Err("it has no `role`".to_owned()),
    };
    let content = turn.remove("content").unwrap_or(Value::Null);
    match &content {
        Value::String(_) | Value::Array(_) => {}
        Value::Null if !turn.is_empty() => {}
        Value::Null => return Err("it has no `content`".to_owned()),
        other => return Err(format!("its `content` holds {}, not text", describe(other))),
    }
    Ok(Message { role, content, other: turn })
}

fn sharegpt_role(from: String) -> String {
    match from.as_str() {
        "human" => "user".to_owned(),
        "gpt" | "chatgpt" | "bing" | "bard" => "assistant".to_owned(),
        "observation" | "function_response" => "tool".to_owned(),
        _ => from,
    }
}
