//! How long a stage would take, from how long it took before: as long for the same work, else in proportion, else as
//! the last time.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{StageForecast, Status};
use crate::forecast::Work;
use crate::history::{EarlierResult, History, HistoryError};
use crate::keys::StageOutside;
use crate::plan::{Plan, PlannedStage};
use crate::stage::WorkingState;

/// What a result's record calls the work that was done for it.
pub(crate) const WORK: &str = "work";

/// What it calls the CPU time that this took.
pub(crate) const CPU_SECONDS: &str = "cpu_seconds";

/// Earlier results of a stage that are looked at.
const MOST_RUNS: usize = 5;

/// The same of other stages of its kind.
const MOST_OTHERS: usize = 20;

/// Works that differ by less are the same.
const SAME: f64 = 0.05;

/// How long a stage would take.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// Seconds until its result is there.
    pub seconds: f64,
    /// Seconds of CPUs together, where they were counted.
    pub cpu_seconds: Option<f64>,
    /// What that stands on.
    pub basis: Basis,
}

/// What an estimate stands on.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "basis", rename_all = "snake_case")]
pub enum Basis {
    /// The stage did the same work before.
    SameWork {
        /// How often; the middle one counts.
        runs: usize,
    },
    /// The stage did other work before, and its time is taken in proportion.
    Scaled {
        /// The work then.
        from: Work,
        /// The work now.
        to: Work,
    },
    /// Another stage of the kind did, and its time is taken in proportion.
    OtherStage {
        kind: String,
        /// The work then.
        from: Work,
        /// The work now.
        to: Work,
    },
    /// The stage ran before, and how its work compares is not known.
    LastRun,
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = |from: &Work, to: &Work| format!("{} times the {}", figure(to.amount / from.amount), to.unit);
        match self {
            Self::SameWork { runs: 1 } => f.write_str("as the last time"),
            Self::SameWork { runs } => write!(f, "as the last {runs} times"),
            Self::Scaled { from, to } => write!(f, "{} of an earlier run", times(from, to)),
            Self::OtherStage { kind, from, to } => write!(f, "{} of another `{kind}` stage", times(from, to)),
            Self::LastRun => f.write_str("as the last time, whatever it did then"),
        }
    }
}

/// How long everything that would run takes together.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Total {
    /// Seconds along the longest chain of stages that wait for each other: the least that a run takes.
    pub critical_path_seconds: f64,
    /// Seconds of all stages, one after the other: the most.
    pub all_stages_seconds: f64,
    /// Seconds of CPUs together, where they were counted for all of them.
    pub cpu_seconds: Option<f64>,
    /// Stages that would run and of which nothing is known.
    pub without: Vec<String>,
}

/// What is left to do of a stage's work; its source files count where it declares nothing.
pub(crate) fn work_left(declared: Option<Work>, outside: &StageOutside, state: Option<&WorkingState>) -> Option<Work> {
    let bytes = || outside.files.values().flatten().map(|file| file.size).sum::<u64>();
    let of_files = || (!outside.files.is_empty()).then(|| Work::new("bytes", bytes() as f64));
    let work = declared.or_else(of_files)?;
    Some(match state {
        Some(WorkingState::GoesOn { done, of: Some(of), .. }) if done <= of => {
            Work { amount: work.amount * (of - done) as f64 / (*of).max(1) as f64, ..work }
        }
        _ => work,
    })
}

/// How long a stage would take to do its work, where anything is known of it.
pub(super) fn estimate(
    history: &History,
    pipeline: &str,
    stage: &PlannedStage,
    work: Option<&Work>,
) -> Result<Option<Estimate>, HistoryError> {
    let own = measured(history.made_by_stage(pipeline, &stage.id, MOST_RUNS)?);
    if let Some(work) = work {
        if let Some(estimate) = of_same_work(&own, work) {
            return Ok(Some(estimate));
        }
        if let Some((measured, from)) = closest(&own, work) {
            let basis = Basis::Scaled { from: from.clone(), to: work.clone() };
            return Ok(Some(scaled(measured, from, work, basis)));
        }
        if own.is_empty() {
            let others = measured(history.made_by_kind(stage.kind, MOST_OTHERS)?);
            return Ok(closest(&others, work).map(|(measured, from)| {
                let basis = Basis::OtherStage { kind: stage.kind.to_owned(), from: from.clone(), to: work.clone() };
                scaled(measured, from, work, basis)
            }));
        }
    }
    Ok(own.first().map(|last| Estimate { seconds: last.seconds, cpu_seconds: last.cpu_seconds, basis: Basis::LastRun }))
}

