//! The keys of transformers' `TrainingArguments` (5.23), which LLaMA-Factory, ms-swift and TRL extend and axolotl
//! fills.

use engine::file::tree::Value;
use serde_json::json;

use super::job::{self, Job, Method};
use super::key::Keys;
use super::parameters::Note;
use super::places::Places;
use super::reading::Reading;

/// How a tool calls what the others call otherwise.
pub(super) struct Names {
    pub(super) micro_batch_size: &'static str,
    pub(super) gradient_accumulation_steps: &'static str,
    pub(super) epochs: &'static str,
    pub(super) optimizer: &'static str,
    pub(super) scheduler: &'static str,
    /// What has a job's weights sharded.
    pub(super) sharding: &'static [&'static str],
}

/// The names of transformers.
pub(super) const NAMES: Names = Names {
    micro_batch_size: "per_device_train_batch_size",
    gradient_accumulation_steps: "gradient_accumulation_steps",
    epochs: "num_train_epochs",
    optimizer: "optim",
    scheduler: "lr_scheduler_type",
    sharding: &["deepspeed", "fsdp"],
};

/// Why a base in another format than 4 bits of bitsandbytes is not carried over.
pub(super) const OTHER_BASE: &str =
    "only the formats `nf4` and `fp4` of bitsandbytes are supported: the base keeps the dtype of its files";

/// A base in 4 bits of bitsandbytes, which a key asks for. `kind` and `double` are the keys of its type and of double
/// quantisation, where the tool has them; else it is `nf4` with double quantisation.
pub(super) fn quantized_base(
    reading: &mut Reading<'_>,
    key: &'static str,
    kind: Option<&'static str>,
    double: Option<&'static str>,
) {
    let mut base = "nf4";
    if let Some(kind) = kind {
        base = match reading.text(kind).as_deref() {
            Some("nf4") => "nf4",
            Some("fp4") => "fp4",
            _ => {
                reading.missing(key, OTHER_BASE);
                return reading.missing(kind, OTHER_BASE);
            }
        };
        reading.nothing(kind, "`quantize.base` of the stage");
    }
    reading.put(key, "train.quantize.base", base);
    if let Some(double) = double {
        let is_double = reading.flag(double);
        reading.put(double, "train.quantize.double_quantization", is_double);
    }
}

/// Notes that keys of a quantised base mean nothing without one.
pub(super) fn no_quantized_base(reading: &mut Reading<'_>, keys: &[&'static str]) {
    keys.iter().for_each(|key| reading.nothing(key, "only for a quantised base"));
}

const RECORDED: &str = "figures of every step are always recorded (`pipeline runs show`, TensorBoard)";
pub(super) const SPEED: &str = "changes speed or memory, never the result";
const STATES: &str = "the store keeps the states to resume from, whatever the folder";
const HUB: &str = "nothing is uploaded; `publish:` writes a folder that can be";

