//! What tools have in common about data sets: sources, and rows made into conversations.

use serde_json::{Value as Json, json};
use stages::hub::{Repository, RepositoryKind};

use super::parameters::{Note, Parameters};
use super::places::Places;
use super::reading::Reading;

/// Llama 3's turns without a system message of their own, as torchtune, LLaMA-Factory and axolotl write them.
pub(super) const LLAMA3: &str = "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}\
<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}\
<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}";

/// What `datasets` loads by the files that `data_files` names.
const LOADERS: &[&str] = &["json", "csv", "parquet", "arrow", "text"];

/// A source as a `dataset` stage names it.
///
/// # Errors
/// Fails with the reason where a stage can have no such source.
pub(super) fn source(name: &str, hub: &str, places: &Places) -> Result<String, String> {
    if places.is_path(name) || name.contains(['*', '?', '[']) {
        return Ok(places.written(name));
    }
    if LOADERS.contains(&name) {
        return Err(format!("`{name}` reads the files that `data_files` names, and it names none"));
    }
    // `datasets` finds some old names without their owner; the hub has them under another one.
    if !name.contains('/') {
        return Err(format!(
            "`{name}` is named without an owner: write `owner/name`, as on its page on the hub (`stanfordnlp/imdb` for \
             `imdb`)"
        ));
    }
    let written = format!("{hub}{name}");
    match Repository::parse(RepositoryKind::Dataset, &written) {
        Ok(_) => Ok(written),
        Err(_) => Err(format!("`{name}` is no path on this machine, and no data set of a hub is named so")),
    }
}

/// Carries the source of rows over, where a stage can have it.
pub(super) fn put_source(reading: &mut Reading<'_>, key: &'static str, name: &str, hub: &str, places: &Places) {
    match source(name, hub, places) {
        Ok(source) => reading.put(key, "source", source),
        Err(reason) => reading.missing(key, reason),
    }
}

/// Carries over what `datasets` loads: `name`, which `key` says, or the files of `data_files`. Returns whether these
/// are files of this machine.
pub(super) fn put_loaded(below: &mut Reading<'_>, key: &'static str, name: &str, places: &Places) -> bool {
    let (files, is_local) = (below.texts("data_files"), places.is_path(name));
    if !files.is_empty() && (is_local || LOADERS.contains(&name)) {
        let files: Vec<String> = files.iter().map(|file| places.written(file)).collect();
        let files = if let [file] = files.as_slice() { json!(file) } else { json!(files) };
        below.put("data_files", "source", files);
        below.nothing(key, "`data_files` names the files");
        return true;
    }
    put_source(below, key, name, "", places);
    if !files.is_empty() {
        below.missing("data_files", "files of a hub's data set are chosen by `split` and `config`");
    }
    is_local
}

/// Says of keys that choose among the data of a hub's data set that files of this machine have no such choice.
pub(super) fn without_hub(below: &mut Reading<'_>, is_local: bool, names: &[&'static str]) {
    for name in names.iter().copied() {
        if is_local && below.is_given(name) {
            below.nothing(name, "without effect on files, there and here");
        }
    }
}

/// The value of a column in an expression, also where a row lacks it or has null there.
pub(crate) fn column(name: &str) -> String {
    format!("(row[{}]|default('', true))", Json::from(name))
}

/// Rows as conversations, each of an optional system message, a user's and an assistant's turn: all are expressions.
pub(crate) fn conversation(rows: &mut Parameters, system: Option<&str>, user: &str, assistant: &str) {
    let turns = [system_turn(system), exchange(user, assistant)];
    made(rows, format!("{{{{ {} }}}}", joined(turns)));
}

/// The same with earlier turns, of which an expression is a list of pairs, each of a question and its answer.
pub(crate) fn conversation_after(
    rows: &mut Parameters,
    history: &str,
    system: Option<&str>,
    user: &str,
    assistant: &str,
) {
    let earlier = exchange("pair[0]", "pair[1]");
    let turns = joined([system_turn(system), "earlier.turns".to_owned(), exchange(user, assistant)]);
    let text = format!(
        "{{% set earlier = namespace(turns=[]) %}}{{% for pair in {history} or [] %}}{{% set earlier.turns = \
         earlier.turns + {earlier} %}}{{% endfor %}}{{{{ ({turns})|tojson }}}}"
    );
    made(rows, text);
}

