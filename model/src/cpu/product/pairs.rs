//! Products of bf16 operands, two at a time along the inner dimension and summed in f32: one instruction for 32 of them.
//!
//! The left operand lies as rows of pairs. The right one is packed into panels of pairs: for each pair of its rows, the pair
//! of each column.

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_shuffle_i32x4, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::ops::Range;

use half::bf16;

use super::{Into, Target, View, store};

/// Rows of a tile.
const MR: usize = 8;
/// Columns of a tile: three vectors, so that 24 sums, three of the panel and one of the rows fill the 32 registers.
const NR: usize = 48;
/// Pairs of the inner dimension in a panel, which then takes 96 KiB.
const BLOCK: usize = 512;
/// Lanes of a vector.
const LANES: usize = 16;

/// A matrix of bf16 whose rows are padded with zero to whole pairs: element `2p` in the lower half of word `p`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Pairs<'a> {
    words: &'a [u32],
    rows: usize,
    width: usize,
}

impl<'a> Pairs<'a> {
    /// Rows of `width` pairs each.
    pub(in crate::cpu) fn new(words: &'a [u32], rows: usize, width: usize) -> Self {
        assert!(rows * width <= words.len(), "{rows} rows of {width} pairs in {} words", words.len());
        Self { words, rows, width }
    }

    /// Number of rows.
    pub(in crate::cpu) fn rows(self) -> usize {
        self.rows
    }

    /// Some of its rows.
    pub(in crate::cpu) fn row_range(self, rows: Range<usize>) -> Self {
        Self::new(&self.words[rows.start * self.width..], rows.len(), self.width)
    }
}

/// `c (+)= a · b`.
///
/// # Safety
/// The machine has these instructions, and nobody else may read or write the `a.rows × b.columns` elements of `c` meanwhile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
pub(in crate::cpu) unsafe fn product(a: Pairs<'_>, b: View<'_, bf16>, write: Into, c: Target<'_>) {
    assert_eq!(a.width, b.rows.div_ceil(2), "inner dimensions");
    let mut panel = vec![0; BLOCK.min(a.width) * NR];
    // An inner dimension of zero still has to overwrite.
    for block in 0..a.width.div_ceil(BLOCK).max(1) {
        let inner = block * BLOCK..a.width.min((block + 1) * BLOCK);
        let write = if block == 0 { write } else { Into::Add };
        for first_column in (0..b.columns).step_by(NR) {
            let columns = first_column..b.columns.min(first_column + NR);
            pack(b, inner.clone(), columns.clone(), &mut panel);
            for first_row in (0..a.rows).step_by(MR) {
                let tile = tile(a, first_row, inner.clone(), &panel);
                for (row, sums) in (first_row..a.rows).zip(&tile) {
                    // SAFETY: the caller vouches for these elements.
                    store(unsafe { c.row(row, columns.clone()) }, sums, 1.0, write);
                }
            }
        }
    }
}

/// Copies a block of `b` to `[pairs][NR]`, what is beyond its last row or column being zero.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack(b: View<'_, bf16>, inner: Range<usize>, columns: Range<usize>, panel: &mut [u32]) {
    let panel = &mut panel[..inner.len() * NR];
    if columns.len() < NR {
        panel.fill(0);
    }
    if b.column_stride == 1 {
        pack_rows(b, inner, columns, panel);
    } else {
        pack_columns(b, inner, columns, panel);
    }
}

/// A pair as a word.
#[inline(always)]
fn word(first: bf16, second: bf16) -> u32 {
    u32::from(first.to_bits()) | u32::from(second.to_bits()) << 16
}

/// Packs rows that lie contiguously: two of them are interleaved.
#[inline(always)]
fn pack_rows(b: View<'_, bf16>, inner: Range<usize>, columns: Range<usize>, panel: &mut [u32]) {
    let row = |row: usize| &b.values[row * b.row_stride + columns.start..][..columns.len()];
    for (pair, target) in inner.zip(panel.chunks_exact_mut(NR)) {
        let first = row(2 * pair);
        if 2 * pair + 1 < b.rows {
            let pairs = first.iter().zip(row(2 * pair + 1));
            target.iter_mut().zip(pairs).for_each(|(target, (first, second))| *target = word(*first, *second));
        } else {
            target.iter_mut().zip(first).for_each(|(target, first)| *target = word(*first, bf16::ZERO));
        }
    }
}

