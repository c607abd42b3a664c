//! The operations of the `cpu` set, on its tensors.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use profile::{Profile, Work};

use super::operand::{Operand, OperandBuffer, OperandTarget, round_in_place};
use super::product::{Finish, Target, View, ViewMut};
use super::weight::Sense;
use super::{Cache, Cpu, Tensor, Weight, loss, norm, pointwise};
use crate::batch::Documents;
use crate::loss::{CrossEntropy, LossRow, row_before_cap};
use crate::ops::{
    Activation, AttentionGradients, AttentionOperands, AttentionShape, CachedRows, Compute, Form, Linear,
    LogitGradient, LossRows, Ops, PrepareError, Result, RmsNorm, RopeTables, Rotation, TokenScore, WeightRole,
    WeightSource, Write,
};
use crate::optimizer::{Elementwise, Updated};
use crate::random::DropoutMask;
use crate::weights::FakeQuantization;

/// Elements per piece of work that is done element by element.
const PIECE: usize = 4096;

/// Where the gradients of logits are rounded to for the products that read them, row by row while a row is in cache.
#[derive(Clone, Copy)]
pub(super) enum RoundedGradient<'a> {
    /// They are not.
    None,
    /// In their own place, as pairs: nothing reads them in f32.
    InPlace,
    /// Beside those in f32.
    In(OperandTarget<'a>),
}

impl Cpu {
    /// A tensor of this shape and of whatever values.
    pub(super) fn shaped(&self, rows: usize, columns: usize) -> Tensor {
        let mut tensor = Tensor::default();
        tensor.reshape(&self.buffers, rows, columns);
        tensor
    }

    /// Shapes an output that is replaced, or checks one that is added to.
    fn output(&self, write: Write, y: &mut Tensor, rows: usize, columns: usize) {
        match write {
            Write::Replace => y.reshape(&self.buffers, rows, columns),
            Write::Add => {
                assert_eq!((y.rows(), y.columns()), (rows, columns), "shape of an output that is added to");
            }
        }
    }
}

impl Cpu {
    /// `sums += Σ rows of x`; see [`Ops::add_column_sums`].
    pub(super) fn add_sums_of_columns(&self, x: View<'_>, sums: &mut Tensor) {
        let _kernel = self.profile.kernel("column sums", || Work::values(x.rows() * x.columns()));
        self.each_rows(sums.values_mut(), 1, |first, sums| {
            for row in 0..x.rows() {
                pointwise::add(self.set, &x.row(row)[first..][..sums.len()], sums);
            }
        });
    }

    /// `y (+)= scale · mask ∘ x`, of one shape; see [`Ops::dropout`].
    pub(super) fn drop_elements(&self, x: View<'_>, mask: &DropoutMask<'_>, scale: f32, write: Write, y: &mut Tensor) {
        let _kernel = self.profile.kernel("dropout", || Work::values(2 * x.rows() * x.columns()));
        let columns = x.columns();
        self.each_rows(y.values_mut(), columns, |first, y| {
            if write == Write::Replace {
                y.fill(0.0);
            }
            let mut factors = vec![0.0; columns];
            for (row, y) in (first..).zip(y.chunks_exact_mut(columns)) {
                pointwise::add_dropped(self.set, mask, row, scale, &mut factors, x.row(row), y);
            }
        });
    }

    /// `y += xᵀ`.
    pub(super) fn add_transposed(&self, x: &Tensor, y: &mut Tensor) {
        let (x, columns) = (x.view(), y.columns());
        assert_eq!((x.rows(), x.columns()), (columns, y.rows()), "shape of a transposed matrix");
        self.each_rows(y.values_mut(), columns, |first, y| {
            for (column, y) in (first..).zip(y.chunks_exact_mut(columns)) {
                y.iter_mut().enumerate().for_each(|(row, y)| *y += x.row(row)[column]);
            }
        });
    }

