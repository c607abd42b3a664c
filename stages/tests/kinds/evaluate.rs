//! The stage kind `evaluate`, against figures computed here from the model's logits.

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
use stages::data::artifact::RowsFacts;
use stages::kinds::evaluate::Evaluate;
use stages::metrics::bleu::Counts;
use stages::metrics::rouge::{Stemming, rouge};
use test_harness::test;

use crate::tiny::{self, PAIRS, TEMPLATE, Tiny};

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

/// Summed negative log-likelihood of a response, and how many of its tokens are the most likely ones, straight from the
/// logits.
fn likelihood(decoder: &mut Decoder<Cpu>, prompt: &[u32], response: &[u32]) -> (f64, u64) {
    let ids: Vec<u32> = [prompt, response].concat();
    let logits = decoder.logits(&Batch::text(ids.clone())).unwrap();
    let vocab_size = decoder.config().vocab_size;
    let (mut nll, mut correct) = (0.0, 0);
    for at in prompt.len()..ids.len() {
        let row = &logits[(at - 1) * vocab_size..at * vocab_size];
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        nll += sum.ln() - f64::from(row[ids[at] as usize]);
        correct += u64::from(model::sampling::argmax(row) == Some(ids[at]));
    }
    (nll, correct)
}

fn nll(decoder: &mut Decoder<Cpu>, prompt: &[u32], response: &[u32]) -> f64 {
    likelihood(decoder, prompt, response).0
}

/// What the model answers to each pair, greedily, computed without a cache.
fn greedy_answers(tiny: &Tiny, max_new_tokens: usize) -> Vec<String> {
    let tokenizer = tiny.open_tokenizer();
    let mut decoder = tiny.decoder();
    let vocab_size = decoder.config().vocab_size;
    let answers = PAIRS.iter().map(|(question, answer)| {
        let (mut ids, _) = encode(tiny, question, answer);
        let prompt_length = ids.len();
        while ids.len() < prompt_length + max_new_tokens {
            let logits = decoder.logits(&Batch::text(ids.clone())).unwrap();
            let next = model::sampling::argmax(&logits[logits.len() - vocab_size..]).unwrap();
            if Some(next) == tokenizer.eos_token_id() {
                break;
            }
            ids.push(next);
        }
        tokenizer.decode(&ids[prompt_length..]).unwrap().trim().to_owned()
    });
    answers.collect()
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
    // Of the linearised ratio, in nats, through the slope of `exp`.
    let residual = |(nll, length): &(f64, u64)| (nll - total / tokens as f64 * *length as f64).powi(2);
    let rows = each.len() as f64;
    let error = value * (each.iter().map(residual).sum::<f64>() * rows / (rows - 1.0)).sqrt() / tokens as f64;
    assert!(close(output.description.facts["perplexity_stderr"].as_f64().unwrap(), error), "{error}");
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
    let predictions = greedy_answers(&tiny, 12);
    let of_row = |(prediction, (_, answer)): (&String, &(&str, &str))| {
        rouge(prediction, answer, Stemming::Porter).rouge1.fmeasure
    };
    let each: Vec<f64> = predictions.iter().zip(PAIRS).map(of_row).collect();
    let (sum, rows) = (each.iter().sum::<f64>(), each.len() as f64);
    let examples = output.folder.join("examples.parquet");
    assert_eq!(tiny::texts(&examples, "prediction"), predictions);
    assert_eq!(tiny::texts(&examples, "reference"), PAIRS.iter().map(|(_, answer)| *answer).collect::<Vec<_>>());
    let found = metrics(output);
    assert_eq!(found["rouge"]["rows"], PAIRS.len());
    assert!((found["rouge"]["rouge1"]["fmeasure"].as_f64().unwrap() - sum / rows).abs() < 1e-12);
    let squares: f64 = each.iter().map(|value| (value - sum / rows).powi(2)).sum();
    let error = output.description.facts["rouge1_stderr"].as_f64().unwrap();
    assert!((error - (squares / (rows - 1.0) / rows).sqrt()).abs() < 1e-12, "{error}");
    assert!(found["perplexity"]["value"].as_f64().unwrap() > 1.0);
}

