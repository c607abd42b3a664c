//! What tests need of a machine.

use std::env;
use std::fmt::{self, Display};

/// Names, separated by commas, what has to be there.
pub(crate) const VARIABLE: &str = "PIPELINE_REQUIRE";

/// What some tests need, and not every machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// A Python, whatever it has.
    Python,
    /// A Python with torch, transformers, peft, safetensors and numpy.
    Torch,
    /// A Python with bitsandbytes beside what [`Requirement::Torch`] is.
    Bitsandbytes,
    /// A Python with mlflow, wandb and swanlab.
    Trackers,
    /// The daemons and commands of Slurm.
    Slurm,
    /// A CUDA device, and a build with `--features cuda`.
    Cuda,
    /// The right to become another user.
    Root,
    /// The right to mount file systems, and the programs that make them.
    Mount,
    /// A file system in memory, `/dev/shm`.
    SharedMemory,
    /// A kernel that sets a process's peak memory back.
    PeakMemory,
    /// An instruction set of the processor.
    Instructions,
    /// No driver of GPUs that would be asked before emulated ones.
    EmulatedGpus,
}

impl Requirement {
    const ALL: [Self; 12] = [
        Self::Python,
        Self::Torch,
        Self::Bitsandbytes,
        Self::Trackers,
        Self::Slurm,
        Self::Cuda,
        Self::Root,
        Self::Mount,
        Self::SharedMemory,
        Self::PeakMemory,
        Self::Instructions,
        Self::EmulatedGpus,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Torch => "torch",
            Self::Bitsandbytes => "bitsandbytes",
            Self::Trackers => "trackers",
            Self::Slurm => "slurm",
            Self::Cuda => "cuda",
            Self::Root => "root",
            Self::Mount => "mount",
            Self::SharedMemory => "shared-memory",
            Self::PeakMemory => "peak-memory",
            Self::Instructions => "instructions",
            Self::EmulatedGpus => "emulated-gpus",
        }
    }

    /// It is not met here, for this reason.
    pub fn unmet(self, reason: impl Display) -> Unmet {
        Unmet { requirement: self, reason: reason.to_string() }
    }

    /// Fails where the environment says that it has to be met: for a test that computes what it can without it.
    ///
    /// # Panics
    /// Where it is required.
    pub fn may_be_lacking(self, reason: impl Display) {
        let required = Self::required().unwrap_or_else(|error| panic!("{error}"));
        assert!(!required.contains(&self), "{}", self.unmet(reason));
    }

    /// What the environment says has to be there.
    pub(crate) fn required() -> Result<Vec<Self>, String> {
        Self::parse(&env::var(VARIABLE).unwrap_or_default())
    }

    fn parse(names: &str) -> Result<Vec<Self>, String> {
        let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        let parsed = names.map(|name| {
            Self::ALL.into_iter().find(|known| known.name() == name).ok_or_else(|| {
                let known = Self::ALL.map(Self::name).join(", ");
                format!("{VARIABLE} names `{name}`, which no test knows; they know {known}")
            })
        });
        parsed.collect()
    }
}

/// A requirement that this machine does not meet.
#[derive(Debug, Clone)]
pub struct Unmet {
    requirement: Requirement,
    reason: String,
}

impl Unmet {
    pub(crate) fn requirement(&self) -> Requirement {
        self.requirement
    }
}

impl Display for Unmet {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "lacks {}: {}", self.requirement.name(), self.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::Requirement;

    #[test]
    fn every_requirement_can_be_named() {
        for requirement in Requirement::ALL {
            assert_eq!(Requirement::parse(requirement.name()), Ok(vec![requirement]));
        }
        assert_eq!(Requirement::parse(" torch,slurm,"), Ok(vec![Requirement::Torch, Requirement::Slurm]));
        assert_eq!(Requirement::parse(""), Ok(vec![]));
        assert!(Requirement::parse("torhc").is_err_and(|error| error.contains("`torhc`") && error.contains("torch")));
    }
}
