//! The torch worker: all its ranks, by requests to rank 0.
//!
//! The ranks hold the model, share it out, compute, and update it; what they compute and when is told here. Token ids
//! are sent with each step, so that no rank holds the rows.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use engine::artifact::Facts;
use engine::context::{Artifact, StageContext};
use engine::error::StageError;
use model::batch::{Batch, TargetScope};
use model::loss::DocumentObjective;
use model::peft::AdapterConfig;
use model::scoring::Context;
use model::trainer::{DocumentReport, LossScalerState, StepReport, TrainError};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::documents::Documents;
use super::stopped::Stopped;
use super::{
    DocumentWork, Learner, Opened, PeakMemory, Ranks, Restored, Rounds, Scored, ScoredDocuments, Scorer, Scores,
    StepWork, Written, documents, rows_of, score_not_finite,
};
use crate::compute::inference::ContinuationScores;
use crate::compute::quantize::TrainQuantize;
use crate::compute::torch::batches::{MicroBatch, encode};
use crate::compute::torch::job::{self, Job};
use crate::compute::torch::{Connection, NAMED_AS_IN_FILES, PEAK_MEMORY_OF_RANKS, Work};
use crate::compute::variable;
use crate::kinds::train::inputs::Inputs;
use crate::kinds::train::parameters::{Loss, LossScale, Method, Train};
use crate::kinds::train::prepare;
use crate::kinds::train::{failure, fit};

/// What is done next.
#[derive(Serialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub(super) enum Request<'a> {
    /// Adds the gradients of micro-batches, by rank; `weight` is the divisor of the step.
    Accumulate {
        ranks: &'a [Vec<MicroBatch>],
        weight: f64,
    },
    Step {
        learning_rate: f64,
    },
    /// Scores the documents of a micro-batch of each rank: by the model as it is trained, dropout included, unless
    /// another scorer is named. What their gradients need is kept where `held`.
    ScoreDocuments {
        ranks: &'a [Vec<MicroBatch>],
        held: bool,
        scorer: Option<Scorer>,
    },
    /// Adds the gradients of what is held, by the weights of the response and of all targets of each document of each
    /// rank.
    Weigh {
        ranks: &'a [Vec<[f64; 2]>],
    },
    /// Scores a micro-batch of each rank.
    Score {
        ranks: &'a [Vec<MicroBatch>],
    },
    /// Writes the trained values, and the optimizer's state of them, into a folder.
    Save {
        folder: &'a Path,
        state: bool,
    },
    Restore {
        files: &'a BTreeMap<String, Vec<PathBuf>>,
        optimizer_steps: u64,
        loss_scaler: Option<LossScalerState>,
    },
    CheckFrozen,
}

/// What became of a step.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Stepped {
    Done(Done),
    Stopped(Stopped),
}

/// What a step did.
#[derive(Deserialize)]
struct Done {
    /// The loss, null where it is not finite, which it may be in a skipped step alone.
    loss: Option<f64>,
    grad_norm: Option<f64>,
    loss_scale: Option<f64>,
    loss_scaler: Option<LossScalerState>,
    peak_memory_bytes: Vec<u64>,
}

/// Starts the ranks, which load the model.
pub(in crate::kinds::train) fn open(
    params: &Train,
    inputs: &Inputs,
    context: &mut StageContext,
) -> Result<Opened, StageError> {
    let mut work = Work::begin("torch", context)?;
    work.env = variable::texts(&params.env);
    work.watchdog = Duration::from_secs(params.watchdog_seconds);
    fit::warn_of_dropouts(&inputs.architecture, context);
    let adapter = match params.method {
        Method::Full => None,
        Method::Lora => {
            let folder = work.folder.join("adapter");
            Some(prepare::first_values(params, &inputs.architecture, &inputs.model, &folder, context)?)
        }
    };
    let job = Job::Train(Box::new(job(params, &work, inputs, adapter.as_ref(), context)?));
    let (connection, described) = Connection::open(&work, &job, context)?;
    let computed_by = computed_by(params, &described, context);
    let named_as_in_files = described.get(NAMED_AS_IN_FILES).and_then(Value::as_bool).unwrap_or(true);
    let size = context.devices().workers();
    let learner = Torch {
        connection,
        named_as_in_files,
        ranks: Ranks { size, fed: 0..size },
        optimizer_steps: 0,
        loss_scaler: None,
        peaks: Vec::new(),
        accumulated: Accumulated::default(),
    };
    Ok(Opened { learner: Box::new(learner), adapter, computed_by })
}

