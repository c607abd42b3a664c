//! Asks every kind of driver what there is, and puts the answers together.

use std::thread;

use crate::{CpuList, Device, DeviceKind, Inventory, Machine};

impl Inventory {
    /// Asks the tools of every kind on this machine. Each has a few seconds to answer, all at the same time.
    pub fn of_this_machine() -> Self {
        Self::of(&Machine::here(), &DeviceKind::ALL)
    }

    /// As [`Inventory::of_this_machine`], of some kinds on some machine.
    pub fn of(machine: &Machine, kinds: &[DeviceKind]) -> Self {
        // At the same time: each may take its whole limit.
        let found: Vec<Self> = thread::scope(|scope| {
            let asking: Vec<_> = kinds.iter().map(|kind| scope.spawn(|| kind.vendor().ask(machine))).collect();
            asking.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
        });
        let mut all = Self::default();
        for mut found in found {
            all.devices.append(&mut found.devices);
            all.links.append(&mut found.links);
            all.asked.append(&mut found.asked);
        }
        all.devices.sort_by_key(|device| (device.kind, device.index));
        for device in &mut all.devices {
            device.look_up_place(machine);
        }
        all
    }
}

impl Device {
    /// Takes the NUMA node and the near CPUs from the kernel where the vendor's tool does not give them.
    fn look_up_place(&mut self, machine: &Machine) {
        let Some(bus_id) = &self.bus_id else { return };
        let read = |name: &str| machine.read(&format!("/sys/bus/pci/devices/{bus_id}/{name}"));
        // The kernel says -1 where the firmware says nothing.
        self.numa_node = self.numa_node.or_else(|| read("numa_node")?.trim().parse().ok());
        if self.affinity.is_none() {
            self.affinity =
                read("local_cpulist").and_then(|list| list.parse().ok()).filter(|list: &CpuList| !list.is_empty());
        }
    }
}
