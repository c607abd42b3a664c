//! The commands that look at a pipeline and its results: show, export, graph, runs, logs, schema.

use test_harness::test;

use crate::support::{Project, Ran};

#[test]
fn show_prints_rows_as_text_with_trained_tokens_and_pack_borders_marked() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["show", "data.yaml", "questions"]).ends_with(2).warns("pipeline run");
    project.run(&["run", "data.yaml"]).ends_with(0);
    project.run(&["show", "data.yaml", "questions", "--rows", "1"]).ends_with(0).says("Where is it that the");
    // Trained tokens stand in brackets: the answer, and not the question.
    let tokens = project.run(&["show", "data.yaml", "question_tokens", "--rows", "1"]).ends_with(0);
    let trained: String = tokens.stdout.split('⟦').skip(1).filter_map(|rest| rest.split('⟧').next()).collect();
    assert!(trained.contains("It is "), "{tokens}");
    assert!(!trained.contains("Question"), "{tokens}");
    assert!(tokens.stdout.contains("Question: Where"), "{tokens}");
    let packs = project.run(&["show", "data.yaml", "question_packs.packs", "--rows", "1"]).ends_with(0);
    assert!(packs.stdout.matches("Question: ").count() > 1, "{packs}");
    project.run(&["show", "data.yaml", "fresh.model"]).ends_with(0).says("hidden_size");
    let json = project.run(&["show", "data.yaml", "text", "--rows", "2", "--format", "json"]).ends_with(0).json();
    assert_eq!(json["kind"], "rows");
}

#[test]
fn of_a_stage_with_several_outputs_all_are_shown() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml"]).ends_with(0);
    let both = project.run(&["show", "data.yaml", "fresh"]).ends_with(0);
    both.says("fresh.model (").says("fresh.tokenizer (").says("hidden_size").says("vocab_size");
    let json = project.run(&["show", "data.yaml", "fresh", "--format", "json"]).ends_with(0).json();
    assert_eq!((&json[0]["kind"], &json[1]["kind"]), (&"model".into(), &"tokenizer".into()));
    // What is written to a folder has to be named.
    project.run(&["export", "data.yaml", "fresh", "out"]).ends_with(2).warns("fresh.model").warns("fresh.tokenizer");
    project.run(&["show", "data.yaml", "fresh.tokeniser"]).ends_with(2).warns("did you mean `fresh.tokenizer`?");
}

#[test]
fn a_warning_of_the_file_is_told_once_however_many_outputs_are_shown() {
    let project = Project::new();
    project.write("rows.jsonl", &(0..4).map(|row| format!("{{\"text\": \"row {row}\"}}\n")).collect::<String>());
    let rows = "{ uses: dataset, with: { source: ./rows.jsonl, train_test_split: { test_size: 2 } } }";
    project.write("p.yaml", &format!("version: 1\nvars: {{ x: 1 }}\nstages:\n  rows: {rows}\n"));
    project.run(&["run", "p.yaml"]).ends_with(0);
    let warnings = |output: &[&str]| {
        let shown = project.run(&[&["show", "p.yaml"], output].concat()).ends_with(0).says("rows.test (");
        shown.stderr.matches("[unused-variable]").count()
    };
    assert_eq!([warnings(&["rows"]), warnings(&["rows.test"]), warnings(&["rows", "--quiet"])], [1, 1, 0]);
}

#[test]
fn export_copies_an_output_out_of_the_store() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml"]).ends_with(0);
    project.run(&["export", "data.yaml", "fresh.model", "out/model"]).ends_with(0);
    assert!(project.path("out/model/config.json").is_file() && project.path("out/model/model.safetensors").is_file());
    project.run(&["export", "data.yaml", "fresh.model", "out/model"]).ends_with(2).warns("out/model");
}

#[test]
fn graph_draws_every_stage_and_edge() {
    let project = Project::with_pipeline("data.yaml");
    let mermaid = project.run(&["graph", "data.yaml"]).ends_with(0).says("flowchart");
    let dot = project.run(&["graph", "data.yaml", "--format", "dot"]).ends_with(0).says("digraph");
    for stage in ["text", "fresh", "text_tokens", "question_packs"] {
        assert!(mermaid.stdout.contains(stage) && dot.stdout.contains(stage), "{mermaid}\n{dot}");
    }
    assert_eq!(dot.stdout.matches("->").count(), 7, "{dot}");
}

#[test]
fn runs_and_logs_tell_what_happened() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["runs", "ls", "--format", "json"]).ends_with(0).lists_nothing();
    project.run(&["run", "data.yaml"]).ends_with(0);
    project.run(&["run", "data.yaml"]).ends_with(0);
    let runs = project.run(&["runs", "ls", "--format", "json"]).ends_with(0).json();
    assert_eq!(runs.as_array().unwrap().len(), 2);
    assert_eq!((&runs[0]["counts"]["cached"], &runs[1]["counts"]["done"]), (&7.into(), &7.into()));
    let first = runs[1]["run"].as_str().unwrap();
    project.run(&["runs", "show", first]).ends_with(0).says("question_packs").says("succeeded");
    project.run(&["logs", "text"]).ends_with(0);
    project.run(&["logs", first, "text"]).ends_with(0);
    project.run(&["logs", first, "txet"]).ends_with(2).warns("did you mean `text`?");
}

