//! ms-swift: `swift sft` command lines and scripts, YAML, and the `args.json` that it writes.

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use serde_json::json;

use super::hugging_face::{self, NAMES, OTHER_BASE, SPEED};
use super::job::{DRAWN, HeldOut, Job, Method, NOT_MEASURED};
use super::key::Keys;
use super::parameters::{Note, Parameters};
use super::places::Places;
use super::preference::{self, Smoothing};
use super::reading::Reading;
use super::rows::{self, Shape};

pub(super) const VERSION: &str = "4.6.0";

/// The keys of `swift rlhf`.
const PREFERENCE: preference::Names = preference::Names {
    loss: "rlhf_type",
    beta: Some("beta"),
    label_smoothing: Some("label_smoothing"),
    gamma: Some("simpo_gamma"),
    cpo_weight: Some("cpo_alpha"),
    sft_weight: Some("rpo_alpha"),
    desirable_weight: Some("desirable_weight"),
    undesirable_weight: Some("undesirable_weight"),
    orpo_scores_prompts: true,
};

const ELSEWHERE: &str = "of generation or other commands, no part of a training";

pub(super) fn keys() -> Keys {
    Keys::default()
        .read("model", "base")
        .read("model_revision", "base.revision")
        .read("use_hf=false", "base.repo")
        .read("adapters", "train.adapter")
        .read("tuner_type=lora", "train.method")
        .read("train_type", "train.method")
        .read("sft_type", "train.method")
        .whole("lora_rank=8", "train.lora.rank")
        .same("lora_alpha=32", "train.lora.alpha")
        .same("lora_dropout=0.05", "train.lora.dropout")
        .read("target_modules=[all-linear]", "train.lora.target_modules")
        .same("target_regex", "train.lora.target_modules")
        .same("modules_to_save", "train.lora.modules_to_save")
        .same("use_rslora=false", "train.lora.use_rslora")
        .same("use_dora=false", "train.lora.use_dora")
        .same("lorap_lr_ratio", "train.lora.learning_rate_ratio")
        .read("rlhf_type=dpo", "train.loss.name")
        .read("loss_type", "train.loss.name")
        .read("beta=0.1", "train.loss.beta")
        .read("label_smoothing=0", "train.loss.label_smoothing")
        .read("simpo_gamma=1", "train.loss.gamma")
        .read("cpo_alpha=1.0", "train.loss.sft_weight")
        .read("rpo_alpha", "train.loss.sft_weight")
        .read("desirable_weight=1.0", "train.loss.desirable_weight")
        .read("undesirable_weight=1.0", "train.loss.undesirable_weight")
        .missing(
            "the reference is the model that the run starts from",
            &["ref_model", "ref_adapters", "ref_model_revision"],
        )
        .missing(preference::OTHERS, &["reward_model", "reward_funcs", "num_generations"])
        .missing("a variant of DPO that is not supported: docs/preferences.md", &["ld_alpha", "loss_weights"])
        .read("dataset", "rows")
        .read("val_dataset", "held_out_rows")
        .read("split_dataset_ratio", "rows.train_test_split.test_size")
        .read("columns", "rows")
        .read("dataset_shuffle=true", "rows")
        .read("train_dataloader_shuffle=true", "train.shuffle")
        .read("interleave_prob", "mix")
        .read("stopping_strategy=first_exhausted", "mix.stopping_strategy")
        .same("system", "tokens.system_prompt")
        .read("max_length", "tokens.max_seq_len")
        .read("truncation_strategy=delete", "tokens.on_too_long")
        .read("loss_scale=default", "tokens.train_on")
        .read("template", "tokens.chat_template")
        .read("use_chat_template=true", "tokens.chat_template")
        .read("packing=false", "packs")
        .read("packing_length", "packs.max_seq_len")
        .read("packing_strategy=binpack", "packs.strategy")
        .read("torch_dtype", "train.dtype")
        .read("per_device_train_batch_size=1", "train.micro_batch_size")
        .read("gradient_accumulation_steps", "train.gradient_accumulation_steps")
        .read("learning_rate", "train.optimizer.learning_rate")
        .read("weight_decay=0.1", "train.optimizer.weight_decay")
        .read("adam_beta2=0.95", "train.optimizer.betas")
        .read("lr_scheduler_type=cosine", "train.scheduler.name")
        .read("optim=adamw_torch_fused", "train.optimizer.name")
        .read("gradient_checkpointing=true", "train.activation_checkpointing")
        .read("acc_strategy=token", "train")
        .read("early_stop_interval", "train.early_stopping.patience")
        .read("output_dir=output", "publish")
        .nothing(
            SPEED,
            &[
                "attn_impl",
                "experts_impl",
                "padding_free",
                "use_logits_to_keep",
                "dataset_num_proc",
                "packing_num_proc",
                "load_from_cache_file",
                "lazy_tokenize",
                "download_mode",
                "streaming",
                "shuffle_buffer_size",
                "device_map",
                "max_memory",
                "ddp_backend",
                "ds3_gather_for_generation",
                "vit_gradient_checkpointing",
                "use_flash_ckpt",
                "tuner_backend",
                "enable_npu_model_patch",
                "zero_hpz_partition_size",
                "deepspeed_autotp_size",
                "sequence_parallel_size",
                "padding_side",
                "check_model",
                "remove_unused_columns",
                "strict",
                "max_pixels",
                "norm_bbox",
            ],
        )
        .nothing(
            "families are known by `config.json`",
            &["model_type", "task_type", "local_repo_path", "model_meta", "model_info", "model_dir"],
        )
        .nothing(
            "names of folders and files next to the result",
            &[
                "add_version",
                "create_checkpoint_symlink",
                "logging_dir",
                "safe_serialization",
                "max_shard_size",
                "load_args",
                "load_data_args",
                "ignore_args_error",
                "resume_only_model",
                "swanlab_project",
                "swanlab_token",
                "swanlab_workspace",
                "swanlab_exp_name",
                "swanlab_mode",
                "hub_token",
                "swift_version",
                "ckpt_dir",
                "global_world_size",
                "rank",
                "local_world_size",
                "world_size",
            ],
        )
        .nothing(
            ELSEWHERE,
            &[
                "max_new_tokens",
                "temperature",
                "top_k",
                "top_p",
                "repetition_penalty",
                "num_beams",
                "stream",
                "stop_words",
                "logprobs",
                "top_logprobs",
                "val_dataset_shuffle",
                "data_seed",
                "template_backend",
                "freeze_llm",
                "freeze_vit",
                "freeze_aligner",
                "custom_dataset_info",
                "eval_limit",
                "eval_use_evalscope",
                "bnb_4bit_compute_dtype",
                "bnb_4bit_quant_storage",
            ],
        )
        .read("lora_dtype", "train")
        .nothing("figures of every step are always recorded", &["logging_steps=5"])
        .read("quant_bits", "train.quantize.base")
        .read("quant_method", "train.quantize.base")
        .read("bnb_4bit_quant_type=nf4", "train.quantize.base")
        .read("bnb_4bit_use_double_quant=true", "train.quantize.double_quantization")
        .missing(OTHER_BASE, &["hqq_axis"])
        .read("new_special_tokens", "wider.added_special_tokens")
        .missing(
            "it replaces a placeholder in the rows of `swift/self-cognition`: here with `map` of the stage",
            &["model_name", "model_author"],
        )
        .missing("an adapter begins with random values and zeros", &["init_weights=true", "init_lora_weights=true"])
        .missing("biases are not trained with an adapter", &["lora_bias=none"])
        .missing("the chat template writes tools", &["agent_template"])
        .missing("responses without reasoning are as the chat template writes them", &["add_non_thinking_prefix=true"])
        .missing("experts are trained without a loss of their router's", &["router_aux_loss_coef=0.0"])
        .missing(
            "not supported here",
            &[
                "rope_scaling",
                "max_model_len",
                "init_strategy",
                "num_labels",
                "problem_type",
                "freeze_parameters",
                "freeze_parameters_regex",
                "freeze_parameters_ratio=0.0",
                "trainable_parameters",
                "trainable_parameters_regex",
                "target_parameters",
                "use_galore",
                "use_swift_lora",
                "lisa_activated_layers=0",
                "enable_dft_loss",
                "enable_channel_loss",
                "optimizer",
                "aligner_lr",
                "vit_lr",
                "max_epochs",
                "eval_metric",
                "callbacks",
                "external_plugins",
                "custom_register_path",
                "cached_dataset",
                "cached_val_dataset",
                "response_prefix",
                "enable_thinking",
                "is_binary_loss_scale",
                "model_kwargs",
                "eval_dataset",
                "eval_dataset_args",
                "mrl_dims",
                "lora_ga_batch_size=2",
                "reft_rank=4",
                "vera_rank=256",
                "adalora_target_r=8",
            ],
        )
        .and(hugging_face::keys())
}

