//! Gates: what figures must be like before anything is published.

use std::collections::{HashMap, HashSet};
use std::fmt;

use super::entry::{Document, GateEntry, StageEntry, Text};
use super::publish::Targets;
use super::resolve::Bound as BoundStage;
use crate::figure::{self, Foreseen, Unit};
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{Json, KeyWriter, Parameter, Parameters, Reader};

/// What a figure must be like before anything is published.
#[derive(Debug, Clone, PartialEq)]
pub struct Gate {
    pub figure: Figure,
    /// On which side of the bound it has to be.
    pub side: Side,
    pub bound: Bound,
    /// How far beyond the bound.
    pub margin: Margin,
    /// Where the entry stands.
    pub span: Span,
}

/// A figure that a stage's result has: `evaluated.perplexity`, or `evaluated.metrics.perplexity` with its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figure {
    /// The stage's id.
    pub stage: String,
    /// The name of a fact of one of its outputs, or `output.fact`.
    pub name: String,
}

/// On which side of a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Above,
    Below,
}

/// What a figure is compared with.
#[derive(Debug, Clone, PartialEq)]
pub enum Bound {
    Number(f64),
    /// That of another stage.
    Figure(Figure),
}

/// How far beyond its bound a figure has to be.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Margin {
    /// Beyond it.
    #[default]
    None,
    /// By more than this.
    Number(f64),
    /// By more than the standard error of the difference, from those of both figures.
    StandardError,
}

impl Figure {
    /// Reads `stage.figure`. The dots inside the brackets of `adapter[lora.rank=4]` are part of the id, and those
    /// behind the first one after it part of the figure's name.
    fn parse(text: &str) -> Option<Self> {
        let after_brackets = text.rfind(']').map_or(0, |at| at + 1);
        let (_, name) = text[after_brackets..].split_once('.')?;
        let stage = &text[..text.len() - name.len() - 1];
        let fine = !stage.is_empty() && !name.is_empty();
        fine.then(|| Self { stage: stage.to_owned(), name: name.to_owned() })
    }

    /// The name of the fact, where the figure is named as one of this output.
    pub fn of_output(&self, output: &str) -> Option<&str> {
        self.name.strip_prefix(output)?.strip_prefix('.')
    }

    /// The figure with its standard error.
    pub fn standard_error(&self) -> Self {
        Self { stage: self.stage.clone(), name: figure::name_of_standard_error(&self.name) }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.stage, self.name)
    }
}

impl Gate {
    /// The stages whose results decide it.
    pub fn stages(&self) -> impl Iterator<Item = &str> {
        let other = match &self.bound {
            Bound::Number(_) => None,
            Bound::Figure(figure) => Some(figure.stage.as_str()),
        };
        std::iter::once(self.figure.stage.as_str()).chain(other)
    }

    /// The figures that it is judged by.
    fn figures(&self) -> Vec<Figure> {
        let mut figures = vec![self.figure.clone()];
        if let Bound::Figure(other) = &self.bound {
            figures.push(other.clone());
        }
        if self.margin == Margin::StandardError {
            figures.extend(figures.clone().iter().map(Figure::standard_error));
        }
        figures
    }

    /// What is wrong with it, from what is known of figures before there is one.
    fn problem(&self, foreseen: impl Fn(&Figure) -> Foreseen) -> Option<Problem> {
        for figure in self.figures() {
            if let Foreseen::Absent { others } = foreseen(&figure) {
                let message = format!("`{}` will not have the metric `{}`", figure.stage, figure.name);
                let label = "this gate could never hold";
                let help = format!("it will have: {}", others.join(", "));
                return Some(Problem::error("unknown-metric", self.span, message, label).with_help(help));
            }
        }
        let Foreseen::In(unit) = foreseen(&self.figure) else { return None };
        match &self.bound {
            Bound::Number(number) => self.beside_range(*number, unit),
            Bound::Figure(other) => match foreseen(other) {
                Foreseen::In(of_other) if of_other != unit => {
                    let message = format!("`{}` and `{other}` are not in the same unit", self.figure);
                    let label = format!("{unit}; `{}`: {of_other}", other.name);
                    Some(Problem::error("wrong-unit", self.span, message, label))
                }
                _ => None,
            },
        }
    }

    /// What is wrong with a bound for a figure in such a unit.
    fn beside_range(&self, number: f64, unit: Unit) -> Option<Problem> {
        let (least, most) = unit.limits()?;
        let never = match self.side {
            Side::Above => number >= most,
            Side::Below => number <= least,
        };
        if never {
            let message = format!("`{self}` can never hold");
            return Some(Problem::error(
                "out-of-range",
                self.span,
                message,
                format!("`{}` is {unit}", self.figure.name),
            ));
        }
        let taken_for_share = unit == Unit::Points && number > 0.0 && number <= 1.0;
        taken_for_share.then(|| {
            let message = format!("`{}` is in points of a hundred, and the bound is {number}", self.figure);
            let help = format!("write {} if you mean {} %", number * 100.0, number * 100.0);
            Problem::warning("wrong-unit", self.span, message, format!("{unit}")).with_help(help)
        })
    }
}

