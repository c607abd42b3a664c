//! Placement: which devices of a machine a process may have, and which of those that are free it gets.
//!
//! Up to [`EXACT`] free devices every choice is compared, so that none is better; beyond, the choice grows from each
//! device in turn. Equal machines give equal choices.

use std::cmp::Reverse;

use crate::{CpuList, Device, DeviceKind, Inventory, LinkKind};

/// The most free devices of which every choice is compared: 12 870 for half of them.
pub const EXACT: usize = 16;

/// A device that this process may have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seat<'a> {
    pub device: &'a Device,
    /// The number by which the device variable asks for it.
    pub id: u32,
}

/// The devices of a kind that this process may have: those of the machine, or of them those that `variable` names,
/// where whoever started this process has set the device variable.
pub fn seats<'a>(
    inventory: &'a Inventory,
    kind: DeviceKind,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<Seat<'a>> {
    let all: Vec<Seat<'a>> = inventory.of_kind(kind).map(|device| Seat { device, id: device.index }).collect();
    let visible = kind.facts().visible;
    // The numbers of the one variable count what the other leaves.
    let all = match visible.and_then(|visible| variable(visible.outer?)) {
        Some(named) => {
            let within = select(&all, &named).into_iter().zip(0..);
            within.map(|(seat, id)| Seat { id, ..seat }).collect()
        }
        None => all,
    };
    let mut seats = match visible.and_then(|visible| variable(visible.variable)) {
        Some(named) => select(&all, &named),
        None => all,
    };
    seats.sort_by_key(|seat| seat.id);
    seats
}

/// The devices that the value of a device variable names: by number, or by the begin of a UUID. As the runtimes do, it
/// ends at the first name that is none.
fn select<'a>(all: &[Seat<'a>], named: &str) -> Vec<Seat<'a>> {
    let mut found: Vec<Seat<'a>> = Vec::new();
    for name in named.split(',').map(str::trim) {
        let of_uuid = |seat: &&Seat<'_>| seat.device.uuid.as_ref().is_some_and(|uuid| uuid.starts_with(name));
        let seat = match name.parse::<u32>() {
            Ok(id) => all.iter().find(|seat| seat.id == id),
            Err(_) => all.iter().find(of_uuid).filter(|_| !name.is_empty()),
        };
        let Some(seat) = seat else { break };
        if !found.iter().any(|known| known.id == seat.id) {
            found.push(*seat);
        }
    }
    found
}

/// Whether a device can be worked on as far as its driver says, and has so much memory free. Where it is not known how
/// much is wanted, half of it has to be: a device that others have filled is one that others compute on.
pub fn is_usable(device: &Device, memory: Option<u64>) -> bool {
    let enough = |free: u64| match (memory, device.memory_total) {
        (Some(wanted), _) => free >= wanted,
        (None, Some(total)) => free >= total / 2,
        (None, None) => true,
    };
    device.health.is_usable() && device.memory_free.is_none_or(enough)
}

/// The best of the free devices, ascending; `None` where there are too few. `cores` are the CPUs that this
/// process may use.
///
/// Best are, one after the other: devices that nobody else holds memory on; the fastest links, of which the slowest
/// counts first, since all wait for it; devices near to our cores and to each other; what leaves the fastest links
/// among the others; the lowest numbers.
pub fn choose(inventory: &Inventory, free: &[Seat<'_>], count: usize, cores: &CpuList) -> Option<Vec<u32>> {
    if count == 0 || free.len() < count {
        return None;
    }
    let field = Field::new(inventory, free, cores);
    let choices = if free.len() <= EXACT { subsets(free.len(), count) } else { field.grown(count) };
    let best = choices.into_iter().min_by_key(|chosen| field.cost(chosen))?;
    Some(best.iter().map(|place| field.free[*place].id).collect())
}

/// The free devices, ascending, and what joins them.
struct Field<'a> {
    free: Vec<Seat<'a>>,
    /// Of each two, by their places in `free`.
    links: Vec<Vec<LinkKind>>,
    cores: &'a CpuList,
}

