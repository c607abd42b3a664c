//! The operations a kernel set must have: small, explicit, each forward beside its backward.
//!
//! There is no autograd. A caller says which gradients it wants by calling the operation that computes them, so
//! a frozen weight never costs one. [`crate::blocks`] composes these operations into the blocks of a decoder.
//!
//! # Conventions
//! - A tensor is a row-major matrix of f32, `[rows, columns]`: one row per token, heads side by side in the columns.
//!   Vectors (norm weights, biases) are `[1, n]`. A set may compute in a narrower type; see [`Compute`].
//! - Outputs are `&mut`. With [`Write::Replace`] the output takes the result's shape, whatever it held before (a
//!   `Tensor::default()` is fine), and a set may reuse its memory. With [`Write::Add`] it must have that shape. An
//!   output without a `Write` argument is replaced, except gradients of parameters, which are always added to.
//! - Shapes that do not fit are a bug of the caller: a set may panic. Only the device's own failures are errors.
//! - Sums run in a fixed order: equal inputs give equal bits on the same machine.

use std::ops::Range;

use profile::Profile;

use crate::batch::Documents;
use crate::checkpoint::{CheckpointError, Rows};
use crate::loss::{CrossEntropy, TokenLoss};
use crate::optimizer::{Elementwise, Updated, update_in_main_memory};
use crate::random::DropoutMask;
use crate::weights::FakeQuantization;

/// A failure of the device or of the library behind a kernel set, not of its caller.
#[derive(Debug, thiserror::Error)]
#[error("kernel set `{kernel_set}` failed in {operation}")]
pub struct KernelError {
    /// The set's [`Ops::name`].
    pub kernel_set: &'static str,
    /// The operation, by its method name.
    pub operation: &'static str,
    /// What the device or library said.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// Why a weight cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// Its rows cannot be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Where the values of a weight come from.
pub enum WeightSource<'a, T> {
    /// Rows that are read, of a frozen weight: a set may have them read straight to where it stores the weight.
    Rows(&'a dyn Rows),
    /// Trained values, which the weight follows: see [`Ops::refresh`]. A set whose weights are as these values are may
    /// read them in place.
    Trained(&'a mut T),
}

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightRole {
    /// Products with activations.
    Matrix,
    /// The token embedding or the LM head, which are sensitive to quantisation: a set may store them at higher
    /// precision.
    Table,
}

/// How exactly matrices of f32 are multiplied, in PyTorch's words (`torch.set_float32_matmul_precision`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// In f32.
    #[default]
    Highest,
    /// With factors of about 16 bits, where the machine is faster with such; in f32 where it is not.
    High,
}

/// Products of up to so many rows may be summed in another order than those of more. Within each of the two kinds a
/// row's bits do not depend on how many there are.
pub const FEW_ROWS: usize = 16;

/// Keys and values of one layer for some tokens of a sequence, `[tokens, width]`.
#[derive(Debug, Clone, PartialEq)]
pub struct CachedRows {
    /// The keys.
    pub keys: Vec<f32>,
    /// The values.
    pub values: Vec<f32>,
}

/// The result of an operation.
pub type Result<T = ()> = std::result::Result<T, KernelError>;

/// The dtype that is computed in. A setting of a kernel set, fixed when the set is made.
///
/// It is that of the operands of products with a prepared weight ([`Ops::linear`], [`Ops::linear_backward`]), the
/// weight and what it is multiplied with. The residual stream, norms, adapters, gradients, moments and the loss are f32
/// under each of them, as are the values of a weight in training. How weights are stored is another matter: see
/// [`crate::weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compute {
    /// 32-bit floats throughout.
    F32,
    /// Operands of matrix multiplications rounded to bfloat16, accumulated in f32.
    Bf16,
}

impl Compute {
    /// Its name, as in a pipeline file.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// What happens to the contents of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// The output becomes the result, in the result's shape.
    Replace,
    /// The result is added to the output, which has the result's shape.
    Add,
}

/// Which operands of a [`Ops::matmul`] are transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `a · b`
    Nn,
    /// `a · bᵀ`
    Nt,
    /// `aᵀ · b`
    Tn,
}

