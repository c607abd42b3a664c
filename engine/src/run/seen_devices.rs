//! The devices of this machine as a run knows them, and what of them is given to a stage.

use devices::lease::{Lease, LeaseFolder};
use devices::{CpuList, DeviceKind};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::event::WaitsFor;
use crate::device::{DeviceGrant, Seen, is_on_processor};
use crate::error::{Cause, OrFail, StageError};
use crate::plan::Plan;

/// The devices of this machine, as far as the run knows them.
pub(super) struct Devices {
    kinds: Vec<DeviceKind>,
    pub seen: Option<Seen>,
    leases: Option<LeaseFolder>,
    /// Whether the tools are being asked.
    looking: bool,
    looker: UnboundedSender<Seen>,
    looked: UnboundedReceiver<Seen>,
}

/// What a stage's process has to compute on.
#[derive(Debug)]
pub(super) struct Given {
    /// What its job says.
    pub grant: DeviceGrant,
    /// The variables by which it sees these devices and no others.
    pub env: Vec<(&'static str, String)>,
    /// The processors near to them; empty where nothing is known of that.
    pub cores: CpuList,
    /// What keeps others from them.
    pub lease: Option<Lease>,
}

impl Given {
    pub(super) fn unleased(grant: DeviceGrant) -> Self {
        Self { grant, env: Vec::new(), cores: CpuList::default(), lease: None }
    }
}

/// What came of asking for devices.
pub(super) enum Answer {
    /// These.
    Given(Given),
    /// None now.
    Wait(WaitsFor),
    /// It has to be looked what there is.
    Looking,
}

impl Devices {
    /// For a run of a plan; `seen` is what was looked at before it began.
    pub(super) fn new(plan: &Plan, seen: Option<Seen>) -> Self {
        let (looker, looked) = unbounded_channel();
        Self { kinds: kinds_of(plan), seen, leases: None, looking: false, looker, looked }
    }

    /// What the tools say, when they have been asked.
    pub(super) async fn hear(&mut self) -> Seen {
        self.looked.recv().await.expect("this holds a sender itself")
    }

    /// Notes it.
    pub(super) fn note(&mut self, seen: Seen) {
        self.looking = false;
        self.seen = Some(seen);
    }

    pub(super) fn look_again(&mut self) -> Answer {
        if !self.looking {
            self.looking = true;
            let (kinds, looker) = (self.kinds.clone(), self.looker.clone());
            std::thread::spawn(move || looker.send(Seen::look(&kinds)));
        }
        Answer::Looking
    }

    pub(super) fn leases(&mut self) -> Result<LeaseFolder, StageError> {
        if let Some(leases) = &self.leases {
            return Ok(leases.clone());
        }
        let found = LeaseFolder::of_this_machine()
            .or_fail(Cause::Machine, || "there is no place for the locks of devices that all users share".to_owned());
        let found = found.map_err(|error| {
            error.with_help("let root make one: `install -d -m 1777 /run/lock/pipeline`, or name one of your own in `PIPELINE_LEASES`")
        })?;
        Ok(self.leases.insert(found).clone())
    }
}

/// The kinds that stages of a plan may compute on, beside the processor.
pub(super) fn kinds_of(plan: &Plan) -> Vec<DeviceKind> {
    let of_stage = |stage: &crate::plan::PlannedStage| match stage.resources.device.kind() {
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
