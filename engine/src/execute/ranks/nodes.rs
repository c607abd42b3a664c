//! The machines of an allocation: which they are, where the ranks on them meet, and how a rank is started on one of
//! them.

use std::env;
use std::ffi::OsString;
use std::process::{Command, Stdio};

use crate::error::{Cause, OrFail, StageError};
use crate::execute::death_pipe;
use crate::execute::slurm::{field, visible};

/// The nodes of the job that this process runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Nodes {
    /// Their names, this one first.
    names: Vec<String>,
    /// Where the first one is reached. Names need not resolve on the nodes of a cluster; addresses are what Slurm
    /// itself uses.
    pub address: String,
    /// CPUs on each that are this job's.
    cpus: Option<usize>,
}

impl Nodes {
    /// Those of the allocation.
    ///
    /// # Errors
    /// Fails outside of one, and where it has fewer than wanted.
    pub(super) fn of_allocation(wanted: usize) -> Result<Self, StageError> {
        let lack = |message: String| {
            StageError::new(Cause::Machine, message)
                .with_help("several machines are given by a cluster: `pipeline run --executor slurm`")
        };
        let list = env::var("SLURM_JOB_NODELIST")
            .map_err(|_| lack(format!("this stage is to run on {wanted} machines, and knows of this one alone")))?;
        let names: Vec<String> = scontrol(&["show", "hostnames", &list])?.lines().map(str::to_owned).collect();
        if names.len() < wanted {
            return Err(lack(format!(
                "this stage is to run on {wanted} machines, and the job has {}: {list}",
                names.len()
            )));
        }
        let told = scontrol(&["show", "node", "--oneliner", &names[0]])?;
        let address = field(&told, "NodeAddr").unwrap_or(&names[0]).to_owned();
        let cpus = env::var("SLURM_CPUS_ON_NODE").ok().and_then(|cpus| cpus.parse().ok());
        Ok(Self { names, address, cpus })
    }

    /// What stands before the command of a rank on a node, which has the standard input of this process or none. The
    /// steps share what the job has, so that each sees all devices of its node.
    pub(super) fn prefix(&self, node: usize, per_node: usize, input: bool) -> Vec<OsString> {
        let mut words = vec![
            "srun".to_owned(),
            "--nodes=1".to_owned(),
            "--ntasks=1".to_owned(),
            "--overlap".to_owned(),
            format!("--nodelist={}", self.names[node]),
            "--unbuffered".to_owned(),
            format!("--input={}", if input { "all" } else { "none" }),
            "--kill-on-bad-exit=1".to_owned(),
        ];
        words.extend(self.cpus.map(|cpus| format!("--cpus-per-task={}", (cpus / per_node.max(1)).max(1))));
        if env::var_os("SLURM_JOB_GPUS").is_some() {
            let set = visible::untold().find(|(_, variable)| env::var_os(variable).is_some());
            words.extend(set.into_iter().flat_map(|(_, variable)| visible::on_node(variable)));
        }
        words.into_iter().map(OsString::from).collect()
    }
}

/// On another machine the number of the death pipe means some other file. A rank there ends with its step, and that
/// with the job.
pub(super) fn without_death_pipe() -> (String, OsString) {
    (death_pipe::VARIABLE.to_owned(), OsString::new())
}

fn scontrol(arguments: &[&str]) -> Result<String, StageError> {
    let failed = || format!("cannot ask Slurm for the nodes of this job: `scontrol {}`", arguments.join(" "));
    let output = Command::new("scontrol").args(arguments).stdin(Stdio::null()).output();
    let output = output.or_fail(Cause::Machine, failed)?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(StageError::new(Cause::Machine, format!("{}: {words}", failed())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_a_step_on_its_node() {
        let nodes = Nodes { names: vec!["n1".into(), "n7".into()], address: "10.0.0.1".into(), cpus: Some(16) };
        let words: Vec<String> =
            nodes.prefix(1, 2, false).into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(words[..2], ["srun", "--nodes=1"]);
        assert!(
            words.contains(&"--nodelist=n7".to_owned()) && words.contains(&"--cpus-per-task=8".to_owned()),
            "{words:?}"
        );
    }

    #[test]
    fn the_address_is_the_one_that_slurm_uses() {
        let line = "NodeName=n1 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=host Port=17601";
        assert_eq!(field(line, "NodeAddr"), Some("10.1.2.3"));
        assert_eq!(field(line, "Comment"), None);
    }
}
