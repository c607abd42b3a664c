//! The whole way on NPUs, none of which is one: `npu-smi` is a script that prints what the real one did, and torch_npu
//! a module of the worker's tests that computes on the processor.

use std::env;
use std::fs;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use test_harness::{Unmet, test};

use crate::bench::{Bench, LOSS_BOUND, PIPELINE, Trained, worker};
use crate::support::Ran;
use crate::support::fake_tools::FakeTools;

pub(crate) const DEVICES: &str = "ASCEND_RT_VISIBLE_DEVICES";

/// What becomes of the adapter is asked, and not the adapter on its base.
const MERGED: [(&str, &str); 3] = [
    ("  scores:\n", "  merged:\n    uses: merge\n    with: { model: fresh, adapter: adapter }\n  scores:\n"),
    ("with: { model: fresh, adapter: adapter, data: held_out", "with: { model: merged, data: held_out"),
    ("      model: fresh\n      adapter: adapter\n", "      model: merged\n"),
];

/// The stages that compute on NPUs.
const STAGES: [&str; 3] = ["adapter", "scores", "samples"];

/// Takes three NPUs, says which, and keeps them until it is let go.
const HOLD: &str = "version: 1
stages:
  held:
    uses: command
    with:
      run: |
        echo $ASCEND_RT_VISIBLE_DEVICES > \"$HELD\"
        while [ ! -e \"$RELEASED\" ]; do sleep 0.1; done
      env: { HELD: HELD_FILE, RELEASED: RELEASED_FILE }
    resources: { device: npu, count: 3 }
";

/// A machine of eight NPUs.
pub(crate) struct Machine {
    pub bench: Bench,
    tools: FakeTools,
}

impl Machine {
    pub(crate) fn new() -> Result<Self, Unmet> {
        let mut bench = Bench::new()?;
        bench.witness(&["RANK", "WORLD_SIZE", DEVICES]);
        let tools = FakeTools::new();
        tools.npu_smi("910b3x8.info.txt", "910b3x8.topo.txt");
        tools.script("sh", "exec /bin/sh \"$@\"");
        Ok(Self { bench, tools })
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.bench.command(arguments);
        self.tools.give_to(&mut command);
        let path = env::join_paths([worker("src"), worker("tests")]).unwrap();
        command.env("PIPELINE_PYTHON", &self.bench.python).env("PYTHONPATH", path);
        command.env("PIPELINE_TORCH_WORKER_NPU_MODULE", "fake_npu");
        command.env("PIPELINE_LEASES", self.bench.project.path("leases"));
        command
    }
}

/// The numbers in a list of devices.
fn numbers(list: &str) -> Vec<u32> {
    list.split(',').map(|number| number.parse().unwrap()).collect()
}

/// A run that has taken three of the NPUs.
struct Holder {
    engine: Child,
    /// Their numbers.
    held: Vec<u32>,
}

impl Holder {
    fn start(machine: &Machine) -> Self {
        let project = &machine.bench.project;
        let file = |name: &str| project.path(name).display().to_string();
        project
            .write("hold.yaml", &HOLD.replace("HELD_FILE", &file("held")).replace("RELEASED_FILE", &file("released")));
        let mut engine = machine.command(&["run", "hold.yaml", "--home=hold"]).spawn().unwrap();
        let held = loop {
            assert!(engine.try_wait().unwrap().is_none(), "the run that takes devices has ended");
            match fs::read_to_string(project.path("held")) {
                Ok(text) if text.ends_with('\n') => break numbers(text.trim()),
                _ => sleep(Duration::from_millis(20)),
            }
        };
        Self { engine, held }
    }

    fn release(mut self, machine: &Machine) {
        machine.bench.project.write("released", "");
        assert!(self.engine.wait().unwrap().success());
    }
}

/// Figures of a run of the whole file.
struct Made {
    trained: Trained,
    perplexity: f64,
    answers: Vec<u8>,
}

impl Made {
    fn of(bench: &Bench, more: &[&str]) -> Self {
        let metrics: Value = serde_json::from_slice(&bench.result("scores.metrics", "metrics.json", more)).unwrap();
        Self {
            trained: bench.trained(more),
            perplexity: metrics["perplexity"]["value"].as_f64().unwrap(),
            answers: bench.result("samples.samples", "samples.txt", more),
        }
    }

    #[track_caller]
    fn is_like(&self, other: &Self) {
        self.trained.is_like(&other.trained);
        let (one, two) = (self.perplexity, other.perplexity);
        assert!((one - two).abs() <= LOSS_BOUND * two, "perplexities {one} and {two}");
        assert_eq!(self.answers, other.answers);
    }
}

/// Training, merging, scoring and answering on one NPU and on two, while another run has three of the machine's eight.
#[test]
fn the_whole_way_on_npus_gives_what_it_gives_on_the_processor() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    let bench = &machine.bench;
    for (from, to) in MERGED {
        bench.project.edit(PIPELINE, from, to);
    }
    let same = ["adapter.max_steps=10", "adapter.eval_steps=5", "scores.metrics=[perplexity]"];
    bench.run(&[&["run", PIPELINE], &same[..]].concat()).ends_with(0);
    let expected = Made::of(bench, &same);
    let holder = Holder::start(&machine);
    for count in [1, 2] {
        let given = STAGES.map(|stage| format!("{stage}.resources={{ device: npu, count: {count}, threads: 1 }}"));
        let home = format!("--home=npu-{count}");
        let more = [&same[..], &[home.as_str()], &given.each_ref().map(String::as_str)].concat();
        let arguments = [&["run", PIPELINE], &more[..]].concat();
        let ran = Ran::of(machine.command(&arguments), &arguments).ends_with(0);
        let ran = ran.says("computed by torch, since this program does not compute on npu");
        assert_eq!(ran.stdout.matches("not yet run on hardware: npu").count(), STAGES.len(), "{ran}");
        Made::of(bench, &more).is_like(&expected);
        let ranks = bench.witnessed();
        assert_eq!(ranks.len(), STAGES.len() * count, "{ranks:?}");
        for rank in &ranks {
            let devices = numbers(rank[DEVICES].as_str().unwrap());
            assert_eq!(devices.len(), count, "{rank}");
            // Those of the other run, its own, and perhaps those of a stage beside it.
            assert!(rank["leases"].as_u64() >= Some(3 + count as u64), "{rank}");
            assert!(devices.is_sorted_by(|one, next| one < next), "{rank}");
            assert!(devices.iter().all(|device| *device < 8 && !holder.held.contains(device)), "{rank}");
        }
    }
    holder.release(&machine);
    Ok(())
}
