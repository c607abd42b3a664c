//! NF4, the 4-bit format of `QLoRA` (Dettmers et al., arXiv:2305.14314), to the bits of bitsandbytes; and the two
//! formats that differ from it in their levels: bitsandbytes' FP4, and torchao's NF4, which computes in the dtype of
//! the matrix.
//!
//! A matrix is cut into blocks of 64 values (by default) row by row, across the ends of rows. Each value is one of
//! sixteen levels times the largest magnitude of its block, its absmax; with double quantisation the absmaxes are
//! themselves quantised, 256 to a block. Dequantised values are rounded to the dtype that the matrix had.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use half::f16;
use rayon::prelude::*;
use safetensors::Dtype;

use super::{BlockFormat, widened};
use crate::checkpoint::{CheckpointError, Rows};
use crate::cpu::nearest;

/// The levels: quantiles of a normal distribution.
const LEVELS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The levels of FP4, a sign, two bits of an exponent and one of a mantissa, over the largest: by code.
const FP4_LEVELS: [f32; 16] = {
    const MAGNITUDES: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];
    let mut levels = [0.0; 16];
    let mut code = 0;
    while code < 8 {
        levels[code] = MAGNITUDES[code] / 12.0;
        levels[code + 8] = -MAGNITUDES[code] / 12.0;
        code += 1;
    }
    levels
};

/// The codes of FP4 in the order of their levels.
const FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, FP4_ZEROS[0], FP4_ZEROS[1], 1, 6, 7, 4, 5, 2, 3];
/// Those of zero: of what is not positive, and of what is.
const FP4_ZEROS: [u8; 2] = [0, 8];

/// The levels of torchao.
const TORCHAO_LEVELS: [f32; 16] = [
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
    0.723, 1.0,
];

/// The least absmax that values are divided by.
const LEAST_ABSMAX: f32 = 1e-38;

/// Blocks whose absmaxes are quantised together.
const NESTED_BLOCK: usize = 256;

/// Values that a thread quantises at a time, about.
const PIECE: usize = 1 << 16;

/// A format of 4 bits: which levels there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codebook {
    /// NF4 of bitsandbytes.
    Nf4,
    /// FP4 of bitsandbytes: floats of 4 bits.
    Fp4,
    /// NF4 of torchao: levels of four decimals, the nearest of which is taken, and absmaxes quantised linearly.
    Torchao,
}

/// How a matrix is quantised to 4 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nf4 {
    /// The levels.
    pub codebook: Codebook,
    /// Values of a block: even.
    pub block_size: usize,
    /// Whether absmaxes are quantised, too.
    pub double_quantization: bool,
}

impl Nf4 {
    /// The bytes of so many weights.
    pub fn bytes(self, weights: u64) -> u64 {
        let blocks = weights.div_ceil(self.block_size as u64);
        let absmaxes =
            if self.double_quantization { blocks + 4 * blocks.div_ceil(NESTED_BLOCK as u64) } else { 4 * blocks };
        weights.div_ceil(2) + absmaxes
    }
}

impl Nf4 {
    /// Whether a matrix can be quantised so: torchao's is of whole blocks of blocks.
    pub fn fits(self, [rows, columns]: [usize; 2]) -> bool {
        match self.codebook {
            Codebook::Nf4 | Codebook::Fp4 => true,
            Codebook::Torchao => (rows * columns).is_multiple_of(self.block_size * NESTED_BLOCK),
        }
    }
}

impl Default for Nf4 {
    fn default() -> Self {
        Self { codebook: Codebook::Nf4, block_size: 64, double_quantization: true }
    }
}

/// A format that the frozen weights of a model are quantised to while they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaseFormat {
    /// 4 bits.
    FourBits(Nf4),
    /// ggml's `q8_0`. Weights whose rows are no whole blocks stay as they are.
    Q8_0,
}

impl BaseFormat {
    /// The bytes of so many weights.
    pub fn bytes(self, weights: u64) -> u64 {
        match self {
            Self::FourBits(nf4) => nf4.bytes(weights),
            Self::Q8_0 => BlockFormat::Q8_0.block_bytes() * weights.div_ceil(BlockFormat::Q8_0.block_size()),
        }
    }
}

/// Which weights of a model are quantised while they are read, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizedBase {
    /// How.
    pub format: BaseFormat,
    /// Linear layers that are not quantised: their names, or parts of their paths (`o_proj`, `layers.0`).
    pub skip_modules: Vec<String>,
    /// The layers that are, by their paths, where it is another program that says so.
    pub layers: Option<BTreeSet<String>>,
}