/// Root-mean-square norm: `x / sqrt(mean(x²) + eps)` times a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean square, inside the root.
    pub eps: f32,
    /// How the stored weight enters.
    pub weight: NormWeight,
}

/// How the stored weight of a norm enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormWeight {
    /// Times `w`.
    Plain,
    /// Times `1 + w` (the gemmas).
    PlusOne,
}

/// The activation on the gate of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// The shape and the rules of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; query head `h` reads head `h / (num_attention_heads / num_key_value_heads)`.
    pub num_key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Token `i` sees token `j` only if `i - j < window`.
    pub window: Option<usize>,
    /// Scores become `cap · tanh(score / cap)`, before the mask.
    pub soft_cap: Option<f32>,
}

/// Cosines and sines of the rotary embedding, one row per position: `[positions, rotary_dims / 2]` each. Where a model
/// turns long documents by other frequencies, their rows stand below those for short ones; [`RopeTables::rows`]
/// chooses.
///
/// Of each head the first `rotary_dims` elements turn, element `i` with `i + rotary_dims / 2`; the rest stay.
pub struct RopeTables<T> {
    /// Cosines.
    pub cos: T,
    /// Sines.
    pub sin: T,
    /// Elements of a head that turn; even.
    pub rotary_dims: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Documents of more tokens than this take their rows from this one on; none where all documents share theirs.
    pub short_positions: Option<usize>,
}

/// The sense of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// The embedding itself.
    Forward,
    /// Its transpose, which is its gradient (and its inverse, where the tables hold rotations that are not scaled).
    Backward,
}

/// Rows of logits, their targets, and what is made of them.
#[derive(Clone, Copy, Debug)]
pub struct LossRows<'a, T> {
    /// The target of each row.
    pub targets: &'a [u32],
    /// The weight of each row: a factor on its gradient, not on its score. None: 1 each.
    pub weights: Option<&'a [f32]>,
    /// The loss.
    pub loss: &'a dyn TokenLoss,
    /// A teacher's logits of the same rows, `[rows, vocab_size]`, where the loss needs them.
    pub teacher: Option<&'a T>,
    /// Cap on the logits, `cap · tanh(x / cap)`; a teacher's are capped already.
    pub soft_cap: Option<f32>,
}

impl<'a, T> LossRows<'a, T> {
    /// Rows of which only the likelihood of the targets is asked.
    pub fn scored(targets: &'a [u32], soft_cap: Option<f32>) -> Self {
        Self { targets, weights: None, loss: &CrossEntropy { label_smoothing: 0.0 }, teacher: None, soft_cap }
    }

    /// What is left in one of the rows.
    pub(crate) fn gradient(&self, gradient: LogitGradient, row: usize) -> LogitGradient {
        match (gradient, self.weights) {
            (LogitGradient::InPlace { scale }, Some(weights)) => LogitGradient::InPlace { scale: scale * weights[row] },
            _ => gradient,
        }
    }
}

/// What [`Ops::token_loss`] leaves in the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogitGradient {
    /// The gradient of the summed loss with respect to the logits as they came in, times a factor.
    InPlace {
        /// The factor: the scale of the loss, or 1.
        scale: f32,
    },
    /// Nothing of use: only the scores are wanted.
    Skip,
}

impl LogitGradient {
    /// The factor on the gradient, if it is asked for.
    pub(crate) fn scale(self) -> Option<f32> {
        match self {
            Self::InPlace { scale } => Some(scale),
            Self::Skip => None,
        }
    }
}

/// How well one target was predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenScore {
    /// Negative log-likelihood of the target, in nats.
    pub nll: f32,
    /// What the loss says of the target, without its weight; [`TokenScore::nll`] for plain cross-entropy.
    pub loss: f32,
    /// Whether the target has the largest logit (the first of equal ones counts).
    pub correct: bool,
}

/// One of several products with one input; see [`Ops::linear_each`].
pub struct Linear<'a, B: Ops> {
    /// `[out, in]`.
    pub weight: &'a B::Weight,
    /// `[1, out]`.
    pub bias: Option<&'a B::Tensor>,
    /// The result, `[rows, out]`.
    pub y: &'a mut B::Tensor,
}

