//! The small products inside attention in tiles of AMX: 32 rows and columns of sums at a time.
//!
//! What is added to a result goes on from it: an element is one chain of sums over all blocks, whether its square is
//! whole or at an edge.
//!
//! Right operands are laid out as their tiles are, but for the distance of rows, and so are left ones that have their
//! inner index side by side: whole tiles of these are read where they lie. The others are packed, with zeros behind the
//! last element that is summed.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{_mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps};
use std::marker::PhantomData;
use std::ops::Range;

use super::operands::{Extent, Left, Output, Product, Right};
use crate::cpu::amx::{SIDE, SUMS_ROW, Square, Strips, TILE, Tiles};
use crate::cpu::product::with_words;
use crate::cpu::simd::{Avx512Bf16, Multiplier, Routine, Vector, transposed};

/// Rows, and columns, of a square of sums.
const SQUARE: usize = 2 * SIDE;
/// Bytes of a word.
const WORD: usize = size_of::<u32>();

/// Computes a product.
///
/// # Safety
/// The machine has the instructions of [`Avx512Bf16`], and the thread is ready for tiles; all words and elements within
/// the extents can be read and written, the written ones by nobody else; and so can what fills a vector behind the
/// columns of a right operand.
pub(super) unsafe fn product<T: Tiles>(product: &Product<'_, u32>) {
    let steps = (product.extent)(0..product.rows).inner.end.div_ceil(2 * SIDE);
    with_words(4 * steps * TILE + 4 * TILE, |buffer| {
        // SAFETY: the buffer has as many words, and the caller vouches for the rest.
        unsafe {
            let (left, right) = (buffer, buffer.add(2 * steps * TILE));
            let sums = right.add(2 * steps * TILE).cast();
            Avx512Bf16::compiled(Squares::<T> { product, left, right, sums, tiles: PhantomData });
        }
    });
}

/// A product, and room for two strips of tiles of each operand and for the sums.
struct Squares<'a, 'p, T> {
    product: &'a Product<'p, u32>,
    left: *mut u32,
    right: *mut u32,
    sums: *mut f32,
    tiles: PhantomData<T>,
}

impl<T: Tiles> Routine for Squares<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Product { left, right, output, rows, extent } = *self.product;
        for first in (0..rows).step_by(SQUARE) {
            let rows = first..rows.min(first + SQUARE);
            let Extent { inner, columns } = extent(rows.clone());
            if inner.is_empty() && output.add {
                continue;
            }
            let inner = inner.start / 2..inner.end.div_ceil(2);
            // SAFETY: the caller vouches for operands and results, and there is room for two strips of tiles.
            unsafe {
                let left = tiles_of_left(left, &rows, &inner, self.left);
                for first in (columns.start..columns.end).step_by(SQUARE) {
                    let columns = first..columns.end.min(first + SQUARE);
                    let right = tiles_of_right(right, &columns, &inner, self.right);
                    let steps = tiles(&inner).len();
                    let whole = rows.len() == SQUARE && columns.len() == SQUARE;
                    let (sums, sums_row) = if whole {
                        (output.values.add(rows.start * output.stride + columns.start), output.stride * WORD)
                    } else {
                        (self.sums, SUMS_ROW)
                    };
                    if !whole && output.add {
                        each_line::<V>(self.sums, &rows, &columns, output, |sums, result, lanes| {
                            V::load_first(result, lanes).store(sums);
                        });
                    }
                    T::square(&Square { left, right, rests: None, steps, sums, sums_row, go_on: output.add });
                    if !whole {
                        each_line::<V>(self.sums, &rows, &columns, output, |sums, result, lanes| {
                            V::load(sums).store_first(result, lanes);
                        });
                    }
                }
            }
        }
    }
}

/// The tiles that some words along the inner dimension are in.
fn tiles(inner: &Range<usize>) -> Range<usize> {
    inner.start / SIDE..inner.end.div_ceil(SIDE).max(inner.start / SIDE)
}

/// From the first 16 of so many to the next, if there are more.
fn next(count: usize, distance: usize) -> usize {
    if count > SIDE { distance } else { 0 }
}