/// `evaluated.perplexity below before.perplexity by more than the standard error`.
impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Above => "above",
            Side::Below => "below",
        };
        write!(f, "{} {side} ", self.figure)?;
        match &self.bound {
            Bound::Number(number) => write!(f, "{number}")?,
            Bound::Figure(figure) => write!(f, "{figure}")?,
        }
        match self.margin {
            Margin::None => Ok(()),
            Margin::Number(number) => write!(f, " by more than {number}"),
            Margin::StandardError => write!(f, " by more than the standard error"),
        }
    }
}

/// An entry of `gates:`.
#[derive(Parameters, Debug, Clone)]
pub(crate) struct GateKeys {
    /// The figure has to be larger than this number, or than another stage's figure (`before.rouge1`).
    #[cosmetic]
    above: Option<BoundKey>,
    /// The figure has to be smaller than this number, or than another stage's figure.
    #[cosmetic]
    below: Option<BoundKey>,
    /// By how much it has to differ from another stage's figure: a number, or `standard_error`.
    #[cosmetic]
    margin: Option<MarginKey>,
}

/// A bound as the file gives it.
#[derive(Debug, Clone)]
enum BoundKey {
    Number(f64),
    Figure(Text),
}

/// A margin as the file gives it.
#[derive(Debug, Clone)]
struct MarginKey {
    margin: Margin,
    span: Span,
}

impl Parameter for BoundKey {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match node.value {
            Value::String(_) => Text::read(node, reader).map(Self::Figure),
            _ => f64::read(node, reader).map(Self::Number),
        }
    }

    /// What is asked of a result does not decide what it is.
    fn write_key(&self, _key: &mut KeyWriter<'_>) {}

    fn schema() -> Json {
        serde_json::json!({ "type": ["number", "string"] })
    }
}

impl Parameter for MarginKey {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let margin = match &node.value {
            Value::String(text) if text == STANDARD_ERROR => Margin::StandardError,
            Value::String(text) => {
                reader.bad_value(node, format!("`{text}` is none"), &format!("a number, or `{STANDARD_ERROR}`"));
                return None;
            }
            _ => Margin::Number(f64::read(node, reader)?),
        };
        Some(Self { margin, span: node.span })
    }

    /// As above.
    fn write_key(&self, _key: &mut KeyWriter<'_>) {}

    fn schema() -> Json {
        serde_json::json!({ "anyOf": [{ "type": "number", "minimum": 0 }, { "const": STANDARD_ERROR }] })
    }
}

const STANDARD_ERROR: &str = "standard_error";

/// Resolves the entries of `gates:`. One of a stage that is swept is asked of each of its children.
pub(super) fn resolve(document: &Document, targets: &Targets<'_>, problems: &mut Vec<Problem>) -> Vec<Gate> {
    let mut gates = Vec::new();
    for GateEntry { figure, keys } in &document.gates {
        let of = |text: &Text, problems: &mut Vec<Problem>| figures(text, targets, problems);
        let figures = of(figure, problems);
        let bounds = [(Side::Above, &keys.above), (Side::Below, &keys.below)];
        let bounds: Vec<_> = bounds.into_iter().filter_map(|(side, bound)| Some((side, bound.as_ref()?))).collect();
        if bounds.is_empty() {
            let message = format!("the gate `{}` has no bound", figure.text);
            problems.push(Problem::error("missing-key", figure.span, message, "expected `above:` or `below:`"));
        }
        if let Some(MarginKey { margin, span }) = keys.margin {
            if matches!(margin, Margin::Number(number) if number.is_nan() || number < 0.0) {
                problems.push(Problem::error("bad-value", span, "a margin is not negative", "at least 0"));
            }
            if bounds.iter().all(|(_, bound)| matches!(bound, BoundKey::Number(_))) {
                let message = "a margin is added to another stage's figure, and this gate names none";
                problems.push(Problem::error("bad-value", span, message, "put it into the number itself"));
            }
        }
        for (side, bound) in bounds {
            let bound = match bound {
                BoundKey::Number(number) => Bound::Number(*number),
                BoundKey::Figure(text) => match of(text, problems).as_slice() {
                    [] => continue,
                    [figure] => Bound::Figure(figure.clone()),
                    [first, second, ..] => {
                        let message =
                            format!("`{}` is several stages: `{}`, `{}` …", text.text, first.stage, second.stage);
                        problems.push(Problem::error("bad-value", text.span, message, "name one child of the sweep"));
                        continue;
                    }
                },
            };
            let margin = match bound {
                Bound::Number(_) => Margin::None,
                Bound::Figure(_) => keys.margin.as_ref().map_or(Margin::None, |key| key.margin),
            };
            gates.extend(figures.iter().map(|own| Gate {
                figure: own.clone(),
                side,
                bound: bound.clone(),
                margin,
                span: figure.span,
            }));
        }
    }
    gates
}

