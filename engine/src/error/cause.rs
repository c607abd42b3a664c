//! What kinds of failure there are. A cause decides what happens next: another try, and how the program ends.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What kind of failure it was; decides retries and the exit code. `docs/exit-codes.md` has the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The user's data is not what the stage needs.
    BadData,
    /// Parameters that only the run could find wrong.
    BadParameters,
    /// A stage that the run was not to make has no result.
    MissingResult,
    /// A source file changed between planning and reading.
    ChangedWhileRunning,
    /// A stored object is damaged; it is evicted and its producer runs again.
    CorruptInput,
    /// The machine refused something, such as a file's permission.
    Machine,
    /// The machine's memory, or the share of it that this program may use, did not suffice.
    OutOfMemory,
    /// The memory of a GPU or NPU did not suffice.
    DeviceOutOfMemory,
    /// A GPU or NPU no longer answers.
    DeviceLost,
    /// A file system, or the user's quota on it, is full.
    DiskFull,
    /// A server could not be reached or refused.
    Network,
    /// A loss or gradient that is not finite, or a result outside its proved bound.
    Numeric,
    /// Ended from outside.
    Cancelled,
    /// The stage took longer than its `timeout`.
    Timeout,
    /// The process died without reporting an error.
    Crashed,
    /// A defect of this program.
    Internal,
}

impl Cause {
    /// Every cause, in the order of the documentation.
    pub const ALL: [Self; 16] = [
        Self::BadParameters,
        Self::MissingResult,
        Self::BadData,
        Self::ChangedWhileRunning,
        Self::Numeric,
        Self::Timeout,
        Self::Crashed,
        Self::CorruptInput,
        Self::Internal,
        Self::OutOfMemory,
        Self::DeviceOutOfMemory,
        Self::DeviceLost,
        Self::DiskFull,
        Self::Network,
        Self::Machine,
        Self::Cancelled,
    ];

    /// Its name in events, records and pipeline files.
    pub fn name(self) -> &'static str {
        match self {
            Self::BadData => "bad_data",
            Self::BadParameters => "bad_parameters",
            Self::MissingResult => "missing_result",
            Self::ChangedWhileRunning => "changed_while_running",
            Self::CorruptInput => "corrupt_input",
            Self::Machine => "machine",
            Self::OutOfMemory => "out_of_memory",
            Self::DeviceOutOfMemory => "device_out_of_memory",
            Self::DeviceLost => "device_lost",
            Self::DiskFull => "disk_full",
            Self::Network => "network",
            Self::Numeric => "numeric",
            Self::Cancelled => "cancelled",
            Self::Timeout => "timeout",
            Self::Crashed => "crashed",
            Self::Internal => "internal",
        }
    }

    /// Whether it is a lack of memory, which a stage may be able to do with less of.
    pub fn is_lack_of_memory(self) -> bool {
        matches!(self, Self::OutOfMemory | Self::DeviceOutOfMemory)
    }

    /// What to do about it, where whoever failed had nothing better to say.
    pub fn advice(self) -> Option<&'static str> {
        match self {
            Self::OutOfMemory => Some(
                "run fewer stages at once (`--jobs 1`), set `resources.memory` to what it needs, or lower its batch \
                 size",
            ),
            Self::DeviceOutOfMemory => Some("lower its batch size, or use a device with more memory"),
            Self::DeviceLost => {
                Some("look at the system's log (`dmesg`): a device that keeps failing needs a reset or a replacement")
            }
            Self::DiskFull => Some("free space on that file system and run again: what was saved is kept"),
            Self::BadData
            | Self::BadParameters
            | Self::MissingResult
            | Self::ChangedWhileRunning
            | Self::CorruptInput
            | Self::Machine
            | Self::Network
            | Self::Numeric
            | Self::Cancelled
            | Self::Timeout
            | Self::Crashed
            | Self::Internal => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_is_written_by_its_name() {
        for cause in Cause::ALL {
            assert_eq!(serde_json::to_value(cause).unwrap(), cause.name());
        }
        let distinct: std::collections::BTreeSet<Cause> = Cause::ALL.into_iter().collect();
        assert_eq!(distinct.len(), Cause::ALL.len());
    }
}
