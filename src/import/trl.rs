//! TRL: the YAML and the command line of `trl sft`.

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use serde_json::json;

use super::hugging_face::{self, NAMES, OTHER_BASE};
use super::job::{DRAWN, HeldOut, Job, Method, NOT_MEASURED};
use super::key::Keys;
use super::parameters::{Note, Parameters};
use super::places::Places;
use super::preference::{self, Smoothing};
use super::reading::Reading;
use super::rows::{self, Shape};

pub(super) const VERSION: &str = "1.16.0";

/// The keys of `trl dpo` and `trl kto`.
const PREFERENCE: preference::Names = preference::Names {
    loss: "loss_type",
    beta: Some("beta"),
    label_smoothing: Some("label_smoothing"),
    gamma: None,
    cpo_weight: None,
    sft_weight: None,
    desirable_weight: Some("desirable_weight"),
    undesirable_weight: Some("undesirable_weight"),
    orpo_scores_prompts: true,
};

/// The columns of a prompt and its completion.
const PAIR: [&str; 2] = ["prompt", "completion"];

/// What is trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Training {
    Sft,
    Dpo,
    Kto,
}

impl Training {
    /// By the command, and for a file by keys that the others do not have.
    fn of(reading: &Reading<'_>, verb: Option<&str>) -> Self {
        let has = |names: &[&str]| names.iter().any(|name| reading.is_given(name));
        match verb {
            Some("dpo") => Self::Dpo,
            Some("kto") => Self::Kto,
            Some(_) => Self::Sft,
            None if has(&["desirable_weight", "undesirable_weight"]) => Self::Kto,
            None if has(&["beta", "label_smoothing", "f_divergence_type", "loss_weights"]) => Self::Dpo,
            None => Self::Sft,
        }
    }
}

pub(super) fn keys() -> Keys {
    Keys::default()
        .read("model_name_or_path", "base")
        .read("model_revision=main", "base.revision")
        .read("use_peft=false", "train.method")
        .whole("lora_r=16", "train.lora.rank")
        .same("lora_alpha=32", "train.lora.alpha")
        .same("lora_dropout=0.05", "train.lora.dropout")
        .read("lora_target_modules", "train.lora.target_modules")
        .same("lora_modules_to_save", "train.lora.modules_to_save")
        .same("use_rslora=false", "train.lora.use_rslora")
        .same("use_dora=false", "train.lora.use_dora")
        .read("dataset_name", "rows.source")
        .read("dataset_config", "rows.config")
        .read("dataset_train_split=train", "rows.split")
        .read("dataset_test_split=test", "held_out_rows.split")
        .read("datasets", "rows")
        .read("test_split_size", "rows.train_test_split.test_size")
        .read("dataset_text_field=text", "rows.column_map.text")
        .read("shuffle_dataset=false", "rows.shuffle")
        .read("chat_template_path", "tokens.chat_template")
        .read("eos_token", "tokens.add_eos")
        .read("max_length=1024", "tokens.max_seq_len")
        .read("max_seq_length", "tokens.max_seq_len")
        .read("truncation_mode=keep_start", "tokens.on_too_long")
        .read("completion_only_loss", "tokens.train_on")
        .read("assistant_only_loss=false", "tokens.train_on")
        .read("packing=false", "packs")
        .read("packing_strategy=bfd", "packs.strategy")
        .read("loss_type=nll", "train.loss.name")
        .read("beta=0.1", "train.loss.beta")
        .read("label_smoothing=0.0", "train.loss.label_smoothing")
        .read("loss_weights", "train.loss.sft_weight")
        .read("f_divergence_type=reverse_kl", "train.loss.divergence")
        .read("f_alpha_divergence_coef=0.5", "train.loss.alpha")
        .read("desirable_weight=1.0", "train.loss.desirable_weight")
        .read("undesirable_weight=1.0", "train.loss.undesirable_weight")
        .read("dtype=float32", "train.dtype")
        .read("torch_dtype", "train.dtype")
        .read("bf16", "train.dtype")
        .same("learning_rate=2e-5", "train.optimizer.learning_rate")
        .read("gradient_checkpointing=true", "train.activation_checkpointing")
        .nothing(
            "changes speed or memory, never the result",
            &[
                "attn_implementation",
                "padding_free",
                "pad_to_multiple_of",
                "pad_token",
                "eval_packing",
                "dataset_num_proc",
                "dataset_streaming",
                "activation_offloading",
                "ignore_bias_buffers",
                "streaming",
                "fused_lm_head",
            ],
        )
        .nothing("figures of every step are always recorded", &["logging_steps=10"])
        .nothing("only causal language models", &["lora_task_type", "trust_remote_code"])
        .read("load_in_4bit=false", "train.quantize.base")
        .read("bnb_4bit_quant_type=nf4", "train.quantize.base")
        .read("use_bnb_nested_quant=false", "train.quantize.double_quantization")
        .nothing("only for a quantised base", &["bnb_4bit_quant_storage"])
        .missing(OTHER_BASE, &["load_in_8bit"])
        .nothing(
            "the reference is scored once, before the first step, without dropout",
            &["precompute_ref_log_probs", "precompute_ref_batch_size"],
        )
        .read("disable_dropout=true", "train.lora.dropout")
        .read("train_sampling_strategy=random", "train.shuffle")
        .missing(preference::OTHERS, &["reward_funcs", "reward_model_name_or_path", "num_generations"])
        .missing(
            "the reference is the model that the run starts from",
            &["ref_model", "ref_model_name_or_path", "sync_ref_model", "reference_free"],
        )
        .missing("a variant of DPO that is not supported: docs/preferences.md", &["use_weighting", "ld_alpha"])
        .missing(
            "not supported here",
            &[
                "model_init_kwargs",
                "dataset_kwargs",
                "router_aux_loss_coef",
                "lora_target_parameters",
                "vllm_mode",
                "rpo_alpha",
            ],
        )
        .and(hugging_face::keys())
}

