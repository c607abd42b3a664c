//! AMD GPUs, by `amd-smi`, else by `rocm-smi`.

pub(crate) mod amd_smi;
pub(crate) mod rocm_smi;

use std::path::{Path, PathBuf};

use crate::doctor::{Finding, Installed, Severity, Subject, finding};
use crate::inventory::{Inventory, Queried};
use crate::{DeviceKind, DeviceNodes, Facts, ListForm, Machine, TorchSupport, Vendor, VisibleDevices};

pub(crate) struct Rocm;

impl Vendor for Rocm {
    fn facts(&self) -> Facts {
        Facts {
            one: "a ROCm device",
            several: "ROCm devices",
            maker: Some("AMD"),
            untried: Some(
                "What is done with it is built to AMD's documents, and tested on stand-ins for amd-smi and rocm-smi.",
            ),
            untried_together: None,
            tools: &["amd-smi", "rocm-smi"],
            visible: Some(VisibleDevices {
                variable: "HIP_VISIBLE_DEVICES",
                outer: Some("ROCR_VISIBLE_DEVICES"),
                of_containers: None,
                beside: None,
                form: ListForm::Any,
                is_set_by_slurm: true,
            }),
            torch: Some(TorchSupport { alone: true, bitsandbytes: true }),
            gres: Some("gpu"),
            kubernetes_resource: Some("amd.com/gpu"),
            variables: include_str!("variables.txt"),
            when_a_tool_fails: "run `amd-smi list` by hand: the user must be in the groups `render` and `video`, a container needs --device=/dev/kfd --device=/dev/dri",
        }
    }

    fn ask(&self, machine: &Machine) -> Inventory {
        let newer = find(machine, "amd-smi").map(|tool| ask_amd_smi(machine, &tool));
        match (newer, find(machine, "rocm-smi")) {
            (Some(Ok(inventory)), _) => inventory,
            (failed, Some(tool)) => ask_rocm_smi(machine, &tool).unwrap_or_else(|asked| {
                let asked = [failed.and_then(Result::err), Some(asked)];
                Inventory { asked: asked.into_iter().flatten().collect(), ..Inventory::default() }
            }),
            (Some(Err(asked)), None) => asked.alone_with(Vec::new()),
            (None, None) if machine.path("/dev/kfd").exists() => {
                let asked = Queried::new(DeviceKind::Rocm, "amd-smi");
                asked
                    .failed("neither it nor rocm-smi is installed, though there is /dev/kfd".to_owned())
                    .alone_with(Vec::new())
            }
            (None, None) => Inventory::default(),
        }
    }

    fn nodes(&self, subject: &Subject) -> Option<DeviceNodes> {
        let render = subject.machine.numbered("/dev/dri", "renderD");
        let render = render.into_iter().map(|number| format!("/dev/dri/renderD{number}"));
        Some(DeviceNodes {
            paths: ["/dev/kfd".to_owned()].into_iter().chain(render).collect(),
            when_missing: "`modprobe amdgpu`, or `--device=/dev/kfd --device=/dev/dri` for a container",
            are_of_a_group: true,
        })
    }

    fn check_visible(&self, subject: &Subject) -> Option<Finding> {
        let outer = subject.variable("ROCR_VISIBLE_DEVICES")?;
        // HIP reads CUDA's, too.
        let names = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"];
        let (name, inner) = names.into_iter().find_map(|name| Some((name, subject.variable(name)?)))?;
        Some(finding(
            Severity::Warning,
            "visible-twice",
            format!("`ROCR_VISIBLE_DEVICES` and `{name}` are both set: the second counts what the first has left"),
            format!("ROCR_VISIBLE_DEVICES={outer}, {name}={inner}"),
            "set HIP_VISIBLE_DEVICES alone",
        ))
    }

    fn check_torch(&self, subject: &Subject, installed: &Installed) -> Vec<Finding> {
        let is_for_others = installed.hip.is_none() && installed.torch_error.is_none();
        let torch = installed.version("torch").filter(|_| is_for_others && subject.has(DeviceKind::Rocm));
        let finding = torch.map(|torch| {
            let help = "`uv pip install torch --torch-backend=rocm6.4`, or the version of your ROCm";
            finding(Severity::Error, "torch-rocm", "torch was built without ROCm", format!("torch {torch}"), help)
        });
        finding.into_iter().collect()
    }
}

/// A tool on the path, or where ROCm is installed.
fn find(machine: &Machine, name: &str) -> Option<PathBuf> {
    machine.tool(name).or_else(|| machine.installed(&format!("/opt/rocm/bin/{name}")))
}

fn ask_amd_smi(machine: &Machine, tool: &Path) -> Result<Inventory, Queried> {
    let asked = |command: &str| Queried::new(DeviceKind::Rocm, format!("amd-smi {command}"));
    let answer = |arguments: &[&str]| {
        let asked = || asked(arguments[0]);
        let text = machine.run(tool, arguments).map_err(|error| asked().failed(error.to_string()))?;
        let said = || asked().failed(format!("its answer is no list of GPUs: {}", crate::tool::said("", &text)));
        amd_smi::read(&text).ok_or_else(said)
    };
    let fixed = answer(&amd_smi::STATIC)?;
    let metric = answer(&amd_smi::METRIC)?;
    // Names alone are no reason to fail.
    let list = amd_smi::LIST.into_iter().find_map(|arguments| answer(arguments).ok()).unwrap_or_default();
    let devices = amd_smi::devices(&list, &fixed, &metric);
    let mut first = asked("static");
    first.version = amd_smi::version(&fixed);
    let mut inventory = Inventory { devices, links: Vec::new(), asked: vec![first] };
    if inventory.devices.len() > 1 {
        match answer(&amd_smi::TOPOLOGY) {
            Ok(topology) => inventory.links = amd_smi::links_of(&inventory.devices, &amd_smi::links(&topology)),
            Err(asked) => inventory.asked.push(asked),
        }
    }
    Ok(inventory)
}

