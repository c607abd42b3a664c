//! The small products inside attention: a tile of sums in registers, its left operand read word by word, its right
//! operand in vectors. A word is a value or, of bf16, a pair of them along the inner index.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use super::operands::{Extent, Product};
use crate::cpu::simd::{Multiplier, Routine, Vector, prefetch_far};

/// Computes a product.
///
/// # Safety
/// As for [`tiles`].
#[inline(always)]
pub(super) unsafe fn product<K: Multiplier>(product: &Product<'_, K::Word>) {
    // SAFETY: the caller vouches for it.
    unsafe { K::compiled(Tiles::<K>(product, PhantomData)) }
}

/// Computes a product of few rows, in tiles of up to four rows and many columns. What lies `ahead`, as the right
/// operand does, is asked for meanwhile; nothing is read there.
///
/// # Safety
/// As for [`tiles`], by a routine that is compiled with the instructions.
#[inline(always)]
pub(super) unsafe fn few_rows<K: Multiplier>(product: &Product<'_, K::Word>, ahead: *const K::Word) {
    let ask = |words: usize| prefetch_far(ahead.wrapping_add(words));
    // SAFETY: the caller vouches for it.
    unsafe {
        match (K::Sums::TILE_ROWS, product.rows) {
            (8.., 1) => tiles::<K, 1, 4>(product, ask),
            (8.., 2) => tiles::<K, 2, 4>(product, ask),
            (8.., 3) => tiles::<K, 3, 4>(product, ask),
            (8.., _) => tiles::<K, 4, 4>(product, ask),
            (_, 1) => tiles::<K, 1, 2>(product, ask),
            (_, 2) => tiles::<K, 2, 2>(product, ask),
            (_, 3) => tiles::<K, 3, 2>(product, ask),
            _ => tiles::<K, 4, 2>(product, ask),
        }
    }
}

struct Tiles<'a, 'p, K: Multiplier>(&'a Product<'p, K::Word>, PhantomData<K>);

impl<K: Multiplier> Routine for Tiles<'_, '_, K> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller vouches for it.
        unsafe {
            match K::Sums::TILE_ROWS {
                4 => tiles::<K, 4, 2>(self.0, |_| ()),
                6 => tiles::<K, 6, 2>(self.0, |_| ()),
                _ => tiles::<K, 8, 2>(self.0, |_| ()),
            }
        }
    }
}

/// Goes over the result in tiles of up to `MR` rows and `NV` vectors. `ask` is called with the place of each vector of
/// the right operand, in words, as it is read first.
///
/// # Safety
/// The machine has the instructions; all words and elements within the extents can be read and written, the written
/// ones by nobody else.
#[inline(always)]
unsafe fn tiles<K: Multiplier, const MR: usize, const NV: usize>(
    product: &Product<'_, K::Word>,
    ask: impl Fn(usize) + Copy,
) {
    for first in (0..product.rows).step_by(MR) {
        let rows = first..product.rows.min(first + MR);
        // The right operand is read again for further rows.
        let ask = |place: usize| {
            if first == 0 {
                ask(place);
            }
        };
        let Extent { inner, columns } = (product.extent)(rows.clone());
        if inner.is_empty() && product.output.add {
            continue;
        }
        let inner = inner.start / K::VALUES..inner.end.div_ceil(K::VALUES);
        let mut column = columns.start;
        while column < columns.end {
            // Equal tiles rather than full ones and a rest, which would wait for its few sums.
            let lanes = K::Sums::LANES;
            let vectors = (columns.end - column).div_ceil(lanes);
            let width = vectors.div_ceil(vectors.div_ceil(NV));
            let next = columns.end.min(column + width * lanes);
            // SAFETY: the caller vouches for all elements.
            unsafe {
                match width {
                    1 => tile_of::<K, MR, 1>(product, rows.clone(), inner.clone(), column..next, ask),
                    2 if NV >= 2 => tile_of::<K, MR, 2>(product, rows.clone(), inner.clone(), column..next, ask),
                    3 if NV >= 3 => tile_of::<K, MR, 3>(product, rows.clone(), inner.clone(), column..next, ask),
                    _ => tile_of::<K, MR, NV>(product, rows.clone(), inner.clone(), column..next, ask),
                }
            }
            column = next;
        }
    }
}

#[inline(always)]
unsafe fn tile_of<K: Multiplier, const MR: usize, const NV: usize>(
    product: &Product<'_, K::Word>,
    rows: Range<usize>,
    inner: Range<usize>,
    columns: Range<usize>,
    ask: impl Fn(usize) + Copy,
) {
    // SAFETY: the caller vouches for all elements.
    unsafe {
        if columns.len() == NV * K::Sums::LANES {
            tile::<K, MR, NV, false>(product, rows, inner, columns, ask);
        } else {
            tile::<K, MR, NV, true>(product, rows, inner, columns, ask);
        }
    }
}

/// One tile; rows beyond the last repeat it, and with `PARTIAL` the last vector has fewer columns than lanes.
#[inline(always)]
unsafe fn tile<K: Multiplier, const MR: usize, const NV: usize, const PARTIAL: bool>(
    product: &Product<'_, K::Word>,
    rows: Range<usize>,
    inner: Range<usize>,
    columns: Range<usize>,
    ask: impl Fn(usize) + Copy,
) {
    let Product { left, right, output, .. } = *product;
    let lanes = K::Sums::LANES;
    let rest = columns.len() - (NV - 1) * lanes;
    let is_partial = |vector: usize| PARTIAL && vector == NV - 1;
    // SAFETY: the caller vouches for rows, columns and inner words in these ranges.
    unsafe {
        let mut sums = [[K::Sums::splat(0.0); NV]; MR];
        let lines: [*const K::Word; MR] = std::array::from_fn(|row| {
            left.words.add((rows.start + row).min(rows.end - 1) * left.row_stride + inner.start * left.inner_stride)
        });
        let mut place = inner.start * right.stride + columns.start;
        for offset in (0..inner.len()).map(|step| step * left.inner_stride) {
            let words: [K::Words; NV] = std::array::from_fn(|vector| {
                let place = place + vector * lanes;
                ask(place);
                let from = right.words.add(place);
                if is_partial(vector) { K::load_first(from, rest) } else { K::load(from) }
            });
            for (sums, line) in sums.iter_mut().zip(lines) {
                let word = K::splat(line.add(offset));
                for (sum, words) in sums.iter_mut().zip(words) {
                    *sum = K::multiply_add(word, words, *sum);
                }
            }
            place += right.stride;
        }
        for (row, sums) in rows.zip(sums) {
            let to = output.values.add(row * output.stride + columns.start);
            for (vector, mut sum) in sums.into_iter().enumerate() {
                let to = to.add(vector * lanes);
                if output.add {
                    let before = if is_partial(vector) { K::Sums::load_first(to, rest) } else { K::Sums::load(to) };
                    sum = sum.add(before);
                }
                if is_partial(vector) { sum.store_first(to, rest) } else { sum.store(to) }
            }
        }
    }
}
