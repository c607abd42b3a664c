//! Packing in vectors of 512 bits: rows are copied, columns transposed a square of vectors at a time.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m256i, __m512, __m512bh, __m512i, _mm256_loadu_si256, _mm256_maskz_loadu_epi16, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_castsi512_si256, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh, _mm512_cvtph_ps,
    _mm512_extracti64x4_epi64, _mm512_fpclass_ps_mask, _mm512_loadu_si512, _mm512_maskz_loadu_epi16,
    _mm512_maskz_loadu_epi32, _mm512_maskz_loadu_ps, _mm512_maskz_sub_ps, _mm512_or_si512, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_si512,
};
use std::marker::PhantomData;
use std::ops::Range;

use half::{bf16, f16};

use super::super::{InstructionSet, PairsRight, Right, View};
use super::{Pack, pack_floats, pack_words};
use crate::cpu::simd::{Avx512, Avx512Bf16, Floats, first as first_lanes, prefetch, transposed};

/// Lanes of a vector of 512 bits.
const LANES: usize = 16;

impl<R: Right> Pack<R> for Floats<Avx512> {
    unsafe fn pack(b: R, inner: Range<usize>, columns: Range<usize>, panel: *mut f32) {
        // SAFETY: the caller vouches for it.
        unsafe { pack_floats::<Self, R>(InstructionSet::Avx512, b, inner, columns, panel) }
    }

    fn in_place(b: R, inner: &Range<usize>, columns: &Range<usize>) -> Option<(*const f32, usize)> {
        if columns.len().is_multiple_of(LANES) { b.in_place(inner, columns) } else { None }
    }
}

impl<R: PairsRight> Pack<R> for Avx512Bf16 {
    unsafe fn pack(b: R, inner: Range<usize>, columns: Range<usize>, panel: *mut u32) {
        // SAFETY: the caller vouches for it.
        unsafe { pack_words::<Self, R>(InstructionSet::Avx512Bf16, b, inner, columns, panel) }
    }
}

/// Packs f32 for [`Avx512`].
///
/// # Safety
/// As for [`Pack::pack`].
pub(in crate::cpu::product) unsafe fn pack_f32(
    b: View<'_, f32>,
    inner: Range<usize>,
    columns: Range<usize>,
    panel: *mut f32,
) {
    // SAFETY: the caller vouches for it.
    unsafe { pack_512::<F32>(b, inner, columns, panel.cast()) }
}

/// Packs bf16, widened, for [`Avx512`].
///
/// # Safety
/// As for [`Pack::pack`].
pub(in crate::cpu::product) unsafe fn pack_bf16(
    b: View<'_, bf16>,
    inner: Range<usize>,
    columns: Range<usize>,
    panel: *mut f32,
) {
    // SAFETY: the caller vouches for it.
    unsafe { pack_512::<Widened<bf16>>(b, inner, columns, panel.cast()) }
}

/// Packs f16, widened, for [`Avx512`].
///
/// # Safety
/// As for [`Pack::pack`].
pub(in crate::cpu::product) unsafe fn pack_f16(
    b: View<'_, f16>,
    inner: Range<usize>,
    columns: Range<usize>,
    panel: *mut f32,
) {
    // SAFETY: the caller vouches for it.
    unsafe { pack_512::<Widened<f16>>(b, inner, columns, panel.cast()) }
}

/// Packs bf16 for [`Avx512Bf16`].
///
/// # Safety
/// As for [`Pack::pack`].
pub(in crate::cpu::product) unsafe fn pack_pairs(
    b: View<'_, bf16>,
    inner: Range<usize>,
    columns: Range<usize>,
    panel: *mut u32,
) {
    // SAFETY: the caller vouches for it.
    unsafe { pack_512::<Paired>(b, inner, columns, panel) }
}

/// How words are made of elements of a type.
trait Words {
    type Element: Copy;
    /// Elements of a word.
    const ELEMENTS: usize;

    /// Words of elements that lie contiguously, of which there are `count`; zero beyond them.
    ///
    /// # Safety
    /// The machine has the instructions, and so many elements lie there.
    unsafe fn contiguous(elements: *const Self::Element, count: usize) -> __m512i;

