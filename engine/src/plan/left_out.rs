//! Stages that are left out: those whose `when:` is false, and those that need one of them.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use super::entry::StageEntry;
use super::resolve::Bound;
use super::{LeftOut, Publish};
use crate::file::source::Span;

/// Which stages are left out, and why.
pub(super) struct LeftOuts(Vec<Option<Because>>);

/// Why a stage is left out.
struct Because {
    /// The stage before it that is, by place.
    follows: Option<usize>,
    span: Span,
}

impl LeftOuts {
    /// Looks at the stages in an order in which each comes after those that it waits for.
    pub(super) fn find(stages: &[StageEntry], bound: &[Bound], order: &[usize]) -> Self {
        let mut found: Vec<Option<Because>> = stages.iter().map(|_| None).collect();
        for place in order {
            let own = stages[*place].left_out.map(|span| Because { follows: None, span });
            let before = || {
                let wait = bound[*place].waits_for.iter().find(|wait| found[wait.stage].is_some())?;
                Some(Because { follows: Some(wait.stage), span: wait.span })
            };
            found[*place] = own.or_else(before);
        }
        Self(found)
    }

    /// Whether the stage at a place is left out.
    pub(super) fn has(&self, place: usize) -> bool {
        self.0[place].is_some()
    }

    /// Each stage of the file that is left out, once; what was to be published of it goes from `publish` to it.
    pub(super) fn into_list(self, stages: &[StageEntry], publish: &mut Vec<Publish>) -> Vec<LeftOut> {
        let mut list: Vec<LeftOut> = Vec::new();
        let left_out = stages.iter().zip(&self.0).filter(|(_, because)| because.is_some());
        let ids: HashSet<&str> = left_out.map(|(stage, _)| stage.id.text.as_str()).collect();
        let mut unpublished: HashMap<String, Vec<PathBuf>> = HashMap::new();
        for entry in publish.extract_if(.., |entry| ids.contains(entry.stage.as_str())) {
            unpublished.entry(entry.stage).or_default().push(entry.path);
        }
        for (stage, because) in stages.iter().zip(&self.0) {
            let Some(because) = because else { continue };
            let entries = unpublished.remove(&stage.id.text).unwrap_or_default();
            match list.last_mut().filter(|last| last.stage == stage.declared) {
                Some(last) => last.publish.extend(entries),
                None => list.push(LeftOut {
                    stage: stage.declared.clone(),
                    follows: because.follows.map(|place| stages[place].declared.clone()),
                    span: because.span,
                    publish: entries,
                }),
            }
        }
        list
    }
}
