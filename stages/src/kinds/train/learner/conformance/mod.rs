//! What every learner does, whichever backend computes: the native one, by itself and as two workers, and the torch
//! worker on one rank, on two that hold all weights, and on two that share them out.
//!
//! The torch worker takes part where its Python is: `PIPELINE_PYTHON` names it, and `PYTHONPATH` the package, if it is
//! not installed there. Where there is none the native backend is tested alone, unless `PIPELINE_REQUIRE` names torch.

mod golden;

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use engine::artifact::{Facts, Output};
use engine::device::DeviceGrant;
use engine::error::{Cause, Failure};
use engine::parameter::Parameters;
use engine::stage::{Stage, StageKind};
use engine::test_bench::TestBench;
use model::batch::{Role, TargetScope};
use model::loss::{DocumentLoss, DocumentScore, Gathering, ObjectiveError, StepTotals};
use model::trainer::TrainedTensor;
use serde_json::{Value, json};
use test_harness::{Requirement, do_everything};

use super::*;
use crate::compute::kernels;
use crate::compute::torch;
use crate::data::artifact::{OptionalColumn, Shape, TokenRow, TokensFacts, TokensWriter};
use crate::kinds::train::inputs::Inputs;
use crate::kinds::train::workers::{Threads, Workers};
use crate::kinds::train::{Train, session, state};

/// How far losses and norms may be apart from those of the native backend, and values relative to the greatest of their
/// tensor.
const LOSS_BOUND: f64 = 1e-5;
const NORM_BOUND: f64 = 1e-4;
const VALUE_BOUND: f64 = 1e-4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    Native,
    /// Two native workers, which are threads here.
    NativePair,
    Torch {
        ranks: usize,
        parallel: &'static str,
    },
}

impl Backend {
    fn ranks(self) -> usize {
        match self {
            Self::Native => 1,
            Self::NativePair => 2,
            Self::Torch { ranks, .. } => ranks,
        }
    }
}

/// Those that can compute here and their like, the native one first, for tests that call learners themselves.
fn learners() -> Vec<Backend> {
    let mut all = backends_but_replicas();
    all.insert(1, Backend::NativePair);
    all
}

/// As [`backends`], for tests that start one process after the other: without two replicas, which the golden runs train
/// on in any case, unless everything is done.
fn backends_but_replicas() -> Vec<Backend> {
    let replicas = |backend: &Backend| matches!(backend, Backend::Torch { ranks: 2, parallel: "ddp" });
    backends().into_iter().filter(|backend| do_everything() || !replicas(backend)).collect()
}

/// Those that can compute here, the native one first, each of which trains a whole run in this process.
fn backends() -> Vec<Backend> {
    if !torch::can_start() {
        Requirement::Torch.may_be_lacking("no Python with the torch worker (PIPELINE_PYTHON, PYTHONPATH)");
        return vec![Backend::Native];
    }
    let torch = |ranks, parallel| Backend::Torch { ranks, parallel };
    vec![Backend::Native, torch(1, "ddp"), torch(2, "ddp"), torch(2, "fsdp2")]
}

/// What a stage does in a test.
type Body = Box<dyn FnMut(&Train, &mut StageContext) -> Result<(), StageError>>;

thread_local! {
    static BODY: RefCell<Option<Body>> = const { RefCell::new(None) };
    /// The place of this thread among native workers.
    static WORKER: RefCell<Option<(Threads, usize)>> = const { RefCell::new(None) };
}

/// The stage kind, with another body.
#[derive(Parameters)]
struct Directed {
    #[semantic(flatten)]
    train: Train,
}

impl StageKind for Directed {
    const NAME: &'static str = Train::NAME;
    const VERSION: u32 = Train::VERSION;
    const ABOUT: &'static str = Train::ABOUT;
}

impl Stage for Directed {
    fn outputs(&self) -> Vec<Output> {
        self.train.outputs()
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        BODY.with_borrow_mut(|body| body.as_mut().unwrap()(&self.train, context))
    }
}

/// A model, rows, and what a backend computes on.
struct Bench {
    root: tempfile::TempDir,
    backend: Backend,
}

