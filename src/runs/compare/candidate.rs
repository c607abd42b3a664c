//! Gathers what is to be compared: of a run or a child of a sweep, its parameters, its figures, its curves.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use cache::Digest;
use engine::artifact::Facts;
use engine::history::{Origin, Recorded, RecordedStage, Words};
use serde_json::{Number, Value};
use stages::data::artifact::{Metrics, OutputKind};

use super::curves::{Curve, Curves, last_of_pairs, recorded, reported, speeds};
use crate::render::Failure;
use crate::runs::Past;
use crate::{figures, words};

/// What is measured of a stage, whatever its kind.
const COST: [&str; 2] = ["seconds", "peak_memory_bytes"];

/// One of the things that are compared.
pub(super) struct Candidate {
    /// What tells it from the others.
    pub name: String,
    pub run: String,
    /// Its stage, where stages are compared.
    pub stage: Option<String>,
    /// The stages of a whole run, each with a dot behind it, as its parameters begin.
    pub stages: Vec<String>,
    /// How it stands.
    pub status: String,
    /// Parameters by dotted name, those of other stages behind their stage's id.
    pub parameters: BTreeMap<String, Value>,
    /// The same as the file has them, without defaults, also of stages whose results are there.
    pub asked: BTreeMap<String, Value>,
    /// Names of parameters of stages without a result, of which no more is known than the file has.
    pub unkeyed: BTreeSet<String>,
    /// Figures that a program of the user's found.
    pub own: BTreeSet<String>,
    /// Figures by name, in the order in which they are found.
    pub figures: Figures,
    /// Of the figures that an evaluation of one task has twice, by the metric's name alone and behind the task's: the
    /// second name by the first.
    pub with_task: BTreeMap<String, String>,
    /// Losses over steps.
    pub curves: Vec<Curve>,
}

/// Figures by name, in the order in which they are found; thousands of a whole run of a large sweep.
#[derive(Default)]
pub(super) struct Figures {
    in_order: Vec<(String, Number)>,
    /// Where the first of each name is.
    places: BTreeMap<String, usize>,
}

impl Figures {
    pub(super) fn in_order(&self) -> impl Iterator<Item = &(String, Number)> {
        self.in_order.iter()
    }

    pub(super) fn get(&self, name: &str) -> Option<&Number> {
        self.places.get(name).map(|place| &self.in_order[*place].1)
    }
}

impl Extend<(String, Number)> for Figures {
    fn extend<I: IntoIterator<Item = (String, Number)>>(&mut self, figures: I) {
        for (name, value) in figures {
            self.places.entry(name.clone()).or_insert(self.in_order.len());
            self.in_order.push((name, value));
        }
    }
}

impl FromIterator<(String, Number)> for Figures {
    fn from_iter<I: IntoIterator<Item = (String, Number)>>(figures: I) -> Self {
        let mut all = Self::default();
        all.extend(figures);
        all
    }
}

/// Gathers candidates; what several of them share is looked up once.
pub(super) struct Gatherer<'a> {
    past: &'a Past,
    /// Whether curves are wanted.
    curves: bool,
    runs: BTreeMap<String, Rc<Run>>,
    /// The followers of the children of a stage, by run and the stage's id in the file.
    followers: BTreeMap<(String, String), Rc<Followers>>,
    made: BTreeMap<Digest, Option<Rc<Origin>>>,
    /// The speeds of the trainings of a run.
    speeds: BTreeMap<String, BTreeMap<String, f64>>,
    /// The curves of the stages of a run from its events, by run and stage.
    reported: BTreeMap<String, BTreeMap<String, Curves>>,
}

impl<'a> Gatherer<'a> {
    /// One that has gathered nothing yet.
    pub(super) fn new(past: &'a Past, curves: bool) -> Self {
        Self {
            past,
            curves,
            runs: BTreeMap::new(),
            followers: BTreeMap::new(),
            made: BTreeMap::new(),
            speeds: BTreeMap::new(),
            reported: BTreeMap::new(),
        }
    }

    /// A whole run.
    ///
    /// # Errors
    /// Fails where its record or the store cannot be read.
    pub(super) fn run(&mut self, run: &str) -> Result<Candidate, Failure> {
        let of_run = self.of_run(run)?;
        let recorded = &of_run.recorded;
        let ids = self.past.history.ids().map_err(Failure::machine)?;
        let mut candidate = Candidate {
            name: crate::runs::ls::shortest(run, &ids).to_owned(),
            run: run.to_owned(),
            stage: None,
            stages: recorded.stages.iter().map(|stage| format!("{}.", stage.summary.stage)).collect(),
            status: crate::runs::state(recorded.summary.state).to_owned(),
            parameters: BTreeMap::new(),
            asked: BTreeMap::new(),
            unkeyed: BTreeSet::new(),
            own: BTreeSet::new(),
            figures: Figures::default(),
            with_task: BTreeMap::new(),
            curves: Vec::new(),
        };
        for stage in &recorded.stages {
            let prefix = format!("{}.", stage.summary.stage);
            self.add_parameters(&mut candidate, stage, &prefix)?;
            self.add_figures(&mut candidate, stage, &prefix, false)?;
        }
        Ok(candidate)
    }

