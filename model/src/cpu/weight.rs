//! Weights as products read them: row-major in f32, bf16 or f16, or in the blocks of a format.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use half::{bf16, f16};
use profile::{Rate, Work};

use super::Cpu;
use super::memory::Memory;
use super::nf4::Nf4Weight;
use super::operand::Operand;
use super::product::{
    BlockWeight, Element, Finish, Order, Path, Right, Side, Target, TrainedWeight, View, ViewMut, Widened,
};
use super::quantized::{Layout, Quantized, QuantizedSide};
use super::shared::SharedWeightsError;
use super::stored::StoredBlocks;
use super::tensor::Tensor;
use crate::checkpoint::{BlockRows, CheckpointError, Rows};
use crate::fingerprint;
use crate::ops::{Compute, Linear, PrepareError, WeightRole, Write};
use crate::weights::{Activations, BlockFormat, Q4_0, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quantization, TensorType};

/// A weight `[out, in]`, as it is stored.
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
    /// Of products in f32 alone.
    F16(Memory<f16>),
    /// Trained, in f32, which products in bf16 round.
    Trained(TrainedWeight),
    /// In blocks, which products widen.
    Blocks(Box<dyn BlockWeight>),
    /// In blocks, of which products are sums of integers; a backward widens them.
    Integers(Quantized),
}

impl Values {
    /// Those in blocks.
    fn blocks(&self) -> Option<&dyn BlockWeight> {
        match self {
            Self::F32(_) | Self::Bf16(_) | Self::F16(_) | Self::Trained(_) => None,
            Self::Blocks(blocks) => Some(&**blocks),
            Self::Integers(blocks) => Some(blocks),
        }
    }
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
    fn side<R: Right>(&self, b: R) -> Side<'a, R> {
        Side {
            b: b.column_range(self.columns.clone()),
            finish: Finish { scale: 1.0, bias: self.bias, write: Write::Replace },
            c: self.c,
        }
    }
}