/// The rows. A tool with other defaults has rows of its own in front of these ([`Keys::and`]).
pub(super) fn keys() -> Keys {
    Keys::default()
        .read("per_device_train_batch_size=8", "train.micro_batch_size")
        .read("gradient_accumulation_steps=1", "train.gradient_accumulation_steps")
        .read("accelerator_config", "train.micro_batch_size")
        .read("num_train_epochs=3.0", "train.epochs")
        .read("max_steps=-1", "train.max_steps")
        .same("learning_rate=5e-5", "train.optimizer.learning_rate")
        .read("optim=adamw_torch_fused", "train.optimizer.name")
        .read("weight_decay=0.0", "train.optimizer.weight_decay")
        .read("adam_beta1=0.9", "train.optimizer.betas")
        .read("adam_beta2=0.999", "train.optimizer.betas")
        .read("adam_epsilon=1e-8", "train.optimizer.eps")
        .read("lr_scheduler_type=linear", "train.scheduler.name")
        .read("lr_scheduler_kwargs", "train.scheduler")
        .read("warmup_steps=0", "train.scheduler.warmup_steps")
        .read("warmup_ratio=0.0", "train.scheduler.warmup_ratio")
        .read("max_grad_norm=1.0", "train.clip_grad_norm")
        .read("label_smoothing_factor=0.0", "train.loss.label_smoothing")
        .read("bf16=false", "train.dtype")
        .read("fp16=false", "train.dtype")
        .read("gradient_checkpointing=false", "train.activation_checkpointing")
        .read("seed=42", "train.seed")
        .same("neftune_noise_alpha", "train.neftune_noise_alpha")
        .read("average_tokens_across_devices=true", "train")
        .read("eval_strategy=no", "train.eval_steps")
        .read("eval_steps", "train.eval_steps")
        .read("save_strategy=steps", "train.save_every")
        .read("save_steps=500", "train.save_every")
        .read("save_total_limit", "train.keep_last")
        .read("load_best_model_at_end=false", "train.keep_best")
        .read("metric_for_best_model", "train.keep_best")
        .read("deepspeed", "train.parallel")
        .read("fsdp", "train.parallel")
        .read("use_cpu=false", "resources.device")
        .read("torch_compile=false", "train.compile")
        .read("output_dir=trainer_output", "publish")
        .nothing(
            RECORDED,
            &[
                "logging_steps=500",
                "logging_strategy",
                "logging_first_step",
                "logging_dir",
                "logging_nan_inf_filter",
                "log_level",
                "log_level_replica",
                "log_on_each_node",
                "report_to",
                "run_name",
                "project",
                "trackio_space_id",
                "disable_tqdm",
                "include_num_input_tokens_seen",
                "include_tokens_per_second",
                "include_for_metrics",
                "plot_loss",
                "skip_memory_metrics",
                "debug",
            ],
        )
        .nothing(
            SPEED,
            &[
                "tf32",
                "torch_compile_backend",
                "torch_compile_mode",
                "use_liger_kernel",
                "liger_kernel_config",
                "torch_empty_cache_steps",
                "gradient_checkpointing_kwargs",
                "activation_checkpointing_kwargs",
                "auto_find_batch_size",
                "per_device_eval_batch_size",
                "eval_accumulation_steps",
                "batch_eval_metrics",
                "prediction_loss_only",
                "eval_do_concat_batches",
                "eval_use_gather_object",
                "bf16_full_eval",
                "fp16_full_eval",
                "dataloader_num_workers",
                "dataloader_pin_memory",
                "dataloader_persistent_workers",
                "dataloader_prefetch_factor",
                "dataloader_multiprocessing_context",
                "dataloader_in_order",
                "remove_unused_columns",
                "fsdp_config",
                "ddp_backend",
                "ddp_timeout",
                "ddp_bucket_cap_mb",
                "ddp_find_unused_parameters",
                "ddp_broadcast_buffers",
                "ddp_static_graph",
                "local_rank",
                "use_cache",
                "full_determinism",
                "do_train",
                "do_eval",
                "do_predict",
                "length_column_name",
                "eval_on_start",
            ],
        )
        .nothing(
            STATES,
            &[
                "overwrite_output_dir",
                "resume_from_checkpoint",
                "ignore_data_skip",
                "save_only_model",
                "save_on_each_node",
                "save_safetensors",
                "restore_callback_states_from_checkpoint",
                "enable_jit_checkpoint",
            ],
        )
        .nothing(
            HUB,
            &[
                "push_to_hub",
                "hub_model_id",
                "hub_strategy",
                "hub_token",
                "hub_private_repo",
                "hub_always_push",
                "hub_revision",
            ],
        )
        .missing(
            "not supported by `train`",
            &[
                "optim_args",
                "optim_target_modules",
                "data_seed",
                "dataloader_drop_last",
                "group_by_length",
                "train_sampling_strategy=random",
                "label_names",
                "eval_delay=0",
                "greater_is_better",
                "parallelism_config",
                "activation_checkpointing",
            ],
        )
}

/// The model, from a hub or a folder.
pub(super) fn model(reading: &mut Reading<'_>, names: [&'static str; 2], hub: &str, places: &Places) {
    let [name, revision] = names;
    let Some(model) = reading.text(name) else { return };
    if places.is_path(&model) {
        reading.put(name, "base.path", places.written(&model));
        if reading.is_given(revision) {
            reading.nothing(revision, "a folder has no revisions");
        }
        return;
    }
    reading.put(name, "base.repo", format!("{hub}{model}"));
    match reading.text(revision) {
        Some(value) => reading.put(revision, "base.revision", value),
        None => reading.nothing(revision, ""),
    }
}

