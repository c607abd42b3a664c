//! The graph of a file's stages: cycles, and an order in which each stage comes after those it waits for.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::path::PathBuf;

use petgraph::algo::kosaraju_scc;
use petgraph::graph::{DiGraph, NodeIndex};

use super::entry::StageEntry;
use super::resolve::{Bound, Wait, Why};
use super::{Gate, LeftOut, Publish};
use crate::file::problem::{Problem, Severity};
use crate::file::source::Span;
use crate::stage::Registry;

/// Stages of a cycle that are named.
const MOST_TOLD: usize = 20;

/// The places of the stages, each after those it waits for, else in the order of the file; `None` where there is a
/// cycle, which is reported.
pub(super) fn order(stages: &[StageEntry], bound: &[Bound], problems: &mut Vec<Problem>) -> Option<Vec<usize>> {
    let cycles = cycles(bound);
    for cycle in &cycles {
        problems.push(describe(cycle, stages));
    }
    cycles.is_empty().then(|| sorted(bound))
}

/// Each cycle once, as the steps from stage to stage: in every knot of stages the shortest through its first one.
fn cycles(bound: &[Bound]) -> Vec<Vec<(usize, &Wait)>> {
    let mut waits: DiGraph<(), ()> = DiGraph::new();
    let nodes: Vec<NodeIndex> = bound.iter().map(|_| waits.add_node(())).collect();
    for (place, stage) in bound.iter().enumerate() {
        for wait in &stage.waits_for {
            waits.add_edge(nodes[place], nodes[wait.stage], ());
        }
    }
    let waits_for_itself = |place: usize| bound[place].waits_for.iter().any(|wait| wait.stage == place);
    let knots: Vec<Vec<NodeIndex>> = kosaraju_scc(&waits);
    let mut knot_of = vec![0; bound.len()];
    for (number, knot) in knots.iter().enumerate() {
        knot.iter().for_each(|node| knot_of[node.index()] = number);
    }
    let mut cycles: Vec<_> = knots
        .iter()
        .filter_map(|knot| Some((knot.len(), knot.iter().map(|node| node.index()).min()?)))
        .filter(|(stages, first)| *stages > 1 || waits_for_itself(*first))
        .filter_map(|(_, first)| shortest_cycle(first, bound, &knot_of))
        .collect();
    cycles.sort_by_key(|cycle| cycle[0].0);
    cycles
}

/// The shortest way from a stage back to itself, breadth first; it does not leave the stage's knot.
fn shortest_cycle<'a>(first: usize, bound: &'a [Bound], knot_of: &[usize]) -> Option<Vec<(usize, &'a Wait)>> {
    let mut came_by: HashMap<usize, (usize, &Wait)> = HashMap::new();
    let mut queue = VecDeque::from([first]);
    while let Some(stage) = queue.pop_front() {
        for wait in &bound[stage].waits_for {
            if knot_of[wait.stage] != knot_of[first] || came_by.contains_key(&wait.stage) {
                continue;
            }
            came_by.insert(wait.stage, (stage, wait));
            queue.push_back(wait.stage);
        }
    }
    let mut cycle = vec![*came_by.get(&first)?];
    while cycle[cycle.len() - 1].0 != first {
        let reached = cycle[cycle.len() - 1].0;
        cycle.push(came_by[&reached]);
    }
    cycle.reverse();
    Some(cycle)
}

fn describe(cycle: &[(usize, &Wait)], stages: &[StageEntry]) -> Problem {
    let id = |place: usize| stages[place].id.text.as_str();
    let (first, wait) = cycle[0];
    let verb = |wait: &Wait| if wait.why == Why::Needs { "needs" } else { "reads" };
    if cycle.len() == 1 {
        let message = format!("stage `{}` {} itself", id(first), verb(wait));
        return Problem::error("cycle", wait.span, message, "a stage cannot wait for itself");
    }
    let told = cycle.len().min(MOST_TOLD);
    let path: Vec<&str> = cycle[..told].iter().map(|(place, _)| id(*place)).collect();
    let more = if told < cycle.len() { format!("… {} more … → ", cycle.len() - told) } else { String::new() };
    let message = format!("stages wait for each other: {} → {more}{}", path.join(" → "), id(first));
    let label = |(place, wait): &(usize, &Wait)| format!("`{}` {} `{}`", id(*place), verb(wait), id(wait.stage));
    cycle[1..told].iter().fold(Problem::error("cycle", wait.span, message, label(&cycle[0])), |problem, step| {
        problem.with_related(step.1.span, label(step))
    })
}

