//! The codecs of ggml's formats against its own blocks.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use half::f16;
use safetensors::SafeTensors;

use super::{BLOCK, BlockCodec, Q4_0, Q8_0, f16_at};

/// Normally distributed values, ties, denormal scales, spikes, zeros; see `tests/golden/README.md`.
const CASES: [&str; 11] = [
    "constant",
    "denormal_scale",
    "large",
    "negative",
    "normal",
    "one_spike",
    "positive",
    "small",
    "ties",
    "wide",
    "zeros",
];

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = tensors.tensor(name).unwrap().data().to_vec();
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn check<C: BlockCodec>(name: &str) {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/ggml_blocks.safetensors"));
    let file = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let size = C::FORMAT.block_bytes() as usize;
    for case in CASES {
        let source = floats(&tensors, &format!("{case}.source"));
        let expected = tensors.tensor(&format!("{case}.{name}")).unwrap();
        let values = floats(&tensors, &format!("{case}.{name}.dequantised"));
        assert!(!source.is_empty() && expected.data().len() == source.len() / BLOCK * size, "{case}");
        let blocks = source.as_chunks::<BLOCK>().0.iter().zip(expected.data().chunks_exact(size));
        for (index, ((source, expected), values)) in blocks.zip(values.as_chunks::<BLOCK>().0).enumerate() {
            let (mut block, mut found) = (vec![0; size], [f32::NAN; BLOCK]);
            C::encode(source, &mut block);
            assert_eq!(block, expected, "{name}: block {index} of {case}");
            C::decode(&block, &mut found);
            assert_eq!(found.map(f32::to_bits), values.map(f32::to_bits), "{name}: values of block {index} of {case}");
        }
    }
}

#[test]
fn blocks_have_the_bytes_and_values_of_ggml() {
    check::<Q8_0>("Q8_0");
    check::<Q4_0>("Q4_0");
}

#[test]
fn a_number_in_16_bits_is_widened_exactly() {
    for bits in 0..=u16::MAX {
        let found = f16_at(&bits.to_le_bytes(), 0);
        assert_eq!(found.to_bits(), f16::from_bits(bits).to_f32_const().to_bits(), "{bits:#x}");
    }
}
