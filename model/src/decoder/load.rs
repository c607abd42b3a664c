//! Builds a decoder from a checkpoint.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::embeddings::Embeddings;
use super::{Decoder, Layer};
use crate::adapter::Projection;
use crate::blocks::{AttentionBlock, Blocks, GateUpProjections, HeadBlock, MlpBlock, Norm, QkNorms, QkvProjections};
use crate::checkpoint::{Checkpoint, CheckpointError, Rows, ValueRows};
use crate::config::{AttentionBias, Config, ConfigError, HeadWeight, LayerNorms, MlpBias, Projections, QkNorm};
use crate::ops::{AttentionShape, KernelError, PrepareError, RmsNorm, WeightRole};
use crate::parameter::{Matrix, Parameter, Trainability};
use crate::weights::{FakeQuantization, FakeQuantizedLayers, FrozenGrids, QuantizedBase};

/// Positions for which tables are made at first.
const FIRST_POSITIONS: usize = 512;

/// Why a decoder cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The configuration is at fault.
    #[error("cannot use the model's configuration")]
    Config(#[from] ConfigError),
    /// The weights are.
    #[error("cannot read the model's weights")]
    Weights(#[from] CheckpointError),
    /// The device is.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl From<PrepareError> for LoadError {
    fn from(error: PrepareError) -> Self {
        match error {
            PrepareError::Read(error) => Self::Weights(error),
            PrepareError::Kernel(error) => Self::Kernel(error),
        }
    }
}

impl<B: Blocks> Decoder<B> {
    /// Loads the checkpoint in a folder: `config.json` and its safetensors. A frozen model that was trained for 4-bit
    /// weights (it has the file [`crate::weights::SCALES_FILE`]) computes as it did in training; one to be trained
    /// starts from its weights as they are.
    ///
    /// # Errors
    /// Fails if a file cannot be read, the weights are not those of the configuration, or the device fails.
    pub fn load(ops: Arc<B>, folder: &Path, keep: Trainability) -> Result<Self, LoadError> {
        let grids = match keep {
            Trainability::Frozen => FrozenGrids::beside(folder)?,
            Trainability::Trainable => None,
        };
        Self::read(ops, folder, keep, None, grids)
    }

    /// As [`Decoder::load`], frozen, for kernels that store the weights in a format of their own.
    ///
    /// # Errors
    /// As there.
    pub fn load_values(ops: Arc<B>, folder: &Path) -> Result<Self, LoadError> {
        Self::read(ops, folder, Trainability::Frozen, None, None)
    }

    /// As [`Decoder::load`], frozen, with the weights of these layers moved to the grids that follow from them.
    ///
    /// # Errors
    /// As there.
    pub fn load_fake_quantized(ops: Arc<B>, folder: &Path, layers: &FakeQuantizedLayers) -> Result<Self, LoadError> {
        Self::read(ops, folder, Trainability::Frozen, None, Some(FrozenGrids::Computed(layers.clone())))
    }

    /// As [`Decoder::load`], frozen, with its linear layers quantised while they are read.
    ///
    /// # Errors
    /// As there.
    pub fn load_quantized(ops: Arc<B>, folder: &Path, quantize: &QuantizedBase) -> Result<Self, LoadError> {
        Self::read(ops, folder, Trainability::Frozen, Some(quantize), None)
    }

    fn read(
        ops: Arc<B>,
        folder: &Path,
        keep: Trainability,
        quantize: Option<&QuantizedBase>,
        grids: Option<FrozenGrids>,
    ) -> Result<Self, LoadError> {
        let profile = ops.profile().clone();
        let _phase = profile.phase("load the model");
        let config = Config::read(folder)?;
        let checkpoint = Checkpoint::open(folder)?;
        config.check_weights(&checkpoint)?;
        let checkpoint = match quantize {
            Some(quantize) => checkpoint.quantizing(quantize.clone()),
            None => checkpoint,
        };
        let rows: RowsOf<'_> = Box::new(|name, shape| {
            let rows: Box<dyn Rows + '_> = Box::new(checkpoint.stored_rows(name, &shape, 0)?);
            Ok(Some(match &grids {
                Some(grids) => grids.rows(rows, name, shape)?,
                None => rows,
            }))
        });
        let values = |name: &str, shape: &[usize]| checkpoint.tensor_f32_of_shape(name, shape);
        let mut decoder = Self::assemble(ops, config, keep, values, rows)?;
        if let Some(grids) = &grids {
            for projection in decoder.linear_layers_mut() {
                let matrix = &projection.matrix;
                let group_size = grids.group_size(&matrix.name, [matrix.out_features, matrix.in_features])?;
                projection.fake_quantization =
                    group_size.map(|group_size| FakeQuantization::Int4Weights { group_size });
            }
        }
        Ok(decoder)
    }

    /// Builds a decoder of the values that `values` gives for a tensor's name and shape.
    ///
    /// # Errors
    /// Fails if `values` does, or the device.
    pub fn build(
        ops: Arc<B>,
        config: Config,
        keep: Trainability,
        values: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, CheckpointError>,
    ) -> Result<Self, LoadError> {
        Self::assemble(ops, config, keep, values, Box::new(|_, _| Ok(None)))
    }

    /// As [`Decoder::build`], frozen, with what `rows` has for the name and shape of a matrix, which may be stored in
    /// blocks; where that is nothing, of the values.
    ///
    /// # Errors
    /// As there, and if `rows` fails.
    pub fn build_of_rows(
        ops: Arc<B>,
        config: Config,
        values: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, CheckpointError>,
        rows: RowsOf<'_>,
    ) -> Result<Self, LoadError> {
        Self::assemble(ops, config, Trainability::Frozen, values, rows)
    }

    fn assemble(
        ops: Arc<B>,
        config: Config,
        keep: Trainability,
        values: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, CheckpointError>,
        rows: RowsOf<'_>,
    ) -> Result<Self, LoadError> {
        let mut builder = Builder { ops: &*ops, config: &config, keep, values, rows };
        let embeddings = builder.embeddings()?;
        let layers = (0..config.num_hidden_layers).map(|layer| builder.layer(layer)).collect::<Result<_, _>>()?;
        let head = builder.head()?;
        let rope_positions = FIRST_POSITIONS.min(config.max_position_embeddings);
        let rope = config.rope.tables(&*ops, rope_positions)?;
        Ok(Self {
            ops,
            config,
            embeddings,
            layers,
            head,
            rope,
            rope_positions,
            embedding_noise: None,
            residents: BTreeSet::new(),
        })
    }
}

