//! Left operands of products with weights: prepared once, in the form that is computed in, and used by several
//! products.
//!
//! In f32 an operand is what it is a view of, or is split where it is multiplied ([`Cpu::operand_of_parts`]). In bf16
//! it is rounded into a buffer, whole ([`Cpu::operand`]) or by the kernel that computes it, a row or a piece of one at
//! a time while that is in cache ([`OperandTarget`]).

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;
use profile::Work;

use super::attention::{Columns, Operands, Qkv};
use super::product::{Path, SplitView, Target, View};
use super::rounding::{round, round_within_f32};
use super::{Cpu, InstructionSet, Tensor};
use crate::ops::Compute;

/// A left operand.
#[derive(Clone, Copy)]
pub(super) enum Operand<'a> {
    /// In f32, rounded to values of bf16 where that is computed in.
    F32(View<'a>),
    /// In pairs of bf16: element `2p` of a row in the lower half of its word `p`, an odd row padded with zero.
    Pairs(View<'a, u32>),
    /// In f32, split into two of bf16: of products with parts of a weight.
    Split(SplitView<'a>),
}

impl<'a> Operand<'a> {
    /// Whether products of it are products of bf16.
    pub(super) fn is_in_bf16(self) -> bool {
        matches!(self, Self::Pairs(_) | Self::Split(_))
    }

    /// Whether it has so many columns; pairs may be padded with one more.
    pub(super) fn is_of(self, columns: usize) -> bool {
        match self {
            Self::F32(view) => view.columns() == columns,
            Self::Pairs(pairs) => pairs.columns() == columns.div_ceil(2),
            Self::Split(split) => split.columns() == columns,
        }
    }

    /// A row of so many columns, in f32; what is not stored so is widened into `buffer`.
    pub(super) fn row_in_f32<'b>(self, row: usize, columns: usize, buffer: &'b mut Vec<f32>) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            Self::F32(view) => view.row(row),
            Self::Pairs(pairs) => {
                let halves = pairs.row(row).iter().flat_map(|pair| [pair << 16, pair & 0xffff_0000]);
                buffer.clear();
                buffer.extend(halves.take(columns).map(f32::from_bits));
                buffer
            }
            Self::Split(_) => unreachable!("a row of an operand that was split"),
        }
    }

    /// Number of rows.
    pub(super) fn rows(self) -> usize {
        match self {
            Self::F32(view) => view.rows(),
            Self::Pairs(pairs) => pairs.rows(),
            Self::Split(split) => split.rows(),
        }
    }

    /// Some of its rows.
    pub(super) fn row_range(self, rows: Range<usize>) -> Self {
        match self {
            Self::F32(view) => Self::F32(view.row_range(rows)),
            Self::Pairs(pairs) => Self::Pairs(pairs.row_range(rows)),
            Self::Split(split) => Self::Split(split.row_range(rows)),
        }
    }
}

/// How operands lie in an [`OperandBuffer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Form {
    /// As they come.
    #[default]
    F32,
    /// Rounded to values that bf16 has.
    Rounded,
    /// In bf16, each row padded with zero to whole pairs.
    Pairs,
}

/// Memory of an operand. The default is empty; it is given a shape by whoever fills it.
#[derive(Default)]
pub(super) struct OperandBuffer {
    form: Form,
    columns: usize,
    /// A row of the operand in each row, two values of bf16 in an element where they are pairs.
    words: Tensor,
}

impl OperandBuffer {
    /// Of values as they are.
    pub(super) fn exact(values: Tensor) -> Self {
        Self { form: Form::F32, columns: values.columns(), words: values }
    }

    /// The operand. Its rows must have been written.
    pub(super) fn operand(&self) -> Operand<'_> {
        match self.form {
            Form::F32 | Form::Rounded => Operand::F32(self.words.view()),
            Form::Pairs => {
                let (rows, width) = (self.words.rows(), self.words.columns());
                Operand::Pairs(View::new(self.pairs(), rows, width, width))
            }
        }
    }

    /// Its columns as queries, keys and values, each from one on.
    pub(super) fn qkv(&self, firsts: [usize; 3]) -> Qkv<'_> {
        fn operands<W: Copy>(words: &[W], stride: usize, firsts: [usize; 3]) -> Operands<'_, W> {
            let [q, k, v] = firsts.map(|first| Columns { words, stride }.from(0, first));
            Operands { q, k, v }
        }
        let stride = self.words.columns();
        match self.form {
            Form::F32 => Qkv::F32(operands(self.words.values(), stride, firsts)),
            Form::Rounded => Qkv::Rounded(operands(self.words.values(), stride, firsts)),
            Form::Pairs => Qkv::Pairs(operands(self.pairs(), stride, firsts.map(|first| first / 2))),
        }
    }

    /// Its words where they are pairs.
    fn pairs(&self) -> &[u32] {
        // SAFETY: every bit pattern is a value of both types, which are of one size.
        unsafe { self.words.values().align_to::<u32>() }.1
    }
}

