//! `pipeline import`: configurations and commands of other tools as pipeline files.
//!
//! `tests/import/TOOL.txt` holds configurations written from each tool's documented keys, and `TOOL.lists.txt` what is
//! said of each. After a deliberate change, `PIPELINE_BLESS=1 cargo test --release --test program import::` writes the
//! lists anew.

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

const AXOLOTL: &str = "base_model: a/b\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n\
                       learning_rate: 1e-4\ndatasets: [{ path: alpaca.jsonl, type: alpaca }]\n";

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

/// The rows of a stage of the file that was imported, which need no model.
fn rows_of(project: &Project) -> String {
    project.run(&["run", "out.yaml", "--until", "rows"]).ends_with(0);
    project.run(&["show", "out.yaml", "rows"]).ends_with(0).stdout
}

#[test]
fn a_system_prompt_of_torchtune_takes_the_place_of_the_one_of_the_rows() {
    let project = project();
    let cruel = r#"{"role": "system", "content": "Be cruel."}"#;
    let user = r#"{"role": "user", "content": "hi"}"#;
    let answer = |text: &str| format!("{{\"role\": \"assistant\", \"content\": \"{text}\"}}");
    project.write("openai.jsonl", &format!("{{\"messages\": [{cruel}, {user}, {}]}}\n", answer("hello")));
    let sharegpt = r#"[{"from": "system", "value": "Be cruel."}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]"#;
    project.write("sharegpt.jsonl", &format!("{{\"conversations\": {sharegpt}}}\n"));
    let (better, worse) = (answer("hello"), answer("no"));
    project
        .write("led.jsonl", &format!("{{\"chosen\": [{cruel}, {user}, {better}], \"rejected\": [{user}, {worse}]}}\n"));
    let dpo = "loss: { _component_: torchtune.rlhf.loss.DPOLoss }\n";
    for (builder, rest) in [
        ("chat_dataset, data_files: openai.jsonl, conversation_column: messages, conversation_style: openai", ""),
        (
            "chat_dataset, data_files: sharegpt.jsonl, conversation_column: conversations, conversation_style: sharegpt",
            "",
        ),
        ("slimorca_dataset, data_files: sharegpt.jsonl", ""),
        ("alpaca_dataset, data_files: alpaca.jsonl", ""),
        ("preference_dataset, data_files: led.jsonl", dpo),
    ] {
        let dataset = format!(
            "dataset: {{ _component_: torchtune.datasets.{builder}, source: json, new_system_prompt: Be kind. }}\n"
        );
        let said = said_of(&project, "a.yaml", &base_with("torchtune", &(dataset + rest)));
        assert_eq!(items(&said, "carried_over", "new_system_prompt")[0]["becomes"], "rows.map", "{builder}: {said:#}");
        let shown = rows_of(&project);
        assert!(shown.contains("Be kind.") && !shown.contains("Be cruel."), "{builder}: {shown}");
    }
    let text = "dataset: { _component_: torchtune.datasets.text_completion_dataset, source: json, data_files: texts.jsonl, \
                new_system_prompt: Be kind. }\n";
    let said = said_of(&project, "a.yaml", &base_with("torchtune", text));
    is_said(&said, "not_carried_over", "new_system_prompt", "no turns");
    let old = "dataset: { _component_: torchtune.datasets.chat_dataset, source: json, data_files: sharegpt.jsonl, \
               conversation_style: sharegpt, chat_format: torchtune.data.ChatMLFormat }\n";
    let said = said_of(&project, "a.yaml", &base_with("torchtune", old));
    is_said(&said, "not_carried_over", "chat_format", "ChatMLFormat");
}