/// Reads the arguments of `swift sft`, `swift pt` or `swift rlhf`.
pub(super) fn read(reading: &mut Reading<'_>, root: &Node, devices: i64, verb: Option<&str>, places: &Places) -> Job {
    let mut job = Job::default();
    let is_pretraining = verb == Some("pt");
    let is_preference = verb == Some("rlhf") || verb.is_none() && reading.is_given("rlhf_type");
    if is_pretraining {
        reading.by_default("loss_scale", "all");
    }
    loss(reading, is_preference);
    reading.require("model", Span { len: 0, ..root.span });
    reading.require("dataset", Span { len: 0, ..root.span });
    let hub = if reading.flag("use_hf") { "" } else { "modelscope:" };
    reading.nothing("use_hf", "the hub is in the names");
    hugging_face::model(reading, ["model", "model_revision"], hub, places);
    method(reading, &mut job, places);
    if reading.parameters.get("train.loss.name").is_some() {
        preference::without_dropout(reading, &job);
    }
    let shapes = rows(reading, &mut job, is_pretraining, hub, places);
    held_out(reading, &mut job, is_pretraining, hub, places);
    tokens(reading, &shapes, is_pretraining);
    packs(reading, &mut job);
    precision(reading);
    quantized_base(reading, job.method);
    learning_rate(reading, job.method);
    accumulation(reading, devices);
    hugging_face::training(reading, &mut job, &NAMES, devices);
    if job.is_measured() {
        let strategy = strategy(reading);
        if reading.text(strategy).as_deref() == Some("steps") {
            hugging_face::eval_steps(reading, "save_steps");
        }
        hugging_face::best(reading);
        if let Some(patience) = reading.whole("early_stop_interval") {
            reading.put("early_stop_interval", "train.early_stopping.patience", patience);
        }
    }
    if !reading.flag("train_dataloader_shuffle") {
        reading.put("train_dataloader_shuffle", "train.shuffle", false);
    }
    if reading.text("acc_strategy").as_deref() == Some("seq") {
        reading.differs("acc_strategy", "`seq` means over rows there; here the mean over the target tokens of a step");
    }
    match reading.texts("new_special_tokens").iter().any(|token| token.ends_with(".txt")) {
        true => reading.missing("new_special_tokens", "a file of tokens: write them out one by one"),
        false => job.add_tokens(reading, "new_special_tokens", "wider.added_special_tokens", "modules_to_save"),
    }
    job.output = reading.text("output_dir");
    reading.consumed("output_dir", "publish");
    job
}

