//! Training on several worker processes: the numbers of one, whatever dies or stands still.

use std::collections::BTreeMap;
use std::fs;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_harness::test;

use crate::support::{Project, Ran};

const PIPELINE: &str = "workers.yaml";
const PATIENCE: Duration = Duration::from_secs(60);

/// What a run made: the records of its steps and validations, and its tensors.
struct Made {
    records: Vec<Value>,
    tensors: BTreeMap<String, Vec<f32>>,
    bytes: Vec<u8>,
}

fn run(project: &Project, arguments: &[&str]) -> Ran {
    project.run(&[&["run", PIPELINE], arguments].concat())
}

fn made(project: &Project, arguments: &[&str]) -> Made {
    let export = |output: &str, file: &str| {
        let folder = project.path("exported");
        if folder.exists() {
            fs::remove_dir_all(&folder).unwrap();
        }
        project.run(&[&["export", PIPELINE, output, "exported"], arguments].concat()).ends_with(0);
        fs::read(folder.join(file)).unwrap()
    };
    let full = arguments.contains(&"adapter.method=full");
    let bytes = if full {
        export("adapter.model", "model.safetensors")
    } else {
        export("adapter.adapter", "adapter_model.safetensors")
    };
    let records = String::from_utf8(export("adapter.metrics", "metrics.jsonl")).unwrap();
    let records = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    Made { records, tensors: tensors(&bytes), bytes }
}

/// The f32 tensors of a safetensors file.
fn tensors(file: &[u8]) -> BTreeMap<String, Vec<f32>> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let described = header.into_iter().filter(|(name, _)| name != "__metadata__");
    described
        .map(|(name, tensor)| {
            assert_eq!(tensor["dtype"], "F32", "{name}");
            let at = |index: usize| 8 + length + tensor["data_offsets"][index].as_u64().unwrap() as usize;
            let values = file[at(0)..at(1)].chunks_exact(4);
            (name, values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect())
        })
        .collect()
}

/// Losses to 1e-6 relative, tensors to 1e-5 of their largest value; all that is counted alike.
#[track_caller]
fn assert_same_numbers(one: &Made, other: &Made, what: &str) {
    assert_eq!(one.records.len(), other.records.len(), "{what}");
    for (one, other) in one.records.iter().zip(&other.records) {
        for name in ["kind", "step", "epoch", "rows", "tokens", "target_tokens", "best"] {
            assert_eq!(one[name], other[name], "{what}: {name}");
        }
        let [first, second] = [one, other].map(|record| record["loss"].as_f64().unwrap());
        assert!((first - second).abs() <= 1e-6 * first.abs(), "{what}: {one} and {other}");
    }
    assert!(one.tensors.keys().eq(other.tensors.keys()), "{what}");
    for (name, values) in &one.tensors {
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let pairs = values.iter().zip(&other.tensors[name]);
        let furthest = pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
        assert!(furthest <= 1e-5 * largest, "{what}: {name}: {furthest} of {largest}");
    }
}

#[test]
fn one_two_and_four_workers_learn_the_same() {
    for (what, more) in [
        ("lora, dropout, clipping", &["adapter.lora.dropout=0.1", "adapter.clip_grad_norm=0.5"][..]),
        ("full", &["adapter.method=full", "adapter.lora=null", "adapter.activation_checkpointing=true"]),
        ("packed", &["adapter.data=packs", "adapter.micro_batch_size=1"]),
        ("the kernels that GPUs have, whose weights nobody shares", &["adapter.kernels=candle"]),
        (
            "fewer rows than workers",
            &["adapter.micro_batch_size=3", "adapter.gradient_accumulation_steps=1", "adapter.max_steps=8"],
        ),
        (
            "validation, its best step",
            &[
                "adapter.validation=held_out_tokens",
                "adapter.eval_steps=3",
                "adapter.keep_best=true",
                "adapter.leftover=drop",
            ],
        ),
    ] {
        let of = |count: &str| {
            let count = format!("adapter.resources.count={count}");
            let project = Project::with_pipeline(PIPELINE);
            let arguments = [more, &[&count]].concat();
            run(&project, &arguments).ends_with(0);
            // How many there are is in no key.
            run(&project, more).ends_with(0).warns("nothing to do");
            made(&project, more)
        };
        let [one, two, four] = ["1", "2", "4"].map(of);
        assert_same_numbers(&one, &two, &format!("{what}, 2 workers"));
        assert_same_numbers(&one, &four, &format!("{what}, 4 workers"));
    }
}

/// Steps enough to meet a run in the middle.
const LONG: [&str; 2] = ["adapter.epochs=50", "adapter.scheduler.name=constant"];

/// The processes of the training but its first, as soon as there are so many and a step is saved.
#[track_caller]
fn others(project: &Project, engine: &mut Child, count: usize) -> Vec<Pid> {
    let began = Instant::now();
    loop {
        let members = project.processes().into_iter().filter(|(_, line)| line.contains("__member"));
        let members: Vec<Pid> = members.map(|(pid, _)| Pid::from_raw(pid)).collect();
        if members.len() == count && saved_step(project).is_some() {
            return members;
        }
        assert!(engine.try_wait().unwrap().is_none(), "the run ended before it was met");
        assert!(began.elapsed() < PATIENCE, "no worker was started, or no step saved");
        sleep(Duration::from_millis(1));
    }
}