impl QuantizedBase {
    /// Whether the weight of this name is quantised: that of a linear layer which is not skipped.
    pub fn covers(&self, name: &str) -> bool {
        match &self.layers {
            Some(layers) => name.strip_suffix(".weight").is_some_and(|path| layers.contains(path)),
            None => super::is_linear_layer(name, &self.skip_modules),
        }
    }
}

/// A matrix `[out, in]` in NF4.
#[derive(Clone, Debug)]
pub struct Nf4Matrix {
    /// Rows and columns.
    pub shape: [usize; 2],
    /// What values are rounded to once they are dequantised: F32, BF16 or F16.
    pub dtype: Dtype,
    /// Values of a block.
    pub block_size: usize,
    /// The levels.
    pub levels: [f32; 16],
    /// Two values to a byte, the first in its high half.
    pub codes: Vec<u8>,
    /// The absmax of each block.
    pub absmax: Absmax,
}

/// The largest magnitude of each block.
#[derive(Clone, Debug)]
pub enum Absmax {
    /// In f32.
    Plain(Vec<f32>),
    /// Quantised: that of block `b` is `levels[codes[b]] · absmax[b / block_size] + offset`.
    Nested {
        /// One to a block.
        codes: Vec<u8>,
        /// Of each block of blocks.
        absmax: Vec<f32>,
        /// How many blocks are one.
        block_size: usize,
        /// 256 levels.
        levels: Vec<f32>,
        /// What is added.
        offset: f32,
    },
    /// Quantised linearly, as torchao does, everything rounded to the dtype of the matrix: that of block `b` is
    /// `codes[b] / factors[b / block_size] + mean`.
    Linear {
        /// One to a block.
        codes: Vec<i8>,
        /// Of each block of blocks.
        factors: Vec<f32>,
        /// How many blocks are one.
        block_size: usize,
        /// What is added.
        mean: f32,
        /// What is rounded to.
        dtype: Dtype,
    },
}

impl Absmax {
    /// Quantises absmaxes, once `offset` is taken from them.
    #[must_use]
    pub fn nested(absmaxes: &[f32], offset: f32) -> Self {
        let mut codes = Vec::with_capacity(absmaxes.len());
        let mut largest = Vec::new();
        for block in absmaxes.chunks(NESTED_BLOCK) {
            let deviation = |absmax: &f32| absmax - offset;
            let absmax = block.iter().map(deviation).fold(0.0f32, |largest, x| larger(largest, x.abs()));
            let inverse = 1.0 / absmax;
            // With a deviation of zero the product is not a number, and the first level stands for it.
            codes.extend(block.iter().map(|absmax| nearest_level(deviation(absmax) * inverse)));
            largest.push(absmax);
        }
        Self::Nested { codes, absmax: largest, block_size: NESTED_BLOCK, levels: NESTED_LEVELS.clone(), offset }
    }

    /// Quantises absmaxes linearly, `block_size` of them together, once `mean` is taken from them.
    #[must_use]
    pub fn linear(absmaxes: &[f32], mean: f32, block_size: usize, dtype: Dtype) -> Self {
        let mut codes = Vec::with_capacity(absmaxes.len());
        let mut factors = Vec::new();
        for block in absmaxes.chunks(block_size) {
            let deviation = |absmax: &f32| rounded(dtype, absmax - mean);
            let largest = block.iter().map(deviation).fold(0.0f32, |largest, x| larger(largest, x.abs()));
            let factor = rounded(dtype, 256.0 / rounded(dtype, 2.0 * largest));
            let code = |absmax| rounded(dtype, deviation(absmax) * factor).round_ties_even().clamp(-128.0, 127.0) as i8;
            codes.extend(block.iter().map(code));
            factors.push(factor);
        }
        Self::Linear { codes, factors, block_size, mean, dtype }
    }

    /// That of a block.
    #[inline(always)]
    pub fn of(&self, block: usize) -> f32 {
        match self {
            Self::Plain(absmax) => absmax[block],
            Self::Nested { codes, absmax, block_size, levels, offset } => {
                levels[usize::from(codes[block])] * absmax[block / block_size] + offset
            }
            Self::Linear { codes, factors, block_size, mean, dtype } => {
                let deviation = rounded(*dtype, f32::from(codes[block]) / factors[block / block_size]);
                rounded(*dtype, deviation + mean)
            }
        }
    }

    /// Size in memory.
    fn bytes(&self) -> usize {
        match self {
            Self::Plain(absmax) => size_of_val(&absmax[..]),
            Self::Nested { codes, absmax, levels, .. } => {
                codes.len() + size_of_val(&absmax[..]) + size_of_val(&levels[..])
            }
            Self::Linear { codes, factors, .. } => codes.len() + size_of_val(&factors[..]),
        }
    }
}

