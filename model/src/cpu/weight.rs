//! Weights as products read them: row-major, in f32 or, where that is computed in, bf16.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;
use profile::{Rate, Work};

use super::Cpu;
use super::memory::Memory;
use super::operand::Operand;
use super::product::{Element, Finish, Path, Side, Target, View, ViewMut};
use super::quantized::{Bits, Quantized};
use super::rounding::round;
use super::shared::SharedWeightsError;
use super::tensor::Tensor;
use crate::checkpoint::Rows;
use crate::fingerprint;
use crate::ops::{Compute, PrepareError, WeightRole, Write};

/// A weight `[out, in]`, row-major, in the type that is computed in.
pub struct Weight {
    /// Rows.
    pub(super) out_features: usize,
    /// Columns.
    pub(super) in_features: usize,
    pub(super) values: Values,
}

pub(super) enum Values {
    F32(Memory<f32>),
    Bf16(Memory<bf16>),
    Quantized(Quantized),
}

/// Which side of a product a weight's columns are on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sense {
    /// `x · weightᵀ`.
    Forward,
    /// `dy · weight`.
    Backward,
}

/// Some columns of a product with a weight.
#[derive(Clone)]
pub(super) struct WeightPart<'a> {
    /// The weight.
    pub weight: &'a Weight,
    /// The columns.
    pub columns: Range<usize>,
    /// A number for each of them.
    pub bias: Option<&'a [f32]>,
    /// Where they go.
    pub c: Target<'a>,
}

impl<'a> WeightPart<'a> {
    fn side<T: Copy>(&self, values: &'a [T], sense: Sense) -> Side<'a, T> {
        let b = self.weight.view(values, sense).column_range(self.columns.clone());
        Side { b, finish: Finish { scale: 1.0, bias: self.bias, write: Write::Replace }, c: self.c }
    }
}

impl Weight {
    /// Row `row`, times a factor.
    pub(super) fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]) {
        let range = row * self.in_features..(row + 1) * self.in_features;
        match &self.values {
            Values::F32(values) => scaled(&values[range], factor, target),
            Values::Bf16(values) => scaled(&values[range], factor, target),
            Values::Quantized(values) => values.copy_row(row, factor, target),
        }
    }

    /// Its size.
    pub(super) fn bytes(&self) -> u64 {
        (match &self.values {
            Values::F32(values) => size_of_val(&**values),
            Values::Bf16(values) => size_of_val(&**values),
            Values::Quantized(values) => values.bytes(),
        }) as u64
    }

    /// Gives back values that it only reads, so that they can be changed in place.
    pub(super) fn release(&mut self) {
        if let Values::F32(values @ Memory::Lent(..)) = &mut self.values {
            *values = Memory::default();
        }
    }

    /// What products of so many columns with weights like it compute and move.
    pub(super) fn work(&self, a: Operand<'_>, sense: Sense, columns: usize) -> Work {
        let inner = match sense {
            Sense::Forward => self.in_features,
            Sense::Backward => self.out_features,
        };
        let rate = match a {
            Operand::F32(_) => Rate::F32,
            #[cfg(target_arch = "x86_64")]
            Operand::Pairs(_) => Rate::Bf16,
        };
        let bytes = self.bytes() as usize * inner * columns / (self.out_features * self.in_features).max(1);
        Work::of_weight(a.rows(), inner, columns, bytes, rate)
    }

    /// How products with it are computed.
    pub(super) fn path(&self, a: Operand<'_>, sense: Sense) -> Path {
        match (&self.values, a) {
            (Values::F32(values), Operand::F32(a)) => Path::of(a, self.view(values, sense)),
            (Values::Bf16(values), Operand::F32(a)) => Path::of(a, self.view(values, sense)),
            #[cfg(target_arch = "x86_64")]
            (Values::Bf16(values), Operand::Pairs(a)) => Path::of(a, self.view(values, sense)),
            _ => unreachable!("a weight of which no part is multiplied"),
        }
    }

    /// Whether parts of products with it can be computed: not where what it is multiplied with is quantised whole.
    pub(super) fn has_parts(&self) -> bool {
        !matches!(self.values, Values::Quantized(_))
    }

    fn view<'a, T: Copy>(&self, values: &'a [T], sense: Sense) -> View<'a, T> {
        let view = View::new(values, self.out_features, self.in_features, self.in_features);
        match sense {
            Sense::Forward => view.transposed(),
            Sense::Backward => view,
        }
    }
}

