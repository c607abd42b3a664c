//! Training from the command line: exact resume, and what decides a result.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::Project;

/// Steps of the long run: enough to be killed in the middle.
const LONG: &str = "adapter.epochs=150";

/// The trained adapter's weights file, byte for byte.
fn adapter(project: &Project, arguments: &[&str]) -> Vec<u8> {
    export(project, "adapter.adapter", arguments, "adapter_model.safetensors")
}

/// A file of a stage's output.
fn export(project: &Project, output: &str, arguments: &[&str], file: &str) -> Vec<u8> {
    let folder = project.path("exported");
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    let all: Vec<&str> = ["export", "lora.yaml", output, "exported"].iter().chain(arguments).copied().collect();
    project.run(&all).ends_with(0);
    fs::read(folder.join(file)).unwrap()
}

/// The losses of a run, step by step.
fn losses(project: &Project, arguments: &[&str]) -> Vec<f64> {
    let lines = String::from_utf8(export(project, "adapter.metrics", arguments, "metrics.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

/// The tensors of a safetensors file as one list of numbers.
fn numbers(file: &[u8]) -> Vec<f32> {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[8 + header..].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// The newest saved step of the run.
fn saved_step(project: &Project) -> Option<u64> {
    let folders = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    folders(project.path(".pipeline/store/partial"))
        .flat_map(folders)
        .filter_map(|path| path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok())
        .max()
}

/// Starts the long run and kills a process of it with SIGKILL once it has saved a step after `after`.
fn kill_after(project: &Project, after: u64, victim: &str) -> u64 {
    let mut engine = project.start(&["run", "lora.yaml", LONG]);
    let began = Instant::now();
    while saved_step(project).is_none_or(|step| step <= after) {
        assert!(engine.try_wait().unwrap().is_none(), "the run ended before it could be killed");
        assert!(began.elapsed() < Duration::from_secs(60), "no step was saved");
        sleep(Duration::from_millis(1));
    }
    let stage = project.processes().into_iter().find(|(_, line)| line.contains("__stage"));
    match (victim, stage) {
        ("stage", Some((pid, _))) => kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap(),
        _ => engine.kill().unwrap(),
    }
    engine.wait().unwrap();
    let began = Instant::now();
    while !project.processes().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "still alive: {:?}", project.processes());
        sleep(Duration::from_millis(10));
    }
    saved_step(project).unwrap()
}

#[test]
fn a_run_killed_three_times_ends_with_the_bytes_of_an_uninterrupted_one() {
    let whole = Project::with_pipeline("lora.yaml");
    whole.run(&["run", "lora.yaml", LONG]).ends_with(0);
    let project = Project::with_pipeline("lora.yaml");
    let mut step = 0;
    for victim in ["engine", "stage", "engine"] {
        step = kill_after(&project, step + 20, victim);
    }
    project.run(&["run", "lora.yaml", LONG]).ends_with(0).warns("resuming from step");
    assert_eq!(adapter(&project, &[LONG]), adapter(&whole, &[LONG]));
    assert_eq!(losses(&project, &[LONG]), losses(&whole, &[LONG]));
}

#[test]
fn a_damaged_saved_step_is_passed_over_for_the_one_before() {
    let whole = Project::with_pipeline("lora.yaml");
    whole.run(&["run", "lora.yaml", LONG]).ends_with(0);
    let project = Project::with_pipeline("lora.yaml");
    let step = kill_after(&project, 20, "engine");
    let partial = fs::read_dir(project.path(".pipeline/store/partial")).unwrap().flatten();
    let state = partial
        .map(|entry| entry.path().join(format!("step-{step}/exp_avg.safetensors")))
        .find(|path| path.exists())
        .unwrap();
    let mut bytes = fs::read(&state).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&state, bytes).unwrap();
    project.run(&["run", "lora.yaml", LONG]).ends_with(0).warns("passing over a saved step");
    assert_eq!(adapter(&project, &[LONG]), adapter(&whole, &[LONG]));
}

#[test]
fn a_longer_run_continues_where_the_schedule_allows_and_starts_over_where_not() {
    for (schedule, says) in [("constant", "resuming from step 48 of 96"), ("cosine", "starting over")] {
        let name = format!("adapter.scheduler.name={schedule}");
        let project = Project::with_pipeline("lora.yaml");
        project.run(&["run", "lora.yaml", &name]).ends_with(0);
        project.run(&["run", "lora.yaml", &name, "adapter.epochs=16"]).ends_with(0).warns(says);
        let at_once = Project::with_pipeline("lora.yaml");
        at_once.run(&["run", "lora.yaml", &name, "adapter.epochs=16"]).ends_with(0);
        let long = [name.as_str(), "adapter.epochs=16"];
        assert_eq!(adapter(&project, &long), adapter(&at_once, &long), "{schedule}");
    }
}

#[test]
fn how_a_step_is_split_changes_memory_and_not_the_result() {
    let mut runs = Vec::new();
    for (micro_batch, accumulation) in [(1, 8), (2, 4), (4, 2), (8, 1)] {
        let project = Project::with_pipeline("lora.yaml");
        let split = [
            format!("adapter.micro_batch_size={micro_batch}"),
            format!("adapter.gradient_accumulation_steps={accumulation}"),
        ];
        let split = [split[0].as_str(), split[1].as_str()];
        project.run(&["run", "lora.yaml", split[0], split[1]]).ends_with(0);
        // The split is in no key: another one finds the result.
        let other = ["adapter.micro_batch_size=8", "adapter.gradient_accumulation_steps=1", "adapter.save_every=50"];
        project.run(&["run", "lora.yaml", other[0], other[1], other[2]]).ends_with(0).warns("nothing to do");
        runs.push((losses(&project, &split), numbers(&adapter(&project, &split))));
    }
    let (first_losses, first) = &runs[0];
    let largest = first.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    for (losses, adapter) in &runs[1..] {
        for (one, other) in first_losses.iter().zip(losses) {
            assert!((one - other).abs() <= 1e-6 * one.abs(), "{one} and {other}");
        }
        for (one, other) in first.iter().zip(adapter) {
            assert!((one - other).abs() <= 1e-5 * largest, "{one} and {other} of {largest}");
        }
    }
}

#[test]
fn a_merge_is_proved_and_says_how() {
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml"]).ends_with(0);
    export(&project, "merged", &[], "merge_report.json");
    let report: Value = serde_json::from_slice(&fs::read(project.path("exported/merge_report.json")).unwrap()).unwrap();
    assert_eq!(report["merged_tensors"], 6);
    assert_eq!(report["proof"]["top_1_agreement"], 1.0);
    assert!(report["proof"]["max_abs_logit_difference"].as_f64() <= report["proof"]["bound"].as_f64(), "{report}");
}

#[test]
fn an_adapter_of_other_weights_is_refused_though_its_shape_fits() {
    let project = Project::with_pipeline("lora.yaml");
    let text = fs::read_to_string(project.path("lora.yaml")).unwrap();
    let other = text.lines().skip_while(|line| *line != "  fresh:").take_while(|line| *line != "  tokens:");
    let other: String = other.map(|line| format!("{}\n", line.replace("fresh:", "other:"))).collect();
    project.write("lora.yaml", &format!("{text}{other}      seed: 7\n"));
    project.run(&["run", "lora.yaml", "merged.model=other"]).ends_with(1).warns("was trained on another model");
    project.run(&["run", "lora.yaml"]).ends_with(0);
}