fn loss(reading: &mut Reading<'_>, is_preference: bool) {
    if !is_preference {
        if reading.is_given("loss_type") {
            reading.missing("loss_type", "not supported here");
        }
        reading.nothing("rlhf_type", "of `swift rlhf`");
        return preference::without(reading, &PREFERENCE, "of `swift rlhf`");
    }
    reading.by_default("loss_scale", "last_round");
    let kind = reading.text("rlhf_type").unwrap_or_default();
    let which = match reading.text("loss_type").filter(|_| kind == "dpo") {
        Some(loss) => loss,
        None => kind.clone(),
    };
    if kind == "simpo" {
        reading.by_default("beta", "2.0");
    }
    preference::loss(reading, &PREFERENCE, &which, Smoothing::Conservative);
    reading.nothing("loss_type", "`loss` of the stage");
}

fn method(reading: &mut Reading<'_>, job: &mut Job, places: &Places) {
    match reading.text("lora_dtype").as_deref() {
        Some("float32") => reading.nothing("lora_dtype", "trained parameters are f32"),
        Some(dtype @ ("float16" | "bfloat16")) => {
            let reason = format!("there the adapter is kept in {dtype}; here it is f32, and so are its moments");
            reading.differs("lora_dtype", reason);
        }
        _ => reading.nothing("lora_dtype", "f32, as here"),
    }
    let name = ["train_type", "sft_type"].into_iter().find(|name| reading.is_given(name)).unwrap_or("tuner_type");
    match reading.text(name).as_deref() {
        Some("full") => job.method = Method::Full,
        Some("lora") => reading.put(name, "train.method", "lora"),
        other => {
            let other = other.unwrap_or_default();
            reading.missing(name, format!("`{other}`: only lora and full are supported"));
        }
    }
    if job.method == Method::Full {
        reading.leave_out("train.lora", "nothing without an adapter");
    } else {
        let modules = reading.texts("target_modules");
        if reading.is_given("target_regex") {
            reading.nothing("target_modules", "`target_regex` decides");
        } else if modules == ["all-linear"] || modules == ["ALL"] {
            reading.put("target_modules", "train.lora.target_modules", "all-linear");
        } else {
            reading.put("target_modules", "train.lora.target_modules", json!(modules));
        }
    }
    if let [folder, others @ ..] = reading.texts("adapters").as_slice() {
        if others.is_empty() {
            job.go_on_from(reading, "adapters", folder, places);
        } else {
            reading.missing("adapters", "training starts from one adapter");
        }
    }
}

