//! Whole runs with small stage kinds: what is cached, what runs again, and what happens when things go wrong.
//!
//! A stage is a process of the program that runs the pipeline, which here is this test program. So it has a `main` of
//! its own: `__stage` makes it a stage process, `__engine` an engine that a test can kill, and anything else runs the
//! tests.

#![allow(clippy::unwrap_used, reason = "tests")]

mod caching;
mod causes;
mod explaining;
mod failing;
mod healing;
mod kinds;
mod project;
mod publishing;
mod room;
mod selecting;
mod stopping;

use std::panic::catch_unwind;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use engine::execute::executor::STAGE_ARGUMENT;
use engine::execute::stage_process;
use engine::execute::watcher::{self, WATCH_ARGUMENT};

type Test = (&'static str, fn());

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some(WATCH_ARGUMENT) => watcher::main(),
        Some(STAGE_ARGUMENT) => stage_process::main(&kinds::registry(), Path::new(&arguments[2])),
        Some(project::ENGINE_ARGUMENT) => {
            let grace = Duration::from_secs(arguments[3].parse().unwrap());
            project::engine_process(Path::new(&arguments[2]), grace)
        }
        _ => run_tests(&arguments[1..]),
    }
}

/// What `cargo test` needs of a test program: a filter, a list, a line per test, a status.
fn run_tests(arguments: &[String]) -> ExitCode {
    let groups = [
        caching::TESTS,
        causes::TESTS,
        explaining::TESTS,
        failing::TESTS,
        healing::TESTS,
        publishing::TESTS,
        room::TESTS,
        selecting::TESTS,
        stopping::TESTS,
    ];
    let filter = arguments.iter().find(|argument| !argument.starts_with('-')).map_or("", String::as_str);
    let chosen: Vec<Test> = groups.concat().into_iter().filter(|(name, _)| name.contains(filter)).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        chosen.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", chosen.len());
    let mut failed = 0;
    for (name, test) in &chosen {
        let started = Instant::now();
        let passed = catch_unwind(test).is_ok();
        failed += usize::from(!passed);
        let word = if passed { "ok" } else { "FAILED" };
        println!("test {name} ... {word} ({:.2}s)", started.elapsed().as_secs_f64());
    }
    println!("\ntest result: {} passed; {failed} failed\n", chosen.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
