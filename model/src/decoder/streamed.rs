//! A decoder that is never whole in memory: documents go through it layer by layer, and each layer's weights are read
//! when it is its turn.
//!
//! It serves where a model is run once over a little text, as in the proof of a merge: memory holds the residual
//! streams and one layer, of the embedding the rows that occur, of the head a block of the vocabulary. Results are
//! those of [`super::Decoder`].

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::load::{Builder, RowsOf};
use super::{AttachError, Layer, LoadError, RunError};
use crate::adapter::{Lora, Projection};
use crate::batch::{Batch, Documents};
use crate::blocks::{Blocks, HeadBlock, Pass};
use crate::checkpoint::{Checkpoint, CheckpointError, Rows, ValueRows};
use crate::config::{Config, HeadWeight};
use crate::ops::{KernelError, RopeTables, WeightRole, WeightSource};
use crate::parameter::{Matrix, Trainability};
use crate::peft::{Adapter, AdapterModule};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Where the weights of a [`StreamedDecoder`] come from.
pub trait Weights {
    /// The steps of a tensor's first dimension from `first` on. The tensor must have this shape.
    ///
    /// # Errors
    /// Fails if there is no such tensor, or it is of another shape, or cannot be read as f32.
    fn rows<'a>(&'a self, name: &str, shape: &[usize], first: usize) -> Result<Box<dyn Rows + 'a>, CheckpointError>;
}

impl Weights for Checkpoint {
    fn rows<'a>(&'a self, name: &str, shape: &[usize], first: usize) -> Result<Box<dyn Rows + 'a>, CheckpointError> {
        Ok(Box::new(self.stored_rows(name, shape, first)?))
    }
}

/// Why documents did not get through a [`StreamedDecoder`].
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// A part of the model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The adapter does not fit it.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The documents do not, or the device failed.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl From<KernelError> for StreamError {
    fn from(error: KernelError) -> Self {
        Self::Run(error.into())
    }
}

impl From<CheckpointError> for StreamError {
    fn from(error: CheckpointError) -> Self {
        Self::Load(error.into())
    }
}

/// Documents on their way through a decoder.
pub struct StreamedDecoder<'a, B: Blocks> {
    ops: Arc<B>,
    config: &'a Config,
    weights: &'a dyn Weights,
    adapter: Option<&'a Adapter>,
    rope: RopeTables<B::Tensor>,
    batches: Vec<Stream<B>>,
}

/// Gives a tensor's values by its name and shape.
type Values<'a> = Box<dyn FnMut(&str, &[usize]) -> Result<Vec<f32>, CheckpointError> + 'a>;

/// One batch on its way.
struct Stream<B: Blocks> {
    documents: Documents,
    /// The residual stream, `[tokens, hidden_size]`.
    x: B::Tensor,
}

impl<'a, B: Blocks> StreamedDecoder<'a, B> {
    /// Embeds the batches, so that they are ready for the first layer. An adapter's deltas are added to what each
    /// projection computes; modules that it trained as a whole are for `weights` to give.
    ///
    /// # Errors
    /// Fails if a batch does not fit the model, the embedding cannot be read, or the device fails.
    pub fn new(
        ops: Arc<B>,
        config: &'a Config,
        weights: &'a dyn Weights,
        adapter: Option<&'a Adapter>,
        batches: &[Batch],
    ) -> Result<Self, StreamError> {
        for batch in batches {
            batch.check(config.vocab_size, config.max_position_embeddings).map_err(RunError::from)?;
        }
        let lengths = batches.iter().flat_map(|batch| &batch.document_lengths);
        let rope = config.rope.tables(&*ops, lengths.copied().max().unwrap_or(1))?;
        let mut decoder = Self { ops, config, weights, adapter, rope, batches: Vec::new() };
        decoder.batches = decoder.embed(batches)?;
        Ok(decoder)
    }

