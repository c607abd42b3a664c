//! A product in blocks: the right operand packed into panels, a tile of the result kept in registers.

use std::ops::Range;

use super::{Element, Into, Target, View};

/// Inner dimension of a packed panel: a panel of 32 columns fits into 32 KiB.
const INNER_BLOCK: usize = 256;

/// The product in blocks of the inner dimension, in panels of `NR` columns, in tiles of `MR` rows.
#[inline(always)]
pub(super) fn blocks<const MR: usize, const NR: usize, const FUSED: bool, T: Element>(
    scale: f32,
    a: View<'_>,
    b: View<'_, T>,
    write: Into,
    c: Target<'_>,
) {
    let mut panel = vec![0.0; INNER_BLOCK.min(b.rows) * NR];
    // An inner dimension of zero still has to overwrite.
    let blocks = b.rows.div_ceil(INNER_BLOCK).max(1);
    for block in 0..blocks {
        let inner = block * INNER_BLOCK..b.rows.min((block + 1) * INNER_BLOCK);
        let write = if block == 0 { write } else { Into::Add };
        for first_column in (0..b.columns).step_by(NR) {
            let columns = first_column..b.columns.min(first_column + NR);
            pack::<NR, T>(b, inner.clone(), columns.clone(), &mut panel);
            for first_row in (0..a.rows).step_by(MR) {
                let tile = tile::<MR, NR, FUSED>(a, first_row, inner.clone(), &panel);
                for (row, sums) in (first_row..a.rows).zip(&tile) {
                    // SAFETY: the caller of `product` vouches for these elements.
                    let target = unsafe { c.row(row, columns.clone()) };
                    store(target, sums, scale, write);
                }
            }
        }
    }
}

/// Writes sums into one row of the result.
#[inline(always)]
pub(super) fn store(target: &mut [f32], sums: &[f32], scale: f32, write: Into) {
    match write {
        Into::Replace => target.iter_mut().zip(sums).for_each(|(element, sum)| *element = scale * sum),
        Into::Add => target.iter_mut().zip(sums).for_each(|(element, sum)| *element += scale * sum),
    }
}

/// Copies a block of `b` to `[inner][NR]`, columns beyond its last being zero.
#[inline(always)]
fn pack<const NR: usize, T: Element>(b: View<'_, T>, inner: Range<usize>, columns: Range<usize>, panel: &mut [f32]) {
    let panel = &mut panel[..inner.len() * NR];
    if columns.len() < NR {
        panel.fill(0.0);
    }
    if b.column_stride == 1 {
        for (row, target) in inner.zip(panel.chunks_exact_mut(NR)) {
            let source = &b.values[row * b.row_stride + columns.start..][..columns.len()];
            target.iter_mut().zip(source).for_each(|(element, value)| *element = value.widen());
        }
        return;
    }
    for (lane, column) in columns.enumerate() {
        let source = &b.values[column * b.column_stride..];
        for (row, target) in inner.clone().zip(panel.chunks_exact_mut(NR)) {
            target[lane] = source[row * b.row_stride].widen();
        }
    }
}

/// `MR × NR` elements of the product; rows beyond the last of `a` repeat that one.
#[inline(always)]
fn tile<const MR: usize, const NR: usize, const FUSED: bool>(
    a: View<'_>,
    first_row: usize,
    inner: Range<usize>,
    panel: &[f32],
) -> [[f32; NR]; MR] {
    let mut sums = [[0.0; NR]; MR];
    let rows: [usize; MR] = std::array::from_fn(|row| (first_row + row).min(a.rows - 1) * a.row_stride);
    for (step, weights) in inner.zip(panel.chunks_exact(NR)) {
        let weights: &[f32; NR] = weights.try_into().expect("chunks of NR");
        for (sums, row) in sums.iter_mut().zip(rows) {
            // SAFETY: `View::checked` saw that the last element lies within `values`, and `row` and `step` are below its extents.
            let x = unsafe { *a.values.get_unchecked(row + step * a.column_stride) };
            for (sum, weight) in sums.iter_mut().zip(weights) {
                *sum = if FUSED { x.mul_add(*weight, *sum) } else { x * weight + *sum };
            }
        }
    }
    sums
}
