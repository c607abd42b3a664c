//! NVIDIA's management library, loaded at run time: a program that was linked to it would not start without a driver.
//!
//! A handful of its functions is called, whose forms NVIDIA keeps from version to version (that is what the `_v2` in
//! their names is for), so that a wrapper of the whole library would bring more than it saves.

#![allow(unsafe_code, reason = "NVML is a C library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use libloading::Library;

use crate::inventory::{Device, Health, Inventory, Process, Queried};
use crate::link::{Link, LinkKind};
use crate::nvidia::bus_id;
use crate::{DeviceKind, Machine};

/// The library's name, which names its interface.
const SONAME: &str = "libnvidia-ml.so.1";

/// What calls return that went well.
const SUCCESS: c_int = 0;
/// What they return for a GPU that fell off the bus.
const GPU_IS_LOST: c_int = 15;
/// What they return for a GPU that must be reset.
const RESET_REQUIRED: c_int = 16;

/// The most links that a GPU has been built with.
const MOST_LINKS: c_uint = 18;
/// The most processes that are listed of a GPU.
const MOST_PROCESSES: usize = 256;

/// Why the library gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NvmlError {
    /// It is not there.
    #[error("libnvidia-ml.so.1 cannot be loaded, and nvidia-smi is not installed")]
    NotInstalled,
    /// It lacks a function: it is older than the form that is asked for.
    #[error("it lacks a function: {0}")]
    Function(#[from] libloading::Error),
    /// A call failed.
    #[error("{call} failed: {said}")]
    Call {
        call: &'static str,
        /// What the library says of it.
        said: String,
    },
    /// It took too long.
    #[error("it gave no answer within {} s", .0.as_secs_f64())]
    Silent(Duration),
}

type Handle = *mut c_void;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used_memory: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// The GPUs of a machine as the library tells them.
///
/// # Errors
/// Fails if there is no such library, or it does not answer in time.
pub(crate) fn ask(machine: &Machine) -> Result<Inventory, NvmlError> {
    let here = machine.path(&format!("/usr/lib/{SONAME}"));
    let name = if machine.is_here() { SONAME.into() } else { here.into_os_string() };
    // SAFETY: loading runs the library's initializers. It is NVIDIA's own library, under the name that the driver
    // installs.
    let library = unsafe { Library::new(name) }.map_err(|_| NvmlError::NotInstalled)?;
    // In a thread, since a hung driver hangs its callers, and nothing ends them.
    let (sender, receiver) = channel();
    thread::spawn(move || sender.send(Nvml { library }.inventory()));
    receiver.recv_timeout(machine.limit()).unwrap_or(Err(NvmlError::Silent(machine.limit())))
}

struct Nvml {
    library: Library,
}

/// Calls a function of the library by its name, with the types that NVIDIA's header gives its parameters.
macro_rules! call {
    ($nvml:expr, $name:ident ( $($type:ty = $argument:expr),* )) => {{
        // SAFETY: the type is that of the function of this name in NVIDIA's nvml.h, and what its pointers point to
        // outlives the call.
        let function = unsafe { $nvml.library.get::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($name).as_bytes()) }?;
        // SAFETY: as above.
        unsafe { function($($argument),*) }
    }};
}

impl Nvml {
    fn inventory(&self) -> Result<Inventory, NvmlError> {
        let begun = call!(self, nvmlInit_v2());
        self.check("nvmlInit", begun)?;
        let inventory = self.devices();
        let _ = call!(self, nvmlShutdown());
        inventory
    }