    /// Takes the batches through one layer; each layer once, from the first on.
    ///
    /// # Errors
    /// Fails if the layer cannot be loaded, the adapter does not fit it, or the device fails.
    pub fn layer(&mut self, index: usize) -> Result<(), StreamError> {
        let mut layer = self.builder().layer(index)?;
        let Layer { attention, mlp } = &mut layer;
        let (of_attention, of_mlp) = (attention.parts_mut().1, mlp.parts_mut().1);
        of_attention.chain(of_mlp).try_for_each(|projection| self.attach(projection, None))?;
        let (mut attention_saved, mut mlp_saved) = (B::AttentionSaved::default(), B::MlpSaved::default());
        for Stream { documents, x } in &mut self.batches {
            let pass = Pass { documents, rope: &self.rope, draws: None, adapters: &[] };
            self.ops.attention_block(attention, &pass, x, &mut attention_saved)?;
            self.ops.mlp_block(mlp, None, x, &mut mlp_saved)?;
        }
        Ok(())
    }

    /// The residual stream of one of the batches, `[tokens, hidden_size]`.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn residual(&self, batch: usize) -> Result<Vec<f32>, StreamError> {
        Ok(self.ops.read(&self.batches[batch].x)?)
    }

    /// The logits of each batch's tokens for a part of the vocabulary, `[tokens, ids]`, once they are through all
    /// layers.
    ///
    /// # Errors
    /// Fails if the head cannot be loaded, the adapter does not fit it, or the device fails.
    pub fn logits(&self, ids: Range<usize>) -> Result<Vec<Vec<f32>>, StreamError> {
        let head: HeadBlock<B> = self.builder().head()?;
        let shape = [self.config.vocab_size, self.config.hidden_size];
        let stored_as = match self.config.head {
            HeadWeight::Tied => EMBEDDING,
            HeadWeight::Own => HEAD,
        };
        let rows = self.weights.rows(stored_as, &shape, ids.start)?;
        let matrix = Matrix::frozen(&*self.ops, HEAD, [ids.len(), shape[1]], WeightRole::Matrix, &*rows)
            .map_err(LoadError::from)?;
        let mut output = Projection::new(matrix, None);
        self.attach(&mut output, Some(ids))?;
        let logits_of = |stream: &Stream<B>| {
            let mut logits = B::Tensor::default();
            self.ops.head_logits(&head, &output, &stream.x, &mut logits)?;
            Ok(self.ops.read(&logits)?)
        };
        self.batches.iter().map(logits_of).collect()
    }

    fn builder(&self) -> Builder<'_, '_, B, Values<'_>> {
        let values = |name: &str, shape: &[usize]| {
            let mut values = vec![0.0; shape.iter().product()];
            self.weights.rows(name, shape, 0)?.read(0, &mut values)?;
            Ok(values)
        };
        let rows: RowsOf<'_> = Box::new(|name, shape| self.weights.rows(name, &shape, 0).map(Some));
        Builder { ops: &*self.ops, config: self.config, keep: Trainability::Frozen, values: Box::new(values), rows }
    }

    /// Puts the adapter's part for a projection onto it: all of it, or that for some of its outputs.
    fn attach(&self, projection: &mut Projection<B>, outputs: Option<Range<usize>>) -> Result<(), StreamError> {
        let Some(adapter) = self.adapter else { return Ok(()) };
        let Some(module) = adapter.modules.get(projection.path()) else { return Ok(()) };
        let part = outputs.map(|outputs| outputs_of(module, outputs));
        let module = part.as_ref().unwrap_or(module);
        projection.lora = Some(Lora::new(&*self.ops, projection, module, &adapter.config)?);
        Ok(())
    }

    /// Embeds with a table of the ids that occur.
    fn embed(&self, batches: &[Batch]) -> Result<Vec<Stream<B>>, StreamError> {
        let mut places: BTreeMap<u32, u32> =
            batches.iter().flat_map(|batch| &batch.input_ids).map(|&id| (id, 0)).collect();
        let shape = [self.config.vocab_size, self.config.hidden_size];
        let rows = self.weights.rows(EMBEDDING, &shape, 0)?;
        let mut values = vec![0.0; places.len() * shape[1]];
        for ((place, (&id, of_id)), values) in places.iter_mut().enumerate().zip(values.chunks_exact_mut(shape[1])) {
            rows.read(id as usize, values)?;
            *of_id = place as u32;
        }
        let table_shape = [places.len(), shape[1]];
        let rows = ValueRows::new(&values, shape[1]);
        let table = self.ops.prepare(WeightSource::Rows(&rows), table_shape, WeightRole::Matrix);
        let table = table.map_err(LoadError::from)?;
        let stream = |batch: &Batch| {
            let ids: Vec<u32> = batch.input_ids.iter().map(|id| places[id]).collect();
            let mut x = B::Tensor::default();
            self.ops.embed(&table, &ids, self.config.embedding_scale, &mut x)?;
            Ok(Stream { documents: Documents::new(&batch.document_lengths), x })
        };
        batches.iter().map(stream).collect()
    }
}

