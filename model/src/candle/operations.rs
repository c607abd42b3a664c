//! The operations of the `candle` set, on its tensors.

use candle_core::{DType, Tensor};
use profile::{Profile, Work};

use super::{Candle, CandleCache, CandleTensor, CandleWeight, attention, loss, optimizer, rows, together};
use crate::batch::Documents;
use crate::cpu::InstructionSet;
use crate::fingerprint;
use crate::loss::{LossRow, row_before_cap};
use crate::ops::{
    Activation, AttentionGradients, AttentionOperands, AttentionShape, Compute, Form, KernelError, LogitGradient,
    LossRows, Ops, PrepareError, Result, RmsNorm, RopeTables, Rotation, TokenScore, WeightRole, WeightSource, Write,
};
use crate::optimizer::{Elementwise, StateTensor, Updated, update_in_main_memory};
use crate::random::DropoutMask;

impl Ops for Candle {
    type Tensor = CandleTensor;
    type Weight = CandleWeight;
    type Cache = CandleCache;

    fn name(&self) -> &'static str {
        "candle"
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn describe(&self) -> String {
        let device = match self.device.location() {
            candle_core::DeviceLocation::Cpu => "the processor".to_owned(),
            candle_core::DeviceLocation::Cuda { gpu_id } => format!("CUDA device {gpu_id}"),
            candle_core::DeviceLocation::Metal { gpu_id } => format!("Metal device {gpu_id}"),
        };
        let sums = self.sums.as_ref().map(|sums| format!(", gradients added up by {}", sums.describe()));
        format!("candle on {device}, {}{}", self.compute.name(), sums.unwrap_or_default())
    }

    fn compute(&self) -> Compute {
        self.compute
    }

    fn tensor(&self, rows: usize, columns: usize, values: &[f32]) -> Result<CandleTensor> {
        self.named("tensor", || Ok(CandleTensor(Some(Tensor::from_slice(values, (rows, columns), &self.device)?))))
    }

    fn zeros(&self, rows: usize, columns: usize) -> Result<CandleTensor> {
        self.named("zeros", || Ok(CandleTensor(Some(Tensor::zeros((rows, columns), DType::F32, &self.device)?))))
    }

    fn shape(&self, tensor: &CandleTensor) -> (usize, usize) {
        tensor.0.as_ref().map_or((0, 0), |tensor| tensor.dims2().expect("every tensor of the set is a matrix"))
    }

    fn read(&self, tensor: &CandleTensor) -> Result<Vec<f32>> {
        let Some(tensor) = &tensor.0 else { return Ok(Vec::new()) };
        self.named("read", || tensor.flatten_all()?.to_vec1())
    }

    fn write(&self, tensor: &mut CandleTensor, values: &[f32]) -> Result {
        let shape = self.shape(tensor);
        self.named("write", || {
            tensor.0 = Some(Tensor::from_slice(values, shape, &self.device)?);
            Ok(())
        })
    }

    fn copy(&self, from: &CandleTensor, to: &mut CandleTensor) -> Result {
        // Tensors are never changed in place, so sharing one is as good as a copy.
        to.clone_from(from);
        Ok(())
    }

    fn prepare(
        &self,
        source: WeightSource<'_, CandleTensor>,
        [out_features, in_features]: [usize; 2],
        _role: WeightRole,
    ) -> std::result::Result<CandleWeight, PrepareError> {
        let values = match source {
            WeightSource::Rows(rows) => {
                let mut values = vec![0.0; out_features * in_features];
                rows.read(0, &mut values)?;
                self.tensor(out_features, in_features, &values)?
            }
            WeightSource::Trained(values) => values.clone(),
        };
        Ok(self.named("prepare", || Ok(CandleWeight(self.operand(values.get())?)))?)
    }

    fn refresh(&self, weight: &mut CandleWeight, values: &mut CandleTensor) -> Result {
        self.named("refresh", || {
            weight.0 = self.operand(values.get())?;
            Ok(())
        })
    }

    fn weight_bytes(&self, weight: &CandleWeight) -> u64 {
        (weight.0.elem_count() * weight.0.dtype().size_in_bytes()) as u64
    }

