//! `pipeline serve` and `pipeline chat`: what they answer is what `generate` does, and clients that misbehave harm
//! nobody.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use test_harness::test;

use crate::support::Project;
use crate::support::server::{Server, head};
use crate::support::terminal::Session;

const PIPELINE: &str = r#"
version: 1
stages:
  text:
    uses: dataset
    with: { source: ./text.jsonl }
  fresh:
    uses: new_model
    with:
      { text: text, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, max_position_embeddings: 4096 }
  questions:
    uses: dataset
    with: { source: ./questions.jsonl, column_map: { question: question, output: answer }, template: "Q: {question}\nA: " }
  tokens:
    uses: tokenize
    with: { dataset: questions, tokenizer: fresh, max_seq_len: 64 }
  adapter:
    uses: train
    with:
      { model: fresh, data: tokens, lora: { rank: 4, target_modules: [q_proj, v_proj, down_proj] }, micro_batch_size: 2,
        optimizer: { learning_rate: 1e-2 }, epochs: 4 }
  said:
    uses: generate
    with:
      { model: fresh, prompts: ["The rain"], template: chat, chat_template: chatml, max_new_tokens: 8, temperature: 0.9, seed: 5 }
publish: { said: ./said, adapter.adapter: ./adapters/one }
"#;

fn project() -> Project {
    let project = Project::with_pipeline("lora.yaml");
    project.write("serve.yaml", PIPELINE);
    project
}

/// A server of the model that nothing was trained on.
fn start(more: &[&str]) -> Server {
    start_with_template("chatml", more)
}

fn start_with_template(template: &str, more: &[&str]) -> Server {
    server_of(project(), "fresh", &[&["--chat-template", template], more].concat())
}

/// A server of a stage of a project.
fn server_of(project: Project, stage: &str, more: &[&str]) -> Server {
    let arguments = ["serve", "serve.yaml", stage, "--port", "0"];
    let child = project.start(&[&arguments[..], more].concat());
    Server::of(child, project)
}

fn chat() -> Value {
    let messages = json!([{ "role": "user", "content": "The rain" }]);
    json!({ "model": "fresh", "messages": messages, "max_tokens": 8, "temperature": 0.9, "seed": 5 })
}