#[test]
fn token_accuracy_is_over_the_tokens_of_all_responses() {
    let tiny = Tiny::new();
    let parameters = json!({"model": "base", "data": "rows", "metrics": ["token_accuracy"]});
    let output = &tiny.bench().run::<Evaluate>(parameters).unwrap()["metrics"];
    let mut decoder = tiny.decoder();
    let (mut correct, mut tokens, mut each) = (0, 0, Vec::new());
    for (question, answer) in PAIRS {
        let (prompt, response) = encode(&tiny, question, answer);
        each.push(Some(likelihood(&mut decoder, &prompt, &response).1));
        correct += each.last().unwrap().unwrap();
        tokens += response.len();
    }
    let found = metrics(output);
    assert_eq!(
        (&found["token_accuracy"]["correct"], &found["token_accuracy"]["tokens"]),
        (&json!(correct), &json!(tokens))
    );
    assert_eq!(found["token_accuracy"]["value"], correct as f64 / tokens as f64);
    assert!(found.get("perplexity").is_none());
    assert_eq!(tiny::counts(&output.folder.join("examples.parquet"), "correct"), each);
}

#[test]
fn bleu_and_exact_match_are_of_the_greedy_answers() {
    let tiny = Tiny::new();
    // References that the answers meet: the model's own, one of them spelled differently, one with more behind it.
    let mut answers = greedy_answers(&tiny, 48);
    let predictions = answers.clone();
    answers[1] = format!("The {}!", answers[1].to_uppercase());
    answers[4].push_str(" and five words that follow it");
    let pairs: Vec<(&str, &str)> =
        PAIRS.iter().zip(&answers).map(|((question, _), answer)| (*question, answer.as_str())).collect();
    let (folder, facts) = tiny.rows(&pairs);
    let bench = tiny.bench().input("own.rows", "rows", folder.path(), facts).unwrap();
    let run = |normalization: &str| {
        let parameters = json!({
            "model": "base", "data": "own", "metrics": ["bleu", "exact_match"], "max_new_tokens": 48,
            "normalization": normalization,
        });
        bench.run::<Evaluate>(parameters).unwrap().remove("metrics").unwrap()
    };
    let output = run("strip");
    let found = metrics(&output);
    let equal: Vec<bool> =
        predictions.iter().zip(&answers).map(|(found, given)| found.trim() == given.trim()).collect();
    assert_eq!(equal, [true, false, true, true, false]);
    assert_eq!((&found["exact_match"]["matches"], &found["exact_match"]["value"]), (&json!(3), &json!(0.6)));
    let mut counts = Counts::default();
    predictions.iter().zip(&answers).for_each(|(found, given)| counts += Counts::of(found, given));
    let bleu = counts.corpus();
    assert!(bleu.score > 1.0 && bleu.brevity_penalty < 1.0, "{bleu:?}");
    assert_eq!(found["bleu"]["score"], bleu.score);
    assert_eq!(found["bleu"]["brevity_penalty"], bleu.brevity_penalty);
    assert_eq!(found["answers"], json!({"rows": 5, "skipped_rows": 0, "empty": 0, "cut": found["answers"]["cut"]}));
    let sentence = Counts::of(&predictions[4], &answers[4]).sentence().score;
    assert_eq!(tiny::numbers(&output.folder.join("examples.parquet"), "bleu")[4], Some(sentence));

    let squad = metrics(&run("squad"));
    assert_eq!(squad["exact_match"]["matches"], 4, "case, punctuation and articles count no longer");
}

#[test]
fn what_does_not_fit_is_counted_or_named() {
    let tiny = Tiny::new();
    let long = "x ".repeat(400);
    let (folder, facts) = tiny.rows(&[("Why?", "Because."), (&long, "Never read."), ("Who?", &long)]);
    let bench = tiny.bench().input("own.rows", "rows", folder.path(), facts).unwrap();
    let parameters = json!({"model": "base", "data": "own", "metrics": ["perplexity", "rouge"], "max_new_tokens": 4});
    let found = metrics(&bench.run::<Evaluate>(parameters).unwrap()["metrics"]);
    assert_eq!(found["perplexity"]["truncated_rows"], 2);
    assert_eq!(found["perplexity"]["rows_without_tokens"], 1);
    assert_eq!((&found["answers"]["rows"], &found["answers"]["skipped_rows"]), (&json!(2), &json!(1)));

    // Nothing of the only response is left.
    let (folder, facts) = tiny.rows(&[(&long, "Never read.")]);
    let bench = tiny.bench().input("own.rows", "rows", folder.path(), facts).unwrap();
    let error = bench.run::<Evaluate>(json!({"model": "base", "data": "own"})).unwrap_err();
    let expected = "no row has a response token for perplexity; 1 of 1 rows are cut to 128 tokens";
    assert_eq!(error.message, expected);
}

#[test]
fn a_tokenizer_of_another_model_is_named() {
    let tiny = Tiny::new();
    let other = tiny.model_with_vocabulary(264);
    let bench = tiny.bench().input_of("small.model", &other.folder).unwrap();
    for metric in ["perplexity", "rouge"] {
        let parameters = json!({"model": "small", "tokenizer": "base", "data": "rows", "metrics": [metric]});
        let error = bench.run::<Evaluate>(parameters).unwrap_err();
        assert!(
            error.message.contains("row 1 has the token `") && error.message.ends_with("vocabulary ends at 264"),
            "{}",
            error.message
        );
        assert!(error.help.unwrap().contains("`tokenizer`"));
    }
}

