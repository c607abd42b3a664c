//! The value of a secret stands in no file of the home, no output and nothing that the program says.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use test_harness::test;

use crate::support::{Project, Ran};

const SECRET: &str = "zq7-correct-horse-battery-9";
const TOKEN: &str = "hf_Vx81NotARealTokenButLooksLikeOne";

/// Every file below a folder, links not followed.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => files(&entry.path(), found),
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
}

fn holds(bytes: &[u8], value: &str) -> bool {
    bytes.windows(value.len()).any(|window| window == value.as_bytes())
}

/// Asserts that no file of the project and nothing that was said holds a value; returns how many files were looked at.
#[track_caller]
fn nowhere(project: &Project, said: &[Ran], values: &[&str]) -> usize {
    let mut found = Vec::new();
    files(&project.path("."), &mut found);
    for value in values {
        for path in &found {
            assert!(!holds(&fs::read(path).unwrap(), value), "{} holds `{value}`", path.display());
        }
        for ran in said {
            assert!(!ran.stdout.contains(value) && !ran.stderr.contains(value), "{ran}");
        }
    }
    found.len()
}

/// Runs the program with the secrets in its environment.
fn run(project: &Project, arguments: &[&str]) -> Ran {
    let mut command = project.command(arguments);
    command.env("MY_SECRET", SECRET).env("HF_TOKEN", TOKEN).env("HF_ENDPOINT", "http://127.0.0.1:9");
    Ran::of(command, arguments)
}

fn pipeline(run: &str, extra: &str) -> String {
    format!(
        "version: 1
name: secret
stages:
  called:
    uses: command
    with:
      run: |
        {run}
      pass_env: [MY_SECRET]
      outputs: {{ made: files }}
{extra}"
    )
}

#[test]
fn a_program_gets_the_value_and_nothing_else_does() {
    let project = Project::new();
    let say = "echo \"the value is $MY_SECRET\"; printf '%s' \"$MY_SECRET\" >&2; printf '%s' \"$MY_SECRET\" | wc -c >$OUTPUT_made/length";
    project.write("p.yaml", &pipeline(say, "publish: { called: ./out }\n"));
    let mut said = vec![run(&project, &["run", "p.yaml", "-v", "--format", "json"]).ends_with(0)];
    let length = fs::read_to_string(project.path("out/length")).unwrap();
    assert_eq!(length.trim(), SECRET.len().to_string(), "the program had it");
    let log = run(&project, &["logs", "called"]).ends_with(0);
    assert_eq!(log.stdout.matches("***").count(), 2, "{log}");
    said.push(log);
    for arguments in [
        &["plan", "p.yaml"][..],
        &["runs", "show", "--format", "json"],
        &["cache", "ls", "--format", "json"],
        &["show", "p.yaml", "called.made"],
        &["schema"],
        &["graph", "p.yaml"],
    ] {
        said.push(run(&project, arguments).ends_with(0));
    }
    assert!(nowhere(&project, &said, &[SECRET, TOKEN]) > 8);
}

#[test]
fn a_failure_a_crash_and_a_timeout_do_not_show_it() {
    let project = Project::new();
    let mut said = Vec::new();
    for script in [
        "echo \"bad token $MY_SECRET\"; exit 3",
        "echo $MY_SECRET; kill -9 $$",
        "echo $MY_SECRET; kill -9 $PPID; sleep 5",
        "set -x; echo \"$MY_SECRET\" >&2; $MY_SECRET",
        "i=0; while [ $i -lt 300 ]; do printf %s \"$MY_SECRET\"; i=$((i+1)); done; exit 1",
    ] {
        project.write("p.yaml", &pipeline(script, ""));
        said.push(run(&project, &["run", "p.yaml", "-v"]).ends_with(1));
    }
    project.write("p.yaml", &pipeline("echo $MY_SECRET; sleep 60", "    timeout: 500ms\n"));
    said.push(run(&project, &["run", "p.yaml", "-v"]).ends_with(1));
    assert!(nowhere(&project, &said, &[SECRET, TOKEN]) > 8);
}

#[test]
fn an_output_that_holds_it_is_refused_and_nothing_of_it_stays() {
    let project = Project::new();
    project.write("p.yaml", &pipeline("echo \"x${MY_SECRET}x\" >$OUTPUT_made/config.ini", ""));
    project.edit("p.yaml", "${MY_SECRET}", "$MY_SECRET\"\"");
    let said = run(&project, &["run", "p.yaml"]).ends_with(1).warns("contains the value of a variable of `pass_env`");
    nowhere(&project, &[said], &[SECRET, TOKEN]);
}