impl Bench {
    fn new(backend: Backend) -> Self {
        let root = tempfile::tempdir().unwrap();
        let rows = root.path().join("rows");
        fs::create_dir(&rows).unwrap();
        Self { root, backend }
    }

    fn bench(&self) -> TestBench {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/llama31");
        let count = if self.backend == Backend::NativePair { 1 } else { self.backend.ranks() };
        let grant = DeviceGrant { count, ..DeviceGrant::PROCESSOR };
        let teacher = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3");
        let bench = TestBench::new(self.root.path()).input("base.model", "model", &model, Facts::new()).unwrap();
        let bench = bench.input("teacher.model", "model", &teacher, Facts::new()).unwrap();
        let rows = self.root.path().join("rows");
        if !rows.join("part-00000.parquet").exists() {
            let columns = vec![OptionalColumn::Weight];
            let facts = TokensFacts { vocab_size: 320, columns, ..TokensFacts::none(Shape::Text) };
            let mut writer = TokensWriter::tokens(&rows, facts);
            (0..7).for_each(|number| writer.write(row(number)).unwrap());
            let facts = writer.finish(|_| ()).unwrap().0.to_facts();
            fs::write(self.root.path().join("facts.json"), serde_json::to_vec(&facts).unwrap()).unwrap();
        }
        let facts = serde_json::from_slice(&fs::read(self.root.path().join("facts.json")).unwrap()).unwrap();
        bench.input("rows.tokens", "tokens", &rows, facts).unwrap().devices(grant)
    }

    fn parameters(&self, more: Value) -> Value {
        let mut parameters = json!({
            "model": "base", "data": "rows", "micro_batch_size": 2, "gradient_accumulation_steps": 2,
            "optimizer": { "learning_rate": 1e-2 }, "clip_grad_norm": 1.0, "seed": 3,
            "lora": { "rank": 2, "dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"] },
        });
        if let Backend::Torch { parallel, .. } = self.backend {
            parameters["parallel"] = parallel.into();
        }
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parameters
    }

    /// Runs a stage with another body, and returns what that makes.
    fn direct<T: 'static>(
        &self,
        more: Value,
        mut body: impl FnMut(Backend, &Train, &mut StageContext) -> Result<T, StageError> + 'static,
    ) -> Result<T, StageError> {
        let (made, backend) = (Rc::new(RefCell::new(None)), self.backend);
        let there = Rc::clone(&made);
        BODY.set(Some(Box::new(move |params, context| {
            let result = body(backend, params, context);
            let failed = result.is_err();
            there.replace(Some(result));
            if failed { Err(StageError::internal("told apart from it")) } else { Ok(()) }
        })));
        // A body that trains nothing leaves no outputs, which the bench finds wrong.
        let _ = self.bench().run::<Directed>(self.parameters(more));
        made.take().expect("the stage has run")
    }

    /// Opens a learner with more parameters, and returns what is made with it.
    fn learn<T: Send + 'static>(
        &self,
        more: Value,
        body: impl FnMut(&mut dyn Learner, &mut StageContext) -> Result<T, StageError> + Clone + Send + 'static,
    ) -> T {
        if self.backend != Backend::NativePair {
            return self.learn_here(more, body);
        }
        let threads = Threads::new(self.backend.ranks());
        let other = (threads.clone(), body.clone(), more.clone());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (threads, body, more) = other;
                WORKER.set(Some((threads, 1)));
                Bench::new(Backend::NativePair).learn_here(more, body)
            });
            WORKER.set(Some((threads, 0)));
            self.learn_here(more, body)
        })
    }

    fn learn_here<T: 'static>(
        &self,
        more: Value,
        mut body: impl FnMut(&mut dyn Learner, &mut StageContext) -> Result<T, StageError> + 'static,
    ) -> T {
        let made = self.direct(more, move |backend, params, context| {
            let inputs = Inputs::open(params, context)?;
            let mut opened = open(backend, params, &inputs, context)?;
            let made = body(&mut *opened.learner, context)?;
            opened.learner.close(context)?;
            Ok(made)
        });
        made.unwrap_or_else(|error| panic!("{:?}: {error:?}", self.backend))
    }
}