#[test]
fn answers_are_those_of_generate_alone_and_in_company() {
    let server = start(&[]);
    let (status, alone) = server.post("/v1/chat/completions", &chat());
    assert_eq!((status, &alone["usage"]["completion_tokens"]), (200, &json!(8)), "{alone}");
    let text = &alone["choices"][0]["message"]["content"];
    server.project.run(&["run", "serve.yaml"]).ends_with(0);
    let shown = server.project.run(&["show", "serve.yaml", "said", "--format", "json"]).ends_with(0);
    let fields = serde_json::from_str::<Value>(&shown.stdout).unwrap()["rows"][0]["fields"].clone();
    let generated = fields.as_array().unwrap().iter().find(|field| field["name"] == "completion").unwrap();
    assert_eq!(&generated["text"], text, "{fields}");
    for company in [15, 40] {
        std::thread::scope(|scope| {
            let asked: Vec<_> =
                (0..company).map(|_| scope.spawn(|| server.post("/v1/chat/completions", &chat()).1)).collect();
            for answer in asked {
                assert_eq!(&answer.join().unwrap()["choices"][0]["message"]["content"], text);
            }
        });
    }
    let mut streaming = chat();
    streaming["stream"] = json!(true);
    let (_, events) = server.ask(&head("/v1/chat/completions"), &streaming.to_string());
    let data = events.lines().filter_map(|line| line.strip_prefix("data: "));
    let deltas = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let streamed: String =
        deltas.filter_map(|it| Some(it["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect();
    assert_eq!(&json!(streamed), text);
    assert!(events.contains("data: [DONE]"));
}

#[test]
fn what_is_wrong_or_not_supported_is_an_error_that_names_it() {
    let server = start(&[]);
    for (field, value, status) in [
        ("tools", json!("weather"), 400),
        ("tool_choice", json!("required"), 400),
        ("response_format", json!({ "type": "json_schema", "json_schema": { "schema": { "type": "text" } } }), 400),
        ("temperature", json!(9), 400),
        ("logit_bais", json!({}), 400),
        ("model", json!("other"), 404),
    ] {
        let mut request = chat();
        request[field] = value;
        let (found, answer) = server.post("/v1/chat/completions", &request);
        assert_eq!((found, &answer["error"]["param"]), (status, &json!(field)), "{answer}");
    }
    for (head, body, status) in [
        ("GET /health HTTP/1.1\r\nHost: localhost".to_owned(), "", 200),
        ("GET /health HTTP/1.1\r\nHost: site.example".to_owned(), "", 400),
        (head("/v1/nothing"), "{}", 404),
        (head("/v1/completions"), "{\"model\": ", 400),
    ] {
        assert_eq!(server.ask(&head, body).0, status, "{head}");
    }
    let large = "x".repeat(5 << 20);
    let mut stream = TcpStream::connect(&server.address).unwrap();
    write!(stream, "{}\r\nContent-Length: {}\r\n\r\n", head("/tokenize"), large.len()).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    // Who sends everything before it looks at an answer finds one, too.
    let larger = "x".repeat(64 << 20);
    assert_eq!(server.ask(&head("/tokenize"), &larger).0, 413);
}

#[test]
fn clients_that_go_away_free_their_places_and_a_server_drains() {
    let mut server = start(&["--max-concurrency", "4", "--queue", "200"]);
    let body = long_chat().to_string();
    let mut clients: Vec<TcpStream> = (0..100).map(|_| server.send(&head("/v1/chat/completions"), &body)).collect();
    // Each has been answered something, and four of them are in progress.
    clients.iter_mut().for_each(|client| client.read_exact(&mut [0; 12]).unwrap());
    drop(clients);
    let began = Instant::now();
    while server.metric("pipeline_cancelled_total") < 100 {
        assert!(began.elapsed() < Duration::from_secs(60), "places are not freed");
    }
    assert_eq!(server.metric("pipeline_requests_in_progress") + server.metric("pipeline_requests_waiting"), 0);
    assert!(server.metric("pipeline_completion_tokens_total") < 100 * LONG, "they were completed");
    assert_eq!(server.post("/v1/chat/completions", &chat()).0, 200);
    server.signal(Signal::SIGTERM);
    assert_eq!(server.ended().0, Some(0));
}

/// Tokens of a completion that takes a while.
const LONG: u64 = 3000;

/// A chat that is streamed for a while: this model's most likely tokens never end.
fn long_chat() -> Value {
    let mut request = chat();
    request["temperature"] = json!(0);
    request["stream"] = json!(true);
    request["max_tokens"] = json!(LONG);
    request
}

/// The same, not streamed.
fn long_whole() -> Value {
    let mut request = long_chat();
    request["stream"] = json!(false);
    request
}

/// Has a client's end of a connection take little that is not read.
#[allow(unsafe_code, reason = "a call of the C library")]
fn take_little(stream: &TcpStream) {
    let bytes: libc::c_int = 2048;
    let (option, length) = (libc::SO_RCVBUF, std::mem::size_of_val(&bytes) as libc::socklen_t);
    // SAFETY: the value lives, and has the length that is given.
    let set = unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, option, std::ptr::from_ref(&bytes).cast(), length)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn clients_that_read_nothing_are_in_nobodys_way() {
    let server = start(&["--max-concurrency", "72"]);
    let ask = || server.post("/v1/chat/completions", &chat()).1["choices"][0]["message"]["content"].clone();
    let expected = ask();
    let mut slow = long_chat();
    slow["max_tokens"] = json!(800);
    let mut clients: Vec<TcpStream> = (0..64)
        .map(|_| {
            let stream = server.send(&head("/v1/chat/completions"), &slow.to_string());
            take_little(&stream);
            stream
        })
        .collect();
    let began = Instant::now();
    while server.metric("pipeline_requests_in_progress") < 64 {
        assert!(began.elapsed() < Duration::from_secs(60), "they do not begin");
    }
    assert_eq!(ask(), expected);
    assert!(server.metric("pipeline_requests_in_progress") > 0, "all were complete before others asked");
    // They are completed though nobody reads it, and what was not read is kept for who reads in the end.
    while server.metric("pipeline_requests_in_progress") > 0 {
        assert!(began.elapsed() < Duration::from_secs(120), "they are not completed");
    }
    let mut read = String::new();
    clients[0].read_to_string(&mut read).unwrap();
    assert!(read.contains("[DONE]") && read.len() > 100_000, "{} bytes", read.len());
    drop(clients);
    assert_eq!(ask(), expected);
}

#[test]
fn a_name_that_is_no_folder_gets_the_nearest() {
    let project = Project::new();
    std::fs::create_dir(project.path("made")).unwrap();
    project.write("made/config.json", "{}");
    let wanted = "did you mean `made`? a folder with a checkpoint or an adapter is named";
    project.run(&["chat", "--model", "maed"]).ends_with(2).warns(wanted);
    project.run(&["serve", "--model", "made", "--adapter", "mine=maed"]).ends_with(2).warns(wanted);
    project.run(&["serve", "--model", "nowhere/at/all"]).ends_with(2).warns("  help: a folder with a checkpoint");
    project.run(&["serve", "--model", "made", "--adapter", "mine"]).ends_with(2).warns("such as `mine=./out/adapter`");
}

#[test]
fn a_gguf_file_is_served_and_talked_to() {
    let project = project();
    let as_file = PIPELINE.split("  questions:").next().unwrap().to_owned()
        + "  file:\n    uses: gguf\n    with: { model: fresh, type: q8_0 }\npublish: { file: ./made }\n";
    project.write("make.yaml", &as_file);
    project.run(&["run", "make.yaml"]).ends_with(0);
    let made = std::fs::read_dir(project.path("made")).unwrap().map(|entry| entry.unwrap().path());
    let made = made.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "gguf")).unwrap();
    std::fs::rename(made, project.path("model.gguf")).unwrap();
    for folder in ["model.gguf", ".", "made"] {
        let refused = project.run(&["serve", "--model", folder]).ends_with(2);
        let expected = if folder == "made" { "`config.json`" } else { "uses: download" };
        assert!(refused.stderr.contains(expected), "{folder}: {}", refused.stderr);
    }
    project.write(
        "serve.yaml",
        r#"
version: 1
stages:
  base:
    uses: download
    with: { path: ./model.gguf }
  said:
    uses: generate
    with:
      { model: base, prompts: ["The rain"], template: chat, chat_template: chatml, max_new_tokens: 8, temperature: 0.9, seed: 5 }
publish: { said: ./said }
"#,
    );
    project.run(&["run", "serve.yaml"]).ends_with(0);
    let shown = project.run(&["show", "serve.yaml", "said", "--format", "json"]).ends_with(0);
    let fields = serde_json::from_str::<Value>(&shown.stdout).unwrap()["rows"][0]["fields"].clone();
    let generated = fields.as_array().unwrap().iter().find(|field| field["name"] == "completion").unwrap();
    let text = generated["text"].as_str().unwrap().to_owned();
    let chat_alone = ["chat", "serve.yaml", "base", "--chat-template", "chatml", "--max-new-tokens", "8"];
    let drawn = ["--temperature", "0.9", "--seed", "5", "--prompt", "The rain"];
    let letters = |text: &str| text.split_whitespace().collect::<String>();
    let said = project.run(&[&chat_alone[..], &drawn].concat()).ends_with(0).stdout;
    let harmless = text.replace(|letter: char| letter.is_control() && letter != '\n' && letter != '\t', "\u{fffd}");
    assert_eq!(letters(&said), letters(&harmless));
    let server = server_of(project, "base", &["--chat-template", "chatml"]);
    let mut request = chat();
    request["model"] = json!("base");
    let (status, answer) = server.post("/v1/chat/completions", &request);
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!(text)), "{answer}");
}

