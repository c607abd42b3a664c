//! One training run: its steps, with validation and saving between them, and its result.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::parameter::Input;
use model::batch::Batch;
use model::loss::DocumentObjective;
use model::schedule::Schedule;
use model::trainer::{DocumentBatch, StepReport};
use serde_json::{Map, Value};

use super::figures::{History, MetricsLogger, Record, Tokens};
use super::inputs::Inputs;
use super::learner::{DocumentWork, Learner, Opened, Ranks, Scorer, StepWork};
use super::order::{Division, RowOrder, StepPlace};
use super::parameters::{Train, TrainQuantize};
use super::preference::{self, Figures, LogProbs};
use super::state::Progress;
use super::summary;
use super::tasks::TaskValidator;
use super::validation::Validator;
use super::workers::shares;
use super::{checkpoints, failure, output};
use crate::data::artifact::{LogProbs as LogProbsKind, TokenRow, TokensOrPacks, TokensReader};
use crate::hub::forget_working_files;
use crate::kinds::log_probs;

/// Runs the stage by a learner that `open` gives; `remark` ends the report.
pub(super) fn run(
    params: &Train,
    open: impl FnOnce(&Inputs, &mut StageContext) -> Result<Opened, StageError>,
    remark: Option<String>,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let inputs = Inputs::open(params, context)?;
    let Opened { mut learner, adapter, computed_by } = open(&inputs, context)?;
    let Inputs { model, mut rows, validation, division, total_steps, .. } = inputs;
    if let Some(aware) = params.quantize.as_ref().and_then(TrainQuantize::aware)
        && aware.after_steps >= total_steps
    {
        let (after_steps, help) = (aware.after_steps, "lower it, or train for more steps");
        let message = format!("`quantize.after_steps` is {after_steps}, and there are {total_steps} steps in all");
        return Err(StageError::new(Cause::BadParameters, message).with_help(help));
    }
    let ranks = learner.ranks().clone();
    let rows_at_once = ranks.rows_at_once(params.micro_batch_size);
    let validator = validation.map(|rows| Validator::new(rows, rows_at_once, ranks.clone(), params.eval_steps));
    let mut validator = validator.transpose()?;
    let tasks = params.validation_tasks.as_ref().filter(|_| ranks.is_rank_zero());
    let tasks = tasks.map(|tasks| TaskValidator::open(tasks, &model.folder, context)).transpose()?;
    // Before a saved state is taken up: the learner still has the values that the run starts from.
    let objective = params.loss.objective();
    let reference = match objective.clone() {
        None => None,
        Some(objective) => {
            let is_base = params.reference.is_disabled() && params.adapter.is_some();
            let scorer = if is_base { Scorer::Base } else { Scorer::Policy };
            let ahead = scored_ahead(params, scorer, context)?;
            let needed = objective.needs_reference();
            if let Some(validator) = &mut validator {
                let [_, ahead] = &ahead;
                validator.compare(objective, needed.then_some(scorer), ahead.as_deref(), &mut *learner, context)?;
            }
            let mut batches = first_epoch(params, &division, ranks.clone(), rows_at_once);
            let mut reference = || match &ahead[0] {
                Some(records) => preference::LogProbs::of_records(&mut rows, records),
                None => preference::reference(&mut rows, "data", scorer, &mut batches, &mut *learner, context),
            };
            needed.then(&mut reference).transpose()?
        }
    };
    let fresh = Progress::fresh(total_steps, computed_by);
    // The leader may clear away what cannot be gone on from.
    if !ranks.is_rank_zero() {
        learner.barrier()?;
    }
    let resumed = checkpoints::resume(params, &fresh, &mut *learner, context)?;
    if ranks.is_rank_zero() {
        learner.barrier()?;
    }
    let (progress, metrics) = resumed.unwrap_or((fresh, String::new()));
    let metrics_logger = MetricsLogger::new(History::from_lines(metrics), progress.step, ranks.is_rank_zero(), context);
    let mut session = Session {
        params,
        schedule: params.schedule(total_steps),
        order: RowOrder::new(params.shuffle(), division.rows),
        division,
        rows,
        validator,
        tasks,
        metrics_logger,
        rows_at_once,
        objective,
        reference,
        learner,
        progress,
        unsaved: false,
        ahead: None,
    };
    session.train(context)?;
    let facts = session.conclude(remark, context)?;
    let Session { mut learner, metrics_logger, rows, progress, .. } = session;
    if !ranks.is_rank_zero() {
        return learner.close(context);
    }
    let values = checkpoints::result(params, &progress, &mut *learner, context)?;
    learner.close(context)?;
    match adapter {
        Some(config) => {
            let quantize = params.quantize.as_ref().map(TrainQuantize::fact);
            output::adapter(config, &values, &facts, &model, &rows, quantize, context)?;
        }
        None => {
            let aware = params.quantize.as_ref().and_then(TrainQuantize::aware);
            output::model(&values, &model.folder, output::prompt_facts(&rows), aware, context)?;
        }
    }
    output::metrics(metrics_logger.history().lines(), facts, context)?;
    // Rows of tasks that were fetched.
    forget_working_files(context.working())
}

