//! Tasks against lm-evaluation-harness: `tests/golden/evaltasks`, or the folder `evaltasks` of what
//! `PIPELINE_GOLDEN_DIR` names. Every case found there must be one that can be run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::cpu::Cpu;
use model::decoder::Decoder;
use model::ops::{Compute, TokenScore};
use model::parameter::Trainability;
use model::scoring::{Context, Scorer};
use serde_json::Value;

use super::documents::{self, Document};
use super::encode::{self, Pair};
use super::file::{OutputType, Task, TaskFile};
use super::group::Group;
use super::prompt::PromptOptions;
use super::random::PythonRandom;
use super::request::{Asking, Request, Sample};
use super::results::{Answer, Results};
use super::score;
use crate::compute::inference::RowScore;
use crate::data::tokenizer::Tokenizer;

fn families() -> PathBuf {
    let own = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden"));
    std::env::var_os("PIPELINE_GOLDEN_DIR").map_or_else(own, PathBuf::from)
}

fn folder() -> PathBuf {
    families().join("evaltasks")
}

fn json(path: &Path) -> Value {
    let text = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn expected() -> Vec<(String, Value)> {
    let files = std::fs::read_dir(folder().join("expected")).unwrap();
    let mut names: Vec<String> =
        files.map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    assert!(!names.is_empty(), "there are no cases");
    names.into_iter().map(|name| (name.clone(), json(&folder().join(format!("expected/{name}.json"))))).collect()
}

fn tasks() -> Vec<(String, Value)> {
    expected().into_iter().filter(|(_, case)| case.get("samples").is_some()).collect()
}

fn task(name: &str) -> Task {
    match TaskFile::read(&folder().join(format!("tasks/{name}.yaml")), None) {
        Ok(TaskFile::Task(task)) => *task,
        Ok(TaskFile::Group(_)) => panic!("{name} is a group"),
        Err(error) => panic!("{error}"),
    }
}

fn samples(task: &Task, case: &Value, tokenizer: &Tokenizer) -> Vec<Sample> {
    let rows = |split: Option<&str>| -> Vec<Document> {
        documents::read(task, split.unwrap(), &folder()).unwrap_or_else(|error| panic!("{error}"))
    };
    let flag = |name: &str| case["options"][name] == true;
    let options = PromptOptions {
        apply_chat_template: flag("apply_chat_template"),
        fewshot_as_multiturn: flag("fewshot_as_multiturn"),
        system_instruction: case["options"]["system_instruction"].as_str(),
    };
    let chat_template = tokenizer.chat_templates().map(|templates| templates.without_tools());
    let asking = Asking { task, options, chat_template, num_fewshot: None };
    let (rows, shown) = (rows(task.evaluated_split()), rows(task.shown_split()));
    asking.samples(&rows, &shown).unwrap_or_else(|error| panic!("{error}"))
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_folder(&folder().join("model")).unwrap()
}

fn max_length() -> usize {
    usize::try_from(json(&folder().join("settings.json"))["max_length"].as_u64().unwrap()).unwrap()
}

/// The pairs that a request is scored as; none of a generation.
fn pairs(request: &Request, tokenizer: &Tokenizer) -> Vec<Pair> {
    match request {
        Request::Continuation { context, continuation } => {
            vec![encode::pair(tokenizer, context, continuation).unwrap().unwrap()]
        }
        Request::Rolling { text } => {
            let ids = encode::text(tokenizer, text).unwrap();
            encode::windows(&ids, encode::prefix_token(tokenizer).unwrap(), max_length())
        }
        Request::Generation { .. } => Vec::new(),
    }
}

#[test]
fn requests_are_those_of_the_harness() {
    let tokenizer = tokenizer();
    let mut compared = 0;
    for (name, case) in tasks() {
        let task = task(&name);
        let samples = samples(&task, &case, &tokenizer);
        let wanted = case["samples"].as_array().unwrap();
        assert_eq!(samples.len(), wanted.len(), "{name}");
        for (row, (sample, wanted)) in samples.iter().zip(wanted).enumerate() {
            let requests = wanted["requests"].as_array().unwrap();
            assert_eq!(sample.requests.len(), requests.len(), "{name}, row {row}");
            assert_eq!(sample.target, wanted["target"], "{name}, row {row}");
            for (request, wanted) in sample.requests.iter().zip(requests) {
                let encoded = pairs(request, &tokenizer);
                let same = |pair: &Pair, wanted: &Value| {
                    assert_eq!(pair.context_ids, ids(&wanted["context_ids"]), "{name}, row {row}");
                    assert_eq!(pair.continuation_ids, ids(&wanted["continuation_ids"]), "{name}, row {row}");
                };
                match request {
                    Request::Continuation { context, continuation } => {
                        assert_eq!(context, wanted["context"].as_str().unwrap(), "{name}, row {row}");
                        assert_eq!(continuation, wanted["continuation"].as_str().unwrap(), "{name}, row {row}");
                        same(&encoded[0], wanted);
                    }
                    Request::Rolling { text } => {
                        assert_eq!(text, wanted["text"].as_str().unwrap(), "{name}, row {row}");
                        let windows = wanted["windows"].as_array().unwrap();
                        assert_eq!(encoded.len(), windows.len(), "{name}, row {row}");
                        encoded.iter().zip(windows).for_each(|(pair, wanted)| same(pair, wanted));
                    }
                    Request::Generation { context } => {
                        assert_eq!(context, wanted["context"].as_str().unwrap(), "{name}, row {row}");
                        let context_ids = encode::text(&tokenizer, context).unwrap();
                        assert_eq!(context_ids, ids(&wanted["context_ids"]), "{name}, row {row}");
                    }
                }
                compared += 1;
            }
        }
    }
    assert!(compared > 0);
    println!("{compared} requests compared");
}

fn answers(case: &Value) -> Vec<Vec<Answer>> {
    let answer = |request: &Value| match request["response"].as_str() {
        Some(text) => Answer::Text(text.to_owned()),
        None => Answer::Loglikelihood {
            sum: request["loglikelihood"].as_f64().unwrap(),
            is_greedy: request["is_greedy"] == true,
        },
    };
    let of_sample = |sample: &Value| sample["requests"].as_array().unwrap().iter().map(answer).collect();
    case["samples"].as_array().unwrap().iter().map(of_sample).collect()
}

fn results(name: &str, case: &Value, tokenizer: &Tokenizer) -> Results {
    let task = task(name);
    let settings = json(&folder().join("settings.json"));
    let iterations = usize::try_from(settings["bootstrap_iters"].as_u64().unwrap()).unwrap();
    let samples = samples(&task, case, tokenizer);
    task.results(&samples, &answers(case), iterations).unwrap_or_else(|error| panic!("{error}"))
}

/// Compares figures with the harness's of the same keys.
fn same_figures(name: &str, ours: &Results, wanted: &Value) -> usize {
    let mut compared = 0;
    let near = |key: &str, ours: f64, wanted: f64| {
        assert!((ours - wanted).abs() <= 1e-6, "{name}, {key}: {ours}, and the harness has {wanted}");
    };
    for (key, wanted) in wanted.as_object().unwrap().iter().filter(|(key, _)| key.contains(',')) {
        let (metric, filter) = key.split_once(',').unwrap();
        match metric.strip_suffix("_stderr") {
            None => near(key, ours.figures[key].value, wanted.as_f64().unwrap()),
            Some(metric) => match (ours.figures[&format!("{metric},{filter}")].stderr, wanted.as_f64()) {
                (Some(ours), Some(wanted)) => near(key, ours, wanted),
                (ours, wanted) => assert_eq!(ours, wanted, "{name}, {key}"),
            },
        }
        compared += 1;
    }
    let has = |key: &&String| wanted.get(key.as_str()).is_some();
    assert!(ours.figures.keys().all(|key| has(&key)), "{name}: a figure that the harness does not have");
    compared
}

#[test]
fn figures_are_those_of_the_harness() {
    let tokenizer = tokenizer();
    let (mut compared, mut found) = (0, BTreeMap::new());
    for (name, case) in tasks() {
        let ours = results(&name, &case, &tokenizer);
        compared += same_figures(&name, &ours, &case["results"]);
        found.insert(name, ours);
    }
    for (name, case) in expected().into_iter().filter(|(_, case)| case.get("samples").is_none()) {
        let group: Group = match TaskFile::read(&folder().join(format!("tasks/{name}.yaml")), None) {
            Ok(TaskFile::Group(group)) => group,
            other => panic!("{name}: {other:?}"),
        };
        let of_tasks: Vec<&Results> = group.names().into_iter().map(|task| &found[task]).collect();
        let ours = group.results(&of_tasks);
        compared += same_figures(&name, &ours, &case["groups"][&group.name]);
    }
    assert!(compared > 0);
    println!("{compared} figures compared");
}

/// Filters over several responses, and metrics of classes: `tests/reference/make_golden_responses.py`.
#[test]
fn figures_of_given_responses_are_those_of_the_harness() {
    let golden = json(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/evaltasks/responses.json")));
    let draws = usize::try_from(golden["draws"].as_u64().unwrap()).unwrap();
    let mut compared = 0;
    for (name, case) in golden["cases"].as_object().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("task.yaml"), case["task"].as_str().unwrap()).unwrap();
        let Ok(TaskFile::Task(task)) = TaskFile::read(&folder.path().join("task.yaml"), None) else { panic!("{name}") };
        let rows = case["rows"].as_array().unwrap().iter().map(|row| row.as_object().unwrap().clone());
        let rows: Vec<Document> = rows.collect();
        let asking = Asking { task: &task, options: PromptOptions::default(), chat_template: None, num_fewshot: None };
        let samples = asking.samples(&rows, &[]).unwrap();
        let answer = |given: &Value| match given.as_str() {
            Some(text) => Answer::Text(text.to_owned()),
            None => Answer::of_json(given).unwrap(),
        };
        let of_row = |row: &Document| -> Vec<Answer> {
            let given = case["answers"][row["q"].as_str().unwrap()].as_array().unwrap();
            // Greedy responses are all the same, and asked for once.
            let asked = if task.output_type == OutputType::GenerateUntil { task.responses() } else { given.len() };
            given.iter().take(asked).map(answer).collect()
        };
        let answers: Vec<Vec<Answer>> = rows.iter().map(of_row).collect();
        let ours = task.results(&samples, &answers, draws).unwrap_or_else(|error| panic!("{name}: {error}"));
        compared += same_figures(name, &ours, &case["figures"]);
    }
    assert!(compared > 0);
    println!("{compared} figures compared");
}

