//! The variables of the ranks' processes.
//!
//! They inherit those of the stage's process, the engine's with the device variable. What is set here are defaults: a
//! variable that the machine sets is left as it is, and one that the stage gives under `env:` goes before both.
//! Defaults of single devices (of HCCL, of allocators) are the worker's own.

use std::collections::BTreeMap;
use std::ffi::OsString;

use engine::device::DeviceGrant;

/// No package is taken from the folder where `pipeline run` was started, no output is held back, hashes are the same in
/// each run, nothing is looked up outside, and no process starts threads beside those it is given. What a step frees stays
/// with the process: to give it back and take it again at the next costs a fifth of a small step on the CPU.
const DEFAULTS: [(&str, &str); 8] = [
    ("PYTHONSAFEPATH", "1"),
    ("PYTHONUNBUFFERED", "1"),
    ("PYTHONHASHSEED", "0"),
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
    ("MALLOC_TRIM_THRESHOLD_", "1073741824"),
];

/// The variables to set, with those that the stage gives.
pub(super) fn variables(
    devices: &DeviceGrant,
    threads: usize,
    given: &BTreeMap<String, String>,
    is_set: &dyn Fn(&str) -> bool,
) -> BTreeMap<String, OsString> {
    let each = (threads / devices.count.max(1)).max(1).to_string();
    let defaults = DEFAULTS.into_iter().chain([("OMP_NUM_THREADS", each.as_str())]);
    let defaults = defaults.filter(|(name, _)| !is_set(name)).map(|(name, value)| (name.to_owned(), value.into()));
    defaults.chain(given.iter().map(|(name, value)| (name.clone(), value.into()))).collect()
}

#[cfg(test)]
mod tests {
    use devices::DeviceKind;

    use super::*;

    #[test]
    fn the_stage_goes_before_the_machine_and_the_machine_before_defaults() {
        let npus = DeviceGrant { kind: DeviceKind::Npu, count: 4, indices: vec![0, 1, 2, 3], nodes: 1 };
        let given = BTreeMap::from([("PYTHONHASHSEED".to_owned(), "7".to_owned())]);
        let variables = variables(&npus, 10, &given, &|name| name == "HF_HUB_OFFLINE");
        let value = |name: &str| variables.get(name).and_then(|value| value.to_str());
        assert_eq!((value("PYTHONHASHSEED"), value("HF_HUB_OFFLINE")), (Some("7"), None));
        assert_eq!((value("OMP_NUM_THREADS"), value("PYTHONUNBUFFERED")), (Some("2"), Some("1")));
    }
}
