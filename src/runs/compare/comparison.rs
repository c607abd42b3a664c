//! Candidates side by side: which parameters differ, which figures say what is better, who is best.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use engine::visible::on_one_line;
use serde::Serialize;
use serde_json::{Map, Number, Value};
use stages::metrics::Better;

use super::candidate::Candidate;
use super::curves::Kind;
use super::scaling;
use crate::plot::{Panel, Series};
use crate::table::{Table, width};
use crate::terminal::Look;
use crate::words;

/// Candidates and what they are compared in.
pub(crate) struct Comparison {
    candidates: Vec<Candidate>,
    /// The parameters that are not the same in all.
    parameters: Vec<String>,
    /// The figures of which more or less is better, in the order in which they are found.
    figures: Vec<String>,
    /// The best value of each figure of which some candidate has a worse one.
    best: BTreeMap<String, f64>,
    /// Figures that a program of the user's found: their unit is not known.
    own: BTreeSet<String>,
}

/// A comparison as a program reads it.
#[derive(Serialize)]
pub(crate) struct ComparisonView<'a> {
    /// The parameters that are not the same in all.
    parameters: &'a [String],
    /// The figures of which more or less is better.
    metrics: &'a [String],
    candidates: Vec<CandidateView<'a>>,
}

#[derive(Serialize)]
struct CandidateView<'a> {
    name: &'a str,
    run: &'a str,
    stage: Option<&'a str>,
    status: &'a str,
    parameters: BTreeMap<&'a String, Option<Cow<'a, Value>>>,
    /// All of its figures, in the order in which they are found.
    metrics: Map<String, Value>,
    /// The figures in which no other is better.
    best: Vec<&'a String>,
}

/// How the parameters of a comparison are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParameterForm {
    /// As JSON has them.
    Values,
    /// As texts, to be shown.
    Texts,
}

/// Which way a figure is better; `None` for counts, which are neither.
///
/// Metrics say it themselves. Of other figures, as a program of the user's or a training makes them, the last part of
/// the name does.
fn better(name: &str) -> Option<Better> {
    let last = name.rsplit('.').next().unwrap_or(name);
    let has = |words: &[&str]| words.iter().any(|word| last.contains(word));
    let by_words = || {
        if has(&["_stderr"]) {
            return None;
        }
        let higher = ["per_second", "accurac", "margin", "rouge", "bleu", "exact_match", "f1"];
        if has(&higher) || has(&[scaling::SPEED_UP, scaling::EFFICIENCY]) {
            return Some(Better::Higher);
        }
        has(&["loss", "perplexity", "nll", "seconds", "memory"]).then_some(Better::Lower)
    };
    stages::metrics::better(last).or_else(by_words)
}

fn order(better: Better, one: f64, other: f64) -> Ordering {
    match better {
        Better::Lower => one.total_cmp(&other),
        Better::Higher => other.total_cmp(&one),
    }
}

/// Whether a parameter is not the same in all. Of a stage without a result no defaults are known: what the file has for
/// it is compared with what the file had for the others.
fn are_different(candidates: &[Candidate], name: &str) -> bool {
    let is_keyed =
        |it: &&Candidate| !it.unkeyed.contains(name) && (it.parameters.contains_key(name) || it.unkeyed.is_empty());
    let keyed: BTreeSet<_> =
        candidates.iter().filter(is_keyed).map(|it| it.parameters.get(name).map(identity)).collect();
    let asked: BTreeSet<_> = candidates.iter().map(|it| it.asked.get(name).map(identity)).collect();
    keyed.len() > 1 || (asked.len() > 1 && candidates.iter().any(|it| it.unkeyed.contains(name)))
}

/// Equal for values that are the same, such as `8` and `8.0`; the string `"8"` is another one.
fn identity(value: &Value) -> String {
    if value.is_number() { words::exact(value) } else { value.to_string() }
}

/// Whether a parameter is of a stage that only one of several whole runs has: nothing in the others differs from it.
/// `runs` has the stages of each, with a dot behind.
fn is_of_one_alone(runs: &[BTreeSet<&str>], parameter: &str) -> bool {
    let has =
        |stages: &&BTreeSet<&str>| parameter.match_indices('.').any(|(dot, _)| stages.contains(&parameter[..=dot]));
    runs.iter().filter(has).count() == 1
}