#[test]
fn loglikelihoods_are_those_of_the_harness() {
    let tokenizer = tokenizer();
    let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
    let decoder = Decoder::load(ops, &folder().join("model"), Trainability::Frozen).unwrap();
    let score = |contexts: &[Context<'_>]| -> Vec<Vec<RowScore>> {
        let of_tokens = |tokens: &Vec<TokenScore>| RowScore {
            nll: tokens.iter().map(|token| f64::from(token.nll)).sum(),
            tokens: tokens.len() as u64,
            correct: tokens.iter().filter(|token| token.correct).count() as u64,
        };
        let found = Scorer::default().score(&decoder, contexts).unwrap();
        found.iter().map(|of| of.iter().map(of_tokens).collect()).collect()
    };
    let (mut compared, mut farthest) = (0, 0.0f64);
    for (name, case) in tasks() {
        let task = task(&name);
        if task.output_type == OutputType::GenerateUntil {
            continue;
        }
        let samples = samples(&task, &case, &tokenizer);
        let requests: Vec<&Request> = samples.iter().flat_map(|sample| &sample.requests).collect();
        let wanted = answers(&case).concat();
        for (request, wanted) in requests.iter().zip(&wanted) {
            let Answer::Loglikelihood { sum, is_greedy } = wanted else { panic!("{name}: a text") };
            let pairs = pairs(request, &tokenizer);
            let ours = score::loglikelihoods(&pairs, max_length(), |contexts| Ok(score(contexts))).unwrap();
            let off = (ours.iter().map(|window| window.sum).sum::<f64>() - sum).abs();
            farthest = farthest.max(off);
            assert!(off <= 2e-3, "{name}: {off} off");
            if !matches!(request, Request::Rolling { .. }) {
                assert_eq!(ours[0].is_greedy, *is_greedy, "{name}");
            }
            compared += 1;
        }
        let all: Vec<Pair> = requests.iter().flat_map(|request| pairs(request, &tokenizer)).collect();
        // Each alone, and all together with what they share read once.
        let alone = |contexts: &[Context<'_>]| {
            let each = |of: &Context<'_>, ids| score(&[Context { ids: of.ids, continuations: vec![ids] }]).concat();
            Ok(contexts.iter().map(|of| of.continuations.iter().flat_map(|ids| each(of, *ids)).collect()).collect())
        };
        let apart = score::loglikelihoods(&all, max_length(), alone).unwrap();
        let together = score::loglikelihoods(&all, max_length(), |contexts| Ok(score(contexts))).unwrap();
        for (apart, together) in apart.iter().zip(&together) {
            assert_eq!(apart, together, "{name}: company changes the result");
        }
    }
    assert!(compared > 0);
    println!("{compared} log-likelihoods compared, {farthest:.1e} off at most");
}

