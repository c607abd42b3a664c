//! Every path against sums in f64, over odd shapes, with what must not be read or written around each matrix poisoned.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;

use half::bf16;
use memmap2::{MmapMut, MmapOptions};

use super::super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::super::Tensor;
#[cfg(target_arch = "x86_64")]
use super::super::rounding::nearest;
use super::*;
use crate::ops::{Compute, MatmulPrecision, Ops, Write};

/// Shapes `(m, n, k)`: one, primes, one off the sizes of tiles, panels and blocks; and whole tiles, which are read
/// where they lie.
const SHAPES: [(usize, usize, usize); 15] = [
    (1, 1, 1),
    (3, 5, 7),
    (2, 33, 300),
    (8, 48, 16),
    (7, 47, 15),
    (9, 49, 17),
    (13, 37, 31),
    (6, 16, 768),
    (9, 65, 769),
    (50, 100, 3),
    (25, 145, 33),
    (1, 150, 2),
    (49, 8, 1600),
    (4, 4, 0),
    (48, 70, 96),
];

/// Elements beside the rows of a matrix, that no product may touch.
const BORDER: usize = 3;

/// A matrix among poison.
struct Poisoned<T> {
    values: Vec<T>,
    rows: usize,
    columns: usize,
}

impl<T: Copy> Poisoned<T> {
    fn new(rows: usize, columns: usize, poison: T, value: impl Fn(usize, usize) -> T) -> Self {
        let stride = columns + BORDER;
        let mut values = vec![poison; BORDER + rows * stride];
        for row in 0..rows {
            for column in 0..columns {
                values[BORDER + row * stride + column] = value(row, column);
            }
        }
        Self { values, rows, columns }
    }

    fn stride(&self) -> usize {
        self.columns + BORDER
    }

    fn view(&self) -> View<'_, T> {
        View::new(&self.values[BORDER..], self.rows, self.columns, self.stride())
    }
}

/// Values that end where memory does: what is read or written behind them ends the process.
///
/// A map of a file may be longer than the file, but the pages behind its end cannot be touched.
struct Guarded<T> {
    map: MmapMut,
    first: usize,
    kind: PhantomData<T>,
}

impl<T: Copy> Guarded<T> {
    fn new(values: &[T]) -> Self {
        /// Longer than a page of any machine we run on, and a multiple of each.
        const PAGES: usize = 1 << 16;
        let bytes = size_of_val(values);
        let length = bytes.next_multiple_of(PAGES);
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(length as u64).expect("room for the values");
        // SAFETY: nobody else knows of the file.
        let map = unsafe { MmapOptions::new().len(length + PAGES).map_mut(&file) }.expect("a map");
        let mut guarded = Self { map, first: length - bytes, kind: PhantomData };
        guarded.values_mut().copy_from_slice(values);
        guarded
    }

    fn values_mut(&mut self) -> &mut [T] {
        // SAFETY: the pages begin at multiples of every type's alignment, and so do values that fill them to the end.
        unsafe {
            let first = self.map.as_mut_ptr().add(self.first);
            std::slice::from_raw_parts_mut(first.cast(), (self.map.len() - (1 << 16) - self.first) / size_of::<T>())
        }
    }
}

fn value(row: usize, column: usize, seed: usize) -> f32 {
    ((row * 37 + column * 11 + seed * 7) % 23) as f32 / 23.0 - 0.5
}

/// Kernel sets of high precision: the sets with tiles, with several numbers of threads.
fn machines_of_high_precision() -> Vec<Vec<Cpu>> {
    let high = |cpu: Cpu| cpu.with_matmul_precision(MatmulPrecision::High);
    let machines = machines(Compute::F32, InstructionSet::has_tiles).into_iter();
    machines.map(|of_set| of_set.into_iter().map(high).collect()).collect()
}

/// Kernel sets of some compute type: each set of instructions of this machine that `wanted` names, with several numbers
/// of threads.
fn machines(compute: Compute, wanted: impl Fn(InstructionSet) -> bool) -> Vec<Vec<Cpu>> {
    let sets = InstructionSet::ALL.into_iter().filter(|set| set.is_available() && wanted(*set));
    let with = |set, threads| Cpu::with_instructions(threads, compute, set).expect("threads");
    sets.map(|set| [1, 2, 3, 5].map(|threads| with(set, threads)).into()).collect()
}

