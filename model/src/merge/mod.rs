//! Merges adapters into a base checkpoint for good, tensor by tensor, and proves the result.
//!
//! Each adapted weight becomes `W + Σ weight · scaling · B·A`: the delta is computed and added in f32 and the sum is
//! rounded once to the stored type. Everything else is copied. Memory holds a few pieces of a tensor, whatever its
//! size. The sum is that of PEFT's `add_weighted_adapter` with `combination_type="cat"`, merged ("linear" multiplies
//! the sums of the A and of the B instead, which is another thing). [`Merge::prove`] then runs base with adapters
//! beside the merged model, layer by layer.
//!
//! Adapters that were trained on quantised weights are merged into the dequantised ones, which is what they were
//! trained as, or into the original ones; the proof then says how far each of the two is from what was trained.

mod against_training;
mod combine;
mod delta;
mod error;
mod plan;
mod proof;
mod views;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::checkpoint::{
    Checkpoint, CheckpointWriter, DEFAULT_MAX_SHARD_BYTES, Dtype, Flush, encode_float, write_atomically,
};
use crate::peft::Adapter;
use crate::weights::QuantizedBase;
pub use against_training::{AgainstTraining, Deviation};
use delta::{Change, all_finite, block_rows, merge_rows, overflows};
pub use error::MergeError;
use plan::{Plan, Target, TensorChange};
pub use proof::{Comparison, Distance, GROUP_TOKENS, HEAD_BYTES, Measured, Proof, ProofError};

/// An adapter and how much of it enters.
#[derive(Debug, Clone, Copy)]
pub struct WeightedAdapter<'a> {
    /// The adapter.
    pub adapter: &'a Adapter,
    /// Factor on its delta; 1 for the whole of it.
    pub weight: f64,
}

/// How the merged checkpoint is written.
#[derive(Debug, Clone, Copy)]
pub struct MergeOptions<'a> {
    /// Size at which a shard is closed.
    pub max_shard_bytes: u64,
    /// Type of the merged floats; that of each base tensor if absent.
    pub dtype: Option<Dtype>,
    /// Name of the base model, to be compared with what the adapters say that they were trained on.
    pub base_model: Option<&'a str>,
    /// When the weights are flushed.
    pub flush: Flush,
    /// The quantised base that the adapters were trained on, where it was one.
    pub trained_on: Option<TrainedOn<'a>>,
}

/// A quantised base that adapters were trained on.
#[derive(Debug, Clone, Copy)]
pub struct TrainedOn<'a> {
    /// How the base was quantised when it was read.
    pub base: &'a QuantizedBase,
    /// What the adapters are merged into.
    pub into: MergeInto,
}

/// What adapters that were trained on a quantised base are merged into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MergeInto {
    /// The weights as they are stored.
    Original,
    /// The dequantised weights, which the adapters were trained on.
    Dequantized,
}

impl Default for MergeOptions<'_> {
    fn default() -> Self {
        Self {
            max_shard_bytes: DEFAULT_MAX_SHARD_BYTES,
            dtype: None,
            base_model: None,
            flush: Flush::Now,
            trained_on: None,
        }
    }
}

/// What merging did to one weight.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct MergedTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// The greatest change of a value before rounding.
    pub max_abs_delta: f32,
    /// The greatest value of the base, to compare that with.
    pub max_abs_base: f32,
    /// Norm of what rounding to the stored type changed, over the norm of what the adapters changed. Above 1 the noise
    /// of rounding is greater than the adapters' effect on this weight; 0 where nothing is rounded or changed.
    pub rounding_over_delta: f64,
}

/// What a merge did.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct MergeReport {
    /// The weights that changed, by name.
    pub merged: Vec<MergedTensor>,
    /// The tensors that an adapter trained as a whole and that took the place of the base's.
    pub replaced: Vec<String>,
    /// How many tensors were taken over as they stood.
    pub copied: usize,
    /// The output head was the embedding and has become a weight of its own, because an adapter changed one of them
    /// alone.
    pub untied_head: bool,
    /// The files written.
    #[serde(skip)]
    pub files: Vec<PathBuf>,
}

/// How far a merge or its proof is: what is done and the whole, in bytes or in layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is done.
    pub done: u64,
    /// The whole.
    pub total: u64,
}

