//! Apple GPUs, by `system_profiler`, which there is on macOS alone.

use serde_json::Value;

use crate::inventory::{Device, Health, Inventory, Queried};
use crate::{DeviceKind, Facts, Machine, Vendor};

pub(crate) struct Metal;

impl Vendor for Metal {
    fn facts(&self) -> Facts {
        Facts {
            one: "a Metal device",
            several: "Metal devices",
            maker: Some("Apple"),
            untried: Some("It is listed, and nothing computes on it yet."),
            when_a_tool_fails: "run `system_profiler SPDisplaysDataType` by hand",
            ..Facts::default()
        }
    }

    fn ask(&self, machine: &Machine) -> Inventory {
        // Elsewhere a tool of this name would be somebody else's.
        if !cfg!(target_os = "macos") && machine.is_here() {
            return Inventory::default();
        }
        let Some(tool) = machine.tool("system_profiler") else { return Inventory::default() };
        let asked = Queried::new(DeviceKind::Metal, "system_profiler");
        match machine.run(&tool, &["-json", "SPDisplaysDataType", "SPHardwareDataType"]) {
            Err(error) => asked.failed(error.to_string()).alone_with(Vec::new()),
            Ok(text) => match read(&text) {
                None => asked
                    .failed(format!("its answer is no list of displays: {}", crate::tool::said("", &text)))
                    .alone_with(Vec::new()),
                Some(devices) => asked.alone_with(devices),
            },
        }
    }
}

/// The GPUs of an answer; None where it holds no list of displays.
pub(crate) fn read(text: &str) -> Option<Vec<Device>> {
    let value: Value = serde_json::from_str(text).ok()?;
    let displays = value.get("SPDisplaysDataType")?.as_array()?;
    // The GPU of an Apple chip computes in the memory of the machine.
    let shared = value.pointer("/SPHardwareDataType/0/physical_memory").and_then(Value::as_str).and_then(size);
    let metal = displays.iter().filter(|display| supports_metal(display));
    let devices = (0..).zip(metal).map(|(index, display)| {
        let field = |name: &str| display.get(name).and_then(Value::as_str);
        let own = field("spdisplays_vram").or_else(|| field("_spdisplays_vram")).and_then(size);
        let name = field("sppci_model").or_else(|| field("_name")).unwrap_or("Apple GPU");
        let device = Device::new(DeviceKind::Metal, index, name).with_memory(own.or(shared), None, None);
        Device { health: Health::Ok, ..device }
    });
    Some(devices.collect())
}

fn supports_metal(display: &Value) -> bool {
    let fields = ["spdisplays_mtlgpufamilysupport", "spdisplays_metalfamily", "spdisplays_metal"];
    let said = fields.into_iter().filter_map(|field| display.get(field)?.as_str());
    said.into_iter().any(|said| said.to_ascii_lowercase().contains("metal") || said.contains("supported"))
}

/// `64 GB`, in units of 1024.
fn size(text: &str) -> Option<u64> {
    let (count, unit) = text.split_once(' ')?;
    let shift = match unit.trim() {
        "MB" => 20,
        "GB" => 30,
        "TB" => 40,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::TestMachine;

    const ANSWER: &str = r#"{"SPDisplaysDataType": [{"_name": "Apple M2 Max", "spdisplays_mtlgpufamilysupport": "spdisplays_metal3",
        "spdisplays_vendor": "sppci_vendor_Apple", "sppci_bus": "spdisplays_builtin", "sppci_cores": "38",
        "sppci_device_type": "spdisplays_gpu", "sppci_model": "Apple M2 Max"}, {"_name": "old", "sppci_model": "Old"}],
        "SPHardwareDataType": [{"chip_type": "Apple M2 Max", "physical_memory": "64 GB"}]}"#;

    #[test]
    fn the_gpu_of_a_laptop() {
        let machine = TestMachine::new();
        machine.tool("system_profiler", &format!("cat <<'END'\n{ANSWER}\nEND"));
        let inventory = Metal.ask(&machine.machine());
        assert_eq!(inventory.devices.len(), 1);
        assert_eq!(inventory.devices[0].name, "Apple M2 Max");
        assert_eq!(inventory.devices[0].memory_total, Some(64 << 30));
    }

    #[test]
    fn another_answer_is_told() {
        let machine = TestMachine::new();
        machine.tool("system_profiler", "echo no");
        assert!(Metal.ask(&machine.machine()).asked[0].problem.as_ref().unwrap().ends_with(": no"));
    }
}
