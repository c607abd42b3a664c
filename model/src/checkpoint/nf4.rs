//! Tensors in NF4: those that bitsandbytes stores so, and those that are quantised when they are read.
//!
//! bitsandbytes stores the codes under the tensor's own name, and beside them, under names that begin with it, what
//! they mean.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use safetensors::Dtype;
use serde::Deserialize;

use super::{Checkpoint, CheckpointError, Rows, TensorInfo};
use crate::weights::{Absmax, BaseFormat, Nf4Matrix, QuantizedBase};

/// What the name of a tensor's state ends in, before the format.
const STATE: &str = ".quant_state.bitsandbytes__";
/// The ends of the names of what lies beside codes.
const PARTS: [&str; 4] = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"];

/// The quantised tensors of a checkpoint.
#[derive(Default)]
pub(super) struct QuantizedTensors {
    tensors: BTreeMap<String, QuantizedTensor>,
    /// What is quantised when it is read.
    pub(super) when_read: Option<QuantizedBase>,
    /// The one that was read last: who reads a tensor reads it piece by piece.
    last: Mutex<Option<(String, Arc<Nf4Matrix>)>>,
}

/// A quantised tensor, and what it is stored as.
pub(super) struct QuantizedTensor {
    state: State,
    shape: [usize; 2],
    dtype: Dtype,
    codes: TensorInfo,
    /// As [`PARTS`].
    parts: [Option<TensorInfo>; 4],
}

/// What bitsandbytes writes down of a tensor.
#[derive(Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

impl QuantizedTensors {
    /// Those of a checkpoint.
    pub(super) fn find(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let states = checkpoint.names().filter_map(|state| Some((state, state.split_once(STATE)?.0)));
        let mut tensors = BTreeMap::new();
        for (state, name) in states {
            let bad = |what: String| CheckpointError::BadQuantized {
                path: checkpoint.path().to_path_buf(),
                tensor: name.to_owned(),
                what,
            };
            let tensor = QuantizedTensor::read(checkpoint, name, state).map_err(bad)?;
            tensors.insert(name.to_owned(), tensor);
        }
        Ok(Self { tensors, when_read: None, last: Mutex::default() })
    }

    /// The tensor of this name, where it is the one that was read last.
    fn last(&self, name: &str) -> Option<Arc<Nf4Matrix>> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().filter(|(last, _)| last == name).map(|(_, matrix)| Arc::clone(matrix))
    }

    /// Whether a tensor is stored in 4 bits.
    pub(super) fn is_stored(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &QuantizedTensor)> {
        self.tensors.iter()
    }
}

impl QuantizedTensor {
    fn read(checkpoint: &Checkpoint, name: &str, state_name: &str) -> Result<Self, String> {
        let error = |error: CheckpointError| error.to_string();
        let state = checkpoint.bytes(state_name).map_err(error)?;
        let state: State = serde_json::from_slice(state).map_err(|error| format!("its state: {error}"))?;
        if !["nf4", "fp4"].contains(&state.quant_type.as_str()) {
            return Err(format!("`{}` is not read, `nf4` and `fp4` are", state.quant_type));
        }
        let dtype = match state.dtype.as_str() {
            "float32" => Dtype::F32,
            "bfloat16" => Dtype::BF16,
            "float16" => Dtype::F16,
            other => return Err(format!("of values in `{other}`")),
        };
        let &[rows, columns] = &state.shape[..] else { return Err(format!("of shape {:?}", state.shape)) };
        if state.blocksize < 2 || !state.blocksize.is_multiple_of(2) {
            return Err(format!("in blocks of {}", state.blocksize));
        }
        let codes = checkpoint.info(name).map_err(error)?.clone();
        let values = rows.checked_mul(columns).ok_or("of too many values")?;
        let is_u8 = |info: &TensorInfo, length| info.dtype == Dtype::U8 && info.elements() == length;
        if !is_u8(&codes, values.div_ceil(2)) {
            return Err(format!("{} in {:?} where {values} values are told", codes.elements(), codes.dtype));
        }
        let parts = PARTS.map(|part| checkpoint.info(&format!("{name}{part}")).ok().cloned());
        let blocks = values.div_ceil(state.blocksize);
        let is_f32 = |info: &TensorInfo, length| info.dtype == Dtype::F32 && info.elements() == length;
        let holds = match (&parts, state.nested_blocksize) {
            ([Some(absmax), Some(map), None, None], None) => is_f32(absmax, blocks) && is_f32(map, 16),
            ([Some(absmax), Some(map), Some(nested), Some(levels)], Some(size @ 1..)) => {
                is_u8(absmax, blocks)
                    && is_f32(map, 16)
                    && is_f32(nested, blocks.div_ceil(size))
                    && is_f32(levels, 256)
                    && state.nested_offset.is_some()
            }
            _ => false,
        };
        if !holds {
            return Err("its absmaxes and maps are not those that its state tells of".to_owned());
        }
        Ok(Self { state, shape: [rows, columns], dtype, codes, parts })
    }

