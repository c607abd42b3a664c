//! What Slurm reports of a job: its state, what it waits for, and what either means.

use crate::error::{Cause, Failure};

/// How a job stands, by the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    /// Slurm's name of its state, such as `RUNNING`.
    pub state: String,
    /// Its nodes, as Slurm writes them: `n[1-2]`.
    pub nodes: String,
    /// Why it is in that state, in Slurm's words: `Resources`.
    pub reason: String,
}

/// What a state comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JobPhase {
    /// It waits, and may begin.
    Waits,
    /// It has processes, or is about to get or to lose them.
    Runs,
    /// It is over.
    Ended,
}

impl Seen {
    /// Reads a line `id|state|nodes|reason`.
    pub(super) fn parse(line: &str) -> Option<(String, Self)> {
        let mut fields = line.trim().splitn(4, '|').map(str::to_owned);
        let id = fields.next().filter(|id| !id.is_empty())?;
        // The accounting says `CANCELLED by 1000`.
        let state = fields.next()?.split_whitespace().next()?.trim_end_matches('+').to_owned();
        let nodes = fields.next()?;
        let reason = fields.next().unwrap_or_default();
        Some((id, Self { state, nodes, reason }))
    }

    /// What the state comes to. One that this program does not know is taken for one that goes on.
    pub(super) fn standing(&self) -> JobPhase {
        match self.state.as_str() {
            "PENDING" | "REQUEUED" | "REQUEUE_FED" | "REQUEUE_HOLD" | "SPECIAL_EXIT" | "CONFIGURING" => JobPhase::Waits,
            "COMPLETED" | "FAILED" | "CANCELLED" | "TIMEOUT" | "OUT_OF_MEMORY" | "NODE_FAIL" | "PREEMPTED"
            | "BOOT_FAIL" | "DEADLINE" | "REVOKED" | "LAUNCH_FAILED" => JobPhase::Ended,
            _ => JobPhase::Runs,
        }
    }

    /// Why a job that waits will never begin, where it will not.
    pub(super) fn never_begins(&self, id: &str) -> Option<Failure> {
        let reason = self.reason.replace(' ', "_");
        if reason.contains("launch_failed_requeued_held") || self.state == "SPECIAL_EXIT" {
            let message = format!("Slurm could not start job {id} on its node and held it back ({reason})");
            let help = "`sinfo -R` shows nodes that are drained, and why";
            return Some(Failure::new(Cause::Crashed, vec![message]).with_help(help));
        }
        let (_, says, to_do) = NEVER.iter().find(|(known, ..)| reason.starts_with(known))?;
        let message = format!("no node could ever run job {id}: {says} ({reason})");
        Some(Failure::new(Cause::Machine, vec![message]).with_help(*to_do))
    }

    /// What the reason for waiting means, in a few words, and what may be done about it; empty where the name says it
    /// all.
    pub(super) fn meaning(&self) -> &'static str {
        WAITING.iter().find(|(known, _)| self.reason.starts_with(known)).map_or("", |(_, means)| means)
    }
}

/// Reasons that no patience helps against: what they say, and what to do.
const NEVER: [(&str, &str, &str); 12] = [
    (
        "PartitionNodeLimit",
        "it requests more nodes than the partition has or allows",
        "lower `resources.nodes`, or take another partition",
    ),
    (
        "PartitionConfig",
        "it requests more nodes, or more of a node, than the partition has",
        "request less (`nodes`, `threads`, `memory`, `count`), or take another partition: `sinfo -N -l` shows what nodes have",
    ),
    (
        "PartitionTimeLimit",
        "it requests more time than the partition allows",
        "lower `executor.slurm.time` or `timeout`",
    ),
    (
        "BadConstraints",
        "no node has what it requests",
        "look at `constraint` and `gres`: `scontrol show node` shows both",
    ),
    (
        "InvalidAccount",
        "the account is not valid",
        "set `executor.slurm.account`: `sacctmgr show user $USER withassoc` lists yours",
    ),
    ("InvalidQOS", "the quality of service is not valid", "set `executor.slurm.qos`, or leave it out"),
    (
        "DependencyNeverSatisfied",
        "what it depends on did not succeed",
        "look at `--dependency` among `executor.slurm.options`",
    ),
    (
        "QOSMaxWallDurationPerJobLimit",
        "it requests more time than its quality of service allows",
        "lower `executor.slurm.time` or `timeout`",
    ),
    (
        "AssocMaxWallDurationPerJobLimit",
        "it requests more time than the account allows",
        "lower `executor.slurm.time` or `timeout`",
    ),
    ("QOSMaxCpuPerJobLimit", "it requests more CPUs than its quality of service allows", "lower `resources.threads`"),
    ("QOSMaxNodePerJobLimit", "it requests more nodes than its quality of service allows", "lower `resources.nodes`"),
    ("QOSMaxGRESPerJob", "it requests more devices than its quality of service allows", "lower `resources.count`"),
];

