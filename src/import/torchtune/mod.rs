//! torchtune: its configs in both dialects (0.2.1, and 0.3 to 0.6.1), and `tune run`.

mod builtin;
mod datasets;
mod models;

use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use serde_json::json;

pub(super) use builtin::builtin;

use super::job::{self, HeldOut, Job, Method};
use super::key::Keys;
use super::parameters::Note;
use super::places::Places;
use super::preference::{self, Smoothing};
use super::reading::Reading;

/// The keys of `DPOLoss`.
const PREFERENCE: preference::Names = preference::Names {
    loss: "_component_",
    beta: Some("beta"),
    label_smoothing: Some("label_smoothing"),
    gamma: None,
    cpo_weight: None,
    sft_weight: None,
    desirable_weight: None,
    undesirable_weight: None,
    orpo_scores_prompts: false,
};
const RSO: preference::Names = preference::Names { beta: Some("gamma"), label_smoothing: None, ..PREFERENCE };

pub(super) const VERSION: &str = "0.6.1";

const RECORDED: &str = "figures of every step and peak memory are always recorded";
const SPEED: &str = "changes speed or memory, never the result";
const QUANTIZER: &str = "a model is quantised by a `quantize` or a `gguf` stage: docs/quantization.md";

/// The keys at the top of a config.
pub(super) fn keys() -> Keys {
    Keys::default()
        .read("model", "train.method")
        .read("tokenizer", "tokens")
        .read("checkpointer", "base")
        .read("dataset", "rows")
        .read("dataset_val", "held_out_rows")
        .read("run_val_every_n_steps", "train.eval_steps")
        .read("optimizer", "train.optimizer")
        .read("lr_scheduler", "train.scheduler")
        .read("loss", "train.loss")
        .read("batch_size=1", "train.micro_batch_size")
        .read("tensor_parallel_dim=1", "train.micro_batch_size")
        .read("context_parallel_dim=1", "train.micro_batch_size")
        .read("gradient_accumulation_steps=1", "train.gradient_accumulation_steps")
        .whole("epochs=1", "train.epochs")
        .whole("max_steps_per_epoch", "train.max_steps_per_epoch")
        .same("shuffle=true", "train.shuffle")
        .same("clip_grad_norm", "train.clip_grad_norm")
        .read("seed", "train.seed")
        .read("dtype=bf16", "train.dtype")
        .read("device=cuda", "resources.device")
        .read("compile=false", "train.compile")
        .same("enable_activation_checkpointing=false", "train.activation_checkpointing")
        .read("save_adapter_weights_only=false", "merged")
        .read("optimizer_in_bwd=false", "train")
        .read("output_dir", "publish")
        .nothing(RECORDED, &["metric_logger", "log_every_n_steps", "log_peak_memory_stats", "log_level", "profiler"])
        .nothing(
            SPEED,
            &[
                "enable_activation_offloading",
                "activation_offloading_use_streams",
                "custom_sharded_layers",
                "fsdp_cpu_offload",
                "fsdp_reshard_after_forward",
                "memory_efficient_fsdp_wrap",
                "low_cpu_ram",
                "ac_mode",
                "ac_option",
                "fsdp",
                "data_parallel_shard_dim",
                "data_parallel_replicate_dim",
                "tensor_parallel_plan",
                "batch_size_val",
                "dataloader",
                "cudnn_deterministic_mode",
                "collate_fn",
                "enable_async_checkpointing",
                "keep_last_n_checkpoints",
            ],
        )
        .nothing(
            "the same command resumes automatically",
            &["resume_from_checkpoint", "save_every_n_steps", "should_load_recipe_state"],
        )
        .missing(
            "a teacher's distributions are `loss: { name: distillation }`: docs/from-torchtune.md has the stage",
            &["teacher_model", "teacher_checkpointer", "kd_loss", "kd_ratio"],
        )
        .missing("the reference is the model that the run starts from", &["ref_checkpointer"])
        .missing(preference::OTHERS, &["policy_model", "reward_and_value_model", "ppo_epochs", "rlhf_loss"])
        .read("quantizer", "train.quantize.aware")
        .read("fake_quant_after_n_steps", "train.quantize.after_steps")
        .missing(
            "not a training recipe: `generate` and `evaluate` are separate stages",
            &[
                "prompt",
                "max_new_tokens",
                "temperature",
                "top_k",
                "enable_kv_cache",
                "tasks",
                "instruct_template",
                "chat_format",
            ],
        )
}

