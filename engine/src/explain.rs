//! Explains a plan: which results are there, which stages would run, and why.
//!
//! It compares the key documents that the run uses with those of earlier results, so it cannot disagree with the cache.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use cache::{Digest, KeyDifference, KeyDocument, OutputRecord, StatCache, Store, StoreError, differences};
use serde::Serialize;

use crate::file::problem::Problem;
use crate::history::{History, HistoryError, LastRun};
use crate::home::Home;
use crate::keys::{StageKey, read_outside, stage_key};
use crate::lock_file::{self, LockError, LockFile};
use crate::plan::{Plan, PlannedStage};
use crate::preflight::{self, Preflight};
use crate::stage::InputFacts;

/// What would become of one stage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageForecast {
    /// Its id.
    pub stage: String,
    /// Its kind.
    pub kind: String,
    /// What would become of it.
    pub status: Forecast,
    /// Why it would run, or what it depends on.
    pub reasons: Vec<Reason>,
    /// The key of its result, once all its inputs are known.
    pub key: Option<Digest>,
    /// Its outputs by name, where the result is there.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// What it would do and cost, where the result is not there.
    pub preflight: Preflight,
    /// What it cost when it last ran, with whatever parameters.
    pub last_run: Option<LastRun>,
    /// What the facts of its inputs show to be wrong.
    #[serde(skip)]
    pub problems: Vec<Problem>,
}

/// What would become of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Forecast {
    /// Its result is there.
    Cached,
    /// It would run.
    WillRun,
    /// It runs only if an input, once it is made again, differs from what it was.
    Unknown,
}

/// One reason for a stage to run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Reason {
    /// No run of this pipeline has a result of this stage.
    NeverRan,
    /// A parameter differs from that of the last result.
    Changed {
        /// The field's dotted path.
        field: String,
        /// The value before; `None` where the field is new.
        old: Option<String>,
        /// The value now; `None` where the field is gone.
        new: Option<String>,
        /// Where the field stands, as `file:line:column`.
        place: Option<String>,
    },
    /// An input is another one than that of the last result.
    InputChanged {
        /// The field that takes it.
        field: String,
    },
    /// An input has to be made first; should it come out as it was, this stage does not run.
    InputRebuilt {
        /// `stage.output`.
        input: String,
    },
    /// A source file differs.
    SourceChanged {
        /// The role and position, such as `source[0]`.
        source: String,
    },
    /// Another version is pinned.
    PinChanged {
        /// The pin's name.
        pin: String,
        /// The version before.
        old: Option<String>,
        /// The version now.
        new: Option<String>,
    },
    /// The version to use is found out when the pipeline runs.
    NotPinned {
        /// The pin's name.
        pin: String,
    },
    /// The stage is of another kind than before, under the same id.
    KindChanged {
        /// The kind before.
        old: String,
        /// The kind now.
        new: String,
    },
    /// This version of the program makes this kind of result in another way.
    VersionRaised {
        /// The kind's version before.
        old: String,
        /// The kind's version now.
        new: String,
    },
    /// The same result was made before, and is no longer whole in the store.
    ResultMissing,
    /// An earlier attempt left working state to go on from.
    Resumes,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| value.as_deref().map_or_else(|| "(none)".to_owned(), abbreviated);
        match self {
            Self::NeverRan => f.write_str("never ran"),
            Self::Changed { field, old, new, place } => {
                write!(f, "{field} {} → {}", shown(old), shown(new))?;
                place.as_ref().map_or(Ok(()), |place| write!(f, " ({place})"))
            }
            Self::InputChanged { field } => write!(f, "input `{field}` changed"),
            Self::InputRebuilt { input } => {
                write!(f, "input `{input}` is made first (stays cached if it comes out as it was)")
            }
            Self::SourceChanged { source } => write!(f, "source file changed: {source}"),
            Self::PinChanged { pin, old, new } => write!(f, "pin {pin} {} → {}", shown(old), shown(new)),
            Self::NotPinned { pin } => write!(f, "{pin} is not pinned yet"),
            Self::KindChanged { old, new } => write!(f, "kind {old} → {new}"),
            Self::VersionRaised { old, new } => write!(f, "version of the stage kind {old} → {new}"),
            Self::ResultMissing => f.write_str("its result is no longer whole in the store"),
            Self::Resumes => f.write_str("goes on from saved working state"),
        }
    }
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