/// Fails where nothing was learned; `loss_scale` is that after the last step.
fn require_targets(progress: &Progress, loss_scale: Option<f32>) -> Result<(), StageError> {
    match progress {
        Progress { target_tokens: 0, skipped_steps: 1.., .. } => Err(failure::of_overflows(loss_scale)),
        Progress { target_tokens: 0, .. } => {
            Err(StageError::bad_data("no row has a target token: nothing was trained")
                .with_help("look at the rows with `pipeline show`: are the labels all masked?"))
        }
        _ => Ok(()),
    }
}

/// The micro-batches of some ranks, from the rows of a step and which of them each rank has.
fn micro_batches(shares: &[Vec<usize>], numbers: &[u64], rows: &mut [TokenRow], at_once: usize) -> Vec<Vec<Batch>> {
    let mut batch_of = |indices: &[usize]| {
        let mut batch = Batch::default();
        for &index in indices {
            batch.push(numbers[index], &std::mem::take(&mut rows[index]));
        }
        batch
    };
    let of_share = |share: &Vec<usize>| -> Vec<Batch> {
        // A row may be empty, where rows without targets are kept.
        share.chunks(at_once).map(&mut batch_of).filter(|batch| batch.tokens() > 0).collect()
    };
    shares.iter().map(of_share).collect()
}

/// The micro-batches of the first epoch that this process is handed, one for each rank that is fed at a time, and after
/// them those of the rows that it leaves out.
fn first_epoch<'a>(
    params: &'a Train,
    division: &'a Division,
    ranks: Ranks,
    rows_at_once: usize,
) -> impl FnMut(&mut TokensReader) -> Result<Option<Vec<Batch>>, StageError> + 'a {
    let mut order = RowOrder::new(params.shuffle(), division.rows);
    let mut left = vec![true; division.rows];
    let (mut step, mut next) = (0, 0);
    let mut of_step: Vec<VecDeque<Batch>> = Vec::new();
    move |rows| {
        while of_step.iter().all(VecDeque::is_empty) {
            let place = division.place(step);
            let numbers: Vec<u64> = if place.epoch == 0 && division.steps_per_epoch() > step {
                step += 1;
                order.rows(&place).iter().map(|row| *row as u64).collect()
            } else {
                let others = (next..division.rows).filter(|row| left[*row]).take(division.rows_per_step);
                let others: Vec<u64> = others.map(|row| row as u64).collect();
                next = others.last().map_or(division.rows, |last| *last as usize + 1);
                others
            };
            if numbers.is_empty() {
                return Ok(None);
            }
            numbers.iter().for_each(|row| left[*row as usize] = false);
            let read: Result<Vec<TokenRow>, StageError> = numbers.iter().map(|row| Ok(rows.row(*row)?)).collect();
            let mut read = read?;
            let lengths: Vec<usize> = read.iter().map(TokenRow::real_tokens).collect();
            let shares = shares(&lengths, ranks.size);
            let batches = micro_batches(&shares[ranks.fed.clone()], &numbers, &mut read, rows_at_once);
            of_step = batches.into_iter().map(VecDeque::from).collect();
        }
        Ok(Some(of_step.iter_mut().map(|of_rank| of_rank.pop_front().unwrap_or_default()).collect()))
    }
}

