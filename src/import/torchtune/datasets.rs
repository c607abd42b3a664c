//! torchtune's data sets and tokenizers: what a row is, and in what words the model sees it.

use engine::file::tree::{Node, Value};
use serde_json::{Value as Json, json};

use super::{SPEED, component};
use crate::import::job::Job;
use crate::import::key::Keys;
use crate::import::parameters::{Note, Parameters};
use crate::import::places::Places;
use crate::import::preference;
use crate::import::reading::Reading;
use crate::import::rows;

/// The turns of torchtune's `Llama3Tokenizer`. The header of an answer is trained there, so nothing is a generation
/// prompt; its last token, `<|end_of_text|>`, is never trained and followed by nothing, so it is left out.
const LLAMA3: &str = "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}\
<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}";

/// The turns of torchtune's `Qwen2Tokenizer` and `Qwen2_5Tokenizer`; headers of answers are trained there.
const QWEN2: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\
{% if message['role'] != 'assistant' or not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}";

const APART: &str = "there the text of a template is encoded separately from its content, so that no token crosses \
    the border; here a turn is encoded as one text";

/// How a tokenizer of torchtune puts turns into words.
pub(super) struct Tokenizer {
    /// The chat template with its words; `None` where turns follow each other as they are (SentencePiece).
    template: Option<&'static str>,
    max_seq_len: Option<i64>,
    /// Texts around the user's turn.
    prompt_template: Option<(String, String)>,
}

/// Reads the tokenizer.
pub(super) fn tokenizer(reading: &mut Reading<'_>, root: &Node) -> Tokenizer {
    let mut tokenizer = Tokenizer { template: None, max_seq_len: None, prompt_template: None };
    let Some(node) = root.get("tokenizer") else { return tokenizer };
    let keys = Keys::default()
        .read("_component_", "tokens.chat_template")
        .read("max_seq_len", "tokens.max_seq_len")
        .read("prompt_template", "rows.map")
        .nothing(
            "the tokenizer is that of the checkpoint",
            &["path", "vocab_path", "merges_path", "merges_file", "special_tokens_path", "bos", "eos"],
        )
        .missing("not supported by `tokenize`", &["truncation_type=right", "tokenizer_config_json_path"]);
    let mut below = reading.below(keys, node);
    let (name, _) = component(Some(node)).unwrap_or_default();
    match name.as_str() {
        "llama3_tokenizer" => tokenizer.template = Some(LLAMA3),
        "qwen2_tokenizer" | "qwen2_5_tokenizer" => tokenizer.template = Some(QWEN2),
        "llama2_tokenizer" | "mistral_tokenizer" | "gemma_tokenizer" => {}
        other => {
            let reason = format!("`{other}` adds text of its own; here prompt and response follow each other directly");
            below.differs("_component_", reason);
        }
    }
    if tokenizer.template.is_some() {
        let reason = "the turns of torchtune's tokenizer, which also trains the header of a response; without it, a \
            model's own template is used, which trains only the response";
        let text = tokenizer.template.unwrap_or_default();
        below.put_differing("_component_", "tokens.chat_template", text, reason);
    } else {
        below.nothing("_component_", "prompt and response follow each other as they are");
    }
    tokenizer.max_seq_len = below.whole("max_seq_len");
    if tokenizer.max_seq_len.is_some() && tokenizer.template == Some(QWEN2) {
        let reason = "with a limit torchtune's Qwen tokenizers mask the last token of every row, so that the end of a \
            response is not trained; here it is";
        below.differs("max_seq_len", reason);
    } else {
        below.nothing("max_seq_len", "`max_seq_len` of the stage `tokens`");
    }
    tokenizer.prompt_template = prompt_template(&mut below, node);
    below.finish();
    let found = reading.take(below);
    reading.parameters.extend(&found);
    reading.nothing("tokenizer", "the checkpoint's own");
    tokenizer
}

