//! `pipeline chat`: conversations in a pipe and on a terminal.

use std::io::{Read, Write};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use test_harness::test;

use super::{PIPELINE, project};
use crate::support::Project;
use crate::support::terminal::Session;

#[test]
fn a_conversation_can_be_corrected_saved_and_compared_with_the_base() {
    let project = project();
    let arguments = [
        "chat",
        "serve.yaml",
        "adapter",
        "--chat-template",
        "chatml",
        "--max-new-tokens",
        "8",
        "--temperature",
        "0.9",
        "--seed",
        "5",
    ];
    let say_with = |more: &[&str], lines: &str| {
        let mut command = project.command(&[&arguments[..], more].concat());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let said = |output: Output| {
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let say = |lines: &str| said(say_with(&["--commands"], lines));
    // Whoever writes into a pipe writes prompts, whatever they begin with.
    project.write("precious.txt", "mine");
    let prompts = said(say_with(&[], "/quit\n/save precious.txt\n"));
    assert!(prompts.lines().count() >= 2, "{prompts}");
    let refused = say_with(&["--commands"], "The rain\n/save precious.txt\n");
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(project.path("precious.txt")).unwrap(), "mine");
    let of_adapter = say("The rain\n");
    assert!(!of_adapter.trim().is_empty());
    assert_eq!(say("The rain\n/undo\nThe rain\n"), of_adapter.repeat(2), "what was undone is not forgotten");
    assert_eq!(say("/system Be brief.\nThe rain\n/reset\n/system\nThe rain\n").matches(&of_adapter).count(), 1);
    let both = say("The rain\n/reset\n/adapter none\nThe rain\n/reset\n/adapter adapter\nThe rain\n");
    assert!(both.starts_with(&of_adapter) && both.ends_with(&of_adapter) && both != of_adapter.repeat(3), "{both}");
    say("/system Be brief.\nThe rain\n/save saved.jsonl\n/quit\n");
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(project.path("saved.jsonl")).unwrap()).unwrap();
    let roles: Vec<&str> =
        saved["messages"].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
}

