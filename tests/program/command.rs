//! Programs of the user's as stages: what is in the key of one, and what becomes of the machine's own odd names.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;

use test_harness::test;

use crate::support::{Project, Ran};

fn odd(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

#[test]
fn whether_a_file_can_be_executed_is_part_of_what_the_next_program_reads() {
    let project = Project::new();
    project.write(
        "p.yaml",
        r#"
version: 1
name: bits
stages:
  made:
    uses: command
    with:
      run: |
        echo 'echo hello' >"$OUTPUT_o/tool"
        chmod "$MODE" "$OUTPUT_o/tool"
      env: { MODE: "644" }
      outputs: { o: files }
  used:
    uses: command
    with:
      run: if [ -x "$INPUT_i/tool" ]; then echo yes; else echo no; fi >"$OUTPUT_o/said"
      inputs: { i: made }
      outputs: { o: files }
publish: { used: ./out }
"#,
    );
    let said = || fs::read_to_string(project.path("out/said")).unwrap();
    project.run(&["run", "p.yaml", "--format", "json"]).ends_with(0).made(2);
    assert_eq!(said(), "no\n");
    project.run(&["run", "p.yaml", "made.env.MODE='755'", "--format", "json"]).ends_with(0).made(2);
    assert_eq!(said(), "yes\n");
    let diff = project.run(&["runs", "diff", "latest~1", "latest"]).ends_with(1);
    assert!(!diff.stdout.contains("the same content"), "{diff}");
}

#[test]
fn a_file_is_a_file_and_a_folder_a_folder_whatever_they_are_called() {
    let project = Project::new();
    fs::create_dir(project.path("data")).unwrap();
    project.write("data/data", "inside");
    project.write("src.txt", "plain");
    project.write(
        "p.yaml",
        r#"
version: 1
name: names
stages:
  s:
    uses: command
    with:
      run: cat "$FILE_folder/data" "$FILE_file" "$FILE_other" >"$OUTPUT_o/read"
      files: { folder: ./data, file: .//src.txt, other: ././data/data }
      outputs: { o: files }
publish: { s: ./out }
"#,
    );
    project.run(&["run", "p.yaml"]).ends_with(0);
    assert_eq!(fs::read_to_string(project.path("out/read")).unwrap(), "insideplaininside");
    project.run(&["runs", "verify", "latest", "--format", "json"]).ends_with(0).found_equal(1);
}

#[test]
fn names_and_values_that_are_not_utf8_are_errors_with_a_place() {
    let project = Project::new();
    let pipeline = r#"
version: 1
name: odd
stages:
  s:
    uses: command
    with:
      run: printf %s "${HOME}" >"$OUTPUT_o/home"
      outputs: { o: files }
publish: { s: ./out }
"#;
    project.write("p.yaml", &pipeline.replace("${HOME}", "$HOME"));
    let run = |arguments: &[&str]| {
        let mut command = project.command(arguments);
        command.env("ODD", odd(b"odd-\xff")).env("SLURM_ODD", odd(b"\xfe")).env("HOME", odd(b"/tmp/\xff"));
        Ran::of(command, arguments)
    };
    run(&["run", "p.yaml"]).ends_with(0);
    assert_eq!(fs::read(project.path("out/home")).unwrap(), b"/tmp/\xff", "the machine's own value is passed on");
    run(&["plan", "p.yaml", "s.pass_env=[ODD]"]).ends_with(2).reports("bad-value").warns("is not UTF-8");
    run(&["plan", "p.yaml", "s.env.X=${env.ODD}"]).ends_with(2).reports("bad-value").warns("is not UTF-8");

    fs::create_dir(project.path("data")).unwrap();
    fs::write(project.path("data").join(odd(b"a\xff.txt")), "x").unwrap();
    for command in ["plan", "run"] {
        run(&[command, "p.yaml", "s.files.d=./data"]).ends_with(2).reports("file-unreadable").warns("is not UTF-8");
    }
    let folder = project.path(".").join(odd(b"odd\xff"));
    fs::create_dir(&folder).unwrap();
    fs::copy(project.path("p.yaml"), folder.join("p.yaml")).unwrap();
    for command in ["validate", "plan", "run"] {
        let mut here = project.command(&[command, "p.yaml"]);
        here.current_dir(&folder);
        Ran::of(here, &[command]).ends_with(2).reports("file-unreadable").warns("is not UTF-8");
    }
    let mut elsewhere = project.command(&["run", "p.yaml", "--home"]);
    elsewhere.arg(&folder);
    Ran::of(elsewhere, &["run", "--home"]).ends_with(3).warns("the path of the home").warns("is not UTF-8");
}

const TWO_FIGURES: &str = r#"
version: 1
name: figures
stages:
  s:
    uses: command
    with:
      run: |
        echo "{\"acc\": $ACC, \"seconds\": 1234567, \"rows\": 4}" >"$OUTPUT_test/metrics.json"
        echo '{"acc": 0.9, "rows": 4}' >"$OUTPUT_train/metrics.json"
      env: { ACC: "0.5" }
      outputs: { test: metrics, train: metrics }
publish: { s.test: ./out }
"#;

#[test]
fn figures_of_one_name_in_two_outputs_are_told_apart() {
    let project = Project::new();
    project.write("p.yaml", TWO_FIGURES);
    let gated = |gate: &str| project.run(&["run", "p.yaml", &format!("gates={gate}")]);
    gated("{ s.test.acc: { above: 0.4 }, s.rows: { above: 3 } }").ends_with(0).says("[s.test]").says("[s.train]");
    gated("{ s.train.acc: { above: s.test.acc } }").ends_with(0);
    let ambiguous = gated("{ s.acc: { above: 0.4 } }").ends_with(1);
    assert!(ambiguous.stderr.contains("s.test.acc") && ambiguous.stderr.contains("s.train.acc"), "{ambiguous}");
    // A gate over two figures of one stage is judged once.
    let refused = gated("{ s.test.acc: { above: s.train.acc } }").ends_with(1);
    assert_eq!(refused.stderr.matches("does not hold, so").count(), 1, "{refused}");

    project.run(&["run", "p.yaml", "s.env.ACC='0.6'"]).ends_with(0);
    let compared = project.run(&["runs", "compare", "s", "--format", "csv"]).ends_with(0);
    let header: Vec<&str> = compared.stdout.lines().next().unwrap().split(',').collect();
    for column in ["test.acc", "train.acc", "test.seconds", "seconds", "peak_memory_bytes"] {
        assert_eq!(header.iter().filter(|name| **name == column).count(), 1, "{column}: {compared}");
    }
    let at = header.iter().position(|name| *name == "seconds").unwrap();
    let measured: f64 = compared.stdout.lines().nth(1).unwrap().split(',').nth(at).unwrap().parse().unwrap();
    assert!(measured < 1000.0, "{compared}");
    assert!(project.run(&["runs", "compare", "s"]).ends_with(0).stdout.contains("test.seconds"));
}

#[test]
fn columns_of_a_spreadsheet_have_names_of_their_own() {
    let project = Project::new();
    let pipeline = |text: &str| {
        let run = format!("echo '{{\"status\": {text}, \"acc\": {text}}}' >\"$OUTPUT_m/metrics.json\"");
        format!(
            "version: 1\nname: n\nstages:\n  s: {{ uses: command, with: {{ run: {}, outputs: {{ m: metrics }} }} }}\n",
            serde_json::to_string(&run).unwrap()
        )
    };
    for text in ["1", "2"] {
        project.write("p.yaml", &pipeline(text));
        project.run(&["run", "p.yaml"]).ends_with(0);
    }
    let compared = project.run(&["runs", "compare", "s", "--format", "csv"]).ends_with(0);
    let header = compared.stdout.lines().next().unwrap();
    assert!(header.starts_with("name,run,status,parameter.run,"), "{compared}");
    assert!(header.contains(",metric.status"), "{compared}");
}

#[test]
fn what_is_null_or_empty_counts_as_left_out() {
    let project = Project::new();
    project.write(
        "p.yaml",
        r#"
version: 1
name: nothing
stages:
  s:
    uses: command
    with:
      run: echo "${A:-none} $B" >"$OUTPUT_o/said"
      env: { A: null, B: x }
      outputs: { o: files }
gates: { s.acc: null }
publish: { s: null }
"#,
    );
    project.edit("p.yaml", "${A:-none}", "$${A:-none}");
    project.run(&["run", "p.yaml", "s.env.A=", "publish.s=./out", "--format", "json"]).ends_with(0).made(1);
    assert_eq!(fs::read_to_string(project.path("out/said")).unwrap(), "none x\n");
    // It is in no key.
    project.edit("p.yaml", "A: null, ", "");
    project.run(&["run", "p.yaml", "publish.s=", "--format", "json"]).ends_with(0).made(0);
}

#[test]
fn a_stage_that_does_what_another_one_does_waits_for_that_one() {
    let project = Project::new();
    let stage = |id: &str| {
        format!(
            "  {id}: {{ uses: command, with: {{ run: 'sleep 1; echo x >\"$OUTPUT_o/x\"', outputs: {{ o: files }} }} }}\n"
        )
    };
    project.write("p.yaml", &format!("version: 1\nname: twins\nstages:\n{}{}", stage("a"), stage("b")));
    let ran = project.run(&["run", "p.yaml"]).ends_with(0);
    assert!(ran.stderr.contains("waiting for `a` of this run"), "{ran}");
    assert!(!ran.stderr.contains("another run"), "{ran}");
}

#[test]
fn reasons_name_the_value_that_was_edited() {
    let project = Project::new();
    project.write("rows.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n{\"text\": \"c\"}\n");
    let pipeline = "version: 1
name: why
stages:
  s:
    uses: command
    with:
      run: 'echo x >\"$OUTPUT_o/x\"'
      env: { LEVEL: \"2\" }
      outputs: { o: files }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
";
    project.write("p.yaml", pipeline);
    project.run(&["run", "p.yaml"]).ends_with(0);
    project.edit("p.yaml", "      env: { LEVEL: \"2\" }\n", "");
    project.edit("p.yaml", "./rows.jsonl }", "./rows.jsonl, train_test_split: { test_size: 1 } }");
    let plan = project.run(&["plan", "p.yaml"]).ends_with(0).says("env.LEVEL 2 → not set");
    assert!(!plan.stdout.contains("→ empty") && !plan.stdout.contains("none → not set"), "{plan}");
    assert!(plan.stdout.contains("train_test_split.test_size not set → 1"), "{plan}");
}

/// Equal files of two kinds are two things to a program, which is told the kind.
#[test]
fn the_kind_of_an_input_is_in_the_key() {
    let project = Project::new();
    project.write(
        "p.yaml",
        r#"
version: 1
name: kinds
vars: { src: a }
stages:
  a: { uses: command, with: { run: 'echo "{\"acc\": 1}" > "$OUTPUT_o/metrics.json"', outputs: { o: files } } }
  b: { uses: command, with: { run: 'echo "{\"acc\": 1}" > "$OUTPUT_o/metrics.json"', outputs: { o: metrics } } }
  c:
    uses: command
    with: { run: 'cat "$INPUT_i.artifact.json" > "$OUTPUT_o/x"', inputs: { i: "${vars.src}" }, outputs: { o: files } }
publish: { c: ./out }
"#,
    );
    let told = || fs::read_to_string(project.path("out/x")).unwrap();
    project.run(&["run", "p.yaml"]).ends_with(0);
    assert!(told().contains("\"kind\": \"files\""), "{}", told());
    project.run(&["plan", "p.yaml", "vars.src=b"]).ends_with(0).says("inputs.i a");
    project.run(&["run", "p.yaml", "vars.src=b"]).ends_with(0);
    assert!(told().contains("\"kind\": \"metrics\"") && told().contains("\"acc\""), "{}", told());
    project.run(&["run", "p.yaml", "--format", "json"]).ends_with(0).made(0);
    project.run(&["runs", "verify", "latest", "c", "--format", "json"]).ends_with(0).found_equal(1);
}

#[test]
fn a_folder_without_files_is_named_and_the_rest_is_stored() {
    let project = Project::new();
    project.write(
        "p.yaml",
        r#"
version: 1
name: folders
stages:
  a:
    uses: command
    with: { run: 'cd "$OUTPUT_o"; mkdir -p kept logs/deep; echo 1 >kept/x', outputs: { o: files } }
publish: { a: ./out }
"#,
    );
    let ran = project.run(&["run", "p.yaml"]).ends_with(0).warns("the output `o` has an empty folder `logs/deep`");
    assert!(!ran.stderr.contains("kept"), "{ran}");
    assert!(project.path("out/kept/x").exists() && !project.path("out/logs").exists());
}

#[test]
fn what_no_program_can_be_given_is_found_before_the_run() {
    let project = Project::new();
    let pipeline = |stages: &str| project.write("p.yaml", &format!("version: 1\nname: p\nstages:\n{stages}"));
    pipeline("  a: { uses: command, with: { run: \"a\\0b\" } }\n");
    project.run(&["validate", "p.yaml"]).ends_with(2).reports("bad-value").warns("zero byte");
    pipeline("  a: { uses: command, with: { run: [echo, x], env: { A: \"a\\0b\" } } }\n");
    project.run(&["validate", "p.yaml"]).ends_with(2).reports("bad-value").warns("zero byte");
    let two = "  a: { uses: command, with: { run: 'true' } }\n  b: { uses: command, with: { run: 'true', inputs: { x: a } } }\n";
    pipeline(two);
    let wrong = project.run(&["validate", "p.yaml"]).ends_with(2).reports("wrong-kind");
    wrong.warns("`inputs.x` reads an output, and stage `a` makes none");
}

#[test]
fn a_source_file_that_is_gone_has_changed_while_the_pipeline_ran() {
    let project = Project::new();
    project.write("src.txt", "plain");
    project.write(
        "p.yaml",
        &format!(
            r#"
version: 1
name: gone
stages:
  a: {{ uses: command, with: {{ run: 'rm "{}"; echo 1 >"$OUTPUT_o/x"', outputs: {{ o: files }} }} }}
  b:
    uses: command
    needs: [a]
    with: {{ run: 'cp "$FILE_f" "$OUTPUT_o/x"', files: {{ f: ./src.txt }}, outputs: {{ o: files }} }}
"#,
            project.path("src.txt").display()
        ),
    );
    project.run(&["run", "p.yaml"]).ends_with(1).warns("changed while the pipeline was running");
}

#[test]
fn numbers_stay_what_they_are_in_variables_and_in_comparisons() {
    let project = Project::new();
    project.write(
        "p.yaml",
        r#"
version: 1
name: exact
stages:
  s:
    uses: command
    matrix: { seed: [1, 2] }
    with:
      run: |
        echo "$SEED $N $ON $F" >"$OUTPUT_o/said"
        echo '{"big": 12345678901234567890, "nested": {"a": 2}}' >"$OUTPUT_m/metrics.json"
      env: { SEED: "${matrix.seed}", NAME: "s${matrix.seed}", N: 007, ON: TRUE, F: 1e-3 }
      outputs: { o: files, m: metrics }
gates: { s.nested.a: { above: 1 } }
publish: { s.o: "./out/${matrix.seed}" }
"#,
    );
    project.run(&["run", "p.yaml"]).ends_with(0);
    assert_eq!(fs::read_to_string(project.path("out/2/said")).unwrap(), "2 007 TRUE 1e-3\n");
    project.edit("p.yaml", "N: 007, ON: TRUE", r#"N: "007", ON: "TRUE""#);
    project.run(&["run", "p.yaml", "s.env.F=1e-3", "--format", "json"]).ends_with(0).made(0);

    let compared = project.run(&["runs", "compare", "s", "--format", "json"]).ends_with(0).json();
    let second = &compared["candidates"][1];
    assert_eq!(second["parameters"], serde_json::json!({ "env.NAME": "s2", "env.SEED": "2", "seed": 2 }));
    assert_eq!(second["metrics"]["big"], 12_345_678_901_234_567_890_u64);
    assert_eq!(second["metrics"]["nested.a"], 2);
    let table = project.run(&["runs", "compare", "s", "--format", "csv"]).ends_with(0).stdout;
    let cells: Vec<&str> = table.lines().nth(2).unwrap().split(',').collect();
    assert!(cells.contains(&"s2") && cells.contains(&"12345678901234567890"), "{table}");
}
