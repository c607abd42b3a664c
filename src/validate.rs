//! `pipeline validate`: checks pipeline files without running anything or going out.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use engine::checks::complete;
use engine::file::problem::{Problem, Severity};
use engine::file::source::Sources;
use engine::home::Home;
use engine::publish::{Moment, check_targets};
use engine::stage::Registry;
use serde::Serialize;

use crate::Global;
use crate::junit::{self, Suite};
use crate::render::{self, Exit, Failure, ProblemView};
use crate::sarif;
use crate::terminal::{self, Look};
use crate::words;

/// Check pipeline files: every mistake at once, each with its line and column.
///
/// Nothing runs, and nothing is fetched. Exits with 2 if any file has an error.
#[derive(Args)]
pub(crate) struct ValidateArgs {
    /// Pipeline files, and changes that apply to all of them, as `stage.path=value` or `vars.name=value`.
    #[arg(required = true, value_name = "FILE")]
    arguments: Vec<PathBuf>,
    /// How to print the problems.
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
    /// SARIF 2.1.0, for code scanning.
    Sarif,
    /// JUnit XML, for CI servers.
    Junit,
}

/// What is known about one file.
struct Checked {
    file: String,
    /// `None` where the file has mistakes.
    stages: Option<usize>,
    sources: Sources,
    problems: Vec<Problem>,
}

/// The same as a program reads it.
#[derive(Serialize)]
struct CheckedView<'a> {
    file: &'a str,
    valid: bool,
    stages: Option<usize>,
    problems: Vec<ProblemView<'a>>,
}

impl Checked {
    fn view(&self) -> CheckedView<'_> {
        let Self { file, stages, sources, problems } = self;
        CheckedView { file, valid: stages.is_some(), stages: *stages, problems: ProblemView::of_all(sources, problems) }
    }
}

impl ValidateArgs {
    /// The files, and the changes to them: what has a `=` and is no file that is there.
    fn split(&self) -> (Vec<&Path>, Vec<String>) {
        let (mut files, mut overrides) = (Vec::new(), Vec::new());
        for argument in &self.arguments {
            match argument.to_str() {
                Some(text) if text.contains('=') && !argument.exists() => overrides.push(text.to_owned()),
                _ => files.push(argument.as_path()),
            }
        }
        (files, overrides)
    }
}

/// Checks each file.
pub(crate) fn run(args: &ValidateArgs, global: &Global) -> Result<(), Failure> {
    let registry = stages::registry();
    let home = global.named_home();
    let (files, overrides) = args.split();
    if files.is_empty() {
        return Err(Failure::wrong("no pipeline file is named, only changes to one"));
    }
    let checked: Vec<Checked> =
        files.into_iter().map(|file| check(file, &overrides, home.as_deref(), &registry)).collect();
    let printed = match args.format {
        Format::Text => text(&checked),
        Format::Json => crate::print_json(&checked.iter().map(Checked::view).collect::<Vec<_>>()),
        Format::Github => github(&checked),
        Format::Sarif => sarif(&checked),
        Format::Junit => junit(&checked),
    };
    let all_fine = checked.iter().all(|checked| checked.stages.is_some());
    Failure::after(if all_fine { Exit::Done } else { Exit::Wrong }, printed)
}

fn check(file: &Path, overrides: &[String], home: Option<&Path>, registry: &Registry) -> Checked {
    let name = file.display().to_string();
    // A home that is there is looked into, and none is made.
    let whole = Home::at(file, home);
    let home = Home::existing(file, home);
    match engine::plan::load(file, overrides, registry) {
        Ok(plan) => {
            let targets = check_targets(&plan, &whole, Moment::Ahead);
            let findings = engine::checks::check(&plan, home.as_ref(), None);
            let valid = findings.are_fine() && targets.iter().all(|problem| problem.severity == Severity::Warning);
            let found = findings.into_problems().into_iter().chain(targets);
            let mut problems: Vec<Problem> = plan.warnings.into_iter().chain(found).collect();
            problems.sort_by_key(Problem::place);
            let stages = valid.then_some(plan.stages.len());
            Checked { file: name, stages, sources: plan.sources, problems }
        }
        Err(rejected) => {
            let rejected = complete(rejected, home.as_ref());
            Checked { file: name, stages: None, sources: rejected.sources, problems: rejected.problems }
        }
    }
}

fn text(checked: &[Checked]) -> Result<(), Failure> {
    let mut out = crate::screen::stdout();
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

fn github(checked: &[Checked]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for Checked { sources, problems, .. } in checked {
        for problem in problems {
            writeln!(out, "{}", render::problem_github(sources, problem))?;
        }
    }
    Ok(())
}

fn sarif(checked: &[Checked]) -> Result<(), Failure> {
    let files = checked.iter().map(|checked| (&checked.sources, checked.problems.as_slice()));
    crate::print_json(&sarif::log(files))
}

fn junit(checked: &[Checked]) -> Result<(), Failure> {
    fn suite(checked: &Checked) -> Suite<'_> {
        Suite {
            file: &checked.file,
            valid: checked.stages.is_some(),
            sources: &checked.sources,
            problems: &checked.problems,
        }
    }
    let suites: Vec<Suite<'_>> = checked.iter().map(suite).collect();
    std::io::stdout().lock().write_all(junit::report(&suites).as_bytes())?;
    Ok(())
}
