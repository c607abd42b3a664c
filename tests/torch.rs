//! The torch worker beside the native backend: the same losses and adapters, runs that one begins and the other ends, ranks that die or
//! hang.
//!
//! Needs a Python with torch, transformers, peft, safetensors and pyarrow: `PIPELINE_PYTHON`, else `python3`. Where there is none, the
//! tests that compute say so and pass. The worker is taken from `workers/torch` of this repository.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::{Project, Ran};

const PIPELINE: &str = "torch.yaml";

/// How far losses may be apart, relative to the native ones.
const LOSS_BOUND: f64 = 1e-5;

/// How far a value of the adapter may be from the native one, relative to the greatest value of its tensor.
const ADAPTER_BOUND: f64 = 1e-4;

/// The Python that can compute, asked once.
fn python() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let python = std::env::var_os("PIPELINE_PYTHON").unwrap_or_else(|| "python3".into());
        let imports = ["-c", "import torch, transformers, peft, safetensors, pyarrow"];
        let mut command = Command::new(&python);
        command.args(imports).env("TORCH_DEVICE_BACKEND_AUTOLOAD", "0").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success()).then(|| python.into())
    });
    found.as_deref()
}

/// A project for one test at a time: each starts processes that take some GB of memory together.
struct Bench {
    project: Project,
    python: &'static Path,
    _alone: MutexGuard<'static, ()>,
}

impl Bench {
    /// None, and a line that says so, where nothing can compute.
    fn new() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let Some(python) = python() else {
            println!(
                "skipped: no Python with torch, transformers, peft, safetensors and pyarrow (PIPELINE_PYTHON names one)"
            );
            return None;
        };
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Self { project: Project::with_pipeline(PIPELINE), python, _alone: alone })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let worker = Path::new(env!("CARGO_MANIFEST_DIR")).join("workers/torch/src");
        let mut command = self.project.command(arguments);
        command.env("PIPELINE_PYTHON", self.python).env("PYTHONPATH", worker);
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments), arguments)
    }

    fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Trains until so many steps are done.
    fn train(&self, more: &[&str]) -> Ran {
        let all: Vec<&str> = ["run", PIPELINE, "--until", "adapter"].iter().chain(more).copied().collect();
        self.run(&all)
    }

    /// A file of an output, as these overrides make it.
    fn result(&self, output: &str, file: &str, more: &[&str]) -> Vec<u8> {
        let folder = self.project.path("exported");
        let _ = fs::remove_dir_all(&folder);
        let all: Vec<&str> = ["export", PIPELINE, output, "exported"].iter().chain(more).copied().collect();
        self.run(&all).ends_with(0);
        fs::read(folder.join(file)).unwrap()
    }

    fn trained(&self, more: &[&str]) -> Trained {
        let metrics = String::from_utf8(self.result("adapter.metrics", "metrics.jsonl", more)).unwrap();
        let adapter = self.result("adapter.adapter", "adapter_model.safetensors", more);
        Trained { records: metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), adapter }
    }

    /// The ranks that run, by number.
    fn ranks(&self) -> BTreeMap<String, Pid> {
        let processes = self.project.processes().into_iter().filter(|(_, line)| line.contains("pipeline_torch_worker"));
        let rank = |pid: i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let mut variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            Some((variables.find_map(|variable| Some(variable.strip_prefix("RANK=")?.to_owned()))?, Pid::from_raw(pid)))
        };
        processes.filter_map(|(pid, _)| rank(pid)).collect()
    }

    /// The newest saved step.
    fn saved_step(&self) -> Option<u64> {
        let folders = fs::read_dir(self.project.path(".pipeline/store/partial")).into_iter().flatten().flatten();
        let inside = folders.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten().flatten());
        inside.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).max()
    }

    /// Waits until a step after these is saved.
    #[track_caller]
    fn wait_for_a_step_after(&self, steps: u64) {
        let began = Instant::now();
        while self.saved_step().is_none_or(|saved| saved <= steps) {
            assert!(began.elapsed() < Duration::from_secs(300), "no step was saved");
            sleep(Duration::from_millis(5));
        }
    }
}

/// What a training left.
struct Trained {
    records: Vec<Value>,
    adapter: Vec<u8>,
}

