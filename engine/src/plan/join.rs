//! Which children of several stages go together: those that agree on the axes that they share.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::matrix::{AxisValue, MOST_CHILDREN, too_many};
use crate::file::problem::Problem;
use crate::file::source::Span;

/// A stage of the file with all its children; without axes, a stage that is not swept.
#[derive(Default)]
pub(super) struct Family {
    pub axes: Vec<FamilyAxis>,
    pub children: Vec<Kin>,
}

#[derive(Clone)]
pub(super) struct FamilyAxis {
    pub name: String,
    /// Where a file declares it.
    pub span: Span,
    /// The stages that declare it, by place: this one, or those that it follows.
    pub origins: Vec<usize>,
}

/// A child.
pub(super) struct Kin {
    pub id: Rc<str>,
    /// In the order of the family's axes.
    pub values: Vec<Rc<AxisValue>>,
}

/// What a field reads of a family.
pub(super) struct Source {
    pub family: usize,
    /// The axes whose value the field names itself; they are followed no further.
    pub fixed: Vec<usize>,
    /// The children that it can be.
    pub children: Vec<usize>,
    /// Where the field stands.
    pub span: Span,
}

/// The children that a stage has.
pub(super) struct Rows {
    pub axes: Vec<FamilyAxis>,
    pub rows: Vec<Row>,
}

/// One child that a stage has.
#[derive(Clone, Default)]
pub(super) struct Row {
    /// In the order of the axes.
    pub values: Vec<Rc<AxisValue>>,
    /// The child of each source that it reads.
    pub picks: Vec<Rc<str>>,
}

/// Why stages cannot be joined.
pub(super) enum JoinError {
    /// Two stages have an axis of one name and different values, of which each gives its own.
    Values(Box<TwoAxes>),
    /// No child goes with any other.
    Nothing,
    /// More than any machine runs.
    TooMany(usize),
}

/// Two axes of one name that are not one.
pub(super) struct TwoAxes {
    axis: FamilyAxis,
    other: FamilyAxis,
    values: [Vec<String>; 2],
    /// What is read of them when they meet; `None` for the stage's own axis.
    source: Option<usize>,
}

impl JoinError {
    pub(super) fn problem(self, stage: &str, span: Span, sources: &[Source]) -> Problem {
        match self {
            Self::TooMany(count) => too_many(span, count),
            Self::Nothing => {
                let message = format!("nothing is left of stage `{stage}`: no two children that it reads go together");
                Problem::error("bad-matrix", span, message, "no combination of what it reads")
            }
            Self::Values(two) => {
                let TwoAxes { axis, other, values: [some, others], source } = *two;
                let span = source.map_or(span, |source| sources[source].span);
                let name = &axis.name;
                let message = format!(
                    "stage `{stage}` meets the axis `{name}` twice, with different values: {} and {}",
                    some.join(", "),
                    others.join(", ")
                );
                Problem::error("axis-mismatch", span, message, "an axis of one name is one axis")
                    .with_related(other.span, "one of the two")
                    .with_related(axis.span, "the other")
                    .with_help(format!(
                        "give both the same values, or one of them another name: `matrix: {{ x: [...] }}` and \
                         `{name}: \"${{matrix.x}}\"` under `with:`"
                    ))
            }
        }
    }
}

/// The children of a stage that reads `sources` and has its own values, those of `own`. `own_values` are all that its
/// own axes have, over all of its combinations.
pub(super) fn join(
    families: &[Family],
    sources: &[Source],
    own: &Family,
    own_values: &[HashSet<String>],
) -> Result<Rows, JoinError> {
    let mut rows = Rows { axes: Vec::new(), rows: vec![Row::default()] };
    for (place, source) in sources.iter().enumerate() {
        let family = &families[source.family];
        let free: Vec<usize> = (0..family.axes.len()).filter(|axis| !source.fixed.contains(axis)).collect();
        let children = source.children.iter().map(|child| &family.children[*child]).collect();
        rows = rows.with(&Side { family, free, children, values: None }, Some(place))?;
    }
    let side = Side {
        family: own,
        free: (0..own.axes.len()).collect(),
        children: own.children.iter().collect(),
        values: Some(own_values),
    };
    rows.with(&side, None)
}

