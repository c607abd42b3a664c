//! `pipeline serve` and `pipeline chat` on the torch worker: what the native backend answers is what it answers, and
//! clients and workers that go away are told from each other.

use std::io::Read;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use test_harness::{Unmet, test};

use crate::architectures::reference;
use crate::bench::{Bench, PIPELINE};
use crate::npu::{DEVICES, Machine};
use crate::support::server::{Server, head};

/// How far log-probabilities may be from the native ones.
const LOGPROB_BOUND: f64 = 1e-4;

/// Tokens of a completion that takes a while.
const LONG: usize = 3000;

/// An adapter of the pipeline, and another one in a folder.
const ADAPTERS: [&str; 4] = ["--adapter", "two=exported", "--chat-template", "chatml"];

/// What the arguments of a server begin with.
fn arguments<'a>(of: &[&'a str]) -> Vec<&'a str> {
    [&["serve"], of, &["--port", "0", "--threads", "1"]].concat()
}

fn started<P>(mut command: Command, owner: P) -> Server<P> {
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    Server::of(child, owner)
}

/// A project with two adapters.
fn bench() -> Result<Bench, Unmet> {
    let bench = Bench::new()?;
    with_adapters(&bench);
    Ok(bench)
}

fn with_adapters(bench: &Bench) {
    let other = ["adapter.seed=7", "adapter.max_steps=8"];
    bench.train(&other).ends_with(0);
    bench.result("adapter.adapter", "adapter_model.safetensors", &other);
    bench.train(&[]).ends_with(0);
}

/// Requests of all that a server can be asked, by paths.
fn requests() -> Vec<(&'static str, Value)> {
    let text = |more: Value| {
        merged(json!({ "model": "fresh", "prompt": "Where is the fox", "max_tokens": 12, "temperature": 0 }), more)
    };
    let chat = |more: Value| {
        let messages = json!([{ "role": "user", "content": "Who sees the fox?" }]);
        (
            "/v1/chat/completions",
            merged(json!({ "model": "adapter", "messages": messages, "max_tokens": 12, "seed": 3 }), more),
        )
    };
    let schema = json!({ "type": "object", "properties": { "is": { "enum": ["a", "b"] } }, "required": ["is"],
        "additionalProperties": false });
    let form = json!({ "type": "json_schema", "json_schema": { "name": "it", "schema": schema } });
    let mut all = vec![
        chat(json!({ "temperature": 0 })),
        chat(json!({ "temperature": 0.8, "top_p": 0.9, "n": 3 })),
        chat(json!({ "temperature": 0.7, "logprobs": true, "top_logprobs": 3 })),
        chat(json!({ "model": "two", "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": { "40": 2 } })),
        chat(json!({ "response_format": form, "max_tokens": 40 })),
    ];
    let texts = [
        json!({}),
        json!({ "model": "adapter" }),
        json!({ "model": "two", "logprobs": 2 }),
        json!({ "prompt": ["The fox", "A hen and a fox are in the wood", "It"], "temperature": 1, "seed": 9 }),
        json!({ "prompt": (0..90).map(|at| at % 200 + 20).collect::<Vec<_>>(), "echo": true, "logprobs": 2, "max_tokens": 4 }),
        json!({ "prompt": "The fox", "echo": true, "logprobs": 1, "max_tokens": 0 }),
        json!({ "repetition_penalty": 1.3, "min_p": 0.02, "top_k": 30, "temperature": 0.9, "seed": 4 }),
    ];
    all.extend(texts.map(|more| ("/v1/completions", text(more))));
    all
}

fn merged(mut request: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

/// Checks that two answers are alike: all but ids and times are, and numbers are to a bound.
#[track_caller]
fn are_like(one: &Value, other: &Value, path: &str) {
    match (one, other) {
        (Value::Number(a), Value::Number(b)) if path.contains("logprob") => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() <= LOGPROB_BOUND * b.abs().max(1.0), "{path}: {a} {b}");
        }
        (Value::Object(a), Value::Object(b)) => {
            assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>(), "{path}");
            let named = a.iter().filter(|(name, _)| !["id", "created"].contains(&name.as_str()));
            named.for_each(|(name, value)| are_like(value, &b[name], &format!("{path}.{name}")));
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{path}: {one} {other}");
            a.iter().zip(b).for_each(|(one, other)| are_like(one, other, path));
        }
        _ => assert_eq!(one, other, "{path}"),
    }
}