/// The head of a response.
fn head_of(stream: &mut TcpStream) -> String {
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    lines.by_ref().take_while(|line| !line.is_empty()).map(|line| format!("{line}\n")).collect()
}

#[test]
fn who_finds_no_place_is_told_to_come_back_and_who_takes_too_long_is_told_so() {
    let server = start(&["--max-concurrency", "1", "--queue", "1", "--timeout", "2s"]);
    let body = long_chat().to_string();
    let mut taken: Vec<TcpStream> = (0..2).map(|_| server.send(&head("/v1/chat/completions"), &body)).collect();
    let began = Instant::now();
    while server.metric("pipeline_requests_in_progress") + server.metric("pipeline_requests_waiting") < 2 {
        assert!(began.elapsed() < Duration::from_secs(20), "they are not taken");
    }
    let refused = head_of(&mut server.send(&head("/v1/chat/completions"), &chat().to_string()));
    assert!(refused.starts_with("HTTP/1.1 429") && refused.to_lowercase().contains("retry-after: 1"), "{refused}");
    drop(taken.pop());
    // The other one goes on, to its end or its time's.
    let mut rest = String::new();
    taken[0].read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]") || rest.contains("\"code\":\"timeout\""), "{rest}");
    let mut server = start(&["--timeout", "1ms"]);
    let (status, answer) = server.post("/v1/chat/completions", &long_whole());
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("timeout")), "{answer}");
    server.signal(Signal::SIGTERM);
    assert_eq!(server.ended().0, Some(0));
}

#[test]
fn a_draining_server_completes_what_is_in_progress_and_a_second_signal_ends_it() {
    let mut server = start(&[]);
    let mut streaming = server.send(&head("/v1/chat/completions"), &long_chat().to_string());
    // Half a request keeps the server from ending.
    let mut half = TcpStream::connect(&server.address).unwrap();
    let body = chat().to_string();
    write!(half, "{}\r\nContent-Length: {}\r\n\r\n{}", head("/v1/chat/completions"), body.len(), &body[..5]).unwrap();
    while server.metric("pipeline_requests_in_progress") == 0 {}
    server.signal(Signal::SIGTERM);
    let mut rest = String::new();
    streaming.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{rest}");
    assert!(TcpStream::connect(&server.address).is_err(), "further connections are accepted");
    write!(half, "{}", &body[5..]).unwrap();
    assert!(head_of(&mut half).starts_with("HTTP/1.1 503"));
    assert_eq!(server.ended().0, Some(0));

    let mut server = start(&[]);
    let _streaming = server.send(&head("/v1/chat/completions"), &long_chat().to_string());
    let mut half = TcpStream::connect(&server.address).unwrap();
    write!(half, "{}\r\nContent-Length: 100\r\n\r\n{{", head("/v1/chat/completions")).unwrap();
    while server.metric("pipeline_requests_in_progress") == 0 {}
    server.signal(Signal::SIGTERM);
    // Two signals that come at once may be one.
    while TcpStream::connect(&server.address).is_ok() {}
    let began = Instant::now();
    server.signal(Signal::SIGTERM);
    assert_ne!(server.ended().0, Some(0));
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_key_is_wanted_of_all_but_health() {
    let project = project();
    let mut command = project.command(&["serve", "serve.yaml", "fresh", "--port", "0", "--api-key-env", "NO_SUCH_KEY"]);
    assert_eq!(command.output().unwrap().status.code(), Some(2));
    let server = start(&["--api-key-env", "PATH"]);
    let with = |path: &str, key: &str| {
        server.ask(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}"), "").0
    };
    let key = std::env::var("PATH").unwrap();
    assert_eq!([with("/v1/models", &key), with("/v1/models", &key[1..]), with("/metrics", "")], [200, 401, 401]);
    assert_eq!(server.ask("GET /health HTTP/1.1\r\nHost: localhost", "").0, 200);
}

#[test]
fn all_that_openapi_has_is_read_and_nothing_else() {
    let server = start(&[]);
    let (_, text) = server.ask("GET /openapi.json HTTP/1.1\r\nHost: localhost", "");
    let document: Value = serde_json::from_str(&text).unwrap();
    let valid = |path: &str| match path {
        "/v1/chat/completions" => chat(),
        "/v1/completions" => json!({ "model": "fresh", "prompt": "The", "max_tokens": 1 }),
        "/tokenize" => json!({ "content": "The" }),
        _ => json!({ "tokens": [5] }),
    };
    let mut fields = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let schema = &methods["post"]["requestBody"]["content"]["application/json"]["schema"];
        // Those of adapters are off.
        let Some(properties) = schema["properties"].as_object().filter(|_| !path.contains("adapter")) else { continue };
        let validator = jsonschema::validator_for(schema).unwrap();
        assert!(validator.is_valid(&valid(path)), "{path}");
        assert_eq!(server.post(path, &valid(path)).0, 200, "{path}");
        for name in properties.keys().map(String::as_str).chain(["no_such"]) {
            let mut request = valid(path);
            request[name] = json!({ "wrong": [] });
            let (status, answer) = server.post(path, &request);
            let (param, code) = (answer["error"]["param"].as_str().unwrap(), &answer["error"]["code"]);
            assert!(status == 400 && param.split('.').next() == Some(name), "{path} {name}: {status} {answer}");
            let is_known = *code != "unsupported_parameter" || param != name;
            assert_eq!(is_known, name != "no_such", "{path} {name}: {answer}");
            fields += 1;
        }
    }
    assert!(fields > 40, "{fields}");
}

