//! How two versions of a table differ: how many rows, and which of the attributes that readers go by.
//!
//! Parts are compared by their identities first; only the rows of parts that are not on both sides are read, as
//! digests. Rows are compared as a bag: one that was inserted at the top changes itself alone, and not all behind it.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::PathBuf;

use arrow::array::{Array, Int32Array, ListArray, RecordBatch, StringArray, UInt32Array};
use cache::Digest;
use engine::artifact::Facts;
use engine::change::{StoredArtifact, TableChange};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::kind::{OutputKind, Packs, Rows, Tokens};
use super::parts::{Listed, listed_parts};
use super::said;

/// Parts whose rows are compared at most, on both sides together: a million rows, of which a digest of 8 bytes each is
/// held.
const MOST_PARTS: usize = 128;

/// Rows decoded at once.
const ROWS_PER_READ: usize = 256;

/// The facts beside the values that enter the identity of rows.
const ROWS_ATTRIBUTES: [&str; 4] = ["shape", "columns", "template", "response"];

/// The same of tokens and packs.
const TOKENS_ATTRIBUTES: [&str; 4] = ["shape", "bos_token_id", "eos_token_id", "pad_token_id"];

/// How two stored tables of a kind differ; `None` where they are no tables, or cannot be read.
pub fn compare(kind: &str, old: &StoredArtifact, new: &StoredArtifact) -> Option<TableChange> {
    let attributes: &[&str] = match kind {
        _ if kind == Rows::NAME => &ROWS_ATTRIBUTES,
        _ if kind == Tokens::NAME || kind == Packs::NAME => &TOKENS_ATTRIBUTES,
        _ => return None,
    };
    let (before, now) = (parts(old)?, parts(new)?);
    let rows = |parts: &[Listed]| parts.iter().map(|part| part.rows).sum::<u64>();
    let change = TableChange {
        rows_before: rows(&before),
        rows_now: rows(&now),
        attributes: differing(attributes, &old.facts, &new.facts),
        ..TableChange::default()
    };
    let (only_before, only_now) = (only_in(&before, &now), only_in(&now, &before));
    if only_before.len() + only_now.len() > MOST_PARTS {
        return Some(TableChange { at_most: true, ..counted(change, rows(&only_before), rows(&only_now)) });
    }
    let mut bag: HashMap<u64, i64> = HashMap::new();
    for part in &only_before {
        each_row(&old.files, part, &mut |row| *bag.entry(row).or_default() -= 1)?;
    }
    for part in &only_now {
        each_row(&new.files, part, &mut |row| *bag.entry(row).or_default() += 1)?;
    }
    let sum = |sign: i64| bag.values().map(|count| (count * sign).max(0).unsigned_abs()).sum::<u64>();
    let (gone, came) = (sum(-1), sum(1));
    let reordered = gone + came == 0 && change.attributes.is_empty();
    Some(TableChange { reordered, ..counted(change, gone, came) })
}

/// Rows that went and rows that came: as many as there are of both took each other's place.
fn counted(change: TableChange, gone: u64, came: u64) -> TableChange {
    let changed = gone.min(came);
    TableChange { changed, added: came - changed, removed: gone - changed, ..change }
}

fn differing(names: &[&str], old: &Facts, new: &Facts) -> Vec<String> {
    names.iter().filter(|name| old.get(**name) != new.get(**name)).map(|name| (*name).to_owned()).collect()
}

fn parts(artifact: &StoredArtifact) -> Option<Vec<Listed>> {
    listed_parts(artifact.files.get(super::parts::PARTS_FILE)?).ok()
}

/// The parts whose values another table does not have as a part; one that it has twice counts twice.
fn only_in(parts: &[Listed], other: &[Listed]) -> Vec<Listed> {
    let mut theirs: HashMap<Digest, usize> = HashMap::new();
    for part in other {
        *theirs.entry(part.identity).or_default() += 1;
    }
    let mut only = Vec::new();
    for part in parts {
        match theirs.get_mut(&part.identity).filter(|count| **count > 0) {
            Some(count) => *count -= 1,
            None => only.push(part.clone()),
        }
    }
    only
}

/// Calls `see` with a digest of each row of a part.
fn each_row(files: &BTreeMap<String, PathBuf>, part: &Listed, see: &mut dyn FnMut(u64)) -> Option<()> {
    let file = File::open(files.get(&part.file)?).ok()?;
    let batches = ParquetRecordBatchReaderBuilder::try_new(file).ok()?.with_batch_size(ROWS_PER_READ).build().ok()?;
    for batch in batches {
        let batch = batch.ok()?;
        for row in 0..batch.num_rows() {
            see(row_digest(&batch, row)?);
        }
    }
    Some(())
}

