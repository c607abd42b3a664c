//! A project whose stages compute with PyTorch, and what a training of it left.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use serde_json::Value;
use test_harness::{Requirement, Unmet};

use crate::support::{Project, Ran};

pub(crate) const PIPELINE: &str = "torch.yaml";

/// How far losses may be apart, relative to the native ones.
pub(crate) const LOSS_BOUND: f64 = 1e-5;

/// How far a value of the adapter may be from the native one, relative to the greatest value of its tensor.
const ADAPTER_BOUND: f64 = 1e-4;

/// Looks for what the worker needs. To import it would take seconds.
const LOOK: &str = "
import importlib.util, sys
names = ('torch', 'transformers', 'peft', 'safetensors', 'numpy')
sys.exit(any(importlib.util.find_spec(name) is None for name in names))";

/// Looks for bitsandbytes as well.
const LOOK_FOR_BITSANDBYTES: &str = "
import importlib.util, sys
sys.exit(importlib.util.find_spec('bitsandbytes') is None)";

const LACKING: &str = "no Python with torch, transformers, peft, safetensors and numpy (PIPELINE_PYTHON names one)";

/// Writes down, before a rank begins, some of its variables, and how many leases of devices are held.
const WITNESS: &str = "
import fcntl, glob, json, os, sys
def is_held(path):
    try:
        fcntl.flock(open(path), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
seen = {name: os.environ.get(name) for name in sys.argv[1:]}
seen['leases'] = sum(map(is_held, glob.glob(os.environ.get('PIPELINE_LEASES', '/nowhere') + '/*.lock')))
print(json.dumps(seen))";

/// The Python that can compute, asked once.
fn python() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let python = std::env::var_os("PIPELINE_PYTHON").unwrap_or_else(|| "python3".into());
        let mut command = Command::new(&python);
        command.args(["-c", LOOK]).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success()).then(|| python.into())
    });
    found.as_deref()
}

/// A folder of the worker's package.
pub(crate) fn worker(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("workers/torch").join(folder)
}

/// One of the tests that run beside each other: two at most, since each starts processes that take some GB of memory
/// together, and computes with one core most of the time.
struct Turn;

static FREE_TURNS: (Mutex<usize>, Condvar) = (Mutex::new(2), Condvar::new());

impl Turn {
    fn wait() -> Self {
        let (free, freed) = &FREE_TURNS;
        let free = free.lock().unwrap();
        *freed.wait_while(free, |free| *free == 0).unwrap() -= 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (free, freed) = &FREE_TURNS;
        *free.lock().unwrap() += 1;
        freed.notify_one();
    }
}

/// A project whose stages compute with PyTorch.
pub(crate) struct Bench {
    pub project: Project,
    pub python: PathBuf,
    _turn: Turn,
}

impl Bench {
    /// Fails where nothing can compute.
    pub(crate) fn new() -> Result<Self, Unmet> {
        Self::of(PIPELINE)
    }

    /// The same, for another pipeline of `tests/pipelines`.
    pub(crate) fn of(pipeline: &str) -> Result<Self, Unmet> {
        let python = python().ok_or_else(|| Requirement::Torch.unmet(LACKING))?;
        let turn = Turn::wait();
        Ok(Self { project: Project::with_pipeline(pipeline), python: python.to_owned(), _turn: turn })
    }

    /// The same, where weights in 4 bits can be computed with.
    pub(crate) fn with_bitsandbytes(self) -> Result<Self, Unmet> {
        let found = Command::new(&self.python).args(["-c", LOOK_FOR_BITSANDBYTES]).status();
        match found.is_ok_and(|status| status.success()) {
            true => Ok(self),
            false => Err(Requirement::Torch.unmet("no bitsandbytes beside torch")),
        }
    }

    /// Writes down some variables of each rank from here on, for [`Bench::witnessed`].
    pub(crate) fn witness(&mut self, variables: &[&str]) {
        let (real, seen) = (self.python.display(), self.project.path("witnessed"));
        let (look, variables) = (self.project.path("witness.py"), variables.join(" "));
        fs::write(&look, WITNESS).unwrap();
        let look = format!("'{real}' -SE '{}' {variables} >> '{}'", look.display(), seen.display());
        let script = format!("#!/bin/sh\nif [ \"$1\" = -m ]; then {look}; fi\nexec '{real}' \"$@\"\n");
        let python = self.project.path("python");
        fs::write(&python, script).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        self.python = python;
    }

