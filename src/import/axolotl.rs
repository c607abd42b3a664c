//! axolotl: its YAML.

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use serde_json::json;

use super::hugging_face::{self, Names, OTHER_BASE, SPEED};
use super::job::{DRAWN, HeldOut, Job, Method};
use super::key::Keys;
use super::parameters::{Note, Parameters};
use super::places::Places;
use super::preference::{self, Smoothing};
use super::reading::Reading;
use super::rows;

pub(super) const VERSION: &str = "0.19.0";

const NAMES: Names = Names {
    micro_batch_size: "micro_batch_size",
    gradient_accumulation_steps: "gradient_accumulation_steps",
    epochs: "num_epochs",
    optimizer: "optimizer",
    scheduler: "lr_scheduler",
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

/// The keys of `AxolotlInputConfig` and what it inherits.
pub(super) fn keys() -> Keys {
    Keys::default()
        .read("base_model", "base")
        .read("revision_of_model", "base.revision")
        .read("model_revision", "base.revision")
        .read("adapter", "train.method")
        .read("lora_model_dir", "train.adapter")
        .same("lora_r", "train.lora.rank")
        .same("lora_alpha", "train.lora.alpha")
        .same("lora_dropout=0.0", "train.lora.dropout")
        .read("lora_target_modules", "train.lora.target_modules")
        .read("lora_target_linear=false", "train.lora.target_modules")
        .same("lora_modules_to_save", "train.lora.modules_to_save")
        .same("lora_rank_pattern", "train.lora.rank_pattern")
        .same("lora_alpha_pattern", "train.lora.alpha_pattern")
        .same("peft_layers_to_transform", "train.lora.layers_to_transform")
        .same("peft_layers_pattern", "train.lora.layers_pattern")
        .same("peft_use_dora=false", "train.lora.use_dora")
        .same("peft_use_rslora=false", "train.lora.use_rslora")
        .same("loraplus_lr_ratio", "train.lora.learning_rate_ratio")
        .read("datasets", "rows")
        .read("test_datasets", "held_out_rows")
        .read("val_set_size=0.0", "rows.train_test_split.test_size")
        .read("sequence_len=512", "tokens.max_seq_len")
        .read("excess_length_strategy=drop", "tokens.on_too_long")
        .read("train_on_inputs=false", "tokens.train_on")
        .read("chat_template", "tokens.chat_template")
        .read("chat_template_jinja", "tokens.chat_template")
        .same("default_system_message", "tokens.system_prompt")
        .read("sample_packing=false", "packs")
        .read("sample_packing_sequentially=false", "packs.strategy")
        .read("curriculum_sampling=false", "train.shuffle")
        .read("average_tokens_across_devices=false", "train")
        .read("gradient_accumulation_steps=1", "train.gradient_accumulation_steps")
        .read("micro_batch_size=1", "train.micro_batch_size")
        .read("num_epochs=1.0", "train.epochs")
        .same("learning_rate", "train.optimizer.learning_rate")
        .read("optimizer=adamw_torch_fused", "train.optimizer.name")
        .read("lr_scheduler=cosine", "train.scheduler.name")
        .read("cosine_min_lr_ratio", "train.scheduler.min_lr_rate")
        .read("warmup_steps", "train.scheduler.warmup_steps")
        .read("warmup_ratio", "train.scheduler.warmup_ratio")
        .read("bf16=auto", "train.dtype")
        .read("bfloat16", "train.dtype")
        .read("float16", "train.dtype")
        .read("fsdp_config", "train.parallel")
        .read("evals_per_epoch", "train.eval_steps")
        .read("loss_watchdog_threshold", "train")
        .read("pretraining_dataset", "rows")
        .read("eot_tokens", "tokens.train_on")
        .read("saves_per_epoch", "train.save_every")
        .read("save_steps", "train.save_every")
        .read("eval_strategy", "train.eval_steps")
        .read("save_strategy=epoch", "train.save_every")
        .read("early_stopping_patience", "train.early_stopping.patience")
        .read("special_tokens", "tokens")
        .read("tokens", "wider.added_tokens")
        .read("plugins", "train")
        .read("output_dir=./model-out", "publish")
        .nothing(
            "no kernel or attention of one's own choice changes the result",
            &[
                "flash_attention",
                "flash_attn_cross_entropy",
                "flash_attn_fuse_mlp",
                "flash_optimum",
                "xformers_attention",
                "sdp_attention",
                "flex_attention",
                "flex_attn_compile_kwargs",
                "sage_attention",
                "eager_attention",
                "attn_implementation",
                "sdpa_varlen",
                "fused_attn_kernel",
                "lora_mlp_kernel",
                "lora_qkv_kernel",
                "lora_o_kernel",
                "lora_embedding_kernel",
                "chunked_cross_entropy",
                "chunked_cross_entropy_num_chunks",
                "tiled_mlp",
                "tiled_mlp_num_shards",
                "tiled_mlp_use_original_mlp",
                "experts_implementation",
                "use_kernels",
                "cut_cross_entropy",
                "liger_rope",
                "liger_rms_norm",
                "liger_glu_activation",
                "liger_layer_norm",
                "liger_fused_linear_cross_entropy",
                "liger_cross_entropy",
                "liger_rms_norm_gated",
                "unsloth_lora_mlp",
                "unsloth_cross_entropy_loss",
                "unsloth_lora_qkv",
                "unsloth_lora_o",
                "use_scattermoe",
                "use_sonicmoe",
                "liger_use_token_scaling",
                "llama4_linearized",
            ],
        )
        .nothing(
            "padding is never computed here",
            &[
                "pad_to_sequence_len",
                "pad_to_multiple_of",
                "eval_sample_packing",
                "batch_flattening",
                "multipack_real_batches",
                "sample_packing_group_size",
                "sample_packing_bin_size",
                "sample_packing_mp_start_method",
                "sample_packing_eff_est",
                "eval_batch_size",
            ],
        )
        .nothing(
            "results are found again by their content, whatever the folder",
            &[
                "dataset_prepared_path",
                "dataset_processes",
                "dataset_num_proc",
                "dataset_keep_in_memory",
                "skip_prepare_dataset",
                "num_dataset_shards_to_save",
                "shuffle_merged_datasets",
                "shuffle_before_merging_datasets",
                "auto_resume_from_checkpoints",
                "is_preprocess",
                "preprocess_iterable",
                "total_num_tokens",
                "total_supervised_tokens",
                "axolotl_config_path",
                "save_first_step",
            ],
        )
        .nothing(
            "families are known by `config.json`, tokenizers by `tokenizer.json`",
            &[
                "model_type",
                "type_of_model",
                "tokenizer_type",
                "tokenizer_use_fast",
                "tokenizer_legacy",
                "base_model_config",
                "is_falcon_derived_model",
                "is_llama_derived_model",
                "is_mistral_derived_model",
                "is_qwen_derived_model",
                "trust_remote_code",
                "hf_use_auth_token",
                "tokenizer_save_jinja_files",
                "experimental_skip_move_to_device",
                "merge_lora",
                "merge_method",
                "push_dataset_to_hub",
                "resize_token_embeddings_to_32x",
                "mean_resizing_embeddings",
                "strict",
                "lora_on_cpu",
                "qlora_sharded_model_loading",
                "peft_autocast_adapter_dtype",
                "loraplus_lr_embedding",
                "embeddings_skip_upcast",
                "peft_ensure_weight_tying",
                "low_cpu_mem_usage",
            ],
        )
        .nothing(
            "figures of every step are always recorded",
            &[
                "use_wandb",
                "wandb_project",
                "wandb_entity",
                "wandb_watch",
                "wandb_name",
                "wandb_run_id",
                "wandb_log_model",
                "wandb_mode",
                "use_mlflow",
                "mlflow_tracking_uri",
                "mlflow_experiment_name",
                "mlflow_run_name",
                "hf_mlflow_log_artifacts",
                "use_comet",
                "comet_project_name",
                "comet_workspace",
                "comet_api_key",
                "use_trackio",
                "use_tensorboard",
                "use_swanlab",
                "swanlab_project",
                "swanlab_workspace",
                "swanlab_mode",
                "swanlab_run_name",
                "swanlab_description",
                "swanlab_experiment_name",
                "swanlab_api_key",
                "swanlab_log_model",
                "swanlab_lark_webhook_url",
                "swanlab_lark_secret",
                "swanlab_log_completions",
                "profiler_steps",
                "profiler_steps_start",
                "include_tkps",
                "loss_watchdog_patience",
                "eval_table_size",
                "eval_max_new_tokens",
                "generate_samples",
                "num_generation_samples",
                "generation_max_new_tokens",
                "generation_temperature",
                "generation_top_p",
                "generation_top_k",
                "generation_prompt_ratio",
                "generation_do_sample",
            ],
        )
        .nothing(
            SPEED,
            &[
                "device",
                "device_map",
                "world_size",
                "ddp",
                "gc_steps",
                "gc_collect_steps",
                "torch_compile_options",
                "max_memory",
                "gpu_memory_limit",
                "deepcompile",
                "fsdp_version",
                "fsdp_final_state_dict_type",
                "dp_shard_size",
                "dp_replicate_size",
                "activation_offloading",
                "layer_offloading",
                "selective_checkpointing",
                "torchdistx_path",
                "float32",
            ],
        )
        .read("load_in_4bit=false", "train.quantize.base")
        .missing(OTHER_BASE, &["load_in_8bit", "gptq", "bnb_config_kwargs", "quantization", "qat"])
        .read("rl", "train.loss.name")
        .read("rl_beta=0.1", "train.loss.beta")
        .read("orpo_alpha", "train.loss.beta")
        .read("dpo_loss_type", "train.loss.name")
        .read("dpo_label_smoothing=0.0", "train.loss.label_smoothing")
        .read("simpo_gamma=0.5", "train.loss.gamma")
        .read("cpo_alpha=1.0", "train.loss.sft_weight")
        .read("rpo_alpha", "train.loss.sft_weight")
        .read("kto_desirable_weight=1.0", "train.loss.desirable_weight")
        .read("kto_undesirable_weight=1.0", "train.loss.undesirable_weight")
        .nothing(
            "the reference is scored once, before the first step",
            &["precompute_ref_log_probs", "dpo_use_liger_kernel", "dpo_padding_free"],
        )
        .missing(
            "a variant of DPO that is not supported: \
            docs/preferences.md",
            &["dpo_use_weighting", "dpo_loss_weights"],
        )
        .missing(
            preference::OTHERS,
            &[
                "trl",
                "vllm",
                "ebft",
                "reward_model",
                "process_reward_model",
                "center_rewards_coefficient",
                "num_labels",
            ],
        )
        .missing("images and sounds are not supported: text alone is trained on", &["processor_type"])
        .missing("prompts are as long as they are: `max_seq_len` counts both", &["max_prompt_len"])
        .missing(
            "not supported here",
            &[
                "shrink_embeddings",
                "reinit_weights",
                "trainer_cls",
                "dynamic_checkpoint",
                "dataset_shard_num",
                "dataset_shard_idx",
                "dataset_exact_deduplication",
                "do_causal_lm_eval",
                "eval_causal_lm_metrics",
                "do_bench_eval",
                "bench_dataset",
                "bench_split",
                "fp8",
                "fp8_config",
                "fp8_enable_fsdp_float8_all_gather",
                "freeze_mm_modules",
                "unfrozen_parameters",
                "eval_sequence_len",
                "min_sample_len",
                "use_pose",
                "pose_split_on_token_ids",
                "pose_max_context_len",
                "pose_num_chunks",
                "pretrain_multipack_buffer_size",
                "pretrain_multipack_attn=true",
                "pretraining_sample_concatenation",
                "streaming",
                "streaming_multipack_buffer_size=10000",
                "gemma4_hybrid_attn_impl",
                "large_head_attention",
                "flash_attn_d512",
                "ple_cpu_offload",
                "quantize_moe_experts",
                "scaling_softmax",
                "scaling_softmax_factor",
                "scaling_softmax_bias",
                "use_eaft",
                "eaft_alpha=1.0",
                "eaft_k=20",
                "llama4_linearized_experts",
                "fp32_norms",
                "fp32_norm_classes",
                "sequence_parallel_degree",
                "context_parallel_size",
                "heads_k_stride",
                "ring_attn_func",
                "tensor_parallel_size",
                "added_tokens_overrides",
                "chat_template_kwargs",
                "fix_untrained_tokens",
                "lora_fan_in_fan_out",
                "lora_target_parameters",
                "peft",
                "peft_layer_replication",
                "peft_init_lora_weights",
                "peft_trainable_token_indices",
                "relora",
                "relora_prune_ratio",
                "relora_prune_method=magnitude",
                "relora_cpu_offload",
                "batch_size",
                "embedding_lr",
                "embedding_lr_scale",
                "lr_quadratic_warmup",
                "cosine_constant_lr_ratio",
                "lr_div_factor",
                "lr_groups",
                "adam_epsilon2",
                "adam_beta3",
                "dion_lr",
                "dion_momentum",
                "dion_rank_fraction=1.0",
                "dion_rank_multiple_of=1",
                "qgalore_rank=256",
                "qgalore_update_proj_gap=200",
                "qgalore_scale=0.25",
                "qgalore_proj_type=std",
                "qgalore_proj_quant=true",
                "qgalore_proj_bits=4",
                "qgalore_proj_group_size=256",
                "qgalore_cos_threshold=0.4",
                "qgalore_gamma_proj=2",
                "qgalore_queue_size=5",
                "jagged_restart_steps",
                "jagged_restart_warmup_steps",
                "jagged_restart_anneal_steps",
                "cls_model_config",
                "tokenizer_config",
                "tokenizer_use_mistral_common",
                "processor_kwargs",
                "model_quantization_config",
                "model_quantization_config_kwargs",
                "use_onebitllms",
                "lisa_n_layers",
                "lisa_step_interval",
                "lisa_layers_attribute=model.layers",
                "comet_experiment_key",
                "comet_mode",
                "comet_online",
                "comet_experiment_config",
                "gradio_title",
                "gradio_share",
                "gradio_server_name",
                "gradio_server_port",
                "gradio_max_new_tokens",
                "gradio_temperature",
                "use_ray",
                "ray_run_name",
                "ray_num_workers=1",
                "resources_per_worker",
                "use_otel_metrics",
                "otel_metrics_host=localhost",
                "otel_metrics_port=8000",
                "trackio_project_name",
                "trackio_run_name",
                "max_packed_sequence_len",
                "rope_scaling",
                "noisy_embedding_alpha",
                "dpo_beta",
                "evaluation_strategy",
                "dpo_use_logits_to_keep",
                "dpo_generate_during_eval",
                "dpo_norm_loss",
                "s2_attention",
                "flash_attn_rms_norm",
                "overrides_of_model_config",
                "overrides_of_model_kwargs",
                "model_config",
                "model_kwargs",
                "expert_parallel_size",
                "diffusion",
                "llmcompressor",
                "spectrum_top_fraction",
                "spectrum_model_name",
                "kd_trainer",
                "kd_ce_alpha",
                "kd_alpha",
                "kd_temperature",
                "kd_online_server_base_url",
                "gptq_groupsize",
                "gptq_model_v1",
                "gptq_disable_exllama",
                "nvfp4_merge_aware",
                "use_dsv4_kernels",
                "dsv4_fp4_grouped_mode",
                "base_model_ignore_patterns",
            ],
        )
        .and(hugging_face::keys())
}

/// The keys of an entry of `datasets`.
fn dataset_keys() -> Keys {
    Keys::default()
        .read("path", "source")
        .read("type", "template")
        .read("data_files", "source")
        .read("ds_type", "source")
        .same("name", "config")
        .same("revision", "revision")
        .same("split=train", "split")
        .read("field", "column_map")
        .read("field_messages=messages", "column_map.messages")
        .read("field_chosen=chosen", "column_map.chosen")
        .read("field_rejected=rejected", "column_map.rejected")
        .read("message_property_mappings", "column_map.messages")
        .read("message_field_role=role", "column_map.messages")
        .read("message_field_content=content", "column_map.messages")
        .read("roles_to_train=[assistant]", "train_on")
        .read("train_on_eos=turn", "train_on")
        .read("train_on_eot", "train_on")
        .nothing("rows come from files of data; no code of a data set runs", &["trust_remote_code"])
        .nothing("changes only speed", &["preprocess_shards"])
        .read("roles", "column_map.messages")
        .read("field_tools", "column_map.tools")
        .read("chat_template", "chat_template")
        .missing(
            "not supported by `dataset`",
            &[
                "shards",
                "shards_idx",
                "conversation",
                "chat_template_jinja",
                "input_format",
                "input_transform",
                "field_human",
                "field_model",
                "field_thinking",
                "template_thinking_key",
                "message_field_training",
                "message_field_training_detail",
                "split_thinking",
                "logprobs_field",
                "temperature",
                "drop_system_message",
                "skip",
                "text_column",
            ],
        )
}

/// The keys of a `type` that is a mapping.
fn prompter_keys() -> Keys {
    Keys::default()
        .read("system_prompt", "map")
        .read("system_format={system}", "map")
        .read("field_system=system", "map")
        .read("field_instruction=instruction", "map")
        .read("field_input=input", "map")
        .read("field_output=output", "column_map")
        .read("format", "map")
        .read("no_input_format", "map")
        .nothing("only a name", &["type"])
}

/// What rows are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Prompts,
    Conversations,
    Text,
    Preferences,
}