impl Weight {
    /// Row `row`, times a factor.
    pub(super) fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]) {
        let range = row * self.in_features..(row + 1) * self.in_features;
        match &self.values {
            Values::F32(values) => scaled(&values[range], factor, target),
            Values::Bf16(values) => scaled(&values[range], factor, target),
            Values::F16(values) => scaled(&values[range], factor, target),
            Values::Trained(values) => values.copy_row(row, factor, target),
            Values::Blocks(values) => values.copy_row(row, factor, target),
            Values::Integers(values) => values.copy_row(row, factor, target),
        }
    }

    /// Its size.
    pub(super) fn bytes(&self) -> u64 {
        (match &self.values {
            Values::F32(values) => size_of_val(&**values),
            Values::Bf16(values) => size_of_val(&**values),
            Values::F16(values) => size_of_val(&**values),
            Values::Trained(values) => values.bytes(),
            Values::Blocks(values) => values.bytes(),
            Values::Integers(values) => values.bytes(),
        }) as u64
    }

    /// Gives back values that it only reads, so that they can be changed in place.
    pub(super) fn release(&mut self) {
        match &mut self.values {
            Values::F32(values @ Memory::Lent(..)) => *values = Memory::default(),
            Values::Trained(values) => values.release(),
            _ => {}
        }
    }

    /// What products of so many columns with weights like it compute and move.
    pub(super) fn work(&self, a: Operand<'_>, sense: Sense, columns: usize) -> Work {
        let inner = match sense {
            Sense::Forward => self.in_features,
            Sense::Backward => self.out_features,
        };
        let rate = match a {
            Operand::F32(_) | Operand::Split(_) => Rate::F32,
            Operand::Pairs(_) => Rate::Bf16,
        };
        let bytes = self.bytes() as usize * inner * columns / (self.out_features * self.in_features).max(1);
        Work::of_weight(a.rows(), inner, columns, bytes, rate)
    }

    /// How products with it are computed.
    pub(super) fn path(&self, a: Operand<'_>, sense: Sense) -> Path {
        match a {
            Operand::F32(a) => Path::of(a, self.strides(sense)),
            Operand::Pairs(a) => Path::of(a, self.strides(sense)),
            Operand::Split(_) => Path::Blocks,
        }
    }

    /// As integers, of which its products are sums, if it is that.
    fn integers(&self) -> Option<&Quantized> {
        match &self.values {
            Values::Integers(integers) => Some(integers),
            Values::F32(_) | Values::Bf16(_) | Values::F16(_) | Values::Trained(_) | Values::Blocks(_) => None,
        }
    }

    /// Whether parts of products with it can be computed: not where what it is multiplied with is quantised whole.
    pub(super) fn has_parts(&self) -> bool {
        !matches!(self.values, Values::Integers(_))
    }

    /// How far apart the rows and columns of a product's right operand are, whatever they are stored as.
    fn strides(&self, sense: Sense) -> (usize, usize) {
        match sense {
            Sense::Forward => (1, self.in_features),
            Sense::Backward => (self.in_features, 1),
        }
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
        if let Some(quantization) = self.quantization {
            return Ok(self.quantized_weight(quantization, role, shape, rows)?);
        }
        // Each process has its own: they are small.
        if let Some(blocks) = rows.as_blocks() {
            let [out_features, in_features] = shape;
            return Ok(Weight {
                out_features,
                in_features,
                values: Values::Blocks(self.stored_blocks(shape, blocks)?),
            });
        }
        if let Some(matrix) = rows.as_nf4().filter(|matrix| matrix.shape == shape) {
            let [out_features, in_features] = shape;
            return Ok(Weight { out_features, in_features, values: Values::Blocks(Box::new(Nf4Weight(matrix))) });
        }
        let shared = |error: SharedWeightsError| PrepareError::Kernel(error.in_operation("prepare"));
        if let Some(weight) = self.next_shared(shape).map_err(shared)? {
            return Ok(weight);
        }
        self.move_to_shared(self.weight_of_rows(shape, rows)?).map_err(shared)
    }

    /// A weight of blocks as they are stored.
    fn stored_blocks(&self, shape: [usize; 2], rows: BlockRows<'_>) -> Result<Box<dyn BlockWeight>, CheckpointError> {
        Ok(match rows.tensor_type {
            TensorType::Q4_0 => Box::new(StoredBlocks::<Q4_0>::copied(self, shape, rows.bytes)?),
            TensorType::Q5_0 => Box::new(StoredBlocks::<Q5_0>::copied(self, shape, rows.bytes)?),
            TensorType::Q5_1 => Box::new(StoredBlocks::<Q5_1>::copied(self, shape, rows.bytes)?),
            TensorType::Q8_0 => Box::new(StoredBlocks::<Q8_0>::copied(self, shape, rows.bytes)?),
            TensorType::Q4K => Box::new(StoredBlocks::<Q4K>::copied(self, shape, rows.bytes)?),
            TensorType::Q5K => Box::new(StoredBlocks::<Q5K>::copied(self, shape, rows.bytes)?),
            TensorType::Q6K => Box::new(StoredBlocks::<Q6K>::copied(self, shape, rows.bytes)?),
            TensorType::F32 | TensorType::F16 | TensorType::Bf16 => unreachable!("no blocks"),
        })
    }

    /// A weight of these rows in blocks. Each process has its own.
    fn quantized_weight(
        &self,
        quantization: Quantization,
        role: WeightRole,
        [out_features, in_features]: [usize; 2],
        rows: &dyn Rows,
    ) -> Result<Weight, CheckpointError> {
        let format = quantization.format.for_role(role);
        let shape = [out_features, in_features];
        // What is stored in as many bits, or fewer, is not rounded again.
        let stored = rows.as_blocks().filter(|_| quantization.activations == Activations::Int8);
        if let Some((layout, rows)) = stored.and_then(|rows| Some((Layout::stored(rows.tensor_type, format)?, rows))) {
            let values = Values::Integers(Quantized::of_blocks(self, shape, rows, layout)?);
            return Ok(Weight { out_features, in_features, values });
        }
        let values = match format {
            BlockFormat::Int8 | BlockFormat::Int4 => {
                let blocks = Quantized::read(self, out_features, in_features, rows, format)?;
                match quantization.activations {
                    Activations::Computed => Values::Blocks(Box::new(blocks)),
                    Activations::Int8 => Values::Integers(blocks),
                }
            }
            BlockFormat::Q8_0 => Values::Blocks(Box::new(StoredBlocks::<Q8_0>::read(self, shape, rows)?)),
            BlockFormat::Q4_0 => Values::Blocks(Box::new(StoredBlocks::<Q4_0>::read(self, shape, rows)?)),
        };
        Ok(Weight { out_features, in_features, values })
    }

    /// Moves a frozen weight to where other processes see it, where there is such a place.
    fn move_to_shared(&self, weight: Weight) -> Result<Weight, SharedWeightsError> {
        let Some(shared) = &self.shared else { return Ok(weight) };
        let values = match weight.values {
            Values::F32(values) => Values::F32(Memory::Shared(shared.put(&values)?)),
            Values::Bf16(values) => Values::Bf16(Memory::Shared(shared.put(&values)?)),
            values @ (Values::F16(_) | Values::Trained(_) | Values::Blocks(_) | Values::Integers(_)) => values,
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
        };
        Ok(Some(Weight { out_features, in_features, values }))
    }

    /// A weight prepared from trained values: it reads them where they lie.
    pub(super) fn weight_of_values(&self, role: WeightRole, values: &mut Tensor) -> Weight {
        let (out_features, in_features) = (values.rows(), values.columns());
        let weight = match (self.quantization, self.compute) {
            (Some(Quantization { format, activations: Activations::Int8 }), _) if format.has_integer_products() => {
                let format = format.for_role(role);
                Values::Integers(Quantized::new(self, out_features, in_features, values.values(), format))
            }
            (_, Compute::F32) => Values::F32(values.lend()),
            (_, Compute::Bf16) => Values::Trained(TrainedWeight::new([out_features, in_features], values.lend())),
        };
        Weight { out_features, in_features, values: weight }
    }

    /// Gives a weight of trained values the new ones.
    pub(super) fn change_weight(&self, weight: &mut Weight, values: &mut Tensor) {
        let shape = [weight.out_features, weight.in_features];
        weight.values = match &weight.values {
            Values::F32(_) => Values::F32(values.lend()),
            Values::Trained(_) => Values::Trained(TrainedWeight::new(shape, values.lend())),
            Values::Integers(quantized) => {
                Values::Integers(Quantized::new(self, shape[0], shape[1], values.values(), quantized.format()))
            }
            Values::Bf16(_) | Values::F16(_) | Values::Blocks(_) => unreachable!("trained values are not stored so"),
        };
    }

    /// The fingerprint of a weight's bits.
    pub(super) fn weight_fingerprint(&self, weight: &Weight) -> u64 {
        /// Values in a part, which one thread reads.
        const PART: usize = 1 << 18;
        if let Some(blocks) = weight.values.blocks() {
            return blocks.fingerprint();
        }
        let length = weight.out_features * weight.in_features;
        let parts: Vec<_> = (0..length.div_ceil(PART)).map(|_| AtomicU64::new(0)).collect();
        self.each(parts.len(), length, |part| {
            let range = part * PART..length.min((part + 1) * PART);
            let of_part = match &weight.values {
                Values::F32(values) => fingerprint::of_f32(&values[range]),
                Values::Bf16(values) => fingerprint::of_bf16(&values[range]),
                Values::F16(values) => fingerprint::of_f16(&values[range]),
                Values::Trained(weight) => fingerprint::of_f32(&weight.values()[range]),
                Values::Blocks(_) | Values::Integers(_) => unreachable!("returned above"),
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
        fn sides<'a, R: Right>(
            parts: &[WeightPart<'a>],
            of: impl Fn(&'a Weight) -> Option<R>,
        ) -> Option<Vec<Side<'a, R>>> {
            parts.iter().map(|part| of(part.weight).map(|b| part.side(b))).collect()
        }
        let f32s = sides(parts, |weight| match &weight.values {
            Values::F32(values) => Some(weight.view(values, sense)),
            _ => None,
        });
        let bf16s = sides(parts, |weight| match &weight.values {
            Values::Bf16(values) => Some(weight.view(values, sense)),
            _ => None,
        });
        let f16s = sides(parts, |weight| match &weight.values {
            Values::F16(values) => Some(weight.view(values, sense)),
            _ => None,
        });
        let blocks = sides(parts, |weight| match &weight.values {
            Values::Blocks(values) => Some(self.widened(&**values, sense)),
            Values::Trained(values) => Some(self.widened(values, sense)),
            _ => None,
        });
        // SAFETY: the caller vouches for the results.
        unsafe {
            match (a, f32s, bf16s, f16s, blocks) {
                (Operand::F32(a), Some(sides), _, _, _) => self.product_along(path, a, &sides),
                (Operand::F32(a), _, Some(sides), _, _) => self.product_along(path, a, &sides),
                (Operand::F32(a), _, _, Some(sides), _) => self.product_along(path, a, &sides),
                (Operand::F32(a), _, _, _, Some(sides)) => self.product_along(path, a, &sides),
                (Operand::Split(a), Some(sides), _, _, _) => self.product_of_split_along(a, &sides),
                (Operand::Split(a), _, Some(sides), _, _) => self.product_of_split_along(a, &sides),
                (Operand::Split(a), _, _, Some(sides), _) => self.product_of_split_along(a, &sides),
                (Operand::Split(a), _, _, _, Some(sides)) => self.product_of_split_along(a, &sides),
                (Operand::Pairs(a), _, Some(sides), _, _) => self.product_of_pairs_along(path, a, &sides),
                (Operand::Pairs(a), _, _, _, Some(sides)) => self.product_of_pairs_along(path, a, &sides),
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
                self.product_of_precision(a, weight.view(values, sense), finish, c);
            }
            (Values::Bf16(values), Operand::F32(a)) => {
                self.product_of_precision(a, weight.view(values, sense), finish, c);
            }
            (Values::F16(values), Operand::F32(a)) => {
                self.product_of_precision(a, weight.view(values, sense), finish, c);
            }
            (Values::Integers(weight), a) if sense == Sense::Forward => {
                self.quantized_products(a, vec![QuantizedSide { weight, finish, c }]);
            }
            (Values::Integers(values), Operand::F32(a)) => {
                self.product_of_precision(a, self.widened(values, sense), finish, c);
            }
            (Values::Blocks(values), Operand::F32(a)) => {
                self.product_of_precision(a, self.widened(&**values, sense), finish, c);
            }
            (Values::Trained(values), Operand::F32(a)) => {
                self.product_of_precision(a, self.widened(values, sense), finish, c);
            }
            (Values::Trained(values), Operand::Pairs(a)) => {
                self.product_of_pairs(a, self.widened(values, sense), finish, c);
            }
            (Values::Bf16(values), Operand::Pairs(a)) => {
                self.product_of_pairs(a, weight.view(values, sense), finish, c);
            }
            (Values::Integers(values), Operand::Pairs(a)) => {
                self.product_of_pairs(a, self.widened(values, sense), finish, c);
            }
            (Values::Blocks(values), Operand::Pairs(a)) => {
                self.product_of_pairs(a, self.widened(&**values, sense), finish, c);
            }
            (Values::F32(_) | Values::F16(_), Operand::Pairs(_)) => unreachable!("an operand of another kernel set"),
            (_, Operand::Split(_)) => unreachable!("an operand of a whole product is split by the product"),
        }
    }

    /// `y = x · weightᵀ (+ bias)` of several weights: those in integers of one layout that follow each other in one
    /// region of work, for which the operand is quantised once.
    pub(super) fn weight_products(&self, x: Operand<'_>, mut products: Vec<Linear<'_, Self>>) {
        let layout = |product: &Linear<'_, Self>| product.weight.integers().map(Quantized::layout);
        for alike in products.chunk_by_mut(|a, b| layout(a).is_some() && layout(a) == layout(b)) {
            if alike.len() > 1 {
                let _kernel = self.profile.kernel("linear", || {
                    let columns = alike.iter().map(|product| product.weight.out_features).sum();
                    let bytes = alike.iter().map(|product| product.weight.bytes() as usize).sum();
                    Work::of_weight(x.rows(), alike[0].weight.in_features, columns, bytes, Rate::F32)
                });
                let sides = alike.iter_mut().filter_map(|Linear { weight, bias, y }| {
                    let finish = Finish { scale: 1.0, bias: bias.map(Tensor::values), write: Write::Replace };
                    Some(QuantizedSide { weight: weight.integers()?, finish, c: y.view_mut() })
                });
                self.quantized_products(x, sides.collect());
                continue;
            }
            for Linear { weight, bias, y } in alike {
                let bias = bias.map(Tensor::values);
                self.weight_product(x, weight, Sense::Forward, bias, Write::Replace, y.view_mut());
            }
        }
    }

    fn widened<'a>(&self, blocks: &'a dyn BlockWeight, sense: Sense) -> Widened<'a> {
        let order = match sense {
            Sense::Forward => Order::Columns,
            Sense::Backward => Order::Rows,
        };
        Widened::new(blocks, self.set, self.compute, order)
    }
}