/// The candidates that have a figure.
fn with_figure<'a>(candidates: &'a [Candidate], name: &str) -> impl Iterator<Item = &'a Candidate> {
    candidates.iter().filter(move |it| it.figure(name).is_some())
}

/// The name of a figure with its evaluation task's before it, where that is the same in all that have the figure.
fn with_task<'a>(candidates: &'a [Candidate], name: &str) -> Option<&'a String> {
    let mut names = with_figure(candidates, name).map(|it| it.with_task.get(name));
    let first = names.next().flatten()?;
    names.all(|other| other == Some(first)).then_some(first)
}

/// The figures of each candidate, named with their task, that a column of the metric's name alone has too.
fn in_short_columns(candidates: &[Candidate]) -> Vec<BTreeSet<&str>> {
    let shorts: BTreeSet<&str> = candidates.iter().flat_map(|it| it.with_task.keys().map(String::as_str)).collect();
    let stay: BTreeSet<&str> = shorts.into_iter().filter(|short| with_task(candidates, short).is_none()).collect();
    let names = candidates.iter().map(|it| {
        let staying = it.with_task.iter().filter(|(short, _)| stay.contains(short.as_str()));
        staying.map(|(_, full)| full.as_str()).collect()
    });
    names.collect()
}

/// Whether another column has all that is in a figure's. A figure of an evaluation of one task is there by the metric's
/// name alone, and behind the task's. The first column is left out where the task is the same in all; the second one
/// else, since tasks are compared in the first.
fn is_in_another(candidates: &[Candidate], in_short_columns: &[BTreeSet<&str>], name: &str) -> bool {
    let mut with_figure = candidates.iter().zip(in_short_columns).filter(|(it, _)| it.figure(name).is_some());
    with_task(candidates, name).is_some() || with_figure.all(|(_, in_short)| in_short.contains(name))
}

/// The best value of a figure; `None` where all are as good.
fn best(candidates: &[Candidate], name: &str) -> Option<f64> {
    let better = better(name)?;
    let values = || candidates.iter().filter_map(|it| it.figure(name));
    let best = values().min_by(|one, other| order(better, *one, *other))?;
    values().any(|other| order(better, best, other) == Ordering::Less).then_some(best)
}

