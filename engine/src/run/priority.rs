//! Which of several stages that could start is started first: the one with the longest chain of work behind it.

use super::stage_run::StageRun;

/// The stages in the order in which they are to be started: the longest remaining chain first, equal ones in the order
/// of the plan. `weight` is what a stage itself takes, and must be positive; so the order is one of the graph, too.
pub(super) fn by_longest_chain(stages: &[StageRun], weight: impl Fn(&StageRun) -> f64) -> Vec<usize> {
    // Each stage stands after those it depends on, so from the end on what follows each is known.
    let mut longest = vec![0.0_f64; stages.len()];
    for (place, stage) in stages.iter().enumerate().rev() {
        longest[place] += weight(stage);
        for before in &stage.upstream {
            longest[*before] = longest[*before].max(longest[place]);
        }
    }
    let mut order: Vec<usize> = (0..stages.len()).collect();
    order.sort_by(|one, other| longest[*other].total_cmp(&longest[*one]).then(one.cmp(other)));
    order
}
