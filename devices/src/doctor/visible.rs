//! Lists of visible devices: which ids they may hold, in which order, and who reads them.

use std::collections::BTreeSet;

use super::{Finding, Severity, Subject, Variable, VariableSource, finding};
use crate::{DeviceKind, Inventory, ListForm, VisibleDevices};

/// Looks at every list of visible devices that is set.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let of_kind = |kind: DeviceKind| Some((kind, kind.facts().visible?));
    let kinds: Vec<(DeviceKind, VisibleDevices)> = DeviceKind::ALL.into_iter().filter_map(of_kind).collect();
    let mut findings = Vec::new();
    for variable in subject.variables {
        let is_read =
            |visible: &VisibleDevices| [Some(visible.variable), visible.outer].contains(&Some(&variable.name));
        if let Some((kind, visible)) = kinds.iter().find(|(_, visible)| is_read(visible)) {
            let (kind, form, inventory) = (*kind, visible.form, subject.inventory);
            findings.extend(check_list(&List { variable, kind, form, inventory }));
        }
    }
    findings.extend(kinds.iter().filter_map(|(kind, visible)| container_variable(subject, *kind, visible)));
    findings.extend(kinds.iter().filter_map(|(kind, _)| kind.vendor().check_visible(subject)));
    findings
}

struct List<'a> {
    variable: &'a Variable,
    kind: DeviceKind,
    form: ListForm,
    inventory: &'a Inventory,
}

impl List<'_> {
    fn finding(&self, severity: Severity, check: &'static str, message: String, help: String) -> Finding {
        finding(severity, check, format!("`{}` {message}", self.variable.name), self.variable.seen(), help)
    }
}

fn check_list(list: &List) -> Vec<Finding> {
    let text = &list.variable.value;
    if text.is_empty() {
        let help = format!("unset it to see all, or give ids such as {}=0,1", list.variable.name);
        return vec![list.finding(
            Severity::Warning,
            "visible-none",
            "is set and empty, which hides every device".to_owned(),
            help,
        )];
    }
    let parts: Vec<&str> = text.split(',').collect();
    let ids: Vec<u32> = parts.iter().map_while(|part| id(part, list.form)).collect();
    let mut findings = Vec::new();
    if ids.len() < parts.len() && !all_named(&parts, list.form) {
        let (bad, read) = (parts[ids.len()], ids.len());
        let help = format!("write integers with commas and nothing between them, such as {}=0,1", list.variable.name);
        let message = format!("is read up to `{bad}` only: {read} of its {} ids count", parts.len());
        findings.push(list.finding(Severity::Error, "visible-form", message, help));
    }
    findings.extend(repeated(list, &ids));
    findings.extend(out_of_range(list, &ids));
    findings.extend(not_ascending(list, &ids));
    findings
}

/// What is read as an id. Ascend's runtime stops at anything but a digit, a blank too; CUDA and HIP skip blanks.
fn id(part: &str, form: ListForm) -> Option<u32> {
    let part = if form == ListForm::Ascending { part } else { part.trim() };
    part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok())?
}

/// CUDA and HIP take UUIDs too.
fn all_named(parts: &[&str], form: ListForm) -> bool {
    form == ListForm::Any
        && parts.iter().all(|part| ["GPU-", "MIG-"].iter().any(|start| part.trim().starts_with(start)))
}

fn repeated(list: &List, ids: &[u32]) -> Option<Finding> {
    let mut seen = BTreeSet::new();
    let twice = ids.iter().find(|id| !seen.insert(**id))?;
    let once: Vec<String> = seen.iter().map(u32::to_string).collect();
    let help = format!("{}={}", list.variable.name, once.join(","));
    Some(list.finding(Severity::Error, "visible-repeated", format!("holds {twice} more than once"), help))
}

fn out_of_range(list: &List, ids: &[u32]) -> Option<Finding> {
    let count = list.inventory.of_kind(list.kind).count();
    let kind = list.kind.in_words();
    if count == 0 {
        let help = "unset it, or see why the driver shows none: `pipeline devices`".to_owned();
        return Some(list.finding(
            Severity::Warning,
            "visible-no-device",
            format!("is set, and there is not {kind} here"),
            help,
        ));
    }
    let beyond = ids.iter().find(|id| **id as usize >= count)?;
    let message = format!("holds {beyond}, and there are {count} devices, counted from 0");
    let help = match list.form {
        ListForm::Ascending => format!(
            "ids count what this process sees, in a container from 0 whatever their physical numbers are: 0 to {}",
            count - 1
        ),
        ListForm::Any => format!("ids reach from 0 to {}; those from {beyond} on are not read", count - 1),
    };
    Some(list.finding(Severity::Error, "visible-range", message, help))
}

fn not_ascending(list: &List, ids: &[u32]) -> Option<Finding> {
    if ids.is_sorted() {
        return None;
    }
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let sorted = sorted.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let maker = list.kind.facts().maker.unwrap_or_default();
    let (severity, help) = match list.form {
        ListForm::Ascending => (
            Severity::Error,
            format!("{maker}'s runtime accepts ids in ascending order only: {}={sorted}", list.variable.name),
        ),
        ListForm::Any => (Severity::Note, format!("a process sees them in this order: its device 0 is {}", ids[0])),
    };
    Some(list.finding(severity, "visible-order", "is not in ascending order".to_owned(), help))
}

