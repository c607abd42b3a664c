//! The harness of suites whose tests need what not every machine has, such as PyTorch, a cluster, or an instruction
//! set.
//!
//! A suite is called as any other and looks like it. What differs is a test that cannot run where it is: it returns
//! [`Unmet`], is reported with the reason and counted as ignored, and never as passed. Where `PIPELINE_REQUIRE` names
//! the requirement it fails: `PIPELINE_REQUIRE=torch,slurm cargo test` is what a machine runs that has both.
//!
//! A file takes part with `harness = false` in its crate's manifest, with
//!
//! ```text
//! use test_harness::{Unmet, test};
//!
//! test_harness::main!();
//!
//! #[test]
//! fn root_is_nobody_else() -> Result<(), Unmet> { … }
//!
//! #[test(each = InstructionSet::ALL)]
//! fn sums_agree(set: InstructionSet) -> Result<(), Unmet> { … }
//! ```
//!
//! and `use test_harness::test` in each of its modules that has tests. What tests print is shown as it comes, and one
//! filter is taken. The tests that took longest are named at the end.

mod requirement;

use std::env;
use std::fmt::Display;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub use inventory;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
pub use requirement::{Requirement, Unmet};
pub use test_harness_attributes::{child, test};

/// Whether tests do all that they can, and not only what every change must pass: `scripts/check-release` sets
/// `PIPELINE_TESTS=all`.
pub fn do_everything() -> bool {
    env::var_os("PIPELINE_TESTS").is_some_and(|value| value == "all")
}

/// A function with `#[test]`.
pub struct Test {
    #[doc(hidden)]
    pub module: &'static str,
    #[doc(hidden)]
    pub name: &'static str,
    #[doc(hidden)]
    pub cases: fn() -> Vec<Case>,
}

/// A function with `#[child]`.
pub struct Child {
    #[doc(hidden)]
    pub name: &'static str,
    #[doc(hidden)]
    pub run: fn(),
}

inventory::collect!(Test);
inventory::collect!(Child);

/// One run of a test.
pub struct Case {
    name: Option<String>,
    run: Box<dyn FnOnce() -> Result<(), Unmet> + Send>,
}

impl Case {
    /// A test of nothing in particular.
    pub fn only<E: Ending>(test: fn() -> E) -> Self {
        Self { name: None, run: Box::new(move || test().result()) }
    }

    /// The test of one value, called by its name.
    pub fn of<T: Display + Send + 'static, E: Ending>(value: T, test: fn(T) -> E) -> Self {
        Self { name: Some(value.to_string()), run: Box::new(move || test(value).result()) }
    }
}

/// What a test may return.
pub trait Ending: 'static {
    /// Whether it could run.
    ///
    /// # Errors
    /// What it lacked.
    fn result(self) -> Result<(), Unmet>;
}

impl Ending for () {
    fn result(self) -> Result<(), Unmet> {
        Ok(())
    }
}

impl Ending for Result<(), Unmet> {
    fn result(self) -> Result<(), Unmet> {
        self
    }
}

/// The `main` of a suite.
#[macro_export]
macro_rules! main {
    () => {
        fn main() -> std::process::ExitCode {
            $crate::run()
        }
    };
}

/// Says to a process of a suite which of its children it is.
const CHILD: &str = "TEST_HARNESS_CHILD";

/// A function of this suite with `#[child]`, to be run in a process of its own. It succeeds unless the function panics.
///
/// # Panics
/// If the system does not say where this program is.
pub fn child(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("the path of this program"));
    command.env(CHILD, name);
    command
}

/// Runs the tests of this program, or the child that it is.
pub fn run() -> ExitCode {
    run_on(env::var("RUST_TEST_THREADS").ok().and_then(|threads| threads.parse().ok()))
}

/// As [`run`], for tests that measure time or change what all of a process shares: one after the other.
pub fn run_one_by_one() -> ExitCode {
    run_on(Some(1))
}

fn run_on(threads: Option<usize>) -> ExitCode {
    if let Ok(name) = env::var(CHILD) {
        return run_child(&name);
    }
    let required = match Requirement::required() {
        Ok(required) => required,
        Err(unknown) => {
            eprintln!("{unknown}");
            return ExitCode::FAILURE;
        }
    };
    let mut arguments = Arguments::from_args();
    arguments.test_threads = arguments.test_threads.or(threads);
    let tests = inventory::iter::<Test>.into_iter();
    let mut trials: Vec<Trial> = tests.flat_map(|test| trials_of(test, &required)).collect();
    trials.sort_by(|one, other| one.name().cmp(other.name()));
    let conclusion = libtest_mimic::run(&arguments, trials);
    name_the_slowest();
    conclusion.exit_code()
}

fn run_child(name: &str) -> ExitCode {
    let named: Vec<&Child> = inventory::iter::<Child>.into_iter().filter(|child| child.name == name).collect();
    let [child] = named[..] else {
        eprintln!("this suite has {} children `{name}`", named.len());
        return ExitCode::FAILURE;
    };
    (child.run)();
    ExitCode::SUCCESS
}

fn trials_of(test: &'static Test, required: &[Requirement]) -> impl Iterator<Item = Trial> {
    // A test of the crate's root has no module before its name.
    let module = test.module.split_once("::").map(|(_, module)| format!("{module}::")).unwrap_or_default();
    (test.cases)().into_iter().map(move |case| {
        let of = case.name.map(|name| format!("::{name}")).unwrap_or_default();
        let required = required.to_vec();
        let name = format!("{module}{}{of}", test.name);
        Trial::ignorable_test(name.clone(), move || {
            let began = Instant::now();
            let result = (case.run)();
            TOOK.lock().expect("no test panics in here").push((began.elapsed(), name));
            ending(result, &required)
        })
    })
}

/// How long each test took that did not panic.
static TOOK: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// Whatever takes less is not worth a line.
const SLOW: Duration = Duration::from_secs(5);

/// Where the time of a suite goes.
fn name_the_slowest() {
    let mut took = TOOK.lock().expect("no test panics in here");
    took.retain(|(duration, _)| *duration >= SLOW);
    took.sort_by(|one, other| other.cmp(one));
    for (duration, name) in took.iter().take(20) {
        println!("{:>5} s: {name}", duration.as_secs());
    }
}

/// A test that lacked something is ignored, unless that is required.
fn ending(result: Result<(), Unmet>, required: &[Requirement]) -> Result<Completion, Failed> {
    match result {
        Ok(()) => Ok(Completion::Completed),
        Err(unmet) if required.contains(&unmet.requirement()) => {
            Err(format!("{unmet}, and {} requires it", requirement::VARIABLE).into())
        }
        Err(unmet) => Ok(Completion::ignored_with(unmet)),
    }
}
