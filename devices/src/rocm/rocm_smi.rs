//! `rocm-smi … --json`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::DeviceKind;
use crate::inventory::{Device, Health};
use crate::link::{Link, LinkKind};

/// What is asked of each GPU.
pub(crate) const GPUS: [&str; 10] = [
    "--showid",
    "--showuniqueid",
    "--showbus",
    "--showproductname",
    "--showmeminfo",
    "vram",
    "--showtemp",
    "--showpower",
    "--showdriverversion",
    "--json",
];

/// What is asked of their links.
pub(crate) const LINKS: [&str; 2] = ["--showtopo", "--json"];

/// Answers by `card0`, `card1`, …, and by `system`; keys in lower case, which its versions do not agree on.
#[derive(Debug)]
pub(crate) struct Answer {
    cards: BTreeMap<u32, BTreeMap<String, String>>,
    system: BTreeMap<String, String>,
}

impl Answer {
    /// Reads an answer; None where it holds no JSON. Warnings may stand before it.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let json = &text[text.find('{')?..];
        let mut values = serde_json::Deserializer::from_str(json).into_iter::<Map<String, Value>>();
        let object = values.next()?.ok()?;
        let mut answer = Self { cards: BTreeMap::new(), system: BTreeMap::new() };
        for (name, value) in &object {
            let Value::Object(fields) = value else { continue };
            let fields = fields.iter().filter_map(|(key, value)| Some((key.to_lowercase(), plain(value)?))).collect();
            match name.strip_prefix("card").map(str::parse) {
                Some(Ok(number)) => _ = answer.cards.insert(number, fields),
                _ => answer.system.extend(fields),
            }
        }
        Some(answer)
    }

    /// The GPUs. Processes count them from 0 in the order of the tool.
    pub(crate) fn devices(&self) -> Vec<Device> {
        let indexed = (0..).zip(&self.cards);
        indexed.map(|(index, (number, card))| device(index, *number, card)).collect()
    }

    /// The driver's version.
    pub(crate) fn version(&self) -> Option<String> {
        self.system.get("driver version").cloned()
    }

    /// What joins the GPUs of the other answer, by their indices.
    pub(crate) fn links(&self) -> Vec<Link> {
        let links = self.system.iter().filter_map(|(key, value)| {
            let pair = key.strip_prefix("(topology) link type between drm devices ")?;
            let (a, b) = pair.split_once(" and ")?;
            let (a, b): (u32, u32) = (a.parse().ok()?, b.parse().ok()?);
            let link = LinkKind::from_cell(value).unwrap_or(LinkKind::Unknown);
            Some(Link { device: DeviceKind::Rocm, between: [a.min(b), a.max(b)], link })
        });
        let mut links: Vec<Link> = links.filter(|link| link.between[0] != link.between[1]).collect();
        links.sort_by_key(|link| link.between);
        links.dedup_by_key(|link| link.between);
        links
    }

    /// The NUMA node of a GPU.
    pub(crate) fn numa_node(&self, number: u32) -> Option<u32> {
        self.cards.get(&number)?.get("(topology) numa node")?.parse().ok()
    }
}

fn device(index: u32, number: u32, card: &BTreeMap<String, String>) -> Device {
    let get = |names: &[&str]| {
        names.iter().find_map(|name| card.get(*name)).map(String::as_str).filter(|text| is_given(text))
    };
    let starting = |start: &str| {
        let mut figures = card.iter().filter(|(key, _)| key.starts_with(start)).map(|(_, value)| value);
        figures.find_map(|value| value.parse::<f64>().ok().filter(|figure| figure.is_finite()))
    };
    let name = get(&["card series", "device name", "card model"]).unwrap_or("AMD GPU");
    let bytes = |name: &str| get(&[name]).and_then(|text| text.parse().ok());
    let temperature = ["temperature (sensor junction)", "temperature (sensor edge)", "temperature"];
    let power = ["current socket graphics package power", "average graphics package power"];
    Device {
        physical_index: Some(number),
        uuid: get(&["unique id"]).map(str::to_owned),
        health: Health::Unknown,
        power_watts: power.into_iter().find_map(starting),
        temperature_celsius: temperature.into_iter().find_map(starting),
        bus_id: get(&["pci bus"]).map(str::to_ascii_lowercase),
        ..Device::new(DeviceKind::Rocm, index, name).with_memory(
            bytes("vram total memory (b)"),
            bytes("vram total used memory (b)"),
            None,
        )
    }
}

fn is_given(text: &str) -> bool {
    !text.is_empty() && !text.eq_ignore_ascii_case("n/a")
}

fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_a_server() {
        let answer = Answer::read(include_str!("../../tests/rocm-smi/mi300x-x2.json")).unwrap();
        let devices = answer.devices();
        assert_eq!(answer.version().as_deref(), Some("6.8.5"));
        assert_eq!(devices.len(), 2);
        let first = &devices[0];
        assert_eq!(first.name, "AMD Instinct MI300X OAM");
        assert_eq!(first.uuid.as_deref(), Some("0x2ea5a2b2b4ca7f35"));
        assert_eq!(first.bus_id.as_deref(), Some("0000:05:00.0"));
        assert_eq!((first.memory_total, first.memory_used), (Some(206_141_652_992), Some(297_041_920)));
        assert_eq!((first.power_watts, first.temperature_celsius), (Some(139.0), Some(41.0)));
    }

    #[test]
    fn an_older_tool_with_other_capitals_and_a_warning_before() {
        let text = "WARNING: AMD GPU device(s) is/are in a low-power state.\n\n{\"card0\": {\"Card series\": \"AMD Instinct MI250\", \
                    \"Average Graphics Package Power (W)\": \"92.0\", \"Temperature (Sensor edge) (C)\": \"34.0\", \
                    \"VRAM Total Memory (B)\": \"68702699520\", \"VRAM Total Used Memory (B)\": \"10485760\"}}\n";
        let devices = Answer::read(text).unwrap().devices();
        assert_eq!(devices[0].name, "AMD Instinct MI250");
        assert_eq!((devices[0].power_watts, devices[0].temperature_celsius), (Some(92.0), Some(34.0)));
        assert_eq!(devices[0].memory_free, Some(68_702_699_520 - 10_485_760));
    }

    #[test]
    fn links_and_nodes() {
        let answer = Answer::read(include_str!("../../tests/rocm-smi/mi300x-x2.topo.json")).unwrap();
        let links = answer.links();
        assert_eq!(links.len(), 1);
        assert_eq!((links[0].between, links[0].link), ([0, 1], LinkKind::Xgmi));
        assert_eq!((answer.numa_node(0), answer.numa_node(1)), (Some(0), Some(1)));
    }

    #[test]
    fn what_is_no_json_is_none() {
        assert!(Answer::read("ERROR:root:Driver not initialized (amdgpu not found in modules)\n").is_none());
    }
}