fn open(backend: Backend, params: &Train, inputs: &Inputs, context: &mut StageContext) -> Result<Opened, StageError> {
    if let Backend::Torch { .. } = backend {
        return open_torch(params, inputs, context);
    }
    let workers = match WORKER.take() {
        Some((threads, rank)) => threads.worker(rank),
        None => Workers::form(params, context)?,
    };
    let ops = kernels::cpu_on(1, params.dtype.compute(), context)?;
    open_native(params, std::sync::Arc::new(ops), workers, inputs, context)
}

/// A row of some length, of which the first tokens are no targets and the others have weights.
fn row(number: u32) -> TokenRow {
    let length = 6 + number as usize % 4;
    let ids: Vec<u32> = (0..length as u32).map(|at| 3 + (7 * number + 5 * at) % 200).collect();
    TokenRow {
        labels: ids.iter().enumerate().map(|(at, id)| if at < 2 { -100 } else { *id as i32 }).collect(),
        document_lengths: vec![length],
        weights: (0..length).map(|at| 0.5 + at as f32 / 4.0).collect(),
        input_ids: ids,
        ..TokenRow::default()
    }
}

/// The work of a step with some rows, as a session hands it to these ranks.
fn work(ranks: &Ranks, rows: &[u32]) -> StepWork {
    let mut work = StepWork { micro_batches: vec![Vec::new(); ranks.fed.len()], ..StepWork::default() };
    for (index, &number) in rows.iter().enumerate() {
        let mut batch = Batch::default();
        batch.push(number.into(), &row(number));
        work.rows.push(number.into());
        work.target_tokens += batch.target_tokens();
        work.weight += batch.targets().total_weight();
        if let Some(of_rank) = (index % ranks.size).checked_sub(ranks.fed.start) {
            work.micro_batches.get_mut(of_rank).into_iter().for_each(|batches| batches.push(batch.clone()));
        }
    }
    work
}

/// What was trained, sorted by name, with its state.
fn saved(
    learner: &mut dyn Learner,
    folder: &Path,
    context: &mut StageContext,
) -> Result<Vec<TrainedTensor>, StageError> {
    // Each process has saved all that it trains, and the first one's counts.
    let own = if learner.ranks().is_rank_zero() { folder.to_owned() } else { folder.join("other") };
    fs::create_dir_all(&own).unwrap();
    learner.save(&own, Written::State, context)?;
    let tensors = state::read_tensors(&files(&own)).unwrap();
    learner.barrier()?;
    Ok(tensors)
}

/// The files of a folder by set.
fn files(folder: &Path) -> TensorFiles {
    let mut files = TensorFiles::new();
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = entries.filter(|path| path.is_file()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let set = name.split("-0").next().unwrap().to_owned();
        files.entry(set).or_default().push(path);
    }
    files
}

#[track_caller]
fn near(ours: f64, native: f64, bound: f64, what: &str) {
    assert!((ours - native).abs() <= bound * native.abs(), "{what}: {ours} and {native}");
}

#[track_caller]
fn are_near(ours: &[TrainedTensor], native: &[TrainedTensor], backend: Backend) {
    let names = |tensors: &[TrainedTensor]| tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(ours), names(native));
    for (one, other) in ours.iter().zip(native) {
        let greatest = other.value.iter().fold(0.0_f32, |greatest, value| greatest.max(value.abs()));
        let apart = one.value.iter().zip(&other.value).map(|(one, two)| (one - two).abs()).fold(0.0, f32::max);
        assert!(
            f64::from(apart) <= VALUE_BOUND * f64::from(greatest),
            "{backend:?}: `{}`, {apart} of {greatest}",
            one.name
        );
    }
}

#[test]
fn steps_scores_and_values_are_those_of_the_native_backend() {
    steps_are_those_of_the_native_backend(&json!({}));
}