fn ask_rocm_smi(machine: &Machine, tool: &Path) -> Result<Inventory, Queried> {
    let asked = || Queried::new(DeviceKind::Rocm, "rocm-smi");
    let answer = |arguments: &[&str]| {
        let text = machine.run(tool, arguments).map_err(|error| asked().failed(error.to_string()))?;
        let said = || asked().failed(format!("its answer holds no JSON: {}", crate::tool::said("", &text)));
        rocm_smi::Answer::read(&text).ok_or_else(said)
    };
    let gpus = answer(&rocm_smi::GPUS)?;
    let mut first = asked();
    first.version = gpus.version();
    let mut inventory = Inventory { devices: gpus.devices(), links: Vec::new(), asked: vec![first] };
    if !inventory.devices.is_empty() {
        match answer(&rocm_smi::LINKS) {
            Ok(topology) => inventory.put_topology(&topology),
            Err(asked) => inventory.asked.push(Queried { tool: "rocm-smi --showtopo".to_owned(), ..asked }),
        }
    }
    Ok(inventory)
}

impl Inventory {
    fn put_topology(&mut self, topology: &rocm_smi::Answer) {
        for device in &mut self.devices {
            device.numa_node = device.physical_index.and_then(|number| topology.numa_node(number));
        }
        let index = |number: u32| {
            self.devices.iter().find(|device| device.physical_index == Some(number)).map(|device| device.index)
        };
        let links = topology.links().into_iter().filter_map(|mut link| {
            let (a, b) = (index(link.between[0])?, index(link.between[1])?);
            link.between = [a.min(b), a.max(b)];
            Some(link)
        });
        self.links = links.collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::LinkKind;
    use crate::test_machine::TestMachine;

    fn rocm_smi(machine: &TestMachine) {
        let (gpus, topo) = (
            include_str!("../../tests/rocm-smi/mi300x-x2.json"),
            include_str!("../../tests/rocm-smi/mi300x-x2.topo.json"),
        );
        machine.tool(
            "rocm-smi",
            &format!("if [ \"$1\" = --showtopo ]; then cat <<'END'\n{topo}END\nelse cat <<'END'\n{gpus}END\nfi"),
        );
    }

    #[test]
    fn the_older_tool() {
        let machine = TestMachine::new();
        rocm_smi(&machine);
        let inventory = Rocm.ask(&machine.machine());
        assert_eq!(inventory.devices.len(), 2);
        assert_eq!(inventory.devices[1].numa_node, Some(1));
        assert_eq!(inventory.link(DeviceKind::Rocm, 0, 1), LinkKind::Xgmi);
        assert_eq!(inventory.asked.len(), 1);
    }

    #[test]
    fn the_newer_tool_is_asked_first() {
        let machine = TestMachine::new();
        rocm_smi(&machine);
        let answers = [
            ("static", include_str!("../../tests/rocm-smi/amd-smi-static.json")),
            ("metric", include_str!("../../tests/rocm-smi/amd-smi-metric.json")),
            ("list", include_str!("../../tests/rocm-smi/amd-smi-list.json")),
            ("topology", r#"[{"gpu": 0, "links": [{"gpu": 1, "link_type": "XGMI"}]}]"#),
        ];
        let cases = answers.map(|(command, answer)| format!("{command}) cat <<'END'\n{answer}\nEND\n;;\n")).concat();
        machine.tool("amd-smi", &format!("case \"$1\" in\n{cases}esac"));
        let inventory = Rocm.ask(&machine.machine());
        assert_eq!(inventory.asked[0].tool, "amd-smi static");
        assert_eq!(inventory.devices[0].uuid.as_deref(), Some("acff74a1-0000-1000-809c-cd4bbc0d9c02"));
        assert_eq!(inventory.link(DeviceKind::Rocm, 0, 1), LinkKind::Xgmi);
    }

    #[test]
    fn where_the_newer_fails_the_older_is_asked() {
        let machine = TestMachine::new();
        rocm_smi(&machine);
        machine.tool("amd-smi", "echo 'ModuleNotFoundError: No module named amdsmi' >&2; exit 1");
        assert_eq!(Rocm.ask(&machine.machine()).devices.len(), 2);
    }

    #[test]
    fn where_both_fail_both_are_told() {
        let machine = TestMachine::new();
        machine.tool("amd-smi", "exit 1");
        machine.tool("rocm-smi", "echo 'Driver not initialized (amdgpu not found in modules)'");
        let inventory = Rocm.ask(&machine.machine());
        assert_eq!(inventory.asked.len(), 2);
        assert!(inventory.asked[1].problem.as_ref().unwrap().contains("amdgpu not found"));
    }
}
