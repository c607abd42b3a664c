//! A part of a plan: some stages, and what they need.

use std::collections::HashSet;

use super::Plan;

impl Plan {
    /// Keeps the stages with these ids and those they depend on, and what is published of them.
    #[must_use]
    pub fn until(mut self, ids: &[String]) -> Self {
        let mut needed: HashSet<String> = ids.iter().cloned().collect();
        // Each stage stands after those it depends on, so from the end on every stage is known to be needed or not.
        for stage in self.stages.iter().rev() {
            if needed.contains(&stage.id) {
                needed.extend(stage.inputs.iter().map(|input| input.stage.clone()));
                needed.extend(stage.needs.iter().cloned());
            }
        }
        let mut places = Vec::with_capacity(self.stages.len());
        let mut kept = 0;
        for stage in &self.stages {
            let keep = needed.contains(&stage.id);
            places.push(keep.then_some(kept));
            kept += usize::from(keep);
        }
        self.stages.retain(|stage| needed.contains(&stage.id));
        self.publish.retain(|publish| needed.contains(&publish.stage));
        self.graph = self.graph.filter_map(|_, at| places[*at], |_, edge| Some(edge.clone()));
        self
    }
}
