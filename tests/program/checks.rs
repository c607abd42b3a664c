//! What is checked before anything runs: `validate`, `plan` and `run` make the same checks, and what a server has is
//! looked at before it is fetched.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use test_harness::test;

use crate::hub::{self, FaultyHub};
use crate::support::{Project, Ran, install_script, program};

/// The codes of the problems that a command printed, with their severities, sorted.
fn codes(ran: &Ran) -> Vec<String> {
    let mut codes = Vec::new();
    let mut mark = ' ';
    // A code may be broken over two lines.
    for line in ran.stderr.replace("-\n  │ ", "-").lines() {
        if let Some(first) = line.trim_start().chars().next().filter(|first| ['×', '⚠'].contains(first)) {
            mark = first;
        }
        let code = line.trim_end().strip_suffix(']').and_then(|line| line.rsplit_once('['));
        let is_code = |code: &str| engine::file::codes::find(code).is_some();
        codes.extend(code.filter(|(_, code)| is_code(code)).map(|(_, code)| format!("{mark} {code}")));
    }
    codes.sort();
    codes
}

/// Whether a home holds no record of a run.
fn has_no_run(home: &Path) -> bool {
    fs::read_dir(home.join("runs")).map_or(true, |mut runs| runs.next().is_none())
}

#[test]
fn every_broken_file_gets_the_same_answer_from_validate_plan_and_run() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/diagnostics/broken");
    let files = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut failed = Vec::new();
    let mut refused = 0;
    for file in files.filter(|file| file.ends_with(".yaml")) {
        let home = tempfile::tempdir().unwrap();
        let ask = |command: &str| {
            let mut program = program(&folder);
            program.args([command, &file]).env("PIPELINE_HOME", home.path());
            Ran::of(program, &[command, &file])
        };
        let validated = ask("validate");
        let planned = ask("plan");
        if (planned.code, codes(&planned)) != (validated.code, codes(&validated)) {
            failed.push(format!("{file}: {validated}\n{planned}"));
        }
        // What is only warned of would be run.
        if validated.code == Some(0) {
            continue;
        }
        refused += 1;
        let ran = ask("run");
        if (ran.code, codes(&ran)) != (validated.code, codes(&validated)) || !has_no_run(home.path()) {
            failed.push(format!("{file}: {validated}\n{ran}"));
        }
        assert!(!codes(&validated).is_empty(), "{validated}");
    }
    assert!(refused > 60, "{refused}");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn what_follows_from_a_mistake_is_not_told_and_all_else_is() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/diagnostics/broken");
    let mut command = program(&folder);
    command.args(["validate", "several-levels.yaml", "--format", "json"]);
    let problems = Ran::of(command, &["validate"]).ends_with(2).json()[0]["problems"].clone();
    let found: Vec<(&str, u64)> = problems
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| (problem["code"].as_str().unwrap(), problem["line"].as_u64().unwrap()))
        .collect();
    let expected = [
        ("unknown-key", 3),
        ("unknown-column", 5),
        ("missing-key", 6),
        ("unknown-key", 6),
        ("unknown-stage", 10),
        ("wrong-input", 11),
        ("out-of-range", 12),
        ("unknown-variable", 13),
    ];
    assert_eq!(found, expected, "{problems:#}");
}

#[test]
fn what_follows_from_a_mistake_on_the_command_line_is_not_told_either() {
    let project = Project::new();
    project.write("rows.jsonl", "{\"question\": \"What?\", \"answer\": \"That.\"}\n");
    project.write("p.yaml", "version: 1\nstages:\n  rows: { uses: dataset, with: { source: ./rows.jsonl } }\n");
    for command in ["plan", "run"] {
        let told = |overrides: &[&str]| codes(&project.run(&[&[command, "p.yaml"], overrides].concat()).ends_with(2));
        assert_eq!(told(&[]), ["× unclear-rows"]);
        assert_eq!(told(&["rows.temlate=question_answer"]), ["× unknown-key"]);
    }
}

/// A project beside a Hub with one repository.
struct OnHub<'a> {
    project: Project,
    hub: &'a FaultyHub,
}