#[test]
fn garbage_is_refused_and_harms_nobody() {
    let server = start(&[]);
    let bodies = [chat().to_string(), json!({ "model": "fresh", "prompt": [1, 2], "max_tokens": 2 }).to_string()];
    let letters = ["{", "}", "[", "]", "\"", ",", ":", "0", "-", "\\", "e", "é", "\0", "null"];
    let mut state: u64 = 1;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut statuses = std::collections::BTreeSet::new();
    for number in 0..500 {
        let mut body: Vec<String> = bodies[number % 2].chars().map(String::from).collect();
        for _ in 0..=draw(6) {
            let at = draw(body.len());
            letters[draw(letters.len())].clone_into(&mut body[at]);
        }
        let path = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models"][draw(5)];
        let (status, answer) = server.ask(&head(path), &body.concat());
        assert!(status < 500, "{body:?}: {answer}");
        statuses.insert(status);
    }
    assert!(statuses.contains(&400) && statuses.contains(&405), "{statuses:?}");
    assert_eq!(server.post("/v1/chat/completions", &chat()).0, 200);
}

#[test]
fn a_beginning_that_was_computed_before_changes_no_answer() {
    let prompt: Vec<u32> = (0..200).map(|at| at % 250 + 3).collect();
    let request = json!({ "model": "fresh", "prompt": prompt, "max_tokens": 12, "temperature": 0.9, "seed": 2,
        "logprobs": 2 });
    let server = start(&[]);
    let mut answers = Vec::new();
    for reused in [0, 128, 256] {
        answers.push(server.post("/v1/completions", &request).1["choices"].clone());
        assert_eq!(server.metric("pipeline_reused_tokens_total"), reused);
    }
    let without = start(&["--prefix-cache", "0B"]);
    for _ in 0..2 {
        answers.push(without.post("/v1/completions", &request).1["choices"].clone());
    }
    assert_eq!(without.metric("pipeline_reused_tokens_total"), 0);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

#[test]
fn adapters_come_and_go_by_an_authenticated_call_and_from_named_folders_alone() {
    let off = start(&[]);
    assert_eq!(off.post("/v1/load_lora_adapter", &json!({ "lora_name": "one", "lora_path": "/" })).0, 404);
    let project = project();
    project.run(&["run", "serve.yaml"]).ends_with(0);
    let (folder, outside) = (project.path("adapters"), project.path("said"));
    let without_key = ["serve", "serve.yaml", "fresh", "--adapter-folder", folder.to_str().unwrap()];
    project.run(&without_key).ends_with(2);
    let arguments =
        ["--chat-template", "chatml", "--api-key-env", "PATH", "--adapter-folder", folder.to_str().unwrap()];
    let server = server_of(project, "fresh", &arguments);
    let authorized = |path: &str| format!("{}\r\nAuthorization: Bearer {}", head(path), std::env::var("PATH").unwrap());
    let post = |path: &str, body: &Value| {
        let (status, answer) = server.ask(&authorized(path), &body.to_string());
        (status, serde_json::from_str::<Value>(&answer).unwrap())
    };
    let load = |name: &str, path: &std::path::Path| {
        post("/v1/load_lora_adapter", &json!({ "lora_name": name, "lora_path": path })).0
    };
    assert_eq!(server.ask(&head("/v1/load_lora_adapter"), "{}").0, 401);
    assert_eq!(load("one", &outside), 400);
    assert_eq!(load("one", &folder.join("..")), 400);
    assert_eq!(load("fresh", &folder.join("one")), 400);
    let ask = |model: &str| {
        let request = json!({ "model": model, "prompt": "The rain", "max_tokens": 8, "temperature": 0.9, "seed": 1 });
        let (status, answer) = post("/v1/completions", &request);
        (status, answer["choices"][0]["text"].clone())
    };
    let base = ask("fresh");
    assert_eq!(ask("one").0, 404);
    assert_eq!(load("one", &folder.join("one")), 200);
    assert_eq!(load("one", &folder.join("one")), 400);
    let one = ask("one");
    assert!(one.0 == 200 && one.1 != base.1, "{one:?}");
    assert_eq!(load("two", &folder.join("one")), 200);
    // As clients write a name in a path.
    assert_eq!(load("a team's/third", &folder.join("one")), 200);
    let described = format!(
        "GET /v1/models/a%20team's%2Fthird HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}",
        std::env::var("PATH").unwrap()
    );
    assert_eq!(server.ask(&described, "").0, 200);
    assert_eq!(post("/v1/unload_lora_adapter", &json!({ "lora_name": "one" })).0, 200);
    assert_eq!(post("/v1/unload_lora_adapter", &json!({ "lora_name": "one" })).0, 404);
    assert_eq!(post("/v1/unload_lora_adapter", &json!({ "lora_name": "fresh" })).0, 400);
    assert_eq!((ask("one").0, ask("two").1, ask("fresh")), (404, one.1, base));
}

#[test]
fn an_adapter_that_was_published_is_served_on_its_own_base_alone() {
    let project = project();
    project.edit("serve.yaml", "said: ./said, ", "fresh.model: ./fresh, ");
    project.run(&["run", "serve.yaml"]).ends_with(0);
    let ask = |base: &[&str]| {
        let adapter = ["--adapter", "one=adapters/one", "--chat-template", "chatml", "--prompt", "The rain"];
        project.run(&[&["chat"], base, &adapter].concat())
    };
    ask(&["serve.yaml", "fresh"]).ends_with(0);
    ask(&["--model", "fresh"]).ends_with(0);
    let other = ask(&["serve.yaml", "fresh", "fresh.seed=7"]).ends_with(1);
    assert!(other.stderr.contains("trained on another model"), "{}", other.stderr);
    // A copy without a record is taken at its word.
    std::fs::create_dir(project.path("copies")).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(project.path("adapters/one").join(name), project.path("copies").join(name)).unwrap();
    }
    let copy = ["--adapter", "one=copies", "--chat-template", "chatml", "--prompt", "The rain"];
    project.run(&[&["chat", "serve.yaml", "fresh", "fresh.seed=7"], &copy[..]].concat()).ends_with(0);
    let folders = project.path("adapters");
    let arguments = ["fresh.seed=7", "--api-key-env", "PATH", "--adapter-folder", folders.to_str().unwrap()];
    let server = server_of(project, "fresh", &arguments);
    let head = format!("{}\r\nAuthorization: Bearer {}", head("/v1/load_lora_adapter"), std::env::var("PATH").unwrap());
    let (status, answer) =
        server.ask(&head, &json!({ "lora_name": "one", "lora_path": folders.join("one") }).to_string());
    assert!(status == 422 && answer.contains("trained on another model"), "{status} {answer}");
}

