//! The decoder: embedding, layers and head, with the weights of a checkpoint and perhaps an adapter.
//!
//! It knows how blocks follow each other and which of them need a gradient. What a block computes is in
//! [`crate::blocks`], how parameters change in [`crate::trainer`], generation with a cache in [`crate::session`].

mod adapt;
mod adapters;
mod embeddings;
mod fit;
mod load;
mod noise;
mod run;
mod streamed;

use std::collections::BTreeSet;
use std::sync::Arc;

pub use adapt::AttachError;
pub use adapters::{Adapters, Carried};
pub use load::{LoadError, RowsOf};
pub use noise::EmbeddingNoise;
pub(crate) use run::TargetWeights;
pub use run::{Activations, GradientOptions, Recompute, RunError, Scored, TargetScore, TrainingLoss};
pub use streamed::{StreamError, StreamedDecoder, Weights};

use crate::adapter::{Lora, Projection};
use crate::blocks::{AttentionBlock, Blocks, GateUpProjections, HeadBlock, MlpBlock, Norm, QkvProjections};
use crate::config::Config;
use crate::ops::{Ops, Result, RopeTables};
use crate::parameter::{Matrix, Parameter};
use crate::weights::FakeQuantizedLayers;
use embeddings::Embeddings;

/// A decoder on a kernel set.
pub struct Decoder<B: Blocks> {
    ops: Arc<B>,
    config: Config,
    embeddings: Embeddings<B>,
    layers: Vec<Layer<B>>,
    head: HeadBlock<B>,
    /// For as many positions as were needed so far.
    rope: RopeTables<B::Tensor>,
    rope_positions: usize,
    /// Noise on the token embeddings of training passes.
    embedding_noise: Option<EmbeddingNoise>,
    /// The numbers of the adapters that reside on the projections.
    residents: BTreeSet<usize>,
}

struct Layer<B: Ops> {
    attention: AttentionBlock<B>,
    mlp: MlpBlock<B>,
}

impl<B: Blocks> Decoder<B> {
    /// The kernel set.
    pub fn ops(&self) -> &Arc<B> {
        &self.ops
    }

    /// Sets the noise on the token embeddings of training passes; there is none at first.
    pub fn set_embedding_noise(&mut self, noise: Option<EmbeddingNoise>) {
        self.embedding_noise = noise;
    }

    /// The shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// All parameters in use, trained or not, in the order of the layers; not the matrices that are frozen for good.
    pub fn parameters(&self) -> Vec<&Parameter<B>> {
        let mut found: Vec<&Parameter<B>> = self.embeddings.embed_tokens().trained.iter().collect();
        found.extend(self.embeddings.values_of_rows());
        for layer in &self.layers {
            found.extend(layer.attention.norms().map(|norm| &norm.weight));
            found.extend(layer.attention.projections().flat_map(Projection::parameters));
            found.extend(layer.mlp.norms().map(|norm| &norm.weight));
            found.extend(layer.mlp.projections().flat_map(Projection::parameters));
        }
        found.push(&self.head.norm.weight);
        found.extend(self.embeddings.output_parameters());
        found
    }

    /// As [`Decoder::parameters`], to change.
    pub fn parameters_mut(&mut self) -> Vec<&mut Parameter<B>> {
        let (mut found, output) = self.embeddings.parameters_mut();
        for layer in &mut self.layers {
            let (norms, projections) = layer.attention.parts_mut();
            found.extend(norms.map(|norm| &mut norm.weight));
            found.extend(projections.flat_map(Projection::parameters_mut));
            let (norms, projections) = layer.mlp.parts_mut();
            found.extend(norms.map(|norm| &mut norm.weight));
            found.extend(projections.flat_map(Projection::parameters_mut));
        }
        found.push(&mut self.head.norm.weight);
        found.extend(output);
        found
    }

    /// The projections of all layers and `lm_head`: what an adapter can be attached to.
    pub fn projections(&self) -> Vec<&Projection<B>> {
        let mut found = Vec::new();
        for layer in &self.layers {
            found.extend(layer.attention.projections());
            found.extend(layer.mlp.projections());
        }
        found.push(self.embeddings.output());
        found
    }

    /// The matrices that products read, trained or not, and one that is both embedding and head though copies stand in
    /// for it.
    pub(crate) fn matrices(&self) -> Vec<&Matrix<B>> {
        let table = (!self.embeddings.is_shared()).then(|| self.embeddings.embed_tokens());
        let in_use = table.into_iter().chain(self.projections().into_iter().map(|projection| &projection.matrix));
        in_use.chain(self.embeddings.hidden_by_copies()).collect()
    }

    fn projections_mut(&mut self) -> Vec<&mut Projection<B>> {
        let mut found = Vec::new();
        for layer in &mut self.layers {
            found.extend(layer.attention.parts_mut().1);
            found.extend(layer.mlp.parts_mut().1);
        }
        found.push(self.embeddings.output_mut());
        found
    }

    /// The projections, but for a head that is the embedding's matrix.
    fn linear_layers_mut(&mut self) -> Vec<&mut Projection<B>> {
        let is_tied = matches!(self.embeddings, Embeddings::Tied { .. });
        let mut found = self.projections_mut();
        if is_tied {
            found.pop();
        }
        found
    }

