//! The `cpu` set with a fault, of the kind that a mistake in a kernel makes and no loss curve shows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use model::batch::Documents;
use model::cpu::{Cache, Cpu, Tensor, Weight};
use model::ops::{
    Activation, AttentionGradients, AttentionOperands, AttentionShape, Compute, Form, LogitGradient, LossRows, Ops,
    PrepareError, Result, RmsNorm, RopeTables, Rotation, TokenScore, WeightRole, WeightSource, Write,
};
use model::optimizer::{Elementwise, Updated};
use model::random::DropoutMask;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// The backward of a linear writes into the weight of this shape that it should only read.
    WritesWeight(usize, usize),
    /// The backward of a norm writes into its weight.
    WritesNorm,
    /// Gradients of this shape are lost.
    LosesGradient(usize, usize),
    /// Gradients of this shape become infinite.
    InfiniteGradient(usize, usize),
}

/// A kernel set with a fault.
pub(crate) struct Faulty {
    cpu: Cpu,
    fault: Fault,
    /// Tensors of a single row are read with another value than was written.
    norms_are_damaged: AtomicBool,
}

/// A weight that can be written through a shared reference, as every weight can on a device.
pub(crate) struct SharedWeight {
    weight: Mutex<Weight>,
    shape: [usize; 2],
}

impl Faulty {
    pub(crate) fn new(fault: Fault) -> Self {
        let cpu = Cpu::new(1, Compute::F32).expect("a thread");
        Self { cpu, fault, norms_are_damaged: AtomicBool::new(false) }
    }
}

