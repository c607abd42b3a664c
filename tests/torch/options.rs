//! What the worker can be asked for beside the plain training, and what it cannot be.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use test_harness::{Unmet, test};

use crate::bench::{Bench, PIPELINE, Trained, losses};
use crate::support::{Project, Ran, install_script};

/// How far losses in a type of half the width may be apart from those in f32.
const HALF_BOUND: f64 = 5e-3;

#[track_caller]
fn are_near(ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len());
    let near = ours.iter().zip(theirs).all(|(one, two)| (one - two).abs() <= HALF_BOUND * two);
    assert!(near, "{ours:?}\n{theirs:?}");
}

/// A Python that has these packages, by what it says, and starts no worker.
fn python_with(project: &Project, packages: &[&str]) -> PathBuf {
    let versions: BTreeMap<&str, &str> = packages.iter().map(|name| (*name, "1.0")).collect();
    let versions = serde_json::to_string(&versions).unwrap();
    let python = project.path("python");
    install_script(&format!("#!/bin/sh\n[ \"$1\" = -c ] && echo '{versions}' && exit 0\nexit 7\n"), &python);
    python
}

/// Those that the worker needs, and bitsandbytes.
const PACKAGES: [&str; 7] =
    ["pipeline_torch_worker", "torch", "transformers", "peft", "safetensors", "numpy", "bitsandbytes"];

/// The trace that PyTorch's profiler wrote, in the form that viewers read: spans with a begin and a duration.
fn spans(path: &str) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans: Vec<Value> = events.iter().filter(|event| event["ph"] == "X").cloned().collect();
    for span in &spans {
        let is_whole = span["name"].is_string() && span["ts"].is_number() && span["dur"].as_f64() >= Some(0.0);
        assert!(is_whole && !span["pid"].is_null() && !span["tid"].is_null(), "{span}");
    }
    spans
}

#[test]
fn f16_scales_its_loss_and_what_is_profiled_leaves_a_trace() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    bench.train(&["--home=native"]).ends_with(0);
    let expected = losses(&bench.records(&["--home=native"]));
    let more = [
        "adapter.backend=torch",
        "adapter.dtype=f16",
        "adapter.loss_scale={ init_scale: 1e12, backoff_factor: 0.01 }",
        "adapter.attention=sdpa",
        "adapter.activation_checkpointing=true",
        "adapter.profile=true",
    ];
    let ran = bench.train(&[&more[..], &["--format", "json"]].concat()).ends_with(0).json();
    let records = bench.records(&more);
    let is_skipped = |record: &&Value| record["skipped"] == true;
    let steps: Vec<&Value> = records.iter().filter(|record| record["kind"] == "train").collect();
    let skipped = steps.iter().copied().take_while(is_skipped).count();
    assert!((1..8).contains(&skipped), "{records:#?}");
    assert_eq!(steps.iter().copied().filter(is_skipped).count(), skipped);
    let scales: Vec<f64> = steps.iter().map(|step| step["loss_scale"].as_f64().unwrap()).collect();
    assert!(scales[..=skipped].windows(2).all(|two| two[1] < two[0]), "{scales:?}");
    let ours = losses(&records);
    are_near(&ours[..1], &expected[..1]);
    assert!(ours.last() < ours.first(), "{ours:?}");

    let traces = ran["profiles"]["own_traces"].as_array().unwrap();
    assert_eq!(traces.len(), 1, "{traces:?}");
    let spans = spans(traces[0].as_str().unwrap());
    for name in ["aten::scaled_dot_product_attention", "autograd::engine::evaluate_function"] {
        assert!(spans.iter().any(|span| span["name"].as_str().unwrap().starts_with(name)), "no span of {name}");
    }
    bench.run(&["runs", "show"]).ends_with(0).says("torch-rank-0.trace.json");
    let shown = bench.run(&["runs", "show", "latest", "adapter", "--format", "json"]).ends_with(0).json();
    let of_ranks = shown["how"]["peak_memory_bytes_of_ranks"].as_array().unwrap();
    let least = 50 << 20;
    assert!(of_ranks.len() == 1 && of_ranks[0].as_u64() > Some(least), "{shown:#}");
    assert!(shown["peak_memory_bytes"].as_u64() > Some(least), "{shown:#}");
    Ok(())
}

#[test]
fn a_loss_scale_that_overflows_to_the_end_is_what_is_to_be_lowered() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    let high = ["adapter.backend=torch", "adapter.dtype=f16", "adapter.loss_scale={ init_scale: 1e30 }"];
    bench
        .train(&[&high[..], &["adapter.max_steps=3"]].concat())
        .ends_with(1)
        .warns("the gradients of every step overflowed: nothing was trained")
        .warns("lower `loss_scale.init_scale`");
    Ok(())
}

#[test]
fn bf16_is_near_to_f32() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    bench.train(&["--home=native"]).ends_with(0);
    let more = ["adapter.backend=torch", "adapter.dtype=bf16"];
    bench.train(&more).ends_with(0);
    let (ours, native) = (losses(&bench.records(&more)), losses(&bench.records(&["--home=native"])));
    are_near(&ours, &native);
    assert_ne!(ours, native);
    Ok(())
}