/// The recipe's name with its number of processes, as `tune run` names them.
pub(super) fn recipe(reading: &mut Reading<'_>, name: &str, span: Span) {
    use engine::file::problem::Problem;
    let what = match name {
        "lora_finetune_single_device"
        | "lora_finetune_distributed"
        | "lora_finetune_fsdp2"
        | "full_finetune_single_device"
        | "full_finetune_distributed"
        | "lora_dpo_single_device"
        | "lora_dpo_distributed"
        | "full_dpo_distributed"
        | "qat_distributed"
        | "qat_lora_finetune_distributed" => return,
        name if name.contains("ppo") || name.contains("grpo") => preference::OTHERS,
        "quantize" => QUANTIZER,
        name if name.contains("distillation") => "distillation: docs/from-torchtune.md has the stage",
        "generate" => "generation is a `generate` stage: docs/stages/generate.md",
        "eleuther_eval" => "evaluation is an `evaluate` stage: docs/stages/evaluate.md",
        _ => "a recipe of one's own is code",
    };
    let problem = Problem::error("not-carried-over", span, format!("the recipe `{name}` is not carried over"), what);
    reading.problems.push(problem);
}

/// Reads a config; `recipe` and `devices` are those that the command names.
pub(super) fn read(reading: &mut Reading<'_>, root: &Node, recipe: Option<&str>, devices: i64, places: &Places) -> Job {
    let mut job = Job { merges: true, ..Job::default() };
    reading.require("model", Span { len: 0, ..root.span });
    reading.require("dataset", Span { len: 0, ..root.span });
    let repository = models::model(reading, &mut job, root);
    checkpointer(reading, root, repository, places);
    let tokenizer = datasets::tokenizer(reading, root);
    let shared = datasets::training(reading, &mut job, root, &tokenizer, places);
    if reading.is_given("dataset_val") {
        let held_out = datasets::validation(reading, root, &shared, &tokenizer, places);
        job.held_out = HeldOut::Own(held_out);
        if let Some(steps) = reading.whole("run_val_every_n_steps") {
            reading.put("run_val_every_n_steps", "train.eval_steps", steps);
        }
    }
    datasets::length(reading, &mut job, &tokenizer);
    let ranks = data_parallel(reading, &job, recipe, devices);
    batch(reading, devices, ranks);
    optimizer(reading, root);
    scheduler(reading, root);
    loss(reading, root);
    precision(reading);
    quantizer(reading, &job, root);
    if reading.flag("save_adapter_weights_only") {
        job.merges = false;
        reading.nothing("save_adapter_weights_only", "only the adapter");
    } else if job.method == Method::Lora {
        let reason = "there a merged model is written with the adapter after each epoch; here once, at the end, and \
            verified";
        reading.differs("save_adapter_weights_only", reason);
    }
    job.output = reading.text("output_dir");
    reading.consumed("output_dir", "publish");
    job
}

/// The component that a mapping is built by, without the modules that it is in: those have moved between versions.
pub(super) fn component(node: Option<&Node>) -> Option<(String, Span)> {
    let node = node?;
    let text = match &node.value {
        Value::String(text) => return Some((last_name(text), node.span)),
        _ => node.get("_component_")?,
    };
    match &text.value {
        Value::String(name) => Some((last_name(name), text.span)),
        _ => None,
    }
}

fn last_name(path: &str) -> String {
    path.rsplit('.').next().unwrap_or_default().to_owned()
}