#[test]
fn a_key_of_a_data_set_that_nothing_is_written_for_is_not_carried_over() {
    let project = project();
    let keys =
        "roles_to_train: [user], train_on_eos: last, message_property_mappings: { role: speaker }, field_tools: x";
    let said = said_of(&project, "a.yaml", &AXOLOTL.replace("type: alpaca", &format!("type: alpaca, {keys}")));
    for key in ["roles_to_train", "train_on_eos", "message_property_mappings", "field_tools"] {
        assert!(items(&said, "carried_over", key).is_empty(), "{key}: {said:#}");
        is_said(&said, "other_meaning", key, "nothing is written for it");
    }
    let keys = "type: chat_template, train_on_eot: all, roles_to_train: [assistant]";
    let text = AXOLOTL.replace("path: alpaca.jsonl, type: alpaca", &format!("path: chats.jsonl, {keys}"));
    let said = said_of(&project, "a.yaml", &text);
    is_said(&said, "other_meaning", "train_on_eot", "the ends of all turns");
    is_said(&said, "carried_over", "roles_to_train", "`train_on`");
}

#[test]
fn data_sets_of_torchtune_that_differ_in_what_is_one_stages_are_named() {
    let project = project();
    let pairs = "{ _component_: torchtune.datasets.instruct_dataset, source: json, data_files: completions.jsonl, \
                 column_map: { input: prompt, output: completion }";
    let said = said_of(
        &project,
        "a.yaml",
        &base_with("torchtune", &format!("dataset:\n  - {pairs}, train_on_input: true }}\n  - {pairs} }}\n")),
    );
    is_said(
        &said,
        "not_carried_over",
        "dataset",
        "`train_on_input` is `all` for one data set and `assistant` for another",
    );
    is_written(&said, &["train_on: all"]);
    let said = said_of(
        &project,
        "a.yaml",
        &base_with("torchtune", &format!("dataset:\n  - {pairs}, max_seq_len: 64 }}\n  - {pairs} }}\n")),
    );
    is_said(&said, "not_carried_over", "dataset", "`max_seq_len` is `64` for one data set and not set for another");
    // Those of the validation are measured as the training rows are.
    let said = said_of(
        &project,
        "a.yaml",
        &base_with("torchtune", &format!("dataset: {pairs} }}\ndataset_val: {pairs}, train_on_input: true }}\n")),
    );
    is_said(&said, "other_meaning", "dataset_val", "`train_on_input` is `all` for them there, and `assistant`");
    is_written(&said, &["train_on: assistant"]);
}

const TRL: &str = "trl/scripts/sft.py --model_name_or_path a/b --dataset_name chats.jsonl --per_device_train_batch_size 2 \
                   --learning_rate 1e-4";

