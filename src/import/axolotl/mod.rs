//! axolotl: its YAML.

mod datasets;
mod keys;

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use serde_json::json;

use super::hugging_face::{self, Names};
use super::job::{DRAWN, HeldOut, Job, Method, NOT_MEASURED};
use super::parameters::Note;
use super::places::Places;
use super::preference::{self, Smoothing};
use super::reading::Reading;
use super::rows;
use datasets::{Kind, datasets, of_datasets, words};
pub(super) use keys::keys;

pub(super) const VERSION: &str = "0.19.0";

const NAMES: Names = Names {
    micro_batch_size: "micro_batch_size",
    gradient_accumulation_steps: "gradient_accumulation_steps",
    epochs: "num_epochs",
    optimizer: "optimizer",
    scheduler: "lr_scheduler",
    // The options alone switch it on.
    sharding: &["deepspeed", "fsdp", "fsdp_config"],
};

/// The keys that `rl:` reads.
const PREFERENCE: preference::Names = preference::Names {
    loss: "rl",
    beta: Some("rl_beta"),
    label_smoothing: Some("dpo_label_smoothing"),
    gamma: Some("simpo_gamma"),
    cpo_weight: Some("cpo_alpha"),
    sft_weight: Some("rpo_alpha"),
    desirable_weight: Some("kto_desirable_weight"),
    undesirable_weight: Some("kto_undesirable_weight"),
    orpo_scores_prompts: true,
};

/// Reads a configuration.
pub(super) fn read(reading: &mut Reading<'_>, root: &Node, devices: i64, places: &Places) -> Job {
    let mut job = Job::default();
    reading.require("base_model", Span { len: 0, ..root.span });
    reading.require("learning_rate", Span { len: 0, ..root.span });
    let revision = if reading.is_given("model_revision") { "model_revision" } else { "revision_of_model" };
    hugging_face::model(reading, ["base_model", revision], "", places);
    method(reading, &mut job, places);
    loss(reading);
    if reading.parameters.get("train.loss.name").is_some() {
        preference::without_dropout(reading, &job);
    }
    let mut kinds = Vec::new();
    job.datasets = datasets(reading, "datasets", root, &mut kinds, places);
    if reading.is_given("datasets") && reading.is_given("pretraining_dataset") {
        reading.missing("pretraining_dataset", "rows for pretraining besides `datasets`: a training of its own here");
    }
    held_out(reading, &mut job, root, &mut kinds, places);
    let own = of_datasets(reading, root);
    tokens(reading, &kinds, words(root), own);
    packs(reading, &mut job, devices);
    precision(reading);
    schedule(reading);
    hugging_face::training(reading, &mut job, &NAMES, devices);
    if let Some(limit) = reading.number("loss_watchdog_threshold") {
        let reason = format!("there a loss above {limit} ends the run; here one that is not finite");
        reading.differs("loss_watchdog_threshold", reason);
    }
    when(reading, &job);
    if reading.flag("curriculum_sampling") {
        reading.put("curriculum_sampling", "train.shuffle", false);
    }
    if let Some(plugins) = reading.is_given("plugins").then(|| reading.texts("plugins")) {
        let unknown = plugins.iter().find(|plugin| !plugin.contains("liger") && !plugin.contains("cut_cross_entropy"));
        match unknown {
            Some(plugin) => reading.missing("plugins", format!("`{plugin}` is separate code")),
            None => reading.nothing("plugins", "kernels that change only speed"),
        }
    }
    if let Some(tokens) = reading.entry("special_tokens") {
        let others = match &tokens.value.value {
            Value::Map(entries) => entries.iter().any(|entry| entry.key != "pad_token"),
            _ => true,
        };
        match others {
            true => {
                reading.missing("special_tokens", "tokens are those of the checkpoint: change its tokenizer's files")
            }
            false => reading.nothing("special_tokens", "padding is never computed here"),
        }
    }
    job.add_tokens(reading, "tokens", "wider.added_tokens", "lora_modules_to_save");
    job.output = reading.text("output_dir");
    reading.consumed("output_dir", "publish");
    job
}