    /// One stage of a run with all that led to it, and what was found out about its results alone. It is named by its
    /// axes, and by `label` where runs are to be told apart.
    ///
    /// # Errors
    /// As [`Gatherer::run`].
    pub(super) fn child(&mut self, run: &str, id: &str, label: Option<&str>) -> Result<Candidate, Failure> {
        let of_run = self.of_run(run)?;
        let stages = &of_run.recorded.stages;
        let Some(place) = of_run.places.get(id).copied() else {
            let ids: Vec<&str> = of_run.places.keys().map(String::as_str).collect();
            return Err(crate::locate::unknown_stage(id, &ids));
        };
        let stage = &stages[place];
        let axes: Vec<String> =
            stage.summary.axes.iter().map(|(axis, value)| format!("{axis}={}", words::exact(value))).collect();
        let names: Vec<String> = label.map(str::to_owned).into_iter().chain(axes).collect();
        let mut candidate = Candidate {
            name: if names.is_empty() { id.to_owned() } else { names.join(" ") },
            run: run.to_owned(),
            stage: Some(id.to_owned()),
            stages: Vec::new(),
            status: stage.summary.status.clone(),
            parameters: BTreeMap::new(),
            asked: BTreeMap::new(),
            unkeyed: BTreeSet::new(),
            own: BTreeSet::new(),
            figures: Figures::default(),
            with_task: BTreeMap::new(),
            curves: Vec::new(),
        };
        // An axis that is in no key (threads, the split of a batch) is in no parameter of the key either.
        candidate.parameters.extend(stage.summary.axes.iter().map(|(axis, value)| (axis.clone(), value.clone())));
        let followers = self.followers(&of_run, &stage.summary.declared);
        let prefix = |other: &RecordedStage| format!("{}.", other.summary.declared);
        self.add_parameters(&mut candidate, stage, "")?;
        self.add_figures(&mut candidate, stage, "", true)?;
        for other in of_run.ancestors(place).into_iter().map(|other| &stages[other]) {
            self.add_parameters(&mut candidate, other, &prefix(other))?;
        }
        for other in followers.get(&place).into_iter().flatten().map(|other| &stages[*other]) {
            self.add_figures(&mut candidate, other, &prefix(other), false)?;
        }
        Ok(candidate)
    }

    fn of_run(&mut self, run: &str) -> Result<Rc<Run>, Failure> {
        if let Some(known) = self.runs.get(run) {
            return Ok(Rc::clone(known));
        }
        let read = Rc::new(Run::of(self.past.recorded(run, Words::Skip)?));
        self.runs.insert(run.to_owned(), Rc::clone(&read));
        Ok(read)
    }

    fn followers(&mut self, run: &Run, declared: &str) -> Rc<Followers> {
        let of = (run.recorded.summary.run.clone(), declared.to_owned());
        Rc::clone(self.followers.entry(of).or_insert_with(|| Rc::new(run.followers(declared))))
    }

    fn made(&mut self, stage: &RecordedStage) -> Result<Option<Rc<Origin>>, Failure> {
        let Some(key) = stage.summary.key else { return Ok(None) };
        if let Some(known) = self.made.get(&key) {
            return Ok(known.clone());
        }
        let made = self.past.made(&key)?.map(Rc::new);
        self.made.insert(key, made.clone());
        Ok(made)
    }

    /// Tokens that the training of a result computed per second.
    fn speed(&mut self, made: &Origin) -> Option<f64> {
        let (past, (run, stage)) = (self.past, made.by.as_ref()?);
        let of_run = self.speeds.entry(run.clone()).or_insert_with(|| speeds(past, run));
        of_run.get(stage).copied()
    }

    /// The curves of a training: from its result, else from the events of the run that made it.
    fn curves_of(&mut self, made: &Origin, label: &str) -> Vec<Curve> {
        match (recorded(self.past, made), &made.by) {
            (Some(curves), _) => curves.of(label),
            (None, Some((run, stage))) => self.curves_so_far(run, stage, label),
            (None, None) => Vec::new(),
        }
    }

    /// The curves of a training from the events of a run, which is all that there is without a result.
    fn curves_so_far(&mut self, run: &str, stage: &str, label: &str) -> Vec<Curve> {
        let past = self.past;
        let of_run = self.reported.entry(run.to_owned()).or_insert_with(|| reported(past, run));
        of_run.get(stage).map(|curves| curves.of(label)).unwrap_or_default()
    }

