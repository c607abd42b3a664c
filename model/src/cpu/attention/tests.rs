//! Against attention by its definition in double precision, in matrices with more columns and rows than those that
//! count.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::sync::Arc;

use super::{Columns, Operands, Qkv};
use crate::batch::Documents;
use crate::cpu::product::{Element, Target};
use crate::cpu::rounding::nearest;
use crate::cpu::{Cache, Cpu, InstructionSet};
use crate::ops::{AttentionShape, Compute};
use crate::random::{Address, Purpose, Stream};

/// What stands around results; no result has this value.
const CANARY: f32 = -12_345.5;
/// Columns before and behind those that count, and rows above and below.
const BORDER: usize = 3;
/// Results differ by at most this share of the largest one.
const TOLERANCE: f64 = 1e-5;
/// As that, where weights and slopes are rounded to bf16: each by 2⁻⁹ of itself.
const TOLERANCE_BF16: f64 = 8e-3;
/// On average two sets that round the same are this near: rounding itself moves results a hundred times further.
const MEAN_BF16: f64 = 5e-6;

/// A form of queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    F32,
    Rounded,
    Pairs,
}

impl Form {
    /// Those that the kernels of a set compute with.
    fn of(set: InstructionSet) -> Vec<Self> {
        match set {
            set if set.multiplies_pairs() => vec![Self::F32, Self::Rounded, Self::Pairs],
            _ => vec![Self::F32, Self::Rounded],
        }
    }
}

#[derive(Debug, Clone)]
struct Case {
    documents: Vec<usize>,
    shape: AttentionShape,
}

fn case(documents: &[usize], heads: [usize; 2], head_dim: usize, window: Option<usize>, soft_cap: Option<f32>) -> Case {
    let [num_attention_heads, num_key_value_heads] = heads;
    let scale = 3.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape { num_attention_heads, num_key_value_heads, head_dim, scale, window, soft_cap };
    Case { documents: documents.to_vec(), shape }
}

fn cases() -> Vec<Case> {
    vec![
        case(&[1], [1, 1], 8, None, None),
        case(&[2, 1, 1, 3], [2, 1], 5, None, None),
        case(&[63], [1, 1], 17, None, Some(2.0)),
        case(&[64], [3, 1], 64, None, None),
        case(&[65, 1, 2], [4, 2], 33, None, None),
        case(&[130], [2, 2], 80, Some(1), None),
        case(&[257], [4, 1], 16, None, None),
        case(&[257, 5], [3, 3], 20, Some(70), Some(1.5)),
        case(&[64, 130], [6, 2], 96, Some(64), None),
        case(&[150, 1], [3, 1], 128, Some(200), None),
        case(&[70], [1, 1], 256, None, Some(5.0)),
        case(&[300], [8, 2], 7, Some(9), None),
        case(&[150, 67], [20, 1], 8, None, None),
        case(&[140], [3, 1], 16, Some(64), None),
    ]
}

/// A matrix with a border.
struct Matrix {
    values: Vec<f32>,
    rows: usize,
    columns: usize,
}

impl Matrix {
    fn filled(rows: usize, columns: usize, fill: f32) -> Self {
        Self { values: vec![fill; (rows + 2 * BORDER) * (columns + 2 * BORDER)], rows, columns }
    }

    /// Numbers between -1 and 1, with a border that poisons whatever reads it.
    fn random(name: &str, rows: usize, columns: usize) -> Self {
        let stream = Stream::new(3, Address::named(Purpose::ModelInit, name));
        let mut matrix = Self::filled(rows, columns, f32::NAN);
        for index in 0..rows * columns {
            let place = matrix.place(index / columns, index % columns);
            matrix.values[place] = stream.uniform_at(index as u64, 1.0);
        }
        matrix
    }

    fn stride(&self) -> usize {
        self.columns + 2 * BORDER
    }

    fn place(&self, row: usize, column: usize) -> usize {
        (row + BORDER) * self.stride() + column + BORDER
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        f64::from(self.values[self.place(row, column)])
    }

    /// The same, each value rounded to bf16.
    fn rounded(mut self) -> Self {
        self.values.iter_mut().for_each(|value| *value = nearest(*value).widen());
        self
    }

