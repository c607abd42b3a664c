//! Tests of quantised weights.

use std::path::Path;

use half::{bf16, f16};
use safetensors::SafeTensors;

use super::super::operand::Operand;
use super::super::product::{BlockWeight, Element, Finish, Order, View, ViewMut, WeightBlock};
use super::super::weight::Values;
use super::rows::{QuantizedRows, RowBlock};
use super::{BLOCK, Cpu, GROUP, InstructionSet, Layout, Quantized, QuantizedSide, shares};
use crate::checkpoint::{BlockRows, CheckpointError, RowBytes, Rows, ValueRows};
use crate::cpu::Tensor;
use crate::ops::{Compute, Linear, Ops, WeightRole, Write};
use crate::weights::{
    Activations, BlockDecoder, BlockFormat, Q4K, Q5K, Q6K, QuantisedScales, Quantization, TensorType,
};

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
    let finish = Finish { scale: 1.0, bias: None, write };
    cpu.quantized_products(Operand::F32(view), vec![QuantizedSide { weight, finish, c: target }]);
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
                Layout::of(format).unwrap(),
            );
            let weights = values(&weight);
            for (index, found) in found.into_iter().enumerate() {
                let (row, column) = (index / out_features, index % out_features);
                let numbers = quantized.row(row);
                let x = |at: usize| {
                    f64::from(numbers[at / BLOCK].numbers[at % BLOCK]) * f64::from(numbers[at / BLOCK].scale)
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

/// Of one layout, of others, and in f32 between them; more groups than parts.
#[test]
fn products_computed_together_have_the_bits_of_each_alone() {
    let in_features = 512;
    let kinds = [Some(TensorType::Q4K), Some(TensorType::Q4K), Some(TensorType::Q6K), None, Some(TensorType::Q6K)];
    let outs = [300, 16, 17, 20, 1];
    for set in sets() {
        for (threads, rows) in [(1, 1), (2, 1), (3, 1), (2, 11)] {
            let cpu = cpu(threads, set);
            let plain = Cpu::with_instructions(threads, Compute::F32, set).unwrap();
            let weights = kinds.iter().zip(outs).enumerate().map(|(seed, (kind, out_features))| {
                let (values, shape) = (normal(out_features * in_features, seed), [out_features, in_features]);
                match kind {
                    Some(kind) => {
                        let blocks = Blocks::new(*kind, &values, in_features);
                        cpu.frozen_weight(WeightRole::Matrix, shape, &blocks).unwrap()
                    }
                    None => plain.weight_of_rows(shape, &ValueRows::new(&values, in_features)).unwrap(),
                }
            });
            let weights: Vec<_> = weights.collect();
            let x = cpu.tensor(rows, in_features, &normal(rows * in_features, 9)).unwrap();
            let biases: Vec<_> = outs.iter().map(|out| cpu.tensor(1, *out, &normal(*out, 4)).unwrap()).collect();
            let mut together: [Tensor; 5] = Default::default();
            let products = weights.iter().zip(&biases).zip(&mut together);
            let products = products.map(|((weight, bias), y)| Linear { weight, bias: Some(bias), y });
            cpu.linear_each(&x, products.collect()).unwrap();
            for ((weight, bias), together) in weights.iter().zip(&biases).zip(&together) {
                let mut alone = Tensor::default();
                cpu.linear(&x, weight, Some(bias), Write::Replace, &mut alone).unwrap();
                let bits = |y: &Tensor| y.values().iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(together), bits(&alone), "{rows} rows, {threads} threads, {}", set.name());
            }
        }
    }
}

#[test]
fn parts_are_all_groups_in_their_order_and_the_last_ones_are_small() {
    for (groups, threads, least) in [(0, 2, 1), (1, 3, 4), (16, 2, 2), (352, 2, 2), (2048, 16, 1), (100, 1, 1)] {
        let parts = shares(groups, threads, least);
        assert!(parts.iter().all(|part| !part.is_empty()));
        assert_eq!(parts.iter().cloned().flatten().collect::<Vec<_>>(), (0..groups).collect::<Vec<_>>());
        if threads > 1 {
            assert!(parts.last().is_none_or(|last| last.len() <= least), "{parts:?}");
            assert!(parts.windows(2).all(|parts| parts[0].len() >= parts[1].len()), "{parts:?}");
        }
    }
}

/// Whatever lane of a vector it is in, and whatever else there is.
#[test]
fn a_scale_is_that_of_the_largest_and_no_number_where_one_is_not_finite() {
    let cpu = cpu(1, InstructionSet::detect());
    let scale = |x: &[f32; BLOCK]| {
        let view = Operand::F32(View::new(x, 1, BLOCK, BLOCK));
        QuantizedRows::new(&cpu, view, BLOCK, Layout::Int8).row(0)[0].scale
    };
    for at in 0..BLOCK {
        let mut x = [0.5; BLOCK];
        x[at] = -3.0;
        assert_eq!(scale(&x).to_bits(), (3.0f32 / 127.0).to_bits(), "{at}");
        for flaw in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[at] = flaw;
            assert!(scale(&x).is_nan(), "{flaw} at {at}");
        }
    }
    assert_eq!(scale(&[-0.0; BLOCK]).to_bits(), 0);
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
    tensor_type: TensorType,
    bytes: Vec<u8>,
    in_features: usize,
}

