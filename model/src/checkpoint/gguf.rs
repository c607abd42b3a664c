//! A GGUF file as a checkpoint: its tensors under the names of the Hub, with the rows in the order that they have
//! there.
//!
//! Blocks stay blocks: those who can take them ([`super::Rows::as_blocks`]), to others they are dequantised.

use std::path::Path;

use super::reader::{OpenFile, TensorInfo};
use super::{Checkpoint, CheckpointError, Dtype};
use crate::gguf::{self, Change, GgufFile, SourceTensor};
use crate::weights::{BaseFormat, TensorType};

/// Bytes of blocks that are read at a time, about.
const READ_BYTES: usize = 64 << 10;

/// How a tensor of a GGUF file stands for one of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfGguf {
    pub(super) tensor_type: TensorType,
    change: Change,
}

impl OfGguf {
    /// Whether its values are not those of the checkpoint: a one was added.
    pub(super) fn changes_values(self) -> bool {
        self.change == Change::PlusOne
    }

    /// The order of its rows, where that is not the checkpoint's.
    pub(super) fn row_order(self, info: &TensorInfo) -> Option<RowOrder> {
        match self.change {
            Change::PairRows { heads } => {
                let rows = info.shape[0];
                Some(RowOrder { head: rows / heads, row_bytes: info.size_bytes() / rows })
            }
            Change::None | Change::PlusOne => None,
        }
    }
}

/// Rows of heads, whose elements that turn together are neighbours in the file.
pub(super) struct RowOrder {
    /// Rows of a head.
    head: usize,
    row_bytes: usize,
}

impl RowOrder {
    /// The parts of a range of the checkpoint's bytes, each with where it begins in the file's.
    pub(super) fn pieces<'b>(&self, first: usize, bytes: &'b mut [u8]) -> impl Iterator<Item = (usize, &'b mut [u8])> {
        let (head, row_bytes) = (self.head, self.row_bytes);
        let (mut at, mut rest) = (first, bytes);
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (row, within) = (at / row_bytes, at % row_bytes);
            let length = rest.len().min(row_bytes - within);
            let (piece, others) = std::mem::take(&mut rest).split_at_mut(length);
            (at, rest) = (at + length, others);
            let (of_head, half) = (row % head, head / 2);
            let row = row - of_head + 2 * (of_head % half) + of_head / half;
            Some((row * row_bytes + within, piece))
        })
    }
}

const Q8_0: TensorType = TensorType::Q8_0;

fn stored_blocks(info: &TensorInfo) -> Option<TensorType> {
    info.gguf.map(|gguf| gguf.tensor_type).filter(|tensor_type| tensor_type.is_quantized())
}

impl Checkpoint {
    /// Opens the GGUF file of a folder.
    pub(super) fn open_gguf(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(gguf::FILE);
        let failed = |source| CheckpointError::Gguf { path: path.clone(), source: Box::new(source) };
        let file = GgufFile::open(&path).map_err(failed)?;
        let sources = gguf::sources(&file).map_err(failed)?;
        let mut checkpoint = Self::empty(folder);
        checkpoint.files.push(OpenFile::open(&path)?);
        for SourceTensor { name, entry, change } in sources {
            let begin = file.begin(entry) as usize;
            let tensor_type = entry.tensor_type;
            let info = TensorInfo {
                dtype: match tensor_type {
                    TensorType::F16 => Dtype::F16,
                    TensorType::Bf16 => Dtype::BF16,
                    _ => Dtype::F32,
                },
                shape: entry.shape.clone(),
                file: 0,
                begin,
                end: begin + entry.bytes(),
                gguf: Some(OfGguf { tensor_type, change }),
            };
            checkpoint.tensors.insert(name, info);
        }
        Ok(checkpoint)
    }

    /// The type of a tensor that is in blocks within rows: stored so, or quantised when it is read.
    ///
    /// # Errors
    /// Fails if there is no such tensor.
    pub fn blocks(&self, name: &str) -> Result<Option<TensorType>, CheckpointError> {
        let info = self.info(name)?;
        if let Some(tensor_type) = stored_blocks(info) {
            return Ok(Some(tensor_type));
        }
        let base = self.nf4.when_read.as_ref().filter(|base| base.format == BaseFormat::Q8_0 && base.covers(name));
        let has_blocks = matches!(&info.shape[..], &[_, columns] if columns.is_multiple_of(Q8_0.block_values()));
        Ok(base.filter(|_| has_blocks && !self.nf4.is_stored(name)).map(|_| Q8_0))
    }

    /// Reads the blocks of a tensor from a byte on, the first of a block.
    pub(super) fn read_blocks(&self, name: &str, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let info = self.info(name)?;
        if stored_blocks(info).is_some() {
            return self.read_stored_bytes(name, first, bytes);
        }
        let (block, values) = (Q8_0.bytes(Q8_0.block_values()), Q8_0.block_values());
        let mut source = vec![0.0; bytes.len() / block * values];
        let begin = first / block * values * info.dtype.bitsize() / 8;
        self.read_piece(name, info.dtype, begin, &mut source)?;
        Q8_0.encode(&source, bytes);
        Ok(())
    }

    /// The values from `first` on of a tensor that is stored in blocks.
    pub(super) fn dequantize_blocks(
        &self,
        name: &str,
        tensor_type: TensorType,
        mut first: usize,
        mut values: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let block = tensor_type.block_values();
        let most = (READ_BYTES / tensor_type.bytes(block)).max(1);
        let (mut bytes, mut decoded) = (Vec::new(), Vec::new());
        while !values.is_empty() {
            let begin = first / block;
            let count = (first + values.len()).div_ceil(block).min(begin + most) - begin;
            bytes.resize(tensor_type.bytes(count * block), 0);
            decoded.resize(count * block, 0.0);
            self.read_blocks(name, tensor_type.bytes(begin * block), &mut bytes)?;
            tensor_type.decode(&bytes, &mut decoded);
            let own = &decoded[first - begin * block..];
            let length = own.len().min(values.len());
            let (now, others) = std::mem::take(&mut values).split_at_mut(length);
            now.copy_from_slice(&own[..length]);
            (first, values) = (first + length, others);
        }
        Ok(())
    }
}
