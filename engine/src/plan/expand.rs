//! Sweeps: a stage with a `matrix:` becomes one stage for each combination, and so do those that read it.
//!
//! Stages are taken in the order in which they read each other. What a stage reads has its children by then; the stage
//! has one child for each way to take one child of everything it reads such that they agree on the axes they share (a
//! natural join), times its own combinations. A file without sweeps passes through untouched.

use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

use super::child::{self, Edit, Setting};
use super::declared::{Candidate, Declared, File, OwnAxis, Unit, declare, read};
use super::entry::{AxisOf, StageEntry, Text, read_stage};
use super::join::{Family, FamilyAxis, JoinError, Kin, Source, join};
use super::matrix::{self, AxisValue, MOST_CHILDREN};
use super::resolve::Bound;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Entry, Node, Value};
use crate::parameter::{Reader, Reference};

/// How many names of children `needs:` and `collect:` may stand for, over all stages.
const MOST_NAMES: usize = 200_000;

/// The stages with their children in the place of those that are swept, or follow one that is.
///
/// With them, what matrices in which something is wrong may have been meant to be swept over.
pub(super) fn expand(
    stages: Vec<Candidate>,
    file: &File<'_>,
    problems: &mut Vec<Problem>,
) -> (Vec<Candidate>, HashSet<String>) {
    let swept = stages.iter().any(|(stage, _)| stage.matrix.is_some());
    let collects = || stages.iter().any(|(_, bound)| bound.named.iter().any(|named| named.collected.is_some()));
    if !swept && file.of_axes.is_empty() && !collects() {
        return (stages, HashSet::new());
    }
    let declared = declare(stages, file, problems);
    let unread = declared.iter().flat_map(|declared| declared.unread.iter().cloned()).collect();
    let Some(order) = order(&declared) else {
        // The stages wait for each other, which is said of them as the file declares them.
        let first = declared.into_iter().filter_map(|declared| declared.units.into_iter().next());
        return (first.map(Unit::into_candidate).collect(), unread);
    };
    let ids = declared.iter().map(|declared| declared.id.clone()).enumerate().map(|(place, id)| (id, place)).collect();
    let families = (0..declared.len()).map(|_| Family::default()).collect();
    let mut expansion = Expansion { file, families, ids, unread, names: 0, problems };
    let mut declared: Vec<Option<Declared<'_>>> = declared.into_iter().map(Some).collect();
    let mut made: Vec<Vec<Candidate>> = (0..declared.len()).map(|_| Vec::new()).collect();
    for place in order {
        let stage = declared[place].take().expect("each stage has one place in the order");
        made[place] = expansion.stage(place, stage);
    }
    (made.into_iter().flatten().collect(), expansion.unread)
}

