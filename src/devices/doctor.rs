//! `pipeline devices doctor`: what is wrong with this machine, or with what a pipeline file asks of it, and what to do.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use ::devices::doctor::{Finding, Limits, Python, Severity, Subject, Variable, VariableSource, examine};
use ::devices::{Device, DeviceKind, Inventory};
use clap::Args;
use engine::executor::ExecutorKind;
use engine::file::source::Sources;
use engine::plan::{DeviceCount, Plan, PlannedStage};
use serde::Serialize;
use serde_json::Value;

use super::ListArgs;
use crate::render::{Exit, Failure};
use crate::terminal::Look;
use crate::{Format, words};

/// Diagnose common mistakes: versions, variables, device nodes, memory, ports, limits; each with a remedy.
///
/// With a file, also checks the variables that it sets, and whether its stages can get what they request. Exits with 1
/// where something is wrong, and with 0 where there is nothing, or only what is worth a warning.
#[derive(Args)]
pub(super) struct DoctorArgs {
    /// A pipeline file to look at, too.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    list: ListArgs,
}

/// The form of what `--format json` prints; it rises when a field goes or changes its meaning.
const JSON_VERSION: u32 = 1;

/// Importing torch takes several times as long as a vendor's tool.
const IMPORT_TAKES: u32 = 8;

/// Examines the machine, and the file where there is one.
pub(super) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    let plan = args.file.as_deref().map(load).transpose()?;
    let machine = args.list.machine();
    let inventory = Inventory::of(&machine, &DeviceKind::ALL);
    let python = Python::probe(&stages::compute::worker_python(), machine.limit() * IMPORT_TAKES);
    let mut variables = Variable::of_this_process();
    variables.extend(plan.iter().flat_map(variables_of));
    let limits = Limits::of_this_process(&machine);
    let subject = Subject { machine: &machine, inventory: &inventory, variables: &variables, limits, python: &python };
    let mut findings = examine(&subject);
    findings.extend(plan.iter().flat_map(|plan| never_met(plan, &inventory)));
    findings.extend(stages::compute::kernels::tiles_refused().map(without_tiles));
    findings.sort_by_key(|finding| finding.severity);
    let printed = match args.list.format {
        Format::Json => crate::print_json(&FindingsView {
            version: JSON_VERSION,
            findings: &findings,
            errors: count(&findings, Severity::Error),
            warnings: count(&findings, Severity::Warning),
            python: &python,
        }),
        Format::Text => print(&findings, &inventory, &python).map_err(Failure::from),
    };
    let wrong = findings.iter().any(|finding| finding.severity == Severity::Error);
    Failure::after(if wrong { Exit::StageFailed } else { Exit::Done }, printed)
}

/// A CPU whose tiles may not be used.
fn without_tiles(refused: String) -> Finding {
    Finding {
        severity: Severity::Warning,
        check: "amx-refused",
        message: "bf16 is computed without the tiles of this CPU (AMX), many times slower".to_owned(),
        seen: refused,
        help: "Linux 5.16 or newer, and a container whose seccomp filter allows `arch_prctl`".to_owned(),
    }
}

fn load(file: &Path) -> Result<Plan, Failure> {
    Ok(engine::plan::load(file, &[], &stages::registry())?)
}

/// The variables that the stages of a file set.
fn variables_of(plan: &Plan) -> Vec<Variable> {
    let of_stage = |stage: &PlannedStage| {
        let set = stage.parameters.get("env").and_then(Value::as_object);
        let set = set.into_iter().flatten().filter_map(|(name, value)| {
            // A number or a boolean out of a variable of the file still is one.
            let value = match value {
                Value::String(text) => text.clone(),
                Value::Number(_) | Value::Bool(_) => value.to_string(),
                Value::Null | Value::Array(_) | Value::Object(_) => return None,
            };
            let place = VariableSource::File(place(&plan.sources, stage, name));
            Some(Variable { name: name.clone(), value, place })
        });
        set.collect::<Vec<_>>()
    };
    plan.stages.iter().flat_map(of_stage).collect()
}

/// `job.yaml:12:7 (stage adapter)`.
fn place(sources: &Sources, stage: &PlannedStage, variable: &str) -> String {
    let path = format!("env.{variable}");
    let span = stage.field_spans.iter().find(|(field, _)| *field == path).map_or(stage.span, |(_, span)| *span);
    let (line, column) = sources.line_column(span);
    let name = sources.get(span.source).map_or("", |source| source.name.as_str());
    format!("{name}:{line}:{column} (stage {})", stage.id)
}