#[test]
fn all_weights_are_trained_as_by_the_native_backend() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    let text = fs::read_to_string(bench.project.path(PIPELINE)).unwrap();
    let (training, _) = text.split_once("  scores:").unwrap();
    let (before, after) = training.split_once("      lora:").unwrap();
    let (_, after) = after.split_once('\n').unwrap();
    bench.project.write(PIPELINE, &format!("{before}      method: full\n{after}"));
    let trained = |more: &[&str]| Trained {
        records: bench.records(more),
        weights: bench.result("adapter.model", "model.safetensors", more),
    };
    bench.train(&["--home=native"]).ends_with(0);
    bench.train(&["adapter.backend=torch"]).ends_with(0).says("computed by torch");
    trained(&["adapter.backend=torch"]).is_like(&trained(&["--home=native"]));
    Ok(())
}

#[test]
fn attention_that_the_device_lacks_is_refused_with_what_it_needs() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    bench
        .train(&["adapter.backend=torch", "adapter.attention=flex"])
        .ends_with(2)
        .warns("`attention: flex` cannot be used here: it needs a CUDA or ROCm device, triton,")
        .warns("leave `attention` out, or take `sdpa`");
    Ok(())
}

#[test]
fn a_missing_worker_is_named_with_the_line_that_installs_it() {
    let project = Project::with_pipeline(PIPELINE);
    let python = python_with(&project, &["torch"]);
    let arguments = ["validate", PIPELINE, "adapter.backend=torch", "--format", "json"];
    let mut command = project.command(&arguments);
    command.env("PIPELINE_PYTHON", &python);
    let problems = Ran::of(command, &arguments).ends_with(2).json()[0]["problems"].clone();
    let mut problems = problems.as_array().unwrap().iter();
    let problem = problems.find(|problem| problem["code"] == "no-device").unwrap();
    let lack = "the Python of PIPELINE_PYTHON, has no pipeline_torch_worker, no transformers, no peft, no safetensors, \
                no numpy";
    assert!(problem["message"].as_str().unwrap().ends_with(lack), "{problem:#}");
    assert!(problem["help"].as_str().unwrap().contains("-m pip install ./workers/torch"), "{problem:#}");
}

/// The warnings come before anything is computed: a Python that has the packages and starts no worker is enough.
#[test]
fn what_a_quantised_base_does_otherwise_than_meant_is_said_whoever_computes() {
    let project = Project::with_pipeline(PIPELINE);
    let file = project.path(PIPELINE);
    let further = "  further:
    uses: train
    with: { model: fresh, data: packs, adapter: adapter, max_steps: 1, quantize: { base: nf4, skip_modules: [o_porj] } }
    resources: { threads: 1 }
";
    fs::write(&file, fs::read_to_string(&file).unwrap() + further).unwrap();
    let python = python_with(&project, &PACKAGES);
    let run = |more: &[&str]| {
        let on_cpu = ["adapter.backend=native", "adapter.resources.device=cpu", "further.resources.device=cpu"];
        let arguments = [&["run", PIPELINE, "--until", "further", "adapter.max_steps=2"], &on_cpu[..], more].concat();
        let mut command = project.command(&arguments);
        command.env("PIPELINE_PYTHON", &python);
        Ran::of(command, &arguments)
    };
    let torch = run(&["further.backend=torch"]);
    assert_ne!(torch.code, Some(0), "{torch}");
    let native = run(&["further.backend=native"]).ends_with(0);
    for said in
        ["`quantize.skip_modules` names `o_porj`, which is no linear layer", "the adapter was trained on its base in"]
    {
        let [torch, native] = [&torch, &native].map(|ran| ran.stderr.matches(said).count());
        assert_eq!((torch, native), (1, 1), "{said}");
    }
}

#[test]
fn what_a_backend_does_not_compute_is_a_problem_at_its_place() {
    let project = Project::with_pipeline(PIPELINE);
    let refused = |overrides: &[&str], says: &str| {
        project.run(&[&["plan", PIPELINE], overrides].concat()).ends_with(2).warns(says);
    };
    refused(&["adapter.backend=native", "adapter.dtype=f16"], "`dtype: f16` needs `backend: torch`");
    refused(&["scores.backend=torch", "scores.dtype=int8"], "`dtype: int8` needs `backend: native`");
    refused(&["adapter.env={RANK: \"1\"}"], "`RANK` is a variable that the stage's processes are given");
    refused(&["adapter.env={WANDB_API_KEY: abcd}"], "`WANDB_API_KEY` looks like a secret");
    // Where there is a worker; what becomes of it where there is none is a matter of `tests/program/checks.rs`.
    let mut command = project.command(&["plan", PIPELINE, "adapter.dtype=f16"]);
    command.env("PIPELINE_PYTHON", python_with(&project, &PACKAGES));
    Ran::of(command, &["plan"]).ends_with(0);
}
