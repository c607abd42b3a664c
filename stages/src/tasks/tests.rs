//! Task files that are read otherwise than YAML 1.2 has it, and what is said of wrong ones.

use std::path::Path;

use serde_json::{Value, json};

use super::TaskError;
use super::documents::{self, Document};
use super::file::{FieldValue, Task, TaskFile};
use super::group::{Member, Overrides};
use super::prompt::PromptOptions;
use super::request::{Asking, Request, Sample};
use super::results::Answer;

const TASK: &str = "task: letters
output_type: multiple_choice
dataset_kwargs: { data_files: { test: rows.jsonl } }
test_split: test
doc_to_text: '{{ question }}'
doc_to_choice: options
doc_to_target: answer
metric_list: [{ metric: acc }]
";

fn task(folder: &Path, text: &str) -> Result<Task, TaskError> {
    let path = folder.join("task.yaml");
    std::fs::write(&path, text).unwrap();
    TaskFile::read(&path, None).map(|file| match file {
        TaskFile::Task(task) => *task,
        TaskFile::Group(group) => panic!("a group: {group:?}"),
    })
}

fn read(text: &str) -> Result<Task, TaskError> {
    task(tempfile::tempdir().unwrap().path(), text)
}

/// What is said of a task, without the file's folder.
fn refusal(text: &str) -> String {
    let said = read(text).unwrap_err().to_string();
    said[said.find("task.yaml").unwrap()..].to_owned()
}

fn samples(text: &str, rows: &[Value]) -> Result<Vec<Sample>, TaskError> {
    let task = read(text)?;
    let rows: Vec<Document> = rows.iter().map(|row| row.as_object().unwrap().clone()).collect();
    let options = PromptOptions::default();
    Asking { task: &task, options, chat_template: None, num_fewshot: None }.samples(&rows, &rows)
}

fn refused_row(text: &str, row: Value) -> String {
    let right = json!({ "question": "Which?", "options": ["a", "b"], "answer": 0 });
    let said = samples(text, &[right, row]).unwrap_err().to_string();
    said[said.find("task.yaml").unwrap()..].to_owned()
}

#[test]
fn an_unknown_key_is_named_with_its_line() {
    let said = refusal(&TASK.replace("test_split", "tset_split"));
    assert_eq!(said, "task.yaml:4, `tset_split`: no key of a task: did you mean `test_split`?");
    let said = refusal(&TASK.replace("metric: acc", "metric: bleurt"));
    assert_eq!(said, "task.yaml:8, `metric_list`: the metric `bleurt` is not known here");
    let said = refusal(&format!("{TASK}process_results: !function utils.other\n"));
    let expected = "the function `utils.other` is Python, which `task_functions: true` lets run";
    assert_eq!(said, format!("task.yaml:9, `process_results`: {expected}"));
    let said = refusal(&TASK.replace("test_split: test\n", ""));
    assert_eq!(said, "task.yaml, `test_split`: is missing, and so is `validation_split`: no rows to evaluate on");
}

#[test]
fn plain_words_are_what_yaml_1_1_has_them_be() {
    let text = TASK.replace("doc_to_choice: options", "doc_to_choice: [no, 'no', \"yes\", On, 010, 1e5, 1.5, n]");
    let choices = read(&text).unwrap().doc_to_choice.unwrap();
    assert_eq!(choices, FieldValue::Value(json!([false, "no", "yes", true, 8, "1e5", 1.5, "n"])));
}

#[test]
fn a_file_changes_what_it_includes() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("base.yaml"), TASK).unwrap();
    let task_of = |text: &str| task(folder.path(), text);
    let found = task_of("include: base.yaml\ntask: other\ndescription: 'Answer. '\n").unwrap();
    assert_eq!((found.name.as_str(), found.description), ("other", "Answer. ".into()));
    assert_eq!(found.doc_to_target, "answer".into());
    let said = task_of("include: task.yaml\n").unwrap_err().message;
    assert_eq!(said, "the file includes itself");
}

