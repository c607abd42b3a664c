//! A weight in NF4, which products widen.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use std::ops::Range;
use std::sync::Arc;

#[cfg(target_arch = "x86_64")]
use half::bf16;

use super::InstructionSet;
use super::product::{BlockWeight, Order, WeightBlock};
#[cfg(target_arch = "x86_64")]
use super::simd::transposed;
use super::simd::{Routine, Vector};
#[cfg(target_arch = "x86_64")]
use crate::checkpoint::Dtype;
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

    #[cfg(target_arch = "x86_64")]
    fn widen_pairs(&self, set: InstructionSet, part: WeightBlock, words: &mut [u32]) -> bool {
        let matrix = &self.0;
        let is_even =
            |range: &Range<usize>, part: usize| range.start.is_multiple_of(part) && range.len().is_multiple_of(part);
        // Sixteen rows of 16 words, or a word of 16 columns, are looked up at a time: in one block each, from a whole
        // byte on.
        let fits = match part.order {
            Order::Columns => part.rows.len().is_multiple_of(16) && is_even(&part.columns, 32),
            Order::Rows => part.rows.len().is_multiple_of(2) && is_even(&part.columns, 16),
        };
        if !(fits && is_looked_up(matrix, set)) {
            return false;
        }
        // SAFETY: such a set is only ever chosen where the machine has these instructions.
        unsafe {
            match part.order {
                Order::Columns => pairs_of_rows(matrix, &part, words),
                Order::Rows => pairs_of_columns(matrix, &part, words),
            }
        }
        true
    }

    #[cfg(target_arch = "x86_64")]
    fn widen_halves(&self, set: InstructionSet, rows: Range<usize>, halves: &mut [bf16]) -> bool {
        let is_looked_up = is_looked_up(&self.0, set);
        if is_looked_up {
            // SAFETY: such a set is only ever chosen where the machine has these instructions.
            unsafe { halves_of_rows(&self.0, rows, halves) };
        }
        is_looked_up
    }
}

/// Whether values are looked up as bf16: rows are then whole vectors of them, each in one block. What is rounded to f16
/// first is looked up one by one.
#[cfg(target_arch = "x86_64")]
fn is_looked_up(matrix: &Nf4Matrix, set: InstructionSet) -> bool {
    let lies_well = matrix.shape[1].is_multiple_of(32) && matrix.block_size.is_multiple_of(32);
    set.multiplies_pairs() && lies_well && matrix.block_size.is_power_of_two() && matrix.dtype != Dtype::F16
}

/// Thirty-two elements from a multiple of as many on, by their codes and what the levels stand for, in bf16.
///
/// # Safety
/// The machine has the instructions.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn halves_of(matrix: &Nf4Matrix, first: usize, shift: u32) -> __m512i {
    let codes: &[u8; 16] = matrix.codes[first / 2..].first_chunk().expect("codes of 32 elements");
    // SAFETY: the caller vouches for the instructions, and the codes are as long as what is read.
    unsafe {
        let levels = _mm512_cvtepi32_epi16(levels_of(matrix, first >> shift));
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.as_ptr().cast()));
        // The first of a byte is in its high half.
        let second = _mm512_slli_epi32::<16>(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
        let lanes = _mm512_or_si512(_mm512_srli_epi32::<4>(bytes), second);
        _mm512_permutexvar_epi16(lanes, _mm512_castsi256_si512(levels))
    }
}

/// Rows in bf16.
///
/// # Safety
/// The machine has the instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn halves_of_rows(matrix: &Nf4Matrix, rows: Range<usize>, halves: &mut [bf16]) {
    let shift = matrix.block_size.trailing_zeros();
    let firsts = (rows.start * matrix.shape[1]..).step_by(32);
    for (first, halves) in firsts.zip(halves.as_chunks_mut::<32>().0) {
        // SAFETY: the caller vouches for the instructions; there is room for all lanes.
        unsafe { _mm512_storeu_si512(halves.as_mut_ptr().cast(), halves_of(matrix, first, shift)) };
    }
}

/// What the levels stand for in a block, in bf16: in the low half of each lane.
///
/// # Safety
/// The machine has the instructions.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn levels_of(matrix: &Nf4Matrix, block: usize) -> __m512i {
    // SAFETY: there are sixteen levels.
    let levels = unsafe { _mm512_loadu_ps(matrix.levels.as_ptr()) };
    let values = _mm512_mul_ps(levels, _mm512_set1_ps(matrix.absmax.of(block)));
    // To the nearest, as [`super::rounding::nearest`].
    let (bits, high) = (_mm512_castps_si512(values), _mm512_srli_epi32::<16>(_mm512_castps_si512(values)));
    let up = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, up));
    let is_no_number = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    _mm512_mask_or_epi32(rounded, is_no_number, high, _mm512_set1_epi32(0x40))
}

/// A word of two elements of a row each: those of a byte.
///
/// # Safety
/// The machine has the instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pairs_of_rows(matrix: &Nf4Matrix, part: &WeightBlock, words: &mut [u32]) {
    let WeightBlock { rows, columns, stride, .. } = part;
    let shift = matrix.block_size.trailing_zeros();
    for first_row in rows.clone().step_by(16) {
        for column in columns.clone().step_by(32) {
            let mut square = [_mm512_setzero_ps(); 16];
            for (row, line) in (first_row..).zip(&mut square) {
                // SAFETY: the caller vouches for the instructions.
                *line = _mm512_castsi512_ps(unsafe { halves_of(matrix, row * matrix.shape[1] + column, shift) });
            }
            let at = (column - columns.start) / 2 * stride + first_row - rows.start;
            // SAFETY: the caller vouches for the instructions.
            for (line, word) in unsafe { transposed(square) }.into_iter().zip(0..) {
                let target: &mut [u32; 16] = words[at + word * stride..].first_chunk_mut().expect("a word of each row");
                // SAFETY: there is room for all lanes.
                unsafe { _mm512_storeu_ps(target.as_mut_ptr().cast(), line) };
            }
        }
    }
}

