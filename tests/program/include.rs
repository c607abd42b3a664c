//! Stages of other files under a prefix.

use std::fs;

use test_harness::test;

use crate::support::{Project, Ran};

const MAIN: &str = "version: 1
name: main
vars: { length: 48, question: questions }
include:
  base: ./common/base.yaml
  asked:
    file: ./common/asked.yaml
    vars: { tokenizer: base/fresh, max_seq_len: \"${vars.length}\" }
stages:
  packs: { uses: pack, with: { tokens: asked/tokens, max_seq_len: \"${vars.length}\" } }
publish: { asked/tokens: ./out }
";

const BASE: &str = "version: 1
stages:
  text: { uses: dataset, with: { source: ./data/text.jsonl } }
  fresh:
    uses: new_model
    with: { text: text, vocab_size: 320, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2 }
";

const ASKED: &str = "version: 1
vars: { tokenizer: fresh, max_seq_len: 96, template: \"Q: {question} A: \" }
stages:
  rows:
    uses: dataset
    with:
      source: ./data/questions.jsonl
      column_map: { question: question, output: answer }
      template: \"${vars.template}\"
  tokens:
    uses: tokenize
    needs: [rows]
    with: { dataset: rows, tokenizer: \"${vars.tokenizer}\", max_seq_len: \"${vars.max_seq_len}\" }
";

fn project() -> Project {
    let project = Project::with_pipeline("data.yaml");
    fs::create_dir_all(project.path("common/data")).unwrap();
    for file in ["text.jsonl", "questions.jsonl"] {
        fs::rename(project.path(file), project.path(&format!("common/data/{file}"))).unwrap();
    }
    project.write("common/base.yaml", BASE);
    project.write("common/asked.yaml", ASKED);
    project.write("main.yaml", MAIN);
    project
}

/// The states of a run's stages, by id.
fn states(ran: &Ran) -> Vec<String> {
    let stages = ran.json()["stages"].as_array().unwrap().clone();
    let mut states: Vec<String> = stages
        .iter()
        .map(|stage| format!("{} {}", stage["stage"].as_str().unwrap(), stage["state"].as_str().unwrap()))
        .collect();
    states.sort();
    states
}

#[test]
fn included_stages_run_and_where_a_stage_is_written_changes_no_key() {
    let project = project();
    let run = |arguments: &[&str]| {
        let all: Vec<&str> = ["run", "main.yaml", "--format", "json"].iter().chain(arguments).copied().collect();
        states(&project.run(&all).ends_with(0))
    };
    let all = ["asked/rows done", "asked/tokens done", "base/fresh done", "base/text done", "packs done"];
    assert_eq!(run(&[]), all);
    assert!(project.path("out/part-00000.parquet").is_file());
    // Overrides reach the stages, and the variables of the files.
    let again = run(&["asked/rows.limit=3"]);
    assert_eq!(again[..2], ["asked/rows done", "asked/tokens done"]);
    assert_eq!(run(&["include.asked.vars.max_seq_len=40", "vars.length=40"])[1], "asked/tokens done");
    project.run(&["logs", "asked/tokens"]).ends_with(0);

    // The same stages in one file, under other names and with paths of their own: nothing runs.
    let one = "version: 1
name: one
stages:
  t: { uses: dataset, with: { source: ./common/data/text.jsonl } }
  f:
    uses: new_model
    with: { text: t, vocab_size: 320, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2 }
  r:
    uses: dataset
    with:
      source: ./common/data/questions.jsonl
      column_map: { question: question, output: answer }
      template: \"Q: {question} A: \"
  k: { uses: tokenize, with: { dataset: r, tokenizer: f, max_seq_len: 48 } }
  packs: { uses: pack, with: { tokens: k, max_seq_len: 48 } }
";
    project.write("one.yaml", one);
    project.run(&["run", "one.yaml", "--format", "json"]).ends_with(0).made(0);
}

#[test]
fn an_included_file_may_include_others_and_is_shown_where_it_is_wrong() {
    let project = project();
    project.write("outer.yaml", "version: 1\ninclude: { m: ./main.yaml }\n");
    let validated = project.run(&["validate", "outer.yaml", "common/base.yaml"]).ends_with(0);
    validated.says("outer.yaml: ok, 5 stages").says("common/base.yaml: ok, 2 stages");
    let ran = project.run(&["validate", "outer.yaml"]);
    assert!(ran.stderr.contains("`publish` of an included file is ignored"), "{ran}");
    let graph = project.run(&["graph", "outer.yaml"]).ends_with(0);
    assert!(graph.stdout.contains("m/asked/tokens"), "{graph}");

    // Alone, the second file lacks the tokenizer that it is given; the place is in its own text.
    let alone = project.run(&["validate", "common/asked.yaml"]).ends_with(2);
    alone.warns("common/asked.yaml:13:").reports("unknown-stage");
    project.edit("common/asked.yaml", "max_seq_len: \"${vars.max_seq_len}\"", "max_seq_lne: 7");
    project.edit("main.yaml", "max_seq_len: \"${vars.length}\" }\nstages", "length: 3 }\nstages");
    let wrong = project.run(&["validate", "main.yaml"]).ends_with(2);
    wrong.warns("common/asked.yaml:13:").reports("unknown-key").reports("unknown-variable");
    project.write("main.yaml", MAIN);
    project.write("common/asked.yaml", &ASKED.replace("dataset: rows,", "dataset: rwos,"));
    project.run(&["validate", "main.yaml"]).ends_with(2).reports("unknown-stage").warns("common/asked.yaml:13:");
}

#[test]
fn circles_and_what_cannot_be_included_are_refused_with_their_place() {
    let project = Project::new();
    let stage = "stages: { a: { uses: dataset, with: { source: ./a.jsonl } } }\n";
    for (include, says) in [
        ("include: { x: ./p.yaml }", "files include each other: p.yaml -> p.yaml"),
        ("include: { x: ./q.yaml }", "files include each other: p.yaml -> q.yaml -> p.yaml"),
        ("include: { x: ./none.yaml }", "there is no file `none.yaml`"),
        ("include: { x: ./list.yaml }", "is not a pipeline file"),
        ("include: { x: ./broken.yaml }", "broken.yaml:2:"),
        ("include: { x: ./old.yaml }", "this program reads files of version 1"),
        ("include: { \"x/y\": ./old.yaml }", "cannot be the prefix of stages"),
        ("include: { x: { fiel: ./old.yaml } }", "unknown key `fiel`"),
        ("include: { x: \"${vars.f}\" }", "is read before variables are"),
        ("include: [./old.yaml]", "expected a mapping"),
        ("include: { x: 3 }", "expected a mapping"),
    ] {
        project.write("p.yaml", &format!("version: 1\n{include}\n{stage}"));
        project.write("q.yaml", &format!("version: 1\ninclude: {{ y: ./p.yaml }}\n{stage}"));
        project.write("list.yaml", "- 1\n");
        project.write("broken.yaml", "version: 1\nstages: { a: [\n");
        project.write("old.yaml", &format!("version: 7\n{stage}"));
        project.run(&["validate", "p.yaml"]).ends_with(2).warns(says);
    }
    project.write("p.yaml", "version: 1\nstages: { a/b: { uses: dataset, with: { source: ./a.jsonl } } }\n");
    project.run(&["validate", "p.yaml"]).ends_with(2).reports("bad-stage-id");
    for level in 0..10 {
        let next = level + 1;
        project.write(&format!("l{level}.yaml"), &format!("version: 1\ninclude: {{ l: ./l{next}.yaml }}\n{stage}"));
    }
    project.write("l10.yaml", &format!("version: 1\n{stage}"));
    project.run(&["validate", "l0.yaml"]).ends_with(2).warns("more than 8 levels deep");
}

#[test]
fn a_pipe_is_not_waited_for() {
    let project = Project::new();
    nix::unistd::mkfifo(&project.path("pipe.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    project.write("main.yaml", "version: 1\ninclude: { data: ./pipe.yaml }\n");
    project.run(&["validate", "main.yaml"]).ends_with(2).warns("no regular file").warns("included here");
}

#[test]
fn of_a_file_elsewhere_that_is_no_pipeline_file_nothing_is_shown() {
    let elsewhere = tempfile::tempdir().unwrap();
    let project = Project::new();
    for (text, shown) in [
        ("root:$6$hash:19000:0:99999:7:::\n\tuser:x\n", false),
        ("password: hunter22\nstages: {}\n", false),
        ("- hunter22\n", false),
        ("version: 1\nstages: { s: { uses: dataset, with: { source: x.jsonl, hunter22: 1 } } }\n", true),
    ] {
        let file = elsewhere.path().join("file.yaml");
        fs::write(&file, text).unwrap();
        project.write("main.yaml", &format!("version: 1\ninclude: {{ data: {} }}\n", file.display()));
        let ran = project.run(&["validate", "main.yaml"]).ends_with(2);
        let is_shown = ran.stderr.contains("hunter22") || ran.stderr.contains("$6$hash");
        assert_eq!(is_shown, shown, "{ran}");
        assert!(shown || ran.stderr.contains("is not a pipeline file"), "{ran}");
    }
}