/// What stages of their own have made of the data and of the validation rows, checked against this run.
fn scored_ahead(
    params: &Train,
    scorer: Scorer,
    context: &mut StageContext,
) -> Result<[Option<Vec<log_probs::Record>>; 2], StageError> {
    let [of_data, of_validation] = params.reference.log_probs();
    let mut read = |input: Option<&Input<LogProbsKind>>, rows: Option<&Input<TokensOrPacks>>| {
        let (Some(input), Some(rows)) = (input, rows) else { return Ok(None) };
        let (scored, rows, model) = (context.open(input)?, context.open(rows)?, context.open(&params.model)?);
        let adapter = params.adapter.as_ref().filter(|_| scorer == Scorer::Policy);
        let adapter = adapter.map(|adapter| context.open(adapter)).transpose()?;
        preference::check_scored(params, &scored, &rows, &model, adapter.as_ref(), context)?;
        log_probs::read(&scored.folder).map(Some)
    };
    Ok([read(of_data, Some(&params.data))?, read(of_validation, params.validation.as_ref())?])
}

/// A step that is about to be computed.
struct Planned {
    place: StepPlace,
    tokens: Tokens,
    /// None once the learner has it.
    work: Option<StepWork>,
}

struct Session<'a> {
    params: &'a Train,
    learner: Box<dyn Learner>,
    division: Division,
    schedule: Schedule,
    order: RowOrder,
    rows: TokensReader,
    validator: Option<Validator>,
    /// Of rank 0 alone.
    tasks: Option<TaskValidator>,
    metrics_logger: MetricsLogger,
    /// Rows that a rank computes at once.
    rows_at_once: usize,
    /// The loss, where it is one of documents.
    objective: Option<Arc<dyn DocumentObjective>>,
    /// What the reference makes of the rows, for a loss that compares with one.
    reference: Option<LogProbs>,
    progress: Progress,
    /// Whether anything happened since the state was saved.
    unsaved: bool,
    /// The next step, which the learner computes already.
    ahead: Option<Planned>,
}