impl<'a> OnHub<'a> {
    fn new(hub: &'a FaultyHub, stages: &str) -> Self {
        let project = Project::new();
        project.write("hub.yaml", &format!("version: 1\nstages:\n{stages}"));
        project.write("chats.jsonl", CHATS);
        project.write("rows.jsonl", &"{\"input\": \"a\", \"output\": \"b\"}\n".repeat(4));
        Self { project, hub }
    }

    fn pipeline(&self, arguments: &[&str]) -> Ran {
        let mut command = self.project.command(arguments);
        for name in ["HF_TOKEN", "HF_HUB_OFFLINE", "PIPELINE_REMOTE"] {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.hub.endpoint).env("HF_HOME", self.project.path("hf"));
        command.env("HF_HUB_CACHE", self.project.path("hub-cache"));
        Ran::of(command, arguments)
    }

    /// Runs it, and makes sure that it is refused with this problem before a byte of `weights` behind its first
    /// `header` was asked for, and before any stage was started; that the other commands say the same from then on;
    /// and that nothing is asked for twice.
    #[track_caller]
    fn is_refused(&self, code: &str, weights: &str, header: u64) -> Ran {
        self.pipeline(&["validate", "hub.yaml"]).ends_with(0);
        assert_eq!(self.hub.requests().len(), 0, "a check goes nowhere");
        let ran = self.pipeline(&["run", "hub.yaml"]).ends_with(2);
        assert_eq!(codes(&ran), [format!("× {code}")], "{ran}");
        let asked = self.hub.bytes_asked_for(weights);
        assert_eq!(asked, header, "{:#?}", self.hub.requests_for(weights));
        assert!(has_no_run(&self.project.path(".pipeline")));
        let requests = self.hub.requests().len();
        for command in ["validate", "plan", "run"] {
            let again = self.pipeline(&[command, "hub.yaml"]).ends_with(2);
            assert_eq!(codes(&again), codes(&ran), "{again}");
        }
        assert_eq!(self.hub.requests().len(), requests, "what is known is not asked for again");
        ran
    }
}

const CHATS: &str =
    "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}, {\"role\": \"assistant\", \"content\": \"Hi\"}]}\n";

/// Weights with a header of its own and so many bytes behind it.
fn weights(bytes: usize) -> (Vec<u8>, u64) {
    let header = format!("{{\"a\":{{\"dtype\":\"F32\",\"shape\":[{}],\"data_offsets\":[0,{bytes}]}}}}", bytes / 4);
    let whole = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; bytes]].concat();
    (whole, header.len() as u64 + 8)
}

/// A tokenizer of letters.
fn tokenizer() -> String {
    let letters: serde_json::Map<String, serde_json::Value> =
        ('a'..='z').enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": letters, "merges": []},
    })
    .to_string()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// A model without a chat template, as the Hub has it.
fn model(weights: &[u8]) -> FaultyHub {
    let llama = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/diagnostics/broken/llama");
    FaultyHub::serve(&[
        ("config.json", &fs::read(llama.join("config.json")).unwrap()),
        ("tokenizer.json", tokenizer().as_bytes()),
        ("tokenizer_config.json", b"{}"),
        ("model.safetensors", weights),
        ("README.md", b"A model."),
    ])
}

const BASE: &str = "  base: { uses: download, with: { repo: owner/name } }\n";

#[test]
fn a_wrong_module_of_a_model_on_the_hub_ends_a_run_before_its_weights_are_fetched() {
    let (weights, header) = weights(200_000);
    let hub = model(&weights);
    let rest = "  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens, lora: { target_modules: [query_key_value] } } }
";
    let on = OnHub::new(&hub, &format!("{BASE}{rest}"));
    on.is_refused("wrong-input", "model.safetensors", header).warns("query_key_value");
    // What is wrong behind the part that is asked for is no reason to refuse that.
    on.pipeline(&["run", "hub.yaml", "--until", "base"]).ends_with(0);
    assert_eq!(hub.bytes_asked_for("model.safetensors"), header + weights.len() as u64);
    let ran = on.pipeline(&["run", "hub.yaml"]).ends_with(2);
    assert_eq!(codes(&ran), ["× wrong-input"]);
}

