//! What a region of the `cpu` kernel set costs: the time until its threads have begun and ended, with nothing to do.
//!
//! ```text
//! cargo bench -p model --bench regions
//! ```
//!
//! Prints a line of JSON for each number of threads: microseconds of a region right after another one, whose threads
//! still watch, and of one after a pause, whose threads sleep.

#[path = "../src/cpu/workers.rs"]
#[allow(dead_code, reason = "the module of the library itself, of which this uses a part")]
mod workers;

use std::hint::black_box;
use std::time::{Duration, Instant};

use workers::Workers;

const REGIONS: u32 = 20_000;

/// Longer than a thread watches for the next region.
const PAUSE: Duration = Duration::from_micros(100);

fn main() -> std::io::Result<()> {
    for threads in [2, 4] {
        let workers = Workers::new(threads)?;
        let (watching, asleep) = (microseconds(&workers, Duration::ZERO), microseconds(&workers, PAUSE));
        println!("{{\"threads\": {threads}, \"watching_us\": {watching:.2}, \"asleep_us\": {asleep:.2}}}");
    }
    Ok(())
}

/// The mean over many regions, each after a pause.
fn microseconds(workers: &Workers, pause: Duration) -> f64 {
    let mut busy = Duration::ZERO;
    for _ in 0..REGIONS {
        let start = Instant::now();
        workers.each(workers.threads(), |part| {
            black_box(part);
        });
        busy += start.elapsed();
        let begin = Instant::now();
        while begin.elapsed() < pause {}
    }
    busy.as_secs_f64() * 1e6 / f64::from(REGIONS)
}