/// Packs columns that lie contiguously (`row_stride` is 1), so that their pairs are words already: 16 × 16 of them at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack_columns(b: View<'_, bf16>, inner: Range<usize>, columns: Range<usize>, panel: &mut [u32]) {
    assert_eq!(b.row_stride, 1, "columns that lie contiguously");
    // Words that are whole, the last row having no partner where their number is odd.
    let whole = (b.rows / 2).clamp(inner.start, inner.end) - inner.start;
    let blocks = whole / LANES;
    for lanes in (0..columns.len()).step_by(LANES) {
        let count = LANES.min(columns.len() - lanes);
        let column = |lane: usize| &b.values[(columns.start + lanes + lane) * b.column_stride..][..b.rows];
        let in_blocks = if count == LANES { blocks * LANES } else { 0 };
        for first in (0..in_blocks).step_by(LANES) {
            let words = std::array::from_fn(|lane| {
                let source = &column(lane)[2 * (inner.start + first)..][..2 * LANES];
                // SAFETY: the slice is as long as a vector.
                unsafe { _mm512_loadu_si512(source.as_ptr().cast()) }
            });
            for (pair, words) in transpose(words).into_iter().enumerate() {
                let target = &mut panel[(first + pair) * NR + lanes..][..LANES];
                // SAFETY: as above.
                unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), words) };
            }
        }
        for lane in 0..count {
            let source = column(lane);
            for pair in in_blocks..inner.len() {
                let first = 2 * (inner.start + pair);
                let second = source.get(first + 1).copied().unwrap_or(bf16::ZERO);
                panel[pair * NR + lanes + lane] = word(source[first], second);
            }
        }
    }
}

/// Exchanges rows and columns of 16 × 16 words.
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut twos = rows;
    for i in (0..LANES).step_by(2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Now each quarter of `fours[4·g + k]` is column `4·quarter + k` of the rows `4·g .. 4·g + 4`.
    let mut fours = twos;
    for i in (0..LANES).step_by(4) {
        for high in 0..2 {
            fours[i + 2 * high] = _mm512_unpacklo_epi64(twos[i + high], twos[i + high + 2]);
            fours[i + 2 * high + 1] = _mm512_unpackhi_epi64(twos[i + high], twos[i + high + 2]);
        }
    }
    let mut columns = fours;
    for k in 0..4 {
        let even = [0, 8].map(|g| _mm512_shuffle_i32x4::<0x88>(fours[g + k], fours[g + 4 + k]));
        let odd = [0, 8].map(|g| _mm512_shuffle_i32x4::<0xdd>(fours[g + k], fours[g + 4 + k]));
        columns[k] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        columns[4 + k] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        columns[8 + k] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        columns[12 + k] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    columns
}

/// `MR × NR` elements of the product; rows beyond the last of `a` repeat that one.
#[target_feature(enable = "avx512f,avx512bf16")]
fn tile(a: Pairs<'_>, first_row: usize, inner: Range<usize>, panel: &[u32]) -> [[f32; NR]; MR] {
    let rows: [&[u32]; MR] = std::array::from_fn(|row| {
        let row = (first_row + row).min(a.rows - 1);
        &a.words[row * a.width..][inner.clone()]
    });
    let mut sums = [[_mm512_setzero_ps(); NR / LANES]; MR];
    for (pair, panel) in panel.chunks_exact(NR).take(inner.len()).enumerate() {
        let columns: [__m512bh; NR / LANES] = std::array::from_fn(|vector| {
            // SAFETY: a chunk of the panel is three vectors long.
            as_pairs(unsafe { _mm512_loadu_si512(panel.as_ptr().add(vector * LANES).cast()) })
        });
        for (sums, row) in sums.iter_mut().zip(rows) {
            // SAFETY: each row is as long as the inner range.
            let word = unsafe { *row.get_unchecked(pair) };
            let word = as_pairs(_mm512_set1_epi32(word.cast_signed()));
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = _mm512_dpbf16_ps(*sum, word, column);
            }
        }
    }
    let mut tile = [[0.0; NR]; MR];
    for (target, sums) in tile.iter_mut().zip(sums) {
        for (vector, sum) in sums.into_iter().enumerate() {
            // SAFETY: a row of the tile is three vectors long.
            unsafe { _mm512_storeu_ps(target.as_mut_ptr().add(vector * LANES), sum) };
        }
    }
    tile
}

/// Words as pairs, in another type of vector.
#[inline(always)]
fn as_pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types are 512 bits long, and every bit pattern is a value of each.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}
