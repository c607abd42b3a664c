//! A product in plain loops: what the kernels of every instruction set are compared with.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::{Finish, InstructionSet, Right, Target, View};

/// Rows of a tile.
const ROWS: usize = 4;
/// Columns of a tile.
const COLUMNS: usize = 8;
/// Inner dimension of a packed panel.
const INNER: usize = 256;

/// `c (+)= scale · a · b (+ bias)`.
///
/// # Safety
/// Nobody else may read or write these elements of `c` meanwhile.
pub(super) unsafe fn product<R: Right>(a: View<'_>, b: R, finish: Finish<'_>, c: Target<'_>) {
    let mut panel = [0.0; INNER * COLUMNS];
    for start in (0..b.rows()).step_by(INNER) {
        let inner = start..b.rows().min(start + INNER);
        let finish = if start == 0 { finish } else { finish.later() };
        for first_column in (0..b.columns()).step_by(COLUMNS) {
            let columns = first_column..b.columns().min(first_column + COLUMNS);
            let panel = &mut panel[..inner.len() * COLUMNS];
            // SAFETY: every machine has this set.
            unsafe { b.pack(InstructionSet::Portable, inner.clone(), columns.clone(), COLUMNS, panel) };
            for first_row in (0..a.rows()).step_by(ROWS) {
                let tile = tile(a, first_row, inner.clone(), panel);
                for (row, sums) in (first_row..a.rows()).zip(&tile) {
                    // SAFETY: the caller vouches for these elements.
                    let target = unsafe { c.row(row, columns.clone()) };
                    finish.of_columns(columns.clone()).row(sums, target);
                }
            }
        }
    }
}

/// A tile of the product; rows beyond the last of `a` repeat that one.
fn tile(a: View<'_>, first_row: usize, inner: Range<usize>, panel: &[f32]) -> [[f32; COLUMNS]; ROWS] {
    let mut sums = [[0.0; COLUMNS]; ROWS];
    for (step, weights) in inner.zip(panel.chunks_exact(COLUMNS)) {
        for (row, sums) in sums.iter_mut().enumerate() {
            let x = a.at((first_row + row).min(a.rows() - 1), step);
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += x * weight);
        }
    }
    sums
}
