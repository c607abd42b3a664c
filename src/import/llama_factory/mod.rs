//! LLaMA-Factory: its YAML, with the `dataset_info.json` beside the data.

mod dataset_info;
mod keys;

use engine::file::source::{Sources, Span};
use engine::file::tree::Node;
use serde_json::json;

use super::hugging_face::{self, NAMES, OTHER_BASE};
use super::job::{DRAWN, HeldOut, Job, Method, NOT_MEASURED};
use super::parameters::Note;
use super::places::Places;
use super::preference::{self, Smoothing};
use super::reading::Reading;
use super::rows;
use dataset_info::Info;
pub(super) use keys::keys;

pub(super) const VERSION: &str = "0.9.5";

/// The keys of `stage: dpo` and `stage: kto`.
const PREFERENCE: preference::Names = preference::Names {
    loss: "pref_loss",
    beta: Some("pref_beta"),
    label_smoothing: Some("dpo_label_smoothing"),
    gamma: Some("simpo_gamma"),
    cpo_weight: None,
    sft_weight: Some("pref_ftx"),
    desirable_weight: Some("kto_chosen_weight"),
    undesirable_weight: Some("kto_rejected_weight"),
    orpo_scores_prompts: false,
};

/// What is trained on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Sft,
    Pretraining,
    Preferences,
}

