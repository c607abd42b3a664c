//! Streams tensors into safetensors files, in shards with an index where they exceed a size.
//!
//! The layout follows from names, dtypes and shapes alone, so it is fixed before the first value is known and
//! tensors may then be written in any order; memory holds no more than the tensor being written.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::f16;
use rayon::prelude::*;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{INDEX_FILE, SINGLE_FILE};
use crate::cpu::{InstructionSet, bf16_bytes};

/// The shard size of transformers' `save_pretrained`: 5 GB, not GiB.
pub const DEFAULT_MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Size of the pieces in which [`CheckpointWriter::write_pieces`] writes a tensor.
pub const PIECE_BYTES: usize = 1 << 20;

/// Why a checkpoint could not be written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointWriteError {
    /// A file could not be created, written, flushed or renamed.
    #[error("cannot write `{}`", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Two tensors have one name.
    #[error("tensor `{0}` is declared twice")]
    Duplicate(String),
    /// The tensor was not declared when the writer was created.
    #[error("tensor `{0}` was not declared")]
    Undeclared(String),
    /// The tensor has been written before.
    #[error("tensor `{0}` is written twice")]
    WrittenTwice(String),
    /// The number of values or bytes does not fit the declared shape.
    #[error("tensor `{name}` is declared with {expected} {unit} and written with {found}")]
    WrongLength {
        /// The tensor.
        name: String,
        /// What is counted: values or bytes.
        unit: &'static str,
        /// The number that follows from shape and dtype.
        expected: usize,
        /// The number given.
        found: usize,
    },
    /// The declared dtype is not one that f32 values are rounded to.
    #[error("tensor `{name}` is declared as {dtype}, to which f32 values are not rounded")]
    NotAFloat {
        /// The tensor.
        name: String,
        /// Its declared dtype.
        dtype: Dtype,
    },
    /// `finish` was called before every tensor was written.
    #[error("{count} declared tensors were never written, the first is `{first}`")]
    Unwritten {
        /// How many.
        count: usize,
        /// The first by name.
        first: String,
    },
}

/// When the files of a checkpoint are flushed to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Flush {
    /// Before they get their names: who sees a name sees a whole file, whatever happens to the machine.
    #[default]
    Now,
    /// By the caller, before anybody may take them for whole. Until then a loss of power leaves zeros under their
    /// names.
    Later,
}

/// A tensor to be written: its name, type and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name, as in the published checkpoint.
    pub name: String,
    /// The type it is stored in.
    pub dtype: Dtype,
    /// Extent of each dimension, slowest first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Describes a tensor.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }

    /// Size of its values in bytes.
    pub fn size_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

struct Shard {
    file: File,
    temporary: PathBuf,
    name: String,
}

struct Slot {
    spec: TensorSpec,
    shard: usize,
    offset: u64,
    written: bool,
}

/// Writes a checkpoint tensor by tensor; the files appear under their names when [`CheckpointWriter::finish`] returns.
pub struct CheckpointWriter {
    folder: PathBuf,
    shards: Vec<Shard>,
    slots: BTreeMap<String, Slot>,
    finished: bool,
}

impl CheckpointWriter {
    /// Lays out the files for `specs` in `folder` and creates them under temporary names.
    ///
    /// Tensors are dealt to shards greedily in the order given: a shard is closed when the next tensor would make it
    /// larger than `max_shard_bytes`, and a tensor larger than that has a shard of its own. One shard is called
    /// `model.safetensors` and needs no index.
    ///
    /// # Errors
    /// Fails if a name is given twice or a file cannot be created.
    pub fn create(folder: &Path, specs: Vec<TensorSpec>, max_shard_bytes: u64) -> Result<Self, CheckpointWriteError> {
        let groups = deal(specs, max_shard_bytes);
        let count = groups.len();
        let name = |number: usize| match count {
            1 => SINGLE_FILE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        Self::lay_out(folder, groups.into_iter().enumerate().map(|(number, specs)| (name(number), specs)))
    }

    /// Lays out one file of the given name, as adapters have it (`adapter_model.safetensors`).
    ///
    /// # Errors
    /// Fails if a name is given twice or the file cannot be created.
    pub fn create_file(path: &Path, specs: Vec<TensorSpec>) -> Result<Self, CheckpointWriteError> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Self::lay_out(folder, std::iter::once((name, specs)))
    }