/// One side of a join.
struct Side<'a> {
    family: &'a Family,
    /// Its axes that take part.
    free: Vec<usize>,
    children: Vec<&'a Kin>,
    /// The values of each axis, where the children here are not all.
    values: Option<&'a [HashSet<String>]>,
}

impl Rows {
    fn with(self, side: &Side<'_>, source: Option<usize>) -> Result<Self, JoinError> {
        let at = |name: &str| self.axes.iter().position(|axis| axis.name == name);
        let shared: Vec<(usize, usize)> =
            side.free.iter().filter_map(|axis| Some((at(&side.family.axes[*axis].name)?, *axis))).collect();
        let new: Vec<usize> =
            side.free.iter().copied().filter(|axis| !shared.iter().any(|(_, other)| other == axis)).collect();
        for (mine, theirs) in &shared {
            self.require_same_values(*mine, *theirs, side, source)?;
        }
        let mut by_shared: HashMap<Vec<&str>, Vec<&Kin>> = HashMap::new();
        for child in &side.children {
            let key = shared.iter().map(|(_, theirs)| child.values[*theirs].identity.as_str()).collect();
            by_shared.entry(key).or_default().push(child);
        }
        let mut rows = Vec::new();
        for row in &self.rows {
            let key: Vec<&str> = shared.iter().map(|(mine, _)| row.values[*mine].identity.as_str()).collect();
            for child in by_shared.get(&key).into_iter().flatten() {
                let mut longer = row.clone();
                longer.values.extend(new.iter().map(|axis| child.values[*axis].clone()));
                if source.is_some() {
                    longer.picks.push(child.id.clone());
                }
                rows.push(longer);
            }
            if rows.len() > MOST_CHILDREN {
                return Err(JoinError::TooMany(rows.len()));
            }
        }
        // A stage's own combination may go with nothing that another one goes with; of what it reads, all have to.
        if rows.is_empty() && source.is_some() {
            return Err(JoinError::Nothing);
        }
        let mut axes = self.axes;
        for (mine, theirs) in shared {
            let origins = side.family.axes[theirs].origins.iter().copied();
            let unknown: Vec<usize> = origins.filter(|origin| !axes[mine].origins.contains(origin)).collect();
            axes[mine].origins.extend(unknown);
        }
        axes.extend(new.into_iter().map(|axis| side.family.axes[axis].clone()));
        Ok(Self { axes, rows })
    }

    /// Two axes of one name that come from different stages are taken for one, and must be one.
    fn require_same_values(
        &self,
        mine: usize,
        theirs: usize,
        side: &Side<'_>,
        source: Option<usize>,
    ) -> Result<(), JoinError> {
        let (axis, other) = (&side.family.axes[theirs], &self.axes[mine]);
        if axis.origins.iter().any(|origin| other.origins.contains(origin)) {
            return Ok(());
        }
        let here: HashSet<&str> = self.rows.iter().map(|row| row.values[mine].identity.as_str()).collect();
        let there: HashSet<&str> = match side.values {
            Some(values) => values[theirs].iter().map(String::as_str).collect(),
            None => side.children.iter().map(|child| child.values[theirs].identity.as_str()).collect(),
        };
        if here == there {
            return Ok(());
        }
        let sorted = |values: HashSet<&str>| {
            let mut values: Vec<String> = values.into_iter().map(str::to_owned).collect();
            values.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
            values.truncate(12);
            values
        };
        let values = [sorted(here), sorted(there)];
        Err(JoinError::Values(Box::new(TwoAxes { axis: axis.clone(), other: other.clone(), values, source })))
    }
}
