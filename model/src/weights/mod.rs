//! How weights are stored, apart from the dtype that is computed in: formats, and the codecs of those in blocks.
//!
//! It leaves to kernel sets where a format's blocks lie in memory, and how products read them. A format has a forward
//! and a backward: products with a weight widen its blocks on their way into a panel.

mod format;
mod ggml;
mod grid;
pub(crate) mod int4;
pub(crate) mod int8;
mod nf4;
mod q4_0;
mod q8_0;
#[cfg(test)]
mod tests;

use half::bf16;

pub use format::{Activations, BlockFormat, Quantization, WeightFormat};
pub use ggml::TensorType;
pub(crate) use ggml::{Q4K, Q5_0, Q5_1, Q5K, Q6K, QuantisedScales};
pub(crate) use grid::FrozenGrids;
pub use grid::{FakeQuantization, FakeQuantizedLayers, Grid, SCALES_FILE};
pub use nf4::{Absmax, BaseFormat, Codebook, Nf4, Nf4Matrix, QuantizedBase};
pub(crate) use nf4::{LookUp, Pairs};
pub(crate) use q4_0::Q4_0;
pub(crate) use q8_0::Q8_0;

/// Whether a tensor of this name is the weight of a linear layer that is not among those which are left as they are: by
/// their names, or parts of their paths (`o_proj`, `layers.0`).
fn is_linear_layer(name: &str, skip_modules: &[String]) -> bool {
    let is_linear = name.starts_with("lm_head.") || name.contains(".self_attn.") || name.contains(".mlp.");
    is_linear && !skip_modules.iter().any(|module| is_in_path(module, name))
}

/// Whether a module's name, or parts of its path (`o_proj`, `layers.0`), are in the path of a tensor.
pub fn is_in_path(module: &str, tensor: &str) -> bool {
    let path: Vec<&str> = tensor.trim_end_matches(".weight").split('.').collect();
    let module: Vec<&str> = module.split('.').collect();
    path.windows(module.len()).any(|part| part == module)
}

/// Values of a block of every [`BlockFormat`], along the input.
pub(crate) const BLOCK: usize = 32;

/// The codec of a format whose blocks lie behind one another, row by row. Implementations are `#[inline(always)]`, to
/// be compiled with the instructions of a set.
pub(crate) trait BlockCodec: Send + Sync + 'static {
    /// The format.
    const FORMAT: BlockFormat;

    /// Quantises a block of values.
    fn encode(x: &[f32; BLOCK], block: &mut [u8]);

    /// The values of a block.
    fn decode(block: &[u8], x: &mut [f32; BLOCK]);
}

/// How products read the blocks of a format: 32 values at a time, along the input. Implementations are
/// `#[inline(always)]`, to be compiled with the instructions of a set; and loops rather than `map` of an array, which
/// is a function of its own that does not have these instructions.
pub(crate) trait BlockDecoder: Send + Sync + 'static {
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// How many times 32 values a block has.
    const PARTS: usize;

    /// What the values of the parts of a block are computed with, and is found once for all of them.
    type Header: Copy + Default;

    /// That of a block.
    fn header(block: &[u8]) -> Self::Header;

    /// The values of a part of a block.
    fn decode_part(block: &[u8], header: &Self::Header, part: usize, x: &mut [f32; BLOCK]);
}

impl<C: BlockCodec> BlockDecoder for C {
    const BLOCK_BYTES: usize = C::FORMAT.block_bytes() as usize;
    const PARTS: usize = 1;

    type Header = ();

    #[inline(always)]
    fn header(_: &[u8]) {}

    #[inline(always)]
    fn decode_part(block: &[u8], (): &(), _: usize, x: &mut [f32; BLOCK]) {
        C::decode(block, x);
    }
}

/// A number in f16, little-endian, exactly: what the `half` crate gives, in few instructions. It is the scale of every
/// 32 values.
#[inline(always)]
pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    /// What moves an exponent of f16 to where f32 has it: 2 to the power of 127 − 15.
    const EXPONENTS: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let magnitude = if bits & 0x7c00 == 0x7c00 {
        // Infinite, or quiet and no number.
        let quiet = u32::from(bits & 0x3ff != 0) << 22;
        f32::from_bits(0x7f80_0000 | quiet | (bits & 0x3ff) << 13)
    } else {
        f32::from_bits((bits & 0x7fff) << 13) * EXPONENTS
    };
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

/// The value of largest magnitude, with its sign; the first of several, and zero where all are.
#[inline(always)]
pub(crate) fn largest(x: &[f32; BLOCK]) -> f32 {
    let magnitude = reduced(x, |x, most| if x.abs() > most { x.abs() } else { most });
    if magnitude == 0.0 {
        return 0.0;
    }
    let holders = x.iter().enumerate().fold(0u32, |bits, (at, x)| bits | u32::from(x.abs() == magnitude) << at);
    x[holders.trailing_zeros() as usize]
}

/// What is left of zero and the values of a block by an operation on two that goes in any order: lanes first, which
/// compilers make vectors of.
#[inline(always)]
fn reduced(x: &[f32; BLOCK], operation: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; 8];
    for x in x.as_chunks::<8>().0 {
        lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane = operation(*x, *lane));
    }
    lanes.into_iter().fold(0.0, |left, lane| operation(lane, left))
}

/// Adding it leaves the nearest integer, halves to even, in the low bits; of numbers up to 2²².
const ROUND: f32 = 12_582_912.0;

/// The integer that [`ROUND`] has been added to.
#[inline(always)]
fn rounded(sum: f32) -> i32 {
    (sum.to_bits() as i32 & 0x007f_ffff) - 0x0040_0000
}

/// The integer part of a number that is kept within bounds of at most a byte; of what is no number the lower bound.
/// A cast, which has an answer for every float, would not become vectors.
#[inline(always)]
pub(crate) fn truncated(x: f32, least: f32, most: f32) -> u8 {
    let x = if x > least { x } else { least };
    let x = if x < most { x } else { most };
    rounded(x.trunc() + ROUND) as u8
}

/// One over a number, and zero for zero.
#[inline(always)]
pub(crate) fn reciprocal(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// The largest magnitude, as the bits of a float that is not negative: these are in the order of the floats, and
/// integers are compared side by side. That of a block with a number that is not finite is not.
#[inline(always)]
fn largest_magnitude(x: &[f32; BLOCK]) -> f32 {
    reduced(x, |x, most| f32::from_bits(x.abs().to_bits().max(most.abs().to_bits())))
}

/// The scale of a block that is so small that it is zero, or has a number that is not finite.
#[inline(always)]
fn degenerate(magnitude: f32) -> Option<bf16> {
    match magnitude {
        magnitude if !magnitude.is_finite() => Some(bf16::NAN),
        magnitude if magnitude < 1e-30 => Some(bf16::ZERO),
        _ => None,
    }
}

/// The same number in f32.
#[inline(always)]
fn widened(scale: bf16) -> f32 {
    f32::from_bits(u32::from(scale.to_bits()) << 16)
}

/// The nearest numbers in a range.
#[inline(always)]
fn numbers_of(x: &[f32; BLOCK], scale: bf16, least: f32, most: f32, numbers: &mut [i8; BLOCK]) {
    /// Adding it rounds to an integer, which is then found in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let inverse = 1.0 / widened(scale);
    for (number, x) in numbers.iter_mut().zip(x) {
        *number = ((x * inverse).clamp(least, most) + ROUND).to_bits() as i8;
    }
}
