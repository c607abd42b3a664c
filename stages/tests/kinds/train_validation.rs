//! Validation while training: what is measured, which step becomes the result, when training ends, and that all of it
//! survives an interruption.

use std::fs;

use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::kinds::evaluate::Evaluate;
use stages::kinds::train::Train;
use test_harness::test;

use crate::tiny::Tiny;
use crate::training::{self, adapter, bench, learned, records, rows, train, with};

/// The tokens of the training rows in the opposite order: the loss on them falls while it is learned which tokens there
/// are, and rises far while it is learned which one follows which.
fn held_out() -> Vec<stages::data::artifact::TokenRow> {
    (0..5).map(|row| learned((0..7 + row % 3).rev().map(|at| 3 + (7 * row + 5 * at) % 200))).collect()
}

/// Parameters with which the validation loss has its lowest point in the middle.
fn falls_and_rises(more: Value) -> Value {
    let mut parameters = json!({
        "validation": "held_out", "epochs": 30, "optimizer": {"learning_rate": 2e-2}, "eval_steps": 3,
        "scheduler": {"name": "constant"},
    });
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    parameters
}

fn losses(records: &[Value]) -> Vec<f64> {
    records.iter().map(|record| record["loss"].as_f64().unwrap()).collect()
}

fn lowest(losses: &[f64]) -> usize {
    (0..losses.len()).min_by(|one, other| losses[*one].total_cmp(&losses[*other])).unwrap()
}