#[test]
fn a_row_that_gives_no_request_is_named_with_the_key() {
    let row = |options: Value, answer: Value| json!({ "question": "Which?", "options": options, "answer": answer });
    let said = refused_row(TASK, row(json!(["a", "b"]), json!(2)));
    assert_eq!(said, "task.yaml, row 2, `doc_to_target`: there are 2 choices, and the right one is 2");
    let said = refused_row(TASK, row(json!(["a", "b"]), json!("c")));
    assert_eq!(said, "task.yaml, row 2, `doc_to_target`: the target `c` is not one of the 2 choices");
    let said = refused_row(&format!("{TASK}target_delimiter: ''\n"), row(json!(["a", ""]), json!(0)));
    assert_eq!(said, "task.yaml, row 2, `doc_to_choice`: a choice has no text");
    let by_length = TASK.replace("{ metric: acc }", "{ metric: acc }, { metric: acc_norm }");
    let said = refused_row(&by_length, row(json!(["a", ""]), json!(0)));
    assert_eq!(said, "task.yaml, row 2, `doc_to_choice`: a choice has no text, and `acc_norm` divides by its length");
    let said = refused_row(TASK, json!({ "options": ["a"], "answer": 0 }));
    assert!(said.starts_with("task.yaml, row 2, `doc_to_text`: undefined value"), "{said}");
    let said = refusal_of_template("{{ question");
    assert!(said.starts_with("task.yaml, `doc_to_text`: syntax error"), "{said}");
}

#[test]
fn an_empty_choice_is_asked_for_as_the_delimiter() {
    let row = json!({ "question": "Which?", "options": ["a", ""], "answer": 1 });
    let samples = samples(TASK, &[row]).unwrap();
    let Request::Continuation { continuation, .. } = &samples[0].requests[1] else { panic!("no continuation") };
    assert_eq!(continuation, " ");
}

#[test]
fn a_task_without_a_list_has_the_metrics_of_its_output_type() {
    let metrics = |text: &str| -> Vec<(String, bool)> {
        let metrics = read(text).unwrap().metrics;
        metrics.into_iter().map(|metric| (metric.name, metric.higher_is_better)).collect()
    };
    let named = |names: &[&str], higher| -> Vec<(String, bool)> {
        names.iter().map(|name| ((*name).to_owned(), higher)).collect()
    };
    let choices = TASK.replace("metric_list: [{ metric: acc }]\n", "");
    assert_eq!(metrics(&choices), named(&["acc", "acc_norm"], true));
    assert_eq!(metrics(&format!("{choices}metric_list:\n")), named(&["acc", "acc_norm"], true));
    let words = GENERATES.replace("metric_list: [{ metric: exact_match }]\n", "");
    assert_eq!(metrics(&words), named(&["exact_match"], true));
    let words = words.replace("generation_kwargs: { until: ['.'] }\n", "");
    let of = |output_type: &str| metrics(&format!("{words}output_type: {output_type}\n"));
    let both = [named(&["perplexity"], false), named(&["acc"], true)].concat();
    assert_eq!(of("loglikelihood"), both);
    assert_eq!(of("loglikelihood_rolling"), named(&["word_perplexity", "byte_perplexity", "bits_per_byte"], false));
    let said = refusal(&format!("{choices}metric_list: []\n"));
    assert!(said.ends_with("`metric_list`: is empty: what the task is measured by"), "{said}");
}

fn refusal_of_template(template: &str) -> String {
    refused_row(&TASK.replace("{{ question }}", template), json!({}))
}

#[test]
fn a_list_in_a_text_is_printed_as_by_python() {
    let text = TASK.replace("{{ question }}", "Of {{ options }}:");
    let row = json!({ "options": ["it's", "b"], "answer": "b" });
    let samples = samples(&text, &[row]).unwrap();
    let Request::Continuation { context, .. } = &samples[0].requests[0] else { panic!("no continuation") };
    assert_eq!(context, "Of [\"it's\", 'b']:");
}

#[test]
fn rows_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let task = task(folder.path(), TASK).unwrap();
    std::fs::write(folder.path().join("rows.jsonl"), "{\"question\": 1}\n\n[2]\n").unwrap();
    let said = documents::read(&task, "test", folder.path()).unwrap_err();
    assert_eq!(said.row, Some(3), "{said}");
    let said = documents::read(&task, "dev", folder.path()).unwrap_err().message;
    assert_eq!(said, "`data_files` has no split `dev`, only `test`");
    std::fs::write(folder.path().join("rows.jsonl"), "[{\"a\": 1}, {\"a\": null}]").unwrap();
    let rows = documents::read(&task, "test", folder.path()).unwrap();
    assert_eq!(rows.into_iter().map(Value::from).collect::<Vec<_>>(), [json!({ "a": 1 }), json!({ "a": null })]);
}

const GENERATES: &str = "task: words
dataset_kwargs: { data_files: { test: rows.jsonl } }
test_split: test
doc_to_text: q
doc_to_target: t
generation_kwargs: { until: ['.'] }
metric_list: [{ metric: exact_match }]
";