    fn fingerprint(&self, weight: &CandleWeight) -> Result<u64> {
        self.named("fingerprint", || {
            let values = weight.0.flatten_all()?;
            Ok(match weight.0.dtype() {
                DType::BF16 => fingerprint::of_bf16(&values.to_vec1()?),
                _ => fingerprint::of_f32(&values.to_vec1()?),
            })
        })
    }

    fn begin_sums(&self, tensors: &mut [&mut CandleTensor]) -> Result<bool> {
        let Some(sums) = &self.sums else { return Ok(false) };
        self.named("begin_sums", || together::begin(&**sums, tensors)).map(|()| true)
    }

    fn sums_are_over(&self) -> Result<bool> {
        self.sums.as_ref().map_or(Ok(true), |sums| self.named("sums_are_over", || sums.are_over()))
    }

    fn embed(&self, table: &CandleWeight, ids: &[u32], scale: f32, y: &mut CandleTensor) -> Result {
        self.named("embed", || {
            let rows = table.0.index_select(&self.indices(ids)?, 0)?.to_dtype(DType::F32)?;
            y.put(Write::Replace, (rows * f64::from(scale))?)
        })
    }

    fn embed_gradient(&self, ids: &[u32], dy: &CandleTensor, scale: f32, table_gradient: &mut CandleTensor) -> Result {
        self.named("embed_gradient", || {
            let rows = (dy.get() * f64::from(scale))?;
            let sum = table_gradient.get().index_add(&self.indices(ids)?, &rows, 0)?;
            table_gradient.put(Write::Replace, sum)
        })
    }

    fn gather_rows(&self, x: &CandleTensor, rows: &[u32], y: &mut CandleTensor) -> Result {
        self.named("gather_rows", || y.put(Write::Replace, x.get().index_select(&self.indices(rows)?, 0)?))
    }

    fn scatter_rows(&self, x: &CandleTensor, rows: &[u32], total: usize, y: &mut CandleTensor) -> Result {
        self.named("scatter_rows", || {
            let zeros = Tensor::zeros((total, x.get().dim(1)?), DType::F32, &self.device)?;
            y.put(Write::Replace, zeros.index_add(&self.indices(rows)?, x.get(), 0)?)
        })
    }

    fn take_columns(&self, x: &CandleTensor, from: usize, columns: usize, y: &mut CandleTensor) -> Result {
        self.named("take_columns", || y.put(Write::Replace, x.get().narrow(1, from, columns)?.contiguous()?))
    }

    fn join_rows(&self, parts: &[&CandleTensor], y: &mut CandleTensor) -> Result {
        let parts: Vec<&Tensor> = parts.iter().map(|part| part.get()).collect();
        self.named("join_rows", || y.put(Write::Replace, Tensor::cat(&parts, 0)?))
    }

    fn join_columns(&self, parts: &[&CandleTensor], y: &mut CandleTensor) -> Result {
        let parts: Vec<&Tensor> = parts.iter().map(|part| part.get()).collect();
        self.named("join_columns", || y.put(Write::Replace, Tensor::cat(&parts, 1)?.contiguous()?))
    }

    fn add(&self, x: &CandleTensor, y: &mut CandleTensor) -> Result {
        self.named("add", || y.put(Write::Add, x.get().clone()))
    }

    fn add_column_sums(&self, x: &CandleTensor, sums: &mut CandleTensor) -> Result {
        self.named("add_column_sums", || sums.put(Write::Add, x.get().sum_keepdim(0)?))
    }

    fn add_column_dots(&self, x: &CandleTensor, y: &CandleTensor, sums: &mut CandleTensor) -> Result {
        self.named("add_column_dots", || sums.put(Write::Add, (x.get() * y.get())?.sum_keepdim(0)?))
    }

    fn scale_columns(
        &self,
        x: &CandleTensor,
        factors: &CandleTensor,
        bias: Option<&CandleTensor>,
        write: Write,
        y: &mut CandleTensor,
    ) -> Result {
        self.named("scale_columns", || {
            let scaled = x.get().broadcast_mul(factors.get())?;
            let scaled = match bias {
                Some(bias) => scaled.broadcast_add(bias.get())?,
                None => scaled,
            };
            y.put(write, scaled)
        })
    }