/// The figures that `stage.figure` means: of the stage, or of each child of a sweep.
fn figures(text: &Text, targets: &Targets<'_>, problems: &mut Vec<Problem>) -> Vec<Figure> {
    let Some(Figure { stage, name }) = Figure::parse(&text.text) else {
        let message = format!("`{}` is no figure of a stage", text.text);
        problems.push(Problem::error(
            "bad-value",
            text.span,
            message,
            "expected `stage.figure` or `stage.output.figure`",
        ));
        return Vec::new();
    };
    let found = targets.named(&stage, ("gates", text.span), problems);
    found.into_iter().map(|id| Figure { stage: id.to_owned(), name: name.clone() }).collect()
}

/// Finds gates that no result can open: hours of training would end with nothing published.
pub(super) fn check(gates: &[Gate], entries: &[StageEntry], bound: &[BoundStage], problems: &mut Vec<Problem>) {
    if gates.is_empty() {
        return;
    }
    let stages: HashMap<&str, &BoundStage> = entries.iter().map(|entry| entry.id.text.as_str()).zip(bound).collect();
    let foreseen = |figure: &Figure| {
        let stage = stages.get(figure.stage.as_str()).and_then(|bound| bound.kind.as_ref());
        let Some(stage) = stage else { return Foreseen::Nothing };
        let outputs = stage.outputs();
        let of_output = outputs.iter().find_map(|output| figure.of_output(&output.name));
        match stage.figure(&figure.name) {
            Foreseen::Absent { others } => of_output.map_or(Foreseen::Absent { others }, |name| stage.figure(name)),
            foreseen => foreseen,
        }
    };
    // The children of a sweep have the same mistake.
    let mut seen = HashSet::new();
    for gate in gates {
        problems.extend(gate.problem(foreseen).filter(|_| seen.insert(gate.span)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::problem::Severity;

    #[test]
    fn a_figure_may_have_dots_and_commas_and_so_may_the_name_of_a_child() {
        let parsed = |text: &str| Figure::parse(text).map(|figure| (figure.stage, figure.name));
        let is = |stage: &str, name: &str| Some((stage.to_owned(), name.to_owned()));
        assert_eq!(parsed("evaluated.perplexity"), is("evaluated", "perplexity"));
        assert_eq!(parsed("e[lora.rank=4].arc.acc,none"), is("e[lora.rank=4]", "arc.acc,none"));
        assert_eq!(parsed("evaluated"), None);
        assert_eq!(parsed("evaluated."), None);
        assert_eq!(parsed(".perplexity"), None);
    }

    #[test]
    fn a_gate_that_no_result_can_open_is_found_before_anything_runs() {
        let others = || vec!["bleu".to_owned(), "rouge1".to_owned()];
        let foreseen = |figure: &Figure| match (figure.stage.as_str(), figure.name.as_str()) {
            ("other", _) => Foreseen::Nothing,
            (_, "bleu") => Foreseen::In(Unit::Points),
            (_, "rouge1" | "rouge2") => Foreseen::In(Unit::Share),
            (_, "perplexity") => Foreseen::In(Unit::Number),
            _ => Foreseen::Absent { others: others() },
        };
        let figure = |text: &str| Figure::parse(text).expect("a figure");
        let code = |text: &str, side, bound, margin| {
            let gate = Gate { figure: figure(text), side, bound, margin, span: Span::default() };
            gate.problem(foreseen).map(|problem| (problem.code, problem.severity))
        };
        let error = |code| Some((code, Severity::Error));
        let number = |text: &str, side, number| code(text, side, Bound::Number(number), Margin::None);
        assert_eq!(number("s.rouge1", Side::Above, 0.3), None);
        assert_eq!(number("s.rouge1", Side::Above, 30.0), error("out-of-range"));
        assert_eq!(number("s.rouge1", Side::Below, 0.0), error("out-of-range"));
        assert_eq!(number("s.bleu", Side::Above, 30.0), None);
        assert_eq!(number("s.bleu", Side::Above, 0.3), Some(("wrong-unit", Severity::Warning)));
        assert_eq!(number("s.perplexity", Side::Below, 1e9), None);
        assert_eq!(number("s.exact_match", Side::Above, 0.1), error("unknown-metric"));
        assert_eq!(number("other.exact_match", Side::Above, 0.1), None);

        let beside = |text: &str, other: &str, margin| code(text, Side::Above, Bound::Figure(figure(other)), margin);
        assert_eq!(beside("s.rouge1", "s.rouge2", Margin::None), None);
        assert_eq!(beside("s.rouge1", "other.points", Margin::None), None);
        assert_eq!(beside("s.bleu", "s.rouge1", Margin::None), error("wrong-unit"));
        assert_eq!(beside("s.rouge1", "s.exact_match", Margin::None), error("unknown-metric"));
        assert_eq!(beside("s.rouge1", "t.rouge1", Margin::StandardError), error("unknown-metric"));
        assert_eq!(beside("other.a", "other.b", Margin::StandardError), None);
    }

    #[test]
    fn standard_errors_are_named_as_the_harness_names_them() {
        let name = |text: &str| Figure::parse(text).expect("a figure").standard_error().to_string();
        assert_eq!(name("e.exact_match"), "e.exact_match_stderr");
        assert_eq!(name("e.arc.acc,none"), "e.arc.acc_stderr,none");
    }
}
