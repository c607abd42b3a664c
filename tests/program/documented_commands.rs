//! Every command that a page shows is run as it stands.
//!
//! A command is in a fenced block `sh`, which a shell runs, or follows `$ ` in a block that shows its output. Both run
//! in a folder with the page's own pipeline files, a checkpoint, rows and a Hub that has them under every name. What
//! cannot be run so is marked in the page, with the reason: `<!-- not run: a GPU -->`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use serde_json::json;
use test_harness::test;

use crate::hub::FaultyHub;
use crate::support::Project;
use crate::support::tiny::Tokenizer;

/// Why a command is not run; a mark begins with one of these.
const REASONS: [&str; 7] =
    ["a GPU or NPU", "another program", "a cluster", "the build", "the network", "minutes", "an excerpt"];

/// A block of a page.
#[derive(Debug)]
struct Block {
    page: PathBuf,
    line: usize,
    script: String,
    /// Why it is not run.
    mark: Option<String>,
    /// The exit code that the page announces.
    exit: i32,
}

impl Block {
    /// Whether it is run here; what takes minutes is run by `scripts/check-release`.
    fn is_run(&self) -> bool {
        self.mark.as_ref().is_none_or(|mark| mark.starts_with("minutes") && test_harness::do_everything())
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn pages() -> Vec<PathBuf> {
    let mut pages = vec![PathBuf::from("README.md")];
    for folder in ["docs", "docs/stages"] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".md") {
                pages.push(Path::new(folder).join(name));
            }
        }
    }
    pages.sort();
    pages
}

/// The commands of a page, and the whole pipeline files in it.
fn read(page: &Path) -> (Vec<Block>, Vec<String>) {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let (mut blocks, mut files) = (Vec::new(), Vec::new());
    let mut lines = text.lines().enumerate().peekable();
    let mut before = "";
    while let Some((at, line)) = lines.next() {
        let Some(language) = line.strip_prefix("```") else {
            let shown = line.strip_prefix("    ").unwrap_or_default();
            // The forms of a command are no commands.
            let is_form = page.ends_with("commands.md");
            assert!(!shown.starts_with("pipeline ") || is_form, "{}:{}: write it as `sh`", page.display(), at + 1);
            before = if line.is_empty() { before } else { line };
            continue;
        };
        let content: Vec<&str> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let mark =
            |name: &str| Some(before.strip_prefix("<!-- ")?.strip_suffix(" -->")?.strip_prefix(name)?.to_owned());
        let scripts: Vec<String> = match language {
            "sh" => vec![content.join("\n")],
            "" => content.iter().filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned).collect(),
            "yaml" if content.first() == Some(&"version: 1") => {
                files.push(content.join("\n"));
                continue;
            }
            _ => continue,
        };
        let exit = mark("exits with ").map_or(0, |code| code.parse().unwrap());
        let block = |script| Block { page: page.to_owned(), line: at + 1, script, mark: mark("not run: "), exit };
        blocks.extend(scripts.into_iter().map(block));
        before = "";
    }
    (blocks, files)
}

/// The name that a pipeline file of a page goes by: `name: xsum` is `xsum.yaml`.
fn file_name(text: &str) -> String {
    let name = text.lines().find_map(|line| line.strip_prefix("name: "));
    let name = name.map(|name| name.split(" #").next().unwrap_or(name).trim());
    format!("{}.yaml", name.unwrap_or("job"))
}

/// A folder with what pages take for granted.
fn prepare(project: &Project, files: &[String], tokenizer: &Tokenizer) {
    tokenizer.checkpoint("llama31", &project.path("my_model"));
    project.write("rows.jsonl", &rows());
    copy(&root().join("tests/pages"), &project.path(""));
    for folder in ["bin", "home"] {
        fs::create_dir(project.path(folder)).unwrap();
    }
    for folder in [".zfunc", ".config/fish/completions", ".local/share/bash-completion/completions"] {
        fs::create_dir_all(project.path("home").join(folder)).unwrap();
    }
    for folder in ["pipelines", "tests/pipelines"] {
        copy(&root().join(folder), &project.path(folder));
    }
    symlink(env!("CARGO_BIN_EXE_pipeline"), project.path("bin/pipeline")).unwrap();
    // `job.yaml` is the first file of a page that has any.
    if let Some(first) = files.first() {
        project.write("job.yaml", first);
    }
    for text in files {
        project.write(&file_name(text), text);
    }
}