/// Runs a product in each way to finish, on each machine: each element must be near its definition, no bit may depend
/// on the number of threads, and nothing beside the result may change.
fn check(
    machines: &[Vec<Cpu>],
    (rows, columns): (usize, usize),
    sum: impl Fn(usize, usize) -> f64,
    run: impl Fn(&Cpu, Finish<'_>, ViewMut<'_>),
) {
    let bias: Vec<f32> = (0..columns).map(|column| value(1, column, 9)).collect();
    let bias = Some(&bias[..]);
    let sums: Vec<f64> = (0..rows * columns).map(|index| sum(index / columns, index % columns)).collect();
    for (scale, bias, write) in
        [(1.0, None, Write::Replace), (0.5, None, Write::Add), (1.0, bias, Write::Add), (2.0, bias, Write::Replace)]
    {
        let finish = Finish { scale, bias, write };
        let expected = |before: f32, row: usize, column: usize| {
            let kept = if write == Write::Add { f64::from(before) } else { 0.0 };
            kept + f64::from(scale) * sums[row * columns + column] + bias.map_or(0.0, |bias| f64::from(bias[column]))
        };
        for machines in machines {
            let results: Vec<Vec<u32>> =
                machines.iter().map(|cpu| result(cpu, (rows, columns), expected, |c| run(cpu, finish, c))).collect();
            assert!(results.iter().all(|result| *result == results[0]), "the number of threads changes a bit");
        }
    }
}