#[test]
fn conversations_without_a_chat_template_end_a_run_before_weights_are_fetched() {
    let (weights, header) = weights(200_000);
    let hub = model(&weights);
    let rest = "  samples: { uses: generate, with: { model: base, prompts: [\"Hello\"], template: chat } }\n";
    OnHub::new(&hub, &format!("{BASE}{rest}")).is_refused("no-chat-template", "model.safetensors", header);
    let pairs = "  rows: { uses: dataset, with: { source: ./pairs.jsonl } }
  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
";
    let hub = model(&weights);
    let on = OnHub::new(&hub, &format!("{BASE}{pairs}"));
    on.project.write("pairs.jsonl", &CHATS.replace("}]}", "}], \"rejected_response\": \"No\"}"));
    on.is_refused("no-chat-template", "model.safetensors", header);
    let hub = model(&weights);
    hub.put("tokenizer_config.json", b"{\"chat_template\": \"{{ messages }}\"}");
    let on = OnHub::new(&hub, &format!("{BASE}{rest}"));
    // It gets as far as the model, which has none of the weights that its configuration asks for.
    on.pipeline(&["run", "hub.yaml"]).ends_with(1).warns("stage `samples` failed");
}

#[test]
fn damaged_weights_on_the_hub_are_found_by_their_headers() {
    let (weights, header) = weights(200_000);
    let hub = model(&weights[..100_000]);
    OnHub::new(&hub, BASE).is_refused("bad-checkpoint", "model.safetensors", header).warns("is cut off: it has 100000");
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n", "a".repeat(64));
    let hub = model(pointer.as_bytes());
    let all = pointer.len() as u64;
    OnHub::new(&hub, BASE).is_refused("bad-checkpoint", "model.safetensors", all).warns("git-LFS pointer");
}

#[test]
fn a_model_that_is_not_computed_here_is_refused_by_its_configuration() {
    let (weights, header) = weights(4000);
    let hub = model(&weights);
    hub.put("config.json", br#"{"model_type": "bert", "architectures": ["BertForMaskedLM"]}"#);
    OnHub::new(&hub, BASE).is_refused("bad-checkpoint", "model.safetensors", header).warns("BertForMaskedLM");
}

#[test]
fn a_wrong_column_of_a_dataset_on_the_hub_ends_a_run_after_its_first_rows() {
    let rows = "{\"question\": \"What is it?\", \"answer\": \"A stone.\"}\n".repeat(20_000);
    let hub = FaultyHub::serve(&[("train.jsonl", rows.as_bytes()), ("README.md", b"---\nlicense: mit\n---\n")]);
    let stages =
        "  rows: { uses: dataset, with: { source: owner/name, column_map: { input: qestion, output: answer } } }\n";
    let on = OnHub::new(&hub, stages);
    let ran = on.is_refused("unknown-column", "train.jsonl", 256 << 10);
    ran.reports("unknown-column").warns("owner/name/train.jsonl");
    on.project.edit("hub.yaml", "qestion", "question");
    on.pipeline(&["run", "hub.yaml"]).ends_with(0);
}

#[test]
fn a_split_that_a_dataset_on_the_hub_has_not_is_named_before_rows_are_fetched() {
    let rows = "{\"input\": \"What is it?\", \"output\": \"A stone.\"}\n".repeat(20_000);
    let hub = FaultyHub::serve(&[("train.jsonl", rows.as_bytes())]);
    let stages = "  rows: { uses: dataset, with: { source: owner/name, split: tset } }\n";
    OnHub::new(&hub, stages).is_refused("bad-value", "train.jsonl", 0).warns("no files of a split `tset`");
}

#[test]
fn the_columns_of_parquet_are_those_of_its_footer() {
    let project = Project::new();
    let rows: String = (0..3000).map(|n| format!("{{\"input\": \"{n} {n}\", \"output\": \"{}\"}}\n", n * n)).collect();
    project.write("rows.jsonl", &rows);
    let file =
        "version: 1\nstages:\n  rows: { uses: dataset, with: { source: ./rows.jsonl } }\npublish: { rows: ./out }\n";
    project.write("p.yaml", file);
    project.run(&["run", "p.yaml"]).ends_with(0);
    let part = fs::read_dir(project.path("out")).unwrap().map(|entry| entry.unwrap().path());
    let part = part.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "parquet")).unwrap();
    let parquet = fs::read(part).unwrap();
    let hub = FaultyHub::serve(&[("data/train-00000-of-00001.parquet", &parquet)]);
    let stages =
        "  rows: { uses: dataset, with: { source: owner/name, column_map: { input: question, output: output } } }\n";
    let footer = u32::from_le_bytes(parquet[parquet.len() - 8..][..4].try_into().unwrap());
    let on = OnHub::new(&hub, stages);
    let ran = on.is_refused("unknown-column", "data/train-00000-of-00001.parquet", u64::from(footer) + 8);
    ran.reports("unknown-column");
    on.project.edit("hub.yaml", "input: question", "input: input");
    on.pipeline(&["run", "hub.yaml"]).ends_with(0);
}

