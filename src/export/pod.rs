//! What a pod asks for and is given: resources, volumes, variables, and where it may run.

use std::time::Duration;

use devices::DeviceKind;
use engine::plan::{DeviceCount, PlannedStage};
use serde_json::{Map, Value, json};

use super::arguments::{ClusterArgs, POD};
use super::cluster::Job;

/// Memory of a pod beside what its stage asks for: the run itself, and what its kernel keeps for it. Were it all
/// promised to the stage, the stage would wait for it for ever.
const BESIDE_STAGE: u64 = 512 << 20;

/// Time of a pod beside what its stage may take: bringing the image and the inputs, sending the result. `timeout` is
/// kept by the run in the pod, which asks the stage to save what it has; the pod's deadline is for a pod that does
/// nothing any more.
const BESIDE_TIMEOUT: Duration = Duration::from_secs(3600);

/// How long a stage that is asked to stop may take to save what it has: that of `run --grace`.
const GRACE: Duration = Duration::from_secs(10);

/// What the stages of one pod ask for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Asks {
    cpu: Option<usize>,
    memory: Option<u64>,
    device: Option<(DeviceKind, u32)>,
    /// Whether several workers exchange what they compute through the pod's shared memory.
    shares_memory: bool,
}

impl Asks {
    /// What a stage asks for.
    pub(super) fn of(stage: &PlannedStage) -> Self {
        let resources = &stage.resources;
        // `all` of the CPU is one worker; of devices a pod has none that it does not count, which is refused
        // before.
        let count = match resources.count {
            DeviceCount::Exactly(count) => count,
            DeviceCount::All => 1,
        };
        // With a device, `memory` is the device's own.
        let (device, memory) = match resources.device {
            None | Some(DeviceKind::Cpu) => (None, resources.memory),
            Some(device) => (Some((device, count)), None),
        };
        Self { cpu: resources.threads, memory, device, shares_memory: count > 1 }
    }

    /// What is enough for either of two, one after the other.
    ///
    /// # Errors
    /// The two devices, where they are of two kinds.
    pub(super) fn or(self, other: Self) -> Result<Self, (DeviceKind, DeviceKind)> {
        let device = match (self.device, other.device) {
            (Some((one, _)), Some((other, _))) if one != other => return Err((one, other)),
            (one, other) => larger(one, other),
        };
        Ok(Self {
            cpu: self.cpu.max(other.cpu),
            memory: self.memory.max(other.memory),
            device,
            shares_memory: self.shares_memory || other.shares_memory,
        })
    }

    /// The container's `resources`. What is asked for is also the limit: a stage finds out from it how many threads and
    /// how much memory it has.
    fn resources(&self, args: &ClusterArgs) -> Option<Value> {
        let mut amounts = Map::new();
        if let Some(threads) = self.cpu {
            amounts.insert("cpu".to_owned(), threads.to_string().into());
        }
        if let Some(bytes) = self.memory {
            amounts.insert("memory".to_owned(), quantity(bytes.saturating_add(BESIDE_STAGE)).into());
        }
        if let Some((device, count)) = self.device {
            amounts.insert(args.resource(device), count.to_string().into());
        }
        (!amounts.is_empty()).then(|| json!({ "requests": amounts, "limits": amounts }))
    }

    /// Where the pod may run: labels of nodes, and the taint that clusters keep other pods from device nodes with.
    pub(super) fn placement(&self, args: &ClusterArgs) -> Map<String, Value> {
        let mut fields = Map::new();
        let device = self.device.map(|(device, _)| device);
        let of = device.unwrap_or(DeviceKind::Cpu);
        let meant = args.node_selectors.iter().filter(|selector| selector.device.is_none_or(|device| device == of));
        let labels: Map<String, Value> =
            meant.map(|selector| (selector.label.clone(), selector.value.clone().into())).collect();
        if !labels.is_empty() {
            fields.insert("nodeSelector".to_owned(), labels.into());
        }
        if let Some(device) = device {
            let taint = json!({ "key": args.resource(device), "operator": "Exists", "effect": "NoSchedule" });
            fields.insert("tolerations".to_owned(), json!([taint]));
        }
        fields
    }
}

/// The larger of two amounts of one device.
fn larger(one: Option<(DeviceKind, u32)>, other: Option<(DeviceKind, u32)>) -> Option<(DeviceKind, u32)> {
    match (one, other) {
        (Some((device, one)), Some((_, other))) => Some((device, one.max(other))),
        (one, other) => one.or(other),
    }
}

