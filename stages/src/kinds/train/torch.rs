//! Training by the torch worker: its job from the stage's parameters, its words as the stage's, its files as the
//! stage's outputs.
//!
//! The rows and the learning rate of each step, the adapter's first values, what is saved and what may be gone on from
//! are the same as of the native backend, so that a run that one of them began can be ended by the other.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::protocol::WorkerEvent;
use model::checkpoint::Checkpoint;
use model::peft::{AdapterConfig, WEIGHTS_FILE};
use serde_json::json;

use super::figures::{Curves, History};
use super::inputs::Inputs;
use super::order::{Division, RowOrder};
use super::parameters::{EarlyStopping, LossScale, Method, TrainParams};
use super::state::Progress;
use super::{checkpoints, fit, output, prepare, session, summary};
use crate::compute::backend::Choice;
use crate::compute::torch::job::{self, Job, RowsFiles};
use crate::compute::torch::{Summary, Work};
use crate::data::artifact::TokensReader;

/// Runs the stage on the torch worker.
pub(super) fn run(params: &TrainParams, choice: &Choice, context: &mut StageContext) -> Result<(), StageError> {
    let mut work = Work::begin("torch", context)?;
    work.env.clone_from(&params.env);
    work.watchdog = Duration::from_secs(params.watchdog_seconds);
    let inputs = Inputs::open(params, context)?;
    let Inputs { model, architecture, rows, validation, division, total_steps } = inputs;
    fit::warn_of_dropouts(&architecture, context);
    for tokens in std::iter::once(&rows).chain(&validation) {
        fit::unweighted(tokens.facts())?;
    }
    let settings = match params.method {
        Method::Full => None,
        Method::Lora => {
            Some(prepare::first_values(params, &architecture, &model, &work.folder.join("adapter"), context)?)
        }
    };
    let fresh = Progress::fresh(total_steps, computed_by(params, context));
    let resume = checkpoints::to_resume(params, &fresh, context)?;
    write_steps(params, &division, total_steps, &work.folder.join("steps.jsonl"))?;

    let files = Files { model: &model, rows: &rows, validation: validation.as_ref(), resume };
    let job = Job::Train(Box::new(job(params, &work, files, settings.as_ref(), &fresh, context)));
    let mut curves = Curves::new(0, context);
    let done = work.run(&job, context, &mut |event, context| {
        relay(event, &mut curves, context);
        Ok(())
    });
    let done = done.map_err(|error| with_the_way_on(error, context))?;
    let run = Run { params, work: &work, model: &model, rows: &rows, division, choice };
    run.seal(&done, settings, context)
}

/// What computes, as far as it is known before: with another, last digits may differ.
fn computed_by(params: &TrainParams, context: &StageContext) -> String {
    let devices = context.devices();
    let ranks = match devices.workers() {
        1 => "1 rank".to_owned(),
        ranks => format!("{ranks} ranks"),
    };
    format!("torch on {}, {ranks}, micro-batches of {}", devices.kind, params.micro_batch_size)
}

/// Writes the rows and the learning rate of each step.
fn write_steps(params: &TrainParams, division: &Division, total: u64, path: &Path) -> Result<(), StageError> {
    let schedule = params.schedule(total);
    let mut order = RowOrder::new(params.shuffle(), division.rows);
    let mut write = || -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        for step in 0..total {
            let place = division.place(step);
            let learning_rate = params.optimizer.learning_rate * schedule.factor(step, total);
            let rows = order.rows(&place);
            let line = json!({ "epoch": place.epoch + 1, "rows": rows, "learning_rate": learning_rate });
            writeln!(file, "{line}")?;
        }
        file.flush()
    };
    write().or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
}

/// What a job reads.
struct Files<'a> {
    model: &'a Artifact,
    rows: &'a TokensReader,
    validation: Option<&'a TokensReader>,
    resume: Option<PathBuf>,
}

fn job(
    params: &TrainParams,
    work: &Work,
    files: Files<'_>,
    settings: Option<&AdapterConfig>,
    fresh: &Progress,
    context: &StageContext,
) -> job::Train {
    let Files { model, rows, validation, resume } = files;
    let adapter = settings.map(|_| work.folder.join("adapter"));
    job::Train {
        common: work.common(params.dtype.in_job(), model.folder.clone(), adapter, context),
        method: match params.method {
            Method::Lora => "lora",
            Method::Full => "full",
        },
        dropout: settings.map_or(0.0, |settings| settings.dropout),
        parallel: params.parallel,
        attention: params.attention,
        data: RowsFiles::of(rows),
        validation: validation.map(RowsFiles::of),
        steps: work.folder.join("steps.jsonl"),
        total_steps: fresh.total_steps,
        micro_batch_size: params.micro_batch_size,
        optimizer: params.optimizer.optimizer(),
        clip_grad_norm: params.clip_grad_norm,
        loss_scale: params.loss_scale().map(Into::into),
        activation_checkpointing: params.activation_checkpointing,
        seed: params.seed,
        save_every: params.save_every,
        keep_last: params.keep_last,
        eval_steps: params.eval_steps,
        keep_best: params.keep_best,
        early_stopping: params.early_stopping.as_ref().map(Into::into),
        working: context.working().to_owned(),
        resume,
        computed_by: fresh.computed_by.clone(),
        run_folder: context.run_folder().to_owned(),
        profile: context.profile().is_recording(),
        watchdog_seconds: params.watchdog_seconds,
    }
}

