//! LLaMA-Factory's `dataset_info.json`: what the names of data sets stand for, and rows of each form as the rows of a
//! `dataset` stage.

use std::fs;

use engine::file::parse::parse;
use engine::file::problem::Problem;
use engine::file::source::Sources;
use engine::file::tree::{Entry, Node, Value};
use serde_json::json;

use super::keys::entry_keys;
use crate::import::parameters::{Note, Parameters};
use crate::import::places::Places;
use crate::import::preference;
use crate::import::reading::Reading;
use crate::import::rows;

/// `dataset_info.json`, as far as it could be read.
pub(super) struct Info {
    root: Option<Node>,
    /// Where it is, or should be.
    path: String,
    folder: String,
}

impl Info {
    pub(super) fn read(reading: &mut Reading<'_>, places: &Places, sources: &mut Sources) -> Self {
        let folder = reading.text("dataset_dir").unwrap_or_default();
        reading.nothing("dataset_dir", "where `dataset_info.json` is");
        let path = format!("{}/dataset_info.json", folder.trim_end_matches('/'));
        let text = places.find(&path).and_then(|path| fs::read_to_string(path).ok());
        let root = text.and_then(|text| {
            let source = sources.add(&path, text.as_str());
            match parse(source, &text, &mut reading.problems) {
                Ok(root) => Some(root),
                Err(problem) => {
                    reading.problems.push(*problem);
                    None
                }
            }
        });
        Self { root, path, folder }
    }

    /// The path of a file that is named there.
    fn path_of(&self, file: &str) -> String {
        format!("{}/{file}", self.folder.trim_end_matches('/'))
    }

    pub(super) fn datasets(
        &self,
        reading: &mut Reading<'_>,
        name: &'static str,
        is_pretraining: bool,
        hub: &str,
        places: &Places,
    ) -> Vec<Parameters> {
        let Some(given) = reading.entry(name) else { return Vec::new() };
        let names: Vec<String> = reading.texts(name).into_iter().filter(|name| !name.is_empty()).collect();
        reading.nothing(name, "a stage for each");
        let Some(root) = &self.root else {
            let message = format!("`{}` does not exist, which defines `{}`", self.path, names.join("`, `"));
            let problem = Problem::error("file-missing", given.value.span, message, "names in that file");
            let help = "start in the folder that LLaMA-Factory is started in, or set `dataset_dir`";
            reading.problems.push(problem.with_help(help));
            return Vec::new();
        };
        let limit = reading.whole("max_samples");
        let mut found = Vec::new();
        for dataset in names {
            let Some(node) = root.get(&dataset) else {
                let message = format!("`{}` has no data set `{dataset}`", self.path);
                let known = match &root.value {
                    Value::Map(entries) => entries.as_slice(),
                    _ => &[],
                };
                let help = engine::suggest::nearest(&dataset, known.iter().map(|entry: &Entry| entry.key.as_str()));
                let help = help.map(|name| format!("did you mean `{name}`?"));
                let problem = Problem::error("unknown-value", given.value.span, message, "not there");
                reading.problems.push(problem.with_help_if(help));
                continue;
            };
            let mut rows = self.dataset(reading, node, is_pretraining, hub, places);
            if let Some(limit) = limit {
                reading.nothing("max_samples", "`limit` of each data set");
                if rows.get("limit").and_then(serde_json::Value::as_i64).is_none_or(|own| limit < own) {
                    rows.set("limit", limit, Note::Given);
                }
            }
            found.push(rows);
        }
        found
    }

    fn dataset(
        &self,
        reading: &mut Reading<'_>,
        node: &Node,
        is_pretraining: bool,
        hub: &str,
        places: &Places,
    ) -> Parameters {
        let node = node.clone();
        // The tree is that of another file than the configuration's, so it is read with a reading of its own.
        let entries = match &node.value {
            Value::Map(entries) => entries.as_slice(),
            _ => &[],
        };
        let mut below = Reading::new(reading.tool.clone(), entry_keys(), entries);
        let is_local = !below.is_given("hf_hub_url") && !below.is_given("ms_hub_url");
        match (below.text("file_name"), below.text("hf_hub_url"), below.text("ms_hub_url")) {
            (_, Some(name), _) if hub.is_empty() => rows::put_source(&mut below, "hf_hub_url", &name, "", places),
            (_, _, Some(name)) => rows::put_source(&mut below, "ms_hub_url", &name, "modelscope:", places),
            (_, Some(name), _) => rows::put_source(&mut below, "hf_hub_url", &name, "", places),
            (Some(file), ..) => {
                below.put("file_name", "source", places.written(&self.path_of(&file)));
            }
            (None, None, None) => below.require("file_name", node.span),
        }
        for name in ["file_name", "hf_hub_url", "ms_hub_url"] {
            if !below.is_reported(name) {
                below.nothing(name, "another source of the same rows comes first");
            }
        }
        rows::without_hub(&mut below, is_local, &["subset"]);
        columns(&mut below, &node, is_pretraining);
        if let Some(samples) = below.whole("num_samples") {
            below.parameters.need("shuffle", true, "`num_samples` draws rows at random.");
            let rows = below.text("file_name").filter(|_| is_local).and_then(|file| places.count(&self.path_of(&file)));
            match rows.is_some_and(|rows| rows as i64 >= samples) {
                true => below.put("num_samples", "limit", samples),
                false => {
                    let reason = format!(
                        "there rows are repeated where there are fewer, so that there are {samples}; here each is used once"
                    );
                    below.put_differing("num_samples", "limit", samples, reason);
                }
            }
        }
        below.finish();
        reading.take_below("rows", below)
    }
}

