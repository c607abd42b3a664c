//! What the readers of the store's records hold for any bytes: they end without a panic, what was written is read again
//! as it was, and no path leads out of a folder.
//!
//! Compiled for the tests here and for the fuzzer alone (`fuzz/`).

use std::path::{Component, Path};

use crate::record::{Stored, to_bytes};
use crate::{Digest, ResultRecord, Tree};

/// The record of a result, and the listing of a stored folder.
pub fn records(data: &[u8]) {
    let _ = Stored::read(data, &Digest::of(data));
    if let Ok(record) = serde_json::from_slice::<ResultRecord>(data)
        && record.version == crate::record::RECORD_VERSION
    {
        let key = record.key.result_key();
        assert!(matches!(Stored::read(&to_bytes(&record), &key), Stored::Sound(again) if again == record));
    }
    if let Ok(tree) = serde_json::from_slice::<Tree>(data) {
        for file in tree.files() {
            let parts = Path::new(&file.path).components();
            assert!(parts.into_iter().all(|part| matches!(part, Component::Normal(_))), "{:?}", file.path);
        }
        assert_eq!(serde_json::from_slice::<Tree>(&tree.to_json()).ok().as_ref(), Some(&tree));
    }
}

#[cfg(test)]
#[path = "../../fuzz/mutations.rs"]
mod mutations;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_near_real_ones() {
        mutations::hold(records, "records");
    }
}