#[test]
fn pairs_are_encoded_as_by_the_harness() {
    let mut compared = 0;
    let cases = json(&folder().join("encode_pairs.json"));
    for (name, case) in cases.as_object().unwrap() {
        let (family, setting) = name.split_once('.').map_or((name.as_str(), None), |(family, set)| (family, Some(set)));
        let source = families().join("data/tokenizers").join(family);
        let folder = tempfile::tempdir().unwrap();
        let mut file = json(&source.join("tokenizer.json"));
        if family == "metaspace" {
            // These were made with the pipeline that transformers has for the family.
            file["pre_tokenizer"]["prepend_scheme"] = Value::from("first");
        }
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        let mut config = json(&source.join("tokenizer_config.json"));
        if let Some((key, value)) = setting.and_then(|setting| setting.split_once('=')) {
            config[key] = Value::Bool(value == "true");
        }
        std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        assert_eq!(encode::prefix_token(&tokenizer).map(u64::from), case["prefix_token_id"].as_u64(), "{name}");
        for wanted in case["pairs"].as_array().unwrap() {
            let (context, continuation) =
                (wanted["context"].as_str().unwrap(), wanted["continuation"].as_str().unwrap());
            let pair = encode::pair(&tokenizer, context, continuation).unwrap().unwrap();
            assert_eq!(pair.context_ids, ids(&wanted["context_ids"]), "{name}: {wanted}");
            assert_eq!(pair.continuation_ids, ids(&wanted["continuation_ids"]), "{name}: {wanted}");
            compared += 1;
        }
    }
    assert!(compared > 0);
    println!("{compared} pairs compared");
}