impl Blocks {
    fn new(tensor_type: TensorType, values: &[f32], in_features: usize) -> Self {
        let mut bytes = vec![0; tensor_type.bytes(values.len())];
        tensor_type.encode(values, &mut bytes);
        Self { tensor_type, bytes, in_features }
    }

    fn row_bytes(&self) -> usize {
        self.tensor_type.bytes(self.in_features)
    }

    fn shape(&self) -> [usize; 2] {
        [self.bytes.len() / self.row_bytes(), self.in_features]
    }

    fn dequantised(&self) -> Vec<f32> {
        let [out_features, in_features] = self.shape();
        let mut values = vec![f32::NAN; out_features * in_features];
        self.tensor_type.decode(&self.bytes, &mut values);
        values
    }

    fn weight(&self, cpu: &Cpu) -> Quantized {
        let layout = Layout::stored(self.tensor_type, BlockFormat::Int8).unwrap();
        Quantized::of_blocks(cpu, self.shape(), self.as_blocks().unwrap(), layout).unwrap()
    }
}

impl Rows for Blocks {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        values.copy_from_slice(&self.dequantised()[first * self.in_features..][..values.len()]);
        Ok(())
    }

    fn as_blocks(&self) -> Option<BlockRows<'_>> {
        Some(BlockRows { tensor_type: self.tensor_type, bytes: self })
    }
}

impl RowBytes for Blocks {
    fn read_bytes(&self, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        bytes.copy_from_slice(&self.bytes[first * self.row_bytes()..][..bytes.len()]);
        Ok(())
    }
}

/// Those with products of integers.
const STORED: [TensorType; 5] = [TensorType::Q8_0, TensorType::Q4_0, TensorType::Q4K, TensorType::Q5K, TensorType::Q6K];

/// Products of rows, and blocks of a weight, of several shapes: rows that fill no group, and no tile.
fn each_stored(mut check: impl FnMut(TensorType, usize, &Blocks, &[f32])) {
    for tensor_type in STORED {
        for [rows, out_features, blocks] in [[1, 16, 1], [3, 17, 3], [8, 50, 2], [11, 1, 2], [20, 33, 5]] {
            let in_features = blocks * tensor_type.block_values();
            // Around some number other than zero, so that there are offsets.
            let mut exact: Vec<f32> = normal(out_features * in_features, 4).iter().map(|x| x + 0.02).collect();
            exact[..32].copy_from_slice(&[-1.0; 32]);
            let x = normal(rows * in_features, 9);
            check(tensor_type, rows, &Blocks::new(tensor_type, &exact, in_features), &x);
        }
    }
}

/// Sums of the largest numbers that blocks can hold, which no set may cut off where it adds them in few bits.
#[test]
fn the_largest_numbers_are_summed_exactly() {
    const ROWS: usize = 8;
    let x: Vec<f32> = (0..ROWS * 256).map(|at| if at / 256 % 2 == 0 { 1.0 } else { -1.0 }).collect();
    for tensor_type in STORED {
        for fill in [0x80, 0x7f, 0x00, 0xff, 0xf0] {
            let mut blocks = Blocks::new(tensor_type, &normal(16 * 256, 3), 256);
            for block in blocks.bytes.chunks_mut(tensor_type.bytes(tensor_type.block_values())) {
                // Scales that are floats stay as they are, and so finite.
                let integers = match tensor_type {
                    TensorType::Q6K => 0..block.len() - 2,
                    TensorType::Q4K | TensorType::Q5K => 4..block.len(),
                    _ => 2..block.len(),
                };
                block[integers].fill(fill);
            }
            let portable = cpu(1, InstructionSet::Portable);
            let expected = product(&portable, &x, &blocks.weight(&portable), Write::Replace, ROWS);
            assert!(expected.iter().all(|sum| sum.is_finite()));
            for set in sets() {
                let cpu = cpu(1, set);
                let found = product(&cpu, &x, &blocks.weight(&cpu), Write::Replace, ROWS);
                assert_eq!(found, expected, "{tensor_type:?} of {fill:#x}, {}", set.name());
            }
        }
    }
}

