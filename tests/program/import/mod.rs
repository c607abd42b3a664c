//! `pipeline import`: configurations and commands of other tools as pipeline files.
//!
//! `tests/import/TOOL.txt` holds configurations written from each tool's documented keys, and `TOOL.lists.txt` what is
//! said of each. After a deliberate change, `PIPELINE_BLESS=1 cargo test --release --test program import::` writes the
//! lists anew. What single keys become is in `rows` and `keys`.

mod keys;
mod rows;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use test_harness::test;

use crate::support::{Project, Ran};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/import")
}

/// A project with rows of each shape, and LLaMA-Factory's description of them.
fn project() -> Project {
    let project = Project::new();
    project.write("alpaca.jsonl", "{\"instruction\": \"a\", \"input\": \"b\", \"output\": \"c\"}\n");
    project.write("more.jsonl", "{\"instruction\": \"d\", \"input\": \"\", \"output\": \"e\"}\n");
    let turns = r#"[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]"#;
    project.write("chats.jsonl", &format!("{{\"messages\": {turns}, \"functions\": []}}\n"));
    project.write("texts.jsonl", "{\"body\": \"a text\", \"text\": \"a text\"}\n");
    project.write("pairs.jsonl", "{\"question\": \"a\", \"context\": \"\", \"answer\": \"b\"}\n");
    project.write("completions.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    project.write("preferences.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n");
    project.write(
        "answers.jsonl",
        "{\"question\": \"a\", \"system\": \"\", \"better\": \"b\", \"chosen\": \"b\", \"rejected\": \"c\"}\n",
    );
    let turn = |text: &str| format!("{{\"role\": \"assistant\", \"content\": \"{text}\"}}");
    project.write("turns.jsonl", &format!("{{\"messages\": {turns}, \"rejected_response\": \"no\"}}\n"));
    project.write("judged.jsonl", &format!("{{\"messages\": {turns}, \"good\": true}}\n"));
    project.write("tagged.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\", \"label\": true}\n");
    let user = r#"[{"role": "user", "content": "hi"}]"#;
    let (better, worse) = (turn("hello"), turn("no"));
    project.write("sides.jsonl", &format!("{{\"messages\": {user}, \"chosen\": {better}, \"rejected\": {worse}}}\n"));
    project.write("whole.jsonl", &format!("{{\"good\": {turns}, \"bad\": [{}, {worse}]}}\n", &user[1..user.len() - 1]));
    fs::create_dir_all(project.path("data")).unwrap();
    fs::create_dir_all(project.path("adapter")).unwrap();
    let info = r#"{
        "identity": { "file_name": "../alpaca.jsonl" },
        "more": { "file_name": "../more.jsonl" },
        "chats": { "file_name": "../chats.jsonl", "formatting": "sharegpt", "columns": { "messages": "messages" },
            "tags": { "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant" } },
        "texts": { "file_name": "../texts.jsonl", "columns": { "prompt": "body" } },
        "of_the_hub": { "hf_hub_url": "llamafactory/alpaca_gpt4_en", "ms_hub_url": "llamafactory/alpaca_gpt4_en" },
        "answers": { "file_name": "../answers.jsonl", "ranking": true,
            "columns": { "prompt": "question", "system": "system", "chosen": "better", "rejected": "rejected" } },
        "sides": { "file_name": "../sides.jsonl", "ranking": true, "formatting": "sharegpt",
            "columns": { "messages": "messages", "chosen": "chosen", "rejected": "rejected" } },
        "judged": { "file_name": "../judged.jsonl", "formatting": "sharegpt",
            "columns": { "messages": "messages", "kto_tag": "good" } },
        "of_modelscope": { "ms_hub_url": "AI-ModelScope/alpaca", "num_samples": 10 }
    }"#;
    project.write("data/dataset_info.json", info);
    project
}

/// A configuration of `tests/import/TOOL.txt`.
struct Case {
    name: String,
    text: String,
}

/// The cases of a tool, each with the keys of the base that it does not set itself.
fn cases(tool: &str) -> Vec<Case> {
    let page = fs::read_to_string(folder().join(format!("{tool}.txt"))).unwrap();
    let sections = page.split("\n=== ").skip(1).map(|section| section.split_once('\n').unwrap());
    let mut cases: Vec<Case> = Vec::new();
    for (name, own) in sections {
        let is_command = |text: &str| text.lines().any(|line| line.contains("swift ") || line.starts_with("tune run"));
        let text = match cases.first() {
            None => own.to_owned(),
            Some(_) if is_command(own) => own.to_owned(),
            Some(base) if own.starts_with("--") => format!("{} {own}", base.text.trim_end()),
            Some(base) => over(&base.text, own),
        };
        cases.push(Case { name: name.to_owned(), text });
    }
    cases
}

