//! ggml's types of tensors, in which GGUF files store their values.

mod blocks;
mod k_quants;

use half::{bf16, f16};

pub(crate) use blocks::{Q5_0, Q5_1};
pub(crate) use k_quants::{Q4K, Q5K, Q6K, QuantisedScales};

use super::{BLOCK, BlockCodec, BlockDecoder, Q4_0, Q8_0};
use crate::cpu::{InstructionSet, multiversion};

/// How the values of a tensor are stored; the names are ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// 32-bit floats.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 4 bits, one scale to 32 values.
    Q4_0,
    /// 5 bits, one scale to 32 values.
    Q5_0,
    /// 5 bits, a scale and an offset to 32 values.
    Q5_1,
    /// 8 bits, one scale to 32 values.
    Q8_0,
    /// 4 bits, quantised scales and offsets.
    Q4K,
    /// 5 bits, quantised scales and offsets.
    Q5K,
    /// 6 bits, quantised scales.
    Q6K,
}

impl TensorType {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// ggml's name, its number in files, values of a block, and bytes of one.
    const fn described(self) -> (&'static str, u32, usize, usize) {
        match self {
            Self::F32 => ("F32", 0, 1, 4),
            Self::F16 => ("F16", 1, 1, 2),
            Self::Bf16 => ("BF16", 30, 1, 2),
            Self::Q4_0 => ("Q4_0", 2, 32, 18),
            Self::Q5_0 => ("Q5_0", 6, 32, 22),
            Self::Q5_1 => ("Q5_1", 7, 32, 24),
            Self::Q8_0 => ("Q8_0", 8, 32, 34),
            Self::Q4K => ("Q4_K", 12, 256, 144),
            Self::Q5K => ("Q5_K", 13, 256, 176),
            Self::Q6K => ("Q6_K", 14, 256, 210),
        }
    }

    /// ggml's name.
    pub fn name(self) -> &'static str {
        self.described().0
    }

    /// The number that stands for it in files.
    pub fn number(self) -> u32 {
        self.described().1
    }

    /// The type with this number, of those known here.
    pub fn of_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.number() == number)
    }

    /// The name of a type with this number that is not read.
    pub(crate) fn name_of_unread(number: u32) -> Option<&'static str> {
        const OTHERS: [(u32, &str); 18] = [
            (3, "Q4_1"),
            (10, "Q2_K"),
            (11, "Q3_K"),
            (15, "Q8_K"),
            (16, "IQ2_XXS"),
            (17, "IQ2_XS"),
            (18, "IQ3_XXS"),
            (19, "IQ1_S"),
            (20, "IQ4_NL"),
            (21, "IQ3_S"),
            (22, "IQ2_S"),
            (23, "IQ4_XS"),
            (28, "F64"),
            (29, "IQ1_M"),
            (34, "TQ1_0"),
            (35, "TQ2_0"),
            (39, "MXFP4"),
            (40, "NVFP4"),
        ];
        OTHERS.into_iter().find(|(other, _)| *other == number).map(|(_, name)| name)
    }

    /// Whether values are quantised.
    pub fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Values of a block.
    pub fn block_values(self) -> usize {
        self.described().2
    }

    /// Bytes of so many values, which must be whole blocks.
    pub fn bytes(self, values: usize) -> usize {
        let (_, _, block, bytes) = self.described();
        values / block * bytes
    }

    /// Encodes values, whole blocks of them.
    ///
    /// # Panics
    /// Panics if `bytes` is not as long as [`TensorType::bytes`] says.
    pub fn encode(self, x: &[f32], bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.bytes(x.len()), "room for the blocks of {} values", x.len());
        encode(InstructionSet::detect(), self, x, bytes);
    }

    /// The values of whole blocks.
    ///
    /// # Panics
    /// Panics if `bytes` is not as long as [`TensorType::bytes`] says.
    pub fn decode(self, bytes: &[u8], x: &mut [f32]) {
        assert_eq!(bytes.len(), self.bytes(x.len()), "the blocks of {} values", x.len());
        let block = self.described().3;
        match self {
            Self::F32 => back(bytes, x, block, |b, [x]| *x = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
            Self::F16 => back(bytes, x, block, |b, [x]| *x = f16::from_le_bytes([b[0], b[1]]).to_f32()),
            Self::Bf16 => back(bytes, x, block, |b, [x]| *x = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
            Self::Q4_0 => back::<BLOCK>(bytes, x, block, Q4_0::decode),
            Self::Q5_0 => back::<BLOCK>(bytes, x, block, blocks::decode_q5_0),
            Self::Q5_1 => back::<BLOCK>(bytes, x, block, blocks::decode_q5_1),
            Self::Q8_0 => back::<BLOCK>(bytes, x, block, Q8_0::decode),
            Self::Q4K => back_by_parts::<Q4K>(bytes, x),
            Self::Q5K => back_by_parts::<Q5K>(bytes, x),
            Self::Q6K => back_by_parts::<Q6K>(bytes, x),
        }
    }
}

multiversion! {
    /// Encodes values as a type, whole blocks of them.
    fn encode(as_type: TensorType, x: &[f32], bytes: &mut [u8]) {
        use TensorType as T;
        let block = as_type.described().3;
        match as_type {
            T::F32 => each(x, bytes, block, |[x], bytes| bytes.copy_from_slice(&x.to_le_bytes())),
            T::F16 => each(x, bytes, block, |[x], bytes| bytes.copy_from_slice(&f16::from_f32(*x).to_le_bytes())),
            T::Bf16 => each(x, bytes, block, |[x], bytes| bytes.copy_from_slice(&bf16::from_f32(*x).to_le_bytes())),
            T::Q4_0 => each::<BLOCK>(x, bytes, block, Q4_0::encode),
            T::Q5_0 => each::<BLOCK>(x, bytes, block, blocks::encode_q5_0),
            T::Q5_1 => each::<BLOCK>(x, bytes, block, blocks::encode_q5_1),
            T::Q8_0 => each::<BLOCK>(x, bytes, block, Q8_0::encode),
            T::Q4K => each(x, bytes, block, k_quants::encode_q4_k),
            T::Q5K => each(x, bytes, block, k_quants::encode_q5_k),
            T::Q6K => each(x, bytes, block, k_quants::encode_q6_k),
        }
    }
}

#[inline(always)]
fn each<const N: usize>(x: &[f32], bytes: &mut [u8], block: usize, encode: impl Fn(&[f32; N], &mut [u8])) {
    x.as_chunks::<N>().0.iter().zip(bytes.chunks_exact_mut(block)).for_each(|(x, bytes)| encode(x, bytes));
}

fn back<const N: usize>(bytes: &[u8], x: &mut [f32], block: usize, decode: impl Fn(&[u8], &mut [f32; N])) {
    bytes.chunks_exact(block).zip(x.as_chunks_mut::<N>().0).for_each(|(bytes, x)| decode(bytes, x));
}

fn back_by_parts<D: BlockDecoder>(bytes: &[u8], x: &mut [f32]) {
    for (block, x) in bytes.chunks_exact(D::BLOCK_BYTES).zip(x.chunks_exact_mut(D::PARTS * BLOCK)) {
        let header = D::header(block);
        let parts = x.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate();
        parts.for_each(|(part, x)| D::decode_part(block, &header, part, x));
    }
}