    /// The same in pairs, with a border likewise.
    fn pairs(&self) -> Pairs {
        let stride = self.columns / 2 + 2 * BORDER;
        let mut words = vec![u32::MAX; (self.rows + 2 * BORDER) * stride];
        for (row, pair) in (0..self.rows).flat_map(|row| (0..self.columns / 2).map(move |pair| (row, pair))) {
            let half = |column: usize| u32::from(nearest(self.values[self.place(row, column)]).to_bits());
            words[(row + BORDER) * stride + BORDER + pair] = half(2 * pair) | half(2 * pair + 1) << 16;
        }
        Pairs { words, stride, end: (self.rows + BORDER - 1) * stride + BORDER + self.columns / 2 }
    }

    /// The columns, ending with the last value that counts.
    fn read(&self) -> Columns<'_> {
        let end = if self.rows == 0 { 0 } else { self.place(self.rows - 1, self.columns - 1) + 1 };
        Columns { words: &self.values[self.place(0, 0)..end], stride: self.stride() }
    }

    fn write(&mut self) -> Target<'_> {
        let (from, stride) = (self.place(0, 0), self.stride());
        Target::new(&mut self.values[from..], stride)
    }

    /// The values that count, after a check that the others are as they were.
    fn into_values(self, what: &str) -> Vec<f32> {
        let mut inside = Vec::new();
        for (index, &value) in self.values.iter().enumerate() {
            let (row, column) = (index / self.stride(), index % self.stride());
            let counts =
                (BORDER..BORDER + self.rows).contains(&row) && (BORDER..BORDER + self.columns).contains(&column);
            assert!(counts || value == CANARY, "{what}: the border was written");
            if counts {
                inside.push(value);
            }
        }
        inside
    }
}

/// A matrix of pairs of bf16 with a border.
struct Pairs {
    words: Vec<u32>,
    stride: usize,
    /// Behind the last pair that counts.
    end: usize,
}

impl Pairs {
    fn read(&self) -> Columns<'_, u32> {
        Columns { words: &self.words[BORDER * self.stride + BORDER..self.end], stride: self.stride }
    }
}

struct Given {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    dy: Matrix,
}

impl Case {
    fn rows(&self) -> usize {
        self.documents.iter().sum()
    }

    /// Columns of the queries and of the keys.
    fn widths(&self) -> [usize; 2] {
        let AttentionShape { num_attention_heads, num_key_value_heads, head_dim, .. } = self.shape;
        [num_attention_heads * head_dim, num_key_value_heads * head_dim]
    }

    fn given(&self, form: Form) -> Given {
        let (rows, [q, k]) = (self.rows(), self.widths());
        let matrix = |name: &str, columns: usize| {
            let matrix = Matrix::random(name, rows, columns);
            if form == Form::F32 { matrix } else { matrix.rounded() }
        };
        Given { q: matrix("q", q), k: matrix("k", k), v: matrix("v", k), dy: matrix("dy", q) }
    }

    /// Whether heads are whole pairs.
    fn has(&self, form: Form) -> bool {
        form != Form::Pairs || self.shape.head_dim.is_multiple_of(2)
    }

    /// Output, log of the summed exponentials, and gradients.
    fn run(&self, cpu: &Cpu, form: Form) -> [Vec<f32>; 5] {
        let given = self.given(form);
        let Given { q, k, v, .. } = &given;
        let pairs = [q, k, v].map(Matrix::pairs);
        let qkv = match form {
            Form::F32 => Qkv::F32(Operands { q: q.read(), k: k.read(), v: v.read() }),
            Form::Rounded => Qkv::Rounded(Operands { q: q.read(), k: k.read(), v: v.read() }),
            Form::Pairs => Qkv::Pairs(Operands { q: pairs[0].read(), k: pairs[1].read(), v: pairs[2].read() }),
        };
        self.run_on(cpu, qkv, &given.dy)
    }

    fn run_on(&self, cpu: &Cpu, qkv: Qkv<'_>, dy: &Matrix) -> [Vec<f32>; 5] {
        let (documents, [q_width, k_width]) = (Documents::new(&self.documents), self.widths());
        let heads = self.shape.num_attention_heads;
        let mut results =
            [q_width, heads, q_width, k_width, k_width].map(|width| Matrix::filled(self.rows(), width, CANARY));
        let [y, logsumexp, dq, dk, dv] = &mut results;
        // SAFETY: the results are borrowed for this call alone.
        unsafe { cpu.attend_columns(qkv, &documents, &self.shape, y.write(), logsumexp.write()) };
        let operands = [y.read(), logsumexp.read(), dy.read()];
        // SAFETY: as above.
        unsafe {
            let gradients = [dq.write(), dk.write(), dv.write()];
            cpu.attend_columns_backward(qkv, operands, &documents, &self.shape, gradients);
        }
        results.map(|matrix| matrix.into_values(&format!("{self:?}")))
    }