    /// Scores rows of logits; see [`Ops::token_loss`].
    pub(super) fn score_rows(
        &self,
        logits: &mut Tensor,
        of: &LossRows<'_, Tensor>,
        gradient: LogitGradient,
        scores: &mut Vec<TokenScore>,
        rounded: RoundedGradient<'_>,
    ) {
        let LossRows { targets, soft_cap, loss, .. } = *of;
        let cross_entropy = loss.as_cross_entropy();
        let _kernel = self.profile.kernel("cross entropy", || Work::values(2 * logits.rows() * logits.columns()));
        let vocabulary = logits.columns();
        let first_score = scores.len();
        scores.resize(first_score + targets.len(), TokenScore { nll: 0.0, loss: 0.0, correct: false });
        let places: Vec<_> = scores[first_score..].iter_mut().map(std::sync::Mutex::new).collect();
        self.each_rows(logits.values_mut(), vocabulary, |first, rows| {
            for (row, logits) in (first..).zip(rows.chunks_exact_mut(vocabulary)) {
                let (target, gradient) = (targets[row] as usize, of.gradient(gradient, row));
                let score = match cross_entropy {
                    Some(CrossEntropy { label_smoothing }) => {
                        loss::cross_entropy(self.set, logits, target, soft_cap, label_smoothing, gradient)
                    }
                    None => {
                        let (set, teacher) = (self.set, of.teacher.map(|teacher| teacher.view().row(row)));
                        let of_row =
                            LossRow { set, logits: &mut *logits, teacher, target, gradient_scale: gradient.scale() };
                        row_before_cap(loss, of_row, soft_cap)
                    }
                };
                **places[row].lock().expect("each place is taken once") = score;
                match rounded {
                    RoundedGradient::None => {}
                    RoundedGradient::InPlace => round_in_place(self.set, logits),
                    // SAFETY: each row is written once.
                    RoundedGradient::In(target) => unsafe { target.write(row, 0, logits) },
                }
            }
        });
    }
}

impl Cpu {
    /// Whether gradients of weights are products of bf16.
    pub(super) fn rounds_weight_gradients(&self) -> bool {
        self.compute == Compute::Bf16 && self.set.has_tiles()
    }

    /// Adds the gradient of a weight, `dyᵀ · x`; `dy` is there in f32, as an operand or both. In tiles both factors are
    /// rounded to bf16, as for all products with weights; elsewhere it is computed in f32, whatever else is.
    pub(super) fn add_weight_gradient(
        &self,
        operand: Option<Operand<'_>>,
        dy: Option<View<'_>>,
        x: View<'_>,
        gradient: &mut Tensor,
    ) {
        let dy = || dy.expect("in f32, where it is read so");
        if !self.rounds_weight_gradients() {
            let dy = dy();
            let _kernel = self.profile.kernel("product", || Work::product(dy.columns(), dy.rows(), x.columns()));
            let finish = Finish { scale: 1.0, bias: None, write: Write::Add };
            return self.product_of_precision(dy.transposed(), x, finish, gradient.view_mut());
        }
        let [mut of_dy, mut of_x] = <[OperandBuffer; 2]>::default();
        let of_dy = operand.unwrap_or_else(|| self.operand(dy(), &mut of_dy));
        match (of_dy, self.operand(x, &mut of_x)) {
            (Operand::Pairs(of_dy), Operand::Pairs(of_x)) => {
                self.product_across_rows(of_dy, of_x, x.columns(), gradient);
            }
            _ => unreachable!("a set with tiles multiplies pairs"),
        }
    }
}

impl Tensor {
    /// All of it.
    pub(super) fn view(&self) -> View<'_> {
        View::new(self.values(), self.rows(), self.columns(), self.columns())
    }

    /// All of it, to be written.
    pub(super) fn view_mut(&mut self) -> ViewMut<'_> {
        let (rows, columns) = (self.rows(), self.columns());
        ViewMut::new(self.values_mut(), rows, columns, columns)
    }

    /// All of it, to be written by several threads.
    pub(super) fn target(&mut self) -> Target<'_> {
        let columns = self.columns();
        Target::new(self.values_mut(), columns)
    }
}

