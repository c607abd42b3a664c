//! Devices of this machine: which a stage gets, what it waits for, and what its process is told of them.
//!
//! The drivers' tools are asked in a thread of its own, since they may take seconds: the loop goes on meanwhile. They
//! are asked only where a stage that is to run may use more than the CPU.

use std::time::Duration;

use devices::lease::{Lease, LeaseFolder, LeaseState};
use devices::placement::{Seat, choose};
use devices::{CpuList, DeviceKind};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::event::WaitsFor;
use crate::device::{Demand, DeviceGrant, DeviceMissing, Seen, demand, is_on_processor, leases, processor};
use crate::error::{Cause, OrFail, StageError};
use crate::plan::{Plan, PlannedStage};

/// How long what was seen of the machine is believed: others may have filled a device since.
const FRESH: Duration = Duration::from_secs(3);

/// How often it is looked whether another run has given a device back.
pub(super) const LEASE_POLL: Duration = Duration::from_millis(200);

/// How often it is looked whether a device that others have filled is free.
pub(super) const DEVICE_MEMORY_POLL: Duration = Duration::from_secs(5);

/// The devices of this machine, as far as the run knows them.
pub(super) struct Devices {
    kinds: Vec<DeviceKind>,
    seen: Option<Seen>,
    leases: Option<LeaseFolder>,
    /// Whether the tools are being asked.
    looking: bool,
    looker: UnboundedSender<Seen>,
    looked: UnboundedReceiver<Seen>,
}

/// What a stage's process has to compute on.
#[derive(Debug)]
pub(super) struct GrantedDevices {
    /// What its job says.
    pub grant: DeviceGrant,
    /// The variables by which it sees these devices and no others.
    pub env: Vec<(&'static str, String)>,
    /// The CPUs near to them; empty where nothing is known of that.
    pub cores: CpuList,
    /// What keeps others from them.
    pub lease: Option<Lease>,
}

impl GrantedDevices {
    pub(super) fn unleased(grant: DeviceGrant) -> Self {
        Self { grant, env: Vec::new(), cores: CpuList::default(), lease: None }
    }
}

/// What came of asking for devices.
pub(super) enum Answer {
    GrantedDevices(GrantedDevices),
    /// None now.
    Wait(WaitsFor),
    /// It has to be looked what there is.
    Looking,
}

impl Devices {
    /// For stages that may compute on some kinds; `seen` is what was looked at before the run began.
    pub(super) fn new(kinds: Vec<DeviceKind>, seen: Option<Seen>) -> Self {
        let (looker, looked) = unbounded_channel();
        Self { kinds, seen, leases: None, looking: false, looker, looked }
    }

    /// What the tools say, when they have been asked.
    pub(super) async fn hear(&mut self) -> Seen {
        self.looked.recv().await.expect("this holds a sender itself")
    }

    pub(super) fn note(&mut self, seen: Seen) {
        self.looking = false;
        self.seen = Some(seen);
    }

    /// What was last seen of the machine.
    pub(super) fn seen(&self) -> Option<&Seen> {
        self.seen.as_ref()
    }

    /// The devices of a stage that is to start here now; `estimate` is the least memory that it is expected to take,
    /// and `holder` says to other runs for whom they are leased.
    pub(super) fn ask(
        &mut self,
        stage: &PlannedStage,
        estimate: Option<u64>,
        holder: impl FnOnce() -> String,
    ) -> Result<Answer, StageError> {
        if self.seen.is_none() && !is_on_processor(stage) {
            return Ok(self.look_again());
        }
        let demand = demand(stage, self.seen()).map_err(|lack| {
            let missing = DeviceMissing { stage: stage.id.clone(), declared: stage.declared.clone(), lack };
            StageError::new(Cause::Machine, missing.to_string()).with_help(missing.help())
        })?;
        if demand.kind == DeviceKind::Cpu {
            return Ok(Answer::GrantedDevices(GrantedDevices::unleased(processor(stage))));
        }
        self.take(&demand, estimate, &holder())
    }

