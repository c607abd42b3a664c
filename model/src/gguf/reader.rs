//! Reads a file's header, and its tensors one at a time.
//!
//! The file may come from anyone: every length is checked against what is left before anything of that length is made.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::{ALIGNMENT, GgufError, MAGIC, TensorType, Value, ValueType};

/// The most that a header's parts are taken to be.
const MOST_DIMENSIONS: u32 = 4;
const MOST_TENSORS: u64 = 200_000;
const MOST_KEYS: u64 = 100_000;
const LARGEST_HEADER: u64 = 256 << 20;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// How its values are stored.
    pub tensor_type: TensorType,
    /// Extent of each dimension, slowest first, as in a checkpoint.
    pub shape: Vec<usize>,
    /// Where it begins, from the first tensor on.
    pub offset: u64,
}

impl TensorEntry {
    /// Number of values.
    pub fn values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.tensor_type.bytes(self.values())
    }
}

/// A file, opened.
pub struct GgufFile {
    path: PathBuf,
    file: File,
    metadata: Vec<(String, Value)>,
    tensors: Vec<TensorEntry>,
    data: u64,
}

impl GgufFile {
    /// Opens a file: reads its header, and makes sure that all tensors lie within it.
    ///
    /// # Errors
    /// Fails if it cannot be read, is no GGUF file of version 2 or 3, is damaged, or has a tensor of a type that is
    /// not known here.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path).map_err(GgufError::read(path))?;
        let length = file.metadata().map_err(GgufError::read(path))?.len();
        let reader = file.try_clone().map_err(GgufError::read(path))?;
        let (header, data) = Header::read(BufReader::new(reader), length)?;
        Ok(Self { path: path.to_path_buf(), file, metadata: header.metadata, tensors: header.tensors, data })
    }

    /// All keys, in the order of the file.
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.metadata
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Where a tensor begins in the file.
    pub fn begin(&self, tensor: &TensorEntry) -> u64 {
        self.data + tensor.offset
    }

    /// The bytes of a tensor, as they are stored.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn tensor_bytes(&self, tensor: &TensorEntry) -> Result<Vec<u8>, GgufError> {
        let mut bytes = vec![0; tensor.bytes()];
        self.file.read_exact_at(&mut bytes, self.data + tensor.offset).map_err(GgufError::read(&self.path))?;
        Ok(bytes)
    }

    /// The values of a tensor.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn tensor_f32(&self, tensor: &TensorEntry) -> Result<Vec<f32>, GgufError> {
        let mut values = vec![0.0; tensor.values()];
        tensor.tensor_type.decode(&self.tensor_bytes(tensor)?, &mut values);
        Ok(values)
    }
}

struct Header {
    metadata: Vec<(String, Value)>,
    tensors: Vec<TensorEntry>,
}

impl Header {
    /// The header of a file of so many bytes, and where its tensors begin.
    fn read(source: impl Read, length: u64) -> Result<(Self, u64), GgufError> {
        let mut input = Input { source, at: 0, end: length.min(LARGEST_HEADER) };
        if input.array()? != MAGIC {
            return Err(damaged("it does not begin with `GGUF`"));
        }
        let version = input.u32()?;
        if ![2, 3].contains(&version) {
            return Err(damaged(format!("its version is {version}; 2 and 3 are read")));
        }
        let (tensors, keys) = (input.u64()?, input.u64()?);
        if tensors > MOST_TENSORS || keys > MOST_KEYS {
            return Err(damaged(format!("it declares {tensors} tensors and {keys} keys")));
        }
        let mut metadata: Vec<(String, Value)> = Vec::new();
        for _ in 0..keys {
            let key = input.string()?;
            let of = input.value_type()?;
            metadata.push((key, input.value(of)?));
        }
        unique(metadata.iter().map(|(key, _)| key))?;
        let tensors = (0..tensors).map(|_| input.tensor()).collect::<Result<Vec<_>, _>>()?;
        unique(tensors.iter().map(|tensor| &tensor.name))?;
        let alignment = match metadata.iter().find(|(key, _)| key == "general.alignment") {
            None => ALIGNMENT,
            Some((_, Value::U32(alignment))) if alignment.is_power_of_two() => u64::from(*alignment),
            Some((_, other)) => return Err(damaged(format!("`general.alignment` is {other:?}"))),
        };
        let data = input.at.next_multiple_of(alignment);
        check_places(&tensors, alignment, length.checked_sub(data))?;
        Ok((Self { metadata, tensors }, data))
    }
}