/// What speaks against a choice, the weightiest first: devices in use, links within (slowest first, the faster the
/// better), devices far from our cores, groups of cores, links torn (fastest first), the numbers themselves.
type Cost = (usize, Reverse<Vec<LinkKind>>, usize, usize, Vec<LinkKind>, Vec<usize>);

impl<'a> Field<'a> {
    fn new(inventory: &Inventory, free: &[Seat<'a>], cores: &'a CpuList) -> Self {
        let mut free = free.to_vec();
        free.sort_by_key(|seat| seat.id);
        let link = |a: &Seat<'_>, b: &Seat<'_>| inventory.link(a.device.kind, a.device.index, b.device.index);
        let links = free.iter().map(|a| free.iter().map(|b| link(a, b)).collect()).collect();
        Self { free, links, cores }
    }

    fn cost(&self, chosen: &[usize]) -> Cost {
        let pairs = chosen.iter().enumerate().flat_map(|(at, a)| chosen[at + 1..].iter().map(move |b| (*a, *b)));
        let mut within: Vec<LinkKind> = pairs.map(|(a, b)| self.links[a][b]).collect();
        within.sort_unstable();
        let others = (0..self.free.len()).filter(|place| !chosen.contains(place));
        let mut torn: Vec<LinkKind> = others.flat_map(|b| chosen.iter().map(move |a| self.links[*a][b])).collect();
        torn.sort_unstable_by_key(|link| Reverse(*link));
        let devices = || chosen.iter().map(|place| self.free[*place].device);
        let in_use = devices().filter(|device| is_in_use(device)).count();
        let far = devices().filter(|device| !is_near(device, self.cores)).count();
        let mut groups: Vec<&[u32]> = devices().filter_map(|device| Some(device.affinity.as_ref()?.cpus())).collect();
        groups.sort_unstable();
        groups.dedup();
        (in_use, Reverse(within), far, groups.len(), torn, chosen.to_vec())
    }

    /// One choice from each device on, which takes again and again the one that fits best.
    fn grown(&self, count: usize) -> Vec<Vec<usize>> {
        let from = |start: usize| {
            let mut chosen = vec![start];
            while chosen.len() < count {
                let longer = (0..self.free.len()).filter(|place| !chosen.contains(place)).map(|place| {
                    let mut longer = chosen.clone();
                    longer.push(place);
                    longer.sort_unstable();
                    longer
                });
                let best = longer.min_by_key(|longer| self.cost(longer));
                chosen = best.expect("there are more devices than are wanted");
            }
            chosen
        };
        (0..self.free.len()).map(from).collect()
    }
}

/// A desktop or a monitor takes a little; a process that computes more.
fn is_in_use(device: &Device) -> bool {
    const LITTLE: u64 = 10;
    device.memory_total.zip(device.memory_used).is_some_and(|(total, used)| used > total / LITTLE)
}

fn is_near(device: &Device, cores: &CpuList) -> bool {
    let near = |near: &CpuList| near.cpus().iter().any(|cpu| cores.cpus().binary_search(cpu).is_ok());
    device.affinity.as_ref().is_none_or(near)
}

/// Every choice of `count` places out of `of`, each ascending.
fn subsets(of: usize, count: usize) -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    let mut chosen: Vec<usize> = (0..count).collect();
    loop {
        all.push(chosen.clone());
        // The last place that can still move up; those behind it follow closely.
        let Some(at) = (0..count).rev().find(|at| chosen[*at] < of - count + at) else { return all };
        chosen[at] += 1;
        for behind in at + 1..count {
            chosen[behind] = chosen[behind - 1] + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Health, Link};

    const GIB: u64 = 1 << 30;

    /// Devices of which each two are joined as `link` says.
    fn machine(devices: u32, link: impl Fn(u32, u32) -> LinkKind) -> Inventory {
        let mut inventory = Inventory::default();
        for index in 0..devices {
            let mut device = Device::new(DeviceKind::Cuda, index, "test");
            device.uuid = Some(format!("GPU-{index}f"));
            (device.health, device.memory_total) = (Health::Ok, Some(80 * GIB));
            (device.memory_used, device.memory_free) = (Some(0), Some(80 * GIB));
            inventory.devices.push(device);
        }
        let pairs = (0..devices).flat_map(|a| (a + 1..devices).map(move |b| [a, b]));
        let link = |between: [u32; 2]| Link { device: DeviceKind::Cuda, between, link: link(between[0], between[1]) };
        inventory.links = pairs.map(link).collect();
        inventory
    }

    fn chosen(inventory: &Inventory, count: usize, taken: &[u32]) -> Option<Vec<u32>> {
        let seats = seats(inventory, DeviceKind::Cuda, |_| None);
        let free: Vec<_> = seats.into_iter().filter(|seat| !taken.contains(&seat.id)).collect();
        choose(inventory, &free, count, &CpuList::new(0..64))
    }

    /// Numbers that look random and are the same each time.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, most: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % most
        }

