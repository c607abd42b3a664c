//! `amd-smi … --json`, the successor of `rocm-smi`.
//!
//! Its versions before ROCm 7 print a list of GPUs, later ones an object with that list under `gpu_data`; figures come
//! with their unit, and `"N/A"` stands for what a GPU does not tell.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::DeviceKind;
use crate::inventory::{Device, Health};
use crate::link::{Link, LinkKind};

/// The commands that are run, in the order of [`read`]'s answers.
pub(crate) const STATIC: [&str; 6] = ["static", "--asic", "--bus", "--driver", "--numa", "--json"];
/// Memory, power and temperature.
pub(crate) const METRIC: [&str; 5] = ["metric", "--mem-usage", "--power", "--temperature", "--json"];
/// Names and numbers; `-e` adds HIP's own and is not known to older versions.
pub(crate) const LIST: [&[&str]; 2] = [&["list", "-e", "--json"], &["list", "--json"]];
/// Links.
pub(crate) const TOPOLOGY: [&str; 2] = ["topology", "--json"];

/// What is said of each GPU, by its number.
pub(crate) type Answer = BTreeMap<u32, Value>;

/// Reads the answer to any of the commands; None where it holds no list of GPUs.
pub(crate) fn read(text: &str) -> Option<Answer> {
    let json = &text[text.find(['[', '{'])?..];
    let value = serde_json::Deserializer::from_str(json).into_iter::<Value>().next()?.ok()?;
    let list = match value {
        Value::Array(list) => list,
        Value::Object(mut object) => match object.remove("gpu_data")? {
            Value::Array(list) => list,
            _ => return None,
        },
        _ => return None,
    };
    Some(list.into_iter().filter_map(|gpu| Some((u32::try_from(gpu.get("gpu")?.as_u64()?).ok()?, gpu))).collect())
}

/// The GPUs, from the three answers.
pub(crate) fn devices(list: &Answer, fixed: &Answer, metric: &Answer) -> Vec<Device> {
    let numbers = fixed.keys().chain(list.keys()).chain(metric.keys()).copied();
    let numbers: std::collections::BTreeSet<u32> = numbers.collect();
    let mut devices: Vec<Device> = (0..)
        .zip(numbers)
        .map(|(place, number)| {
            let none = Value::Null;
            let of = |answer: &'_ Answer| answer.get(&number).cloned().unwrap_or(none.clone());
            device(place, number, &of(list), &of(fixed), &of(metric))
        })
        .collect();
    devices.sort_by_key(|device| device.index);
    devices
}

fn device(place: u32, number: u32, list: &Value, fixed: &Value, metric: &Value) -> Device {
    let name = text(fixed.pointer("/asic/market_name")).unwrap_or_else(|| "AMD GPU".to_owned());
    // HIP may count otherwise than the tool; newer versions say how.
    let index = figure(list.get("hip_id")).map_or(place, |hip| hip as u32);
    let memory =
        |field: &str| figure(metric.pointer(&format!("/mem_usage/{field}"))).map(|mebibytes| (mebibytes as u64) << 20);
    let first = |places: &[&str]| places.iter().find_map(|place| figure(metric.pointer(place)));
    Device {
        physical_index: Some(number),
        uuid: text(list.get("uuid")),
        health: Health::Unknown,
        power_watts: first(&["/power/socket_power", "/power/current_socket_power", "/power/average_socket_power"]),
        temperature_celsius: first(&["/temperature/hotspot", "/temperature/edge"]),
        bus_id: text(list.get("bdf")).or_else(|| text(fixed.pointer("/bus/bdf"))).map(|bdf| bdf.to_ascii_lowercase()),
        numa_node: figure(fixed.pointer("/numa/node")).map(|node| node as u32),
        ..Device::new(DeviceKind::Rocm, index, name).with_memory(
            memory("total_vram"),
            memory("used_vram"),
            memory("free_vram"),
        )
    }
}

/// The driver's version.
pub(crate) fn version(fixed: &Answer) -> Option<String> {
    fixed.values().find_map(|gpu| text(gpu.pointer("/driver/version")))
}

/// What joins the GPUs, by their numbers, from either form of the answer: links in a list, and before ROCm 6.1 types by
/// name.
pub(crate) fn links(answer: &Answer) -> Vec<([u32; 2], LinkKind)> {
    let mut links = BTreeMap::new();
    for (number, gpu) in answer {
        for (other, cell) in neighbours(gpu) {
            let link = LinkKind::from_cell(&cell).unwrap_or(LinkKind::Unknown);
            if *number != other {
                let both = links.entry([other.min(*number), other.max(*number)]).or_insert(link);
                *both = (*both).min(link);
            }
        }
    }
    links.into_iter().collect()
}