/// The operations of a kernel set.
pub trait Ops: Sized + Send + Sync + 'static {
    /// A matrix of activations, gradients or trained values. The default is the empty one.
    type Tensor: Default + Send + Sync;
    /// A matrix `[out, in]` prepared for products, once for a frozen one; its values need not be readable back.
    type Weight: Send + Sync;
    /// Keys and values of one layer for several sequences.
    type Cache: Send + Sync;

    /// The set's short name, as in a configuration: `cpu`, `candle`.
    fn name(&self) -> &'static str;
    /// The set, its instruction set or device, compute type and threads, in words for a log.
    fn describe(&self) -> String;
    /// The number type of the large products.
    fn compute(&self) -> Compute;

    /// Where it is recorded what takes how long.
    fn profile(&self) -> &Profile {
        static OFF: Profile = Profile::OFF;
        &OFF
    }

    // Memory.

    /// A tensor of these values, `rows × columns` of them.
    fn tensor(&self, rows: usize, columns: usize, values: &[f32]) -> Result<Self::Tensor>;
    /// A tensor of zeros.
    fn zeros(&self, rows: usize, columns: usize) -> Result<Self::Tensor>;
    /// Rows and columns.
    fn shape(&self, tensor: &Self::Tensor) -> (usize, usize);
    /// The values, row by row.
    fn read(&self, tensor: &Self::Tensor) -> Result<Vec<f32>>;
    /// Overwrites the values; the shape stays.
    fn write(&self, tensor: &mut Self::Tensor, values: &[f32]) -> Result;
    /// Makes all values zero; the shape stays.
    fn clear(&self, tensor: &mut Self::Tensor) -> Result {
        let (rows, columns) = self.shape(tensor);
        *tensor = self.zeros(rows, columns)?;
        Ok(())
    }
    /// Makes `to` a copy of `from`.
    fn copy(&self, from: &Self::Tensor, to: &mut Self::Tensor) -> Result;
    /// A weight `[out, in]`, in the form that products read.
    ///
    /// A set may move a weight of rows to memory that other processes map, or take it from there where one of them has
    /// prepared it, without reading a row. A decoder prepares its weights in the same order in every process.
    ///
    /// # Errors
    /// Fails if rows cannot be read, or the device fails.
    fn prepare(
        &self,
        source: WeightSource<'_, Self::Tensor>,
        shape: [usize; 2],
        role: WeightRole,
    ) -> std::result::Result<Self::Weight, PrepareError>;
    /// Prepares a weight of [`WeightSource::Trained`] values again after these changed.
    fn refresh(&self, weight: &mut Self::Weight, values: &mut Self::Tensor) -> Result;
    /// Announces that the values of such a weight are about to change, and that it is refreshed before it is used. Else
    /// a set whose weights share memory with these values copies them first.
    fn release(&self, _weight: &mut Self::Weight) {}
    /// A hash of the bits of the weight: any change of a single value changes it; other collisions are improbable.
    fn fingerprint(&self, weight: &Self::Weight) -> Result<u64>;
    /// The bytes of a prepared weight that a product reads.
    fn weight_bytes(&self, weight: &Self::Weight) -> u64;

    // Workers.

    /// Begins to replace tensors by their sums over all workers that train together, where the devices of their sets
    /// reach each other: false where they do not, and the tensors are as they were. All workers name tensors of the
    /// same shapes in the same order. The tensors are the sums to every later operation; [`Ops::sums_are_over`]
    /// tells when this process need not wait for them any more.
    fn begin_sums(&self, _tensors: &mut [&mut Self::Tensor]) -> Result<bool> {
        Ok(false)
    }
    /// Whether the device has done what [`Ops::begin_sums`] began.
    fn sums_are_over(&self) -> Result<bool> {
        Ok(true)
    }

    // Rows and columns.

    /// `y[i] = scale · table[ids[i]]`.
    fn embed(&self, table: &Self::Weight, ids: &[u32], scale: f32, y: &mut Self::Tensor) -> Result;
    /// `table_gradient[ids[i]] += scale · dy[i]`, in the order of `i`.
    fn embed_gradient(&self, ids: &[u32], dy: &Self::Tensor, scale: f32, table_gradient: &mut Self::Tensor) -> Result;
    /// `y[i] = x[rows[i]]`.
    fn gather_rows(&self, x: &Self::Tensor, rows: &[u32], y: &mut Self::Tensor) -> Result;
    /// `y` becomes `total` rows, zero but for `y[rows[i]] = x[i]`; `rows` are distinct.
    fn scatter_rows(&self, x: &Self::Tensor, rows: &[u32], total: usize, y: &mut Self::Tensor) -> Result;
    /// `y = x[:, from .. from + columns]`.
    fn take_columns(&self, x: &Self::Tensor, from: usize, columns: usize, y: &mut Self::Tensor) -> Result;
    /// `y` becomes the parts below each other.
    fn join_rows(&self, parts: &[&Self::Tensor], y: &mut Self::Tensor) -> Result;
    /// `y` becomes the parts side by side.
    fn join_columns(&self, parts: &[&Self::Tensor], y: &mut Self::Tensor) -> Result;
    /// `y += x`.
    fn add(&self, x: &Self::Tensor, y: &mut Self::Tensor) -> Result;
    /// `y` becomes `x` with each row moved to its grid of 8-bit numbers ([`FakeQuantization::Int8Activations`]).
    fn fake_quantize_rows(&self, x: &Self::Tensor, y: &mut Self::Tensor) -> Result {
        let (rows, features) = self.shape(x);
        let mut values = self.read(x)?;
        FakeQuantization::Int8Activations { features }.forward(&mut values);
        *y = self.tensor(rows, features, &values)?;
        Ok(())
    }
    /// Makes the gradient of what [`Ops::fake_quantize_rows`] gave for `x` that of `x`.
    fn fake_quantize_rows_backward(&self, x: &Self::Tensor, gradient: &mut Self::Tensor) -> Result {
        let (_, features) = self.shape(x);
        let mut values = self.read(gradient)?;
        FakeQuantization::Int8Activations { features }.backward(&self.read(x)?, &mut values);
        self.write(gradient, &values)
    }
    /// `sums += Σ rows of x`, `[1, columns]`: the gradient of a bias.
    fn add_column_sums(&self, x: &Self::Tensor, sums: &mut Self::Tensor) -> Result;
    /// `sums += Σ rows of x ∘ y`, `[1, columns]`: the gradient of factors on columns.
    fn add_column_dots(&self, x: &Self::Tensor, y: &Self::Tensor, sums: &mut Self::Tensor) -> Result;
    /// `y (+)= x ∘ factors (+ bias)`, each of them `[1, columns]` and the same for every row.
    fn scale_columns(
        &self,
        x: &Self::Tensor,
        factors: &Self::Tensor,
        bias: Option<&Self::Tensor>,
        write: Write,
        y: &mut Self::Tensor,
    ) -> Result;
    /// `y (+)= scale · mask ∘ x`, where the mask is 0 or `1 / (1 - probability)`. Its gradient is the same of `dy`.
    fn dropout(
        &self,
        x: &Self::Tensor,
        mask: &DropoutMask<'_>,
        scale: f32,
        write: Write,
        y: &mut Self::Tensor,
    ) -> Result;

    // Products.

    /// `y (+)= x · weightᵀ (+ bias)`: `x` is `[rows, in]`, `bias` `[1, out]`, `y` `[rows, out]`.
    fn linear(
        &self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Tensor>,
        write: Write,
        y: &mut Self::Tensor,
    ) -> Result;
    /// [`Ops::linear`] of one input with several weights, each of which replaces its result. A set may compute them
    /// together, to the same results.
    fn linear_each(&self, x: &Self::Tensor, products: Vec<Linear<'_, Self>>) -> Result {
        let mut products = products.into_iter();
        products.try_for_each(|Linear { weight, bias, y }| self.linear(x, weight, bias, Write::Replace, y))
    }
    /// `dx (+)= dy · weight`: the gradient with respect to the input of [`Ops::linear`].
    fn linear_backward(&self, dy: &Self::Tensor, weight: &Self::Weight, write: Write, dx: &mut Self::Tensor) -> Result;
    /// `y[i] += scaling · B(A x[i])` of some rows, each as if these rows were all there are: what an adapter `(A, B,
    /// scaling)` adds.
    fn add_low_rank(
        &self,
        x: &Self::Tensor,
        rows: Range<usize>,
        (a, b, scaling): (&Self::Tensor, &Self::Tensor, f32),
        y: &mut Self::Tensor,
    ) -> Result {
        let (total, _) = self.shape(y);
        let gather = |rows: Range<usize>, from: &Self::Tensor| {
            let (mut part, rows) = (Self::Tensor::default(), rows.map(|row| row as u32).collect::<Vec<_>>());
            self.gather_rows(from, &rows, &mut part).map(|()| part)
        };
        let [before, mut part, after] =
            [gather(0..rows.start, y)?, gather(rows.clone(), y)?, gather(rows.end..total, y)?];
        let mut low_rank = Self::Tensor::default();
        self.matmul(Form::Nt, 1.0, &gather(rows, x)?, a, Write::Replace, &mut low_rank)?;
        self.matmul(Form::Nt, scaling, &low_rank, b, Write::Add, &mut part)?;
        self.join_rows(&[&before, &part, &after], y)
    }
    /// Adds the gradient of a weight `[out, in]` of `y = x · Wᵀ`: `dyᵀ · x`.
    fn weight_gradient(&self, dy: &Self::Tensor, x: &Self::Tensor, gradient: &mut Self::Tensor) -> Result {
        self.matmul(Form::Tn, 1.0, dy, x, Write::Add, gradient)
    }

    /// `c (+)= scale · (a times b in this form)`, for tensors that change at each step, such as adapters.
    fn matmul(
        &self,
        form: Form,
        scale: f32,
        a: &Self::Tensor,
        b: &Self::Tensor,
        write: Write,
        c: &mut Self::Tensor,
    ) -> Result;

    // Norm, rotary embedding, activation.

    /// Norms each run of `weight`-many columns of `x`: one run for a layer norm, one per head for a query or key norm.
    /// `inverse_rms` becomes `[rows, runs]`, for the backward.
    fn norm(
        &self,
        x: &Self::Tensor,
        weight: &Self::Tensor,
        norm: RmsNorm,
        y: &mut Self::Tensor,
        inverse_rms: &mut Self::Tensor,
    ) -> Result;
    /// `dx (+)=` the gradient with respect to `x`; `weight_gradient +=` that of the weight, where asked.
    #[expect(clippy::too_many_arguments, reason = "a backward has its forward's arguments and their gradients")]
    fn norm_backward(
        &self,
        x: &Self::Tensor,
        weight: &Self::Tensor,
        norm: RmsNorm,
        inverse_rms: &Self::Tensor,
        dy: &Self::Tensor,
        write: Write,
        dx: &mut Self::Tensor,
        weight_gradient: Option<&mut Self::Tensor>,
    ) -> Result;
    /// Turns each head of `x` (`[rows, heads · head_dim]`, any number of heads) in place, by the row of the tables that
    /// `table_rows` names for its row.
    ///
    /// Source: Su et al., arXiv:2104.09864, in the half-split layout of the published Llama weights.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        tables: &RopeTables<Self::Tensor>,
        table_rows: &[u32],
        rotation: Rotation,
    ) -> Result;
    /// `y = activation(gate) ∘ up`.
    fn gated(&self, activation: Activation, gate: &Self::Tensor, up: &Self::Tensor, y: &mut Self::Tensor) -> Result;
    /// The gradients of [`Ops::gated`], replaced.
    fn gated_backward(
        &self,
        activation: Activation,
        gate: &Self::Tensor,
        up: &Self::Tensor,
        dy: &Self::Tensor,
        dgate: &mut Self::Tensor,
        dup: &mut Self::Tensor,
    ) -> Result;

    // Attention.

    /// Causal attention within each document. `q` is `[rows, heads · head_dim]`, `k` and `v`
    /// `[rows, kv_heads · head_dim]`; `y` becomes the shape of `q`, `logsumexp` `[rows, heads]`, that of the scaled,
    /// capped and masked scores.
    #[expect(clippy::too_many_arguments, reason = "attention has these operands")]
    fn attention(
        &self,
        q: &Self::Tensor,
        k: &Self::Tensor,
        v: &Self::Tensor,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut Self::Tensor,
        logsumexp: &mut Self::Tensor,
    ) -> Result;
    /// The gradients of [`Ops::attention`], replaced; `y` and `logsumexp` are its results.
    fn attention_backward(
        &self,
        saved: AttentionOperands<'_, Self::Tensor>,
        dy: &Self::Tensor,
        documents: &Documents,
        shape: &AttentionShape,
        gradients: AttentionGradients<'_, Self::Tensor>,
    ) -> Result;
    /// An empty cache for `sequences` sequences of up to `capacity` tokens each.
    fn cache(&self, sequences: usize, capacity: usize, shape: &AttentionShape) -> Result<Self::Cache>;
    /// Stores keys and values of new rows: each document's at its `slot`, from its `start` on.
    fn cache_append(
        &self,
        cache: &mut Self::Cache,
        k: &Self::Tensor,
        v: &Self::Tensor,
        documents: &Documents,
    ) -> Result;
    /// Gives back the memory of a slot whose sequence has ended, where a set can, at least to other slots; another
    /// begins there at 0.
    fn cache_clear(&self, _cache: &mut Self::Cache, _slot: usize) {}
    /// A copy of the keys and values of some tokens of a slot, where a set can make one.
    fn cache_read(&self, _cache: &Self::Cache, _slot: usize, _tokens: Range<usize>) -> Option<CachedRows> {
        None
    }
    /// Puts such a copy behind the tokens that a slot has.
    fn cache_extend(&self, _cache: &mut Self::Cache, _slot: usize, _rows: &CachedRows) {
        unreachable!("a set that makes no copies is given none")
    }
    /// As [`Ops::attention`], for new rows over the cached keys and values of their slot (which hold theirs already):
    /// the row at position `p` sees positions `0 ..= p`.
    fn attention_cached(
        &self,
        q: &Self::Tensor,
        cache: &Self::Cache,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut Self::Tensor,
    ) -> Result;

    // Loss and optimizer.

    /// `x = cap · tanh(x / cap)`.
    fn soft_cap(&self, x: &mut Self::Tensor, cap: f32) -> Result;
    /// Scores one target per row of logits, appending to `scores`, and leaves the gradient in the logits if asked.
    /// With a soft cap the logits are capped first, and the gradient is that before the cap.
    fn token_loss(
        &self,
        logits: &mut Self::Tensor,
        rows: &LossRows<'_, Self::Tensor>,
        gradient: LogitGradient,
        scores: &mut Vec<TokenScore>,
    ) -> Result;
    /// Multiplies each row by a factor of its own, of which there are as many as rows.
    fn scale_rows(&self, x: &mut Self::Tensor, factors: &[f32]) -> Result;
    /// The sum of squares, in f64. Not finite exactly when an element is not finite.
    fn sum_of_squares(&self, x: &Self::Tensor) -> Result<f64>;
    /// One update by the formula of an optimizer's rule, of `N` state tensors. The default computes in main memory.
    fn update<R: Elementwise<N>, const N: usize>(&self, rule: &R, updated: Updated<'_, Self::Tensor>) -> Result {
        update_in_main_memory(self, rule, updated)
    }
}

/// The operands and results of an attention, as its backward needs them.
pub struct AttentionOperands<'a, T> {
    /// Queries.
    pub q: &'a T,
    /// Keys.
    pub k: &'a T,
    /// Values.
    pub v: &'a T,
    /// The output.
    pub y: &'a T,
    /// The log of the summed exponentials, per row and head.
    pub logsumexp: &'a T,
}

/// Where the gradients of an attention go.
pub struct AttentionGradients<'a, T> {
    /// Of the queries.
    pub dq: &'a mut T,
    /// Of the keys.
    pub dk: &'a mut T,
    /// Of the values.
    pub dv: &'a mut T,
}
