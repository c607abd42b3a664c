//! How fast prompts were answered, in the lines that torchtune's `generate` prints.

use std::time::Duration;

use model::generation::GenerationStats;

/// Time, bandwidth and memory, one line each. The rates are of this process on this machine and belong into no
/// artefact.
pub(super) fn speed(stats: &GenerationStats, weight_bytes_per_step: u64, peak_memory_bytes: Option<u64>) -> String {
    let GenerationStats { prompt_tokens, prefill, first_tokens, decode_tokens, decode_steps, decode } = *stats;
    let total = prefill + decode;
    let new_tokens = first_tokens + decode_tokens;
    let mut lines = vec![
        format!(
            "Time for inference: {:.2} sec total, {:.2} tokens/sec ({new_tokens} new tokens)",
            total.as_secs_f64(),
            rate(new_tokens, total)
        ),
        format!(
            "  prefill {:.2} sec, {:.2} prompt tokens/sec ({prompt_tokens}); decode {:.2} sec, {:.2} new tokens/sec \
             ({decode_tokens} in {decode_steps} steps)",
            prefill.as_secs_f64(),
            rate(prompt_tokens, prefill),
            decode.as_secs_f64(),
            rate(decode_tokens, decode)
        ),
    ];
    if decode_steps > 0 {
        let bandwidth = rate(weight_bytes_per_step * decode_steps, decode) / 1e9;
        let weights = weight_bytes_per_step as f64 / 1e9;
        lines.push(format!(
            "Bandwidth achieved: {bandwidth:.2} GB/s ({weights:.3} GB of weights read in each decode step)"
        ));
    }
    if let Some(bytes) = peak_memory_bytes {
        lines.push(format!("Memory used: {:.2} GB (peak resident memory of this process)", bytes as f64 / 1e9));
    }
    lines.join("\n")
}

fn rate(count: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_hold_what_was_done() {
        let stats = GenerationStats {
            prompt_tokens: 500,
            prefill: Duration::from_millis(250),
            first_tokens: 4,
            decode_tokens: 96,
            decode_steps: 30,
            decode: Duration::from_millis(750),
        };
        let expected = "Time for inference: 1.00 sec total, 100.00 tokens/sec (100 new tokens)\n  \
             prefill 0.25 sec, 2000.00 prompt tokens/sec (500); decode 0.75 sec, 128.00 new tokens/sec (96 in 30 steps)\n\
             Bandwidth achieved: 40.00 GB/s (1.000 GB of weights read in each decode step)\n\
             Memory used: 2.50 GB (peak resident memory of this process)";
        assert_eq!(speed(&stats, 1_000_000_000, Some(2_500_000_000)), expected);
        assert!(!speed(&GenerationStats::default(), 8, None).contains("Bandwidth"));
    }
}
