//! `pipeline serve` and `pipeline chat`: what they answer is what `generate` does, and clients that misbehave harm
//! nobody. Conversations of `chat` are in `conversations`, answers of a given form in `forms`.

mod conversations;
mod forms;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::libc;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_harness::test;

use crate::support::Project;
use crate::support::server::{Server, head};

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
    assert_eq!((status, &answer["error"]["code"]), (504, &json!("timeout")), "{answer}");
    let late = head_of(&mut server.send(&head("/v1/chat/completions"), &long_whole().to_string())).to_lowercase();
    assert!(late.contains("x-should-retry: false") && !late.contains("retry-after"), "{late}");
    let never = server.project.run(&["serve", "serve.yaml", "fresh", "--timeout", "0s"]).ends_with(2);
    assert!(never.stderr.contains("`--timeout` must be above 0"), "{never}");
    server.signal(Signal::SIGTERM);
    assert_eq!(server.ended().0, Some(0));
}

/// What a template is given is in the prompt, which is printed.
#[test]
fn a_chat_template_has_the_local_time_and_what_a_message_brings() {
    let template = "{{ strftime_now('%s') }}.{% for m in messages %}{{ m.role }}({{ m.name }}|{{ m.reasoning_content }})\
                    {{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant{% endif %}";
    let mut server = start_with_template(template, &["--log-prompts"]);
    let mut request = chat();
    request["messages"] = json!([
        { "role": "developer", "name": "rules", "content": "Be kind." },
        { "role": "user", "name": "Ada", "content": [{ "type": "text", "text": "2 + 2", "cache_control": {} }] },
        { "role": "assistant", "name": "Pip", "content": "4", "reasoning_content": "sum" },
        { "role": "user", "content": "Thanks." },
    ]);
    let seconds = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let before = seconds();
    let (status, answer) = server.post("/v1/chat/completions", &request);
    assert_eq!(status, 200, "{answer}");
    server.signal(Signal::SIGTERM);
    let (_, said) = server.ended();
    let prompt = said.lines().find_map(|line| line.strip_prefix("prompt: ")).unwrap_or_else(|| panic!("{said}"));
    let prompt: String = serde_json::from_str(prompt).unwrap();
    let conversation = "system(rules|)Be kind.;user(Ada|)2 + 2;assistant(Pip|sum)4;user(|)Thanks.;assistant";
    let (time, rest) = prompt.split_once('.').unwrap();
    assert_eq!(rest, conversation);
    let time: u64 = time.trim_start_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap();
    assert!((before..=seconds()).contains(&time), "{time}");
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