impl Trained {
    /// Checks that the figures are those of another training, the losses to their bound.
    #[track_caller]
    fn is_like(&self, other: &Self) {
        assert_eq!(self.records.len(), other.records.len());
        for (ours, theirs) in self.records.iter().zip(&other.records) {
            for name in ["kind", "step", "epoch", "rows", "tokens", "target_tokens", "learning_rate"] {
                assert_eq!(ours[name], theirs[name], "{name} of {ours} and {theirs}");
            }
            let (one, two) = (ours["loss"].as_f64().unwrap(), theirs["loss"].as_f64().unwrap());
            assert!((one - two).abs() <= LOSS_BOUND * two, "losses of {ours} and {theirs}");
        }
        let (ours, theirs) = (tensors(&self.adapter), tensors(&other.adapter));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
        let mut worst = 0.0_f64;
        for (name, values) in &ours {
            let greatest = theirs[name].iter().fold(0.0_f32, |greatest, value| greatest.max(value.abs()));
            let apart = values.iter().zip(&theirs[name]).map(|(one, two)| (one - two).abs()).fold(0.0, f32::max);
            let share = f64::from(apart) / f64::from(greatest);
            assert!(share <= ADAPTER_BOUND, "`{name}` is {share:.1e} of its greatest value apart");
            worst = worst.max(share);
        }
        println!("adapters are at most {worst:.1e} of a tensor's greatest value apart");
    }
}

/// The f32 tensors of a safetensors file.
fn tensors(file: &[u8]) -> BTreeMap<String, Vec<f32>> {
    let (length, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, info)| {
        assert_eq!(info["dtype"], "F32", "{name}");
        let at = |index: usize| info["data_offsets"][index].as_u64().unwrap() as usize;
        let values = data[at(0)..at(1)].chunks_exact(4);
        (name, values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect())
    });
    tensors.collect()
}

#[test]
fn one_and_two_ranks_train_as_the_native_backend_does() {
    let Some(native) = Bench::new() else { return };
    native.train(&[]).ends_with(0);
    let expected = native.trained(&[]);
    assert_eq!(expected.records.iter().filter(|record| record["kind"] == "train").count(), 20);
    for ranks in ["1", "2"] {
        // In a home of its own: the result of the native backend would be taken, since the backend is in no key.
        let home = format!("--home=torch-{ranks}");
        let count = format!("adapter.resources.count={ranks}");
        let more = [home.as_str(), "adapter.backend=torch", count.as_str()];
        native.train(&more).ends_with(0).says("computed by torch, since `backend: torch` asks for it");
        native.trained(&more).is_like(&expected);
    }
}

#[test]
fn a_run_goes_on_with_the_other_backend() {
    let Some(bench) = Bench::new() else { return };
    let plain = ["adapter.scheduler={name: constant}"];
    bench.train(&[&plain[..], &["--home=whole"]].concat()).ends_with(0);
    let expected = bench.trained(&[&plain[..], &["--home=whole"]].concat());
    for (home, first, then) in [("--home=one", "native", "torch"), ("--home=two", "torch", "native")] {
        let backend = |name: &str| format!("adapter.backend={name}");
        let first = [plain[0], home, "adapter.max_steps=8", &backend(first)].map(str::to_owned);
        let then = [plain[0], home, &backend(then)].map(str::to_owned);
        bench.train(&first.each_ref().map(String::as_str)).ends_with(0);
        let went_on = bench.train(&then.each_ref().map(String::as_str));
        went_on.ends_with(0).warns("resuming from step 8 of 20").warns("their last digits may differ");
        bench.trained(&then.each_ref().map(String::as_str)).is_like(&expected);
    }
}

#[test]
fn a_killed_rank_is_named_and_the_next_run_ends_as_if_nothing_had_happened() {
    let Some(bench) = Bench::new() else { return };
    let two = ["adapter.backend=torch", "adapter.resources.count=2", "adapter.max_steps=30", "adapter.save_every=1"];
    bench.train(&[&two[..], &["--home=whole"]].concat()).ends_with(0);
    let expected =
        bench.result("adapter.adapter", "adapter_model.safetensors", &[&two[..], &["--home=whole"]].concat());

    let engine = bench.start(&[&["run", PIPELINE, "--until", "adapter"], &two[..]].concat());
    bench.wait_for_a_step_after(4);
    kill(bench.ranks()["1"], Signal::SIGKILL).unwrap();
    let ended = engine.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("rank 1 of 2 (process ") && said.contains("was killed (SIGKILL)"), "{said}");
    assert!(said.contains("run again to go on from there"), "{said}");
    assert!(bench.ranks().is_empty());
    bench.train(&two).ends_with(0).warns("resuming from step ");
    assert_eq!(bench.result("adapter.adapter", "adapter_model.safetensors", &two), expected);
}

