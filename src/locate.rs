//! Finds a stage's output in the store: what `show` and `export` take as `STAGE` or `STAGE.OUTPUT`.

use std::path::Path;

use cache::{OutputRecord, Store, StoreError};
use engine::explain::{Status, explain};
use engine::plan::{Plan, PlannedStage, ResolvedInput};
use engine::suggest;
use stages::data::artifact::{OutputKind, Tokenizer};

use crate::render::{self, Exit, Failure, Message};
use crate::{Global, words};

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

/// The outputs that a name stands for in a pipeline file, each by its full name: of a stage alone, all of them.
///
/// # Errors
/// Fails where the file is wrong or there is no such stage.
pub(crate) fn names(file: &Path, overrides: &[String], name: &str) -> Result<Vec<String>, Failure> {
    let plan = engine::plan::load(file, overrides, &stages::registry())?;
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
    let plan = engine::plan::load(file, overrides, &stages::registry())?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    let (stage, output) = split(&plan, name)?;
    let output = output.map_or_else(|| only_output(stage), |output| Ok(output.to_owned()))?;
    if !stage.outputs.iter().any(|known| known.name == output) {
        let known: Vec<String> = stage.outputs.iter().map(|known| format!("{}.{}", stage.id, known.name)).collect();
        let name = format!("{}.{output}", stage.id);
        let failure = Failure::wrong(format!("stage `{}` has no output `{output}`", stage.id));
        return Err(failure.with_help_if(suggest::help(&name, "its outputs", &known)));
    }
    let home = global.home(file)?;
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
    let elsewhere = forecasts.iter().any(|forecast| forecast.stage == id && forecast.status == Status::Remote);
    let record = stored(&id, &output).ok_or_else(|| {
        if elsewhere {
            return Failure::wrong(format!("`{id}.{output}` is in the shared cache, and not here"))
                .with_help(format!("`pipeline cache pull {} {id}` fetches it", file.display()));
        }
        Failure::wrong(format!("`{id}.{output}` has no result yet, as the pipeline is now")).with_help(format!(
            "`pipeline run {}{}` makes it",
            file.display(),
            quoted(overrides)
        ))
    })?;
    let tokenizer = tokenizer_input.and_then(|input| stored(&input.stage, &input.output));
    Ok(Located { store, name: format!("{id}.{output}"), record, tokenizer })
}

/// Overrides as a shell takes them, each after a space.
fn quoted(overrides: &[String]) -> String {
    overrides.iter().map(|text| format!(" {}", words::for_shell(text))).collect()
}

/// The failure of reading what was located. A damaged file is removed from the store, since only what is missing is
/// made again.
pub(crate) fn unreadable(error: StoreError, store: &Store, file: &Path) -> Failure {
    let damaged = matches!(error, StoreError::CorruptTree { .. } | StoreError::MissingTree { .. });
    match error.object() {
        None if matches!(error, StoreError::Outside { .. }) => {
            return Failure::Told { exit: Exit::StageFailed, message: Message::of(&error) }.with_help(format!(
                "`pipeline run {}` takes the file as it is now; or put it back as it was",
                file.display()
            ));
        }
        None if !damaged => return Failure::machine(error),
        // Where the store cannot be written to, the next run that can removes it.
        Some(object) => drop(store.evict(&object)),
        None => {}
    }
    Failure::Told { exit: Exit::StageFailed, message: Message::of(&error) }
        .with_help(format!("`pipeline run {}` rebuilds it", file.display()))
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

/// Splits `stage.output`; an id may hold points itself (`adapter[lora.rank=4]`), so the longest id wins.
pub(crate) fn split<'a, 'b>(plan: &'a Plan, name: &'b str) -> Result<(&'a PlannedStage, Option<&'b str>), Failure> {
    let (id, output) = match name.rsplit_once('.') {
        Some((id, output)) if plan.ids_of(name).is_empty() && !plan.ids_of(id).is_empty() => (id, Some(output)),
        _ => (name, None),
    };
    match stages(plan, std::slice::from_ref(&id.to_owned()))?.as_slice() {
        [one] => Ok((plan.stage(one).expect("the plan has named it"), output)),
        several => {
            let of = |id: &String| format!("`{id}{}`", output.map(|output| format!(".{output}")).unwrap_or_default());
            let names: Vec<String> = several.iter().take(MOST_NAMED).map(of).collect();
            let more = several.len().saturating_sub(MOST_NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let failure = Failure::wrong(format!("`{id}` is {} stages, the children of a sweep", several.len()));
            Err(failure.with_help(format!("name one: {}{more}", names.join(", "))))
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