    fn lay_out(
        folder: &Path,
        groups: impl Iterator<Item = (String, Vec<TensorSpec>)>,
    ) -> Result<Self, CheckpointWriteError> {
        let mut writer =
            Self { folder: folder.to_path_buf(), shards: Vec::new(), slots: BTreeMap::new(), finished: false };
        for (name, mut specs) in groups {
            // Wide types first, as the reference writer has it: every tensor is then aligned to its element.
            specs.sort_by(|a, b| b.dtype.bitsize().cmp(&a.dtype.bitsize()).then_with(|| a.name.cmp(&b.name)));
            writer.add_shard(name, specs)?;
        }
        Ok(writer)
    }

    fn add_shard(&mut self, name: String, specs: Vec<TensorSpec>) -> Result<(), CheckpointWriteError> {
        let (header, data_bytes) = header(&specs);
        let temporary = self.folder.join(format!(".{name}.partial"));
        let io = |source| CheckpointWriteError::Io { path: temporary.clone(), source };
        let file = File::create(&temporary).map_err(io)?;
        self.shards.push(Shard { file, temporary: temporary.clone(), name });
        let shard = self.shards.len() - 1;
        let file = &self.shards[shard].file;
        file.write_all_at(&header, 0).map_err(io)?;
        file.set_len(header.len() as u64 + data_bytes).map_err(io)?;
        let mut offset = header.len() as u64;
        for spec in specs {
            let next = offset + spec.size_bytes() as u64;
            let name = spec.name.clone();
            if self.slots.insert(name.clone(), Slot { spec, shard, offset, written: false }).is_some() {
                return Err(CheckpointWriteError::Duplicate(name));
            }
            offset = next;
        }
        Ok(())
    }

    /// Writes a tensor from f32 values, rounded once to its declared type (to nearest, ties to even).
    ///
    /// # Errors
    /// Fails if the tensor is not declared, not of that length, no float, already written, or the disk refuses.
    pub fn write_f32(&mut self, name: &str, values: &[f32]) -> Result<(), CheckpointWriteError> {
        let spec = &self.slot(name)?.spec;
        let expected = spec.shape.iter().product();
        if values.len() != expected {
            let (name, unit, found) = (name.to_owned(), "values", values.len());
            return Err(CheckpointWriteError::WrongLength { name, unit, expected, found });
        }
        let mut bytes = vec![0; spec.size_bytes()];
        if !encode_float(spec.dtype, values, &mut bytes) {
            return Err(CheckpointWriteError::NotAFloat { name: name.to_owned(), dtype: spec.dtype });
        }
        self.write_bytes(name, &bytes)
    }

    /// Writes a tensor from its bytes, already little-endian and of the declared type.
    ///
    /// # Errors
    /// Fails if the tensor is not declared, not of that length, already written, or the disk refuses.
    pub fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointWriteError> {
        let slot = self.slot(name)?;
        let expected = slot.spec.size_bytes();
        if bytes.len() != expected {
            let (name, unit, found) = (name.to_owned(), "bytes", bytes.len());
            return Err(CheckpointWriteError::WrongLength { name, unit, expected, found });
        }
        if slot.written {
            return Err(CheckpointWriteError::WrittenTwice(name.to_owned()));
        }
        let shard = &self.shards[slot.shard];
        let pieces = bytes.par_chunks(PIECE_BYTES).enumerate();
        let write = |(index, piece)| shard.file.write_all_at(piece, slot.offset + (index * PIECE_BYTES) as u64);
        let io = |source| CheckpointWriteError::Io { path: shard.temporary.clone(), source };
        pieces.try_for_each(write).map_err(io)?;
        self.slots.get_mut(name).expect("looked up above").written = true;
        Ok(())
    }