/// What the last digits depend on.
fn computed_by(params: &Train, described: &Facts, context: &StageContext) -> String {
    let text = |name: &str| described.get(name).and_then(Value::as_str).unwrap_or_default();
    let version = described.get("versions").and_then(|versions| versions["torch"].as_str()).unwrap_or_default();
    let ranks = match context.devices().workers() {
        1 => "1 rank".to_owned(),
        ranks => format!("{ranks} ranks"),
    };
    let compiled = if described.get("compiled") == Some(&Value::Bool(true)) { ", compiled" } else { "" };
    format!(
        "torch {version} on {}, {ranks}, {}, micro-batches of {}, {}{compiled}",
        context.devices().kind,
        text("parallel"),
        params.micro_batch_size,
        text("attention")
    )
}

fn job(
    params: &Train,
    work: &Work,
    inputs: &Inputs,
    adapter: Option<&AdapterConfig>,
    context: &mut StageContext,
) -> Result<job::Train, StageError> {
    let label_smoothing = match params.loss {
        Loss::CrossEntropy { label_smoothing } => label_smoothing,
        _ => 0.0,
    };
    let folder = adapter.map(|_| work.folder.join("adapter"));
    Ok(job::Train {
        common: work.common(
            params.dtype.in_job(),
            inputs.model.folder.clone(),
            params.quantize.as_ref().and_then(TrainQuantize::of_worker),
        ),
        adapter: folder,
        method: match params.method {
            Method::Lora => "lora",
            Method::Full => "full",
        },
        dropout: adapter.map_or(0.0, |settings| settings.dropout),
        parallel: params.parallel,
        attention: params.attention,
        compile: params.compile,
        packed: inputs.tables().any(|rows| rows.is_packed()),
        label_smoothing,
        distillation: distillation(params, &inputs.model, context)?,
        optimizer: params.optimizer.optimizer(),
        clip_grad_norm: params.clip_grad_norm,
        loss_scale: params.loss_scale().map(Into::into),
        activation_checkpointing: params.activation_checkpointing,
        seed: params.seed,
        run_folder: context.run_folder().to_owned(),
        profile: context.profile().is_recording(),
        watchdog_seconds: params.watchdog_seconds,
    })
}

/// The teacher, whose tokens must be those of the student.
fn distillation(
    params: &Train,
    student: &Artifact,
    context: &mut StageContext,
) -> Result<Option<job::Distillation>, StageError> {
    let Some((teacher, loss)) = params.loss.distillation() else { return Ok(None) };
    let teacher = context.open(teacher)?;
    fit::same_tokens(student, &teacher)?;
    Ok(Some(job::Distillation { teacher: teacher.folder, loss }))
}

struct Torch {
    connection: Connection,
    named_as_in_files: bool,
    ranks: Ranks,
    optimizer_steps: u64,
    loss_scaler: Option<LossScalerState>,
    /// The most memory of each rank.
    peaks: Vec<u64>,
    accumulated: Accumulated,
}

/// The step that is accumulated.
#[derive(Default)]
struct Accumulated {
    rows: Vec<u64>,
    target_tokens: usize,
    /// Its loss, where it is one of documents.
    loss: Option<f64>,
}

impl Torch {
    /// Has the ranks begin with the gradients of a step.
    fn begin(&mut self, work: StepWork) {
        let (ranks, payload) = encode(work.micro_batches.iter().map(Vec::as_slice), TargetScope::Response);
        self.connection.request(&Request::Accumulate { ranks: &ranks, weight: work.weight }, &payload);
        self.accumulated = Accumulated { rows: work.rows, target_tokens: work.target_tokens, loss: None };
    }
}

impl Learner for Torch {
    fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    fn barrier(&mut self) -> Result<(), StageError> {
        Ok(())
    }

    fn works_ahead(&self) -> bool {
        true
    }

    fn accumulate(&mut self, work: StepWork, _: &mut StageContext) -> Result<(), StageError> {
        self.begin(work);
        Ok(())
    }

    fn accumulate_documents(
        &mut self,
        work: DocumentWork,
        objective: &dyn DocumentObjective,
        context: &mut StageContext,
    ) -> Result<DocumentReport, StageError> {
        let documents = Documents::new(&mut self.connection, &work, objective, self.optimizer_steps + 1);
        let (report, target_tokens) = documents.accumulate(context)?;
        self.accumulated = Accumulated { rows: work.rows, target_tokens, loss: Some(report.loss) };
        Ok(report)
    }

    fn step(
        &mut self,
        learning_rate: f64,
        ahead: Option<StepWork>,
        context: &mut StageContext,
    ) -> Result<StepReport, StageError> {
        self.connection.request(&Request::Step { learning_rate }, &[]);
        let accumulated = std::mem::take(&mut self.accumulated);
        if let Some(ahead) = ahead {
            self.begin(ahead);
        }
        let step = self.optimizer_steps + 1;
        let Done { loss, grad_norm, loss_scale, loss_scaler, peak_memory_bytes } =
            match self.connection.answer(context)? {
                Stepped::Done(done) => done,
                Stepped::Stopped(stopped) => return Err(stopped.failure(step, &accumulated.rows)),
            };
        if grad_norm.is_some() {
            self.optimizer_steps = step;
        }
        (self.loss_scaler, self.peaks) = (loss_scaler, peak_memory_bytes);
        Ok(StepReport {
            step,
            loss: accumulated.loss.or(loss).unwrap_or(f64::NAN),
            target_tokens: accumulated.target_tokens,
            grad_norm: grad_norm.unwrap_or(f64::INFINITY),
            learning_rate,
            loss_scale,
            skipped: grad_norm.is_none(),
        })
    }