    fn norms_mut(&mut self) -> Vec<&mut Norm<B>> {
        let mut found = Vec::new();
        for layer in &mut self.layers {
            found.extend(layer.attention.parts_mut().0);
            found.extend(layer.mlp.parts_mut().0);
        }
        found.push(&mut self.head.norm);
        found
    }

    /// Says that trained values are about to change; [`Decoder::refresh`] comes before the next forward.
    pub(crate) fn release(&mut self) {
        let ops = Arc::clone(&self.ops);
        if !self.embeddings.is_shared() {
            self.embeddings.embed_tokens_mut().release(&ops);
        }
        self.projections_mut().into_iter().for_each(|projection| projection.matrix.release(&ops));
    }

    /// Has the linear layers that these cover compute on grids from now on, and no others; what is trained is prepared
    /// so. Frozen weights are on their grids from loading on: see [`Decoder::load_fake_quantized`].
    pub(crate) fn fake_quantize(&mut self, layers: Option<&FakeQuantizedLayers>) -> Result {
        let mut is_other = false;
        for projection in self.linear_layers_mut() {
            let covering = layers.filter(|layers| layers.covers(&projection.matrix.name));
            let wanted = covering.map(FakeQuantizedLayers::of_weights);
            is_other |= projection.fake_quantization != wanted;
            projection.fake_quantization = wanted;
        }
        if is_other {
            self.release();
            self.refresh()?;
        }
        Ok(())
    }

    /// Makes those elements of the gradients of weights zero that are held back by the ends of grids.
    pub(crate) fn hold_back_gradients(&mut self) -> Result {
        let ops = Arc::clone(&self.ops);
        for projection in self.projections_mut() {
            if let Some(fake_quantization) = projection.fake_quantization {
                projection.matrix.hold_back(&ops, fake_quantization)?;
            }
        }
        Ok(())
    }

    /// Prepares everything that follows from trained values again.
    pub(crate) fn refresh(&mut self) -> Result {
        let ops = Arc::clone(&self.ops);
        if !self.embeddings.is_shared() {
            self.embeddings.embed_tokens_mut().refresh(&ops, None)?;
        }
        self.embeddings.refresh_rows(&ops)?;
        self.projections_mut().into_iter().try_for_each(|projection| projection.refresh(&ops))
    }
}

impl<B: Ops> Projection<B> {
    fn parameters(&self) -> impl Iterator<Item = &Parameter<B>> {
        let lora = self.lora.iter().flat_map(Lora::parameters);
        self.matrix.trained.iter().chain(&self.bias).chain(lora)
    }

    fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        let lora = self.lora.iter_mut().flat_map(Lora::parameters_mut);
        self.matrix.trained.iter_mut().chain(&mut self.bias).chain(lora)
    }
}

impl<B: Ops> AttentionBlock<B> {
    fn norms(&self) -> impl Iterator<Item = &Norm<B>> {
        let qk_norms = self.qk_norms.iter().flat_map(|norms| [&norms.q_norm, &norms.k_norm]);
        std::iter::once(&self.norm).chain(qk_norms).chain(&self.post_norm)
    }

    fn projections(&self) -> impl Iterator<Item = &Projection<B>> {
        let qkv = match &self.qkv {
            QkvProjections::Split { q_proj, k_proj, v_proj } => vec![q_proj, k_proj, v_proj],
            QkvProjections::Fused { qkv_proj } => vec![qkv_proj],
        };
        qkv.into_iter().chain([&self.o_proj])
    }

    fn parts_mut(&mut self) -> (impl Iterator<Item = &mut Norm<B>>, impl Iterator<Item = &mut Projection<B>>) {
        let qk_norms = self.qk_norms.iter_mut().flat_map(|norms| [&mut norms.q_norm, &mut norms.k_norm]);
        let norms = std::iter::once(&mut self.norm).chain(qk_norms).chain(&mut self.post_norm);
        let qkv = match &mut self.qkv {
            QkvProjections::Split { q_proj, k_proj, v_proj } => vec![q_proj, k_proj, v_proj],
            QkvProjections::Fused { qkv_proj } => vec![qkv_proj],
        };
        (norms, qkv.into_iter().chain([&mut self.o_proj]))
    }

    fn is_trained(&self) -> bool {
        self.norms().any(|norm| norm.weight.is_trained()) || self.projections().any(Projection::is_trained)
    }
}

impl<B: Ops> MlpBlock<B> {
    fn norms(&self) -> impl Iterator<Item = &Norm<B>> {
        std::iter::once(&self.norm).chain(&self.post_norm)
    }

    fn projections(&self) -> impl Iterator<Item = &Projection<B>> {
        let gate_up = match &self.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => vec![gate_proj, up_proj],
            GateUpProjections::Fused { gate_up_proj } => vec![gate_up_proj],
        };
        gate_up.into_iter().chain([&self.down_proj])
    }

    fn parts_mut(&mut self) -> (impl Iterator<Item = &mut Norm<B>>, impl Iterator<Item = &mut Projection<B>>) {
        let norms = std::iter::once(&mut self.norm).chain(&mut self.post_norm);
        let gate_up = match &mut self.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => vec![gate_proj, up_proj],
            GateUpProjections::Fused { gate_up_proj } => vec![gate_up_proj],
        };
        (norms, gate_up.into_iter().chain([&mut self.down_proj]))
    }

    fn is_trained(&self) -> bool {
        self.norms().any(|norm| norm.weight.is_trained()) || self.projections().any(Projection::is_trained)
    }
}
