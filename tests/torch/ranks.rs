//! Ranks that are killed, hang or are interrupted, and what the next run makes of what they had saved.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_harness::{Unmet, test};

use crate::bench::{Bench, PIPELINE};

/// Two ranks that share every weight of an adapter with magnitudes of its own, and compute each layer's forward twice.
#[test]
fn a_killed_rank_is_named_and_the_next_run_ends_as_if_nothing_had_happened() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    let dora = ["adapter.lora.use_dora=true"];
    let two = [
        &dora[..],
        &["adapter.backend=torch", "adapter.resources.count=2", "adapter.parallel=fsdp2", "adapter.save_every=1"],
        &["adapter.activation_checkpointing=true"],
    ];
    let two = two.concat();
    let native = [&dora[..], &["--home=native"]].concat();
    bench.train(&native).ends_with(0);
    let whole = [&two[..], &["--home=whole"]].concat();
    bench.train(&whole).ends_with(0);
    let expected = bench.trained(&whole);
    expected.is_like(&bench.trained(&native));

    let engine = bench.start(&[&["run", PIPELINE, "--until", "adapter"], &two[..]].concat());
    bench.wait_for_a_step_after(4);
    kill(bench.ranks()["1"], Signal::SIGKILL).unwrap();
    let ended = engine.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("rank 1 of 2 (process ") && said.contains("was killed (SIGKILL)"), "{said}");
    assert!(said.contains("run again to resume from there"), "{said}");
    assert!(bench.ranks().is_empty());
    bench.train(&two).ends_with(0).warns("resuming from step ");
    let resumed = bench.trained(&two);
    assert_eq!(resumed.weights, expected.weights);
    assert_eq!(resumed.records, expected.records);
    Ok(())
}

#[test]
fn a_rank_that_hangs_is_noticed() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    let more =
        ["adapter.backend=torch", "adapter.resources.count=2", "adapter.max_steps=2000", "adapter.watchdog_seconds=15"];
    let engine = bench.start(&[&["run", PIPELINE, "--until", "adapter"], &more[..]].concat());
    bench.wait_for_a_step_after(4);
    kill(bench.ranks()["1"], Signal::SIGSTOP).unwrap();
    let ended = engine.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("rank 0 has waited 15 s in `"), "{said}");
    // Lines are broken where the terminal ends.
    let said = said.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("ranks that are stopped, gone or out of reach: 1"), "{said}");
    assert!(bench.ranks().is_empty());
    Ok(())
}

#[test]
fn an_interrupt_saves_the_step_and_the_next_run_goes_on() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    let more = ["adapter.backend=torch", "adapter.max_steps=1000"];
    let mut engine = bench.start(&[&["run", PIPELINE, "--until", "adapter"], &more[..]].concat());
    bench.wait_for_a_step_after(0);
    kill(Pid::from_raw(engine.id().cast_signed()), Signal::SIGINT).unwrap();
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    assert!(bench.ranks().is_empty());
    // Natively, which takes no seconds to begin.
    let native = ["adapter.backend=native", more[1], "adapter.save_every=1000"];
    bench.train(&native).ends_with(0).warns("resuming from step ");
    Ok(())
}