/// Everything about training that these tools have in common; `devices` is how many processes train together.
pub(super) fn training(reading: &mut Reading<'_>, job: &mut Job, names: &Names, devices: i64) {
    batch(reading, names, devices);
    length(reading, names);
    optimizer(reading, job.method, names);
    scheduler(reading, names);
    precision(reading);
    job::compile(reading, "torch_compile");
    if reading.number("max_grad_norm").is_some_and(|norm| norm > 0.0) {
        let norm = reading.number("max_grad_norm");
        reading.put("max_grad_norm", "train.clip_grad_norm", norm);
    }
    let smoothing = if reading.has("label_smoothing_factor") { reading.number("label_smoothing_factor") } else { None };
    if smoothing.is_some_and(|smoothing| smoothing > 0.0) {
        reading.put("label_smoothing_factor", "train.loss.label_smoothing", smoothing);
    }
    let seed = reading.whole("seed").unwrap_or(42);
    let reason = "the same number draws another order of the rows and other first values of the adapter";
    reading.put_differing("seed", "train.seed", seed, reason);
    saving(reading);
    devices_of(reading, names, devices);
}

/// What `accelerator_config` says of batches; returns whether the devices share one.
fn splits_batches(reading: &mut Reading<'_>, names: &Names) -> bool {
    const KEY: &str = "accelerator_config";
    let options: serde_json::Map<String, serde_json::Value> = match reading.value(KEY) {
        Value::Map(entries) => entries.into_iter().map(|entry| (entry.key, entry.value.to_json())).collect(),
        Value::String(text) => match serde_json::from_str(&text) {
            Ok(options) => options,
            Err(_) => {
                reading.missing(KEY, "write what the file says in its place");
                return false;
            }
        },
        _ => return false,
    };
    let is_split = options.get("split_batches") == Some(&json!(true));
    let steps = options.get("gradient_accumulation_kwargs").and_then(|options| options.get("num_steps"));
    let is_open = reading.parameters.get("train.gradient_accumulation_steps").is_none()
        && reading.whole(names.gradient_accumulation_steps).unwrap_or(1) == 1;
    match steps.and_then(serde_json::Value::as_i64) {
        Some(steps) if is_open => {
            reading.put(KEY, "train.gradient_accumulation_steps", steps);
            reading.nothing(names.gradient_accumulation_steps, "`num_steps` of `accelerator_config` comes first");
        }
        // It is an error there.
        Some(_) => reading.missing(KEY, "`num_steps` next to a number of the trainer's own"),
        None if is_split => reading.nothing(KEY, "devices share a micro-batch, as here (`split_batches`)"),
        None => reading.nothing(KEY, SPEED),
    }
    is_split
}

fn batch(reading: &mut Reading<'_>, names: &Names, devices: i64) {
    let size = reading.whole(names.micro_batch_size).unwrap_or(1);
    let is_split = reading.has("accelerator_config") && splits_batches(reading, names);
    if devices > 1 && !is_split {
        let reason = format!(
            "per device there, {size} × {devices} devices; here over all devices together, so that another number of \
             devices trains the same"
        );
        reading.put_differing(names.micro_batch_size, "train.micro_batch_size", size * devices, reason);
    } else {
        reading.put(names.micro_batch_size, "train.micro_batch_size", size);
    }
    if reading.parameters.get("train.gradient_accumulation_steps").is_none() {
        let steps = reading.whole(names.gradient_accumulation_steps).unwrap_or(1);
        reading.put(names.gradient_accumulation_steps, "train.gradient_accumulation_steps", steps);
    }
    if reading.has("average_tokens_across_devices") && devices > 1 && !reading.flag("average_tokens_across_devices") {
        let reason = format!(
            "there a step is the mean of {devices} means, one of each device; here its loss is one sum over all target \
             tokens, divided once"
        );
        reading.differs("average_tokens_across_devices", reason);
    }
}

