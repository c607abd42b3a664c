//! What `plan` says ahead of a run: steps, learning rates, what is trained, memory and disk.

use serde_json::Value;
use test_harness::test;

use crate::support::{Project, Ran};

/// 2100 rows, of which the pipeline takes 2000.
fn project() -> Project {
    let project = Project::with_pipeline("preflight.yaml");
    let row = |n: usize| format!("{{\"question\": \"What is {n} and {n}?\", \"answer\": \"It is {}.\"}}\n", 2 * n);
    project.write("many.jsonl", &(0..2100).map(row).collect::<String>());
    project
}

/// The figure of a stage in the JSON form.
#[track_caller]
fn figure(plan: &Ran, stage: &str, name: &str) -> Value {
    let plan = plan.json();
    let stages = plan["stages"].as_array().unwrap();
    let stage = stages.iter().find(|found| found["stage"] == stage).unwrap();
    let figures = stage["preflight"]["figures"].as_array().unwrap();
    figures.iter().find(|figure| figure["name"] == name).unwrap_or_else(|| panic!("no {name}: {stage:#}"))["value"]
        .clone()
}

#[track_caller]
fn is_near(value: &Value, expected: f64) {
    let value = value.as_f64().unwrap();
    assert!((value - expected).abs() < 1e-9, "{value} is not {expected}");
}

/// The figures of the published study whose warm-up of 100 steps never ends: 40 steps where the last rows of an epoch
/// form a step, 30 where they are dropped as in torchtune.
#[test]
fn a_warm_up_longer_than_the_run_is_foretold() {
    let project = project();
    project
        .run(&["plan", "preflight.yaml"])
        .ends_with(0)
        .says("2000, if `tokens` has so many")
        .says("512 = micro_batch_size 2 × gradient_accumulation_steps 256")
        .says("4: 3 of 512 rows and one of 464")
        .says("40 in 10 epochs")
        .says("1.170e-4: the warm-up of 100 steps never completes")
        .warns("the learning rate reaches 1.170e-4 of 3.000e-4");
    let plan = project.run(&["plan", "preflight.yaml", "--format", "json"]).ends_with(0);
    assert_eq!(figure(&plan, "adapter", "optimizer_steps"), 40);
    is_near(&figure(&plan, "adapter", "last_learning_rate"), 1.17e-4);
    let dropped = ["plan", "preflight.yaml", "adapter.leftover=drop", "--format", "json"];
    let plan = project.run(&dropped).ends_with(0);
    assert_eq!(figure(&plan, "adapter", "optimizer_steps"), 30);
    is_near(&figure(&plan, "adapter", "last_learning_rate"), 8.7e-5);
}

/// Once the data is there, its own figures take the place of what was expected of it.
#[test]
fn figures_of_results_take_the_place_of_expected_ones() {
    let project = project();
    let small = ["questions.split=train[:40]", "adapter.micro_batch_size=4", "adapter.gradient_accumulation_steps=2"];
    let with = |first: &[&'static str]| [first, &small].concat();
    project.run(&with(&["run", "preflight.yaml", "adapter.epochs=1"])).ends_with(0);
    let plan = project.run(&with(&["plan", "preflight.yaml", "adapter.epochs=2", "--format", "json"])).ends_with(0);
    assert_eq!(figure(&plan, "adapter", "rows"), 40);
    assert_eq!(figure(&plan, "adapter", "optimizer_steps"), 10);
    assert!(figure(&plan, "adapter", "tokens_per_epoch").as_u64().unwrap() > 40);
    // Rank 4 on q (32 → 32) and v (32 → 16) of two layers.
    assert_eq!(figure(&plan, "adapter", "trainable_parameters"), 2 * 4 * (64 + 48));
    let adapter =
        plan.json()["stages"].as_array().unwrap().iter().find(|stage| stage["stage"] == "adapter").unwrap().clone();
    let estimate = adapter["preflight"]["peak_memory_bytes"].as_f64().unwrap();
    let measured = adapter["last_run"]["peak_memory_bytes"].as_f64().unwrap();
    // The system counts the pages of the program, too, which are most of so small a process.
    assert!((0.2..2.0).contains(&(estimate / measured)), "{estimate} estimated, {measured} measured");
    // Rows that are not there take no memory.
    let peak = |rows: &'static str| {
        let plan = project.run(&["plan", "preflight.yaml", small[0], rows, "--format", "json"]).ends_with(0).json();
        let stages = plan["stages"].as_array().unwrap();
        stages.iter().find(|stage| stage["stage"] == "adapter").unwrap()["preflight"]["peak_memory_bytes"].clone()
    };
    assert_eq!(peak("adapter.micro_batch_size=40"), peak("adapter.micro_batch_size=4000"));
}

/// A mistake that only the facts of a finished stage show is found by `plan`, before anything else runs.
#[test]
fn what_a_stage_would_refuse_is_an_error_of_the_plan() {
    let project = project();
    project.run(&["run", "preflight.yaml", "questions.split=train[:8]"]).ends_with(0);
    project
        .run(&["plan", "preflight.yaml", "questions.split=train[:8]", "fresh.vocab_size=290", "adapter.model=fresh"])
        .ends_with(0);
    project.edit("preflight.yaml", "max_position_embeddings: 128", "max_position_embeddings: 128\n  tiny:\n    uses: new_model\n    with: { text: text, vocab_size: 280, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1, max_position_embeddings: 4 }");
    project.run(&["run", "preflight.yaml", "questions.split=train[:8]"]).ends_with(0);
    project
        .run(&["plan", "preflight.yaml", "questions.split=train[:8]", "adapter.model=tiny"])
        .ends_with(2)
        .warns("the model has");
}

/// Before anything ran, the rows of local files say how many steps a training will have.
#[test]
fn steps_are_known_ahead_of_a_first_run() {
    let project = Project::new();
    let row = "{\"question\": \"Who?\", \"answer\": \"Pip.\"}\n";
    project.write("rows.jsonl", &row.repeat(50));
    project.write("text.jsonl", "{\"text\": \"Who is Pip?\"}\n");
    project.write(
        "p.yaml",
        "version: 1\nname: p\nstages:\n  text: { uses: dataset, with: { source: ./text.jsonl } }\n  \
         rows: { uses: dataset, with: { source: ./rows.jsonl, column_map: { output: answer }, template: '{question}' } }\n  \
         fresh: { uses: new_model, with: { text: text, vocab_size: 300, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, max_position_embeddings: 64 } }\n  \
         tokens: { uses: tokenize, with: { dataset: rows, tokenizer: fresh, max_seq_len: 32 } }\n  \
         adapter: { uses: train, with: { model: fresh, data: tokens, micro_batch_size: 8, epochs: 2 } }\n",
    );
    let planned = project.run(&["plan", "p.yaml"]).ends_with(0);
    planned.says("50, if `tokens` has so many").says("optimizer steps").says("14 in 2 epochs");
    let fewer = project.run(&["plan", "p.yaml", "rows.limit=20"]).ends_with(0);
    fewer.says("20, if `tokens` has so many").says("6 in 2 epochs");
}