/// Rows that [`round_in_place`] has rounded.
pub(super) fn rounded_in_place(rows: &Tensor) -> Operand<'_> {
    // SAFETY: every bit pattern is a value of both types, which are of one size.
    let (_, words, _) = unsafe { rows.values().align_to::<u32>() };
    Operand::Pairs(View::new(words, rows.rows(), rows.columns().div_ceil(2), rows.columns()))
}

/// Rounds a row to pairs of bf16, which then lie in its first half.
pub(super) fn round_in_place(set: InstructionSet, row: &mut [f32]) {
    /// Values that are copied before the words that they become take their place.
    const PIECE: usize = 512;
    let mut values = [0.0; PIECE];
    for first in (0..row.len()).step_by(PIECE) {
        let count = PIECE.min(row.len() - first);
        values[..count].copy_from_slice(&row[first..first + count]);
        let words = &mut row[first / 2..(first + count).div_ceil(2)];
        // SAFETY: a word holds two bf16, and every bit pattern is a value of each type.
        let (_, halves, _) = unsafe { words.align_to_mut::<bf16>() };
        let (halves, padding) = halves.split_at_mut(count);
        round(set, &values[..count], halves);
        padding.fill(bf16::ZERO);
    }
}

/// Where several threads write an operand.
#[derive(Clone, Copy)]
pub(super) struct OperandTarget<'a> {
    set: InstructionSet,
    form: Form,
    columns: usize,
    words: Target<'a>,
    owner: PhantomData<&'a mut [f32]>,
}

impl<'a> OperandTarget<'a> {
    /// Writes columns of one row, from `first_column` on.
    ///
    /// # Safety
    /// Nobody else may read or write these elements meanwhile, nor those of the same word, of which two columns from an
    /// even one on are made.
    pub(super) unsafe fn write(self, row: usize, first_column: usize, values: &[f32]) {
        let columns = first_column..first_column + values.len();
        assert!(columns.end <= self.columns, "columns {columns:?} of an operand of {}", self.columns);
        match self.form {
            // SAFETY: the caller vouches for these elements.
            Form::F32 => unsafe { self.words.row(row, columns) }.copy_from_slice(values),
            // SAFETY: as above.
            Form::Rounded => round_within_f32(self.set, values, unsafe { self.words.row(row, columns) }),
            // SAFETY: as above.
            Form::Pairs => round(self.set, values, unsafe { self.halves_of_words(row, columns) }),
        }
    }

    /// Columns of one row, to be written, where two of them are a word; what pads the row is written.
    ///
    /// # Safety
    /// As for [`OperandTarget::write`], while the slice lives.
    pub(super) unsafe fn halves(self, row: usize, columns: Range<usize>) -> Option<&'a mut [bf16]> {
        assert!(columns.end <= self.columns, "columns {columns:?} of an operand of {}", self.columns);
        // SAFETY: the caller vouches for these elements.
        (self.form == Form::Pairs).then(|| unsafe { self.halves_of_words(row, columns) })
    }

    /// # Safety
    /// As for [`OperandTarget::halves`], of pairs.
    unsafe fn halves_of_words(self, row: usize, columns: Range<usize>) -> &'a mut [bf16] {
        let words = columns.start / 2..columns.end.div_ceil(2);
        // SAFETY: the caller vouches for these words.
        let words = unsafe { self.words.row(row, words) };
        // SAFETY: a word holds two bf16, and every bit pattern is a value of each type.
        let (_, halves, _) = unsafe { words.align_to_mut::<bf16>() };
        let (halves, padding) = halves[columns.start % 2..].split_at_mut(columns.len());
        if columns.end == self.columns {
            padding.fill(bf16::ZERO);
        }
        halves
    }
}

impl Cpu {
    /// An operand for products with weights.
    pub(super) fn operand<'a>(&self, x: View<'a>, buffer: &'a mut OperandBuffer) -> Operand<'a> {
        match self.form() {
            Form::F32 => Operand::F32(x),
            Form::Rounded | Form::Pairs => {
                let _kernel = self.profile.kernel("round", || Work::values(2 * x.rows() * x.columns()));
                let target = self.operand_target(x.rows(), x.columns(), buffer);
                let block = (4096 / x.columns().max(1)).max(1);
                self.each(x.rows().div_ceil(block), x.rows() * x.columns(), |part| {
                    for row in part * block..x.rows().min((part + 1) * block) {
                        // SAFETY: each row is written once.
                        unsafe { target.write(row, 0, x.row(row)) };
                    }
                });
                buffer.operand()
            }
        }
    }

