//! Finds a stage's output in the store: what `show` and `export` take as `STAGE` or `STAGE.OUTPUT`; and writes the
//! commands that messages name.

use std::path::Path;

use cache::{OutputRecord, Store, StoreError};
use engine::explain::{StageForecast, Status, explain};
use engine::history::{Recorded, RecordedStage, StageSummary};
use engine::home::Home;
use engine::plan::{Plan, PlannedStage, Rejected, ResolvedInput, Scale};
use engine::suggest;
use stages::data::artifact::{OutputKind, Tokenizer};

use crate::render::{self, Exit, Failure, Message};
use crate::{Global, new_file, words};

/// How many children of a sweep are named where one has to be chosen.
const MOST_NAMED: usize = 6;

/// An output that is in the store.
pub(crate) struct Located {
    /// The pipeline's home.
    pub store: Store,
    /// `stage.output`.
    pub name: String,
    /// Its kind, its folder, its facts.
    pub record: OutputRecord,
    /// The tokenizer behind it, where it holds tokens.
    pub tokenizer: Option<OutputRecord>,
}

/// What a command line says of a pipeline: other values are other results.
#[derive(Clone, Copy)]
pub(crate) struct Invocation<'a> {
    pub file: &'a Path,
    pub overrides: &'a [String],
    pub scale: Scale,
    pub global: &'a Global,
}

impl Invocation<'_> {
    /// The command that makes these results: `pipeline run job.yaml adapter.epochs=3`.
    pub(crate) fn run(&self) -> String {
        self.command("run", None)
    }

    /// The command that makes this one: `pipeline run job.yaml adapter.epochs=3 --until adapter`.
    pub(crate) fn run_until(&self, stage: &str) -> String {
        format!("{} --until {}", self.run(), words::for_shell(stage))
    }

    /// The command that shows it: `pipeline show job.yaml adapter adapter.epochs=3`.
    pub(crate) fn show(&self, name: &str) -> String {
        self.command("show", Some(name))
    }

    /// A command as a shell takes it, with the home where the command line names it.
    fn command(&self, command: &str, name: Option<&str>) -> String {
        let file = self.file.display().to_string();
        let home = self.global.home.as_ref().map(|home| home.display().to_string());
        let mut arguments: Vec<&str> = std::iter::once(file.as_str()).chain(name).collect();
        arguments.extend(self.overrides.iter().map(String::as_str));
        if self.scale == Scale::Smoke {
            arguments.push("--smoke");
        }
        if let Some(home) = &home {
            arguments.extend(["--home", home.as_str()]);
        }
        let arguments: Vec<String> = arguments.into_iter().map(words::for_shell).collect();
        format!("pipeline {command} {}", arguments.join(" "))
    }

    fn plan(&self) -> Result<Plan, Rejected> {
        engine::plan::load_at(self.scale, self.file, self.overrides, &stages::registry())
            .map_err(|rejected| new_file::or_recipe(rejected, self.file))
    }
}

/// The outputs that a name stands for in a pipeline file, each by its full name: of a stage alone, all of them.
///
/// # Errors
/// Fails where the file is wrong or there is no such stage.
pub(crate) fn names(invocation: &Invocation<'_>, name: &str) -> Result<Vec<String>, Failure> {
    let plan = invocation.plan()?;
    let (stage, output) = split(&plan, name)?;
    match (output, stage.outputs.as_slice()) {
        (None, [_, _, ..]) => Ok(stage.outputs.iter().map(|output| format!("{}.{}", stage.id, output.name)).collect()),
        (Some(_), _) | (None, [] | [_]) => Ok(vec![name.to_owned()]),
    }
}

/// The output that a name stands for in a pipeline file.
///
/// # Errors
/// Fails where the file is wrong, there is no such stage or output, or it has not been made yet.
pub(crate) fn output(file: &Path, overrides: &[String], name: &str, global: &Global) -> Result<Located, Failure> {
    output_of(&Invocation { file, overrides, scale: Scale::Full, global }, name)
}

