//! The totals of a recording: a row for each phase, in the order of their beginning, and one for each kernel, the
//! longest first.

use serde::{Deserialize, Serialize};

use crate::log::{Kind, Node, ThreadLog};
use crate::work::{Limits, Rate};

/// Version of the form of a summary.
pub const SUMMARY_VERSION: u32 = 1;

/// The totals of a recording.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Always [`SUMMARY_VERSION`].
    pub version: u32,
    /// How long it went on.
    pub seconds: f64,
    /// What the machine can do, where it was measured.
    pub limits: Option<Limits>,
    /// The phases.
    pub phases: Vec<PhaseRow>,
    /// The kernels.
    pub kernels: Vec<KernelRow>,
    /// Spans that are counted here and are not in the trace, since it has no more room.
    pub events_left_out: u64,
}

/// The spans of one phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseRow {
    /// Its name.
    pub name: String,
    /// How many phases it lies within.
    pub depth: usize,
    /// How often it ran.
    pub calls: u64,
    /// Together.
    pub seconds: f64,
    /// Of these, what is in no phase and no kernel within it.
    pub own_seconds: f64,
    /// Share of the time of the recording. Phases of other threads than the main one have none.
    pub share: Option<f64>,
}

/// The calls of one kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelRow {
    /// Its name, with the extents of a product: `linear 576→1536`.
    pub name: String,
    /// How often it ran.
    pub calls: u64,
    /// Together, without kernels within it.
    pub seconds: f64,
    /// Share of the time of the recording.
    pub share: f64,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes read and written at least.
    pub bytes: u64,
    /// The arithmetic that bounds it.
    pub rate: Rate,
    /// The least time that its work can take on this machine, over the time that it took. Above 1 where operands come
    /// from a cache and not from memory.
    pub share_of_limit: Option<f64>,
}

impl Summary {
    /// The time of the main thread that is in no kernel.
    pub fn outside_kernels(&self) -> f64 {
        (self.seconds - self.kernels.iter().map(|kernel| kernel.seconds).sum::<f64>()).max(0.0)
    }
}

