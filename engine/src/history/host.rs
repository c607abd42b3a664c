//! The machine that a run was on, as far as it may explain a result: recorded with the run, part of no key.

use std::fs::File;
use std::io::Read;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Its name in the network.
    pub name: String,
    /// The operating system with its version, such as `linux 6.18.0`.
    pub system: String,
    /// The CPU's name, else its architecture.
    pub processor: String,
    /// CPU cores that this program may use.
    pub cores: usize,
    /// Memory in bytes; `None` where the system does not say.
    pub memory_bytes: Option<u64>,
}

impl Host {
    /// The machine that this runs on.
    pub fn this() -> Self {
        let kernel = beginning_of("/proc/sys/kernel/osrelease");
        Self {
            name: beginning_of("/proc/sys/kernel/hostname").trim().to_owned(),
            system: format!("{} {}", std::env::consts::OS, kernel.trim()).trim_end().to_owned(),
            processor: field(&beginning_of("/proc/cpuinfo"), "model name")
                .unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, Into::into),
            memory_bytes: field(&beginning_of("/proc/meminfo"), "MemTotal")
                .and_then(|text| text.strip_suffix(" kB")?.parse::<u64>().ok())
                .map(|kibibytes| kibibytes * 1024),
        }
    }
}

/// The beginning of one of the kernel's files. Not more: `/proc/cpuinfo` is made as it is read, core by core, which
/// takes milliseconds on a large machine.
fn beginning_of(path: &str) -> String {
    let mut bytes = [0; 1024];
    let read = File::open(path).and_then(|mut file| file.read(&mut bytes)).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}

/// The value of the first `name : value` line.
fn field(text: &str, name: &str) -> Option<String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_fields_that_the_kernel_writes() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC 9B45\nprocessor\t: 1\nmodel name\t: other\n";
        assert_eq!(field(text, "model name").as_deref(), Some("AMD EPYC 9B45"));
        assert_eq!(field("MemTotal:       24609448 kB\n", "MemTotal").as_deref(), Some("24609448 kB"));
        assert_eq!(field("", "MemTotal"), None);
    }

    #[test]
    fn this_machine_has_a_processor_and_a_system() {
        let host = Host::this();
        assert!(host.cores > 0 && !host.processor.is_empty() && !host.system.is_empty(), "{host:?}");
    }
}
