//! What a training run would do and cost, from its parameters and the facts of its inputs.

use std::cmp::Ordering;

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Grade, Work};
use engine::parameter::Reference;
use engine::stage::InputFacts;
use model::checkpoint::Dtype;
use model::config::Config;
use model::memory::{FrozenFormat, Lengths, TrainingLoad, TrainingMemory, Weights, inference_bytes, weight_bytes};
use model::optimizer::TensorInfo;
use model::peft::Modules;
use model::trainer::Trained;
use serde_json::Value;

use super::order::{Division, WITHOUT_A_STEP};
use super::parameters::{Method, QuantizeParams, Train, TrainQuantize, Warmup};
use super::workers::meeting_bytes;
use crate::compute::backend::Backend;
use crate::compute::checkpoint;
use crate::compute::kernels::Kernels;
use crate::compute::quantize::QUANTIZE;
use crate::data::prompt::PROMPT;
use crate::forecast::{PROCESS_BYTES, checkpoint_bytes, model_config, say_not_native, stored_dtype};

/// Bytes of a saved number.
const F32_BYTES: u64 = 4;

/// Within which share of the estimate `benches/memory.py` finds the peak of each of its configurations.
const MARGIN: f64 = 0.15;

/// The fact of an adapter that is not trained yet which is its `adapter_config.json` as a text; of one that is there,
/// the file itself tells.
pub(super) const ADAPTER_CONFIG: &str = "adapter_config";

/// Everything that can be estimated.
pub(super) fn forecast(params: &Train, ahead: &Ahead<'_>) -> Forecast {
    let (mut forecast, inputs, model) = (Forecast::default(), ahead.expected, &params.model.reference);
    steps(params, ahead, &mut forecast);
    forecast.problems.extend(params.validation_tasks.iter().flat_map(|tasks| tasks.problems_of_files(ahead.files)));
    say_not_native(model, inputs, &mut forecast);
    let config = model_config(model, inputs);
    if let Some(config) = &config {
        memory(params, inputs, config, &mut forecast);
    }
    forecast.work = work(params, inputs, config.as_ref());
    let trained = match params.method {
        Method::Lora => "adapter",
        Method::Full => "model",
    };
    if params.method == Method::Full {
        forecast.pass(trained, ahead, model, checkpoint::config_facts());
    }
    forecast.pass(trained, ahead, &params.data.reference, [PROMPT]);
    match params.method {
        Method::Lora => adapter_config(params, ahead, &mut forecast),
        Method::Full => {
            checkpoint::forecast_template(trained, ahead, &params.data.reference, &mut forecast);
        }
    }
    if let Some(quantize) = &params.quantize {
        forecast.fact(trained, QUANTIZE, quantize.fact());
    }
    forecast
}

/// The settings of the adapter: a warm start has those of the adapter that it starts from, but for the dropout, which
/// nothing is compared with.
fn adapter_config(params: &Train, ahead: &Ahead<'_>, forecast: &mut Forecast) {
    if let Some(existing) = &params.adapter {
        return forecast.pass("adapter", ahead, &existing.reference, [ADAPTER_CONFIG]);
    }
    let model = &params.model.reference;
    let known = model_config(model, ahead.certain).zip(model.facts_in(ahead.certain));
    let settings = known.map(|(config, facts)| params.lora.value.settings_on(&Modules::from(&config), facts));
    if let Some(Ok((settings, _))) = settings {
        forecast.fact("adapter", ADAPTER_CONFIG, settings.to_json());
    }
}

/// Rows, steps and learning rates.
fn steps(params: &Train, ahead: &Ahead<'_>, forecast: &mut Forecast) {
    let rows_per_step = params.rows_per_step();
    let product = format!(
        "{rows_per_step} = micro_batch_size {} × gradient_accumulation_steps {}",
        params.micro_batch_size, params.gradient_accumulation_steps
    );
    let count = |name: &str| ahead.fact(&params.data.reference, name).and_then(|(value, _)| value.as_u64());
    let Some(rows) = count("rows").and_then(|rows| usize::try_from(rows).ok()) else {
        forecast.figure("rows_per_step", rows_per_step, product);
        return;
    };
    let grade = ahead.fact(&params.data.reference, "rows").map(|(_, grade)| grade);
    let known = grade == Some(Grade::Certain);
    let source = &params.data.reference.stage;
    forecast.figure("rows", rows, if known { rows.to_string() } else { format!("{rows}, if `{source}` has so many") });
    forecast.figure("rows_per_step", rows_per_step, product);
    let division = params.division(rows);
    forecast.figure("steps_per_epoch", division.steps_per_epoch(), epoch_in_words(&division));
    let total = params.total_steps(rows);
    forecast.figure("optimizer_steps", total, format!("{total} in {}", epochs_in_words(params, &division, total)));
    match total.checked_sub(1) {
        Some(last_step) => learning_rate(params, last_step, ahead.span, forecast),
        None => forecast.problems.push(without_a_step(params, grade, ahead.span)),
    }
    if known
        && let (Some(tokens), Some(targets), Some(padding)) =
            (count("tokens"), count("target_tokens"), count("padding"))
    {
        let (of_epoch, text) = tokens_of_epoch(&division, tokens, targets, padding);
        forecast.figure("tokens_per_epoch", of_epoch, text);
    }
}