fn loss(reading: &mut Reading<'_>) {
    let Some(kind) = reading.text("rl") else {
        reading.nothing("dpo_loss_type", "of `rl: dpo`");
        reading.nothing("orpo_alpha", "of `rl: orpo`");
        return preference::without(reading, &PREFERENCE, "of `rl`");
    };
    let which = match (kind.as_str(), reading.texts("dpo_loss_type").as_slice()) {
        ("dpo", [loss]) => loss.clone(),
        ("dpo", [_, _, ..]) => {
            reading.missing("dpo_loss_type", "only one loss is supported");
            kind.clone()
        }
        _ => kind.clone(),
    };
    preference::loss(reading, &PREFERENCE, &which, Smoothing::Ignored);
    reading.nothing("dpo_loss_type", "`loss` of the stage");
    let decides = kind == "orpo" && !reading.is_given("rl_beta");
    match reading.number("orpo_alpha").filter(|_| decides) {
        Some(alpha) => reading.put("orpo_alpha", "train.loss.beta", alpha),
        None if kind == "orpo" => reading.nothing("orpo_alpha", "`rl_beta` comes first"),
        None => reading.nothing("orpo_alpha", "of `rl: orpo`"),
    }
}

fn method(reading: &mut Reading<'_>, job: &mut Job, places: &Places) {
    let adapter = reading.text("adapter").filter(|adapter| !adapter.is_empty());
    match adapter.as_deref() {
        None => job.method = Method::Full,
        Some("lora") => reading.put("adapter", "train.method", "lora"),
        Some("qlora") => {
            if !reading.flag("load_in_4bit") {
                reading.missing("adapter", "`qlora` without `load_in_4bit`: the base keeps the dtype of its files");
            }
            reading.put("adapter", "train.method", "lora");
        }
        Some(other) => reading.missing("adapter", format!("`{other}` is no adapter here: LoRA is")),
    }
    if job.method == Method::Full {
        reading.leave_out("train.lora", "nothing without an adapter");
        reading.nothing("lora_target_modules", "nothing without an adapter");
        reading.nothing("lora_target_linear", "nothing without an adapter");
        if reading.flag("load_in_4bit") {
            reading.missing("load_in_4bit", "a quantised base is for an adapter");
        }
        return;
    }
    if reading.flag("load_in_4bit") {
        hugging_face::quantized_base(reading, "load_in_4bit", None, None);
    }
    if reading.flag("lora_target_linear") {
        reading.put("lora_target_linear", "train.lora.target_modules", "all-linear");
        let others = reading.texts("lora_target_modules");
        match others.iter().find(|module| module.contains("embed") || module.contains("lm_head")) {
            Some(other) => {
                let reason = format!("`{other}` besides all linear layers: here either names or `all-linear`");
                reading.missing("lora_target_modules", reason);
            }
            None => reading.nothing("lora_target_modules", "`lora_target_linear` selects all of them"),
        }
    } else if reading.is_given("lora_target_modules") {
        let modules = match reading.value("lora_target_modules") {
            Value::String(pattern) => json!(pattern),
            _ => json!(reading.texts("lora_target_modules")),
        };
        reading.put("lora_target_modules", "train.lora.target_modules", modules);
    }
    if let Some(folder) = reading.text("lora_model_dir") {
        job.go_on_from(reading, "lora_model_dir", &folder, places);
    }
}

fn held_out(reading: &mut Reading<'_>, job: &mut Job, root: &Node, kinds: &mut Vec<Kind>, places: &Places) {
    let is_off = hugging_face::evaluation_is_off(reading, "eval_strategy");
    if is_off {
        reading.nothing("eval_strategy", NOT_MEASURED);
    }
    if reading.is_given("test_datasets") && is_off {
        reading.nothing("test_datasets", NOT_MEASURED);
        return reading.nothing("val_set_size", "`test_datasets` takes its place");
    }
    if reading.is_given("test_datasets") {
        job.held_out = HeldOut::Own(datasets(reading, "test_datasets", root, kinds, places));
        reading.nothing("val_set_size", "`test_datasets` are measured on");
        return;
    }
    let size = reading.number("val_set_size").unwrap_or(0.0);
    job.hold_out(reading, "val_set_size", size, DRAWN);
    if is_off {
        job.measure_nothing();
    }
}

