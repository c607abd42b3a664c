//! LLaMA-Factory: its YAML, with the `dataset_info.json` beside the data.

use std::fs;

use engine::file::parse::parse;
use engine::file::problem::Problem;
use engine::file::source::{Sources, Span};
use engine::file::tree::{Entry, Node, Value};
use serde_json::json;

use super::hugging_face::{self, NAMES, OTHER_BASE, SPEED};
use super::job::{DRAWN, HeldOut, Job, Method, NOT_MEASURED};
use super::key::Keys;
use super::parameters::{Note, Parameters};
use super::places::Places;
use super::preference::{self, Smoothing};
use super::reading::Reading;
use super::rows;

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

/// What is said of keys of templates that reason.
const REASONING: &str = "reasoning is as the chat template writes it";

/// Templates by LLaMA-Factory's names, and the system message that each has by default.
const TEMPLATES: &[(&str, &str, Option<&str>)] = &[
    ("llama3", rows::LLAMA3, None),
    ("qwen", CHATML, Some("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")),
    ("qwen3_nothink", CHATML, None),
    ("chatml", CHATML, None),
];

pub(super) fn keys() -> Keys {
    Keys::default()
        .read("model_name_or_path", "base")
        .read("model_revision=main", "base.revision")
        .read("adapter_name_or_path", "train.adapter")
        .read("stage=sft", "train")
        .nothing("what is imported trains", &["do_train"])
        .read("finetuning_type=lora", "train.method")
        .whole("lora_rank=8", "train.lora.rank")
        .read("lora_alpha", "train.lora.alpha")
        .same("lora_dropout=0.0", "train.lora.dropout")
        .read("lora_target=all", "train.lora.target_modules")
        .read("additional_target", "train.lora.modules_to_save")
        .same("use_rslora=false", "train.lora.use_rslora")
        .same("use_dora=false", "train.lora.use_dora")
        .same("loraplus_lr_ratio", "train.lora.learning_rate_ratio")
        .read("dataset", "rows")
        .read("eval_dataset", "held_out_rows")
        .read("dataset_dir=data", "rows")
        .read("template", "tokens.chat_template")
        .same("default_system", "tokens.system_prompt")
        .read("cutoff_len=2048", "tokens.max_seq_len")
        .read("train_on_prompt=false", "tokens.train_on")
        .read("mask_history=false", "tokens.train_on")
        .read("max_samples", "rows.limit")
        .read("mix_strategy=concat", "mix.mix")
        .read("interleave_probs", "mix.datasets.weight")
        .read("packing", "packs")
        .read("neat_packing=false", "packs")
        .read("val_size=0.0", "rows.train_test_split.test_size")
        .read("pure_bf16=false", "train.dtype")
        .read("disable_gradient_checkpointing=false", "train.activation_checkpointing")
        .read("disable_shuffling=false", "train.shuffle")
        .read("early_stopping_steps", "train.early_stopping.patience")
        .read("output_dir", "publish")
        .read("quantization_bit", "train.quantize.base")
        .read("quantization_method=bnb", "train.quantize.base")
        .read("quantization_type=nf4", "train.quantize.base")
        .read("double_quantization=true", "train.quantize.double_quantization")
        .nothing(
            SPEED,
            &[
                "flash_attn",
                "use_unsloth",
                "use_unsloth_gc",
                "enable_liger_kernel",
                "use_reentrant_gc",
                "upcast_lmhead_output",
                "low_cpu_mem_usage",
                "use_kv_cache",
                "use_v1_kernels",
                "preprocessing_num_workers",
                "preprocessing_batch_size",
                "overwrite_cache",
                "streaming",
                "buffer_size",
                "data_shared_file_system",
                "tokenized_path",
                "cache_dir",
                "offload_folder",
                "infer_backend",
                "infer_dtype",
                "print_param_status",
                "device_map",
                "quantization_device_map",
            ],
        )
        .nothing("rows come from files of data; no code of a model or data set runs", &["trust_remote_code"])
        .nothing("tokens are in the environment, never in a file", &["hf_hub_token", "ms_hub_token", "om_hub_token"])
        .nothing(
            "figures are always recorded",
            &[
                "compute_accuracy",
                "include_effective_tokens_per_second",
                "use_swanlab",
                "swanlab_project",
                "swanlab_workspace",
                "swanlab_run_name",
                "swanlab_mode",
                "swanlab_api_key",
                "swanlab_logdir",
                "enable_torch_profiler",
                "profiler_output_dir",
            ],
        )
        .nothing(
            "the tokenizer is that of the checkpoint",
            &["use_fast_tokenizer", "tool_format", "adapter_folder", "loraplus_lr_embedding"],
        )
        .nothing(
            "only for other trainings or for generation",
            &[
                "freeze_trainable_layers",
                "freeze_trainable_modules",
                "freeze_extra_modules",
                "media_dir",
                "eval_num_beams",
                "predict_with_generate",
                "eval_on_each_dataset",
                "freeze_vision_tower",
                "freeze_multi_modal_projector",
                "freeze_language_model",
                "image_max_pixels",
                "image_min_pixels",
                "video_max_pixels",
                "video_min_pixels",
                "video_fps",
                "video_maxlen",
                "ray_run_name",
                "ray_storage_path",
                "ray_num_workers",
                "resources_per_worker",
                "placement_strategy",
                "vllm_maxlen",
                "vllm_gpu_util",
                "export_dir",
                "export_size",
                "export_device",
                "export_legacy_format",
            ],
        )
        .read("pref_loss=sigmoid", "train.loss.name")
        .read("pref_beta=0.1", "train.loss.beta")
        .read("pref_ftx=0.0", "train.loss.sft_weight")
        .read("dpo_label_smoothing=0.0", "train.loss.label_smoothing")
        .read("simpo_gamma=0.5", "train.loss.gamma")
        .read("kto_chosen_weight=1.0", "train.loss.desirable_weight")
        .read("kto_rejected_weight=1.0", "train.loss.undesirable_weight")
        .missing("a variant of DPO that is not supported: docs/preferences.md", &["pref_bco_weight=0.0", "ld_alpha"])
        .missing("the reference is the model that the run starts from", &["ref_model", "ref_model_adapters"])
        .missing(
            preference::OTHERS,
            &[
                "ppo_buffer_size=1",
                "ppo_epochs=4",
                "ppo_score_norm",
                "ppo_target=6.0",
                "ppo_whiten_rewards",
                "reward_model",
                "reward_model_adapters",
                "reward_model_type=lora",
            ],
        )
        .nothing(
            "of prediction, export, evaluation or serving, no part of a training",
            &[
                "export_quantization_bit",
                "export_quantization_dataset",
                "export_quantization_nsamples",
                "export_quantization_maxlen",
                "export_hub_model_id",
                "vllm_enforce_eager",
                "vllm_max_lora_rank",
                "vllm_config",
                "sglang_maxlen",
                "sglang_mem_fraction",
                "sglang_tp_size",
                "sglang_config",
                "sglang_lora_backend",
                "do_sample",
                "temperature",
                "top_p",
                "top_k",
                "num_beams",
                "max_length",
                "max_new_tokens",
                "repetition_penalty",
                "length_penalty",
                "skip_special_tokens",
                "generation_max_length",
                "generation_num_beams",
                "generation_config",
                "task",
                "task_dir",
                "batch_size",
                "lang",
                "n_shot",
                "save_dir",
                "download_mode",
            ],
        )
        .nothing(
            "of a method or a program that its own key names",
            &[
                "galore_proj_type",
                "galore_layerwise",
                "apollo_update_interval",
                "apollo_scale",
                "apollo_proj",
                "apollo_proj_type",
                "apollo_scale_type",
                "apollo_layerwise",
                "apollo_scale_front",
                "badam_start_block",
                "badam_switch_mode",
                "badam_switch_interval",
                "badam_update_ratio",
                "badam_mask_mode",
                "badam_verbose",
                "swanlab_lark_webhook_url",
                "swanlab_lark_secret",
                "ray_init_kwargs",
                "master_addr",
                "master_port",
                "kt_weight_path",
                "kt_expert_checkpoint_path",
                "kt_use_lora_experts",
                "kt_lora_expert_num",
                "kt_lora_expert_intermediate_size",
                "profiler_wait_steps",
                "profiler_warmup_steps",
                "profiler_active_steps",
                "profiler_repeat",
                "profiler_record_shapes",
                "profiler_profile_memory",
                "profiler_with_stack",
                "profile_modules",
                "fp8_enable_fsdp_float8_all_gather",
                "image_do_pan_and_scan",
                "crop_to_patches",
                "use_audio_in_video",
                "audio_sampling_rate",
                "init_special_tokens",
                "ref_model_quantization_bit",
                "reward_model_quantization_bit",
                "sortish_sampler",
            ],
        )
        .read("add_tokens", "wider.added_tokens")
        .read("add_special_tokens", "wider.added_special_tokens")
        .nothing("tables grow where tokens are added", &["resize_vocab"])
        .missing(REASONING, &["enable_thinking=true", "preserve_thinking"])
        .missing("padding is never trained", &["ignore_pad_token_for_loss=true"])
        .missing(
            "not supported here",
            &[
                "split_special_tokens",
                "new_special_tokens_config",
                "rope_scaling",
                "shift_attn",
                "mixture_of_depths",
                "moe_aux_loss_coef",
                "upcast_layernorm",
                "train_from_scratch",
                "model_max_length",
                "create_new_adapter",
                "pissa_init",
                "pissa_iter=16",
                "pissa_convert",
                "oft_rank=0",
                "oft_block_size=32",
                "oft_target=all",
                "module_dropout=0.0",
                "use_galore",
                "galore_target=all",
                "galore_rank=16",
                "galore_update_interval=200",
                "galore_scale=2.0",
                "use_apollo",
                "apollo_target=all",
                "apollo_rank=16",
                "use_badam",
                "badam_mode=layer",
                "use_adam_mini",
                "use_muon",
                "use_llama_pro",
                "use_dft_loss",
                "use_asft_loss",
                "asft_alpha=0.1",
                "use_eaft_loss",
                "eaft_alpha=1.0",
                "use_mca",
                "use_hyper_parallel",
                "hyper_parallel_args",
                "use_kt",
                "fp8",
                "fp8_backend=auto",
            ],
        )
        .and(hugging_face::keys())
}