/// Tiles of some rows.
///
/// # Safety
/// As for [`product`], and there is room for two strips.
#[inline(always)]
unsafe fn tiles_of_left(left: Left<u32>, rows: &Range<usize>, inner: &Range<usize>, to: *mut u32) -> Strips {
    let (tiles, count) = (tiles(inner), rows.len());
    let strip = tiles.len() * TILE;
    let word = |row: usize, at: usize| left.words.wrapping_add(row * left.row_stride + at * left.inner_stride);
    let are_whole = count.is_multiple_of(SIDE) && inner.end.is_multiple_of(SIDE);
    if left.inner_stride == 1 && are_whole {
        let row = left.row_stride * WORD;
        return Strips {
            first: word(rows.start, tiles.start * SIDE),
            next: next(count, SIDE * row),
            row,
            step: SIDE * WORD,
        };
    }
    // SAFETY: the caller vouches for the room, for words of these rows up to the last that is summed and, where rows
    // lie side by side, for as many as fill vectors.
    unsafe {
        for (number, first) in rows.clone().step_by(SIDE).enumerate() {
            for (place, tile) in tiles.clone().enumerate() {
                let (to, from) = (to.add(number * strip + place * TILE), tile * SIDE);
                let words = SIDE.min(inner.end - from);
                if left.inner_stride == 1 {
                    for row in 0..SIDE {
                        let line = to.add(row * SIDE);
                        line.write_bytes(0, SIDE);
                        if first + row < rows.end {
                            std::ptr::copy_nonoverlapping(word(first + row, from), line, words);
                        }
                    }
                } else {
                    let lines = std::array::from_fn(|at| {
                        if at < words { _mm512_loadu_ps(word(first, from + at).cast()) } else { _mm512_setzero_ps() }
                    });
                    for (row, line) in transposed(lines).into_iter().enumerate() {
                        _mm512_storeu_ps(to.add(row * SIDE).cast(), line);
                    }
                }
            }
        }
    }
    Strips::packed(to, next(count, strip))
}

/// Tiles of some columns.
///
/// # Safety
/// As for [`product`], and there is room for two strips.
#[inline(always)]
unsafe fn tiles_of_right(right: Right<u32>, columns: &Range<usize>, inner: &Range<usize>, to: *mut u32) -> Strips {
    let (tiles, count) = (tiles(inner), columns.len());
    let strip = tiles.len() * TILE;
    let word = |at: usize, column: usize| right.words.wrapping_add(at * right.stride + column);
    if inner.end.is_multiple_of(SIDE) {
        let (first, row) = (word(tiles.start * SIDE, columns.start), right.stride * WORD);
        return Strips { first, next: next(count, SIDE * WORD), row, step: SIDE * row };
    }
    // SAFETY: the caller vouches for the room, and for the words of these columns up to the last that is summed and as
    // many as fill vectors.
    unsafe {
        for (number, column) in columns.clone().step_by(SIDE).enumerate() {
            let to = to.add(number * strip);
            let first = tiles.start * SIDE;
            for at in first..inner.end {
                std::ptr::copy_nonoverlapping(word(at, column), to.add((at - first) * SIDE), SIDE);
            }
            to.add((inner.end - first) * SIDE).write_bytes(0, strip - (inner.end - first) * SIDE);
        }
    }
    Strips::packed(to, next(count, strip))
}

/// Runs a function for each vector of a square's sums, where it lies in the result, and how many lanes of it are of the
/// result.
///
/// # Safety
/// As for [`product`].
#[inline(always)]
unsafe fn each_line<V: Vector>(
    sums: *mut f32,
    rows: &Range<usize>,
    columns: &Range<usize>,
    output: Output,
    run: impl Fn(*mut f32, *mut f32, usize),
) {
    for (number, row) in rows.clone().enumerate() {
        for first in (0..columns.len()).step_by(V::LANES) {
            // SAFETY: the sums are of a square, and the caller vouches for these elements of the result.
            unsafe {
                let to = output.values.add(row * output.stride + columns.start + first);
                run(sums.add(number * SQUARE + first), to, V::LANES.min(columns.len() - first));
            }
        }
    }
}
