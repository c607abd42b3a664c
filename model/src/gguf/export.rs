//! Writes a checkpoint as a file: first all that it will hold, then its bytes, a piece of a tensor at a time.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::Path;

use rayon::ThreadPool;
use rayon::prelude::*;
use serde_json::{Map, Value as Json};

use super::architecture::{Architecture, Change};
use super::value::write_string;
use super::vocabulary::TokenizerFiles;
use super::{ALIGNMENT, FileType, GgufError, MAGIC, TensorType, VERSION, Value};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, ConfigError};

/// Values that are in memory at a time, and those of a task.
const PIECE_VALUES: usize = 4 << 20;
const TASK_VALUES: usize = 64 << 10;

/// The keys of the tokens that end a text and a turn.
const END_OF_TEXT: &str = "tokenizer.ggml.eos_token_id";
const END_OF_TURN: &str = "tokenizer.ggml.eot_token_id";

/// What is asked for.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// What the file is quantised to.
    pub file_type: FileType,
    /// `general.name`.
    pub name: String,
    /// llama.cpp's name of the pre-tokenizer, where the tokenizer's files do not tell it.
    pub pre_tokenizer: Option<String>,
}

/// From here on a number is infinite in f16: halfway between its greatest, 65504, and the next that there would be.
const INFINITE_IN_F16: f32 = 65_520.0;

/// A tensor that a file will hold.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedTensor {
    /// Its name in the file.
    pub name: String,
    /// How its values are stored.
    pub tensor_type: TensorType,
    /// Extent of each dimension, slowest first, as in a checkpoint; the file has them the other way around.
    pub shape: Vec<usize>,
    /// Where it begins, from the first tensor on.
    pub offset: u64,
    source: Source,
}

#[derive(Clone, Debug, PartialEq)]
enum Source {
    Tensor { name: String, change: Change },
    Values(Vec<f32>),
}

impl PlannedTensor {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.tensor_type.bytes(self.values()) as u64
    }

    fn values(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How far writing is, in bytes of tensors.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Written.
    pub done: u64,
    /// In all.
    pub total: u64,
}

/// A file that can be written.
pub struct Export {
    checkpoint: Checkpoint,
    config: Config,
    metadata: Vec<(String, Value)>,
    tensors: Vec<PlannedTensor>,
    warnings: Vec<String>,
}

impl Export {
    /// Plans the file of a checkpoint's folder, its tokenizer included.
    ///
    /// # Errors
    /// Fails where a file is missing or damaged, or GGUF or llama.cpp cannot hold the model or its tokenizer.
    pub fn plan(folder: &Path, options: &ExportOptions) -> Result<Self, GgufError> {
        let path = folder.join("config.json");
        let text = fs::read_to_string(&path).map_err(GgufError::read(&path))?;
        let config = Config::from_json(&text)?;
        let fields: Map<String, Json> =
            serde_json::from_str(&text).map_err(|error| ConfigError::NotAnObject(Some(error)))?;
        let architecture = Architecture::of(&config)?;
        let mut warnings = architecture.check(&config, &fields)?;
        let checkpoint = Checkpoint::open(folder)?;
        config.check_weights(&checkpoint)?;

        let text = |text: &str| Value::String(text.to_owned());
        let mut metadata = vec![
            ("general.architecture".to_owned(), text(architecture.name())),
            ("general.type".to_owned(), text("model")),
            ("general.name".to_owned(), text(&options.name)),
        ];
        metadata.extend(architecture.metadata(&config, &fields)?);
        metadata.push(("general.file_type".to_owned(), Value::U32(options.file_type.number())));
        metadata.push(("general.quantization_version".to_owned(), Value::U32(2)));
        let tokenizer = TokenizerFiles::read(folder)?;
        metadata.extend(tokenizer.metadata(&config, &fields, options.pre_tokenizer.as_deref())?);
        warnings.extend(tokenizer.warnings(options.pre_tokenizer.as_deref()));

        let tensors = tensors(architecture, &config, &fields, options.file_type);
        Ok(Self { checkpoint, config, metadata, tensors, warnings })
    }