#[test]
fn an_adapter_is_served_once_a_run_has_made_it_and_so_is_a_newer_one() {
    let server = server_of(project(), "adapter", &["--watch"]);
    let models = || {
        let (_, answer) = server.ask("GET /v1/models HTTP/1.1\r\nHost: localhost", "");
        let list: Value = serde_json::from_str(&answer).unwrap();
        list["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| model["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let ask = || {
        let request = json!({ "model": "adapter", "prompt": "The rain", "max_tokens": 20, "temperature": 0.9, "seed": 1,
            "logprobs": 0 });
        server.post("/v1/completions", &request).1["choices"][0]["logprobs"]["token_logprobs"].clone()
    };
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    assert_eq!(models(), ["fresh"]);
    server.project.run(&["run", "serve.yaml"]).ends_with(0);
    until("it is not served", &|| models() == ["fresh", "adapter"]);
    let first = ask();
    server.project.edit("serve.yaml", "epochs: 4", "epochs: 6");
    // What is not made changes nothing.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(ask(), first);
    server.project.run(&["run", "serve.yaml"]).ends_with(0);
    until("the newer one is not served", &|| ask() != first);
    assert_eq!(models(), ["fresh", "adapter"]);
    let wrong = ["serve", "serve.yaml", "fresh", "--watch"];
    server.project.run(&wrong).ends_with(2);
    let wrong = server.project.run(&["serve", "serve.yaml", "fresh", "--chat-template", "chatlm"]).ends_with(2);
    assert!(wrong.stderr.contains("chatml"), "{}", wrong.stderr);
    let wrong = server.project.run(&["serve", "serve.yaml", "fresh", "--max-model-len", "99999"]).ends_with(2);
    assert!(wrong.stderr.contains("positions"), "{}", wrong.stderr);
}

#[test]
fn streamed_tokens_count_the_characters_before_them() {
    let server = start(&[]);
    let mut request = json!({ "model": "fresh", "prompt": "the fox", "max_tokens": 5, "logprobs": 0, "temperature": 0,
        "logit_bias": { "1": -100 } });
    let whole = server.post("/v1/completions", &request).1["choices"][0]["logprobs"]["text_offset"].clone();
    request["stream"] = json!(true);
    let (_, events) = server.ask(&head("/v1/completions"), &request.to_string());
    let chunks = events.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let offsets = |chunk: &Value| chunk["choices"][0]["logprobs"]["text_offset"].as_array().cloned();
    let streamed: Vec<Value> = chunks.filter_map(|chunk| offsets(&chunk)).flatten().collect();
    assert_eq!(json!(streamed), whole);
    assert!(streamed.len() == 5 && streamed[4].as_u64() > Some(0), "{streamed:?}");
}

#[test]
fn echoed_log_probabilities_have_one_of_each_token_whatever_ends_the_completion() {
    let server = start(&[]);
    let ids: Vec<u32> = (0..20).map(|at| at % 250 + 3).collect();
    // The end of text is more likely than anything, or less.
    for (bias, finish) in [(100, "stop"), (-100, "length")] {
        let request = json!({ "model": "fresh", "prompt": ids, "max_tokens": 1, "echo": true, "logprobs": 1,
            "temperature": 0, "logit_bias": { "1": bias } });
        let choice = server.post("/v1/completions", &request).1["choices"][0].clone();
        assert_eq!(choice["finish_reason"], finish);
        let lists = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
        let lengths = lists.map(|name| choice["logprobs"][name].as_array().unwrap().len());
        assert_eq!(lengths, [21; 4], "{choice}");
    }
}

#[test]
fn answers_hold_to_a_schema() {
    let server = start(&[]);
    let schema = json!({
        "type": "object",
        "properties": {
            "city": { "enum": ["Bern", "Zürich"] },
            "days": { "type": "integer", "minimum": 1, "maximum": 14 },
            "tags": { "type": "array", "items": { "type": "boolean" }, "maxItems": 3 },
        },
        "required": ["city", "days", "tags"],
        "additionalProperties": false,
    });
    let mut request = chat();
    request["max_tokens"] = json!(1000);
    request["response_format"] = json!({ "type": "json_schema", "json_schema": { "name": "trip", "schema": schema } });
    request["stop"] = json!(["\"", "days"]);
    let validator = jsonschema::validator_for(&schema).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..8 {
        request["seed"] = json!(seed);
        let (status, answer) = server.post("/v1/chat/completions", &request);
        assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("stop")), "{answer}");
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(validator.is_valid(&value), "{text}");
        seen.insert(value.to_string());
    }
    assert!(seen.len() > 1, "they are all alike: {seen:?}");
    request["response_format"] = json!({ "type": "json_object" });
    request["max_tokens"] = json!(40);
    let (_, answer) = server.post("/v1/chat/completions", &request);
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.starts_with('{'), "{text}");
}

