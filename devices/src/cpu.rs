//! The processor: cores, NUMA nodes and memory, from `/proc` and `/sys`.

use crate::inventory::{Device, Health, Inventory};
use crate::{CpuList, DeviceKind, Facts, Machine, TorchSupport, Vendor};

pub(crate) struct Processor;

impl Vendor for Processor {
    fn facts(&self) -> Facts {
        Facts {
            one: "the CPU",
            several: "the CPU",
            torch: Some(TorchSupport { alone: false, bitsandbytes: true }),
            kubernetes_resource: Some("cpu"),
            when_a_tool_fails: "look into /proc and /sys",
            ..Facts::default()
        }
    }

    /// The CPU as a device. Its index is 0, however many sockets there are: stages share it by threads.
    fn ask(&self, machine: &Machine) -> Inventory {
        let model = machine.read("/proc/cpuinfo").and_then(|text| field(&text, "model name").map(str::to_owned));
        let name = model.unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        let memory = machine.read("/proc/meminfo").unwrap_or_default();
        let mut device = Device::new(DeviceKind::Cpu, 0, name).with_memory(
            kibibytes(&memory, "MemTotal"),
            None,
            kibibytes(&memory, "MemAvailable"),
        );
        device.health = Health::Ok;
        let status = machine.read("/proc/self/status").unwrap_or_default();
        device.affinity = field(&status, "Cpus_allowed_list").and_then(|list| list.parse().ok());
        Inventory { devices: vec![device], ..Inventory::default() }
    }
}

/// The CPUs of each NUMA node that has any, by its number.
pub fn numa_nodes(machine: &Machine) -> Vec<(u32, CpuList)> {
    let Ok(entries) = std::fs::read_dir(machine.path("/sys/devices/system/node")) else { return Vec::new() };
    let mut nodes: Vec<(u32, CpuList)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus: CpuList = std::fs::read_to_string(entry.path().join("cpulist")).ok()?.parse().ok()?;
            (!cpus.is_empty()).then_some((number, cpus))
        })
        .collect();
    nodes.sort_by_key(|(number, _)| *number);
    nodes
}

/// The value of a line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|count| count * 1024)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn machine() -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Kunpeng-920\nprocessor\t: 1\n");
        write("proc/meminfo", "MemTotal:       1048576 kB\nMemFree:  1 kB\nMemAvailable:    262144 kB\n");
        write("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-47\n");
        write("sys/devices/system/node/node1/cpulist", "24-47\n");
        write("sys/devices/system/node/node0/cpulist", "0-23\n");
        write("sys/devices/system/node/node2/cpulist", "\n");
        let machine = Machine::at(root.path(), "");
        (root, machine)
    }

    #[test]
    fn the_processor_is_read_from_the_kernels_files() {
        let (_root, machine) = machine();
        let [device] = &Processor.ask(&machine).devices[..] else { panic!("one device") };
        assert_eq!(device.name, "Kunpeng-920");
        assert_eq!(device.memory_total, Some(1 << 30));
        assert_eq!((device.memory_free, device.memory_used), (Some(256 << 20), Some(768 << 20)));
        assert_eq!(device.affinity.as_ref().unwrap().len(), 48);
    }

    #[test]
    fn nodes_without_processors_are_left_out() {
        let (_root, machine) = machine();
        let nodes = numa_nodes(&machine);
        assert_eq!(nodes.iter().map(|(node, cpus)| (*node, cpus.len())).collect::<Vec<_>>(), [(0, 24), (1, 24)]);
    }

    #[test]
    fn the_processor_is_there_even_where_nothing_can_be_read() {
        let inventory = Inventory::of(&Machine::at("/nowhere", ""), &DeviceKind::ALL);
        assert_eq!(inventory.devices.len(), 1);
        assert_eq!(inventory.devices[0].kind, DeviceKind::Cpu);
    }
}