/// Gives the rows of a matrix by its name and shape, where it can be read.
pub type RowsOf<'a> = Box<dyn Fn(&str, [usize; 2]) -> Result<Option<Box<dyn Rows + 'a>>, CheckpointError> + 'a>;

/// Builds the parts of a decoder, of the values that `values` gives for a tensor's name and shape, and of what `rows`
/// has to read for a frozen matrix.
pub(super) struct Builder<'a, 'r, B, F> {
    pub(super) ops: &'a B,
    pub(super) config: &'a Config,
    pub(super) keep: Trainability,
    pub(super) values: F,
    pub(super) rows: RowsOf<'r>,
}

impl<B: Blocks, F: FnMut(&str, &[usize]) -> Result<Vec<f32>, CheckpointError>> Builder<'_, '_, B, F> {
    fn parameter(&mut self, name: String, size: usize) -> Result<Parameter<B>, LoadError> {
        let values = (self.values)(&name, &[size])?;
        Ok(Parameter::new(self.ops, name, &[size], &values)?)
    }

    fn matrix(&mut self, name: String, shape: [usize; 2], role: WeightRole) -> Result<Matrix<B>, LoadError> {
        let rows = match self.keep {
            Trainability::Frozen => (self.rows)(&name, shape)?,
            Trainability::Trainable => None,
        };
        if let Some(rows) = rows {
            return Ok(Matrix::frozen(self.ops, name, shape, role, &*rows)?);
        }
        let values = (self.values)(&name, &shape)?;
        Ok(match self.keep {
            Trainability::Frozen => Matrix::frozen(self.ops, name, shape, role, &ValueRows::new(&values, shape[1]))?,
            Trainability::Trainable => Matrix::trainable(self.ops, name, shape, role, &values)?,
        })
    }

    fn table(&mut self, name: &str) -> Result<Matrix<B>, LoadError> {
        let shape = [self.config.vocab_size, self.config.hidden_size];
        self.matrix(format!("{name}.weight"), shape, WeightRole::Table)
    }

    fn norm(&mut self, name: &str, size: usize) -> Result<Norm<B>, LoadError> {
        let rms = RmsNorm { eps: self.config.rms_norm_eps, weight: self.config.norm_weight };
        Ok(Norm { rms, weight: self.parameter(format!("{name}.weight"), size)? })
    }

    fn projection(&mut self, name: &str, shape: [usize; 2], bias: Bias) -> Result<Projection<B>, LoadError> {
        let matrix = self.matrix(format!("{name}.weight"), shape, WeightRole::Matrix)?;
        let bias = match bias {
            Bias::None => None,
            Bias::Present => Some(self.parameter(format!("{name}.bias"), shape[0])?),
        };
        Ok(Projection::new(matrix, bias))
    }