fn asked<P: Sync>(server: &Server<P>, (path, request): &(&'static str, Value)) -> Value {
    let (status, answer) = server.post(path, request);
    assert_eq!(status, 200, "{request}: {answer}");
    answer
}

/// A completion of so many tokens.
fn long(tokens: usize, stream: bool) -> Value {
    json!({ "model": "fresh", "prompt": "The", "max_tokens": tokens, "temperature": 0, "stream": stream,
        "logit_bias": { "0": -100, "1": -100, "2": -100 } })
}

#[test]
fn what_is_answered_is_what_the_native_backend_answers() -> Result<(), Unmet> {
    let bench = bench()?;
    let of = |backend| arguments(&[&[PIPELINE, "adapter", "--backend", backend], &ADAPTERS[..]].concat());
    let native = started(bench.command(&of("native")), ());
    let expected: Vec<Value> = requests().iter().map(|request| asked(&native, request)).collect();
    let torch = started(bench.command(&of("torch")), ());
    let said = torch.said.lock().unwrap().clone();
    assert!(said.contains("computed by torch") && said.contains("static batches: "), "{said}");
    let found: Vec<Value> = requests().iter().map(|request| asked(&torch, request)).collect();
    for ((one, other), (_, request)) in found.iter().zip(&expected).zip(requests()) {
        are_like(one, other, &request.to_string());
    }
    // In whatever company, also of other adapters.
    std::thread::scope(|scope| {
        let torch = &torch;
        let all: Vec<_> = requests().into_iter().map(|request| scope.spawn(move || asked(torch, &request))).collect();
        for (answer, expected) in all.into_iter().zip(&expected) {
            are_like(&answer.join().unwrap(), expected, "in company");
        }
    });
    let (path, request) = requests().swap_remove(0);
    let (_, events) = torch.ask(&head(path), &merged(request, json!({ "stream": true })).to_string());
    let data = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let pieces = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let text: String =
        pieces.filter_map(|it| Some(it["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect();
    assert_eq!(expected[0]["choices"][0]["message"]["content"], json!(text));
    let whole =
        asked(&torch, &("/v1/completions", long(100, false)))["choices"][0]["text"].as_str().unwrap().to_owned();
    let middle: String = whole.chars().skip(whole.chars().count() / 2).take(3).collect();
    let stopped = asked(&torch, &("/v1/completions", merged(long(100, false), json!({ "stop": middle }))));
    assert_eq!(stopped["choices"][0]["text"], whole[..whole.find(&middle).unwrap()], "{stopped}");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let (status, answer) = torch.post("/v1/completions", &merged(long(100, false), json!({ "best_of": 3 })));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("best_of")), "{answer}");
    let chat =
        ["chat", PIPELINE, "adapter", "--backend", "torch", "--prompt", "Who sees the fox?", "--max-new-tokens", "12"];
    let said = bench.run(&[&chat[..], &ADAPTERS].concat()).ends_with(0);
    let expected = expected[0]["choices"][0]["message"]["content"].as_str().unwrap();
    let letters = |text: &str| text.chars().filter(|letter| letter.is_ascii_alphanumeric()).collect::<String>();
    assert_eq!(letters(&said.stdout), letters(expected));
    Ok(())
}

#[track_caller]
fn until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "it is not so");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn clients_that_go_away_free_their_rows_and_a_worker_that_dies_ends_the_server() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    let positions = "fresh.max_position_embeddings=4096";
    let of = arguments(&[PIPELINE, "fresh", positions, "--backend", "torch", "--max-concurrency", "3"]);
    let start = || {
        let mut command = bench.command(&of);
        // By their files the processes of a project are known.
        command.env("TMPDIR", bench.project.path("."));
        started(command, ())
    };
    let mut server = start();
    let (_, health) = server.ask("GET /health HTTP/1.1\r\nHost: localhost", "");
    assert_eq!(health, r#"{"status":"ok","backend":"torch","device":"cpu","batching":"static"}"#);
    let computes = r#"pipeline_engine_info{backend="torch",device="cpu",batching="static"} 1"#;
    assert!(server.metrics().contains(computes), "{}", server.metrics());
    let body = long(LONG, true).to_string();
    let mut clients: Vec<_> = (0..8).map(|_| server.send(&head("/v1/completions"), &body)).collect();
    clients.iter_mut().for_each(|client| client.read_exact(&mut [0; 12]).unwrap());
    until(|| server.metric("pipeline_requests_in_progress") == 3);
    drop(clients);
    until(|| server.metric("pipeline_cancelled_total") == 8);
    assert_eq!(server.metric("pipeline_requests_in_progress") + server.metric("pipeline_requests_waiting"), 0);
    assert!(server.metric("pipeline_completion_tokens_total") < 8 * LONG as u64, "they were completed");
    asked(&server, &("/v1/completions", long(100, false)));
    let mut streaming = server.send(&head("/v1/completions"), &body);
    until(|| server.metric("pipeline_requests_in_progress") == 1);
    kill(bench.ranks()["0"], Signal::SIGKILL).unwrap();
    let mut rest = String::new();
    streaming.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("was killed (SIGKILL)"), "{rest}");
    let (code, said) = server.ended();
    assert_eq!(code, Some(1));
    assert!(said.contains("was killed (SIGKILL)"), "{said}");

    // Also where nobody asks anything.
    let mut server = start();
    kill(bench.ranks()["0"], Signal::SIGKILL).unwrap();
    assert_eq!(server.ended().0, Some(1));

    // And no worker stays when its server is gone.
    let mut server = start();
    server.signal(Signal::SIGKILL);
    server.child.wait().unwrap();
    until(|| bench.ranks().is_empty());
    Ok(())
}

