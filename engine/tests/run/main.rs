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

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use engine::execute::executor::STAGE_ARGUMENT;
use engine::execute::stage_process;
use engine::execute::watcher::{self, WATCH_ARGUMENT};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some(WATCH_ARGUMENT) => watcher::main(),
        Some(STAGE_ARGUMENT) => stage_process::main(&kinds::registry(), Path::new(&arguments[2])),
        Some(project::ENGINE_ARGUMENT) => {
            let grace = Duration::from_secs(arguments[3].parse().unwrap());
            project::engine_process(Path::new(&arguments[2]), grace)
        }
        _ => test_harness::run_one_by_one(),
    }
}
