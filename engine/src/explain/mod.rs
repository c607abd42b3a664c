//! Explains a plan: which results are there, which stages would run, and why.
//!
//! It compares the key documents that the run uses with those of earlier results, so it cannot disagree with the cache.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cache::{Digest, OutputRecord, ResultRecord, StatCache, Store, StoreError};
use serde::Serialize;

use crate::file::problem::Problem;
use crate::forecast::{Forecast, KnownFacts};
use crate::history::{History, HistoryError, LastRun};
use crate::home::Home;
use crate::keys::{read_outside, stage_key};
use crate::local_files::LocalFiles;
use crate::lock_file::{self, LockError, LockFile};
use crate::plan::{Plan, PlannedStage, ResolvedInput, Wanted};
use crate::stage::Stage;

mod causes;
mod edits;
mod estimate;
mod past;
mod reason;

pub use estimate::{Basis, Estimate, Total, total};
pub(crate) use estimate::{CPU_SECONDS, WORK, work_left};
pub(crate) use past::{Past, Present};
pub use reason::{Reason, value_in_words};

/// What would become of one stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageForecast {
    pub stage: String,
    pub kind: String,
    /// What would become of it.
    pub status: Status,
    /// Why it would run, or what it depends on.
    pub reasons: Vec<Reason>,
    /// The key of its result, once all its inputs are known.
    pub key: Option<Digest>,
    /// Its outputs by name, where the result is there.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// What it would do and cost, where the result is not there.
    #[serde(rename = "preflight")]
    pub ahead: Forecast,
    /// What it cost when it last ran, with whatever parameters.
    pub last_run: Option<LastRun>,
    /// How long it would take, where something is known of it.
    pub estimate: Option<Estimate>,
}

/// What would become of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Its result is there.
    Cached,
    /// Its result is in a shared cache: known from an earlier look, or asked for.
    Remote,
    /// It would run.
    WillRun,
    /// It runs only if an input, once it is made again, differs from what it was when this stage was last made, or made
    /// before.
    Unknown,
    /// It has no result and is not to be made, since it is not selected.
    Missing,
}

/// A stage that is not to be made and has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("stage `{stage}` has no result, and this run was not to make it")]
pub struct ResultMissing {
    pub stage: String,
    /// The pipeline file.
    pub file: PathBuf,
}

impl ResultMissing {
    /// What the user can do about it, where the command line changes nothing of the file.
    pub fn help(&self) -> String {
        let Self { stage, file } = self;
        Self::help_by(&format!("pipeline run {} --until {stage}", file.display()))
    }

    /// The same, where `command` makes the result.
    pub fn help_by(command: &str) -> String {
        format!("`{command}` makes it; or leave out `--from` and `--only`")
    }
}

/// The stages whose results are [missing](Status::Missing).
pub fn missing_results(plan: &Plan, forecasts: &[StageForecast]) -> Vec<ResultMissing> {
    let missing = forecasts.iter().filter(|forecast| is_missing(forecast));
    missing.map(|forecast| ResultMissing { stage: forecast.stage.clone(), file: plan.file.clone() }).collect()
}

/// Why a plan cannot be explained.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    /// Source files that are missing or cannot be read.
    #[error("{} source files are missing or cannot be read", .0.len())]
    Sources(Vec<Problem>),
    /// The lock file failed.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The history failed.
    #[error(transparent)]
    History(#[from] HistoryError),
}

/// Asks for a result where others keep theirs.
pub type Elsewhere<'a> = &'a mut dyn FnMut(&Digest) -> Option<ResultRecord>;

/// What would become of each stage, in the order of the plan. Nothing is run, fetched or made; what is learnt about
/// source files is remembered where the home can be written.
///
/// # Errors
/// Fails where source files are missing, or the home cannot be read.
pub fn explain(plan: &Plan, home: &Home) -> Result<Vec<StageForecast>, ExplainError> {
    explain_with(plan, home, None)
}