    /// Writes a tensor in pieces that are made on several threads: `fill` gets room to work in that a thread keeps for
    /// a while, the number of a piece's first byte in the tensor, and a buffer to fill with its bytes. A piece is a
    /// multiple of `unit_bytes` (a row), as many as fit into [`PIECE_BYTES`] and at least one; memory holds one
    /// piece per thread. Returns what `fill` did, in the order of the pieces.
    ///
    /// # Errors
    /// Fails if `fill` does, if the tensor is not declared, not made of such units or already written, or the disk
    /// refuses.
    pub fn write_pieces<R: Default, T: Send, E: From<CheckpointWriteError> + Send>(
        &mut self,
        name: &str,
        unit_bytes: usize,
        fill: impl Fn(&mut R, usize, &mut [u8]) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        let slot = self.slot(name)?;
        let size = slot.spec.size_bytes();
        if slot.written {
            return Err(CheckpointWriteError::WrittenTwice(name.to_owned()).into());
        }
        if unit_bytes == 0 || !size.is_multiple_of(unit_bytes) {
            let (name, unit, found) = (name.to_owned(), "bytes", unit_bytes);
            return Err(CheckpointWriteError::WrongLength { name, unit, expected: size, found }.into());
        }
        let piece_bytes = (PIECE_BYTES / unit_bytes).max(1) * unit_bytes;
        let shard = &self.shards[slot.shard];
        let write = |(room, buffer): &mut (R, Vec<u8>), piece: usize| -> Result<T, E> {
            let first = piece * piece_bytes;
            buffer.resize(piece_bytes.min(size - first), 0);
            let filled = fill(room, first, buffer)?;
            let io = |source| CheckpointWriteError::Io { path: shard.temporary.clone(), source };
            shard.file.write_all_at(buffer, slot.offset + first as u64).map_err(io)?;
            Ok(filled)
        };
        let pieces = (0..size.div_ceil(piece_bytes)).into_par_iter();
        let filled = pieces.map_init(Default::default, write).collect::<Result<Vec<T>, E>>()?;
        self.slots.get_mut(name).expect("looked up above").written = true;
        Ok(filled)
    }

    fn slot(&self, name: &str) -> Result<&Slot, CheckpointWriteError> {
        self.slots.get(name).ok_or_else(|| CheckpointWriteError::Undeclared(name.to_owned()))
    }

    /// Flushes the files, gives them their names, and writes the index where there are several. Returns the paths
    /// written.
    ///
    /// # Errors
    /// Fails if a declared tensor was never written, or the disk refuses.
    pub fn finish(self) -> Result<Vec<PathBuf>, CheckpointWriteError> {
        self.finish_with(Flush::Now)
    }

    /// As [`CheckpointWriter::finish`], with a choice of when the weights are flushed.
    ///
    /// # Errors
    /// As [`CheckpointWriter::finish`].
    pub fn finish_with(mut self, flush: Flush) -> Result<Vec<PathBuf>, CheckpointWriteError> {
        let mut unwritten = self.slots.iter().filter(|(_, slot)| !slot.written).map(|(name, _)| name);
        if let Some(first) = unwritten.next() {
            let (first, count) = (first.clone(), 1 + unwritten.count());
            return Err(CheckpointWriteError::Unwritten { count, first });
        }
        let mut written = Vec::new();
        if flush == Flush::Now {
            for Shard { file, temporary, .. } in &self.shards {
                file.sync_all().map_err(|source| CheckpointWriteError::Io { path: temporary.clone(), source })?;
            }
        }
        for shard in &self.shards {
            let path = self.folder.join(&shard.name);
            std::fs::rename(&shard.temporary, &path)
                .map_err(|source| CheckpointWriteError::Io { path: path.clone(), source })?;
            written.push(path);
        }
        if self.shards.len() > 1 {
            written.push(self.write_index()?);
        }
        sync_folder(&self.folder)?;
        self.finished = true;
        Ok(written)
    }

