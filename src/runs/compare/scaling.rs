//! How much faster more devices (or threads) are: the speed-up and the efficiency of the children of a sweep over their
//! number.
//!
//! Children are compared that differ in nothing else; the one with the fewest is what the others are measured against.

use std::collections::BTreeMap;

use serde_json::Number;

use super::candidate::Candidate;
use crate::plot::{Panel, Series};

/// The axes that say over how much a stage is spread, the one that is looked at first.
const AXES: [&str; 3] = ["resources.count", "resources.nodes", "resources.threads"];

/// How often as fast as the child with the fewest.
pub(super) const SPEED_UP: &str = "speed_up";

/// The speed-up by how many times as much was used: 1 is all that can be had.
pub(super) const EFFICIENCY: &str = "efficiency";

/// What a rate is taken from: work per second, else the whole time.
const RATES: [&str; 2] = ["tokens_per_second", "seconds"];

/// The children of one family: those that differ in nothing but the axis.
struct Family {
    name: String,
    /// Candidates by their place, with how much they used and how fast they were; the fewest first.
    members: Vec<(usize, f64, f64)>,
}

/// Adds speed-up and efficiency to the candidates of a sweep over devices, nodes or threads; `parameters` are those
/// that differ.
pub(super) fn add(candidates: &mut [Candidate], parameters: &[String]) {
    let Some(axis) = axis(parameters) else { return };
    for family in families(candidates, parameters, axis) {
        let (_, fewest, slowest) = family.members[0];
        for (place, used, rate) in &family.members {
            let speed_up = rate / slowest;
            let figures = &mut candidates[*place].figures;
            let found = [(SPEED_UP, speed_up), (EFFICIENCY, speed_up * fewest / used)];
            figures.extend(
                found.into_iter().filter_map(|(name, value)| Some((name.to_owned(), Number::from_f64(value)?))),
            );
        }
    }
}

/// Speed-up over the axis, with the line that nothing can be above.
pub(super) fn panel(candidates: &[Candidate], parameters: &[String]) -> Option<Panel> {
    let axis = axis(parameters)?;
    let mut series: Vec<Series> = Vec::new();
    let mut ideal: Option<Vec<(f64, f64)>> = None;
    for family in families(candidates, parameters, axis) {
        let (_, fewest, slowest) = family.members[0];
        let point = |(_, used, rate): &(usize, f64, f64)| (*used, rate / slowest);
        series.push(Series { name: family.name, points: family.members.iter().map(point).collect() });
        let linear: Vec<_> = family.members.iter().map(|(_, used, _)| (*used, used / fewest)).collect();
        ideal.get_or_insert(linear);
    }
    series.extend(ideal.map(|points| Series { name: "linear".to_owned(), points }));
    (!series.is_empty()).then(|| Panel { title: "speed-up".to_owned(), x: axis.to_owned(), series })
}

fn axis(parameters: &[String]) -> Option<&'static str> {
    AXES.into_iter().find(|axis| parameters.iter().any(|name| name == axis))
}

/// Families of two or more whose rates are known.
fn families(candidates: &[Candidate], parameters: &[String], axis: &str) -> Vec<Family> {
    let mut families: BTreeMap<Vec<String>, Family> = BTreeMap::new();
    let rated = RATES.into_iter().find(|name| candidates.iter().all(|candidate| candidate.figure(name).is_some()));
    let Some(figure) = rated else { return Vec::new() };
    for (place, candidate) in candidates.iter().enumerate() {
        let others = parameters.iter().filter(|name| *name != axis);
        let others: Vec<String> = others.map(|name| candidate.parameter(name)).collect();
        let used = candidate.parameter(axis).parse::<f64>();
        let (Ok(used), Some(value)) = (used, candidate.figure(figure)) else { continue };
        let rate = if figure == "seconds" { 1.0 / value } else { value };
        if !(used > 0.0 && rate.is_finite() && rate > 0.0) {
            continue;
        }
        let named = parameters.iter().filter(|name| *name != axis).zip(&others);
        let name = named.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ");
        let name = if name.is_empty() { "measured".to_owned() } else { name };
        families.entry(others).or_insert(Family { name, members: Vec::new() }).members.push((place, used, rate));
    }
    let mut families: Vec<Family> = families.into_values().filter(|family| family.members.len() > 1).collect();
    for family in &mut families {
        family.members.sort_by(|one, other| one.1.total_cmp(&other.1));
    }
    families
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn child(count: &str, rank: &str, figure: (&str, f64)) -> Candidate {
        let parameters = [("resources.count", count), ("lora.rank", rank)];
        Candidate {
            stages: Vec::new(),
            name: String::new(),
            run: String::new(),
            stage: None,
            status: "done".to_owned(),
            parameters: parameters.map(|(name, value)| (name.to_owned(), value.into())).into(),
            asked: BTreeMap::new(),
            unkeyed: BTreeSet::new(),
            own: BTreeSet::new(),
            figures: [(figure.0.to_owned(), Number::from_f64(figure.1).unwrap())].into_iter().collect(),
            with_task: BTreeMap::new(),
            curves: Vec::new(),
        }
    }

    fn names() -> Vec<String> {
        ["lora.rank", "resources.count"].map(str::to_owned).to_vec()
    }

    #[test]
    fn children_that_differ_in_nothing_else_are_compared() {
        let tokens = |count, rank, speed| child(count, rank, ("tokens_per_second", speed));
        let mut candidates =
            [tokens("8", "4", 600.0), tokens("2", "4", 200.0), tokens("2", "8", 100.0), tokens("4", "8", 200.0)];
        add(&mut candidates, &names());
        let figures = |at: usize| [SPEED_UP, EFFICIENCY].map(|name| candidates[at].figure(name).unwrap());
        assert_eq!(figures(0), [3.0, 0.75]);
        assert_eq!(figures(1), [1.0, 1.0]);
        assert_eq!(figures(3), [2.0, 1.0]);
        let panel = panel(&candidates, &names()).unwrap();
        let series: Vec<_> = panel.series.iter().map(|line| (line.name.as_str(), line.points.clone())).collect();
        assert_eq!(
            series,
            [
                ("lora.rank=4", vec![(2.0, 1.0), (8.0, 3.0)]),
                ("lora.rank=8", vec![(2.0, 1.0), (4.0, 2.0)]),
                ("linear", vec![(2.0, 1.0), (8.0, 4.0)]),
            ]
        );
    }

    #[test]
    fn without_tokens_the_time_counts() {
        let mut candidates = [child("1", "4", ("seconds", 12.0)), child("2", "4", ("seconds", 8.0))];
        add(&mut candidates, &["resources.count".to_owned()]);
        assert_eq!(candidates[1].figure(SPEED_UP), Some(1.5));
        assert_eq!(candidates[1].figure(EFFICIENCY), Some(0.75));
    }

    #[test]
    fn a_sweep_over_something_else_has_no_speed_up() {
        let mut candidates = [child("1", "4", ("seconds", 12.0)), child("1", "8", ("seconds", 8.0))];
        add(&mut candidates, &["lora.rank".to_owned()]);
        assert_eq!(candidates[1].figure(SPEED_UP), None);
        // One child, or a number that is none, is nothing to compare.
        add(&mut candidates, &names());
        assert_eq!(candidates[1].figure(SPEED_UP), None);
    }
}
