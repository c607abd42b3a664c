//! Where the time of stages went, as tables: after a run that recorded it, and later from the run's folder.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use engine::history::{PROFILE_FILE, TRACE_FILE, own_traces, stage_folder};
use engine::plan::Plan;
use engine::run::{Profiling, RunOutcome, StageOutcome, State};
use profile::{KernelRow, Limits, PhaseRow, Summary};
use serde::Serialize;

use crate::table::Table;
use crate::terminal::{self, Look};
use crate::words;

/// Kernels that take less than this share of a stage are left out of its table, which says how many there are.
const LEAST_SHARE: f64 = 0.001;

/// What a run recorded of where its time went.
#[derive(Serialize)]
pub(crate) struct Profiles {
    trace: Option<PathBuf>,
    /// What programs of these stages recorded themselves.
    own_traces: Vec<PathBuf>,
    /// In the order of the plan.
    stages: Vec<StageProfile>,
    /// Stages of which it was asked and which had their results already.
    cached: Vec<String>,
}

/// Where the time of a stage went.
#[derive(Serialize)]
pub(crate) struct StageProfile {
    pub stage: String,
    pub profile: Summary,
}

impl Profiles {
    /// Those of a run that ended.
    pub(crate) fn of(outcome: &RunOutcome, plan: &Plan, asked: Profiling) -> Self {
        let stages = plan.stages.iter().zip(&outcome.stages);
        let asked = stages.filter(|(planned, _)| asked == Profiling::All || planned.profile);
        let asked: Vec<&StageOutcome> = asked.map(|(_, stage)| stage).collect();
        let read = |stage: &str| read(&outcome.folder.join(stage_folder(stage)).join(PROFILE_FILE));
        let trace = outcome.folder.join(TRACE_FILE);
        let cached = asked.iter().filter(|stage| stage.state == State::Cached);
        let stages: Vec<StageProfile> = asked
            .iter()
            .filter_map(|stage| Some(StageProfile { stage: stage.stage.clone(), profile: read(&stage.stage)? }))
            .collect();
        Self {
            trace: Some(trace).filter(|trace| !stages.is_empty() && trace.is_file()),
            cached: cached.map(|stage| stage.stage.clone()).collect(),
            own_traces: stages
                .iter()
                .flat_map(|profiled| own_traces(&outcome.folder.join(stage_folder(&profiled.stage))))
                .collect(),
            stages,
        }
    }

    /// Prints the tables.
    ///
    /// # Errors
    /// Fails where the output does.
    pub(crate) fn print(&self) -> io::Result<()> {
        let mut out = crate::screen::stdout();
        self.stages.iter().try_for_each(|stage| stage.print(&mut out))
    }

    /// Says where the trace is, and what has none.
    pub(crate) fn tell(&self) {
        for trace in self.trace.iter().chain(&self.own_traces) {
            terminal::tell_line(format_args!("trace: {} (https://ui.perfetto.dev opens it)", words::path(trace)));
        }
        if let Some(message) = self.nothing_to_profile() {
            terminal::tell_line(message);
        }
    }

    fn nothing_to_profile(&self) -> Option<String> {
        let names: Vec<String> = self.cached.iter().map(|stage| format!("`{stage}`")).collect();
        let how = match self.cached.as_slice() {
            [] => return None,
            [stage] => format!("`--force {stage}` runs it again"),
            [stage, ..] => format!("`--only {stage} --force {stage}` runs that one again, `--force` all of them"),
        };
        let (what, has) = if names.len() == 1 { ("a result", "has") } else { ("results", "have") };
        Some(format!("not profiled: {} {has} {what} already; {how}", names.join(", ")))
    }
}

fn read(path: &Path) -> Option<Summary> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

impl StageProfile {
    /// Prints the tables.
    ///
    /// # Errors
    /// Fails where the output does.
    pub(crate) fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self { stage, profile } = self;
        let took = words::seconds(profile.seconds);
        writeln!(out, "\n{}", Look::stdout().paint("1", &format!("[{stage}] where {took} went")))?;
        let phases = phases(&profile.phases);
        if !phases.is_empty() {
            write!(out, "{phases}")?;
        }
        if profile.kernels.is_empty() {
            return Ok(());
        }
        write!(out, "\n{}", kernels(profile))?;
        profile.limits.iter().try_for_each(|limits| writeln!(out, "{}", limits_line(limits)))
    }
}

