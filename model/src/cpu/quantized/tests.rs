//! Tests of quantised weights.

use half::bf16;

use super::super::operand::Operand;
use super::super::product::{BlockWeight, Element, Finish, View, ViewMut};
use super::rows::QuantizedRows;
use super::{BLOCK, Bits, Cpu, GROUP, InstructionSet, Quantized};
use crate::checkpoint::{CheckpointError, RowBytes};
use crate::ops::{Compute, Write};
use crate::weights::{Activations, BlockFormat, Quantization, TensorType};

const FORMATS: [BlockFormat; 2] = [BlockFormat::Int8, BlockFormat::Int4];
/// Rows, outputs, inputs.
const SHAPES: [[usize; 3]; 8] =
    [[1, 1, 1], [1, 16, 32], [2, 17, 31], [3, 5, 33], [7, 33, 100], [8, 31, 64], [9, 48, 257], [20, 40, 65]];
/// Values of a border, which nobody may read or write.
const BORDER: usize = 40;

/// About normally distributed values.
fn normal(count: usize, seed: usize) -> Vec<f32> {
    let mut state = seed as u32 * 2 + 1;
    let mut uniform = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| 0.05 * (0..12).map(|_| uniform()).sum::<f32>()).collect()
}

fn cpu(threads: usize, set: InstructionSet) -> Cpu {
    let cpu = Cpu::with_instructions(threads, Compute::F32, set).expect("a set that is available");
    cpu.quantizing(Quantization { format: BlockFormat::Int8, activations: Activations::Int8 })
}

fn sets() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL.into_iter().filter(|set| set.is_available())
}

fn values(weight: &Quantized) -> Vec<f32> {
    let mut values = vec![f32::NAN; weight.out_features * weight.in_features];
    let rows = values.chunks_mut(weight.in_features).enumerate();
    rows.for_each(|(row, target)| weight.copy_row(row, 1.0, target));
    values
}

fn product(cpu: &Cpu, x: &[f32], weight: &Quantized, write: Write, rows: usize) -> Vec<f32> {
    let (columns, inner) = (weight.out_features, weight.in_features);
    let mut poisoned = vec![f32::NAN; BORDER];
    poisoned.extend(x);
    poisoned.resize(x.len() + 2 * BORDER, f32::NAN);
    // A column more than is written.
    let mut c = vec![0.5; rows * (columns + 1)];
    let view = View::new(&poisoned[BORDER..][..x.len()], rows, inner, inner);
    let target = ViewMut::new(&mut c, rows, columns + 1, columns + 1).column_range(0..columns);
    cpu.quantized_product(Operand::F32(view), weight, Finish { scale: 1.0, bias: None, write }, target);
    assert!(c.chunks(columns + 1).all(|row| row[columns] == 0.5), "beyond the columns");
    c.chunks(columns + 1).flat_map(|row| row[..columns].to_vec()).collect()
}

#[test]
fn numbers_are_the_nearest_of_their_block() {
    for format in FORMATS {
        for [_, out_features, in_features] in SHAPES {
            let exact = normal(out_features * in_features, 3);
            let weight = Quantized::new(&cpu(2, InstructionSet::detect()), out_features, in_features, &exact, format);
            for (exact, found) in exact.chunks(in_features).zip(values(&weight).chunks(in_features)) {
                for (exact, found) in exact.chunks(BLOCK).zip(found.chunks(BLOCK)) {
                    let largest = exact.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    // Half a step, which rounding the scale makes a little longer; a number beyond the range of 4 bits
                    // is further off.
                    let most = match format {
                        BlockFormat::Int8 => largest / 127.0 * 0.51,
                        _ => largest / 6.5 * 0.51 + largest * 0.13,
                    };
                    let furthest = exact.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(furthest <= most, "{format:?}: {furthest} of {largest}");
                }
            }
        }
    }
}

/// The root of the mean squared error, as a share of the values', on normally distributed ones.
fn relative_error(exact: &[f32], found: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x) * f64::from(x)).sum::<f64>();
    let errors = squares(&mut exact.iter().zip(found).map(|(a, b)| a - b));
    (errors / squares(&mut exact.iter().copied())).sqrt()
}

