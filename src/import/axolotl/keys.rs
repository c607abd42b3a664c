//! axolotl's keys, by what they become.

use crate::import::hugging_face::{self, OTHER_BASE, SPEED};
use crate::import::key::Keys;
use crate::import::preference;

/// The keys of transformers that axolotl has by their names. It has others by names of its own, or not at all, and
/// ignores those of transformers.
const OF_TRANSFORMERS: &[&str] = &[
    "accelerator_config",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "auto_find_batch_size",
    "dataloader_drop_last",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters",
    "ddp_timeout",
    "deepspeed",
    "eval_steps",
    "fp16",
    "fsdp",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "greater_is_better",
    "group_by_length",
    "hub_model_id",
    "hub_revision",
    "hub_strategy",
    "include_tokens_per_second",
    "load_best_model_at_end",
    "local_rank",
    "lr_scheduler_kwargs",
    "max_grad_norm",
    "max_steps",
    "metric_for_best_model",
    "neftune_noise_alpha",
    "optim_args",
    "optim_target_modules",
    "remove_unused_columns",
    "resume_from_checkpoint",
    "save_only_model",
    "save_safetensors",
    "save_total_limit",
    "seed",
    "tf32",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "trackio_space_id",
    "weight_decay",
];

/// The keys of `AxolotlInputConfig` and what it inherits.
pub(in crate::import) fn keys() -> Keys {
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
        .nothing("figures of every step are always recorded", &["logging_steps"])
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
        .missing("weights the loss of each token by its probability", &["liger_use_token_scaling"])
        .and(hugging_face::keys().only(OF_TRANSFORMERS))
}

/// The keys of an entry of `datasets`.
pub(super) fn dataset_keys() -> Keys {
    Keys::default()
        .read("path", "source")
        .read("type", "template")
        .read("data_files", "source")
        .read("ds_type", "source")
        .same("name", "config")
        .same("revision", "revision")
        .same("split=train", "split")
        .read("field", "column_map.text")
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
        .read("field_tools=tools", "column_map.tools")
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
pub(super) fn prompter_keys() -> Keys {
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