    fn write_index(&self) -> Result<PathBuf, CheckpointWriteError> {
        let total: usize = self.slots.values().map(|slot| slot.spec.size_bytes()).sum();
        let weight_map: Map<String, Value> =
            self.slots.iter().map(|(name, slot)| (name.clone(), json!(self.shards[slot.shard].name))).collect();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        let path = self.folder.join(INDEX_FILE);
        write_atomically(&path, format!("{index:#}\n").as_bytes())?;
        Ok(path)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if !self.finished {
            for shard in &self.shards {
                // Whatever made us give up is reported already; a leftover is harmless.
                let _ = std::fs::remove_file(&shard.temporary);
            }
        }
    }
}

/// Writes a small file under a temporary name, flushes it and renames it into place.
pub(crate) fn write_atomically(path: &Path, content: &[u8]) -> Result<(), CheckpointWriteError> {
    let io = |source| CheckpointWriteError::Io { path: path.to_path_buf(), source };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.partial"));
    std::fs::write(&temporary, content).and_then(|()| File::open(&temporary)?.sync_all()).map_err(io)?;
    std::fs::rename(&temporary, path).map_err(io)
}

fn sync_folder(folder: &Path) -> Result<(), CheckpointWriteError> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let io = |source| CheckpointWriteError::Io { path: folder.to_path_buf(), source };
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)
}

/// Deals tensors to shards as `huggingface_hub.split_torch_state_dict_into_shards` does.
fn deal(specs: Vec<TensorSpec>, max_shard_bytes: u64) -> Vec<Vec<TensorSpec>> {
    let mut shards = Vec::new();
    let mut open: Vec<TensorSpec> = Vec::new();
    let mut open_bytes = 0;
    for spec in specs {
        let bytes = spec.size_bytes() as u64;
        if bytes > max_shard_bytes {
            shards.push(vec![spec]);
            continue;
        }
        if open_bytes + bytes > max_shard_bytes {
            shards.push(std::mem::take(&mut open));
            open_bytes = 0;
        }
        open_bytes += bytes;
        open.push(spec);
    }
    if !open.is_empty() || shards.is_empty() {
        shards.push(open);
    }
    shards
}

