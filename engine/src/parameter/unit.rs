//! Values with a unit: lengths of time and numbers of bytes.

use std::str::FromStr;
use std::time::Duration;

use serde_json::json;

use super::{ByteSize, Json, KeyWriter, Parameter, Period, Reader};
use crate::file::tree::{Node, Value};

const PERIODS: [(&str, u64); 5] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

const SIZES: [(&str, u64); 10] = [
    ("B", 1),
    ("KB", 1000),
    ("kB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

const A_PERIOD: &str = "a length of time such as `90s`, `5m` or `12h`";
const A_SIZE: &str = "a size such as `40GiB` or `500MB`";

impl Parameter for Period {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let milliseconds = read_quantity(node, reader, A_PERIOD, &PERIODS)?;
        Some(Self(Duration::from_millis(milliseconds)))
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(format!("{}ms", self.0.as_millis()));
    }

    fn schema() -> Json {
        json!({ "type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)$" })
    }
}

impl Parameter for ByteSize {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        read_quantity(node, reader, A_SIZE, &SIZES).map(Self)
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(format!("{}B", self.0));
    }

    fn schema() -> Json {
        json!({ "type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(B|[kKMGT]B|[KMGT]iB)$" })
    }
}

impl FromStr for Period {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let milliseconds = quantity(text, &PERIODS).ok_or_else(|| format!("expected {A_PERIOD}"))?;
        Ok(Self(Duration::from_millis(milliseconds)))
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        quantity(text, &SIZES).map(Self).ok_or_else(|| format!("expected {A_SIZE}"))
    }
}

/// Reads a number with a unit, in the smallest unit.
fn read_quantity(node: &Node, reader: &mut Reader, expected: &str, units: &[(&str, u64)]) -> Option<u64> {
    let Value::String(text) = &node.value else {
        reader.wrong_type(node, expected);
        if let (Value::Integer(number), Some(problem)) = (&node.value, reader.problems.last_mut()) {
            let (unit, _) = units[1];
            problem.help = Some(format!("add the unit, such as `{number}{unit}`"));
        }
        return None;
    };
    let amount = quantity(text, units);
    if amount.is_none() {
        reader.bad_value(node, format!("cannot read `{text}`"), expected);
    }
    amount
}

fn quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    // Nothing is nothing in any unit.
    if text == "0" {
        return Some(0);
    }
    let letters = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(letters);
    let factor = units.iter().find(|(name, _)| *name == unit.trim_start()).map(|(_, factor)| *factor)?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let amount = number.parse::<f64>().ok()? * factor as f64;
    (amount.fract() == 0.0 && amount < 9e15).then_some(amount as u64)
}
