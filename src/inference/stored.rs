//! The model or adapter that a stage of a pipeline file makes: taken from the store, made first where it is not there.

use std::path::{Path, PathBuf};

use cache::{Digest, OutputRecord, Store, Verify};
use engine::artifact::Facts;
use engine::explain::explain;
use engine::home::Home;
use engine::plan::{Plan, PlannedStage};
use stages::compute::inference::{AdapterWeights, read_adapter};
use stages::data::artifact::{Adapter, Model, OutputKind};

use super::{AdapterSource, Missing, Source};
use crate::render::Failure;
use crate::{Global, locate, render, run};

/// An output of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    stage: String,
    output: String,
}

/// What a served output consists of.
struct Parts {
    /// The model, or what an adapter was trained on.
    base: Wanted,
    adapter: Option<Wanted>,
    /// The tokenizer that its tokens were made with, where a stage was given one.
    tokenizer: Option<Wanted>,
}

impl Parts {
    fn all(&self) -> impl Iterator<Item = &Wanted> {
        std::iter::once(&self.base).chain(&self.adapter).chain(&self.tokenizer)
    }

    /// Those that have to be there from the beginning.
    fn needed(&self, missing: Missing) -> impl Iterator<Item = &Wanted> {
        let adapter = self.adapter.as_ref().filter(|_| missing == Missing::Make);
        std::iter::once(&self.base).chain(adapter).chain(&self.tokenizer)
    }
}

/// The folders of a stage's output.
///
/// # Errors
/// Fails where the file is wrong, the output is neither a model nor an adapter, or making it fails.
pub(super) fn source(
    file: &Path,
    overrides: &[String],
    name: &str,
    missing: Missing,
    global: &Global,
) -> Result<Source, Failure> {
    let plan = engine::plan::load(file, overrides, &stages::registry())?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    let parts = parts(&plan, name)?;
    if missing == Missing::Await && parts.adapter.is_none() {
        return Err(Failure::wrong(format!("`{name}` is no adapter, and `--watch` is for one")));
    }
    let home = global.home(file)?;
    let store = Store::look_or_open(home.store()).map_err(Failure::machine)?;
    let staging = store.staging_to_look().map_err(Failure::machine)?;
    let mut records = Records::of(&plan, &parts, &home, &store)?;
    if !records.are_complete(&parts, missing) {
        let stages = parts.needed(missing).map(|wanted| wanted.stage.clone()).collect();
        run::make(file, overrides, stages, global)?;
        records = Records::of(&plan, &parts, &home, &store)?;
    }
    let open = |wanted: &Wanted| -> Result<(PathBuf, Facts), Failure> {
        let record = records.get(wanted).ok_or_else(|| Failure::wrong(format!("`{}` has no result", wanted.stage)))?;
        let folder = staging.path().join(format!("{}.{}", wanted.stage, wanted.output));
        let linked = store.link_folder(&record.tree, &folder, Verify::Contents);
        linked.map_err(|error| locate::unreadable(error, &store, file))?;
        Ok((folder, record.facts.clone()))
    };
    let (base, facts) = open(&parts.base)?;
    let tokenizer = parts.tokenizer.as_ref().map(open).transpose()?.map_or_else(|| base.clone(), |(folder, _)| folder);
    let mut adapters = Vec::new();
    if let Some(adapter) = parts.adapter.as_ref().filter(|adapter| records.get(adapter).is_some()) {
        let (folder, facts) = open(adapter)?;
        adapters.push(AdapterSource { name: adapter.stage.clone(), folder, facts });
    }
    let watched = (missing == Missing::Await).then(|| Watched {
        file: file.to_owned(),
        overrides: overrides.to_vec(),
        name: name.to_owned(),
        base: records.get(&parts.base).map(|record| record.tree),
        served: parts.adapter.as_ref().and_then(|adapter| records.get(adapter)).map(|record| record.tree),
        home,
    });
    Ok(Source { base, base_name: parts.base.stage, facts, tokenizer, adapters, staging: Some(staging), watched })
}

/// Finds newer results of an adapter.
pub(crate) struct Watched {
    file: PathBuf,
    overrides: Vec<String>,
    name: String,
    home: Home,
    /// The base that is open.
    base: Option<Digest>,
    /// The adapter that was found last.
    served: Option<Digest>,
}

/// A newer result of an adapter.
pub(crate) struct Newer {
    /// Its stage.
    pub(crate) name: String,
    pub(crate) weights: AdapterWeights,
    /// What is known of it.
    pub(crate) facts: Facts,
}