    fn embeddings(&mut self) -> Result<Embeddings<B>, LoadError> {
        let embed_tokens = self.table("model.embed_tokens")?;
        match self.config.head {
            HeadWeight::Tied => Ok(Embeddings::tied(embed_tokens)),
            HeadWeight::Own => {
                let lm_head = Projection::new(self.table("lm_head")?, None);
                Ok(Embeddings::Untied { embed_tokens, rows: None, lm_head })
            }
        }
    }

    pub(super) fn head(&mut self) -> Result<HeadBlock<B>, LoadError> {
        Ok(HeadBlock {
            norm: self.norm("model.norm", self.config.hidden_size)?,
            soft_cap: self.config.logit_soft_cap,
            chunk_rows: crate::memory::logit_rows(self.config.vocab_size),
        })
    }

    pub(super) fn layer(&mut self, index: usize) -> Result<Layer<B>, LoadError> {
        let prefix = format!("model.layers.{index}");
        Ok(Layer { attention: self.attention(&prefix, index)?, mlp: self.mlp(&prefix)? })
    }

    fn attention(&mut self, prefix: &str, index: usize) -> Result<AttentionBlock<B>, LoadError> {
        let config = self.config;
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let (queries, keys) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let (bias, o_bias) = match config.attention_bias {
            AttentionBias::None => (Bias::None, Bias::None),
            AttentionBias::Qkv => (Bias::Present, Bias::None),
            AttentionBias::All => (Bias::Present, Bias::Present),
        };
        let module = |name: &str| format!("{prefix}.self_attn.{name}");
        let qkv = match config.projections {
            Projections::Split => QkvProjections::Split {
                q_proj: self.projection(&module("q_proj"), [queries, hidden], bias)?,
                k_proj: self.projection(&module("k_proj"), [keys, hidden], bias)?,
                v_proj: self.projection(&module("v_proj"), [keys, hidden], bias)?,
            },
            Projections::Fused => QkvProjections::Fused {
                qkv_proj: self.projection(&module("qkv_proj"), [queries + 2 * keys, hidden], bias)?,
            },
        };
        let qk_norms = match config.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some(QkNorms {
                q_norm: self.norm(&module("q_norm"), head_dim)?,
                k_norm: self.norm(&module("k_norm"), head_dim)?,
            }),
        };
        let post_norm = match config.layer_norms {
            LayerNorms::Pre => None,
            LayerNorms::PreAndPost => Some(self.norm(&format!("{prefix}.post_attention_layernorm"), hidden)?),
        };
        Ok(AttentionBlock {
            norm: self.norm(&format!("{prefix}.input_layernorm"), hidden)?,
            qkv,
            qk_norms,
            o_proj: self.projection(&module("o_proj"), [hidden, queries], o_bias)?,
            post_norm,
            shape: AttentionShape {
                num_attention_heads: config.num_attention_heads,
                num_key_value_heads: config.num_key_value_heads,
                head_dim,
                scale: config.attention_scale,
                window: config.windows[index],
                soft_cap: config.attention_soft_cap,
            },
        })
    }

    fn mlp(&mut self, prefix: &str) -> Result<MlpBlock<B>, LoadError> {
        let config = self.config;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let bias = match config.mlp_bias {
            MlpBias::None => Bias::None,
            MlpBias::All => Bias::Present,
        };
        let module = |name: &str| format!("{prefix}.mlp.{name}");
        let gate_up = match config.projections {
            Projections::Split => GateUpProjections::Split {
                gate_proj: self.projection(&module("gate_proj"), [inner, hidden], bias)?,
                up_proj: self.projection(&module("up_proj"), [inner, hidden], bias)?,
            },
            Projections::Fused => GateUpProjections::Fused {
                gate_up_proj: self.projection(&module("gate_up_proj"), [2 * inner, hidden], bias)?,
            },
        };
        let (norm, post_norm) = match config.layer_norms {
            LayerNorms::Pre => (self.norm(&format!("{prefix}.post_attention_layernorm"), hidden)?, None),
            LayerNorms::PreAndPost => (
                self.norm(&format!("{prefix}.pre_feedforward_layernorm"), hidden)?,
                Some(self.norm(&format!("{prefix}.post_feedforward_layernorm"), hidden)?),
            ),
        };
        Ok(MlpBlock {
            norm,
            gate_up,
            down_proj: self.projection(&module("down_proj"), [hidden, inner], bias)?,
            post_norm,
            activation: config.activation,
        })
    }
}

/// Whether a projection has a bias.
#[derive(Clone, Copy)]
enum Bias {
    None,
    Present,
}
