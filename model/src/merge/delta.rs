//! The arithmetic of a merge: some rows of one weight, and the adapters' shares in them.

use half::f16;

use crate::checkpoint::Dtype;
use crate::cpu::{InstructionSet, multiversion, nearest};
use crate::peft::AdapterModule;

/// Columns of which the delta is computed at a time: those of A lie in the cache for all rows of a block.
const TILE: usize = 512;
/// Values of the rows that are merged at a time.
const BLOCK_VALUES: usize = 1 << 16;

/// One adapter's share in a module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share<'a> {
    pub(super) module: &'a AdapterModule,
    pub(super) scaling: f32,
}

/// Rows of a weight of this width that are merged at a time.
pub(super) fn block_rows(in_features: usize) -> usize {
    (BLOCK_VALUES / in_features.max(1)).clamp(1, 32)
}

/// Replaces the rows of a weight from `first` on by their merged form. `delta` is room to work in.
pub(super) fn merge_rows(rows: &mut [f32], first: usize, shares: &[Share<'_>], delta: &mut Vec<f32>) {
    let set = InstructionSet::detect();
    delta.resize(rows.len(), 0.0);
    for Share { module, scaling } in shares {
        let AdapterModule { rank, in_features, ref lora_a, ref lora_b, .. } = **module;
        product(set, delta, in_features, rank, lora_a, &lora_b[first * rank..]);
        match &module.magnitude {
            Some(magnitude) => {
                scale(set, delta, *scaling);
                set_magnitudes(rows, delta, &magnitude[first..], in_features);
            }
            None => add_scaled(set, rows, delta, *scaling),
        }
    }
}

multiversion! {
    /// `delta = B · A`, of as many rows as delta has. Each element is a sum in the order of the ranks, without a fused operation, so that
    /// it is the same however the rows are cut and whatever instructions the machine has.
    fn product(delta: &mut [f32], in_features: usize, rank: usize, lora_a: &[f32], lora_b: &[f32]) {
        delta.fill(0.0);
        for from in (0..in_features).step_by(TILE) {
            let columns = from..(from + TILE).min(in_features);
            for (row, delta) in delta.chunks_exact_mut(in_features).enumerate() {
                let delta = &mut delta[columns.clone()];
                let factors = &lora_b[row * rank..][..rank];
                let of_rank = |rank: usize| &lora_a[rank * in_features..][columns.clone()];
                let mut at = 0;
                // Four at a time, so that the sums stay in registers.
                for &[f0, f1, f2, f3] in factors.as_chunks::<4>().0 {
                    let (a0, a1, a2, a3) = (of_rank(at), of_rank(at + 1), of_rank(at + 2), of_rank(at + 3));
                    for ((((delta, a0), a1), a2), a3) in delta.iter_mut().zip(a0).zip(a1).zip(a2).zip(a3) {
                        *delta = *delta + f0 * a0 + f1 * a1 + f2 * a2 + f3 * a3;
                    }
                    at += 4;
                }
                for factor in &factors[at..] {
                    delta.iter_mut().zip(of_rank(at)).for_each(|(delta, a)| *delta += factor * a);
                    at += 1;
                }
            }
        }
    }
}

multiversion! {
    fn scale(delta: &mut [f32], scaling: f32) {
        delta.iter_mut().for_each(|delta| *delta *= scaling);
    }
}

multiversion! {
    /// Scaled after the product, as PEFT does.
    fn add_scaled(rows: &mut [f32], delta: &[f32], scaling: f32) {
        rows.iter_mut().zip(delta).for_each(|(value, delta)| *value += delta * scaling);
    }
}

/// Makes each row `magnitude / ‖row + delta‖ · (row + delta)`.
fn set_magnitudes(rows: &mut [f32], delta: &[f32], magnitudes: &[f32], in_features: usize) {
    let deltas = delta.chunks_exact(in_features);
    for ((row, delta), magnitude) in rows.chunks_exact_mut(in_features).zip(deltas).zip(magnitudes) {
        let square: f64 = row.iter().zip(delta).map(|(value, delta)| f64::from(value + delta).powi(2)).sum();
        let factor = magnitude / square.sqrt() as f32;
        row.iter_mut().zip(delta).for_each(|(value, delta)| *value = factor * (*value + delta));
    }
}

multiversion! {
    /// Whether no value is NaN or infinite.
    fn finite(values: &[f32]) -> bool {
        values.iter().fold(true, |finite, value| finite & value.is_finite())
    }
}

/// Whether no value is NaN or infinite.
pub(super) fn all_finite(values: &[f32]) -> bool {
    finite(InstructionSet::detect(), values)
}

multiversion! {
    /// Whether a finite value is this great or greater, on either side of zero.
    fn reaches(values: &[f32], limit: f32) -> bool {
        values.iter().fold(false, |any, value| any | (value.abs() >= limit && value.is_finite()))
    }
}

/// Whether a finite value among these is rounded to infinity by this type.
pub(super) fn overflows(dtype: Dtype, values: &[f32]) -> bool {
    // The least value that is.
    let limit = match dtype {
        Dtype::BF16 => f32::from_bits(0x7f7f_8000),
        Dtype::F16 => 65_520.0,
        _ => return false,
    };
    reaches(InstructionSet::detect(), values, limit)
}

/// What merging did to some values.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Change {
    /// The greatest change of a value before rounding.
    pub(super) max_abs_delta: f32,
    /// The greatest value before.
    pub(super) max_abs_base: f32,
    /// Sum of the squared changes before rounding.
    pub(super) delta_square: f64,
    /// Sum of the squared differences that rounding made.
    pub(super) rounding_square: f64,
}

