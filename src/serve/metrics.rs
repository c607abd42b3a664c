//! What the server counts, in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use stages::compute::inference::Load;

/// Bounds of the buckets of times, in seconds.
const BOUNDS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// What computes.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Computes {
    pub(super) backend: &'static str,
    pub(super) device: &'static str,
    pub(super) batching: &'static str,
}

/// What has been counted since the start.
#[derive(Default)]
pub(super) struct Metrics {
    pub(super) computes: Computes,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) completion_tokens: AtomicU64,
    /// Completions whose client went away.
    pub(super) cancelled: AtomicU64,
    pub(super) first_token: Histogram,
    pub(super) between_tokens: Histogram,
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
    load: Mutex<Load>,
    most_cached_tokens: AtomicU64,
    most_prefix_tokens: AtomicU64,
}

/// Times, counted by how long they were.
#[derive(Default)]
pub(super) struct Histogram {
    /// Those up to each bound and beyond the one before, and those beyond all.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Histogram {
    pub(super) fn observe(&self, time: Duration) {
        let bucket = BOUNDS.iter().position(|bound| time.as_secs_f64() <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(time.as_nanos().min(u128::from(u64::MAX)) as u64, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, text: &mut String) {
        let mut below = 0;
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
        let bounds = BOUNDS.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&self.buckets) {
            below += count.load(Ordering::Relaxed);
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {below}");
        }
        let sum = Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)).as_secs_f64();
        let _ = writeln!(text, "{name}_sum {sum}\n{name}_count {below}");
    }
}

impl Metrics {
    /// Of what computes.
    pub(super) fn new(computes: Computes) -> Self {
        Self { computes, ..Self::default() }
    }

    /// A response was sent to a request of a path.
    pub(super) fn responded(&self, path: &'static str, status: u16) {
        let mut responses = self.responses.lock().unwrap_or_else(PoisonError::into_inner);
        *responses.entry((path, status)).or_default() += 1;
    }

    pub(super) fn set_load(&self, load: Load) {
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = load;
    }

    /// Tokens that may be cached for requests in progress, and for the beginnings of prompts.
    pub(super) fn set_limits(&self, most_cached_tokens: usize, most_prefix_tokens: usize) {
        self.most_cached_tokens.store(most_cached_tokens as u64, Ordering::Relaxed);
        self.most_prefix_tokens.store(most_prefix_tokens as u64, Ordering::Relaxed);
    }

    /// All of it.
    pub(super) fn text(&self) -> String {
        let Load { waiting, in_progress, cached_tokens, prefix_tokens, reused_tokens } =
            *self.load.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Computes { backend, device, batching } = self.computes;
        let mut text = format!(
            "# HELP pipeline_engine_info What computes.\n# TYPE pipeline_engine_info gauge\n\
             pipeline_engine_info{{backend=\"{backend}\",device=\"{device}\",batching=\"{batching}\"}} 1\n"
        );
        for (name, kind, help, value) in [
            ("requests_waiting", "gauge", "Completions that wait for a place.", waiting as u64),
            ("requests_in_progress", "gauge", "Completions in progress.", in_progress as u64),
            ("cached_tokens", "gauge", "Tokens whose keys and values are cached.", cached_tokens as u64),
            ("cached_tokens_limit", "gauge", "Most tokens that are cached.", count(&self.most_cached_tokens)),
            ("prefix_tokens", "gauge", "Tokens of prompts that are kept for others.", prefix_tokens as u64),
            ("prefix_tokens_limit", "gauge", "Most tokens that are kept.", count(&self.most_prefix_tokens)),
            ("reused_tokens_total", "counter", "Tokens of prompts that were kept and not computed.", reused_tokens),
            ("prompt_tokens_total", "counter", "Tokens of prompts that were taken.", count(&self.prompt_tokens)),
            ("completion_tokens_total", "counter", "Tokens of completions.", count(&self.completion_tokens)),
            ("cancelled_total", "counter", "Completions whose client went away.", count(&self.cancelled)),
        ] {
            let _ =
                writeln!(text, "# HELP pipeline_{name} {help}\n# TYPE pipeline_{name} {kind}\npipeline_{name} {value}");
        }
        let _ = writeln!(text, "# HELP pipeline_responses_total Responses.\n# TYPE pipeline_responses_total counter");
        for ((path, status), count) in self.responses.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(text, "pipeline_responses_total{{path=\"{path}\",status=\"{status}\"}} {count}");
        }
        let first = "pipeline_time_to_first_token_seconds";
        self.first_token.write(first, "From a request's arrival to its first token.", &mut text);
        let between = "pipeline_time_between_tokens_seconds";
        self.between_tokens.write(between, "From one token of a completion to the next.", &mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_count_all_times_up_to_their_bound() {
        let computes = Computes { backend: "torch", device: "npu", batching: "static" };
        let metrics = Metrics::new(computes);
        for milliseconds in [1, 30, 40, 90_000] {
            metrics.first_token.observe(Duration::from_millis(milliseconds));
        }
        metrics.responded("/v1/models", 200);
        metrics.responded("/v1/models", 200);
        let load = Load { waiting: 3, in_progress: 2, cached_tokens: 77, prefix_tokens: 64, reused_tokens: 128 };
        metrics.set_load(load);
        metrics.set_limits(100, 256);
        let text = metrics.text();
        for line in [
            "pipeline_engine_info{backend=\"torch\",device=\"npu\",batching=\"static\"} 1",
            "pipeline_requests_waiting 3",
            "pipeline_cached_tokens 77",
            "pipeline_cached_tokens_limit 100",
            "pipeline_prefix_tokens 64",
            "pipeline_prefix_tokens_limit 256",
            "pipeline_reused_tokens_total 128",
            "pipeline_responses_total{path=\"/v1/models\",status=\"200\"} 2",
            "pipeline_time_to_first_token_seconds_bucket{le=\"0.001\"} 1",
            "pipeline_time_to_first_token_seconds_bucket{le=\"0.05\"} 3",
            "pipeline_time_to_first_token_seconds_bucket{le=\"30\"} 3",
            "pipeline_time_to_first_token_seconds_bucket{le=\"+Inf\"} 4",
            "pipeline_time_to_first_token_seconds_count 4",
            "pipeline_time_to_first_token_seconds_sum 90.071",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