/// The turns of a column behind the system message of another, unless they begin with one.
pub(crate) fn messages_after(rows: &mut Parameters, messages: &str, system: &str) {
    let first = |name: &str| format!("row[{}][0]['{name}']|default('')", Json::from(messages));
    let is_alone = format!("'system' not in [{}, {}]", first("role"), first("from"));
    let system = column(system);
    let turn = turn("system", &system);
    let turns = format!("([{turn}] if {system} and {is_alone} else []) + row[{}]", Json::from(messages));
    made(rows, format!("{{{{ {turns} }}}}"));
}

/// The turns of a column, of which those with `loss: false` have no weight.
pub(crate) fn messages_weighted(rows: &mut Parameters, messages: &str) {
    let column = format!("row[{}]", Json::from(messages));
    let text = format!(
        "{{% set kept = namespace(turns=[]) %}}{{% for turn in {column} %}}{{% set kept.turns = kept.turns + [dict(turn, \
         weight=0) if turn['loss']|default(true) == false else turn] %}}{{% endfor %}}{{{{ kept.turns|tojson }}}}"
    );
    made(rows, text);
    rows.need("turn_order", "any", "The tool accepts turns in any order.");
}

/// Gives conversations the tools of this column.
pub(crate) fn tools(rows: &mut Parameters, column: &str) {
    let mut map = rows.get("column_map").cloned().unwrap_or_else(|| json!({}));
    map["tools"] = json!(column);
    rows.set("column_map", map, Note::Given);
}

/// What is said of tools where rows are not at hand.
pub(super) fn unseen_tools(data: &str) -> String {
    format!(
        "the columns of `{data}` cannot be seen from here: there a column `tools` is trained with, where there is one; \
         here `column_map: {{ tools: tools }}` of the stage names it"
    )
}

fn made(rows: &mut Parameters, messages: String) {
    rows.set("map", json!({ "messages": messages }), Note::Given);
    rows.set("column_map", json!({ "messages": "messages" }), Note::Given);
}

fn turn(role: &str, content: &str) -> String {
    format!("{{'role': '{role}', 'content': {content}}}")
}

fn exchange(user: &str, assistant: &str) -> String {
    format!("[{}, {}]", turn("user", user), turn("assistant", assistant))
}

/// A list of a system message, or of none; empty where there is never one.
fn system_turn(system: Option<&str>) -> String {
    match system {
        None => String::new(),
        Some(text) if text.starts_with('\'') => format!("[{}]", turn("system", text)),
        Some(column) => format!("([{}] if {column} else [])", turn("system", column)),
    }
}

/// Lists one after the other.
fn joined<const N: usize>(lists: [String; N]) -> String {
    lists.into_iter().filter(|list| !list.is_empty()).collect::<Vec<_>>().join(" + ")
}

/// A column that holds conversations.
pub(crate) fn messages(rows: &mut Parameters, column: &str) {
    rows.set("column_map", json!({ "messages": column }), Note::Given);
    rows.need("turn_order", "any", "The tool accepts turns in any order.");
}

/// A column that holds plain text.
pub(crate) fn text(rows: &mut Parameters, column: &str) {
    rows.set("column_map", json!({ "text": column }), Note::Given);
}

/// The instruction, and below it the input where there is one, as most tools put them into one turn.
pub(crate) fn instruction(instruction: &str, input: &str) -> String {
    let (instruction, input) = (column(instruction), column(input));
    format!("{instruction} ~ ('\\n' ~ {input} if {input} else '')")
}

/// The shape of rows, as far as the names of their columns tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A conversation in this column.
    Messages(String),
    /// Prompt and completion in these columns.
    Pair(String, String),
    /// Instruction, input and output.
    Alpaca,
    /// Plain text in this column.
    Text(String),
    Preference,
}

impl Shape {
    pub(crate) fn of(columns: &[String]) -> Option<Self> {
        let has = |name: &str| columns.iter().any(|column| column == name);
        let first = |names: &[&str]| names.iter().find(|name| has(name)).map(|name| (*name).to_owned());
        if has("chosen") && has("rejected") {
            return Some(Self::Preference);
        }
        if let Some(messages) = first(&["messages", "conversations", "conversation"]) {
            return Some(Self::Messages(messages));
        }
        if has("instruction") && has("output") {
            return Some(Self::Alpaca);
        }
        let prompt = first(&["query", "prompt", "input", "instruction", "question", "problem"]);
        let completion = first(&["response", "completion", "answer", "output", "target", "solution"]);
        if let (Some(prompt), Some(completion)) = (prompt, completion) {
            return Some(Self::Pair(prompt, completion));
        }
        first(&["text"]).map(Self::Text)
    }
}