impl Ops for Cpu {
    type Tensor = Tensor;
    type Weight = Weight;
    type Cache = Cache;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn describe(&self) -> String {
        let weights = self.quantization.map(|quantization| format!(", weights in {}", quantization.format.name()));
        let (set, compute) = (self.set.name(), self.compute.name());
        let split = if self.of_high_precision { " of high precision" } else { "" };
        format!("cpu ({set}), {compute}{split}{}, threads: {}", weights.unwrap_or_default(), self.threads())
    }

    fn compute(&self) -> Compute {
        self.compute
    }

    fn tensor(&self, rows: usize, columns: usize, values: &[f32]) -> Result<Tensor> {
        let mut tensor = self.shaped(rows, columns);
        tensor.values_mut().copy_from_slice(values);
        Ok(tensor)
    }

    fn zeros(&self, rows: usize, columns: usize) -> Result<Tensor> {
        let mut tensor = self.shaped(rows, columns);
        self.clear(&mut tensor)?;
        Ok(tensor)
    }

    fn shape(&self, tensor: &Tensor) -> (usize, usize) {
        (tensor.rows(), tensor.columns())
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        Ok(tensor.values().to_vec())
    }

    fn write(&self, tensor: &mut Tensor, values: &[f32]) -> Result {
        tensor.values_mut().copy_from_slice(values);
        Ok(())
    }

    fn clear(&self, tensor: &mut Tensor) -> Result {
        self.each_rows(tensor.values_mut(), 1, |_, values| values.fill(0.0));
        Ok(())
    }

    fn copy(&self, from: &Tensor, to: &mut Tensor) -> Result {
        to.reshape(&self.buffers, from.rows(), from.columns());
        let from = from.values();
        self.each_rows(to.values_mut(), 1, |first, to| to.copy_from_slice(&from[first..][..to.len()]));
        Ok(())
    }

    fn prepare(
        &self,
        source: WeightSource<'_, Tensor>,
        shape: [usize; 2],
        role: WeightRole,
    ) -> std::result::Result<Weight, PrepareError> {
        let _kernel = self.profile.kernel("prepare weight", || Work::values(shape[0] * shape[1]));
        match source {
            WeightSource::Rows(rows) => self.frozen_weight(role, shape, rows),
            WeightSource::Trained(values) => Ok(self.weight_of_values(role, values)),
        }
    }

    fn refresh(&self, weight: &mut Weight, values: &mut Tensor) -> Result {
        let _kernel = self
            .profile
            .kernel("refresh weight", || Work::bytes(4 * values.rows() * values.columns() + weight.bytes() as usize));
        self.change_weight(weight, values);
        Ok(())
    }

    fn release(&self, weight: &mut Weight) {
        weight.release();
    }

    fn fingerprint(&self, weight: &Weight) -> Result<u64> {
        let _kernel = self.profile.kernel("fingerprint", || Work::bytes(weight.bytes() as usize));
        Ok(self.weight_fingerprint(weight))
    }

    fn weight_bytes(&self, weight: &Weight) -> u64 {
        weight.bytes()
    }

    fn embed(&self, table: &Weight, ids: &[u32], scale: f32, y: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("embed", || Work::bytes(8 * ids.len() * table.in_features));
        let width = table.in_features;
        y.reshape(&self.buffers, ids.len(), width);
        self.each_rows(y.values_mut(), width, |first, rows| {
            for (row, &id) in rows.chunks_exact_mut(width).zip(&ids[first..]) {
                table.copy_row(id as usize, scale, row);
            }
        });
        Ok(())
    }

    fn embed_gradient(&self, ids: &[u32], dy: &Tensor, scale: f32, table_gradient: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("embed gradient", || Work::values(3 * dy.rows() * dy.columns()));
        let width = dy.columns();
        let gradients = table_gradient.values_mut();
        for (row, &id) in dy.values().chunks_exact(width).zip(ids) {
            let target = &mut gradients[id as usize * width..][..width];
            target.iter_mut().zip(row).for_each(|(element, value)| *element += scale * value);
        }
        Ok(())
    }

