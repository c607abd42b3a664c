//! axolotl's data sets: rows of each type as the rows of a `dataset` stage.

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use serde_json::json;

use super::keys::{dataset_keys, prompter_keys};
use crate::import::key::Keys;
use crate::import::parameters::{Note, Parameters};
use crate::import::places::Places;
use crate::import::preference;
use crate::import::reading::Reading;
use crate::import::rows;

/// What rows are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Of Alpaca's columns.
    Prompts,
    /// Of a prompt of the user's own.
    OwnPrompts,
    Conversations,
    Text,
    Preferences,
}

pub(super) fn datasets(
    reading: &mut Reading<'_>,
    name: &'static str,
    root: &Node,
    kinds: &mut Vec<Kind>,
    places: &Places,
) -> Vec<Parameters> {
    let Some(Value::List(items)) = root.get(name).map(|node| &node.value) else {
        if name == "datasets" && reading.is_given("pretraining_dataset") {
            return texts(reading, root, kinds, places);
        }
        if name == "datasets" {
            reading.require(name, Span { len: 0, ..root.span });
        }
        return Vec::new();
    };
    if !reading.is_reported(name) {
        reading.nothing(name, "a stage for each");
    }
    let found = items.iter().map(|item| dataset(reading, item, kinds, places)).collect();
    if kinds.iter().any(|kind| *kind != kinds[0]) {
        reading.missing(name, "rows of different kinds: here all rows of a training are of one");
    }
    found
}

/// Rows of plain text: names of data sets, or mappings.
fn texts(reading: &mut Reading<'_>, root: &Node, kinds: &mut Vec<Kind>, places: &Places) -> Vec<Parameters> {
    let items = match root.get("pretraining_dataset") {
        Some(Node { value: Value::List(items), .. }) => items.iter().collect(),
        Some(node) => vec![node],
        None => Vec::new(),
    };
    reading.nothing("pretraining_dataset", "a stage for each");
    kinds.push(Kind::Text);
    let one = |reading: &mut Reading<'_>, item: &Node| {
        if let Some(path) = item.to_json().as_str() {
            let mut rows = Parameters::default();
            match rows::source(path, "", places) {
                Ok(source) => rows.set("source", source, Note::Given),
                Err(reason) => reading.missing("pretraining_dataset", reason),
            }
            rows::text(&mut rows, "text");
            return rows;
        }
        let keys = Keys::default()
            .read("path", "source")
            .read("data_files", "source")
            .same("name", "config")
            .same("split=train", "split")
            .read("text_column=text", "column_map.text")
            .nothing("plain text", &["type"])
            .nothing("rows come from files of data; no code of a data set runs", &["trust_remote_code"])
            .missing("not supported by `dataset`", &["ds_type", "skip"]);
        let mut below = reading.below(keys, item);
        below.require("path", item.span);
        let path = below.text("path").unwrap_or_default();
        let is_local = rows::put_loaded(&mut below, "path", &path, places);
        rows::without_hub(&mut below, is_local, &["name"]);
        let column = below.text("text_column").unwrap_or_default();
        rows::text(&mut below.parameters, &column);
        below.finish();
        reading.take_below("rows", below)
    };
    items.into_iter().map(|item| one(reading, item)).collect()
}

fn dataset(reading: &mut Reading<'_>, item: &Node, kinds: &mut Vec<Kind>, places: &Places) -> Parameters {
    let mut below = reading.below(dataset_keys(), item);
    below.require("path", item.span);
    let path = below.text("path").unwrap_or_default();
    let files = below.texts("data_files");
    let is_local = rows::put_loaded(&mut below, "path", &path, places);
    rows::without_hub(&mut below, is_local, &["name", "revision"]);
    below.nothing("ds_type", "the extension of the file determines it");
    below.nothing("chat_template", "`chat_template` of the stage `tokens`");
    let kind = match item.get("type").map(|kind| kind.value.clone()) {
        Some(Value::Map(_)) => {
            prompter(&mut below, item);
            Some(Kind::OwnPrompts)
        }
        _ => {
            let kind = below.text("type").unwrap_or_default();
            let of_pairs = if reading.text("rl").as_deref() == Some("kto") { judged } else { preferences };
            of_pairs(&mut below, &kind).or_else(|| of_type(&mut below, &kind, files.first().unwrap_or(&path), places))
        }
    };
    match kind {
        Some(kind) => kinds.push(kind),
        None if !below.is_given("type") => below.require("type", item.span),
        None => {
            let kind = below.text("type").unwrap_or_default();
            let what =
                format!("rows of the type `{kind}`: alpaca, chat_template, completion and a mapping are known here");
            below.missing("type", what);
        }
    }
    below.finish();
    reading.take_below("rows", below)
}