    /// What was written down of each rank since the last time, in the order in which they began.
    pub(crate) fn witnessed(&self) -> Vec<Value> {
        let path = self.project.path("witnessed");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let _ = fs::remove_file(path);
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.project.command(arguments);
        command.env("PIPELINE_PYTHON", &self.python).env("PYTHONPATH", worker("src"));
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments), arguments)
    }

    pub(crate) fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Trains until so many steps are done.
    pub(crate) fn train(&self, more: &[&str]) -> Ran {
        self.run(&[&["run", PIPELINE, "--until", "adapter"], more].concat())
    }

    /// A file of an output, as these overrides make it.
    pub(crate) fn result(&self, output: &str, file: &str, more: &[&str]) -> Vec<u8> {
        let folder = self.project.path("exported");
        let _ = fs::remove_dir_all(&folder);
        self.run(&[&["export", PIPELINE, output, "exported"], more].concat()).ends_with(0);
        fs::read(folder.join(file)).unwrap()
    }

    /// The adapter and its figures.
    pub(crate) fn trained(&self, more: &[&str]) -> Trained {
        let adapter = self.result("adapter.adapter", "adapter_model.safetensors", more);
        Trained { records: self.records(more), weights: adapter }
    }

    /// The figures of the training.
    pub(crate) fn records(&self, more: &[&str]) -> Vec<Value> {
        let metrics = String::from_utf8(self.result("adapter.metrics", "metrics.jsonl", more)).unwrap();
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// What two ranks of PyTorch make of the file as it is: trained once for all tests.
    pub(crate) fn trained_by_two_ranks(&self) -> &'static Trained {
        static TRAINED: OnceLock<Trained> = OnceLock::new();
        TRAINED.get_or_init(|| {
            // In a home of its own: the result of the native backend would be taken, since the backend is in no key.
            let more = ["--home=two-ranks", "adapter.backend=torch", "adapter.resources.count=2"];
            self.train(&more).ends_with(0).says("computed by torch");
            self.trained(&more)
        })
    }

    /// The ranks that run, by number.
    pub(crate) fn ranks(&self) -> BTreeMap<String, Pid> {
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
    pub(crate) fn wait_for_a_step_after(&self, steps: u64) {
        let began = Instant::now();
        while self.saved_step().is_none_or(|saved| saved <= steps) {
            assert!(began.elapsed() < Duration::from_secs(300), "no step was saved");
            sleep(Duration::from_millis(5));
        }
    }
}

/// What a training left.
pub(crate) struct Trained {
    pub records: Vec<Value>,
    /// A safetensors file.
    pub weights: Vec<u8>,
}

impl Trained {
    /// Checks that the figures are those of another training, the losses to their bound.
    #[track_caller]
    pub(crate) fn is_like(&self, other: &Self) {
        assert_eq!(self.records.len(), other.records.len());
        for (ours, theirs) in self.records.iter().zip(&other.records) {
            for name in ["kind", "step", "epoch", "rows", "tokens", "target_tokens", "learning_rate"] {
                assert_eq!(ours[name], theirs[name], "{name} of {ours} and {theirs}");
            }
            let (one, two) = (ours["loss"].as_f64().unwrap(), theirs["loss"].as_f64().unwrap());
            assert!((one - two).abs() <= LOSS_BOUND * two, "losses of {ours} and {theirs}");
        }
        let (ours, theirs) = (tensors(&self.weights), tensors(&other.weights));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
        let mut worst = 0.0_f64;
        for (name, values) in &ours {
            let greatest = theirs[name].iter().fold(0.0_f32, |greatest, value| greatest.max(value.abs()));
            let apart = values.iter().zip(&theirs[name]).map(|(one, two)| (one - two).abs()).fold(0.0, f32::max);
            let share = f64::from(apart) / f64::from(greatest);
            assert!(share <= ADAPTER_BOUND, "`{name}` is {share:.1e} of its greatest value apart");
            worst = worst.max(share);
        }
        println!("weights are at most {worst:.1e} of a tensor's greatest value apart");
    }
}

/// The losses of the steps, without those of validations.
pub(crate) fn losses(records: &[Value]) -> Vec<f64> {
    records.iter().filter(|record| record["kind"] == "train").map(|record| record["loss"].as_f64().unwrap()).collect()
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