/// Says what the worker says.
fn relay(event: WorkerEvent, curves: &mut Curves, context: &mut StageContext) {
    match &event {
        WorkerEvent::Progress { note: Some(line), .. } => context.log(line),
        WorkerEvent::Metrics { values } => curves.draw(values, context),
        _ => {}
    }
    context.emit(event);
}

/// A failure, with the step that the next run goes on from.
fn with_the_way_on(mut error: StageError, context: &StageContext) -> StageError {
    let Some(step) = checkpoints::saved_steps(context) else { return error };
    if error.cause == Cause::Crashed && error.help.is_none() {
        error.help = Some(format!("step {step} is saved: run again to go on from there"));
    }
    error
}

/// A run that the worker has ended.
struct Run<'a> {
    params: &'a TrainParams,
    work: &'a Work,
    model: &'a Artifact,
    rows: &'a TokensReader,
    division: Division,
    choice: &'a Choice,
}

impl Run<'_> {
    /// Makes outputs of what the worker has left.
    fn seal(
        &self,
        done: &Summary,
        settings: Option<AdapterConfig>,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let progress: Progress = done.get("progress")?;
        session::require_targets(&progress)?;
        let history = History::from_lines(self.work.left("metrics.jsonl")?);
        let mut text = summary::text(self.params, &self.division, &progress, &history);
        text.push_str(&format!("\n{}", self.choice.report()));
        context.emit(WorkerEvent::Report { text });
        let facts = summary::facts(self.params, &self.division, &progress, &history);
        match settings {
            Some(settings) => {
                let values = self.work.output.join("adapter").join(WEIGHTS_FILE);
                output::adapter(settings, &[values], &facts, self.model, self.rows, context)?;
            }
            None => {
                let values = Checkpoint::open(&self.work.output.join("model"));
                let values = values.or_fail(Cause::Internal, || "cannot read the trained model".to_owned())?;
                let values: Vec<PathBuf> = values.files().map(Path::to_owned).collect();
                output::model(&values, &self.model.folder, output::prompt_facts(self.rows), context)?;
            }
        }
        output::metrics(history.lines(), facts, context)
    }
}

impl From<LossScale> for job::LossScale {
    fn from(scale: LossScale) -> Self {
        let LossScale { init_scale, growth_factor, backoff_factor, growth_interval } = scale;
        Self { init_scale, growth_factor, backoff_factor, growth_interval }
    }
}

impl From<&EarlyStopping> for job::EarlyStopping {
    fn from(stopping: &EarlyStopping) -> Self {
        Self { patience: stopping.patience, min_delta: stopping.min_delta }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use engine::file::tree::Node;
    use engine::parameter::{Parameter, Reader};

    use super::*;

    #[test]
    fn each_step_has_its_rows_and_its_rate() {
        let parameters = json!({
            "model": "base", "data": "rows", "micro_batch_size": 2, "epochs": 2, "seed": 5,
            "scheduler": { "name": "linear", "warmup_steps": 1 },
        });
        let params = TrainParams::read(&Node::from_json(&parameters), &mut Reader::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        let (division, total) = (params.division(5), params.total_steps(5));
        write_steps(&params, &division, total, &path).unwrap();
        let text = fs::read_to_string(path).unwrap();
        let steps: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.len(), 6);
        let rows = |epoch: u64| -> Vec<u64> {
            let of_epoch = steps.iter().filter(|step| step["epoch"] == epoch);
            of_epoch.flat_map(|step| step["rows"].as_array().unwrap()).map(|row| row.as_u64().unwrap()).collect()
        };
        let mut sorted = rows(1);
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4]);
        assert_ne!(rows(1), rows(2));
        assert_eq!(steps[2]["rows"].as_array().unwrap().len(), 1);
        let rates: Vec<f64> = steps.iter().map(|step| step["learning_rate"].as_f64().unwrap()).collect();
        assert_eq!((rates[0], rates[1]), (0.0, 3e-4));
        assert!(rates[2] < rates[1]);
    }
}