fn length(reading: &mut Reading<'_>, names: &Names) {
    let max_steps = reading.whole("max_steps").filter(|steps| *steps > 0);
    let epochs = reading.number(names.epochs).unwrap_or(1.0);
    if epochs.fract() == 0.0 && epochs >= 1.0 {
        reading.put(names.epochs, "train.epochs", epochs as i64);
    } else if max_steps.is_none() {
        let reason = format!("{epochs} epochs: here they are whole; `max_steps` ends training at a step");
        reading.missing(names.epochs, reason);
    } else {
        reading.nothing(names.epochs, "`max_steps` decides");
    }
    match max_steps {
        // Steps decide alone, and the data begins again as often as it takes.
        Some(steps) => reading.put("max_steps", "train.max_steps", steps),
        None => reading.nothing("max_steps", "without a limit"),
    }
    let note = Note::Default(format!("what {} does", reading.tool));
    reading.parameters.set("train.leftover", "step", note);
}

fn optimizer(reading: &mut Reading<'_>, method: Method, names: &Names) {
    let name = reading.text(names.optimizer).unwrap_or_default();
    let kind = match name.as_str() {
        "adamw" | "adamw_torch" | "adamw_torch_fused" | "adamw_hf" | "adamw_apex_fused" | "paged_adamw_32bit"
        | "paged_adamw" => "adamw",
        "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit" | "adamw_torch_8bit" => "adamw_8bit",
        "lion" | "lion_32bit" | "paged_lion_32bit" | "lion_pytorch" => "lion",
        "sgd" => "sgd",
        "muon" => "muon",
        _ => {
            let reason = format!(
                "`{name}` is no optimizer here: adamw, adamw_8bit, sgd, lion and muon are; its numbers become those of \
                 adamw"
            );
            reading.missing(names.optimizer, reason);
            "adamw"
        }
    };
    let is_sharded = names.sharding.iter().any(|name| sharding(reading, name).is_some());
    let is_half = reading.choice("fp16") == Some(true);
    match kind {
        _ if reading.is_reported(names.optimizer) => {}
        "adamw_8bit" if is_sharded || is_half => {
            let reason = "8-bit moments are for the native backend (the CPU), which shards nothing and does not compute \
                in f16: here they are in f32";
            reading.put_differing(names.optimizer, "train.optimizer.name", "adamw", reason);
        }
        "adamw_8bit" => {
            let reason = "8-bit moments as in bitsandbytes, the embedding's in f32, as there; here only on the native backend (the \
                CPU)";
            reading.put_differing(names.optimizer, "train.optimizer.name", kind, reason);
        }
        "muon" => {
            let reason = "matrices of the layers by Muon, as there; embedding and LM head by AdamW under `adamw:`";
            reading.put_differing(names.optimizer, "train.optimizer.name", kind, reason);
        }
        _ => reading.put(names.optimizer, "train.optimizer.name", kind),
    }
    // Muon's are those of what it leaves to AdamW.
    let below = if kind == "muon" { "train.optimizer.adamw" } else { "train.optimizer" };
    if kind != "sgd" {
        let path = format!("{below}.betas");
        let betas = (reading.number("adam_beta1").unwrap_or(0.9), reading.number("adam_beta2").unwrap_or(0.999));
        reading.put("adam_beta1", &path, json!([betas.0, betas.1]));
        reading.put("adam_beta2", &path, json!([betas.0, betas.1]));
    }
    if kind.starts_with("adamw") || kind == "muon" {
        let eps = reading.number("adam_epsilon").unwrap_or(1e-8);
        reading.put("adam_epsilon", &format!("{below}.eps"), eps);
    }
    let decay = reading.number("weight_decay").unwrap_or(0.0);
    if kind == "muon" {
        reading.put("weight_decay", "train.optimizer.weight_decay", decay);
        reading.put("weight_decay", "train.optimizer.adamw.weight_decay", decay);
    } else if decay > 0.0 && method == Method::Full {
        let reason = format!("there {decay} only for matrices; here norms and biases decay as well");
        reading.put_differing("weight_decay", "train.optimizer.weight_decay", decay, reason);
    } else {
        reading.put("weight_decay", "train.optimizer.weight_decay", decay);
    }
}