/// The part of an adapter's module for some of its outputs.
fn outputs_of(module: &AdapterModule, outputs: Range<usize>) -> AdapterModule {
    AdapterModule {
        rank: module.rank,
        in_features: module.in_features,
        out_features: outputs.len(),
        lora_a: module.lora_a.clone(),
        lora_b: module.lora_b[outputs.start * module.rank..outputs.end * module.rank].to_vec(),
        magnitude: module.magnitude.as_ref().map(|magnitude| magnitude[outputs].to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::cpu::Cpu;
    use crate::decoder::Decoder;
    use crate::ops::Compute;

    /// Runs the documents of a golden family whole and streamed.
    fn both_agree(family: &str, variant: Option<&str>) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(family);
        let adapter = variant.map(|variant| Adapter::load(&folder.join("lora").join(variant).join("adapter")).unwrap());
        let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
        let mut whole = Decoder::load(Arc::clone(&ops), &folder, Trainability::Frozen).unwrap();
        if let Some(adapter) = &adapter {
            whole.attach(adapter).unwrap();
        }
        let mut packed = Batch::text(vec![5, 9, 2, 6, 5, 3, 11, 7, 1]);
        packed.document_lengths = vec![6, 3];
        let batches = [packed, Batch::text((0..40).map(|at| (7 * at) % 50).collect())];

        let config = Config::read(&folder).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let mut streamed = StreamedDecoder::new(ops, &config, &checkpoint, adapter.as_ref(), &batches).unwrap();
        let outputs: Vec<_> = batches.iter().map(|batch| whole.layer_outputs(batch).unwrap()).collect();
        for layer in 0..config.num_hidden_layers {
            streamed.layer(layer).unwrap();
            for (batch, outputs) in outputs.iter().enumerate() {
                assert_eq!(streamed.residual(batch).unwrap(), outputs[layer], "{family} layer {layer}");
            }
        }
        // Blocks of the vocabulary of unequal size.
        let cut = config.vocab_size / 3;
        let (low, high) = (streamed.logits(0..cut).unwrap(), streamed.logits(cut..config.vocab_size).unwrap());
        for ((batch, low), high) in batches.iter().zip(&low).zip(&high) {
            let expected = whole.logits(batch).unwrap();
            let rows = low.chunks_exact(cut).zip(high.chunks_exact(config.vocab_size - cut));
            let found: Vec<f32> = rows.flat_map(|(low, high)| low.iter().chain(high)).copied().collect();
            let largest = expected.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= 1e-5 * largest, "{family}: {found} and {expected}");
            }
        }
    }

    #[test]
    fn a_streamed_decoder_computes_what_a_whole_one_does() {
        for family in ["llama31", "gemma2", "phi3", "qwen3"] {
            both_agree(family, None);
        }
        for variant in ["all_linear", "dora"] {
            both_agree("llama31", Some(variant));
        }
    }
}