#[test]
fn tools_are_called_in_the_form_of_the_chat_template() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/data/chat_templates/");
    for (family, beginning) in [
        ("qwen25", "<tool_call>\n{\"name\": \"news\", \"arguments\": "),
        ("mistral_v03", "[TOOL_CALLS] [{\"name\": \"news\", \"arguments\": "),
        ("llama31", "{\"name\": \"news\", \"parameters\": "),
    ] {
        let template = std::fs::read_to_string(format!("{golden}{family}.jinja")).unwrap();
        // This copy of it has no tools where they stand by default.
        let template = template.replace("tools_in_user_message = true", "tools_in_user_message = false");
        let server = start_with_template(&template, &[]);
        let parameters = json!({ "type": "object", "properties": { "city": { "$ref": "#/$defs/City" } },
            "required": ["city"], "additionalProperties": false, "$defs": { "City": { "enum": ["Bern", "Zürich"] } } });
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "description": "The weather.", "parameters": parameters } });
        let mut request = chat();
        request["max_tokens"] = json!(1000);
        request["tools"] = json!([tool("weather"), tool("news")]);
        request["tool_choice"] = json!({ "type": "function", "function": { "name": "news" } });
        request["parallel_tool_calls"] = json!(false);
        let (status, answer) = server.post("/v1/chat/completions", &request);
        assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("tool_calls")), "{family}: {answer}");
        let message = answer["choices"][0]["message"].clone();
        assert_eq!(message["content"], Value::Null, "{family}");
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"]["name"], "news", "{family}");
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Bern", "Zürich"].contains(&arguments["city"].as_str().unwrap()), "{family}: {arguments}");
        // No text of it ends it, and what the limit leaves of one is text.
        let mut others = request.clone();
        others["stop"] = json!(["news", "\""]);
        let (_, answer) = server.post("/v1/chat/completions", &others);
        assert_eq!(
            answer["choices"][0]["message"]["tool_calls"][0]["function"], call["function"],
            "{family}: {answer}"
        );
        others["max_tokens"] = json!(6);
        let (_, answer) = server.post("/v1/chat/completions", &others);
        let cut = &answer["choices"][0];
        assert_eq!(
            (&cut["message"]["tool_calls"], &cut["finish_reason"]),
            (&Value::Null, &json!("length")),
            "{family}"
        );
        let text = cut["message"]["content"].as_str().unwrap();
        assert!(!text.is_empty() && beginning.starts_with(text), "{family}: {text}");
        others["stream"] = json!(true);
        let (_, events) = server.ask(&head("/v1/chat/completions"), &others.to_string());
        let data = events.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
        let said: String =
            data.filter_map(|it| Some(it["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect();
        assert_eq!(said, text, "{family}");
        assert!(events.contains("\"finish_reason\":\"length\""), "{family}: {events}");
        // Streamed it is the same call.
        request["stream"] = json!(true);
        let (_, events) = server.ask(&head("/v1/chat/completions"), &request.to_string());
        let data = events.lines().filter_map(|line| line.strip_prefix("data: "));
        let deltas: Vec<Value> = data.filter_map(|data| serde_json::from_str(data).ok()).collect();
        let streamed = deltas.iter().find_map(|delta| delta["choices"][0]["delta"]["tool_calls"].as_array()).unwrap();
        assert_eq!(streamed[0]["function"], call["function"], "{family}");
        let said = deltas.iter().filter_map(|delta| delta["choices"][0]["delta"]["content"].as_str());
        assert_eq!(said.collect::<String>(), "", "{family}");
        assert_eq!(deltas.last().unwrap()["choices"][0]["finish_reason"], "tool_calls", "{family}");
        // The call and what it came to go back into the conversation; without a choice the model says what it likes.
        let answered = json!({ "role": "tool", "tool_call_id": call["id"], "content": "{\"rain\": true}" });
        let conversation = json!([request["messages"][0], message, answered]);
        let request = json!({ "model": "fresh", "messages": conversation, "tools": request["tools"], "max_tokens": 5, "seed": 1 });
        let (status, answer) = server.post("/v1/chat/completions", &request);
        assert_eq!(status, 200, "{family}: {answer}");
    }
}

#[test]
fn tools_are_an_error_where_the_chat_template_has_none() {
    let server = start_with_template("zephyr", &[]);
    let mut request = chat();
    request["tools"] = json!([{ "type": "function", "function": { "name": "f" } }]);
    for choice in ["auto", "required"] {
        request["tool_choice"] = json!(choice);
        let (status, answer) = server.post("/v1/chat/completions", &request);
        let error = &answer["error"];
        let expected = (400, &json!("tools"), &json!("unsupported_parameter"));
        assert_eq!((status, &error["param"], &error["code"]), expected, "{choice}: {answer}");
    }
    // None of them is to be called.
    request["tool_choice"] = json!("none");
    let (status, answer) = server.post("/v1/chat/completions", &request);
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_conversation_can_be_corrected_saved_and_compared_with_the_base() {
    let project = project();
    let arguments = [
        "chat",
        "serve.yaml",
        "adapter",
        "--chat-template",
        "chatml",
        "--max-new-tokens",
        "8",
        "--temperature",
        "0.9",
        "--seed",
        "5",
    ];
    let say_with = |more: &[&str], lines: &str| {
        let mut command = project.command(&[&arguments[..], more].concat());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let said = |output: Output| {
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let say = |lines: &str| said(say_with(&["--commands"], lines));
    // Whoever writes into a pipe writes prompts, whatever they begin with.
    project.write("precious.txt", "mine");
    let prompts = said(say_with(&[], "/quit\n/save precious.txt\n"));
    assert!(prompts.lines().count() >= 2, "{prompts}");
    let refused = say_with(&["--commands"], "The rain\n/save precious.txt\n");
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(project.path("precious.txt")).unwrap(), "mine");
    let of_adapter = say("The rain\n");
    assert!(!of_adapter.trim().is_empty());
    assert_eq!(say("The rain\n/undo\nThe rain\n"), of_adapter.repeat(2), "what was undone is not forgotten");
    assert_eq!(say("/system Be brief.\nThe rain\n/reset\n/system\nThe rain\n").matches(&of_adapter).count(), 1);
    let both = say("The rain\n/reset\n/adapter none\nThe rain\n/reset\n/adapter adapter\nThe rain\n");
    assert!(both.starts_with(&of_adapter) && both.ends_with(&of_adapter) && both != of_adapter.repeat(3), "{both}");
    say("/system Be brief.\nThe rain\n/save saved.jsonl\n/quit\n");
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(project.path("saved.jsonl")).unwrap()).unwrap();
    let roles: Vec<&str> =
        saved["messages"].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
}

#[test]
fn an_interrupt_stops_an_answer_and_not_the_program() {
    let project = project();
    project.run(&["run", "serve.yaml", "--only", "fresh"]);
    let arguments = ["chat", "serve.yaml", "fresh", "--chat-template", "chatml", "--commands"];
    let mut command = project.command(&arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (mut questions, mut answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    questions.write_all(b"The rain\n").unwrap();
    let mut first = [0; 1];
    answers.read_exact(&mut first).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    questions.write_all(b"/reset\n/quit\n").unwrap();
    let mut interrupted = first.to_vec();
    answers.read_to_end(&mut interrupted).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let whole = project.run(&[&arguments[..], &["--prompt", "The rain"]].concat()).ends_with(0).stdout;
    assert!(interrupted.len() < whole.len(), "the answer was not stopped");
}

/// `chat` of the adapter at a terminal of so many columns, with the history of a project.
fn at_a_terminal(project: &Project, columns: &str, more: &[&str]) -> Session {
    let chat = project.command(&[&["chat", "serve.yaml", "adapter", "--chat-template", "chatml"], more].concat());
    let session =
        Session::start(&chat, &[("COLUMNS", columns), ("XDG_STATE_HOME", project.path("state").to_str().unwrap())]);
    session.wait_until("it does not begin", |shown| shown.ends_with("> ") || shown.contains("lists the commands"));
    session
}

/// What the assistant said in a conversation that was saved.
fn saved_answer(project: &Project, file: &str) -> String {
    let began = Instant::now();
    loop {
        let text = std::fs::read_to_string(project.path(file)).unwrap_or_default();
        if let Ok(saved) = serde_json::from_str::<Value>(&text) {
            let messages = saved["messages"].as_array().unwrap();
            assert_eq!(messages[messages.len() - 2], json!({ "role": "user", "content": "The rain" }));
            return messages[messages.len() - 1]["content"].as_str().unwrap().to_owned();
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{file} is not written");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn on_a_terminal_lines_are_edited_and_kept_and_answers_are_stopped_or_shown_side_by_side() {
    let project = project();
    // So long an answer that it is stopped in time, however busy this machine is.
    project.write("serve.yaml", &PIPELINE.replace("max_position_embeddings: 4096", "max_position_embeddings: 65536"));
    let drawn = ["--max-new-tokens", "8", "--temperature", "0.9", "--seed", "5"];
    let alone = |stage: &str, more: &[&str]| {
        let chat = ["chat", "serve.yaml", stage, "--chat-template", "chatml", "--prompt", "The rain"];
        project.run(&[&chat[..], more].concat()).ends_with(0).stdout
    };
    let letters = |text: &str| text.split_whitespace().collect::<String>();
    let (of_adapter, of_base) = (letters(&alone("adapter", &drawn)), letters(&alone("fresh", &drawn)));
    assert_ne!(of_adapter, of_base);

    let mut session = at_a_terminal(&project, "100", &[]);
    session.press("/adapter none\r");
    session.press("The rainy\x7f\r");
    session.wait_until("it does not answer", |shown| shown.rsplit("The rain").next().unwrap().len() > 400);
    session.press("\x03");
    // A line is asked for a third time; before that an interrupt takes the keys behind it along.
    session.wait_until("it is not stopped", |shown| shown.matches("\x1b[?2004h").count() == 3);
    // An interrupt while a line is edited ends nothing, either.
    session.press("/save nothing.jsonl\x03");
    session.wait_until("the line is not dropped", |shown| shown.matches("\x1b[?2004h").count() == 4);
    session.press("/save stopped.jsonl\r");
    let stopped = saved_answer(&project, "stopped.jsonl");
    session.press("/quit\r");
    let (code, shown) = session.end();
    assert_eq!(code, Some(0), "{shown}");
    assert!((101..30_000).contains(&stopped.len()), "{} bytes", stopped.len());
    assert!(!project.path("nothing.jsonl").exists());
    let history = std::fs::read_to_string(project.path("state/pipeline/chat_history")).unwrap();
    assert_eq!(history, "\"/adapter none\"\n\"The rain\"\n\"/save stopped.jsonl\"\n\"/quit\"\n");

    // The question of the conversation before is four lines up.
    let mut session = at_a_terminal(&project, "100", &drawn);
    session.press("/compare none\r\x1b[A\x1b[A\x1b[A\x1b[A\r");
    // A line is asked for a third time once both have answered.
    let has_answered = |shown: &str| shown.matches("\x1b[?2004h").count() == 3;
    session.wait_until("they do not answer", has_answered);
    session.press("/save compared.jsonl\r");
    assert_eq!(letters(&saved_answer(&project, "compared.jsonl")), of_adapter);
    session.press("/quit\r");
    let (code, shown) = session.end();
    assert_eq!(code, Some(0), "{shown}");
    let (_, rows) = shown.split_once("\x1b[1madapter").unwrap();
    let rows = rows.lines().map_while(|line| line.split_once('│')).map(|(left, right)| (letters(left), letters(right)));
    let (left, right): (Vec<String>, Vec<String>) = rows.unzip();
    assert!(right[0].starts_with("fresh"), "{shown}");
    assert_eq!((left[1..].concat(), right[1..].concat()), (of_adapter.clone(), of_base.clone()), "{shown}");

    // Where it is narrow they are below one another.
    let mut session = at_a_terminal(&project, "60", &drawn);
    session.press("/compare fresh\rThe rain\r");
    session.wait_until("they do not answer", has_answered);
    session.press("\x04");
    let (code, shown) = session.end();
    assert_eq!(code, Some(0), "{shown}");
    let (_, answers) = shown.split_once("\nadapter:\n").unwrap();
    let (first, second) = answers.split_once("\nfresh:\n").unwrap();
    assert_eq!(letters(first), of_adapter, "{shown}");
    assert!(letters(second).starts_with(&of_base), "{shown}");
}

#[test]
fn a_script_talks_through_prompts() {
    let project = project();
    let chat = ["chat", "serve.yaml", "fresh", "--chat-template", "chatml", "--max-new-tokens", "8"];
    let drawn = ["--temperature", "0.9", "--seed", "5", "--prompt", "The rain"];
    let once = project.run(&[&chat[..], &drawn].concat()).ends_with(0);
    let again = project.run(&[&chat[..], &drawn].concat()).ends_with(0);
    assert!(!once.stdout.trim().is_empty(), "{once}");
    assert_eq!(once.stdout, again.stdout);
}
