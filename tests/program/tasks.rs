//! `evaluate: { tasks }`: figures as facts, gates and files, beside another model's; what is wrong is told with its
//! row, file and key, before a model is loaded.

use arrow::array::AsArray;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;
use test_harness::{Requirement, Unmet, test};

use crate::support::{Project, Ran};

const PIPELINE: &str = r#"
version: 1
name: tasks
stages:
  text:
    uses: dataset
    with: { source: ./text.jsonl }
  fresh:
    uses: new_model
    with:
      { text: text, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, max_position_embeddings: 128 }
  scores:
    uses: evaluate
    with: { model: fresh, tasks: [./tasks/sums.yaml], task_data: ./tasks }
  again:
    uses: evaluate
    with: { model: fresh, tasks: [./tasks/sums.yaml, ./tasks/words.yaml], task_data: ./tasks, limit: 2, num_fewshot: 1, compare_with: scores }
publish: { again: ./again }
"#;

const SUMS: &str = r#"
task: sums
dataset_path: json
dataset_kwargs: { data_files: { test: sums.jsonl } }
test_split: test
output_type: multiple_choice
doc_to_text: "{{a}} and {{b}} are"
doc_to_choice: "{{choices}}"
doc_to_target: right
metric_list: [{ metric: acc }, { metric: acc_norm }]
metadata: { version: 2 }
"#;

const WORDS: &str = r#"
include: base.yaml
task: words
output_type: generate_until
doc_to_target: "{{choices[right]}}"
generation_kwargs: { until: ["."], max_gen_toks: 3 }
metric_list: [{ metric: exact_match }]
"#;

const ROWS: &str = r#"{"a": 1, "b": 1, "choices": ["two", "three"], "right": 0}
{"a": 1, "b": 2, "choices": ["two", "three", "four"], "right": 1}
{"a": 2, "b": 2, "choices": ["two", "four"], "right": 1}
"#;

fn project() -> Project {
    let project = Project::with_pipeline("lora.yaml");
    project.write("tasks.yaml", PIPELINE);
    std::fs::create_dir(project.path("tasks")).unwrap();
    project.write("tasks/sums.yaml", SUMS);
    project.write("tasks/base.yaml", &SUMS.replace("task: sums\n", "").replace("doc_to_choice: \"{{choices}}\"\n", ""));
    project.write("tasks/words.yaml", WORDS);
    project.write("tasks/sums.jsonl", ROWS);
    project
}