fn scheduler(reading: &mut Reading<'_>, names: &Names) {
    let name = reading.text(names.scheduler).unwrap_or_default();
    let kind: &str = match name.as_str() {
        "linear" | "cosine" | "polynomial" | "inverse_sqrt" | "cosine_with_restarts" | "cosine_with_min_lr" => &name,
        "warmup_stable_decay" | "constant" => &name,
        "constant_with_warmup" => "constant",
        _ => {
            let reason = match name.as_str() {
                "one_cycle" => {
                    "its rise is given by the warm-up there: write `scheduler: { name: one_cycle, pct_start: … }`"
                        .to_owned()
                }
                _ => format!("`{name}` is no schedule here: docs/stages/train.md lists them"),
            };
            reading.missing(names.scheduler, reason);
            ""
        }
    };
    if !kind.is_empty() && reading.parameters.get("train.scheduler.name").is_none() {
        reading.put(names.scheduler, "train.scheduler.name", kind);
    }
    options(reading);
    if name == "constant" {
        reading.nothing("warmup_steps", "`constant` has no warm-up there");
        reading.nothing("warmup_ratio", "`constant` has no warm-up there");
        return;
    }
    if reading.parameters.get("train.scheduler.warmup_ratio").is_some() {
        return;
    }
    let steps = reading.number("warmup_steps").unwrap_or(0.0);
    let ratio = reading.number("warmup_ratio").unwrap_or(0.0);
    match (steps, ratio) {
        (steps, _) if steps >= 1.0 => {
            reading.put("warmup_steps", "train.scheduler.warmup_steps", steps as i64);
            reading.nothing("warmup_ratio", "`warmup_steps` comes first");
        }
        // Since transformers 5 a number below 1 is a share.
        (steps, _) if steps > 0.0 => reading.put("warmup_steps", "train.scheduler.warmup_ratio", steps),
        (_, ratio) if ratio > 0.0 => reading.put("warmup_ratio", "train.scheduler.warmup_ratio", ratio),
        _ => {
            reading.put("warmup_steps", "train.scheduler.warmup_steps", 0);
            reading.nothing("warmup_ratio", "no warm-up");
        }
    }
}

/// Options of the schedule, as a mapping or as JSON in a text.
fn options(reading: &mut Reading<'_>) {
    let options = match reading.value("lr_scheduler_kwargs") {
        Value::Map(entries) => entries.into_iter().map(|entry| (entry.key, entry.value.to_json())).collect(),
        Value::String(text) => match serde_json::from_str::<serde_json::Map<_, _>>(&text) {
            Ok(options) => options,
            Err(_) => return reading.missing("lr_scheduler_kwargs", "it is no mapping"),
        },
        _ => return,
    };
    for (option, value) in options {
        const KNOWN: &[&str] =
            &["num_cycles", "min_lr", "min_lr_rate", "min_lr_ratio", "power", "lr_end", "num_decay_steps", "timescale"];
        if KNOWN.contains(&option.as_str()) {
            reading.put("lr_scheduler_kwargs", &format!("train.scheduler.{option}"), value);
        } else {
            reading.missing("lr_scheduler_kwargs", format!("`{option}` is no option of a schedule here"));
        }
    }
}

fn precision(reading: &mut Reading<'_>) {
    if reading.parameters.get("train.dtype").is_none() {
        let (bf16, fp16) = (reading.flag("bf16"), reading.flag("fp16"));
        match (bf16, fp16) {
            (true, _) => reading.put("bf16", "train.dtype", "bf16"),
            (false, true) => reading.put("fp16", "train.dtype", "f16"),
            (false, false) => reading.put("bf16", "train.dtype", "f32"),
        }
    }
    if reading.parameters.get("train.activation_checkpointing").is_some() {
        return;
    }
    let checkpointing = match reading.value("gradient_checkpointing") {
        Value::String(text) => text != "false",
        _ => reading.flag("gradient_checkpointing"),
    };
    reading.put("gradient_checkpointing", "train.activation_checkpointing", checkpointing);
}