/// [`explain`], where `elsewhere`, if there is something to ask, is asked for each result that is not here.
///
/// # Errors
/// As there.
pub fn explain_with(
    plan: &Plan,
    home: &Home,
    mut elsewhere: Option<Elsewhere<'_>>,
) -> Result<Vec<StageForecast>, ExplainError> {
    let store = Store::look(home.store())?;
    let lock = LockFile::read(&home.lock_file())?;
    let mut files = StatCache::load(&home.stat_cache());
    let outside = read_outside(plan, &mut files, &lock).map_err(ExplainError::Sources)?;
    if home.is_made() {
        // It only saves time.
        let _ = files.save(&home.stat_cache());
    }
    let history = History::look(home)?;
    let past = Past::new(plan, store.as_ref(), &history);

    let mut outputs: BTreeMap<String, BTreeMap<String, OutputRecord>> = BTreeMap::new();
    let mut facts = KnownFacts::default();
    let mut forecasts = Vec::with_capacity(plan.stages.len());
    for (stage, outside) in plan.stages.iter().zip(&outside) {
        let output = |input: &ResolvedInput| outputs.get(&input.stage)?.get(&input.output);
        let key = stage_key(stage, outside, |input| Some(output(input)?.identity));
        let (document, output) = (&key.document, &|input: &ResolvedInput| output(input).cloned());
        let known = facts.of_inputs(stage);
        let present = Present { stage, document, outside, output, facts: &known.certain };
        let mut forecast = forecast(&past, &present, key.unknown)?;
        // A stage that runs in any case has nothing to hope for from an input that comes out as it was.
        let rebuilt = stage.inputs.iter().filter(|input| !outputs.contains_key(&input.stage));
        for input in rebuilt.filter(|_| forecast.status == Status::Unknown) {
            let reason = Reason::InputRebuilt { input: past.name_of(input) };
            if !forecast.reasons.contains(&reason) {
                forecast.reasons.push(reason);
            }
        }
        let unpinned = outside.unpinned.iter().map(|request| Reason::NotPinned { pin: lock_file::name(request) });
        forecast.reasons.extend(unpinned);
        let missing = forecast.key.filter(|_| forecast.status != Status::Cached);
        let remote = missing.and_then(|key| {
            let remembered = store.as_ref().and_then(|store| store.remembered(&key));
            remembered.or_else(|| elsewhere.as_mut()?(&key))
        });
        if let Some(record) = remote {
            forecast.status = Status::Remote;
            forecast.reasons.clear();
            facts.made(&stage.id, &record.outputs);
            outputs.insert(stage.id.clone(), record.outputs);
        } else if forecast.status == Status::Cached {
            facts.made(&stage.id, &forecast.outputs);
            outputs.insert(stage.id.clone(), forecast.outputs.clone());
        } else {
            look_ahead(&past, &present, &known, &mut forecast)?;
            facts.foretold(&stage.id, &forecast.ahead.outputs);
            if stage.wanted == Wanted::Given {
                // It will do and cost nothing.
                (forecast.ahead, forecast.estimate) = (Forecast::default(), None);
                let reads_missing = stage.inputs.iter().any(|input| is_missing(&forecasts[input.position]));
                let is_nowhere = forecast.status == Status::WillRun && elsewhere.is_none();
                let is_missing = forecast.key.is_some() || reads_missing || is_nowhere;
                forecast.status = if is_missing { Status::Missing } else { Status::Unknown };
            }
        }
        forecasts.push(forecast);
    }
    Ok(forecasts)
}

fn is_missing(forecast: &StageForecast) -> bool {
    forecast.status == Status::Missing
}

fn forecast(past: &Past<'_>, now: &Present<'_>, unknown: usize) -> Result<StageForecast, ExplainError> {
    let mut forecast = StageForecast {
        stage: now.stage.id.clone(),
        kind: now.stage.kind.to_owned(),
        status: Status::WillRun,
        reasons: Vec::new(),
        key: None,
        outputs: BTreeMap::new(),
        ahead: Forecast::default(),
        last_run: None,
        estimate: None,
    };
    if unknown == 0 {
        let digest = now.document.result_key();
        forecast.key = Some(digest);
        let result = past.store.map(|store| complete_result(now.stage, store, &digest)).transpose()?.flatten();
        if let Some(outputs) = result {
            if now.stage.wanted == Wanted::Again {
                forecast.reasons = vec![Reason::Forced];
                return Ok(forecast);
            }
            return Ok(StageForecast { status: Status::Cached, outputs, ..forecast });
        }
    }
    forecast.reasons = past.reasons(now)?;
    // What differs from the last result may be as it was in one before.
    if unknown > 0 && (forecast.reasons.is_empty() || past.may_be_there(now.document)) {
        forecast.reasons.clear();
        match now.stage.wanted {
            Wanted::Again => forecast.reasons.push(Reason::Forced),
            Wanted::Result | Wanted::Given => forecast.status = Status::Unknown,
        }
    }
    Ok(forecast)
}

/// What a stage without a result would do. What is wrong with it is for [`crate::checks`] to say.
fn look_ahead(
    past: &Past<'_>,
    now: &Present<'_>,
    known: &KnownFacts,
    forecast: &mut StageForecast,
) -> Result<(), ExplainError> {
    let stage = now.stage;
    let files = LocalFiles::granted(&now.outside.files);
    forecast.ahead = stage.forecast(&known.ahead(&files, stage.span));
    let problems = std::mem::take(&mut forecast.ahead.problems).into_iter();
    forecast.ahead.problems = problems.map(|problem| problem.placed(&stage.field_spans)).collect();
    forecast.last_run = past.history.last_run(&past.plan.name, &stage.id)?;
    let state = forecast.reasons.iter().find_map(|reason| match reason {
        Reason::WorkingState(state) => Some(state),
        _ => None,
    });
    let work = work_left(forecast.ahead.work.clone(), now.outside, state);
    forecast.estimate = estimate::estimate(past.history, &past.plan.name, stage, work.as_ref())?;
    Ok(())
}

/// The outputs of a key's result, if every file of it is there.
fn complete_result(
    stage: &PlannedStage,
    store: &Store,
    key: &Digest,
) -> Result<Option<BTreeMap<String, OutputRecord>>, StoreError> {
    let outputs = store.result(key)?.map(|record| record.outputs);
    let complete = outputs.filter(|outputs| outputs.values().all(|output| store.complete(&output.tree)));
    Ok(complete.filter(|outputs| will_do(&*stage.bound, store, outputs)))
}

/// Whether a result whose files are all there will do for a stage: one that wants them in the store has them there.
pub(crate) fn will_do(stage: &dyn Stage, store: &Store, outputs: &BTreeMap<String, OutputRecord>) -> bool {
    let is_inside =
        |tree: &Digest| store.tree(tree).is_ok_and(|tree| !tree.files().iter().any(|file| store.is_outside(file)));
    stage.takes_files_outside() || outputs.values().all(|output| is_inside(&output.tree))
}
