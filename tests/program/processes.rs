//! What a program of the user's is given, what stays of it when its engine is killed, and how the machine's own limits
//! and signals end a run.

#![allow(unsafe_code, reason = "calls of the C library")]
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, Signal, kill, killpg, signal};
use nix::unistd::Pid;
use test_harness::{Unmet, test};

use crate::support::terminal::pseudo_terminal;
use crate::support::{Project, Ran, needs_root};

/// Nothing takes longer, on a machine however busy.
const AT_MOST: Duration = Duration::from_secs(60);

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < AT_MOST, "waited for {what}");
        sleep(Duration::from_millis(20));
    }
}

/// A project with one program, which has come as far as to write `begun` into its folder.
fn begun(script: &str) -> (Project, Child) {
    let project = Project::new();
    write(&project, &format!("echo $$ >{}; {script}", project.path("begun").display()));
    let mut command = project.command(&["run", "p.yaml"]);
    let streams = (Stdio::null(), Stdio::piped(), Stdio::piped());
    command.process_group(0).stdin(streams.0).stdout(streams.1).stderr(streams.2);
    let engine = with_hang_up(&mut command).spawn().unwrap();
    wait_for("the program", || fs::read_to_string(project.path("begun")).is_ok_and(|text| text.ends_with('\n')));
    (project, engine)
}

/// A program is told when its terminal is gone, also where these tests were started not to be (`nohup`).
fn with_hang_up(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only `signal` is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            signal(Signal::SIGHUP, SigHandler::SigDfl)?;
            Ok(())
        })
    }
}

fn write(project: &Project, script: &str) {
    let script = serde_json::Value::from(script);
    let stage = format!("{{ uses: command, with: {{ run: {script}, outputs: {{ o: files }} }} }}");
    project.write("p.yaml", &format!("version: 1\nname: p\nstages:\n  s: {stage}\npublish: {{ s.o: ./out }}\n"));
}

fn pid_of(engine: &Child) -> Pid {
    Pid::from_raw(engine.id().cast_signed())
}