    fn dropout(
        &self,
        x: &CandleTensor,
        mask: &DropoutMask<'_>,
        scale: f32,
        write: Write,
        y: &mut CandleTensor,
    ) -> Result {
        let shape = self.shape(x);
        let mut factors = vec![0.0; shape.0 * shape.1];
        for (row, factors) in factors.chunks_mut(shape.1.max(1)).enumerate() {
            mask.factors(row, factors);
        }
        self.named("dropout", || {
            let factors = Tensor::from_vec(factors, shape, &self.device)?;
            y.put(write, ((x.get() * factors)? * f64::from(scale))?)
        })
    }

    fn linear(
        &self,
        x: &CandleTensor,
        weight: &CandleWeight,
        bias: Option<&CandleTensor>,
        write: Write,
        y: &mut CandleTensor,
    ) -> Result {
        self.named("linear", || {
            let result = product(&self.operand(x.get())?, &weight.0.t()?)?;
            let result = match bias {
                Some(bias) => result.broadcast_add(bias.get())?,
                None => result,
            };
            y.put(write, result)
        })
    }

    fn linear_backward(&self, dy: &CandleTensor, weight: &CandleWeight, write: Write, dx: &mut CandleTensor) -> Result {
        self.named("linear_backward", || dx.put(write, product(&self.operand(dy.get())?, &weight.0)?))
    }

    fn matmul(
        &self,
        form: Form,
        scale: f32,
        a: &CandleTensor,
        b: &CandleTensor,
        write: Write,
        c: &mut CandleTensor,
    ) -> Result {
        self.named("matmul", || {
            let (a, b) = (a.get(), b.get());
            let result = match form {
                Form::Nn => product(a, b)?,
                Form::Nt => product(a, &b.t()?)?,
                Form::Tn => product(&a.t()?, b)?,
            };
            c.put(write, (result * f64::from(scale))?)
        })
    }

    fn norm(
        &self,
        x: &CandleTensor,
        weight: &CandleTensor,
        norm: RmsNorm,
        y: &mut CandleTensor,
        inverse_rms: &mut CandleTensor,
    ) -> Result {
        self.named("norm", || {
            let (normed, inverse) = rows::norm(x.get(), weight.get(), norm)?;
            y.put(Write::Replace, normed)?;
            inverse_rms.put(Write::Replace, inverse)
        })
    }

    fn norm_backward(
        &self,
        x: &CandleTensor,
        weight: &CandleTensor,
        norm: RmsNorm,
        inverse_rms: &CandleTensor,
        dy: &CandleTensor,
        write: Write,
        dx: &mut CandleTensor,
        weight_gradient: Option<&mut CandleTensor>,
    ) -> Result {
        self.named("norm_backward", || {
            let gradients = rows::norm_backward(x.get(), weight.get(), norm, inverse_rms.get(), dy.get())?;
            dx.put(write, gradients.x()?)?;
            match weight_gradient {
                Some(gradient) => gradient.put(Write::Add, gradients.weight()?),
                None => Ok(()),
            }
        })
    }

    fn rope(
        &self,
        x: &mut CandleTensor,
        tables: &RopeTables<CandleTensor>,
        positions: &[u32],
        rotation: Rotation,
    ) -> Result {
        self.named("rope", || {
            let positions = self.indices(positions)?;
            let (cos, sin) = (tables.cos.get(), tables.sin.get());
            let (cos, sin) = (cos.index_select(&positions, 0)?, sin.index_select(&positions, 0)?);
            let turned = rows::rope(x.get(), &cos, &sin, tables.head_dim, tables.rotary_dims, rotation)?;
            x.put(Write::Replace, turned)
        })
    }

    fn gated(&self, activation: Activation, gate: &CandleTensor, up: &CandleTensor, y: &mut CandleTensor) -> Result {
        self.named("gated", || y.put(Write::Replace, (rows::activate(activation, gate.get())? * up.get())?))
    }

