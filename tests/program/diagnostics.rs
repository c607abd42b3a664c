//! What is said about a wrong pipeline file, compared as text with `tests/diagnostics/*.txt`.
//!
//! After a deliberate change, `PIPELINE_BLESS=1 cargo test --release --test program diagnostics::` writes the texts
//! anew.

use std::fs;
use std::path::{Path, PathBuf};

use test_harness::test;

use crate::support::{Project, Ran, program};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/diagnostics")
}

/// Runs the program beside the broken files and compares everything it printed with `NAME.txt`.
#[track_caller]
fn compare(name: &str, arguments: &[&str], code: i32) {
    let home = tempfile::tempdir().unwrap();
    let mut command = program(&folder());
    command.args(arguments).env("PIPELINE_HOME", home.path());
    let ran = Ran::of(command, arguments).ends_with(code);
    let said = format!("{}{}", ran.stdout, ran.stderr).replace(&*folder().to_string_lossy(), "[FOLDER]");
    let expected = folder().join(format!("{name}.txt"));
    if std::env::var_os("PIPELINE_BLESS").is_some() {
        fs::write(&expected, &said).unwrap();
    }
    let expected = fs::read_to_string(&expected).unwrap_or_default();
    assert_eq!(said, expected, "\n--- said\n{said}--- expected\n{expected}---");
}

macro_rules! rejected {
    ($($test:ident: $file:literal,)*) => {
        $(#[test]
        fn $test() {
            compare($file, &["validate", concat!($file, ".yaml")], 2);
        })*

        /// Every broken file in the folder has its test.
        const FILES: &[&str] = &[$($file),*];
    };
}

rejected! {
    unknown_keys_name_the_nearest_known_one: "unknown-key",
    wrong_types_say_what_is_expected: "wrong-type",
    unknown_stages_name_the_nearest_one: "unknown-stage",
    unknown_stage_kinds_name_the_nearest_one: "unknown-kind",
    cycles_name_their_stages: "cycle",
    wrong_kinds_say_what_the_field_takes: "wrong-kind",
    duplicate_keys_show_both_places: "duplicate-key",
    an_empty_file_says_so: "empty",
    a_file_that_is_no_yaml_points_to_the_place: "not-yaml",
    a_source_that_is_not_there_is_found_before_anything_runs: "missing-source",
    columns_count_characters: "wide-text",
    unknown_variables_and_secrets_are_refused: "references",
    missing_fields_are_named: "missing-field",
    merge_keys_are_refused: "merge-key",
    all_mistakes_of_a_file_are_reported_at_once: "many",
    a_file_of_another_tool_is_named_once: "foreign-file",
}