/// Reads a configuration.
pub(super) fn read(reading: &mut Reading<'_>, root: &Node, devices: i64, places: &Places) -> Job {
    let mut job = Job::default();
    reading.require("base_model", Span { len: 0, ..root.span });
    reading.require("learning_rate", Span { len: 0, ..root.span });
    hugging_face::model(reading, ["base_model", "revision_of_model"], "", places);
    method(reading, &mut job, places);
    loss(reading);
    let mut kinds = Vec::new();
    job.datasets = datasets(reading, "datasets", root, &mut kinds, places);
    held_out(reading, &mut job, root, &mut kinds, places);
    let own = of_datasets(reading, root);
    tokens(reading, &kinds, words(root), own);
    packs(reading, &mut job, devices);
    precision(reading);
    schedule(reading);
    hugging_face::training(reading, &mut job, &NAMES, devices);
    if reading.is_given("fsdp_config")
        && reading.parameters.get("train.parallel").is_none()
        && !reading.is_given("fsdp")
    {
        match reading.parameters.get("train.quantize.base").is_some() {
            true => reading.differs("fsdp_config", "sharded there; here a base in 4 bits is whole on each device"),
            false => {
                let reason = "it switches sharding on there; sharded here as well, by another implementation, only on \
                    devices, and the result is the same";
                reading.put_differing("fsdp_config", "train.parallel", "fsdp2", reason);
            }
        }
    } else {
        reading.nothing("fsdp_config", SPEED);
    }
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
    let turn = |role: &str, content: &str| format!("{{'role': '{role}', 'content': {content}}}");
    let prompt = format!("([{}] if {system} else []) + [{}]", turn("system", &system), turn("user", &user));
    let map = json!({
        "prompt": format!("{{{{ {prompt} }}}}"),
        "completion": format!("{{{{ [{}] }}}}", turn("assistant", &completion)),
        "label": "{{ row['label'] }}",
    });
    below.parameters.set("map", map, Note::Given);
    let columns = json!({ "prompt": "prompt", "completion": "completion", "label": "label" });
    below.parameters.set("column_map", columns, Note::Given);
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
        ("chat_template", "default" | "argilla_chat") => {
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
fn words(root: &Node) -> Option<&'static str> {
    let Some(Value::List(items)) = root.get("datasets").map(|node| &node.value) else { return None };
    let kind = items.iter().find_map(|item| item.get("type")?.to_json().as_str().map(str::to_owned))?;
    match kind.split_once('.')?.0 {
        "chatml" => Some("chatml"),
        "llama3" => Some("llama3"),
        _ => None,
    }
}

/// The template that the data sets name, where they agree on one.
fn of_datasets(reading: &mut Reading<'_>, root: &Node) -> Option<String> {
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

fn datasets(
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
            rows.set("source", rows::source(path, "", places), Note::Given);
            rows::text(&mut rows, "text");
            return rows;
        }
        let keys = Keys::default()
            .read("path", "source")
            .same("name", "config")
            .same("split=train", "split")
            .read("text_column=text", "column_map.text")
            .nothing("plain text", &["type"])
            .nothing("rows come from files of data; no code of a data set runs", &["trust_remote_code"])
            .missing("not supported by `dataset`", &["data_files", "ds_type", "skip"]);
        let mut below = reading.below(keys, item);
        below.require("path", item.span);
        let path = below.text("path").unwrap_or_default();
        below.put("path", "source", rows::source(&path, "", places));
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
    match (files.as_slice(), places.is_path(&path) || matches!(path.as_str(), "json" | "csv" | "parquet" | "text")) {
        ([], _) => below.put("path", "source", rows::source(&path, "", places)),
        (files, true) => {
            let files: Vec<String> = files.iter().map(|file| places.written(file)).collect();
            below.nothing("path", "`data_files` names the files");
            below.put("data_files", "source", json!(files));
        }
        (_, false) => {
            below.put("path", "source", rows::source(&path, "", places));
            below.missing("data_files", "files of a hub's data set are chosen by `split` and `config`");
        }
    }
    below.nothing("ds_type", "the extension of the file determines it");
    below.nothing("chat_template", "`chat_template` of the stage `tokens`");
    let kind = match item.get("type").map(|kind| kind.value.clone()) {
        Some(Value::Map(_)) => {
            prompter(&mut below, item);
            Some(Kind::Prompts)
        }
        _ => {
            let kind = below.text("type").unwrap_or_default();
            let of_pairs = if reading.text("rl").as_deref() == Some("kto") { judged } else { preferences };
            of_pairs(&mut below, &kind).or_else(|| of_type(&mut below, &kind))
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

fn of_type(below: &mut Reading<'_>, kind: &str) -> Option<Kind> {
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
            conversations(below, kind);
            Some(Kind::Conversations)
        }
        _ => None,
    }
}

fn conversations(below: &mut Reading<'_>, kind: &str) {
    let default = if kind == "sharegpt" { "conversations".to_owned() } else { "messages".to_owned() };
    let given = below.is_given("field_messages");
    let field = below.text("field_messages").filter(|_| given).unwrap_or(default);
    rows::messages(&mut below.parameters, &field);
    below.nothing("type", "conversations");
    if let Some(tools) = below.text("field_tools") {
        let mut columns = below.parameters.get("column_map").cloned().unwrap_or_default();
        columns["tools"] = json!(tools);
        below.put("field_tools", "column_map", columns);
    }
    turns(below);
    let roles = below.texts("roles_to_train");
    if roles.iter().any(|role| !matches!(role.as_str(), "assistant" | "gpt")) {
        below.missing("roles_to_train", "`tokenize` trains on assistants' turns, on the last, or on everything");
    }
    match below.text("train_on_eos").as_deref() {
        Some("turn" | "all") => {}
        _ => below.missing("train_on_eos", "the end of a trained turn is always trained here, and no other"),
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

fn held_out(reading: &mut Reading<'_>, job: &mut Job, root: &Node, kinds: &mut Vec<Kind>, places: &Places) {
    if reading.is_given("test_datasets") {
        job.held_out = HeldOut::Own(datasets(reading, "test_datasets", root, kinds, places));
        reading.nothing("val_set_size", "`test_datasets` are measured on");
        return;
    }
    let size = reading.number("val_set_size").unwrap_or(0.0);
    job.hold_out(reading, "val_set_size", size, DRAWN);
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
    if !matches!(job.held_out, HeldOut::Nothing) {
        hugging_face::validation(reading);
        let steps = reading.number("eval_steps").filter(|steps| *steps >= 1.0);
        if steps.is_none() && reading.is_given("eval_steps") {
            reading.missing("eval_steps", "a share of all steps: `eval_steps` is a number of steps here");
        }
        match (reading.whole("evals_per_epoch"), steps) {
            (Some(1), _) => reading.nothing("evals_per_epoch", "at the end of each epoch, as here"),
            (Some(times), _) => {
                let reason = format!("{times} times an epoch there; here once, or every `eval_steps` steps");
                reading.differs("evals_per_epoch", reason);
            }
            (None, Some(steps)) => reading.put("eval_steps", "train.eval_steps", steps as i64),
            (None, None) => {}
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
        reading.missing("early_stopping_patience", "there are no rows to measure the loss on");
    }
    reading.nothing("saves_per_epoch", "the state to resume from is saved every 20 steps");
}