impl Nf4Matrix {
    /// Quantises a matrix of these rows, a few at a time; `dtype` is that of the matrix.
    ///
    /// # Errors
    /// Fails if the rows cannot be read.
    ///
    /// # Panics
    /// Panics if the size of a block is odd or zero, or the matrix is none that [`Nf4::fits`].
    pub fn quantize(rows: &dyn Rows, shape: [usize; 2], dtype: Dtype, nf4: Nf4) -> Result<Self, CheckpointError> {
        let Nf4 { codebook, block_size, double_quantization } = nf4;
        assert!(nf4.fits(shape), "a matrix of {shape:?}");
        assert!(block_size > 0 && block_size.is_multiple_of(2), "blocks of whole bytes");
        let [_, columns] = shape;
        let length = shape[0] * columns;
        let levels = match codebook {
            Codebook::Nf4 => LEVELS,
            Codebook::Fp4 => FP4_LEVELS,
            Codebook::Torchao => TORCHAO_LEVELS.map(|level| rounded(dtype, level)),
        };
        // So many rows are whole blocks.
        let least = block_size / greatest_common_divisor(columns, block_size);
        let values = (PIECE / (least * columns).max(1)).max(1) * least * columns;
        let (mut codes, mut absmax) = (vec![0; length.div_ceil(2)], vec![0.0; length.div_ceil(block_size)]);
        let pieces = codes.par_chunks_mut((values / 2).max(1)).zip(absmax.par_chunks_mut((values / block_size).max(1)));
        pieces.enumerate().try_for_each(|(piece, (codes, absmax))| {
            let first = piece * values;
            let mut source = vec![0.0; values.min(length - first)];
            rows.read(first / columns, &mut source)?;
            let blocks = source.chunks(block_size).zip(codes.chunks_mut(block_size / 2));
            blocks.zip(absmax).for_each(|((x, codes), absmax)| {
                *absmax = match codebook {
                    Codebook::Nf4 => encode(x, block_size, codes, code_of),
                    Codebook::Fp4 => encode(x, block_size, codes, fp4_code_of),
                    Codebook::Torchao => encode_nearest(x, &levels, dtype, codes),
                };
            });
            Ok(())
        })?;
        let mean = || absmax.iter().map(|absmax| f64::from(*absmax)).sum::<f64>() / absmax.len().max(1) as f64;
        let absmax = match codebook {
            Codebook::Torchao => Absmax::linear(&absmax, rounded(dtype, mean() as f32), NESTED_BLOCK, dtype),
            Codebook::Nf4 | Codebook::Fp4 if double_quantization => Absmax::nested(&absmax, mean() as f32),
            Codebook::Nf4 | Codebook::Fp4 => Absmax::Plain(absmax),
        };
        Ok(Self { shape, dtype, block_size, levels, codes, absmax })
    }

    /// Its size in memory.
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.absmax.bytes()
    }

    /// The values from `first` on, row by row.
    pub fn dequantize(&self, first: usize, values: &mut [f32]) {
        self.dequantize_with::<Pairs>(first, values);
    }

    /// As [`Nf4Matrix::dequantize`].
    #[inline(always)]
    pub(crate) fn dequantize_with<L: LookUp>(&self, mut first: usize, mut values: &mut [f32]) {
        while !values.is_empty() {
            let block = first / self.block_size;
            let count = values.len().min((block + 1) * self.block_size - first);
            let (mut of_block, others) = values.split_at_mut(count);
            let of_codes = self.values_of(block);
            if first % 2 == 1 {
                of_block[0] = of_codes[usize::from(self.codes[first / 2] & 15)];
                of_block = &mut of_block[1..];
            }
            L::look_up(&of_codes, &self.codes[first.div_ceil(2)..], of_block);
            (first, values) = (first + count, others);
        }
    }

    /// The values that the levels stand for in a block.
    #[inline(always)]
    fn values_of(&self, block: usize) -> [f32; 16] {
        let absmax = self.absmax.of(block);
        match self.dtype {
            Dtype::BF16 => self.levels.map(|level| widened(nearest(level * absmax))),
            Dtype::F16 => self.levels.map(|level| f16::from_f32_const(level * absmax).to_f32_const()),
            _ => self.levels.map(|level| level * absmax),
        }
    }
}

