//! Rounding from f32 to bf16, and back.

use half::bf16;

use super::instructions::multiversion;
use super::product::Element;

/// The nearest bf16, of two equally near ones the even; what is not a number stays so.
#[inline(always)]
pub(crate) fn nearest(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

multiversion! {
    /// Rounds to bf16.
    pub(super) fn round(x: &[f32], rounded: &mut [bf16]) {
        rounded.iter_mut().zip(x).for_each(|(rounded, x)| *rounded = nearest(*x));
    }
}

multiversion! {
    /// Rounds to values that bf16 has.
    pub(super) fn round_within_f32(x: &[f32], rounded: &mut [f32]) {
        rounded.iter_mut().zip(x).for_each(|(rounded, x)| *rounded = nearest(*x).widen());
    }
}

multiversion! {
    /// Rounds to the bytes of bf16, as a checkpoint stores them.
    pub(crate) fn bf16_bytes(x: &[f32], bytes: &mut [u8]) {
        bytes.as_chunks_mut().0.iter_mut().zip(x).for_each(|(bytes, x)| *bytes = nearest(*x).to_le_bytes());
    }
}

multiversion! {
    /// The values of the bytes of bf16.
    pub(crate) fn widen_bf16(bytes: &[u8], x: &mut [f32]) {
        x.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, bytes)| *x = bf16::from_le_bytes(*bytes).widen());
    }
}

#[cfg(test)]
mod tests {
    use super::super::InstructionSet;
    use super::*;

    #[test]
    fn rounding_is_to_the_nearest_and_even() {
        let mut seed = 1u32;
        let special =
            [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45, 1.003_906_3];
        let random = (0..100_000).map(|_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(seed)
        });
        for x in special.into_iter().chain(random) {
            let expected = bf16::from_f32(x);
            assert!(nearest(x) == expected || x.is_nan() && nearest(x).is_nan() && expected.is_nan(), "{x:e}");
        }
        assert!(nearest(f32::from_bits(0x7f80_0001)).is_nan(), "a payload that is rounded away");
    }

    #[test]
    fn bytes_are_those_of_the_reference_and_back() {
        let x: Vec<f32> = (0..1 << 16).map(|high| f32::from_bits((high << 16) | ((high * 7919) & 0xffff))).collect();
        let expected: Vec<u8> = x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            let (mut bytes, mut back) = (vec![0; expected.len()], vec![0.0; x.len()]);
            bf16_bytes(set, &x, &mut bytes);
            assert_eq!(bytes, expected, "{}", set.name());
            widen_bf16(set, &bytes, &mut back);
            let same = |(back, bytes): (&f32, &[u8; 2])| back.to_bits() == u32::from(u16::from_le_bytes(*bytes)) << 16;
            assert!(back.iter().zip(bytes.as_chunks().0).all(same), "{}", set.name());
        }
    }
}