/// The stages of the training rows, and the shapes that are known.
fn rows(reading: &mut Reading<'_>, job: &mut Job, is_pretraining: bool, hub: &str, places: &Places) -> Vec<Shape> {
    let names = of_list(reading, "dataset");
    reading.nothing("dataset", "a stage for each");
    let mut shapes = Vec::new();
    job.datasets =
        names.iter().map(|name| dataset(reading, "dataset", name, is_pretraining, hub, places, &mut shapes)).collect();
    if reading.is_given("interleave_prob") {
        let weights = reading.texts("interleave_prob");
        for (dataset, weight) in job.datasets.iter_mut().zip(weights) {
            dataset.set("weight", weight.parse::<f64>().unwrap_or(1.0), Note::Given);
        }
        let strategy = reading.text("stopping_strategy").unwrap_or_default();
        reading.put("stopping_strategy", "mix.stopping_strategy", strategy);
        reading.put("interleave_prob", "mix.mix", "interleave");
    }
    if reading.flag("dataset_shuffle") && reading.flag("train_dataloader_shuffle") {
        reading.nothing("dataset_shuffle", "each epoch is shuffled");
    } else if reading.flag("dataset_shuffle") {
        reading.differs("dataset_shuffle", "the rows are shuffled once there; here they keep the order of their files");
    }
    if reading.is_given("columns") && !reading.is_reported("columns") {
        reading.missing("columns", "rows of preferences have other columns: `column_map` of the stage `rows`");
    }
    shapes
}

