//! A weight in NF4, which products widen.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::sync::Arc;

use super::InstructionSet;
use super::product::{BlockWeight, Order, WeightBlock};
use super::simd::{Routine, Vector};
use crate::fingerprint;
use crate::weights::{Absmax, LookUp, Nf4Matrix, Pairs};

/// The most rows that are dequantised together where columns are to lie contiguously: one for each lane.
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
            Absmax::Linear { codes, factors, mean, .. } => {
                let codes: Vec<u8> = codes.iter().map(|code| code.cast_unsigned()).collect();
                vec![fingerprint::of_bytes(&codes), fingerprint::of_f32(factors), fingerprint::of_f32(&[*mean])]
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
        // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
        unsafe { set.run(Widen { matrix: &self.0, part, target }) };
    }
}

/// Dequantises a part; see [`BlockWeight::widen`].
struct Widen<'a> {
    matrix: &'a Nf4Matrix,
    part: WeightBlock,
    target: &'a mut [f32],
}

impl Routine for Widen<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { matrix, part: WeightBlock { rows, columns, order, stride }, target } = self;
        let in_features = matrix.shape[1];
        match order {
            Order::Rows => {
                for (index, row) in rows.enumerate() {
                    let first = row * in_features + columns.start;
                    matrix.dequantize_with::<Lanes<V>>(first, &mut target[index * stride..][..columns.len()]);
                }
            }
            Order::Columns => {
                for first_column in columns.clone().step_by(COLUMNS) {
                    let count = COLUMNS.min(columns.end - first_column);
                    for first_row in rows.clone().step_by(V::LANES) {
                        let mut values = [[0.0; COLUMNS]; ROWS];
                        let height = V::LANES.min(rows.end - first_row);
                        for (row, values) in (first_row..).zip(&mut values[..height]) {
                            matrix.dequantize_with::<Lanes<V>>(row * in_features + first_column, &mut values[..count]);
                        }
                        let at = (first_column - columns.start) * stride + first_row - rows.start;
                        if height == V::LANES {
                            let lines = values.each_ref().map(|values| values.as_ptr());
                            let target = &mut target[at..][..(count - 1) * stride + height];
                            // SAFETY: the caller vouches for the instructions; each line has so many values, and each
                            // column of the target as many as there are lanes.
                            unsafe { V::transpose(&lines[..height], count, target.as_mut_ptr(), stride) };
                            continue;
                        }
                        for column in 0..count {
                            let target = &mut target[at + column * stride..][..height];
                            target.iter_mut().zip(&values).for_each(|(target, values)| *target = values[column]);
                        }
                    }
                }
            }
        }
    }
}

/// Looks values up for all lanes of a vector at once. For use within [`Widen`], whose caller vouches for the
/// instructions.
struct Lanes<V>(PhantomData<V>);

impl<V: Vector> LookUp for Lanes<V> {
    #[inline(always)]
    fn look_up(values: &[f32; 16], codes: &[u8], decoded: &mut [f32]) {
        let whole = decoded.len() / V::LANES * V::LANES;
        let (of_whole, others) = codes.split_at(whole / 2);
        for (decoded, codes) in decoded.chunks_exact_mut(V::LANES).zip(of_whole.chunks_exact(V::LANES / 2)) {
            // SAFETY: the caller vouches for the instructions; there are codes and room for all lanes.
            unsafe { V::look_up(values, codes.as_ptr()).store(decoded.as_mut_ptr()) };
        }
        Pairs::look_up(values, others, &mut decoded[whole..]);
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
            let nf4 = Nf4 { block_size, ..Nf4::default() };
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
