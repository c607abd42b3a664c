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

use std::path::Path;
use std::process::{Command, ExitCode};

use bench::Kind;
use engine::execute::executor::STAGE_ARGUMENT;
use engine::execute::keeper::{self, KEEPER_ARGUMENT};
use engine::execute::stage_process;
use engine::execute::watcher::{self, WATCH_ARGUMENT};
use engine::stage::Registry;
use test_harness::Unmet;

/// Makes this program an engine that starts one stage and hears it for ever.
const ENGINE_ARGUMENT: &str = "__engine";

/// Says to this program that its environment names a cluster to test on.
pub(crate) const ON_A_CLUSTER: &str = "CONFORMANCE_ON_A_CLUSTER";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let rest: Vec<&str> = arguments.iter().skip(2).map(String::as_str).collect();
    match arguments.get(1).map(String::as_str) {
        Some(WATCH_ARGUMENT) => watcher::main(),
        Some(STAGE_ARGUMENT) => stage_process::main(&Registry::new().with::<act::Act>(), Path::new(rest[0])),
        Some(KEEPER_ARGUMENT) => keeper::main(Path::new(rest[0])),
        Some(ENGINE_ARGUMENT) => suite::engine_process(Kind::parse(rest[0]), Path::new(rest[1])),
        // Lists, and the tests in the process that `on_a_cluster` starts.
        Some("--list") => test_harness::run_one_by_one(),
        _ if std::env::var_os(ON_A_CLUSTER).is_some() => test_harness::run_one_by_one(),
        _ => on_a_cluster(&arguments[1..]).unwrap_or_else(|_| test_harness::run_one_by_one()),
    }
}

/// The tests in a process of its own, whose environment names a cluster that lives as long.
fn on_a_cluster(arguments: &[String]) -> Result<ExitCode, Unmet> {
    let cluster = slurm::Cluster::start(slurm::Shape { cpus: 16, gpus: 0, ..slurm::Shape::default() })?;
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests.args(arguments).env(ON_A_CLUSTER, "1").env("SLURM_CONF", cluster.configuration());
    Ok(if tests.status().unwrap().success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
