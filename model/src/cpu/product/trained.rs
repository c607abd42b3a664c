//! Trained values as right operands of products in bf16: rounded on their way into a panel, so that they need not lie
//! in memory twice.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
use super::pack::avx512::pack_halves;
use super::{BlockWeight, Element, InstructionSet, Order, Right, View, WeightBlock};
use crate::cpu::memory::Memory;
use crate::cpu::rounding::nearest;
use crate::fingerprint;

/// A weight `[out, in]` of trained values in f32, which it reads where they lie.
pub(in crate::cpu) struct TrainedWeight {
    shape: [usize; 2],
    values: Memory<f32>,
}

impl TrainedWeight {
    /// Of values that are lent to it.
    pub(in crate::cpu) fn new(shape: [usize; 2], values: Memory<f32>) -> Self {
        Self { shape, values }
    }

    /// The values, which products round.
    pub(in crate::cpu) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Gives the values back, so that they can be changed in place.
    pub(in crate::cpu) fn release(&mut self) {
        self.values = Memory::default();
    }

    /// A part as a right operand: its rows and columns.
    fn operand(
        &self,
        WeightBlock { rows, columns, order, .. }: WeightBlock,
    ) -> (View<'_>, [std::ops::Range<usize>; 2]) {
        let [out_features, in_features] = self.shape;
        let weight = View::new(&self.values, out_features, in_features, in_features);
        match order {
            Order::Rows => (weight, [rows, columns]),
            Order::Columns => (weight.transposed(), [columns, rows]),
        }
    }
}

impl BlockWeight for TrainedWeight {
    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.values)
    }

    fn fingerprint(&self) -> u64 {
        fingerprint::of_f32(&self.values)
    }

    fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]) {
        let values = &self.values[row * target.len()..][..target.len()];
        target.iter_mut().zip(values).for_each(|(target, value)| *target = factor * nearest(*value).widen());
    }

    fn widen(&self, set: InstructionSet, part: WeightBlock, target: &mut [f32]) {
        let stride = part.stride;
        let (operand, [inner, columns]) = self.operand(part);
        // Vectors are written whole.
        let set = if stride == columns.len().next_multiple_of(16) { set } else { InstructionSet::Portable };
        // SAFETY: the set is the machine's.
        unsafe { operand.pack(set, inner, columns, stride, target) }
    }

    #[cfg(target_arch = "x86_64")]
    fn widen_pairs(&self, set: InstructionSet, part: WeightBlock, words: &mut [u32]) -> bool {
        /// Words of a column that are packed at once.
        const WORDS: usize = 16;
        let has_instructions =
            matches!(set, InstructionSet::Avx512Bf16 | InstructionSet::Amx | InstructionSet::AmxEmulated);
        if !has_instructions || !part.stride.is_multiple_of(16) || words.len() != WORDS * part.stride {
            return false;
        }
        let (operand, [inner, columns]) = self.operand(part);
        let first = inner.start / 2;
        // SAFETY: the set is the machine's, and there is room for so many words of each column.
        unsafe { pack_halves(operand, first..first + WORDS, columns, [words.as_mut_ptr()]) };
        true
    }
}
