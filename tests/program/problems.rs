//! The catalogue of problem codes (docs/problems.md): every code that the program reports is in it, every code in it is
//! reported, and each example has the problem of its code.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use engine::checks::{check, complete};
use engine::file::codes::{self, ProblemCode};
use engine::file::parse::MAX_BYTES;
use engine::file::problem::{Problem, Severity};
use engine::file::source::Span;
use engine::home::Home;
use engine::publish::{Moment, check_targets};
use test_harness::test;

use crate::support::Project;

/// The files that examples read, from the list at the head of the catalogue: ``- `name`: `line` ``. Rows are there a
/// hundred times.
fn files() -> Vec<(&'static str, String)> {
    let page = include_str!("../../docs/problems.md");
    let (list, _) = page.split_once("\n| code |").unwrap();
    let item = |line: &'static str| line.strip_prefix("- `")?.strip_suffix('`')?.split_once("`: `");
    let times = |name: &str| if name.ends_with(".jsonl") { 100 } else { 1 };
    list.lines().filter_map(item).map(|(name, text)| (name, format!("{text}\n").repeat(times(name)))).collect()
}

/// A project with the files that examples read.
fn project() -> Project {
    let project = Project::new();
    for folder in ["data", "linked", "looped"] {
        fs::create_dir(project.path(folder)).unwrap();
    }
    for (name, text) in files() {
        project.write(name, &text);
    }
    fs::create_dir(project.path("olmo2")).unwrap();
    project.write(
        "olmo2/config.json",
        r#"{"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 4096}"#,
    );
    // Without a tensor: a header of two bytes.
    fs::write(project.path("olmo2/model.safetensors"), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/data/tokenizers/bytelevel/tokenizer.json");
    fs::copy(tokenizer, project.path("olmo2/tokenizer.json")).unwrap();
    fs::copy(project.path("rows.jsonl"), project.path("linked/rows.jsonl")).unwrap();
    std::os::unix::fs::symlink("rows.jsonl", project.path("linked/same.jsonl")).unwrap();
    std::os::unix::fs::symlink(".", project.path("looped/again")).unwrap();
    project
}

/// What a check finds in a file.
fn problems(project: &Project, text: &[u8], overrides: &[&str]) -> Vec<Problem> {
    let file = project.path("pipeline.yaml");
    fs::write(&file, text).unwrap();
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    match engine::plan::load(&file, &overrides, &stages::registry()) {
        Ok(plan) => {
            let targets = check_targets(&plan, &Home::at(&file, None), Moment::Ahead);
            plan.warnings.iter().cloned().chain(check(&plan, None, None).into_problems()).chain(targets).collect()
        }
        Err(rejected) => complete(rejected, None).problems,
    }
}

/// An example as the catalogue shows it, with the override in its last comment, where it has one.
fn example(project: &Project, text: &str) -> Vec<Problem> {
    if text.starts_with("# pipeline import FILE") {
        return imported(project, text);
    }
    let argument = text.lines().last().and_then(|line| line.strip_prefix("# pipeline run FILE '")?.strip_suffix('\''));
    problems(project, text.as_bytes(), &argument.into_iter().collect::<Vec<_>>())
}

/// What `pipeline import` finds in a configuration of another tool.
fn imported(project: &Project, text: &str) -> Vec<Problem> {
    project.write("other.yaml", text);
    let said = project.run(&["import", "other.yaml", "--format", "json"]).json();
    let problem = |found: &serde_json::Value| {
        let code = codes::find(found["code"].as_str().unwrap()).unwrap().code;
        Problem::error(code, Span::default(), found["message"].as_str().unwrap(), "")
    };
    said["problems"].as_array().unwrap().iter().map(problem).collect()
}

/// The wrong examples that the catalogue only describes: too large for a page, or not UTF-8.
fn described(code: &str) -> Option<Vec<u8>> {
    match code {
        "not-utf8" => Some(
            b"version: 1\nname: caf\xe9\nstages:\n  rows: { uses: dataset, with: { source: ./rows.jsonl } }\n".to_vec(),
        ),
        "too-large" => Some(format!("version: 1\n{}", "#".repeat(MAX_BYTES)).into_bytes()),
        "too-deep" => Some(format!("version: 1\nvars: {{ x: {}{} }}\n", "[".repeat(100), "]".repeat(100)).into_bytes()),
        "too-many-aliases" => {
            let mut text = "version: 1\nvars:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
            for level in 1..7 {
                let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
                text += &format!("  a{level}: &a{level} [{aliases}]\n");
            }
            Some(text.into_bytes())
        }
        _ => None,
    }
}

fn told(problems: &[Problem]) -> String {
    let told = problems.iter().map(|problem| format!("{} ({}, {:?})", problem.code, problem.message, problem.severity));
    told.collect::<Vec<_>>().join("; ")
}

#[test]
fn each_example_has_its_problem_and_no_other_and_its_remedy_has_none() {
    let project = project();
    let mut failed = String::new();
    for ProblemCode { code, severity, wrong, right, .. } in codes::all() {
        let wrong = match described(code) {
            Some(bytes) => problems(&project, &bytes, &[]),
            None => example(&project, wrong),
        };
        let right = example(&project, right);
        let found: Vec<(&str, Severity)> = wrong.iter().map(|problem| (problem.code, problem.severity)).collect();
        if found != [(*code, *severity)] {
            writeln!(failed, "{code}: the wrong example gives {}", told(&wrong)).unwrap();
        }
        if !right.is_empty() {
            writeln!(failed, "{code}: the right example gives {}", told(&right)).unwrap();
        }
    }
    assert!(failed.is_empty(), "{failed}");
}

/// The Rust files below a folder that are no tests.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        match path.is_dir() {
            true if !is_test => sources(&path, found),
            false if !is_test && path.extension().is_some_and(|extension| extension == "rs") => found.push(path),
            _ => {}
        }
    }
}

/// Every string literal of the program's sources, tests excepted.
fn texts() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["engine/src", "stages/src", "src"] {
        sources(&root.join(folder), &mut files);
    }
    let mut texts = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let text = text.split("#[cfg(test)]").next().unwrap();
        texts.extend(text.split('"').map(str::to_owned));
    }
    texts
}

#[test]
fn every_code_that_is_reported_is_in_the_catalogue() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["engine/src", "stages/src", "src"] {
        sources(&root.join(folder), &mut files);
    }
    let mut used = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let text = text.split("#[cfg(test)]").next().unwrap();
        for call in ["Problem::error(", "Problem::warning(", "self.report(", "report(", " code: "] {
            let first = |rest: &str| rest.trim_start().strip_prefix('"')?.split('"').next().map(str::to_owned);
            used.extend(text.split(call).skip(1).filter_map(first));
        }
    }
    assert!(used.len() > 40, "{used:?}");
    let missing: Vec<&String> = used.iter().filter(|code| codes::find(code).is_none()).collect();
    assert!(missing.is_empty(), "docs/problems.md lacks {missing:?}");
}

#[test]
fn every_code_of_the_catalogue_is_reported() {
    let texts = texts();
    let unused: Vec<&str> = codes::all().map(|code| code.code).filter(|code| !texts.contains(*code)).collect();
    assert!(unused.is_empty(), "nothing reports {unused:?}");
}

#[test]
fn a_code_is_explained_and_an_unknown_one_gets_the_nearest() {
    let project = Project::new();
    project.run(&["explain", "unknown-key"]).ends_with(0).says("Wrong:").says("soruce");
    project.run(&["explain"]).ends_with(0).says("unknown-key").says("unused-variable");
    project.run(&["explain", "unknown-kee"]).ends_with(2).warns("did you mean `unknown-key`?");
    let all = project.run(&["explain", "--format", "json"]).ends_with(0).json();
    assert_eq!(all.as_array().unwrap().len(), codes::all().count());
    let one = project.run(&["explain", "cycle", "--format", "json"]).ends_with(0).json();
    assert!(one["wrong"].as_str().unwrap().contains("version: 1"), "{one}");
    assert!(fs::read_dir(project.path(".")).unwrap().next().is_none());
}