    fn fake_quantize_rows(&self, x: &Tensor, y: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("fake quantize", || Work::values(2 * x.rows() * x.columns()));
        let features = x.columns();
        y.reshape(&self.buffers, x.rows(), features);
        self.each_rows(y.values_mut(), features, |first, rows| {
            rows.copy_from_slice(&x.values()[first * features..][..rows.len()]);
            FakeQuantization::Int8Activations { features }.forward(rows);
        });
        Ok(())
    }

    fn fake_quantize_rows_backward(&self, x: &Tensor, gradient: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("fake quantize", || Work::values(2 * x.rows() * x.columns()));
        let features = x.columns();
        self.each_rows(gradient.values_mut(), features, |first, rows| {
            let x = &x.values()[first * features..][..rows.len()];
            FakeQuantization::Int8Activations { features }.backward(x, rows);
        });
        Ok(())
    }

    fn gather_rows(&self, x: &Tensor, rows: &[u32], y: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("gather rows", || Work::values(2 * rows.len() * x.columns()));
        let width = x.columns();
        y.reshape(&self.buffers, rows.len(), width);
        self.each_rows(y.values_mut(), width, |first, targets| {
            for (target, &row) in targets.chunks_exact_mut(width).zip(&rows[first..]) {
                target.copy_from_slice(&x.values()[row as usize * width..][..width]);
            }
        });
        Ok(())
    }

    fn scatter_rows(&self, x: &Tensor, rows: &[u32], total: usize, y: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("scatter rows", || Work::values((total + rows.len()) * x.columns()));
        let width = x.columns();
        y.reshape(&self.buffers, total, width);
        self.clear(y)?;
        for (source, &row) in x.values().chunks_exact(width).zip(rows) {
            y.values_mut()[row as usize * width..][..width].copy_from_slice(source);
        }
        Ok(())
    }

    fn take_columns(&self, x: &Tensor, from: usize, columns: usize, y: &mut Tensor) -> Result {
        y.reshape(&self.buffers, x.rows(), columns);
        let rows = x.values().chunks_exact(x.columns());
        for (source, target) in rows.zip(y.values_mut().chunks_exact_mut(columns)) {
            target.copy_from_slice(&source[from..from + columns]);
        }
        Ok(())
    }

    fn join_columns(&self, parts: &[&Tensor], y: &mut Tensor) -> Result {
        let columns = parts.iter().map(|part| part.columns()).sum();
        y.reshape(&self.buffers, parts[0].rows(), columns);
        for (row, mut target) in y.values_mut().chunks_exact_mut(columns).enumerate() {
            for part in parts {
                let (head, rest) = target.split_at_mut(part.columns());
                head.copy_from_slice(&part.values()[row * part.columns()..][..part.columns()]);
                target = rest;
            }
        }
        Ok(())
    }

    fn join_rows(&self, parts: &[&Tensor], y: &mut Tensor) -> Result {
        y.reshape(&self.buffers, parts.iter().map(|part| part.rows()).sum(), parts[0].columns());
        let mut target = y.values_mut();
        for part in parts {
            let (head, rest) = target.split_at_mut(part.values().len());
            head.copy_from_slice(part.values());
            target = rest;
        }
        Ok(())
    }

    fn add(&self, x: &Tensor, y: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("add", || Work::values(3 * x.rows() * x.columns()));
        let x = x.values();
        assert_eq!(x.len(), y.values().len(), "shapes of a sum");
        self.each_rows(y.values_mut(), 1, |first, y| pointwise::add(self.set, &x[first..][..y.len()], y));
        Ok(())
    }

    fn add_column_sums(&self, x: &Tensor, sums: &mut Tensor) -> Result {
        self.add_sums_of_columns(x.view(), sums);
        Ok(())
    }

    fn add_column_dots(&self, x: &Tensor, y: &Tensor, sums: &mut Tensor) -> Result {
        let columns = x.columns();
        self.each_rows(sums.values_mut(), 1, |first, sums| {
            for (x, y) in x.values().chunks_exact(columns).zip(y.values().chunks_exact(columns)) {
                pointwise::add_product(self.set, &x[first..][..sums.len()], &y[first..][..sums.len()], sums);
            }
        });
        Ok(())
    }