/// What there is to compute: tokens times the weights that each goes through, as far as both are known.
fn work(params: &Train, inputs: &InputFacts, config: Option<&Config>) -> Option<Work> {
    let data = params.data.reference.facts_in(inputs)?;
    let count = |name: &str| data.get(name).and_then(Value::as_u64);
    let rows = usize::try_from(count("rows")?).ok().filter(|rows| *rows > 0)?;
    let (division, total) = (params.division(rows), params.total_steps(rows));
    let epochs = total.div_ceil(division.steps_per_epoch().max(1));
    let taken = total.saturating_mul(params.rows_per_step() as u64).min(epochs.saturating_mul(rows as u64)) as f64;
    Some(match (count("tokens"), config) {
        (Some(tokens), Some(config)) => {
            let tokens = taken * tokens as f64 / rows as f64;
            Work::new("tokens × weights", tokens * config.matrix_weights() as f64)
        }
        (Some(tokens), None) => Work::new("tokens", taken * tokens as f64 / rows as f64),
        (None, _) => Work::new("rows", taken),
    })
}

/// The tokens of an epoch, from those of all rows: where some rows are left out, which ones differs from epoch to
/// epoch.
fn tokens_of_epoch(division: &Division, tokens: u64, targets: u64, padding: u64) -> (u64, String) {
    let share = 100.0 * padding as f64 / (tokens + padding).max(1) as f64;
    let left_out = division.rows_left_out();
    if left_out == 0 {
        let text = format!("{tokens}, {targets} of them targets; {padding} of padding ({share:.1} %) not computed");
        return (tokens, text);
    }
    let taken = (division.rows - left_out) as f64 / division.rows as f64;
    let [tokens_taken, targets_taken] = [tokens, targets].map(|all| (all as f64 * taken).round() as u64);
    let text = format!(
        "about {tokens_taken} of {tokens}, {targets_taken} of them targets; padding ({share:.1} %) not computed"
    );
    (tokens_taken, text)
}

fn epoch_in_words(division: &Division) -> String {
    let steps = division.steps_per_epoch();
    let rows_of = |step: u64| division.place(step).rows.len();
    let last = steps.checked_sub(1).map_or(0, rows_of);
    let full = if last == division.rows_per_step { steps } else { steps.saturating_sub(1) };
    let mut text = match (full, steps) {
        (full, steps) if full == steps => format!("{full} of {} rows", division.rows_per_step),
        (0, _) => format!("1 of {last} rows"),
        _ => format!("{steps}: {full} of {} rows and one of {last}", division.rows_per_step),
    };
    let left_out = division.rows_left_out();
    if left_out > 0 {
        text += &format!("; {left_out} rows are left out");
    }
    text
}

fn epochs_in_words(params: &Train, division: &Division, total: u64) -> String {
    let all = division.total_steps(params.epochs, None);
    let epochs = if params.epochs == 1 { "one epoch".to_owned() } else { format!("{} epochs", params.epochs) };
    match total.cmp(&all) {
        Ordering::Less => format!("part of {epochs}: `max_steps` ends them"),
        Ordering::Equal => epochs,
        Ordering::Greater => {
            let all = total.div_ceil(division.steps_per_epoch().max(1));
            format!("{all} epochs, the last one in part or whole: `max_steps` overrides `epochs`")
        }
    }
}

/// That the rows make no step: an error where they are counted, as the run would only fail later.
fn without_a_step(params: &Train, grade: Option<Grade>, span: Span) -> Problem {
    let message = format!("`{}` makes no optimizer step", params.data.reference.stage);
    let label = "fewer rows than a step needs";
    let problem = match grade {
        Some(Grade::Certain) => Problem::error("no-steps", span, message, label),
        Some(Grade::Expected) | None => Problem::warning("no-steps", span, message, label),
    };
    problem.with_help(WITHOUT_A_STEP).at("leftover")
}