/// The stages that can never have what they ask for on this machine. Of those that a cluster runs this machine says
/// nothing.
fn never_met(plan: &Plan, inventory: &Inventory) -> Vec<Finding> {
    let here = |index: &usize| plan.executor_of(*index, None).0 == ExecutorKind::Local;
    let stages = (0..plan.stages.len()).filter(here).map(|index| &plan.stages[index]);
    let finding = |stage: &PlannedStage| {
        let (seen, help) = lack(stage, inventory)?;
        Some(Finding {
            severity: Severity::Error,
            check: "stage-resources",
            message: format!("stage `{}` can never have what it requests", stage.id),
            seen: format!("it requests {seen}"),
            help: format!("add `{}.resources.{help}` to the command, or run it on another machine", stage.declared),
        })
    };
    stages.filter_map(finding).collect()
}

/// What a stage asks for in vain, and what it could ask for.
fn lack(stage: &PlannedStage, inventory: &Inventory) -> Option<(String, String)> {
    let asked = &stage.resources;
    if asked.nodes > 1 {
        return Some((format!("{} nodes, and this machine is one", asked.nodes), "nodes=1".to_owned()));
    }
    let kind = asked.device?;
    let served = stage.bound.devices();
    if !served.contains(&kind) {
        let names: Vec<&str> = served.iter().map(|kind| kind.name()).collect();
        let seen = format!("{}, and `{}` computes on {}", kind.in_words(), stage.kind, names.join(", "));
        return Some((seen, "device=cpu".to_owned()));
    }
    let devices: Vec<&Device> = inventory.of_kind(kind).collect();
    if devices.is_empty() {
        return Some((format!("{}, and this machine has none", kind.in_words()), "device=cpu".to_owned()));
    }
    let well = devices.iter().filter(|device| device.health.is_usable()).count();
    if let DeviceCount::Exactly(count) = asked.count
        && kind != DeviceKind::Cpu
        && count as usize > well
    {
        return Some((format!("{count} of {kind}, and {well} of {} are well", devices.len()), format!("count={well}")));
    }
    let (wanted, largest) = (asked.memory?, devices.iter().filter_map(|device| device.memory_total).max()?);
    let seen = || format!("{} of memory, and {kind} has {}", words::bytes(wanted), words::bytes(largest));
    (wanted > largest).then(|| (seen(), format!("memory={}MiB", largest >> 20)))
}

/// What was found, as a program reads it.
#[derive(Serialize)]
struct FindingsView<'a> {
    version: u32,
    findings: &'a [Finding],
    errors: usize,
    warnings: usize,
    python: &'a Python,
}

/// How many findings are of a severity.
fn count(findings: &[Finding], severity: Severity) -> usize {
    findings.iter().filter(|finding| finding.severity == severity).count()
}

fn print(findings: &[Finding], inventory: &Inventory, python: &Python) -> io::Result<()> {
    let mut out = crate::screen::stdout();
    let look = Look::stdout();
    for Finding { severity, check, message, seen, help } in findings {
        let colour = match severity {
            Severity::Error => "31",
            Severity::Warning => "33",
            Severity::Note => "36",
        };
        let name = look.paint(colour, severity.name());
        writeln!(out, "{}", look.wrap(&format!("{name}: {} [{check}]", words::visible(message)), 2))?;
        writeln!(out, "{}", look.wrap(&format!("  seen: {}", words::visible(seen)), 6))?;
        writeln!(out, "{}\n", look.wrap(&format!("  do:   {help}"), 6))?;
    }
    writeln!(out, "{}", look.wrap(&format!("looked at {}", looked_at(inventory, python)), 2))?;
    writeln!(out, "{}", summary(findings))
}

/// What was there to be wrong: without it, that nothing was found says nothing.
fn looked_at(inventory: &Inventory, python: &Python) -> String {
    let kinds = DeviceKind::ALL.into_iter().filter_map(|kind| match inventory.of_kind(kind).count() {
        0 => None,
        _ if kind == DeviceKind::Cpu => Some("the CPU".to_owned()),
        count => Some(format!("{count} of {kind}")),
    });
    let mut parts: Vec<String> = kinds.collect();
    parts.push("variables, ports and limits".to_owned());
    if let Some(installed) = &python.installed {
        let torch = installed.version("torch").map_or("no torch".to_owned(), |version| format!("torch {version}"));
        parts.push(format!("Python {} ({torch})", installed.python));
    }
    parts.join("; ")
}

fn summary(findings: &[Finding]) -> String {
    let named = |severity| match count(findings, severity) {
        0 => None,
        count => Some(words::plural(count, severity.name())),
    };
    let counts: Vec<String> =
        [Severity::Error, Severity::Warning, Severity::Note].into_iter().filter_map(named).collect();
    if counts.is_empty() { "nothing wrong was found".to_owned() } else { counts.join(", ") }
}
