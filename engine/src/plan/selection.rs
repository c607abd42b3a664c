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
        let mut selected = vec![true; self.stages.len()];
        if !selection.until.is_empty() {
            selected = self.with_what_they_need(self.named(&selection.until)?);
        }
        if !selection.from.is_empty() {
            let after = self.with_what_depends_on(self.named(&selection.from)?);
            selected.iter_mut().zip(after).for_each(|(selected, after)| *selected &= after);
        }
        if !selection.only.is_empty() {
            selected = self.named(&selection.only)?;
        }
        // Of a plan whose every stage is left out by `when:`, nothing is left to select.
        if !self.stages.is_empty() && !selected.contains(&true) {
            return Err(SelectionError::Nothing);
        }
        let forced = match &selection.force {
            Force::Nothing => vec![false; self.stages.len()],
            Force::Everything => selected.clone(),
            Force::Stages(names) => self.named(names)?,
        };
        let mut marked = self.stages.iter().zip(selected.iter().zip(&forced));
        if let Some((left_out, _)) = marked.find(|(_, (selected, forced))| **forced && !**selected) {
            return Err(SelectionError::ForcedLeftOut(left_out.id.clone()));
        }
        for (stage, (selected, forced)) in self.stages.iter_mut().zip(selected.iter().zip(forced)) {
            stage.wanted = match (selected, forced) {
                (true, true) => Wanted::Again,
                (true, false) => Wanted::Result,
                (false, _) => Wanted::Given,
            };
        }
        let left: HashSet<&str> =
            self.stages.iter().zip(&selected).filter(|(_, it)| **it).map(|(stage, _)| stage.id.as_str()).collect();
        self.publish.retain(|publish| left.contains(publish.stage.as_str()));
        let kept = self.with_what_they_need(selected);
        self.keep(&kept);
        Ok(self.withholding())
    }

    /// Which stages names mean.
    fn named(&self, names: &[String]) -> Result<Vec<bool>, SelectionError> {
        let mut ids = HashSet::new();
        for name in names {
            let found = self.ids_of(name);
            if found.is_empty() {
                return Err(SelectionError::Unknown(name.clone()));
            }
            ids.extend(found);
        }
        Ok(self.stages.iter().map(|stage| ids.contains(stage.id.as_str())).collect())
    }

    fn with_what_they_need(&self, mut needed: Vec<bool>) -> Vec<bool> {
        // Each stage stands after those it depends on, so from the end on every stage is known to be needed or not.
        for (position, stage) in self.stages.iter().enumerate().rev() {
            if needed[position] {
                stage.upstream().for_each(|before| needed[before] = true);
            }
        }
        needed
    }

    fn with_what_depends_on(&self, mut depends: Vec<bool>) -> Vec<bool> {
        for (position, stage) in self.stages.iter().enumerate() {
            depends[position] |= stage.upstream().any(|before| depends[before]);
        }
        depends
    }

    fn keep(&mut self, kept: &[bool]) {
        // How many are kept before each is its new position.
        let new: Vec<usize> =
            kept.iter().scan(0, |next, keep| Some(std::mem::replace(next, *next + usize::from(*keep)))).collect();
        let mut keep = kept.iter();
        self.stages.retain(|_| keep.next() == Some(&true));
        for stage in &mut self.stages {
            stage.inputs.iter_mut().for_each(|input| input.position = new[input.position]);
            stage.needs.iter_mut().for_each(|before| *before = new[*before]);
        }
    }
}