/// The output that a name stands for, of a real run or of a smoke run.
///
/// # Errors
/// As [`output`].
pub(crate) fn output_of(invocation: &Invocation<'_>, name: &str) -> Result<Located, Failure> {
    let global = invocation.global;
    let plan = invocation.plan()?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    let (stage, output) = split(&plan, name)?;
    let output = output.map_or_else(|| only_output(stage), |output| Ok(output.to_owned()))?;
    if !stage.outputs.iter().any(|known| known.name == output) {
        let known: Vec<String> = stage.outputs.iter().map(|known| format!("{}.{}", stage.id, known.name)).collect();
        let name = format!("{}.{output}", stage.id);
        let failure = Failure::wrong(format!("stage `{}` has no output `{output}`", stage.id));
        return Err(failure.with_help_if(suggest::help(&name, "its outputs", &known)));
    }
    let home = global.home(invocation.file)?;
    let store = Store::look_or_open(home.store()).map_err(Failure::machine)?;
    let id = stage.id.clone();
    let tokenizer_input = tokenizer_behind(&plan.stages, stage).cloned();
    let forecasts = explain(&plan, &home).map_err(|error| Failure::explain(error, plan.sources))?;
    let stored = |stage: &str, output: &str| {
        forecasts.iter().find(|forecast| forecast.stage == stage)?.outputs.get(output).cloned()
    };
    // Taken, so that nobody collects what is read.
    let behind = tokenizer_input.as_ref().map(|input| input.stage.as_str());
    for forecast in forecasts.iter().filter(|forecast| forecast.stage == id || Some(forecast.stage.as_str()) == behind)
    {
        forecast.key.map_or(Ok(None), |key| store.take(&key)).map_err(Failure::machine)?;
    }
    let record =
        stored(&id, &output).ok_or_else(|| not_here(invocation, (id.as_str(), output.as_str()), &forecasts, &home))?;
    let tokenizer = tokenizer_input.and_then(|input| stored(&input.stage, &input.output));
    Ok(Located { store, name: format!("{id}.{output}"), record, tokenizer })
}

/// The failure of an output that the store has not.
fn not_here(
    invocation: &Invocation<'_>,
    (id, output): (&str, &str),
    forecasts: &[StageForecast],
    home: &Home,
) -> Failure {
    if forecasts.iter().any(|forecast| forecast.stage == id && forecast.status == Status::Remote) {
        // `cache pull` knows the file as it is.
        let fetch = match (invocation.overrides, invocation.scale) {
            ([], Scale::Full) => invocation.command("cache pull", Some(id)),
            _ => invocation.run_until(id),
        };
        return Failure::wrong(format!("`{id}.{output}` is in the shared cache, and not here"))
            .with_help(format!("`{fetch}` fetches it"));
    }
    let mut help = format!("`{}` makes it", invocation.run());
    let smoke = Invocation { scale: Scale::Smoke, ..*invocation };
    if invocation.scale == Scale::Full && is_made(&smoke, (id, output), home) {
        help += &format!("; `{}` shows that of the smoke run", smoke.show(&format!("{id}.{output}")));
    }
    Failure::wrong(format!("`{id}.{output}` has no result yet, as the pipeline is now")).with_help(help)
}

/// Whether an output is in the store.
fn is_made(invocation: &Invocation<'_>, (id, output): (&str, &str), home: &Home) -> bool {
    let forecasts = invocation.plan().ok().and_then(|plan| explain(&plan, home).ok()).unwrap_or_default();
    forecasts.iter().any(|forecast| forecast.stage == id && forecast.outputs.contains_key(output))
}

/// The failure of reading what was located in a file without overrides.
pub(crate) fn unreadable(error: StoreError, store: &Store, file: &Path) -> Failure {
    unreadable_by(error, store, &format!("pipeline run {}", words::for_shell(&file.display().to_string())))
}

