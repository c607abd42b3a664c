//! Runs the decoder over a batch: loss with gradients, scores, logits.

use std::sync::Arc;

use super::{Decoder, Layer};
use crate::batch::{Batch, BatchError, Documents, TargetScope, Targets, TokenPlace};
use crate::blocks::{AdapterRows, Blocks, HeadLoss, InputGradient, Pass, TeacherHead};
use crate::loss::{CrossEntropy, DocumentScore, TokenLoss, score_documents};
use crate::ops::{AttentionShape, KernelError, Result as KernelResult, TokenScore};
use crate::random::{Draws, StepSeed};

/// Why a batch was not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It cannot be.
    #[error("the batch does not fit the model")]
    Batch(#[from] BatchError),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// How well one target of a batch was predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TargetScore {
    /// Index in the batch of the token that was to be predicted.
    pub token: usize,
    /// Negative log-likelihood, in nats.
    pub nll: f32,
    /// Whether it was the most likely token.
    pub correct: bool,
}

/// What the blocks keep from a forward for its backward. Keep it from batch to batch: its memory is used again.
pub struct Activations<B: Blocks> {
    /// A place for each layer, or one for all: for that which ran last.
    layers: Vec<LayerActivations<B>>,
    /// Each layer's input, where layers run again; else none.
    inputs: Vec<B::Tensor>,
}

struct LayerActivations<B: Blocks> {
    attention: B::AttentionSaved,
    mlp: B::MlpSaved,
}

impl<B: Blocks> Default for Activations<B> {
    fn default() -> Self {
        Self { layers: Vec::new(), inputs: Vec::new() }
    }
}

impl<B: Blocks> Activations<B> {
    /// One place for all layers, where no backward follows.
    fn of_one_layer() -> Self {
        Self { layers: vec![LayerActivations::new()], inputs: Vec::new() }
    }

    /// Makes the places that a backward through so many layers needs.
    fn make_places(&mut self, layers: usize, recompute: Recompute) {
        let (places, inputs) = match recompute {
            Recompute::None => (layers, 0),
            Recompute::Layers => (1, layers),
        };
        self.layers.resize_with(places, LayerActivations::new);
        self.inputs.resize_with(inputs, B::Tensor::default);
    }

    /// The place of a layer.
    fn layer(&mut self, index: usize) -> &mut LayerActivations<B> {
        let places = self.layers.len();
        &mut self.layers[index % places]
    }
}

impl<B: Blocks> LayerActivations<B> {
    fn new() -> Self {
        Self { attention: Default::default(), mlp: Default::default() }
    }
}

/// How a loss and its gradients are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientOptions {
    /// The gradients are those of the loss times this; the scores are not.
    pub loss_scale: f32,
    /// What the backward computes again.
    pub recompute: Recompute,
    /// Which draws dropout makes.
    pub step: StepSeed,
}

/// What a backward computes again instead of finding it kept. It changes memory and time, and not one bit of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Every block keeps what its backward needs.
    None,
    /// Only the input of each layer is kept, and the layer's forward runs again before its backward: for about a third
    /// more arithmetic, activations take the memory of one layer and of one tensor per layer.
    Layers,
}

/// The loss of each target of a batch.
pub struct TrainingLoss<'a, B: Blocks> {
    /// The loss.
    pub token: &'a dyn TokenLoss,
    /// The model that it compares with, where it needs one. Nothing of it is trained.
    pub teacher: Option<&'a mut Decoder<B>>,
}

/// The targets of a batch, and how well each was predicted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scored {
    /// The targets.
    pub targets: Targets,
    /// A score for each.
    pub scores: Vec<TokenScore>,
}

/// Where the weights of a batch's targets come from.
pub(crate) enum TargetWeights<'a, E> {
    /// They are known before the batch runs.
    Known(&'a [f32]),
    /// They follow from the scores.
    OfScores(&'a mut WeightsOfScores<'a, E>),
}

type WeightsOfScores<'a, E> = dyn FnMut(&Targets, &[TokenScore]) -> Result<Vec<f32>, E> + 'a;

fn finite(scores: &[TokenScore]) -> bool {
    scores.iter().all(|score| score.nll.is_finite())
}