#[test]
fn rows_of_tokens_are_trained_as_by_the_native_backend() {
    let lora =
        json!({"rank": 2, "target_modules": ["q_proj", "down_proj"], "trainable_token_indices": [8, 13, 15, 310]});
    steps_are_those_of_the_native_backend(&json!({"lora": lora}));
}

fn steps_are_those_of_the_native_backend(more: &Value) {
    let mut native = None;
    for backend in learners() {
        let bench = Bench::new(backend);
        let folder = bench.root.path().join("saved");
        let (reports, scores, tensors) = bench.learn(more.clone(), move |learner, context| {
            let ranks = learner.ranks().clone();
            let mut reports = Vec::new();
            let steps: [&[u32]; 3] = [&[0, 1, 2, 3], &[4, 5, 6], &[1]];
            let mut next = Some(work(&ranks, steps[0]));
            for step in 0..steps.len() {
                if let Some(work) = next.take() {
                    learner.accumulate(work, context)?;
                }
                next = steps.get(step + 1).map(|rows| work(&ranks, rows));
                let ahead = if learner.works_ahead() { next.take() } else { None };
                reports.push(learner.step(1e-2, ahead, context)?);
            }
            learner.check_frozen(context)?;
            let mut left = vec![5, 3];
            let mut rounds = |_: &StageContext| {
                let batches = |number: u32| work(&ranks, &[number]).micro_batches;
                let first_of = |of_rank: Vec<Batch>| of_rank.into_iter().next().unwrap_or_default();
                Ok(left.pop().map(|number| batches(number).into_iter().map(first_of).collect()))
            };
            let scores = learner.score(3, &mut rounds, context)?;
            Ok((reports, scores, saved(learner, &folder, context)?))
        });
        let (expected, expected_scores, expected_tensors) =
            native.get_or_insert_with(|| (reports.clone(), scores.clone(), tensors.clone()));
        for (ours, native) in reports.iter().zip(expected.iter()) {
            assert_eq!((ours.step, ours.target_tokens, ours.skipped), (native.step, native.target_tokens, false));
            near(ours.loss, native.loss, LOSS_BOUND, "losses");
            near(ours.grad_norm, native.grad_norm, NORM_BOUND, "norms");
        }
        let (Scored::Finite(ours), Scored::Finite(native)) = (&scores, &*expected_scores) else { panic!("{scores:?}") };
        assert_eq!(ours.target_tokens, native.target_tokens);
        near(ours.nll, native.nll, LOSS_BOUND, "scores");
        are_near(&tensors, expected_tensors, backend);
    }
}

#[test]
fn losses_of_targets_are_those_of_the_native_backend() {
    let distillation = |alpha: f64, divergence: &str| {
        let loss = json!({"name": "distillation", "teacher": "teacher", "temperature": 2, "alpha": alpha, "divergence": divergence});
        json!({ "loss": loss })
    };
    let losses = [
        json!({"loss": {"label_smoothing": 0.2}}),
        distillation(0.7, "forward_kl"),
        distillation(1.0, "reverse_kl"),
        distillation(0.5, "jensen_shannon"),
    ];
    let mut native = Vec::new();
    for backend in learners() {
        // Every divergence computes the same way, whatever the ranks.
        let some = if backend.ranks() > 1 { &losses[..2] } else { &losses };
        for (number, more) in some.iter().enumerate() {
            let bench = Bench::new(backend);
            let folder = bench.root.path().join("saved");
            let found = bench.learn(more.clone(), move |learner, context| {
                let ranks = learner.ranks().clone();
                let mut reports = Vec::new();
                for rows in [&[0, 1, 2][..], &[3, 4]] {
                    learner.accumulate(work(&ranks, rows), context)?;
                    reports.push(learner.step(1e-2, None, context)?);
                }
                Ok((reports, saved(learner, &folder, context)?))
            });
            if backend == Backend::Native {
                native.push(found.clone());
            }
            let (expected, expected_tensors) = &native[number];
            for (ours, native) in found.0.iter().zip(expected) {
                near(ours.loss, native.loss, LOSS_BOUND, "losses");
                near(ours.grad_norm, native.grad_norm, NORM_BOUND, "norms");
            }
            are_near(&found.1, expected_tensors, backend);
        }
    }
    let first: Vec<f64> = native.iter().map(|(reports, _)| reports[0].loss).collect();
    assert!((1..first.len()).all(|one| first[..one].iter().all(|other| first[one] != *other)), "{first:?}");
}

