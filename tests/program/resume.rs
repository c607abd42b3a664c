//! `kill -9` in the middle of training: the next plain run ends with the bytes of one that was never interrupted.
//!
//! Kills come at random moments: in a step, in a validation, in the writing of a saved step. Three of them here; with
//! `PIPELINE_KILLS=20 cargo test --release --test program resume::` so many.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_harness::test;

use crate::support::Project;

const PIPELINE: &str = "resume.yaml";

fn project() -> Project {
    let project = Project::with_pipeline(PIPELINE);
    fs::create_dir(project.path("tasks")).unwrap();
    project.write("tasks/answers.yaml", include_str!("../pipelines/tasks/answers.yaml"));
    project
}

/// Whom a kill meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Stage,
    Engine,
    Both,
}

/// When a kill comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// So long after a new step was saved.
    After(Duration),
    /// As soon as a step is being written.
    Writing,
}

/// A small generator: the moments are random and can be had again by the seed that a failure prints.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let seed = std::env::var("PIPELINE_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = seed.unwrap_or(now) | 1;
        println!("PIPELINE_SEED={seed} has these moments again");
        Self(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// The files of a run's adapter and metrics, byte for byte.
fn results(project: &Project, arguments: &[&str]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for (output, file) in [("adapter.adapter", "adapter_model.safetensors"), ("adapter.metrics", "metrics.jsonl")] {
        let folder = project.path("exported");
        if folder.exists() {
            fs::remove_dir_all(&folder).unwrap();
        }
        let all: Vec<&str> = ["export", PIPELINE, output, "exported"].iter().chain(arguments).copied().collect();
        project.run(&all).ends_with(0);
        found.push(fs::read(folder.join(file)).unwrap());
    }
    found
}

/// The folders of working state.
fn working(project: &Project) -> Vec<PathBuf> {
    let folders = fs::read_dir(project.path(".pipeline/store/partial")).into_iter().flatten().flatten();
    folders.map(|entry| entry.path()).collect()
}

/// The newest saved step of the run.
fn saved_step(project: &Project) -> Option<u64> {
    let inside = working(project).into_iter().flat_map(|path| fs::read_dir(path).into_iter().flatten().flatten());
    inside.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).max()
}

/// Whether a step is being written, or was when its process died.
fn is_writing(project: &Project) -> bool {
    working(project).iter().any(|path| path.join("unfinished").exists())
}

/// Starts the run and kills it with SIGKILL once it has saved a step after `after`; whether that was before its end.
fn kill_after(project: &Project, arguments: &[&str], after: Option<u64>, victim: Victim, moment: Moment) -> bool {
    let all: Vec<&str> = ["run", PIPELINE].iter().chain(arguments).copied().collect();
    let mut engine = project.start(&all);
    let began = Instant::now();
    let met = loop {
        if engine.try_wait().unwrap().is_some() {
            break false;
        }
        let saved = saved_step(project) > after;
        if saved && (matches!(moment, Moment::After(_)) || is_writing(project)) {
            break true;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "no step was saved");
        sleep(Duration::from_micros(200));
    };
    if let Moment::After(delay) = moment {
        sleep(delay);
    }
    let stage = project.processes().into_iter().find(|(_, line)| line.contains("__stage"));
    if let (Victim::Stage | Victim::Both, Some((pid, _))) = (victim, stage) {
        // It may have ended by itself since.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    if victim != Victim::Stage {
        let _ = engine.kill();
    }
    let killed = met && engine.wait().unwrap().code() != Some(0);
    let began = Instant::now();
    while !project.processes().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "still alive: {:?}", project.processes());
        sleep(Duration::from_millis(10));
    }
    killed
}