    fn scale_columns(
        &self,
        x: &Tensor,
        factors: &Tensor,
        bias: Option<&Tensor>,
        write: Write,
        y: &mut Tensor,
    ) -> Result {
        let _kernel = self.profile.kernel("scale columns", || Work::values(2 * x.rows() * x.columns()));
        let columns = x.columns();
        self.output(write, y, x.rows(), columns);
        self.each_rows(y.values_mut(), columns, |first, y| {
            if write == Write::Replace {
                y.fill(0.0);
            }
            let x = &x.values()[first * columns..][..y.len()];
            for (x, y) in x.chunks_exact(columns).zip(y.chunks_exact_mut(columns)) {
                pointwise::add_product(self.set, x, factors.values(), y);
                if let Some(bias) = bias {
                    pointwise::add(self.set, bias.values(), y);
                }
            }
        });
        Ok(())
    }

    fn dropout(&self, x: &Tensor, mask: &DropoutMask<'_>, scale: f32, write: Write, y: &mut Tensor) -> Result {
        self.output(write, y, x.rows(), x.columns());
        self.drop_elements(x.view(), mask, scale, write, y);
        Ok(())
    }

    fn linear(&self, x: &Tensor, weight: &Weight, bias: Option<&Tensor>, write: Write, y: &mut Tensor) -> Result {
        self.output(write, y, x.rows(), weight.out_features);
        let bias = bias.map(Tensor::values);
        self.weight_product(
            self.operand(x.view(), &mut OperandBuffer::default()),
            weight,
            Sense::Forward,
            bias,
            write,
            y.view_mut(),
        );
        Ok(())
    }

    fn linear_each(&self, x: &Tensor, mut products: Vec<Linear<'_, Self>>) -> Result {
        for Linear { weight, y, .. } in &mut products {
            self.output(Write::Replace, y, x.rows(), weight.out_features);
        }
        self.weight_products(self.operand(x.view(), &mut OperandBuffer::default()), products);
        Ok(())
    }

    fn linear_backward(&self, dy: &Tensor, weight: &Weight, write: Write, dx: &mut Tensor) -> Result {
        self.output(write, dx, dy.rows(), weight.in_features);
        self.weight_product(
            self.operand(dy.view(), &mut OperandBuffer::default()),
            weight,
            Sense::Backward,
            None,
            write,
            dx.view_mut(),
        );
        Ok(())
    }

    fn weight_gradient(&self, dy: &Tensor, x: &Tensor, gradient: &mut Tensor) -> Result {
        self.add_weight_gradient(None, Some(dy.view()), x.view(), gradient);
        Ok(())
    }

    fn matmul(&self, form: Form, scale: f32, a: &Tensor, b: &Tensor, write: Write, c: &mut Tensor) -> Result {
        let (a, b) = match form {
            Form::Nn => (a.view(), b.view()),
            Form::Nt => (a.view(), b.view().transposed()),
            Form::Tn => (a.view().transposed(), b.view()),
        };
        self.output(write, c, a.rows(), b.columns());
        self.product(scale, a, b, write, c.view_mut());
        Ok(())
    }

    fn add_low_rank(
        &self,
        x: &Tensor,
        rows: Range<usize>,
        (a, b, scaling): (&Tensor, &Tensor, f32),
        y: &mut Tensor,
    ) -> Result {
        let (x, width) = (x.view().row_range(rows.clone()), y.columns());
        let mut low_rank = self.shaped(rows.len(), a.rows());
        self.product(1.0, x, a.view().transposed(), Write::Replace, low_rank.view_mut());
        let y = &mut y.values_mut()[rows.start * width..rows.end * width];
        let y = ViewMut::new(y, rows.len(), width, width);
        self.product(scaling, low_rank.view(), b.view().transposed(), Write::Add, y);
        Ok(())
    }