/// The top-level entries of one text, and those of another that it does not have.
fn over(base: &str, own: &str) -> String {
    fn entries(text: &str) -> Vec<(String, String)> {
        let mut entries: Vec<(String, String)> = Vec::new();
        for line in text.lines() {
            match line.split_once(':') {
                Some((key, _)) if !line.starts_with([' ', '-']) => entries.push((key.to_owned(), format!("{line}\n"))),
                _ => entries.last_mut().unwrap().1 += &format!("{line}\n"),
            }
        }
        entries
    }
    let own = entries(own);
    let kept = entries(base).into_iter().filter(|(key, _)| !own.iter().any(|(other, _)| other == key));
    kept.chain(own.iter().cloned()).map(|(_, text)| text).collect()
}

const AXOLOTL: &str = "base_model: a/b\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n\
                       learning_rate: 1e-4\ndatasets: [{ path: alpaca.jsonl, type: alpaca }]\n";

/// The first case of a tool, with some keys of its own.
fn base_with(tool: &str, own: &str) -> String {
    over(&cases(tool)[0].text, own)
}

/// What is said of a configuration or of a script, whatever cannot be carried over left out.
fn said_of(project: &Project, file: &str, text: &str) -> Value {
    project.write(file, text);
    project.run(&["import", file, "--partial", "--format", "json", "-o", "out.yaml", "--overwrite"]).json()
}

/// What a list says of a key.
fn items<'v>(said: &'v Value, list: &str, key: &str) -> Vec<&'v Value> {
    said[list].as_array().unwrap().iter().filter(|item| item["key"] == key).collect()
}

#[track_caller]
fn is_said(said: &Value, list: &str, key: &str, reason: &str) {
    let items = items(said, list, key);
    let is_there = items.iter().any(|item| item["reason"].as_str().unwrap_or_default().contains(reason));
    assert!(is_there, "{list} does not say `{reason}` of `{key}`: {said:#}");
}

#[track_caller]
fn is_written(said: &Value, lines: &[&str]) {
    let text = said["pipeline"].as_str().unwrap_or_else(|| panic!("nothing is written: {said:#}"));
    let plain = |line: &str| line.split("   # ").next().unwrap().trim().to_owned();
    let written: Vec<String> = text.lines().map(plain).collect();
    for line in lines {
        assert!(written.iter().any(|known| known == line), "`{line}` is not written: {text}");
    }
}

/// Imports a case, whatever cannot be carried over left out.
fn import(project: &Project, case: &Case) -> Ran {
    let file = if case.text.contains("swift ") || case.text.starts_with("tune run") { "case.sh" } else { "case.yaml" };
    project.write(file, &case.text);
    project.run(&["import", file, "--partial", "--format", "json", "-o", "out.yaml", "--overwrite"])
}

/// What is said of a case and written for it: of the base everything, of the others what the base does not have.
fn summary(said: &Value, base: Option<&Value>) -> String {
    let mut text = String::new();
    for (list, mark) in [("other_meaning", "~"), ("not_carried_over", "-")] {
        let lines = |said: &Value| -> Vec<String> {
            let line = |item: &Value| {
                let becomes = item["becomes"].as_str().map_or_else(String::new, |path| format!(" → {path}"));
                format!("{mark} {}{becomes}: {}", item["key"].as_str().unwrap(), item["reason"].as_str().unwrap())
            };
            said[list].as_array().unwrap().iter().map(line).collect()
        };
        let known = base.map_or_else(Vec::new, lines);
        lines(said).iter().filter(|line| !known.contains(line)).for_each(|line| writeln!(text, "{line}").unwrap());
    }
    let lines = |said: &Value| -> Vec<String> {
        let lines = said["pipeline"].as_str().unwrap_or_default().lines();
        // Comments are those of the lists, and of defaults only that they are some.
        let plain = |line: &str| line.split("   # ").next().unwrap().to_owned();
        lines.filter(|line| !line.trim_start().starts_with('#')).map(plain).collect()
    };
    let known = base.map_or_else(Vec::new, lines);
    lines(said).iter().filter(|line| !known.contains(line)).for_each(|line| writeln!(text, "{line}").unwrap());
    text
}