fn prompt_template(below: &mut Reading<'_>, node: &Node) -> Option<(String, String)> {
    let Some(template) = node.get("prompt_template") else {
        // Two tokenizers have one by default.
        let (name, _) = component(Some(node)).unwrap_or_default();
        let (before, behind) = match name.as_str() {
            "llama2_tokenizer" | "mistral_tokenizer" => named("MistralChatTemplate")?,
            _ => return None,
        };
        below.differs("prompt_template", APART);
        return Some((before.to_owned(), behind.to_owned()));
    };
    if template.value == Value::Null {
        return None;
    }
    if let Value::Map(entries) = &template.value {
        let around = |role: &str| {
            let texts = template.get(role)?.to_json();
            Some((texts.get(0)?.as_str()?.to_owned(), texts.get(1)?.as_str()?.to_owned()))
        };
        if entries.iter().all(|entry| entry.key == "user") {
            below.differs("prompt_template", APART);
            return around("user");
        }
        below.missing("prompt_template", "text around turns of other roles than the user");
        return None;
    }
    let (name, _) = component(Some(template)).unwrap_or_default();
    match named(&name) {
        Some((before, behind)) => {
            below.differs("prompt_template", APART);
            Some((before.to_owned(), behind.to_owned()))
        }
        None => {
            below.missing(
                "prompt_template",
                format!("`{name}` is a template of one's own, or one of whole conversations"),
            );
            None
        }
    }
}

/// The texts around a user's turn.
fn named(name: &str) -> Option<(&'static str, &'static str)> {
    match name {
        "SummarizeTemplate" => Some(("Summarize this dialogue:\n", "\n---\nSummary:\n")),
        "GrammarErrorCorrectionTemplate" => Some(("Correct this to standard English: ", "\n---\nCorrected: ")),
        "QuestionAnswerTemplate" => Some(("Question: ", "\n\nAnswer: ")),
        // That of Llama 2 also writes system messages, which rows of one turn have not.
        "MistralChatTemplate" | "Llama2ChatTemplate" => Some(("[INST] ", " [/INST] ")),
        _ => None,
    }
}

/// The arguments of the builders of data sets, in both dialects.
fn keys() -> Keys {
    Keys::default()
        .read("_component_", "template")
        .read("source", "source")
        .read("data_files", "source")
        .same("split=train", "split")
        .same("name", "config")
        .same("subset", "config")
        .same("revision", "revision")
        .same("field", "field")
        .read("column_map", "column_map")
        .read("column", "column_map.text")
        .read("conversation_column=conversations", "column_map.messages")
        .read("conversation_style", "column_map.messages")
        .read("template", "template")
        .read("chat_format", "template")
        .read("train_on_input", "train_on")
        .read("masking_strategy", "train_on")
        .read("new_system_prompt", "system")
        .read("max_seq_len", "max_seq_len")
        .read("packed=false", "packed")
        .read("split_across_pack", "split_across_pack")
        .read("add_eos=true", "add_eos")
        .read("data_dir", "source")
        .nothing("rows come from files of data; no code of a data set runs", &["trust_remote_code"])
        .nothing(SPEED, &["num_proc", "streaming"])
        .missing("an expression in `filter` of the stage does it", &["filter_fn", "filter_kwargs"])
        .missing("images are not supported", &["image_tag", "image_dir", "image_column"])
}