    fn gated_backward(
        &self,
        activation: Activation,
        gate: &CandleTensor,
        up: &CandleTensor,
        dy: &CandleTensor,
        dgate: &mut CandleTensor,
        dup: &mut CandleTensor,
    ) -> Result {
        self.named("gated_backward", || {
            let (gate, up, dy) = (gate.get(), up.get(), dy.get());
            let of_gate = ((dy * up)? * rows::activation_slope(activation, gate)?)?;
            dup.put(Write::Replace, (dy * rows::activate(activation, gate)?)?)?;
            dgate.put(Write::Replace, of_gate)
        })
    }

    fn attention(
        &self,
        q: &CandleTensor,
        k: &CandleTensor,
        v: &CandleTensor,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut CandleTensor,
        logsumexp: &mut CandleTensor,
    ) -> Result {
        self.named("attention", || {
            let (output, lse) = attention::forward(q.get(), k.get(), v.get(), documents, shape)?;
            y.put(Write::Replace, output)?;
            logsumexp.put(Write::Replace, lse)
        })
    }

    fn attention_backward(
        &self,
        saved: AttentionOperands<'_, CandleTensor>,
        dy: &CandleTensor,
        documents: &Documents,
        shape: &AttentionShape,
        gradients: AttentionGradients<'_, CandleTensor>,
    ) -> Result {
        self.named("attention_backward", || {
            let saved = AttentionOperands {
                q: saved.q.get(),
                k: saved.k.get(),
                v: saved.v.get(),
                y: saved.y.get(),
                logsumexp: saved.logsumexp.get(),
            };
            let [dq, dk, dv] = attention::backward(&saved, dy.get(), documents, shape)?;
            gradients.dq.put(Write::Replace, dq)?;
            gradients.dk.put(Write::Replace, dk)?;
            gradients.dv.put(Write::Replace, dv)
        })
    }

    fn cache(&self, sequences: usize, capacity: usize, shape: &AttentionShape) -> Result<CandleCache> {
        let columns = shape.num_key_value_heads * shape.head_dim;
        let zeros = || (0..sequences).map(|_| Tensor::zeros((capacity, columns), DType::F32, &self.device)).collect();
        self.named("cache", || {
            let keys: candle_core::Result<Vec<_>> = zeros();
            Ok(CandleCache { keys: keys?, values: zeros()? })
        })
    }

    fn cache_append(
        &self,
        cache: &mut CandleCache,
        k: &CandleTensor,
        v: &CandleTensor,
        documents: &Documents,
    ) -> Result {
        self.named("cache_append", || {
            for span in documents.spans() {
                let rows = |x: &CandleTensor| x.get().narrow(0, span.rows.start, span.rows.len())?.contiguous();
                cache.keys[span.slot].slice_set(&rows(k)?, 0, span.start)?;
                cache.values[span.slot].slice_set(&rows(v)?, 0, span.start)?;
            }
            Ok(())
        })
    }

    fn attention_cached(
        &self,
        q: &CandleTensor,
        cache: &CandleCache,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut CandleTensor,
    ) -> Result {
        self.named("attention_cached", || {
            y.put(Write::Replace, attention::cached(q.get(), &cache.keys, &cache.values, documents, shape)?)
        })
    }

    fn soft_cap(&self, x: &mut CandleTensor, cap: f32) -> Result {
        self.named("soft_cap", || x.put(Write::Replace, loss::soft_cap(x.get(), cap)?))
    }

    fn token_loss(
        &self,
        logits: &mut CandleTensor,
        rows: &LossRows<'_, CandleTensor>,
        gradient: LogitGradient,
        scores: &mut Vec<TokenScore>,
    ) -> Result {
        if rows.targets.is_empty() {
            return Ok(());
        }
        let Some(cross_entropy) = rows.loss.as_cross_entropy() else {
            return self.token_loss_on_host(logits, rows, gradient, scores);
        };
        self.named("token_loss", || {
            let targets = self.indices(rows.targets)?.unsqueeze(1)?;
            let scored = loss::score(logits.get(), &targets, rows.soft_cap, cross_entropy.label_smoothing)?;
            scores.extend(scored.token_scores()?);
            let LogitGradient::InPlace { scale } = gradient else { return Ok(()) };
            let gradient = (scored.gradient()? * f64::from(scale))?;
            let gradient = match rows.weights {
                Some(weights) => gradient.broadcast_mul(&self.column(weights)?)?,
                None => gradient,
            };
            logits.put(Write::Replace, gradient)
        })
    }