/// The bits of a result and its borders.
fn result(
    cpu: &Cpu,
    (rows, columns): (usize, usize),
    expected: impl Fn(f32, usize, usize) -> f64,
    run: impl Fn(ViewMut<'_>),
) -> Vec<u32> {
    let mut c = Poisoned::new(rows, columns, -7.0, |row, column| value(row, column, 5));
    let (before, stride) = (c.values.clone(), c.stride());
    run(ViewMut::new(&mut c.values[BORDER..], rows, columns, stride));
    for (index, (&found, &before)) in c.values.iter().zip(&before).enumerate() {
        let place = index.wrapping_sub(BORDER);
        let (row, column) = (place / stride, place % stride);
        if index < BORDER || column >= columns {
            assert_eq!(found, before, "the border of {rows}x{columns}");
        } else {
            let expected = expected(before, row, column);
            let set = cpu.instructions();
            // Of the longest sums; each term of high precision is off by up to some millionths.
            let most = if cpu.of_high_precision { 1e-3 } else { 2e-4 };
            assert!((f64::from(found) - expected).abs() < most, "{set:?} {rows}x{columns}: {found}, not {expected}");
        }
    }
    c.values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_orientation_and_odd_shape_equals_the_definition() {
    let (machines, of_high_precision) = (machines(Compute::F32, |_| true), machines_of_high_precision());
    for (m, n, k) in SHAPES {
        let a = Poisoned::new(m, k, f32::NAN, |row, column| value(row, column, 1));
        let a_transposed = Poisoned::new(k, m, f32::NAN, |row, column| value(column, row, 1));
        let b = Poisoned::new(k, n, f32::NAN, |row, column| value(row, column, 2));
        let b_transposed = Poisoned::new(n, k, f32::NAN, |row, column| value(column, row, 2));
        let term = |row, column, p| f64::from(value(row, p, 1)) * f64::from(value(p, column, 2));
        let sum = |row, column| (0..k).map(|p| term(row, column, p)).sum();
        for a in [a.view(), a_transposed.view().transposed()] {
            for b in [b.view(), b_transposed.view().transposed()] {
                check(&machines, (m, n), sum, |cpu, finish, c| cpu.finished_product(a, b, finish, c));
                check(&of_high_precision, (m, n), sum, |cpu, finish, c| cpu.product_of_precision(a, b, finish, c));
            }
        }
    }
}

#[test]
fn weights_in_bf16_are_widened_or_multiplied_in_pairs() {
    let rounded = |row, column, seed| bf16::from_f32(value(row, column, seed));
    let (all, of_pairs) =
        (machines(Compute::Bf16, |_| true), machines(Compute::Bf16, InstructionSet::multiplies_pairs));
    for (m, n, k) in SHAPES {
        let a = Poisoned::new(m, k, f32::NAN, |row, column| rounded(row, column, 1).to_f32());
        let pairs = Poisoned::new(m, k.div_ceil(2), u32::MAX, |row, pair| {
            let [low, high] = [2 * pair, 2 * pair + 1].map(|column| u32::from(rounded(row, column, 1).to_bits()));
            if 2 * pair + 1 < k { low | high << 16 } else { low }
        });
        let b = Poisoned::new(k, n, bf16::NAN, |row, column| rounded(row, column, 2));
        let b_transposed = Poisoned::new(n, k, bf16::NAN, |row, column| rounded(column, row, 2));
        let term = |row, column, p| f64::from(rounded(row, p, 1)) * f64::from(rounded(p, column, 2));
        let sum = |row, column| (0..k).map(|p| term(row, column, p)).sum();
        for b in [b.view(), b_transposed.view().transposed()] {
            check(&all, (m, n), sum, |cpu, finish, c| cpu.finished_product(a.view(), b, finish, c));
            check(&of_pairs, (m, n), sum, |cpu, finish, c| cpu.product_of_pairs(pairs.view(), b, finish, c));
        }
    }
}

#[test]
fn no_product_goes_beyond_the_end_of_an_operand() {
    let finish = Finish { scale: 1.0, bias: None, write: Write::Add };
    let machines: Vec<Cpu> = [Compute::F32, Compute::Bf16]
        .into_iter()
        .flat_map(|compute| machines(compute, |_| true))
        .chain(machines_of_high_precision())
        .map(|mut of_set| of_set.remove(0))
        .collect();
    for (m, n, k) in SHAPES {
        let (mut a, mut b) = (Guarded::new(&vec![1.0f32; m * k]), Guarded::new(&vec![1.0f32; k * n]));
        let mut halves = Guarded::new(&vec![bf16::ONE; k * n]);
        let width = k.div_ceil(2);
        let ones = 0x3f80_3f80;
        let mut pairs = Guarded::new(&vec![ones; m * width]);
        let (a, b, halves, pairs) = (a.values_mut(), b.values_mut(), halves.values_mut(), pairs.values_mut());
        for cpu in &machines {
            let mut c = Guarded::new(&vec![1.0f32; m * n]);
            let mut run = |product: &dyn Fn(ViewMut<'_>)| {
                c.values_mut().fill(1.0);
                product(ViewMut::new(c.values_mut(), m, n, n));
                assert!(
                    c.values_mut().iter().all(|value| *value == 1.0 + k as f32),
                    "{m}x{n}x{k} {:?}",
                    cpu.instructions()
                );
            };
            for a in [View::new(a, m, k, k), View::new(a, k, m, m).transposed()] {
                for b in [View::new(b, k, n, n), View::new(b, n, k, k).transposed()] {
                    run(&|c| cpu.product_of_precision(a, b, finish, c));
                }
                for b in [View::new(halves, k, n, n), View::new(halves, n, k, k).transposed()] {
                    run(&|c| cpu.product_of_precision(a, b, finish, c));
                }
            }
            if cpu.instructions().multiplies_pairs() && k % 2 == 0 {
                for b in [View::new(halves, k, n, n), View::new(halves, n, k, k).transposed()] {
                    run(&|c| cpu.product_of_pairs(View::new(pairs, m, width, width), b, finish, c));
                }
            }
        }
    }
}

#[test]
fn small_parts_of_several_sides_have_the_bits_of_whole_products() {
    let bias: Vec<f32> = (0..150).map(|column| value(1, column, 9)).collect();
    for (m, n, k) in SHAPES {
        let a = Poisoned::new(m, k, f32::NAN, |row, column| value(row, column, 1));
        let weights = [2, 3].map(|seed| Poisoned::new(k, n, f32::NAN, |row, column| value(row, column, seed)));
        let columns = [2, 3].map(|seed| Poisoned::new(n, k, f32::NAN, |row, column| value(column, row, seed)));
        let (a, weights) = (a.view(), [weights.each_ref(), columns.each_ref()]);
        let sides = [weights[0].map(Poisoned::view), weights[1].map(|columns| columns.view().transposed())];
        let finish = [None, Some(&bias[..n])].map(|bias| Finish { scale: 0.5, bias, write: Write::Add });
        for (cpu, b) in machines(Compute::F32, |_| true).iter().flatten().flat_map(|cpu| sides.map(|b| (cpu, b))) {
            let results = || [4, 5].map(|seed| Poisoned::new(m, n, -7.0, |row, column| value(row, column, seed)));
            let mut whole = results();
            for ((c, b), finish) in whole.iter_mut().zip(b).zip(finish) {
                let stride = c.stride();
                cpu.finished_product(a, b, finish, ViewMut::new(&mut c.values[BORDER..], m, n, stride));
            }
            for most in [1, 3000, usize::MAX] {
                let mut parts = results();
                let targets = parts.each_mut().map(|c| Target::new(&mut c.values[BORDER..], n + BORDER));
                cpu.each_small_part(Grain::Vectors, (m, n), most, usize::MAX, |rows, columns| {
                    let sides = [0, 1].map(|side| Side {
                        b: b[side].column_range(columns.clone()),
                        finish: finish[side].of_columns(columns.clone()),
                        c: targets[side].offset(rows.start, columns.start),
                    });
                    // SAFETY: parts do not overlap.
                    unsafe { cpu.product_along(Path::of(a, b[0].strides()), a.row_range(rows), &sides) };
                });
                let bits = |results: &[Poisoned<f32>; 2]| {
                    results.each_ref().map(|c| c.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>())
                };
                assert_eq!(bits(&parts), bits(&whole), "{m}x{n}x{k}, {most}, {:?}", cpu.instructions());
            }
        }
    }
}

#[test]
fn every_element_is_in_one_part() {
    for (rows, columns) in
        [(1, 1), (512, 576), (1024, 192), (512, 49152), (64, 49152), (1536, 8), (8, 1536), (1000, 47)]
    {
        for threads in [1, 2, 3, 4, 6, 8, 16] {
            let grains = [Grain::Vectors, Grain::Tiles { of_row: 16 }];
            for (most, grain) in [1, 1 << 16, usize::MAX].into_iter().flat_map(|most| grains.map(|grain| (most, grain)))
            {
                let partition = partition::Partition::new(grain, (rows, columns), threads, most);
                let mut covered = vec![0u8; rows * columns];
                for part in 0..partition.parts() {
                    let (part_rows, part_columns) = partition.ranges(part);
                    // A panel has 48 columns, and rows are cut by 24.
                    assert!(part_rows.len() * part_columns.len() <= most.max(1152).saturating_mul(2));
                    part_rows.for_each(|row| {
                        covered[row * columns..][part_columns.clone()].iter_mut().for_each(|count| *count += 1)
                    });
                }
                assert!(covered.iter().all(|count| *count == 1), "{rows}x{columns} over {threads} threads, {most}");
            }
        }
    }
}

/// Sixteen bits of each factor: a product of f32 in tiles is some hundred times nearer to the exact one than that of
/// rounded operands, in every orientation; its bits are those of any number of threads, of a part of it alone, and of
/// the emulation.
#[cfg(target_arch = "x86_64")]
#[test]
fn of_high_precision_a_product_has_sixteen_bits() {
    let sets = [InstructionSet::Amx, InstructionSet::AmxEmulated].into_iter().filter(|set| set.is_available());
    let machines: Vec<Cpu> = sets
        .flat_map(|set| [1, 3].map(|threads| Cpu::with_instructions(threads, Compute::F32, set).expect("threads")))
        .map(|cpu| cpu.with_matmul_precision(MatmulPrecision::High))
        .collect();
    for cpu in &machines {
        assert!(cpu.describe().contains("of high precision"), "{}", cpu.describe());
    }
    let finish = Finish { scale: 1.0, bias: None, write: Write::Replace };
    for (m, n, k) in [(17, 33, 32), (40, 70, 100), (64, 96, 640), (33, 48, 1601), (32, 32, 2100)] {
        // Of one sign, so that errors are relative to the sum; and more bits than a bf16 has.
        let value = |row: usize, column: usize, seed: usize| 1.0 + (value(row, column, seed) + 0.5) * 0.987_654;
        let a = Poisoned::new(m, k, f32::NAN, |row, column| value(row, column, 1));
        let a_transposed = Poisoned::new(k, m, f32::NAN, |row, column| value(column, row, 1));
        let b = Poisoned::new(k, n, f32::NAN, |row, column| value(row, column, 2));
        let b_transposed = Poisoned::new(n, k, f32::NAN, |row, column| value(column, row, 2));
        for a in [a.view(), a_transposed.view().transposed()] {
            for b in [b.view(), b_transposed.view().transposed()] {
                let results = machines.iter().map(|cpu| {
                    let mut c = vec![f32::NAN; m * n];
                    cpu.product_of_precision(a, b, finish, ViewMut::new(&mut c, m, n, n));
                    let (mut part, mut buffer) = (vec![f32::NAN; (m - 5) * (n - 9)], Tensor::default());
                    let side = Side { b: b.column_range(9..n), finish, c: Target::new(&mut part, n - 9) };
                    // SAFETY: nobody else has these elements.
                    unsafe { cpu.product_of_split_along(cpu.split(a, &mut buffer).row_range(5..m), &[side]) };
                    let of_part = c.chunks(n).skip(5).flat_map(|row| &row[9..]);
                    assert!(of_part.eq(&part), "a part of {m}x{n}x{k} has other bits");
                    c
                });
                let results: Vec<_> = results.collect();
                assert!(results.iter().all(|result| *result == results[0]), "{m}x{n}x{k} of other bits");
                for (index, found) in results.iter().take(1).flatten().enumerate() {
                    let (row, column) = (index / n, index % n);
                    let sum: f64 = (0..k).map(|p| f64::from(value(row, p, 1)) * f64::from(value(p, column, 2))).sum();
                    let error = (f64::from(*found) - sum).abs() / sum;
                    assert!(error < 3e-5, "{m}x{n}x{k} at {row}, {column}: {error:e}");
                }
            }
        }
    }
}

/// The gradient of a weight in tiles is the sum over rows of products of rounded values, whatever the number of
/// threads; the emulation and the registers agree to the bit.
#[cfg(target_arch = "x86_64")]
#[test]
fn across_rows_products_are_those_of_rounded_values() {
    let sets = || [InstructionSet::Amx, InstructionSet::AmxEmulated].into_iter().filter(|set| set.is_available());
    for (rows, outputs, inputs) in [(1, 3, 5), (33, 40, 70), (64, 32, 96), (2100, 7, 34)] {
        let results = sets().flat_map(|set| [1, 3].map(|threads| (set, threads))).map(|(set, threads)| {
            let cpu = Cpu::with_instructions(threads, Compute::Bf16, set).expect("threads");
            let tensor = |columns: usize, seed: usize| {
                let values: Vec<f32> = (0..rows * columns).map(|at| value(at / columns, at % columns, seed)).collect();
                cpu.tensor(rows, columns, &values).expect("a tensor")
            };
            let (dy, x) = (tensor(outputs, 1), tensor(inputs, 2));
            let mut gradient = cpu.zeros(outputs, inputs).expect("a tensor");
            gradient.values_mut().fill(0.5);
            cpu.weight_gradient(&dy, &x, &mut gradient).expect("a gradient");
            gradient.values().to_vec()
        });
        let results: Vec<Vec<f32>> = results.collect();
        let Some(first) = results.first() else { return eprintln!("skipped: this machine has no products of bf16") };
        assert!(results.iter().all(|result| result == first), "{rows}x{outputs}x{inputs}");
        for (at, found) in first.iter().enumerate() {
            let of = |row, column, seed| f64::from(nearest(value(row, column, seed)).to_f32());
            let sum: f64 = (0..rows).map(|row| of(row, at / inputs, 1) * of(row, at % inputs, 2)).sum();
            assert!(
                (f64::from(*found) - 0.5 - sum).abs() < 1e-5 * (rows as f64).sqrt(),
                "{rows} at {at}: {found} {sum}"
            );
        }
    }
}

/// Without tiles, and in bf16, there is no other precision.
#[test]
fn high_precision_is_the_highest_without_tiles() {
    for (compute, set) in [(Compute::F32, InstructionSet::detect()), (Compute::Bf16, InstructionSet::AmxEmulated)] {
        if set.is_available() {
            let cpu = Cpu::with_instructions(1, compute, set).expect("threads");
            let before = cpu.describe();
            assert_eq!(cpu.with_matmul_precision(MatmulPrecision::High).describe(), before);
        }
    }
}
