//! `pipeline validate`: checks pipeline files without running anything or going out.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use engine::file::problem::Problem;
use engine::file::source::Sources;
use serde_json::json;

use crate::render::{self, Exit, Failure};
use crate::terminal::{self, Look};
use crate::words;

/// Check pipeline files: every mistake at once, each with its line and column.
///
/// Nothing runs, and nothing is fetched. Ends with 2 when any file is wrong.
#[derive(Args)]
pub struct ValidateArgs {
    /// Pipeline files.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How to print what was found.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum Format {
    /// For a person.
    #[default]
    Text,
    /// For a program.
    Json,
    /// Annotations for GitHub Actions.
    Github,
}

/// What is known about one file.
struct Checked {
    file: String,
    /// `None` where the file has mistakes.
    stages: Option<usize>,
    sources: Sources,
    problems: Vec<Problem>,
}

/// Checks each file.
pub fn run(args: &ValidateArgs) -> Result<(), Failure> {
    let registry = stages::registry();
    let checked: Vec<Checked> = args.files.iter().map(|file| check(file, &registry)).collect();
    let printed = match args.format {
        Format::Text => text(&checked),
        Format::Json => crate::print_json(&json!(checked.iter().map(file_json).collect::<Vec<_>>())),
        Format::Github => github(&checked),
    };
    let all_fine = checked.iter().all(|checked| checked.stages.is_some());
    Failure::after(if all_fine { Exit::Done } else { Exit::Wrong }, printed)
}

fn check(file: &std::path::Path, registry: &engine::stage::Registry) -> Checked {
    let name = file.display().to_string();
    match engine::plan::load(file, &[], registry) {
        Ok(plan) => {
            let missing = engine::keys::check_outside(&plan);
            let stages = missing.is_empty().then_some(plan.stages.len());
            let problems = plan.warnings.into_iter().chain(missing).collect();
            Checked { file: name, stages, sources: plan.sources, problems }
        }
        Err(rejected) => Checked { file: name, stages: None, sources: rejected.sources, problems: rejected.problems },
    }
}

fn text(checked: &[Checked]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for Checked { file, stages, sources, problems } in checked {
        terminal::tell(render::problems(sources, problems, Look::stderr()));
        match stages {
            Some(count) if problems.is_empty() => writeln!(out, "{file}: ok, {}", words::plural(*count, "stage"))?,
            Some(count) => {
                writeln!(out, "{file}: ok, {}, {}", words::plural(*count, "stage"), render::count(problems))?;
            }
            None => terminal::tell_line(format_args!("{file}: {}", render::count(problems))),
        }
    }
    Ok(())
}

fn file_json(checked: &Checked) -> serde_json::Value {
    let Checked { file, stages, sources, problems } = checked;
    let problems: Vec<_> = problems.iter().map(|problem| render::problem_json(sources, problem)).collect();
    json!({ "file": file, "valid": stages.is_some(), "stages": stages, "problems": problems })
}

fn github(checked: &[Checked]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for Checked { sources, problems, .. } in checked {
        for problem in problems {
            writeln!(out, "{}", render::problem_github(sources, problem))?;
        }
    }
    Ok(())
}