/// The failure of reading what was located, which `command` makes. A damaged file is removed from the store, since only
/// what is missing is made again.
pub(crate) fn unreadable_by(error: StoreError, store: &Store, command: &str) -> Failure {
    let damaged = matches!(error, StoreError::CorruptTree { .. } | StoreError::MissingTree { .. });
    match error.object() {
        None if matches!(error, StoreError::Outside { .. }) => {
            return Failure::Told { exit: Exit::StageFailed, message: Message::of(&error) }
                .with_help(format!("`{command}` takes the file as it is now; or put it back as it was"));
        }
        None if !damaged => return Failure::machine(error),
        // Where the store cannot be written to, the next run that can removes it.
        Some(object) => drop(store.evict(&object)),
        None => {}
    }
    Failure::Told { exit: Exit::StageFailed, message: Message::of(&error) }
        .with_help(format!("`{command}` rebuilds it"))
}

/// The tokenizer that a stage reads, or that the nearest stage before it reads.
pub(crate) fn tokenizer_behind<'a>(stages: &'a [PlannedStage], stage: &'a PlannedStage) -> Option<&'a ResolvedInput> {
    let direct = stage.inputs.iter().find(|input| input.kind == Tokenizer::NAME);
    direct.or_else(|| {
        let before = |input: &ResolvedInput| stages.iter().find(|stage| stage.id == input.stage);
        stage.inputs.iter().filter_map(before).find_map(|stage| tokenizer_behind(stages, stage))
    })
}

/// The ids of the stages that names stand for: of a swept stage, of all its children.
///
/// # Errors
/// Fails where a name means no stage of the plan.
pub(crate) fn stages(plan: &Plan, names: &[String]) -> Result<Vec<String>, Failure> {
    let mut ids = Vec::with_capacity(names.len());
    for name in names {
        let found = plan.ids_of(name);
        if let Some(left_out) = plan.left_out.iter().find(|left_out| found.is_empty() && left_out.stage == *name) {
            // The stage whose own condition it is.
            let mut first = left_out;
            while let Some(before) = &first.follows {
                let Some(stage) = plan.left_out.iter().find(|stage| stage.stage == *before) else { break };
                first = stage;
            }
            return Err(Failure::wrong(crate::words::left_out(left_out, &plan.sources))
                .with_help(format!("to run it all the same add `{}.when=true`", first.stage)));
        }
        if found.is_empty() {
            return Err(unknown_stage(name, &plan.names()));
        }
        ids.extend(found.into_iter().map(str::to_owned));
    }
    Ok(ids)
}

/// The failure of a stage's name that is none.
pub(crate) fn unknown_stage(name: &str, known: &[&str]) -> Failure {
    Failure::wrong(format!("there is no stage `{name}`")).with_help_if(suggest::help(
        name,
        "the stages",
        known.iter().copied(),
    ))
}

/// Whether a name means a stage of a run by its id in the file, or a child of a sweep by some of its values.
pub(crate) fn is_meant(stage: &StageSummary, name: &str) -> bool {
    let axes = stage.axes.iter().map(|(axis, value)| (axis.as_str(), value));
    engine::plan::is_meant_by(&stage.declared, axes, name)
}

/// The stages of a run that a name means: one, or the children of a sweep, of which `adapter[lora.rank=4]` are those
/// with this value.
///
/// # Errors
/// Fails where there is none, and names the nearest.
pub(crate) fn stages_of_run<'a>(recorded: &'a Recorded, name: &str) -> Result<Vec<&'a RecordedStage>, Failure> {
    if let Some(stage) = recorded.stage(name) {
        return Ok(vec![stage]);
    }
    let meant = recorded.stages.iter().filter(|stage| is_meant(&stage.summary, name));
    let children: Vec<&RecordedStage> = meant.collect();
    if children.is_empty() {
        let ids: Vec<&str> = recorded.stages.iter().map(|stage| stage.summary.stage.as_str()).collect();
        return Err(unknown_stage(name, &ids));
    }
    Ok(children)
}

