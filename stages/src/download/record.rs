//! The record that lies with an adapter that was made here and published: which weights it was trained on.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use engine::artifact::{ARTIFACT_FILE, Description};
use engine::survey::MOST_READ;
use serde_json::Value;

use crate::artifact::{Adapter, OutputKind};
use crate::checkpoint::WEIGHTS;

/// Where the record lies, seen from the adapter's folder.
pub(super) const RECORD: &str = ARTIFACT_FILE;

/// The fact of an adapter that is taken back: which weights it was trained on. None where the file is no record of an adapter, as
/// anybody may have a file of this name.
pub(super) fn trained_on(record: &Path) -> Option<Value> {
    let mut text = Vec::new();
    File::open(record).ok()?.take(MOST_READ).read_to_end(&mut text).ok()?;
    let description: Description = serde_json::from_slice(&text).ok()?;
    description.facts.get(WEIGHTS).filter(|weights| description.kind == Adapter::NAME && weights.is_string()).cloned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn only_the_record_of_an_adapter_tells_its_base() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join(RECORD);
        assert_eq!(trained_on(&record), None);
        let identity = "ab".repeat(32);
        for (text, expected) in [
            ("no JSON".to_owned(), None),
            ("{\"weights\": \"x\"}".to_owned(), None),
            (
                format!(
                    "{{\"format\":1,\"kind\":\"model\",\"identity\":\"{identity}\",\"facts\":{{\"weights\":\"x\"}}}}"
                ),
                None,
            ),
            (
                format!(
                    "{{\"format\":1,\"kind\":\"adapter\",\"identity\":\"{identity}\",\"facts\":{{\"weights\":7}}}}"
                ),
                None,
            ),
            (
                format!(
                    "{{\"format\":1,\"kind\":\"adapter\",\"identity\":\"{identity}\",\"facts\":{{\"weights\":\"x\"}}}}"
                ),
                Some(Value::from("x")),
            ),
        ] {
            std::fs::write(&record, &text).unwrap();
            assert_eq!(trained_on(&record), expected, "{text}");
        }
    }
}