#[test]
fn how_often_and_how_a_row_is_answered_is_checked() {
    let with = |from: &str, to: &str| GENERATES.replace(from, to);
    let filtered = |filters: &str| format!("{GENERATES}filter_list: [{{ name: x, filter: [{filters}] }}]\n");
    for (text, said) in [
        (format!("{GENERATES}repeats: 0\n"), "`repeats`: `0` is no number of responses"),
        (format!("{GENERATES}repeats: many\n"), "`repeats`: `\"many\"` is no number of responses"),
        (filtered("{ function: take_first_k, k: 2 }"), "`take_first_k` needs 2 responses, and `repeats` is 1"),
        (filtered("{ function: take_first_k }"), "`take_first_k` lacks `k`"),
        (filtered("{ function: map }"), "`map` lacks `mapping_dict`"),
        (with("'.']", "'.'], do_sample: true"), "`do_sample: true` needs a `temperature` above 0"),
        (with("'.']", "'.'], do_sample: 3"), "`do_sample` is to be true or false"),
        (with("'.']", "'.'], temperature: -1"), "`temperature` is -1"),
        (with("'.']", "'.'], temperature: 1, top_p: 2"), "`top_p` is 2"),
        (with("'.']", "'.'], num_beams: 2"), "`num_beams: 2` is not supported"),
    ] {
        assert!(refusal(&text).contains(said), "{said}: {}", refusal(&text));
    }
    let task = read(&(with("'.']", "'.'], temperature: 0.5, top_k: 3") + "repeats: 4\n")).unwrap();
    assert_eq!((task.responses(), task.generation.sampling.top_k), (4, Some(3)));
    // As the harness has it: what is not drawn is asked for once, and a temperature without drawing changes nothing.
    let task = read(&(with("'.']", "'.'], do_sample: false, temperature: 0.5") + "repeats: 4\n")).unwrap();
    assert_eq!((task.responses(), task.repeats), (1, 4));
    let said = refusal(&format!("{GENERATES}custom_dataset: !function utils.rows\n"));
    assert!(said.contains("`utils.rows`") && said.contains("`dataset_path: json`"), "{said}");
}

#[test]
fn metrics_of_classes_say_what_they_are_not_given() {
    let said = |metric: &str, filters: &str, target: Value, answers: &[&str]| {
        let metric = GENERATES.replace("exact_match", metric) + "repeats: 2\n";
        let text = format!("{metric}filter_list: [{{ name: x, filter: [{filters}] }}]\n");
        let row = json!({ "q": "Which?", "t": target });
        let samples = samples(&text, &[row]).unwrap();
        let answers = answers.iter().map(|text| Answer::Text((*text).to_owned())).collect();
        let found = read(&text).unwrap().results(&samples, &[answers], 0);
        found.map(|_| String::new()).unwrap_or_else(|error| error.to_string())
    };
    let map = "{ function: map, mapping_dict: { a: 1, b: 0 } }, { function: take_first }";
    assert_eq!(said("f1", map, json!("1"), &["a"]), "");
    assert_eq!(said("mcc", "{ function: take_first }", json!("red"), &["blue"]), "");
    for (found, expected) in [
        (said("f1", map, json!("1"), &["c"]), "row 1, `filter_list`: `map` has neither a value"),
        (said("f1", "{ function: take_first }", json!("1"), &["1"]), "the filter `map` converts responses to numbers"),
        (said("f1", map, json!("2"), &["a"]), "`f1` is of the classes 0 and 1, and there are `2` and `1`"),
        (said("mcc", "{ function: lowercase }", json!("1"), &["a"]), "end the filter with `take_first`"),
        (said("mcc", map, json!(["1", "0"]), &["a"]), "`doc_to_target`: `mcc` is of one right answer"),
    ] {
        assert!(found.contains(expected), "{expected}: {found}");
    }
    let choices = TASK.replace("metric: acc", "metric: f1");
    let row = json!({ "question": "Which?", "options": ["a", "b", "c"], "answer": 2 });
    let samples = samples(&choices, &[row]).unwrap();
    let answers = vec![vec![Answer::Loglikelihood { sum: -1.0, is_greedy: false }; 3]];
    let said = read(&choices).unwrap().results(&samples, &answers, 0).unwrap_err().to_string();
    assert!(said.contains("`f1` is for two choices"), "{said}");
}

