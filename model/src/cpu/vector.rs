//! Loops over slices that the compiler turns into vector code: sums in sixteen lanes, and the exponential.

const LANES: usize = 16;

/// Adds `term(i)` for each index of a range, in sixteen running sums that are then added pairwise.
#[inline(always)]
pub(crate) fn sum(length: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let whole = length / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += term(first + lane);
        }
    }
    for index in whole..length {
        sums[index - whole] += term(index);
    }
    of_lanes(sums)
}

/// As [`sum`], of a term of the elements that lie at one place of each slice. All are of the first one's length.
#[inline(always)]
pub(crate) fn sum_along<const SLICES: usize>(slices: [&[f32]; SLICES], term: impl Fn([f32; SLICES]) -> f32) -> f32 {
    let chunks = slices.map(|slice| slice[..slices[0].len()].as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for index in 0..chunks[0].0.len() {
        let chunks = chunks.map(|(chunks, _)| &chunks[index]);
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += term(chunks.map(|chunk| chunk[lane]));
        }
    }
    for (lane, sum) in sums.iter_mut().enumerate().take(chunks[0].1.len()) {
        *sum += term(chunks.map(|(_, rest)| rest[lane]));
    }
    of_lanes(sums)
}

/// Replaces each element by the exponential of how far it lies above a bound, and sums those as [`sum`] does.
#[inline(always)]
pub(crate) fn exponentials(x: &mut [f32], bound: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (x, sum) in chunk.iter_mut().zip(&mut sums) {
            *x = exp(*x - bound);
            *sum += *x;
        }
    }
    for (x, sum) in rest.iter_mut().zip(&mut sums) {
        *x = exp(*x - bound);
        *sum += *x;
    }
    of_lanes(sums)
}

/// The sum of all lanes: halves added, and halves of that.
#[inline(always)]
fn of_lanes(mut sums: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// The largest value; minus infinity of none.
#[inline(always)]
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    let of_lanes = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    rest.iter().copied().fold(of_lanes, f32::max)
}

/// `eˣ` to about one unit in the last place, without a branch; below -87.3 the smallest normal number, not zero.
///
/// `x = n·ln 2 + r` with `|r| ≤ ln 2 / 2`, the polynomial that of Cephes' `expf`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, which is then found in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.3, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    let mantissa = p * r * r + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    mantissa * power
}

/// Hyperbolic tangent, by [`exp`].
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// `1 / (1 + e⁻ˣ)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_right_to_a_few_units_in_the_last_place() {
        for step in -8700..8800 {
            let x = step as f32 * 0.01;
            let (found, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found - exact).abs() <= 3e-7 * exact, "exp({x}) = {found}, not {exact}");
        }
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
    }

    #[test]
    fn the_tangent_is_right() {
        for step in -1000..1000 {
            let x = step as f32 * 0.01;
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 3e-7, "tanh({x})");
        }
    }

    #[test]
    fn sums_cover_every_length() {
        for length in 0..70 {
            let values: Vec<f32> = (0..length).map(|index| index as f32).collect();
            assert_eq!(sum(length, |index| values[index]), (length * length.saturating_sub(1) / 2) as f32);
            let term = |x: f32, y: f32| (0.1 * x).sin() * y;
            let (along, one_by_one) = (
                sum_along([&values, &values], |[x, y]| term(x, y)),
                sum(length, |index| term(values[index], values[index])),
            );
            assert_eq!(along.to_bits(), one_by_one.to_bits());
            let mut powers = values.clone();
            let total = exponentials(&mut powers, length as f32);
            let expected = sum(length, |index| exp(values[index] - length as f32));
            assert_eq!(total.to_bits(), expected.to_bits());
            assert!(powers.iter().zip(&values).all(|(power, x)| *power == exp(x - length as f32)));
            assert_eq!(max(&values), values.last().copied().unwrap_or(f32::NEG_INFINITY));
        }
    }
}