/// A run that was started and may still be going.
fn said(engine: Child) -> (Option<i32>, String) {
    let ended = engine.wait_with_output().unwrap();
    (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
}

#[test]
fn a_program_has_its_three_streams_open_and_nothing_else() {
    let project = Project::new();
    write(
        &project,
        "for at in /proc/self/fd/*; do readlink $at || true; done >$OUTPUT_o/open; ls /proc/self/fd >$OUTPUT_o/numbers",
    );
    project.run(&["run", "p.yaml"]).ends_with(0);
    let numbers = fs::read_to_string(project.path("out/numbers")).unwrap();
    // The last one is the list itself.
    assert_eq!(numbers.split_whitespace().collect::<Vec<_>>(), ["0", "1", "2", "3"]);
    let open = fs::read_to_string(project.path("out/open")).unwrap();
    assert!(!open.contains("/locks/") && !open.contains(".lock"), "{open}");
}

#[test]
fn what_a_program_leaves_holds_nothing_and_ends_with_a_killed_engine() {
    let leave = "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $! >DAEMON; sleep 600";
    let folder = tempfile::tempdir().unwrap();
    let daemon = folder.path().join("daemon");
    let (project, mut engine) = begun(&leave.replace("DAEMON", daemon.to_str().unwrap()));
    wait_for("the daemon", || fs::read_to_string(&daemon).is_ok_and(|text| text.ends_with('\n')));
    engine.kill().unwrap();
    engine.wait().unwrap();
    let daemon = fs::read_to_string(&daemon).unwrap();
    wait_for("the end of what was left", || !is_alive(daemon.trim()));
    write(&project, "echo x >$OUTPUT_o/x");
    project.run(&["run", "p.yaml"]).ends_with(0);
}

#[test]
fn what_a_program_leaves_ends_with_it_whatever_its_environment_is() {
    let project = Project::new();
    write(&project, "env -i setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $! >$OUTPUT_o/left");
    project.run(&["run", "p.yaml"]).ends_with(0);
    let left = fs::read_to_string(project.path("out/left")).unwrap();
    assert!(!is_alive(left.trim()), "{left}");
}

#[test]
fn an_output_that_becomes_a_link_takes_nothing_of_the_users() {
    let project = Project::new();
    let data = project.path("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("precious"), "mine").unwrap();
    write(&project, &format!("rmdir \"$OUTPUT_o\"; ln -s {} \"$OUTPUT_o\"", data.display()));
    project.run(&["run", "p.yaml"]).ends_with(1).warns("should write into `$OUTPUT_o`");
    assert_eq!(fs::read_to_string(data.join("precious")).unwrap(), "mine");
}

#[test]
fn a_program_that_writes_to_its_input_fails_and_so_does_who_reads_it_then() {
    let project = Project::new();
    let stage = |script: &str, inputs: &str| {
        let script = serde_json::Value::from(script);
        format!("{{ uses: command, with: {{ run: {script}, inputs: {{ {inputs} }}, outputs: {{ o: files }} }} }}")
    };
    // As a program does that may write there, as root may.
    let evil =
        "sleep 1; chmod u+w \"$(readlink -f \"$INPUT_a/a\")\"; echo evil >\"$INPUT_a/a\"; echo done >\"$OUTPUT_o/b\"";
    let text = format!(
        "version: 1\nstages:\n  a: {}\n  b: {}\n  c: {}\n",
        stage("echo good >$OUTPUT_o/a; printf '#!/bin/sh\\necho ran\\n' >$OUTPUT_o/tool; chmod +x $OUTPUT_o/tool", ""),
        stage(evil, "a: a"),
        stage("$INPUT_a/tool >$OUTPUT_o/c; sleep 3; cat $INPUT_a/a >>$OUTPUT_o/c", "a: a"),
    );
    project.write("p.yaml", &format!("{text}publish: {{ c: ./c }}\n"));
    let ran = project.run(&["run", "p.yaml", "--keep-going", "--threads", "2", "--jobs", "2"]).ends_with(1);
    assert!(ran.stderr.contains("b: failed") && ran.stderr.contains("c: failed"), "{ran}");
    assert!(ran.stderr.contains("was written to"), "{ran}");
    project.run(&["cache", "verify", "--repair"]);
    project.run(&["run", "p.yaml", "--until", "c"]).ends_with(0);
    // What is executed has the permission, in the stage that reads it too.
    assert_eq!(fs::read_to_string(project.path("c/c")).unwrap(), "ran\ngood\n");
}

#[test]
fn the_project_is_a_file_without_the_home_in_it() {
    let project = Project::new();
    let stage = "{ uses: command, with: { run: 'find \"$FILE_d\" -type f >$OUTPUT_o/list', files: { d: . }, outputs: { o: files } } }";
    project.write("p.yaml", &format!("version: 1\nstages:\n  s: {stage}\n"));
    project.run(&["run", "p.yaml"]).ends_with(0);
    project.run(&["run", "p.yaml"]).ends_with(0).warns("nothing to do");
}

fn is_alive(pid: &str) -> bool {
    // A zombie is nobody.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn a_stage_that_is_stopped_dies_with_its_engine() {
    let (project, mut engine) = begun("sleep 600");
    let (stage, _) = project.processes().into_iter().find(|(_, line)| line.contains("__stage")).unwrap();
    killpg(Pid::from_raw(stage), Signal::SIGSTOP).unwrap();
    engine.kill().unwrap();
    engine.wait().unwrap();
    wait_for("the end of the stage", || project.processes().is_empty());
    let program = fs::read_to_string(project.path("begun")).unwrap();
    wait_for("the end of the program", || !is_alive(program.trim()));
}

#[test]
fn who_waits_is_told_for_whom() {
    let (project, engine) = begun("sleep 600");
    let other = project.start(&["run", "p.yaml"]);
    sleep(Duration::from_secs(2));
    kill(pid_of(&other), Signal::SIGINT).unwrap();
    let (code, said) = said(other);
    assert_eq!(code, Some(130), "{said}");
    let expected = format!("another run is making this result: process {} (", engine.id());
    assert!(said.contains(&expected) && said.contains("run p.yaml"), "{said}");
    kill(pid_of(&engine), Signal::SIGINT).unwrap();
    engine.wait_with_output().unwrap();
}

/// The kernel and the shell each tell of a terminal that is gone: the second time must not kill what is being saved.
#[test]
fn a_closed_terminal_is_a_request_to_stop() {
    let script = "trap 'sleep 1; echo saved >$PIPELINE_WORKING/state; exit 1' TERM; while true; do sleep 0.05; done";
    let (project, engine) = begun(script);
    for _ in 0..3 {
        kill(pid_of(&engine), Signal::SIGHUP).unwrap();
        sleep(Duration::from_millis(200));
    }
    let (code, said) = said(engine);
    assert_eq!(code, Some(130), "{said}");
    let saved = Command::new("find").arg(project.path(".pipeline/store/partial")).args(["-name", "state"]).output();
    assert!(!saved.unwrap().stdout.is_empty(), "{said}");
}

/// The terminal writes `^C` where the cursor is: behind the last bar, and the lines above would be counted wrong.
#[test]
fn the_key_that_stops_a_run_is_not_written_among_its_bars() {
    let project = Project::new();
    write(&project, &format!("echo $$ >{}; exec sleep 60", project.path("begun").display()));
    let (person, program) = pseudo_terminal();
    let mut command = Command::new("setsid");
    command.args(["--ctty", "--wait", env!("CARGO_BIN_EXE_pipeline"), "run", "p.yaml"]);
    command.current_dir(project.path(".")).env("TERM", "xterm");
    command.stdin(program.try_clone().unwrap()).stdout(program.try_clone().unwrap()).stderr(program);
    let mut engine = command.spawn().unwrap();
    drop(command);
    wait_for("the program", || fs::read_to_string(project.path("begun")).is_ok_and(|text| text.ends_with('\n')));
    let mut person = fs::File::from(person);
    person.write_all(b"\x03").unwrap();
    let (mut shown, mut bytes) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = person.read(&mut bytes) {
        shown.extend_from_slice(&bytes[..count]);
    }
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    let shown = String::from_utf8_lossy(&shown);
    assert!(shown.contains("interrupted") && !shown.contains("^C"), "{shown:?}");
}

#[test]
fn a_run_that_was_started_to_outlive_its_terminal_does() {
    let project = Project::new();
    write(&project, &format!("echo x >{}; sleep 1; echo x >$OUTPUT_o/x", project.path("begun").display()));
    let line = format!("trap '' HUP; exec {} run p.yaml", env!("CARGO_BIN_EXE_pipeline"));
    let mut shell = Command::new("sh");
    shell.args(["-c", &line]).current_dir(project.path(".")).stdin(Stdio::null()).stderr(Stdio::piped());
    let engine = shell.spawn().unwrap();
    wait_for("the program", || project.path("begun").exists());
    kill(pid_of(&engine), Signal::SIGHUP).unwrap();
    let (code, said) = said(engine);
    assert_eq!(code, Some(0), "{said}");
}

/// A server that takes a connection and says nothing.
#[test]
fn a_signal_while_a_hub_is_asked_ends_with_the_code_of_an_interruption() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let project = Project::new();
        project.write(
            "p.yaml",
            "version: 1\nstages:\n  base: { uses: download, with: { repo: owner/name, as: files } }\n",
        );
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut command = project.command(&["run", "p.yaml"]);
        command.env("HF_ENDPOINT", format!("http://{}", silent.local_addr().unwrap())).env_remove("HF_TOKEN");
        let engine = with_hang_up(&mut command).stderr(Stdio::piped()).spawn().unwrap();
        let _asked = silent.accept().unwrap();
        kill(pid_of(&engine), signal).unwrap();
        let (code, said) = said(engine);
        assert_eq!(code, Some(130), "{signal}: {said}");
    }
}