#[test]
fn an_interrupt_stops_an_answer_and_not_the_program() {
    let project = project();
    project.run(&["run", "serve.yaml", "--only", "fresh"]);
    let arguments = ["chat", "serve.yaml", "fresh", "--chat-template", "chatml", "--commands"];
    let mut command = project.command(&arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (mut questions, mut answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    questions.write_all(b"The rain\n").unwrap();
    let mut first = [0; 1];
    answers.read_exact(&mut first).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    questions.write_all(b"/reset\n/quit\n").unwrap();
    let mut interrupted = first.to_vec();
    answers.read_to_end(&mut interrupted).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let whole = project.run(&[&arguments[..], &["--prompt", "The rain"]].concat()).ends_with(0).stdout;
    assert!(interrupted.len() < whole.len(), "the answer was not stopped");
}

/// `chat` of the adapter at a terminal of so many columns, with the history of a project.
fn at_a_terminal(project: &Project, columns: &str, more: &[&str]) -> Session {
    let chat = project.command(&[&["chat", "serve.yaml", "adapter", "--chat-template", "chatml"], more].concat());
    let session =
        Session::start(&chat, &[("COLUMNS", columns), ("XDG_STATE_HOME", project.path("state").to_str().unwrap())]);
    session.wait_until("it does not begin", |shown| shown.ends_with("> ") || shown.contains("lists the commands"));
    session
}

/// What the assistant said in a conversation that was saved.
fn saved_answer(project: &Project, file: &str) -> String {
    let began = Instant::now();
    loop {
        let text = std::fs::read_to_string(project.path(file)).unwrap_or_default();
        if let Ok(saved) = serde_json::from_str::<Value>(&text) {
            let messages = saved["messages"].as_array().unwrap();
            assert_eq!(messages[messages.len() - 2], json!({ "role": "user", "content": "The rain" }));
            return messages[messages.len() - 1]["content"].as_str().unwrap().to_owned();
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{file} is not written");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn on_a_terminal_lines_are_edited_and_kept_and_answers_are_stopped_or_shown_side_by_side() {
    let project = project();
    // So long an answer that it is stopped in time, however busy this machine is.
    project.write("serve.yaml", &PIPELINE.replace("max_position_embeddings: 4096", "max_position_embeddings: 65536"));
    let drawn = ["--max-new-tokens", "8", "--temperature", "0.9", "--seed", "5"];
    let alone = |stage: &str, more: &[&str]| {
        let chat = ["chat", "serve.yaml", stage, "--chat-template", "chatml", "--prompt", "The rain"];
        project.run(&[&chat[..], more].concat()).ends_with(0).stdout
    };
    let letters = |text: &str| text.split_whitespace().collect::<String>();
    let (of_adapter, of_base) = (letters(&alone("adapter", &drawn)), letters(&alone("fresh", &drawn)));
    assert_ne!(of_adapter, of_base);

    let mut session = at_a_terminal(&project, "100", &[]);
    session.press("/adapter none\r");
    session.press("The rainy\x7f\r");
    session.wait_until("it does not answer", |shown| shown.rsplit("The rain").next().unwrap().len() > 400);
    session.press("\x03");
    // A line is asked for a third time; before that an interrupt takes the keys behind it along.
    session.wait_until("it is not stopped", |shown| shown.matches("\x1b[?2004h").count() == 3);
    // An interrupt while a line is edited ends nothing, either.
    session.press("/save nothing.jsonl\x03");
    session.wait_until("the line is not dropped", |shown| shown.matches("\x1b[?2004h").count() == 4);
    session.press("/save stopped.jsonl\r");
    let stopped = saved_answer(&project, "stopped.jsonl");
    session.press("/quit\r");
    let (code, shown) = session.end();
    assert_eq!(code, Some(0), "{shown}");
    assert!((101..30_000).contains(&stopped.len()), "{} bytes", stopped.len());
    assert!(!project.path("nothing.jsonl").exists());
    let history = std::fs::read_to_string(project.path("state/pipeline/chat_history")).unwrap();
    assert_eq!(history, "\"/adapter none\"\n\"The rain\"\n\"/save stopped.jsonl\"\n\"/quit\"\n");

    // The question of the conversation before is four lines up.
    let mut session = at_a_terminal(&project, "100", &drawn);
    session.press("/compare none\r\x1b[A\x1b[A\x1b[A\x1b[A\r");
    // A line is asked for a third time once both have answered.
    let has_answered = |shown: &str| shown.matches("\x1b[?2004h").count() == 3;
    session.wait_until("they do not answer", has_answered);
    session.press("/save compared.jsonl\r");
    assert_eq!(letters(&saved_answer(&project, "compared.jsonl")), of_adapter);
    session.press("/quit\r");
    let (code, shown) = session.end();
    assert_eq!(code, Some(0), "{shown}");
    let (_, rows) = shown.split_once("\x1b[1madapter").unwrap();
    let rows = rows.lines().map_while(|line| line.split_once('│')).map(|(left, right)| (letters(left), letters(right)));
    let (left, right): (Vec<String>, Vec<String>) = rows.unzip();
    assert!(right[0].starts_with("fresh"), "{shown}");
    assert_eq!((left[1..].concat(), right[1..].concat()), (of_adapter.clone(), of_base.clone()), "{shown}");

    // Where it is narrow they are below one another.
    let mut session = at_a_terminal(&project, "60", &drawn);
    session.press("/compare fresh\rThe rain\r");
    session.wait_until("they do not answer", has_answered);
    session.press("\x04");
    let (code, shown) = session.end();
    assert_eq!(code, Some(0), "{shown}");
    let (_, answers) = shown.split_once("\nadapter:\n").unwrap();
    let (first, second) = answers.split_once("\nfresh:\n").unwrap();
    assert_eq!(letters(first), of_adapter, "{shown}");
    assert!(letters(second).starts_with(&of_base), "{shown}");
}

#[test]
fn a_model_without_a_chat_template_is_told_of_the_option() {
    let asked = project().run(&["chat", "serve.yaml", "fresh", "--prompt", "The rain"]).ends_with(1);
    asked.warns("`--chat-template chatml`");
}

#[test]
fn a_script_talks_through_prompts() {
    let project = project();
    let chat = ["chat", "serve.yaml", "fresh", "--chat-template", "chatml", "--max-new-tokens", "8"];
    let drawn = ["--temperature", "0.9", "--seed", "5", "--prompt", "The rain"];
    let once = project.run(&[&chat[..], &drawn].concat()).ends_with(0);
    let again = project.run(&[&chat[..], &drawn].concat()).ends_with(0);
    assert!(!once.stdout.trim().is_empty(), "{once}");
    assert_eq!(once.stdout, again.stdout);
}
