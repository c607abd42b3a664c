//! The codes of problems: all that the program uses are described, and each example shows what it is there to show.
//!
//! `PIPELINE_BLESS=1 cargo test --release --test problems` writes `docs/problems.md` anew from the table.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use engine::checks::{check, complete};
use engine::file::codes::{self, BESIDE, Example, OVERRIDDEN, ProblemCode};
use engine::file::problem::{Problem, Severity};
use engine::home::Home;
use engine::publish::{Moment, check_targets};
use support::Project;

/// A project with the files that examples name.
fn project() -> Project {
    let project = Project::new();
    for folder in ["data", "linked", "looped"] {
        fs::create_dir(project.path(folder)).unwrap();
    }
    for (name, text) in BESIDE {
        project.write(name, text);
    }
    project.write("linked/rows.jsonl", BESIDE[0].1);
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

fn both(project: &Project, example: Example) -> [Vec<Problem>; 2] {
    match example {
        Example::File { wrong, right } => [wrong, right].map(|text| problems(project, text.as_bytes(), &[])),
        Example::Override { wrong, right } => {
            [wrong, right].map(|text| problems(project, OVERRIDDEN.as_bytes(), &[text]))
        }
        Example::Made { wrong, right, .. } => {
            [problems(project, &wrong(), &[]), problems(project, right.as_bytes(), &[])]
        }
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
    for ProblemCode { code, severity, example, .. } in codes::all() {
        let [wrong, right] = both(&project, *example);
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

/// Every text in quotes of the program's sources, tests and the table of codes apart.
fn texts() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["engine/src", "stages/src", "src"] {
        sources(&root.join(folder), &mut files);
    }
    files.retain(|path| !path.starts_with(root.join("engine/src/file/codes")));
    let mut texts = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let text = text.split("#[cfg(test)]").next().unwrap();
        texts.extend(text.split('"').map(str::to_owned));
    }
    texts
}

#[test]
fn every_code_that_is_used_is_in_the_table() {
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
    assert!(missing.is_empty(), "engine/src/file/codes lacks {missing:?}");
}

#[test]
fn every_code_of_the_table_is_used() {
    let texts = texts();
    let unused: Vec<&str> = codes::all().map(|code| code.code).filter(|code| !texts.contains(*code)).collect();
    assert!(unused.is_empty(), "nothing reports {unused:?}");
}

/// `docs/problems.md`, as it follows from the table.
fn page() -> String {
    let mut page = "# Problems\n\n\
        What `pipeline validate`, `plan` and `run` say of a pipeline file has a code, which `pipeline explain CODE` describes. This page holds\n\
        the same, and is written by `PIPELINE_BLESS=1 cargo test --release --test problems`. Errors stop a run before it begins; warnings do\n\
        not. Only a file that is no YAML, no UTF-8 or too large is reported with that one error alone.\n\n\
        The examples lie beside these files:\n\n"
        .to_owned();
    for (name, text) in BESIDE {
        writeln!(page, "- `{name}`: `{}`", text.trim_end()).unwrap();
    }
    page += "\n| code | | what is wrong |\n|---|---|---|\n";
    for code in codes::all() {
        writeln!(page, "| [`{0}`](#{0}) | {1} | {2} |", code.code, severity(code), code.title).unwrap();
    }
    for code in codes::all() {
        write!(page, "\n## `{}`\n\n{} {}\n", code.code, code.meaning, code.advice).unwrap();
        let examples = match code.example {
            Example::File { wrong, right } => [wrong.to_owned(), right.to_owned()],
            Example::Override { wrong, right } => {
                [wrong, right].map(|text| format!("{OVERRIDDEN}\n# pipeline run FILE '{text}'\n"))
            }
            Example::Made { told, right, .. } => [format!("# {told}\n"), right.to_owned()],
        };
        for (title, text) in ["Wrong", "Right"].into_iter().zip(examples) {
            write!(page, "\n{title}:\n\n```yaml\n{text}```\n").unwrap();
        }
    }
    page
}

fn severity(code: &ProblemCode) -> &'static str {
    match code.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

#[test]
fn the_page_of_problems_says_what_the_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/problems.md");
    let expected = page();
    if std::env::var_os("PIPELINE_BLESS").is_some() {
        fs::write(&path, &expected).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "docs/problems.md is not what the table says; see the head of this file");
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
