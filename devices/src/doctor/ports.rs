//! Ports at which ranks meet.

use super::{Finding, Severity, Subject, finding};
use crate::{DeviceKind, Machine};

/// Looks at the port of the rendezvous where one is set, and at those of the vendors whose devices there are.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let listening = listening(subject.machine);
    let mut findings: Vec<Finding> = master_port(subject, &listening).into_iter().collect();
    let kinds = DeviceKind::ALL.into_iter().filter(|kind| subject.has(*kind));
    findings.extend(kinds.flat_map(|kind| kind.vendor().check_ports(subject, &listening)));
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
    Some(finding(Severity::Error, "master-port", message, format!("MASTER_PORT={text}"), help))
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
    use crate::test_machine::{TestMachine, TestSubject, variable};

    const TCP: &str = "  sl  local_address rem_address   st tx_queue rx_queue\n   0: 00000000:EA63 00000000:0000 0A 00000000:00000000\n   \
                       1: 0100007F:733C 00000000:0000 0A 0\n   2: 0100007F:EA64 0100007F:0016 01 0\n";

    fn checks(machine: &TestMachine, variables: &[(&str, &str)]) -> Vec<Finding> {
        let variables = variables.iter().map(|(name, value)| variable(name, value)).collect();
        let tested = TestSubject { variables, ..TestSubject::new(machine, DeviceKind::Npu, &["910B3"]) };
        check(&tested.subject())
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