/// What of a batch goes through the head.
#[derive(Clone, Copy)]
enum Rows<'a> {
    All,
    Those(&'a [u32]),
}

impl<B: Blocks> Decoder<B> {
    /// Adds the gradients of the loss *summed* over the batch's targets, each times its weight, and returns each
    /// target's score. Where the sum is not finite there is no backward through the layers, and gradients there stay
    /// what they were.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the teacher, or the device fails.
    pub fn loss_and_gradients(
        &mut self,
        batch: &Batch,
        loss: TrainingLoss<'_, B>,
        options: GradientOptions,
        activations: &mut Activations<B>,
    ) -> Result<Scored, RunError> {
        let targets = self.prepare(batch, TargetScope::Response)?;
        let mut scored = Scored { scores: Vec::with_capacity(targets.len()), targets };
        if scored.targets.is_empty() {
            return Ok(scored);
        }
        let Scored { targets, scores } = &mut scored;
        let documents = Documents::new(&batch.document_lengths);
        activations.make_places(self.layers.len(), options.recompute);
        let ops = Arc::clone(&self.ops);
        let places = self.draws_in_training().then(|| Places::new(batch, targets));
        let draws = places.as_ref().map_or(PassDraws::default(), |places| places.draws(options.step));
        let mut teacher_hidden = B::Tensor::default();
        let teacher = match loss.teacher {
            Some(teacher) => {
                let _teacher = ops.profile().phase("teacher");
                teacher_hidden = teacher.hidden(batch, targets)?;
                Some(&*teacher)
            }
            None => None,
        };
        let forward = ops.profile().phase("forward");
        let x = self.forward(batch, &documents, Rows::Those(&targets.rows), draws, activations)?;
        drop(forward);
        let head = ops.profile().phase("head and loss");
        let mut gradient = B::Tensor::default();
        let of_head = HeadLoss {
            loss: loss.token,
            targets: &targets.ids,
            weights: targets.weights(),
            teacher: teacher.map(|teacher| teacher.as_teacher(&teacher_hidden)),
            scale: options.loss_scale,
            draws: draws.needed,
        };
        ops.head_loss(&mut self.head, self.embeddings.output_mut(), &of_head, &x, scores, &mut gradient)?;
        drop(x);
        drop(head);
        if scores.iter().any(|score| !score.loss.is_finite()) {
            return Ok(scored);
        }
        let _backward = ops.profile().phase("backward");
        self.backward(batch, &documents, targets, draws, activations, gradient)?;
        Ok(scored)
    }