/// The contexts of rows to be completed.
fn contexts(text: &str, rows: &[Value]) -> Vec<String> {
    let context = |sample: Sample| match &sample.requests[0] {
        Request::Generation { context } => context.clone(),
        other => panic!("no generation: {other:?}"),
    };
    samples(text, rows).unwrap().into_iter().map(context).collect()
}

#[test]
fn what_stands_around_a_question_is_made_of_the_row() {
    let text = format!(
        "{GENERATES}description: 'About {{{{ topic }}}}. '\ngen_prefix: pre\nnum_fewshot: 1\nfewshot_split: test\n\
         fewshot_config: {{ sampler: first_n }}\n"
    );
    let row = |topic: &str, q: &str, pre: &str, t: &str| json!({ "topic": topic, "q": q, "pre": pre, "t": t });
    // A shown row without an answer is its question alone.
    let found = contexts(&text, &[row("x", "a?", "P", "A"), row("y", "b?", "", "")]);
    assert_eq!(found, ["About x. b?a? P", "About y. a? P A\n\nb?"]);
    let task = read(&text).unwrap();
    assert_eq!((task.shots(None), task.shots(Some(4))), (1, 4));
    let without = read(&text.replace("num_fewshot: 1", "num_fewshot: 0")).unwrap();
    assert_eq!((without.shots(None), without.shots(Some(4))), (0, 0));
}

#[test]
fn a_row_is_not_shown_to_itself_however_often_it_is_there() {
    let text = format!("{GENERATES}num_fewshot: 1\nfewshot_split: test\n");
    let row = |q: &str| json!({ "q": q, "t": "yes" });
    let rows = [row("a?"), row("a?"), row("a?"), row("a?"), row("b?")];
    for found in contexts(&text, &rows)[..4].iter() {
        assert_eq!(found, "b? yes\n\na?");
    }
}

#[test]
fn a_file_may_have_the_rows_that_are_shown_and_say_how() {
    let text = format!(
        "{GENERATES}num_fewshot: 2\nfewshot_config:\n  sampler: first_n\n  doc_to_text: 'Q: {{{{ q }}}}'\n  \
         doc_to_target: said\n  samples:\n  - {{ q: c?, said: C }}\n  - {{ q: d?, said: 7 }}\n"
    );
    let row = json!({ "q": "a?", "t": "x" });
    assert_eq!(contexts(&text, std::slice::from_ref(&row)), ["Q: c? C\n\nQ: d? 7\n\na?"]);
    // A split goes before them.
    let split = contexts(&format!("{text}fewshot_split: train\n").replace("said\n", "t\n"), &[row.clone(), row]);
    assert_eq!(split[0], "Q: a? x\n\nQ: a? x\n\na?");
    let said = samples(&text.replace("num_fewshot: 2", "num_fewshot: 3"), &[json!({ "q": "a?", "t": "x" })]);
    assert!(said.unwrap_err().to_string().contains("there are 2 to choose from"));
    let said = refusal(&text.replace("doc_to_target: said", "doc_to_target: !function utils.target"));
    assert!(said.contains("`fewshot_config`: the function `utils.target` is Python"), "{said}");
    let said = refusal(&format!("{GENERATES}fewshot_config: {{ samples: [a] }}\n"));
    assert!(said.contains("`samples` is a list of rows"), "{said}");
}