/// What would become of each stage, in the order of the plan. Nothing is run and nothing is fetched.
///
/// # Errors
/// Fails where source files are missing, or the home cannot be read.
pub fn explain(plan: &Plan, home: &Home) -> Result<Vec<StageForecast>, ExplainError> {
    let store = Store::open(home.store())?;
    let lock = LockFile::read(&home.lock_file())?;
    let mut files = StatCache::load(&home.stat_cache());
    let outside = read_outside(plan, &mut files, &lock).map_err(ExplainError::Sources)?;
    files.save(&home.stat_cache())?;
    let history = History::open(home)?;
    let past = Past { plan, store: &store, history: &history };

    let mut outputs: BTreeMap<String, BTreeMap<String, OutputRecord>> = BTreeMap::new();
    let mut facts = InputFacts::new();
    let mut forecasts = Vec::with_capacity(plan.stages.len());
    for (stage, outside) in plan.stages.iter().zip(&outside) {
        let key = stage_key(stage, outside, |input| Some(outputs.get(&input.stage)?.get(&input.output)?.identity));
        let mut forecast = past.forecast(stage, &key)?;
        // A stage that runs in any case has nothing to hope for from an input that comes out as it was.
        let rebuilt = stage.inputs.iter().filter(|input| !outputs.contains_key(&input.stage));
        for input in rebuilt.filter(|_| forecast.status == Forecast::Unknown) {
            let reason = Reason::InputRebuilt { input: format!("{}.{}", input.stage, input.output) };
            if !forecast.reasons.contains(&reason) {
                forecast.reasons.push(reason);
            }
        }
        let unpinned = outside.unpinned.iter().map(|request| Reason::NotPinned { pin: lock_file::name(request) });
        forecast.reasons.extend(unpinned);
        if forecast.status == Forecast::Cached {
            outputs.insert(stage.id.clone(), forecast.outputs.clone());
        } else {
            past.look_ahead(stage, &facts, &mut forecast)?;
        }
        facts.extend(facts_of_outputs(&forecast));
        forecasts.push(forecast);
    }
    Ok(forecasts)
}

/// The facts of a stage's outputs, found in its result or expected.
fn facts_of_outputs(forecast: &StageForecast) -> InputFacts {
    let found = forecast.outputs.iter().map(|(output, record)| (output, record.facts.clone()));
    let expected = forecast.preflight.outputs.iter().map(|(output, facts)| {
        let mut facts = facts.clone();
        facts.insert(preflight::EXPECTED.to_owned(), true.into());
        (output, facts)
    });
    found.chain(expected).map(|(output, facts)| (format!("{}.{output}", forecast.stage), facts)).collect()
}

/// What is known of earlier results.
pub(crate) struct Past<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The store.
    pub store: &'a Store,
    /// The history.
    pub history: &'a History,
}

