//! Gates: what figures must be like before anything is published.

use std::collections::{BTreeMap, HashMap, HashSet};

use cache::OutputRecord;

use crate::plan::{Bound, Figure, Gate, Margin, Plan, Side};

/// How the gates of a run stand.
pub(super) struct Gates {
    /// Whether each one holds, once it is judged.
    judged: Vec<Option<bool>>,
    /// The gates that a stage's result decides, by places in the plan.
    of_stage: HashMap<usize, Vec<usize>>,
    /// The stages that gates name.
    positions: HashMap<String, usize>,
}

/// What a gate's figures say.
pub(super) struct Verdict {
    pub holds: bool,
    /// The figure, where there is one.
    pub value: Option<f64>,
    /// What it was compared with, margin included.
    pub bound: Option<f64>,
    /// In words.
    pub because: String,
}

impl Gates {
    pub(super) fn new(plan: &Plan) -> Self {
        let named: HashSet<&str> = plan.gates.iter().flat_map(Gate::stages).collect();
        let stages = plan.stages.iter().enumerate().filter(|(_, stage)| named.contains(stage.id.as_str()));
        let positions: HashMap<String, usize> = stages.map(|(position, stage)| (stage.id.clone(), position)).collect();
        let mut of_stage: HashMap<usize, Vec<usize>> = HashMap::new();
        for (at, gate) in plan.gates.iter().enumerate() {
            // One that compares two figures of a stage is judged once.
            let stages: HashSet<usize> = gate.stages().map(|stage| positions[stage]).collect();
            stages.into_iter().for_each(|stage| of_stage.entry(stage).or_default().push(at));
        }
        Self { judged: vec![None; plan.gates.len()], of_stage, positions }
    }

    /// Whether all hold.
    pub(super) fn are_open(&self) -> bool {
        self.judged.iter().all(|judged| *judged == Some(true))
    }

    /// Whether one does not.
    pub(super) fn refuse(&self) -> bool {
        self.judged.contains(&Some(false))
    }

    /// Judges the gates that only waited for the result of a stage; `outputs` are those of a stage that has its result.
    pub(super) fn judge<'a>(
        &mut self,
        gates: &[Gate],
        stage: usize,
        outputs: impl Fn(usize) -> Option<&'a BTreeMap<String, OutputRecord>>,
    ) -> Vec<(usize, Verdict)> {
        let of = |stage: &str| outputs(*self.positions.get(stage)?);
        let decided = self.of_stage.get(&stage).into_iter().flatten().copied();
        let decided = decided.filter(|at| gates[*at].stages().all(|stage| of(stage).is_some()));
        let verdicts: Vec<_> = decided.map(|at| (at, verdict(&gates[at], of))).collect();
        verdicts.iter().for_each(|(at, verdict)| self.judged[*at] = Some(verdict.holds));
        verdicts
    }
}

fn verdict<'a>(gate: &Gate, outputs: impl Fn(&str) -> Option<&'a BTreeMap<String, OutputRecord>>) -> Verdict {
    match judged(gate, |figure: &Figure| value(figure, outputs(&figure.stage))) {
        Ok(verdict) => verdict,
        Err(because) => Verdict { holds: false, value: None, bound: None, because },
    }
}

