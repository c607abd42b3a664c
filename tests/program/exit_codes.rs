//! How the program ends, and on which stream it says what.

use test_harness::test;

use crate::support::Project;

#[test]
fn done_is_0_with_results_on_stdout_and_the_rest_on_stderr() {
    let project = Project::with_pipeline("data.yaml");
    let ran =
        project.run(&["run", "data.yaml", "-v"]).ends_with(0).warns("text_packs: done in ").says("[text_packs]\n");
    assert!(!ran.stdout.contains("done in") && !ran.stderr.contains("[text_packs]"), "{ran}");
    let quiet = project.run(&["run", "data.yaml", "-q"]).ends_with(0);
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let listed = project.run(&["cache", "ls"]).ends_with(0).says("tokenize");
    assert_eq!(listed.stderr, "");
}

#[test]
fn a_failed_stage_is_1_and_names_the_stage_its_place_and_the_cause() {
    let project = Project::with_pipeline("data.yaml");
    // Behind the rows that are looked at before anything runs.
    project.write(
        "questions.jsonl",
        &("{\"question\": \"Who?\", \"answer\": \"Me.\"}\n".repeat(100) + "{\"question\": \n"),
    );
    let ran = project.run(&["run", "data.yaml"]).ends_with(1).warns("questions.jsonl").warns("(data.yaml:");
    assert!(!ran.stderr.contains("panicked"), "{ran}");
    let ran = project.run(&["run", "data.yaml", "--keep-going", "--format", "json"]).ends_with(1).json();
    let state = |name: &str| {
        let stage = ran["stages"].as_array().unwrap().iter().find(|stage| stage["stage"] == name).unwrap();
        (stage["state"].clone(), stage["failure"]["cause"].clone())
    };
    assert_eq!(state("questions"), ("failed".into(), "bad_data".into()), "{ran:#}");
    assert_eq!(state("question_tokens").0, "skipped");
    assert!(["done", "cached"].contains(&state("text_packs").0.as_str().unwrap()), "{ran:#}");
}

#[test]
fn a_wrong_file_or_command_line_is_2() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "no-such.yaml"]).ends_with(2).reports("file-missing");
    project.run(&["run", "data.yaml", "text_packs.max_seq_len=none"]).ends_with(2).reports("wrong-type");
    project.run(&["run"]).ends_with(2);
    project.run(&["rnu", "data.yaml"]).ends_with(2);
    project.run(&["show", "data.yaml", "text_pakcs"]).ends_with(2);
    project.run(&["logs", "text_packs"]).ends_with(2);
    project.run(&["runs", "show"]).ends_with(2);
    project.run(&["runs", "ls", "--format", "json"]).ends_with(0).lists_nothing();
}

#[test]
fn a_machine_that_lacks_something_is_3_before_anything_runs() {
    let project = Project::with_pipeline("data.yaml");
    let ran = project.run(&["run", "data.yaml", "text_packs.resources.device=npu"]).ends_with(3);
    ran.warns("requests an NPU").warns("text_packs.resources.device=cpu");
    project.run(&["runs", "ls", "--format", "json"]).ends_with(0).lists_nothing();
}

#[test]
fn a_mistake_that_only_a_made_model_shows_is_2_too() {
    let project = Project::with_pipeline("train.yaml");
    project.run(&["run", "train.yaml", "--until", "tokens"]).ends_with(0);
    let wrong = "adapter.lora.target_modules=[no_such_proj]";
    project.run(&["plan", "train.yaml", wrong]).ends_with(2).reports("wrong-input");
    project.run(&["run", "train.yaml", wrong]).ends_with(2).reports("wrong-input");
}