#[test]
fn what_is_not_finite_is_said_in_the_same_words() {
    let mut native: Option<Failure> = None;
    for backend in backends_but_replicas() {
        let bench = Bench::new(backend);
        let folder = bench.root.path().join("saved");
        let failed = bench.direct(json!({}), move |backend, params, context| {
            let inputs = Inputs::open(params, context)?;
            let mut learner = open(backend, params, &inputs, context)?.learner;
            saved(&mut *learner, &folder, context)?;
            // The last value of an adapter that has made a step.
            let path = files(&folder)[state::VALUES].last().unwrap().clone();
            let mut bytes = fs::read(&path).unwrap();
            let last = bytes.len() - 4;
            bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
            fs::write(&path, bytes).unwrap();
            learner.restore(Restored { files: files(&folder), optimizer_steps: 1, loss_scaler: None }, context)?;
            let work = work(learner.ranks(), &[0, 1, 2]);
            learner.accumulate(work, context)?;
            learner.step(1e-3, None, context)
        });
        let failure = Failure::from(&failed.unwrap_err());
        let expected = native.get_or_insert_with(|| failure.clone());
        assert_eq!(failure, *expected, "{backend:?}");
    }
    let Failure { messages, help, .. } = native.unwrap();
    assert!(messages.iter().any(|message| message.starts_with("the loss is NaN in step 2")), "{messages:?}");
    assert!(help.is_some_and(|help| help.contains("its rows of the data: 0 (look")), "{messages:?}");
}

#[test]
fn what_one_learner_saved_every_other_takes_up_bit_by_bit() {
    let all = learners();
    let mut shared: Option<(tempfile::TempDir, Vec<TrainedTensor>)> = None;
    // Each takes up what the one before it saved, and trains on.
    for (turn, backend) in all.iter().chain(&all[..1]).enumerate() {
        let bench = Bench::new(*backend);
        let folder = tempfile::tempdir().unwrap();
        let (here, before) = (folder.path().to_owned(), shared.take());
        let from = before.as_ref().map(|(folder, tensors)| (folder.path().join("after"), tensors.clone()));
        let after = bench.learn(json!({}), move |learner, context| {
            if let Some((folder, expected)) = &from {
                let restored = Restored { files: files(folder), optimizer_steps: turn as u64, loss_scaler: None };
                learner.restore(restored, context)?;
                assert_eq!(learner.optimizer_steps(), turn as u64);
                assert_eq!(saved(learner, &here.join("before"), context)?, *expected);
            }
            let work = work(learner.ranks(), &[0, 1, 2]);
            learner.accumulate(work, context)?;
            assert_eq!(learner.step(1e-2, None, context)?.step, turn as u64 + 1);
            saved(learner, &here.join("after"), context)
        });
        assert!(before.is_none_or(|(_, tensors)| tensors != after));
        shared = Some((folder, after));
    }
}

/// A learner that is gone, with its ranks, after some calls.
struct Mortal {
    inner: Option<Box<dyn Learner>>,
    ranks: Ranks,
    left: Rc<Cell<usize>>,
}

impl Mortal {
    /// The learner, for one more call.
    fn call(&mut self) -> Result<&mut dyn Learner, StageError> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            // Its ranks are killed.
            None => self.inner = None,
        }
        match &mut self.inner {
            Some(inner) => Ok(&mut **inner),
            None => Err(StageError::new(Cause::Crashed, "killed")),
        }
    }

    fn known(&self) -> &dyn Learner {
        self.inner.as_deref().expect("what is only known of it is asked while it lives")
    }
}

impl Learner for Mortal {
    fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    fn barrier(&mut self) -> Result<(), StageError> {
        Ok(())
    }