/// Rows of one judged response, in ChatML's or Llama 3's words.
fn judged(below: &mut Reading<'_>, kind: &str) -> Option<Kind> {
    let (words, form) = kind.split_once('.')?;
    if !matches!(words, "chatml" | "llama3") {
        return None;
    }
    let user = match form {
        "ultra" | "prompt_pairs" => "prompt",
        "intel" => "question",
        "argilla" => "instruction",
        _ => return None,
    };
    let [system, user, completion] = ["system", user, "completion"].map(rows::column);
    preference::judged(&mut below.parameters, Some(&system), &user, &completion);
    for name in ["field_messages", "field_chosen", "field_rejected"] {
        below.nothing(name, "the columns of the stage");
    }
    below.nothing("type", "rows of judged responses");
    Some(Kind::Preferences)
}

/// Rows of preferences: types of prompts in ChatML's or Llama 3's words, and conversations.
fn preferences(below: &mut Reading<'_>, kind: &str) -> Option<Kind> {
    let (words, form) = kind.split_once('.')?;
    let (chosen, rejected) = (rows::column("chosen"), rows::column("rejected"));
    let last = |column: &str| format!("row['{column}'][1]['content']");
    let system = rows::column("system");
    let parameters = &mut below.parameters;
    match (words, form) {
        ("chat_template", "argilla_chat") => {
            let [chosen, rejected] =
                ["field_chosen", "field_rejected"].map(|name| below.text(name).unwrap_or_default());
            let (chosen, rejected) = (format!("row[{}]", json!(chosen)), format!("row[{}]", json!(rejected)));
            let map = json!({
                "prompt": format!("{{{{ {chosen}[:-1] }}}}"), "chosen": format!("{{{{ {chosen}[-1:] }}}}"),
                "rejected": format!("{{{{ {rejected}[-1:] }}}}"),
            });
            below.parameters.set("map", map, Note::Given);
            let columns = json!({ "prompt": "prompt", "chosen": "chosen", "rejected": "rejected" });
            below.parameters.set("column_map", columns, Note::Given);
            preference::as_they_are(&mut below.parameters);
            turns(below);
        }
        ("chat_template", "default") => {
            let column = |below: &mut Reading<'_>, name: &'static str| below.text(name).unwrap_or_default();
            let [messages, chosen, rejected] =
                ["field_messages", "field_chosen", "field_rejected"].map(|name| column(below, name));
            let map = json!({ "prompt": messages, "chosen": chosen, "rejected": rejected });
            below.parameters.set("column_map", map, Note::Given);
            preference::as_they_are(&mut below.parameters);
            turns(below);
        }
        ("chatml" | "llama3", "intel") => {
            preference::pair(parameters, Some(&system), &rows::column("question"), [&chosen, &rejected]);
        }
        ("chatml" | "llama3", "icr") => {
            preference::pair(parameters, Some(&system), &rows::column("input"), [&chosen, &rejected]);
        }
        ("chatml" | "llama3", "prompt_pairs") => {
            preference::pair(parameters, Some(&system), &rows::column("prompt"), [&chosen, &rejected]);
        }
        ("chatml" | "llama3", "ultra") => {
            let responses = [last("chosen"), last("rejected")];
            preference::pair(
                parameters,
                Some(&system),
                &rows::column("prompt"),
                responses.each_ref().map(String::as_str),
            );
        }
        ("chatml" | "llama3", "argilla_chat") => {
            let responses = [last("chosen"), last("rejected")];
            let prompt = "row['chosen'][0]['content']";
            preference::pair(parameters, None, prompt, responses.each_ref().map(String::as_str));
        }
        _ => return None,
    }
    for name in ["field_messages", "field_chosen", "field_rejected"] {
        below.nothing(name, "the columns of the stage");
    }
    below.nothing("type", "rows of preferences");
    Some(Kind::Preferences)
}

