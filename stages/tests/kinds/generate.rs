//! The stage kind `generate`.

use std::fs;

use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use model::batch::Batch;
use serde_json::{Value, json};
use stages::kinds::generate::Generate;
use test_harness::test;

use crate::tiny::{self, PAIRS, TEMPLATE, Tiny};

fn samples(tiny: &Tiny, parameters: Value) -> (Vec<String>, engine::context::Artifact) {
    let output = tiny.bench().run::<Generate>(parameters).unwrap().remove("samples").unwrap();
    (tiny::texts(&output.folder.join("samples.parquet"), "completion"), output)
}

#[test]
fn temperature_zero_takes_the_most_likely_token() {
    let tiny = Tiny::new();
    let parameters =
        json!({"model": "base", "prompts": ["Who are you?", "Why?"], "template": TEMPLATE, "max_new_tokens": 9});
    let (completions, output) = samples(&tiny, parameters);
    let tokenizer = tiny.open_tokenizer();
    let mut decoder = tiny.decoder();
    let vocab_size = decoder.config().vocab_size;
    for (question, completion) in ["Who are you?", "Why?"].iter().zip(&completions) {
        let mut ids: Vec<u32> = tokenizer.bos_token_id().filter(|_| tokenizer.wants_bos()).into_iter().collect();
        ids.extend(tokenizer.encode(&TEMPLATE.replace("{question}", question)).unwrap());
        let prompt_length = ids.len();
        while ids.len() < prompt_length + 9 {
            let logits = decoder.logits(&Batch::text(ids.clone())).unwrap();
            let next = model::sampling::argmax(&logits[logits.len() - vocab_size..]).unwrap();
            if Some(next) == tokenizer.eos_token_id() {
                break;
            }
            ids.push(next);
        }
        assert_eq!(completion, &tokenizer.decode(&ids[prompt_length..]).unwrap());
    }
    let text = fs::read_to_string(output.folder.join("samples.txt")).unwrap();
    assert!(text.contains("Who are you?") && text.contains(&completions[0]), "{text}");
    assert!(!text.contains("sec"), "a time stands in the artefact");
}

#[test]
fn a_seed_gives_the_same_answers_in_any_company() {
    let tiny = Tiny::new();
    let ask = |prompts: Value, seed: u64| {
        let parameters = json!({
            "model": "base", "prompts": prompts, "max_new_tokens": 16, "temperature": 1.5, "top_k": 200, "top_p": 0.99,
            "min_p": 0.001, "repetition_penalty": 1.05, "seed": seed, "batch_size": 4,
        });
        samples(&tiny, parameters)
    };
    let many: Vec<String> = (0..11).map(|number| format!("prompt {number}")).collect();
    let (all, output) = ask(json!(many), 7);
    let (again, output_again) = ask(json!(many), 7);
    assert_eq!(all, again);
    assert_eq!(output.description.identity, output_again.description.identity);
    assert_ne!(all, ask(json!(many), 8).0);
    assert_eq!(ask(json!(["prompt 0"]), 7).0[0], all[0]);
}

#[test]
fn rows_are_asked_as_they_are_trained() {
    let tiny = Tiny::new();
    let (from_rows, output) =
        samples(&tiny, json!({"model": "base", "prompts": "rows", "limit": 3, "max_new_tokens": 7}));
    let questions: Vec<&str> = PAIRS.iter().take(3).map(|(question, _)| *question).collect();
    let (from_texts, _) =
        samples(&tiny, json!({"model": "base", "prompts": questions, "template": TEMPLATE, "max_new_tokens": 7}));
    assert_eq!(from_rows, from_texts);
    let path = output.folder.join("samples.parquet");
    assert_eq!(tiny::texts(&path, "reference"), [PAIRS[0].1, PAIRS[1].1, PAIRS[2].1]);
    assert_eq!(tiny::texts(&path, "prompt")[0], TEMPLATE.replace("{question}", PAIRS[0].0));
    for (tokens, stop) in tiny::counts(&path, "tokens").iter().zip(tiny::texts(&path, "stop")) {
        assert_eq!(stop == "length", *tokens == Some(7), "{tokens:?} {stop}");
    }
}