/// An entry of `datasets`.
fn dataset_keys() -> Keys {
    Keys::default()
        .read("path", "source")
        .read("data_files", "source")
        .same("name", "config")
        .same("split=train", "split")
        .nothing("columns that are not named are not read", &["columns"])
        .missing("not supported by `dataset`", &["data_dir", "fraction"])
}

/// Reads a configuration of `trl sft`, `trl dpo` or `trl kto`.
pub(super) fn read(reading: &mut Reading<'_>, root: &Node, devices: i64, verb: Option<&str>, places: &Places) -> Job {
    let mut job = Job::default();
    let training = Training::of(reading, verb);
    if training != Training::Sft {
        reading.by_default("learning_rate", "1e-6");
        reading.by_default("loss_type", if training == Training::Dpo { "sigmoid" } else { "kto" });
    }
    if training == Training::Kto {
        reading.by_default("train_sampling_strategy", "sequential");
    }
    reading.require("model_name_or_path", Span { len: 0, ..root.span });
    hugging_face::model(reading, ["model_name_or_path", "model_revision"], "", places);
    method(reading, &mut job);
    dropout(reading, &job, training);
    let shape = rows(reading, &mut job, root, training, places);
    match training {
        Training::Sft => {
            let of_strings = job.datasets.iter().any(|rows| rows.get("template").is_some());
            tokens(reading, shape.as_ref(), of_strings);
        }
        Training::Dpo | Training::Kto => tokens_of_pairs(reading),
    }
    packs(reading, &mut job);
    precision(reading);
    if reading.flag("load_in_4bit") {
        hugging_face::quantized_base(
            reading,
            "load_in_4bit",
            Some("bnb_4bit_quant_type"),
            Some("use_bnb_nested_quant"),
        );
    } else {
        hugging_face::no_quantized_base(reading, &["load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"]);
    }
    loss(reading, training);
    order(reading, &mut job);
    hugging_face::training(reading, &mut job, &NAMES, devices);
    if job.is_measured() {
        hugging_face::validation(reading);
    }
    job.output = reading.text("output_dir");
    reading.consumed("output_dir", "publish");
    job
}

