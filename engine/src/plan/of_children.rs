//! Problems of the children of a sweep: what many of them have in common is said once, and what is wrong with some says
//! with which.

use std::collections::{HashMap, HashSet};

use super::entry::StageEntry;
use super::resolve::Bound;
use crate::file::problem::Problem;
use crate::file::source::Span;

/// The problems of all stages.
pub(super) fn problems(stages: &[StageEntry], bound: &mut [Bound]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut of_sweeps: HashMap<(&str, &str, Span), Vec<usize>> = HashMap::new();
    let mut groups: Vec<(&StageEntry, Problem, Vec<usize>)> = Vec::new();
    for (place, (stage, bound)) in stages.iter().zip(bound).enumerate() {
        for problem in bound.problems.drain(..) {
            if stage.axes.is_empty() {
                problems.push(problem);
                continue;
            }
            let same = of_sweeps.entry((&stage.declared, problem.code, problem.span)).or_default();
            // In one stage, two problems at one place are two; in two children, one problem has perhaps other figures.
            let group = same.iter().copied().find(|group| groups[*group].2.last() != Some(&place));
            match group {
                Some(group) => groups[group].2.push(place),
                None => {
                    same.push(groups.len());
                    groups.push((stage, problem, vec![place]));
                }
            }
        }
    }
    if !groups.is_empty() {
        let mut children: HashMap<&str, Vec<usize>> = HashMap::new();
        for (place, stage) in stages.iter().enumerate().filter(|(_, stage)| !stage.axes.is_empty()) {
            children.entry(&stage.declared).or_default().push(place);
        }
        let with_values = |(stage, problem, places): (&StageEntry, Problem, Vec<usize>)| {
            with_values(problem, &places, &children[stage.declared.as_str()], stages)
        };
        problems.extend(groups.into_iter().map(with_values));
    }
    problems
}

/// Adds the values of the axes that a problem depends on: those of which not every value has it.
fn with_values(mut problem: Problem, places: &[usize], all: &[usize], stages: &[StageEntry]) -> Problem {
    if places.len() == all.len() {
        return problem;
    }
    let first = &stages[places[0]];
    for (axis, own) in first.axes.iter().enumerate() {
        let values =
            |places: &[usize]| -> HashSet<Span> { places.iter().map(|place| stages[*place].axes[axis].span).collect() };
        let stands_there = problem.span == own.span || problem.related.iter().any(|(span, _)| *span == own.span);
        if !stands_there && values(places).len() < values(all).len() {
            problem.related.push((own.span, format!("with this value of `{}`", own.name)));
        }
    }
    problem
}
