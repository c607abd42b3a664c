//! The stage kind `evaluate`, against figures computed here from the model's logits.

#![allow(clippy::unwrap_used, reason = "tests")]

mod tiny;

use std::fs;

use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use model::batch::Batch;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::peft::AdapterConfig;
use serde_json::{Value, json};
use stages::artifact::RowsFacts;
use stages::evaluate::Evaluate;
use stages::rouge::{Stemming, rouge};
use tiny::{PAIRS, TEMPLATE, Tiny};

fn metrics(artifact: &engine::context::Artifact) -> Value {
    serde_json::from_str(&fs::read_to_string(artifact.folder.join("metrics.json")).unwrap()).unwrap()
}

/// Prompt and response of a pair as tokens, each encoded apart.
fn encode(tiny: &Tiny, question: &str, answer: &str) -> (Vec<u32>, Vec<u32>) {
    let tokenizer = tiny.open_tokenizer();
    let mut prompt: Vec<u32> = tokenizer.bos_token_id().filter(|_| tokenizer.wants_bos()).into_iter().collect();
    prompt.extend(tokenizer.encode(&TEMPLATE.replace("{question}", question)).unwrap());
    let mut response = tokenizer.encode(answer).unwrap();
    response.extend(tokenizer.eos_token_id());
    (prompt, response)
}

/// Summed negative log-likelihood of a response, straight from the logits.
fn nll(decoder: &mut Decoder<Cpu>, prompt: &[u32], response: &[u32]) -> f64 {
    let ids: Vec<u32> = [prompt, response].concat();
    let logits = decoder.logits(&Batch::text(ids.clone())).unwrap();
    let vocab_size = decoder.config().vocab_size;
    let of_token = |at: usize| {
        let row = &logits[(at - 1) * vocab_size..at * vocab_size];
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        sum.ln() - f64::from(row[ids[at] as usize])
    };
    (prompt.len()..ids.len()).map(of_token).sum()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-5 * b.abs().max(1.0)
}

#[test]
fn perplexity_is_over_the_tokens_of_all_responses() {
    let tiny = Tiny::new();
    let output = &tiny.bench().run::<Evaluate>(json!({"model": "base", "data": "rows"})).unwrap()["metrics"];
    let mut decoder = tiny.decoder();
    let (mut total, mut tokens) = (0.0, 0);
    let mut each = Vec::new();
    for (question, answer) in PAIRS {
        let (prompt, response) = encode(&tiny, question, answer);
        each.push((nll(&mut decoder, &prompt, &response), response.len() as u64));
        total += each.last().unwrap().0;
        tokens += response.len();
    }
    let found = metrics(output);
    assert_eq!(found["perplexity"]["tokens"], tokens);
    let value = found["perplexity"]["value"].as_f64().unwrap();
    assert!(close(value, (total / tokens as f64).exp()), "{value}");
    assert_eq!(output.description.facts["perplexity"], value);
    assert!(found.get("rouge").is_none());

    let examples = output.folder.join("examples.parquet");
    for (row, (nll, tokens)) in each.iter().enumerate() {
        assert_eq!(tiny::counts(&examples, "tokens")[row], Some(*tokens));
        assert!(close(tiny::numbers(&examples, "nll")[row].unwrap(), *nll), "row {row}");
    }
}

#[test]
fn a_limit_and_a_length_are_kept() {
    let tiny = Tiny::new();
    let (prompt, response) = encode(&tiny, PAIRS[0].0, PAIRS[0].1);
    let max_seq_len = prompt.len() + 2;
    assert!(response.len() > 2);
    let parameters = json!({"model": "base", "data": "rows", "limit": 1, "max_seq_len": max_seq_len});
    let found = metrics(&tiny.bench().run::<Evaluate>(parameters).unwrap()["metrics"]);
    assert_eq!(found["rows"], 1);
    assert_eq!(found["perplexity"]["tokens"], 2);
    assert_eq!(found["perplexity"]["truncated_rows"], 1);
    let expected = nll(&mut tiny.decoder(), &prompt, &response[..2]);
    assert!(close(found["perplexity"]["nll"].as_f64().unwrap(), expected));

    let parameters = json!({"model": "base", "data": "rows", "limit": 1, "max_seq_len": prompt.len()});
    let error = tiny.bench().run::<Evaluate>(parameters).unwrap_err();
    assert!(error.message.contains("no row has a response token"), "{}", error.message);
}

