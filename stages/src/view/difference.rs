//! How two versions of a file differ, in words: tensors by their largest difference, text by its first line that
//! differs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use half::{bf16, f16};
use serde::Deserialize;

/// Longer texts and headers are not read.
const MOST_TEXT: u64 = 64 << 20;

/// How much of a tensor is compared at a time; a multiple of the size of every type.
const BLOCK: usize = 1 << 20;

/// How two files differ, where both are tensors or both are text; `None` where nothing more than that they do can be
/// said.
pub fn in_words(old: &Path, new: &Path) -> Option<String> {
    tensors(old, new).or_else(|| text(old, new))
}

/// `2 of 14 tensors differ, by 3.1e-7 at most (in `model.norm.weight`)`.
fn tensors(old: &Path, new: &Path) -> Option<String> {
    let (mut old, mut new) = (Tensors::open(old)?, Tensors::open(new)?);
    if old.infos.keys().ne(new.infos.keys()) {
        return Some("it has other tensors".to_owned());
    }
    let mut different = 0;
    let mut largest: Option<(f64, String)> = None;
    for (name, before) in old.infos.clone() {
        let after = &new.infos[&name];
        if (&before.dtype, &before.shape) != (&after.dtype, &after.shape) {
            return Some(format!("`{name}` has another type or shape"));
        }
        let after = after.data_offsets;
        let Some(distance) = distance(&mut old, &mut new, &before, after)? else { continue };
        different += 1;
        // What is no number is further away than any.
        let is_largest = |most: f64| !most.is_nan() && (distance.is_nan() || distance > most);
        if largest.as_ref().is_none_or(|(most, _)| is_largest(*most)) {
            largest = Some((distance, name));
        }
    }
    let all = old.infos.len();
    Some(match largest {
        Some((distance, name)) => format!("{different} of {all} tensors differ, max |Δ| {distance:.3e} (in `{name}`)"),
        None => "the tensors are the same, and the rest of the file differs".to_owned(),
    })
}

/// A safetensors file, read piece by piece: two checkpoints need not fit into memory.
struct Tensors {
    file: File,
    infos: BTreeMap<String, TensorInfo>,
    data_from: u64,
}

#[derive(Clone, Deserialize)]
struct TensorInfo {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Tensors {
    fn open(path: &Path) -> Option<Self> {
        let mut file = File::open(path).ok()?;
        let mut length = [0; 8];
        file.read_exact(&mut length).ok()?;
        let length = u64::from_le_bytes(length);
        if length > MOST_TEXT {
            return None;
        }
        let mut header = Vec::new();
        file.by_ref().take(length).read_to_end(&mut header).ok()?;
        let mut header: BTreeMap<String, serde_json::Value> = serde_json::from_slice(&header).ok()?;
        header.remove("__metadata__");
        let infos = header.into_iter().map(|(name, info)| Some((name, serde_json::from_value(info).ok()?)));
        Some(Self { file, infos: infos.collect::<Option<_>>()?, data_from: 8 + length })
    }