    /// As many words of elements that lie contiguously as a vector has.
    ///
    /// # Safety
    /// The machine has the instructions, and all of the elements lie there.
    unsafe fn vector(elements: *const Self::Element) -> __m512i;

    /// A word of each of `count` columns, from `row` and `column` on, of rows that lie contiguously.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn across(b: View<'_, Self::Element>, row: usize, column: usize, count: usize) -> __m512i;

    /// A word of each of as many columns as a vector has lanes, from the first one's first element on, rows being so
    /// far apart.
    ///
    /// # Safety
    /// The machine has the instructions, and all of the elements lie there.
    unsafe fn vector_across(elements: *const Self::Element, row_stride: usize) -> __m512i;
}

/// Words that are f32.
struct F32;

impl Words for F32 {
    type Element = f32;
    const ELEMENTS: usize = 1;

    #[inline(always)]
    unsafe fn contiguous(elements: *const f32, count: usize) -> __m512i {
        // SAFETY: masked lanes are not read.
        unsafe { _mm512_maskz_loadu_epi32(first_lanes(count) as u16, elements.cast()) }
    }

    #[inline(always)]
    unsafe fn vector(elements: *const f32) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe { _mm512_loadu_si512(elements.cast()) }
    }

    #[inline(always)]
    unsafe fn vector_across(elements: *const f32, _row_stride: usize) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe { Self::vector(elements) }
    }

    #[inline(always)]
    unsafe fn across(b: View<'_, f32>, row: usize, column: usize, count: usize) -> __m512i {
        // SAFETY: the caller vouches for the instructions, and the elements are those of one row.
        unsafe { Self::contiguous(b.pointer(row, column), count) }
    }
}

/// Words that are numbers of 16 bits widened to f32.
struct Widened<T>(PhantomData<T>);

/// A number of 16 bits.
trait Half: Copy {
    /// Sixteen of them, widened.
    ///
    /// # Safety
    /// The machine has the instructions.
    unsafe fn widened(halves: __m256i) -> __m512i;
}

impl Half for bf16 {
    #[inline(always)]
    unsafe fn widened(halves: __m256i) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe { _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)) }
    }
}

impl Half for f16 {
    #[inline(always)]
    unsafe fn widened(halves: __m256i) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe { _mm512_castps_si512(_mm512_cvtph_ps(halves)) }
    }
}

impl<T: Half> Words for Widened<T> {
    type Element = T;
    const ELEMENTS: usize = 1;

    #[inline(always)]
    unsafe fn contiguous(elements: *const T, count: usize) -> __m512i {
        // SAFETY: masked lanes are not read.
        unsafe { T::widened(_mm256_maskz_loadu_epi16(first_lanes(count) as u16, elements.cast())) }
    }

    #[inline(always)]
    unsafe fn vector(elements: *const T) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe { T::widened(_mm256_loadu_si256(elements.cast())) }
    }

    #[inline(always)]
    unsafe fn vector_across(elements: *const T, _row_stride: usize) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe { Self::vector(elements) }
    }

    #[inline(always)]
    unsafe fn across(b: View<'_, T>, row: usize, column: usize, count: usize) -> __m512i {
        // SAFETY: the caller vouches for the instructions, and the elements are those of one row.
        unsafe { Self::contiguous(b.pointer(row, column), count) }
    }
}

/// Words that are pairs of bf16, the second of the last one zero where their number is odd.
struct Paired;

impl Words for Paired {
    type Element = bf16;
    const ELEMENTS: usize = 2;

    #[inline(always)]
    unsafe fn contiguous(elements: *const bf16, count: usize) -> __m512i {
        // SAFETY: masked lanes are not read.
        unsafe { _mm512_maskz_loadu_epi16(first_lanes(count), elements.cast()) }
    }

