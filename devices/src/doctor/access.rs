//! Whether the driver's device nodes are there, and may be opened.

use std::os::unix::fs::MetadataExt;

use nix::unistd::{AccessFlags, access};

use super::{Finding, Severity, Subject};
use crate::{DeviceKind, Machine};

/// Looks at the nodes of every kind of device that there is.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings = Vec::new();
    for kind in [DeviceKind::Cuda, DeviceKind::Npu, DeviceKind::Rocm] {
        if !subject.has(kind) {
            continue;
        }
        let (missing, closed): (Vec<String>, Vec<String>) = {
            let nodes = nodes(subject, kind);
            let (there, missing): (Vec<_>, Vec<_>) =
                nodes.into_iter().partition(|node| subject.machine.path(node).exists());
            (missing, there.into_iter().filter(|node| !may_open(subject.machine, node)).collect())
        };
        findings.extend(gone(kind, &missing));
        findings.extend(locked(kind, &closed, subject.machine));
    }
    findings
}

/// What a process opens to compute on the devices of a kind.
fn nodes(subject: &Subject, kind: DeviceKind) -> Vec<String> {
    let numbers = subject.inventory.of_kind(kind).filter_map(|device| device.physical_index);
    match kind {
        DeviceKind::Npu => {
            let common = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"].map(str::to_owned);
            numbers.map(|number| format!("/dev/davinci{number}")).chain(common).collect()
        }
        DeviceKind::Cuda => {
            let common = ["/dev/nvidiactl", "/dev/nvidia-uvm"].map(str::to_owned);
            numbers.map(|number| format!("/dev/nvidia{number}")).chain(common).collect()
        }
        DeviceKind::Rocm => {
            let render = subject.machine.numbered("/dev/dri", "renderD");
            let render = render.into_iter().map(|number| format!("/dev/dri/renderD{number}"));
            ["/dev/kfd".to_owned()].into_iter().chain(render).collect()
        }
        DeviceKind::Cpu | DeviceKind::Metal => Vec::new(),
    }
}

fn may_open(machine: &Machine, node: &str) -> bool {
    access(&machine.path(node), AccessFlags::R_OK | AccessFlags::W_OK).is_ok()
}

fn gone(kind: DeviceKind, missing: &[String]) -> Option<Finding> {
    if missing.is_empty() {
        return None;
    }
    let help = match kind {
        DeviceKind::Npu => {
            "load the driver, or pass them to the container (`--device=/dev/davinci0 …`, or the Ascend container runtime)"
        }
        DeviceKind::Cuda => "`nvidia-modprobe -u -c=0` makes them, or `--gpus all` for a container",
        _ => "`modprobe amdgpu`, or `--device=/dev/kfd --device=/dev/dri` for a container",
    };
    Some(Finding {
        severity: Severity::Error,
        check: "device-node-missing",
        message: format!("device nodes of {} are missing", kind.in_words()),
        seen: format!("there is no {}", missing.join(", ")),
        help: help.to_owned(),
    })
}

fn locked(kind: DeviceKind, closed: &[String], machine: &Machine) -> Option<Finding> {
    let first = closed.first()?;
    let group = std::fs::metadata(machine.path(first)).ok().map(|found| group_name(machine, found.gid()));
    let help = match (kind, group) {
        (DeviceKind::Cuda, _) | (_, None) => "`ls -l` shows who may".to_owned(),
        (_, Some(group)) => format!("`sudo usermod -aG {group} $USER`, and log in again"),
    };
    Some(Finding {
        severity: Severity::Error,
        check: "device-node-closed",
        message: format!("device nodes of {} may not be opened by this user", kind.in_words()),
        seen: closed.join(", "),
        help,
    })
}

fn group_name(machine: &Machine, id: u32) -> String {
    let groups = machine.read("/etc/group").unwrap_or_default();
    let named = groups.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        (fields.get(2)?.parse() == Ok(id)).then(|| fields[0].to_owned())
    });
    named.unwrap_or_else(|| id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{Limits, Python};
    use crate::test_machine::TestMachine;
    use crate::{Device, Inventory};

    fn checks(machine: &TestMachine, kind: DeviceKind) -> Vec<Finding> {
        let machine = machine.machine();
        let device = Device { physical_index: Some(4), ..Device::new(kind, 0, "x") };
        let inventory = Inventory { devices: vec![device], ..Inventory::default() };
        let python = Python::missing();
        check(&Subject {
            machine: &machine,
            inventory: &inventory,
            variables: &[],
            limits: Limits::default(),
            python: &python,
        })
    }

    #[test]
    fn nodes_that_are_missing_are_named() {
        let machine = TestMachine::new();
        machine.file("dev/davinci4", "");
        machine.file("dev/davinci_manager", "");
        machine.file("dev/hisi_hdc", "");
        let findings = checks(&machine, DeviceKind::Npu);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].seen, "there is no /dev/devmm_svm");
        machine.file("dev/devmm_svm", "");
        assert!(checks(&machine, DeviceKind::Npu).is_empty());
    }

    #[test]
    fn a_node_that_is_closed_names_its_group() {
        let machine = TestMachine::new();
        machine.file("etc/group", "root:x:0:\nrender:x:109:ci\n");
        let machine = machine.machine();
        // Root may open anything: the words are tested, not the kernel.
        let finding = locked(DeviceKind::Rocm, &["/etc/group".to_owned()], &machine).unwrap();
        assert_eq!(finding.check, "device-node-closed");
        assert!(finding.help.contains("usermod"), "{}", finding.help);
        assert_eq!(locked(DeviceKind::Rocm, &[], &machine), None);
    }

    #[test]
    fn groups_are_found_by_number() {
        let machine = TestMachine::new();
        machine.file("etc/group", "root:x:0:\nrender:x:109:ci\n");
        let machine = machine.machine();
        assert_eq!((group_name(&machine, 109), group_name(&machine, 7)), ("render".to_owned(), "7".to_owned()));
    }
}