#[test]
fn a_server_that_tells_nothing_ahead_leaves_the_stage_to_say_so() {
    let (weights, _) = weights(4000);
    let hub = model(&weights);
    // Both tries to look ahead, and none of the stage's own.
    hub.fail("config.json", &[hub::Fault::Status(500, None), hub::Fault::Status(500, None)]);
    let on = OnHub::new(&hub, BASE);
    on.pipeline(&["run", "hub.yaml"]).ends_with(0);
}

const COMMAND: &str = "version: 1
stages:
  made:
    uses: command
    with:
      run: [\"sh\", \"-c\", \"echo text > $OUTPUT_out/file\"]
      pass_env: [A_VARIABLE_THAT_NOBODY_SETS]
      outputs: { out: files }
";

#[test]
fn a_variable_is_needed_where_its_stage_runs_and_nowhere_else() {
    let project = Project::new();
    project.write("p.yaml", COMMAND);
    for command in ["validate", "plan", "run"] {
        let ran = project.run(&[command, "p.yaml"]).ends_with(2).reports("unknown-variable");
        assert_eq!(codes(&ran), ["× unknown-variable"], "{ran}");
    }
    let mut command = project.command(&["run", "p.yaml"]);
    command.env("A_VARIABLE_THAT_NOBODY_SETS", "a value");
    Ran::of(command, &["run"]).ends_with(0);
    // Its result is there: nothing needs the variable any more.
    for command in ["validate", "plan", "run"] {
        let ran = project.run(&[command, "p.yaml"]).ends_with(0);
        assert_eq!(codes(&ran), [""; 0], "{ran}");
    }
    project.run(&["run", "p.yaml", "made.run=[\"true\"]"]).ends_with(2);
}

#[test]
fn what_others_have_made_needs_no_variable() {
    let shared = tempfile::tempdir().unwrap();
    let remote = format!("file://{}", shared.path().display());
    let [first, second] = [Project::new(), Project::new()];
    [&first, &second].iter().for_each(|project| project.write("p.yaml", COMMAND));
    let arguments = ["run", "p.yaml", "--remote", &remote, "--push"];
    let mut command = first.command(&arguments);
    command.env("A_VARIABLE_THAT_NOBODY_SETS", "a value");
    Ran::of(command, &arguments).ends_with(0);
    second.run(&["plan", "p.yaml"]).ends_with(2);
    second.run(&["run", "p.yaml", "--remote", &remote]).ends_with(0);
    let third = Project::new();
    third.write("p.yaml", COMMAND);
    third.run(&["plan", "p.yaml", &format!("--remote={remote}")]).ends_with(0).says("in the remote");
}

/// Runs the program where no Python is found.
fn without_worker(project: &Project, arguments: &[&str]) -> Ran {
    let mut command = project.command(arguments);
    command.env("PATH", project.path("no-programs")).env("HOME", project.path("")).env_remove("PIPELINE_PYTHON");
    Ran::of(command, arguments)
}

#[test]
fn what_makes_a_model_not_native_is_named_where_the_worker_is_not_there() {
    let project = Project::new();
    fs::create_dir(project.path("mistral")).unwrap();
    let config = r#"{"model_type": "mistral", "attention_bias": true, "vocab_size": 4096}"#;
    project.write("mistral/config.json", config);
    // No tensors, and a file all the same.
    fs::write(project.path("mistral/model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/data/tokenizers/bytelevel/tokenizer.json");
    fs::copy(tokenizer, project.path("mistral/tokenizer.json")).unwrap();
    let stages = "base: { uses: download, with: { path: ./mistral } }
  out: { uses: generate, with: { model: base, prompts: [hello], max_new_tokens: 1 } }";
    project.write("p.yaml", &format!("version: 1\nstages:\n  {stages}\n"));
    let reason = "`attention_bias: true` is not supported; supported: false";
    let warning = format!("{reason}; its stages need the torch worker, which is not installed here");
    let error = format!(
        "`mistral` is not computed natively ({reason}), and needs the torch worker, which is not installed here"
    );
    for (command, code) in [("validate", 0), ("plan", 0), ("run", 3)] {
        let ran = without_worker(&project, &[command, "p.yaml"]).ends_with(code);
        // Lines are broken between words.
        let words: Vec<&str> = ran.stderr.split_whitespace().filter(|word| *word != "│").collect();
        let said = words.join(" ");
        assert!(said.contains(&warning), "{ran}");
        assert_eq!(said.contains(&error), command == "run", "{ran}");
        assert!(!said.contains("device: cpu"), "{ran}");
    }
}

#[test]
fn f16_without_a_worker_is_refused_with_a_way_out_that_works() {
    let project = Project::with_pipeline("train.yaml");
    let without = |arguments: &[&str]| without_worker(&project, arguments);
    for command in ["plan", "run"] {
        let ran = without(&[command, "train.yaml", "adapter.dtype=f16"]).ends_with(2);
        assert_eq!(codes(&ran), ["× no-device"], "{ran}");
        assert!(!ran.stderr.contains("device: cpu"), "{ran}");
    }
    without(&["plan", "train.yaml", "adapter.backend=torch"]).ends_with(2).reports("no-device");
    // The ways out.
    without(&["run", "train.yaml", "adapter.dtype=bf16", "adapter.max_steps=2", "--until", "adapter"]).ends_with(0);
    // A job of a cluster computes elsewhere.
    without(&["plan", "train.yaml", "adapter.dtype=f16", "adapter.executor=slurm"]).ends_with(0);
}

#[test]
fn a_python_that_is_named_is_looked_for_where_a_stage_needs_the_worker() {
    let project = Project::with_pipeline("train.yaml");
    let with = |python: &Path, arguments: &[&str]| {
        let mut command = project.command(arguments);
        command.env("PIPELINE_PYTHON", python);
        Ran::of(command, arguments)
    };
    // Not there, no program, and one without the worker, which leaves a file where it was asked.
    let (missing, text, other) = (project.path("missing"), project.path("text"), project.path("other"));
    fs::write(&text, "").unwrap();
    let asked = project.path("asked");
    install_script(&format!("#!/bin/sh\ntouch '{}'\necho '{{}}'\n", asked.display()), &other);
    for needed in ["adapter.backend=torch", "adapter.dtype=f16"] {
        for python in [&missing, &text, &other] {
            for command in ["validate", "plan", "run"] {
                let ran = with(python, &[command, "train.yaml", needed]).ends_with(2);
                assert_eq!(codes(&ran), ["× no-device"], "{ran}");
                assert!(ran.stderr.contains("PIPELINE_PYTHON"), "{ran}");
            }
        }
    }
    assert!(has_no_run(&project.path(".pipeline")));
    fs::remove_file(&asked).unwrap();
    // A GPU of this machine may be one that the worker computes on.
    let on_cpu = ["adapter", "scores", "samples"].map(|stage| format!("{stage}.resources.device=cpu"));
    let on_cpu = on_cpu.each_ref().map(String::as_str);
    for python in [&missing, &text, &other] {
        with(python, &[&["validate", "train.yaml"], &on_cpu[..]].concat()).ends_with(0);
        with(python, &[&["plan", "train.yaml"], &on_cpu[..]].concat()).ends_with(0);
    }
    assert!(!asked.exists(), "no program is started where nothing needs the worker");
}

#[test]
fn attention_of_gpus_is_refused_at_its_place_on_the_cpu_of_the_torch_worker() {
    let project = Project::with_pipeline("train.yaml");
    project.edit(
        "train.yaml",
        "      save_every: 3\n",
        "      backend: torch\n      attention: flex\n    resources: { device: cpu }\n",
    );
    let problems = |more: &[&str]| {
        let ran = project.run(&[&["validate", "train.yaml", "--format", "json"], more].concat());
        ran.json()[0]["problems"].as_array().unwrap().clone()
    };
    let text = fs::read_to_string(project.path("train.yaml")).unwrap();
    let line = text.lines().position(|line| line.contains("attention:")).unwrap() + 1;
    let found = problems(&[]);
    let place = |problem: &Value| (problem["line"].clone(), problem["column"].clone());
    let flex =
        "`attention: flex` cannot be used here: it needs a CUDA or ROCm device, triton, and heads of 16 or wider";
    assert!(found.len() == 1 && found[0]["message"] == flex && found[0]["code"] == "bad-value", "{found:#?}");
    assert_eq!(place(&found[0]), (line.into(), "      attention: f".len().into()));
    assert_eq!(found[0]["help"], "leave `attention` out, or take `sdpa`");
    // The machine decides, or the native backend computes, which does not read it.
    for more in ["adapter.resources.device=auto", "adapter.backend=native"] {
        assert!(problems(&[more]).iter().all(|problem| problem["code"] != "bad-value"), "{more}");
    }
}

#[test]
fn what_is_wrong_with_a_stage_that_is_not_asked_for_stops_nothing() {
    let project = Project::with_pipeline("train.yaml");
    let wrong = "adapter.lora.target_modules=[no_such_proj]";
    project.run(&["run", "train.yaml", wrong]).ends_with(2).reports("wrong-input");
    assert!(has_no_run(&project.path(".pipeline")));
    project.run(&["run", "train.yaml", wrong, "--until", "tokens"]).ends_with(0);
    project.run(&["run", "train.yaml", wrong]).ends_with(2).reports("wrong-input");
}

#[test]
fn warnings_of_the_data_flow_are_told_by_a_run_once() {
    let project = Project::with_pipeline("train.yaml");
    let long = ["tokens.max_seq_len=400", "adapter.max_steps=1", "--until", "adapter"];
    let ran = project.run(&[&["run", "train.yaml"], &long[..]].concat()).ends_with(0);
    assert_eq!(codes(&ran), ["⚠ too-long-for-model", "⚠ warmup-too-long"], "{ran}");
    assert_eq!(ran.stderr.matches("a document may have 400 tokens").count(), 1, "{ran}");
    // By now its longest document is known, and everything is there.
    let ran = project.run(&[&["run", "train.yaml"], &long[..]].concat()).ends_with(0);
    assert_eq!(codes(&ran), [""; 0], "{ran}");
}

#[test]
fn an_adapter_of_phi3_is_trained_on_without_its_settings_in_the_file() {
    let project = Project::new();
    let (model, adapter) = (golden("phi3"), golden("phi3/lora/attention/adapter"));
    fs::create_dir(project.path("base")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model.join(name), project.path("base").join(name)).unwrap();
    }
    project.write("base/tokenizer.json", &tokenizer());
    let file = format!(
        "version: 1
stages:
  base: {{ uses: download, with: {{ path: ./base }} }}
  before: {{ uses: download, with: {{ path: {}, as: adapter }} }}
  rows: {{ uses: dataset, with: {{ source: ./rows.jsonl }} }}
  tokens: {{ uses: tokenize, with: {{ dataset: rows, tokenizer: base, max_seq_len: 16 }} }}
  adapter: {{ uses: train, with: {{ model: base, data: tokens, adapter: before, max_steps: 2, micro_batch_size: 2 }} }}
",
        adapter.display()
    );
    project.write("p.yaml", &file);
    project.write("rows.jsonl", &"{\"input\": \"a\", \"output\": \"b\"}\n".repeat(8));
    for command in ["validate", "plan", "run"] {
        let ran = project.run(&[command, "p.yaml"]).ends_with(0);
        assert_eq!(codes(&ran), [""; 0], "{ran}");
    }
    // Settings that the file does give must fit the model, and agree with the adapter's.
    let ran = project.run(&["run", "p.yaml", "adapter.lora.target_modules=[q_proj]"]).ends_with(2);
    assert_eq!(codes(&ran), ["× wrong-input"], "{ran}");
}

#[test]
fn changes_on_the_command_line_are_checked_as_if_they_stood_in_the_file() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["validate", "data.yaml", "question_packs.max_seq_len=96"]).ends_with(0);
    let wrong = ["data.yaml", "question_packs.max_seq_len=many"];
    project.run(&[&["plan"], &wrong[..]].concat()).ends_with(2).warns("[wrong-type]");
    project.run(&[&["validate"], &wrong[..]].concat()).ends_with(2).warns("[wrong-type]");
    project.run(&["validate", "question_packs.max_seq_len=96"]).ends_with(2).warns("no pipeline file is named");
}

