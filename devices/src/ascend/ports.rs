//! The ports of HCCL, at which ranks on NPUs meet.

use std::ops::RangeInclusive;

use crate::Machine;
use crate::doctor::{Finding, Severity, Subject, finding};

/// Where HCCL begins unless it is told otherwise, and how many it takes.
const BASE: u16 = 60000;
const PORTS: u16 = 16;

pub(super) fn check(subject: &Subject, listening: &[u16]) -> Vec<Finding> {
    let ports = ports_of(subject);
    let found = [in_use(&ports, listening), not_reserved(&ports, subject.machine)];
    found.into_iter().flatten().collect()
}

fn ports_of(subject: &Subject) -> RangeInclusive<u16> {
    let base = subject.variable("HCCL_IF_BASE_PORT").and_then(|text| text.parse().ok()).unwrap_or(BASE);
    base..=base.saturating_add(PORTS - 1)
}

fn in_use(ports: &RangeInclusive<u16>, listening: &[u16]) -> Option<Finding> {
    let taken: Vec<String> = listening.iter().filter(|port| ports.contains(port)).map(u16::to_string).collect();
    if taken.is_empty() {
        return None;
    }
    let message = format!("ports that HCCL uses ({} to {}) are in use", ports.start(), ports.end());
    let seen = format!("something listens at {}", taken.join(", "));
    let help = "`ss -ltnp` shows what; set HCCL_IF_BASE_PORT to the first of 16 free ports";
    Some(finding(Severity::Error, "hccl-ports", message, seen, help))
}

/// Ports that the kernel may give to any connection of anybody, at the moment that HCCL wants them.
fn not_reserved(ports: &RangeInclusive<u16>, machine: &Machine) -> Option<Finding> {
    let range = machine.read("/proc/sys/net/ipv4/ip_local_port_range")?;
    let mut range = range.split_whitespace().filter_map(|port| port.parse::<u16>().ok());
    let given = range.next()?..=range.next()?;
    let reserved = machine.read("/proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    let reserved: crate::CpuList = reserved.parse().unwrap_or_default();
    let open = ports.clone().find(|port| given.contains(port) && !reserved.cpus().contains(&u32::from(*port)))?;
    let message = format!("the kernel may give port {open}, which HCCL uses, to any connection");
    let reserved = if reserved.is_empty() { "none".to_owned() } else { reserved.to_string() };
    let seen = format!("local ports are {} to {}, and reserved are {reserved}", given.start(), given.end());
    let help = format!("as root: sysctl -w net.ipv4.ip_local_reserved_ports={}-{}", ports.start(), ports.end());
    Some(finding(Severity::Warning, "hccl-ports-reserved", message, seen, help))
}