fn columns(below: &mut Reading<'_>, node: &Node, is_pretraining: bool) {
    let of = |group: &str, name: &str| node.get(group)?.get(name)?.to_json().as_str().map(str::to_owned);
    let has_columns = node.get("columns").is_some();
    // Where columns are named, those that are not are none; otherwise all have their usual names.
    let column = |name: &str, usual: &str| match of("columns", name) {
        Some(column) => Some(column),
        None if has_columns || usual.is_empty() => None,
        None => Some(usual.to_owned()),
    };
    let other = ["images", "videos", "audios"];
    if of("columns", "tools").is_some() {
        let reason = "`tools`: calls of functions are turns of their own there; here they are `tool_calls` of an \
            assistant's turn, with `column_map: { tools: … }`";
        below.missing("columns", reason);
    } else if let Some(name) = other.iter().find(|name| of("columns", name).is_some()) {
        below.missing("columns", format!("`{name}`: only text is supported"));
    } else {
        below.nothing("columns", "the columns of the stage");
    }
    let prompt = column("prompt", "instruction");
    if is_pretraining {
        rows::text(&mut below.parameters, &prompt.unwrap_or_else(|| "text".to_owned()));
        return;
    }
    match below.text("formatting").as_deref() {
        Some("alpaca") => {
            let (prompt, query) = (prompt.unwrap_or_default(), column("query", "input"));
            let user = query.map_or_else(|| rows::column(&prompt), |query| rows::instruction(&prompt, &query));
            let response = rows::column(&column("response", "output").unwrap_or_default());
            let system = column("system", "").map(|name| rows::column(&name));
            if column("history", "").is_some() {
                below.missing("columns", "`history`: earlier turns in a list of pairs; write them as `messages`");
            }
            if below.flag("ranking") {
                let [chosen, rejected] =
                    ["chosen", "rejected"].map(|name| rows::column(&column(name, name).unwrap_or_default()));
                preference::pair(&mut below.parameters, system.as_deref(), &user, [&chosen, &rejected]);
            } else {
                rows::conversation(&mut below.parameters, system.as_deref(), &user, &response);
                label(below, column("kto_tag", ""));
            }
        }
        Some("sharegpt" | "openai") => {
            let messages = column("messages", "conversations").unwrap_or_else(|| "conversations".to_owned());
            rows::messages(&mut below.parameters, &messages);
            if below.flag("ranking") {
                let [chosen, rejected] = ["chosen", "rejected"].map(|name| column(name, name).unwrap_or_default());
                let map = json!({ "prompt": messages, "chosen": chosen, "rejected": rejected });
                below.parameters.set("column_map", map, Note::Given);
            }
            label(below, column("kto_tag", ""));
            let tags = node.get("tags").map(Node::to_json).unwrap_or_default();
            let is_known = |tag: &serde_json::Value| {
                let known = ["role", "content", "from", "value", "user", "human", "assistant", "gpt", "system"];
                tag.as_str().is_some_and(|tag| known.contains(&tag) || matches!(tag, "observation" | "tool"))
            };
            let unknown = tags.as_object().and_then(|tags| tags.iter().find(|(_, tag)| !is_known(tag)));
            match unknown {
                None => below.nothing("tags", "only ShareGPT's and OpenAI's keys are supported"),
                Some((name, tag)) => {
                    below.missing("tags", format!("`{name}: {tag}`: only ShareGPT's and OpenAI's keys are supported"));
                }
            }
            if column("system", "").is_some() {
                below.missing("columns", "`system`: a separate column, next to the conversation");
            }
        }
        other => {
            let other = other.unwrap_or_default().to_owned();
            below.missing("formatting", format!("`{other}`: alpaca, sharegpt and openai are known"));
        }
    }
}

/// The column that says whether a conversation's last turn is desirable.
fn label(below: &mut Reading<'_>, column: Option<String>) {
    let messages = below.parameters.get("column_map").and_then(|map| map.get("messages")).cloned();
    if let (Some(messages), Some(column)) = (messages, column) {
        below.parameters.set("column_map", json!({ "messages": messages, "label": column }), Note::Given);
    }
}