fn saved_step(project: &Project) -> Option<u64> {
    let working = fs::read_dir(project.path(".pipeline/store/partial")).into_iter().flatten().flatten();
    let inside = working.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten().flatten());
    inside.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).max()
}

#[track_caller]
fn nothing_is_left_alive(project: &Project) {
    let began = Instant::now();
    while !project.processes().is_empty() {
        assert!(began.elapsed() < PATIENCE, "still alive: {:?}", project.processes());
        sleep(Duration::from_millis(10));
    }
}

fn ended(engine: Child) -> (Option<i32>, String) {
    let output = engine.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_killed_worker_is_named_and_the_next_attempt_goes_on_from_the_last_saved_step() {
    let whole = Project::with_pipeline(PIPELINE);
    run(&whole, &LONG).ends_with(0);
    let project = Project::with_pipeline(PIPELINE);
    project.edit(PIPELINE, "    resources: {", "    retries: { max: 1, delay: 0s }\n    resources: {");
    let mut engine = project.start(&["run", PIPELINE, LONG[0], LONG[1]]);
    let worker = others(&project, &mut engine, 1)[0];
    kill(worker, Signal::SIGKILL).unwrap();
    let (code, said) = ended(engine);
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "rank 1 of 2 is lost in step ",
        "while rank 0 waits for it in the ",
        "it was killed (SIGKILL)",
        "resuming from step",
    ] {
        assert!(said.contains(part), "no `{part}`:\n{said}");
    }
    assert!(made(&project, &LONG).bytes == made(&whole, &LONG).bytes, "the run ended with other bytes");
}

#[test]
fn a_worker_that_stands_still_is_noticed_and_all_are_stopped() {
    let project = Project::with_pipeline(PIPELINE);
    let mut engine =
        project.start(&["run", PIPELINE, LONG[0], LONG[1], "adapter.watchdog_seconds=1", "adapter.resources.count=3"]);
    let stopped = others(&project, &mut engine, 2)[0];
    kill(stopped, Signal::SIGSTOP).unwrap();
    let (code, said) = ended(engine);
    assert_eq!(code, Some(1), "{said}");
    let message = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [" of 3 is lost in step ", "is stopped (SIGSTOP), and has done nothing for 1 s"] {
        assert!(message.contains(part), "no `{part}`:\n{said}");
    }
    nothing_is_left_alive(&project);
}

#[test]
fn a_killed_engine_leaves_no_worker_and_another_number_of_workers_goes_on() {
    let whole = Project::with_pipeline(PIPELINE);
    run(&whole, &LONG).ends_with(0);
    let project = Project::with_pipeline(PIPELINE);
    let mut engine = project.start(&["run", PIPELINE, LONG[0], LONG[1]]);
    others(&project, &mut engine, 1);
    engine.kill().unwrap();
    engine.wait().unwrap();
    nothing_is_left_alive(&project);
    let alone = run(&project, &[LONG[0], LONG[1], "adapter.resources.count=1"]).ends_with(0);
    alone.warns("resuming from step").warns("2 workers").warns("their last digits may differ");
    assert_same_numbers(&made(&whole, &LONG), &made(&project, &LONG), "begun by two, ended by one");
}

/// A size in `/proc/PID/smaps_rollup`, in bytes.
fn held(process: Pid, name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[test]
fn frozen_weights_lie_once_in_memory() {
    let project = Project::with_pipeline(PIPELINE);
    let shape = ["fresh.hidden_size=512", "fresh.intermediate_size=2048", "fresh.num_hidden_layers=4"];
    let weights: u64 = 4 * (4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 2048) + 300 * 512);
    let mut engine = project.start(
        &[&["run", PIPELINE, "adapter.epochs=1000", "adapter.save_every=1", "adapter.resources.count=4"][..], &shape]
            .concat(),
    );
    let mut all = others(&project, &mut engine, 3);
    let leader =
        project.processes().into_iter().find(|(_, line)| line.contains("__stage") && line.contains("/adapter/"));
    all.push(Pid::from_raw(leader.unwrap().0));
    let sums =
        ["Pss", "Pss_Shmem", "Anonymous"].map(|name| all.iter().map(|pid| held(*pid, name).unwrap()).sum::<u64>());
    let _ = kill(Pid::from_raw(i32::try_from(engine.id()).unwrap()), Signal::SIGKILL);
    engine.wait().unwrap();
    nothing_is_left_alive(&project);
    let [proportional, shared, anonymous] = sums.map(|bytes| bytes as f64 / weights as f64);
    println!("in multiples of the weights: {proportional:.2} in all, {shared:.2} shared, {anonymous:.2} of their own");
    assert!(shared > 1.0 && shared < 1.5, "{shared}");
    // Four times the weights would be four.
    assert!(proportional < 3.0, "{proportional}");
}