/// ChatML without a system message of its own.
const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\
{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Templates by LLaMA-Factory's names, and the system message that each has by default.
const TEMPLATES: &[(&str, &str, Option<&str>)] = &[
    ("llama3", rows::LLAMA3, None),
    ("qwen", CHATML, Some("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")),
    ("qwen3_nothink", CHATML, None),
    ("chatml", CHATML, None),
];

/// Reads a configuration. The text of `dataset_info.json` is added to the sources.
pub(super) fn read(
    reading: &mut Reading<'_>,
    root: &Node,
    devices: i64,
    hub: &str,
    places: &Places,
    sources: &mut Sources,
) -> Job {
    let mut job = Job::default();
    reading.require("model_name_or_path", Span { len: 0, ..root.span });
    reading.require("dataset", Span { len: 0, ..root.span });
    hugging_face::model(reading, ["model_name_or_path", "model_revision"], hub, places);
    let stage = stage(reading);
    let is_pretraining = stage == Stage::Pretraining;
    method(reading, &mut job, places);
    if stage == Stage::Preferences {
        preference::without_dropout(reading, &job);
    }
    let info = Info::read(reading, places, sources);
    job.datasets = info.datasets(reading, "dataset", is_pretraining, hub, places);
    held_out(reading, &mut job, &info, is_pretraining, hub, places);
    mixing(reading, &mut job);
    tokens(reading, stage);
    packs(reading, &mut job, is_pretraining);
    precision(reading);
    hugging_face::training(reading, &mut job, &NAMES, devices);
    if job.is_measured() {
        hugging_face::validation(reading);
        if let Some(patience) = reading.whole("early_stopping_steps") {
            reading.put("early_stopping_steps", "train.early_stopping.patience", patience);
        }
    }
    if reading.flag("disable_shuffling") {
        reading.put("disable_shuffling", "train.shuffle", false);
    }
    let is_bnb = matches!(reading.text("quantization_method").as_deref(), Some("bnb" | "bitsandbytes"));
    match reading.whole("quantization_bit") {
        Some(4) if is_bnb && job.method == Method::Lora => {
            reading.nothing("quantization_method", "`quantize.base` of the stage");
            let (kind, double) = (Some("quantization_type"), Some("double_quantization"));
            hugging_face::quantized_base(reading, "quantization_bit", kind, double);
        }
        Some(_) => reading.missing("quantization_bit", OTHER_BASE),
        None => hugging_face::no_quantized_base(
            reading,
            &["quantization_method", "quantization_type", "double_quantization"],
        ),
    }
    job.add_tokens(reading, "add_tokens", "wider.added_tokens", "additional_target");
    job.add_tokens(reading, "add_special_tokens", "wider.added_special_tokens", "additional_target");
    job.output = reading.text("output_dir");
    reading.consumed("output_dir", "publish");
    job
}

fn stage(reading: &mut Reading<'_>) -> Stage {
    let stage = reading.text("stage").unwrap_or_default();
    let which = match stage.as_str() {
        "dpo" => reading.text("pref_loss").unwrap_or_default(),
        "kto" => "kto".to_owned(),
        other => {
            if !["sft", "pt", ""].contains(&other) {
                reading.missing("stage", format!("`{other}`: {}", preference::OTHERS));
            }
            preference::without(reading, &PREFERENCE, "of `stage: dpo` and `stage: kto`");
            reading.nothing("pref_loss", "of `stage: dpo`");
            return if other == "pt" { Stage::Pretraining } else { Stage::Sft };
        }
    };
    // LLaMA-Factory adds it to any loss, the others to those of DPO's kind.
    if let Some(weight) =
        reading.number("pref_ftx").filter(|weight| *weight > 0.0 && matches!(&*which, "kto" | "simpo"))
    {
        reading.put("pref_ftx", "train.loss.sft_weight", weight);
    }
    if which == "orpo" && reading.number("pref_ftx").is_some_and(|weight| weight > 0.0) {
        reading.missing("pref_ftx", "ORPO has a likelihood of its own here, whose weight is 1".to_owned());
    }
    preference::loss(reading, &PREFERENCE, &which, Smoothing::Conservative);
    Stage::Preferences
}

/// Losses that compare with a reference.
const HAVE_REFERENCE: &[&str] = &["dpo", "robust", "ipo", "hinge", "kto", "apo_zero", "apo_down", "nca", "sppo"];

fn method(reading: &mut Reading<'_>, job: &mut Job, places: &Places) {
    match reading.text("finetuning_type").as_deref() {
        Some("full") => job.method = Method::Full,
        Some("lora") => reading.put("finetuning_type", "train.method", "lora"),
        other => {
            let other = other.unwrap_or_default();
            reading.missing("finetuning_type", format!("`{other}`: only lora and full are supported"));
        }
    }
    if job.method == Method::Full {
        reading.leave_out("train.lora", "nothing without an adapter");
        return;
    }
    let rank = reading.whole("lora_rank").unwrap_or(8);
    match reading.number("lora_alpha") {
        Some(alpha) => reading.put("lora_alpha", "train.lora.alpha", alpha),
        None => {
            reading.put("lora_alpha", "train.lora.alpha", 2 * rank);
        }
    }
    let targets = reading.texts("lora_target");
    let targets = if targets == ["all"] { json!("all-linear") } else { json!(targets) };
    reading.put("lora_target", "train.lora.target_modules", targets);
    if reading.is_given("additional_target") {
        let modules = reading.texts("additional_target");
        reading.put("additional_target", "train.lora.modules_to_save", json!(modules));
    }
    if let Some(folder) = reading.text("adapter_name_or_path") {
        job.go_on_from(reading, "adapter_name_or_path", &folder, places);
        if reading
            .parameters
            .get("train.loss.name")
            .is_some_and(|loss| HAVE_REFERENCE.contains(&loss.as_str().unwrap_or_default()))
        {
            let reason = "The base without any adapter is LLaMA-Factory's reference.";
            reading.parameters.need("train.reference", "disabled", reason);
        }
    }
}

/// Whether the loss is measured neither during training nor after it.
fn evaluation_is_off(reading: &mut Reading<'_>) -> bool {
    if !hugging_face::evaluation_is_off(reading, "eval_strategy") {
        return false;
    }
    if reading.flag("do_eval") {
        reading.differs("do_eval", "there the loss is measured once, after training; here after each epoch");
        return false;
    }
    reading.nothing("eval_strategy", NOT_MEASURED);
    true
}

fn held_out(reading: &mut Reading<'_>, job: &mut Job, info: &Info, is_pretraining: bool, hub: &str, places: &Places) {
    let is_off = evaluation_is_off(reading);
    if reading.is_given("eval_dataset") && is_off {
        return reading.nothing("eval_dataset", NOT_MEASURED);
    }
    if reading.is_given("eval_dataset") {
        job.held_out = HeldOut::Own(info.datasets(reading, "eval_dataset", is_pretraining, hub, places));
        return;
    }
    let size = reading.number("val_size").unwrap_or(0.0);
    job.hold_out(reading, "val_size", size, DRAWN);
    if is_off {
        job.measure_nothing();
    }
}

fn mixing(reading: &mut Reading<'_>, job: &mut Job) {
    let strategy = reading.text("mix_strategy").unwrap_or_default();
    if job.datasets.len() < 2 || strategy == "concat" {
        return reading.nothing("mix_strategy", "one after the other");
    }
    let ends = match strategy.as_str() {
        "interleave_under" => "first_exhausted",
        "interleave_over" => "all_exhausted",
        "interleave_once" => "all_exhausted_without_replacement",
        _ => return reading.missing("mix_strategy", format!("`{strategy}` is not known")),
    };
    reading.put("mix_strategy", "mix.stopping_strategy", ends);
    reading.parameters.set("mix.mix", "interleave", Note::Given);
    let weights = reading.texts("interleave_probs");
    for (dataset, weight) in job.datasets.iter_mut().zip(&weights) {
        if let Ok(weight) = weight.parse::<f64>() {
            dataset.set("weight", weight, Note::Given);
        }
    }
}

fn tokens(reading: &mut Reading<'_>, stage: Stage) {
    let length = reading.whole("cutoff_len").unwrap_or(2048);
    if stage == Stage::Pretraining {
        reading.put("cutoff_len", "tokens.max_seq_len", length);
        if reading.choice("packing") == Some(false) {
            reading.put("packing", "tokens.on_too_long", "truncate");
        }
        reading.nothing("template", "plain text has none");
        return;
    }
    let reason = "there prompt and response of a longer row are truncated in proportion; here its end is";
    reading.put_differing("cutoff_len", "tokens.max_seq_len", length, reason);
    reading.parameters.need("tokens.on_too_long", "truncate", "The nearest to what LLaMA-Factory does.");
    let (all, last) = (reading.flag("train_on_prompt"), reading.flag("mask_history"));
    match (all, last) {
        _ if stage == Stage::Preferences => {
            for name in ["train_on_prompt", "mask_history"] {
                reading.nothing(name, "only responses are scored");
            }
        }
        (true, true) => reading.missing("mask_history", "together with `train_on_prompt`"),
        (true, false) => reading.put("train_on_prompt", "tokens.train_on", "all"),
        (false, true) => reading.put("mask_history", "tokens.train_on", "last"),
        (false, false) => reading.put("train_on_prompt", "tokens.train_on", "assistant"),
    }
    let template = reading.text("template").unwrap_or_default();
    match TEMPLATES.iter().find(|(name, ..)| *name == template) {
        Some((_, text, system)) => {
            reading.put("template", "tokens.chat_template", *text);
            for name in ["enable_thinking", "preserve_thinking"] {
                reading.nothing(name, "of templates that reason");
            }
            if let Some(system) = system.filter(|_| !reading.is_given("default_system")) {
                reading.put("template", "tokens.system_prompt", system);
                reading.parameters.set("tokens.chat_template", *text, Note::Given);
            }
        }
        None => {
            let reason = format!(
                "`{template}` is a template of LLaMA-Factory; here the tokenizer's own chat template is used, which \
                 may add a system message"
            );
            reading.differs("template", reason);
        }
    }
}

fn packs(reading: &mut Reading<'_>, job: &mut Job, is_pretraining: bool) {
    let neat = reading.flag("neat_packing");
    job.packs = reading.choice("packing").unwrap_or(is_pretraining || neat);
    reading.nothing("neat_packing", "documents of a pack never see each other here");
    if !job.packs {
        return;
    }
    let length = reading.whole("cutoff_len").unwrap_or(2048);
    if neat {
        reading.put("packing", "packs.max_seq_len", length);
    } else {
        let reason = match is_pretraining {
            true => "the documents of a pack see each other there; here they never do",
            false => "without `neat_packing` the documents of a pack see each other there; here they never do",
        };
        reading.put_differing("packing", "packs.max_seq_len", length, reason);
    }
    let strategy = if is_pretraining { "next_fit" } else { "best_fit" };
    reading.parameters.set("packs.strategy", strategy, Note::Default(format!("what {} does", reading.tool)));
}

fn precision(reading: &mut Reading<'_>) {
    if reading.flag("pure_bf16") {
        let reason = "there trainable parameters are bf16, too; here they are f32, and so are their moments and the \
            loss";
        reading.put_differing("pure_bf16", "train.dtype", "bf16", reason);
    } else if reading.choice("bf16") != Some(true) && reading.choice("fp16") != Some(true) {
        let reason = "with neither bf16 nor fp16 the dtype of the checkpoint is computed in there; here f32";
        reading.put_differing("bf16", "train.dtype", "f32", reason);
    }
    let is_off = reading.flag("disable_gradient_checkpointing");
    reading.put("disable_gradient_checkpointing", "train.activation_checkpointing", !is_off);
    reading.nothing("gradient_checkpointing", "`disable_gradient_checkpointing` decides");
}