    #[inline(always)]
    unsafe fn vector(elements: *const bf16) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe { _mm512_loadu_si512(elements.cast()) }
    }

    #[inline(always)]
    unsafe fn vector_across(elements: *const bf16, row_stride: usize) -> __m512i {
        // SAFETY: the caller vouches for it.
        unsafe {
            let [first, second] = [elements, elements.add(row_stride)].map(|elements| sixteen_halves(elements));
            _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
        }
    }

    #[inline(always)]
    unsafe fn across(b: View<'_, bf16>, row: usize, column: usize, count: usize) -> __m512i {
        // SAFETY: the caller vouches for the instructions, and the elements are those of two rows.
        unsafe {
            let first = halves(b.pointer(2 * row, column), count);
            if 2 * row + 1 == b.rows() {
                return first;
            }
            _mm512_or_si512(first, _mm512_slli_epi32::<16>(halves(b.pointer(2 * row + 1, column), count)))
        }
    }
}

/// Sixteen bf16, each in the lower half of a word.
///
/// # Safety
/// The machine has the instructions, and `count` elements lie there.
#[inline(always)]
unsafe fn halves(elements: *const bf16, count: usize) -> __m512i {
    // SAFETY: masked lanes are not read.
    unsafe { _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count) as u16, elements.cast())) }
}

/// As [`halves`], where all of them lie there.
///
/// # Safety
/// The machine has the instructions, and the elements lie there.
#[inline(always)]
unsafe fn sixteen_halves(elements: *const bf16) -> __m512i {
    // SAFETY: the caller vouches for it.
    unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(elements.cast())) }
}

/// [`Pack::pack`] in vectors of 512 bits.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_512<W: Words>(b: View<'_, W::Element>, inner: Range<usize>, columns: Range<usize>, panel: *mut u32) {
    if b.column_stride() == 1 {
        // SAFETY: the caller vouches for the panel.
        return unsafe { pack_rows::<W>(b, inner, columns, panel) };
    }
    let vectors = columns.len().div_ceil(LANES);
    for vector in 0..vectors {
        let first = columns.start + vector * LANES;
        let count = LANES.min(columns.end - first);
        // SAFETY: the caller vouches for the panel, which is so many vectors wide.
        unsafe {
            let panel = panel.add(vector * LANES);
            pack_columns::<W>(b.transposed(), inner.clone(), first, count, panel, vectors * LANES);
        }
    }
}

/// Rows lie contiguously: each is a step, or two of them are.
///
/// # Safety
/// As for [`Pack::pack`].
#[inline(always)]
unsafe fn pack_rows<W: Words>(b: View<'_, W::Element>, inner: Range<usize>, columns: Range<usize>, panel: *mut u32) {
    /// Steps ahead that memory is asked for: as long as it takes to come, as what lies there of a row is too short for
    /// a machine to foresee.
    const AHEAD: usize = 32;
    let mut target = panel;
    let (stride, vectors) = (b.row_stride(), columns.len() / LANES);
    let rest = columns.start + vectors * LANES..columns.end;
    for row in inner {
        let first = W::ELEMENTS * row;
        // A last row without a second one goes the way of columns that do not fill a vector.
        let whole = if first + W::ELEMENTS <= b.rows() { vectors } else { 0 };
        let mut elements = b.pointer(first, columns.start);
        for _ in 0..whole {
            for element in 0..W::ELEMENTS {
                prefetch(elements.wrapping_add((W::ELEMENTS * AHEAD + element) * stride));
            }
            // SAFETY: the caller vouches for the panel, and rows and columns are those of `b`.
            unsafe { _mm512_storeu_si512(target.cast(), W::vector_across(elements, stride)) };
            (elements, target) = (elements.wrapping_add(LANES), target.wrapping_add(LANES));
        }
        let left = if whole == vectors { rest.clone() } else { columns.clone() };
        for column in left.clone().step_by(LANES) {
            let count = LANES.min(left.end - column);
            // SAFETY: the caller vouches for the panel.
            unsafe { _mm512_storeu_si512(target.cast(), W::across(b, row, column, count)) };
            target = target.wrapping_add(LANES);
        }
    }
}