#[test]
fn validation_is_due_before_the_first_step_at_each_epoch_or_every_few_steps_and_at_the_end() {
    let tiny = Tiny::new();
    let steps_of = |more: Value| -> Vec<u64> {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(&tiny, folder.path(), rows(), Some(held_out()));
        let mut parameters = json!({"validation": "held_out", "epochs": 3});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let outputs = train(&bench, parameters).unwrap();
        records(&outputs, "validation").iter().map(|record| record["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(steps_of(json!({})), [0, 3, 6, 9]);
    assert_eq!(steps_of(json!({"max_steps": 7})), [0, 3, 6, 7]);
    assert_eq!(steps_of(json!({"eval_steps": 4})), [0, 4, 8, 9]);
    assert_eq!(steps_of(json!({"max_steps_per_epoch": 2})), [0, 2, 4, 6]);
}

#[test]
fn the_loss_is_weighted_by_tokens_whatever_the_micro_batch_and_trains_nothing() {
    let tiny = Tiny::new();
    let run = |validation: Option<&str>, micro_batch_size: usize| {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(&tiny, folder.path(), rows(), Some(held_out()));
        let mut parameters =
            json!({"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": 4 / micro_batch_size});
        if let Some(validation) = validation {
            parameters["validation"] = validation.into();
        }
        let outputs = train(&bench, parameters).unwrap();
        let weights = adapter(&outputs);
        (records(&outputs, "validation"), weights)
    };
    let ((one, with_validation), (many, _), (none, without)) =
        (run(Some("held_out"), 1), run(Some("held_out"), 4), run(None, 1));
    assert!(none.is_empty());
    assert_eq!(with_validation, without, "validating changed what was trained");
    let targets: u64 = held_out().iter().map(|row| row.target_tokens() as u64).sum();
    assert!(one.iter().all(|record| record["target_tokens"] == targets && record["rows"] == 5));
    for (one, other) in losses(&one).iter().zip(losses(&many)) {
        assert!((one - other).abs() <= 1e-6 * one, "{one} {other}");
    }
}

#[test]
fn the_best_step_is_kept_where_asked_and_the_last_one_else() {
    let tiny = Tiny::new();
    let run = |more: Value| {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(&tiny, folder.path(), rows(), Some(held_out()));
        let outputs = train(&bench, falls_and_rises(more)).unwrap();
        let facts = outputs["metrics"].description.facts.clone();
        (losses(&records(&outputs, "validation")), adapter(&outputs), facts)
    };
    let (all, last, facts) = run(json!({}));
    let (same, best, best_facts) = run(json!({"keep_best": true}));
    assert_eq!(all, same);
    // The first is that of the untrained model, which is no candidate.
    let lowest = 1 + lowest(&all[1..]);
    assert!(lowest > 1 && lowest + 2 < all.len(), "the loss should fall and rise: {all:?}");
    assert_eq!((&facts["best_step"], &facts["result_step"]), (&json!(3 * lowest), &json!(90)));
    assert_eq!(best_facts["result_step"], 3 * lowest);
    assert_ne!(best, last);
    // The best step's weights are those of a run that ends there.
    let (_, ended_there, _) = run(json!({"max_steps": 3 * lowest}));
    assert_eq!(best, ended_there);
}

#[test]
fn training_ends_early_and_a_longer_run_ends_there_too() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let bench = bench(&tiny, folder.path(), rows(), Some(held_out()));
    let stopping = json!({"early_stopping": {"patience": 2}, "keep_best": true});
    let outputs = train(&bench, falls_and_rises(stopping.clone())).unwrap();
    let all = losses(&records(&outputs, "validation"));
    let lowest = 1 + lowest(&all[1..]);
    assert_eq!(all.len(), lowest + 3, "two more after the lowest: {all:?}");
    let facts = &outputs["metrics"].description.facts;
    assert_eq!(facts["ended_early"], json!({"at": 3 * (lowest + 2), "of": 90}));
    let mut longer = stopping;
    longer["epochs"] = 40.into();
    let again = train(&bench, falls_and_rises(longer)).unwrap();
    assert_eq!(adapter(&again), adapter(&outputs));
    assert_eq!(records(&again, "train").len(), records(&outputs, "train").len());
}

#[test]
fn a_longer_run_goes_on_from_a_shorter_one_with_its_best_step() {
    let tiny = Tiny::new();
    for keep_best in [false, true] {
        // The shorter run ends between two validations, and its last one is its own.
        let run = |max_steps: u64| falls_and_rises(json!({"keep_best": keep_best, "max_steps": max_steps}));
        let (used, fresh) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let used = bench(&tiny, used.path(), rows(), Some(held_out()));
        for shorter in [7, 25, 26] {
            train(&used, run(shorter)).unwrap();
        }
        let continued = train(&used, run(80)).unwrap();
        let at_once = train(&bench(&tiny, fresh.path(), rows(), Some(held_out())), run(80)).unwrap();
        assert_eq!(adapter(&continued), adapter(&at_once), "keep_best: {keep_best}");
        for kind in ["train", "validation"] {
            assert_eq!(records(&continued, kind), records(&at_once, kind), "keep_best: {keep_best}");
        }
    }
}

#[test]
fn damaged_best_weights_cost_the_steps_that_name_them() {
    let tiny = Tiny::new();
    let run = |max_steps: u64| {
        falls_and_rises(json!({"keep_best": true, "max_steps": max_steps, "save_every": 1, "keep_last": 30}))
    };
    let (used, fresh) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let bench_used = bench(&tiny, used.path(), rows(), Some(held_out()));
    train(&bench_used, run(12)).unwrap();
    let best = bench_used.working::<Train>().join("best");
    let mut files: Vec<_> = fs::read_dir(&best).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let newest = files.iter().max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap();
    let mut bytes = fs::read(newest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(newest, bytes).unwrap();
    let continued = train(&bench_used, run(80)).unwrap();
    let at_once = train(&bench(&tiny, fresh.path(), rows(), Some(held_out())), run(80)).unwrap();
    assert_eq!(adapter(&continued), adapter(&at_once));
    assert_eq!(records(&continued, "validation"), records(&at_once, "validation"));
}

#[test]
fn what_goes_by_a_validation_needs_one() {
    let problems = |more: Value| training::problems(with(more), &engine::stage::InputFacts::new());
    for (wrong, name) in [
        (json!({"eval_steps": 3}), "eval_steps"),
        (json!({"keep_best": true}), "keep_best"),
        (json!({"early_stopping": {"patience": 1}}), "early_stopping"),
    ] {
        let found = problems(wrong);
        assert_eq!(found, [format!("`{name}` goes by the validation loss, and there is no `validation`")]);
    }
    let none: [&str; 0] = [];
    assert_eq!(problems(json!({"validation": "held_out", "keep_best": true, "eval_steps": 3})), none);
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let masked = stages::data::artifact::TokenRow::document(vec![3, 4], vec![stages::data::artifact::IGNORE_INDEX; 2]);
    let bench = bench(&tiny, folder.path(), rows(), Some(vec![masked]));
    let error = train(&bench, json!({"validation": "held_out"})).unwrap_err();
    assert!(error.message.contains("no validation row has a target token"), "{error:?}");
}

/// A bench with two tasks over the same rows, and the parameters that name them.
fn with_tasks(tiny: &Tiny, folder: &std::path::Path) -> (TestBench, Value) {
    let task = |name: &str, rest: &str| {
        let path = folder.join(format!("{name}.yaml"));
        let head = format!("task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: rows.jsonl}}}}\n");
        fs::write(&path, format!("{head}test_split: test\ndoc_to_text: \"{{{{a}}}} and {{{{b}}}} are\"\n{rest}"))
            .unwrap();
        path
    };
    let choice = "output_type: multiple_choice\ndoc_to_choice: [two, three, four]\ndoc_to_target: right\n\
                  metric_list: [{metric: acc}, {metric: brier_score}]\n";
    let target = "output_type: loglikelihood\ndoc_to_target: three\nmetric_list: [{metric: perplexity}]\n";
    let writes = "output_type: generate_until\ndoc_to_target: three\nmetric_list: [{metric: exact_match}]\n";
    let rows = folder.join("rows.jsonl");
    let row = |at: usize| json!({"a": at, "b": 1, "right": at % 3}).to_string() + "\n";
    fs::write(&rows, (0..5).map(row).collect::<String>()).unwrap();
    let mut bench = bench(tiny, folder, training::rows(), Some(held_out())).file("task_data", &rows).unwrap();
    for (name, rest) in [("sums", choice), ("threes", target), ("writes", writes)] {
        bench = bench.file(&format!("tasks../{name}.yaml"), &task(name, rest)).unwrap();
    }
    (bench, json!({"tasks": ["./sums.yaml", "./threes.yaml"], "task_data": "./rows.jsonl"}))
}

#[test]
fn tasks_are_asked_every_few_steps_and_train_nothing() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let (asked, mut tasks) = with_tasks(&tiny, folder.path());
    tasks["every_steps"] = 4.into();
    let lora = json!({"rank": 4, "dropout": 0.3});
    let outputs = train(&asked, json!({"epochs": 3, "lora": lora, "validation_tasks": tasks})).unwrap();
    let found = records(&outputs, "tasks");
    let steps: Vec<u64> = found.iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 4, 8, 9]);

    // Once more without, and with each epoch's end.
    let without_folder = tempfile::tempdir().unwrap();
    let without = bench(&tiny, without_folder.path(), rows(), None);
    assert_eq!(
        adapter(&train(&without, json!({"epochs": 3, "lora": lora})).unwrap()),
        adapter(&outputs),
        "asking tasks changed what was trained"
    );
    tasks.as_object_mut().unwrap().remove("every_steps");
    let other = tempfile::tempdir().unwrap();
    let (by_epoch, _) = with_tasks(&tiny, other.path());
    let by_epoch = train(&by_epoch, json!({"epochs": 3, "lora": lora, "validation_tasks": tasks})).unwrap();
    let steps: Vec<u64> = records(&by_epoch, "tasks").iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 3, 6, 9]);

    // The figures are those that `evaluate` finds of the result, to the bit, and they have moved.
    let evaluated = |adapter: bool| {
        let folder = tempfile::tempdir().unwrap();
        let (mut bench, with) = with_tasks(&tiny, folder.path());
        let mut parameters = json!({"model": "base", "tasks": with["tasks"], "task_data": with["task_data"]});
        if adapter {
            bench = bench.input_of("trained.adapter", &outputs["adapter"].folder).unwrap();
            parameters["adapter"] = "trained".into();
        }
        bench.run::<Evaluate>(parameters).unwrap()["metrics"].description.facts.clone()
    };
    for (record, facts) in [(&found[0], evaluated(false)), (found.last().unwrap(), evaluated(true))] {
        for name in ["sums.acc,none", "sums.brier_score,none", "threes.perplexity,none"] {
            assert_eq!(record[name], facts[name], "{name}: {record}");
        }
    }
    assert_ne!(found[0]["threes.perplexity,none"], found.last().unwrap()["threes.perplexity,none"]);
    assert_eq!(outputs["metrics"].description.facts["sums.acc,none"], found.last().unwrap()["sums.acc,none"]);
}