fn checkpointer(reading: &mut Reading<'_>, root: &Node, repository: Option<&'static str>, places: &Places) {
    let Some(node) = root.get("checkpointer") else { return };
    let keys = Keys::default()
        .read("_component_", "base")
        .read("checkpoint_dir", "base")
        .nothing(
            "the files of a checkpoint are those in its folder",
            &["checkpoint_files", "model_type", "safe_serialization"],
        )
        .nothing("the same command resumes automatically", &["recipe_checkpoint", "adapter_checkpoint"])
        .nothing("`publish:` copies the result", &["output_dir", "keep_last_n_checkpoints", "enable_dcp"]);
    let mut below = reading.below(keys, node);
    match component(Some(node)).map(|(name, _)| name).as_deref() {
        Some("FullModelHFCheckpointer") | None => below.nothing("_component_", "a checkpoint in the Hub's format"),
        Some("FullModelMetaCheckpointer") => {
            below.differs(
                "_component_",
                "there Meta's own format (`consolidated.*.pth`); here the Hub's format of the same weights",
            );
        }
        Some(other) => below.missing(
            "_component_",
            format!(
                "`{other}`: only checkpoints in the Hub's format are \
            supported"
            ),
        ),
    }
    let folder = below.text("checkpoint_dir").unwrap_or_default();
    match (places.find(&folder).filter(|path| path.join("config.json").exists()), repository) {
        (None, Some(repository)) => {
            let name = folder.trim_end_matches('/').rsplit('/').find(|name| *name != "original").unwrap_or_default();
            // The Hub's names had `Meta-` in front at first.
            let plain = |name: &str| name.trim_start_matches("Meta-").to_owned();
            let is_other = plain(name) != plain(repository.rsplit('/').next().unwrap_or_default());
            let other = if is_other { "; its name is that of another model" } else { "" };
            let reason = format!(
                "`{folder}` is not on this machine; the model's repository on the Hub in its place (`path: FOLDER` for \
                 a folder){other}"
            );
            below.put_differing("checkpoint_dir", "base.repo", repository, reason);
            below.parameters.need("base.exclude", json!(["original/*"]), "Meta's own format of the same weights.");
        }
        _ => below.put("checkpoint_dir", "base.path", places.written(folder.trim_end_matches('/'))),
    }
    below.finish();
    let found = reading.take(below);
    reading.parameters.extend(&found);
    reading.nothing("checkpointer", "the stage `base`");
}

/// What weights are trained for, by the recipes with `qat` in their names.
fn quantizer(reading: &mut Reading<'_>, job: &Job, root: &Node) {
    if let Some(node) = root.get("quantizer").filter(|node| !matches!(node.value, Value::Null)) {
        let keys = Keys::default()
            .read("_component_", "train.quantize.aware")
            .read("groupsize=256", "train.quantize.group_size")
            .nothing("f32, as here", &["precision", "scales_precision"]);
        let mut below = reading.below(keys, node);
        match component(Some(node)).map(|(name, _)| name).as_deref() {
            Some("Int8DynActInt4WeightQATQuantizer") => {
                below.put("_component_", "train.quantize.aware", "int8_dynamic_activations_int4_weights");
                let size = below.whole("groupsize").unwrap_or(256);
                let reason = "there layers whose inputs are not a multiple of it are not quantised; here that is an \
                    error with a remedy";
                below.put_differing("groupsize", "train.quantize.group_size", size, reason);
            }
            Some(other) => below.missing("_component_", format!("`{other}`: {QUANTIZER}")),
            None => below.missing("_component_", QUANTIZER),
        }
        below.finish();
        let found = reading.take(below);
        reading.parameters.extend(&found);
        reading.nothing("quantizer", "`quantize` of the stage `adapter`");
    }
    if let Some(steps) = reading.whole("fake_quant_after_n_steps") {
        match job.method {
            Method::Full => reading.put("fake_quant_after_n_steps", "train.quantize.after_steps", steps),
            Method::Lora => {
                reading.missing("fake_quant_after_n_steps", "frozen weights are on their grids from the beginning")
            }
        }
    }
}

