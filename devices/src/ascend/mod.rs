//! Ascend NPUs, by `npu-smi` and `/dev/davinci*`.

pub(crate) mod info;
mod ports;
mod toolkit;
pub(crate) mod topo;
mod torch_npu;

use std::collections::BTreeSet;

use crate::doctor::{Finding, Installed, Subject};
use crate::inventory::{Device, Health, Inventory, Process, Queried};
use crate::link::Link;
use crate::matrix::Matrix;
use crate::{DeviceKind, DeviceNodes, Facts, ListForm, Machine, TorchSupport, Vendor, VisibleDevices};

/// Where the driver puts its tool; a login shell has it on its path, a batch job often has not.
const TOOL_PLACES: [&str; 2] = ["/usr/local/sbin/npu-smi", "/usr/local/bin/npu-smi"];

pub(crate) struct Ascend;

impl Vendor for Ascend {
    fn facts(&self) -> Facts {
        Facts {
            one: "an NPU",
            several: "NPUs",
            maker: Some("Ascend"),
            untried: Some(
                "What is done with it is built to Ascend's documents, and tested on an emulated device and a stand-in for npu-smi.",
            ),
            untried_together: None,
            tools: &["npu-smi"],
            visible: Some(VisibleDevices {
                variable: "ASCEND_RT_VISIBLE_DEVICES",
                outer: None,
                of_containers: Some("ASCEND_VISIBLE_DEVICES"),
                beside: None,
                form: ListForm::Ascending,
                is_set_by_slurm: false,
            }),
            torch: Some(TorchSupport { alone: true, bitsandbytes: false }),
            gres: Some("npu"),
            kubernetes_resource: Some("huawei.com/Ascend910"),
            variables: include_str!("variables.txt"),
            when_a_tool_fails: "run `npu-smi info` by hand; in a container, mount /usr/local/Ascend/driver and pass /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc",
        }
    }

    fn ask(&self, machine: &Machine) -> Inventory {
        let nodes = machine.numbered("/dev", "davinci");
        let tool = machine.tool("npu-smi").or_else(|| TOOL_PLACES.iter().find_map(|place| machine.installed(place)));
        let Some(tool) = tool else { return without_a_tool(&nodes) };
        let mut asked = Queried::new(DeviceKind::Npu, "npu-smi info");
        let info = match machine.run(&tool, &["info"]) {
            Err(error) => return asked.failed(error.to_string()).alone_with(numbered(&nodes)),
            Ok(text) => info::read(&text).ok_or_else(|| crate::tool::said("", &text)),
        };
        let info = match info {
            Ok(info) => info,
            Err(said) => {
                return asked.failed(format!("its answer holds no table: {said}")).alone_with(numbered(&nodes));
            }
        };
        asked.version = info.version.clone();
        let devices = devices(&info);
        asked.problem = problem(&info, &devices, &nodes);
        let mut inventory = Inventory { devices, links: Vec::new(), asked: vec![asked] };
        if !inventory.devices.is_empty() {
            inventory.join(machine, &tool);
        }
        inventory
    }

    fn owns_gres(&self, name: &str) -> bool {
        name.starts_with("npu") || name.to_ascii_lowercase().contains("ascend")
    }

    fn when_unwell(&self, device: &Device) -> String {
        let card = device.physical_index.unwrap_or(device.index);
        format!(
            "`npu-smi info -t health -i {card}` and `npu-smi info -t err-count -i {card}` say more; leave the device out until it is well"
        )
    }

    fn nodes(&self, subject: &Subject) -> Option<DeviceNodes> {
        let common = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"].map(str::to_owned);
        Some(DeviceNodes {
            paths: subject.numbered_nodes(DeviceKind::Npu, "/dev/davinci").chain(common).collect(),
            when_missing: "load the driver, or pass them to the container (`--device=/dev/davinci0 …`, or the Ascend container runtime)",
            are_of_a_group: true,
        })
    }

    fn check_ports(&self, subject: &Subject, listening: &[u16]) -> Vec<Finding> {
        ports::check(subject, listening)
    }

    fn check_torch(&self, subject: &Subject, installed: &Installed) -> Vec<Finding> {
        torch_npu::check(subject, installed)
    }
}

