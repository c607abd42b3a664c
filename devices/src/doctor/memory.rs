//! Memory of devices that others hold.

use super::{Finding, Severity, finding, name};
use crate::{Device, DeviceKind, Inventory};

/// The share of its memory that a device may hold for itself: firmware and page tables of a 910B take 5 %.
const OWN_SHARE: f64 = 0.1;

/// Looks for devices that somebody computes on.
pub(super) fn check(inventory: &Inventory) -> Vec<Finding> {
    let accelerators = inventory.devices.iter().filter(|device| device.kind != DeviceKind::Cpu);
    accelerators.filter_map(taken).collect()
}

fn taken(device: &Device) -> Option<Finding> {
    let (used, total) = (device.memory_used?, device.memory_total?);
    if (used as f64) < total as f64 * OWN_SHARE {
        return None;
    }
    let by = match device.processes.as_slice() {
        [] => "no process is shown, as for those of other containers".to_owned(),
        processes => {
            let one = |process: &crate::Process| match &process.name {
                Some(name) => format!("{} ({name})", process.pid),
                None => process.pid.to_string(),
            };
            format!("by process {}", processes.iter().map(one).collect::<Vec<_>>().join(", "))
        }
    };
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let message = format!("memory of {} is in use", name(device));
    let seen = format!("{:.1} of {:.1} GiB; {by}", gib(used), gib(total));
    let help = "a stage is given what is free; if nobody should be there, see what the process is and end it";
    Some(finding(Severity::Warning, "memory-taken", message, seen, help))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Process;

    #[test]
    fn what_firmware_takes_is_nobodys() {
        let idle = Device::new(DeviceKind::Npu, 0, "910B3").with_memory(Some(64 << 30), Some(3318 << 20), None);
        assert_eq!(taken(&idle), None);
        let mut busy = Device::new(DeviceKind::Npu, 4, "910B3").with_memory(Some(64 << 30), Some(60 << 30), None);
        assert!(taken(&busy).unwrap().seen.contains("no process is shown"));
        busy.processes.push(Process { pid: 4711, name: Some("python".to_owned()), memory: None });
        assert_eq!(taken(&busy).unwrap().seen, "60.0 of 64.0 GiB; by process 4711 (python)");
    }
}