    fn works_ahead(&self) -> bool {
        self.known().works_ahead()
    }

    fn accumulate(&mut self, work: StepWork, context: &mut StageContext) -> Result<(), StageError> {
        self.call()?.accumulate(work, context)
    }

    fn accumulate_documents(
        &mut self,
        work: DocumentWork,
        objective: &dyn DocumentObjective,
        context: &mut StageContext,
    ) -> Result<DocumentReport, StageError> {
        self.call()?.accumulate_documents(work, objective, context)
    }

    fn step(
        &mut self,
        learning_rate: f64,
        ahead: Option<StepWork>,
        context: &mut StageContext,
    ) -> Result<StepReport, StageError> {
        self.call()?.step(learning_rate, ahead, context)
    }

    fn score(&mut self, step: u64, rounds: &mut Rounds<'_>, context: &mut StageContext) -> Result<Scored, StageError> {
        self.call()?.score(step, rounds, context)
    }

    fn score_documents(
        &mut self,
        round: &[Batch],
        scorer: Scorer,
        scope: TargetScope,
        context: &mut StageContext,
    ) -> Result<Vec<ScoredDocuments>, StageError> {
        self.call()?.score_documents(round, scorer, scope, context)
    }

    fn score_continuations(&mut self, contexts: &[Context<'_>]) -> Result<ContinuationScores, StageError> {
        self.call()?.score_continuations(contexts)
    }

    fn share(&mut self, values: &mut [f64]) -> Result<(), StageError> {
        self.call()?.share(values)
    }

    fn save(&mut self, folder: &Path, written: Written, context: &mut StageContext) -> Result<Vec<String>, StageError> {
        let files = self.call()?.save(folder, written, context)?;
        // Killed when the tensors are written, and before the state counts.
        self.call()?;
        Ok(files)
    }

    fn restore(&mut self, saved: Restored, context: &mut StageContext) -> Result<(), StageError> {
        self.call()?.restore(saved, context)
    }

    fn check_frozen(&mut self, context: &mut StageContext) -> Result<(), StageError> {
        self.call()?.check_frozen(context)
    }

    fn optimizer_steps(&self) -> u64 {
        self.known().optimizer_steps()
    }

    fn loss_scaler(&self) -> Option<LossScalerState> {
        self.known().loss_scaler()
    }

    fn peak_memory(&self) -> Option<PeakMemory> {
        self.known().peak_memory()
    }

    fn close(self: Box<Self>, context: &mut StageContext) -> Result<(), StageError> {
        self.inner.expect("it lives").close(context)
    }
}

/// Trains so many steps with a learner that makes so many calls, and returns the bytes of the adapter and of the
/// figures.
fn trained(bench: &Bench, steps: usize, calls: usize) -> Option<[Vec<u8>; 2]> {
    let more = json!({
        "validation": "rows", "eval_steps": 2, "keep_best": true, "max_steps": steps, "epochs": 9, "save_every": 1,
        "scheduler": { "name": "constant" },
    });
    let left = Rc::new(Cell::new(calls));
    let backend = bench.backend;
    BODY.set(Some(Box::new(move |params, context| {
        let left = Rc::clone(&left);
        let open = |inputs: &Inputs, context: &mut StageContext| {
            let opened = open(backend, params, inputs, context)?;
            let ranks = opened.learner.ranks().clone();
            Ok(Opened { learner: Box::new(Mortal { inner: Some(opened.learner), ranks, left }), ..opened })
        };
        session::run(params, open, None, context)
    })));
    match bench.bench().run::<Directed>(bench.parameters(more)) {
        Ok(outputs) => {
            let read = |output: &str, file: &str| fs::read(outputs[output].folder.join(file)).unwrap();
            Some([read("adapter", "adapter_model.safetensors"), read("metrics", "metrics.jsonl")])
        }
        Err(error) => {
            assert_eq!(error.message, "killed", "{backend:?}: {error:?}");
            None
        }
    }
}

#[test]
fn a_run_that_is_killed_between_any_two_messages_ends_as_if_it_had_not_been() {
    // Each attempt starts a process for each rank.
    let steps = if do_everything() { 3 } else { 2 };
    for backend in backends_but_replicas() {
        let expected = trained(&Bench::new(backend), steps, usize::MAX).unwrap();
        // Each attempt goes on from what the one before it saved, and is killed a message later, or three where there
        // are several processes to start.
        let further = if backend.ranks() == 1 || do_everything() { 1 } else { 3 };
        let bench = Bench::new(backend);
        let mut messages = 1;
        let found = loop {
            if let Some(found) = trained(&bench, steps, messages) {
                break found;
            }
            messages += further;
        };
        assert!(messages > 5, "{backend:?} was killed before {messages} messages");
        assert_eq!(found, expected, "{backend:?}");
    }
}

/// Pairs of a chosen and a rejected document beside a reference, of which the chosen one's likelihood counts, too.
#[derive(Debug)]
struct Pairs(TargetScope);

impl DocumentObjective for Pairs {
    fn gathering(&self) -> Gathering {
        Gathering::Groups
    }