fn tokens(reading: &mut Reading<'_>, kinds: &[Kind], words: Option<&str>, own: Option<String>) {
    let length = reading.whole("sequence_len").unwrap_or(512);
    reading.put("sequence_len", "tokens.max_seq_len", length);
    let strategy = reading.text("excess_length_strategy").unwrap_or_default();
    let strategy = if strategy == "raise" { "error" } else { &strategy };
    if kinds.contains(&Kind::Text) {
        reading.nothing("excess_length_strategy", "plain text is split there and here");
    } else {
        reading.put("excess_length_strategy", "tokens.on_too_long", strategy);
    }
    if kinds.contains(&Kind::Preferences) {
        reading.nothing("train_on_inputs", "only responses are scored");
        reading.parameters.need("tokens.response_border", "joint", "TRL encodes prompt and response as one text.");
        reading.nothing("eot_tokens", "what ends a response is the template's");
        return match words {
            Some(words) => {
                reading.parameters.set("tokens.chat_template", words, Note::Given);
                reading.nothing("chat_template", "the template is that of the type");
            }
            None => template(reading, own),
        };
    }
    let is_chat = kinds.contains(&Kind::Conversations);
    match reading.flag("train_on_inputs") {
        true if is_chat => {
            let reason = "there every turn but what the template writes around it, here every token";
            reading.put_differing("train_on_inputs", "tokens.train_on", "all", reason);
        }
        true => reading.put("train_on_inputs", "tokens.train_on", "all"),
        false => reading.put("train_on_inputs", "tokens.train_on", "assistant"),
    }
    if !is_chat {
        reading.nothing("chat_template", "no rows are conversations");
        return reading.nothing("eot_tokens", "no rows are conversations");
    }
    let reason = "the end of an assistant's turn is trained here, whatever the template ends it with; there only \
        `eos_token` and `eot_tokens`";
    match reading.is_given("eot_tokens") {
        true => reading.nothing("eot_tokens", "the end of an assistant's turn is trained here in any case"),
        false => reading.differs("eot_tokens", reason),
    }
    template(reading, own);
}

/// The template of conversations; `own` is that of the data sets.
fn template(reading: &mut Reading<'_>, own: Option<String>) {
    let is_jinja = own.is_none() && !reading.is_given("chat_template") && reading.is_given("chat_template_jinja");
    let named = own.or_else(|| reading.text("chat_template"));
    match named.as_deref().or(is_jinja.then_some("jinja")) {
        None | Some("tokenizer_default") => reading.nothing("chat_template", "the tokenizer's own"),
        Some("chatml") => reading.put("chat_template", "tokens.chat_template", "chatml"),
        Some("llama3") => reading.put("chat_template", "tokens.chat_template", rows::LLAMA3),
        Some("jinja") => match reading.text("chat_template_jinja") {
            Some(template) if template.contains("{%") || template.contains("{{") => {
                reading.put("chat_template_jinja", "tokens.chat_template", template);
                reading.nothing("chat_template", "`chat_template_jinja` has it");
            }
            Some(file) => {
                reading.missing("chat_template_jinja", format!("`{file}` is a file: here the template itself"));
            }
            None => reading.missing("chat_template", "`chat_template_jinja` is missing"),
        },
        Some(name) => {
            let reason = format!("`{name}` is a template that axolotl brings; here the tokenizer's own is used");
            reading.differs("chat_template", reason);
        }
    }
}