    /// The parameters of a stage, defaults filled in where its key is known.
    fn add_parameters(&mut self, to: &mut Candidate, stage: &RecordedStage, prefix: &str) -> Result<(), Failure> {
        let mut given = Vec::new();
        figures::flatten(&stage.plan.parameters, String::new(), &mut |name, value| given.push((name, value.clone())));
        let keyed = self.made(stage)?.map(|made| {
            let entries = made.record.key.entries.iter().filter_map(|entry| keyed(&entry.path, &entry.value));
            entries.collect::<Vec<_>>()
        });
        for (name, value) in &given {
            to.asked.entry(format!("{prefix}{name}")).or_insert_with(|| value.clone());
        }
        if keyed.is_none() {
            to.unkeyed.extend(given.iter().map(|(name, _)| format!("{prefix}{name}")));
        }
        for (name, value) in keyed.unwrap_or(given) {
            to.parameters.entry(format!("{prefix}{name}")).or_insert(value);
        }
        Ok(())
    }

    fn add_figures(
        &mut self,
        to: &mut Candidate,
        stage: &RecordedStage,
        prefix: &str,
        in_focus: bool,
    ) -> Result<(), Failure> {
        let (past, with_curves) = (self.past, self.curves);
        let label = prefix.trim_end_matches('.');
        let Some(made) = self.made(stage)? else {
            if with_curves && stage.summary.kind == "train" {
                to.curves.extend(self.curves_so_far(&to.run, &stage.summary.stage, label));
            }
            return Ok(());
        };
        let metrics = made.record.outputs.iter().filter(|(_, output)| output.kind == Metrics::NAME);
        let metrics: Vec<_> = metrics.collect();
        // A figure that another output has too, or that is called as what is measured here, has its output's name.
        let is_taken = |name: &str| {
            let with_it = metrics.iter().filter(|(_, output)| output.facts.get(name).is_some_and(Value::is_number));
            (in_focus && COST.contains(&name)) || with_it.count() > 1
        };
        for (of, output) in &metrics {
            let numbers = output.facts.iter().filter_map(|(name, value)| Some((name, value.as_number()?.clone())));
            let full = |name: &str| match is_taken(name) {
                true => format!("{prefix}{of}.{name}"),
                false => format!("{prefix}{name}"),
            };
            let numbers: Vec<_> = numbers.map(|(name, value)| (full(name), value)).collect();
            if made.record.key.get("@kind") == Some("command") {
                to.own.extend(numbers.iter().map(|(name, _)| name.clone()));
            }
            if made.record.key.get("@kind") == Some("evaluate") {
                for (name, with_task) in named_twice(&output.facts) {
                    to.with_task.entry(full(name)).or_insert_with(|| full(with_task));
                }
            }
            to.figures.extend(numbers);
        }
        let trained = made.record.key.get("@kind") == Some("train");
        if trained && with_curves {
            to.curves.extend(self.curves_of(&made, label));
        }
        if trained {
            let last = last_of_pairs(past, &made).into_iter();
            let last = last.filter_map(|(name, value)| Some((format!("{prefix}{name}"), Number::from_f64(value)?)));
            to.figures.extend(last);
        }
        if trained && let Some(speed) = self.speed(&made).and_then(Number::from_f64) {
            to.figures.extend([(format!("{prefix}tokens_per_second"), speed)]);
        }
        if trained || in_focus {
            let cost = COST.into_iter();
            let cost = cost.filter_map(|name| Some((name, made.record.how.get(name)?.as_number()?.clone())));
            to.figures.extend(cost.map(|(name, value)| (format!("{prefix}{name}"), value)));
        }
        Ok(())
    }
}

/// The facts of an evaluation that it has twice, those of its only task: by the metric's name alone, and behind the
/// task's.
fn named_twice(facts: &Facts) -> impl Iterator<Item = (&str, &str)> {
    facts.iter().filter_map(move |(name, value)| {
        let mut ends = name.match_indices('.').map(|(dot, _)| &name[dot + 1..]);
        Some((ends.find(|end| facts.get(*end) == Some(value))?, name.as_str()))
    })
}

/// An entry of a key as something to compare: identities of inputs are consequences of what the stages before were
/// told.
fn keyed(path: &str, value: &str) -> Option<(String, Value)> {
    if let Some(file) = path.strip_prefix("@files.") {
        let digest = value.rsplit_once(' ').map_or(value, |(_, digest)| digest);
        return Some((file.to_owned(), digest.get(..12).unwrap_or(digest).into()));
    }
    if let Some(pin) = path.strip_prefix("@pins.") {
        return Some((pin.to_owned(), value.into()));
    }
    if path == "@version" {
        return Some(("(version of the kind)".to_owned(), value_of(value)));
    }
    let is_identity = value.parse::<Digest>().is_ok();
    (!is_identity && !path.starts_with('@')).then(|| (path.to_owned(), value_of(value)))
}