/// The program in a shell with a limit.
fn limited(project: &Project, limit: &str) -> Ran {
    let line = format!("ulimit {limit}; exec {} run p.yaml", env!("CARGO_BIN_EXE_pipeline"));
    let mut command = Command::new("sh");
    command.args(["-c", &line]).current_dir(project.path(".")).env("LANG", "C.UTF-8").stdin(Stdio::null());
    Ran::of(command, &[limit])
}

#[test]
fn a_limit_of_the_shell_is_told() {
    let project = Project::new();
    write(&project, "dd if=/dev/zero of=$OUTPUT_o/x bs=1000 count=1 2>/dev/null");
    for limit in (8..=20).map(|files| format!("-n {files}")).chain(["-f 0".to_owned()]) {
        let ran = limited(&project, &limit);
        assert_eq!(ran.code, Some(3), "{ran}");
        assert!(ran.stderr.contains("File too large") || ran.stderr.contains("Too many open files"), "{ran}");
        assert!(!ran.stderr.contains("panicked"), "{ran}");
    }
    project.run(&["run", "p.yaml"]).ends_with(0);
}

/// A machine that gives neither processes nor threads refuses in words. Root has no such limit, so this is asked as
/// somebody else.
#[test]
fn a_machine_without_processes_is_told() -> Result<(), Unmet> {
    needs_root()?;
    const NOBODY_ELSE: u32 = 61_234;
    for processes in 1..6 {
        let project = Project::new();
        write(&project, "echo x >$OUTPUT_o/x");
        std::os::unix::fs::chown(project.path("."), Some(NOBODY_ELSE), None).unwrap();
        let mut command = project.command(&["run", "p.yaml"]);
        // SAFETY: between fork and exec only `setrlimit` is called, a plain system call.
        unsafe {
            command.uid(NOBODY_ELSE).pre_exec(move || {
                setrlimit(Resource::RLIMIT_NPROC, processes, processes)?;
                Ok(())
            })
        };
        let ran = Ran::of(command, &["run p.yaml"]);
        assert!(ran.code == Some(3) || ran.code == Some(0) && processes > 3, "{processes}: {ran}");
        assert!(!ran.stderr.contains("panicked"), "{processes}: {ran}");
    }
    Ok(())
}