/// A column of the table.
#[derive(Clone, Copy)]
enum Column<'a> {
    Status,
    Parameter(&'a str),
    Figure(&'a str),
}

impl Comparison {
    /// Compares.
    pub(super) fn of(mut candidates: Vec<Candidate>) -> Self {
        let names: BTreeSet<&String> = candidates.iter().flat_map(|candidate| candidate.parameters.keys()).collect();
        let stages = candidates.iter().map(|candidate| candidate.stages.iter().map(String::as_str).collect());
        let stages: Vec<BTreeSet<&str>> = stages.collect();
        let differs = |name: &&&String| are_different(&candidates, name) && !is_of_one_alone(&stages, name);
        let parameters: Vec<String> = names.iter().filter(differs).map(|name| (*name).clone()).collect();
        scaling::add(&mut candidates, &parameters);
        let own: BTreeSet<String> = candidates.iter().flat_map(|candidate| candidate.own.iter().cloned()).collect();
        let mut figures: Vec<String> = Vec::new();
        let mut seen = BTreeSet::new();
        for (name, _) in candidates.iter().flat_map(|candidate| candidate.figures.in_order()) {
            if seen.insert(name) && (better(name).is_some() || own.contains(name)) {
                figures.push(name.clone());
            }
        }
        let in_short_columns = in_short_columns(&candidates);
        figures.retain(|name| !is_in_another(&candidates, &in_short_columns, name));
        let best = figures.iter().filter_map(|name| Some((name.clone(), best(&candidates, name)?))).collect();
        Self { candidates, parameters, figures, best, own }
    }

    /// The names of its columns.
    pub(super) fn names(&self) -> Vec<String> {
        self.parameters.iter().chain(&self.figures).cloned().collect()
    }

    /// Orders by a column, named in full or by its last parts; false where there is no such column.
    pub(super) fn sort(&mut self, column: &str) -> bool {
        let named = |name: &&String| **name == column || name.ends_with(&format!(".{column}"));
        if let Some(figure) = self.figures.iter().find(named) {
            let better = better(figure).unwrap_or(Better::Lower);
            let value = |candidate: &Candidate| candidate.figure(figure);
            self.candidates.sort_by(|one, other| match (value(one), value(other)) {
                (Some(one), Some(other)) => order(better, one, other),
                (one, other) => other.is_some().cmp(&one.is_some()),
            });
            return true;
        }
        let Some(parameter) = self.parameters.iter().find(named) else { return false };
        self.candidates.sort_by(|one, other| {
            let (one, other) = (one.parameter(parameter), other.parameter(parameter));
            match (one.parse::<f64>(), other.parse::<f64>()) {
                (Ok(one), Ok(other)) => one.total_cmp(&other),
                _ => one.cmp(&other),
            }
        });
        true
    }

    /// For a person: as many columns beside each other as the terminal has room for, the others below.
    pub(super) fn text(&self, look: Look) -> String {
        let (columns, titles) = (self.columns(), self.titles());
        let cells: Vec<Vec<String>> = columns.iter().map(|column| self.cells(*column)).collect();
        let widest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or(0);
        let name = widest(&mut self.candidates.iter().map(|candidate| width(&candidate.name)));
        let wide = |at: usize| 2 + width(&titles[at]).max(widest(&mut cells[at].iter().map(|cell| width(cell))));
        let mut text = String::new();
        let mut from = 0;
        while from < columns.len() {
            let mut to = from + 1;
            let mut used = name + wide(from);
            while to < columns.len() && used + wide(to) <= look.width {
                used += wide(to);
                to += 1;
            }
            let first = if self.candidates.iter().all(|candidate| candidate.stage.is_some()) { "" } else { "run" };
            let mut table = Table::new([first].into_iter().chain(titles[from..to].iter().map(String::as_str)));
            for (row, candidate) in self.candidates.iter().enumerate() {
                let values = cells[from..to].iter().map(|column| column[row].as_str());
                table.row([candidate.name.as_str()].into_iter().chain(values));
            }
            let _ = write!(text, "{}{table}", if from == 0 { "" } else { "\n" });
            from = to;
        }
        let have_same_stages = self.candidates.iter().all(|it| it.stages == self.candidates[0].stages);
        match self.parameters.is_empty() {
            true if have_same_stages => text += "\nno parameter differs\n",
            true => text += "\nthe runs are not of the same stages; of those that all have, no parameter differs\n",
            false => {}
        }
        if cells.iter().flatten().any(|cell| cell.ends_with('*')) {
            text += "\n* the best of its column\n";
        }
        text
    }

    /// For a program.
    pub(crate) fn view(&self, form: ParameterForm) -> ComparisonView<'_> {
        ComparisonView {
            parameters: &self.parameters,
            metrics: &self.figures,
            candidates: self.candidates.iter().map(|candidate| self.candidate_view(candidate, form)).collect(),
        }
    }

    fn candidate_view<'a>(&'a self, candidate: &'a Candidate, form: ParameterForm) -> CandidateView<'a> {
        let Candidate { name, run, stage, status, parameters, figures, .. } = candidate;
        let in_form = |value: &'a Value| match form {
            ParameterForm::Values => Cow::Borrowed(value),
            ParameterForm::Texts => Cow::Owned(words::exact(value).into()),
        };
        CandidateView {
            name,
            run,
            stage: stage.as_deref(),
            status,
            parameters: self.parameters.iter().map(|name| (name, parameters.get(name).map(in_form))).collect(),
            metrics: figures.in_order().map(|(name, value)| (name.clone(), value.clone().into())).collect(),
            best: self.figures.iter().filter(|name| self.is_best(candidate, name)).collect(),
        }
    }

    /// For a spreadsheet: full names and full precision; a string as it is, a list as JSON.
    pub(super) fn csv(&self) -> String {
        let quoted = |text: &str| match text.contains([',', '"', '\n', '\r']) {
            true => format!("\"{}\"", text.replace('"', "\"\"")),
            false => text.to_owned(),
        };
        let mut header = ["name", "run", "status"].map(str::to_owned).to_vec();
        let mut taken: BTreeSet<String> = header.iter().cloned().collect();
        for (names, group) in [(&self.parameters, "parameter"), (&self.figures, "metric")] {
            for name in names {
                let title = if taken.contains(name) { format!("{group}.{name}") } else { name.clone() };
                taken.insert(title.clone());
                header.push(title);
            }
        }
        let mut text = header.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(",") + "\n";
        for candidate in &self.candidates {
            let parameters = self.parameters.iter().map(|name| candidate.parameter(name));
            let exact = |number: &Number| words::exact(&number.clone().into());
            let figures = self.figures.iter().map(|name| candidate.number(name).map(exact).unwrap_or_default());
            let first = [candidate.name.clone(), candidate.run.clone(), candidate.status.clone()];
            let cells: Vec<String> =
                first.into_iter().chain(parameters).chain(figures).map(|cell| quoted(&cell)).collect();
            text += &(cells.join(",") + "\n");
        }
        text
    }

    /// For a README: the best in bold.
    pub(crate) fn markdown(&self) -> String {
        let escaped =
            |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('|', "\\|").replace(['\n', '\r'], " ");
        let columns = self.columns();
        let titles: Vec<String> = self.titles().iter().map(|title| escaped(title)).collect();
        let mut text = format!("| | {} |\n|---|{}\n", titles.join(" | "), "---|".repeat(titles.len()));
        for (row, candidate) in self.candidates.iter().enumerate() {
            let cells = columns.iter().map(|column| escaped(&self.cell(row, *column, Mark::Bold)));
            let _ = writeln!(text, "| {} | {} |", escaped(&candidate.name), cells.collect::<Vec<_>>().join(" | "));
        }
        text
    }

    /// The table below a drawing.
    pub(crate) fn html_table(&self) -> String {
        let escaped = crate::plot::escaped;
        let head: String = self.titles().iter().map(|title| format!("<th>{}</th>", escaped(title))).collect();
        let columns = self.columns();
        let mut text = format!("<table>\n<tr><th></th>{head}</tr>\n");
        for (row, candidate) in self.candidates.iter().enumerate() {
            let cell = |column: &Column<'_>| match self.best_at(row, *column) {
                true => format!("<td><b>{}</b></td>", escaped(&self.cell(row, *column, Mark::None))),
                false => format!("<td>{}</td>", escaped(&self.cell(row, *column, Mark::None))),
            };
            let cells: String = columns.iter().map(cell).collect();
            let _ = writeln!(text, "<tr><th>{}</th>{cells}</tr>", escaped(&candidate.name));
        }
        text + "</table>\n"
    }

    /// What there is to draw: the losses of training, those of validation and the speed-up where there are any.
    pub(crate) fn panels(&self) -> Vec<Panel> {
        let panel = |kind: Kind, title: &str| {
            let of_kind = self.candidates.iter().flat_map(|candidate| {
                let curves = candidate.curves.iter().filter(move |curve| curve.kind == kind);
                curves.map(|curve| {
                    let space = if curve.stage.is_empty() { "" } else { " " };
                    let name = format!("{}{space}{}", candidate.name, curve.stage);
                    Series { name, points: curve.points.clone() }
                })
            });
            Panel { title: title.to_owned(), x: "step".to_owned(), series: of_kind.collect() }
        };
        let panels = [panel(Kind::Train, "loss"), panel(Kind::Validation, "validation loss")];
        let losses = panels.into_iter().filter(|panel| !panel.series.is_empty());
        losses.chain(scaling::panel(&self.candidates, &self.parameters)).collect()
    }

    /// The state comes first where it is not the same good one for all.
    fn columns(&self) -> Vec<Column<'_>> {
        let good = |candidate: &Candidate| matches!(candidate.status.as_str(), "done" | "cached" | "succeeded");
        let status = (!self.candidates.iter().all(good)).then_some(Column::Status);
        let parameters = self.parameters.iter().map(|name| Column::Parameter(name));
        let figures = self.figures.iter().map(|name| Column::Figure(name));
        status.into_iter().chain(parameters).chain(figures).collect()
    }

    /// The columns' names, as short as they can be without two being the same.
    fn titles(&self) -> Vec<String> {
        let names: Vec<&str> = self.columns().into_iter().map(Column::name).collect();
        let ends = ends(&names);
        let short = |name: &&str| match self.own.contains(*name) {
            true => shortened(name, &ends),
            false => in_short(&shortened(name, &ends)),
        };
        names.iter().map(short).collect()
    }

    fn cells(&self, column: Column<'_>) -> Vec<String> {
        (0..self.candidates.len()).map(|row| self.cell(row, column, Mark::Star)).collect()
    }

    fn cell(&self, row: usize, column: Column<'_>, mark: Mark) -> String {
        let candidate = &self.candidates[row];
        match column {
            Column::Status => candidate.status.clone(),
            Column::Parameter(name) => on_one_line(&candidate.parameter(name)).into_owned(),
            Column::Figure(name) => {
                let Some(value) = candidate.figure(name) else { return String::new() };
                let text = if self.own.contains(name) { words::float(value) } else { in_words(name, value) };
                mark.on(&text, self.best_at(row, column))
            }
        }
    }

    fn best_at(&self, row: usize, column: Column<'_>) -> bool {
        matches!(column, Column::Figure(name) if self.is_best(&self.candidates[row], name))
    }

    /// Whether no other has a better value, and some have a worse one.
    fn is_best(&self, candidate: &Candidate, name: &str) -> bool {
        let (Some(best), Some(own)) = (self.best.get(name), candidate.figure(name)) else { return false };
        own.total_cmp(best) == Ordering::Equal
    }
}