/// How many ranks have rows of their own: processes that share a model's matrices, or a row's tokens, have the same
/// rows.
fn data_parallel(reading: &mut Reading<'_>, job: &Job, recipe: Option<&str>, devices: i64) -> i64 {
    // The recipes for adapters, preferences and QAT have no such dimension.
    let is_read = recipe.map_or(job.method == Method::Full, |recipe| recipe == "full_finetune_distributed");
    let mut ranks = devices;
    for name in ["tensor_parallel_dim", "context_parallel_dim"] {
        match reading.whole(name).unwrap_or(1) {
            ..=1 => reading.nothing(name, "one, as here"),
            _ if !is_read => reading.nothing(name, "the recipe does not read it"),
            size if devices == 1 => {
                let reason = format!(
                    "{size} processes have the same rows there; how many are started is not in this file: taken for one \
                     batch of `batch_size` rows"
                );
                reading.differs(name, reason);
            }
            size if ranks % size == 0 => {
                ranks /= size;
                let reason = format!(
                    "{size} processes have the same rows there, so that {devices} processes have {ranks} batches at \
                     once; here no model is split so, and the result is the same"
                );
                reading.differs(name, reason);
            }
            size => reading.missing(name, format!("{ranks} processes are no multiple of {size}")),
        }
    }
    ranks
}

fn batch(reading: &mut Reading<'_>, devices: i64, ranks: i64) {
    let size = reading.whole("batch_size").unwrap_or(1);
    if ranks > 1 {
        let reason = format!("on each rank there, {size} × {ranks} ranks; here over all devices together");
        reading.put_differing("batch_size", "train.micro_batch_size", size * ranks, reason);
    } else {
        reading.put("batch_size", "train.micro_batch_size", size);
    }
    if devices > 1 {
        reading.parameters.set("resources.count", devices, Note::Given);
    }
    let steps = reading.whole("gradient_accumulation_steps").unwrap_or(1);
    let reason = format!(
        "the micro-batches of an epoch that fill no step of {steps} stay in the gradients there and are added to the \
         first step of the next epoch; here they are left out (`leftover: drop`)"
    );
    reading.put_differing("gradient_accumulation_steps", "train.gradient_accumulation_steps", steps, reason);
    reading.parameters.need("train.leftover", "drop", "As many steps as torchtune makes.");
    if reading.flag("optimizer_in_bwd") {
        reading.differs(
            "optimizer_in_bwd",
            "a step after each micro-batch there, and here after `gradient_accumulation_steps`",
        );
    }
    let reason = "without a seed two runs there differ; here two runs of one file are one result";
    match reading.whole("seed") {
        Some(seed) => {
            let reason = "the same number draws another order of the rows and other first values of the adapter";
            reading.put_differing("seed", "train.seed", seed, reason);
        }
        None => reading.put_differing("seed", "train.seed", 0, reason),
    }
}

fn optimizer(reading: &mut Reading<'_>, root: &Node) {
    let Some(node) = root.get("optimizer") else { return };
    let keys = Keys::default()
        .read("_component_", "train.optimizer.name")
        .same("lr=1e-3", "train.optimizer.learning_rate")
        .same("weight_decay=0.01", "train.optimizer.weight_decay")
        .same("betas=[0.9, 0.999]", "train.optimizer.betas")
        .same("eps=1e-8", "train.optimizer.eps")
        .same("momentum", "train.optimizer.momentum")
        .same("nesterov", "train.optimizer.nesterov")
        .nothing(SPEED, &["fused", "foreach", "capturable", "is_paged", "block_wise"])
        .missing("no option of an optimizer here", &["amsgrad", "maximize", "percentile_clipping=100"]);
    let mut below = reading.below(keys, node);
    let name = component(Some(node)).map_or_else(|| "AdamW".to_owned(), |(name, _)| name);
    match name.as_str() {
        "AdamW" | "PagedAdamW" | "CPUOffloadOptimizer" => below.put("_component_", "train.optimizer.name", "adamw"),
        "AdamW8bit" | "PagedAdamW8bit" => {
            let reason = "8-bit moments in blocks of 256, as in bitsandbytes, but the embedding's in f32 unless \
                `embedding_state: int8`; here only on the native backend";
            below.put_differing("_component_", "train.optimizer.name", "adamw_8bit", reason);
        }
        "SGD" => {
            below.put("_component_", "train.optimizer.name", "sgd");
            for name in ["betas", "eps"] {
                below.nothing(name, "SGD has none");
            }
            if !below.is_given("weight_decay") {
                below.put("weight_decay", "train.optimizer.weight_decay", 0);
            }
        }
        other => below.missing(
            "_component_",
            format!("`{other}` is no optimizer here: adamw, adamw_8bit, sgd, lion and muon are"),
        ),
    }
    below.finish();
    let found = reading.take(below);
    reading.parameters.extend(&found);
    reading.nothing("optimizer", "the optimizer");
}

