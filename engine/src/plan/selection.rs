//! A part of a plan: which stages a run is to make, and from which it only takes results.

use std::collections::HashSet;

use super::Plan;

/// Which stages of a plan are meant, by ids: of a stage, or of one whose children a sweep makes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// These and what they need.
    pub until: Vec<String>,
    /// These and what depends on them; what they read from others must have been made.
    pub from: Vec<String>,
    /// These alone; what they read must have been made.
    pub only: Vec<String>,
    /// Which of them are made although they have a result.
    pub force: Force,
}

/// Which stages are made although they have a result.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Force {
    /// None.
    #[default]
    Nothing,
    /// All that are selected.
    Everything,
    Stages(Vec<String>),
}

/// What a run is to do about a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wanted {
    /// Take its result, and make it where there is none.
    #[default]
    Result,
    /// Make it, also where there is a result, and compare the two.
    Again,
    /// Take its result; it is not to be made.
    Given,
}

/// A selection that a plan does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectionError {
    /// No stage has this id.
    #[error("the pipeline has no stage `{0}`")]
    Unknown(String),
    /// A stage is to be made again that is not among those that are to be made.
    #[error("`--force {0}` names a stage that `--until`, `--from` or `--only` leaves out")]
    ForcedLeftOut(String),
    /// None of the stages that `from` means comes before one of those that `until` means.
    #[error("`--from` and `--until` leave no stage: no way leads from the one to the other")]
    Nothing,
}

impl Plan {
    /// Keeps the stages that are selected and those that they depend on, and what is published of those that are
    /// selected.
    ///
    /// # Errors
    /// Fails where the plan does not have what is selected.
    pub fn select(mut self, selection: &Selection) -> Result<Self, SelectionError> {
        let mut selected: HashSet<String> = self.stages.iter().map(|stage| stage.id.clone()).collect();
        if !selection.until.is_empty() {
            selected = self.with_what_they_need(self.named(&selection.until)?);
        }
        if !selection.from.is_empty() {
            let after = self.with_what_depends_on(self.named(&selection.from)?);
            selected.retain(|stage| after.contains(stage));
        }
        if !selection.only.is_empty() {
            selected = self.named(&selection.only)?;
        }
        if selected.is_empty() {
            return Err(SelectionError::Nothing);
        }
        let forced = match &selection.force {
            Force::Nothing => HashSet::new(),
            Force::Everything => selected.clone(),
            Force::Stages(names) => self.named(names)?,
        };
        if let Some(left_out) = forced.iter().find(|stage| !selected.contains(*stage)) {
            return Err(SelectionError::ForcedLeftOut(left_out.clone()));
        }
        for stage in &mut self.stages {
            stage.wanted = match (selected.contains(&stage.id), forced.contains(&stage.id)) {
                (true, true) => Wanted::Again,
                (true, false) => Wanted::Result,
                (false, _) => Wanted::Given,
            };
        }
        self.publish.retain(|publish| selected.contains(&publish.stage));
        let kept = self.with_what_they_need(selected);
        self.keep(&kept);
        Ok(self.withholding())
    }

    /// The ids that names mean.
    fn named(&self, names: &[String]) -> Result<HashSet<String>, SelectionError> {
        let mut ids = HashSet::new();
        for name in names {
            let found = self.ids_of(name);
            if found.is_empty() {
                return Err(SelectionError::Unknown(name.clone()));
            }
            ids.extend(found.into_iter().map(str::to_owned));
        }
        Ok(ids)
    }

    fn with_what_they_need(&self, mut ids: HashSet<String>) -> HashSet<String> {
        // Each stage stands after those it depends on, so from the end on every stage is known to be needed or not.
        for stage in self.stages.iter().rev() {
            if ids.contains(&stage.id) {
                ids.extend(stage.inputs.iter().map(|input| input.stage.clone()));
                ids.extend(stage.needs.iter().cloned());
            }
        }
        ids
    }

    fn with_what_depends_on(&self, mut ids: HashSet<String>) -> HashSet<String> {
        for stage in &self.stages {
            let mut before = stage.inputs.iter().map(|input| &input.stage).chain(&stage.needs);
            if before.any(|before| ids.contains(before)) {
                ids.insert(stage.id.clone());
            }
        }
        ids
    }

    fn keep(&mut self, kept: &HashSet<String>) {
        let mut places = Vec::with_capacity(self.stages.len());
        let mut next = 0;
        for stage in &self.stages {
            let keep = kept.contains(&stage.id);
            places.push(keep.then_some(next));
            next += usize::from(keep);
        }
        self.stages.retain(|stage| kept.contains(&stage.id));
        self.graph = self.graph.filter_map(|_, at| places[*at], |_, edge| Some(edge.clone()));
    }
}