fn rounded(cpu: &Cpu, x: &[f32], rows: usize, layout: Layout) -> QuantizedRows {
    let columns = x.len() / rows;
    QuantizedRows::new(cpu, Operand::F32(View::new(x, rows, columns, columns)), columns, layout)
}

#[test]
fn blocks_of_ggml_are_multiplied_as_they_are_stored() {
    each_stored(|tensor_type, rows, blocks, x| {
        let dequantised = blocks.dequantised();
        let [out_features, in_features] = blocks.shape();
        let portable = cpu(1, InstructionSet::Portable);
        let weight = blocks.weight(&portable);
        assert_eq!(values(&weight), dequantised, "{tensor_type:?}");
        let expected = product(&portable, x, &weight, Write::Replace, rows);
        let quantized = rounded(&portable, x, rows, weight.layout);
        for (index, found) in expected.iter().enumerate() {
            let (row, column) = (index / out_features, index % out_features);
            let numbers = quantized.row(row);
            let terms = (0..in_features).map(|at| {
                let x = f64::from(numbers[at / BLOCK].numbers[at % BLOCK]) * f64::from(numbers[at / BLOCK].scale);
                x * f64::from(dequantised[column * in_features + at])
            });
            let sum: f64 = terms.sum();
            assert!((f64::from(*found) - sum).abs() < 1e-4, "{tensor_type:?}: {found} {sum}");
        }
        for (set, threads) in sets().flat_map(|set| [(set, 1), (set, 3)]) {
            let cpu = cpu(threads, set);
            let weight = blocks.weight(&cpu);
            let found = product(&cpu, x, &weight, Write::Replace, rows);
            assert_eq!(found, expected, "{tensor_type:?} {}, {threads} threads", set.name());
            for (x, expected) in x.chunks(in_features).zip(expected.chunks(out_features)) {
                let alone = product(&cpu, x, &weight, Write::Replace, 1);
                assert_eq!(alone, expected, "{tensor_type:?} {}: a row alone", set.name());
            }
        }
    });
}

/// The product of a row with one in the blocks of a K format, by sums of integers that nothing rounds, and the sum of
/// the magnitudes of what is added.
fn integer_product<D: QuantisedScales>(blocks: &[u8], x: &[RowBlock]) -> (f64, f64) {
    let (mut product, mut magnitude) = (0.0, 0.0);
    for (index, RowBlock { numbers: x, scale, .. }) in x.iter().enumerate() {
        let block = &blocks[index / D::PARTS * D::BLOCK_BYTES..][..D::BLOCK_BYTES];
        let part = index % D::PARTS;
        let (numbers, scales) = (D::numbers(block, part), D::scales(block, part).map(f64::from));
        let wholes = D::wholes(block).map(|whole| f64::from(f16::from_bits(whole)));
        let sum = |half: usize, of: &dyn Fn(usize) -> i64| -> f64 {
            (half * BLOCK / 2..(half + 1) * BLOCK / 2).map(of).sum::<i64>() as f64
        };
        let products = [0, 1].map(|half| sum(half, &|at| i64::from(numbers[at]) * i64::from(x[at])));
        let sums = [0, 1].map(|half| sum(half, &|at| i64::from(x[at])));
        let terms = if D::BLOCK_BYTES == <Q6K as BlockDecoder>::BLOCK_BYTES {
            let halves = [0, 1].map(|half| wholes[0] * scales[half] * (products[half] - 32.0 * sums[half]));
            [halves[0], halves[1]]
        } else {
            let [scaled, offsets] = [products, sums].map(|[first, second]| first + second);
            [wholes[0] * scales[0] * scaled, -wholes[1] * scales[1] * offsets]
        };
        for term in terms {
            product += f64::from(*scale) * term;
            magnitude += (f64::from(*scale) * term).abs();
        }
    }
    (product, magnitude)
}