#[test]
fn a_run_that_goes_on_asks_tasks_when_one_without_a_break_does() {
    let tiny = Tiny::new();
    let run = |steps: &[u64]| {
        let folder = tempfile::tempdir().unwrap();
        let (bench, mut tasks) = with_tasks(&tiny, folder.path());
        tasks["every_steps"] = 2.into();
        let run = |steps: &u64| {
            let with =
                json!({"epochs": 9, "max_steps": steps, "scheduler": {"name": "constant"}, "validation_tasks": tasks});
            let outputs = train(&bench, with).unwrap();
            fs::read(outputs["metrics"].folder.join("metrics.jsonl")).unwrap()
        };
        let made: Vec<Vec<u8>> = steps.iter().map(run).collect();
        made[made.len() - 1].clone()
    };
    assert_eq!(run(&[3, 4, 9]), run(&[9]));
}

#[test]
fn tasks_that_cannot_be_asked_are_told() {
    let problems = |tasks: Value, more: Value| {
        let mut with = with(more);
        with["validation_tasks"] = tasks;
        training::problems(with, &engine::stage::InputFacts::new())
    };
    for (tasks, more, message) in [
        (json!({"limit": 3}), json!({}), "`validation_tasks` names no `tasks`"),
        (json!({"tasks": []}), json!({}), "`tasks` is empty"),
        (json!({"tasks": ["piqa", "piqa"]}), json!({}), "the task `piqa` is named twice"),
        (json!({"tasks": ["gsm8k"]}), json!({}), "the task `gsm8k` generates text"),
        (json!({"tasks": ["piqa"]}), json!({"backend": "torch"}), "`validation_tasks`"),
        (json!({"tasks": ["hellaswaq"]}), json!({}), "there is no task `hellaswaq`"),
    ] {
        let found = problems(tasks, more);
        assert!(found.len() == 1 && found[0].contains(message), "{message}: {found:?}");
    }
    let none: [&str; 0] = [];
    assert_eq!(problems(json!({"tasks": ["piqa"], "every_steps": 5}), json!({})), none);
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let (bench, mut tasks) = with_tasks(&tiny, folder.path());
    tasks["tasks"] = json!(["./writes.yaml"]);
    let error = train(&bench, json!({"validation_tasks": tasks})).unwrap_err();
    assert!(error.message.contains("`writes` generates text"), "{error:?}");
    assert!(error.help.as_ref().is_some_and(|help| help.contains("uses: evaluate")), "{error:?}");
}