fn scaled<T: Element>(values: &[T], factor: f32, target: &mut [f32]) {
    target.iter_mut().zip(values).for_each(|(target, value)| *target = factor * value.widen());
}

impl Cpu {
    /// A frozen weight of these rows: prepared here, and put where other processes see it, or taken from there.
    pub(super) fn frozen_weight(
        &self,
        role: WeightRole,
        shape: [usize; 2],
        rows: &dyn Rows,
    ) -> Result<Weight, PrepareError> {
        let shared = |error: SharedWeightsError| PrepareError::Kernel(error.in_operation("prepare"));
        if let Some(weight) = self.next_shared(shape).map_err(shared)? {
            return Ok(weight);
        }
        self.move_to_shared(self.weight_of_rows(self.stored_as(role), shape, rows)?).map_err(shared)
    }

    /// What weights of a role are stored as.
    fn stored_as(&self, role: WeightRole) -> Compute {
        match (role, self.compute) {
            // 4 bits would be too few to tell tokens apart.
            (WeightRole::Table, Compute::Int4) => Compute::Int8,
            (WeightRole::Matrix | WeightRole::Table, compute) => compute,
        }
    }

    /// A weight of these values, in the type that is computed in.
    #[cfg(test)]
    pub(super) fn make_weight(&self, out_features: usize, in_features: usize, values: Vec<f32>) -> Weight {
        self.make_weight_in(self.compute, out_features, in_features, &values)
    }

    fn make_weight_in(&self, compute: Compute, out_features: usize, in_features: usize, values: &[f32]) -> Weight {
        assert_eq!(values.len(), out_features * in_features, "values of a weight");
        let values = match compute {
            Compute::Int8 => Values::Quantized(Quantized::new(self, out_features, in_features, values, Bits::Eight)),
            Compute::Int4 => Values::Quantized(Quantized::new(self, out_features, in_features, values, Bits::Four)),
            Compute::F32 => {
                let mut copy = self.weights.zeros(values.len());
                copy.copy_from_slice(values);
                Values::F32(copy)
            }
            Compute::Bf16 => {
                let mut rounded = self.weights.zeros(values.len());
                self.round(values, &mut rounded);
                Values::Bf16(rounded)
            }
        };
        Weight { out_features, in_features, values }
    }

    /// Moves a frozen weight to where other processes see it, where there is such a place.
    fn move_to_shared(&self, weight: Weight) -> Result<Weight, SharedWeightsError> {
        let Some(shared) = &self.shared else { return Ok(weight) };
        let values = match weight.values {
            Values::F32(values) => Values::F32(Memory::Shared(shared.put(&values)?)),
            Values::Bf16(values) => Values::Bf16(Memory::Shared(shared.put(&values)?)),
            // Only asked for answers, by one process.
            Values::Quantized(values) => Values::Quantized(values),
        };
        Ok(Weight { values, ..weight })
    }

