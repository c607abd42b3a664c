//! What the process of a stage may use and has used: threads, and memory by the system's count.

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};

/// As many threads as the stage may use.
pub(crate) fn thread_pool(context: &StageContext) -> Result<rayon::ThreadPool, StageError> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(context.threads()).build();
    pool.or_fail(Cause::Machine, || "cannot start threads".to_owned())
}

/// The most memory that this process has had resident at once, files mapped into it (the weights) included: Linux's
/// `VmHWM`. None where the system does not say.
pub fn peak_resident_bytes() -> Option<u64> {
    field(&status()?, "VmHWM:")
}

/// As [`peak_resident_bytes`], without what it shares currently with other processes: files, and memory that they map
/// too.
pub fn peak_private_bytes() -> Option<u64> {
    let status = status()?;
    let shared = field(&status, "RssFile:")? + field(&status, "RssShmem:")?;
    Some(field(&status, "VmHWM:")?.saturating_sub(shared))
}

fn status() -> Option<String> {
    std::fs::read_to_string("/proc/self/status").ok()
}

fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_touched_is_in_the_peak() {
        let Some(before) = peak_resident_bytes() else { return };
        let touched = vec![1u8; 64 << 20];
        std::hint::black_box(&touched);
        assert!(before > 0 && peak_resident_bytes() >= Some(64 << 20));
    }
}
