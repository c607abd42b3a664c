//! Tests of products of few rows.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use half::bf16;

use super::super::{Element, Finish, InstructionSet, Target, View};
use super::of_pairs;
use crate::ops::{FEW_ROWS, Write};

const SHAPES: [[usize; 2]; 9] = [[1, 1], [3, 7], [4, 8], [5, 31], [7, 16], [9, 65], [33, 100], [2, 0], [6, 1000]];
/// Values of a border, which nobody may read or write.
const BORDER: usize = 40;

/// Values of few bits, whose products sum exactly in f32, between borders of NaN.
fn poisoned<T: Element>(count: usize, seed: usize, of: fn(f32) -> T) -> Vec<T> {
    let value = |index: usize| of(((index * 37 + seed * 11) % 23) as f32 - 11.0);
    let border = || (0..BORDER).map(|_| of(f32::NAN));
    border().chain((0..count).map(value)).chain(border()).collect()
}

/// Runs a kernel for every shape and number of rows, and compares each element with the definition.
fn check<A: Element, B: Element>(
    of_left: fn(f32) -> A,
    of_right: fn(f32) -> B,
    scale: f32,
    kernel: impl Fn(View<'_, A>, View<'_, B>, Finish<'_>, Target<'_>),
) {
    for [columns, inner] in SHAPES {
        let right = poisoned(columns * inner, 2, of_right);
        let right = &right[BORDER..][..columns * inner];
        let b = View::new(right, columns, inner, inner).transposed();
        for rows in 1..=FEW_ROWS {
            let left = poisoned(rows * inner, 1, of_left);
            let left = &left[BORDER..][..rows * inner];
            // A column more than is written.
            let stride = columns + 1;
            let mut c = vec![0.5; rows * stride];
            let a = View::new(left, rows, inner, inner);
            kernel(a, b, Finish { scale, bias: None, write: Write::Add }, Target::new(&mut c, stride));
            for (row, found) in c.chunks(stride).enumerate() {
                for (column, found) in found[..columns].iter().enumerate() {
                    let term = |index: usize| left[row * inner + index].widen() * right[column * inner + index].widen();
                    let expected = 0.5 + scale * (0..inner).map(term).sum::<f32>();
                    assert_eq!(*found, expected, "{rows}x{columns}x{inner} at {row}, {column}");
                }
                assert_eq!(found[columns], 0.5, "beyond the columns");
            }
        }
    }
}

#[test]
fn every_set_computes_the_definition_within_its_borders() {
    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
        // SAFETY: one thread.
        check(|x| x, |x| x, 0.5, |a, b, finish, c| unsafe { super::of_floats(set, a, b, finish, c) });
        // SAFETY: one thread.
        check(|x| x, bf16::from_f32, 2.0, |a, b, finish, c| unsafe { super::of_floats(set, a, b, finish, c) });
        if set.multiplies_pairs() {
            let few = |a: View<'_, bf16>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>| {
                // SAFETY: one thread, and the machine has the set.
                unsafe { of_pairs(set, a, b, finish, c) }
            };
            check(bf16::from_f32, bf16::from_f32, 2.0, few);
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_company() {
    const COLUMNS: usize = 21;
    const INNER: usize = 333;
    let value = |index: usize| ((index * 7919) % 1009) as f32 / 1009.0 - 0.5;
    let left: Vec<f32> = (0..FEW_ROWS * INNER).map(value).collect();
    let right: Vec<f32> = (0..COLUMNS * INNER).map(|index| value(index + 5)).collect();
    let product = |set, rows: std::ops::Range<usize>| {
        let mut c = vec![f32::NAN; rows.len() * COLUMNS];
        let a = View::new(&left[rows.start * INNER..], rows.len(), INNER, INNER);
        let b = View::new(&right, COLUMNS, INNER, INNER).transposed();
        // SAFETY: one thread.
        unsafe {
            super::of_floats(
                set,
                a,
                b,
                Finish { scale: 1.0, bias: None, write: Write::Replace },
                Target::new(&mut c, COLUMNS),
            )
        };
        c
    };
    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
        let together = product(set, 0..FEW_ROWS);
        for row in 0..FEW_ROWS {
            assert_eq!(product(set, row..row + 1), together[row * COLUMNS..][..COLUMNS], "{} row {row}", set.name());
        }
    }
}

/// Values of every size, denormal ones, products that are denormal, and zeros of both signs among them: the bits of a
/// row in tiles are the same alone or among others, and those of the emulation.
#[cfg(target_arch = "x86_64")]
#[test]
fn in_tiles_no_bit_of_a_row_depends_on_its_company() {
    const COLUMNS: usize = 37;
    let sets = [InstructionSet::Amx, InstructionSet::AmxEmulated].into_iter().filter(|set| set.is_available());
    for (set, inner) in sets.flat_map(|set| [(set, 1), (set, 32), (set, 333), (set, 640)]) {
        // A sign, seven bits of a number, and an exponent: in turns of rows whose products are zero, about the smallest
        // number that is not denormal, and larger.
        let value = |row: usize, at: usize| {
            let bits = (row * 9973 + at * 40_503) as u16;
            let exponents = [[0, 1, 30, 60], [62, 63, 64, 65], [63, 66, 100, 127]][row % 3];
            bf16::from_bits(bits & 0x807f | exponents[usize::from(bits >> 9 & 3)] << 7)
        };
        let values = |rows: usize| -> Vec<bf16> { (0..rows * inner).map(|at| value(at / inner, at % inner)).collect() };
        let (left, right) = (values(FEW_ROWS), values(COLUMNS));
        let product = |set, rows: std::ops::Range<usize>| {
            let mut c = vec![f32::NAN; rows.len() * COLUMNS];
            let a = View::new(&left[rows.start * inner..], rows.len(), inner, inner);
            let b = View::new(&right, COLUMNS, inner, inner).transposed();
            let finish = Finish { scale: 1.0, bias: None, write: Write::Replace };
            // SAFETY: one thread, and the machine has the set.
            unsafe { of_pairs(set, a, b, finish, Target::new(&mut c, COLUMNS)) };
            c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let together = product(InstructionSet::AmxEmulated, 0..FEW_ROWS);
        let smallest = together.iter().map(|bits| f32::from_bits(*bits).abs()).filter(|sum| *sum > 0.0);
        assert!(smallest.fold(1.0, f32::min) < 1e-35, "sums about the smallest number that is not denormal");
        for rows in [0..1, 5..7, 6..9, 10..14, 3..8, 0..16] {
            let expected = &together[rows.start * COLUMNS..rows.end * COLUMNS];
            assert_eq!(product(set, rows.clone()), expected, "{set} {inner} {rows:?}");
        }
    }
}