/// Texts of a list; a name may hold blanks and commas.
fn of_list(reading: &Reading<'_>, name: &str) -> Vec<String> {
    let text = |node: &Node| node.to_json().as_str().map(str::to_owned);
    match reading.entry(name).map(|entry| &entry.value) {
        None => Vec::new(),
        Some(node) => match &node.value {
            Value::List(items) => items.iter().filter_map(text).collect(),
            _ => text(node).into_iter().collect(),
        },
    }
}

/// One data set, `HF::id:subset/split#rows`.
fn dataset(
    reading: &mut Reading<'_>,
    key: &'static str,
    name: &str,
    is_pretraining: bool,
    hub: &str,
    places: &Places,
    shapes: &mut Vec<Shape>,
) -> Parameters {
    let mut rows = Parameters::default();
    let (name, hub) = match (name.strip_prefix("HF::").or(name.strip_prefix("hf::")), name.strip_prefix("MS::")) {
        (Some(name), _) => (name, ""),
        (_, Some(name)) => (name, "modelscope:"),
        _ => (name, hub),
    };
    let (name, count) = match name.rsplit_once('#') {
        Some((name, count)) => (name, count.parse::<i64>().ok()),
        None => (name, None),
    };
    let is_path = places.is_path(name);
    let (name, subset) = match name.split_once(':') {
        Some((name, subset)) if !is_path => (name, Some(subset)),
        _ => (name, None),
    };
    match rows::source(name, hub, places) {
        Ok(source) => rows.set("source", source, Note::Given),
        Err(reason) => reading.missing(key, reason),
    }
    if let Some(subset) = subset {
        let (config, split) = subset.split_once('/').map_or((subset, None), |(config, split)| (config, Some(split)));
        if config != "default" {
            rows.set("config", config, Note::Given);
        }
        if let Some(split) = split {
            rows.set("split", split, Note::Given);
        }
    }
    if let Some(count) = count {
        if places.count(name).is_none_or(|rows| (rows as i64) < count) {
            let reason = format!(
                "`{name}#{count}`: there rows are repeated where there are fewer, so that there are {count}; here each is \
                 used once"
            );
            reading.differs(key, reason);
        }
        rows.need("shuffle", true, "`#` draws rows at random.");
        rows.set("limit", count, Note::Given);
    }
    if reading.parameters.get("train.loss.name").is_some() {
        preference::as_they_are(&mut rows);
        let has_tools = places.columns(name).is_some_and(|columns| columns.iter().any(|column| column == "tools"));
        if has_tools && places.holds_lists(name, &["messages", "chosen", "prompt"]) {
            rows::tools(&mut rows, "tools");
        }
        return rows;
    }
    let renamed = renamed(reading);
    let columns = places.columns(name).map(|columns| {
        let column =
            |column: String| renamed.iter().find(|(from, _)| *from == column).map_or(column, |(_, to)| to.clone());
        columns.into_iter().map(column).collect::<Vec<_>>()
    });
    let original = |column: &str| {
        renamed.iter().find(|(_, to)| to == column).map_or_else(|| column.to_owned(), |(from, _)| from.clone())
    };
    let named = |names: &[&str]| columns.iter().flatten().find(|column| names.contains(&column.as_str())).cloned();
    let system = named(&["system", "system_prompt"]).map(|column| original(&column));
    let history = named(&["history"]).map(|column| original(&column));
    let (history, unread) = match history {
        Some(column) if places.holds_lists(name, &[&column]) => (Some(column), false),
        column => (None, column.is_some()),
    };
    if unread {
        reading.differs(key, format!("`history` of `{name}` is not read here: it contains no lists of pairs"));
    }
    let answered = |rows: &mut Parameters, user: &str, response: &str| {
        let (system, assistant) = (system.as_deref().map(rows::column), rows::column(&original(response)));
        match history.as_deref().map(rows::column) {
            Some(history) => rows::conversation_after(rows, &history, system.as_deref(), user, &assistant),
            None => rows::conversation(rows, system.as_deref(), user, &assistant),
        }
    };
    let instruction = || rows::instruction(&original("instruction"), &original("input"));
    match columns.as_deref().and_then(Shape::of) {
        Some(Shape::Messages(column)) => {
            let column = original(&column);
            let weighs = places.turns_have(name, &column, "loss");
            match system.as_deref().filter(|_| places.holds_lists(name, &[&column])) {
                Some(_) if weighs => {
                    reading.missing(key, format!("`{name}` has turns with `loss`, and a column `system`"));
                }
                None if weighs => rows::messages_weighted(&mut rows, &column),
                Some(system) => {
                    rows::messages_after(&mut rows, &column, system);
                    rows.need("turn_order", "any", "The tool accepts turns in any order.");
                }
                None => rows::messages(&mut rows, &column),
            }
        }
        Some(Shape::Alpaca) => answered(&mut rows, &instruction(), "output"),
        Some(Shape::Pair(prompt, response)) if prompt == "input" && named(&["instruction"]).is_some() => {
            answered(&mut rows, &instruction(), &response);
        }
        Some(Shape::Pair(prompt, response)) => answered(&mut rows, &rows::column(&original(&prompt)), &response),
        Some(Shape::Text(column)) if is_pretraining => rows::text(&mut rows, &original(&column)),
        Some(Shape::Preference) => {
            reading.missing(key, format!("`{name}` has preferences, which `swift sft` does not train on"));
        }
        Some(Shape::Text(_)) | None => guessed(reading, key, &mut rows, name, &renamed, is_pretraining),
    }
    if let Some(tools) =
        named(&["tools"]).filter(|_| rows.get("column_map").is_some_and(|map| map["messages"].is_string()))
    {
        rows::tools(&mut rows, &original(&tools));
    }
    let guess = is_pretraining.then(|| Shape::Text("text".to_owned()));
    shapes.extend(columns.as_deref().and_then(Shape::of).or(guess));
    rows
}