/// One vector of each step, columns lying contiguously: `b` has them as rows.
///
/// # Safety
/// As for [`Pack::pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pack_columns<W: Words>(
    b: View<'_, W::Element>,
    inner: Range<usize>,
    column: usize,
    count: usize,
    panel: *mut u32,
    width: usize,
) {
    /// Bytes ahead that memory is asked for.
    const AHEAD: usize = 320;
    let [columns_bytes, row_bytes] = [inner.len() * W::ELEMENTS, b.row_stride()].map(|n| n * size_of::<W::Element>());
    for first in inner.clone().step_by(LANES) {
        let steps = LANES.min(inner.end - first);
        let element = first * W::ELEMENTS;
        // Behind the end of these columns the next ones begin.
        let done = (first - inner.start) * W::ELEMENTS * size_of::<W::Element>();
        let ahead = match (done + AHEAD).checked_sub(columns_bytes) {
            None => AHEAD,
            Some(of_next) => (LANES * row_bytes + of_next.min(columns_bytes)).saturating_sub(done),
        };
        let elements = (b.columns() - element).min(steps * W::ELEMENTS);
        if count == LANES && elements == LANES * W::ELEMENTS {
            let (place, stride) = (b.pointer(column, element), b.row_stride());
            // The last one, too, is of `b`.
            b.pointer(column + LANES - 1, element + elements - 1);
            let words = std::array::from_fn(|lane| {
                let place = place.wrapping_add(lane * stride);
                prefetch(place.wrapping_byte_add(ahead));
                // SAFETY: so many elements of each of so many columns are left.
                unsafe { W::vector(place) }
            });
            let mut target = panel.wrapping_add((first - inner.start) * width);
            for words in transpose(words) {
                // SAFETY: the caller vouches for the panel.
                unsafe { _mm512_storeu_si512(target.cast(), words) };
                target = target.wrapping_add(width);
            }
            continue;
        }
        let mut words = [_mm512_setzero_si512(); LANES];
        for (lane, words) in words.iter_mut().enumerate().take(count) {
            // SAFETY: so many elements of this column are left.
            *words = unsafe {
                let place = b.pointer(column + lane, element);
                prefetch(place.wrapping_byte_add(ahead));
                W::contiguous(place, elements)
            };
        }
        let words = transpose(words);
        for (step, words) in words.into_iter().enumerate().take(steps) {
            // SAFETY: the caller vouches for the panel.
            unsafe { _mm512_storeu_si512(panel.add((first - inner.start + step) * width).cast(), words) };
        }
    }
}

/// Packs f32 as right tiles side by side, rounded to bf16 or [split](super::super::split) into two matrices of such:
/// zero beyond the last row and column, to whole tiles.
///
/// # Safety
/// The machine has the instructions, and each panel has the room.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(in crate::cpu::product) unsafe fn pack_halves<const MATRICES: usize>(
    b: View<'_, f32>,
    words: Range<usize>,
    columns: Range<usize>,
    panels: [*mut u32; MATRICES],
) {
    let width = columns.len().next_multiple_of(LANES);
    for first in words.clone().step_by(LANES) {
        let rows = 2 * first..b.rows().min(2 * words.end).min(2 * (first + LANES));
        let (place, lies_in_rows) = ((first - words.start) * width, b.column_stride() == 1);
        for column in columns.clone().step_by(LANES) {
            let (count, lane) = (LANES.min(columns.end - column), column - columns.start);
            // SAFETY: the caller vouches for the instructions, and each panel has so many words.
            unsafe {
                let panels = panels.map(|panel| panel.add(place + lane));
                if lies_in_rows {
                    split_rows(b, rows.clone(), column, count, panels, width);
                } else {
                    split_columns(b.transposed(), rows.clone(), column, count, panels, width);
                }
            }
        }
    }
}

/// Up to 32 rows, which lie contiguously, of up to 16 columns.
///
/// # Safety
/// As for [`pack_halves`].
#[inline(always)]
unsafe fn split_rows<const MATRICES: usize>(
    b: View<'_, f32>,
    rows: Range<usize>,
    column: usize,
    count: usize,
    panels: [*mut u32; MATRICES],
    width: usize,
) {
    /// Rows ahead that memory is asked for.
    const AHEAD: usize = 32;
    for step in 0..LANES {
        let row = rows.start + 2 * step;
        // SAFETY: the caller vouches for the instructions and the panels; rows and columns are those of `b`.
        unsafe {
            let mut values = [_mm512_setzero_ps(); 2];
            for (number, values) in values.iter_mut().enumerate() {
                if row + number < rows.end {
                    let place = b.pointer(row + number, column);
                    prefetch(place.wrapping_add(AHEAD * b.row_stride()));
                    *values = _mm512_maskz_loadu_ps(first_lanes(count) as u16, place);
                }
            }
            let halves = split(values);
            for (halves, panel) in halves.into_iter().zip(panels) {
                // Of one row after the other: a word has one of each.
                let first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
                let second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(halves));
                let words = _mm512_or_si512(first, _mm512_slli_epi32::<16>(second));
                _mm512_storeu_si512(panel.add(step * width).cast(), words);
            }
        }
    }
}