#[test]
fn the_error_stays_within_its_bounds() {
    let exact = normal(64 * 1024, 7);
    let error = |format| {
        let weight = Quantized::new(&cpu(1, InstructionSet::detect()), 64, 1024, &exact, format);
        relative_error(&exact, &values(&weight))
    };
    // GGUF's `q4_0`: the number with the largest magnitude becomes -8.
    let plain: Vec<f32> = exact
        .chunks(BLOCK)
        .flat_map(|block| {
            let largest = block.iter().fold(0.0f32, |largest, &x| if x.abs() > largest.abs() { x } else { largest });
            let scale = largest / -8.0;
            block.iter().map(move |x| (x / scale).round_ties_even().clamp(-8.0, 7.0) * scale).collect::<Vec<_>>()
        })
        .collect();
    let (eight, four, plain) = (error(BlockFormat::Int8), error(BlockFormat::Int4), relative_error(&exact, &plain));
    println!("8 bits {eight:.4}, 4 bits {four:.4}, q4_0 {plain:.4}");
    assert!(eight < 0.006 && four < 0.085 && four < 0.95 * plain, "{eight} {four} {plain}");
}

#[test]
fn every_set_gives_the_bits_of_the_portable_one_on_any_number_of_threads() {
    for format in FORMATS {
        for [rows, out_features, in_features] in SHAPES {
            let portable = cpu(1, InstructionSet::Portable);
            let weight = normal(out_features * in_features, 5);
            let x = normal(rows * in_features, 6);
            let expected_weight = Quantized::new(&portable, out_features, in_features, &weight, format);
            let expected = product(&portable, &x, &expected_weight, Write::Add, rows);
            for set in sets() {
                for threads in 1..=3 {
                    let cpu = cpu(threads, set);
                    let weight = Quantized::new(&cpu, out_features, in_features, &weight, format);
                    assert_eq!(weight.fingerprint(), expected_weight.fingerprint(), "{}", set.name());
                    let found = product(&cpu, &x, &weight, Write::Add, rows);
                    assert_eq!(found, expected, "{format:?} {rows}x{out_features}x{in_features} {}", set.name());
                }
            }
        }
    }
}