/// Quantises a block, which may be the short last one; returns its absmax.
#[inline]
fn encode(x: &[f32], block_size: usize, codes: &mut [u8], code_of: impl Fn(f32) -> u8) -> f32 {
    let absmax = x.iter().fold(0.0, |largest, x| larger(largest, x.abs()));
    let divisor = if absmax < LEAST_ABSMAX { LEAST_ABSMAX } else { absmax };
    // The short one is divided: it differs in the last place.
    let is_short = x.len() < block_size;
    let inverse = 1.0 / divisor;
    let code = |x: f32| code_of(if is_short { x / divisor } else { x * inverse });
    for (byte, pair) in codes.iter_mut().zip(x.chunks(2)) {
        *byte = code(pair[0]) << 4 | code(pair.get(1).copied().unwrap_or(0.0));
    }
    if is_short { divisor } else { absmax }
}

/// Quantises a block to the nearest levels, everything rounded to a dtype; returns its absmax.
fn encode_nearest(x: &[f32], levels: &[f32; 16], dtype: Dtype, codes: &mut [u8]) -> f32 {
    let absmax = x.iter().fold(0.0, |largest, x| larger(largest, x.abs()));
    let code = |x: f32| {
        let x = rounded(dtype, x / absmax);
        let mut nearest = (0, f32::INFINITY);
        for (code, level) in (0..).zip(levels) {
            let distance = rounded(dtype, x - level).abs();
            // The first of equals; of what is not a number the first of all.
            if distance < nearest.1 {
                nearest = (code, distance);
            }
        }
        nearest.0
    };
    for (byte, pair) in codes.iter_mut().zip(x.chunks(2)) {
        *byte = code(pair[0]) << 4 | code(pair[1]);
    }
    absmax
}

/// The number that is nearest in a dtype.
#[inline(always)]
fn rounded(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::BF16 => widened(nearest(x)),
        Dtype::F16 => f16::from_f32_const(x).to_f32_const(),
        _ => x,
    }
}

/// The larger of two, or what is not a number.
fn larger(largest: f32, x: f32) -> f32 {
    if x > largest || x.is_nan() { x } else { largest }
}

/// How many boundaries between the levels of NF4 lie below a value.
#[inline(always)]
fn code_of(x: f32) -> u8 {
    const BOUNDARIES: [f32; 15] = boundaries(&LEVELS);
    below(&BOUNDARIES, x) as u8
}

/// The code of FP4.
#[inline(always)]
fn fp4_code_of(x: f32) -> u8 {
    const BOUNDARIES: [f32; 15] = {
        let mut sorted = [0.0; 16];
        let mut index = 0;
        while index < 16 {
            sorted[index] = FP4_LEVELS[FP4_ORDER[index] as usize];
            index += 1;
        }
        boundaries(&sorted)
    };
    FP4_ORDER[below(&BOUNDARIES, x)]
}

/// Half way between two levels each.
const fn boundaries(levels: &[f32; 16]) -> [f32; 15] {
    let mut boundaries = [0.0; 15];
    let mut index = 0;
    while index < 15 {
        boundaries[index] = (levels[index] + levels[index + 1]) / 2.0;
        index += 1;
    }
    boundaries
}

/// How many boundaries lie below a value.
#[inline(always)]
fn below(boundaries: &[f32; 15], x: f32) -> usize {
    let mut count = 0;
    for step in [8, 4, 2, 1] {
        count += if x > boundaries[count + step - 1] { step } else { 0 };
    }
    count
}

/// How the values of codes are looked up. Implementations are `#[inline(always)]`, to be compiled with the instructions
/// of a set.
pub(crate) trait LookUp {
    /// The values of codes from the first half of a byte on, as many as there is room for.
    fn look_up(values: &[f32; 16], codes: &[u8], decoded: &mut [f32]);
}

/// One by one.
pub(crate) struct Pairs;