    fn devices(&self) -> Result<Inventory, NvmlError> {
        let mut asked = Queried::new(DeviceKind::Cuda, "NVML");
        asked.version =
            self.text(|text, length| Ok(call!(self, nvmlSystemGetDriverVersion(*mut c_char = text, c_uint = length))))?;
        let mut count: c_uint = 0;
        let counted = call!(self, nvmlDeviceGetCount_v2(*mut c_uint = &raw mut count));
        self.check("nvmlDeviceGetCount", counted)?;
        let mut handles = Vec::new();
        let mut inventory = Inventory { asked: vec![asked], ..Inventory::default() };
        for index in 0..count {
            let mut handle: Handle = std::ptr::null_mut();
            let got = call!(self, nvmlDeviceGetHandleByIndex_v2(c_uint = index, *mut Handle = &raw mut handle));
            if got == SUCCESS {
                inventory.devices.push(self.device(index, handle)?);
                handles.push((index, handle));
            } else {
                let lost = Device { health: health(got), ..Device::new(DeviceKind::Cuda, index, "NVIDIA GPU") };
                inventory.devices.push(lost);
            }
        }
        inventory.links = self.links(&inventory.devices, &handles)?;
        Ok(inventory)
    }

    fn device(&self, index: u32, handle: Handle) -> Result<Device, NvmlError> {
        let name = self.text(|text, length| {
            Ok(call!(self, nvmlDeviceGetName(Handle = handle, *mut c_char = text, c_uint = length)))
        })?;
        let mut device = Device::new(DeviceKind::Cuda, index, name.unwrap_or_else(|| "NVIDIA GPU".to_owned()));
        let mut memory = Memory::default();
        let got = call!(self, nvmlDeviceGetMemoryInfo(Handle = handle, *mut Memory = &raw mut memory));
        if got == SUCCESS {
            device = device.with_memory(Some(memory.total), Some(memory.used), Some(memory.free));
        }
        device.health = health(got);
        device.uuid = self.text(|text, length| {
            Ok(call!(self, nvmlDeviceGetUUID(Handle = handle, *mut c_char = text, c_uint = length)))
        })?;
        device.bus_id = self.bus_id(handle)?;
        let (mut power, mut temperature, mut minor): (c_uint, c_uint, c_uint) = (0, 0, 0);
        if call!(self, nvmlDeviceGetPowerUsage(Handle = handle, *mut c_uint = &raw mut power)) == SUCCESS {
            device.power_watts = Some(f64::from(power) / 1000.0);
        }
        // Its sensor 0 is the GPU itself.
        if call!(self, nvmlDeviceGetTemperature(Handle = handle, c_int = 0, *mut c_uint = &raw mut temperature))
            == SUCCESS
        {
            device.temperature_celsius = Some(f64::from(temperature));
        }
        if call!(self, nvmlDeviceGetMinorNumber(Handle = handle, *mut c_uint = &raw mut minor)) == SUCCESS {
            device.physical_index = Some(minor);
        }
        device.processes = self.processes(handle)?;
        Ok(device)
    }

    fn bus_id(&self, handle: Handle) -> Result<Option<String>, NvmlError> {
        let mut info = empty_pci_info();
        let got = call!(self, nvmlDeviceGetPciInfo_v3(Handle = handle, *mut PciInfo = &raw mut info));
        Ok((got == SUCCESS).then(|| bus_id(&until_zero(&info.bus_id))))
    }

    fn processes(&self, handle: Handle) -> Result<Vec<Process>, NvmlError> {
        let mut infos = vec![ProcessInfo::default(); MOST_PROCESSES];
        let mut count = MOST_PROCESSES as c_uint;
        let got = call!(
            self,
            nvmlDeviceGetComputeRunningProcesses_v3(Handle = handle, *mut c_uint = &raw mut count, *mut ProcessInfo = infos.as_mut_ptr())
        );
        let count = if got == SUCCESS { (count as usize).min(MOST_PROCESSES) } else { 0 };
        // All ones where the driver does not know.
        let process = |info: &ProcessInfo| Process {
            pid: info.pid,
            name: None,
            memory: Some(info.used_memory).filter(|bytes| *bytes != u64::MAX),
        };
        Ok(infos[..count].iter().map(process).collect())
    }

