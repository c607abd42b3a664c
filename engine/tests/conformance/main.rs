//! What every executor does, asked of each of them: the local one, and Slurm where it is installed.
//!
//! A stage's process is the program that starts it, which here is this test program. So it has a `main` of its own:
//! `__stage` makes it a stage process, `__job` the keeper of a job, `__engine` an engine that a test can kill.

#![allow(clippy::unwrap_used, reason = "tests")]

mod act;
mod bench;
#[path = "../../../tests/support/slurm.rs"]
mod slurm;
mod suite;

use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use bench::{Bench, Kind};
use engine::execute::executor::STAGE_ARGUMENT;
use engine::execute::keeper::{self, KEEPER_ARGUMENT};
use engine::execute::stage_process;
use engine::execute::watcher::{self, WATCH_ARGUMENT};
use engine::stage::Registry;

/// Makes this program an engine that starts one stage and hears it for ever.
const ENGINE_ARGUMENT: &str = "__engine";

/// Runs the suite against a cluster that the environment names.
const CLUSTER_ARGUMENT: &str = "__cluster";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let rest: Vec<&str> = arguments.iter().skip(2).map(String::as_str).collect();
    match arguments.get(1).map(String::as_str) {
        Some(WATCH_ARGUMENT) => watcher::main(),
        Some(STAGE_ARGUMENT) => stage_process::main(&Registry::new().with::<act::Act>(), Path::new(rest[0])),
        Some(KEEPER_ARGUMENT) => keeper::main(Path::new(rest[0])),
        Some(ENGINE_ARGUMENT) => suite::engine_process(Kind::parse(rest[0]), Path::new(rest[1])),
        Some(CLUSTER_ARGUMENT) => tests(Kind::Slurm, &rest),
        _ => {
            let arguments: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
            if arguments.contains(&"--list") {
                names(Kind::Local).into_iter().chain(names(Kind::Slurm)).for_each(|name| println!("{name}: test"));
                return ExitCode::SUCCESS;
            }
            let passed = [tests(Kind::Local, &arguments), on_a_cluster(&arguments)];
            if passed.iter().all(|code| *code == ExitCode::SUCCESS) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
    }
}

/// The suite in a process of its own, whose environment names a cluster that lives as long.
fn on_a_cluster(arguments: &[&str]) -> ExitCode {
    let wanted = |name: &String| chosen(name, arguments);
    if !names(Kind::Slurm).iter().any(wanted) {
        return ExitCode::SUCCESS;
    }
    let shape = slurm::Shape { cpus: 16, gpus: 0, ..slurm::Shape::default() };
    let Some(cluster) = slurm::Cluster::start(shape) else { return ExitCode::SUCCESS };
    let mut suite = Command::new(std::env::current_exe().unwrap());
    suite.arg(CLUSTER_ARGUMENT).args(arguments).env("SLURM_CONF", cluster.configuration());
    if suite.status().unwrap().success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn names(kind: Kind) -> Vec<String> {
    suite::TESTS.iter().map(|(name, _)| format!("{}::{name}", kind.name())).collect()
}

fn chosen(name: &str, arguments: &[&str]) -> bool {
    let filter = arguments.iter().find(|argument| !argument.starts_with('-')).unwrap_or(&"");
    name.contains(filter)
}

fn tests(kind: Kind, arguments: &[&str]) -> ExitCode {
    let tests = suite::TESTS.iter().zip(names(kind)).filter(|(_, name)| chosen(name, arguments));
    let tests: Vec<_> = tests.collect();
    println!("\nrunning {} tests", tests.len());
    let mut failed = 0;
    for ((_, test), name) in &tests {
        let began = Instant::now();
        let passed = catch_unwind(|| test(&Bench::new(kind))).is_ok();
        failed += usize::from(!passed);
        let word = if passed { "ok" } else { "FAILED" };
        println!("test {name} ... {word} ({:.2}s)", began.elapsed().as_secs_f64());
    }
    println!("\ntest result: {} passed; {failed} failed\n", tests.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