/// Merges `adapters` into the checkpoint in `base` and writes the result to `output`: see [`Merge::write`].
///
/// # Errors
/// Fails if an adapter does not fit the base, or a file cannot be read or written.
pub fn merge(
    base: &Path,
    adapters: &[WeightedAdapter<'_>],
    output: &Path,
    options: MergeOptions<'_>,
) -> Result<MergeReport, MergeError> {
    Merge::new(base, adapters, options)?.write(output, &mut |_| ControlFlow::Continue(()))
}

/// A merge of adapters into a base that has been checked: they fit.
pub struct Merge<'a> {
    base: PathBuf,
    /// What is merged into.
    checkpoint: Checkpoint,
    /// What could be merged into instead, of adapters that were trained on a quantised base.
    other: Option<Checkpoint>,
    config: Map<String, Value>,
    adapters: Vec<WeightedAdapter<'a>>,
    options: MergeOptions<'a>,
    plan: Plan<'a>,
}

impl<'a> Merge<'a> {
    /// Opens the checkpoint in `base` and checks every adapter against it: modules, shapes, finite values.
    ///
    /// # Errors
    /// Fails if an adapter does not fit the base, or the base cannot be read.
    pub fn new(base: &Path, adapters: &[WeightedAdapter<'a>], options: MergeOptions<'a>) -> Result<Self, MergeError> {
        let original = Checkpoint::open(base)?;
        let (checkpoint, other) = match options.trained_on {
            None => (original, None),
            Some(TrainedOn { base: quantized, into }) => {
                let dequantized = Checkpoint::open(base)?.quantizing(quantized.clone());
                match into {
                    MergeInto::Original => (original, Some(dequantized)),
                    MergeInto::Dequantized => (dequantized, Some(original)),
                }
            }
        };
        let config = read_config(&base.join("config.json"))?;
        let plan = Plan::new(&checkpoint, &config, adapters, options)?;
        Ok(Self { base: base.to_path_buf(), checkpoint, other, config, adapters: adapters.to_vec(), options, plan })
    }

    /// Writes the merged checkpoint to a folder: weights, `config.json` and, where there is one,
    /// `generation_config.json`.
    ///
    /// A head that is tied to the embedding, of which only one is changed, is written as a weight of its own, with
    /// `tie_word_embeddings` false. `observe` hears how many bytes are written and may stop the merge.
    ///
    /// # Errors
    /// Fails if a value is not finite or does not fit its type, or a file cannot be read or written.
    pub fn write(
        &self,
        output: &Path,
        observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<MergeReport, MergeError> {
        let specs = self.plan.specs();
        let total = specs.iter().map(|spec| spec.size_bytes() as u64).sum();
        let mut done = 0;
        let mut writer = CheckpointWriter::create(output, specs.clone(), self.options.max_shard_bytes)?;
        let untied_head = self.plan.unties_head;
        let mut report =
            MergeReport { merged: Vec::new(), replaced: Vec::new(), copied: 0, untied_head, files: Vec::new() };
        for ((name, target), spec) in self.plan.targets.iter().zip(&specs) {
            // Quantised once, before threads read it piece by piece.
            self.checkpoint.nf4(&target.source)?;
            match &target.change {
                TensorChange::None => {
                    self.copy(name, target, &mut writer)?;
                    report.copied += 1;
                }
                TensorChange::Shares(shares) => {
                    let add =
                        |rows: &mut [f32], first: usize, delta: &mut Vec<f32>| merge_rows(rows, first, shares, delta);
                    report.merged.push(self.change(name, target, &add, &mut writer)?);
                }
                TensorChange::Rows(rows) => {
                    let columns = target.row_elements();
                    let put =
                        |values: &mut [f32], first: usize, _: &mut Vec<f32>| rows.put_into(values, first, columns);
                    report.merged.push(self.change(name, target, &put, &mut writer)?);
                }
                TensorChange::Saved(values) => {
                    write_saved(name, target, values, &mut writer)?;
                    report.replaced.push(name.clone());
                }
            }
            done += spec.size_bytes() as u64;
            if observe(Progress { done, total }).is_break() {
                return Err(MergeError::Stopped);
            }
        }
        report.files = writer.finish_with(self.options.flush)?;
        report.files.extend(self.write_configs(output)?);
        Ok(report)
    }

    /// Takes a tensor over: byte for byte, or in another type.
    fn copy(&self, name: &str, target: &Target<'_>, writer: &mut CheckpointWriter) -> Result<(), MergeError> {
        let (from, to) = (self.checkpoint.dtype(&target.source)?, target.dtype);
        if from == to {
            let take = |(): &mut (), first: usize, piece: &mut [u8]| -> Result<(), MergeError> {
                Ok(self.checkpoint.read_bytes(&target.source, first, piece)?)
            };
            writer.write_pieces(name, 1, take)?;
            return Ok(());
        }
        let width = to.bitsize() / 8;
        let convert = |values: &mut Vec<f32>, first: usize, piece: &mut [u8]| -> Result<(), MergeError> {
            values.resize(piece.len() / width, 0.0);
            self.checkpoint.read_f32(&target.source, first / width, values)?;
            encode(name, to, values, piece)
        };
        writer.write_pieces(name, width, convert)?;
        Ok(())
    }

    /// Writes a tensor with a change to its rows.
    fn change(
        &self,
        name: &str,
        target: &Target<'_>,
        change_rows: &ChangeRows<'_>,
        writer: &mut CheckpointWriter,
    ) -> Result<MergedTensor, MergeError> {
        let columns = target.row_elements();
        let row_bytes = columns * target.dtype.bitsize() / 8;
        let block = block_rows(columns);
        let add = |room: &mut Room, first: usize, piece: &mut [u8]| -> Result<Change, MergeError> {
            let first = first / row_bytes;
            let Room { base, merged, delta } = room;
            let mut change = Change::default();
            for (index, bytes) in piece.chunks_mut(block * row_bytes).enumerate() {
                let row = first + index * block;
                base.resize(bytes.len() / row_bytes * columns, 0.0);
                self.checkpoint.read_f32(&target.source, row * columns, base)?;
                merged.clear();
                merged.extend_from_slice(base);
                change_rows(merged, row, delta);
                if !all_finite(merged) {
                    return Err(MergeError::NotFinite { module: name.trim_end_matches(".weight").to_owned() });
                }
                encode(name, target.dtype, merged, bytes)?;
                change = change.and(Change::of(base, merged, target.dtype));
            }
            Ok(change)
        };
        let changes = writer.write_pieces(name, row_bytes, add)?;
        let change = changes.into_iter().fold(Change::default(), Change::and);
        Ok(MergedTensor {
            name: name.to_owned(),
            max_abs_delta: change.max_abs_delta,
            max_abs_base: change.max_abs_base,
            rounding_over_delta: change.rounding_over_delta(),
        })
    }

    fn write_configs(&self, output: &Path) -> Result<Vec<PathBuf>, MergeError> {
        let mut config = self.config.clone();
        if self.plan.unties_head {
            config.insert("tie_word_embeddings".to_owned(), Value::Bool(false));
        }
        // Weights in 4 bits are written dequantised.
        config.remove("quantization_config");
        set_dtype(&mut config, self.options.dtype);
        let path = output.join("config.json");
        write_atomically(&path, format!("{:#}\n", Value::Object(config)).as_bytes())?;
        let mut written = vec![path];
        let generation = self.base.join("generation_config.json");
        if generation.exists() {
            let error = |source: std::io::Error| MergeError::Config { path: generation.clone(), source: source.into() };
            let path = output.join("generation_config.json");
            write_atomically(&path, &std::fs::read(&generation).map_err(error)?)?;
            written.push(path);
        }
        Ok(written)
    }
}

/// Writes a tensor that an adapter trained as a whole.
fn write_saved(
    name: &str,
    target: &Target<'_>,
    values: &[f32],
    writer: &mut CheckpointWriter,
) -> Result<(), MergeError> {
    let width = target.dtype.bitsize() / 8;
    let take = |(): &mut (), first: usize, piece: &mut [u8]| -> Result<(), MergeError> {
        encode(name, target.dtype, &values[first / width..][..piece.len() / width], piece)
    };
    writer.write_pieces(name, width, take)?;
    Ok(())
}

/// Changes some rows of a tensor, from a first one on, with room to work in.
type ChangeRows<'c> = dyn Fn(&mut [f32], usize, &mut Vec<f32>) + Sync + 'c;

/// Room for a block of rows, that a thread uses again.
#[derive(Default)]
struct Room {
    base: Vec<f32>,
    merged: Vec<f32>,
    delta: Vec<f32>,
}

/// Rounds values to a type that holds them. What is not finite stays what it is.
fn encode(tensor: &str, dtype: Dtype, values: &[f32], bytes: &mut [u8]) -> Result<(), MergeError> {
    let fits = encode_float(dtype, values, bytes);
    assert!(fits, "only floats are encoded");
    match overflows(dtype, values) {
        true => Err(MergeError::Overflow { tensor: tensor.to_owned(), dtype }),
        false => Ok(()),
    }
}

fn read_config(path: &Path) -> Result<Map<String, Value>, MergeError> {
    let error = |source| MergeError::Config { path: path.to_path_buf(), source };
    let text = std::fs::read(path).map_err(|source| error(source.into()))?;
    serde_json::from_slice(&text).map_err(|source| error(source.into()))
}

fn set_dtype(config: &mut Map<String, Value>, dtype: Option<Dtype>) {
    let Some(name) = dtype.and_then(crate::checkpoint::torch_name) else { return };
    // transformers renamed the key in version 5; a file keeps the spelling it has.
    let key = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    config.insert(key.to_owned(), Value::from(name));
}

#[cfg(test)]
mod tests;
