//! The suite.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use engine::error::{Cause, Failure};
use engine::execute::{Ending, Stop};
use engine::protocol::WorkerEvent;
use serde_json::json;
use test_harness::{Unmet, test};

use crate::ENGINE_ARGUMENT;
use crate::bench::{Bench, Ended, Kind};

fn metrics(ended: &Ended) -> Vec<u64> {
    let steps = ended.events.iter().filter_map(|event| match event {
        WorkerEvent::Metrics { values } => values["step"].as_u64(),
        _ => None,
    });
    steps.collect()
}

#[test(each = Kind::ALL)]
fn what_is_said_comes_whole_and_in_order(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let ended = bench.start("a", json!({ "metrics": 2000 })).end();
    assert!(matches!(ended.events.first(), Some(WorkerEvent::Started { .. })), "{:?}", ended.events.first());
    assert_eq!(metrics(&ended), (0..2000).collect::<Vec<_>>());
    assert!(matches!(ended.events.last(), Some(WorkerEvent::Finished { .. })), "{:?}", ended.events.last());
    assert_eq!((ended.exit.ending, ended.exit.verdict), (Ending::Code(0), None));
    Ok(())
}

#[test(each = Kind::ALL)]
fn output_that_is_no_event_goes_to_the_log(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let ended = bench.start("a", json!({ "metrics": 3, "stray": 50 })).end();
    assert_eq!(metrics(&ended), [0, 1, 2]);
    for line in 0..50 {
        for from in ["stray", "error"] {
            assert!(ended.log.contains(&format!("{from} {line}\n")), "{from} {line} is missing: {}", ended.log);
        }
    }
    assert_eq!(ended.exit.ending, Ending::Code(0));
    Ok(())
}