fn figures(project: &Project) -> Value {
    let text = std::fs::read(project.path("again/metrics.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

#[test]
fn figures_stand_beside_those_of_another_evaluation() {
    let project = project();
    let run = project.run(&["run", "tasks.yaml"]).ends_with(0);
    for text in ["task   version", "sums acc,none: ", "`scores` ", "words"] {
        assert!(run.stdout.contains(text), "{text}: {}", run.stdout);
    }
    let figures = figures(&project);
    assert_eq!(figures["n-samples"]["sums"], serde_json::json!({ "original": 3, "effective": 2 }));
    assert_eq!(figures["n-shot"]["words"], 1);
    assert!(
        figures["results"]["words"]["exact_match,none"].is_number()
            && figures["results"]["sums"]["acc_stderr,none"].is_number()
    );
    // Of three rows and of two: the rows are not the same.
    assert_eq!(figures["compared"][0]["paired"], false);
    assert!(project.path("again/samples_words.parquet").is_file());
    let shown = project.run(&["runs", "show", "latest", "again", "--format", "json"]).ends_with(0);
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    assert!(shown["outputs"]["metrics"]["facts"]["sums.acc,none"].is_number(), "{shown}");
    project.run(&["run", "tasks.yaml"]).ends_with(0);
    // What a task file includes is part of the key, and so are its rows.
    project.write("tasks/sums.jsonl", &ROWS.replace("\"a\": 2", "\"a\": 3"));
    let run = project.run(&["run", "tasks.yaml", "-v"]).ends_with(0);
    assert!(run.stderr.contains("done: 2 ran"), "{}\n{}", run.stdout, run.stderr);
}

#[test]
fn a_figure_of_one_task_is_one_column_of_a_comparison() {
    let project = project();
    project.write("tasks/twin.yaml", &SUMS.replace("task: sums", "task: twin"));
    let columns = |changes: &[&str]| {
        project.run(&[&["run", "tasks.yaml", "--until", "scores"][..], changes].concat()).ends_with(0);
        let compared = project.run(&["runs", "compare", "scores", "--format", "json"]).ends_with(0).json();
        let named = compared["metrics"].as_array().unwrap().iter().filter_map(Value::as_str);
        named.filter(|name| name.ends_with("acc,none")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(columns(&[]), ["sums.acc,none"]);
    assert_eq!(columns(&["scores.limit=2"]), ["sums.acc,none"]);
    let compared = project.run(&["runs", "compare", "scores", "--sort", "acc,none"]).ends_with(0).stdout;
    let title = compared.lines().next().unwrap();
    assert!(title.matches("acc,none").count() == 1 && !title.contains("sums."), "{compared}");
    // Results of different tasks are compared by the metric.
    assert_eq!(columns(&["scores.tasks=[./tasks/twin.yaml]"]), ["acc,none"]);
}

/// As the harness has them: `check_harness.py` compares such a group with it (`tests/reference/harness`).
#[test]
fn a_group_names_tags_sets_keys_of_tasks_and_has_groups_within() {
    let project = project();
    // By what it calls itself, whatever the file is called.
    project.write("tasks/other.yaml", &SUMS.replace("task: sums", "task: tagged\ntag: [arithmetic]"));
    let group = "group: all\ntask:\n- { task: sums, num_fewshot: 1, task_alias: S }\n- group: part\n  task: arithmetic\n  \
                 aggregate_metric_list: [{ metric: acc }]\naggregate_metric_list: { metric: acc, weight_by_size: true }\n";
    project.write("tasks/all.yaml", group);
    let changes = ["again.tasks=[./tasks/all.yaml]", "again.num_fewshot=null", "again.limit=null"];
    let run = |more: &[&str]| project.run(&[&["run", "tasks.yaml", "--overwrite"], &changes[..], more].concat());
    run(&[]).ends_with(0);
    let found = figures(&project);
    let subtasks = serde_json::json!({ "all": ["sums", "all::part"], "all::part": ["tagged"] });
    assert_eq!(found["group_subtasks"], subtasks);
    assert_eq!(found["n-shot"], serde_json::json!({ "sums": 1, "tagged": 0 }));
    let acc = |name: &str| found["results"][name]["acc,none"].as_f64().unwrap();
    assert!((acc("all") - (acc("sums") + acc("tagged")) / 2.0).abs() < 1e-12);
    assert_eq!(acc("all::part"), acc("tagged"));
    // One name stands for one evaluation.
    let twice = run(&["again.tasks=[./tasks/all.yaml, ./tasks/sums.yaml]"]).ends_with(2);
    twice.warns("the task `sums` of `").warns("is named twice, with other keys");
    project.write("tasks/all.yaml", &group.replace("task: arithmetic", "task: geometry"));
    run(&[]).ends_with(2).warns("there is no task, group or tag `geometry`");
}

/// Figures of its own, and a question of its own.
const UTILS: &str = r#"
print("it says something")

def question(row):
    return f"{row['a']} + {row['b']} ="

def results(row, answers):
    return {"margin": answers[0][0] - answers[1][0], "rows": row["a"]}

def largest(values):
    return max(values)
"#;

#[test]
fn functions_of_task_files_run_where_they_are_let_and_are_part_of_the_key() -> Result<(), Unmet> {
    if let Err(error) = std::process::Command::new("python3").arg("--version").output() {
        return Err(Requirement::Python.unmet(error));
    }
    let project = project();
    let metrics = "[{ metric: margin, aggregation: mean }, { metric: rows, aggregation: !function utils.largest }]";
    let functions = SUMS.replace("\"{{a}} and {{b}} are\"", "!function utils.question").replace(
        "[{ metric: acc }, { metric: acc_norm }]",
        &format!("{metrics}\nprocess_results: !function utils.results"),
    );
    project.write("tasks/sums.yaml", &functions);
    project.write("tasks/utils.py", UTILS);
    let changes = ["scores.task_functions=true", "again.tasks=[./tasks/sums.yaml]", "again.task_functions=true"];
    let run = |more: &[&str]| project.run(&[&["run", "tasks.yaml", "--overwrite", "-v"], &changes[..], more].concat());
    run(&[]).ends_with(0);
    let found = figures(&project);
    assert_eq!(found["results"]["sums"]["rows,none"], 1.0);
    assert!(found["results"]["sums"]["margin_stderr,none"].is_number(), "{found}");
    let asked = texts(&project.path("again/samples_sums.parquet"), "arguments");
    assert!(asked[0].contains("1 + 1 ="), "{asked:?}");
    let shown = project.run(&["runs", "show", "latest", "again", "--format", "json"]).ends_with(0);
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    assert!(shown["how"]["task_functions"]["python"].is_string(), "{shown}");
    // As rows and included files are.
    project.write("tasks/utils.py", &UTILS.replace("max(", "min("));
    let again = run(&[]).ends_with(0);
    assert!(again.stderr.contains("done: 2 ran"), "{}", again.stderr);
    project.write("tasks/utils.py", &UTILS.replace("row['b']", "row['c']"));
    // Lines are broken where a path is long.
    let says = |ran: Ran, text: &str| {
        let said = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(text), "{text}: {}", ran.stderr);
    };
    let text = "sums.yaml, row 1, `doc_to_text`: the function `utils.question`: KeyError: 'c' (utils.py:5)";
    says(run(&[]).ends_with(1), text);
    let text = "sums.yaml:11, `process_results`: the function `utils.results` is Python, which `task_functions: true` lets │ run";
    says(project.run(&["validate", "tasks.yaml"]).ends_with(2), text);
    // What it lacks is known before the model is asked anything.
    project.write("tasks/utils.py", &UTILS.replace("def largest", "import nowhere_to_be_found\n\ndef largest"));
    says(run(&[]).ends_with(1), "No module named 'nowhere_to_be_found': install it into");
    std::fs::rename(project.path("tasks/utils.py"), project.path("tasks/other.py")).unwrap();
    let validated = project.run(&[&["validate", "tasks.yaml"], &changes[..]].concat()).ends_with(2);
    says(validated, "is one of `utils.py`, which is not beside the");
    Ok(())
}

/// A project with two more tasks and a pipeline that evaluates some of them with a model that is trained.
fn several() -> Project {
    let project = project();
    project.write("tasks/more.yaml", &SUMS.replace("task: sums", "task: more").replace("sums.jsonl", "more.jsonl"));
    let choices: Vec<String> = (0..20).map(|number| format!("\"number {number}\"")).collect();
    project.write(
        "tasks/more.jsonl",
        &format!("{{\"a\": 1, \"b\": 1, \"choices\": [{}], \"right\": 0}}\n", choices.join(", ")),
    );
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/evaltasks/model");
    let pipeline = r#"
version: 1
name: several
stages:
  model: { uses: download, with: { path: MODEL } }
  scores: { uses: evaluate, with: { model: model, tasks: [./tasks/short.yaml], task_data: ./tasks, limit: 2 } }
publish: { scores: ./scores }
"#;
    // So few tokens that a batch of them alone is one of few rows in every layer.
    let short = SUMS.replace("task: sums", "task: short").replace("{{a}} and {{b}} are", "{{a}}.");
    project.write("tasks/short.yaml", &short.replace("{{choices}}", "{{['b', 'c']}}"));
    project.write("several.yaml", &pipeline.replace("MODEL", model));
    project
}

/// The published files of an evaluation, and how many of its rows an earlier one had.
fn evaluated(project: &Project, changes: &[&str]) -> (Vec<(String, Vec<u8>)>, u64) {
    let run = project.run(&[&["run", "several.yaml", "--overwrite"], changes].concat()).ends_with(0);
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(project.path("scores"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension != "json") || path.ends_with("metrics.json"))
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap()))
        .collect();
    files.sort();
    let shown = project.run(&["runs", "show", "latest", "scores", "--format", "json"]).ends_with(0);
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    let taken_over = shown["how"]["rows_taken_over"].as_u64().unwrap_or_else(|| panic!("{shown}"));
    let noted = run.stderr.contains("reused from an earlier evaluation");
    assert_eq!(noted, taken_over > 0, "{}", run.stderr);
    (files, taken_over)
}

#[test]
fn what_a_row_scores_does_not_depend_on_what_is_asked_beside_it() {
    let samples = |tasks: &str| {
        let (files, taken_over) = evaluated(&several(), &[&format!("scores.tasks={tasks}")]);
        assert_eq!(taken_over, 0);
        files.into_iter().find(|(name, _)| name == "samples_short.parquet").unwrap()
    };
    let (alone, beside) = (samples("[./tasks/short.yaml]"), samples("[./tasks/short.yaml, ./tasks/more.yaml]"));
    assert!(alone == beside, "the other task's rows change what these score");
}

#[test]
fn a_task_that_is_added_is_the_only_one_that_is_asked() {
    let project = several();
    let all = "scores.tasks=[./tasks/words.yaml, ./tasks/short.yaml, ./tasks/more.yaml]";
    let changed = |changes: &[&str]| evaluated(&project, changes).1;
    assert_eq!(changed(&["scores.tasks=[./tasks/short.yaml]"]), 0);
    assert_eq!(changed(&["scores.tasks=[./tasks/short.yaml, ./tasks/words.yaml]"]), 2);
    let (files, taken_over) = evaluated(&project, &[all]);
    assert_eq!(taken_over, 4);
    // To the byte what another home makes of it at once.
    let (anew, none) = evaluated(&several(), &[all]);
    assert_eq!(none, 0);
    assert!(files == anew, "answers that are taken over make another result");

    // More rows of each, other metrics, and a row that another task has, too.
    assert_eq!(changed(&[all, "scores.limit=3"]), 5);
    project.write("tasks/words.yaml", &WORDS.replace("exact_match }", "exact_match, ignore_case: true }"));
    assert_eq!(changed(&[all]), 5);
    project.write("tasks/twin.yaml", &SUMS.replace("task: sums", "task: twin").replace("sums.jsonl", "more.jsonl"));
    assert_eq!(changed(&["scores.tasks=./tasks/twin.yaml"]), 1);
    // What decides an answer: its prompt, its end, the model and how it is computed.
    project.write("tasks/words.yaml", &WORDS.replace("max_gen_toks: 3", "max_gen_toks: 2"));
    assert_eq!(changed(&[all]), 3);
    assert_eq!(changed(&[all, "scores.max_seq_len=100"]), 0);
    assert_eq!(changed(&[all, "scores.dtype=bf16"]), 0);
    assert_eq!(changed(&[all, "scores.stop_tokens=[5]"]), 0);

    // A table of what there is may be lost or damaged, and so may the results.
    for entry in std::fs::read_dir(project.path(".pipeline/store/reuse")).unwrap() {
        std::fs::write(entry.unwrap().path(), "{}").unwrap();
    }
    assert_eq!(changed(&[all, "scores.system_instruction=Add."]), 0);
    assert_eq!(changed(&["scores.system_instruction=Add."]), 2);
}

#[test]
fn what_is_wrong_with_a_task_is_told_with_its_place() {
    let project = project();
    let fails_with = |code: i32, file: &str, text: &str, expected: &[&str]| {
        let before = std::fs::read_to_string(project.path(file)).unwrap();
        project.write(file, text);
        let run = project.run(&["run", "tasks.yaml", "--until", "scores"]).ends_with(code);
        for expected in expected {
            assert!(run.stderr.contains(expected), "{expected}: {}", run.stderr);
        }
        project.write(file, &before);
    };
    let fails = |file: &str, text: &str, expected: &[&str]| fails_with(1, file, text, expected);
    fails(
        "tasks/sums.yaml",
        &SUMS.replace("test_split: test", "test_split: dev"),
        &["`data_files` has no split `dev`"],
    );
    fails("tasks/sums.yaml", &SUMS.replace("{{b}}", "{{c}}"), &["row 1", "`doc_to_text`"]);
    // What the file alone shows is known before anything runs.
    fails_with(2, "tasks/sums.yaml", &SUMS.replace("test_split: test\n", ""), &["sums.yaml", "`test_split`"]);
    let unknown = SUMS.replace("metric: acc }", "metric: accuracy }");
    fails_with(2, "tasks/sums.yaml", &unknown, &["tasks/sums.yaml:10", "`accuracy`", "[tasks.yaml:"]);
    let function = SUMS.replace("right\n", "!function utils.right\n");
    fails_with(2, "tasks/sums.yaml", &function, &["`doc_to_target`", "utils.right"]);
    project.run(&["validate", "tasks.yaml", "scores.tasks=./tasks/base.yaml"]).ends_with(2).warns("tasks/base.yaml");
    fails(
        "tasks/sums.jsonl",
        &ROWS.replace("\"right\": 0", "\"right\": 5"),
        &["row 1", "`doc_to_target`", "2 choices"],
    );
    fails("tasks/sums.jsonl", &ROWS.replace("[\"two\", \"four\"]", "[\"\", \"four\"]"), &["row 3", "`doc_to_choice`"]);
    fails("tasks/sums.jsonl", "", &["has no rows"]);
    fails("tasks/sums.jsonl", "{\"a\": 1\n", &["sums.jsonl, row 1"]);
    project.write("elsewhere.jsonl", ROWS);
    fails_with(
        2,
        "tasks/sums.yaml",
        &SUMS.replace("sums.jsonl", "../elsewhere.jsonl"),
        &["which this stage", "task_data"],
    );
}

#[test]
fn tasks_are_rendered_by_the_template_that_the_stage_gives() {
    let project = project();
    let changes = ["again.apply_chat_template=true", "again.chat_template=chatml", "again.compare_with=null"];
    let arguments = [&["run", "tasks.yaml", "--until", "again"], &changes[..]].concat();
    project.run(&arguments).ends_with(0);
    let asked = texts(&project.path("again/samples_words.parquet"), "arguments");
    assert!(!asked.is_empty() && asked.iter().all(|text| text.contains("<|im_start|>user")), "{asked:?}");
}

#[test]
fn parameters_that_do_not_go_together_are_told_at_once() {
    let project = project();
    let wrong = |change: &str, code: &str| {
        let run = project.run(&["validate", "tasks.yaml", change]).ends_with(2);
        assert!(run.stderr.contains(code), "{change}: {}", run.stderr);
    };
    wrong("scores.tasks=null", "missing-key");
    wrong("scores.data=text", "bad-value");
    wrong("scores.tasks=hellaswaq", "hellaswag");
    wrong("scores.fewshot_as_multiturn=true", "apply_chat_template");
    wrong("scores.tasks=[piqa, piqa]", "named twice");
    wrong("scores.max_new_tokens=4", "max_gen_toks");
    wrong("scores.metrics=[rouge]", "metric_list");
    wrong("scores.stop_strings=[x]", "until");
    wrong("scores.system_prompt=You answer.", "system_instruction");
    wrong("scores.chat_template=chatml", "apply_chat_template");
    let run = project.run(&["run", "tasks.yaml", "scores.tasks=piqa", "--until", "scores"]).ends_with(1);
    assert!(run.stderr.contains("piqa/validation.jsonl"), "{}", run.stderr);
    std::fs::create_dir(project.path("tasks/piqa")).unwrap();
    for file in ["tasks/piqa/validation.jsonl", "tasks/piqa/validation-00000-of-00001.json"] {
        project.write(file, "");
    }
    let run = project.run(&["run", "tasks.yaml", "scores.tasks=piqa", "--until", "scores"]).ends_with(1);
    assert!(run.stderr.contains("has several files"), "{}", run.stderr);
}

#[test]
fn rows_of_a_task_that_were_trained_on_are_counted_and_left_out() {
    let project = project();
    let asked = "Of all the birds that live on the island, {{a}} and {{b}} more are white, which together makes";
    project.write("tasks/sums.yaml", &SUMS.replace("{{a}} and {{b}} are", asked));
    let text =
        |a: u32, b: u32, sum: &str| asked.replace("{{a}}", &a.to_string()).replace("{{b}}", &b.to_string()) + " " + sum;
    let held = [text(1, 1, "two"), format!("A quiz. {} That was it.", text(2, 2, "four").to_uppercase())];
    let rows = [held[0].as_str(), "Nothing of this is in any task, whatever else is said here.", &held[1]];
    let lines = |rows: &[&str]| -> String {
        rows.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect()
    };
    project.write("trained_on.jsonl", &lines(&rows));
    project.write("held_out.jsonl", &lines(&[&held[0]]));
    let pipeline = r#"
version: 1
name: contamination
stages:
  model: { uses: download, with: { path: MODEL } }
  held_out: { uses: dataset, with: { source: ./held_out.jsonl } }
  trained_on: { uses: dataset, with: { source: ./trained_on.jsonl } }
  clean: { uses: dataset, with: { source: ./trained_on.jsonl, decontaminate: held_out } }
  scores: { uses: evaluate, with: { model: model, tasks: [./tasks/sums.yaml], task_data: ./tasks, train_data: trained_on } }
  after: { uses: evaluate, with: { model: model, tasks: [./tasks/sums.yaml], task_data: ./tasks, train_data: clean } }
publish: { scores: ./scores, after: ./after }
"#;
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/evaltasks/model");
    project.write("contamination.yaml", &pipeline.replace("MODEL", model));
    let run = project.run(&["run", "contamination.yaml"]).ends_with(0);
    assert!(run.stdout.contains("sums: 2 of 3 rows stand in the training data, in 2 of its rows"), "{}", run.stdout);
    assert!(run.stderr.contains("1 rows contain one of `decontaminate`"), "{}", run.stderr);
    let found = |folder: &str| -> Value {
        let text = std::fs::read(project.path(folder).join("metrics.json")).unwrap();
        serde_json::from_slice::<Value>(&text).unwrap()["contamination"]["sums"].clone()
    };
    assert_eq!(found("scores"), serde_json::json!({ "rows": 2, "of": 3, "training_rows": 2 }));
    assert_eq!(found("after"), serde_json::json!({ "rows": 1, "of": 3, "training_rows": 1 }));
}

#[test]
fn a_model_in_training_is_asked_by_one_worker_or_several() {
    let project = project();
    let pipeline = r#"
version: 1
name: trained
stages:
  text: { uses: dataset, with: { source: ./text.jsonl } }
  fresh:
    uses: new_model
    with:
      { text: text, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, max_position_embeddings: 128 }
  tokens: { uses: tokenize, with: { dataset: text, tokenizer: fresh, max_seq_len: 64 } }
  adapter:
    uses: train
    resources: { count: 1 }
    with:
      { model: fresh, data: tokens, micro_batch_size: 2, epochs: 2, optimizer: { learning_rate: 1e-2 },
        validation_tasks: { tasks: [./tasks/sums.yaml], task_data: ./tasks } }
  again: { uses: evaluate, with: { model: fresh, adapter: adapter, tasks: [./tasks/sums.yaml], task_data: ./tasks } }
gates: { "adapter.sums.acc,none": { above: -1 } }
publish: { again: ./again }
"#;
    project.write("trained.yaml", pipeline);
    project
        .run(&["validate", "trained.yaml", "adapter.validation_tasks.tasks=./tasks/words.yaml"])
        .ends_with(2)
        .warns("the task `words` generates text");
    for count in [1, 2] {
        // Another seed, since the number of workers is in no key.
        let changes = [format!("adapter.resources.count={count}"), format!("adapter.seed={count}")];
        let run = project.run(&["run", "trained.yaml", "--overwrite", &changes[0], &changes[1]]).ends_with(0);
        assert!(run.stderr.contains("before the first step: sums.acc,none"), "{}", run.stderr);
        let facts = |stage: &str| -> Value {
            let shown = project.run(&["runs", "show", "latest", stage, "--format", "json"]).ends_with(0);
            serde_json::from_str::<Value>(&shown.stdout).unwrap()["outputs"]["metrics"]["facts"].clone()
        };
        let (trained, evaluated) = (facts("adapter"), facts("again"));
        for name in ["sums.acc,none", "sums.acc_norm,none"] {
            assert!(trained[name].is_number() && trained[name] == evaluated[name], "{trained} {evaluated}");
        }
    }
}

#[test]
fn several_responses_to_a_row_are_drawn_by_its_place() {
    let project = several();
    let drawn =
        WORDS.replace("task: words", "task: drawn").replace("max_gen_toks: 3", "max_gen_toks: 3, temperature: 1.5");
    let vote = "filter_list: [{ name: vote, filter: [{ function: majority_vote }, { function: take_first }] }]\n";
    project.write("tasks/drawn.yaml", &format!("{drawn}repeats: 3\n{vote}"));
    let responses = |project: &Project, tasks: &str| {
        let (files, taken_over) = evaluated(project, &[&format!("scores.tasks={tasks}")]);
        let (_, samples) = files.into_iter().find(|(name, _)| name == "samples_drawn.parquet").unwrap();
        (samples, taken_over)
    };
    let (samples, _) = responses(&project, "[./tasks/drawn.yaml]");
    let found: Vec<Vec<String>> = texts(&project.path("scores/samples_drawn.parquet"), "resps")
        .iter()
        .map(|text| serde_json::from_str(text).unwrap())
        .collect();
    assert!(found.len() == 2 && found.iter().all(|of_row| of_row.len() == 3), "{found:?}");
    assert!(found.iter().any(|of_row| of_row[0] != of_row[1] || of_row[0] != of_row[2]), "{found:?}");
    // The same in another home, and with a task before it; taken over as others are.
    let both = "[./tasks/short.yaml, ./tasks/drawn.yaml]";
    assert!(responses(&project, both) == (samples.clone(), 2));
    let other = several();
    other.write("tasks/drawn.yaml", &std::fs::read_to_string(project.path("tasks/drawn.yaml")).unwrap());
    assert!(responses(&other, both) == (samples, 0));
}

/// A column of text of a Parquet file.
fn texts(path: &std::path::Path, column: &str) -> Vec<String> {
    let file = std::fs::File::open(path).unwrap();
    let batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let texts = batches.flat_map(|batch| {
        let batch = batch.unwrap();
        let values = batch.column_by_name(column).unwrap().as_string::<i32>().clone();
        values.iter().map(|text| text.unwrap().to_owned()).collect::<Vec<_>>()
    });
    texts.collect()
}

#[test]
fn pairs_that_are_too_long_for_the_model_are_warned_of() {
    let project = project();
    let pair = |chosen: &str| serde_json::json!({ "prompt": "a", "chosen": chosen, "rejected": "no" }).to_string();
    project.write("pairs.jsonl", &[pair("yes"), pair(&"the fox ".repeat(200))].join("\n"));
    let text = PIPELINE.split_once("  scores:").unwrap().0;
    let stages = "  pairs: { uses: dataset, with: { source: ./pairs.jsonl } }
  judged: { uses: evaluate, with: { model: fresh, data: pairs, metrics: [preference_accuracy] } }\n";
    project.write("pairs.yaml", &format!("{text}{stages}"));
    project.run(&["run", "pairs.yaml"]).ends_with(0).warns("1 of 2 pairs are left out");
}

#[test]
fn desirable_and_undesirable_responses_in_one_perplexity_are_warned_of() {
    let project = project();
    let row = |completion: &str, label: bool| {
        serde_json::json!({ "prompt": "a", "completion": completion, "label": label }).to_string()
    };
    let text = PIPELINE.split_once("  scores:").unwrap().0;
    let stages = "  labelled: { uses: dataset, with: { source: ./labelled.jsonl } }
  judged: { uses: evaluate, with: { model: fresh, data: labelled } }\n";
    project.write("labelled.yaml", &format!("{text}{stages}"));
    project.write("labelled.jsonl", &[row("yes", true), row("no", false), row("never", false)].join("\n"));
    project.run(&["run", "labelled.yaml"]).ends_with(0).warns("1 desirable and 2 undesirable responses");
    project.write("labelled.jsonl", &[row("yes", true), row("no", true)].join("\n"));
    let ran = project.run(&["run", "labelled.yaml"]).ends_with(0);
    assert!(!ran.stderr.contains("undesirable"), "{ran}");
}