/// Every file and folder below one, with its permissions.
fn modes(folder: &Path, found: &mut Vec<(PathBuf, u32)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let metadata = fs::symlink_metadata(&path).unwrap();
        if metadata.is_dir() {
            modes(&path, found);
        }
        if !metadata.is_symlink() {
            found.push((path, metadata.permissions().mode() & 0o777));
        }
    }
}

#[test]
fn nobody_else_may_write_to_a_home_whatever_the_mask() {
    for (mask, never) in [("000", 0o022), ("022", 0o022), ("077", 0o077)] {
        let project = Project::new();
        write(&project, "echo x >$OUTPUT_o/x; echo y >$PIPELINE_WORKING/y; sleep 0.1; exit 0");
        let line = format!("umask {mask}; exec {} run p.yaml", env!("CARGO_BIN_EXE_pipeline"));
        let mut command = Command::new("sh");
        command.args(["-c", &line]).current_dir(project.path(".")).env("LANG", "C.UTF-8").stdin(Stdio::null());
        Ran::of(command, &[mask]).ends_with(0);
        let mut found = Vec::new();
        modes(&project.path(".pipeline"), &mut found);
        modes(&project.path("out"), &mut found);
        assert!(found.len() > 20);
        for (path, mode) in found {
            // What is stored is read-only for all.
            let is_object = path.is_file() && path.starts_with(project.path(".pipeline/store/objects"));
            let wrong = mode & never != 0 || is_object && mode & 0o222 != 0;
            assert!(!wrong, "umask {mask}: {} has {mode:o}", path.display());
        }
    }
}

#[test]
fn a_locale_without_unicode_gets_arrows_of_ascii() {
    let project = Project::new();
    write(&project, "echo '1 → 2 …'; echo x >$OUTPUT_o/x");
    project.run(&["run", "p.yaml"]).ends_with(0);
    write(&project, "echo y >$OUTPUT_o/x");
    for (locale, arrow) in [("C", "->"), ("C.UTF-8", "→")] {
        let mut command = project.command(&["plan", "p.yaml"]);
        command.env("LC_ALL", locale);
        let ran = Ran::of(command, &["plan"]).ends_with(0).says(arrow);
        assert_eq!(ran.stdout.is_ascii(), locale == "C", "{ran}");
        // What others wrote is theirs.
        let mut command = project.command(&["logs", "s"]);
        command.env("LC_ALL", locale);
        Ran::of(command, &["logs"]).ends_with(0).says("1 → 2 …");
    }
}