/// The same of columns that lie contiguously: `b` has them as rows.
///
/// # Safety
/// As for [`pack_halves`].
#[inline(always)]
unsafe fn split_columns<const MATRICES: usize>(
    b: View<'_, f32>,
    rows: Range<usize>,
    column: usize,
    count: usize,
    panels: [*mut u32; MATRICES],
    width: usize,
) {
    /// Bytes ahead that memory is asked for.
    const AHEAD: usize = 384;
    // SAFETY: the caller vouches for the instructions.
    let mut halves = unsafe { [[_mm512_setzero_si512(); LANES]; 2] };
    let [high, rest] = &mut halves;
    for (lane, (high, rest)) in high.iter_mut().zip(rest).enumerate().take(count) {
        // SAFETY: the caller vouches for the instructions; so many values of this column are left.
        unsafe {
            let place = b.pointer(column + lane, rows.start);
            let second = rows.len().saturating_sub(LANES);
            prefetch(place.wrapping_byte_add(AHEAD));
            prefetch(place.wrapping_byte_add(AHEAD + 64));
            let values = [
                _mm512_maskz_loadu_ps(first_lanes(rows.len().min(LANES)) as u16, place),
                _mm512_maskz_loadu_ps(first_lanes(second) as u16, place.wrapping_add(LANES)),
            ];
            [*high, *rest] = split(values);
        }
    }
    for (halves, panel) in halves.into_iter().zip(panels) {
        // SAFETY: the caller vouches for the panels.
        unsafe {
            for (step, words) in transpose(halves).into_iter().enumerate() {
                _mm512_storeu_si512(panel.add(step * width).cast(), words);
            }
        }
    }
}

/// Two vectors in two of bf16, the first one's values in the lower half: the nearest, and what they leave. Of a value
/// whose nearest bf16 is not finite nothing is left.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn split(values: [__m512; 2]) -> [__m512i; 2] {
    /// Not a number, of both kinds, or infinite, of both signs.
    const NOT_FINITE: i32 = 0x99;
    // SAFETY: the caller vouches for the instructions; vectors of as many bits are the same bits.
    unsafe {
        let high = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(values[1], values[0]));
        let halves = [_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64::<1>(high)];
        let mut rest = [_mm512_setzero_ps(); 2];
        for number in 0..2 {
            let nearest = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves[number])));
            let is_finite = !_mm512_fpclass_ps_mask::<NOT_FINITE>(nearest);
            rest[number] = _mm512_maskz_sub_ps(is_finite, values[number], nearest);
        }
        [high, std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(rest[1], rest[0]))]
    }
}

/// Exchanges rows and columns of a tile.
///
/// # Safety
/// The machine has the instructions, and a tile lies there that is the caller's alone.
#[target_feature(enable = "avx512f")]
pub(in crate::cpu::product) unsafe fn transpose_tile(tile: *mut u32) {
    // SAFETY: the caller vouches for the tile.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); LANES];
        for (row, words) in rows.iter_mut().enumerate() {
            *words = _mm512_loadu_si512(tile.add(row * LANES).cast());
        }
        for (row, words) in transpose(rows).into_iter().enumerate() {
            _mm512_storeu_si512(tile.add(row * LANES).cast(), words);
        }
    }
}

/// Exchanges rows and columns of 16 × 16 words.
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    // SAFETY: the instructions are those of this function, and vectors of as many bits are the same bits.
    unsafe {
        let rows = std::mem::transmute::<[__m512i; LANES], [__m512; LANES]>(rows);
        std::mem::transmute::<[__m512; LANES], [__m512i; LANES]>(transposed(rows))
    }
}
