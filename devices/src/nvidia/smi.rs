//! `nvidia-smi`, where NVML itself cannot be loaded.

use crate::DeviceKind;
use crate::inventory::{Device, Health, Process};
use crate::nvidia::bus_id;

/// What is asked of each GPU. All of it is understood by the tools of the last ten years: one name that is not would
/// fail the query.
pub(crate) const GPUS: &str = "--query-gpu=index,uuid,name,pci.bus_id,memory.total,memory.used,memory.free,power.draw,temperature.gpu,driver_version";

/// What is asked of each process.
pub(crate) const PROCESSES: &str = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory";

/// How it is to be printed: memory in MiB, power in W.
pub(crate) const FORMAT: &str = "--format=csv,noheader,nounits";

/// Reads the GPUs, and the driver's version. None for a line that is no answer to the question.
pub(crate) fn read_gpus(text: &str) -> Option<(Vec<Device>, Option<String>)> {
    let mut version = None;
    let mut devices = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let [index, uuid, name, bus, total, used, free, power, temperature, driver] = cells[..] else { return None };
        let device = Device::new(DeviceKind::Cuda, index.parse().ok()?, given(name).unwrap_or("NVIDIA GPU"));
        devices.push(Device {
            uuid: given(uuid).map(str::to_owned),
            health: health(&cells),
            power_watts: figure(power),
            temperature_celsius: figure(temperature),
            bus_id: given(bus).map(bus_id),
            ..device.with_memory(mebibytes(total), mebibytes(used), mebibytes(free))
        });
        version = given(driver).map(str::to_owned).or(version);
    }
    Some((devices, version))
}

/// Puts the processes to their GPUs.
pub(crate) fn put_processes(text: &str, devices: &mut [Device]) {
    for line in text.lines() {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let [uuid, pid, ref name @ .., memory] = cells[..] else { continue };
        let (Some(device), Ok(pid)) =
            (devices.iter_mut().find(|device| device.uuid.as_deref() == Some(uuid)), pid.parse())
        else {
            continue;
        };
        let name = name.join(",");
        device.processes.push(Process { pid, name: given(&name).map(str::to_owned), memory: mebibytes(memory) });
    }
}

/// A cell that holds something: what cannot be asked is printed in brackets.
fn given(cell: &str) -> Option<&str> {
    Some(cell).filter(|cell| !cell.is_empty() && !cell.starts_with('[') && *cell != "N/A" && !cell.starts_with("ERR"))
}

fn figure(cell: &str) -> Option<f64> {
    given(cell)?.parse().ok().filter(|figure: &f64| figure.is_finite())
}

fn mebibytes(cell: &str) -> Option<u64> {
    given(cell)?.parse::<u64>().ok()?.checked_mul(1 << 20)
}

fn health(cells: &[&str]) -> Health {
    let says = |words: &str| cells.iter().any(|cell| cell.to_ascii_lowercase().contains(words));
    if says("requires reset") || says("unknown error") {
        Health::Critical
    } else if says("gpu is lost") {
        Health::Offline
    } else {
        Health::Ok
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_a_server() {
        let (devices, version) = read_gpus(include_str!("../../tests/nvidia-smi/h100x2.csv")).unwrap();
        assert_eq!(version.as_deref(), Some("550.90.07"));
        assert_eq!(devices.len(), 2);
        let first = &devices[0];
        assert_eq!(first.name, "NVIDIA H100 80GB HBM3");
        assert_eq!(first.bus_id.as_deref(), Some("0000:19:00.0"));
        assert_eq!((first.memory_total, first.memory_free), (Some(81559 << 20), Some(81004 << 20)));
        assert_eq!(first.power_watts, Some(71.46));
        assert_eq!(first.health, Health::Ok);
    }

    #[test]
    fn what_cannot_be_asked_is_left_out() {
        let text = "0, GPU-5d5ba0d6, Quadro P400, 00000000:01:00.0, 2048, 12, 2036, [N/A], 34, 390.157\n\
                    1, GPU-6, Tesla K80, 00000000:02:00.0, [GPU requires reset], [GPU requires reset], [GPU requires reset], [Unknown Error], [Unknown Error], 390.157\n";
        let (devices, _) = read_gpus(text).unwrap();
        assert_eq!(devices[0].power_watts, None);
        assert_eq!((devices[1].health, devices[1].memory_total), (Health::Critical, None));
        assert!(!devices[1].health.is_usable());
    }

    #[test]
    fn what_is_no_table_is_none() {
        assert_eq!(read_gpus("Field \"pci.bus_id\" is not a valid field to query.\n"), None);
        assert_eq!(read_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"), None);
    }

    #[test]
    fn processes_are_put_to_their_gpu() {
        let (mut devices, _) = read_gpus(include_str!("../../tests/nvidia-smi/h100x2.csv")).unwrap();
        let uuid = devices[1].uuid.clone().unwrap();
        let text = format!(
            "{uuid}, 4711, python, with, commas, 40960\n{uuid}, 4712, [Not Found], [N/A]\nGPU-other, 1, x, 1\n"
        );
        put_processes(&text, &mut devices);
        assert!(devices[0].processes.is_empty());
        assert_eq!(devices[1].processes.len(), 2);
        assert_eq!(devices[1].processes[0].memory, Some(40960 << 20));
        assert_eq!(devices[1].processes[0].name.as_deref(), Some("python,with,commas"));
        assert_eq!((devices[1].processes[1].name.as_deref(), devices[1].processes[1].memory), (None, None));
    }
}