/// The stage of a run that a name means.
///
/// # Errors
/// Fails where there is none, or where several children of a sweep are meant.
pub(crate) fn stage_of_run<'a>(recorded: &'a Recorded, name: &str) -> Result<&'a RecordedStage, Failure> {
    match stages_of_run(recorded, name)?.as_slice() {
        [one] => Ok(*one),
        several => {
            let ids: Vec<&str> = several.iter().map(|stage| stage.summary.stage.as_str()).collect();
            Err(several_children(name, &ids, None))
        }
    }
}

/// The failure of a name that means several children of a sweep where one is needed.
pub(crate) fn several_children(name: &str, ids: &[&str], output: Option<&str>) -> Failure {
    let of = |id: &&str| format!("`{id}{}`", output.map(|output| format!(".{output}")).unwrap_or_default());
    let names: Vec<String> = ids.iter().take(MOST_NAMED).map(of).collect();
    let more = ids.len().saturating_sub(MOST_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Failure::wrong(format!("`{name}` is {} stages, the children of a sweep", ids.len()))
        .with_help(format!("name one: {}{more}", names.join(", ")))
}

/// Splits `stage.output`; an id may hold points itself (`adapter[lora.rank=4]`), so the longest id wins.
pub(crate) fn split<'a, 'b>(plan: &'a Plan, name: &'b str) -> Result<(&'a PlannedStage, Option<&'b str>), Failure> {
    let (id, output) = match name.rsplit_once('.') {
        Some((id, output)) if plan.ids_of(name).is_empty() && !plan.ids_of(id).is_empty() => (id, Some(output)),
        _ => (name, None),
    };
    match stages(plan, std::slice::from_ref(&id.to_owned()))?.as_slice() {
        [one] => Ok((plan.stage(one).expect("the plan has named it"), output)),
        several => {
            let ids: Vec<&str> = several.iter().map(String::as_str).collect();
            Err(several_children(id, &ids, output))
        }
    }
}

fn only_output(stage: &PlannedStage) -> Result<String, Failure> {
    match stage.outputs.as_slice() {
        [output] => Ok(output.name.clone()),
        outputs => {
            let names: Vec<String> = outputs.iter().map(|output| format!("`{}.{}`", stage.id, output.name)).collect();
            Err(Failure::wrong(format!("stage `{}` has {} outputs", stage.id, outputs.len()))
                .with_help(format!("name one: {}", names.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_what_the_command_line_had_as_a_shell_takes_it() {
        let overrides = ["adapter.epochs=3".to_owned(), "answers.prompts=[\"Who?\"]".to_owned()];
        let (plain, elsewhere) = (global(None), global(Some("my home")));
        let file = Path::new("my job.yaml");
        let bare = Invocation { file, overrides: &[], scale: Scale::Full, global: &plain };
        assert_eq!(bare.run(), "pipeline run 'my job.yaml'");
        assert_eq!(bare.run_until("a[x=1]"), "pipeline run 'my job.yaml' --until 'a[x=1]'");
        let full = Invocation { overrides: &overrides, global: &elsewhere, ..bare };
        let rest = "adapter.epochs=3 'answers.prompts=[\"Who?\"]'";
        assert_eq!(full.show("adapter"), format!("pipeline show 'my job.yaml' adapter {rest} --home 'my home'"));
        let smoke = Invocation { scale: Scale::Smoke, ..full };
        assert_eq!(smoke.run(), format!("pipeline run 'my job.yaml' {rest} --smoke --home 'my home'"));
    }

    fn global(home: Option<&str>) -> Global {
        Global { home: home.map(Into::into), quiet: false, verbose: false }
    }
}