/// A variable that the container's runtime reads, set where only a process reads.
fn container_variable(subject: &Subject, kind: DeviceKind, visible: &VisibleDevices) -> Option<Finding> {
    let (name, process) = (visible.of_containers?, visible.variable);
    let variable = subject.variables.iter().rev().find(|variable| variable.name == name)?;
    let ids: Option<Vec<u32>> = variable.value.split(',').map(|part| part.trim().parse().ok()).collect();
    // `all`, `none` and `void` are set in every image of NVIDIA's; ranges and UUIDs say nothing of what a process is to
    // see.
    let ids = ids?;
    let seen = subject.inventory.of_kind(kind).count();
    let in_file = matches!(variable.place, VariableSource::File(_));
    // Where it did its work, exactly so many devices are left. Then it was right, though it says nothing to this
    // process.
    if !in_file && (seen == 0 || seen == ids.len()) {
        return None;
    }
    let message = format!(
        "`{name}` chooses devices for a container when it is started, and nothing for a process: {seen} are seen"
    );
    let chosen = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let help = format!(
        "for a process set {process}={chosen}, or let `resources: {{ device: {kind}, count: {} }}` choose",
        ids.len()
    );
    let severity = if subject.variable(process).is_some() { Severity::Note } else { Severity::Error };
    Some(finding(severity, "visible-container", message, variable.seen(), help))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::{TestMachine, TestSubject, variable as set};

    fn machine(kind: DeviceKind, names: &[&str]) -> Inventory {
        TestSubject::new(&TestMachine::new(), kind, names).inventory
    }

    fn found(inventory: &Inventory, variables: &[Variable]) -> Vec<Finding> {
        let (inventory, variables) = (inventory.clone(), variables.to_vec());
        let nothing = TestSubject::new(&TestMachine::new(), DeviceKind::Cpu, &[]);
        check(&TestSubject { inventory, variables, ..nothing }.subject())
    }

    fn checks(inventory: &Inventory, variables: &[Variable]) -> Vec<(&'static str, Severity)> {
        found(inventory, variables).into_iter().map(|finding| (finding.check, finding.severity)).collect()
    }

    #[test]
    fn ascend_stops_at_a_blank_and_wants_order() {
        let npus = machine(DeviceKind::Npu, &["910B3"; 8]);
        let of = |value: &str| checks(&npus, &[set("ASCEND_RT_VISIBLE_DEVICES", value)]);
        assert_eq!(of("0,1,2,3"), []);
        assert_eq!(of("0, 1"), [("visible-form", Severity::Error)]);
        assert_eq!(of("1,0"), [("visible-order", Severity::Error)]);
        assert_eq!(of("0,0"), [("visible-repeated", Severity::Error)]);
        assert_eq!(of("6,7,8"), [("visible-range", Severity::Error)]);
        assert_eq!(of("0-3"), [("visible-form", Severity::Error)]);
        assert_eq!(of(""), [("visible-none", Severity::Warning)]);
    }

    #[test]
    fn cuda_takes_blanks_names_and_any_order() {
        let gpus = machine(DeviceKind::Cuda, &["H100"; 2]);
        let of = |value: &str| checks(&gpus, &[set("CUDA_VISIBLE_DEVICES", value)]);
        assert_eq!(of("0, 1"), []);
        assert_eq!(of("GPU-5d5ba0d6,GPU-7"), []);
        assert_eq!(of("1,0"), [("visible-order", Severity::Note)]);
        assert_eq!(of("0,2"), [("visible-range", Severity::Error)]);
        assert_eq!(of("-1"), [("visible-form", Severity::Error)]);
    }

    #[test]
    fn a_list_without_devices() {
        let none = Inventory::default();
        assert_eq!(checks(&none, &[set("HIP_VISIBLE_DEVICES", "0")]), [("visible-no-device", Severity::Warning)]);
    }

    #[test]
    fn the_containers_variable_says_nothing_to_a_process() {
        let npus = machine(DeviceKind::Npu, &["910B3"; 8]);
        let seed = set("ASCEND_VISIBLE_DEVICES", "0,1,2,3");
        let findings = found(&npus, std::slice::from_ref(&seed));
        assert_eq!(findings.len(), 1);
        assert!(findings[0].help.contains("ASCEND_RT_VISIBLE_DEVICES=0,1,2,3"), "{}", findings[0].help);
        // In the container that it made there are four left.
        assert_eq!(checks(&machine(DeviceKind::Npu, &["910B3"; 4]), &[seed]), []);
        let file =
            Variable { place: VariableSource::File("job.yaml:3:5".to_owned()), ..set("ASCEND_VISIBLE_DEVICES", "0,1") };
        assert_eq!(checks(&machine(DeviceKind::Npu, &["910B3"; 2]), &[file]), [("visible-container", Severity::Error)]);
        assert_eq!(checks(&machine(DeviceKind::Cuda, &["H100"]), &[set("NVIDIA_VISIBLE_DEVICES", "all")]), []);
    }

    #[test]
    fn two_lists_and_two_orders() {
        let gpus = machine(DeviceKind::Rocm, &["MI300X"; 4]);
        let both = [set("HIP_VISIBLE_DEVICES", "0"), set("ROCR_VISIBLE_DEVICES", "2,3")];
        assert_eq!(checks(&gpus, &both), [("visible-twice", Severity::Warning)]);
        let mixed = machine(DeviceKind::Cuda, &["T400", "RTX 4090"]);
        let list = set("CUDA_VISIBLE_DEVICES", "1");
        assert_eq!(checks(&mixed, std::slice::from_ref(&list)), [("visible-cuda-order", Severity::Warning)]);
        assert_eq!(checks(&mixed, &[list, set("CUDA_DEVICE_ORDER", "PCI_BUS_ID")]), []);
    }
}