/// How the best of a column is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Star,
    Bold,
    None,
}

impl Mark {
    fn on(self, text: &str, best: bool) -> String {
        match (self, best) {
            (Self::Star, true) => format!("{text}*"),
            // The figures stay above each other.
            (Self::Star, false) => format!("{text} "),
            (Self::Bold, true) => format!("**{text}**"),
            (Self::Bold, false) | (Self::None, _) => text.to_owned(),
        }
    }
}

impl<'a> Column<'a> {
    fn name(self) -> &'a str {
        match self {
            Column::Status => "status",
            Column::Parameter(name) | Column::Figure(name) => name,
        }
    }
}

impl Candidate {
    pub(super) fn figure(&self, name: &str) -> Option<f64> {
        self.number(name)?.as_f64()
    }

    /// A figure with all of its digits.
    fn number(&self, name: &str) -> Option<&Number> {
        self.figures.get(name)
    }

    /// A parameter as text, which is empty where it has none.
    pub(super) fn parameter(&self, name: &str) -> String {
        self.parameters.get(name).map(words::exact).unwrap_or_default()
    }
}

/// A column's name for a person: figures that are printed with their unit need not name it.
fn in_short(name: &str) -> String {
    let (before, last) = dots(name).last().map_or(("", name), |at| (&name[..at], &name[at + 1..]));
    let last = match last {
        "seconds" => "took",
        "peak_memory_bytes" => "memory",
        "tokens_per_second" => "tokens/s",
        scaling::SPEED_UP => "speed-up",
        other => other,
    };
    if before.is_empty() { last.to_owned() } else { format!("{before}.{last}") }
}

