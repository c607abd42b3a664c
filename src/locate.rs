//! Finds a stage's output in the store: what `show` and `export` take as `STAGE` or `STAGE.OUTPUT`.

use std::path::Path;

use cache::{OutputRecord, Store, StoreError};
use engine::explain::explain;
use engine::plan::{PlannedStage, ResolvedInput};
use engine::suggest;
use stages::artifact::{OutputKind, Tokenizer};

use crate::Global;
use crate::render::{self, Exit, Failure, Message};

/// An output that is in the store.
pub struct Located {
    /// The pipeline's home.
    pub store: Store,
    /// `stage.output`.
    pub name: String,
    /// Its kind, its folder, its facts.
    pub record: OutputRecord,
    /// The tokenizer behind it, where it holds tokens.
    pub tokenizer: Option<OutputRecord>,
}

/// The output that a name stands for in a pipeline file.
///
/// # Errors
/// Fails where the file is wrong, there is no such stage or output, or it has not been made yet.
pub fn output(file: &Path, overrides: &[String], name: &str, global: &Global) -> Result<Located, Failure> {
    let plan = engine::plan::load(file, overrides, &stages::registry())?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    let (stage, output) = split(&plan.stages, name)?;
    let output = output.map_or_else(|| only_output(stage), |output| Ok(output.to_owned()))?;
    if !stage.outputs.iter().any(|known| known.name == output) {
        let known: Vec<String> = stage.outputs.iter().map(|known| format!("{}.{}", stage.id, known.name)).collect();
        let name = format!("{}.{output}", stage.id);
        let failure = Failure::wrong(format!("stage `{}` has no output `{output}`", stage.id));
        return Err(failure.with_help_if(suggest::help(&name, "its outputs", &known)));
    }
    let home = global.home(file)?;
    let store = Store::open(home.store()).map_err(Failure::machine)?;
    let id = stage.id.clone();
    let tokenizer_input = tokenizer_behind(&plan.stages, stage).cloned();
    let forecasts = explain(&plan, &home).map_err(|error| Failure::explain(error, plan.sources))?;
    let stored = |stage: &str, output: &str| {
        forecasts.iter().find(|forecast| forecast.stage == stage)?.outputs.get(output).cloned()
    };
    let record = stored(&id, &output).ok_or_else(|| {
        Failure::wrong(format!("`{id}.{output}` has not been made yet, as the pipeline stands now"))
            .with_help(format!("`pipeline run {}` makes it", file.display()))
    })?;
    let tokenizer = tokenizer_input.and_then(|input| stored(&input.stage, &input.output));
    Ok(Located { store, name: format!("{id}.{output}"), record, tokenizer })
}

/// The failure of reading what was located. A damaged file is removed from the store, since only what is missing is made again.
pub fn unreadable(error: StoreError, store: &Store, file: &Path) -> Failure {
    let damaged = matches!(error, StoreError::CorruptTree { .. } | StoreError::MissingTree { .. });
    match error.object().map(|object| store.evict(&object)) {
        None if !damaged => Failure::machine(error),
        Some(Err(refused)) => Failure::machine(refused),
        _ => Failure::Told { exit: Exit::StageFailed, message: Message::of(&error) }
            .with_help(format!("`pipeline run {}` makes it again", file.display())),
    }
}

/// The tokenizer that a stage reads, or that the nearest stage before it reads.
fn tokenizer_behind<'a>(stages: &'a [PlannedStage], stage: &'a PlannedStage) -> Option<&'a ResolvedInput> {
    let direct = stage.inputs.iter().find(|input| input.kind == Tokenizer::NAME);
    direct.or_else(|| {
        let before = |input: &ResolvedInput| stages.iter().find(|stage| stage.id == input.stage);
        stage.inputs.iter().filter_map(before).find_map(|stage| tokenizer_behind(stages, stage))
    })
}

/// The failure of a stage's name that is none.
pub fn unknown_stage(name: &str, known: &[&str]) -> Failure {
    Failure::wrong(format!("there is no stage `{name}`")).with_help_if(suggest::help(
        name,
        "the stages",
        known.iter().copied(),
    ))
}

/// Splits `stage.output`; an id may hold points itself (`adapter[lora.rank=4]`), so the longest id wins.
fn split<'a, 'b>(stages: &'a [PlannedStage], name: &'b str) -> Result<(&'a PlannedStage, Option<&'b str>), Failure> {
    let whole = stages.iter().find(|stage| stage.id == name).map(|stage| (stage, None));
    let split = || {
        let (id, output) = name.rsplit_once('.')?;
        Some((stages.iter().find(|stage| stage.id == id)?, Some(output)))
    };
    whole.or_else(split).ok_or_else(|| {
        let ids: Vec<&str> = stages.iter().map(|stage| stage.id.as_str()).collect();
        unknown_stage(name, &ids)
    })
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
