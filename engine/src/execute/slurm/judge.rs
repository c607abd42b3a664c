//! What the end of a job means that left no word of its own, or was told to stop by somebody else than its engine.

use std::fs;
use std::path::Path;

use super::request::was_nearly_over;
use super::state::Details;
use crate::error::{Cause, Failure};

/// Lines of the job's own output that are shown of a job without reporting an error.
const LINES: usize = 3;

/// Why a job is over, by what Slurm tells of it. `output` is what the job itself printed.
pub(super) fn verdict(id: &str, details: &Details, was_told_to_stop: bool, output: &Path) -> Failure {
    let nodes = &details.nodes;
    let nearly_over = match (details.run_seconds, details.limit_seconds) {
        (Some(run), Some(limit)) => was_told_to_stop && was_nearly_over(run, limit),
        _ => false,
    };
    match details.state.as_str() {
        "CANCELLED" if details.reason.starts_with("Dependency") => of(
            Cause::Machine,
            format!("Slurm gave job {id} up: a job that it depends on did not succeed ({})", details.reason),
            "look at `--dependency` among `executor.slurm.options`",
        ),
        "CANCELLED" => of(
            Cause::Cancelled,
            format!("job {id} was cancelled from outside"),
            "somebody used `scancel`, or the cluster's administrators did; run again to go on from what was saved",
        ),
        "OUT_OF_MEMORY" => of(
            Cause::OutOfMemory,
            format!("Slurm ended job {id}: it took more memory than it was given on {nodes}"),
            "raise `resources.memory`, or give it less to hold at once",
        ),
        "NODE_FAIL" | "BOOT_FAIL" => of(
            Cause::Crashed,
            format!("node {nodes} was lost while job {id} ran on it ({})", details.state),
            "`retries: 2` would try it again on another node, from what was saved",
        ),
        "PREEMPTED" => of(
            Cause::Crashed,
            format!("job {id} was preempted: another job needed its nodes"),
            "`retries: 5` would submit it again, and it continues from what was saved",
        ),
        "TIMEOUT" | "DEADLINE" => timeout(id, details),
        _ if nearly_over => timeout(id, details),
        _ if was_told_to_stop => of(
            Cause::Cancelled,
            format!("job {id} received SIGTERM, and not from this run"),
            "run again to go on from what was saved",
        ),
        state => without_a_word(id, state, details, output),
    }
}

fn timeout(id: &str, details: &Details) -> Failure {
    let limit = details.limit_seconds.map(|limit| format!(" of {}", words(limit))).unwrap_or_default();
    of(
        Cause::Timeout,
        format!("job {id} was at the end of its time limit{limit}"),
        "raise `executor.slurm.time`; or `retries: { max: 5, on: [timeout] }` submits it again, and it continues from what was saved",
    )
}

fn without_a_word(id: &str, state: &str, details: &Details, output: &Path) -> Failure {
    let Details { nodes, exit_code, reason, .. } = details;
    let first =
        format!("job {id} on {nodes} exited without reporting an error: Slurm reports {state}, {exit_code}, {reason}");
    let printed = last_lines(output);
    let help = match (printed.is_empty(), output.exists()) {
        (false, _) => "this is its last output",
        (true, true) => "its node may have killed it; `scontrol show job` and the node's log know more",
        (true, false) => {
            "its output was not even begun: the folder of the home must be seen by the nodes under the same path, for this user"
        }
    };
    let messages = std::iter::once(first).chain(printed).collect();
    Failure::new(Cause::Crashed, messages).with_help(help)
}

/// What a job comes to that Slurm no longer knows, and that left no word.
pub(super) fn forgotten(id: &str) -> Failure {
    of(
        Cause::Crashed,
        format!("Slurm no longer knows job {id}, and it left no record of how it ended"),
        "the cluster forgets jobs after its MinJobAge; the stage's log has what it printed. Run again to go on from what was saved",
    )
}

fn last_lines(path: &Path) -> Vec<String> {
    let text = fs::read(path).map(|text| String::from_utf8_lossy(&text).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].iter().map(|line| (*line).to_owned()).collect()
}

fn of(cause: Cause, message: String, help: &str) -> Failure {
    Failure::new(cause, vec![message]).with_help(help)
}

fn words(seconds: u64) -> String {
    match (seconds / 3600, seconds % 3600 / 60) {
        (0, minutes) => format!("{minutes} min"),
        (hours, minutes) => format!("{hours} h {minutes:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn details(state: &str) -> Details {
        Details {
            state: state.into(),
            reason: "None".into(),
            exit_code: "0:15".into(),
            nodes: "n1".into(),
            restarts: 0,
            run_seconds: Some(50),
            limit_seconds: Some(3600),
        }
    }

    #[test]
    fn each_end_has_its_cause_and_a_way_on() {
        let output = Path::new("/nowhere/output");
        let cases = [
            ("TIMEOUT", Cause::Timeout, "end of its time limit of 1 h 00 min"),
            ("OUT_OF_MEMORY", Cause::OutOfMemory, "more memory than it was given"),
            ("NODE_FAIL", Cause::Crashed, "node n1 was lost"),
            ("PREEMPTED", Cause::Crashed, "another job needed its nodes"),
            ("CANCELLED", Cause::Cancelled, "cancelled from outside"),
            ("FAILED", Cause::Crashed, "Slurm reports FAILED, 0:15, None"),
            ("COMPLETED", Cause::Crashed, "exited without reporting an error"),
        ];
        for (state, cause, says) in cases {
            let verdict = verdict("17", &details(state), false, output);
            assert_eq!(verdict.cause, cause, "{state}");
            assert!(verdict.messages[0].contains(says) && verdict.help.is_some(), "{verdict:?}");
        }
        let dependency = Details { reason: "DependencyNeverSatisfied".into(), ..details("CANCELLED") };
        assert!(verdict("17", &dependency, false, output).messages[0].contains("depends on"));
    }

    #[test]
    fn a_request_to_stop_near_the_end_of_the_time_is_about_time() {
        let output = Path::new("/nowhere/output");
        let late = Details { run_seconds: Some(3500), ..details("FAILED") };
        assert_eq!(verdict("17", &late, true, output).cause, Cause::Timeout);
        assert_eq!(verdict("17", &details("FAILED"), true, output).cause, Cause::Cancelled);
        assert_eq!(verdict("17", &late, false, output).cause, Cause::Crashed);
    }

    #[test]
    fn the_jobs_own_last_words_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("output");
        fs::write(&output, "a\nb\n\nc\nnode n7 has no /opt/pipeline\n").unwrap();
        let verdict = verdict("17", &details("FAILED"), false, &output);
        assert_eq!(verdict.messages[1..], ["b", "c", "node n7 has no /opt/pipeline"]);
    }
}
