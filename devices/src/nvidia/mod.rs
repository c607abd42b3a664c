//! NVIDIA GPUs, by NVML, else by `nvidia-smi`.
//!
//! Both count GPUs in the order of the bus. CUDA itself counts the fastest first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`
//! is set, which therefore belongs beside every `CUDA_VISIBLE_DEVICES` that is made from these numbers: see
//! [`DeviceKind::environment`](crate::DeviceKind::environment).

mod driver;
mod nvml;
pub(crate) mod smi;
pub(crate) mod topo;

use std::collections::BTreeSet;
use std::path::Path;

use crate::doctor::{Finding, Installed, Severity, Subject, finding};
use crate::inventory::{Device, Inventory, Queried};
use crate::link::Link;
use crate::matrix::Matrix;
use crate::{DeviceKind, DeviceNodes, Facts, ListForm, Machine, TorchSupport, Vendor, VisibleDevices};

pub(crate) struct Nvidia;

impl Vendor for Nvidia {
    fn facts(&self) -> Facts {
        Facts {
            one: "a CUDA device",
            several: "CUDA devices",
            maker: Some("NVIDIA"),
            untried: None,
            untried_together: Some("What they do together is tested on the CPU and on a stand-in for NCCL."),
            tools: &["NVML", "nvidia-smi"],
            visible: Some(VisibleDevices {
                variable: "CUDA_VISIBLE_DEVICES",
                outer: None,
                of_containers: Some("NVIDIA_VISIBLE_DEVICES"),
                beside: Some(("CUDA_DEVICE_ORDER", "PCI_BUS_ID")),
                form: ListForm::Any,
                is_set_by_slurm: true,
            }),
            torch: Some(TorchSupport { alone: false, bitsandbytes: true }),
            gres: Some("gpu"),
            kubernetes_resource: Some("nvidia.com/gpu"),
            variables: include_str!("variables.txt"),
            when_a_tool_fails: "run `nvidia-smi` by hand: a driver that was updated needs a reboot, a container needs `--gpus`",
        }
    }

    fn ask(&self, machine: &Machine) -> Inventory {
        let tool = machine.tool("nvidia-smi");
        match (nvml::ask(machine), tool) {
            (Ok(inventory), _) => inventory,
            (Err(_), Some(tool)) => ask_tool(machine, &tool),
            // Without a driver there is no library, which is nothing to talk of.
            (Err(nvml::NvmlError::NotInstalled), None) if machine.numbered("/dev", "nvidia").is_empty() => {
                Inventory::default()
            }
            (Err(error), None) => {
                let numbers = machine.numbered("/dev", "nvidia");
                let devices = (0..).zip(&numbers).map(|(index, number)| Device {
                    physical_index: Some(*number),
                    ..Device::new(DeviceKind::Cuda, index, "NVIDIA GPU")
                });
                Queried::new(DeviceKind::Cuda, "NVML").failed(error.to_string()).alone_with(devices.collect())
            }
        }
    }

    fn when_unwell(&self, device: &Device) -> String {
        format!("`nvidia-smi -q -i {}` and `dmesg | grep -i xid` say more; a reset or a reboot may help", device.index)
    }

    fn nodes(&self, subject: &Subject) -> Option<DeviceNodes> {
        let common = ["/dev/nvidiactl", "/dev/nvidia-uvm"].map(str::to_owned);
        Some(DeviceNodes {
            paths: subject.numbered_nodes(DeviceKind::Cuda, "/dev/nvidia").chain(common).collect(),
            when_missing: "`nvidia-modprobe -u -c=0` makes them, or `--gpus all` for a container",
            are_of_a_group: false,
        })
    }

    /// CUDA counts the fastest GPU first, and every tool by the bus. It makes a difference where GPUs differ.
    fn check_visible(&self, subject: &Subject) -> Option<Finding> {
        let list = subject.variables.iter().rev().find(|variable| variable.name == "CUDA_VISIBLE_DEVICES")?;
        let gpus = subject.inventory.of_kind(DeviceKind::Cuda);
        let names: BTreeSet<&str> = gpus.map(|device| device.name.as_str()).collect();
        let by_number = list.value.split(',').any(|part| part.trim().parse::<u32>().is_ok());
        if names.len() < 2 || !by_number || subject.variable("CUDA_DEVICE_ORDER") == Some("PCI_BUS_ID") {
            return None;
        }
        let names: Vec<&str> = names.into_iter().collect();
        Some(finding(
            Severity::Warning,
            "visible-cuda-order",
            "`CUDA_VISIBLE_DEVICES` counts the fastest GPU first, and `nvidia-smi` counts by the bus",
            format!("{}; the GPUs are {}", list.seen(), names.join(" and ")),
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID beside it",
        ))
    }

    fn check_torch(&self, subject: &Subject, installed: &Installed) -> Vec<Finding> {
        driver::check(subject, installed).into_iter().collect()
    }
}