    fn score(&mut self, _: u64, rounds: &mut Rounds<'_>, context: &mut StageContext) -> Result<Scored, StageError> {
        let mut scores = Scores::default();
        let mut not_finite = None;
        let mut asked: Option<Vec<Batch>> = None;
        loop {
            // The next round is on its way before the answer to the one before it was read.
            let next = rounds(context);
            if let Ok(Some(round)) = &next {
                let (ranks, payload) = encode(round.iter().map(std::slice::from_ref), TargetScope::Response);
                self.connection.request(&Request::Score { ranks: &ranks }, &payload);
            }
            if let Some(round) = asked.take() {
                let nll: Vec<Option<f64>> = self.connection.answer(context)?;
                for (batch, nll) in round.iter().zip(nll) {
                    scores.target_tokens += batch.target_tokens() as u64;
                    match nll {
                        Some(nll) => scores.nll += nll,
                        None => not_finite = not_finite.or_else(|| Some(rows_of(batch))),
                    }
                }
            }
            match next? {
                Some(round) => asked = Some(round),
                None => break,
            }
        }
        Ok(match not_finite {
            Some(rows) => Scored::NotFinite { loss: f64::NAN, rows },
            None => Scored::Finite(scores),
        })
    }

    fn score_documents(
        &mut self,
        round: &[Batch],
        scorer: Scorer,
        scope: TargetScope,
        context: &mut StageContext,
    ) -> Result<Vec<ScoredDocuments>, StageError> {
        let (ranks, payload) = encode(round.iter().map(std::slice::from_ref), scope);
        self.connection
            .request(&Request::ScoreDocuments { ranks: &ranks, held: false, scorer: Some(scorer) }, &payload);
        let found: Vec<Vec<documents::Scored>> = self.connection.answer(context)?;
        let of_batch = |(batch, scored): (&Batch, Vec<_>)| {
            documents::scores(batch, scope, &scored).map_err(|_| score_not_finite(batch))
        };
        round.iter().zip(found).map(of_batch).collect()
    }

    fn score_continuations(&mut self, _: &[Context<'_>]) -> Result<ContinuationScores, StageError> {
        // What asks for it (`validation_tasks`) is for the native backend.
        Err(StageError::internal("the torch worker scores no continuations while it trains"))
    }

    fn share(&mut self, _: &mut [f64]) -> Result<(), StageError> {
        Ok(())
    }

    fn save(&mut self, folder: &Path, written: Written, context: &mut StageContext) -> Result<Vec<String>, StageError> {
        self.connection.request(&Request::Save { folder, state: written == Written::State }, &[]);
        self.connection.answer(context)
    }

    fn restore(&mut self, saved: Restored, context: &mut StageContext) -> Result<(), StageError> {
        let Restored { files, optimizer_steps, loss_scaler } = saved;
        self.connection.request(&Request::Restore { files: &files, optimizer_steps, loss_scaler }, &[]);
        self.connection.answer::<()>(context)?;
        (self.optimizer_steps, self.loss_scaler) = (optimizer_steps, loss_scaler);
        Ok(())
    }

    fn check_frozen(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        self.connection.request(&Request::CheckFrozen, &[]);
        match self.connection.answer::<Option<String>>(context)? {
            None => Ok(()),
            Some(tensor) => Err(failure::of_rows(TrainError::FrozenMoved { tensor, step: self.optimizer_steps }, &[])),
        }
    }

    fn state_has_names_of_files(&self) -> bool {
        self.named_as_in_files
    }

    fn optimizer_steps(&self) -> u64 {
        self.optimizer_steps
    }

    fn loss_scaler(&self) -> Option<LossScalerState> {
        self.loss_scaler
    }

    fn peak_memory(&self) -> Option<PeakMemory> {
        let (rank, &bytes) =
            self.peaks.iter().enumerate().max_by_key(|(rank, bytes)| (**bytes, std::cmp::Reverse(*rank)))?;
        Some(PeakMemory { bytes, rank: (self.ranks.size > 1).then_some(rank) })
    }

    fn close(self: Box<Self>, context: &mut StageContext) -> Result<(), StageError> {
        context.record(PEAK_MEMORY_OF_RANKS, self.peaks);
        self.connection.close(context)
    }
}

impl From<LossScale> for job::LossScale {
    fn from(scale: LossScale) -> Self {
        let LossScale { init_scale, growth_factor, backoff_factor, growth_interval } = scale;
        Self { init_scale, growth_factor, backoff_factor, growth_interval }
    }
}