#[test]
fn a_product_with_k_blocks_is_that_of_sums_of_integers() {
    each_stored(|tensor_type, rows, blocks, x| {
        let of_row = match tensor_type {
            TensorType::Q4K => integer_product::<Q4K>,
            TensorType::Q5K => integer_product::<Q5K>,
            TensorType::Q6K => integer_product::<Q6K>,
            _ => return,
        };
        let cpu = cpu(2, InstructionSet::detect());
        let weight = blocks.weight(&cpu);
        let found = product(&cpu, x, &weight, Write::Replace, rows);
        let quantized = rounded(&cpu, x, rows, weight.layout);
        let [out_features, in_features] = blocks.shape();
        for (index, found) in found.into_iter().enumerate() {
            let (row, column) = (index / out_features, index % out_features);
            let stored = &blocks.bytes[column * blocks.row_bytes()..][..blocks.row_bytes()];
            let (expected, magnitude) = of_row(stored, quantized.row(row));
            // A few roundings of each block's product, and one of each sum.
            let most = (in_features / BLOCK + 5) as f64 * f64::from(f32::EPSILON) / 2.0 * magnitude;
            let error = (f64::from(found) - expected).abs();
            assert!(error <= most, "{tensor_type:?}: {found} {expected}, {error} of {most}");
        }
    });
}

/// Of ggml's own blocks, by its own quantiser: those of constant values, spikes, zeros, denormal scales.
#[test]
fn ggmls_own_blocks_widen_to_its_values() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gguf/blocks.safetensors"));
    let file = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for tensor_type in STORED {
        let cases = tensors.names().into_iter().filter(|name| name.ends_with(&format!(".{}", tensor_type.name())));
        let mut compared = 0;
        for name in cases {
            let dequantised = tensors.tensor(&format!("{name}.dequantised")).unwrap().data().to_vec();
            let expected: Vec<f32> = dequantised.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let bytes = tensors.tensor(name).unwrap().data().to_vec();
            let blocks = Blocks { tensor_type, bytes, in_features: 256 };
            for set in sets() {
                let weight = blocks.weight(&cpu(2, set));
                let [out_features, in_features] = weight.shape();
                assert_eq!(bits(&values(&weight)), bits(&expected), "{name}");
                for (rows, columns) in [(0..out_features, 0..in_features), (out_features / 2..out_features, 30..199)] {
                    for order in [Order::Rows, Order::Columns] {
                        let [height, width] = [rows.len(), columns.len()];
                        let stride = if order == Order::Rows { width } else { height };
                        let part = WeightBlock { rows: rows.clone(), columns: columns.clone(), order, stride };
                        let mut found = vec![f32::NAN; height * width];
                        weight.widen(set, part, &mut found);
                        let element = |index: usize| match order {
                            Order::Rows => (index / width, index % width),
                            Order::Columns => (index % height, index / height),
                        };
                        let expected = (0..height * width).map(|index| {
                            let (row, column) = element(index);
                            expected[(rows.start + row) * in_features + columns.start + column]
                        });
                        assert_eq!(bits(&found), bits(&expected.collect::<Vec<_>>()), "{name} {}", set.name());
                    }
                }
            }
            compared += 1;
        }
        assert!(compared > 3, "{compared} cases of {}", tensor_type.name());
    }
}

#[test]
fn a_format_takes_stored_blocks_of_no_more_bits() {
    let taken = |format, role| {
        let cpu = Cpu::with_instructions(1, Compute::F32, InstructionSet::detect()).unwrap();
        let cpu = cpu.quantizing(Quantization { format, activations: Activations::Int8 });
        STORED.map(|tensor_type| {
            let blocks = Blocks::new(tensor_type, &normal(2 * 256, 3), 256);
            let weight = cpu.frozen_weight(role, blocks.shape(), &blocks).unwrap();
            let Values::Integers(weight) = weight.values else { panic!("no products of integers") };
            values(&weight) == blocks.dequantised()
        })
    };
    assert_eq!(taken(BlockFormat::Int8, WeightRole::Matrix), [true; 5]);
    // Of other types what is stored is rounded to the 4 bits that are asked for; of embeddings to 8.
    assert_eq!(taken(BlockFormat::Int4, WeightRole::Matrix), [false, true, true, false, false]);
    assert_eq!(taken(BlockFormat::Int4, WeightRole::Table), [true; 5]);
}

#[test]
fn k_blocks_take_about_the_bytes_of_their_file() {
    for (tensor_type, most) in [(TensorType::Q4K, 1.03), (TensorType::Q5K, 1.03), (TensorType::Q6K, 1.0)] {
        let blocks = Blocks::new(tensor_type, &normal(32 * 512, 3), 512);
        let weight = blocks.weight(&cpu(1, InstructionSet::detect()));
        let share = weight.bytes() as f64 / blocks.bytes.len() as f64;
        assert!((1.0..=most).contains(&share), "{tensor_type:?}: {share}");
    }
}