impl Change {
    /// From the base's values, the merged ones, and the type that these are rounded to.
    pub(super) fn of(base: &[f32], merged: &[f32], dtype: Dtype) -> Self {
        let set = InstructionSet::detect();
        match dtype {
            Dtype::BF16 => change_to_bf16(set, base, merged),
            Dtype::F16 => change(base, merged, |value| f16::from_f32(value).to_f32()),
            _ => change_to_f32(set, base, merged),
        }
    }

    /// The norm of what rounding changed over that of what the adapters did.
    pub(super) fn rounding_over_delta(self) -> f64 {
        if self.delta_square > 0.0 { (self.rounding_square / self.delta_square).sqrt() } else { 0.0 }
    }

    /// That of all the values of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            max_abs_delta: self.max_abs_delta.max(other.max_abs_delta),
            max_abs_base: self.max_abs_base.max(other.max_abs_base),
            delta_square: self.delta_square + other.delta_square,
            rounding_square: self.rounding_square + other.rounding_square,
        }
    }
}

multiversion! {
    fn change_to_bf16(base: &[f32], merged: &[f32]) -> Change {
        change(base, merged, |value| nearest(value).to_f32())
    }
}

multiversion! {
    fn change_to_f32(base: &[f32], merged: &[f32]) -> Change {
        change(base, merged, |value| value)
    }
}

/// The sums of up to a block of values run in f32, side by side, so that they take no longer than reading the values.
#[inline(always)]
fn change(base: &[f32], merged: &[f32], rounded: impl Fn(f32) -> f32) -> Change {
    const LANES: usize = 16;
    let (mut max_abs_delta, mut max_abs_base) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    let (mut delta_square, mut rounding_square) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    let mut add = |lane: usize, base: f32, merged: f32| {
        let (delta, rounding) = (merged - base, rounded(merged) - merged);
        max_abs_delta[lane] = max_abs_delta[lane].max(delta.abs());
        max_abs_base[lane] = max_abs_base[lane].max(base.abs());
        delta_square[lane] += delta * delta;
        rounding_square[lane] += rounding * rounding;
    };
    let ((bases, bases_left), (mergeds, mergeds_left)) = (base.as_chunks::<LANES>(), merged.as_chunks::<LANES>());
    for (base, merged) in bases.iter().zip(mergeds) {
        (0..LANES).for_each(|lane| add(lane, base[lane], merged[lane]));
    }
    for (lane, (base, merged)) in bases_left.iter().zip(mergeds_left).enumerate() {
        add(lane, *base, *merged);
    }
    let sum = |lanes: [f32; LANES]| lanes.into_iter().map(f64::from).sum();
    Change {
        max_abs_delta: max_abs_delta.into_iter().fold(0.0, f32::max),
        max_abs_base: max_abs_base.into_iter().fold(0.0, f32::max),
        delta_square: sum(delta_square),
        rounding_square: sum(rounding_square),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::fresh_lora_a;

    #[test]
    fn rows_are_the_same_however_they_are_cut() {
        // Ranks and columns that neither four nor the tile divides.
        let (rank, in_features, out_features) = (7, TILE + 13, 9);
        let module = AdapterModule {
            rank,
            in_features,
            out_features,
            lora_a: fresh_lora_a(1, "a", rank, in_features),
            lora_b: fresh_lora_a(2, "b", out_features, rank),
            magnitude: None,
        };
        let base = fresh_lora_a(3, "w", out_features, in_features);
        let share = [Share { module: &module, scaling: 0.5 }];
        let mut whole = base.clone();
        merge_rows(&mut whole, 0, &share, &mut Vec::new());
        let mut pieces = base.clone();
        let mut delta = Vec::new();
        for (block, rows) in pieces.chunks_mut(4 * in_features).enumerate() {
            merge_rows(rows, 4 * block, &share, &mut delta);
        }
        assert_eq!(whole, pieces);
        for (at, value) in whole.iter().enumerate() {
            let (row, column) = (at / in_features, at % in_features);
            let product = |k: usize| f64::from(module.lora_b[row * rank + k] * module.lora_a[k * in_features + column]);
            let expected = f64::from(base[at]) + 0.5 * (0..rank).map(product).sum::<f64>();
            assert!((f64::from(*value) - expected).abs() < 1e-6, "{value} and {expected}");
        }
    }
}