impl Session<'_> {
    /// Steps, validations and saved states up to the end of the run.
    fn train(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        loop {
            // A saved step may be one whose validation was cut off.
            if self.validation_is_due() {
                let ControlFlow::Continue(best) = self.validate(context)? else { return self.stop(context) };
                self.unsaved = true;
                if best && self.params.keep_best && self.is_rank_zero() {
                    checkpoints::save_best(&mut self.progress, &mut *self.learner, context)?;
                }
            }
            if self.tasks_are_due() {
                if self.ask_tasks(context)?.is_break() {
                    return self.stop(context);
                }
                self.unsaved = true;
            }
            let over = self.is_over();
            if self.unsaved && (over || self.saving_is_due()) {
                self.save(context)?;
            }
            if over {
                return Ok(());
            }
            match self.step(context) {
                Err(error) if error.cause == Cause::Cancelled => return self.stop(context),
                ended => ended?,
            }
        }
    }

    fn is_rank_zero(&self) -> bool {
        self.learner.ranks().is_rank_zero()
    }

    /// Whether the last step is done.
    fn is_over(&self) -> bool {
        let ends_early = self.progress.validation.ends_early(self.params.early_stopping.as_ref());
        self.progress.step >= self.progress.total_steps || ends_early
    }

    fn saving_is_due(&self) -> bool {
        self.progress.step.is_multiple_of(self.params.save_every)
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// Fails as cancelled where the user wants to stop; it is then as if it had not begun.
    fn step(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        let profile = context.profile().clone();
        let _phase = profile.phase("step");
        context.stop_if_cancelled()?;
        let Planned { place, tokens, work } = match self.ahead.take() {
            Some(planned) => planned,
            None => self.plan(self.progress.step, context)?,
        };
        let compared = match work.filter(|_| tokens.targets > 0) {
            Some(work) => self.accumulate(work, context)?,
            None => None,
        };
        // A skipped step holds the schedule.
        let at = self.progress.step - self.progress.skipped_steps;
        let factor = self.schedule.factor(at, self.progress.total_steps);
        self.progress.step += 1;
        self.unsaved = true;
        if tokens.targets == 0 {
            context.warn(format!("step {} has no target token and changes nothing", self.progress.step));
            return Ok(());
        }
        let ahead = self.work_ahead(context)?;
        let report = self.learner.step(self.params.optimizer.learning_rate * factor, ahead, context)?;
        self.log_step(&place, &report, tokens, compared, context);
        Ok(())
    }

    /// Adds the gradients of a step; what is logged of its documents, where the loss compares them.
    fn accumulate(&mut self, work: StepWork, context: &mut StageContext) -> Result<Option<Figures>, StageError> {
        let Some(objective) = &self.objective else {
            self.learner.accumulate(work, context)?;
            return Ok(None);
        };
        let with_reference = |batch: Batch| {
            let reference_log_probs = self.reference.as_ref().map(|reference| reference.of_batch(&batch));
            DocumentBatch { batch, reference_log_probs: reference_log_probs.unwrap_or_default() }
        };
        let of_rank = |batches: Vec<Batch>| batches.into_iter().map(with_reference).collect();
        let micro_batches = work.micro_batches.into_iter().map(of_rank).collect();
        let work = DocumentWork { rows: work.rows, micro_batches };
        let report = self.learner.accumulate_documents(work, &**objective, context)?;
        Ok(Some(Figures::of(&report.compared)))
    }

    /// The next step, for a learner that works ahead, unless something else comes between.
    fn work_ahead(&mut self, context: &StageContext) -> Result<Option<StepWork>, StageError> {
        let step = self.progress.step;
        let is_next = step < self.progress.total_steps
            && !self.validation_is_due()
            && !self.tasks_are_due()
            && !self.saving_is_due();
        if !self.learner.works_ahead() || self.objective.is_some() || !is_next || context.cancelled() {
            return Ok(None);
        }
        let mut planned = self.plan(step, context)?;
        let work = planned.work.take_if(|_| planned.tokens.targets > 0);
        self.ahead = Some(planned);
        Ok(work)
    }

    /// Reads the rows of a step and shares them out among the ranks.
    fn plan(&mut self, step: u64, context: &StageContext) -> Result<Planned, StageError> {
        let place = self.division.place(step);
        let numbers: Vec<u64> = self.order.rows(&place).iter().map(|row| *row as u64).collect();
        let mut rows = self.read(&numbers, context)?;
        let lengths: Vec<usize> = rows.iter().map(TokenRow::real_tokens).collect();
        let widths: Vec<usize> = rows.iter().map(|row| row.input_ids.len()).collect();
        let target_tokens = rows.iter().map(TokenRow::target_tokens).sum();
        let weight = rows.iter().map(|row| row.targets().total_weight()).sum();
        let ranks = self.learner.ranks();
        let shares = shares(&lengths, ranks.size);
        let micro_batches = micro_batches(&shares[ranks.fed.clone()], &numbers, &mut rows, self.rows_at_once);
        // Those of all ranks: each knows what the others compute.
        let padded = |rows: &[usize]| rows.iter().map(|row| widths[*row]).max().unwrap_or(0) * rows.len();
        let of_all = shares.iter().flat_map(|share| share.chunks(self.rows_at_once));
        let tokens =
            Tokens { computed: lengths.iter().sum(), padded: of_all.map(padded).sum(), targets: target_tokens };
        let work = Some(StepWork { rows: numbers, micro_batches, target_tokens, weight });
        Ok(Planned { place, tokens, work })
    }

    /// Reads the rows of a step, of which every rank must know the lengths.
    fn read(&mut self, rows: &[u64], context: &StageContext) -> Result<Vec<TokenRow>, StageError> {
        let _reading = context.profile().phase("read rows");
        rows.iter().map(|row| Ok(self.rows.row(*row)?)).collect()
    }

    /// Records a step and says how it went.
    fn log_step(
        &mut self,
        place: &StepPlace,
        report: &StepReport,
        tokens: Tokens,
        compared: Option<Figures>,
        context: &mut StageContext,
    ) {
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
            preference: compared,
        };
        let line = self.metrics_logger.step(&record, tokens, self.learner.peak_memory(), context);
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
        let validated = match validator.validate(&mut *self.learner, self.progress.step, context) {
            Err(error) if error.cause == Cause::Cancelled => return Ok(ControlFlow::Break(())),
            validated => validated?,
        };
        let step = self.progress.step;
        let best = self.progress.validation.add(
            step,
            validated.measure(self.params.best_by),
            self.params.early_stopping.as_ref(),
        );
        let epoch = self.epoch_of(step);
        let record = Record::Validation {
            step,
            epoch,
            loss: validated.loss,
            rows: validated.rows,
            target_tokens: validated.target_tokens,
            best,
            preference: validated.preference.clone(),
        };
        self.metrics_logger.validation(&record, began.elapsed(), context);
        let compared = validated.preference.as_ref().map(Figures::line).unwrap_or_default();
        let line = format!("{epoch}|{step}|Validation loss: {:.4}{compared}", validated.loss);
        context.progress("steps", step, Some(self.progress.total_steps), Some(line));
        Ok(ControlFlow::Continue(best))
    }

    fn tasks_are_due(&self) -> bool {
        let step = self.progress.step;
        self.progress.tasks != Some(step) && self.tasks.as_ref().is_some_and(|tasks| tasks.is_due(step, &self.division))
    }

    /// Asks the tasks after the last whole step; broken off where the user wants to stop.
    fn ask_tasks(&mut self, context: &mut StageContext) -> Result<ControlFlow<()>, StageError> {
        let Some(tasks) = &self.tasks else { return Ok(ControlFlow::Continue(())) };
        let profile = context.profile().clone();
        let _phase = profile.phase("tasks");
        let began = Instant::now();
        let figures = match tasks.measure(&mut *self.learner, context) {
            Err(error) if error.cause == Cause::Cancelled => return Ok(ControlFlow::Break(())),
            measured => measured?,
        };
        let step = self.progress.step;
        self.progress.tasks = Some(step);
        let epoch = self.epoch_of(step);
        let words: Vec<String> = figures.iter().map(|(name, figure)| format!("{name} {figure:.4}")).collect();
        let line = format!("{epoch}|{step}|{}", words.join(", "));
        self.metrics_logger.validation(&Record::Tasks { step, epoch, figures }, began.elapsed(), context);
        context.progress("steps", step, Some(self.progress.total_steps), Some(line));
        Ok(ControlFlow::Continue(()))
    }

    /// The epoch of the last of so many steps, from 1; 0 before the first.
    fn epoch_of(&self, steps: u64) -> u64 {
        steps.checked_sub(1).map_or(0, |last| self.division.place(last).epoch + 1)
    }

    fn save(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        self.unsaved = false;
        if !self.is_rank_zero() {
            return Ok(());
        }
        let profile = context.profile().clone();
        let _phase = profile.phase("save the working state");
        let metrics = self.metrics_logger.history().lines();
        checkpoints::save(&mut self.progress, metrics, self.params.keep_last, &mut *self.learner, context)
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
        Err(StageError::new(Cause::Cancelled, message).with_help("run again to resume from there"))
    }

    /// What follows the last step and is no part of the working state, so that a longer run can go on from there: a
    /// last validation where none was due, the choice of the result, and a summary.
    fn conclude(
        &mut self,
        remark: Option<String>,
        context: &mut StageContext,
    ) -> Result<Map<String, Value>, StageError> {
        require_targets(&self.progress, self.learner.loss_scaler().map(|scaler| scaler.scale))?;
        summary::many_skipped(&self.progress).into_iter().for_each(|warning| context.warn(warning));
        // An adapter is of use only with the base model that it was trained on, to the bit.
        let profile = context.profile().clone();
        let checking = profile.phase("check the frozen weights");
        self.learner.check_frozen(context)?;
        drop(checking);
        if self.validator.is_some()
            && self.progress.validation.last != Some(self.progress.step)
            && self.validate(context)?.is_break()
        {
            self.stop(context)?;
        }
        if self.tasks.is_some()
            && self.progress.tasks != Some(self.progress.step)
            && self.ask_tasks(context)?.is_break()
        {
            self.stop(context)?;
        }
        let history = self.metrics_logger.history();
        let text = summary::text(self.params, &self.division, &self.progress, history);
        context.report_detail(text);
        if let Some(remark) = remark {
            context.report(remark);
        }
        Ok(summary::facts(self.params, &self.division, &self.progress, history))
    }
}