/// What a builder of a data set has without being told.
struct Builder {
    source: Option<&'static str>,
    config: Option<&'static str>,
    form: Form,
    trains_on_input: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Alpaca,
    /// A prompt from this column, a response from that one.
    Pair(&'static str, &'static str),
    Chat(&'static str),
    Text(&'static str),
    /// Conversations in these columns, the better and the worse.
    Preferred(&'static str, &'static str),
    /// A question, and the better and the worse answer.
    Answers([&'static str; 3]),
}

fn builder(name: &str) -> Option<Builder> {
    let plain = |source, form| Some(Builder { source, config: None, form, trains_on_input: false });
    match name {
        "alpaca_dataset" => {
            let form = Form::Alpaca;
            Some(Builder { source: Some("tatsu-lab/alpaca"), config: None, form, trains_on_input: true })
        }
        "alpaca_cleaned_dataset" => {
            let form = Form::Alpaca;
            Some(Builder { source: Some("yahma/alpaca-cleaned"), config: None, form, trains_on_input: true })
        }
        "instruct_dataset" => plain(None, Form::Pair("input", "output")),
        "samsum_dataset" => plain(Some("Samsung/samsum"), Form::Pair("dialogue", "summary")),
        "grammar_dataset" => plain(Some("liweili/c4_200m"), Form::Pair("input", "output")),
        "chat_dataset" => plain(None, Form::Chat("conversations")),
        "slimorca_dataset" => plain(Some("Open-Orca/SlimOrca-Dedup"), Form::Chat("conversations")),
        "preference_dataset" => plain(None, Form::Preferred("chosen", "rejected")),
        "hh_rlhf_helpful_dataset" => {
            plain(Some("RLHFlow/HH-RLHF-Helpful-standard"), Form::Preferred("chosen", "rejected"))
        }
        "stack_exchange_paired_dataset" => {
            let form = Form::Answers(["question", "response_j", "response_k"]);
            plain(Some("lvwerra/stack-exchange-paired"), form)
        }
        "text_completion_dataset" => plain(None, Form::Text("text")),
        "cnn_dailymail_articles_dataset" => plain(Some("ccdv/cnn_dailymail"), Form::Text("article")),
        "wikitext_dataset" => Some(Builder {
            source: Some("EleutherAI/wikitext_document_level"),
            config: Some("wikitext-103-v1"),
            form: Form::Text("page"),
            trains_on_input: false,
        }),
        _ => None,
    }
}

/// What a data set says that one stage has for the rows of all.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    /// The key of its builder.
    key: &'static str,
    path: &'static str,
    value: Option<Json>,
    note: Note,
}

/// The path of `packed`, which is no parameter.
const PACKED: &str = "packs";

/// A data set that was read.
struct Found {
    rows: Parameters,
    /// In one order, so that data sets can be compared; nothing where its builder is not known.
    shared: Vec<Shared>,
}

/// The stages of `dataset`, which is one or a list of several. What they say of all rows goes into the parameters of
/// the job, and is returned.
pub(super) fn training(
    reading: &mut Reading<'_>,
    job: &mut Job,
    root: &Node,
    tokenizer: &Tokenizer,
    places: &Places,
) -> Vec<Shared> {
    let found = datasets(reading, root, "dataset", tokenizer, places);
    let known: Vec<&Found> = found.iter().filter(|found| !found.shared.is_empty()).collect();
    let all = known.first().map(|first| first.shared.clone()).unwrap_or_default();
    for other in &known {
        if let Some((key, one, other)) = differing(&all, &other.shared) {
            let reason = format!(
                "`{key}` is {one} for one data set and {other} for another: here it is of the stage that has the rows \
                 of all"
            );
            reading.missing("dataset", reason);
        }
    }
    for Shared { path, value, note, .. } in &all {
        match value {
            Some(_) if *path == PACKED => job.packs = true,
            Some(value) => reading.parameters.set(path, value.clone(), note.clone()),
            None => {}
        }
    }
    let shapes: Vec<String> = known.iter().map(|found| shape(&found.rows)).collect();
    if let Some(other) = shapes.iter().find(|other| **other != shapes[0]) {
        let reason = format!("{} and {other}: here all rows of a training are of one kind", shapes[0]);
        reading.missing("dataset", reason);
    }
    job.datasets = found.into_iter().map(|found| found.rows).collect();
    all
}

/// The stages of `dataset_val`. `training` is what the data sets of the training rows say of all rows, which these rows
/// have in common with them.
pub(super) fn validation(
    reading: &mut Reading<'_>,
    root: &Node,
    training: &[Shared],
    tokenizer: &Tokenizer,
    places: &Places,
) -> Vec<Parameters> {
    let found = datasets(reading, root, "dataset_val", tokenizer, places);
    // Packs are of the training rows alone.
    let of_tokens = |shared: &[Shared]| -> Vec<Shared> {
        shared.iter().filter(|shared| shared.path.starts_with("tokens.")).cloned().collect()
    };
    for found in &found {
        if let Some((key, one, other)) = differing(&of_tokens(training), &of_tokens(&found.shared)) {
            let reason = format!(
                "`{key}` is {other} for them there, and {one} for the training rows; here the loss is measured as it is \
                 trained"
            );
            reading.differs("dataset_val", reason);
        }
    }
    found.into_iter().map(|found| found.rows).collect()
}

/// The first key that two data sets say something else of, and what: `None` where they agree. Plain text has no prompt
/// to train on.
fn differing(one: &[Shared], other: &[Shared]) -> Option<(&'static str, String, String)> {
    let written = |value: Option<&Json>| match value {
        None => "not set".to_owned(),
        Some(Json::String(text)) => format!("`{text}`"),
        Some(value) => format!("`{value}`"),
    };
    one.iter().zip(other).find_map(|(one, other)| {
        let is_of_text = one.path == "tokens.train_on" && (one.value.is_none() || other.value.is_none());
        let differs = one.value != other.value && !is_of_text;
        differs.then(|| (one.key, written(one.value.as_ref()), written(other.value.as_ref())))
    })
}

/// What rows are, by the columns that they are read from.
fn shape(rows: &Parameters) -> String {
    let has = |name: &str| rows.get("column_map").is_some_and(|map| map.get(name).is_some());
    let known = [("text", "plain text"), ("chosen", "preferences"), ("messages", "conversations")];
    let known = known.into_iter().find(|(column, _)| has(column)).map(|(_, what)| what.to_owned());
    known.unwrap_or_else(|| {
        let template = rows.get("template").and_then(Json::as_str).unwrap_or_default();
        format!("prompts in the template `{template}`")
    })
}

fn datasets(
    reading: &mut Reading<'_>,
    root: &Node,
    name: &'static str,
    tokenizer: &Tokenizer,
    places: &Places,
) -> Vec<Found> {
    let Some(node) = root.get(name) else { return Vec::new() };
    reading.nothing(name, "a stage for each");
    let loss = component(root.get("loss")).map(|(name, _)| name).unwrap_or_default();
    let items = match &node.value {
        Value::List(items) => items.iter().collect(),
        _ => vec![node],
    };
    items.into_iter().map(|item| dataset(reading, item, &loss, tokenizer, places)).collect()
}

fn dataset(reading: &mut Reading<'_>, node: &Node, loss: &str, tokenizer: &Tokenizer, places: &Places) -> Found {
    let mut below = reading.below(keys(), node);
    let (name, span) = component(Some(node)).unwrap_or((String::new(), node.span));
    let Some(Builder { source, config, form, trains_on_input }) = builder(&name) else {
        let what = match name.as_str() {
            "" => "no builder is named".to_owned(),
            _ => format!("`{name}` is no data set that is known here"),
        };
        if name.is_empty() {
            below.require("_component_", span);
        } else {
            below.missing("_component_", what);
        }
        below.finish();
        return Found { rows: reading.take_below("rows", below), shared: Vec::new() };
    };
    let is_preference = matches!(form, Form::Preferred(..) | Form::Answers(_));
    match loss {
        "DPOLoss" | "RSOLoss" if !is_preference => {
            below.missing("_component_", format!("`{loss}` is a loss of preferences, and these rows are none"));
        }
        "" | "CEWithChunkedOutputLoss" | "CrossEntropyLoss" | "LinearCrossEntropyLoss" if is_preference => {
            below.missing("_component_", "rows of preferences need a loss of preferences, such as `DPOLoss`");
        }
        _ => below.nothing("_component_", "the shape of its rows"),
    }
    let given = below.text("source");
    let is_local = match given.as_deref().or(source) {
        Some(source) => rows::put_loaded(&mut below, "source", source, places),
        None => {
            below.require("source", node.span);
            false
        }
    };
    rows::without_hub(&mut below, is_local, &["name", "subset", "revision"]);
    let is_named = is_local || below.is_given("subset") || below.is_given("name");
    if let Some(config) = config.filter(|_| !is_named) {
        below.parameters.set("config", config, Note::Given);
    }
    let folder = match below.text("data_dir") {
        None if name == "stack_exchange_paired_dataset" && given.is_none() => Some("data/rl".to_owned()),
        folder => folder,
    };
    if let Some(folder) = folder {
        let what = format!("the folder `{folder}` of a hub's data set: fetch it, and name its files as `source`");
        below.missing("data_dir", what);
    }
    columns(&mut below, form, tokenizer);
    system_prompt(&mut below, form, tokenizer);
    let shared = shared(&mut below, form, trains_on_input);
    below.finish();
    Found { rows: reading.take_below("rows", below), shared }
}

/// What a data set says that one stage has for the rows of all.
fn shared(below: &mut Reading<'_>, form: Form, trains_on_input: bool) -> Vec<Shared> {
    let is_text = matches!(form, Form::Text(_));
    let on_input = match below.text("masking_strategy").as_deref() {
        None => below.choice("train_on_input").unwrap_or(trains_on_input),
        Some(strategy @ ("train_on_all" | "train_on_assistant")) => {
            let is_all = strategy == "train_on_all";
            below.nothing("masking_strategy", "`train_on` of the stage `tokens`");
            is_all
        }
        Some(_) => {
            below.missing("masking_strategy", "`tokenize` trains on assistants' turns, on the last, or on everything");
            false
        }
    };
    // Of preferences every turn of an assistant is scored there, those of the prompt too.
    let train_on = if on_input { "all" } else { "assistant" };
    let train_on_note = note(below, "train_on_input");
    match is_text {
        true => below.nothing("train_on_input", "plain text is trained as a whole"),
        false => below.nothing("train_on_input", ""),
    }
    let is_packed = below.flag("packed");
    if is_packed {
        below.nothing("packed", "the `pack` stage of the training rows");
    }
    let split = below.choice("split_across_pack");
    below.nothing("split_across_pack", "a key of the `pack` stage");
    let without_eos = is_text && !below.flag("add_eos");
    below.nothing("add_eos", "`add_eos` of the stage `tokens`");
    let length = below.whole("max_seq_len");
    below.nothing("max_seq_len", "a key of the `tokenize` stage");
    let of = |key, path, value, note| Shared { key, path, value, note };
    vec![
        of("train_on_input", "tokens.train_on", (!is_text).then(|| json!(train_on)), train_on_note),
        of("packed", PACKED, is_packed.then(|| json!(true)), Note::Given),
        of("split_across_pack", "packs.split_across_pack", split.map(Json::from), Note::Given),
        of("add_eos", "tokens.add_eos", without_eos.then(|| json!(false)), Note::Given),
        of("max_seq_len", "tokens.max_seq_len", length.map(Json::from), Note::Given),
    ]
}

/// Writes the system message that takes the place of those of the rows.
fn system_prompt(below: &mut Reading<'_>, form: Form, tokenizer: &Tokenizer) {
    let Some(prompt) = below.text("new_system_prompt") else { return };
    let turn = format!("[{{'role': 'system', 'content': {}}}]", text(&prompt));
    let key = if below.text("conversation_style").as_deref() == Some("openai") { "role" } else { "from" };
    let led = |column: &str, key: &str| {
        format!("{{{{ {turn} + (row[{}]|rejectattr('{key}', 'equalto', 'system')|list) }}}}", Json::from(column))
    };
    let of_map = |below: &Reading<'_>, name: &str| {
        let map = below.parameters.get("column_map");
        map.and_then(|map| map.get(name)).and_then(Json::as_str).map(str::to_owned).unwrap_or_default()
    };
    match form {
        Form::Chat(_) => {
            let map = json!({ "messages": led(&of_map(&*below, "messages"), key) });
            below.parameters.set("map", map, Note::Given);
            below.parameters.set("column_map", json!({ "messages": "messages" }), Note::Given);
        }
        Form::Preferred(..) => {
            let [chosen, rejected] = ["chosen", "rejected"].map(|name| led(&of_map(&*below, name), "role"));
            below.parameters.set("map", json!({ "chosen": chosen, "rejected": rejected }), Note::Given);
            let columns = json!({ "chosen": "chosen", "rejected": "rejected" });
            below.parameters.set("column_map", columns, Note::Given);
        }
        // `columns` has written them.
        Form::Alpaca | Form::Pair(..) | Form::Answers(_) => {}
        Form::Text(_) => return below.missing("new_system_prompt", "plain text has no turns"),
    }
    match tokenizer.template {
        None if !matches!(form, Form::Preferred(..) | Form::Answers(_)) => {
            below.differs("new_system_prompt", "the tokenizer's own chat template renders the turns");
        }
        _ => below.consumed("new_system_prompt", "map"),
    }
}

fn note(below: &Reading<'_>, name: &str) -> Note {
    if below.is_given(name) { Note::Given } else { Note::Default(format!("default of {}", below.tool)) }
}

/// Which columns become what.
fn columns(below: &mut Reading<'_>, form: Form, tokenizer: &Tokenizer) {
    let map = match below.value("column_map") {
        Value::Map(entries) => entries
            .iter()
            .filter_map(|entry| Some((entry.key.clone(), entry.value.to_json().as_str()?.to_owned())))
            .collect(),
        _ => Vec::new(),
    };
    let mapped = |name: &str, usual: &str| {
        map.iter().find(|(known, _)| known == name).map_or(usual, |(_, column)| column).to_owned()
    };
    let column = |name: &str| mapped(name, name);
    below.nothing("column_map", "the columns of the stage");
    if let Some(format) = below.text("chat_format") {
        let reason = format!("`{format}` writes text around each turn: write it as `chat_template` of `tokenize`");
        below.missing("chat_format", reason);
    }
    match form {
        Form::Text(default) => {
            let column = below.text("column").unwrap_or_else(|| default.to_owned());
            rows::text(&mut below.parameters, &column);
        }
        Form::Chat(default) => {
            let given = below.text("conversation_column").filter(|_| below.is_given("conversation_column"));
            let column = given.unwrap_or_else(|| column(default));
            rows::messages(&mut below.parameters, &column);
            if below.is_given("conversation_style") {
                below.nothing("conversation_style", "ShareGPT's and OpenAI's formats are recognised by their keys");
            }
            if tokenizer.template.is_none() {
                below.differs("conversation_column", "the tokenizer's own chat template renders the turns");
            }
        }
        Form::Alpaca => {
            let names = ["instruction", "input", "output"].map(column);
            let is_plain = names.iter().zip(["instruction", "input", "output"]).all(|(column, name)| column == name);
            let user = alpaca(&names[0], &names[1]);
            let system = below.text("new_system_prompt").map(|system| text(&system));
            match tokenizer.template.or(system.is_some().then_some("")) {
                None if is_plain => {
                    below.parameters.set("template", "alpaca", Note::Given);
                    below.parameters.set("column_map", json!({ "output": "output" }), Note::Given);
                }
                None => {
                    below.parameters.set("template", "alpaca", Note::Given);
                    let map = json!({ "instruction": names[0], "input": names[1], "output": names[2] });
                    below.parameters.set("column_map", map, Note::Given);
                }
                Some(_) => {
                    let response = rows::column(&names[2]);
                    rows::conversation(&mut below.parameters, system.as_deref(), &user, &response);
                }
            }
        }
        Form::Pair(input, output) => pair(below, &map, input, output, tokenizer),
        Form::Preferred(better, worse) => {
            let [chosen, rejected] = [mapped("chosen", better), mapped("rejected", worse)];
            below.parameters.set("column_map", json!({ "chosen": chosen, "rejected": rejected }), Note::Given);
            preference::as_they_are(&mut below.parameters);
        }
        Form::Answers([question, better, worse]) => {
            let (before, behind) = named("QuestionAnswerTemplate").expect("it is one of the table");
            let question = rows::column(&mapped("prompt", question));
            let question = format!("{} ~ {question} ~ {}", text(before), text(behind.trim_end()));
            let [better, worse] = [mapped("chosen", better), mapped("rejected", worse)].map(|name| rows::column(&name));
            let system = below.text("new_system_prompt").map(|system| text(&system));
            preference::pair(&mut below.parameters, system.as_deref(), &question, [&better, &worse]);
        }
    }
}

/// Prompt and response; in 0.2.1's dialect a template with placeholders makes the prompt.
fn pair(below: &mut Reading<'_>, map: &[(String, String)], input: &str, output: &str, tokenizer: &Tokenizer) {
    let column = |name: &str| map.iter().find(|(known, _)| known == name).map_or(name, |(_, column)| column).to_owned();
    let template = below.text("template").map(|path| path.rsplit('.').next().unwrap_or_default().to_owned());
    let around = match template.as_deref() {
        None => tokenizer.prompt_template.clone(),
        Some(name) => {
            let known = named(name).map(|(before, behind)| (before.to_owned(), behind.to_owned()));
            match known {
                Some(_) => below.nothing("template", "the text around the prompt"),
                None if name == "AlpacaInstructTemplate" => below.nothing("template", "the text around the prompt"),
                None => below.missing("template", format!("`{name}` is a template of one's own")),
            }
            known
        }
    };
    // 0.2.1 calls the column of the prompt as the template's placeholder does.
    let placeholder = match template.as_deref() {
        Some("SummarizeTemplate") => "dialogue",
        Some("GrammarErrorCorrectionTemplate") => "sentence",
        Some("QuestionAnswerTemplate") => "question",
        _ => input,
    };
    let is_named = |name: &str| map.iter().any(|(known, _)| known == name);
    let prompt = column(if is_named(placeholder) || !is_named("input") { placeholder } else { "input" });
    let response = column(if is_named(output) || !is_named("output") { output } else { "output" });
    let user = match (template.as_deref(), &around) {
        (Some("AlpacaInstructTemplate"), _) => alpaca(&column("instruction"), &column("input")),
        (_, None) => rows::column(&prompt),
        // `Llama3Tokenizer` strips each part of a turn.
        (None, Some((before, behind))) if tokenizer.template == Some(LLAMA3) => {
            format!("{} ~ {}|trim ~ {}", text(before.trim()), rows::column(&prompt), text(behind.trim()))
        }
        (_, Some((before, behind))) => format!("{} ~ {} ~ {}", text(before), rows::column(&prompt), text(behind)),
    };
    let system = below.text("new_system_prompt");
    match (tokenizer.template, system) {
        (None, None) => {
            let text =
                around.map_or_else(|| "{input}".to_owned(), |(before, behind)| format!("{before}{{input}}{behind}"));
            let template = if text == "{input}" { "none".to_owned() } else { text };
            below.parameters.set("template", template, Note::Given);
            below.parameters.set("column_map", json!({ "input": prompt, "output": response }), Note::Given);
        }
        (_, system) => {
            let system = system.map(|system| text(&system));
            rows::conversation(&mut below.parameters, system.as_deref(), &user, &rows::column(&response));
        }
    }
}

/// Alpaca's prompt of these columns.
fn alpaca(instruction: &str, input: &str) -> String {
    let head = "Below is an instruction that describes a task";
    let tail = "Write a response that appropriately completes the request.\n\n### Instruction:\n";
    let with = text(&format!("{head}, paired with an input that provides further context. {tail}"));
    let without = text(&format!("{head}. {tail}"));
    let (instruction, input) = (rows::column(instruction), rows::column(input));
    let (between, end) = (text("\n\n### Input:\n"), text("\n\n### Response:\n"));
    format!(
        "(({with} ~ {instruction} ~ {between} ~ {input} ~ {end}) if {input} else ({without} ~ {instruction} ~ {end}))"
    )
}

/// A text as an expression.
fn text(text: &str) -> String {
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n"))
}

/// What holds for all rows: how long they may be, and how they share packs.
pub(super) fn length(reading: &mut Reading<'_>, job: &mut Job, tokenizer: &Tokenizer) {
    if let Some(length) = tokenizer.max_seq_len {
        reading.parameters.set("tokens.max_seq_len", length, Note::Given);
    }
    let note = Note::Default(format!("what {} does", reading.tool));
    let length = reading.parameters.get("tokens.max_seq_len").and_then(Json::as_i64);
    // Plain text is cut into several rows here, and there only where it is packed.
    if length.is_some() {
        reading.parameters.set("tokens.on_too_long", "truncate", note.clone());
    }
    match (job.packs, length) {
        (true, Some(length)) => {
            reading.parameters.set("packs.max_seq_len", length, Note::Given);
            reading.parameters.set("packs.strategy", "next_fit", note);
        }
        (true, None) => {
            job.packs = false;
            let reason = "packs need a length: torchtune fails as well where `tokenizer.max_seq_len` is not set";
            reading.missing("dataset", reason);
        }
        (false, _) => {}
    }
}
