//! What the keys of data sets, conversations and tokens become: the rows that the imported file trains on.

use std::fs;

use test_harness::test;

use super::{AXOLOTL, base_with, is_said, is_written, items, over, project, said_of};
use crate::support::Project;

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
fn prompts_and_completions_of_strings_are_encoded_together_by_trl() {
    let project = project();
    let said = said_of(&project, "a.yaml", &base_with("trl", "dataset_name: completions.jsonl\n"));
    is_said(&said, "other_meaning", "completion_only_loss", "encoded as one text");
    is_written(&said, &["train_on: assistant"]);
}

/// What `datasets` still finds on the Hub by such a name has another one there.
#[test]
fn data_sets_without_an_owner_are_not_carried_over() {
    let project = project();
    let info = r#"{ "hf": { "hf_hub_url": "imdb" }, "ms": { "ms_hub_url": "imdb" } }"#;
    project.write("data/dataset_info.json", info);
    let torchtune = "dataset: { _component_: torchtune.datasets.alpaca_dataset, source: imdb }\n";
    let pretraining = AXOLOTL.replace("datasets: [{ path: alpaca.jsonl, type: alpaca }]", "pretraining_dataset: imdb");
    for (file, text, key) in [
        ("a.yaml", base_with("trl", "dataset_name: imdb\n"), "dataset_name"),
        ("a.yaml", base_with("trl", "dataset_name:\ndatasets: [{ path: imdb }]\n"), "path"),
        ("a.yaml", AXOLOTL.replace("alpaca.jsonl", "imdb"), "path"),
        ("a.yaml", pretraining, "pretraining_dataset"),
        ("a.yaml", base_with("llama-factory", "dataset: hf\n"), "hf_hub_url"),
        ("a.yaml", base_with("llama-factory", "dataset: ms\n"), "ms_hub_url"),
        ("a.yaml", base_with("torchtune", torchtune), "source"),
        ("a.sh", "swift sft --model a/b --dataset imdb\n".to_owned(), "dataset"),
        ("a.sh", "swift sft --model a/b --dataset HF::imdb\n".to_owned(), "dataset"),
    ] {
        let said = said_of(&project, file, &text);
        is_said(&said, "not_carried_over", key, "`imdb` is named without an owner: write `owner/name`");
        // Without a source there are no rows.
        assert!(said["pipeline"].is_null(), "{said:#}");
    }
    project.write("a.yaml", &base_with("trl", "dataset_name: imdb\n"));
    let ran = project.run(&["import", "a.yaml"]).ends_with(2).reports("not-carried-over");
    assert!(!ran.stderr.contains("mistake") && !ran.stderr.contains("--partial"), "{ran}");
    let said = said_of(&project, "a.yaml", &AXOLOTL.replace("alpaca.jsonl", "a/b/c"));
    is_said(&said, "not_carried_over", "path", "`a/b/c` is no path on this machine");
}

#[test]
fn loaders_of_datasets_read_the_files_that_are_named_beside_them() {
    let project = project();
    project.write("others.jsonl", &fs::read_to_string(project.path("chats.jsonl")).unwrap());
    let trl = |entry: &str| base_with("trl", &format!("dataset_name:\ndatasets: [{{ {entry} }}]\n"));
    let axolotl = |entry: &str| AXOLOTL.replace("path: alpaca.jsonl", entry);
    let pretraining =
        |entry: &str| over(AXOLOTL, &format!("datasets:\npretraining_dataset: [{{ {entry} }}]\nmax_steps: 9\n"));
    let torchtune = |entry: &str| {
        let columns = "column_map: { input: prompt, output: completion }";
        let dataset = format!("{{ _component_: torchtune.datasets.instruct_dataset, {entry}, {columns} }}");
        base_with("torchtune", &format!("dataset: {dataset}\n"))
    };
    for (text, source) in [
        (trl("path: json, data_files: chats.jsonl"), "source: ./chats.jsonl"),
        (trl("path: json, data_files: [chats.jsonl, others.jsonl]"), "source: [./chats.jsonl, ./others.jsonl]"),
        (axolotl("path: json, data_files: alpaca.jsonl"), "source: ./alpaca.jsonl"),
        (axolotl("path: json, data_files: [alpaca.jsonl, more.jsonl]"), "source: [./alpaca.jsonl, ./more.jsonl]"),
        (pretraining("path: json, data_files: texts.jsonl"), "source: ./texts.jsonl"),
        (torchtune("source: json, data_files: completions.jsonl"), "source: ./completions.jsonl"),
    ] {
        is_written(&said_of(&project, "a.yaml", &text), &[source]);
    }
    for (text, key) in [
        (base_with("trl", "dataset_name: json\n"), "dataset_name"),
        (trl("path: csv"), "path"),
        (axolotl("path: json"), "path"),
        (pretraining("path: text"), "path"),
        (torchtune("source: json"), "source"),
    ] {
        let said = said_of(&project, "a.yaml", &text);
        is_said(&said, "not_carried_over", key, "reads the files that `data_files` names");
    }
    // Files of a data set of a hub are none of this machine.
    for text in [
        trl("path: a/b, data_files: chats.jsonl"),
        axolotl("path: a/b, data_files: alpaca.jsonl"),
        torchtune("source: a/b, data_files: completions.jsonl"),
    ] {
        let said = said_of(&project, "a.yaml", &text);
        is_said(&said, "not_carried_over", "data_files", "chosen by `split` and `config`");
        is_written(&said, &["source: a/b"]);
    }
}