impl Watched {
    /// The adapter that the pipeline file, as it is now, has in the store, unless it was found before; `base` are the
    /// facts of the open one.
    ///
    /// # Errors
    /// Fails where the file is wrong, the adapter cannot be read, or it was trained on another base than the open one.
    pub(crate) fn newer(&mut self, base: &Facts) -> Result<Option<Newer>, Failure> {
        let plan = engine::plan::load(&self.file, &self.overrides, &stages::registry())?;
        let parts = parts(&plan, &self.name)?;
        let Some(store) = Store::look(self.home.store()).map_err(Failure::machine)? else { return Ok(None) };
        let records = Records::of(&plan, &parts, &self.home, &store)?;
        let Some(adapter) = &parts.adapter else { return Ok(None) };
        let Some(record) = records.get(adapter).filter(|record| Some(record.tree) != self.served) else {
            return Ok(None);
        };
        // Whatever becomes of it, it is not looked at again.
        self.served = Some(record.tree);
        if records.get(&parts.base).map(|record| record.tree) != self.base {
            let message = format!("`{}` was trained on another base than the one that is served", adapter.stage);
            return Err(Failure::wrong(message).with_help("start the server again"));
        }
        let staging = store.staging_to_look().map_err(Failure::machine)?;
        let folder = staging.path().join("adapter");
        let linked = store.link_folder(&record.tree, &folder, Verify::Contents);
        linked.map_err(|error| locate::unreadable(error, &store, &self.file))?;
        let facts = record.facts.clone();
        let weights = read_adapter(&folder, &facts, base)?;
        Ok(Some(Newer { name: adapter.stage.clone(), weights, facts }))
    }
}

/// What a name stands for in a plan.
fn parts(plan: &Plan, name: &str) -> Result<Parts, Failure> {
    let (stage, output) = locate::split(plan, name)?;
    let is_served = |kind: &str| kind == Model::NAME || kind == Adapter::NAME;
    let served: Vec<_> = stage
        .outputs
        .iter()
        .filter(|known| is_served(&known.kind) && output.is_none_or(|output| known.name == output))
        .collect();
    let [only] = served.as_slice() else {
        let known = plan.stages.iter().filter(|stage| stage.outputs.iter().any(|output| is_served(&output.kind)));
        let known: Vec<String> = known.map(|stage| format!("`{}`", stage.id)).collect();
        let failure = Failure::wrong(format!("`{name}` is neither a model nor an adapter"));
        return Err(match known.is_empty() {
            true => failure,
            false => failure.with_help(format!("stages with one: {}", known.join(", "))),
        });
    };
    let wanted = Wanted { stage: stage.id.clone(), output: only.name.clone() };
    let tokenizer = locate::tokenizer_behind(&plan.stages, stage);
    let tokenizer = tokenizer.map(|input| Wanted { stage: input.stage.clone(), output: input.output.clone() });
    if only.kind == Model::NAME {
        // A model brings the tokenizer that it was made with.
        return Ok(Parts { base: wanted, adapter: None, tokenizer: None });
    }
    Ok(Parts { base: base_of(stage)?, adapter: Some(wanted), tokenizer })
}

/// The model that a stage trains an adapter on.
fn base_of(stage: &PlannedStage) -> Result<Wanted, Failure> {
    let named = stage.parameters["model"].as_str().unwrap_or_default();
    let models: Vec<Wanted> = stage
        .inputs
        .iter()
        .filter(|input| input.kind == Model::NAME)
        .map(|input| Wanted { stage: input.stage.clone(), output: input.output.clone() })
        .collect();
    let is_named = |wanted: &&Wanted| wanted.stage == named || format!("{}.{}", wanted.stage, wanted.output) == named;
    let found = models.iter().find(is_named).or(match models.as_slice() {
        [only] => Some(only),
        _ => None,
    });
    let failure = || {
        Failure::wrong(format!("the model that `{}` is an adapter of is not known", stage.id))
            .with_help("name both folders: `--model FOLDER --adapter NAME=FOLDER`")
    };
    found.cloned().ok_or_else(failure)
}

/// The records of the parts that are there, taken so that nobody collects them.
struct Records(Vec<(Wanted, OutputRecord)>);

impl Records {
    fn of(plan: &Plan, parts: &Parts, home: &Home, store: &Store) -> Result<Self, Failure> {
        let forecasts = explain(plan, home).map_err(Failure::machine)?;
        let mut records = Vec::new();
        for wanted in parts.all() {
            let forecast = forecasts.iter().find(|forecast| forecast.stage == wanted.stage);
            let found = forecast.and_then(|forecast| Some((forecast.key, forecast.outputs.get(&wanted.output)?)));
            let Some((key, record)) = found else { continue };
            key.map_or(Ok(None), |key| store.take(&key)).map_err(Failure::machine)?;
            records.push((wanted.clone(), record.clone()));
        }
        Ok(Self(records))
    }

    fn get(&self, wanted: &Wanted) -> Option<&OutputRecord> {
        self.0.iter().find(|(found, _)| found == wanted).map(|(_, record)| record)
    }

    fn are_complete(&self, parts: &Parts, missing: Missing) -> bool {
        parts.needed(missing).all(|wanted| self.get(wanted).is_some())
    }
}