/// Always the first stage of the file that waits for nothing more.
fn sorted(bound: &[Bound]) -> Vec<usize> {
    let mut waiting: Vec<usize> = bound.iter().map(|stage| stage.waits_for.len()).collect();
    let mut readers = vec![Vec::new(); bound.len()];
    for (place, stage) in bound.iter().enumerate() {
        for wait in &stage.waits_for {
            readers[wait.stage].push(place);
        }
    }
    let mut ready: BinaryHeap<Reverse<usize>> =
        (0..bound.len()).filter(|place| waiting[*place] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(bound.len());
    while let Some(Reverse(place)) = ready.pop() {
        order.push(place);
        for reader in &readers[place] {
            waiting[*reader] -= 1;
            if waiting[*reader] == 0 {
                ready.push(Reverse(*reader));
            }
        }
    }
    order
}

// Stages that are left out: those whose `when:` is false, and those that need one of them.

/// Which stages are left out, and why.
pub(super) struct LeftOuts(Vec<Option<Because>>);

/// Why a stage is left out.
struct Because {
    /// The stage before it that is, by place.
    follows: Option<usize>,
    span: Span,
}

impl LeftOuts {
    /// Looks at the stages in an order in which each comes after those that it waits for.
    pub(super) fn find(stages: &[StageEntry], bound: &[Bound], order: &[usize]) -> Self {
        let mut found: Vec<Option<Because>> = stages.iter().map(|_| None).collect();
        for place in order {
            let own = stages[*place].left_out.map(|span| Because { follows: None, span });
            let before = || {
                let wait = bound[*place].waits_for.iter().find(|wait| found[wait.stage].is_some())?;
                Some(Because { follows: Some(wait.stage), span: wait.span })
            };
            found[*place] = own.or_else(before);
        }
        Self(found)
    }

    /// Whether the stage at a place is left out.
    pub(super) fn has(&self, place: usize) -> bool {
        self.0[place].is_some()
    }

    /// Each stage of the file that is left out, once; what was to be published of it goes from `publish` to it.
    pub(super) fn into_list(self, stages: &[StageEntry], publish: &mut Vec<Publish>) -> Vec<LeftOut> {
        let mut list: Vec<LeftOut> = Vec::new();
        let left_out = stages.iter().zip(&self.0).filter(|(_, because)| because.is_some());
        let ids: HashSet<&str> = left_out.map(|(stage, _)| stage.id.text.as_str()).collect();
        let mut unpublished: HashMap<String, Vec<PathBuf>> = HashMap::new();
        for entry in publish.extract_if(.., |entry| ids.contains(entry.stage.as_str())) {
            unpublished.entry(entry.stage).or_default().push(entry.path);
        }
        for (stage, because) in stages.iter().zip(&self.0) {
            let Some(because) = because else { continue };
            let entries = unpublished.remove(&stage.id.text).unwrap_or_default();
            match list.last_mut().filter(|last| last.stage == stage.declared) {
                Some(last) => last.publish.extend(entries),
                None => list.push(LeftOut {
                    stage: stage.declared.clone(),
                    follows: because.follows.map(|place| stages[place].declared.clone()),
                    span: because.span,
                    publish: entries,
                }),
            }
        }
        list
    }
}

// Stages whose results nobody uses.

/// Warns of each stage that nothing reads, waits for or publishes, where the file has goals and the stage is none of
/// them. A file without any goal is one that prepares something to be looked at; and where something is wrong, the
/// missing reader may be that.
pub(super) fn warn_unused(
    stages: &[StageEntry],
    bound: &[Bound],
    (publish, gates): (&[Publish], &[Gate]),
    left_out: &LeftOuts,
    registry: &Registry,
    problems: &mut Vec<Problem>,
) {
    let wrong = |bound: &Bound| bound.kind.is_none();
    if bound.iter().any(wrong) || problems.iter().any(|problem| problem.severity == Severity::Error) {
        return;
    }
    let goals = bound.iter().enumerate().filter(|(_, bound)| registry.get(bound.name).is_some_and(|kind| kind.is_goal));
    let goals: Vec<usize> = goals.map(|(place, _)| place).collect();
    if publish.is_empty() && goals.is_empty() {
        return;
    }
    // One child of a sweep that is used is enough.
    let waited_for = bound.iter().flat_map(|bound| &bound.waits_for).map(|wait| wait.stage);
    let mut used: HashSet<&str> = waited_for.chain(goals).map(|place| stages[place].declared.as_str()).collect();
    let asked = gates.iter().flat_map(Gate::stages);
    let published: HashSet<&str> = publish.iter().map(|publish| publish.stage.as_str()).chain(asked).collect();
    used.extend(
        stages.iter().filter(|stage| published.contains(stage.id.text.as_str())).map(|stage| stage.declared.as_str()),
    );
    for (place, (stage, bound)) in stages.iter().zip(bound).enumerate() {
        let id = stage.declared.as_str();
        if left_out.has(place) || !used.insert(id) {
            continue;
        }
        let message = format!("nothing uses what stage `{id}` makes");
        let help = format!("let a stage read it, publish it, or remove it; a `{}` is no end in itself", bound.name);
        problems.push(
            Problem::warning("unused-stage", stage.id.span, message, "read by no stage, and not published")
                .with_help(help),
        );
    }
}
