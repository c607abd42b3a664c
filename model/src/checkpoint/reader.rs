//! Reads checkpoints and widens their floats to f32.
//!
//! Knows files, names, shapes and dtypes; what a tensor is for is left to the caller. Values are read from the files
//! piece by piece, on all threads, into memory that is warm: to map them would cost a page fault for every few pages,
//! which takes longer than the copy. The headers, and tensors that are asked for as they lie, come through a map.

#![allow(unsafe_code, reason = "a file is mapped")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::f16;
use memmap2::{Mmap, UncheckedAdvice};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;

use super::gguf::OfGguf;
use super::nf4::QuantizedTensors;
use super::{CheckpointError, INDEX_FILE, SINGLE_FILE, encode_float};
use crate::cpu::{InstructionSet, widen_bf16};
use crate::gguf;

/// Values that one thread reads; more of them are cut over threads.
const PIECE_VALUES: usize = 1 << 16;

/// The largest header of a file, in bytes, and the most tensors in it. The checkpoints with the most tensors have some
/// 90 000 of them, in all of their shards together.
const LARGEST_HEADER: u64 = 64 << 20;
const MOST_TENSORS: u64 = 200_000;

/// The names that a missing one is compared with.
const MOST_COMPARED: usize = 20_000;
const LONGEST_COMPARED: usize = 256;

/// The largest index: it has a line for each tensor.
const LARGEST_INDEX: u64 = 64 << 20;

/// Bytes that are read at a time: they stay in the nearest cache until they are widened.
const READ_BYTES: usize = 32 << 10;

/// Where one tensor lies and what it is made of.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Element type as stored.
    pub dtype: Dtype,
    /// Extent of each dimension, slowest first.
    pub shape: Vec<usize>,
    pub(super) file: usize,
    pub(super) begin: usize,
    pub(super) end: usize,
    /// How it is stored, where that is in a GGUF file.
    pub(super) gguf: Option<OfGguf>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The same elements as another type and shape.
    pub(super) fn stands_for(&self, dtype: Dtype, shape: &[usize]) -> Self {
        Self { dtype, shape: shape.to_vec(), ..self.clone() }
    }

    /// Size of the stored values in bytes.
    pub fn size_bytes(&self) -> usize {
        self.end - self.begin
    }
}

pub(super) struct OpenFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    map: Mmap,
}

impl OpenFile {
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |source| CheckpointError::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only and private to us. As for every user of a map, the file must not be cut
        // while it is read; artefacts are written under a temporary name and never changed in place.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: path.to_path_buf(), file, map })
    }
}

