//! What the readers of the vendors' tools hold for any text: they end without a panic, and what they return is
//! plausible.
//!
//! Compiled for the tests here and for the fuzzer alone (`fuzz/`).

use crate::ascend;
use crate::metal;
use crate::nvidia::{smi, topo};
use crate::rocm::{amd_smi, rocm_smi};
use crate::{CpuList, Device};

/// The tables and lists of `npu-smi`, `nvidia-smi`, `rocm-smi`, `amd-smi` and `system_profiler`.
pub fn vendor_tables(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for chip in ascend::info::read(&text).iter().flat_map(|info| &info.chips) {
        plausible(chip.power_watts);
        plausible(chip.temperature_celsius);
    }
    for matrix in [ascend::topo::read(&text), topo::read(&text)].into_iter().flatten() {
        assert!(
            matrix.links.keys().all(|(one, other)| one < other),
            "a device is joined to itself: {:?}",
            matrix.links
        );
    }
    if let Some((mut devices, _)) = smi::read_gpus(&text) {
        smi::put_processes(&text, &mut devices);
        all_plausible(&devices);
    }
    if let Some(answer) = rocm_smi::Answer::read(&text) {
        all_plausible(&answer.devices());
        assert!(answer.links().iter().all(|link| link.between[0] < link.between[1]));
    }
    if let Some(answer) = amd_smi::read(&text) {
        let devices = amd_smi::devices(&answer, &answer, &answer);
        all_plausible(&devices);
        amd_smi::links_of(&devices, &amd_smi::links(&answer));
    }
    metal::read(&text).iter().for_each(|devices| all_plausible(devices));
    if let Ok(list) = text.parse::<CpuList>() {
        assert!(list.cpus().is_sorted());
        let written = list.to_string();
        assert_eq!(written.parse::<CpuList>().ok(), Some(list), "{written}");
    }
}

fn all_plausible(devices: &[Device]) {
    for device in devices {
        plausible(device.power_watts);
        plausible(device.temperature_celsius);
    }
}

fn plausible(figure: Option<f64>) {
    assert!(figure.is_none_or(f64::is_finite), "{figure:?} is no power or temperature");
}

#[cfg(test)]
#[path = "../../fuzz/mutations.rs"]
mod mutations;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vendor_tables_near_real_ones() {
        mutations::hold(vendor_tables, "vendor_tables");
    }
}