#[test]
fn rows_of_a_test_split_among_those_of_training_are_warned_of() {
    let project = Project::new();
    std::fs::create_dir_all(project.path("hub/data")).unwrap();
    for split in ["train", "test"] {
        let rows: String = (0..4).map(|row| format!("{{\"text\": \"{split} {row}\"}}\n")).collect();
        project.write(&format!("hub/data/{split}-00000-of-00001.jsonl"), &rows);
    }
    project.write("few.jsonl", "{\"text\": \"one\"}\n");
    project.write(
        "mixed.yaml",
        "version: 1\nstages:\n  hub: { uses: dataset, with: { source: ./hub } }\n  \
         few: { uses: dataset, with: { source: ./few.jsonl } }\n  \
         all: { uses: dataset, with: { datasets: [{ rows: hub }, { rows: few }], mix: interleave, \
         stopping_strategy: all_exhausted, train_test_split: { test_size: 0.5 } } }\n",
    );
    let ran = project.run(&["run", "mixed.yaml"]).ends_with(0);
    ran.warns("files of several splits (test, train) are read as one").warns("`all_exhausted` repeats rows before");
    project
        .write("mixed.yaml", "version: 1\nstages:\n  hub: { uses: dataset, with: { source: './hub/data/train*' } }\n");
    assert!(!project.run(&["run", "mixed.yaml"]).ends_with(0).stderr.contains("several splits"));
}