#[test]
fn a_product_is_that_of_the_numbers() {
    for format in FORMATS {
        for [rows, out_features, in_features] in SHAPES {
            let cpu = cpu(2, InstructionSet::detect());
            let weight = normal(out_features * in_features, 8);
            let weight = Quantized::new(&cpu, out_features, in_features, &weight, format);
            let x = normal(rows * in_features, 9);
            let found = product(&cpu, &x, &weight, Write::Replace, rows);
            let quantized = QuantizedRows::new(
                &cpu,
                Operand::F32(View::new(&x, rows, in_features, in_features)),
                in_features,
                Bits::of(format),
            );
            let weights = values(&weight);
            for (index, found) in found.into_iter().enumerate() {
                let (row, column) = (index / out_features, index % out_features);
                let numbers = quantized.row(row);
                let x = |at: usize| {
                    f64::from(numbers.values[at / BLOCK][at % BLOCK]) * f64::from(numbers.scales[at / BLOCK])
                };
                let expected: f64 =
                    (0..in_features).map(|at| x(at) * f64::from(weights[column * in_features + at])).sum();
                assert!((f64::from(found) - expected).abs() < 1e-5, "{found} {expected}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_company() {
    let cpu = cpu(2, InstructionSet::detect());
    let weight = Quantized::new(&cpu, 3 * GROUP, 100, &normal(3 * GROUP * 100, 1), BlockFormat::Int4);
    let x = normal(30 * 100, 2);
    let together = product(&cpu, &x, &weight, Write::Replace, 30);
    for (x, expected) in x.chunks(100).zip(together.chunks(3 * GROUP)) {
        assert_eq!(product(&cpu, x, &weight, Write::Replace, 1), expected);
    }
}

#[test]
fn what_is_not_finite_stays_so_and_nothing_stays_zero() {
    let cpu = cpu(1, InstructionSet::detect());
    for format in FORMATS {
        let mut weight = vec![0.0; 2 * BLOCK];
        weight[3] = f32::INFINITY;
        let weight = Quantized::new(&cpu, 2, BLOCK, &weight, format);
        let found = product(&cpu, &[1.0; BLOCK], &weight, Write::Replace, 1);
        assert!(found[0].is_nan() && found[1] == 0.0, "{found:?}");
        let of_ones = Quantized::new(&cpu, 1, BLOCK, &[bf16::ONE.widen(); BLOCK], format);
        let mut x = [1.0; BLOCK];
        x[5] = f32::NAN;
        assert!(product(&cpu, &x, &of_ones, Write::Replace, 1)[0].is_nan());
        let tiny = product(&cpu, &[1e-38; BLOCK], &of_ones, Write::Replace, 1)[0];
        assert!(tiny.abs() < 1e-30, "{tiny}");
    }
}

/// Rows in ggml's blocks, in memory.
struct Blocks {
    bytes: Vec<u8>,
    row_bytes: usize,
}

impl Blocks {
    fn new(tensor_type: TensorType, values: &[f32], in_features: usize) -> Self {
        let mut bytes = vec![0; tensor_type.bytes(values.len())];
        tensor_type.encode(values, &mut bytes);
        Self { bytes, row_bytes: tensor_type.bytes(in_features) }
    }
}

impl RowBytes for Blocks {
    fn read_bytes(&self, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        bytes.copy_from_slice(&self.bytes[first * self.row_bytes..][..bytes.len()]);
        Ok(())
    }
}

#[test]
fn blocks_of_ggml_are_multiplied_as_they_are_stored() {
    for (tensor_type, format) in [(TensorType::Q8_0, BlockFormat::Int8), (TensorType::Q4_0, BlockFormat::Int4)] {
        let bits = Bits::stored(tensor_type, format).unwrap();
        for [rows, out_features, in_features] in [[1, 16, 32], [3, 17, 96], [8, 50, 256], [11, 1, 64]] {
            let mut exact = normal(out_features * in_features, 4);
            exact[..32].copy_from_slice(&[-1.0; 32]);
            let blocks = Blocks::new(tensor_type, &exact, in_features);
            let mut dequantised = vec![0.0; exact.len()];
            tensor_type.decode(&blocks.bytes, &mut dequantised);
            let x = normal(rows * in_features, 9);
            let of = |set| {
                let cpu = cpu(2, set);
                let weight = Quantized::of_blocks(&cpu, [out_features, in_features], &blocks, bits).unwrap();
                assert_eq!(values(&weight), dequantised, "{tensor_type:?}");
                let found = product(&cpu, &x, &weight, Write::Replace, rows);
                let view = View::new(&x, rows, in_features, in_features);
                (found, QuantizedRows::new(&cpu, Operand::F32(view), in_features, bits))
            };
            let (expected, quantized) = of(InstructionSet::Portable);
            for (index, found) in expected.iter().enumerate() {
                let (row, column) = (index / out_features, index % out_features);
                let numbers = quantized.row(row);
                let terms = (0..in_features).map(|at| {
                    let x = f64::from(numbers.values[at / BLOCK][at % BLOCK]) * f64::from(numbers.scales[at / BLOCK]);
                    x * f64::from(dequantised[column * in_features + at])
                });
                let sum: f64 = terms.sum();
                assert!((f64::from(*found) - sum).abs() < 1e-4, "{tensor_type:?}: {found} {sum}");
            }
            for set in sets() {
                assert_eq!(of(set).0, expected, "{tensor_type:?} {}", set.name());
            }
        }
    }
    assert_eq!(Bits::stored(TensorType::Q8_0, BlockFormat::Int4), None, "rounded to the 4 bits that are asked for");
    assert_eq!(Bits::stored(TensorType::Q4K, BlockFormat::Int8), None);
}