#[track_caller]
fn each_case_of(tool: &str) {
    let mut said = String::new();
    let cases = cases(tool);
    assert!(cases.len() >= 30, "{tool}: {} cases", cases.len());
    let mut base = None;
    for case in &cases {
        let project = project();
        let ran = import(&project, case);
        writeln!(said, "=== {}", case.name).unwrap();
        if ran.stdout.is_empty() {
            // No command that trains.
            let ran = ran.ends_with(2).warns("[not-carried-over]");
            writeln!(said, "{}", ran.stderr.lines().next().unwrap().trim()).unwrap();
            continue;
        }
        let json = ran.json();
        said += &summary(&json, base.as_ref());
        if json["pipeline"].is_null() {
            assert_eq!(ran.code, Some(2), "{tool}, {}: {ran}", case.name);
            writeln!(said, "nothing is written").unwrap();
            continue;
        }
        assert_eq!(ran.code, Some(0), "{tool}, {}: {ran}", case.name);
        let text = fs::read_to_string(project.path("out.yaml")).unwrap();
        assert_eq!(json["pipeline"], text.as_str(), "{tool}, {}", case.name);
        let checked = project.run(&["validate", "out.yaml", "--format", "json"]);
        let checked = checked.json();
        let errors: Vec<&Value> = checked[0]["problems"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|problem| problem["severity"] == "error")
            .collect();
        // The adapter that one of them goes on from is not there, and neither is a model that no hub is known for, nor
        // the worker that computes in f16.
        let is_missing = |problem: &&Value| {
            let is_named =
                ["./adapter", "/tmp/Llama"].iter().any(|name| problem["message"].as_str().unwrap().contains(name));
            (problem["code"] == "file-missing" && is_named) || problem["code"] == "no-device"
        };
        assert!(errors.iter().all(is_missing), "{tool}, {}: {errors:?}\n{text}", case.name);
        base.get_or_insert(json);
    }
    let expected = folder().join(format!("{tool}.lists.txt"));
    if std::env::var_os("PIPELINE_BLESS").is_some() {
        fs::write(&expected, &said).unwrap();
    }
    let expected = fs::read_to_string(expected).unwrap_or_default();
    for (said, expected) in said.split("=== ").zip(expected.split("=== ")) {
        assert_eq!(said, expected, "{tool}");
    }
    assert_eq!(said, expected);
}

#[test]
fn configs_of_torchtune() {
    each_case_of("torchtune");
}

#[test]
fn configurations_of_axolotl() {
    each_case_of("axolotl");
}

#[test]
fn configurations_of_llama_factory() {
    each_case_of("llama-factory");
}

#[test]
fn commands_of_ms_swift() {
    each_case_of("ms-swift");
}

#[test]
fn configurations_of_trl() {
    each_case_of("trl");
}

/// Configs and commands that the tools' own guides print, word by word.
#[test]
fn the_guides_own_files_and_commands_are_imported() {
    let guides = folder().join("guides");
    let mut names: Vec<String> =
        fs::read_dir(&guides).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.ends_with(".out"));
    names.sort();
    assert!(names.len() >= 8, "{names:?}");
    for name in names {
        let project = project();
        fs::copy(guides.join(&name), project.path(&name)).unwrap();
        project.write("ascend_dataset.json", "[{\"input\": \"a\", \"output\": \"b\"}]\n");
        let ran = project.run(&["import", &name, "--partial"]);
        let said = format!("{}---\n{}exit code {}\n", ran.stdout, ran.stderr, ran.code.unwrap());
        let said = said.replace(&*project.path("").to_string_lossy(), "[FOLDER]/");
        let expected = guides.join(format!("{name}.out"));
        if std::env::var_os("PIPELINE_BLESS").is_some() {
            fs::write(&expected, &said).unwrap();
        }
        assert_eq!(said, fs::read_to_string(&expected).unwrap_or_default(), "{name}");
    }
}

#[test]
fn what_cannot_be_carried_over_is_an_error_with_its_line_unless_only_a_part_is_asked_for() {
    let project = project();
    project.write("a.yaml", &format!("{AXOLOTL}load_in_8bit: true\n"));
    project
        .run(&["import", "a.yaml", "-o", "b.yaml"])
        .ends_with(2)
        .warns("[a.yaml:8:1]")
        .warns("only the formats `nf4` and `fp4`");
    assert!(!project.path("b.yaml").exists());
    project.run(&["import", "a.yaml", "-o", "b.yaml", "--partial"]).ends_with(0).warns("not carried over:");
    project.run(&["validate", "b.yaml"]).ends_with(0);
}