#[test]
fn templates_are_those_of_the_harness() {
    let with = |template: &str| GENERATES.replace("doc_to_text: q", &format!("doc_to_text: '{template}'"));
    let row = json!({ "q": { "b": "é<", "a": 1 }, "t": "x", "s": "a1b22" });
    for (template, expected) in [
        ("{{ q|tojson }}", r#"{"a": 1, "b": "\u00e9\u003c"}"#),
        (r#"{{ s|regex_replace("([0-9])([0-9])?", "<\\1>") }}"#, "a<1>b<2>"),
        (r#"{{ s|regex_replace("[0-9]+", "$", count=1) }}"#, "a$b22"),
    ] {
        assert_eq!(contexts(&with(template), std::slice::from_ref(&row)), [expected], "{template}");
    }
}

#[test]
fn a_group_says_what_it_is_made_of() {
    let folder = tempfile::tempdir().unwrap();
    let read = |metric: &str| {
        let path = folder.path().join("group.yaml");
        std::fs::write(&path, format!("group: all\ntask: [a]\naggregate_metric_list: [{metric}]\n")).unwrap();
        TaskFile::read(&path, None)
    };
    let Ok(TaskFile::Group(group)) = read("{ metric: acc, filter_list: strict }") else { panic!("no group") };
    assert_eq!(group.metrics[0].filters, Some(vec!["strict".to_owned()]));
    let said = read("{ metric: acc, wieght_by_size: false }").unwrap_err().to_string();
    assert!(said.contains("`wieght_by_size` is not supported"), "{said}");
}

#[test]
fn a_group_sets_keys_of_its_tasks_and_has_groups_within() {
    let folder = tempfile::tempdir().unwrap();
    let read = |members: &str| {
        let path = folder.path().join("group.yaml");
        std::fs::write(&path, format!("group: all\ntask: [{members}]\naggregate_metric_list: {{ metric: acc }}\n"))
            .unwrap();
        TaskFile::read(&path, None)
    };
    let members = "a, { task: b, num_fewshot: 5, task_alias: B }, { group: part, task: [c], aggregate_metric_list: [{ metric: f1 }] }";
    let Ok(TaskFile::Group(group)) = read(members) else { panic!("no group") };
    assert_eq!(group.names(), ["a", "b", "all::part"]);
    let [Member::Named { .. }, Member::Named { overrides, .. }, Member::Group(part)] = &group.members[..] else {
        panic!("{group:?}");
    };
    assert_eq!((part.names(), part.metrics[0].metric.as_str()), (vec!["c"], "f1"));
    // The task has them in place of its own; what the group around says holds where it says nothing.
    let path = folder.path().join("b.yaml");
    std::fs::write(&path, format!("{GENERATES}num_fewshot: 1\n")).unwrap();
    let outer = json!({ "num_fewshot": 7, "target_delimiter": ":" }).as_object().unwrap().clone();
    let outer = Overrides { values: outer, ..Overrides::default() };
    let Ok((TaskFile::Task(task), _)) = TaskFile::read_with_includes(&path, &overrides.within(&outer), None) else {
        panic!("no task");
    };
    assert_eq!((task.num_fewshot, task.target_delimiter.as_str()), (Some(5), ":"));
    for (members, expected) in [
        ("{ task: b, num_fewshoot: 5 }", "`num_fewshoot` of `b`: no key of a task: did you mean `num_fewshot`?"),
        ("{ group: part, num_fewshot: 5 }", "`num_fewshot` is no key of a group"),
        ("{ num_fewshot: 5 }", "lacks `task`"),
        ("7", "`7` is neither"),
    ] {
        let said = read(members).unwrap_err().to_string();
        assert!(said.contains("group.yaml:2, `task`") && said.contains(expected), "{said}");
    }
    let wrong = Overrides { values: json!({ "num_fewshot": "x" }).as_object().unwrap().clone(), ..overrides.clone() };
    let said = TaskFile::read_with_includes(&path, &wrong, None).unwrap_err().to_string();
    assert!(said.contains("group.yaml:2, `num_fewshot`: is to be a number of rows"), "{said}");
}

#[test]
fn metrics_of_texts_are_of_one_right_answer() {
    let text = format!(
        "{}metric_list: [{{ metric: bleu }}, {{ metric: ter, aggregation: ter, higher_is_better: false }}]\n",
        GENERATES.replace("metric_list: [{ metric: exact_match }]\n", "")
    );
    let task = read(&text).unwrap();
    let rows = [json!({ "q": "a?", "t": "a b c d e" }), json!({ "q": "b?", "t": "x y" })];
    let found = samples(&text, &rows).unwrap();
    let answers = [vec![Answer::Text("a b c d f".to_owned())], vec![Answer::Text("y x".to_owned())]];
    let results = task.results(&found, &answers, 100).unwrap();
    let ter = results.figures["ter,none"];
    assert!((ter.value - 100.0 * 2.0 / 7.0).abs() < 1e-12 && ter.stderr.is_some(), "{ter:?}");
    assert!(results.figures["bleu,none"].value > 30.0);
    let several = samples(&text, &[json!({ "q": "a?", "t": ["a", "b"] })]).unwrap();
    let said = task.results(&several, &answers[..1], 0).unwrap_err().to_string();
    assert!(said.contains("`bleu` is of one right answer"), "{said}");
    // What is of no effect in the harness has none here.
    let text = TASK.replace("metric: acc", "metric: acc, weight_by_size: true");
    assert!(read(&text).is_ok());
    let beams = |number: u32| read(&GENERATES.replace("until: ['.']", &format!("num_beams: {number}"))).is_ok();
    assert!(beams(1) && !beams(2));
}