#[test]
fn what_a_launcher_decides_is_carried_over_or_named() {
    let project = project();
    project.write(
        "accelerate.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: \
         2\nnum_processes: 16\ngradient_accumulation_steps: 4\n",
    );
    let import = |launcher: &str, rest: &str| said_of(&project, "a.sh", &format!("{launcher} {TRL} {rest}\n"));
    let said = import("accelerate launch --config_file accelerate.yaml", "--bf16 false");
    is_written(
        &said,
        &["micro_batch_size: 32", "nodes: 2", "count: 8", "dtype: bf16", "gradient_accumulation_steps: 1"],
    );
    is_said(&said, "other_meaning", "gradient_accumulation_steps", "without effect there");
    let said = import("accelerate launch --config_file accelerate.yaml --num_processes 4 --num_machines 1", "--bf16");
    is_written(&said, &["micro_batch_size: 8", "count: 4", "dtype: bf16"]);
    let said = import("accelerate launch --config_file nowhere.yaml", "");
    is_written(&said, &["micro_batch_size: 2"]);
    is_said(&said, "other_meaning", "config_file", "the number of processes is not known");
    is_said(&import("accelerate launch --multi_gpu", ""), "other_meaning", "num_processes", "taken for one");
    is_said(&import("torchrun --nproc_per_node gpu", ""), "other_meaning", "nproc_per_node", "taken for one");
    let said = import("torchrun --nnodes 2 --nproc_per_node 4", "");
    is_written(&said, &["micro_batch_size: 16", "nodes: 2", "count: 4"]);
    // Its other scripts, and LLaMA-Factory's.
    project.write("pairs.jsonl", r#"{"prompt": "Who?", "chosen": "Pip.", "rejected": "No."}"#);
    let pairs = TRL.replace("sft.py", "dpo.py").replace("chats.jsonl", "pairs.jsonl");
    let said = said_of(&project, "a.sh", &format!("accelerate launch --num_processes 2 {pairs} --beta 0.3\n"));
    is_written(&said, &["name: dpo", "beta: 0.3", "count: 2"]);
    project.write("data/dataset_info.json", r#"{"own": {"file_name": "own.json"}}"#);
    project.write("data/own.json", r#"[{"instruction": "Who?", "input": "", "output": "Pip."}]"#);
    let factory = "src/train.py --stage sft --do_train --model_name_or_path a/b --dataset own --template qwen --finetuning_type lora \
                   --output_dir out";
    let said = said_of(&project, "a.sh", &format!("torchrun --nproc_per_node 4 {factory}\n"));
    is_written(&said, &["count: 4"]);
    // What `trl` passes on to its launcher.
    project.write("a.sh", "trl sft --model_name_or_path a/b --dataset_name chats.jsonl --accelerate_config zero2\n");
    let ran = project.run(&["import", "a.sh"]).ends_with(0);
    assert!(ran.stdout.contains("micro_batch_size: 64") && ran.stdout.contains("count: 8"), "{ran}");
    let recipe = "full_finetune_distributed --config qwen2_5/0.5B_full batch_size=3";
    let said = said_of(&project, "a.sh", &format!("tune run --nnodes 2 --nproc_per_node 8 {recipe}\n"));
    is_written(&said, &["micro_batch_size: 48", "nodes: 2", "count: 8"]);
    let said = said_of(&project, "a.sh", &format!("tune run --nproc_per_node 8 {recipe} tensor_parallel_dim=2\n"));
    is_written(&said, &["micro_batch_size: 12", "count: 8"]);
    is_said(&said, "other_meaning", "tensor_parallel_dim", "8 processes have 4 batches");
}

#[test]
fn a_hub_of_ms_swift_that_a_variable_names_is_the_one_of_the_model() {
    let project = project();
    let text = "USE_HF=1 swift sft --model a/b --dataset chats.jsonl\n";
    is_written(&said_of(&project, "a.sh", text), &["repo: a/b"]);
}

#[test]
fn batches_that_devices_share_are_not_multiplied() {
    let project = project();
    let options = r#"--accelerator_config '{"split_batches": true}'"#;
    let text = format!("accelerate launch --num_processes 2 {TRL} {options}\n");
    let said = said_of(&project, "a.sh", &text);
    is_written(&said, &["micro_batch_size: 2", "count: 2"]);
    is_said(&said, "carried_over", "accelerator_config", "split_batches");
}

#[test]
fn the_order_the_dropout_and_the_length_of_trl_are_carried_over() {
    let project = project();
    let import = |own: &str| said_of(&project, "a.yaml", &base_with("trl", own));
    let said = import("train_sampling_strategy: sequential\nshuffle_dataset: true\ndataset_name: chats.jsonl\n");
    is_written(&said, &["shuffle: false", "shuffle: true"]);
    let said = import("train_sampling_strategy: group_by_length\n");
    is_said(&said, "not_carried_over", "train_sampling_strategy", "not supported");
    // `trl dpo` disables dropout by default, that of an adapter too.
    let said = import("dataset_name: preferences.jsonl\nbeta: 0.1\nlora_dropout: 0.2\n");
    is_written(&said, &["dropout: 0"]);
    is_said(&said, "other_meaning", "lora_dropout", "`disable_dropout`");
    assert_eq!(items(&said, "carried_over", "dataset_name")[0]["becomes"], "rows.source");
    let said = import("dataset_name: preferences.jsonl\nbeta: 0.1\nlora_dropout: 0.2\ndisable_dropout: false\n");
    is_written(&said, &["dropout: 0.2"]);
    let said = import("max_seq_length: 4096\npacking: true\n");
    let text = said["pipeline"].as_str().unwrap();
    assert_eq!(text.matches("max_seq_len: 4096").count(), 2, "{text}");
    let said = import("max_length:\n");
    assert!(!said["pipeline"].as_str().unwrap().contains("max_seq_len"), "{said:#}");
}

#[test]
fn a_configuration_of_files_that_only_a_hub_has_is_left_out() {
    let project = project();
    let torchtune = "dataset: { _component_: torchtune.datasets.instruct_dataset, source: json, data_files: \
                     completions.jsonl, column_map: { input: prompt, output: completion }, name: main, subset: main }\n";
    let trl = "dataset_name:\ndatasets: [{ path: chats.jsonl, name: main }]\n";
    for (text, key) in [
        (base_with("torchtune", torchtune), "name"),
        (AXOLOTL.replace("type: alpaca", "type: alpaca, name: main"), "name"),
        (base_with("trl", "dataset_name: chats.jsonl\ndataset_config: main\n"), "dataset_config"),
        (base_with("trl", trl), "name"),
    ] {
        let said = said_of(&project, "a.yaml", &text);
        is_said(&said, "carried_over", key, "without effect on files");
        assert!(said["pipeline"].is_string(), "{said:#}");
    }
    // Rows of preferences in a recipe that has no loss for them.
    project.write(
        "a.yaml",
        &base_with("torchtune", "dataset: { _component_: torchtune.datasets.hh_rlhf_helpful_dataset }\n"),
    );
    project.run(&["import", "a.yaml"]).ends_with(2).warns("rows of preferences need a loss of preferences");
}

#[test]
fn a_token_is_not_shown() {
    let project = project();
    project.write("a.yaml", &base_with("trl", "hub_token: hf_abcdef\npush_to_hub: true\n"));
    let ran = project.run(&["import", "a.yaml"]).ends_with(0).warns("hub_token: …");
    assert!(!ran.stderr.contains("hf_abcdef") && !ran.stdout.contains("hf_abcdef"), "{ran}");
}

/// A data set of a hub cannot be looked at, so its rows are made of whatever columns they turn out to have.
#[test]
fn rows_that_cannot_be_seen_are_read_by_the_names_that_ms_swift_looks_for() {
    let project = Project::new();
    let imported = project.run(&["import", "-o", "out.yaml", "--", "swift", "sft", "--model=a/b", "--dataset=c/d"]);
    assert_eq!(imported.code, Some(0), "{imported}");
    let text = fs::read_to_string(project.path("out.yaml")).unwrap();
    let (before, behind) = text.split_once("source: ").unwrap();
    let (_, behind) = behind.split_once('\n').unwrap();
    project.write("out.yaml", &format!("{before}source: ./rows.jsonl\n{behind}"));
    for (row, user, assistant) in [
        (r#"{"query": "q", "response": "r"}"#, "q", "r"),
        (r#"{"instruction": "Translate.", "input": "Guten Tag", "output": "o"}"#, "Translate.\nGuten Tag", "o"),
        (r#"{"instruction": "Sing.", "input": "", "output": "o"}"#, "Sing.", "o"),
        (r#"{"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}"#, "h", "g"),
        (r#"{"question": "q", "answer_key": "k"}"#, "q", "k"),
    ] {
        project.write("rows.jsonl", row);
        let ran = project.run(&["run", "out.yaml", "--until", "rows"]);
        assert_eq!(ran.code, Some(0), "{row}: {ran}");
        let shown = project.run(&["show", "out.yaml", "rows"]).stdout;
        let lines: Vec<&str> = shown.lines().map(str::trim).collect();
        let turn = |role: &str| {
            let at = lines.iter().position(|line| *line == role).unwrap_or_else(|| panic!("{row}: {shown}"));
            lines[at + 1..]
                .iter()
                .take_while(|line| !line.is_empty() && !line.ends_with(':'))
                .copied()
                .collect::<Vec<_>>()
        };
        assert_eq!(turn("user:").join("\n"), user, "{row}: {shown}");
        assert_eq!(turn("assistant:").join("\n"), assistant, "{row}: {shown}");
    }
}

#[test]
fn turns_of_prompts_and_completions_are_those_of_trl() {
    let project = project();
    let turn = |role: &str, text: &str| format!("{{\"role\": \"{role}\", \"content\": \"{text}\"}}");
    let prompt = [turn("user", "Who?"), turn("assistant", "Me."), turn("user", "Where?")].join(", ");
    let row = format!("{{\"prompt\": [{prompt}], \"completion\": [{}], \"tools\": []}}\n", turn("assistant", "Here."));
    project.write("turns.jsonl", &row);
    let import =
        |own: &str| said_of(&project, "a.yaml", &base_with("trl", &format!("dataset_name: turns.jsonl\n{own}")));
    let said = import("");
    is_written(&said, &["tools: tools", "turn_order: any", "train_on: assistant"]);
    let shown = rows_of(&project);
    assert!(shown.contains("Where?") && shown.contains("Here.") && shown.contains("weight"), "{shown}");
    let said = import("completion_only_loss: false\n");
    is_written(&said, &["train_on: all"]);
    assert!(!rows_of(&project).contains("weight"), "every token is trained");
}

/// The column that tools train with without being told.
#[test]
fn tools_are_carried_over_where_rows_have_some() {
    let project = project();
    let turns = r#"[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]"#;
    project.write("calls.jsonl", &format!("{{\"messages\": {turns}, \"tools\": [{{\"name\": \"clock\"}}]}}\n"));
    project.write(
        "judged.jsonl",
        &format!("{{\"chosen\": {turns}, \"rejected\": {turns}, \"tools\": [{{\"name\": \"clock\"}}]}}\n"),
    );
    let axolotl = AXOLOTL.replace("alpaca.jsonl", "calls.jsonl").replace("type: alpaca", "type: chat_template");
    for (file, text) in [
        ("a.yaml", axolotl.clone()),
        ("a.yaml", base_with("trl", "dataset_name: calls.jsonl\n")),
        ("a.sh", "swift sft --model a/b --dataset calls.jsonl\n".to_owned()),
    ] {
        is_written(&said_of(&project, file, &text), &["messages: messages", "tools: tools"]);
        assert!(rows_of(&project).contains("clock"), "{text}");
    }
    let preferences = base_with("trl", "dataset_name: judged.jsonl\nbeta: 0.1\n");
    is_written(&said_of(&project, "a.yaml", &preferences), &["tools: tools"]);
    let preferences = "swift rlhf --rlhf_type dpo --model a/b --dataset judged.jsonl\n";
    is_written(&said_of(&project, "a.sh", preferences), &["tools: tools"]);
    // Of a hub's rows the report says it.
    let unseen = "trained with";
    let said = said_of(&project, "a.yaml", &axolotl.replace("calls.jsonl", "c/d"));
    is_said(&said, "other_meaning", "field_tools", "`column_map: { tools: tools }`");
    for own in ["dataset_name: c/d\n", "dataset_name: c/d\nbeta: 0.1\n"] {
        let said = said_of(&project, "a.yaml", &base_with("trl", own));
        is_said(&said, "other_meaning", "dataset_name", "`column_map: { tools: tools }`");
    }
    let said = said_of(&project, "a.sh", "swift sft --model a/b --dataset c/d\n");
    is_said(&said, "other_meaning", "dataset", unseen);
}

#[test]
fn earlier_turns_and_system_messages_of_ms_swift_are_carried_over() {
    let project = project();
    let import = |row: &str| {
        project.write("rows.jsonl", &format!("{row}\n"));
        said_of(&project, "a.sh", "swift sft --model a/b --dataset rows.jsonl\n")
    };
    import(r#"{"query": "Why?", "response": "So.", "history": [["Who?", "Me <1>."]], "system": "Be brief."}"#);
    let shown = rows_of(&project);
    let at = |text: &str| shown.find(text).unwrap_or_else(|| panic!("no `{text}`: {shown}"));
    assert!(at("Be brief.") < at("Who?") && at("Me <1>.") < at("Why?") && at("Why?") < at("So."), "{shown}");
    import(
        r#"{"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}], "system": "Be."}"#,
    );
    assert!(rows_of(&project).contains("Be."));
    let said = import(r#"{"query": "Why?", "response": "So.", "history": "[]"}"#);
    is_said(&said, "other_meaning", "dataset", "`history` of `rows.jsonl` is not read here");
}

#[test]
fn whole_conversations_of_axolotl_have_the_prompt_of_the_chosen_one() {
    let project = project();
    let turn = |role: &str, text: &str| format!("{{\"role\": \"{role}\", \"content\": \"{text}\"}}");
    let whole = |answer: &str| format!("[{}, {}]", turn("user", "Who?"), turn("assistant", answer));
    let row = format!(
        "{{\"messages\": [{}], \"chosen\": {}, \"rejected\": {}}}\n",
        turn("user", "Ignored."),
        whole("Pip."),
        whole("No.")
    );
    project.write("rows.jsonl", &row.repeat(24));
    let own = "rl: dpo\ndatasets:\n  - path: rows.jsonl\n    type: chat_template.argilla_chat\n";
    is_written(&said_of(&project, "a.yaml", &base_with("axolotl", own)), &["turn_order: any"]);
    let shown = rows_of(&project);
    assert!(shown.contains("Who?") && shown.contains("Pip.") && shown.contains("No."), "{shown}");
    assert!(!shown.contains("Ignored."), "{shown}");
}

#[test]
fn names_of_transformers_that_axolotl_ignores_are_errors() {
    let project = project();
    for (line, key) in [
        ("num_train_epochs: 7", "num_train_epochs"),
        ("per_device_train_batch_size: 4", "per_device_train_batch_size"),
        ("optim: adafactor", "optim"),
        ("lr_scheduler_type: linear", "lr_scheduler_type"),
        ("label_smoothing_factor: 0.1", "label_smoothing_factor"),
    ] {
        project.write("a.yaml", &format!("{AXOLOTL}{line}\n"));
        project.run(&["import", "a.yaml"]).ends_with(2).warns(&format!("`{key}` is no key of axolotl"));
    }
}

#[test]
fn rows_of_trl_that_are_split_into_packs_are_not_cut_before() {
    let project = project();
    for strategy in ["wrapped", "bfd_split"] {
        let own = format!("dataset_name: texts.jsonl\npacking: true\npacking_strategy: {strategy}\nmax_length: 64\n");
        let said = said_of(&project, "a.yaml", &base_with("trl", &own));
        is_written(&said, &["max_seq_len: 64", "split_across_pack: true"]);
        let text = said["pipeline"].as_str().unwrap();
        assert_eq!(text.matches("max_seq_len").count(), 1, "{text}");
        assert!(!text.contains("on_too_long"), "{text}");
    }
    let said = said_of(
        &project,
        "a.yaml",
        &base_with("trl", "dataset_name: texts.jsonl\npacking: true\npacking_strategy: bfd\nmax_length: 64\n"),
    );
    is_written(&said, &["on_too_long: truncate"]);
}

#[test]
fn samples_of_llama_factory_and_ms_swift_are_as_many_as_there() {
    let project = project();
    project.write("many.jsonl", &"{\"instruction\": \"a\", \"input\": \"\", \"output\": \"b\"}\n".repeat(9));
    let info = |samples: u32| {
        let info = format!("{{\"many\": {{\"file_name\": \"../many.jsonl\", \"num_samples\": {samples}}}}}");
        project.write("data/dataset_info.json", &info);
    };
    let import = |own: &str| said_of(&project, "a.yaml", &base_with("llama-factory", &format!("dataset: many\n{own}")));
    info(5);
    let said = import("max_samples: 1000\n");
    is_written(&said, &["shuffle: true", "limit: 5"]);
    assert!(items(&said, "other_meaning", "num_samples").is_empty(), "{said:#}");
    is_written(&import("max_samples: 3\n"), &["shuffle: true", "limit: 3"]);
    info(50);
    is_said(&import("max_samples: 3\n"), "other_meaning", "num_samples", "there are 50");
    let swift =
        |count: u32| said_of(&project, "a.sh", &format!("swift sft --model a/b --dataset 'many.jsonl#{count}'\n"));
    is_said(&swift(50), "other_meaning", "dataset", "there are 50");
    assert!(items(&swift(5), "other_meaning", "dataset").is_empty());
}

#[test]
fn steps_between_measurements_are_those_of_the_tool_or_named() {
    let project = project();
    let share = "a share of all steps";
    let factory = "val_size: 0.5\neval_strategy: steps\nload_best_model_at_end: true\n";
    let said = said_of(&project, "a.yaml", &base_with("llama-factory", &format!("{factory}eval_steps: 0.1\n")));
    is_said(&said, "not_carried_over", "eval_steps", share);
    // Left out, it is the number of steps between lines of the log.
    let factory = base_with("llama-factory", factory);
    let factory: String = factory
        .lines()
        .filter(|line| !line.starts_with("eval_steps") && !line.starts_with("logging_steps"))
        .map(|line| format!("{line}\n"))
        .collect();
    is_written(&said_of(&project, "a.yaml", &factory), &["eval_steps: 500", "keep_best: true"]);
    let trl = base_with("trl", "dataset_name: c/d\neval_strategy: steps\neval_steps: 0.25\n");
    is_said(&said_of(&project, "a.yaml", &trl), "not_carried_over", "eval_steps", share);
    let swift = |own: &str| {
        let text = format!("swift sft --model a/b --dataset alpaca.jsonl --split_dataset_ratio 0.5 {own}\n");
        said_of(&project, "a.sh", &text)
    };
    is_said(&swift("--eval_steps 0.1"), "not_carried_over", "eval_steps", share);
    is_written(&swift("--save_steps 30"), &["eval_steps: 30"]);
    let said = swift("--eval_strategy no");
    assert!(!said["pipeline"].as_str().unwrap().contains("test_size"), "{said:#}");
}

#[test]
fn without_a_strategy_of_evaluation_nothing_is_measured() {
    let project = project();
    let said = said_of(&project, "a.yaml", &format!("{AXOLOTL}val_set_size: 0.5\neval_strategy: \"no\"\n"));
    is_said(&said, "carried_over", "eval_strategy", "no loss is measured");
    is_written(&said, &["test_size: 0.5", "dataset: rows.train"]);
    let text = said["pipeline"].as_str().unwrap();
    assert!(!text.contains("validation") && !text.contains("held_out"), "{text}");
    project.run(&["validate", "out.yaml"]).ends_with(0);
}

#[test]
fn plain_text_of_llama_factory_that_is_not_packed_is_truncated() {
    let project = project();
    let own = "stage: pt\ndataset: texts\ncutoff_len: 64\n";
    let said = said_of(&project, "a.yaml", &base_with("llama-factory", &format!("{own}packing: false\n")));
    is_written(&said, &["max_seq_len: 64", "on_too_long: truncate"]);
    let said = said_of(&project, "a.yaml", &base_with("llama-factory", own));
    assert!(!said["pipeline"].as_str().unwrap().contains("on_too_long"), "{said:#}");
    is_said(&said, "other_meaning", "packing", "see each other");
}

#[test]
fn an_empty_system_message_is_none_and_an_empty_word_is_no_switch() {
    let project = project();
    let none = |said: &Value, key: &str| {
        is_said(said, "carried_over", key, "no system message");
        assert!(!said["pipeline"].as_str().unwrap().contains("system_prompt"), "{said:#}");
    };
    none(&said_of(&project, "a.yaml", &base_with("llama-factory", "default_system: \"\"\n")), "default_system");
    let swift = |own: &str| said_of(&project, "a.sh", &format!("swift sft --model a/b --dataset chats.jsonl {own}\n"));
    none(&swift("--system ''"), "system");
    none(&swift("--system="), "system");
    let said = swift("--deepspeed '' --packing_length 64 --packing");
    is_written(&said, &["uses: pack"]);
    assert!(!said["pipeline"].as_str().unwrap().contains("parallel"), "{said:#}");
    project.write("a.sh", "swift sft --model a/b --dataset chats.jsonl --system --packing false\n");
    project.run(&["import", "a.sh"]).ends_with(2).warns("`system` is").warns("a text");
}

#[test]
fn keys_that_change_the_loss_or_the_rows_are_not_dropped() {
    let project = project();
    let said = said_of(&project, "a.yaml", &format!("{AXOLOTL}liger_use_token_scaling: true\n"));
    is_said(&said, "not_carried_over", "liger_use_token_scaling", "weights the loss");
    let factory = |own: &str| said_of(&project, "a.yaml", &base_with("llama-factory", own));
    let said = factory("template: qwen3\nenable_thinking: false\nignore_pad_token_for_loss: false\n");
    is_said(&said, "not_carried_over", "enable_thinking", "reasoning");
    is_said(&said, "not_carried_over", "ignore_pad_token_for_loss", "padding");
    is_said(&factory("template: qwen\nenable_thinking: false\n"), "carried_over", "enable_thinking", "that reason");
    let text = "swift sft --model a/b --dataset chats.jsonl --add_non_thinking_prefix false --router_aux_loss_coef 0.01 \
                --lora_dtype bfloat16 --use_chat_template false\n";
    let said = said_of(&project, "a.sh", text);
    is_said(&said, "not_carried_over", "add_non_thinking_prefix", "without reasoning");
    is_said(&said, "not_carried_over", "router_aux_loss_coef", "router");
    is_said(&said, "not_carried_over", "use_chat_template", "a chat template");
    is_said(&said, "other_meaning", "lora_dtype", "kept in bfloat16");
    let text = "swift pt --model a/b --dataset texts.jsonl --use_chat_template false\n";
    is_said(&said_of(&project, "a.sh", text), "carried_over", "use_chat_template", "plain text");
}

#[test]
fn turns_without_a_loss_in_ms_swift_have_no_weight() {
    let project = project();
    let turn = |role: &str, more: &str| format!("{{\"role\": \"{role}\", \"content\": \"said\"{more}}}");
    let [user, untrained, trained] =
        [turn("user", ""), turn("assistant", ", \"loss\": false"), turn("assistant", ", \"loss\": true")];
    let plain = format!("{{\"messages\": [{user}, {trained}]}}\n");
    project.write("rows.jsonl", &format!("{plain}{{\"messages\": [{user}, {untrained}, {user}, {trained}]}}\n"));
    let said = said_of(&project, "a.sh", "swift sft --model a/b --dataset rows.jsonl\n");
    is_written(&said, &["turn_order: any"]);
    let shown = rows_of(&project);
    assert_eq!(shown.matches("weight").count(), 1, "{shown}");
    project.write("rows.jsonl", &plain.replace(", \"loss\": true", ""));
    let said = said_of(&project, "a.sh", "swift sft --model a/b --dataset rows.jsonl\n");
    assert!(!said["pipeline"].as_str().unwrap().contains("weight=0"), "{said:#}");
}

#[test]
fn rows_of_alpaca_beside_a_prompt_of_ones_own_are_named() {
    let project = project();
    let own = "{ path: alpaca.jsonl, type: { field_instruction: instruction, format: '{instruction} {input}' } }";
    let datasets = format!("datasets: [{own}, {{ path: more.jsonl, type: alpaca }}]\n");
    project.write("a.yaml", &over(AXOLOTL, &datasets));
    project.run(&["import", "a.yaml"]).ends_with(2).warns("[not-carried-over]").warns("rows of different kinds");
}

#[test]
fn switches_that_are_on_by_default_are_switched_off() {
    let project = project();
    let import = |own: &str| {
        project.write("a.sh", &format!("trl sft --model_name_or_path a/b --dataset_name chats.jsonl {own}\n"));
        project.run(&["import", "a.sh"])
    };
    for flag in ["--no_gradient_checkpointing", "--no-gradient-checkpointing"] {
        let ran = import(flag).ends_with(0);
        assert!(ran.stdout.contains("activation_checkpointing: false"), "{ran}");
    }
    import("--no_packing").ends_with(2).warns("`no_packing` is no key of TRL");
}

#[test]
fn prompts_and_completions_of_strings_are_encoded_together_by_trl() {
    let project = project();
    let said = said_of(&project, "a.yaml", &base_with("trl", "dataset_name: completions.jsonl\n"));
    is_said(&said, "other_meaning", "completion_only_loss", "encoded as one text");
    is_written(&said, &["train_on: assistant"]);
}