#[test]
fn unknown_keys_are_errors_with_their_line_also_where_only_a_part_is_asked_for() {
    let project = project();
    project.write("a.yaml", &format!("{AXOLOTL}lora_dropuot: 0.1\n"));
    let ran = project.run(&["import", "a.yaml", "--partial"]).ends_with(2);
    let ran =
        ran.warns("`lora_dropuot` is no key of axolotl").warns("[a.yaml:8:1]").warns("did you mean `lora_dropout`?");
    assert_eq!(ran.stdout, "");
    project.write("b.yaml", &AXOLOTL.replace("type: alpaca", "tpye: alpaca, type: alpaca"));
    project.run(&["import", "b.yaml", "--partial"]).ends_with(2).warns("`tpye` is no key of axolotl");
}

#[test]
fn a_file_that_is_there_is_left_alone() {
    let project = project();
    project.write("a.yaml", AXOLOTL);
    project.write("b.yaml", "mine\n");
    project.run(&["import", "a.yaml", "-o", "b.yaml"]).ends_with(2).warns("`b.yaml` exists already");
    assert_eq!(fs::read_to_string(project.path("b.yaml")).unwrap(), "mine\n");
    project.run(&["import", "a.yaml", "-o", "b.yaml", "--overwrite"]).ends_with(0);
    assert!(fs::read_to_string(project.path("b.yaml")).unwrap().contains("stages:"));
}

#[test]
fn a_file_of_another_tool_is_told_once_and_not_key_by_key() {
    let project = project();
    project.write("a.yaml", AXOLOTL);
    for command in ["validate", "plan", "run"] {
        let ran = project.run(&[command, "a.yaml"]).ends_with(2).warns("this is an axolotl file");
        let ran = ran.warns("pipeline import a.yaml");
        assert_eq!(ran.stderr.matches(" × ").count(), 1, "{ran}");
    }
}

#[test]
fn a_command_is_read_in_quotes_and_word_by_word() {
    let project = project();
    let text = "NPROC_PER_NODE=2 swift sft --model a/b --dataset 'chats.jsonl#1' --lora_rank 4";
    let quoted = project.run(&["import", text]).ends_with(0);
    let words =
        ["NPROC_PER_NODE=2", "swift", "sft", "--model", "a/b", "--dataset", "chats.jsonl#1", "--lora_rank", "4"];
    let words = project.run(&[&["import", "--"], words.as_slice()].concat()).ends_with(0);
    assert_eq!(quoted.stdout, words.stdout);
    assert!(quoted.stdout.contains("rank: 4") && quoted.stdout.contains("count: 2"), "{quoted}");
}

#[test]
fn the_arguments_that_ms_swift_saves_are_read() {
    let project = project();
    let arguments = r#"{ "model": "a/b", "model_type": "qwen2", "dataset": ["chats.jsonl"], "tuner_type": "lora",
        "lora_rank": 4, "torch_dtype": "bfloat16", "learning_rate": 0.0001, "gradient_accumulation_steps": 16,
        "swift_version": "4.6.0" }"#;
    project.write("args.json", arguments);
    project.run(&["import", "args.json", "-o", "b.yaml"]).ends_with(0);
    project.run(&["validate", "b.yaml"]).ends_with(0);
}

#[test]
fn what_is_imported_runs() {
    // The imported file over a model made here, in the place of the one of a hub.
    let project = project();
    project.write("a.yaml", &format!("{AXOLOTL}sequence_len: 1024\nbf16: false\nnum_epochs: 2\n"));
    project.run(&["import", "a.yaml", "-o", "b.yaml"]).ends_with(0);
    let text = fs::read_to_string(project.path("b.yaml")).unwrap();
    let base = "  base:\n    uses: download\n    with:\n      repo: a/b\n";
    assert!(text.contains(base), "{text}");
    let fresh = "  words: { uses: dataset, with: { source: ./texts.jsonl, column_map: { text: body } } }\n  base:\n    uses: \
                 new_model\n    with: { text: words, vocab_size: 300, hidden_size: 16, intermediate_size: 32, \
                 num_hidden_layers: 1, num_attention_heads: 2 }\n";
    project.write("b.yaml", &text.replace(base, fresh));
    project.run(&["run", "b.yaml", "--smoke"]).ends_with(0);
}

#[test]
fn a_token_is_not_shown() {
    let project = project();
    project.write("a.yaml", &base_with("trl", "hub_token: hf_abcdef\npush_to_hub: true\n"));
    let ran = project.run(&["import", "a.yaml"]).ends_with(0).warns("hub_token: …");
    assert!(!ran.stderr.contains("hf_abcdef") && !ran.stdout.contains("hf_abcdef"), "{ran}");
}
