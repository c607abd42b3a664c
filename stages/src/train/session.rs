//! One training run: the loop over steps, saving on the way, and what is told about it.

use std::sync::Arc;
use std::time::Instant;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::protocol::WorkerEvent;
use model::batch::Batch;
use model::blocks::Blocks;
use model::decoder::{Decoder, RunError};
use model::parameter::Keep;
use model::peft::AdapterConfig;
use model::random::permutation;
use model::schedule::{Decay, Horizon, Schedule};
use model::trainer::{AdamW, Optimizer, StepReport, TrainError, TrainOptions, Trained, Trainer};
use serde_json::{Map, Value, json};

use super::fit;
use super::order::{Division, StepPlace};
use super::output;
use super::parameters::{Method, SchedulerName, TrainParams};
use super::state::{self, Progress, State, StateError};
use crate::artifact::{TokenRow, TokensReader};
use crate::checkpoint;

/// Runs the stage on a kernel set.
pub(super) fn run<B: Blocks>(params: &TrainParams, ops: Arc<B>, context: &mut StageContext) -> Result<(), StageError> {
    let model = context.open(&params.model)?;
    let base = model.folder;
    let mut rows = TokensReader::open(&context.open(&params.data)?)?;
    context.record("kernel_set", ops.describe());
    context.record("threads", context.threads());

    let division = Division {
        rows: usize::try_from(rows.len()).or_fail(Cause::BadData, || "too many rows".to_owned())?,
        rows_per_step: params.rows_per_step(),
        leftover: params.leftover,
    };
    let total_steps = division.total_steps(params.epochs, params.max_steps);
    if total_steps == 0 {
        let message = format!("{} rows make no optimizer step of {} rows", division.rows, division.rows_per_step);
        return Err(StageError::bad_data(message).with_help(
            "lower micro_batch_size or gradient_accumulation_steps, or keep the last rows with `leftover: step`",
        ));
    }
    let schedule = schedule(params);
    warn_of_surprises(params, &division, schedule, total_steps, context);

    let adapter = (params.method == Method::Lora).then(|| adapter_config(params));
    let computed_by = ops.describe();
    let trainer = prepare(params, ops, &base, adapter.as_ref())?;
    let shape = trainer.decoder().config();
    fit::check(rows.facts(), shape.vocab_size as u64, shape.max_position_embeddings as u64)?;
    let mut session = Session {
        params,
        computed_by,
        trainer,
        division,
        total_steps,
        schedule,
        step: 0,
        target_tokens: 0,
        metrics: String::new(),
        epoch_order: None,
    };
    session.resume(context)?;
    session.train(&mut rows, context)?;
    if session.target_tokens == 0 {
        return Err(StageError::bad_data("no row has a target token: nothing was trained")
            .with_help("look at the rows with `pipeline show`: are the labels all masked?"));
    }
    let facts = session.facts();
    let Session { trainer, metrics, .. } = session;
    match adapter {
        Some(config) => {
            let trained_on = model.description.facts.get(checkpoint::WEIGHTS).cloned();
            let trained_on = trained_on.map(|weights| (checkpoint::WEIGHTS.to_owned(), weights));
            let facts = facts.clone().into_iter().chain(trained_on).collect();
            output::adapter(&trainer, config, facts, context)?;
        }
        None => output::model(&trainer, &base, context)?,
    }
    output::metrics(&metrics, facts, context)
}

/// The decoder, loaded and ready to be trained.
fn prepare<B: Blocks>(
    params: &TrainParams,
    ops: Arc<B>,
    base: &std::path::Path,
    adapter: Option<&AdapterConfig>,
) -> Result<Trainer<B>, StageError> {
    let (trained, keep) = match params.method {
        Method::Lora => (Trained::Adapter, Keep::Frozen),
        Method::Full => (Trained::Weights, Keep::Trainable),
    };
    let mut decoder = Decoder::load(ops, base, keep).or_fail(Cause::BadData, || "cannot load the model".to_owned())?;
    if let Some(config) = adapter {
        let fresh = decoder.fresh_adapter(config, params.seed);
        let fresh = fresh.or_fail(Cause::BadParameters, || "cannot make the adapter".to_owned())?;
        decoder.attach(&fresh).or_fail(Cause::BadParameters, || "cannot attach the adapter".to_owned())?;
    }
    let optimizer = Optimizer::AdamW(AdamW {
        betas: (params.optimizer.betas[0], params.optimizer.betas[1]),
        eps: params.optimizer.eps,
        weight_decay: params.optimizer.weight_decay,
    });
    let options = TrainOptions {
        max_grad_norm: params.clip_grad_norm,
        seed: params.seed,
        ..TrainOptions::new(trained, optimizer)
    };
    Trainer::new(decoder, options).map_err(failure)
}

