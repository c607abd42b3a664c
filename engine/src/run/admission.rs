//! Admission: what the machine has room for beside what was let in. Whom it lets in it knows by a number alone.

use std::collections::BTreeMap;

use devices::DeviceKind;

use super::devices::Devices;
use super::event::WaitsFor;
use crate::device::demand;
use crate::forecast::Estimate;
use crate::memory::Memory;
use crate::plan::PlannedStage;
use crate::stage::Threads;

/// What the stages of a run may use together, and what those that run use of it.
pub(super) struct Admission {
    cores: usize,
    /// Most that run at once.
    jobs: Option<usize>,
    /// How many there are of each slot.
    slots: BTreeMap<String, u32>,
    memory: Memory,
    pub devices: Devices,
    admitted: BTreeMap<usize, Admitted>,
}

/// What a stage that is to start needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs<'a> {
    pub place: Place,
    pub slots: &'a BTreeMap<String, u32>,
}

/// Where it is to run.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// On this machine; memory where it computes on the CPU and something is known of that.
    Here { threads: usize, memory: Option<Estimate> },
    /// As a job of a cluster, which sees to everything but slots.
    Cluster,
}

/// What a stage that runs uses: nothing of this machine where it is a job of a cluster.
#[derive(Debug, Default)]
pub(super) struct Admitted {
    pub threads: usize,
    /// Bytes of memory that it was promised.
    pub memory: u64,
    pub slots: BTreeMap<String, u32>,
    /// Its process on this machine.
    pub process: Option<u32>,
}

impl Admission {
    pub(super) fn new(
        cores: usize,
        jobs: Option<usize>,
        slots: BTreeMap<String, u32>,
        memory: Memory,
        devices: Devices,
    ) -> Self {
        Self { cores, jobs, slots, memory, devices, admitted: BTreeMap::new() }
    }

    /// What keeps a stage from starting beside those that run, if anything.
    pub(super) fn lacks(&self, needs: &Needs<'_>) -> Option<WaitsFor> {
        let of_jobs = || Some(WaitsFor::Jobs { most: self.jobs.filter(|most| self.admitted.len() >= *most)? });
        let of_place = || match needs.place {
            Place::Here { threads, memory } => self
                .lacks_threads(threads)
                .or_else(|| self.lacks_slots(needs.slots))
                .or_else(|| self.lacks_memory(memory?)),
            Place::Cluster => self.lacks_slots(needs.slots),
        };
        of_jobs().or_else(of_place)
    }

    /// What all that wait for it wait for in vain, whatever they need, until one that runs has ended.
    pub(super) fn exhausted(&self) -> Option<WaitsFor> {
        let none = BTreeMap::new();
        self.lacks(&Needs { place: Place::Here { threads: 1, memory: None }, slots: &none })
    }

    /// Lets a stage in: from now on it uses this.
    pub(super) fn admit(&mut self, stage: usize, uses: Admitted) {
        self.admitted.insert(stage, uses);
    }

    /// What a stage has used is free.
    pub(super) fn release(&mut self, stage: usize) {
        self.admitted.remove(&stage);
    }

    /// The threads that a stage gets.
    pub(super) fn threads_for(&self, stage: &PlannedStage) -> usize {
        let most = match stage.bound.threads() {
            Threads::One => 1,
            Threads::Many => self.share_of_cores(stage),
        };
        stage.resources.threads.unwrap_or(most).clamp(1, self.cores)
    }

    /// Bytes of memory that could be had now. What a running stage was promised and does not hold yet is not free,
    /// though the kernel says so.
    pub(super) fn free_memory(&self) -> Option<u64> {
        let held = |uses: &Admitted| uses.process.and_then(|id| self.memory.held_by(id)).unwrap_or(0);
        let promised: u64 = self.admitted.values().map(|uses| uses.memory.saturating_sub(held(uses))).sum();
        Some(self.memory.available()?.saturating_sub(promised))
    }

    /// The threads that belong to a stage's devices: a machine's cores are shared by its devices, so that each can be
    /// given to another stage. All cores for one that computes on the CPU.
    fn share_of_cores(&self, stage: &PlannedStage) -> usize {
        let seen = self.devices.seen();
        match (demand(stage, seen), seen) {
            (Ok(demand), Some(seen)) if demand.kind != DeviceKind::Cpu => {
                self.cores * demand.count / seen.seats(demand.kind).len().max(1)
            }
            _ => self.cores,
        }
    }

    fn lacks_threads(&self, wanted: usize) -> Option<WaitsFor> {
        let in_use: usize = self.admitted.values().map(|uses| uses.threads).sum();
        // One that runs alone may always.
        (in_use > 0 && in_use + wanted > self.cores)
            .then(|| WaitsFor::Threads { wanted, free: self.cores.saturating_sub(in_use) })
    }

    fn lacks_slots(&self, slots: &BTreeMap<String, u32>) -> Option<WaitsFor> {
        let taken = |name: &str| -> u32 { self.admitted.values().filter_map(|uses| uses.slots.get(name)).sum() };
        slots.iter().find_map(|(name, &wanted)| {
            let free = self.slots.get(name).copied().unwrap_or(0).saturating_sub(taken(name));
            (wanted > free).then(|| WaitsFor::Slots { name: name.clone(), wanted, free })
        })
    }