    fn scale_rows(&self, x: &mut CandleTensor, factors: &[f32]) -> Result {
        self.named("scale_rows", || x.put(Write::Replace, x.get().broadcast_mul(&self.column(factors)?)?))
    }

    fn sum_of_squares(&self, x: &CandleTensor) -> Result<f64> {
        let Some(x) = &x.0 else { return Ok(0.0) };
        self.named("sum_of_squares", || {
            if self.device.is_metal() {
                // Metal has no f64, in which alone the squares of all f32 are finite.
                let values: Vec<f32> = x.flatten_all()?.to_vec1()?;
                return Ok(values.iter().map(|value| f64::from(*value).powi(2)).sum());
            }
            x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar()
        })
    }

    fn update<R: Elementwise<N>, const N: usize>(&self, rule: &R, updated: Updated<'_, CandleTensor>) -> Result {
        if updated.state.iter_mut().any(|tensor| tensor.as_f32().is_none()) {
            return update_in_main_memory(self, rule, updated);
        }
        let Updated { value, gradient, state } = updated;
        let state: Vec<_> = state.iter_mut().filter_map(StateTensor::as_f32).collect();
        let state = state.try_into().unwrap_or_else(|_| panic!("a formula of {N} state tensors has as many"));
        self.named(R::NAME, || optimizer::update(rule, value, gradient, state))
    }
}

crate::composed_blocks!(Candle);

impl Candle {
    /// Runs the body of an operation, has it recorded, and names it in the error.
    fn named<T>(&self, operation: &'static str, body: impl FnOnce() -> candle_core::Result<T>) -> Result<T> {
        let _kernel = self.profile.kernel(operation, Work::default);
        body().map_err(|source| KernelError { kernel_set: "candle", operation, source: Box::new(source) })
    }
}

/// `a · b` of f32 or bf16 matrices, as f32. An empty inner dimension gives zeros, which candle's products refuse.
///
/// On the processor bf16 goes on as f32, which has its values and sums: candle's product of bf16 there rounds the
/// result to it.
fn product(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    let ((rows, inner), (_, columns)) = (a.dims2()?, b.dims2()?);
    if rows * inner * columns == 0 {
        return Tensor::zeros((rows, columns), DType::F32, a.device());
    }
    if a.device().is_cpu() {
        return a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?);
    }
    a.matmul(b)?.to_dtype(DType::F32)
}

impl Candle {
    /// A value per row, `(rows, 1)`.
    fn column(&self, values: &[f32]) -> candle_core::Result<Tensor> {
        Tensor::from_slice(values, (values.len(), 1), &self.device)
    }

    /// [`Ops::token_loss`] of a loss without kernels on devices: row by row in host memory.
    fn token_loss_on_host(
        &self,
        logits: &mut CandleTensor,
        rows: &LossRows<'_, CandleTensor>,
        gradient: LogitGradient,
        scores: &mut Vec<TokenScore>,
    ) -> Result {
        let (set, (_, vocabulary)) = (InstructionSet::detect(), self.shape(logits));
        let mut values = self.read(logits)?;
        let teacher = rows.teacher.map(|teacher| self.read(teacher)).transpose()?;
        for (row, (logits, &target)) in values.chunks_exact_mut(vocabulary).zip(rows.targets).enumerate() {
            let teacher = teacher.as_ref().map(|teacher| &teacher[row * vocabulary..][..vocabulary]);
            let gradient_scale = rows.gradient(gradient, row).scale();
            let of_row = LossRow { set, logits, teacher, target: target as usize, gradient_scale };
            scores.push(row_before_cap(rows.loss, of_row, rows.soft_cap));
        }
        match gradient {
            LogitGradient::InPlace { .. } => self.write(logits, &values),
            LogitGradient::Skip => Ok(()),
        }
    }
}