fn adapter_config(params: &TrainParams) -> AdapterConfig {
    let lora = &params.lora;
    let mut config = AdapterConfig::new(lora.rank, lora.alpha, lora.target_modules.clone());
    config.use_rslora = lora.use_rslora;
    config
}

fn schedule(params: &TrainParams) -> Schedule {
    let decay = match params.scheduler.name {
        SchedulerName::Cosine => Decay::Cosine { cycles: 0.5 },
        SchedulerName::Linear => Decay::Linear,
        SchedulerName::Constant => Decay::Constant,
    };
    Schedule { warmup_steps: params.scheduler.warmup_steps, decay }
}

/// Says what a user would otherwise find out from a loss curve.
fn warn_of_surprises(
    params: &TrainParams,
    division: &Division,
    schedule: Schedule,
    total_steps: u64,
    context: &mut StageContext,
) {
    if schedule.warmup_steps >= total_steps {
        let reached = schedule.peak(total_steps) * params.optimizer.learning_rate;
        context.warn(format!(
            "the warm-up of {} steps does not end within the run of {total_steps}: the learning rate reaches {reached:.3e} of {:.3e}",
            schedule.warmup_steps, params.optimizer.learning_rate
        ));
    }
    if division.dropped_rows() > 0 {
        context.warn(format!(
            "`leftover: drop` leaves out {} of {} rows in each epoch",
            division.dropped_rows(),
            division.rows
        ));
    }
}

struct Session<'a, B: Blocks> {
    params: &'a TrainParams,
    /// The kernel set, its instructions and its threads.
    computed_by: String,
    trainer: Trainer<B>,
    division: Division,
    total_steps: u64,
    schedule: Schedule,
    /// Steps done.
    step: u64,
    /// Target tokens trained on.
    target_tokens: u64,
    /// One JSON object per step.
    metrics: String,
    /// The row order of an epoch.
    epoch_order: Option<(u64, Vec<usize>)>,
}