fn loss(reading: &mut Reading<'_>, training: Training) {
    if training == Training::Sft {
        if reading.text("loss_type").as_deref() != Some("nll") {
            reading.missing("loss_type", "only the negative log-likelihood is supported");
        }
        preference::without(reading, &PREFERENCE, "of `trl dpo` and `trl kto`");
        for name in ["loss_weights", "f_divergence_type", "f_alpha_divergence_coef"] {
            reading.nothing(name, "of `trl dpo`");
        }
        return;
    }
    let losses = reading.texts("loss_type");
    // RPO: the likelihood of chosen responses beside another loss.
    let (which, is_rpo) = match losses.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [one] => ((*one).to_owned(), false),
        [one, "sft"] => ((*one).to_owned(), true),
        several => (several.join(", "), false),
    };
    preference::loss(reading, &PREFERENCE, &which, Smoothing::Ignored);
    let weights: Vec<f64> = reading.texts("loss_weights").iter().filter_map(|text| text.parse().ok()).collect();
    match weights.as_slice() {
        [first, second] if is_rpo && *first == 1.0 => reading.put("loss_weights", "train.loss.sft_weight", *second),
        [] if is_rpo => reading.put("loss_weights", "train.loss.sft_weight", 1),
        [] => reading.nothing("loss_weights", "one loss"),
        _ => reading.missing("loss_weights", "only one loss is supported, and the likelihood with a weight"),
    }
    let divergence = reading.text("f_divergence_type").unwrap_or_default();
    match (divergence.rsplit('.').next().unwrap_or_default(), which.as_str()) {
        ("reverse_kl", _) | (_, "kto") => reading.nothing("f_divergence_type", "as here"),
        (name @ ("forward_kl" | "js_divergence"), "sigmoid" | "sigmoid_norm") => {
            let ours = if name == "forward_kl" { name } else { "jensen_shannon" };
            reading.put("f_divergence_type", "train.loss.divergence", ours);
        }
        ("alpha_divergence", "sigmoid" | "sigmoid_norm") => {
            reading.put("f_divergence_type", "train.loss.divergence", "alpha");
            let theirs = reading.number("f_alpha_divergence_coef").unwrap_or(0.5);
            let reason = "`alpha` there is 1 less `alpha` here";
            reading.put_differing("f_alpha_divergence_coef", "train.loss.alpha", 1.0 - theirs, reason);
        }
        _ => reading.missing("f_divergence_type", format!("`{divergence}` with `{which}`")),
    }
    if !reading.is_reported("f_alpha_divergence_coef") {
        reading.nothing("f_alpha_divergence_coef", "only for `alpha_divergence`");
    }
}

fn method(reading: &mut Reading<'_>, job: &mut Job) {
    if !reading.flag("use_peft") {
        job.method = Method::Full;
        reading.leave_out("train.lora", "nothing without `use_peft`");
        reading.nothing("use_peft", "every weight");
        reading.nothing("lora_target_modules", "nothing without `use_peft`");
        return;
    }
    reading.put("use_peft", "train.method", "lora");
    let modules = reading.texts("lora_target_modules");
    if modules == ["all-linear"] {
        reading.put("lora_target_modules", "train.lora.target_modules", "all-linear");
    } else if modules.is_empty() {
        let reason =
            "PEFT's own choice for the family there, which is q_proj and v_proj for llama, mistral, qwen2 and gemma";
        reading.put_differing("lora_target_modules", "train.lora.target_modules", json!(["q_proj", "v_proj"]), reason);
    } else {
        reading.put("lora_target_modules", "train.lora.target_modules", json!(modules));
    }
}

/// `trl dpo` and `trl kto` have no dropout, in the adapter neither, unless they are told to.
fn dropout(reading: &mut Reading<'_>, job: &Job, training: Training) {
    if training == Training::Sft {
        return reading.nothing("disable_dropout", "of `trl dpo` and `trl kto`");
    }
    if reading.flag("disable_dropout") {
        preference::without_dropout(reading, job);
    }
    reading.nothing("disable_dropout", "`dropout` of the adapter");
}

/// The order of the rows.
fn order(reading: &mut Reading<'_>, job: &mut Job) {
    let strategy = reading.text("train_sampling_strategy").unwrap_or_default();
    match strategy.as_str() {
        "random" => reading.nothing("train_sampling_strategy", "each epoch is shuffled"),
        "sequential" => {
            reading.put("train_sampling_strategy", "train.shuffle", false);
            if reading.flag("shuffle_dataset") {
                job.datasets.iter_mut().for_each(|rows| rows.set("shuffle", true, Note::Given));
                match job.datasets.len() {
                    ..=1 => reading.consumed("shuffle_dataset", "rows.shuffle"),
                    _ => reading.differs("shuffle_dataset", "all rows together there, here those of each data set"),
                }
            }
        }
        _ => reading.missing("train_sampling_strategy", format!("`{strategy}` is not supported by `train`")),
    }
    if !reading.is_reported("shuffle_dataset") {
        reading.nothing("shuffle_dataset", "each epoch is shuffled");
    }
}

