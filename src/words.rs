//! Figures in words that a person reads: durations, sizes, rates.

use std::path::{Path, PathBuf};
use std::time::Duration;

use devices::DeviceKind;
use engine::device::DeviceGrant;
use engine::execute::JobEvent;
use engine::file::source::Sources;
use engine::plan::LeftOut;
pub(crate) use engine::plan::for_shell;

use crate::terminal::Look;

/// Text of the user's data, which may hold anything: a terminal obeys control characters.
pub(crate) fn visible(text: &str) -> String {
    engine::visible::visible(text).into_owned()
}

/// `14 ms`, `3.2 s`, `2 min 05 s`, `1 h 12 min`.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        // Tenths are cut, not rounded: 59.97 s must not read as 60.0 s.
        1..60 => format!("{}.{} s", seconds, duration.subsec_millis() / 100),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// Why a stage of the file is not run.
pub(crate) fn left_out(left_out: &LeftOut, sources: &Sources) -> String {
    let LeftOut { stage, follows, span, publish } = left_out;
    let (line, column) = sources.line_column(*span);
    let name = sources.get(span.source).map_or("", |source| source.name.as_str());
    let because = match follows {
        None => "its `when:` is false".to_owned(),
        Some(before) => format!("it needs `{before}`, which is left out"),
    };
    let publish: Vec<String> = publish.iter().map(|path| path.display().to_string()).collect();
    let unpublished =
        if publish.is_empty() { String::new() } else { format!("; not published: {}", publish.join(", ")) };
    format!("left out: `{stage}`: {because} ({name}:{line}:{column}){unpublished}")
}

/// `Slurm job 17 runs on n1`.
pub(crate) fn job(job: Option<&str>, news: &JobEvent) -> String {
    let name = job.map_or_else(|| "a Slurm job".to_owned(), |job| format!("Slurm job {job}"));
    match news {
        JobEvent::Submitted => format!("{name} submitted"),
        JobEvent::Adopted => format!("{name} of an earlier run continues"),
        JobEvent::Waiting { reason, meaning } => in_queue(job, reason, meaning),
        JobEvent::Running { nodes } => format!("{name} runs on {nodes}"),
        JobEvent::Requeued { reason } => {
            format!("{name} was put back into the queue ({reason}) and continues from what was saved")
        }
    }
}

/// `Slurm job 17 waiting: Resources (for nodes that are in use)`.
pub(crate) fn in_queue(job: Option<&str>, reason: &str, meaning: &str) -> String {
    let name = job.map(|job| format!("Slurm job {job} ")).unwrap_or_default();
    let meaning = if meaning.is_empty() { String::new() } else { format!(" ({meaning})") };
    format!("{name}waiting: {reason}{meaning}")
}