fn ask_tool(machine: &Machine, tool: &Path) -> Inventory {
    let mut asked = Queried::new(DeviceKind::Cuda, "nvidia-smi --query-gpu");
    let text = match machine.run(tool, &[smi::GPUS, smi::FORMAT]) {
        Ok(text) => text,
        Err(error) => return asked.failed(error.to_string()).alone_with(Vec::new()),
    };
    let Some((mut devices, version)) = smi::read_gpus(&text) else {
        let said = crate::tool::said("", &text);
        return asked.failed(format!("its answer is no list of GPUs: {said}")).alone_with(Vec::new());
    };
    asked.version = version;
    // In containers nobody else's processes can be seen: no answer is no fault.
    if let Ok(text) = machine.run(tool, &[smi::PROCESSES, smi::FORMAT]) {
        smi::put_processes(&text, &mut devices);
    }
    let mut inventory = Inventory { devices, links: Vec::new(), asked: vec![asked] };
    if !inventory.devices.is_empty() {
        inventory.ask_topology(machine, tool);
    }
    inventory
}

impl Inventory {
    fn ask_topology(&mut self, machine: &Machine, tool: &Path) {
        let mut asked = Queried::new(DeviceKind::Cuda, "nvidia-smi topo -m");
        match machine.run(tool, &["topo", "-m"]) {
            Err(error) => asked.problem = Some(error.to_string()),
            Ok(text) => match topo::read(&text) {
                None => asked.problem = Some(format!("its answer holds no matrix: {}", crate::tool::said("", &text))),
                Some(matrix) => self.put_gpu_matrix(&matrix, &mut asked),
            },
        }
        self.asked.push(asked);
    }

    fn put_gpu_matrix(&mut self, matrix: &Matrix, asked: &mut Queried) {
        let links =
            matrix.links.iter().map(|((a, b), link)| Link { device: DeviceKind::Cuda, between: [*a, *b], link: *link });
        self.links = links.collect();
        for device in &mut self.devices {
            device.affinity = matrix.affinity.get(&device.index).cloned();
            device.numa_node = matrix.numa_node.get(&device.index).copied();
        }
        if !matrix.strange.is_empty() {
            asked.problem = Some(format!("it names links that are not known: {}", matrix.strange.join(", ")));
        }
    }
}

/// A place on the bus as the kernel writes it: NVIDIA prints a domain of eight digits.
fn bus_id(printed: &str) -> String {
    let lower = printed.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => {
            format!("{}:{rest}", domain.strip_prefix("0000").unwrap_or(domain))
        }
        _ => lower,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LinkKind;
    use crate::test_machine::TestMachine;

    #[test]
    fn the_tool_answers_where_the_library_is_missing() {
        let machine = TestMachine::new();
        let (gpus, topo) = (
            include_str!("../../tests/nvidia-smi/h100x2.csv"),
            "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-55\nGPU1\tNV18\t X \t0-55\n",
        );
        machine.tool(
            "nvidia-smi",
            &format!("case \"$1\" in\n--query-gpu*) cat <<'END'\n{gpus}END\n;;\ntopo) cat <<'END'\n{topo}END\n;;\n*) exit 0;;\nesac"),
        );
        machine.file("sys/bus/pci/devices/0000:19:00.0/numa_node", "0\n");
        let inventory = Inventory::of(&machine.machine(), &[DeviceKind::Cuda]);
        assert_eq!(inventory.devices.len(), 2);
        assert_eq!(inventory.link(DeviceKind::Cuda, 0, 1), LinkKind::NvLink { count: 18 });
        assert_eq!(inventory.devices[0].affinity.as_ref().unwrap().len(), 56);
        assert_eq!(inventory.devices[0].numa_node, Some(0));
        assert_eq!(inventory.asked[0].version.as_deref(), Some("550.90.07"));
    }

    #[test]
    fn a_driver_that_is_gone_is_told() {
        let machine = TestMachine::new();
        machine.tool(
            "nvidia-smi",
            "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        );
        let inventory = Nvidia.ask(&machine.machine());
        assert!(inventory.devices.is_empty());
        assert!(inventory.asked[0].problem.as_ref().unwrap().contains("communicate with the NVIDIA driver"));
    }

    #[test]
    fn nodes_without_library_and_tool_are_told() {
        let machine = TestMachine::new();
        machine.file("dev/nvidia0", "");
        machine.file("dev/nvidiactl", "");
        let inventory = Nvidia.ask(&machine.machine());
        assert_eq!(inventory.devices.len(), 1);
        assert!(inventory.asked[0].problem.is_some());
    }

    #[test]
    fn places_are_written_as_the_kernel_writes_them() {
        assert_eq!(bus_id("00000000:C1:00.0"), "0000:c1:00.0");
        assert_eq!(bus_id("00010000:C1:00.0"), "00010000:c1:00.0");
        assert_eq!(bus_id("0000:C1:00.0"), "0000:c1:00.0");
    }
}
