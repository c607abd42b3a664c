//! Whether the driver's device nodes are there, and may be opened.

use std::os::unix::fs::MetadataExt;

use nix::unistd::{AccessFlags, access};

use super::{Finding, Severity, Subject, finding};
use crate::{DeviceKind, DeviceNodes, Machine};

/// Looks at the nodes of every kind of device that there is.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings = Vec::new();
    for kind in DeviceKind::ALL.into_iter().filter(|kind| subject.has(*kind)) {
        let Some(nodes) = kind.vendor().nodes(subject) else { continue };
        let (there, missing): (Vec<&String>, Vec<&String>) =
            nodes.paths.iter().partition(|node| subject.machine.path(node).exists());
        let closed: Vec<&String> = there.into_iter().filter(|node| !may_open(subject.machine, node)).collect();
        findings.extend(gone(kind, &nodes, &missing));
        findings.extend(locked(kind, &nodes, &closed, subject.machine));
    }
    findings
}

fn may_open(machine: &Machine, node: &str) -> bool {
    access(&machine.path(node), AccessFlags::R_OK | AccessFlags::W_OK).is_ok()
}

fn gone(kind: DeviceKind, nodes: &DeviceNodes, missing: &[&String]) -> Option<Finding> {
    if missing.is_empty() {
        return None;
    }
    let message = format!("device nodes of {} are missing", kind.in_words());
    let seen = format!("there is no {}", listed(missing));
    Some(finding(Severity::Error, "device-node-missing", message, seen, nodes.when_missing))
}

fn locked(kind: DeviceKind, nodes: &DeviceNodes, closed: &[&String], machine: &Machine) -> Option<Finding> {
    let first = closed.first()?;
    let group = std::fs::metadata(machine.path(first)).ok().map(|found| group_name(machine, found.gid()));
    let help = match group.filter(|_| nodes.are_of_a_group) {
        None => "`ls -l` shows who may".to_owned(),
        Some(group) => format!("`sudo usermod -aG {group} $USER`, and log in again"),
    };
    let message = format!("device nodes of {} may not be opened by this user", kind.in_words());
    Some(finding(Severity::Error, "device-node-closed", message, listed(closed), help))
}

fn listed(paths: &[&String]) -> String {
    paths.iter().map(|path| path.as_str()).collect::<Vec<_>>().join(", ")
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
    use crate::Device;
    use crate::test_machine::{TestMachine, TestSubject};

    fn checks(machine: &TestMachine, kind: DeviceKind) -> Vec<Finding> {
        let mut tested = TestSubject::new(machine, kind, &["x"]);
        tested.inventory.devices[0] = Device { physical_index: Some(4), ..Device::new(kind, 0, "x") };
        check(&tested.subject())
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
        let nodes = DeviceNodes { paths: Vec::new(), when_missing: "", are_of_a_group: true };
        let finding = locked(DeviceKind::Rocm, &nodes, &[&"/etc/group".to_owned()], &machine).unwrap();
        assert_eq!(finding.check, "device-node-closed");
        assert!(finding.help.contains("usermod"), "{}", finding.help);
        assert_eq!(locked(DeviceKind::Rocm, &nodes, &[], &machine), None);
    }

    #[test]
    fn groups_are_found_by_number() {
        let machine = TestMachine::new();
        machine.file("etc/group", "root:x:0:\nrender:x:109:ci\n");
        let machine = machine.machine();
        assert_eq!((group_name(&machine, 109), group_name(&machine, 7)), ("render".to_owned(), "7".to_owned()));
    }
}
