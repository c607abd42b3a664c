//! Ports at which ranks meet.

use std::ops::RangeInclusive;

use super::{Finding, Severity, Subject};
use crate::{DeviceKind, Machine};

/// Where HCCL begins unless it is told otherwise, and how many it takes.
const HCCL_BASE: u16 = 60000;
const HCCL_PORTS: u16 = 16;

/// Looks at the port of the rendezvous where one is set, and at HCCL's where there are NPUs.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let listening = listening(subject.machine);
    let mut findings: Vec<Finding> = master_port(subject, &listening).into_iter().collect();
    if subject.has(DeviceKind::Npu) {
        let ports = hccl_ports(subject);
        findings.extend(hccl_in_use(&ports, &listening));
        findings.extend(not_reserved(&ports, subject.machine));
    }
    findings
}

fn master_port(subject: &Subject, listening: &[u16]) -> Option<Finding> {
    let text = subject.variable("MASTER_PORT")?;
    let (message, help) = match text.parse::<u16>() {
        Err(_) | Ok(0) => (format!("`MASTER_PORT` cannot be `{text}`"), "it must be a port from 1 to 65535".to_owned()),
        Ok(port) if listening.contains(&port) => (
            format!("port {port}, at which ranks are to meet, is in use"),
            format!("`ss -ltnp 'sport = :{port}'` shows by whom; use another, or unset MASTER_PORT"),
        ),
        Ok(_) => return None,
    };
    Some(Finding {
        severity: Severity::Error,
        check: "master-port",
        message,
        seen: format!("MASTER_PORT={text}"),
        help,
    })
}

fn hccl_ports(subject: &Subject) -> RangeInclusive<u16> {
    let base = subject.variable("HCCL_IF_BASE_PORT").and_then(|text| text.parse().ok()).unwrap_or(HCCL_BASE);
    base..=base.saturating_add(HCCL_PORTS - 1)
}

fn hccl_in_use(ports: &RangeInclusive<u16>, listening: &[u16]) -> Option<Finding> {
    let taken: Vec<String> = listening.iter().filter(|port| ports.contains(port)).map(u16::to_string).collect();
    if taken.is_empty() {
        return None;
    }
    Some(Finding {
        severity: Severity::Error,
        check: "hccl-ports",
        message: format!("ports that HCCL uses ({} to {}) are in use", ports.start(), ports.end()),
        seen: format!("something listens at {}", taken.join(", ")),
        help: "`ss -ltnp` shows what; set HCCL_IF_BASE_PORT to the first of 16 free ports".to_owned(),
    })
}

/// Ports that the kernel may give to any connection of anybody, at the moment that HCCL wants them.
fn not_reserved(ports: &RangeInclusive<u16>, machine: &Machine) -> Option<Finding> {
    let range = machine.read("/proc/sys/net/ipv4/ip_local_port_range")?;
    let mut range = range.split_whitespace().filter_map(|port| port.parse::<u16>().ok());
    let given = range.next()?..=range.next()?;
    let reserved = machine.read("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    let reserved: crate::CpuList = reserved.parse().unwrap_or_default();
    let open = ports.clone().find(|port| given.contains(port) && !reserved.cpus().contains(&u32::from(*port)))?;
    Some(Finding {
        severity: Severity::Warning,
        check: "hccl-ports-reserved",
        message: format!("the kernel may give port {open}, which HCCL uses, to any connection"),
        seen: format!(
            "local ports are {} to {}, and reserved are {}",
            given.start(),
            given.end(),
            if reserved.is_empty() { "none".to_owned() } else { reserved.to_string() }
        ),
        help: format!("as root: sysctl -w net.ipv4.ip_local_reserved_ports={}-{}", ports.start(), ports.end()),
    })
}

/// The ports that something on the machine listens at.
fn listening(machine: &Machine) -> Vec<u16> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].iter().filter_map(|path| machine.read(path));
    let mut ports: Vec<u16> =
        tables.flat_map(|table| table.lines().filter_map(listening_port).collect::<Vec<_>>()).collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// `0: 00000000:EA60 00000000:0000 0A …`, where 0A is the state of listening.
fn listening_port(line: &str) -> Option<u16> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, local, _, "0A", ..] = fields[..] else { return None };
    u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{Limits, Python, Variable, VariableSource};
    use crate::test_machine::TestMachine;
    use crate::{Device, Inventory};

    const TCP: &str = "  sl  local_address rem_address   st tx_queue rx_queue\n   0: 00000000:EA63 00000000:0000 0A 00000000:00000000\n   \
                       1: 0100007F:733C 00000000:0000 0A 0\n   2: 0100007F:EA64 0100007F:0016 01 0\n";

    fn checks(machine: &TestMachine, variables: &[(&str, &str)]) -> Vec<Finding> {
        let machine = machine.machine();
        let inventory = Inventory { devices: vec![Device::new(DeviceKind::Npu, 0, "910B3")], ..Inventory::default() };
        let variables: Vec<Variable> = variables
            .iter()
            .map(|(name, value)| Variable {
                name: (*name).to_owned(),
                value: (*value).to_owned(),
                place: VariableSource::Environment,
            })
            .collect();
        let python = Python::missing();
        check(&Subject {
            machine: &machine,
            inventory: &inventory,
            variables: &variables,
            limits: Limits::default(),
            python: &python,
        })
    }

    #[test]
    fn ports_in_use() {
        let machine = TestMachine::new();
        machine.file("proc/net/tcp", TCP);
        let findings = checks(&machine, &[("MASTER_PORT", "29500")]);
        assert_eq!(findings.iter().map(|finding| finding.check).collect::<Vec<_>>(), ["master-port", "hccl-ports"]);
        // One that is only connected is free to listen at.
        assert_eq!(findings[1].seen, "something listens at 60003");
        assert!(checks(&machine, &[("MASTER_PORT", "29501"), ("HCCL_IF_BASE_PORT", "50000")]).is_empty());
        assert_eq!(checks(&machine, &[("MASTER_PORT", "x"), ("HCCL_IF_BASE_PORT", "50000")])[0].check, "master-port");
    }

    #[test]
    fn ports_that_are_not_reserved() {
        let machine = TestMachine::new();
        machine.file("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n");
        machine.file("proc/sys/net/ipv4/ip_local_reserved_ports", "\n");
        let finding = checks(&machine, &[]).pop().unwrap();
        assert_eq!(finding.check, "hccl-ports-reserved");
        assert!(finding.help.ends_with("=60000-60015"));
        machine.file("proc/sys/net/ipv4/ip_local_reserved_ports", "60000-60015\n");
        assert!(checks(&machine, &[]).is_empty());
    }
}