/// A figure with its unit.
fn in_words(name: &str, value: f64) -> String {
    match name.rsplit('.').next() {
        Some("seconds") => words::seconds(value),
        Some("peak_memory_bytes") => words::bytes(value as u64),
        Some("tokens_per_second") => format!("{value:.0}"),
        Some(scaling::SPEED_UP) => format!("{value:.2}x"),
        Some(scaling::EFFICIENCY) => format!("{:.0} %", 100.0 * value),
        _ => words::float(value),
    }
}

/// Where a dotted name has its dots. Those of a child of a sweep, `adapter[lora.rank=4]`, are in a name.
fn dots(name: &str) -> impl Iterator<Item = usize> {
    let mut depth = 0;
    name.char_indices().filter_map(move |(at, letter)| {
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        (letter == '.' && depth <= 0).then_some(at)
    })
}

/// How many of the names end in each text that is one of them, or what is behind a dot of one.
fn ends<'a>(names: &[&'a str]) -> BTreeMap<&'a str, usize> {
    let mut ends = BTreeMap::new();
    for &name in names {
        let behind_dots = name.match_indices('.').map(move |(dot, _)| &name[dot + 1..]);
        for end in std::iter::once(name).chain(behind_dots) {
            *ends.entry(end).or_default() += 1;
        }
    }
    ends
}