impl Past<'_> {
    fn forecast(&self, stage: &PlannedStage, key: &StageKey) -> Result<StageForecast, ExplainError> {
        let mut forecast = StageForecast {
            stage: stage.id.clone(),
            kind: stage.kind.to_owned(),
            status: Forecast::WillRun,
            reasons: Vec::new(),
            key: None,
            outputs: BTreeMap::new(),
            preflight: Preflight::default(),
            last_run: None,
            problems: Vec::new(),
        };
        if key.unknown == 0 {
            let digest = key.document.result_key();
            forecast.key = Some(digest);
            if let Some(outputs) = complete_result(self.store, &digest)? {
                return Ok(StageForecast { status: Forecast::Cached, outputs, ..forecast });
            }
        }
        forecast.reasons = self.reasons(stage, &key.document)?;
        if key.unknown > 0 && forecast.reasons.is_empty() {
            forecast.status = Forecast::Unknown;
        }
        Ok(forecast)
    }

    /// What a stage without a result would do, and what its inputs show to be wrong with it.
    fn look_ahead(
        &self,
        stage: &PlannedStage,
        facts: &InputFacts,
        forecast: &mut StageForecast,
    ) -> Result<(), ExplainError> {
        let read = stage.inputs.iter().map(|input| format!("{}.{}", input.stage, input.output));
        let inputs: InputFacts = read.filter_map(|name| Some((name.clone(), facts.get(&name)?.clone()))).collect();
        forecast.preflight = stage.bound.preflight(&inputs, stage.span);
        let found = stage.bound.check(&preflight::known(&inputs), stage.span);
        let said = |problem: &Problem| self.plan.warnings.iter().any(|said| said.says_the_same(problem));
        forecast.problems = found.into_iter().filter(|problem| !said(problem)).collect();
        forecast.last_run = self.history.last_run(&self.plan.name, &stage.id)?;
        Ok(())
    }

    /// Why a stage whose result is not there runs, as far as its key document is known.
    ///
    /// # Errors
    /// Fails where the history or the store does.
    pub fn reasons(&self, stage: &PlannedStage, now: &KeyDocument) -> Result<Vec<Reason>, ExplainError> {
        let mut reasons = match self.last_document(stage)? {
            Last::Never => vec![Reason::NeverRan],
            Last::Gone => vec![Reason::ResultMissing],
            Last::Document(last) => self.compared(stage, &last, now),
        };
        if has_working_state(self.store, now) {
            reasons.push(Reason::Resumes);
        }
        Ok(reasons)
    }

    fn compared(&self, stage: &PlannedStage, last: &KeyDocument, now: &KeyDocument) -> Vec<Reason> {
        let different = differences(last, now);
        if different.is_empty() {
            return vec![Reason::ResultMissing];
        }
        let known = different.into_iter().filter(|difference| difference.new.as_deref() != Some(NOT_KNOWN));
        known.map(|difference| self.reason(stage, difference)).collect()
    }

    fn reason(&self, stage: &PlannedStage, difference: KeyDifference) -> Reason {
        let KeyDifference { path, old, new } = difference;
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        if path == "@kind" {
            return Reason::KindChanged { old: text(&old), new: text(&new) };
        }
        if path == "@version" {
            return Reason::VersionRaised { old: text(&old), new: text(&new) };
        }
        if let Some(source) = path.strip_prefix("@files.") {
            return Reason::SourceChanged { source: source.to_owned() };
        }
        if let Some(pin) = path.strip_prefix("@pins.") {
            return Reason::PinChanged { pin: pin.to_owned(), old, new };
        }
        let is_identity =
            |value: &Option<String>| value.as_deref().is_some_and(|value| value.parse::<Digest>().is_ok());
        if is_identity(&old) && is_identity(&new) {
            return Reason::InputChanged { field: path };
        }
        let place = self.place(stage, &path);
        Reason::Changed { field: path, old, new, place }
    }

    /// Where a field stands: itself, or the innermost field around it that has a place.
    fn place(&self, stage: &PlannedStage, field: &str) -> Option<String> {
        let mut path = field;
        loop {
            if let Some((_, span)) = stage.field_spans.iter().find(|(known, _)| known == path) {
                let (line, column) = self.plan.sources.line_column(*span);
                let source = self.plan.sources.get(span.source)?;
                return Some(format!("{}:{line}:{column}", source.name));
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }

    fn last_document(&self, stage: &PlannedStage) -> Result<Last, ExplainError> {
        let Some(key) = self.history.last_key(&self.plan.name, &stage.id)? else { return Ok(Last::Never) };
        Ok(self.store.result(&key)?.map_or(Last::Gone, |record| Last::Document(record.key)))
    }
}

/// The last result of a stage.
enum Last {
    Never,
    Gone,
    Document(KeyDocument),
}

/// What [`crate::parameter::KeyWriter`] writes for an input that has no identity yet.
const NOT_KNOWN: &str = "not known yet";

/// Longer values are cut for people; the JSON form has them whole.
fn abbreviated(value: &str) -> String {
    const LONGEST: usize = 60;
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

/// The outputs of a key's result, if every file of it is there.
fn complete_result(store: &Store, key: &Digest) -> Result<Option<BTreeMap<String, OutputRecord>>, StoreError> {
    let record = store.result(key)?;
    let complete = record.filter(|record| record.outputs.values().all(|output| store.complete(&output.tree)));
    Ok(complete.map(|record| record.outputs))
}

fn has_working_state(store: &Store, document: &KeyDocument) -> bool {
    let folder = store.root().join("partial").join(document.working_key().to_string());
    Path::new(&folder).read_dir().is_ok_and(|mut entries| entries.next().is_some())
}