#[test]
fn the_size_of_a_group_decides_nothing() {
    let tiny = Tiny::new();
    // More rows than a group has.
    let pairs: Vec<(String, String)> = (0..300).map(|row| (format!("{row}?"), format!("{}", row % 7))).collect();
    let pairs: Vec<(&str, &str)> =
        pairs.iter().map(|(question, answer)| (question.as_str(), answer.as_str())).collect();
    let (folder, facts) = tiny.rows(&pairs);
    let bench = tiny.bench().input("own.rows", "rows", folder.path(), facts).unwrap();
    let run = |batch_size: u64, limit: u64| {
        let parameters = json!({
            "model": "base", "data": "own", "metrics": ["perplexity", "rouge", "bleu"], "max_new_tokens": 3,
            "batch_size": batch_size, "limit": limit,
        });
        bench.run::<Evaluate>(parameters).unwrap().remove("metrics").unwrap()
    };
    let all = run(8, 300);
    assert_eq!(all.description.identity, run(3, 300).description.identity);
    let examples = all.folder.join("examples.parquet");
    assert_eq!(tiny::counts(&examples, "row"), (0..300).map(Some).collect::<Vec<_>>());
    let few = run(8, 2);
    let nll = |output: &engine::context::Artifact| tiny::numbers(&output.folder.join("examples.parquet"), "nll");
    assert!(nll(&few).iter().zip(nll(&all)).all(|(few, all)| close(few.unwrap(), all.unwrap())));
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
fn narrower_types_are_near_f32() {
    let tiny = Tiny::new();
    let run = |key: &str, value: &str| {
        let parameters = json!({"model": "base", "data": "rows", "metrics": ["perplexity", "rouge"], key: value, "max_new_tokens": 4});
        metrics(&tiny.bench().run::<Evaluate>(parameters).unwrap()["metrics"])["perplexity"]["nll"].as_f64().unwrap()
    };
    let exact = run("dtype", "f32");
    for (key, value, share) in [("dtype", "bf16", 0.02), ("quantize", "int8", 0.02), ("quantize", "int4", 0.1)] {
        let found = run(key, value);
        assert!(exact != found && (exact - found).abs() < share * exact, "{value}: {found}, f32: {exact}");
        if key == "quantize" {
            assert_eq!(run("dtype", value).to_bits(), found.to_bits(), "the older name of {value}");
        }
    }
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
fn an_adapter_that_is_not_finite_is_refused_by_name() {
    let tiny = Tiny::new();
    let config = AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned(), "down_proj".to_owned()]);
    let mut adapter = tiny.decoder().fresh_adapter(&config, 3).unwrap();
    adapter.modules.get_mut("model.layers.1.mlp.down_proj").unwrap().lora_b[1] = f32::NAN;
    let folder = tempfile::tempdir().unwrap();
    adapter.save(folder.path()).unwrap();
    let bench = tiny.bench().input("lora.adapter", "adapter", folder.path(), engine::artifact::Facts::new()).unwrap();
    let error = bench.run::<Evaluate>(json!({"model": "base", "adapter": "lora", "data": "rows"})).unwrap_err();
    assert_eq!(error.message, "the adapter has a value that is not finite in `model.layers.1.mlp.down_proj`");
    assert!(error.help.is_some());
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
    let limits =
        json!({"model": "base", "data": "rows", "stop_strings": [""], "min_new_tokens": 9, "max_new_tokens": 8});
    let of_candle = json!({"model": "base", "data": "rows", "kernels": "candle", "dtype": "int4"});
    assert_eq!(
        problems(of_candle, RowsFacts::messages()),
        [
            "`dtype: int4` is an older name of `quantize: int4`",
            "`kernels: candle` has no quantised weights, as `dtype: int4` asks for"
        ]
    );
    let of_candle = json!({"model": "base", "data": "rows", "kernels": "candle", "quantize": "int8"});
    let expected = ["`kernels: candle` has no quantised weights, as `quantize: int8` asks for"];
    assert_eq!(problems(of_candle, RowsFacts::messages()), expected);
    let expected = [
        "`stop_strings` has an empty string, which would end every completion at once",
        "`min_new_tokens` is 9, more than `max_new_tokens`, which is 8",
    ];
    assert_eq!(problems(limits, RowsFacts::messages()), expected);
    assert_eq!(
        problems(parameters, RowsFacts::text()),
        ["`rouge` compares predictions, and the rows are plain text without a response"]
    );
}
