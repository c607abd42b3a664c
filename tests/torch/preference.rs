//! Losses of preferences on the torch worker beside the native backend: pairs in packs, judged responses, and a rank that is
//! killed.

use std::fs;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use test_harness::{Unmet, test};

use crate::bench::{Bench, Trained};

const PIPELINE: &str = "preference.yaml";

/// A project whose pairs prefer an answer to that of another question.
fn bench() -> Result<Bench, Unmet> {
    let bench = Bench::of(PIPELINE)?;
    let text = fs::read_to_string(bench.project.path("questions.jsonl")).unwrap();
    let questions: Vec<Value> = text.lines().take(24).map(|line| serde_json::from_str(line).unwrap()).collect();
    let others = questions.iter().cycle().skip(5);
    let pair = |(row, other): (&Value, &Value)| json!({"prompt": row["question"], "chosen": row["answer"], "rejected": other["question"]});
    let pairs: Vec<Value> = questions.iter().zip(others).map(pair).collect();
    let judge = |(number, pair): (usize, &Value)| {
        let side = if number % 2 == 0 { "chosen" } else { "rejected" };
        json!({"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"})
    };
    let judged: Vec<Value> = pairs.iter().enumerate().map(judge).collect();
    for (name, rows) in [("pairs", &pairs[..18]), ("held_out", &pairs[18..]), ("judged", &judged)] {
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        bench.project.write(&format!("{name}.jsonl"), &lines);
    }
    Ok(bench)
}

/// Trains one of the stages, and returns what it made.
fn trained(bench: &Bench, stage: &str, more: &[&str]) -> Trained {
    bench.run(&[&["run", PIPELINE, "--until", stage], more].concat()).ends_with(0);
    left(bench, stage, more)
}

fn left(bench: &Bench, stage: &str, more: &[&str]) -> Trained {
    let file = |output: &str, name: &str| {
        let folder = bench.project.path("exported");
        let _ = fs::remove_dir_all(&folder);
        bench.run(&[&["export", PIPELINE, output, "exported"], more].concat()).ends_with(0);
        fs::read(folder.join(name)).unwrap()
    };
    let metrics = String::from_utf8(file(&format!("{stage}.metrics"), "metrics.jsonl")).unwrap();
    Trained {
        records: metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
        weights: file(&format!("{stage}.adapter"), "adapter_model.safetensors"),
    }
}

fn number(record: &Value, name: &str) -> f64 {
    record[name].as_f64().unwrap_or_else(|| panic!("no `{name}` in {record}"))
}

#[test]
fn pairs_in_packs_are_trained_as_by_the_native_backend() -> Result<(), Unmet> {
    let bench = bench()?;
    let expected = trained(&bench, "adapter", &["--home=native"]);
    let last = expected.records.iter().rfind(|record| record["kind"] == "validation").unwrap();
    assert!(number(last, "rewards/accuracies") > 0.9, "{last}");
    let backend = "adapter.backend=torch";
    for (home, more) in [
        ("--home=one", &[][..]),
        ("--home=ddp", &["adapter.resources.count=2"]),
        (
            "--home=fsdp2",
            &["adapter.resources.count=2", "adapter.parallel=fsdp2", "adapter.activation_checkpointing=true"],
        ),
    ] {
        let found = trained(&bench, "adapter", &[&[home, backend], more].concat());
        found.is_like(&expected);
        let first = found.records.iter().find(|record| record["kind"] == "train").unwrap();
        assert!(number(first, "rewards/margins") == 0.0 && number(first, "rewards/chosen") == 0.0, "{first}");
        for (ours, native) in found.records.iter().zip(&expected.records) {
            for name in ["rewards/chosen", "rewards/rejected", "log_probs/chosen", "log_probs/rejected"] {
                let apart = (number(ours, name) - number(native, name)).abs();
                assert!(apart <= 1e-4 * number(native, name).abs().max(1.0), "{name}: {ours} {native}");
            }
            assert_eq!(ours["rewards/accuracies"], native["rewards/accuracies"], "{ours} {native}");
        }
    }
    Ok(())
}

#[test]
fn judged_responses_are_compared_over_the_ranks() -> Result<(), Unmet> {
    let bench = bench()?;
    let expected = trained(&bench, "judge", &["--home=native"]);
    assert!(expected.records.iter().any(|record| number(record, "kl") > 0.0), "{:?}", expected.records);
    let two = ["--home=torch", "judge.backend=torch", "judge.resources.count=2", "judge.parallel=fsdp2"];
    let found = trained(&bench, "judge", &two);
    found.is_like(&expected);
    for (ours, native) in found.records.iter().zip(&expected.records) {
        assert!((number(ours, "kl") - number(native, "kl")).abs() < 1e-4, "{ours} {native}");
    }
    Ok(())
}

#[test]
fn a_killed_rank_costs_neither_steps_nor_the_reference() -> Result<(), Unmet> {
    let bench = bench()?;
    let two = ["adapter.backend=torch", "adapter.resources.count=2", "adapter.save_every=1", "adapter.max_steps=40"];
    let expected = trained(&bench, "adapter", &[&two[..], &["--home=whole"]].concat());
    let engine = bench.start(&[&["run", PIPELINE, "--until", "adapter"], &two[..]].concat());
    bench.wait_for_a_step_after(4);
    kill(bench.ranks()["1"], Signal::SIGKILL).unwrap();
    let ended = engine.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", String::from_utf8_lossy(&ended.stderr));
    let partial = bench.project.path(".pipeline/store/partial");
    let kept: Vec<_> = fs::read_dir(&partial).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(kept.iter().any(|folder| folder.join("reference-data.f64").exists()), "{kept:?}");
    let resumed = bench.run(&[&["run", PIPELINE, "--until", "adapter"], &two[..]].concat());
    resumed.ends_with(0).warns("resuming from step ");
    let resumed = left(&bench, "adapter", &two);
    assert_eq!(resumed.weights, expected.weights);
    assert_eq!(resumed.records, expected.records);
    Ok(())
}
