//! The formats that weights are stored in: names, blocks, bytes.

use crate::ops::WeightRole;

/// How the values of a weight are stored in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Half precision.
    F16,
    /// Quantised, in blocks.
    Blocks(BlockFormat),
}

impl WeightFormat {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Blocks(format) => format.name(),
        }
    }

    /// The bytes of so many weights. Padding is not counted.
    pub fn bytes(self, weights: u64) -> u64 {
        match self {
            Self::F32 => 4 * weights,
            Self::Bf16 | Self::F16 => 2 * weights,
            Self::Blocks(format) => weights.div_ceil(format.block_size()) * format.block_bytes(),
        }
    }
}

/// A format of quantised weights: blocks of numbers of few bits that share a scale.
///
/// [`BlockFormat::Q8_0`] and [`BlockFormat::Q4_0`] have the bytes of ggml, as GGUF files store them. The other two are
/// our own: their scale is in bf16, and where the number of largest magnitude becomes −8 in `q4_0`, in `int4` it is the
/// best of several scales. They decide what `generate` and `evaluate` compute, so they keep their own names and bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 8-bit numbers from −127 to 127, 32 to a block along the input, with a scale in bf16.
    Int8,
    /// 4-bit numbers from −8 to 7, 32 to a block along the input, with a scale in bf16. Token embeddings and the LM
    /// head are stored in [`BlockFormat::Int8`].
    Int4,
    /// ggml's `q8_0`: 8-bit numbers from −127 to 127, 32 to a block along the input, with a scale in f16.
    Q8_0,
    /// ggml's `q4_0`: 4-bit numbers from −8 to 7, 32 to a block along the input, with a scale in f16. Token embeddings
    /// and the LM head are stored in [`BlockFormat::Q8_0`].
    Q4_0,
}

impl BlockFormat {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Int8, Self::Int4, Self::Q8_0, Self::Q4_0];

    /// Its name, as in a pipeline file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    /// Values of a block.
    pub fn block_size(self) -> u64 {
        super::BLOCK as u64
    }

    /// Bytes of a block, with its scale.
    pub const fn block_bytes(self) -> u64 {
        match self {
            Self::Int8 | Self::Q8_0 => 34,
            Self::Int4 | Self::Q4_0 => 18,
        }
    }

    /// Whether there are products of its numbers with quantised activations. Those of other formats are computed with
    /// the dequantised weight whatever is asked for.
    pub fn has_integer_products(self) -> bool {
        match self {
            Self::Int8 | Self::Int4 => true,
            Self::Q8_0 | Self::Q4_0 => false,
        }
    }

    /// The format of weights of a role where this one is chosen for the model.
    #[must_use]
    pub fn for_role(self, role: WeightRole) -> Self {
        match (self, role) {
            // 4 bits are too few for token embeddings.
            (Self::Int4, WeightRole::Table) => Self::Int8,
            (Self::Q4_0, WeightRole::Table) => Self::Q8_0,
            (_, WeightRole::Matrix | WeightRole::Table) => self,
        }
    }
}

/// How what is multiplied with a quantised weight enters the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// In the dtype that is computed in: the product is that with the dequantised weight, bit by bit, forward and
    /// backward. For training on a frozen quantised base.
    Computed,
    /// Rounded to blocks of 8-bit numbers (dynamic quantisation), so that a product is a sum of integers: several times
    /// as fast for few rows. For inference; a backward takes the rounding for the identity. What an adapter has
    /// instead of a weight of the model is quantised like it. Where the format has no such products
    /// ([`BlockFormat::has_integer_products`]), as [`Activations::Computed`].
    Int8,
}

/// That frozen weights are quantised when they are loaded. A setting of a kernel set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// Into which format.
    pub format: BlockFormat,
    /// How activations enter products with them.
    pub activations: Activations,
}