    fn links(&self, devices: &[Device], handles: &[(u32, Handle)]) -> Result<Vec<Link>, NvmlError> {
        let mut fast = Vec::new();
        for (_, handle) in handles {
            fast.push(self.fast_links(*handle)?);
        }
        let mut links = Vec::new();
        for (first, (a, handle)) in handles.iter().enumerate() {
            for (second, (b, other)) in handles.iter().enumerate().skip(first + 1) {
                let place =
                    devices.iter().find(|device| device.index == *b).and_then(|device| device.bus_id.as_deref());
                let count = fast[first].to(place, &fast[second]);
                let link = if count > 0 { LinkKind::NvLink { count } } else { self.over_the_bus(*handle, *other)? };
                links.push(Link { device: DeviceKind::Cuda, between: [*a, *b], link });
            }
        }
        Ok(links)
    }

    fn over_the_bus(&self, handle: Handle, other: Handle) -> Result<LinkKind, NvmlError> {
        let mut level: c_int = -1;
        let got = call!(
            self,
            nvmlDeviceGetTopologyCommonAncestor(Handle = handle, Handle = other, *mut c_int = &raw mut level)
        );
        Ok(match level {
            _ if got != SUCCESS => LinkKind::Unknown,
            0 => LinkKind::SameCard,
            10 => LinkKind::Pix,
            20 => LinkKind::Pxb,
            30 => LinkKind::Phb,
            40 => LinkKind::Node,
            50 => LinkKind::Sys,
            _ => LinkKind::Unknown,
        })
    }