#[cfg(test)]
mod tests {
    use super::super::InstructionSet;
    use super::super::operand::OperandBuffer;
    use super::super::rounding::nearest;
    use super::*;
    use crate::checkpoint::ValueRows;
    use crate::ops::MatmulPrecision;

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
                    let stored = ValueRows::new(&weight, in_features);
                    let weight = cpu.weight_of_rows([out_features, in_features], &stored).unwrap();
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

    /// Shapes of products: rows, outputs and inputs.
    const SHAPES: [(usize, usize, usize); 7] =
        [(1, 1, 1), (3, 17, 33), (16, 50, 31), (17, 97, 64), (40, 48, 96), (9, 33, 1), (30, 20, 2100)];

    /// Asserts that products with two weights, in both directions and of a part, have the same bits.
    fn assert_same_products(cpu: &Cpu, rows: usize, shape: [usize; 2], [one, other]: [&Weight; 2], name: &str) {
        let [out_features, in_features] = shape;
        for (sense, inner, columns) in
            [(Sense::Forward, in_features, out_features), (Sense::Backward, out_features, in_features)]
        {
            let a: Vec<f32> = (0..rows * inner).map(|index| (0.7 * index as f32).cos()).collect();
            let mut buffer = OperandBuffer::default();
            let a = cpu.operand(View::new(&a, rows, inner, inner), &mut buffer);
            let bits = |c: Vec<f32>| c.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let product = |weight: &Weight| {
                let mut c = vec![0.5; rows * columns];
                let target = ViewMut::new(&mut c, rows, columns, columns);
                cpu.weight_product(a, weight, sense, None, Write::Add, target);
                bits(c)
            };
            assert_eq!(product(one), product(other), "{rows}x{out_features}x{in_features} {name}");
            let part = |weight: &Weight| {
                let columns = columns / 3..columns;
                let mut c = vec![0.5; rows * columns.len()];
                let c_target = Target::new(&mut c, columns.len());
                let part = WeightPart { weight, columns, bias: None, c: c_target };
                // SAFETY: nobody else has these elements.
                unsafe { cpu.products_along(weight.path(a, sense), a, sense, &[part]) };
                bits(c)
            };
            assert_eq!(part(one), part(other), "a part of {rows}x{out_features}x{in_features} {name}");
        }
    }

