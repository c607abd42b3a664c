//! LLaMA-Factory's keys, by what they become.

use crate::import::hugging_face::{self, SPEED};
use crate::import::key::Keys;
use crate::import::preference;

/// What is said of keys of templates that reason.
const REASONING: &str = "reasoning is as the chat template writes it";

pub(in crate::import) fn keys() -> Keys {
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
pub(super) fn entry_keys() -> Keys {
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