fn neighbours(gpu: &Value) -> Vec<(u32, String)> {
    let listed = gpu.get("links").and_then(Value::as_array).into_iter().flatten();
    let listed = listed.filter_map(|link| Some((link.get("gpu")?.as_u64()? as u32, text(link.get("link_type"))?)));
    let named = gpu.get("link_type").and_then(Value::as_object).into_iter().flatten();
    let named = named.filter_map(|(name, cell)| Some((name.strip_prefix("gpu_")?.parse().ok()?, text(Some(cell))?)));
    listed.chain(named).collect()
}

/// Links by index, of the devices that have these numbers.
pub(crate) fn links_of(devices: &[Device], links: &[([u32; 2], LinkKind)]) -> Vec<Link> {
    let index =
        |number: u32| devices.iter().find(|device| device.physical_index == Some(number)).map(|device| device.index);
    let links = links.iter().filter_map(|([a, b], link)| {
        let (a, b) = (index(*a)?, index(*b)?);
        Some(Link { device: DeviceKind::Rocm, between: [a.min(b), a.max(b)], link: *link })
    });
    links.collect()
}

fn text(value: Option<&Value>) -> Option<String> {
    let text = value?.as_str()?;
    (!text.is_empty() && text != "N/A").then(|| text.to_owned())
}

/// `41`, `{"value": 41, "unit": "C"}` or `"41 C"`.
fn figure(value: Option<&Value>) -> Option<f64> {
    match value? {
        Value::Number(number) => number.as_f64(),
        Value::Object(object) => figure(object.get("value")),
        Value::String(text) => text.split_whitespace().next()?.parse().ok().filter(|figure: &f64| figure.is_finite()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATIC_ANSWER: &str = include_str!("../../tests/rocm-smi/amd-smi-static.json");
    const METRIC_ANSWER: &str = include_str!("../../tests/rocm-smi/amd-smi-metric.json");
    const LIST_ANSWER: &str = include_str!("../../tests/rocm-smi/amd-smi-list.json");

    #[test]
    fn gpus_of_a_server() {
        let (list, fixed, metric) =
            (read(LIST_ANSWER).unwrap(), read(STATIC_ANSWER).unwrap(), read(METRIC_ANSWER).unwrap());
        let devices = devices(&list, &fixed, &metric);
        assert_eq!(version(&fixed).as_deref(), Some("6.12.12"));
        // HIP counts these two the other way round.
        let seen: Vec<_> = devices.iter().map(|device| (device.index, device.physical_index)).collect();
        assert_eq!(seen, [(0, Some(1)), (1, Some(0))]);
        let second = &devices[1];
        assert_eq!(second.name, "AMD Instinct MI300X");
        assert_eq!(second.bus_id.as_deref(), Some("0000:05:00.0"));
        assert_eq!((second.memory_total, second.memory_free), (Some(196_592 << 20), Some(196_309 << 20)));
        assert_eq!((second.power_watts, second.temperature_celsius), (Some(139.0), Some(41.0)));
        assert_eq!(second.numa_node, Some(0));
        assert_eq!(devices[0].power_watts, None);
    }

    #[test]
    fn the_later_form_with_the_list_under_a_key() {
        let wrapped = format!("{{\"gpu_data\": {METRIC_ANSWER}}}");
        assert_eq!(read(&wrapped).unwrap(), read(METRIC_ANSWER).unwrap());
    }

    #[test]
    fn both_forms_of_the_topology() {
        let old = r#"[{"gpu": 0, "link_type": {"gpu_0": "SELF", "gpu_1": "PCIE"}}, {"gpu": 1, "link_type": {"gpu_0": "PCIE", "gpu_1": "SELF"}}]"#;
        assert_eq!(links(&read(old).unwrap()), [([0, 1], LinkKind::Phb)]);
        let new = r#"[{"gpu": 0, "bdf": "0000:01:00.0", "links": [{"gpu": 0, "link_type": "SELF", "num_hops": 0},
                      {"gpu": 1, "link_status": "ENABLED", "link_type": "XGMI", "num_hops": 1, "bandwidth": "50000-100000"}]}]"#;
        assert_eq!(links(&read(new).unwrap()), [([0, 1], LinkKind::Xgmi)]);
    }

    #[test]
    fn what_is_no_answer_is_none() {
        assert!(read("ERROR: amdsmi could not be initialized\n").is_none());
        assert!(read(r#"{"error": "x"}"#).is_none());
    }
}