#[test]
fn a_name_that_holds_it_is_refused_and_not_shown() {
    for script in [
        "echo x >\"$OUTPUT_made/f-$MY_SECRET\"",
        "mkdir \"$OUTPUT_made/$MY_SECRET\"; echo x >\"$OUTPUT_made/$MY_SECRET/f\"",
        "echo x >\"$OUTPUT_made/f\"; ln -s \"/tmp/$MY_SECRET\" \"$OUTPUT_made/link\"",
    ] {
        let project = Project::new();
        project.write("p.yaml", &pipeline(script, ""));
        let said = run(&project, &["run", "p.yaml", "-v"]).ends_with(1).warns("the value of a variable of `pass_env`");
        nowhere(&project, &[said], &[SECRET, TOKEN]);
        let mut names = Vec::new();
        all_names(&project.path("."), &mut names);
        assert!(!names.iter().any(|name| holds(name.as_os_str().as_encoded_bytes(), SECRET)), "{names:?}");
    }
}

/// Every path below a folder, and where links lead.
fn all_names(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        found.extend(fs::read_link(&path));
        if path.is_dir() && !path.is_symlink() {
            all_names(&path, found);
        }
        found.push(path);
    }
}

#[test]
fn what_a_program_keeps_for_its_next_try_is_cleaned_of_it() {
    let project = Project::new();
    let script = "echo 7 >\"$PIPELINE_WORKING/step\"; echo \"t=$MY_SECRET\" >\"$PIPELINE_WORKING/config\"; exit 3";
    project.write("p.yaml", &pipeline(script, ""));
    let said = run(&project, &["run", "p.yaml"]).ends_with(1).warns("was removed");
    nowhere(&project, &[said], &[SECRET, TOKEN]);
    // Where the program was killed with the stage's process nobody could look; the next try does before anything else.
    let script = "cd \"$PIPELINE_WORKING\"; if test -e tried; then test ! -e config; exit 4; fi; touch tried; echo $MY_SECRET >config; kill -9 $PPID; sleep 5";
    project.write("p.yaml", &pipeline(script, ""));
    run(&project, &["run", "p.yaml"]).ends_with(1).warns("SIGKILL");
    let said = run(&project, &["run", "p.yaml"]).ends_with(1).warns("exit code 4");
    nowhere(&project, &[said], &[SECRET, TOKEN]);
}

/// A Hub that refuses everything, and says what it was asked.
fn refusing_hub() -> (String, std::sync::mpsc::Receiver<String>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (asked, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = vec![0; 4096];
            let length = stream.read(&mut head).unwrap_or(0);
            let _ = asked.send(String::from_utf8_lossy(&head[..length]).into_owned());
            let _ = stream.write_all(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    (address, heard)
}

#[test]
fn a_hub_that_refuses_the_token_does_not_make_it_known() {
    let project = Project::new();
    let (address, heard) = refusing_hub();
    let pinned =
        "{\"version\": 1, \"pins\": {\"hub-model:owner/name@main\": \"0123456789abcdef0123456789abcdef01234567\"}}";
    let mut said = Vec::new();
    for (source, token) in
        [("owner/name", "HF_TOKEN"), ("owner/name", "MY_SECRET"), ("modelscope:owner/name", "MY_SECRET")]
    {
        let stage = format!(
            "version: 1\nstages: {{ base: {{ uses: download, with: {{ repo: \"{source}\", token_env: {token} }} }} }}\n"
        );
        project.write("p.yaml", &stage);
        for lock in [None, Some(pinned)] {
            let _ = fs::remove_file(project.path("pipeline.lock"));
            if let Some(lock) = lock {
                project.write("pipeline.lock", lock);
            }
            let mut command = project.command(&["run", "p.yaml", "-v", "--format", "json"]);
            command.env("MY_SECRET", SECRET).env("HF_TOKEN", TOKEN).env("MODELSCOPE_API_TOKEN", TOKEN);
            command.env("HF_ENDPOINT", &address).env("MODELSCOPE_ENDPOINT", &address);
            said.push(Ran::of(command, &["run"]));
            assert_ne!(said[said.len() - 1].code, Some(0));
        }
    }
    let heard: Vec<String> = heard.try_iter().collect();
    for (value, least) in [(TOKEN, 2), (SECRET, 4)] {
        let sent = heard.iter().filter(|request| request.contains(value)).count();
        assert!(sent >= least, "`{value}` was sent {sent} times");
    }
    nowhere(&project, &said, &[SECRET, TOKEN]);
}