impl LookUp for Pairs {
    #[inline(always)]
    fn look_up(values: &[f32; 16], codes: &[u8], decoded: &mut [f32]) {
        let (pairs, last) = decoded.as_chunks_mut::<2>();
        for (pair, byte) in pairs.iter_mut().zip(codes) {
            *pair = [values[usize::from(byte >> 4)], values[usize::from(byte & 15)]];
        }
        if let [last] = last {
            *last = values[usize::from(codes[pairs.len()] >> 4)];
        }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// The nearest of the levels of absmaxes, of two the lower; the first for what is not a number.
fn nearest_level(x: f32) -> u8 {
    let above = NESTED_LEVELS.partition_point(|level| *level < x);
    let distance = |level: f32| (f64::from(level) - f64::from(x)).abs();
    let nearest = match (above.checked_sub(1), NESTED_LEVELS.get(above)) {
        (Some(below), Some(level)) if distance(*level) < distance(NESTED_LEVELS[below]) => above,
        (Some(below), _) => below,
        (None, _) => 0,
    };
    nearest as u8
}

/// The levels of absmaxes: 8 bits with an exponent of as many bits as its magnitude leaves, in order.
static NESTED_LEVELS: LazyLock<Vec<f32>> = LazyLock::new(|| {
    let positive = POSITIVE_LEVELS.map(f32::from_bits);
    let negative = positive.iter().rev().map(|level| -level);
    negative.chain([0.0]).chain(positive).chain([1.0]).collect()
});

/// Those between 0 and 1, as PyTorch computes them in f32.
const POSITIVE_LEVELS: [u32; 127] = [
    0x3513_a3b7,
    0x365a_1a94,
    0x3702_05ff,
    0x37b2_4206,
    0x3837_8034,
    0x388a_efb3,
    0x38ba_1f4b,
    0x3923_d70b,
    0x398c_e705,
    0x39c7_e283,
    0x3a01_6f01,
    0x3a1e_ecc1,
    0x3a3c_6a80,
    0x3a59_e83e,
    0x3a77_65ff,
    0x3aa7_ef9d,
    0x3af1_a9fc,
    0x3b1d_b22d,
    0x3b42_8f5c,
    0x3b67_6c8a,
    0x3b86_24dd,
    0x3b98_9374,
    0x3bab_020d,
    0x3bbd_70a4,
    0x3bcf_df3b,
    0x3be2_4dd3,
    0x3bf4_bc6a,
    0x3c03_9581,
    0x3c0c_cccd,
    0x3c16_0418,
    0x3c1f_3b64,
    0x3c3a_e148,
    0x3c68_f5c3,
    0x3c8b_851f,
    0x3ca2_8f5d,
    0x3cb9_999a,
    0x3cd0_a3d7,
    0x3ce7_ae15,
    0x3cfe_b852,
    0x3d0a_e148,
    0x3d16_6667,
    0x3d21_eb85,
    0x3d2d_70a3,
    0x3d38_f5c3,
    0x3d44_7ae1,
    0x3d50_0000,
    0x3d5b_851f,
    0x3d67_0a3d,
    0x3d72_8f5d,
    0x3d7e_147b,
    0x3d84_cccd,
    0x3d8a_8f5d,
    0x3d90_51eb,
    0x3d96_147b,
    0x3d9b_d70a,
    0x3da1_999a,
    0x3da7_5c2a,
    0x3dad_1eb8,
    0x3db2_e148,
    0x3db8_a3d7,
    0x3dbe_6667,
    0x3dc4_28f7,
    0x3dc9_eb85,
    0x3ddb_3334,
    0x3df8_0000,
    0x3e0a_6666,
    0x3e18_cccd,
    0x3e27_3333,
    0x3e35_999a,
    0x3e44_0000,
    0x3e52_6666,
    0x3e60_cccd,
    0x3e6f_3333,
    0x3e7d_9999,
    0x3e86_0000,
    0x3e8d_3334,
    0x3e94_6666,
    0x3e9b_999a,
    0x3ea2_cccc,
    0x3eaa_0000,
    0x3eb1_3333,
    0x3eb8_6666,
    0x3ebf_999a,
    0x3ec6_cccc,
    0x3ece_0000,
    0x3ed5_3333,
    0x3edc_6666,
    0x3ee3_999a,
    0x3eea_cccc,
    0x3ef2_0000,
    0x3ef9_3332,
    0x3f00_3333,
    0x3f03_cccc,
    0x3f07_6666,
    0x3f0b_0000,
    0x3f0e_999a,
    0x3f12_3334,
    0x3f15_cccd,
    0x3f19_6666,
    0x3f1d_0000,
    0x3f20_999a,
    0x3f24_3334,
    0x3f27_cccd,
    0x3f2b_6666,
    0x3f2f_0000,
    0x3f32_999a,
    0x3f36_3334,
    0x3f39_cccd,
    0x3f3d_6666,
    0x3f41_0000,
    0x3f44_999a,
    0x3f48_3333,
    0x3f4b_cccd,
    0x3f4f_6666,
    0x3f53_0000,
    0x3f56_999a,
    0x3f5a_3333,
    0x3f5d_cccd,
    0x3f61_6666,
    0x3f65_0000,
    0x3f68_999a,
    0x3f6c_3333,
    0x3f6f_cccd,
    0x3f73_6666,
    0x3f77_0000,
    0x3f7a_999a,
    0x3f7e_3333,
];