/// The first bytes of a digest of a row's values: two rows among a million share them with a chance of one in ten
/// million.
fn row_digest(batch: &RecordBatch, row: usize) -> Option<u64> {
    let mut hasher = cache::Hasher::new();
    for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
        if let Some(texts) = column.as_any().downcast_ref::<StringArray>() {
            let text = texts.value(row);
            // As earlier versions have it, so that what is equal is equal.
            match said::is_marked(field) {
                true => hasher.value(said::json(text).as_bytes()),
                false => hasher.value(text.as_bytes()),
            };
            continue;
        }
        let list = column.as_any().downcast_ref::<ListArray>()?.value(row);
        let mut bytes = Vec::with_capacity(4 * list.len());
        if let Some(ids) = list.as_any().downcast_ref::<UInt32Array>() {
            ids.values().iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
        } else {
            let labels = list.as_any().downcast_ref::<Int32Array>()?;
            labels.values().iter().for_each(|label| bytes.extend_from_slice(&label.to_le_bytes()));
        }
        hasher.value(&bytes);
    }
    let digest = hasher.finish();
    Some(u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("a digest has 32 bytes")))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::data::artifact::{Row, RowsFacts, RowsWriter, Shape, TokenRow, TokensFacts, TokensWriter};

    fn stored(folder: &Path, facts: Facts) -> StoredArtifact {
        let files = fs::read_dir(folder).unwrap().map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), entry.path())
        });
        StoredArtifact { facts, files: files.collect() }
    }

    fn rows(texts: impl IntoIterator<Item = u32>) -> (tempfile::TempDir, StoredArtifact) {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = RowsWriter::create(folder.path(), RowsFacts::text());
        texts.into_iter().for_each(|text| writer.write(Row::Text(format!("row {text}"))).unwrap());
        let (facts, _) = writer.finish(Default::default()).unwrap();
        let stored = stored(folder.path(), facts);
        (folder, stored)
    }

    fn said(old: impl IntoIterator<Item = u32>, new: impl IntoIterator<Item = u32>) -> String {
        let ((_a, old), (_b, new)) = (rows(old), rows(new));
        compare("rows", &old, &new).unwrap().to_string()
    }

    #[test]
    fn rows_are_compared_as_a_bag() {
        let replaced = (0..2000).map(|row| if [7, 1000, 1999].contains(&row) { row + 10_000 } else { row });
        assert_eq!(said(0..2000, replaced), "3 of 2000 rows");
        assert_eq!(said(0..2000, 0..2050), "50 rows added to 2000");
        assert_eq!(said(0..2000, 5..2000), "5 of 2000 rows removed");
        assert_eq!(said(0..2000, [9999].into_iter().chain(0..2000)), "1 row added to 2000");
        assert_eq!(said(0..20, (0..20).rev()), "its rows are in another order");
        assert_eq!(said(0..20, [0; 20]), "19 of 20 rows");
    }

    #[test]
    fn parts_that_are_on_both_sides_are_not_read() {
        let ((_a, old), (_b, mut new)) =
            (rows(0..20_000), rows((0..20_000).map(|row| if row == 9000 { 1 } else { row })));
        new.files.remove("part-00000.parquet");
        new.files.remove("part-00002.parquet");
        assert_eq!(compare("rows", &old, &new).unwrap().to_string(), "1 of 20000 rows");
        new.files.remove("part-00001.parquet");
        assert_eq!(compare("rows", &old, &new), None);
    }

    #[test]
    fn tokens_differ_by_rows_and_by_what_readers_go_by() {
        let tokens = |pad_token_id, last: u32| {
            let folder = tempfile::tempdir().unwrap();
            let facts = TokensFacts { pad_token_id, ..TokensFacts::none(Shape::Text) };
            let mut writer = TokensWriter::tokens(folder.path(), facts);
            for id in [1, 2, last] {
                writer.write(TokenRow::document(vec![id, 5], vec![-100, 5])).unwrap();
            }
            let (facts, _) = writer.finish(|_| ()).unwrap();
            let stored = stored(folder.path(), facts.to_facts());
            (folder, stored)
        };
        let ((_a, old), (_b, other), (_c, padded)) = (tokens(None, 3), tokens(None, 4), tokens(Some(0), 3));
        assert_eq!(compare("tokens", &old, &other).unwrap().to_string(), "1 of 3 rows");
        assert_eq!(compare("tokens", &old, &padded).unwrap().to_string(), "its pad_token_id");
        assert_eq!(compare("model", &old, &other), None);
    }
}