    /// What it stands for.
    pub(super) fn info(&self) -> TensorInfo {
        self.codes.stands_for(self.dtype, &self.shape)
    }

    /// Whether the tensor of the second name is a part of this one, of the first.
    pub(super) fn is_stored_as(&self, name: &str, other: &str) -> bool {
        other.strip_prefix(name).is_some_and(|end| end.starts_with(STATE) || PARTS.contains(&end))
    }

    fn matrix(&self, checkpoint: &Checkpoint) -> Nf4Matrix {
        let bytes = |part: usize| self.parts[part].as_ref().map_or(&[][..], |info| checkpoint.bytes_of(info));
        let floats = |part: usize| -> Vec<f32> {
            bytes(part).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        let absmax = match (self.state.nested_blocksize, self.state.nested_offset) {
            (Some(block_size), Some(offset)) => {
                Absmax::Nested { codes: bytes(0).to_vec(), absmax: floats(2), block_size, levels: floats(3), offset }
            }
            _ => Absmax::Plain(floats(0)),
        };
        let mut levels = [0.0; 16];
        levels.copy_from_slice(&floats(1));
        Nf4Matrix {
            shape: self.shape,
            dtype: self.dtype,
            block_size: self.state.blocksize,
            levels,
            codes: checkpoint.bytes_of(&self.codes).to_vec(),
            absmax,
        }
    }
}

/// The rows of a tensor as they are stored.
struct AsStored<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    dtype: Dtype,
    columns: usize,
}

impl Rows for AsStored<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        let begin = first * self.columns * self.dtype.bitsize() / 8;
        self.checkpoint.read_piece(self.name, self.dtype, begin, values)
    }
}

impl Checkpoint {
    /// The same checkpoint, of which these weights are quantised when they are read: whoever reads their values gets
    /// dequantised ones. What is stored quantised stays what it is.
    #[must_use]
    pub fn quantizing(mut self, base: QuantizedBase) -> Self {
        self.nf4.when_read = Some(base);
        self
    }

    /// A tensor in NF4, which is stored so or quantised when it is read; `None` of any other. The one that was asked
    /// for last is at hand: who reads a tensor piece by piece on several threads asks for it once before.
    ///
    /// # Errors
    /// Fails if there is no such tensor, or it cannot be read.
    pub fn nf4(&self, name: &str) -> Result<Option<Arc<Nf4Matrix>>, CheckpointError> {
        let info = self.info(name)?;
        let stored = self.nf4.tensors.get(name);
        let is_as_it_was = stored.is_none() && info.gguf.is_none_or(|gguf| !gguf.tensor_type.is_quantized());
        let when_read = self.nf4.when_read.as_ref().filter(|base| is_as_it_was && base.covers(name));
        let when_read = when_read.and_then(|base| match base.format {
            BaseFormat::FourBits(nf4) => Some(nf4),
            BaseFormat::Q8_0 => None,
        });
        if stored.is_none() && when_read.is_none() {
            return Ok(None);
        }
        if let Some(matrix) = self.nf4.last(name) {
            return Ok(Some(matrix));
        }
        // Not while the lock is held: a thread that waits for others to quantise takes up work that may ask for it.
        let matrix = match (stored, when_read, &info.shape[..]) {
            (Some(stored), ..) => stored.matrix(self),
            (None, Some(nf4), &[rows, columns]) => {
                self.expect_float(name)?;
                if !nf4.fits([rows, columns]) {
                    let (path, name) = (self.path().to_path_buf(), name.to_owned());
                    return Err(CheckpointError::NoWholeBlocks { path, name, values: rows * columns });
                }
                let source = AsStored { checkpoint: self, name, dtype: info.dtype, columns };
                Nf4Matrix::quantize(&source, [rows, columns], info.dtype, nf4)?
            }
            (None, ..) => return Ok(None),
        };
        self.release(name);
        let matrix = Arc::new(matrix);
        let mut last = self.nf4.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some((name.to_owned(), Arc::clone(&matrix)));
        Ok(Some(matrix))
    }
}