#[test]
fn the_model_says_where_an_answer_ends() {
    let tiny = Tiny::new();
    let (free, output) = samples(&tiny, json!({"model": "base", "prompts": ["a b c"], "max_new_tokens": 8}));
    let path = output.folder.join("samples.parquet");
    assert_eq!(tiny::texts(&path, "stop"), ["length"], "the test needs an answer that goes on: {free:?}");
    // The token that comes first is declared an end of text.
    let mut decoder = tiny.decoder();
    let tokenizer = tiny.open_tokenizer();
    let mut ids: Vec<u32> = tokenizer.bos_token_id().filter(|_| tokenizer.wants_bos()).into_iter().collect();
    ids.extend(tokenizer.encode("a b c").unwrap());
    let logits = decoder.logits(&Batch::text(ids)).unwrap();
    let first = model::sampling::argmax(&logits[logits.len() - decoder.config().vocab_size..]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&tiny.model.folder).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let generation_config = json!({"eos_token_id": [first, 2]}).to_string();
    let file = folder.path().join("generation_config.json");
    let _ = fs::remove_file(&file);
    fs::write(file, generation_config).unwrap();
    let bench = engine::test_bench::TestBench::new(tiny.root.path())
        .input("ends.model", "model", folder.path(), engine::artifact::Facts::new())
        .unwrap();
    let outputs = bench.run::<Generate>(json!({"model": "ends", "prompts": ["a b c"], "max_new_tokens": 8})).unwrap();
    let path = outputs["samples"].folder.join("samples.parquet");
    assert_eq!(tiny::texts(&path, "stop"), ["end_of_text"]);
    assert_eq!(tiny::counts(&path, "tokens"), [Some(0)]);
}

#[test]
fn an_answer_ends_with_the_models_positions() {
    let tiny = Tiny::new();
    let tokenizer = tiny.open_tokenizer();
    let prompt = "x ".repeat(50);
    let begin = usize::from(tokenizer.wants_bos());
    let tokens = begin + tokenizer.encode(&prompt).unwrap().len();
    assert!(tokens < 128, "{tokens}");
    let (_, output) = samples(&tiny, json!({"model": "base", "prompts": [prompt], "max_new_tokens": 1_000_000}));
    let path = output.folder.join("samples.parquet");
    let (found, stop) = (tiny::counts(&path, "tokens")[0].unwrap(), &tiny::texts(&path, "stop")[0]);
    match stop.as_str() {
        "length" => assert_eq!(found as usize, 128 - tokens),
        _ => assert!((found as usize) < 128 - tokens),
    }
}