/// The places of the stages, each after those that it names; `None` where there is a cycle.
fn order(declared: &[Declared<'_>]) -> Option<Vec<usize>> {
    let ids: HashMap<&str, usize> =
        declared.iter().enumerate().map(|(place, declared)| (declared.id.as_str(), place)).collect();
    let mut readers = vec![Vec::new(); declared.len()];
    let mut waiting = vec![0_usize; declared.len()];
    for (place, stage) in declared.iter().enumerate() {
        let named = stage.units.iter().flat_map(|unit| {
            let needs = unit.entry.needs.iter().map(|need| need.text.as_str());
            unit.bound.named.iter().map(|named| named.reference.stage.as_str()).chain(needs)
        });
        let before: HashSet<usize> =
            named.filter_map(|name| find(name, |id| ids.get(id).copied())).map(|(at, _)| at).collect();
        for stage in before {
            readers[stage].push(place);
            waiting[place] += 1;
        }
    }
    let mut ready: VecDeque<usize> = (0..declared.len()).filter(|place| waiting[*place] == 0).collect();
    let mut order = Vec::with_capacity(declared.len());
    while let Some(place) = ready.pop_front() {
        order.push(place);
        for reader in &readers[place] {
            waiting[*reader] -= 1;
            if waiting[*reader] == 0 {
                ready.push_back(*reader);
            }
        }
    }
    (order.len() == declared.len()).then_some(order)
}

/// The stage that a name means, and the values that it fixes.
fn find(name: &str, place: impl Fn(&str) -> Option<usize>) -> Option<(usize, Vec<(&str, &str)>)> {
    if let Some(place) = place(name) {
        return Some((place, Vec::new()));
    }
    let (declared, values) = child::split(name)?;
    Some((place(declared)?, values))
}

struct Expansion<'a, 'p> {
    file: &'a File<'a>,
    /// What has become of each stage of the file, by its place.
    families: Vec<Family>,
    ids: HashMap<String, usize>,
    /// What matrices in which something is wrong may have been meant to be swept over.
    unread: HashSet<String>,
    /// How many names of children are in `needs:` and lists so far.
    names: usize,
    problems: &'p mut Vec<Problem>,
}

impl Expansion<'_, '_> {
    /// The children of a stage whose inputs have theirs.
    fn stage(&mut self, place: usize, stage: Declared<'_>) -> Vec<Candidate> {
        let Declared { id, span, raw, axes: own, units, unread: _ } = stage;
        let head = Head { place, id: &id, span, raw: raw.as_deref(), own: &own };
        let own_values: Vec<HashSet<String>> =
            (0..own.len()).map(|axis| units.iter().map(|unit| unit.values[axis].identity.clone()).collect()).collect();
        let mut made: Vec<(Vec<Setting>, Candidate)> = Vec::with_capacity(units.len());
        let mut axes: Option<Vec<FamilyAxis>> = None;
        for unit in units {
            let Some(Children { axes: of_unit, children }) = self.unit(&head, unit, &own_values) else {
                return vec![unknown(&head)];
            };
            made.extend(children);
            if made.len() > MOST_CHILDREN {
                self.problems.push(matrix::too_many(span, made.len()));
                return vec![unknown(&head)];
            }
            match &axes {
                Some(others) if !same_axes(others, &of_unit) => {
                    self.problems.push(uneven(&head, others, &of_unit));
                    return vec![unknown(&head)];
                }
                _ => axes = Some(of_unit),
            }
        }
        if made.is_empty() {
            self.problems.push(JoinError::Nothing.problem(&id, span, &[]));
            return vec![unknown(&head)];
        }
        made.sort_by_cached_key(|(settings, _)| settings.iter().map(|setting| setting.value.place).collect::<Vec<_>>());
        let kin = made.iter().map(|(settings, (entry, _))| Kin {
            id: entry.id.text.as_str().into(),
            values: settings.iter().map(|setting| setting.value.clone()).collect(),
        });
        self.families[place] = Family { axes: axes.unwrap_or_default(), children: kin.collect() };
        made.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// The children of a stage with one combination of its own; `None` where there can be none, which has been said.
    fn unit(&mut self, head: &Head<'_>, unit: Unit, own_values: &[HashSet<String>]) -> Option<Children> {
        let (sources, fields) = self.sources(&unit);
        let own = Family {
            axes: head.own.iter().map(|axis| axis.of_family(head.place)).collect(),
            children: vec![Kin { id: "".into(), values: unit.values.clone() }],
        };
        let rows = match join(&self.families, &sources, &own, own_values) {
            Ok(rows) => rows,
            Err(misfit) => {
                self.problems.push(misfit.problem(head.id, head.span, &sources));
                return None;
            }
        };
        let collects = unit.bound.named.iter().any(|named| named.collected.is_some());
        let names_axes = head.raw.is_some_and(|raw| !child::axes_named(raw, self.file.of_axes).is_empty());
        let waits = unit.entry.needs.iter().any(|need| self.source(&need.text, need.span).is_some());
        if rows.axes.is_empty() && sources.is_empty() && !collects && !names_axes && !waits {
            return Some(Children { axes: rows.axes, children: vec![(Vec::new(), unit.into_candidate())] });
        }
        let mut children = Vec::with_capacity(rows.rows.len());
        for row in &rows.rows {
            let setting = |(axis, value): (&FamilyAxis, &Rc<AxisValue>)| Setting {
                axis: axis.name.clone(),
                span: axis.span,
                value: value.clone(),
                own: axis.origins.contains(&head.place),
            };
            let settings: Vec<Setting> = rows.axes.iter().zip(&row.values).map(setting).collect();
            let mut edits: HashMap<String, Edit> = HashMap::new();
            for (field, picked) in fields.iter().zip(&row.picks) {
                edits.insert(field.path.clone(), Edit::Name(field.name_of(picked)));
            }
            self.collect(&unit.bound, &mut edits);
            let needs = self.needs(&unit.entry.needs, &settings);
            if self.names > MOST_NAMES {
                self.problems.push(matrix::too_many(head.span, self.names));
                return None;
            }
            let child = self.child(head, &unit, &settings, &edits, needs);
            children.push((settings, child));
        }
        Some(Children { axes: rows.axes, children })
    }

    /// What a stage reads of families with axes, with the fields that say so.
    fn sources(&self, unit: &Unit) -> (Vec<Source>, Vec<FieldOfSource>) {
        let (mut sources, mut fields) = (Vec::new(), Vec::new());
        for named in unit.bound.named.iter().filter(|named| named.collected.is_none()) {
            let Reference { stage, output, span } = &named.reference;
            let Some(source) = self.source(stage, *span) else { continue };
            sources.push(source);
            fields.push(FieldOfSource { path: named.path.clone(), output: output.clone() });
        }
        (sources, fields)
    }

    /// The children that a name means, if it means children.
    fn source(&self, name: &str, span: Span) -> Option<Source> {
        let (family, fixed) = find(name, |id| self.ids.get(id).copied())?;
        let of = &self.families[family];
        if of.axes.is_empty() {
            return None;
        }
        // An id that is written exactly as one is made needs no reading of its values.
        if let Some(child) = of.children.iter().position(|child| &*child.id == name) {
            return Some(Source { family, fixed: (0..of.axes.len()).collect(), children: vec![child], span });
        }
        let mut axes = Vec::with_capacity(fixed.len());
        let mut children: Vec<usize> = (0..of.children.len()).collect();
        for (axis, text) in fixed {
            let axis = of.axes.iter().position(|known| known.name == axis)?;
            children.retain(|child| matrix::means(text, &of.children[*child].values[axis].json));
            axes.push(axis);
        }
        // A name that no child has is no stage, and the resolver says so.
        (!children.is_empty()).then_some(Source { family, fixed: axes, children, span })
    }

    fn collect(&mut self, bound: &Bound, edits: &mut HashMap<String, Edit>) {
        for named in &bound.named {
            let Some(place) = named.collected else { continue };
            let Reference { stage, output, span } = &named.reference;
            let with_output =
                |id: &str| output.as_ref().map_or_else(|| id.to_owned(), |output| format!("{id}.{output}"));
            let names: Vec<String> = match self.source(stage, *span) {
                Some(source) => {
                    let family = &self.families[source.family].children;
                    source.children.iter().map(|child| with_output(&family[*child].id)).collect()
                }
                // A stage without children is the list of itself.
                None => vec![with_output(stage)],
            };
            self.names += names.len();
            edits.insert(named.path.clone(), Edit::List(names, place));
        }
    }

    /// The stages to wait for: of a swept one the children that have the same values on shared axes.
    fn needs(&mut self, needs: &[Text], settings: &[Setting]) -> Vec<Text> {
        let mut all = Vec::with_capacity(needs.len());
        for need in needs {
            let Some(source) = self.source(&need.text, need.span) else {
                all.push(need.clone());
                continue;
            };
            let family = &self.families[source.family];
            let agrees = |child: &&usize| {
                let values = family.axes.iter().zip(&family.children[**child].values);
                values.enumerate().filter(|(axis, _)| !source.fixed.contains(axis)).all(|(_, (axis, value))| {
                    let mine = settings.iter().find(|setting| setting.axis == axis.name);
                    mine.is_none_or(|mine| mine.value.identity == value.identity)
                })
            };
            let ids = source.children.iter().filter(agrees).map(|child| &family.children[*child].id);
            all.extend(ids.map(|id| Text { text: id.to_string(), span: need.span }));
        }
        self.names += all.len();
        all
    }

    /// One child, read again with its values and with the names of the children that it reads.
    fn child(
        &self,
        head: &Head<'_>,
        unit: &Unit,
        settings: &[Setting],
        edits: &HashMap<String, Edit>,
        needs: Vec<Text>,
    ) -> Candidate {
        // A key beside `collect:` that has no place in the items is seen only before they are written out.
        let beside_collect = unit.bound.problems.iter().filter(|problem| problem.code == "unknown-key");
        let mut found: Vec<Problem> = beside_collect.cloned().collect();
        let mut stage = match head.raw {
            Some(raw) => child::with_values(raw, settings, self.file.of_axes, &mut found),
            None => Entry {
                key: head.id.to_owned(),
                key_span: head.span,
                value: Node { span: head.span, value: Value::Null },
            },
        };
        let unknown = head.raw.map(|raw| child::unknown_axes(raw, settings, self.file.of_axes)).unwrap_or_default();
        if let Value::Map(keys) = &mut stage.value.value
            && let Some(with) = keys.iter_mut().find(|entry| entry.key == "with")
        {
            child::rename(&mut with.value, "", edits);
        }
        let (mut entry, mut bound) = read(stage, self.file, found);
        // What follows from an axis that is not there needs no saying.
        bound.problems.retain(|problem| !unknown.iter().any(|(_, unknown)| unknown.span == problem.span));
        // Nor does an axis of a matrix in which something is wrong.
        let unknown = unknown.into_iter().filter(|(axis, _)| !self.unread.contains(axis));
        bound.problems.extend(unknown.map(|(_, problem)| problem));
        entry.id = Text { text: child::id(head.id, settings), span: head.span };
        entry.declared = unit.entry.declared.clone();
        entry.needs = needs;
        entry.axes = settings.iter().map(|setting| head.axis_of(setting)).collect();
        (entry, bound)
    }
}

/// The children of a stage, all with the same axes.
struct Children {
    axes: Vec<FamilyAxis>,
    /// With the values of those axes.
    children: Vec<(Vec<Setting>, Candidate)>,
}

/// The stage of the file whose children are made.
struct Head<'a> {
    place: usize,
    id: &'a str,
    span: Span,
    raw: Option<&'a Entry>,
    own: &'a [OwnAxis],
}

impl Head<'_> {
    fn axis_of(&self, setting: &Setting) -> AxisOf {
        AxisOf {
            name: setting.axis.clone(),
            value: setting.value.json.clone(),
            span: setting.value.node.span,
            measured: self.own.iter().any(|axis| axis.name == setting.axis && axis.measured),
        }
    }
}