    /// Names the token that ends a turn, unless it ends a text or the file names one already: llama.cpp ends generation
    /// at both.
    pub fn end_turns_with(&mut self, id: u32) {
        let value = Value::U32(id);
        let is_named = |(key, named): &(String, Value)| key == END_OF_TURN || key == END_OF_TEXT && *named == value;
        if self.metadata.iter().any(is_named) {
            return;
        }
        // Behind the other special tokens.
        let special = |(key, _): &(String, Value)| key.starts_with("tokenizer.ggml.") && key.ends_with("_token_id");
        let at = self.metadata.iter().rposition(special).map_or(self.metadata.len(), |last| last + 1);
        self.metadata.insert(at, (END_OF_TURN.to_owned(), value));
    }

    /// What is said of the model before its tensors.
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.metadata
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[PlannedTensor] {
        &self.tensors
    }

    /// Where llama.cpp does not compute what the model does.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Bytes of all tensors, the gaps between them included.
    pub fn tensor_bytes(&self) -> u64 {
        end(&self.tensors)
    }

    fn header(&self) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_string(key, &mut header);
            header.extend((value.value_type() as u32).to_le_bytes());
            value.write(&mut header);
        }
        for tensor in &self.tensors {
            write_string(&tensor.name, &mut header);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|extent| header.extend((*extent as u64).to_le_bytes()));
            header.extend(tensor.tensor_type.number().to_le_bytes());
            header.extend(tensor.offset.to_le_bytes());
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        header
    }

    /// Writes the file; `threads` read and quantise. `observe` is told of the progress, and may stop it.
    ///
    /// # Errors
    /// Fails if the checkpoint cannot be read or the file not be written.
    pub fn write(
        &self,
        path: &Path,
        threads: &ThreadPool,
        observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<(), GgufError> {
        let mut file = BufWriter::new(File::create(path).map_err(GgufError::write(path))?);
        let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(GgufError::write(path));
        put(&self.header())?;
        let (mut done, total) = (0, self.tensor_bytes());
        for tensor in &self.tensors {
            let row = tensor.shape.last().copied().unwrap_or(1).max(1);
            let rows = tensor.values() / row;
            let rows_per_piece = (PIECE_VALUES / row).max(1);
            for first in (0..rows).step_by(rows_per_piece) {
                let count = rows_per_piece.min(rows - first);
                let bytes = threads.install(|| self.piece(tensor, first, count, row))?;
                put(&bytes)?;
                done += bytes.len() as u64;
                if observe(Progress { done, total }).is_break() {
                    return Err(GgufError::Stopped);
                }
            }
            let gap = tensor.bytes().next_multiple_of(ALIGNMENT) - tensor.bytes();
            put(&vec![0; gap as usize])?;
            done += gap;
            if let Source::Tensor { name, .. } = &tensor.source {
                self.checkpoint.release(name);
            }
        }
        file.into_inner().map_err(|error| error.into_error()).map_err(GgufError::write(path))?;
        Ok(())
    }

    /// The stored bytes of some rows.
    fn piece(&self, tensor: &PlannedTensor, first: usize, count: usize, row: usize) -> Result<Vec<u8>, GgufError> {
        let stored = tensor.tensor_type;
        let mut bytes = vec![0; stored.bytes(count * row)];
        let rows_per_task = (TASK_VALUES / row).max(1);
        let tasks = bytes.par_chunks_mut(stored.bytes(rows_per_task * row)).enumerate();
        tasks.try_for_each(|(task, bytes)| {
            let first = first + task * rows_per_task;
            let mut values = vec![0.0; bytes.len() / stored.bytes(row) * row];
            self.rows(tensor, first, row, &mut values)?;
            if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                return Err(GgufError::NotFinite { name: tensor.name.clone(), value: *value });
            }
            if stored == TensorType::F16
                && let Some(value) = values.iter().find(|value| value.abs() >= INFINITE_IN_F16)
            {
                let name = tensor.name.clone();
                return Err(GgufError::TooGreat { name, value: *value });
            }
            stored.encode(&values, bytes);
            Ok::<(), GgufError>(())
        })?;
        Ok(bytes)
    }

    /// The values of some rows as the file has them.
    fn rows(&self, tensor: &PlannedTensor, first: usize, row: usize, values: &mut [f32]) -> Result<(), GgufError> {
        let (name, change) = match &tensor.source {
            Source::Tensor { name, change } => (name, *change),
            Source::Values(own) => {
                values.copy_from_slice(&own[first * row..][..values.len()]);
                return Ok(());
            }
        };
        match change {
            Change::None => self.checkpoint.read_f32(name, first * row, values)?,
            Change::PlusOne => {
                self.checkpoint.read_f32(name, first * row, values)?;
                values.iter_mut().for_each(|value| *value += 1.0);
            }
            Change::PairRows { heads } => {
                // A bias is one row; its elements are what rows are of a matrix.
                let width = if tensor.shape.len() == 1 { 1 } else { row };
                let first = first * row / width;
                for (at, values) in values.chunks_mut(width).enumerate() {
                    let source = self.unpaired(first + at, heads);
                    self.checkpoint.read_f32(name, source * width, values)?;
                }
            }
        }
        Ok(())
    }

    /// The checkpoint's row of a row of the file, in which the two elements that turn together are neighbours.
    fn unpaired(&self, row: usize, heads: usize) -> usize {
        let width = self.config.head_dim;
        debug_assert!(row < heads * width, "row {row} of {heads} heads");
        let (head, at) = (row / width, row % width);
        head * width + at % 2 * (width / 2) + at / 2
    }
}