#[test]
fn a_bad_prompt_is_counted_and_the_others_are_answered() {
    let tiny = Tiny::new();
    let long = "x ".repeat(400);
    let prompts = json!(["short", long, "also short"]);
    let mut parameters = json!({"model": "base", "prompts": prompts, "max_new_tokens": 4});
    let (completions, output) = samples(&tiny, parameters.clone());
    let path = output.folder.join("samples.parquet");
    let (alone, _) = samples(&tiny, json!({"model": "base", "prompts": ["short"], "max_new_tokens": 4}));
    assert_eq!((&completions[0], completions[1].as_str()), (&alone[0], ""));
    assert_eq!(tiny::counts(&path, "tokens").iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
    let problem = &tiny::texts(&path, "problem")[1];
    assert!(problem.starts_with("it has ") && problem.ends_with("the model has 128 positions"), "{problem}");
    assert_eq!(tiny::counts(&path, "row"), [Some(0), Some(1), Some(2)]);
    assert_eq!((&output.description.facts["rows"], &output.description.facts["skipped"]), (&json!(3), &json!(1)));
    assert!(fs::read_to_string(output.folder.join("samples.txt")).unwrap().contains("not asked: it has "));

    parameters["on_bad_prompt"] = "error".into();
    let error = tiny.bench().run::<Generate>(parameters.clone()).unwrap_err();
    assert!(error.message.starts_with("prompt 2 cannot be used: it has "), "{}", error.message);

    parameters["on_bad_prompt"] = "skip".into();
    parameters["prompts"] = json!([long]);
    let error = tiny.bench().run::<Generate>(parameters).unwrap_err();
    assert!(error.message.starts_with("none of 1 prompts could be used: prompt 1: it has "), "{}", error.message);
}

#[test]
fn a_stop_string_ends_an_answer_wherever_tokens_begin_and_end() {
    let tiny = Tiny::new();
    let prompt = "Who are you?";
    let ask = |more: Value| {
        let mut parameters = json!({"model": "base", "prompts": [prompt], "max_new_tokens": 24});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (completions, output) = samples(&tiny, parameters);
        let path = output.folder.join("samples.parquet");
        (completions[0].clone(), tiny::texts(&path, "stop")[0].clone(), tiny::counts(&path, "tokens")[0].unwrap())
    };
    let (whole, stop, _) = ask(json!({}));
    assert_eq!(stop, "length", "the test needs a long answer: {whole:?}");
    // Any three characters in the middle: with a vocabulary of 300 they are of several tokens.
    let letters: Vec<char> = whole.chars().collect();
    let wanted: String = letters[5..8].iter().collect();
    assert!(!wanted.contains('\u{FFFD}'), "the test needs readable text: {whole:?}");
    let expected = &whole[..whole.find(&wanted).unwrap()];
    let (cut, stop, tokens) = ask(json!({"stop_strings": ["never to be found", wanted]}));
    assert_eq!((cut.as_str(), stop.as_str()), (expected, "stop_string"));
    assert!(tokens < 24 && tokens > 0);
    // The answer also ends where a token holds more than the stop string.
    let one: String = letters[6..7].iter().collect();
    assert_eq!(ask(json!({"stop_strings": [one]})).0, whole[..whole.find(&one).unwrap()]);

    // A stop token is named by its id or its text, and one that comes too early is passed over.
    let tokenizer = tiny.open_tokenizer();
    let mut decoder = tiny.decoder();
    let mut ids: Vec<u32> = tokenizer.bos_token_id().filter(|_| tokenizer.wants_bos()).into_iter().collect();
    ids.extend(tokenizer.encode(prompt).unwrap());
    let logits = decoder.logits(&Batch::text(ids)).unwrap();
    let first = model::sampling::argmax(&logits[logits.len() - decoder.config().vocab_size..]).unwrap();
    assert_eq!(ask(json!({"stop_tokens": [first]})), (String::new(), "end_of_text".to_owned(), 0));
    let (_, _, tokens) = ask(json!({"stop_tokens": [first], "min_new_tokens": 3}));
    assert!(tokens >= 3);
    let error = tiny.bench().run::<Generate>(json!({"model": "base", "prompts": ["a"], "stop_tokens": ["no such"]}));
    assert_eq!(error.unwrap_err().message, "`stop_tokens` has `no such`, which is not a token of this tokenizer");
    let error = tiny.bench().run::<Generate>(json!({"model": "base", "prompts": ["a"], "stop_tokens": [99_999]}));
    let message = error.unwrap_err().message;
    assert!(message.starts_with("`stop_tokens` has 99999, and the model has "), "{message}");
}

#[test]
fn more_prompts_than_are_held_at_once_are_answered_in_order() {
    let tiny = Tiny::new();
    let prompts: Vec<String> = (0..300).map(|number| format!("{number} {}", "x".repeat(number % 9))).collect();
    let ask = |batch_size: u64| {
        samples(&tiny, json!({"model": "base", "prompts": prompts, "max_new_tokens": 3, "batch_size": batch_size}))
    };
    let (all, output) = ask(8);
    let path = output.folder.join("samples.parquet");
    assert_eq!(tiny::texts(&path, "prompt"), prompts);
    let (alone, _) = samples(&tiny, json!({"model": "base", "prompts": [prompts[299]], "max_new_tokens": 3}));
    assert_eq!(all[299], alone[0]);
    assert_eq!(output.description.identity, ask(5).1.description.identity, "the batch decides nothing");
}

#[test]
fn mistakes_are_found_without_running() {
    let problems = |parameters: Value| {
        let mut reader = Reader::default();
        let registry = stages::registry();
        let bound = registry.get("generate").unwrap().read(&Node::from_json(&parameters), &mut reader);
        let problems = bound.map_or_else(Vec::new, |bound| bound.check(&InputFacts::new(), Span::default()));
        reader.problems.into_iter().chain(problems).map(|problem| problem.message).collect::<Vec<_>>()
    };
    let none: [&str; 0] = [];
    assert_eq!(problems(json!({"model": "base", "prompts": ["a"], "template": "chat"})), none);
    assert_eq!(problems(json!({"model": "base", "prompts": none})), ["`prompts` is empty"]);
    let rows = json!({"model": "base", "prompts": "rows", "template": "summarize"});
    assert_eq!(problems(rows), ["`template` is for prompts that are strings; rows have their own"]);
    let two = json!({"model": "base", "prompts": ["a"], "template": "{a} {b}"});
    assert_eq!(problems(two), ["the template has 2 placeholders, and a prompt fills one"]);
    let idle = |key: &str| format!("`{key}` is for sampling, and `temperature: 0` is greedy decoding");
    let mut filtered = json!({"model": "base", "prompts": ["a"], "top_k": 5, "top_p": 0.9, "min_p": 0.1});
    assert_eq!(problems(filtered.clone()), ["top_k", "top_p", "min_p"].map(idle));
    filtered["temperature"] = 0.8.into();
    assert_eq!(problems(filtered), none);
    for wrong in [
        json!({"temperature": -0.5}),
        json!({"top_k": 0}),
        json!({"top_p": 0.0}),
        json!({"top_p": 1.5}),
        json!({"min_p": 1.5}),
        json!({"stop_tokens": [-1]}),
        json!({"stop_tokens": [true]}),
        json!({"stop_strings": [""]}),
    ] {
        let mut parameters = json!({"model": "base", "prompts": ["a"]});
        parameters.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        assert_eq!(problems(parameters).len(), 1, "{wrong}");
    }
}