    fn scope(&self) -> TargetScope {
        self.0
    }

    fn losses(&self, documents: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError> {
        let mut losses = vec![DocumentLoss::default(); documents.len()];
        for pair in 0..documents.len() / 2 {
            let (chosen, rejected) = (&documents[2 * pair], &documents[2 * pair + 1]);
            assert_eq!((chosen.role, rejected.role, chosen.group), (Role::Chosen, Role::Rejected, rejected.group));
            let gain = |document: &DocumentScore| document.response_log_prob - document.reference_log_prob.unwrap();
            let margin = 0.4 * (gain(chosen) - gain(rejected));
            let (pairs, targets) = (totals.groups as f64, totals.targets as f64);
            let slope = 0.4 / (1.0 + margin.exp()) / pairs;
            losses[2 * pair] = DocumentLoss {
                loss: (-margin).exp().ln_1p() / pairs - 0.3 * chosen.log_prob / targets,
                response_weight: slope,
                document_weight: 0.3 / targets,
            };
            losses[2 * pair + 1].response_weight = -slope;
        }
        Ok(losses)
    }
}

#[test]
fn documents_are_scored_by_the_policy_and_by_the_base_alone() {
    let mut native = None;
    for backend in learners() {
        let bench = Bench::new(backend);
        let found = bench.learn(json!({}), move |learner, context| {
            let ranks = learner.ranks().clone();
            // The base's scores stay where they are when an adapter moves away from it.
            let mut found = Vec::new();
            for step in 0..2 {
                for scope in [TargetScope::Response, TargetScope::Document] {
                    for scorer in [Scorer::Policy, Scorer::Base] {
                        let of_ranks = pairs(&ranks, 0).micro_batches.into_iter();
                        let round: Vec<Batch> =
                            of_ranks.map(|batches| batches.into_iter().next().unwrap_or_default().batch).collect();
                        let mut scores = vec![0.0; 8];
                        let scored = learner.score_documents(&round, scorer, scope, context)?;
                        for (rank, scored) in ranks.fed.clone().zip(scored) {
                            for (document, score) in scored {
                                assert_eq!(score.role, [Role::Chosen, Role::Rejected][document]);
                                scores[4 * rank + 2 * document] = score.response_log_prob;
                                scores[4 * rank + 2 * document + 1] = score.log_prob;
                            }
                        }
                        learner.share(&mut scores)?;
                        found.push(scores);
                    }
                }
                if step == 0 {
                    learner.accumulate(work(&ranks, &[0, 1, 2]), context)?;
                    learner.step(1e-2, None, context)?;
                }
            }
            Ok(found)
        });
        let [policy, base, _, _, after, base_after, ..] = &found[..] else { panic!("{found:?}") };
        // A fresh adapter changes nothing, to the bit; dropout does not draw here.
        assert_eq!((policy, base), (base, base_after), "{backend:?}");
        assert_ne!(after, base, "{backend:?}");
        let expected: &Vec<Vec<f64>> = native.get_or_insert_with(|| found.clone());
        for (ours, native) in found.iter().flatten().zip(expected.iter().flatten()) {
            // One rank has no second micro-batch.
            if *ours != 0.0 && *native != 0.0 {
                near(*ours, *native, LOSS_BOUND, "scores");
            }
        }
    }
}

/// The log of the summed exponentials of the documents' mean losses: the worst of the step counts most.
#[derive(Debug)]
struct Worst;

impl DocumentObjective for Worst {
    fn gathering(&self) -> Gathering {
        Gathering::Step
    }

