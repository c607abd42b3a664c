//! What the built program does, seen from outside: most tests run it in a folder of their own and read what it says and
//! leaves behind. They are one suite, so that the engine and the stages are linked once; a module's name selects its
//! tests: `cargo test --release --test program plan::`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod adapters;
mod answers;
mod asking;
mod cache;
mod checks;
mod command;
mod damage;
mod devices;
mod diagnostics;
mod docs;
mod documented_commands;
mod exit_codes;
mod explain;
mod export;
mod formats;
mod full_disk;
mod homes;
mod hostile;
#[path = "../../stages/tests/support/mod.rs"]
mod hub;
mod import;
mod include;
mod kill;
mod lock;
mod look;
mod narrow;
mod outside;
mod parameters;
mod plan;
mod problems;
mod processes;
mod profile;
mod recipes;
mod remote;
mod resume;
mod room;
mod runs;
#[path = "../../cache/tests/s3/mod.rs"]
mod s3;
mod scheduling;
mod secrets;
mod serve;
mod smoke;
mod store;
#[path = "../support/mod.rs"]
mod support;
mod sweeps;
mod tasks;
mod templates;
mod track;
mod training;
mod ui;
mod whole_way;
mod workers;

test_harness::main!();
