//! The arithmetic of a merge: one weight and the adapters' shares in it, row by row.

use rayon::prelude::*;

use super::{MergeError, MergedTensor};
use crate::checkpoint::{Checkpoint, Dtype, encode_float};
use crate::peft::AdapterModule;

/// One adapter's share in a module.
pub(super) struct Share<'a> {
    pub(super) module: &'a AdapterModule,
    pub(super) scaling: f32,
}

/// The merged tensor in its stored type, and what changed. Rows are independent of each other and run in parallel.
pub(super) fn merge_tensor(
    checkpoint: &Checkpoint,
    source: &str,
    name: &str,
    shares: &[Share<'_>],
    dtype: Dtype,
) -> Result<(Vec<u8>, MergedTensor), MergeError> {
    let AdapterModule { in_features, out_features, .. } = *shares[0].module;
    let row_bytes = in_features * dtype.bitsize() / 8;
    let mut bytes = vec![0; out_features * row_bytes];
    let rows = bytes.par_chunks_mut(row_bytes).enumerate().map_init(
        || (vec![0.0; in_features], vec![0.0; in_features]),
        |(row, delta), (index, bytes)| -> Result<(f32, f32), MergeError> {
            checkpoint.read_f32(source, index * in_features, row)?;
            let change = merge_row(row, delta, index, shares);
            let finite = row.iter().all(|value| value.is_finite());
            if !finite {
                return Err(MergeError::NotFinite { module: name.trim_end_matches(".weight").to_owned() });
            }
            let encoded = encode_float(dtype, row, bytes);
            assert!(encoded, "only floats are merged");
            Ok(change)
        },
    );
    let (max_abs_delta, max_abs_base) =
        rows.try_reduce(|| (0.0, 0.0), |a, b| Ok((f32::max(a.0, b.0), f32::max(a.1, b.1))))?;
    Ok((bytes, MergedTensor { name: name.to_owned(), max_abs_delta, max_abs_base }))
}

/// Replaces row `index` of the weight by its merged form. Returns the greatest change and the greatest value before.
fn merge_row(row: &mut [f32], delta: &mut [f32], index: usize, shares: &[Share<'_>]) -> (f32, f32) {
    let largest = |values: &[f32]| values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    let max_abs_base = largest(row);
    let mut max_abs_delta = 0.0;
    for Share { module, scaling } in shares {
        delta.fill(0.0);
        let b = &module.lora_b[index * module.rank..(index + 1) * module.rank];
        for (factor, a) in b.iter().zip(module.lora_a.chunks_exact(module.in_features)) {
            for (delta, a) in delta.iter_mut().zip(a) {
                *delta += factor * a;
            }
        }
        // Scaled after the product, as PEFT does.
        delta.iter_mut().for_each(|delta| *delta *= scaling);
        if let Some(magnitude) = &module.magnitude {
            max_abs_delta += set_magnitude(row, delta, magnitude[index]);
            continue;
        }
        max_abs_delta += largest(delta);
        row.iter_mut().zip(delta.iter()).for_each(|(value, delta)| *value += delta);
    }
    (max_abs_delta, max_abs_base)
}

/// Makes `row` `magnitude / ‖row + delta‖ · (row + delta)` and returns the greatest change.
fn set_magnitude(row: &mut [f32], delta: &[f32], magnitude: f32) -> f32 {
    let square: f64 = row.iter().zip(delta).map(|(value, delta)| f64::from(value + delta).powi(2)).sum();
    let factor = magnitude / square.sqrt() as f32;
    let mut max_abs_change = 0.0_f32;
    for (value, delta) in row.iter_mut().zip(delta) {
        let merged = factor * (*value + delta);
        max_abs_change = max_abs_change.max((merged - *value).abs());
        *value = merged;
    }
    max_abs_change
}