/// What the learning rate comes to up to the last step (from 0), with a warning where the warm-up does not end.
fn learning_rate(params: &Train, last_step: u64, span: Span, forecast: &mut Forecast) {
    let total = last_step + 1;
    let schedule = params.schedule(total);
    let base = params.optimizer.learning_rate;
    let (last, peak) = (base * schedule.factor(last_step, total), base * schedule.peak(total));
    let warmup = schedule.warmup_steps;
    forecast.figure("peak_learning_rate", peak, format!("{peak:.3e} of {base:.3e}"));
    let text = if warmup == 0 { format!("{last:.3e}") } else { format!("{last:.3e}, after {warmup} steps of warm-up") };
    let text = match warmup >= total {
        true => format!("{last:.3e}: the warm-up of {warmup} steps never completes"),
        false => text,
    };
    forecast.figure("last_learning_rate", last, text);
    if let Some(message) = params.low_peak(total) {
        let (code, field, help) = match (warmup >= total, params.scheduler.warmup()) {
            (true, Warmup::Steps(_)) => {
                ("warmup-too-long", "scheduler.warmup_steps", "lower `scheduler.warmup_steps`, or train longer")
            }
            // Of a longer run it is the same share.
            (true, Warmup::Ratio(_)) => ("warmup-too-long", "scheduler.warmup_ratio", "lower `scheduler.warmup_ratio`"),
            (false, _) => {
                ("schedule-too-long", "scheduler", "lower the numbers of steps in `scheduler`, or train longer")
            }
        };
        let problem = Problem::warning(code, span, message, "trains at a lower learning rate than the file sets");
        forecast.problems.push(problem.with_help(help).at(field));
    }
}

/// What is trained, and what it takes in memory and on disk.
fn memory(params: &Train, inputs: &InputFacts, config: &Config, forecast: &mut Forecast) {
    let Some(tensors) = trained_tensors(params, config) else { return };
    let trained = values(&tensors);
    let all = config.matrix_weights();
    let share = 100.0 * trained as f64 / (all.max(1)) as f64;
    forecast.figure("trainable_parameters", trained, format!("{trained}, {share:.3} % of the model's {all}"));
    let result = match params.method {
        Method::Lora => Some(trained * F32_BYTES),
        Method::Full => checkpoint_bytes(&params.model.reference, inputs),
    };
    forecast.disk_bytes = result.map(|result| result + saved_bytes(params, &tensors));
    forecast.peak_memory_bytes = peak_memory(params, inputs, 1);
    // It is the memory of the `cpu` kernels that was measured.
    let is_measured = params.kernels == Kernels::Cpu && params.backend != Backend::Torch;
    forecast.memory_margin = is_measured.then_some(MARGIN);
}

/// The most memory that so many workers hold together.
pub(super) fn peak_memory(params: &Train, inputs: &InputFacts, workers: usize) -> Option<u64> {
    let config = &model_config(&params.model.reference, inputs)?;
    let tensors = trained_tensors(params, config)?;
    let trained = values(&tensors);
    let data = params.data.reference.facts_in(inputs);
    let count = |name: &str| data.and_then(|facts| facts.get(name)).and_then(Value::as_u64);
    let longest = count("longest_row")?;
    let load = TrainingLoad {
        compute: params.dtype.compute(),
        frozen: frozen_format(params.quantize.as_ref().and_then(TrainQuantize::base), params.kernels, config),
        // Several workers have those in f32 between them, and so do kernels that are not our own.
        stored: match (params.kernels, workers) {
            (Kernels::Cpu, 1) => stored_dtype(&params.model.reference, inputs),
            _ => Dtype::F32,
        },
        what: params.trained(),
        trained,
        optimizer_bytes: optimizer_bytes(params, &tensors),
        adapter_columns: match params.method {
            Method::Lora => params.lora.value.kept_columns(&Modules::from(config)).unwrap_or(0),
            Method::Full => 0,
        },
        // Of little data a micro-batch is all there is, and no more.
        tokens: (params.micro_batch_size.div_ceil(workers) as u64 * longest).min(count("tokens").unwrap_or(u64::MAX)),
        lengths: lengths(longest, count("tokens"), count("rows")),
        recompute: params.recompute(),
    };
    let weights = match (params.kernels, params.trained()) {
        (Kernels::Cpu, Trained::Adapter) if load.frozen == FrozenFormat::AsStored => Weights::Shared,
        (Kernels::Cpu, _) | (Kernels::Candle, _) => Weights::Own,
    };
    let memory = TrainingMemory::estimate(config, &load).of_workers(workers as u64, weights);
    let teacher = match params.loss.teacher() {
        Some(teacher) => teacher_bytes(params, &teacher.reference, inputs, workers, load.tokens)?,
        None => 0,
    };
    Some(workers as u64 * PROCESS_BYTES + memory.total() + meeting_bytes(workers, trained) + teacher)
}