fn judged(gate: &Gate, of: impl Fn(&Figure) -> Result<f64, String>) -> Result<Verdict, String> {
    let value = of(&gate.figure)?;
    let (other, origin) = match &gate.bound {
        Bound::Number(number) => (*number, None),
        Bound::Figure(figure) => (of(figure)?, Some(figure)),
    };
    let margin = match (gate.margin, origin) {
        (Margin::Number(margin), Some(_)) => Some((margin, "the margin")),
        (Margin::StandardError, Some(origin)) => {
            let error = of(&gate.figure.standard_error())?.hypot(of(&origin.standard_error())?);
            Some((error, "the standard error of their difference"))
        }
        (Margin::None, _) | (_, None) => None,
    };
    let (by, _) = margin.unwrap_or_default();
    // What is no number is on neither side.
    let (bound, holds, side, sign) = match gate.side {
        Side::Above => (other + by, value > other + by, "above", '+'),
        Side::Below => (other - by, value < other - by, "below", '−'),
    };
    let shown = |number| rounded(number, digits_apart(value, bound));
    let is = if holds { "is" } else { "is not" };
    let mut because = format!("{} {is} {side} {}", shown(value), shown(bound));
    if let Some(origin) = origin {
        because += &match margin {
            None => format!(", `{origin}`"),
            Some((by, what)) => format!(", which is `{origin}` {} {sign} {what} {}", shown(other), shown(by)),
        };
    }
    Ok(Verdict { holds, value: Some(value), bound: Some(bound), because })
}

/// With how many digits two numbers are shown: with so many that it is seen that they are not the same.
fn digits_apart(one: f64, other: f64) -> usize {
    const FEW: usize = 5;
    const ALL: usize = 17;
    let differ = |digits: &usize| rounded(one, *digits) != rounded(other, *digits);
    if one == other { FEW } else { (FEW..ALL).find(differ).unwrap_or(ALL) }
}

/// A number in at most so many digits that count.
fn rounded(number: f64, digits: usize) -> f64 {
    format!("{number:.*e}", digits - 1).parse().unwrap_or(number)
}