/// An entry of `dataset_info.json`.
fn entry_keys() -> Keys {
    Keys::default()
        .read("file_name", "source")
        .read("hf_hub_url", "source")
        .read("ms_hub_url", "source")
        .read("formatting=alpaca", "column_map")
        .read("columns", "column_map")
        .read("tags", "column_map")
        .read("num_samples", "limit")
        .same("subset", "config")
        .same("split=train", "split")
        .nothing("another name", &["folder", "file_sha1"])
        .nothing("the columns of the stage", &["ranking"])
        .missing(
            "no code of a data set runs, and only these hubs are known: Hugging Face, ModelScope",
            &["script_url", "om_hub_url", "cloud_file_name"],
        )
}

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

/// `dataset_info.json`, as far as it could be read.
struct Info {
    root: Option<Node>,
    /// Where it is, or should be.
    path: String,
    folder: String,
}

impl Info {
    fn read(reading: &mut Reading<'_>, places: &Places, sources: &mut Sources) -> Self {
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

    fn datasets(
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
            (_, Some(name), _) if hub.is_empty() => below.put("hf_hub_url", "source", name),
            (_, _, Some(name)) => below.put("ms_hub_url", "source", format!("modelscope:{name}")),
            (_, Some(name), _) => below.put("hf_hub_url", "source", name),
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