fn scheduler(reading: &mut Reading<'_>, root: &Node) {
    let node = root.get("lr_scheduler").filter(|node| node.value != Value::Null);
    let Some(node) = node else {
        reading.put("lr_scheduler", "train.scheduler.name", "constant");
        return;
    };
    let keys = Keys::default()
        .read("_component_", "train.scheduler.name")
        .whole("num_warmup_steps=0", "train.scheduler.warmup_steps")
        .same("num_cycles=0.5", "train.scheduler.num_cycles");
    let mut below = reading.below(keys, node);
    match component(Some(node)).map(|(name, _)| name).as_deref() {
        Some("get_cosine_schedule_with_warmup") => below.put("_component_", "train.scheduler.name", "cosine"),
        other => {
            let name = other.unwrap_or_default();
            below.missing("_component_", format!("`{name}` is no schedule here: docs/stages/train.md lists them"));
        }
    }
    below.finish();
    let found = reading.take(below);
    reading.parameters.extend(&found);
    reading.nothing("lr_scheduler", "the schedule");
}

fn loss(reading: &mut Reading<'_>, root: &Node) {
    let Some(node) = root.get("loss") else { return };
    let keys = Keys::default()
        .read("_component_", "train.loss")
        .nothing(SPEED, &["num_output_chunks", "ignore_index", "reduction"])
        .same("label_smoothing", "train.loss.label_smoothing")
        .read("beta=0.1", "train.loss.beta")
        .read("gamma=0.1", "train.loss.beta")
        .missing("a loss of another name here", &["loss_type"]);
    let mut below = reading.below(keys, node);
    match component(Some(node)).map(|(name, _)| name).as_deref() {
        Some("CEWithChunkedOutputLoss" | "CrossEntropyLoss" | "LinearCrossEntropyLoss") | None => {
            below.nothing("_component_", "cross-entropy");
            ["beta", "gamma"].into_iter().for_each(|name| below.nothing(name, "of losses of preferences"));
        }
        Some("DPOLoss") => preference::loss(&mut below, &PREFERENCE, "dpo", Smoothing::Conservative),
        // `gamma` is the inverse of the margin.
        Some("RSOLoss") => preference::loss(&mut below, &RSO, "hinge", Smoothing::Conservative),
        Some(name) if name.contains("PPO") || name.contains("GRPO") => {
            below.missing("_component_", preference::OTHERS);
        }
        Some(name) => below.missing("_component_", format!("`{name}` is no loss that is carried over")),
    }
    below.finish();
    let found = reading.take(below);
    reading.parameters.extend(&found);
    reading.nothing("loss", "the loss");
}

fn precision(reading: &mut Reading<'_>) {
    match reading.text("dtype").as_deref() {
        Some("fp32") => reading.put("dtype", "train.dtype", "f32"),
        Some("fp16") => reading.put("dtype", "train.dtype", "f16"),
        Some("bf16") => {
            let reason = "there everything is bf16, including the adapter, its gradients and moments; here trainable \
                parameters, their moments and the loss are f32";
            reading.put_differing("dtype", "train.dtype", "bf16", reason);
        }
        _ => reading.missing("dtype", "bf16, fp16 and fp32 are known"),
    }
    match reading.text("device").as_deref() {
        Some(device @ ("cpu" | "npu")) => reading.put("device", "resources.device", device),
        Some("mps") => reading.put("device", "resources.device", "metal"),
        _ => {
            let reason = "there `cuda` means NVIDIA and AMD; here `auto` uses the device of the machine";
            reading.put_differing("device", "resources.device", "auto", reason);
        }
    }
    job::compile(reading, "compile");
}
