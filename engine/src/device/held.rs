//! A device for a process that is no stage, such as a server.

use devices::DeviceKind;
use devices::lease::{Lease, LeaseFolder, LeaseState};
use devices::placement::choose;
use nix::unistd::{Uid, User};

use super::{DeviceGrant, Seen};
use crate::error::{Cause, OrFail, StageError};

/// A device, and what keeps others from it.
#[derive(Debug)]
pub struct HeldDevice {
    /// Which one it is.
    pub grant: DeviceGrant,
    /// The variables by which a process sees this device and no others.
    pub env: Vec<(&'static str, String)>,
    /// None for the CPU.
    pub lease: Option<Lease>,
}

impl HeldDevice {
    /// Takes a device of the first of these kinds that this machine has, for a `holder` in words. It asks the drivers'
    /// tools, which may take seconds, unless the first is the CPU.
    ///
    /// # Errors
    /// Fails where the machine has none of these kinds, or all of the kind are in use.
    pub fn take(kinds: &[DeviceKind], holder: &str) -> Result<Self, StageError> {
        let processor = || Self { grant: DeviceGrant::PROCESSOR, env: Vec::new(), lease: None };
        if kinds.first() == Some(&DeviceKind::Cpu) {
            return Ok(processor());
        }
        let seen = Seen::look(kinds);
        let is_here = |kind: &&DeviceKind| **kind == DeviceKind::Cpu || !seen.working(**kind).is_empty();
        let Some(&kind) = kinds.iter().find(is_here) else {
            let first = kinds.first().copied().unwrap_or_default();
            let message = format!("{} is needed, and {}", first.in_words(), seen.in_words(first));
            return Err(StageError::new(Cause::Machine, message));
        };
        if kind == DeviceKind::Cpu {
            return Ok(processor());
        }
        let refused = || format!("cannot lease {}", kind.in_words());
        let leases = leases()?;
        let (mut free, mut held_by) = (Vec::new(), Vec::new());
        for seat in seen.working(kind) {
            match leases.standing(&seat.device.identity()).or_fail(Cause::Machine, refused)? {
                LeaseState::Free if Seen::has_room(&seat, None) => free.push(seat),
                LeaseState::Free => held_by.push("other processes".to_owned()),
                LeaseState::Held(by) => held_by.extend(by),
            }
        }
        let chosen = choose(seen.inventory(), &free, 1, &seen.cores()).unwrap_or_default();
        let identities: Vec<String> =
            free.iter().filter(|seat| chosen.contains(&seat.id)).map(|seat| seat.device.identity()).collect();
        let lease = match identities.is_empty() {
            true => None,
            false => leases.try_take(&identities, &named(holder)).or_fail(Cause::Machine, refused)?,
        };
        let Some(lease) = lease else {
            held_by.dedup();
            let by = if held_by.is_empty() { "another process".to_owned() } else { held_by.join("; ") };
            let message = format!("{} is needed, and all of this machine are in use: by {by}", kind.in_words());
            return Err(
                StageError::new(Cause::Machine, message).with_help("wait for one, or name another kind of device")
            );
        };
        let grant = DeviceGrant { kind, count: 1, indices: chosen, nodes: 1 };
        Ok(Self { env: kind.environment(&grant.indices), grant, lease: Some(lease) })
    }
}

/// Where the leases of this machine are.
///
/// # Errors
/// Fails where there is no place that all users share.
pub(crate) fn leases() -> Result<LeaseFolder, StageError> {
    let found = LeaseFolder::of_this_machine()
        .or_fail(Cause::Machine, || "there is no place for the locks of devices that all users share".to_owned());
    found.map_err(|error| {
        error.with_help(
            "let root make one: `install -d -m 1777 /run/lock/pipeline`, or name one of your own in `PIPELINE_LEASES`",
        )
    })
}

/// For whom a device is leased, in words for others.
pub(crate) fn named(holder: &str) -> String {
    let user = User::from_uid(Uid::current()).ok().flatten().map(|user| format!(", {}", user.name));
    format!("{holder} (process {}{})", std::process::id(), user.unwrap_or_default())
}
