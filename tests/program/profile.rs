//! `run --profile` and `profile: true`: the tables, the trace of the run, and what there is to say where nothing ran.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;
use test_harness::test;

use crate::support::Project;

/// Begin, end and name of spans, by process and thread.
type Spans = BTreeMap<(u64, u64), Vec<(f64, f64, String)>>;

/// Spans by process and thread, in the order in which they begin.
fn spans(trace: &str) -> Spans {
    let events: Vec<Value> = serde_json::from_str(trace).unwrap();
    let mut threads: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (begin, duration) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        let thread = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        let name = event["name"].as_str().unwrap().to_owned();
        threads.entry(thread).or_default().push((begin, begin + duration, name));
    }
    threads.values_mut().for_each(|spans| spans.sort_by(|one, other| one.0.total_cmp(&other.0)));
    threads
}

/// Spans of a thread lie within each other or beside each other.
fn assert_nested(spans: &[(f64, f64, String)]) {
    // Microseconds with three digits, in sums of two.
    const ROUNDING: f64 = 0.01;
    let mut open: Vec<&(f64, f64, String)> = Vec::new();
    for span in spans {
        while open.last().is_some_and(|outer| outer.1 <= span.0 + ROUNDING) {
            open.pop();
        }
        assert!(open.iter().all(|outer| span.1 <= outer.1 + ROUNDING), "{span:?} reaches out of {open:?}");
        open.push(span);
    }
}

#[test]
fn a_profiled_run_has_tables_that_add_up_and_one_trace() {
    let project = Project::with_pipeline("train.yaml");
    let arguments = ["run", "train.yaml", "adapter.max_steps=3", "--until", "adapter", "--profile", "--format", "json"];
    let ran = project.run(&arguments).ends_with(0).warns("trace: ").warns("ui.perfetto.dev");
    let ran = ran.json();
    let profiles = ran["profiles"]["stages"].as_array().unwrap();
    let names: Vec<&str> = profiles.iter().map(|stage| stage["stage"].as_str().unwrap()).collect();
    assert!(names.contains(&"tokens") && names.contains(&"adapter"), "{names:?}");

    let adapter = profiles.iter().find(|stage| stage["stage"] == "adapter").unwrap();
    let profile = &adapter["profile"];
    let seconds = profile["seconds"].as_f64().unwrap();
    let process = ran["stages"].as_array().unwrap().iter().find(|stage| stage["stage"] == "adapter").unwrap();
    assert!(seconds <= process["seconds"].as_f64().unwrap(), "{profile:#}");
    let phase = |name: &str| {
        let phases = profile["phases"].as_array().unwrap();
        phases.iter().find(|phase| phase["name"] == name).unwrap_or_else(|| panic!("no `{name}` in {profile:#}"))
    };
    assert_eq!(phase("step")["calls"], 3);
    for name in ["open input", "load the model", "forward", "backward", "update", "hash output"] {
        assert!(phase(name)["seconds"].as_f64().unwrap() > 0.0);
    }
    let depth_0 = profile["phases"].as_array().unwrap().iter().filter(|phase| phase["depth"] == 0);
    let in_phases: f64 = depth_0.map(|phase| phase["seconds"].as_f64().unwrap()).sum();
    assert!(in_phases > 0.0 && in_phases <= seconds, "{in_phases} of {seconds}");
    let kernels = profile["kernels"].as_array().unwrap();
    let in_kernels: f64 = kernels.iter().map(|kernel| kernel["seconds"].as_f64().unwrap()).sum();
    assert!(in_kernels > 0.0 && in_kernels <= seconds, "{in_kernels} of {seconds}");
    let linear = kernels.iter().find(|kernel| kernel["name"].as_str().unwrap().starts_with("linear")).unwrap();
    assert!(linear["flops"].as_u64().unwrap() > 0 && linear["share_of_limit"].as_f64().unwrap() > 0.0, "{linear:#}");

    let trace = fs::read_to_string(ran["profiles"]["trace"].as_str().unwrap()).unwrap();
    let threads = spans(&trace);
    let processes: std::collections::BTreeSet<u64> = threads.keys().map(|(process, _)| *process).collect();
    assert_eq!(processes.len(), 1 + names.len(), "the run and each stage");
    threads.values().for_each(|spans| assert_nested(spans));
    // The run's own view of a stage holds what the stage recorded, up to the clock that both read.
    let run_end = threads.iter().filter(|((process, _), _)| *process == 1).flat_map(|(_, spans)| spans);
    let run_end = run_end.map(|span| span.1).fold(0.0, f64::max);
    let last = threads.values().flatten().map(|span| span.1).fold(0.0, f64::max);
    assert!(last <= run_end + 1e5, "{last} and {run_end}");

    // Later: the same tables, and where the trace is.
    let shown = project.run(&["runs", "profile", "latest", "adapter"]).ends_with(0);
    let shown = shown.says("[adapter] where ").says("(outside kernels)").says("of limit").says("limits of ");
    assert!(!shown.stdout.contains("[tokens]"), "{shown}");
    project.run(&["runs", "show"]).ends_with(0).says("trace: ").says("runs profile");

    // A second time there is nothing to record, and the flag that helps is named.
    let again = project.run(&arguments[..5].iter().chain(&["--profile"]).copied().collect::<Vec<_>>());
    let again = again.ends_with(0).warns("not profiled: ").warns("--force");
    assert!(!again.stdout.contains("where "), "{again}");
}

#[test]
fn a_stage_asks_for_its_profile_and_keeps_its_key() {
    let project = Project::with_pipeline("train.yaml");
    let key = |ran: &Value| {
        let stages = ran["stages"].as_array().unwrap();
        stages.iter().find(|stage| stage["stage"] == "tokens").unwrap()["key"].clone()
    };
    let plain = project.run(&["run", "train.yaml", "--until", "tokens", "--format", "json"]).ends_with(0).json();
    assert_eq!(plain["profiles"]["stages"], serde_json::json!([]));
    let profiled =
        ["run", "train.yaml", "tokens.profile=true", "--until", "tokens", "--format", "json", "--force=tokens"];
    let profiled = project.run(&profiled).ends_with(0).json();
    assert_eq!(key(&plain), key(&profiled));
    let stages = profiled["profiles"]["stages"].as_array().unwrap();
    assert_eq!(stages.iter().map(|stage| stage["stage"].as_str().unwrap()).collect::<Vec<_>>(), ["tokens"]);
    assert_eq!(profiled["profiles"]["own_traces"], serde_json::json!([]));

    // What a program of the stage recorded by itself is listed beside the run's own trace.
    let traces = || project.run(&["runs", "show", "--format", "json"]).ends_with(0).json()["traces"].clone();
    assert_eq!(traces().as_array().unwrap().len(), 1);
    let folder = Path::new(profiled["profiles"]["trace"].as_str().unwrap()).parent().unwrap();
    fs::write(folder.join("tokens/torch-rank-0.trace.json"), "{}").unwrap();
    let traces = traces();
    assert_eq!(traces.as_array().unwrap().len(), 2);
    assert!(traces[1].as_str().unwrap().ends_with("tokens/torch-rank-0.trace.json"), "{traces}");
    project.run(&["runs", "profile", "latest~1"]).ends_with(2).warns("no stage was profiled").warns("--profile");
}