/// The fewest last parts of a dotted name that no other name ends in.
fn shortened(name: &str, ends: &BTreeMap<&str, usize>) -> String {
    let starts: Vec<usize> = [0].into_iter().chain(dots(name).map(|at| at + 1)).collect();
    let starts = starts.into_iter().rev();
    for start in starts {
        let end = &name[start..];
        if ends.get(end) == Some(&1) {
            return end.to_owned();
        }
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A result of an evaluation: names and values of figures, and names that are among them with a task before them.
    fn evaluation(figures: &[(&str, f64)], with_task: &[(&str, &str)]) -> Candidate {
        Candidate {
            name: String::new(),
            run: String::new(),
            stage: Some("scores".to_owned()),
            stages: Vec::new(),
            status: "done".to_owned(),
            parameters: BTreeMap::new(),
            asked: BTreeMap::new(),
            unkeyed: BTreeSet::new(),
            own: BTreeSet::new(),
            figures: figures.iter().map(|(name, at)| ((*name).to_owned(), Number::from_f64(*at).unwrap())).collect(),
            with_task: with_task.iter().map(|(name, full)| ((*name).to_owned(), (*full).to_owned())).collect(),
            curves: Vec::new(),
        }
    }

    #[test]
    fn a_figure_that_is_there_by_two_names_is_one_column() {
        let of = |task: &str, at: f64| {
            let full = format!("{task}.acc,none");
            evaluation(&[(full.as_str(), at), ("acc,none", at)], &[("acc,none", full.as_str())])
        };
        let both = evaluation(&[("sums.acc,none", 0.5), ("words.acc,none", 0.25)], &[]);
        let columns = |candidates: Vec<Candidate>| Comparison::of(candidates).figures;
        assert_eq!(columns(vec![of("sums", 0.5), of("sums", 0.25)]), ["sums.acc,none"]);
        assert_eq!(Comparison::of(vec![of("sums", 0.5)]).titles(), ["acc,none"]);
        assert_eq!(columns(vec![of("sums", 0.5), of("words", 0.5)]), ["acc,none"]);
        assert_eq!(columns(vec![of("sums", 0.5), both]), ["sums.acc,none", "words.acc,none"]);
        // Equal by chance.
        let two = || evaluation(&[("a.acc", 0.5), ("acc", 0.5)], &[]);
        assert_eq!(columns(vec![two(), two()]), ["a.acc", "acc"]);
    }

    #[test]
    fn the_best_of_a_column_are_marked_where_others_are_worse() {
        let of = |loss: f64| evaluation(&[("loss", loss), ("same_loss", 1.0)], &[]);
        let all = Comparison::of(vec![of(2.0), of(1.0), evaluation(&[], &[]), of(1.0)]);
        let best = |name: &str| all.candidates.iter().map(|it| all.is_best(it, name)).collect::<Vec<_>>();
        assert_eq!(best("loss"), [false, true, false, true]);
        assert_eq!(best("same_loss"), [false; 4]);
    }

    #[test]
    fn names_are_cut_at_dots_that_no_bracket_holds() {
        let names =
            ["adapter[lora.rank=4].last_loss", "adapter[lora.rank=8].last_loss", "after.rouge1", "after.seconds"];
        let short = |at: usize| in_short(&shortened(names[at], &ends(&names)));
        assert_eq!([0, 2, 3].map(short), [names[0], "rouge1", "took"]);
        assert_eq!(in_short(&shortened(names[0], &ends(&names[..1]))), "last_loss");
    }
}