/// The files of `broken/`, each with what is said about it and the exit code beside it.
#[test]
fn each_broken_file_is_answered_as_its_golden_text_says() {
    let folder = folder().join("broken");
    let mut files: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".yaml"))
        .collect();
    files.sort();
    assert!(files.len() >= 60, "{}", files.len());
    let home = tempfile::tempdir().unwrap();
    let mut failed = Vec::new();
    for file in files {
        let mut command = program(&folder);
        command.args(["validate", &file]).env("PIPELINE_HOME", home.path().join("none"));
        let ran = Ran::of(command, &["validate", &file]);
        let said = format!("{}{}exit code {}\n", ran.stdout, ran.stderr, ran.code.unwrap())
            .replace(&*folder.to_string_lossy(), "[FOLDER]");
        let expected = folder.join(&file).with_extension("txt");
        if std::env::var_os("PIPELINE_BLESS").is_some() {
            fs::write(&expected, &said).unwrap();
        }
        let expected = fs::read_to_string(&expected).unwrap_or_default();
        if said != expected {
            failed.push(format!("--- {file}, said\n{said}--- expected\n{expected}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(!home.path().join("none").exists(), "a check makes no home");
}

#[test]
fn every_broken_file_has_a_test() {
    let mut names: Vec<String> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .filter(|name| name != "warnings")
        .collect();
    names.sort();
    let mut tested: Vec<&str> = FILES.to_vec();
    tested.sort_unstable();
    assert_eq!(names, tested);
}

#[test]
fn a_file_that_is_not_there() {
    compare("no-file", &["validate", "no-such.yaml"], 2);
}

#[test]
fn a_wrong_override_is_shown_like_a_wrong_file() {
    let arguments = ["plan", "warnings.yaml", "rows.spilt=train", "rowz.split=train", "rows.template", "vars.x=1"];
    compare("override", &arguments, 2);
}

/// Each command of the golden text, in a project where nothing has been run, with what it prints and how it ends.
#[test]
fn mistakes_on_the_command_line_are_answered_as_the_golden_text_says() {
    let expected_path = folder().join("commands.txt");
    let expected = fs::read_to_string(&expected_path).unwrap();
    let project = Project::with_pipeline("data.yaml");
    let mut said = String::new();
    for line in expected.lines().filter_map(|line| line.strip_prefix("$ pipeline ")) {
        let ran = project.run(&line.split(' ').collect::<Vec<_>>());
        let code = ran.code.unwrap();
        said += &format!("$ pipeline {line}\n{}{}exit code {code}\n\n", ran.stdout, ran.stderr);
    }
    let said = said.replace(&*project.path("").to_string_lossy(), "[FOLDER]/");
    if std::env::var_os("PIPELINE_BLESS").is_some() {
        fs::write(&expected_path, &said).unwrap();
    }
    let expected = fs::read_to_string(&expected_path).unwrap();
    assert_eq!(said, expected, "\n--- said\n{said}--- expected\n{expected}---");
}

#[test]
fn an_import_shows_its_problems_in_the_other_tools_file() {
    compare("import", &["import", "import/axolotl.yaml"], 2);
}

#[test]
fn several_files_are_all_checked() {
    compare("several", &["validate", "warnings.yaml", "unknown-stage.yaml", "empty.yaml"], 2);
}

#[test]
fn problems_are_printed_for_programs_too() {
    let home = tempfile::tempdir().unwrap();
    let mut command = program(&folder());
    command.args(["validate", "unknown-key.yaml", "--format", "json"]).env("PIPELINE_HOME", home.path());
    let ran = Ran::of(command, &["validate"]).ends_with(2);
    let files = ran.json();
    assert_eq!(files[0]["valid"], false);
    let problem = &files[0]["problems"][0];
    assert_eq!(
        (&problem["code"], &problem["line"], &problem["column"]),
        (&"unknown-key".into(), &6.into(), &35.into())
    );
    assert_eq!(ran.stderr, "");
}

#[test]
fn of_a_very_long_line_the_part_around_the_place_is_shown() {
    let project = Project::new();
    project.write(
        "long.yaml",
        &format!("{{ version: 1, name: \"{}\", stagez: {{}}, stages: {{}} }}\n", "x".repeat(70_000)),
    );
    let ran = project.run(&["validate", "long.yaml"]).ends_with(2);
    let ran = ran.warns("[long.yaml:1:70025]").warns("x\", stagez: {}");
    let shown = |line: &str| !line.contains("│") || line.chars().count() <= 120;
    assert!(ran.stderr.lines().all(shown), "{ran}");
}

#[test]
fn ascii_is_used_where_the_locale_has_nothing_else() {
    let mut command = program(&folder());
    command.args(["validate", "unknown-stage.yaml"]).env("LANG", "C");
    let ran = Ran::of(command, &["validate"]).ends_with(2);
    assert!(ran.stderr.is_ascii(), "{ran}");
}

#[test]
fn nothing_is_left_behind_by_a_check() {
    let project = Project::new();
    project.write("p.yaml", "version: 1\nname: p\nstages: {}\n");
    project.run(&["validate", "p.yaml"]);
    let files: Vec<_> = fs::read_dir(project.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files, ["p.yaml"]);
}

#[test]
fn what_was_meant_is_said_of_a_command_line() {
    let project = Project::new();
    project.write("first.yaml", "version: 1\nstages: { s: { uses: command, with: { run: 'true' } } }\n");
    project.run(&["run", "frist.yaml"]).ends_with(2).warns("did you mean `first.yaml`?");
    project.run(&["validate", "."]).ends_with(2).warns("pipeline files there: `first.yaml`");
    project.run(&["run", "first.yaml", "--max-steps", "2"]).ends_with(2).warns("`STAGE.max_steps=VALUE`");
    project.run(&["run", "first.yaml", "run=false"]).ends_with(2).warns("did you mean `s.run`?");
    project.run(&["run", "first.yaml", "--keep-goin"]).ends_with(2).warns("--keep-going");
}

/// Stages with keys and values as other programs have them, each with what the help of one of its problems contains.
const WORDS_OF_OTHER_PROGRAMS: &[(&str, &str)] = &[
    ("uses: train, with: { lr: 1e-4 }", "`optimizer.learning_rate`"),
    ("uses: train, with: { optimizer: { lr: 1e-4 } }", "`learning_rate`"),
    ("uses: train, with: { weight_decay: 0.1 }", "`optimizer.weight_decay`"),
    ("uses: train, with: { save_steps: 100 }", "`save_every`"),
    ("uses: train, with: { save_total_limit: 2 }", "`keep_last`"),
    ("uses: train, with: { load_best_model_at_end: true }", "`keep_best: true`"),
    ("uses: train, with: { scheduler: { type: cosine } }", "write `name`"),
    ("uses: train, with: { scheduler: { dtype: f32 } }", "`dtype` belongs one level up, beside `scheduler`"),
    ("uses: train, with: { scheduler: { num_warmup_steps: 10 } }", "`warmup_steps`"),
    ("uses: train, with: { num_warmup_steps: 10 }", "`scheduler: { warmup_steps: 100 }`"),
    ("uses: train, with: { warmup_steps: 10 }", "`scheduler.warmup_steps`"),
    ("uses: train, with: { lr_scheduler: cosine }", "`scheduler: cosine`"),
    ("uses: train, with: { lr_scheduler_type: cosine }", "`scheduler: cosine`"),
    ("uses: train, with: { lora: { r: 8 } }", "write `rank`"),
    ("uses: train, with: { lora: { lora_alpha: 8 } }", "`alpha`"),
    ("uses: train, with: { lora_r: 8 }", "`lora.rank`"),
    ("uses: train, with: { lora_drpout: 0.1 }", "`lora.dropout`"),
    ("uses: train, with: { learning_rat: 1e-4 }", "`optimizer.learning_rate`"),
    ("uses: train, with: { max_length: 64 }", "`max_seq_len` in the `tokenize` stage"),
    ("uses: train, with: { max_seq_length: 64 }", "`max_seq_len` in the `tokenize` stage"),
    ("uses: train, with: { eval_strategy: steps }", "`eval_steps`"),
    ("uses: train, with: { evaluation_strategy: steps }", "`eval_steps`"),
    ("uses: train, with: { finetuning_type: lora }", "`method`"),
    ("uses: train, with: { flash_attn: true }", "`attention`"),
    ("uses: train, with: { flash_attention: true }", "`attention`"),
    ("uses: train, with: { wandb_project: x }", "`track: { name: wandb"),
    ("uses: train, with: { report_to: none }", "leave it out"),
    ("uses: train, with: { logging_steps: 1 }", "leave it out"),
    ("uses: train, with: { group_by_length: true }", "a `pack` stage"),
    ("uses: train, with: { gradient_checkpointing: true }", "`activation_checkpointing`"),
    ("uses: train, with: { bf16: true }", "`dtype: bf16`"),
    ("uses: train, with: { fp16: true }", "`dtype: f16`"),
    ("uses: train, with: { dtype: float16 }", "did you mean `f16`?"),
    ("uses: train, with: { dtype: bfloat16 }", "did you mean `bf16`?"),
    ("uses: train, with: { dtype: float32 }", "did you mean `f32`?"),
    ("uses: train, with: { epochs: 1.5 }", "write an integer, or `max_steps`"),
    ("uses: train, with: { epochs: 1.0 }", "write 1"),
    ("uses: train, with: { max_steps: -1 }", "leave it out"),
    ("uses: train, with: {}, resources: { device: gpu }", "did you mean `cuda`, `rocm` or `metal`?"),
    ("uses: train, max_steps: 3", "`max_steps` is a parameter of `train`: it belongs below `with:`"),
    ("uses: dataset, with: { source: ./x, split: { train: 0.9 } }", "`train_test_split: { test_size: 0.01 }`"),
    ("uses: dataset, with: null, source: ./x", "`source` is a parameter of `dataset`: it belongs below `with:`"),
    ("uses: tokenize, with: { sequence_len: 64 }", "write `max_seq_len`"),
    ("uses: tokenize, with: { cutoff_len: 64 }", "write `max_seq_len`"),
    ("uses: tokenize, with: { max_length: 64 }", "write `max_seq_len`"),
    ("uses: tokenize, with: { max_seq_length: 64 }", "write `max_seq_len`"),
    ("uses: pack, with: { sequence_len: 64 }", "write `max_seq_len`"),
    ("uses: pack, with: { cutoff_len: 64 }", "write `max_seq_len`"),
    ("uses: pack, with: { max_length: 64 }", "write `max_seq_len`"),
    ("uses: pack, with: { max_seq_length: 64 }", "write `max_seq_len`"),
    ("uses: merge, with: { base: base }", "write `model`"),
    ("uses: evaluate, with: { metrics: [ppl] }", "did you mean `perplexity`?"),
];

#[test]
fn words_of_other_programs_are_answered_with_ours() {
    let project = Project::new();
    let mut failed = String::new();
    for (stage, expected) in WORDS_OF_OTHER_PROGRAMS {
        project.write("p.yaml", &format!("version: 1\nstages: {{ x: {{ {stage} }} }}\n"));
        let found = engine::plan::load(&project.path("p.yaml"), &[], &stages::registry()).err().unwrap().problems;
        let said: Vec<&str> = found.iter().filter_map(|problem| problem.help.as_deref()).collect();
        if !said.iter().any(|help| help.contains(expected)) {
            failed += &format!("{stage}: expected {expected}, found {said:?}\n");
        }
        for written in found.iter().filter_map(|problem| problem.message.strip_prefix("unknown key ")) {
            let itself = format!("did you mean {written}?");
            assert!(!said.contains(&itself.as_str()), "{stage}: {said:?}");
        }
    }
    assert!(failed.is_empty(), "{failed}");
}
