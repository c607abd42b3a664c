//! Training from the command line: exact resume, and what decides a result.

use std::fs;

use serde_json::Value;
use test_harness::test;

use crate::support::Project;

/// The trained adapter's weights file, byte for byte.
fn adapter(project: &Project, file: &str, arguments: &[&str]) -> Vec<u8> {
    export(project, file, "adapter.adapter", arguments, "adapter_model.safetensors")
}

/// A file of a stage's output.
fn export(project: &Project, pipeline: &str, output: &str, arguments: &[&str], file: &str) -> Vec<u8> {
    let folder = project.path("exported");
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    let all: Vec<&str> = ["export", pipeline, output, "exported"].iter().chain(arguments).copied().collect();
    project.run(&all).ends_with(0);
    fs::read(folder.join(file)).unwrap()
}

/// The losses of a run, step by step.
fn losses(project: &Project, arguments: &[&str]) -> Vec<f64> {
    let lines = export(project, "lora.yaml", "adapter.metrics", arguments, "metrics.jsonl");
    let lines = String::from_utf8(lines).unwrap();
    lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

/// The tensors of a safetensors file as one list of numbers.
fn numbers(file: &[u8]) -> Vec<f32> {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[8 + header..].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn a_longer_run_continues_where_the_schedule_allows_and_starts_over_where_not() {
    for (schedule, longer, says) in [
        ("constant", "adapter.epochs=16", "resuming from step 48 of 96"),
        ("inverse_sqrt", "adapter.epochs=9", "resuming from step 48 of 54"),
        ("constant", "adapter.max_steps=40", "starting over: the saved run is at step 48, beyond the 40 steps"),
        ("cosine", "adapter.epochs=16", "starting over: the saved run of 48 steps had another learning rate"),
        ("linear", "adapter.max_steps=47", "starting over: the saved run of 48 steps had another learning rate"),
    ] {
        let name = format!("adapter.scheduler.name={schedule}");
        let project = Project::with_pipeline("lora.yaml");
        project.run(&["run", "lora.yaml", &name]).ends_with(0);
        project.run(&["run", "lora.yaml", &name, longer]).ends_with(0).warns(says);
        let at_once = Project::with_pipeline("lora.yaml");
        at_once.run(&["run", "lora.yaml", &name, longer]).ends_with(0);
        let long = [name.as_str(), longer];
        let [continued, at_once] = [&project, &at_once].map(|project| adapter(project, "lora.yaml", &long));
        assert_eq!(continued, at_once, "{schedule} {longer}");
    }
}

#[test]
fn raising_max_steps_continues_from_the_last_step() {
    let open = "adapter.scheduler.name=constant";
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml", open, "adapter.max_steps=13"]).ends_with(0);
    let longer = [open, "adapter.max_steps=31"];
    project.run(&["run", "lora.yaml", longer[0], longer[1]]).ends_with(0).warns("resuming from step 13 of 31");
    let at_once = Project::with_pipeline("lora.yaml");
    at_once.run(&["run", "lora.yaml", longer[0], longer[1]]).ends_with(0);
    assert_eq!(adapter(&project, "lora.yaml", &longer), adapter(&at_once, "lora.yaml", &longer));
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
        project.run(&["run", "lora.yaml", other[0], other[1], other[2], "--format", "json"]).ends_with(0).made(0);
        runs.push((losses(&project, &split), numbers(&adapter(&project, "lora.yaml", &split))));
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
    export(&project, "lora.yaml", "merged", &[], "merge_report.json");
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
    project.run(&["run", "lora.yaml", "merged.model=other"]).ends_with(2).warns("was trained on another model");
    project.run(&["run", "lora.yaml"]).ends_with(0);
}
