//! Slurm's own commands: what is asked of the controller, and what its refusals mean.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::state::{Details, Seen};
use crate::execute::death_pipe;

/// Calls Slurm's commands.
#[derive(Debug, Default)]
pub(super) struct Client;

/// Why a command did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The controller cannot be reached, or takes nothing more currently: it may later.
    NotNow(String),
    /// It never will.
    Never(String),
    /// There are no such commands here.
    NoSlurm(String),
}

impl Refusal {
    pub(super) fn words(self) -> String {
        match self {
            Self::NotNow(words) | Self::Never(words) | Self::NoSlurm(words) => words,
        }
    }
}

/// Words in a refusal that say that it may pass. All of them are the texts of `slurm_strerror` or of its callers.
const PASSING: [&str; 17] = [
    "Unable to contact slurm controller",
    "Connection refused",
    "Connection reset",
    "Connection timed out",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Resource temporarily unavailable",
    "Slurm temporarily unable to accept job",
    "Transport endpoint is not connected",
    "Unable to resolve",
    "Slurm backup controller in standby mode",
    "Slurmctld is in standby mode",
    "Incomplete",
    "Communication connection failure",
    "Job is in transitional state",
    "Unable to connect to database",
    "Munge encode failed",
];

/// Words that say that a user has as many jobs as may be submitted. The message for people is the same as of a job that
/// is too large.
const FULL: [&str; 2] = ["MaxSubmitJob", "MaxJobCount"];

impl Client {
    /// Submits a batch script; the job's number.
    pub(super) fn submit(&self, arguments: &[String], script: &Path) -> Result<String, Refusal> {
        let said = output(command("sbatch").arg("--parsable").args(arguments).arg(script))?;
        // `17;cluster` where there are several.
        let id = said.trim().lines().last().and_then(|line| line.split(';').next()).unwrap_or_default();
        if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Refusal::Never(format!("`sbatch` printed `{}` instead of a job id", said.trim())));
        }
        Ok(id.to_owned())
    }

    /// How these jobs stand; one that is not among the answers is not known to the controller (any more).
    pub(super) fn states(&self, ids: &[String]) -> Result<Vec<(String, Seen)>, Refusal> {
        let mut asked = command("squeue");
        asked.args(["--noheader", "--states=all", &format!("--jobs={}", ids.join(",")), "--format=%i|%T|%N|%r"]);
        match output(&mut asked) {
            Ok(said) => Ok(said.lines().filter_map(Seen::parse).collect()),
            // Said of one job alone; of several, those that are not there are left out.
            Err(Refusal::Never(words)) if words.contains("Invalid job id") => Ok(Vec::new()),
            Err(refusal) => Err(refusal),
        }
    }

    /// The numbers of this user's jobs of a name, the newest last.
    pub(super) fn named(&self, name: &str) -> Result<Vec<String>, Refusal> {
        let mut asked = command("squeue");
        asked.args(["--noheader", "--states=all", "--me", &format!("--name={name}"), "--format=%i"]);
        let mut ids: Vec<u64> = output(&mut asked)?.lines().filter_map(|line| line.trim().parse().ok()).collect();
        ids.sort_unstable();
        Ok(ids.iter().map(u64::to_string).collect())
    }

    /// All that the controller tells of a job; `None` where it does not know it.
    pub(super) fn details(&self, id: &str) -> Result<Option<Details>, Refusal> {
        match output(command("scontrol").args(["show", "job", "--oneliner", id])) {
            Ok(said) => Ok(Some(Details::parse(&said))),
            Err(Refusal::Never(words)) if words.contains("Invalid job id") => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// The last state of a job in the accounting, where there is one.
    pub(super) fn accounted(&self, id: &str) -> Option<Seen> {
        let mut asked = command("sacct");
        asked.args([
            "--noheader",
            "--parsable2",
            "--allocations",
            "--jobs",
            id,
            "--format=JobID,State,NodeList,Reason",
        ]);
        output(&mut asked).ok()?.lines().find_map(Seen::parse).map(|(_, seen)| seen)
    }

    /// Asks what runs in a job to end: the keeper, which asks the stage.
    pub(super) fn ask(&self, id: &str) -> Result<(), Refusal> {
        output(command("scancel").args(["--batch", "--signal=TERM", id])).map(drop)
    }

    /// Ends a job, and everything in it at once.
    pub(super) fn kill(&self, id: &str) -> Result<(), Refusal> {
        // The plain request lets processes linger for the cluster's KillWait.
        let at_once = output(command("scancel").args(["--full", "--signal=KILL", id]));
        output(command("scancel").arg(id)).map(drop).or_else(|refusal| at_once.map(drop).map_err(|_| refusal))
    }

    /// Ends a job that has not begun.
    pub(super) fn cancel(&self, id: &str) -> Result<(), Refusal> {
        output(command("scancel").arg(id)).map(drop)
    }

    /// The partitions that there are.
    pub(super) fn partitions(&self) -> Vec<String> {
        let said = output(command("sinfo").args(["--noheader", "--format=%R"])).unwrap_or_default();
        said.lines().map(|line| line.trim().to_owned()).filter(|name| !name.is_empty()).collect()
    }
}

/// One of Slurm's commands, with nothing in its environment that an engine inside a job would pass on by chance: what
/// that job asked for is not what this one asks for.
fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let of_a_job = |name: &str| name.starts_with("SLURM_") && !["SLURM_CONF", "SLURM_CLUSTERS"].contains(&name);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(of_a_job) {
            command.env_remove(name);
        }
    }
    command.env_remove(death_pipe::VARIABLE).env("LC_ALL", "C").stdin(Stdio::null());
    // A terminal's Ctrl-C is meant for the engine: a command that it cuts short may have submitted a job that nobody
    // knows of.
    command.process_group(0);
    command
}