/// What all stages together would take; nothing where no stage has an estimate.
pub fn total(plan: &Plan, forecasts: &[StageForecast]) -> Option<Total> {
    let mut total = Total { cpu_seconds: Some(0.0), ..Total::default() };
    let mut ends: Vec<f64> = Vec::with_capacity(plan.stages.len());
    let mut any = false;
    for (stage, forecast) in plan.stages.iter().zip(forecasts) {
        let ready = stage.upstream().map(|before| ends[before]).fold(0.0, f64::max);
        let mut takes = 0.0;
        match &forecast.estimate {
            Some(estimate) => {
                any = true;
                takes = estimate.seconds;
                total.cpu_seconds = total.cpu_seconds.zip(estimate.cpu_seconds).map(|(sum, cpu)| sum + cpu);
            }
            None if !matches!(forecast.status, Status::Cached | Status::Missing) => {
                total.without.push(stage.id.clone());
                total.cpu_seconds = None;
            }
            None => {}
        }
        total.all_stages_seconds += takes;
        ends.push(ready + takes);
        total.critical_path_seconds = total.critical_path_seconds.max(ready + takes);
    }
    any.then_some(total)
}

/// What an earlier run took, and for how much work.
struct Measured {
    seconds: f64,
    cpu_seconds: Option<f64>,
    work: Option<Work>,
}

fn measured(made: Vec<EarlierResult>) -> Vec<Measured> {
    let read = |EarlierResult { seconds, record }: EarlierResult| {
        let how: Map<String, Value> = record.map(|record| record.how).unwrap_or_default();
        let work = how.get(WORK).and_then(|work| Work::deserialize(work).ok()).filter(|work| work.amount > 0.0);
        Measured { seconds, cpu_seconds: how.get(CPU_SECONDS).and_then(Value::as_f64), work }
    };
    made.into_iter().map(read).collect()
}

fn of_same_work(measured: &[Measured], work: &Work) -> Option<Estimate> {
    let is_same = |known: &Work| {
        known.unit == work.unit && (known.amount - work.amount).abs() <= SAME * work.amount.max(known.amount)
    };
    let mut same: Vec<&Measured> =
        measured.iter().filter(|run| run.work.as_ref().is_some_and(is_same)).take(3).collect();
    same.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    let middle = same.get(same.len() / 2)?;
    let basis = Basis::SameWork { runs: same.len() };
    Some(Estimate { seconds: middle.seconds, cpu_seconds: middle.cpu_seconds, basis })
}

/// The run whose work is most like this one.
fn closest<'a>(measured: &'a [Measured], work: &Work) -> Option<(&'a Measured, &'a Work)> {
    let comparable = measured.iter().filter_map(|run| Some((run, run.work.as_ref()?)));
    let distance = |known: &Work| (known.amount / work.amount).ln().abs();
    let comparable = comparable.filter(|(_, known)| known.unit == work.unit && work.amount > 0.0);
    comparable.min_by(|(_, one), (_, other)| distance(one).total_cmp(&distance(other)))
}

fn scaled(measured: &Measured, from: &Work, to: &Work, basis: Basis) -> Estimate {
    let times = to.amount / from.amount;
    Estimate { seconds: measured.seconds * times, cpu_seconds: measured.cpu_seconds.map(|cpu| cpu * times), basis }
}

/// Two significant digits.
fn figure(value: f64) -> String {
    match value {
        value if value >= 10.0 => format!("{value:.0}"),
        value if value >= 1.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seconds: f64, amount: f64) -> Measured {
        Measured { seconds, cpu_seconds: Some(2.0 * seconds), work: Some(Work::new("tokens", amount)) }
    }

    #[test]
    fn the_middle_of_the_same_work_counts_and_other_work_is_scaled() {
        let runs = [run(9.0, 100.0), run(10.0, 102.0), run(30.0, 99.0), run(80.0, 1000.0)];
        let same = of_same_work(&runs, &Work::new("tokens", 100.0)).map(|estimate| (estimate.seconds, estimate.basis));
        assert_eq!(same, Some((10.0, Basis::SameWork { runs: 3 })));
        let other = Work::new("tokens", 500.0);
        assert_eq!(of_same_work(&runs, &other), None);
        let from = closest(&runs, &other).map(|(run, from)| scaled(run, from, &other, Basis::LastRun).seconds);
        assert_eq!(from, Some(40.0), "the run of 1000 is nearer than those of 100");
        assert!(closest(&runs, &Work::new("rows", 500.0)).is_none(), "rows are no tokens");
    }

    #[test]
    fn what_is_done_already_is_not_done_again() {
        let state = WorkingState::GoesOn { unit: "step".to_owned(), done: 6, of: Some(24) };
        let outside = StageOutside::default();
        let left = work_left(Some(Work::new("tokens", 400.0)), &outside, Some(&state));
        assert_eq!(left, Some(Work::new("tokens", 300.0)));
        assert_eq!(work_left(None, &outside, None), None);
    }

    #[test]
    fn a_basis_is_a_few_words() {
        let work = |amount| Work::new("tokens", amount);
        assert_eq!(Basis::SameWork { runs: 2 }.to_string(), "as the last 2 times");
        let scaled = Basis::Scaled { from: work(100.0), to: work(150.0) };
        assert_eq!(scaled.to_string(), "1.5 times the tokens of an earlier run");
    }
}