    fn take(&mut self, demand: &Demand, estimate: Option<u64>, holder: &str) -> Result<Answer, StageError> {
        let leases = self.leases()?;
        let Some(seen) = &self.seen else { return Ok(self.look_again()) };
        let refused = || format!("cannot lease {}", demand.kind.in_words());
        let (mut free, mut held_by) = (Vec::new(), Vec::new());
        for seat in seen.working(demand.kind) {
            match leases.standing(&seat.device.identity()).or_fail(Cause::Machine, refused)? {
                LeaseState::Free => free.push(seat),
                LeaseState::Held(by) => held_by.extend(by),
            }
        }
        let waits_for = |free: &[Seat<'_>], held_by, wanted_bytes| WaitsFor::Devices {
            device: demand.kind,
            wanted: demand.count,
            free: free.len(),
            held_by,
            wanted_bytes,
        };
        if free.len() < demand.count {
            held_by.dedup();
            return Ok(Answer::Wait(waits_for(&free, held_by, None)));
        }
        if seen.age() > FRESH {
            return Ok(self.look_again());
        }
        // An estimate that none of them would meet is one of another kind of device.
        let could_meet = |least: &u64| free.iter().any(|seat| seat.device.memory_total.is_none_or(|all| all >= *least));
        let memory = demand.memory.or(estimate.filter(could_meet));
        free.retain(|seat| Seen::has_room(seat, memory));
        let Some(ids) = choose(seen.inventory(), &free, demand.count, &seen.cores()) else {
            return Ok(Answer::Wait(waits_for(&free, Vec::new(), Some(memory.unwrap_or(0)))));
        };
        let chosen: Vec<Seat<'_>> = free.iter().filter(|seat| ids.contains(&seat.id)).copied().collect();
        let identities: Vec<String> = chosen.iter().map(|seat| seat.device.identity()).collect();
        let Some(lease) = leases.try_take(&identities, holder).or_fail(Cause::Machine, refused)? else {
            // Another run was quicker.
            return Ok(Answer::Wait(waits_for(&[], Vec::new(), None)));
        };
        let cores = near(&chosen, &seen.cores());
        let grant = DeviceGrant { kind: demand.kind, count: demand.count, indices: ids, nodes: 1 };
        Ok(Answer::GrantedDevices(GrantedDevices {
            env: grant.kind.environment(&grant.indices),
            grant,
            cores,
            lease: Some(lease),
        }))
    }

    fn look_again(&mut self) -> Answer {
        if !self.looking {
            self.looking = true;
            let (kinds, looker) = (self.kinds.clone(), self.looker.clone());
            std::thread::spawn(move || looker.send(Seen::look(&kinds)));
        }
        Answer::Looking
    }

    fn leases(&mut self) -> Result<LeaseFolder, StageError> {
        if let Some(leases) = &self.leases {
            return Ok(leases.clone());
        }
        Ok(self.leases.insert(leases()?).clone())
    }
}

/// The CPUs near to some devices, of those that we may use; empty where that is not known of each.
fn near(chosen: &[Seat<'_>], cores: &CpuList) -> CpuList {
    let mut near = Vec::new();
    for seat in chosen {
        let Some(affinity) = &seat.device.affinity else { return CpuList::default() };
        near.extend(affinity.cpus().iter().filter(|cpu| cores.cpus().binary_search(cpu).is_ok()));
    }
    CpuList::new(near)
}

/// The kinds that stages of a plan may compute on, beside the CPU.
pub(super) fn kinds_of(plan: &Plan) -> Vec<DeviceKind> {
    let of_stage = |stage: &PlannedStage| match stage.resources.device {
        Some(kind) => vec![kind],
        None if is_on_processor(stage) => Vec::new(),
        None => stage.bound.devices(),
    };
    let mut kinds: Vec<DeviceKind> = plan.stages.iter().flat_map(of_stage).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds.retain(|kind| *kind != DeviceKind::Cpu);
    kinds
}