#[test]
fn a_rank_that_hangs_is_noticed() {
    let Some(bench) = Bench::new() else { return };
    let more =
        ["adapter.backend=torch", "adapter.resources.count=2", "adapter.max_steps=2000", "adapter.watchdog_seconds=15"];
    let engine = bench.start(&[&["run", PIPELINE, "--until", "adapter"], &more[..]].concat());
    bench.wait_for_a_step_after(4);
    kill(bench.ranks()["1"], Signal::SIGSTOP).unwrap();
    let ended = engine.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("rank 0 has waited 15 s in `"), "{said}");
    // Lines are broken where the terminal ends.
    let said = said.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("ranks that are stopped, gone or out of reach: 1"), "{said}");
    assert!(bench.ranks().is_empty());
}

#[test]
fn an_interrupt_saves_the_step_and_the_next_run_goes_on() {
    let Some(bench) = Bench::new() else { return };
    let more = ["adapter.backend=torch", "adapter.max_steps=400"];
    let mut engine = bench.start(&[&["run", PIPELINE, "--until", "adapter"], &more[..]].concat());
    bench.wait_for_a_step_after(0);
    kill(Pid::from_raw(engine.id().cast_signed()), Signal::SIGINT).unwrap();
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    assert!(bench.ranks().is_empty());
    bench.train(&more).ends_with(0).warns("resuming from step ");
}

#[test]
fn a_model_is_asked_as_by_the_native_backend() {
    let Some(bench) = Bench::new() else { return };
    bench.run(&["run", PIPELINE]).ends_with(0);
    let figures = |more: &[&str]| -> Value {
        serde_json::from_slice(&bench.result("scores.metrics", "metrics.json", more)).unwrap()
    };
    let answers = |more: &[&str]| String::from_utf8(bench.result("samples.samples", "samples.txt", more)).unwrap();
    let (expected, expected_answers) = (figures(&[]), answers(&[]));
    let torch = ["--home=torch", "scores.backend=torch", "samples.backend=torch", "scores.resources.count=2"];
    bench.run(&[&["run", PIPELINE], &torch[..]].concat()).ends_with(0).says("computed by torch");
    let found = figures(&torch);
    let perplexity = |figures: &Value| figures["perplexity"]["value"].as_f64().unwrap();
    let (one, two) = (perplexity(&found), perplexity(&expected));
    assert!((one - two).abs() <= LOSS_BOUND * two, "{found:#} {expected:#}");
    assert_eq!(found["token_accuracy"], expected["token_accuracy"]);
    assert_eq!(found["exact_match"], expected["exact_match"]);
    assert_eq!(answers(&torch), expected_answers);
}

#[test]
fn a_missing_worker_is_named_with_the_line_that_installs_it() {
    let project = Project::with_pipeline(PIPELINE);
    let python = project.path("python");
    fs::write(&python, "#!/bin/sh\necho '{\"python\": \"3.12.1\", \"torch\": \"2.9.0\"}'\n").unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let arguments = ["run", PIPELINE, "--until", "adapter", "adapter.backend=torch"];
    let mut command = project.command(&arguments);
    command.env("PIPELINE_PYTHON", &python);
    Ran::of(command, &arguments)
        .ends_with(3)
        .warns("the torch worker is not installed")
        .warns("has no pipeline_torch_worker")
        .warns("-m pip install ./workers/torch");
}

#[test]
fn what_a_backend_does_not_compute_is_a_problem_at_its_place() {
    let project = Project::with_pipeline(PIPELINE);
    let refused = |overrides: &[&str], says: &str| {
        project.run(&[&["plan", PIPELINE], overrides].concat()).ends_with(2).warns(says);
    };
    refused(&["adapter.backend=native", "adapter.dtype=f16"], "`dtype: f16` is for `backend: torch`");
    refused(&["scores.backend=torch", "scores.dtype=int8"], "`dtype: int8` is for `backend: native`");
    refused(&["adapter.env={RANK: \"1\"}"], "`RANK` is a variable that the stage's processes are given");
    refused(&["adapter.env={WANDB_API_KEY: abcd}"], "`WANDB_API_KEY` looks like a secret");
    project.run(&["plan", PIPELINE, "adapter.dtype=f16"]).ends_with(0);
}
