//! The graph of a file's stages: cycles, and an order in which each stage comes after those it waits for.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

use petgraph::algo::kosaraju_scc;
use petgraph::graph::{DiGraph, NodeIndex};

use super::Edge;
use super::entry::StageEntry;
use super::resolve::{Bound, Wait};
use crate::file::problem::Problem;

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

/// The graph over the stages of a plan: `order` says which place in the file each of them had.
pub(super) fn graph(stages: &[StageEntry], bound: &[Bound], order: &[usize]) -> DiGraph<usize, Edge> {
    let mut graph = DiGraph::with_capacity(stages.len(), stages.len() * 2);
    let mut nodes = vec![NodeIndex::end(); stages.len()];
    for (index, place) in order.iter().enumerate() {
        nodes[*place] = graph.add_node(index);
        let mut seen = HashSet::new();
        for wait in &bound[*place].waits_for {
            // Two fields may hold the same output.
            if seen.insert((wait.stage, &wait.why)) {
                graph.add_edge(nodes[wait.stage], nodes[*place], wait.why.clone());
            }
        }
    }
    graph
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
    let verb = |wait: &Wait| if wait.why == Edge::Needs { "needs" } else { "reads" };
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
