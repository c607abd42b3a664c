//! The small products inside attention: a tile of sums in registers, its left operand read value by value, its right operand in
//! vectors. Neither is packed: either may lie anywhere in a wider matrix, and the left one in any orientation.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};
use crate::cpu::simd::{Portable, Vector};

/// `output (+)= left · right`.
///
/// Each element is summed in the order of the inner index, however the work is cut.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub left: Left,
    pub right: Right,
    pub output: Output,
    /// Rows of the result.
    pub rows: usize,
    /// What there is to do for some of the rows.
    pub extent: &'a dyn Fn(Range<usize>) -> Extent,
}

/// A left operand; element `(i, k)` is `values[i · row_stride + k · inner_stride]`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub values: *const f32,
    pub row_stride: usize,
    pub inner_stride: usize,
}

/// A right operand; element `(k, j)` is `values[k · stride + j]`.
#[derive(Clone, Copy)]
pub(super) struct Right {
    pub values: *const f32,
    pub stride: usize,
}

/// A result; element `(i, j)` is `values[i · stride + j]`.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub values: *mut f32,
    pub stride: usize,
    /// Whether the product is added to what is there.
    pub add: bool,
}

/// What of a product there is to do for some rows of the result.
pub(super) struct Extent {
    /// The elements that are summed; the others count as zero.
    pub inner: Range<usize>,
    /// The columns that are wanted.
    pub columns: Range<usize>,
}

/// Vectors with the tile that suits their number of registers.
pub(super) trait Kernel: Vector {
    /// Computes a product.
    ///
    /// # Safety
    /// The machine has the instructions; all elements within the extents can be read and written, the written ones by nobody
    /// else.
    unsafe fn product(product: &Product<'_>);
}

/// Implements [`Kernel`] for a vector with tiles of so many rows and vectors.
macro_rules! kernel {
    ($vector:ty, $rows:literal x $vectors:literal, $(#[$features:meta])?) => {
        impl Kernel for $vector {
            #[inline(always)]
            unsafe fn product(product: &Product<'_>) {
                $(#[$features])?
                unsafe fn compiled(product: &Product<'_>) {
                    // SAFETY: the caller vouches for instructions and elements.
                    unsafe { tiles::<$vector, $rows, $vectors>(product) }
                }
                // SAFETY: as above.
                unsafe { compiled(product) }
            }
        }
    };
}

kernel!(Portable, 4 x 2,);
#[cfg(target_arch = "x86_64")]
kernel!(Avx2, 6 x 2, #[target_feature(enable = "avx2,fma")]);
#[cfg(target_arch = "x86_64")]
kernel!(Avx512, 8 x 2, #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]);

/// Goes over the result in tiles of up to `MR` rows and `NV` vectors.
#[inline(always)]
unsafe fn tiles<V: Vector, const MR: usize, const NV: usize>(product: &Product<'_>) {
    for first in (0..product.rows).step_by(MR) {
        let rows = first..product.rows.min(first + MR);
        let Extent { inner, columns } = (product.extent)(rows.clone());
        if inner.is_empty() && product.output.add {
            continue;
        }
        let mut column = columns.start;
        while column < columns.end {
            // Equal tiles rather than full ones and a rest, which would wait for its few sums.
            let vectors = (columns.end - column).div_ceil(V::LANES);
            let width = vectors.div_ceil(vectors.div_ceil(NV));
            let next = columns.end.min(column + width * V::LANES);
            // SAFETY: the caller vouches for all elements.
            unsafe {
                match width {
                    1 => tile_of::<V, MR, 1>(product, rows.clone(), inner.clone(), column..next),
                    2 if NV >= 2 => tile_of::<V, MR, 2>(product, rows.clone(), inner.clone(), column..next),
                    3 if NV >= 3 => tile_of::<V, MR, 3>(product, rows.clone(), inner.clone(), column..next),
                    _ => tile_of::<V, MR, NV>(product, rows.clone(), inner.clone(), column..next),
                }
            }
            column = next;
        }
    }
}

#[inline(always)]
unsafe fn tile_of<V: Vector, const MR: usize, const NV: usize>(
    product: &Product<'_>,
    rows: Range<usize>,
    inner: Range<usize>,
    columns: Range<usize>,
) {
    // SAFETY: the caller vouches for all elements.
    unsafe {
        if columns.len() == NV * V::LANES {
            tile::<V, MR, NV, false>(product, rows, inner, columns);
        } else {
            tile::<V, MR, NV, true>(product, rows, inner, columns);
        }
    }
}

/// One tile; rows beyond the last repeat it, and with `PARTIAL` the last vector has fewer columns than lanes.
#[inline(always)]
unsafe fn tile<V: Vector, const MR: usize, const NV: usize, const PARTIAL: bool>(
    product: &Product<'_>,
    rows: Range<usize>,
    inner: Range<usize>,
    columns: Range<usize>,
) {
    let Product { left, right, output, .. } = *product;
    let rest = columns.len() - (NV - 1) * V::LANES;
    // SAFETY: the caller vouches for rows, columns and inner elements in these ranges.
    unsafe {
        let load = |from: *const f32, vector: usize| {
            let from = from.add(vector * V::LANES);
            if PARTIAL && vector == NV - 1 { V::load_first(from, rest) } else { V::load(from) }
        };
        let mut sums = [[V::splat(0.0); NV]; MR];
        let lines: [*const f32; MR] = std::array::from_fn(|row| {
            left.values.add((rows.start + row).min(rows.end - 1) * left.row_stride + inner.start * left.inner_stride)
        });
        let mut from = right.values.add(inner.start * right.stride + columns.start);
        for offset in (0..inner.len()).map(|step| step * left.inner_stride) {
            let vectors: [V; NV] = std::array::from_fn(|vector| load(from, vector));
            for (sums, line) in sums.iter_mut().zip(lines) {
                let value = V::splat(*line.add(offset));
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = value.mul_add(vector, *sum);
                }
            }
            from = from.add(right.stride);
        }
        for (row, sums) in rows.zip(sums) {
            let to = output.values.add(row * output.stride + columns.start);
            for (vector, mut sum) in sums.into_iter().enumerate() {
                if output.add {
                    sum = sum.add(load(to, vector));
                }
                let to = to.add(vector * V::LANES);
                if PARTIAL && vector == NV - 1 { sum.store_first(to, rest) } else { sum.store(to) }
            }
        }
    }
}
