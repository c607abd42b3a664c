//! Fingerprints of values, to notice that some have changed. Not for keys: they differ from version to version.

use half::{bf16, f16};

/// Odd, so that multiplying by it loses nothing.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// Running values, so that the processor need not wait for one multiplication before it begins the next.
const LANES: usize = 4;

/// The fingerprint of the bits of f32 values. No change of a single value leaves it the same.
pub(crate) fn of_f32(values: &[f32]) -> u64 {
    of(values, |value| value.to_bits().into())
}

/// The fingerprint of the bits of bf16 values. No change of a single value leaves it the same.
pub(crate) fn of_bf16(values: &[bf16]) -> u64 {
    of(values, |value| value.to_bits().into())
}

/// The fingerprint of the bits of f16 values. No change of a single value leaves it the same.
pub(crate) fn of_f16(values: &[f16]) -> u64 {
    of(values, |value| value.to_bits().into())
}

/// The fingerprint of bytes. No change of a single one leaves it the same.
pub(crate) fn of_bytes(values: &[u8]) -> u64 {
    of(values, u64::from)
}

/// The fingerprint of fingerprints.
pub(crate) fn of_parts(parts: &[u64]) -> u64 {
    of(parts, |part| part)
}

fn of<T: Copy>(values: &[T], bits: impl Fn(T) -> u64) -> u64 {
    let mut lanes = [values.len() as u64; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = step(*lane, bits(*value));
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = step(*lane, bits(*value));
    }
    lanes.into_iter().fold(0, step)
}

/// Takes in some bits. For each state every input gives another result, and for each input every state.
fn step(state: u64, bits: u64) -> u64 {
    (state.rotate_left(23) ^ bits).wrapping_mul(FACTOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_and_its_place_count() {
        let values: Vec<f32> = (0..23).map(|value| value as f32).collect();
        let before = of_f32(&values);
        assert_eq!(of_f32(&values.clone()), before);
        for index in 0..values.len() {
            let mut changed = values.clone();
            changed[index] = f32::from_bits(changed[index].to_bits() ^ 1);
            assert_ne!(of_f32(&changed), before, "value {index}");
            let mut swapped = values.clone();
            swapped.swap(index, (index + 4) % values.len());
            assert_ne!(of_f32(&swapped), before, "place {index}");
        }
        assert_ne!(of_f32(&values[..22]), before);
    }
}