    /// Adds the gradients of `Σ weight · nll` over the batch's targets, whose weights follow from the scores of all of
    /// them, and returns the scores.
    ///
    /// A head in which nothing is trained runs once: it leaves the gradients of the unweighted sum, and their rows are
    /// scaled when the weights are known. Else it runs twice, unless the weights are known before.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model, the weights cannot be had, or the device fails.
    pub(crate) fn weighted_gradients<E: From<RunError>>(
        &mut self,
        batch: &Batch,
        scope: TargetScope,
        weights: TargetWeights<'_, E>,
        options: GradientOptions,
        activations: &mut Activations<B>,
    ) -> Result<Scored, E> {
        let targets = self.prepare(batch, scope)?;
        let mut scored = Scored { scores: Vec::with_capacity(targets.len()), targets };
        if scored.targets.is_empty() {
            return Ok(scored);
        }
        let documents = Documents::new(&batch.document_lengths);
        activations.make_places(self.layers.len(), options.recompute);
        let ops = Arc::clone(&self.ops);
        let places = self.draws_in_training().then(|| Places::new(batch, &scored.targets));
        let draws = places.as_ref().map_or(PassDraws::default(), |places| places.draws(options.step));
        let forward = ops.profile().phase("forward");
        let rows = Rows::Those(&scored.targets.rows);
        let x = self.forward(batch, &documents, rows, draws, activations).map_err(RunError::from)?;
        drop(forward);
        let head = ops.profile().phase("head and loss");
        let mut gradient = B::Tensor::default();
        let of_head = |scale, ids, weights| HeadLoss {
            loss: &CrossEntropy { label_smoothing: 0.0 },
            targets: ids,
            weights,
            teacher: None,
            scale,
            draws: draws.needed,
        };
        let Self { head: head_block, embeddings, .. } = &mut *self;
        let trained = head_block.norm.weight.is_trained() || embeddings.output().is_trained();
        let output = embeddings.output_mut();
        let Scored { targets, scores } = &mut scored;
        let mut run = |loss: HeadLoss<'_, B>, scores: &mut Vec<TokenScore>, gradient: &mut B::Tensor| {
            ops.head_loss(head_block, output, &loss, &x, scores, gradient).map_err(RunError::from)
        };
        match weights {
            TargetWeights::Known(weights) if trained => {
                run(of_head(options.loss_scale, &targets.ids, Some(weights)), scores, &mut gradient)?;
            }
            TargetWeights::OfScores(weights) if trained => {
                // By the same function, for its dropout; with a factor of zero it adds nothing to gradients.
                run(of_head(0.0, &targets.ids, None), scores, &mut gradient)?;
                let weights = finite(scores).then(|| weights(targets, scores)).transpose()?;
                if let Some(weights) = weights {
                    run(of_head(options.loss_scale, &targets.ids, Some(&weights)), &mut Vec::new(), &mut gradient)?;
                }
            }
            weights => {
                run(of_head(options.loss_scale, &targets.ids, None), scores, &mut gradient)?;
                let found = match weights {
                    TargetWeights::Known(weights) => weights.to_vec(),
                    TargetWeights::OfScores(weights) if finite(scores) => weights(targets, scores)?,
                    TargetWeights::OfScores(_) => Vec::new(),
                };
                if finite(scores) {
                    ops.scale_rows(&mut gradient, &found).map_err(RunError::from)?;
                }
            }
        }
        drop(x);
        drop(head);
        if !finite(scores) {
            return Ok(scored);
        }
        let _backward = ops.profile().phase("backward");
        self.backward(batch, &documents, &scored.targets, draws, activations, gradient).map_err(RunError::from)?;
        Ok(scored)
    }

    /// Scores the targets of a scope as the training step of these draws does, without gradients; without draws, as
    /// the model is used.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the device fails.
    pub(crate) fn score_targets(
        &mut self,
        batch: &Batch,
        scope: TargetScope,
        step: Option<StepSeed>,
    ) -> Result<Scored, RunError> {
        let targets = self.prepare(batch, scope)?;
        let mut scores = Vec::with_capacity(targets.len());
        if !targets.is_empty() {
            let documents = Documents::new(&batch.document_lengths);
            let step = step.filter(|_| self.draws_in_training());
            let places = step.map(|step| (Places::new(batch, &targets), step));
            let draws = places.as_ref().map_or(PassDraws::default(), |(places, step)| places.draws(*step));
            let one_layer = &mut Activations::of_one_layer();
            let x = self.forward(batch, &documents, Rows::Those(&targets.rows), draws, one_layer)?;
            self.ops.head_scores(&self.head, self.embeddings.output(), &x, &targets.ids, &mut scores)?;
        }
        Ok(Scored { targets, scores })
    }

    /// The log-probabilities of a batch's documents that have a target, each with its index in the batch.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the device fails.
    pub fn score_documents(
        &mut self,
        batch: &Batch,
        scope: TargetScope,
    ) -> Result<Vec<(usize, DocumentScore)>, RunError> {
        let Scored { targets, scores } = self.score_targets(batch, scope, None)?;
        Ok(score_documents(batch, &targets, &scores, &[]))
    }

    /// The residual stream after the last layer in the rows of some targets, `[targets, hidden_size]`.
    fn hidden(&mut self, batch: &Batch, targets: &Targets) -> Result<B::Tensor, RunError> {
        self.prepare(batch, TargetScope::Response)?;
        let documents = Documents::new(&batch.document_lengths);
        let one_layer = &mut Activations::of_one_layer();
        Ok(self.forward(batch, &documents, Rows::Those(&targets.rows), PassDraws::default(), one_layer)?)
    }

    /// The head that a student's loss reads logits from, over the residual stream of the same rows.
    fn as_teacher<'a>(&'a self, x: &'a B::Tensor) -> TeacherHead<'a, B> {
        TeacherHead { head: &self.head, output: self.embeddings.output(), x }
    }

    /// Scores each target of the batch.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the device fails.
    pub fn score(&mut self, batch: &Batch) -> Result<Vec<TargetScore>, RunError> {
        let Scored { targets, scores } = self.score_targets(batch, TargetScope::Response, None)?;
        let of_row = |(&row, score): (&u32, &TokenScore)| TargetScore {
            token: row as usize + 1,
            nll: score.nll,
            correct: score.correct,
        };
        Ok(targets.rows.iter().zip(&scores).map(of_row).collect())
    }

    /// The logits of every token, `[tokens, vocab_size]`.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the device fails.
    pub fn logits(&mut self, batch: &Batch) -> Result<Vec<f32>, RunError> {
        self.prepare(batch, TargetScope::Response)?;
        let documents = Documents::new(&batch.document_lengths);
        let x = self.forward(batch, &documents, Rows::All, PassDraws::default(), &mut Activations::of_one_layer())?;
        let mut logits = B::Tensor::default();
        self.ops.head_logits(&self.head, self.embeddings.output(), &x, &mut logits)?;
        Ok(self.ops.read(&logits)?)
    }

    /// The residual stream after each layer (before the last norm), `[tokens, hidden_size]`, for comparing two models.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the device fails.
    pub fn layer_outputs(&mut self, batch: &Batch) -> Result<Vec<Vec<f32>>, RunError> {
        self.prepare(batch, TargetScope::Response)?;
        let documents = Documents::new(&batch.document_lengths);
        let mut x = self.embed(&batch.input_ids)?;
        let pass = Pass { documents: &documents, rope: &self.rope, draws: None, adapters: &[] };
        let mut saved = LayerActivations::<B>::new();
        let mut outputs = Vec::with_capacity(self.layers.len());
        for Layer { attention, mlp } in &self.layers {
            self.ops.attention_block(attention, &pass, &mut x, &mut saved.attention)?;
            self.ops.mlp_block(mlp, None, &mut x, &mut saved.mlp)?;
            outputs.push(self.ops.read(&x)?);
        }
        Ok(outputs)
    }

    /// The residual stream of new rows up to the last layer's MLP, over cached keys and values, to which theirs are
    /// added. What follows is computed for the rows whose logits are needed: [`Decoder::logits_of_rows`].
    pub(crate) fn append_cached(
        &self,
        ids: &[u32],
        pass: &Pass<'_, B>,
        caches: &mut [B::Cache],
    ) -> KernelResult<B::Tensor> {
        let mut x = self.embed(ids)?;
        let last = self.layers.len() - 1;
        for (index, (Layer { attention, mlp }, cache)) in self.layers.iter().zip(caches).enumerate() {
            self.ops.attention_block_cached(attention, pass, cache, &mut x)?;
            if index < last {
                self.ops.mlp_block_of(mlp, pass.adapters, &mut x)?;
            }
        }
        Ok(x)
    }

    /// The capped logits of some rows of what [`Decoder::append_cached`] returned; `adapters` are those of these rows.
    pub(crate) fn logits_of_rows(
        &self,
        x: &B::Tensor,
        rows: &[u32],
        adapters: &[AdapterRows],
    ) -> KernelResult<B::Tensor> {
        let mut logits = B::Tensor::default();
        let needed = self.after_last_layer(x, rows, adapters)?;
        self.ops.head_logits(&self.head, self.embeddings.output(), &needed, &mut logits)?;
        Ok(logits)
    }

    /// Scores a target after each of some rows of what [`Decoder::append_cached`] returned, in a pass without
    /// adapters of rows.
    pub(crate) fn scores_of_rows(&self, x: &B::Tensor, rows: &[u32], targets: &[u32]) -> KernelResult<Vec<TokenScore>> {
        let mut scores = Vec::with_capacity(targets.len());
        let needed = self.after_last_layer(x, rows, &[])?;
        self.ops.head_scores(&self.head, self.embeddings.output(), &needed, targets, &mut scores)?;
        Ok(scores)
    }

    /// Some rows of what [`Decoder::append_cached`] returned, behind the last layer.
    fn after_last_layer(&self, x: &B::Tensor, rows: &[u32], adapters: &[AdapterRows]) -> KernelResult<B::Tensor> {
        let last = self.layers.last().expect("a decoder has a layer");
        let mut needed = B::Tensor::default();
        self.ops.gather_rows(x, rows, &mut needed)?;
        self.ops.mlp_block_of(&last.mlp, adapters, &mut needed)?;
        Ok(needed)
    }

    /// The shape of each layer's attention.
    pub(crate) fn attention_shapes(&self) -> impl Iterator<Item = &AttentionShape> {
        self.layers.iter().map(|layer| &layer.attention.shape)
    }

    /// Checks a batch, makes the rotary tables long enough, and finds the targets.
    fn prepare(&mut self, batch: &Batch, scope: TargetScope) -> Result<Targets, RunError> {
        batch.check(self.config.vocab_size, self.config.max_position_embeddings)?;
        let longest = batch.document_lengths.iter().copied().max().unwrap_or(0);
        if longest > self.rope_positions {
            self.rope_positions = longest.next_power_of_two().min(self.config.max_position_embeddings);
            self.rope = self.config.rope.tables(&*self.ops, self.rope_positions)?;
        }
        Ok(batch.targets_in(scope))
    }

    fn embed(&self, ids: &[u32]) -> KernelResult<B::Tensor> {
        let mut x = B::Tensor::default();
        let table = &self.embeddings.embed_tokens().weight;
        self.ops.embed(table, ids, self.config.embedding_scale, &mut x)?;
        if let Some((rows, _)) = self.embeddings.rows() {
            rows.add_to(&*self.ops, ids, self.config.embedding_scale, &mut x)?;
        }
        Ok(x)
    }

    /// Adds the noise on the embeddings, in a pass that draws. Its gradient is that of the embeddings: the noise is a
    /// constant.
    fn add_noise(&self, batch: &Batch, draws: PassDraws<'_>, x: &mut B::Tensor) -> KernelResult {
        let (Some(noise), Some(Draws { step, .. })) = (self.embedding_noise, draws.all) else { return Ok(()) };
        let values = noise.of(batch, self.config.hidden_size, step);
        self.ops.add(&self.ops.tensor(batch.tokens(), self.config.hidden_size, &values)?, x)
    }

    /// The residual stream of some rows after the last layer.
    fn forward(
        &self,
        batch: &Batch,
        documents: &Documents,
        rows: Rows<'_>,
        draws: PassDraws<'_>,
        kept: &mut Activations<B>,
    ) -> KernelResult<B::Tensor> {
        let mut x = self.embed(&batch.input_ids)?;
        self.add_noise(batch, draws, &mut x)?;
        let pass = Pass { documents, rope: &self.rope, draws: draws.all, adapters: &[] };
        let last = self.layers.len() - 1;
        for (index, layer) in self.layers.iter().enumerate() {
            if let Some(input) = kept.inputs.get_mut(index) {
                self.ops.copy(&x, input)?;
            }
            // Nothing reads the other rows once the last keys and values are made.
            let needed = if index == last { rows } else { Rows::All };
            layer.forward(&*self.ops, &pass, needed, draws.of_mlp(index == last), &mut x, kept.layer(index))?;
        }
        Ok(x)
    }

    /// The backward of [`Decoder::forward`], down to the lowest block in which something is trained.
    fn backward(
        &mut self,
        batch: &Batch,
        documents: &Documents,
        targets: &Targets,
        draws: PassDraws<'_>,
        kept: &mut Activations<B>,
        mut gradient: B::Tensor,
    ) -> KernelResult {
        let ops = Arc::clone(&self.ops);
        let pass = Pass { documents, rope: &self.rope, draws: draws.all, adapters: &[] };
        let last = self.layers.len() - 1;
        let rows_trained = self.embeddings.rows().is_some_and(|(_, values)| values.is_trained());
        let embedding_trained = rows_trained || self.embeddings.embed_tokens().is_trained();
        let lowest = match embedding_trained {
            true => Some((0, Part::Embedding)),
            false => self.layers.iter().enumerate().find_map(|(index, layer)| Some((index, layer.lowest_trained()?))),
        };
        let Some(lowest) = lowest else { return Ok(()) };
        for (index, layer) in self.layers.iter_mut().enumerate().skip(lowest.0).rev() {
            let input_gradient =
                |part| if (index, part) == lowest { InputGradient::Skip } else { InputGradient::Needed };
            // What the last layer kept is there still: no other ran after it.
            if let (Some(input), true) = (kept.inputs.get_mut(index), index != last) {
                let mut x = std::mem::take(input);
                layer.forward(&*ops, &pass, Rows::All, draws.of_mlp(false), &mut x, kept.layer(index))?;
            }
            let kept = kept.layer(index);
            if (index, Part::Mlp) >= lowest {
                let (block, saved) = (&mut layer.mlp, &mut kept.mlp);
                let draws = draws.of_mlp(index == last);
                ops.mlp_block_backward(block, draws, saved, &mut gradient, input_gradient(Part::Mlp))?;
            }
            if (index, Part::Attention) < lowest {
                return Ok(());
            }
            if index == last {
                let mut all = B::Tensor::default();
                ops.scatter_rows(&gradient, &targets.rows, documents.rows(), &mut all)?;
                gradient = all;
            }
            let (block, saved) = (&mut layer.attention, &mut kept.attention);
            ops.attention_block_backward(block, &pass, saved, &mut gradient, input_gradient(Part::Attention))?;
        }
        let scale = self.config.embedding_scale;
        if let Some((rows, values)) = self.embeddings.rows_mut()
            && let (_, Some(of_values)) = values.split()
        {
            rows.add_gradient(&*ops, &batch.input_ids, &gradient, scale, of_values)?;
        }
        match self.embeddings.embed_tokens_mut().split() {
            (_, Some(table)) => ops.embed_gradient(&batch.input_ids, &gradient, scale, table),
            (_, None) => Ok(()),
        }
    }
}