#[test]
fn draws_are_those_of_cpython() {
    let cases = json(&folder().join("python_random.json"));
    let mut compared = 0;
    for (call, wanted) in cases.as_object().unwrap() {
        let numbers: Vec<usize> = call
            .split(|letter: char| !letter.is_ascii_digit())
            .filter(|digits| !digits.is_empty())
            .map(|digits| digits.parse().unwrap())
            .collect();
        let mut random = PythonRandom::new(numbers[0] as u64);
        let wanted = wanted.as_array().unwrap();
        for wanted in wanted {
            let drawn = match call.split_once(").").unwrap().1 {
                call if call.starts_with("getrandbits") => Value::from(random.word()),
                call if call.starts_with("random") => Value::from(random.unit()),
                call if call.starts_with("sample") => Value::from(random.sample(numbers[1], numbers[2]).unwrap()),
                call if call.starts_with("choices") => {
                    (0..numbers[2]).map(|_| random.choice(numbers[1])).collect::<Value>()
                }
                other => panic!("an unknown call: {other}"),
            };
            match (drawn.as_f64(), wanted.as_f64()) {
                // The reader of JSON may be off by a bit.
                (Some(drawn), Some(wanted)) => assert!((drawn - wanted).abs() < 1e-15, "{call}"),
                _ => assert_eq!(drawn, *wanted, "{call}"),
            }
            compared += 1;
        }
    }
    assert!(compared > 0);
    println!("{compared} draws compared");
}