    fn fast_links(&self, handle: Handle) -> Result<FastLinks, NvmlError> {
        let mut links = FastLinks::default();
        for link in 0..MOST_LINKS {
            let (mut active, mut remote): (c_int, c_int) = (0, -1);
            let got =
                call!(self, nvmlDeviceGetNvLinkState(Handle = handle, c_uint = link, *mut c_int = &raw mut active));
            if got != SUCCESS || active == 0 {
                continue;
            }
            let got = call!(
                self,
                nvmlDeviceGetNvLinkRemoteDeviceType(Handle = handle, c_uint = link, *mut c_int = &raw mut remote)
            );
            match remote {
                2 if got == SUCCESS => links.to_switch += 1,
                _ => {
                    let mut info = empty_pci_info();
                    let got = call!(
                        self,
                        nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle = handle, c_uint = link, *mut PciInfo = &raw mut info)
                    );
                    if got == SUCCESS {
                        links.to_devices.push(bus_id(&until_zero(&info.bus_id)));
                    }
                }
            }
        }
        Ok(links)
    }

    /// A text that the library writes into a buffer; None where it has none.
    fn text(
        &self,
        write: impl Fn(*mut c_char, c_uint) -> Result<c_int, libloading::Error>,
    ) -> Result<Option<String>, NvmlError> {
        let mut buffer: [c_char; 128] = [0; 128];
        let got = write(buffer.as_mut_ptr(), buffer.len() as c_uint)?;
        Ok((got == SUCCESS).then(|| until_zero(&buffer)))
    }

    fn check(&self, call: &'static str, returned: c_int) -> Result<(), NvmlError> {
        if returned == SUCCESS {
            return Ok(());
        }
        // SAFETY: the type is that of nvml.h; the text it points to is a constant of the library.
        let said = unsafe {
            let text = self.library.get::<unsafe extern "C" fn(c_int) -> *const c_char>(b"nvmlErrorString")?(returned);
            if text.is_null() {
                format!("error {returned}")
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        Err(NvmlError::Call { call, said })
    }
}

/// Where the active NVLinks of a GPU end.
#[derive(Debug, Default)]
struct FastLinks {
    to_switch: u32,
    to_devices: Vec<String>,
}

impl FastLinks {
    /// How many reach another GPU. Through a switch every GPU reaches every other, with as many as the one that has
    /// fewer.
    fn to(&self, place: Option<&str>, other: &Self) -> u32 {
        let direct = self.to_devices.iter().filter(|end| Some(end.as_str()) == place).count() as u32;
        direct + self.to_switch.min(other.to_switch)
    }
}

fn health(returned: c_int) -> Health {
    match returned {
        SUCCESS => Health::Ok,
        GPU_IS_LOST => Health::Offline,
        RESET_REQUIRED => Health::Critical,
        _ => Health::Unknown,
    }
}

fn empty_pci_info() -> PciInfo {
    PciInfo {
        bus_id_legacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pci_device_id: 0,
        pci_subsystem_id: 0,
        bus_id: [0; 32],
    }
}

fn until_zero(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::test_machine::TestMachine;

    /// A machine with a stand-in of the library, compiled from C; None where there is no C compiler.
    fn machine(source: &str) -> Option<TestMachine> {
        let machine = TestMachine::new();
        let source = machine.file("usr/lib/nvml.c", source);
        let library = source.with_file_name(SONAME);
        let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
        if !compiled.is_ok_and(|status| status.success()) {
            println!("skipped: there is no C compiler");
            return None;
        }
        Some(machine)
    }

    #[test]
    fn gpus_behind_a_switch_and_one_that_is_lost() {
        let Some(machine) = machine(include_str!("../../tests/nvml/three_gpus.c")) else { return };
        let inventory = ask(&machine.machine()).unwrap();
        assert_eq!(inventory.asked[0].version.as_deref(), Some("580.65.06"));
        assert_eq!(inventory.devices.len(), 3);
        let first = &inventory.devices[0];
        assert_eq!(first.name, "NVIDIA H200");
        assert_eq!(first.uuid.as_deref(), Some("GPU-0"));
        assert_eq!(first.bus_id.as_deref(), Some("0000:10:00.0"));
        assert_eq!((first.memory_total, first.memory_free), (Some(150_754_820_096), Some(150_000_000_000)));
        assert_eq!((first.power_watts, first.temperature_celsius), (Some(75.5), Some(33.0)));
        assert_eq!(first.physical_index, Some(4));
        assert_eq!(first.processes, [Process { pid: 4711, name: None, memory: Some(1 << 30) }]);
        assert_eq!(inventory.devices[2].health, Health::Offline);
        assert_eq!(inventory.link(DeviceKind::Cuda, 0, 1), LinkKind::NvLink { count: 18 });
        assert_eq!(inventory.link(DeviceKind::Cuda, 0, 2), LinkKind::Unknown);
    }

    #[test]
    fn a_library_without_a_driver_says_so() {
        let source = "int nvmlInit_v2(void) { return 9; }\nconst char *nvmlErrorString(int e) { return e == 9 ? \"Driver Not Loaded\" : 0; }\n";
        let Some(machine) = machine(source) else { return };
        let error = ask(&machine.machine()).unwrap_err().to_string();
        assert_eq!(error, "nvmlInit failed: Driver Not Loaded");
    }

    #[test]
    fn a_hung_driver_is_not_waited_for() {
        let source = "#include <unistd.h>\nint nvmlInit_v2(void) { sleep(1000); return 0; }\n";
        let Some(machine) = machine(source) else { return };
        let hasty = machine.machine().with_limit(Duration::from_millis(100));
        assert!(matches!(ask(&hasty), Err(NvmlError::Silent(_))));
    }

    #[test]
    fn without_a_library_there_is_none() {
        assert!(matches!(ask(&TestMachine::new().machine()), Err(NvmlError::NotInstalled)));
    }

    #[test]
    fn links_to_a_neighbour_are_told_from_links_to_a_switch() {
        let first = FastLinks {
            to_switch: 0,
            to_devices: vec!["0000:20:00.0".into(), "0000:20:00.0".into(), "0000:30:00.0".into()],
        };
        let second = FastLinks::default();
        assert_eq!(first.to(Some("0000:20:00.0"), &second), 2);
        assert_eq!(first.to(Some("0000:40:00.0"), &second), 0);
        assert_eq!(first.to(None, &second), 0);
    }
}
