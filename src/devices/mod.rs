//! `pipeline devices`: what this machine has to compute on, and (in `devices/`) what is wrong with it.

mod doctor;

use std::io::{self, Write};

use ::devices::lease::{LeaseFolder, LeaseState};
use ::devices::{CpuList, Device, DeviceKind, Inventory, Link, LinkKind, Machine, Queried};
use clap::{Args, Subcommand};
use engine::parameter::Period;
use serde::Serialize;
use stages::compute::kernels::{self, Instructions, Measurement, Rates};

use crate::render::Failure;
use crate::table::Table;
use crate::terminal::Look;
use crate::{Format, words};

/// List what this machine has to compute on: CPUs, GPUs, NPUs, their memory and the links between them.
///
/// The properties and health of a device are reported by its driver's own tool: NVML or `nvidia-smi`, `npu-smi`,
/// `amd-smi` or `rocm-smi`, `system_profiler`. A tool that fails or hangs is named with its output.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true, flatten_help = true)]
pub(crate) struct DevicesArgs {
    #[command(subcommand)]
    command: Option<DevicesCommand>,
    #[command(flatten)]
    list: ListArgs,
}

#[derive(Subcommand)]
enum DevicesCommand {
    Doctor(doctor::DoctorArgs),
}

/// How a machine is asked, and its answer printed.
#[derive(Args)]
struct ListArgs {
    /// The time limit of a vendor's tool.
    #[arg(long, value_name = "DURATION", default_value = "15s")]
    tool_timeout: Period,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// The form of what `--format json` prints; it rises when a field goes or changes its meaning.
const JSON_VERSION: u32 = 1;

/// Does what was asked.
pub(crate) fn run(args: &DevicesArgs) -> Result<(), Failure> {
    match &args.command {
        Some(DevicesCommand::Doctor(args)) => doctor::run(args),
        None => list(&args.list),
    }
}

impl ListArgs {
    fn machine(&self) -> Machine {
        Machine::here().with_limit(self.tool_timeout.0)
    }
}

fn list(args: &ListArgs) -> Result<(), Failure> {
    let machine = args.machine();
    let inventory = Inventory::of(&machine, &DeviceKind::ALL);
    match args.format {
        Format::Json => crate::print_json(&MachineView::of(inventory, &machine)),
        Format::Text => Ok(print(&inventory, &machine)?),
    }
}

/// What a machine has to compute on, as a program reads it.
#[derive(Serialize)]
struct MachineView {
    version: u32,
    devices: Vec<Device>,
    links: Vec<Link>,
    numa_nodes: Vec<NumaNode>,
    asked: Vec<Queried>,
    cpu_kernels: Option<Instructions>,
    not_yet_run_on_hardware: Vec<DeviceKind>,
}

#[derive(Serialize)]
struct NumaNode {
    node: u32,
    cpus: CpuList,
}

/// This machine, and which devices runs have leased, at this moment.
#[derive(Serialize)]
pub(crate) struct Here {
    #[serde(flatten)]
    machine: MachineView,
    /// None where the machine has no place for leases.
    leases: Option<Vec<Lease>>,
}

/// A device that a run has leased.
#[derive(Serialize)]
struct Lease {
    kind: DeviceKind,
    index: u32,
    /// Who, in words, where that is known.
    held_by: Option<String>,
}

impl MachineView {
    fn of(Inventory { devices, links, asked }: Inventory, machine: &Machine) -> Self {
        let nodes = ::devices::numa_nodes(machine).into_iter();
        Self {
            version: JSON_VERSION,
            devices,
            links,
            numa_nodes: nodes.map(|(node, cpus)| NumaNode { node, cpus }).collect(),
            asked,
            cpu_kernels: kernels::of_this_machine().ok(),
            not_yet_run_on_hardware: DeviceKind::ALL
                .into_iter()
                .filter(|kind| kind.facts().untried.is_some())
                .collect(),
        }
    }
}

impl Here {
    pub(crate) fn now() -> Self {
        let machine = Machine::here();
        let inventory = Inventory::of(&machine, &DeviceKind::ALL);
        let leases = leases(&inventory);
        Self { machine: MachineView::of(inventory, &machine), leases }
    }
}

fn leases(inventory: &Inventory) -> Option<Vec<Lease>> {
    let folder = LeaseFolder::of_this_machine().ok()?;
    let held = inventory.devices.iter().filter_map(|device| match folder.standing(&device.identity()) {
        Ok(LeaseState::Held(held_by)) => Some(Lease { kind: device.kind, index: device.index, held_by }),
        Ok(LeaseState::Free) | Err(_) => None,
    });
    Some(held.collect())
}

fn print(inventory: &Inventory, machine: &Machine) -> io::Result<()> {
    let mut out = crate::screen::stdout();
    let look = Look::stdout();
    write!(out, "{}", device_table(inventory).fitted(look))?;
    for device in inventory.devices.iter().filter(|device| !device.processes.is_empty()) {
        let used = format!("{} is in use by {}", name(device), processes(device));
        writeln!(out, "{}", look.wrap(&used, 2))?;
    }
    let nodes = ::devices::numa_nodes(machine);
    if nodes.len() > 1 {
        let nodes: Vec<String> = nodes.iter().map(|(node, cpus)| format!("{node} ({cpus})")).collect();
        writeln!(out, "{}", look.wrap(&format!("NUMA nodes: {}", nodes.join(", ")), 2))?;
    }
    writeln!(out, "{}", look.wrap(&cpu_kernels(), 2))?;
    for kind in DeviceKind::ALL {
        print_links(&mut out, inventory, kind, look)?;
    }
    print_footnotes(&mut out, inventory, look)
}

/// What our own kernels compute with on the CPU, and why.
fn cpu_kernels() -> String {
    let Instructions { f32, bf16, named, measured } = match kernels::of_this_machine() {
        Ok(instructions) => instructions,
        Err(error) => return format!("CPU kernels: {error}"),
    };
    let why = match measured {
        _ if named => ", named by PIPELINE_CPU_KERNELS".to_owned(),
        None => String::new(),
        Some(Measurement { when, rates: Rates { pairs, tiles, widened }, .. }) => {
            let ways = [("pairs of bf16", pairs), ("tiles", tiles), ("widened to f32", widened)];
            let ways = ways.into_iter().filter(|(_, rate)| *rate > 0.0);
            let ways: Vec<String> = ways.map(|(way, rate)| format!("{way} {rate:.0}")).collect();
            let age = when.and_then(|when| when.elapsed().ok()).map(words::ago);
            let when = age.map(|age| format!(" {age}")).unwrap_or_default();
            format!(", the fastest way (GFLOP/s a thread, measured{when}: {})", ways.join(", "))
        }
    };
    format!("CPU kernels: f32 with {f32}, bf16 with {bf16}{why}")
}

fn device_table(inventory: &Inventory) -> Table {
    let columns = ["device", "name", "health", "memory", "free", "power", "temperature", "bus", "NUMA", "CPUs"];
    let rows: Vec<Vec<String>> = inventory.devices.iter().map(row).collect();
    // A column in which no device has anything says nothing.
    let kept: Vec<usize> =
        (0..columns.len()).filter(|&column| rows.iter().any(|row| !row[column].is_empty())).collect();
    let spared = ["CPUs", "bus", "NUMA", "temperature", "power", "free"];
    let titles = kept.iter().map(|&column| columns[column]);
    let mut table = Table::new(titles).shortening(["name"]).sparing(spared);
    for row in &rows {
        table.row(kept.iter().map(|&column| row[column].clone()));
    }
    table
}

fn row(device: &Device) -> Vec<String> {
    fn shown<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
        value.map(show).unwrap_or_default()
    }
    vec![
        name(device),
        words::visible(&device.name),
        device.health.name().to_owned(),
        shown(device.memory_total, words::bytes),
        shown(device.memory_free, words::bytes),
        shown(device.power_watts, |watts| format!("{watts:.0} W")),
        shown(device.temperature_celsius, |celsius| format!("{celsius:.0} °C")),
        shown(device.bus_id.as_deref(), words::visible),
        shown(device.numa_node, |node| node.to_string()),
        shown(device.affinity.as_ref(), ToString::to_string),
    ]
}