/// The template of the words that the types of preferences are in.
pub(super) fn words(root: &Node) -> Option<&'static str> {
    let Some(Value::List(items)) = root.get("datasets").map(|node| &node.value) else { return None };
    let kind = items.iter().find_map(|item| item.get("type")?.to_json().as_str().map(str::to_owned))?;
    match kind.split_once('.')?.0 {
        "chatml" => Some("chatml"),
        "llama3" => Some("llama3"),
        _ => None,
    }
}

/// The template that the data sets name, where they agree on one.
pub(super) fn of_datasets(reading: &mut Reading<'_>, root: &Node) -> Option<String> {
    let Some(Value::List(items)) = root.get("datasets").map(|node| &node.value) else { return None };
    let name = |item: &Node| item.get("chat_template").and_then(|name| name.to_json().as_str().map(str::to_owned));
    let names: Vec<Option<String>> = items.iter().map(name).collect();
    let first = names.first()?.clone();
    if names.iter().all(|name| *name == first) {
        return first;
    }
    reading.missing("datasets", "they have several chat templates: here `tokenize` has one for all rows");
    None
}

fn of_type(below: &mut Reading<'_>, kind: &str, data: &str, places: &Places) -> Option<Kind> {
    match kind {
        "alpaca" | "alpaca:instruct" => {
            below.put("type", "template", "alpaca");
            below.parameters.set("column_map", json!({ "output": "output" }), Note::Given);
            Some(Kind::Prompts)
        }
        "completion" | "pretrain" => {
            let field = below.text("field").unwrap_or_else(|| "text".to_owned());
            rows::text(&mut below.parameters, &field);
            below.nothing("type", "plain text");
            Some(Kind::Text)
        }
        "chat_template" | "sharegpt" => {
            conversations(below, kind, data, places);
            Some(Kind::Conversations)
        }
        _ => None,
    }
}

fn conversations(below: &mut Reading<'_>, kind: &str, data: &str, places: &Places) {
    let default = if kind == "sharegpt" { "conversations".to_owned() } else { "messages".to_owned() };
    let given = below.is_given("field_messages");
    let field = below.text("field_messages").filter(|_| given).unwrap_or(default);
    rows::messages(&mut below.parameters, &field);
    below.nothing("type", "conversations");
    tools(below, data, places);
    turns(below);
    let roles = below.texts("roles_to_train");
    match roles.iter().all(|role| matches!(role.as_str(), "assistant" | "gpt")) {
        true => below.nothing("roles_to_train", "`train_on` of the stage `tokens`"),
        false => {
            below.missing("roles_to_train", "`tokenize` trains on assistants' turns, on the last, or on everything")
        }
    }
    for name in ["train_on_eos", "train_on_eot"] {
        match below.text(name).as_deref() {
            None | Some("turn") => below.nothing(name, "the end of a trained turn is trained here, too"),
            Some("all") => below.differs(name, "the ends of all turns are trained there, here those of trained turns"),
            Some(_) => below.missing(name, "the end of a trained turn is always trained here, and no other"),
        }
    }
}

/// The tools of each conversation, whose column axolotl looks for under the name `tools` without being told.
fn tools(below: &mut Reading<'_>, data: &str, places: &Places) {
    let column = below.text("field_tools").unwrap_or_default();
    let is_there = places.columns(data).map(|columns| columns.contains(&column));
    match (below.is_given("field_tools"), is_there) {
        (true, _) | (false, Some(true)) => {
            rows::tools(&mut below.parameters, &column);
            let columns = below.parameters.get("column_map").cloned().unwrap_or_default();
            below.put("field_tools", "column_map", columns);
        }
        (false, Some(false)) => {}
        (false, None) => below.differs("field_tools", rows::unseen_tools(data)),
    }
}