impl Inventory {
    /// Asks for links and near CPUs, which a single device has too.
    fn join(&mut self, machine: &Machine, tool: &std::path::Path) {
        let mut asked = Queried::new(DeviceKind::Npu, "npu-smi info -t topo");
        match machine.run(tool, &["info", "-t", "topo"]) {
            Err(error) => asked.problem = Some(error.to_string()),
            Ok(text) => match topo::read(&text) {
                None => asked.problem = Some(format!("its answer holds no matrix: {}", crate::tool::said("", &text))),
                Some(matrix) => {
                    asked.problem = self.put_matrix(&matrix);
                }
            },
        }
        self.asked.push(asked);
    }

    /// Links by the numbers of the matrix, which are physical ones.
    fn put_matrix(&mut self, matrix: &Matrix) -> Option<String> {
        let index = |number: u32| {
            self.devices.iter().find(|device| device.physical_index == Some(number)).map(|device| device.index)
        };
        let links = matrix.links.iter().filter_map(|((a, b), link)| {
            Some(Link { device: DeviceKind::Npu, between: [index(*a)?, index(*b)?], link: *link })
        });
        self.links = links.collect();
        for device in &mut self.devices {
            let Some(number) = device.physical_index else { continue };
            device.affinity = matrix.affinity.get(&number).cloned();
        }
        (!matrix.strange.is_empty())
            .then(|| format!("it names links that are not known: {}", matrix.strange.join(", ")))
    }
}

/// The devices of the table. Processes count them from 0 in the order of their physical numbers, whichever a container
/// sees.
fn devices(info: &info::Info) -> Vec<Device> {
    let mut chips: Vec<&info::Chip> = info.chips.iter().collect();
    chips.sort_by_key(|chip| (chip.physical, chip.card, chip.chip));
    let indexed = (0..).zip(chips);
    indexed.map(|(index, chip)| device(index, chip, info)).collect()
}

fn device(index: u32, chip: &info::Chip, info: &info::Info) -> Device {
    let (used, total) = chip.memory.unzip();
    let processes = info.processes.iter().filter(|line| (line.card, line.chip) == (chip.card, chip.chip));
    let name = if chip.name.starts_with("Ascend") { chip.name.clone() } else { format!("Ascend {}", chip.name) };
    Device {
        physical_index: Some(chip.physical.unwrap_or(chip.card)),
        health: health(&chip.health),
        power_watts: chip.power_watts,
        temperature_celsius: chip.temperature_celsius,
        bus_id: chip.bus_id.clone(),
        processes: processes
            .map(|line| Process { pid: line.pid, name: line.name.clone(), memory: line.memory })
            .collect(),
        ..Device::new(DeviceKind::Npu, index, name).with_memory(total, used, None)
    }
}

fn health(printed: &str) -> Health {
    match printed.to_ascii_uppercase().as_str() {
        "OK" => Health::Ok,
        "WARNING" => Health::Warning,
        "ALARM" => Health::Alarm,
        "CRITICAL" => Health::Critical,
        "OFFLINE" => Health::Offline,
        _ => Health::Unknown,
    }
}

/// What of the answer is to be looked at.
fn problem(info: &info::Info, devices: &[Device], nodes: &[u32]) -> Option<String> {
    let listed: BTreeSet<u32> = devices.iter().filter_map(|device| device.physical_index).collect();
    let unlisted: Vec<String> =
        nodes.iter().filter(|node| !listed.contains(node)).map(|node| format!("/dev/davinci{node}")).collect();
    let mut problems = info.warnings.clone();
    if !unlisted.is_empty() {
        problems.push(format!("it does not list {}", unlisted.join(", ")));
    }
    (!problems.is_empty()).then(|| problems.join("; "))
}

fn without_a_tool(nodes: &[u32]) -> Inventory {
    if nodes.is_empty() {
        return Inventory::default();
    }
    let asked = Queried::new(DeviceKind::Npu, "npu-smi info");
    asked.failed("it is not installed, though there are /dev/davinci*".to_owned()).alone_with(numbered(nodes))
}

