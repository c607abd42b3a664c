//! A checkpoint with rows for new tokens: the embedding and the head get a row each, which is the mean of those that
//! are there, and everything else is copied byte for byte.
//!
//! The mean is where transformers draws such rows around (`resize_token_embeddings` with `mean_resizing`; Hewitt,
//! "Initializing new word embeddings for pretrained language models", 2021): a model gives a new token about the
//! probability of an average one, and its other predictions stay what they were. Here it is the mean itself, so that
//! equal inputs make equal files.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriteError, CheckpointWriter, Dtype, Flush, TensorSpec, encode_float,
    write_atomically,
};
use crate::merge::Progress;

/// The tensors that have a row for each token, as far as a checkpoint has them.
const TABLES: [&str; 2] = ["model.embed_tokens.weight", "lm_head.weight"];

/// Why a checkpoint gets no new rows.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The result cannot be written.
    #[error(transparent)]
    Write(#[from] CheckpointWriteError),
    /// Its configuration cannot be read.
    #[error("cannot read `{}`", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A table has no row for tokens that are said to be there.
    #[error("`{tensor}` has {rows} rows, and the tokenizer has {tokens} tokens")]
    TooFewRows {
        /// The table.
        tensor: &'static str,
        /// Its rows.
        rows: usize,
        /// The tokens.
        tokens: usize,
    },
    /// A table is no matrix of floats.
    #[error("`{tensor}` is stored as {dtype} {shape:?}, and rows are added to a matrix of floats")]
    NoTable {
        /// The table.
        tensor: &'static str,
        /// Its type.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// It was told to stop.
    #[error("stopped")]
    Stopped,
}

/// How new rows are written.
#[derive(Debug, Clone, Copy)]
pub struct ResizeOptions {
    /// Size at which a shard is closed.
    pub max_shard_bytes: u64,
    /// When the weights are flushed.
    pub flush: Flush,
}

/// Writes the checkpoint in `base` to `output` with rows for tokens `tokens .. tokens + added`. A table that has more
/// rows than there are tokens is as long as before, where that is enough. Returns the new size of the vocabulary.
///
/// # Errors
/// Fails if the checkpoint has no such tables, a file cannot be read or written, or `observe` stops it.
pub fn add_tokens(
    base: &Path,
    output: &Path,
    [tokens, added]: [usize; 2],
    options: ResizeOptions,
    observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<usize, ResizeError> {
    let checkpoint = Checkpoint::open(base)?;
    let tables: Vec<Table> = TABLES
        .into_iter()
        .filter(|name| checkpoint.contains(name))
        .map(|name| Table::read(&checkpoint, name, [tokens, added]))
        .collect::<Result<_, _>>()?;
    let spec = |(name, info): (&str, &crate::checkpoint::TensorInfo)| {
        let shape = tables.iter().find(|table| table.name == name).map(|table| [table.new_rows, table.columns]);
        TensorSpec::new(name, info.dtype, shape.as_ref().map_or(info.shape.as_slice(), |shape| shape))
    };
    let specs: Vec<TensorSpec> = checkpoint.tensors().map(spec).collect();
    let total = specs.iter().map(|spec| spec.size_bytes() as u64).sum();
    let mut done = 0;
    let mut writer = CheckpointWriter::create(output, specs.clone(), options.max_shard_bytes)?;
    for spec in &specs {
        match tables.iter().find(|table| table.name == spec.name) {
            Some(table) => table.write(&checkpoint, tokens..tokens + added, &mut writer)?,
            None => {
                let take = |(): &mut (), first: usize, piece: &mut [u8]| -> Result<(), ResizeError> {
                    Ok(checkpoint.read_bytes(&spec.name, first, piece)?)
                };
                writer.write_pieces(&spec.name, 1, take)?;
            }
        }
        done += spec.size_bytes() as u64;
        if observe(Progress { done, total }).is_break() {
            return Err(ResizeError::Stopped);
        }
    }
    writer.finish_with(options.flush)?;
    let vocab_size = tables.iter().map(|table| table.new_rows).max().unwrap_or(tokens + added);
    write_config(base, output, vocab_size)?;
    Ok(vocab_size)
}

/// A tensor with a row for each token.
struct Table {
    name: &'static str,
    dtype: Dtype,
    rows: usize,
    columns: usize,
    new_rows: usize,
    /// A new row, as it is stored.
    mean: Vec<u8>,
}

impl Table {
    fn read(checkpoint: &Checkpoint, name: &'static str, [tokens, added]: [usize; 2]) -> Result<Self, ResizeError> {
        let info = checkpoint.info(name)?;
        let no_table = || ResizeError::NoTable { tensor: name, dtype: info.dtype, shape: info.shape.clone() };
        let &[rows, columns] = info.shape.as_slice() else { return Err(no_table()) };
        if rows < tokens {
            return Err(ResizeError::TooFewRows { tensor: name, rows, tokens });
        }
        let mut sums = vec![0.0; columns];
        let mut row = vec![0.0; columns];
        for index in 0..tokens {
            checkpoint.read_f32(name, index * columns, &mut row)?;
            sums.iter_mut().zip(&row).for_each(|(sum, value)| *sum += f64::from(*value));
        }
        let values: Vec<f32> = sums.iter().map(|sum| (sum / tokens.max(1) as f64) as f32).collect();
        let mut mean = vec![0; columns * info.dtype.bitsize() / 8];
        if !encode_float(info.dtype, &values, &mut mean) {
            return Err(no_table());
        }
        Ok(Self { name, dtype: info.dtype, rows, columns, new_rows: rows.max(tokens + added), mean })
    }

    fn write(
        &self,
        checkpoint: &Checkpoint,
        new: std::ops::Range<usize>,
        writer: &mut CheckpointWriter,
    ) -> Result<(), ResizeError> {
        let row_bytes = self.columns * self.dtype.bitsize() / 8;
        let fill = |(): &mut (), first: usize, piece: &mut [u8]| -> Result<(), ResizeError> {
            for (index, bytes) in piece.chunks_mut(row_bytes).enumerate() {
                let row = first / row_bytes + index;
                match row < self.rows && !new.contains(&row) {
                    true => checkpoint.read_bytes(self.name, row * row_bytes, bytes)?,
                    false => bytes.copy_from_slice(&self.mean),
                }
            }
            Ok(())
        };
        writer.write_pieces(self.name, row_bytes, fill)?;
        Ok(())
    }
}

/// `config.json` with the new size, and `generation_config.json` stays with what goes along with the weights.
fn write_config(base: &Path, output: &Path, vocab_size: usize) -> Result<(), ResizeError> {
    let path = base.join("config.json");
    let error = |source: Box<dyn std::error::Error + Send + Sync>| ResizeError::Config { path: path.clone(), source };
    let text = std::fs::read(&path).map_err(|source| error(source.into()))?;
    let mut config: Map<String, Value> = serde_json::from_slice(&text).map_err(|source| error(source.into()))?;
    config.insert("vocab_size".to_owned(), vocab_size.into());
    write_atomically(&output.join("config.json"), format!("{:#}\n", Value::Object(config)).as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::DEFAULT_MAX_SHARD_BYTES;
    use crate::init::NewModel;

    fn base(folder: &Path, tie_word_embeddings: bool, dtype: Dtype) {
        let model = NewModel {
            vocab_size: 20,
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            tie_word_embeddings,
            ..NewModel::default()
        };
        model.write(folder, 5, dtype).unwrap();
    }

    fn resized(base: &Path, output: &Path, tokens: [usize; 2]) -> Result<usize, ResizeError> {
        let options = ResizeOptions { max_shard_bytes: DEFAULT_MAX_SHARD_BYTES, flush: Flush::Now };
        add_tokens(base, output, tokens, options, &mut |_| ControlFlow::Continue(()))
    }

    #[test]
    fn new_rows_are_the_mean_and_the_rest_is_copied() {
        // 16 of the 20 rows are tokens: the first new one takes a row that is there.
        for (tied, dtype, [tokens, added]) in
            [(true, Dtype::F32, [20, 3]), (false, Dtype::BF16, [20, 2]), (false, Dtype::F32, [16, 5])]
        {
            let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            base(folder.path(), tied, dtype);
            let size = resized(folder.path(), output.path(), [tokens, added]).unwrap();
            assert_eq!(size, 20.max(tokens + added));
            let (before, after) = (Checkpoint::open(folder.path()).unwrap(), Checkpoint::open(output.path()).unwrap());
            assert!(before.names().eq(after.names()));
            for (name, info) in before.tensors() {
                let (old, new) = (before.tensor_f32(name).unwrap(), after.tensor_f32(name).unwrap());
                assert_eq!(after.dtype(name).unwrap(), info.dtype);
                if !TABLES.contains(&name) {
                    assert_eq!(old, new, "{name}");
                    continue;
                }
                assert_eq!(after.shape(name).unwrap(), [size, 8]);
                assert_eq!(new[..tokens * 8], old[..tokens * 8], "{name}");
                for (column, value) in new[tokens * 8..].iter().enumerate() {
                    let sum: f64 = old[column % 8..tokens * 8].iter().step_by(8).map(|value| f64::from(*value)).sum();
                    let mut mean = (sum / tokens as f64) as f32;
                    if dtype == Dtype::BF16 {
                        mean = half::bf16::from_f32(mean).to_f32();
                    }
                    assert_eq!(*value, mean, "{name}");
                }
            }
            let config = crate::config::Config::read(output.path()).unwrap();
            assert_eq!(config.vocab_size, size);
        }
    }

    #[test]
    fn a_tokenizer_with_more_tokens_than_rows_is_refused() {
        let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        base(folder.path(), true, Dtype::F32);
        let error = resized(folder.path(), output.path(), [21, 1]).unwrap_err();
        assert!(matches!(error, ResizeError::TooFewRows { rows: 20, tokens: 21, .. }), "{error}");
    }
}
