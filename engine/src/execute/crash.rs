//! What the end of a process says that exited without reporting an error.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::executor::{Ending, ProcessExit};
use crate::error::{Cause, Failure, of_words};
use crate::memory::{Kills, Memory};

/// As much of a log's end is looked at for last words.
const LAST_WORDS: u64 = 16 << 10;

/// A process that held this share of the memory there is, and was killed, is taken to have been killed for that.
const NEARLY_ALL: f64 = 0.9;

/// What is known of a process beside how it ended.
pub(crate) struct Evidence<'a> {
    /// Where the machine's memory is read.
    pub memory: &'a Memory,
    /// What had been killed because memory ran out before it began.
    pub kills: Kills,
    /// Its standard error.
    pub log: &'a Path,
    /// Where its own part of that begins.
    pub log_from: u64,
}

/// A process that died without reporting an error: of which cause, as far as that can be known.
pub(crate) fn crash(exit: &ProcessExit, evidence: &Evidence<'_>) -> Failure {
    let message = match &exit.ending {
        Ending::Signal(signal) if signal == "SIGKILL" => return killed(exit, evidence),
        Ending::Signal(signal) => format!("the stage's process died of {signal}"),
        Ending::Code(code) => format!("the stage's process exited with {code} and gave no result"),
    };
    match last_words(evidence.log, evidence.log_from) {
        Some((line, cause)) => Failure::new(cause, vec![message, line]),
        None => Failure::new(Cause::Crashed, vec![message]),
    }
}

fn killed(exit: &ProcessExit, evidence: &Evidence<'_>) -> Failure {
    let peak = exit.peak_memory_bytes;
    let total = evidence.memory.total();
    let held = format!(
        "it held {:.2} GiB{}",
        gib(peak),
        total.map(|total| format!(" of {:.2} GiB", gib(total))).unwrap_or_default()
    );
    let nearly_all = total.is_some_and(|total| peak as f64 >= total as f64 * NEARLY_ALL);
    if nearly_all || evidence.kills.rose_until(evidence.memory.kills()) {
        let message = format!("the stage's process was killed since memory ran out: {held}");
        return Failure::new(Cause::OutOfMemory, vec![message]);
    }
    let help = format!("it was killed from outside: there is no sign that memory ran out, {held}");
    Failure::new(Cause::Crashed, vec!["the stage's process was killed (SIGKILL)".to_owned()]).with_help(help)
}

/// The last line of a log that gives a cause away, and the cause.
fn last_words(log: &Path, from: u64) -> Option<(String, Cause)> {
    let mut file = File::open(log).ok()?;
    let from = from.max(file.metadata().ok()?.len().saturating_sub(LAST_WORDS));
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut text = Vec::new();
    file.take(LAST_WORDS).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    text.lines().rev().find_map(|line| Some((line.trim().to_owned(), of_words(line)?)))
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    fn exit(signal: &str, peak_memory_bytes: u64) -> ProcessExit {
        let ending = Ending::Signal(signal.to_owned());
        ProcessExit { ending, ran: Duration::ZERO, peak_memory_bytes, cpu: Duration::ZERO, verdict: None, host: None }
    }

    #[test]
    fn a_kill_is_a_lack_of_memory_where_the_kernel_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let proc = folder.path();
        let tell = |kills: u64| {
            fs::write(proc.join("vmstat"), format!("oom_kill {kills}\n")).unwrap();
            fs::write(proc.join("meminfo"), "MemTotal: 1048576 kB\n").unwrap();
        };
        tell(1);
        let memory = Memory::at(proc, proc);
        let evidence = Evidence { memory: &memory, kills: memory.kills(), log: &proc.join("log"), log_from: 0 };
        let by_hand = crash(&exit("SIGKILL", 1 << 20), &evidence);
        assert_eq!(by_hand.cause, Cause::Crashed);
        assert!(by_hand.help.unwrap().ends_with("it held 0.00 GiB of 1.00 GiB"));
        assert_eq!(crash(&exit("SIGKILL", 1 << 30), &evidence).cause, Cause::OutOfMemory);
        tell(2);
        let by_kernel = crash(&exit("SIGKILL", 1 << 29), &evidence);
        assert_eq!(by_kernel.cause, Cause::OutOfMemory);
        assert_eq!(
            by_kernel.messages,
            ["the stage's process was killed since memory ran out: it held 0.50 GiB of 1.00 GiB"]
        );
    }

    #[test]
    fn last_words_are_those_of_this_process() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let earlier = "memory allocation of 7 bytes failed\n";
        fs::write(&log, format!("{earlier}torch.OutOfMemoryError: CUDA out of memory.\nbye\n")).unwrap();
        let memory = Memory::at(folder.path(), folder.path());
        let from = |log_from| Evidence { memory: &memory, kills: Kills::default(), log: &log, log_from };
        let failure = crash(&exit("SIGABRT", 0), &from(earlier.len() as u64));
        assert_eq!(failure.cause, Cause::DeviceOutOfMemory);
        assert_eq!(failure.messages[1], "torch.OutOfMemoryError: CUDA out of memory.");
        assert_eq!(crash(&exit("SIGABRT", 0), &from(fs::metadata(&log).unwrap().len())).cause, Cause::Crashed);
    }
}