#[test]
fn a_model_is_served_on_an_npu_that_nobody_else_gets_meanwhile() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    let bench = &machine.bench;
    with_adapters(bench);
    bench.witnessed();
    let on = |more: &[&'static str]| arguments(&[&[PIPELINE, "adapter"], more, &ADAPTERS].concat());
    let of = on(&["--device", "npu"]);
    let on_npu = started(machine.command(&of), ());
    let said = on_npu.said.lock().unwrap().clone();
    assert!(said.contains("since this program does not compute on npu") && said.contains("not yet run on hardware"));
    let [rank] = bench.witnessed().try_into().unwrap();
    assert_eq!(rank["leases"], 1, "{rank}");
    let beside = started(machine.command(&of), ());
    let [other] = bench.witnessed().try_into().unwrap();
    assert_eq!(other["leases"], 2, "{other}");
    assert!(rank[DEVICES].is_string() && other[DEVICES].is_string() && rank[DEVICES] != other[DEVICES]);
    drop(beside);
    let native = started(machine.command(&on(&["--device", "cpu"])), ());
    let (_, health) = native.ask("GET /health HTTP/1.1\r\nHost: localhost", "");
    assert!(health.contains(r#""backend":"native","device":"cpu","batching":"continuous""#), "{health}");
    for request in requests() {
        are_like(&asked(&on_npu, &request), &asked(&native, &request), &request.1.to_string());
    }
    let refused = on(&["--device", "npu", "--backend", "native"]);
    let refused = crate::support::Ran::of(machine.command(&refused), &refused);
    refused.ends_with(2).warns("nothing here serves this model on an NPU (Ascend)");
    Ok(())
}

#[test]
fn a_model_that_is_not_native_is_served() -> Result<(), Unmet> {
    let bench = Bench::of("architectures.yaml")?;
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/data/tokenizers/bytelevel");
    reference(&bench, &["make", "olmo2", "checkpoint", tokenizer]);
    let generate = "version: 1\nstages:\n  base:\n    uses: download\n    with: { path: ./checkpoint }\n  samples:\n    \
        uses: generate\n    with: { model: base, prompts: [The fox], max_new_tokens: 8 }\n";
    bench.project.write("generate.yaml", generate);
    bench.run(&["run", "generate.yaml"]).ends_with(0);
    let shown = bench.run(&["show", "generate.yaml", "samples", "--format", "json"]).ends_with(0);
    let fields = serde_json::from_str::<Value>(&shown.stdout).unwrap()["rows"][0]["fields"].clone();
    let generated = fields.as_array().unwrap().iter().find(|field| field["name"] == "completion").unwrap();
    let server = started(bench.command(&arguments(&["--model", "checkpoint"])), ());
    let request = json!({ "model": "checkpoint", "prompt": "The fox", "max_tokens": 8, "temperature": 0 });
    let answer = asked(&server, &("/v1/completions", request));
    assert_eq!(answer["choices"][0]["text"], generated["text"], "{answer}");
    let native = arguments(&["--model", "checkpoint", "--backend", "native"]);
    bench.run(&native).ends_with(2).warns("`backend: native` does not go with `olmo2`");
    let quantized = arguments(&["--model", "checkpoint", "--quantize", "int8"]);
    bench.run(&quantized).ends_with(2).warns("`--quantize` does not go with `olmo2`");
    let f16 = arguments(&["--model", "checkpoint", "--quantize", "int8", "--dtype", "f16"]);
    bench.run(&f16).ends_with(2).warns("which does not compute in f16");
    Ok(())
}
