//! What a stage asks of the machine and its kind cannot use.

use super::DeviceCount;
use super::entry::StageEntry;
use super::resolve::Bound;
use crate::device::names;
use crate::file::problem::Problem;
use crate::stage::Workers;

/// What a stage asks for and its kind has no use for, so that nobody counts on it.
pub(super) fn warnings(stage: &StageEntry, bound: &Bound) -> Vec<Problem> {
    let Some(kind) = &bound.kind else { return Vec::new() };
    let (id, name, served) = (&stage.declared, bound.name, kind.devices());
    let device = stage.resource_spans.device.zip(stage.resources.device.kind());
    let device = device.filter(|(_, wanted)| !served.contains(wanted)).map(|(span, wanted)| {
        let message = format!("{} is asked for, and `{name}` computes on {}", wanted.in_words(), names(&served));
        let help = format!("leave it out, or run with `{id}.resources.device={}`", served[0]);
        Problem::warning("no-device", span, message, "not served by this kind of stage").with_help(help)
    });
    let several = !matches!(stage.resources.count, DeviceCount::Exactly(1));
    let count = stage.resource_spans.count.filter(|_| several && kind.workers() == Workers::One).map(|span| {
        let message = format!("`resources.count` has no effect: `{name}` computes on one device");
        Problem::warning("no-effect", span, message, "more than it can use")
    });
    device.into_iter().chain(count).collect()
}