/// Makes sure that GGUF and llama.cpp can hold a model with this `config.json`, as far as that tells. The warnings say
/// where llama.cpp does not compute what the model does.
///
/// # Errors
/// Fails with what cannot be held.
pub fn check_config(fields: &Map<String, Json>) -> Result<Vec<String>, GgufError> {
    let config = Config::from_json(&Json::Object(fields.clone()).to_string())?;
    let architecture = Architecture::of(&config)?;
    architecture.metadata(&config, fields)?;
    architecture.check(&config, fields)
}

/// Bytes of all tensors of a model with this `config.json`, if it can be held.
pub fn tensor_bytes(fields: &Map<String, Json>, file_type: FileType) -> Option<u64> {
    let config = Config::from_json(&Json::Object(fields.clone()).to_string()).ok()?;
    let tensors = tensors(Architecture::of(&config).ok()?, &config, fields, file_type);
    Some(end(&tensors))
}

/// Where the last tensor ends.
fn end(tensors: &[PlannedTensor]) -> u64 {
    tensors.last().map_or(0, |tensor| tensor.offset + tensor.bytes().next_multiple_of(ALIGNMENT))
}

/// The tensors of a file: as the converter orders them, or the quantiser where it has made the file.
fn tensors(
    architecture: Architecture,
    config: &Config,
    fields: &Map<String, Json>,
    file_type: FileType,
) -> Vec<PlannedTensor> {
    let planned = |name: String, shape: Vec<usize>, source| {
        let tensor_type = match source {
            Source::Tensor { .. } => file_type.tensor(&name, &shape, config),
            Source::Values(_) => TensorType::F32,
        };
        PlannedTensor { name, tensor_type, shape, offset: 0, source }
    };
    let derived = architecture.derived(config, fields).into_iter();
    let derived = derived.map(|it| planned(it.name.to_owned(), vec![it.values.len()], Source::Values(it.values)));
    let mut stored = config.tensors();
    stored.sort();
    let stored = stored.into_iter().map(|(source, shape)| {
        let (name, change) = architecture.tensor(&source, config);
        planned(name, shape, Source::Tensor { name: source, change })
    });
    let mut tensors: Vec<PlannedTensor> = derived.chain(stored).collect();
    if file_type.is_of_the_quantiser() {
        tensors.sort_by_cached_key(|tensor| {
            let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            (layer, tensor.name.clone())
        });
    }
    let mut offset = 0;
    for tensor in &mut tensors {
        tensor.offset = offset;
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    tensors
}
