//! `uses: command`: what a program is given, and what becomes of what it leaves.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use engine::context::Artifact;
use engine::error::{Cause, StageError};
use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::data::artifact::{Row, RowsReader};
use stages::kinds::command::Command;
use test_harness::test;

fn run(folder: &Path, parameters: Value) -> Result<BTreeMap<String, Artifact>, StageError> {
    TestBench::new(folder).run::<Command>(parameters)
}

/// Everything that a failure says.
fn words(error: &StageError) -> String {
    let source = error.source.as_ref().map(ToString::to_string).unwrap_or_default();
    format!("{error}\n{source}\n{}", error.help.as_deref().unwrap_or_default())
}

#[test]
fn a_script_makes_rows_of_its_arguments_and_environment() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("make rows.sh");
    fs::write(
        &script,
        "printf '{\"question\": \"%s?\", \"answer\": \"%s\"}\\n' \"$1\" \"$GREETING\" >\"$2/rows.jsonl\"\n",
    )
    .unwrap();
    let bench = TestBench::new(folder.path()).file("script", &script).unwrap();
    let outputs = bench
        .run::<Command>(json!({
            "run": ["sh", "${files.script}", "Who", "${outputs.asked}"],
            "files": { "script": "make rows.sh" },
            "env": { "GREETING": "I am Ada, $HOME" },
            "outputs": {
                "asked": { "kind": "rows", "template": "Q: {question}\nA: ", "column_map": { "output": "answer" } },
            },
        }))
        .unwrap();
    let rows: Vec<Row> = RowsReader::open(&outputs["asked"]).unwrap().iter().map(Result::unwrap).collect();
    let columns = [("output", "I am Ada, $HOME"), ("question", "Who?")].map(|(name, text)| (name.into(), text.into()));
    assert_eq!(rows, [Row::Columns(columns.into_iter().collect())]);
}

