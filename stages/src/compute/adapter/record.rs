//! The record that lies with an adapter or a model that was made here and published: which weights it was trained on or
//! has.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use engine::artifact::{ARTIFACT_FILE, Description, Facts};
use engine::local_files::MOST_READ;
use engine::publish;

use crate::compute::checkpoint::WEIGHTS;
use crate::compute::quantize::QUANTIZE;
use crate::data::artifact::{Adapter, OutputKind};
use crate::data::prompt::PROMPT;

/// Whether a file of an adapter's folder is where a version of this program kept the record.
pub fn is_one(name: &str) -> bool {
    [publish::RECORD, ARTIFACT_FILE].contains(&name)
}

/// The facts of an adapter that is taken back: which weights it was trained on, in which format where they were
/// quantised, and with which prompts. None where the folder was not published here, as anybody may have a file of such
/// a name.
pub fn trained_on(folder: &Path) -> Option<Facts> {
    let names = [WEIGHTS, QUANTIZE, PROMPT];
    Some(facts(folder, Adapter::NAME)?.into_iter().filter(|(name, _)| names.contains(&name.as_str())).collect())
}

/// All facts of an adapter or a model that was published here.
pub fn facts(folder: &Path, kind: &str) -> Option<Facts> {
    let description = publish::description(folder).or_else(|| described(&folder.join(ARTIFACT_FILE)))?;
    let is_one = description.kind == kind && description.facts.get(WEIGHTS)?.is_string();
    is_one.then_some(description.facts)
}

/// What earlier versions put among the files.
fn described(record: &Path) -> Option<Description> {
    let mut text = Vec::new();
    let is_file = fs::symlink_metadata(record).ok()?.is_file();
    is_file.then(|| File::open(record).ok()?.take(MOST_READ).read_to_end(&mut text).ok())??;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_record_of_an_adapter_tells_its_base() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join(ARTIFACT_FILE);
        assert_eq!(trained_on(folder.path()), None);
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
                Some(json!({"weights": "x"})),
            ),
            (
                format!(
                    "{{\"format\":1,\"kind\":\"adapter\",\"identity\":\"{identity}\",\"facts\":{{\"weights\":\"x\",\"rank\":4,\"quantize\":{{\"base\":\"nf4\"}}}}}}"
                ),
                Some(json!({"weights": "x", "quantize": {"base": "nf4"}})),
            ),
        ] {
            std::fs::write(&record, &text).unwrap();
            assert_eq!(trained_on(folder.path()).map(serde_json::Value::Object), expected, "{text}");
        }
    }
}