/// The stages of the rows; returns their shape, as far as it can be seen.
fn rows(reading: &mut Reading<'_>, job: &mut Job, root: &Node, training: Training, places: &Places) -> Option<Shape> {
    let mut shape = None;
    let is_off = hugging_face::evaluation_is_off(reading, "eval_strategy");
    if is_off {
        reading.nothing("eval_strategy", NOT_MEASURED);
        reading.nothing("dataset_test_split", NOT_MEASURED);
    }
    if let Some(Value::List(items)) = root.get("datasets").map(|node| &node.value) {
        reading.nothing("datasets", "a stage for each");
        for item in items {
            let mut below = reading.below(dataset_keys(), item);
            below.require("path", item.span);
            let path = below.text("path").unwrap_or_default();
            let is_local = rows::put_loaded(&mut below, "path", &path, places);
            rows::without_hub(&mut below, is_local, &["name"]);
            let name = below.texts("data_files").into_iter().next().filter(|_| is_local).unwrap_or(path);
            below.finish();
            let mut rows = reading.take_below("rows", below);
            shape = shaped(reading, "datasets", &mut rows, &name, training, places).or(shape);
            job.datasets.push(rows);
        }
        if let Some(share) = reading.number("test_split_size") {
            job.hold_out(reading, "test_split_size", share, DRAWN);
        }
        if is_off {
            job.measure_nothing();
        }
        return shape;
    }
    reading.require("dataset_name", Span { len: 0, ..root.span });
    let name = reading.text("dataset_name").unwrap_or_default();
    let source = rows::source(&name, "", places);
    if let Err(reason) = &source {
        reading.missing("dataset_name", reason.as_str());
    }
    let config = reading.text("dataset_config");
    let of_split = |reading: &mut Reading<'_>, key: &'static str| {
        let mut rows = Parameters::default();
        if let Ok(source) = &source {
            rows.set("source", source.as_str(), Note::Given);
        }
        if let Some(config) = config.as_ref().filter(|_| !places.is_path(&name)) {
            rows.set("config", config.as_str(), Note::Given);
        }
        let split = reading.text(key).unwrap_or_default();
        let note = match reading.is_given(key) {
            true => Note::Given,
            false => Note::Default(format!("default of {}", reading.tool)),
        };
        if !places.is_path(&name) {
            rows.set("split", split, note);
        }
        reading.nothing(key, "`split` of the stage");
        rows
    };
    let mut train = of_split(reading, "dataset_train_split");
    shape = shaped(reading, "dataset_name", &mut train, &name, training, places);
    rows::without_hub(reading, places.is_path(&name), &["dataset_config"]);
    if !reading.is_reported("dataset_config") {
        reading.consumed("dataset_config", "rows.config");
    }
    job.datasets = vec![train];
    if !is_off && !places.is_path(&name) {
        let mut test = of_split(reading, "dataset_test_split");
        shaped(reading, "dataset_name", &mut test, &name, training, places);
        job.held_out = HeldOut::Own(vec![test]);
    }
    if !reading.is_reported("dataset_name") {
        reading.consumed("dataset_name", "rows.source");
    }
    shape
}

