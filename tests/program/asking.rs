//! Asking a model from the command line: `--prompt`, `--until`, and an answer that grows on a terminal.

use std::fs::File;
use std::io::Read;
use test_harness::test;

use crate::support::Project;
use crate::support::terminal::pseudo_terminal;

const PIPELINE: &str = r#"
version: 1
stages:
  text:
    uses: dataset
    with: { source: ./text.jsonl }
  questions:
    uses: dataset
    with: { source: ./questions.jsonl, column_map: { question: question, output: answer }, template: "Q: {question}\nA: " }
  fresh:
    uses: new_model
    with:
      { text: text, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, max_position_embeddings: 128 }
  one:
    uses: generate
    with: { model: fresh, prompts: ["Written in the file"], max_new_tokens: 8 }
  several:
    uses: generate
    with: { model: fresh, prompts: questions, limit: 2, max_new_tokens: 8 }
publish: { one: ./out/one, several: ./out/several }
"#;

fn project() -> Project {
    let project = Project::with_pipeline("lora.yaml");
    project.write("asking.yaml", PIPELINE);
    project
}

#[test]
fn a_prompt_of_the_command_line_takes_the_place_of_the_files() {
    let project = project();
    let ask = |more: &[&str]| {
        let arguments: Vec<&str> = ["run", "asking.yaml"].iter().chain(more).copied().collect();
        project.run(&arguments).ends_with(0)
    };
    // What looks like a reference or like YAML is text here.
    let prompt = "Say ${vars.x}: \"no\", [now] \\ here";
    let ran = ask(&["--until", "one", "--prompt", prompt]).says("[one]\n").says(prompt).warns("3 ran");
    assert!(!ran.stdout.contains("Written in the file") && !ran.stdout.contains("[several]"), "{ran}");
    let answer: String = ran.stdout.lines().skip_while(|line| *line != prompt).take(2).collect();
    assert!(!project.path("out/several").exists(), "only what is asked for is published");
    // The same again comes from the store, and is answered all the same.
    let again = ask(&["--until", "one", "--prompt", prompt]).warns("all 3 stages are cached");
    let answered: String = again.stdout.lines().skip_while(|line| *line != prompt).take(2).collect();
    assert_eq!(answered, answer);
    // Without `--until` every stage that generates is asked, and a limit on rows is no obstacle.
    let ran = ask(&["--prompt", "First?", "--prompt", "Second?"]).says("[one]").says("[several]");
    assert_eq!((ran.stdout.matches("First?").count(), ran.stdout.matches("Second?").count()), (2, 2), "{ran}");
}

#[test]
fn what_cannot_be_asked_is_said() {
    let project = project();
    project.run(&["run", "lora.yaml", "--prompt", "Who?"]).ends_with(2).warns("`generate`").warns("has none");
    project.run(&["run", "asking.yaml", "--until", "on"]).ends_with(2).warns("no stage `on`").warns("`one`");
}

#[test]
fn on_a_terminal_an_answer_grows_and_is_not_repeated() {
    let project = project();
    let (terminal, end) = pseudo_terminal();
    let mut command = project.command(&["run", "asking.yaml", "--until", "one"]);
    command.env("TERM", "xterm").stdout(end.try_clone().unwrap()).stderr(end);
    let mut child = command.spawn().unwrap();
    // The command holds the terminal's other end; while it does, reading would never come to an end.
    drop(command);
    let mut shown = Vec::new();
    let mut screen = File::from(terminal);
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = screen.read(&mut bytes) {
        shown.extend_from_slice(&bytes[..count]);
    }
    assert!(child.wait().unwrap().success());
    let shown = String::from_utf8_lossy(&shown);
    assert_eq!(shown.matches("Written in the file").count(), 1, "{shown}");
    assert!(shown.find("Written in the file") < shown.find("done: 3 ran"), "{shown}");
    // What grew is the answer that is kept, its control characters made harmless and its lines under each other.
    let kept = std::fs::read_to_string(project.path("out/one/samples.txt")).unwrap();
    let answer = kept.split_once("-> ").unwrap().1.trim_end();
    let harmless = answer.replace(|letter: char| letter.is_control() && letter != '\n' && letter != '\t', "\u{fffd}");
    let expected = harmless.replace('\n', "\r\n  ");
    assert!(!answer.is_empty() && shown.contains(&expected), "{shown:?} lacks {expected:?}");
}