/// As [`duration`], of a number of seconds.
pub(crate) fn seconds(seconds: f64) -> String {
    duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// `just now`, `5 min ago`, `3 days ago`: roughly, for lists.
pub(crate) fn ago(time: Duration) -> String {
    let minutes = time.as_secs() / 60;
    match minutes {
        0 => "just now".to_owned(),
        1..60 => format!("{minutes} min ago"),
        60..2880 => format!("{} h ago", minutes / 60),
        _ => format!("{} days ago", minutes / 1440),
    }
}

/// As [`seconds`], as exact as an estimate is: `40 ms`, `3 s`, `4 min`, `1 h 10 min`.
pub(crate) fn about(seconds: f64) -> String {
    let tens = |value: f64| if value >= 20.0 { (value / 10.0).round() * 10.0 } else { value.round() };
    match seconds {
        seconds if seconds < 0.995 => format!("{:.0} ms", tens(seconds * 1000.0)),
        seconds if seconds < 9.5 => format!("{seconds:.1} s"),
        seconds if seconds < 59.5 => format!("{seconds:.0} s"),
        seconds if seconds < 3570.0 => format!("{:.0} min", (seconds / 60.0).max(1.0)),
        seconds => {
            let minutes = (seconds / 600.0).round() as u64 * 10;
            format!("{} h {:02} min", minutes / 60, minutes % 60)
        }
    }
}

/// `512 B`, `3.0 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `1 stage`, `2 stages`.
pub(crate) fn plural(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// Names that may be many: `tokens +3 more` for a person who watches, elsewhere all of them.
pub(crate) fn first_of(names: &[String], look: Look) -> String {
    match names {
        [first, _, ..] if look.live => format!("{first} +{} more", names.len() - 1),
        _ => names.join(", "),
    }
}

/// Where a stage computes, where that is more than one worker on the processor: ` on cuda 0, 1`.
pub(crate) fn on_devices(grant: &DeviceGrant) -> String {
    let numbers: Vec<String> = grant.indices.iter().map(u32::to_string).collect();
    let nodes = if grant.nodes > 1 { format!(" of each of {} nodes", grant.nodes) } else { String::new() };
    match (grant.kind, numbers.as_slice()) {
        (DeviceKind::Cpu, _) if grant.workers() == 1 => String::new(),
        (DeviceKind::Cpu, _) => format!(" on {}{nodes}", plural(grant.count, "worker")),
        (kind, []) => format!(" on {} ({kind}){nodes}", plural(grant.count, "device")),
        (kind, numbers) => format!(" on {kind} {}", numbers.join(", ")),
    }
}

/// What is said where there is nothing to do.
pub(crate) fn all_cached(stages: usize) -> String {
    match stages {
        1 => "nothing to do: its only stage is cached".to_owned(),
        _ => format!("nothing to do: all {stages} stages are cached"),
    }
}

/// A path as a person would type it here: without `.` in the middle, and from the present folder where it is below.
pub(crate) fn path(path: &Path) -> String {
    let plain: PathBuf = path.components().collect();
    let here = std::env::current_dir().ok();
    let below = here.and_then(|here| plain.strip_prefix(here).map(Path::to_owned).ok());
    below.filter(|below| !below.as_os_str().is_empty()).unwrap_or(plain).display().to_string()
}

/// A count of `unit`s: bytes with their own unit, all else plain.
pub(crate) fn amount(count: u64, unit: &str) -> String {
    if unit == "bytes" { bytes(count) } else { count.to_string() }
}

/// A rate in `unit`s per second.
pub(crate) fn rate(per_second: f64, unit: &str) -> String {
    match unit {
        "bytes" => format!("{}/s", bytes(per_second as u64)),
        _ if per_second >= 10.0 => format!("{per_second:.0} {unit}/s"),
        _ => format!("{per_second:.2} {unit}/s"),
    }
}

/// Figures of a step that nobody follows from step to step.
const COUNTED: [&str; 5] = ["kind", "rows", "tokens", "target_tokens", "padded_tokens_per_second"];

/// `step 5, epoch 1, loss 2.31`: named figures in their order, without those that have no value and what is the same
/// in every step.
///
/// What was counted in a step is in `metrics.jsonl`.
pub(crate) fn figures(values: &serde_json::Map<String, serde_json::Value>) -> String {
    let is_plain = |name: &str, value: &serde_json::Value| {
        COUNTED.contains(&name) || value.is_null() || (name == "skipped" && *value == serde_json::Value::Bool(false))
    };
    let said = values.iter().filter(|(name, value)| !is_plain(name, value));
    said.map(|(name, value)| named_figure(name, value)).collect::<Vec<_>>().join(", ")
}

/// A figure with its name and its unit, where the name has one: `peak memory 70.5 MiB`, `4370 tokens/s`.
fn named_figure(name: &str, value: &serde_json::Value) -> String {
    let in_words = |name: &str| name.replace('_', " ");
    let number = value.as_f64();
    if let (Some(name), Some(number)) = (name.strip_suffix("_bytes"), number) {
        return format!("{} {}", in_words(name), bytes(number.max(0.0) as u64));
    }
    if let (Some(name), Some(number)) = (name.strip_suffix("_per_second"), number) {
        return rate(number, &in_words(name));
    }
    if let (Some(name), Some(number)) = (name.strip_suffix("_seconds"), number) {
        return format!("{} {}", in_words(name), seconds(number));
    }
    format!("{} {}", in_words(name), figure(value))
}

/// `validation loss 2.3123 after step 40, the lowest so far`, `after step 40: arc_easy.acc,none 0.425`: the figures of
/// a validation, which are few and worth a line.
pub(crate) fn validation(values: &serde_json::Map<String, serde_json::Value>) -> Option<String> {
    let (kind, step) = (values.get("kind")?, values.get("step")?.as_u64()?);
    let when = if step == 0 { "before the first step".to_owned() } else { format!("after step {step}") };
    if kind == "tasks" {
        let of_tasks = values.iter().filter(|(name, _)| name.contains('.'));
        let words: Vec<String> = of_tasks.map(|(name, value)| format!("{name} {}", figure(value))).collect();
        return Some(format!("{when}: {}", words.join(", ")));
    }
    if kind != "validation" {
        return None;
    }
    let loss = values.get("loss")?.as_f64()?;
    let lowest = if values.get("best")?.as_bool()? { ", the lowest so far" } else { "" };
    Some(format!("validation loss {loss:.4} {when}{lowest}"))
}

/// One value: floats to five significant digits, text without quotes.
pub(crate) fn figure(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Number(number) if number.is_f64() => float(number.as_f64().unwrap_or(f64::NAN)),
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// One value as it is: floats to their last digit, whole ones without `.0`, text without quotes.
pub(crate) fn exact(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Number(number) if number.is_f64() => {
            let text = number.to_string();
            text.strip_suffix(".0").map_or_else(|| text.clone(), str::to_owned)
        }
        other => other.to_string(),
    }
}

/// A number to five significant digits.
pub(crate) fn float(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    if !(1e-4..1e7).contains(&magnitude) {
        return format!("{value:.3e}");
    }
    let decimals = (4 - magnitude.log10().floor() as i32).max(0) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_keep_the_units_that_matter() {
        let cases =
            [(14, "14 ms"), (3_240, "3.2 s"), (59_990, "59.9 s"), (125_000, "2 min 05 s"), (4_330_000, "1 h 12 min")];
        for (milliseconds, text) in cases {
            assert_eq!(duration(Duration::from_millis(milliseconds)), text);
        }
    }

    #[test]
    fn times_past_are_told_roughly() {
        let cases = [(59, "just now"), (60, "1 min ago"), (3 * 3600, "3 h ago"), (50 * 3600, "2 days ago")];
        for (seconds, text) in cases {
            assert_eq!(ago(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn of_many_names_a_person_who_watches_sees_the_first() {
        let live = Look { colour: false, unicode: true, width: 80, live: true };
        let names = ["a", "b", "c"].map(str::to_owned);
        let said = [0, 1, 3].map(|count| first_of(&names[..count], live));
        assert_eq!(said, ["", "a", "a +2 more"]);
        assert_eq!(first_of(&names, Look { live: false, ..live }), "a, b, c");
    }

    #[test]
    fn estimates_are_no_more_exact_than_they_can_be() {
        let cases = [
            (0.0034, "3 ms"),
            (0.0437, "40 ms"),
            (1.52, "1.5 s"),
            (42.3, "42 s"),
            (95.0, "2 min"),
            (200.0, "3 min"),
            (4330.0, "1 h 10 min"),
        ];
        for (value, text) in cases {
            assert_eq!(about(value), text);
        }
    }

    #[test]
    fn sizes_move_to_the_next_unit_before_they_round_to_1024() {
        let cases = [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), ((1 << 20) - 1, "1.0 MiB"), (5 << 30, "5.0 GiB")];
        for (count, text) in cases {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn a_validation_is_a_line_of_its_own() {
        let said = |values: serde_json::Value| validation(values.as_object().expect("an object"));
        let at =
            |step: u64, best: bool| serde_json::json!({"kind": "validation", "step": step, "loss": 2.5, "best": best});
        assert_eq!(said(at(0, false)).as_deref(), Some("validation loss 2.5000 before the first step"));
        assert_eq!(said(at(40, true)).as_deref(), Some("validation loss 2.5000 after step 40, the lowest so far"));
        assert_eq!(said(serde_json::json!({"kind": "train", "step": 1, "loss": 2.5})), None);
        let tasks = serde_json::json!({"kind": "tasks", "step": 40, "epoch": 1, "sums.acc,none": 0.5});
        assert_eq!(said(tasks).as_deref(), Some("after step 40: sums.acc,none 0.5"));
    }

    #[test]
    fn figures_have_their_units() {
        let values = serde_json::json!({
            "kind": "train", "step": 13, "loss": 6.42251, "learning_rate": 3e-4, "loss_scale": null, "skipped": false,
            "tokens_per_second": 4370.2, "peak_memory_bytes": 73_920_000.0,
        });
        let said = figures(values.as_object().expect("an object"));
        assert_eq!(said, "step 13, loss 6.4225, learning rate 0.0003, 4370 tokens/s, peak memory 70.5 MiB");
    }

    #[test]
    fn paths_are_given_from_here() {
        let here = std::env::current_dir().expect("the tests run in a folder");
        assert_eq!(path(&here.join("./out/./model")), "out/model");
        assert_eq!(path(Path::new("/nowhere/./at/all")), "/nowhere/at/all");
        assert_eq!(path(&here), here.display().to_string());
    }

    #[test]
    fn figures_have_five_digits() {
        let cases = [(2.312_345_6, "2.3123"), (3e-4, "0.0003"), (1e-9, "1.000e-9"), (0.5, "0.5"), (12345.678, "12346")];
        for (value, text) in cases {
            assert_eq!(figure(&value.into()), text);
        }
        assert_eq!(figure(&7.into()), "7");
        assert_eq!(figure(&"adamw".into()), "adamw");
    }
}
