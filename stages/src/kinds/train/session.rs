//! One training run: its steps, with validation and saving between them, and its result.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use model::batch::Batch;
use model::blocks::Blocks;
use model::schedule::Schedule;
use model::trainer::{StepReport, TrainError, Trainer};
use serde_json::{Map, Value};

use super::figures::{History, Record, Teller, Tokens};
use super::order::{Division, RowOrder, StepPlace};
use super::parameters::TrainParams;
use super::state::Progress;
use super::summary::{self, surprises};
use super::validation::Validator;
use super::workers::{Crew, Workers, shares};
use super::{checkpoints, failure, fit, output, prepare};
use crate::data::artifact::{TokenRow, TokensReader};

/// Runs the stage on a kernel set, as one of its workers.
pub(super) fn run<B: Blocks>(
    params: &TrainParams,
    ops: Arc<B>,
    mut workers: Workers,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let model = context.open(&params.model)?;
    let rows = TokensReader::open(&context.open(&params.data)?)?;
    context.record("kernel_set", ops.describe());
    context.record("threads", context.threads());

    let (division, total_steps) = extent(params, &rows, context)?;

    let crew = workers.crew();
    let computed_by = computed_by(params, &*ops, &crew);
    let (mut trainer, adapter) = workers.load(|| prepare::trainer(params, ops, &model, context))?;
    let validator = validator(params, &crew, context)?;
    let shape = trainer.decoder().config();
    for tokens in std::iter::once(rows.facts()).chain(validator.as_ref().map(Validator::facts)) {
        fit::check(tokens, shape.vocab_size as u64, shape.max_position_embeddings as u64)?;
    }
    let fresh = Progress::fresh(total_steps, computed_by);
    // Rank 0 may clear away what cannot be gone on from.
    let resumed = workers.after_rank_0(|| checkpoints::resume(params, &fresh, &mut trainer, context))?;
    let (progress, metrics) = resumed.unwrap_or((fresh, String::new()));
    let trainer = trainer.together(workers.into_collective());
    let mut session = Session {
        params,
        trainer,
        schedule: params.schedule(total_steps),
        order: RowOrder::new(params.shuffle(), division.rows),
        division,
        rows,
        validator,
        teller: Teller::new(History::from_lines(metrics), progress.step, crew.clone(), context),
        crew,
        progress,
        unsaved: false,
    };
    session.train(context)?;
    let facts = session.conclude(context)?;
    if !session.crew.leads() {
        return Ok(());
    }
    let Session { trainer, teller, rows, .. } = session;
    match adapter {
        Some(config) => {
            let adapter = trainer.decoder().adapter(&config);
            let adapter = adapter.or_fail(Cause::Internal, || "cannot read the adapter".to_owned())?;
            output::adapter(&adapter, &facts, &model, &rows, context)?;
        }
        None => output::model(&trainer, &model.folder, output::prompt_facts(&rows), context)?,
    }
    output::metrics(teller.history().lines(), facts, context)
}

/// How the rows are divided into steps, and how many there are; warns of what a user would otherwise find out from a
/// loss curve.
pub(super) fn extent(
    params: &TrainParams,
    rows: &TokensReader,
    context: &mut StageContext,
) -> Result<(Division, u64), StageError> {
    let count = usize::try_from(rows.len()).or_fail(Cause::BadData, || "too many rows".to_owned())?;
    let (division, total_steps) = (params.division(count), params.total_steps(count));
    if total_steps == 0 {
        let message = format!("{} rows make no optimizer step of {} rows", division.rows, division.rows_per_step);
        return Err(StageError::bad_data(message).with_help(
            "lower micro_batch_size or gradient_accumulation_steps, or keep the last rows with `leftover: step`",
        ));
    }
    surprises(params, &division, total_steps).into_iter().for_each(|surprise| context.warn(surprise));
    Ok((division, total_steps))
}

/// Fails where nothing was learned.
pub(super) fn require_targets(progress: &Progress) -> Result<(), StageError> {
    match progress.target_tokens {
        0 => Err(StageError::bad_data("no row has a target token: nothing was trained")
            .with_help("look at the rows with `pipeline show`: are the labels all masked?")),
        _ => Ok(()),
    }
}

/// What the last digits depend on: another split of a step adds in another order.
fn computed_by<B: Blocks>(params: &TrainParams, ops: &B, crew: &Crew) -> String {
    let by = format!("{}, micro-batches of {}", ops.describe(), crew.rows_at_once(params.micro_batch_size));
    if crew.size() == 1 { by } else { format!("{by}, {} workers", crew.size()) }
}

