//! The variables of the ranks' processes.
//!
//! They inherit those of the stage's process, the engine's with the device variable. What is set here are defaults: a variable that
//! the machine sets is left as it is, and one that the stage gives under `env:` goes before both.

use std::collections::BTreeMap;
use std::ffi::OsString;

use devices::DeviceKind;
use engine::device::DeviceGrant;

/// On every device: no output is held back, hashes are the same in each run, nothing is looked up outside, and no process starts
/// threads beside those it is given. `torch_npu` is imported by the worker, for NPUs alone: loaded by itself it would stop every
/// other device where CANN is missing.
const ALWAYS: [(&str, &str); 6] = [
    ("PYTHONUNBUFFERED", "1"),
    ("PYTHONHASHSEED", "0"),
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"),
];

/// Memory in segments that grow: rows of many lengths would otherwise leave gaps that nothing fits into.
const CUDA: [(&str, &str); 2] =
    [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")];

/// As for CUDA, under AMD's name.
const ROCM: [(&str, &str); 2] =
    [("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")];

/// Ranks that load a large model reach their first collective minutes apart, and HCCL waits for two minutes.
const NPU: [(&str, &str); 2] =
    [("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"), ("HCCL_CONNECT_TIMEOUT", "1200")];

/// The variables to set, with those that the stage gives.
pub(super) fn variables(
    devices: &DeviceGrant,
    threads: usize,
    given: &BTreeMap<String, String>,
    is_set: &dyn Fn(&str) -> bool,
) -> BTreeMap<String, OsString> {
    let of_device: &[(&str, &str)] = match devices.kind {
        DeviceKind::Cuda => &CUDA,
        DeviceKind::Rocm => &ROCM,
        DeviceKind::Npu => &NPU,
        DeviceKind::Cpu | DeviceKind::Metal => &[],
    };
    let defaults = ALWAYS.iter().chain(of_device).filter(|(name, _)| !is_set(name));
    let mut variables: BTreeMap<String, OsString> =
        defaults.map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
    let each = (threads / devices.count.max(1)).max(1);
    if !is_set("OMP_NUM_THREADS") {
        variables.insert("OMP_NUM_THREADS".to_owned(), each.to_string().into());
    }
    variables.extend(given.iter().map(|(name, value)| (name.clone(), value.into())));
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stage_goes_before_the_machine_and_the_machine_before_defaults() {
        let npus = DeviceGrant { kind: DeviceKind::Npu, count: 4, indices: vec![0, 1, 2, 3], nodes: 1 };
        let given = BTreeMap::from([("HCCL_EXEC_TIMEOUT".to_owned(), "3600".to_owned())]);
        let variables = variables(&npus, 10, &given, &|name| name == "HCCL_CONNECT_TIMEOUT");
        let value = |name: &str| variables.get(name).and_then(|value| value.to_str());
        assert_eq!((value("HCCL_EXEC_TIMEOUT"), value("HCCL_CONNECT_TIMEOUT")), (Some("3600"), None));
        assert_eq!((value("OMP_NUM_THREADS"), value("TORCH_DEVICE_BACKEND_AUTOLOAD")), (Some("2"), Some("0")));
        assert_eq!(
            (value("PYTORCH_NPU_ALLOC_CONF"), value("PYTORCH_CUDA_ALLOC_CONF")),
            (Some("expandable_segments:True"), None)
        );
    }
}