#[test(each = Kind::ALL)]
fn a_failure_comes_with_its_words(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let ended = bench.start("a", json!({ "fail": "no rows" })).end();
    match ended.events.last() {
        Some(WorkerEvent::Failed(Failure { cause, messages, help, .. })) => {
            assert_eq!((*cause, messages[0].as_str(), help.as_deref()), (Cause::BadData, "no rows", Some("do better")));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((ended.exit.ending, ended.exit.verdict), (Ending::Code(1), None));
    Ok(())
}

#[test(each = Kind::ALL)]
fn an_exit_code_is_told(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    assert_eq!(bench.start("a", json!({ "code": 7 })).end().exit.ending, Ending::Code(7));
    // A process that says nothing has given nothing, whatever its code.
    let silent = bench.start("b", json!({ "code": 0 })).end();
    assert_eq!(silent.exit.ending, Ending::Code(0));
    assert!(!silent.events.iter().any(|event| matches!(event, WorkerEvent::Finished { .. })));
    Ok(())
}

#[test(each = Kind::ALL)]
fn a_signal_is_told(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    assert_eq!(bench.start("a", json!({ "crash": true })).end().exit.ending, Ending::Signal("SIGSEGV".to_owned()));
    Ok(())
}

#[test(each = Kind::ALL)]
fn who_is_asked_to_stop_may_save(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let mut started = bench.start("a", json!({ "wait_ms": 600_000 }));
    started.wait_until_it_runs().stop(Stop::Ask);
    let ended = started.end();
    assert!(ended.events.iter().any(|event| *event == WorkerEvent::Checkpoint { step: 7 }), "{:?}", ended.events);
    assert!(matches!(ended.events.last(), Some(WorkerEvent::Failed(Failure { cause: Cause::Cancelled, .. }))));
    assert_eq!(ended.exit.ending, Ending::Code(1));
    Ok(())
}

#[test(each = Kind::ALL)]
fn who_does_not_listen_is_killed(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let mut started = bench.start("a", json!({ "never_ends": true }));
    started.wait_until_it_runs().stop(Stop::Ask);
    std::thread::sleep(Duration::from_millis(1500));
    started.stop(Stop::Kill);
    let ended = started.end();
    assert_eq!(ended.exit.ending, Ending::Signal("SIGKILL".to_owned()));
    Ok(())
}

#[test(each = Kind::ALL)]
fn a_long_line_comes_whole(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let ended = bench.start("a", json!({ "report_bytes": 9 << 20, "metrics": 1 })).end();
    let long = ended.events.iter().find_map(|event| match event {
        WorkerEvent::Report { text, .. } => Some(text.len()),
        _ => None,
    });
    assert_eq!((long, metrics(&ended)), (Some(9 << 20), vec![0]));
    assert!(matches!(ended.events.last(), Some(WorkerEvent::Finished { .. })));
    Ok(())
}

#[test(each = Kind::ALL)]
fn memory_and_processor_time_are_those_of_the_process(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let ended = bench.start("a", json!({ "hold_mib": 200, "compute_ms": 500 })).end();
    let mib = ended.exit.peak_memory_bytes >> 20;
    assert!((200..400).contains(&mib), "{mib} MiB");
    let (ran, cpu) = (ended.exit.ran, ended.exit.cpu);
    assert!(ran >= Duration::from_millis(500) && cpu > Duration::from_millis(50), "{ran:?} {cpu:?}");
    // A wait in a queue is no part of it.
    assert!(ran < Duration::from_secs(30), "{ran:?}");
    Ok(())
}

#[test(each = Kind::ALL)]
fn many_at_once_do_not_mix(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let started: Vec<_> = (1..=12)
        .map(|number: u64| {
            (number, bench.start(&format!("s{number}"), json!({ "metrics": 20 * number, "wait_ms": 300 })))
        })
        .collect();
    for (number, started) in started {
        let ended = started.end();
        assert_eq!(metrics(&ended), (0..20 * number).collect::<Vec<_>>());
        assert_eq!(ended.exit.ending, Ending::Code(0));
    }
    Ok(())
}

#[test(each = Kind::ALL)]
fn locks_are_held_as_long_as_the_process_lives(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let is_free = || bench.store.try_lock(&Bench::working("a")).unwrap().is_some();
    let mut started = bench.start("a", json!({ "wait_ms": 600_000 }));
    started.wait_until_it_runs().let_go_of_locks();
    assert!(!is_free());
    started.stop(Stop::Ask);
    started.end();
    // What the executor has started may take a moment to be gone, where it is on another machine.
    let began = Instant::now();
    while !is_free() {
        assert!(began.elapsed() < Duration::from_secs(30), "the lock is still held");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// An engine that starts a stage and is to be killed.
pub(crate) fn engine_process(kind: Kind, root: &Path) -> ExitCode {
    let bench = Bench::at(kind, root);
    let mut started = bench.start("a", json!({ "metrics": 5, "wait_ms": 8_000 }));
    started.wait_until_it_runs();
    fs::write(root.join("runs"), "").unwrap();
    loop {
        std::thread::park();
    }
}

#[test(each = Kind::ALL)]
fn the_death_of_the_engine(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let mut engine = Command::new(std::env::current_exe().unwrap())
        .args([ENGINE_ARGUMENT, bench.kind.name()])
        .arg(bench.root())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while !bench.root().join("runs").exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "the stage did not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    engine.kill().unwrap();
    engine.wait().unwrap();
    match bench.kind {
        Kind::Local => {
            let began = Instant::now();
            while !stage_processes(bench.root()).is_empty() {
                assert!(began.elapsed() < Duration::from_secs(30), "it outlives its engine");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Kind::Slurm => {
            assert_ne!(stage_processes(bench.root()), [0; 0], "it dies with its engine");
            let record = bench.record_of("a");
            // In a run of its own, as a later engine has it.
            let again = bench.start_as("b", json!({}), |cluster| cluster.adopt = Some(record));
            let ended = again.end();
            assert_eq!(metrics(&ended), [0, 1, 2, 3, 4], "all that it said is heard again");
            assert!(matches!(ended.events.last(), Some(WorkerEvent::Finished { .. })));
            assert_eq!(ended.exit.ending, Ending::Code(0));
        }
    }
    Ok(())
}

#[test(each = Kind::ALL)]
fn ranks_run_on_the_nodes_that_there_are(kind: Kind) -> Result<(), Unmet> {
    let bench = Bench::new(kind)?;
    let wanted = if bench.kind == Kind::Slurm { 2 } else { 1 };
    let started = bench.start_as("a", json!({ "nodes": wanted }), |cluster| cluster.nodes = wanted);
    let ended = started.end();
    assert_eq!(ended.exit.ending, Ending::Code(0), "{:?} {}", ended.events, ended.log);
    let mut said: Vec<String> = ended
        .events
        .iter()
        .filter_map(|event| match event {
            WorkerEvent::Metrics { values } => {
                Some(format!("{} of {} on {} at {}", values["rank"], values["of"], values["node"], values["at"]))
            }
            _ => None,
        })
        .collect();
    said.sort();
    let expected = match bench.kind {
        Kind::Local => vec![r#"0 of 1 on "here" at "127.0.0.1""#],
        Kind::Slurm => vec![r#"0 of 2 on "n1" at "127.0.0.1""#, r#"1 of 2 on "n2" at "127.0.0.1""#],
    };
    assert_eq!(said, expected);
    Ok(())
}

/// The stage processes whose job is in a folder.
fn stage_processes(root: &Path) -> Vec<i32> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let path = entry.ok()?.path();
        let id = path.file_name()?.to_str()?.parse().ok()?;
        let line = String::from_utf8_lossy(&fs::read(path.join("cmdline")).ok()?).into_owned();
        (line.contains("__stage") && line.contains(root.to_str()?)).then_some(id)
    });
    processes.collect()
}