/// A checkpoint opened for reading: every tensor of one or several safetensors files.
pub struct Checkpoint {
    path: PathBuf,
    pub(super) files: Vec<OpenFile>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// Those of them that are stored in NF4.
    pub(super) nf4: QuantizedTensors,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`: `model.safetensors`, or the files that `model.safetensors.index.json` names,
    /// or `model.gguf`.
    ///
    /// All headers are read and checked against the files' lengths; no value is read yet. Where there is an index it
    /// decides: files that it does not name, and tensors of a shard that it does not list, are passed over. An
    /// embedding that is stored as the head it is tied to has its own name here.
    ///
    /// # Errors
    /// Fails if there are no weights, a shard is missing or cut off, or a header is damaged.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self::open_stored(folder)?;
        checkpoint.name_tied_embedding(folder);
        Ok(checkpoint)
    }

    fn open_stored(folder: &Path) -> Result<Self, CheckpointError> {
        let single = folder.join(SINGLE_FILE);
        if single.exists() {
            let mut checkpoint = Self::open_file(&single)?;
            checkpoint.path = folder.to_path_buf();
            return Ok(checkpoint);
        }
        let index = folder.join(INDEX_FILE);
        if index.exists() {
            return Self::open_index(folder, &index);
        }
        if folder.join(gguf::FILE).exists() {
            return Self::open_gguf(folder);
        }
        let pickled =
            ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| folder.join(name).exists());
        let hint =
            if pickled { "; PyTorch's pickled `.bin` weights are not read, convert them to safetensors" } else { "" };
        Err(CheckpointError::NoWeights { folder: folder.to_path_buf(), hint })
    }

    /// Opens a single safetensors file, whatever its name.
    ///
    /// # Errors
    /// Fails if the file cannot be mapped, is cut off, or its header is damaged.
    pub fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        let mut checkpoint = Self::empty(path);
        checkpoint.tensors = checkpoint.add_file(path)?;
        checkpoint.fold_quantized()?;
        Ok(checkpoint)
    }

    pub(super) fn empty(path: &Path) -> Self {
        Self { path: path.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new(), nf4: QuantizedTensors::default() }
    }

    fn open_index(folder: &Path, index_path: &Path) -> Result<Self, CheckpointError> {
        let mut text = Vec::new();
        File::open(index_path)
            .and_then(|file| file.take(LARGEST_INDEX + 1).read_to_end(&mut text))
            .map_err(|source| CheckpointError::Io { path: index_path.to_path_buf(), source })?;
        if text.len() as u64 > LARGEST_INDEX {
            let what = format!("more than {LARGEST_INDEX} bytes");
            return Err(CheckpointError::HeaderTooLarge { path: index_path.to_path_buf(), what, most: LARGEST_INDEX });
        }
        let index: Index = serde_json::from_slice(&text)
            .map_err(|source| CheckpointError::BadIndex { path: index_path.to_path_buf(), source })?;
        let mut by_shard: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &index.weight_map {
            by_shard.entry(shard).or_default().push(tensor);
        }
        let mut checkpoint = Self::empty(folder);
        for (shard, tensors) in by_shard {
            // An index from elsewhere must not make us read files beside the checkpoint.
            if Path::new(shard).file_name().is_none_or(|name| name != shard) {
                return Err(CheckpointError::BadShardName { path: index_path.to_path_buf(), shard: shard.to_owned() });
            }
            let path = folder.join(shard);
            if !path.exists() {
                let (folder, shard) = (folder.to_path_buf(), shard.to_owned());
                return Err(CheckpointError::MissingShard { folder, shard, tensors: tensors.len() });
            }
            let mut stored = checkpoint.add_file(&path)?;
            for tensor in tensors {
                let Some(info) = stored.remove(tensor) else {
                    return Err(CheckpointError::NotInShard { tensor: tensor.to_owned(), path });
                };
                checkpoint.tensors.insert(tensor.to_owned(), info);
            }
        }
        checkpoint.fold_quantized()?;
        Ok(checkpoint)
    }

    /// Puts a tensor that bitsandbytes stores in NF4 in the place of those that it is stored as.
    fn fold_quantized(&mut self) -> Result<(), CheckpointError> {
        let parts = QuantizedTensors::find(self)?;
        for (name, part) in parts.iter() {
            self.tensors.retain(|other, _| !part.is_stored_as(name, other));
            self.tensors.insert(name.clone(), part.info());
        }
        self.nf4 = parts;
        Ok(())
    }

    /// The stored bytes that this describes.
    pub(super) fn bytes_of(&self, info: &TensorInfo) -> &[u8] {
        &self.files[info.file].map[info.begin..info.end]
    }

    fn add_file(&mut self, path: &Path) -> Result<BTreeMap<String, TensorInfo>, CheckpointError> {
        let io = |source| CheckpointError::Io { path: path.to_path_buf(), source };
        let length = std::fs::metadata(path).map_err(io)?.len();
        if length < 8 {
            return Err(CheckpointError::WrongLength { path: path.to_path_buf(), expected: 8, found: length });
        }
        let opened = OpenFile::open(path)?;
        check_header(path, &opened.map)?;
        let (header_bytes, metadata) = match SafeTensors::read_metadata(&opened.map) {
            Ok(read) => read,
            Err(source) => return Err(header_error(path, &opened.map, source)),
        };
        let data = 8 + header_bytes;
        let index = self.files.len();
        let tensors = metadata.tensors().into_iter().map(|(name, info)| {
            let (begin, end) = info.data_offsets;
            (
                name,
                TensorInfo {
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    file: index,
                    begin: data + begin,
                    end: data + end,
                    gguf: None,
                },
            )
        });
        let tensors = tensors.collect();
        self.files.push(opened);
        Ok(tensors)
    }

    /// The folder or file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The weight files, in the order of their names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// All tensors with their descriptions, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// Whether a tensor of that name is stored.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Dtype and shape of a tensor.
    ///
    /// # Errors
    /// Fails if there is no such tensor; the error lists the nearest names.
    pub fn info(&self, name: &str) -> Result<&TensorInfo, CheckpointError> {
        self.tensors.get(name).ok_or_else(|| CheckpointError::MissingTensor {
            path: self.path.clone(),
            name: name.to_owned(),
            nearest: self.nearest(name),
        })
    }

    /// The shape of a tensor.
    ///
    /// # Errors
    /// Fails if there is no such tensor.
    pub fn shape(&self, name: &str) -> Result<&[usize], CheckpointError> {
        Ok(&self.info(name)?.shape)
    }

    /// The dtype in which a tensor is stored.
    ///
    /// # Errors
    /// Fails if there is no such tensor.
    pub fn dtype(&self, name: &str) -> Result<Dtype, CheckpointError> {
        Ok(self.info(name)?.dtype)
    }

    /// The stored bytes of a tensor, little-endian, without a copy. They may lie at any alignment. Of a tensor in 4
    /// bits they are its codes.
    ///
    /// # Errors
    /// Fails if there is no such tensor.
    pub fn bytes(&self, name: &str) -> Result<&[u8], CheckpointError> {
        let info = self.info(name)?;
        Ok(&self.files[info.file].map[info.begin..info.end])
    }

    /// The values of an F32, BF16 or F16 tensor, widened to f32 (exactly), in row-major order.
    ///
    /// # Errors
    /// Fails if there is no such tensor or it holds no floats of these types.
    pub fn tensor_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![0.0; self.info(name)?.elements()];
        self.read_f32(name, 0, &mut values)?;
        Ok(values)
    }

    /// Like [`Checkpoint::tensor_f32`], of a tensor that must have the given shape.
    ///
    /// # Errors
    /// Fails like [`Checkpoint::tensor_f32`], or if the shape is another.
    pub fn tensor_f32_of_shape(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        self.expect_shape(name, expected)?;
        self.tensor_f32(name)
    }

    /// Fails unless the tensor has the given shape.
    ///
    /// # Errors
    /// Fails if there is no such tensor or its shape is another.
    pub fn expect_shape(&self, name: &str, expected: &[usize]) -> Result<(), CheckpointError> {
        let found = self.shape(name)?;
        if found == expected {
            return Ok(());
        }
        let (path, name) = (self.path.clone(), name.to_owned());
        Err(CheckpointError::WrongShape { path, name, expected: expected.to_vec(), found: found.to_vec() })
    }

    /// Fails unless the tensor's values are of a type that is read as f32: F32, BF16 or F16.
    ///
    /// # Errors
    /// Fails if there is no such tensor or its dtype is another.
    pub fn expect_float(&self, name: &str) -> Result<(), CheckpointError> {
        match self.dtype(name)? {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(()),
            other => Err(self.wrong_dtype(name, other, "f32 (F32, BF16 and F16 can)")),
        }
    }

    /// Reads a tensor's stored bytes from `first` on, little-endian; of a quantised tensor those of its dequantised
    /// values.
    ///
    /// # Errors
    /// Fails if there is no such tensor or the file cannot be read.
    ///
    /// # Panics
    /// Panics if the range lies outside of the tensor.
    pub fn read_bytes(&self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let info = self.info(name)?;
        if info.gguf.is_some_and(OfGguf::changes_values) || self.blocks(name)?.is_some() || self.nf4(name)?.is_some() {
            let width = info.dtype.bitsize() / 8;
            let elements = first / width..(first + bytes.len()).div_ceil(width);
            let (mut values, mut encoded) = (vec![0.0; elements.len()], vec![0; elements.len() * width]);
            self.read_f32(name, elements.start, &mut values)?;
            encode_float(info.dtype, &values, &mut encoded);
            bytes.copy_from_slice(&encoded[first - elements.start * width..][..bytes.len()]);
            return Ok(());
        }
        self.read_stored_bytes(name, first, bytes)
    }

    /// Reads from the files, whatever the tensor stands for; the rows are in the order of the checkpoint.
    pub(super) fn read_stored_bytes(&self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let info = self.info(name)?;
        assert!(first + bytes.len() <= info.size_bytes(), "a range within `{name}`");
        match info.gguf.and_then(|gguf| gguf.row_order(info)) {
            Some(order) => order.pieces(first, bytes).try_for_each(|(at, bytes)| self.read_at(info, at, bytes)),
            None => self.read_at(info, first, bytes),
        }
    }

    fn read_at(&self, info: &TensorInfo, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let OpenFile { path, file, .. } = &self.files[info.file];
        let offset = (info.begin + first) as u64;
        file.read_exact_at(bytes, offset).map_err(|source| CheckpointError::Io { path: path.clone(), source })
    }

    /// Widens the elements from `first` on into `values`, so that a large tensor can be read in pieces.
    ///
    /// # Errors
    /// Fails if there is no such tensor, it holds no floats of the types we read, or the file cannot be read.
    ///
    /// # Panics
    /// Panics if the range lies outside of the tensor.
    pub fn read_f32(&self, name: &str, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        let dtype = self.dtype(name)?;
        if let Some(matrix) = self.nf4(name)? {
            matrix.dequantize(first, values);
            return Ok(());
        }
        if let Some(tensor_type) = self.blocks(name)? {
            let pieces = values.par_chunks_mut(PIECE_VALUES).enumerate();
            return pieces.try_for_each(|(piece, values)| {
                self.dequantize_blocks(name, tensor_type, first + piece * PIECE_VALUES, values)
            });
        }
        let width = match dtype {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
            _ => return Err(self.wrong_dtype(name, dtype, "f32 (F32, BF16 and F16 can)")),
        };
        if values.len() <= PIECE_VALUES {
            return self.read_piece(name, dtype, first * width, values);
        }
        let pieces = values.par_chunks_mut(PIECE_VALUES).enumerate();
        pieces.try_for_each(|(piece, values)| {
            self.read_piece(name, dtype, (first + piece * PIECE_VALUES) * width, values)
        })
    }

    /// Widens the elements from a byte of a tensor on, on this thread: who reads some rows at a time has threads of its
    /// own, and to hand these to those of another pool would only make it wait for them.
    pub(super) fn read_piece(
        &self,
        name: &str,
        dtype: Dtype,
        begin: usize,
        values: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let set = InstructionSet::detect();
        let width = dtype.bitsize() / 8;
        let mut bytes = [0; READ_BYTES];
        for (index, values) in values.chunks_mut(READ_BYTES / width).enumerate() {
            let bytes = &mut bytes[..values.len() * width];
            self.read_stored_bytes(name, begin + index * READ_BYTES, bytes)?;
            widen(set, dtype, bytes, values);
        }
        if self.info(name)?.gguf.is_some_and(OfGguf::changes_values) {
            values.iter_mut().for_each(|value| *value -= 1.0);
        }
        Ok(())
    }

    /// Gives the pages of a tensor back to the system. It can still be read: it then comes from the file again.
    ///
    /// A pass over a whole checkpoint would otherwise hold all of it in memory, as far as the system's figures go.
    pub fn release(&self, name: &str) {
        let Some(info) = self.tensors.get(name) else { return };
        if info.begin == info.end {
            return;
        }
        let map = &self.files[info.file].map;
        // SAFETY: the map is shared, read-only and backed by a file, so dropped pages are read again with the same
        // content. It is advice: a refusal costs memory, never correctness.
        let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, info.begin, info.end - info.begin) };
    }

    fn wrong_dtype(&self, name: &str, found: Dtype, wanted: &'static str) -> CheckpointError {
        CheckpointError::WrongDtype { path: self.path.clone(), name: name.to_owned(), found, wanted }
    }

    fn nearest(&self, name: &str) -> Vec<String> {
        // A file of a stranger may have more names, and longer ones, than can be compared in a moment.
        let names = self.names().filter(|other| other.len() <= LONGEST_COMPARED).take(MOST_COMPARED);
        let mut scored: Vec<(usize, &str)> = names.map(|other| (strsim::levenshtein(name, other), other)).collect();
        scored.sort_unstable();
        scored.truncate(3);
        scored.into_iter().map(|(_, other)| other.to_owned()).collect()
    }
}

/// Refuses a header that takes long to read before it is read.
fn check_header(path: &Path, file: &[u8]) -> Result<(), CheckpointError> {
    let too_large =
        |what: String, most: u64| Err(CheckpointError::HeaderTooLarge { path: path.to_path_buf(), what, most });
    let Some(length) = file.first_chunk::<8>().map(|length| u64::from_le_bytes(*length)) else { return Ok(()) };
    // A length that the file does not have is told as that.
    let header = usize::try_from(length).ok().and_then(|length| file.get(8..)?.get(..length));
    let Some(header) = header else { return Ok(()) };
    if length > LARGEST_HEADER {
        return too_large(format!("{length} bytes"), LARGEST_HEADER);
    }
    // Each tensor is an object within that of the header.
    let tensors = (header.iter().filter(|byte| **byte == b'{').count() as u64).saturating_sub(1);
    if tensors > MOST_TENSORS { too_large(format!("{tensors} tensors"), MOST_TENSORS) } else { Ok(()) }
}

/// Tells a cut-off file, the most common damage, from a file that is something else.
fn header_error(path: &Path, file: &[u8], source: SafeTensorError) -> CheckpointError {
    let path = path.to_path_buf();
    let found = file.len() as u64;
    match (&source, declared_length(file)) {
        (SafeTensorError::MetadataIncompleteBuffer | SafeTensorError::InvalidHeaderLength, Some(expected)) => {
            CheckpointError::WrongLength { path, expected, found }
        }
        _ if is_lfs_pointer(file) => CheckpointError::Pointer { path },
        _ => CheckpointError::BadHeader { path, source },
    }
}

/// Whether this is what git-LFS keeps in the place of a large file.
pub fn is_lfs_pointer(beginning: &[u8]) -> bool {
    beginning.starts_with(b"version https://git-lfs.github.com/spec/")
}

/// The length that the header implies: up to the end of the last tensor, or of the header where that is cut off itself.
fn declared_length(file: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Offsets {
        data_offsets: Option<(u64, u64)>,
    }
    let header_bytes = u64::from_le_bytes(*file.first_chunk::<8>()?);
    let data = header_bytes.checked_add(8)?;
    let Some(header) = file.get(8..usize::try_from(data).ok()?) else { return Some(data) };
    let header: BTreeMap<String, Offsets> = serde_json::from_slice(header).ok()?;
    let end = header.values().filter_map(|tensor| tensor.data_offsets).map(|(_, end)| end).max().unwrap_or(0);
    data.checked_add(end)
}

/// Converts stored floats.
fn widen(set: InstructionSet, dtype: Dtype, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Dtype::BF16 => widen_bf16(set, bytes, values),
        Dtype::F16 => {
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        _ => unreachable!("the caller admits floats only"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{CheckpointWriter, TensorSpec};

    fn write(folder: &Path, tensors: &[(&str, Dtype, &[usize])], max_shard_bytes: u64) {
        let specs = tensors.iter().map(|(name, dtype, shape)| TensorSpec::new(*name, *dtype, shape)).collect();
        let mut writer = CheckpointWriter::create(folder, specs, max_shard_bytes).unwrap();
        for (name, _, shape) in tensors {
            let values: Vec<f32> = (0..shape.iter().product()).map(|i| i as f32 * 0.5).collect();
            writer.write_f32(name, &values).unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn reads_every_float_type_and_pieces_of_it() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &[("a", Dtype::F32, &[2, 3]), ("b", Dtype::BF16, &[5]), ("c", Dtype::F16, &[4])], 1 << 30);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(checkpoint.tensor_f32_of_shape("a", &[2, 3]).unwrap(), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
        assert_eq!(checkpoint.tensor_f32("b").unwrap(), [0.0, 0.5, 1.0, 1.5, 2.0]);
        let stored = checkpoint.bytes("b").unwrap().to_vec();
        checkpoint.release("b");
        let mut bytes = [0; 4];
        checkpoint.read_bytes("b", 6, &mut bytes).unwrap();
        assert_eq!(bytes, stored[6..]);
        assert_eq!(checkpoint.bytes("b").unwrap(), stored, "released pages come back");
        let mut piece = [0.0; 2];
        checkpoint.read_f32("b", 3, &mut piece).unwrap();
        assert_eq!(piece, [1.5, 2.0]);
        assert_eq!(checkpoint.tensor_f32("c").unwrap(), [0.0, 0.5, 1.0, 1.5]);
    }

    #[test]
    fn a_piece_is_the_same_on_one_thread_and_on_several() {
        let folder = tempfile::tempdir().unwrap();
        // Halves of small numbers, which bf16 holds.
        let (length, value) = (PIECE_VALUES + READ_BYTES + 5, |at: usize| (at % 251) as f32 * 0.5);
        let types = [("a", Dtype::F32), ("b", Dtype::BF16)];
        let specs = types.iter().map(|(name, dtype)| TensorSpec::new(*name, *dtype, &[length])).collect();
        let mut writer = CheckpointWriter::create(folder.path(), specs, 1 << 30).unwrap();
        let values: Vec<f32> = (0..length).map(value).collect();
        types.iter().for_each(|(name, _)| writer.write_f32(name, &values).unwrap());
        writer.finish().unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        for (name, _) in types {
            assert!(checkpoint.tensor_f32(name).unwrap() == values);
            for (first, count) in [(0, 1), (3, PIECE_VALUES), (READ_BYTES + 1, PIECE_VALUES + 2), (length - 1, 1)] {
                let mut found = vec![0.0; count];
                checkpoint.read_f32(name, first, &mut found).unwrap();
                assert!(found == values[first..][..count], "{count} from {first} of {name}");
            }
        }
    }

    #[test]
    fn says_what_is_wrong_with_a_request() {
        let folder = tempfile::tempdir().unwrap();
        write(
            folder.path(),
            &[("model.norm.weight", Dtype::F32, &[4]), ("lm_head.weight", Dtype::F32, &[2, 2])],
            1 << 30,
        );
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let missing = checkpoint.tensor_f32("model.norms.weight").unwrap_err();
        assert!(
            matches!(&missing, CheckpointError::MissingTensor { nearest, .. } if nearest[0] == "model.norm.weight"),
            "{missing}"
        );
        let shape = checkpoint.tensor_f32_of_shape("model.norm.weight", &[8]).unwrap_err();
        assert!(shape.to_string().contains("has shape [4] where [8] is expected"), "{shape}");
        let counts = folder.path().join("counts.safetensors");
        let mut writer =
            CheckpointWriter::create_file(&counts, vec![TensorSpec::new("counts", Dtype::I64, &[1])]).unwrap();
        writer.write_bytes("counts", &[0; 8]).unwrap();
        writer.finish().unwrap();
        let dtype = Checkpoint::open_file(&counts).unwrap().tensor_f32("counts").unwrap_err();
        assert!(dtype.to_string().contains("dtype I64, which cannot be read as f32"), "{dtype}");
    }

    #[test]
    fn a_missing_shard_and_a_wrong_index_are_named() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &[("a", Dtype::F32, &[4]), ("b", Dtype::F32, &[4])], 16);
        assert_eq!(Checkpoint::open(folder.path()).unwrap().tensor_f32("b").unwrap()[3], 1.5);
        let second = folder.path().join("model-00002-of-00002.safetensors");
        std::fs::rename(&second, folder.path().join("elsewhere")).unwrap();
        let missing = Checkpoint::open(folder.path()).err().unwrap();
        assert!(
            matches!(&missing, CheckpointError::MissingShard { shard, tensors: 1, .. } if shard.starts_with("model-00002")),
            "{missing}"
        );
        std::fs::copy(folder.path().join("model-00001-of-00002.safetensors"), &second).unwrap();
        let other = Checkpoint::open(folder.path()).err().unwrap();
        assert!(matches!(&other, CheckpointError::NotInShard { tensor, .. } if tensor == "b"), "{other}");
        std::fs::write(folder.path().join(INDEX_FILE), r#"{"weight_map": {"a": "../a.safetensors"}}"#).unwrap();
        assert!(matches!(Checkpoint::open(folder.path()), Err(CheckpointError::BadShardName { .. })));
    }

    #[test]
    fn the_index_decides_what_belongs_to_a_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &[("a", Dtype::F32, &[4]), ("b", Dtype::F32, &[4])], 16);
        let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#;
        std::fs::write(folder.path().join(INDEX_FILE), index).unwrap();
        std::fs::write(folder.path().join("model-00003-of-00003.safetensors"), b"left by another save").unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a"]);
        std::fs::write(folder.path().join(INDEX_FILE), r#"{"weights": {}}"#).unwrap();
        assert!(matches!(Checkpoint::open(folder.path()), Err(CheckpointError::BadIndex { .. })));
    }

    #[test]
    fn a_cut_off_file_is_found_at_any_length() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &[("a", Dtype::F32, &[64])], 1 << 30);
        let path = folder.path().join(SINGLE_FILE);
        let whole = std::fs::read(&path).unwrap();
        for length in [0, 7, 8, 20, whole.len() - 256, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            let error = Checkpoint::open(folder.path()).err().unwrap();
            assert!(
                matches!(error, CheckpointError::WrongLength { found, .. } if found == length as u64),
                "{length}: {error}"
            );
        }
        std::fs::write(&path, b"not a safetensors file at all").unwrap();
        assert!(matches!(Checkpoint::open(folder.path()), Err(CheckpointError::BadHeader { .. })));
        let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n", "a".repeat(64));
        std::fs::write(&path, pointer).unwrap();
        assert!(matches!(Checkpoint::open(folder.path()), Err(CheckpointError::Pointer { .. })));
    }

    #[test]
    fn a_header_of_more_tensors_than_any_checkpoint_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SINGLE_FILE);
        let write = |count: usize| {
            let tensors: Vec<String> = (0..count)
                .map(|at| format!(r#""model.layers.{at}.weight":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#))
                .collect();
            let header = format!("{{{}}}", tensors.join(","));
            let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
            std::fs::write(&path, file).unwrap();
        };
        write(300_000);
        let begin = std::time::Instant::now();
        let error = Checkpoint::open(folder.path()).err().unwrap().to_string();
        assert!(error.contains("300000 tensors in its header"), "{error}");
        assert!(begin.elapsed() < std::time::Duration::from_secs(1));
        // As many as the largest checkpoints have are read.
        write(90_000);
        let begin = std::time::Instant::now();
        assert_eq!(Checkpoint::open(folder.path()).unwrap().names().count(), 90_000);
        assert!(begin.elapsed() < std::time::Duration::from_secs(3), "{:?}", begin.elapsed());
        // A length that nothing has is no memory taken.
        std::fs::write(&path, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap();
        assert!(Checkpoint::open(folder.path()).is_err());
    }

    #[test]
    fn pickled_weights_are_named_as_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("pytorch_model.bin"), b"x").unwrap();
        let error = Checkpoint::open(folder.path()).err().unwrap().to_string();
        assert!(error.contains("convert them to safetensors"), "{error}");
    }
}