impl<B: Blocks> Session<'_, B> {
    /// Takes up the newest saved step, where there is one that this run continues.
    fn resume(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        let (saved, damaged) = state::newest(context.working()).map_err(disk)?;
        for error in damaged {
            context.warn(format!("passing over a saved step: {error}"));
        }
        let Some(saved) = saved else { return Ok(()) };
        let Progress { step, total_steps, optimizer_steps, target_tokens, computed_by } = saved.progress;
        if let Some(reason) = self.starts_over(step, total_steps) {
            context.warn(format!("starting over: {reason}"));
            return state::clear(context.working()).map_err(disk);
        }
        if computed_by != self.computed_by {
            context.warn(format!(
                "step {step} was computed by {computed_by}, and this run is by {}: their last digits may differ",
                self.computed_by
            ));
        }
        self.trainer
            .restore(optimizer_steps, saved.tensors)
            .or_fail(Cause::Internal, || format!("cannot take up the saved step {step}"))?;
        (self.step, self.target_tokens, self.metrics) = (step, target_tokens, saved.metrics);
        context.record("resumed_from_step", step);
        context.warn(format!("resuming from step {step} of {}", self.total_steps));
        Ok(())
    }

    /// Why a saved run cannot be the beginning of this one, if so.
    fn starts_over(&self, step: u64, total_steps: u64) -> Option<String> {
        let now = self.total_steps;
        if total_steps != now && self.schedule.horizon() == Horizon::Total {
            return Some(format!(
                "the saved run of {total_steps} steps had another learning rate from its first step on than one of {now}"
            ));
        }
        (step > now).then(|| format!("the saved run stands at step {step}, beyond the {now} steps of this one"))
    }

    fn train(&mut self, rows: &mut TokensReader, context: &mut StageContext) -> Result<(), StageError> {
        let mut clock = Clock::start();
        while self.step < self.total_steps {
            let place = self.division.place(self.step);
            let Some(tokens) = self.accumulate(&place, rows, context)? else { return self.stop(context) };
            let learning_rate = self.params.optimizer.learning_rate * self.schedule.factor(self.step, self.total_steps);
            self.step += 1;
            match self.trainer.step(learning_rate) {
                Ok(report) => self.tell(&place, &report, tokens, &mut clock, context),
                Err(TrainError::NoTargets { .. }) => {
                    context.warn(format!("step {} has no target token and changes nothing", self.step));
                }
                Err(error) => return Err(self.failure(&place, error)),
            }
            if self.step == self.total_steps || self.step.is_multiple_of(self.params.save_every) {
                self.save(context)?;
            }
        }
        Ok(())
    }

    /// Saves the last whole step and ends the stage, as the user asked.
    fn stop(&self, context: &mut StageContext) -> Result<(), StageError> {
        let message = if self.step == 0 {
            "stopped before the first step was done".to_owned()
        } else {
            self.save(context)?;
            format!("stopped after step {} of {}, which is saved", self.step, self.total_steps)
        };
        Err(StageError::new(Cause::Cancelled, message).with_help("run again to go on from there"))
    }

    /// Adds up the gradients of a step's rows, a micro-batch at a time. Returns the tokens computed, or nothing where the
    /// user wants to stop: a step can take longer than the time that is left then.
    fn accumulate(
        &mut self,
        place: &StepPlace,
        rows: &mut TokensReader,
        context: &StageContext,
    ) -> Result<Option<usize>, StageError> {
        let order: Vec<usize> = self.order(place.epoch)[place.rows.clone()].to_vec();
        let mut tokens = 0;
        for micro_batch in order.chunks(self.params.micro_batch_size) {
            if context.cancelled() {
                return Ok(None);
            }
            let mut batch = Batch::default();
            for &index in micro_batch {
                push(&mut batch, index as u64, &rows.row(index as u64)?);
            }
            // A row may be empty, where rows without targets are kept.
            if batch.tokens() == 0 {
                continue;
            }
            tokens += batch.tokens();
            self.trainer.accumulate(&batch).map_err(|error| self.failure(place, error))?;
        }
        Ok(Some(tokens))
    }

    /// The order of the rows in an epoch.
    fn order(&mut self, epoch: u64) -> &[usize] {
        if self.epoch_order.as_ref().is_none_or(|(made_for, _)| *made_for != epoch) {
            let order = if self.params.shuffle {
                permutation(self.params.seed, epoch, self.division.rows)
            } else {
                (0..self.division.rows).collect()
            };
            self.epoch_order = Some((epoch, order));
        }
        self.epoch_order.as_ref().map_or(&[], |(_, order)| order)
    }

    /// Records a step and says how it went.
    fn tell(
        &mut self,
        place: &StepPlace,
        report: &StepReport,
        tokens: usize,
        clock: &mut Clock,
        context: &mut StageContext,
    ) {
        self.target_tokens += report.target_tokens as u64;
        let mut values = figures(self.step, place, report);
        self.metrics.push_str(&format!("{}\n", Value::Object(values.clone())));
        let speed = clock.per_second(report.target_tokens, tokens);
        values.insert("trained_tokens_per_second".to_owned(), speed.0.into());
        values.insert("tokens_per_second".to_owned(), speed.1.into());
        context.emit(WorkerEvent::Metrics { values });
        let note = format!(
            "{}|{}|Loss: {:.4} lr: {:.2e} grad_norm: {:.3} · {:.0} trained tokens/s · {:.0} tokens/s",
            place.epoch + 1,
            self.step,
            report.loss,
            report.learning_rate,
            report.grad_norm,
            speed.0,
            speed.1
        );
        context.progress("steps", self.step, Some(self.total_steps), Some(note));
    }

    fn save(&self, context: &mut StageContext) -> Result<(), StageError> {
        let mut tensors =
            self.trainer.state().or_fail(Cause::Internal, || "cannot read the state of training".to_owned())?;
        tensors.sort_by(|one, other| one.name.cmp(&other.name));
        let progress = Progress {
            step: self.step,
            total_steps: self.total_steps,
            optimizer_steps: self.trainer.steps(),
            target_tokens: self.target_tokens,
            computed_by: self.computed_by.clone(),
        };
        state::save(context.working(), &State { progress, tensors, metrics: self.metrics.clone() }).map_err(disk)?;
        context.emit(WorkerEvent::Checkpoint { step: self.step });
        Ok(())
    }

    /// What is known of the whole run.
    fn facts(&self) -> Map<String, Value> {
        let mut facts = Map::new();
        facts.insert("steps".to_owned(), self.step.into());
        facts.insert("rows_per_step".to_owned(), self.division.rows_per_step.into());
        facts.insert("target_tokens".to_owned(), self.target_tokens.into());
        let last = self.metrics.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
        if let Some(loss) = last.and_then(|line| line.get("loss").cloned()) {
            facts.insert("last_loss".to_owned(), loss);
        }
        facts
    }

    /// A failed step, with the rows that were in it.
    fn failure(&mut self, place: &StepPlace, error: TrainError) -> StageError {
        let rows = self.order(place.epoch)[place.rows.clone()].iter().take(8).map(usize::to_string);
        let rows: Vec<String> = rows.collect();
        let more = if place.rows.len() > 8 { " …" } else { "" };
        let help = format!("the step's rows: {}{more} (see `pipeline show`)", rows.join(", "));
        failure(error).with_help(help)
    }
}