fn packs(reading: &mut Reading<'_>, job: &mut Job, devices: i64) {
    job.packs = reading.flag("sample_packing");
    if !job.packs {
        return;
    }
    let length = reading.whole("sequence_len").unwrap_or(512);
    let size = reading.whole("micro_batch_size").unwrap_or(1);
    let reason = format!(
        "documents of a pack do not see each other, there and here; a row there is one bin of micro_batch_size × \
         sequence_len = {} tokens, here {} packs of {length}",
        size * length,
        size * devices
    );
    reading.put_differing("sample_packing", "packs.max_seq_len", length, reason);
    let strategy = if reading.flag("sample_packing_sequentially") { "next_fit" } else { "best_fit" };
    reading.put("sample_packing_sequentially", "packs.strategy", strategy);
}

fn precision(reading: &mut Reading<'_>) {
    let is_auto = reading.value("bf16") == Value::String("auto".to_owned());
    let half = reading.choice("fp16") == Some(true) || reading.choice("float16") == Some(true);
    if is_auto && !half {
        let reason = "`auto` is bf16 where the device has it; here it is always bf16";
        reading.put_differing("bf16", "train.dtype", "bf16", reason);
    } else if is_auto || half {
        reading.put("fp16", "train.dtype", "f16");
    } else if reading.choice("bfloat16") == Some(true) {
        reading.put("bfloat16", "train.dtype", "bf16");
    }
    let is_offloaded = matches!(reading.value("gradient_checkpointing"), Value::String(_));
    let checkpointing = is_offloaded || reading.flag("gradient_checkpointing");
    reading.put("gradient_checkpointing", "train.activation_checkpointing", checkpointing);
    if reading.parameters.get("train.dtype").is_none() && reading.choice("bf16") == Some(true) {
        reading.put("bf16", "train.dtype", "bf16");
    }
    if reading.parameters.get("train.dtype").is_none() {
        reading.put("bf16", "train.dtype", "f32");
    }
}

fn schedule(reading: &mut Reading<'_>) {
    let name = reading.text("lr_scheduler").unwrap_or_default();
    let share = reading.number("cosine_min_lr_ratio").filter(|_| reading.is_given("cosine_min_lr_ratio"));
    if name != "cosine" {
        reading.nothing("cosine_min_lr_ratio", "only of `cosine`");
    } else if let Some(share) = share {
        reading.put("lr_scheduler", "train.scheduler.name", "cosine_with_min_lr");
        reading.put("cosine_min_lr_ratio", "train.scheduler.min_lr_rate", share);
    }
    if name != "constant" && !reading.is_given("warmup_steps") {
        let (ratio, reason) = match reading.number("warmup_ratio") {
            Some(ratio) => (ratio, "the share of all steps is rounded down there, and up here".to_owned()),
            None => {
                let reason = "if neither `warmup_steps` nor `warmup_ratio` is set, axolotl uses 3 % of the steps, \
                    rounded down, at most 100; here 3 %, rounded up, without a limit";
                (0.03, reason.to_owned())
            }
        };
        reading.put_differing("warmup_ratio", "train.scheduler.warmup_ratio", ratio, reason);
    }
}

fn when(reading: &mut Reading<'_>, job: &Job) {
    if job.is_measured() {
        hugging_face::best(reading);
        let is_given = reading.is_given("eval_steps");
        if is_given {
            hugging_face::eval_steps(reading, "logging_steps");
        }
        let is_by_steps = reading.text("eval_strategy").as_deref() == Some("steps");
        match reading.whole("evals_per_epoch") {
            Some(1) => reading.nothing("evals_per_epoch", "at the end of each epoch, as here"),
            Some(times) => {
                let reason = format!("{times} times an epoch there; here once, or every `eval_steps` steps");
                reading.differs("evals_per_epoch", reason);
            }
            None if is_by_steps && !is_given => hugging_face::eval_steps(reading, "logging_steps"),
            None => {}
        }
        if let Some(patience) = reading.whole("early_stopping_patience") {
            reading.put("early_stopping_patience", "train.early_stopping.patience", patience);
            reading.parameters.need(
                "train.keep_best",
                true,
                "With early stopping axolotl loads the best model at the end.",
            );
        }
    } else if reading.is_given("early_stopping_patience") {
        reading.missing("early_stopping_patience", NOT_MEASURED);
    }
    reading.nothing("saves_per_epoch", "the state to resume from is saved every 20 steps");
}