    /// An operand of a product of which each thread computes parts: split once for all of them, where f32 is multiplied
    /// so.
    pub(super) fn operand_of_parts<'a>(&self, x: Operand<'a>, path: Path, buffer: &'a mut Tensor) -> Operand<'a> {
        match x {
            Operand::F32(x) if self.splits(path) => Operand::Split(self.split(x, buffer)),
            x => x,
        }
    }

    /// Gives an operand a shape, and its kernel a place to write to.
    pub(super) fn operand_target<'a>(
        &self,
        rows: usize,
        columns: usize,
        buffer: &'a mut OperandBuffer,
    ) -> OperandTarget<'a> {
        self.target_in(self.form(), rows, columns, buffer)
    }

    /// As [`Cpu::operand_target`], for heads: pairs only where none goes beyond its head.
    pub(super) fn heads_target<'a>(
        &self,
        rows: usize,
        columns: usize,
        head_dim: usize,
        buffer: &'a mut OperandBuffer,
    ) -> OperandTarget<'a> {
        let form = match self.form() {
            Form::Pairs if !head_dim.is_multiple_of(2) => Form::Rounded,
            form => form,
        };
        self.target_in(form, rows, columns, buffer)
    }

    fn target_in<'a>(
        &self,
        form: Form,
        rows: usize,
        columns: usize,
        buffer: &'a mut OperandBuffer,
    ) -> OperandTarget<'a> {
        let width = if form == Form::Pairs { columns.div_ceil(2) } else { columns };
        buffer.words.reshape(&self.buffers, rows, width);
        (buffer.form, buffer.columns) = (form, columns);
        OperandTarget { set: self.set, form, columns, words: buffer.words.target(), owner: PhantomData }
    }

    fn form(&self) -> Form {
        match self.compute {
            Compute::F32 => Form::F32,
            Compute::Bf16 if self.set.multiplies_pairs() => Form::Pairs,
            Compute::Bf16 => Form::Rounded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bits of an operand, whatever its form.
    fn bits(operand: &OperandBuffer) -> Vec<u32> {
        operand.words.values().iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn an_operand_is_the_same_whole_and_in_pieces() {
        for (rows, columns) in [(1, 6), (4, 1), (5, 7), (17, 130), (70, 99)] {
            let x: Vec<f32> = (0..rows * columns).map(|index| (index as f32).sin()).collect();
            let view = View::new(&x, rows, columns, columns);
            for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
                let cpu = Cpu::with_instructions(3, Compute::Bf16, set).unwrap();
                let [mut whole, mut in_pieces] = <[OperandBuffer; 2]>::default();
                cpu.operand(view, &mut whole);
                let target = cpu.operand_target(rows, columns, &mut in_pieces);
                for row in 0..rows {
                    let middle = columns / 4 * 2;
                    // SAFETY: one thread, and the pieces meet at an even column.
                    unsafe {
                        target.write(row, middle, &view.row(row)[middle..]);
                        target.write(row, 0, &view.row(row)[..middle]);
                    }
                }
                assert_eq!(bits(&whole), bits(&in_pieces), "{rows}x{columns} {}", set.name());
                if whole.form == Form::Pairs {
                    let last = bits(&whole)[columns.div_ceil(2) - 1];
                    assert!(columns % 2 == 0 || last >> 16 == 0, "padding of an odd row");
                }
            }
        }
    }

    #[test]
    fn rows_are_rounded_in_place_to_the_same_pairs() {
        for (rows, columns) in [(1, 1), (3, 7), (2, 512), (3, 513), (2, 1030), (5, 1999)] {
            let x: Vec<f32> = (0..rows * columns).map(|index| (index as f32).sin()).collect();
            for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available() && set.multiplies_pairs()) {
                let cpu = Cpu::with_instructions(1, Compute::Bf16, set).unwrap();
                let mut buffer = OperandBuffer::default();
                let expected = cpu.operand(View::new(&x, rows, columns, columns), &mut buffer);
                let mut in_place = cpu.shaped(rows, columns);
                in_place.values_mut().copy_from_slice(&x);
                in_place.values_mut().chunks_exact_mut(columns).for_each(|row| round_in_place(set, row));
                match (rounded_in_place(&in_place), expected) {
                    (Operand::Pairs(found), Operand::Pairs(expected)) => {
                        (0..rows).for_each(|row| assert_eq!(found.row(row), expected.row(row), "{rows}x{columns}"));
                    }
                    _ => panic!("pairs"),
                }
            }
        }
    }

    #[test]
    fn in_f32_an_operand_is_the_tensor_itself() {
        let x = vec![1.5; 40];
        let cpu = Cpu::new(1, Compute::F32).unwrap();
        let mut buffer = OperandBuffer::default();
        let Operand::F32(view) = cpu.operand(View::new(&x, 5, 8, 8), &mut buffer) else { panic!("pairs in f32") };
        assert_eq!(view.row(0).as_ptr(), x.as_ptr());
    }
}