#[test]
fn rouge_is_of_the_greedy_answers() {
    let tiny = Tiny::new();
    let parameters = json!({"model": "base", "data": "rows", "metrics": ["rouge", "perplexity"], "max_new_tokens": 12});
    let output = &tiny.bench().run::<Evaluate>(parameters).unwrap()["metrics"];
    let tokenizer = tiny.open_tokenizer();
    let mut decoder = tiny.decoder();
    let vocab_size = decoder.config().vocab_size;
    let mut sum = 0.0;
    let mut predictions = Vec::new();
    for (question, answer) in PAIRS {
        let (mut ids, _) = encode(&tiny, question, answer);
        let prompt_length = ids.len();
        while ids.len() < prompt_length + 12 {
            let logits = decoder.logits(&Batch::text(ids.clone())).unwrap();
            let last = &logits[logits.len() - vocab_size..];
            let next = model::sampling::argmax(last).unwrap();
            if Some(next) == tokenizer.eos_token_id() {
                break;
            }
            ids.push(next);
        }
        let prediction = tokenizer.decode(&ids[prompt_length..]).unwrap().trim().to_owned();
        sum += rouge(&prediction, answer, Stemming::Porter).rouge1.fmeasure;
        predictions.push(prediction);
    }
    let examples = output.folder.join("examples.parquet");
    assert_eq!(tiny::texts(&examples, "prediction"), predictions);
    assert_eq!(tiny::texts(&examples, "reference"), PAIRS.iter().map(|(_, answer)| *answer).collect::<Vec<_>>());
    let found = metrics(output);
    assert_eq!(found["rouge"]["rows"], PAIRS.len());
    assert!((found["rouge"]["rouge1"]["fmeasure"].as_f64().unwrap() - sum / PAIRS.len() as f64).abs() < 1e-12);
    assert!(found["perplexity"]["value"].as_f64().unwrap() > 1.0);
}

#[test]
fn the_same_evaluation_is_the_same_artefact_on_any_number_of_threads() {
    let tiny = Tiny::new();
    let parameters = json!({"model": "base", "data": "rows", "metrics": ["perplexity", "rouge"], "max_new_tokens": 6});
    let identity = |threads| {
        let outputs = tiny.bench().threads(threads).run::<Evaluate>(parameters.clone()).unwrap();
        outputs["metrics"].description.identity
    };
    assert_eq!(identity(1), identity(3));
}

#[test]
fn an_adapter_takes_part() {
    let tiny = Tiny::new();
    let mut decoder = tiny.decoder();
    let config = AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned(), "down_proj".to_owned()]);
    let mut adapter = decoder.fresh_adapter(&config, 3).unwrap();
    for module in adapter.modules.values_mut() {
        module.lora_b.iter_mut().enumerate().for_each(|(at, value)| *value = (at % 7) as f32 * 0.1 - 0.3);
    }
    let folder = tempfile::tempdir().unwrap();
    adapter.save(folder.path()).unwrap();
    decoder.attach(&adapter).unwrap();
    let (prompt, response) = encode(&tiny, PAIRS[0].0, PAIRS[0].1);
    let expected = nll(&mut decoder, &prompt, &response);
    let without = nll(&mut tiny.decoder(), &prompt, &response);
    assert!(!close(expected, without), "the adapter does nothing");

    let bench = tiny.bench().input("lora.adapter", "adapter", folder.path(), engine::artifact::Facts::new()).unwrap();
    let parameters = json!({"model": "base", "adapter": "lora", "data": "rows", "limit": 1});
    let found = metrics(&bench.run::<Evaluate>(parameters).unwrap()["metrics"]);
    assert!(close(found["perplexity"]["nll"].as_f64().unwrap(), expected));
}

#[test]
fn another_evaluation_is_shown_beside_and_changes_nothing() {
    let tiny = Tiny::new();
    let parameters = json!({"model": "base", "data": "rows"});
    let before = tiny.bench().run::<Evaluate>(parameters).unwrap().remove("metrics").unwrap();
    let bench = tiny.bench().input_of("before.metrics", &before.folder).unwrap();
    let parameters = json!({"model": "base", "data": "rows", "compare_with": "before"});
    let after = &bench.run::<Evaluate>(parameters.clone()).unwrap()["metrics"];
    assert_eq!(after.description.identity, before.description.identity);

    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("metrics.jsonl"), "{}").unwrap();
    let bench = tiny.bench().input("before.metrics", "metrics", other.path(), engine::artifact::Facts::new()).unwrap();
    let error = bench.run::<Evaluate>(parameters).unwrap_err();
    assert_eq!(error.message, "`compare_with` has no `metrics.json`");
}

#[test]
fn mistakes_are_found_without_running() {
    let problems = |parameters: Value, rows: RowsFacts| {
        let mut reader = Reader::default();
        let registry = stages::registry();
        let bound = registry.get("evaluate").unwrap().read(&Node::from_json(&parameters), &mut reader).unwrap();
        let inputs = InputFacts::from([("rows.rows".to_owned(), rows.to_facts())]);
        bound.check(&inputs, Span::default()).into_iter().map(|problem| problem.message).collect::<Vec<_>>()
    };
    let none: [&str; 0] = [];
    let parameters = json!({"model": "base", "data": "rows", "metrics": none});
    assert_eq!(problems(parameters, RowsFacts::messages()), ["`metrics` is empty"]);
    let parameters = json!({"model": "base", "data": "rows", "metrics": ["rouge"]});
    assert_eq!(problems(parameters.clone(), RowsFacts::messages()), none);
    assert_eq!(
        problems(parameters, RowsFacts::text()),
        ["ROUGE compares answers, and the rows are plain text without any"]
    );
}