    /// Whatever the set, the direction, the number of rows and the part: a product in bf16 with trained values has the
    /// bits of that with the rounded ones.
    #[test]
    fn a_product_with_trained_values_is_that_with_rounded_ones() {
        for (rows, out_features, in_features) in SHAPES {
            let weight: Vec<f32> =
                (0..out_features * in_features).map(|index| (0.37 * index as f32).cos() * 0.1).collect();
            for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
                let cpu = Cpu::with_instructions(2, Compute::Bf16, set).unwrap();
                let mut values = cpu.shaped(out_features, in_features);
                values.values_mut().copy_from_slice(&weight);
                let trained = cpu.weight_of_values(WeightRole::Matrix, &mut values);
                let stored = ValueRows::new(&weight, in_features);
                let rounded = cpu.weight_of_rows([out_features, in_features], &stored).unwrap();
                let row = |weight: &Weight| {
                    let mut row = vec![0.0; in_features];
                    weight.copy_row(out_features - 1, 2.0, &mut row);
                    row
                };
                assert_eq!(row(&trained), row(&rounded), "{}", set.name());
                let shape = [out_features, in_features];
                assert_same_products(&cpu, rows, shape, [&trained, &rounded], set.name());
            }
        }
    }

    /// Whatever the set, the dtype, the direction, the number of rows and the part: a product with a quantised weight
    /// has the bits of that with its dequantised values.
    #[test]
    fn a_product_with_a_quantised_weight_is_that_with_the_dequantised_one() {
        for format in BlockFormat::ALL {
            for (rows, out_features, in_features) in SHAPES {
                let value = |index: usize| (0.37 * index as f32).cos() * 0.1;
                let weight: Vec<f32> = (0..out_features * in_features).map(value).collect();
                let computes = [
                    (Compute::F32, MatmulPrecision::Highest),
                    (Compute::F32, MatmulPrecision::High),
                    (Compute::Bf16, MatmulPrecision::Highest),
                ];
                let sets = InstructionSet::ALL.into_iter().filter(|set| set.is_available());
                for (set, (compute, precision)) in sets.flat_map(|set| computes.map(|compute| (set, compute))) {
                    let cpu = Cpu::with_instructions(2, compute, set).unwrap().with_matmul_precision(precision);
                    let cpu = cpu.quantizing(Quantization { format, activations: Activations::Computed });
                    let stored = ValueRows::new(&weight, in_features);
                    let quantized =
                        cpu.frozen_weight(WeightRole::Matrix, [out_features, in_features], &stored).unwrap();
                    let mut values = vec![0.0; weight.len()];
                    let each_row = values.chunks_mut(in_features).enumerate();
                    each_row.for_each(|(row, values)| quantized.copy_row(row, 1.0, values));
                    assert_ne!(values, weight, "something was rounded");
                    let dequantised = ValueRows::new(&values, in_features);
                    let dequantised = cpu.weight_of_rows([out_features, in_features], &dequantised).unwrap();
                    let shape = [out_features, in_features];
                    let name = format!("{} {} {}", format.name(), compute.name(), set.name());
                    assert_same_products(&cpu, rows, shape, [&quantized, &dequantised], &name);
                }
            }
        }
    }
}