/// Makes rows of what the columns show.
fn shaped(
    reading: &mut Reading<'_>,
    key: &'static str,
    rows: &mut Parameters,
    name: &str,
    training: Training,
    places: &Places,
) -> Option<Shape> {
    if training != Training::Sft {
        preference::as_they_are(rows);
        tools(rows, name, &["prompt", "chosen", "completion"], places);
        if places.columns(name).is_none() {
            reading.differs(key, rows::unseen_tools(name));
        }
        reading.nothing("dataset_text_field", "rows of preferences are known by their columns");
        return Some(Shape::Preference);
    }
    let field = reading.text("dataset_text_field").unwrap_or_default();
    let shape = match places.columns(name) {
        Some(columns) if columns.contains(&field) && reading.is_given("dataset_text_field") => Some(Shape::Text(field)),
        Some(columns) => Shape::of(&columns),
        None if reading.is_given("dataset_text_field") => Some(Shape::Text(field)),
        None if reading.choice("completion_only_loss") == Some(true) => {
            let [prompt, completion] = PAIR.map(str::to_owned);
            Some(Shape::Pair(prompt, completion))
        }
        None => None,
    };
    reading.nothing("dataset_text_field", "the column of plain text");
    match &shape {
        Some(Shape::Messages(column)) => {
            rows::messages(rows, column);
            tools(rows, name, &[column], places);
        }
        Some(Shape::Text(column)) => rows::text(rows, column),
        Some(Shape::Pair(prompt, completion))
            if [prompt, completion] == PAIR && places.holds_lists(name, &[prompt, completion]) =>
        {
            conversations_of_pairs(reading, rows);
            tools(rows, name, &[prompt, completion], places);
        }
        Some(Shape::Pair(prompt, completion)) => {
            rows.set("template", "none", Note::Given);
            rows.set("column_map", json!({ "input": prompt, "output": completion }), Note::Given);
        }
        Some(Shape::Preference) => {
            reading.missing(key, format!("`{name}` has preferences, which `trl sft` does not train on"));
        }
        Some(Shape::Alpaca) => {
            reading.missing(key, "TRL accepts `text`, `messages`, or `prompt` and `completion`");
        }
        None => {
            let reason = format!(
                "the columns of `{name}` cannot be seen from here; taken for conversations in `messages`, of which TRL trains \
                 on every token unless `assistant_only_loss` is set; a column `tools` is trained with there, where there \
                 is one, and here `column_map: {{ tools: tools }}` of the stage names it"
            );
            reading.differs(key, reason);
            rows::messages(rows, "messages");
        }
    }
    Some(shape.unwrap_or(Shape::Messages("messages".to_owned())))
}

/// Prompts and completions of turns: the completions alone are trained, unless the loss is to be that of every token.
fn conversations_of_pairs(reading: &mut Reading<'_>, rows: &mut Parameters) {
    if reading.choice("completion_only_loss") == Some(false) {
        rows.set("map", json!({ "messages": "{{ row['prompt'] + row['completion'] }}" }), Note::Given);
        rows.set("column_map", json!({ "messages": "messages" }), Note::Given);
    }
    rows.need("turn_order", "any", "The tool accepts turns in any order.");
}

/// The tools of conversations, where the data at hand has a column of them.
fn tools(rows: &mut Parameters, name: &str, of_turns: &[&str], places: &Places) {
    let has_tools = places.columns(name).is_some_and(|columns| columns.iter().any(|column| column == "tools"));
    if has_tools && places.holds_lists(name, of_turns) {
        rows::tools(rows, "tools");
    }
}

/// How long a row may be, and the key that says it, which had another name once; `None` where there is no limit.
fn length(reading: &mut Reading<'_>) -> Option<(&'static str, i64)> {
    let name = if reading.is_given("max_seq_length") { "max_seq_length" } else { "max_length" };
    let length = if reading.is_nothing(name) { None } else { reading.whole(name) };
    length.map(|length| (name, length))
}

/// Whether rows are packed without one of them being cut.
fn packs_whole_rows(reading: &mut Reading<'_>) -> bool {
    reading.flag("packing") && reading.text("packing_strategy").as_deref() != Some("bfd")
}