/// The figures of a step that depend on nothing but the run's inputs.
fn figures(step: u64, place: &StepPlace, report: &StepReport) -> Map<String, Value> {
    let values = json!({
        "step": step,
        "epoch": place.epoch + 1,
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
        "rows": place.rows.len(),
        "target_tokens": report.target_tokens,
    });
    match values {
        Value::Object(values) => values,
        _ => unreachable!("the literal above is an object"),
    }
}

fn push(batch: &mut Batch, index: u64, row: &TokenRow) {
    let lengths: Vec<usize> = row.document_lengths.iter().map(|length| *length as usize).collect();
    batch.push_row(index, &row.input_ids, &row.labels, &lengths);
}

fn failure(error: TrainError) -> StageError {
    let cause = match &error {
        TrainError::NothingToTrain(_) => Cause::BadParameters,
        TrainError::NoTargets { .. } => Cause::BadData,
        TrainError::LossNotFinite { .. }
        | TrainError::GradientNotFinite { .. }
        | TrainError::OverflowPersists { .. }
        | TrainError::NotMoved { .. } => Cause::Numeric,
        TrainError::Run(RunError::Batch(_)) => Cause::BadData,
        TrainError::Run(RunError::Kernel(_)) => Cause::Machine,
    };
    StageError::new(cause, "training stopped").with_source(error)
}

fn disk(error: StateError) -> StageError {
    StageError::new(Cause::Machine, "cannot keep the state of training").with_source(error)
}

/// Speed over the last few seconds, which a single step would give too unsteadily.
struct Clock {
    since: Instant,
    targets: usize,
    tokens: usize,
    last: (f64, f64),
}

impl Clock {
    fn start() -> Self {
        Self { since: Instant::now(), targets: 0, tokens: 0, last: (0.0, 0.0) }
    }

    /// Trained and computed tokens per second.
    fn per_second(&mut self, targets: usize, tokens: usize) -> (f64, f64) {
        self.targets += targets;
        self.tokens += tokens;
        let seconds = self.since.elapsed().as_secs_f64();
        let speed = (self.targets as f64 / seconds, self.tokens as f64 / seconds);
        if seconds > 2.0 {
            *self = Self { last: speed, ..Self::start() };
        } else if self.last == (0.0, 0.0) {
            return speed;
        }
        self.last
    }
}