fn phases(rows: &[PhaseRow]) -> Table {
    let mut table = Table::new(["phase", "calls", "seconds", "share"]);
    for PhaseRow { name, depth, calls, seconds, share, .. } in rows {
        let name = format!("{}{name}", "  ".repeat(*depth));
        table.row([name, calls.to_string(), format!("{seconds:.3}"), share.map(percent).unwrap_or_default()]);
    }
    table
}

fn kernels(summary: &Summary) -> Table {
    let mut table = Table::new(["kernel", "calls", "seconds", "share", "GFLOP/s", "GB/s", "of limit"]);
    let (shown, left_out): (Vec<_>, Vec<_>) = summary.kernels.iter().partition(|kernel| kernel.share >= LEAST_SHARE);
    let giga = |rate: Option<f64>| rate.map(|rate| format!("{:.1}", rate / 1e9)).unwrap_or_default();
    for kernel in shown {
        let KernelRow { name, calls, seconds, share, share_of_limit, .. } = kernel;
        table.row([
            name.clone(),
            calls.to_string(),
            format!("{seconds:.3}"),
            percent(*share),
            giga(kernel.flops_per_second()),
            giga(kernel.bytes_per_second()),
            share_of_limit.map(percent).unwrap_or_default(),
        ]);
    }
    let mut rest = |name: String, calls: String, seconds: f64| {
        table.row([name, calls, format!("{seconds:.3}"), percent(seconds / summary.seconds)]);
    };
    if !left_out.is_empty() {
        let calls: u64 = left_out.iter().map(|kernel| kernel.calls).sum();
        let seconds = left_out.iter().map(|kernel| kernel.seconds).sum();
        rest(format!("{} more", left_out.len()), calls.to_string(), seconds);
    }
    rest("(outside kernels)".to_owned(), String::new(), summary.outside_kernels());
    table
}

fn limits_line(limits: &Limits) -> String {
    let Limits { threads, f32_flops, bf16_flops, read_bytes } = limits;
    format!(
        "limits of {}, measured at the same time: {:.0} GFLOP/s in f32, {:.0} in bf16; {:.1} GB/s read from memory",
        words::plural(*threads, "thread"),
        f32_flops / 1e9,
        bf16_flops / 1e9,
        read_bytes / 1e9,
    )
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use profile::{Profile, Work};

    use super::*;

    #[test]
    fn a_table_has_a_row_per_phase_and_kernel_and_what_is_outside() {
        let profile = Profile::recording();
        {
            let _step = profile.phase("step");
            let _inner = profile.phase("forward");
            drop(profile.kernel("linear", || Work::product(4, 5, 6)));
        }
        profile.set_limits(|| Limits { threads: 2, f32_flops: 5e11, bf16_flops: 1e12, read_bytes: 4e10 });
        let profile = profile.finish().expect("it records").summary();
        let mut text = Vec::new();
        StageProfile { stage: "adapter".to_owned(), profile }.print(&mut text).expect("memory takes all");
        let text = String::from_utf8(text).expect("a table is text");
        for line in ["step  ", "  forward", "(outside kernels)", "500 GFLOP/s in f32, 1000 in bf16; 40.0 GB/s"] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }

    #[test]
    fn what_is_cached_is_named_with_a_way_to_profile_it() {
        let cached = |names: &[&str]| Profiles {
            stages: Vec::new(),
            trace: None,
            own_traces: Vec::new(),
            cached: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        assert_eq!(cached(&[]).nothing_to_profile(), None);
        let one = cached(&["a"]).nothing_to_profile();
        assert_eq!(one.as_deref(), Some("not profiled: `a` has a result already; `--force a` runs it again"));
        let two = cached(&["a", "b"]).nothing_to_profile().unwrap_or_default();
        assert!(two.ends_with("`--only a --force a` runs that one again, `--force` all of them"), "{two}");
    }
}