fn saving(reading: &mut Reading<'_>) {
    // axolotl takes the number for the strategy, and the others have this one by default.
    let is_by_steps = reading.is_given("save_steps") && !reading.is_given("save_strategy");
    if let Some(steps) = reading.number("save_steps")
        && (is_by_steps || reading.text("save_strategy").as_deref() == Some("steps"))
        && steps >= 1.0
    {
        let reason = "there each is a checkpoint to keep; here it is the state to resume from, and only the result of \
            the stage is kept";
        reading.put_differing("save_steps", "train.save_every", steps as i64, reason);
    } else {
        reading.nothing("save_steps", "the state to resume from is saved every 20 steps");
    }
    if let Some(limit) = reading.whole("save_total_limit").filter(|limit| *limit >= 1) {
        reading.put("save_total_limit", "train.keep_last", limit);
    }
}

/// Whether the loss is never measured during training: by the key `strategy`, or by the tool's default of it.
/// In YAML 1.1, which the tools read, `no` and `off` are booleans.
pub(super) fn evaluation_is_off(reading: &mut Reading<'_>, strategy: &str) -> bool {
    let strategy = reading.text(strategy).unwrap_or_default();
    matches!(strategy.to_lowercase().as_str(), "no" | "off" | "false")
}

/// When the loss is measured, where there are rows for it.
pub(super) fn validation(reading: &mut Reading<'_>) {
    if reading.text("eval_strategy").as_deref() == Some("steps") {
        eval_steps(reading, "logging_steps");
    }
    best(reading);
}

/// After how many steps the loss is measured; `otherwise` is the key that says it where `eval_steps` does not.
pub(super) fn eval_steps(reading: &mut Reading<'_>, otherwise: &'static str) {
    let key = if reading.is_given("eval_steps") { "eval_steps" } else { otherwise };
    match reading.number(key) {
        Some(steps) if steps >= 1.0 => reading.put(key, "train.eval_steps", steps as i64),
        Some(_) => reading.missing("eval_steps", "a share of all steps: `eval_steps` is a number of steps here"),
        None => {
            reading.missing("eval_steps", format!("it is that of `{otherwise}`, which depends on the number of steps"))
        }
    }
}

/// Which state of the model is kept.
pub(super) fn best(reading: &mut Reading<'_>) {
    if reading.flag("load_best_model_at_end") {
        let metric = reading.text("metric_for_best_model");
        match metric.as_deref() {
            None | Some("loss" | "eval_loss") => {
                reading.put("load_best_model_at_end", "train.keep_best", true);
                reading.nothing("metric_for_best_model", "the loss of the validation rows");
            }
            Some(other) => {
                let reason = format!("`{other}`: here the loss of the validation rows decides");
                reading.missing("metric_for_best_model", reason);
            }
        }
    }
}

/// What a key says that has weights sharded, where it says something.
fn sharding(reading: &mut Reading<'_>, name: &str) -> Option<String> {
    reading.text(name).filter(|text| !text.is_empty() && text != "[]" && text != "{}")
}

fn devices_of(reading: &mut Reading<'_>, names: &Names, devices: i64) {
    for name in names.sharding.iter().copied() {
        let Some(text) = sharding(reading, name) else { continue };
        if reading.parameters.get("train.parallel").is_some() {
            reading.nothing(name, SPEED);
            continue;
        }
        if reading.parameters.get("train.quantize.base").is_some() {
            reading.differs(name, "sharded there; here a base in 4 bits is whole on each device");
            continue;
        }
        let reason = match text.contains("zero2") || text.contains("zero1") {
            true => "there optimizer states are sharded; here weights as well (`fsdp2`), only on devices",
            false => {
                "sharded there and here, by different implementations; only on devices, and the result is the \
                same"
            }
        };
        reading.put_differing(name, "train.parallel", "fsdp2", reason);
    }
    if reading.has("use_cpu") && reading.flag("use_cpu") {
        reading.put("use_cpu", "resources.device", "cpu");
    }
    if devices > 1 {
        reading.parameters.set("resources.count", devices, Note::Given);
    }
}