fn validator(params: &TrainParams, crew: &Crew, context: &mut StageContext) -> Result<Option<Validator>, StageError> {
    let Some(validation) = &params.validation else { return Ok(None) };
    let rows = TokensReader::open(&context.open(validation)?)?;
    let every = params.eval_steps;
    Validator::new(rows, crew.rows_at_once(params.micro_batch_size), crew.clone(), every).map(Some)
}

struct Session<'a, B: Blocks> {
    params: &'a TrainParams,
    trainer: Trainer<B>,
    division: Division,
    schedule: Schedule,
    order: RowOrder,
    rows: TokensReader,
    validator: Option<Validator>,
    teller: Teller,
    crew: Crew,
    progress: Progress,
    /// Whether anything happened since the state was saved.
    unsaved: bool,
}

impl<B: Blocks> Session<'_, B> {
    /// Steps, validations and saved states up to the end of the run.
    fn train(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        loop {
            // A saved step may be one whose validation was cut off.
            if self.validation_is_due() {
                let ControlFlow::Continue(best) = self.validate(context)? else { return self.stop(context) };
                self.unsaved = true;
                if best && self.params.keep_best && self.crew.leads() {
                    checkpoints::save_best(&mut self.progress, &self.trainer, context)?;
                }
            }
            let over = self.is_over();
            if self.unsaved && (over || self.progress.step.is_multiple_of(self.params.save_every)) {
                self.save(context)?;
            }
            if over {
                return Ok(());
            }
            if self.step(context)?.is_break() {
                return self.stop(context);
            }
        }
    }

    /// Whether the last step is done.
    fn is_over(&self) -> bool {
        let ends_early = self.progress.validation.ends_early(self.params.early_stopping.as_ref());
        self.progress.step >= self.progress.total_steps || ends_early
    }

    /// One optimizer step; broken off where the user wants to stop.
    fn step(&mut self, context: &mut StageContext) -> Result<ControlFlow<()>, StageError> {
        let profile = context.profile().clone();
        let _phase = profile.phase("step");
        let place = self.division.place(self.progress.step);
        let rows: Vec<u64> = self.order.rows(&place).iter().map(|row| *row as u64).collect();
        let ControlFlow::Continue(mut tokens) = self.accumulate(&rows, context)? else {
            return Ok(ControlFlow::Break(()));
        };
        // A skipped step holds the schedule.
        let at = self.progress.step - self.progress.skipped_steps;
        let factor = self.schedule.factor(at, self.progress.total_steps);
        self.progress.step += 1;
        self.unsaved = true;
        match self.trainer.step(self.params.optimizer.learning_rate * factor) {
            Ok(report) => {
                tokens.targets = report.target_tokens;
                self.tell(&place, &report, tokens, context);
            }
            Err(TrainError::NoTargets { .. }) => {
                context.warn(format!("step {} has no target token and changes nothing", self.progress.step));
            }
            Err(error) => return Err(failure::of_rows(error, &rows)),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Adds up the gradients of this worker's share of a step's rows, a micro-batch at a time. Looks between them
    /// whether the user wants to stop: a step can take longer than the time that is left then.
    fn accumulate(&mut self, rows: &[u64], context: &StageContext) -> Result<ControlFlow<(), Tokens>, StageError> {
        let mut read = self.read(rows, context)?;
        let lengths: Vec<usize> = read.iter().map(TokenRow::real_tokens).collect();
        let widths: Vec<usize> = read.iter().map(|row| row.input_ids.len()).collect();
        let shares = shares(&lengths, self.crew.size());
        let at_once = self.crew.rows_at_once(self.params.micro_batch_size);
        for micro_batch in shares[self.crew.rank()].chunks(at_once) {
            if context.cancelled() {
                return Ok(ControlFlow::Break(()));
            }
            let mut batch = Batch::default();
            for &index in micro_batch {
                batch.push(rows[index], &std::mem::take(&mut read[index]));
            }
            // A row may be empty, where rows without targets are kept.
            if batch.tokens() == 0 {
                continue;
            }
            let numbers: Vec<u64> = micro_batch.iter().map(|index| rows[*index]).collect();
            let added = self.trainer.accumulate(&batch);
            added.map_err(|error| failure::of_micro_batch(error, &numbers, &batch))?;
        }
        // Those of all workers: each knows what the others compute.
        let padded = |rows: &[usize]| rows.iter().map(|row| widths[*row]).max().unwrap_or(0) * rows.len();
        let micro_batches = shares.iter().flat_map(|share| share.chunks(at_once));
        Ok(ControlFlow::Continue(Tokens {
            computed: lengths.iter().sum(),
            padded: micro_batches.map(padded).sum(),
            ..Tokens::default()
        }))
    }

    /// Reads the rows of a step, of which every worker must know the lengths.
    fn read(&mut self, rows: &[u64], context: &StageContext) -> Result<Vec<TokenRow>, StageError> {
        let _reading = context.profile().phase("read rows");
        rows.iter().map(|row| Ok(self.rows.row(*row)?)).collect()
    }

    /// Records a step and says how it went.
    fn tell(&mut self, place: &StepPlace, report: &StepReport, tokens: Tokens, context: &mut StageContext) {
        if report.skipped {
            self.progress.skipped_steps += 1;
        } else {
            self.progress.target_tokens += report.target_tokens as u64;
        }
        let record = Record::Train {
            step: self.progress.step,
            epoch: place.epoch + 1,
            loss: report.loss,
            learning_rate: report.learning_rate,
            grad_norm: report.grad_norm,
            rows: place.rows.len(),
            tokens: tokens.computed,
            target_tokens: report.target_tokens,
            loss_scale: report.loss_scale,
            skipped: report.skipped,
        };
        let line = self.teller.step(&record, tokens, context);
        context.log(&line);
        context.progress("steps", self.progress.step, Some(self.progress.total_steps), Some(line));
    }

    fn validation_is_due(&self) -> bool {
        let step = self.progress.step;
        let due = |validator: &Validator| validator.is_due(step, &self.division);
        self.progress.validation.last != Some(step) && self.validator.as_ref().is_some_and(due)
    }

    /// Validates after the last whole step and says whether it is the best one; broken off where the user wants to
    /// stop.
    fn validate(&mut self, context: &mut StageContext) -> Result<ControlFlow<(), bool>, StageError> {
        let Some(validator) = &mut self.validator else { return Ok(ControlFlow::Continue(false)) };
        let profile = context.profile().clone();
        let _phase = profile.phase("validate");
        let began = Instant::now();
        let ControlFlow::Continue(validated) = validator.validate(&mut self.trainer, self.progress.step, context)?
        else {
            return Ok(ControlFlow::Break(()));
        };
        let step = self.progress.step;
        let best = self.progress.validation.add(step, validated.loss, self.params.early_stopping.as_ref());
        let epoch = step.checked_sub(1).map_or(0, |last| self.division.place(last).epoch + 1);
        let record = Record::Validation {
            step,
            epoch,
            loss: validated.loss,
            rows: validated.rows,
            target_tokens: validated.target_tokens,
            best,
        };
        self.teller.validation(&record, began.elapsed(), context);
        let line = format!("{epoch}|{step}|Validation loss: {:.4}", validated.loss);
        context.progress("steps", step, Some(self.progress.total_steps), Some(line));
        Ok(ControlFlow::Continue(best))
    }

    fn save(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        self.unsaved = false;
        if !self.crew.leads() {
            return Ok(());
        }
        let profile = context.profile().clone();
        let _phase = profile.phase("save the working state");
        let metrics = self.teller.history().lines();
        checkpoints::save(&mut self.progress, metrics, self.params.keep_last, &self.trainer, context)
    }

    /// Saves the last whole step and ends the stage, as the user asked.
    fn stop(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        let Progress { step, total_steps, .. } = self.progress;
        let message = if step == 0 {
            "stopped before the first step was done".to_owned()
        } else {
            self.save(context)?;
            format!("stopped after step {step} of {total_steps}, which is saved")
        };
        Err(StageError::new(Cause::Cancelled, message).with_help("run again to go on from there"))
    }

    /// What follows the last step and is no part of the working state, so that a longer run can go on from there: a
    /// last validation where none was due, the choice of the result, and a summary.
    fn conclude(&mut self, context: &mut StageContext) -> Result<Map<String, Value>, StageError> {
        require_targets(&self.progress)?;
        // An adapter is of use only with the base model that it was trained on, to the bit.
        let profile = context.profile().clone();
        let checking = profile.phase("check what is frozen");
        self.trainer.check_frozen().map_err(|error| failure::of_rows(error, &[]))?;
        drop(checking);
        if self.validator.is_some()
            && self.progress.validation.last != Some(self.progress.step)
            && self.validate(context)?.is_break()
        {
            self.stop(context)?;
        }
        if self.params.keep_best && self.crew.leads() {
            checkpoints::take_best(&self.progress, &mut self.trainer, context)?;
        }
        let history = self.teller.history();
        let text = summary::text(self.params, &self.division, &self.progress, history);
        context.report_detail(text);
        Ok(summary::facts(self.params, &self.division, &self.progress, history))
    }
}