/// A figure among the facts of a stage's outputs; or why there is none. Where several outputs have one of that name, it
/// is only known which is meant if they are equal, or if the output is named as well.
fn value(figure: &Figure, outputs: Option<&BTreeMap<String, OutputRecord>>) -> Result<f64, String> {
    let Figure { stage, name } = figure;
    let facts = || {
        let outputs = outputs.into_iter().flatten();
        outputs.flat_map(|(output, record)| record.facts.iter().map(move |(fact, value)| (output, fact, value)))
    };
    let is_it = |output: &str, fact: &str| name == fact || figure.of_output(output) == Some(fact);
    let found = facts().filter(|(output, fact, value)| is_it(output, fact) && (value.is_number() || value.is_null()));
    let found: Vec<_> =
        found.map(|(output, fact, value)| (format!("{stage}.{output}.{fact}"), value.as_f64())).collect();
    match found.as_slice() {
        [(_, value), others @ ..] if others.iter().all(|(_, other)| other == value) => {
            value.ok_or_else(|| format!("`{name}` of `{stage}` is not a finite number"))
        }
        [] => {
            let mut known: Vec<&str> =
                facts().filter(|(.., value)| value.is_number()).map(|(_, fact, _)| fact.as_str()).collect();
            known.sort_unstable();
            known.dedup();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Err(format!("`{stage}` has no figure `{name}`; it has: {known}"))
        }
        several => {
            let shown = |(long, value): &(String, Option<f64>)| match value {
                Some(value) => format!("`{long}` {value}"),
                None => format!("`{long}`, not a finite number"),
            };
            let several: Vec<String> = several.iter().map(shown).collect();
            Err(format!("`{stage}` has several figures `{name}`, and the gate has to name one: {}", several.join("; ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use cache::Digest;
    use serde_json::{Map, json};

    use super::*;
    use crate::file::source::Span;

    fn outputs(facts: serde_json::Value) -> BTreeMap<String, OutputRecord> {
        let digest = Digest::of(b"");
        let facts: Map<_, _> = facts.as_object().expect("a mapping").clone();
        let record = OutputRecord { kind: "metrics".to_owned(), tree: digest, identity: digest, facts };
        BTreeMap::from([("metrics".to_owned(), record)])
    }

    fn judged(side: Side, bound: Bound, margin: Margin) -> (bool, String) {
        let now = outputs(json!({ "acc,none": 0.5, "acc_stderr,none": 0.03, "rows": 10, "loss": f64::NAN }));
        let before = outputs(json!({ "acc,none": 0.45, "acc_stderr,none": 0.04 }));
        let figure = Figure { stage: "now".to_owned(), name: "acc,none".to_owned() };
        let gate = Gate { figure, side, bound, margin, span: Span::default() };
        let verdict = verdict(&gate, |stage| Some(if stage == "now" { &now } else { &before }));
        (verdict.holds, verdict.because)
    }

    fn before(name: &str) -> Bound {
        Bound::Figure(Figure { stage: "before".to_owned(), name: name.to_owned() })
    }

    #[test]
    fn a_number_is_beyond_its_bound_or_is_not() {
        assert_eq!(judged(Side::Above, Bound::Number(0.4), Margin::None), (true, "0.5 is above 0.4".to_owned()));
        assert_eq!(judged(Side::Above, Bound::Number(0.5), Margin::None), (false, "0.5 is not above 0.5".to_owned()));
        assert!(!judged(Side::Below, Bound::Number(0.5), Margin::None).0);
        assert!(!judged(Side::Below, Bound::Number(f64::NAN), Margin::None).0);
    }

    #[test]
    fn another_figure_is_beaten_by_more_than_the_margin() {
        assert_eq!(
            judged(Side::Above, before("acc,none"), Margin::None),
            (true, "0.5 is above 0.45, `before.acc,none`".to_owned())
        );
        assert!(judged(Side::Above, before("acc,none"), Margin::Number(0.04)).0);
        assert!(!judged(Side::Above, before("acc,none"), Margin::Number(0.06)).0);
        // √(0.03² + 0.04²) = 0.05, which is the difference, and not less than it.
        let (holds, because) = judged(Side::Above, before("acc,none"), Margin::StandardError);
        assert!(!holds);
        assert_eq!(
            because,
            "0.5 is not above 0.5, which is `before.acc,none` 0.45 + the standard error of their difference 0.05"
        );
        assert!(!judged(Side::Below, before("acc,none"), Margin::None).0);
    }

    #[test]
    fn numbers_have_the_digits_that_tell_them_apart() {
        let because = |number| judged(Side::Above, Bound::Number(number), Margin::None).1;
        assert_eq!(because(1.0 / 3.0), "0.5 is above 0.33333");
        assert_eq!(because(0.500_000_1), "0.5 is not above 0.5000001");
        assert_eq!(because(4_068.704_742_806_4), "0.5 is not above 4068.7");
    }

    #[test]
    fn a_figure_that_is_not_there_opens_no_gate() {
        let (holds, because) = judged(Side::Above, before("rouge1"), Margin::None);
        assert!(!holds);
        assert_eq!(because, "`before` has no figure `rouge1`; it has: acc,none, acc_stderr,none");
    }

    #[test]
    fn a_figure_of_several_outputs_is_named_with_its_output() {
        let [one, other] = [0.5, 0.9].map(|acc| outputs(json!({ "acc": acc, "rows": 3, "loss": f64::NAN })));
        let record = |outputs: BTreeMap<String, OutputRecord>| outputs["metrics"].clone();
        let both = BTreeMap::from([("a".to_owned(), record(one)), ("b".to_owned(), record(other))]);
        let value = |name: &str| {
            let figure = Figure { stage: "s".to_owned(), name: name.to_owned() };
            value(&figure, Some(&both))
        };
        assert_eq!((value("a.acc"), value("b.acc"), value("rows")), (Ok(0.5), Ok(0.9), Ok(3.0)));
        assert_eq!(
            value("acc"),
            Err("`s` has several figures `acc`, and the gate has to name one: `s.a.acc` 0.5; `s.b.acc` 0.9".to_owned())
        );
        assert_eq!(value("loss"), Err("`loss` of `s` is not a finite number".to_owned()));
        assert_eq!(value("c.acc"), Err("`s` has no figure `c.acc`; it has: acc, rows".to_owned()));
    }
}
