//! The table of the kernels of a profile.

use profile::{Profile, Summary};

/// What `--profile` asks for.
pub(crate) fn profile(word: &str) -> Result<Profile, String> {
    match word {
        "yes" => Ok(Profile::recording()),
        "no" => Ok(Profile::OFF),
        _ => Err("`yes` or `no`".to_owned()),
    }
}

/// The kernels, the longest first.
pub(crate) fn print(summary: &Summary) {
    let giga = |rate: Option<f64>| rate.unwrap_or_default() / 1e9;
    for kernel in &summary.kernels {
        eprintln!(
            "{:34} {:7} calls {:8.3} s {:5.1} % {:7.1} GFLOP/s {:6.1} GB/s {:5.1} % of the limit",
            kernel.name,
            kernel.calls,
            kernel.seconds,
            100.0 * kernel.share,
            giga(kernel.flops_per_second()),
            giga(kernel.bytes_per_second()),
            100.0 * kernel.share_of_limit.unwrap_or_default(),
        );
    }
    eprintln!("outside kernels {:.3} s of {:.3}; {:?}", summary.outside_kernels(), summary.seconds, summary.limits);
}
