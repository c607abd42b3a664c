//! How a suite ends whose tests lack something: this suite runs itself, as a child, with tests that do.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::process::Output;

use test_harness::{Requirement, Unmet, child, test};

test_harness::main!();

/// Says to this program that it is the suite within the suite.
const INNER: &str = "TEST_HARNESS_INNER";

/// Values of the tests that the suite within has, and the suite itself has not.
fn within<const N: usize>(values: [&'static str; N]) -> Vec<&'static str> {
    if std::env::var_os(INNER).is_some() { values.to_vec() } else { Vec::new() }
}

#[test(each = within(["one", "two"]))]
fn inner_passes(_: &str) {}

#[test(each = within(["slurm"]))]
fn inner_lacks(_: &str) -> Result<(), Unmet> {
    Err(Requirement::Slurm.unmet("no `sbatch`"))
}

#[test(each = within(["here", "nowhere"]))]
fn inner_is(place: &str) -> Result<(), Unmet> {
    if place == "here" { Ok(()) } else { Err(Requirement::Root.unmet("nobody")) }
}

/// The suite within the suite.
fn inner(required: &str) -> (Output, String) {
    let program = std::env::current_exe().unwrap();
    let mut suite = std::process::Command::new(program);
    let output = suite.arg("inner").env(INNER, "1").env("PIPELINE_REQUIRE", required).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output, said)
}

#[test]
fn what_is_lacking_is_told_and_counted_as_ignored() {
    let (output, said) = inner("torch");
    assert!(output.status.success(), "{said}");
    assert!(said.contains("3 passed; 0 failed; 2 ignored"), "{said}");
    assert!(said.contains("lacks slurm: no `sbatch`") && said.contains("inner_is::nowhere"), "{said}");
}

#[test]
fn what_is_required_and_lacking_fails() {
    let (output, said) = inner("torch,slurm");
    assert!(!output.status.success() && said.contains("3 passed; 1 failed; 1 ignored"), "{said}");
    assert!(said.contains("PIPELINE_REQUIRE requires it"), "{said}");
    let (output, said) = inner("slrum");
    assert!(!output.status.success() && said.contains("`slrum`") && !said.contains("passed"), "{said}");
}

#[child]
fn answers() {
    assert_ne!(std::env::var("QUESTION").unwrap(), "bad");
    println!("an answer");
}

#[test]
fn a_child_is_a_process_of_its_own() {
    let good = child("answers").env("QUESTION", "good").output().unwrap();
    assert!(good.status.success() && good.stdout == b"an answer\n");
    assert!(!child("answers").env("QUESTION", "bad").output().unwrap().status.success());
    assert!(!child("nothing").output().unwrap().status.success());
}