    /// The same by definition.
    fn expected(&self, form: Form) -> [Vec<f64>; 5] {
        let Given { q, k, v, dy } = self.given(form);
        let AttentionShape { num_attention_heads, num_key_value_heads, head_dim, scale, window, soft_cap } = self.shape;
        let (rows, [q_width, k_width]) = (self.rows(), self.widths());
        let mut results =
            [q_width, num_attention_heads, q_width, k_width, k_width].map(|width| vec![0.0; rows * width]);
        let [y, logsumexp, dq, dk, dv] = &mut results;
        let scale = f64::from(scale);
        let dot = |a: &Matrix, i: usize, from: usize, b: &Matrix, j: usize, of: usize| -> f64 {
            (0..head_dim).map(|d| a.at(i, from + d) * b.at(j, of + d)).sum()
        };
        let mut first = 0;
        for &length in &self.documents {
            for head in 0..num_attention_heads {
                let group = num_attention_heads / num_key_value_heads;
                let (at, of) = (head * head_dim, head / group * head_dim);
                for i in first..first + length {
                    let keys = first.max((i + 1).saturating_sub(window.unwrap_or(usize::MAX)))..i + 1;
                    let raw: Vec<f64> = keys.clone().map(|j| scale * dot(&q, i, at, &k, j, of)).collect();
                    let capped = |x: f64| soft_cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh());
                    let slope = |x: f64| soft_cap.map_or(1.0, |cap| 1.0 - (x / f64::from(cap)).tanh().powi(2));
                    let log = raw.iter().map(|&x| capped(x).exp()).sum::<f64>().ln();
                    logsumexp[i * num_attention_heads + head] = log;
                    let weights: Vec<f64> = raw.iter().map(|&x| (capped(x) - log).exp()).collect();
                    let dweights: Vec<f64> = keys.clone().map(|j| dot(&dy, i, at, &v, j, of)).collect();
                    let mean: f64 = weights.iter().zip(&dweights).map(|(w, d)| w * d).sum();
                    for (index, j) in keys.enumerate() {
                        let draw = weights[index] * (dweights[index] - mean) * slope(raw[index]) * scale;
                        for d in 0..head_dim {
                            y[i * q_width + at + d] += weights[index] * v.at(j, of + d);
                            dq[i * q_width + at + d] += draw * k.at(j, of + d);
                            dk[j * k_width + of + d] += draw * q.at(i, at + d);
                            dv[j * k_width + of + d] += weights[index] * dy.at(i, at + d);
                        }
                    }
                }
            }
            first += length;
        }
        results
    }

    /// The output for rows that come so many at a time, over a cache whose blocks had sequences of no numbers before.
    fn run_cached(&self, cpu: &Cpu, steps: [usize; 6]) -> Vec<f32> {
        let [q_width, k_width] = self.widths();
        let values = |matrix: &Matrix| -> Vec<f32> {
            let rows = (0..matrix.rows).map(|row| &matrix.values[matrix.place(row, 0)..][..matrix.columns]);
            rows.flatten().copied().collect()
        };
        let Given { q, k, v, .. } = self.given(Form::F32);
        let (q, k, v) = (values(&q), values(&k), values(&v));
        let mut found = vec![0.0; self.rows() * q_width];
        let (sequences, longest) = (self.documents.len(), *self.documents.iter().max().unwrap());
        // One more keeps the blocks from going.
        let mut cache = Cache::new(sequences + 1, longest, &self.shape, Arc::default());
        for slot in 0..=sequences {
            let nothing = vec![f32::NAN; longest * k_width];
            cache.append(&nothing, &nothing, &Documents::continued([(slot, 0, longest)]));
        }
        (0..sequences).for_each(|slot| cache.clear(slot));
        let mut starts = vec![0; sequences];
        for step in steps {
            // The next rows of each document, gathered from and scattered to where they lie in all of them.
            let firsts = self.documents.iter().scan(0, |first, length| Some(std::mem::replace(first, *first + length)));
            let rows: Vec<Vec<usize>> = firsts
                .zip(starts.iter().zip(&self.documents))
                .map(|(first, (&start, &length))| (first + start..first + length.min(start + step)).collect())
                .collect();
            let documents =
                Documents::continued(rows.iter().enumerate().map(|(slot, rows)| (slot, starts[slot], rows.len())));
            let gather = |values: &[f32], width: usize| -> Vec<f32> {
                rows.iter().flatten().flat_map(|row| values[row * width..][..width].to_vec()).collect()
            };
            cache.append(&gather(&k, k_width), &gather(&v, k_width), &documents);
            let mut y = crate::cpu::Tensor::default();
            cpu.attend_cached(&cpu_tensor(cpu, &gather(&q, q_width), q_width), &cache, &documents, &self.shape, &mut y);
            for (row, y) in rows.iter().flatten().zip(y.values().chunks_exact(q_width)) {
                found[row * q_width..][..q_width].copy_from_slice(y);
            }
            starts.iter_mut().zip(&rows).for_each(|(start, rows)| *start += rows.len());
        }
        found
    }
}