#[test]
fn of_a_run_that_found_everything_cached_it_is_shown_what_that_took() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml"]).ends_with(0);
    let ran = project.run(&["runs", "show"]).ends_with(0);
    assert!(!ran.stdout.contains("(in brackets"), "{ran}");
    project.run(&["run", "data.yaml"]).ends_with(0);
    let cached = project.run(&["runs", "show"]).ends_with(0).says("in brackets: what it took when it was made");
    let of_stage = cached.stdout.lines().find(|line| line.starts_with("text_tokens")).unwrap();
    assert!(of_stage.contains("cached") && of_stage.contains("s)") && of_stage.contains("MiB)"), "{of_stage}");
}

#[test]
fn the_options_of_run_are_listed_by_what_they_are_about() {
    let help = Project::new().run(&["run", "--help"]).ends_with(0).stdout;
    let place = |text: &str| help.find(text).unwrap_or_else(|| panic!("no {text:?} in {help}"));
    let order = ["Stages:", "--until", "--only", "--prompt", "--smoke", "Execution:", "--jobs", "--offline"];
    let order = [&order[..], &["Shared cache:", "--remote", "--push", "Output:", "--format", "Everywhere:", "--home"]];
    let places: Vec<usize> = order.concat().into_iter().map(place).collect();
    assert!(places.is_sorted(), "{places:?} {help}");
    assert!(place("Everywhere:") < place("-q, --quiet") && place("-q, --quiet") < place("-v, --verbose"), "{help}");
}

#[test]
fn a_report_is_shown_in_words_and_not_as_json() {
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml"]).ends_with(0);
    let shown = project.run(&["show", "lora.yaml", "merged"]).ends_with(0).says("proof.layers.max_abs_difference");
    assert!(!shown.stdout.contains(['{', '[']), "{shown}");
    assert!(shown.stdout.contains("config.hidden_size") && !shown.stdout.contains("left out"), "{shown}");
}

#[test]
fn the_schema_knows_every_stage_kind() {
    let project = Project::new();
    let schema = project.run(&["schema"]).ends_with(0).json();
    let text = schema.to_string();
    for kind in ["new_model", "download", "dataset", "tokenize", "pack", "train", "merge", "evaluate", "generate"] {
        assert!(text.contains(&format!("\"{kind}\"")), "{kind}");
    }
}

#[test]
fn shells_and_man_know_every_command() {
    let project = Project::new();
    let commands = ["run", "validate", "plan", "show", "export", "cache", "runs", "logs", "completions", "devices"];
    for shell in ["bash", "zsh", "fish"] {
        let script = project.run(&["completions", shell]).ends_with(0);
        assert!(commands.iter().all(|command| script.stdout.contains(command)), "{script}");
        assert!(script.stdout.contains("keep-going") && !script.stdout.contains("__stage"), "{shell}");
    }
    project.run(&["completions", "csh"]).ends_with(2);
    project.run(&["man", "man1"]).ends_with(0);
    for command in commands {
        let page = std::fs::read_to_string(project.path(&format!("man1/pipeline-{command}.1"))).unwrap();
        assert!(page.starts_with(".ie") && page.contains(".SH OPTIONS"), "{page}");
    }
    assert!(!project.path("man1/pipeline-__stage.1").exists());
}

/// Asserts that nothing of a program's words would be obeyed by a terminal.
#[track_caller]
fn nothing_is_hidden(ran: &Ran) {
    let hidden = |letter: char| (letter.is_control() && letter != '\n') || ('\u{202a}'..='\u{202e}').contains(&letter);
    assert!(!ran.stdout.contains(hidden) && !ran.stderr.contains(hidden), "{:?}", (&ran.stdout, &ran.stderr));
}

#[test]
fn control_characters_of_a_file_reach_no_terminal() {
    let project = Project::new();
    let (file, odd) = ("odd\u{1b}]0;.yaml", "s\\e[31m\\u009b\\u202e");
    let stages = format!("version: 1\nstages: {{ \"{odd}\": {{ uses: \"{odd}\" }} }}\n");
    for (text, said) in [
        (stages.clone(), "`s\\x1b[31m\\x9b\\u{202e}`"),
        (format!("{stages}vars: {{ a: \"\u{9b}\u{202e}\u{1b}\" }}\n"), "not YAML"),
    ] {
        project.write(file, &text);
        for format in ["text", "json", "github", "sarif", "junit"] {
            let ran = project.run(&["validate", file, "--format", format]).ends_with(2);
            nothing_is_hidden(&ran);
            assert!(format != "text" || ran.stderr.contains(said), "{ran}");
        }
        for command in ["run", "plan", "graph"] {
            nothing_is_hidden(&project.run(&[command, file]).ends_with(2));
        }
    }
}