    fn lacks_memory(&self, wanted: Estimate) -> Option<WaitsFor> {
        let free_bytes = self.free_memory()?;
        let estimated = wanted.margin > 0.0;
        (wanted.least() > free_bytes).then_some(WaitsFor::Memory { wanted_bytes: wanted.bytes, free_bytes, estimated })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// A machine with cores, a limit of jobs, two slots `gpu` and memory as told by files in a folder.
    fn machine(cores: usize, jobs: Option<usize>, proc: &Path) -> Admission {
        let slots = BTreeMap::from([("gpu".to_owned(), 2)]);
        let memory = Memory::at(proc, &proc.join("none"));
        Admission::new(cores, jobs, slots, memory, Devices::new(Vec::new(), None))
    }

    fn here(threads: usize) -> Place {
        Place::Here { threads, memory: None }
    }

    fn lacks(admission: &Admission, place: Place, slots: u32) -> Option<WaitsFor> {
        let slots = (slots > 0).then(|| ("gpu".to_owned(), slots)).into_iter().collect();
        admission.lacks(&Needs { place, slots: &slots })
    }

    fn threads(threads: usize) -> Admitted {
        Admitted { threads, ..Admitted::default() }
    }

    #[test]
    fn threads_are_shared_and_one_stage_alone_may_always_run() {
        let mut admission = machine(4, None, Path::new("/none"));
        assert_eq!(lacks(&admission, here(9), 0), None);
        admission.admit(0, threads(3));
        assert_eq!(lacks(&admission, here(1), 0), None);
        assert_eq!(lacks(&admission, here(2), 0), Some(WaitsFor::Threads { wanted: 2, free: 1 }));
        assert_eq!(admission.exhausted(), None);
        admission.admit(1, threads(1));
        assert_eq!(admission.exhausted(), Some(WaitsFor::Threads { wanted: 1, free: 0 }));
        // What a cluster runs takes nothing here.
        assert_eq!(lacks(&admission, Place::Cluster, 0), None);
        admission.release(0);
        assert_eq!(lacks(&admission, here(3), 0), None);
    }

    #[test]
    fn no_more_run_than_may_at_once_wherever_they_run() {
        let mut admission = machine(4, Some(2), Path::new("/none"));
        admission.admit(0, Admitted::default());
        assert_eq!(lacks(&admission, here(1), 0), None);
        admission.admit(1, threads(1));
        for place in [here(1), Place::Cluster] {
            assert_eq!(lacks(&admission, place, 0), Some(WaitsFor::Jobs { most: 2 }));
        }
        admission.release(1);
        assert_eq!(admission.exhausted(), None);
    }

    #[test]
    fn slots_are_taken_here_and_on_a_cluster() {
        let mut admission = machine(4, None, Path::new("/none"));
        let wanting = |admission: &Admission, place| lacks(admission, place, 2);
        assert_eq!(wanting(&admission, here(1)), None);
        admission.admit(0, Admitted { slots: BTreeMap::from([("gpu".to_owned(), 1)]), ..Admitted::default() });
        for place in [here(1), Place::Cluster] {
            let lacking = Some(WaitsFor::Slots { name: "gpu".to_owned(), wanted: 2, free: 1 });
            assert_eq!(wanting(&admission, place), lacking);
        }
        assert_eq!(lacks(&admission, here(1), 1), None);
    }

    #[test]
    fn memory_that_is_promised_and_not_held_yet_is_not_free() {
        const MIB: u64 = 1 << 20;
        let proc = tempfile::tempdir().unwrap();
        fs::write(proc.path().join("meminfo"), "MemTotal: 204800 kB\nMemAvailable: 102400 kB\n").unwrap();
        fs::create_dir(proc.path().join("7")).unwrap();
        fs::write(proc.path().join("7/status"), "VmRSS: 10240 kB\n").unwrap();
        let mut admission = machine(4, None, proc.path());
        let wanting = |bytes, margin| Place::Here { threads: 1, memory: Some(Estimate { bytes, margin }) };
        assert_eq!(lacks(&admission, wanting(100 * MIB, 0.0), 0), None);
        // It holds 10 of 50 MiB, and the kernel counts those already.
        admission.admit(0, Admitted { threads: 1, memory: 50 * MIB, process: Some(7), ..Admitted::default() });
        assert_eq!(admission.free_memory(), Some(60 * MIB));
        let lacking =
            |wanted, estimated| Some(WaitsFor::Memory { wanted_bytes: wanted, free_bytes: 60 * MIB, estimated });
        assert_eq!(lacks(&admission, wanting(61 * MIB, 0.0), 0), lacking(61 * MIB, false));
        // Of an estimate the least counts.
        assert_eq!(lacks(&admission, wanting(80 * MIB, 0.25), 0), None);
        assert_eq!(lacks(&admission, wanting(81 * MIB, 0.25), 0), lacking(81 * MIB, true));
        // Where nothing is known of it, or of the machine, it starts.
        assert_eq!(lacks(&admission, here(1), 0), None);
        assert_eq!(lacks(&machine(4, None, Path::new("/none")), wanting(1 << 60, 0.0), 0), None);
    }
}