/// The places in the data of a batch's tokens, and of those that go through the head.
struct Places {
    all: Vec<TokenPlace>,
    needed: Vec<TokenPlace>,
}

impl Places {
    fn new(batch: &Batch, targets: &Targets) -> Self {
        let all = batch.token_places();
        let needed = targets.rows.iter().map(|&row| all[row as usize]).collect();
        Self { all, needed }
    }

    fn draws(&self, step: StepSeed) -> PassDraws<'_> {
        let draws = |places| Some(Draws { step, places });
        PassDraws { all: draws(&self.all), needed: draws(&self.needed) }
    }
}

/// Dropout's draws for all rows, and for those that go through the head.
#[derive(Clone, Copy, Default)]
struct PassDraws<'a> {
    all: Option<Draws<'a>>,
    needed: Option<Draws<'a>>,
}

impl<'a> PassDraws<'a> {
    /// Those of an MLP: the last one has only the rows that go through the head.
    fn of_mlp(&self, is_last: bool) -> Option<Draws<'a>> {
        if is_last { self.needed } else { self.all }
    }
}

/// The parts of a layer, from the bottom; below the first one's attention lies the embedding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Embedding,
    Attention,
    Mlp,
}

impl<B: Blocks> Layer<B> {
    /// The layer's forward; `x` becomes the residual stream of the needed rows.
    fn forward(
        &self,
        ops: &B,
        pass: &Pass<'_, B>,
        needed: Rows<'_>,
        mlp_draws: Option<Draws<'_>>,
        x: &mut B::Tensor,
        kept: &mut LayerActivations<B>,
    ) -> KernelResult {
        ops.attention_block(&self.attention, pass, x, &mut kept.attention)?;
        if let Rows::Those(rows) = needed {
            let all = std::mem::take(x);
            ops.gather_rows(&all, rows, x)?;
        }
        ops.mlp_block(&self.mlp, mlp_draws, x, &mut kept.mlp)
    }

    fn lowest_trained(&self) -> Option<Part> {
        if self.attention.is_trained() {
            return Some(Part::Attention);
        }
        self.mlp.is_trained().then_some(Part::Mlp)
    }
}