fn cpu_tensor(cpu: &Cpu, values: &[f32], columns: usize) -> crate::cpu::Tensor {
    use crate::ops::Ops;
    cpu.tensor(values.len() / columns, columns, values).unwrap()
}

const RESULTS: [&str; 5] = ["y", "logsumexp", "dq", "dk", "dv"];

fn assert_close(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    let largest = expected.iter().fold(0.1, |largest: f64, value| largest.max(value.abs()));
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let near = (f64::from(found) - expected).abs() <= tolerance * largest;
        assert!(near, "{what}[{index}] is {found}, not {expected} (largest {largest})");
    }
}

#[test]
fn every_shape_form_and_set_equals_the_definition() {
    for case in cases() {
        for form in [Form::F32, Form::Rounded, Form::Pairs].into_iter().filter(|form| case.has(*form)) {
            let expected = case.expected(form);
            for set in InstructionSet::ALL.into_iter().filter(|set| Form::of(*set).contains(&form)) {
                let Ok(cpu) = Cpu::with_instructions(2, Compute::Bf16, set) else { continue };
                let what = format!("{} {form:?} {case:?}", set.name());
                let found = case.run(&cpu, form);
                for (name, (found, expected)) in RESULTS.iter().zip(found.iter().zip(&expected)) {
                    // Scores are not rounded, and so are sums of their exponentials.
                    let is_exact = form == Form::F32 || *name == "logsumexp";
                    let tolerance = if is_exact { TOLERANCE } else { TOLERANCE_BF16 };
                    assert_close(&format!("{what} {name}"), found, expected, tolerance);
                }
                if form == Form::F32 {
                    // However many rows come at a time.
                    let bits = |y: &[f32]| y.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                    // Few rows on both sides of the border of a block among them.
                    for steps in [[1, 90, 1, 2, 1, 1000], [62, 3, 1, 60, 4, 1000], [63, 2, 61, 5, 1, 1000]] {
                        assert_eq!(bits(&case.run_cached(&cpu, steps)), bits(&found[0]), "{what} cached {steps:?}");
                    }
                }
            }
        }
    }
}

/// All sets round the same. A last digit of f32 may decide how one of many weights is rounded, but not how most of them
/// are.
#[test]
fn every_form_of_bf16_agrees_with_the_portable_one() {
    let portable = Cpu::with_instructions(1, Compute::Bf16, InstructionSet::Portable).unwrap();
    for case in cases() {
        let expected = case.run(&portable, Form::Rounded);
        for set in InstructionSet::ALL {
            let Ok(cpu) = Cpu::with_instructions(2, Compute::Bf16, set) else { continue };
            for form in [Form::Rounded, Form::Pairs] {
                if !case.has(form) || !Form::of(set).contains(&form) {
                    continue;
                }
                for (name, (found, expected)) in RESULTS.iter().zip(case.run(&cpu, form).iter().zip(&expected)) {
                    let largest = expected.iter().fold(0.1f32, |largest, value| largest.max(value.abs()));
                    let apart = found.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs() / largest));
                    let mean = apart.sum::<f64>() / found.len() as f64;
                    assert!(mean <= MEAN_BF16, "{} {form:?} {case:?} {name}: {mean:.1e}", set.name());
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for case in cases() {
        for form in Form::of(InstructionSet::detect()).into_iter().filter(|form| case.has(*form)) {
            let bits = |threads: usize| {
                let results = case.run(&Cpu::new(threads, Compute::Bf16).unwrap(), form);
                results.map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            };
            let expected = bits(1);
            for threads in [2, 3, 5] {
                assert!(bits(threads) == expected, "{case:?} {form:?} on {threads} threads");
            }
        }
    }
}