/// `npu:3`; the CPU is one.
pub(crate) fn name(device: &Device) -> String {
    match device.kind {
        DeviceKind::Cpu => device.kind.to_string(),
        kind => format!("{kind}:{}", device.index),
    }
}

fn processes(device: &Device) -> String {
    let process = |process: &::devices::Process| {
        let name = process.name.as_deref().map(|name| format!(" {}", words::visible(name))).unwrap_or_default();
        let memory = process.memory.map(|bytes| format!(" ({})", words::bytes(bytes))).unwrap_or_default();
        format!("process {}{name}{memory}", process.pid)
    };
    device.processes.iter().map(process).collect::<Vec<_>>().join(", ")
}

/// The matrix of links of a kind of which there are several, and what its words mean.
fn print_links(out: &mut impl Write, inventory: &Inventory, kind: DeviceKind, look: Look) -> io::Result<()> {
    let devices: Vec<&Device> = inventory.of_kind(kind).collect();
    if devices.len() < 2 {
        return Ok(());
    }
    let mut table = Table::new(["".to_owned()].into_iter().chain(devices.iter().map(|device| name(device))));
    let mut seen = Vec::new();
    for from in &devices {
        let links = devices.iter().map(|to| inventory.link(kind, from.index, to.index));
        let links: Vec<LinkKind> = links.collect();
        table.row([name(from)].into_iter().chain(links.iter().map(ToString::to_string)));
        seen.extend(links);
    }
    seen.sort_unstable_by(|a, b| b.cmp(a));
    seen.dedup_by_key(|link| link.in_words());
    writeln!(out, "\n{}", table.fitted(look))?;
    for link in seen {
        writeln!(out, "{}", look.wrap(&format!("{:<5} {}", link.to_string(), link.in_words()), 6))?;
    }
    Ok(())
}

fn print_footnotes(out: &mut impl Write, inventory: &Inventory, look: Look) -> io::Result<()> {
    let kinds = inventory.devices.chunk_by(|one, next| one.kind == next.kind);
    let kinds: Vec<(DeviceKind, usize)> = kinds.map(|devices| (devices[0].kind, devices.len())).collect();
    let mut notes = Vec::new();
    for asked in &inventory.asked {
        if let Some(problem) = &asked.problem {
            notes.push(format!("{}: {}", asked.tool, words::visible(problem)));
        }
    }
    if matches!(kinds[..], [(DeviceKind::Cpu, _)]) && notes.is_empty() {
        let tools: Vec<&str> = DeviceKind::ALL.into_iter().flat_map(|kind| kind.facts().tools).copied().collect();
        if let [first, others @ .., last] = tools.as_slice() {
            notes.push(format!("no GPU or NPU: neither {first} nor {} or {last} is installed", others.join(", ")));
        }
    }
    notes.extend(kinds.into_iter().filter_map(|(kind, count)| kind.not_yet_run(count)));
    if !notes.is_empty() {
        writeln!(out)?;
    }
    notes.iter().try_for_each(|note| writeln!(out, "{}", look.wrap(note, 2)))
}