    /// The next weight that another process has moved there; none where this process prepares its own.
    fn next_shared(&self, [out_features, in_features]: [usize; 2]) -> Result<Option<Weight>, SharedWeightsError> {
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.are_made_elsewhere()) else { return Ok(None) };
        let length = out_features * in_features;
        let values = match self.compute {
            Compute::F32 => Values::F32(Memory::Shared(shared.next(length)?)),
            Compute::Bf16 => Values::Bf16(Memory::Shared(shared.next(length)?)),
            Compute::Int8 | Compute::Int4 => return Ok(None),
        };
        Ok(Some(Weight { out_features, in_features, values }))
    }

    /// A weight prepared from trained values: in f32 it reads them where they lie.
    pub(super) fn weight_of_values(&self, role: WeightRole, values: &mut Tensor) -> Weight {
        let (out_features, in_features) = (values.rows(), values.columns());
        match self.compute {
            Compute::F32 => Weight { out_features, in_features, values: Values::F32(values.lend()) },
            _ => self.make_weight_in(self.stored_as(role), out_features, in_features, values.values()),
        }
    }

    /// Gives a weight of trained values the new ones.
    pub(super) fn change_weight(&self, weight: &mut Weight, values: &mut Tensor) {
        match &mut weight.values {
            Values::F32(weight) => *weight = values.lend(),
            Values::Bf16(weight) => self.round(values.values(), weight),
            Values::Quantized(quantized) => {
                let (out_features, in_features) = (weight.out_features, weight.in_features);
                *quantized = Quantized::new(self, out_features, in_features, values.values(), quantized.bits());
            }
        }
    }

    fn round(&self, values: &[f32], rounded: &mut [bf16]) {
        assert_eq!(values.len(), rounded.len(), "values of a weight");
        /// Values that a thread rounds at a time.
        const PIECE: usize = 1 << 16;
        let pieces: Vec<_> = rounded.chunks_mut(PIECE).map(Mutex::new).collect();
        self.each(pieces.len(), values.len(), |piece| {
            let rounded = &mut **pieces[piece].lock().expect("each piece is taken once");
            round(self.set, &values[piece * PIECE..][..rounded.len()], rounded);
        });
    }

    /// The fingerprint of a weight's bits.
    pub(super) fn weight_fingerprint(&self, weight: &Weight) -> u64 {
        /// Values in a part, which one thread reads.
        const PART: usize = 1 << 18;
        if let Values::Quantized(values) = &weight.values {
            return values.fingerprint();
        }
        let length = weight.out_features * weight.in_features;
        let parts: Vec<_> = (0..length.div_ceil(PART)).map(|_| AtomicU64::new(0)).collect();
        self.each(parts.len(), length, |part| {
            let range = part * PART..length.min((part + 1) * PART);
            let of_part = match &weight.values {
                Values::F32(values) => fingerprint::of_f32(&values[range]),
                Values::Bf16(values) => fingerprint::of_bf16(&values[range]),
                Values::Quantized(_) => unreachable!("returned above"),
            };
            parts[part].store(of_part, Ordering::Relaxed);
        });
        fingerprint::of_parts(&parts.into_iter().map(AtomicU64::into_inner).collect::<Vec<_>>())
    }

    /// Columns of the products of one operand with several weights, by the calling thread.
    ///
    /// # Safety
    /// Nobody else may read or write the elements of the results meanwhile.
    pub(super) unsafe fn products_along(&self, path: Path, a: Operand<'_>, sense: Sense, parts: &[WeightPart<'_>]) {
        fn sides<'a, T: Copy>(
            parts: &[WeightPart<'a>],
            sense: Sense,
            values: impl Fn(&'a Values) -> Option<&'a [T]>,
        ) -> Option<Vec<Side<'a, T>>> {
            parts.iter().map(|part| values(&part.weight.values).map(|values| part.side(values, sense))).collect()
        }
        let f32s = sides(parts, sense, |values| match values {
            Values::F32(values) => Some(&**values),
            _ => None,
        });
        let bf16s = sides(parts, sense, |values| match values {
            Values::Bf16(values) => Some(&**values),
            _ => None,
        });
        // SAFETY: the caller vouches for the results.
        unsafe {
            match (a, f32s, bf16s) {
                (Operand::F32(a), Some(sides), _) => self.product_along(path, a, &sides),
                (Operand::F32(a), _, Some(sides)) => self.product_along(path, a, &sides),
                #[cfg(target_arch = "x86_64")]
                (Operand::Pairs(a), _, Some(sides)) => self.product_of_pairs_along(path, a, &sides),
                _ if parts.len() > 1 => {
                    parts.iter().for_each(|part| self.products_along(path, a, sense, std::slice::from_ref(part)));
                }
                _ => unreachable!("a weight of which no part is multiplied"),
            }
        }
    }

    /// `c (+)= a · weight` in one of the senses `(+ bias)`.
    pub(super) fn weight_product(
        &self,
        a: Operand<'_>,
        weight: &Weight,
        sense: Sense,
        bias: Option<&[f32]>,
        write: Write,
        c: ViewMut<'_>,
    ) {
        let name = match sense {
            Sense::Forward => "linear",
            Sense::Backward => "linear backward",
        };
        let _kernel = self.profile.kernel(name, || weight.work(a, sense, c.shape().1));
        let finish = Finish { scale: 1.0, bias, write };
        match (&weight.values, a) {
            (Values::F32(values), Operand::F32(a)) => {
                self.finished_product(a, weight.view(values, sense), finish, c);
            }
            (Values::Bf16(values), Operand::F32(a)) => {
                self.finished_product(a, weight.view(values, sense), finish, c);
            }
            #[cfg(target_arch = "x86_64")]
            (Values::Bf16(values), Operand::Pairs(a)) => {
                self.product_of_pairs(a, weight.view(values, sense), finish, c);
            }
            (Values::Quantized(values), Operand::F32(a)) => {
                assert!(sense == Sense::Forward, "a backward through a quantised weight");
                self.quantized_product(a, values, finish, c);
            }
            #[cfg(target_arch = "x86_64")]
            (Values::F32(_) | Values::Quantized(_), Operand::Pairs(_)) => {
                unreachable!("an operand of another kernel set")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::InstructionSet;
    use super::super::operand::OperandBuffer;
    use super::super::rounding::nearest;
    use super::*;

    /// Sums of products of few bits are exact in f32, so that every path must give them to the bit.
    #[test]
    fn every_path_computes_the_product_of_the_rounded_operands() {
        let shapes =
            [(1, 5, 7), (3, 33, 40), (4, 1, 1), (5, 50, 31), (17, 97, 64), (9, 48, 1), (30, 20, 2100), (7, 16, 99)];
        for (rows, out_features, in_features) in shapes {
            let value = |index: usize, seed: usize| ((index * 37 + seed) % 23) as f32 - 11.0;
            let weight: Vec<f32> = (0..out_features * in_features).map(|index| value(index, 3)).collect();
            for (sense, inner, columns) in
                [(Sense::Forward, in_features, out_features), (Sense::Backward, out_features, in_features)]
            {
                // A little more than a value of few bits, which rounding takes away.
                let a: Vec<f32> = (0..rows * inner).map(|index| value(index, 5) * 1.001).collect();
                let w = |p: usize, column: usize| match sense {
                    Sense::Forward => weight[column * in_features + p],
                    Sense::Backward => weight[p * in_features + column],
                };
                let element = |row: usize, column: usize| -> f32 {
                    1.0 + (0..inner).map(|p| nearest(a[row * inner + p]).widen() * w(p, column)).sum::<f32>()
                };
                for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
                    let cpu = Cpu::with_instructions(2, Compute::Bf16, set).unwrap();
                    let weight = cpu.make_weight(out_features, in_features, weight.clone());
                    let mut c = vec![1.0; rows * columns];
                    let mut buffer = OperandBuffer::default();
                    let a = cpu.operand(View::new(&a, rows, inner, inner), &mut buffer);
                    let target = ViewMut::new(&mut c, rows, columns, columns);
                    cpu.weight_product(a, &weight, sense, None, Write::Add, target);
                    for (index, found) in c.into_iter().enumerate() {
                        let expected = element(index / columns, index % columns);
                        assert_eq!(found, expected, "{rows}x{out_features}x{in_features} {} {index}", set.name());
                    }
                }
            }
        }
    }
}