/// `--columns '{"from": "to"}'`.
fn renamed(reading: &mut Reading<'_>) -> Vec<(String, String)> {
    let columns = match reading.value("columns") {
        Value::Map(entries) => entries.into_iter().map(|entry| (entry.key, entry.value.to_json())).collect(),
        Value::String(text) => serde_json::from_str::<serde_json::Map<_, _>>(&text).unwrap_or_default(),
        _ => return Vec::new(),
    };
    reading.nothing("columns", "in `map` of the stage");
    columns.into_iter().filter_map(|(from, to)| Some((from, to.as_str()?.to_owned()))).collect()
}

/// Rows whose columns cannot be seen from here: by the names that ms-swift itself looks for.
fn guessed(
    reading: &mut Reading<'_>,
    key: &'static str,
    rows: &mut Parameters,
    name: &str,
    renamed: &[(String, String)],
    is_pretraining: bool,
) {
    let first = |names: &[&str]| {
        let renamed = renamed.iter().filter(|(_, to)| names.contains(&to.as_str())).map(|(from, _)| from.as_str());
        let columns: Vec<String> = renamed.chain(names.iter().copied()).map(rows::column).collect();
        columns.join(" or ")
    };
    if is_pretraining {
        let reason = format!("the columns of `{name}` are not known: plain text in `text` is read");
        reading.differs(key, reason);
        return rows::text(rows, "text");
    }
    let input = rows::column("input");
    let alpaca = format!("({} if {input} else '')", rows::instruction("instruction", "input"));
    let user = format!("{alpaca} or {}", first(&["query", "prompt", "input", "instruction", "question", "problem"]));
    let names = ["response", "answer", "output", "targets", "target", "answer_key", "answers", "solution", "text"];
    let assistant = format!("{} or {}", first(&names), first(&["completion", "content"]));
    let pair = format!("[{{'role': 'user', 'content': {user}}}, {{'role': 'assistant', 'content': {assistant}}}]");
    let [messages, conversations] = ["messages", "conversations"].map(rows::column);
    let expression = format!("{{{{ {messages} or {conversations} or {pair} }}}}");
    rows.set("map", json!({ "messages": expression }), Note::Given);
    let reason = format!(
        "the columns of `{name}` are not known: `messages`, `conversations`, or a question and an answer by the names \
         that ms-swift looks for; look at them with `pipeline show FILE rows`. Columns `system`, `history` and `tools`, and \
         `loss` of a turn, are trained with there, and not read here: name those that there are"
    );
    reading.differs(key, reason);
    rows.set("column_map", json!({ "messages": "messages" }), Note::Given);
    rows.need("turn_order", "any", "The tool accepts turns in any order.");
}