/// The names that messages and their roles have, where they are others than those that are known here.
fn turns(below: &mut Reading<'_>) {
    let mapping = match below.value("message_property_mappings") {
        Value::Map(entries) => {
            entries.iter().filter_map(|entry| entry.value.to_json().as_str().map(str::to_owned)).collect()
        }
        _ => vec![
            below.text("message_field_role").unwrap_or_default(),
            below.text("message_field_content").unwrap_or_default(),
        ],
    };
    match mapping.iter().all(|name| matches!(name.as_str(), "role" | "content" | "from" | "value")) {
        true => below.nothing("message_property_mappings", "the names of messages are known"),
        false => {
            below.missing("message_property_mappings", "messages have `role` and `content` here, or `from` and `value`")
        }
    }
    for name in ["message_field_role", "message_field_content"] {
        below.nothing(name, "`message_property_mappings` says whether the names of messages are known");
    }
    let Value::Map(roles) = below.value("roles") else { return };
    let known = |role: &str| match role {
        "human" | "user" => "user",
        "gpt" | "chatgpt" | "bing" | "bard" | "assistant" => "assistant",
        "observation" | "function_response" | "tool" => "tool",
        "system" => "system",
        _ => "",
    };
    let odd = roles.iter().find_map(|entry| {
        let names = match &entry.value.value {
            Value::List(items) => items.iter().filter_map(|item| item.to_json().as_str().map(str::to_owned)).collect(),
            value => vec![Node { span: Span::default(), value: value.clone() }.to_json().as_str()?.to_owned()],
        };
        names.into_iter().find(|name| known(name) != entry.key)
    });
    match odd {
        Some(name) => below.missing("roles", format!("`{name}`: the roles of ShareGPT are known here, by its names")),
        None => below.nothing("roles", "the roles of ShareGPT are known"),
    }
}

/// A prompt of the user's own.
fn prompter(below: &mut Reading<'_>, item: &Node) {
    let Some(node) = item.get("type") else { return };
    let mut prompter = below.below(prompter_keys(), node);
    let text = |prompter: &mut Reading<'_>, name: &'static str| prompter.text(name);
    let instruction = text(&mut prompter, "field_instruction").unwrap_or_default();
    let input = text(&mut prompter, "field_input").unwrap_or_default();
    let output = text(&mut prompter, "field_output").unwrap_or_default();
    let format = text(&mut prompter, "format").unwrap_or_else(|| "{instruction} {input} ".to_owned());
    let without = text(&mut prompter, "no_input_format").unwrap_or_else(|| "{instruction} ".to_owned());
    // The prompt is for rows without the column.
    let column = text(&mut prompter, "field_system").unwrap_or_default();
    let otherwise = quoted(&text(&mut prompter, "system_prompt").unwrap_or_default());
    let system = format!("(row[{}]|default({otherwise})|default('', true))", json!(column));
    let around = text(&mut prompter, "system_format").unwrap_or_default();
    let filled = |format: &str| {
        let names = [
            ("{instruction}", rows::column(&instruction)),
            ("{input}", rows::column(&input)),
            ("{system}", system.clone()),
        ];
        fill(format, &names)
    };
    let system = format!("({} if {system} else '')", filled(&around));
    let prompt = format!("{system} ~ ({} if {} else {})", filled(&format), rows::column(&input), filled(&without));
    below.parameters.set("map", json!({ "prompt": format!("{{{{ {prompt} }}}}") }), Note::Given);
    below.parameters.set("column_map", json!({ "input": "prompt", "output": output }), Note::Given);
    below.parameters.set("template", "none", Note::Given);
    for name in ["field_instruction", "field_input", "field_system", "system_prompt", "system_format"] {
        prompter.consumed(name, "map");
    }
    for (name, path) in [("format", "map"), ("no_input_format", "map"), ("field_output", "column_map")] {
        prompter.consumed(name, path);
    }
    prompter.finish();
    below.take(prompter);
    below.nothing("type", "a separate prompt");
}

/// A text as an expression.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n"))
}

/// A format of Python with its names filled in, as an expression.
fn fill(format: &str, names: &[(&str, String)]) -> String {
    let mut pieces = Vec::new();
    let mut rest = format;
    while let Some((at, (name, value))) =
        names.iter().filter_map(|entry| Some((rest.find(entry.0)?, entry))).min_by_key(|(at, _)| *at)
    {
        if at > 0 {
            pieces.push(quoted(&rest[..at]));
        }
        pieces.push(value.clone());
        rest = &rest[at + name.len()..];
    }
    if !rest.is_empty() || pieces.is_empty() {
        pieces.push(quoted(rest));
    }
    format!("({})", pieces.join(" ~ "))
}