fn output(command: &mut Command) -> Result<String, Refusal> {
    let program = command.get_program().to_string_lossy().into_owned();
    let Output { status, stdout, stderr } = command.output().map_err(|error| missing(&program, &error))?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    Err(refusal(&program, &String::from_utf8_lossy(&stderr)))
}

fn missing(program: &str, error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::NotFound => Refusal::NoSlurm(format!(
            "`{program}` is not on the PATH: this is no machine from which jobs are submitted"
        )),
        _ => Refusal::NotNow(format!("cannot run `{program}`: {error}")),
    }
}

/// What a command's words on standard error mean.
fn refusal(program: &str, words: &str) -> Refusal {
    let lines: Vec<&str> = words.lines().map(|line| line.trim().trim_start_matches("sbatch: error: ")).collect();
    let lines: Vec<&str> = lines.into_iter().filter(|line| !line.is_empty()).collect();
    let text =
        if lines.is_empty() { format!("`{program}` failed without reporting an error") } else { lines.join("; ") };
    let says = |known: &[&str]| known.iter().any(|known| words.contains(known));
    if says(&PASSING) || says(&FULL) { Refusal::NotNow(text) } else { Refusal::Never(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_and_a_controller_that_is_down_may_pass() {
        let passes = [
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates \
             accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy",
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        ];
        for words in passes {
            assert!(matches!(refusal("sbatch", words), Refusal::NotNow(_)), "{words}");
        }
    }

    #[test]
    fn a_wrong_request_never_will() {
        let words = "sbatch: error: invalid partition specified: foo\n\
            sbatch: error: Batch job submission failed: Invalid partition name specified\n";
        let text = "invalid partition specified: foo; Batch job submission failed: Invalid partition name specified";
        assert_eq!(refusal("sbatch", words), Refusal::Never(text.to_owned()));
        let too_large = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, \
            user's size and/or time limits)";
        assert!(matches!(refusal("sbatch", too_large), Refusal::Never(_)));
    }
}