impl KernelRow {
    /// Operations per second.
    pub fn flops_per_second(&self) -> Option<f64> {
        (self.flops > 0 && self.seconds > 0.0).then(|| self.flops as f64 / self.seconds)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> Option<f64> {
        (self.bytes > 0 && self.seconds > 0.0).then(|| self.bytes as f64 / self.seconds)
    }
}

pub(crate) fn of(logs: &[&ThreadLog], nanoseconds: u64, limits: Option<Limits>) -> Summary {
    let seconds = nanoseconds as f64 / 1e9;
    let calls: u64 = logs.iter().flat_map(|log| &log.nodes).map(|node| node.calls).sum();
    let kept: usize = logs.iter().map(|log| log.events.len()).sum();
    let mut phases = Vec::new();
    let mut kernels: Vec<KernelRow> = Vec::new();
    for (thread, log) in logs.iter().enumerate() {
        add_phases(log, None, 0, (thread == 0).then_some(seconds), &mut phases);
        log.nodes.iter().filter(|node| node.kind == Kind::Kernel).for_each(|node| add_kernel(node, &mut kernels));
    }
    for kernel in &mut kernels {
        kernel.share = kernel.seconds / seconds;
        let least = limits.map(|limits| limits.seconds(kernel.flops, kernel.bytes, kernel.rate));
        kernel.share_of_limit =
            least.map(|least| least / kernel.seconds).filter(|share| share.is_finite() && *share > 0.0);
    }
    kernels.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    Summary { version: SUMMARY_VERSION, seconds, limits, phases, kernels, events_left_out: calls - kept as u64 }
}

fn add_phases(log: &ThreadLog, parent: Option<u32>, depth: usize, whole: Option<f64>, rows: &mut Vec<PhaseRow>) {
    for (index, node) in log.nodes.iter().enumerate() {
        if node.parent != parent || node.kind != Kind::Phase {
            continue;
        }
        // One that is open still has no time yet; those within it have.
        if node.calls > 0 {
            let seconds = node.nanoseconds as f64 / 1e9;
            rows.push(PhaseRow {
                name: node.name.to_owned(),
                depth,
                calls: node.calls,
                seconds,
                own_seconds: node.own_nanoseconds as f64 / 1e9,
                share: whole.map(|whole| seconds / whole),
            });
        }
        add_phases(log, Some(index as u32), depth + usize::from(node.calls > 0), whole, rows);
    }
}

fn add_kernel(node: &Node, rows: &mut Vec<KernelRow>) {
    let name = match node.work.shape {
        [0, 0] => node.name.to_owned(),
        [inner, outer] => format!("{} {inner}→{outer}", node.name),
    };
    let at = rows.iter().position(|row| row.name == name && row.rate == node.work.rate).unwrap_or_else(|| {
        rows.push(KernelRow {
            name,
            calls: 0,
            seconds: 0.0,
            share: 0.0,
            flops: 0,
            bytes: 0,
            rate: node.work.rate,
            share_of_limit: None,
        });
        rows.len() - 1
    });
    let row = &mut rows[at];
    row.calls += node.calls;
    row.seconds += node.own_nanoseconds as f64 / 1e9;
    row.flops += node.work.flops;
    row.bytes += node.work.bytes;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::Work;

    #[test]
    fn totals_add_up_to_the_time_and_nested_time_counts_once() {
        let mut log = ThreadLog::new("main".to_owned());
        let keep = |_| true;
        let product = Work::product(10, 20, 30);
        let step = log.open(Kind::Phase, "step", Work::default(), 0);
        for start in [100, 400] {
            let block = log.open(Kind::Kernel, "block", Work::default(), start);
            let linear = log.open(Kind::Kernel, "linear", product, start + 10);
            log.close(linear, start + 130, keep);
            log.close(block, start + 200, keep);
        }
        log.close(step, 1000, keep);
        let limits = Limits { threads: 1, f32_flops: 10e12, bf16_flops: 20e12, read_bytes: 1e15 };
        let summary = of(&[&log], 2000, Some(limits));
        let step = &summary.phases[0];
        assert_eq!((step.name.as_str(), step.depth, step.calls), ("step", 0, 1));
        assert!((step.seconds - 1e-6).abs() < 1e-12 && (step.own_seconds - 600e-9).abs() < 1e-12);
        assert_eq!(step.share, Some(0.5));
        let [linear, block] = &summary.kernels[..] else { panic!("two kernels: {:?}", summary.kernels) };
        assert_eq!((linear.name.as_str(), linear.calls, linear.flops), ("linear 20→30", 2, 24_000));
        assert!((linear.seconds - 240e-9).abs() < 1e-12 && (block.seconds - 160e-9).abs() < 1e-12);
        // 24 000 operations at 10 TFLOP/s are 2.4 ns of 240.
        assert!(linear.share_of_limit.is_some_and(|share| (share - 0.01).abs() < 1e-6));
        assert_eq!(block.share_of_limit, None);
        assert!((summary.outside_kernels() - 1600e-9).abs() < 1e-12);
        let read: Summary = serde_json::from_value(serde_json::json!(summary)).expect("it is plain data");
        assert_eq!(read, summary);
    }

    #[test]
    fn a_span_that_was_forgotten_ends_with_the_one_around_it() {
        let mut log = ThreadLog::new("main".to_owned());
        let outer = log.open(Kind::Phase, "outer", Work::default(), 0);
        log.open(Kind::Phase, "forgotten", Work::default(), 10);
        log.close(outer, 100, |_| true);
        let names: Vec<_> = of(&[&log], 100, None).phases.iter().map(|row| (row.name.clone(), row.depth)).collect();
        assert_eq!(names, [("outer".to_owned(), 0), ("forgotten".to_owned(), 1)]);
    }
}