#[test]
fn a_part_of_a_pipeline_needs_what_it_reads() {
    let project = Project::with_pipeline("data.yaml");
    for command in ["run", "plan"] {
        let missing = project.run(&[command, "data.yaml", "--only", "text_packs"]).ends_with(2);
        missing.warns("stage `text` has no result").warns("stage `text_tokens` has no result");
        // What is in between is missing, too, and nothing before it is made.
        let between = project.run(&[command, "data.yaml", "--only", "text", "--only", "text_packs"]).ends_with(2);
        between.warns("stage `text_tokens` has no result");
        // The remedy makes what these overrides read.
        let shorter = "text_tokens.max_seq_len=32";
        let other = project.run(&[command, "data.yaml", shorter, "--only", "text_packs"]).ends_with(2);
        let words = other.stderr.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&format!("`pipeline run data.yaml {shorter} --until text_tokens` makes it")), "{other}");
    }
    assert!(!project.path(".pipeline/runs").read_dir().unwrap().any(|_| true));
    project.run(&["run", "data.yaml", "--from", "text_pakcs"]).ends_with(2);
    project.run(&["run", "data.yaml", "--until", "text", "--from", "text_packs"]).ends_with(2);
    project.run(&["run", "data.yaml", "--only", "text", "--until", "text"]).ends_with(2);
    project.run(&["run", "data.yaml", "--until", "text_tokens"]).ends_with(0);
    project.run(&["run", "data.yaml", "--only", "text_packs", "--format", "json"]).ends_with(0).made(1);
    let forced = ["plan", "data.yaml", "--until", "text_packs", "--force", "text_packs", "--format", "json"];
    let planned = project.run(&forced).ends_with(0).json()["stages"].clone();
    let statuses: Vec<_> = planned.as_array().unwrap().iter().map(|stage| stage["status"].as_str().unwrap()).collect();
    assert_eq!(statuses.iter().filter(|status| **status == "cached").count(), 3, "{planned:#}");
    assert_eq!(planned.as_array().unwrap().len(), 4, "{planned:#}");
    let ran = project.run(&["run", "data.yaml", "--until", "text_packs", "--force", "--format", "json"]).ends_with(0);
    let stages = ran.json()["stages"].clone();
    assert!(stages.as_array().unwrap().iter().all(|stage| stage["compared"]["result"] == "equal"), "{stages}");
}

#[test]
fn what_the_machine_can_never_give_is_3_and_slots_that_are_not_there_2() {
    let project = Project::with_pipeline("data.yaml");
    for command in ["run", "plan"] {
        let ran = project.run(&[command, "data.yaml", "text_packs.resources.memory=900TiB"]).ends_with(3);
        ran.warns("stage `text_packs` requests 921600.0 GiB of memory").warns("text_packs.resources.memory=1GiB");
    }
    let takes = "text_packs.resources.slots={license: 2}";
    project.run(&["run", "data.yaml", takes]).ends_with(2).reports("unknown-slot");
    project.run(&["run", "data.yaml", takes, "--slots", "license=1"]).ends_with(2).reports("never-fits");
    project.run(&["run", "data.yaml", takes, "--slots", "license"]).ends_with(2);
    project.run(&["plan", "data.yaml", takes, "--slots", "license=2"]).ends_with(0);
    project.run(&["run", "data.yaml", "--grace", "5"]).ends_with(2);
    project.run(&["run", "data.yaml", "--jobs", "1", "--grace", "5s", takes, "--slots", "license=2"]).ends_with(0);
}

#[test]
fn a_copy_that_fails_is_1_and_stands_in_the_json() {
    let project = Project::new();
    let run = "echo mine >\"$OUTPUT_o/.pipeline-published.json\"";
    let stage = format!("{{ uses: command, with: {{ run: '{run}', outputs: {{ o: files }} }} }}");
    project.write("p.yaml", &format!("version: 1\nname: p\nstages:\n  made: {stage}\npublish: {{ made: ./out }}\n"));
    let ran = project.run(&["run", "p.yaml", "--format", "json"]).ends_with(1);
    let failures = ran.json()["publish_failures"].clone();
    assert_eq!((&failures[0]["stage"], &failures[0]["cause"]), (&"made".into(), &"bad_data".into()), "{failures}");
    assert!(failures[0]["help"].as_str().unwrap().contains("another name"));
}

#[test]
fn a_folder_of_somebody_else_is_2_before_anything_runs() {
    let project = Project::with_pipeline("data.yaml");
    project.edit("data.yaml", "stages:\n  text:", "publish: { text: ./out }\nstages:\n  text:");
    std::fs::create_dir(project.path("out")).unwrap();
    project.write("out/mine.txt", "mine");
    project.run(&["validate", "data.yaml"]).ends_with(0).reports("target-taken");
    project.run(&["plan", "data.yaml"]).ends_with(0).reports("target-taken");
    project.run(&["run", "data.yaml", "--until", "text"]).ends_with(2).warns("--overwrite");
    assert!(!project.path(".pipeline/runs").read_dir().unwrap().any(|_| true));
    project.run(&["run", "data.yaml", "--until", "text", "--overwrite"]).ends_with(0);
    assert!(project.path("out/parts.json").is_file() && !project.path("out/mine.txt").exists());
}