    fn losses(&self, documents: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError> {
        assert_eq!(documents.len() as u64, totals.documents);
        let mean = |document: &DocumentScore| -document.log_prob / document.targets as f64;
        let total: f64 = documents.iter().map(|document| mean(document).exp()).sum();
        let of = |document: &DocumentScore| DocumentLoss {
            loss: total.ln() / documents.len() as f64,
            response_weight: mean(document).exp() / total / document.targets as f64,
            document_weight: 0.0,
        };
        Ok(documents.iter().map(of).collect())
    }
}

/// Three pairs, of which the first rank has one more.
fn pairs(ranks: &Ranks, step: u32) -> DocumentWork {
    let mut work = DocumentWork { micro_batches: vec![Vec::new(); ranks.fed.len()], ..DocumentWork::default() };
    for pair in 0..3 {
        let mut batch = Batch::default();
        for (document, role) in [Role::Chosen, Role::Rejected].into_iter().enumerate() {
            let row = TokenRow { weights: Vec::new(), ..row(2 * pair + document as u32 + 7 * step) };
            batch.push(pair.into(), &TokenRow { groups: vec![pair.into()], roles: vec![role], ..row });
        }
        let reference_log_probs = vec![-30.0 - f64::from(pair), -31.0];
        work.rows.push(pair.into());
        if let Some(of_rank) = (pair as usize % ranks.size).checked_sub(ranks.fed.start) {
            let documents = DocumentBatch { batch, reference_log_probs };
            work.micro_batches.get_mut(of_rank).into_iter().for_each(|batches| batches.push(documents.clone()));
        }
    }
    work
}

#[test]
fn losses_of_documents_are_those_of_the_native_backend() {
    let objectives: [fn() -> Box<dyn DocumentObjective>; 3] =
        [|| Box::new(Pairs(TargetScope::Response)), || Box::new(Pairs(TargetScope::Document)), || Box::new(Worst)];
    let mut native: Option<Vec<(Vec<StepReport>, Vec<TrainedTensor>)>> = None;
    for backend in learners() {
        let bench = Bench::new(backend);
        let root = bench.root.path().to_owned();
        let found = bench.learn(json!({}), move |learner, context| {
            let ranks = learner.ranks().clone();
            saved(learner, &root.join("fresh"), context)?;
            let mut found = Vec::new();
            for (number, objective) in objectives.iter().enumerate() {
                // One process after the other objective: nothing is started again.
                let fresh = Restored { files: files(&root.join("fresh")), optimizer_steps: 0, loss_scaler: None };
                learner.restore(fresh, context)?;
                let mut reports = Vec::new();
                for step in 0..2 {
                    let loss = learner.accumulate_documents(pairs(&ranks, step), &*objective(), context)?.loss;
                    let report = learner.step(1e-2, None, context)?;
                    if ranks.fed.len() == ranks.size {
                        near(report.loss, loss, 1e-12, "the loss of a step");
                    }
                    reports.push(report);
                }
                found.push((reports, saved(learner, &root.join(number.to_string()), context)?));
            }
            Ok(found)
        });
        let expected = native.get_or_insert_with(|| found.clone());
        for ((reports, tensors), (expected, expected_tensors)) in found.iter().zip(expected.iter()) {
            for (ours, native) in reports.iter().zip(expected) {
                assert_eq!(ours.target_tokens, native.target_tokens);
                near(ours.loss, native.loss, LOSS_BOUND, "losses");
                near(ours.grad_norm, native.grad_norm, NORM_BOUND, "norms");
            }
            are_near(tensors, expected_tensors, backend);
        }
    }
}
