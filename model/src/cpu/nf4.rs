//! A weight in NF4, which products widen.

use std::sync::Arc;

use super::InstructionSet;
use super::instructions::multiversion;
use super::product::{BlockWeight, Order, WeightBlock};
use crate::fingerprint;
use crate::weights::{Absmax, Nf4Matrix};

/// Rows that are dequantised together where columns are to lie contiguously.
const ROWS: usize = 16;
/// Columns that are dequantised at a time there.
const COLUMNS: usize = 64;

/// A weight `[out, in]`.
pub(super) struct Nf4Weight(pub(super) Arc<Nf4Matrix>);

impl BlockWeight for Nf4Weight {
    fn shape(&self) -> [usize; 2] {
        self.0.shape
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn fingerprint(&self) -> u64 {
        let of_absmax = match &self.0.absmax {
            Absmax::Plain(absmax) => vec![fingerprint::of_f32(absmax)],
            Absmax::Nested { codes, absmax, levels, offset, .. } => {
                let of_floats = [&absmax[..], levels, &[*offset]].map(fingerprint::of_f32);
                [fingerprint::of_bytes(codes)].into_iter().chain(of_floats).collect()
            }
        };
        let of_codes = [fingerprint::of_bytes(&self.0.codes), fingerprint::of_f32(&self.0.levels)];
        fingerprint::of_parts(&[&of_codes[..], &of_absmax].concat())
    }

    fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]) {
        self.0.dequantize(row * self.0.shape[1], target);
        target.iter_mut().for_each(|value| *value *= factor);
    }

    fn widen(&self, set: InstructionSet, part: WeightBlock, target: &mut [f32]) {
        widen(set, &self.0, part, target);
    }
}

multiversion! {
    /// See [`BlockWeight::widen`].
    fn widen(matrix: &Nf4Matrix, part: WeightBlock, target: &mut [f32]) {
        let WeightBlock { rows, columns, order, stride } = part;
        let in_features = matrix.shape[1];
        match order {
            Order::Rows => {
                for (index, row) in rows.enumerate() {
                    let first = row * in_features + columns.start;
                    matrix.dequantize(first, &mut target[index * stride..][..columns.len()]);
                }
            }
            Order::Columns => {
                for first_column in columns.clone().step_by(COLUMNS) {
                    let count = COLUMNS.min(columns.end - first_column);
                    for first_row in rows.clone().step_by(ROWS) {
                        let mut values = [[0.0; COLUMNS]; ROWS];
                        let height = ROWS.min(rows.end - first_row);
                        for (row, values) in (first_row..).zip(&mut values[..height]) {
                            matrix.dequantize(row * in_features + first_column, &mut values[..count]);
                        }
                        for column in 0..count {
                            let at = (first_column - columns.start + column) * stride + first_row - rows.start;
                            let target = &mut target[at..][..height];
                            target.iter_mut().zip(&values).for_each(|(target, values)| *target = values[column]);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Dtype, ValueRows};
    use crate::weights::Nf4;

    /// Rows of an odd number of values begin within a byte, and blocks end within rows.
    #[test]
    fn any_part_has_the_dequantised_values_however_they_lie() {
        for (shape, block_size) in [([37, 45], 32), ([19, 128], 64), ([40, 100], 64), ([3, 1], 64)] {
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(|at| (0.37 * at as f32).cos()).collect();
            let nf4 = Nf4 { block_size, double_quantization: true };
            let rows = ValueRows::new(&values, shape[1]);
            let matrix = Nf4Matrix::quantize(&rows, shape, Dtype::BF16, nf4).unwrap();
            let mut expected = vec![0.0; values.len()];
            matrix.dequantize(0, &mut expected);
            assert_ne!(expected, values);
            let weight = Nf4Weight(Arc::new(matrix));
            let parts = [(0..shape[0], 0..shape[1]), (1..shape[0], shape[1] / 3..shape[1]), (2..3, 0..1)];
            for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
                for ((rows, columns), order) in
                    parts.iter().flat_map(|part| [(part, Order::Rows), (part, Order::Columns)])
                {
                    let (height, width) = (rows.len(), columns.len());
                    let stride = 3 + height.max(width);
                    let mut target = vec![f32::NAN; stride * height.max(width)];
                    let part = WeightBlock { rows: rows.clone(), columns: columns.clone(), order, stride };
                    weight.widen(set, part, &mut target);
                    for (row, column) in (0..height).flat_map(|row| (0..width).map(move |column| (row, column))) {
                        let found = match order {
                            Order::Rows => target[row * stride + column],
                            Order::Columns => target[column * stride + row],
                        };
                        let at = (rows.start + row) * shape[1] + columns.start + column;
                        assert_eq!(found, expected[at], "{shape:?} {} {order:?}", set.name());
                    }
                }
            }
        }
    }
}