    fn read(&mut self, from: u64, block: &mut [u8]) -> Option<()> {
        self.file.read_exact_at(block, self.data_from.checked_add(from)?).ok()
    }
}

/// The largest difference of two values in the same place; `Some(None)` where all bytes are the same, `None` where
/// nothing can be said.
fn distance(old: &mut Tensors, new: &mut Tensors, info: &TensorInfo, after: (u64, u64)) -> Option<Option<f64>> {
    let (from, to) = info.data_offsets;
    let length = to.checked_sub(from)?;
    if after.1.checked_sub(after.0)? != length {
        return None;
    }
    let mut blocks = [vec![0; BLOCK], vec![0; BLOCK]];
    let mut found: Option<f64> = None;
    for at in (0..length).step_by(BLOCK) {
        let size = usize::try_from(length - at).unwrap_or(BLOCK).min(BLOCK);
        let [before, now] = &mut blocks;
        old.read(from + at, &mut before[..size])?;
        new.read(after.0 + at, &mut now[..size])?;
        if before[..size] != now[..size] {
            let next = largest(&info.dtype, &before[..size], &now[..size])?;
            found = Some(found.map_or(next, |most| further(most, next)));
        }
    }
    Some(found)
}

/// The largest difference within two pieces.
fn largest(dtype: &str, old: &[u8], new: &[u8]) -> Option<f64> {
    fn most<const N: usize>(old: &[u8], new: &[u8], value: impl Fn([u8; N]) -> f64) -> f64 {
        let pairs = old.as_chunks::<N>().0.iter().zip(new.as_chunks::<N>().0);
        // Equal bits are no difference, whatever they stand for.
        pairs.filter(|(old, new)| old != new).map(|(old, new)| (value(*old) - value(*new)).abs()).fold(0.0, further)
    }
    Some(match dtype {
        "F64" => most(old, new, f64::from_le_bytes),
        "F32" => most(old, new, |bytes| f32::from_le_bytes(bytes).into()),
        "BF16" => most(old, new, |bytes| bf16::from_le_bytes(bytes).into()),
        "F16" => most(old, new, |bytes| f16::from_le_bytes(bytes).into()),
        "I64" => most(old, new, |bytes| i64::from_le_bytes(bytes) as f64),
        "I32" => most(old, new, |bytes| i32::from_le_bytes(bytes).into()),
        "U8" => most(old, new, |bytes| u8::from_le_bytes(bytes).into()),
        _ => return None,
    })
}

/// The larger of two distances; what is no number is further away than any.
fn further(one: f64, other: f64) -> f64 {
    if one.is_nan() || other.is_nan() { f64::NAN } else { one.max(other) }
}

/// `line 12 differs first`.
fn text(old: &Path, new: &Path) -> Option<String> {
    let is_short = |path: &Path| std::fs::metadata(path).is_ok_and(|file| file.len() <= MOST_TEXT);
    let whole = |path: &Path| std::fs::read_to_string(path).ok().filter(|text| !text.contains('\0'));
    if !is_short(old) || !is_short(new) {
        return None;
    }
    let (old, new) = (whole(old)?, whole(new)?);
    let same = old.lines().zip(new.lines()).take_while(|(old, new)| old == new).count();
    Some(format!("line {} differs first", same + 1))
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    use super::*;

    fn checkpoint(folder: &Path, name: &str, values: &[f32]) -> std::path::PathBuf {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let same = [0u8; 8];
        let tensors = [
            ("moved", TensorView::new(Dtype::F32, vec![values.len()], &bytes).unwrap()),
            ("same", TensorView::new(Dtype::F32, vec![2], &same).unwrap()),
        ];
        let path = folder.join(name);
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        path
    }

    #[test]
    fn tensors_differ_by_their_largest_distance() {
        let folder = tempfile::tempdir().unwrap();
        let old = checkpoint(folder.path(), "old", &[1.0, -2.0, f32::NAN]);
        let new = checkpoint(folder.path(), "new", &[1.0, -2.5, f32::NAN]);
        let words = in_words(&old, &new).unwrap();
        assert_eq!(words, "1 of 2 tensors differ, max |Δ| 5.000e-1 (in `moved`)");
        let broken = checkpoint(folder.path(), "broken", &[1.0, f32::NAN, f32::NAN]);
        assert!(in_words(&old, &broken).unwrap().contains("NaN"));
        let short = checkpoint(folder.path(), "short", &[1.0]);
        assert!(in_words(&old, &short).unwrap().contains("another type or shape"));
    }

    #[test]
    fn text_differs_from_a_line_on_and_other_bytes_have_no_words() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(folder.path().join(name), bytes).unwrap();
            folder.path().join(name)
        };
        let (old, new) = (write("a", b"one\ntwo\nthree\n"), write("b", b"one\n2\nthree\n"));
        assert_eq!(in_words(&old, &new).as_deref(), Some("line 2 differs first"));
        assert_eq!(in_words(&write("c", b"\0PAR1"), &new), None);
    }
}
