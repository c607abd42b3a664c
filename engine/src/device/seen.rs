//! The devices of this machine that this process may use, as they were found at a moment.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use devices::placement::{Seat, is_usable, seats};
use devices::{CpuList, DeviceKind, Inventory, Machine};

/// What was seen of the machine.
#[derive(Debug, Clone)]
pub struct Seen {
    inventory: Inventory,
    /// The device variables that were set where this process was started.
    variables: BTreeMap<&'static str, String>,
    at: Instant,
}

impl Seen {
    /// Looks at the devices of some kinds. It asks the drivers' tools, which may take seconds.
    pub fn look(kinds: &[DeviceKind]) -> Self {
        let names = DeviceKind::visible_variables();
        let variables = names.filter_map(|name| Some((name, std::env::var(name).ok()?))).collect();
        // The CPU is asked for its cores.
        let mut kinds = kinds.to_vec();
        if !kinds.contains(&DeviceKind::Cpu) {
            kinds.push(DeviceKind::Cpu);
        }
        let inventory = Inventory::of(&Machine::here(), &kinds);
        Self { inventory, variables, at: Instant::now() }
    }

    /// The devices.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// How long ago that was.
    pub fn age(&self) -> Duration {
        self.at.elapsed()
    }

    /// The devices of a kind that may be used, healthy or not.
    pub fn seats(&self, kind: DeviceKind) -> Vec<Seat<'_>> {
        seats(&self.inventory, kind, |name| self.variables.get(name).cloned())
    }

    /// Those of them that work.
    pub fn working(&self, kind: DeviceKind) -> Vec<Seat<'_>> {
        let mut seats = self.seats(kind);
        seats.retain(|seat| seat.device.health.is_usable());
        seats
    }

    /// Whether a device has room for a job that wants so much memory of it.
    pub fn has_room(seat: &Seat<'_>, memory: Option<u64>) -> bool {
        is_usable(seat.device, memory)
    }

    /// The CPUs that this process may use.
    pub fn cores(&self) -> CpuList {
        let processor = self.inventory.of_kind(DeviceKind::Cpu).next();
        processor.and_then(|processor| processor.affinity.clone()).unwrap_or_default()
    }

    /// What there is of a kind, for messages: `this machine has 6 that work (2 do not)`.
    pub fn in_words(&self, kind: DeviceKind) -> String {
        let (all, may_use, work) =
            (self.inventory.of_kind(kind).count(), self.seats(kind).len(), self.working(kind).len());
        let limit = kind.visible_variable().filter(|name| self.variables.contains_key(name) && may_use < all);
        let problem = self.inventory.asked.iter().filter(|asked| asked.device == kind);
        let problem = problem.filter_map(|asked| asked.problem.as_deref().map(|problem| (&asked.tool, problem))).next();
        match (all, limit, problem) {
            (0, _, Some((tool, problem))) => format!("this machine reports none ({tool}: {problem})"),
            (0, _, None) => "this machine has none".to_owned(),
            (_, Some(name), _) => format!("`{name}` leaves {work} of {all} to this run"),
            _ if work < all => format!("of the {all} of this machine {work} can be used: the others are not healthy"),
            _ => format!("this machine has {all}"),
        }
    }
}