impl ClusterArgs {
    /// What the cluster calls a device.
    fn resource(&self, device: DeviceKind) -> String {
        let given = self.device_resources.iter().rev().find(|given| given.device == device);
        let by_default = device.facts().kubernetes_resource.unwrap_or("cpu");
        given.map_or_else(|| by_default.to_owned(), |given| given.resource.clone())
    }
}

/// The container of a pod.
pub(super) fn container(job: &Job<'_>, asks: &Asks, arguments: &[String], environment: &[Value], home: &str) -> Value {
    let mut container = json!({
        "name": "main",
        "image": job.args.image,
        "command": ["pipeline"],
        "args": arguments,
    });
    if !environment.is_empty() {
        container["env"] = environment.into();
    }
    if let Some(resources) = asks.resources(job.args) {
        container["resources"] = resources;
    }
    let mut mounts = vec![json!({ "name": "home", "mountPath": format!("{POD}/home") })];
    if job.args.home_claim.is_some() {
        mounts[0]["subPath"] = home.into();
    }
    if job.files.config_map().is_some() {
        mounts.push(json!({ "name": "files", "mountPath": format!("{POD}/files"), "readOnly": true }));
    }
    if asks.shares_memory {
        mounts.push(json!({ "name": "shared-memory", "mountPath": "/dev/shm" }));
    }
    let claims = job.args.volumes.iter().enumerate();
    mounts.extend(claims.map(|(at, volume)| json!({ "name": format!("claim-{at}"), "mountPath": volume.folder })));
    container["volumeMounts"] = mounts.into();
    container
}

/// The volumes of pods; `files` is the name of the ConfigMap.
pub(super) fn volumes(job: &Job<'_>, files: Option<(&str, Value)>, shares_memory: bool) -> Vec<Value> {
    let home = match &job.args.home_claim {
        Some(claim) => json!({ "name": "home", "persistentVolumeClaim": { "claimName": claim } }),
        None => json!({ "name": "home", "emptyDir": {} }),
    };
    let mut volumes = vec![home];
    if let Some((name, items)) = files {
        volumes.push(json!({ "name": "files", "configMap": { "name": name, "items": items } }));
    }
    if shares_memory {
        // A container has 64 MiB of it otherwise, which is too little for workers to exchange gradients through.
        volumes.push(json!({ "name": "shared-memory", "emptyDir": { "medium": "Memory" } }));
    }
    let claims = job.args.volumes.iter().enumerate();
    volumes.extend(claims.map(
        |(at, volume)| json!({ "name": format!("claim-{at}"), "persistentVolumeClaim": { "claimName": volume.claim } }),
    ));
    volumes
}

/// Whether the workers of a pod share memory.
pub(super) fn shares_memory(asks: &Asks) -> bool {
    asks.shares_memory
}

/// After how many seconds a pod is given up; `None` where its stage may take for ever.
pub(super) fn deadline_seconds(stage: &PlannedStage) -> Option<u64> {
    let timeout = stage.timeout?;
    let tries = stage.retries.max.saturating_add(1);
    let waits: Duration = (1..tries).map(|failed| stage.retries.delay_after(failed)).sum();
    let whole = (timeout + GRACE).saturating_mul(tries) + waits + BESIDE_TIMEOUT;
    Some(whole.as_secs())
}

/// `4608Mi`, or bytes where it is no integer of a unit.
fn quantity(bytes: u64) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let whole = units.iter().find(|(shift, _)| bytes.is_multiple_of(1 << shift));
    whole.map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_exact() {
        assert_eq!(quantity(4 << 30), "4Gi");
        assert_eq!(quantity((4 << 30) + (512 << 20)), "4608Mi");
        assert_eq!(quantity(1500), "1500");
    }

    #[test]
    fn one_pod_for_several_stages_asks_for_the_most() {
        let asks = |cpu, memory, device| Asks { cpu, memory, device, shares_memory: false };
        let both =
            asks(Some(2), None, Some((DeviceKind::Cuda, 1))).or(asks(None, Some(5), Some((DeviceKind::Cuda, 4))));
        assert_eq!(both, Ok(asks(Some(2), Some(5), Some((DeviceKind::Cuda, 4)))));
        let two_kinds = asks(None, None, Some((DeviceKind::Cuda, 1))).or(asks(None, None, Some((DeviceKind::Npu, 1))));
        assert_eq!(two_kinds, Err((DeviceKind::Cuda, DeviceKind::Npu)));
    }
}