#[test]
fn a_server_that_does_not_answer_is_spoken_of() {
    use std::io::{BufRead, BufReader};
    let project = Project::new();
    project
        .write("p.yaml", "version: 1\nname: p\nstages:\n  base: { uses: download, with: { repo: nobody/nothing } }\n");
    // It takes connections and never says a word.
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", server.local_addr().unwrap());
    let mut command = project.command(&["run", "p.yaml"]);
    command.env("HF_ENDPOINT", address).env("HF_HOME", project.path("hf")).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let said = BufReader::new(child.stderr.take().unwrap()).lines().next().unwrap().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(said.contains("still asking for") && said.contains("nobody/nothing"), "{said}");
}

#[test]
fn what_is_not_pinned_is_not_looked_up_offline() {
    let project = Project::new();
    project
        .write("p.yaml", "version: 1\nname: p\nstages:\n  base: { uses: download, with: { repo: nobody/nothing } }\n");
    project.run(&["run", "p.yaml", "--offline"]).ends_with(2).warns("nobody/nothing").warns("is not pinned");
    project.run(&["run", "p.yaml", "--locked"]).ends_with(2).warns("is not pinned");
}

#[test]
fn a_reader_that_went_away_is_no_failure() {
    use std::process::Stdio;
    let project = Project::with_pipeline("data.yaml");
    let mut command = project.command(&["schema"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
}

/// A command whose standard output nobody reads: its exit code.
fn unread(project: &Project, arguments: &[&str]) -> Option<i32> {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = project.command(arguments);
    command.stdout(writer).stderr(std::process::Stdio::null()).status().unwrap().code()
}

#[test]
fn a_reader_that_went_away_makes_no_failure_a_success() {
    let project = Project::with_pipeline("data.yaml");
    assert_eq!(unread(&project, &["run", "data.yaml"]), Some(0));
    assert_eq!(unread(&project, &["cache", "verify"]), Some(0));
    project.write(
        "questions.jsonl",
        &("{\"question\": \"Who?\", \"answer\": \"Me.\"}\n".repeat(100) + "{\"question\": \n"),
    );
    for format in ["text", "json"] {
        assert_eq!(unread(&project, &["run", "data.yaml", "--format", format]), Some(1));
        project.edit("data.yaml", "name: data", "nmae: data");
        assert_eq!(unread(&project, &["validate", "data.yaml", "--format", format]), Some(2));
        project.edit("data.yaml", "nmae: data", "name: data");
    }
}

#[test]
fn quiet_leaves_warnings_out() {
    let project = Project::with_pipeline("data.yaml");
    project.edit("data.yaml", "vars: {", "vars: { unused: 1,");
    project.run(&["plan", "data.yaml"]).ends_with(0).reports("unused-variable");
    for command in ["run", "plan", "graph"] {
        let ran = project.run(&[command, "data.yaml", "-q"]).ends_with(0);
        assert_eq!(ran.stderr, "", "{ran}");
    }
}

#[test]
fn a_run_goes_on_when_nobody_reads_what_it_says() {
    let project = Project::with_pipeline("data.yaml");
    // What a full disk behind it does, a closed pipe does too.
    let full = std::fs::File::create("/dev/full").unwrap();
    let status = project
        .command(&["run", "data.yaml", "--format", "json"])
        .stdout(std::process::Stdio::null())
        .stderr(full)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0));
    project.run(&["run", "data.yaml", "--format", "json"]).ends_with(0).made(0);
}

#[test]
fn looking_makes_no_home() {
    let project = Project::new();
    project.run(&["cache", "ls"]).ends_with(0);
    project.run(&["cache", "verify"]).ends_with(0);
    project.run(&["runs", "ls", "--format", "json"]).ends_with(0);
    project.run(&["logs", "rows"]).ends_with(2);
    assert!(!project.path(".pipeline").exists());
}