/// The header of a safetensors file: its length, JSON, and spaces up to a multiple of 8. Also the bytes of all values.
fn header(specs: &[TensorSpec]) -> (Vec<u8>, u64) {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut offset = 0;
    for spec in specs {
        let end = offset + spec.size_bytes();
        let entry = json!({ "dtype": spec.dtype.to_string(), "shape": spec.shape, "data_offsets": [offset, end] });
        entries.insert(spec.name.clone(), entry);
        offset = end;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(&json);
    (header, offset as u64)
}

/// Rounds f32 values to `dtype` (to nearest, ties to even) as little-endian bytes. False if `dtype` is not F32, BF16 or
/// F16.
///
/// # Panics
/// Panics if `bytes` has not the size of the values in that type.
pub fn encode_float(dtype: Dtype, values: &[f32], bytes: &mut [u8]) -> bool {
    const PIECE: usize = 1 << 16;
    let width = match dtype {
        Dtype::F32 => 4,
        Dtype::BF16 | Dtype::F16 => 2,
        _ => return false,
    };
    assert_eq!(bytes.len(), values.len() * width, "the buffer has the size of the encoded values");
    let set = InstructionSet::detect();
    bytes.par_chunks_mut(PIECE * width).zip(values.par_chunks(PIECE)).for_each(|(bytes, values)| match dtype {
        Dtype::F32 => {
            for (bytes, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *bytes = value.to_le_bytes();
            }
        }
        Dtype::BF16 => bf16_bytes(set, values, bytes),
        _ => {
            for (bytes, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *bytes = f16::from_f32(*value).to_le_bytes();
            }
        }
    });
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use safetensors::SafeTensors;

    fn spec(name: &str, values: usize) -> TensorSpec {
        TensorSpec::new(name, Dtype::F32, &[values])
    }

    fn names(shards: &[Vec<TensorSpec>]) -> Vec<Vec<&str>> {
        shards.iter().map(|shard| shard.iter().map(|spec| spec.name.as_str()).collect()).collect()
    }

    #[test]
    fn shards_are_filled_greedily_in_order() {
        let shards = deal(vec![spec("a", 2), spec("b", 2), spec("c", 1), spec("big", 9), spec("d", 3)], 16);
        assert_eq!(names(&shards), [vec!["a", "b"], vec!["big"], vec!["c", "d"]]);
        assert_eq!(names(&deal(vec![spec("a", 2), spec("b", 2)], 16)), [["a", "b"]], "exactly full is one shard");
    }

    #[test]
    fn files_are_what_the_reference_reader_expects() {
        let folder = tempfile::tempdir().unwrap();
        let specs = vec![TensorSpec::new("half", Dtype::BF16, &[3]), TensorSpec::new("full", Dtype::F32, &[1, 2])];
        let mut writer = CheckpointWriter::create(folder.path(), specs, DEFAULT_MAX_SHARD_BYTES).unwrap();
        writer.write_f32("full", &[1.0, -2.0]).unwrap();
        // 1 + 2^-8 lies half-way between two bf16 values: the even one is 1.
        writer.write_f32("half", &[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::NAN]).unwrap();
        let written = writer.finish().unwrap();
        assert_eq!(written, [folder.path().join(SINGLE_FILE)]);
        let file = std::fs::read(&written[0]).unwrap();
        let (header_bytes, metadata) = SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(header_bytes % 8, 0);
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        let tensors = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.tensor("full").unwrap().shape(), [1, 2]);
        let half = tensors.tensor("half").unwrap();
        assert_eq!(half.data()[..4], [0x80, 0x3f, 0x82, 0x3f]);
        assert!(bf16::from_le_bytes([half.data()[4], half.data()[5]]).is_nan());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn the_index_names_every_tensor_and_the_total() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = CheckpointWriter::create(folder.path(), vec![spec("a", 4), spec("b", 4)], 16).unwrap();
        writer.write_f32("b", &[1.0; 4]).unwrap();
        writer.write_f32("a", &[2.0; 4]).unwrap();
        assert_eq!(writer.finish().unwrap().len(), 3);
        let index: Value = serde_json::from_slice(&std::fs::read(folder.path().join(INDEX_FILE)).unwrap()).unwrap();
        assert_eq!(
            index,
            json!({ "metadata": { "total_size": 32 }, "weight_map": {
                "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors" } })
        );
    }

    #[test]
    fn an_unfinished_checkpoint_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = CheckpointWriter::create(folder.path(), vec![spec("a", 4), spec("b", 4)], 16).unwrap();
        writer.write_f32("a", &[0.0; 4]).unwrap();
        assert!(matches!(writer.write_f32("a", &[0.0; 4]), Err(CheckpointWriteError::WrittenTwice(_))));
        assert!(matches!(writer.write_f32("c", &[0.0; 4]), Err(CheckpointWriteError::Undeclared(_))));
        assert!(matches!(writer.write_f32("b", &[0.0; 3]), Err(CheckpointWriteError::WrongLength { .. })));
        assert!(matches!(writer.finish(), Err(CheckpointWriteError::Unwritten { count: 1, .. })));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_name_given_twice_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let twice = CheckpointWriter::create(folder.path(), vec![spec("a", 1), spec("a", 1)], 100);
        assert!(matches!(twice.err(), Some(CheckpointWriteError::Duplicate(name)) if name == "a"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