/// What reasons for waiting mean.
const WAITING: [(&str, &str); 14] = [
    ("None", "the scheduler has not looked at it yet"),
    ("Resources", "for nodes that are in use"),
    ("Priority", "behind jobs of higher priority"),
    ("Dependency", "for another job"),
    ("BeginTime", "until it may begin"),
    ("JobHeldUser", "held: `scontrol release` lets it go"),
    ("JobHeldAdmin", "held by the cluster's administrators"),
    ("PartitionDown", "the partition is down"),
    ("PartitionInactive", "the partition is inactive"),
    ("ReqNodeNotAvail", "for nodes that are down, drained or reserved"),
    ("Nodes required for job are DOWN", "for nodes that are down, drained or reserved"),
    ("Licenses", "for licences that are in use"),
    ("QOS", "at a limit of its quality of service"),
    ("Assoc", "at a limit of the account"),
];

/// What the controller tells of one job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Details {
    pub state: String,
    pub reason: String,
    /// `code:signal`.
    pub exit_code: String,
    pub nodes: String,
    pub restarts: u32,
    pub run_seconds: Option<u64>,
    pub limit_seconds: Option<u64>,
}

impl Details {
    /// Reads the one line of `scontrol show job --oneliner`.
    pub(super) fn parse(line: &str) -> Self {
        let field = |name: &str| field(line, name).unwrap_or_default().to_owned();
        Self {
            state: field("JobState"),
            reason: field("Reason"),
            exit_code: field("ExitCode"),
            nodes: field("NodeList"),
            restarts: field("Restarts").parse().unwrap_or_default(),
            run_seconds: seconds(&field("RunTime")),
            limit_seconds: seconds(&field("TimeLimit")),
        }
    }

    /// As the queue says it.
    pub(super) fn seen(&self) -> Seen {
        Seen { state: self.state.clone(), nodes: self.nodes.clone(), reason: self.reason.clone() }
    }
}

/// A field of the one line of `scontrol show … --oneliner`, where it has a value.
pub(crate) fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let mut values = line.split_whitespace().filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    values.find(|value| !value.is_empty())
}

/// Reads `[days-]hours:minutes:seconds`.
fn seconds(text: &str) -> Option<u64> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let parts: Vec<u64> = clock.split(':').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let [hours, minutes, seconds] = parts.as_slice() else { return None };
    Some(days.parse::<u64>().ok()? * 86_400 + hours * 3600 + minutes * 60 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_queue_is_read() {
        let (id, seen) = Seen::parse("6|PENDING||PartitionNodeLimit\n").unwrap();
        assert_eq!((id.as_str(), seen.standing()), ("6", JobPhase::Waits));
        let verdict = seen.never_begins("6").unwrap();
        assert_eq!(verdict.cause, Cause::Machine);
        assert!(verdict.messages[0].contains("more nodes than the partition has"), "{verdict:?}");
        let (_, by) = Seen::parse("33|CANCELLED by 0|n1|None").unwrap();
        assert_eq!((by.state.as_str(), by.standing()), ("CANCELLED", JobPhase::Ended));
        let (_, waits) = Seen::parse("7|PENDING||Resources").unwrap();
        assert_eq!((waits.never_begins("7"), waits.meaning()), (None, "for nodes that are in use"));
        assert_eq!(Seen::parse(""), None);
    }

    #[test]
    fn a_job_that_was_held_after_a_failed_launch_is_a_failure() {
        for reason in ["launch failed requeued held", "launch_failed_requeued_held"] {
            let seen = Seen { state: "PENDING".into(), nodes: String::new(), reason: reason.into() };
            assert_eq!(seen.never_begins("3").unwrap().cause, Cause::Crashed);
        }
    }

    #[test]
    fn details_are_read_from_one_line() {
        let line = "JobId=1 JobName=j.sh Restarts=2 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15 RunTime=00:01:29 \
            TimeLimit=1-00:01:00 NodeList=n1 ReqNodeList=(null)";
        let details = Details::parse(line);
        assert_eq!((details.state.as_str(), details.reason.as_str(), details.restarts), ("TIMEOUT", "TimeLimit", 2));
        assert_eq!((details.run_seconds, details.limit_seconds), (Some(89), Some(86_460)));
        assert_eq!(Details::parse("TimeLimit=UNLIMITED").limit_seconds, None);
    }
}