#[test]
fn control_characters_of_a_result_reach_no_terminal() {
    let project = Project::new();
    let script = r#"printf '10%%\r20%%\n\033]0;P\007\302\233 \342\200\256\n'; echo x >"$OUTPUT_o/$(printf 'a\033[31m\nb\302\233')"; printf '{"loss\302\233": 1}' >"$OUTPUT_m/metrics.json""#;
    let script = serde_json::Value::from(script);
    let stage = format!("{{ uses: command, with: {{ run: {script}, outputs: {{ o: files, m: metrics }} }} }}");
    project.write("p.yaml", &format!("version: 1\nname: p\nstages:\n  s: {stage}\npublish: {{ s.o: ./out }}\n"));
    nothing_is_hidden(&project.run(&["run", "p.yaml"]).ends_with(0));
    let shown = project.run(&["show", "p.yaml", "s.o"]).ends_with(0).says("a\\x1b[31m\\nb\\x9b");
    nothing_is_hidden(&shown);
    let log = project.run(&["logs", "s"]).ends_with(0).says("10%\n20%\n\\x1b]0;P\\x07\\x9b \\u{202e}\n");
    nothing_is_hidden(&log);
    for arguments in [
        &["show", "p.yaml", "s.m"][..],
        &["show", "p.yaml", "s.o", "--format", "json"],
        &["logs", "s", "--format", "json"],
        &["runs", "show"],
        &["runs", "show", "latest", "s"],
        &["runs", "provenance", "out"],
        &["runs", "compare", "s"],
        &["cache", "ls"],
        &["cache", "verify"],
        &["plan", "p.yaml"],
    ] {
        nothing_is_hidden(&project.run(arguments));
    }
}

#[test]
fn a_command_that_is_named_has_the_overrides_and_the_home_of_the_command_line() {
    let project = Project::with_pipeline("data.yaml");
    let (shorter, home) = ("text_packs.max_seq_len=32", ["--home", "my home"]);
    let run = |more: &[&str]| project.run(&[&["run", "data.yaml", shorter], &home[..], more].concat());
    let ran = run(&["--until", "text_packs"]).ends_with(0);
    let next = ran.warns(&format!("next: pipeline show data.yaml text_packs {shorter} --home 'my home'\n"));
    assert_eq!(next.stderr.matches("next: ").count(), 1, "{next}");
    project.run(&["show", "data.yaml", "text_packs", shorter, "--home", "my home"]).ends_with(0);
    run(&["--smoke"]).ends_with(0).warns(&format!("next: pipeline run data.yaml {shorter} --home 'my home'\n"));

    // A home of the environment is that of the next command, too.
    let arguments = ["run", "data.yaml", "--until", "text"];
    let mut command = project.command(&arguments);
    command.env("PIPELINE_HOME", "another");
    Ran::of(command, &arguments).ends_with(0).warns("next: pipeline show data.yaml text\n");
}

#[test]
fn an_option_of_run_is_no_parameter_and_a_command_is_found_without_the_word_before_it() {
    let project = Project::with_pipeline("data.yaml");
    let option = project.run(&["show", "data.yaml", "text", "--until"]).ends_with(2);
    option.warns("tip: `--until` is an option of `pipeline run`");
    let parameter = project.run(&["run", "data.yaml", "--max-seq-len=3"]).ends_with(2);
    parameter.warns("tip: a parameter of a stage is set by `STAGE.max_seq_len=VALUE`");
    project.run(&["doctor"]).ends_with(2).warns("tip: the command is `pipeline devices doctor`");
    project
        .run(&["verify"])
        .ends_with(2)
        .warns("tip: the command is `pipeline cache verify` or `pipeline runs verify`");
}

#[test]
fn many_cached_stages_are_not_named_one_by_one() {
    let project = Project::new();
    let stages = (0..25).map(|number| format!("  s{number}: {{ uses: command, with: {{ run: 'true' }} }}\n"));
    project.write("many.yaml", &format!("version: 1\nname: many\nstages:\n{}", stages.collect::<String>()));
    project.run(&["run", "many.yaml"]).ends_with(0);
    let named = |ran: &Ran| ran.stderr.matches(": cached").count();
    let again = project.run(&["run", "many.yaml"]).ends_with(0).warns("all 25 stages are cached");
    assert_eq!(named(&again), 20, "{again}");
    assert_eq!(again.stderr.matches("more stages are cached").count(), 1, "{again}");
    assert_eq!(named(&project.run(&["run", "many.yaml", "-v"]).ends_with(0)), 25);
}