fn tokens(reading: &mut Reading<'_>, shape: Option<&Shape>, of_strings: bool) {
    if packs_whole_rows(reading) {
        reading.nothing("truncation_mode", "rows that are packed so are split and not cut");
    } else if let Some((name, length)) = length(reading) {
        reading.put(name, "tokens.max_seq_len", length);
        match reading.text("truncation_mode").as_deref() {
            Some("keep_start") => {
                let reason = "cut at the end there and here; here the last token becomes the end of text";
                reading.put_differing("truncation_mode", "tokens.on_too_long", "truncate", reason);
            }
            _ => reading.missing("truncation_mode", "a row is cut at its end"),
        }
    }
    if matches!(shape, Some(Shape::Text(_))) {
        reading.nothing("completion_only_loss", "plain text is trained as a whole");
        reading.nothing("assistant_only_loss", "plain text is trained as a whole");
    } else if reading.flag("assistant_only_loss") {
        reading.put("assistant_only_loss", "tokens.train_on", "assistant");
    } else if matches!(shape, Some(Shape::Pair(..))) {
        let train_on = if reading.choice("completion_only_loss") == Some(false) { "all" } else { "assistant" };
        match of_strings {
            true => {
                let reason = "prompt and completion are encoded as one text there, and one after the other here: a token \
                    that would hold letters of both is two tokens";
                reading.put_differing("completion_only_loss", "tokens.train_on", train_on, reason);
            }
            false => reading.put("completion_only_loss", "tokens.train_on", train_on),
        }
    } else {
        reading.put("assistant_only_loss", "tokens.train_on", "all");
    }
    if let Some(path) = reading.text("chat_template_path") {
        reading
            .missing("chat_template_path", format!("write the template of `{path}` as `chat_template` of `tokenize`"));
    }
    if reading.is_given("eos_token") {
        reading.missing("eos_token", "the end of text is that of the checkpoint's tokenizer");
    }
}

fn tokens_of_pairs(reading: &mut Reading<'_>) {
    if let Some((name, length)) = length(reading) {
        reading.put(name, "tokens.max_seq_len", length);
        match reading.text("truncation_mode").as_deref() {
            Some("keep_start") => reading.put("truncation_mode", "tokens.on_too_long", "truncate"),
            _ => reading.missing("truncation_mode", "responses are cut at their ends"),
        }
    }
    reading.parameters.need("tokens.response_border", "joint", "TRL encodes prompt and response as one text.");
    for name in ["completion_only_loss", "assistant_only_loss"] {
        reading.nothing(name, "of `trl sft`");
    }
}

fn packs(reading: &mut Reading<'_>, job: &mut Job) {
    job.packs = reading.flag("packing");
    if !job.packs {
        return;
    }
    let Some((name, length)) = length(reading) else {
        job.packs = false;
        return reading.missing("packing", "packs need `max_length`");
    };
    reading.put("packing", "packs.max_seq_len", length);
    if !reading.is_reported(name) {
        reading.consumed(name, "packs.max_seq_len");
        if job.is_measured() {
            reading
                .differs("packing", "rows to measure the loss on are packed there, too; here they keep their length");
        }
    }
    match reading.text("packing_strategy").as_deref() {
        Some("bfd") => reading.put("packing_strategy", "packs.strategy", "best_fit"),
        Some("bfd_split" | "bfd-requeue") => {
            reading.put("packing_strategy", "packs.strategy", "best_fit");
            reading.parameters.set("packs.split_across_pack", true, Note::Given);
        }
        _ => {
            let reason =
                "documents are cut wherever a row ends and see each other there; here they never see each other";
            reading.put_differing("packing_strategy", "packs.strategy", "next_fit", reason);
            reading.parameters.set("packs.split_across_pack", true, Note::Given);
        }
    }
}

fn precision(reading: &mut Reading<'_>) {
    let weights = ["torch_dtype", "dtype"].into_iter().find(|name| reading.is_given(name));
    let weights = weights.and_then(|name| reading.text(name)).unwrap_or_default();
    let bf16 = reading.choice("bf16");
    let fp16 = reading.choice("fp16") == Some(true);
    if fp16 {
        reading.put("fp16", "train.dtype", "f16");
    } else if bf16 == Some(true) || matches!(weights.as_str(), "bfloat16" | "bf16") {
        reading.put("bf16", "train.dtype", "bf16");
    } else if bf16 == Some(false) {
        reading.put("bf16", "train.dtype", "f32");
    } else {
        let reason = "where neither bf16 nor fp16 is set, TRL computes in bf16 over f32 weights; here weights are rounded \
                      to bf16 as well where they are multiplied";
        reading.put_differing("bf16", "train.dtype", "bf16", reason);
    }
    let checkpointing = reading.flag("gradient_checkpointing");
    reading.put("gradient_checkpointing", "train.activation_checkpointing", checkpointing);
    reading.nothing("dtype", "`dtype` of the stage");
    reading.nothing("torch_dtype", "`dtype` of the stage");
}