/// The optimizer steps that each run told of, in the order of the runs.
fn steps_of_runs(project: &Project) -> Vec<Vec<u64>> {
    let mut runs: Vec<PathBuf> =
        fs::read_dir(project.path(".pipeline/runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    runs.retain(|path| path.join("events.jsonl").exists());
    runs.sort();
    let of_run = |path: &PathBuf| {
        let events = fs::read_to_string(path.join("events.jsonl")).unwrap();
        // The last line of a killed run may be cut.
        let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let values = events.map(|event| event["said"]["values"].clone());
        values.filter(|values| values["kind"] == "train").filter_map(|values| values["step"].as_u64()).collect()
    };
    runs.iter().map(of_run).collect()
}

/// Asserts that no run did more than `save_every` steps again.
fn assert_few_steps_were_redone(project: &Project, save_every: u64) {
    let runs: Vec<Vec<u64>> = steps_of_runs(project).into_iter().filter(|steps| !steps.is_empty()).collect();
    let mut furthest: u64 = 0;
    for steps in &runs {
        let redone = (furthest + 1).saturating_sub(steps[0]);
        assert!(redone <= save_every, "{redone} steps were done again: {runs:?}");
        assert!(steps[0] <= furthest + save_every, "steps were left out: {runs:?}");
        assert!(steps.windows(2).all(|pair| pair[1] == pair[0] + 1), "{steps:?}");
        furthest = furthest.max(*steps.last().unwrap());
    }
}

/// Kills a run so many times, then lets it end.
fn kill_again_and_again(project: &Project, arguments: &[&str], kills: u64, random: &mut Random) -> u64 {
    let mut done = 0;
    for number in 0..kills {
        let victim = [Victim::Stage, Victim::Engine, Victim::Both][(number % 3) as usize];
        let moment = match number % 4 {
            1 => Moment::Writing,
            _ => Moment::After(Duration::from_micros(random.below(60_000))),
        };
        // Every kill has a hundred steps of the run, and comes somewhere in the first ninety of them.
        let after = Some(saved_step(project).unwrap_or(0) + random.below(90));
        if !kill_after(project, arguments, after, victim, moment) {
            break;
        }
        println!(
            "kill {number}: {victim:?} {moment:?}, after saved step {:?}, writing: {}",
            saved_step(project),
            is_writing(project)
        );
        done += 1;
    }
    done
}

#[test]
fn a_run_killed_again_and_again_ends_with_the_bytes_of_an_uninterrupted_one() {
    let kills: u64 = std::env::var("PIPELINE_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(3);
    let mut random = Random::new();
    // An epoch has five steps.
    let epochs = format!("adapter.epochs={}", 20 * kills + 10);
    let long = [epochs.as_str()];
    let whole = project();
    whole.run(&["run", PIPELINE, long[0]]).ends_with(0);
    let project = project();
    assert_eq!(kill_again_and_again(&project, &long, kills, &mut random), kills, "the run ended before it was killed");
    project.run(&["run", PIPELINE, long[0]]).ends_with(0).warns("resuming from step");
    assert!(results(&project, &long) == results(&whole, &long), "the interrupted run ended with other bytes");
    assert_few_steps_were_redone(&project, 5);
    // The state outlives the kills, and nothing half-written does.
    assert!(!is_writing(&project));
    project.run(&["cache", "verify"]).ends_with(0);
}

#[test]
fn a_kill_in_the_middle_of_writing_a_step_costs_that_step_alone() {
    let every_step = ["adapter.epochs=40", "adapter.save_every=1"];
    let whole = project();
    whole.run(&["run", PIPELINE, every_step[0]]).ends_with(0);
    let project = project();
    let mut met = false;
    for _ in 0..20 {
        let after = saved_step(&project);
        if !kill_after(&project, &every_step, after, Victim::Stage, Moment::Writing) {
            break;
        }
        met |= is_writing(&project);
        if met {
            break;
        }
    }
    assert!(met, "no kill met a half-written step");
    project.run(&["run", PIPELINE, every_step[0], every_step[1]]).ends_with(0).warns("resuming from step");
    assert!(
        results(&project, &every_step) == results(&whole, &every_step),
        "the interrupted run ended with other bytes"
    );
    assert_few_steps_were_redone(&project, 1);
}

#[test]
fn a_damaged_saved_step_or_best_step_is_passed_over_for_the_one_before() {
    let whole = project();
    whole.run(&["run", PIPELINE]).ends_with(0);
    for file in ["exp_avg.safetensors", "state.json", "../best"] {
        let project = project();
        assert!(kill_after(&project, &[], Some(40), Victim::Engine, Moment::After(Duration::ZERO)));
        let step = saved_step(&project).unwrap();
        let folder = working(&project).into_iter().map(|path| path.join(format!("step-{step}")));
        let saved = folder.into_iter().find(|path| path.exists()).unwrap();
        let mut damaged = saved.join(file);
        if damaged.is_dir() {
            let state: Value = serde_json::from_slice(&fs::read(saved.join("state.json")).unwrap()).unwrap();
            damaged.push(format!("step-{}.safetensors", state["progress"]["best_weights"]["step"]));
        }
        let mut bytes = fs::read(&damaged).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&damaged, bytes).unwrap();
        project.run(&["run", PIPELINE]).ends_with(0).warns("passing over a saved step");
        assert!(results(&project, &[]) == results(&whole, &[]), "{file}");
    }
}