    fn norm(&self, x: &Tensor, weight: &Tensor, norm: RmsNorm, y: &mut Tensor, inverse_rms: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("norm", || Work::values(2 * x.rows() * x.columns()));
        let (columns, runs) = (x.columns(), x.columns() / weight.columns());
        y.reshape(&self.buffers, x.rows(), columns);
        inverse_rms.reshape(&self.buffers, x.rows(), runs);
        let inverse_rms = inverse_rms.target();
        self.each_rows(y.values_mut(), columns, |first, y| {
            let rows = y.len() / columns;
            let x = &x.values()[first * columns..][..y.len()];
            // SAFETY: pieces do not overlap.
            let inverse_rms = unsafe { inverse_rms.offset(first, 0).row(0, 0..rows * runs) };
            norm::forward(self.set, x, weight.values(), norm, y, inverse_rms);
        });
        Ok(())
    }

    fn norm_backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        norm: RmsNorm,
        inverse_rms: &Tensor,
        dy: &Tensor,
        write: Write,
        dx: &mut Tensor,
        weight_gradient: Option<&mut Tensor>,
    ) -> Result {
        let _kernel = self.profile.kernel("norm backward", || Work::values(3 * x.rows() * x.columns()));
        let (columns, width, runs) = (x.columns(), weight.columns(), inverse_rms.columns());
        self.output(write, dx, x.rows(), columns);
        self.each_rows(dx.values_mut(), columns, |first, dx| {
            if write == Write::Replace {
                dx.fill(0.0);
            }
            let (x, dy) = (&x.values()[first * columns..][..dx.len()], &dy.values()[first * columns..][..dx.len()]);
            norm::backward(self.set, x, weight.values(), norm, &inverse_rms.values()[first * runs..], dy, dx);
        });
        if let Some(gradient) = weight_gradient {
            self.each_rows(gradient.values_mut(), 1, |first, gradient| {
                norm::weight_gradient(self.set, x.values(), inverse_rms.values(), dy.values(), width, first, gradient);
            });
        }
        Ok(())
    }

    fn rope(&self, x: &mut Tensor, tables: &RopeTables<Tensor>, positions: &[u32], rotation: Rotation) -> Result {
        let _kernel = self.profile.kernel("rope", || Work::values(2 * x.rows() * x.columns()));
        let (columns, half) = (x.columns(), tables.rotary_dims / 2);
        self.each_rows(x.values_mut(), columns, |first, rows| {
            for (row, &position) in rows.chunks_exact_mut(columns).zip(&positions[first..]) {
                let angles = position as usize * half..(position as usize + 1) * half;
                let (cos, sin) = (&tables.cos.values()[angles.clone()], &tables.sin.values()[angles]);
                pointwise::rotate(self.set, row, tables.head_dim, cos, sin, rotation);
            }
        });
        Ok(())
    }

    fn gated(&self, activation: Activation, gate: &Tensor, up: &Tensor, y: &mut Tensor) -> Result {
        let _kernel = self.profile.kernel("gated", || Work::values(3 * gate.rows() * gate.columns()));
        y.reshape(&self.buffers, gate.rows(), gate.columns());
        let (gate, up) = (gate.values(), up.values());
        self.each_rows(y.values_mut(), 1, |first, y| {
            pointwise::gated(self.set, activation, &gate[first..][..y.len()], &up[first..][..y.len()], y);
        });
        Ok(())
    }

    fn gated_backward(
        &self,
        activation: Activation,
        gate: &Tensor,
        up: &Tensor,
        dy: &Tensor,
        dgate: &mut Tensor,
        dup: &mut Tensor,
    ) -> Result {
        let _kernel = self.profile.kernel("gated backward", || Work::values(5 * gate.rows() * gate.columns()));
        dgate.reshape(&self.buffers, gate.rows(), gate.columns());
        dup.reshape(&self.buffers, gate.rows(), gate.columns());
        let dup = Target::new(dup.values_mut(), 1);
        let (gate, up, dy) = (gate.values(), up.values(), dy.values());
        self.each_rows(dgate.values_mut(), 1, |first, dgate| {
            let piece = first..first + dgate.len();
            // SAFETY: pieces do not overlap.
            let dup = unsafe { dup.row(0, piece.clone()) };
            let (gate, up, dy) = (&gate[piece.clone()], &up[piece.clone()], &dy[piece]);
            pointwise::gated_backward(self.set, activation, gate, up, dy, dgate, dup);
        });
        Ok(())
    }

    fn attention(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut Tensor,
        logsumexp: &mut Tensor,
    ) -> Result {
        self.attend(q, k, v, documents, shape, y, logsumexp);
        Ok(())
    }

    fn attention_backward(
        &self,
        saved: AttentionOperands<'_, Tensor>,
        dy: &Tensor,
        documents: &Documents,
        shape: &AttentionShape,
        gradients: AttentionGradients<'_, Tensor>,
    ) -> Result {
        self.attend_backward(saved, dy, documents, shape, gradients);
        Ok(())
    }

    fn cache(&self, sequences: usize, capacity: usize, shape: &AttentionShape) -> Result<Cache> {
        Ok(Cache::new(sequences, capacity, shape, Arc::clone(&self.caches)))
    }

    fn cache_append(&self, cache: &mut Cache, k: &Tensor, v: &Tensor, documents: &Documents) -> Result {
        cache.append(k.values(), v.values(), documents);
        Ok(())
    }

    fn cache_clear(&self, cache: &mut Cache, slot: usize) {
        cache.clear(slot);
    }

    fn cache_read(&self, cache: &Cache, slot: usize, tokens: Range<usize>) -> Option<CachedRows> {
        Some(cache.read(slot, tokens))
    }

    fn cache_extend(&self, cache: &mut Cache, slot: usize, rows: &CachedRows) {
        cache.extend(slot, rows);
    }

    fn attention_cached(
        &self,
        q: &Tensor,
        cache: &Cache,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut Tensor,
    ) -> Result {
        self.attend_cached(q, cache, documents, shape, y);
        Ok(())
    }

    fn soft_cap(&self, x: &mut Tensor, cap: f32) -> Result {
        self.each_rows(x.values_mut(), 1, |_, x| pointwise::soft_cap(self.set, x, cap));
        Ok(())
    }

    fn token_loss(
        &self,
        logits: &mut Tensor,
        rows: &LossRows<'_, Tensor>,
        gradient: LogitGradient,
        scores: &mut Vec<TokenScore>,
    ) -> Result {
        self.score_rows(logits, rows, gradient, scores, RoundedGradient::None);
        Ok(())
    }

    fn scale_rows(&self, x: &mut Tensor, factors: &[f32]) -> Result {
        let _kernel = self.profile.kernel("scale rows", || Work::values(2 * x.rows() * x.columns()));
        let columns = x.columns();
        assert_eq!(factors.len(), x.rows(), "a factor per row");
        self.each_rows(x.values_mut(), columns, |first, rows| {
            for (row, values) in (first..).zip(rows.chunks_exact_mut(columns)) {
                values.iter_mut().for_each(|value| *value *= factors[row]);
            }
        });
        Ok(())
    }

    fn sum_of_squares(&self, x: &Tensor) -> Result<f64> {
        let _kernel = self.profile.kernel("sum of squares", || Work::values(x.rows() * x.columns()));
        let pieces: Vec<_> = x.values().chunks(PIECE).map(|piece| (piece, AtomicU64::new(0))).collect();
        self.each(pieces.len(), x.values().len(), |piece| {
            let (values, sum) = &pieces[piece];
            sum.store(pointwise::sum_of_squares(self.set, values).to_bits(), Ordering::Relaxed);
        });
        Ok(pieces.into_iter().map(|(_, sum)| f64::from_bits(sum.into_inner())).sum())
    }

    fn update<R: Elementwise<N>, const N: usize>(&self, rule: &R, updated: Updated<'_, Tensor>) -> Result {
        let elements = updated.value.rows() * updated.value.columns();
        // Everything but the gradient is read and written.
        let _kernel = self.profile.kernel(R::NAME, || Work::values((3 + 2 * N) * elements));
        self.update_tensor(rule, updated);
        Ok(())
    }
}