/// Makes sure that tensors lie within the file, and none in another.
fn check_places(tensors: &[TensorEntry], alignment: u64, length: Option<u64>) -> Result<(), GgufError> {
    let mut places: Vec<(u64, u64, &str)> = Vec::new();
    for tensor in tensors {
        let end = tensor.offset.checked_add(tensor.bytes() as u64);
        match end.filter(|end| length.is_some_and(|length| *end <= length)) {
            None => return Err(damaged(format!("`{}` lies beyond the end of the file", tensor.name))),
            Some(_) if !tensor.offset.is_multiple_of(alignment) => {
                return Err(damaged(format!("`{}` does not begin at a multiple of {alignment}", tensor.name)));
            }
            Some(end) => places.push((tensor.offset, end, &tensor.name)),
        }
    }
    places.sort_unstable();
    match places.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(damaged(format!("`{}` and `{}` overlap", pair[0].2, pair[1].2))),
        None => Ok(()),
    }
}

fn unique<'a>(names: impl Iterator<Item = &'a String>) -> Result<(), GgufError> {
    let mut seen = std::collections::HashSet::new();
    match { names }.find(|name| !seen.insert(*name)) {
        Some(name) => Err(damaged(format!("`{name}` is there twice"))),
        None => Ok(()),
    }
}

fn damaged(what: impl Into<String>) -> GgufError {
    GgufError::Damaged(what.into())
}

struct Input<R> {
    source: R,
    at: u64,
    end: u64,
}

impl<R: Read> Input<R> {
    fn bytes(&mut self, count: u64) -> Result<Vec<u8>, GgufError> {
        if count > self.end - self.at {
            return Err(damaged(format!("at byte {} it declares {count} bytes more than there are", self.at)));
        }
        let mut bytes = vec![0; count as usize];
        self.source.read_exact(&mut bytes).map_err(|_| damaged(format!("it is cut off at byte {}", self.at)))?;
        self.at += count;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        if N as u64 > self.end - self.at || self.source.read_exact(&mut bytes).is_err() {
            return Err(damaged(format!("it is cut off at byte {}", self.at)));
        }
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        self.array().map(u64::from_le_bytes)
    }

    fn string(&mut self) -> Result<String, GgufError> {
        let at = self.at;
        let length = self.u64()?;
        String::from_utf8(self.bytes(length)?).map_err(|_| damaged(format!("the text at byte {at} is not UTF-8")))
    }

    fn value_type(&mut self) -> Result<ValueType, GgufError> {
        let number = self.u32()?;
        ValueType::of_number(number).ok_or_else(|| damaged(format!("there is no type {number} of a value")))
    }

    fn value(&mut self, of: ValueType) -> Result<Value, GgufError> {
        Ok(match of {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.array()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.array()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.array()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.array()?)),
            ValueType::U32 => Value::U32(self.u32()?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.array()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array()?)),
            ValueType::Bool => match self.array()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(damaged(format!("a boolean is {other}"))),
            },
            ValueType::String => Value::String(self.string()?),
            ValueType::Array => self.values()?,
            ValueType::U64 => Value::U64(self.u64()?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.array()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array()?)),
        })
    }

    fn values(&mut self) -> Result<Value, GgufError> {
        let of = self.value_type()?;
        if of == ValueType::Array {
            return Err(damaged("there is an array of arrays"));
        }
        let count = self.u64()?;
        // A value has a byte at least, so that this ends with the file at the latest.
        if count > self.end - self.at {
            return Err(damaged(format!("at byte {} it declares {count} values", self.at)));
        }
        let mut values = Vec::new();
        for _ in 0..count {
            values.push(self.value(of)?);
        }
        Ok(Value::Array(of, values))
    }

    fn tensor(&mut self) -> Result<TensorEntry, GgufError> {
        let name = self.string()?;
        let dimensions = self.u32()?;
        if dimensions == 0 || dimensions > MOST_DIMENSIONS {
            return Err(damaged(format!("`{name}` has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        let mut values = 1u64;
        for _ in 0..dimensions {
            let extent = self.u64()?;
            let product = values.checked_mul(extent).filter(|values| (1..1 << 40).contains(values));
            values = product.ok_or_else(|| damaged(format!("`{name}` has a dimension of {extent}")))?;
            shape.insert(0, extent as usize);
        }
        let number = self.u32()?;
        let known = TensorType::of_number(number);
        let unknown = || match TensorType::name_of_unread(number) {
            Some(of) => GgufError::Unusable(format!("`{name}` is of type {number} ({of}), which is not read")),
            None => damaged(format!("`{name}` is of type {number}, which is not known")),
        };
        let tensor_type = known.ok_or_else(unknown)?;
        if shape.last().is_some_and(|row| !row.is_multiple_of(tensor_type.block_values())) {
            return Err(damaged(format!("the rows of `{name}` are no whole blocks of {}", tensor_type.name())));
        }
        Ok(TensorEntry { name, tensor_type, shape, offset: self.u64()? })
    }
}