/// What the teacher of so many workers takes beside what is trained: its frozen weights, which they have once between
/// them, and what passes through one of its layers and its head.
fn teacher_bytes(params: &Train, teacher: &Reference, inputs: &InputFacts, workers: usize, tokens: u64) -> Option<u64> {
    let config = model_config(teacher, inputs)?;
    let (compute, workers) = (params.dtype.compute(), workers as u64);
    let stored = match (params.kernels, workers) {
        (Kernels::Cpu, 1) => stored_dtype(teacher, inputs),
        _ => Dtype::F32,
    };
    let format = frozen_format(None, params.kernels, &config);
    let weights = weight_bytes(&config, compute, stored, format);
    let passing = inference_bytes(&config, compute, stored, format, tokens) - weights;
    // Of a run that trains every weight, workers share none, and neither do kernels that are not our own.
    let is_shared =
        format == FrozenFormat::AsStored && params.kernels == Kernels::Cpu && params.trained() == Trained::Adapter;
    Some(if is_shared { weights } else { workers * weights } + workers * passing)
}

/// How frozen weights are held: other kernels than our own dequantise what is read.
fn frozen_format(quantize: Option<&QuantizeParams>, kernels: Kernels, config: &Config) -> FrozenFormat {
    match (kernels, quantize) {
        (Kernels::Candle, _) => FrozenFormat::AsStored,
        (Kernels::Cpu, Some(quantize)) => FrozenFormat::Layers(quantize.base().format),
        (Kernels::Cpu, None) => FrozenFormat::stored(config),
    }
}

/// Whether rows are about as long as the longest, as packs are; where their number is not known yet, they are taken to
/// be.
fn lengths(longest: u64, tokens: Option<u64>, rows: Option<u64>) -> Lengths {
    let (Some(tokens), Some(rows)) = (tokens, rows) else { return Lengths::Equal };
    // Buffers of lengths that differ by less are mostly of one size.
    if tokens * 8 < rows * longest * 7 { Lengths::Varying } else { Lengths::Equal }
}

/// Bytes of the working state: values and optimizer state in each saved step and in the one that is written, and the
/// values once for the best step and once for the one that takes its place.
fn saved_bytes(params: &Train, trained: &[TrainedTensor]) -> u64 {
    let (bytes, best) = (values(trained) * F32_BYTES, if params.keep_best { 2 } else { 0 });
    (bytes + optimizer_bytes(params, trained)) * (params.keep_last as u64 + 1) + bytes * best
}

/// Bytes of the optimizer's state.
fn optimizer_bytes(params: &Train, trained: &[TrainedTensor]) -> u64 {
    let optimizer = params.optimizer.optimizer();
    trained.iter().map(|(name, shape)| optimizer.state_bytes(TensorInfo { name, shape })).sum()
}

/// Name and shape of what is trained.
type TrainedTensor = (String, Vec<usize>);

fn values(trained: &[TrainedTensor]) -> u64 {
    trained.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum()
}

/// What is trained, of a whole model its matrices alone; not known of an adapter to go on from, or where a target is no
/// module of the model.
fn trained_tensors(params: &Train, config: &Config) -> Option<Vec<TrainedTensor>> {
    match (params.method, &params.adapter) {
        (Method::Full, _) => Some(config.tensors().into_iter().filter(|(_, shape)| shape.len() == 2).collect()),
        (Method::Lora, Some(_)) => None,
        (Method::Lora, None) => params.lora.value.trained_tensors(&Modules::from(config)).ok(),
    }
}

#[cfg(test)]
mod tests {
    use engine::artifact::Facts;
    use engine::file::problem::Severity;
    use engine::file::tree::Node;
    use engine::parameter::{Parameter as _, Reader};
    use engine::stage::Stage as _;
    use serde_json::json;

    use super::*;
    use crate::kinds::train::parameters::Leftover;

    const LLAMA: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama31/config.json"));