#[test]
fn an_image_among_the_first_rows_is_told_before_the_run() {
    let project = Project::new();
    let file = format!(
        "version: 1
stages:
  base: {{ uses: download, with: {{ path: {} }} }}
  rows: {{ uses: dataset, with: {{ source: ./rows.jsonl }} }}
  tokens: {{ uses: tokenize, with: {{ dataset: rows, tokenizer: base }} }}
",
        golden("gguf/phi3").display()
    );
    project.write("p.yaml", &file);
    let image = CHATS.replace("\"Hello\"", "[{\"type\": \"text\", \"text\": \"See\"}, {\"type\": \"image\"}]");
    project.write("rows.jsonl", &format!("{CHATS}{image}"));
    let told = |more: &[&str], code: i32| {
        let ran = project.run(&[&["validate", "p.yaml", "--format", "json"], more].concat()).ends_with(code);
        let problems = ran.json()[0]["problems"].as_array().unwrap().clone();
        assert!(problems.len() == 1 && problems[0]["code"] == "bad-row", "{problems:#?}");
        (problems[0]["severity"].as_str().unwrap().to_owned(), problems[0]["message"].as_str().unwrap().to_owned())
    };
    let found = "`rows.jsonl`, line 2: turn 1: its `content` has a part of type `image`";
    // What the tokenizer's own template writes is not known yet.
    let (severity, message) = told(&[], 0);
    assert!(severity == "warning" && message.starts_with(found), "{severity}: {message}");
    let expected = ("error".to_owned(), format!("{found}, and the chat template writes text alone"));
    assert_eq!(told(&["tokens.chat_template=chatml"], 2), expected);
    // Rows that a filter leaves out are none of the stage's.
    let filter = "rows.filter=messages[0].content is string";
    project.run(&["validate", "p.yaml", "tokens.chat_template=chatml", filter]).ends_with(0);
    project.write("rows.jsonl", &CHATS.repeat(2));
    project.run(&["validate", "p.yaml", "tokens.chat_template=chatml"]).ends_with(0);
}