/// The key of when the loss is measured: without one of its own, whenever ms-swift saves.
fn strategy(reading: &Reading<'_>) -> &'static str {
    if reading.is_given("eval_strategy") { "eval_strategy" } else { "save_strategy" }
}

fn held_out(reading: &mut Reading<'_>, job: &mut Job, is_pretraining: bool, hub: &str, places: &Places) {
    let strategy = strategy(reading);
    if hugging_face::evaluation_is_off(reading, strategy) {
        reading.nothing("eval_strategy", NOT_MEASURED);
        for name in ["val_dataset", "split_dataset_ratio"] {
            reading.nothing(name, "no loss is measured, and no rows are held out for it");
        }
        return;
    }
    let own = of_list(reading, "val_dataset");
    if !own.is_empty() {
        reading.nothing("val_dataset", "a stage for each");
        let rows =
            own.iter().map(|name| dataset(reading, "val_dataset", name, is_pretraining, hub, places, &mut Vec::new()));
        job.held_out = HeldOut::Own(rows.collect());
        return;
    }
    // Up to 3.x, whose name for it is `train_type`, 1 % of the rows were held out without being asked.
    let is_old = reading.is_given("train_type") || reading.is_given("sft_type");
    let share = reading.number("split_dataset_ratio").unwrap_or(if is_old { 0.01 } else { 0.0 });
    let reason = if reading.is_given("split_dataset_ratio") {
        DRAWN
    } else {
        "ms-swift 3 holds this out by default (`train_type` is its name of the key); 4 holds out nothing"
    };
    job.hold_out(reading, "split_dataset_ratio", share, reason);
}

fn tokens(reading: &mut Reading<'_>, shapes: &[Shape], is_pretraining: bool) {
    let is_text = is_pretraining && shapes.iter().all(|shape| matches!(shape, Shape::Text(_))) && !shapes.is_empty();
    match reading.whole("max_length") {
        Some(length) => reading.put("max_length", "tokens.max_seq_len", length),
        None => reading.nothing("max_length", "every row keeps its length; there the model's own limit"),
    }
    let strategy = reading.text("truncation_strategy").unwrap_or_default();
    if reading.is_given("max_length") {
        match strategy.as_str() {
            "delete" => reading.put("truncation_strategy", "tokens.on_too_long", "drop"),
            "right" => reading.put("truncation_strategy", "tokens.on_too_long", "truncate"),
            "split" if is_text => reading.put("truncation_strategy", "tokens.on_too_long", "split"),
            other => {
                let reason = format!("`{other}`: a row is truncated at its end, left out, or, for plain text, split");
                reading.missing("truncation_strategy", reason);
            }
        }
    }
    match reading.text("loss_scale").as_deref() {
        Some("last_round") if reading.parameters.get("train.loss.name").is_some() => {
            reading.nothing("loss_scale", "only responses are scored");
        }
        Some("default" | "ignore_empty_think") => reading.put("loss_scale", "tokens.train_on", "assistant"),
        Some("last_round") => reading.put("loss_scale", "tokens.train_on", "last"),
        Some("all") => reading.put("loss_scale", "tokens.train_on", "all"),
        other => {
            let other = other.unwrap_or_default().to_owned();
            reading.missing(
                "loss_scale",
                format!("`{other}`: weights are a column or a field of messages here (`weight`)"),
            );
        }
    }
    match is_pretraining {
        true => reading.nothing("use_chat_template", "plain text has no template"),
        false if reading.flag("use_chat_template") => reading.nothing("use_chat_template", "as here"),
        false => reading.missing("use_chat_template", "prompts and responses are written by a chat template"),
    }
    let reason = "there ms-swift's template for this model; here the tokenizer's own chat template, which may add a \
        system message";
    if !is_text {
        reading.differs("template", reason);
    }
}

fn packs(reading: &mut Reading<'_>, job: &mut Job) {
    job.packs = reading.flag("packing");
    if !job.packs {
        return;
    }
    let length = reading.whole("packing_length").or_else(|| reading.whole("max_length"));
    match length {
        Some(length) => reading.put("packing", "packs.max_seq_len", length),
        None => {
            job.packs = false;
            reading.missing("packing", "packs need a length: set `--max_length`, which is the model's own there");
        }
    }
    let strategy = reading.text("packing_strategy").unwrap_or_default();
    let strategy = if strategy == "sequential" { "next_fit" } else { "best_fit" };
    reading.put("packing_strategy", "packs.strategy", strategy);
}

fn precision(reading: &mut Reading<'_>) {
    match reading.text("torch_dtype").as_deref() {
        Some("float32") => reading.put("torch_dtype", "train.dtype", "f32"),
        Some("float16") => reading.put("torch_dtype", "train.dtype", "f16"),
        Some("bfloat16") => reading.put("torch_dtype", "train.dtype", "bf16"),
        _ if reading.is_given("bf16") || reading.is_given("fp16") => {}
        _ => {
            let reason = "that of the checkpoint there, which is bf16 for most; here it is written out";
            reading.put_differing("torch_dtype", "train.dtype", "bf16", reason);
        }
    }
    if reading.parameters.get("train.dtype").is_some() {
        let checkpointing = reading.flag("gradient_checkpointing");
        reading.put("gradient_checkpointing", "train.activation_checkpointing", checkpointing);
    }
}

fn quantized_base(reading: &mut Reading<'_>, method: Method) {
    let is_bnb = reading.text("quant_method").as_deref() == Some("bnb");
    match reading.whole("quant_bits") {
        Some(4) if is_bnb && method == Method::Lora => {
            reading.nothing("quant_method", "`quantize.base` of the stage");
            let (kind, double) = (Some("bnb_4bit_quant_type"), Some("bnb_4bit_use_double_quant"));
            hugging_face::quantized_base(reading, "quant_bits", kind, double);
        }
        Some(_) => reading.missing("quant_bits", OTHER_BASE),
        None => hugging_face::no_quantized_base(
            reading,
            &["quant_method", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"],
        ),
    }
}

fn learning_rate(reading: &mut Reading<'_>, method: Method) {
    let rate = reading.number("learning_rate").unwrap_or(match method {
        Method::Lora => 1e-4,
        Method::Full => 1e-5,
    });
    reading.put("learning_rate", "train.optimizer.learning_rate", rate);
}

fn accumulation(reading: &mut Reading<'_>, devices: i64) {
    let size = reading.whole("per_device_train_batch_size").unwrap_or(1).max(1);
    if let Some(steps) = reading.whole("gradient_accumulation_steps") {
        return reading.put("gradient_accumulation_steps", "train.gradient_accumulation_steps", steps);
    }
    let steps = (16 + size * devices - 1) / (size * devices);
    let reason = format!(
        "if it is not set, ms-swift uses as many as make 16 rows per step: 16 / ({size} × {devices}), rounded up, is \
         {steps}"
    );
    reading.put_differing("gradient_accumulation_steps", "train.gradient_accumulation_steps", steps.max(1), reason);
}