    fn read(more: Value) -> Train {
        let mut parameters = json!({"model": "base", "data": "rows"});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut reader = Reader::default();
        let read = Train::read(&Node::from_json(&parameters), &mut reader);
        assert!(reader.problems.is_empty(), "{:?}", reader.problems);
        read.unwrap()
    }

    #[test]
    fn settings_that_contradict_an_adapter_of_the_same_file_are_found_before_it_is_trained() {
        let facts = checkpoint::facts_of_config(serde_json::from_str(LLAMA).unwrap());
        let mut inputs = InputFacts::from([("base.model".to_owned(), facts)]);
        let adapter = |more: Value, inputs: &InputFacts| {
            let estimate = forecast(&read(more), &Ahead::of_results(inputs, Span::default()));
            estimate.outputs["adapter"].certain.clone()
        };
        let lora = json!({"rank": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1});
        let first = adapter(json!({ "lora": lora }), &inputs);
        inputs.insert("first.adapter".to_owned(), first.clone());
        let problems = |lora: Value| read(json!({"adapter": "first", "lora": lora})).check(&inputs, Span::default());
        for agreeing in [lora.clone(), json!({}), json!({"dropout": 0.1, "learning_rate_ratio": 16})] {
            let found = problems(agreeing.clone());
            assert!(found.is_empty(), "{agreeing}: {found:?}");
        }
        let found = problems(json!({"rank": 8}));
        assert!(found.len() == 1, "{found:?}");
        assert_eq!(found[0].message, "`lora.rank` is 8, and the adapter of the warm start has 4");
        assert_eq!((found[0].field.as_deref(), found[0].severity), (Some("lora.rank"), Severity::Error));
        let others = problems(json!({"target_modules": ["q_proj"]}));
        assert!(others.len() == 1 && others[0].field.as_deref() == Some("lora.target_modules"), "{others:?}");
        // What is trained further from it has its settings.
        assert_eq!(adapter(json!({"adapter": "first"}), &inputs)[ADAPTER_CONFIG], first[ADAPTER_CONFIG]);
    }

    #[test]
    fn a_warm_up_that_does_not_end_is_marked_at_the_key_that_is_given() {
        for (scheduler, key) in [
            (json!({"warmup_steps": 30}), "scheduler.warmup_steps"),
            (json!({"warmup_ratio": 1}), "scheduler.warmup_ratio"),
        ] {
            let mut forecast = Forecast::default();
            learning_rate(&read(json!({ "scheduler": scheduler })), 9, Span::default(), &mut forecast);
            let [problem] = &forecast.problems[..] else { panic!("{:?}", forecast.problems) };
            assert_eq!((problem.code, problem.field.as_deref()), ("warmup-too-long", Some(key)));
            assert!(problem.help.as_ref().unwrap().contains(&format!("`{key}`")), "{:?}", problem.help);
        }
    }

    #[test]
    fn rows_that_make_no_step_are_an_error_once_they_are_counted() {
        let params = read(json!({"leftover": "drop", "micro_batch_size": 100}));
        let rows = Facts::from_iter([("rows".to_owned(), 43.into())]);
        let (counted, none) = (InputFacts::from([("rows.tokens".to_owned(), rows)]), InputFacts::new());
        for (certain, severity) in [(&counted, Severity::Error), (&none, Severity::Warning)] {
            let estimate = forecast(&params, &Ahead { certain, ..Ahead::of_results(&counted, Span::default()) });
            let [problem] = &estimate.problems[..] else { panic!("{:?}", estimate.problems) };
            assert_eq!((problem.code, problem.severity), ("no-steps", severity));
            assert_eq!(problem.help.as_deref(), Some(WITHOUT_A_STEP));
        }
    }

    #[test]
    fn tokens_of_rows_that_are_left_out_are_not_counted() {
        let all = Division { rows: 24, rows_per_step: 5, leftover: Leftover::Step, max_steps_per_epoch: None };
        assert_eq!(tokens_of_epoch(&all, 1041, 313, 0).0, 1041);
        let drop = Division { leftover: Leftover::Drop, ..all };
        let (tokens, text) = tokens_of_epoch(&drop, 1041, 313, 0);
        assert_eq!(tokens, 868);
        assert!(text.starts_with("about 868 of 1041, 261 of them targets"), "{text}");
        let short = Division { max_steps_per_epoch: Some(2), ..all };
        assert_eq!(tokens_of_epoch(&short, 1041, 313, 0).0, 434);
    }
}