/// A word of two elements of a column each.
///
/// # Safety
/// The machine has the instructions.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pairs_of_columns(matrix: &Nf4Matrix, part: &WeightBlock, words: &mut [u32]) {
    let WeightBlock { rows, columns, stride, .. } = part;
    let shift = matrix.block_size.trailing_zeros();
    for (row, line) in rows.clone().step_by(2).zip(words.chunks_mut(*stride)) {
        let firsts = [row, row + 1].map(|row| row * matrix.shape[1]);
        // The blocks that the two rows are in, and their levels.
        let (mut blocks, mut levels) = ([usize::MAX; 2], [_mm512_setzero_si512(); 2]);
        for (column, target) in columns.clone().step_by(16).zip(line.as_chunks_mut::<16>().0) {
            let mut halves = [_mm512_setzero_si512(); 2];
            for of_row in 0..2 {
                let first = firsts[of_row] + column;
                let codes: &[u8; 8] = matrix.codes[first / 2..].first_chunk().expect("codes of 16 elements");
                // SAFETY: the caller vouches for the instructions, and the codes are as long as what is read.
                unsafe {
                    if blocks[of_row] != first >> shift {
                        blocks[of_row] = first >> shift;
                        levels[of_row] = levels_of(matrix, first >> shift);
                    }
                    let bytes = _mm_loadl_epi64(codes.as_ptr().cast());
                    let half = _mm_set1_epi8(15);
                    let (high, low) = (_mm_and_si128(_mm_srli_epi16::<4>(bytes), half), _mm_and_si128(bytes, half));
                    let lanes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(high, low));
                    halves[of_row] = _mm512_permutexvar_epi32(lanes, levels[of_row]);
                }
            }
            let both = _mm512_or_si512(halves[0], _mm512_slli_epi32::<16>(halves[1]));
            // SAFETY: there is room for all lanes.
            unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), both) };
        }
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
    #[cfg(target_arch = "x86_64")]
    use crate::cpu::rounding::nearest;
    #[cfg(target_arch = "x86_64")]
    use crate::weights::Codebook;
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

    /// The words of products in bf16 are the rounded values, of every part that is looked up in pairs; others are left
    /// to the caller.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn pairs_are_the_rounded_values() {
        let shape = [64, 192];
        let values: Vec<f32> =
            (0..shape[0] * shape[1]).map(|at| (0.37 * at as f32).cos() * 1.5f32.powi(at as i32 % 90 - 45)).collect();
        let rows = ValueRows::new(&values, shape[1]);
        for (codebook, dtype, double_quantization, block_size) in [
            (Codebook::Nf4, Dtype::BF16, true, 64),
            (Codebook::Nf4, Dtype::F32, false, 32),
            (Codebook::Fp4, Dtype::F32, true, 128),
        ] {
            let nf4 = Nf4 { codebook, block_size, double_quantization };
            let matrix = Nf4Matrix::quantize(&rows, shape, dtype, nf4).unwrap();
            let mut expected = vec![0.0; values.len()];
            matrix.dequantize(0, &mut expected);
            let expected: Vec<u32> = expected.iter().map(|value| u32::from(nearest(*value).to_bits())).collect();
            let weight = Nf4Weight(Arc::new(matrix));
            for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
                for (rows, columns, order) in [
                    (0..64, 0..192, Order::Columns),
                    (16..64, 96..128, Order::Columns),
                    (0..64, 0..192, Order::Rows),
                    (32..34, 48..96, Order::Rows),
                ] {
                    let stride = 5 + if order == Order::Columns { rows.len() } else { columns.len() };
                    let words = if order == Order::Columns { columns.len() / 2 } else { rows.len() / 2 };
                    let mut target = vec![7; words * stride];
                    let part = WeightBlock { rows: rows.clone(), columns: columns.clone(), order, stride };
                    assert_eq!(weight.widen_pairs(set, part, &mut target), set.multiplies_pairs());
                    if !set.multiplies_pairs() {
                        continue;
                    }
                    let element =
                        |row: usize, column: usize| expected[(rows.start + row) * shape[1] + columns.start + column];
                    for (word, line) in target.chunks(stride).enumerate() {
                        for (at, found) in line[..stride - 5].iter().enumerate() {
                            let (low, high) = match order {
                                Order::Columns => (element(at, 2 * word), element(at, 2 * word + 1)),
                                Order::Rows => (element(2 * word, at), element(2 * word + 1, at)),
                            };
                            assert_eq!(*found, low | high << 16, "{} {order:?} {word} {at}", set.name());
                        }
                        assert_eq!(line[stride - 5..], [7; 5], "between the words");
                    }
                }
                let mut halves = vec![bf16::ZERO; 5 * shape[1]];
                assert_eq!(weight.widen_halves(set, 3..8, &mut halves), set.multiplies_pairs());
                if set.multiplies_pairs() {
                    let found = halves.iter().map(|half| u32::from(half.to_bits()));
                    assert!(found.eq(expected[3 * shape[1]..8 * shape[1]].iter().copied()), "{}", set.name());
                }
                for (rows, columns, order) in
                    [(0..60, 0..192, Order::Columns), (0..64, 16..48, Order::Columns), (1..2, 0..192, Order::Rows)]
                {
                    let part = WeightBlock { rows, columns, order, stride: 192 };
                    assert!(!weight.widen_pairs(set, part, &mut vec![0; 64 * 192]));
                }
            }
        }
    }
}