/// The value that a key has as text: JSON, or a bare word (the name of a choice).
fn value_of(canonical: &str) -> Value {
    serde_json::from_str(canonical).unwrap_or_else(|_| canonical.into())
}

/// By the place of a stage, those of the stages that depend on it and on no other child of the same sweep.
type Followers = BTreeMap<usize, Vec<usize>>;

/// A run's record, and which of its stages read which; stages are known by their place in the record.
struct Run {
    recorded: Recorded,
    places: BTreeMap<String, usize>,
    /// What each stage reads itself.
    inputs: Vec<Vec<usize>>,
}

impl Run {
    fn of(recorded: Recorded) -> Self {
        let stages = recorded.stages.iter().enumerate();
        let places: BTreeMap<String, usize> =
            stages.map(|(place, stage)| (stage.summary.stage.clone(), place)).collect();
        let inputs = recorded.stages.iter().map(|stage| {
            let inputs = stage.plan.inputs.iter();
            inputs.filter_map(|input| places.get(&input.stage).copied()).collect::<Vec<_>>()
        });
        let inputs = inputs.collect();
        Self { recorded, places, inputs }
    }

    /// All stages that a stage depends on.
    fn ancestors(&self, place: usize) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut open = vec![place];
        while let Some(next) = open.pop() {
            open.extend(self.inputs[next].iter().filter(|before| found.insert(**before)));
        }
        found
    }

    /// Of the children of the stage that the file declares by this id.
    fn followers(&self, declared: &str) -> Followers {
        followers(&self.inputs, |place| self.recorded.stages[place].summary.declared == declared)
    }
}

/// `inputs` has what each stage reads, in an order in which each is behind those that it reads, as records have them.
fn followers(inputs: &[Vec<usize>], is_child: impl Fn(usize) -> bool) -> Followers {
    let mut followers = Followers::new();
    let mut on: Vec<DependsOn> = Vec::new();
    for (place, inputs) in inputs.iter().enumerate() {
        let through = |input: usize| on.get(input).copied().unwrap_or(DependsOn::None);
        let itself = |input: usize| if is_child(input) { DependsOn::One(input) } else { DependsOn::None };
        let of = inputs.iter().fold(DependsOn::None, |of, input| of.and(through(*input)).and(itself(*input)));
        if let DependsOn::One(child) = of {
            followers.entry(child).or_default().push(place);
        }
        on.push(of);
    }
    followers
}

/// How many children of a sweep a stage depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DependsOn {
    None,
    One(usize),
    Several,
}

impl DependsOn {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::None, only) | (only, Self::None) => only,
            (Self::One(one), Self::One(other)) if one == other => self,
            (Self::One(_) | Self::Several, Self::One(_) | Self::Several) => Self::Several,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_depends_on_one_child_alone_follows_it() {
        // 0 is read by the children 1 and 2; 3 and 4 read a child each, 5 what follows the first child, 6 both.
        let inputs = [vec![], vec![0], vec![0], vec![1], vec![0, 2], vec![3, 1], vec![3, 4]];
        let of_sweep = followers(&inputs, |place| [1, 2].contains(&place));
        assert_eq!(of_sweep, Followers::from([(1, vec![3, 5]), (2, vec![4])]));
        let of_first = followers(&inputs, |place| place == 0);
        assert_eq!(of_first, Followers::from([(0, vec![1, 2, 3, 4, 5, 6])]));
    }

    #[test]
    fn the_first_figure_of_a_name_counts() {
        let found = [("b", 1_u64), ("a", 2), ("b", 3)].map(|(name, value)| (name.to_owned(), Number::from(value)));
        let figures: Figures = found.into_iter().collect();
        assert_eq!(figures.get("b"), Some(&Number::from(1_u64)));
        assert_eq!(figures.get("c"), None);
        let names: Vec<&str> = figures.in_order().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["b", "a", "b"]);
    }

    #[test]
    fn values_of_a_key_have_their_types() {
        let values = ["\"s1\"", "\"3\"", "12345678901234567890", "1e-5", "true", "[]", "bf16", "none"];
        let expected = json!(["s1", "3", 12_345_678_901_234_567_890_u64, 1e-5, true, [], "bf16", "none"]);
        assert_eq!(Value::from(values.map(value_of).to_vec()), expected);
        let file = keyed("@files.source[0]", &format!("jsonl {}", "1234567890".repeat(6)));
        assert_eq!(file, Some(("source[0]".to_owned(), json!("123456789012"))), "a digest is text");
    }
}
