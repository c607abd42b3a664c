//! Rounding from f32 to bf16.

use half::bf16;

use super::instructions::multiversion;
use super::product::Element;

/// The nearest bf16, of two equally near ones the even; what is not a number stays so.
#[inline(always)]
pub(super) fn nearest(x: f32) -> bf16 {
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

#[cfg(test)]
mod tests {
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
}
