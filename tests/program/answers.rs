//! `kill -9` in the middle of `generate`, `evaluate` and `log_probs`: the next run continues from what was answered,
//! and ends with the bytes of one that was never interrupted.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use test_harness::test;

use crate::support::Project;

const FILE: &str = r#"
version: 1
stages:
  text: { uses: dataset, with: { source: ./text.jsonl } }
  questions:
    uses: dataset
    with: { source: ./many.jsonl, column_map: { question: question, output: answer }, template: "Q: {question}\nA: " }
  fresh:
    uses: new_model
    with:
      { text: text, vocab_size: 300, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 3, num_attention_heads: 4,
        num_key_value_heads: 2, max_position_embeddings: 256 }
  tokens: { uses: tokenize, with: { dataset: questions, tokenizer: fresh, max_seq_len: 64 } }
  answers:
    uses: generate
    with: { model: fresh, prompts: questions, min_new_tokens: 40, max_new_tokens: 40, temperature: 0.8, batch_size: 2 }
  figures:
    uses: evaluate
    with:
      { model: fresh, data: questions, metrics: [perplexity, exact_match], min_new_tokens: 20, max_new_tokens: 20,
        stop_strings: ["zq"], batch_size: 2 }
  scored: { uses: log_probs, with: { model: fresh, data: tokens } }
"#;

const ROWS: usize = 160;

fn project() -> Project {
    let project = Project::with_pipeline("lora.yaml");
    project.write("answers.yaml", FILE);
    let rows = (0..ROWS).map(|row| {
        let question = "how many ".repeat(row % 5) + &row.to_string();
        format!("{}\n", serde_json::json!({ "question": question, "answer": (7 * row).to_string() }))
    });
    project.write("many.jsonl", &rows.collect::<String>());
    project
}

/// Lines of the journal of a stage that is interrupted.
fn noted(project: &Project) -> usize {
    let folders = fs::read_dir(project.path(".pipeline/store/partial")).into_iter().flatten().flatten();
    let journals = folders.filter_map(|folder| fs::read_to_string(folder.path().join("journal.jsonl")).ok());
    journals.map(|journal| journal.lines().count()).sum()
}

/// Starts a stage and kills its process, with the engine or alone, once it has noted so many requests; whether that was
/// before its end.
fn kill_after(project: &Project, stage: &str, requests: usize, engine_too: bool) -> bool {
    let mut engine = project.start(&["run", "answers.yaml", "--until", stage]);
    let began = Instant::now();
    while noted(project) <= requests && engine.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(120), "`{stage}` noted nothing");
        sleep(Duration::from_micros(200));
    }
    if engine_too {
        // It may have ended by itself since.
        let _ = engine.kill();
    } else if let Some((stage, _)) = project.processes().into_iter().find(|(_, line)| line.contains("__stage")) {
        let _ = kill(Pid::from_raw(stage), Signal::SIGKILL);
    }
    let killed = engine.wait().unwrap().code() != Some(0);
    while !project.processes().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(180), "still alive: {:?}", project.processes());
        sleep(Duration::from_millis(10));
    }
    killed
}

/// What is known of a stage of the newest run.
fn shown(project: &Project, stage: &str) -> Value {
    project.run(&["runs", "show", "latest", stage, "--format", "json"]).ends_with(0).json()
}

#[test]
fn a_killed_inference_continues_from_what_it_has_answered_and_ends_with_the_same_bytes() {
    let (whole, project) = (project(), project());
    whole.run(&["run", "answers.yaml"]).ends_with(0);
    project.run(&["run", "answers.yaml", "--until", "fresh", "--until", "tokens"]).ends_with(0);
    let mut met = 0;
    for (stage, first, second) in [("answers", 20, 70), ("figures", 20, 190), ("scored", 30, 80)] {
        let killed = [kill_after(&project, stage, first, true), kill_after(&project, stage, second, false)];
        met += killed.iter().filter(|killed| **killed).count();
        if killed[1] {
            project.run(&["plan", "answers.yaml", "--until", stage]).ends_with(0).says("continues from");
        }
        let before = noted(&project);
        project.run(&["run", "answers.yaml", "--until", stage]).ends_with(0);
        let (interrupted, uninterrupted) = (shown(&project, stage), shown(&whole, stage));
        let continued = interrupted["how"]["continued_from_requests"].as_u64();
        assert!(
            !killed[1] || (second as u64..before as u64).contains(&continued.unwrap()),
            "{stage}: {continued:?} of {before}"
        );
        let tree = |shown: &Value| shown["outputs"].as_object().unwrap().values().next().unwrap()["tree"].clone();
        assert_eq!(tree(&interrupted), tree(&uninterrupted), "{stage} ended with other bytes");
        assert_eq!(noted(&project), 0, "the journal of `{stage}` is still there");
    }
    assert!(met >= 3, "only {met} of 6 kills came before the end of a stage");
    project.run(&["cache", "verify"]).ends_with(0);
}