/// In the place of a stage whose children cannot be made: it is known, and nothing else is.
fn unknown(head: &Head<'_>) -> Candidate {
    let nothing = Node { span: head.span, value: Value::Null };
    let stage = Entry { key: head.id.to_owned(), key_span: head.span, value: nothing };
    (read_stage(&stage, &mut Reader::default()), Bound::default())
}

/// A field that reads a stage with children.
struct FieldOfSource {
    path: String,
    output: Option<String>,
}

impl FieldOfSource {
    fn name_of(&self, child: &str) -> String {
        self.output.as_ref().map_or_else(|| child.to_owned(), |output| format!("{child}.{output}"))
    }
}

fn same_axes(a: &[FamilyAxis], b: &[FamilyAxis]) -> bool {
    let names = |axes: &[FamilyAxis]| axes.iter().map(|axis| axis.name.clone()).collect::<Vec<_>>();
    names(a) == names(b)
}

fn uneven(head: &Head<'_>, some: &[FamilyAxis], others: &[FamilyAxis]) -> Problem {
    let names = |axes: &[FamilyAxis]| {
        let names: Vec<String> = axes.iter().map(|axis| format!("`{}`", axis.name)).collect();
        names.join(", ")
    };
    let message = format!(
        "the children of stage `{}` do not have the same axes: some have {}, others {}",
        head.id,
        names(some),
        names(others)
    );
    Problem::error("axis-mismatch", head.span, message, "it reads a stage with children in some of its combinations")
        .with_help(
            "let all the stages that it can read be swept over the same axes, or name one child: `stage[axis=value]`",
        )
}

// Problems of the children of a sweep: what many of them have in common is said once, and what is wrong with some says
// with which.

pub(super) fn problems_of_children(stages: &[StageEntry], bound: &mut [Bound]) -> Vec<Problem> {
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