#[test]
fn equal_work_has_equal_identities_and_every_kind_is_checked() {
    let made = |kind: &str, script: &str| {
        let folder = tempfile::tempdir().unwrap();
        let outputs = run(folder.path(), json!({ "run": script, "outputs": { "made": kind } }));
        outputs.map(|outputs| outputs["made"].description.clone())
    };
    let metrics = r#"echo '{"loss": 0.5, "note": "x", "rows": 3}' >"$OUTPUT_made/metrics.json""#;
    let one = made("metrics", metrics).unwrap();
    assert_eq!(one, made("metrics", metrics).unwrap());
    assert_eq!(Value::Object(one.facts), json!({ "loss": 0.5, "rows": 3 }));
    // Rows are known by what they say, whatever the form of the file that the program chose.
    let jsonl = made("rows", r#"printf '{"text": "a"}\n{"text": "b"}\n' >"$OUTPUT_made/x.jsonl""#).unwrap();
    let lines = made("rows", r#"printf 'a\nb\n' >"$OUTPUT_made/other.txt""#).unwrap();
    assert_eq!((jsonl.kind.as_str(), jsonl.identity), ("rows", lines.identity));
    for (kind, script) in [
        ("metrics", "echo '[1]' >${outputs.made}/metrics.json"),
        ("metrics", "echo 1 >${outputs.made}/loss.json"),
        ("rows", "echo '{\"text\": 1' >${outputs.made}/rows.jsonl"),
        ("rows", "echo x >${outputs.made}/rows.bin"),
        ("rows", ": >${outputs.made}/rows.jsonl"),
        ("model", "echo '{}' >${outputs.made}/config.json"),
        ("tokenizer", "echo '{}' >${outputs.made}/tokenizer.json"),
        ("adapter", "echo '{}' >${outputs.made}/adapter_config.json"),
        ("files", "ln -s /etc/passwd ${outputs.made}/passwd"),
        ("files", "mkdir ${outputs.made}/empty"),
    ] {
        let error = made(kind, script).unwrap_err();
        assert_eq!(error.cause, Cause::BadData, "{kind}: {script}: {}", words(&error));
        assert!(words(&error).contains("`made`"), "{kind}: {script}: {}", words(&error));
    }
}

#[test]
fn a_program_is_told_of_its_inputs_what_their_identity_covers() {
    let folder = tempfile::tempdir().unwrap();
    let told = |kind: &str, facts: Value| {
        let input = folder.path().join("input");
        fs::create_dir_all(&input).unwrap();
        fs::write(input.join("file"), "x").unwrap();
        let facts = facts.as_object().unwrap().clone();
        let bench = TestBench::new(folder.path()).input("s.o", kind, &input, facts).unwrap();
        let script = "cp \"${inputs.i}.artifact.json\" \"$OUTPUT_made/told\"";
        let parameters = json!({ "run": script, "inputs": { "i": "s" }, "outputs": { "made": "files" } });
        let outputs = bench.run::<Command>(parameters).unwrap();
        let told: Value = serde_json::from_slice(&fs::read(outputs["made"].folder.join("told")).unwrap()).unwrap();
        assert_eq!(told["kind"], kind);
        told["facts"].clone()
    };
    let rows = json!({ "rows": 3, "columns": ["text"], "shape": "text", "dropped": 7, "filtered": 1, "empty": 2 });
    assert_eq!(told("rows", rows), json!({ "rows": 3, "columns": ["text"], "shape": "text" }));
    assert_eq!(told("tokens", json!({ "tokens": 9, "truncated": 2 })), json!({ "tokens": 9 }));
    assert_eq!(told("metrics", json!({ "loss": 0.5, "dropped": 1 })), json!({ "loss": 0.5, "dropped": 1 }));
    assert_eq!(told("model", json!({ "repo": "a/b" })), json!({}));
}

#[test]
fn a_program_sees_what_was_declared_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), "granted\n").unwrap();
    let bench = TestBench::new(folder.path()).file("data", &folder.path().join("a.txt")).unwrap().threads(3);
    let script = "
        cat \"$FILE_data\" >\"$OUTPUT_seen/data\"
        pwd >\"$OUTPUT_seen/pwd\"; ls -A >>\"$OUTPUT_seen/pwd\"
        env >\"$OUTPUT_seen/env\"
        cat >\"$OUTPUT_seen/stdin\"
        echo kept >\"$PIPELINE_WORKING/state\"
        test -d \"$TMPDIR\" && test ! -e undeclared.txt
    ";
    let parameters = json!({ "run": script, "files": { "data": "a.txt" }, "outputs": { "seen": "files" } });
    let outputs = bench.run::<Command>(parameters).unwrap();
    let read = |name: &str| fs::read_to_string(outputs["seen"].folder.join(name)).unwrap();
    assert_eq!((read("data").as_str(), read("stdin").as_str()), ("granted\n", ""));
    assert!(read("pwd").ends_with("/scratch/work\n"), "an empty folder of its own: {}", read("pwd"));
    let environment = read("env");
    for (name, there) in [("PATH", true), ("PIPELINE_THREADS=3", true), ("TZ=UTC", true), ("CARGO_MANIFEST_DIR", false)]
    {
        assert_eq!(environment.lines().any(|line| line.starts_with(name)), there, "{name} in {environment}");
    }
    assert_eq!(fs::read_dir(bench.working::<Command>()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_program_is_the_first_of_path_that_can_be_executed_also_without_an_interpreter() {
    let folder = tempfile::tempdir().unwrap();
    let make = "mkdir a b; echo exit 1 >a/tool; echo 'echo \"$0 $1\" >\"$2/said\"' >b/tool; chmod 755 b/tool";
    // By another process: one that this one starts meanwhile would have the file open, which can then not be started.
    let made = std::process::Command::new("sh").args(["-c", make]).current_dir(folder.path()).status();
    assert!(made.unwrap().success());
    let path = |folders: &[&str]| {
        let folders = folders.iter().map(|name| folder.path().join(name).display().to_string());
        folders.chain(["/usr/bin".to_owned(), "/bin".to_owned()]).collect::<Vec<_>>().join(":")
    };
    let asked = |path: String| {
        let parameters =
            json!({ "run": ["tool", "x", "${outputs.seen}"], "env": { "PATH": path }, "outputs": { "seen": "files" } });
        run(folder.path(), parameters)
    };
    let outputs = asked(path(&["absent", "a", "b"])).unwrap();
    let said = fs::read_to_string(outputs["seen"].folder.join("said")).unwrap();
    assert_eq!(said, format!("{} x\n", folder.path().join("b/tool").display()));
    let error = asked(path(&["absent"])).unwrap_err();
    assert!(words(&error).contains("cannot start `tool`") && error.cause == Cause::BadParameters, "{}", words(&error));
    let error = asked(path(&["a"])).unwrap_err();
    assert!(words(&error).contains("make the file executable"), "{}", words(&error));
}

#[test]
fn a_failure_says_how_and_the_last_lines() {
    let folder = tempfile::tempdir().unwrap();
    let fail = |run_: Value| run(folder.path(), json!({ "run": run_ })).unwrap_err();
    let error = fail(json!("echo one; echo two >&2; exit 7"));
    assert_eq!(error.cause, Cause::Crashed);
    assert!(words(&error).contains("exit code 7") && words(&error).contains("one\ntwo"), "{}", words(&error));
    assert!(words(&fail(json!("kill -9 $$"))).contains("SIGKILL"));
    assert!(words(&fail(json!("false; true"))).contains("exit code 1"), "a line that fails ends the script");
    assert!(words(&fail(json!("echo $undeclared"))).contains("undeclared"), "a variable that is not set as well");
    let error = fail(json!(["no-such-program-at-all"]));
    assert_eq!(error.cause, Cause::BadParameters);
    assert!(words(&error).contains("no-such-program-at-all"));
    let error = run(folder.path(), json!({ "run": ["true"], "pass_env": ["NO_SUCH_VARIABLE"] })).unwrap_err();
    assert_eq!(error.cause, Cause::Machine);
    assert!(words(&error).contains("NO_SUCH_VARIABLE"));
}

#[test]
fn working_state_outlives_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let script = "
        if [ -e \"$PIPELINE_WORKING/half\" ]; then cat \"$PIPELINE_WORKING/half\" >\"$OUTPUT_made/whole\"
        else echo half >\"$PIPELINE_WORKING/half\"; exit 1; fi
    ";
    let parameters = json!({ "run": script, "outputs": { "made": "files" } });
    run(folder.path(), parameters.clone()).unwrap_err();
    let outputs = run(folder.path(), parameters).unwrap();
    assert_eq!(fs::read_to_string(outputs["made"].folder.join("whole")).unwrap(), "half\n");
}

#[test]
fn a_link_in_the_place_of_the_working_folder_is_removed_and_not_followed() {
    let root = tempfile::tempdir().unwrap();
    let theirs = root.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    fs::write(theirs.join("notes"), std::env::var("PATH").unwrap()).unwrap();
    let mode = || fs::metadata(&theirs).unwrap().permissions().mode();
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o755)).unwrap();
    let linked = format!("rm -r \"$PIPELINE_WORKING\"; ln -s '{}' \"$PIPELINE_WORKING\"", theirs.display());
    for (number, (gone, pass_env)) in [
        (linked.as_str(), json!([])),
        // What a secret is found in is removed from the working folder, and its mode is set.
        (linked.as_str(), json!(["PATH"])),
        ("rm -r \"$PIPELINE_WORKING\"", json!([])),
        ("rm -r \"$PIPELINE_WORKING\"; echo x >\"$PIPELINE_WORKING\"", json!(["PATH"])),
        ("rm -r \"$PIPELINE_WORKING\"; ln -s nowhere \"$PIPELINE_WORKING\"", json!([])),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = root.path().join(number.to_string());
        let command = |last: &str| {
            let script = format!("echo done >\"$OUTPUT_made/done\"; {gone}; {last}");
            run(&folder, json!({ "run": script, "pass_env": pass_env, "outputs": { "made": "files" } }))
        };
        command("exit 1").unwrap_err();
        command("true").unwrap_or_else(|error| panic!("{gone}: {}", words(&error)));
        let left = fs::symlink_metadata(TestBench::new(&folder).working::<Command>()).unwrap();
        assert!(left.is_dir(), "{gone}");
        assert!(theirs.join("notes").is_file() && mode() & 0o777 == 0o755, "{gone}");
    }
}

#[test]
fn what_a_program_left_running_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    let script = "setsid sh -c 'echo $$ >\"$OUTPUT_made/pid\"; exec sleep 300' & while [ ! -s \"$OUTPUT_made/pid\" ]; do sleep 0.01; done";
    let outputs = run(folder.path(), json!({ "run": script, "outputs": { "made": "files" } })).unwrap();
    let pid = fs::read_to_string(outputs["made"].folder.join("pid")).unwrap();
    let state = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z "), "{state}");
}