impl SharedWeight {
    fn with<T>(&self, run: impl FnOnce(&mut Weight) -> T) -> T {
        run(&mut self.weight.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Hands operations on to the set within.
macro_rules! handed_on {
    ($($name:ident($($argument:ident: $kind:ty),*) $(-> $result:ty)?;)*) => {
        $(
            #[allow(clippy::too_many_arguments, reason = "those of the operation")]
            fn $name(&self, $($argument: $kind),*) -> handed_on!(@result $($result)?) {
                self.cpu.$name($($argument),*)
            }
        )*
    };
    (@result) => { Result };
    (@result $result:ty) => { $result };
}

impl Ops for Faulty {
    type Tensor = Tensor;
    type Weight = SharedWeight;
    type Cache = Cache;

    fn name(&self) -> &'static str {
        "faulty"
    }

    fn compute(&self) -> Compute {
        self.cpu.compute()
    }

    fn describe(&self) -> String {
        format!("{}, {:?}", self.cpu.describe(), self.fault)
    }

    fn prepare(
        &self,
        source: WeightSource<'_, Tensor>,
        shape: [usize; 2],
        role: WeightRole,
    ) -> std::result::Result<SharedWeight, PrepareError> {
        Ok(SharedWeight { weight: Mutex::new(self.cpu.prepare(source, shape, role)?), shape })
    }

    fn refresh(&self, weight: &mut SharedWeight, values: &mut Tensor) -> Result {
        weight.with(|weight| self.cpu.refresh(weight, values))
    }

    fn weight_bytes(&self, weight: &SharedWeight) -> u64 {
        weight.with(|weight| self.cpu.weight_bytes(weight))
    }

    fn fingerprint(&self, weight: &SharedWeight) -> Result<u64> {
        weight.with(|weight| self.cpu.fingerprint(weight))
    }

    fn embed(&self, table: &SharedWeight, ids: &[u32], scale: f32, y: &mut Tensor) -> Result {
        table.with(|table| self.cpu.embed(table, ids, scale, y))
    }

    fn linear(&self, x: &Tensor, weight: &SharedWeight, bias: Option<&Tensor>, write: Write, y: &mut Tensor) -> Result {
        weight.with(|weight| self.cpu.linear(x, weight, bias, write, y))
    }

    fn linear_backward(&self, dy: &Tensor, weight: &SharedWeight, write: Write, dx: &mut Tensor) -> Result {
        let [out_features, in_features] = weight.shape;
        weight.with(|weight| {
            self.cpu.linear_backward(dy, weight, write, dx)?;
            if self.fault != Fault::WritesWeight(out_features, in_features) {
                return Ok(());
            }
            // The last bit of its first value.
            let mut values = Tensor::default();
            self.cpu.embed(weight, &(0..out_features as u32).collect::<Vec<_>>(), 1.0, &mut values)?;
            let first = &mut values.values_mut()[0];
            *first = f32::from_bits(first.to_bits() ^ 1);
            self.cpu.refresh(weight, &mut values)
        })
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let mut values = self.cpu.read(tensor)?;
        if tensor.rows() == 1 && self.norms_are_damaged.load(Ordering::Relaxed) {
            values[0] += 1.0;
        }
        Ok(values)
    }

    fn matmul(&self, form: Form, scale: f32, a: &Tensor, b: &Tensor, write: Write, c: &mut Tensor) -> Result {
        let shape = (a.columns(), b.columns());
        let is_gradient = form == Form::Tn && write == Write::Add;
        if is_gradient && self.fault == Fault::LosesGradient(shape.0, shape.1) {
            return Ok(());
        }
        self.cpu.matmul(form, scale, a, b, write, c)?;
        if is_gradient && self.fault == Fault::InfiniteGradient(shape.0, shape.1) {
            c.values_mut()[0] = f32::INFINITY;
        }
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
        self.cpu.norm_backward(x, weight, norm, inverse_rms, dy, write, dx, weight_gradient)?;
        self.norms_are_damaged.store(self.fault == Fault::WritesNorm, Ordering::Relaxed);
        Ok(())
    }

    fn update<R: Elementwise<N>, const N: usize>(&self, rule: &R, updated: Updated<'_, Tensor>) -> Result {
        self.cpu.update(rule, updated)
    }

    handed_on! {
        tensor(rows: usize, columns: usize, values: &[f32]) -> Result<Tensor>;
        zeros(rows: usize, columns: usize) -> Result<Tensor>;
        shape(tensor: &Tensor) -> (usize, usize);
        write(tensor: &mut Tensor, values: &[f32]);
        copy(from: &Tensor, to: &mut Tensor);
        embed_gradient(ids: &[u32], dy: &Tensor, scale: f32, table_gradient: &mut Tensor);
        gather_rows(x: &Tensor, rows: &[u32], y: &mut Tensor);
        scatter_rows(x: &Tensor, rows: &[u32], total: usize, y: &mut Tensor);
        take_columns(x: &Tensor, from: usize, columns: usize, y: &mut Tensor);
        join_rows(parts: &[&Tensor], y: &mut Tensor);
        join_columns(parts: &[&Tensor], y: &mut Tensor);
        add(x: &Tensor, y: &mut Tensor);
        add_column_sums(x: &Tensor, sums: &mut Tensor);
        add_column_dots(x: &Tensor, y: &Tensor, sums: &mut Tensor);
        scale_columns(x: &Tensor, factors: &Tensor, bias: Option<&Tensor>, write: Write, y: &mut Tensor);
        dropout(x: &Tensor, mask: &DropoutMask<'_>, scale: f32, write: Write, y: &mut Tensor);
        norm(x: &Tensor, weight: &Tensor, norm: RmsNorm, y: &mut Tensor, inverse_rms: &mut Tensor);
        rope(x: &mut Tensor, tables: &RopeTables<Tensor>, table_rows: &[u32], rotation: Rotation);
        gated(activation: Activation, gate: &Tensor, up: &Tensor, y: &mut Tensor);
        gated_backward(
            activation: Activation,
            gate: &Tensor,
            up: &Tensor,
            dy: &Tensor,
            dgate: &mut Tensor,
            dup: &mut Tensor
        );
        attention(
            q: &Tensor,
            k: &Tensor,
            v: &Tensor,
            documents: &Documents,
            shape: &AttentionShape,
            y: &mut Tensor,
            logsumexp: &mut Tensor
        );
        attention_backward(
            saved: AttentionOperands<'_, Tensor>,
            dy: &Tensor,
            documents: &Documents,
            shape: &AttentionShape,
            gradients: AttentionGradients<'_, Tensor>
        );
        cache(sequences: usize, capacity: usize, shape: &AttentionShape) -> Result<Cache>;
        cache_append(cache: &mut Cache, k: &Tensor, v: &Tensor, documents: &Documents);
        attention_cached(
            q: &Tensor,
            cache: &Cache,
            documents: &Documents,
            shape: &AttentionShape,
            y: &mut Tensor
        );
        soft_cap(x: &mut Tensor, cap: f32);
        token_loss(
            logits: &mut Tensor,
            rows: &LossRows<'_, Tensor>,
            gradient: LogitGradient,
            scores: &mut Vec<TokenScore>
        );
        scale_rows(x: &mut Tensor, factors: &[f32]);
        sum_of_squares(x: &Tensor) -> Result<f64>;
    }
}

model::composed_blocks!(Faulty);