/// Rows with a column for every form that pages read.
fn rows() -> String {
    let row = |at: usize| {
        let (question, answer) = (format!("Who are you, {at}?"), "I am Pip.");
        let messages = json!([{ "role": "user", "content": question }, { "role": "assistant", "content": answer }]);
        json!({ "messages": messages, "instruction": question, "input": "", "output": answer, "question": question,
                "answer": answer, "document": question, "summary": answer })
    };
    (0..450).map(|at| format!("{}\n", row(at))).collect()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A Hub on which every repository has a tiny checkpoint and rows.
fn serve(checkpoint: &Path) -> FaultyHub {
    let mut files =
        vec![("train.jsonl".to_owned(), rows().into_bytes()), ("test.jsonl".to_owned(), rows().into_bytes())];
    for entry in fs::read_dir(checkpoint).unwrap() {
        let path = entry.unwrap().path();
        files.push((path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap()));
    }
    let hub =
        FaultyHub::serve(&files.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect::<Vec<_>>());
    hub.be_every_repository();
    hub
}

/// Runs the blocks of a page one after the other, and says which fail.
fn run(page: &Path, tokenizer: &Tokenizer) -> Vec<String> {
    let (blocks, files) = read(page);
    let run: Vec<&Block> = blocks.iter().filter(|block| block.is_run()).collect();
    if run.is_empty() {
        return Vec::new();
    }
    let project = Project::new();
    prepare(&project, &files, tokenizer);
    let hub = serve(&project.path("my_model"));
    let failures = run.into_iter().filter_map(|block| {
        let output = command(&project, &hub, &block.script).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        (output.status.code() != Some(block.exit)).then(|| {
            format!("{}:{}: {:?}\n{}\n{said}", block.page.display(), block.line, output.status.code(), block.script)
        })
    });
    failures.collect()
}

fn command(project: &Project, hub: &FaultyHub, script: &str) -> Command {
    let mut command = Command::new("sh");
    let path = format!("{}:{}", project.path("bin").display(), std::env::var("PATH").unwrap());
    command.args(["-euc", script]).current_dir(project.path("")).env("PATH", path);
    for name in ["PIPELINE_HOME", "PIPELINE_PYTHON", "PIPELINE_REMOTE", "HF_TOKEN", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    command.env("HOME", project.path("home")).env("HF_ENDPOINT", &hub.endpoint).env("HF_HOME", project.path("hf"));
    command.env("HF_HUB_CACHE", project.path("hub-cache")).env("MODELSCOPE_ENDPOINT", &hub.endpoint);
    command
}

#[test]
fn every_command_of_a_page_does_what_it_is_for() {
    let tokenizer = Tokenizer::train();
    let pages = Mutex::new(pages());
    let failed = Mutex::new(Vec::new());
    let threads = thread::available_parallelism().unwrap().get().min(4);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some(page) = pages.lock().unwrap().pop() else { break };
                    let failures = run(&page, &tokenizer);
                    failed.lock().unwrap().extend(failures);
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

#[test]
fn what_is_not_run_has_a_reason() {
    let blocks: Vec<Block> = pages().iter().flat_map(|page| read(page).0).collect();
    let run = blocks.iter().filter(|block| block.mark.is_none()).count();
    assert!(run >= 25, "only {run} of {} blocks are run", blocks.len());
    for block in blocks {
        let Some(mark) = block.mark else { continue };
        let is_known = REASONS.iter().any(|reason| mark.starts_with(reason));
        assert!(is_known, "{}:{}: `{mark}` is none of {}", block.page.display(), block.line, REASONS.join(", "));
        println!("not run: {}:{}: {mark}", block.page.display(), block.line);
    }
}