/// Devices of which only the node in `/dev` is known.
fn numbered(nodes: &[u32]) -> Vec<Device> {
    let numbered = (0..).zip(nodes);
    let device = |(index, node): (u32, &u32)| Device {
        physical_index: Some(*node),
        ..Device::new(DeviceKind::Npu, index, "Ascend NPU")
    };
    numbered.map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LinkKind;
    use crate::test_machine::TestMachine;

    fn machine(info: &str, topo: &str) -> TestMachine {
        let machine = TestMachine::new();
        machine.tool(
            "npu-smi",
            &format!("case \"$*\" in\ninfo) cat <<'END'\n{info}\nEND\n;;\n*) cat <<'END'\n{topo}\nEND\n;;\nesac\n"),
        );
        machine
    }

    #[test]
    fn eight_cards_with_their_links_and_processors() {
        let info = include_str!("../../tests/npu-smi/910b3x8.info.txt");
        let topo = include_str!("../../tests/npu-smi/910b3x8.topo.txt");
        let inventory = Ascend.ask(&machine(info, topo).machine());
        assert_eq!(inventory.devices.len(), 8);
        assert_eq!(inventory.links.len(), 28);
        let first = &inventory.devices[0];
        assert_eq!(first.name, "Ascend 910B3");
        assert_eq!((first.memory_total, first.memory_free), (Some(64 << 30), Some((65536 - 3318) << 20)));
        assert_eq!(first.affinity.as_ref().unwrap().to_string(), "144-167");
        assert_eq!(inventory.link(DeviceKind::Npu, 7, 2), LinkKind::Hccs);
        assert_eq!(inventory.asked[0].version.as_deref(), Some("24.1.rc1.b030"));
        assert!(inventory.asked.iter().all(|asked| asked.problem.is_none()));
    }

    #[test]
    fn a_container_counts_from_0_what_it_sees() {
        let info = include_str!("../../tests/npu-smi/a3-container.info.txt");
        let topo = include_str!("../../tests/npu-smi/a3-container.topo.txt");
        let inventory = Ascend.ask(&machine(info, topo).machine());
        let seen: Vec<_> = inventory.devices.iter().map(|device| (device.index, device.physical_index)).collect();
        assert_eq!(seen, [(0, Some(12)), (1, Some(13)), (2, Some(14)), (3, Some(15))]);
        assert_eq!(inventory.link(DeviceKind::Npu, 0, 1), LinkKind::SameCard);
        assert_eq!(inventory.link(DeviceKind::Npu, 1, 2), LinkKind::Hccs);
        assert_eq!(inventory.devices[1].processes[0].pid, 3_330_598);
    }

    #[test]
    fn what_the_tool_says_when_it_fails_is_kept() {
        let machine = TestMachine::new();
        machine
            .tool("npu-smi", "echo 'dcmi model initialized failed, because the device is used. ret is -8020'; exit 1");
        machine.file("dev/davinci0", "");
        machine.file("dev/davinci_manager", "");
        let inventory = Ascend.ask(&machine.machine());
        assert_eq!(inventory.devices.len(), 1);
        assert_eq!(inventory.devices[0].health, Health::Unknown);
        assert!(inventory.asked[0].problem.as_ref().unwrap().contains("-8020"));
    }

    #[test]
    fn an_answer_without_a_table_is_no_machine_without_devices() {
        let machine = TestMachine::new();
        machine.tool("npu-smi", "echo 'NPU driver is not ready'");
        let inventory = Ascend.ask(&machine.machine());
        let problem = inventory.asked[0].problem.as_ref().unwrap();
        assert_eq!(problem, "its answer holds no table: NPU driver is not ready");
    }

    #[test]
    fn nodes_without_a_tool_are_devices_of_which_nothing_is_known() {
        let machine = TestMachine::new();
        for node in ["davinci10", "davinci2", "davinci_manager", "davinci"] {
            machine.file(&format!("dev/{node}"), "");
        }
        let inventory = Ascend.ask(&machine.machine());
        let seen: Vec<_> = inventory.devices.iter().map(|device| device.physical_index).collect();
        assert_eq!(seen, [Some(2), Some(10)]);
        assert!(inventory.asked[0].problem.is_some());
    }

    #[test]
    fn a_machine_without_either_is_not_talked_of() {
        assert_eq!(Ascend.ask(&TestMachine::new().machine()), Inventory::default());
    }

    #[test]
    fn a_node_that_the_tool_does_not_list_is_told() {
        let info = include_str!("../../tests/npu-smi/910b-sick.info.txt");
        let machine = machine(info, "");
        machine.file("dev/davinci3", "");
        let inventory = Ascend.ask(&machine.machine());
        assert_eq!(inventory.devices.len(), 4);
        assert!(!inventory.devices[1].health.is_usable());
        let problem = inventory.asked[0].problem.as_ref().unwrap();
        assert!(problem.contains("/dev/davinci3") && problem.contains("reinstall"), "{problem}");
    }
}
