//! Tensors that bitsandbytes stores in NF4: the codes under the tensor's own name, and beside them, under names that
//! begin with it, what they mean.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use safetensors::Dtype;
use serde::Deserialize;

use super::{Checkpoint, CheckpointError, TensorInfo};
use crate::weights::{Absmax, Nf4Matrix};

/// What the name of a tensor's state ends in, before the format.
const STATE: &str = ".quant_state.bitsandbytes__";
/// The ends of the names of what lies beside codes.
const PARTS: [&str; 4] = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"];

/// The quantised tensors of a checkpoint.
#[derive(Default)]
pub(super) struct QuantizedTensors {
    tensors: BTreeMap<String, QuantizedTensor>,
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
        Ok(Self { tensors, last: Mutex::default() })
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
        if state.quant_type != "nf4" {
            return Err(format!("`{}` is not read, `nf4` is", state.quant_type));
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

impl Checkpoint {
    /// A tensor that is stored in NF4; `None` of any other.
    ///
    /// # Errors
    /// Fails if there is no such tensor.
    pub fn nf4(&self, name: &str) -> Result<Option<Arc<Nf4Matrix>>, CheckpointError> {
        self.info(name)?;
        let Some(tensor) = self.nf4.tensors.get(name) else { return Ok(None) };
        let mut last = self.nf4.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, matrix)) = last.as_ref().filter(|(last, _)| last == name) {
            return Ok(Some(Arc::clone(matrix)));
        }
        let matrix = Arc::new(tensor.matrix(self));
        self.release(name);
        *last = Some((name.to_owned(), Arc::clone(&matrix)));
        Ok(Some(matrix))
    }
}