        fn machine(&mut self, devices: u32) -> Inventory {
            let kinds = [LinkKind::Sys, LinkKind::Phb, LinkKind::Pix, LinkKind::NvLink { count: 4 }, LinkKind::Hccs];
            let links: Vec<LinkKind> = (0..devices * devices).map(|_| kinds[self.below(5) as usize]).collect();
            let mut inventory = machine(devices, |a, b| links[(a * devices + b) as usize]);
            for device in &mut inventory.devices {
                device.affinity = Some(CpuList::new(self.below(2) as u32 * 64..self.below(2) as u32 * 64 + 64));
                device.memory_used = Some(self.below(2) * 40 * GIB);
            }
            inventory
        }
    }

    #[test]
    fn two_groups_of_four_are_not_mixed() {
        let machine = machine(8, |a, b| if a / 4 == b / 4 { LinkKind::Hccs } else { LinkKind::Phb });
        assert_eq!(chosen(&machine, 4, &[]).unwrap(), [0, 1, 2, 3]);
        assert_eq!(chosen(&machine, 4, &[1]).unwrap(), [4, 5, 6, 7]);
        assert_eq!(chosen(&machine, 2, &[0, 1, 2, 5]).unwrap(), [4, 6]);
        // One of the group that is broken into already, so that the other stays whole.
        assert_eq!(chosen(&machine, 1, &[4]).unwrap(), [5]);
        assert_eq!(chosen(&machine, 8, &[]).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(chosen(&machine, 8, &[3]), None);
    }

    #[test]
    fn devices_near_to_our_cores_come_first() {
        let mut machine = machine(4, |_, _| LinkKind::Sys);
        for device in &mut machine.devices {
            let first = if device.index < 2 { 64 } else { 0 };
            device.affinity = Some(CpuList::new(first..first + 64));
        }
        assert_eq!(chosen(&machine, 1, &[]).unwrap(), [2]);
        assert_eq!(chosen(&machine, 2, &[]).unwrap(), [2, 3]);
        // With fast links between the others, those count more.
        machine.links[0].link = LinkKind::NvLink { count: 12 };
        assert_eq!(chosen(&machine, 2, &[]).unwrap(), [0, 1]);
    }

    #[test]
    fn a_device_that_others_fill_is_not_used() {
        let mut machine = machine(2, |_, _| LinkKind::Sys);
        (machine.devices[0].memory_used, machine.devices[0].memory_free) = (Some(70 * GIB), Some(10 * GIB));
        assert!(!is_usable(&machine.devices[0], None));
        assert!(!is_usable(&machine.devices[0], Some(11 * GIB)));
        assert!(is_usable(&machine.devices[0], Some(10 * GIB)));
        assert_eq!(chosen(&machine, 1, &[]).unwrap(), [1]);
        machine.devices[1].health = Health::Critical;
        assert!(!is_usable(&machine.devices[1], Some(1)));
    }

    #[test]
    fn a_device_variable_limits_what_there_is() {
        let machine = machine(4, |_, _| LinkKind::Sys);
        let ids = |value: &str| {
            let seats =
                seats(&machine, DeviceKind::Cuda, |name| (name == "CUDA_VISIBLE_DEVICES").then(|| value.to_owned()));
            seats.iter().map(|seat| seat.id).collect::<Vec<_>>()
        };
        assert_eq!(ids("3,1"), [1, 3]);
        assert_eq!(ids("GPU-2f"), [2]);
        assert_eq!(ids("0,9,1"), [0]);
        assert_eq!(ids(""), [0; 0]);
        assert_eq!(ids("-1"), [0; 0]);
        assert_eq!(ids("1,1"), [1]);
        assert_eq!(seats(&machine, DeviceKind::Cuda, |_| None).len(), 4);
        assert_eq!(seats(&machine, DeviceKind::Npu, |_| None), []);
    }

    #[test]
    fn numbers_below_rocm_count_what_the_other_variable_leaves() {
        let mut machine = machine(4, |_, _| LinkKind::Sys);
        machine.devices.iter_mut().for_each(|device| device.kind = DeviceKind::Rocm);
        let of = |outer: &str, inner: Option<&str>| {
            let (outer, inner) = (outer.to_owned(), inner.map(str::to_owned));
            let value = move |name: &str| if name.starts_with("ROCR") { Some(outer.clone()) } else { inner.clone() };
            let seats = seats(&machine, DeviceKind::Rocm, value);
            seats.iter().map(|seat| (seat.id, seat.device.index)).collect::<Vec<_>>()
        };
        assert_eq!(of("2,3", None), [(0, 2), (1, 3)]);
        assert_eq!(of("2,3", Some("1")), [(1, 3)]);
    }

    #[test]
    fn no_choice_has_faster_links() {
        let mut numbers = Numbers(7);
        for round in 0..60 {
            let devices = 2 + numbers.below(7) as u32;
            let count = 1 + numbers.below(u64::from(devices)) as usize;
            let machine = numbers.machine(devices);
            let best = chosen(&machine, count, &[]).unwrap();
            assert!(best.is_sorted() && best.len() == count, "round {round}: {best:?}");
            assert_eq!(Some(&best), chosen(&machine, count, &[]).as_ref());
            let slowest = |places: &[u32]| {
                let pairs = places.iter().flat_map(|a| places.iter().map(move |b| (*a, *b)));
                pairs.map(|(a, b)| machine.link(DeviceKind::Cuda, a, b)).min().unwrap()
            };
            let in_use = |places: &[u32]| places.iter().filter(|id| is_in_use(&machine.devices[**id as usize])).count();
            for other in subsets(devices as usize, count) {
                let other: Vec<u32> = other.iter().map(|place| *place as u32).collect();
                let as_idle = in_use(&other) <= in_use(&best);
                assert!(
                    !as_idle || in_use(&other) < in_use(&best) || slowest(&other) <= slowest(&best),
                    "round {round}"
                );
                assert!(in_use(&other) >= in_use(&best), "round {round}: {other:?} is more idle than {best:?}");
            }
        }
    }

    #[test]
    fn which_devices_are_listed_first_changes_nothing() {
        let mut numbers = Numbers(11);
        for _ in 0..30 {
            let machine = numbers.machine(8);
            let mut seats = seats(&machine, DeviceKind::Cuda, |_| None);
            let cores = CpuList::new(0..64);
            let straight = choose(&machine, &seats, 3, &cores);
            seats.reverse();
            assert_eq!(choose(&machine, &seats, 3, &cores), straight);
        }
    }

    #[test]
    fn a_large_machine_is_chosen_from_as_well() {
        let machine = machine(32, |a, b| if a / 8 == b / 8 { LinkKind::Hccs } else { LinkKind::Sys });
        assert_eq!(chosen(&machine, 8, &[0, 9]).unwrap(), [16, 17, 18, 19, 20, 21, 22, 23]);
        assert_eq!(chosen(&machine, 24, &[]).unwrap().len(), 24);
    }

    #[test]
    fn subsets_are_all_and_each_once() {
        let all = subsets(5, 3);
        assert_eq!(all.len(), 10);
        assert!(all.is_sorted() && all.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(subsets(16, 8).len(), 12_870);
    }
}
